"""How many nodes tokens reach: counted from their ids, predicted from pairs, and what no layout goes below."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eplb_core._arrays import ArrayLike, FloatArray, IntArray, check_kind, read_only, to_ids
from eplb_core._numba import kernel
from eplb_core.layout import ExpertLayout
from eplb_core.load import count_topk
from eplb_core.metrics import check_shares
from eplb_core.placement.affinity.anneal import _random
from eplb_core.placement.affinity.pairs import Pairs
from eplb_core.topology import Topology

MOST_NEAR_NODES = 8
"""Nodes whose sets are looked at one by one, as dispatch mode "near" does."""
# Tokens that are made for a prediction: the mean over them is within .03 sends of the mean over all.
_MADE = 512


@dataclass(frozen=True, slots=True, eq=False)
class Sends:
    """What tokens reach, means of each layer, float64 `[L]`; NaN for a layer without tokens."""

    nodes: FloatArray
    """Nodes that a token reaches, its own included where that computes any of its experts."""
    sends: FloatArray
    """Nodes besides its own."""


def count_sends(layout: ExpertLayout, topk_ids: ArrayLike, *, shares: ArrayLike | None = None) -> Sends:
    """How many nodes does a token reach, by dispatch mode "near" or by shares?

    Tokens come from all ranks that have slots filled, in equal parts.

    Args:
        layout: Where the experts are.
        topk_ids: Logical ids, signed ints `[tokens, L, K]`, or `[tokens, K]` for one layer; -1 = none.
        shares: Share of its expert's tokens that each slot takes, `[L, P]`, as `replica_shares` gives: a token's
            replicas are then chosen by chance. Default: by dispatch mode "near", its own node first, then a least set
            of others.

    Returns:
        Nodes and sends per token. For "near" NaN on more than 8 nodes, which it does not take.

    Raises:
        IndexError: An id is below -1 or not below E.
        TypeError: The dtype is unsigned, or too narrow for both -1 and E - 1.
        ValueError: Ids of other layers than the layout's, or shares that are none.

    Cost:
        O(tokens * L * K * N) with shares, O(tokens * L * K * 2^N) at most without: some 3 us for a token and layer on 8
        nodes; any thread.

    Example:
        >>> topology = Topology(num_ranks=2, num_nodes=2)
        >>> layout = ExpertLayout([[0, 1, 2, 0]], num_experts=3, topology=topology)
        >>> count_sends(layout, [[0, 1], [1, 2]]).sends.tolist()
        [0.75]
    """
    check_kind(layout, "layout", ExpertLayout)
    count_topk(topk_ids, layout.num_experts)  # checks every id
    ids = to_ids(topk_ids, "topk_ids")
    ids = ids[:, None, :] if ids.ndim == 2 else ids
    if ids.shape[1] != layout.num_layers:
        raise ValueError(f"`topk_ids` (of {ids.shape[1]} layers) must have the layout's {layout.num_layers}")
    share = None if shares is None else check_shares(shares, layout)
    found = np.full((2, layout.num_layers), np.nan)
    for layer in range(layout.num_layers):
        row = layout.physical_to_logical_map[layer]
        tokens = np.ascontiguousarray(ids[:, layer])
        tokens = tokens[(tokens >= 0).any(axis=1)]
        if len(tokens):
            found[:, layer] = _of_tokens(row, layout.topology, layout.num_experts, tokens, share, layer)
    return Sends(read_only(found[0]), read_only(found[1]))


def _of_tokens(
    row: IntArray, topology: Topology, experts: int, tokens: IntArray, shares: FloatArray | None, layer: int
) -> tuple[float, float]:
    nodes, used = topology.num_nodes, np.flatnonzero(row >= 0)
    rank = used // (row.size // topology.num_ranks)
    node = topology.rank_to_node[rank]
    source = np.bincount(topology.rank_to_node[np.unique(rank)], minlength=nodes) / np.unique(rank).size
    part = np.zeros((experts, nodes))
    np.add.at(part, (row[used], node), 1.0 if shares is None else shares[layer, used])
    if shares is not None:
        return _count_by_chance(tokens, part, source)
    if nodes > MOST_NEAR_NODES:
        return np.nan, np.nan
    masks = (part > 0.0) @ (1 << np.arange(nodes))
    size = (np.arange(1 << nodes)[:, None] >> np.arange(nodes) & 1).sum(axis=1)
    return _count_near(tokens, masks, source, np.argsort(size, kind="stable"), size)


@kernel
def _count_by_chance(ids: IntArray, part: FloatArray, source: FloatArray) -> tuple[float, float]:
    tokens, width = ids.shape
    reached = sends = 0.0
    for token in range(tokens):
        for node in range(source.size):
            none = 1.0
            for k in range(width):
                if ids[token, k] >= 0:
                    none *= 1.0 - part[ids[token, k], node]
            reached += 1.0 - none
            sends += (1.0 - none) * (1.0 - source[node])
    return reached / tokens, sends / tokens


@kernel
def _count_near(
    ids: IntArray, masks: IntArray, source: FloatArray, sets: IntArray, sizes: IntArray
) -> tuple[float, float]:
    """A token's least sets are one node larger than its sends from a node that is in one of them, else as large."""
    tokens, width = ids.shape
    nodes = source.size
    reached = sends = 0.0
    for token in range(tokens):
        least, best, some = nodes + 1, 0, 0
        for k in range(width):
            if ids[token, k] >= 0:
                some |= masks[ids[token, k]]
        for chosen in sets:  # small ones first
            if sizes[chosen] > least:
                break
            holds, k = True, 0
            while holds and k < width:
                holds = ids[token, k] < 0 or masks[ids[token, k]] & chosen != 0
                k += 1
            if holds:
                best |= chosen
                least = sizes[chosen]
        others = float(least)
        for node in range(nodes):
            others -= source[node] * (best >> node & 1)
            reached += source[node] * (some >> node & 1)
        sends += others
        reached += others
    return reached / tokens, sends / tokens


