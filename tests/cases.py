"""Layouts that several folders of tests share."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from eplb_core import ExpertLayout, Topology
from eplb_core.testing import strategies
from eplb_core.testing.strategies import Size, topologies


def layouts(
    num_layers: Size = (1, 3), num_experts: Size = (1, 6), num_ranks: Size = (1, 4)
) -> st.SearchStrategy[ExpertLayout]:
    """Small layouts of any kind: pairs on a rank, empty slots, nodes of unequal size."""
    topology = topologies(num_ranks=num_ranks, num_nodes=(1, 2))
    return strategies.layouts(topology=topology, num_layers=num_layers, num_experts=num_experts)


def random_layout(
    layers: int = 4, experts: int = 32, slots: int = 48, ranks: int = 8, nodes: int = 2, seed: int = 0
) -> ExpertLayout:
    """Every expert once and the rest drawn, in random places."""
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(np.r_[:experts, rng.integers(0, experts, slots - experts)]) for _ in range(layers)]
    return ExpertLayout(np.stack(rows), experts, topology=Topology(ranks, nodes))


def by_rank(layout: ExpertLayout, layer: int = 0) -> list[list[int]]:
    """What the slots of each rank hold, empty ones included."""
    ranks = layout.physical_to_logical_map[layer].reshape(layout.topology.num_ranks, -1)
    return [rank.tolist() for rank in ranks]


# Two ranks of three slots; experts 0 and 3 have two slots, that of 3 on rank 1 being a pair with its neighbour's.
PAIR = ExpertLayout([[0, 1, 2, 3, 3, 0]], num_experts=4, topology=Topology(num_ranks=2))
