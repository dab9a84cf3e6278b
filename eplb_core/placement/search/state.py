"""What the search knows of the row that it is at: who holds what, shares, times, and how shares follow a step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eplb_core._arrays import FloatArray, IntArray
from eplb_core._numba import inline_kernel, kernel, lean_kernel

# Passes over the replicated experts by which shares come near the best at the start.
FIRST_SWEEPS = 12
# Times that change by less, in units of an even rank's, have settled.
_STILL = 1e-4
# What a slot that cannot be exchanged costs.
NEVER = 1e30


class Work(NamedTuple):
    """Arrays of one call, for all layers in turn."""

    weight: FloatArray
    """Of each window `[T]`; their sum is 1."""
    pace: FloatArray
    """Time of each rank for one token `[R]`."""
    load: FloatArray
    """Of each window and expert `[T, E]`, in units of the time that an even layout would take."""
    share: FloatArray
    """Load of each slot `[T, P]`."""
    time: FloatArray
    """Of each rank `[T, R]`."""
    power: FloatArray
    """Sum over windows of weight * time^8 `[R]`."""
    fetch: FloatArray
    """Cost for a rank to hold an expert `[E, R]`; 0 where it does in the layout that is in place."""
    replicas: IntArray
    """Of each expert `[E]`."""
    holds: npt.NDArray[np.int8]
    """Slots of an expert on a rank `[E, R]`."""
    holders: IntArray
    """Ranks that hold an expert `[E, R]`, the first `num_holders[e]`."""
    num_holders: IntArray
    """`[E]`."""
    filled: IntArray
    """Slots in use `[R]`."""
    others: IntArray
    """Ranks that the fullest may exchange with `[R]`, the first n."""
    other_pace: FloatArray
    """Their paces `[R]`."""
    other_power: FloatArray
    """Their powers `[R]`."""
    other_time: FloatArray
    """Their times `[T, R]`."""
    other_share: FloatArray
    """Shares of their slots `[T, P]`: first all ranks' first slots, then their second ones ..."""
    other_pay: FloatArray
    """What it costs the fullest rank to take each of these `[P]`."""
    pay: FloatArray
    """What it costs the others to take one expert `[R]`."""
    after: FloatArray
    """Power of the two ranks after each exchange, then its net gain by transfer `[P]`."""
    most: FloatArray
    """Power that an exchange with each of them takes away at most `[R]`."""
    tilt: FloatArray
    """How power falls with load that goes to each of them `[T, R]`."""
    lift: FloatArray
    """What that makes of the load of one slot of the fullest rank `[R]`."""
    drop: FloatArray
    """What that makes of the load of each of their slots `[P]`."""
    near: IntArray
    """Exchanges that may be better than what was found `[P]`, the first n; then the same of their slots."""
    near_share: FloatArray
    """Shares in one window `[P]`."""
    near_time: FloatArray
    """Times of the ranks in one window `[P]`."""
    near_pace: FloatArray
    """Paces of the ranks `[P]`."""
    gift_slot: IntArray
    """Slots that can be given away `[P]`."""
    gift_time: FloatArray
    """Time of their rank without them `[T, P]`."""
    gift_pace: FloatArray
    """Pace of their rank `[P]`."""
    gift_other: IntArray
    """Rank that takes over what the slot gives up `[P]`; -1 = nothing to take over, or all other holders."""
    gift_burden: FloatArray
    """Power that their expert's other holders gain, less the power of their rank `[P]`."""
    gift_after: FloatArray
    """Power after each gift `[P]`."""
    spot: IntArray
    """Slots of one expert `[R]`."""
    debt: FloatArray
    """Power that all holders of an expert would gain with one replica less `[E]`."""
    held: npt.NDArray[np.int8]
    """Whether a rank holds an expert in the layout that is in place `[E, R]`: no transfer."""
    home: IntArray
    """Node in which a copy of the expert must stay `[E]`; -1 = any."""


