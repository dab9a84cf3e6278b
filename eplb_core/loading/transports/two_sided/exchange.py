"""Both ends of a two-sided read: the owner's thread that answers, and the reader's that asks."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from eplb_core._arrays import BoolArray, IntArray
from eplb_core.loading.cuda import runtime
from eplb_core.loading.transport import ReadState, Status
from eplb_core.loading.transports import span_copies
from eplb_core.loading.transports.base import DONE, Peer, Ticket
from eplb_core.loading.transports.batches import Spans
from eplb_core.loading.transports.two_sided.carriers import (
    ANSWER,
    HEAD,
    LONG,
    MOST_SPANS,
    REQUEST,
    Buffers,
    Payload,
    PeerEnd,
)

BYE, READ, MEET = range(3)
_OK, _STALE, _CLOSED, _OUTSIDE, _UNREADABLE = range(5)
_REFUSALS = {
    _STALE: "exported other memory meanwhile; exchange blobs again",
    _CLOSED: "has closed its transport",
    _OUTSIDE: "found a span outside of its regions",
    _UNREADABLE: "could not read its own memory",
}


class Memory(NamedTuple):
    """What a rank has exported."""

    epoch: int
    address: IntArray
    nbytes: IntArray
    on_device: BoolArray


@dataclass(slots=True, eq=False)
class Served:
    """What this rank's threads give to peers."""

    identity: int
    buffers: Buffers
    memory: Memory | None = None

    def answer(self, request: IntArray, room: torch.Tensor) -> tuple[int, int]:
        """Copy what was asked for behind the head of `room`; how that went, and the bytes that are to be sent."""
        total = int(request[4])
        if not (0 <= total <= self.buffers.chunk and 0 <= request[3] <= MOST_SPANS):
            return _OUTSIDE, 0
        return self._collect(request, room, total), total

    def _collect(self, request: IntArray, room: torch.Tensor, total: int) -> int:
        memory = self.memory
        if memory is None or request[1] != self.identity or request[2] != memory.epoch:
            return _CLOSED if memory is None else _STALE
        region, offset, nbytes = request[5 : 5 + 3 * MOST_SPANS].reshape(3, -1)[:, : request[3]]
        if ((region < 0) | (region >= len(memory.address))).any():
            return _OUTSIDE
        size = memory.nbytes[region]
        inside = (offset >= 0) & (nbytes >= 0) & (offset <= size) & (nbytes <= size - offset)
        if not inside.all() or int(nbytes.sum()) != total:
            return _OUTSIDE
        at = room.data_ptr() + HEAD + np.cumsum(nbytes) - nbytes
        try:
            self.buffers.move(at, memory.address[region] + offset, nbytes, memory.on_device[region])
        except (OSError, runtime.CudaError):
            return _UNREADABLE
        return _OK


@dataclass(slots=True, eq=False)
class Fetch(Ticket):
    """A read that a courier makes request by request."""

    peer: Peer
    on_device: BoolArray
    writing: threading.Lock = field(default_factory=threading.Lock)
    """Held while bytes go to the destination."""

    def request(self, spans: Spans) -> IntArray:
        """What the owner is asked."""
        words = np.zeros(5 + 3 * MOST_SPANS, dtype=np.int64)
        count = len(spans.nbytes)
        words[:5] = READ, int(self.peer.identity, 16) >> 1, self.peer.epoch, count, spans.nbytes.sum()
        offset = spans.src - self.peer.address[spans.src_region]
        words[5:].reshape(3, -1)[:, :count] = spans.src_region, offset, spans.nbytes
        return words

    def deliver(self, spans: Spans, buffer: torch.Tensor, buffers: Buffers) -> None:
        """From the buffer to the destination, unless it was given back."""
        with self.writing:
            if not self.status.state.is_end and not self.unwanted:
                at = buffer.data_ptr() + HEAD + np.cumsum(spans.nbytes) - spans.nbytes
                try:
                    buffers.move(spans.dst, at, spans.nbytes, self.on_device[spans.dst_region])
                except (OSError, runtime.CudaError) as error:
                    self.finish(Status(ReadState.FAILED, f"rank {self.rank}: own memory cannot be written: {error}"))


class Wire:
    """Carries requests to a peer through the group, and its answers, in the order of the requests."""

    def __init__(self, end: PeerEnd, payload: Payload | None) -> None:
        self.end, self.payload = end, payload
        self.asked: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()

    @property
    def dead(self) -> str:
        """Why no answer will come, or nothing."""
        return self.end.dead

    def ask(self, request: IntArray) -> None:
        """Send a request."""
        message = torch.from_numpy(request)
        self.asked.put((message, self.end.ask(message)))  # alive until answered

    def hear(self, room: torch.Tensor, nbytes: int) -> int:
        """Wait for an answer: its code and, where that is 0, so many bytes behind the head of `room`."""
        message = room[: HEAD + nbytes] if self.payload is None else torch.empty(HEAD, dtype=torch.uint8)
        self.end.group.recv([message], self.end.rank, ANSWER).wait(LONG)
        first = bool(self.asked.get()[0][0] == MEET)
        code = int(message[:8].view(torch.int64)[0])
        if self.payload is not None and code == _OK and nbytes:
            self.payload.receive(room[HEAD : HEAD + nbytes], self.end.rank, self.end, first=first)
        return code


