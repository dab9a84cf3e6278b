"""What a layout makes of loads, and what no layout can exceed."""

from __future__ import annotations

import numpy as np

from eplb_core._arrays import FloatArray, IntArray
from eplb_core._numba import kernel
from eplb_core.placement.pack.block import EXPERT_LOAD, ITEM_SHARE, Scratch, count_replicas, sort_by_load, sort_by_share
from eplb_core.placement.problem import Problem
from eplb_core.placement.search.improve import score_weighted
from eplb_core.placement.search.links import Links
from eplb_core.placement.windows import Load

# A limit is lowered by more than rounding can have raised it, so that what is said to be proven is.
_SURE = 1.0 - 2.0**-40


def score_rows(problem: Problem, load: Load, p2l: IntArray) -> FloatArray:
    """Balancedness of each layer over the active ranks `[L]`, NaN without load, for shares as the problem says."""
    speed = problem.topology.rank_speed
    if problem.weighted:
        return problem.reach * score_weighted(load.windows, load.weights, p2l, problem.capacity, 1.0 / speed)
    return problem.reach * score_layers(load.windows, load.weights, p2l, problem.capacity, speed)


@kernel
def score_layers(
    load: FloatArray, weights: FloatArray, p2l: IntArray, capacity: IntArray, rank_speed: FloatArray
) -> FloatArray:
    """Balancedness of each layer over the ranks with slots `[L]`, weighted mean over the windows with load.

    NaN where there are none, and where an expert with load has no live slot.

    Args:
        load: `[T, L, E]`.
        weights: `[T]`.
        p2l: `[L, R * S]`; replicas on active ranks share equally, those on other ranks take nothing.
        capacity: Live slots of each rank `[R]`; ranks with 0 are left out.
        rank_speed: `[R]`.
    """
    windows, layers, experts = load.shape
    ranks = capacity.size
    count, share, out = np.zeros(experts, np.int64), np.zeros(experts), np.zeros(layers)
    stride = p2l.shape[1] // ranks
    speed = 0.0
    for r in range(ranks):
        if capacity[r] > 0:
            speed += rank_speed[r]
    for layer in range(layers):
        for e in range(experts):
            count[e] = 0
        for r in range(ranks):
            for p in range(r * stride, r * stride + stride):
                if capacity[r] > 0 and p2l[layer, p] >= 0:
                    count[p2l[layer, p]] += 1
        total = known = 0.0
        lost = False
        for t in range(windows):
            whole = worst = 0.0
            for e in range(experts):
                whole += load[t, layer, e]
                share[e] = load[t, layer, e] / max(count[e], 1)
                lost = lost or (count[e] == 0 and load[t, layer, e] > 0.0)
            if whole <= 0.0 or weights[t] <= 0.0:
                continue
            for r in range(ranks):
                mine = 0.0
                for p in range(r * stride, r * stride + stride):
                    if capacity[r] > 0 and p2l[layer, p] >= 0:
                        mine += share[p2l[layer, p]]
                worst = max(worst, mine / rank_speed[r])
            # Rounding may leave the largest time a hair below the mean.
            total += weights[t] * min(1.0, whole / speed / worst) if worst > 0.0 else 0.0
            known += weights[t]
        out[layer] = total / known if known > 0.0 and not lost else np.nan
    return out


