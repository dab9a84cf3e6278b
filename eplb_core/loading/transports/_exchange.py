"""Both ends of a two-sided read: the owner's thread that answers, the reader's that asks, and what carries bytes."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from eplb_core._arrays import BoolArray, IntArray
from eplb_core.loading.transport import ReadState, Status
from eplb_core.loading.transports import _copies, _cuda
from eplb_core.loading.transports._base import DONE, Peer, Spans, Ticket

MOST_SPANS = 256  # of one request
HEAD = 16  # bytes before those that were asked for
_HOST_CHUNK, _DEVICE_CHUNK = 4 << 20, 8 << 20  # bytes of one answer; a rank keeps two such rooms a peer and direction
_LONG = timedelta(days=100)  # deadlines are the caller's
_STUCK_S = 30.0  # after both sides began
REQUEST, ANSWER = 1_000_001, 1_000_002  # tags
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


class PeerEnd:
    """A peer at the other end of the group. Who leaves says so, and is answered; then neither asks any more."""

    def __init__(self, group: Any, rank: int) -> None:
        self.group = group
        self.rank = rank
        self.gone = ""
        self.dead = ""
        """Why nothing comes from it any more. Who waits for bytes that came in part is never told so by gloo."""
        self._said_bye = False
        self._lock = threading.Lock()
        self._sent: list[Any] = []

    def ask(self, message: torch.Tensor) -> Any:
        """Send a request; not after a farewell, which the peer's thread stops at."""
        with self._lock:
            if self.gone or self._said_bye:
                raise RuntimeError(self.gone or "this transport was closed")
            return self.group.send([message], self.rank, REQUEST)

    def say_bye(self, gone: str = "") -> None:
        """Once. Not waited for: it is sent when the peer takes it."""
        with self._lock:
            self.gone = self.gone or gone
            if not self._said_bye:
                self._said_bye = True
                message = torch.zeros(5 + 3 * MOST_SPANS, dtype=torch.int64)
                with contextlib.suppress(RuntimeError):
                    self._sent += [message, self.group.send([message], self.rank, REQUEST)]


class Payload:
    """Groups that carry the bytes of answers: one up, from lower to higher ranks, and one down.

    On a device a send and a receive wait for each other in the queue of their pair. With one group, two ranks that read
    from each other at once could each have the receive first in it, and neither would come to its send.

    Args:
        groups: Up and down.
        rank: This rank.
        device: Index of the CUDA device that NCCL carries from and to; None: the host's memory, by gloo.
    """

    def __init__(self, groups: tuple[Any, Any], rank: int, device: int | None) -> None:
        self.groups, self.rank, self.device = groups, rank, device
        self.broken = ""
        self._lock = threading.Lock()
        self._stream: Any = None if device is None else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin_thread(self) -> None:
        """A thread that calls the others starts."""
        if self.device is not None:
            torch.cuda.set_device(self.device)

    def send(self, room: torch.Tensor, reader: int, *, first: bool = False) -> Any:
        """Begin to send; to be passed to `wait`."""
        return self._begin("send", self.groups[reader < self.rank], room, reader, first)

    def receive(self, room: torch.Tensor, owner: int, end: PeerEnd, *, first: bool = False) -> None:
        """Receive, and wait for it."""
        self.wait(self._begin("recv", self.groups[owner > self.rank], room, owner, first), end)

    def _begin(self, call: str, group: Any, room: torch.Tensor, peer: int, first: bool) -> Any:
        if self.broken:
            raise RuntimeError(self.broken)
        # The first one of a pair waits for the other side, and may not keep other pairs from theirs.
        with contextlib.nullcontext() if first else self._lock:
            if self._stream is None:
                return getattr(group, call)([room], peer, ANSWER)
            with torch.cuda.stream(self._stream):
                return getattr(group, call)([room], peer, ANSWER)

    def wait(self, work: Any, end: PeerEnd) -> None:
        """Until it is over on the device; a peer that is gone, or stuck, ends it for all peers."""
        if self.device is None:
            work.wait(_LONG)
            return
        until = time.monotonic() + _STUCK_S
        while not work.is_completed():
            if self.broken:
                raise RuntimeError(self.broken)
            if end.gone or time.monotonic() > until:
                self.abort(f"rank {end.rank} {end.gone or 'is stuck'}")
            time.sleep(5e-5)
        if self.broken:  # what was aborted counts as over
            raise RuntimeError(self.broken)

    def abort(self, reason: str) -> None:
        """Take the kernels that wait off the device. There is no way to do it for one peer alone."""
        with self._lock:
            if not self.broken:
                self.broken = f"the payload's groups were aborted: {reason}"
                for group in self.groups:
                    group.abort()


