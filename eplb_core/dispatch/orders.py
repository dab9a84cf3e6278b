"""Solve for the orders of nodes by which mode "near" of dispatch keeps ranks even."""

from __future__ import annotations

import numpy as np

from eplb_core._arrays import ArrayLike, FloatArray, IntArray, check_kind, read_only, to_ids
from eplb_core._numba import kernel
from eplb_core.dispatch.constants import MOST_NEAR_NODES, ORDERS
from eplb_core.layout import ExpertLayout
from eplb_core.load import count_topk
from eplb_core.metrics import check_load_of, check_shares, even_shares

FIT = 30
"""Iterations by which tokens are weighed so that their experts have the load."""
SWEEPS = 8
"""Most times that all orders are chosen anew; two to four are enough for real tokens."""


def near_orders(
    layout: ExpertLayout,
    topk_ids: ArrayLike,
    expert_load: ArrayLike | None = None,
    *,
    shares: ArrayLike | None = None,
) -> IntArray:
    """Solve for orders of nodes with which `DispatchTables(mode="near")` keeps ranks even, at no further send.

    Of equally small sets of nodes a token takes the first by its order, and a token's row chooses one of its node's 64
    orders. The tokens given are dispatched from every node in every order; then the orders are chosen one after another
    so that the sum of squared rank loads over rank speeds is least, until none changes. Which order is best depends on
    what lies on the ranks: solve again with each new layout.

    Args:
        layout: Where the experts are, on up to 8 nodes; `topology.rank_speed` counts.
        topk_ids: Logical ids of tokens, signed ints `[tokens, L, K]`, -1 = none (`TokenTrace.topk_ids`). 2,048 tokens
            spread over the time are nearly as good as more. Each rank may give tokens of its own.
        expert_load: Load that the tokens stand for, `[L, E]` or windows `[T, L, E]`: they are weighed to have it.
            Default: theirs.
        shares: Shares of the slots, `[L, P]`, that the tables get too. Default: equal ones.

    Returns:
        int64 `[L, N, 64]`, by source node: 2 * n numbers nodes from n on and prefers the lowest numbers, 2 * n + 1 the
        highest (docs/dispatch.md). Without tokens, every order as often.

    Raises:
        IndexError: An id is below -1 or not below E.
        TypeError: The ids' dtype is unsigned, or too narrow for both -1 and E - 1.
        ValueError: More than 8 nodes; shapes that do not fit; a load that is NaN, infinite or negative.

    Cost:
        O(tokens * N * (2^N + N * K)) per layer at most: about 10 ms a layer for 2,048 tokens on 4 nodes, 60 on 8. Any
        thread.

    Example:
        Tokens of node 0 find expert 1 on nodes 1 and 2, whose own tokens stay there. Rank 2 is twice as fast: 63 of
        node 0's orders lead to it, those that prefer high numbers (1, 3) and that which numbers nodes from 2 on (4).

        >>> from eplb_core import Topology
        >>> topology = Topology(num_ranks=3, num_nodes=3, rank_speed=[1, 1, 2])
        >>> layout = ExpertLayout([[0, 1, 1]], num_experts=2, topology=topology)
        >>> orders = near_orders(layout, [[[1]]] * 100)
        >>> np.bincount(orders[0, 0], minlength=6).tolist()
        [1, 21, 0, 21, 21, 0]
    """
    topology = check_kind(layout, "layout", ExpertLayout).topology
    layers, experts, nodes = layout.num_layers, layout.num_experts, topology.num_nodes
    if nodes > MOST_NEAR_NODES:
        raise ValueError(f"`layout` (num_nodes={nodes}) must have at most {MOST_NEAR_NODES} nodes")
    count_topk(topk_ids, experts)  # checks every id
    ids = to_ids(topk_ids, "topk_ids")
    if ids.ndim != 3 or ids.shape[1] != layers:
        raise ValueError(f"`topk_ids` (shape {list(ids.shape)}) must be [tokens, {layers}, K], all layers of `layout`")
    load = np.zeros((layers, experts)) if expert_load is None else check_load_of(layout, expert_load)
    load = load / max(float(load.max(initial=0.0)), np.finfo(float).tiny)  # so that sums stay finite
    load = read_only(load.sum(axis=0) if load.ndim == 3 else load)
    fractions = even_shares(layout) if shares is None else check_shares(shares, layout)
    orders = np.empty((layers, nodes, ORDERS), dtype=np.int64)
    orders[:] = even_orders(nodes)
    owner = np.arange(layout.num_slots) // layout.slots_per_rank
    by_rank, options = topology.rank_to_node, 2 * nodes
    size = max(ids.shape[2], 1 << nodes, experts)
    scratch = np.empty((3, size), dtype=np.int64)
    flows = np.empty((nodes, options, topology.num_ranks))
    for layer in range(layers if ids.size else 0):
        tokens = read_only(np.ascontiguousarray(ids[:, layer], dtype=np.int64))
        weights = np.ones(len(tokens))
        _weigh(tokens, load[layer], np.empty((2, experts)), weights)
        row, part = layout.physical_to_logical_map[layer], _parts_in_nodes(layout, layer, fractions[layer])
        _flow(tokens, weights, row, owner, by_rank, part, scratch, flows)
        _choose(flows, topology.rank_speed, 1.0 / len(tokens), orders[layer])
    return orders


