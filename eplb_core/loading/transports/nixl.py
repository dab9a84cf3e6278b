"""Reads by NIXL: over UCX between hosts (RDMA, TCP) and within one, host and device memory. Extra `[nixl]`."""

from __future__ import annotations

import base64
import contextlib
import importlib
import importlib.util
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from eplb_core._arrays import IntArray
from eplb_core.errors import TransportError
from eplb_core.loading.transport import ReadState, Region, Status
from eplb_core.loading.transports.base import DONE, BaseTransport, Peer, Ticket
from eplb_core.loading.transports.batches import Spans

_KINDS = {"cpu": "DRAM", "cuda": "VRAM"}
_UNDRAINED: set[Nixl] = set()
"""Closed transports whose abandoned reads may still write; kept so that we learn when those end."""
_LOOK_S = 0.5
"""Seconds between two polls of a closed transport's reads."""


class Nixl(BaseTransport):
    """One-sided reads through a NIXL agent of its own. UCX chooses what it uses, or UCX_TLS and UCX_NET_DEVICES do.

    An abandoned read is never released: NIXL reports the release at once, and yet the bytes arrive (measured: 97-99%
    of them, when a stopped owner ran again). The read stays ABANDONED until NIXL reports its end. Whether the owner
    must run depends on what UCX uses; over TCP it must, and `caps` assumes that. NIXL also reads memory that its owner
    has deregistered, as long as the memory exists: exchange new blobs before memory is freed.

    An agent's progress thread keeps a core busy. It ends with `close`, or, if abandoned reads are left then, with the
    last of these, which a thread checks every half second. Reads end when the peer dies, but not while it is stopped.

    Args:
        backend: NIXL's back-end.

    Raises:
        TransportError: NIXL is not installed, or has no such back-end.

    Threads:
        One at a time. NIXL's own progress thread moves the bytes; within one host UCX may copy inside of `read`,
        which then takes as long, without the interpreter's lock.
    """

    def __init__(self, backend: str = "UCX") -> None:
        super().__init__("nixl", "cpu", "cuda", max_batch=1024, owner_must_progress=True, stops_late_writes=False)
        self._api = _import()
        try:
            config = self._api.nixl_agent_config(backends=[backend])
            self._agent = self._api.nixl_agent(f"eplb-{self._identity}", config)
        except Exception as error:
            raise TransportError(f"NIXL cannot start its back-end {backend!r}: {error!r}") from error
        if backend not in self._agent.backends:
            raise TransportError(f"`backend` (={backend!r}) must be one of NIXL's: {self._agent.get_plugin_list()}")
        self._looking = threading.Lock()
        self._registered: set[Region] = set()
        self._names: dict[int, str] = {}
        """NIXL's name of each connected rank's agent."""
        self._leaving: set[str] = set()
        """Agents to be forgotten once no read from them is pending."""

    def _register(self, regions: tuple[Region, ...]) -> Mapping[str, Any]:
        wanted = {region for region in regions if region.nbytes}
        try:
            for kind, rows in _rows_by_kind(wanted - self._registered):
                self._agent.register_memory(rows, kind)
            metadata = self._agent.get_agent_metadata() if wanted else b""
        except Exception as error:
            raise TransportError(f"NIXL cannot register {len(regions)} regions: {error!r}") from error
        outdated = self._registered - wanted
        self._registered |= wanted
        if not self._pending:  # otherwise a later export, or `close`, does it
            self._unregister(outdated)
        return {"metadata": base64.b64encode(metadata).decode()}

    def _unregister(self, regions: Iterable[Region]) -> None:
        for kind, rows in _rows_by_kind(regions):
            self._agent.deregister_memory(self._agent.get_reg_descs(rows, kind))
        self._registered -= set(regions)

    def _attach(self, peer: Peer, former: Peer | None) -> None:
        if peer.identity == self._identity:
            self._names[peer.rank] = self._agent.name
            return
        try:
            metadata = base64.b64decode(peer.extra["metadata"], validate=True)
            name = _text(self._agent.add_remote_agent(metadata)) if metadata else ""
        except Exception as error:
            raise TransportError(f"NIXL cannot connect to rank {peer.rank}: {error!r}", rank=peer.rank) from error
        if former is not None and former.identity != peer.identity:
            self._leaving.add(self._names[peer.rank])
        self._leaving.discard(name)
        self._names[peer.rank] = name
        self._sweep()

    def _detach(self, peer: Peer) -> None:
        self._leaving.add(self._names.pop(peer.rank))
        self._sweep()

    def _sweep(self) -> None:
        """Forget agents that left and from which nothing is read any more."""
        busy = {ticket.name for ticket in self._pending if isinstance(ticket, _Transfer)}
        for name in self._leaving - busy - {self._agent.name, ""}:
            self._quietly(self._agent.remove_remote_agent, name)
        self._leaving &= busy

    def _start(self, peer: Peer, spans: Spans, stream: Any) -> Ticket:
        ticket = _Transfer(peer.rank, spans, self._names[peer.rank])
        try:
            for kinds, local, remote in self._descriptors(peer, spans):
                own, theirs = (
                    self._agent.get_xfer_descs(rows, _KINDS[kind])
                    for rows, kind in zip((local, remote), kinds, strict=True)
                )
                handle = self._agent.initialize_xfer("READ", own, theirs, ticket.name)
                ticket.handles.append(handle)
                if self._agent.transfer(handle) == "DONE":
                    ticket.handles.remove(handle)
        except Exception as error:
            ticket.problem = self._ending(peer.rank, error)
            if not ticket.handles and ticket.problem.state is ReadState.FAILED:
                raise TransportError(f"NIXL cannot read from rank {peer.rank}: {error!r}", rank=peer.rank) from error
        ticket.look(self._agent, self._ending)
        return ticket

    def _descriptors(self, peer: Peer, spans: Spans) -> Iterator[tuple[tuple[str, str], IntArray, IntArray]]:
        """Nx3 address, bytes, device, one pair of lists for each pair of kinds of memory."""
        own_kind, own_number = _devices([region.device for region in self._regions])
        kind, number = _devices(peer.devices)
        at = spans.dst_region, spans.src_region
        pairs = np.stack([own_kind[at[0]], kind[at[1]]], axis=1)
        for pair in np.unique(pairs, axis=0):
            here = (pairs == pair).all(axis=1)
            local = np.stack([spans.dst[here], spans.nbytes[here], own_number[at[0]][here]], axis=1)
            remote = np.stack([spans.src[here], spans.nbytes[here], number[at[1]][here]], axis=1)
            yield (str(pair[0]), str(pair[1])), local, remote

    def poll(self, ticket: Ticket) -> Status:
        """Say how far a read is."""
        with self._looking:  # NIXL's agents take one thread at a time, and `_drain` has one of its own
            return super().poll(ticket)

    def _progress(self, ticket: Ticket) -> None:
        cast(_Transfer, ticket).look(self._agent, self._ending)
        if ticket.status.state.is_end:
            self._end(ticket)
            if self in _UNDRAINED and not self._pending:
                self._let_go()
            elif self._leaving and not self._closed:
                self._sweep()

    def _ending(self, rank: int, error: Exception) -> Status:
        lost = ("nixlRemoteDisconnectError", "nixlCancelledError")
        state = ReadState.LOST_PEER if type(error).__name__ in lost else ReadState.FAILED
        return Status(state, f"rank {rank}: {error!r}")

    def _shut(self) -> None:
        if not self._pending:
            self._let_go()
            return
        _UNDRAINED.add(self)
        with contextlib.suppress(RuntimeError):  # no more threads: it stays until somebody polls
            threading.Thread(target=self._drain, name="eplb-nixl-drain", daemon=False).start()

    def _drain(self) -> None:
        """Poll what is left, since no caller may.

        No daemon: one that is within NIXL when the interpreter ends takes the process down.
        """
        while self._pending and threading.main_thread().is_alive():
            time.sleep(_LOOK_S)
            for ticket in list(self._pending):
                self.poll(ticket)

    def _let_go(self) -> None:
        """Release the agent: nothing is written any more."""
        self._quietly(self._unregister, set(self._registered))
        _UNDRAINED.discard(self)
        self._agent = None

    def _quietly(self, function: Any, *args: Any) -> None:
        """Call, and accept that NIXL has released it by itself, such as a peer that died."""
        bind = self._api.nixlBind
        with contextlib.suppress(bind.nixlNotFoundError, bind.nixlRemoteDisconnectError):
            function(*args)


