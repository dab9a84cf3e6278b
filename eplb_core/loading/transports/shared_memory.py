"""Reads from processes on one host: mapped where the memory is shared, by the system's own copy where it is not."""

from __future__ import annotations

import bisect
import errno
import fcntl
import mmap
import os
import queue
import stat
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from eplb_core.errors import TransportError
from eplb_core.loading.transport import ReadState, Region, Status
from eplb_core.loading.transports import span_copies
from eplb_core.loading.transports.base import DONE, BaseTransport, Peer, Ticket
from eplb_core.loading.transports.batches import Spans
from eplb_core.loading.transports.processes import process_of, this_process


class SharedMemory(BaseTransport):
    """Reads the memory of other processes on this host. Host memory only.

    Nothing has to be prepared. Regions in shared memory (`tensor.share_memory_()`, `multiprocessing.shared_memory`,
    memfd) are found by their address and mapped by the peers, who can read them even after their owner's death. All
    other memory is read by `process_vm_readv` from the owner's process, which needs the same user and, where the system
    restricts tracing (Yama), the owner's permission (`prctl(PR_SET_PTRACER)`); `connect` raises if it is refused.

    Copies run on one worker thread, many spans in one system call, without the interpreter's lock. The owner does
    nothing and may even be stopped; an abandoned read is DRAINED some milliseconds later.

    Raises:
        TransportError: The system is not Linux.

    Threads:
        One at a time; not bound to one.

    Source:
        `benchmarks/transports.py` has what decides between mapping and process_vm_readv.
    """

    def __init__(self) -> None:
        if not span_copies.IS_NATIVE:
            raise TransportError("SharedMemory needs Linux; use TorchDistributed over gloo")
        super().__init__("shared_memory", "cpu", max_batch=65536)
        span_copies.warm_up()
        self._jobs: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._maps: dict[int, _Maps] = {}
        weakref.finalize(self, self._jobs.put, None)

    def _register(self, regions: tuple[Region, ...]) -> Mapping[str, Any]:
        files, region_file, region_offset = _files_of(regions)
        return {**this_process(), "files": files, "region_file": region_file, "region_offset": region_offset}

    def _attach(self, peer: Peer, former: Peer | None) -> None:
        try:
            maps = _Maps(peer)
        except (KeyError, TypeError, AttributeError) as error:
            raise TransportError(f"`blob` of rank {peer.rank} lacks {error}", rank=peer.rank) from error
        maps.try_private(peer)
        self._maps[peer.rank] = maps

    def _detach(self, peer: Peer) -> None:
        self._maps.pop(peer.rank, None)  # a pending copy holds its own reference

    def _start(self, peer: Peer, spans: Spans, stream: Any) -> Ticket:
        ticket = _Copy(peer.rank, spans, self._maps[peer.rank])
        if self._worker is None:
            self._worker = threading.Thread(target=_work, args=(self._jobs,), name="eplb-shared-memory", daemon=True)
            self._worker.start()
        self._jobs.put(ticket)
        return ticket

    def _shut(self) -> None:
        self._jobs.put(None)
        if self._worker is not None:
            self._worker.join()
        self._maps.clear()


class _Maps:
    """A peer's process, and where its shared files are mapped here."""

    def __init__(self, peer: Peer) -> None:
        extra = peer.extra
        self.process = process_of(peer.rank, extra)
        self.pid = self.process.pid
        count = len(peer.address)
        file_of_region = np.array(extra["region_file"], dtype=np.int64)
        offset = np.array(extra["region_offset"], dtype=np.int64)
        files = list(extra["files"])
        inside = (file_of_region >= -1) & (file_of_region < len(files)) & (offset >= 0)
        if not file_of_region.shape == offset.shape == (count,) or not inside.all():
            raise TransportError(f"`blob` of rank {peer.rank} must name a file for each region", rank=peer.rank)
        self.views: list[npt.NDArray[np.uint8]] = []
        self.shift = np.zeros(count, dtype=np.int64)
        """From an address of the owner's to one of this process, for mapped regions."""
        self.mapped = file_of_region >= 0
        self.private = ~self.mapped
        for i, file in enumerate(files):
            here = file_of_region == i
            end = int((offset + peer.nbytes)[here].max(initial=0))
            self.views.append(_mapped(file, self, end, peer.rank))
            self.shift[here] = self.views[i].ctypes.data + offset[here] - peer.address[here]

    def try_private(self, peer: Peer) -> None:
        """Read one byte of the first region that is not shared."""
        private = np.flatnonzero(self.private & (peer.nbytes > 0))
        if private.size:
            byte = np.empty(1, dtype=np.uint8)
            region, one = private[:1], np.ones(1, dtype=np.int64)
            failed = self.read(Spans(one * byte.ctypes.data, peer.address[region], one, one, region), lambda: True)
            if failed is not None:
                raise TransportError(f"rank {peer.rank}: {failed.reason}", rank=peer.rank)

    def read(self, spans: Spans, wanted: Callable[[], bool]) -> Status | None:
        """Copy, looking between portions whether it is still wanted; None when all bytes are there."""
        for here, pid in ((self.private, self.pid), (self.mapped, os.getpid())):
            walk = span_copies.Walk(spans, self.shift, here, pid)
            while expected := walk.next():
                if not wanted():
                    return Status(ReadState.FAILED)
                moved = walk.copy()
                if here is self.private and (moved == -errno.ESRCH or not self.process.is_alive()):
                    return Status(ReadState.LOST_PEER, f"process {self.pid} is gone")
                if moved != expected:
                    return Status(ReadState.FAILED, why_failed(self.pid, moved, expected))
        return None


