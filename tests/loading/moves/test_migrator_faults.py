"""Faults of moves that users of other code reported, each by its small input."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eplb_core import (
    CostModel,
    DispatchTables,
    ExpertLayout,
    ExpertStore,
    HostBackup,
    Topology,
    fingerprints,
    place,
    should_rebalance,
    verify_weights,
)
from eplb_core.errors import MigrationError
from eplb_core.loading.agreement import LocalAgreement
from eplb_core.loading.moves import progress as words
from eplb_core.loading.transports import DeferredCopy, LocalCopy
from tests.loading.fleets import LONG, SLOT, Fleet, Shelf, Watched, alone, breaks, fleet
from tests.loading.worlds import NEW, OLD, SIZES, TWO, label, random_layout, stores_of


class Noting(Watched):
    """An agreement that notes what is asked of it, and on which thread."""

    def __init__(self, inner: LocalAgreement) -> None:
        super().__init__(inner, before=self.note)
        self.calls: list[str] = []
        self.threads: set[str] = set()

    def note(self, call: str) -> None:
        self.calls.append(call)
        self.threads.add(threading.current_thread().name)


def test_a_pass_makes_one_collective_in_one_order_whatever_happens() -> None:
    """F5: take and post once a pass on every rank, first thing: idle, moving, failing; a pause gathers on all alike."""
    reads = DeferredCopy()
    ranks = Fleet(OLD, agree=Noting, transports={1: reads})
    joined = [list(noting.calls) for noting in ranks.agreements.values()]
    assert joined[0] == joined[1] == ["gather"] * len(joined[0])
    passes = 0

    def more(count: int) -> None:
        nonlocal passes
        for _ in range(count):
            ranks.one_pass()
            passes += 1

    more(3)
    ranks.start(NEW)
    more(5)
    passes += ranks.passes(lambda: reads.waiting == 1)
    reads.fail("on purpose")
    passes += ranks.until_idle()
    more(2)
    for noting, before in zip(ranks.agreements.values(), joined, strict=True):
        assert noting.calls[len(before) :] == ["take", "post"] * passes
    assert ranks.stop() == [True, True]
    assert ranks.agreements[0].calls == ranks.agreements[1].calls


def test_no_worker_touches_the_agreement() -> None:
    """F9, R53: it belongs to the forward thread alone; functions, reads and records run on others."""
    ranks = Fleet(OLD, agree=Noting)
    for noting in ranks.agreements.values():
        noting.threads.clear()
    ranks.move(lambda live: NEW)
    assert {thread for noting in ranks.agreements.values() for thread in noting.threads} == {
        threading.current_thread().name
    }
    ranks.stop()


def test_one_agreement_carries_the_whole_handshake_and_after_a_rejoin_the_new_one() -> None:
    """F7: no half of it goes by another group; the one that failed is never asked again."""
    ranks = Fleet(OLD, agree=Noting)
    ranks.start(NEW)
    ranks.passes(lambda: len(ranks.installed) == 1)
    for member in ranks.agreements.values():
        member.inner.leave()
    for migrator in ranks.migrators.values():
        for _ in range(3):
            with contextlib.suppress(MigrationError):  # in doubt, if it had the next layer staged
                migrator.poll()
    assert {migrator.status.phase for migrator in ranks.migrators.values()} == {"lost"}
    former = list(ranks.agreements.values())
    asked = [len(noting.calls) for noting in former]
    ranks.rejoin()
    ranks.move(NEW)
    assert ranks.first.layout == NEW
    assert [len(noting.calls) for noting in former] == asked
    assert all(len(member.calls) > 4 for member in ranks.agreements.values())
    ranks.stop()


def test_passes_go_on_while_nothing_comes_and_each_installs_one_layer_at_most() -> None:
    """F8: a dozen layers; no pass waits for a read, and none carries more than one layer's install."""
    rng = np.random.default_rng(3)
    old, new = (random_layout(rng, 12, 6, 8, TWO) for _ in range(2))
    reads = DeferredCopy()
    told: list[int] = []
    with fleet(old, transports={1: reads}, on_install=lambda layer, layout: told.append(layer)) as ranks:
        ranks.start(new)
        ranks.passes(lambda: reads.waiting > 0)
        for _ in range(30):
            assert ranks.one_pass() == ()
        before = 0
        while not ranks.first.idle:
            reads.complete()
            assert len(ranks.one_pass()) <= 1
            assert len(told) - before in (0, 2)  # each rank's one
            before = len(told)
            ranks.passes_pause()
        assert ranks.first.layout == new
        assert ranks.first.status.installed == len(told) // 2


