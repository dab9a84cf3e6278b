"""What passes and moves cost: data sheets, links, times, against plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core import CostModel, ExpertLayout, StepCost, Topology, cost_preset, place, simulate, transfers
from eplb_core.simulation import HARDWARE, Hardware, count_links
from eplb_core.testing.strategies import layout_pairs

FOUR = Topology(num_ranks=4, num_nodes=2)


# ---- data sheets -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HARDWARE)
def test_presets_give_the_costs_of_a_deepseek_v3_expert(name: str) -> None:
    """44 MB in FP8; a token reads nothing and takes 6 x 7168 x 2048 operations; 3 bytes a value there and back."""
    sheet, cost = HARDWARE[name], cost_preset(name, achieved=1.0)
    assert cost.model.expert_bytes == 3 * 7168 * 2048
    assert cost.model.token_s == pytest.approx(6 * 7168 * 2048 / sheet.operations)
    assert cost.model.expert_s == pytest.approx(3 * 7168 * 2048 / sheet.memory_bandwidth)
    assert cost.model.link_s(same_node=True) < cost.model.link_s(same_node=False)
    assert cost.token_bytes == 3 * 7168
    assert cost.memory_bytes == sheet.memory_bytes
    assert cost.name == sheet.name
    assert "data sheet" in sheet.source


def test_own_numbers_and_what_is_reached_of_them() -> None:
    sheet = Hardware("mine", 1e15, 1e12, 1e11, 1e10, 1e11, "measured")
    half = cost_preset(
        sheet, achieved=0.5, hidden_size=1000, intermediate_size=100, weight_bytes=2.0, combine_bytes=1.0
    )
    assert half.model.expert_bytes == 600_000
    assert half.model.token_s == pytest.approx(600_000 / 5e14)
    assert half.model.network_bandwidth == 5e9
    assert half.token_bytes == 2000


@pytest.mark.parametrize(
    ("make", "arguments", "options", "error", "match"),
    [
        (cost_preset, ["H300"], {}, ValueError, r"`hardware` \(='H300'\) must be one of H100, H200, B200, GB200 NVL72"),
        (cost_preset, ["H100"], {"achieved": 1.5}, ValueError, r"`achieved` \(=1.5\)"),
        (cost_preset, ["H100"], {"hidden_size": 0}, ValueError, r"`hidden_size` \(=0.0\)"),
        (cost_preset, ["H100"], {"combine_bytes": -1}, ValueError, r"`combine_bytes` \(=-1.0\)"),
        (StepCost, [3], {}, TypeError, r"`model` \(=int\)"),
        (StepCost, [CostModel()], {"token_bytes": -1}, ValueError, r"`token_bytes` \(=-1.0\)"),
        (StepCost, [CostModel()], {"memory_bytes": 0}, ValueError, r"`memory_bytes` \(=0.0\)"),
    ],
)
def test_bad_numbers_are_named(make: Any, arguments: Any, options: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make(*arguments, **options)


def test_all_to_all_counts_the_tokens_that_come_over_each_link() -> None:
    """Of a rank's tokens one part in R is its own; the other ranks of its node send theirs over the fast link."""
    cost = StepCost(CostModel(node_bandwidth=10.0, network_bandwidth=1.0), token_bytes=4.0)
    assert cost.exchange_s(FOUR).tolist() == pytest.approx([4 * (0.25 / 10 + 0.5)] * 4)
    uneven = Topology(rank_to_node=[0, 1, 1, 1])
    assert cost.exchange_s(uneven).tolist() == pytest.approx([4 * 0.75, *[4 * (0.5 / 10 + 0.25)] * 3])


