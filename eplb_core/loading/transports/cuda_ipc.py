"""Reads from the device memory of other processes on one host: the same GPU or one that it reaches as a peer."""

from __future__ import annotations

import base64
import ctypes
import os
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from eplb_core._arrays import IntArray
from eplb_core.errors import TransportError
from eplb_core.loading.cuda import runtime as _cuda
from eplb_core.loading.transport import ReadState, Region, Status
from eplb_core.loading.transports.base import DONE, BaseTransport, Peer, Ticket
from eplb_core.loading.transports.batches import Spans
from eplb_core.loading.transports.processes import borrowed_fd, process_of, this_process

_FD_HANDLE = struct.Struct("<qqq")


class IpcMemory(NamedTuple):
    """Where a span of device memory lies, as its owner exports it: for `Region.handle` of a third process's memory.

    A process that opened memory of another cannot export it again, so it passes on what it was given.
    """

    handle: bytes
    """64 bytes: an allocation of cudaMalloc. 24 bytes: one that is a descriptor of the owner's, as int64 descriptor,
    size and a number that no other one has."""
    offset: int
    """Of the span in it."""


class CudaIpc(BaseTransport):
    """Copies on a stream of its own, from where peers' allocations are mapped. The owner does nothing.

    Handles are opened once, by `connect`, and closed when the peer is disconnected or replaced, which may wait for the
    device. Memory must come from cudaMalloc, as torch's does unless `expandable_segments` is on, or from a weight host:
    then peers take the owner's descriptor of it, for which they need the same user and, where the system restricts
    tracing (Yama), the owner's permission (`prctl(PR_SET_PTRACER)`). If the peer dies during a read, the read ends as
    LOST_PEER even if all bytes arrived: what a driver does with a dead owner's memory is not documented.

    Peers on other GPUs are read by copy engines. On the same GPU copies are kernels, unless `prefer_overlap` is on and
    the runtime has batched copies (CUDA 12.8): then they leave the cores alone and are slower; see
    `benchmarks/transport_gpu.py`.

    Args:
        device: Index of the device that reads land on; None: torch's current one.
        prefer_overlap: Ask the runtime for copies that use no GPU cores.
        batched: One call for all copies of a read, where the runtime has it; False: a call for each.

    Raises:
        TransportError: No CUDA device, or its runtime cannot be loaded.

    Threads:
        One at a time. Calls are safe while another thread captures a graph.
    """

    def __init__(self, *, device: int | None = None, prefer_overlap: bool = True, batched: bool = True) -> None:
        try:
            self._cuda = _cuda.runtime()
        except ImportError as error:
            raise TransportError(f"CudaIpc needs a CUDA device and its runtime: {error}") from error
        super().__init__("cuda_ipc", "cuda", max_batch=4096)
        if device is None:
            import torch

            device = torch.cuda.current_device()
        self.device = device
        self.prefer_overlap = prefer_overlap
        self.batched = batched
        with self._cuda.on(device):
            self._stream = self._cuda.new_stream()
        self._events: list[ctypes.c_void_p] = []
        self._opened: dict[tuple[int, bytes], int] = {}
        """First byte here of each open handle, by owner's process (0 where the handle alone says it) and handle."""
        self._mapped: dict[tuple[int, bytes], Any] = {}
        """What keeps those that are descriptors."""
        self._owners: dict[int, _Owner] = {}

    def _register(self, regions: tuple[Region, ...]) -> Mapping[str, Any]:
        handles: dict[bytes, int] = {}
        region_handle, region_offset = [], []
        bases: dict[int, bytes] = {}
        with self._cuda.on(self.device):
            for i, region in enumerate(regions):
                if region.device.partition(":")[2] not in ("", str(self.device)):
                    raise TransportError(
                        f"`regions[{i}].device` (={region.device!r}) must be cuda:{self.device}, the device of this "
                        "transport"
                    )
                memory = IpcMemory(*region.handle) if region.handle is not None else self._own_memory(i, region, bases)
                region_handle.append(handles.setdefault(bytes(memory.handle), len(handles)))
                region_offset.append(int(memory.offset))
        return {
            **this_process(),
            "handles": [base64.b64encode(handle).decode() for handle in handles],
            "region_handle": region_handle,
            "region_offset": region_offset,
        }

    def _own_memory(self, i: int, region: Region, bases: dict[int, bytes]) -> IpcMemory:
        if not region.nbytes:
            return IpcMemory(b"", 0)
        from eplb_core.loading.cuda import segments

        segment = segments.find(region.address)
        if segment is not None:
            offset = region.address - segment.address
            if offset + region.nbytes > segment.nbytes:
                raise TransportError(f"`regions[{i}]` (={region.nbytes} bytes) must lie in one segment of its host")
            return IpcMemory(_FD_HANDLE.pack(segment.fd, segment.nbytes, segment.token), offset)
        try:
            base, size = self._cuda.allocation(region.address)
            if base not in bases:
                bases[base] = self._cuda.handle_of(base)
        except _cuda.CudaError as error:
            raise TransportError(
                f"`regions[{i}]` ({region.nbytes} bytes at {region.address:#x}) cannot be exported: {error}; memory "
                "must come from cudaMalloc: without expandable_segments, and not opened from another process"
            ) from error
        if region.address + region.nbytes > base + size:
            raise TransportError(f"`regions[{i}]` (={region.nbytes} bytes) must lie in one allocation (={size} bytes)")
        return IpcMemory(bases[base], region.address - base)

    def _attach(self, peer: Peer, former: Peer | None) -> None:
        try:
            owner = _Owner(peer)
        except (KeyError, TypeError, ValueError) as error:
            raise TransportError(f"`blob` of rank {peer.rank} lacks {error!r}", rank=peer.rank) from error
        if owner.pid != os.getpid():
            with self._cuda.on(self.device):
                for i, handle in enumerate(owner.handles):
                    owner.shift[owner.region_handle == i] += self._base(peer.rank, owner, handle) if handle else 0
            owner.shift -= peer.address
        else:
            owner.shift[:] = 0
        self._owners[peer.rank] = owner
        self._close_unused()

    def _base(self, rank: int, owner: _Owner, handle: bytes) -> int:
        """Open a handle, once."""
        key = owner.key(handle)
        if key not in self._opened:
            try:
                if len(handle) == _FD_HANDLE.size:
                    fd, nbytes, _ = _FD_HANDLE.unpack(handle)
                    with borrowed_fd(owner.pid, fd) as own:
                        from eplb_core.loading.cuda import segments

                        self._mapped[key] = segments.open_fd(own, nbytes)
                    self._opened[key] = self._mapped[key].address
                else:
                    self._opened[key] = self._cuda.open_handle(handle)
            except (_cuda.CudaError, ValueError, OSError) as error:
                raise TransportError(f"memory of rank {rank} cannot be opened: {error}", rank=rank) from error
        return self._opened[key]

    def _detach(self, peer: Peer) -> None:
        self._owners.pop(peer.rank, None)
        self._close_unused()

    def _close_unused(self) -> None:
        if self._pending:  # the next one to leave does it
            return
        used = {owner.key(handle) for owner in self._owners.values() for handle in owner.handles}
        with self._cuda.on(self.device):
            for key in self._opened.keys() - used:
                base = self._opened.pop(key)
                if self._mapped.pop(key, None) is None:
                    self._cuda.close_handle(base)

    def _start(self, peer: Peer, spans: Spans, stream: Any) -> Ticket:
        owner = self._owners[peer.rank]
        ticket = _Copies(peer.rank, spans, owner)
        if not owner.process.is_alive():
            ticket.finish(owner.lost(peer.rank))
            return ticket
        with self._cuda.on(self.device):
            ticket.event = self._events.pop() if self._events else self._cuda.new_event()
            if stream is not None:
                self._cuda.call(
                    "cudaEventRecord", ticket.event, ctypes.c_void_p(getattr(stream, "cuda_stream", stream))
                )
                self._cuda.call("cudaStreamWaitEvent", self._stream, ticket.event, 0)
            try:
                src = spans.src + owner.shift[spans.src_region]
                self._cuda.copy(
                    spans.dst, src, spans.nbytes, self._stream, overlap=self.prefer_overlap, batched=self.batched
                )
            except _cuda.CudaError as error:
                ticket.problem = Status(ReadState.FAILED, f"rank {peer.rank}: {error}")
            self._cuda.call("cudaEventRecord", ticket.event, self._stream)
        return ticket

    def _progress(self, ticket: Ticket) -> None:
        if not isinstance(ticket, _Copies) or ticket.event is None:
            return
        try:
            with self._cuda.on(self.device):
                if not self._cuda.is_over(ticket.event):
                    return
        except _cuda.CudaError as error:  # the device is lost, and nothing runs on it any more
            ticket.problem = Status(ReadState.FAILED, f"rank {ticket.rank}: {error}")
        alive = ticket.owner.process.is_alive()
        ticket.finish(ticket.problem or (DONE if alive else ticket.owner.lost(ticket.rank)))
        self._events.append(ticket.event)
        ticket.event = None

    def _shut(self) -> None:
        self._owners.clear()
        self._close_unused()


