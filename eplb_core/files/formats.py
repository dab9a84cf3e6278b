"""Which formats files can be converted to, and telling layouts from traces."""

from __future__ import annotations

from collections.abc import Sequence

from eplb_core.files import reading, tensorrt_llm, vllm_ascend
from eplb_core.files import sglang as sglang_files
from eplb_core.files.layout_file import save_layout
from eplb_core.files.reading import PathLike
from eplb_core.layout import ExpertLayout
from eplb_core.trace import Trace, save_trace

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
        return "physical_to_logical_map" in reading.read_npz(path)
    if kind not in ("json", "torch"):
        return kind == "text"
    found = reading.read_json(path) if kind == "json" else reading.read_torch(path)
    return isinstance(found, dict) and not {"physical_to_logical_map", "layer_list"}.isdisjoint(found)


def write_layout(layout: ExpertLayout, path: PathLike, to: str, layer_ids: Sequence[int] = ()) -> None:
    """Write a layout in one of `LAYOUT_FORMATS`; SGLang's to `INLINE` too.

    Raises:
        ValueError: There is no file, the format cannot express the layout, or there is no such format for layouts.
    """
    _check_target(path, to)
    if to == "eplb":
        save_layout(layout, path, layer_ids=layer_ids)
    elif to == "sglang" and path == INLINE:
        print(sglang_files.inline_expert_location(layout))
    elif to == "sglang":
        sglang_files.write_expert_location(layout, path)
    elif to == "vllm-ascend":
        vllm_ascend.write_expert_map(layout, path, layer_ids=layer_ids)
    elif to == "tensorrt-llm":
        tensorrt_llm.write_config(layout, path, layer_ids=layer_ids)
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
