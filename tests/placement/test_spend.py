"""One budget for all layers: optimal against every choice, and kept by `place`."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import eplb_core as eplb
from eplb_core import Topology, place, spend_budget


@st.composite
def offers(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    """Gains and prices `[C, L]`; integers, so that sums are exact."""
    candidates, layers = draw(st.integers(1, 3)), draw(st.integers(1, 5))

    def table(least: int, most: int) -> Any:
        return draw(hnp.arrays(np.int64, (candidates, layers), elements=st.integers(least, most))).tolist()

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


# ---- one budget of transfers for all layers --------------------------------------------------------------------------


def drifted(seed: int, layers: int = 8) -> tuple[Any, eplb.ExpertLayout]:
    """Loads that changed much on some layers and little on others, and the layout of before."""
    rng = np.random.default_rng(seed)
    before = rng.lognormal(0, 0.7, (layers, 24))
    after = before * rng.lognormal(0, 1, before.shape) ** np.linspace(0, 1, layers)[:, None]
    return after, eplb.place(before, Topology(4), num_slots=36).layout


@pytest.mark.parametrize("dispatch", ["even", "weighted"])
def test_a_budget_for_all_layers_is_kept_and_more_of_it_never_gains_less(dispatch: str) -> None:
    load, live = drifted(1)
    call: dict[str, Any] = {"num_slots": 36, "current": live, "dispatch": dispatch}
    reached, moved = [], []
    for budget in (0, 1, 2, 3, 5, 8, 13, 21, 1000):
        answer = place(load, live.topology, **call, max_total_transfers=budget)
        assert answer.transfers.sum() == eplb.transfers(live, answer.layout).sum() <= budget
        reached.append(answer.balancedness.sum())
        moved.append(answer.transfers.sum())
    assert reached == sorted(reached)
    assert moved[0] == 0
    assert reached[-1] >= place(load, live.topology, **call, transfer_price=0.0001).balancedness.sum()


def test_transfers_go_to_the_layers_that_gain_most() -> None:
    """Better than the same number for each layer."""
    load, live = drifted(2)
    each = place(load, live.topology, num_slots=36, current=live, max_transfers=2)
    answer = place(load, live.topology, num_slots=36, current=live, max_total_transfers=int(each.transfers.sum()))
    assert answer.balancedness.mean() > each.balancedness.mean() + 0.005
    assert answer.transfers.max() > 2


def test_what_must_move_does_whatever_the_budget_of_all_layers_is() -> None:
    load, live = drifted(3)
    active = np.arange(4) != 2
    lost = eplb.lost_experts(live, active)
    answer = place(load, live.topology, num_slots=36, current=live, active_ranks=active, max_total_transfers=1)
    assert answer.transfers.sum() == len(lost) > 1
    more = place(
        load, live.topology, num_slots=36, current=live, active_ranks=active, max_total_transfers=len(lost) + 4
    )
    assert len(lost) < more.transfers.sum() <= len(lost) + 4
    assert more.balancedness.mean() > answer.balancedness.mean()


def test_budgets_of_a_layer_and_of_all_hold_together() -> None:
    load, live = drifted(4)
    answer = place(load, live.topology, num_slots=36, current=live, max_transfers=3, max_total_transfers=9)
    assert answer.transfers.max() <= 3
    assert 0 < answer.transfers.sum() <= 9
    with pytest.raises(ValueError, match=r"`max_total_transfers` \(=-1\) must be at least 0"):
        place(load, live.topology, num_slots=36, current=live, max_total_transfers=-1)


def test_prices_whose_sum_no_int64_holds_are_refused_and_not_wrapped() -> None:
    """Four times 2**62 is 0 in int64: nothing would be taken, without a word."""
    with pytest.raises(ValueError, match=r"`budget` \(=9223372036854775807\) and `prices` .* count in a coarser unit"):
        spend_budget([1.0] * 4, [2**62] * 4, 2**63 - 1)
    assert spend_budget([1.0, 1.0], [2**62, 1], 3).tolist() == [-1, 0]
