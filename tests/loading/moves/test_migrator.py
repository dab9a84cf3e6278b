"""Migrations under a loop of passes: all ranks in one process, polled in turn; each pass looks at every slot."""

from __future__ import annotations

import ctypes
import re
import threading
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core import (
    DispatchTables,
    ExpertLayout,
    GroupAgreement,
    LoadCounter,
    Target,
    Topology,
    fingerprints,
    replica_shares,
    verify_weights,
)
from eplb_core._arrays import IntArray
from eplb_core.errors import MigrationError
from eplb_core.loading.moves import progress as _words
from eplb_core.loading.moves.progress import Trouble
from eplb_core.loading.moves.warm import warm_moves
from eplb_core.loading.transport import ReadBatch
from eplb_core.loading.transports import DeferredCopy, Faulty, LocalCopy
from tests.loading.fleets import LONG, SLOT, Answer, FailsAt, Fleet, Keeper, Shelf, alone, breaks, fleet
from tests.loading.worlds import CROWDED, NEW, OLD, TWO, layout_pairs, run_module, stores_of

# ---- it moves --------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(layout_pairs(3), st.integers(1, 8))
def test_migrations_change_one_layer_a_pass_and_every_slot_holds_its_expert_after_each(
    layouts: tuple[ExpertLayout, ...], slots: int
) -> None:
    """R53, R54, E13: swaps included; one slot of staging is enough."""
    with fleet(layouts[0], staging=slots * SLOT) as ranks:
        for target in layouts[1:]:
            ranks.move(target)
            assert ranks.reached(target)


def test_rows_that_change_are_installed_one_a_pass_in_order() -> None:
    with fleet(OLD) as ranks:
        ranks.move(OLD.replace(NEW, [0, 2]))
        assert ranks.installed == [0, 2]
        status = ranks.first.status
        assert (status.phase, status.migration, status.installed, status.steps) == ("idle", 1, 2, 2)
        assert status.read_bytes == 2 * SLOT
        assert status.read_gb_s > 0
        assert 0 < status.worst_install_s <= status.install_s


class Noted(LocalCopy):
    """Remembers whom it read from."""

    def __init__(self) -> None:
        super().__init__()
        self.peers: list[int] = []

    def read(self, rank: int, batch: ReadBatch, *, stream: Any = None) -> Any:
        self.peers.append(rank)
        return super().read(rank, batch, stream=stream)


@pytest.mark.parametrize("returned", [False, True])
@pytest.mark.parametrize("sender", [0, 1])
def test_senders_that_come_with_a_layout_are_read_from(sender: int, returned: bool) -> None:
    topology = Topology(3)
    old = ExpertLayout([[0, 1, 0, 2, 3, 2]], 4, topology=topology)
    new = ExpertLayout([[0, 1, 0, 2, 3, 0]], 4, topology=topology)
    target, noted = Target(new, senders=np.full((1, 6), sender)), Noted()
    with fleet(old, transports={2: noted}) as ranks:
        ranks.move((lambda live: target) if returned else target)
        assert ranks.first.layout == new
        assert noted.peers == [sender]


def test_a_function_of_the_live_layout_runs_on_a_worker() -> None:
    """R58, R52; and None means no move."""
    threads = []

    def target(live: ExpertLayout) -> ExpertLayout | None:
        threads.append(threading.current_thread().name)
        return NEW if live == OLD else None

    with fleet(OLD) as ranks:
        ranks.move(target)
        assert ranks.first.layout == NEW
        ranks.move(target)
        assert ranks.first.layout == NEW
        assert ranks.first.status.steps == 0
    assert sorted(threads[:2]) == ["eplb-plan-0", "eplb-plan-1"]


def test_dispatch_and_weights_change_in_the_same_pass_with_shares_of_the_load() -> None:
    """G5: after the last layer the tables are as if made anew for the target and its shares."""
    old = ExpertLayout([[0, 1, 2, 3, 0, 1]] * 2, 4, topology=TWO)
    new = ExpertLayout([[0, 1, 2, 3, 2, 2]] * 2, 4, topology=TWO)
    load = np.array([[5.0, 1, 9, 1]] * 2)
    shares = replica_shares(new, load)
    with fleet(old, mode="weighted") as ranks:
        ranks.move(lambda live: Target(new, shares))
        anew = DispatchTables(new, rank=1, mode="weighted", shares=shares)
        for layer in range(2):
            assert torch.equal(ranks.tables[1].layer(layer).table, anew.layer(layer).table)


