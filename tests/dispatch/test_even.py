from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from eplb_core import (
    ExpertLayout,
    Topology,
    balancedness,
    even_dispatch_table,
    hash_dispatch_table,
    rank_load,
    static_dispatch_table,
)
from tests.cases import PAIR, layouts, random_layout


def reach(layout: ExpertLayout, rank: int, slot: int) -> int:
    """0 own rank, 1 own node, 2 elsewhere."""
    holder = slot // layout.slots_per_rank
    if holder == rank:
        return 0
    return 1 if layout.topology.rank_to_node[holder] == layout.topology.rank_to_node[rank] else 2


@given(layouts(num_layers=1, num_experts=(1, 3)))
@settings(max_examples=60)
def test_equal_senders_are_split_evenly_and_no_even_split_is_nearer(layout: ExpertLayout) -> None:
    table = even_dispatch_table(layout)
    ranks = layout.topology.num_ranks
    for expert in range(layout.num_experts):
        slots = layout.slots(0, expert)
        picks = table[:, 0, expert].tolist()
        counts = [picks.count(slot) for slot in slots]
        assert sum(counts) == ranks
        assert max(counts) - min(counts) <= 1

        def distance(choice: tuple[int, ...]) -> tuple[int, int]:
            steps = Counter(reach(layout, rank, slot) for rank, slot in enumerate(choice))
            return -steps[0], -steps[0] - steps[1]

        if len(slots) ** ranks <= 4096:
            best = min(
                distance(choice)
                for choice in itertools.product(slots, repeat=ranks)
                if max(c := [choice.count(s) for s in slots]) - min(c) <= 1
            )
            assert distance(tuple(picks)) == best


def test_eight_ranks_with_one_token_each_use_three_replicas_evenly() -> None:
    """vLLM's hash of the token index sends all eight to the first replica."""
    layout = ExpertLayout([[0, 1, 2, 0, 3, 4, 0, 5]], num_experts=6, topology=Topology(num_ranks=8))
    hashed = [int(hash_dispatch_table(layout, rank=rank)[0][0, 0, 0]) for rank in range(8)]
    for picks in (even_dispatch_table(layout)[:, 0, 0].tolist(), hashed):
        assert sorted(Counter(picks).values()) == [2, 3, 3]


def test_replicas_within_a_node_share_its_ranks() -> None:
    """FAULTS C2: taking the first slot of the node gives 3, 1 and 4."""
    row = [0, 1, 2, 3, 0, 4, 5, 6, 0, 7, 8, 9, 10, 11, 12, 13]
    layout = ExpertLayout([row], num_experts=14, topology=Topology(num_ranks=8, num_nodes=2))
    picks = even_dispatch_table(layout)[:, 0, 0].tolist()
    assert picks == [0, 0, 4, 4, 8, 8, 8, 0]
    assert static_dispatch_table(layout)[:, 0, 0].tolist() == [0, 0, 4, 0, 8, 8, 8, 8]


def test_every_class_of_ranks_shares_the_replicas() -> None:
    """FAULTS C5: 4 x 4 ranks, two replicas; the ranks 3, 7, 11 and 15 must not all use one."""
    layout = ExpertLayout.trivial(1, 31, num_slots=32, topology=Topology(num_ranks=16))
    picks = even_dispatch_table(layout)[:, 0, 0]
    assert sorted(Counter(picks.tolist()).values()) == [8, 8]
    for offset in range(4):
        assert sorted(Counter(picks[offset::4].tolist()).values()) == [2, 2]


@given(layouts(num_layers=1, num_experts=(1, 2)), st.data())
@settings(max_examples=60)
def test_unequal_senders_stay_within_four_thirds_of_the_optimum(layout: ExpertLayout, data: st.DataObject) -> None:
    ranks, experts = layout.topology.num_ranks, layout.num_experts
    sent = data.draw(hnp.arrays(np.int64, (ranks, 1, experts), elements=st.integers(0, 20)))
    table = even_dispatch_table(layout, expert_load=sent)
    for expert in range(experts):
        slots, weights = layout.slots(0, expert), sent[:, 0, expert]

        def heaviest(choice: tuple[int, ...]) -> int:
            totals: Counter[int] = Counter()
            for slot, weight in zip(choice, weights.tolist(), strict=True):  # noqa: B023
                totals[slot] += weight
            return max(totals.values())

        if len(slots) ** ranks <= 1024:
            best = min(heaviest(choice) for choice in itertools.product(slots, repeat=ranks))
            assert 3 * heaviest(tuple(table[:, 0, expert].tolist())) <= 4 * best


