"""One budget for all layers: optimal against every choice, and slots where they are worth most."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import eplb_core as eplb
from eplb_core import InfeasiblePlacementError, Topology, place, plan_slots, spend_budget


@st.composite
def offers(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    """Gains and prices `[C, L]`; integers, so that sums are exact."""
    candidates, layers = draw(st.integers(1, 3)), draw(st.integers(1, 5))

    def table(least: int, most: int) -> Any:
        row = st.lists(st.integers(least, most), min_size=layers, max_size=layers)
        return draw(st.lists(row, min_size=candidates, max_size=candidates))

    return table(-2, 9), table(0, 5)


def value_of(gains: Any, prices: Any, choice: Any) -> tuple[float, int]:
    taken = [(gains[c][layer], prices[c][layer]) for layer, c in enumerate(choice) if c >= 0]
    return sum(gain for gain, _ in taken), sum(price for _, price in taken)


@pytest.mark.slow
@given(offers(), st.integers(0, 16))
def test_no_other_choice_within_the_budget_gains_more(case: Any, budget: int) -> None:
    gains, prices = case
    chosen = spend_budget(gains, prices, budget).tolist()
    gain, price = value_of(gains, prices, chosen)
    assert price <= budget
    others = [
        value_of(gains, prices, choice)
        for choice in itertools.product(range(-1, len(gains)), repeat=len(gains[0]))
        if value_of(gains, prices, choice)[1] <= budget
    ]
    best = max(other for other, _ in others)
    assert gain == best
    assert price == min(cost for other, cost in others if other == best)
    assert all(gains[c][layer] > 0 for layer, c in enumerate(chosen) if c >= 0)


@pytest.mark.slow
@given(offers())
def test_more_budget_never_gains_less(case: Any) -> None:
    gains, prices = case
    worth = [value_of(gains, prices, spend_budget(gains, prices, budget))[0] for budget in range(20)]
    assert worth == sorted(worth)


def test_of_equal_layers_the_first_are_served() -> None:
    assert spend_budget([1.0] * 4, [2] * 4, 5).tolist() == [0, 0, -1, -1]
    assert spend_budget([[1.0, 1.0], [1.0, 1.0]], [[2, 2], [2, 2]], 2).tolist() == [0, -1]
    assert spend_budget([[1.0], [1.0]], [[2], [1]], 2).tolist() == [1]


def test_a_budget_that_does_not_bind_takes_all_that_gains() -> None:
    assert spend_budget([3.0, 0.0, -1.0, 2.0], [1, 1, 1, 1], 10**9).tolist() == [0, -1, -1, 0]
    assert spend_budget([3.0, 1.0], [0, 7], 0).tolist() == [0, -1]


def test_what_must_be_had_comes_first() -> None:
    """An expert that nobody holds gains infinitely much: `should_rebalance` says so."""
    assert spend_budget([100.0, math.inf, 100.0, math.inf], [1, 2, 1, 2], 4).tolist() == [-1, 0, -1, 0]
    assert spend_budget([100.0, math.inf, 100.0, math.inf], [1, 2, 1, 2], 3).tolist() == [0, 0, -1, -1]


def test_a_verdict_is_cut_to_a_budget_of_transfers() -> None:
    rng = np.random.default_rng(4)
    load = rng.lognormal(3, 1, (6, 24))
    topology = Topology(4)
    live = eplb.ExpertLayout.trivial(6, 24, num_slots=28, topology=topology)
    offered = place(load, topology, num_slots=28, current=live)
    verdict = eplb.should_rebalance(live, load, offered)
    gains = np.where(verdict.layers, verdict.layer_gain, 0.0)
    taken = spend_budget(gains, verdict.layer_transfers, 15) >= 0
    assert 0 < eplb.transfers(live, live.replace(offered.layout, taken)).sum() <= 15


def test_nothing_to_choose_from_is_nothing_chosen() -> None:
    assert spend_budget([], [], 3).tolist() == []
    assert spend_budget(np.zeros((0, 2)), np.zeros((0, 2), np.int64), 3).tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([1.0, 2.0], [1], 3), r"`gains` \(shape \[2\]\) and `prices` \(shape \[1\]\) must both be \[C, L\] or \[L\]"),
        (([1.0, math.nan], [1, 1], 3), r"`gains` \(=nan\) must be a number at candidate 0, layer 1"),
        (([[1.0], [1.0]], [[1], [-2]], 3), r"`prices` \(=-2\) must be 0 or more at candidate 1, layer 0"),
        (([1.0], [1], -1), r"`budget` \(=-1\) must be at least 0"),
        ((np.ones((128, 1)), np.ones((128, 1), np.int64), 1), r"`gains` \(128 candidates\) must have 127 or fewer"),
        (([1e308, 1e308], [1, 1], 1), r"`gains` \(up to 1e\+308\) are too large to be added up"),
    ],
)
def test_bad_arguments_raise_with_their_values(arguments: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        spend_budget(*arguments)


# ---- slots -----------------------------------------------------------------------------------------------------------


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
