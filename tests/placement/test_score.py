"""Scores against the definition, and bounds against every layout."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core.placement.pack.block import new_scratch
from eplb_core.placement.score import _shares_fit, bound_layers, score_layers


def score(
    load: list[list[float]],
    row: list[int],
    capacity: list[int],
    speed: list[float],
    weights: list[float] | None = None,
) -> float:
    """Windows `[T, E]` of one layer."""
    windows, each = np.array(load, dtype=np.float64)[:, None, :], np.array(weights or [1.0] * len(load))
    return float(score_layers(windows, each, np.array([row]), np.array(capacity), np.array(speed))[0])


def test_score_is_the_mean_over_windows_with_load() -> None:
    assert score([[4, 0], [2, 2], [0, 0]], [0, 1], [1, 1], [1.0, 1.0]) == (0.5 + 1.0) / 2
    assert np.isnan(score([[0, 0]], [0, 1], [1, 1], [1.0, 1.0]))
    assert score([[4, 0], [2, 2]], [0, 1], [1, 1], [1.0, 1.0], [3.0, 1.0]) == (3 * 0.5 + 1.0) / 4
    assert np.isnan(score([[4, 0]], [0, 1], [1, 1], [1.0, 1.0], [0.0]))


def test_replicas_on_ranks_that_are_out_take_nothing() -> None:
    """Expert 0 has one live replica; the mean is over live ranks."""
    assert score([[6, 2]], [0, 1, 0, -1, -1, 0], [2, 1, 0], [1.0, 1.0, 5.0]) == 8 / 2 / 5
    assert np.isnan(score([[6, 2]], [0, 0, 1], [1, 1, 0], [1.0, 1.0, 1.0]))  # expert 1 is nowhere
    assert score([[6, 0]], [0, 0, 1], [1, 1, 0], [1.0, 1.0, 1.0]) == 1.0  # and is not asked for


def test_a_fast_rank_may_hold_more() -> None:
    assert score([[6, 2]], [0, 1], [1, 1], [3.0, 1.0]) == 1.0
    assert score([[6, 2]], [0, 1], [1, 1], [1.0, 1.0]) == 8 / 2 / 6


def bound(load: list[list[float]], capacity: list[int], speed: list[float], limit: float, one: bool) -> float:
    out = np.zeros(1)
    experts = len(load[0])
    scratch = new_scratch(experts, len(capacity), max(capacity))
    windows = np.array(load, dtype=np.float64)[:, None, :]
    bound_layers(windows, np.ones(len(load)), np.array(capacity), np.array(speed), np.array([limit]), one, scratch, out)
    return float(out[0])


@settings(max_examples=60)
@given(
    st.integers(1, 3).flatmap(
        lambda experts: st.lists(
            st.lists(st.integers(0, 9).map(float), min_size=experts, max_size=experts), min_size=1, max_size=2
        )
    ),
    st.lists(st.integers(0, 2), min_size=1, max_size=3),
    st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=3, max_size=3),
)
def test_no_layout_scores_above_the_bound(load: list[list[float]], capacity: list[int], speed: list[float]) -> None:
    """All layouts, also with empty slots and pairs on a rank: the proof needs neither."""
    experts, speed = len(load[0]), speed[: len(capacity)]
    capacity[0] += max(0, experts - sum(capacity))
    stride = max(capacity)
    limit = bound(load, capacity, speed, 0.0, False)
    if not any(map(any, load)):
        assert np.isnan(limit)
        return
    best = 0.0
    for held in product(range(-1, experts), repeat=sum(capacity)):
        if set(held) >= set(range(experts)):
            slots = iter(held)
            row = [next(slots) if s < c else -1 for c in capacity for s in range(stride)]
            best = max(best, score(load, row, capacity, speed))
    assert best <= limit <= 1.0


def test_the_bound_of_one_window_is_the_limit_that_the_search_proved() -> None:
    assert bound([[6, 2]], [1, 1], [1.0, 1.0], 6.0, True) == pytest.approx(4 / 6)
    assert bound([[6, 2]], [1, 1], [1.0, 1.0], 0.0, True) == 1.0


def test_the_largest_share_may_be_on_the_fastest_rank() -> None:
    assert bound([[6, 2]], [1, 1], [3.0, 1.0], 0.0, False) == score([[6, 2]], [0, 1], [1, 1], [3.0, 1.0]) == 1.0


def test_the_bound_of_windows_is_the_mean_of_theirs() -> None:
    """One slot each: 4 of 6 where the hot expert has 6 of 8, all of it where both have the same."""
    assert bound([[6, 2], [3, 3], [0, 0]], [1, 1], [1.0, 1.0], 0.0, False) == pytest.approx((4 / 6 + 1) / 2)


def test_shares_fit_where_each_expert_needs_few_enough_slots() -> None:
    weight = np.array([6.0, 2.0, 0.0])
    assert _shares_fit(3.0, 3, 2, 4, weight)
    assert not _shares_fit(3.0, 3, 2, 3, weight)  # too few slots
    assert not _shares_fit(2.0, 3, 2, 9, weight)  # three replicas on two ranks
