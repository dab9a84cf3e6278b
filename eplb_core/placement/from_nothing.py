"""Rows where nothing is in place, or as if nothing were."""

from __future__ import annotations

import numpy as np

from eplb_core._arrays import BoolArray, FloatArray, IntArray
from eplb_core.placement.exact import best_rows, is_tiny
from eplb_core.placement.from_current import find_homes
from eplb_core.placement.pack.block import Scratch, new_scratch
from eplb_core.placement.pack.layers import ranks_alike, solve_layers
from eplb_core.placement.pack.search import TOLERANCE
from eplb_core.placement.polish import polish
from eplb_core.placement.problem import Problem, fewer_slots, slots_by_speed
from eplb_core.placement.score import bound_layers, score_rows
from eplb_core.placement.search.improve import improve_layers
from eplb_core.placement.search.links import NO_LIMIT, new_links
from eplb_core.placement.windows import Load

_SOME_GAIN = 1e-9
# With no more slots than these it takes little time to try which should stay empty.
_FEW_SLOTS = 64
# A layer on few slots that ends so far below its bound is searched with this effort.
_FAR, _FAR_EFFORT = 0.02, 64.0
# Steps of a layer that is placed from nothing for several windows, at effort 1.
_FREE_STEPS = 128


def solve(problem: Problem, load: Load, effort: float, *, free: bool) -> tuple[IntArray, FloatArray]:
    """Place every layer with load from nothing, the others as if all experts were equally loaded.

    Args:
        problem: What the layers must satisfy.
        load: Their load.
        effort: As for `place`.
        free: Nothing is in place: balance each window, where there is more to do than for the sum of them.

    Returns:
        The rows `[L, P]`, and the upper limit of their balancedness `[L]`.
    """
    p2l, bound = _solve_slots(problem, load, effort, free=free)
    if not free or problem.pin or p2l.shape[1] > _FEW_SLOTS:
        return p2l, bound
    reached = score_rows(problem, load, p2l)
    short = load.known & (reached < bound - _SOME_GAIN)
    tiny, further = is_tiny(problem), len(load.windows) > 1 or problem.weighted
    if tiny:
        done = _try_all(problem, problem.capacity, load, short, effort, p2l, reached)
        short &= ~done | problem.weighted  # solved shares are only nearly the best of their row
    elif not further:
        # What effort 1 reaches decides, so that more effort is never worse. Where ranks differ any layer below its
        # bound is asked, so that more slots are not.
        usual, limit = (p2l, bound) if effort == 1.0 else _solve_slots(problem, load, 1.0, free=free)
        slack = _FAR if ranks_alike(problem) else _SOME_GAIN
        far = load.known & (score_rows(problem, load, usual) < limit - slack)
        if far.any():
            rows, scratch = p2l.copy(), new_scratch(problem.num_experts, problem.topology.num_ranks, problem.stride)
            solve_layers(problem, load.total, ~far, max(effort, _FAR_EFFORT), scratch, rows, np.zeros_like(bound))
            _take_better(problem, load, rows, far, p2l, reached)
    if ranks_alike(problem) or not (tiny or further):
        return p2l, bound
    # Few slots of ranks that differ: what is good with fewer of them may be better than all.
    for capacity in fewer_slots(problem.capacity, load.total.shape[1]):
        short &= reached < bound - _SOME_GAIN
        if not short.any():
            break
        if further:
            rows, _ = _solve_slots(problem._replace(capacity=capacity), load, effort, free=True)
            _take_better(problem, load, rows, short, p2l, reached)
        if tiny:
            _try_all(problem, capacity, load, short, effort, p2l, reached)
    return p2l, bound


def _try_all(
    problem: Problem,
    capacity: IntArray,
    load: Load,
    asked: BoolArray,
    effort: float,
    p2l: IntArray,
    reached: FloatArray,
) -> BoolArray:
    """Take the best rows there are, as far as the work suffices; returns for which layers it did."""
    rows, done = best_rows(problem, capacity, load, asked, effort, p2l, reached)
    _take_better(problem, load, rows, asked, p2l, reached)
    return done


def _take_better(
    problem: Problem, load: Load, rows: IntArray, asked: BoolArray, p2l: IntArray, reached: FloatArray
) -> None:
    """Take those of `rows` that are asked for and better than what `p2l` reached; both are changed in place.

    Ranks that are alike leave no more slots empty than before: few engines can.
    """
    found = score_rows(problem, load, rows)
    better = asked & (found > reached)
    if ranks_alike(problem):
        better &= (rows >= 0).sum(axis=1) >= (p2l >= 0).sum(axis=1)
    p2l[better], reached[better] = rows[better], found[better]


