"""Layout files: `eplb-layout-1`, and plain maps.

`eplb-layout-1` is JSON or .npz with `num_experts`, `num_slots`, `rank_to_node`, `rank_speed`,
`physical_to_logical_map`, the layout's `digest` (checked when read) and, where known, `layer_ids`, the model's number
of each row.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from eplb_core._arrays import ArrayLike, check_int, check_kind, to_ids, to_list, to_numpy
from eplb_core.files.reading import PathLike, bad_file, check_path, reading, write_atomic
from eplb_core.layout import ExpertLayout
from eplb_core.topology import Topology

LAYOUT_FORMAT = "eplb-layout-1"
MAP = "physical_to_logical_map"
WANTED = "a layout (eplb-layout-1, or an engine's expert map)"
MEND = "save the layout again"


class LayoutFile(NamedTuple):
    """A layout and what its file says besides."""

    layout: ExpertLayout
    """The layout; row i is layer `layer_ids[i]` of the model, where those are known."""
    layer_ids: tuple[int, ...]
    """The model's number of each row, `[L]`, or empty."""
    format: str
    """Which format the file has."""
    notes: tuple[str, ...]
    """What reading assumed or filled in."""


def save_layout(layout: ExpertLayout, path: PathLike, *, layer_ids: Sequence[int] = ()) -> None:
    """Write a layout; the old file stays until the new one is whole.

    Args:
        layout: What to write.
        path: File to write: `.npz` gives NumPy's format, anything else JSON.
        layer_ids: The model's number of each row, `[L]`, or empty.

    Raises:
        ValueError: `layer_ids` has another length than the layout has layers.

    Example:
        >>> import tempfile
        >>> from eplb_core import load_layout
        >>> layout = ExpertLayout([[0, 1, 1, 0]], num_experts=2, topology=Topology(num_ranks=2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_layout(layout, folder + "/layout.json")
        ...     load_layout(folder + "/layout.json") == layout
        True
    """
    check_kind(layout, "layout", ExpertLayout)
    ids = to_ids(to_list(layer_ids, "layer_ids"), "layer_ids")
    if ids.ndim != 1 or len(ids) not in (0, layout.num_layers):
        raise ValueError(f"`layer_ids` ({len(ids)} entries) must be empty or have {layout.num_layers}")
    p2l, topology = layout.physical_to_logical_map, layout.topology
    head: dict[str, Any] = {
        "format": np.array(LAYOUT_FORMAT),
        "num_experts": np.array(layout.num_experts),
        "num_slots": np.array(layout.num_slots),
        "rank_to_node": topology.rank_to_node,
        "rank_speed": topology.rank_speed,
        "layer_ids": ids,
        "digest": np.array(layout.digest),
    }
    if check_path(path).endswith(".npz"):
        stream = io.BytesIO()
        np.savez_compressed(stream, **{**head, MAP: p2l})
        write_atomic(path, stream.getvalue())
        return
    lines = [f"  {json.dumps(name)}: {json.dumps(value.tolist())}" for name, value in head.items()]
    rows = ",\n".join(f"    {json.dumps(row)}" for row in p2l.tolist())
    lines.append(f'  "{MAP}": [\n{rows}\n  ]')
    write_atomic(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


def layout_of_map(
    path: PathLike,
    p2l: ArrayLike,
    *,
    topology: Topology | None,
    num_experts: int | None,
    format: str,
    layer_ids: Sequence[int] = (),
    notes: tuple[str, ...] = (),
) -> LayoutFile:
    """A layout from a map that a file has, or FileFormatError with the layer and slot at fault."""
    if topology is None:
        raise bad_file(path, "a file that says its ranks", f"format {format}", "give the topology (--ranks, --nodes)")
    array = to_numpy(p2l, MAP)
    with reading(path, "a valid layout", "mend the file, or the number of ranks or experts given for it"):
        if array.dtype.kind == "u":
            raise TypeError(f"the map is {array.dtype}, which cannot hold -1")
        if not all(0 <= layer < 2**63 for layer in layer_ids):
            raise ValueError("layer_ids must be in [0, 2**63)")
        if num_experts is None:
            num_experts = max(int(array.max(initial=0)) + 1, 1)
            notes += (f"the file does not say how many experts there are: taken as {num_experts}",)
        if array.ndim == 2 and num_experts > array.shape[1]:  # before anything as long as E is allocated
            raise ValueError(f"{num_experts} experts in {array.shape[1]} slots; every expert needs one")
        return LayoutFile(ExpertLayout(array, num_experts, topology=topology), tuple(layer_ids), format, notes)


def own_layout(path: PathLike, found: dict[str, Any], topology: Topology | None, num_experts: int | None) -> LayoutFile:
    """The layout of a file that says `format`."""
    if found["format"] != LAYOUT_FORMAT:
        raise bad_file(path, f"format {LAYOUT_FORMAT}", repr(found["format"]), "it is no layout, or of another version")
    missing = {"num_experts", "num_slots", "rank_to_node", "rank_speed", "digest", MAP} - found.keys()
    if missing:
        raise bad_file(path, "a whole layout file", f"no {', '.join(sorted(missing))}", MEND)
    rank_to_node = to_ids(found["rank_to_node"], "rank_to_node")
    if rank_to_node.max(initial=0) >= rank_to_node.size:  # before anything as long as the largest node is allocated
        raise bad_file(path, "`rank_to_node` with nodes below R", f"node {rank_to_node.max()}", MEND)
    own = Topology(rank_to_node=rank_to_node, rank_speed=found["rank_speed"])
    experts, slots = (check_int(found[name], name, 1) for name in ("num_experts", "num_slots"))
    p2l = np.asarray(found[MAP])
    if p2l.size == 0:
        p2l = np.empty((0, slots), dtype=np.int64)
    layer_ids = tuple(check_int(layer, "layer_ids", 0) for layer in found.get("layer_ids", ()))
    read = layout_of_map(path, p2l, topology=own, num_experts=experts, format=LAYOUT_FORMAT, layer_ids=layer_ids)
    if read.layout.digest != found["digest"]:
        raise bad_file(path, f"digest {read.layout.digest}", found["digest"], "the map was changed after it was saved")
    if len(layer_ids) not in (0, read.layout.num_layers):
        raise bad_file(path, f"{read.layout.num_layers} layer_ids", str(len(layer_ids)), MEND)
    if topology is not None and topology != own:
        raise bad_file(
            path, f"a layout for {topology}", f"one for {own}", "leave the ranks and nodes out, or mend them"
        )
    if num_experts is not None and num_experts != experts:
        raise bad_file(path, f"{num_experts} experts", str(experts), "leave `num_experts` out, or give another file")
    return read
