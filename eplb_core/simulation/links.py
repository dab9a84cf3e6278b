"""Which links the experts of a move cross."""

from __future__ import annotations

import numpy as np

from eplb_core._arrays import IntArray
from eplb_core.layout import ExpertLayout

LINKS = ("rank", "node", "network")
"""Where a slot's new expert comes from: a slot of the same rank, of another rank of its node, of another node."""

# Layers at a time: what is looked at is [layers, R, E].
_CELLS = 1 << 24


def count_links(old: ExpertLayout, new: ExpertLayout) -> IntArray:
    """How many experts of a move come from the rank itself, from its node, from another node?

    An expert that a rank does not hold yet crosses the wire once, however many of its slots it fills; each slot whose
    new expert the rank holds is a copy within the rank.

    Args:
        old: Layout that the weights are in.
        new: Layout to reach; same L, P, E and topology.

    Returns:
        int64 `[L, 3]`, in the order of `LINKS`; the last two add up to `transfers`, summed over ranks.

    Raises:
        ValueError: The layouts differ in shape, experts or topology.

    Cost:
        O(L * R * E); any thread.

    Example:
        >>> from eplb_core import Topology
        >>> topology = Topology(num_ranks=4, num_nodes=2)
        >>> old = ExpertLayout([[0, 1, 2, 3, 4, 5, 6, 7]], num_experts=8, topology=topology)
        >>> new = ExpertLayout([[0, 2, 1, 3, 5, 4, 6, 7]], num_experts=8, topology=topology)
        >>> count_links(old, new).tolist()
        [[2, 2, 0]]
    """
    old.check_same_frame(new)
    counts = np.zeros((old.num_layers, len(LINKS)), dtype=np.int64)
    changed = np.flatnonzero((old.physical_to_logical_map != new.physical_to_logical_map).any(axis=1))
    ranks, experts = old.topology.num_ranks, old.num_experts
    step = max(1, _CELLS // (ranks * (experts + 1)))
    for first in range(0, len(changed), step):
        layers = changed[first : first + step]
        counts[layers] = _count(old, new, layers)
    return counts


def _count(old: ExpertLayout, new: ExpertLayout, layers: IntArray) -> IntArray:
    topology, experts = old.topology, old.num_experts
    shape = (len(layers), topology.num_ranks, old.slots_per_rank)
    before = old.physical_to_logical_map[layers].reshape(shape)
    after = new.physical_to_logical_map[layers].reshape(shape)
    had = np.zeros((len(layers), topology.num_ranks, experts + 1), dtype=np.bool_)
    gets = had.copy()
    np.put_along_axis(had, before, True, axis=2)  # -1, an empty slot, is the last column
    np.put_along_axis(gets, after, True, axis=2)
    own = np.take_along_axis(had, after, axis=2)
    counts = np.empty((len(layers), len(LINKS)), dtype=np.int64)
    counts[:, 0] = (own & (before != after) & (after >= 0)).sum(axis=(1, 2))
    gets &= ~had
    gets[:, :, experts] = False
    counts[:, 1] = 0
    for node in range(topology.num_nodes):
        members = np.flatnonzero(topology.rank_to_node == node)
        on_node = np.any(had[:, members], axis=1, keepdims=True)
        counts[:, 1] += (gets[:, members] & on_node).sum(axis=(1, 2))
    counts[:, 2] = gets.sum(axis=(1, 2)) - counts[:, 1]
    return counts
