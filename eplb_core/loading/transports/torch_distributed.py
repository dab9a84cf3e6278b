"""Reads over a process group of torch: two-sided, so every rank serves its peers. For where nothing better is there."""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
import weakref
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from eplb_core._arrays import BoolArray, IntArray
from eplb_core.errors import TransportError
from eplb_core.loading.transport import Caps, ReadState, Status
from eplb_core.loading.transports import _copies, _cuda
from eplb_core.loading.transports._base import DONE, BaseTransport, Peer, Spans, Ticket

_CHUNK = 4 << 20  # bytes of one answer; each rank keeps two such buffers a peer and direction
_MOST_SPANS = 256  # of one request
_HEAD = 16  # bytes before those that were asked for
_LONG = timedelta(days=100)  # deadlines are the caller's
_REQUEST, _ANSWER = 1_000_001, 1_000_002  # tags
_BYE, _READ = 0, 1
_OK, _STALE, _CLOSED, _OUTSIDE, _UNREADABLE = range(5)
_REFUSALS = {
    _STALE: "exported other memory meanwhile; exchange blobs again",
    _CLOSED: "has closed its transport",
    _OUTSIDE: "found a span outside of its regions",
    _UNREADABLE: "could not read its own memory",
}


class TorchDistributed(BaseTransport):
    """Sends requests to the owner, whose threads copy the bytes out and send them back.

    Honest about what it is: the owner's process must run, its threads take time for the copies, and all goes through
    host buffers on both sides, device memory too. In return nothing ever lands late: bytes reach their destination by
    the reader's own hand, so that a read given up on is DRAINED at once, and a dead peer ends its reads as LOST_PEER.

    Gloo alone: a receive by NCCL is a kernel that holds cores until the owner sends, and torch ends the process when an
    NCCL peer is gone.

    Args:
        group: A gloo group of all ranks that nothing else uses: `torch.distributed.new_group(backend="gloo")`. Ranks
            are those within the group; a rank that died cannot come back.
        device: Index of the CUDA device of own device memory; None: host memory only.

    Raises:
        TransportError: The group is not of gloo.

    Threads:
        One at a time. It starts two of its own for each peer; they end when both sides have closed.
    """

    def __init__(self, group: Any, *, device: int | None = None) -> None:
        if "gloo" not in str(group.name()).lower():
            raise TransportError(
                f"`group` (={group.name()!r}) must be of gloo; make one with new_group(backend='gloo')"
            )
        super().__init__(
            Caps(
                name="torch_distributed",
                one_sided=False,
                owner_must_progress=True,
                devices=frozenset({"cpu"} if device is None else {"cpu", "cuda"}),
                stops_late_writes=True,
                max_batch=65536,
                sm_free=None,
            )
        )
        self._group = group
        self._rank, self._size = int(group.rank()), int(group.size())
        self._buffers = _Buffers(device)
        self._session = _Session(_Served(int(self._identity, 16) >> 1, self._buffers), group)
        weakref.finalize(self, self._session.leave)

    def _register(self, regions: Any) -> dict[str, Any]:
        address = np.array([region.address for region in regions], dtype=np.int64)
        nbytes = np.array([region.nbytes for region in regions], dtype=np.int64)
        on_device = np.array([region.device != "cpu" for region in regions], dtype=np.bool_)
        self._session.served.memory = _Memory(self._epoch + 1, address, nbytes, on_device)
        return {"rank": self._rank}

    def _attach(self, peer: Peer, former: Peer | None) -> None:
        if peer.extra.get("rank") != peer.rank or peer.rank >= self._size:
            raise TransportError(
                f"`rank` (={peer.rank}) must be the rank in the group of {self._size} that exported the blob "
                f"(={peer.extra.get('rank')})",
                rank=peer.rank,
            )
        courier = self._session.couriers.get(peer.rank)
        if courier is None:
            line: _Line = _Short(self._session.served)
            if peer.rank != self._rank:
                line = _Wire(self._session.ends[peer.rank])
            courier = self._session.couriers[peer.rank] = _Courier(peer.rank, line, self._buffers)
        elif courier.dead:
            raise TransportError(f"rank {peer.rank} cannot be reached: {courier.dead}", rank=peer.rank)

    def _start(self, peer: Peer, spans: Spans, stream: Any) -> Ticket:
        on_device = np.array([region.device != "cpu" for region in self._regions], dtype=np.bool_)
        ticket = _Fetch(peer, spans, on_device)
        self._session.couriers[peer.rank].take(ticket)
        return ticket

    def _progress(self, ticket: Ticket) -> None:
        dead = self._session.couriers[ticket.rank].dead
        if isinstance(ticket, _Fetch) and (ticket.unwanted or dead) and ticket.writing.acquire(blocking=False):
            ticket.finish(Status(ReadState.LOST_PEER, dead) if dead else Status(ReadState.FAILED))
            ticket.writing.release()

    def _cancel(self, ticket: Ticket) -> None:
        self._progress(ticket)

    def _shut(self) -> None:
        self._session.leave()