def test_a_hook_is_told_of_every_install_after_it() -> None:
    """E4: for what an engine derives from slots."""
    told: list[tuple[int, bool]] = []
    with fleet(
        OLD, on_install=lambda layer, layout: told.append((layer, layout == OLD.replace(NEW, range(layer + 1))))
    ) as ranks:
        ranks.move(NEW)
    assert told == [(layer, True) for layer in range(3) for _ in range(2)]


def test_nothing_is_installed_before_every_rank_has_read() -> None:
    """R59, F2: one rank's reads are late; weights and maps wait for it on both."""
    slow = DeferredCopy()
    with fleet(OLD, transports={1: slow}) as ranks:
        ranks.start_reading(NEW, slow)
        for _ in range(20):
            assert ranks.one_pass() == ()
        assert ranks.first.layout == OLD
        ranks.until_idle(meanwhile=slow.complete)
        assert ranks.first.layout == NEW


def test_an_idle_poll_hands_in_a_word_that_does_not_change() -> None:
    with fleet(OLD) as ranks:
        words = set()
        for _ in range(5):
            ranks.one_pass()
            words.add(ranks.first.progress)
        assert len(words) == 1
        assert ctypes.c_int64.from_address(ranks.first.progress_address).value == words.pop()


def test_an_engine_with_a_collective_of_its_own_uses_the_two_halves() -> None:
    with fleet(OLD) as ranks:
        ranks.start(NEW)
        agreed: int | None = None

        def one_pass() -> None:
            nonlocal agreed
            assert len({migrator.install(agreed) for migrator in ranks.migrators.values()}) == 1
            agreed = min(migrator.progress for migrator in ranks.migrators.values())
            ranks.look()

        ranks.wait(lambda: ranks.first.idle, one_pass)
        assert ranks.first.layout == NEW


# ---- it ends ---------------------------------------------------------------------------------------------------------


EITHER = -1
"""Both ranks fail, and one is named: the same on both."""


def ends(ranks: Fleet, cause: str, rank: int | None, layout: ExpertLayout, text: str) -> None:
    """The migration is over on all ranks."""
    named = {migrator.status.rank for migrator in ranks.migrators.values()}
    assert len(named) == 1
    if rank == EITHER:
        rank = named.pop()
    for migrator in ranks.migrators.values():
        status = migrator.status
        assert (status.phase, status.cause, status.rank) == ("idle", cause, rank)
        assert migrator.layout == layout
    own = ranks.first if rank is None else ranks.migrators[rank]
    assert text in own.status.reason


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_read_that_fails_ends_the_migration_in_the_same_pass_everywhere(at: int) -> None:
    """F6, H8: layers before it stay new, later ones old, serving goes on; the next migration moves the rest."""
    failing = FailsAt(at)
    with fleet(OLD, transports={1: failing}) as ranks:
        ranks.move(NEW)
        ends(ranks, "read", 1, OLD.replace(NEW, range(at)), "reading from rank 0 ended as FAILED: the cable was cut")
        assert ranks.migrators[0].status.reason == "rank 1 gave up: read"
        failing.left = 100
        ranks.move(NEW)
        assert ranks.first.layout == NEW


def test_a_rank_that_never_becomes_ready_ends_it_by_the_deadline() -> None:
    """F1, R61: and the late bytes land in staging that is not used again until then."""
    stuck = DeferredCopy()
    with fleet(OLD, transports={1: stuck}, deadline=0.2, staging=SLOT) as ranks:
        ranks.move(NEW)
        assert ranks.first.status.cause == "deadline"
        assert ranks.first.layout == OLD
        ranks.move(NEW)  # the one slot of staging is still in the transport's hands
        assert ranks.first.status.cause == "deadline"
        assert ranks.migrators[1].status.quarantined == 1
        assert stuck.complete() == 1  # late
        ranks.check(OLD)
        ranks.move(NEW, meanwhile=stuck.complete)
        ends(ranks, "", None, NEW, "")


def test_a_rank_that_has_failed_says_so_whatever_its_workers_do_next() -> None:
    reads = DeferredCopy()
    with fleet(OLD, transports={1: reads}) as ranks:
        ranks.start_reading(NEW, reads)
        run = ranks.migrators[1]._run
        assert run is not None
        run.fail(Trouble("deadline", "too late"))
        reads.complete()
        ranks.wait(lambda: run.staged > 0)
        assert ranks.migrators[1].progress < 0
        ranks.until_idle()
        ends(ranks, "deadline", 1, OLD, "too late")


