"""One rank's reads: batches for a step, how far they are, who may write to which row of staging."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from eplb_core._arrays import BoolArray, IntArray, read_only
from eplb_core._numba import kernel
from eplb_core.errors import EplbError, TransportError
from eplb_core.layout import ExpertLayout
from eplb_core.loading.agreement import Agreement, check_agreement
from eplb_core.loading.install.installer import Staging
from eplb_core.loading.moves.joining import Hello, check_hellos, decode, encode, facts_of, raise_if_any, regions_of
from eplb_core.loading.moves.steps import Step
from eplb_core.loading.moves.workers import breathe
from eplb_core.loading.pull_plan import READ, RESTORE, Int8Array
from eplb_core.loading.store import ExpertStore
from eplb_core.loading.transport import ReadBatch, ReadState, Transport

RAISED = (Exception, asyncio.CancelledError)
"""What a transport may raise that is no interrupt; where asyncio cancels a task it is no Exception."""


def _words_of(error: BaseException) -> str:
    return str(error) if isinstance(error, EplbError) else f"{type(error).__name__}: {error}"


class Backup(Protocol):
    """Where experts come from when no rank that lives holds them; see `HostBackup`."""

    def fetch(self, layer: int, expert: int, rows: Sequence[Any]) -> None:
        """Fill uint8 tensors, one a tensor of the store, with an expert's bytes; raise KeyError if it is not there."""
        ...


class Trouble(Exception):
    """Why a step cannot be staged; the cause is one word that ranks can tell each other."""

    def __init__(self, cause: str, reason: str) -> None:
        super().__init__(reason)
        self.cause, self.reason = cause, reason


class Pull:
    """The reads of one step, under way."""

    __slots__ = ("begun", "bytes", "has_ended", "place_of", "rows", "tickets", "took")

    def __init__(self, place_of: IntArray) -> None:
        self.place_of = place_of
        """Staging row of each local slot that is read or restored, int64 `[S]`, else -1."""
        self.rows = place_of[place_of >= 0]
        """All of these; nobody else's until it is released or given up."""
        self.tickets: list[tuple[Any, int, IntArray]] = []
        """(ticket, peer, staging rows)."""
        self.bytes = 0
        self.begun = time.monotonic()
        self.took = 0.0
        """Seconds until the last read had ended."""
        self.has_ended = False


