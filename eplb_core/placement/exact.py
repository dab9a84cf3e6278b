"""Few experts on few ranks: every layout there is, as far as it can be better than what is known (branch and bound).

Experts are given their ranks one after the other, the hottest first. Those placed so far limit all layouts
that begin like this; where the limit is no better than the best layout known, none of these is looked at.
"""

from __future__ import annotations

import numpy as np

from eplb_core._arrays import BoolArray, FloatArray, IntArray
from eplb_core._numba import kernel
from eplb_core.placement.pack.layers import ranks_alike
from eplb_core.placement.problem import Problem
from eplb_core.placement.windows import Load

# Ranks with slots, and experts times these: with more, nothing is tried.
_MOST_RANKS, _MOST_PAIRS = 6, 32
# Choices that are judged for a layer and a number of slots at effort 1, times windows.
_WORK = 1 << 14
# No layout is taken for less: rounding is no gain.
_SOME_GAIN = 1e-9


def is_tiny(problem: Problem) -> bool:
    """Are there few enough experts and ranks to try all layouts?"""
    ranks = np.count_nonzero(problem.capacity)
    return bool(problem.pin == 0 and ranks <= _MOST_RANKS and problem.num_experts * ranks <= _MOST_PAIRS)


def best_rows(
    problem: Problem,
    capacity: IntArray,
    load: Load,
    asked: BoolArray,
    effort: float,
    p2l: IntArray,
    reached: FloatArray,
) -> tuple[IntArray, BoolArray]:
    """The best rows there are, as far as the work suffices, and for which layers it did.

    More effort goes further on the same way, and so does a better row to begin with: neither is ever worse.

    Args:
        problem: What the rows must satisfy; `is_tiny`.
        capacity: Slots of each rank that may be used `[R]`, no more than it has; may be 0.
        load: Their load.
        asked: Layers to look at `[L]`.
        effort: As for `place`.
        p2l: Rows to begin with `[L, P]`; those for which nothing better is found are returned.
        reached: Balancedness of each `[L]`.
    """
    speed, live = problem.topology.rank_speed, np.flatnonzero(problem.capacity)
    live = live[np.lexsort((live, capacity[live], speed[live]))]  # ranks that are alike are neighbours
    alike = (np.diff(speed[live]) == 0.0) & (np.diff(capacity[live]) == 0)
    twin = int((alike << np.arange(alike.size)).sum())
    # The sets of ranks whose time is looked at: for solved shares all of them, by max-flow min-cut.
    sets = np.arange(1, 1 << live.size) if problem.weighted else 1 << np.arange(live.size)
    set_speed = (sets[:, None] >> np.arange(live.size) & 1) @ speed[live]
    rows, done, work, full = p2l.copy(), np.zeros_like(asked), int(_WORK * effort), ranks_alike(problem)
    room = np.minimum(capacity[live], problem.num_experts)
    for layer in np.flatnonzero(asked).tolist():
        order = np.argsort(-load.total[layer], kind="stable")
        windows = np.ascontiguousarray(load.windows[:, layer, order])
        holders, best = np.zeros_like(order), reached[layer] / problem.reach
        done[layer] = _search(
            windows, load.weights, room, sets, set_speed, twin, problem.weighted, full, work, best, holders
        )
        if holders.any():
            row = rows[layer].reshape(-1, problem.stride)
            row[:] = -1
            for i, rank in enumerate(live.tolist()):
                held = order[(holders >> i & 1) == 1]
                row[rank, : held.size] = held
    return rows, done


