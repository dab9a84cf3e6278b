"""Trace files: `eplb-trace-1`, and plain arrays and JSON taken as a load.

A trace file is an .npz with `expert_load [T, L, E]` in the smallest signed integer that holds it (or float64) and
`facts`, a JSON text.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from eplb_core._arrays import check_kind
from eplb_core._text import quoted
from eplb_core.files.reading import AnyArray, PathLike, bad_file, read_json, tensor_array, write_atomic
from eplb_core.trace import Trace

TRACE_FORMAT = "eplb-trace-1"
WANTED = "an expert load [L, E] or [T, L, E]"
_PREFERRED = ("expert_load", "load", "logical_count")


def save_trace(trace: Trace, path: PathLike) -> None:
    """Write a trace file; the old file stays until the new one is whole.

    Args:
        trace: What to write; integers come back as int64, floats as float64, equal to the last bit.
        path: File to write, whatever its ending.
    """
    load: AnyArray = check_kind(trace, "trace", Trace).load
    if load.dtype == np.int64:
        top = int(load.max(initial=0))
        load = load.astype(next(t for t in (np.int16, np.int32, np.int64) if top <= np.iinfo(t).max))
    facts = {
        "format": TRACE_FORMAT,
        "source": trace.source,
        "windows": list(trace.windows),
        "layer_ids": list(trace.layer_ids),
        "top_k": trace.top_k,
        "notes": list(trace.notes),
    }
    stream = io.BytesIO()
    np.savez_compressed(stream, expert_load=load, facts=np.array(json.dumps(facts)))
    write_atomic(path, stream.getvalue())


def trace_from_arrays(path: PathLike, arrays: dict[str, AnyArray], key: str | None) -> Trace:
    """The trace that the arrays of an .npz or .npy hold."""
    if key is None and "facts" in arrays and "expert_load" in arrays:
        return _own(path, arrays)
    if key is not None and key not in arrays:
        raise bad_file(path, f"an array `{key}`", _listed(arrays), "give one of these as the key")
    candidates = {
        name: array
        for name, array in arrays.items()
        if array.ndim in (2, 3) and array.dtype.kind in "iuf" and array.size
    }
    name = key if key is not None else next((n for n in _PREFERRED if n in candidates), None)
    if name is None and len(candidates) == 1:
        name = next(iter(candidates))
    top_k = _scalar(arrays, "top_k", "topk")
    if name is not None:
        source = f"array `{name}`" if name else "the array"
        return Trace(arrays[name], path=os.fspath(path), format="numpy", source=source, top_k=top_k)
    shapes = {array.shape for array in candidates.values()}
    if len(shapes) == 1 and all(array.ndim == 2 for array in candidates.values()):
        note = f"{len(candidates)} arrays [L, E] were taken as windows, in the order of the file"
        stacked = np.stack(list(candidates.values()))
        names = tuple(candidates)
        return Trace(
            stacked, names, path=os.fspath(path), format="numpy", source="its arrays", notes=(note,), top_k=top_k
        )
    mend = "name the array to take by `key` (--key)" if candidates else "save the counts in one of these shapes"
    raise bad_file(path, WANTED, _listed(arrays), mend)


def trace_from_json(path: PathLike) -> Trace:
    """The trace that a JSON file holds as `logical_count`."""
    found = read_json(path)
    if isinstance(found, dict) and "logical_count" in found:
        load = tensor_array(path, found["logical_count"], "logical_count")
        return Trace(load, path=os.fspath(path), format="json", source="logical_count")
    if isinstance(found, dict) and "physical_to_logical_map" in found:
        raise bad_file(path, WANTED, "a layout", "give a recorded load")
    what = (
        f"a dict with {', '.join(map(repr, found)) or 'nothing'}" if isinstance(found, dict) else type(found).__name__
    )
    raise bad_file(path, "JSON with `logical_count` [L, E] or [T, L, E]", what, "give a recorded load")


def _own(path: PathLike, arrays: dict[str, AnyArray]) -> Trace:
    facts = json.loads(str(arrays["facts"]))
    if not isinstance(facts, dict) or facts.get("format") != TRACE_FORMAT:
        found = facts.get("format") if isinstance(facts, dict) else type(facts).__name__
        raise bad_file(path, f"format {TRACE_FORMAT}", repr(found), "it comes from another version: save it again")
    top_k = facts.get("top_k")
    return Trace(
        arrays["expert_load"],
        windows=texts(facts.get("windows", [])),
        layer_ids=whole_numbers(facts.get("layer_ids", [])),
        top_k=None if top_k is None else whole_numbers([top_k])[0],
        source=str(facts.get("source", "")),
        path=os.fspath(path),
        format=TRACE_FORMAT,
        notes=texts(facts.get("notes", [])),
    )


def _scalar(arrays: dict[str, AnyArray], *names: str) -> int | None:
    for name in names:
        if name in arrays and arrays[name].shape == () and arrays[name].dtype.kind in "iu":
            return int(arrays[name])
    return None


def _listed(arrays: dict[str, AnyArray]) -> str:
    shown = [f"{name or 'one array'} {list(array.shape)} {array.dtype}" for name, array in arrays.items()]
    return "; ".join(shown) or "no array"


def texts(value: Any) -> tuple[str, ...]:
    """A list of strings out of a file."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(text, str) for text in value):
        raise TypeError(f"{quoted(value)} must be a list of strings")
    return tuple(value)


def whole_numbers(value: Any) -> tuple[int, ...]:
    """A list of ints out of a file."""
    if not isinstance(value, Sequence) or any(isinstance(n, bool) or not isinstance(n, int) for n in value):
        raise TypeError(f"{quoted(value)} must be a list of integers")
    return tuple(value)
