"""Slots given to another expert: the best gift to an expert of the fullest rank."""

from __future__ import annotations

from eplb_core._arrays import IntArray
from eplb_core._numba import lean_kernel
from eplb_core.placement.search.links import Ask, Links, Step, is_allowed, keeps_home
from eplb_core.placement.search.state import Work, eighth


@lean_kernel
def list_gifts(capacity: IntArray, weighted: bool, row: IntArray, work: Work, links: Links) -> int:
    """List the slots that can be given to another expert, with what is left when they are; returns how many."""
    share, time, power, count = work.share, work.time, work.power, work.replicas
    slot, without, slot_pace, burden = work.gift_slot, work.gift_time, work.gift_pace, work.gift_burden
    other, debt, weight, pace = work.gift_other, work.debt, work.weight, work.pace
    ranks = pace.size
    stride = row.size // ranks
    n = 0
    for p in range(row.size):
        f, r = row[p], p // stride
        if (f < 0 and work.filled[r] < capacity[r]) or (
            f >= 0 and count[f] > 1 and (work.home[f] < 0 or keeps_home(f, r, -1, work, links))
        ):
            slot[n] = p
            slot_pace[n] = pace[r]
            other[n] = -1
            burden[n] = 0.0
            if f >= 0:
                debt[f] = 0.0
                if weighted:
                    for i in range(work.num_holders[f]):
                        q = work.holders[f, i]
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
                    burden[k] += weight[t] * eighth(time[t, other[k]] + share[t, p] * pace[other[k]])
            else:
                # h of c replicas are here: the rank's part of h / c becomes (h - 1) / (c - 1), or h / (c - 1).
                here, rest = work.holds[f, r], count[f] - 1.0
                without[t, k] = time[t, r] + share[t, p] * ((here - count[f]) / rest) * pace[r]
                burden[k] += weight[t] * eighth(time[t, r] + share[t, p] * (here / rest) * pace[r])
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


@lean_kernel
def best_gift(
    full: int, num_gifts: int, ask: Ask, found: Step, row: IntArray, senders: IntArray, work: Work, links: Links
) -> Step:
    """The best gift of a slot to an expert of rank `full`, if above `found`."""
    power, fetch, holds, held = work.power, work.fetch, work.holds, work.held
    slot, burden, after, other_home = work.gift_slot, work.gift_burden, work.gift_after, work.gift_other
    price, budget, unit, refund, weighted = ask
    ranks = work.pace.size
    stride = row.size // ranks
    best, kind, place, other, cost, number = found
    for a in range(full * stride, full * stride + stride):
        e = row[a]
        if e < 0 or work.num_holders[e] >= ranks:
            continue
        relief = power[full] if weighted else _relief(e, work)
        if relief * unit <= 0.5 * best - refund:
            continue
        if weighted:
            _power_after_split(a, full, num_gifts, work)
        else:
            _power_after_gift(e, num_gifts, work)
        near, giver, pays, moves = best, -1, 0.0, 0
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
            if not (net > near * max(would_pay, 0.5) and net > 1e-9):
                continue
            would_move = held[f, r] - held[e, r] if f >= 0 else 1 - held[e, r]
            if would_move <= budget and is_allowed(1, a, p, row, senders, work, links):
                near, giver, pays, moves = net / max(would_pay, 0.5), p, would_pay, would_move
                least = (0.5 * near - refund) / unit
        if giver < 0:
            continue
        if not weighted:
            # A rank that holds both experts was counted for each on its own.
            near = (_gain_of_gift(e, giver, row, work) * unit - price * pays) / max(pays, 0.5)
        if near > best:
            best, kind, place, other, cost, number = near, 1, a, giver, pays, moves
    return best, kind, place, other, cost, number


@lean_kernel
def _relief(e: int, work: Work) -> float:
    """Power that goes from the holders of `e` if it gets one more replica somewhere."""
    load, time, holds, count = work.load, work.time, work.holds, work.replicas
    weight, pace = work.weight, work.pace
    gain = 0.0
    for i in range(work.num_holders[e]):
        r = work.holders[e, i]
        less = (holds[e, r] / (count[e] + 1.0) - holds[e, r] / count[e]) * pace[r]
        gain += work.power[r]
        for t in range(load.shape[0]):
            gain -= weight[t] * eighth(time[t, r] + less * load[t, e])
    return gain


@lean_kernel
def _power_after_gift(e: int, num_gifts: int, work: Work) -> None:
    """Power of each giver's rank if its slot holds an even share of `e`: into `gift_after`."""
    load, without, slot_pace, after = work.load, work.gift_time, work.gift_pace, work.gift_after
    after[:num_gifts] = 0.0
    for t in range(load.shape[0]):
        part, w = load[t, e] / (work.replicas[e] + 1.0), work.weight[t]
        for k in range(num_gifts):
            after[k] += w * eighth(without[t, k] + part * slot_pace[k])


@lean_kernel
def _power_after_split(a: int, full: int, num_gifts: int, work: Work) -> None:
    """Power of rank `full` and each giver's, if the share of slot `a` is split as evens their times: `gift_after`."""
    share, time, without, slot_pace, after = work.share, work.time, work.gift_time, work.gift_pace, work.gift_after
    after[:num_gifts] = 0.0
    for t in range(share.shape[0]):
        mine, my_time, w, my_pace = share[t, a], time[t, full], work.weight[t], work.pace[full]
        for k in range(num_gifts):
            part = min(max((my_time - without[t, k]) / (my_pace + slot_pace[k]), 0.0), mine)
            after[k] += w * (eighth(my_time - part * my_pace) + eighth(without[t, k] + part * slot_pace[k]))


@lean_kernel
def _gain_of_gift(e: int, p: int, row: IntArray, work: Work) -> float:
    """Power that goes if slot `p` is given to `e`: its holders are relieved, those of the slot's expert take more."""
    load, time, holds, holders, count = work.load, work.time, work.holds, work.holders, work.replicas
    weight, pace = work.weight, work.pace
    taker = p // (row.size // pace.size)
    f = row[p]
    others = work.num_holders[f] if f >= 0 else 0
    gain = 0.0
    for i in range(work.num_holders[e] + 1 + others):
        if i < work.num_holders[e]:
            r = holders[e, i]
        elif i == work.num_holders[e]:
            r = taker
        else:
            r = holders[f, i - work.num_holders[e] - 1]
            if r == taker or holds[e, r] > 0:
                continue
        # Fraction of each expert's tokens that the rank takes on.
        here = r == taker
        of_e = (holds[e, r] + here) / (count[e] + 1.0) - holds[e, r] / count[e]
        of_f = (holds[f, r] - here) / (count[f] - 1.0) - holds[f, r] / count[f] if f >= 0 else 0.0
        gain += work.power[r]
        for t in range(load.shape[0]):
            change = of_e * load[t, e] + (of_f * load[t, f] if f >= 0 else 0.0)
            gain -= weight[t] * eighth(time[t, r] + change * pace[r])
    return gain
