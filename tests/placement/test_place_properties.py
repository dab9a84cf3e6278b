"""What holds of every answer of `place`, over random topologies, loads and constraints."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import eplb_core as eplb
from eplb_core import ExpertLayout, Placement, Topology, place
from tests.cases import by_rank

EXAMPLES = 80
Load = npt.NDArray[np.float64]


class Problem(NamedTuple):
    load: Load
    topology: Topology
    num_slots: int
    locality: str
    num_groups: int
    active: list[bool]

    @property
    def capacity(self) -> list[int]:
        """Slots that each rank may fill."""
        ranks = self.topology.num_ranks
        whole, more = divmod(self.num_slots, ranks)
        return [(whole + (rank < more)) * self.active[rank] for rank in range(ranks)]

    def solve(self, **options: Any) -> Placement:
        options = {"num_slots": self.num_slots, "active_ranks": self.active, **options}
        if self.locality != "none":
            options |= {"locality": self.locality, "num_groups": self.num_groups}
        return place(options.pop("load", self.load), self.topology, **options)


def random_load(rng: np.random.Generator, kind: str, layers: int, experts: int) -> Load:
    shape = (layers, experts)
    if kind == "ties":
        return rng.integers(0, 4, shape).astype(np.float64)
    if kind == "lognormal":
        return rng.lognormal(3, 2, shape)
    if kind == "giant":
        load = rng.integers(0, 3, shape).astype(np.float64)
        load[:, rng.integers(experts)] = 1e6
        return load
    some = rng.integers(0, 2, (layers, 1)).astype(np.float64)  # layers without any
    return np.asarray(some * rng.integers(1, 1000, shape), dtype=np.float64)


@st.composite
def problems(draw: st.DrawFn, plain: bool = False) -> Problem:
    """Uneven nodes, unequal speeds, ranks that are out, and numbers that do not divide; `plain` leaves these out."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    ranks = sum(sizes)
    rank_to_node = [node for node, size in enumerate(sizes) for _ in range(size)]
    speed = [1.0] * ranks
    active = [True] * ranks
    if not plain:
        if draw(st.booleans()):
            speed = draw(st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=ranks, max_size=ranks))
        if draw(st.booleans()):
            active = draw(st.lists(st.booleans(), min_size=ranks, max_size=ranks).filter(any))
    groups, group_size = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    experts = groups * group_size
    topology = Topology(rank_to_node=rank_to_node, rank_speed=speed)
    load = random_load(
        np.random.default_rng(draw(st.integers(0, 10**6))),
        draw(st.sampled_from(["ties", "lognormal", "giant", "uniform"])),
        draw(st.integers(1, 3)),
        experts,
    )
    locality = draw(st.sampled_from(["none", "group", "first_copy"]))
    problem = Problem(load, topology, experts + draw(st.integers(0, experts + 5)), locality, groups, active)
    while sum(problem.capacity) < experts:
        problem = problem._replace(num_slots=problem.num_slots + ranks)
    room = [0] * len(sizes)
    for rank, slots in enumerate(problem.capacity):
        room[rank_to_node[rank]] += slots
    if sum(slots // group_size for slots in room) < groups:
        problem = problem._replace(locality="none")
    return problem


def nodes_of(problem: Problem, rows: list[list[int]], expert: int) -> set[int]:
    return {int(problem.topology.rank_to_node[rank]) for rank, row in enumerate(rows) if expert in row}


def candidates(problem: Problem, rows: list[list[int]], rank: int) -> set[int]:
    """Experts that this rank could hold: all of them, or those of its node's groups."""
    experts = range(problem.load.shape[1])
    if problem.locality != "group":
        return set(experts)
    node = int(problem.topology.rank_to_node[rank])
    return {e for e in experts if node in nodes_of(problem, rows, e)}


@settings(max_examples=2 * EXAMPLES)
@given(problems())
def test_a_layout_covers_all_experts_without_pairs_and_fills_no_more_slots_than_there_are(problem: Problem) -> None:
    """R48."""
    placement = problem.solve()
    for layer in range(len(problem.load)):
        rows = by_rank(placement.layout, layer)
        held = [[e for e in row if e >= 0] for row in rows]
        assert {e for row in held for e in row} == set(range(problem.load.shape[1]))
        for rank, row in enumerate(held):
            possible = candidates(problem, rows, rank)
            slots = problem.capacity[rank]
            # Slots of one block: the ranks among which its experts may be.
            block = [c for r, c in enumerate(problem.capacity) if c and candidates(problem, rows, r) == possible]
            solved = bool(problem.load[layer].any()) or problem.locality != "none"
            speeds = {problem.topology.rank_speed[r] for r, c in enumerate(problem.capacity) if c}
            if solved and len(speeds) == 1 and min(block, default=0) >= len(possible):
                # All ranks can hold everything: they hold the same, and repeats are forced where there is more room.
                assert set(row) == (possible if slots else set())
                assert len(row) == (min(block) if slots and possible else 0)
            else:
                assert len(row) <= slots  # a slot stays empty where one more replica would make the layer worse
                assert len(set(row)) == min(len(row), len(possible))
            assert rows[rank] == row + [-1] * (len(rows[rank]) - len(row))


@settings(max_examples=EXAMPLES)
@given(problems())
@example(Problem(np.array([[3.0, 2, 2, 1]]), Topology(num_ranks=2, num_nodes=2), 4, "first_copy", 2, [True, True]))
def test_groups_are_where_the_locality_says(problem: Problem) -> None:
    check_groups(problem, problem.solve())


def check_groups(problem: Problem, placement: Placement) -> None:
    size = problem.load.shape[1] // problem.num_groups
    for layer in range(len(problem.load)):
        rows = by_rank(placement.layout, layer)
        for group in range(problem.num_groups):
            nodes = [nodes_of(problem, rows, e) for e in range(group * size, (group + 1) * size)]
            if problem.locality == "group":
                assert len(set.union(*nodes)) == 1
            elif problem.locality == "first_copy":
                assert set.intersection(*nodes)


@settings(max_examples=EXAMPLES)
@given(problems())
def test_balancedness_is_what_the_metrics_say_and_never_above_the_bound(problem: Problem) -> None:
    placement = problem.solve()
    speed = problem.topology.rank_speed
    loads = eplb.rank_load(placement.layout, problem.load)
    live = np.flatnonzero(problem.active)
    for layer, load in enumerate(problem.load):
        if not load.any():
            assert np.isnan(placement.balancedness[layer])
            assert np.isnan(placement.bound[layer])
            continue
        expected = load.sum() / speed[live].sum() / (loads[layer] / speed).max()
        assert np.isclose(placement.balancedness[layer], expected, rtol=1e-12)
        assert placement.balancedness[layer] <= placement.bound[layer] <= 1.0
        if len(live) == len(speed) and len(set(speed.tolist())) == 1:
            assert np.isclose(placement.balancedness[layer], eplb.balancedness(loads[layer]), rtol=1e-12)


@pytest.mark.parametrize("dispatch", ["even", "weighted"])
@settings(max_examples=EXAMPLES)
@given(problems(), st.sampled_from([1, 3]), st.integers(0, 10**6))
def test_more_effort_is_never_worse(dispatch: str, problem: Problem, windows: int, seed: int) -> None:
    load, slack = problem.load, 1e-12 if windows == 1 else 1e-9
    if dispatch == "weighted":
        problem, slack = problem._replace(locality="none"), 1e-3
    if windows > 1:
        load = np.random.default_rng(seed).lognormal(3, 2, (windows, *load.shape))
    efforts = (0.01, 0.25, 1.0, 3.0, 4.0)
    reached = [problem.solve(load=load, dispatch=dispatch, effort=effort).balancedness for effort in efforts]
    for less, more in pairwise(reached):
        assert (np.isnan(less) | (more >= less - slack)).all()  # equal times may round apart


@settings(max_examples=EXAMPLES)
@given(problems(), st.integers(0, 10**6))
def test_relabelled_experts_relabel_the_answer(problem: Problem, seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = problem._replace(locality="none", load=rng.lognormal(5, 1, problem.load.shape))  # no ties
    new_name = rng.permutation(problem.load.shape[1])
    relabelled = np.empty_like(problem.load)
    relabelled[:, new_name] = problem.load
    before = problem.solve().layout.physical_to_logical_map
    after = problem.solve(load=relabelled).layout.physical_to_logical_map
    assert np.array_equal(np.where(before >= 0, new_name[before], -1), after)


@settings(max_examples=EXAMPLES)
@given(problems(), st.integers(-60, 60))
def test_scaling_the_load_by_a_power_of_two_changes_nothing(problem: Problem, power: int) -> None:
    one, other = problem.solve(), problem.solve(load=problem.load * 2.0**power)
    assert one.layout == other.layout
    assert np.array_equal(one.balancedness, other.balancedness, equal_nan=True)
    assert np.array_equal(one.bound, other.bound, equal_nan=True)


@settings(max_examples=EXAMPLES)
@given(problems(), st.lists(st.integers(0, 3), min_size=1, max_size=3))
def test_the_bound_holds_for_the_mean_over_windows(problem: Problem, weights: list[int]) -> None:
    rng = np.random.default_rng(len(weights))
    windows = np.stack([np.roll(problem.load, shift, axis=1) for shift in rng.integers(0, 5, len(weights))])
    placement = problem.solve(load=windows, window_weights=weights)
    known = ~np.isnan(placement.balancedness)
    assert (placement.balancedness[known] <= placement.bound[known]).all()
    for layer in np.flatnonzero(~known):
        assert not (windows[:, layer].sum(axis=1) * weights).any()


@settings(max_examples=EXAMPLES)
@given(problems(plain=True), st.integers(0, 10**6), st.sampled_from([0.0, 0.01, 0.2]), st.sampled_from([None, 0, 2]))
def test_rows_change_only_for_a_gain_and_within_the_limit(
    problem: Problem, seed: int, min_gain: float, max_transfers: int | None
) -> None:
    other = random_load(np.random.default_rng(seed), "lognormal", *problem.load.shape)
    current = problem.solve(load=other).layout
    placement = problem.solve(current=current, min_gain=min_gain, max_transfers=max_transfers)
    assert np.array_equal(placement.transfers, eplb.transfers(current, placement.layout).sum(axis=1))
    before = eplb.balancedness(eplb.rank_load(current, problem.load))
    new, old = (x.physical_to_logical_map for x in (placement.layout, current))
    for layer in range(len(new)):
        if max_transfers is not None:
            assert placement.transfers[layer] <= max_transfers
        if not problem.load[layer].any():
            assert np.array_equal(new[layer], old[layer])
        if not np.array_equal(new[layer], old[layer]):
            assert placement.balancedness[layer] - before[layer] >= min_gain - 1e-12


@settings(max_examples=EXAMPLES)
@given(problems(), st.integers(0, 10**6), st.sampled_from([None, 1, 3]), st.sampled_from([0.0, 0.001]))
def test_groups_stay_where_they_are_while_experts_move(
    problem: Problem, seed: int, max_transfers: int | None, price: float
) -> None:
    """The search from a layout keeps the locality, and is worth no less than staying."""
    other = random_load(np.random.default_rng(seed), "lognormal", *problem.load.shape)
    current = problem.solve(load=other).layout
    placement = problem.solve(current=current, min_gain=0.0, max_transfers=max_transfers, transfer_price=price)
    stay = problem.solve(current=current, max_transfers=0, min_gain=1e9)
    assert stay.layout == current
    check_groups(problem, placement)
    known = ~np.isnan(placement.balancedness)
    worth = placement.balancedness - price * placement.transfers
    assert (worth >= stay.balancedness - 1e-9)[known].all()
    assert placement.transfers.max() <= (max_transfers or 10**9)


@settings(max_examples=EXAMPLES)
@given(problems(plain=True), st.integers(0, 10**6))
def test_what_stays_on_a_rank_stays_in_its_slot(problem: Problem, seed: int) -> None:
    other = random_load(np.random.default_rng(seed), "lognormal", *problem.load.shape)
    current = problem.solve(load=other).layout
    new = problem.solve(current=current, min_gain=0.0).layout
    assert isinstance(new, ExpertLayout)
    stride = new.slots_per_rank
    for old_row, new_row in zip(current.physical_to_logical_map, new.physical_to_logical_map, strict=True):
        for slot, expert in enumerate(old_row.tolist()):
            start = slot // stride * stride
            rank = new_row[start : start + stride].tolist()
            if expert >= 0 and rank.count(expert) >= old_row[start : start + stride].tolist().count(expert):
                assert new_row[slot] == expert
