"""One array is the truth; every other map is derived from it (FAULTS A5, A6, B7, B13, B15)."""

from __future__ import annotations

import copy
import hashlib
import pickle
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eplb_core import ExpertLayout, LayoutError, MissingExpertError, Topology, min_redundant
from eplb_core.layout import layer_rows, rank_capacity
from tests.cases import layouts

TWO = Topology(2)


# ---- derived maps ----------------------------------------------------------------------------------------------------


@given(layouts(num_layers=(0, 3), num_experts=(1, 16)))
def test_all_maps_are_inverses_of_the_one_array(layout: ExpertLayout) -> None:
    """B7: maps that were returned and committed apart could disagree."""
    rows = layout.physical_to_logical_map.tolist()
    slots = [
        [[slot for slot, held in enumerate(row) if held == expert] for expert in range(layout.num_experts)]
        for row in rows
    ]
    most = max((len(s) for row in slots for s in row), default=1)
    assert layout.replica_count.tolist() == [[len(s) for s in row] for row in slots]
    padded = [[s + [-1] * (most - len(s)) for s in row] for row in slots]
    assert layout.logical_to_physical_map.tolist() == padded
    assert layout.logical_to_physical_map.shape == (len(rows), layout.num_experts, most)
    back = np.full(layout.physical_to_logical_map.shape, -1)
    for layer, expert, replica in zip(*np.nonzero(layout.logical_to_physical_map >= 0), strict=True):
        assert layout.slots(int(layer), int(expert)) == tuple(slots[layer][expert])
        back[layer, layout.logical_to_physical_map[layer, expert, replica]] = expert
    assert np.array_equal(back, layout.physical_to_logical_map)
    for array in (layout.physical_to_logical_map, layout.logical_to_physical_map, layout.replica_count):
        assert array.dtype == np.int64
        assert not array.flags.writeable


def test_more_experts_than_two_bytes_can_say_are_inverted_too() -> None:
    experts = 2**15 + 3
    layout = ExpertLayout(np.arange(experts)[None, ::-1], experts, topology=Topology(1))
    assert layout.slots(0, experts - 1) == (0,)
    assert layout.slots(0, 0) == (experts - 1,)


def test_ids_out_of_range_are_no_ids_from_the_end() -> None:
    layout = ExpertLayout([[0, 1]], 2, topology=TWO)
    for layer, expert, message in (
        (-1, 0, r"`layer` \(=-1\) must be in \[0, 1\)"),
        (1, 0, r"`layer` \(=1\)"),
        (0, -1, r"`expert` \(=-1\) must be in \[0, 2\)"),
        (0, 2, r"`expert` \(=2\)"),
    ):
        with pytest.raises(IndexError, match=message):
            layout.slots(layer, expert)


# ---- digest, equality, text ------------------------------------------------------------------------------------------


@given(layouts(num_layers=(0, 3), num_experts=(1, 16)))
def test_digest_is_of_the_stated_bytes(layout: ExpertLayout) -> None:
    rows = layout.physical_to_logical_map.tolist()
    numbers = [layout.num_layers, layout.num_slots, layout.num_experts, *(e for row in rows for e in row)]
    expected = hashlib.sha256(b"eplb-layout-1" + struct.pack(f"<{len(numbers)}q", *numbers)).hexdigest()
    assert layout.digest == layout.digest == expected
    for same in (
        ExpertLayout(
            torch.from_numpy(layout.physical_to_logical_map.copy()), layout.num_experts, topology=layout.topology
        ),
        pickle.loads(pickle.dumps(layout)),
        copy.deepcopy(layout),
    ):
        assert (same, same.digest, hash(same)) == (layout, expected, hash(layout))


def test_layouts_differ_by_map_experts_and_topology() -> None:
    layout = ExpertLayout([[0, 1, 1, 0]], 2, topology=TWO)
    assert layout != ExpertLayout([[0, 1, 0, 1]], 2, topology=TWO)
    assert layout != ExpertLayout([[0, 1, 1, 0]], 2, topology=Topology(2, 2))
    assert layout != "layout"
    assert ExpertLayout(np.zeros((0, 4), dtype=int), 2, topology=TWO) != ExpertLayout(
        np.zeros((0, 4), dtype=int), 3, topology=TWO
    )


