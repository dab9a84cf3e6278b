"""Chains of changes: every row within a few transfers that can be worth more, for layers small enough to try them all.

A row is worth more only if the fullest rank of some window gets less: a slot of it is given to another expert or
emptied, or one of its experts gets a replica elsewhere. With solved shares some set of experts fills all its ranks: one
of the set must get a replica on another rank. So only such changes are tried, from each row on the way, which leaves no
better row out. A change may take an expert's last slot; then the expert's new slot is the next change.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_core._arrays import BoolArray, FloatArray, IntArray
from eplb_core._numba import kernel
from eplb_core.placement.pack.block import holds
from eplb_core.placement.search.links import Links, book, book_row, find_sender, price_fetches
from eplb_core.placement.search.state import Work, add_speed, new_work, scale

# Transfers of a chain, and changes of it, with slots that are emptied; chains that start where another ended.
_MOST_TRANSFERS, _MOST_CHANGES, _MOST_STARTS = 3, 6, 4
# Slots, or sets of experts, that are added up in a layer: some 12 ms.
_MOST_WORK = 1 << 16
# A row is not exchanged for one that is better by rounding.
_SOME_GAIN = 1e-9


class Chain(NamedTuple):
    """Arrays of the search, for all layers in turn; D changes deep."""

    row: IntArray
    """The row that was reached `[P]`."""
    slot: IntArray
    """Slots to change at each depth `[D, C]`."""
    expert: IntArray
    """What they would hold, -1 = nothing `[D, C]`."""
    listed: IntArray
    """The list in which a slot was last with an expert `[P, E + 1]`."""
    left: IntArray
    """What may still be added up in this layer `[1]`."""
    tried: IntArray
    """1 + the depth at which a slot was tried with an expert `[P, E + 1]`; 0 = not yet."""
    before: IntArray
    """What the slot changed at each depth held `[D]`."""
    locked: BoolArray
    """Slots that were changed on the way `[P]`."""
    replicas: IntArray
    """Slots of each expert `[E]`."""
    time: FloatArray
    """Of each rank `[R]`."""
    full: IntArray
    """The fullest rank of each window, or the fullest ranks as bits `[T]`."""
    filling: IntArray
    """With solved shares: experts that fill them, as bits `[T]`."""
    load: FloatArray
    """With solved shares: load of each set of experts `[T, 2^E]`."""
    ranks: IntArray
    """With solved shares: ranks that hold one of a set of experts, as bits `[2^E]`."""
    speed: FloatArray
    """With solved shares: speed of each set of ranks `[2^R]`."""


@kernel
def search_chains(
    windows: FloatArray,
    weights: FloatArray,
    old: IntArray,
    first: IntArray,
    first_senders: IntArray,
    skip: BoolArray,
    capacity: IntArray,
    pace: FloatArray,
    links: Links,
    home: IntArray,
    whole: bool,
    price: float,
    budget: IntArray,
    weighted: bool,
    filled: bool,
    p2l: IntArray,
    senders: IntArray,
) -> None:
    """Put the row that is worth most within a few transfers of `first` or of `p2l` into `p2l`.

    Args:
        windows: Load `[T, L, E]`.
        weights: Weight of each window `[T]`; windows without load have no say.
        old: Layout that the weights are in `[L, P]`: what a rank holds there costs it nothing.
        first: Rows to start from `[L, P]`.
        first_senders: Rank that the expert of each slot comes from `[L, P]`, -1 = nowhere.
        skip: Layers to leave alone `[L]`.
        capacity: Slots to fill of each rank `[R]`; 0 = not active.
        pace: Time for one token `[R]`.
        links: Cost of a transfer from rank to rank, and how many a link may carry.
        home: Node in which a copy of each expert must be `[L, E]`, -1 = any; `[0, 0]` = any for all. What `first` and
            `p2l` hold may be elsewhere.
        whole: All copies must be there.
        price: Gain in balancedness that a transfer of cost 1 must bring.
        budget: Most transfers of each layer, from `old` `[L]`.
        weighted: Shares are solved in each window; else replicas share evenly.
        filled: As many slots stay filled as `old` and `first` fill on active ranks.
        p2l: What another search made of `first`, valid `[L, P]`; changed in place.
        senders: As `first_senders`, of `p2l`; changed with it.
    """
    num_windows, layers, experts = windows.shape
    slots, ranks = p2l.shape[1], capacity.size
    work = new_work(num_windows, experts, pace, slots // ranks)
    chain = _new_chain(num_windows, experts, slots, pace, weighted)
    speed = add_speed(capacity, pace)
    for layer in range(layers):
        if skip[layer] or budget[layer] == 0 or not scale(windows, weights, layer, speed, work):
            continue
        if home.size > 0:
            for e in range(experts):
                work.home[e] = home[layer, e]
        price_fetches(old[layer], links, False, work)
        if weighted:
            _add_sets(work, chain)
        chain.row[:] = p2l[layer]
        balance = _balance(weighted, work, chain)
        net = balance - price * _cost(chain.row, work)[0]
        least = min(_filled(first[layer], capacity), _filled(old[layer], capacity)) if filled else 0
        chain.left[0] = _MOST_WORK
        for start in range(_MOST_STARTS):
            before = net
            origin = first[layer] if start == 0 else p2l[layer].copy()
            sender = first_senders[layer] if start == 0 else senders[layer].copy()
            for most in range(min(_MOST_TRANSFERS, budget[layer]) + 1):  # of equal rows the one with fewest
                net = _deepen(
                    origin,
                    sender,
                    most,
                    net,
                    capacity,
                    price,
                    budget[layer],
                    least,
                    weighted,
                    whole,
                    work,
                    links,
                    chain,
                    p2l[layer],
                    senders[layer],
                )
            if budget[layer] <= _MOST_TRANSFERS or (start > 0 and net <= before):
                break


@kernel
def _new_chain(num_windows: int, experts: int, slots: int, pace: FloatArray, weighted: bool) -> Chain:
    most, sets = slots * (experts + 1), 1 << experts if weighted else 1
    speed = np.zeros(1 << pace.size if weighted else 1)
    for mask in range(1, speed.size):
        r = 0
        while not mask >> r & 1:
            r += 1
        speed[mask] = speed[mask & (mask - 1)] + 1.0 / pace[r]
    return Chain(
        np.zeros(slots, np.int64),
        np.zeros((_MOST_CHANGES, most), np.int64),
        np.zeros((_MOST_CHANGES, most), np.int64),
        np.zeros((slots, experts + 1), np.int64),
        np.zeros(1, np.int64),
        np.zeros((slots, experts + 1), np.int64),
        np.zeros(_MOST_CHANGES, np.int64),
        np.zeros(slots, np.bool_),
        np.zeros(experts, np.int64),
        np.zeros(pace.size),
        np.zeros(num_windows, np.int64),
        np.zeros(num_windows, np.int64),
        np.zeros((num_windows, sets)),
        np.zeros(sets, np.int64),
        speed,
    )


@kernel
def _deepen(
    origin: IntArray,
    sender: IntArray,
    most: int,
    net: float,
    capacity: IntArray,
    price: float,
    budget: int,
    least: int,
    weighted: bool,
    whole: bool,
    work: Work,
    links: Links,
    chain: Chain,
    best: IntArray,
    best_sender: IntArray,
) -> float:
    """Try the chains from a row of so many transfers at most; what is worth more than `net` becomes `best`.

    A change that was tried is not tried again after those listed behind it: the chains with both were seen.
    """
    row, slot, expert, tried, before, locked = (
        chain.row,
        chain.slot,
        chain.expert,
        chain.tried,
        chain.before,
        chain.locked,
    )
    size, at = np.zeros(_MOST_CHANGES, np.int64), np.zeros(_MOST_CHANGES, np.int64)
    row[:] = origin
    tried[:] = 0
    locked[:] = False
    chain.listed[:] = 0
    _balance(weighted, work, chain)
    moved = _cost(row, work)[1]
    allowed, without = min(budget, moved + most), moved == 0
    spare = least < capacity.sum()  # else a slot that is emptied stays empty
    lists = 1
    _, lost, stray = _faults(whole, row, work, links, chain)
    size[0] = _list_changes(0, lists, lost, stray, capacity, weighted, whole, spare, work, links, chain)
    depth = 0
    while depth >= 0:
        if at[depth] == size[depth] or chain.left[0] <= 0:
            for i in range(size[depth]):
                if tried[slot[depth, i], expert[depth, i] + 1] == depth + 1:
                    tried[slot[depth, i], expert[depth, i] + 1] = 0
            depth -= 1
            if depth >= 0:
                p = slot[depth, at[depth] - 1]
                row[p] = before[depth]
                locked[p] = False
            continue
        p, e = slot[depth, at[depth]], expert[depth, at[depth]]
        at[depth] += 1
        if tried[p, e + 1] > 0:
            continue
        before[depth] = row[p]
        row[p] = e
        chain.left[0] -= chain.load.size + chain.full.size * row.size
        balance = _balance(weighted, work, chain)
        cost, moved = _cost(row, work)
        missing, lost, stray = _faults(whole, row, work, links, chain)
        fits = moved + missing <= allowed
        if fits or without:  # else it fits once a transfer of the row has gone back
            tried[p, e + 1] = depth + 1
        better = fits and missing == 0 and stray < 0 and balance - price * cost > net + _SOME_GAIN
        better = better and _filled(row, capacity) >= least
        if better and _book(origin, sender, row, best_sender, work, links):
            net = balance - price * cost
            best[:] = row
        if fits and depth + 1 < _MOST_CHANGES:
            locked[p] = True
            depth += 1
            lists += 1
            size[depth] = _list_changes(depth, lists, lost, stray, capacity, weighted, whole, spare, work, links, chain)
            at[depth] = 0
        else:
            row[p] = before[depth]
    return net


@kernel
def _filled(row: IntArray, capacity: IntArray) -> int:
    """Slots of active ranks that hold an expert."""
    n = 0
    for p in range(row.size):
        n += row[p] >= 0 and capacity[p * capacity.size // row.size] > 0
    return n


@kernel
def _list_changes(
    depth: int,
    lists: int,
    lost: int,
    stray: int,
    capacity: IntArray,
    weighted: bool,
    whole: bool,
    spare: bool,
    work: Work,
    links: Links,
    chain: Chain,
) -> int:
    """List the changes of which a better row has one; returns how many.

    First come new slots for a lost expert, then what a stray one's slot could hold.
    """
    row = chain.row
    stride = row.size // capacity.size
    if lost >= 0:
        return _list_slots(0, depth, lists, lost, -1, capacity, whole, work, links, chain)
    if stray >= 0:
        return _list_contents(0, depth, lists, stray, whole, spare, work, links, chain)
    n = 0
    for t in range(chain.full.size):
        if work.weight[t] <= 0.0:
            continue
        if weighted:
            for e in range(chain.replicas.size):
                if chain.filling[t] >> e & 1:
                    n = _list_slots(n, depth, lists, e, chain.full[t], capacity, whole, work, links, chain)
            continue
        full = chain.full[t]
        for a in range(full * stride, full * stride + stride):
            if row[a] >= 0:
                n = _list_slots(n, depth, lists, row[a], -1, capacity, whole, work, links, chain)
            if row[a] >= 0 and not chain.locked[a]:
                n = _list_contents(n, depth, lists, a, whole, spare, work, links, chain)
    return n


@kernel
def _list_contents(
    n: int, depth: int, lists: int, a: int, whole: bool, spare: bool, work: Work, links: Links, chain: Chain
) -> int:
    """List every expert that its rank may hold and does not, for a slot; with `spare` nothing, too."""
    stride = chain.row.size // work.pace.size
    r = a // stride
    if spare:
        n = _list(n, depth, lists, a, -1, chain)
    for e in range(chain.replicas.size):
        if not (whole and work.home[e] != links.node[r]) and not holds(chain.row, r, stride, e):
            n = _list(n, depth, lists, a, e, chain)
    return n


@kernel
def _list_slots(
    n: int,
    depth: int,
    lists: int,
    e: int,
    besides: int,
    capacity: IntArray,
    whole: bool,
    work: Work,
    links: Links,
    chain: Chain,
) -> int:
    """List the slots that could hold `e`, of ranks that do not, and are not among the bits `besides` if it is not -1.

    An expert that is not at home must come home.
    """
    row, home = chain.row, work.home[e]
    stride = row.size // capacity.size
    away = home >= 0 and not whole
    for p in range(row.size):
        away = away and not (row[p] == e and links.node[p // stride] == home)
    for r in range(capacity.size):
        if holds(row, r, stride, e) or ((away or whole) and links.node[r] != home):
            continue
        if besides >= 0 and besides >> r & 1:
            continue
        filled = 0
        for p in range(r * stride, r * stride + stride):
            filled += row[p] >= 0
        room = filled < capacity[r]
        for p in range(r * stride, r * stride + stride):
            if chain.locked[p] or (row[p] < 0 and not room):
                continue
            room = room and row[p] >= 0  # one empty slot is as good as another
            n = _list(n, depth, lists, p, e, chain)
    return n


@kernel
def _list(n: int, depth: int, lists: int, p: int, e: int, chain: Chain) -> int:
    if chain.listed[p, e + 1] == lists:
        return n
    chain.listed[p, e + 1] = lists
    chain.slot[depth, n], chain.expert[depth, n] = p, e
    return n + 1


@kernel
def _cost(row: IntArray, work: Work) -> tuple[float, int]:
    """What the transfers to a row cost, and how many they are."""
    stride = row.size // work.pace.size
    cost, moved = 0.0, 0
    for p in range(row.size):
        e, r = row[p], p // stride
        first = e >= 0
        for q in range(r * stride, p):
            first = first and row[q] != e
        if first:
            cost += work.fetch[e, r]
            moved += 1 - work.held[e, r]
    return cost, moved


@kernel
def _faults(whole: bool, row: IntArray, work: Work, links: Links, chain: Chain) -> tuple[int, int, int]:
    """How many experts have no slot, or none at home; the first of them; the first slot with one that is not at home.

    Where all copies must be at home; -1 where there is none.
    """
    stride = row.size // work.pace.size
    missing, lost, stray = 0, -1, -1
    for e in range(chain.replicas.size):
        home = work.home[e]
        there = chain.replicas[e] > 0 and home < 0
        for p in range(row.size if home >= 0 else 0):
            here = links.node[p // stride] == home
            there = there or (row[p] == e and here)
            if whole and row[p] == e and not here and stray < 0:
                stray = p
        if not there:
            missing += 1
            lost = e if lost < 0 else lost
    return missing, lost, stray


@kernel
def _book(origin: IntArray, sender: IntArray, row: IntArray, best_sender: IntArray, work: Work, links: Links) -> bool:
    """Have the links room for the transfers to a row? If so, write where they come from."""
    if links.rank_limit.size == 0:
        return True
    stride = row.size // work.pace.size
    new = np.full(row.size, -1)
    for p in range(row.size):
        if row[p] == origin[p]:
            new[p] = sender[p]
    book_row(new, links)
    for p in range(row.size):
        r = p // stride
        if row[p] >= 0 and row[p] != origin[p] and work.held[row[p], r] == 0:
            new[p] = find_sender(row[p], r, work.held, links)
            if new[p] < 0:
                return False
            book(new[p], r, 1, links)
    best_sender[:] = new
    return True


@kernel
def _balance(weighted: bool, work: Work, chain: Chain) -> float:
    """Mean over windows of 1 / largest time; notes who is fullest. Lost experts take no time."""
    row, count, time = chain.row, chain.replicas, chain.time
    ranks = time.size
    stride = row.size // ranks
    count[:] = 0
    for p in range(row.size):
        if row[p] >= 0:
            count[row[p]] += 1
    if weighted:
        return _balance_of_sets(work, chain)
    balance = 0.0
    for t in range(chain.full.size):
        if work.weight[t] <= 0.0:
            continue
        worst = 0.0
        for r in range(ranks):
            total = 0.0
            for p in range(r * stride, r * stride + stride):
                if row[p] >= 0:
                    total += work.load[t, row[p]] / count[row[p]]
            if total * work.pace[r] > worst:
                worst = total * work.pace[r]
                chain.full[t] = r
        balance += work.weight[t] / worst if worst > 0.0 else 0.0
    return balance


@kernel
def _add_sets(work: Work, chain: Chain) -> None:
    """Load of each set of experts."""
    for t in range(chain.load.shape[0]):
        for some in range(1, chain.load.shape[1]):
            e = 0
            while not some >> e & 1:
                e += 1
            chain.load[t, some] = chain.load[t, some & (some - 1)] + work.load[t, e]


@kernel
def _balance_of_sets(work: Work, chain: Chain) -> float:
    """With the best shares the largest time is that of a set of experts on all ranks that hold one of them.

    The largest over all sets, by the theorem of maximal flow and minimal cut.
    """
    row, ranks = chain.row, chain.ranks
    stride = row.size // work.pace.size
    for e in range(chain.replicas.size):
        holders = 0
        for p in range(row.size):
            if row[p] == e:
                holders |= 1 << p // stride
        ranks[1 << e] = holders if holders else chain.speed.size - 1  # a lost one could be anywhere
    balance = 0.0
    for some in range(1, ranks.size):
        ranks[some] = ranks[some & (some - 1)] | ranks[some & -some]
    for t in range(chain.full.size):
        if work.weight[t] <= 0.0:
            continue
        worst = 0.0
        for some in range(1, ranks.size):
            time = chain.load[t, some] / chain.speed[ranks[some]]
            if time > worst:
                worst, chain.full[t], chain.filling[t] = time, ranks[some], some
        balance += work.weight[t] / worst if worst > 0.0 else 0.0
    return balance
