"""Reads over process groups of torch: two-sided, so every rank serves its peers. For where nothing better is there."""

from __future__ import annotations

import atexit
import contextlib
import time
import weakref
from typing import Any

import numpy as np

from eplb_core.errors import TransportError
from eplb_core.loading.transport import ReadState, Status
from eplb_core.loading.transports.base import BaseTransport, Peer, Ticket
from eplb_core.loading.transports.batches import Spans
from eplb_core.loading.transports.two_sided.carriers import Buffers, Payload, PeerEnd
from eplb_core.loading.transports.two_sided.exchange import (
    Courier,
    Fetch,
    Memory,
    Served,
    Short,
    Wire,
    serve,
    start_thread,
)

_MEET_S = 60.0
"""What the first message of a pair may take."""


class TorchDistributed(BaseTransport):
    """Sends requests to the owner, whose threads copy the bytes out and send them back.

    The owner's process must run, and its threads spend time on the copies. In return no byte arrives late: the reader
    itself writes bytes to their destination, so an abandoned read is DRAINED at once, and reads from a dead peer end
    as LOST_PEER.

    Without `payload` all bytes, of device memory too, go through gloo and host buffers on both sides. With `payload`
    requests go by gloo, and bytes go from device to device by NCCL. Sends and receives of NCCL are kernels that hold
    cores until both sides run, so a receive begins only after the owner has answered that it sends. They can still
    deadlock with kernels that need the whole device. If a peer is gone or stuck while they run, all NCCL messages of
    this rank are aborted, and all its reads end as LOST_PEER: make a new transport of the live ranks.

    Args:
        group: A gloo group of all ranks that nothing else uses: `torch.distributed.new_group(backend="gloo")`. Ranks
            are those within the group; a rank that died cannot come back.
        device: Index of the CUDA device of own device memory; None: host memory only.
        payload: Two more groups of the same ranks that nothing else uses, of NCCL, for bytes on their way to higher and
            to lower ranks; `device` is needed. Start the processes with TORCH_NCCL_ASYNC_ERROR_HANDLING=0, or torch
            ends a process whose peer is gone. Groups of gloo carry host memory, for tests.

    Raises:
        TransportError: A group is of another kind or other ranks.

    Threads:
        One at a time. It starts two of its own for each peer; they end when both sides have closed. With `payload`,
        `connect` waits for the first message of the pair.
    """

    def __init__(self, group: Any, *, device: int | None = None, payload: tuple[Any, Any] | None = None) -> None:
        if _kind(group) != "gloo":
            raise TransportError(
                f"`group` (={group.name()!r}) must be of gloo; make one with new_group(backend='gloo')"
            )
        self._rank, self._size = int(group.rank()), int(group.size())
        kind = "" if payload is None else self._check_payload(group, payload, device)
        super().__init__(
            f"torch_distributed {kind}".strip(),
            *(["cpu"] if device is None else ["cpu", "cuda"]),
            max_batch=65536,
            one_sided=False,
            owner_must_progress=True,
            sm_free=False if kind == "nccl" else None,
        )
        self._payload = None if payload is None else Payload(payload, self._rank, device if kind == "nccl" else None)
        self._buffers = Buffers(device, kind == "nccl")
        served = Served(int(self._identity, 16) >> 1, self._buffers)
        self._session = _Session(served, group, self._payload)
        weakref.finalize(self, self._session.leave)

    def _check_payload(self, group: Any, payload: tuple[Any, Any], device: int | None) -> str:
        """Of which kind they are."""
        groups = [group, *payload]
        kinds = [_kind(other) for other in payload]
        if len({id(other) for other in groups}) < 3 or kinds not in (["nccl"] * 2, ["gloo"] * 2):
            raise TransportError(f"`payload` (={kinds}) must be two more groups, both of nccl")
        ranks = [(int(other.rank()), int(other.size())) for other in payload]
        if ranks != [(self._rank, self._size)] * 2:
            raise TransportError(
                f"`payload` (rank and size {ranks}) must be of the same ranks as `group` ({self._rank}, {self._size})"
            )
        if (kinds[0] == "nccl") != (device is not None):
            raise TransportError(f"`device` (={device}) must be given with a payload of nccl, and with no other")
        return kinds[0]

    def _register(self, regions: Any) -> dict[str, Any]:
        address = np.array([region.address for region in regions], dtype=np.int64)
        nbytes = np.array([region.nbytes for region in regions], dtype=np.int64)
        on_device = np.array([region.device != "cpu" for region in regions], dtype=np.bool_)
        self._session.served.memory = Memory(self._epoch + 1, address, nbytes, on_device)
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
            line: Wire | Short = Short(self._session.served)
            if peer.rank != self._rank:
                line = Wire(self._session.ends[peer.rank], self._payload)
            courier = self._session.couriers[peer.rank] = Courier(peer.rank, line, self._buffers, self._payload)
        if not courier.has_met.wait(_MEET_S):
            raise TransportError(f"rank {peer.rank} did not answer within {_MEET_S:g} s", rank=peer.rank)
        if courier.dead:
            raise TransportError(f"rank {peer.rank} cannot be reached: {courier.dead}", rank=peer.rank)

    def _start(self, peer: Peer, spans: Spans, stream: Any) -> Ticket:
        on_device = np.array([region.device != "cpu" for region in self._regions], dtype=np.bool_)
        ticket = Fetch(peer.rank, spans, peer, on_device)
        self._session.couriers[peer.rank].jobs.put(ticket)
        return ticket

    def _progress(self, ticket: Ticket) -> None:
        dead = self._session.couriers[ticket.rank].dead
        if isinstance(ticket, Fetch) and (ticket.unwanted or dead) and ticket.writing.acquire(blocking=False):
            ticket.finish(Status(ReadState.LOST_PEER, dead) if dead else Status(ReadState.FAILED))
            ticket.writing.release()

    def _cancel(self, ticket: Ticket) -> None:
        self._progress(ticket)

    def _shut(self) -> None:
        self._session.leave()


class _Session:
    """The threads of one transport, which outlive it until the peers have answered the farewell."""

    def __init__(self, served: Served, group: Any, payload: Payload | None) -> None:
        self.served = served
        self.couriers: dict[int, Courier] = {}
        own = int(group.rank())
        self.ends = {rank: PeerEnd(group, rank) for rank in range(int(group.size())) if rank != own}
        self.threads = [
            start_thread(f"eplb-serve-{rank}", serve, end, served, payload) for rank, end in self.ends.items()
        ]
        _SESSIONS.append(self)
        for session in [each for each in _SESSIONS if not any(thread.is_alive() for thread in each.threads)]:
            with contextlib.suppress(ValueError):  # one at a time: other threads make sessions too
                _SESSIONS.remove(session)

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


def _kind(group: Any) -> str:
    name = str(group.name()).lower()
    return next((kind for kind in ("gloo", "nccl") if kind in name), name)
