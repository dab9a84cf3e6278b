"""Ranks with fewer slots than others: their tensors have only their own rows, and the frame ends them with -1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core import ExpertLayout, ExpertStore, Topology, fingerprints, place, verify_weights
from eplb_core.errors import MigrationError
from eplb_core.loading.moves.backup import HostBackup
from eplb_core.loading.transport import Transport
from eplb_core.loading.transports import LocalCopy, SharedMemory
from tests.loading.fleets import SLOT, Keeper, Shelf, fleet
from tests.loading.worlds import SIZES, World, label

SLOTS = [2, 4]
UNEQUAL = ExpertLayout([[0, 1, -1, -1, 2, 3, 4, 0]] * 2, 5, topology=Topology(2))
GOOD = ExpertLayout([[3, 4, -1, -1, 0, 1, 2, -1]] * 2, 5, topology=Topology(2))
BAD = ExpertLayout([[3, 4, -1, -1, 0, 1, 2, 0], [3, 4, -1, 2, 0, 1, 2, -1]], 5, topology=Topology(2))
"""Rank 0 would need its slot 3 on layer 1."""


def placed(seed: int, slots: Sequence[int], count: int) -> list[ExpertLayout]:
    """Layouts of random loads, each planned from the one before."""
    rng = np.random.default_rng(seed)
    experts, topology = int(rng.integers(1, sum(slots) + 1)), Topology(len(slots))
    layouts: list[ExpertLayout] = []
    for _ in range(count):
        load = rng.integers(0, 100, (2, experts))
        current = layouts[-1] if layouts and rng.integers(2) else None
        layouts.append(place(load, topology, slots_per_rank=slots, current=current).layout)
    return layouts


@settings(deadline=None, max_examples=25)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(1, 4),
    st.sampled_from([LocalCopy, SharedMemory]),
)
def test_moves_of_any_layouts_fill_each_rank_own_slots(
    seed: int, slots: list[int], staged: int, make: Callable[[], Transport]
) -> None:
    old, new = placed(seed, slots, 2)
    world = World(old, make, slots=slots)
    assert world.move_all(new, staging=staged * SLOT) == [new] * len(slots)
    world.check(new)
    assert [store.num_slots for store in (world.stores[rank][0] for rank in world.ranks)] == slots


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 4), min_size=2, max_size=3), st.none() | st.just(SLOT))
def test_migrations_check_every_slot_in_every_pass(seed: int, slots: list[int], staging: int | None) -> None:
    """With a record that follows; the default staging is one of this rank's slots, the smallest counts."""
    layouts = placed(seed, slots, 3)
    records = {rank: Keeper(layouts[0]) for rank in range(len(slots))}
    with fleet(layouts[0], SharedMemory, slots=slots, staging=staging, records=records) as ranks:
        for target in layouts[1:]:
            ranks.move(target)
            assert ranks.reached(target)
    assert all(record.layout == layouts[-1] for record in records.values())


def test_a_target_that_uses_a_missing_slot_is_refused_on_every_rank_and_costs_nothing() -> None:
    said = r"`target` \(=2\) must be -1 at layer 1, slot 3, since rank 0 has 2 slots of 4"
    with fleet(UNEQUAL, slots=SLOTS) as ranks:
        for migrator in ranks.migrators.values():
            with pytest.raises(ValueError, match=said):
                migrator.start(BAD)
            assert migrator.idle
        ranks.move(GOOD)
        assert ranks.reached(GOOD)
        ranks.move(lambda live: BAD)  # on a worker: all ranks compute it, and all refuse
        assert ranks.reached(GOOD, "plan")
        assert any("layer 1, slot 3" in migrator.status.reason for migrator in ranks.migrators.values())
        ranks.move(UNEQUAL)
        assert ranks.reached(UNEQUAL)


def test_move_experts_refuses_it_on_every_rank_before_a_byte_moves() -> None:
    world = World(UNEQUAL, slots=SLOTS)
    for error in world.move_all(BAD):
        assert isinstance(error, ValueError)
        assert "layer 1, slot 3" in str(error)
    world.check(UNEQUAL)
    assert world.move_all(GOOD) == [GOOD, GOOD]
    world.check(GOOD)