@kernel
def _search(
    load: FloatArray,
    weights: FloatArray,
    capacity: IntArray,
    sets: IntArray,
    set_speed: FloatArray,
    twin: int,
    weighted: bool,
    full: bool,
    work: int,
    best: float,
    holders: IntArray,
) -> bool:
    """Find who holds what, better than `best`.

    Args:
        load: `[T, E]`, the hottest expert first.
        weights: `[T]`.
        capacity: Slots of each rank `[R]`, no more than experts.
        sets: Sets of ranks, as bits.
        set_speed: Of all ranks of each.
        twin: Ranks that are like the next one, as bits.
        weighted: Shares are solved; else equal.
        full: No slot stays empty.
        work: Most choices, times windows.
        best: Balancedness to exceed.
        holders: Written `[E]` where there is something better: the ranks of each expert, as bits.

    Returns:
        Whether all was looked at, so that nothing is better than what was found.
    """
    windows, experts = load.shape
    ranks = capacity.size
    held = np.zeros((experts + 1, windows, sets.size))
    room, twins = np.zeros((experts + 1, ranks), np.int64), np.zeros(experts + 1, np.int64)
    mask, rest = np.zeros(experts, np.int64), np.zeros((windows, experts + 1))
    room[0], twins[0] = capacity, twin
    for t in range(windows):
        for e in range(experts - 1, -1, -1):
            rest[t, e] = rest[t, e + 1] + load[t, e]
    e = 0
    mask[0] = 1 << ranks
    while e >= 0:
        mask[e] -= 1
        if mask[e] == 0 or work <= 0:
            e -= 1
            continue
        # Of ranks that are alike so far the last ones come first.
        if mask[e] & ~(mask[e] >> 1) & twins[e] or not _take_room(mask[e], experts - e - 1, full, room[e], room[e + 1]):
            continue
        work -= windows
        limit = _add_expert(mask[e], e, load, rest, weights, room[e + 1], sets, set_speed, weighted, held)
        if limit <= best + _SOME_GAIN:
            continue
        if e + 1 == experts:
            best = limit
            holders[:] = mask
            continue
        twins[e + 1] = twins[e] & ~(mask[e] ^ (mask[e] >> 1))
        e += 1
        mask[e] = 1 << ranks
        if (load[:, e] == load[:, e - 1]).all():
            mask[e] = mask[e - 1] + 1  # experts that are alike come in order
    return work > 0


@kernel
def _take_room(mask: int, experts: int, full: bool, before: IntArray, after: IntArray) -> bool:
    """Give a slot of each rank of `mask` away; False where one has none, or too few are left for further `experts`.

    With `full` also where these are too few to fill a rank.
    """
    left = 0
    for r in range(before.size):
        after[r] = before[r] - (mask >> r & 1)
        left += after[r]
        if after[r] < 0 or (full and after[r] > experts):
            return False
    return left >= experts


@kernel
def _add_expert(
    mask: int,
    e: int,
    load: FloatArray,
    rest: FloatArray,
    weights: FloatArray,
    room: IntArray,
    sets: IntArray,
    set_speed: FloatArray,
    weighted: bool,
    held: FloatArray,
) -> float:
    """Add to `held[e]` what the ranks `mask` take of expert `e`; returns the limit of the balancedness.

    A set of ranks takes at least what it holds (for solved shares: of experts that no other rank has), and those that
    have room also all that is still to come.
    """
    windows, ranks = load.shape[0], room.size
    replicas = open_ranks = 0
    open_speed = whole_speed = 0.0
    for r in range(ranks):
        replicas += mask >> r & 1
    for i in range(sets.size):
        for r in range(ranks):
            if sets[i] == 1 << r:
                whole_speed += set_speed[i]
                if room[r] > 0:
                    open_ranks |= 1 << r
                    open_speed += set_speed[i]
    total = known = 0.0
    for t in range(windows):
        if rest[t, 0] <= 0.0 or weights[t] <= 0.0:
            continue
        mean = rest[t, 0] / whole_speed
        worst = mean
        to_come = rest[t, e + 1]
        for i in range(sets.size):
            held[e + 1, t, i] = held[e, t, i]
            if weighted and mask & ~sets[i] == 0:
                held[e + 1, t, i] += load[t, e]
            elif not weighted and mask & sets[i] != 0:
                held[e + 1, t, i] += load[t, e] / replicas
            worst = max(worst, held[e + 1, t, i] / set_speed[i])
            if (weighted and sets[i] == open_ranks) or (not weighted and sets[i] & open_ranks != 0):
                to_come += held[e + 1, t, i]
        if rest[t, e + 1] > 0.0:
            worst = max(worst, to_come / open_speed)
        total += weights[t] * mean / worst
        known += weights[t]
    return total / known