class _Session:
    """The threads of one transport, which outlive it until the peers have answered the farewell."""

    def __init__(self, served: _Served, group: Any) -> None:
        self.served = served
        self.couriers: dict[int, _Courier] = {}
        own = int(group.rank())
        self.ends = {rank: _PeerEnd(group, rank) for rank in range(int(group.size())) if rank != own}
        self.threads = [_thread(f"eplb-serve-{rank}", _serve, end, served) for rank, end in self.ends.items()]
        _SESSIONS[:] = [session for session in _SESSIONS if any(thread.is_alive() for thread in session.threads)]
        _SESSIONS.append(self)

    def leave(self) -> None:
        """Give and ask nothing from now on."""
        self.served.memory = None
        for courier in self.couriers.values():
            courier.jobs.put(None)
        for end in self.ends.values():
            end.say_bye()


_SESSIONS: list[_Session] = []


@atexit.register
def _leave_all() -> None:
    """A thread that comes back from gloo while the interpreter goes away would take the process down."""
    for session in _SESSIONS:
        session.leave()
    until = time.monotonic() + 2.0
    for session in _SESSIONS:
        for thread in (*session.threads, *(courier.thread for courier in session.couriers.values())):
            thread.join(max(until - time.monotonic(), 0.0))


class _PeerEnd:
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
            return self.group.send([message], self.rank, _REQUEST)

    def say_bye(self, gone: str = "") -> None:
        """Once. Not waited for: it is sent when the peer takes it."""
        with self._lock:
            self.gone = self.gone or gone
            if not self._said_bye:
                self._said_bye = True
                message = torch.zeros(5 + 3 * _MOST_SPANS, dtype=torch.int64)
                with contextlib.suppress(RuntimeError):
                    self._sent += [message, self.group.send([message], self.rank, _REQUEST)]


class _Memory(NamedTuple):
    epoch: int
    address: IntArray
    nbytes: IntArray
    on_device: BoolArray


class _Buffers:
    """Host memory that messages go through, and the copies between it and where experts live."""

    def __init__(self, device: int | None) -> None:
        self.device = device
        if device is not None:
            self.cuda = _cuda.runtime()
            with self.cuda.on(device):
                self.stream = self.cuda.new_stream()

    def new(self) -> torch.Tensor:
        """Room for one answer."""
        return torch.empty(_HEAD + _CHUNK, dtype=torch.uint8, pin_memory=self.device is not None)

    def move(self, dst: IntArray, src: IntArray, nbytes: IntArray, on_device: BoolArray) -> None:
        """Copy spans of which one side is in a buffer; `on_device`: the other side is not host memory."""
        host = ~on_device
        if host.any():
            moved = _copies.copy(dst[host], src[host], nbytes[host])
            if moved != int(nbytes[host].sum()):
                raise OSError(f"{moved} of {int(nbytes[host].sum())} bytes were copied; memory was unmapped")
        if on_device.any() and self.device is not None:
            with self.cuda.on(self.device):
                spans = dst[on_device], src[on_device], nbytes[on_device]
                self.cuda.copy(*spans, self.stream, overlap=False, batched=False)
                self.cuda.call("cudaStreamSynchronize", self.stream)


class _Served:
    """What this rank's threads give to peers."""

    def __init__(self, identity: int, buffers: _Buffers) -> None:
        self.identity = identity
        self.buffers = buffers
        self.memory: _Memory | None = None

    def answer(self, request: IntArray, buffer: torch.Tensor) -> torch.Tensor:
        """Copy what was asked for behind the head of `buffer`, which says whether that went well."""
        total = int(request[4])
        code = _OUTSIDE
        if 0 <= total <= _CHUNK and 0 <= request[3] <= _MOST_SPANS:
            code = self._collect(request, buffer, total)
        else:
            total = 0
        buffer[:8].view(torch.int64)[0] = code
        return buffer[: _HEAD + total]

    def _collect(self, request: IntArray, buffer: torch.Tensor, total: int) -> int:
        memory = self.memory
        if memory is None or request[1] != self.identity or request[2] != memory.epoch:
            return _CLOSED if memory is None else _STALE
        region, offset, nbytes = request[5 : 5 + 3 * _MOST_SPANS].reshape(3, -1)[:, : request[3]]
        if ((region < 0) | (region >= len(memory.address))).any():
            return _OUTSIDE
        size = memory.nbytes[region]
        inside = (offset >= 0) & (nbytes >= 0) & (offset <= size) & (nbytes <= size - offset)
        if not inside.all() or int(nbytes.sum()) != total:
            return _OUTSIDE
        at = buffer.data_ptr() + _HEAD + np.cumsum(nbytes) - nbytes
        try:
            self.buffers.move(at, memory.address[region] + offset, nbytes, memory.on_device[region])
        except (OSError, _cuda.CudaError):
            return _UNREADABLE
        return _OK