def test_a_layout_does_not_change() -> None:
    source = np.array([[0, 1, 1, 0]])
    layout = ExpertLayout(source, 2, topology=TWO)
    source[0, 0] = 1
    assert layout.physical_to_logical_map.tolist() == [[0, 1, 1, 0]]
    with pytest.raises(AttributeError, match="`topology` of an ExpertLayout cannot be set"):
        layout.topology = TWO
    with pytest.raises(AttributeError, match="of an ExpertLayout cannot be deleted"):
        del layout.num_experts


def test_text_shows_ranks_and_empty_slots() -> None:
    layout = ExpertLayout([[0, 1, -1, 2]] * 10, 3, topology=TWO)
    assert layout.format([9]) == "layer 9: 0 1 | - 2"
    assert layout.format([0], width=14) == "layer 0: 0 ..."
    assert str(layout).splitlines()[-2:] == ["layer 7: 0 1 | - 2", "... 2 more layers"]
    assert str(ExpertLayout([[0]], 1, topology=Topology(1))) == "layer 0: 0"
    assert repr(layout).startswith("ExpertLayout(num_layers=10, num_experts=3, num_slots=4, topology=Topology(")


# ---- what is no layout -----------------------------------------------------------------------------------------------


def test_a_map_without_one_expert_is_refused() -> None:
    """B15: accepted elsewhere; the first token of expert 2 divides by zero."""
    with pytest.raises(MissingExpertError, match="expert 2 has no slot at layer 1; every layer must hold") as raised:
        ExpertLayout([[0, 1, 2, 3, 1, 0], [0, 1, 3, 3, 1, 0]], 4, topology=TWO)
    assert (raised.value.layer, raised.value.expert) == (1, 2)
    with pytest.raises(MissingExpertError, match="expert 1 has no slot at layer 0; 1 more;"):
        ExpertLayout([[0, 0]], 3, topology=TWO)


@pytest.mark.parametrize(("bad", "slot"), [(-2, 1), (4, 3), (10**12, 0)])
def test_ids_that_are_no_expert_are_refused(bad: int, slot: int) -> None:
    """B15: ids beyond E and below -1."""
    row = [0, 1, 2, 3]
    row[slot] = bad
    with pytest.raises(LayoutError, match=rf"\(={bad}\) must be in \[-1, 4\) at layer 0, slot {slot}; -1") as raised:
        ExpertLayout([row], 4, topology=TWO)
    assert (raised.value.layer, raised.value.slot) == (0, slot)
    with pytest.raises(LayoutError, match=rf"at layer 0, slot {slot}; 1 more;"):
        ExpertLayout([row, row], 4, topology=TWO)


