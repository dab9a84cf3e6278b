"""Follow the engine that moves experts of shared weights: stop between two passes when asked, resume in its layout.

Both engines read one memory, so they switch together. The mover asks each rank's keeper for a layer. When all ranks of
the follower have heard of it, they stop at the same pass boundary and each tells its keeper; only then may the mover
write. Its commit gives the keepers the new rows; the follower's ranks install them in their tables in the same poll,
and passes resume.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from eplb_core._arrays import check_kind
from eplb_core.errors import EplbError, LayoutAgreementError
from eplb_core.layout import ExpertLayout
from eplb_core.loading.agreement import Agreement, check_agreement
from eplb_core.loading.record.agree import compare_records
from eplb_core.loading.record.client import LayoutClient
from eplb_core.loading.record.state import RecordState
from eplb_core.loading.tables import Tables, lacks_room

_log = logging.getLogger("eplb_core")

STOP, SERVE, ASKED = 0, 1, 2
"""Words of a pass. The least of all ranks' counts: one STOP stops all, and all must be ASKED to hold."""
NEWS_S = 0.002
"""Seconds that a poll waits for news of the record while no pass may run."""


class Look(NamedTuple):
    """What a rank that has stopped sees of its keeper's record."""

    version: int
    digest: str
    moving: bool = False
    """The move that it stopped for is not over."""
    trouble: str = ""
    """Why nobody can say what the slots hold."""


class Settled(NamedTuple):
    """What all ranks that have stopped do."""

    action: Literal["wait", "resume", "switch", "fail"]
    reason: str = ""
    ranks: tuple[int, ...] = ()


def settle(found: Sequence[Look], version: int, digest: str) -> Settled:
    """Decide what ranks do that have stopped in one version; pure, so that all ranks do the same.

    Args:
        found: What each rank sees, by rank.
        version: Version of the layout that all of them route by.
        digest: Digest of that layout.
    """
    troubled = tuple(rank for rank, look in enumerate(found) if look.trouble)
    if troubled:
        return Settled("fail", "; ".join(f"rank {rank}: {found[rank].trouble}" for rank in troubled[:4]), troubled)
    if any(look.moving for look in found):
        return Settled("wait")
    differ, why = compare_records([look[:2] for look in found])
    if differ:
        return Settled("fail", why, differ)
    return Settled("resume" if found[0][:2] == (version, digest) else "switch")