@kernel
def cost_of_transfers(old: IntArray, new: IntArray, links: Links) -> tuple[FloatArray, IntArray]:
    """What each layer must bring over links to go from `old` to `new`, both `[L, P]`.

    Returns:
        Cost by the cheapest holders `[L]`; distinct experts that ranks hold in `new` and not in `old` `[L]`.
    """
    layers, slots = old.shape
    stride = slots // links.node.size
    cost, received = np.zeros(layers), np.zeros(layers, np.int64)
    for layer in range(layers):
        for p in range(slots):
            e = new[layer, p]
            if e < 0:
                continue
            r = p // stride
            first = True
            for q in range(r * stride, r * stride + stride):
                if old[layer, q] == e or (q < p and new[layer, q] == e):
                    first = False
            if first:
                received[layer] += 1
                cheapest = np.inf
                for q in range(slots):
                    if old[layer, q] == e:
                        cheapest = min(cheapest, links.cost[q // stride, r])
                cost[layer] += cheapest if cheapest < np.inf else links.dearest
    return cost, received


def bound_layers(
    load: FloatArray,
    weights: FloatArray,
    capacity: IntArray,
    rank_speed: FloatArray,
    limit: FloatArray,
    one_window: bool,
    scratch: Scratch,
    out: FloatArray,
) -> None:
    """Upper limit of what `score_layers` can give, for any layout with these live slots.

    In a window no layout has a largest time below total load / total speed, nor below the largest share that the
    divisor method leaves on the fastest rank. The limit of the mean is the mean of the windows' limits.

    Args:
        load: `[T, L, E]`.
        weights: `[T]`.
        capacity: Live slots of each rank `[R]`.
        rank_speed: `[R]`.
        limit: Lower limit of the largest time that the search proved `[L]`; used where it is for the one window.
        one_window: `limit` is for the only window.
        scratch: For E experts and R ranks.
        out: Written `[L]`; NaN where there is no load.
    """
    if one_window:
        _bound_window(load[0], weights[0], capacity, rank_speed, limit, out)
    else:
        _bound_windows(load, weights, capacity, rank_speed, scratch, out)


@kernel
def _bound_window(
    load: FloatArray, weight: float, capacity: IntArray, rank_speed: FloatArray, limit: FloatArray, out: FloatArray
) -> None:
    speed = 0.0
    for r in range(capacity.size):
        if capacity[r] > 0:
            speed += rank_speed[r]
    for layer in range(load.shape[0]):
        whole = 0.0
        for e in range(load.shape[1]):
            whole += load[layer, e]
        mean = whole / speed
        known = whole > 0.0 and weight > 0.0
        out[layer] = min(1.0, mean / max(limit[layer] * _SURE, mean)) if known else np.nan


@kernel
def _bound_windows(
    load: FloatArray, weights: FloatArray, capacity: IntArray, rank_speed: FloatArray, scratch: Scratch, out: FloatArray
) -> None:
    windows, layers, experts = load.shape
    tokens = scratch.reals[EXPERT_LOAD]
    live = slots = 0
    speed = fastest = 0.0
    for r in range(capacity.size):
        if capacity[r] > 0:
            live += 1
            slots += capacity[r]
            speed += rank_speed[r]
            fastest = max(fastest, rank_speed[r])
    slots = min(slots, experts * live)
    for layer in range(layers):
        total = known = 0.0
        for t in range(windows):
            whole = 0.0
            for e in range(experts):
                whole += load[t, layer, e]
            if whole <= 0.0 or weights[t] <= 0.0:
                continue
            mean = whole / speed
            known += weights[t]
            for e in range(experts):
                tokens[e] = load[t, layer, e]
            if _shares_fit(mean * fastest, experts, live, slots, tokens):
                total += weights[t]
            else:
                sort_by_load(experts, scratch)
                sort_by_share(experts, count_replicas(experts, slots, live, scratch), scratch)
                total += weights[t] * min(1.0, mean / max(mean, scratch.reals[ITEM_SHARE, 0] / fastest * _SURE))
        out[layer] = total / known if known > 0.0 else np.nan


@kernel
def _shares_fit(top: float, experts: int, most: int, slots: int, tokens: FloatArray) -> bool:
    """Can counts be found with no share above `top`? Cheaper than finding them, and the usual case."""
    need = 0
    for e in range(experts):
        replicas = max(int(np.ceil(tokens[e] / top)), 1)
        if replicas > most:
            return False
        need += replicas
    return need <= slots
