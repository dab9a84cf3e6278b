"""`place` with pairs: tokens reach fewer nodes, ranks stay even, and what has nothing to gain stays as it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eplb_core as eplb
from eplb_core import Topology, place
from eplb_core.placement.affinity.near import saved_sends
from eplb_core.placement.affinity.pairs import check_pairs
from tests.placement.affinity.sends import clustered_tokens, nodes_of, sends_per_token

NODES = Topology(8, 4)
TOKENS = clustered_tokens(2000, 4, 8, 4, loyalty=0.8)
LOAD = np.bincount(TOKENS.ravel(), minlength=32)[None]
PAIRS = eplb.pair_counts(TOKENS, 32)[None]
SOME: Any = {"num_slots": 40, "effort": 0.1}


def test_groups_of_experts_come_to_one_node_each_and_the_ranks_stay_even() -> None:
    far, near = place(LOAD, NODES, **SOME), place(LOAD, NODES, pairs=PAIRS, **SOME)
    assert sends_per_token(near.layout, TOKENS[:200]) < 0.65 * sends_per_token(far.layout, TOKENS[:200])
    assert near.balancedness[0] > 0.95
    assert near.bound[0] == far.bound[0]


@pytest.mark.parametrize(
    "options",
    [
        {"pairs": PAIRS, "traffic_price": 0.0},
        {"pairs": np.zeros((1, 32, 32))},
        {"pairs": np.eye(32)[None]},
        {"pairs": eplb.pair_counts(clustered_tokens(2000, 4, 8, 4, loyalty=0.0), 32)[None]},
    ],
)
def test_without_a_price_or_affinity_every_byte_is_as_without_pairs(options: Any) -> None:
    far, near = place(LOAD, NODES, **SOME), place(LOAD, NODES, **SOME, **options)
    assert near.layout == far.layout
    assert near.balancedness.tolist() == far.balancedness.tolist()
    other = place(LOAD[:, ::-1], NODES, **SOME).layout
    far = place(LOAD, NODES, current=other, **SOME)
    assert place(LOAD, NODES, current=other, **SOME, **options).layout == far.layout


def test_one_node_and_pinned_groups_are_as_without_pairs() -> None:
    for topology, more in ((Topology(8), {}), (NODES, {"locality": "group", "num_groups": 4})):
        options: Any = {**SOME, **more}
        assert place(LOAD, topology, pairs=PAIRS, **options).layout == place(LOAD, topology, **options).layout


def test_the_unit_of_pairs_and_their_diagonal_change_nothing() -> None:
    answer = place(LOAD, NODES, pairs=PAIRS, **SOME).layout
    assert place(LOAD, NODES, pairs=PAIRS * 4 + 9 * np.eye(32), **SOME).layout == answer


def test_a_layer_without_load_stays_trivial() -> None:
    load, pairs = np.vstack([LOAD, 0 * LOAD]), np.vstack([PAIRS, PAIRS])
    near = place(load, NODES, pairs=pairs, **SOME).layout
    assert near.physical_to_logical_map[1].tolist() == (np.arange(40) % 32).tolist()


def test_the_first_copy_stays_in_its_groups_node() -> None:
    near = place(LOAD, NODES, pairs=PAIRS, locality="first_copy", num_groups=8, **SOME).layout
    held = nodes_of(near)
    for group in range(8):
        assert set.intersection(*held[4 * group : 4 * group + 4])


def test_transfers_bring_tokens_near_step_by_step_within_the_budget() -> None:
    layout = place(LOAD, NODES, num_slots=40).layout
    sends = [sends_per_token(layout, TOKENS[:200])]
    for _ in range(4):
        answer = place(LOAD, NODES, num_slots=40, current=layout, max_transfers=8, pairs=PAIRS)
        assert answer.transfers[0] == eplb.transfers(layout, answer.layout).sum() <= 8
        layout = answer.layout
        sends.append(sends_per_token(layout, TOKENS[:200]))
    assert sends[4] < 0.8 * sends[0]
    assert sends == sorted(sends, reverse=True)


def test_a_budget_of_all_layers_and_limits_of_links_are_kept() -> None:
    load, pairs = np.vstack([LOAD, LOAD[:, ::-1]]), np.vstack([PAIRS, PAIRS[:, ::-1, ::-1]])
    live = place(load, NODES, num_slots=40).layout
    total = place(load, NODES, num_slots=40, current=live, max_total_transfers=24, pairs=pairs)
    assert 0 < total.transfers.sum() <= 24
    limits = np.full((4, 4), 2)
    linked = place(load, NODES, num_slots=40, current=live, max_transfers=16, max_node_transfers=limits, pairs=pairs)
    assert linked.senders is not None
    for layer in range(2):
        came = np.flatnonzero(linked.senders[layer] >= 0)
        assert len(came) == linked.transfers[layer]
        links = np.zeros((4, 4), np.int64)
        np.add.at(links, (NODES.rank_to_node[linked.senders[layer, came]], NODES.rank_to_node[came // 5]), 1)
        assert links.max() <= 2


def test_more_nodes_than_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="30 nodes, not 32"):
        place(LOAD, Topology(32, 32), num_slots=32, pairs=PAIRS)


@settings(max_examples=15)
@given(
    seed=st.integers(0, 1000),
    node=st.lists(st.integers(0, 2), min_size=6, max_size=6).map(lambda n: [0, 1, 2, *n]),
    speed=st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=9, max_size=9),
    slots=st.integers(16, 36),
    dead=st.sampled_from([(), (2,), (0, 5)]),
)
def test_every_answer_is_valid_and_pays(seed: int, node: Any, speed: Any, slots: int, dead: Any) -> None:
    """Nodes of any size, unequal speeds, ranks that are out, any number of slots."""
    topology = Topology(rank_to_node=node, rank_speed=speed)
    active = np.array([rank not in dead for rank in range(9)])
    tokens = clustered_tokens(300, 3, 4, 3, loyalty=0.8, seed=seed)
    load, pairs = np.bincount(tokens.ravel(), minlength=12)[None], eplb.pair_counts(tokens, 12)[None]
    options: Any = {"num_slots": slots, "active_ranks": active, "effort": 0.01}
    far, near = place(load, topology, **options), place(load, topology, pairs=pairs, **options)
    row = near.layout.physical_to_logical_map[0]
    assert ((row >= 0) == (far.layout.physical_to_logical_map[0] >= 0)).all()
    assert set(row[row >= 0].tolist()) == set(range(12))
    for rank in row.reshape(9, -1):
        held = rank[rank >= 0].tolist()
        assert len(set(held)) == min(len(held), 12)
    assert near.balancedness[0] <= near.bound[0] + 1e-12
    again = place(load, topology, pairs=pairs, current=far.layout, max_transfers=4, **options)
    assert again.transfers[0] == eplb.transfers(far.layout, again.layout).sum() <= 4


def test_what_came_near_stays_near_while_windows_come() -> None:
    """And ranks are even in each: what evens out the sum of the windows alone ends at 0.90."""
    windows = np.stack([np.bincount(part.ravel(), minlength=32) for part in np.array_split(TOKENS, 8)])[:, None]
    options: Any = {"num_slots": 40, "max_transfers": 8, "transfer_price": 0.0003}
    layout = place(LOAD, NODES, num_slots=40).layout
    sends = [sends_per_token(layout, TOKENS[:200])]
    for seen in range(1, 9):
        answer = place(windows[:seen], NODES, current=layout, pairs=PAIRS, traffic_price=0.3, **options)
        layout = answer.layout
        sends.append(sends_per_token(layout, TOKENS[:200]))
        assert answer.balancedness[0] > 0.91
    assert sends[8] < 0.7 * sends[0]


def test_sends_that_a_row_saves_are_counted_as_the_search_does() -> None:
    far, near = (place(LOAD, NODES, num_slots=40, effort=0.1, pairs=given).layout for given in (None, PAIRS))
    old, new, pairs = far.physical_to_logical_map, near.physical_to_logical_map, check_pairs(PAIRS, 1, 32)
    saved = saved_sends(old, new, NODES, LOAD.astype(np.float64), pairs)
    assert saved[0] == -saved_sends(new, old, NODES, LOAD.astype(np.float64), pairs)[0]
    real = sends_per_token(far, TOKENS[:200]) - sends_per_token(near, TOKENS[:200])
    assert 0.7 * real < saved[0] < 1.3 * real
    assert saved_sends(old, new, NODES, np.zeros((1, 32)), pairs)[0] == 0.0
    assert saved_sends(old, new, NODES, LOAD.astype(np.float64), check_pairs(0 * PAIRS, 1, 32))[0] == 0.0
