"""The search keeps its books: what it says of the best row is so, and its numbers are fixed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from eplb_core.placement.affinity import anneal as search
from eplb_core.placement.affinity.near import energy_of
from eplb_core.placement.affinity.state import Frame, State, new_state

EXPERTS, RANKS, NODES, STRIDE = 10, 6, 3, 3


def frame(seed: int, *, budget: int = 1000, transfer: int = 0, windows: int = 1) -> tuple[Frame, npt.NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    pairs = rng.integers(0, 1 << 17, (EXPERTS, EXPERTS)).astype(np.int32)
    row = np.concatenate([np.arange(EXPERTS), np.arange(RANKS * STRIDE - EXPERTS)])
    had = np.zeros((EXPERTS, RANKS), dtype=np.bool_)
    had[row, np.arange(row.size) // STRIDE] = True
    return Frame(
        np.arange(RANKS) // 2, NODES, rng.integers(1, 1 << 21, (EXPERTS, windows)),
        np.full((RANKS, windows), 1 << 20), np.full((RANKS, windows), 8),
        np.tril(pairs, -1) + np.tril(pairs, -1).T, rng.integers(1, 1 << 20, EXPERTS), had, np.zeros(0, np.int64), False,
        transfer, budget,
    ), row  # fmt: skip


def energy(frame: Frame, row: npt.NDArray[np.int64]) -> int:
    """From the definition, for each source node, pair, rank and transfer."""
    node = [frozenset(frame.node[np.flatnonzero(row == e) // STRIDE].tolist()) for e in range(EXPERTS)]
    total = 0
    for source in range(NODES):
        for e in range(EXPERTS):
            total += int(frame.tokens[e]) * (source not in node[e])
            for f in range(e):
                total += int(frame.pairs[e, f]) * (source not in node[e] | node[f] and not node[e] & node[f])
    count = np.bincount(row, minlength=EXPERTS)
    for rank, held in enumerate(row.reshape(RANKS, STRIDE).tolist()):
        for t in range(frame.load.shape[1]):
            load = sum(int(frame.load[e, t] // count[e]) for e in held)
            total += int(frame.weight[rank, t]) * max(0, load - int(frame.limit[rank, t]))
        total += frame.transfer * sum(not frame.had[e, rank] for e in set(held))
    return total


@pytest.mark.parametrize("seed", range(6))
def test_the_best_row_is_as_much_better_as_is_said(seed: int) -> None:
    problem, row = frame(seed, transfer=1 << 15 if seed % 2 else 0, windows=1 + seed // 2)
    state, best = new_state(problem, row.copy()), row.copy()
    gained = search.anneal(problem, state, 0, 3000, 1 << 18, seed, best)
    assert gained == energy(problem, best) - energy(problem, row) < 0
    check_books(problem, state)
    others = [energy(problem, best)] * 2
    for a in range(row.size):  # at the end no exchange of two slots is worth much
        for b in range(a):
            other = best.copy()
            other[a], other[b] = best[b], best[a]
            if (
                len(set(other[a // STRIDE * STRIDE :][:STRIDE]))
                == len(set(other[b // STRIDE * STRIDE :][:STRIDE]))
                == 3
            ):
                others.append(energy(problem, other))
    assert min(others) > energy(problem, best) * 0.95


def check_books(frame: Frame, state: State) -> None:
    fresh = new_state(frame, state.row.copy())
    for name in ("replicas", "on", "within", "mask", "spread", "rank_load"):
        assert (getattr(state, name) == getattr(fresh, name)).all(), name
    assert (state.share[:EXPERTS] == fresh.share[:EXPERTS]).all()
    assert not state.share[EXPERTS].any()
    for e in range(EXPERTS):
        assert sorted(state.at[e, : state.replicas[e]]) == sorted(np.flatnonzero(state.row == e))
    assert state.on.max() == 1


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_no_row_takes_more_transfers_than_it_may(budget: int) -> None:
    problem, row = frame(1, budget=budget)
    best = row.copy()
    search.anneal(problem, new_state(problem, row.copy()), 0, 3000, 1 << 18, 1, best)
    taken = sum(not problem.had[e, slot // STRIDE] for slot, e in enumerate(best))
    assert taken <= budget
    assert (taken > 0) == (budget > 0)


def test_what_lies_apart_is_what_the_definition_says() -> None:
    problem, row = frame(3)
    loads = problem._replace(weight=np.zeros((RANKS, 1), np.int64))
    assert energy_of(problem, new_state(problem, row.copy())) == energy(loads, row)


def test_the_answer_is_the_same_the_same_on_every_machine() -> None:
    problem, row = frame(0)
    best = row.copy()
    assert search.anneal(problem, new_state(problem, row.copy()), 0, 500, 1 << 18, 7, best) == -1506251
    assert best.tolist() == [0, 8, 2, 6, 4, 5, 0, 4, 8, 9, 6, 1, 2, 3, 4, 5, 6, 7]