class _Fetch(Ticket):
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
        words = np.zeros(5 + 3 * _MOST_SPANS, dtype=np.int64)
        count = len(spans.nbytes)
        words[:5] = _READ, int(self.peer.identity, 16) >> 1, self.peer.epoch, count, spans.nbytes.sum()
        offset = spans.src - self.peer.address[spans.src_region]
        words[5:].reshape(3, -1)[:, :count] = spans.src_region, offset, spans.nbytes
        return words

    def deliver(self, spans: Spans, buffer: torch.Tensor, buffers: _Buffers) -> None:
        """From the buffer to the destination, unless it was given back."""
        with self.writing:
            if not self.status.state.is_end and not self.unwanted:
                at = buffer.data_ptr() + _HEAD + np.cumsum(spans.nbytes) - spans.nbytes
                try:
                    buffers.move(spans.dst, at, spans.nbytes, self.on_device[spans.dst_region])
                except (OSError, _cuda.CudaError) as error:
                    self.finish(Status(ReadState.FAILED, f"rank {self.rank}: own memory cannot be written: {error}"))


class _Line(Protocol):
    """How requests reach a peer. Answers come in the order of requests."""

    @property
    def dead(self) -> str:
        """Why no answer will come, or nothing."""
        ...

    def ask(self, request: IntArray) -> None: ...

    def hear(self, buffer: torch.Tensor) -> None:
        """Wait for an answer, head and bytes."""
        ...


class _Wire:
    """Through the group."""

    def __init__(self, end: _PeerEnd) -> None:
        self.end = end
        self.asked: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()

    @property
    def dead(self) -> str:
        return self.end.dead

    def ask(self, request: IntArray) -> None:
        message = torch.from_numpy(request)
        self.asked.put((message, self.end.ask(message)))  # alive until answered

    def hear(self, buffer: torch.Tensor) -> None:
        self.end.group.recv([buffer], self.end.rank, _ANSWER).wait(_LONG)
        self.asked.get()


class _Short:
    """Within this rank."""

    dead = ""

    def __init__(self, served: _Served) -> None:
        self.served = served
        self.asked: queue.SimpleQueue[IntArray] = queue.SimpleQueue()

    def ask(self, request: IntArray) -> None:
        self.asked.put(request)

    def hear(self, buffer: torch.Tensor) -> None:
        self.served.answer(self.asked.get(), buffer)


class _Courier:
    """The thread that makes the reads from one peer, one after the other, two requests ahead."""

    def __init__(self, rank: int, line: _Line, buffers: _Buffers) -> None:
        self.rank = rank
        self.line = line
        self.broken = ""
        self.buffers = buffers
        self.rooms: list[torch.Tensor] = []
        self.jobs: queue.SimpleQueue[_Fetch | None] = queue.SimpleQueue()
        self.thread = _thread(f"eplb-read-{rank}", self.run)

    @property
    def dead(self) -> str:
        """Why no read will end by itself any more, or nothing."""
        return self.broken or (self.line.dead and f"rank {self.rank} is gone: {self.line.dead}")

    def take(self, ticket: _Fetch) -> None:
        self.jobs.put(ticket)
        if self.dead:  # perhaps nobody looks into the queue any more
            ticket.finish(Status(ReadState.LOST_PEER, self.dead))

    def run(self) -> None:
        while (ticket := self.jobs.get()) is not None:
            try:
                if not self.broken:
                    self.fetch(ticket)
            except Exception as error:
                self.broken = f"rank {self.rank} is gone: {str(error).splitlines()[0][:200]}"
            if self.broken:
                ticket.finish(Status(ReadState.LOST_PEER, self.broken))

    def fetch(self, ticket: _Fetch) -> None:
        self.rooms = self.rooms or [self.buffers.new() for _ in range(2)]
        asked: list[Spans] = []
        codes: list[int] = []

        def hear() -> None:
            turn = len(codes)
            room = self.rooms[turn % 2][: _HEAD + int(asked[turn].nbytes.sum())]
            self.line.hear(room)
            codes.append(int(room[:8].view(torch.int64)[0]))
            if not any(codes):
                ticket.deliver(asked[turn], room, self.buffers)

        for spans in _copies.portions(ticket.spans, _CHUNK, _MOST_SPANS):
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


def _serve(end: _PeerEnd, served: _Served) -> None:
    """Answer one peer until it says that it is leaving, or is gone."""
    group, rank = end.group, end.rank
    rooms: list[torch.Tensor] = []
    sent: list[Any] = [None, None]
    request = torch.empty(5 + 3 * _MOST_SPANS, dtype=torch.int64)
    turn = 0
    try:
        while True:
            group.recv([request], rank, _REQUEST).wait(_LONG)
            if request[0] == _BYE:
                end.say_bye("it has closed its transport")
                return
            rooms = rooms or [served.buffers.new() for _ in range(2)]
            turn ^= 1
            if sent[turn] is not None:
                sent[turn].wait(_LONG)
            sent[turn] = group.send([served.answer(request.numpy(), rooms[turn])], rank, _ANSWER)
    except RuntimeError as error:
        end.dead = str(error).splitlines()[0][:200]
        end.say_bye(end.dead)


def _thread(name: str, function: Any, *args: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, name=name, daemon=True)
    thread.start()
    return thread
