"""What the strategies draw is valid, and varied."""

from __future__ import annotations

import numpy as np
from hypothesis import find, given
from hypothesis import strategies as st

from eplb_core import ExpertLayout, Topology
from eplb_core.testing.strategies import expert_loads, layouts, topologies


@given(topologies(max_ranks=6, max_nodes=3))
def test_topologies_keep_within_what_was_asked_for(topology: Topology) -> None:
    assert 1 <= topology.num_nodes <= 3
    assert topology.num_nodes <= topology.num_ranks <= 6


@given(layouts(empty=False, pairs=False))
def test_layouts_have_pairs_only_where_counting_forces_them(layout: ExpertLayout) -> None:
    held = layout.physical_to_logical_map.reshape(layout.num_layers, -1, layout.slots_per_rank)
    assert held.min() >= 0
    for row in held.reshape(-1, layout.slots_per_rank):
        assert len(set(row.tolist())) == min(layout.slots_per_rank, layout.num_experts)


@given(layouts(topology=Topology(2), max_experts=5, max_layers=2))
def test_layouts_are_of_the_topology_that_was_given(layout: ExpertLayout) -> None:
    assert layout.topology == Topology(2)
    assert layout.num_experts <= 5
    assert layout.num_layers <= 2


@given(st.data())
def test_loads_are_counts_of_the_shape_that_was_asked_for(data: st.DataObject) -> None:
    windows = data.draw(st.none() | st.integers(1, 3))
    load = data.draw(expert_loads(layers=2, experts=5, windows=windows, most=100))
    assert load.shape == ((2, 5) if windows is None else (windows, 2, 5))
    assert load.dtype == np.int64
    assert load.min() >= 0
    assert load.max() <= 100


def test_the_strange_cases_come_up() -> None:
    """Nodes of different size, empty slots, an expert twice on a rank, a layer without load."""
    uneven = find(topologies(), lambda t: len(set(np.bincount(t.rank_to_node).tolist())) > 1)
    assert uneven.num_ranks == 3
    assert (find(layouts(), lambda layout: bool((layout.physical_to_logical_map < 0).any()))).num_layers == 1
    pair = find(layouts(topology=Topology(1)), lambda layout: bool((layout.replica_count > 1).any()))
    assert pair.num_slots == 2
    assert not find(expert_loads(layers=1, experts=3), lambda load: not load.any()).any()
