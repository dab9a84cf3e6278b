"""Where each slot of a rank gets its new expert from: a pure plan, computed by every rank for itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from eplb_core._arrays import (
    ArrayLike,
    BoolArray,
    IntArray,
    check_id,
    check_int,
    check_kind,
    read_only,
    to_ids,
    to_list,
    to_numpy,
)
from eplb_core._html import HTML_LAYERS, table_html
from eplb_core._numba import inline_kernel, kernel
from eplb_core.frames import Columns, Table
from eplb_core.layout import ExpertLayout, layer_rows

Int8Array = npt.NDArray[np.int8]


class PullKind(IntEnum):
    """What a pull plan does with one slot; the values are those of `PullPlan.kind`."""

    KEEP = 0
    """The slot holds its expert already."""
    COPY_OLD = 1
    """Copy from another slot of this rank, which holds the expert in the old layout, before anything overwrites it."""
    COPY_NEW = 2
    """Copy from an earlier slot of this rank, which reads or restores the expert in this plan, once it is there."""
    READ = 3
    """Read from another rank's slot, as that slot is in the old layout."""
    RESTORE = 4
    """Fetch from a backup: no rank that may be read holds the expert."""
    EMPTY = 5
    """Leave empty: the new layout has no expert here."""


@dataclass(frozen=True, slots=True, eq=False)
class PullPlan(Table):
    """What one rank does to go from one layout to another; made by `plan_pull`. All arrays read-only."""

    rank: int
    """The rank that pulls."""
    layers: IntArray
    """Rows of the layout that the plan is about, int64 `[n]`."""
    kind: Int8Array
    """KEEP, COPY_OLD, COPY_NEW, READ, RESTORE or EMPTY for each local slot, int8 `[n, S]`."""
    source_slot: IntArray
    """Global slot that the expert comes from, int64 `[n, S]`: a slot of `old` for KEEP (the slot itself), COPY_OLD and
    READ, the slot of this rank that is filled first for COPY_NEW, -1 for RESTORE and EMPTY."""
    num_reads: IntArray
    """Slots to read from other ranks, int64 `[n]`: an expert is read once however many slots it fills."""
    reads_from: IntArray
    """Reads from each rank, int64 `[n, R]`; times `ExpertStore.slot_bytes` these are the bytes of each link."""
    most_staged: IntArray
    """The most slots that any rank reads or restores, int64 `[n]`: the staging that a layer needs in one go. Equal in
    all ranks' plans."""

    @property
    def num_restores(self) -> IntArray:
        """Slots that a backup must fill, int64 `[n]`."""
        count: IntArray = (self.kind == PullKind.RESTORE).sum(axis=1, dtype=np.int64)
        return count

    def _columns(self) -> Columns:
        row, slot = np.indices(self.kind.shape).reshape(2, -1)
        kinds = np.array([PullKind(kind).name for kind in self.kind.ravel().tolist()], dtype=object)
        return {"layer": self.layers[row], "local_slot": slot, "kind": kinds, "source_slot": self.source_slot.ravel()}

    def _repr_html_(self) -> str:
        """Count the slots of each kind, in all and layer by layer."""
        parts: list[tuple[object, Int8Array]] = [("all", self.kind), *enumerate(self.kind[:HTML_LAYERS])]
        rows = [[name, *(int((kinds == kind).sum()) for kind in PullKind)] for name, kinds in parts]
        left = len(self.kind) - HTML_LAYERS
        more = f"<div>{left} more layers</div>" if left > 0 else ""
        table = table_html(["row", *(kind.name.lower().replace("_", " ") for kind in PullKind)], rows)
        return f"<div><b>PullPlan</b>: slots of one rank{table}{more}</div>"