def test_who_sends_how_much_decides() -> None:
    layout = ExpertLayout([[0, 1, 2, 0]], num_experts=3, topology=Topology(num_ranks=4))
    sent = np.zeros((4, 1, 3))
    sent[:, 0, 0] = [90, 10, 40, 40]
    assert even_dispatch_table(layout, expert_load=sent)[:, 0, 0].tolist() == [0, 3, 3, 3]
    sent[:, 0, 0] = [0, 0, 0, 7]
    assert even_dispatch_table(layout, expert_load=sent)[3, 0, 0] == 3


def test_a_node_does_not_keep_more_than_its_part() -> None:
    """Both ranks of a node would send to its slot: 100 and 2 tokens where 51 and 51 are possible."""
    layout = ExpertLayout([[0, 1, 2, 0]], num_experts=3, topology=Topology(num_ranks=4, num_nodes=2))
    sent = np.zeros((4, 1, 3))
    sent[:, 0, 0] = [50, 50, 1, 1]
    picks = even_dispatch_table(layout, expert_load=sent)[:, 0, 0]
    assert picks[0] == 0
    assert np.bincount(picks, weights=sent[:, 0, 0]).max() <= 52


@given(layouts())
@settings(max_examples=60)
def test_every_entry_is_a_slot_that_holds_the_expert(layout: ExpertLayout) -> None:
    """FAULTS C16."""
    rng = np.random.default_rng(layout.num_slots)
    shape = (layout.topology.num_ranks, layout.num_layers, layout.num_experts)
    loads = (None, rng.integers(0, 9, shape[1:]), rng.integers(0, 9, shape))
    tables = [even_dispatch_table(layout, expert_load=load) for load in loads]
    tables += [static_dispatch_table(layout, candidates=words) for words in ("all", "narrowed")]
    for table in tables:
        held = np.take_along_axis(layout.physical_to_logical_map[None], table, axis=2)
        assert (held == np.arange(layout.num_experts)).all()


def test_a_layer_of_the_even_table_depends_on_its_own_row_alone() -> None:
    old, other = random_layout(seed=1), random_layout(seed=2)
    mixed = old.replace(other, [1])
    table = even_dispatch_table(mixed)
    np.testing.assert_array_equal(table[:, 1], even_dispatch_table(other)[:, 1])
    np.testing.assert_array_equal(table[:, 2:], even_dispatch_table(old)[:, 2:])


def table_balancedness(layout: ExpertLayout, table: npt.NDArray[Any], load: npt.NDArray[Any]) -> float:
    """Mean balancedness when every rank sends an equal part of each expert by `table`."""
    ranks = layout.topology.num_ranks
    slot_load = np.zeros((layout.num_layers, layout.num_slots))
    for rank in range(ranks):
        for layer in range(layout.num_layers):
            np.add.at(slot_load[layer], table[rank, layer], load[layer] / ranks)
    return float(balancedness(slot_load.reshape(layout.num_layers, ranks, -1).sum(-1)).mean())


def test_even_tables_lose_less_than_static_ones() -> None:
    """Static tables that take the first slot of a node lose up to a quarter of the balancedness."""
    rng = np.random.default_rng(3)
    layout = random_layout(layers=4, experts=64, slots=96, ranks=16, nodes=4, seed=3)
    load = layout.replica_count * rng.lognormal(0, 0.3, layout.replica_count.shape)
    split = float(balancedness(rank_load(layout, load)).mean())
    even = table_balancedness(layout, even_dispatch_table(layout, expert_load=load), load)
    static = table_balancedness(layout, static_dispatch_table(layout), load)
    assert static < even
    assert even > 0.95 * split


def test_repeated_entries_express_weights() -> None:
    """vLLM's kernel takes `hash % count`: weights 2:1:1 give 256, 128 and 128 of 512 tokens."""
    layout = ExpertLayout([[0, 0, 0, 1]], num_experts=2, topology=Topology(num_ranks=4))
    table, count = hash_dispatch_table(layout, shares=[[0.5, 0.25, 0.25, 1.0]])
    assert count.tolist() == [[4, 1]]
    picked = Counter(int(table[0, 0, h % 4]) for h in range(512))
    assert picked == {0: 256, 1: 128, 2: 128}


