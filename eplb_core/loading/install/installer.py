"""From staging into live slots: what a layer's install copies, in which order, and how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from eplb_core._arrays import IntArray, read_only
from eplb_core._numba import kernel
from eplb_core.loading.install.copies import CHUNK_BYTES, copy_rows, order_copies
from eplb_core.loading.install.staging import Staging
from eplb_core.loading.moves.steps import Step
from eplb_core.loading.pull_plan import Int8Array, PullKind
from eplb_core.loading.store import ExpertStore

if TYPE_CHECKING:
    from eplb_core.loading.install.gpu import DeviceCopies, Prepared

SPARE = -1
"""How a list of copies names the spare place."""


class Copies(NamedTuple):
    """What one install does on this rank; int64 `[m, 2]` each, (from, to)."""

    slots: IntArray
    """The first places are the store's rows, then come staging rows; -1 is the spare place."""
    whole: IntArray
    """Rows of whole tensors; -1 is the spare place."""
    prepared: Prepared | None = None
    """The same as a table on the device, where kernels copy."""


class Installer:
    """Carries out installs of one rank. Allocates in the constructor alone.

    On a GPU one kernel makes all copies, or two where rows are not aligned to 16 bytes.

    Args:
        stores: One per layer.
        staging: Where incoming slots wait.
        kernels: Use the kernels of a GPU on the CPU too, where Triton interprets them.

    Raises:
        ImportError: Stores on a GPU, and no Triton.

    Threads:
        `plan` on a worker; `run` between two forward passes, on the stream of the passes. One at a time each.
    """

    def __init__(self, stores: Sequence[ExpertStore], staging: Staging, *, kernels: bool = False) -> None:
        self.stores, self.staging = stores, staging
        slots, rows = stores[0].num_slots, len(stores[0].whole_addresses)
        self._slots = slots
        self._places = slots + staging.capacity
        self._addresses = [read_only(np.concatenate([store.addresses, staging.addresses])) for store in stores]
        self._scratch = np.empty((2, max(self._places, rows)), dtype=np.int64)
        # Bytes of each tensor's largest row, and how many rows an install may write.
        sizes = np.max([np.concatenate([store.row_bytes, store.whole_row_bytes]) for store in stores], axis=0)
        counts = np.repeat([slots, rows], [len(stores[0].row_bytes), len(stores[0].whole_row_bytes)])
        self._spare = np.empty(min(CHUNK_BYTES, int(sizes.max())), dtype=np.uint8)
        self._device_copies: DeviceCopies | None = None
        if kernels or stores[0].device.type != "cpu":
            from eplb_core.loading.install.gpu import DeviceCopies

            self._device_copies = DeviceCopies(np.stack([counts, sizes], axis=1), stores[0].device)

    def plan(self, step: Step, row_of_slot: IntArray) -> Copies:
        """Work out the copies of a step; on a GPU they are good until the plan after the next one.

        Args:
            step: The step.
            row_of_slot: Staging row of each local slot that is read or restored, int64 `[S]`.
        """
        source = np.empty(self._places, dtype=np.int64)
        local = step.source_slot[: self._slots] % len(step.kind)
        _fill_sources(step.kind[: self._slots], local, row_of_slot, source)  # slots beyond are empty
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
        if self._device_copies is not None and copies.prepared is not None:
            self._device_copies.launch(copies.prepared)
            return
        store, spare, chunk = self.stores[layer], self._spare.ctypes.data, len(self._spare)
        copy_rows(copies.slots, self._addresses[layer], store.row_bytes, spare, chunk)
        copy_rows(copies.whole, store.whole_addresses, store.whole_row_bytes, spare, chunk)


@kernel
def _fill_sources(kind: Int8Array, local: IntArray, row_of_slot: IntArray, source: IntArray) -> None:
    """Where each place's new content is, as `order_copies` takes it; staging rows stay as they are."""
    slots = len(kind)
    source[:] = -1
    for slot in range(slots):
        if kind[slot] == PullKind.READ or kind[slot] == PullKind.RESTORE:
            source[slot] = slots + row_of_slot[slot]
        elif kind[slot] == PullKind.COPY_OLD:
            source[slot] = local[slot]
    for slot in range(slots):
        if kind[slot] == PullKind.COPY_NEW:  # from where the slot of this plan gets it
            source[slot] = source[local[slot]]


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
