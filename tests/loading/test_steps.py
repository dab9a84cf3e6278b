"""Layers that do not fit into staging pass through rows of their own; checked against plain Python."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core import ExpertLayout, Topology
from eplb_core.loading._steps import plan_steps
from eplb_core.loading.pull_plan import READ, RESTORE


@st.composite
def cases(draw: st.DrawFn) -> tuple[ExpertLayout, ExpertLayout, int]:
    ranks, per_rank = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    experts = draw(st.integers(1, ranks * per_rank))
    capacity = draw(st.integers(1, 3))

    def row() -> list[int]:
        size = ranks * per_rank - experts
        extra = draw(st.lists(st.integers(-1, experts - 1), min_size=size, max_size=size))
        return draw(st.permutations([*range(experts), *extra]))

    topology = Topology(ranks)
    old, new = (ExpertLayout([row(), row()], experts, topology=topology) for _ in range(2))
    return old, new, capacity


@settings(deadline=None, max_examples=150)
@given(cases())
def test_any_capacity_reaches_the_target_through_valid_layouts(case: tuple[ExpertLayout, ExpertLayout, int]) -> None:
    old, new, capacity = case
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
            assert np.isin(own.kind, (READ, RESTORE)).sum() <= capacity
        live = step.after
    assert live == new
    # Every step but a layer's last brings at least one expert to its rank.
    assert len(by_rank[0]) <= 2 * (ranks * per_rank + 1)


def test_a_layer_that_fits_is_one_step() -> None:
    old = ExpertLayout([[0, 1, 2, 3]], 4, topology=Topology(2))
    new = ExpertLayout([[2, 3, 1, 0]], 4, topology=Topology(2))
    assert len(list(plan_steps(old, new, rank=0, capacity=2))) == 1


def test_last_copies_go_round_in_a_circle_with_one_slot_of_staging() -> None:
    old = ExpertLayout([[0, 1, 2, 3]], 4, topology=Topology(2))
    new = ExpertLayout([[2, 3, 1, 0]], 4, topology=Topology(2))
    rows = [step.after.physical_to_logical_map.tolist()[0] for step in plan_steps(old, new, rank=0, capacity=1)]
    assert rows == [[2, 1, 0, 3], [2, 3, 1, 0]]


def test_layers_left_out_or_unchanged_cost_nothing() -> None:
    old = ExpertLayout([[0, 1], [0, 1], [0, 1]], 2, topology=Topology(2))
    new = ExpertLayout([[1, 0], [0, 1], [1, 0]], 2, topology=Topology(2))
    assert [step.layer for step in plan_steps(old, new, rank=0, capacity=1)] == [0, 2]
    assert [step.layer for step in plan_steps(old, new, rank=0, capacity=1, layers=[1, 2])] == [2]
