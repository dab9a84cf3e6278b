"""What a checkpoint load will write, worked out from the shards' headers alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from eplb_core._arrays import BoolArray, check_kind
from eplb_core._text import quoted
from eplb_core.errors import EplbError
from eplb_core.loading.checkpoint.templates import CheckpointTemplate, ExpertName
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


class CheckpointError(EplbError, ValueError):
    """A checkpoint that does not fill the slots: the text names the tensor or the slots.

    Attributes:
        tensor: Name in the checkpoint at fault, or None.
        slots: Slots that nothing would write, `(layer, local slot)` each.
    """

    def __init__(self, message: str, *, tensor: str | None = None, slots: tuple[tuple[int, int], ...] = ()) -> None:
        super().__init__(message)
        self.tensor = tensor
        self.slots = slots


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
        template: CheckpointTemplate,
        rename: Mapping[str, str],
        derived: frozenset[str],
        ignore: tuple[str, ...],
        shared_stores: Sequence[ExpertStore] | None,
    ) -> None:
        check_kind(resolver, "resolver", SlotResolver)
        if len(stores) not in (resolver.layout.num_layers, len(resolver.layers)) or not stores:
            raise ValueError(
                f"`stores` has {len(stores)} layers and the resolver {len(resolver.layers)}; give each one"
            )
        if shared_stores is not None and len(shared_stores) != len(stores):
            raise ValueError(f"`shared_stores` has {len(shared_stores)} layers and `stores` {len(stores)}")
        check_stores(stores)
        check_stores(shared_stores or ())
        for store in shared_stores or ():
            if store.num_slots != resolver.num_shared or store.names != stores[0].names:
                raise ValueError(
                    f"`shared_stores` keep {', '.join(store.names)} of {store.num_slots} experts and must keep "
                    f"{', '.join(stores[0].names)} of the {resolver.num_shared} shared ones"
                )
        stores[0].check_fits(resolver.layout)
        self.stores, self.resolver, self.template, self.rename = stores, resolver, template, rename
        self.ignore, self.shared_stores = ignore, shared_stores
        self.place_of_layer = {layer: place for place, layer in enumerate(resolver.layers[: len(stores)])}
        # A slot needs each of its tensors once for every block that the template cuts it into.
        blocks = {rename.get(part.tensor, part.tensor): part.blocks for part in template.parts.values()}
        names = (*stores[0].names, *stores[0].whole_names)
        unknown = [name for name in names if name not in derived and name not in blocks]
        if unknown:
            raise ValueError(
                f"the stores keep {unknown[0]!r}, which template {template.family!r} does not fill; name it in "
                "`derived` if the engine computes it, or map the template's name to it in `rename`"
            )
        needed = [(name, block) for name in names if name not in derived for block in range(blocks[name])]
        self.needed = [(name, block) for name, block in needed if name in stores[0].names]
        self.needed_whole = [(name, block) for name, block in needed if name in stores[0].whole_names]
        experts = [resolver.local_experts(layer) for layer in self.place_of_layer]
        self.expert = np.array(experts, dtype=np.int64).reshape(len(stores), -1)
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
        if any(fnmatchcase(name, pattern) for pattern in self.ignore):
            return
        try:
            parsed = self.template.parse(name)
        except ValueError as error:
            raise CheckpointError(str(error), tensor=name) from None
        if parsed is None or parsed.layer not in self.place_of_layer:
            return
        if parsed.shared and (self.shared_stores is None or self.resolver.num_shared == 0):
            return
        experts = self.resolver.layout.num_experts
        if parsed.expert is None:
            if not header.shape or header.shape[0] != experts:
                raise CheckpointError(
                    f"{quoted(name)} has shape {list(header.shape)} and must have {experts} experts first, as the "
                    "layout has",
                    tensor=name,
                )
            self.copies[name] = [
                copy for expert in range(experts) for copy in self._copy(name, header, parsed, expert, expert)
            ]
            return
        if not parsed.shared and parsed.expert >= experts:
            raise CheckpointError(f"{quoted(name)} is expert {parsed.expert} and the layout has {experts}", tensor=name)
        expert = parsed.expert + (experts if parsed.shared else 0)
        self.copies[name] = list(self._copy(name, header, parsed, expert, None))

    def _copy(self, name: str, header: Header, parsed: ExpertName, expert: int, index: int | None) -> Iterator[Copy]:
        place = self.place_of_layer[parsed.layer]
        part = parsed.part
        tensor = self.rename.get(part.tensor, part.tensor)
        key = (place, expert, tensor, part.block)
        if key in self.seen:
            raise CheckpointError(
                f"{quoted(name)} and {quoted(self.seen[key])} are the same part of expert {expert}", tensor=name
            )
        self.seen[key] = name
        store = self.stores[place]
        if tensor not in store.names + store.whole_names:
            raise CheckpointError(
                f"{quoted(name)} belongs in {tensor!r}, which the stores do not keep; add it to them, name the store's "
                "tensor in `rename`, or the checkpoint's in `ignore`",
                tensor=name,
            )
        slots: tuple[int, ...]
        if parsed.shared and self.shared_stores is not None:
            if tensor in store.whole_names:
                return
            store, slots = self.shared_stores[place], (expert - self.resolver.layout.num_experts,)
        elif tensor in store.whole_names:
            slots = self.resolver.global_slots(parsed.layer, expert)
        else:
            slots = self.resolver.local_slots(parsed.layer, expert)
        targets = tuple(self._target(name, header, parsed, store.tensor_row(tensor, slot), index) for slot in slots)
        if targets:
            own = not parsed.shared and tensor in store.names
            yield Copy(index, targets, tuple((place, slot) for slot in slots) if own else ())

    def _target(
        self, name: str, header: Header, parsed: ExpertName, row: torch.Tensor, index: int | None
    ) -> torch.Tensor:
        """The piece of a row that a checkpoint tensor fills; refuses what does not fit."""
        part = parsed.part
        shape = header.shape if index is None else header.shape[1:]
        axis = min(part.axis, row.dim() - 1)
        if DTYPES.get(header.dtype) != row.dtype:
            raise CheckpointError(
                f"{quoted(name)} is {header.dtype} and {part.tensor!r} keeps {row.dtype}; load what was stored",
                tensor=name,
            )
        if part.blocks > 1 and (axis < 0 or row.shape[axis] % part.blocks):
            raise CheckpointError(
                f"{quoted(name)} is block {part.block} of {part.blocks} of {part.tensor!r}, whose rows "
                f"{list(row.shape)} do not divide into {part.blocks}",
                tensor=name,
            )
        if part.blocks > 1:
            size = row.shape[axis] // part.blocks
            row = row.narrow(axis, part.block * size, size)
        if tuple(row.shape) != shape and not (row.numel() == 1 and shape in ((), (1,))):
            raise CheckpointError(
                f"{quoted(name)} has shape {list(shape)} and must have {list(row.shape)}, as {part.tensor!r} has",
                tensor=name,
            )
        return row

    def check_complete(self) -> None:
        """Raise if a slot would not be written, listing all of them."""
        lacking: list[tuple[int, int]] = []
        first = ""
        layers = self.resolver.layers
        for place, slot in np.argwhere(self.expert >= 0).tolist():
            expert = int(self.expert[place, slot])
            gaps = [(name, block) for name, block in self.needed if (place, expert, name, block) not in self.seen]
            if gaps:
                lacking.append((place, slot))
                what = "" if len(gaps) == len(self.needed) else f" whole: {gaps[0][0]!r}, block {gaps[0][1]} is missing"
                first = first or f"the checkpoint does not have expert {expert} of layer {layers[place]}{what}"
        whole = self._missing_whole() or self._missing_shared()
        if lacking or whole:
            listed = ", ".join(f"layer {layers[place]} slot {slot}" for place, slot in lacking[:32])
            more = f" and {len(lacking) - 32} more" if len(lacking) > 32 else ""
            raise CheckpointError(
                f"{first or whole}; nothing would write {listed or 'those rows'}{more}. Nothing was written",
                slots=tuple(lacking),
            )

    def _missing_whole(self) -> str:
        for place, layer in enumerate(self.place_of_layer):
            for expert in range(self.resolver.layout.num_experts):
                for name, block in self.needed_whole:
                    if (place, expert, name, block) not in self.seen:
                        return f"the checkpoint does not have {name!r} of expert {expert} of layer {layer}"
        return ""

    def _missing_shared(self) -> str:
        experts = self.resolver.layout.num_experts
        for place, layer in enumerate(self.place_of_layer if self.shared_stores else ()):
            for expert in range(experts, experts + self.resolver.num_shared):
                if any((place, expert, name, block) not in self.seen for name, block in self.needed):
                    return f"the checkpoint does not have shared expert {expert - experts} of layer {layer} whole"
        return ""
