"""Exchanges of two slots: the best for the fullest rank.

All of them are judged in one loop over slots. Where several windows are seen, those that cannot be better than what was
found are left out: power is a convex function of the load that changes hands, so a tangent to it says how much an
exchange gains at most. What is chosen is the same.
"""

from __future__ import annotations

from eplb_core._arrays import IntArray
from eplb_core._numba import lean_kernel
from eplb_core.placement.search.links import Ask, Links, Step, is_allowed
from eplb_core.placement.search.state import NEVER, Work, eighth

# With fewer windows all exchanges are judged sooner than bounds are worked out.
_FEWEST_WINDOWS = 4
# Bounds are raised by so much of the power: more than rounding can take from them.
_ROUNDING = 1e-9
# Exchanges that are left are judged alone where they are less than one in so many.
_FEW = 3


@lean_kernel
def best_exchange(full: int, ask: Ask, found: Step, row: IntArray, senders: IntArray, work: Work, links: Links) -> Step:
    """The best exchange of a slot of rank `full` with one of another rank, if above `found`."""
    share, power, fetch, holds, held = work.share, work.power, work.fetch, work.holds, work.held
    others, other_share, other_pay = work.others, work.other_share, work.other_pay
    pay, after, near = work.pay, work.after, work.near
    num_windows, ranks = work.time.shape
    stride = row.size // ranks
    best, kind, place, other, cost, number = found
    bounded = num_windows >= _FEWEST_WINDOWS
    n = _list_others(full, bounded, ask, best, row, work)
    for j in range(n):
        r = others[j]
        for s in range(stride):
            p = r * stride + s
            f = row[p]
            other_pay[s * n + j] = fetch[f, full] - fetch[f, r] if f >= 0 and holds[f, full] == 0 else NEVER
    for t in range(num_windows):
        for j in range(n):
            for s in range(stride):
                other_share[t, s * n + j] = share[t, others[j] * stride + s]
    if bounded and n > 0:
        _tilt(full, n, work)
    for a in range(full * stride, full * stride + stride):
        e = row[a]
        if e < 0 or n == 0:
            continue
        for j in range(n):
            pay[j] = fetch[e, others[j]] - fetch[e, full] if holds[e, others[j]] == 0 else NEVER
        left = n * stride
        if bounded:
            left = _list_near(a, n, ask, best, work)
            if left == 0:
                continue
        few = left * _FEW < n * stride
        if few:
            _power_after_near(a, full, n, left, work)
            _rate_near(n, left, power[full], ask, work)
        else:
            left = n * stride
            _power_after(a, full, n, work)
            if _rate(n, power[full], ask, best, work) == 0:
                continue
        for k in range(left):
            if after[k] > best:
                m = near[k] if few else k
                r = others[m % n]
                p = r * stride + m // n
                f = row[p]
                moves = held[e, full] - held[e, r] + held[f, r] - held[f, full]
                if moves <= ask.budget and is_allowed(0, a, p, row, senders, work, links):
                    best, kind, place, other, cost, number = after[k], 0, a, p, pay[m % n] + other_pay[m], moves
    return best, kind, place, other, cost, number


@lean_kernel
def _list_others(full: int, bounded: bool, ask: Ask, best: float, row: IntArray, work: Work) -> int:
    """List the ranks that `full` may exchange with, and their times; returns how many.

    `bounded`: only those where some exchange could be above `best` if it left both ranks equally full in each window.
    """
    others, other_power, other_pace, other_time = work.others, work.other_power, work.other_pace, work.other_time
    time, power, pace, fetch, holds, most = work.time, work.power, work.pace, work.fetch, work.holds, work.most
    ranks = pace.size
    stride = row.size // ranks
    n = 0
    for r in range(ranks):
        if work.filled[r] > 0 and r != full:
            others[n] = r
            other_pace[n] = pace[r]
            other_power[n] = power[r]
            n += 1
    for t in range(time.shape[0]):
        for j in range(n):
            other_time[t, j] = time[t, others[j]]
    if not bounded:
        return n
    _most_of_ranks(full, n, work)
    near = 0
    for j in range(n):
        r = others[j]
        here = there = NEVER
        for s in range(stride):
            e, f = row[full * stride + s], row[r * stride + s]
            if e >= 0 and holds[e, r] == 0:
                there = min(there, fetch[e, r] - fetch[e, full])
            if f >= 0 and holds[f, full] == 0:
                here = min(here, fetch[f, full] - fetch[f, r])
        pays = there + here
        if (most[j] * ask.unit - ask.price * pays) / max(pays, 0.5) > best:
            others[near], other_pace[near], other_power[near], most[near] = r, other_pace[j], other_power[j], most[j]
            for t in range(time.shape[0]):
                other_time[t, near] = other_time[t, j]
            near += 1
    return near


@lean_kernel
def _most_of_ranks(full: int, n: int, work: Work) -> None:
    """Power that an exchange with each rank can take away at most: into `most`.

    With paces p, q and times x, y, no exchange changes K = q * x + p * y in a window, and x^8 + y^8 is then at least
    K^8 / ((p + q)^7 * max(p, q)).
    """
    time, weight, other_time, other_pace, most = work.time, work.weight, work.other_time, work.other_pace, work.most
    p = work.pace[full]
    most[:n] = 0.0
    for t in range(time.shape[0]):
        x, w = time[t, full], weight[t]
        for j in range(n):
            most[j] += w * eighth((other_pace[j] * x + p * other_time[t, j]) / (p + other_pace[j]))
    for j in range(n):
        q = other_pace[j]
        both = work.power[full] + work.other_power[j]
        most[j] = both - most[j] * (p + q) / max(p, q) + _rounding(both, p, q)


