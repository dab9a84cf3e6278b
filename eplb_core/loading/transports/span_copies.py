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
from eplb_core.loading.transports.batches import Spans

_MOST_SPANS = 1024  # that the system takes in one call
_PORTION = 32 << 20  # a call cannot be stopped: about ten milliseconds
_libc = ctypes.CDLL(None, use_errno=True)
IS_NATIVE = hasattr(_libc, "process_vm_readv")
"""Linux. Elsewhere there is no reading of other processes, and copies within this one are made span by span."""
_size, _pointer = ctypes.c_ulong, ctypes.c_void_p
_call_type = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_int, _pointer, _size, _pointer, _size, _size, use_errno=True)
_readv: Any = _call_type(("process_vm_readv", _libc)) if IS_NATIVE else None


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
    """Spans of a process, taken a portion at a time.

    Args:
        spans: What is to be copied.
        shift: What to add to the addresses of the spans of each of the owner's regions, int64 `[regions]`.
        wanted: Of each region, whether its spans are to be copied, bool `[regions]`.
        pid: Process in which the source addresses are valid.
        most_bytes: Of a portion; longer spans are cut.
        most_spans: Of a portion.
    """

    def __init__(
        self,
        spans: Spans,
        shift: IntArray,
        wanted: BoolArray,
        pid: int,
        most_bytes: int = _PORTION,
        most_spans: int = _MOST_SPANS,
    ) -> None:
        self._spans, self._shift, self._wanted, self._pid, self._most_bytes = spans, shift, wanted, pid, most_bytes
        self._at = np.zeros(3, dtype=np.int64)
        count = min(most_spans, len(spans.nbytes) + 1)
        self._local, self._remote = np.empty((2, count, 2), dtype=np.int64)
        self._index = np.empty(count, dtype=np.int64)

    def next(self) -> int:
        """Find the next portion and return its bytes, 0 when all is copied."""
        dst, src, nbytes, _, region = self._spans
        at, lists = self._at, (self._local, self._remote, self._index)
        return _fill_portion(dst, src, nbytes, region, self._shift, self._wanted, self._most_bytes, at, *lists)

    def copy(self) -> int:
        """Copy the portion; bytes moved, or minus an error number. Fewer than were asked for: memory is not mapped."""
        return _call(self._pid, self._local, self._remote, int(self._at[2]))

    def portion(self) -> Spans:
        """List the portion as spans of their own."""
        of, count = self._index[: self._at[2]], self._at[2]
        dst, src, nbytes = self._local[:count, 0].copy(), self._remote[:count, 0].copy(), self._local[:count, 1].copy()
        return Spans(dst, src, nbytes, self._spans.dst_region[of], self._spans.src_region[of])


def portions(spans: Spans, most_bytes: int, most_spans: int) -> Iterator[Spans]:
    """Divide spans into portions of at most so many bytes and spans."""
    regions = int(spans.src_region.max(initial=-1)) + 1
    shift, wanted = np.zeros(regions, dtype=np.int64), np.ones(regions, dtype=np.bool_)
    walk = Walk(spans, shift, wanted, 0, most_bytes, most_spans)
    while walk.next():
        yield walk.portion()


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
    index: IntArray,
) -> int:
    """List (address, bytes) and spans of the next portion; `at`: the span, the byte in it, the length of the list."""
    span, done, count, total = at[0], at[1], 0, 0
    while span < len(nbytes) and count < len(local) and total < most_bytes:
        if not wanted[region[span]]:
            span += 1
            continue
        size = min(nbytes[span] - done, most_bytes - total)
        local[count, 0], remote[count, 0] = dst[span] + done, src[span] + done + shift[region[span]]
        local[count, 1] = remote[count, 1] = size
        index[count] = span
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
