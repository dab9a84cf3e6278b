from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core import (
    DispatchTables,
    EplbError,
    ExpertLayout,
    LoadCounter,
    Topology,
    balancedness,
    pair_counts,
    place,
    rank_load,
)
from tests.cases import PAIR, random_layout


def test_counts_are_pairs_of_token_and_expert_wherever_they_go() -> None:
    """FAULTS G1: only entries that were routed to the own rank were counted."""
    load = LoadCounter(1, 4)
    tables = DispatchTables(PAIR, rank=1, mode="row", load=load)
    tables.map(0, torch.tensor([[0, 1], [1, 2], [3, -1]]))
    load.roll()
    assert load.snapshot().numpy().tolist() == [[[1, 2, 1, 1]]]


def test_ranks_that_dispatch_their_own_tokens_are_summed_once() -> None:
    """FAULTS G2: 4 ranks with 10 tokens each are 40; ranks that share 10 tokens stay at 10."""
    counters = [LoadCounter(1, 4) for _ in range(4)]
    for rank, load in enumerate(counters):
        layout = ExpertLayout([[0, 1, 2, 3]], num_experts=4, topology=Topology(num_ranks=4))
        DispatchTables(layout, rank=rank, mode="row", load=load).map(0, torch.zeros(10, 1).long())
        load.roll()
    own = [load.snapshot().numpy() for load in counters]

    def all_reduce(windows: torch.Tensor) -> None:
        assert windows.dtype == torch.int64
        windows.add_(sum(torch.tensor(counts) for counts in own[1:]))

    assert counters[0].snapshot(all_reduce=all_reduce).numpy()[0, 0].tolist() == [40, 0, 0, 0]
    assert own[0][0, 0].tolist() == [10, 0, 0, 0]


def test_counts_by_slot_go_on_after_a_resize_and_those_of_before_are_refused() -> None:
    """FAULTS B9: from 4 to 5 ranks, 12 to 15 slots; what counts is by expert and keeps its size."""
    load = LoadCounter(1, 10)
    old = ExpertLayout.trivial(1, 10, num_slots=12, topology=Topology(num_ranks=4))
    new = old.resized(Topology(num_ranks=5), [0, 1, 2, 3, -1])
    load.add_slots(torch.ones(1, 12, dtype=torch.int64), old)
    with pytest.raises(ValueError, match=r"`counts` \(shape \[1, 12\]\) must be \[1, 15\]"):
        load.add_slots(torch.ones(1, 12, dtype=torch.int64), new)
    load.add_slots(torch.ones(1, 15, dtype=torch.int64), new)
    load.roll()
    assert load.snapshot().numpy()[0, 0].tolist() == [4, 4, 2, 2, 2, 2, 2, 2, 2, 2]


def test_padding_and_dummy_passes_are_no_load() -> None:
    """FAULTS G3, G4: 5 real and 11 filler rows; nothing is divided by a number of ranks."""
    load = LoadCounter(1, 4)
    tables = DispatchTables(PAIR, mode="weighted", load=load)
    ids = torch.ones(16, 2).long()
    tables.map(0, ids, num_tokens=torch.tensor(5, dtype=torch.int32))
    load.recording(False)
    tables.map(0, ids)
    load.recording(True)
    load.roll()
    assert load.snapshot().numpy()[0, 0].tolist() == [0, 10, 0, 0]


@given(st.integers(1, 4), st.lists(st.integers(0, 5), max_size=12), st.integers(0, 3))
@settings(max_examples=40)
def test_snapshots_hold_the_last_finished_windows_oldest_first(windows: int, sizes: list[int], open_size: int) -> None:
    load = LoadCounter(2, 4, windows=windows)
    layout = ExpertLayout([[0, 1, 2, 3]] * 2, num_experts=4, topology=Topology(num_ranks=2))
    tables = DispatchTables(layout, mode="even", load=load)
    for size in sizes:
        tables.map(1, torch.full((size, 1), 2))
        load.roll()
    tables.map(1, torch.full((open_size, 1), 2))
    counts = load.snapshot().numpy()
    kept = sizes[-windows:]
    assert counts.shape == (len(kept), 2, 4)
    assert counts.dtype == np.int64
    assert counts[:, 1, 2].tolist() == kept
    assert counts.sum() == sum(kept)


