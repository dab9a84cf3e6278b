"""Nodes that tokens reach: counted as from the definition, predicted well from pairs, and never below the bound."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eplb_core as eplb
from eplb_core import ExpertLayout, Topology, count_sends, place
from eplb_core.placement.affinity.pairs import check_pairs
from eplb_core.placement.affinity.sends import predict_sends
from tests.placement.affinity.sends import Ids, clustered_tokens, nodes_of, sends_per_token

TOKENS = clustered_tokens(4000, 4, 8, 4, loyalty=0.8)
COUNTED, JUDGED = TOKENS[::2], TOKENS[1::2]
LOAD = np.bincount(COUNTED.ravel(), minlength=32)[None]
PAIRS = eplb.pair_counts(COUNTED, 32)[None]


def by_definition(layout: ExpertLayout, tokens: Ids) -> float:
    """Nodes that a token reaches: other ones, and its own where that holds any of its experts."""
    held, nodes = nodes_of(layout), range(layout.topology.num_nodes)
    own = [any(node in held[expert] for expert in token) for token in tokens.tolist() for node in nodes]
    return float(np.mean(own)) + sends_per_token(layout, tokens)


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), nodes=st.integers(1, 5), spare=st.integers(0, 4))
def test_near_sends_are_those_of_the_definition(seed: int, nodes: int, spare: int) -> None:
    rng = np.random.default_rng(seed)
    each = -(-7 // nodes) + spare
    rows = [[*rng.permutation(7), *rng.integers(0, 7, nodes * each - 7)]]
    layout = ExpertLayout(rows, 7, topology=Topology(nodes, nodes))
    tokens = np.stack([rng.permutation(7)[:3] for _ in range(20)])
    found = count_sends(layout, tokens)
    assert found.sends[0] == pytest.approx(sends_per_token(layout, tokens))
    assert found.nodes[0] == pytest.approx(by_definition(layout, tokens))


def test_by_shares_each_expert_is_drawn_by_itself() -> None:
    layout = ExpertLayout([[0, 1, 0, 2]], 3, topology=Topology(2, 2))
    found = count_sends(layout, [[0, 1], [2, -1], [-1, -1]], shares=[[0.25, 1.0, 0.75, 1.0]])
    assert found.nodes[0] == pytest.approx((1.75 + 1.0) / 2)
    assert found.sends[0] == pytest.approx((1.75 + 1.0) / 4)


def test_tokens_come_from_ranks_that_hold_something() -> None:
    layout = ExpertLayout([[0, 1, -1, -1, 1, 2]], 3, topology=Topology(rank_to_node=[0, 0, 1]))
    assert count_sends(layout, [[0, 1], [1, 2], [0, 2]]).sends.tolist() == [(0.5 + 0.5 + 1.0) / 3]


@pytest.mark.parametrize("ids", [np.zeros((0, 2), np.int64), [[-1, -1]]])
def test_layers_without_tokens_are_nan(ids: Any) -> None:
    layout = ExpertLayout.trivial(1, 4, num_slots=4, topology=Topology(2, 2))
    assert np.isnan(count_sends(layout, ids).sends).tolist() == [True]


def test_what_does_not_fit_is_refused() -> None:
    layout = ExpertLayout.trivial(2, 4, num_slots=4, topology=Topology(2, 2))
    with pytest.raises(ValueError, match="of 1 layers"):
        count_sends(layout, [[0, 1]])
    with pytest.raises(IndexError, match="topk_ids"):
        count_sends(layout, [[[0, 1], [2, 4]]])
    with pytest.raises(ValueError, match="shares"):
        count_sends(layout, [[[0, 1], [2, 3]]], shares=np.zeros((2, 4)))


@pytest.mark.parametrize("pairs", [False, True])
def test_a_prediction_from_pairs_is_near_what_other_tokens_do(pairs: bool) -> None:
    placed = place(LOAD, Topology(8, 4), num_slots=40, effort=0.1, pairs=PAIRS, traffic_price=0.1 if pairs else 0.0)
    found = count_sends(placed.layout, JUDGED)
    assert placed.sends_per_token is not None
    assert placed.nodes_per_token is not None
    assert placed.sends_bound is not None
    assert placed.sends_per_token[0] == pytest.approx(found.sends[0], rel=0.04)
    assert placed.nodes_per_token[0] == pytest.approx(found.nodes[0], rel=0.04)
    assert 0.3 < placed.sends_bound[0] <= found.sends[0]
    assert placed._columns()["sends_per_token"] is placed.sends_per_token


@settings(max_examples=20)
@given(seed=st.integers(0, 1000), slots=st.integers(12, 24))
def test_no_layout_is_below_the_bound(seed: int, slots: int) -> None:
    tokens = clustered_tokens(50, 3, 4, 3, loyalty=0.9, seed=seed)
    load, pairs = np.bincount(tokens.ravel(), minlength=12)[None], eplb.pair_counts(tokens, 12)[None]
    placed = place(load, Topology(rank_to_node=[0, 0, 1, 2]), num_slots=slots, pairs=pairs, effort=0.01)
    assert placed.sends_bound is not None
    assert placed.sends_bound[0] <= count_sends(placed.layout, tokens).sends[0] + 1e-12


def test_tokens_of_one_expert_have_no_second_one() -> None:
    ids = TOKENS[:, :1]
    load = np.bincount(ids.ravel(), minlength=32)[None]
    placed = place(load, Topology(8, 4), num_slots=40, effort=0.01, pairs=eplb.pair_counts(ids, 32)[None])
    assert placed.nodes_per_token is not None
    assert placed.sends_per_token is not None
    assert placed.nodes_per_token.tolist() == [1.0]
    assert placed.sends_per_token[0] == pytest.approx(count_sends(placed.layout, ids).sends[0], abs=0.03)


def test_of_tokens_that_have_not_equally_many_experts_nothing_is_said() -> None:
    """Where tokens of one expert need no send, the others' pairs bound nothing."""
    ids = TOKENS[:1000].copy()
    ids[::2] = [0, -1, -1, -1]
    load = np.bincount(ids[ids >= 0], minlength=32)[None]
    placed = place(load, Topology(8, 4), num_slots=40, effort=0.01, pairs=eplb.pair_counts(ids, 32)[None])
    for said in (placed.nodes_per_token, placed.sends_per_token, placed.sends_bound):
        assert said is not None
        assert np.isnan(said).all()


