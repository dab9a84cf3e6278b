from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import eplb_core as eplb
from eplb_core.adapters.balancers import Balancers
from eplb_core.adapters.vllm.policy import PolicyOptions, fill_empty, preserve_intragpu_slots, rebalance

DEEPSEEK = PolicyOptions(mode="deepseek")


def trivial(layers: int, experts: int, slots: int) -> torch.Tensor:
    return (torch.arange(slots) % experts).repeat(layers, 1)


def random_load(layers: int, experts: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(1, 1000, (layers, experts)))


def test_the_answer_is_place_s_from_the_live_map_on() -> None:
    load, old = random_load(4, 16), trivial(4, 16, 24)
    current = eplb.ExpertLayout(old, 16, topology=eplb.Topology(4))
    expected = eplb.place(load, eplb.Topology(4), num_slots=24, current=current).layout
    answer = rebalance(load, 24, 1, 1, 4, old)
    assert (answer.dtype, answer.device.type) == (torch.int64, "cpu")
    p2l = torch.from_numpy(expected.physical_to_logical_map.copy())
    assert torch.equal(answer, torch.where(p2l < 0, old, p2l))  # vLLM holds no empty slot: what was in one stays
    assert torch.equal(rebalance(load.int(), 24, 1, 1, 4, old), answer)


def test_layers_without_load_keep_their_row() -> None:
    """D5: vLLM gives all redundant slots to expert 0."""
    old = trivial(2, 16, 24)
    load = random_load(2, 16)
    load[1] = 0
    answer = rebalance(load, 24, 1, 1, 4, old)
    assert torch.equal(answer[1], old[1])
    assert torch.equal(rebalance(torch.zeros_like(load), 24, 1, 1, 4, old), old)


def test_a_drift_without_gain_moves_nothing() -> None:
    """D2, A10: vLLM moves 94% of the slots for a 5% drift."""
    load = random_load(8, 32)
    live = rebalance(load, 40, 1, 1, 4, trivial(8, 32, 40))
    assert torch.equal(rebalance(load + 1, 40, 1, 1, 4, live), live)


def test_replicas_of_an_expert_lie_on_distinct_ranks() -> None:
    """A1: DeepSeek EPLB and vLLM give rank 3 = [6, 6, 0]."""
    answer = rebalance(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]]), 12, 1, 1, 4, trivial(1, 8, 12))
    assert all(len(set(rank)) == 3 for rank in answer.reshape(4, 3).tolist())


def test_ranks_that_just_came_are_filled_and_the_others_mostly_stay() -> None:
    """Scale up: -1 in the old map; every slot of the answer holds an expert."""
    load = random_load(3, 16)
    load[2] = 0
    live = rebalance(load, 24, 1, 1, 4, trivial(3, 16, 24))
    grown = torch.cat([live, torch.full((3, 6), -1)], dim=1)
    answer = rebalance(load, 30, 1, 1, 5, grown)
    assert answer.min() >= 0
    assert torch.equal(answer[2, :24], live[2])
    assert (answer[:, :24] != live).sum() < 24
    for row in answer[:, 24:].tolist():
        assert len(set(row)) == 6


def test_ranks_that_leave_take_no_expert_with_them() -> None:
    """Scale down: the old map is wider than the answer, and the last ranks' experts are elsewhere afterwards."""
    load = random_load(3, 16)
    live = rebalance(load, 32, 1, 1, 4, trivial(3, 16, 32))
    answer = rebalance(load, 24, 1, 1, 3, live)
    eplb.ExpertLayout(answer, 16, topology=eplb.Topology(3))  # every expert is there
    assert answer.min() >= 0
    ranks = zip(live[:, :24].reshape(9, 8).tolist(), answer.reshape(9, 8).tolist(), strict=True)
    assert sum(len(set(after) - set(before)) for before, after in ranks) < 24


@pytest.mark.parametrize(
    "old",
    [
        torch.tensor([[0, 1, 2, 3, 0]]),  # another width
        torch.tensor([[0, 1, 2, 2, 0, 1]]),  # expert 3 is nowhere
        torch.tensor([[0, 1, 2, 3, 4, 0]]),  # an expert that there is not
        torch.tensor([[0, 1, 2, 3, 0, 1]] * 2),  # other layers
    ],
)
def test_an_old_map_that_is_no_layout_is_not_started_from(old: torch.Tensor) -> None:
    load = random_load(1, 4)
    assert torch.equal(rebalance(load, 6, 1, 1, 2, old), rebalance(load, 6, 1, 1, 2))