def test_counts_by_slot_are_folded_by_the_layout_of_their_time() -> None:
    """vLLM folds old counts with the new map: balancedness falls from 0.955 to 0.86 under a constant load."""
    old, new = random_layout(seed=1), random_layout(seed=2)
    true_load = np.random.default_rng(0).integers(50, 500, (4, 32)) * 60

    def by_slot(layout: ExpertLayout, layers: slice | list[int] = slice(None)) -> torch.Tensor:
        p2l = layout.physical_to_logical_map
        counts = np.take_along_axis(true_load // layout.replica_count, p2l, axis=1)
        return torch.tensor(counts[layers])

    load = LoadCounter(4, 32, windows=1)
    load.add_slots(by_slot(old), old)
    mixed = old.replace(new, [2])  # an install falls inside the window
    load.add_slots(by_slot(mixed, [2]), mixed, layers=[2])
    load.roll()
    counts = load.snapshot().numpy()[0]
    expected = (true_load // old.replica_count) * old.replica_count
    expected[2] += (true_load[2] // new.replica_count[2]) * new.replica_count[2]
    np.testing.assert_array_equal(counts, expected)
    wrong = LoadCounter(4, 32)
    wrong.add_slots(by_slot(old), new)
    wrong.roll()
    right, folded = (balancedness(rank_load(old, x)).mean() for x in (counts, wrong.snapshot().numpy()[0]))
    assert right != folded


def test_counts_at_empty_slots_and_while_not_recording_are_left_out() -> None:
    layout = ExpertLayout([[0, 1, -1, 2]], num_experts=3, topology=Topology(num_ranks=2))
    load = LoadCounter(1, 3)
    load.add_slots(torch.tensor([[1, 2, 99, 3]], dtype=torch.int32), layout)
    load.recording(False)
    load.add_slots(torch.tensor([[1, 2, 99, 3]]), layout)
    load.roll()
    assert load.snapshot().numpy().tolist() == [[[1, 2, 3]]]


def test_windows_whose_sum_exceeds_32_bits_are_summed_in_64() -> None:
    """FAULTS G13."""
    load = LoadCounter(1, 1, windows=1)
    layout = ExpertLayout([[0]], num_experts=1, topology=Topology(num_ranks=1))
    load.add_slots(torch.tensor([[2**31 - 1]]), layout)
    load.roll()
    assert load.snapshot(all_reduce=lambda x: x.mul_(4)).numpy().item() == 4 * (2**31 - 1)


def test_a_window_counts_beyond_32_bits() -> None:
    """FA8: 2^32 + 7 gave 7, and three adds of 2^31 - 1 wrapped."""
    load, layout = LoadCounter(1, 3, windows=2), ExpertLayout([[0, 1, 2, 0]], num_experts=3, topology=Topology(2))
    load.add_slots(torch.tensor([[2**32 + 7, 1, 2**40, 2**32]]), layout)
    for _ in range(3):
        load.add_slots(torch.tensor([[0, 2**31 - 1, 0, 0]], dtype=torch.int32), layout)
    load.add_slots(torch.tensor([[0, 0, 2**32 - 1, 0]], dtype=torch.uint32), layout)
    load.roll()
    assert load.snapshot().numpy().tolist() == [[[2**33 + 7, 3 * 2**31 - 2, 2**40 + 2**32 - 1]]]


def test_counts_that_int64_cannot_hold_are_refused_and_change_nothing() -> None:
    load, layout = LoadCounter(1, 3), ExpertLayout([[0, 1, 2, -1]], num_experts=3, topology=Topology(2))
    load.add_slots(torch.tensor([[2**60, 0, 5, -1]]), layout)  # what an empty slot has is left out
    for counts, error in (
        (torch.tensor([[2**63 - 1, 0, 0, 0]]), OverflowError),
        (torch.tensor([[1, -5, 0, 0]]), ValueError),
        (torch.tensor([[1, 2, 3, 4]], dtype=torch.uint64), TypeError),
        (torch.tensor([[True, False, True, False]]), TypeError),
    ):
        with pytest.raises(error, match=r"`counts` \("):
            load.add_slots(counts, layout)
    load.roll()
    assert load.snapshot().numpy().tolist() == [[[2**60, 0, 5]]]
    LoadCounter(0, 3).add_slots(torch.zeros((0, 4), dtype=torch.int64), empty())


def empty() -> ExpertLayout:
    return ExpertLayout(np.empty((0, 4), dtype=np.int64), num_experts=3, topology=Topology(2))


def test_windows_that_have_finished_are_not_counted_beyond_those_kept() -> None:
    """The int32 count of all windows would wrap after 2^31 passes, and snapshots with it."""
    load = LoadCounter(1, 1, windows=2)
    for _ in range(5):
        load.roll()
    assert load.state.tolist()[2] == 2
    assert load.snapshot().numpy().shape == (2, 1, 1)


def test_a_sum_over_ranks_that_raises_costs_no_snapshot() -> None:
    load = LoadCounter(1, 2)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            load.snapshot(all_reduce=lambda counts: 1 // 0)
    assert load.snapshot().numpy().shape == (0, 1, 2)


def test_two_snapshots_may_be_unread_and_dropped_ones_do_not_count() -> None:
    load = LoadCounter(1, 2)
    first, second = load.snapshot(), load.snapshot()
    assert first.ready()
    with pytest.raises(EplbError, match=r"two snapshots are unread"):
        load.snapshot()
    del second
    third = load.snapshot()
    assert first.numpy() is first.numpy()
    assert first.ready()
    assert load.snapshot().numpy().shape == third.numpy().shape == (0, 1, 2)


def test_bad_arguments_of_counters_are_named() -> None:
    with pytest.raises(ValueError, match=r"`windows` \(=0\) must be at least 1"):
        LoadCounter(1, 1, windows=0)
    load = LoadCounter(1, 4)
    with pytest.raises(IndexError, match=r"`layer` \(=1\) must be in \[0, 1\)"):
        load.layer(1)
    assert load.layer(0).data_ptr() == load.count.data_ptr()
    with pytest.raises(ValueError, match=r"`counts` \(shape \[1, 5\]\) must be \[1, 6\]"):
        load.add_slots(torch.zeros(1, 5), PAIR)
    with pytest.raises(TypeError, match=r"`counts` \(dtype torch.float32\) must be integers"):
        load.add_slots(torch.full((1, 6), 0.9), PAIR)
    with pytest.raises(ValueError, match=r"must have this counter's 2 layers and 4 experts"):
        LoadCounter(2, 4).add_slots(torch.zeros(1, 6), PAIR)


@pytest.mark.parametrize(
    "make", [lambda: DispatchTables(PAIR, device="cuda:0"), lambda: LoadCounter(1, 4, device="cuda:0")]
)
def test_a_gpu_without_triton_is_refused(make: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ImportError, match=r"`device` \(=cuda:0\) needs Triton; install it"):
        make()


def test_recording_is_as_it_was_at_the_end_of_its_block_also_after_an_error() -> None:
    load = LoadCounter(1, 2)
    layout = ExpertLayout([[0, 1]], num_experts=2, topology=Topology(num_ranks=1))

    def warm_up() -> None:
        with load.recording(False):
            load.add_slots(torch.tensor([[7, 7]]), layout)
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        warm_up()
    load.add_slots(torch.tensor([[1, 2]]), layout)
    load.recording(False)
    with load.recording(False):
        pass
    load.add_slots(torch.tensor([[7, 7]]), layout)
    with load.recording(True):
        load.add_slots(torch.tensor([[1, 2]]), layout)
    load.add_slots(torch.tensor([[7, 7]]), layout)
    load.roll()
    assert load.snapshot().numpy().tolist() == [[[2, 4]]]


def tokens(rows: int, seed: int, experts: int = 12) -> torch.Tensor:
    """Top-4 ids of which some are -1 and some stand twice."""
    return torch.tensor(np.random.default_rng(seed).integers(-1, experts, (rows, 4)), dtype=torch.int32)


@pytest.mark.parametrize("mode", ["static", "weighted", "near", "random", "quota"])
def test_pairs_of_every_token_are_those_of_the_ids(mode: Any) -> None:
    layout = ExpertLayout.trivial(2, 12, num_slots=16, topology=Topology(4, 2))
    load = LoadCounter(2, 12, windows=2, pairs=True, pair_every=1)
    tables = DispatchTables(layout, rank=1, mode=mode, load=load)
    wanted = np.zeros((4, 2, 12, 12), np.int64)
    for window in range(4):
        for call in range(4):
            ids = tokens(40, 4 * window + call)
            wanted[window, call % 2] += pair_counts(ids[:30].numpy(), 12)
            given = torch.cat([ids, torch.full((40, 1), 12, dtype=torch.int32)], 1)
            tables.map(call % 2, given, num_tokens=torch.tensor(30, dtype=torch.int32), num_shared=1, out=given)
        with load.recording(on=False):
            tables.map(0, tokens(40, 99))
        if window < 3:
            load.roll()
    assert (load.snapshot_pairs().numpy() == wanted[1:3].sum(axis=0)).all()  # neither the oldest nor the one begun
    diagonal = wanted[1:3].diagonal(axis1=2, axis2=3)
    assert (load.snapshot().numpy() >= diagonal).all()  # which counts an id that stands twice once


def test_one_token_in_so_many_is_counted_wherever_it_stands() -> None:
    load = LoadCounter(1, 64, pairs=True, pair_every=8)
    tables = DispatchTables(ExpertLayout.trivial(1, 64, num_slots=64, topology=Topology(1)), mode="static", load=load)
    ids = torch.arange(60, dtype=torch.int32)[:, None]  # the row is the expert
    for _ in range(800):
        tables.map(0, ids)
    load.roll()
    counted = load.snapshot_pairs().numpy()[0].diagonal()[:60]
    assert 50 < counted.min() <= counted.max() < 150
    assert counted.sum() == pytest.approx(800 * 60 / 8, rel=0.05)


def test_of_a_large_batch_256_tokens_are_counted_at_most() -> None:
    load = LoadCounter(1, 4, pairs=True, pair_every=2)
    tables = DispatchTables(PAIR, mode="weighted", load=load)
    tables.map(0, torch.tensor([[0, 3]] * 4000))
    load.roll()
    pairs = load.snapshot_pairs().numpy()[0]
    assert 240 <= pairs[0, 3] == pairs[3, 0] == pairs[0, 0] <= 256
    placed = place(load.snapshot().numpy(), Topology(2, 2), num_slots=6, pairs=pairs[None], effort=0.01)
    assert placed.sends_per_token is not None
    assert placed.sends_per_token[0] >= 0.0


def test_pairs_that_were_not_asked_for_or_not_read_are_refused() -> None:
    with pytest.raises(ValueError, match="pairs=True"):
        LoadCounter(1, 4).snapshot_pairs()
    with pytest.raises(ValueError, match="pair_every"):
        LoadCounter(1, 4, pairs=True, pair_every=0)
    with pytest.raises(ValueError, match="pair_every"):
        LoadCounter(1, 4, pairs=True, pair_every=1 << 20)
    with pytest.raises(ValueError, match="windows"):
        LoadCounter(0, 4, pairs=True, windows=1 << 40)
    with pytest.raises(TypeError, match="pairs"):
        LoadCounter(1, 4, pairs=64)  # type: ignore[arg-type]
    load = LoadCounter(1, 4, pairs=True)
    snapshot = load.snapshot_pairs(all_reduce=lambda pairs: pairs[0, 1, 2].add_(1))
    with pytest.raises(EplbError, match="unread"):
        load.snapshot_pairs()
    assert snapshot.numpy()[0].tolist() == [[0] * 4, [0, 0, 1, 0], [0, 1, 0, 0], [0] * 4]
    assert load.snapshot_pairs().ready()
