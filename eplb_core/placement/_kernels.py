"""One window's placement of one layer, as serial kernels: order, replica counts, packing.

A *block* is the part of the problem that a kernel sees: some experts (ids 0..n-1 of the block), some ranks (0..m-1 of the
block) with `cap[r]` slots each and relative speeds. The whole layer is one block, or every node is one. Slot arrays have
a stride of S places a rank; place `r * S + i` is the i-th slot of rank r, and a rank's slots stand in descending order
of share, so that two ranks can be compared by one walk along both.

All decisions are comparisons of float64 values that come from + - * / in program order, with ties broken by the lowest
id: equal inputs give equal bytes everywhere.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_core._arrays import FloatArray, IntArray
from eplb_core._numba import inline_kernel, kernel

_FULL = np.int64(0x7FFFFFFFFFFFFFFF)


class Scratch(NamedTuple):
    """Memory for one block at a time; allocated once a call, so that no kernel allocates."""

    weight: FloatArray
    """Load of each expert `[E]`."""
    order: IntArray
    """Experts by descending load `[E]`."""
    count: IntArray
    """Replicas of each expert `[E]`."""
    bucket: IntArray
    start: IntArray
    heap_share: FloatArray
    heap_expert: IntArray
    item_share: FloatArray
    """Experts by descending share `[E]`, and whose share it is."""
    item_expert: IntArray
    tree: IntArray
    """Tournament over ranks: node 1 has the least loaded rank that has room."""
    chosen: IntArray
    load: FloatArray
    """Load of each rank `[R]`."""
    fill: IntArray
    """Slots used of each rank `[R]`."""
    share: FloatArray
    """Share of the replica in each place `[R * S]`."""
    expert: IntArray
    """Expert in each place `[R * S]`, -1 beyond the rank's slots."""
    speed: FloatArray
    """Relative speed of each rank `[R]`."""
    pace: FloatArray
    """1 / speed `[R]`: time for one token."""
    node: IntArray
    """Node of each rank `[R]`."""
    home: IntArray
    """Node in which one replica of the expert must stay `[E]`, -1 = none."""
    home_count: IntArray
    """Replicas of the expert in its home `[E]`."""
    queue: IntArray
    """Ranks by ascending time `[R]`, while a search runs."""
    best_share: FloatArray
    best_expert: IntArray
    best_load: FloatArray
    best_count: IntArray
    """The best assignment so far, while another is tried."""
    work: IntArray
    """`[3]`: rank pairs looked at so far, how many may be looked at, and the state of the generator of kicks."""


def new_scratch(num_experts: int, num_ranks: int, slots_per_rank: int) -> Scratch:
    """Memory for blocks of at most these sizes."""
    buckets, leaves = 2, 1
    while buckets < 2 * num_experts:
        buckets *= 2
    while leaves < num_ranks:
        leaves *= 2
    places = num_ranks * slots_per_rank

    def ids(size: int) -> IntArray:
        return np.zeros(size, dtype=np.int64)

    return Scratch(
        weight=np.zeros(num_experts),
        order=ids(num_experts),
        count=ids(num_experts),
        bucket=ids(num_experts),
        start=ids(buckets + 2),
        heap_share=np.zeros(num_experts + 1),
        heap_expert=ids(num_experts + 1),
        item_share=np.zeros(num_experts),
        item_expert=ids(num_experts),
        tree=ids(2 * leaves),
        chosen=ids(num_ranks),
        load=np.zeros(num_ranks),
        fill=ids(num_ranks),
        share=np.zeros(places),
        expert=ids(places),
        speed=np.ones(num_ranks),
        pace=np.ones(num_ranks),
        node=ids(num_ranks),
        home=np.full(num_experts, -1, dtype=np.int64),
        home_count=ids(num_experts),
        queue=ids(num_ranks),
        best_share=np.zeros(places),
        best_expert=ids(places),
        best_load=np.zeros(num_ranks),
        best_count=ids(num_experts),
        work=ids(3),
    )


