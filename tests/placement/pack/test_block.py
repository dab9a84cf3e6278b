"""Order, replica counts and packing against plain Python."""

from __future__ import annotations

from functools import reduce
from itertools import product
from operator import add

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core._arrays import FloatArray
from eplb_core.placement.pack import block as k
from eplb_core.placement.pack.block import Scratch, new_scratch

# Ties, zeros of both signs, subnormals, and a spread that leaves most values in one bucket.
LOADS = st.lists(
    st.one_of(
        st.sampled_from([0.0, -0.0, 1.0, 2.0, 3.0, 5e-324, 1e300]),
        st.floats(0, 1e6),
        st.integers(0, 40).map(lambda i: 1.0 + i * 2.0**-52),
    ),
    min_size=1,
    max_size=80,
)


def sorted_scratch(load: list[float], ranks: int = 1, stride: int = 1) -> Scratch:
    scratch = new_scratch(len(load), ranks, stride)
    scratch.reals[k.EXPERT_LOAD, : len(load)] = load
    k.sort_by_load(len(load), scratch)
    return scratch


@given(LOADS)
def test_experts_are_ordered_as_sorted_orders_them(load: list[float]) -> None:
    order = sorted_scratch(load).ints[k.ORDER, : len(load)].tolist()
    assert order == sorted(range(len(load)), key=lambda e: (-load[e], e))


@pytest.mark.parametrize("size", [31, 64, 257])
def test_loads_that_crowd_into_one_bucket_are_ordered_too(size: int) -> None:
    """One giant, and values a few units in the last place apart: the merge sort."""
    load = [1e300, *(1.0 + (i * 7919 % size) // 2 * 2.0**-52 for i in range(size)), 0.0]
    order = sorted_scratch(load).ints[k.ORDER, : len(load)].tolist()
    assert order == sorted(range(len(load)), key=lambda e: (-load[e], e))


def counts_by_definition(load: list[float], slots: int, most: int) -> list[int]:
    """Each further slot to the largest share; of equal ones to those with one replica, then to the lowest id."""
    count = [1] * len(load)
    for _ in range(slots - len(load)):
        open_to = [e for e in range(len(load)) if count[e] < most]
        count[min(open_to, key=lambda e: (-load[e] / count[e], count[e] > 1, e))] += 1
    return count


def count(load: list[float], slots: int, most: int) -> tuple[list[int], Scratch]:
    scratch = sorted_scratch(load)
    replicated = k.count_replicas(len(load), slots, most, scratch)
    k.sort_by_share(len(load), replicated, scratch)
    got = scratch.ints[k.REPLICAS, : len(load)].tolist()
    assert replicated == sum(replicas > 1 for replicas in got)
    return got, scratch


@given(st.lists(st.integers(0, 12).map(float), min_size=1, max_size=20) | LOADS, st.integers(1, 6), st.integers(0, 100))
def test_replica_counts_follow_the_divisor_method(load: list[float], most: int, percent: int) -> None:
    load = [abs(value) for value in load]
    slots = len(load) + len(load) * (most - 1) * percent // 100
    got, scratch = count(load, slots, most)
    assert got == counts_by_definition(load, slots, most)
    share = scratch.reals[k.ITEM_SHARE, : len(load)].tolist()
    expert = scratch.ints[k.ITEM_EXPERT, : len(load)].tolist()
    assert sorted(expert) == list(range(len(load)))
    assert share == [load[e] / got[e] for e in expert] == sorted(share, reverse=True)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 6))
def test_no_counts_have_a_smaller_largest_share(load: list[int], most: int, more: int) -> None:
    """The exchange argument of docs/placement.md, against all counts that there are."""
    slots = min(len(load) + more, len(load) * most)
    got, _ = count([float(w) for w in load], slots, most)
    assert sum(got) == slots
    every = (c for c in product(range(1, most + 1), repeat=len(load)) if sum(c) == slots)
    assert max(w / n for w, n in zip(load, got, strict=True)) == min(
        max(w / n for w, n in zip(load, counts, strict=True)) for counts in every
    )


def test_spare_slots_spread_over_equal_shares() -> None:
    """Once the giant has its 4, the rest goes to different experts of no load, not twice to the first."""
    assert count([100.0, 0, 0, 0], 10, 4)[0] == [4, 2, 2, 2]
    assert count([2.0, 1.0], 4, 3)[0] == [2, 2]
    assert count([9.0, 10.0], 4, 3)[0] == [2, 2]


def packed(load: list[float], cap: list[int], how: str) -> tuple[list[list[int]], Scratch]:
    ranks, stride = len(cap), max(cap)
    scratch = sorted_scratch(load, ranks, stride)
    scratch.reals[k.SPEED : k.PACE + 1, :ranks] = 1.0
    scratch.ints[k.HOME, : len(load)] = -1
    scratch.ints[k.NODE, :ranks] = 0
    scratch.ints[k.WORK, k.NONE] = -1
    replicated = k.count_replicas(len(load), sum(cap), ranks, scratch)
    k.sort_by_share(len(load), replicated, scratch)
    (k.pack if how == "pack" else k.pack_anywhere)(len(load), np.array(cap), stride, scratch)
    expert = scratch.ints[k.EXPERT, : ranks * stride].reshape(ranks, stride).tolist()
    return [row[:slots] for row, slots in zip(expert, cap, strict=True)], scratch


