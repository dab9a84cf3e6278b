"""Layers that do not fit into staging pass through rows of their own; checked against plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core import ExpertLayout, Topology
from eplb_core.loading.moves.steps import plan_steps
from eplb_core.loading.pull_plan import PullKind
from tests.loading.worlds import layout_pairs

PAIRS, CAPACITY = layout_pairs(most_ranks=5), st.integers(1, 3)


def test_slots_of_a_rank_that_is_gone_change_in_one_step_though_staging_has_no_room_for_them() -> None:
    """Nothing is read into them."""
    old, new = (ExpertLayout([row], 2, topology=Topology(2)) for row in ([0, 1, -1, -1], [0, 1, 0, 1]))
    (step,) = plan_steps(old, new, rank=0, capacity=1, avoid_ranks=[1])
    assert step.after == new
    assert step.last


@settings(deadline=None, max_examples=150)
@given(PAIRS, CAPACITY)
def test_any_capacity_reaches_the_target_through_valid_layouts(pair: tuple[ExpertLayout, ...], capacity: int) -> None:
    old, new = pair
    ranks, per_rank = old.topology.num_ranks, old.slots_per_rank
    by_rank = [list(plan_steps(old, new, rank=rank, capacity=capacity)) for rank in range(ranks)]
    assert len({tuple((step.layer, step.after.digest, step.last) for step in steps) for steps in by_rank}) == 1
    live = old
    for at_step in zip(*by_rank, strict=True):
        step = at_step[0]
        assert step.before == live
        assert step.after == ExpertLayout(step.after.physical_to_logical_map, old.num_experts, topology=old.topology)
        changed = np.flatnonzero((step.before.physical_to_logical_map != step.after.physical_to_logical_map).any(1))
        assert changed.tolist() == [step.layer]
        assert step.last == (
            step.after.physical_to_logical_map[step.layer].tolist() == new.physical_to_logical_map[step.layer].tolist()
        )
        for own in at_step:
            assert np.isin(own.kind, (PullKind.READ, PullKind.RESTORE)).sum() <= capacity
        live = step.after
    assert live == new
    # Every step but a layer's last brings at least one expert to its rank.
    assert len(by_rank[0]) <= old.num_layers * (ranks * per_rank + 1)


def test_a_layer_that_fits_is_one_step() -> None:
    old = ExpertLayout([[0, 1, 2, 3]], 4, topology=Topology(2))
    new = ExpertLayout([[2, 3, 1, 0]], 4, topology=Topology(2))
    assert len(list(plan_steps(old, new, rank=0, capacity=2))) == 1


def test_last_copies_go_round_in_a_circle_with_one_slot_of_staging() -> None:
    old = ExpertLayout([[0, 1, 2, 3]], 4, topology=Topology(2))
    new = ExpertLayout([[2, 3, 1, 0]], 4, topology=Topology(2))
    rows = [step.after.physical_to_logical_map.tolist()[0] for step in plan_steps(old, new, rank=0, capacity=1)]
    assert rows == [[2, 1, 0, 3], [2, 3, 1, 0]]


@settings(deadline=None, max_examples=100)
@given(PAIRS, CAPACITY, st.integers(0, 4))
def test_copies_on_ranks_that_are_gone_count_for_nothing_on_the_way(
    pair: tuple[ExpertLayout, ...], capacity: int, dead: int
) -> None:
    """H1: with little staging an expert whose other copy is out of reach must not be overwritten on its last rank."""
    old, new = pair
    ranks, per_rank = old.topology.num_ranks, old.slots_per_rank
    dead %= ranks
    alive = np.repeat(np.arange(ranks) != dead, per_rank)
    held = [set(row[alive].tolist()) - {-1} for row in old.physical_to_logical_map]
    kept = [set(row[alive].tolist()) for row in new.physical_to_logical_map]
    if not all(was <= now for was, now in zip(held, kept, strict=True)):
        with pytest.raises(ValueError, match=r"`new` must keep expert \d+ of layer \d on a rank that lives"):
            list(plan_steps(old, new, rank=0, capacity=capacity, avoid_ranks=[dead]))
        return
    live = old
    for step in plan_steps(old, new, rank=0, capacity=capacity, avoid_ranks=[dead]):
        ExpertLayout(step.after.physical_to_logical_map, old.num_experts, topology=old.topology)
        assert held[step.layer] <= set(step.after.physical_to_logical_map[step.layer, alive].tolist())
        live = step.after
    assert live == new


def test_the_last_copy_that_can_be_read_is_not_overwritten_before_it_is_read() -> None:
    """Expert 2 is on ranks 1 and 2; rank 2 is gone. Rank 0 reads expert 3 first, and then 2: rank 1 must keep it."""
    old = ExpertLayout([[0, 1, 2, 3, 2, 3]], 4, topology=Topology(3))
    new = ExpertLayout([[3, 2, 0, 1, -1, -1]], 4, topology=Topology(3))
    for rank in (0, 1):
        kinds = [step.kind for step in plan_steps(old, new, rank=rank, capacity=1, avoid_ranks=[2])]
        assert not (np.stack(kinds) == PullKind.RESTORE).any()


def test_layers_left_out_or_unchanged_cost_nothing() -> None:
    old = ExpertLayout([[0, 1], [0, 1], [0, 1]], 2, topology=Topology(2))
    new = ExpertLayout([[1, 0], [0, 1], [1, 0]], 2, topology=Topology(2))
    assert [step.layer for step in plan_steps(old, new, rank=0, capacity=1)] == [0, 2]
    assert [step.layer for step in plan_steps(old, new, rank=0, capacity=1, layers=[1, 2])] == [2]