def test_a_peer_that_is_lost_is_told_from_a_read_that_failed() -> None:
    reads = DeferredCopy()
    with fleet(OLD, transports={0: reads}) as ranks:
        ranks.move(NEW, meanwhile=lambda: reads.fail("the connection was reset", lost=True))
        ends(ranks, "peer", 0, OLD, "reading from rank 1 ended as LOST_PEER: the connection was reset")


def test_ranks_with_different_targets_move_nothing() -> None:
    """WALKTHROUGH G4: both minima tell."""
    with fleet(OLD) as ranks:
        for rank, target in enumerate((NEW, OLD.replace(NEW, [1]))):
            ranks.migrators[rank].start(target)
        ranks.until_idle()
        ends(ranks, "disagree", None, OLD, "ranks computed different targets")
        assert ranks.installed == []


def test_a_function_that_raises_ends_it_everywhere() -> None:
    def target(live: ExpertLayout) -> ExpertLayout:
        raise ZeroDivisionError("no load")

    with fleet(OLD) as ranks:
        ranks.migrators[0].start(NEW)
        ranks.migrators[1].start(target)
        ranks.until_idle()
        ends(ranks, "plan", 1, OLD, "no target: ZeroDivisionError: no load")


def test_a_function_that_gives_no_layout_is_told_what_to_give() -> None:
    placed: Any = SimpleNamespace(layout=NEW)  # as `place` gives
    with fleet(OLD) as ranks:
        ranks.move(lambda live: placed)
        said = {migrator.status.reason for migrator in ranks.migrators.values()}
        assert any("must be an ExpertLayout, a Target(layout" in text for text in said)


def test_a_target_that_the_tables_cannot_hold_is_refused_before_anything_moves() -> None:
    old = ExpertLayout([[0, 1, 2, 0, 1, 2]], 3, topology=TWO)
    many = ExpertLayout([[0, 1, 2, 0, 0, 0]], 3, topology=TWO)
    with fleet(old, max_replicas=3) as ranks:
        ranks.move(many)
        ends(ranks, "plan", EITHER, old, "an expert has 4 replicas and `tables` hold 3")
        ranks.move(Target(old, np.full((1, 6), 0.5)))
        ends(ranks, "plan", EITHER, old, "cannot keep shares")


def test_a_row_on_the_way_that_the_tables_cannot_hold_is_refused_before_anything_moves() -> None:
    old, new = CROWDED
    with fleet(old, staging=SLOT, max_replicas=3) as ranks:
        ranks.move(new)
        ends(ranks, "plan", EITHER, old, "hold 3 on the way of layer 0; give more `staging`")
        assert ranks.first.status.installed == 0
    with fleet(old, max_replicas=3) as ranks:  # a whole layer at a time
        ranks.move(new)
        assert ranks.first.layout == new


@pytest.mark.parametrize(
    ("shares", "text"),
    [
        ([[1.0, 1, 1]], r"`shares` (shape [1, 3]) must be [1, 4]"),
        ([[1.5, 1, 1, 1]], "`shares` (=1.5) must be in [0, 1] at layer 0, slot 0"),
        ([[0.5, 1, 1, 1]], "`shares` of expert 2 (sum 0.5) must sum to 1 at layer 0"),
    ],
)
def test_shares_that_do_not_fit_are_refused_before_anything_moves(shares: list[list[float]], text: str) -> None:
    old = ExpertLayout([[0, 1, 2, 3]], 4, topology=TWO)
    with fleet(old, mode="weighted") as ranks:
        target = Target(ExpertLayout([[2, 1, 0, 3]], 4, topology=TWO), shares)
        with pytest.raises(ValueError, match=re.escape(text)):
            ranks.first.start(target)
        assert ranks.first.idle
        ranks.move(lambda live: target)
        ends(ranks, "plan", EITHER, old, text)


def test_a_rank_that_was_never_started_stops_the_others_by_the_deadline_and_none_moves_alone() -> None:
    with fleet(OLD, deadline=0.1) as ranks:
        ranks.migrators[0].start(NEW)
        assert not any(ranks.poll_until_idle())
        assert [migrator.status.cause for migrator in ranks.migrators.values()] == ["deadline"] * 2
        assert ranks.migrators[1].status.migration == 1
        ranks.move(NEW)
        assert ranks.first.layout == NEW


