"""What transports have in common: numbered regions, epochs, the blobs that peers exchange, tickets.

A transport adds how memory is registered (`_register`), how a peer is reached (`_attach`, `_detach`), how a read
begins (`_start`) and how far it is (`_progress`).
"""
# ruff: noqa: B027  (hooks that not every transport needs)

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from eplb_core._arrays import IntArray, check_int
from eplb_core._text import quoted
from eplb_core.errors import TransportError
from eplb_core.loading.transport import Caps, ReadBatch, ReadState, Region, Status
from eplb_core.loading.transports.batches import Spans, check_batch, warm_up

PENDING, DONE, DRAINED = Status(ReadState.PENDING), Status(ReadState.DONE), Status(ReadState.DRAINED)
ABANDONED = Status(ReadState.ABANDONED)
_FORMAT = 1


class Peer(NamedTuple):
    """What a blob says."""

    rank: int
    identity: str
    """Of the transport object that exported, never used again."""
    epoch: int
    address: IntArray
    nbytes: IntArray
    devices: tuple[str, ...]
    extra: Mapping[str, Any]
    """What the kind of transport adds."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One read, as its reader sees it."""

    rank: int
    spans: Spans
    given_up: bool = field(default=False, init=False)
    lost: str = field(default="", init=False)
    """Why the peer is gone, where `disconnect` or `close` said so."""
    _end: Status | None = field(default=None, init=False)

    @property
    def unwanted(self) -> bool:
        """Nobody waits for it any more."""
        return self.given_up or bool(self.lost)

    @property
    def status(self) -> Status:
        """The last state that was seen; an end stays what it is."""
        return self._end or (ABANDONED if self.unwanted else PENDING)

    def finish(self, status: Status) -> None:
        """Note an end: nothing of this read is written any more. Given up on before: DRAINED, or LOST_PEER."""
        if self._end is not None:
            return
        if status.state is not ReadState.DONE:
            if self.lost:
                status = Status(ReadState.LOST_PEER, self.lost)
            elif self.given_up:
                status = DRAINED
        self._end = status


