from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core import (
    DispatchTables,
    ExpertLayout,
    LayoutError,
    LoadCounter,
    Topology,
    even_dispatch_table,
    replica_shares,
    topk_to_slots,
)
from eplb_core.dispatch.constants import MODES, Mode
from eplb_core.testing.strategies import layout_pairs
from tests.cases import PAIR, layouts, random_layout

TENSORS = [
    "table", "candidates", "runs", "thresholds", "span", "settings", "draws", "count", "state", "errors", "batch",
    "bounds", "blocks", "shared", "arm_rank", "on_rank",
]  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_installing_one_layer_equals_making_the_tables_anew(mode: str) -> None:
    old, new = random_layout(seed=1), random_layout(seed=2)
    kind = mode not in ("static", "even")
    load = np.random.default_rng(0).integers(1, 99, (4, 32))
    old_shares, new_shares = (replica_shares(x, load) if kind else None for x in (old, new))
    tables = DispatchTables(old, rank=3, mode=mode, shares=old_shares)  # type: ignore[arg-type]
    tables.install(new, layers=[1], shares=new_shares)
    mixed = old.replace(new, [1])
    assert tables.layout == mixed
    if old_shares is not None and new_shares is not None:
        old_shares[1] = new_shares[1]
    anew = DispatchTables(mixed, rank=3, mode=mode, shares=old_shares)  # type: ignore[arg-type]
    assert torch.equal(tables._packed, anew._packed)


@given(layout_pairs(num_layers=(1, 2), num_experts=(1, 6)), st.sampled_from(MODES), st.data())
@settings(max_examples=60)
def test_any_order_of_installs_ends_in_the_same_tables(
    pair: tuple[ExpertLayout, ...], mode: str, data: st.DataObject
) -> None:
    layout, other = pair
    tables = DispatchTables(layout, mode=mode)  # type: ignore[arg-type]
    for layer in data.draw(st.permutations(range(layout.num_layers))):
        tables.install(other, layers=[layer])
        tables.install(layout, layers=[layer])
        tables.install(other, layers=[layer])
    assert torch.equal(tables._packed, DispatchTables(other, mode=mode)._packed)  # type: ignore[arg-type]


