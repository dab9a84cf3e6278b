"""Pauses, stops, dead ranks, and ranks that go on without them."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from eplb_core import ExpertLayout, SlotResolver, Topology
from eplb_core.errors import AgreementError, MigrationError, TransportError
from eplb_core.loading.moves import progress as words
from eplb_core.loading.moves.progress import Trouble
from eplb_core.loading.moves.pull import _WRITTEN
from eplb_core.loading.transport import ReadState, Status
from eplb_core.loading.transports import DeferredCopy, LocalCopy
from tests.loading.fleets import LONG, SLOT, Answer, Fleet, Keeper, Shelf, Watched, fleet
from tests.loading.worlds import NEW, OLD, SIZES, TWO, label


def raises(layer: int, layout: ExpertLayout) -> None:
    """As an engine's own `on_install`."""
    raise ZeroDivisionError(f"layer {layer}")


# ---- pause, resume, stop ---------------------------------------------------------------------------------------------


def test_a_pause_drops_what_is_staged_and_ends_the_migration() -> None:
    """G5b: weights reloaded in the pause are not overwritten by what was staged before it."""
    with fleet(OLD) as ranks:
        ranks.start(NEW)
        ranks.passes(lambda: len(ranks.installed) == 1)
        live = OLD.replace(NEW, [0])
        assert ranks.pause() == [live, live]
        assert ranks.first.status.phase == "paused"
        assert ranks.first.status.cause == "paused"
        assert not ranks.first.idle
        with pytest.raises(MigrationError, match="cannot start while the Migrator is paused; `resume` it first"):
            ranks.first.start(NEW)
        ranks.resume()
        for _ in range(5):  # words of before the pause arrive now
            assert ranks.one_pass() == ()
        assert ranks.first.layout == live
        ranks.move(NEW)
        assert ranks.first.layout == NEW


def test_a_pause_at_any_pass_leaves_all_ranks_in_one_layout_and_the_next_migration_works() -> None:
    for passes in range(14):
        with fleet(OLD) as ranks:
            ranks.start(NEW)
            for _ in range(passes):
                ranks.one_pass()
                threading.Event().wait(0.001)
            layouts = ranks.pause()
            assert layouts == [ranks.first.layout] * 2
            ranks.check(ranks.first.layout)
            ranks.resume()
            ranks.move(OLD)
            assert ranks.reached(OLD)


def test_a_layer_is_not_read_again_before_every_rank_has_installed_it() -> None:
    """R55, for a layer in two steps: rank 1 has not yet installed the first when rank 0 could read for the second."""
    old = ExpertLayout([[0, 1, 2, 3]], 4, topology=TWO)
    new = ExpertLayout([[2, 3, 1, 0]], 4, topology=TWO)
    reads = DeferredCopy()
    with fleet(old, transports={0: reads}, staging=SLOT) as ranks:
        ranks.start_reading(new, reads)
        reads.complete()
        ranks.until_staged()
        assert ranks.migrators[0].poll() == (0,)
        assert not ranks.migrators[0]._mover.wait_quiet(0.05)
        assert reads.waiting == 0
        assert ranks.migrators[1].poll() == (0,)
        ranks.passes(lambda: reads.waiting == 1)
        ranks.until_idle(meanwhile=reads.complete)
        assert ranks.first.layout == new


def test_a_pause_can_wait_for_the_end_of_the_migration() -> None:
    with fleet(OLD) as ranks:
        ranks.start(NEW)
        ranks.one_pass()
        assert ranks.pause(finish=True) == [NEW, NEW]
        ranks.check(NEW)
        assert ranks.first.status.cause == ""


def test_a_callback_that_raises_in_a_pause_is_heard_at_the_end_and_holds_nobody_up() -> None:
    with fleet(OLD) as ranks:
        ranks.migrators[1]._on_install = raises
        ranks.start(NEW)
        first, second = ranks.pause(finish=True)
        assert first == NEW
        assert isinstance(second, ZeroDivisionError)
        assert str(second) == "layer 0"
        assert [migrator.status.phase for migrator in ranks.migrators.values()] == ["paused"] * 2
        ranks.look()


def test_a_read_that_no_one_can_stop_does_not_hold_up_a_pause_and_lands_in_quarantine() -> None:
    slow = DeferredCopy()
    with fleet(OLD, transports={1: slow}) as ranks:
        ranks.start_reading(NEW, slow)
        assert ranks.pause() == [OLD, OLD]
        assert ranks.migrators[1].status.quarantined == 1
        slow.complete()
        ranks.check(OLD)


