"""Moving experts while the engine serves: layers change one by one, on all ranks in the same pass."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from eplb_core._arrays import ArrayLike, check_flag, check_real
from eplb_core.errors import AgreementError, EplbError, MigrationError
from eplb_core.layout import ExpertLayout
from eplb_core.loading.agreement import Agreement
from eplb_core.loading.install.installer import Installer, Staging
from eplb_core.loading.moves import words as _words
from eplb_core.loading.moves.joining import check_frame
from eplb_core.loading.moves.passes import Passes, log
from eplb_core.loading.moves.progress import MigratorStatus as MigratorStatus
from eplb_core.loading.moves.pull import POLL_S, Backup, Puller, finish_writes
from eplb_core.loading.moves.recorder import MoveRecord, Recorder
from eplb_core.loading.moves.run import RunWorker
from eplb_core.loading.moves.stage import to_reference
from eplb_core.loading.moves.warm import warm_moves
from eplb_core.loading.store import ExpertStore
from eplb_core.loading.tables import Tables, check_tables
from eplb_core.loading.transport import Transport


class Migrator(Passes):
    """Brings the weights of all ranks to new layouts while they serve; the one owner of the live layout.

    A worker thread computes targets and plans, another reads peers' slots into staging. `poll`, once a pass on every
    rank, installs a layer in the pass in which all ranks know that all have it: weights, tables and `layout` change
    together, on all ranks in the same pass. Nobody installs a layer before every rank has read what it needs of it, so
    no read sees a slot that was written over; and no layer is read again before every rank has installed it.

    A rank that fails, stalls or disagrees ends the migration on every rank in the same pass: layers installed stay new,
    the others old. `status` says why. A later `start` tries again. docs/moving.md has the whole.

    Args:
        stores: One a layer, of this rank.
        layout: What they hold, the same on every rank.
        rank: This rank.
        transport: How to read other ranks' memory; outlives the Migrator.
        agreement: Of all ranks, or of those that live: others are not read from.
        tables: Dispatch tables to keep in step, or None. From now on the Migrator alone installs them.
        record: Keeper of the layout to tell of every step, or None.
        staging: Memory for incoming slots: bytes, or uint8 `[bytes]` on the stores' device. With less than any rank
            reads for a layer, the layer is moved in parts, and `layout` passes through rows that are neither old nor
            new; one slot is always enough. Default: S slots.
        on_install: Called after each install as `on_install(layer, layout)`, on the thread of the passes: for an
            engine's own copies of what depends on slots.
        backup: Where experts come from that no live rank holds.
        reference: `by_expert` of `verify_weights`: what arrives is printed and compared before it counts as staged, so
            that a transport that tears ends a migration instead of an expert.
        deadline: Seconds without progress after which a migration is given up.

    Raises:
        MigrationError: Ranks do not fit each other, on every rank.
        ValueError: Stores, layout or rank do not fit each other.

    Cost:
        The constructor allocates staging, registers all memory, exchanges addresses, starts the threads and compiles.
        `poll`: microseconds when idle; see `python -m benchmarks.moving`.

    Threads:
        All methods on the thread of the passes; `progress` and `status` on any.
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
        seconds = check_real(deadline, "deadline", above=0.0, at_most=1e9)
        stores = check_frame(stores, layout, rank)
        check_tables(tables, layout)
        prints = to_reference(reference, layout, len(stores[0].names))
        warm_moves()
        space = Staging(staging, stores)
        installer, recorder = Installer(stores, space), Recorder(record)
        puller = Puller(stores, layout, rank, transport, agreement, space, {})
        work = RunWorker(puller, installer, recorder, backup, tables, prints, seconds)
        recorded = [flag == b"1" for flag in agreement.gather(b"1" if record is not None else b"0")]
        super().__init__(rank, layout, agreement, work, installer, recorder, tables, on_install, seconds)
        if any(recorded) and not all(recorded):
            self._turn_off(f"{sum(recorded)} of {len(recorded)} ranks keep a record of the layout: all or none must")

    # ---- interruptions ---------------------------------------------------------------------------------------------

    def pause(self, *, finish: bool = False) -> ExpertLayout:
        """Stop touching weights; every rank calls it in the same pass. Blocks.

        Afterwards no rank reads or writes expert slots: weights may be reloaded, memory may sleep, graphs may be
        captured. What is staged is dropped, and a migration that runs ends with the cause `paused`.

        Args:
            finish: Let a migration that runs come to its end first.

        Returns:
            The live layout, the same on every rank.

        Raises:
            AgreementError: A rank did not come.
            MigrationError: A read or a record did not end in time, or ranks are not in one layout: on every rank. Or
                the agreement has failed: `rejoin` first.
            Exception: What `on_install` or the tables raised on the way to the end, when all else is done: paused.
        """
        if self._lost:  # what is staged may be all that brings this rank to the others' layout
            raise MigrationError(f"{self._lost}; call `rejoin` first", layout=self._layout, reason="agreement")
        raised = self._finish() if check_flag(finish, "finish") else None
        if self._run is not None:
            self._end(self._run, "paused", "the engine paused it", None)
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
        """After `pause`: migrations may start again. Every rank calls it in the same pass.

        Args:
            reference: As in the constructor, where weights were changed in the pause. Default: as before.
            backup: Of the weights as they are now. Default: as before, which after a change of weights is wrong: where
                there is no new one, give a backup that has nothing (whose `fetch` raises KeyError).

        Raises:
            ValueError: `reference` has another shape; the Migrator stays paused.
        """
        if reference is not None:
            reference = to_reference(reference, self._layout, len(self._installer.stores[0].names))
        self._work.renew(reference, backup)
        finish_writes(self._device)
        self._paused = False

    def stop(self, deadline: float) -> bool:
        """Pause if need be and end the threads; every rank calls it. The transport stays open.

        Args:
            deadline: Seconds for the threads to end. The pause has the agreement's own.

        Returns:
            False if a thread still runs (a target function that does not end) or a read that was given up on may still
            write to staging, which then stays allocated: leave the process without freeing it.
        """
        seconds = check_real(deadline, "deadline", at_least=0.0, at_most=1e9)
        if not (self._stopped or self._paused or self._lost):
            try:
                self.pause()
            except EplbError as error:
                log.warning("stopping without the other ranks: %s", error)
        if self._run is not None:
            self._end(self._run, "paused", "the engine stopped it", None)
        until = time.monotonic() + seconds
        self._stopped = True
        ended = [worker.close(until - time.monotonic()) for worker in (self._planner, self._mover)]
        clean = ended[1] and self._work.puller.drain(until)
        return all(ended) and clean

    def rejoin(self, agreement: Agreement) -> ExpertLayout:
        """After the agreement has failed: go on with the ranks that live. Each of them calls it. Blocks.

        If some have installed a layer in the pass in which the agreement failed, the others, who have it staged, do so
        now; then all have the same layout. Ranks that are no members are not read from any more.

        Args:
            agreement: Of the ranks that live; not used before.

        Returns:
            The live layout, the same on every rank.

        Raises:
            AgreementError: A rank did not come.
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
            self._end(run, "agreement", self._lost or "ranks joined anew", None)
        self._number = most[0]
        self._word[0] = _words.word(self._number, _words.DONE, 0)
        members = {rank for rank, _, _ in told}
        self._work.puller.avoid_ranks = tuple(
            rank for rank in range(self._layout.topology.num_ranks) if rank not in members
        )
        self._mover.wait_quiet(self._deadline)
        self._check_digests([blob.decode() for blob in agreement.gather(self._layout.digest.encode())])
        self._agreement, self._lost = agreement, ""
        if raised is not None:  # of `on_install` or of the tables, as `poll` raises it
            raise raised
        return self._layout
