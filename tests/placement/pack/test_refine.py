"""The search keeps its books: shares, loads, counts, homes and the order of the ranks, whatever it tries."""

from __future__ import annotations

from functools import reduce
from operator import add

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core.placement.pack import block as k
from eplb_core.placement.pack import refine
from eplb_core.placement.pack.block import Scratch, new_scratch


def block(rows: list[list[int]], load: list[float], nodes: list[int] | None = None) -> tuple[Scratch, int]:
    """Scratch that holds this assignment, equal speeds, no homes; and the slots of each rank."""
    ranks, stride = len(rows), len(rows[0])
    scratch = new_scratch(len(load), ranks, stride)
    scratch.reals[k.EXPERT_LOAD, : len(load)] = load
    scratch.reals[k.SPEED : k.PACE + 1, :ranks] = 1.0
    scratch.ints[k.HOME] = -1
    scratch.ints[k.NODE, :ranks] = nodes or [0] * ranks
    scratch.ints[k.EXPERT, : ranks * stride] = np.array(rows).reshape(-1)
    scratch.ints[k.REPLICAS, : len(load)] = np.bincount(np.array(rows).reshape(-1), minlength=len(load))
    k.sort_by_load(len(load), scratch)
    k.write_shares(np.full(ranks, stride), stride, scratch)
    return scratch, stride


def allow(scratch: Scratch, work: int) -> None:
    pinned = bool((scratch.ints[k.HOME] >= 0).any())
    scratch.ints[k.WORK, :5] = [0, work, 1, pinned, -1]


def rows_of(scratch: Scratch, ranks: int, stride: int) -> list[list[int]]:
    return [sorted(row) for row in scratch.ints[k.EXPERT, : ranks * stride].reshape(ranks, stride).tolist()]


def check_books(scratch: Scratch, ranks: int, stride: int, experts: int) -> None:
    rows = scratch.ints[k.EXPERT, : ranks * stride].reshape(ranks, stride).tolist()
    weight, count = scratch.reals[k.EXPERT_LOAD], scratch.ints[k.REPLICAS]
    assert all(len(set(row)) == stride for row in rows)
    assert count[:experts].tolist() == [sum(row.count(e) for row in rows) for e in range(experts)]
    assert count[:experts].min() > 0
    for rank, row in enumerate(rows):
        share = scratch.reals[k.SHARE, rank * stride : (rank + 1) * stride].tolist()
        assert share == [weight[e] / count[e] for e in row] == sorted(share, reverse=True)
        assert scratch.reals[k.RANK_LOAD, rank] == reduce(
            add, share, 0.0
        )  # in order: `sum` rounds once at the end from Python 3.12 on
    home, node = scratch.ints[k.HOME], scratch.ints[k.NODE]
    for e in range(experts):
        if home[e] >= 0:
            at_home = sum(node[rank] == home[e] and e in row for rank, row in enumerate(rows))
            assert scratch.ints[k.HOME_COUNT, e] == at_home > 0


def test_an_exchange_takes_off_what_is_too_much() -> None:
    scratch, stride = block([[0, 1], [2, 3]], [5.0, 4.0, 2.0, 1.0])
    allow(scratch, 10)
    assert refine.refine(4, np.array([2, 2]), stride, 6.0, 2, scratch) == 6.0
    assert sorted(rows_of(scratch, 2, 2)) == [[0, 3], [1, 2]]


def test_a_slot_goes_to_an_expert_of_the_fullest_rank() -> None:
    """No exchange of single replicas helps: the hot expert needs a second one."""
    scratch, stride = block([[0, 1], [1, 2]], [12.0, 1.0, 1.0])
    allow(scratch, 20)
    assert refine.refine(3, np.array([2, 2]), stride, 7.0, 2, scratch) == 7.0
    assert scratch.ints[k.REPLICAS, :3].tolist() == [2, 1, 1]


def test_a_slot_of_the_fullest_rank_goes_to_a_lighter_expert() -> None:
    """58 and 39 on four ranks: two halves of each are better than three thirds of the one and two of the other."""
    scratch, stride = block([[0, 2], [1, 2], [0, 3], [0, 4]], [58.0, 0.0, 39.0, 0.0, 0.0])
    allow(scratch, 10)
    assert refine._take_slot(5, 0, 38.8, np.full(4, 2), stride, 4, scratch) is True
    assert rows_of(scratch, 4, 2) == [[1, 2], [1, 2], [0, 3], [0, 4]]
    assert scratch.reals[k.RANK_LOAD, :4].tolist() == [19.5, 19.5, 29.0, 29.0]
    check_books(scratch, 4, stride, 5)