@kernel
def new_work(num_windows: int, experts: int, pace: FloatArray, stride: int) -> Work:
    """Allocate for layers of this size."""
    ranks = pace.size
    slots = ranks * stride
    by_window = (num_windows, slots)
    return Work(
        np.zeros(num_windows),
        pace,
        np.zeros((num_windows, experts)),
        np.zeros(by_window),
        np.zeros((num_windows, ranks)),
        np.zeros(ranks),
        np.zeros((experts, ranks)),
        np.zeros(experts, np.int64),
        np.zeros((experts, ranks), np.int8),
        np.zeros((experts, ranks), np.int64),
        np.zeros(experts, np.int64),
        np.zeros(ranks, np.int64),
        np.zeros(ranks, np.int64),
        np.zeros(ranks),
        np.zeros(ranks),
        np.zeros((num_windows, ranks)),
        np.zeros(by_window),
        np.zeros(slots),
        np.zeros(ranks),
        np.zeros(slots),
        np.zeros(ranks),
        np.zeros((num_windows, ranks)),
        np.zeros(ranks),
        np.zeros(slots),
        np.zeros(slots, np.int64),
        np.zeros(slots),
        np.zeros(slots),
        np.zeros(slots),
        np.zeros(slots, np.int64),
        np.zeros(by_window),
        np.zeros(slots),
        np.zeros(slots, np.int64),
        np.zeros(slots),
        np.zeros(slots),
        np.zeros(ranks, np.int64),
        np.zeros(experts),
        np.zeros((experts, ranks), np.int8),
        np.full(experts, -1, np.int64),
    )


