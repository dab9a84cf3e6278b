"""Moving experts while the engine serves: layers change one by one, on all ranks in the same pass."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from threading import Condition
from typing import Literal

import numpy as np
import torch

from eplb_core._arrays import ArrayLike, check_flag, check_int, check_real
from eplb_core.errors import AgreementError, EplbError, MigrationError
from eplb_core.exposition import Sample, watch
from eplb_core.layout import ExpertLayout
from eplb_core.loading.agreement import Agreement
from eplb_core.loading.install.installer import Installer
from eplb_core.loading.install.staging import Staging
from eplb_core.loading.moves import progress as words
from eplb_core.loading.moves.joining import check_frame
from eplb_core.loading.moves.progress import Cause, Ending, MigratorStatus, Phase, Trouble
from eplb_core.loading.moves.pull import POLL_S, Puller, finish_writes
from eplb_core.loading.moves.recorder import MoveRecord, Recorder
from eplb_core.loading.moves.run import MoveTarget, Run, RunWorker, to_target
from eplb_core.loading.moves.stage import Backup, Stager, to_reference
from eplb_core.loading.moves.warm import warm_moves
from eplb_core.loading.moves.workers import Worker
from eplb_core.loading.store import ExpertStore
from eplb_core.loading.tables import Tables, check_tables
from eplb_core.loading.transport import Transport

_log = logging.getLogger("eplb_core")

_FOR_GOOD = ("refused", "record")
"""Causes after which there are no more moves."""


class Migrator:
    """Moves the weights of all ranks to new layouts while they serve; the one owner of the live layout.

    One worker thread computes targets and plans, another reads peers' slots into staging. `poll`, once per pass on
    every rank, installs a layer in the pass in which all ranks know that all have staged it: weights, tables and
    `layout` change together, on all ranks in the same pass. No rank installs a layer before every rank has read what it
    needs of it, so no read sees a slot that was overwritten; and no layer is read again before every rank has installed
    it.

    A rank that fails, stalls or disagrees ends the migration on every rank in the same pass: installed layers stay new,
    the others old. `status` says why. A later `start` tries again. docs/moving.md describes the protocol.

    Args:
        stores: One per layer, of this rank.
        layout: Layout that the weights are in, the same on every rank.
        rank: This rank.
        transport: Reads other ranks' memory; outlives the Migrator.
        agreement: Of all ranks, or of the live ones: other ranks are not read from.
        tables: Dispatch tables to install with each layer, or None. From now on only the Migrator installs them.
        record: Keeper of the layout to tell of every step, or None.
        staging: Memory for incoming slots: bytes, or uint8 `[bytes]` on the stores' device. If it holds less than some
            rank reads for a layer, that layer is moved in parts, and `layout` passes through rows that are neither old
            nor new; one slot is always enough. Default: S slots.
        on_install: Called after each install as `on_install(layer, layout)`, on the forward thread, for an
            engine's own data that depends on slots.
        backup: Where experts come from that no live rank holds.
        reference: `by_expert` of `verify_weights`: the fingerprint of what arrives is compared with it before it counts
            as staged, so that a faulty transport ends a migration and spoils no expert.
        deadline: Seconds without progress after which a migration is given up.

    Raises:
        MigrationError: Ranks do not fit each other, on every rank.
        ValueError: Stores, layout or rank do not fit each other.

    Cost:
        The constructor allocates staging, registers all memory, exchanges addresses, starts the threads and compiles.
        `poll`: microseconds when idle; see `python -m benchmarks.moving`.

    Threads:
        All methods on the forward thread; `progress` and `status` on any.
    """

    def __init__(
        self,
        stores: Sequence[ExpertStore],
        layout: ExpertLayout,
        *,
        rank: int,
        transport: Transport,
        agreement: Agreement,
        tables: Tables | None = None,
        record: MoveRecord | None = None,
        staging: int | torch.Tensor | None = None,
        on_install: Callable[[int, ExpertLayout], object] | None = None,
        backup: Backup | None = None,
        reference: ArrayLike | None = None,
        deadline: float = 60.0,
    ) -> None:
        self._deadline = check_real(deadline, "deadline", above=0.0, at_most=1e9)
        stores = check_frame(stores, layout, rank)
        check_tables(tables, layout)
        prints = to_reference(reference, layout, len(stores[0].names))
        warm_moves()
        self.rank = rank
        self._layout, self._agreement, self._tables, self._on_install = layout, agreement, tables, on_install
        self._device = stores[0].device
        space = Staging(staging, stores)
        self._installer, self._recorder = Installer(stores, space), Recorder(record)
        puller = Puller(stores, layout, rank, transport, agreement, space)
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._stager = Stager(puller, self._installer, self._recorder, tables, backup, prints, self._deadline, stream)
        self._work, self._counts = RunWorker(self._stager), self._stager.counts
        recorded = [flag == b"1" for flag in agreement.gather(b"1" if record is not None else b"0")]
        self._changed = Condition()
        self._run: Run | None = None
        self._number = 0
        self._word = np.array([words.word(0, words.DONE, rank)], dtype=np.int64)
        self._posted = 0
        self._paused = self._stopped = False
        self._lost = self._off = ""
        self._last = Ending()
        self._planner = Worker(f"eplb-plan-{rank}", self._device)
        self._mover = Worker(f"eplb-move-{rank}", self._device)
        if any(recorded) and not all(recorded):
            self._turn_off(f"{sum(recorded)} of {len(recorded)} ranks keep a record of the layout: all or none must")
        watch(self, counters=self._counts.counters, gauges=_gauges)

    # ---- state -----------------------------------------------------------------------------------------------------

    @property
    def layout(self) -> ExpertLayout:
        """The live layout: the one that the weights are in and the tables dispatch by."""
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
        """Whether a migration may start; changes in the same pass on every rank."""
        return self._run is None and not (self._paused or self._lost or self._stopped)

    @property
    def status(self) -> MigratorStatus:
        """What the Migrator does and has done."""
        run, last, counts = self._run, self._last, self._counts
        phase: Phase
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
            read_bytes=counts.read_bytes,
            read_s=counts.read_s,
            install_s=counts.install_s,
            worst_install_s=counts.worst_install_s,
            quarantined=self._stager.puller.quarantined,
        )

    # ---- moving ----------------------------------------------------------------------------------------------------

    def start(self, target: MoveTarget | Callable[[ExpertLayout], MoveTarget]) -> bool:
        """Begin a migration; every rank calls it in the same pass, when `idle`.

        Args:
            target: A layout; or a `Target`, which adds shares for the tables and senders for the reads; or None for no
                move; or a function of the live layout that returns one of these. The function runs on a worker thread
                and must return the same on every rank.

        Returns:
            False if there are no more moves: see `status.off`.

        Raises:
            MigrationError: Another migration runs, or the Migrator is paused, stopped or has lost its agreement.
            ValueError: The target has another shape, or shares that are none, or uses slots that a rank does not have
                (of `place(slots_per_rank=)`); of a function, it ends the migration on every rank.
            TypeError: It is nothing of these.
        """
        if not self.idle:
            phase = self.status.phase
            before = {"paused": "`resume` it first", "lost": "`rejoin` first", "stopped": "make a new one"}
            raise MigrationError(
                f"a migration cannot start while the Migrator is {phase}; {before.get(phase, 'ask `idle` first')}",
                layout=self._layout,
                reason=phase,
            )
        if not callable(target) or isinstance(target, type):  # a class would make its own target of the live layout
            target = to_target(target, self._layout)
            self._stager.puller.check_target(target.layout)
        if self._off:
            return False
        self._number += 1
        run = Run(self._number, self.rank, self._layout, self._word, self._changed)
        self._last = Ending()
        self._run = run
        self._planner.submit(lambda: self._plan(run, target))
        return True

    def _plan(self, run: Run, target: MoveTarget | Callable[[ExpertLayout], MoveTarget]) -> None:
        if self._work.plan(run, target):
            self._mover.submit(lambda: self._work.announce(run))

    def poll(self) -> tuple[int, ...]:
        """Install what all ranks have staged; call once per pass on every rank, at the same place in the loop.

        The same as `install(agreement.take())` and then `agreement.post(progress)`.

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
        """Act on the minimum of all ranks' `progress` of the pass before.

        For engines with a collective of their own; otherwise `poll` calls it. Runs on the current stream and waits for
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
            self._hear_failure(words.decode_failure(agreed))
            return ()
        if run is None:
            return ()
        migration, phase, value = words.decode_word(agreed)
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
        run.absent = value if migration < run.number and phase == words.DONE else None
        if run.trouble is None and not run.ended and time.monotonic() - run.since > self._deadline:
            who = "no progress of all ranks" if run.absent is None else f"rank {run.absent} did not call `start`"
            run.fail(Trouble("deadline", f"{who} for {self._deadline:g} s"))
        return rows

    def _compare(self, run: Run, value: int) -> None:
        """All targets are known: equal if the smallest is the largest."""
        if run.phase != words.CHECK:
            return
        if run.lowest + value != words.BITS:
            self._end(run, "disagree", "ranks computed different targets; their inputs must be equal")
        elif not run.steps:
            self._end(run, "", "")
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
            self._end(run, "", "")
        return rows

    def _install_step(self, run: Run) -> int:
        start = time.perf_counter()
        step, copies = run.steps[run.installed], run.copies
        if copies is None or run.staged <= run.installed:
            raise MigrationError(
                "ranks agreed on a layer that is not staged here; give each Migrator its own agreement"
            )
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
        self._counts.installed(time.perf_counter() - start, step.last)
        if self._on_install is not None:
            self._on_install(step.layer, step.after)
        return step.layer

    def _hear_failure(self, failure: words.Failure) -> None:
        run = self._run
        if run is None:
            if failure.migration > self._number:
                # A migration that this rank was never in: none of that number can start here any more.
                self._number = failure.migration
                reason = f"this rank did not call `start`, and rank {failure.rank} gave up: {failure.cause}"
                self._last = Ending(failure.cause, reason, failure.rank, 0, 0)
            self._word[0] = words.word(self._number, words.DONE, self.rank)
            if failure.cause in _FOR_GOOD and not self._off:
                self._turn_off(f"rank {failure.rank} gave up: {failure.cause}")
        elif failure.migration in (0, run.number):
            own = run.trouble is not None and failure.rank == self.rank
            reason = run.trouble.reason if run.trouble and own else f"rank {failure.rank} gave up: {failure.cause}"
            self._end(run, failure.cause, reason, failure.rank)

    def _end(self, run: Run, cause: Cause | Literal[""], reason: str, rank: int | None = None) -> None:
        """The migration is over, on every rank in this pass."""
        with self._changed:
            run.end()
            self._word[0] = words.word(self._number, words.DONE, self.rank)
        self._last = Ending(cause, reason, rank, run.installed, run.known_steps)
        self._counts.ended[cause] += 1
        self._run = None
        if cause:
            _log.warning(
                "migration %d ended after %d of %d steps: %s", run.number, run.installed, run.known_steps, reason
            )
        if cause in _FOR_GOOD:
            self._turn_off(reason)

    def _turn_off(self, reason: str) -> None:
        self._off = reason
        self._recorder.off(reason)
        _log.warning("experts will not be moved any more: %s", reason)

    def _lose(self, error: AgreementError) -> None:
        """The agreement has failed: end here, unless others may have installed a step that this rank has staged."""
        self._lost = str(error)
        run = self._run
        _log.warning("moves are off until ranks rejoin: %s", error)
        if run is None:
            return
        if self._posted >= 0 and self._posted == words.word(run.number, words.MOVING, 2 * run.installed + 1):
            raise MigrationError(
                f"{error}. Other ranks may have installed layer {run.steps[run.installed].layer}, which this one has "
                "staged; call `rejoin` with an agreement of the ranks that live before the next pass",
                layout=self._layout,
                reason="agreement",
            ) from error
        self._end(run, "agreement", str(error))

    # ---- interruptions ---------------------------------------------------------------------------------------------

    def pause(self, *, finish: bool = False) -> ExpertLayout:
        """Stop reading and writing weights; every rank calls it in the same pass. Blocks.

        Afterwards weights may be reloaded, memory may sleep and graphs may be captured. Staged bytes are dropped, and a
        migration that runs ends with the cause `paused`.

        Args:
            finish: Finish a migration that runs first.

        Returns:
            The live layout, the same on every rank.

        Raises:
            AgreementError: A rank did not call it in time.
            MigrationError: A read or a record did not end in time, or ranks are not in one layout: on every rank. Or
                the agreement has failed: `rejoin` first.
            Exception: What `on_install` or the tables raised on the way to the end, when all else is done: paused.
        """
        if self._lost:  # what is staged may be all that brings this rank to the others' layout
            raise MigrationError(f"{self._lost}; call `rejoin` first", layout=self._layout, reason="agreement")
        raised = self._finish() if check_flag(finish, "finish") else None
        if self._run is not None:
            self._end(self._run, "paused", "the engine paused it")
        # Words of before are still on their way, with the number of a migration that is over: nobody heeds them.
        quiet = self._mover.wait_quiet(self._deadline)
        told = [json.loads(blob) for blob in self._agreement.gather(json.dumps([quiet, self._layout.digest]).encode())]
        self._paused = True
        busy = [rank for rank, (is_quiet, _) in enumerate(told) if not is_quiet]
        if busy:
            raise MigrationError(
                f"rank {busy[0]} did not end its reads within {self._deadline:g} s", layout=self._layout
            )
        self._check_digests([digest for _, digest in told])
        if raised is not None:
            raise raised
        return self._layout

    def _check_digests(self, digests: list[str]) -> None:
        if len(set(digests)) > 1:
            listed = ", ".join(f"rank {rank}: {digest[:12]}" for rank, digest in enumerate(digests))
            raise MigrationError(f"ranks are in different layouts ({listed}); reload the weights", layout=self._layout)

    def _finish(self) -> Exception | None:
        """Passes without a forward in between, until the migration is over: on every rank after the same number.

        Returns:
            What an install raised first. The weights were new by then, and the other ranks wait for this one's words.
        """
        raised: Exception | None = None
        while True:
            self._posted = int(self._word[0])
            try:
                words = self._agreement.gather(np.int64(self._posted).tobytes())
            except AgreementError as error:
                self._lose(error)
                raise
            try:
                self.install(min(int(np.frombuffer(word, dtype=np.int64)[0]) for word in words))
            except Exception as error:
                raised = raised or error
            if self._run is None:
                return raised
            time.sleep(POLL_S)

    def resume(self, *, reference: ArrayLike | None = None, backup: Backup | None = None) -> None:
        """Allow migrations again after `pause`; every rank calls it in the same pass.

        Args:
            reference: As in the constructor, where weights were changed in the pause. Default: as before.
            backup: Of the weights as they are now. Default: as before, which after a change of weights is wrong: where
                there is no new one, give a backup that has nothing (whose `fetch` raises KeyError).

        Raises:
            ValueError: `reference` has another shape; the Migrator stays paused.
        """
        if reference is not None:
            names = self._installer.stores[0].names
            self._stager.reference = to_reference(reference, self._layout, len(names))
        if backup is not None:
            self._stager.backup = backup
        finish_writes(self._device)
        self._paused = False

    def stop(self, deadline: float, *, alone: bool = False) -> bool:
        """Pause if need be and end the threads; every rank calls it. The transport stays open.

        Args:
            deadline: Seconds for the threads to end. The pause has the agreement's own.
            alone: Ask no other rank: for a Migrator whose peers were not made.

        Returns:
            False if a thread still runs (a target function that does not end) or an abandoned read may still
            write to staging, which then stays allocated: leave the process without freeing it.
        """
        seconds = check_real(deadline, "deadline", at_least=0.0, at_most=1e9)
        if not (check_flag(alone, "alone") or self._stopped or self._paused or self._lost):
            try:
                self.pause()
            except EplbError as error:
                _log.warning("stopping without the other ranks: %s", error)
        if self._run is not None:
            self._end(self._run, "paused", "the engine stopped it")
        until = time.monotonic() + seconds
        self._stopped = True
        ended = [worker.close(until - time.monotonic()) for worker in (self._planner, self._mover)]
        clean = ended[1] and self._stager.puller.drain(until)
        return all(ended) and clean

    def rejoin(self, agreement: Agreement) -> ExpertLayout:
        """Go on with the live ranks after the agreement has failed; each of them calls it. Blocks.

        If some installed a layer in the pass in which the agreement failed, the others, which have it staged, install
        it now, so that all have the same layout. Ranks that are no members are not read from any more.

        Args:
            agreement: Of the live ranks; not used before.

        Returns:
            The live layout, the same on every rank.

        Raises:
            AgreementError: A rank did not call it in time.
            MigrationError: Ranks cannot be brought to one layout; on every rank.
        """
        run = self._run
        raised: Exception | None = None
        own = [self.rank, self._number, run.installed if run else self._last.installed]
        told = [json.loads(blob) for blob in agreement.gather(json.dumps(own).encode())]
        most = max((number, installed) for _, number, installed in told)
        if run is not None:
            if (run.number, run.installed + 1) == most and run.staged > run.installed:
                try:
                    self._install_step(run)
                except Exception as error:  # after the weights have changed: the other ranks wait for this one
                    raised = error
            self._end(run, "agreement", self._lost or "ranks joined anew")
        self._number = most[0]
        self._word[0] = words.word(self._number, words.DONE, self.rank)
        members = {rank for rank, _, _ in told}
        self._stager.puller.avoid_ranks = tuple(
            rank for rank in range(self._layout.topology.num_ranks) if rank not in members
        )
        self._mover.wait_quiet(self._deadline)
        self._check_digests([blob.decode() for blob in agreement.gather(self._layout.digest.encode())])
        self._agreement, self._lost = agreement, ""
        if raised is not None:  # of `on_install` or of the tables, as `poll` raises it
            raise raised
        return self._layout


def _gauges(migrator: Migrator) -> list[Sample]:
    """For operators; nothing of one that was stopped, which another may have followed."""
    status = migrator.status
    told = [
        Sample("eplb_install_longest_seconds", status.worst_install_s, migrator.rank),
        Sample("eplb_quarantined_slots", status.quarantined, migrator.rank),
    ]
    if status.phase != "stopped":
        told.append(Sample("eplb_migration_running", status.phase in ("planning", "moving"), migrator.rank))
        told.append(Sample("eplb_moves_off", bool(status.off) or status.phase == "lost", migrator.rank))
    return told
