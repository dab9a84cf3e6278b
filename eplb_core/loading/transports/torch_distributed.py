"""Reads over a process group of torch: two-sided, so every rank serves its peers. For where nothing better is there."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from eplb_core._arrays import IntArray
from eplb_core.errors import TransportError
from eplb_core.loading.transport import Caps, ReadState, Status
from eplb_core.loading.transports._base import DONE, BaseTransport, Peer, Spans, Ticket, split

_CHUNK = 4 << 20  # bytes of one answer; each rank keeps two such buffers a peer and direction
_OPS = 4096  # most spans of one request
_LONG = timedelta(days=100)  # deadlines are the caller's
_REQUEST, _SPANS, _ANSWER, _BYTES = range(1_000_001, 1_000_005)  # tags
_BYE, _READ = 0, 1
_OK, _STALE, _CLOSED, _OUTSIDE = range(4)
_REFUSALS = {
    _STALE: "exported other memory meanwhile; exchange blobs again",
    _CLOSED: "has closed its transport",
    _OUTSIDE: "found a span outside of its regions",
}


class TorchDistributed(BaseTransport):
    """Sends requests to the owner, whose threads copy the bytes out and send them back. Host memory.

    Honest about what it is: the owner's process must run, its threads take a core's time for the copy, and all goes
    through buffers on both sides. In return nothing ever lands late: bytes reach their destination by the reader's own
    hand, so that a read given up on is DRAINED at once, and a dead peer ends its reads as LOST_PEER.

    Args:
        group: A gloo group of all ranks that nothing else uses: `torch.distributed.new_group(backend="gloo")`. Ranks
            are those within the group.

    Raises:
        TransportError: The group is not of gloo.

    Threads:
        One at a time. It starts two of its own for each peer; they end when both sides have closed.
    """

    def __init__(self, group: Any) -> None:
        if "gloo" not in str(group.name()).lower():
            raise TransportError(
                f"`group` (={group.name()!r}) must be of gloo; make one with new_group(backend='gloo')"
            )
        super().__init__(
            Caps(
                name="torch_distributed",
                one_sided=False,
                owner_must_progress=True,
                devices=frozenset({"cpu"}),
                stops_late_writes=True,
                max_batch=65536,
                sm_free=None,
            )
        )
        self._group = group
        self._rank, self._size = int(group.rank()), int(group.size())
        self._served = _Served(int(self._identity, 16) >> 1)
        self._couriers: dict[int, _Courier] = {}
        self._farewells: list[Any] = []
        for rank in range(self._size):
            if rank != self._rank:
                _thread(f"eplb-serve-{rank}", _serve, self._group, rank, self._served)

    def _register(self, regions: Any) -> dict[str, Any]:
        address = np.array([region.address for region in regions], dtype=np.int64)
        nbytes = np.array([region.nbytes for region in regions], dtype=np.int64)
        self._served.memory = _Memory(self._epoch + 1, address, nbytes)
        return {"rank": self._rank}

    def _attach(self, peer: Peer, former: Peer | None) -> None:
        if peer.extra.get("rank") != peer.rank or peer.rank >= self._size:
            raise TransportError(
                f"`rank` (={peer.rank}) must be the rank in the group of {self._size} that exported the blob "
                f"(={peer.extra.get('rank')})",
                rank=peer.rank,
            )
        courier = self._couriers.get(peer.rank)
        if courier is None:
            line: _Line = _Wire(self._group, peer.rank)
            if peer.rank == self._rank:
                line = _Short(self._served)
            courier = self._couriers[peer.rank] = _Courier(peer.rank, line)
        elif courier.broken:
            raise TransportError(f"rank {peer.rank} cannot be reached: {courier.broken}", rank=peer.rank)

    def _start(self, peer: Peer, spans: Spans, stream: Any) -> Ticket:
        ticket = _Fetch(peer, spans)
        self._couriers[peer.rank].take(ticket)
        return ticket

    def _progress(self, ticket: Ticket) -> None:
        if isinstance(ticket, _Fetch) and ticket.unwanted and ticket.writing.acquire(blocking=False):
            ticket.finish(Status(ReadState.FAILED))
            ticket.writing.release()

    def _cancel(self, ticket: Ticket) -> None:
        self._progress(ticket)

    def _shut(self) -> None:
        self._served.memory = None
        for courier in self._couriers.values():
            courier.jobs.put(None)
        for rank in range(self._size):
            if rank != self._rank:  # not waited for: it is sent when the peer takes it
                self._farewells.extend(_try_to_say_bye(self._group, rank))


class _Memory(NamedTuple):
    epoch: int
    address: IntArray
    nbytes: IntArray


class _Served:
    """What this rank's threads give to peers."""

    def __init__(self, identity: int) -> None:
        self.identity = identity
        self.memory: _Memory | None = None

    def answer(self, head: IntArray, spans: IntArray, buffer: torch.Tensor) -> tuple[int, int]:
        """Copy what was asked for into `buffer`: (code, bytes)."""
        memory = self.memory
        if memory is None or head[1] != self.identity or head[2] != memory.epoch:
            return (_CLOSED if memory is None else _STALE), 0
        region, offset, nbytes = spans
        known = (region >= 0) & (region < len(memory.address))
        size = memory.nbytes[np.where(known, region, 0)] if len(memory.nbytes) else np.zeros_like(region)
        if not (known & (offset >= 0) & (nbytes >= 0) & (offset <= size) & (nbytes <= size - offset)).all():
            return _OUTSIDE, 0
        total = int(nbytes.sum())
        if total > buffer.numel():
            return _OUTSIDE, 0
        at = buffer.data_ptr() + np.cumsum(nbytes) - nbytes
        _copy(at, memory.address[region] + offset, nbytes)
        return _OK, total


