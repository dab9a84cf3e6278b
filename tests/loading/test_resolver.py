from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings

import eplb_core as eplb
from eplb_core import ExpertLayout, SlotResolver, Topology
from tests.cases import layouts


def one_layer(row: list[int], num_experts: int, num_ranks: int, num_nodes: int = 1) -> ExpertLayout:
    return ExpertLayout([row], num_experts, topology=Topology(num_ranks, num_nodes))


def trivial(num_experts: int, num_slots: int, num_ranks: int) -> ExpertLayout:
    return ExpertLayout.trivial(1, num_experts, num_slots=num_slots, topology=Topology(num_ranks))


PAIR = one_layer([0, 1, 2, 3, 3, 0], 4, 2)  # rank 1 holds expert 3 twice


def slots_by_definition(layout: ExpertLayout, rank: int, row: int, expert: int) -> tuple[int, ...]:
    """Walk over the map, slot by slot."""
    held = []
    for slot, found in enumerate(layout.physical_to_logical_map[row].tolist()):
        if slot // layout.slots_per_rank == rank and found == expert:
            held.append(slot % layout.slots_per_rank)
    return tuple(held)


# ---- which slots (R34, R35, R46) -------------------------------------------------------------------------------------


def test_second_replica_on_the_same_rank_is_loaded() -> None:
    """D1: rank 1 of [0,1,2 | 3,3,0] writes all of its slots 3, 4 and 5."""
    resolver = SlotResolver(PAIR, 1)
    assert resolver.local_slots(0, 3) == (0, 1)
    assert resolver.local_slots(0, 0) == (2,)
    assert resolver.global_slots(0, 3) == (3, 4)


def test_no_layout_is_no_resolver() -> None:
    """D7: nobody loads by identity because a map did not reach them."""
    with pytest.raises(TypeError, match=r"`layout` \(=NoneType\) must be an ExpertLayout"):
        SlotResolver(None, 0)  # type: ignore[arg-type]


@settings(max_examples=60)
@example(trivial(16, 18, 2))  # D2: the last rank's redundant slots
@example(trivial(256, 272, 16))  # B3, B4: 17 slots a rank, and every local id names an expert
@example(trivial(256, 256, 16))
@example(trivial(8, 10, 2))  # D5: the experts, then the redundant copies
@example(one_layer([0, 2, 4, 1, 3, 5], 6, 2))  # D8: round-robin
@example(one_layer([5, 0, 1, 2, 3, 4, 6, 7, 0], 8, 3))  # D6
@example(one_layer([0, 1, 0, 2, 0, 3, 1, 0], 4, 4, num_nodes=2))  # R47: what dispatch would narrow
@example(one_layer([2, 3, 0, 1, 2, 2], 4, 2))  # R38, D4: whole tensors have a row for each replica
@example(one_layer([0, -1, 1, -1], 2, 2))
@given(layouts())
def test_every_slot_is_named_once_and_by_its_own_expert(layout: ExpertLayout) -> None:
    """R34, R35: the union over experts and ranks is the map; the reference walks it slot by slot."""
    for rank in range(layout.topology.num_ranks):
        resolver = SlotResolver(layout, rank)
        for row in range(layout.num_layers):
            for expert in range(layout.num_experts):
                assert resolver.local_slots(row, expert) == slots_by_definition(layout, rank, row, expert)
                assert resolver.global_slots(row, expert) == layout.slots(row, expert)
            held = layout.physical_to_logical_map[row].reshape(layout.topology.num_ranks, -1)[rank]
            assert resolver.local_experts(row) == tuple(held.tolist())


# ---- scale-up, shared experts, whole tensors, draft layers (R36 - R41) -----------------------------------------------


def test_slots_of_new_ranks_never_reach_the_shared_row_of_an_old_rank() -> None:
    """R36, H5: EP 2 -> 4; slots 6..11 are other ranks', and row 3 of ranks 0 and 1 stays the shared expert's."""
    grown = ExpertLayout([[0, 1, 2, 3, 3, 0, 1, 2, 3, 0, 1, 2]], 4, topology=Topology(num_ranks=4))
    for rank in range(4):
        resolver = SlotResolver(grown, rank, num_shared=1)
        routed = [slot for expert in range(4) for slot in resolver.local_slots(0, expert)]
        assert sorted(routed) == [0, 1, 2]
        assert resolver.local_slots(0, 4) == (3,)


@settings(max_examples=30)
@given(layouts())
def test_a_scale_up_leaves_every_row_of_the_old_ranks_where_it_was(layout: ExpertLayout) -> None:
    """R36, R47: twice the ranks, the new ones empty; expert by expert, shared rows too."""
    ranks = layout.topology.num_ranks
    grown = layout.resized(Topology(num_ranks=2 * ranks))
    for rank in range(2 * ranks):
        resolver = SlotResolver(grown, rank, num_shared=1)
        for row in range(layout.num_layers):
            for expert in range(layout.num_experts):
                before = slots_by_definition(layout, rank, row, expert) if rank < ranks else ()
                assert resolver.local_slots(row, expert) == before
            assert resolver.local_slots(row, layout.num_experts) == (layout.slots_per_rank,)