def _solve_slots(problem: Problem, load: Load, effort: float, *, free: bool) -> tuple[IntArray, FloatArray]:
    """As `solve`, with all of the slots."""
    layers, experts = load.total.shape
    topology = problem.topology
    scratch = new_scratch(experts, topology.num_ranks, problem.stride)
    p2l = np.full((layers, topology.num_ranks * problem.stride), -1, dtype=np.int64)
    limit, bound = np.zeros(layers), np.zeros(layers)
    total, skip = load.total, ~load.known
    if skip.any() and problem.pin:  # the trivial spread knows no groups
        total, skip = np.where(skip[:, None], 1.0, total), np.zeros(layers, dtype=np.bool_)
    elif skip.any():
        open_slots = (np.arange(problem.stride) < problem.capacity[:, None]).reshape(-1)
        p2l[np.ix_(skip, open_slots)] = np.arange(open_slots.sum()) % experts
    # What is searched further starts from one place, so that more effort goes on where less has ended.
    further = len(load.windows) > 1 or problem.weighted
    solve_layers(problem, total, skip, 1.0 if further else effort, scratch, p2l, limit)
    # What the search proved holds for one window and even shares alone.
    bound_layers(load.windows, load.weights, problem.capacity, topology.rank_speed, limit, not further, scratch, bound)
    bound *= problem.reach
    usual = p2l.copy()
    if free and further:
        _balance_windows(problem, load, p2l, effort)
    if free and problem.weighted:
        if effort != 1.0:
            _balance_windows(problem, load, usual, 1.0)
        _try_unsplit(problem, load, scratch, p2l.copy() if effort == 1.0 else usual, p2l, bound)
    return p2l, bound


def _try_unsplit(
    problem: Problem, load: Load, scratch: Scratch, usual: IntArray, p2l: IntArray, bound: FloatArray
) -> None:
    """For solved shares that end far from their bound: begin with each expert once, and take what is better.

    The slots that are free then are for the search, which splits an expert where that evens two ranks out. Goes by
    `usual`, what effort 1 reaches, and for few slots goes on from there too: so more effort is never worse.
    """
    reached = score_rows(problem, load, p2l)
    far = load.known & (score_rows(problem, load, usual) < bound * (1.0 - TOLERANCE))
    if far.any():
        once = problem._replace(capacity=slots_by_speed(problem))
        rows = np.full_like(p2l, -1)
        solve_layers(once, load.total, ~far, 1.0, scratch, rows, np.zeros_like(bound))
        rows[~far] = p2l[~far]
        _balance_windows(problem, load, rows, 1.0, ~far)
        starts = [rows, usual]
        few = p2l.shape[1] <= _FEW_SLOTS and not is_tiny(problem)
        if few:  # what is even with equal shares lies elsewhere; squares split hot experts more often
            share = load.total / np.maximum(load.total.max(axis=1, keepdims=True), 1e-300)
            for total in (load.total, share * share):
                starts.append(p2l.copy())
                solve_layers(problem, total, ~far, _FAR_EFFORT, scratch, starts[-1], np.zeros_like(bound))
        for each in starts:
            if few:
                polish(problem, load, far, bound, each)
            _take_better(problem, load, each, far, p2l, reached)


def _balance_windows(problem: Problem, load: Load, p2l: IntArray, effort: float, skip: BoolArray | None = None) -> None:
    """Go on from a placement of the sum until each window is balanced; nothing is in place, so all is free.

    With `skip`, from one that leaves slots free for solved shares.
    """
    ranks, none = problem.topology.num_ranks, np.zeros((0, 0), dtype=np.int64)
    links = new_links(np.zeros((ranks, ranks)), problem.topology.rank_to_node, none, none)
    _, home = find_homes(p2l, problem)
    steps = max(1, int(_FREE_STEPS * effort))
    # Steps for even shares see more ways than those for solved ones, which go on from where they have ended. Effort is
    # for the last of them, so that more of it goes on where less has ended.
    phases = ((False, _FREE_STEPS), (True, steps)) if problem.weighted else ((False, steps),)
    for weighted, most in phases if skip is None else phases[1:]:
        improve_layers(
            load.windows,
            load.weights,
            p2l.copy(),
            ~load.known if skip is None else skip,
            problem.capacity,
            1.0 / problem.topology.rank_speed,
            links,
            home,
            problem.pin == 2,
            0.0,
            np.full(len(p2l), NO_LIMIT),
            most,
            1,
            weighted,
            p2l,
            np.full(p2l.shape, -1),
        )