class LayoutFollower:
    """Keep an engine in the layout that another engine moves their shared weights to.

    Without a follower, an engine that attaches pauses the other engine's moves. With one, moves go on: call `poll` once
    per pass on every rank, at the same place in the loop, and run no pass while `paused` is not empty. While this
    engine does not poll, or is stopped, no move begins; the mover tries again later. A dead follower blocks no move.

    When the mover has gone, `close` this and make a `Migrator` with the same client: moves go on from here.

    Args:
        client: This rank's presence at its keeper, after `agree_on_layout` and `attach_weights`; stays open.
        layout: What this engine routes by.
        agreement: Of all ranks of this engine; nobody else uses it meanwhile.
        tables: Dispatch tables to keep in step, or None.
        on_switch: Called for each layer that has changed as `on_switch(layer, layout)`, on the forward thread.
            `poll` raises what it or the tables raise, after the engine has switched. If the tables raised, install
            those of `layout` again before a pass.

    Raises:
        LayoutAgreementError: A rank's keeper does not let it follow; on every rank, with the same text. The engine may
            serve, and moves pause as long as it does.

    Cost:
        `poll`: microseconds and what `agreement` costs per pass. While stopped, one gather every few milliseconds; each
        layer stops this engine for as long as the mover's ranks need to reach the ends of two passes.

    Threads:
        All methods on the forward thread. A thread inside sleeps until the record changes.
    """

    def __init__(
        self,
        client: LayoutClient,
        layout: ExpertLayout,
        *,
        agreement: Agreement,
        tables: Tables | None = None,
        on_switch: Callable[[int, ExpertLayout], object] | None = None,
    ) -> None:
        check_kind(layout, "layout", ExpertLayout)
        check_agreement(agreement)
        self._client, self._layout, self._agreement = client, layout, agreement
        self._tables, self._on_switch = tables, on_switch
        self._paused, self._failure, self._lost = False, "", ""
        self._seen: RecordState | None = None
        """At the last look while stopped."""
        self._held: RecordState | None = None
        """In which it said that it holds."""
        self._changed = threading.Condition()
        self._watcher = LayoutClient(client.path, client.engine_id, attach=False)
        try:
            self.version = self._begin()
        except BaseException:
            self._watcher.close()
            raise
        client.adopted = self.version
        self._thread = threading.Thread(target=self._watch, name=f"eplb follow {client.path}", daemon=True)
        self._thread.start()

    def _begin(self) -> int:
        """Follow on all ranks, or raise on all; the version."""
        reply = self._client.follow(self._layout.digest)
        state = self._watcher.found
        reason = reply.reason
        if reply.status == "ok" and state is None:
            reason = f"{self._watcher.path} cannot be watched: {self._watcher.error or 'nobody listens there'}"
        told = self._gather([reason, reply.version, self._layout.digest])
        bad = tuple(rank for rank, (why, _, _) in enumerate(told) if why)
        if bad:
            raise LayoutAgreementError(f"rank {bad[0]} cannot follow: {told[bad[0]][0]}", ranks=bad)
        differ = tuple(rank for rank, each in enumerate(told) if each != told[0])
        if differ or state is None or reply.version is None:
            raise LayoutAgreementError(
                f"ranks cannot follow: rank 0 is at version {told[0][1]}, digest {told[0][2][:12]}, and ranks "
                f"{', '.join(map(str, differ))} are at other versions or digests",
                ranks=differ,
            )
        self._state = state
        return reply.version

    def _gather(self, word: Sequence[object]) -> list[list[Any]]:
        """What all ranks say, by rank."""
        return [json.loads(blob) for blob in self._agreement.gather(json.dumps(word).encode())]

    @property
    def layout(self) -> ExpertLayout:
        """What this engine routes by."""
        return self._layout

    @property
    def paused(self) -> str:
        """Why no pass may run now; empty if one may. Equal on every rank."""
        if not self._paused:
            return ""
        move = self._state.pending
        return self._failure or (f"{move} is pending" if move else "other ranks have not heard of the end of a move")

    def poll(self) -> tuple[int, ...]:
        """Once a pass, on every rank, at the same place in the loop; again and again while `paused`.

        Returns:
            Rows of the layout that have changed now, in the tables and in `layout`.

        Raises:
            LayoutAgreementError: Nobody knows any more what the slots hold, or the keepers differ: run no pass again.
                On every rank, with the same text.
            AgreementError: A rank of this engine did not come. No move begins any more.
        """
        if self._failure:
            raise LayoutAgreementError(self._failure, ranks=())
        if not self._paused:
            agreed = self._agreement.take()
            if agreed is None or agreed == SERVE:
                self._agreement.post(self._word())
                return ()
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.synchronize()  # the passes of before read the slots too
            self._paused = True
        return self._settle()

    def _word(self) -> int:
        state = self._state
        if state.dirty or (state.version, state.digest) != (self.version, self._layout.digest):
            return STOP  # weights moved without asking: nothing in the protocol does that
        return ASKED if self._client.engine_id in state.awaited and self._client.connected else SERVE

    def _settle(self) -> tuple[int, ...]:
        """While no pass runs: hold, look, and do what all ranks do."""
        with self._changed:
            if self._seen is self._state and not self._lost:
                self._changed.wait(NEWS_S)
            self._seen = state = self._state
        if self._client.engine_id in state.awaited and state.version == self.version and self._held is not state:
            self._client.hold(self.version, state.begun)
            self._held = state
        found = [Look(*each) for each in self._gather(self._look(state))]
        settled = settle(found, self.version, self._layout.digest)
        if settled.action == "fail":
            self._failure = settled.reason
            raise LayoutAgreementError(settled.reason, ranks=settled.ranks)
        if settled.action == "wait":
            return ()
        rows = self._switch(state) if settled.action == "switch" else ()
        self._paused = False
        self._agreement.post(self._word())  # if what comes now raises, ranks are in step all the same
        if self._tables is not None and rows:
            self._tables.install(self._layout, layers=list(rows))
        if self._on_switch is not None:
            for row in rows:
                self._on_switch(row, self._layout)
        return rows

    def _look(self, state: RecordState) -> Look:
        moving = state.pending is not None and state.version == self.version
        trouble = self._lost if moving else ""  # of a move that is over the end is known
        if state.dirty:
            trouble = f"nobody knows what the slots hold: {state.dirty}"
        return Look(state.version, state.digest, moving, trouble)

    def _switch(self, state: RecordState) -> tuple[int, ...]:
        """Route by what the record says, from the next pass on."""
        old, p2l = self._layout.physical_to_logical_map, state.layout.physical_to_logical_map
        layout = ExpertLayout(p2l, self._layout.num_experts, topology=self._layout.topology)
        why = lacks_room(self._tables, layout.replica_count)
        if why:
            self._failure = f"{why}; give the tables of all engines room for as many"
            raise LayoutAgreementError(self._failure, ranks=())
        rows = tuple(np.flatnonzero((old != p2l).any(axis=1)).tolist())
        self._layout, self.version, self._client.adopted = layout, state.version, state.version
        return rows

    def close(self) -> None:
        """Stop following. While the client stays open, moves of other engines pause. Idempotent.

        Raises:
            LayoutAgreementError: A move is under way that this engine has stopped for: poll on until it is over.
        """
        if self._paused and not self._failure:
            raise LayoutAgreementError(f"{self.paused} is not over; poll until `paused` is empty", ranks=())
        self._watcher.close()
        self._thread.join()

    def _watch(self) -> None:
        """The thread: what the record says, as soon as it says it."""
        number = -1
        while not self._lost:
            lost = ""
            try:
                number = self._watcher.watch(number)
            except Exception as error:  # whatever it is: nobody but this thread hears of it
                lost = str(error) if isinstance(error, EplbError) else f"the watch of {self._watcher.path}: {error!r}"
            with self._changed:
                self._lost, self._state = lost, self._watcher.found or self._state
                self._changed.notify_all()
