from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import eplb_core as eplb
from eplb_core.adapters.balancers import Balancers
from eplb_core.adapters.sglang import maps as sglang_maps
from eplb_core.adapters.sglang.maps import Picks
from tests.adapters.fakes import metadata_of


def nearest(slots: list[int], stride: int, rank: int, node_of: list[int] | None) -> list[int]:
    """SGLang's narrowing by its definition."""
    if len(slots) == 1:
        return slots
    mine = [s for s in slots if s // stride == rank]
    if mine:
        return mine[:1]
    if node_of is not None:
        near = [s for s in slots if node_of[s // stride] == node_of[rank]]
        if 0 < len(near) < len(slots):
            return near[:1]
    return slots


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([(1, 2), (1, 3), (2, 4)]), st.integers(1, 3), st.booleans(), st.data())
def test_lists_are_narrowed_as_sglang_does(
    shape: tuple[int, int], stride: int, prefer: bool, data: st.DataObject
) -> None:
    """R23, R43: the first slot on the rank, else the first on its node where that narrows; dispatch is as before."""
    nodes, ranks = shape
    slots = ranks * stride
    experts = data.draw(st.integers(1, slots))
    extra = data.draw(st.lists(st.integers(0, experts - 1), min_size=slots - experts, max_size=slots - experts))
    row = data.draw(st.permutations([*range(experts), *extra]))
    rank = data.draw(st.integers(0, ranks - 1))
    layout = eplb.ExpertLayout([row], experts, topology=eplb.Topology(ranks, nodes))
    node_of = layout.topology.rank_to_node.tolist() if prefer else None
    by_expert = [[s for s, e in enumerate(row) if e == expert] for expert in range(experts)]
    for asked, expected in (
        (rank, [nearest(slots, stride, rank, node_of) for slots in by_expert]),
        (None, by_expert),
    ):
        lists = sglang_maps.candidates(layout, asked, prefer_same_node=prefer)
        assert [[s for s in each if s >= 0] for each in lists[0].tolist()] == expected
        assert lists.shape[2] == max(map(len, expected))
    whole = sglang_maps.candidates(layout, None, prefer_same_node=prefer)
    assert sglang_maps.layout_of_candidates(whole, slots, layout.topology) == layout


def test_the_own_rank_goes_before_the_node_and_a_node_with_all_slots_narrows_nothing() -> None:
    topology = eplb.Topology(4, 2)
    row = [0, 1, 0, 2, 0, 3, 1, 2]  # expert 0 on the ranks 0, 1 and 2
    layout = eplb.ExpertLayout([row], 4, topology=topology)
    assert sglang_maps.candidates(layout, 1, prefer_same_node=True)[0, 0].tolist() == [2]
    assert sglang_maps.candidates(layout, 3, prefer_same_node=True)[0, 0].tolist() == [4]
    one_node = eplb.ExpertLayout([[0, 0, 1, 2, 3, 1, 2, 3]], 4, topology=topology)
    assert sglang_maps.candidates(one_node, 1, prefer_same_node=True)[0, 0].tolist() == [0, 1]


def test_narrowed_lists_are_no_layout() -> None:
    layout = eplb.ExpertLayout([[0, 1, 2, 0]], 3, topology=eplb.Topology(2))
    narrowed = sglang_maps.candidates(layout, 0, prefer_same_node=True)
    with pytest.raises(ValueError, match="must have every slot once"):
        sglang_maps.layout_of_candidates(narrowed, 4, layout.topology)


def test_static_tables_are_sglang_s_or_even() -> None:
    layout = eplb.ExpertLayout([[0, 1, 2, 3, 3, 0]], 4, topology=eplb.Topology(2))
    for rank in (0, 1):
        for picks, narrowed, expected in (
            (Picks(rank), True, eplb.static_dispatch_table(layout, candidates="narrowed")),
            (Picks(rank), False, eplb.static_dispatch_table(layout)),
            (Picks(rank, even=True), True, eplb.even_dispatch_table(layout)),
        ):
            table = sglang_maps.static_table(layout, picks, narrowed=narrowed)
            assert table.tolist() == expected[rank].tolist()


def test_the_placement_starts_from_the_live_map() -> None:
    """A drift without gain moves nothing; SGLang changes 91% of the slots for 2%."""
    live = (torch.arange(24) % 16).repeat(4, 1)
    rng = np.random.default_rng(0)
    counts = torch.from_numpy(rng.integers(1, 1000, (3, 4, 16)).astype(np.int32))
    counts[:, 2] = 0
    p2l, l2p, count = first = sglang_maps.rebalance(counts, 24, 6, num_nodes=1, live=live)
    current = eplb.ExpertLayout(live, 16, topology=eplb.Topology(4))
    expected = eplb.place(counts, eplb.Topology(4), num_slots=24, current=current).layout
    assert np.array_equal(p2l.numpy(), expected.physical_to_logical_map)
    assert torch.equal(p2l[2], live[2])  # dense, or idle
    again = sglang_maps.rebalance(counts, 24, 6, num_nodes=1, live=p2l)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert count.sum(dim=1).tolist() == [24] * 4
    for layer, expert in ((0, 3), (3, 15)):
        slots = [s for s in l2p[layer, expert].tolist() if s >= 0]
        assert slots == torch.nonzero(p2l[layer] == expert).view(-1).tolist()


@pytest.mark.parametrize("live", [None, torch.zeros(4, 24, dtype=torch.int64), torch.zeros(4, 7, dtype=torch.int64)])
def test_without_a_live_layout_the_placement_is_from_nothing(live: torch.Tensor | None) -> None:
    counts = torch.from_numpy(np.random.default_rng(1).integers(1, 1000, (1, 4, 16)))
    expected = eplb.place(counts[0], eplb.Topology(4), num_slots=24).layout.physical_to_logical_map
    assert np.array_equal(sglang_maps.rebalance(counts, 24, 6, num_nodes=1, live=live)[0].numpy(), expected)


def test_auto_answers_as_a_balancer_that_sees_each_call_s_sum() -> None:
    rng = np.random.default_rng(0)
    balancers, topology = Balancers(), eplb.Topology(4)
    balancer = eplb.Balancer(topology, num_slots=24, move_cost=0.02)
    live = start = (torch.arange(24) % 16).repeat(3, 1)
    for passes in (1, 5, 70, 3):
        counts = rng.poisson(np.linspace(1, 90, 16), (passes, 3, 16))
        counts[:, 1] = 0
        balancer.observe(counts.sum(axis=0))
        expected = balancer.propose(eplb.ExpertLayout(live, 16, topology=topology)).layout.physical_to_logical_map
        auto: dict[str, Any] = {"balancers": balancers, "move_cost": 0.02, "min_gain": 0.5}  # the last is ours
        live, _, count = sglang_maps.rebalance(torch.from_numpy(counts), 24, 6, num_nodes=1, live=live, **auto)
        assert live.tolist() == np.where(expected < 0, start, expected).tolist()
        assert count.sum(dim=1).tolist() == [24] * 3
    assert not torch.equal(live, start)
    assert torch.equal(live[1], start[1])


def test_auto_forgets_where_the_live_map_is_no_layout_of_these_ranks() -> None:
    rng = np.random.default_rng(1)
    windows = torch.from_numpy(rng.poisson(np.linspace(1, 90, 16), (6, 1, 2, 16)))
    old, new = Balancers(), Balancers()
    live: torch.Tensor | None = (torch.arange(24) % 16).repeat(2, 1)
    for window in windows[:3]:
        live = sglang_maps.rebalance(window, 24, 6, num_nodes=1, live=live, balancers=old)[0]
    for window, was in zip(windows[3:], (None, live, live), strict=True):
        answers = [sglang_maps.rebalance(window, 24, 6, num_nodes=1, live=was, balancers=each) for each in (old, new)]
        assert torch.equal(answers[0][0], answers[1][0])


def test_groups_stay_on_a_node_for_hierarchical_algorithms() -> None:
    counts = torch.from_numpy(np.random.default_rng(1).integers(1, 1000, (1, 2, 16)))
    p2l = sglang_maps.rebalance(counts, 24, 6, num_nodes=2, num_groups=4)[0].numpy()
    for row in p2l:
        for group in range(4):
            assert len({slot // 12 for slot in np.flatnonzero(row // 4 == group).tolist()}) == 1


def test_auto_keeps_groups_on_a_node_too() -> None:
    rng = np.random.default_rng(2)
    balancers = Balancers()
    grouped: dict[str, Any] = {"num_nodes": 2, "num_groups": 4}
    counts = torch.from_numpy(rng.integers(1, 1000, (1, 2, 16)))
    live = sglang_maps.rebalance(counts, 24, 6, **grouped)[0]
    for seed in range(3):
        counts = torch.from_numpy(np.random.default_rng(seed).integers(1, 1000, (2, 2, 16)))
        live = sglang_maps.rebalance(counts, 24, 6, **grouped, live=live, balancers=balancers)[0]
        for row in live.numpy():
            for group in range(4):
                assert len({slot // 12 for slot in np.flatnonzero(row // 4 == group).tolist()}) == 1


def test_a_long_buffer_becomes_few_windows_in_their_order() -> None:
    counts = np.ones((100, 1, 2), dtype=np.int32)
    counts[::10] = 0
    windows = sglang_maps._windows(counts)
    assert windows.shape == (sglang_maps.WINDOWS, 1, 2)
    assert windows.sum() == 180
    assert sglang_maps._windows(np.zeros((5, 3, 2), dtype=np.int32)).tolist() == [[[0, 0]] * 3]


ROW, OTHER = [0, 1, 2, 3, 0, 1], [3, 1, 2, 0, 3, 1]


def test_an_update_writes_the_rows_of_its_layers_in_place() -> None:
    live, other, before = metadata_of([ROW] * 4), metadata_of([OTHER] * 4), metadata_of([ROW] * 4)
    tensors = [getattr(live, field) for field in sglang_maps.FIELDS]
    sglang_maps.update_rows(live, other, [1, 3, 3, 99])
    for field, tensor in zip(sglang_maps.FIELDS, tensors, strict=True):
        assert getattr(live, field) is tensor
        for layer in range(4):
            assert torch.equal(tensor[layer], getattr(other if layer in (1, 3) else before, field)[layer])


def test_metadata_that_do_not_fit_are_not_mixed() -> None:
    live, other = metadata_of([ROW] * 4), metadata_of([OTHER] * 4, static=False)
    with pytest.raises(ValueError, match="must have equal ep_size and equally shaped maps"):
        sglang_maps.update_rows(live, other, [1])
    assert live.physical_to_logical_map.tolist() == [ROW] * 4
    sglang_maps.update_rows(metadata_of([ROW] * 4, static=False), other, [1])


INFO = SimpleNamespace(
    partial_logical_to_rank_dispatch_physical_map=torch.tensor([4, 1, 2, 3]),
    partial_logical_to_all_physical_map=torch.tensor([[0, 4], [1, -1], [2, -1], [3, 5]]),
    partial_logical_to_all_physical_map_num_valid=torch.tensor([2, 1, 1, 2]),
    rank_invariant=True,
)


def test_masked_ids_stay_masked() -> None:
    """C7: SGLang maps -1 to the last expert's slot."""
    ids = torch.tensor([[0, 3], [-1, -1], [1, 2]], dtype=torch.int32)
    static = sglang_maps.dispatch_static(ids, INFO)
    assert static.tolist() == [[4, 3], [-1, -1], [1, 2]]
    spread = SimpleNamespace(**(vars(INFO) | {"rank_invariant": False}))
    before = SimpleNamespace(**{name: value for name, value in vars(INFO).items() if name != "rank_invariant"})
    for info in (INFO, spread, before):  # SGLang 0.5.15 does not say it
        slots = sglang_maps.dispatch_dynamic(ids, info)
        assert slots[1].tolist() == [-1, -1]
        assert slots[2].tolist() == [1, 2]
        assert int(slots[0, 0]) in (0, 4)
        assert slots.dtype == static.dtype == torch.int32


def test_where_ranks_agree_every_replica_is_used_whatever_the_rows() -> None:
    """SGLang's row % replicas never uses slot 4 for an expert that even rows alone choose."""
    ids = torch.tensor([[0], [1]] * 64)
    slots = sglang_maps.dispatch_dynamic(ids, INFO)
    assert torch.equal(slots, sglang_maps.dispatch_dynamic(ids, INFO))
    assert np.bincount(slots[::2, 0].numpy(), minlength=5)[[0, 4]].min() >= 20
    assert sglang_maps.dispatch_dynamic(torch.tensor([0, 3]), INFO).shape == (2,)


@pytest.mark.parametrize("bad", [[float("inf"), float("-inf")], [float("nan"), 1.0], [-1.0, 1.0]])
def test_counts_that_are_none_are_refused_before_passes_are_added_up(bad: list[float]) -> None:
    """Over 64 passes they once became 0."""
    counts = torch.ones(64, 1, 4)
    counts[40:42, 0, 2] = torch.tensor(bad)
    with pytest.raises(
        ValueError, match=r"`tokens_per_expert` \(=(-?inf|nan|-1.0)\) .* at pass 4[01], layer 0, expert 2"
    ):
        sglang_maps.rebalance(counts, 8, 4, num_nodes=1)


def test_fractions_of_counts_are_not_cut() -> None:
    """Half of one window's load: the same placement."""
    counts = torch.randint(0, 2, (64, 2, 8), generator=torch.Generator().manual_seed(1)).double()
    whole, half = (sglang_maps.rebalance(load, 12, 6, num_nodes=1)[0] for load in (counts, counts / 2))
    assert torch.equal(whole, half)
    assert not torch.equal(whole, sglang_maps.rebalance(torch.zeros_like(counts), 12, 6, num_nodes=1)[0])
