"""Even dispatch tables: one slot for each source rank, or entries repeated in proportion to shares."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from eplb_core._arrays import ArrayLike, FloatArray, IntArray, check_id, check_int, check_kind, check_made, read_only
from eplb_core._numba import inline_kernel, kernel
from eplb_core.dispatch.rows import group_slots
from eplb_core.layout import ExpertLayout
from eplb_core.metrics import check_load_of, check_shares, even_shares


def even_dispatch_table(layout: ExpertLayout, expert_load: ArrayLike | None = None) -> IntArray:
    """Choose the slot that each rank sends each expert's tokens to: equal amounts for replicas, near ones first.

    Where ranks send equal amounts of an expert (`expert_load` not given, `[L, E]`, or equal over ranks), the numbers of
    ranks per replica differ by one at most; among all such tables this one keeps the most tokens on their own rank,
    then within nodes. Where distance does not decide which replica gets one rank more, the replica on the rank with
    the least load so far gets it.

    Where ranks send unequal amounts (`[R, L, E]`), all tokens of a rank and expert go to one slot, and totals are as
    even as whole ranks allow: never worse than longest processing time first, usually the optimum. Within that maximum
    each rank takes its own slot, else its node's, else the emptiest.

    Mode "even" of `DispatchTables` is one rank's part of this table, "even_table" of `simulate` replays it, and `place`
    prepares for it by `dispatch="even"`.

    Args:
        layout: Where the experts are.
        expert_load: Tokens of each expert, `[L, E]`, or tokens that each rank sends, `[R, L, E]`. Default: all equal.

    Returns:
        int64 `[R, L, E]`, global slots. A layer's part depends on that layer's row and load alone.

    Raises:
        ValueError: The load's shape does not fit the layout, or it is NaN, infinite or negative.

    Cost:
        About 2 ms at 58 x 256 -> 288 on 32 ranks, 15 ms where ranks send unequal amounts. Any thread.

    Example:
        Eight ranks on two nodes; expert 0 has slots on the ranks 0, 2 and 4.

        >>> from eplb_core import Topology
        >>> topology = Topology(num_ranks=8, num_nodes=2)
        >>> row = [0, 1, 2, 3, 0, 4, 5, 6, 0, 7, 8, 9, 10, 11, 12, 13]
        >>> table = even_dispatch_table(ExpertLayout([row], num_experts=14, topology=topology))
        >>> table[:, 0, 0].tolist()
        [0, 0, 4, 4, 8, 8, 8, 0]
    """
    check_kind(layout, "layout", ExpertLayout)
    ranks, layers, experts = layout.topology.num_ranks, layout.num_layers, layout.num_experts
    table = np.empty((ranks, layers, experts), dtype=np.int64)
    load = np.ones((1, layers, experts)) if expert_load is None else check_load_of(layout, expert_load, by_source=True)
    load = load if load.ndim == 3 else load[None]
    owner, scratch = _memory(layout)
    p2l, node = layout.physical_to_logical_map, layout.topology.rank_to_node
    for layer in range(layers):
        # Read-only, like a caller's own array: the kernel is compiled for one kind.
        sent = read_only(np.ascontiguousarray(load[:, layer].T))  # [E, R] or [E, 1]
        _fill_layer(p2l[layer], owner, node, sent, *scratch, table[:, layer], 0)
    return table


def rank_filler(layout: ExpertLayout, rank: int) -> Callable[[int, IntArray], IntArray]:
    """Return a function from a layer's number and row to the rank's `[E]` part of `even_dispatch_table`."""
    owner, scratch = _memory(layout)
    node, sent = layout.topology.rank_to_node, read_only(np.ones((layout.num_experts, 1)))
    table = np.empty((1, layout.num_experts), dtype=np.int64)
    mine: IntArray = table[0]

    def fill_rank(layer: int, row: IntArray) -> IntArray:
        _fill_layer(row, owner, node, sent, *scratch, table, rank)
        return mine

    return fill_rank


def _memory(layout: ExpertLayout) -> tuple[IntArray, tuple[IntArray, FloatArray, IntArray]]:
    """Return the rank of each slot, and what `_fill_layer` works in."""
    ranks, experts, slots = layout.topology.num_ranks, layout.num_experts, layout.num_slots
    width = slots + ranks + experts + 1
    picks = np.empty((max(1, slots - experts), ranks), dtype=np.int64)
    scratch = (np.empty((8, width), dtype=np.int64), np.empty((3, width)), picks)
    return np.arange(slots) // layout.slots_per_rank, scratch


def hash_dispatch_table(
    layout: ExpertLayout, *, shares: ArrayLike | None = None, rank: int = 0, width: int = 64
) -> tuple[IntArray, IntArray]:
    """Build a table that weighs replicas for a kernel that only does `table[expert, hash % count[expert]]`.

    An expert's slots are repeated in proportion to their shares. Repeats are spread over the entries, and ranks start
    at different ones, so that the first tokens of many ranks spread as well.

    Args:
        layout: Where the experts are.
        shares: Fraction of its expert's tokens for each slot, `[L, P]`, as `replica_shares` gives. Default: equal.
        rank: Source rank, `0 <= rank < R`.
        width: Most entries of an expert, at least the most replicas of one.

    Returns:
        `table` int64 `[L, E, width]`, padded with -1, and `count` int64 `[L, E]`: the number of entries of an expert,
        the smallest up to `width` that comes nearest to its shares. A share is met within 0.5 / count.

    Raises:
        ValueError: `width` is too small, or `shares` does not fit the layout.
        IndexError: `rank` is out of range.

    Example:
        >>> from eplb_core import Topology
        >>> layout = ExpertLayout([[0, 0, 0]], num_experts=1, topology=Topology(num_ranks=3))
        >>> table, count = hash_dispatch_table(layout, shares=[[0.5, 0.25, 0.25]])
        >>> table[0, 0, :4].tolist(), int(count[0, 0])
        ([0, 1, 2, 0], 4)
    """
    rank = check_id(rank, "rank", check_kind(layout, "layout", ExpertLayout).topology.num_ranks)
    width = check_int(width, "width", 1)
    most = int(layout.replica_count.max(initial=1))
    if width < most:
        raise ValueError(f"`width` (={width}) must be at least {most}, the most replicas of an expert")
    fractions = even_shares(layout) if shares is None else check_shares(shares, layout)
    check_made(num_layers=layout.num_layers, num_experts=layout.num_experts, width=width)
    table = np.full((layout.num_layers, layout.num_experts, width), -1, dtype=np.int64)
    count = np.empty((layout.num_layers, layout.num_experts), dtype=np.int64)
    ints = np.empty((4, layout.num_slots + layout.num_experts + 1), dtype=np.int64)
    for layer, row in enumerate(layout.physical_to_logical_map):
        _repeat_layer(row, fractions[layer], rank, ints, table[layer], count[layer])
    return table, count


@kernel
def _fill_layer(
    row: IntArray,
    owner: IntArray,
    node: IntArray,
    sent: FloatArray,
    ints: IntArray,
    floats: FloatArray,
    picks: IntArray,
    table: IntArray,
    first_rank: int,
) -> None:
    """Fill rows of one layer's `[R, E]` from `first_rank` on.

    `sent` is `[E, R]`, or `[E, 1]` for ranks that send equally much.
    """
    num_ranks, num_experts = picks.shape[1], table.shape[1]
    starts, by_expert, home, shared = ints[0, : num_experts + 1], ints[1], ints[2], ints[3]
    rank_load = floats[0, :num_ranks]
    rank_load[:] = 0.0
    group_slots(row, starts, by_expert)
    num_shared = 0
    for expert in range(num_experts):
        home[expert] = by_expert[starts[expert]]
        total = 0.0
        for source in range(sent.shape[1]):
            total += sent[expert, source]
        if starts[expert + 1] - starts[expert] == 1:
            rank_load[owner[home[expert]]] += total
        else:
            shared[num_shared] = expert
            num_shared += 1
    for i in range(num_shared):
        expert = shared[i]
        slots, weights = by_expert[starts[expert] : starts[expert + 1]], sent[expert]
        equal = True
        for source in range(1, weights.size):
            if weights[source] != weights[0]:
                equal = False
        if equal:
            each = weights[0] / (num_ranks if weights.size == 1 else 1)
            _assign_equal(slots, owner, node, each, rank_load, ints[4:], picks[i])
        else:
            _assign_weighted(slots, owner, node, weights, rank_load, ints[4:], floats[1:], picks[i])
    for rank in range(table.shape[0]):
        for expert in range(num_experts):
            table[rank, expert] = home[expert]
        for i in range(num_shared):
            table[rank, shared[i]] = picks[i, first_rank + rank]


@inline_kernel
def _assign_equal(
    slots: IntArray,
    owner: IntArray,
    node: IntArray,
    each: float,
    rank_load: FloatArray,
    ints: IntArray,
    picks: IntArray,
) -> None:
    """Give each slot floor or ceil of R / count ranks: own ranks, then own node's, then any, in order of rank."""
    num_ranks, count = picks.size, slots.size
    room, has_extra = ints[0], ints[1]
    quota, extras = num_ranks // count, num_ranks % count
    for i in range(count):
        room[i] = quota
        has_extra[i] = 0
    picks[:] = -1
    for near in range(3):  # 0: own rank, 1: own node, 2: anywhere
        for turn in range(num_ranks if near else count):
            rank = turn if near else owner[slots[turn]]
            if picks[rank] >= 0:
                continue
            best, best_spare = -1, False
            for i in range(count):
                holder = owner[slots[i]]
                reach = 0 if holder == rank else (1 if node[holder] == node[rank] else 2)
                if reach > near:
                    continue
                spare = room[i] > 0
                if not spare and (extras == 0 or has_extra[i]):
                    continue
                # First what a slot gets anyway, then one rank more: where the rank has the least to do.
                if best < 0 or (spare and not best_spare):
                    best, best_spare = i, spare
                elif spare == best_spare and not spare and rank_load[holder] < rank_load[owner[slots[best]]]:
                    best = i
            if best >= 0:
                picks[rank] = slots[best]
                rank_load[owner[slots[best]]] += each
                if best_spare:
                    room[best] -= 1
                else:
                    has_extra[best] = 1
                    extras -= 1


