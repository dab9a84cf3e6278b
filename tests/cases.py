"""Layouts that several folders of tests share."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from eplb_core import ExpertLayout, Topology


@st.composite
def maps(draw: st.DrawFn, layers: int, slots: int, experts: int) -> list[list[int]]:
    """Draw rows that hold every expert: any order, empty slots, pairs on a rank."""
    spare = st.lists(st.integers(-1, experts - 1), min_size=slots - experts, max_size=slots - experts)
    return [draw(st.permutations([*range(experts), *draw(spare)])) for _ in range(layers)]


@st.composite
def layouts(
    draw: st.DrawFn, min_layers: int = 1, max_layers: int = 3, max_experts: int = 6, max_ranks: int = 4
) -> ExpertLayout:
    """Draw valid layouts of any kind: pairs on a rank, empty slots, nodes of unequal size."""
    layers, experts = draw(st.integers(min_layers, max_layers)), draw(st.integers(1, max_experts))
    ranks = draw(st.integers(1, max_ranks))
    per_rank = draw(st.integers(-(-experts // ranks), -(-experts // ranks) + 2))
    rows = np.array(draw(maps(layers, ranks * per_rank, experts)), dtype=np.int64)
    node = sorted(draw(st.lists(st.integers(0, 1), min_size=ranks, max_size=ranks)))
    nodes = [n - node[0] for n in node]
    return ExpertLayout(rows.reshape(layers, ranks * per_rank), experts, topology=Topology(rank_to_node=nodes))


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