@kernel
def sort_by_load(n: int, scratch: Scratch) -> None:
    """Fill `scratch.order[:n]` with the experts by descending load, ties by ascending id.

    The bits of a float that is not negative order as integers do, and spread loads evenly on a log scale: one counting
    pass over them leaves every expert next to its place, and an insertion sort does the rest. Loads that crowd into few
    buckets are merge-sorted instead.
    """
    order, bucket, start = scratch.order, scratch.bucket, scratch.start
    load = scratch.weight[:n]
    bits = load.view(np.int64)
    high = np.int64(0)
    low = _FULL
    for e in range(n):
        high = max(high, bits[e])
        if bits[e] > 0:
            low = min(low, bits[e])
    for e in range(n):
        order[e] = e
    if high == 0:
        return
    num_buckets = start.size - 2
    scale = (num_buckets - 1) / (np.float64(high - low) + 1.0)
    start[:] = 0
    for e in range(n):
        place = num_buckets if bits[e] <= 0 else np.int64((high - bits[e]) * scale)
        bucket[e] = place
        start[place + 1] += 1
    crowd = np.int64(0)
    for b in range(num_buckets):
        crowd = max(crowd, start[b + 1])
        start[b + 1] += start[b]
    if crowd > 32:
        _merge_sort(load, order, bucket)
        return
    for e in range(n):
        place = bucket[e]
        order[start[place]] = e
        start[place] += 1
    for i in range(1, n):
        e = order[i]
        j = i
        while j > 0 and load[order[j - 1]] < load[e]:
            order[j] = order[j - 1]
            j -= 1
        order[j] = e


@kernel
def _merge_sort(load: FloatArray, order: IntArray, other: IntArray) -> None:
    """Stable, bottom-up, descending; `order` holds the ids and the answer, `other` is scratch of the same length."""
    n = load.size
    width = 1
    while width < n:
        for left in range(0, n, 2 * width):
            middle = min(left + width, n)
            right = min(left + 2 * width, n)
            i, j = left, middle
            for place in range(left, right):
                if i < middle and (j >= right or load[order[i]] >= load[order[j]]):
                    other[place] = order[i]
                    i += 1
                else:
                    other[place] = order[j]
                    j += 1
        for place in range(n):
            order[place] = other[place]
        width *= 2


@kernel
def count_replicas(n: int, num_slots: int, most: int, scratch: Scratch) -> int:
    """Give every expert one slot and each further slot to the expert with the largest share; returns how many got more.

    That is the divisor method of Jefferson and D'Hondt, and it makes the largest share as small as any choice of counts
    can (docs/placement.md has the exchange argument). No expert gets more than `most`. Experts are taken from the sorted
    order until none of the rest can win, so that the heap stays as small as the number of replicated experts.

    Needs `sort_by_load`; fills `scratch.count`. `num_slots` must not exceed n * most.
    """
    load, order, count = scratch.weight, scratch.order, scratch.count
    heap, heap_expert = scratch.heap_share, scratch.heap_expert
    for e in range(n):
        count[e] = 1
    size = 0
    for _ in range(num_slots - n):
        # Among equal shares an expert with one replica goes first: spare slots of a layer with few hot experts spread.
        if size < n and (size == 0 or load[order[size]] >= heap[0]):
            e = order[size]
            i = size
            size += 1
            count[e] += 1
            share = load[e] / count[e] if count[e] < most else -1.0
            while i > 0:
                parent = (i - 1) >> 1
                if heap[parent] > share or (heap[parent] == share and heap_expert[parent] < e):
                    break
                heap[i] = heap[parent]
                heap_expert[i] = heap_expert[parent]
                i = parent
        else:
            e = heap_expert[0]
            count[e] += 1
            share = load[e] / count[e] if count[e] < most else -1.0
            i = 0
            while 2 * i + 1 < size:
                child = 2 * i + 1
                right = child + 1
                if right < size and (
                    heap[right] > heap[child] or (heap[right] == heap[child] and heap_expert[right] < heap_expert[child])
                ):
                    child = right
                if share > heap[child] or (share == heap[child] and e < heap_expert[child]):
                    break
                heap[i] = heap[child]
                heap_expert[i] = heap_expert[child]
                i = child
        heap[i] = share
        heap_expert[i] = e
    return size


@kernel
def sort_by_share(n: int, num_replicated: int, scratch: Scratch) -> None:
    """Fill `scratch.item_expert` with the experts by descending share, ties by order of load.

    Only the first `num_replicated` of the order by load have changed places: sort those, then merge with the rest.
    """
    load, order, count = scratch.weight, scratch.order, scratch.count
    share, expert = scratch.item_share, scratch.item_expert
    head_share, head = scratch.heap_share, scratch.heap_expert
    for i in range(num_replicated):
        e = order[i]
        value = load[e] / count[e]
        j = i
        while j > 0 and head_share[j - 1] < value:
            head_share[j] = head_share[j - 1]
            head[j] = head[j - 1]
            j -= 1
        head_share[j] = value
        head[j] = e
    i = 0
    j = num_replicated
    for place in range(n):
        if j >= n or (i < num_replicated and head_share[i] >= load[order[j]]):
            share[place] = head_share[i]
            expert[place] = head[i]
            i += 1
        else:
            share[place] = load[order[j]]
            expert[place] = order[j]
            j += 1


