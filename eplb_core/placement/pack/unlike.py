"""Placement of one block whose ranks differ, in speed or in number of slots.

A slot may stay empty here: with even shares a replica on a slow rank takes as much as one on a fast rank, so that one
more can make a layer worse. And more slots must never give a worse answer than fewer. So the block is placed with as
many slots as there are experts first, then with one slot more at a time, each step going on from the one before, until
its ranks are even; the best answer on the way is taken. An answer for fewer slots is one of those on the way.

More effort goes on from each step's answer for a while, and does not change where the next one starts: so it is never
worse either.
"""

from __future__ import annotations

import numpy as np

from eplb_core._arrays import IntArray
from eplb_core._numba import kernel
from eplb_core.placement.pack.block import (
    BEST_SO_FAR,
    EXPERT,
    EXPERT_LOAD,
    HOME,
    KEPT,
    ORDER,
    REPLICAS,
    SPEED,
    Scratch,
    count_replicas,
    pack_anywhere,
    sort_by_share,
    write_shares,
)
from eplb_core.placement.pack.search import TOLERANCE, lower_limit, search


@kernel
def solve_unlike(n: int, cap: IntArray, level: IntArray, stride: int, effort: float, scratch: Scratch) -> None:
    """Place the block into EXPERT.

    Args:
        n: Experts of the block, whose order by load is in ORDER.
        cap: Slots of each rank, at most n of each.
        level: Scratch, one entry per rank: slots that are used on the way to `cap`.
        stride: Places a rank.
        effort: As for `place`; less than 1 counts as 1.
        scratch: Of the block; WORK says that `n` stands for an empty slot.
    """
    ints, tokens, speed = scratch.ints, scratch.reals[EXPERT_LOAD], scratch.reals[SPEED]
    ints[ORDER, n], ints[REPLICAS, n], ints[HOME, n], tokens[n] = n, 1, -1, 0.0
    total = whole = 0.0
    for e in range(n):
        total += tokens[e]
    slots = 0
    for r in range(cap.size):
        whole += speed[r]
        slots += cap[r]
        level[r] = 0
    best = np.inf
    for used in range(1, slots + 1):
        place = _add_slot(cap, level, stride)
        if used < n:
            continue
        if used > n:
            ints[EXPERT, place] = n
        reached = _step(n, used, used > n, level, stride, scratch)
        if reached < best:
            best = reached
            _keep(BEST_SO_FAR, n, stride, level, scratch)
        if effort > 1.0:
            _keep(KEPT, n, stride, level, scratch)
            further = search(
                n, level, stride, -(-used // level.size), effort, lower_limit(n, used, level, scratch), scratch
            )
            if further < best:
                best = further
                _keep(BEST_SO_FAR, n, stride, level, scratch)
            _restore(KEPT, n, stride, level, scratch)
        if reached * whole <= total * (1.0 + TOLERANCE):
            break
    for i in range(level.size * stride):
        ints[EXPERT, i] = ints[BEST_SO_FAR, i]


@kernel
def _add_slot(cap: IntArray, level: IntArray, stride: int) -> int:
    """Let the rank with the fewest slots in use that has more use one more; returns its place."""
    rank = -1
    for r in range(cap.size):
        if level[r] < cap[r] and (rank < 0 or level[r] < level[rank]):
            rank = r
    level[rank] += 1
    return int(rank * stride + level[rank] - 1)


@kernel
def _step(n: int, used: int, go_on: bool, level: IntArray, stride: int, scratch: Scratch) -> float:
    """Go on from the assignment with one slot less, and where that does not reach the limit, begin anew too.

    Leaves the better one, and the shares of the divisor method in ITEM_SHARE; returns the largest time.
    """
    _keep(KEPT, n, stride, level, scratch)
    sort_by_share(n, count_replicas(n, used, level.size, scratch), scratch)
    lower = lower_limit(n, used, level, scratch)
    reached = np.inf
    if go_on:
        _restore(KEPT, n, stride, level, scratch)
        reached = search(n, level, stride, -(-used // level.size), 1.0, lower, scratch)
        if reached <= lower * (1.0 + TOLERANCE):
            return reached
        _keep(KEPT, n, stride, level, scratch)
        count_replicas(n, used, level.size, scratch)
    pack_anywhere(n, level, stride, scratch)
    anew = search(n, level, stride, -(-used // level.size), 1.0, lower, scratch)
    if anew >= reached:
        _restore(KEPT, n, stride, level, scratch)
    return min(anew, reached)


@kernel
def _keep(row: int, n: int, stride: int, level: IntArray, scratch: Scratch) -> None:
    """Copy who is where, and the counts, to two rows from `row` on."""
    for i in range(level.size * stride):
        scratch.ints[row, i] = scratch.ints[EXPERT, i]
    for e in range(n + 1):
        scratch.ints[row + 1, e] = scratch.ints[REPLICAS, e]


@kernel
def _restore(row: int, n: int, stride: int, level: IntArray, scratch: Scratch) -> None:
    """Take both back, and derive shares and loads."""
    for i in range(level.size * stride):
        scratch.ints[EXPERT, i] = scratch.ints[row, i]
    for e in range(n + 1):
        scratch.ints[REPLICAS, e] = scratch.ints[row + 1, e]
    write_shares(level, stride, scratch)
