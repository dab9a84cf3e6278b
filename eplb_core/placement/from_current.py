"""From the layout in place: each layer keeps its row, goes on from it by the search, or takes the new solution."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np

from eplb_core._arrays import BoolArray, FloatArray, IntArray, read_only
from eplb_core.layout import count_replicas
from eplb_core.placement.pack.layers import ranks_alike
from eplb_core.placement.problem import Problem, Terms
from eplb_core.placement.score import cost_of_transfers, score_rows
from eplb_core.placement.search.chains import search_chains
from eplb_core.placement.search.improve import improve_layers
from eplb_core.placement.search.links import NO_LIMIT, book_layers, follow
from eplb_core.placement.search.mend import drop_surplus, restore_lost
from eplb_core.placement.search.relabel import keep_in_place, least_transfers, settle
from eplb_core.placement.search.widen import widen
from eplb_core.placement.windows import Load

# Fullest ranks whose steps are compared where several windows are seen: a better use of each transfer, in more time.
_WIDTH = 3
# Where all slots together cost less balance than this, a better use of each transfer is worth little: of more windows
# than these, which take long, one rank's steps are looked at.
_FREE, _MANY_WINDOWS = 5e-4, 16
# Changes that a rank may have to choose from, times windows, where all chains of a few are tried; experts and ranks of
# which all sets are looked at, for solved shares; ways to spread groups over nodes.
_MOST_CHANGES, _MOST_IN_SETS, _MOST_HOMES = 256, 8, 16
# A row never changes for less: rounding is no gain.
_SOME_GAIN = 1e-9


class Start(NamedTuple):
    """Layers of the current layout, and what they could become, whatever is asked of transfers."""

    was: IntArray
    """Current rows `[L, P]`."""
    present: IntArray
    """Those without ranks that are out, and without what a rank has too much `[L, P]`."""
    stays: BoolArray
    """Rows of `present` that are valid as they are `[L]`."""
    anew: BoolArray
    """Rows that take the solution: the search cannot start from them `[L]`."""
    home: IntArray
    """Of `find_homes`, for `present`."""
    balance: FloatArray
    """Balancedness of `present` `[L]`; NaN where it does not stay."""
    solution: IntArray
    """Rows placed from nothing `[L, P]`."""
    solved: FloatArray
    """Their balancedness `[L]`."""
    searched: FloatArray
    """Windows that the search looks at `[T, L, E]`: those of the load, or for solved shares wider ones."""


def start_from(was: IntArray, solution: IntArray, problem: Problem, load: Load) -> Start:
    """Say which rows may stay, and how good they and the solutions are."""
    present = was.copy()
    by_rank = present.reshape(len(was), problem.topology.num_ranks, problem.stride)
    by_rank[:, problem.capacity == 0] = -1
    if problem.pin == 0:
        drop_surplus(load.total, problem.capacity, present)
    settle(was, present, problem.capacity, problem.num_experts)
    fits = ((by_rank >= 0).sum(axis=2) <= problem.capacity).all(axis=1)
    whole, home = find_homes(present, problem)
    stays = fits & whole & (count_replicas(present, problem.num_experts) > 0).all(axis=1)
    # An expert lost is no reason to solve a row anew where groups do not bind: it is restored.
    anew = ~stays if problem.pin else ~fits
    balance = np.where(stays, score_rows(problem, load, present), np.nan)
    searched = load.windows
    if problem.weighted and len(searched) > 1:
        searched = read_only(widen(load.windows, load.weights))
    solved = score_rows(problem, load, solution)
    return Start(was, present, stays, anew, home, balance, solution, solved, searched)


def choose_rows(
    start: Start, problem: Problem, load: Load, terms: Terms
) -> tuple[IntArray, FloatArray, IntArray, IntArray]:
    """Choose each layer's row: the present one, a few transfers from it, or the new solution.

    Returns:
        The rows; their balancedness, NaN without load; their transfers; where these come from, if links have limits.
    """
    rows, senders = _search_from(start, problem, load, terms)
    changed = ~start.anew & (rows != start.present).any(axis=1)
    balance = start.balance.copy()
    balance[changed] = score_rows(problem, load.take(changed), rows[changed])
    received = _take_solutions(start, problem, terms, rows, senders, balance)
    keep = start.stays & ~(balance - start.balance >= max(terms.min_gain, _SOME_GAIN))
    rows[keep], senders[keep] = start.present[keep], -1
    return rows, np.where(keep, start.balance, balance), np.where(keep, 0, received), senders


def _search_from(start: Start, problem: Problem, load: Load, terms: Terms) -> tuple[IntArray, IntArray]:
    """Improve the present rows a transfer at a time; what stays on a rank stays in its slot.

    Returns:
        Rows, the solution where it must be taken; where their transfers come from, if links have limits.
    """
    rows = np.where(start.anew[:, None], start.solution, start.present)
    senders = np.full(rows.shape, -1)
    if problem.pin == 0:
        restore_lost(load.total, problem.capacity, start.was, terms.links, rows, senders)
    _, needed = cost_of_transfers(start.was, rows, terms.links)
    first, first_senders, skip = rows.copy(), senders.copy(), start.anew | ~load.known
    free = terms.budget >= NO_LIMIT and not terms.limited and terms.price * terms.links.dearest * rows.shape[1] < _FREE
    width = 1 if len(load.windows) == 1 or (free and len(load.windows) > _MANY_WINDOWS) else _WIDTH
    improve_layers(
        start.searched,
        load.weights,
        start.was,
        skip,
        problem.capacity,
        1.0 / problem.topology.rank_speed,
        terms.links,
        start.home,
        problem.pin == 2,
        terms.price,
        np.maximum(terms.budget - needed, 0),
        rows.shape[1],
        width,
        problem.weighted,
        rows,
        senders,
    )
    small = terms.budget > 0 and is_small(problem, len(load.windows))
    for home in _homes(start.home, problem) if small else ():
        search_chains(
            load.windows,
            load.weights,
            start.was,
            first,
            first_senders,
            skip,
            problem.capacity,
            1.0 / problem.topology.rank_speed,
            terms.links,
            home,
            problem.pin == 2,
            terms.price,
            np.maximum(terms.budget, needed),
            problem.weighted,
            ranks_alike(problem),
            rows,
            senders,
        )
    found = rows.copy()
    settle(start.was, rows, problem.capacity, problem.num_experts)
    if terms.limited:
        follow(found, rows, problem.topology.num_ranks, senders)
    return rows, senders


def _take_solutions(
    start: Start, problem: Problem, terms: Terms, rows: IntArray, senders: IntArray, balance: FloatArray
) -> IntArray:
    """Put the solution into `rows` where it must be, or pays although more has to move; return the transfers `[L]`."""
    was, ranks = start.was, problem.topology.num_ranks
    cost, received = cost_of_transfers(was, rows, terms.links)
    maybe = ~start.anew & (start.solved > balance)
    fewest = least_transfers(was, start.solution, ~maybe, ranks, problem.num_experts)
    least_cost = fewest * terms.links.cheapest
    worth = balance - terms.price * cost
    maybe &= (fewest <= terms.budget) & (start.solved - terms.price * least_cost > worth)
    asked = np.flatnonzero(start.anew | maybe)
    if not asked.size:
        return received
    new, speed = start.solution.copy(), problem.topology.rank_speed
    skip, across = ~(start.anew | maybe), problem.pin == 0
    keep_in_place(was, new, skip, problem.capacity, speed, terms.links, across, problem.num_experts)
    new_cost, new_received = cost_of_transfers(was[asked], new[asked], terms.links)
    booked = np.full((len(asked), new.shape[1]), -1)
    pays = (start.solved[asked] - terms.price * new_cost > worth[asked]) & (new_received <= terms.budget)
    if terms.limited:
        book_layers(was[asked], new[asked], problem.num_experts, terms.links, booked)
        pays &= (booked >= 0).sum(axis=1) == new_received
    take = start.anew[asked] | pays
    taken = asked[take]
    rows[taken], senders[taken], balance[taken] = new[taken], booked[take], start.solved[taken]
    received[taken] = new_received[take]
    return received


def is_small(problem: Problem, num_windows: int) -> bool:
    """Can chains of transfers be searched through?"""
    ranks = problem.topology.num_ranks
    changes = problem.stride * (ranks * problem.stride + problem.num_experts + 1)
    sets = max(problem.num_experts, ranks) <= _MOST_IN_SETS
    return num_windows * changes <= _MOST_CHANGES and (sets or not problem.weighted)


def _homes(home: IntArray, problem: Problem) -> Iterator[IntArray]:
    """The nodes of the experts' groups, and all others they could have, where these are few `[L, E]`."""
    yield home
    nodes, groups = problem.topology.num_nodes, problem.num_groups
    if problem.pin and nodes**groups <= _MOST_HOMES:
        for each in product(range(nodes), repeat=groups):
            node = np.repeat(np.array(each), problem.num_experts // groups)
            yield np.tile(node, (len(home), 1))


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
