"""From a layout that is in place to a better one, a transfer at a time.

The search sees every window of load. It lowers the sum over windows and ranks of time^8, a smooth stand-in for the sum
over windows of the largest time: where a rank is fullest in one window and light in another, it is the windows' sum
that counts, and ranks close below the largest count too. Steps are an exchange of two replicas (two transfers) and a slot
given to an expert of a full rank (one). A step that undoes an earlier one gives its transfers back. Of all steps whose
gain is above the price of their transfers, the one with the most net gain per transfer is made, until there is none.
"""

from __future__ import annotations

import numpy as np

from eplb_core._arrays import BoolArray, FloatArray, IntArray
from eplb_core._numba import inline_kernel, kernel

# Ranks whose replicas may leave in a step: those with the largest sums. More ranks cost time and gain little.
_FULLEST = 3


@kernel
def improve_layers(
    windows: FloatArray,
    weights: FloatArray,
    old: IntArray,
    skip: BoolArray,
    capacity: IntArray,
    pace: FloatArray,
    link_cost: FloatArray,
    price: float,
    budget: float,
    most_steps: int,
    p2l: IntArray,
    spent: FloatArray,
) -> None:
    """Improve every layer that is not skipped; `p2l` must hold every expert on a live rank.

    Args:
        windows: Load `[T, L, E]`.
        weights: Weight of each window `[T]`; windows without load have no say.
        old: Layout that the weights are in `[L, P]`: what a rank holds there costs it nothing.
        skip: Layers to leave alone `[L]`.
        capacity: Slots to fill of each rank `[R]`; 0 = not active.
        pace: Time for one token `[R]`.
        link_cost: Cost of a transfer from rank to rank `[R, R]`.
        price: Gain in balancedness that a transfer of cost 1 must bring.
        budget: Most cost a layer.
        most_steps: Most steps a layer.
        p2l: `[L, P]`, changed in place.
        spent: Written `[L]`: cost of the transfers from `old`, as far as steps caused it.
    """
    num_windows, layers, experts = windows.shape
    slots = p2l.shape[1]
    ranks = capacity.size
    stride = slots // ranks
    load = np.zeros((num_windows, experts))
    weight = np.zeros(num_windows)
    fetch = np.zeros((ranks, experts))
    speed = 0.0
    for r in range(ranks):
        if capacity[r] > 0:
            speed += 1.0 / pace[r]
    for layer in range(layers):
        if skip[layer]:
            continue
        known = 0.0
        for t in range(num_windows):
            total = 0.0
            for e in range(experts):
                total += windows[t, layer, e]
            weight[t] = weights[t] if total > 0.0 else 0.0
            known += weight[t]
            for e in range(experts):
                # In units of the time that a perfectly even layout would take.
                load[t, e] = windows[t, layer, e] * speed / total if total > 0.0 else 0.0
        if known <= 0.0:
            continue
        for t in range(num_windows):
            weight[t] /= known
        _price_fetches(old[layer], stride, link_cost, fetch)
        spent[layer] = _improve(load, weight, fetch, capacity, pace, price, budget, most_steps, p2l[layer])


@kernel
def _price_fetches(old: IntArray, stride: int, link_cost: FloatArray, fetch: FloatArray) -> None:
    """Cost for each rank to hold each expert `[R, E]`: 0 where it does, else that of the cheapest holder's link."""
    fetch[:] = np.inf
    for r in range(fetch.shape[0]):
        for p in range(old.size):
            e = old[p]
            if e >= 0:
                cost = 0.0 if p // stride == r else link_cost[p // stride, r]
                fetch[r, e] = min(fetch[r, e], cost)


@inline_kernel
def _eighth(x: float) -> float:
    x = x * x
    x = x * x
    return x * x


