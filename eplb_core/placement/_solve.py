"""Placement of one window, layer by layer: blocks, their certificate, and the map that comes out."""

from __future__ import annotations

import numpy as np

from eplb_core._arrays import BoolArray, FloatArray, IntArray
from eplb_core._numba import kernel
from eplb_core.placement._groups import assign_groups
from eplb_core.placement._kernels import (
    Scratch,
    count_replicas,
    pack,
    pack_anywhere,
    sort_by_load,
    sort_by_share,
)
from eplb_core.placement._refine import refine

# At effort 1 the search stops when the fullest rank is this far above the certificate.
TOLERANCE = 0.00098


@kernel
def solve_layers(
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
    """Place every layer that is not skipped.

    Args:
        expert_load: Load of one window `[L, E]`, each layer with some.
        skip: Layers to leave alone `[L]`.
        capacity: Live slots of each rank `[R]`, 0 for a rank that is not active; all others differ by one at most.
        rank_speed: `[R]`.
        rank_to_node: `[R]`.
        num_groups: Groups of consecutive experts; used where `pin` is not 0.
        pin: 0 = experts may be anywhere, 1 = one replica in the node of the group, 2 = all of them.
        effort: Multiplies the work and divides the tolerance.
        scratch: For E experts and R ranks.
        p2l: Written `[L, R * S]`.
        limit: Written `[L]`: no layout of this kind has a largest load / speed below this.
    """
    layers, experts = expert_load.shape
    ranks = capacity.size
    stride = p2l.shape[1] // ranks
    nodes = rank_to_node.max() + 1
    group_load = np.zeros(num_groups)
    group_home = np.zeros(num_groups, dtype=np.int64)
    group_size = experts // num_groups
    node_room = np.zeros(nodes, dtype=np.int64)
    node_speed = np.zeros(nodes)
    # Arrays are taken out of the tuple before loops: each access to one counts a reference in and out.
    weight, home, speed, node, expert = scratch.weight, scratch.home, scratch.speed, scratch.node, scratch.expert
    ids = np.arange(experts)
    members = np.arange(ranks)
    cap = np.zeros(ranks, dtype=np.int64)
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
            size = 0
            for r in range(ranks):
                if capacity[r] > 0 and (pin != 2 or rank_to_node[r] == block):
                    members[size] = r
                    cap[size] = capacity[r]
                    speed[size] = rank_speed[r]
                    scratch.pace[size] = 1.0 / rank_speed[r]
                    node[size] = rank_to_node[r]
                    size += 1
            n = 0
            for e in range(experts):
                if pin != 2 or group_home[e // group_size] == block:
                    ids[n] = e
                    weight[n] = load[e]
                    home[n] = group_home[e // group_size] if pin == 1 else -1
                    n += 1
            if n == 0 or size == 0:
                continue
            lower = _solve_block(n, cap[:size], stride, effort, scratch)
            if pin != 2:
                limit[layer] = max(limit[layer], lower)
            for i in range(size):
                for s in range(stride):
                    e = expert[i * stride + s]
                    p2l[layer, members[i] * stride + s] = ids[e] if e >= 0 else -1
        if pin == 2:
            limit[layer] = max(limit[layer], _whole_limit(load, capacity, rank_speed, scratch))


@kernel
def _solve_block(n: int, cap: IntArray, stride: int, effort: float, scratch: Scratch) -> float:
    """Place one block into `scratch.expert`; returns the certified lower limit of its largest time."""
    speed, home, work = scratch.speed, scratch.home, scratch.work
    ranks = cap.size
    slots = 0
    least = cap[0]
    plain = True
    for r in range(ranks):
        slots += cap[r]
        least = min(least, cap[r])
        plain = plain and speed[r] == speed[0]
    for e in range(n):
        plain = plain and home[e] < 0
    sort_by_load(n, scratch)
    if least >= n:
        _fill_every_rank(n, cap, least, stride, scratch)
        return _lower_limit(n, n * ranks, cap, scratch)
    replicated = count_replicas(n, slots, ranks, scratch)
    sort_by_share(n, replicated, scratch)
    lower = _lower_limit(n, slots, cap, scratch)
    if plain:
        pack(n, cap, stride, scratch)
    else:
        pack_anywhere(n, cap, stride, scratch)
    work[0] = 0
    work[1] = np.int64(effort * (96 + ranks))
    work[2] = 1
    # Coarse first: a wide target is soon met. The way there is the same for every effort; more effort only goes further.
    tolerance = TOLERANCE / max(effort, 1.0)
    aim = 2.0 * TOLERANCE
    while refine(n, cap, stride, lower * (1.0 + aim), ranks, scratch) <= lower * (1.0 + aim) and aim > tolerance:
        aim = max(0.5 * aim, tolerance)
    return lower


@kernel
def _lower_limit(n: int, slots: int, cap: IntArray, scratch: Scratch) -> float:
    """No layout of the block has a smaller largest load / speed.

    Some rank is no faster than the mean: total load / total speed. And some rank holds the largest share, which is at
    least what the divisor method leaves, the smallest possible; it is no faster than the fastest rank.
    """
    weight, speed = scratch.weight, scratch.speed
    total = whole = fastest = 0.0
    for e in range(n):
        total += weight[e]
    for r in range(cap.size):
        whole += speed[r]
        fastest = max(fastest, speed[r])
    top = scratch.item_share[0] if slots < n * cap.size else weight[scratch.order[0]] / cap.size
    return max(total / whole, top / fastest)


@kernel
def _whole_limit(load: FloatArray, capacity: IntArray, rank_speed: FloatArray, scratch: Scratch) -> float:
    """The limit of the layer without groups: it holds with them too."""
    speed = scratch.speed
    live = slots = 0
    for r in range(capacity.size):
        if capacity[r] > 0:
            speed[live] = rank_speed[r]
            live += 1
            slots += capacity[r]
    n = load.size
    scratch.weight[:n] = load
    slots = min(slots, n * live)
    sort_by_load(n, scratch)
    sort_by_share(n, count_replicas(n, slots, live, scratch), scratch)
    return _lower_limit(n, slots, capacity[:live], scratch)


@kernel
def _fill_every_rank(n: int, cap: IntArray, least: int, stride: int, scratch: Scratch) -> None:
    """Where every rank has room for all experts, each holds the same: even shares then make the ranks equal.

    Counting forces repeats on a rank here; a slot that only some ranks have stays empty, since filling it would not help.
    """
    expert, order = scratch.expert, scratch.order
    for r in range(cap.size):
        for s in range(stride):
            expert[r * stride + s] = order[s % n] if s < least else -1
