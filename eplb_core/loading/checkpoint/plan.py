"""What a checkpoint load will write, worked out from the shards' headers alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from eplb_core._arrays import BoolArray, check_kind
from eplb_core._text import quoted
from eplb_core.errors import CheckpointError
from eplb_core.loading.checkpoint.templates import ExpertName, Names, Part
from eplb_core.loading.resolver import SlotResolver
from eplb_core.loading.store import ExpertStore, check_stores

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""What a header calls a dtype."""


class Copy(NamedTuple):
    """One expert's part of one checkpoint tensor, and everywhere it goes."""

    row: int | None
    """Row of the checkpoint tensor; None = all of it."""
    targets: tuple[torch.Tensor, ...]
    """Views of the stores' rows, or of a block of them."""
    fills: tuple[tuple[int, int], ...]
    """(layer, slot) that each target is a piece of; of slots that the layout names, and none of whole tensors."""


class Header(NamedTuple):
    """What a shard says of a tensor."""

    path: Path
    shape: tuple[int, ...]
    dtype: str


class LoadPlan:
    """Which bytes go where; and, while it runs, which slots are complete."""

    def __init__(
        self,
        stores: Sequence[ExpertStore],
        resolver: SlotResolver,
        naming: Names,
        derived: frozenset[str],
        shared_stores: Sequence[ExpertStore] | None,
    ) -> None:
        check_kind(resolver, "resolver", SlotResolver)
        if len(stores) not in (resolver.layout.num_layers, len(resolver.layers)) or not stores:
            raise ValueError(
                f"`stores` has {len(stores)} layers and the resolver {len(resolver.layers)}; give one for each layer"
            )
        if shared_stores is not None and len(shared_stores) != len(stores):
            raise ValueError(f"`shared_stores` has {len(shared_stores)} layers and `stores` {len(stores)}")
        check_stores(stores)
        check_stores(shared_stores or ())
        first = stores[0]
        for store in shared_stores or ():
            if store.num_slots != resolver.num_shared or store.names != first.names:
                raise ValueError(
                    f"`shared_stores` keep {', '.join(store.names)} of {store.num_slots} experts and must keep "
                    f"{', '.join(first.names)} of the {resolver.num_shared} shared ones"
                )
        first.check_fits(resolver.layout, rank=resolver.rank)
        self.stores, self.resolver, self.naming, self.shared_stores = stores, resolver, naming, shared_stores
        self.place_of_layer = {layer: place for place, layer in enumerate(resolver.layers[: len(stores)])}
        # A slot needs each of its tensors once for every block that the template cuts it into.
        blocks = {naming.stored(part): part.blocks for part in naming.template.parts.values()}
        needed: dict[bool, list[tuple[str, int]]] = {True: [], False: []}
        for name in (*first.names, *first.whole_names):
            if name in derived:
                continue
            if name not in blocks:
                raise ValueError(
                    f"the stores keep {name!r}, which template {naming.template.family!r} does not fill; name it in "
                    "`derived` if the engine computes it, or map the template's name to it in `rename`"
                )
            needed[name in first.names] += [(name, block) for block in range(blocks[name])]
        self.needed, self.needed_whole = needed[True], needed[False]
        experts = [resolver.local_experts(layer) for layer in self.place_of_layer]
        self.expert = np.array(experts, dtype=np.int64).reshape(len(stores), -1)
        if (self.expert[:, first.num_slots :] >= 0).any():
            raise ValueError(
                f"rank {resolver.rank} has {first.num_slots} slots of {resolver.layout.slots_per_rank}, and a draft "
                "layer needs more; give draft layers a resolver of a layout of their own"
            )
        self.missing = np.where(self.expert >= 0, len(self.needed), 0)
        self.seen: dict[tuple[int, int, str, int], str] = {}
        self.copies: dict[str, list[Copy]] = {}

    def done(self, copy: Copy) -> None:
        """Count a copy that was made."""
        for place, slot in copy.fills:
            self.missing[place, slot] -= 1

    def written(self) -> BoolArray:
        """Slots that hold their expert whole."""
        whole: BoolArray = (self.missing == 0) & (self.expert >= 0)
        return whole

    def add(self, name: str, header: Header) -> None:
        """Plan one checkpoint tensor, if it is an expert's of these layers."""
        parsed = self.naming.parse(name)
        if parsed is None or parsed.layer not in self.place_of_layer:
            return
        if parsed.shared and (self.shared_stores is None or self.resolver.num_shared == 0):
            return
        experts = self.resolver.layout.num_experts
        if parsed.expert is None:
            if not header.shape or header.shape[0] != experts:
                raise _misfit(name, f"has shape {list(header.shape)}; its first dimension must be {experts} experts")
            each = [self._copy(name, header, parsed, expert, expert) for expert in range(experts)]
        elif parsed.expert >= experts and not parsed.shared:
            raise _misfit(name, f"is expert {parsed.expert} and the layout has {experts}")
        else:
            each = [self._copy(name, header, parsed, parsed.expert + experts * parsed.shared, None)]
        self.copies[name] = [copy for copy in each if copy.targets]

    def _copy(self, name: str, header: Header, parsed: ExpertName, expert: int, row: int | None) -> Copy:
        """One expert's part of a tensor: the whole of it, or `row` of one that has all experts."""
        place, (tensor, block, *_) = self.place_of_layer[parsed.layer], parsed.part
        first = self.seen.setdefault((place, expert, tensor, block), name)
        if first != name:
            raise _misfit(name, f"and {quoted(first)} are the same part of expert {expert}")
        store, whole = self.stores[place], tensor in self.stores[place].whole_names
        if not whole and tensor not in store.names:
            raise _misfit(
                name,
                f"belongs in {tensor!r}, which the stores do not keep; add it to them, name the store's tensor in "
                "`rename`, or the checkpoint's in `ignore`",
            )
        slots: tuple[int, ...] = ()
        if parsed.shared and self.shared_stores is not None:
            if not whole:
                store, slots = self.shared_stores[place], (expert - self.resolver.layout.num_experts,)
        elif whole:
            slots = self.resolver.global_slots(parsed.layer, expert)
        else:
            slots = self.resolver.local_slots(parsed.layer, expert)
        shape = header.shape if row is None else header.shape[1:]
        targets = tuple(_target(name, shape, header, parsed.part, store.tensor_row(tensor, slot)) for slot in slots)
        return Copy(row, targets, () if parsed.shared or whole else tuple((place, slot) for slot in slots))

    def check_complete(self) -> None:
        """Raise if a slot would not be written, listing all of them."""
        lacking: list[tuple[int, int]] = []
        first = ""
        layers = self.resolver.layers
        for place, slot in np.argwhere(self.expert >= 0).tolist():
            expert = int(self.expert[place, slot])
            gaps = self._gaps(place, expert, self.needed)
            if gaps:
                lacking.append((place, slot))
                what = "" if len(gaps) == len(self.needed) else f" whole: {gaps[0][0]!r}, block {gaps[0][1]} is missing"
                first = first or f"expert {expert} of layer {layers[place]}{what}"
        first = first or next(self._other_gaps(), "")
        if first:
            listed = ", ".join(f"layer {layers[place]} slot {slot}" for place, slot in lacking[:32])
            more = f" and {len(lacking) - 32} more" if len(lacking) > 32 else ""
            raise CheckpointError(
                f"the checkpoint does not have {first}; nothing would write {listed or 'those rows'}{more}. "
                "Nothing was written",
                slots=tuple(lacking),
            )

    def _gaps(self, place: int, expert: int, needed: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
        return [(name, block) for name, block in needed if (place, expert, name, block) not in self.seen]

    def _other_gaps(self) -> Iterator[str]:
        """Parts that rows of whole tensors and of shared experts need and the checkpoint does not have."""
        experts = self.resolver.layout.num_experts
        for place, layer in enumerate(self.place_of_layer):
            for expert in range(experts):
                for name, _ in self._gaps(place, expert, self.needed_whole):
                    yield f"{name!r} of expert {expert} of layer {layer}"
            for shared in range(self.resolver.num_shared if self.shared_stores else 0):
                if self._gaps(place, experts + shared, self.needed):
                    yield f"shared expert {shared} of layer {layer} whole"


def _target(name: str, shape: tuple[int, ...], header: Header, part: Part, row: torch.Tensor) -> torch.Tensor:
    """The piece of a row that a checkpoint tensor fills; refuses what does not fit."""
    if DTYPES.get(header.dtype) != row.dtype:
        raise _misfit(name, f"is {header.dtype} and {part.tensor!r} keeps {row.dtype}; load what was stored")
    if part.blocks > 1:
        axis = min(part.axis, row.dim() - 1)
        if axis < 0 or row.shape[axis] % part.blocks:
            raise _misfit(
                name,
                f"is block {part.block} of {part.blocks} of {part.tensor!r}, whose rows {list(row.shape)} do not "
                f"divide into {part.blocks}",
            )
        size = row.shape[axis] // part.blocks
        row = row.narrow(axis, part.block * size, size)
    if tuple(row.shape) != shape and not (row.numel() == 1 and shape in ((), (1,))):
        raise _misfit(name, f"has shape {list(shape)} and must have {list(row.shape)}, as {part.tensor!r} has")
    return row


def _misfit(name: str, why: str) -> CheckpointError:
    return CheckpointError(f"{quoted(name)} {why}", tensor=name)
