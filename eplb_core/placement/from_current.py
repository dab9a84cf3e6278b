"""From the layout in place: each layer keeps its row, goes on from it by the search, or takes the new solution."""

from __future__ import annotations

import numpy as np

from eplb_core._arrays import BoolArray, FloatArray, IntArray, read_only
from eplb_core.layout import count_replicas
from eplb_core.placement.problem import Problem, Terms
from eplb_core.placement.score import cost_of_transfers, score_layers
from eplb_core.placement.search.improve import improve_layers, score_weighted
from eplb_core.placement.search.links import book_layers, follow
from eplb_core.placement.search.mend import drop_surplus, restore_lost
from eplb_core.placement.search.relabel import keep_in_place, least_transfers, settle

# Fullest ranks whose steps are compared where several windows are seen: a better use of each transfer, in more time.
_WIDTH = 3
# A row never changes for less: rounding is no gain.
_SOME_GAIN = 1e-9


def start_from(
    was: IntArray,
    problem: Problem,
    windows: FloatArray,
    searched: FloatArray,
    weights: FloatArray,
    load: FloatArray,
    p2l: IntArray,
    terms: Terms,
) -> tuple[FloatArray, IntArray, IntArray]:
    """Choose each layer's row: the present one, a few transfers from it, or the new solution.

    The new solution stands in `p2l`, where the rows chosen replace it. Rows are judged on `windows`, and the search
    looks at `searched`.

    Returns:
        Balancedness of the rows chosen, NaN without load; their transfers; where these come from, if links have limits.
    """
    ranks = problem.topology.num_ranks
    present = was.copy()
    by_rank = present.reshape(len(was), ranks, problem.stride)
    by_rank[:, problem.capacity == 0] = -1
    if problem.pin == 0:
        drop_surplus(load, problem.capacity, present)
    settle(was, present, problem.capacity, problem.num_experts)
    fits = ((by_rank >= 0).sum(axis=2) <= problem.capacity).all(axis=1)
    whole, home = find_homes(present, problem)
    stays = fits & whole & (count_replicas(present, problem.num_experts) > 0).all(axis=1)

    # A row that cannot stay takes the solution; an expert lost is no reason for that where groups do not bind.
    anew = ~stays if problem.pin else ~fits
    near = np.where(anew[:, None], p2l, present)
    senders = np.full(near.shape, -1)
    skip = anew | (load.max(axis=1, initial=0.0) <= 0.0)
    _search_from(was, near, skip, home, problem, searched, weights, load, terms, senders)
    before = np.where(stays, score(problem, windows, weights, present), np.nan)
    changed = (near != present).any(axis=1)
    balance = before.copy()
    balance[changed] = score(problem, read_only(np.compress(changed, windows, axis=1)), weights, near[changed])
    cost, received = _transfers(was, near, terms)

    # Others take the solution where that pays although more has to move.
    new = score(problem, windows, weights, p2l)
    fewest = np.zeros(len(was), dtype=np.int64)
    maybe = ~anew & (new > balance)
    least_transfers(was, p2l, ~maybe, ranks, problem.num_experts, fewest)
    least_cost = fewest * terms.links.cheapest
    maybe &= (fewest <= terms.budget) & (new - terms.price * least_cost > balance - terms.price * cost)
    if (anew | maybe).any():
        speed, across = problem.topology.rank_speed, problem.pin == 0
        keep_in_place(was, p2l, ~(anew | maybe), problem.capacity, speed, terms.links, across, problem.num_experts)
        rows = np.flatnonzero(anew | maybe)
        new_cost, new_received = _transfers(was[rows], p2l[rows], terms)
        booked = np.full((len(rows), near.shape[1]), -1)
        pays = new[rows] - terms.price * new_cost > balance[rows] - terms.price * cost[rows]
        pays &= new_received <= terms.budget
        if terms.limited:
            book_layers(was[rows], p2l[rows], problem.num_experts, terms.links, booked)
            pays &= (booked >= 0).sum(axis=1) == new_received
        anew[rows] |= pays
        take = anew[rows]
        senders[rows[take]] = booked[take]
        received[rows[take]] = new_received[take]
        balance = np.where(anew, new, balance)
    keep = stays & ~(balance - before >= max(terms.min_gain, _SOME_GAIN))
    np.copyto(p2l, near, where=~anew[:, None])
    np.copyto(p2l, present, where=keep[:, None])
    senders[keep] = -1
    return np.where(keep, before, balance), np.where(keep, 0, received), senders