@pytest.mark.parametrize("rank", [0, 1])
def test_shared_experts_are_on_every_rank_in_both_conventions(rank: int) -> None:
    """R37: rows after the routed ones; no range filter drops them."""
    per_rank = SlotResolver(PAIR, rank, num_shared=2, shared="per_rank")
    one_for_all = SlotResolver(PAIR, rank, num_shared=2, shared="global")
    assert [per_rank.local_slots(0, expert) for expert in (4, 5)] == [(3,), (4,)]
    assert [one_for_all.local_slots(0, expert) for expert in (4, 5)] == [(3,), (4,)]
    assert [per_rank.global_slots(0, expert) for expert in (4, 5)] == [(6, 8), (7, 9)]
    assert [one_for_all.global_slots(0, expert) for expert in (4, 5)] == [(6,), (7,)]
    with pytest.raises(IndexError, match=r"`expert` \(=6\) must be in \[0, 4 \+ 2 shared\)"):
        per_rank.local_slots(0, 6)


def test_declared_draft_layers_hold_expert_e_in_slot_e() -> None:
    """R39: identity beyond the map; whole tensors get rows e, e + E, ..."""
    layout = ExpertLayout([[3, 2, 1, 0, 3, 3]], 4, topology=Topology(num_ranks=2))
    for rank, held in ((0, [(0,), (1,), (2,), ()]), (1, [(), (), (), (0,)])):
        resolver = SlotResolver(layout, rank, draft_layers=[61], num_shared=1)
        assert [resolver.local_slots(61, expert) for expert in range(4)] == held
        assert resolver.global_slots(61, 1) == (1, 5)
        assert resolver.local_slots(61, 4) == (3,)  # R41: the shared expert of a draft layer is not filtered either
        assert resolver.row(61) is None
    assert SlotResolver(layout, 1, draft_layers=[61]).local_experts(61) == (3, -1, -1)


def test_a_draft_layer_that_nobody_declared_raises() -> None:
    """R39, G8: a draft layer id never falls on a row of the target model."""
    with pytest.raises(IndexError, match=r"`layer` \(=1\) must be one of the 1 layers 0\.\.0"):
        SlotResolver(PAIR, 0).local_slots(1, 0)
    with pytest.raises(IndexError, match="must be a layer, and the layout has none"):
        SlotResolver(ExpertLayout(np.zeros((0, 2), dtype=int), 2, topology=Topology(num_ranks=1)), 0).local_slots(0, 0)


def test_layer_ids_skip_dense_layers() -> None:
    """K2: ids are keys, not offsets."""
    layout = ExpertLayout([[0, 1], [1, 0]], 2, topology=Topology(num_ranks=2))
    resolver = SlotResolver(layout, 0, layer_ids=[3, 7])
    assert (resolver.local_slots(3, 0), resolver.local_slots(7, 0)) == ((0,), ())
    assert (resolver.row(7), resolver.layers) == (1, (3, 7))
    for layer in (0, 1, 4, -1):
        with pytest.raises(IndexError, match=rf"`layer` \(={layer}\) must be one of the 2 layers 3\.\.7"):
            resolver.local_slots(layer, 0)


# ---- bad ids (R40, D13, D15) -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", ["local_slots", "global_slots"])
@pytest.mark.parametrize(("layer", "expert"), [(0, -1), (0, 4), (0, 99), (-1, 0), (1, 0), (-1, -1)])
def test_ids_out_of_range_raise(ask: str, layer: int, expert: int) -> None:
    """R40, FAULTS D13, D15: a negative id does not count from the end, one past it is nobody else's slot."""
    resolver = SlotResolver(one_layer([0, 1, 2, 3, -1, 0], 4, 2), 1)
    for _ in range(2):  # the second call finds the tables filled
        with pytest.raises(IndexError, match=r"`(layer|expert)` \(=-?\d+\) must be"):
            getattr(resolver, ask)(layer, expert)
        resolver.local_slots(0, 0)
        resolver.global_slots(0, 0)