@lean_kernel
def begin(weighted: bool, row: IntArray, work: Work) -> None:
    """Derive counts, holders, shares and times from the row."""
    ranks = work.pace.size
    stride = row.size // ranks
    count, share, load = work.replicas, work.share, work.load
    count[:] = 0
    for e in range(count.size):
        for i in range(work.num_holders[e]):
            work.holds[e, work.holders[e, i]] = 0
    work.num_holders[:] = 0
    work.filled[:] = 0
    for p in range(row.size):
        if row[p] >= 0:
            count[row[p]] += 1
            add_holder(row[p], p // stride, work)
            work.filled[p // stride] += 1
    for t in range(load.shape[0]):
        for p in range(row.size):
            share[t, p] = load[t, row[p]] / count[row[p]] if row[p] >= 0 else 0.0
    if weighted:
        solve_shares(FIRST_SWEEPS, row, work)
    else:
        for r in range(ranks):
            retime(r, work)


@lean_kernel
def add_holder(e: int, r: int, work: Work) -> None:
    """Count one more slot of `e` on rank `r`."""
    if work.holds[e, r] == 0:
        work.holders[e, work.num_holders[e]] = r
        work.num_holders[e] += 1
    work.holds[e, r] += 1


@lean_kernel
def drop_holder(e: int, r: int, work: Work) -> None:
    """Count one slot of `e` less on rank `r`."""
    holders = work.holders
    work.holds[e, r] -= 1
    if work.holds[e, r] == 0:
        i = 0
        while holders[e, i] != r:
            i += 1
        work.num_holders[e] -= 1
        holders[e, i] = holders[e, work.num_holders[e]]


@lean_kernel
def share_evenly(e: int, row: IntArray, work: Work) -> None:
    """Give each slot of `e` an equal share of its load, in each window."""
    share, load = work.share, work.load
    ranks = work.holders.shape[1]
    stride = row.size // ranks
    for i in range(work.num_holders[e]):
        r = work.holders[e, i]
        for p in range(r * stride, r * stride + stride):
            if row[p] == e:
                for t in range(load.shape[0]):
                    share[t, p] = load[t, e] / work.replicas[e]


@lean_kernel
def retime(r: int, work: Work) -> None:
    """Add up a rank's shares anew, always in the same order: what it says depends on the row alone."""
    share, time, weight, pace = work.share, work.time, work.weight, work.pace
    stride = share.shape[1] // pace.size
    power = 0.0
    for t in range(share.shape[0]):
        total = 0.0
        for p in range(r * stride, r * stride + stride):
            total += share[t, p]
        time[t, r] = total * pace[r]
        power += weight[t] * eighth(time[t, r])
    work.power[r] = power


@lean_kernel
def scale(windows: FloatArray, weights: FloatArray, layer: int, speed: float, work: Work) -> bool:
    """Write a layer's load in units of the time of an even layout, and weights that sum to 1; is there any load?"""
    weight, load = work.weight, work.load
    known = 0.0
    for t in range(load.shape[0]):
        total = 0.0
        for e in range(load.shape[1]):
            total += windows[t, layer, e]
        weight[t] = weights[t] if total > 0.0 else 0.0
        known += weight[t]
        unit = speed / total if total > 0.0 else 0.0
        for e in range(load.shape[1]):
            load[t, e] = windows[t, layer, e] * unit
    if known <= 0.0:
        return False
    for t in range(load.shape[0]):
        weight[t] /= known
    return True


@lean_kernel
def add_speed(capacity: IntArray, pace: FloatArray) -> float:
    """Of all live ranks."""
    speed = 0.0
    for r in range(capacity.size):
        if capacity[r] > 0:
            speed += 1.0 / pace[r]
    return speed


@lean_kernel
def add_up(values: FloatArray) -> float:
    """Add in order: numpy's sum adds in another one."""
    total = 0.0
    for value in values:
        total += value
    return total


@lean_kernel
def balance_of(weight: FloatArray, time: FloatArray) -> float:
    """Mean over windows of 1 / largest time, which is the balancedness: the even time is 1."""
    balance = 0.0
    for t in range(time.shape[0]):
        worst = 0.0
        for r in range(time.shape[1]):
            worst = max(worst, time[t, r])
        if worst > 0.0:
            balance += weight[t] / worst
    return balance


@inline_kernel
def eighth(x: float) -> float:
    """x^8."""
    x = x * x
    x = x * x
    return x * x


@lean_kernel
def solve_shares(sweeps: int, row: IntArray, work: Work) -> None:
    """Bring the shares of replicated experts near those with the most even times, in each window; then the times.

    One expert after the other takes back its shares and pours them over its holders, lowest first, as water would
    stand. That lowers any sum of convex functions of the times, and settles where none of them can be lowered.
    """
    ranks = work.pace.size
    for r in range(ranks):
        retime(r, work)
    for _ in range(sweeps):
        change = 0.0
        for e in range(work.replicas.size):
            if work.num_holders[e] > 1:
                change = max(change, _pour(e, row, work))
        if change < _STILL:
            break
    for r in range(ranks):
        retime(r, work)


@lean_kernel
def _pour(e: int, row: IntArray, work: Work) -> float:
    """Pour an expert's load over its holders in each window; returns the largest change of a time.

    A rank that holds it twice takes its part in the first of the slots.
    """
    share, time, load, spot, pace = work.share, work.time, work.load, work.spot, work.pace
    stride = row.size // pace.size
    n = work.num_holders[e]
    home = work.holders[e]
    for i in range(n):
        spot[i] = -1
        for p in range(home[i] * stride, home[i] * stride + stride):
            if row[p] == e and spot[i] < 0:
                spot[i] = p
            elif row[p] == e:
                for t in range(load.shape[0]):
                    share[t, spot[i]] += share[t, p]
                    share[t, p] = 0.0
    change = 0.0
    for t in range(load.shape[0]):
        for i in range(n):
            time[t, home[i]] -= share[t, spot[i]] * pace[home[i]]
        # The level at which the poured load is used up: that of the lowest ranks which stand under it.
        level = np.inf
        while True:
            rest, room = load[t, e], 0.0
            for i in range(n):
                if time[t, home[i]] < level:
                    rest += time[t, home[i]] / pace[home[i]]
                    room += 1.0 / pace[home[i]]
            if room == 0.0 or rest / room >= level:
                break
            level = rest / room
        for i in range(n):
            r = home[i]
            part = max(level - time[t, r], 0.0) / pace[r]
            change = max(change, abs(part - share[t, spot[i]]) * pace[r])
            share[t, spot[i]] = part
            time[t, r] += part * pace[r]
    return change
