"""Copies of many spans of host memory in one system call.

A loop of copies would ask for the interpreter's lock after each, and beside a thread that runs Python code that takes
up to five milliseconds every time.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import numpy as np

from eplb_core._arrays import IntArray
from eplb_core.loading.transports._base import Spans, split

_MOST_SPANS = 1024  # that the system takes in one call
_PORTION = 32 << 20  # a call cannot be stopped: about ten milliseconds
_libc = ctypes.CDLL(None, use_errno=True)
IS_NATIVE = hasattr(_libc, "process_vm_readv")
"""Linux. Elsewhere there is no reading of other processes, and copies within this one are made span by span."""
if IS_NATIVE:
    _readv = _libc.process_vm_readv
    _readv.restype = ctypes.c_ssize_t
    _size, _pointer = ctypes.c_ulong, ctypes.c_void_p
    _readv.argtypes = [ctypes.c_int, _pointer, _size, _pointer, _size, _size]


def portions(spans: Spans, most_bytes: int = _PORTION, most_spans: int = _MOST_SPANS) -> Iterator[Spans]:
    """The same bytes in portions of so many bytes and spans."""
    pieces = split(spans, most_bytes)
    ends = np.cumsum(pieces.nbytes)
    first = 0
    while first < len(ends):
        before = int(ends[first - 1]) if first else 0
        last = min(int(np.searchsorted(ends, before + most_bytes, side="right")), first + most_spans)
        yield Spans(*(array[first:last] for array in pieces))
        first = last


def copy(dst: IntArray, src: IntArray, nbytes: IntArray, process: int | None = None) -> int:
    """Copy up to 1,024 spans from a process (None: this one) into this one; bytes moved, or minus an error number.

    Fewer bytes than asked for: the next one is not mapped there.
    """
    if process is None and not IS_NATIVE:
        for to, of, count in zip(dst.tolist(), src.tolist(), nbytes.tolist(), strict=True):
            ctypes.memmove(to, of, count)
        return int(nbytes.sum())
    local = np.ascontiguousarray(np.stack([dst, nbytes], axis=1))
    remote = np.ascontiguousarray(np.stack([src, nbytes], axis=1))
    pid = os.getpid() if process is None else process
    moved = int(_readv(pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0))
    return moved if moved >= 0 else -ctypes.get_errno()
