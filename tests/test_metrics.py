"""Loads, evenness and transfers against the definitions (FAULTS G5, G6)."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eplb_core import (
    ExpertLayout,
    Topology,
    balancedness,
    mean_balancedness,
    rank_load,
    total_balancedness,
    transfers,
)
from eplb_core.metrics import check_shares
from tests.cases import layouts


def random_load(layout: ExpertLayout, *windows: int) -> npt.NDArray[np.float64]:
    shape = (*windows, layout.num_layers, layout.num_experts)
    return np.random.default_rng(layout.num_slots).integers(0, 100, shape).astype(np.float64)


@given(layouts(num_layers=(0, 3), num_experts=(1, 16)))
def test_a_rank_computes_its_share_of_each_expert(layout: ExpertLayout) -> None:
    load = random_load(layout)
    expected = np.zeros((layout.num_layers, layout.topology.num_ranks))
    for layer, row in enumerate(layout.physical_to_logical_map.tolist()):
        for slot, expert in enumerate(row):
            if expert >= 0:
                expected[layer, slot // layout.slots_per_rank] += load[layer, expert] / row.count(expert)
    np.testing.assert_allclose(rank_load(layout, load), expected, rtol=1e-12)
    np.testing.assert_array_equal(rank_load(layout, torch.from_numpy(load)), rank_load(layout, load))
    np.testing.assert_allclose(rank_load(layout, load).sum(axis=1), load.sum(axis=1), rtol=1e-12)


@given(layouts(num_layers=(0, 3), num_experts=(1, 16)))
def test_windows_are_loads_one_by_one(layout: ExpertLayout) -> None:
    load = random_load(layout, 3)
    np.testing.assert_array_equal(rank_load(layout, load), [rank_load(layout, window) for window in load])


def test_shares_say_what_each_slot_takes() -> None:
    layout = ExpertLayout([[0, 1, 0, -1]], 2, topology=Topology(2))
    assert rank_load(layout, [[8, 4]], shares=[[0.25, 1, 0.75, 9]]).tolist() == [[6.0, 6.0]]  # 9: of an empty slot
    by_window = rank_load(layout, [[[8, 4]], [[8, 0]]], shares=[[[1, 1, 0, 0]], [[0, 1, 1, 0]]])
    assert by_window.tolist() == [[[12.0, 0.0]], [[0.0, 8.0]]]


@pytest.mark.parametrize(
    ("shares", "text"),
    [
        ([[0.5, 1.0, 0.4, 0.0]], r"expert 0 \(sum 0.9\) must sum to 1 at layer 0"),
        ([[[0.5, 1.0, 0.5, 0.0]], [[1.0, 1.0, 0.25, 0.0]]], r"expert 0 \(sum 1.25\) must sum to 1 at layer 0"),
        ([[0.5, 1.0, 0.5 + 3e-6, 0.0]], r"expert 0 \(sum 1.000003\) must sum"),
        ([[-0.5, 1.0, 1.5, 0.0]], r"`shares` \(=-0.5\) must be in \[0, 1\] at layer 0, slot 0"),
        ([[0.0, 1.1, 1.0, 0.0]], r"`shares` \(=1.1\) must be in \[0, 1\] at layer 0, slot 1"),
    ],
)
def test_shares_are_fractions_that_sum_to_one(shares: npt.ArrayLike, text: str) -> None:
    layout = ExpertLayout([[0, 1, 0, -1]], 2, topology=Topology(2))
    with pytest.raises(ValueError, match=text):
        rank_load(layout, np.ones((len(np.asarray(shares)), 1, 2)), shares=shares)
    rounded = np.array([[0.9999998, 1.0000001, 1.5e-7, np.nan]], np.float32)  # as float32 may leave them
    assert check_shares(rounded, layout).tolist() == [[*rounded[0, :3].tolist(), 0.0]]
    assert check_shares([[0.5, 1, 0.0, 0]], layout, sums=False)[0, 0] == 0.5


def test_loads_that_do_not_fit_the_layout_raise_with_both_shapes() -> None:
    layout = ExpertLayout([[0, 1]], 2, topology=Topology(2))
    with pytest.raises(ValueError, match=r"`expert_load` \(shape \[1, 3\]\) must be \[1, 2\] or \[T, 1, 2\]"):
        rank_load(layout, [[1, 2, 3]])
    with pytest.raises(ValueError, match=r"`expert_load` \(shape \[2\]\) must be \[L, E\]"):
        rank_load(layout, [1, 2])
    with pytest.raises(ValueError, match=r"`expert_load` \(=nan\).*at layer 0, expert 1"):
        rank_load(layout, [[1, np.nan]])
    for shares in ([[1.0]], [[[1.0, 1.0]]]):
        with pytest.raises(ValueError, match=r"`shares` \(shape .*\) must be \[1, 2\]"):
            rank_load(layout, [[1, 2]], shares=shares)
    with pytest.raises(ValueError, match=r"`shares` \(shape \[2, 1, 2\]\) must be \[1, 2\] or \[3, 1, 2\]"):
        rank_load(layout, np.ones((3, 1, 2)), shares=np.ones((2, 1, 2)))


def test_balancedness_is_at_most_1_however_the_mean_rounds() -> None:
    assert sum([0.1] * 3) / 3 > 0.1
    assert balancedness([[0.1] * 3]).tolist() == [1.0]
    assert total_balancedness([[0.1] * 3]) == 1.0
    with pytest.raises(ValueError, match=r"`rank_load` \(up to 1e\+308\) is too large to be added up"):
        balancedness([[1e308, 1e308]])


def test_balancedness_is_over_ranks_and_not_over_layers() -> None:
    """G5: constant skew is not 1.0."""
    assert balancedness([[100, 200], [100, 200]]).tolist() == [0.75, 0.75]
    assert mean_balancedness([[100, 200], [100, 200]]) == 0.75


def test_layers_without_load_count_in_no_average() -> None:
    """G6: [0, 0] beside [100, 300]."""
    load = [[0, 0], [100, 300]]
    assert np.isnan(balancedness(load)).tolist() == [True, False]
    assert mean_balancedness(load) == pytest.approx(2 / 3)
    assert total_balancedness(load) == pytest.approx(2 / 3)
    assert math.isnan(mean_balancedness([[0, 0]]))
    assert math.isnan(total_balancedness([[0, 0]]))


def test_mean_and_total_are_different_numbers() -> None:
    load = [[1, 1], [100, 300]]
    assert mean_balancedness(load) == pytest.approx((1 + 2 / 3) / 2)
    assert total_balancedness(load) == pytest.approx(201 / 301)


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (3.0, r"`rank_load` \(shape \[\]\) must be \[..., R\]"),
        ([[]], r"`rank_load` \(shape \[1, 0\]\) must be \[..., R\] with one rank or more"),
        ([[1, -2]], r"`rank_load` \(=-2.0\) must be finite and not negative at \[0, 1\]"),
        ([[np.nan, 1]], r"`rank_load` \(=nan\) must be finite and not negative at \[0, 0\]"),
    ],
)
def test_loads_that_are_none_are_refused(load: float | list[list[float]], message: str) -> None:
    for function in (balancedness, total_balancedness, mean_balancedness):
        with pytest.raises(ValueError, match=message):
            function(load)


@given(layouts(num_layers=(0, 3), num_experts=(1, 16)), st.integers(0, 10**6))
def test_transfers_are_experts_that_a_rank_did_not_hold(old: ExpertLayout, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(row) for row in old.physical_to_logical_map]
    new = ExpertLayout(
        np.array(rows, dtype=np.int64).reshape(-1, old.num_slots), old.num_experts, topology=old.topology
    )
    got = transfers(old, new)
    assert got.dtype == np.int64
    ranks = old.topology.num_ranks
    for layer in range(old.num_layers):
        before, after = (x.physical_to_logical_map[layer].reshape(ranks, -1).tolist() for x in (old, new))
        assert got[layer].tolist() == [len(set(b) - set(a) - {-1}) for a, b in zip(before, after, strict=True)]
    assert not transfers(old, old).any()


def test_transfers_between_layouts_of_different_frames_are_refused() -> None:
    one = ExpertLayout([[0, 1]], 2, topology=Topology(2))
    with pytest.raises(ValueError, match="layouts differ in layers: 1 and 2"):
        transfers(one, ExpertLayout([[0, 1], [0, 1]], 2, topology=Topology(2)))
    with pytest.raises(ValueError, match="layouts differ in topology"):
        transfers(one, ExpertLayout([[0, 1]], 2, topology=Topology(1)))