@given(layouts(), st.integers(0, 3), st.data())
@settings(max_examples=40)
def test_repeats_meet_every_share_within_half_an_entry(layout: ExpertLayout, rank: int, data: st.DataObject) -> None:
    weights = data.draw(hnp.arrays(np.float64, layout.num_slots, elements=st.integers(1, 9)))
    p2l = layout.physical_to_logical_map
    shares = np.zeros(p2l.shape)
    for layer, row in enumerate(p2l):
        for expert in range(layout.num_experts):
            mine = row == expert
            shares[layer, mine] = weights[mine] / weights[mine].sum()
    table, count = hash_dispatch_table(layout, shares=shares, rank=rank % layout.topology.num_ranks, width=48)
    for layer, row in enumerate(p2l):
        for expert in range(layout.num_experts):
            entries = table[layer, expert, : count[layer, expert]]
            assert (row[entries] == expert).all()
            assert (table[layer, expert, count[layer, expert] :] == -1).all()
            for slot in layout.slots(layer, expert):
                share = np.count_nonzero(entries == slot) / len(entries)
                assert abs(share - shares[layer, slot]) <= 0.5 / 25  # one of 25..48 entries is at least so near


NOT_A_NUMBER = np.where(np.arange(8) == 6, np.nan, 1.0).reshape(2, 1, 4)


@pytest.mark.parametrize(
    ("load", "error", "text"),
    [
        (np.ones((1, 5)), ValueError, r"must be \[1, 4\] or \[2, 1, 4\] from each rank"),
        (np.ones((3, 1, 4)), ValueError, r"`expert_load` \(shape \[3, 1, 4\]\) must be \[1, 4\] or \[2, 1, 4\]"),
        (np.full((2, 1, 4), 1j), TypeError, r"`expert_load` \(dtype .*\) must be integers or floats"),
        (np.full((2, 1, 4), "much"), TypeError, r"`expert_load` \(dtype .*\) must be integers or floats"),
        (NOT_A_NUMBER, ValueError, r"source rank 1, layer 0, expert 2"),
    ],
)
def test_bad_loads_of_even_tables_are_named(load: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        even_dispatch_table(PAIR, expert_load=load)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"rank": 2}, IndexError, r"`rank` \(=2\) must be in \[0, 2\)"),
        ({"width": 1}, ValueError, r"`width` \(=1\) must be at least 2"),
        ({"shares": np.ones((1, 5))}, ValueError, r"`shares` \(shape \[1, 5\]\) must be \[1, 6\]"),
        ({"shares": [[-0.5, 1, 1, 0.5, 0.5, 1.5]]}, ValueError, r"\(=-0.5\) must be in \[0, 1\] at layer 0, slot 0"),
        ({"shares": [[0.5, 1, 1, 0.5, 0.5, 0.25]]}, ValueError, r"expert 0 \(sum 0.75\) must sum to 1 at layer 0"),
    ],
)
def test_bad_arguments_of_hash_tables_are_named(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        hash_dispatch_table(PAIR, **options)


def test_ranks_that_fit_in_one_order_alone_are_spread_in_that_order() -> None:
    """Nearest slots first do not fit under what heaviest ranks first have reached."""
    weights = [90, 7, 17, 19, 98, 45, 83, 74, 11]
    layout = ExpertLayout([[0, 0, 1, 2, 3, 4, 5, 6, 7]], 8, topology=Topology(9, 3))
    load = np.zeros((9, 1, 8))
    load[:, 0, 0] = weights
    picks = np.asarray(even_dispatch_table(layout, expert_load=load))[:, 0, 0]
    sums = [sum(weight for weight, pick in zip(weights, picks, strict=True) if pick == slot) for slot in (0, 1)]
    assert sum(sums) == sum(weights)
    heaviest_first = [0, 0]
    for weight in sorted(weights, reverse=True):
        heaviest_first[heaviest_first.index(min(heaviest_first))] += weight
    assert max(sums) <= max(heaviest_first)