def test_an_engine_s_own_word_for_failed_ends_it_too() -> None:
    with fleet(OLD) as ranks:
        ranks.start(NEW)
        for migrator in ranks.migrators.values():
            assert migrator.install(-1) == ()
        ends(ranks, "failed", None, OLD, "gave up: failed")


def test_start_is_refused_where_it_cannot_be() -> None:
    with fleet(OLD) as ranks:
        ranks.start(NEW)
        with pytest.raises(MigrationError, match="cannot start while the Migrator is planning; ask `idle` first"):
            ranks.first.start(NEW)
        ranks.until_idle()
        with pytest.raises(ValueError, match="layouts differ in layers: 3 and 1"):
            ranks.first.start(ExpertLayout([[0, 1, 2, 3]], 4, topology=TWO))
    with pytest.raises(MigrationError, match="cannot start while the Migrator is stopped; make a new one"):
        ranks.first.start(OLD)
    assert ranks.first.poll() == ()


def test_a_target_that_is_none_is_refused_before_anything_starts() -> None:
    with fleet(OLD) as ranks:
        for target, said in [
            ((NEW, None), r"Target\(layout, shares=..., senders=...\)"),
            (Target, "an ExpertLayout, a"),
        ]:
            with pytest.raises(TypeError, match=said):
                ranks.first.start(target)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="shares"):
            ranks.first.start(Target(NEW, shares=np.ones((3, 7))))
        assert (ranks.first.idle, ranks.first.status.migration) == (True, 0)


def test_the_rank_that_did_not_call_start_is_named_on_every_rank() -> None:
    with fleet(OLD, deadline=0.2) as ranks:
        ranks.migrators[0].start(NEW)
        while not ranks.migrators[0].idle or ranks.migrators[1].status.cause == "":
            for migrator in ranks.migrators.values():
                migrator.poll()
        assert ranks.migrators[0].status.cause == "deadline"
        assert "rank 1 did not call `start` for 0.2 s" in ranks.migrators[0].status.reason
        assert "this rank did not call `start`, and rank 0 gave up" in ranks.migrators[1].status.reason


def reference() -> IntArray:
    """As an engine makes it at the start."""
    prints = [fingerprints(stores_of(OLD, rank)) for rank in (0, 1)]
    return verify_weights(prints, OLD).by_expert


def test_bytes_that_were_torn_on_the_way_are_not_installed() -> None:
    """A transport that says DONE and has written something else."""
    torn = Faulty(LocalCopy(), ["none", "tear"])
    with fleet(OLD, transports={1: torn}, reference=reference()) as ranks:
        ranks.move(NEW)
        ends(ranks, "read", 1, OLD.replace(NEW, [0]), "bytes from slot 0 do not match the reference")
        ranks.move(NEW)
        ends(ranks, "", None, NEW, "")


def test_a_read_that_is_refused_keeps_no_staging() -> None:
    reads = LocalCopy()
    with fleet(OLD, transports={1: reads}, staging=SLOT) as ranks:
        peer = reads._peers.pop(0)
        ranks.move(NEW)
        ends(ranks, "read", 1, OLD, "`rank` (=0) must be connected before it is read from")
        reads._peers[0] = peer
        ranks.move(NEW)
        ends(ranks, "", None, NEW, "")


def test_a_reference_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`reference` \(int64 \[1, 4, 3\]\) must be int64 \[3, 4, 3\]"):
        Fleet(OLD, reference=reference()[:1])


# ---- the record ------------------------------------------------------------------------------------------------------


def test_a_record_hears_of_every_layer_before_it_is_staged_and_after_it_is_installed() -> None:
    """R32."""
    keepers = {rank: Keeper(OLD) for rank in (0, 1)}
    with fleet(OLD, records=keepers) as ranks:
        ranks.move(NEW)
    for keeper in keepers.values():
        assert keeper.said == ["begin", "commit"] * 3
        assert keeper.layout == NEW


