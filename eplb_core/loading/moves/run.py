"""One migration: what its threads share, and what the two workers do for it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from eplb_core._arrays import ArrayLike, FloatArray, IntArray, check_kind
from eplb_core.layout import ExpertLayout
from eplb_core.loading.install.installer import Copies, Installer
from eplb_core.loading.moves import words
from eplb_core.loading.moves.joining import lacks_room_on_the_way
from eplb_core.loading.moves.mover import restore
from eplb_core.loading.moves.pull import POLL_S, Backup, Pull, Puller, Trouble
from eplb_core.loading.moves.recorder import Recorder
from eplb_core.loading.moves.stage import check_staged
from eplb_core.loading.moves.steps import Step, plan_steps
from eplb_core.loading.moves.workers import breathe
from eplb_core.loading.pull_plan import RESTORE
from eplb_core.loading.tables import Tables, lacks_room
from eplb_core.metrics import check_shares

Plan: TypeAlias = (
    "ExpertLayout | tuple[ExpertLayout, ArrayLike | None] "
    "| tuple[ExpertLayout, ArrayLike | None, ArrayLike | None] | None"
)
"""What a migration goes to: a layout, or a layout, shares `[L, P]` and senders `[L, P]`, or None for no move."""
Target: TypeAlias = "Plan | Callable[[ExpertLayout], Plan]"


class Run:
    """One migration, from start to end. Fields change under the lock of `changed`."""

    def __init__(
        self, number: int, rank: int, live: ExpertLayout, word: IntArray, changed: threading.Condition
    ) -> None:
        self.number, self.rank, self.live, self.word, self.changed = number, rank, live, word, changed
        self.steps: list[Step] = []
        self.shares: FloatArray | None = None
        self.bits = 0
        """32 bits of the target's digest."""
        self.phase = words.TARGET
        self.lowest = 0
        """Minimum of all ranks' bits."""
        self.value = 0
        """What all ranks have reached in phase 2."""
        self.copies: Copies | None = None
        """Of the step that is staged."""
        self.staged, self.installed, self.settled = 0, 0, 0
        """Steps that are; settled = the install has run on the device and is recorded."""
        self.event: Any = None
        """CUDA event of the last install."""
        self.trouble: Trouble | None = None
        self.ended = False
        self.last_heard = (-1, -1)
        self.since = time.monotonic()
        """When the agreed word changed last."""

    @property
    def known_steps(self) -> int:
        """Steps as every rank knows them; 0 before all do."""
        return len(self.steps) if self.phase == words.MOVING else 0

    def publish(self, phase: int, value: int) -> None:
        """Make this the rank's word, unless the rank has failed; under the lock."""
        if self.trouble is None and not self.ended:
            self.word[0] = words.word(self.number, phase, value)

    def fail(self, trouble: Trouble) -> None:
        """Make the rank's word say that it failed; any thread."""
        with self.changed:
            if not self.ended and self.trouble is None:
                self.trouble = trouble
                self.word[0] = words.failure(self.number, trouble.cause, self.rank)

    def end(self) -> None:
        """Nothing more happens for it; under the lock."""
        self.ended = True
        self.changed.notify_all()


