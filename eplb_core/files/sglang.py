"""SGLang's files: recorded loads (.pt) and expert locations (.pt, .json, inline). Shapes as in SGLang 0.5.23.

Layers are rows by global layer id, dense layers included. Tensors are read with `weights_only` and on the CPU.
"""

from __future__ import annotations

import io
import json
import os
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from eplb_core._arrays import BoolArray, FloatArray, IntArray
from eplb_core._extras import needed
from eplb_core.files.layout_file import LayoutFile, layout_of_map
from eplb_core.files.reading import (
    PathLike,
    bad_file,
    read_json,
    read_torch,
    reading,
    sniff,
    tensor_array,
    write_atomic,
)
from eplb_core.layout import ExpertLayout
from eplb_core.load import check_counts, fold_slots
from eplb_core.topology import Topology
from eplb_core.trace import Trace

_RECORDS = "SGLang's recorder: a dict with `logical_count`, or with `records` and `last_physical_to_logical_map`"
_MAP = "physical_to_logical_map"
_EMPTY = "SGLang takes -1 for the last expert"
_MEND = "give an expert location of SGLang, or another kind of layout file"


# ---- recorded loads --------------------------------------------------------------------------------------------------


def read_recorder_file(path: PathLike) -> Trace:
    """Read one file of the recorder: modes stat and stat_approx (`logical_count`), per_pass and per_token (`records`).

    Raises:
        FileFormatError: Not such a file.
    """
    return trace_of_recorder(path, read_torch(path))


def trace_of_recorder(path: PathLike, found: object) -> Trace:
    """The trace in what one file of the recorder holds; errors as `read_recorder_file`."""
    with reading(path, _RECORDS, "record again with the mode stat or per_pass"):
        if isinstance(found, dict) and "logical_count" in found:
            return _from_stat(path, found)
        if isinstance(found, dict) and "records" in found:
            trace = _from_passes(path, [found])
            alone = "one rank's file: passes may lack the tokens that other ranks counted; give the folder for all"
            return replace(trace, notes=(*trace.notes, alone))
    raise bad_file(path, _RECORDS, _keys(found), "a layout (physical_to_logical_map) is no recorded load")


def is_of_passes(path: PathLike) -> bool:
    """Does a .pt hold a rank's forward passes (modes per_pass and per_token)?"""
    found = read_torch(path)
    return isinstance(found, dict) and "records" in found


def read_recorder_folder(path: PathLike) -> Trace:
    """Read the per_pass files of all ranks; passes are matched by id and summed over ranks.

    Raises:
        FileFormatError: No such files, or they do not fit each other.
    """
    files = sorted(file for file in Path(path).iterdir() if file.suffix == ".pt")
    if not files:
        raise bad_file(path, "a folder of recorded .pt files, or one with meta_info.json", "neither", "give the folder")
    packs = []
    for file in files:
        found = read_torch(file)
        if not isinstance(found, dict) or "records" not in found:
            raise bad_file(file, "a dict with `records`", _keys(found), "a folder must have files of one mode")
        packs.append(found)
    with reading(path, _RECORDS, "all files must come from one run"):
        return _from_passes(path, packs)


def _from_stat(path: PathLike, found: dict[str, Any]) -> Trace:
    counts = check_counts(tensor_array(path, found["logical_count"], "logical_count"), "logical_count")
    if counts.ndim == 2:
        return Trace(counts, path=os.fspath(path), format="sglang-stat", source="SGLang recorder")
    if counts.ndim != 3:
        raise ValueError(f"logical_count has shape {list(counts.shape)}")
    rows, notes = _ring_order(counts.sum(axis=(1, 2)) > 0)
    return Trace(counts[rows], path=os.fspath(path), format="sglang-stat", source="SGLang recorder", notes=notes)


def _ring_order(used: BoolArray) -> tuple[IntArray, tuple[str, ...]]:
    """Rows of a circular buffer with load, oldest first where that can be told, and what to say about it."""
    rows = np.flatnonzero(used)
    total = len(used)
    if len(rows) == total:
        return rows, ("no row is empty, so the recorder's ring was full: the oldest window need not be the first",)
    notes = [f"{total - len(rows)} of {total} rows had no load (never filled, or idle) and are left out"]
    starts = np.flatnonzero(used & ~np.roll(used, 1))
    if len(starts) == 1 and starts[0] > 0 and len(rows):
        # One run of rows that wraps: it was written from `start` on, through the end of the ring to its beginning.
        rows = (starts[0] + np.arange(len(rows))) % total
        if (np.diff(rows) < 0).any():
            notes.append(f"the ring was rotated: row {starts[0]} follows the empty rows and is put first")
    elif len(starts) > 1:
        notes.append("empty rows lie in several places: the oldest window need not be the first")
    return rows.astype(np.int64), tuple(notes)


