"""vllm-ascend's expert map: JSON, as `expert_map_path` reads it and `expert_map_record_path` writes it.

{"moe_layer_count": L, "layer_list": [{"layer_id": 0, "device_count": R, "device_list":
    [{"device_id": 0, "device_expert": [expert of each slot]}, ...]}, ...]}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from eplb_core._arrays import IntArray
from eplb_core._text import quoted
from eplb_core.files.layout_file import LayoutFile, layout_of_map
from eplb_core.files.reading import MAX_BYTES, PathLike, bad_file, read_json, reading, write_atomic
from eplb_core.files.sglang import full_map
from eplb_core.layout import ExpertLayout
from eplb_core.topology import Topology

_WANTED = "an expert map (moe_layer_count, layer_list, device_list, device_expert)"
_MEND = "give an expert map of vllm-ascend, or another kind of layout file"


def read_expert_map(
    path: PathLike,
    *,
    topology: Topology | None = None,
    num_experts: int | None = None,
    uneven: Literal["reject", "pad"] = "reject",
) -> LayoutFile:
    """Read an expert map.

    Args:
        path: JSON file.
        topology: Ranks and nodes; the file says R alone, so the default is R ranks of one node.
        num_experts: Logical experts; default: the largest id and one more.
        uneven: What to do with devices that have fewer experts than others: name the first and raise, or `"pad"`
            their last slots with -1.

    Raises:
        FileFormatError: Not such a file, uneven devices, layers of different devices, or no valid layout.
    """
    found = read_json(path)
    with reading(path, _WANTED, _MEND):
        layers = found["layer_list"]
        if len(layers) != found["moe_layer_count"] or not layers:
            counted = f"{len(layers)} layers"
            raise bad_file(
                path, f"moe_layer_count (={found['moe_layer_count']}) layers", counted, "add the missing rows"
            )
        rows = [_devices(path, layer) for layer in layers]
        layer_ids = [_whole(layer["layer_id"]) for layer in layers]
        width = max(len(experts) for row in rows for experts in row)
        if len(rows[0]) * width * len(rows) * 8 > MAX_BYTES:
            raise bad_file(path, "a layout of sane size", f"a device with {width} experts", "mend the file")
        for layer, row in zip(layer_ids, rows, strict=True):
            if len(row) != len(rows[0]):
                raise bad_file(path, f"{len(rows[0])} devices", f"{len(row)} at layer {layer}", "mend that layer")
            short = next((rank for rank, experts in enumerate(row) if len(experts) < width), None)
            if short is not None and uneven == "reject":
                what = f"{len(row[short])} at layer {layer}, device {short}"
                raise bad_file(path, f"{width} experts on each device", what, "fill it up, or read with uneven='pad'")
        p2l = [[expert for experts in row for expert in experts + [-1] * (width - len(experts))] for row in rows]
        ranks = len(rows[0])
        if topology is not None and topology.num_ranks != ranks:
            raise bad_file(path, f"{topology.num_ranks} devices", str(ranks), "give the topology of this file")
        array = np.array(p2l, dtype=np.int64)
    return layout_of_map(
        path,
        array,
        topology=topology or Topology(num_ranks=ranks),
        num_experts=num_experts,
        format="vllm-ascend",
        layer_ids=layer_ids,
        notes=() if topology else (f"the file does not say the nodes: {ranks} ranks taken as one node",),
    )


def _devices(path: PathLike, layer: dict[str, Any]) -> list[list[int]]:
    """Experts of each device of a layer, by device id."""
    devices = layer["device_list"]
    if len(devices) != layer["device_count"] or not devices:
        counted = f"{len(devices)} at layer {layer['layer_id']}"
        raise bad_file(path, f"device_count (={layer['device_count']}) devices", counted, "add the missing devices")
    row: list[list[int]] = [[] for _ in devices]
    seen = set()
    for device in devices:
        rank = _whole(device["device_id"])
        if rank in seen or not 0 <= rank < len(devices):
            what = f"device_id {rank}{' twice' if rank in seen else ''} at layer {layer['layer_id']}"
            raise bad_file(path, f"device ids 0..{len(devices) - 1}, each once", what, "mend that layer")
        seen.add(rank)
        row[rank] = [_whole(expert) for expert in device["device_expert"]]
    return row


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{quoted(value)} must be an integer")
    return value


def write_expert_map(layout: ExpertLayout, path: PathLike, *, layer_ids: Sequence[int] = ()) -> None:
    """Write an expert map.

    Args:
        layout: The layout.
        path: File to write.
        layer_ids: The model's number of each row; default 0..L-1.

    Raises:
        ValueError: An empty slot (devices must have equally many experts), or a rank that holds an expert twice: the
            engine keeps one slot per expert on each rank, so the second would never be used.
    """
    p2l = full_map(layout, "devices must have equally many experts")
    by_rank = p2l.reshape(layout.num_layers, layout.topology.num_ranks, -1)
    _check_distinct(by_rank)
    ids = list(layer_ids) or list(range(layout.num_layers))
    layers = [
        {
            "layer_id": int(layer),
            "device_count": layout.topology.num_ranks,
            "device_list": [{"device_id": rank, "device_expert": experts} for rank, experts in enumerate(row)],
        }
        for layer, row in zip(ids, by_rank.tolist(), strict=True)
    ]
    write_atomic(path, (json.dumps({"moe_layer_count": len(layers), "layer_list": layers}) + "\n").encode())


def _check_distinct(by_rank: IntArray) -> None:
    in_order = np.sort(by_rank, axis=2)
    twice = np.argwhere(in_order[:, :, 1:] == in_order[:, :, :-1])
    if len(twice):
        layer, rank, at = (int(i) for i in twice[0])
        raise ValueError(
            f"rank {rank} must not hold expert {in_order[layer, rank, at]} twice at layer {layer}"
            f"{f'; {len(twice) - 1} more' if len(twice) > 1 else ''}: the engine's map has one slot per expert on a "
            "rank; plan with `place`, which puts replicas on distinct ranks"
        )
