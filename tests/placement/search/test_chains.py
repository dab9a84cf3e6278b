"""Chains of transfers against every row within the budget, on problems small enough to list them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import eplb_core as eplb
from benchmarks.few_transfers import KINDS, batch
from eplb_core import ExpertLayout, Topology


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_row_within_the_budget_is_worth_more(kind: str) -> None:
    """Each kind of problem with two random sets of rules; the program's record has 50,000 of each kind."""
    for seed in (0, 3):
        problems = list(batch(kind, seed))
        gaps = np.array([problem["gap"] for problem in problems])
        assert all(problem["within"] for problem in problems)
        assert gaps.min() >= -1e-9, "the oracle lists every row"
        assert gaps.mean() <= 0.001, problems[int(gaps.argmax())]
        assert gaps.max() <= 0.1, problems[int(gaps.argmax())]


def solve(
    load: Sequence[float],
    rows: list[int],
    ranks: int,
    budget: int,
    *,
    speed: Sequence[float] | None = None,
    **options: object,
) -> eplb.Placement:
    live = ExpertLayout([rows], len(load), topology=Topology(ranks, rank_speed=speed))
    return eplb.place(
        [load],
        live.topology,
        num_slots=len(rows),
        current=live,
        max_transfers=budget,
        **{"transfer_price": 0.0, "min_gain": 0.0, **options},  # type: ignore[arg-type]
    )


def test_a_slot_that_only_adds_load_is_emptied_only_where_ranks_differ() -> None:
    """Half of expert 0 makes rank 0 the fullest; all of it fits on rank 1. Few engines hold an empty slot, though."""
    rows = [0, 1, 2, 0, 3, -1]
    placed = solve([4, 3, 3, 1], rows, 2, 1, speed=[1.0, 1.001], transfer_price=0.01)
    assert placed.layout.physical_to_logical_map.tolist() == [[-1, 1, 2, 0, 3, -1]]
    assert placed.transfers[0] == 0
    assert placed.balancedness[0] == pytest.approx(11 / 12, abs=1e-3)
    alike = solve([4, 3, 3, 1], rows, 2, 0)
    assert alike.layout.physical_to_logical_map.tolist() == [rows]
    for budget in range(1, 4):
        assert (solve([4, 3, 3, 1], rows, 2, budget).layout.physical_to_logical_map >= 0).sum() >= 5


def test_an_expert_moves_for_one_transfer() -> None:
    """A replica of it would leave half of the load, and there is no slot of a replica to give away."""
    placed = solve([4, 4, 0, 0], [0, 1, 2, 3, -1, -1], 2, 1)
    assert (placed.balancedness[0], placed.transfers[0]) == (1.0, 1)


def test_three_experts_go_round_where_two_do_not_help() -> None:
    """10, 4 and 10 become 8, 8 and 8; after an exchange some rank still has 10."""
    load, rows = [6, 4, 2, 2, 4, 6], [0, 1, 2, 3, 4, 5]
    two, three = (solve(load, rows, 3, budget) for budget in (2, 3))
    assert (two.balancedness[0], two.transfers[0]) == (0.8, 0)
    assert (three.balancedness[0], three.transfers[0]) == (1.0, 3)
    dear = solve(load, rows, 3, 3, transfer_price=0.07)
    assert (dear.balancedness[0], dear.transfers[0]) == (0.8, 0)


def test_a_group_moves_to_another_node_as_a_whole() -> None:
    """Both groups of two are on the first node."""
    live = ExpertLayout([[0, 1, 2, 3, -1, -1, -1, -1]], 4, topology=Topology(4, num_nodes=2))
    placed = eplb.place(
        [[2, 2, 1, 2]],
        live.topology,
        num_slots=8,
        current=live,
        max_transfers=2,
        transfer_price=0.0,
        locality="group",
        num_groups=2,
    )
    assert placed.transfers[0] == 2
    assert placed.balancedness[0] >= 0.58


def test_nothing_moves_where_nothing_may() -> None:
    placed = solve([4, 3, 3, 1], [0, 1, 2, 0, 3, -1], 2, 0)
    assert placed.layout.physical_to_logical_map.tolist() == [[0, 1, 2, 0, 3, -1]]