@inline_kernel
def _assign_weighted(
    slots: IntArray,
    owner: IntArray,
    node: IntArray,
    weights: FloatArray,
    rank_load: FloatArray,
    ints: IntArray,
    floats: FloatArray,
    picks: IntArray,
) -> None:
    """Send each rank's whole weight to one slot with a low maximum over slots, then as near as that maximum allows."""
    num_ranks, count = picks.size, slots.size
    order, trial = ints[0], ints[1]
    filled = floats[0]
    total, heaviest = 0.0, 0.0
    for rank in range(num_ranks):  # insertion sort: heaviest first, then the lowest rank
        i = rank
        while i > 0 and weights[order[i - 1]] < weights[rank]:
            order[i] = order[i - 1]
            i -= 1
        order[i] = rank
        total += weights[rank]
        heaviest = max(heaviest, weights[rank])
    filled[:count] = 0.0
    high = 0.0
    for i in range(num_ranks):  # longest processing time first
        rank = order[i]
        best = 0
        for k in range(1, count):
            if filled[k] < filled[best]:
                best = k
        picks[rank] = slots[best]
        filled[best] += weights[rank]
        high = max(high, filled[best])
    low = max(total / count, heaviest)
    for attempt in range(12):
        limit = high if attempt == 0 else (low if attempt == 1 else 0.5 * (low + high))
        if _fit(slots, owner, node, weights, order, limit, filled, trial):
            for rank in range(num_ranks):
                picks[rank] = slots[trial[rank]]
            high = limit
        elif attempt:
            low = limit
        if high <= low:
            break
    for rank in range(num_ranks):
        rank_load[owner[picks[rank]]] += weights[rank]