class RunWorker:
    """What the two worker threads do. Never touches the agreement."""

    def __init__(
        self,
        puller: Puller,
        installer: Installer,
        recorder: Recorder,
        backup: Backup | None,
        tables: Tables | None,
        reference: IntArray | None,
        deadline: float,
    ) -> None:
        self.puller, self._installer, self.recorder, self._backup = puller, installer, recorder, backup
        self._tables, self.reference, self._deadline = tables, reference, deadline
        device = puller.stores[0].device
        on_device = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_device else None  # type: ignore[no-untyped-call]
        self.last_install: Any = None
        """CUDA event of the last install of all migrations."""
        self.read_bytes, self.read_s, self.num_quarantined = 0, 0.0, 0
        self._unrecorded: Trouble | None = None
        """Why the record does not have what the weights are."""

    def renew(self, reference: IntArray | None, backup: Backup | None) -> None:
        """Weights are others now; None: what there was before still holds. While nothing runs."""
        self.reference = self.reference if reference is None else reference
        self._backup = self._backup if backup is None else backup

    # ---- the planning thread ---------------------------------------------------------------------------------------

    def plan(self, run: Run, target: Target, shares: ArrayLike | None, senders: ArrayLike | None) -> bool:
        """Work out the target and the steps; False if that failed."""
        try:
            goal: Plan = target(run.live) if callable(target) else target
            if isinstance(goal, tuple):
                goal, shares, senders = goal if len(goal) == 3 else (*goal, senders)
            goal = run.live if goal is None else check_kind(goal, "target", ExpertLayout)
            run.live.check_same_frame(goal)
            self._check_tables(goal, shares)
            checked = None if shares is None else check_shares(shares, goal)
            steps = []
            for step in plan_steps(
                run.live,
                goal,
                rank=self.puller.rank,
                capacity=self.puller.capacity,
                avoid_ranks=self.puller.avoid_ranks,
                senders=senders,
            ):
                self._check_step(step)
                steps.append(step)
                breathe()
            bits = words.target_bits(goal.digest)
            if self.last_install is not None:  # pragma: no cover  needs a GPU
                # A migration that was given up on may have left one in the stream, and peers will read what it writes.
                self.last_install.synchronize()
        except Trouble as why:
            run.fail(why)
            return False
        except BaseException as error:  # this thread is nobody else's: what ends it would end all later plans
            run.fail(Trouble("plan", f"no target: {type(error).__name__}: {error}"))
            return False
        with run.changed:
            run.steps, run.shares, run.bits = steps, checked, bits
        return True

    def _check_tables(self, goal: ExpertLayout, shares: ArrayLike | None) -> None:
        """Whether the tables can take it."""
        why = lacks_room(self._tables, goal.replica_count)
        if why:
            raise Trouble("plan", why)
        if shares is not None and getattr(self._tables, "mode", "") in ("static", "even"):
            raise Trouble("plan", "`tables` pick one slot an expert and cannot keep shares; use mode 'weighted'")

    def _check_step(self, step: Step) -> None:
        why = lacks_room_on_the_way(self._tables, step)
        if why:
            raise Trouble("plan", why)
        if self._backup is None and (step.kind == RESTORE).any():
            slot = int(np.argmax(step.kind == RESTORE)) + self.puller.rank * len(step.kind)
            expert = step.after.physical_to_logical_map[step.layer, slot]
            raise Trouble("backup", f"no live rank holds expert {expert} of layer {step.layer}, and there is no backup")

    # ---- the reading thread ----------------------------------------------------------------------------------------

    def announce(self, run: Run) -> None:
        """Say that the plan is there; behind the migration before, whose last install may still run on the device."""
        if self._unrecorded is not None:
            run.fail(self._unrecorded)
        try:
            self.puller.check_registered()
        except Trouble as why:
            run.fail(why)
        except BaseException as error:  # a transport's own, such as asyncio's CancelledError
            run.fail(Trouble("read", f"{type(error).__name__}: {error}"))
        with run.changed:
            run.publish(words.TARGET, run.bits)

    @torch.inference_mode()  # staging may have been made in it, and takes no write from outside then
    def move(self, run: Run) -> None:
        """Stage step after step, each when the one before is installed; what it reads may have come before."""
        early: Pull | None = None
        try:
            for index, step in enumerate(run.steps):
                # Peers' slots of this very layer were written by the step before: all ranks must have done so.
                needed = 2 * index if index and run.steps[index - 1].layer == step.layer else 0
                with run.changed:
                    run.changed.wait_for(lambda needed=needed: run.ended or run.value >= needed)  # type: ignore[misc]
                if run.ended:
                    return
                pull, early = early, None
                staged = self._try_to_stage(run, step, pull)
                if staged is None:
                    return
                with run.changed:
                    if not run.ended:
                        run.copies, run.staged = staged.copies, index + 1
                        run.publish(words.MOVING, 2 * index + 1)
                early = self._read_ahead(run, index + 1)
                if not self._see_installed(run, index, staged.pull, early):
                    return
        finally:
            if early is not None:
                self.puller.give_up(early)
            self.num_quarantined = self.puller.num_quarantined()

    def _read_ahead(self, run: Run, index: int) -> Pull | None:
        """Begin the reads of a step while ranks agree on the one before, if that is of another layer."""
        if run.ended or run.trouble or index == len(run.steps) or run.steps[index].layer == run.steps[index - 1].layer:
            return None
        breathe()
        return self.puller.begin_early(run.steps[index])

    def _see_installed(self, run: Run, index: int, pull: Pull, early: Pull | None) -> bool:
        """Wait until a step is installed, and record it; False if the run is over for this thread."""
        step = run.steps[index]
        while True:
            look = POLL_S if early is not None and not self.puller.has_ended(early) else None
            with run.changed:
                if run.changed.wait_for(lambda: run.ended or run.installed > index, look):
                    break
        breathe()
        if run.installed > index and run.event is not None:  # pragma: no cover  needs a GPU
            run.event.synchronize()  # the copies read staging
        self.puller.release(pull)
        if run.installed <= index:
            self.recorder.abort(step)
            return False
        try:
            self.recorder.commit(step)
        except Trouble as why:
            self._unrecorded = why  # the run may be over already
            run.fail(why)
            return False
        with run.changed:
            run.settled = index + 1
            run.publish(words.MOVING, 2 * index + 2)
        return True

    def _try_to_stage(self, run: Run, step: Step, pull: Pull | None) -> _Staged | None:
        """As `_stage`; what goes wrong ends the run."""
        try:
            return self._stage(run, step, pull)
        except Trouble as why:
            run.fail(why)
        except BaseException as error:  # a transport's own, such as asyncio's CancelledError
            run.fail(Trouble("read", f"layer {step.layer}: {type(error).__name__}: {error}"))
        return None

    def _stage(self, run: Run, step: Step, pull: Pull | None) -> _Staged | None:
        """Read and restore a step's slots, and announce it to the record; None if the run ended meanwhile."""
        if pull is None:
            pull = self.puller.begin(step, self._deadline, lambda: run.ended)
        try:
            breathe()
            copies = self._installer.plan(step, pull.place_of)
            breathe()
            if not self.puller.wait(pull, step.layer, self._deadline, lambda: run.ended):
                return None
            self.read_bytes += pull.bytes
            breathe()
            with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                try:
                    restore(self.puller, self._backup, step, pull)
                finally:
                    if self._stream is not None:  # pragma: no cover  needs a GPU
                        self._stream.synchronize()
                check_staged(self.puller, step, pull, self.reference)
            breathe()
            self.recorder.begin(step)
        except BaseException:
            self.puller.give_up(pull)
            raise
        finally:
            self.read_s += pull.took or time.monotonic() - pull.begun
            self.num_quarantined = self.puller.num_quarantined()
        return _Staged(pull, copies)


class _Staged(NamedTuple):
    """A step that is ready to be installed."""

    pull: Pull
    copies: Copies