def plan_pull(
    old: ExpertLayout,
    new: ExpertLayout,
    *,
    rank: int,
    layers: ArrayLike | None = None,
    avoid_ranks: Iterable[int] = (),
    loaded: ArrayLike | None = None,
    senders: ArrayLike | None = None,
) -> PullPlan:
    """Say for each slot of `rank` where its expert in `new` comes from.

    A slot that keeps its expert is left alone; then a copy inside the rank; then a holder on the same node; then any
    holder; then a backup. Reads are spread: over the ranks that could serve a read, it goes to the one with the fewest
    reads of all ranks on that layer, reads with the fewest choices first. Every rank computes all ranks' reads and so
    knows its own. A layer's plan depends on its own rows alone.

    Args:
        old: Layout that the weights are in.
        new: Layout to reach; same L, P, E and topology.
        rank: Rank that pulls, in `[0, R)`.
        layers: Rows, ints or bools. Default: all.
        avoid_ranks: Ranks that nobody reads from: dead, leaving or slow ones. Their own slots still serve themselves.
        loaded: bool `[L, P]`: slots whose bytes are those of their expert in `old`. Others are no source, and are
            filled even if they keep their expert. Default: all.
        senders: Rank to read each slot's expert from, ints `[L, P]`, -1 = any: `Placement.senders`, so that limits of
            links hold. One that does not hold it, or may not be read, counts as -1. Default: any.

    Returns:
        The plan; see `PullPlan`.

    Raises:
        ValueError: Layouts differ in shape, experts or topology; `rank` is out of range; `loaded` or `senders` has
            another shape, or a sender is no rank.
        IndexError: A layer or a rank of `avoid_ranks` is out of range.

    Cost:
        O(n * P * K), K the replicas of an expert; `python -m benchmarks.moving`. No collective, no device memory.

    Threads:
        Any; holds no interpreter lock while it works.

    Example:
        >>> from eplb_core import Topology
        >>> two = Topology(num_ranks=2)
        >>> old = ExpertLayout([[0, 1, 2, 3, 1, 2]], num_experts=4, topology=two)
        >>> new = ExpertLayout([[0, 1, 2, 3, 0, 0]], num_experts=4, topology=two)
        >>> plan = plan_pull(old, new, rank=1)
        >>> plan.kind.tolist(), plan.source_slot.tolist(), plan.num_reads.tolist()
        ([[0, 3, 2]], [[3, 0, 4]], [1])
    """
    check_kind(old, "old", ExpertLayout).check_same_frame(check_kind(new, "new", ExpertLayout))
    ranks = old.topology.num_ranks
    check_int(rank, "rank", 0)
    if rank >= ranks:
        raise ValueError(f"`rank` (={rank}) must be in [0, {ranks})")
    rows = np.arange(old.num_layers) if layers is None else layer_rows(layers, old.num_layers)
    readable = np.ones(ranks, dtype=np.bool_)
    for avoided in to_list(avoid_ranks, "avoid_ranks"):
        readable[check_id(avoided, "avoid_ranks", ranks)] = False
    is_loaded, wanted = check_loaded(loaded, old), check_senders(senders, old)
    count, per_rank = len(rows), old.slots_per_rank
    kind = np.empty((count, per_rank), dtype=np.int8)
    source = np.empty((count, per_rank), dtype=np.int64)
    reads_from = np.zeros((count, ranks), dtype=np.int64)
    most_staged = np.zeros(count, dtype=np.int64)
    scratch = np.empty((8, max(old.num_slots, old.num_experts, ranks) + 2), dtype=np.int64)
    _plan_layers(
        old.physical_to_logical_map, new.physical_to_logical_map, rows, rank, per_rank, old.num_experts,
        old.topology.rank_to_node, readable, is_loaded, wanted, kind, source, reads_from, most_staged, scratch,
    )  # fmt: skip
    num_reads = reads_from.sum(axis=1, dtype=np.int64)
    return PullPlan(rank, *map(read_only, (rows, kind, source, num_reads, reads_from, most_staged)))


def check_loaded(loaded: ArrayLike | None, layout: ExpertLayout) -> BoolArray:
    """Loaded slots as bool `[L, P]`; None: all."""
    shape = layout.physical_to_logical_map.shape
    if loaded is None:
        return np.ones(shape, dtype=np.bool_)
    array = np.array(to_numpy(loaded, "loaded"))
    if array.dtype != np.bool_ or array.shape != shape:
        raise ValueError(f"`loaded` ({array.dtype} {list(array.shape)}) must be bool {list(shape)}, one per slot")
    return array


