"""Exchanges of two slots: the best for the fullest rank, all of them judged in one loop over slots."""

from __future__ import annotations

from eplb_core._arrays import IntArray
from eplb_core._numba import kernel
from eplb_core.placement.search.links import Ask, Links, Step, is_allowed
from eplb_core.placement.search.state import NEVER, Work, eighth


@kernel
def best_exchange(full: int, ask: Ask, found: Step, row: IntArray, senders: IntArray, work: Work, links: Links) -> Step:
    """The best exchange of a slot of rank `full` with one of another rank, if above `found`."""
    share, time, power, fetch, holds = work.share, work.time, work.power, work.fetch, work.holds
    held, pace = work.held, work.pace
    others, other_time, other_share, other_pay = work.others, work.other_time, work.other_share, work.other_pay
    pay, after = work.pay, work.after
    num_windows, ranks = time.shape
    stride = row.size // ranks
    best, kind, place, other, cost, number = found
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
            other_pay[s * n + j] = fetch[f, full] - fetch[f, r] if f >= 0 and holds[f, full] == 0 else NEVER
            for t in range(num_windows):
                other_share[t, s * n + j] = share[t, p]
    for a in range(full * stride, full * stride + stride):
        e = row[a]
        if e < 0:
            continue
        for j in range(n):
            pay[j] = fetch[e, others[j]] - fetch[e, full] if holds[e, others[j]] == 0 else NEVER
        _power_after(a, full, n, work)
        if _rate(n, power[full], ask, best, work) == 0:
            continue
        for m in range(n * stride):
            if after[m] > best:
                r = others[m % n]
                p = r * stride + m // n
                f = row[p]
                moves = held[e, full] - held[e, r] + held[f, r] - held[f, full]
                if moves <= ask.budget and is_allowed(0, a, p, row, senders, work, links):
                    best, kind, place, other, cost, number = after[m], 0, a, p, pay[m % n] + other_pay[m], moves
    return best, kind, place, other, cost, number


@kernel
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


@kernel
def _rate(n: int, mine: float, ask: Ask, best: float, work: Work) -> int:
    """Turn the powers after each exchange into net gains by transfer; how many are above `best`?"""
    other_power, other_pay, pay, after = work.other_power, work.other_pay, work.pay, work.after
    price, unit = ask.price, ask.unit
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