def test_groups_stay_on_a_node_where_vllm_packs_them_so() -> None:
    load = random_load(2, 16)
    answer = rebalance(load, 24, 4, 2, 4, trivial(2, 16, 24))
    node_of = np.repeat([0, 1], 12)
    for row in answer.numpy():
        assert all(len({int(n) for n in node_of[row // 4 == group]}) == 1 for group in range(4))
    anywhere = rebalance(load, 24, 4, 2, 4, trivial(2, 16, 24), options=PolicyOptions(locality="none"))
    assert torch.equal(anywhere, rebalance(load, 24, 1, 2, 4, trivial(2, 16, 24)))
    assert torch.equal(rebalance(load, 24, 3, 2, 4), rebalance(load, 24, 1, 2, 4))  # 3 groups fit no 2 nodes


def test_deepseek_s_answer_exactly_with_slots_preserved() -> None:
    """The example of DeepSeek EPLB's page, as vLLM's own test has it."""
    load = torch.tensor(
        [
            [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
            [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
        ]
    )
    expected = [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    assert rebalance(load, 16, 4, 2, 8, options=DEEPSEEK).tolist() == expected
    old = torch.tensor(expected)[:, [1, 0, *range(2, 16)]]
    assert torch.equal(rebalance(load, 16, 4, 2, 8, old, options=DEEPSEEK), old)


def test_options_reach_the_placement() -> None:
    load, old = random_load(4, 16), trivial(4, 16, 24)
    one = rebalance(load, 24, 1, 1, 4, old, options=PolicyOptions(max_transfers=1, transfer_price=0.0, min_gain=0.0))
    before, after = (eplb.ExpertLayout(m, 16, topology=eplb.Topology(4)) for m in (old, one))
    received = eplb.transfers(before, after).sum(axis=1)
    assert received.max() == 1  # 0 where `place` only empties a slot, which vLLM cannot
    still = rebalance(load, 24, 1, 1, 4, old, options=PolicyOptions(min_gain=1.0))
    assert torch.equal(still, old)


def test_numbers_that_do_not_fit_raise() -> None:
    with pytest.raises(ValueError, match=r"`num_replicas` \(=7\) must be a multiple of the 4 ranks"):
        rebalance(random_load(1, 4), 7, 2, 2, 4)
    with pytest.raises(ValueError, match="-5"):
        rebalance(torch.tensor([[1, -5, 2, 3]]), 4, 1, 1, 2, trivial(1, 4, 4))


def test_empty_slots_get_the_expert_with_the_most_load_a_replica() -> None:
    filled = fill_empty(np.array([[0, 1, 2, -1, 0, -1]]), np.array([[9, 5, 4]]), 2)
    # 9/2 = 4.5 < 5: expert 1 first; then 9/2 is on that rank already, 5/2 too, so expert 2.
    assert filled.tolist() == [[0, 1, 2, 1, 0, 2]]
    one_rank = fill_empty(np.array([[0, 1, -1]]), np.array([[9, 5]]), 1)
    assert one_rank.tolist() == [[0, 1, 0]]  # the rank holds all experts already
    assert fill_empty(np.array([[0, 1, 0, -1]]), np.array([[0, 0]]), 2).tolist() == [[0, 1, 0, 1]]


def preserve_by_hand(new: list[int], stride: int, old: list[int]) -> list[int]:
    """Slot by slot: the expert that was here stays if the rank still has one; the rest follow in order."""
    answer: list[int] = []
    for start in range(0, len(new), stride):
        rest: list[Any] = list(new[start : start + stride])
        row: list[Any] = [None] * stride
        for slot, expert in enumerate(old[start : start + stride]):
            if expert in rest:
                row[slot] = rest.pop(rest.index(expert))
        answer += [rest.pop(0) if expert is None else expert for expert in row]
    return answer


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.data())
def test_experts_that_stay_on_a_rank_keep_their_slot(layers: int, ranks: int, stride: int, data: st.DataObject) -> None:
    maps = st.lists(st.integers(0, 5), min_size=ranks * stride, max_size=ranks * stride)
    new, old = ([data.draw(maps) for _ in range(layers)] for _ in range(2))
    answer = preserve_intragpu_slots(np.array(new), ranks, np.array(old))
    assert answer.tolist() == [preserve_by_hand(*pair) for pair in zip(new, [stride] * layers, old, strict=True)]


def test_maps_of_other_shapes_are_left_as_they_are() -> None:
    new = np.array([[0, 1, 2]])
    assert preserve_intragpu_slots(new, 2, new) is new
    assert preserve_intragpu_slots(new, 0, new) is new
    assert preserve_intragpu_slots(new, 3, new[:, :2]) is new


def test_auto_remembers_the_load_of_each_call_and_answers_as_a_balancer_does() -> None:
    rng = np.random.default_rng(0)
    windows = rng.poisson(np.linspace(1, 90, 8), (6, 2, 8))
    balancers, options = Balancers(), PolicyOptions(mode="auto", move_cost=0.02)
    live = torch.arange(12).repeat(2, 1) % 8
    balancer = eplb.Balancer(eplb.Topology(4), num_slots=12, move_cost=0.02)
    for window in windows:
        balancer.observe(window)
        expected = balancer.propose(eplb.ExpertLayout(live, 8, topology=eplb.Topology(4))).layout
        live = rebalance(torch.from_numpy(window), 12, 1, 1, 4, live, options=options, balancers=balancers)
        assert live.tolist() == expected.physical_to_logical_map.tolist()
    assert live.tolist() != (torch.arange(12).repeat(2, 1) % 8).tolist()


def test_auto_forgets_when_ranks_come_or_go_since_those_that_come_have_seen_nothing() -> None:
    rng = np.random.default_rng(1)
    windows = torch.from_numpy(rng.poisson(np.linspace(1, 90, 8), (5, 2, 8)))
    options, old, joined = PolicyOptions(mode="auto"), Balancers(), Balancers()
    live = torch.arange(12).repeat(2, 1) % 8
    for window in windows[:3]:
        live = rebalance(window, 12, 1, 1, 4, live, options=options, balancers=old)
    wider = torch.nn.functional.pad(live, (0, 6), value=-1)
    answers = [rebalance(windows[3], 18, 1, 1, 6, wider, options=options, balancers=each) for each in (old, joined)]
    assert answers[0].tolist() == answers[1].tolist()
    assert int(answers[0].min()) >= 0
    wide = answers[0]
    answers = [rebalance(windows[4], 18, 1, 1, 6, wide, options=options, balancers=each) for each in (old, joined)]
    assert answers[0].tolist() == answers[1].tolist()