def test_new_weights_in_a_pause_are_what_later_migrations_move() -> None:
    with fleet(OLD) as ranks:
        ranks.start(NEW)
        ranks.passes(lambda: len(ranks.installed) == 2)
        live = ranks.pause()[0]
        for rank, layer, expert in np.ndindex(2, 3, 4):
            for row in SlotResolver(live, rank).local_slots(layer, expert):
                for name in SIZES:
                    ranks.stores[rank][layer].row(name, row).copy_(label(layer, expert, name).bitwise_not())
        ranks.resume()
        ranks.start(OLD)
        ranks.poll_until_idle()
        for layer, slot in np.ndindex(3, 4):
            expert = int(OLD.physical_to_logical_map[layer, slot])
            for name in SIZES:
                held = ranks.stores[slot // 2][layer].row(name, slot % 2)
                assert torch.equal(held, label(layer, expert, name).bitwise_not())


def test_stop_says_that_a_read_may_still_write_to_staging() -> None:
    slow = DeferredCopy()
    with fleet(OLD, transports={1: slow}, clean=False) as ranks:
        ranks.start_reading(NEW, slow)
        for _ in range(2):
            assert ranks.each(lambda rank: ranks.migrators[rank].stop(0.1)) == [True, False]
        assert ranks.migrators[1]._stager.puller in _WRITTEN
        slow.complete()
        assert ranks.stop() == [True, True]
        assert ranks.migrators[1]._stager.puller not in _WRITTEN  # nor are its weights kept any longer


def test_staging_outlives_a_migrator_that_nobody_stops_while_a_read_may_still_write() -> None:
    """Rule 7: an engine that gives up on an error goes on in its process."""
    slow = DeferredCopy()
    ranks = Fleet(OLD, transports={1: slow})
    ranks.start_reading(NEW, slow)
    assert ranks.pause() == [OLD, OLD]
    staging = weakref.ref(ranks.migrators[1]._stager.puller.staging)
    ranks.migrators.clear()
    gc.collect()
    assert staging() is not None
    slow.complete()


def test_a_bad_deadline_stops_nothing() -> None:
    with fleet(OLD) as ranks:
        refused = ranks.each(lambda rank: ranks.migrators[rank].stop(-1))
        assert [str(error) for error in refused] == ["`deadline` (=-1.0) must be at least 0"] * len(ranks.ranks)
        assert ranks.first.idle


def test_a_rank_whose_peers_were_not_made_stops_alone_and_asks_nobody() -> None:
    asked: list[str] = []
    with fleet(OLD, agree=lambda member: Watched(member, before=asked.append), clean=False) as ranks:
        asked.clear()
        assert ranks.first.stop(LONG, alone=True)
        assert asked == []
        assert ranks.first.status.phase == "stopped"
        assert ranks.migrators[1].stop(LONG, alone=True)
        with pytest.raises(TypeError, match="`alone`"):
            ranks.first.stop(LONG, alone=1)  # type: ignore[arg-type]


def test_stop_says_that_a_function_still_runs() -> None:
    gate = threading.Event()

    def target(live: ExpertLayout) -> None:
        gate.wait(LONG)

    with fleet(OLD, clean=False) as ranks:
        ranks.start(target)
        assert ranks.each(lambda rank: ranks.migrators[rank].stop(0.05)) == [False, False]
        gate.set()


def test_a_stopped_migrator_leaves_the_transport_to_the_next_one() -> None:
    """G10: a Transport outlives its Migrators."""
    with fleet(OLD) as ranks:
        ranks.move(NEW)
    ranks.meet()
    ranks.make(NEW)
    ranks.move(OLD)
    assert ranks.reached(OLD)
    assert ranks.stop() == [True, True]


def test_a_connection_that_ended_unseen_costs_one_migration_and_not_all() -> None:
    """A read that was given up on may end as lost when nobody looks any more, and take the connection with it."""
    with fleet(OLD) as ranks:
        ranks.transports[1].disconnect(0)
        ranks.move(NEW)
        assert ranks.first.status.cause == "read"
        assert "must be connected" in ranks.migrators[1].status.reason
        ranks.move(NEW)
        assert ranks.reached(NEW)


class OutOfReach(LocalCopy):
    """Its peer is lost at the first read, and does not come back."""

    lost = False

    def _attach(self, peer: Any, former: Any) -> None:
        if self.lost:
            raise TransportError("no route", rank=peer.rank)
        super()._attach(peer, former)

    def _copy(self, ticket: Any, peer: Any) -> None:
        self.lost = True
        ticket.finish(Status(ReadState.LOST_PEER, "the connection was reset"))


def test_a_lost_peer_that_cannot_be_reached_again_is_still_called_lost() -> None:
    with fleet(OLD, transports={1: OutOfReach()}) as ranks:
        for reason in ("the connection was reset", "rank 0 was lost and cannot be reached again: no route"):
            ranks.move(NEW)
            assert ranks.first.status.cause == "peer"
            assert reason in ranks.migrators[1].status.reason


# ---- dead ranks ------------------------------------------------------------------------------------------------------


def leave_and_poll(ranks: Fleet, dead: int) -> None:
    """One rank dies between two passes; the others poll until they know."""
    ranks.agreements[dead].leave()
    ranks.ranks = [rank for rank in ranks.ranks if rank != dead]
    for _ in range(2):
        for rank in ranks.ranks:
            with contextlib.suppress(MigrationError):  # in doubt: they rejoin before the next pass
                ranks.migrators[rank].poll()


THREE = Topology(3)
WIDE = ExpertLayout([[0, 1, 2, 3, 0, 2]] * 3, 4, topology=THREE)
WIDER = ExpertLayout([[3, 1, 2, 0, 1, 2]] * 3, 4, topology=THREE)
WITHOUT_1 = ExpertLayout([[0, 3, -1, -1, 1, 2]] * 3, 4, topology=THREE)


def test_a_rank_that_dies_leaves_the_others_in_one_layout_whatever_the_pass() -> None:
    """R61; then the two that live agree without it, and move what it alone held from the backup."""
    for passes in range(12):
        with fleet(WIDE, clean=False, backup=Shelf()) as ranks:
            ranks.start(WIDER)
            for _ in range(passes):
                ranks.one_pass()
                threading.Event().wait(0.001)
            leave_and_poll(ranks, 1)
            for rank in ranks.ranks:
                status = ranks.migrators[rank].status
                assert (status.phase, status.cause) == ("lost", "agreement")
                assert "rank 1 did not answer" in status.reason
                assert ranks.migrators[rank].poll() == ()
                assert not ranks.migrators[rank].idle
            assert ranks.rejoin() == [ranks.first.layout] * 2
            ranks.look()
            ranks.move(WITHOUT_1)
            assert ranks.reached(WITHOUT_1)
            assert ranks.stop() == [True, True]


def fails(call: str) -> None:
    """Fail on this rank where the others succeed."""
    if call != "post":
        raise AgreementError("rank 1 did not answer within 20 s, or died", ranks=(1,))


def one_sided(ranks: Fleet) -> Watched:
    """Rank 1 takes part in a migration by an agreement that can fail on it alone."""
    watched = ranks.migrators[1]._agreement = Watched(ranks.agreements[1])
    ranks.start(NEW)
    return watched


def test_a_rank_that_missed_an_install_in_a_pause_catches_up_too() -> None:
    """`pause(finish=True)` installs; the agreement fails on one rank in the round that lets the others install."""
    with fleet(OLD, clean=False) as ranks:
        watched = one_sided(ranks)
        staged = words.word(1, words.MOVING, 1)
        ranks.passes(lambda: all(migrator.progress == staged for migrator in ranks.migrators.values()))
        watched.after = fails
        ranks.agreements[0].deadline = 0.5
        first, second = ranks.pause(finish=True)
        assert isinstance(first, (AgreementError, MigrationError))  # it may have staged the next layer
        assert isinstance(second, MigrationError)
        assert "Other ranks may have installed layer 0" in str(second)
        assert [ranks.migrators[rank].layout for rank in (0, 1)] == [OLD.replace(NEW, [0]), OLD]
        with pytest.raises(MigrationError, match="call `rejoin` first"):
            ranks.migrators[1].pause()  # would drop what is staged
        assert ranks.rejoin() == [OLD.replace(NEW, [0])] * 2
        ranks.look()
        assert ranks.stop() == [True, True]


@pytest.mark.parametrize("on_install", [None, raises])
def test_a_rank_that_missed_the_last_agreement_catches_up_when_they_rejoin(on_install: Any) -> None:
    """One has installed a layer, the other has it staged: `poll` says so, and `rejoin` installs it there too.

    What its `on_install` raises is heard and holds nobody up.
    """
    with fleet(OLD, clean=False) as ranks:
        watched = one_sided(ranks)
        ranks.until_staged()
        watched.after = fails
        assert ranks.migrators[0].poll() == (0,)
        assert ranks.migrators[0].layout == OLD.replace(NEW, [0])
        with pytest.raises(MigrationError, match=r"died\. Other ranks may have installed layer 0, .*call `rejoin`"):
            ranks.migrators[1].poll()
        assert ranks.migrators[1].layout == OLD
        assert ranks.migrators[1].poll() == ()
        ranks.migrators[1]._on_install = on_install
        first, second = ranks.rejoin()
        assert first == ranks.migrators[1].layout == OLD.replace(NEW, [0])
        assert second == first if on_install is None else isinstance(second, ZeroDivisionError)
        ranks.migrators[1]._on_install = None
        ranks.look()
        ranks.move(NEW)
        assert ranks.first.layout == NEW
        assert ranks.stop() == [True, True]


def test_a_migration_is_not_announced_while_the_one_before_is_being_settled() -> None:
    """F3: on a GPU its last install may not have run, and a peer would read slots that are being written."""
    gate = threading.Event()

    class Slow(Keeper):
        def commit(self, layers: list[int], rows: Any) -> Answer:
            gate.wait(LONG)
            return super().commit(layers, rows)

    with fleet(OLD, records={0: Keeper(OLD), 1: Slow(OLD)}) as ranks:
        ranks.start(NEW)
        ranks.passes(lambda: len(ranks.installed) == 1)
        ranks.migrators[0]._run.fail(Trouble("read", "on purpose"))  # type: ignore[union-attr]
        ranks.until_idle()
        ranks.start(OLD)
        for _ in range(20):
            ranks.one_pass()
            ranks.passes_pause()
        assert ranks.first.status.phase == "planning"
        gate.set()
        ranks.until_idle()
        assert ranks.reached(OLD)


@pytest.mark.parametrize("late", [False, True])
def test_a_record_that_failed_after_the_end_of_its_migration_turns_moves_off(late: bool) -> None:
    """R28: the pause ended the migration before the commit was refused. A rank that starts the next late hears it."""
    with fleet(OLD, records={0: Keeper(OLD), 1: Keeper(OLD, digest="0123456789abcdef")}) as ranks:
        ranks.start(NEW)
        ranks.until_staged()
        gate = ranks.migrators[1]._changed
        with gate:  # the worker sees the install after the end alone
            assert ranks.poll() == [(0,), (0,)]
            ranks.migrators[1]._end(ranks.migrators[1]._run, "paused", "", None)  # type: ignore[arg-type]
        ranks.pause()
        ranks.resume()
        assert ranks.migrators[1].start(OLD)
        assert late or ranks.migrators[0].start(OLD)
        polled: list[Any] = []
        ranks.wait(lambda: ranks.migrators[1].idle, lambda: polled.extend(ranks.poll()))
        assert not any(polled)
        ranks.look()
        assert (ranks.first.status.cause, ranks.first.status.rank) == ("record", 1)
        assert [migrator.start(OLD) for migrator in ranks.migrators.values()] == [False, False]
        assert ranks.first.layout == OLD.replace(NEW, [0])


def test_ranks_in_different_layouts_are_named() -> None:
    with fleet(OLD, clean=False) as ranks:
        ranks.migrators[1]._layout = NEW
        for error in ranks.pause():
            assert isinstance(error, MigrationError)
            assert f"rank 0: {OLD.digest[:12]}, rank 1: {NEW.digest[:12]}" in str(error)
        assert ranks.stop() == [True, True]


def test_memory_does_not_grow_with_migrations() -> None:
    """E16: nothing of a migration is kept but the live layout."""
    with fleet(OLD, LocalCopy, staging=SLOT) as ranks:
        gone = []
        for target in (NEW, OLD, NEW):
            ranks.start(target)
            gone.append(weakref.ref(ranks.first._run))
            ranks.until_idle()
        ranks.first._mover.wait_quiet(LONG)
        gc.collect()
        assert [ref() for ref in gone] == [None] * 3