class _Fetch(Ticket):
    """A read that a courier makes request by request."""

    __slots__ = ("peer", "writing")

    def __init__(self, peer: Peer, spans: Spans) -> None:
        super().__init__(peer.rank, spans)
        self.peer = peer
        self.writing = threading.Lock()
        """Held while bytes go to the destination."""

    @property
    def unwanted(self) -> bool:
        return self.given_up or bool(self.lost)

    def requests(self) -> Iterator[Spans]:
        """Spans of one request after the other."""
        pieces = split(self.spans, _CHUNK)
        ends = np.cumsum(pieces.nbytes)
        first = 0
        while first < len(ends) and not self.unwanted:
            before = int(ends[first - 1]) if first else 0
            last = min(int(np.searchsorted(ends, before + _CHUNK, side="right")), first + _OPS)
            yield Spans(*(array[first:last] for array in pieces))
            first = last

    def deliver(self, spans: Spans, buffer: torch.Tensor) -> None:
        """From the buffer to the destination, unless it was given back."""
        with self.writing:
            if not self.status.state.is_end and not self.unwanted:
                _copy(spans.dst, buffer.data_ptr() + np.cumsum(spans.nbytes) - spans.nbytes, spans.nbytes)


class _Line(Protocol):
    """How requests reach a peer. Answers come in the order of requests."""

    def ask(self, head: IntArray, spans: IntArray) -> None: ...

    def hear(self, buffer: torch.Tensor) -> int:
        """Wait for an answer: its code."""
        ...


class _Wire:
    """Through the group."""

    def __init__(self, group: Any, rank: int) -> None:
        self.group = group
        self.rank = rank
        self.sent: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()

    def ask(self, head: IntArray, spans: IntArray) -> None:
        tensors = torch.from_numpy(head), torch.from_numpy(np.ascontiguousarray(spans))
        works = [self.group.send([t], self.rank, tag) for t, tag in zip(tensors, (_REQUEST, _SPANS), strict=True)]
        self.sent.put((tensors, works))  # alive until answered

    def hear(self, buffer: torch.Tensor) -> int:
        answer = torch.empty(2, dtype=torch.int64)
        self.group.recv([answer], self.rank, _ANSWER).wait(_LONG)
        code, nbytes = answer.tolist()
        if code == _OK:
            self.group.recv([buffer[:nbytes]], self.rank, _BYTES).wait(_LONG)
        self.sent.get()
        return int(code)


