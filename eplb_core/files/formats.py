"""Any file in, any file out: which format a file has, and reading and writing all of them.

Reading looks at the content, never at the name; each engine's own formats are in the file of its name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Literal

import numpy as np

from eplb_core._arrays import check_word
from eplb_core.contents import contents_of, refused
from eplb_core.files import layout_file, reading, tables, tensorrt_llm, trace_file, vllm, vllm_ascend
from eplb_core.files import sglang as sglang_files
from eplb_core.files.layout_file import LayoutFile, layout_of_map, own_layout, save_layout
from eplb_core.files.reading import AnyArray, PathLike, bad_file
from eplb_core.files.trace_file import Reading, is_numbers, preferred, save_trace, trace_from_arrays, trace_from_json
from eplb_core.layout import ExpertLayout
from eplb_core.topology import Topology
from eplb_core.trace import Trace, join_traces

LAYOUT_FORMATS = ("eplb", "sglang", "vllm-ascend", "tensorrt-llm")
TRACE_FORMATS = ("eplb", "sglang")
INLINE = "-"
"""Instead of a file: SGLang's JSON goes to the standard output, for its command line."""


def is_layout_file(path: PathLike) -> bool:
    """Does the file hold a layout, not a load? Decided by the names in it.

    Raises:
        FileFormatError: It cannot be read at all.
    """
    kind = reading.sniff(path)
    if kind in ("npz", "npy"):
        arrays = reading.read_npz(path)
        if list(arrays) == [""]:
            return contents_of(arrays[""]).kind == "map"
        return layout_file.MAP in arrays
    if kind not in ("json", "torch") or (not reading.is_inline(path) and kind == "json" and reading.is_lines(path)):
        return kind == "text"
    found = reading.read_json(path) if kind == "json" else reading.read_torch(path)
    return isinstance(found, dict) and not {"physical_to_logical_map", "layer_list"}.isdisjoint(found)


def write_layout(layout: ExpertLayout, path: PathLike, to: str, layer_ids: Sequence[int] = ()) -> None:
    """Write a layout in one of `LAYOUT_FORMATS`; SGLang's to `INLINE` too.

    Raises:
        ValueError: There is no file, the format cannot express the layout, or there is no such format for layouts.
    """
    _check_target(path, to)
    writers = {
        "eplb": save_layout,
        "vllm-ascend": vllm_ascend.write_expert_map,
        "tensorrt-llm": tensorrt_llm.write_config,
    }
    if path == INLINE:
        print(sglang_files.inline_expert_location(layout))
    elif to == "sglang":
        sglang_files.write_expert_location(layout, path)
    elif to in writers:
        writers[to](layout, path, layer_ids=layer_ids)
    else:
        raise ValueError(f"format (={to!r}) must be one of {', '.join(LAYOUT_FORMATS)} for a layout")


def write_trace(trace: Trace, path: PathLike, to: str) -> None:
    """Write a trace in one of `TRACE_FORMATS`; SGLang's to `INLINE` too.

    Raises:
        ValueError: There is no file, or no such format for traces.
    """
    _check_target(path, to)
    if to == "eplb":
        save_trace(trace, path)
    elif to == "sglang" and path == INLINE:
        print(sglang_files.inline_logical_count(trace))
    elif to == "sglang":
        sglang_files.write_logical_count(trace, path)
    else:
        raise ValueError(
            f"format (={to!r}) must be one of {', '.join(TRACE_FORMATS)} for a trace, which {path} would hold"
        )


def _check_target(path: PathLike, to: str) -> None:
    if path == INLINE and to != "sglang":
        raise ValueError(f"OUT (={INLINE}) must be a file with --to {to}; only sglang's JSON is taken inline")


def load_layout(path: PathLike, topology: Topology | None = None, num_experts: int | None = None) -> ExpertLayout:
    """Read a layout: this library's JSON or .npz, or an engine's file.

    Args:
        path: File of `save_layout`, SGLang's expert location (.pt, .json), vllm-ascend's expert map (.json),
            TensorRT-LLM's load-balancer YAML, or an .npz/.npy with a map `[L, P]`.
        topology: Ranks and nodes, for files that do not say them; for others it must agree.
        num_experts: Logical experts, likewise. Default for files that do not say it: the largest id and one more.

    Returns:
        The layout.

    Raises:
        FileFormatError: Truncated, foreign or hostile, not a valid layout, a digest that does not fit, or numbers
            other than those given.
        OSError: No such file, or no permission.
    """
    return read_layout_file(path, topology=topology, num_experts=num_experts).layout


