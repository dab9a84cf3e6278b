"""`CostModel`: what it refuses, and what it finds in measured times."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_core import CostModel


def test_times_that_the_model_made_are_found_again() -> None:
    rng = np.random.default_rng(0)
    tokens, experts = rng.integers(100, 5000, 20), rng.integers(1, 9, 20)
    seconds = 3e-7 * tokens + 2e-5 * experts + 4e-4 * 6
    model = CostModel.fit(tokens, seconds, experts=experts, num_layers=6, expert_bytes=44e6)
    assert [model.token_s, model.expert_s, model.layer_s] == pytest.approx([3e-7, 2e-5, 4e-4], rel=1e-9)
    assert model.fit_error < 1e-12
    assert model.expert_bytes == 44e6


def test_no_time_is_negative_where_the_plain_answer_is() -> None:
    """The straight line through these crosses zero at 1,000 tokens; without an offset 2.5e-6 fits best."""
    tokens = [2000.0, 3000.0, 4000.0]
    model = CostModel.fit(tokens, [0.001, 0.002, 0.003])
    assert model.layer_s == 0.0
    best = sum(t * s for t, s in zip(tokens, [1e-3, 2e-3, 3e-3], strict=True)) / sum(t * t for t in tokens)
    assert model.token_s == pytest.approx(best)
    assert model.fit_error > 1e-4


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=8))
def test_no_other_times_that_are_not_negative_fit_better(rows: list[tuple[int, int, int]]) -> None:
    tokens, experts, seconds = zip(*rows, strict=True)
    try:
        model = CostModel.fit(tokens, seconds, experts=experts)
    except ValueError:
        return

    def error(token_s: float, expert_s: float, layer_s: float) -> float:
        return sum((s - token_s * t - expert_s * e - layer_s) ** 2 for t, e, s in rows)

    found = (model.token_s, model.expert_s, model.layer_s)
    for index in range(3):
        for step in (0.01, -0.01):
            other = list(found)
            other[index] = max(0.0, other[index] + step)
            assert error(*found) <= error(*other) + 1e-9
    assert model.fit_error == pytest.approx((error(*found) / len(rows)) ** 0.5, abs=1e-9)


def test_a_link_inside_a_node_is_another_than_between_nodes() -> None:
    model = CostModel(expert_bytes=10.0, node_bandwidth=5.0, network_bandwidth=2.0)
    assert (model.link_s(same_node=True), model.link_s(same_node=False)) == (2.0, 5.0)
    assert CostModel(expert_bytes=10.0).link_s(same_node=False) == 0.0


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"token_s": -1.0}, r"`token_s` \(=-1.0\) must be at least 0"),
        ({"stall": float("nan")}, r"`stall` \(=nan\) must be finite"),
        ({"node_bandwidth": 0.0}, r"`node_bandwidth` \(=0.0\) must be above 0"),
        ({"network_bandwidth": float("nan")}, r"`network_bandwidth` \(=nan\) must be finite"),
        ({"token_s": 0.0}, r"`token_s` \(=0.0\) or `expert_s` \(=0.0\) must be above 0"),
    ],
)
def test_a_model_refuses_what_is_no_cost(fields: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        CostModel(**fields)


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        (([1, 2], [1]), {}, r"`tokens` \(2 values\) must be as many as `seconds` \(1\)"),
        (([1, 2], [1, 2]), {"experts": [1]}, r"`experts` \(1 values\) must be as many as `seconds` \(2\)"),
        (([1], [1]), {}, r"`seconds` \(1 values\) must be at least 2"),
        (([5, 5, 5], [1, 2, 3]), {}, r"`seconds` \(3 values\) must tell token_s, layer_s apart"),
        (([1, 2, 3], [1, 2, 3]), {"experts": [2, 4, 6]}, r"must tell token_s, expert_s, layer_s apart"),
        (([1, 2, 3], [3, 2, 1]), {}, r"`seconds` must grow with `tokens` or `experts`"),
        (([[1, 2]], [3, 2]), {}, r"`tokens` \(shape \[1, 2\]\) must be \[n\]"),
        (([1, -2], [3, 2]), {}, r"`tokens` \(=-2.0\) must be at least 0"),
        (([1, 2], [3, 2]), {"num_layers": 0}, r"`num_layers` \(=0\) must be at least 1"),
    ],
)
def test_fit_refuses_what_tells_nothing(arguments: Any, options: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        CostModel.fit(*arguments, **options)


def test_fit_refuses_what_it_finds_itself() -> None:
    with pytest.raises(TypeError, match=r"`layer_s` \(=1\) must not be given to `fit`"):
        CostModel.fit([1, 2], [1, 2], layer_s=1)