def test_a_busy_record_ends_this_migration_and_a_refusing_one_all() -> None:
    """R26: ranks that began abort; refused means off for good, on every rank."""
    keepers = {0: Keeper(OLD), 1: Keeper(OLD, begin=Answer("busy", "engine 'b' is there"))}
    with fleet(OLD, records=keepers) as ranks:
        ranks.move(NEW)
        ends(ranks, "busy", 1, OLD, "layer 0: engine 'b' is there")
        keepers[1].answer = Answer("refused", "an engine that does not follow has fetched")
        ranks.move(NEW)
        ends(ranks, "refused", 1, OLD, "layer 0: an engine that does not follow has fetched")
        assert [migrator.start(NEW) for migrator in ranks.migrators.values()] == [False, False]
        assert ranks.first.status.off == "rank 1 gave up: refused"
    assert not keepers[0].pending
    assert "off" in keepers[0].said


@pytest.mark.parametrize(
    ("keeper", "text"),
    [
        (Keeper(OLD, digest="0123456789abcdef"), "restart the keepers"),
        (breaks(Keeper(OLD), "commit", OSError("no space left")), "layer 0 could not be recorded: OSError: no space"),
    ],
)
def test_a_commit_that_fails_leaves_the_layer_new_and_ends_all_moves(keeper: Keeper, text: str) -> None:
    """R28."""
    with fleet(OLD, records={0: Keeper(OLD), 1: keeper}) as ranks:
        ranks.move(NEW)
        ends(ranks, "record", 1, OLD.replace(NEW, [0]), text)
        assert ranks.first.status.off


def test_a_record_on_some_ranks_alone_turns_moves_off() -> None:
    """R30."""
    with fleet(OLD, records={1: Keeper(OLD)}) as ranks:
        assert [migrator.start(NEW) for migrator in ranks.migrators.values()] == [False, False]
        assert ranks.first.status.off.startswith("1 of 2 ranks keep a record")


def test_nothing_is_compiled_after_the_constructors() -> None:
    """Rule 8, for layers in parts and shares: a kernel that compiled here held the interpreter for half a minute."""
    assert run_module("tests.loading.compiled_while_serving").split() == []


def test_a_callback_that_raises_leaves_the_rank_in_step_with_the_others() -> None:
    """F2, F6: its word is handed in all the same; else it would install everything a pass after the others."""
    raised = []

    def on_install(layer: int, layout: ExpertLayout) -> None:
        raised.append(layer)
        raise OSError("an engine's own copy")

    with fleet(OLD) as ranks:
        ranks.migrators[1]._on_install = on_install
        ranks.start(NEW)

        def one_pass() -> None:
            own = pytest.raises(OSError, match="an engine's own copy") if ranks.first.poll() else nullcontext()
            with own:
                assert ranks.migrators[1].poll() == ()
            ranks.look()

        ranks.wait(lambda: ranks.first.idle, one_pass)
        assert raised == [0, 1, 2]
        ends(ranks, "", None, NEW, "")


def test_tables_that_raise_end_the_migration_and_the_step_is_not_installed_twice() -> None:
    """A step whose slots exchange experts in place would bring the old ones back the second time."""
    circle = OLD.replace(ExpertLayout([[1, 0, 3, 2]] * 3, 4, topology=OLD.topology), [0])
    with fleet(OLD) as ranks:
        breaks(ranks.tables[1], "install", RuntimeError("out of memory"), times=1)
        ranks.start(circle)
        ranks.until_staged()
        assert ranks.migrators[0].poll() == (0,)
        with pytest.raises(RuntimeError, match="out of memory"):
            ranks.migrators[1].poll()
        ranks.tables[1].install(circle)  # what an engine must do
        ranks.check(circle)
        ranks.until_idle()
        ends(ranks, "failed", 1, circle, "layer 0: the tables were not installed: out of memory")


def test_the_number_of_steps_is_the_same_on_a_rank_that_has_no_plan() -> None:
    planned = threading.Event()

    def target(live: ExpertLayout) -> ExpertLayout:
        assert planned.wait(LONG)
        raise ZeroDivisionError

    with fleet(OLD) as ranks:
        ranks.migrators[0].start(NEW)
        ranks.migrators[1].start(target)
        run = ranks.migrators[0]._run
        assert run is not None
        ranks.passes(lambda: len(run.steps) == 3)
        planned.set()
        ranks.until_idle()
        assert [migrator.status.steps for migrator in ranks.migrators.values()] == [0, 0]