def why_failed(pid: int, moved: int, expected: int) -> str:
    """Say why a copy moved fewer bytes than expected, or ended with minus an error number."""
    if moved == -errno.EPERM:
        return (
            f"process {pid} may not be read (EPERM); put its tensors into shared memory "
            "(tensor.share_memory_()) or let it call prctl(PR_SET_PTRACER)"
        )
    why = f"{moved} of {expected} bytes" if moved >= 0 else errno.errorcode.get(-moved, str(-moved))
    return f"process {pid}: {why}; memory was unmapped"


@dataclass(slots=True, eq=False)
class _Copy(Ticket):
    """A read that the worker makes in pieces, looking between them whether it is still wanted."""

    maps: _Maps

    def run(self) -> None:
        failed = self.maps.read(self.spans, lambda: not self.unwanted)
        self.finish(DONE if failed is None else failed._replace(reason=f"rank {self.rank}: {failed.reason}"))


def _work(jobs: queue.SimpleQueue[_Copy | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job.run()
        except Exception as error:
            job.finish(Status(ReadState.FAILED, f"rank {job.rank}: {error!r}"))
        del job  # an idle worker keeps no maps alive


def _files_of(regions: tuple[Region, ...]) -> tuple[list[dict[str, Any]], list[int], list[int]]:
    """Files behind shared regions: file index (-1: none) and offset in it, by region."""
    mappings = _shared_mappings()
    starts = [mapping.start for mapping in mappings]
    descriptors = _descriptors() if mappings else {}
    files: list[dict[str, Any]] = []
    number: dict[tuple[int, int], int] = {}
    region_file, region_offset = [], []
    for region in regions:
        at = bisect.bisect_right(starts, region.address) - 1
        mapping = mappings[at] if at >= 0 else None
        if mapping is None or region.address + region.nbytes > mapping.end:
            region_file.append(-1)
            region_offset.append(0)
            continue
        if mapping.key not in number:
            file = _openable(mapping, descriptors)
            number[mapping.key] = len(files) if file else -1
            files.extend([file] if file else [])
        region_file.append(number[mapping.key])
        region_offset.append(region.address - mapping.start + mapping.offset if number[mapping.key] >= 0 else 0)
    return files, region_file, region_offset


class _Mapping(NamedTuple):
    start: int
    end: int
    offset: int
    key: tuple[int, int]
    """Device and inode."""
    path: str


def _shared_mappings() -> list[_Mapping]:
    """This process's mappings of files that other mappings share, by address."""
    found = []
    for line in os.fsdecode(Path("/proc/self/maps").read_bytes()).splitlines():
        span, mode, offset, device, inode, *path = line.split(maxsplit=5)
        if mode[3] == "s" and inode != "0":
            start, end = (int(part, 16) for part in span.split("-"))
            major, minor = (int(part, 16) for part in device.split(":"))
            key = (os.makedev(major, minor), int(inode))
            found.append(_Mapping(start, end, int(offset, 16), key, path[0] if path else ""))
    return found


def _descriptors() -> dict[tuple[int, int], int]:
    """This process's open plain files."""
    found: dict[tuple[int, int], int] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            about = os.fstat(int(name))
            mode = fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE
        except OSError:  # closed meanwhile, as the listing's own is
            continue
        key = about.st_dev, about.st_ino
        # Another rank of this process opens the file for reading, and only for as long as it takes to map it.
        if stat.S_ISREG(about.st_mode) and (key not in found or mode == os.O_RDWR):
            found[key] = int(name)
    return found


def _openable(mapping: _Mapping, descriptors: Mapping[tuple[int, int], int]) -> dict[str, Any] | None:
    """How a peer opens the file: by its path, or by this process's descriptor."""
    about = {"device": mapping.key[0], "inode": mapping.key[1]}
    try:
        found = os.stat(mapping.path)
        if (found.st_dev, found.st_ino) == mapping.key and stat.S_ISREG(found.st_mode):
            return {**about, "path": mapping.path}
    except OSError:
        pass  # unlinked, as it should be: nothing is left behind when a process is killed
    if mapping.key in descriptors:
        return {**about, "descriptor": descriptors[mapping.key]}
    return None


def _mapped(file: Mapping[str, Any], owner: _Maps, end: int, rank: int) -> npt.NDArray[np.uint8]:
    """Map a peer's file for reading, after a look whether it is the one that was meant."""
    path = str(file["path"]) if "path" in file else f"/proc/{owner.pid}/fd/{int(file['descriptor'])}"
    try:
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for who writes
    except OSError as error:
        raise TransportError(f"rank {rank}: its shared memory {path} cannot be opened: {error}", rank=rank) from error
    try:
        about = os.fstat(opened)
        is_meant = (about.st_dev, about.st_ino) == (file["device"], file["inode"]) and stat.S_ISREG(about.st_mode)
        if not is_meant or about.st_size < end:
            raise TransportError(
                f"rank {rank}: {path} must be the file that it exported and hold {end} bytes; exchange blobs again",
                rank=rank,
            )
        return np.frombuffer(mmap.mmap(opened, end, mmap.MAP_SHARED, mmap.PROT_READ), dtype=np.uint8)
    except (OSError, ValueError) as error:
        raise TransportError(f"rank {rank}: its shared memory {path} cannot be mapped: {error}", rank=rank) from error
    finally:
        os.close(opened)