def _search_from(
    was: IntArray,
    near: IntArray,
    skip: BoolArray,
    home: IntArray,
    problem: Problem,
    windows: FloatArray,
    weights: FloatArray,
    load: FloatArray,
    terms: Terms,
    senders: IntArray,
) -> None:
    """Improve the rows `near` a transfer at a time, in place; what stays on a rank stays in its slot."""
    ranks, speed = problem.topology.num_ranks, problem.topology.rank_speed
    if problem.pin == 0:
        restore_lost(load, problem.capacity, was, terms.links, near, senders)
    _, needed = _transfers(was, near, terms)
    improve_layers(
        windows,
        weights,
        was,
        skip,
        problem.capacity,
        1.0 / speed,
        terms.links,
        home,
        problem.pin == 2,
        terms.price,
        np.maximum(terms.budget - needed, 0),
        near.shape[1],
        1 if len(windows) == 1 else _WIDTH,
        problem.weighted,
        near,
        senders,
    )
    found = near.copy()
    settle(was, near, problem.capacity, problem.num_experts)
    if terms.limited:
        follow(found, near, ranks, senders)


def _transfers(was: IntArray, p2l: IntArray, terms: Terms) -> tuple[FloatArray, IntArray]:
    """Cost and number of each layer's transfers."""
    cost, received = np.zeros(len(was)), np.zeros(len(was), dtype=np.int64)
    cost_of_transfers(was, p2l, terms.links, cost, received)
    return cost, received


def find_homes(p2l: IntArray, problem: Problem) -> tuple[BoolArray, IntArray]:
    """Which rows keep the locality `[L]`, and the node of each expert's group in them `[L, E]`.

    All replicas of each group must be in one node, or one of each expert of it in the same node, of which the first is
    its home. `[0, 0]` where any expert may be anywhere.
    """
    layers, nodes, experts = len(p2l), problem.topology.num_nodes, problem.num_experts
    if problem.pin == 0:
        return np.ones(layers, dtype=np.bool_), np.zeros((0, 0), dtype=np.int64)
    here: BoolArray = np.zeros((layers, nodes, experts + 1), dtype=np.bool_)
    node = np.repeat(problem.topology.rank_to_node, problem.stride)
    here[np.arange(layers)[:, None], node[None, :], p2l] = True  # empty slots mark the column beyond the experts
    groups = here[:, :, :-1].reshape(layers, nodes, problem.num_groups, experts // problem.num_groups)
    in_node: BoolArray = np.any(groups, axis=3) if problem.pin == 2 else np.all(groups, axis=3)
    number = np.sum(in_node, axis=1)
    keeps: BoolArray = np.all(number == 1 if problem.pin == 2 else number > 0, axis=1)
    home = np.repeat(np.argmax(in_node, axis=1), experts // problem.num_groups, axis=1)
    return keeps, np.ascontiguousarray(home, dtype=np.int64)


def score(problem: Problem, windows: FloatArray, weights: FloatArray, p2l: IntArray) -> FloatArray:
    """Balancedness of each layer, NaN without load."""
    reached = np.zeros(len(p2l))
    speed = problem.topology.rank_speed
    if problem.weighted:
        score_weighted(windows, weights, p2l, problem.capacity, 1.0 / speed, reached)
    else:
        score_layers(windows, weights, p2l, problem.capacity, speed, reached)
    return reached
