"""Load one rank's experts from a safetensors checkpoint into new tensors, as a weight host without a loader does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from eplb_core._arrays import check_id, check_int, check_kind, to_list
from eplb_core._text import quoted
from eplb_core.errors import CheckpointError
from eplb_core.layout import ExpertLayout
from eplb_core.loading.checkpoint.load import load_checkpoint, read_headers
from eplb_core.loading.checkpoint.plan import DTYPES, Header
from eplb_core.loading.checkpoint.templates import CheckpointTemplate, Names, check_naming
from eplb_core.loading.pull_plan import check_slots_exist
from eplb_core.loading.resolver import SlotResolver
from eplb_core.loading.store import ExpertStore

Key = tuple[int, str]
"""Layer of the model, and tensor."""


def load_rank(
    files: str | Path | Iterable[str | Path],
    layout: ExpertLayout,
    rank: int,
    *,
    template: str | CheckpointTemplate,
    layer_ids: Sequence[int] = (),
    rename: Mapping[str, str] | None = None,
    ignore: Iterable[str] = (),
    device: torch.device | str = "cpu",
    num_slots: int | None = None,
) -> dict[str, torch.Tensor]:
    """Make the tensors of one rank's slots and fill each slot with the expert that the layout names.

    Bytes are as the checkpoint has them: no post-processing. An engine that transposes, requantizes or repacks gives a
    weight host its own function instead.

    Args:
        files: As `load_checkpoint` has it.
        layout: What each slot holds.
        rank: EP rank to load.
        template: A family in `TEMPLATES`, or a template of your own.
        layer_ids: The model's number of each row of the layout, `[L]`. Default: the layers of the checkpoint that have
            experts, if they are as many.
        rename: From the template's names to others.
        ignore: Names, or patterns, of expert tensors to leave out.
        device: Where to put them.
        num_slots: Rows to make, where this rank has fewer slots than S (`place(slots_per_rank=)`). Default: S.

    Returns:
        By name, tensors `[S, ...]` or `[num_slots, ...]`; the names are
        `layers.{layer of the model}.{w13, w2, w13_scale, ...}`. Empty slots are zero.

    Raises:
        CheckpointError: An expert is missing, a shape or a dtype differs, or the layers are not those of the layout.
        FileFormatError: A shard is truncated, missing or no safetensors file.
        ValueError: The template is unknown, or the layout uses slots beyond `num_slots`.

    Cost:
        One read of the headers for the shapes and one `load_checkpoint`.

    Threads:
        Any; nobody else knows the tensors.
    """
    check_kind(layout, "layout", ExpertLayout)
    check_id(rank, "rank", layout.topology.num_ranks)
    slots = layout.slots_per_rank if num_slots is None else check_int(num_slots, "num_slots", 1)
    check_slots_exist(layout, rank, slots)
    naming = check_naming(template, rename, ignore)
    layer_ids = to_list(layer_ids, "layer_ids")
    for layer in layer_ids:
        check_int(layer, "layer_ids", 0)
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise TypeError(f"`device` (={quoted(device, 80)}) must be a device of torch, such as 'cuda:0'") from error
    wanted = files if isinstance(files, str | Path) else to_list(files, "files")
    rows = _row_shapes(read_headers(wanted), naming)
    layers = _layers(layer_ids, sorted({layer for layer, _ in rows}), layout)
    tensors: dict[str, torch.Tensor] = {}
    stores = []
    for layer in layers:
        own = {
            name: torch.zeros(slots, *shape, dtype=dtype, device=device)
            for (where, name), (shape, dtype) in rows.items()
            if where == layer
        }
        if not own:
            raise CheckpointError(f"the checkpoint has no experts of layer {layer}, which the layout has")
        tensors |= {f"layers.{layer}.{name}": tensor for name, tensor in own.items()}
        stores.append(ExpertStore(own))
    resolver = SlotResolver(layout, rank, layer_ids=layers)
    load_checkpoint(wanted, stores, resolver, **naming._asdict())
    return tensors


def _row_shapes(headers: Mapping[str, Header], naming: Names) -> dict[Key, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of one slot's row of each tensor, in order of layers and names."""
    rows: dict[Key, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, header in headers.items():
        parsed = naming.parse(name)
        if parsed is None or parsed.shared:
            continue
        part = parsed.part
        key = (parsed.layer, part.tensor)
        if key in rows:
            continue  # others of another shape are an error when they are loaded
        shape = list(header.shape if parsed.expert is not None else header.shape[1:])
        if header.dtype not in DTYPES:
            raise CheckpointError(f"{quoted(name)} is of dtype {header.dtype}, which is not known", tensor=name)
        if part.blocks > 1:
            shape = shape or [1]
            shape[min(part.axis, len(shape) - 1)] *= part.blocks
        rows[key] = tuple(shape), DTYPES[header.dtype]
    return dict(sorted(rows.items()))


def _layers(layer_ids: Sequence[int], found: list[int], layout: ExpertLayout) -> tuple[int, ...]:
    if len(layer_ids):
        return tuple(int(layer) for layer in layer_ids)
    if len(found) != layout.num_layers:
        listed = f"{found[0]} to {found[-1]}" if found else "none"
        raise CheckpointError(
            f"the checkpoint has {len(found)} layers with experts ({listed}) and the layout {layout.num_layers}; say "
            "in `layer_ids` which layer of the model each row of the layout is"
        )
    return tuple(found)
