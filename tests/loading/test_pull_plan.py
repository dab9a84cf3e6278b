"""Pull plans against plain Python: applied to labelled weights they give the new layout, whoever installs first."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core import ExpertLayout, Topology, place, transfers
from eplb_core.loading.pull_plan import PullKind, PullPlan, plan_pull
from tests.loading.worlds import layout_pairs

KEEP, COPY_OLD, COPY_NEW, READ, RESTORE, EMPTY = PullKind
PAIRS = layout_pairs(most_ranks=5)


def layout(rows: list[list[int]], experts: int, ranks: int, nodes: int = 1) -> ExpertLayout:
    return ExpertLayout(rows, experts, topology=Topology(ranks, nodes))


def plans_of(old: ExpertLayout, new: ExpertLayout, **options: object) -> list[PullPlan]:
    return [plan_pull(old, new, rank=rank, **options) for rank in range(old.topology.num_ranks)]  # type: ignore[arg-type]


def check(plans: list[PullPlan], old: ExpertLayout, new: ExpertLayout, order: Sequence[int]) -> None:
    """Stage all ranks' reads of a layer, then install rank by rank in the order given: that gives the new layout."""
    per_rank = old.slots_per_rank
    weights = {(layer, slot): f"{layer}/{e}" for (layer, slot), e in np.ndenumerate(old.physical_to_logical_map)}
    for i, layer in enumerate(plans[0].layers.tolist()):
        staged: dict[int, str] = {}
        for plan in plans:
            for local, (kind, source) in enumerate(zip(plan.kind[i], plan.source_slot[i], strict=True)):
                if kind == READ:
                    assert source // per_rank != plan.rank
                    staged[plan.rank * per_rank + local] = weights[layer, int(source)]
        for rank in order:
            plan = plans[rank]
            before = dict(weights)
            for local, (kind, source) in enumerate(zip(plan.kind[i], plan.source_slot[i], strict=True)):
                slot = rank * per_rank + local
                if kind in (COPY_OLD, COPY_NEW):
                    assert source // per_rank == rank
                    assert kind == COPY_OLD or source < slot
                if kind == COPY_OLD:
                    weights[layer, slot] = before[layer, int(source)]
                elif kind == COPY_NEW:
                    weights[layer, slot] = weights[layer, int(source)]
                elif kind == READ:
                    weights[layer, slot] = staged[slot]

    for (layer, slot), expert in np.ndenumerate(new.physical_to_logical_map):
        if expert >= 0:
            assert weights[layer, slot] == f"{layer}/{expert}"


@settings(deadline=None, max_examples=60)
@given(PAIRS, st.randoms(use_true_random=False))
def test_all_plans_applied_to_the_old_layout_give_the_new_one_in_any_order_of_installs(
    layouts: list[ExpertLayout], random: Random
) -> None:
    """R51."""
    old, new = layouts
    order = list(range(old.topology.num_ranks))
    random.shuffle(order)
    check(plans_of(old, new), old, new, order)


@settings(deadline=None, max_examples=60)
@given(PAIRS)
def test_a_plan_reads_what_must_be_transferred_and_each_expert_once(layouts: list[ExpertLayout]) -> None:
    old, new = layouts
    plans = plans_of(old, new)
    reads = np.stack([plan.num_reads for plan in plans], axis=1)
    assert reads.tolist() == transfers(old, new).tolist()
    for plan in plans:
        assert plan.most_staged.tolist() == reads.max(axis=1).tolist()
        assert ((plan.kind == READ).sum(axis=1) == plan.num_reads).all()
        for i in range(len(plan.layers)):
            sources = plan.source_slot[i][plan.kind[i] == READ] // old.slots_per_rank
            assert plan.reads_from[i].tolist() == np.bincount(sources, minlength=old.topology.num_ranks).tolist()


