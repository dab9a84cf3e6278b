"""What a pass does with words that are late, told twice or nobody's, and with parts that fail between two passes."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
import torch

from eplb_core import ExpertLayout, Topology
from eplb_core.errors import AgreementError, MigrationError
from eplb_core.loading.moves import progress as _words
from eplb_core.loading.moves.migrator import Migrator
from eplb_core.loading.moves.steps import plan_steps
from eplb_core.loading.transports import DeferredCopy
from tests.loading.fleets import LONG, Fleet, Shelf, Watched, breaks, fleet

OLD = ExpertLayout([[0, 1, 2, 3]] * 2, 4, topology=Topology(2))
NEW = ExpertLayout([[2, 1, 0, 3]] * 2, 4, topology=Topology(2))
ALONE = ExpertLayout([[0, 1, 1]] * 2, 2, topology=Topology(1))
TURNED = ExpertLayout([[1, 0, 0]] * 2, 2, topology=Topology(1))

WITH_1 = ExpertLayout([[0, 1, -1, -1, 2, 3, -1, -1]] * 2, 4, topology=Topology(2))
WITHOUT_1 = ExpertLayout([[0, 1, 2, 3, -1, -1, -1, -1]] * 2, 4, topology=Topology(2))


def until_it_says(migrator: Migrator, phase: int, value: int | None = None) -> int:
    """The word of this rank, once its workers have come so far."""
    end = time.monotonic() + LONG
    while True:
        word = migration, said, told = _words.decode_word(migrator.progress)
        if (migration, said) == (1, phase) and value in (None, told):
            return migrator.progress
        assert time.monotonic() < end, word
        threading.Event().wait(0.0005)


def test_a_minimum_that_is_told_twice_does_nothing_twice() -> None:
    """An engine with a collective of its own may hand over the last one again."""
    with fleet(ALONE) as ranks:
        migrator = ranks.first
        ranks.start(TURNED)
        target = until_it_says(migrator, _words.TARGET, int(TURNED.digest[:8], 16))
        for _ in range(2):
            assert migrator.install(target) == ()
        check = until_it_says(migrator, _words.CHECK)
        for _ in range(2):
            assert migrator.install(check) == ()
        staged = until_it_says(migrator, _words.MOVING, 1)
        assert migrator.install(staged) == (0,)
        assert migrator.install(staged) == ()
        ranks.look()
        assert migrator.install(until_it_says(migrator, _words.MOVING, 3)) == (1,)
        assert migrator.install(until_it_says(migrator, _words.MOVING, 4)) == ()
        assert migrator.idle
        assert migrator.layout == TURNED


def test_the_failure_of_a_migration_before_ends_no_other_one() -> None:
    with fleet(OLD) as ranks:
        ranks.move(None)
        ranks.start(NEW)
        assert ranks.first.install(_words.failure(1, "read", 1)) == ()
        assert not ranks.first.idle
        ranks.until_idle()
        assert ranks.first.layout == NEW


def test_an_install_of_what_is_not_staged_here_is_refused() -> None:
    """Two Migrators with one agreement hear each other's words."""
    stuck = DeferredCopy()
    with fleet(OLD, transports={0: stuck}) as ranks:
        ranks.start(NEW)
        ranks.passes(lambda: stuck.waiting > 0)
        with pytest.raises(MigrationError, match="not staged here; give each Migrator its own"):
            ranks.first.install(_words.word(1, _words.MOVING, 1))
        assert ranks.first.layout == OLD
        stuck.complete()
        ranks.until_idle(stuck.complete)
        assert ranks.first.layout == NEW


@pytest.mark.parametrize("fails", ["post", "take"])
def test_an_agreement_that_fails_while_nothing_moves_costs_no_layout(fails: str) -> None:
    def deaf(call: str) -> None:
        if call == fails:
            raise AgreementError("rank 1 died")

    with fleet(ALONE, agree=Watched, clean=False) as ranks:
        ranks.one_pass()
        ranks.agreements[0].before = deaf
        assert ranks.first.poll() == ()
        assert (ranks.first.status.phase, ranks.first.status.reason) == ("lost", "rank 1 died")
        assert ranks.first.layout == ALONE
        assert ranks.first.poll() == ()


def test_an_expert_that_nobody_has_ends_the_migration_where_there_is_no_backup() -> None:
    with fleet(WITH_1, ranks=[0]) as ranks:
        ranks.move(WITH_1.replace(WITHOUT_1, [1]))
        status = ranks.first.status
        assert status.cause == "backup"
        assert status.reason == "no live rank holds expert 2 of layer 1, and there is no backup"
        assert ranks.first.layout == WITH_1


def test_a_transport_that_raises_when_it_is_asked_what_it_exports_ends_the_migration() -> None:
    with fleet(OLD) as ranks:
        breaks(ranks.transports[1], "export", RuntimeError("the engine is gone"))
        ranks.move(NEW)
        assert (ranks.first.status.cause, ranks.first.status.rank) == ("read", 1)
        assert ranks.migrators[1].status.reason == "RuntimeError: the engine is gone"
        assert ranks.first.layout == OLD


def test_reads_of_which_nothing_can_be_learnt_do_not_hold_up_the_worker() -> None:
    with fleet(OLD) as ranks:
        puller = ranks.first._stager.puller
        pull = puller.begin(next(iter(plan_steps(OLD, NEW, rank=0, capacity=2))), LONG)
        breaks(ranks.transports[0], "poll", RuntimeError("no such handle"), times=2)
        assert not puller.needs_polls(pull)
        with pytest.raises(RuntimeError, match="no such handle"):
            puller.is_done(pull)
        puller.give_up(pull)


class Stuck(Shelf):
    """A backup that does not answer before it may."""

    def __init__(self) -> None:
        self.asked, self.may = threading.Event(), threading.Event()

    def fetch(self, layer: int, expert: int, rows: Sequence[torch.Tensor]) -> None:
        self.asked.set()
        self.may.wait(LONG)
        super().fetch(layer, expert, rows)


def test_a_backup_that_does_not_come_back_is_not_waited_for_when_the_engine_stops(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backup = Stuck()
    ranks = Fleet(WITH_1, ranks=[0], backup=backup)
    ranks.start(WITHOUT_1)
    ranks.passes(backup.asked.is_set)
    ranks.first._deadline = 0.01
    assert not ranks.first.stop(0.0)
    assert "stopping without the other ranks: rank 0 did not end its reads within 0.01 s" in caplog.text
    backup.may.set()
    assert ranks.first.stop(LONG)
    ranks.check(WITH_1)
