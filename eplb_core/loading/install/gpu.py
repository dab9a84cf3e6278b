# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Installs on a GPU: all copies of a layer in one launch, or two where rows are not aligned to 16 bytes.

A place that is written over while another one needs what it held is no matter for the order of launches: a program
takes the same few kilobytes of every place in turn, in the order of `order_copies`, and holds in registers what a
circle of places has to set aside.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from eplb_core._arrays import IntArray, read_only
from eplb_core.loading.install.copies import fill_jobs, label_groups

TILE_WORDS = 4096
"""What a program copies of a row: 4-byte words of aligned rows, single bytes of others."""
_BUFFERS = 2


class Block(NamedTuple):
    """Copies between places that are rows of the same tensors."""

    copies: IntArray
    """(from, to) as `order_copies` gives them, int64 `[m, 2]`; -1 is the spare place."""
    addresses: IntArray
    """First byte of each place, int64 `[places, tensors]`, read-only."""
    row_bytes: IntArray
    """Bytes of a row, int64 `[tensors]`, read-only."""


class Prepared(NamedTuple):
    """A table on the device, ready to be launched; good until the one after the next is made."""

    buffer: int
    aligned: int
    """Programs that copy words."""
    odd: int
    """Programs that copy bytes."""


class DeviceCopies:
    """Tables of copies, and the launches that carry them out. Allocates and compiles in the constructor alone.

    Args:
        rows: Most rows that are written in one install, and the bytes of a row, for each tensor; ints `[n, 2]`.
        device: Of the rows.

    Threads:
        `prepare` on one worker; `launch` on the forward thread, on its current stream.
    """

    def __init__(self, rows: IntArray, device: torch.device) -> None:
        tiles = int((rows[:, 0] * -(-rows[:, 1] // TILE_WORDS)).sum())  # as if all were odd
        jobs = int(rows[:, 0].sum())
        self._jobs_at = _even(tiles + 1)
        self._copies_at = _even(self._jobs_at + 3 * jobs + 3)
        size = self._copies_at + 4 * jobs + 4
        self._tiles = np.empty((2, tiles), dtype=np.int64)
        self._on_device = device.type == "cuda"
        self._device = device
        self._host = [
            torch.zeros(size, dtype=torch.int64, device="cpu", pin_memory=self._on_device) for _ in range(_BUFFERS)
        ]
        self._tables = [torch.zeros(size, dtype=torch.int64, device=device) for _ in range(_BUFFERS)]
        self._next = 0
        self._stream: Any = None
        self._events: list[Any] = [None] * _BUFFERS
        if self._on_device:
            self._stream = torch.cuda.Stream(device)
            self._events = [torch.cuda.Event() for _ in range(_BUFFERS)]
        self._warm()

    def prepare(self, blocks: list[Block]) -> Prepared:
        """Write the table of some copies and bring it to the device; waits for that, and for what used the buffer."""
        buffer = self._next
        self._next = (buffer + 1) % _BUFFERS
        if self._on_device:
            self._events[buffer].synchronize()
        aligned, odd = self._fill(self._host[buffer].numpy(), blocks)
        with torch.cuda.stream(self._stream):  # nothing where there is none
            self._tables[buffer].copy_(self._host[buffer], non_blocking=True)
            if self._stream is not None:
                self._stream.synchronize()
        return Prepared(buffer, aligned, odd)

    def launch(self, prepared: Prepared) -> None:
        """Copy, on the current stream of the tensors' device; Triton would take the calling thread's device."""
        table = self._tables[prepared.buffer]
        with torch.cuda.device(self._device if self._on_device else -1):  # -1: nothing
            for count, first, aligned in ((prepared.aligned, 0, True), (prepared.odd, prepared.aligned, False)):
                if count:
                    _copy_tiles[(count,)](
                        table, first, self._jobs_at, self._copies_at, ALIGNED=aligned, TILE=TILE_WORDS, num_warps=4
                    )
        if self._on_device:
            self._events[prepared.buffer].record(torch.cuda.current_stream(self._device))

    def _fill(self, table: IntArray, blocks: list[Block]) -> tuple[int, int]:
        """Jobs are the copies of one group of places for one tensor; tiles are parts of jobs."""
        at, counts = np.array([self._jobs_at, self._copies_at, 0, 0]), np.zeros(2, dtype=np.int64)
        for copies, addresses, row_bytes in blocks:
            group = np.empty(len(copies), dtype=np.int64)
            label_groups(copies, group)
            fill_jobs(copies, group, addresses, row_bytes, TILE_WORDS, at, table, self._tiles, counts)
        aligned, odd = counts.tolist()
        table[:aligned] = self._tiles[0, :aligned]
        table[aligned : aligned + odd] = self._tiles[1, :odd]
        return aligned, odd

    def _warm(self) -> None:
        """Compile both kernels, on 16 bytes of a table that is not in use."""
        scratch = torch.zeros(64, dtype=torch.uint8, device=self._device)
        at = scratch.data_ptr()
        copies = np.array([[0, 1]])
        for odd in (0, 1):
            addresses, size = read_only(np.array([[at + odd], [at + odd + 16]])), read_only(np.array([16 - odd]))
            self.launch(self.prepare([Block(copies, addresses, size)]))
        if self._on_device:
            torch.cuda.current_stream(self._device).synchronize()


def _even(count: int) -> int:
    return count + count % 2


# What differs from call to call must not lead to other binaries: nothing compiles while serving.
@triton.jit(
    do_not_specialize=["first", "jobs_at", "copies_at"],
    do_not_specialize_on_alignment=["table", "first", "jobs_at", "copies_at"],
)
def _copy_tiles(table, first, jobs_at, copies_at, ALIGNED: tl.constexpr, TILE: tl.constexpr):
    tile = tl.load(table + first + tl.program_id(0))
    job = table + jobs_at + (tile >> 32) * 3
    entry = tl.load(job)
    end = entry + tl.load(job + 1)
    copies = table + copies_at
    size = tl.load(job + 2)
    start = (tile & 0xFFFFFFFF) * TILE
    lane = tl.arange(0, TILE)
    if ALIGNED:
        words = size // 4
        kept = tl.zeros([TILE], tl.uint32)
        if start + TILE <= words:
            while entry < end:
                source = tl.load(copies + entry * 2)
                to = tl.load(copies + entry * 2 + 1)
                if source != 0:
                    data = tl.load(tl.multiple_of(source.to(tl.pointer_type(tl.uint32)), 16) + start + lane)
                else:
                    data = kept
                tl.debug_barrier()
                if to != 0:
                    tl.store(tl.multiple_of(to.to(tl.pointer_type(tl.uint32)), 16) + start + lane, data)
                else:
                    kept = data
                entry += 1
        else:
            inside = lane < words - start
            while entry < end:
                source = tl.load(copies + entry * 2)
                to = tl.load(copies + entry * 2 + 1)
                if source != 0:
                    data = tl.load(source.to(tl.pointer_type(tl.uint32)) + start + lane, mask=inside, other=0)
                else:
                    data = kept
                tl.debug_barrier()
                if to != 0:
                    tl.store(to.to(tl.pointer_type(tl.uint32)) + start + lane, data, mask=inside)
                else:
                    kept = data
                entry += 1
    else:
        odd_kept = tl.zeros([TILE], tl.uint8)
        odd_inside = lane < size - start
        while entry < end:
            source = tl.load(copies + entry * 2)
            to = tl.load(copies + entry * 2 + 1)
            if source != 0:
                odd_data = tl.load(source.to(tl.pointer_type(tl.uint8)) + start + lane, mask=odd_inside, other=0)
            else:
                odd_data = odd_kept
            tl.debug_barrier()
            if to != 0:
                tl.store(to.to(tl.pointer_type(tl.uint8)) + start + lane, odd_data, mask=odd_inside)
            else:
                odd_kept = odd_data
            entry += 1