@pytest.mark.parametrize(
    ("p2l", "experts", "topology", "error", "message"),
    [
        # B13: accepted elsewhere, and fails later.
        ([[0, 1, 2], [3]], 4, TWO, LayoutError, r"must be \[L, P\] with as many slots on every layer; pad .* with -1"),
        ([[0, 1, 2]], 3, TWO, ValueError, r"\(3 slots\) must have as many, one or more, on each of 2 ranks; pad"),
        (np.zeros((2, 0), dtype=int), 3, TWO, ValueError, r"\(0 slots\) must have as many, one or more"),
        ([0, 1], 2, TWO, ValueError, r"\(shape \[2\]\) must be \[L, P\]"),
        (np.array([[0, 1]], dtype=np.uint8), 2, TWO, TypeError, r"\(dtype uint8\) must be signed integers"),
        ([[0.0, 1.0]], 2, TWO, TypeError, r"\(dtype float64\) must be signed integers"),
        ([[0, 1]], 0, TWO, ValueError, r"`num_experts` \(=0\) must be at least 1"),
        ([[0, 1]], 2, 2, TypeError, r"`topology` \(=int\) must be a Topology"),
    ],
)
def test_other_shapes_and_kinds_are_refused(
    p2l: Any, experts: int, topology: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ExpertLayout(p2l, experts, topology=topology)


# ---- trivial, sizes --------------------------------------------------------------------------------------------------


@given(st.integers(1, 12), st.integers(0, 12), st.integers(1, 6), st.integers(0, 3))
def test_the_trivial_layout_is_slot_modulo_experts(experts: int, redundant: int, ranks: int, layers: int) -> None:
    """A5: where ranks do not divide the slots the last ones end with an empty slot."""
    slots = experts + redundant
    layout = ExpertLayout.trivial(layers, experts, num_slots=slots, topology=Topology(ranks))
    stride = -(-slots // ranks)
    assert (layout.num_layers, layout.num_slots, layout.slots_per_rank) == (layers, ranks * stride, stride)
    for row in layout.physical_to_logical_map.tolist():
        held = [row[rank * stride : (rank + 1) * stride] for rank in range(ranks)]
        assert [e for rank in held for e in rank if e >= 0] == [slot % experts for slot in range(slots)]
        short = ranks * stride - slots
        assert [rank.count(-1) for rank in held] == [0] * (ranks - short) + [1] * short
        assert all(rank[-1] == -1 for rank in held[ranks - short :])


def test_slots_of_ranks_differ_by_one_at_most() -> None:
    """A5: elsewhere the remainder lands on one rank: [3, 3, 3, 3, 3, 3, 3, 9]."""
    assert rank_capacity(30, 8).tolist() == [4, 4, 4, 4, 4, 4, 3, 3]
    assert rank_capacity(128, 6).tolist() == [22, 22, 21, 21, 21, 21]


@pytest.mark.parametrize(
    ("experts", "ranks", "redundant"),
    [(256, 3, 2), (30, 8, 2), (128, 6, 4), (256, 32, 0), (60, 8, 4), (1, 4, 3)],
)
def test_the_fewest_redundant_experts_are_minus_experts_modulo_ranks(experts: int, ranks: int, redundant: int) -> None:
    """A5, A6."""
    assert min_redundant(experts, ranks) == redundant


# ---- other layouts from one ------------------------------------------------------------------------------------------


def test_replace_takes_whole_rows() -> None:
    old = ExpertLayout([[0, 1], [0, 1], [0, 1]], 2, topology=TWO)
    new = ExpertLayout([[1, 0], [1, 0], [1, 0]], 2, topology=TWO)
    assert old.replace(new, [2, 0]).physical_to_logical_map.tolist() == [[1, 0], [0, 1], [1, 0]]
    assert old.replace(new, [False, True, False]).physical_to_logical_map.tolist() == [[0, 1], [1, 0], [0, 1]]
    assert old.replace(new, []) == old
    assert old.physical_to_logical_map.tolist() == [[0, 1]] * 3
    with pytest.raises(IndexError, match=r"`layers` \(=3\) must be in \[0, 3\)"):
        old.replace(new, [0, 3])
    with pytest.raises(IndexError, match=r"`layers` \(=-1\)"):
        old.replace(new, [-1])
    with pytest.raises(ValueError, match=r"`layers` \(shape \[2\]\) must be bools \[3\] or ints"):
        layer_rows([True, False], 3)


def test_diff_lists_slots_that_change() -> None:
    old = ExpertLayout([[0, 1, -1, 1], [0, 1, 1, 0]], 2, topology=TWO)
    new = ExpertLayout([[0, -1, 0, 1], [0, 1, 1, 0]], 2, topology=TWO)
    diff = old.diff(new)
    assert [column.tolist() for column in diff] == [[0, 0], [1, 2], [1, -1], [-1, 0]]
    assert str(diff) == "layer 0 slot 1: 1 -> -\nlayer 0 slot 2: - -> 0"
    assert str(old.diff(old)) == ""


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (ExpertLayout([[0, 1, 0, 1]], 2, topology=TWO), "differ in slots: 2 and 4; give .* -1 for empty ones"),
        (ExpertLayout([[0, 1, 0]], 2, topology=Topology(3)), "differ in slots: 2 and 3; .* by `resized`"),
        (ExpertLayout([[0, 1], [0, 1]], 2, topology=TWO), "differ in layers: 1 and 2; they are of two models"),
        (ExpertLayout([[0, 0]], 1, topology=TWO), "differ in experts: 2 and 1"),
        (ExpertLayout([[0, 1]], 2, topology=Topology(1)), "differ in topology: Topology.* and Topology.* by `resized`"),
    ],
)
def test_layouts_of_another_frame_are_not_compared(other: ExpertLayout, message: str) -> None:
    layout = ExpertLayout([[0, 1]], 2, topology=TWO)
    for call in (layout.diff, lambda o: layout.replace(o, [0]), layout.check_same_frame):
        with pytest.raises(ValueError, match=message):
            call(other)
    nothing: Any = "layout"
    with pytest.raises(TypeError, match=r"`other` \(=str\) must be an ExpertLayout"):
        layout.diff(nothing)


