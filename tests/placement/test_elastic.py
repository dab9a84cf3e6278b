"""Ranks that leave, die and join (FAULTS E, H, K), by the public functions together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import eplb_core as eplb
from eplb_core import (
    ExpertLayout,
    InfeasiblePlacementError,
    MissingExpertError,
    Topology,
    drop_ranks,
    lost_experts,
    place,
    plan_removal,
)
from eplb_core.testing.strategies import layouts, topologies
from tests.cases import by_rank


def plain_lost(layout: ExpertLayout, gone: set[int]) -> list[list[int]]:
    """Layer and expert of all that only ranks of `gone` hold."""
    lost = []
    for layer in range(layout.num_layers):
        held = {e for rank, row in enumerate(by_rank(layout, layer)) if rank not in gone for e in row}
        lost += [[layer, e] for e in range(layout.num_experts) if e not in held]
    return lost


@st.composite
def departures(draw: st.DrawFn) -> tuple[ExpertLayout, list[int], Any]:
    """A layout, ranks that may leave it, and a load."""
    ranks, per_rank, layers = draw(st.integers(2, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    leaving = draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=ranks - 1, unique=True))
    experts = draw(st.integers(1, (ranks - len(leaving)) * per_rank))
    topology = draw(topologies(num_ranks=ranks, num_nodes=(1, 3), speeds=True))
    load = draw(hnp.arrays(np.int64, (layers, experts), elements=st.integers(0, 50)))
    live = layouts(topology=topology, num_layers=layers, num_experts=experts, slots_per_rank=per_rank)
    return draw(live), leaving, load


# ---- leaving ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(departures(), st.booleans())
@settings(max_examples=80)
def test_retiring_moves_exactly_what_only_the_leaving_ranks_hold(case: Any, with_load: bool) -> None:
    """H4: any subset, no expert lost, and each transfer is one that nobody could avoid."""
    live, leaving, load = case
    ready = plan_removal(live, leaving, expert_load=load if with_load else None)
    received = eplb.transfers(live, ready)
    lost = plain_lost(live, set(leaving))
    assert received.sum(axis=1).tolist() == [sum(layer == at for at, _ in lost) for layer in range(live.num_layers)]
    assert not received[:, leaving].any()
    assert plain_lost(ready, set(leaving)) == []
    for layer in range(live.num_layers):
        for rank in leaving:
            assert by_rank(ready, layer)[rank] == by_rank(live, layer)[rank]
    # Slots that did not take a lost expert are as they were.
    changed = live.diff(ready)
    assert sorted(zip(changed.layer.tolist(), changed.new_expert.tolist(), strict=True)) == [tuple(x) for x in lost]


@pytest.mark.slow
@given(departures())
@settings(max_examples=40)
def test_ranks_that_were_retired_can_be_dropped(case: Any) -> None:
    live, leaving, load = case
    ready = plan_removal(live, leaving, expert_load=load)
    smaller = ready.without_ranks(leaving)
    stay = [rank for rank in range(live.topology.num_ranks) if rank not in leaving]
    assert by_rank(smaller) == [by_rank(ready)[rank] for rank in stay]
    assert smaller.topology.rank_speed.tolist() == [live.topology.rank_speed[rank] for rank in stay]
    node = live.topology.rank_to_node
    for a, rank_a in enumerate(stay):
        for b, rank_b in enumerate(stay):
            together = smaller.topology.rank_to_node[a] == smaller.topology.rank_to_node[b]
            assert together == (node[rank_a] == node[rank_b])


def test_without_layers_ranks_may_leave() -> None:
    empty = ExpertLayout.trivial(0, 8, num_slots=12, topology=Topology(4))
    assert plan_removal(empty, [0]) == empty


def test_a_chosen_rank_can_leave_and_not_only_the_last() -> None:
    """H4: retire rank 1 of 4."""
    live = ExpertLayout([[0, 1, 2, 3, 4, 5, 0, 1]], 6, topology=Topology(4))
    ready = plan_removal(live, [1])
    assert by_rank(ready)[1:3] == [[2, 3], [4, 5]]
    assert eplb.transfers(live, ready).sum() == 2
    assert sorted(ready.without_ranks([1]).physical_to_logical_map[0].tolist()) == [0, 1, 2, 3, 4, 5]


def test_the_replica_that_is_missed_least_makes_way() -> None:
    """An empty slot first; else, of experts 0 and 1 with two replicas on ranks that stay, the cold one."""
    live = ExpertLayout([[0, 1, 0, 1, 2, 3, 2, -1]], 4, topology=Topology(4))
    assert by_rank(plan_removal(live, [2])) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    full = ExpertLayout([[0, 1, 0, 1, 0, 2]], 3, topology=Topology(3))
    for load, cold in (([[90, 2, 5]], 1), ([[2, 90, 5]], 0)):
        ready = plan_removal(full, [2], expert_load=load)
        left = [expert for row in by_rank(ready)[:2] for expert in row]
        assert sorted(left) == sorted([0, 1, 2, 1 - cold])


def test_dropping_without_retiring_names_the_expert_that_would_be_lost() -> None:
    live = ExpertLayout([[0, 1, 2, 3, 0, 1]], 4, topology=Topology(3))
    with pytest.raises(MissingExpertError, match="expert 2 of layer 0 would lose its last slot with rank 1; 1 more"):
        live.without_ranks([1])


def test_retiring_nobody_changes_nothing() -> None:
    live = ExpertLayout([[0, 1, 2, 3, 0, 1]], 4, topology=Topology(3))
    assert plan_removal(live, []) == live
    assert live.without_ranks([]) == live


def test_too_few_slots_are_said_with_their_numbers() -> None:
    """252 slots for 256 experts: 28 ranks of 9; 29 are needed."""
    live = ExpertLayout.trivial(2, 256, num_slots=288, topology=Topology(32, 4))
    for function in (plan_removal, ExpertLayout.without_ranks):
        text = r"`ranks` \(4 of 32\) leave 28 ranks with 252 slots, fewer than the 256 experts; keep 29 ranks or more"
        with pytest.raises(InfeasiblePlacementError, match=text) as caught:
            function(live, [3, 9, 20, 31])
        assert (caught.value.num_live_slots, caught.value.num_experts) == (252, 256)
    alive = np.ones(32, np.bool_)
    alive[:4] = False
    with pytest.raises(InfeasiblePlacementError, match="28 active ranks have 252 slots, fewer than the 256 experts"):
        place(np.ones((2, 256)), Topology(32, 4), num_slots=288, current=live, active_ranks=alive)
    ready = plan_removal(live, [3, 9, 20])
    assert plain_lost(ready, {3, 9, 20}) == []
    uneven = ExpertLayout.trivial(1, 4, num_slots=5, topology=Topology(3))
    with pytest.raises(InfeasiblePlacementError, match=r"leave 2 ranks with 3 slots.*; keep 3 ranks or more"):
        plan_removal(uneven, [0], num_slots=5)


def test_slots_that_a_rank_does_not_have_are_not_filled() -> None:
    """A5: 10 slots on 4 ranks: the last two have two slots, and a third, empty column."""
    live = ExpertLayout.trivial(1, 6, num_slots=10, topology=Topology(4))
    assert by_rank(live)[2:] == [[0, 1, -1], [2, 3, -1]]
    ready = plan_removal(live, [1], num_slots=10)
    assert [row[2] for row in by_rank(ready)[2:]] == [-1, -1]
    assert plain_lost(ready, {1}) == []


# ---- dying -----------------------------------------------------------------------------------------------------------


def test_experts_that_died_are_named_and_get_a_slot() -> None:
    """H1: the only copies of 2 and 3 were on rank 1; 0 and 1 have two each and give one up."""
    live = ExpertLayout([[0, 1, 2, 3, 0, 1]], 4, topology=Topology(3))
    alive = np.array([True, False, True])
    assert lost_experts(live, alive).tolist() == [[0, 2], [0, 3]]
    answers = [place([[4, 3, 2, 1]], Topology(3), num_slots=6, current=live, active_ranks=alive) for _ in range(2)]
    assert answers[0].layout == answers[1].layout
    assert answers[0].transfers.tolist() == [2]
    rows = by_rank(answers[0].layout)
    assert rows[1] == [-1, -1]
    assert sorted(rows[0] + rows[2]) == [0, 1, 2, 3]


@pytest.mark.slow
@given(departures())
@settings(max_examples=60)
def test_after_a_death_no_more_moves_than_allowed_and_nothing_goes_to_the_dead(case: Any) -> None:
    """H7: zero tokens to a dead rank."""
    live, dead, load = case
    alive = np.ones(live.topology.num_ranks, np.bool_)
    alive[dead] = False
    lost = lost_experts(live, alive)
    assert lost.tolist() == plain_lost(live, set(dead))
    answer = place(load, live.topology, num_slots=live.num_slots, current=live, active_ranks=alive, max_transfers=2)
    assert plain_lost(answer.layout, set(dead)) == []
    needed = np.bincount(lost[:, 0], minlength=live.num_layers)
    assert (answer.transfers <= needed + 2).all()
    assert (eplb.rank_load(answer.layout, load)[:, dead] == 0).all()
    live_rows = np.repeat(alive, live.slots_per_rank)
    assert (answer.layout.physical_to_logical_map[:, ~live_rows] == -1).all()


# ---- joining, and all in turn ----------------------------------------------------------------------------------------


def test_ranks_that_join_are_filled_and_the_others_keep_their_slots() -> None:
    """H5, H9: 4 ranks become 6, on 3 nodes of which one is new."""
    rng = np.random.default_rng(1)
    load = rng.integers(1, 100, (3, 16))
    live = place(load, Topology(4, 2), num_slots=20).layout
    bigger = Topology(rank_to_node=[0, 0, 1, 1, 2, 2])
    grown = live.resized(bigger)
    assert (grown.physical_to_logical_map[:, 20:] == -1).all()
    answer = place(load, bigger, num_slots=30, current=grown)
    assert (eplb.rank_load(answer.layout, load)[:, 4:] > 0).all()
    assert answer.balancedness.mean() > 0.9
    # What a rank keeps stays in its slot.
    old, new = live.physical_to_logical_map, answer.layout.physical_to_logical_map[:, :20]
    for layer in range(3):
        for rank in range(4):
            before, after = old[layer, rank * 5 : rank * 5 + 5].tolist(), new[layer, rank * 5 : rank * 5 + 5].tolist()
            for expert in set(before) & set(after):
                assert before.index(expert) == after.index(expert)


@pytest.mark.slow
@given(st.lists(st.integers(2, 8), min_size=1, max_size=4), st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_scaling_up_and_down_loses_no_expert(sizes: list[int], seed: int) -> None:
    """H10: 2 -> 4 -> 8 -> 4 -> 2 and any other way; who leaves is drawn."""
    rng = np.random.default_rng(seed)
    experts, per_rank = 6, 4
    live = place(rng.integers(1, 99, (2, experts)), Topology(2), num_slots=2 * per_rank).layout
    for size in [*sizes, 2]:
        load = rng.integers(0, 99, (2, experts))
        ranks = live.topology.num_ranks
        if size < ranks:
            leaving = rng.choice(ranks, ranks - size, replace=False)
            ready = plan_removal(live, leaving, expert_load=load)
            assert not eplb.transfers(live, ready)[:, leaving].any()
            live = ready.without_ranks(leaving)
        elif size > ranks:
            live = live.resized(Topology(size))
        answer = place(load, live.topology, num_slots=size * per_rank, current=live)
        assert (answer.transfers == eplb.transfers(live, answer.layout).sum(axis=1)).all()
        live = answer.layout
        assert (live.replica_count > 0).all()
        assert live.num_slots == size * per_rank


def test_models_of_other_expert_counts_retire_the_same_ranks_on_their_own() -> None:
    """K1: target E 384 on 416 slots, draft E 128 on 128 slots: the draft has no spare slot and refuses."""
    topology = Topology(16, 2)
    target = ExpertLayout.trivial(1, 384, num_slots=416, topology=topology)
    draft = ExpertLayout.trivial(1, 128, num_slots=128, topology=topology)
    assert plain_lost(plan_removal(target, [5]), {5}) == []
    with pytest.raises(InfeasiblePlacementError, match="leave 15 ranks with 120 slots, fewer than the 128 experts"):
        plan_removal(draft, [5])
    spare = ExpertLayout.trivial(1, 128, num_slots=144, topology=topology)
    assert eplb.transfers(spare, plan_removal(spare, [5])).sum() == len(plain_lost(spare, {5}))


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [plan_removal, eplb.retire_ranks, ExpertLayout.without_ranks, drop_ranks])
def test_ranks_out_of_range_and_of_another_shape_are_refused(function: Any) -> None:
    live = ExpertLayout([[0, 1, 2, 3, 0, 1]], 4, topology=Topology(3))
    for rank in (-1, 3):
        with pytest.raises(IndexError, match=rf"`ranks` \(={rank}\) must be in \[0, 3\)"):
            function(live, [rank])
    with pytest.raises(ValueError, match=r"`ranks` \(shape \[2\]\) must be bools \[3\] or ints"):
        function(live, [True, False])
    assert function(live, [False, False, False]) == live


def test_options_are_checked() -> None:
    live = ExpertLayout([[0, 1, 2, 3, 0, 1]], 4, topology=Topology(3))
    with pytest.raises(ValueError, match=r"`num_slots` \(=3\) must be at least `num_experts` \(=4\)"):
        plan_removal(live, [1], num_slots=3)
    with pytest.raises(ValueError, match=r"`active_ranks` \(dtype bool, shape \[2\]\) must be bools \[3\]"):
        lost_experts(live, [True, False])