def predict_sends(layout: ExpertLayout, pairs: Pairs) -> Sends:
    """What `count_sends` will say of tokens that use experts together as `pairs` say; NaN where these do not say it.

    For each layer 512 tokens are made: the first expert by its use, the second by pairs, each further one also by how
    much more often than by chance it is used with those chosen, to the power of 1/2.
    """
    topology, experts = layout.topology, layout.num_experts
    found = np.full((2, layout.num_layers), np.nan)
    for layer in range(layout.num_layers):
        row, width = layout.physical_to_logical_map[layer], pairs.width(layer)
        if topology.num_nodes == 1:
            found[:, layer] = 1.0, 0.0
        elif width and topology.num_nodes <= MOST_NEAR_NODES:
            tokens = np.full((_MADE, width), -1, dtype=np.int64)
            _make_tokens(pairs.use[layer] * pairs.unit[layer], pairs.tokens[layer], np.zeros((experts, experts)),
                         np.zeros(experts), tokens)  # fmt: skip
            found[:, layer] = _of_tokens(row, topology, experts, tokens, None, layer)
    return Sends(read_only(found[0]), read_only(found[1]))


@kernel
def _make_tokens(pairs: FloatArray, used: FloatArray, lift: FloatArray, weight: FloatArray, ids: IntArray) -> None:
    """Fill `ids` `[tokens, K]`; pairs are shrunk towards chance, as one more pair for each that chance expects."""
    tokens, width = ids.shape
    experts = used.size
    total = whole = 0.0
    for e in range(experts):
        total += used[e]
        for f in range(experts):
            whole += pairs[e, f]
    for e in range(experts):
        for f in range(experts):
            chance = whole * (used[e] / total) * (used[f] / total)
            lift[e, f] = np.sqrt((pairs[e, f] + 1.0) / (chance + 1.0)) if e != f else 0.0
    for token in range(tokens):
        draw = token * width
        point = total * (token + _random(draw) / 2.0**32) / tokens
        ids[token, 0] = _pick(used, point)
        for f in range(experts):
            weight[f] = used[f] * lift[ids[token, 0], f]
        for k in range(1, width):
            first = ids[token, k - 1]
            left = 0.0
            for f in range(experts):
                weight[f] *= lift[first, f]
                left += weight[f]
            if left <= 0.0:
                break
            ids[token, k] = _pick(weight, left * _random(draw + k) / 2.0**32)


@kernel
def _pick(weight: FloatArray, point: float) -> int:
    """The entry at a point of the sum, never one of weight 0."""
    chosen = 0
    for e in range(weight.size):
        if weight[e] > 0.0:
            chosen = e
            if point < weight[e]:
                break
            point -= weight[e]
    return chosen


def bound_sends(topology: Topology, capacity: IntArray, pairs: Pairs) -> FloatArray:
    """Sends per token that no layout of these slots goes below, `[L]`, for tokens of equally many experts; else NaN.

    A token sends nothing only where its node holds all its experts, and with them all its pairs. A node of C slots
    holds at most the pairs that C experts have with their C - 1 most frequent ones.
    """
    layers, experts, _ = pairs.use.shape
    node, active = topology.rank_to_node, capacity > 0
    bound = np.full(layers, np.nan)
    for layer in np.flatnonzero(pairs.use.any(axis=(1, 2))).tolist():
        if pairs.tokens[layer].any() and not pairs.width(layer):
            continue
        most = -np.sort(-pairs.use[layer], axis=1)
        bound[layer] = 0.0
        for own in np.unique(node[active]).tolist():
            slots = min(int(capacity[node == own].sum()), experts)
            inside = np.sort(most[:, : slots - 1].sum(axis=1))[experts - slots :].sum()
            outside = max(1.0 - float(inside) / float(most.sum()), 0.0)
            bound[layer] += outside * (active & (node == own)).sum() / active.sum()
    return read_only(bound)
