"""One migration: what its threads share, and what the two workers do for it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from eplb_core._arrays import ArrayLike, FloatArray, IntArray, check_kind
from eplb_core._text import quoted
from eplb_core.layout import ExpertLayout
from eplb_core.loading.install.installer import Copies
from eplb_core.loading.moves import progress
from eplb_core.loading.moves.progress import Trouble, as_trouble
from eplb_core.loading.moves.pull import POLL_S, RAISED, Pull
from eplb_core.loading.moves.stage import Stager
from eplb_core.loading.moves.steps import Step, plan_steps
from eplb_core.loading.moves.workers import breathe
from eplb_core.loading.tables import lacks_room
from eplb_core.metrics import check_shares


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """What a migration goes to: a layout, with shares for the tables and senders for the reads."""

    layout: ExpertLayout
    """Layout to reach; same frame as the live one."""
    shares: ArrayLike | None = None
    """Fractions `[L, P]` for the tables, installed with each layer. Default: equal ones."""
    senders: ArrayLike | None = None
    """Rank to read each slot's expert from, as in `plan_pull`: `Placement.senders`. Default: any."""

    def __post_init__(self) -> None:
        check_kind(self.layout, "target", ExpertLayout)


MoveTarget: TypeAlias = "ExpertLayout | Target | None"
"""What `Migrator.start` takes, or a function of the live layout that returns it; None: nothing to move."""


def to_target(goal: object, live: ExpertLayout) -> Target:
    """Convert a target; raise TypeError or ValueError if it is none for the live layout."""
    if goal is not None and not isinstance(goal, Target | ExpertLayout):
        what = f"`target` (={quoted(goal, 80)}) must be an ExpertLayout, a Target(layout, shares=..., senders=...)"
        raise TypeError(f"{what}, None, or a function that returns one")
    target = goal if isinstance(goal, Target) else Target(live if goal is None else goal)
    live.check_same_frame(target.layout)
    if target.shares is not None:
        check_shares(target.shares, target.layout)
    return target


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
        self.phase = progress.TARGET
        self.lowest = 0
        """Minimum of all ranks' bits."""
        self.value = 0
        """Minimum of all ranks' values in phase MOVING."""
        self.copies: Copies | None = None
        """Of the step that is staged."""
        self.staged, self.installed = 0, 0
        """Numbers of steps."""
        self.event: Any = None
        """CUDA event of the last install."""
        self.trouble: Trouble | None = None
        self.absent: int | None = None
        """A rank that is not in this migration, when the agreed word was heard last."""
        self.ended = False
        self.last_heard = (-1, -1)
        self.since = time.monotonic()
        """When the agreed word changed last."""

    @property
    def known_steps(self) -> int:
        """Steps as every rank knows them; 0 before all do."""
        return len(self.steps) if self.phase == progress.MOVING else 0

    def publish(self, phase: int, value: int) -> None:
        """Make this the rank's word, unless the rank has failed; under the lock."""
        if self.trouble is None and not self.ended:
            self.word[0] = progress.word(self.number, phase, value)

    def fail(self, trouble: Trouble) -> None:
        """Make the rank's word say that it failed; any thread."""
        with self.changed:
            if not self.ended and self.trouble is None:
                self.trouble = trouble
                self.word[0] = progress.failure(self.number, trouble.cause, self.rank)

    def end(self) -> None:
        """Mark it as over, so that nothing more happens for it; under the lock."""
        self.ended = True
        self.changed.notify_all()


