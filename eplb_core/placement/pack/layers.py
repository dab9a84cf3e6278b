"""Placement of one window, layer by layer: blocks, their certificate, and the map that comes out."""

from __future__ import annotations

import numpy as np

from eplb_core._arrays import BoolArray, FloatArray, IntArray
from eplb_core._numba import kernel
from eplb_core.placement.pack.block import (
    EXPERT,
    EXPERT_LOAD,
    HOME,
    NODE,
    NONE,
    ORDER,
    PACE,
    SPEED,
    WORK,
    Scratch,
    count_replicas,
    pack,
    pack_anywhere,
    sort_by_load,
    sort_by_share,
)
from eplb_core.placement.pack.groups import assign_groups
from eplb_core.placement.pack.search import lower_limit, search
from eplb_core.placement.pack.unlike import solve_unlike
from eplb_core.placement.problem import Problem


def ranks_alike(problem: Problem) -> bool:
    """Are all live ranks as fast as each other, with numbers of slots that differ by one at most?"""
    live = problem.capacity > 0
    speed, slots = problem.topology.rank_speed[live], problem.capacity[live]
    return bool((speed == speed[0]).all() and slots.max() - slots.min() <= 1)


def solve_layers(
    problem: Problem,
    expert_load: FloatArray,
    skip: BoolArray,
    effort: float,
    scratch: Scratch,
    p2l: IntArray,
    limit: FloatArray,
) -> None:
    """Place every layer that is not skipped.

    Args:
        problem: What the layers must satisfy.
        expert_load: Load of one window `[L, E]`, each layer with some.
        skip: Layers to leave alone `[L]`.
        effort: Multiplies the work and divides the tolerance.
        scratch: For E experts and R ranks.
        p2l: Written `[L, R * S]`.
        limit: Written `[L]`: no layout of this kind has a largest load / speed below this.
    """
    capacity, pin, num_groups = problem.capacity, problem.pin, problem.num_groups
    rank_speed, rank_to_node = problem.topology.rank_speed, problem.topology.rank_to_node
    live = np.flatnonzero(capacity)
    speed = rank_speed[live]
    if pin or not ranks_alike(problem):
        _solve_pinned(
            expert_load, skip, capacity, rank_speed, rank_to_node, num_groups, pin, effort, scratch, p2l, limit
        )
        return
    # The plain case has a kernel of its own: it compiles in half the time.
    scratch.reals[SPEED, : live.size], scratch.reals[PACE, : live.size] = speed, 1.0 / speed
    scratch.ints[NODE, : live.size] = rank_to_node[live]
    scratch.ints[HOME] = -1
    ids = np.arange(expert_load.shape[1])
    _solve_plain(expert_load, skip, ids, live, capacity[live], problem.stride, effort, scratch, p2l, limit)


@kernel
def _solve_plain(
    expert_load: FloatArray,
    skip: BoolArray,
    ids: IntArray,
    live: IntArray,
    cap: IntArray,
    stride: int,
    effort: float,
    scratch: Scratch,
    p2l: IntArray,
    limit: FloatArray,
) -> None:
    """Place layers of experts that may be anywhere on ranks `live` of equal speed, with `cap` slots each."""
    layers, experts = expert_load.shape
    scratch.ints[WORK, 3], scratch.ints[WORK, NONE] = 0, -1
    for layer in range(layers):
        if skip[layer]:
            continue
        for e in range(experts):
            scratch.reals[EXPERT_LOAD, e] = expert_load[layer, e]
        filled, limit[layer] = _count_block(experts, cap, True, stride, scratch)
        if not filled:
            pack(experts, cap, stride, scratch)
            search(experts, cap, stride, stride, effort, limit[layer], scratch)
        _write_block(layer, ids, live, stride, cap.size, scratch, p2l)


