"""Trace files: `eplb-trace-1`, and plain arrays and JSON taken as a load.

A trace file is an .npz with `expert_load [T, L, E]` in the smallest signed integer that holds it (or float64) and
`facts`, a JSON text.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from eplb_core._arrays import check_int, check_kind
from eplb_core._text import counted, quoted
from eplb_core.contents import Contents, contents_of, refused, to_tokens
from eplb_core.files.reading import AnyArray, PathLike, bad_file, reading, tensor_array, write_atomic
from eplb_core.load import count_topk
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


class Reading(NamedTuple):
    """What a reader was told of the numbers in a file."""

    key: str | None = None
    """Name of the array to take."""
    holds: str = ""
    """load or tokens, where the caller knows."""
    num_experts: int | None = None
    """Logical experts E, to count top-k ids."""
    window_tokens: int | None = None
    """Tokens of a window, to count top-k ids; default: all are one window."""


def trace_from_arrays(path: PathLike, arrays: Mapping[str, AnyArray], told: Reading) -> Trace:
    """The trace that the arrays of an .npz or .npy hold."""
    if told.key is None and "facts" in arrays and "expert_load" in arrays:
        return _own(path, arrays)
    if told.key is not None and told.key not in arrays:
        raise bad_file(path, f"an array `{told.key}`", _listed(arrays), "give one of these as the key")
    name = told.key if told.key is not None else preferred(arrays)
    if name is None:
        candidates = {name: array for name, array in arrays.items() if is_numbers(array)}
        if len(candidates) > 1:
            return _windows_of(path, arrays, candidates)
        name = next(iter(candidates), None)
    if name is None:
        raise bad_file(path, WANTED, _listed(arrays), "save the counts in one of these shapes")
    if told.num_experts is None:
        told = told._replace(num_experts=_scalar(arrays, "num_experts"))
    return trace_of_array(path, arrays[name], name, told, _scalar(arrays, "top_k", "topk"))


def preferred(arrays: Mapping[str, AnyArray]) -> str | None:
    """The array whose name says that it is the load."""
    return next((name for name in _PREFERRED if name in arrays and is_numbers(arrays[name])), None)


def is_numbers(array: AnyArray) -> bool:
    """Can it be a load or ids?"""
    return array.ndim in (2, 3) and array.dtype.kind in "iuf" and array.size > 0


def trace_of_array(path: PathLike, array: AnyArray, name: str, told: Reading, top_k: int | None = None) -> Trace:
    """The trace that one array of a file holds: a load, or top-k ids, which are counted."""
    found = Contents(told.holds, "the caller says so") if told.holds else contents_of(array, name)  # type: ignore[arg-type]
    called = f"array `{name}`" if name else "the array"
    if found.kind == "tokens" and told.num_experts is not None:
        return _counted(path, array, called, found, told)
    if found.kind != "load":
        what, mend = refused(found, array, os.fspath(path))
        raise bad_file(path, WANTED, f"{called}, which holds {what}" if name else what, mend)
    if told.num_experts is not None and array.shape[-1] != told.num_experts:
        what = f"{array.shape[-1]} in {called} {list(array.shape)}, a load"
        mend = 'give holds="tokens" (--holds tokens) if it has top-k ids'
        raise bad_file(path, f"{told.num_experts} experts", what, mend)
    doubt = f"; but {found.doubt}" if found.doubt else ""
    note = f"{called} {list(array.shape)} is taken for a load: {found.why}{doubt}"
    return Trace(array, path=os.fspath(path), format="numpy", source=called, top_k=top_k, notes=(note,), holds="load")


def _counted(path: PathLike, array: AnyArray, called: str, found: Contents, told: Reading) -> Trace:
    """Tokens counted by window."""
    experts = check_int(told.num_experts, "num_experts", 1)
    with reading(path, f"top-k ids of {experts} experts, [tokens, L, K]", "give the number of experts of the model"):
        ids = to_tokens(array, called)
        ids = ids[:, None] if ids.ndim == 2 else ids
        size = len(ids) if told.window_tokens is None else check_int(told.window_tokens, "window_tokens", 1)
        windows = len(ids) // max(size, 1)
        if not windows:
            raise ValueError(f"{len(ids)} tokens, less than a window of {size}")
        load = np.stack([count_topk(ids[t * size : (t + 1) * size], experts) for t in range(windows)])
    rest = f", the last {len(ids) - windows * size:,} left out" if len(ids) > windows * size else ""
    why = f"{called} {list(array.shape)} is taken for top-k ids: {found.why}"
    note = f"{why}; counted in {counted(windows, 'window')} of {size:,} tokens{rest}"
    top_k = ids.shape[2]
    return Trace(load, path=os.fspath(path), format="numpy", source=called, top_k=top_k, notes=(note,), holds="load")


def _windows_of(path: PathLike, arrays: Mapping[str, AnyArray], candidates: dict[str, AnyArray]) -> Trace:
    """Several loads `[L, E]` of one shape, taken as windows."""
    kinds = {name: contents_of(array, name) for name, array in candidates.items()}
    loads = {name: array for name, array in candidates.items() if kinds[name].kind == "load"}
    if len({array.shape for array in loads.values()}) != 1 or any(array.ndim != 2 for array in loads.values()):
        others = {name: found.kind for name, found in kinds.items() if found.kind != "load"}
        raise bad_file(path, WANTED, _listed(arrays, others), "name the array to take by `key` (--key)")
    notes: tuple[str, ...] = (f"{len(loads)} arrays [L, E] were taken as windows, in the order of the file",)
    if len(loads) < len(candidates):
        notes += (f"left out: {', '.join(f'{name} ({kinds[name].kind})' for name in candidates if name not in loads)}",)
    return Trace(
        np.stack(list(loads.values())),
        tuple(loads),
        path=os.fspath(path),
        format="numpy",
        source="its arrays",
        notes=notes,
        top_k=_scalar(arrays, "top_k", "topk"),
        holds="load",
    )


def trace_from_json(path: PathLike, found: Any, told: Reading) -> Trace:
    """The trace that a JSON file holds as `logical_count`."""
    if isinstance(found, dict) and "logical_count" in found:
        load = tensor_array(path, found["logical_count"], "logical_count")
        return Trace(
            load,
            path=os.fspath(path),
            format="json",
            source="logical_count",
            holds="load" if told.holds == "load" else "",
        )
    if isinstance(found, dict) and "physical_to_logical_map" in found:
        raise bad_file(path, WANTED, "a layout", "give a recorded load")
    what = (
        f"a dict with {', '.join(map(repr, found)) or 'nothing'}" if isinstance(found, dict) else type(found).__name__
    )
    raise bad_file(path, "JSON with `logical_count` [L, E] or [T, L, E]", what, "give a recorded load")


def _own(path: PathLike, arrays: Mapping[str, AnyArray]) -> Trace:
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
        holds="load",
    )


def _scalar(arrays: Mapping[str, AnyArray], *names: str) -> int | None:
    for name in names:
        if name in arrays and arrays[name].shape == () and arrays[name].dtype.kind in "iu":
            return int(arrays[name])
    return None


def _listed(arrays: Mapping[str, AnyArray], kinds: Mapping[str, str] = MappingProxyType({})) -> str:
    shown = [
        f"{name or 'one array'} {list(array.shape)} {array.dtype}{f' ({kinds[name]})' if name in kinds else ''}"
        for name, array in arrays.items()
    ]
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