def _from_passes(path: PathLike, packs: list[dict[str, Any]]) -> Trace:
    p2l = _map_of(path, packs[0])
    by_pass: dict[int, list[IntArray]] = defaultdict(list)
    seen = set()
    for pack in packs:
        if not np.array_equal(_map_of(path, pack), p2l):
            raise ValueError("the ranks' last_physical_to_logical_map differ")
        for record in pack["records"]:
            number, rank = int(record["forward_pass_id"]), int(record["rank"])
            if (number, rank) in seen:
                raise ValueError(f"forward pass {number} of rank {rank} is there twice")
            seen.add((number, rank))
            counts = tensor_array(path, record["global_physical_count"], "global_physical_count")
            if counts.shape != p2l.shape:
                raise ValueError(f"global_physical_count is {list(counts.shape)}, the map {list(p2l.shape)}")
            by_pass[number].append(check_counts(counts, "global_physical_count"))
    if not by_pass:
        raise ValueError("no forward pass was recorded")
    passes = sorted(by_pass)
    counts = np.stack([np.sum(by_pass[number], axis=0, dtype=np.int64) for number in passes])
    note = (
        "counts per slot were folded to experts by the last map: wrong for passes before a rebalance, if there was one"
    )
    return Trace(
        fold_slots(counts, p2l, int(p2l.max(initial=0)) + 1),
        windows=tuple(f"pass {number}" for number in passes),
        path=os.fspath(path),
        format="sglang-per-pass",
        source="SGLang recorder",
        notes=(note,),
    )


def _map_of(path: PathLike, pack: dict[str, Any]) -> IntArray:
    if pack.get("last_physical_to_logical_map") is None:
        raise ValueError("no last_physical_to_logical_map, without which counts per slot say nothing of experts")
    p2l = tensor_array(path, pack["last_physical_to_logical_map"], "last_physical_to_logical_map").astype(np.int64)
    if p2l.ndim != 2 or p2l.max(initial=0) >= p2l.shape[1]:
        raise ValueError(f"last_physical_to_logical_map is {list(p2l.shape)} with ids up to {p2l.max(initial=0)}")
    return p2l


def _keys(found: object) -> str:
    if isinstance(found, dict):
        return f"a dict with {', '.join(map(repr, found)) or 'nothing'}"
    return f"a {type(found).__name__}"


# ---- expert locations (--init-expert-location) -----------------------------------------------------------------------


def read_expert_location(
    path: PathLike, *, topology: Topology | None = None, num_experts: int | None = None
) -> LayoutFile:
    """Read a layout as `--init-expert-location` takes it: a .pt or .json file, or inline JSON that starts with `{`.

    Args:
        path: The file, or the JSON text itself.
        topology: Ranks and nodes, which these files do not say.
        num_experts: Logical experts; default: the largest id and one more.

    Raises:
        FileFormatError: No valid layout in it, or no topology given.
    """
    with reading(path, f"a dict with `{_MAP}` [L, P]", _MEND):
        found = read_torch(path) if sniff(path) == "torch" else read_json(path)
        if not isinstance(found, dict) or _MAP not in found:
            what = _keys(found)
            mend = (
                "`logical_count` is a load, not a layout: plan from it" if "logical_count" in what else "give a layout"
            )
            raise bad_file(path, f"a dict with `{_MAP}`", what, mend)
        p2l = tensor_array(path, found[_MAP], _MAP)
    extra = sorted(map(str, found.keys() - {_MAP}))
    notes = (f"SGLang refuses the further keys {', '.join(extra)}",) if extra else ()
    return layout_of_map(path, p2l, topology=topology, num_experts=num_experts, format="sglang", notes=notes)


def write_expert_location(layout: ExpertLayout, path: PathLike, *, binary: bool | None = None) -> None:
    """Write a layout for `--init-expert-location`.

    Args:
        layout: The layout; one row per layer of the model, dense ones included.
        path: File to write.
        binary: torch's format instead of JSON; default: by the ending, `.pt` is torch's.

    Raises:
        ValueError: The layout has an empty slot, which SGLang would take for the last expert.
    """
    _write(path, _MAP, full_map(layout, _EMPTY), binary)


def _write(path: PathLike, name: str, values: IntArray | FloatArray, binary: bool | None = None) -> None:
    if binary if binary is not None else os.fspath(path).endswith(".pt"):
        torch = needed("torch", "torch", "writing a .pt file")
        stream = io.BytesIO()
        torch.save({name: torch.from_numpy(values.copy())}, stream)
        write_atomic(path, stream.getvalue())
    else:
        write_atomic(path, (json.dumps({name: values.tolist()}) + "\n").encode())


def inline_expert_location(layout: ExpertLayout) -> str:
    """A layout as the text that `--init-expert-location` takes instead of a file; errors as `write_expert_location`."""
    return json.dumps({_MAP: full_map(layout, _EMPTY).tolist()})


def write_logical_count(trace: Trace, path: PathLike) -> None:
    """Write a load for `--init-expert-location`, from which SGLang plans at start: .pt by the ending, else JSON."""
    _write(path, "logical_count", trace.load)


def inline_logical_count(trace: Trace) -> str:
    """A load as the text that `--init-expert-location` takes instead of a file."""
    return json.dumps({"logical_count": trace.load.tolist()})


def full_map(layout: ExpertLayout, why: str) -> IntArray:
    """The map of a layout without empty slots; others raise ValueError naming layer, slot and `why`."""
    p2l = layout.physical_to_logical_map
    if (p2l < 0).any():
        layer, slot = (int(i) for i in np.argwhere(p2l < 0)[0])
        more = f"; {int((p2l < 0).sum()) - 1} more" if (p2l < 0).sum() > 1 else ""
        raise ValueError(
            f"the slot must not be empty at layer {layer}, slot {slot}{more}: {why}; plan with a number of slots that "
            f"the {layout.topology.num_ranks} ranks divide"
        )
    return p2l
