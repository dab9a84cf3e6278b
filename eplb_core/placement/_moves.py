"""From a layout that is in place to a better one, a transfer at a time.

The search sees every window of load. It lowers the sum over windows and ranks of time^8, a smooth stand-in for the sum
over windows of the largest time: where a rank is fullest in one window and light in another, it is the windows' sum
that counts, and ranks close below the largest count too. Steps are an exchange of two replicas (two transfers) and a
slot given to an expert of a full rank (one). A step that undoes an earlier one gives its transfers back. Of all steps
whose gain is above the price of their transfers, the one with the most net gain per transfer is made, until there is
none.
"""

from __future__ import annotations

import numpy as np

from eplb_core._arrays import BoolArray, FloatArray, IntArray
from eplb_core._numba import inline_kernel, kernel
from eplb_core.placement._score import price_fetches

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
        price_fetches(old[layer], stride, link_cost, fetch)
        spent[layer] = _improve(load, weight, fetch, capacity, pace, price, budget, most_steps, p2l[layer])


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
    held = np.zeros((ranks, experts), dtype=np.int64)
    filled = np.zeros(ranks, dtype=np.int64)
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
            held[p // stride, row[p]] += 1
            filled[p // stride] += 1
    dearest = 0.0
    for r in range(ranks):
        for e in range(experts):
            dearest = max(dearest, fetch[r, e])
    spent = 0.0
    for _ in range(most_steps):
        unit = _measure(load, weight, pace, count, row, share, time, slot_time, power)
        kind = -1
        best = 1e-9
        # Steps back refund at most this; a step that gains less than half the best and no refund cannot win.
        refund = 2.0 * price * dearest if spent > 0.0 else 0.0
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
                e = row[a]
                for r in range(ranks):
                    if r == full or capacity[r] == 0 or held[r, e] > 0:
                        continue
                    for p in range(r * stride, r * stride + stride):
                        gain = (power[full] + power[r] - after[p]) * unit
                        if gain <= 0.5 * best - refund or row[p] < 0 or held[full, row[p]] > 0:
                            continue
                        pays = fetch[r, e] + fetch[full, row[p]] - fetch[full, e] - fetch[r, row[p]]
                        net = gain - price * pays
                        if net / max(pays, 0.5) > best and net > 1e-9 and spent + pays <= budget:
                            best = net / max(pays, 0.5)
                            kind, place, other, cost = 0, a, p, pays
                if count[e] >= ranks:
                    continue
                # What a gift can gain at most: the relief of those that hold the expert.
                relief = _relief(e, load, weight, time, pace, count, held, power) * unit
                if relief <= 0.5 * best - refund:
                    continue
                for r in range(ranks):
                    if capacity[r] == 0 or held[r, e] > 0:
                        continue
                    for p in range(r * stride, r * stride + stride):
                        f = row[p]
                        if filled[r] >= capacity[r] if f < 0 else count[f] < 2:
                            continue
                        pays = fetch[r, e] - (fetch[r, f] if f >= 0 else 0.0)
                        if (relief - price * pays) / max(pays, 0.5) <= best or spent + pays > budget:
                            continue
                        net = _gain_of_gift(e, p, load, weight, time, pace, count, held, power, row, stride) * unit
                        net -= price * pays
                        if net / max(pays, 0.5) > best and net > 1e-9:
                            best = net / max(pays, 0.5)
                            kind, place, other, cost = 1, a, p, pays
        if kind < 0:
            break
        spent += cost
        _step(kind, place, other, stride, count, held, filled, row)
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
def _relief(
    e: int,
    load: FloatArray,
    weight: FloatArray,
    time: FloatArray,
    pace: FloatArray,
    count: IntArray,
    held: IntArray,
    power: FloatArray,
) -> float:
    """Power that goes from the holders of `e` if it gets one more replica somewhere."""
    gain = 0.0
    for r in range(pace.size):
        if held[r, e] > 0:
            less = held[r, e] / (count[e] + 1.0) - held[r, e] / count[e]
            gain += power[r]
            for t in range(load.shape[0]):
                gain -= weight[t] * _eighth(time[t, r] + less * load[t, e] * pace[r])
    return gain


@kernel
def _gain_of_gift(
    e: int,
    p: int,
    load: FloatArray,
    weight: FloatArray,
    time: FloatArray,
    pace: FloatArray,
    count: IntArray,
    held: IntArray,
    power: FloatArray,
    row: IntArray,
    stride: int,
) -> float:
    """Power that goes if slot `p` is given to `e`: its holders are relieved, those of the slot's expert take more."""
    num_windows = load.shape[0]
    taker = p // stride
    f = row[p]
    gain = 0.0
    for r in range(pace.size):
        if r != taker and held[r, e] == 0 and (f < 0 or held[r, f] == 0):
            continue
        # Fraction of each expert's tokens that the rank takes on.
        here = r == taker
        of_e = (held[r, e] + here) / (count[e] + 1.0) - held[r, e] / count[e]
        of_f = (held[r, f] - here) / (count[f] - 1.0) - held[r, f] / count[f] if f >= 0 else 0.0
        gain += power[r]
        for t in range(num_windows):
            change = of_e * load[t, e] + (of_f * load[t, f] if f >= 0 else 0.0)
            gain -= weight[t] * _eighth(time[t, r] + change * pace[r])
    return gain


@kernel
def _step(
    kind: int, a: int, p: int, stride: int, count: IntArray, held: IntArray, filled: IntArray, row: IntArray
) -> None:
    """Exchange slots `a` and `p` (kind 0), or give slot `p` to the expert in `a` (kind 1)."""
    e, f = row[a], row[p]
    full, r = a // stride, p // stride
    row[p] = e
    held[r, e] += 1
    if f >= 0:
        held[r, f] -= 1
    else:
        filled[r] += 1
    if kind == 0:
        row[a] = f
        held[full, e] -= 1
        held[full, f] += 1
    else:
        count[e] += 1
        if f >= 0:
            count[f] -= 1


@kernel
def restore_lost(load: FloatArray, capacity: IntArray, p2l: IntArray) -> None:
    """Give each expert without a slot one, where the least is lost: an empty slot, else the smallest share of another.

    Args:
        load: `[L, E]`.
        capacity: Slots to fill of each rank `[R]`; their sum must be at least E.
        p2l: `[L, P]`, changed in place; slots of ranks that are not active must be -1.
    """
    experts = load.shape[1]
    stride = p2l.shape[1] // capacity.size
    count = np.zeros(experts, dtype=np.int64)
    filled = np.zeros(capacity.size, dtype=np.int64)
    for layer in range(p2l.shape[0]):
        row = p2l[layer]
        count[:] = 0
        filled[:] = 0
        for p in range(row.size):
            if row[p] >= 0:
                count[row[p]] += 1
                filled[p // stride] += 1
        for e in range(experts):
            if count[e] > 0:
                continue
            place = -1
            least = np.inf
            for p in range(row.size):
                f = row[p]
                if f < 0 and filled[p // stride] < capacity[p // stride] and least > -1.0:
                    least = -1.0
                    place = p
                elif f >= 0 and count[f] > 1 and load[layer, f] / count[f] < least:
                    least = load[layer, f] / count[f]
                    place = p
            if row[place] >= 0:
                count[row[place]] -= 1
            else:
                filled[place // stride] += 1
            row[place] = e
            count[e] = 1


@kernel
def drop_surplus(load: FloatArray, capacity: IntArray, p2l: IntArray) -> None:
    """Empty slots of ranks that hold more than their capacity, as far as no expert is lost: smallest shares first.

    Args:
        load: `[L, E]`.
        capacity: Slots to fill of each rank `[R]`.
        p2l: `[L, P]`, changed in place.
    """
    ranks = capacity.size
    stride = p2l.shape[1] // ranks
    count = np.zeros(load.shape[1], dtype=np.int64)
    for layer in range(p2l.shape[0]):
        row = p2l[layer]
        count[:] = 0
        for p in range(row.size):
            if row[p] >= 0:
                count[row[p]] += 1
        for r in range(ranks):
            filled = 0
            for p in range(r * stride, r * stride + stride):
                filled += row[p] >= 0
            while filled > capacity[r]:
                place = -1
                least = np.inf
                for p in range(r * stride, r * stride + stride):
                    e = row[p]
                    if e >= 0 and count[e] > 1 and load[layer, e] / count[e] < least:
                        least = load[layer, e] / count[e]
                        place = p
                if place < 0:
                    break
                count[row[place]] -= 1
                row[place] = -1
                filled -= 1
