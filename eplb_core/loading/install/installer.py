"""From staging into live slots: what a layer's install copies, in which order, and how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from eplb_core._arrays import IntArray, check_int, read_only
from eplb_core._numba import kernel
from eplb_core._text import quoted
from eplb_core.loading.install.copies import CHUNK_BYTES, copy_rows, order_copies
from eplb_core.loading.moves.steps import Step
from eplb_core.loading.pull_plan import COPY_NEW, COPY_OLD, READ, RESTORE, Int8Array
from eplb_core.loading.store import ExpertStore

if TYPE_CHECKING:
    from eplb_core.loading.install.gpu import DeviceCopies, Prepared

SPARE = -1
"""How a list of copies names the spare place."""


class Staging:
    """Memory in which a layer's incoming slots wait: `capacity` slots, tensor by tensor.

    Args:
        memory: uint8 `[n]` on the stores' device, or its size in bytes, or None for a whole layer.
        stores: One a layer; a tensor's rows may differ in size between layers, the largest counts.

    Raises:
        ValueError: Not one slot fits, or the tensor is of another kind.
    """

    memory: torch.Tensor
    """uint8 `[n]`."""
    capacity: int
    """Slots that fit."""
    offsets: IntArray
    """Where each row of each tensor begins in `memory`, int64 `[capacity, tensors]`."""
    addresses: IntArray
    """Its first byte, int64 `[capacity, tensors]`."""

    def __init__(self, memory: int | torch.Tensor | None, stores: Sequence[ExpertStore]) -> None:
        store = stores[0]
        row_bytes = np.max([layer.row_bytes for layer in stores], axis=0)
        nbytes = int(row_bytes.sum())
        if memory is None:
            memory = store.num_slots * nbytes
        if isinstance(memory, torch.Tensor):
            if memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous():
                raise ValueError(f"`staging` ({memory.dtype} {list(memory.shape)}) must be uint8 [bytes], contiguous")
            if memory.device != store.device:
                raise ValueError(f"`staging` is on {memory.device} and the stores on {store.device}; put it there")
            size = memory.numel()
        else:
            size = check_int(memory, "staging", 0)
            if size > 1 << 50:
                raise ValueError(f"`staging` (={quoted(size, 40)} bytes) must be memory that there is")
        if size < nbytes:
            raise ValueError(f"`staging` (={size} bytes) must hold at least one slot (={nbytes} bytes)")
        # No rank reads more than S slots of a layer, and none more than two layers at a time.
        self.capacity = min(size // nbytes, 2 * store.num_slots)
        self.memory = (
            memory if isinstance(memory, torch.Tensor) else torch.empty(size, dtype=torch.uint8, device=store.device)
        )
        # Large rows first: these keep the alignment of the memory whatever odd sizes come after them.
        order = np.argsort(-row_bytes, kind="stable")
        begin = np.empty_like(row_bytes)
        begin[order] = np.cumsum(row_bytes[order]) - row_bytes[order]
        self.offsets = self.capacity * begin + np.arange(self.capacity)[:, None] * row_bytes
        self.addresses = self.offsets + self.memory.data_ptr()
        self._views = [
            [self.memory[start : start + size] for start, size in zip(row, row_bytes.tolist(), strict=True)]
            for row in self.offsets.tolist()
        ]

    def row(self, place: int, store: ExpertStore) -> list[torch.Tensor]:
        """One staged slot of a layer, uint8 `[row bytes]` for each tensor, views."""
        return [view[:size] for view, size in zip(self._views[place], store.row_bytes.tolist(), strict=True)]


class Copies(NamedTuple):
    """What one install does on this rank; int64 `[m, 2]` each, (from, to)."""

    slots: IntArray
    """Places 0..S-1 are local slots, from S on staging rows; -1 is the spare place."""
    whole: IntArray
    """Rows of whole tensors; -1 is the spare place."""
    prepared: Prepared | None = None
    """The same as a table on the device, where kernels copy."""


class Installer:
    """Carries out installs of one rank. Allocates in the constructor alone.

    On a GPU one kernel makes all copies, or two where rows are not aligned to 16 bytes; without Triton each row is a
    copy of its own.

    Args:
        stores: One a layer.
        staging: Where incoming slots wait.
        kernels: Whether kernels copy. Default: on a GPU, if Triton is there.

    Threads:
        `plan` on a worker; `run` between two forward passes, on the stream of the passes. One at a time each.
    """

    def __init__(self, stores: Sequence[ExpertStore], staging: Staging, *, kernels: bool | None = None) -> None:
        self.stores, self.staging = stores, staging
        self.on_device = stores[0].device.type != "cpu"
        slots, rows = stores[0].num_slots, len(stores[0].whole_addresses)
        self._places = slots + staging.capacity
        self._addresses = [read_only(np.concatenate([store.addresses, staging.addresses])) for store in stores]
        sizes = [size for store in stores for size in (*store.row_bytes.tolist(), *store.whole_row_bytes.tolist())]
        spare_bytes = max(sizes) if self.on_device else min(CHUNK_BYTES, max(sizes))
        self._spare = torch.empty(spare_bytes, dtype=torch.uint8, device=stores[0].device)
        self._scratch = np.empty((2, max(self._places, rows)), dtype=np.int64)
        self._device_copies = self._with_kernels() if (self.on_device if kernels is None else kernels) else None

    def _with_kernels(self) -> DeviceCopies | None:
        try:
            from eplb_core.loading.install.gpu import DeviceCopies
        except ImportError:
            return None
        store = self.stores[0]
        slots, whole = (
            np.max([getattr(layer, name) for layer in self.stores], axis=0) for name in ("row_bytes", "whole_row_bytes")
        )
        counts = [store.num_slots] * len(slots) + [len(store.whole_addresses)] * len(whole)
        return DeviceCopies(np.stack([np.array(counts), np.concatenate([slots, whole])], axis=1), store.device)

    def plan(self, step: Step, place_of: IntArray) -> Copies:
        """Work out the copies of a step; on a GPU they are good until the plan after the next one.

        Args:
            step: The step.
            place_of: Staging row of each local slot that is read or restored, int64 `[S]`.
        """
        source = np.empty(self._places, dtype=np.int64)
        _fill_sources(step.kind, step.source_slot, place_of, source)
        slots = self._order(source)
        whole = np.empty((0, 2), dtype=np.int64)
        if self.stores[0].whole_names:
            old, new = (lay.physical_to_logical_map[step.layer] for lay in (step.before, step.after))
            whole = self._order(whole_sources(old, new, step.before.num_experts))
        return Copies(slots, whole, self._prepare(step.layer, slots, whole))

    def _prepare(self, layer: int, slots: IntArray, whole: IntArray) -> Prepared | None:
        if self._device_copies is None:
            return None
        from eplb_core.loading.install.gpu import Block

        store = self.stores[layer]
        return self._device_copies.prepare(
            [
                Block(slots, self._addresses[layer], store.row_bytes),
                Block(whole, store.whole_addresses, store.whole_row_bytes),
            ]
        )

    def _order(self, source: IntArray) -> IntArray:
        copies = np.empty((2 * len(source), 2), dtype=np.int64)
        count = order_copies(source, SPARE, self._scratch[0], self._scratch[1], copies)
        return copies[:count]

    def run(self, layer: int, copies: Copies) -> None:
        """Copy, on the current stream of the stores' device; on the CPU at once."""
        store = self.stores[layer]
        if self._device_copies is not None and copies.prepared is not None:
            self._device_copies.launch(copies.prepared)
            return
        if self.on_device:
            self._run_on_device(store, copies)
            return
        spare, chunk = self._spare.data_ptr(), self._spare.numel()
        copy_rows(copies.slots, self._addresses[layer], store.row_bytes, spare, chunk)
        if len(copies.whole):
            copy_rows(copies.whole, store.whole_addresses, store.whole_row_bytes, spare, chunk)

    def _run_on_device(self, store: ExpertStore, copies: Copies) -> None:
        slots = store.num_slots
        for index, name in enumerate(store.names):
            for source, to in copies.slots.tolist():
                self._view(store, name, index, slots, to).copy_(
                    self._view(store, name, index, slots, source), non_blocking=True
                )
        for name, size in zip(store.whole_names, store.whole_row_bytes.tolist(), strict=True):
            for source, to in copies.whole.tolist():
                target = self._spare[:size] if to < 0 else store.row(name, to)
                target.copy_(self._spare[:size] if source < 0 else store.row(name, source), non_blocking=True)

    def _view(self, store: ExpertStore, name: str, index: int, slots: int, place: int) -> torch.Tensor:
        if place < 0:
            return self._spare[: int(store.row_bytes[index])]
        return store.row(name, place) if place < slots else self.staging.row(place - slots, store)[index]