def even_orders(num_nodes: int) -> IntArray:
    """Every order as often, `[64]`; equal ones follow each other, since rows are spread most evenly over ranges."""
    number = 2 * max(1, num_nodes)
    orders: IntArray = np.arange(ORDERS, dtype=np.int64) * number // ORDERS
    return orders


def _parts_in_nodes(layout: ExpertLayout, layer: int, shares: FloatArray) -> FloatArray:
    """Part `[P]` of its expert's tokens in its node that each slot takes; equal where none of them has a share."""
    row, topology = layout.physical_to_logical_map[layer], layout.topology
    live, node = row >= 0, topology.rank_to_node[np.arange(len(row)) // layout.slots_per_rank]
    place = (node * layout.num_experts + row)[live]  # of the expert in the node
    parts, size = np.zeros(len(row)), topology.num_nodes * layout.num_experts
    whole, number = np.bincount(place, shares[live], size)[place], np.bincount(place, minlength=size)[place]
    parts[live] = np.where(whole > 0.0, shares[live], 1.0) / np.where(whole > 0.0, whole, number)
    return read_only(parts)


@kernel
def _weigh(tokens: IntArray, load: FloatArray, sums: FloatArray, weights: FloatArray) -> None:
    """Weigh tokens so that their experts have the load; each step brings them nearer (Richardson and Lucy's)."""
    number, width = tokens.shape
    has, ratio = sums
    whole, seen = 0.0, 0.0
    for _ in range(FIT):
        has[:] = 0.0
        for t in range(number):
            for k in range(width):
                if tokens[t, k] >= 0:
                    has[tokens[t, k]] += weights[t]
        whole, seen = 0.0, 0.0
        for e in range(load.size):
            if has[e] > 0.0:
                whole += load[e]
                seen += has[e]
        if not whole > 0.0:
            return
        for e in range(load.size):
            ratio[e] = load[e] / whole / (has[e] / seen) if has[e] > 0.0 else 0.0
        for t in range(number):
            factor, real = 0.0, 0
            for k in range(width):
                if tokens[t, k] >= 0:
                    factor += ratio[tokens[t, k]]
                    real += 1
            if real:
                weights[t] *= factor / real


@kernel
def _flow(
    tokens: IntArray,
    weights: FloatArray,
    row: IntArray,
    owner: IntArray,
    node: IntArray,
    part: FloatArray,
    scratch: IntArray,
    flows: FloatArray,
) -> None:
    """Load of each rank by the tokens of each node in each order, `flows[N, 2 * N, R]`; each rank sends as many."""
    num_nodes, options, num_ranks = flows.shape
    masks, far, equal = scratch[0], scratch[1], scratch[2]
    all_nodes = (1 << num_nodes) - 1
    flows[:] = 0.0
    masks[:] = 0
    # Slots of an expert in a node, as a list.
    first = np.full((num_nodes, masks.size), -1, np.int64)
    following = np.full(row.size, -1, np.int64)
    for slot in range(row.size):
        if row[slot] >= 0:
            masks[row[slot]] |= 1 << node[owner[slot]]
            following[slot] = first[node[owner[slot]], row[slot]]
            first[node[owner[slot]], row[slot]] = slot
    for source in range(num_nodes):
        ranks = 0
        for rank in range(num_ranks):
            ranks += node[rank] == source
        for t in range(tokens.shape[0]):
            weight, number = weights[t] * ranks / num_ranks, 0
            for k in range(tokens.shape[1]):
                expert = tokens[t, k]
                if expert >= 0 and not masks[expert] >> source & 1:
                    far[number] = masks[expert]
                    number += 1
            least, found = num_nodes + 1, 0
            for nodes in range(all_nodes + 1):
                members, rest = 0, nodes
                while rest:
                    rest &= rest - 1
                    members += 1
                if members > least:
                    continue
                fits = True
                for k in range(number):
                    if not far[k] & nodes:
                        fits = False
                        break
                if fits:
                    if members < least:
                        least, found = members, 0
                    equal[found] = nodes
                    found += 1
            for option in range(options):
                begin, last = option // 2, option % 2
                turn, best = num_nodes - begin, -1
                for i in range(found):
                    turned = (equal[i] << turn | equal[i] >> begin) & all_nodes
                    if best < 0 or (turned > best if last else turned < best):
                        best = turned
                for k in range(tokens.shape[1]):
                    expert = tokens[t, k]
                    if expert < 0:
                        continue
                    there = source
                    if not masks[expert] >> source & 1:
                        held = (masks[expert] << turn | masks[expert] >> begin) & best
                        place = num_nodes - 1 if last else 0
                        while not held >> place & 1:
                            place += -1 if last else 1
                        there = (place + begin) % num_nodes
                    slot = first[there, expert]
                    while slot >= 0:
                        flows[source, option, owner[slot]] += weight * part[slot]
                        slot = following[slot]


@kernel
def _choose(flows: FloatArray, speed: FloatArray, price: float, orders: IntArray) -> None:
    """Choose each order anew while the others stand; `price` is what it costs to take one often, for few tokens err."""
    num_nodes, options, num_ranks = flows.shape
    load, often = np.zeros(num_ranks), np.zeros((num_nodes, options), np.int64)
    for source in range(num_nodes):
        for i in range(ORDERS):
            often[source, orders[source, i]] += 1
            for rank in range(num_ranks):
                load[rank] += flows[source, orders[source, i], rank] / ORDERS
    whole, fast = 0.0, 0.0
    for rank in range(num_ranks):
        whole += load[rank]
        fast += speed[rank]
    if whole == 0.0:
        return
    price = price * whole * whole / fast * options / num_nodes / ORDERS / ORDERS
    for _ in range(SWEEPS):
        changed = False
        for i in range(ORDERS):
            for source in range(num_nodes):
                was = orders[source, i]
                often[source, was] -= 1
                for rank in range(num_ranks):
                    load[rank] -= flows[source, was, rank] / ORDERS
                best, least = was, np.inf
                for option in range(options):
                    cost = price * (2 * often[source, option] + 1)
                    for rank in range(num_ranks):
                        reached = load[rank] + flows[source, option, rank] / ORDERS
                        cost += reached * reached / speed[rank]
                    if cost < least:
                        best, least = option, cost
                orders[source, i] = best
                often[source, best] += 1
                changed = changed or best != was
                for rank in range(num_ranks):
                    load[rank] += flows[source, best, rank] / ORDERS
        if not changed:
            break
    for source in range(num_nodes):
        i = 0
        for option in range(options):
            for _ in range(often[source, option]):
                orders[source, i] = option
                i += 1