class Puller:
    """Reads slots of peers into staging.

    Args:
        stores: One a layer.
        layout: What they hold.
        rank: This rank.
        transport: Moves bytes.
        agreement: Carries what ranks must know of each other; of all ranks, or of those that live.
        staging: Memory for incoming slots.
        facts: More that must be equal on all ranks.

    Raises:
        MigrationError: A rank has other stores, another layout or a transport that fails: on every rank, with the same
            text, and before a byte moves.
        ValueError: Tensors share memory with each other or with staging.

    Threads:
        The constructor on that of the agreement; all else on one worker.
    """

    def __init__(
        self,
        stores: Sequence[ExpertStore],
        layout: ExpertLayout,
        rank: int,
        transport: Transport,
        agreement: Agreement,
        staging: Staging,
        facts: dict[str, Any],
    ) -> None:
        check_agreement(agreement)
        self.stores, self.rank, self.transport, self.staging = stores, rank, transport, staging
        self._quarantined: list[tuple[Any, IntArray]] = []
        for other in list(_WRITTEN):
            if other.transport is transport:  # others may be in use on other threads
                other.num_quarantined()
        self._slot_bytes = [store.slot_bytes for store in stores]
        self._taken = np.zeros(staging.capacity, dtype=np.bool_)
        self._regions, places = regions_of(stores, staging)
        facts = {**facts, **facts_of(stores, layout)}
        failure, blob = "", b""
        finish_writes(stores[0].device)
        try:
            blob = transport.export(self._regions)
        except RAISED as error:  # the other ranks wait for a word
            failure = f"rank {rank}: {_words_of(error)}"
        self._blob = blob
        own = encode(Hello(rank, facts, staging.capacity, places, blob), failure)
        ranks = layout.topology.num_ranks
        hellos = check_hellos([decode(other) for other in agreement.gather(own)], ranks)
        self.capacity = min(hello.capacity for hello in hellos)
        """Slots of staging that every rank has."""
        live = {hello.rank for hello in hellos}
        self.avoid_ranks = tuple(other for other in range(ranks) if other not in live)
        """Ranks that are no members of the agreement: nobody reads from them."""
        self._places = np.zeros((ranks, *places.shape), dtype=np.int64)
        for hello in hellos:
            self._places[hello.rank] = hello.places
        self._blobs = {hello.rank: hello.blob for hello in hellos}
        self._lost_peers: set[int] = set()
        failure = ""
        try:
            for hello in hellos:
                transport.connect(hello.rank, hello.blob)
        except RAISED as error:
            failure = f"rank {rank}: {_words_of(error)}"
        raise_if_any([other.decode() for other in agreement.gather(failure.encode())])

    def check_registered(self) -> None:
        """Raise Trouble unless the transport still exports what this rank told its peers.

        Another user of it, a backup or a second Migrator, has replaced the regions: by their numbers reads would land
        in its memory.
        """
        if self.transport.export(self._regions) != self._blob:
            raise Trouble(
                "read",
                f"the transport of rank {self.rank} has exported other memory meanwhile; give each user of it, such as "
                "`HostBackup.save`, one of its own, and make a new Migrator",
            )

    # ---- reads -----------------------------------------------------------------------------------------------------

    def begin(self, step: Step, deadline: float, is_over: Callable[[], bool] = lambda: False) -> Pull:
        """Begin all reads of a step; waits up to `deadline` seconds for staging that reads given up on still own.

        Raises:
            Trouble: There was none, or a read was refused, or `is_over` while it waited.
        """
        until = time.monotonic() + deadline
        while True:
            held = self.num_quarantined()
            pull = self._begin(step)
            if pull is not None:
                return pull
            if is_over() or time.monotonic() > until:
                raise Trouble(
                    "deadline", f"{held} of {len(self._taken)} slots of staging are still owned by reads given up on"
                )
            time.sleep(POLL_S)

    def begin_early(self, step: Step) -> Pull | None:
        """Begin all reads of a step, if staging has room beside what it holds; None: `begin` it when it is its turn."""
        try:
            self.num_quarantined()
            return self._begin(step)
        except RAISED:  # what lasts is met again, and told, in its turn
            return None

    def _begin(self, step: Step) -> Pull | None:
        slots, tensors = len(step.kind), len(self.stores[step.layer].row_bytes)
        place_of, rows = np.empty(slots, dtype=np.int64), np.empty(slots, dtype=np.int64)
        peers, columns = np.empty((slots, 2), dtype=np.int64), np.zeros((5, slots * tensors), dtype=np.int64)
        found = _fill_batches(
            step.kind, step.source_slot, step.layer, self._places, self.stores[step.layer].row_bytes,
            self.staging.offsets, self._taken, place_of, rows, peers, columns,
        )  # fmt: skip
        if found < 0:
            return None
        pull = Pull(place_of)
        self._taken[pull.rows] = True
        first = 0
        try:
            breathe()
            for peer, end in peers[:found].tolist():
                self._read(pull, peer, rows[first:end], columns[:, first * tensors : end * tensors])
                pull.bytes += (end - first) * self._slot_bytes[step.layer]
                first = end
        except BaseException as error:
            self.give_up(pull)
            if isinstance(error, TransportError):
                raise Trouble("read", str(error)) from error
            raise
        return pull

    def _read(self, pull: Pull, peer: int, rows: IntArray, columns: IntArray) -> None:
        most = self.transport.caps.max_batch
        try:
            if peer in self._lost_peers:  # it may have been the connection alone
                self._connect_again(peer)
            for start in range(0, columns.shape[1], most):
                batch = ReadBatch(*columns[:, start : start + most])
                breathe()
                pull.tickets.append((self.transport.read(peer, batch), peer, rows))
                breathe()
        except TransportError:
            # A read that was given up on may have ended the connection, which nobody was told: the next one connects.
            self._lost_peers.add(peer)
            raise

    def _connect_again(self, peer: int) -> None:
        try:
            self.transport.connect(peer, self._blobs[peer])
        except TransportError as error:
            raise Trouble("peer", f"rank {peer} was lost and cannot be reached again: {error}") from error
        self._lost_peers.discard(peer)

    def is_done(self, pull: Pull) -> bool:
        """Whether all bytes are there; a read that failed raises `Trouble`, and the others go on."""
        done = True
        for ticket, peer, _ in pull.tickets:
            state, reason = self.transport.poll(ticket)
            if state is ReadState.PENDING:
                done = False
            elif state is not ReadState.DONE:
                cause = "read"
                if state is ReadState.LOST_PEER:
                    cause = "peer"
                    self._lost_peers.add(peer)
                raise Trouble(cause, f"reading from rank {peer} ended as {state.name}: {reason}")
        if done:
            self._note_end(pull)
        return done

    def has_ended(self, pull: Pull) -> bool:
        """Whether all reads have ended, well or not; `is_done` says which. Never raises."""
        try:
            if not pull.has_ended and all(self.transport.poll(ticket).state.is_end for ticket, _, _ in pull.tickets):
                self._note_end(pull)
        except RAISED:  # a transport's own: `is_done` raises it again
            pull.has_ended = True
        return pull.has_ended

    def wait(self, pull: Pull, layer: int, seconds: float, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Wait until all bytes are there; False, with the reads given up, if `is_over` meanwhile.

        Raises:
            Trouble: A read failed, or it took longer than `seconds`; whatever is raised, the reads are given up.
        """
        until = time.monotonic() + seconds
        try:
            while not self.is_done(pull):
                if time.monotonic() > until:
                    raise Trouble("deadline", f"the reads of layer {layer} took longer than {seconds:g} s")
                if is_over():
                    self.give_up(pull)
                    return False
                time.sleep(POLL_S)
        except BaseException:
            self.give_up(pull)
            raise
        return True

    def _note_end(self, pull: Pull) -> None:
        if not pull.has_ended:
            pull.has_ended, pull.took = True, time.monotonic() - pull.begun

    def give_up(self, pull: Pull) -> None:
        """Abandon what has not ended. Staging rows that may still be written stay out of use until it has."""
        tickets = pull.tickets
        self.release(pull)
        for ticket, _, rows in tickets:
            _WRITTEN.add(self)
            self._taken[rows] = True
            self._quarantined.append((ticket, rows))
        for ticket, _, _ in tickets:
            with contextlib.suppress(*RAISED):  # it stays in quarantine until the transport says otherwise
                self.transport.abandon(ticket)
        self.num_quarantined()

    def release(self, pull: Pull) -> None:
        """The staged bytes are not needed any more."""
        self._taken[pull.rows] = False
        pull.rows, pull.tickets = pull.rows[:0], []

    def num_quarantined(self) -> int:
        """Staging rows that reads given up on may still write."""
        if not self._quarantined:
            return 0
        still = [(ticket, rows) for ticket, rows in self._quarantined if self._may_write(ticket)]
        for _, rows in self._quarantined:
            self._taken[rows] = False
        for _, rows in still:  # several reads may have shared a row
            self._taken[rows] = True
        self._quarantined = still
        if not still:
            _WRITTEN.discard(self)
        return len({row for _, rows in still for row in rows.tolist()})

    def _may_write(self, ticket: Any) -> bool:
        try:
            return not self.transport.poll(ticket).state.is_end
        except RAISED:  # nothing is known of it
            return True

    def drain(self, until: float) -> bool:
        """Wait until nothing can write to staging any more, at most until that time; whether it is so."""
        while self.num_quarantined():
            if time.monotonic() > until:
                return False
            time.sleep(POLL_S)
        return True


def warm_pulls() -> None:
    """Compile, or load, what a pull needs."""
    kind, source, row_bytes, offsets, places = np.array([READ], np.int8), *np.zeros((4, 1), dtype=np.int64)
    filled = [np.empty(1, np.int64), np.empty(1, np.int64), np.empty((1, 2), np.int64), np.empty((5, 1), np.int64)]
    _fill_batches(
        read_only(kind), read_only(source), 0, places.repeat(2).reshape(1, 1, 1, 1, 2), read_only(row_bytes),
        offsets.reshape(1, 1), np.zeros(1, np.bool_), *filled,
    )  # fmt: skip


@kernel
def _fill_batches(
    kind: Int8Array,
    source: IntArray,
    layer: int,
    places: IntArray,
    row_bytes: IntArray,
    offsets: IntArray,
    taken: BoolArray,
    place_of: IntArray,
    rows: IntArray,
    peers: IntArray,
    columns: IntArray,
) -> int:
    """Give each arrival the first free row of staging, and list what to read, peer by peer; the number of peers.

    Fills `place_of` `[S]`; `rows`, those of staging as they are read; `peers`, each with the end of its part of `rows`;
    `columns`, those of a `ReadBatch`, S * tensors long. -1: staging has no room.
    """
    slots, tensors = len(kind), len(row_bytes)
    place_of[:] = -1
    row = 0
    for slot in range(slots):
        if kind[slot] == READ or kind[slot] == RESTORE:
            while row < len(taken) and taken[row]:
                row += 1
            if row == len(taken):
                return -1
            place_of[slot] = row
            row += 1
    found, count = 0, 0
    for peer in range(len(places)):
        before = count
        for slot in range(slots):
            if kind[slot] == READ and source[slot] // slots == peer:
                rows[count] = place_of[slot]
                for tensor in range(tensors):
                    k = count * tensors + tensor
                    columns[1, k] = offsets[place_of[slot], tensor]
                    columns[2, k] = places[peer, layer, source[slot] % slots, tensor, 0]
                    columns[3, k] = places[peer, layer, source[slot] % slots, tensor, 1]
                    columns[4, k] = row_bytes[tensor]
                count += 1
        if count > before:
            peers[found, 0], peers[found, 1] = peer, count
            found += 1
    return found


def finish_writes(device: torch.device) -> None:
    """Peers may read this rank's slots from now on: what was enqueued before has been written."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_WRITTEN: set[Puller] = set()
"""Those whose staging reads given up on may still write, whoever else has let go of it."""

POLL_S = 0.0005
"""How long a worker sleeps between two looks at its reads."""
