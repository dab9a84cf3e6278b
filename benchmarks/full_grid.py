# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Kernels that take every place for threads on a GPU, as cooperative kernels of mixture-of-experts layers do."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
import triton
import triton.language as tl

WARPS = 32
SECONDS = 6
LOOKS = 1_000_000
"""At about a microsecond each."""


def blocks_at_once() -> int:
    """Of 1,024 threads, on the current device."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return properties.multi_processor_count * (properties.max_threads_per_multi_processor // (32 * WARPS))


class FullGrid:
    """As many blocks of 1,024 threads as fit at once; each stays until the flag is set, or some seconds have passed."""

    def __init__(self) -> None:
        self.blocks = blocks_at_once()
        self.flag = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.arrived = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.on = torch.ones(1, dtype=torch.int32, pin_memory=True)
        self.seen = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self.stream, self.side = torch.cuda.Stream(), torch.cuda.Stream()
        self.over = torch.cuda.Event()
        self.flag.fill_(1)  # compiles, and ends at once
        self._launch()
        torch.cuda.synchronize()
        self.flag.zero_()
        self.arrived.zero_()
        torch.cuda.synchronize()

    def begin(self) -> None:
        """Launch it, and wait until all blocks are there."""
        self._launch()
        while self._arrived() < self.blocks:
            if self.over.query():
                raise RuntimeError("the blocks do not fit at once")

    def holds_all(self) -> bool:
        """All blocks are still there."""
        return self._arrived() == self.blocks and not self.over.query()

    def end(self) -> None:
        """Let it end."""
        with torch.cuda.stream(self.side):  # from pinned memory: a copy engine
            self.flag.copy_(self.on, non_blocking=True)
        self.stream.synchronize()

    def _launch(self) -> None:
        with torch.cuda.stream(self.stream):
            _wait[(self.blocks,)](self.flag, self.arrived, SECONDS * 1_000_000_000, num_warps=WARPS)
            self.over.record()

    def _arrived(self) -> int:
        with torch.cuda.stream(self.side):
            self.seen.copy_(self.arrived, non_blocking=True)
            self.side.synchronize()
        return int(self.seen[0])


class Meeting:
    """A cooperative kernel of all ranks: no block ends before all blocks of all ranks are there.

    What fused dispatch and combine kernels do. If anything else holds a core for as long as it waits for a peer, no
    rank goes on: then the blocks give up after some seconds, and `gave_up` tells. Ranks see each other's arrival in a
    file of words that all map, one a rank.
    """

    def __init__(self, path: Path, rank: int, ranks: int) -> None:
        self.blocks, self.rank, self.ranks, self.number = blocks_at_once(), rank, ranks, 0
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        self.words = torch.frombuffer(self._map, dtype=torch.int32)
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self.words.data_ptr(), mmap.PAGESIZE, 0))
        self.state = torch.zeros(3, dtype=torch.int32, device="cuda")  # arrived, all ranks are there, gave up

    def launch(self) -> None:
        """On the current stream."""
        self.number += 1
        _meet[(self.blocks,)](
            self.words.data_ptr(), self.state, self.blocks, self.rank, self.number,
            looks=LOOKS, ranks=self.ranks, num_warps=WARPS,
        )  # fmt: skip

    def gave_up(self) -> int:
        """Blocks, in all launches."""
        return int(self.state[2])


# Looks are counted and not timed: all threads of a block must leave a loop together, and clocks differ.
@triton.jit(do_not_specialize=["address", "blocks", "rank", "number"])
def _meet(address, state, blocks, rank, number, looks: tl.constexpr, ranks: tl.constexpr):
    words = address.to(tl.pointer_type(tl.int32))
    tl.atomic_add(state, 1)
    left = looks
    while (tl.atomic_add(state, 0) < blocks * number) & (left > 0):
        left -= 1
    if tl.program_id(0) == 0:
        tl.store(words + rank, number)
        for peer in range(ranks):
            there = looks
            while (tl.load(words + peer, volatile=True) < number) & (there > 0):
                there -= 1
        tl.atomic_xchg(state + 1, number)
    left = looks
    while (tl.atomic_add(state + 1, 0) < number) & (left > 0):
        left -= 1
    tl.atomic_add(state + 2, (left == 0).to(tl.int32))


@triton.jit
def _now():
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["nanoseconds"])
def _wait(flag, arrived, nanoseconds):
    tl.atomic_add(arrived, 1)
    end = _now() + nanoseconds
    while (tl.atomic_add(flag, 0) == 0) & (_now() < end):
        pass
