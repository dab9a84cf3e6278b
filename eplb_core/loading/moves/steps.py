"""The steps of a migration: what is staged in one go and installed in one pass, a layer or a part of one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from eplb_core._arrays import ArrayLike, BoolArray, IntArray
from eplb_core._numba import kernel
from eplb_core.layout import ExpertLayout, layer_rows
from eplb_core.loading.pull_plan import Int8Array, plan_pull


class Step(NamedTuple):
    """One layer's row on its way from `before` to `after`, and this rank's part in it."""

    layer: int
    before: ExpertLayout
    """Live layout before the step."""
    after: ExpertLayout
    """Live layout after it; differs from `before` in `layer` alone."""
    kind: Int8Array
    """As in `PullPlan`, int8 `[S]`."""
    source_slot: IntArray
    """As in `PullPlan`, int64 `[S]`."""
    last: bool
    """The layer is as it should be after this step."""


def plan_steps(
    old: ExpertLayout,
    new: ExpertLayout,
    *,
    rank: int,
    capacity: int,
    layers: ArrayLike | None = None,
    avoid_ranks: Iterable[int] = (),
    senders: ArrayLike | None = None,
) -> Iterator[Step]:
    """Yield the steps from `old` to `new`, layer by layer; the same number with the same rows on every rank.

    A layer is one step if `capacity` slots of staging hold what any rank must read for it. Otherwise it passes through
    rows that are neither old nor new: each holds every expert, and no rank reads more than `capacity` slots in a step.

    Args:
        old: Live layout.
        new: Layout to reach.
        rank: This rank.
        capacity: Slots of staging, 1 or more, the same on every rank.
        layers: Rows to move. Default: all. Rows that do not change cost nothing; one that is named twice
            moves once.
        avoid_ranks: As in `plan_pull`: their copies of an expert count for nothing on the way.
        senders: As in `plan_pull`.

    Raises:
        ValueError: `new` takes the last copy of an expert from the ranks that may be read.
    """
    old.check_same_frame(new)
    changed = (old.physical_to_logical_map != new.physical_to_logical_map).any(axis=1)
    rows = np.arange(old.num_layers) if layers is None else layer_rows(layers, old.num_layers)
    rows = rows[changed[rows]]
    rows = rows[np.sort(np.unique(rows, return_index=True)[1])]  # a second time, what was read would be read too late
    avoided = tuple(avoid_ranks)
    readable = ~np.isin(np.arange(old.num_slots) // old.slots_per_rank, avoided)
    if avoided:
        _check_last_copies(old, new, rows, readable)
    plan = plan_pull(old, new, rank=rank, layers=rows, avoid_ranks=avoided, senders=senders)
    live = old
    for i, layer in enumerate(rows.tolist()):
        if plan.most_staged[i] <= capacity:
            after = _with_row(live, layer, new.physical_to_logical_map[layer])
            yield Step(layer, live, after, plan.kind[i], plan.source_slot[i], True)
            live = after
            continue
        while not np.array_equal(live.physical_to_logical_map[layer], new.physical_to_logical_map[layer]):
            after = _part_of_the_way(live, new, layer, capacity, readable)
            part = plan_pull(live, after, rank=rank, layers=[layer], avoid_ranks=avoided, senders=senders)
            last = np.array_equal(after.physical_to_logical_map[layer], new.physical_to_logical_map[layer])
            yield Step(layer, live, after, part.kind[0], part.source_slot[0], last)
            live = after


def _with_row(live: ExpertLayout, layer: int, row: IntArray) -> ExpertLayout:
    """Replace a row without the checks of `live.replace`, which take longer than all else of a step."""
    p2l = live.physical_to_logical_map.copy()
    p2l[layer] = row
    return ExpertLayout._of_valid(p2l, live.num_experts, live.topology)


def _check_last_copies(old: ExpertLayout, new: ExpertLayout, rows: IntArray, readable: BoolArray) -> None:
    copies = np.empty((2, old.num_experts), dtype=np.int64)
    layer, expert = _find_lost(old.physical_to_logical_map, new.physical_to_logical_map, rows, readable, copies)
    if layer >= 0:
        raise ValueError(
            f"`new` must keep expert {expert} of layer {layer} on a rank that lives; give ranks that are gone "
            "no slots (`active_ranks`)"
        )


@kernel
def _find_lost(old: IntArray, new: IntArray, rows: IntArray, readable: BoolArray, copies: IntArray) -> tuple[int, int]:
    """First (layer, expert) of which readable slots have a copy in `old` and none in `new`, or (-1, -1)."""
    for layer in rows:
        copies[:] = 0
        for slot in range(len(readable)):
            if readable[slot]:
                if old[layer, slot] >= 0:
                    copies[0, old[layer, slot]] += 1
                if new[layer, slot] >= 0:
                    copies[1, new[layer, slot]] += 1
        for expert in range(copies.shape[1]):
            if copies[0, expert] > 0 and copies[1, expert] == 0:
                return layer, expert
    return -1, -1


def _part_of_the_way(
    live: ExpertLayout, new: ExpertLayout, layer: int, capacity: int, readable: BoolArray
) -> ExpertLayout:
    """The layout after one step for which `capacity` slots of staging suffice on every rank."""
    row, ranks = live.physical_to_logical_map[layer].copy(), live.topology.num_ranks
    scratch = np.zeros((7, max(live.num_slots, live.num_experts, ranks)), dtype=np.int64)
    _next_row(row, new.physical_to_logical_map[layer], ranks, capacity, readable, scratch)
    return _with_row(live, layer, row)


@kernel
def _next_row(row: IntArray, new: IntArray, ranks: int, capacity: int, readable: BoolArray, scratch: IntArray) -> None:
    """Move a row towards `new` in place, at most `capacity` arrivals a rank, no expert lost on the way.

    A slot is surplus if its rank does not want what it holds; a want is met by overwriting a surplus slot of the rank
    whose expert has another copy. If there is none at all, all surplus slots hold last copies: then walk from a rank
    that wants something to the rank that wants what its surplus slot holds, and so on, until a rank comes again; the
    ranks on that circle exchange experts, one arrival each. So one slot of staging is always enough.

    Slots that are not `readable` hold no copy, want nothing and stay as they are until all else is done.
    """
    per_rank = len(row) // ranks
    copies, met, wanted, used = scratch[0], scratch[1], scratch[2], scratch[3]
    for slot in range(len(row)):
        if not readable[slot]:
            met[slot] = wanted[slot] = 1
        elif row[slot] >= 0:
            copies[row[slot]] += 1
    for rank in range(ranks):
        _match(row, new, rank * per_rank, per_rank, met, wanted)
    arrivals, before = 0, -1
    while arrivals != before:
        before = arrivals
        for rank in range(ranks):
            while used[rank] < capacity and _meet_one(row, new, rank * per_rank, per_rank, copies, met, wanted):
                used[rank] += 1
                arrivals += 1
    if arrivals == 0:
        _exchange(row, new, per_rank, met, wanted, scratch[4:])
    for slot in range(len(row)):
        if new[slot] >= 0 and not met[slot]:
            return
    row[:] = new  # all experts are on their ranks: what is left is order within a rank, and slots to be emptied


@kernel
def _match(row: IntArray, new: IntArray, first: int, per_rank: int, met: IntArray, wanted: IntArray) -> None:
    """Pair what a rank holds with what it wants; `met` marks wants, `wanted` slots that are no surplus."""
    for slot in range(first, first + per_rank):
        if row[slot] == new[slot]:
            met[slot] = wanted[slot] = 1
    for slot in range(first, first + per_rank):
        for want in range(first, first + per_rank):
            if not wanted[slot] and not met[want] and row[slot] == new[want]:
                met[want] = wanted[slot] = 1


@kernel
def _meet_one(
    row: IntArray, new: IntArray, first: int, per_rank: int, copies: IntArray, met: IntArray, wanted: IntArray
) -> bool:
    """Meet a rank's first want, if an expert that has another copy can go; in the slot where it belongs if possible."""
    for want in range(first, first + per_rank):
        if new[want] < 0 or met[want]:
            continue
        for k in range(per_rank):
            slot = want if k == 0 else first + k - 1 if first + k - 1 < want else first + k
            if not wanted[slot] and (row[slot] < 0 or copies[row[slot]] > 1):
                if row[slot] >= 0:
                    copies[row[slot]] -= 1
                row[slot] = new[want]
                copies[row[slot]] += 1
                met[want] = wanted[slot] = 1
                return True
        return False
    return False


@kernel
def _exchange(row: IntArray, new: IntArray, per_rank: int, met: IntArray, wanted: IntArray, scratch: IntArray) -> None:
    """Exchange along one circle of ranks."""
    place, path_slot, path_want = scratch[0], scratch[1], scratch[2]
    place[:] = -1
    want = 0
    while want < len(row) and (new[want] < 0 or met[want]):
        want += 1
    if want == len(row):
        return
    length = 0
    while place[want // per_rank] < 0:
        rank = want // per_rank
        place[rank] = length
        slot = rank * per_rank
        while wanted[slot]:
            slot += 1
        path_slot[length], path_want[length] = slot, want
        length += 1
        want = 0
        while new[want] != row[slot] or met[want]:
            want += 1
    start = place[want // per_rank]
    path_want[start] = want
    given = row[path_slot[length - 1]]
    for k in range(start, length):
        given, row[path_slot[k]] = row[path_slot[k]], given
        met[path_want[k]] = wanted[path_slot[k]] = 1
