"""All ranks in one process: for tests, notebooks and engines that keep several ranks in one process."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Mapping
from typing import Any

from eplb_core.errors import TransportError
from eplb_core.loading.install.copies import copy_spans
from eplb_core.loading.transport import ReadState, Region, Status
from eplb_core.loading.transports.base import DONE, BaseTransport, Peer, Ticket
from eplb_core.loading.transports.batches import Spans

_OPEN: weakref.WeakValueDictionary[str, LocalCopy] = weakref.WeakValueDictionary()
_PROCESS = secrets.token_hex(8)


class LocalCopy(BaseTransport):
    """Copies inside of this process, done when `read` returns. Host memory only.

    Example:
        >>> import numpy as np, torch
        >>> from eplb_core import ReadBatch, Region
        >>> source, target = torch.arange(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
        >>> ranks = [LocalCopy(), LocalCopy()]
        >>> blobs = [
        ...     rank.export([Region(tensor.data_ptr(), 4, "cpu")])
        ...     for rank, tensor in zip(ranks, (source, target))
        ... ]
        >>> ranks[1].connect(0, blobs[0])
        >>> ticket = ranks[1].read(0, ReadBatch(*(np.array([x]) for x in (0, 1, 0, 2, 2))))
        >>> ranks[1].poll(ticket).state.name, target.tolist()
        ('DONE', [0, 2, 3, 0])
    """

    def __init__(self) -> None:
        super().__init__("local_copy", "cpu", max_batch=1 << 20)
        _OPEN[self._identity] = self

    def _register(self, regions: tuple[Region, ...]) -> Mapping[str, Any]:
        return {"process": _PROCESS}

    def _attach(self, peer: Peer, former: Peer | None) -> None:
        if peer.extra.get("process") != _PROCESS:
            raise TransportError(f"rank {peer.rank} must be in this process; use SharedMemory", rank=peer.rank)
        if peer.identity not in _OPEN:
            raise TransportError(f"the transport of rank {peer.rank} is gone; connect to a new one", rank=peer.rank)

    def _start(self, peer: Peer, spans: Spans, stream: Any) -> Ticket:
        ticket = Ticket(peer.rank, spans)
        self._copy(ticket, peer)
        return ticket

    def _copy(self, ticket: Ticket, peer: Peer) -> None:
        owner = _OPEN.get(peer.identity)
        if owner is None or owner._closed:
            ticket.finish(Status(ReadState.LOST_PEER, f"rank {peer.rank} has closed its transport"))
            return
        spans = ticket.spans
        copy_spans(spans.dst, spans.src, spans.nbytes)
        ticket.finish(DONE)


class DeferredCopy(LocalCopy):
    """As `LocalCopy`, but a read copies when its owner is told to: for tests of what comes before, late or never.

    Threads:
        `complete`, `fail` and `waiting` from any thread, beside the one that reads and polls.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[tuple[Ticket, Peer]] = []

    @property
    def waiting(self) -> int:
        """Reads that were begun and neither completed nor failed, given up on or not."""
        return len(self._waiting)

    def complete(self, count: int = 1 << 30) -> int:
        """Copy for the first `count` waiting reads, those given up on too: late writes; how many there were."""
        ready = [self._waiting.pop(0) for _ in range(min(count, len(self._waiting)))]
        for ticket, peer in ready:
            self._copy(ticket, peer)
        return len(ready)

    def fail(self, reason: str, *, lost: bool = False) -> int:
        """End all waiting reads without a byte; how many there were."""
        ready = [self._waiting.pop(0) for _ in range(len(self._waiting))]
        for ticket, _ in ready:
            ticket.finish(Status(ReadState.LOST_PEER if lost else ReadState.FAILED, reason))
        return len(ready)

    def _start(self, peer: Peer, spans: Spans, stream: Any) -> Ticket:
        ticket = Ticket(peer.rank, spans)
        self._waiting.append((ticket, peer))
        return ticket
