"""Counts of experts that tokens use together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import eplb_core as eplb
from eplb_core.placement.affinity.pairs import check_pairs
from tests.placement.affinity.sends import clustered_tokens


def by_definition(ids: Any, experts: int) -> list[list[int]]:
    """Tokens that use both of two experts."""
    rows = [set(row) for row in ids]
    return [[sum({e, f} <= row for row in rows) for f in range(experts)] for e in range(experts)]


@given(hnp.arrays(np.int64, st.tuples(st.integers(0, 6), st.integers(1, 4)), elements=st.integers(-1, 4)))
def test_counts_are_those_of_the_definition(ids: Any) -> None:
    assert eplb.pair_counts(ids, 5).tolist() == by_definition(ids, 5)


def test_layers_are_counted_one_by_one_and_batches_add_up() -> None:
    ids = np.random.default_rng(0).permuted(np.tile(np.arange(6), (40, 3, 1)), axis=2)[:, :, :3]
    counts = eplb.pair_counts(ids, 6)
    assert counts.shape == (3, 6, 6)
    assert counts.dtype == np.int64
    assert (counts[1] == eplb.pair_counts(ids[:, 1], 6)).all()
    assert (eplb.pair_counts(ids[:15], 6) + eplb.pair_counts(ids[15:], 6) == counts).all()
    trace = eplb.TokenTrace(ids, num_experts=6, window_tokens=10)
    assert (eplb.pair_counts(trace.topk_ids, trace.num_experts) == counts).all()


@pytest.mark.parametrize(("bad", "error"), [([[0, 5]], IndexError), ([0, 1], ValueError), ([[0.5]], TypeError)])
def test_ids_that_are_no_experts_are_refused(bad: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="topk_ids"):
        eplb.pair_counts(bad, 5)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda p: p[:, :3], r"shape \[2, 3, 4\]"),
        (lambda p: p - 2.0, r"-2.0.*layer 0, experts 0 and 0"),
        (lambda p: np.where(p == 7.0, np.nan, p), r"nan.*layer 1, experts 0 and 1"),
        (lambda p: p + np.triu(np.ones((4, 4)), 1), r"\(=2.0\).*symmetric at layer 0, experts 0 and 1"),
    ],
)
def test_pairs_that_no_tokens_can_have_are_refused(change: Any, text: str) -> None:
    pairs = np.ones((2, 4, 4)) * (1 - np.eye(4))
    pairs[1, 0, 1] = pairs[1, 1, 0] = 7.0
    with pytest.raises(ValueError, match=text):
        check_pairs(change(pairs), 2, 4)


@pytest.mark.parametrize("tokens", [300, 4000])
def test_only_pairs_that_chance_does_not_explain_say_something(tokens: int) -> None:
    together = eplb.pair_counts(clustered_tokens(tokens, 4, 8, 4, loyalty=0.7), 32)
    independent = eplb.pair_counts(clustered_tokens(tokens, 4, 8, 4, loyalty=0.0), 32)
    rng = np.random.default_rng(1)
    chosen = np.argsort(-(rng.normal(0, 1.5, 32) + rng.gumbel(size=(tokens, 32))), axis=1)[:, :4]
    skewed = eplb.pair_counts(chosen, 32)
    pairs = np.stack([together, independent, skewed, np.zeros((32, 32), np.int64)])
    assert check_pairs(pairs, 4, 32).speak().tolist() == [True, False, False, False]
