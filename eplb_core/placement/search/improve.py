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

import numpy as np

from eplb_core._arrays import BoolArray, FloatArray, IntArray
from eplb_core._numba import kernel, lean_kernel
from eplb_core.placement.pack.block import holds
from eplb_core.placement.search.exchange import best_exchange
from eplb_core.placement.search.gift import best_gift, list_gifts
from eplb_core.placement.search.links import NO_LIMIT, Ask, Links, Step, book_row, book_step, price_fetches
from eplb_core.placement.search.state import (
    NEVER,
    Work,
    add_holder,
    add_speed,
    add_up,
    balance_of,
    begin,
    drop_holder,
    new_work,
    retime,
    scale,
    share_evenly,
    solve_shares,
)

# Fullest ranks that are looked at before the search ends.
_FULLEST = 2
# Passes over the replicated experts by which shares follow a step, and come near the best where they are judged.
_SWEEPS, _LAST_SWEEPS = 3, 50
# Transfers that are taken back for better ones, at most.
_MOST_TRIES = 16
# A row is not exchanged for one that is better by rounding.
_SOME_GAIN = 1e-9


@kernel
def improve_layers(
    windows: FloatArray,
    weights: FloatArray,
    old: IntArray,
    skip: BoolArray,
    capacity: IntArray,
    pace: FloatArray,
    links: Links,
    home: IntArray,
    whole: bool,
    price: float,
    budget: IntArray,
    most_steps: int,
    width: int,
    weighted: bool,
    p2l: IntArray,
    senders: IntArray,
) -> None:
    """Improve every layer that is not skipped; `p2l` must hold every expert on a live rank.

    Args:
        windows: Load `[T, L, E]`.
        weights: Weight of each window `[T]`; windows without load have no say.
        old: Layout that the weights are in `[L, P]`: what a rank holds there costs it nothing.
        skip: Layers to leave alone `[L]`.
        capacity: Slots to fill of each rank `[R]`; 0 = not active.
        pace: Time for one token `[R]`.
        links: Cost of a transfer from rank to rank, and how many a link may carry.
        home: Node in which a copy of each expert must stay `[L, E]`, -1 = any; `[0, 0]` = any for all.
        whole: All copies must stay there.
        price: Gain in balancedness that a transfer of cost 1 must bring.
        budget: Most transfers of each layer `[L]`; `NO_LIMIT`, or more, for any number.
        most_steps: Most steps a layer.
        width: Fullest ranks whose steps are compared before one is made.
        weighted: Shares are solved in each window; else replicas share evenly.
        p2l: `[L, P]`, changed in place.
        senders: Rank that the expert of each slot comes from `[L, P]`, -1 = nowhere; those of `p2l` at first, changed
            with it. Kept only where links have limits.
    """
    num_windows, layers, experts = windows.shape
    ranks = capacity.size
    work = new_work(num_windows, experts, pace, p2l.shape[1] // ranks)
    tried = np.zeros(ranks, dtype=np.bool_)
    kept = np.zeros(p2l.shape[1], dtype=np.int64)
    kept_sender = np.zeros(p2l.shape[1], dtype=np.int64)
    limited = links.rank_limit.size > 0
    speed = add_speed(capacity, pace)
    for layer in range(layers):
        if skip[layer] or not scale(windows, weights, layer, speed, work):
            continue
        row, sender = p2l[layer], senders[layer]
        if home.size > 0:
            _copy(home[layer], work.home)
        price_fetches(old[layer], links, whole, work)
        begin(weighted, row, work)
        book_row(sender, links)
        now = usual = kept_now = 0.0
        moved = kept_moved = 0
        kept_net = -np.inf
        barred = barred_rank = taken_back = -1
        for _ in range(_MOST_TRIES + 1):
            for _ in range(most_steps):
                balance = balance_of(work.weight, work.time)
                if balance - price * now > kept_net + _SOME_GAIN:
                    kept_net, kept_now, kept_moved = balance - price * now, now, moved
                    _copy(row, kept)
                    _copy(sender, kept_sender)
                # With M the largest time, sum(time^8) is near M^8: 1 / M falls by (1 / M) / 8 per relative rise of it.
                unit = balance / (8.0 * add_up(work.power))
                # Steps back refund at most this.
                refund = 2.0 * price * links.dearest if now > 0.0 else 0.0
                ask = Ask(price, budget[layer] - moved, unit, refund, weighted)
                gifts = list_gifts(capacity, weighted, row, work, links)
                found = (1e-9, -1, 0, 0, 0.0, 0)
                tried[:] = False
                for n in range(max(width, _FULLEST)):
                    full = _fullest(tried, capacity, work.power)
                    if full < 0 or (n >= width and found[1] >= 0):
                        break
                    tried[full] = True
                    found = best_exchange(full, ask, found, row, sender, work, links)
                    found = best_gift(full, gifts, ask, found, row, sender, work, links)
                if barred >= 0:
                    work.fetch[barred, barred_rank] = usual
                    barred = -1
                if found[1] < 0 or not _step(found, ask, row, sender, work, links):
                    break
                now += found[4]
                moved += found[5]
            net = balance_of(work.weight, work.time) - price * now
            if net > kept_net + _SOME_GAIN:
                kept_net, kept_now, kept_moved = net, now, moved
                _copy(row, kept)
                _copy(sender, kept_sender)
            _copy(kept, row)
            _copy(kept_sender, sender)
            if budget[layer] >= NO_LIMIT and not limited:
                break
            # Few transfers should be the best ones: take each back in turn and look for others in its place.
            taken_back, back = _take_back(taken_back + 1, old[layer], row, work, links)
            if taken_back < 0:
                break
            barred, barred_rank = kept[taken_back], taken_back // (row.size // ranks)
            usual = work.fetch[barred, barred_rank]
            work.fetch[barred, barred_rank] = NEVER
            now, moved = kept_now - usual, kept_moved - 1
            sender[taken_back] = -1
            if back >= 0:
                f, r = kept[back], back // (row.size // ranks)
                now -= work.fetch[f, r]
                moved -= 1 - work.held[f, r]
                sender[back] = -1
            begin(weighted, row, work)
            book_row(sender, links)
        _copy(kept, row)
        _copy(kept_sender, sender)


@lean_kernel
def _copy(source: IntArray, target: IntArray) -> None:
    for p in range(source.size):  # a slice would bring in numpy's broadcasting, and seconds of compilation
        target[p] = source[p]


@lean_kernel
def _fullest(tried: BoolArray, capacity: IntArray, power: FloatArray) -> int:
    """The live rank with the most power that was not tried yet, or -1."""
    full = -1
    for r in range(capacity.size):
        if not tried[r] and capacity[r] > 0 and (full < 0 or power[r] > power[full]):
            full = r
    return full


@kernel
def score_weighted(
    windows: FloatArray, weights: FloatArray, p2l: IntArray, capacity: IntArray, pace: FloatArray
) -> FloatArray:
    """Balancedness that solved shares reach, `[L]`: each layer's weighted mean over the windows with load, or NaN.

    From below: the shares are as near to the best as sweeps bring them.

    Args:
        windows: Load `[T, L, E]`.
        weights: Weight of each window `[T]`.
        p2l: `[L, P]`; every expert on a live rank, none elsewhere.
        capacity: Slots to fill of each rank `[R]`; 0 = not active.
        pace: Time for one token `[R]`.
    """
    ranks = capacity.size
    work = new_work(windows.shape[0], windows.shape[2], pace, p2l.shape[1] // ranks)
    speed = add_speed(capacity, pace)
    out = np.full(windows.shape[1], np.nan)
    for layer in range(windows.shape[1]):
        if scale(windows, weights, layer, speed, work):
            begin(True, p2l[layer], work)
            solve_shares(_LAST_SWEEPS, p2l[layer], work)
            out[layer] = min(1.0, balance_of(work.weight, work.time))
    return out


@lean_kernel
def _take_back(start: int, old: IntArray, row: IntArray, work: Work, links: Links) -> tuple[int, int]:
    """Take the first transfer from slot `start` on back, with that of the expert that it was exchanged for.

    Returns:
        The slot, -1 where there is none, and the slot that the expert goes back to, or -1.
    """
    stride = row.size // work.held.shape[1]
    for p in range(start, row.size):
        r, e, f = p // stride, row[p], old[p]
        if e < 0 or f < 0 or e == f or work.held[e, r] > 0 or holds(row, r, stride, f):
            continue
        back = -1
        others = False
        for a in range(row.size):
            others = others or (row[a] == e and a != p)
            if row[a] == f and old[a] == e and not holds(row, a // stride, stride, e):
                back = a
        if back < 0 and not others:
            continue
        row[p] = f
        if back >= 0:
            row[back] = e
        if _is_home(e, row, work, links) and _is_home(f, row, work, links):
            return p, back
        row[p] = e
        if (
            back >= 0
        ):  # pragma: no cover  an exchange that leads from home on both sides; 10,000 random layouts had none
            row[back] = f
    return -1, -1


@lean_kernel
def _is_home(e: int, row: IntArray, work: Work, links: Links) -> bool:
    stride = row.size // links.node.size
    found = bool(work.home[e] < 0)
    for p in range(row.size):
        found = found or (row[p] == e and links.node[p // stride] == work.home[e])
    return found


@lean_kernel
def _step(found: Step, ask: Ask, row: IntArray, senders: IntArray, work: Work, links: Links) -> bool:
    """Exchange two slots (kind 0), or give the second to the expert in the first (kind 1); False = it did not pay."""
    _, kind, a, p, pays, _ = found
    to_here, to_there = senders[a], senders[p]
    if links.rank_limit.size > 0:
        book_step(kind, a, p, True, row, senders, work, links)
    holders, num_holders = work.holders, work.num_holders
    stride = row.size // work.pace.size
    e, f = row[a], row[p]
    full, r = a // stride, p // stride
    row[p] = e
    add_holder(e, r, work)
    if f >= 0:
        drop_holder(f, r, work)
    else:
        work.filled[r] += 1
    if kind == 0:
        row[a] = f
        drop_holder(e, full, work)
        add_holder(f, full, work)
    else:
        work.replicas[e] += 1
        if f >= 0:
            work.replicas[f] -= 1
    if ask.weighted:
        before = add_up(work.power)
        _hand_over(kind, a, p, f, row, work)
        solve_shares(_SWEEPS, row, work)
        if (before - add_up(work.power)) * ask.unit <= ask.price * pays:
            row[a], row[p] = e, f  # rounding made it look good; the next one would go round in a circle
            senders[a], senders[p] = to_here, to_there
            book_row(senders, links)
            begin(ask.weighted, row, work)
            return False
        return True
    share_evenly(e, row, work)
    if f >= 0:
        share_evenly(f, row, work)
        for i in range(num_holders[f]):
            retime(holders[f, i], work)
    for i in range(num_holders[e]):
        retime(holders[e, i], work)
    retime(full, work)
    retime(r, work)
    return True


@lean_kernel
def _hand_over(kind: int, a: int, p: int, f: int, row: IntArray, work: Work) -> None:
    """Bring the shares to where the step has put the experts; `solve_shares` makes them even."""
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


@lean_kernel
def _pool(e: int, row: IntArray, work: Work) -> None:
    """Put all load of an expert on its first holder, as a start."""
    share, load = work.share, work.load
    stride = row.size // work.holders.shape[1]
    first = True
    for i in range(work.num_holders[e]):
        r = work.holders[e, i]
        for p in range(r * stride, r * stride + stride):
            if row[p] == e:
                for t in range(load.shape[0]):
                    share[t, p] = load[t, e] if first else 0.0
                first = False
