"""What a layer's row of the layout becomes in the dispatch buffers: one packed int32 row, filled on the host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eplb_core._arrays import FloatArray, IntArray
from eplb_core._numba import inline_kernel, kernel
from eplb_core.dispatch.constants import FIRST_BITS, ORDERS, TURN_BITS, UNIT, row_parts
from eplb_core.metrics import SHARES_ROUNDING

Int32Array = npt.NDArray[np.int32]
parts_of = inline_kernel(row_parts)


class RowShape(NamedTuple):
    """Sizes of a packed row, and where its parts begin."""

    num_experts: int
    num_slots: int
    width: int
    """Most candidates of an expert; 1 = the row is one slot per expert and nothing else."""
    num_shared: int
    """Most experts with several replicas; 0 = the row has no parts for the solver."""
    num_ranks: int
    slots_per_rank: int
    num_nodes: int
    """Nodes that runs are kept apart by; 0 = one run for each expert."""

    @property
    def starts(self) -> tuple[int, ...]:
        """Where candidates, runs, thresholds, span, masks, orders, shared, arm_rank and on_rank begin; the last's end.

        `LayerTables` says what each is.
        """
        experts, shared_ranks = self.num_experts, self.num_ranks * self.slots_per_rank if self.num_shared else 0
        lists = experts * max(1, self.num_nodes)
        runs, thresholds, span, masks = row_parts(self.num_slots, lists) if self.width > 1 else (experts,) * 4
        orders = masks + (experts if self.num_nodes else 0)
        shared = orders + (ORDERS if self.num_nodes else 0)
        arm_rank = shared + self.num_shared
        on_rank = arm_rank + self.num_shared * self.width
        return 0, runs, thresholds, span, masks, orders, shared, arm_rank, on_rank, on_rank + shared_ranks

    @property
    def size(self) -> int:
        """Length of the row, a multiple of 16 bytes: the device reads pairs of names at once."""
        return -(-self.starts[-1] // 4) * 4


@inline_kernel
def group_slots(row: IntArray, starts: IntArray, by_expert: IntArray) -> None:
    """Sort slots by expert: those of e are `by_expert[starts[e]:starts[e + 1]]`, ascending; empty slots are left out.

    `starts` is `[E + 1]`, `by_expert` at least as long as `row`.
    """
    experts = starts.size - 1
    starts[:] = 0
    for slot in range(row.size):
        if row[slot] >= 0:
            starts[row[slot]] += 1
    end = 0
    for expert in range(experts):
        end += starts[expert]
        starts[expert] = end  # one past the run; the pass from the back makes it the run's start
    starts[experts] = end
    for slot in range(row.size - 1, -1, -1):
        if row[slot] >= 0:
            starts[row[slot]] -= 1
            by_expert[starts[row[slot]]] = slot


@inline_kernel
def _look_at(
    row: IntArray, shares: FloatArray, num_experts: int, width: int, starts: IntArray, by_expert: IntArray
) -> tuple[int, int, float]:
    group_slots(row, starts, by_expert)
    for expert in range(num_experts):
        count = starts[expert + 1] - starts[expert]
        if count > width:
            return 1, expert, float(count)
        if shares.size:
            total = 0.0
            for i in range(starts[expert], starts[expert + 1]):
                share = shares[by_expert[i]]
                if not (0.0 <= share <= 1.0 + SHARES_ROUNDING):
                    return 2, by_expert[i], share
                total += share
            if not (abs(total - 1.0) <= SHARES_ROUNDING):
                return 3, expert, total
    return 0, 0, 0.0


@kernel
def check_row(
    row: IntArray, shares: FloatArray, num_experts: int, width: int, scratch: IntArray
) -> tuple[int, int, float]:
    """What stands against a row: (0, _, _) nothing; 1 expert with too many slots; 2 a bad share's slot; 3 a bad sum.

    `shares` has no entries where replicas share equally. `scratch` is `[3, max(P, E + 1)]`.
    """
    return _look_at(row, shares, num_experts, width, scratch[0, : num_experts + 1], scratch[1])


@kernel
def fill_row(
    row: IntArray,
    shares: FloatArray,
    slot_ids: Int32Array,
    num_experts: int,
    width: int,
    slots_per_rank: int,
    num_shared: int,
    scratch: IntArray,
    packed: Int32Array,
) -> tuple[int, int, float]:
    """Write a whole row, or nothing where something stands against it: then what `check_row` says."""
    starts, by_expert, weights = scratch[0, : num_experts + 1], scratch[1], scratch[2]
    fault = _look_at(row, shares, num_experts, width, starts, by_expert)
    if fault[0]:
        return fault
    if width == 1:
        for expert in range(num_experts):
            packed[expert] = slot_ids[by_expert[starts[expert]]]
        return fault
    runs_at, thresholds_at, span_at, solver_at = parts_of(row.size, num_experts)
    runs, thresholds = packed[runs_at:thresholds_at], packed[thresholds_at:span_at]
    most = 1
    for expert in range(num_experts):
        first, count = starts[expert], starts[expert + 1] - starts[expert]
        runs[expert] = first | count << FIRST_BITS
        most = max(most, count)
        for i in range(first, first + count):
            packed[2 * i] = packed[2 * i + 1] = slot_ids[by_expert[i]]
            thresholds[i] = UNIT
        if count > 1 and shares.size:
            _pair(first, count, shares, by_expert, slot_ids, weights, thresholds, packed)
    for i in range(starts[num_experts], row.size):
        packed[2 * i] = packed[2 * i + 1] = thresholds[i] = -1
    span = 0
    while most > max(1, 2 * span):
        span = max(1, 2 * span)
    packed[span_at] = span
    if num_shared:
        _fill_solver(width, slots_per_rank, num_shared, starts, by_expert, packed[solver_at:])
    return fault


@kernel
def fill_near_row(
    row: IntArray,
    shares: FloatArray,
    slot_ids: Int32Array,
    num_experts: int,
    width: int,
    slots_per_rank: int,
    node: IntArray,
    num_nodes: int,
    orders: IntArray,
    start: int,
    scratch: IntArray,
    packed: Int32Array,
) -> tuple[int, int, float]:
    """As `fill_row`, for mode "near": an expert's candidates are kept apart by node, and so are their shares.

    `node` is that of each rank `[R]`; `orders` are those of the rank's node `[ORDERS]`, of which row 0 takes `start`.
    """
    starts, by_expert, weights = scratch[0, : num_experts + 1], scratch[1], scratch[2]
    fault = _look_at(row, shares, num_experts, width, starts, by_expert)
    if fault[0]:
        return fault
    runs_at, thresholds_at, span_at, masks_at = parts_of(row.size, num_experts * num_nodes)
    thresholds = packed[thresholds_at:span_at]
    for expert in range(num_experts):
        first, last = starts[expert], starts[expert + 1]
        for i in range(first + 1, last):  # by node, then by slot
            slot, j = by_expert[i], i
            while j > first and node[by_expert[j - 1] // slots_per_rank] > node[slot // slots_per_rank]:
                by_expert[j] = by_expert[j - 1]
                j -= 1
            by_expert[j] = slot
        mask = 0
        for n in range(num_nodes):
            begin, total = first, 0.0
            while first < last and node[by_expert[first] // slots_per_rank] == n:
                slot = by_expert[first]
                packed[2 * first] = packed[2 * first + 1] = slot_ids[slot]
                thresholds[first] = UNIT
                if shares.size:
                    total += shares[slot]
                mask |= 1 << n
                first += 1
            packed[runs_at + n * num_experts + expert] = begin | (first - begin) << FIRST_BITS
            if first - begin > 1 and total > 0.0:
                _pair(begin, first - begin, shares, by_expert, slot_ids, weights, thresholds, packed)
        packed[masks_at + expert] = mask
    for i in range(starts[num_experts], row.size):
        packed[2 * i] = packed[2 * i + 1] = thresholds[i] = -1
    for i in range(ORDERS):
        order = orders[(start + i) % ORDERS]
        packed[masks_at + num_experts + i] = (num_nodes - order // 2) % num_nodes | order % 2 << TURN_BITS
    packed[span_at] = 0
    return fault


@inline_kernel
def _pair(
    first: int,
    count: int,
    shares: FloatArray,
    by_expert: IntArray,
    slot_ids: Int32Array,
    weights: IntArray,
    thresholds: Int32Array,
    names: Int32Array,
) -> None:
    """Walker's alias table of one expert: any shares, and yet a choice reads one entry.

    Each of `count` equal parts of [0, 1) belongs to its own slot up to a threshold, and to one other from there on.
    In integers: shares add up to 2^30 exactly, times `count`. Slots with too much give to those with too little, both
    in ascending order.

    Source: A. J. Walker, "An efficient method for generating discrete random variables with general distributions"
    (1977).
    """
    total, until, begin = 0.0, 0.0, 0
    for i in range(count):
        total += shares[by_expert[first + i]]
    for i in range(count):
        until += shares[by_expert[first + i]]
        end = int(until / total * UNIT + 0.5)
        weights[i] = (end - begin) * count
        begin = end
    rich, seen, poor = 0, 0, -1
    while True:
        while rich < count and weights[rich] <= UNIT:
            rich += 1
        if poor < 0:
            while seen < count and weights[seen] >= UNIT:
                seen += 1
            poor = seen
        if rich >= count or poor >= count:
            break
        thresholds[first + poor] = weights[poor]
        names[2 * (first + poor) + 1] = slot_ids[by_expert[first + rich]]
        weights[rich] -= UNIT - weights[poor]
        weights[poor] = UNIT
        poor = rich if weights[rich] < UNIT else -1  # who gave too much is served next


@inline_kernel
def _fill_solver(
    width: int, slots_per_rank: int, num_shared: int, starts: IntArray, by_expert: IntArray, packed: Int32Array
) -> None:
    """Write what the solver of a batch's quotas reads; `packed` is its part of the row.

    Experts with several replicas come in order of their number of replicas.
    """
    num_experts = starts.size - 1
    on_rank = packed[num_shared + num_shared * width :]
    packed[:num_shared] = -1
    packed[num_shared : num_shared + num_shared * width] = 0
    on_rank[:] = -1
    n, wanted, seen = 0, 2, 0
    for expert in range(num_experts):
        if starts[expert + 1] - starts[expert] == 1:
            on_rank[by_expert[starts[expert]]] = -2 - expert
        else:
            seen += 1
    while n < seen:
        following = starts[num_experts] + 1
        for expert in range(num_experts):
            first, count = starts[expert], starts[expert + 1] - starts[expert]
            if wanted < count < following:
                following = count
            if count != wanted:
                continue
            packed[n] = expert
            for k in range(count):
                slot = by_expert[first + k]
                packed[num_shared + n * width + k] = slot // slots_per_rank
                on_rank[slot] = n * width + k
            n += 1
        wanted = following
