"""Ranks with different numbers of slots: everything that takes `num_slots` takes `slots_per_rank`."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import eplb_core as eplb
from eplb_core import ExpertLayout, Topology, place
from tests.cases import by_rank

EXAMPLES = 60
Load = npt.NDArray[np.float64]


class Case(NamedTuple):
    load: Load
    topology: Topology
    slots: list[int]
    options: dict[str, Any]

    @property
    def capacity(self) -> list[int]:
        """Slots that each rank may fill."""
        active = self.options.get("active_ranks", [True] * len(self.slots))
        return [slots * alive for slots, alive in zip(self.slots, active, strict=True)]

    def other_load(self, seed: int) -> Load:
        return np.random.default_rng(seed).lognormal(3, 1, self.load.shape)


@st.composite
def cases(draw: st.DrawFn, locality: bool = True) -> Case:
    """Uneven nodes, speeds, ranks that are out, windows, dispatch, groups and links."""
    sizes = draw(st.lists(st.integers(1, 2), min_size=1, max_size=3))
    node = [n for n, size in enumerate(sizes) for _ in range(size)]
    ranks, groups, size = len(node), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    experts = groups * size
    slots = draw(st.lists(st.integers(1, experts + 2), min_size=ranks, max_size=ranks))
    active = draw(st.lists(st.booleans(), min_size=ranks, max_size=ranks).filter(any))
    while sum(s * a for s, a in zip(slots, active, strict=True)) < experts:
        slots = [s + 1 for s in slots]
    speed = draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=ranks, max_size=ranks))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    windows = draw(st.sampled_from([1, 3]))
    load = rng.lognormal(3, 1.5, (windows, 2, experts)) * rng.integers(0, 5, (windows, 2, experts)).clip(0, 1)
    options: dict[str, Any] = {"active_ranks": active, "dispatch": draw(st.sampled_from(["even", "weighted"]))}
    if draw(st.booleans()):
        options["max_node_transfers"] = np.full((len(sizes), len(sizes)), draw(st.integers(0, 2)))
    room = np.bincount(node, np.multiply(slots, active))
    if locality and options["dispatch"] == "even" and (room // size).sum() >= groups:
        options |= {"locality": draw(st.sampled_from(["none", "group", "first_copy"])), "num_groups": groups}
    return Case(load, Topology(rank_to_node=node, rank_speed=speed), slots, options)


def check_rows(case: Case, layout: ExpertLayout, *, pairs: bool = False) -> None:
    """Slots that a rank does not have are empty, and none holds an expert twice without need."""
    assert layout.slots_per_rank == max(case.slots)
    assert (layout.replica_count > 0).all()
    for layer in range(layout.num_layers):
        for rank, row in enumerate(by_rank(layout, layer)):
            held = [e for e in row[: case.capacity[rank]] if e >= 0]
            assert row[case.capacity[rank] :] == [-1] * (len(row) - case.capacity[rank])
            forced = case.capacity[rank] > layout.num_experts or case.options.get("locality") == "group"
            if not (pairs or forced):
                assert len(set(held)) == len(held)


@settings(max_examples=2 * EXAMPLES)
@given(cases(), st.integers(0, 10**6))
def test_no_rank_fills_more_slots_than_it_has(case: Case, seed: int) -> None:
    first = place(case.other_load(seed), case.topology, slots_per_rank=case.slots, **case.options)
    check_rows(case, first.layout)
    later = place(case.load, case.topology, slots_per_rank=case.slots, current=first.layout, **case.options)
    check_rows(case, later.layout)
    assert np.array_equal(later.transfers, eplb.transfers(first.layout, later.layout).sum(axis=1))
    known = ~np.isnan(first.balancedness)
    assert (first.balancedness <= first.bound)[known].all()


@settings(max_examples=EXAMPLES)
@given(cases(locality=False), st.integers(0, 10**6), st.integers(0, 3))
def test_a_layout_of_other_slots_is_brought_within_those_that_ranks_have(case: Case, seed: int, budget: int) -> None:
    rng = np.random.default_rng(seed)
    experts, slots = case.load.shape[2], len(case.slots) * max(case.slots)
    rows = rng.permuted(np.tile(np.arange(slots) % experts, (2, 1)), axis=1)
    current = ExpertLayout(rows, experts, topology=case.topology)
    options = {**case.options, "max_transfers": budget}
    placed = place(case.load, case.topology, slots_per_rank=case.slots, current=current, **options)
    check_rows(case, placed.layout, pairs=True)


@pytest.mark.slow
@settings(max_examples=20)
@given(cases(locality=False))
def test_more_slots_are_never_worse_where_ranks_differ(case: Case) -> None:
    """FB1: to rounding; in windows and for solved shares too, whatever the ranks have."""
    if len(set(case.topology.rank_speed.tolist())) == 1:
        case = case._replace(
            topology=Topology(
                rank_to_node=case.topology.rank_to_node, rank_speed=[1.0, 2, 2, 2, 2, 2][: len(case.slots)]
            )
        )
    ranks, experts = len(case.slots), case.load.shape[2]
    options = {**case.options, "active_ranks": [True] * ranks}
    answers = [
        place(case.load, case.topology, num_slots=slots, **options).balancedness
        for slots in range(max(experts, ranks), experts + ranks + 3)
    ]
    for fewer, more in pairwise(answers):
        assert (np.isnan(fewer) | (more >= fewer - 1e-8)).all()


@settings(max_examples=EXAMPLES)
@given(cases(), st.integers(0, 10**6), st.sampled_from([None, 0, 1, 3]))
def test_a_layout_in_place_is_never_made_worse(case: Case, seed: int, budget: int | None) -> None:
    case.options["dispatch"] = "even"
    current = place(case.other_load(seed), case.topology, slots_per_rank=case.slots, **case.options).layout
    options = {**case.options, "max_transfers": budget}
    placed = place(case.load, case.topology, slots_per_rank=case.slots, current=current, **options)
    for layer in range(2):
        stay, now = (mean_balancedness(case, layout, layer) for layout in (current, placed.layout))
        assert np.isnan(stay) or now >= stay - 1e-12
        assert np.isnan(now) or now == pytest.approx(placed.balancedness[layer])


def mean_balancedness(case: Case, layout: ExpertLayout, layer: int) -> float:
    """By definition, for even shares: mean over the windows with load of mean time / largest time."""
    rows, speed, found = by_rank(layout, layer), case.topology.rank_speed, []
    active = [rank for rank, slots in enumerate(case.capacity) if slots > 0]
    for load in case.load[:, layer]:
        share = load / layout.replica_count[layer]
        times = [sum(share[e] for e in rows[rank] if e >= 0) / speed[rank] for rank in active]
        if load.any():
            found.append(load.sum() / speed[active].sum() / max(times))
    return float(np.mean(found)) if found else np.nan


@settings(max_examples=EXAMPLES)
@given(cases(), st.integers(0, 20))
def test_equal_slots_are_the_same_problem_as_their_number(case: Case, more: int) -> None:
    ranks, experts = len(case.slots), case.load.shape[2]
    number = ranks * experts + more  # enough, whoever is out
    slots = [number // ranks + (rank < number % ranks) for rank in range(ranks)]
    one = place(case.load, case.topology, num_slots=number, **case.options)
    other = place(case.load, case.topology, slots_per_rank=slots, **case.options)
    assert one.layout == other.layout
    assert np.array_equal(one.balancedness, other.balancedness, equal_nan=True)
    assert np.array_equal(one.bound, other.bound, equal_nan=True)
    trivial = ExpertLayout.trivial(1, experts, num_slots=number, topology=case.topology)
    assert trivial == ExpertLayout.trivial(1, experts, slots_per_rank=slots, topology=case.topology)


@settings(max_examples=EXAMPLES)
@given(cases(), st.integers(0, 10**6), st.sampled_from(["static", "even", "weighted", "quota", "random", "row"]))
def test_tables_send_to_holders_and_plans_bring_the_experts(case: Case, seed: int, mode: Any) -> None:
    options = {**case.options, "active_ranks": [True] * len(case.slots)}
    old = place(case.other_load(seed), case.topology, slots_per_rank=case.slots, **options).layout
    new = place(case.load, case.topology, slots_per_rank=case.slots, current=old, **options).layout
    shares = eplb.replica_shares(new, case.load[0]) if mode == "weighted" else None
    tables = eplb.DispatchTables(new, rank=0, mode=mode, device="cpu", shares=shares)
    was, now = (layout.physical_to_logical_map[0].reshape(len(case.slots), -1) for layout in (old, new))
    for rank, slots in enumerate(case.slots):
        plan = eplb.plan_pull(old, new, rank=rank)
        kind, source = plan.kind[0], plan.source_slot[0]
        assert (kind[slots:] == eplb.PullKind.EMPTY).all()
        moved = (kind == eplb.PullKind.READ) | (kind == eplb.PullKind.COPY_OLD)
        assert np.array_equal(was.reshape(-1)[source[moved]], now[rank][moved])
        assert np.array_equal(was[rank][kind == eplb.PullKind.KEEP], now[rank][kind == eplb.PullKind.KEEP])
    ids = torch.arange(new.num_experts)[:, None]
    found = eplb.topk_to_slots(ids, tables.layer(0)).numpy()
    assert np.array_equal(now.reshape(-1)[found], ids.numpy())


@settings(max_examples=10)
@given(case=cases(locality=False))
def test_files_and_replays_take_them(case: Case, tmp_path_factory: pytest.TempPathFactory) -> None:
    path: Path = tmp_path_factory.mktemp("layout") / "layout.json"
    layout = ExpertLayout.trivial(2, case.load.shape[2], slots_per_rank=case.slots, topology=case.topology)
    eplb.save_layout(layout, path)
    assert eplb.load_layout(path, topology=case.topology) == layout
    trace = np.rint(np.concatenate([case.load + 1] * 3)).astype(np.int64)
    replay = eplb.simulate(trace, topology=case.topology, slots_per_rank=case.slots, interval=2)
    assert replay.first_layout == layout
    assert replay.num_slots == sum(case.slots)
    check_rows(case._replace(options={}), replay.layout)
    swept = eplb.simulation.sweep(trace, {"slots_per_rank": [case.slots]}, topology=case.topology, interval=2)
    assert swept.mean_balancedness[0] == replay.mean_balancedness


def test_a_large_card_holds_what_a_small_one_cannot() -> None:
    """GB4: cards of 44 and 84 slots hold 128 experts, each once, as evenly as equal cards would."""
    load = np.random.default_rng(0).lognormal(3, 0.3, (3, 128))
    placed = place(load, Topology(2), slots_per_rank=[44, 84])
    assert placed.layout.num_slots == 168
    assert (placed.layout.physical_to_logical_map.reshape(3, 2, 84)[:, 0, 44:] == -1).all()
    assert (placed.layout.replica_count == 1).all()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "None"),
        ({"num_slots": 4, "slots_per_rank": [2, 2]}, r"\[2, 2\]"),
        ({"slots_per_rank": [4]}, r"shape \[1\].*ints \[2\]"),
        ({"slots_per_rank": [4, 0]}, "=0.*rank 1"),
        ({"slots_per_rank": [1, 1]}, "=2 in all.*3 experts"),
        ({"slots_per_rank": [1, 1 << 24]}, "rank 1"),
    ],
)
def test_slots_that_do_not_fit_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        place([[1, 2, 3]], Topology(2), **given)
    with pytest.raises(ValueError, match=words):
        ExpertLayout.trivial(1, 3, topology=Topology(2), **given)


def test_deepseek_needs_equal_slots() -> None:
    with pytest.raises(ValueError, match=r"\[2, 3\]"):
        eplb.simulate(np.ones((3, 1, 4)), topology=Topology(2), slots_per_rank=[2, 3], policy="deepseek", interval=1)