@settings(deadline=None, max_examples=60)
@given(PAIRS)
def test_the_same_node_serves_a_read_if_it_can(layouts: list[ExpertLayout]) -> None:
    old, new = layouts
    nodes = old.topology.rank_to_node
    for plan in plans_of(old, new):
        for i, local in np.argwhere(plan.kind == READ).tolist():
            expert = int(new.physical_to_logical_map[i, plan.rank * old.slots_per_rank + local])
            holders = {nodes[slot // old.slots_per_rank] for slot in old.slots(i, expert)}
            near = nodes[plan.source_slot[i, local] // old.slots_per_rank] == nodes[plan.rank]
            assert near == (nodes[plan.rank] in holders)


@settings(deadline=None, max_examples=60)
@given(PAIRS, st.data())
def test_avoided_ranks_and_unloaded_slots_are_no_source(layouts: list[ExpertLayout], data: st.DataObject) -> None:
    """E17: and an unloaded slot is filled although it keeps its expert."""
    old, new = layouts
    shape = old.physical_to_logical_map.shape
    ranks, per_rank = old.topology.num_ranks, old.slots_per_rank
    loaded = np.array(data.draw(st.lists(st.booleans(), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1])))
    loaded = loaded.reshape(shape)
    avoid = data.draw(st.sets(st.integers(0, ranks - 1)))
    for plan in plans_of(old, new, avoid_ranks=avoid, loaded=loaded):
        for i, local in itertools.product(range(shape[0]), range(per_rank)):
            slot, kind, source = plan.rank * per_rank + local, plan.kind[i, local], int(plan.source_slot[i, local])
            expert = int(new.physical_to_logical_map[i, slot])
            able = [s for s in old.slots(i, expert) if loaded[i, s]] if expert >= 0 else []
            inside = [s for s in able if s // per_rank == plan.rank]
            if expert < 0:
                assert (kind, source) == (EMPTY, -1)
            elif slot in inside:
                assert (kind, source) == (KEEP, slot)
            elif inside:
                assert kind == COPY_OLD
                assert source in inside
            elif kind == COPY_NEW:
                assert plan.kind[i, source - plan.rank * per_rank] in (READ, RESTORE)
                assert new.physical_to_logical_map[i, source] == expert
                assert source < slot
            elif kind == READ:
                assert source in able
                assert source // per_rank not in avoid
            else:
                assert (kind, source) == (RESTORE, -1)
                assert not [s for s in able if s // per_rank not in avoid]


@settings(deadline=None, max_examples=60)
@given(PAIRS, st.data())
def test_a_layer_s_plan_depends_on_its_own_rows_alone(layouts: list[ExpertLayout], data: st.DataObject) -> None:
    old, new = layouts
    rows = data.draw(st.lists(st.integers(0, old.num_layers - 1), max_size=4))
    whole, part = plan_pull(old, new, rank=0), plan_pull(old, new, rank=0, layers=np.array(rows, dtype=np.int64))
    assert part.layers.tolist() == rows
    for field in ("kind", "source_slot", "num_reads", "reads_from", "most_staged"):
        assert getattr(part, field).tolist() == getattr(whole, field)[rows].tolist()


def test_the_second_of_two_new_replicas_on_a_rank_is_filled_from_the_first() -> None:
    """E1."""
    plan = plan_pull(layout([[0, 1, 2, 3, 1, 2]], 4, 2), layout([[0, 1, 2, 3, 0, 0]], 4, 2), rank=1)
    assert plan.kind.tolist() == [[KEEP, READ, COPY_NEW]]
    assert plan.source_slot.tolist() == [[3, 0, 4]]
    assert plan.num_reads.tolist() == [1]


def test_a_rank_that_holds_an_expert_in_slots_apart_is_one_holder() -> None:
    """E9: ranks 0 and 1 hold expert 5, rank 0 twice; two readers take one each."""
    old = layout([[5, 1, 5, 5, 0, 2, 3, 4, 4, 3, 4, 4]], 6, 4)
    new = layout([[5, 1, 5, 5, 0, 2, 3, 4, 5, 3, 4, 5]], 6, 4)
    plans = plans_of(old, new)
    assert sum(plan.reads_from[0] for plan in plans).tolist() == [1, 1, 0, 0]


def test_reads_of_one_expert_are_spread_over_its_holders() -> None:
    """E14: far holders on two ranks, four readers: two each; a holder on the readers' node would serve them all."""
    old = layout([[0, 1, 0, 2, 3, 1, 3, 1, 2, 1, 2, 1]], 4, 6, 3)
    new = layout([[0, 1, 0, 2, 3, 0, 3, 0, 2, 0, 2, 0]], 4, 6, 3)
    reads = np.sum([plan.reads_from[0] for plan in plans_of(old, new)], axis=0)
    assert reads.tolist() == [2, 2, 0, 0, 0, 0]
    near = layout([[0, 1, 0, 2, 0, 1, 3, 1, 2, 1, 2, 3]], 4, 6, 3)
    plan = plan_pull(near, layout([[0, 1, 0, 2, 0, 1, 3, 0, 2, 1, 2, 3]], 4, 6, 3), rank=3)
    assert plan.source_slot[0].tolist() == [6, 4]


def test_a_read_goes_past_a_holder_that_is_left_out() -> None:
    old, new = layout([[0, 0, 1, 1]], 2, 4), layout([[0, 0, 0, 1]], 2, 4)
    assert plan_pull(old, new, rank=2).source_slot.tolist() == [[0]]
    assert plan_pull(old, new, rank=2, avoid_ranks=[0]).source_slot.tolist() == [[1]]


def test_reads_with_one_choice_are_placed_before_those_with_several() -> None:
    """Rank 2 could read expert 0 from rank 0 or 1, and must read 1 from rank 0: so 0 comes from rank 1."""
    old = layout([[0, 1, 0, 2, 3, 3, 3, 3]], 4, 4)
    plan = plan_pull(old, layout([[0, 1, 0, 2, 0, 1, 3, 3]], 4, 4), rank=2)
    assert plan.source_slot[0].tolist() == [2, 1]


def test_ties_are_broken_from_another_rank_on_each_layer() -> None:
    old = layout([[0, 0, 1]] * 4, 2, 3)
    plan = plan_pull(old, layout([[1, 0, 0]] * 4, 2, 3), rank=2)
    assert plan.source_slot[:, 0].tolist() == [0, 1, 0, 0]


def test_a_copy_inside_the_rank_prefers_a_slot_that_stays() -> None:
    plan = plan_pull(layout([[0, 0, 1, 2]], 3, 1), layout([[1, 0, 0, 2]], 3, 1), rank=0)
    assert plan.kind.tolist() == [[COPY_OLD, KEEP, COPY_OLD, KEEP]]
    assert plan.source_slot.tolist() == [[2, 1, 1, 3]]


def test_reads_come_from_the_senders_that_were_booked_so_limits_of_links_hold() -> None:
    rng = np.random.default_rng(0)
    topology = Topology(num_ranks=8, num_nodes=4)
    load = rng.lognormal(3.0, 1.2, (3, 4, 24))
    live = place(load[0], topology, num_slots=32).layout
    limits = np.ones((8, 8), dtype=np.int64)
    placement = place(
        load[1], topology, num_slots=32, current=live, max_rank_transfers=limits, transfer_price=0.0, min_gain=0.0
    )
    assert placement.senders is not None
    assert placement.transfers.sum() > 8
    plans = [plan_pull(live, placement.layout, rank=rank, senders=placement.senders) for rank in range(8)]
    by_link = np.stack([plan.reads_from for plan in plans], axis=2)  # [L, from, to]
    assert by_link.sum() == placement.transfers.sum()
    assert by_link.max() == 1
    free = np.stack([plan_pull(live, placement.layout, rank=rank).reads_from for rank in range(8)], axis=2)
    assert free.max() > 1  # nearest and fewest reads alone do not keep them
    check(plans, live, placement.layout, range(8))


def test_a_sender_that_cannot_be_read_counts_for_nothing() -> None:
    old = ExpertLayout([[0, 1, 0, 2, 0, 3]], num_experts=4, topology=Topology(3))
    new = ExpertLayout([[0, 1, 2, 0, 3, 1]], num_experts=4, topology=Topology(3))
    for sender in (-1, 1, 2):  # expert 1 is on rank 0 alone
        senders = np.full((1, 6), sender)
        assert plan_pull(old, new, rank=2, senders=senders).source_slot.tolist() == [[5, 1]]
    kinds = plan_pull(old, new, rank=2, senders=[[0] * 6], avoid_ranks=[0]).kind
    assert kinds.tolist() == [[COPY_OLD, RESTORE]]
    new = ExpertLayout([[0, 1, 0, 2, 3, 0]], num_experts=4, topology=Topology(3))  # expert 0 is on rank 1 too
    assert plan_pull(old, new, rank=1, senders=[[0] * 6]).kind.tolist() == [[KEEP, KEEP]]
    old = ExpertLayout([[0, 1, 0, 2, 3, 3]], num_experts=4, topology=Topology(3))
    assert plan_pull(old, new, rank=2, senders=[[0] * 6]).source_slot.tolist() == [[4, 0]]
    assert plan_pull(old, new, rank=2, senders=[[0] * 6], avoid_ranks=[0]).source_slot.tolist() == [[4, 2]]


def test_reads_whose_sender_is_settled_leave_others_what_room_there_is() -> None:
    old = ExpertLayout([[0, 1, 0, 1, 2, 3, 2, 3]], num_experts=4, topology=Topology(4))
    new = ExpertLayout([[3, 1, 0, 1, 2, 0, 2, 1]], num_experts=4, topology=Topology(4))
    senders = np.full((1, 8), -1)
    senders[0, 7] = 0  # expert 1 for rank 3 comes from rank 0, so expert 0 for rank 2 comes from rank 1
    plans = plans_of(old, new, senders=senders)
    assert plans[3].reads_from.tolist() == [[1, 0, 0, 0]]
    assert plans[2].reads_from.tolist() == [[0, 1, 0, 0]]


def test_the_last_holder_left_out_means_a_restore() -> None:
    """H1: experts 2 and 3 lived on rank 1 alone."""
    old = layout([[0, 1, 2, 3, 0, 1]], 4, 3)
    new = layout([[0, 2, -1, -1, 3, 1]], 4, 3)
    plans = plans_of(old, new, avoid_ranks=[1])
    assert [plan.kind[0].tolist() for plan in plans] == [[KEEP, RESTORE], [EMPTY, EMPTY], [RESTORE, KEEP]]
    assert [plan.num_restores.tolist() for plan in plans] == [[1], [0], [1]]


def test_arrays_of_a_plan_do_not_change() -> None:
    plan = plan_pull(layout([[0, 1]], 2, 2), layout([[1, 0]], 2, 2), rank=0)
    with pytest.raises(ValueError, match="read-only"):
        plan.kind[0, 0] = KEEP


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"rank": 2}, ValueError, r"`rank` \(=2\) must be in \[0, 2\)"),
        ({"rank": -1}, ValueError, r"`rank` \(=-1\) must be at least 0"),
        ({"avoid_ranks": [-1]}, IndexError, r"`avoid_ranks` \(=-1\) must be in \[0, 2\)"),
        ({"loaded": [True] * 4}, ValueError, r"`loaded` \(bool \[4\]\) must be bool \[1, 4\]"),
        ({"layers": [1]}, IndexError, r"`layers` \(=1\) must be in \[0, 1\)"),
        ({"new": layout([[0, 1, 2, 3, 0, 1]], 4, 2)}, ValueError, "layouts differ in slots: 4 and 6"),
        ({"senders": [[0] * 5]}, ValueError, r"`senders` \(shape \[1, 5\]\) must be \[1, 4\]"),
        ({"senders": [[0, 0, 2, 0]]}, ValueError, r"`senders` \(=2\) must be ranks .* or -1 at layer 0, slot 2"),
        ({"senders": [[0.0] * 4]}, TypeError, r"`senders` \(dtype float64\) must be signed integers"),
    ],
)
def test_bad_arguments_are_named(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    one = layout([[0, 1, 2, 3]], 4, 2)
    with pytest.raises(error, match=message):
        plan_pull(**{"old": one, "new": one, "rank": 0, **wrong})


@settings(deadline=None, max_examples=60)
@given(PAIRS)
def test_a_plan_for_no_change_does_nothing(layouts: list[ExpertLayout]) -> None:
    old, _ = layouts
    for plan in plans_of(old, old):
        assert set(plan.kind.reshape(-1).tolist()) <= {KEEP, EMPTY}
        assert not plan.num_reads.any()