@dataclass(slots=True, eq=False)
class _Transfer(Ticket):
    """A read of one handle for each pair of kinds of memory."""

    name: str
    handles: list[Any] = field(default_factory=list)
    """Those that are not over."""
    problem: Status | None = None

    def look(self, agent: Any, ending: Any) -> None:
        """Ask for each handle; the read is over when all are."""
        for handle in list(self.handles):
            try:
                state = agent.check_xfer_state(handle)
                if state == "PROC":
                    continue
                if state != "DONE":
                    raise RuntimeError(f"NIXL says {state}")
            except Exception as error:
                self.problem = self.problem or ending(self.rank, error)
            self.handles.remove(handle)
        if not self.handles:
            self.finish(self.problem or DONE)


def _rows_by_kind(regions: Iterable[Region]) -> Iterator[tuple[str, list[tuple[int, int, int, str]]]]:
    rows: dict[str, list[tuple[int, int, int, str]]] = {}
    for region in sorted(regions, key=lambda region: (region.device, region.address, region.nbytes)):
        kind, _, number = region.device.partition(":")
        rows.setdefault(_KINDS[kind], []).append((region.address, region.nbytes, int(number or 0), ""))
    yield from rows.items()


def _devices(names: Iterable[str]) -> tuple[npt.NDArray[np.str_], IntArray]:
    parts = [name.partition(":") for name in names]
    return np.array([part[0] for part in parts]), np.array([int(part[2] or 0) for part in parts], dtype=np.int64)


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)


def _import() -> Any:
    """NIXL's wheels have a name for each CUDA; the one called `nixl` chooses among them."""
    names = [name for name in ("nixl", "nixl_cu13", "nixl_cu12") if importlib.util.find_spec(name)]
    try:
        return importlib.import_module(f"{(names or ['nixl'])[0]}._api")
    except ImportError as error:
        raise TransportError(f'NIXL cannot be imported ({error}); install "eplb-core[nixl]"') from error