def test_reads_need_nothing_of_their_owner_but_memory() -> None:
    """R50, E12: rank 1 waits for all cores and calls nothing; rank 0 reads from it all the same."""
    reads = DeferredCopy()
    with fleet(OLD, transports={1: reads}) as ranks:
        ranks.start_reading(NEW, reads)
        staged = words.word(1, words.MOVING, 1)
        for _ in range(5000):
            if ranks.migrators[0].progress == staged:
                break
            threading.Event().wait(0.001)
        assert ranks.migrators[0].progress == staged
        reads.complete()
        ranks.until_idle(meanwhile=reads.complete)


@pytest.mark.parametrize(("install_s", "moved"), [(0.5, 0), (0.0001, 2)])
def test_a_small_gain_at_a_high_price_moves_nothing(install_s: float, moved: int) -> None:
    """F10: passes get 6% shorter, and a second of moving would come every ten seconds; a cheap move is made."""
    topology = Topology(4)
    old = ExpertLayout.trivial(2, 8, num_slots=8, topology=topology)
    load = np.full((2, 8), 100.0)
    load[:, 0] += 13.0
    load[:, 4] -= 13.0
    cost = CostModel(token_s=1e-5, install_s=install_s)

    def decide(live: ExpertLayout) -> ExpertLayout | None:
        placed = place(load, topology=topology, num_slots=8, current=live)
        verdict = should_rebalance(live, load, placed, cost=cost, passes_since=2300)
        return live.replace(placed.layout, verdict.layers) if verdict.layers.any() else None

    decide(old)  # compiles its kernels before passes wait for it
    with fleet(old) as ranks:
        ranks.move(decide)
        assert (ranks.first.status.cause, ranks.first.status.installed) == ("", moved)


@pytest.mark.parametrize("call", ["read", "poll", "abandon"])
def test_a_transport_that_raises_what_is_no_exception_ends_a_migration_and_no_thread(call: str) -> None:
    """What asyncio raises where a task is cancelled is a BaseException."""
    reads = breaks(DeferredCopy(), call, asyncio.CancelledError(), times=1)
    with fleet(OLD, transports={0: reads}, deadline=0.2 if call == "abandon" else LONG) as ranks:
        ranks.move(NEW)
        assert ranks.first.status.cause == ("deadline" if call == "abandon" else "read")
        assert ranks.first.layout == OLD
        ranks.check(OLD)
        for migrator in ranks.migrators.values():
            migrator._deadline = migrator._stager._deadline = LONG
        reads.complete()
        ranks.move(NEW, meanwhile=reads.complete)
        assert (ranks.first.status.cause, ranks.first.layout) == ("", NEW)
        ranks.check(NEW)


def test_a_target_that_leaves_the_process_ends_a_migration_and_no_thread() -> None:
    def leaves(live: ExpertLayout) -> ExpertLayout:
        raise SystemExit(3)

    with fleet(OLD) as ranks:
        ranks.move(leaves)
        assert ranks.first.status.cause == "plan"
        ranks.move(NEW)
        assert ranks.first.layout == NEW


def test_layers_that_were_registered_twice_are_refused() -> None:
    """E15: a list that grew, a tensor that stands in two layers, staging out of a weight; nothing is exported."""
    stores = stores_of(OLD, 0)
    with pytest.raises(ValueError, match=r"length 6\) must have .*=3"):
        alone(stores + stores, OLD)
    with pytest.raises(ValueError, match=r"'(\w+)' of layer 0 and '\1' of layer 1 share memory"):
        alone([stores[0], stores[0], stores[2]], OLD)
    memory = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"'w' of layer 0 and `staging` share memory"):
        alone(
            [ExpertStore({"w": memory.view(2, 32)})],
            ExpertLayout([[0, 1]], 2, topology=Topology(1)),
            staging=memory[32:],
        )


def test_a_second_migrator_registers_nothing_anew() -> None:
    """R56, E15: export and connect are idempotent; the blobs are the same, byte by byte."""
    staging = torch.zeros(2 * SLOT, dtype=torch.uint8)
    stores, transport = stores_of(OLD, 0), LocalCopy()
    own = ExpertLayout([[0, 1]] * 3, 2, topology=Topology(1))
    blobs = []
    for _ in range(3):
        migrator = alone(_plain(stores), own, transport=transport, staging=staging)
        blobs.append(transport._blob)
        assert migrator.stop(LONG)
    assert blobs[0] == blobs[1] == blobs[2]


def _plain(stores: list[ExpertStore]) -> list[ExpertStore]:
    """The same memory, without the tensors that are kept whole for four slots."""
    return [ExpertStore({name: [store.row(name, slot) for slot in range(2)] for name in SIZES}) for store in stores]