def test_a_send_is_worth_its_time_by_that_of_the_tokens_experts() -> None:
    """Two experts of 0.5 s each take as long as a send of 4 bytes over a network of 4 bytes a second."""
    cost = StepCost(CostModel(token_s=0.5, node_bandwidth=40.0, network_bandwidth=4.0), token_bytes=4.0)
    assert cost.traffic_price(2) == 1.0
    assert cost.traffic_price(4) == 0.5
    assert StepCost(CostModel(token_s=0.5), token_bytes=4.0).traffic_price(2) == 0.0
    with pytest.raises(ValueError, match=r"`top_k` \(=0\)"):
        cost.traffic_price(0)
    with pytest.raises(ValueError, match=r"`token_s`"):
        StepCost(CostModel(token_s=0.0, expert_s=1.0), token_bytes=4.0).traffic_price(2)


# ---- links -----------------------------------------------------------------------------------------------------------


def links_by_hand(old: ExpertLayout, new: ExpertLayout) -> list[list[int]]:
    topology, size = old.topology, old.slots_per_rank
    node = topology.rank_to_node.tolist()
    rows = []
    for layer in range(old.num_layers):
        before = np.split(old.physical_to_logical_map[layer], topology.num_ranks)
        after = np.split(new.physical_to_logical_map[layer], topology.num_ranks)
        held = [set(rank.tolist()) for rank in before]
        counts = [0, 0, 0]
        for rank in range(topology.num_ranks):
            counts[0] += sum(
                a != b and a >= 0 and a in held[rank]
                for a, b in zip(after[rank].tolist(), before[rank].tolist(), strict=True)
            )
            for expert in {e for e in after[rank].tolist() if e >= 0} - held[rank]:
                near = any(expert in held[r] for r in range(topology.num_ranks) if node[r] == node[rank])
                counts[1 if near else 2] += 1
        rows.append(counts)
        assert size * topology.num_ranks == old.num_slots
    return rows


@settings(max_examples=25)
@given(data=st.data())
def test_links_agree_with_plain_python(data: st.DataObject) -> None:
    topology = Topology(rank_to_node=data.draw(st.sampled_from([[0, 0, 1, 1], [0, 1, 1, 1], [0, 0, 0, 0]])))
    old, new = data.draw(layout_pairs(topology=topology, num_layers=2, num_experts=6, slots_per_rank=2))
    found = count_links(old, new)
    assert found.tolist() == links_by_hand(old, new)
    assert found[:, 1:].sum(axis=1).tolist() == transfers(old, new).sum(axis=1).tolist()


# ---- times -----------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    load=st.lists(st.integers(0, 40), min_size=6, max_size=6),
    speed=st.sampled_from([[1.0] * 4, [1.0, 2.0, 1.0, 0.5]]),
    passes=st.sampled_from([1.0, 4.0]),
    expert_s=st.sampled_from([0.0, 0.5]),
    token_bytes=st.sampled_from([0.0, 3.0]),
)
def test_times_agree_with_plain_python(
    load: list[int], speed: list[float], passes: float, expert_s: float, token_bytes: float
) -> None:
    topology = Topology(4, 2, rank_speed=speed)
    layout = ExpertLayout([[0, 1, 2, 3, 4, 5, 0, -1]], 6, topology=topology)
    model = CostModel(token_s=0.25, expert_s=expert_s, layer_s=2.0, node_bandwidth=8.0, network_bandwidth=2.0)
    result = simulate(
        np.array([[load]] * 2),
        topology=topology,
        num_slots=7,
        policy="none",
        interval=1,
        current=layout,
        cost=StepCost(model, token_bytes),
        window_passes=passes,
    )
    half = load[0] / 2
    tokens: list[list[float]] = [[half, load[1]], [load[2], load[3]], [load[4], load[5]], [half, 0]]
    compute = max(
        (0.25 * sum(rank) + expert_s * sum(min(slot, passes) for slot in rank)) / s
        for rank, s in zip(tokens, speed, strict=True)
    )
    exchange = max(sum(rank) for rank in tokens) * token_bytes * (0.25 / 8 + 0.5 / 2)
    assert result.step_s[1, 0] == pytest.approx((compute + exchange) / passes + 2.0)
    assert result.pass_s == pytest.approx(result.step_s[1].sum())
    assert result.total_s == pytest.approx(result.pass_s * passes)