def test_integers_of_other_libraries_are_ids_and_other_things_are_not() -> None:
    torch = pytest.importorskip("torch")
    resolver = SlotResolver(PAIR, 1)
    assert resolver.local_slots(np.int32(0), np.int64(3)) == (0, 1)  # type: ignore[arg-type]
    assert resolver.local_slots(torch.tensor(0), torch.tensor(3)) == (0, 1)
    with pytest.raises(TypeError, match="str"):
        resolver.local_slots("0", 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"rank": 2}, IndexError, r"`rank` \(=2\) must be in \[0, 2\)"),
        ({"rank": -1}, IndexError, r"`rank` \(=-1\)"),
        ({"num_shared": -1}, ValueError, r"`num_shared` \(=-1\) must be at least 0"),
        ({"shared": "both"}, ValueError, r"`shared` \(='both'\) must be 'per_rank' or 'global'"),
        ({"layer_ids": [3, 4]}, ValueError, r"`layer_ids` has 2 ids and the layout 1 layers"),
        ({"layer_ids": [3], "draft_layers": [3]}, ValueError, "layer 3 is named twice"),
        ({"draft_layers": [0]}, ValueError, "layer 0 is named twice"),
        ({"layer_ids": [-3]}, ValueError, r"\(=-3\) must not be negative"),
    ],
)
def test_bad_arguments_say_what_is_wrong(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        SlotResolver(PAIR, **{"rank": 0, **arguments})


# ---- after moves (R45, R46, D10) -------------------------------------------------------------------------------------


def test_reload_after_a_rebalance_fills_the_present_layout() -> None:
    """R45, D10: layout [0,1,2,3] -> [0,2,1,3]; reloading [110,120,130,140] routes in order again."""
    before = one_layer([0, 1, 2, 3], 4, 1)
    after = before.replace(one_layer([0, 2, 1, 3], 4, 1), [0])
    resolver = SlotResolver(before, 0, layer_ids=[5], draft_layers=[9], num_shared=1, shared="global")
    assert resolver.local_slots(5, 1) == (1,)
    weights = np.zeros(4, dtype=int)
    live = resolver.with_layout(after)
    for expert, value in enumerate([110, 120, 130, 140]):
        weights[list(live.local_slots(5, expert))] = value
    assert weights.tolist() == [110, 130, 120, 140]
    assert [weights[after.slots(0, expert)[0]] for expert in range(4)] == [110, 120, 130, 140]
    assert resolver.local_slots(5, 1) == (1,)  # the old one still answers for the old layout
    assert (live.num_shared, live.shared, live.layers) == (1, "global", (5, 9))


def test_a_resolver_does_not_change_and_travels() -> None:
    resolver = SlotResolver(PAIR, 1, layer_ids=[4], draft_layers=[8], num_shared=1)
    with pytest.raises(AttributeError, match="cannot assign to field 'rank'"):
        resolver.rank = 0  # type: ignore[misc]
    with pytest.raises(AttributeError, match="cannot assign to field 'ranks'"):
        resolver.ranks = 0  # type: ignore[attr-defined]
    copy = pickle.loads(pickle.dumps(resolver))
    assert (copy.layers, copy.rank, copy.num_shared, copy.layout) == ((4, 8), 1, 1, PAIR)
    assert copy.local_slots(4, 3) == (0, 1)
    assert "rank=1, num_shared=1, shared='per_rank'" in repr(copy)


class OfEngine(SlotResolver):
    """With a constructor of its own."""

    engine: str

    def __init__(self, engine: str, layout: ExpertLayout) -> None:
        super().__init__(layout, 1, num_shared=1)
        object.__setattr__(self, "engine", engine)


def test_a_subclass_with_another_constructor_takes_another_layout_and_travels() -> None:
    own = OfEngine("toy", PAIR)
    assert own.local_slots(0, 3) == SlotResolver(PAIR, 1).local_slots(0, 3)
    other = own.with_layout(PAIR.replace(one_pair_turned(), [0]))
    for made in (other, pickle.loads(pickle.dumps(other))):
        assert isinstance(made, OfEngine)
        assert (type(made), made.engine, made.num_shared) == (OfEngine, "toy", 1)
        assert made.local_slots(0, 3) == SlotResolver(other.layout, 1).local_slots(0, 3)
    with pytest.raises(TypeError, match="`layout`"):
        own.with_layout(3)  # type: ignore[arg-type]


def one_pair_turned() -> ExpertLayout:
    turned = PAIR.physical_to_logical_map[:, ::-1]
    return ExpertLayout(turned, PAIR.num_experts, topology=PAIR.topology)


def test_threads_that_share_a_resolver_get_the_same_answers() -> None:
    layout = ExpertLayout.trivial(20, 64, num_slots=72, topology=Topology(num_ranks=8))
    resolver = SlotResolver(layout, 7)

    def ask(ask: Callable[[int, int], tuple[int, ...]]) -> list[tuple[int, ...]]:
        return [ask(row, expert) for row in range(20) for expert in range(64)]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, [resolver.local_slots] * 8))
    assert all(answer == answers[0] for answer in answers)
    assert answers[0] == [slots_by_definition(layout, 7, row, expert) for row in range(20) for expert in range(64)]


@settings(max_examples=40, deadline=None)
@given(layouts())
def test_every_pick_of_static_tables_is_a_slot_that_its_owner_loads(layout: ExpertLayout) -> None:
    """R44, C16: a table may only point to slots that loading fills."""
    stride, ranks = layout.slots_per_rank, layout.topology.num_ranks
    resolvers = [SlotResolver(layout, rank=rank) for rank in range(ranks)]
    for candidates in ("all", "narrowed"):
        table = eplb.static_dispatch_table(layout, candidates=candidates)
        for layer in range(layout.num_layers):
            for expert in range(layout.num_experts):
                for slot in table[:, layer, expert].tolist():
                    assert layout.physical_to_logical_map[layer, slot] == expert
                    assert slot % stride in resolvers[slot // stride].local_slots(layer, expert)
