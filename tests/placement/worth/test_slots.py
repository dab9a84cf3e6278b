"""Slots of each layer: where they are worth most."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import eplb_core as eplb
from eplb_core import InfeasiblePlacementError, Topology, plan_slots


def test_slots_go_to_the_layers_that_need_them() -> None:
    """A19 and one step on: the skewed layer gets the slots that the even one has no use for."""
    load = [[300, 10, 10, 10, 10, 10], [50] * 6, [100, 100, 10, 10, 10, 10]]
    plan = plan_slots(load, Topology(2), total_slots=11)
    assert plan.choices == (3, 4, 5, 6, 7)
    assert plan.slots_per_rank.sum() <= 11
    assert plan.slots_per_rank.tolist() == [4, 3, 3]
    rows = plan.layout.physical_to_logical_map.reshape(3, 2, 4)
    assert ((rows >= 0).sum(axis=2) == plan.slots_per_rank[:, None]).all()
    assert (rows[1:, :, 3] == -1).all()


@pytest.mark.slow
@given(st.integers(0, 2**32 - 1), st.integers(0, 6))
def test_no_other_slots_of_layers_are_faster(seed: int, spare: int) -> None:
    load = np.random.default_rng(seed).integers(1, 99, (3, 6))
    plan = plan_slots(load, Topology(2), total_slots=9 + spare, choices=[3, 4, 5])
    at = [plan.choices.index(size) for size in plan.slots_per_rank.tolist()]
    mine = sum(plan.layer_time[c, layer] for layer, c in enumerate(at))
    for other in itertools.product(range(3), repeat=3):
        if sum(plan.choices[c] for c in other) <= 9 + spare:
            assert mine <= sum(plan.layer_time[c, layer] for layer, c in enumerate(other)) + 1e-9
    tokens = eplb.rank_load(plan.layout, load).max(axis=1)
    assert tokens.tolist() == pytest.approx([plan.layer_time[c, layer] for layer, c in enumerate(at)])
    assert plan.balancedness.tolist() == pytest.approx((load.sum(axis=1) / 2 / tokens).tolist())


def test_windows_and_a_cost_model_are_taken() -> None:
    load = np.array([[[300, 10, 10, 10]], [[10, 10, 10, 300]]])
    free = plan_slots(load, Topology(2), total_slots=4)
    assert free.slots_per_rank.tolist() == [3]
    # Reading an expert costs more than balance gains: replicas do not pay.
    dear = plan_slots(
        load, Topology(2), total_slots=4, cost=eplb.CostModel(token_s=1e-3, expert_s=1.0), window_passes=5
    )
    assert dear.slots_per_rank.tolist() == [2]
    assert dear.layout.num_slots == 4


def test_slot_plans_refuse_what_holds_no_model() -> None:
    load = np.ones((2, 8))
    with pytest.raises(
        InfeasiblePlacementError, match=r"`total_slots` \(=7\) must be at least 8: 4 on each of 2 layers"
    ):
        plan_slots(load, Topology(2), total_slots=7)
    with pytest.raises(ValueError, match=r"`choices` \(=3\) must be at least 4"):
        plan_slots(load, Topology(2), total_slots=9, choices=[3])
    with pytest.raises(ValueError, match=r"`choices` \(=\[\]\) must name one number of slots or more"):
        plan_slots(load, Topology(2), total_slots=9, choices=[])
    with pytest.raises(TypeError, match=r"`cost` \(=3\) must be a CostModel or None"):
        plan_slots(load, Topology(2), total_slots=9, cost=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"`topology` \(=int\) must be a Topology"):
        plan_slots(load, 2, total_slots=9)  # type: ignore[arg-type]


def test_no_layers_need_no_slots() -> None:
    plan = plan_slots(np.zeros((0, 8)), Topology(2), total_slots=0)
    assert (plan.layout.num_layers, plan.layout.num_slots, plan.slots_per_rank.shape) == (0, 8, (0,))


def test_shares_by_weight_need_no_more_slots() -> None:
    """What a slot is worth is judged with the shares that will be used."""
    load = np.random.default_rng(8).integers(1, 200, (3, 2, 8))
    topology = Topology(2)
    even, weighted = (plan_slots(load, topology, total_slots=11, dispatch=name) for name in ("even", "weighted"))
    assert weighted.slots_per_rank.sum() <= 11
    assert (weighted.layer_time.min(axis=0) <= even.layer_time.min(axis=0) + 1e-3).all()
    later = eplb.place(
        load, topology, num_slots=weighted.slots_per_rank * 2, current=weighted.layout, dispatch="weighted"
    )
    assert later.balancedness == pytest.approx(weighted.balancedness, abs=0.02)


def test_a_notebook_shows_what_slots_are_spent_on() -> None:
    plan = plan_slots([[300, 10, 10, 10, 10, 10], *[[50] * 6] * 9], Topology(2), total_slots=31)
    shown = plan._repr_html_()
    assert "31 slots on each rank, all layers together; of a layer: 3 on 9, 4 on 1" in shown
    assert f"<td>0</td><td>4</td><td>{plan.balancedness[0]:.4f}</td>" in shown
    assert "2 more layers" in shown
    assert "less time than with 3 on every layer" in shown
    without = plan_slots(np.zeros((1, 4)), Topology(2), total_slots=3)._repr_html_()
    assert "less time" not in without
    assert "<table" not in plan_slots(np.zeros((0, 4)), Topology(2), total_slots=3)._repr_html_()
