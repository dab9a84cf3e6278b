"""The protocol of transports, which move bytes between ranks, and the types that it uses."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple, Protocol, runtime_checkable

from eplb_core._arrays import IntArray


class Region(NamedTuple):
    """One span of memory that peers read from or that reads write to."""

    address: int
    """First byte."""
    nbytes: int
    """Length in bytes."""
    device: str
    """"cpu", or a CUDA device such as "cuda:0"."""
    handle: Any = None
    """For memory of another process: what the transport needs beside the address, such as `IpcMemory`; else None."""


class Caps(NamedTuple):
    """What a transport can and cannot do."""

    name: str
    one_sided: bool
    """The owner runs nothing while a peer reads."""
    owner_must_progress: bool
    """Reads make progress only while the owner's process runs: a stopped owner stalls them."""
    devices: frozenset[str]
    """Kinds of memory: `"cpu"`, `"cuda"`."""
    stops_late_writes: bool
    """True: an abandoned read is DRAINED within milliseconds, whatever the peer does. False: bytes of it may land for
    as long as the peer lives, and its destination is lost until `poll` says otherwise."""
    max_batch: int
    """Most operations in one `read`; the caller splits."""
    sm_free: bool | None
    """Copies run on copy engines and take no GPU cores; None where there is no GPU or it was not measured."""


class ReadBatch(NamedTuple):
    """Reads from one peer; int64 arrays of one length. No operation crosses a region."""

    dst_region: IntArray
    dst_offset: IntArray
    src_region: IntArray
    src_offset: IntArray
    nbytes: IntArray


class ReadState(IntEnum):
    """State of a ticket. Unless it is DONE, the bytes of the destination are undefined."""

    PENDING = 0
    DONE = 1
    """Every byte has arrived and nothing of this read can still be written."""
    FAILED = 2
    """It ended without all bytes; nothing of it can still be written."""
    LOST_PEER = 3
    """The peer is gone; nothing of it can still be written."""
    ABANDONED = 4
    """Given up on, and may still write: the destination stays in quarantine."""
    DRAINED = 5
    """Given up on, and nothing of it can still be written: the destination is free again."""

    @property
    def is_end(self) -> bool:
        """Whether nothing of the read can still be written; the state then never changes."""
        return self not in (ReadState.PENDING, ReadState.ABANDONED)


class Status(NamedTuple):
    """Answer of `Transport.poll`."""

    state: ReadState
    reason: str = ""
    """For FAILED and LOST_PEER: which rank, what happened."""


@runtime_checkable
class Transport(Protocol):
    """One-sided reads from peers' memory into this rank's staging memory.

    Called from one thread at a time, never from the forward thread. A transport outlives its users: `export` and
    `connect` are idempotent, and a scaled-up engine connects to the new ranks only. No method waits for a peer forever;
    the caller sets deadlines. Each byte is read at some time between `read` and DONE. The caller must make sure that
    the owner does not write there meanwhile: a transport cannot detect it.
    """

    @property
    def caps(self) -> Caps:
        """What it can and cannot do."""
        ...

    def export(self, regions: list[Region]) -> bytes:
        """Make these regions readable by peers and writable by own reads; region i is number i from now on.

        Idempotent for equal regions; others replace them under a new epoch.

        Returns:
            What peers need for `connect`, opaque, to be exchanged by the caller (`Agreement.gather`).

        Raises:
            TransportError: The memory cannot be registered.
        """
        ...

    def connect(self, rank: int, blob: bytes) -> None:
        """Learn a peer's regions. A newer blob replaces the former one; the own rank is a peer like others.

        The same blob again changes nothing, unless reads from the peer were lost: then it is reached anew.

        Raises:
            TransportError: The blob is malformed, of another kind of transport or version, or the peer is not there.
        """
        ...

    def read(self, rank: int, batch: ReadBatch, *, stream: Any = None) -> Any:
        """Begin to read; returns a ticket at once. The ticket keeps alive what it needs.

        Raises:
            TransportError: Unknown rank or region, or a span outside of its region, told before a byte moves.
        """
        ...

    def poll(self, ticket: Any) -> Status:
        """Say how far a read is; never blocks. Terminal states repeat."""
        ...

    def abandon(self, ticket: Any) -> None:
        """Give up on a read. Its destination is free once `poll` says DRAINED or another end, which may be never.

        A read that has ended stays as it is. The ticket need not be polled to drain.
        """
        ...

    def disconnect(self, rank: int) -> None:
        """Forget a peer; its pending reads end as LOST_PEER or stay ABANDONED. Unknown ranks are ignored."""
        ...

    def close(self) -> None:
        """Release everything that no pending read still holds. Idempotent.

        Pending reads are given up on; tickets can still be polled. Everything else but `disconnect` raises from now on.
        """
        ...
