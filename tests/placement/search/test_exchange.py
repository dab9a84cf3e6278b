"""The best exchange is the one that looking at all of them finds, whatever was left out."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_core.placement.search.exchange import best_exchange
from eplb_core.placement.search.links import Ask, Links, Step, new_links
from eplb_core.placement.search.state import Work, begin, new_work

RANKS, STRIDE, EXPERTS = 6, 4, 18


def eighth(x: float) -> float:
    x = x * x
    x = x * x
    return x * x


def by_hand(full: int, ask: Ask, found: Step, row: list[int], work: Work) -> Step:
    """Every exchange in the order of the search, each judged in full."""
    best, kind, place, other, cost, number = found
    holds, fetch, held, pace = work.holds, work.fetch, work.held, work.pace
    for a in range(full * STRIDE, full * STRIDE + STRIDE):
        for s in range(STRIDE):
            for r in range(RANKS):
                p = r * STRIDE + s
                e, f = row[a], row[p]
                if r == full or holds[e, r] or holds[f, full]:
                    continue
                after = 0.0
                for t in range(len(work.weight)):
                    change = work.share[t, a] - work.share[t, p]
                    x, y = work.time[t, full] - change * pace[full], work.time[t, r] + change * pace[r]
                    after += work.weight[t] * (eighth(x) + eighth(y))
                pays = (fetch[e, r] - fetch[e, full]) + (fetch[f, full] - fetch[f, r])
                net = (work.power[full] + work.power[r] - after) * ask.unit - ask.price * pays
                moves = int(held[e, full]) - int(held[e, r]) + int(held[f, r]) - int(held[f, full])
                if net / max(pays, 0.5) > best and moves <= ask.budget:
                    best, kind, place, other, cost, number = net / max(pays, 0.5), 0, a, p, pays, moves
    return best, kind, place, other, cost, number


def problem(seed: int, num_windows: int) -> tuple[np.random.Generator, np.ndarray, Work, Links]:
    random = np.random.default_rng(seed)
    pace = np.ones(RANKS) if seed % 2 else random.choice([0.25, 1.0, 3.0], RANKS)
    row = np.concatenate([random.permutation(EXPERTS), random.choice(EXPERTS, RANKS * STRIDE - EXPERTS)])
    noise = random.choice([0.05, 0.5, 2.0])
    load = random.gamma(1.0, 1.0, EXPERTS) * np.exp(noise * random.normal(size=(num_windows, 1, EXPERTS)))
    load *= random.random((num_windows, 1, EXPERTS)) < random.choice([0.5, 1.0])
    none = np.zeros((0, 0), dtype=np.int64)
    links = new_links(np.ones((RANKS, RANKS)), np.zeros(RANKS, dtype=np.int64), none, none)
    work = new_work(num_windows, EXPERTS, pace, STRIDE)
    work.held[row, np.arange(row.size) // STRIDE] = random.random(row.size) < 0.8
    work.fetch[:] = np.where(work.held, 0.0, random.random((EXPERTS, RANKS)) + 0.2)
    work.load[:] = load[:, 0] * (1 / pace).sum() / EXPERTS
    work.weight[:] = random.dirichlet(np.ones(num_windows))
    begin(seed % 3 == 0, row, work)
    return random, row, work, links


@pytest.mark.long  # the kernel is compiled once more, to be called alone
@pytest.mark.parametrize("num_windows", [1, 3, 4, 30])
def test_the_best_exchange_is_that_of_all(num_windows: int) -> None:
    better = 0
    for seed in range(60):
        random, row, work, links = problem(seed, num_windows)
        price, unit = float(random.choice([0.0, 1e-2, 0.1])), 1.0 / (8.0 * float(work.power.sum()))
        ask = Ask(price, int(random.integers(0, 9)), unit, 0.0, False)
        found: Step = (1e-9, -1, 0, 0, 0.0, 0)
        for full in np.argsort(-work.power)[:3].tolist():
            expected = by_hand(full, ask, found, row.tolist(), work)
            found = best_exchange(full, ask, found, row, np.full(row.size, -1), work, links)
            assert found == expected
        better += found[1] >= 0
    assert better > 20
