"""The search from a layout: every step against a plain count of all steps, and what holds of its end."""

from __future__ import annotations

from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import eplb_core as eplb
from eplb_core import ExpertLayout, Topology
from eplb_core.placement.search.improve import improve_layers, score_weighted
from eplb_core.placement.search.links import NO_LIMIT, new_links

EXAMPLES = 60
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Case(NamedTuple):
    windows: Floats
    """`[T, E]`."""
    row: Ints
    capacity: Ints
    pace: Floats
    link: Floats
    price: float

    @property
    def ranks(self) -> int:
        return len(self.capacity)

    @property
    def stride(self) -> int:
        return len(self.row) // self.ranks

    def run(
        self,
        steps: int,
        budget: int = NO_LIMIT,
        weighted: bool = False,
        limits: tuple[Ints, Ints] | None = None,
        home: Ints | None = None,
        whole: bool = False,
    ) -> tuple[Ints, float]:
        row, none = self.row[None].copy(), np.zeros((0, 0), dtype=np.int64)
        windows = self.windows[:, None].copy()
        windows.setflags(write=False)
        improve_layers(
            windows,
            np.ones(len(windows)),
            self.row[None].copy(),
            np.zeros(1, dtype=np.bool_),
            self.capacity,
            self.pace,
            new_links(
                self.link, self.node, none if limits is None else limits[0], none if limits is None else limits[1]
            ),
            none if home is None else home[None],
            whole,
            self.price,
            np.array([budget]),
            steps,
            1,
            weighted,
            row,
            np.full(row.shape, -1),
        )
        return row[0], self.cost(row[0])

    @property
    def node(self) -> Ints:
        """Two nodes, if there are ranks for them."""
        return np.arange(self.ranks) * min(2, self.ranks) // self.ranks

    def times(self, row: Ints) -> Floats:
        """Of each window and rank, the even time 1, replicas sharing equally."""
        count = np.bincount(row[row >= 0], minlength=self.windows.shape[1])
        speed = sum(1 / self.pace[self.capacity > 0])
        time = np.zeros((len(self.windows), self.ranks))
        for p, e in enumerate(row):
            if e >= 0:
                share = self.windows[:, e] * speed / self.windows.sum(axis=1) / count[e]
                time[:, p // self.stride] += share * self.pace[p // self.stride]
        return time

    def balance(self, row: Ints) -> float:
        return float(np.mean(1 / self.times(row).max(axis=1)))

    def power(self, row: Ints) -> float:
        return float(np.mean(np.sum(self.times(row) ** 8, axis=1)))

    def cost(self, row: Ints) -> float:
        """Of the transfers from the start, each from the cheapest holder."""
        total = 0.0
        for r in range(self.ranks):
            mine = slice(r * self.stride, (r + 1) * self.stride)
            for e in set(row[mine]) - set(self.row[mine]) - {-1}:
                total += min(self.link[p // self.stride, r] for p in np.flatnonzero(self.row == e))
        return total

    def received(self, row: Ints) -> int:
        """Transfers from the start."""
        ranks = (slice(r * self.stride, (r + 1) * self.stride) for r in range(self.ranks))
        return sum(len(set(row[mine]) - set(self.row[mine]) - {-1}) for mine in ranks)

    def steps(self, full: int, by_parts: bool = False) -> list[Ints]:
        """Rows one step away: exchanges with rank `full`, and slots given to its experts.

        The search judges gifts between experts that another rank than the giver's holds both by parts, so it may miss
        that one of them is the best: they are listed only where asked for.
        """
        rows = []
        mine = range(full * self.stride, (full + 1) * self.stride)
        for a, p in product(mine, range(len(self.row))):
            e, f, r = self.row[a], self.row[p], p // self.stride
            there = self.row[r * self.stride : (r + 1) * self.stride]
            here = self.row[mine.start : mine.stop]
            if e < 0 or self.capacity[r] == 0 or e in there:
                continue
            if f >= 0 and r != full and f not in here:
                row = self.row.copy()
                row[a], row[p] = f, e
                rows.append(row)
            elsewhere = [self.row[q * self.stride : (q + 1) * self.stride] for q in range(self.ranks) if q != r]
            if any(e in held and f in held for held in elsewhere) and f >= 0 and not by_parts:
                continue
            if np.count_nonzero(self.row == f) > 1 if f >= 0 else np.count_nonzero(there >= 0) < self.capacity[r]:
                row = self.row.copy()
                row[p] = e
                rows.append(row)
        return rows


@st.composite
def cases(draw: st.DrawFn, most_ranks: int = 4) -> Case:
    """Small problems: unequal speeds and links, empty slots, ranks that are out, pairs on a rank."""
    ranks, stride = draw(st.integers(1, most_ranks)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    active = np.array([draw(st.booleans()) for _ in range(ranks)]) if ranks > 1 else np.ones(1, dtype=bool)
    active[rng.integers(ranks)] = True
    capacity = np.where(active, stride, 0)
    experts = draw(st.integers(1, max(1, int(capacity.sum()))))
    row = np.full(ranks * stride, -1)
    slots = rng.permutation(np.flatnonzero(np.repeat(active, stride)))
    row[slots[:experts]] = rng.permutation(experts)
    for p in slots[experts:]:
        row[p] = rng.integers(-1, experts)
    windows = rng.integers(0, 30, (draw(st.integers(1, 3)), experts)) + rng.integers(1, 3)
    return Case(
        windows.astype(np.float64),
        row,
        capacity,
        rng.choice([1.0, 0.5], ranks),
        rng.choice([1.0, 1.0, 3.0, 0.0], (ranks, ranks)),
        draw(st.sampled_from([0.0, 0.001, 0.02])),
    )


@st.composite
def crowded(draw: st.DrawFn) -> Case:
    """Six equal ranks of three slots and 12 experts: much to do."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    row = np.r_[rng.permutation(12), rng.integers(0, 12, 6)].reshape(3, 6).T.reshape(-1)
    return Case(rng.lognormal(0, 1, (1, 12)), row, np.full(6, 3), np.ones(6), np.ones((6, 6)), 0.0)


# The step that is made is a gift judged by parts, and its balancedness is below the start's.
GIFT_BY_PARTS = Case(
    np.array([[24.0, 20, 14, 16, 5, 28, 23], [3, 16, 30, 28, 23, 6, 10], [30, 14, 31, 13, 7, 16, 15]]),
    np.array([6, 4, 3, 0, 2, 3, 5, 2, 1]),
    np.array([3, 3, 3]),
    np.array([1.0, 0.5, 0.5]),
    np.array([[3.0, 1, 3], [1, 3, 0], [3, 1, 0]]),
    0.0,
)

# The step that is made is a gift judged by parts to the fullest rank's expert; the next rank has a better one.
GIFT_OF_THE_FULLEST_RANK = Case(
    np.array([[9.0, 25, 21, 1]]),
    np.array([1, 3, 1, 2, 0, 2, 3, 1, 2]),
    np.array([3, 3, 3]),
    np.array([0.5, 0.5, 1.0]),
    np.array([[0.0, 3, 0], [1, 1, 0], [1, 3, 1]]),
    0.0,
)

# The best exchange is one with a rank of another speed.
EXCHANGE_WITH_A_SLOWER_RANK = Case(
    np.array([[3.0, 14, 19, 9], [12, 19, 25, 18]]),
    np.array([-1, -1, 2, 0, 1, 3]),
    np.array([0, 2, 2]),
    np.array([0.5, 0.5, 1.0]),
    np.array([[3.0, 1, 0], [1, 1, 0], [1, 1, 0]]),
    0.0,
)


@settings(max_examples=4 * EXAMPLES)
@given(cases())
@example(GIFT_BY_PARTS)
@example(EXCHANGE_WITH_A_SLOWER_RANK)
@example(GIFT_OF_THE_FULLEST_RANK)
def test_a_step_is_the_best_of_the_fullest_rank(case: Case) -> None:
    """Gain and cost of each step by a full evaluation of the row after it."""
    row, _ = case.run(steps=1)
    power = np.mean(case.times(case.row) ** 8, axis=0)
    unit = case.balance(case.row) / (8 * power.sum())

    def rate(after: Ints) -> float:
        pays = case.cost(after)
        net = (case.power(case.row) - case.power(after)) * unit - case.price * pays
        return net / max(pays, 0.5) if net > 1e-9 else 0.0

    order = sorted(np.flatnonzero(case.capacity > 0).tolist(), key=lambda r: -power[r])
    if len({*power[order]}) < len(order):
        return  # which of two equally full ranks comes first is a matter of rounding
    best = 0.0
    for full in order[:2]:
        best = best or max((rate(after) for after in case.steps(full)), default=0.0)
        if not best and any((row == after).all() for after in case.steps(full, by_parts=True)):
            break  # a gift judged by parts is enough, and the next rank's steps are not looked at
    if (row != case.row).any():
        assert rate(row) >= best * (1 - 1e-6)
    elif best > 1e-7:
        # Powers see a gain where the balancedness falls by it: the row of before is kept.
        near = (after for full in order[:2] for after in case.steps(full, by_parts=True))
        afters = [after for after in near if rate(after) >= best * (1 - 1e-6)]
        nets = [case.balance(after) - case.price * case.cost(after) for after in afters]
        assert min(nets) <= case.balance(case.row) + 1e-9


@settings(max_examples=3 * EXAMPLES)
@given(cases(most_ranks=7) | crowded(), st.integers(0, 6), st.booleans())
def test_the_end_is_a_layout_within_the_budget_and_no_worse(case: Case, budget: int, weighted: bool) -> None:
    row, spent = case.run(steps=40, budget=budget, weighted=weighted)
    assert case.received(row) <= budget
    assert set(row[row >= 0]) == set(case.row[case.row >= 0])
    assert_no_new_pairs(case, row)
    for r in range(case.ranks):
        mine = row[r * case.stride : (r + 1) * case.stride]
        assert np.count_nonzero(mine >= 0) <= case.capacity[r]
    if weighted:  # while it searches, shares are a few sweeps from the best
        assert solved(case, row) - case.price * spent >= solved(case, case.row) - 1e-3
    else:
        assert case.balance(row) - case.price * spent >= case.balance(case.row) - 1e-12


@settings(max_examples=EXAMPLES)
@given(cases(most_ranks=7))
def test_steps_that_lead_down_are_not_kept(case: Case) -> None:
    """The sum of powers may fall while the balancedness does: of all rows on the way the best is answered."""
    nets = [case.balance(row) - case.price * spent for row, spent in (case.run(steps) for steps in (1, 2, 3, 5, 8, 40))]
    for before, after in pairwise(nets):
        assert after >= before - 1e-9


def assert_no_new_pairs(case: Case, row: Ints) -> None:
    for r in range(case.ranks):
        mine, before = (x[r * case.stride : (r + 1) * case.stride] for x in (row, case.row))
        for e in set(mine.tolist()) - {-1}:
            assert int(np.count_nonzero(mine == e)) <= max(1, int(np.count_nonzero(before == e)))


def solved(case: Case, row: Ints) -> float:
    """Balancedness under solved shares."""
    windows = case.windows[:, None].copy()
    windows.setflags(write=False)
    out = score_weighted(windows, np.ones(len(windows)), row[None].copy(), case.capacity, case.pace)
    return float(out[0])


@settings(max_examples=EXAMPLES)
@given(st.integers(0, 2**32), st.integers(2, 5), st.integers(1, 4))
def test_shares_by_sweeps_are_those_of_the_solver(seed: int, ranks: int, stride: int) -> None:
    """`replica_shares` is exact; sweeps come near it from below."""
    rng = np.random.default_rng(seed)
    experts = rng.integers(1, ranks * stride + 1)
    row = rng.permutation(np.r_[np.arange(experts), rng.integers(0, experts, ranks * stride - experts)])
    windows = rng.lognormal(0, 2, (2, 1, experts))
    windows.setflags(write=False)
    layout = ExpertLayout(row[None], int(experts), topology=Topology(ranks))
    exact = []
    for window in windows:
        load = eplb.rank_load(layout, window, shares=eplb.replica_shares(layout, window))
        exact.append(load.mean() / load.max())
    out = score_weighted(windows, np.ones(2), row[None].copy(), np.full(ranks, stride), np.ones(ranks))
    assert np.mean(exact) - 0.005 <= out[0] <= np.mean(exact) + 1e-9


def test_replicas_that_share_by_weight_link_full_ranks_with_light_ones() -> None:
    """Experts 0 and 1 take turns in being hot. Halves of one of them help in one window, a link of both in each."""
    windows = [[[90, 10, 50, 50]], [[10, 90, 50, 50]]]
    topology = Topology(2)
    even = eplb.place(windows, topology, num_slots=6)
    weighted = eplb.place(windows, topology, num_slots=6, dispatch="weighted")
    assert weighted.balancedness[0] == pytest.approx(1.0, abs=1e-6)
    assert (even.dispatch, weighted.dispatch) == ("even", "weighted")
    assert weighted.balancedness[0] >= even.balancedness[0]


def test_one_percent_of_noise_moves_nothing() -> None:
    """FAULTS A10: a load that wobbles is no reason to move."""
    rng = np.random.default_rng(1)
    load = rng.lognormal(0, 0.7, (4, 64)) * 1000
    topology = Topology(8, num_nodes=2)
    live = eplb.place(load, topology, num_slots=72).layout
    for windows in (load, np.stack([load] * 4)):
        noisy = windows * rng.normal(1, 0.01, windows.shape)
        for dispatch in ("even", "weighted"):
            answer = eplb.place(noisy, topology, num_slots=72, current=live, dispatch=dispatch)
            assert answer.transfers.sum() == 0
            assert answer.layout.digest == live.digest


def test_a_larger_budget_reaches_more_on_the_whole() -> None:
    """Not proven for each layer: a greedy way of few transfers need not be the start of one of more."""
    rng = np.random.default_rng(2)
    before, after = rng.lognormal(0, 0.7, (2, 24, 64))
    topology = Topology(8)
    live = eplb.place(before, topology, num_slots=72).layout
    means = []
    for budget in range(9):
        answer = eplb.place(after, topology, num_slots=72, current=live, max_transfers=budget, transfer_price=0)
        assert answer.transfers.max() <= budget
        means.append(answer.balancedness.mean())
    assert means == sorted(means)


def test_lost_experts_come_first_and_count_against_the_budget() -> None:
    topology = Topology(4)
    live = ExpertLayout([[0, -1, -1, -1, -1, -1, 1, -1]], num_experts=2, topology=topology)
    answer = eplb.place(
        [[0, 1]],
        topology,
        num_slots=8,
        current=live,
        max_transfers=2,
        transfer_price=0,
        active_ranks=[True, True, True, False],
    )
    assert answer.transfers[0] <= 2


def test_no_exchange_is_taken_back_that_would_bring_an_expert_to_another_node() -> None:
    """To keep within the number of transfers; with experts whose first copies are bound to their nodes."""
    live = eplb.ExpertLayout([[4, 4, 1, 5, 3, 4, 3, 2, 1, 4, 0, 1]], 6, topology=eplb.Topology(4, 2))
    placed = eplb.place(
        [[93, 33, 19, 76, 88, 12]],
        live.topology,
        num_slots=12,
        current=live,
        locality="first_copy",
        num_groups=2,
        max_transfers=2,
        transfer_price=0.01,
    )
    assert eplb.transfers(live, placed.layout).sum() <= 2
