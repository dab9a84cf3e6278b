"""Reads by Mooncake's transfer engine: TCP or RDMA between hosts. Extra `[mooncake]`."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, cast

from eplb_core.errors import TransportError
from eplb_core.loading.transport import ReadState, Region, Status
from eplb_core.loading.transports.base import DONE, BaseTransport, Peer, Ticket
from eplb_core.loading.transports.batches import Spans

_HOST_ONLY = "mooncake-transfer-engine-non-cuda"
_UNDRAINED: set[Ticket] = set()
"""Reads of closed transports that may still write; kept with their engines."""


class Mooncake(BaseTransport):
    """Reads through a transfer engine of its own; each operation is a transfer of its own.

    A Mooncake batch does not report reliably when it ends. Polled without waiting, it says "complete" as soon as its
    first piece is. An abandoned batch keeps most of its pieces queued, and they arrive when a stopped owner runs again
    (measured: 32 pieces "complete" with bytes missing; 87% of the bytes of a failed read arrived later). Transfers of
    one piece report their end correctly, so each piece is a transfer, and a read ends when all of them have.

    A dead peer ends a read within about a second. A stopped one ends it after MC_TCP_PROGRESS_TIMEOUT_SEC (30 unless
    set) for each four pieces; deadlines are the caller's.

    The engine listens on all addresses and lets anyone who can connect read and write what is registered: run it in a
    network of your own.

    Args:
        host: Address under which peers reach this process.
        protocol: Mooncake's: "tcp" or "rdma".
        device: Names of RDMA devices, "" for all.
        timeout: Seconds that `connect` waits for a peer's answer.

    Raises:
        TransportError: Mooncake, or a library that it needs, is not installed, or it does not start.

    Threads:
        One at a time. The engine's own threads move the bytes, the owner's too.
    """

    def __init__(self, host: str, *, protocol: str = "tcp", device: str = "", timeout: float = 10.0) -> None:
        if protocol not in ("tcp", "rdma"):  # Mooncake takes any word
            raise TransportError(f"`protocol` (={protocol!r}) must be 'tcp' or 'rdma'")
        engine_type = _import()
        kinds = ["cpu"] if any(metadata.distributions(name=_HOST_ONLY)) else ["cpu", "cuda"]
        super().__init__("mooncake", *kinds, max_batch=1024, owner_must_progress=True, stops_late_writes=False)
        self._engine = engine_type()
        self._timeout = timeout
        code = self._engine.initialize(host, "P2PHANDSHAKE", protocol, device)
        if code:
            raise TransportError(f"Mooncake cannot start on {host!r} with {protocol!r}, {device!r}: code {code}")
        self._session = f"{host}:{self._engine.get_rpc_port()}"
        self._sessions: dict[int, str] = {}
        self._registered: set[Region] = set()

    def _register(self, regions: tuple[Region, ...]) -> Mapping[str, Any]:
        wanted = {region for region in regions if region.nbytes}
        if not self._pending:  # otherwise a later export does it
            self._unregister(self._registered - wanted)
        for region in sorted(wanted - self._registered, key=lambda region: region.address):
            code = self._engine.register_memory(region.address, region.nbytes)
            if code:
                raise TransportError(
                    f"Mooncake cannot register {region.nbytes} bytes at {region.address:#x} on {region.device}: "
                    f"code {code}; regions must not overlap"
                )
            self._registered.add(region)
        return {"session": self._session}

    def _unregister(self, regions: set[Region]) -> None:
        for region in sorted(regions, key=lambda region: region.address):
            self._engine.unregister_memory(region.address)
            self._registered.discard(region)

    def _attach(self, peer: Peer, former: Peer | None) -> None:
        """Meet the peer now, where there is time, and not at the first read."""
        session = str(peer.extra.get("session"))
        answer: list[int] = []

        def meet() -> None:
            answer.append(self._engine.get_first_buffer_address(session))

        if len(peer.address) and session != self._session:
            thread = threading.Thread(target=meet, name="eplb-mooncake-connect", daemon=True)
            thread.start()
            thread.join(self._timeout)
            if not answer:
                raise TransportError(
                    f"rank {peer.rank} at {session} did not answer within {self._timeout:g} s", rank=peer.rank
                )
        self._sessions[peer.rank] = session

    def _detach(self, peer: Peer) -> None:
        self._sessions.pop(peer.rank, None)

    def _start(self, peer: Peer, spans: Spans, stream: Any) -> Ticket:
        ticket = _Transfers(peer.rank, spans, self._engine)
        session = self._sessions[peer.rank]
        for dst, src, nbytes in zip(spans.dst.tolist(), spans.src.tolist(), spans.nbytes.tolist(), strict=True):
            number = self._engine.batch_transfer_async_read(session, [dst], [src], [nbytes])
            if not number:
                ticket.failed = f"rank {peer.rank} at {session} cannot be reached"
                break
            ticket.numbers.append(number)
        ticket.numbers.reverse()
        ticket.look()
        return ticket

    def _progress(self, ticket: Ticket) -> None:
        cast(_Transfers, ticket).look()
        if ticket.status.state.is_end:
            _UNDRAINED.discard(ticket)

    def _shut(self) -> None:
        _UNDRAINED.update(self._pending)
        if not self._pending:
            self._unregister(set(self._registered))


@dataclass(slots=True, eq=False)
class _Transfers(Ticket):
    """A read of one transfer for each operation."""

    engine: Any
    numbers: list[int] = field(default_factory=list)
    """Of transfers that are not over, the first one last. Asking for one that is over would be an error."""
    failed: str = ""
    stuck: bool = False

    def look(self) -> None:
        """Poll up to the first transfer that is not over; the read is over when all are."""
        while self.numbers and not self.stuck:
            code = self.engine.transfer_check_status(self.numbers[-1])
            if code == 0:
                return
            if code == -2:  # timed out inside of the engine, which does not say whether it can still write
                self.stuck = True
                return
            self.numbers.pop()
            if code < 0:
                self.failed = f"rank {self.rank}: Mooncake ended a transfer with code {code}; it may be gone"
        if not self.numbers:
            self.finish(Status(ReadState.FAILED, self.failed) if self.failed else DONE)


def _import() -> Any:
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise TransportError(
            f'Mooncake cannot be imported ({error}); install "eplb-core[mooncake]" or its wheel for your CUDA, and '
            "the system's package libibverbs1"
        ) from error
    return TransferEngine