class Short:
    """As `Wire`, within this rank."""

    dead = ""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.asked: queue.SimpleQueue[IntArray] = queue.SimpleQueue()

    def ask(self, request: IntArray) -> None:
        """Keep a request."""
        self.asked.put(request)

    def hear(self, room: torch.Tensor, nbytes: int) -> int:
        """Answer the first request that was kept."""
        return self.served.answer(self.asked.get(), room)[0]


class Courier:
    """The thread that makes the reads from one peer, one after the other, two requests ahead."""

    def __init__(self, rank: int, line: Wire | Short, buffers: Buffers, payload: Payload | None) -> None:
        self.rank = rank
        self.line = line
        self.broken = ""
        self.buffers = buffers
        self.payload = payload
        self.rooms: list[torch.Tensor] = []
        self.has_met = threading.Event()
        self.jobs: queue.SimpleQueue[Fetch | None] = queue.SimpleQueue()
        """Reads to be made, in order. If nobody looks into it any more, polls see that."""
        self.thread = start_thread(f"eplb-read-{rank}", self.run)

    @property
    def dead(self) -> str:
        """Why no read will end by itself any more, or nothing."""
        return self.broken or (self.line.dead and f"rank {self.rank} is gone: {self.line.dead}")

    def run(self) -> None:
        """All reads."""
        try:
            if self.payload is not None:
                self.payload.begin_thread()
                self.meet()
        except Exception as error:
            self.break_off(error)
        self.has_met.set()
        while (ticket := self.jobs.get()) is not None:
            try:
                if not self.broken:
                    self.fetch(ticket)
            except Exception as error:
                self.break_off(error)
            if self.broken:
                ticket.finish(Status(ReadState.LOST_PEER, self.broken))

    def break_off(self, error: Exception) -> None:
        """No more reads from this peer."""
        self.broken = f"rank {self.rank} is gone: {str(error).splitlines()[0][:200]}"

    def meet(self) -> None:
        """The first message of a pair takes long: now, and not when somebody waits for it."""
        self.rooms = [self.buffers.new() for _ in range(2)]
        if isinstance(self.line, Wire):
            request = np.zeros(5 + 3 * MOST_SPANS, dtype=np.int64)
            request[0], request[4] = MEET, HEAD
            self.line.ask(request)
            self.line.hear(self.rooms[0], HEAD)

    def fetch(self, ticket: Fetch) -> None:
        """One read."""
        self.rooms = self.rooms or [self.buffers.new() for _ in range(2)]
        asked: list[Spans] = []
        codes: list[int] = []

        def hear() -> None:
            turn = len(codes)
            room = self.rooms[turn % 2]
            codes.append(self.line.hear(room, int(asked[turn].nbytes.sum())))
            if not any(codes):
                ticket.deliver(asked[turn], room, self.buffers)

        for spans in span_copies.portions(ticket.spans, self.buffers.chunk, MOST_SPANS):
            if ticket.unwanted or any(codes):
                break
            self.line.ask(ticket.request(spans))
            asked.append(spans)
            if len(asked) - len(codes) == 2:
                hear()
        while len(codes) < len(asked):
            hear()
        refused = next((code for code in codes if code != _OK), _OK)
        with ticket.writing:
            if refused:
                ticket.finish(Status(ReadState.FAILED, f"rank {self.rank} {_REFUSALS[refused]}"))
            else:
                ticket.finish(Status(ReadState.FAILED) if ticket.unwanted else DONE)


def serve(end: PeerEnd, served: Served, payload: Payload | None) -> None:
    """Answer one peer until it says that it is leaving, or is gone."""
    group, rank = end.group, end.rank
    rooms: list[torch.Tensor] = []
    heads = [torch.zeros(HEAD, dtype=torch.uint8) for _ in range(2)]
    sent: list[list[Any]] = [[], []]
    request = torch.empty(5 + 3 * MOST_SPANS, dtype=torch.int64)
    turn = 0
    try:
        if payload is not None:
            payload.begin_thread()
        while True:
            group.recv([request], rank, REQUEST).wait(LONG)
            if request[0] == BYE:
                end.say_bye("it has closed its transport")
                return
            rooms = rooms or [served.buffers.new() for _ in range(2)]
            turn ^= 1
            _wait_sent(sent[turn], end, payload)
            is_first = bool(request[0] == MEET)
            code, total = (_OK, HEAD) if is_first else served.answer(request.numpy(), rooms[turn])
            message = rooms[turn][: HEAD + total] if payload is None else heads[turn]
            message[:8].view(torch.int64)[0] = code
            sent[turn] = [group.send([message], rank, ANSWER)]
            if payload is not None and code == _OK and total:
                sent[turn].append(payload.send(rooms[turn][HEAD : HEAD + total], rank, first=is_first))
    except RuntimeError as error:
        end.dead = str(error).splitlines()[0][:200]
        end.say_bye(end.dead)


def _wait_sent(works: list[Any], end: PeerEnd, payload: Payload | None) -> None:
    """Until what was sent from a room has left it."""
    if works:
        works[0].wait(LONG)
    if payload is not None and len(works) > 1:
        payload.wait(works[1], end)


def start_thread(name: str, function: Any, *args: Any) -> threading.Thread:
    """A daemon."""
    thread = threading.Thread(target=function, args=args, name=name, daemon=True)
    thread.start()
    return thread
