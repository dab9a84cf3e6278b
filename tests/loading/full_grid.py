# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""A kernel that takes every place for threads on a GPU and waits, as a cooperative kernel waits for its peers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

WARPS = 32
SECONDS = 6


class FullGrid:
    """As many blocks of 1,024 threads as fit at once; each stays until the flag is set, or some seconds have passed."""

    def __init__(self) -> None:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        per_core = properties.max_threads_per_multi_processor // (32 * WARPS)
        self.blocks = properties.multi_processor_count * per_core
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


@triton.jit
def _now():
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["nanoseconds"])
def _wait(flag, arrived, nanoseconds):
    tl.atomic_add(arrived, 1)
    end = _now() + nanoseconds
    while (tl.atomic_add(flag, 0) == 0) & (_now() < end):
        pass