class RunWorker:
    """What the two worker threads do for a migration. Never touches the agreement.

    Args:
        stager: Stages steps; used on the reading thread alone, but for `check`.
    """

    def __init__(self, stager: Stager) -> None:
        self.stager, self.puller = stager, stager.puller
        self.last_install: Any = None
        """CUDA event of the last install of all migrations."""
        self._unrecorded: Trouble | None = None
        """Why the record does not have the layout that the weights are in."""

    # ---- the planning thread ---------------------------------------------------------------------------------------

    def plan(self, run: Run, goal: MoveTarget | Callable[[ExpertLayout], MoveTarget]) -> bool:
        """Compute the target and the steps; return False if that failed."""
        try:
            target = to_target(goal(run.live) if callable(goal) else goal, run.live)
            self.puller.check_target(target.layout)
            self._check_tables(target)
            run.shares = None if target.shares is None else check_shares(target.shares, target.layout)
            for step in plan_steps(
                run.live,
                target.layout,
                rank=self.puller.rank,
                capacity=self.puller.capacity,
                avoid_ranks=self.puller.avoid_ranks,
                senders=target.senders,
            ):
                self.stager.check(step)
                run.steps.append(step)
                breathe()
            run.bits = int(target.layout.digest[:8], 16)
            if self.last_install is not None:  # pragma: no cover  needs a GPU
                # A migration that ended early may have left one in the stream, and peers will read what it writes.
                self.last_install.synchronize()
        except Trouble as why:
            run.fail(why)
            return False
        except BaseException as error:  # this thread is nobody else's: what ends it would end all later plans
            run.fail(Trouble("plan", f"no target: {type(error).__name__}: {error}"))
            return False
        return True

    def _check_tables(self, target: Target) -> None:
        """Raise Trouble if the tables cannot take the target."""
        tables = self.stager.tables
        why = lacks_room(tables, target.layout.replica_count)
        if not why and target.shares is not None and getattr(tables, "mode", "") in ("static", "even"):
            why = "`tables` pick one slot per expert and cannot keep shares; use mode 'weighted'"
        if why:
            raise Trouble("plan", why)

    # ---- the reading thread ----------------------------------------------------------------------------------------

    def announce(self, run: Run) -> None:
        """Publish the target, behind the migration before, whose last install may still run on the device."""
        if self._unrecorded is not None:
            run.fail(self._unrecorded)
        try:
            self.puller.check_registered()
        except BaseException as error:  # a transport's own, such as asyncio's CancelledError
            run.fail(as_trouble(error))
        with run.changed:
            run.publish(progress.TARGET, run.bits)

    @torch.inference_mode()  # staging may have been made in it, and takes no write from outside then
    def move(self, run: Run) -> None:
        """Stage step after step, each when the one before is installed; its reads may have begun before."""
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
                try:
                    staged = self.stager.stage(step, pull, lambda: run.ended)
                except BaseException as error:  # a transport's own, such as asyncio's CancelledError
                    run.fail(as_trouble(error, f"layer {step.layer}: "))
                    return
                if staged is None:
                    return
                with run.changed:
                    if not run.ended:
                        run.copies, run.staged = staged.copies, index + 1
                        run.publish(progress.MOVING, 2 * index + 1)
                early = self._read_ahead(run, index + 1)
                if not self._see_installed(run, index, staged.pull, early):
                    return
        finally:
            if early is not None:
                self.puller.give_up(early)

    def _read_ahead(self, run: Run, index: int) -> Pull | None:
        """Begin the reads of a step while ranks agree on the one before, if that is of another layer."""
        if run.ended or run.trouble or index == len(run.steps) or run.steps[index].layer == run.steps[index - 1].layer:
            return None
        breathe()
        with contextlib.suppress(*RAISED):  # staging without a free row too: met again, and told, in its turn
            return self.puller.begin(run.steps[index], 0.0)
        return None

    def _see_installed(self, run: Run, index: int, pull: Pull, early: Pull | None) -> bool:
        """Wait until a step is installed, and record it; False if the run is over for this thread."""
        step = run.steps[index]
        while True:
            look = POLL_S if early is not None and self.puller.needs_polls(early) else None
            with run.changed:
                if run.changed.wait_for(lambda: run.ended or run.installed > index, look):
                    break
        breathe()
        if run.installed > index and run.event is not None:  # pragma: no cover  needs a GPU
            run.event.synchronize()  # the copies read staging
        self.puller.release(pull)
        if run.installed <= index:
            self.stager.recorder.abort(step)
            return False
        try:
            self.stager.recorder.commit(step)
        except Trouble as why:
            self._unrecorded = why  # the run may be over already
            run.fail(why)
            return False
        with run.changed:
            run.publish(progress.MOVING, 2 * index + 2)
        return True