def test_a_transport_that_raises_keeps_no_staging() -> None:
    """Three migrations with one slot of staging for each read."""
    topology = Topology(3)
    old = ExpertLayout([[0, 1, 2, 3, 4, 5]], 6, topology=topology)
    new = ExpertLayout([[2, 4, 0, 5, 1, 3]], 6, topology=topology)
    second_read = breaks(LocalCopy(), "read", OSError("no route to host"), after=1, times=1)
    with fleet(old, transports={0: second_read}, deadline=2.0) as ranks:
        ranks.move(new)
        ends(ranks, "read", 0, old, "layer 0: OSError: no route to host")
        ranks.move(new)
        ends(ranks, "", None, new, "")


class Narrow(LocalCopy):
    """Takes two operations at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.caps = self.caps._replace(max_batch=2)
        self.sizes: list[int] = []

    def read(self, rank: int, batch: ReadBatch, *, stream: Any = None) -> Any:
        self.sizes.append(len(batch.nbytes))
        return super().read(rank, batch, stream=stream)


def test_reads_are_split_into_batches_that_the_transport_takes() -> None:
    """E7: two slots of three tensors are six operations."""
    narrow = Narrow()
    old = ExpertLayout([[0, 1, 2, 3]], 4, topology=TWO)
    new = ExpertLayout([[2, 3, 0, 1]], 4, topology=TWO)
    with fleet(old, transports={0: narrow}) as ranks:
        ranks.move(new)
        assert narrow.sizes == [2, 2, 2]
        ends(ranks, "", None, new, "")


def test_staging_is_not_read_into_again_before_it_was_installed() -> None:
    """E10: one slot of it; the next layer's reads wait for this rank's own install, however fast they are."""
    reads = DeferredCopy()
    with fleet(OLD, transports={0: reads}, staging=SLOT) as ranks:
        ranks.start_reading(NEW, reads)
        reads.complete()
        ranks.wait(lambda: ranks.first.progress == _words.word(1, _words.MOVING, 1))
        assert not ranks.first._mover.wait_quiet(0.05)
        assert reads.waiting == 0
        ranks.until_idle(meanwhile=reads.complete)
        ends(ranks, "", None, NEW, "")


def test_the_next_layer_is_read_while_ranks_agree_on_the_one_before_if_staging_has_room() -> None:
    """R57: its bytes are waiting when its turn comes, in rows of staging that the first one does not have."""
    reads = {rank: DeferredCopy() for rank in (0, 1)}
    with fleet(OLD, transports=dict(reads), staging=2 * SLOT) as ranks:
        ranks.start(NEW)
        ranks.passes(lambda: reads[0].waiting == reads[1].waiting == 1)
        reads[0].complete()
        ranks.passes(lambda: reads[0].waiting == 1)  # that of layer 1; rank 1 has not even read layer 0
        assert ranks.installed == []
        assert reads[0].complete() == 1
        ranks.passes(lambda: ranks.installed == [0, 1], meanwhile=reads[1].complete)
        ranks.until_idle(meanwhile=lambda: [reads[rank].complete() for rank in (0, 1)])
        ends(ranks, "", None, NEW, "")
        assert ranks.first.status.read_bytes == 3 * SLOT


def test_the_next_part_of_a_layer_is_not_read_early_though_staging_has_room() -> None:
    """R55: slot 7 gets its expert in the first step, and rank 1 reads it from there in the second."""
    topology = Topology(3)
    old = ExpertLayout([[6, 4, 0, 5, 2, 3, 1, 4, 5]], 7, topology=topology)
    new = ExpertLayout([[4, 5, 2, 1, 2, 6, 0, 6, 3]], 7, topology=topology)
    reads = DeferredCopy()
    with fleet(old, transports={1: reads}, staging=2 * SLOT) as ranks:
        ranks.start_reading(new, reads)
        reads.complete()
        staged = _words.word(1, _words.MOVING, 1)
        ranks.passes(lambda: ranks.migrators[1]._posted == staged)
        assert ranks.installed == []
        assert not ranks.migrators[1]._mover.wait_quiet(0.05)
        assert reads.waiting == 0
        ranks.until_idle(meanwhile=reads.complete)
        ends(ranks, "", None, new, "")


def test_one_slot_of_staging_is_never_read_into_twice_and_never_waited_for() -> None:
    reads = DeferredCopy()
    with fleet(OLD, transports={0: reads}, staging=SLOT) as ranks:
        ranks.start(NEW)
        most = 0

        def look() -> None:
            nonlocal most
            most = max(most, reads.waiting)
            reads.complete()

        ranks.until_idle(meanwhile=look)
        assert most == 1
        ends(ranks, "", None, NEW, "")


def test_a_layer_that_was_read_early_in_vain_is_given_up_with_its_migration() -> None:
    """Its slot is the transport's until the late bytes are there; the next migration takes the other one."""
    reads = {rank: DeferredCopy() for rank in (0, 1)}
    records = {0: Keeper(OLD), 1: Keeper(OLD, Answer("busy"))}
    with fleet(OLD, transports=dict(reads), records=records, clean=False) as ranks:
        ranks.start(NEW)
        ranks.passes(lambda: reads[0].waiting == reads[1].waiting == 1)
        reads[0].complete()
        ranks.passes(lambda: reads[0].waiting == 1)  # that of layer 1
        reads[1].complete()
        ranks.until_idle()
        assert ranks.first.status.cause == "busy"
        assert ranks.first._mover.wait_quiet(LONG)
        assert ranks.first.status.quarantined == 1
        assert ranks.each(lambda rank: ranks.migrators[rank].stop(0.1)) == [False, True]
        reads[0].complete()
        ranks.check(OLD)
        assert ranks.stop() == [True, True]


