"""Copies of many spans of host memory in one system call.

A loop of copies would ask for the interpreter's lock after each, and beside a thread that runs Python code that takes
up to five milliseconds every time.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from eplb_core._arrays import BoolArray, IntArray
from eplb_core._numba import kernel
from eplb_core.loading.transports.batches import Spans, split

_MOST_SPANS = 1024  # that the system takes in one call
_PORTION = 32 << 20  # a call cannot be stopped: about ten milliseconds
_libc = ctypes.CDLL(None, use_errno=True)
IS_NATIVE = hasattr(_libc, "process_vm_readv")
"""Linux. Elsewhere there is no reading of other processes, and copies within this one are made span by span."""
_size, _pointer = ctypes.c_ulong, ctypes.c_void_p
_call_type = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_int, _pointer, _size, _pointer, _size, _size, use_errno=True)
_readv: Any = _call_type(("process_vm_readv", _libc)) if IS_NATIVE else None


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


def copy(dst: IntArray, src: IntArray, nbytes: IntArray) -> int:
    """Copy up to 1,024 spans within this process; bytes moved, or minus an error number."""
    if not IS_NATIVE:
        for to, of, count in zip(dst.tolist(), src.tolist(), nbytes.tolist(), strict=True):
            ctypes.memmove(to, of, count)
        return int(nbytes.sum())
    local = np.ascontiguousarray(np.stack([dst, nbytes], axis=1))
    remote = np.ascontiguousarray(np.stack([src, nbytes], axis=1))
    return _call(os.getpid(), local, remote, len(local))


def _call(pid: int, local: IntArray, remote: IntArray, count: int) -> int:
    moved = int(_readv(pid, local.ctypes.data, count, remote.ctypes.data, count, 0))
    return moved if moved >= 0 else -ctypes.get_errno()


class Walk:
    """Spans of a process, copied a portion at a time.

    Args:
        spans: What is to be copied.
        shift: What to add to the addresses of the spans of each of the owner's regions, int64 `[regions]`.
        wanted: Of each region, whether its spans are to be copied, bool `[regions]`.
        pid: In which process the addresses mean something.
    """

    def __init__(self, spans: Spans, shift: IntArray, wanted: BoolArray, pid: int) -> None:
        self._spans, self._shift, self._wanted, self._pid = spans, shift, wanted, pid
        self._at = np.zeros(3, dtype=np.int64)
        count = min(_MOST_SPANS, len(spans.nbytes) + 1)
        self._local, self._remote = np.empty((2, count, 2), dtype=np.int64)

    def next(self) -> int:
        """Find the next portion; its bytes, 0 when all is copied."""
        spans, at = self._spans, self._at
        return _fill_portion(
            spans.dst, spans.src, spans.nbytes, spans.src_region, self._shift, self._wanted, _PORTION, at, self._local,
            self._remote,
        )  # fmt: skip

    def copy(self) -> int:
        """Copy the portion; bytes moved, or minus an error number. Fewer than were asked for: memory is not mapped."""
        return _call(self._pid, self._local, self._remote, int(self._at[2]))


@kernel
def _fill_portion(
    dst: IntArray,
    src: IntArray,
    nbytes: IntArray,
    region: IntArray,
    shift: IntArray,
    wanted: BoolArray,
    most_bytes: int,
    at: IntArray,
    local: IntArray,
    remote: IntArray,
) -> int:
    """List (address, bytes) of the next portion; `at` is the span, the byte in it, and the length of the list."""
    span, done, count, total = at[0], at[1], 0, 0
    while span < len(nbytes) and count < len(local) and total < most_bytes:
        if not wanted[region[span]]:
            span += 1
            continue
        size = min(nbytes[span] - done, most_bytes - total)
        local[count, 0], remote[count, 0] = dst[span] + done, src[span] + done + shift[region[span]]
        local[count, 1] = remote[count, 1] = size
        count, total, done = count + 1, total + size, done + size
        if done == nbytes[span]:
            span, done = span + 1, 0
    at[0], at[1], at[2] = span, done, count
    return total


@cache
def warm_up() -> None:
    """Compile, or load, what a walk needs; once a process."""
    nothing = np.empty(0, dtype=np.int64)
    Walk(Spans(nothing, nothing, nothing, nothing, nothing), nothing, np.empty(0, dtype=np.bool_), 0).next()