@kernel
def _fill_sources(kind: Int8Array, source_slot: IntArray, place_of: IntArray, source: IntArray) -> None:
    """Where each place's new content is, as `order_copies` takes it; staging rows stay as they are."""
    slots = len(kind)
    source[:] = -1
    for slot in range(slots):
        if kind[slot] == READ or kind[slot] == RESTORE:
            source[slot] = slots + place_of[slot]
        elif kind[slot] == COPY_OLD:
            source[slot] = source_slot[slot] % slots
    for slot in range(slots):
        if kind[slot] == COPY_NEW:  # from where the slot of this plan gets it
            source[slot] = source[source_slot[slot] % slots]


def whole_sources(old: IntArray, new: IntArray, num_experts: int) -> IntArray:
    """Where each row of a whole tensor comes from, int64 `[P]`; -1 = it stays.

    A row that keeps its expert stays; others come from a row that stays, if one has the expert, else from the first.
    """
    first = np.full(num_experts + 1, -1, dtype=np.int64)
    first[old[::-1]] = np.arange(len(old) - 1, -1, -1)  # the lowest slot is written last
    stays = np.flatnonzero((old == new) & (new >= 0))
    first[new[stays[::-1]]] = stays[::-1]
    source: IntArray = np.where((old == new) | (new < 0), -1, first[new])
    return source
