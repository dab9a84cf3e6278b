"""Copies that overwrite each other's sources, against a copy of everything first."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core import ExpertLayout, ExpertStore
from eplb_core._arrays import IntArray
from eplb_core.loading.install.copies import copy_rows, copy_spans, label_groups, order_copies
from eplb_core.loading.install.installer import Installer, whole_sources
from eplb_core.loading.install.staging import Staging
from eplb_core.loading.moves.steps import plan_steps
from eplb_core.loading.pull_plan import PullKind
from tests.loading.worlds import layout_pairs


def ordered(source: list[int]) -> IntArray:
    """Copies that fill each place from its source, with one spare place, -1."""
    copies, scratch = np.empty((2 * len(source), 2), dtype=np.int64), np.empty((2, len(source)), dtype=np.int64)
    return copies[: order_copies(np.array(source), -1, scratch[0], scratch[1], copies)]


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 8).flatmap(lambda n: st.lists(st.integers(-1, n - 1), min_size=n, max_size=n)))
def test_copies_in_order_are_as_if_made_at_once(source: list[int]) -> None:
    copies = ordered(source)
    content: dict[int, int] = {place: place for place in range(len(source))}
    for origin, to in copies.tolist():
        content[to] = content[origin]
    assert [content[place] for place in range(len(source))] == [
        s if s >= 0 else place for place, s in enumerate(source)
    ]
    moved = sum(s >= 0 and s != place for place, s in enumerate(source))
    circles = (copies[:, 1] == -1).sum()
    assert len(copies) == moved + circles  # one more copy a circle and no other
    assert circles <= moved // 2


def groups_of(copies: IntArray) -> list[IntArray]:
    """Copies by group, each in order."""
    group = np.empty(len(copies), dtype=np.int64)
    label_groups(copies, group)
    return [copies[group == number] for number in np.unique(group)]


def test_copies_of_a_circle_are_one_group_and_independent_ones_are_not() -> None:
    copies = np.array([[7, 0], [8, 1], [2, 5], [3, 2], [9, 6], [9, 3]])
    assert [group.tolist() for group in groups_of(copies)] == [
        [[7, 0]],
        [[8, 1]],
        [[2, 5], [3, 2], [9, 3]],
        [[9, 6]],
    ]
    circles = np.array([[0, -1], [1, 0], [-1, 1], [2, -1], [3, 2], [-1, 3]])
    assert [len(group) for group in groups_of(circles)] == [3, 3]


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 9).flatmap(lambda n: st.lists(st.integers(-1, n - 1), min_size=n, max_size=n)), st.randoms())
def test_groups_of_copies_may_be_made_in_any_order(source: list[int], random: random.Random) -> None:
    copies = ordered(source)
    groups = groups_of(copies)
    assert sum(map(len, groups)) == len(copies)
    random.shuffle(groups)
    content: dict[int, int] = {place: place for place in range(len(source))}
    for group in groups:
        content[-1] = -2  # each group has a spare place of its own
        for origin, to in group.tolist():
            content[to] = content[origin]
    assert [content[place] for place in range(len(source))] == [
        s if s >= 0 else place for place, s in enumerate(source)
    ]


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_rows_of_any_size_go_round_a_circle_in_chunks(chunk: int) -> None:
    tensors = [torch.randint(0, 256, (3, size), dtype=torch.uint8) for size in (64, 13)]
    before = [tensor.clone() for tensor in tensors]
    addresses = np.array([[tensor[place].data_ptr() for tensor in tensors] for place in range(3)])
    spare = torch.empty(chunk, dtype=torch.uint8)
    copy_rows(ordered([1, 2, 0]), addresses, np.array([64, 13]), spare.data_ptr(), chunk)
    for tensor, was in zip(tensors, before, strict=True):
        assert torch.equal(tensor, was[[1, 2, 0]])


def test_spans_are_copied_by_address() -> None:
    source, to = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    copy_spans(*(np.array(x) for x in ([to.data_ptr() + 3], [source.data_ptr() + 50], [20])))
    assert to.tolist() == [0] * 3 + list(range(50, 70)) + [0] * 77


@settings(deadline=None, max_examples=100)
@given(layout_pairs(most_layers=1), st.data())
def test_an_install_leaves_every_slot_with_its_expert(pair: tuple[ExpertLayout, ...], data: st.DataObject) -> None:
    """E2, E3: all tensors of a slot move, rows of whole tensors too; staging in any order of rows."""
    old, new = pair
    per_rank, slots = old.slots_per_rank, old.num_slots
    row = old.physical_to_logical_map[0]
    for rank in range(old.topology.num_ranks):
        own = torch.from_numpy(row[rank * per_rank :][:per_rank].copy()).to(torch.uint8)
        store = ExpertStore(
            {"w": own[:, None].repeat(1, 5), "scale": own[:, None].repeat(1, 3) + 100},
            whole={"alpha": torch.from_numpy(row.copy()).to(torch.uint8)[:, None] + 50},
        )
        staging = Staging(None, [store])
        installer = Installer([store], staging)
        for step in plan_steps(old, new, rank=rank, capacity=staging.capacity):
            row_of_slot = np.array(data.draw(st.permutations(range(per_rank))))
            for slot in np.flatnonzero(step.kind == PullKind.READ).tolist():
                expert = int(step.after.physical_to_logical_map[0, rank * per_rank + slot])
                for tensor, label in zip(
                    staging.row(int(row_of_slot[slot]), store), (expert, expert + 100), strict=True
                ):
                    tensor.fill_(label)
            installer.run(0, installer.plan(step, row_of_slot))
        for slot in range(per_rank):
            expert = int(new.physical_to_logical_map[0, rank * per_rank + slot])
            if expert >= 0:
                assert store.row("w", slot).tolist() == [expert] * 5
                assert store.row("scale", slot).tolist() == [expert + 100] * 3
        for slot in range(slots):
            expert = int(new.physical_to_logical_map[0, slot])
            assert expert < 0 or store.row("alpha", slot).tolist() == [expert + 50]


def test_whole_rows_come_from_a_row_that_stays_if_there_is_one() -> None:
    assert whole_sources(np.array([0, 1, 1, 2]), np.array([1, 0, 1, -1]), 3).tolist() == [2, 0, -1, -1]


def test_kernels_need_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "eplb_core.loading.install.gpu", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    store = ExpertStore({"w": torch.zeros(2, 4)})
    with pytest.raises(ImportError, match="triton"):
        Installer([store], Staging(None, [store]), kernels=True)


def test_staging_lies_tensor_by_tensor_large_rows_first() -> None:
    store = ExpertStore({"scale": torch.zeros(4, 3), "w": torch.zeros(4, 16)})
    staging = Staging(2 * store.slot_bytes + 1, [store])
    assert staging.capacity == 2
    assert staging.offsets.tolist() == [[128, 0], [140, 64]]
    assert Staging(None, [store]).capacity == 4
    assert Staging(100 * store.slot_bytes, [store]).capacity == 8  # this layer's and the next one's
    assert [view.numel() for view in staging.row(1, store)] == [12, 64]


def test_the_largest_layer_counts_for_staging() -> None:
    stores = [ExpertStore({"a": torch.zeros(2, 4), "b": torch.zeros(2, rows)}) for rows in (1, 9)]
    staging = Staging(None, stores)
    assert staging.memory.numel() == 2 * (16 + 36)
    assert [[view.numel() for view in staging.row(1, store)] for store in stores] == [[16, 4], [16, 36]]


def test_staging_that_does_not_fit_is_refused() -> None:
    store = ExpertStore({"w": torch.zeros(4, 16)})
    with pytest.raises(ValueError, match="`staging` is on meta and the stores on cpu; put it there"):
        Staging(torch.empty(256, dtype=torch.uint8, device="meta"), [store])
    with pytest.raises(ValueError, match=r"`staging` \(=63 bytes\) must hold at least one slot \(=64 bytes\)"):
        Staging(63, [store])
    with pytest.raises(ValueError, match=r"`staging` \(torch.float32 \[64\]\) must be uint8 \[bytes\], contiguous"):
        Staging(torch.zeros(64), [store])
