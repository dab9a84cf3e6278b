"""Search for a layout whose tokens reach fewer nodes: steps at random, of which worse ones become rarer.

All in integers, with a generator of its own: equal inputs give equal bytes on any machine.

Source: S. Kirkpatrick, C. Gelatt, M. Vecchi, "Optimization by Simulated Annealing" (1983).
"""

from __future__ import annotations

from eplb_core._arrays import IntArray
from eplb_core._numba import inline_kernel, kernel
from eplb_core.placement.affinity.state import (
    Frame,
    State,
    accept,
    apart,
    bits,
    may_move,
    received,
    set_load,
)

_MASK, _GOLDEN = 0xFFFFFFFF, 0x9E3779B9
_STAGES = 64
"""The temperature falls in so many stages, each time to 244/256 of it: to a twentieth in all."""
_FALL = 244
_BEYOND = 4
"""Transfers beyond the budget that are allowed on the way, so that one can take another's place."""


@kernel
def anneal(frame: Frame, state: State, transfers: int, steps: int, heat: int, seed: int, best: IntArray) -> int:
    """Step from a row; write the best row met, and return its energy less the first one's.

    A step exchanges the experts `e` and `f` of the slots `a` and `b`, or gives slot `a` of `e` to `f`.

    Args:
        frame: The problem.
        state: Of the row to start from; changed.
        transfers: Of that row.
        steps: Steps to try.
        heat: Energy by which a step may be worse at first, about.
        seed: Of the generator, 0 or more.
        best: Row to start from, `[P]`; written.
    """
    # What most steps need is at hand: a tuple of arrays is slow to pass.
    row, filled, at, count, on = state.row, state.filled, state.at, state.replicas, state.on
    within, mask, spread, rank_load, was = state.within, state.mask, state.spread, state.rank_load, state.was
    node, load, tokens, limit, weight = frame.node, frame.load, frame.tokens, frame.limit, frame.weight
    share, pairs, had, home, nodes, pinned = state.share, frame.pairs, frame.had, frame.home, frame.nodes, frame.pinned
    experts, number, stride = count.size, filled.size, row.size // node.size
    nothing, for_e, for_f = experts, experts + 1, experts + 2  # in `share`
    here = least = 0
    most = max(frame.budget, transfers)
    spare = beyond = min(_BEYOND, most >> 2)
    length = max(1, steps // _STAGES)
    draw = seed * 4 * steps
    for step in range(steps):
        if step % length == 0 and step > 0:
            heat = heat * _FALL >> 8
            beyond = spare if 4 * step < 3 * steps else 0
        draw += 4
        room = heat * _exponential(_random(draw)) >> 16
        choice = _random(draw + 3)
        a = filled[_random(draw + 1) * number >> 32]
        e, r = row[a], a // stride
        b = q = -1
        gift = _random(draw + 2) & 3 == 0
        if gift:
            f = choice * experts >> 32
            if count[e] == 1 or e == f or on[f, r] > 0:
                continue
        else:
            b = filled[choice * number >> 32]
            f, q = row[b], b // stride
            if e == f or on[e, q] > 0 or on[f, r] > 0:
                continue
        more = received(had, on, e, r, q) + received(had, on, f, q, r)
        if more > 0 and transfers + more > most + beyond:
            continue
        n = node[r]
        m = n if gift else node[q]
        moves = gift or n != m
        if moves and home.size > 0:
            to = -1 if gift else m
            if not (may_move(home, within, pinned, e, n, to) and may_move(home, within, pinned, f, to, n)):
                continue
        # Beyond the budget a transfer costs a little more than what those so far have gained on average.
        over = max(0, transfers + more - most) - max(0, transfers - most)
        toll = over * (max(0, -here) * 9 // (8 * max(1, transfers)))
        energy, changed = toll + frame.transfer * more, 0
        if gift:
            for t in range(load.shape[1]):
                share[for_e, t], share[for_f, t] = load[e, t] // (count[e] - 1), load[f, t] // (count[f] + 1)
            for i in range(count[e]):
                x = at[e, i] // stride
                gets = nothing if x == r else for_e
                energy += set_load(rank_load, share, limit, weight, was, changed, x, gets, e)
                changed += 1
            for i in range(count[f]):
                energy += set_load(rank_load, share, limit, weight, was, changed, at[f, i] // stride, for_f, f)
                changed += 1
            energy += set_load(rank_load, share, limit, weight, was, changed, r, for_f, nothing)
            changed += 1
        else:
            energy += set_load(rank_load, share, limit, weight, was, 0, r, f, e)
            energy += set_load(rank_load, share, limit, weight, was, 1, q, e, f)
            changed = 2
        mask_e, mask_f = mask[e], mask[f]
        if moves and energy <= room + (tokens[e] + tokens[f]) * nodes // 2:  # else nothing can make up for it
            energy += apart(pairs, tokens, mask, spread, nodes, e, _moved(mask_e, within[e, n], n, m, gift))
            energy += apart(
                pairs, tokens, mask, spread, nodes, f, _moved(mask_f, 2 if gift else within[f, m], m, n, False)
            )
        if energy <= room:
            accept(frame, state, a, b, f)
            here += energy - toll
            transfers += more
            if here < least and transfers <= most:
                least = here
                best[:] = row
            continue
        for i in range(changed - 1, -1, -1):
            for t in range(load.shape[1]):
                rank_load[was[i, 0], t] = was[i, 1 + t]
        mask[e], mask[f], spread[e], spread[f] = mask_e, mask_f, bits(mask_e), bits(mask_f)
    return least


@inline_kernel
def _moved(mask: int, slots: int, source: int, to: int, gone: bool) -> int:
    """Nodes of an expert with one of its `slots` in node `source` moved to another node, or gone."""
    after = int(mask)
    if slots == 1:
        after &= ~(1 << source)
    return after if gone else after | 1 << to


@inline_kernel
def _random(n: int) -> int:
    """The n-th number in [0, 2^32).

    Source: the multipliers and shifts of "lowbias32" (C. Wellons, hash-prospector; public domain).
    """
    x = n * _GOLDEN & _MASK
    x ^= x >> 16
    x = x * 0x7FEB352D & _MASK
    x ^= x >> 15
    x = x * 0x846CA68B & _MASK
    return x ^ x >> 16


@inline_kernel
def _exponential(u: int) -> int:
    """About -log2(u / 2^32) * 2^16: leading zeros, and the rest as a straight line."""
    u |= 1
    zeros = 0
    while u < 1 << 31:
        u <<= 1
        zeros += 1
    return (zeros + 1 << 16) - (u >> 15 & 0xFFFF)