def test_pauses_bytes_and_memory_of_a_move() -> None:
    """Two experts cross, one within a node, one between nodes; a rank sends or receives 10 s at most."""
    old = ExpertLayout([[0, 1, 2, 3, 4, 5, 0, 1]], 6, topology=FOUR)
    new = ExpertLayout([[0, 1, 2, 0, 4, 5, 3, 1]], 6, topology=FOUR)
    model = CostModel(
        expert_bytes=20.0, node_bandwidth=10.0, network_bandwidth=2.0, stall=0.5, install_s=3.0, rebalance_s=1.0
    )
    result = simulate(
        np.ones((3, 1, 6)),
        topology=FOUR,
        num_slots=8,
        policy=lambda windows, live: new if live is old else live,
        interval=1,
        current=old,
        cost=model,
    )
    assert result.link_transfers.tolist() == [[[0, 1, 1]], [[0, 0, 0]]]
    assert result.transfer_bytes.tolist() == [0.0, 20.0, 20.0]
    assert result.pause_s.tolist() == [0.5 * 10.0 + 3.0 + 1.0, 0.0]
    assert result.memory_bytes == 0.0  # two slots a rank with or without redundant experts
    assert result.moves().wire_bytes.tolist() == [40.0, 0.0]


def test_memory_is_that_of_the_rank_with_most_redundant_experts() -> None:
    load = np.ones((2, 3, 8))
    result = simulate(load, topology=FOUR, num_slots=13, policy="none", interval=1, cost=CostModel(expert_bytes=7.0))
    assert result.memory_bytes == (4 - 2) * 3 * 7.0


# ---- policies --------------------------------------------------------------------------------------------------------

DRIFT = np.random.default_rng(1).integers(1, 60, (6, 2, 8))


def test_once_places_once_and_stays() -> None:
    result = simulate(DRIFT, topology=FOUR, num_slots=12, policy="once", interval=1)
    assert result.digests[1] != result.digests[0]
    assert set(result.digests[1:]) == {place(DRIFT[0], FOUR, num_slots=12, current=result.first_layout).layout.digest}


def test_gated_moves_only_what_pays_back() -> None:
    def transfers_at(expert_bytes: float) -> int:
        cost = CostModel(expert_bytes=expert_bytes, node_bandwidth=1.0, network_bandwidth=1.0)
        return simulate(DRIFT, topology=FOUR, num_slots=12, policy="gated", interval=1, cost=cost).total_transfers

    assert transfers_at(0.0) > transfers_at(15.0) > transfers_at(1e6) == 0


def test_gated_moves_the_layers_that_pay_alone() -> None:
    """Layer 1 is as uneven as layer 0, but has a hundredth of its tokens: its move would not be paid back."""
    layer = np.array([90.0, 80, 10, 10, 10, 10, 10, 10])
    load = np.array([[layer, layer / 100]] * 3)
    cost = CostModel(expert_bytes=10.0, node_bandwidth=1.0, network_bandwidth=1.0)
    moved = {
        policy: simulate(load, topology=FOUR, num_slots=8, policy=policy, interval=1, cost=cost).transfers.sum(axis=0)
        for policy in ("place", "gated")
    }
    assert (moved["place"] > 0).all()
    assert (moved["gated"] > 0).tolist() == [True, False]


def test_groups_reach_place() -> None:
    options = {"locality": "group"}
    result = simulate(DRIFT, topology=FOUR, num_slots=8, policy="once", interval=3, num_groups=2, place_options=options)
    nodes = result.layout.physical_to_logical_map.reshape(2, 2, 4) // 4
    assert (nodes == nodes[:, :, :1]).all()


def test_no_window_of_an_interval_exceeds_its_bound_on_average() -> None:
    result = simulate(DRIFT, topology=FOUR, num_slots=12, interval=2, bound=True)
    for start in (0, 2, 4):
        assert result.bound[start] == result.bound[start + 1]
        assert result.window_balancedness[start : start + 2].mean() <= result.bound[start] + 1e-9 <= 1 + 2e-9
    assert np.isnan(simulate(DRIFT, topology=FOUR, num_slots=12, interval=2).bound).all()
