"""Which node gets which group of experts: exact where a small search proves it, good otherwise."""

from __future__ import annotations

import numpy as np

from eplb_core._arrays import FloatArray, IntArray
from eplb_core._numba import kernel

_MOST_VISITS = 200_000


@kernel
def assign_groups(group_load: FloatArray, capacity: IntArray, node_speed: FloatArray, home: IntArray) -> float:
    """Spread groups over nodes so that the largest load / speed of a node is small.

    Groups are taken by descending load, each goes first to the node that it leaves with the least time, and a
    depth-first search over all assignments keeps the best; branches that cannot beat it are cut, and of nodes in the
    same state one is tried.

    Args:
        group_load: Load of each group `[G]`.
        capacity: Groups that each node can take `[N]`; their sum must be at least G.
        node_speed: Speed of each node `[N]`; 0 for a node without a live rank, which has capacity 0.
        home: Written: node of each group, int64 `[G]`.

    Returns:
        A proven lower limit of the largest load / speed of a node: the optimum where the search ended, else 0.
    """
    groups, nodes = group_load.size, capacity.size
    order = np.arange(groups)
    for i in range(1, groups):  # few: by insertion, which is stable and soon compiled
        g = order[i]
        j = i
        while j > 0 and group_load[order[j - 1]] < group_load[g]:
            order[j] = order[j - 1]
            j -= 1
        order[j] = g
    load = np.zeros(nodes)
    left = capacity.copy()
    tried = np.full(groups, -1, dtype=np.int64)
    best = np.inf
    depth = 0
    visits = 0
    # `tried[d]` is how far the nodes for the d-th group have been tried, in order of the time they would reach.
    rank_of = np.empty((groups, nodes), dtype=np.int64)
    at = np.full(groups, -1, dtype=np.int64)
    _order_nodes(group_load[order[0]], load, left, node_speed, rank_of[0])
    while depth >= 0:
        g = order[depth]
        if at[depth] >= 0:
            load[at[depth]] -= group_load[g]
            left[at[depth]] += 1
            at[depth] = -1
            # Taking a load off again rounds; add up anew so that a node's load depends on its groups alone.
            _add_up(order, at, group_load, depth, load)
        tried[depth] += 1
        visits += 1
        if tried[depth] >= nodes or (visits > _MOST_VISITS and best < np.inf):
            tried[depth] = -1
            depth -= 1
            continue
        n = rank_of[depth, tried[depth]]
        if n < 0 or (load[n] + group_load[g]) / node_speed[n] >= best:
            tried[depth] = -1
            depth -= 1
            continue
        load[n] += group_load[g]
        left[n] -= 1
        at[depth] = n
        if depth + 1 == groups:
            worst = 0.0
            for m in range(nodes):
                if load[m] > 0.0:
                    worst = max(worst, load[m] / node_speed[m])
            if worst < best:
                best = worst
                for d in range(groups):
                    home[order[d]] = at[d]
        else:
            depth += 1
            _order_nodes(group_load[order[depth]], load, left, node_speed, rank_of[depth])
    return best if visits <= _MOST_VISITS else 0.0


@kernel
def _add_up(order: IntArray, at: IntArray, group_load: FloatArray, depth: int, load: FloatArray) -> None:
    load[:] = 0.0
    for d in range(depth):
        load[at[d]] += group_load[order[d]]


@kernel
def _order_nodes(value: float, load: FloatArray, left: IntArray, speed: FloatArray, out: IntArray) -> None:
    """Nodes with room by the time that `value` more would give them; one of each state; -1 ends the list."""
    size = 0
    for n in range(load.size):
        if left[n] <= 0:
            continue
        same = False
        for i in range(size):
            m = out[i]
            same = same or (load[m] == load[n] and left[m] == left[n] and speed[m] == speed[n])
        if same:
            continue
        i = size
        time = (load[n] + value) / speed[n]
        while i > 0 and (load[out[i - 1]] + value) / speed[out[i - 1]] > time:
            out[i] = out[i - 1]
            i -= 1
        out[i] = n
        size += 1
    if size < load.size:
        out[size] = -1