@inline_kernel
def _fit(
    slots: IntArray,
    owner: IntArray,
    node: IntArray,
    weights: FloatArray,
    order: IntArray,
    limit: float,
    filled: FloatArray,
    trial: IntArray,
) -> bool:
    """Put each rank on its nearest slot that stays within `limit`, emptiest first; False if one fits nowhere."""
    filled[: slots.size] = 0.0
    for i in range(trial.size if trial.size < weights.size else weights.size):
        rank = order[i]
        best, best_reach = -1, 3
        for k in range(slots.size):
            if filled[k] + weights[rank] > limit:
                continue
            holder = owner[slots[k]]
            reach = 0 if holder == rank else (1 if node[holder] == node[rank] else 2)
            if reach < best_reach or (reach == best_reach and filled[k] < filled[best]):
                best, best_reach = k, reach
        if best < 0:
            return False
        trial[rank] = best
        filled[best] += weights[rank]
    return True


@kernel
def _repeat_layer(
    row: IntArray, shares: FloatArray, rank: int, ints: IntArray, table: IntArray, count: IntArray
) -> None:
    """Entries of one layer: the best number of entries, largest remainders, then spread like a Bresenham line."""
    num_experts, width = table.shape
    starts, by_expert, repeats, credit = ints[0, : num_experts + 1], ints[1], ints[2], ints[3]
    group_slots(row, starts, by_expert)
    for expert in range(num_experts):
        slots = by_expert[starts[expert] : starts[expert + 1]]
        entries, best = slots.size, np.inf
        for trial in range(1, width + 1):
            _largest_remainder(slots, shares, trial, repeats)
            error = 0.0
            for i in range(slots.size):
                error = max(error, abs(shares[slots[i]] - repeats[i] / trial))
            if error < best - 1e-12:
                entries, best = trial, error
        _largest_remainder(slots, shares, entries, repeats)
        count[expert] = entries
        credit[: slots.size] = 0
        for i in range(entries):
            top = 0
            for k in range(slots.size):
                credit[k] += repeats[k]
                if credit[k] > credit[top]:
                    top = k
            credit[top] -= entries
            # Rank r starts r entries later, and another expert elsewhere.
            table[expert, (i + entries - (rank + expert) % entries) % entries] = slots[top]


@inline_kernel
def _largest_remainder(slots: IntArray, shares: FloatArray, total: int, repeats: IntArray) -> None:
    """Split `total` in the proportion of `shares`: floors, then one more for the largest rests, lowest slots first."""
    left = total
    for i in range(slots.size):
        repeats[i] = np.int64(shares[slots[i]] * total + 1e-9)
        left -= repeats[i]
    while left > 0:
        best, best_rest = 0, -np.inf
        for i in range(slots.size):
            rest = shares[slots[i]] * total - repeats[i]
            if rest > best_rest + 1e-12:
                best, best_rest = i, rest
        repeats[best] += 1
        left -= 1