@lean_kernel
def _rounding(power: float, p: float, q: float) -> float:
    return _ROUNDING * power * max(p / q, q / p)


@lean_kernel
def _tilt(full: int, n: int, work: Work) -> None:
    """How power falls with load that goes from `full` to each rank; `drop`: that, of their slots' load."""
    time, weight, pace, tilt, drop = work.time, work.weight, work.pace, work.tilt, work.drop
    other_time, other_pace, other_share = work.other_time, work.other_pace, work.other_share
    stride = other_share.shape[1] // pace.size
    drop[: n * stride] = 0.0
    for t in range(time.shape[0]):
        x, w = time[t, full], 8.0 * weight[t]
        mine = _seventh(x) * pace[full]
        for j in range(n):
            tilt[t, j] = w * (mine - _seventh(other_time[t, j]) * other_pace[j])
        for s in range(stride):
            for j in range(n):
                drop[s * n + j] += tilt[t, j] * other_share[t, s * n + j]


@lean_kernel
def _seventh(x: float) -> float:
    square = x * x
    return square * square * square * x


@lean_kernel
def _list_near(a: int, n: int, ask: Ask, best: float, work: Work) -> int:
    """List in `near` the exchanges of slot `a` that could be above `best`; returns how many."""
    share, tilt, lift, drop, most, near = work.share, work.tilt, work.lift, work.drop, work.most, work.near
    other_power, other_pace, other_pay, pay = work.other_power, work.other_pace, work.other_pay, work.pay
    stride = other_pay.size // work.pace.size
    full = a // stride
    lift[:n] = 0.0
    for t in range(share.shape[0]):
        mine = share[t, a]
        for j in range(n):
            lift[j] += tilt[t, j] * mine
    for j in range(n):
        lift[j] += _rounding(work.power[full] + other_power[j], work.pace[full], other_pace[j])
    left = 0
    for s in range(stride):
        for j in range(n):
            m = s * n + j
            pays = pay[j] + other_pay[m]
            if (min(most[j], lift[j] - drop[m]) * ask.unit - ask.price * pays) / max(pays, 0.5) > best:
                near[left] = m
                left += 1
    return left


@lean_kernel
def _power_after_near(a: int, full: int, n: int, left: int, work: Work) -> None:
    """As `_power_after`, for the exchanges in `near` alone."""
    share, other_share, other_time, other_pace = work.share, work.other_share, work.other_time, work.other_pace
    near, near_share, near_time, near_pace = work.near, work.near_share, work.near_time, work.near_pace
    after = work.after
    after[:left] = 0.0
    for k in range(left):
        near_pace[k] = other_pace[near[k] % n]
    for t in range(share.shape[0]):
        mine, my_time, w, my_pace = share[t, a], work.time[t, full], work.weight[t], work.pace[full]
        for k in range(left):
            near_share[k] = other_share[t, near[k]]
            near_time[k] = other_time[t, near[k] % n]
        for k in range(left):
            change = mine - near_share[k]
            x = my_time - change * my_pace
            y = near_time[k] + change * near_pace[k]
            after[k] += w * (eighth(x) + eighth(y))


@lean_kernel
def _rate_near(n: int, left: int, mine: float, ask: Ask, work: Work) -> None:
    """As `_rate`, for the exchanges in `near` alone."""
    other_power, other_pay, pay, after, near = work.other_power, work.other_pay, work.pay, work.after, work.near
    for k in range(left):
        m = near[k]
        pays = pay[m % n] + other_pay[m]
        after[k] = ((mine + other_power[m % n] - after[k]) * ask.unit - ask.price * pays) / max(pays, 0.5)


@lean_kernel
def _power_after(a: int, full: int, n: int, work: Work) -> None:
    """Power of rank `full` and another together, if slot `a` were exchanged for each of its slots: into `after`.

    The loop over ranks is innermost and without branches: it runs as vector instructions, in the same order for each.
    """
    share, other_share, other_time, other_pace = work.share, work.other_share, work.other_time, work.other_pace
    after = work.after
    stride = share.shape[1] // work.pace.size
    after[: n * stride] = 0.0
    for t in range(share.shape[0]):
        mine, my_time, w, my_pace = share[t, a], work.time[t, full], work.weight[t], work.pace[full]
        for s in range(stride):
            for j in range(n):
                change = mine - other_share[t, s * n + j]
                x = my_time - change * my_pace
                y = other_time[t, j] + change * other_pace[j]
                after[s * n + j] += w * (eighth(x) + eighth(y))


@lean_kernel
def _rate(n: int, mine: float, ask: Ask, best: float, work: Work) -> int:
    """Turn the powers after each exchange into net gains by transfer; how many are above `best`?"""
    other_power, other_pay, pay, after = work.other_power, work.other_pay, work.pay, work.after
    price, unit = ask.price, ask.unit
    stride = other_pay.size // work.pace.size
    above = 0
    for s in range(stride):
        for j in range(n):
            m = s * n + j
            pays = pay[j] + other_pay[m]
            net = (mine + other_power[j] - after[m]) * unit - price * pays
            after[m] = net / max(pays, 0.5)
            above += after[m] > best
    return above
