# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""`fingerprints` on a GPU: one Triton kernel, one program for each chunk of each row."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl

from eplb_core._arrays import IntArray
from eplb_core.loading.verify.keys import KEYS, LANES, LINES, chunk_range


def enqueue(addresses: IntArray, sizes: IntArray, step: int, offset: int, prints: torch.Tensor) -> None:
    """Add the print of each row to `prints`, on the current stream.

    Args:
        addresses: First byte of each row, int64 `[n, S, T]`.
        sizes: Bytes of a row of each tensor, int64 `[n, T]`.
        step: Read every step-th chunk.
        offset: Which of them.
        prints: Zeros, int64 `[n, S, T]`, contiguous.
    """
    layers, slots, tensors = addresses.shape
    device = prints.device
    table = _to_device(torch.from_numpy(addresses.reshape(-1)), device)
    for tensor in range(tensors):
        # Layers of one model have rows of one size, and then a launch does all of them.
        for size in np.unique(sizes[:, tensor]).tolist():
            rows = np.flatnonzero(np.repeat(sizes[:, tensor] == size, slots))
            aligned = size % 4 == 0 and not bool((addresses.reshape(-1, tensors)[rows, tensor] % 16).any())
            chunks = chunk_range(size, step, offset)
            _print_chunks[(len(rows) * len(chunks),)](
                table,
                table if len(rows) == layers * slots else _to_device(torch.from_numpy(rows), device),
                prints,
                _keys(device),
                tensor,
                tensors,
                size,
                len(chunks),
                chunks.start,
                step,
                ALL_ROWS=len(rows) == layers * slots,
                ALIGNED=aligned,
                LANES=LANES,
                LINES=LINES,
                UNROLL=8,
                num_warps=8,
            )


def _to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy without waiting: from pinned memory, which the allocator keeps until the copy is done."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@cache
def _keys(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(KEYS.view(np.int64)).to(device)  # waits, once: other streams use them too


# Numbers that differ from call to call must not lead to other binaries: nothing compiles while serving.
@triton.jit(do_not_specialize=["tensor", "tensors", "size", "chunks", "first_chunk", "step"])
def _print_chunks(
    addresses,
    rows,
    prints,
    keys,
    tensor,
    tensors,
    size,
    chunks,
    first_chunk,
    step,
    ALL_ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    LANES: tl.constexpr,
    LINES: tl.constexpr,
    UNROLL: tl.constexpr,
):
    program = tl.program_id(0)
    row = (program // chunks).to(tl.int64)
    if not ALL_ROWS:
        row = tl.load(rows + row)
    chunk = (first_chunk + (program % chunks) * step).to(tl.int64)
    address = tl.load(addresses + row * tensors + tensor)
    words = size // 4
    lane = tl.arange(0, LANES)
    start = chunk * LANES * LINES
    total = tl.zeros([LANES], tl.uint64)
    if ALIGNED:
        base = tl.multiple_of(address.to(tl.pointer_type(tl.uint32)), 16) + start
        if start + LANES * LINES <= words:
            for line in range(0, LINES, UNROLL):
                for i in tl.static_range(UNROLL):
                    word = tl.load(base + (line + i) * LANES + lane)
                    total += word.to(tl.uint64) * tl.load(keys + line + i).to(tl.uint64)
        else:
            for line in range(LINES):
                word = tl.load(base + line * LANES + lane, mask=lane < words - start - line * LANES, other=0)
                total += word.to(tl.uint64) * tl.load(keys + line).to(tl.uint64)
    else:
        base = address.to(tl.pointer_type(tl.uint8))
        for line in range(LINES):
            at = (start + line * LANES + lane) * 4
            word = tl.load(base + at, mask=at < size, other=0).to(tl.uint32)
            word |= tl.load(base + at + 1, mask=at + 1 < size, other=0).to(tl.uint32) << 8
            word |= tl.load(base + at + 2, mask=at + 2 < size, other=0).to(tl.uint32) << 16
            word |= tl.load(base + at + 3, mask=at + 3 < size, other=0).to(tl.uint32) << 24
            total += word.to(tl.uint64) * tl.load(keys + line).to(tl.uint64)
    z = total * ((2 * (chunk * LANES + lane) + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    z = (z ^ (z >> 33)) * 0xFF51AFD7ED558CCD
    z = (z ^ (z >> 33)) * 0xC4CEB9FE1A85EC53
    z = z ^ (z >> 33)
    tl.atomic_add(prints + row * tensors + tensor, tl.sum(z.to(tl.int64)), sem="relaxed")
