"""From a layout that is in place to a better one, a transfer at a time.

The search sees every window of load. It lowers the sum over windows and ranks of time^8, a smooth stand-in for the sum
over windows of the largest time: where a rank is fullest in one window and light in another, it is the windows' sum
that counts, and ranks close below the largest count too. Steps are an exchange of two replicas (two transfers) and a
slot given to an expert of a full rank (one). A step that undoes an earlier one gives its transfers back. Of all steps
of the fullest rank whose gain is above the price of their transfers, the one with the most net gain per transfer is
made, until there is none.

Replicas share evenly, or, `weighted`, as the times are most even in each window. A step is then judged with the shares
that do not have to change left as they are, which can only understate it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eplb_core._arrays import BoolArray, FloatArray, IntArray
from eplb_core._numba import inline_kernel, kernel

# Fullest ranks that are looked at before the search ends.
_FULLEST = 2
# Passes over the replicated experts by which shares follow a step, come near the best at the start, and are judged.
_SWEEPS, _FIRST_SWEEPS, _LAST_SWEEPS = 3, 12, 50
# Transfers that are taken back for better ones, at most.
_MOST_TRIES = 16
# Shares that change by less, in units of an even rank's time, have settled.
_STILL = 1e-4
# A row is not exchanged for one that is better by rounding.
_SOME_GAIN = 1e-9
# What a slot that cannot be exchanged costs.
_NEVER = 1e30


class Work(NamedTuple):
    """Arrays of one call, for all layers in turn."""

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
    homes: IntArray
    """Ranks that hold an expert `[E, R]`, the first `num_homes[e]`."""
    num_homes: IntArray
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
    budget: FloatArray,
    most_steps: int,
    width: int,
    weighted: bool,
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
        budget: Most cost of each layer `[L]`.
        most_steps: Most steps a layer.
        width: Fullest ranks whose steps are compared before one is made.
        weighted: Shares are solved in each window; else replicas share evenly.
        p2l: `[L, P]`, changed in place.
        spent: Written `[L]`: cost of the transfers from `old`, as far as steps caused it.
    """
    num_windows, layers, experts = windows.shape
    ranks = capacity.size
    work = _new_work(num_windows, experts, ranks, p2l.shape[1] // ranks)
    weight = np.zeros(num_windows)
    tried = np.zeros(ranks, dtype=np.bool_)
    kept = np.zeros(p2l.shape[1], dtype=np.int64)
    speed = _speed(capacity, pace)
    for layer in range(layers):
        if skip[layer] or not _scale(windows, weights, layer, speed, weight, work.load):
            continue
        row = p2l[layer]
        dearest = _price_fetches(old[layer], link_cost, work.fetch)
        _begin(weight, pace, weighted, row, work)
        spent[layer] = now = usual = 0.0
        kept_net = -np.inf
        barred = barred_rank = taken_back = -1
        for _ in range(_MOST_TRIES + 1):
            for _ in range(most_steps):
                balance = _balance(weight, work.time)
                if balance - price * now > kept_net + _SOME_GAIN:
                    kept_net, spent[layer] = balance - price * now, now
                    _copy(row, kept)
                # With M the largest time, sum(time^8) is near M^8: 1 / M falls by (1 / M) / 8 per relative rise of it.
                unit = balance / (8.0 * _sum(work.power))
                # Steps back refund at most this.
                refund = 2.0 * price * dearest if now > 0.0 else 0.0
                gifts = _list_gifts(weight, capacity, pace, weighted, row, work)
                found = (1e-9, -1, 0, 0, 0.0)
                tried[:] = False
                for n in range(max(width, _FULLEST)):
                    full = _fullest(tried, capacity, work.power)
                    if full < 0 or (n >= width and found[1] >= 0):
                        break
                    tried[full] = True
                    found = _best_exchange(full, weight, pace, price, budget[layer] - now, unit, found, row, work)
                    found = _best_gift(
                        full, gifts, weight, pace, price, budget[layer] - now, unit, refund, weighted, found, row, work
                    )
                if barred >= 0:
                    work.fetch[barred, barred_rank] = usual
                    barred = -1
                if found[1] < 0 or not _step(found, price, unit, weight, pace, weighted, row, work):
                    break
                now += found[4]
            net = _balance(weight, work.time) - price * now
            if net > kept_net + _SOME_GAIN:
                kept_net, spent[layer] = net, now
                _copy(row, kept)
            _copy(kept, row)
            if budget[layer] == np.inf:
                break
            # Few transfers should be the best ones: take each back in turn and look for others in its place.
            taken_back, refund = _take_back(taken_back + 1, old[layer], row, work.fetch)
            if taken_back < 0:
                _copy(kept, row)
                break
            barred, barred_rank = kept[taken_back], taken_back // (row.size // ranks)
            usual = work.fetch[barred, barred_rank]
            work.fetch[barred, barred_rank] = _NEVER
            now = spent[layer] - refund
            _begin(weight, pace, weighted, row, work)
        _copy(kept, row)


@kernel
def _copy(source: IntArray, target: IntArray) -> None:
    for p in range(source.size):  # a slice would bring in numpy's broadcasting, and seconds of compilation
        target[p] = source[p]


@kernel
def _fullest(tried: BoolArray, capacity: IntArray, power: FloatArray) -> int:
    """The live rank with the most power that was not tried yet, or -1."""
    full = -1
    for r in range(capacity.size):
        if not tried[r] and capacity[r] > 0 and (full < 0 or power[r] > power[full]):
            full = r
    return full


@kernel
def score_weighted(
    windows: FloatArray, weights: FloatArray, p2l: IntArray, capacity: IntArray, pace: FloatArray, out: FloatArray
) -> None:
    """Balancedness that solved shares reach, each layer's weighted mean over the windows with load.

    Args:
        windows: Load `[T, L, E]`.
        weights: Weight of each window `[T]`.
        p2l: `[L, P]`; every expert on a live rank, none elsewhere.
        capacity: Slots to fill of each rank `[R]`; 0 = not active.
        pace: Time for one token `[R]`.
        out: Written `[L]`; NaN without load. From below: the shares are as near to the best as sweeps bring them.
    """
    ranks = capacity.size
    work = _new_work(windows.shape[0], windows.shape[2], ranks, p2l.shape[1] // ranks)
    weight = np.zeros(windows.shape[0])
    speed = _speed(capacity, pace)
    for layer in range(windows.shape[1]):
        if not _scale(windows, weights, layer, speed, weight, work.load):
            out[layer] = np.nan
            continue
        _begin(weight, pace, True, p2l[layer], work)
        _solve_shares(_LAST_SWEEPS, weight, pace, p2l[layer], work)
        out[layer] = min(1.0, _balance(weight, work.time))


@kernel
def _speed(capacity: IntArray, pace: FloatArray) -> float:
    speed = 0.0
    for r in range(capacity.size):
        if capacity[r] > 0:
            speed += 1.0 / pace[r]
    return speed


@kernel
def _scale(
    windows: FloatArray, weights: FloatArray, layer: int, speed: float, weight: FloatArray, load: FloatArray
) -> bool:
    """Write a layer's load in units of the time of an even layout, and weights that sum to 1; is there any load?"""
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


@kernel
def _new_work(num_windows: int, experts: int, ranks: int, stride: int) -> Work:
    slots = ranks * stride
    by_window = (num_windows, slots)
    return Work(
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
        np.zeros(slots, np.int64),
        np.zeros(by_window),
        np.zeros(slots),
        np.zeros(slots, np.int64),
        np.zeros(slots),
        np.zeros(slots),
        np.zeros(ranks, np.int64),
        np.zeros(experts),
    )


@kernel
def _price_fetches(old: IntArray, link_cost: FloatArray, fetch: FloatArray) -> float:
    """Cost for each rank to hold each expert `[E, R]`: 0 where it does, else that of the cheapest holder's link.

    An expert without a holder comes from elsewhere, at the cost of the dearest link to any rank, which is returned.
    """
    ranks = link_cost.shape[0]
    stride = old.size // ranks
    dearest, cheapest = 0.0, np.inf
    for r in range(ranks):
        for q in range(ranks):
            if q != r:
                dearest = max(dearest, link_cost[r, q])
                cheapest = min(cheapest, link_cost[r, q])
    fetch[:] = dearest
    for p in range(old.size if cheapest < dearest else 0):
        e, source = old[p], p // stride
        if e >= 0:
            for r in range(ranks):
                fetch[e, r] = min(fetch[e, r], link_cost[source, r])
    for p in range(old.size):
        if old[p] >= 0:
            fetch[old[p], p // stride] = 0.0
    return dearest


@inline_kernel
def _eighth(x: float) -> float:
    x = x * x
    x = x * x
    return x * x


@kernel
def _take_back(start: int, old: IntArray, row: IntArray, fetch: FloatArray) -> tuple[int, float]:
    """Take the first transfer from slot `start` on back, with that of the expert that it was exchanged for.

    Returns:
        The slot, -1 where there is none, and what it had cost.
    """
    stride = row.size // fetch.shape[1]
    for p in range(start, row.size):
        r, e, f = p // stride, row[p], old[p]
        if e < 0 or f < 0 or e == f or fetch[e, r] == 0.0 or _is_on(f, r, stride, row):
            continue
        back = -1
        others = False
        for a in range(row.size):
            others = others or (row[a] == e and a != p)
            if row[a] == f and old[a] == e and not _is_on(e, a // stride, stride, row):
                back = a
        if back < 0 and not others:
            continue
        refund = fetch[e, r]
        row[p] = f
        if back >= 0:
            row[back] = e
            refund += fetch[f, back // stride]
        return p, refund
    return -1, 0.0


@kernel
def _is_on(e: int, r: int, stride: int, row: IntArray) -> bool:
    found = False
    for p in range(r * stride, r * stride + stride):
        found = found or row[p] == e
    return found


@kernel
def _begin(weight: FloatArray, pace: FloatArray, weighted: bool, row: IntArray, work: Work) -> None:
    """Derive counts, holders, shares and times from the row."""
    ranks = pace.size
    stride = row.size // ranks
    count, share, load = work.replicas, work.share, work.load
    count[:] = 0
    for e in range(count.size):
        for i in range(work.num_homes[e]):
            work.holds[e, work.homes[e, i]] = 0
    work.num_homes[:] = 0
    work.filled[:] = 0
    for p in range(row.size):
        if row[p] >= 0:
            count[row[p]] += 1
            _add_home(row[p], p // stride, work)
            work.filled[p // stride] += 1
    for t in range(load.shape[0]):
        for p in range(row.size):
            share[t, p] = load[t, row[p]] / count[row[p]] if row[p] >= 0 else 0.0
    if weighted:
        _solve_shares(_FIRST_SWEEPS, weight, pace, row, work)
    else:
        for r in range(ranks):
            _retime(r, weight, pace, work)


@kernel
def _add_home(e: int, r: int, work: Work) -> None:
    if work.holds[e, r] == 0:
        work.homes[e, work.num_homes[e]] = r
        work.num_homes[e] += 1
    work.holds[e, r] += 1


@kernel
def _drop_home(e: int, r: int, work: Work) -> None:
    homes = work.homes
    work.holds[e, r] -= 1
    if work.holds[e, r] == 0:
        i = 0
        while homes[e, i] != r:
            i += 1
        work.num_homes[e] -= 1
        homes[e, i] = homes[e, work.num_homes[e]]


@kernel
def _share_evenly(e: int, row: IntArray, work: Work) -> None:
    share, load = work.share, work.load
    ranks = work.homes.shape[1]
    stride = row.size // ranks
    for i in range(work.num_homes[e]):
        r = work.homes[e, i]
        for p in range(r * stride, r * stride + stride):
            if row[p] == e:
                for t in range(load.shape[0]):
                    share[t, p] = load[t, e] / work.replicas[e]


@kernel
def _retime(r: int, weight: FloatArray, pace: FloatArray, work: Work) -> None:
    """Add up a rank's shares anew, always in the same order: what it says depends on the row alone."""
    share, time = work.share, work.time
    stride = share.shape[1] // pace.size
    power = 0.0
    for t in range(share.shape[0]):
        total = 0.0
        for p in range(r * stride, r * stride + stride):
            total += share[t, p]
        time[t, r] = total * pace[r]
        power += weight[t] * _eighth(time[t, r])
    work.power[r] = power


@kernel
def _sum(values: FloatArray) -> float:
    total = 0.0
    for value in values:
        total += value
    return total


@kernel
def _balance(weight: FloatArray, time: FloatArray) -> float:
    """Mean over windows of 1 / largest time, which is the balancedness: the even time is 1."""
    balance = 0.0
    for t in range(time.shape[0]):
        worst = 0.0
        for r in range(time.shape[1]):
            worst = max(worst, time[t, r])
        if worst > 0.0:
            balance += weight[t] / worst
    return balance


@kernel
def _best_exchange(
    full: int,
    weight: FloatArray,
    pace: FloatArray,
    price: float,
    budget: float,
    unit: float,
    found: tuple[float, int, int, int, float],
    row: IntArray,
    work: Work,
) -> tuple[float, int, int, int, float]:
    """The best exchange of a slot of rank `full` with one of another rank, if above `found`.

    Returns:
        Net gain by transfer, 0 for an exchange, the two slots, the cost of its transfers.
    """
    share, time, power, fetch, holds = work.share, work.time, work.power, work.fetch, work.holds
    others, other_time, other_share, other_pay = work.others, work.other_time, work.other_share, work.other_pay
    pay, after = work.pay, work.after
    num_windows, ranks = time.shape
    stride = row.size // ranks
    best, kind, place, other, cost = found
    n = 0
    for r in range(ranks):
        if work.filled[r] > 0 and r != full:
            others[n] = r
            work.other_pace[n] = pace[r]
            work.other_power[n] = power[r]
            n += 1
    for j in range(n):
        r = others[j]
        for t in range(num_windows):
            other_time[t, j] = time[t, r]
        for s in range(stride):
            p = r * stride + s
            f = row[p]
            other_pay[s * n + j] = fetch[f, full] - fetch[f, r] if f >= 0 and holds[f, full] == 0 else _NEVER
            for t in range(num_windows):
                other_share[t, s * n + j] = share[t, p]
    for a in range(full * stride, full * stride + stride):
        e = row[a]
        if e < 0:
            continue
        for j in range(n):
            pay[j] = fetch[e, others[j]] - fetch[e, full] if holds[e, others[j]] == 0 else _NEVER
        _power_after(a, full, n, weight, pace, work.other_pace, other_time, other_share, share, time, after)
        if _rate(n, power[full], price, unit, best, work.other_power, other_pay, pay, after) == 0:
            continue
        for m in range(n * stride):
            if after[m] > best:
                pays = pay[m % n] + other_pay[m]
                if pays <= budget:
                    best, kind, place, other, cost = after[m], 0, a, others[m % n] * stride + m // n, pays
    return best, kind, place, other, cost


@kernel
def _power_after(
    a: int,
    full: int,
    n: int,
    weight: FloatArray,
    pace: FloatArray,
    other_pace: FloatArray,
    other_time: FloatArray,
    other_share: FloatArray,
    share: FloatArray,
    time: FloatArray,
    after: FloatArray,
) -> None:
    """Power of rank `full` and another together, if slot `a` were exchanged for each of its slots: into `after`.

    The loop over ranks is innermost and without branches: it runs as vector instructions, in the same order for each.
    """
    stride = share.shape[1] // pace.size
    after[: n * stride] = 0.0
    for t in range(share.shape[0]):
        mine, my_time, w, my_pace = share[t, a], time[t, full], weight[t], pace[full]
        for s in range(stride):
            for j in range(n):
                change = mine - other_share[t, s * n + j]
                x = my_time - change * my_pace
                y = other_time[t, j] + change * other_pace[j]
                after[s * n + j] += w * (_eighth(x) + _eighth(y))


@kernel
def _rate(
    n: int,
    mine: float,
    price: float,
    unit: float,
    best: float,
    other_power: FloatArray,
    other_pay: FloatArray,
    pay: FloatArray,
    after: FloatArray,
) -> int:
    """Turn the powers after each exchange into net gains by transfer; how many are above `best`?"""
    stride = other_pay.size // other_power.size
    above = 0
    for s in range(stride):
        for j in range(n):
            m = s * n + j
            pays = pay[j] + other_pay[m]
            net = (mine + other_power[j] - after[m]) * unit - price * pays
            after[m] = net / max(pays, 0.5)
            above += after[m] > best
    return above


@kernel
def _list_gifts(
    weight: FloatArray, capacity: IntArray, pace: FloatArray, weighted: bool, row: IntArray, work: Work
) -> int:
    """List the slots that can be given to another expert, with what is left when they are; returns how many."""
    share, time, power, count = work.share, work.time, work.power, work.replicas
    slot, without, slot_pace, burden = work.gift_slot, work.gift_time, work.gift_pace, work.gift_burden
    other, debt = work.gift_other, work.debt
    ranks = pace.size
    stride = row.size // ranks
    n = 0
    for p in range(row.size):
        f, r = row[p], p // stride
        if (f < 0 and work.filled[r] < capacity[r]) or (f >= 0 and count[f] > 1):
            slot[n] = p
            slot_pace[n] = pace[r]
            other[n] = -1
            burden[n] = 0.0
            if f >= 0:
                debt[f] = 0.0
                if weighted:
                    for i in range(work.num_homes[f]):
                        q = work.homes[f, i]
                        if q != r and (other[n] < 0 or power[q] < power[other[n]]):
                            other[n] = q
            n += 1
    for t in range(time.shape[0]):
        for k in range(n):
            p = slot[k]
            f, r = row[p], p // stride
            if f < 0:
                without[t, k] = time[t, r]
            elif weighted:
                without[t, k] = time[t, r] - (share[t, p] * pace[r] if other[k] >= 0 else 0.0)
                if other[k] >= 0:
                    burden[k] += weight[t] * _eighth(time[t, other[k]] + share[t, p] * pace[other[k]])
            else:
                # h of c replicas are here: the rank's part of h / c becomes (h - 1) / (c - 1), or h / (c - 1).
                here, rest = work.holds[f, r], count[f] - 1.0
                without[t, k] = time[t, r] + share[t, p] * ((here - count[f]) / rest) * pace[r]
                burden[k] += weight[t] * _eighth(time[t, r] + share[t, p] * (here / rest) * pace[r])
    if weighted:
        for k in range(n):
            burden[k] -= power[slot[k] // stride] + (power[other[k]] if other[k] >= 0 else 0.0)
        return n
    for k in range(n):
        f, r = row[slot[k]], slot[k] // stride
        if f >= 0:
            debt[f] += (burden[k] - power[r]) / work.holds[f, r]
    for k in range(n):
        f, r = row[slot[k]], slot[k] // stride
        burden[k] = debt[f] - burden[k] if f >= 0 else -power[r]
    return n


@kernel
def _best_gift(
    full: int,
    num_gifts: int,
    weight: FloatArray,
    pace: FloatArray,
    price: float,
    budget: float,
    unit: float,
    refund: float,
    weighted: bool,
    found: tuple[float, int, int, int, float],
    row: IntArray,
    work: Work,
) -> tuple[float, int, int, int, float]:
    """The best gift of a slot to an expert of rank `full`, if above `found`; returns as `_best_exchange`, kind 1."""
    power, fetch, holds = work.power, work.fetch, work.holds
    slot, burden, after, other_home = work.gift_slot, work.gift_burden, work.gift_after, work.gift_other
    ranks = pace.size
    stride = row.size // ranks
    best, kind, place, other, cost = found
    for a in range(full * stride, full * stride + stride):
        e = row[a]
        if e < 0 or work.num_homes[e] >= ranks:
            continue
        relief = power[full] if weighted else _relief(e, weight, pace, work)
        if relief * unit <= 0.5 * best - refund:
            continue
        if weighted:
            _power_after_split(a, full, num_gifts, weight, pace, work)
        else:
            _power_after_gift(e, num_gifts, weight, work)
        near, giver, pays = best, -1, 0.0
        least = (0.5 * near - refund) / unit
        above = 0
        for k in range(num_gifts):
            after[k] = relief - burden[k] - after[k]
            above += after[k] > least
        if above == 0:
            continue
        for k in range(num_gifts):
            p = slot[k]
            f, r = row[p], p // stride
            if after[k] <= least or holds[e, r] > 0 or (weighted and other_home[k] == full):
                continue
            would_pay = fetch[e, r] - (fetch[f, r] if f >= 0 else 0.0)
            net = after[k] * unit - price * would_pay
            if net > near * max(would_pay, 0.5) and net > 1e-9 and would_pay <= budget:
                near, giver, pays = net / max(would_pay, 0.5), p, would_pay
                least = (0.5 * near - refund) / unit
        if giver < 0:
            continue
        if not weighted:
            # A rank that holds both experts was counted for each on its own.
            near = (_gain_of_gift(e, giver, weight, pace, row, work) * unit - price * pays) / max(pays, 0.5)
        if near > best:
            best, kind, place, other, cost = near, 1, a, giver, pays
    return best, kind, place, other, cost


@kernel
def _relief(e: int, weight: FloatArray, pace: FloatArray, work: Work) -> float:
    """Power that goes from the holders of `e` if it gets one more replica somewhere."""
    load, time, holds, count = work.load, work.time, work.holds, work.replicas
    gain = 0.0
    for i in range(work.num_homes[e]):
        r = work.homes[e, i]
        less = (holds[e, r] / (count[e] + 1.0) - holds[e, r] / count[e]) * pace[r]
        gain += work.power[r]
        for t in range(load.shape[0]):
            gain -= weight[t] * _eighth(time[t, r] + less * load[t, e])
    return gain


@kernel
def _power_after_gift(e: int, num_gifts: int, weight: FloatArray, work: Work) -> None:
    """Power of each giver's rank if its slot holds an even share of `e`: into `gift_after`."""
    load, without, slot_pace, after = work.load, work.gift_time, work.gift_pace, work.gift_after
    after[:num_gifts] = 0.0
    for t in range(load.shape[0]):
        part, w = load[t, e] / (work.replicas[e] + 1.0), weight[t]
        for k in range(num_gifts):
            after[k] += w * _eighth(without[t, k] + part * slot_pace[k])


@kernel
def _power_after_split(a: int, full: int, num_gifts: int, weight: FloatArray, pace: FloatArray, work: Work) -> None:
    """Power of rank `full` and each giver's, if the share of slot `a` is split as evens their times: `gift_after`."""
    share, time, without, slot_pace, after = work.share, work.time, work.gift_time, work.gift_pace, work.gift_after
    after[:num_gifts] = 0.0
    for t in range(share.shape[0]):
        mine, my_time, w, my_pace = share[t, a], time[t, full], weight[t], pace[full]
        for k in range(num_gifts):
            part = min(max((my_time - without[t, k]) / (my_pace + slot_pace[k]), 0.0), mine)
            after[k] += w * (_eighth(my_time - part * my_pace) + _eighth(without[t, k] + part * slot_pace[k]))


@kernel
def _gain_of_gift(e: int, p: int, weight: FloatArray, pace: FloatArray, row: IntArray, work: Work) -> float:
    """Power that goes if slot `p` is given to `e`: its holders are relieved, those of the slot's expert take more."""
    load, time, holds, homes, count = work.load, work.time, work.holds, work.homes, work.replicas
    taker = p // (row.size // pace.size)
    f = row[p]
    others = work.num_homes[f] if f >= 0 else 0
    gain = 0.0
    for i in range(work.num_homes[e] + 1 + others):
        if i < work.num_homes[e]:
            r = homes[e, i]
        elif i == work.num_homes[e]:
            r = taker
        else:
            r = homes[f, i - work.num_homes[e] - 1]
            if r == taker or holds[e, r] > 0:
                continue
        # Fraction of each expert's tokens that the rank takes on.
        here = r == taker
        of_e = (holds[e, r] + here) / (count[e] + 1.0) - holds[e, r] / count[e]
        of_f = (holds[f, r] - here) / (count[f] - 1.0) - holds[f, r] / count[f] if f >= 0 else 0.0
        gain += work.power[r]
        for t in range(load.shape[0]):
            change = of_e * load[t, e] + (of_f * load[t, f] if f >= 0 else 0.0)
            gain -= weight[t] * _eighth(time[t, r] + change * pace[r])
    return gain


@kernel
def _step(
    found: tuple[float, int, int, int, float],
    price: float,
    unit: float,
    weight: FloatArray,
    pace: FloatArray,
    weighted: bool,
    row: IntArray,
    work: Work,
) -> bool:
    """Exchange two slots (kind 0), or give the second to the expert in the first (kind 1); False = it did not pay."""
    _, kind, a, p, pays = found
    homes, num_homes = work.homes, work.num_homes
    stride = row.size // pace.size
    e, f = row[a], row[p]
    full, r = a // stride, p // stride
    row[p] = e
    _add_home(e, r, work)
    if f >= 0:
        _drop_home(f, r, work)
    else:
        work.filled[r] += 1
    if kind == 0:
        row[a] = f
        _drop_home(e, full, work)
        _add_home(f, full, work)
    else:
        work.replicas[e] += 1
        if f >= 0:
            work.replicas[f] -= 1
    if weighted:
        before = _sum(work.power)
        _hand_over(kind, a, p, f, row, work)
        _solve_shares(_SWEEPS, weight, pace, row, work)
        if (before - _sum(work.power)) * unit <= price * pays:
            row[a], row[p] = e, f  # rounding made it look good; the next one would go round in a circle
            _begin(weight, pace, weighted, row, work)
            return False
        return True
    _share_evenly(e, row, work)
    if f >= 0:
        _share_evenly(f, row, work)
        for i in range(num_homes[f]):
            _retime(homes[f, i], weight, pace, work)
    for i in range(num_homes[e]):
        _retime(homes[e, i], weight, pace, work)
    _retime(full, weight, pace, work)
    _retime(r, weight, pace, work)
    return True


@kernel
def _hand_over(kind: int, a: int, p: int, f: int, row: IntArray, work: Work) -> None:
    """Bring the shares to where the step has put the experts; `_solve_shares` makes them even."""
    share = work.share
    for t in range(share.shape[0]):
        given = share[t, p]
        if kind == 0:
            share[t, p] = share[t, a]
            share[t, a] = given
        else:
            share[t, p] = 0.0
    if kind == 1 and f >= 0:
        _pool(f, row, work)


@kernel
def _pool(e: int, row: IntArray, work: Work) -> None:
    """Put all load of an expert on its first holder, as a start."""
    share, load = work.share, work.load
    stride = row.size // work.homes.shape[1]
    first = True
    for i in range(work.num_homes[e]):
        r = work.homes[e, i]
        for p in range(r * stride, r * stride + stride):
            if row[p] == e:
                for t in range(load.shape[0]):
                    share[t, p] = load[t, e] if first else 0.0
                first = False


@kernel
def _solve_shares(sweeps: int, weight: FloatArray, pace: FloatArray, row: IntArray, work: Work) -> None:
    """Bring the shares of replicated experts near those with the most even times, in each window; then the times.

    One expert after the other takes back its shares and pours them over its holders, lowest first, as water would
    stand. That lowers any sum of convex functions of the times, and settles where none of them can be lowered.
    """
    ranks = pace.size
    for r in range(ranks):
        _retime(r, weight, pace, work)
    for _ in range(sweeps):
        change = 0.0
        for e in range(work.replicas.size):
            if work.num_homes[e] > 1:
                change = max(change, _pour(e, pace, row, work))
        if change < _STILL:
            break
    for r in range(ranks):
        _retime(r, weight, pace, work)


@kernel
def _pour(e: int, pace: FloatArray, row: IntArray, work: Work) -> float:
    """Pour an expert's load over its holders in each window; returns the largest change of a share.

    A rank that holds it twice takes its part in the first of the slots.
    """
    share, time, load, spot = work.share, work.time, work.load, work.spot
    stride = row.size // pace.size
    n = work.num_homes[e]
    home = work.homes[e]
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
            change = max(change, abs(part - share[t, spot[i]]))
            share[t, spot[i]] = part
            time[t, r] += part * pace[r]
    return change