class Buffers:
    """Memory that answers go through, and the copies between it and where experts live."""

    def __init__(self, device: int | None, on_device: bool) -> None:
        self.device = device
        self.on_device = on_device
        """Where rooms are."""
        self.chunk = _DEVICE_CHUNK if on_device else _HOST_CHUNK
        if device is not None:
            self.cuda = _cuda.runtime()
            with self.cuda.on(device):
                self.stream = self.cuda.new_stream()

    def new(self) -> torch.Tensor:
        """Room for one answer."""
        if self.on_device:
            return torch.empty(HEAD + self.chunk, dtype=torch.uint8, device=f"cuda:{self.device}")
        return torch.empty(HEAD + self.chunk, dtype=torch.uint8, pin_memory=self.device is not None)

    def move(self, dst: IntArray, src: IntArray, nbytes: IntArray, on_device: BoolArray) -> None:
        """Copy spans of which one side is in a room; `on_device`: the other side is not host memory."""
        host = ~on_device & (not self.on_device)
        if host.any():
            moved = _copies.copy(dst[host], src[host], nbytes[host])
            if moved != int(nbytes[host].sum()):
                raise OSError(f"{moved} of {int(nbytes[host].sum())} bytes were copied; memory was unmapped")
        if not host.all() and self.device is not None:
            spans = dst[~host], src[~host], nbytes[~host]
            with self.cuda.on(self.device):
                self.cuda.copy(*spans, self.stream, overlap=self.on_device, batched=self.on_device)
                self.cuda.call("cudaStreamSynchronize", self.stream)


class Served:
    """What this rank's threads give to peers."""

    def __init__(self, identity: int, buffers: Buffers) -> None:
        self.identity = identity
        self.buffers = buffers
        self.memory: Memory | None = None

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
        except (OSError, _cuda.CudaError):
            return _UNREADABLE
        return _OK


class Fetch(Ticket):
    """A read that a courier makes request by request."""

    __slots__ = ("on_device", "peer", "writing")

    def __init__(self, peer: Peer, spans: Spans, on_device: BoolArray) -> None:
        super().__init__(peer.rank, spans)
        self.peer = peer
        self.on_device = on_device
        self.writing = threading.Lock()
        """Held while bytes go to the destination."""

    @property
    def unwanted(self) -> bool:
        return self.given_up or bool(self.lost)

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
                except (OSError, _cuda.CudaError) as error:
                    self.finish(Status(ReadState.FAILED, f"rank {self.rank}: own memory cannot be written: {error}"))


class Line(Protocol):
    """How requests reach a peer. Answers come in the order of requests."""

    @property
    def dead(self) -> str:
        """Why no answer will come, or nothing."""
        ...

    def ask(self, request: IntArray) -> None: ...

    def hear(self, room: torch.Tensor, nbytes: int) -> int:
        """Wait for an answer: how it went, and if well, that many bytes behind the head of `room`."""
        ...


class Wire:
    """Through the group; the bytes behind the head, or by the payload's groups."""

    def __init__(self, end: PeerEnd, payload: Payload | None) -> None:
        self.end, self.payload = end, payload
        self.asked: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()

    @property
    def dead(self) -> str:
        return self.end.dead

    def ask(self, request: IntArray) -> None:
        message = torch.from_numpy(request)
        self.asked.put((message, self.end.ask(message)))  # alive until answered

    def hear(self, room: torch.Tensor, nbytes: int) -> int:
        message = room[: HEAD + nbytes] if self.payload is None else torch.empty(HEAD, dtype=torch.uint8)
        self.end.group.recv([message], self.end.rank, ANSWER).wait(_LONG)
        first = bool(self.asked.get()[0][0] == MEET)
        code = int(message[:8].view(torch.int64)[0])
        if self.payload is not None and code == _OK and nbytes:
            self.payload.receive(room[HEAD : HEAD + nbytes], self.end.rank, self.end, first=first)
        return code


class Short:
    """Within this rank."""

    dead = ""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.asked: queue.SimpleQueue[IntArray] = queue.SimpleQueue()

    def ask(self, request: IntArray) -> None:
        self.asked.put(request)

    def hear(self, room: torch.Tensor, nbytes: int) -> int:
        return self.served.answer(self.asked.get(), room)[0]


class Courier:
    """The thread that makes the reads from one peer, one after the other, two requests ahead."""

    def __init__(self, rank: int, line: Line, buffers: Buffers, payload: Payload | None) -> None:
        self.rank = rank
        self.line = line
        self.broken = ""
        self.buffers = buffers
        self.payload = payload
        self.rooms: list[torch.Tensor] = []
        self.has_met = threading.Event()
        self.jobs: queue.SimpleQueue[Fetch | None] = queue.SimpleQueue()
        self.thread = start_thread(f"eplb-read-{rank}", self.run)

    @property
    def dead(self) -> str:
        """Why no read will end by itself any more, or nothing."""
        return self.broken or (self.line.dead and f"rank {self.rank} is gone: {self.line.dead}")

    def take(self, ticket: Fetch) -> None:
        """Make this read, after those before it. If nobody looks into the queue any more, polls see that."""
        self.jobs.put(ticket)

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

        for spans in _copies.portions(ticket.spans, self.buffers.chunk, MOST_SPANS):
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
            group.recv([request], rank, REQUEST).wait(_LONG)
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
    for work in works[:1]:
        work.wait(_LONG)
    for work in works[1:]:
        if payload is not None:
            payload.wait(work, end)


def start_thread(name: str, function: Any, *args: Any) -> threading.Thread:
    """A daemon."""
    thread = threading.Thread(target=function, args=args, name=name, daemon=True)
    thread.start()
    return thread
