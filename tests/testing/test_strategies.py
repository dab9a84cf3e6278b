"""What the strategies draw is valid, varied, of the shape that was asked for, and prints as code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

import eplb_core
from eplb_core import ExpertLayout, Topology
from eplb_core.metrics import check_shares
from eplb_core.testing.strategies import (
    active_ranks,
    expert_loads,
    layout_pairs,
    layouts,
    rank_speeds,
    shares,
    slots_by_rank,
    topk_ids,
    topologies,
)

FEW = settings(max_examples=12)


def has_pairs(layout: ExpertLayout) -> bool:
    """Whether a rank holds an expert twice."""
    by_rank = layout.physical_to_logical_map.reshape(-1, layout.slots_per_rank).tolist()
    return any(rank.count(expert) > 1 for rank in by_rank for expert in rank if expert >= 0)


# ---- shapes ----------------------------------------------------------------------------------------------------------


@FEW
@given(topologies(num_ranks=(2, 6), num_nodes=(2, 3)))
def test_topologies_keep_within_what_was_asked_for(topology: Topology) -> None:
    assert 2 <= topology.num_nodes <= 3
    assert topology.num_nodes <= topology.num_ranks <= 6
    assert (topology.rank_speed == 1.0).all()


@FEW
@given(layouts(empty=False, pairs=False))
def test_layouts_have_pairs_only_where_counting_forces_them(layout: ExpertLayout) -> None:
    held = layout.physical_to_logical_map.reshape(layout.num_layers, -1, layout.slots_per_rank)
    assert held.min() >= 0
    for row in held.reshape(-1, layout.slots_per_rank):
        assert len(set(row.tolist())) == min(layout.slots_per_rank, layout.num_experts)


@FEW
@given(layouts(pairs=False))
def test_no_rank_holds_an_expert_twice_where_a_slot_may_be_empty(layout: ExpertLayout) -> None:
    assert not has_pairs(layout)


@FEW
@given(layouts(topology=Topology(4), num_layers=2, num_experts=6, slots_per_rank=3))
def test_shapes_can_be_exact(layout: ExpertLayout) -> None:
    assert layout.topology == Topology(4)
    assert (layout.num_layers, layout.num_experts, layout.slots_per_rank) == (2, 6, 3)


@FEW
@given(layouts(topology=topologies(num_ranks=(1, 4)), num_layers=(0, 1), num_experts=(3, 9), slots_per_rank=(1, 2)))
def test_shapes_can_be_ranges(layout: ExpertLayout) -> None:
    assert layout.num_layers <= 1
    assert 3 <= layout.num_experts <= layout.num_slots
    assert layout.slots_per_rank <= 2 <= layout.topology.num_ranks <= 4


@FEW
@given(layouts(num_experts=(1, 6), slots_per_rank=[1, 3, 2]))
def test_ranks_can_have_different_slots(layout: ExpertLayout) -> None:
    by_rank = layout.physical_to_logical_map.reshape(-1, 3, 3)
    assert (by_rank[:, 0, 1:] == -1).all()
    assert (by_rank[:, 2, 2:] == -1).all()


@FEW
@given(layout_pairs(count=3, topology=topologies(speeds=True)))
def test_layouts_of_one_frame_can_be_compared(frame: tuple[ExpertLayout, ...]) -> None:
    old, *others = frame
    assert len(others) == 2
    for new in others:
        old.check_same_frame(new)


@FEW
@given(st.data(), st.none() | st.integers(1, 3))
def test_loads_are_counts_of_the_shape_that_was_asked_for(data: st.DataObject, windows: int | None) -> None:
    load = data.draw(expert_loads(num_layers=2, num_experts=5, num_windows=windows, most=100))
    assert load.shape == ((2, 5) if windows is None else (windows, 2, 5))
    assert load.dtype == np.int64
    assert load.min() >= 0
    assert load.max() <= 100


@FEW
@given(topk_ids(num_tokens=(0, 4), num_experts=5, top_k=(2, 3), dtype=np.int32))
def test_tokens_choose_distinct_experts_or_are_padding(ids: Any) -> None:
    assert ids.dtype == np.int32
    assert len(ids) <= 4
    assert 2 <= ids.shape[1] <= 3
    for row in ids.tolist():
        assert row == [-1] * len(row) or len(set(row)) == len(row)
    assert ids.size == 0 or -1 <= ids.min() <= ids.max() < 5


@FEW
@given(layouts(), st.data())
def test_shares_are_valid(layout: ExpertLayout, data: st.DataObject) -> None:
    drawn = data.draw(shares(layout))
    np.testing.assert_array_equal(check_shares(drawn, layout), drawn)


@FEW
@given(active_ranks((2, 6), least=2), rank_speeds(3), slots_by_rank(3, num_experts=9, slots_per_rank=(1, 4)))
def test_what_ranks_have(active: list[bool], speeds: list[float], slots: list[int]) -> None:
    assert len(active) <= 6
    assert sum(active) >= 2
    assert Topology(3, rank_speed=speeds).num_ranks == 3
    assert sum(slots) >= 9
    assert 1 <= min(slots) <= max(slots) <= 4


@settings(max_examples=2)
@given(st.data())
def test_shapes_of_real_models_are_drawn(data: st.DataObject) -> None:
    layout = data.draw(layouts(topology=Topology(32, 4), num_layers=58, num_experts=256, slots_per_rank=9, pairs=False))
    assert (layout.num_layers, layout.num_experts, layout.num_slots) == (58, 256, 288)
    assert not has_pairs(layout)
    assert data.draw(shares(layout)).shape == (58, 288)
    assert data.draw(expert_loads(num_layers=58, num_experts=256)).shape == (58, 256)
    assert data.draw(expert_loads(num_layers=2, num_experts=1000)).shape == (2, 1000)
    assert data.draw(topk_ids(num_tokens=4096, num_experts=256, top_k=8)).shape == (4096, 8)


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        (topologies(num_ranks=2, num_nodes=3), "num_nodes"),
        (topologies(num_ranks=(3, 2)), "num_ranks"),
        (topologies(num_ranks=0), "num_ranks"),
        (topologies(num_ranks=(1, 2, 3)), "num_ranks"),  # type: ignore[arg-type]
        (layouts(num_layers=-1), "num_layers"),
        (layouts(topology=Topology(2), num_experts=5, slots_per_rank=2), "slots_per_rank"),
        (layouts(topology=Topology(2), num_experts=5, slots_per_rank=[3, 3, 3]), "slots_per_rank"),
        (slots_by_rank(2, num_experts=9, slots_per_rank=4), "num_experts"),
        (active_ranks(2, least=3), "num_ranks"),
        (topk_ids(num_experts=2, top_k=3), "top_k"),
        (topk_ids(dtype=np.uint8), "dtype"),
        (layouts(slots_per_rank=[]), "slots_per_rank"),
        (layouts(slots_per_rank=[2, 0]), "slots_per_rank"),
    ],
)
def test_shapes_that_cannot_be_are_refused(strategy: st.SearchStrategy[Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}`"):
        find(strategy, lambda _: True)


# ---- what comes up, and what it shrinks to ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "strange"),
    [
        (topologies(), lambda topology: len(set(np.bincount(topology.rank_to_node).tolist())) > 1),
        (topologies(), lambda topology: (np.diff(topology.rank_to_node) < 0).any()),
        (layouts(), lambda layout: (layout.physical_to_logical_map[0, : layout.slots_per_rank] < 0).all()),
        (layouts(num_experts=5), lambda layout: layout.replica_count.max() > 3),
        (layouts(), has_pairs),
        (expert_loads(num_experts=4), lambda load: (load == 0).any() and load.max() > 10000),
        (topk_ids(), lambda ids: len(ids) and ids[0, 0] < 0 <= ids[-1, 0]),
        (active_ranks(4), lambda active: sum(active) == 1),
    ],
)
def test_the_strange_cases_come_up(strategy: st.SearchStrategy[Any], strange: Callable[[Any], Any]) -> None:
    find(strategy, lambda drawn: bool(strange(drawn)), settings=settings(phases=[Phase.generate], max_examples=1000))


def test_loads_shrink_to_small_skew() -> None:
    loads = expert_loads(num_layers=1, num_experts=4)
    assert find(loads, lambda load: True).tolist() == [[10, 10, 10, 10]]
    assert find(loads, lambda load: len(set(load[0].tolist())) > 1).tolist() == [[10, 10, 10, 11]]
    assert find(loads, lambda load: not load.any()).tolist() == [[0, 0, 0, 0]]
    idle = find(expert_loads(num_layers=2, num_experts=2), lambda load: load.any(axis=1).tolist() == [True, False])
    assert idle.tolist() == [[10, 10], [0, 0]]


def test_layouts_shrink_to_experts_in_order() -> None:
    assert find(layouts(), has_pairs) == ExpertLayout([[0, 0]], 1, topology=Topology(1))
    layout = find(layouts(num_experts=(3, 9)), lambda layout: layout.num_slots >= 5 and layout.topology.num_ranks > 1)
    assert layout.physical_to_logical_map[0, :3].tolist() == [0, 1, 2]
    assert layout.num_layers == 1
    old, new = find(layout_pairs(num_experts=(2, 6)), lambda pair: pair[0] != pair[1])
    assert eplb_core.transfers(old, new).sum() <= 1


# ---- counterexamples as code -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy",
    [
        topologies(speeds=True),
        layouts(topology=topologies(speeds=True), num_layers=(0, 3)),
        layout_pairs(),
        expert_loads(num_layers=(0, 2), num_windows=(0, 2)),
        expert_loads(num_layers=30, num_experts=64),
        topk_ids(dtype=np.int32),
        topk_ids(num_tokens=300, num_experts=8, top_k=4, dtype=np.int32),
        active_ranks(),
        slots_by_rank(),
    ],
)
def test_counterexamples_evaluate(strategy: st.SearchStrategy[Any]) -> None:
    """The argument that a failed test prints is the value that it had."""
    values = []

    @settings(database=None, phases=[Phase.generate], print_blob=False)
    @given(strategy)
    def fails(value: Any) -> None:
        values.append(value)
        assert len(values) < 6

    with pytest.raises(AssertionError) as caught:
        fails()
    text = "\n".join(caught.value.__notes__)
    space = {**vars(np), **{name: getattr(eplb_core, name) for name in ("ExpertLayout", "Topology")}}
    found = eval(text[text.index("fails(") :], {**space, "fails": lambda value: value})
    if isinstance(found, np.ndarray):
        assert found.dtype == values[-1].dtype
        np.testing.assert_array_equal(found, values[-1])
    else:
        assert found == values[-1]


def test_a_layout_prints_as_its_constructor() -> None:
    @settings(database=None, phases=[Phase.generate, Phase.shrink], print_blob=False)
    @given(layouts(topology=topologies(num_ranks=2, num_nodes=1), num_experts=3, slots_per_rank=2))
    def fails(layout: ExpertLayout) -> None:
        assert layout.num_experts < 3

    with pytest.raises(AssertionError) as caught:
        fails()
    text = "".join("".join(caught.value.__notes__).split())
    assert "ExpertLayout([[0,1,2,0]],3,topology=Topology(2))" in text