class BaseTransport(ABC):
    """Keeps regions, peers and tickets; `eplb_core.Transport` says what each method promises."""

    caps: Caps

    def __init__(self, name: str, *devices: str, max_batch: int, **others: Any) -> None:
        """Set `caps`: `others` are those that differ from a one-sided transport whose reads can be stopped."""
        kinds = frozenset(devices)
        self.caps = Caps(name, True, False, kinds, True, max_batch, None)._replace(**others)
        self._identity = secrets.token_hex(8)
        self._epoch = 0
        self._blob = b""
        self._regions: tuple[Region, ...] = ()
        self._address = self._nbytes = np.empty(0, dtype=np.int64)
        self._peers: dict[int, Peer] = {}
        self._pending: set[Ticket] = set()
        self._lost: set[int] = set()
        """Ranks from which a read was not DONE: the connection may have ended with it."""
        self._closed = False
        warm_up()

    def export(self, regions: list[Region]) -> bytes:
        """Make these regions readable by peers and writable by own reads."""
        self._check_open()
        if self._blob and tuple(regions) == self._regions:
            return self._blob
        try:
            wanted = tuple(Region(*region) for region in regions)
        except TypeError as error:
            raise TypeError(f"`regions` (={quoted(regions, 80)}) must be a list of Regions") from error
        address, nbytes = _spans_of(wanted, self.caps)
        extra = self._register(wanted)
        self._regions, self._address, self._nbytes = wanted, address, nbytes
        self._epoch += 1
        record = {
            "eplb_transport": self.caps.name,
            "format": _FORMAT,
            "identity": self._identity,
            "epoch": self._epoch,
            "address": address.tolist(),
            "nbytes": nbytes.tolist(),
            "devices": [region.device for region in wanted],
            "extra": dict(extra),
        }
        self._blob = json.dumps(record, separators=(",", ":")).encode()
        return self._blob

    def connect(self, rank: int, blob: bytes) -> None:
        """Learn a peer's regions; an older blob of the exporter is ignored, and the same one while reads go well."""
        self._check_open()
        peer = _decode(self.caps.name, check_int(rank, "rank", 0), blob)
        former, lost = self._peers.get(rank), rank in self._lost
        if former is not None and former.identity == peer.identity and peer.epoch + lost <= former.epoch:
            return
        if lost:
            self.disconnect(rank)
            former = None
        self._attach(peer, former)
        self._peers[rank] = peer

    def read(self, rank: int, batch: ReadBatch, *, stream: Any = None) -> Ticket:
        """Begin to read; a ticket to poll."""
        self._check_open()
        peer = self._peers.get(check_int(rank, "rank", 0))
        if peer is None:
            raise TransportError(f"`rank` (={rank}) must be connected before it is read from", rank=rank)
        spans = check_batch(
            batch, (self._address, self._nbytes), (peer.address, peer.nbytes), rank, self.caps.max_batch
        )
        for left in [ticket for ticket in self._pending if ticket.unwanted]:
            self.poll(left)
        if not len(spans.nbytes):
            ticket = Ticket(rank, spans)
            ticket.finish(DONE)
            return ticket
        try:
            ticket = self._start(peer, spans, stream)
        except TransportError:
            self._lost.add(rank)
            raise
        self._pending.add(ticket)
        if ticket.status.state.is_end:
            self._end(ticket)
        return ticket

    def poll(self, ticket: Ticket) -> Status:
        """Say how far a read is."""
        if not ticket.status.state.is_end:
            self._progress(ticket)
        status = ticket.status
        if status.state.is_end:
            self._end(ticket)
        return status

    def abandon(self, ticket: Ticket) -> None:
        """Give up on a read."""
        if not self.poll(ticket).state.is_end:
            ticket.given_up = True
            self._cancel(ticket)

    def disconnect(self, rank: int) -> None:
        """Forget a peer."""
        peer = self._peers.pop(rank, None)
        if peer is None:
            return
        self._give_up([t for t in self._pending if t.rank == rank], f"rank {rank} was disconnected")
        self._lost.discard(rank)
        self._detach(peer)

    def close(self) -> None:
        """Give up on all reads and release what none of them holds."""
        if self._closed:
            return
        self._closed = True
        self._give_up(list(self._pending), "the transport was closed")
        for peer in self._peers.values():
            self._detach(peer)
        self._peers.clear()
        self._shut()

    def _give_up(self, tickets: Iterable[Ticket], reason: str) -> None:
        for ticket in tickets:
            if not self.poll(ticket).state.is_end:
                ticket.lost = ticket.lost or reason
                self._cancel(ticket)

    def _end(self, ticket: Ticket) -> None:
        """Note once that a read has ended."""
        if ticket in self._pending:
            self._pending.remove(ticket)
            if ticket.status.state is not ReadState.DONE:
                self._lost.add(ticket.rank)

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError(f"this {self.caps.name} transport was closed; make a new one")

    # What a kind of transport adds.

    def _register(self, regions: tuple[Region, ...]) -> Mapping[str, Any]:
        """Make own memory reachable; what peers must know goes into the blob (JSON)."""
        return {}

    def _attach(self, peer: Peer, former: Peer | None) -> None:
        """Reach a peer, or raise and leave the former in place."""

    def _detach(self, peer: Peer) -> None:
        """Release what belongs to a peer, except for what pending reads hold."""

    @abstractmethod
    def _start(self, peer: Peer, spans: Spans, stream: Any) -> Ticket:
        """Begin to read at least one span."""

    def _progress(self, ticket: Ticket) -> None:
        """Look, and `ticket.finish` when nothing is written any more."""

    def _cancel(self, ticket: Ticket) -> None:
        """Stop a read as soon as can be; without a way to stop it, do nothing."""

    def _shut(self) -> None:
        """Release what is left at the end."""


def _spans_of(regions: tuple[Region, ...], caps: Caps) -> tuple[IntArray, IntArray]:
    for i, region in enumerate(regions):
        check_int(region.address, f"regions[{i}].address", 0)
        check_int(region.nbytes, f"regions[{i}].nbytes", 0)
        if str(region.device).split(":")[0] not in caps.devices:
            raise TransportError(
                f"`regions[{i}].device` (={region.device!r}) must be one of {sorted(caps.devices)} for {caps.name}"
            )
    return (
        np.array([region.address for region in regions], dtype=np.int64),
        np.array([region.nbytes for region in regions], dtype=np.int64),
    )


def _decode(kind: str, rank: int, blob: bytes) -> Peer:
    problem = "cannot be read"
    if not isinstance(blob, (bytes, bytearray, memoryview)):
        raise TypeError(f"`blob` (={quoted(blob, 80)}) of rank {rank} must be bytes, as `export` gives them")
    try:
        record = json.loads(bytes(blob))
        found = (record["eplb_transport"], record["format"])
        if found != (kind, _FORMAT):
            problem = f"is of {found[0]!r}, format {found[1]!r}, and this is {kind!r}, format {_FORMAT}"
            raise ValueError
        address, nbytes = (np.array(record[key], dtype=np.int64) for key in ("address", "nbytes"))
        devices, extra = tuple(map(str, record["devices"])), dict(record["extra"])
        if not address.shape == nbytes.shape == (len(devices),) or (nbytes.size and nbytes.min() < 0):
            raise ValueError
        return Peer(rank, str(record["identity"]), int(record["epoch"]), address, nbytes, devices, extra)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise TransportError(
            f"`blob` of rank {rank} {problem}; pass on what the peer's `export` gave", rank=rank
        ) from error