def read_layout_file(path: PathLike, *, topology: Topology | None = None, num_experts: int | None = None) -> LayoutFile:
    """As `load_layout`, with the layer ids, the format and what was assumed."""
    kind = reading.sniff(path)
    given = {"topology": topology, "num_experts": num_experts}
    with reading.reading(path, layout_file.WANTED, layout_file.MEND):
        if kind in ("npz", "npy"):
            arrays = reading.read_npz(path)
            if "format" in arrays:
                found = {name: array.item() if array.ndim == 0 else array for name, array in arrays.items()}
                return own_layout(path, found, topology, num_experts)
            name = layout_file.MAP if layout_file.MAP in arrays else ""
            if name not in arrays:
                raise bad_file(
                    path, f"an array `{layout_file.MAP}`", ", ".join(arrays) or "no array", "a trace is no layout"
                )
            _check_is_map(path, arrays[name], name)
            return layout_of_map(path, arrays[name], topology=topology, num_experts=num_experts, format="numpy")
        if kind == "torch":
            return sglang_files.read_expert_location(path, topology=topology, num_experts=num_experts)
        if kind == "json":
            found = reading.read_json(path)
            keys = set(found) if isinstance(found, dict) else set()
            if "format" in keys:
                return own_layout(path, found, topology, num_experts)
            if "layer_list" in keys:
                return vllm_ascend.read_expert_map(path, **given)  # type: ignore[arg-type]
            return sglang_files.read_expert_location(path, topology=topology, num_experts=num_experts)
        if kind == "text":
            return tensorrt_llm.read_config(path, **given)  # type: ignore[arg-type]
    raise bad_file(
        path, layout_file.WANTED, "an empty file" if kind == "empty" else f"{kind} content", "give a layout file"
    )


def _check_is_map(path: PathLike, array: AnyArray, name: str) -> None:
    """Refuse top-k ids, and a sparse load, whose few small counts are a map of a few experts by their form."""
    found = contents_of(array, name)
    sparse = found.kind == "load" and found.sure and array.shape[-1] > 4 * (int(array.max()) + 1)
    if found.kind == "tokens" or sparse:
        what, mend = refused(found, array, os.fspath(path))
        raise bad_file(path, f"an array `{layout_file.MAP}` [L, P]", what, mend)