def check_senders(senders: ArrayLike | None, layout: ExpertLayout) -> IntArray:
    """Senders as int64 `[L, P]`, -1 = any."""
    shape, ranks = layout.physical_to_logical_map.shape, layout.topology.num_ranks
    if senders is None:
        return read_only(np.full(shape, -1, dtype=np.int64))
    array = to_ids(senders, "senders")
    if array.shape != shape:
        raise ValueError(f"`senders` (shape {list(array.shape)}) must be {list(shape)}, one rank per slot")
    if (array >= ranks).any():
        layer, slot = (int(i) for i in np.argwhere(array >= ranks)[0])
        raise ValueError(
            f"`senders` (={array[layer, slot]}) must be ranks in [0, {ranks}) or -1 at layer {layer}, slot {slot}"
        )
    return read_only(array.astype(np.int64))


def check_slots_exist(layout: ExpertLayout, rank: int, num_slots: int, name: str = "layout") -> None:
    """Raise ValueError if the layout has an expert in a slot beyond the `num_slots` of this rank."""
    first = rank * layout.slots_per_rank
    beyond = layout.physical_to_logical_map[:, first + num_slots : first + layout.slots_per_rank]
    bad = np.argwhere(beyond >= 0)
    if len(bad):
        layer, slot = bad[0].tolist()
        more = f"; {len(bad) - 1} more" if len(bad) > 1 else ""
        raise ValueError(
            f"`{name}` (={beyond[layer, slot]}) must be -1 at layer {layer}, slot {first + num_slots + slot}{more}, "
            f"since rank {rank} has {num_slots} slots of {layout.slots_per_rank}; plan with `slots_per_rank`"
        )


@kernel
def _plan_layers(
    old: IntArray,
    new: IntArray,
    rows: IntArray,
    rank: int,
    per_rank: int,
    num_experts: int,
    rank_to_node: IntArray,
    readable: BoolArray,
    loaded: BoolArray,
    senders: IntArray,
    kind: Int8Array,
    source: IntArray,
    reads_from: IntArray,
    most_staged: IntArray,
    scratch: IntArray,
) -> None:
    starts, by_expert, filled, need_slot, need_choices = scratch[0], scratch[1], scratch[2], scratch[3], scratch[4]
    order, load, rank_of = scratch[5], scratch[6], scratch[7]
    for slot in range(old.shape[1]):  # a table: divisions would be most of the time
        rank_of[slot] = slot // per_rank
    for i in range(len(rows)):
        layer = rows[i]
        _group_loaded(old[layer], loaded[layer], num_experts, starts, by_expert, filled)
        needs, most_staged[i] = _find_needs(
            old[layer], new[layer], loaded[layer], rank, rank_of, num_experts, rank_to_node, readable, starts,
            by_expert, filled, need_slot, need_choices, kind[i], source[i],
        )  # fmt: skip
        _sort_needs(needs, len(rank_to_node), need_choices, order, load)
        load[: len(rank_to_node)] = 0
        for told in (True, False):  # reads whose sender is settled leave the others what room there is
            for k in range(needs):
                slot = need_slot[order[k]]
                expert, found = new[layer, slot], -1
                sender = senders[layer, slot]
                if sender >= 0 and readable[sender]:
                    for j in range(starts[expert], starts[expert + 1]):
                        if found < 0 and rank_of[by_expert[j]] == sender:
                            found = by_expert[j]
                if (found >= 0) != told:
                    continue
                if not told:
                    found = _choose_holder(
                        expert, rank_of[slot], layer, rank_of, rank_to_node, readable, starts, by_expert, load
                    )
                load[rank_of[found]] += 1
                if rank_of[slot] == rank:
                    source[i, slot - rank * per_rank] = found
                    reads_from[i, rank_of[found]] += 1