@given(layouts(), st.data())
@settings(max_examples=100)
def test_entries_give_every_slot_its_share_exactly(layout: ExpertLayout, data: st.DataObject) -> None:
    """Each of an expert's n entries is worth 1 / n: its own slot up to the threshold, one other past it."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    p2l, experts = layout.physical_to_logical_map, layout.num_experts
    weight = rng.choice([0.0, 1e-9, 0.1, 1.0, 5.0], p2l.shape) + 1e-12 * (rng.random(p2l.shape) < 0.5)
    shares = np.zeros(p2l.shape)
    for layer, expert in itertools.product(range(layout.num_layers), range(experts)):
        slots = layout.slots(layer, expert)
        total = weight[layer, slots].sum()
        shares[layer, slots] = weight[layer, slots] / total if total else 1 / len(slots)
    tables = DispatchTables(layout, mode="weighted", shares=shares)
    if tables.max_replicas == 1:
        return
    for layer, expert in itertools.product(range(layout.num_layers), range(experts)):
        t, slots = tables.layer(layer), layout.slots(layer, expert)
        first, number = int(t.runs[expert]) & 0xFFFFF, int(t.runs[expert]) >> 20
        assert t.candidates[first : first + number, 0].tolist() == list(slots)
        got = dict.fromkeys([int(slot) for slot in slots], 0)
        for i in range(first, first + number):
            (own, other), part = t.candidates[i].tolist(), int(t.thresholds[i])
            assert 0 <= part <= 1 << 30
            got[own] += part
            got[other] += (1 << 30) - part
        for slot, amount in got.items():
            assert abs(amount / number / (1 << 30) - shares[layer, slot]) <= 1e-9
            assert amount > 0 or shares[layer, slot] < 1e-9
            assert shares[layer, slot] > 0 or amount == 0
    widest = int(layout.replica_count.max(axis=1)[0])
    span = int(tables.layer(0).span)
    assert (span == 0 and widest == 1) or span < widest <= 2 * span


def test_shares_that_sum_to_a_little_less_than_one_count_relative_to_their_sum() -> None:
    layout = ExpertLayout([[0, 0, 0]], num_experts=1, topology=Topology(num_ranks=3))
    t = DispatchTables(layout, mode="row", shares=[[0.5, 0.4999995, 0.0]]).layer(0)
    assert abs(int(t.thresholds[0]) - (3 * 0.5 / 0.9999995 - 1) * 2**30) <= 4
    assert int(t.thresholds[2]) == 0
    assert sorted(t.candidates[:, 1].tolist()) == [0, 1, 1]


@given(layouts(num_layers=1))
@settings(max_examples=60)
def test_the_solver_sees_every_expert_with_a_choice(layout: ExpertLayout) -> None:
    tables = DispatchTables(layout, mode="quota")
    if tables.max_replicas == 1:
        return
    t, count = tables.layer(0), layout.replica_count[0]
    seen = [int(e) for e in t.shared if e >= 0]
    assert sorted(seen) == np.flatnonzero(count > 1).tolist()
    assert [int(count[e]) for e in seen] == sorted(int(count[e]) for e in seen)
    for n, expert in enumerate(seen):
        slots = layout.slots(0, expert)
        assert t.arm_rank[n, : len(slots)].tolist() == [int(s) // layout.slots_per_rank for s in slots]
        places = t.on_rank.flatten()[torch.tensor(slots)].tolist()
        assert places == [n * tables.max_replicas + k for k in range(len(slots))]


@pytest.mark.parametrize("mode", MODES)
def test_addresses_shapes_and_types_stay(mode: str) -> None:
    """FAULTS B6, B11: the most replicas of an expert go from 1 to 5; captured graphs read by address."""
    topology = Topology(num_ranks=4)
    one = ExpertLayout([[0, 1, 2, 3, 4, 5, 0, 1]], num_experts=6, topology=topology)
    many = ExpertLayout([[0, 0, 0, 1, 2, 3, 4, 5]], num_experts=6, topology=topology)
    tables = DispatchTables(one, mode=mode, load=LoadCounter(1, 6))  # type: ignore[arg-type]

    def identity() -> list[tuple[object, ...]]:
        t = tables.layer(0)
        tensors = [getattr(t, name) for name in TENSORS]
        return [(x.data_ptr(), x.shape, x.stride(), x.dtype, x.device) for x in tensors]

    before = identity()
    tables.install(many, layers=[0])
    assert identity() == before
    slots = tables.map(0, torch.zeros(64, 1).long())
    assert mode == "fake" or set(slots.flatten().tolist()) <= {0, 1, 2}
    assert mode in ("static", "even", "fewest", "fake") or len(set(slots.flatten().tolist())) == 3


def test_more_replicas_than_there_is_room_for_are_refused_before_anything_is_written() -> None:
    """FAULTS B6: refuse, do not reallocate."""
    layout = random_layout(seed=1)
    most = int(layout.replica_count.max())
    modes: tuple[Mode, ...] = ("weighted", "even")
    for mode in modes:
        tables = DispatchTables(layout, mode=mode, max_replicas=most)
        before = tables._packed.clone()
        rows = layout.physical_to_logical_map.copy()
        rows[0] = rows[0][::-1]
        rows[3] = np.r_[np.arange(32), np.full(16, 7)]
        text = rf"`max_replicas` \(={most}\).* expert 7 has 17 at layer 3"
        for layers in (None, [3], [0, 3]):
            with pytest.raises(LayoutError, match=text) as error:
                tables.install(ExpertLayout(rows, 32, topology=layout.topology), layers=layers)
            assert (error.value.layer, error.value.expert) == (3, 7)
            assert torch.equal(tables._packed, before)
            assert tables.layout is layout


def test_a_pair_on_one_rank_keeps_its_own_slot_numbers() -> None:
    """FAULTS B5: counting distinct experts sends experts 1 and 2 to slot 2; right are 2 -> 3 and 3 -> 4."""
    layout = ExpertLayout([[0, 0, 1, 2, 3, 1]], num_experts=4, topology=Topology(num_ranks=2))
    for rank in range(2):
        for mode in MODES:
            slots = DispatchTables(layout, rank=rank, mode=mode).map(0, torch.tensor([[2, 3]]))
            assert mode == "fake" or slots.tolist() == [[3, 4]]


@pytest.mark.parametrize("mode", MODES)
def test_what_is_made_in_inference_mode_serves_outside_of_it(mode: Mode) -> None:
    layout = random_layout(seed=1)
    with torch.inference_mode():
        load = LoadCounter(layout.num_layers, layout.num_experts)
        tables = DispatchTables(layout, rank=0, mode=mode, load=load)
    topk_to_slots(torch.zeros(2, 1, dtype=torch.int32), tables.layer(0))
    tables.install(layout)
    load.roll()
    load.recording(False)
    assert int(load.snapshot().numpy().sum()) == 2


def test_tables_are_no_checkpoint_state() -> None:
    """FAULTS B10: maps that were buffers were zeroed by dummy weights and overwritten by a broadcast."""
    module = torch.nn.Linear(2, 2)
    tables = DispatchTables(PAIR, mode="weighted", load=LoadCounter(1, 4))
    module.t = tables.layer(0)  # type: ignore[assignment]
    assert set(module.state_dict()) == {"weight", "bias"}
    assert list(module.buffers()) == []


def test_a_dead_ranks_slots_leave_the_candidates() -> None:
    """FAULTS H6: in the memory that captured graphs read."""
    layout = ExpertLayout([[0, 1, 2, 0, 1, 2]], num_experts=3, topology=Topology(num_ranks=2))
    alive = ExpertLayout([[0, 1, 2, -1, -1, -1]], num_experts=3, topology=Topology(num_ranks=2))
    for mode in MODES:
        tables = DispatchTables(layout, mode=mode)
        before = [tensor.data_ptr() for tensor in tables.layer(0) if isinstance(tensor, torch.Tensor)]
        tables.install(alive)
        assert [tensor.data_ptr() for tensor in tables.layer(0) if isinstance(tensor, torch.Tensor)] == before
        assert int(tables.map(0, torch.arange(3).repeat(20)[:, None]).max()) < 3


def test_even_tables_are_the_ranks_part_of_the_even_dispatch_table() -> None:
    layout = random_layout()
    for rank in (0, 5):
        t = DispatchTables(layout, rank=rank, mode="even").layer(2)
        np.testing.assert_array_equal(t.candidates[:, 0].numpy(), even_dispatch_table(layout)[rank, 2])


def test_two_modes_share_one_memory() -> None:
    layout = random_layout()
    tables = DispatchTables(layout, mode="quota")
    decode = tables.layer(0, mode="fewest")
    assert decode.candidates.data_ptr() == tables.layer(0).candidates.data_ptr()
    ids = torch.arange(32)[None].repeat(3, 1)
    assert torch.equal(topk_to_slots(ids, decode), DispatchTables(layout, mode="fewest").map(0, ids))
    with pytest.raises(ValueError, match=r"`mode` \(='quota'\) does not fit tables of mode 'row'"):
        DispatchTables(layout, mode="row").layer(0, mode="quota")
    with pytest.raises(ValueError, match=r"`mode` \(='row'\) does not fit tables of mode 'even'"):
        DispatchTables(layout, mode="even").layer(0, mode="row")
    with pytest.raises(ValueError, match=r"`mode` \(='best'\) must be one of static, even"):
        tables.layer(0, mode="best")  # type: ignore[arg-type]


def test_static_picks_of_a_layer_depend_on_its_own_row() -> None:
    """With one random stream over all layers, picks of the layers after a changed one change too."""
    old, other = random_layout(seed=1, nodes=1), random_layout(seed=2, nodes=1)
    a = DispatchTables(old, rank=2, mode="static", seed=42)
    b = DispatchTables(old.replace(other, [0]), rank=2, mode="static", seed=42)
    assert torch.equal(a.layer(3).candidates, b.layer(3).candidates)


def test_warming_up_changes_nothing() -> None:
    load = LoadCounter(4, 32)
    tables = DispatchTables(random_layout(), mode="random", load=load)
    tables.warm_up(num_columns=4)
    assert int(load.count.sum()) == 0
    assert int(tables._draws.abs().sum()) == 0


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"mode": "nearest"}, ValueError, r"`mode` \(='nearest'\) must be one of static, even, random"),
        ({"rank": -1}, IndexError, r"`rank` \(=-1\) must be in \[0, 2\)"),
        ({"rank": 2}, IndexError, r"`rank` \(=2\) must be in \[0, 2\)"),
        ({"load": LoadCounter(2, 4)}, ValueError, "`load` counts 2 layers and 4 experts, `layout` has 1 and 4"),
        ({"slot_ids": range(5)}, ValueError, r"`slot_ids` \(shape \[5\]\) must be \[6\]"),
        ({"slot_ids": [0, 1, -1, 3, 4, 5]}, ValueError, r"`slot_ids` \(=-1\) must be in \[0, 1073741824\) at slot 2"),
        ({"mode": "even", "shares": np.ones((1, 6))}, ValueError, "`shares` must be None for mode 'even'"),
        ({"shares": np.ones((1, 5))}, ValueError, r"`shares` \(shape \[1, 5\]\) must be \[1, 6\]"),
        ({"shares": [[0, 1, 1, 0.5, 0.5, 1.5]]}, ValueError, r"\(=1.5\) must be in \[0, 1\] at layer 0, slot 5"),
        ({"shares": [[0.5, 1, 1, 0.5, 0.25, 0.5]]}, ValueError, r"expert 3 \(sum 0.75\) must sum to 1 at layer 0"),
        ({"shares": [[np.nan, 1, 1, 0.5, 0.5, 0.5]]}, ValueError, r"`shares` \(=nan\)"),
    ],
)
def test_bad_arguments_of_tables_are_named(options: dict[str, Any], error: type[Exception], text: str) -> None:
    """FAULTS G11: an engine whose configuration has no branch fails when the first batch comes."""
    with pytest.raises(error, match=text):
        DispatchTables(PAIR, **{"mode": "row", **options})


def test_bad_layers_and_layouts_of_tables_are_named() -> None:
    tables = DispatchTables(PAIR)
    for layer in (-1, 1):
        with pytest.raises(IndexError, match=rf"`layer` \(={layer}\) must be in \[0, 1\)"):
            tables.layer(layer)
    with pytest.raises(ValueError, match=r"layouts differ in experts: 4 and 3"):
        tables.install(ExpertLayout([[0, 1, 2, 2, 1, 0]], num_experts=3, topology=Topology(num_ranks=2)))
    with pytest.raises(IndexError, match=r"`layers` \(=-1\) must be in \[0, 1\)"):
        tables.install(PAIR, layers=[-1])


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_model_has_empty_tables(mode: Mode) -> None:
    layout = ExpertLayout(np.zeros((0, 6), dtype=np.int64), num_experts=4, topology=Topology(num_ranks=2))
    tables = DispatchTables(layout, mode=mode)
    assert tables.layout.num_layers == 0
    tables.warm_up(2)


def test_a_layout_of_more_slots_than_a_word_can_name_is_refused() -> None:
    slots = (1 << 20) + 1
    layout = ExpertLayout(np.arange(slots)[None], slots, topology=Topology(1))
    with pytest.raises(ValueError, match=r"`layout` \(num_slots=1048577\) must have at most 1048576 slots"):
        DispatchTables(layout)