@inline_kernel
def _raise_key(tree: IntArray, leaf: int, key: int) -> None:
    """Set a leaf of the tournament and play its matches again."""
    tree[leaf] = key
    while leaf > 1:
        key = min(key, tree[leaf ^ 1])
        leaf >>= 1
        tree[leaf] = key


@kernel
def pack(num_experts: int, cap: IntArray, stride: int, scratch: Scratch) -> None:
    """Put the replicas, largest share first, each on the least loaded rank that has room and not yet that expert.

    Replicas of one expert stand together in the order, so taking all their ranks out of the tournament before any
    goes back keeps them apart. Where only ranks that hold the expert have room left, `_make_room` swaps one free.

    Needs `sort_by_share`, equal speeds, and counts of at most the number of ranks; fills `share`, `expert`, `load`.
    """
    count, tree, load, fill = scratch.count, scratch.tree, scratch.load, scratch.fill
    share, expert, chosen = scratch.share, scratch.expert, scratch.chosen
    item_expert, item_share = scratch.item_expert, scratch.item_share
    ranks = cap.size
    leaves = tree.size >> 1
    # A key orders ranks by load, then by slots used, then by rank: the low bits of the load make room for the others.
    bits = 1
    while (1 << bits) < leaves * (stride + 1):
        bits += 1
    tag = (1 << bits) - 1
    buffer = np.empty(1)
    as_bits = buffer.view(np.int64)
    for r in range(leaves):
        tree[leaves + r] = r if r < ranks and cap[r] > 0 else _FULL
    for node in range(leaves - 1, 0, -1):
        tree[node] = min(tree[2 * node], tree[2 * node + 1])
    for r in range(ranks):
        load[r] = 0.0
        fill[r] = 0
    expert[: ranks * stride] = -1
    share[: ranks * stride] = 0.0
    for item in range(num_experts):
        e = item_expert[item]
        value = item_share[item]
        for k in range(count[e]):
            if tree[1] == _FULL:
                r = _make_room(e, cap, stride, scratch)
            else:
                r = tree[1] & (leaves - 1)
            place = r * stride + fill[r]
            share[place] = value
            expert[place] = e
            fill[r] += 1
            load[r] += value
            chosen[k] = r
            if count[e] > 1:
                _raise_key(tree, leaves + r, _FULL)
        for k in range(count[e]):
            r = chosen[k]
            key = _FULL
            if fill[r] < cap[r]:
                buffer[0] = load[r]
                key = (as_bits[0] & ~tag) | (fill[r] * leaves + r)
            _raise_key(tree, leaves + r, key)


@kernel
def _make_room(e: int, cap: IntArray, stride: int, scratch: Scratch) -> int:
    """Free a slot for `e` on a rank without it, where only ranks that hold `e` have room; returns that rank.

    A full rank without `e` holds at least one expert that a rank with `e` and room does not: it has as many distinct
    experts as slots, and the other has `e` and fewer. The one with the smallest share moves.
    """
    share, expert, load, fill = scratch.share, scratch.expert, scratch.load, scratch.fill
    giver = -1
    best = np.inf
    place = taker = 0
    for r in range(cap.size):
        if fill[r] < cap[r] or holds(expert, r, stride, e):
            continue
        for i in range(r * stride + cap[r] - 1, r * stride - 1, -1):
            if share[i] + load[r] >= best:
                continue
            for t in range(cap.size):
                if fill[t] < cap[t] and not holds(expert, t, stride, expert[i]):
                    best = share[i] + load[r]
                    giver, place, taker = r, i, t
                    break
    moved, value = expert[place], share[place]
    for i in range(place, giver * stride + cap[giver] - 1):
        share[i] = share[i + 1]
        expert[i] = expert[i + 1]
    fill[giver] -= 1
    load[giver] -= value
    last = taker * stride + fill[taker]
    fill[taker] += 1
    load[taker] += value
    while last > taker * stride and share[last - 1] < value:
        share[last] = share[last - 1]
        expert[last] = expert[last - 1]
        last -= 1
    share[last] = value
    expert[last] = moved
    return giver