@kernel
def _solve_pinned(
    expert_load: FloatArray,
    skip: BoolArray,
    capacity: IntArray,
    rank_speed: FloatArray,
    rank_to_node: IntArray,
    num_groups: int,
    pin: int,
    effort: float,
    scratch: Scratch,
    p2l: IntArray,
    limit: FloatArray,
) -> None:
    """Place layers whose groups of experts have a node each, or whose ranks differ in speed or number of slots."""
    layers, experts = expert_load.shape
    ranks = capacity.size
    stride = p2l.shape[1] // ranks
    nodes = rank_to_node.max() + 1
    group_load = np.zeros(num_groups)
    group_home = np.zeros(num_groups, dtype=np.int64)
    group_size = experts // num_groups
    node_room = np.zeros(nodes, dtype=np.int64)
    node_speed = np.zeros(nodes)
    ids = np.zeros(experts, dtype=np.int64)
    members = np.zeros(ranks, dtype=np.int64)
    cap, level = np.zeros(ranks, dtype=np.int64), np.zeros(ranks, dtype=np.int64)
    for r in range(ranks):
        node_room[rank_to_node[r]] += capacity[r]
        if capacity[r] > 0:
            node_speed[rank_to_node[r]] += rank_speed[r]
    for layer in range(layers):
        if skip[layer]:
            continue
        load = expert_load[layer]
        limit[layer] = 0.0
        if pin > 0:
            group_load[:] = 0.0
            for e in range(experts):
                group_load[e // group_size] += load[e]
            proven = assign_groups(group_load, node_room // group_size, node_speed, group_home)
            if pin == 2:
                limit[layer] = proven
        for block in range(nodes if pin == 2 else 1):
            only = block if pin == 2 else -1
            size = _take_ranks(only, capacity, rank_speed, rank_to_node, members, cap, scratch)
            n = _take_experts(only, pin == 1, load, group_home, group_size, ids, scratch)
            if n == 0 or size == 0:
                continue
            lower = _solve_block(n, cap[:size], level[:size], stride, pin == 1, effort, scratch)
            if pin != 2:
                limit[layer] = max(limit[layer], lower)
            _write_block(layer, ids, members, stride, size, scratch, p2l)
        if pin == 2:
            limit[layer] = max(limit[layer], _whole_limit(load, capacity, rank_speed, scratch))


@kernel
def _write_block(
    layer: int, ids: IntArray, members: IntArray, stride: int, size: int, scratch: Scratch, p2l: IntArray
) -> None:
    expert, none = scratch.ints[EXPERT], scratch.ints[WORK, NONE]
    for i in range(size):
        place = members[i] * stride
        for s in range(stride):
            p2l[layer, place + s] = -1
        for s in range(i * stride, i * stride + stride):
            if expert[s] >= 0 and expert[s] != none:  # empty slots come last
                p2l[layer, place] = ids[expert[s]]
                place += 1


@kernel
def _take_ranks(
    node: int,
    capacity: IntArray,
    rank_speed: FloatArray,
    rank_to_node: IntArray,
    members: IntArray,
    cap: IntArray,
    scratch: Scratch,
) -> int:
    """Make a block of the live ranks of one node, or of all for -1; returns how many there are."""
    speed, pace, its_node = scratch.reals[SPEED], scratch.reals[PACE], scratch.ints[NODE]
    size = 0
    for r in range(capacity.size):
        if capacity[r] > 0 and (node < 0 or node == rank_to_node[r]):
            members[size] = r
            cap[size] = capacity[r]
            speed[size] = rank_speed[r]
            pace[size] = 1.0 / rank_speed[r]
            its_node[size] = rank_to_node[r]
            size += 1
    return size


@kernel
def _take_experts(
    node: int, pinned: bool, load: FloatArray, group_home: IntArray, group_size: int, ids: IntArray, scratch: Scratch
) -> int:
    """Make a block of the experts whose group is in one node, or of all for -1; returns how many there are."""
    tokens, home = scratch.reals[EXPERT_LOAD], scratch.ints[HOME]
    n = 0
    for e in range(load.size):
        if node < 0 or node == group_home[e // group_size]:
            ids[n] = e
            tokens[n] = load[e]
            home[n] = group_home[e // group_size] if pinned else -1
            n += 1
    return n


@kernel
def _solve_block(
    n: int, cap: IntArray, level: IntArray, stride: int, pinned: bool, effort: float, scratch: Scratch
) -> float:
    """Place one block into EXPERT; returns the certified lower limit of its largest time."""
    speed, work = scratch.reals[SPEED], scratch.ints[WORK]
    least, most, as_fast = cap[0], cap[0], True
    for r in range(cap.size):
        least, most = min(least, cap[r]), max(most, cap[r])
        as_fast = as_fast and speed[r] == speed[0]
    alike = as_fast and most - least <= 1
    work[3], work[NONE] = pinned, -1 if alike else n
    filled, lower = _count_block(n, cap, as_fast, stride, scratch)
    if filled:
        return lower
    if not alike and not pinned:
        solve_unlike(n, cap, level, stride, effort, scratch)
        return lower
    if pinned:
        pack_anywhere(n, cap, stride, scratch)
    else:
        pack(n, cap, stride, scratch)
    search(n, cap, stride, stride, effort, lower, scratch)
    return lower


@kernel
def _count_block(n: int, cap: IntArray, as_fast: bool, stride: int, scratch: Scratch) -> tuple[bool, float]:
    """Count replicas, for no more slots of a rank than experts; returns whether all are placed, and the lower limit.

    All are placed where every rank, each as fast as the others, holds all.
    """
    least = cap[0]
    for r in range(cap.size):
        least = min(least, cap[r])
    sort_by_load(n, scratch)
    if least >= n and as_fast:
        _fill_every_rank(n, cap, least, stride, scratch)
        return True, lower_limit(n, n * cap.size, cap, scratch)
    slots = 0
    for r in range(cap.size):
        cap[r] = min(cap[r], n)  # more would hold an expert twice
        slots += cap[r]
    sort_by_share(n, count_replicas(n, slots, cap.size, scratch), scratch)
    return False, lower_limit(n, slots, cap, scratch)


@kernel
def _whole_limit(load: FloatArray, capacity: IntArray, rank_speed: FloatArray, scratch: Scratch) -> float:
    """The limit of the layer without groups: it holds with them too."""
    speed, tokens = scratch.reals[SPEED], scratch.reals[EXPERT_LOAD]
    live = np.flatnonzero(capacity)
    for i in range(live.size):
        speed[i] = rank_speed[live[i]]
    for e in range(load.size):
        tokens[e] = load[e]
    slots = min(capacity.sum(), load.size * live.size)
    sort_by_load(load.size, scratch)
    sort_by_share(load.size, count_replicas(load.size, slots, live.size, scratch), scratch)
    return lower_limit(load.size, slots, live, scratch)  # of the ranks, only their number is asked


@kernel
def _fill_every_rank(n: int, cap: IntArray, least: int, stride: int, scratch: Scratch) -> None:
    """Where every rank has room for all experts, each holds the same: even shares then make the ranks equal.

    Counting forces repeats on a rank here; a slot that only some ranks have stays empty: filling it would not help.
    """
    expert, order = scratch.ints[EXPERT], scratch.ints[ORDER]
    for r in range(cap.size):
        for s in range(stride):
            expert[r * stride + s] = order[s % n] if s < least else -1
