"""TensorRT-LLM's files: the load-balancer YAML (both ways) and the folder of expert statistics.

PyYAML and safetensors read them, after a look at their size. YAML with aliases, anchors or tags is refused before
anything is built, so that nothing in a file can expand or run.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eplb_core._arrays import IntArray
from eplb_core._extras import needed
from eplb_core.files.layout_file import LayoutFile, layout_of_map
from eplb_core.files.reading import PathLike, bad_file, read_json, read_safetensors, read_text, reading, write_atomic
from eplb_core.files.sglang import full_map
from eplb_core.files.trace_file import whole_numbers
from eplb_core.layout import ExpertLayout
from eplb_core.load import check_counts
from eplb_core.topology import Topology
from eplb_core.trace import Trace

_WANTED = "num_slots and initial_global_assignments {layer: [experts]} in plain YAML"
_MAX_BYTES, _MAX_DEPTH, _MAX_SCALAR = 4 << 20, 8, 4096  # 128 layers of 2,048 slots take 1.5 MB
_MEND = "give a load-balancer file of TensorRT-LLM, or another kind of file"


# ---- load-balancer YAML ----------------------------------------------------------------------------------------------


def read_config(
    path: PathLike,
    *,
    topology: Topology | None = None,
    num_experts: int | None = None,
    layer_ids: Sequence[int] | None = None,
) -> LayoutFile:
    """Read a load-balancer YAML.

    Args:
        path: The file.
        topology: Ranks and nodes, which the file does not say.
        num_experts: Logical experts; default: the largest id and one more.
        layer_ids: Layers of the model that are wanted, in this order. One that the file does not cover (a draft layer)
            gets the trivial layout, and a note says so. Default: the file's.

    Raises:
        FileFormatError: Not such a file, or a row that is no valid layout of `num_slots` slots.
    """
    with reading(path, _WANTED, _MEND):
        top = _parse(read_text(path, _MAX_BYTES))
        slots, assigned = top.get("num_slots"), top.get("initial_global_assignments")
        if type(slots) is not int or not isinstance(assigned, dict) or not assigned:
            raise bad_file(path, _WANTED, ", ".join(map(str, top)) or "nothing", _MEND)
        rows = {_layer_number(layer): whole_numbers(row) for layer, row in assigned.items()}
        if len(rows) < len(assigned):
            raise ValueError("a layer is there twice, once in quotes")
        for layer, row in rows.items():
            if len(row) != slots:
                mend = "assignments of another number of slots cannot be cut to fit: plan again"
                raise bad_file(path, f"num_slots (={slots}) experts", f"{len(row)} at layer {layer}", mend)
        experts = num_experts if num_experts is not None else max(max(row) for row in rows.values()) + 1
        wanted = list(rows) if layer_ids is None else [int(layer) for layer in layer_ids]
        missing = [layer for layer in wanted if layer not in rows]
        trivial = [slot % max(experts, 1) for slot in range(slots)]
        p2l = np.array([rows.get(layer, trivial) for layer in wanted], dtype=np.int64).reshape(len(wanted), slots)
    notes: tuple[str, ...] = ()
    if missing:
        notes = (f"layers {', '.join(map(str, missing))} are not in the file and get the trivial layout",)
    return layout_of_map(
        path, p2l, topology=topology, num_experts=num_experts, format="tensorrt-llm", layer_ids=wanted, notes=notes
    )


def write_config(
    layout: ExpertLayout, path: PathLike, *, layer_ids: Sequence[int] = (), layer_updates_per_iter: int = 0
) -> None:
    """Write a load-balancer YAML.

    Args:
        layout: The layout.
        path: File to write.
        layer_ids: The model's number of each row; default 0..L-1.
        layer_updates_per_iter: Layers that the engine moves an iteration; 0 keeps this layout.

    Raises:
        ValueError: The layout has an empty slot.
    """
    p2l = full_map(layout, "the engine takes every entry for an expert")
    ids = list(layer_ids) or list(range(layout.num_layers))
    lines = [f"num_slots: {layout.num_slots}", "initial_global_assignments:"]
    lines += [f"  {int(layer)}: {row}" for layer, row in zip(ids, p2l.tolist(), strict=True)]
    lines.append(f"layer_updates_per_iter: {layer_updates_per_iter}")
    write_atomic(path, ("\n".join(lines) + "\n").encode())


def _parse(text: str) -> dict[object, Any]:
    """The mapping of a YAML text of plain values: no aliases, anchors, tags or merge keys, no key twice, few levels."""
    yaml = needed("yaml", "files", "a load-balancer file of TensorRT-LLM")
    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = 0
    for event in yaml.parse(text, Loader=base):  # one at a time, before anything is built
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if getattr(event, "anchor", None) or getattr(event, "tag", None) or getattr(event, "value", "") == "<<":
            raise ValueError(f"an alias, anchor, tag or merge key in line {event.start_mark.line + 1}")
        if depth > _MAX_DEPTH or len(getattr(event, "value", "")) > _MAX_SCALAR:
            raise ValueError(f"values too deep or too long in line {event.start_mark.line + 1}")

    class Loader(base):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            found = super().construct_mapping(node, deep)
            if len(found) < len(node.value):
                raise ValueError(f"a key is there twice in the mapping of line {node.start_mark.line + 1}")
            return found

    found = yaml.load(text, Loader=Loader)
    if not isinstance(found, dict):
        raise ValueError(f"no mapping but {type(found).__name__}")
    return found


def _layer_number(key: object) -> int:
    if isinstance(key, str) and re.fullmatch(r"-?\d{1,18}", key):  # some writers put keys in quotes
        return int(key)
    return whole_numbers([key])[0]


# ---- expert statistics -----------------------------------------------------------------------------------------------


def read_statistics(path: PathLike) -> Trace:
    """Read a folder of EXPERT_STATISTIC_PATH: `meta_info.json` and `rank*.safetensors` with keys `iteration_layer`.

    A window an iteration; the ranks' counts are summed.

    Raises:
        FileFormatError: Not such a folder; an iteration that lacks a layer; ranks that do not fit.
    """
    folder = Path(path)
    facts = read_json(folder / "meta_info.json")
    with reading(path, "TensorRT-LLM's expert statistics", "record them again"):
        experts = int(facts["num_experts"])
        files = sorted(file for file in folder.iterdir() if re.fullmatch(r"rank\d+\.safetensors", file.name))
        if not files:
            raise bad_file(path, "rank*.safetensors beside meta_info.json", "none", "record them again")
        counts: dict[tuple[int, int], list[IntArray]] = defaultdict(list)
        for file in files:
            for name, row in read_safetensors(file).items():
                if row.shape != (experts,):
                    raise bad_file(file, f"[{experts}] counts", f"{list(row.shape)} in {name}", "record them again")
                iteration, layer = (int(part) for part in name.split("_"))
                counts[iteration, layer].append(check_counts(row, name))
        iterations, layers = (sorted({key[axis] for key in counts}) for axis in (0, 1))
        for key in ((iteration, layer) for iteration in iterations for layer in layers):
            if len(counts.get(key, ())) != len(files):
                what = f"{len(counts.get(key, ()))} at iteration {key[0]}, layer {key[1]}"
                raise bad_file(path, f"{len(files)} ranks' counts", what, "leave that iteration out on every rank")
        load = np.array([[np.sum(counts[i, layer], axis=0, dtype=np.int64) for layer in layers] for i in iterations])
        return Trace(
            load.reshape(len(iterations), len(layers), experts),
            windows=tuple(f"iteration {iteration}" for iteration in iterations),
            layer_ids=tuple(layers),
            top_k=facts.get("num_experts_per_token"),
            path=os.fspath(path),
            format="tensorrt-llm-statistics",
            source="TensorRT-LLM expert statistics",
            notes=(f"counts of {len(files)} ranks were summed",),
        )
