"""The passes of a Migrator: what each rank does with the word that all agreed on in the pass before."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import numpy as np
import torch

from eplb_core._arrays import ArrayLike, check_int, check_kind
from eplb_core.errors import AgreementError, MigrationError
from eplb_core.layout import ExpertLayout
from eplb_core.loading.agreement import Agreement
from eplb_core.loading.install.installer import Installer
from eplb_core.loading.moves import words
from eplb_core.loading.moves.progress import Ending, MigratorStatus
from eplb_core.loading.moves.pull import Trouble
from eplb_core.loading.moves.recorder import Recorder
from eplb_core.loading.moves.run import Run, RunWorker, Target
from eplb_core.loading.moves.workers import Worker
from eplb_core.loading.tables import Tables

log = logging.getLogger("eplb_core")

FOR_GOOD = ("refused", "record")
"""Causes after which there are no more moves."""


class Passes:
    """The part of `Migrator` that runs between two passes, and what it says of itself; the other part interrupts it.

    Args:
        rank: This rank.
        layout: The live one.
        agreement: Of the ranks that take part.
        work: What the workers do.
        installer: Carries out installs.
        recorder: Tells the record.
        tables: To keep in step, or None.
        on_install: Called after each install.
        deadline: Seconds without progress after which a migration is given up.
    """

    def __init__(
        self,
        rank: int,
        layout: ExpertLayout,
        agreement: Agreement,
        work: RunWorker,
        installer: Installer,
        recorder: Recorder,
        tables: Tables | None,
        on_install: Callable[[int, ExpertLayout], object] | None,
        deadline: float,
    ) -> None:
        self.rank = rank
        self._layout, self._agreement, self._tables, self._on_install = layout, agreement, tables, on_install
        self._work, self._installer, self._recorder, self._deadline = work, installer, recorder, deadline
        self._device = installer.stores[0].device
        self._changed = threading.Condition()
        self._run: Run | None = None
        self._number = 0
        self._word = np.array([words.word(0, words.DONE, 0)], dtype=np.int64)
        self._posted = 0
        self._paused = self._stopped = False
        self._lost = ""
        self._off = ""
        self._last = Ending("", "", None, 0, 0)
        self._install_s = self._worst_install_s = 0.0
        self._planner = Worker(f"eplb-plan-{rank}", self._device)
        self._mover = Worker(f"eplb-move-{rank}", self._device)

    # ---- state -----------------------------------------------------------------------------------------------------

    @property
    def layout(self) -> ExpertLayout:
        """The live layout: what the weights are in and the tables dispatch by."""
        return self._layout

    @property
    def progress(self) -> int:
        """This rank's word for the agreement, an int64; at `progress_address` for readers without the interpreter."""
        return int(self._word[0])

    @property
    def progress_address(self) -> int:
        """Where `progress` is in memory, for life."""
        return int(self._word.ctypes.data)

    @property
    def idle(self) -> bool:
        """No migration runs and one may start; changes in the same pass on every rank."""
        return self._run is None and not (self._paused or self._lost or self._stopped)

    @property
    def status(self) -> MigratorStatus:
        """What the Migrator is at."""
        run, last, work = self._run, self._last, self._work
        installed, steps = (run.installed, run.known_steps) if run else (last.installed, last.steps)
        if self._stopped or self._lost or self._paused:
            phase = "stopped" if self._stopped else "lost" if self._lost else "paused"
        else:
            phase = "idle" if run is None else "moving" if run.phase == words.MOVING else "planning"
        return MigratorStatus(
            phase=phase,
            migration=self._number,
            installed=installed,
            steps=steps,
            cause="agreement" if self._lost else last.cause,
            reason=self._lost or last.reason,
            rank=last.rank,
            off=self._off,
            read_bytes=work.read_bytes,
            read_s=work.read_s,
            install_s=self._install_s,
            worst_install_s=self._worst_install_s,
            quarantined=work.num_quarantined,
        )

    # ---- moving ----------------------------------------------------------------------------------------------------

    def start(self, target: Target, *, shares: ArrayLike | None = None, senders: ArrayLike | None = None) -> bool:
        """Begin a migration; every rank calls it in the same pass, when `idle`.

        Args:
            target: A layout, or a function of the live layout that returns one; or one and shares; or one, shares and
                senders; or None for no move. It runs on a worker thread and must give the same on every rank.
            shares: Fractions `[L, P]` for the tables, installed with each layer. Default: equal ones.
            senders: Rank to read each slot's expert from, as in `plan_pull`: `Placement.senders`. Default: any.

        Returns:
            False if there are no more moves: see `status.off`.

        Raises:
            MigrationError: Another one runs, or the Migrator is paused, stopped or has lost its agreement.
            ValueError: The target has another shape.
        """
        if self._run is not None or not self.idle:
            phase = self.status.phase
            before = {"paused": "`resume` it first", "lost": "`rejoin` first", "stopped": "make a new one"}
            raise MigrationError(
                f"a migration cannot start while the Migrator is {phase}; {before.get(phase, 'ask `idle` first')}",
                layout=self._layout,
                reason=phase,
            )
        if not callable(target) and target is not None:
            goal = target[0] if isinstance(target, tuple) and target else target
            check_kind(goal, "target", ExpertLayout)
            self._layout.check_same_frame(goal)
        if self._off:
            return False
        self._number += 1
        run = Run(self._number, self.rank, self._layout, self._word, self._changed)
        self._last = Ending("", "", None, 0, 0)
        self._run = run
        self._planner.submit(lambda: self._plan(run, target, shares, senders))
        return True

    def _plan(self, run: Run, target: Target, shares: ArrayLike | None, senders: ArrayLike | None) -> None:
        if self._work.plan(run, target, shares, senders):
            self._mover.submit(lambda: self._work.announce(run))

    def poll(self) -> tuple[int, ...]:
        """Once a pass, on every rank, at the same place in the loop: `install(agreement.take())`, then post `progress`.

        Returns:
            Rows of the layout that were installed now: none or one.

        Raises:
            MigrationError: The agreement failed while other ranks may have installed a layer that this one has only
                staged: do not run a pass with it, `rejoin` first. If the agreement fails at another time, `poll`
                returns and `status.phase` is `lost`.
        """
        if self._lost or self._stopped:
            return ()
        try:
            agreed = self._agreement.take()
        except AgreementError as error:
            self._lose(error)
            return ()
        try:
            return self.install(agreed)
        finally:  # also if `on_install` raised: this rank would be a pass behind the others ever after
            self._post()

    def _post(self) -> None:
        self._posted = int(self._word[0])
        try:
            self._agreement.post(self._posted)
        except AgreementError as error:
            self._lose(error)

    def install(self, agreed: int | None) -> tuple[int, ...]:
        """What a pass does with the minimum of all ranks' `progress` of the pass before.

        For an engine with a collective of its own; otherwise `poll` calls it. Runs on the current stream, waits for
        nothing.

        Args:
            agreed: The minimum; None if there is none yet.

        Returns:
            Rows of the layout that were installed now.
        """
        run = self._run
        if agreed is None:
            return ()
        if check_int(agreed, "agreed", -(2**63)) < 0:
            self._hear_failure(words.failure_of(agreed))
            return ()
        if run is None:
            return ()
        migration, phase, value = words.take_apart(agreed)
        rows: tuple[int, ...] = ()
        if migration == run.number:
            if (phase, value) != run.last_heard:
                run.last_heard, run.since = (phase, value), time.monotonic()
            if phase == words.MOVING:
                rows = self._advance(run, value)
            elif phase == words.CHECK:
                self._compare(run, value)
            elif phase == words.TARGET and run.phase == words.TARGET:
                with self._changed:
                    run.lowest, run.phase = value, words.CHECK
                    run.publish(words.CHECK, words.BITS - run.bits)
        if run.trouble is None and not run.ended and time.monotonic() - run.since > self._deadline:
            run.fail(Trouble("deadline", f"no progress of all ranks for {self._deadline:g} s"))
        return rows

    def _compare(self, run: Run, value: int) -> None:
        """All targets are known: equal if the smallest is the largest."""
        if run.phase != words.CHECK:
            return
        if run.lowest + value != words.BITS:
            self._end(run, "disagree", "ranks computed different targets; their inputs must be equal", None)
        elif not run.steps:
            self._end(run, "", "", None)
        else:
            with self._changed:
                run.phase = words.MOVING
                run.publish(words.MOVING, 0)
                self._changed.notify_all()
            self._mover.submit(lambda: self._work.move(run))

    def _advance(self, run: Run, value: int) -> tuple[int, ...]:
        """Install the step that all ranks have staged; end after the last."""
        rows: tuple[int, ...] = ()
        if run.installed < len(run.steps) and value >= 2 * run.installed + 1:
            rows = (self._install_step(run),)
        with self._changed:
            run.value = value
            self._changed.notify_all()
        if value >= 2 * len(run.steps):
            self._end(run, "", "", None)
        return rows

    def _install_step(self, run: Run) -> int:
        start = time.perf_counter()
        step, copies = run.steps[run.installed], run.copies
        if copies is None or run.staged <= run.installed:
            raise MigrationError("ranks agreed on a layer that is not staged here; use one agreement a Migrator")
        self._installer.run(step.layer, copies)
        try:
            if self._tables is not None:
                self._tables.install(step.after, layers=[step.layer], shares=run.shares if step.last else None)
        except Exception as error:
            run.fail(Trouble("failed", f"layer {step.layer}: the tables were not installed: {error}"))
            raise
        finally:  # whatever the tables did: the weights are new, and to install them again would spoil them
            if self._device.type == "cuda":
                run.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                run.event.record(torch.cuda.current_stream(self._device))
                self._work.last_install = run.event
            self._layout = step.after
            with self._changed:
                run.installed += 1
                self._changed.notify_all()
        took = time.perf_counter() - start
        self._install_s += took
        self._worst_install_s = max(self._worst_install_s, took)
        if self._on_install is not None:
            self._on_install(step.layer, step.after)
        return step.layer

    def _hear_failure(self, failure: words.Failure) -> None:
        run = self._run
        if run is None:
            if failure.migration > self._number:
                # A migration that this rank was never in: none of that number can start here any more.
                self._number = failure.migration
                self._last = Ending(failure.cause, f"rank {failure.rank} gave up: {failure.cause}", failure.rank, 0, 0)
            self._word[0] = words.word(self._number, words.DONE, 0)
            if failure.cause in FOR_GOOD and not self._off:
                self._turn_off(f"rank {failure.rank} gave up: {failure.cause}")
        elif failure.migration in (0, run.number):
            own = run.trouble is not None and failure.rank == self.rank
            reason = run.trouble.reason if run.trouble and own else f"rank {failure.rank} gave up: {failure.cause}"
            self._end(run, failure.cause, reason, failure.rank)

    def _end(self, run: Run, cause: str, reason: str, rank: int | None) -> None:
        """The migration is over, on every rank in this pass."""
        with self._changed:
            run.end()
            self._word[0] = words.word(self._number, words.DONE, 0)
        self._last = Ending(cause, reason, rank, run.installed, run.known_steps)
        self._run = None
        if cause:
            log.warning(
                "migration %d ended after %d of %d steps: %s", run.number, run.installed, run.known_steps, reason
            )
        if cause in FOR_GOOD:
            self._turn_off(reason)

    def _turn_off(self, reason: str) -> None:
        self._off = reason
        self._recorder.off(reason)
        log.warning("experts will not be moved any more: %s", reason)

    def _lose(self, error: AgreementError) -> None:
        """The agreement has failed: end here, unless others may have installed a step that this rank has staged."""
        self._lost = str(error)
        run = self._run
        log.warning("moves are off until ranks rejoin: %s", error)
        if run is None:
            return
        if self._posted >= 0 and self._posted == words.word(run.number, words.MOVING, 2 * run.installed + 1):
            raise MigrationError(
                f"{error}. Other ranks may have installed layer {run.steps[run.installed].layer}, which this one has "
                "staged; call `rejoin` with an agreement of the ranks that live before the next pass",
                layout=self._layout,
                reason="agreement",
            ) from error
        self._end(run, "agreement", str(error), None)
