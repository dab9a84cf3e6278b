"""Bring experts that tokens use together onto the same nodes, where that is worth what it costs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_core._arrays import BoolArray, FloatArray, IntArray
from eplb_core._numba import kernel
from eplb_core.placement.affinity.anneal import anneal
from eplb_core.placement.affinity.pairs import Pairs
from eplb_core.placement.affinity.state import LOAD_BITS, MOST_NODES, PAIR_BITS, Frame, State, new_state
from eplb_core.placement.from_current import find_homes
from eplb_core.placement.problem import Problem, Terms
from eplb_core.placement.score import cost_of_transfers, score_rows
from eplb_core.placement.search.links import book_layers
from eplb_core.placement.search.relabel import settle
from eplb_core.placement.windows import Load, add_windows
from eplb_core.topology import Topology

TRAFFIC_PRICE = 0.1
"""Balancedness that a cross-node send per token is worth where nothing is said."""
# Sends per token that a unit of energy stands for, about: 3.3 to 5.8 on the layouts of docs/affinity.md.
_SENDS = 4.0
# Steps at effort 1 from nothing, from a layout in place, and to even out the ranks at the end.
_STEPS, _STEPS_FROM, _STEPS_LAST = 1_200_000, 100_000, 100_000
# Energy by which these may be worse at first.
_HEAT, _HEAT_FROM, _HEAT_LAST = 0.0007, 0.0001, 0.0000007
# At the end load counts from an even one on, so much less than before.
_LAST_WEIGHT = 24
# How far above an even load a rank may be without cost: windows differ by more.
_SLACK = 0.01
_LIMIT_BITS = 16
# Groups of windows that a search from a layout in place tells apart.
_MOST_WINDOWS = 16
# Of the generator, of both searches. Equal inputs give equal bytes; another one changes sends by 2%, balance by .004.
_SEED, _SEED_LAST = 11, 12
# Effort that is put to use.
_MOST_EFFORT = 1000.0


class Near(NamedTuple):
    """What is asked of the nodes that tokens reach."""

    pairs: Pairs
    price: float
    """Balancedness that a send per token is worth, above 0."""
    effort: float


class Rows(NamedTuple):
    """Layouts and what is known of them, of all layers; each array is written."""

    p2l: IntArray
    """`[L, P]`."""
    balance: FloatArray
    """`[L]`."""
    received: IntArray
    """Transfers `[L]`."""
    senders: IntArray
    """Where these come from, if links have limits `[L, P]`."""


def bring_near(
    rows: Rows,
    which: BoolArray,
    was: IntArray | None,
    problem: Problem,
    load: Load,
    near: Near,
    terms: Terms,
    spare: int | None,
) -> None:
    """Change the rows whose tokens then reach so much fewer nodes that it pays.

    Args:
        rows: Layouts to start from.
        which: Layers that may change `[L]`, which are those that `problem` is for.
        was: The live rows `[L, P]`, or None.
        problem: What these rows must satisfy.
        load: Load of all layers.
        near: Which experts are used together, and what it is worth to have them near.
        terms: What transfers cost and may cost, all those of a layer.
        spare: Most transfers of a layer beyond those of its row in `rows`; None = no limit but that of `terms`.
    """
    topology = problem.topology
    if np.unique(topology.rank_to_node[problem.capacity > 0]).size < 2 or problem.pin == 2 or near.price == 0.0:
        return
    if topology.num_nodes > MOST_NODES:
        raise ValueError(f"`pairs` needs a `topology` of at most {MOST_NODES} nodes, not {topology.num_nodes}")
    chosen = which & load.known & near.pairs.speak()
    new, saved = rows.p2l.copy(), np.zeros(len(rows.p2l))
    _, homes = find_homes(rows.p2l, problem)
    for layer in np.flatnonzero(chosen).tolist():
        live = None if was is None else was[layer]
        home = homes[layer] if len(homes) else np.zeros(0, dtype=np.int64)
        frame = _new_frame(problem, load, near, layer, live, home, terms)
        done = int(rows.received[layer])
        if spare is not None:
            frame = frame._replace(budget=min(frame.budget, done + spare))
        saved[layer] = _search(frame, rows.p2l[layer], done, near, was is None, new[layer])
    if was is not None:
        settle(was, new, problem.capacity, problem.num_experts)
    _take(rows, new, saved, was, problem, load, near, terms)


def saved_sends(old: IntArray, new: IntArray, topology: Topology, load: FloatArray, pairs: Pairs) -> FloatArray:
    """Sends per token that rows `new` save against `old`, about, as the search counts them `[L]`; 0 without affinity.

    Args:
        old: Rows `[L, P]`.
        new: Rows `[L, P]`.
        topology: Of both.
        load: Of the experts `[L, E]`.
        pairs: Of all layers.
    """
    saved = np.zeros(len(new))
    for layer in np.flatnonzero((old != new).any(axis=1) & (load.max(axis=1) > 0.0) & pairs.speak()).tolist():
        used, use = _in_integers(load[layer]), pairs.use[layer]
        tokens, together = (used << PAIR_BITS) // int(used.sum()), (use << PAIR_BITS + 1) // int(use.sum())
        apart = [_apart(row[layer], topology, tokens, together) for row in (old, new)]
        saved[layer] = _SENDS * (apart[0] - apart[1]) / (topology.num_nodes << PAIR_BITS)
    return saved


def _apart(row: IntArray, topology: Topology, tokens: IntArray, together: IntArray) -> int:
    """As `energy_of`."""
    held = np.zeros((tokens.size, topology.num_nodes), dtype=np.int64)
    filled = np.flatnonzero(row >= 0)
    held[row[filled], topology.rank_to_node[filled // (row.size // topology.num_ranks)]] = 1
    spread = held.sum(axis=1)
    reach = np.where(held @ held.T == 0, topology.num_nodes - spread[:, None] - spread, 0)
    return int((tokens * (topology.num_nodes - spread)).sum()) + int((together * reach).sum()) // 2


def _search(frame: Frame, row: IntArray, received: int, near: Near, free: bool, best: IntArray) -> float:
    """Find the best row from `row` on, into `best`, which is a copy of it; return the sends per token that it saves."""
    steps, heat = (_STEPS, _HEAT) if free else (_STEPS_FROM, _HEAT_FROM)
    unit, effort = frame.nodes << PAIR_BITS, min(near.effort, _MOST_EFFORT)
    state = new_state(frame, row.copy())
    before = energy_of(frame, state)
    limited = frame._replace(limit=_limit(frame, state))
    anneal(limited, state, received, int(steps * effort), int(heat * unit), _SEED, best)
    if free:
        even = frame._replace(weight=np.maximum(frame.weight // _LAST_WEIGHT, 1))
        state = new_state(even, best.copy())
        anneal(even, state, received, int(_STEPS_LAST * effort), int(_HEAT_LAST * unit), _SEED_LAST, best)
    return _SENDS * (before - energy_of(frame, new_state(frame, best.copy()))) / unit


def _take(
    rows: Rows,
    new: IntArray,
    saved: FloatArray,
    was: IntArray | None,
    problem: Problem,
    load: Load,
    near: Near,
    terms: Terms,
) -> None:
    """Take the new rows that are worth more than the old ones by what sends, balance and transfers cost."""
    changed: BoolArray = (new != rows.p2l).any(axis=1)
    if not changed.any():
        return
    reached, more = rows.balance.copy(), np.zeros_like(rows.received)
    reached[changed] = score_rows(problem, load.take(changed), new[changed])
    gain = near.price * saved + reached - rows.balance
    if was is not None:
        cost, more = cost_of_transfers(was, new, terms.links)
        gain -= terms.price * (cost - cost_of_transfers(was, rows.p2l, terms.links)[0])
    take = changed & (gain > 0.0)
    if was is not None and terms.limited:
        booked = np.full_like(new, -1)
        book_layers(was, new, problem.num_experts, terms.links, booked)
        take &= (booked >= 0).sum(axis=1) == more
        rows.senders[take] = booked[take]
    rows.p2l[take], rows.balance[take], rows.received[take] = new[take], reached[take], more[take]


def _new_frame(
    problem: Problem,
    load: Load,
    near: Near,
    layer: int,
    was: IntArray | None,
    home: IntArray,
    terms: Terms,
) -> Frame:
    """One layer in integers; its limits are even loads."""
    topology, experts = problem.topology, problem.num_experts
    ranks, nodes = topology.num_ranks, topology.num_nodes
    active = problem.capacity > 0
    pace = np.ldexp(topology.rank_speed / topology.rank_speed[active].max(), LOAD_BITS).astype(np.int64)
    pace = np.where(active, np.maximum(pace, 1), 0)
    even = int(active.sum()) << LOAD_BITS
    target = np.maximum(even * pace // int(pace.sum()), 1)
    used = _in_integers(load.total[layer])
    windows, parts = [used], [1.0]
    if was is not None and len(load.windows) > 1:
        windows, parts = _some_windows(load, layer)
    each = np.stack([window * even // int(window.sum()) for window in windows], axis=1)
    pairs = near.pairs.use[layer]
    had = np.full((experts, ranks), was is None)
    if was is not None:
        held = np.flatnonzero(was >= 0)
        had[was[held], held // problem.stride] = True
    unit = (nodes << PAIR_BITS) / (_SENDS * near.price)  # energy of all balancedness
    weight = np.ldexp(unit, -LOAD_BITS) * (np.ldexp(1.0, LOAD_BITS) / target)
    return Frame(
        topology.rank_to_node,
        nodes,
        each,
        np.repeat(target[:, None], len(parts), axis=1),
        np.clip(weight[:, None] * np.array(parts), 1.0, 2.0**30).astype(np.int64),
        ((pairs << PAIR_BITS + 1) // int(pairs.sum())).astype(np.int32),
        (used << PAIR_BITS) // int(used.sum()),
        had,
        home,
        problem.pin == 2,
        int(min(unit * terms.price, 2.0**50)),
        terms.budget,
    )


def _in_integers(load: FloatArray) -> IntArray:
    """Loads of experts, the largest of 30 bits."""
    return np.ldexp(load, 30 - int(np.frexp(load.max())[1])).astype(np.int64)


def _some_windows(load: Load, layer: int) -> tuple[list[IntArray], list[float]]:
    """The windows of a layer in a few groups one after the other, and what part of the weight each has."""
    windows, parts = [], []
    known = np.flatnonzero((load.windows[:, layer].max(axis=1) > 0.0) & (load.weights > 0.0))
    for group in np.array_split(known, min(_MOST_WINDOWS, known.size)):
        weights = load.weights[group]
        windows.append(_in_integers(add_windows(load.windows[group, layer], weights / weights.max())))
        parts.append(sum(weights.tolist()))
    return windows, [part / sum(parts) for part in parts]


def _limit(frame: Frame, state: State) -> IntArray:
    """Load above which a rank costs `[R, T]`: a little more than even, or what the fullest rank has now."""
    fullest = ((state.rank_load << _LIMIT_BITS) // frame.limit).max(axis=0)
    least = int(_SLACK * (1 << _LIMIT_BITS)) + (1 << _LIMIT_BITS)
    limit: IntArray = frame.limit * np.maximum(fullest, least) >> _LIMIT_BITS
    return limit


@kernel
def energy_of(frame: Frame, state: State) -> int:
    """Energy of what lies apart: see `set_mask`."""
    energy = 0
    for e in range(state.spread.size):
        energy += frame.tokens[e] * (frame.nodes - state.spread[e])
        for f in range(e):
            if state.mask[e] & state.mask[f] == 0:
                energy += frame.pairs[e, f] * (frame.nodes - state.spread[e] - state.spread[f])
    return energy