@pytest.mark.parametrize("scale", [2.0**40, 2.0**900, 2.0**1010])
def test_pairs_of_any_size_say_the_same(scale: float) -> None:
    layout = ExpertLayout.trivial(1, 32, num_slots=32, topology=Topology(8, 4))
    known, scaled = (predict_sends(layout, check_pairs(PAIRS * by, 1, 32)).sends[0] for by in (2.0**30, scale))
    assert scaled == pytest.approx(known, rel=1e-6)


def test_what_pairs_do_not_say_is_nan_and_without_them_nothing_is_said() -> None:
    off = PAIRS * (1 - np.eye(32))
    unknown = place(LOAD, Topology(8, 4), num_slots=40, effort=0.01, pairs=off)
    assert unknown.sends_per_token is not None
    assert np.isnan(unknown.sends_per_token).all()
    one = place(LOAD, Topology(8), num_slots=40, effort=0.01, pairs=off)
    assert one.sends_per_token is not None
    assert one.nodes_per_token is not None
    assert (one.sends_per_token.tolist(), one.nodes_per_token.tolist()) == ([0.0], [1.0])
    empty = place(LOAD, Topology(8, 4), num_slots=40, pairs=0 * PAIRS)
    assert empty.sends_bound is not None
    assert np.isnan(empty.sends_bound).all()
    assert place(LOAD, Topology(8, 4), num_slots=40).sends_per_token is None
    many = place(LOAD, Topology(16, 16), num_slots=48, effort=0.01, pairs=PAIRS)
    assert many.sends_per_token is not None
    assert np.isnan(many.sends_per_token).all()
