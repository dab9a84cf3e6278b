"""DeepSeek's algorithm for counts that float32 does not hold: the same steps and ties in float64."""

from __future__ import annotations

import numpy as np

from eplb_core._arrays import FloatArray, IntArray


def place_exactly(
    load: FloatArray, slots: int, groups: int, nodes: int, ranks: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Place whole numbers below 2^53, `[L, E]`; as `rebalance_experts`, for numbers that fit one another."""
    layers, experts = load.shape
    order = _by_node(load, groups, nodes).reshape(layers * nodes, experts // nodes)
    tokens = np.take_along_axis(load, order.reshape(layers, experts), axis=1).reshape(order.shape)
    item, replica, count = _replicate(tokens, slots // nodes)
    rank, place = _pack(np.take_along_axis(tokens / count, item, axis=1), ranks // nodes)
    first = np.tile(np.arange(nodes) * (slots // nodes), layers)[:, None]
    slot = (first + rank * (slots // ranks) + place).reshape(layers, slots)
    expert = np.take_along_axis(order, item, axis=1).reshape(layers, slots)
    layer = np.arange(layers)[:, None]
    phy2log, logcnt = np.empty((layers, slots), np.int64), np.empty((layers, experts), np.int64)
    log2phy = np.full((layers, experts, int(count.max(initial=1))), -1, dtype=np.int64)
    phy2log[layer, slot] = expert
    log2phy[layer, expert, replica.reshape(layers, slots)] = slot
    logcnt[layer, order.reshape(layers, experts)] = count.reshape(layers, experts)
    return phy2log, log2phy, logcnt


def _by_node(load: FloatArray, groups: int, nodes: int) -> IntArray:
    """Experts in the order of their nodes `[L, E]`, groups kept together."""
    layers, experts = load.shape
    size = experts // groups
    node, place = _pack(load.reshape(layers, groups, size).sum(axis=2), nodes)
    first = (node * (groups // nodes) + place) * size
    order = np.empty((layers, experts), dtype=np.int64)
    at = (first[:, :, None] + np.arange(size)).reshape(layers, experts)
    order[np.arange(layers)[:, None], at] = np.arange(experts)
    return order


def _replicate(tokens: FloatArray, slots: int) -> tuple[IntArray, IntArray, IntArray]:
    """Give each further slot to the expert with the heaviest replicas; expert and replica `[X, slots]`, counts."""
    rows, experts = np.arange(len(tokens)), tokens.shape[1]
    item, replica = np.zeros((2, len(tokens), slots), dtype=np.int64)
    item[:, :experts], count = np.arange(experts), np.ones(tokens.shape, dtype=np.int64)
    for slot in range(experts, slots):
        hottest = np.argmax(tokens / count, axis=1)
        item[:, slot], replica[:, slot] = hottest, count[rows, hottest]
        count[rows, hottest] += 1
    return item, replica, count


def _pack(weight: FloatArray, packs: int) -> tuple[IntArray, IntArray]:
    """Heaviest first, each to the lightest pack with room: pack of each item and its place there, `[X, items]`."""
    pack_of, place_of = np.zeros((2, *weight.shape), dtype=np.int64)
    capacity = weight.shape[1] // packs
    if capacity == 1:
        pack_of[:] = np.arange(packs)
        return pack_of, place_of
    rows = np.arange(len(weight))
    load, held = np.zeros((len(weight), packs)), np.zeros((len(weight), packs), dtype=np.int64)
    for item in np.argsort(-weight, axis=1, kind="stable").T:
        lightest = np.argmin(np.where(held < capacity, load, np.inf), axis=1)
        pack_of[rows, item], place_of[rows, item] = lightest, held[rows, lightest]
        held[rows, lightest] += 1
        load[rows, lightest] += weight[rows, item]
    return pack_of, place_of