def load_trace(
    path: PathLike,
    *,
    key: str | None = None,
    holds: Literal["", "load", "tokens"] = "",
    num_experts: int | None = None,
    window_tokens: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Trace:
    """Read a recorded load: a trace file, plain arrays, or what an engine wrote.

    Read are: this library's .npz; any .npz, .npy, .safetensors or tensors in a .pt with one `[T, L, E]` or `[L, E]`
    array (several `[L, E]` of one shape become windows), or with top-k ids `[tokens, L, K]`, which are counted, of one
    or several requests; CSV and parquet, as `Trace.from_frame` reads tables, and CSV of numbers alone `[L, E]`; JSON
    with `logical_count`; JSON or JSON lines with an engine's `routed_experts`; SGLang's recorder files (.pt, or a
    folder of them per rank); a folder of TensorRT-LLM's expert statistics; a folder of other files, whose windows
    follow each other in order of the names.

    Args:
        path: File or folder.
        key: Name of the array to take where a file has several.
        holds: What a plain array holds, where that is known: "load" or "tokens". Default: its values and its name
            decide, and what could be either is refused.
        num_experts: Logical experts E, to count top-k ids; default: what the file says.
        window_tokens: Tokens of a window, to count top-k ids; default: all are one window.
        progress: Called with files read and in all, while a folder is read.

    Returns:
        The trace; `notes` says what an array was taken for and what reading had to do, `faults` what is wrong with the
        recording.

    Raises:
        FileFormatError: Truncated, foreign, hostile, absurdly large, or no load; the text says what was expected and
            found, and which calls read it.
        OSError: No such file, or no permission.

    Cost:
        Reads the file once, whole. Files that declare more than 4 GiB are refused before memory is taken.
    """
    check_word(holds, "holds", ("", "load", "tokens"))
    told = Reading(key, holds, num_experts, window_tokens)
    if reading.sniff(path) == "folder":
        return _trace_of_folder(path, told, progress)
    return _trace_of_file(path, told)


def _trace_of_file(path: PathLike, told: Reading) -> Trace:
    kind = reading.sniff(path)
    with reading.reading(path, trace_file.WANTED, "record it again, or mend the file"):
        if kind in ("npz", "npy"):
            return _trace_of_arrays(path, reading.read_npz(path), told)
        if kind == "safetensors":
            return _trace_of_arrays(path, reading.read_safetensors(path), told)
        if kind == "torch":
            return _trace_from_torch(path, told)
        if kind == "json":
            return _trace_of_json(path, told)
        if kind == "csv":
            return tables.trace_of_csv(path, told)
        if kind == "parquet":
            return tables.trace_of_parquet(path, told)
    found = f"{kind} content" if kind != "empty" else "an empty file"
    raise bad_file(
        path, trace_file.WANTED, found, 'save the counts by `numpy.save`, or as JSON {"logical_count": [[...]]}'
    )


def _trace_of_arrays(path: PathLike, arrays: Mapping[str, AnyArray], told: Reading) -> Trace:
    """One array or several loads; or the top-k ids of several requests."""
    if told.key is None and preferred(arrays) is None:
        requests = {name: array for name, array in arrays.items() if is_numbers(array)}
        shapes = {array.shape[1:] for array in requests.values()}
        if len(requests) > 1 and len(shapes) == 1 and all(array.ndim == 3 for array in requests.values()):
            joined = np.concatenate(list(requests.values()))
            if told.holds == "tokens" or contents_of(joined).kind == "tokens":
                return vllm.trace_of_requests(path, list(requests.values()), told)
    return trace_from_arrays(path, arrays, told)


def _trace_of_json(path: PathLike, told: Reading) -> Trace:
    """`logical_count`, an engine's responses with `routed_experts`, or such JSON in each line."""
    if not reading.is_inline(path) and reading.is_lines(path):
        return vllm.trace_of_lines(path, told)
    found = reading.read_json(path)
    arrays = list(vllm.routed_in(path, found, "the file"))
    return vllm.trace_of_requests(path, arrays, told) if arrays else trace_from_json(path, found, told)


def _trace_of_folder(path: PathLike, told: Reading, progress: Callable[[int, int], None] | None) -> Trace:
    """TensorRT-LLM's statistics, SGLang's passes by rank, or files of one kind of trace, in order of their names."""
    files = sorted((file for file in Path(path).iterdir() if file.is_file() or file.suffix == ".pt"), key=_natural)
    if any(file.name == "meta_info.json" for file in files):
        return tensorrt_llm.read_statistics(path)
    by_pass = bool(files) and files[0].suffix == ".pt" and sglang_files.is_of_passes(files[0])
    if by_pass or not files:
        return sglang_files.read_recorder_folder(path)
    traces = []
    for done, file in enumerate(files, 1):
        traces.append(_trace_of_file(file, told))
        if progress is not None:
            progress(done, len(files))
    with reading.reading(path, "files of one kind of trace", "put what belongs to another model elsewhere"):
        return join_traces(traces, path=os.fspath(path))


def _natural(file: Path) -> tuple[list[tuple[bool, int, str]], str]:
    """`pass10` after `pass9`."""
    parts = re.findall(r"\d+|\D+", file.name)
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts], file.name


def _trace_from_torch(path: PathLike, told: Reading) -> Trace:
    """SGLang's recorder, a tensor, or a dict of tensors."""
    found = reading.read_torch(path)
    named = found if isinstance(found, dict) else {"": found}
    tensors = {str(name): value for name, value in named.items() if hasattr(value, "detach")}
    if not tensors or not {"logical_count", "records", layout_file.MAP}.isdisjoint(named):
        return sglang_files.trace_of_recorder(path, found)
    return _trace_of_arrays(path, {name: reading.tensor_array(path, tensors[name], name) for name in tensors}, told)


def demo_trace() -> Trace:
    """Load the trace that comes with the package: recorded routing of text with a sudden change of topic.

    112 windows of 8,192 tokens through a 16-layer model of 128 experts, top-8, trained on text in 26 languages and
    on code; the mixture of texts drifts, and switches at window 56.
    """
    with resources.as_file(resources.files("eplb_core") / "data" / "moe128_demo.npz") as path:
        return load_trace(path)