@kernel
def _group_loaded(
    row: IntArray, loaded: BoolArray, num_experts: int, starts: IntArray, by_expert: IntArray, cursor: IntArray
) -> None:
    """Loaded slots of expert e, ascending, in by_expert[starts[e] : starts[e + 1]]."""
    starts[: num_experts + 1] = 0
    for slot in range(len(row)):
        if row[slot] >= 0 and loaded[slot]:
            starts[row[slot] + 1] += 1
    for expert in range(num_experts):
        cursor[expert] = starts[expert]
        starts[expert + 1] += starts[expert]
    for slot in range(len(row)):
        if row[slot] >= 0 and loaded[slot]:
            by_expert[cursor[row[slot]]] = slot
            cursor[row[slot]] += 1


@kernel
def _find_needs(
    old: IntArray,
    new: IntArray,
    loaded: BoolArray,
    rank: int,
    rank_of: IntArray,
    num_experts: int,
    rank_to_node: IntArray,
    readable: BoolArray,
    starts: IntArray,
    by_expert: IntArray,
    filled: IntArray,
    need_slot: IntArray,
    need_choices: IntArray,
    kind: Int8Array,
    source: IntArray,
) -> tuple[int, int]:
    """Settle all that stays inside a rank; list what must be read, with the number of ranks that could serve it."""
    needs, most, per_rank = 0, 0, len(kind)
    filled[:num_experts] = -1
    for reader in range(len(rank_to_node)):
        staged = 0
        for slot in range(reader * per_rank, (reader + 1) * per_rank):
            expert = new[slot]
            what, where = PullKind.EMPTY, -1
            if expert >= 0 and old[slot] == expert and loaded[slot]:
                what, where = PullKind.KEEP, slot
            elif expert >= 0:
                # One look at the holders, written out here: calls with arrays would be most of the time.
                near, far, last = 0, 0, -1
                for k in range(starts[expert], starts[expert + 1]):
                    other = by_expert[k]
                    holder = rank_of[other]
                    if holder == reader:  # a slot that stays is preferred: nothing overwrites it
                        if where < 0 or (new[other] == expert and new[where] != expert):
                            where = other
                    elif holder != last and readable[holder]:
                        if rank_to_node[holder] == rank_to_node[reader]:
                            near += 1
                        else:
                            far += 1
                    last = holder
                if where >= 0:
                    what = PullKind.COPY_OLD
                elif filled[expert] >= reader * per_rank:
                    what, where = PullKind.COPY_NEW, filled[expert]
                else:
                    what = PullKind.RESTORE
                    filled[expert] = slot
                    staged += 1
                    if near + far > 0:
                        what = PullKind.READ
                        need_slot[needs] = slot
                        need_choices[needs] = near if near > 0 else far
                        needs += 1
            if reader == rank:
                kind[slot - reader * per_rank] = what
                source[slot - reader * per_rank] = where
        most = max(most, staged)
    return needs, most


@inline_kernel
def _choose_holder(
    expert: int,
    reader: int,
    layer: int,
    rank_of: IntArray,
    rank_to_node: IntArray,
    readable: BoolArray,
    starts: IntArray,
    by_expert: IntArray,
    load: IntArray,
) -> int:
    """Slot to read: near before far, then the rank with the fewest reads, then the first rank from rank `layer` on."""
    ranks = len(rank_to_node)
    first = layer % ranks
    best, best_far, best_load, best_turn, last = -1, True, 0, 0, -1
    for k in range(starts[expert], starts[expert + 1]):
        holder = rank_of[by_expert[k]]
        if holder == last or not readable[holder]:
            continue
        last = holder
        far = rank_to_node[holder] != rank_to_node[reader]
        turn = holder - first if holder >= first else holder - first + ranks
        better = best < 0 or (best_far and not far)
        if not better and far == best_far:
            better = load[holder] < best_load or (load[holder] == best_load and turn < best_turn)
        if better:
            best, best_far, best_load, best_turn = by_expert[k], far, load[holder], turn
    return best


@kernel
def _sort_needs(needs: int, ranks: int, need_choices: IntArray, order: IntArray, count: IntArray) -> None:
    """Fewest choices first, then in order of slots."""
    count[: ranks + 2] = 0
    for k in range(needs):
        count[need_choices[k] + 1] += 1
    for choices in range(ranks):
        count[choices + 1] += count[choices]
    for k in range(needs):
        order[count[need_choices[k]]] = k
        count[need_choices[k]] += 1