@kernel
def pack_anywhere(num_experts: int, cap: IntArray, stride: int, scratch: Scratch) -> None:
    """As `pack`, for ranks of unequal speed and for experts with a home: looks at every rank for every replica.

    The first replica of an expert with a home goes there; the others may use a node only while it keeps room for the
    first ones that are still to come. A replica that fits nowhere gives its slot up; slots left at the end go to the
    largest share that the rank does not hold. Counts are final only then, so shares and loads are written last.
    """
    count, load, fill, pace = scratch.count, scratch.load, scratch.fill, scratch.pace
    expert, node, home, home_count = scratch.expert, scratch.node, scratch.home, scratch.home_count
    item_expert, item_share, weight = scratch.item_expert, scratch.item_share, scratch.weight
    # Room that each node must keep; nodes are counted in `chosen`, which has a place a rank.
    room = scratch.chosen
    room[:] = 0
    for r in range(cap.size):
        load[r] = 0.0
        fill[r] = 0
        room[node[r]] += cap[r]
    for e in range(num_experts):
        home_count[e] = 0
        if home[e] >= 0:
            room[home[e]] -= 1
    expert[: cap.size * stride] = -1
    for item in range(num_experts):
        e = item_expert[item]
        value = item_share[item]
        wanted = count[e]
        count[e] = 0
        for _ in range(wanted):
            pinned = home[e] >= 0 and count[e] == 0
            best = np.inf
            rank = -1
            for r in range(cap.size):
                allowed = node[r] == home[e] if pinned else room[node[r]] > 0
                time = (load[r] + value) * pace[r]
                if fill[r] < cap[r] and allowed and time < best and not holds(expert, r, stride, e):
                    best = time
                    rank = r
            if rank >= 0:
                _fill(rank, e, value, stride, scratch)
                if not pinned:
                    room[node[rank]] -= 1
    for r in range(cap.size):
        while fill[r] < cap[r]:
            best = -1.0
            e = -1
            for f in range(num_experts):
                value = weight[f] / count[f]
                if value > best and not holds(expert, r, stride, f):
                    best = value
                    e = f
            _fill(r, e, best, stride, scratch)
    write_shares(cap, stride, scratch)


@kernel
def _fill(r: int, e: int, value: float, stride: int, scratch: Scratch) -> None:
    """Put a replica of `e` into the next free slot of `r`."""
    scratch.expert[r * stride + scratch.fill[r]] = e
    scratch.fill[r] += 1
    scratch.load[r] += value
    scratch.count[e] += 1
    if scratch.home[e] == scratch.node[r]:
        scratch.home_count[e] += 1


@kernel
def write_shares(cap: IntArray, stride: int, scratch: Scratch) -> None:
    """Derive shares, their order and the loads from `expert` and `count`."""
    share, expert, load = scratch.share, scratch.expert, scratch.load
    weight, count = scratch.weight, scratch.count
    for r in range(cap.size):
        first = r * stride
        total = 0.0
        for i in range(first, first + cap[r]):
            e = expert[i]
            value = weight[e] / count[e]
            j = i
            while j > first and share[j - 1] < value:
                share[j] = share[j - 1]
                expert[j] = expert[j - 1]
                j -= 1
            share[j] = value
            expert[j] = e
        for i in range(first, first + cap[r]):
            total += share[i]
        load[r] = total


@inline_kernel
def holds(expert: IntArray, rank: int, stride: int, e: int) -> bool:
    """Is `e` in a slot of `rank`?"""
    for i in range(rank * stride, rank * stride + stride):
        if expert[i] == e:
            return True
    return False


@inline_kernel
def put(
    rank: int,
    place: int,
    value: float,
    e: int,
    cap: IntArray,
    stride: int,
    share: FloatArray,
    expert: IntArray,
    load: FloatArray,
) -> None:
    """Replace what stands in `place` of `rank`, keep the descending order, and add the rank's load up anew.

    Loads are added up from the shares at each change, in their order: they never carry the rounding of the way there.
    """
    first = rank * stride
    end = first + cap[rank]
    i = place
    while i > first and share[i - 1] < value:
        share[i] = share[i - 1]
        expert[i] = expert[i - 1]
        i -= 1
    while i + 1 < end and share[i + 1] > value:
        share[i] = share[i + 1]
        expert[i] = expert[i + 1]
        i += 1
    share[i] = value
    expert[i] = e
    total = 0.0
    for j in range(first, end):
        total += share[j]
    load[rank] = total
