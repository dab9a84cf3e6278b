"""Orders of nodes for mode "near": flows are those of the tables, and the chosen orders even them out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from eplb_core import DispatchTables, ExpertLayout, Topology, near_orders, pair_counts, place, replica_shares
from eplb_core._arrays import FloatArray, IntArray
from tests.cases import random_layout

TWO_NODES = ExpertLayout([[0, 1, 1, 2]], num_experts=3, topology=Topology(4, 2))


def skewed_ids(tokens: int, experts: int, layers: int = 1, seed: int = 0) -> IntArray:
    rng = np.random.default_rng(seed)
    taste = np.log(rng.lognormal(0, 0.5, (layers, experts))) + rng.gumbel(size=(tokens, layers, experts))
    ids: IntArray = np.argsort(-taste, axis=2)[:, :, :4]
    return ids


def placed(ids: IntArray, nodes: int) -> ExpertLayout:
    load = np.bincount(ids.ravel(), minlength=40)[None]
    return place(load, Topology(rank_to_node=np.arange(12) * nodes // 12), num_slots=60).layout


def loads(layout: ExpertLayout, ids: IntArray, orders: Any, shares: FloatArray | None = None) -> tuple[FloatArray, int]:
    """Tokens that the ranks `[R]` get if every rank sends all tokens of a layer, and the sends."""
    load, sends = np.zeros(layout.topology.num_ranks), 0
    for rank in range(layout.topology.num_ranks):
        tables = DispatchTables(layout, rank=rank, mode="near", orders=orders, shares=shares)
        slots = tables.map(0, torch.tensor(ids[:, 0])).numpy()
        load += np.bincount(slots[slots >= 0] // layout.slots_per_rank, minlength=len(load))
        sends += int(tables.layer(0).sends)
    return load, sends


@pytest.mark.parametrize(("nodes", "part"), [(1, 1.0), (3, 0.9), (8, 0.7)])
def test_solved_orders_even_out_the_ranks_at_no_send(nodes: int, part: float) -> None:
    ids = skewed_ids(400, 40)
    layout = placed(ids, nodes)
    orders = near_orders(layout, ids)
    assert orders.shape == (1, nodes, 64)
    assert orders.min() >= 0
    assert orders.max() < 2 * nodes
    before, sends = loads(layout, ids, None)
    after, same = loads(layout, ids, orders)
    assert same == sends
    assert after.sum() == before.sum()
    assert after.std() <= before.std() * part


def test_flows_are_what_the_tables_do() -> None:
    """With all tokens in one order the nodes get what the flow says."""
    from eplb_core.dispatch.orders import _flow, _parts_in_nodes

    layout = random_layout(layers=1, experts=12, slots=27, ranks=9, nodes=3)
    ids = skewed_ids(40, 12)
    ids[::7, :, 1] = -1
    shares = np.ones((1, 27)) / layout.replica_count[0][layout.physical_to_logical_map]
    parts = _parts_in_nodes(layout, 0, shares[0])
    flows, owner = np.empty((3, 6, 9)), np.arange(27) // 3
    row, node = layout.physical_to_logical_map[0], layout.topology.rank_to_node
    tokens = np.ascontiguousarray(ids[:, 0])
    _flow(tokens, np.ones(40), row, owner, node, parts, np.empty((3, 12), np.int64), flows)
    for option in range(6):
        tables = DispatchTables(layout, rank=0, mode="near", orders=np.full((1, 3, 64), option))
        slots = tables.map(0, torch.tensor(tokens)).numpy()
        by_node = np.bincount(node[slots[slots >= 0] // 3], minlength=3)
        np.testing.assert_allclose(np.bincount(node, flows[0, option]) * 3, by_node)


@pytest.mark.long
def test_a_table_of_one_slot_per_expert_saves_a_part_of_what_near_does() -> None:
    rng = np.random.default_rng(0)
    groups = np.log(0.1 + 0.9 * (np.arange(32) % 8 == rng.integers(0, 8, (600, 1, 1)))) + rng.gumbel(size=(600, 1, 32))
    ids: IntArray = np.argsort(-groups, axis=2)[:, :, :4]
    load, topology = np.bincount(ids.ravel(), minlength=32)[None], Topology(8, 4)
    layout = place(load, topology, num_slots=48, pairs=pair_counts(ids, 32), effort=0.05).layout
    sends = {}
    for mode in ("near", "even", "weighted"):
        sends[mode] = 0
        for rank in range(8):
            to = DispatchTables(layout, rank=rank, mode=mode).map(0, torch.tensor(ids[:, 0])).numpy() // 6 // 2
            sends[mode] += sum(len(set(nodes) - {rank // 2}) for nodes in to.tolist())
    assert sends["near"] < 0.9 * sends["weighted"]
    assert sends["near"] < sends["even"] < sends["weighted"]


def test_tokens_stand_for_a_load() -> None:
    """Few tokens with another load than that given are weighed: the orders are nearly those of the true ones."""
    ids = skewed_ids(1000, 40)
    layout = placed(ids, 4)
    odd = ids[(ids == 7).any(axis=(1, 2)) | (np.arange(1000) % 5 == 0)]
    load = np.bincount(ids.ravel(), minlength=40)[None]
    plain, _ = loads(layout, ids, near_orders(layout, odd))
    weighed, _ = loads(layout, ids, near_orders(layout, odd, load))
    windows, _ = loads(layout, ids, near_orders(layout, odd, [load - 1, np.ones_like(load)]))
    assert weighed.std() < 0.9 * plain.std()
    np.testing.assert_array_equal(windows, weighed)
    huge = load / load.max() * 2.0**1023
    np.testing.assert_array_equal(near_orders(layout, odd, [huge, huge]), near_orders(layout, odd, load))


def test_without_tokens_every_order_comes_as_often() -> None:
    orders = near_orders(TWO_NODES, np.zeros((0, 1, 2), np.int64))
    assert np.bincount(orders[0, 0]).tolist() == [16] * 4
    np.testing.assert_array_equal(near_orders(TWO_NODES, np.full((5, 1, 2), -1)), orders)
    np.testing.assert_array_equal(
        DispatchTables(TWO_NODES, rank=3, mode="near", orders=orders)._packed,
        DispatchTables(TWO_NODES, rank=3, mode="near")._packed,
    )


def test_what_nodes_and_ranks_can_do_counts() -> None:
    layout = ExpertLayout([[0, 1, 1, 0, 2, 2]], num_experts=3, topology=Topology(rank_to_node=[0, 1, 2]))
    ids = np.zeros((50, 1, 1), np.int64)
    orders = near_orders(layout, ids, shares=replica_shares(layout, [[1, 0, 0]]))
    load, _ = loads(layout, ids, orders)
    np.testing.assert_allclose(load, [75, 75, 0], atol=2)  # rank 2 sends half of its own to each
    topology = Topology(rank_to_node=[0, 1, 2], rank_speed=[1, 2, 1])
    fast = ExpertLayout(layout.physical_to_logical_map, num_experts=3, topology=topology)
    load, _ = loads(fast, ids, near_orders(fast, ids))
    np.testing.assert_allclose(load, [52, 98, 0], atol=4)  # nearly all of them, as it is fast


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"topk_ids": [[[3]]]}, IndexError, "3"),
        ({"topk_ids": [[0]]}, ValueError, r"shape \[1, 1\]"),
        ({"topk_ids": [[[0], [1]]]}, ValueError, r"must be \[tokens, 1, K\]"),
        ({"topk_ids": [[[0]]], "expert_load": [[1, 2]]}, ValueError, "expert_load"),
        ({"topk_ids": [[[0]]], "expert_load": [[1, -2, 3]]}, ValueError, "expert_load"),
        ({"topk_ids": [[[0]]], "shares": [[0.5] * 3]}, ValueError, "shares"),
    ],
)
def test_bad_input_is_refused_by_name(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        near_orders(TWO_NODES, **arguments)


def test_orders_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 8 nodes"):
        near_orders(ExpertLayout.trivial(1, 9, num_slots=9, topology=Topology(9, 9)), [[[0]]])
    tables = DispatchTables(TWO_NODES, mode="near")
    before = tables._packed.clone()
    for bad in (np.zeros((1, 2, 63), np.int64), np.full((1, 2, 64), 4), np.full((1, 2, 64), -1)):
        with pytest.raises(ValueError, match="`orders`"):
            tables.install(TWO_NODES, orders=bad)
    assert torch.equal(tables._packed, before)
    with pytest.raises(ValueError, match="'weighted'"):
        DispatchTables(TWO_NODES, mode="weighted", orders=np.zeros((1, 2, 64), np.int64))