class _Owner:
    """A peer's process and where its memory is mapped."""

    def __init__(self, peer: Peer) -> None:
        extra = peer.extra
        self.process = process_of(peer.rank, extra)
        self.pid = self.process.pid
        self.handles = [base64.b64decode(handle, validate=True) for handle in extra["handles"]]
        self.region_handle: IntArray = np.array(extra["region_handle"], dtype=np.int64)
        self.shift: IntArray = np.array(extra["region_offset"], dtype=np.int64)
        """From an address of the owner's to one of this process."""
        count = len(self.handles)
        inside = (self.region_handle >= 0) & (self.region_handle < count) & (self.shift >= 0)
        if not self.region_handle.shape == self.shift.shape == peer.address.shape or not inside.all():
            raise ValueError("a handle for each region")
        if any(len(handle) not in (0, _FD_HANDLE.size, 64) for handle in self.handles):
            raise ValueError("handles of 64 or 24 bytes")

    def key(self, handle: bytes) -> tuple[int, bytes]:
        """Name of an opened handle: descriptors mean something in their process alone."""
        return (self.pid if len(handle) == _FD_HANDLE.size else 0), handle

    def lost(self, rank: int) -> Status:
        return Status(ReadState.LOST_PEER, f"rank {rank} (process {self.pid}) is gone")


class _Copies(Ticket):
    """A read on the transport's stream."""

    __slots__ = ("event", "owner", "problem")

    def __init__(self, rank: int, spans: Spans, owner: _Owner) -> None:
        super().__init__(rank, spans)
        self.owner = owner
        self.event: ctypes.c_void_p | None = None
        self.problem: Status | None = None
