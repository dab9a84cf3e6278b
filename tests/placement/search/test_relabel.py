"""Names of ranks and slots after a new solution: the least that can move, against all permutations."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core._arrays import FloatArray as Floats
from eplb_core._arrays import IntArray
from eplb_core.placement.search import relabel as _relabel
from eplb_core.placement.search.links import new_links
from eplb_core.placement.search.relabel import keep_in_place, settle

NONE = np.zeros((0, 0), dtype=np.int64)


def relabel(
    old: list[list[int]],
    new: list[list[int]],
    *,
    capacity: list[int] | None = None,
    speed: list[float] | None = None,
    node: list[int] | None = None,
    across: bool = True,
    link: Floats | None = None,
) -> tuple[list[list[int]], int]:
    ranks, stride = len(old), len(old[0])
    before, after = np.array(old).reshape(1, -1), np.array(new).reshape(1, -1)
    keep_in_place(
        before,
        after,
        np.zeros(1, dtype=np.bool_),
        np.array(capacity or [stride] * ranks),
        np.array(speed or [1.0] * ranks),
        new_links(np.ones((ranks, ranks)) if link is None else link, np.array(node or [0] * ranks), NONE, NONE),
        across,
        int(max(before.max(), after.max())) + 1,
    )
    answer = after.reshape(ranks, stride).tolist()
    return answer, received(old, answer)


def received(old: list[list[int]], new: list[list[int]]) -> int:
    return sum(len(set(n) - set(o) - {-1}) for o, n in zip(old, new, strict=True))


maps = st.integers(1, 5).flatmap(
    lambda ranks: st.integers(1, 3).flatmap(
        lambda stride: st.tuples(
            *[st.lists(st.lists(st.integers(0, 7), min_size=stride, max_size=stride), min_size=ranks, max_size=ranks)]
            * 2
        )
    )
)


@given(maps)
def test_no_exchange_of_ranks_would_move_less(given_maps: tuple[list[list[int]], list[list[int]]]) -> None:
    """A10: bins have no names of their own. Also with pairs on a rank."""
    old, new = given_maps
    answer, moved = relabel(old, new)
    assert sorted(map(sorted, answer)) == sorted(map(sorted, new))
    assert moved == min(received(old, list(order)) for order in permutations(new))


@settings(max_examples=60)
@given(maps, st.integers(0, 10**6))
def test_no_exchange_of_ranks_would_cost_less(given_maps: tuple[list[list[int]], list[list[int]]], seed: int) -> None:
    """A10: bytes that cross nodes cost more. Each expert comes from its cheapest holder, one without from far away."""
    old, new = given_maps
    link = np.random.default_rng(seed).choice([0.25, 0.5, 1.0], (len(old), len(old)))
    off = link[~np.eye(len(old), dtype=bool)]

    def cost(rows: list[list[int]]) -> float:
        total = 0.0
        for r, (mine, was) in enumerate(zip(rows, old, strict=True)):
            for e in set(mine) - set(was):
                total += min((link[q, r] for q in range(len(old)) if e in old[q]), default=off.max(initial=0.0))
        return total

    answer, _ = relabel(old, new, link=link)
    assert cost(answer) == min(cost(list(order)) for order in permutations(new))


@given(maps)
def test_what_a_rank_keeps_stays_in_its_slot(given_maps: tuple[list[list[int]], list[list[int]]]) -> None:
    old, new = given_maps
    answer, _ = relabel(old, new)
    for before, after in zip(old, answer, strict=True):
        for slot, expert in enumerate(before):
            if after.count(expert) >= before.count(expert):
                assert after[slot] == expert


@settings(max_examples=60)
@given(maps, st.integers(0, 10**6))
def test_only_ranks_that_are_alike_exchange(given_maps: tuple[list[list[int]], list[list[int]]], seed: int) -> None:
    old, new = given_maps
    rng = np.random.default_rng(seed)
    speed, node = rng.choice([1.0, 2.0], len(old)).tolist(), rng.integers(0, 2, len(old)).tolist()
    kind = list(zip(speed, node, strict=True))
    answer, moved = relabel(old, new, speed=speed, node=node, across=False)
    for k in set(kind):
        mine = [rank for rank in range(len(old)) if kind[rank] == k]
        assert sorted(sorted(answer[r]) for r in mine) == sorted(sorted(new[r]) for r in mine)
    allowed = [
        order
        for order in permutations(range(len(old)))
        if all(kind[rank] == kind[order[rank]] for rank in range(len(old)))
    ]
    assert moved == min(received(old, [new[r] for r in order]) for order in allowed)


def test_a_perfect_map_with_exchanged_ranks_moves_nothing() -> None:
    """A10: others move every expert to the other rank."""
    assert relabel([[2, 0], [3, 1]], [[3, 1], [2, 0]]) == ([[2, 0], [3, 1]], 0)


def test_nodes_keep_their_contents_where_groups_bind_them() -> None:
    old, new = [[0, 1], [2, 3]], [[2, 3], [0, 1]]
    assert relabel(old, new, node=[0, 1], across=True)[1] == 0
    assert relabel(old, new, node=[0, 1], across=False) == ([[2, 3], [0, 1]], 4)


def test_a_rank_with_fewer_slots_keeps_its_last_one_empty() -> None:
    """What stood in the slot that is no more moves to another slot of the rank: a copy, not a transfer."""
    assert relabel([[0, 1], [2, 3]], [[0, 2], [3, -1]], capacity=[2, 1]) == ([[0, 2], [3, -1]], 1)


def test_repeats_are_placed_one_by_one() -> None:
    assert relabel([[0, 1, 2]], [[5, 5, 1]]) == ([[5, 1, 5]], 1)
    assert relabel([[0, 0, 2]], [[0, 1, 2]]) == ([[0, 1, 2]], 1)


def test_layers_that_are_skipped_stay_as_they_are() -> None:
    old, new = np.array([[0, 1], [0, 1]]), np.array([[1, 0], [1, 0]])
    keep_in_place(
        old,
        new,
        np.array([True, False]),
        np.ones(2, dtype=np.int64),
        np.ones(2),
        new_links(np.ones((2, 2)), np.zeros(2, dtype=np.int64), NONE, NONE),
        True,
        2,
    )
    assert new.tolist() == [[1, 0], [0, 1]]


def test_slots_are_kept_without_exchanging_ranks() -> None:
    old, new = np.array([[0, 3, 1, 2, 1, -1]]), np.array([[2, 0, 1, 1, 3, -1]])
    settle(old, new, np.full(2, 3), 4)
    assert new.tolist() == [[0, 2, 1, 3, 1, -1]]


def kept(rows: list[list[int]]) -> IntArray:
    return np.array(rows, dtype=np.int64)


def test_beyond_the_exact_size_the_best_pairs_are_taken_first() -> None:
    taker = np.full(3, -1)
    _relabel._assign_greedily(np.arange(3), kept([[3, 2, 0], [3, 0, 0], [0, 0, 1]]), taker)
    assert taker.tolist() == [0, 1, 2]
    exact = np.full(3, -1)
    _relabel._assign(0, np.zeros(3, dtype=np.int64), kept([[3, 2, 0], [3, 0, 0], [0, 0, 1]]), exact)
    assert exact.tolist() == [1, 0, 2]


@pytest.mark.slow
def test_more_ranks_than_the_exact_size_are_assigned_too() -> None:
    ranks = _relabel._MOST_EXACT + 4
    old = [[rank] for rank in range(ranks)]
    answer, moved = relabel(old, old[::-1])
    assert (answer, moved) == (old, 0)


def test_one_more_than_the_exact_size_is_assigned_greedily() -> None:
    n = _relabel._MOST_EXACT + 1
    taker = np.full(n, -1)
    _relabel._assign(0, np.zeros(n, dtype=np.int64), np.eye(n, dtype=np.int64)[::-1].copy(), taker)
    assert taker.tolist() == list(range(n))[::-1]