@kernel
def _improve(
    load: FloatArray,
    weight: FloatArray,
    fetch: FloatArray,
    capacity: IntArray,
    pace: FloatArray,
    price: float,
    budget: float,
    most_steps: int,
    row: IntArray,
) -> float:
    """Make steps on one layer while they pay; returns their cost."""
    num_windows, experts = load.shape
    slots, ranks = row.size, capacity.size
    stride = slots // ranks
    count = np.zeros(experts, dtype=np.int64)
    has = np.zeros((ranks, experts), dtype=np.bool_)
    share = np.zeros((num_windows, slots))
    time = np.zeros((num_windows, ranks))
    slot_time = np.zeros((num_windows, slots))
    slot_pace = np.zeros(slots)
    power = np.zeros(ranks)
    after = np.zeros(slots)
    for p in range(slots):
        slot_pace[p] = pace[p // stride]
        if row[p] >= 0:
            count[row[p]] += 1
            has[p // stride, row[p]] = True
    spent = 0.0
    for _ in range(most_steps):
        unit = _measure(load, weight, pace, count, row, share, time, slot_time, power)
        kind = -1
        best = 1e-9
        place = other = 0
        cost = 0.0
        tried = np.zeros(ranks, dtype=np.bool_)
        for _ in range(min(_FULLEST, ranks)):
            full = -1
            for r in range(ranks):
                if not tried[r] and capacity[r] > 0 and (full < 0 or power[r] > power[full]):
                    full = r
            if full < 0:
                break
            tried[full] = True
            for a in range(full * stride, full * stride + stride):
                if row[a] < 0:
                    continue
                _powers_after_exchange(a, full, weight, share, time, slot_time, pace, slot_pace, after)
                for p in range(slots):
                    r = p // stride
                    e, f = row[a], row[p]
                    if r == full or f < 0 or capacity[r] == 0 or has[r, e] or has[full, f]:
                        continue
                    pays = fetch[r, e] + fetch[full, f] - fetch[full, e] - fetch[r, f]
                    net = (power[full] + power[r] - after[p]) * unit - price * pays
                    if net / max(pays, 0.5) > best and net > 1e-9 and spent + pays <= budget:
                        best = net / max(pays, 0.5)
                        kind, place, other, cost = 0, a, p, pays
                if count[row[a]] >= ranks:
                    continue
                for p in range(slots):
                    r = p // stride
                    e, f = row[a], row[p]
                    if has[r, e] or p - r * stride >= capacity[r] or (f >= 0 and count[f] < 2):
                        continue
                    pays = fetch[r, e] - (fetch[r, f] if f >= 0 else 0.0)
                    # Not worth working out if even all the load of the full rank would not pay.
                    if power[full] * unit <= price * pays or spent + pays > budget:
                        continue
                    net = _gain_of_gift(e, p, load, weight, time, pace, count, has, power, row, stride) * unit
                    net -= price * pays
                    if net / max(pays, 0.5) > best and net > 1e-9:
                        best = net / max(pays, 0.5)
                        kind, place, other, cost = 1, a, p, pays
        if kind < 0:
            break
        spent += cost
        _step(kind, place, other, stride, count, has, row)
    return spent


@kernel
def _measure(
    load: FloatArray,
    weight: FloatArray,
    pace: FloatArray,
    count: IntArray,
    row: IntArray,
    share: FloatArray,
    time: FloatArray,
    slot_time: FloatArray,
    power: FloatArray,
) -> float:
    """Derive shares, times and their powers from the row; returns the balancedness that a unit of power is worth.

    With M the largest time, sum(time^8) is near M^8, so that 1 / M falls by (1 / M) / 8 per relative rise of the sum.
    """
    num_windows, slots = share.shape
    ranks = pace.size
    stride = slots // ranks
    power[:] = 0.0
    balance = 0.0
    for t in range(num_windows):
        worst = 0.0
        for r in range(ranks):
            total = 0.0
            for p in range(r * stride, r * stride + stride):
                e = row[p]
                share[t, p] = load[t, e] / count[e] if e >= 0 else 0.0
                total += share[t, p]
            time[t, r] = total * pace[r]
            worst = max(worst, time[t, r])
            power[r] += weight[t] * _eighth(time[t, r])
            for p in range(r * stride, r * stride + stride):
                slot_time[t, p] = time[t, r]
        if worst > 0.0:
            balance += weight[t] / worst
    total = 0.0
    for r in range(ranks):
        total += power[r]
    return balance / (8.0 * total)


@kernel
def _powers_after_exchange(
    a: int,
    full: int,
    weight: FloatArray,
    share: FloatArray,
    time: FloatArray,
    slot_time: FloatArray,
    pace: FloatArray,
    slot_pace: FloatArray,
    after: FloatArray,
) -> None:
    """Power of rank `full` and of each slot's rank together, if slot `a` of `full` were exchanged for it: into `after`.

    The loop over slots is innermost and without branches: it runs as vector instructions, in the same order for each.
    """
    num_windows, slots = share.shape
    after[:] = 0.0
    for t in range(num_windows):
        mine, mine_time, w, mine_pace = share[t, a], time[t, full], weight[t], pace[full]
        for p in range(slots):
            change = mine - share[t, p]
            x = mine_time - change * mine_pace
            y = slot_time[t, p] + change * slot_pace[p]
            after[p] += w * (_eighth(x) + _eighth(y))


@kernel
def _gain_of_gift(
    e: int,
    p: int,
    load: FloatArray,
    weight: FloatArray,
    time: FloatArray,
    pace: FloatArray,
    count: IntArray,
    has: BoolArray,
    power: FloatArray,
    row: IntArray,
    stride: int,
) -> float:
    """Power that goes if slot `p` is given to `e`: its holders are relieved, those of the slot's expert take more."""
    num_windows = load.shape[0]
    taker = p // stride
    f = row[p]
    more_replicas, fewer_replicas = count[e] + 1.0, count[f] - 1.0 if f >= 0 else 1.0
    gain = 0.0
    for r in range(pace.size):
        if not (r == taker or has[r, e] or (f >= 0 and has[r, f])):
            continue
        gain += power[r]
        for t in range(num_windows):
            change = 0.0
            if has[r, e]:
                change += load[t, e] / more_replicas - load[t, e] / count[e]
            elif r == taker:
                change += load[t, e] / more_replicas
            if f >= 0 and has[r, f]:
                change += (0.0 if r == taker else load[t, f] / fewer_replicas) - load[t, f] / count[f]
            gain -= weight[t] * _eighth(time[t, r] + change * pace[r])
    return gain


@kernel
def _step(kind: int, a: int, p: int, stride: int, count: IntArray, has: BoolArray, row: IntArray) -> None:
    """Exchange slots `a` and `p` (kind 0), or give slot `p` to the expert in `a` (kind 1)."""
    e, f = row[a], row[p]
    if f >= 0:
        has[p // stride, f] = False
    has[p // stride, e] = True
    row[p] = e
    if kind == 0:
        row[a] = f
        has[a // stride, e] = False
        has[a // stride, f] = True
    else:
        count[e] += 1
        if f >= 0:
            count[f] -= 1