def test_a_layout_whose_weights_this_rank_cannot_hold_is_refused() -> None:
    store = World(UNEQUAL, slots=SLOTS).stores[0][0]
    store.check_fits(UNEQUAL, rank=0)
    with pytest.raises(ValueError, match=r"layer 0, slot 6; 3 more, since rank 1 has 2 slots of 4"):
        store.check_fits(UNEQUAL, rank=1)
    with pytest.raises(ValueError, match="has 2 slots and the layout 4 per rank"):
        store.check_fits(UNEQUAL)
    with pytest.raises(ValueError, match="has 5 slots and the layout 4 per rank"):
        ExpertStore({"w": torch.zeros(5, 2)}).check_fits(UNEQUAL, rank=1)
    with pytest.raises(IndexError, match=r"`rank` \(=2\) must be in \[0, 2\)"):
        store.check_fits(UNEQUAL, rank=2)
    swapped = World(UNEQUAL, slots=SLOTS)
    swapped.stores = {0: swapped.stores[1], 1: swapped.stores[0]}
    assert isinstance(swapped.move_all(GOOD, staging=SLOT)[1], (ValueError, MigrationError))


def test_prints_of_the_slots_that_ranks_have_are_verified() -> None:
    world = World(UNEQUAL, slots=SLOTS)
    prints = [fingerprints(world.stores[rank]) for rank in world.ranks]
    assert [list(each.shape[:2]) for each in prints] == [[2, 2], [2, 4]]
    report = verify_weights(prints, UNEQUAL)
    assert report.ok
    assert (report.num_checked, report.num_unchecked) == (4, 8)
    world.stores[0][1].row("w2", 0)[0] ^= 1
    faults = verify_weights([fingerprints(world.stores[rank]) for rank in world.ranks], UNEQUAL).faults
    assert [(fault.layer, fault.slot, fault.rank) for fault in faults] == [(1, 0, 0), (1, 7, 1)]
    with pytest.raises(ValueError, match=r"`layout` \(=2\) must be -1 at layer 1, slot 3"):
        verify_weights(prints, BAD)
    whole = [fingerprints(world.stores[rank], whole=True) for rank in world.ranks]
    assert verify_weights(whole, UNEQUAL).ok


@pytest.mark.parametrize("far", [False, True])
def test_backups_hold_every_expert_and_restore_it(tmp_path: Path, far: bool) -> None:
    pytest.importorskip("safetensors", reason="backups are safetensors files")
    world = World(UNEQUAL, slots=SLOTS)

    def save(rank: int) -> Any:
        own = {"rank": rank, "agreement": world.agreements[rank]}
        return HostBackup.save(
            tmp_path, world.stores[rank], UNEQUAL, **own, transport=world.transports[rank] if far else None
        )

    backup = world.each(save)[0]
    assert isinstance(backup, HostBackup)
    rows = [torch.zeros(size, dtype=torch.uint8) for size in SIZES.values()]
    for expert in range(5):
        backup.fetch(1, expert, rows)
        assert all(torch.equal(row, label(1, expert, name)) for name, row in zip(SIZES, rows, strict=True))


def test_a_small_rank_that_is_left_alone_restores_from_a_backup() -> None:
    """Experts that only the dead rank held come to the slots that the living one has."""
    old = ExpertLayout([[0, 1, -1, -1, 1, 0, 2, 3]], 4, topology=Topology(2))
    new = ExpertLayout([[3, 1, -1, -1, 1, 0, 2, 3]], 4, topology=Topology(2))
    world = World(old, ranks=[0], slots=SLOTS)
    with pytest.raises(ValueError, match="must keep expert 0 of layer 0 on a rank that lives"):
        raise world.move_all(new, backup=Shelf())[0]
    kept = ExpertLayout([[0, 3, -1, -1, 1, 0, 2, 3]], 4, topology=Topology(2))
    both = World(old, slots=SLOTS)
    assert both.move_all(kept) == [kept, kept]
    both.check(kept)
