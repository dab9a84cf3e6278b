"""Limits of links and costs by where a transfer comes from: counted again, transfer by transfer."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eplb_core as eplb
from eplb_core import ExpertLayout, Placement, Topology
from eplb_core.placement.search.links import keeps_home, new_links
from eplb_core.placement.search.state import begin, new_work

EXAMPLES = 60
Ints = npt.NDArray[np.int64]


class Case(NamedTuple):
    windows: npt.NDArray[np.float64]
    live: ExpertLayout
    active: npt.NDArray[np.bool_]
    rank_limit: Ints
    node_limit: Ints
    options: dict[str, Any]

    def place(self, **options: Any) -> Placement:
        limits = {"max_rank_transfers": self.rank_limit, "max_node_transfers": self.node_limit}
        return eplb.place(
            self.windows,
            self.live.topology,
            num_slots=self.live.num_slots,
            current=self.live,
            active_ranks=self.active,
            **{**limits, **self.options, **options},
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Layouts with empty slots and pairs, ranks that are out, limits from none at all to none allowed."""
    ranks, stride = draw(st.integers(2, 6)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    active = rng.random(ranks) < 0.8
    active[rng.integers(ranks)] = True
    experts = int(rng.integers(1, active.sum() * stride + 1))
    row = np.concatenate([rng.permutation(experts), rng.integers(-1, experts, ranks * stride - experts)])
    topology = Topology(rank_to_node=np.arange(ranks) * min(ranks, 2) // ranks)
    nodes = topology.num_nodes
    choices = draw(st.sampled_from([[-1, 0, 1, 2], [0, 0, 1], [-1], [0, 1]]))
    options = {
        "transfer_price": draw(st.sampled_from([0.0, 0.001])),
        "dispatch": draw(st.sampled_from(["even", "weighted"])),
        "max_transfers": draw(st.sampled_from([None, 0, 1, 3])),
        "transfer_cost": draw(st.sampled_from([None, rng.choice([0.0, 0.5, 1.0], (ranks, ranks))])),
        "min_gain": 0.0,
    }
    return Case(
        rng.lognormal(0, 1, (draw(st.integers(1, 3)), 1, experts)),
        ExpertLayout([rng.permutation(row)], experts, topology=topology),
        active,
        rng.choice(choices, (ranks, ranks)),
        rng.choice([-1, -1, 0, 1, 2], (nodes, nodes)),
        options,
    )


def received(case: Case, layout: ExpertLayout) -> list[tuple[int, int]]:
    """Rank and expert of each transfer."""
    stride = layout.slots_per_rank
    old, new = case.live.physical_to_logical_map[0], layout.physical_to_logical_map[0]
    found = []
    for r in range(layout.topology.num_ranks):
        mine = slice(r * stride, (r + 1) * stride)
        found += [(r, int(e)) for e in sorted(set(new[mine]) - set(old[mine]) - {-1})]
    return found


def lost(case: Case) -> set[int]:
    """Experts that only ranks which are out hold."""
    alive = np.repeat(case.active, case.live.slots_per_rank)
    row = case.live.physical_to_logical_map[0]
    return set(range(case.live.num_experts)) - set(row[alive].tolist())


@settings(max_examples=3 * EXAMPLES)
@given(cases())
def test_no_link_carries_more_than_its_limit(case: Case) -> None:
    """Every transfer is booked on the link of one holder, but for lost experts that no link has room for."""
    answer = case.place()
    topology, stride = case.live.topology, case.live.slots_per_rank
    moved, row = received(case, answer.layout), answer.layout.physical_to_logical_map[0]
    assert answer.transfers[0] == len(moved) <= max(case.options["max_transfers"] or 99, len(lost(case)))
    assert set(range(case.live.num_experts)) <= set(row.tolist())
    if min(case.rank_limit.min(), case.node_limit.min()) < 0 and answer.senders is None:
        assert (case.rank_limit < 0).all()
        assert (case.node_limit < 0).all()
        return
    assert answer.senders is not None
    booked = {(p // stride, int(row[p])): int(s) for p, s in enumerate(answer.senders[0]) if s >= 0}
    assert len(booked) == np.count_nonzero(answer.senders >= 0)
    assert set(booked) <= set(moved)
    assert {e for _, e in set(moved) - set(booked)} <= lost(case)
    node = topology.rank_to_node
    by_rank = Counter((s, r) for (r, _), s in booked.items())
    by_node = Counter((int(node[s]), int(node[r])) for (r, _), s in booked.items())
    for (r, e), s in booked.items():
        assert e in case.live.physical_to_logical_map[0, s * stride : (s + 1) * stride]
        assert s != r
    assert all(case.rank_limit[link] < 0 or count <= case.rank_limit[link] for link, count in by_rank.items())
    assert all(case.node_limit[link] < 0 or count <= case.node_limit[link] for link, count in by_node.items())


@settings(max_examples=EXAMPLES)
@given(cases())
def test_limits_are_no_reason_for_a_worse_row(case: Case) -> None:
    """No answer is worth less than staying, where the row can stay."""
    answer = case.place()
    if not lost(case):
        stay = case.place(min_gain=1e9)
        assert stay.transfers[0] == 0
        assert answer.balancedness[0] >= stay.balancedness[0] - 1e-3 * (case.options["dispatch"] == "weighted")


@settings(max_examples=EXAMPLES)
@given(cases())
def test_limits_of_minus_one_are_none(case: Case) -> None:
    no = {"max_rank_transfers": None, "max_node_transfers": None}
    none = case.place(**no)
    far = case.place(
        **{name: np.full_like(getattr(case, name.replace("max_", "").replace("transfers", "limit")), -1) for name in no}
    )
    assert far.layout.digest == none.layout.digest
    assert far.senders is None
    assert none.senders is None


@settings(max_examples=EXAMPLES)
@given(cases())
def test_a_limit_of_zero_on_all_links_moves_lost_experts_alone(case: Case) -> None:
    ranks = case.live.topology.num_ranks
    answer = case.place(max_rank_transfers=np.zeros((ranks, ranks), int), max_transfers=None)
    assert sorted(e for _, e in received(case, answer.layout)) == sorted(lost(case))


def test_wider_links_reach_more_on_the_whole() -> None:
    """Not proven by layer, as for `max_transfers`."""
    rng = np.random.default_rng(3)
    before, after = rng.lognormal(0, 0.7, (2, 24, 64))
    topology = Topology(8, num_nodes=2)
    live = eplb.place(before, topology, num_slots=72).layout
    for name, size in (("max_rank_transfers", 8), ("max_node_transfers", 2)):
        means = []
        for limit in (0, 1, 2, 4, 8):
            limits: dict[str, Any] = {name: np.full((size, size), limit)}
            answer = eplb.place(after, topology, num_slots=72, current=live, transfer_price=0, **limits)
            means.append(answer.balancedness.mean())
        assert means == sorted(means)
        assert means[0] < means[1] < means[-1]


def test_a_lost_expert_goes_where_a_link_with_room_leads() -> None:
    """Rank 3 leaves and alone holds expert 3. Least is lost on rank 0, but only its link to rank 1 has room."""
    live = ExpertLayout([[0, 1, 0, 2, 1, 2, 3, 0]], num_experts=4, topology=Topology(4))
    call: dict[str, Any] = {
        "num_slots": 8,
        "current": live,
        "active_ranks": [True, True, True, False],
        "max_transfers": 1,
    }
    load = [[1, 6, 6, 4]]
    free = eplb.place(load, live.topology, **call)
    assert free.layout.slots(0, 3)[0] // 2 == 0
    limit = np.zeros((4, 4), int)
    limit[3, 1] = 1
    answer = eplb.place(load, live.topology, **call, max_rank_transfers=limit)
    assert answer.senders is not None
    (slot,) = answer.layout.slots(0, 3)
    assert (slot // 2, answer.senders[0, slot], answer.transfers[0]) == (1, 3, 1)
    nowhere = eplb.place(load, live.topology, **call, max_rank_transfers=np.zeros((4, 4), int))
    assert nowhere.layout.digest == free.layout.digest
    assert nowhere.senders is not None
    assert (nowhere.senders == -1).all()


def test_a_link_that_is_used_up_ends_the_search() -> None:
    """Two exchanges would even the ranks; each link carries one."""
    live = ExpertLayout([[0, 1, 2, 3, 4, 5, 6, 7]], num_experts=8, topology=Topology(2))
    call: dict[str, Any] = {"num_slots": 8, "current": live, "transfer_price": 0}
    load = [[20] * 4 + [1] * 4]
    assert eplb.place(load, live.topology, **call).transfers.tolist() == [4]
    for limit in ([[-1, 1], [-1, -1]], [[-1, -1], [1, -1]]):
        answer = eplb.place(load, live.topology, **call, max_rank_transfers=limit)
        assert answer.transfers.tolist() == [2]
        assert answer.senders is not None
        assert sorted(answer.senders[0].tolist()) == [-1] * 6 + [0, 1]


def test_an_expert_comes_over_the_link_that_has_room_not_only_the_cheapest() -> None:
    """Rank 2 wants expert 0, which ranks 0 and 1 hold."""
    live = ExpertLayout([[0, 1, 0, 2, 3, -1]], num_experts=4, topology=Topology(3))
    limit = np.full((3, 3), -1)
    limit[0, 2] = 0
    cost = np.ones((3, 3))
    cost[1, 2] = 3.0
    answer = eplb.place(
        [[90, 10, 10, 5]], live.topology, num_slots=6, current=live, max_rank_transfers=limit, transfer_cost=cost
    )
    assert answer.senders is not None
    assert answer.layout.physical_to_logical_map.tolist() == [[0, 1, 0, 2, 3, 0]]
    assert answer.senders.tolist() == [[-1, -1, -1, -1, -1, 1]]


@pytest.mark.parametrize(
    ("dispatch", "locality"), [("even", "none"), ("weighted", "none"), ("even", "group"), ("even", "first_copy")]
)
@pytest.mark.parametrize("windows", [1, 3])
def test_dear_links_are_used_less_in_every_mode(dispatch: str, locality: str, windows: int) -> None:
    """Transfers between nodes at fifty times the cost: fewer of them, and none beyond what is worth it."""
    rng = np.random.default_rng(4)
    before, after = rng.lognormal(0, 0.8, (2, windows, 6, 32))
    topology = Topology(4, num_nodes=2)
    options: dict[str, Any] = {"num_slots": 40, "dispatch": dispatch, "locality": locality}
    if locality != "none":
        options["num_groups"] = 4
    live = eplb.place(before, topology, **options).layout
    cost = np.where(topology.rank_to_node[:, None] == topology.rank_to_node, 1.0, 50.0)

    def between_nodes(layout: ExpertLayout) -> int:
        """Transfers whose expert no rank of the node held."""
        count = 0
        for old, new in zip(live.physical_to_logical_map, layout.physical_to_logical_map, strict=True):
            for node in (slice(0, 20), slice(20, 40)):
                count += len(set(new[node]) - set(old[node]))
        return count

    plain = eplb.place(after, topology, current=live, **options)
    dear = eplb.place(after, topology, current=live, transfer_cost=cost, **options)
    assert plain.transfers.sum() > 0
    if between_nodes(plain.layout):
        assert between_nodes(dear.layout) < between_nodes(plain.layout)
    free = eplb.place(after, topology, current=live, transfer_cost=np.zeros((4, 4)), **options)
    assert free.balancedness.mean() >= dear.balancedness.mean() - 2e-3  # the search is greedy: it may end a hair lower


def test_a_budget_counts_experts_whatever_they_cost() -> None:
    rng = np.random.default_rng(5)
    before, after = rng.lognormal(0, 0.8, (2, 8, 32))
    topology = Topology(4)
    live = eplb.place(before, topology, num_slots=40).layout
    for cost in (0.0, 0.1, 10.0):
        answer = eplb.place(
            after, topology, num_slots=40, current=live, max_transfers=2, transfer_cost=np.full((4, 4), cost)
        )
        assert answer.transfers.max() <= 2
        assert (answer.transfers == eplb.transfers(live, answer.layout).sum(axis=1)).all()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_rank_transfers": [[1]]}, r"`max_rank_transfers` \(shape \[1, 1\]\) must be \[4, 4\], from rank to rank"),
        ({"max_node_transfers": [1, 2]}, r"`max_node_transfers` \(shape \[2\]\) must be \[2, 2\], from node to node"),
        ({"max_node_transfers": [[1, 2], [-2, 0]]}, r"`max_node_transfers` \(=-2\) must be .*, from node 1 to node 0"),
        ({"max_rank_transfers": np.full((4, 4), 0.5)}, "`max_rank_transfers`"),
    ],
)
def test_bad_limits_name_the_link(options: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        eplb.place(np.ones((1, 8)), Topology(4, num_nodes=2), num_slots=8, **options)


@pytest.mark.parametrize(("row", "kept"), [([0, 1, 0, 2], False), ([0, 0, 1, 2], True)])
def test_only_a_copy_in_the_home_node_frees_the_last_one_there(row: list[int], kept: bool) -> None:
    """Expert 0 is at home in node 0, with ranks 0 and 1; its other copy is in node 1, or in node 0."""
    none = np.zeros((0, 0), dtype=np.int64)
    links = new_links(np.ones((4, 4)), np.array([0, 0, 1, 1]), none, none)
    work = new_work(1, 3, np.ones(4), 1)
    work.load[:] = 1.0
    work.home[:] = [0, -1, -1]
    begin(False, np.array(row), work)
    assert bool(keeps_home(0, 0, -1, work, links)) is kept
