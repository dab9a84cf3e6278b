"""Processes of one host: their names for peers, whether they live, their descriptors. Linux."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eplb_core.errors import TransportError


def host() -> str:
    """Name the host and pid namespace: equal for processes that know each other by number."""
    return Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip() + " " + os.readlink("/proc/self/ns/pid")


def started(pid: int) -> int:
    """Find when a process started, in ticks since boot; -1 if there is none, or a zombie.

    Number and start together name a process: numbers are used again.
    """
    try:
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)  # asked after each read: no layers on top
    except (FileNotFoundError, ProcessLookupError):
        return -1
    try:
        text = os.read(file, 4096)
    except ProcessLookupError:  # pragma: no cover  ends between the two calls
        return -1
    finally:
        os.close(file)
    fields = text.rpartition(b")")[2].split()
    return -1 if fields[0] in b"ZX" else int(fields[19])


class Process:
    """One process, by its number and start; another one that gets its number is not it.

    Holds a descriptor of it, if the system has such (Linux 5.3): to ask it is one call that opens no file.
    """

    def __init__(self, pid: int, start: int) -> None:
        self.pid, self._start = pid, start
        self._fd = -1
        with contextlib.suppress(OSError):
            self._fd = os.pidfd_open(pid)
            weakref.finalize(self, os.close, self._fd)
        self._is_gone = started(pid) != start  # asked while the descriptor is there: it is of this process, or of none

    def is_alive(self) -> bool:
        """Whether it runs or is stopped; a zombie does not count."""
        if not self._is_gone:
            self._is_gone = _has_ended(self._fd) if self._fd >= 0 else started(self.pid) != self._start
        return not self._is_gone


def this_process() -> dict[str, Any]:
    """Name this process to peers on its host, for `process_of`."""
    return {"host": host(), "pid": os.getpid(), "started": started(os.getpid())}


def process_of(rank: int, named: Mapping[str, Any]) -> Process:
    """Find the process that a rank named by `this_process`.

    Raises:
        TransportError: It is on another host, or has ended.
    """
    if named["host"] != host():
        raise TransportError(f"rank {rank} must be on this host and in this pid namespace", rank=rank)
    process = Process(int(named["pid"]), int(named["started"]))
    if not process.is_alive():
        raise TransportError(f"rank {rank} (process {process.pid}) must be alive to be connected", rank=rank)
    return process


def _has_ended(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


_PIDFD_GETFD = 438


@contextlib.contextmanager
def borrowed_fd(pid: int, fd: int) -> Iterator[int]:
    """Duplicate a descriptor of another process for the time of the block.

    Raises:
        OSError: No such process or descriptor, a kernel before 5.6, or this process may not trace that one.
    """
    process = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        own = libc.syscall(ctypes.c_long(_PIDFD_GETFD), ctypes.c_int(process), ctypes.c_int(fd), ctypes.c_uint(0))
        if own < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"descriptor {fd} of process {pid}: {os.strerror(code)}")
    finally:
        os.close(process)
    try:
        yield own
    finally:
        os.close(own)
