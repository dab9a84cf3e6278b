"""What a layer's row of the layout becomes in the dispatch buffers: one packed int32 row, filled on the host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eplb_core._arrays import FloatArray, IntArray
from eplb_core._numba import kernel
from eplb_core.dispatch._kernels import group_slots

Int32Array = npt.NDArray[np.int32]

UNIT = 1 << 30
"""Thresholds are in units of 1 / UNIT."""


class RowShape(NamedTuple):
    """Sizes and places of the parts of a packed row."""

    num_experts: int
    width: int
    """Most candidates of an expert."""
    num_shared: int
    """Most experts with several replicas; 0 = the row has no parts for the solver."""
    num_ranks: int
    slots_per_rank: int

    @property
    def candidates(self) -> int:
        """Where `[E, W]` slot names begin; the `[E]` numbers of candidates are before them."""
        return self.num_experts

    @property
    def thresholds(self) -> int:
        """Where `[E, W]` thresholds begin."""
        return self.candidates + self.num_experts * self.width

    @property
    def shared(self) -> int:
        """Where the `[N]` ids of experts with several replicas begin."""
        return self.thresholds + (self.num_experts * self.width if self.width > 1 else 0)

    @property
    def arm_rank(self) -> int:
        """Where the `[N, W]` ranks of those experts' slots begin."""
        return self.shared + self.num_shared

    @property
    def on_rank(self) -> int:
        """Where `[R, S]` begins: each slot's place in `[N, W]`, or -2 - e for an expert without another, or -1."""
        return self.arm_rank + self.num_shared * self.width

    @property
    def size(self) -> int:
        """Length of the row."""
        return self.on_rank + (self.num_ranks * self.slots_per_rank if self.num_shared else 0)


@kernel
def check_row(
    row: IntArray, shares: FloatArray, num_experts: int, width: int, starts: IntArray, by_expert: IntArray
) -> tuple[int, int, float]:
    """What stands against a row: (0, _, _) nothing; 1 expert with too many slots; 2 a bad share's slot; 3 a bad sum.

    `shares` has no entries where replicas share equally.
    """
    group_slots(row, starts, by_expert)
    for expert in range(num_experts):
        count = starts[expert + 1] - starts[expert]
        if count > width:
            return 1, expert, float(count)
        if shares.size:
            total = 0.0
            for i in range(starts[expert], starts[expert + 1]):
                share = shares[by_expert[i]]
                if not (0.0 <= share <= 1.0 + 1e-6):
                    return 2, by_expert[i], share
                total += share
            if not (abs(total - 1.0) <= 1e-6):
                return 3, expert, total
    return 0, 0, 0.0


@kernel
def fill_candidates(
    row: IntArray,
    shares: FloatArray,
    slot_ids: Int32Array,
    width: int,
    starts: IntArray,
    by_expert: IntArray,
    packed: Int32Array,
) -> tuple[int, int, float]:
    """Write numbers of candidates, candidates and thresholds of a row, or nothing: then what `check_row` says."""
    num_experts = starts.size - 1
    fault = check_row(row, shares, num_experts, width, starts, by_expert)
    if fault[0]:
        return fault
    first_candidate, first_threshold = num_experts, num_experts + num_experts * width
    for expert in range(num_experts):
        first, count = starts[expert], starts[expert + 1] - starts[expert]
        before = packed[expert]
        packed[expert] = count
        place, part = first_candidate + expert * width, first_threshold + expert * width
        packed[place] = slot_ids[by_expert[first]]
        if width == 1:
            continue
        packed[part] = 0
        cumulated = 0.0
        for k in range(1, count):
            packed[place + k] = slot_ids[by_expert[first + k]]
            if shares.size == 0:
                packed[part + k] = (k * UNIT + count - 1) // count
            else:
                cumulated += shares[by_expert[first + k - 1]]
                packed[part + k] = min(UNIT, int(cumulated * UNIT + 0.5))
        for k in range(count, before):
            packed[place + k] = -1
            packed[part + k] = UNIT
    return fault


@kernel
def fill_solver(
    row: IntArray,
    width: int,
    slots_per_rank: int,
    num_shared: int,
    starts: IntArray,
    by_expert: IntArray,
    packed: Int32Array,
) -> None:
    """Write what the solver of a batch's quotas reads; `starts` and `by_expert` are as `fill_candidates` left them.

    `packed` is the solver's part of the row. Experts with several replicas come in order of their number of replicas.
    """
    num_experts = starts.size - 1
    on_rank = packed[num_shared + num_shared * width :]
    for i in range(packed.size):
        packed[i] = -1
    for i in range(num_shared, num_shared + num_shared * width):
        packed[i] = 0
    n, wanted = 0, 2
    seen = 0
    for expert in range(num_experts):
        count = starts[expert + 1] - starts[expert]
        if count == 1:
            on_rank[by_expert[starts[expert]]] = -2 - expert
        else:
            seen += 1
    while n < seen:
        for expert in range(num_experts):
            first, count = starts[expert], starts[expert + 1] - starts[expert]
            if count != wanted:
                continue
            packed[n] = expert
            for k in range(count):
                slot = by_expert[first + k]
                packed[num_shared + n * width + k] = slot // slots_per_rank
                on_rank[slot] = n * width + k
            n += 1
        wanted += 1
