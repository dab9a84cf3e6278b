"""One rank's reads: the batches of a step, how far they are, who may write to which row of staging."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from eplb_core._arrays import BoolArray, IntArray
from eplb_core._numba import kernel
from eplb_core.errors import EplbError, TransportError
from eplb_core.layout import ExpertLayout
from eplb_core.loading.agreement import Agreement, check_agreement
from eplb_core.loading.install.staging import Staging
from eplb_core.loading.moves.joining import Hello, check_hellos, decode, encode, facts_of, raise_if_any, regions_of
from eplb_core.loading.moves.progress import Cause, Trouble
from eplb_core.loading.moves.steps import Step
from eplb_core.loading.moves.workers import breathe
from eplb_core.loading.pull_plan import Int8Array, PullKind, check_slots_exist
from eplb_core.loading.store import ExpertStore
from eplb_core.loading.transport import ReadBatch, ReadState, Transport

RAISED = (Exception, asyncio.CancelledError)
"""What a transport may raise that is no interrupt; asyncio's CancelledError is no Exception."""
POLL_S: Final = 0.0005
"""Seconds that a worker sleeps between two looks at its reads."""


def _words_of(error: BaseException) -> str:
    return str(error) if isinstance(error, EplbError) else f"{type(error).__name__}: {error}"


class Pull:
    """The pending reads of one step."""

    __slots__ = ("begun", "bytes", "row_of_slot", "rows", "tickets", "took")

    def __init__(self, row_of_slot: IntArray) -> None:
        self.row_of_slot = row_of_slot
        """Staging row of each local slot that is read or restored, int64 `[S]`, else -1."""
        self.rows = row_of_slot[row_of_slot >= 0]
        """The staging rows that this pull owns until it is released or given up."""
        self.tickets: list[tuple[Any, int, IntArray]] = []
        """(ticket, peer, staging rows)."""
        self.bytes = 0
        self.begun = time.monotonic()
        self.took = 0.0
        """Seconds until all bytes were there."""