def test_slots_from_the_backup_wait_in_staging_that_no_early_read_gets() -> None:
    """Rank 2 is dead and alone held expert 2 of both layers; rank 0 restores it and reads of the next layer at once."""
    topology = Topology(3)
    old = ExpertLayout([[0, 1, 1, 3, 2, 0]] * 2, 4, topology=topology)
    new = ExpertLayout([[2, 3, 0, 1, -1, -1]] * 2, 4, topology=topology)
    reads = DeferredCopy()
    with fleet(old, ranks=[0, 1], transports={0: reads}, backup=Shelf(), staging=4 * SLOT) as ranks:
        ranks.start_reading(new, reads)
        reads.complete()
        ranks.passes(lambda: reads.waiting == 1)
        reads.complete()
        ranks.until_idle(meanwhile=reads.complete)
        ends(ranks, "", None, new, "")


def test_staging_that_was_made_in_inference_mode_takes_what_the_worker_writes() -> None:
    with torch.inference_mode():
        staging = torch.empty(2 * SLOT, dtype=torch.uint8)
    old = ExpertLayout([[0, 1, -1, -1, 2, 3, -1, -1]], 4, topology=TWO)
    new = ExpertLayout([[0, 1, 2, 3, -1, -1, -1, -1]], 4, topology=TWO)
    with fleet(old, ranks=[0], backup=Shelf(), staging=staging) as ranks:
        ranks.move(new)
        ends(ranks, "", None, new, "")


def test_what_stays_on_the_host_does_so_whatever_device_the_engine_made_its_default(tmp_path: Path) -> None:
    dist: Any = torch.distributed
    old, new = (ExpertLayout([row], 4, topology=Topology(1)) for row in ([0, 1, 2, 3], [3, 2, 1, 0]))
    stores, store = stores_of(old, 0), dist.FileStore(str(tmp_path / "store"), 1)
    group = dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=30))
    warm_moves.cache_clear()
    with torch.device("meta"):
        load = LoadCounter(1, 4)
        tables = DispatchTables(old, rank=0, mode="weighted", load=load)
        migrator = alone(stores, old, agreement=GroupAgreement(group, 5.0), tables=tables, staging=SLOT)
        migrator.start(new)
        while migrator.status.phase in ("planning", "moving"):
            migrator.poll()
            threading.Event().wait(0.001)
        assert migrator.stop(LONG)
        assert load.snapshot().numpy().sum() == 0
    assert (migrator.status.cause, migrator.layout, tables.layout) == ("", new, new)


def test_a_target_of_another_number_of_slots_is_refused_and_the_old_layout_stays() -> None:
    """B8: a plan for 12 slots, a commit after a resize to 15."""
    old = ExpertLayout.trivial(2, 10, num_slots=12, topology=Topology(4))
    resized = ExpertLayout.trivial(2, 10, num_slots=15, topology=Topology(5))
    with fleet(old) as ranks:
        for migrator in ranks.migrators.values():
            with pytest.raises(ValueError, match=r"12.*15|15.*12"):
                migrator.start(resized)
        ranks.move(lambda live: resized)
        assert {migrator.status.cause for migrator in ranks.migrators.values()} == {"plan"}
        assert ranks.first.layout == old
        ranks.move(lambda live: live)
        assert ranks.first.status.cause == ""
