"""Top-k ids by request, as engines return them: `routed_experts` `[tokens, L, K]` in JSON, JSON lines or arrays.

vLLM's server gives base64 of an .npy for each choice, dynamo a dict of base64, shape and dtype; a program may have
written nested lists.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from eplb_core.files.reading import MAX_BYTES, MAX_TEXT_BYTES, AnyArray, PathLike, bad_file, npy_array, open_regular
from eplb_core.files.trace_file import Reading, trace_of_array
from eplb_core.trace import Trace

KEY = "routed_experts"
_WANTED = (
    f"`{KEY}` [tokens, L, K] of each request: base64 of an .npy as vLLM returns it, {{data, shape, dtype}}, or lists"
)


def trace_of_lines(path: PathLike, told: Reading) -> Trace:
    """The trace of a file with a JSON value in each line."""
    arrays: list[AnyArray] = []
    with open_regular(path, MAX_BYTES) as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_TEXT_BYTES), b""), 1):
            if line.strip():
                try:
                    value = json.loads(line)
                except ValueError as error:
                    raise bad_file(
                        path, "JSON in every line", f"{error} in line {number}", "write that line again"
                    ) from error
                arrays += routed_in(path, value, f"line {number}")
    return trace_of_requests(path, arrays, told)


def trace_of_requests(path: PathLike, arrays: list[AnyArray], told: Reading) -> Trace:
    """The trace of the tokens of all requests, in their order."""
    shapes = {array.shape[1:] for array in arrays}
    if len(shapes) != 1 or any(array.ndim != 3 for array in arrays):
        found = " and ".join(str(list(array.shape)) for array in arrays[:3]) or "no request with it"
        raise bad_file(path, _WANTED, found, "record with return_routed_experts, and all requests from one model")
    trace = trace_of_array(path, np.concatenate(arrays), KEY, told)
    return Trace(
        trace.load,
        path=trace.path,
        format="routed-experts",
        source=KEY,
        top_k=trace.top_k,
        notes=(f"{len(arrays)} requests, their tokens one after the other", *trace.notes),
        holds="load",
    )


def routed_in(path: PathLike, value: Any, where: str) -> Iterator[AnyArray]:
    """Ids in one JSON value: a response with `choices`, one choice, or a list of them."""
    if isinstance(value, list):
        for each in value:
            yield from routed_in(path, each, where)
    elif isinstance(value, dict):
        found = value.get(KEY)
        if found is not None:
            yield _decoded(path, found, where)
        for name in ("choices", "outputs", "meta_info", "response", "body"):
            if isinstance(value.get(name), (dict, list)):
                yield from routed_in(path, value[name], where)


def _decoded(path: PathLike, value: Any, where: str) -> AnyArray:
    try:
        if isinstance(value, str):
            raw = base64.b64decode(value, validate=True)
            if raw[:6] != b"\x93NUMPY":
                raise ValueError("bytes without a shape, as SGLang returns them: write {data, shape, dtype}")
            array = npy_array(raw, KEY)
        elif isinstance(value, dict):
            raw, shape = base64.b64decode(value["data"], validate=True), [int(n) for n in value["shape"]]
            dtype = np.dtype(str(value["dtype"]))
            if dtype.kind not in "iu" or min(shape, default=-1) < 0 or math.prod(shape) * dtype.itemsize != len(raw):
                raise ValueError(f"{len(raw)} bytes for shape {shape} of {dtype}")
            array = np.frombuffer(raw, dtype).reshape(shape)
        else:
            array = np.asarray(value)
        if array.dtype.kind not in "iu":
            raise TypeError(f"dtype {array.dtype}")
    except Exception as error:
        raise bad_file(path, _WANTED, f"{type(error).__name__}: {error} in {where}", "record it again") from error
    return array