def test_ranks_that_join_are_empty_and_come_last() -> None:
    layout = ExpertLayout([[0, 1, 1, 0]], 2, topology=TWO)
    grown = layout.resized(Topology(3))
    assert grown.physical_to_logical_map.tolist() == [[0, 1, 1, 0, -1, -1]]
    assert layout.resized(Topology(1)).physical_to_logical_map.tolist() == [[0, 1]]
    assert ExpertLayout(np.zeros((0, 4), dtype=int), 2, topology=TWO).resized(Topology(3)).num_slots == 6


def test_any_rank_may_leave_and_the_others_keep_their_slots() -> None:
    """H4: not only the last."""
    layout = ExpertLayout([[0, 1, 2, 2, 1, 0]], 3, topology=Topology(3))
    assert layout.resized(TWO, [1, 2]).physical_to_logical_map.tolist() == [[2, 2, 1, 0]]
    assert layout.resized(Topology(3), [2, -1, 1]).physical_to_logical_map.tolist() == [[1, 0, -1, -1, 2, 2]]


@given(layouts(num_layers=(0, 3), num_experts=(1, 16)), st.integers(0, 3), st.integers(0, 10**6))
def test_a_layout_comes_back_from_more_ranks(layout: ExpertLayout, more: int, seed: int) -> None:
    """H10: what joins and leaves again changes nothing."""
    ranks = layout.topology.num_ranks
    order = np.random.default_rng(seed).permutation(ranks + more)
    grown = layout.resized(Topology(ranks + more), np.where(order < ranks, order, -1))
    assert grown.resized(layout.topology, np.argsort(order)[:ranks]) == layout


def test_a_rank_with_the_only_slot_of_an_expert_cannot_leave() -> None:
    """H1: which expert, which layer, which rank."""
    layout = ExpertLayout([[0, 1, 0, 1], [0, 1, 0, 0]], 2, topology=TWO)
    with pytest.raises(MissingExpertError, match="expert 1 of layer 1 would lose its last slot with rank 0;") as raised:
        layout.resized(Topology(1), [1])
    assert (raised.value.layer, raised.value.expert) == (1, 1)
    lonely = ExpertLayout([[0, 1, 2, 3]], 4, topology=TWO)
    with pytest.raises(MissingExpertError, match=r"expert 2 of layer 0 .* with rank 1; 1 more;"):
        lonely.resized(Topology(1))


@pytest.mark.parametrize(
    ("ranks", "error", "message"),
    [
        ([0], ValueError, r"`ranks` \(shape \[1\]\) must be \[2\], one entry per rank"),
        ([0, 2], IndexError, r"`ranks` \(=2\) must be in \[-1, 2\) at rank 1"),
        ([-2, 1], IndexError, r"`ranks` \(=-2\) must be in \[-1, 2\) at rank 0"),
        ([1, 1], ValueError, "`ranks` must name each rank at most once; it has 1 twice"),
    ],
)
def test_ranks_that_are_none_are_refused(ranks: list[int], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ExpertLayout([[0, 1, 1, 0]], 2, topology=TWO).resized(TWO, ranks)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ExpertLayout([[0, 1]], 10**12, topology=TWO), MissingExpertError, r"`num_experts` \(=10+\) must be"),
        (lambda: trivial(1, 2, 10**12), ValueError, r"`num_slots` \(=1000000000000\) must be at most 16777216"),
        (lambda: trivial(2**62, 2, 2), ValueError, r"`num_layers` \(=4611686018427387904\), `num_slots` .* product"),
        (lambda: trivial(1, 2, 2, None), TypeError, r"`topology` \(=NoneType\) must be a Topology"),
        (lambda: trivial(1, 4, 2), ValueError, r"`num_slots` \(=2\) must be at least `num_experts` \(=4\); use 4"),
        (lambda: min_redundant(4, -5), ValueError, r"`num_ranks` \(=-5\) must be at least 1"),
        (lambda: min_redundant(0, 5), ValueError, r"`num_experts` \(=0\) must be at least 1"),
    ],
)
def test_numbers_that_make_no_layout_are_refused_before_memory_is_taken(
    make: Callable[[], object], error: type[Exception], message: str
) -> None:
    """A6, A21: the numbers, and what to use."""
    with pytest.raises(error, match=message):
        make()


def trivial(layers: int, experts: int, slots: int, topology: Any = TWO) -> ExpertLayout:
    return ExpertLayout.trivial(layers, experts, num_slots=slots, topology=topology)