class _Short:
    """Within this rank."""

    def __init__(self, served: _Served) -> None:
        self.served = served
        self.asked: queue.SimpleQueue[tuple[IntArray, IntArray]] = queue.SimpleQueue()

    def ask(self, head: IntArray, spans: IntArray) -> None:
        self.asked.put((head, spans))

    def hear(self, buffer: torch.Tensor) -> int:
        return self.served.answer(*self.asked.get(), buffer)[0]


class _Courier:
    """The thread that makes the reads from one peer, one after the other, two requests ahead."""

    def __init__(self, rank: int, line: _Line) -> None:
        self.rank = rank
        self.line = line
        self.broken = ""
        self.jobs: queue.SimpleQueue[_Fetch | None] = queue.SimpleQueue()
        _thread(f"eplb-read-{rank}", self.run)

    def take(self, ticket: _Fetch) -> None:
        self.jobs.put(ticket)
        if self.broken:  # perhaps nobody looks into the queue any more
            ticket.finish(Status(ReadState.LOST_PEER, self.broken))

    def run(self) -> None:
        buffers = [torch.empty(_CHUNK, dtype=torch.uint8) for _ in range(2)]
        while (ticket := self.jobs.get()) is not None:
            try:
                if not self.broken:
                    self.fetch(ticket, buffers)
            except Exception as error:
                self.broken = f"rank {self.rank} is gone: {str(error).splitlines()[0][:200]}"
            if self.broken:
                ticket.finish(Status(ReadState.LOST_PEER, self.broken))

    def fetch(self, ticket: _Fetch, buffers: list[torch.Tensor]) -> None:
        asked: list[Spans] = []
        heard = 0
        refused = _OK

        def hear() -> None:
            nonlocal heard, refused
            code = self.line.hear(buffers[heard % 2])
            refused = refused or code
            if refused == _OK:
                ticket.deliver(asked[heard], buffers[heard % 2])
            heard += 1

        peer = ticket.peer
        for spans in ticket.requests():
            head = np.array([_READ, int(peer.identity, 16) >> 1, peer.epoch, len(spans.nbytes)], dtype=np.int64)
            offset = spans.src - peer.address[spans.src_region]
            self.line.ask(head, np.stack([spans.src_region, offset, spans.nbytes]))
            asked.append(spans)
            if len(asked) - heard == 2:
                hear()
            if refused:
                break
        while heard < len(asked):
            hear()
        with ticket.writing:
            if refused:
                ticket.finish(Status(ReadState.FAILED, f"rank {self.rank} {_REFUSALS[refused]}"))
            else:
                ticket.finish(Status(ReadState.FAILED) if ticket.unwanted else DONE)


def _serve(group: Any, rank: int, served: _Served) -> None:
    """Answer one peer until it says that it is leaving, or is gone."""
    buffers = [torch.empty(_CHUNK, dtype=torch.uint8) for _ in range(2)]
    busy: list[tuple[Any, ...]] = [(), ()]
    head = torch.empty(4, dtype=torch.int64)
    turn = 0
    try:
        while True:
            group.recv([head], rank, _REQUEST).wait(_LONG)
            if head[0] == _BYE:
                return
            spans = torch.empty((3, int(head[3])), dtype=torch.int64)
            group.recv([spans], rank, _SPANS).wait(_LONG)
            turn ^= 1
            for work in busy[turn][1:]:
                work.wait(_LONG)
            code, nbytes = served.answer(head.numpy(), spans.numpy(), buffers[turn])
            answer = torch.tensor([code, nbytes])
            works = [group.send([answer], rank, _ANSWER)]
            if code == _OK:
                works.append(group.send([buffers[turn][:nbytes]], rank, _BYTES))
            busy[turn] = (answer, *works)
    except RuntimeError:
        return  # the peer is gone; reads from it say so


def _try_to_say_bye(group: Any, rank: int) -> list[Any]:
    head = torch.tensor([_BYE, 0, 0, 0])
    try:
        return [(head, group.send([head], rank, _REQUEST))]
    except RuntimeError:
        return []


def _copy(dst: IntArray, src: IntArray, nbytes: IntArray) -> None:
    for to, of, count in zip(dst.tolist(), src.tolist(), nbytes.tolist(), strict=True):
        ctypes.memmove(to, of, count)


def _thread(name: str, function: Any, *args: Any) -> None:
    threading.Thread(target=function, args=args, name=name, daemon=True).start()
