"""Hypothesis strategies: topologies, layouts and loads as engines have them, odd ones included.

Needs the package hypothesis. All that is drawn is valid and shrinks to few ranks, few experts and small loads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from eplb_core._arrays import IntArray
from eplb_core.layout import ExpertLayout
from eplb_core.topology import Topology


@st.composite
def topologies(draw: Any, *, max_ranks: int = 8, max_nodes: int = 4) -> Topology:
    """Draw ranks on nodes of equal or unequal size.

    Args:
        draw: Given by Hypothesis.
        max_ranks: Most EP ranks.
        max_nodes: Most nodes.
    """
    ranks = draw(st.integers(1, max_ranks))
    nodes = draw(st.integers(1, min(max_nodes, ranks)))
    if draw(st.booleans()) and ranks % nodes == 0:
        return Topology(ranks, num_nodes=nodes)
    cuts = sorted(draw(st.lists(st.integers(1, ranks - 1), max_size=nodes - 1, unique=True))) if ranks > 1 else []
    return Topology(rank_to_node=np.searchsorted(cuts, np.arange(ranks), side="right").tolist())


@st.composite
def layouts(
    draw: Any,
    *,
    topology: Topology | None = None,
    max_layers: int = 3,
    max_experts: int = 12,
    max_spare: int = 2,
    empty: bool = True,
    pairs: bool = True,
) -> ExpertLayout:
    """Draw layouts in which every expert has a slot: any order, any number of replicas.

    Args:
        draw: Given by Hypothesis.
        topology: Of the ranks; None draws one.
        max_layers: Most layers.
        max_experts: Most logical experts.
        max_spare: Most slots per rank beyond those that the experts need.
        empty: Whether slots may be empty.
        pairs: Whether a rank may hold an expert twice where counting does not force it.
    """
    topology = draw(topologies()) if topology is None else topology
    ranks = topology.num_ranks
    experts = draw(st.integers(1, max_experts))
    per_rank = -(-experts // ranks) + draw(st.integers(0, max_spare))
    rows = [
        draw(_rows(ranks, per_rank, experts, empty=empty, pairs=pairs)) for _ in range(draw(st.integers(1, max_layers)))
    ]
    return ExpertLayout(np.stack(rows), experts, topology=topology)


@st.composite
def _rows(draw: Any, ranks: int, per_rank: int, experts: int, *, empty: bool, pairs: bool) -> IntArray:
    """One layer: each expert once, dealt out to ranks in turn, then spare slots filled."""
    order = draw(st.permutations(range(experts)))
    held: list[list[int]] = [[] for _ in range(ranks)]
    for i, expert in enumerate(order):
        held[i % ranks].append(expert)
    for rank, mine in enumerate(held):
        while len(mine) < per_rank:
            fresh = [expert for expert in range(experts) if pairs or expert not in mine]
            choices = (fresh or list(range(experts))) + ([-1] if empty else [])
            mine.append(draw(st.sampled_from(choices)))
        held[rank] = draw(st.permutations(mine))
    return np.array(held, dtype=np.int64).reshape(-1)


@st.composite
def expert_loads(draw: Any, *, layers: int, experts: int, windows: int | None = None, most: int = 1 << 20) -> IntArray:
    """Draw tokens per expert, int64 `[L, E]` or `[T, L, E]`: even, skewed, with idle experts, or all 0.

    Args:
        draw: Given by Hypothesis.
        layers: Layers L.
        experts: Logical experts E.
        windows: Windows T; None: one, without its dimension.
        most: Most tokens of one expert.
    """
    shape = (layers, experts) if windows is None else (windows, layers, experts)
    kind = draw(st.sampled_from(["even", "any", "skewed", "idle"]))
    if kind == "idle":
        return np.zeros(shape, dtype=np.int64)
    if kind == "even":
        return np.full(shape, draw(st.integers(0, most)), dtype=np.int64)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if kind == "any":
        return rng.integers(0, most + 1, shape, dtype=np.int64)
    exponent = rng.random(shape) * np.log2(max(most, 1))
    load: IntArray = np.where(rng.random(shape) < 0.2, 0, np.exp2(exponent)).astype(np.int64)
    return load
