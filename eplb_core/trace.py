"""Recorded expert load: the trace file, and reading what engines record.

A trace file is an .npz with `expert_load [T, L, E]` in the smallest signed integer that holds it (or float64) and
`facts`, a JSON text. Reading looks at the content, never at the name; each engine's own formats are in its adapter.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, cast

import numpy as np

from eplb_core._arrays import ArrayLike, FloatArray, IntArray, check_kind, check_load, read_only, to_list, to_numpy
from eplb_core._text import quoted
from eplb_core.files import reading as _files
from eplb_core.files.reading import AnyArray, PathLike, bad_file
from eplb_core.load import TraceFault, check_counts, check_trace

TRACE_FORMAT = "eplb-trace-1"
_WANTED = "an expert load [L, E] or [T, L, E]"
_PREFERRED = ("expert_load", "load", "logical_count")


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Windows of expert load and what is known of them. Immutable; valid once it exists.

    Args:
        load: `[T, L, E]` or `[L, E]` (one window), integers or floats, finite and 0 or more. Copied.

    Raises:
        ValueError: A value is negative, NaN or infinite, a shape is wrong, or a sequence has the wrong length.
        TypeError: Not numbers.

    Example:
        >>> Trace(np.array([[3, 0, 5]])).load.shape
        (1, 1, 3)
    """

    load: IntArray | FloatArray
    """Tokens routed to each logical expert, `[T, L, E]`, int64 or float64, read-only."""
    windows: tuple[str, ...] = ()
    """A name for each window, `[T]`, or empty."""
    layer_ids: tuple[int, ...] = ()
    """The model's number of each layer (row), `[L]`, or empty where rows are all that is known."""
    top_k: int | None = None
    """Experts per token, where known."""
    source: str = ""
    """Where the numbers come from, in words."""
    path: str = ""
    """File that was read, or empty."""
    format: str = "memory"
    """Which format the file had."""
    notes: tuple[str, ...] = ()
    """What reading did beyond copying: rows left out, order restored, counts folded."""

    def __post_init__(self) -> None:
        load = check_trace_load(self.load)
        object.__setattr__(self, "load", read_only(load))
        for name, length in (("windows", load.shape[0]), ("layer_ids", load.shape[1])):
            given = tuple(to_list(getattr(self, name), name))
            object.__setattr__(self, name, given)
            if given and len(given) != length:
                raise ValueError(f"`{name}` ({len(given)} entries) must be empty or have {length}, as `load` has")
        object.__setattr__(self, "notes", tuple(to_list(self.notes, "notes")))

    @property
    def num_windows(self) -> int:
        """Windows T."""
        return int(self.load.shape[0])

    @property
    def num_layers(self) -> int:
        """Layers L."""
        return int(self.load.shape[1])

    @property
    def num_experts(self) -> int:
        """Logical experts E."""
        return int(self.load.shape[2])

    @property
    def faults(self) -> tuple[TraceFault, ...]:
        """What `check_trace` finds."""
        return check_trace(self.load, top_k=self.top_k)

    def __repr__(self) -> str:
        return f"Trace(load=[{self.num_windows}, {self.num_layers}, {self.num_experts}], source={self.source!r})"


def check_trace_load(value: ArrayLike) -> IntArray | FloatArray:
    """`[T, L, E]` as a new int64 array for integers and float64 for floats; `[L, E]` becomes one window."""
    array = to_numpy(value, "load")
    checked = check_load(array, "load", (2, 3))
    load: IntArray | FloatArray = check_counts(array, "load") if array.dtype.kind in "iu" else checked.copy()
    if load.shape[-1] == 0:
        raise ValueError(f"`load` (shape {list(load.shape)}) must have one expert or more")
    shape = (1, *load.shape) if load.ndim == 2 else load.shape
    return cast("IntArray | FloatArray", np.ascontiguousarray(load.reshape(shape)))


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
    _files.write_atomic(path, stream.getvalue())


def load_trace(path: PathLike, *, key: str | None = None) -> Trace:
    """Read a recorded load: a trace file, plain arrays, or what an engine wrote.

    Read are: this library's .npz; any .npz or .npy with one `[T, L, E]` or `[L, E]` array (several `[L, E]` of one
    shape become windows); JSON with `logical_count`; SGLang's recorder files (.pt, or a folder of them per rank);
    a folder of TensorRT-LLM's expert statistics.

    Args:
        path: File or folder.
        key: Name of the array to take where a file has several.

    Returns:
        The trace; `notes` says what reading had to do, `faults` what is wrong with the recording.

    Raises:
        FileFormatError: Truncated, foreign, hostile or absurdly large; the text says what was expected and found.
        OSError: No such file, or no permission.

    Cost:
        Reads the file once, whole. Files that declare more than 4 GiB are refused before memory is taken.
    """
    from eplb_core.files import sglang as sglang_files
    from eplb_core.files import tensorrt_llm

    kind = _files.sniff(path)
    with _files.reading(path, _WANTED, "record it again, or mend the file"):
        if kind == "folder":
            if os.path.exists(os.path.join(path, "meta_info.json")):
                return tensorrt_llm.read_statistics(path)
            return sglang_files.read_recorder_folder(path)
        if kind in ("npz", "npy"):
            return _from_arrays(path, _files.read_npz(path), key)
        if kind == "torch":
            return sglang_files.read_recorder_file(path)
        if kind == "json":
            return _from_json(path)
    found = f"{kind} content" if kind != "empty" else "an empty file"
    raise bad_file(path, _WANTED, found, 'save the counts by `numpy.save`, or as JSON {"logical_count": [[...]]}')


def demo_trace() -> Trace:
    """The trace that comes with the package: a stretch of text routing with a sudden change of topic.

    112 windows of 8,192 tokens through a 16-layer model of 128 experts, top-8, trained on text in 26 languages and
    on code; the mixture of texts drifts, and switches at window 56.
    """
    with resources.as_file(resources.files("eplb_core") / "data" / "moe128_demo.npz") as path:
        return load_trace(path)


# ---- arrays ----------------------------------------------------------------------------------------------------------


def _from_arrays(path: PathLike, arrays: dict[str, AnyArray], key: str | None) -> Trace:
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
    raise bad_file(path, _WANTED, _listed(arrays), mend)


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


def _from_json(path: PathLike) -> Trace:
    found = _files.read_json(path)
    if isinstance(found, dict) and "logical_count" in found:
        load = _files.tensor_array(path, found["logical_count"], "logical_count")
        return Trace(load, path=os.fspath(path), format="json", source="logical_count")
    if isinstance(found, dict) and "physical_to_logical_map" in found:
        raise bad_file(path, _WANTED, "a layout", "give a recorded load")
    what = (
        f"a dict with {', '.join(map(repr, found)) or 'nothing'}" if isinstance(found, dict) else type(found).__name__
    )
    raise bad_file(path, "JSON with `logical_count` [L, E] or [T, L, E]", what, "give a recorded load")


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