def test_two_changes_that_cancel_on_the_fullest_rank_are_no_gain() -> None:
    """A slot of one expert for another of equal load, both on the fullest rank: without end, if it counted."""
    scratch, stride = block([[0, 4], [1, 3], [2, 1]], [4.0, 5.0, 5.0, 2.0, 3.0])
    before = scratch.ints[k.EXPERT, :6].tolist()
    assert scratch.reals[k.RANK_LOAD, 2] == 7.5
    allow(scratch, 1000)
    assert refine._give_slot(2, 7.5, np.array([2, 2, 2]), stride, 3, scratch) is False
    assert scratch.ints[k.EXPERT, :6].tolist() == before


def test_exchanges_that_mirror_two_ranks_end() -> None:
    """5 + 3 and 4 + 3: to exchange the 5 and the 4 is no gain, whatever rounding makes of it, and never ends."""
    for unit in (1.0, 1 / 3, 1 / 7):
        scratch, stride = block([[0, 1], [2, 3]], [5 * unit, 3 * unit, 4 * unit, 3 * unit])
        allow(scratch, 1000)
        refine._descend(4, np.array([2, 2]), stride, 0.0, 2, scratch)
        assert scratch.ints[k.WORK, 0] < 10


@settings(max_examples=60)
@given(st.lists(st.floats(0.1, 100), min_size=2, max_size=12), st.data())
def test_the_queue_is_in_order_after_every_exchange(load: list[float], data: st.DataObject) -> None:
    """Two ranks change: each goes to its place among the others, so the last is the fullest."""
    queue = np.array(sorted(range(len(load)), key=lambda r: load[r]))
    times = np.array(load)
    queue_time = times[queue]
    last = len(load) - 1
    at = data.draw(st.integers(0, last - 1))
    r, full = queue[at], queue[last]
    mean, off = (times[r] + times[full]) / 2, data.draw(st.floats(-0.4, 0.4)) * (times[full] - times[r])
    times[r], times[full] = mean + off, mean - off
    refine._requeue(at, last - 1, times[r], queue, queue_time)
    refine._requeue(last, last, times[full], queue, queue_time)
    assert times[queue].tolist() == queue_time.tolist() == sorted(times.tolist())


def test_the_time_that_a_search_reports_is_that_of_the_fullest_rank() -> None:
    rng = np.random.default_rng(5)
    for _ in range(30):
        load = rng.lognormal(3, 1, 40)
        rows = rng.permutation(40).reshape(20, 2).tolist()
        scratch, stride = block(rows, load.tolist())
        allow(scratch, 100)
        cap = np.full(20, 2)
        time = refine._descend(40, cap, stride, 0.0, 20, scratch)
        assert time == scratch.reals[k.RANK_LOAD, :20].max()


@pytest.mark.parametrize("homes", [False, True])
@settings(max_examples=60)
@given(st.integers(0, 10**6))
def test_a_long_search_keeps_its_books_and_never_ends_worse(homes: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks, stride = int(rng.integers(2, 6)), int(rng.integers(1, 4))
    experts = int(rng.integers(stride + 1, ranks * stride + 1)) if ranks * stride > stride else stride
    slots = iter([*rng.permutation(experts).tolist(), *rng.integers(0, experts, 100).tolist()])
    rows = [[next(slots) for _ in range(stride)] for _ in range(ranks)]
    for row in rows:  # no pairs
        missing = [e for e in range(experts) if e not in row]
        for i in range(stride):
            if row.index(row[i]) < i:
                row[i] = missing.pop(0)
    if {e for row in rows for e in row} != set(range(experts)):
        return
    nodes = sorted(rng.integers(0, 2, ranks).tolist())
    scratch, _ = block(rows, rng.integers(0, 50, experts).astype(float).tolist(), nodes)
    if homes:
        for e in range(experts):
            holders = [nodes[rank] for rank, row in enumerate(rows) if e in row]
            scratch.ints[k.HOME, e] = holders[0]
            scratch.ints[k.HOME_COUNT, e] = holders.count(holders[0])
    before = scratch.reals[k.RANK_LOAD, :ranks].max()
    cap = np.full(ranks, stride)
    allow(scratch, 300)
    reached = refine.refine(experts, cap, stride, 0.0, ranks, scratch)
    assert reached <= before
    assert np.isclose(reached, scratch.reals[k.RANK_LOAD, :ranks].max(), rtol=1e-12)
    check_books(scratch, ranks, stride, experts)


def test_random_numbers_are_lehmers() -> None:
    """x -> 48271 x modulo 2^31 - 1 from 1: the 10,000th is 399268537 (the check value of minstd_rand)."""
    work = np.array([0, 0, 1])
    for _ in range(10_000):
        drawn = refine._draw(10, work)
    assert (work[2], drawn) == (399268537, 7)
