"""`place` against every layout there is, on shapes small enough to try them all.

The oracle is the definition: each rank holds a set of distinct experts, replicas share evenly, the time is that of the
fullest rank. Ranks are equally fast, so only which sets are held matters, not by whom.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import combinations, combinations_with_replacement

import numpy as np
import numpy.typing as npt
import pytest

from eplb_core import Topology, place, rank_load

Ids = npt.NDArray[np.int64]
Load = npt.NDArray[np.float64]
SHAPES = 200


@cache
def every_layout(experts: int, slots_of_rank: tuple[int, ...]) -> tuple[Ids, Ids]:
    """Who holds what `[n, R, E]` and replicas `[n, E]` of all layouts with distinct experts on each rank."""
    rows = np.zeros((1, 0, experts), dtype=np.int64)
    for slots in sorted(set(slots_of_rank)):
        held = np.array([[e in chosen for e in range(experts)] for chosen in combinations(range(experts), slots)])
        alike = np.array(list(combinations_with_replacement(range(len(held)), slots_of_rank.count(slots))))
        left, right = np.repeat(np.arange(len(rows)), len(alike)), np.tile(np.arange(len(alike)), len(rows))
        rows = np.concatenate([rows[left], held[alike[right]].astype(np.int64)], axis=1)
    count = rows.sum(axis=1)
    covers = (count > 0).all(axis=1)
    return rows[covers], count[covers]


def least_time(load: Load, slots_of_rank: list[int]) -> float:
    """Smallest largest load over all layouts."""
    rows, count = every_layout(len(load), tuple(slots_of_rank))
    return float((rows * (load / count)[:, None, :]).sum(axis=2).max(axis=1).min())


def tiny_problems() -> Iterator[tuple[Load, int, list[int]]]:
    """Load, ranks and slots of each rank: up to 6 experts, 4 ranks, 3 slots a rank; ties, zeros and heavy tails."""
    rng = np.random.default_rng(0)
    found = 0
    while found < SHAPES:
        experts, ranks, stride = int(rng.integers(2, 7)), int(rng.integers(2, 5)), int(rng.integers(1, 4))
        slots = int(rng.integers(ranks * (stride - 1) + 1, ranks * stride + 1))
        sizes = [slots // ranks + (rank < slots % ranks) for rank in range(ranks)]
        kind = int(rng.integers(4))
        load = [
            rng.integers(1, 100, experts),
            np.round(rng.lognormal(3, 1.5, experts)) + 1,
            rng.integers(1, 6, experts),
            rng.integers(0, 3, experts) * rng.integers(1, 50, experts),
        ][kind].astype(np.float64)
        if slots >= experts and sizes[0] <= experts and sizes[-1] > 0 and load.any():
            found += 1
            yield load, ranks, sizes


def test_the_oracle_agrees_with_optima_found_by_hand() -> None:
    """A21: one slot a rank leaves 20 of an expert of 100; 4 + 1 and 3 + 2 are even."""
    assert least_time(np.array([100.0, 1, 1, 1]), [1] * 8) == 20.0
    assert least_time(np.array([1.0, 2, 3, 4]), [2, 2]) == 5.0


@pytest.mark.slow
def test_nine_of_ten_tiny_shapes_are_optimal_and_no_bound_is_below_the_optimum() -> None:
    """Measured: 95 of 100 at the default effort; the others are 4% above the optimum in the middle, 14% at worst."""
    equal = 0
    for load, ranks, sizes in tiny_problems():
        placement = place([load], Topology(num_ranks=ranks), num_slots=sum(sizes))
        reached, optimum = rank_load(placement.layout, [load]).max(), least_time(load, sizes)
        assert reached >= optimum * (1 - 1e-12), (load, sizes)
        assert reached <= optimum * 1.26, (load, sizes)
        best_balancedness = load.sum() / ranks / optimum
        assert placement.bound[0] >= best_balancedness * (1 - 1e-12), (load, sizes)
        equal += reached <= optimum * (1 + 1e-12)
    assert equal >= 0.9 * SHAPES, f"{equal} of {SHAPES}"
