"""Mode "near": the fewest nodes besides the rank's own, by the definition; the shares of the slots there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core import DispatchTables, ExpertLayout, Topology
from tests.cases import layouts
from tests.placement.affinity.sends import fewest_sends, nodes_of

TWO_NODES = Topology(4, 2)


@settings(max_examples=40, deadline=None)
@given(layout=layouts(num_layers=1, num_ranks=(1, 4)), seed=st.integers(0, 99), data=st.data())
def test_a_token_reaches_as_few_other_nodes_as_its_experts_allow(
    layout: ExpertLayout, seed: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, layout.topology.num_ranks - 1))
    k = min(3, layout.num_experts)
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(layout.num_experts)[:k] for _ in range(12)])
    ids[rng.random(ids.shape) < 0.2] = -1
    tables = DispatchTables(layout, rank=rank, mode="near", seed=seed)
    slots = tables.map(0, torch.tensor(ids)).numpy()
    row, node, held = layout.physical_to_logical_map[0], layout.topology.rank_to_node, nodes_of(layout)
    assert (np.where(slots >= 0, row[slots], -1) == ids).all()
    expected = 0
    for token, went in zip(ids.tolist(), slots.tolist(), strict=True):
        real = [expert for expert in token if expert >= 0]
        fewest = fewest_sends(held, real, int(node[rank]), layout.topology.num_nodes)
        reached = {int(node[slot // layout.slots_per_rank]) for slot in went if slot >= 0}
        assert len(reached - {int(node[rank])}) == fewest
        expected += fewest
    assert tables.layer(0).sends.tolist() == [expected]


def test_slots_of_a_node_take_tokens_by_their_shares() -> None:
    layout = ExpertLayout([[0, 1, 0, 2, 0, 3, 1, 3]], num_experts=4, topology=TWO_NODES)
    shares = [[0.15, 0.5, 0.45, 1.0, 0.4, 0.5, 0.5, 0.5]]
    tables = DispatchTables(layout, rank=1, mode="near", shares=shares)
    went = tables.map(0, torch.zeros((4000, 1), dtype=torch.int64)).flatten().bincount(minlength=8)
    assert went[4] == 0
    assert abs(int(went[0]) - 1000) < 20
    assert int(went[2]) + int(went[0]) == 4000
    none = [[0.0, 0.5, 0.0, 1.0, 1.0, 0.5, 0.5, 0.5]]
    tables.install(layout, shares=none)  # nobody in the node has a share: as many for each
    went = tables.map(0, torch.zeros((4000, 1), dtype=torch.int64)).flatten().bincount(minlength=8)
    assert abs(int(went[0]) - 2000) < 20


def test_ranks_of_a_node_need_not_be_neighbours() -> None:
    topology = Topology(rank_to_node=[0, 1, 0, 1])
    layout = ExpertLayout([[0, 1, 0, 1]], num_experts=2, topology=topology)
    for rank, others in ((0, 1), (1, 1)):
        tables = DispatchTables(layout, rank=rank, mode="near")
        tables.map(0, torch.tensor([[0, 1]] * 6))
        assert tables.layer(0).sends.tolist() == [6 * others]


def test_near_tables_serve_no_other_mode_and_eight_nodes_at_most() -> None:
    layout = ExpertLayout.trivial(1, 9, num_slots=9, topology=Topology(9, 9))
    with pytest.raises(ValueError, match="at most 8 nodes, not 9"):
        DispatchTables(layout, mode="near")
    near = DispatchTables(ExpertLayout.trivial(1, 4, num_slots=8, topology=TWO_NODES), mode="near")
    with pytest.raises(ValueError, match="'weighted'"):
        near.layer(0, mode="weighted")
    with pytest.raises(ValueError, match="'near'"):
        DispatchTables(near.layout, mode="weighted").layer(0, mode="near")


def test_an_id_that_is_no_expert_raises_before_anything_is_counted() -> None:
    tables = DispatchTables(ExpertLayout.trivial(1, 4, num_slots=8, topology=TWO_NODES), mode="near")
    with pytest.raises(IndexError, match="row 1, column 0"):
        tables.map(0, torch.tensor([[0], [4]]))
    assert tables.layer(0).sends.tolist() == [0]