@st.composite
def blocks(draw: st.DrawFn) -> tuple[list[float], list[int]]:
    """Loads and slots of the ranks, the largest no more than there are experts."""
    ranks, stride = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    cap = [stride] * ranks
    short = draw(st.integers(0, ranks - 1)) if stride > 1 else 0
    for rank in range(ranks - short, ranks):
        cap[rank] -= 1
    experts = draw(st.integers(stride, sum(cap)))
    load = draw(st.lists(st.integers(0, 50).map(float), min_size=experts, max_size=experts))
    return load, cap


@pytest.mark.parametrize("how", ["pack", "pack_anywhere"])
@given(blocks())
def test_packing_fills_every_slot_without_pairs_and_keeps_shares_in_order(
    how: str, block: tuple[list[float], list[int]]
) -> None:
    load, cap = block
    rows, scratch = packed(load, cap, how)
    replicas = scratch.ints[k.REPLICAS, : len(load)].tolist()
    for row, slots in zip(rows, cap, strict=True):
        assert -1 not in row
        assert len(set(row)) == slots
    assert [sum(row.count(e) for row in rows) for e in range(len(load))] == replicas
    check_shares(rows, scratch, load, max(cap))


def check_shares(rows: list[list[int]], scratch: Scratch, load: list[float], stride: int) -> None:
    """SHARE and RANK_LOAD say what EXPERT and REPLICAS say, shares in descending order."""
    replicas = scratch.ints[k.REPLICAS]
    shares: FloatArray = scratch.reals[k.SHARE]
    for rank, row in enumerate(rows):
        mine = shares[rank * stride : rank * stride + len(row)].tolist()
        assert mine == [load[e] / replicas[e] for e in row] == sorted(mine, reverse=True)
        assert scratch.reals[k.RANK_LOAD, rank] == reduce(
            add, mine, 0.0
        )  # in order: `sum` rounds once at the end from Python 3.12 on


def test_the_largest_share_goes_to_the_least_loaded_rank() -> None:
    """A8: longest processing time first, ties to fewer slots used and then to the lowest rank."""
    assert packed([10.0, 9, 2, 1], [2, 2], "pack")[0] == [[0, 3], [1, 2]]
    assert packed([4.0, 4, 4, 4], [2, 2], "pack")[0] == [[0, 2], [1, 3]]
    assert packed([4.0, 0, 0, 0], [2, 2], "pack")[0] == [[0, 3], [1, 2]]


@pytest.mark.parametrize(
    ("load", "cap", "rows"),
    [
        ([5.0, 7.0, 2.0, 7.0, 5.0], [3, 3, 2, 2], [[3, 4, 1], [1, 3, 2], [0, 4], [0, 1]]),
        ([11.0, 16.0, 10.0, 9.0], [3, 2, 2], [[3, 0, 2], [1, 0], [1, 2]]),
    ],
)
def test_a_slot_is_made_where_only_holders_have_room(load: list[float], cap: list[int], rows: list[list[int]]) -> None:
    """A1: the last replicas of one expert meet ranks that are full, or hold it already."""
    got, scratch = packed(load, cap, "pack")
    assert all(len(set(row)) == len(row) == slots for row, slots in zip(got, cap, strict=True))
    assert sorted(e for row in got for e in row) == sorted(e for row in rows for e in row)
    check_shares(got, scratch, load, max(cap))


def test_the_smallest_share_that_has_a_place_elsewhere_makes_room() -> None:
    """Rank 0 is full with 1 and 2, rank 1 has room but holds 5 and 2: so 1 moves, though 2 is smaller."""
    scratch = new_scratch(6, 2, 3)
    scratch.ints[k.EXPERT, :6] = [1, 2, -1, 5, 2, -1]
    scratch.reals[k.SHARE, :6] = [3.0, 2.0, 0.0, 4.0, 2.0, 0.0]
    scratch.ints[k.FILL, :2] = [2, 2]
    assert k._make_room(5, np.array([2, 3]), 3, scratch) == 0
    assert scratch.ints[k.FILL, :2].tolist() == [1, 3]
    assert scratch.ints[k.EXPERT, [0, 3, 4, 5]].tolist() == [2, 5, 1, 2]
    assert scratch.reals[k.SHARE, [0, 3, 4, 5]].tolist() == [2.0, 4.0, 3.0, 2.0]


@given(st.lists(st.floats(0, 1e3), min_size=3, max_size=6))
def test_put_keeps_the_order_and_adds_the_load_up_anew(values: list[float]) -> None:
    reals, ints, _ = new_scratch(len(values), 1, len(values))
    share, expert = reals[k.SHARE, : len(values)], ints[k.EXPERT, : len(values)]
    share[:], expert[:], reals[k.RANK_LOAD, 0] = sorted(values, reverse=True), np.arange(len(values)), -1.0
    k.put(0, 1, 500.0, 99, np.array([len(values)]), len(values), reals, ints)
    assert share.tolist() == sorted(share.tolist(), reverse=True)
    assert expert[share.tolist().index(500.0) :].tolist().count(99) == 1
    assert reals[k.RANK_LOAD, 0] == reduce(add, share.tolist(), 0.0)
    assert k.holds(expert, 0, len(values), 99)
    assert not k.holds(expert, 0, len(values), 1)
