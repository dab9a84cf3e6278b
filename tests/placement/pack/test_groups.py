"""Groups on nodes: exact where the search ends, and a limit that is never too high."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_core.placement.pack import groups as _groups
from eplb_core.placement.pack.groups import assign_groups


def times(load: list[float], speed: list[float], home: tuple[int, ...]) -> float:
    return max(
        sum(value for value, node in zip(load, home, strict=True) if node == n) / speed[n] for n in range(len(speed))
    )


@given(
    st.lists(st.integers(0, 20).map(float), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.5, 1.0, 3.0])), min_size=1, max_size=3),
)
def test_groups_go_where_no_assignment_is_better(load: list[float], nodes: list[tuple[int, float]]) -> None:
    capacity, speed = [c for c, _ in nodes], [s for _, s in nodes]
    capacity[0] += max(0, len(load) - sum(capacity))
    home = np.full(len(load), -1)
    limit = assign_groups(np.array(load), np.array(capacity), np.array(speed), home)
    assert all(home.tolist().count(n) <= capacity[n] for n in range(len(nodes)))
    fits = [
        h for h in product(range(len(nodes)), repeat=len(load)) if all(h.count(n) <= c for n, c in enumerate(capacity))
    ]
    best = min(times(load, speed, h) for h in fits)
    assert times(load, speed, tuple(home.tolist())) == pytest.approx(best)
    assert limit == pytest.approx(best)


def test_groups_of_equal_load_go_to_the_lowest_nodes_first() -> None:
    home = np.full(4, -1)
    assert assign_groups(np.ones(4), np.array([2, 2]), np.ones(2), home) == 2.0
    assert home.tolist() == [0, 1, 0, 1]


def test_nodes_without_a_live_rank_take_no_group() -> None:
    home = np.full(2, -1)
    assert assign_groups(np.array([3.0, 1.0]), np.array([0, 2]), np.array([0.0, 1.0]), home) == 4.0
    assert home.tolist() == [1, 1]


@pytest.mark.slow
def test_a_search_that_is_cut_short_proves_nothing() -> None:
    """40 groups on 8 nodes: more assignments than it may visit; the answer is good, the limit is 0."""
    load = np.random.default_rng(0).lognormal(0, 1, 40)
    home = np.full(40, -1)
    assert assign_groups(load, np.full(8, 5), np.ones(8), home) == 0.0
    assert sorted(np.bincount(home).tolist()) == [5] * 8
    assert times(load.tolist(), [1.0] * 8, tuple(home.tolist())) <= 1.05 * max(load.sum() / 8, load.max())
    assert _groups._MOST_VISITS == 200_000