class Puller:
    """Reads slots of peers into staging.

    Args:
        stores: One per layer.
        layout: The layout that their weights are in.
        rank: This rank.
        transport: Moves bytes.
        agreement: Of all ranks, or of the live ones; ranks exchange by it what they must know of each other.
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
        facts: Mapping[str, object] | None = None,
    ) -> None:
        check_agreement(agreement)
        self.stores, self.rank, self.transport, self.staging = stores, rank, transport, staging
        self._quarantined: list[tuple[Any, IntArray]] = []
        self.quarantined = 0
        """What `num_quarantined` returned last, for other threads."""
        for other in list(_WRITTEN):
            if other.transport is transport:  # others may be in use on other threads
                other.num_quarantined()
        self._taken = np.zeros(staging.capacity, dtype=np.bool_)
        self._regions, offsets = regions_of(stores, staging, layout.slots_per_rank)
        facts = {**(facts or {}), **facts_of(stores, layout)}
        failure, blob = "", b""
        finish_writes(stores[0].device)
        try:
            blob = transport.export(self._regions)
        except RAISED as error:  # the other ranks wait for a word
            failure = f"rank {rank}: {_words_of(error)}"
        self._blob = blob
        own = encode(Hello(rank, facts, staging.capacity, offsets, blob), failure)
        ranks = layout.topology.num_ranks
        hellos = check_hellos([decode(other) for other in agreement.gather(own)], ranks)
        self.capacity = min(hello.capacity for hello in hellos)
        """Slots of staging that every rank has."""
        live = {hello.rank for hello in hellos}
        self.avoid_ranks = tuple(other for other in range(ranks) if other not in live)
        """Ranks that are no members of the agreement: nobody reads from them."""
        self.region_offsets = np.zeros((ranks, *offsets.shape), dtype=np.int64)
        """(region, offset) of every row of all ranks, int64 `[R, L, S, tensors, 2]`."""
        for hello in hellos:
            self.region_offsets[hello.rank] = hello.region_offsets
        self._num_slots = (self.region_offsets[:, 0, :, 0, 0] >= 0).sum(axis=1).tolist()
        self._blobs = {hello.rank: hello.blob for hello in hellos}
        self._lost_peers: set[int] = set()
        failure = ""
        try:
            for hello in hellos:
                transport.connect(hello.rank, hello.blob)
        except RAISED as error:
            failure = f"rank {rank}: {_words_of(error)}"
        raise_if_any([other.decode() for other in agreement.gather(failure.encode())])

    def check_target(self, layout: ExpertLayout) -> None:
        """Raise ValueError, the same on every rank, if the layout uses a slot that its rank does not have."""
        for rank, num_slots in enumerate(self._num_slots):
            check_slots_exist(layout, rank, num_slots, "target")

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
        """Begin all reads of a step; wait up to `deadline` seconds for staging rows that abandoned reads still own.

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
                    "deadline", f"{held} of {len(self._taken)} staging rows are still owned by abandoned reads"
                )
            time.sleep(POLL_S)

    def _begin(self, step: Step) -> Pull | None:
        """Begin all reads of a step; None: staging has no room."""
        row_bytes = self.stores[step.layer].row_bytes
        batches = batches_of(step, self.region_offsets, row_bytes, self.staging.offsets, self._taken)
        if batches is None:
            return None
        pull = Pull(batches.row_of_slot)
        self._taken[pull.rows] = True
        pull.bytes = batches.nbytes
        try:
            breathe()
            for peer, rows, batch in batches.split(self.transport.caps.max_batch):
                self._read(pull, peer, rows, batch)
        except BaseException as error:
            self.give_up(pull)
            if isinstance(error, TransportError):
                raise Trouble("read", str(error)) from error
            raise
        return pull

    def _read(self, pull: Pull, peer: int, rows: IntArray, batch: ReadBatch) -> None:
        try:
            if peer in self._lost_peers:  # it may have been the connection alone
                self._connect_again(peer)
            breathe()
            pull.tickets.append((self.transport.read(peer, batch), peer, rows))
            breathe()
        except TransportError:
            # An abandoned read may have ended the connection, and nobody was told: the next one connects.
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
                cause: Cause = "read"
                if state is ReadState.LOST_PEER:
                    cause = "peer"
                    self._lost_peers.add(peer)
                raise Trouble(cause, f"reading from rank {peer} ended as {state.name}: {reason}")
        if done and not pull.took:
            pull.took = time.monotonic() - pull.begun
        return done

    def needs_polls(self, pull: Pull) -> bool:
        """Whether reads go on and none has failed so far. Never raises: `is_done` raises it again."""
        try:
            return not self.is_done(pull)
        except RAISED:
            return False

    def wait(self, pull: Pull, layer: int, seconds: float, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Wait until all bytes are there; return False, with the reads abandoned, if `is_over` meanwhile.

        Raises:
            Trouble: A read failed, or it took longer than `seconds`; whatever is raised, the reads are abandoned.
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

    def give_up(self, pull: Pull) -> None:
        """Abandon reads that have not ended; the rows that they may still write stay in quarantine until they have."""
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
        """Free the staging rows: their bytes are not needed any more."""
        self._taken[pull.rows] = False
        pull.rows, pull.tickets = pull.rows[:0], []

    def num_quarantined(self) -> int:
        """Count the staging rows that abandoned reads may still write."""
        still = [(ticket, rows) for ticket, rows in self._quarantined if self._may_write(ticket)]
        for _, rows in self._quarantined:
            self._taken[rows] = False
        for _, rows in still:  # several reads may have shared a row
            self._taken[rows] = True
        self._quarantined = still
        if not still:
            _WRITTEN.discard(self)
        self.quarantined = len({row for _, rows in still for row in rows.tolist()})
        return self.quarantined

    def _may_write(self, ticket: Any) -> bool:
        try:
            return not self.transport.poll(ticket).state.is_end
        except RAISED:  # nothing is known of it
            return True

    def drain(self, until: float) -> bool:
        """Wait until no abandoned read can write to staging, at most until that time; return whether none can."""
        while self.num_quarantined():
            if time.monotonic() > until:
                return False
            time.sleep(POLL_S)
        return True


class Batches(NamedTuple):
    """What a rank reads for one step, peer by peer; made by `batches_of`."""

    row_of_slot: IntArray
    """Staging row of each local slot that is read or restored, int64 `[S]`, else -1."""
    rows: IntArray
    """Staging rows in the order in which they are read, int64 `[reads]`."""
    peers: list[list[int]]
    """Each peer, with the end of its part of `rows`."""
    columns: IntArray
    """The five columns of a `ReadBatch`, int64 `[5, reads * tensors]`."""

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return int(self.columns[4].sum())

    def split(self, max_batch: int) -> Iterator[tuple[int, IntArray, ReadBatch]]:
        """Yield each peer, its staging rows and a batch of at most `max_batch` operations."""
        first, tensors = 0, self.columns.shape[1] // max(1, len(self.rows))
        for peer, end in self.peers:
            for start in range(first * tensors, end * tensors, max_batch):
                stop = min(start + max_batch, end * tensors)
                yield peer, self.rows[first:end], ReadBatch(*self.columns[:, start:stop])
            first = end


def batches_of(
    step: Step, region_offsets: IntArray, row_bytes: IntArray, staging_offsets: IntArray, taken: BoolArray
) -> Batches | None:
    """Say what to read for a step, from where, and into which free rows of staging; pure.

    Args:
        step: The step, with this rank's part of the plan.
        region_offsets: (region, offset) of every row of all ranks, int64 `[R, L, S, tensors, 2]`.
        row_bytes: Bytes of a row of each tensor on this layer, int64 `[tensors]`.
        staging_offsets: Where each row of staging begins in region 0, int64 `[capacity, tensors]`.
        taken: Rows of staging in use, bool `[capacity]`.

    Returns:
        The batches; None if staging has too few free rows.
    """
    slots, tensors = len(step.kind), len(row_bytes)
    row_of_slot, rows = np.empty(slots, dtype=np.int64), np.empty(slots, dtype=np.int64)
    peers, columns = np.empty((slots, 2), dtype=np.int64), np.zeros((5, slots * tensors), dtype=np.int64)
    found = _fill_batches(
        step.kind, step.source_slot, step.layer, region_offsets, row_bytes, staging_offsets, taken, row_of_slot, rows,
        peers, columns,
    )  # fmt: skip
    if found < 0:
        return None
    count = int(peers[found - 1, 1]) if found else 0
    return Batches(row_of_slot, rows[:count], peers[:found].tolist(), columns[:, : count * tensors])


@kernel
def _fill_batches(
    kind: Int8Array,
    source: IntArray,
    layer: int,
    region_offsets: IntArray,
    row_bytes: IntArray,
    staging_offsets: IntArray,
    taken: BoolArray,
    row_of_slot: IntArray,
    rows: IntArray,
    peers: IntArray,
    columns: IntArray,
) -> int:
    """Give each arrival the first free row of staging and list the reads peer by peer; the number of peers, or -1."""
    slots, tensors = len(kind), len(row_bytes)
    row_of_slot[:] = -1
    row = 0
    for slot in range(slots):
        if kind[slot] == PullKind.READ or kind[slot] == PullKind.RESTORE:
            while row < len(taken) and taken[row]:
                row += 1
            if row == len(taken):
                return -1
            row_of_slot[slot] = row
            row += 1
    found, count = 0, 0
    for peer in range(len(region_offsets)):
        before = count
        for slot in range(slots):
            if kind[slot] == PullKind.READ and source[slot] // slots == peer:
                rows[count] = row_of_slot[slot]
                for tensor in range(tensors):
                    k = count * tensors + tensor
                    columns[1, k] = staging_offsets[row_of_slot[slot], tensor]
                    columns[2, k] = region_offsets[peer, layer, source[slot] % slots, tensor, 0]
                    columns[3, k] = region_offsets[peer, layer, source[slot] % slots, tensor, 1]
                    columns[4, k] = row_bytes[tensor]
                count += 1
        if count > before:
            peers[found, 0], peers[found, 1] = peer, count
            found += 1
    return found


def finish_writes(device: torch.device) -> None:
    """Wait until enqueued writes have run on the device: peers may read this rank's slots from now on."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_WRITTEN: set[Puller] = set()
"""Pullers whose staging abandoned reads may still write: they stay alive, whoever else has dropped them."""