def test_tables_stores_and_layout_are_resized_together_or_not_at_all() -> None:
    """B9: 4 ranks become 5; whatever still has the old size is refused before a thread starts or a byte moves."""
    four = ExpertLayout.trivial(2, 8, num_slots=12, topology=Topology(4))
    five = four.resized(Topology(5), ranks=[0, 1, 2, 3, -1])
    stores = [ExpertStore({"w": torch.zeros(3, 4)}, {"scale": torch.zeros(12, 1)}) for _ in range(2)]
    wide = [ExpertStore({"w": torch.zeros(3, 4)}, {"scale": torch.zeros(15, 1)}) for _ in range(2)]
    threads = threading.active_count()
    with pytest.raises(ValueError, match=r"12.*15|15.*12"):
        alone(stores, five, tables=DispatchTables(five, rank=0, mode="even"))
    with pytest.raises(ValueError, match=f"`tables` .*{four.digest[:12]}.* weights .*{five.digest[:12]}"):
        alone(wide, five, tables=DispatchTables(four, rank=0, mode="even"))
    assert threading.active_count() == threads


def test_a_transport_that_lost_the_registration_of_staging_moves_nothing(tmp_path: Path) -> None:
    """Another user of it exported other memory in a pause: its staging has the number that this Migrator's had."""
    pytest.importorskip("safetensors")
    with fleet(OLD) as ranks:
        ranks.pause()
        ranks.resume()
        ranks.move(OLD.replace(NEW, [0]))  # nothing has happened to it
        live = ranks.first.layout
        ranks.pause()
        saved = ranks.each(
            lambda rank: HostBackup.save(
                tmp_path,
                ranks.stores[rank],
                live,
                rank=rank,
                agreement=ranks.agreements[rank],
                transport=ranks.transports[rank],
            )
        )
        assert all(isinstance(backup, HostBackup) for backup in saved)
        ranks.resume()
        ranks.move(NEW)
        assert (ranks.first.status.cause, ranks.first.layout) == ("read", live)
        blamed = ranks.first.status.rank
        assert blamed is not None
        assert "has exported other memory meanwhile" in ranks.migrators[blamed].status.reason
    ranks.meet()
    ranks.make(live)
    ranks.move(NEW)
    assert ranks.reached(NEW)
    assert ranks.stop() == [True, True]


# ---- weights that were changed in a pause ----------------------------------------------------------------------------


class NewShelf(Shelf):
    """Every expert as it is after a reload."""

    def fetch(self, layer: int, expert: int, rows: Any) -> None:
        for name, row in zip(SIZES, rows, strict=True):
            row.copy_(label(layer, expert, name).bitwise_not())


@pytest.mark.parametrize("backup", [NewShelf(), None])
def test_after_a_reload_the_new_backup_gives_the_new_weights(backup: NewShelf | None) -> None:
    """An old backup beside a new reference is found out: what it gives is not what the weights are."""
    topology = Topology(3)
    old = ExpertLayout([[0, 1, 1, 3, 2, 0]] * 2, 4, topology=topology)
    new = ExpertLayout([[2, 3, 0, 1, -1, -1]] * 2, 4, topology=topology)
    reloaded = {rank: stores_of(old, rank) for rank in range(3)}
    for stores in reloaded.values():
        for store in stores:
            for name in SIZES:
                for slot in range(2):
                    store.row(name, slot).bitwise_not_()
    reference = verify_weights([fingerprints(reloaded[rank]) for rank in range(3)], old).by_expert
    ranks = Fleet(old, ranks=[0, 1], backup=Shelf())
    ranks.pause()
    for rank in ranks.ranks:
        for store, fresh in zip(ranks.stores[rank], reloaded[rank], strict=True):
            for name in SIZES:
                for slot in range(2):
                    store.row(name, slot).copy_(fresh.row(name, slot))
        with pytest.raises(ValueError, match="`reference`"):
            ranks.migrators[rank].resume(reference=reference[:1])
        assert ranks.migrators[rank].status.phase == "paused"
        ranks.migrators[rank].resume(reference=reference, backup=backup)
    ranks.start(new)
    ranks.poll_until_idle()
    if backup is None:
        assert ranks.first.status.cause == "read"
        assert "bytes from the backup" in ranks.migrators[0].status.reason
        assert ranks.first.layout == old
    else:
        assert (ranks.first.status.cause, ranks.first.layout) == ("", new)
        held = ranks.stores[0][0].row("w13", 0)
        assert torch.equal(held, label(0, 2, "w13").bitwise_not())
    assert ranks.stop() == [True, True]
