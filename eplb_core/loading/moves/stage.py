"""Bring a step's incoming slots into staging, in one order for `move_experts` and the Migrator."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from eplb_core._arrays import ArrayLike, IntArray, read_only
from eplb_core.layout import ExpertLayout
from eplb_core.loading.install.installer import Copies, Installer
from eplb_core.loading.moves.counts import MoveCounts
from eplb_core.loading.moves.progress import Trouble
from eplb_core.loading.moves.pull import Pull, Puller
from eplb_core.loading.moves.recorder import Recorder
from eplb_core.loading.moves.steps import Step
from eplb_core.loading.moves.workers import breathe
from eplb_core.loading.pull_plan import PullKind
from eplb_core.loading.store import ExpertStore
from eplb_core.loading.tables import Tables, lacks_room
from eplb_core.loading.verify.fingerprint import fingerprints
from eplb_core.loading.verify.weights import UNKNOWN, check_reference


class Backup(Protocol):
    """Where experts come from that no live rank holds, such as `HostBackup`."""

    def fetch(self, layer: int, expert: int, rows: Sequence[torch.Tensor]) -> None:
        """Fill `rows`, uint8, one per tensor of the store, with an expert's bytes; raise KeyError if it lacks it."""
        ...


class Staged(NamedTuple):
    """A step that is ready to be installed."""

    pull: Pull
    copies: Copies


class Stager:
    """Stages steps: reads, restores, compares, and asks the record.

    Args:
        puller: Reads slots of peers.
        installer: Plans the copies of a step.
        recorder: Tells the record.
        tables: Dispatch tables that must take each step, or None.
        backup: Where experts come from that no live rank holds, or None.
        reference: Fingerprints that staged slots must have, int64 `[L, E, tensors]`, or None.
        deadline: Seconds for the reads of one step.
        stream: CUDA stream for what is written into staging beside the reads; None: the current one.
    """

    def __init__(
        self,
        puller: Puller,
        installer: Installer,
        recorder: Recorder,
        tables: Tables | None,
        backup: Backup | None,
        reference: IntArray | None,
        deadline: float,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.puller, self.installer, self.recorder, self.tables = puller, installer, recorder, tables
        self.backup, self.reference, self._deadline, self._stream = backup, reference, deadline, stream
        self.counts = MoveCounts(puller.rank)

    def check(self, step: Step) -> None:
        """Raise Trouble if the tables or a missing backup make it impossible to stage or install the step.

        Where staging is small, a step leads to a row that is neither the old nor the new one.
        """
        row = step.after.physical_to_logical_map[step.layer]
        why = "" if step.last else lacks_room(self.tables, np.bincount(row[row >= 0]))
        if why:
            raise Trouble("plan", f"{why} on the way of layer {step.layer}; give more `staging`")
        if self.backup is None and (step.kind == PullKind.RESTORE).any():
            expert = row[int(np.argmax(step.kind == PullKind.RESTORE)) + self.puller.rank * len(step.kind)]
            raise Trouble("backup", f"no live rank holds expert {expert} of layer {step.layer}, and there is no backup")

    def stage(self, step: Step, pull: Pull | None = None, is_over: Callable[[], bool] = lambda: False) -> Staged | None:
        """Bring the step's slots into staging, compare them, and announce the step to the record.

        Args:
            step: A step that `check` let pass.
            pull: Its reads, if they were begun early.
            is_over: Whether to give up.

        Returns:
            What to install; None if `is_over` meanwhile.

        Raises:
            Trouble: It cannot be staged. Whatever is raised, the reads are given up.
        """
        if pull is None:
            pull = self.puller.begin(step, self._deadline, is_over)
        try:
            breathe()
            copies = self.installer.plan(step, pull.row_of_slot)
            breathe()
            if not self.puller.wait(pull, step.layer, self._deadline, is_over):
                return None
            self.counts.read_bytes += pull.bytes
            self.counts.received += len(pull.rows)
            breathe()
            with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                try:
                    if self.backup is not None:
                        self._restore(self.backup, step, pull)
                finally:
                    if self._stream is not None:  # pragma: no cover  needs a GPU
                        self._stream.synchronize()
                if self.reference is not None and len(pull.rows):
                    self._compare(self.reference, step, pull)
            breathe()
            self.recorder.begin(step)
        except BaseException:
            self.puller.give_up(pull)
            raise
        finally:
            self.counts.read_s += pull.took or time.monotonic() - pull.begun
        return Staged(pull, copies)

    def _restore(self, backup: Backup, step: Step, pull: Pull) -> None:
        """Fill the staging rows of slots that no rank can give, from the backup."""
        row = step.after.physical_to_logical_map[step.layer]
        for slot in (step.kind == PullKind.RESTORE).nonzero()[0].tolist():
            expert = int(row[self.puller.rank * len(step.kind) + slot])
            rows = self.puller.staging.row(int(pull.row_of_slot[slot]), self.puller.stores[step.layer])
            try:
                backup.fetch(step.layer, expert, rows)
            except (KeyError, OSError, RuntimeError, ValueError) as error:
                raise Trouble(
                    "backup",
                    f"no live rank holds expert {expert} of layer {step.layer}, and its backup failed: {error}",
                ) from error

    def _compare(self, reference: IntArray, step: Step, pull: Pull) -> None:
        """Compare the fingerprints of staged slots with those of their experts; Trouble where they differ."""
        slots = np.flatnonzero(pull.row_of_slot >= 0)
        store, found = self.puller.stores[step.layer], []
        for staging_row in pull.row_of_slot[slots].tolist():
            breathe()
            rows = self.puller.staging.row(staging_row, store)
            staged = ExpertStore({name: [row] for name, row in zip(store.names, rows, strict=True)})
            found.append(fingerprints([staged])[0])
        breathe()
        prints = torch.cat(found).cpu().numpy()
        experts = step.after.physical_to_logical_map[step.layer, self.puller.rank * len(step.kind) + slots]
        expected = reference[step.layer, experts]
        bad = np.argwhere((prints != expected) & (expected != UNKNOWN))
        if len(bad):
            which, tensor = bad[0].tolist()
            source = int(step.source_slot[slots[which]])
            raise Trouble(
                "read",
                f"layer {step.layer}, expert {experts[which]}, {store.names[tensor]!r}: bytes from "
                f"{f'slot {source}' if source >= 0 else 'the backup'} do not match the reference fingerprint",
            )


def to_reference(value: ArrayLike | None, layout: ExpertLayout, num_tensors: int) -> IntArray | None:
    """Copy a `WeightReport.by_expert` to int64 `[L, E, tensors]`, or None; raise ValueError for another shape."""
    if value is None:
        return None
    return read_only(np.array(check_reference(value, (layout.num_layers, layout.num_experts, num_tensors))))
