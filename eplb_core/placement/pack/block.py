"""One window's placement of one layer, as serial kernels: order, replica counts, packing.

A *block* is the part of the problem that a kernel sees: some experts (ids 0..n-1 of the block), some ranks (0..m-1)
with `cap[r]` slots each and relative speeds. The whole layer is one block, or every node is one. Slot arrays have a
stride of S per rank; place `r * S + i` is the i-th slot of rank r, and a rank's slots stand in descending order of
share, so that two ranks can be compared by one walk along both.

All decisions are comparisons of float64 values that come from + - * / in program order, with ties broken by the lowest
id: equal inputs give equal bytes everywhere.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_core._arrays import FloatArray, IntArray
from eplb_core._numba import inline_kernel, kernel

_FULL = np.int64(0x7FFFFFFFFFFFFFFF)
_TINY = 2.0**-900  # less than any load that counts; its inverse is still finite


# Rows of `Scratch.reals`, as long as there are experts, ranks or places.
EXPERT_LOAD = 0  # load of each expert
ITEM_SHARE = 1  # shares in descending order, one entry per expert
HEAP_SHARE = 2
RANK_LOAD = 3  # load of each rank
SPEED = 4  # relative speed of each rank
PACE = 5  # 1 / speed: time for one token
SHARE = 6  # share of the replica in each place
BEST_SHARE = 7  # the best assignment so far, while another is tried
BEST_LOAD = 8
QUEUE_TIME = 9  # load / speed of the ranks in QUEUE
NUM_REALS = 10

# Rows of `Scratch.ints`.
ORDER = 0  # experts by descending load
REPLICAS = 1  # replicas of each expert
ITEM_EXPERT = 2  # whose share stands in ITEM_SHARE
HEAP_EXPERT = 3
BUCKET = 4
START = 5
TREE = 6  # tournament over ranks: node 1 has the least loaded rank that has room
KEY = 7  # what a rank plays with in the tournament
CHOSEN = 8
FILL = 9  # slots used of each rank
EXPERT = 10  # expert in each place, -1 where there is none
NODE = 11  # node of each rank
HOME = 12  # node in which one replica of the expert must stay, -1 = none
HOME_COUNT = 13  # replicas of the expert in its home
QUEUE = 14  # ranks by ascending time, while a search runs
BEST_EXPERT = 15
BEST_REPLICAS = 16
WORK = 17  # rank pairs looked at so far, how many may be, state of the generator of kicks, any expert has a home, NONE
KEPT = 18  # an assignment that is kept while others are tried: experts, and in the next row counts
BEST_SO_FAR = 20  # the best one for any number of slots, in two rows too
NUM_INTS = 22

# Place in WORK of the id that stands for an empty slot: n, an expert without load; -1 where slots must be filled.
NONE = 4


class Scratch(NamedTuple):
    """Memory for one block at a time, allocated once per call, so that no kernel allocates.

    Two arrays and not one a row: arguments of a compiled call are many words an array, to pass and to compile.
    """

    reals: FloatArray
    """float64 `[NUM_REALS, n]`."""
    ints: IntArray
    """int64 `[NUM_INTS, n]`."""
    bits: IntArray
    """`reals` seen as int64: loads, which are not negative, order as their bits do."""


def new_scratch(num_experts: int, num_ranks: int, slots_per_rank: int) -> Scratch:
    """Memory for blocks of at most these sizes."""
    size = max(4 * num_experts + 2, 4 * num_ranks, num_ranks * slots_per_rank)
    reals = np.zeros((NUM_REALS, size))
    return Scratch(reals, np.zeros((NUM_INTS, size), dtype=np.int64), reals.view(np.int64))


@inline_kernel
def _power_of_two(n: int) -> int:
    """The least power of two that is not below `n`, and 2 or more."""
    power = 2
    while power < n:
        power *= 2
    return power


@kernel
def sort_by_load(n: int, scratch: Scratch) -> None:
    """Fill ORDER with the experts by descending load, ties by ascending id.

    The bits of a float that is not negative order as integers do, and spread loads evenly on a log scale: one counting
    pass over them leaves every expert next to its place, and an insertion sort does the rest. Loads that crowd into few
    buckets are merge-sorted instead.
    """
    order, bucket, start = scratch.ints[ORDER], scratch.ints[BUCKET], scratch.ints[START]
    load, bits = scratch.reals[EXPERT_LOAD], scratch.bits[EXPERT_LOAD]
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
    num_buckets = _power_of_two(2 * n)
    scale = (num_buckets - 1) / (np.float64(high - low) + 1.0)
    for b in range(num_buckets + 2):
        start[b] = 0
    for e in range(n):
        place = num_buckets if bits[e] <= 0 else np.int64((high - bits[e]) * scale)
        bucket[e] = place
        start[place + 1] += 1
    crowd = np.int64(0)
    for b in range(num_buckets):
        crowd = max(crowd, start[b + 1])
        start[b + 1] += start[b]
    if crowd > 32:
        _merge_sort(n, load, order, bucket)
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
def _merge_sort(n: int, load: FloatArray, order: IntArray, other: IntArray) -> None:
    """Stable, bottom-up, descending; `order` holds the ids and the answer, `other` is scratch of the same length."""
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
    can (docs/placement.md has the exchange argument). No expert gets more than `most`. Experts are taken from the
    sorted order until none of the rest can win, so that the heap stays as small as the number of replicated experts.

    Needs `sort_by_load`; fills REPLICAS. `num_slots` must not exceed n * most.
    """
    load, order, count = scratch.reals[EXPERT_LOAD], scratch.ints[ORDER], scratch.ints[REPLICAS]
    heap, heap_expert = scratch.reals[HEAP_SHARE], scratch.ints[HEAP_EXPERT]
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
                    heap[right] > heap[child]
                    or (heap[right] == heap[child] and heap_expert[right] < heap_expert[child])
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
    """Fill ITEM_EXPERT with the experts by descending share, ties by order of load.

    Only the first `num_replicated` of the order by load have changed places: sort those, then merge with the rest.
    """
    load, order, count = scratch.reals[EXPERT_LOAD], scratch.ints[ORDER], scratch.ints[REPLICAS]
    share, expert = scratch.reals[ITEM_SHARE], scratch.ints[ITEM_EXPERT]
    head_share, head = scratch.reals[HEAP_SHARE], scratch.ints[HEAP_EXPERT]
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
def _replay(tree: IntArray, leaf: int, key: np.int64) -> None:
    """Set a leaf of the tournament and play its matches again."""
    tree[leaf] = key
    while leaf > 1:
        key = min(key, tree[leaf ^ 1])
        leaf >>= 1
        tree[leaf] = key


@kernel
def pack(num_experts: int, cap: IntArray, stride: int, scratch: Scratch) -> None:
    """Put the replicas, largest share first, each on the least loaded rank that has room and not yet that expert.

    A rank's key in the tournament is one integer: its load in fixed point, then its used slots, then its number. Adding
    a replica adds to the key, so that no float is on the way from one choice to the next. Replicas of one expert stand
    together in the order, so taking all their ranks out of the tournament before any goes back keeps them apart. Where
    only ranks that hold the expert have room left, `_make_room` frees a slot.

    Needs `sort_by_share`, equal speeds, and counts of at most the number of ranks; fills `share`, `expert`, `load`.
    """
    count, tree, fill, key = scratch.ints[REPLICAS], scratch.ints[TREE], scratch.ints[FILL], scratch.ints[KEY]
    share, expert, chosen = scratch.reals[SHARE], scratch.ints[EXPERT], scratch.ints[CHOSEN]
    item_expert, item_share = scratch.ints[ITEM_EXPERT], scratch.reals[ITEM_SHARE]
    ranks = cap.size
    leaves = _power_of_two(ranks)
    low = leaves - 1
    rank_bits = bits = 0
    while (1 << rank_bits) < leaves:
        rank_bits += 1
    while (1 << bits) < leaves * (stride + 1):
        bits += 1
    total = 0.0
    for item in range(num_experts):
        total += item_share[item] * count[item_expert[item]]
    # Loads up to the total must fit above the tag, sign and one bit to spare left out.
    scale = np.float64(np.int64(1) << (61 - bits)) / max(total, _TINY)
    for r in range(leaves):
        tree[leaves + r] = r if r < ranks and cap[r] > 0 else _FULL
    for node in range(leaves - 1, 0, -1):
        tree[node] = min(tree[2 * node], tree[2 * node + 1])
    for r in range(ranks):
        fill[r] = 0
        key[r] = r
    for place in range(ranks * stride):
        expert[place] = -1
    for item in range(num_experts):
        e = item_expert[item]
        value = item_share[item]
        more = (np.int64(value * scale) << bits) + leaves
        replicas = count[e]
        for k in range(replicas):
            root = tree[1]
            if root == _FULL:
                r = _make_room(e, cap, stride, scratch)
            else:
                r = root & low
            used = fill[r]
            share[r * stride + used] = value
            expert[r * stride + used] = e
            fill[r] = used + 1
            key[r] += more
            if replicas == 1:
                _replay(tree, leaves + r, key[r] if used + 1 < cap[r] else _FULL)
            else:
                chosen[k] = r
                _replay(tree, leaves + r, _FULL)
        if replicas > 1:
            for k in range(replicas):
                r = chosen[k]
                if fill[r] < cap[r]:
                    _replay(tree, leaves + r, key[r])
    add_up(cap, stride, scratch)


@kernel
def _make_room(e: int, cap: IntArray, stride: int, scratch: Scratch) -> int:
    """Free a slot for `e` on a rank without it, where only ranks that hold `e` have room; returns that rank.

    A full rank without `e` holds at least one expert that a rank with `e` and room does not: it has as many distinct
    experts as slots, and the other has `e` and fewer. The one with the smallest share moves.
    """
    share, expert, fill, key = scratch.reals[SHARE], scratch.ints[EXPERT], scratch.ints[FILL], scratch.ints[KEY]
    giver = taker = place = -1
    best = np.inf
    for r in range(cap.size):
        if fill[r] < cap[r] or holds(expert, r, stride, e):
            continue
        for i in range(r * stride + cap[r] - 1, r * stride - 1, -1):
            if share[i] >= best:
                break
            for t in range(cap.size):
                if fill[t] < cap[t] and not holds(expert, t, stride, expert[i]):
                    best = share[i]
                    giver, place, taker = r, i, t
                    break
    moved = expert[place]
    for i in range(place, giver * stride + cap[giver] - 1):
        share[i] = share[i + 1]
        expert[i] = expert[i + 1]
    fill[giver] -= 1
    last = taker * stride + fill[taker]
    fill[taker] += 1
    # The tournament has no key of either: the giver is full again at once, the taker holds `e` and is out for now.
    key[taker] += _power_of_two(cap.size)
    while last > taker * stride and share[last - 1] < best:
        share[last] = share[last - 1]
        expert[last] = expert[last - 1]
        last -= 1
    share[last] = best
    expert[last] = moved
    return giver


@kernel
def add_up(cap: IntArray, stride: int, scratch: Scratch) -> None:
    """Loads of the ranks from the shares, in their order."""
    share, load = scratch.reals[SHARE], scratch.reals[RANK_LOAD]
    for r in range(cap.size):
        total = 0.0
        for i in range(r * stride, r * stride + cap[r]):
            total += share[i]
        load[r] = total


@kernel
def pack_anywhere(num_experts: int, cap: IntArray, stride: int, scratch: Scratch) -> None:
    """As `pack`, for ranks of unequal speed and for experts with a home: looks at every rank for every replica.

    The first replica of an expert with a home goes there; the others may use a node only while it keeps room for the
    first ones that are still to come. A replica that fits nowhere gives its slot up; slots left at the end stay empty
    where they may, or go to the largest share that the rank does not hold. Counts are final only then, so shares and
    loads are written last.
    """
    count, load, fill, pace = scratch.ints[REPLICAS], scratch.reals[RANK_LOAD], scratch.ints[FILL], scratch.reals[PACE]
    expert, node = scratch.ints[EXPERT], scratch.ints[NODE]
    home, home_count = scratch.ints[HOME], scratch.ints[HOME_COUNT]
    item_expert, item_share, tokens = scratch.ints[ITEM_EXPERT], scratch.reals[ITEM_SHARE], scratch.reals[EXPERT_LOAD]
    # Room that each node must keep; nodes are counted in `chosen`, which has one entry per rank.
    room = scratch.ints[CHOSEN]
    room[: cap.size] = 0
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
    none = scratch.ints[WORK, NONE]
    for r in range(cap.size):
        for i in range(fill[r], cap[r] if none >= 0 else 0):
            expert[r * stride + i] = none
        while none < 0 and fill[r] < cap[r]:
            best = -1.0
            e = -1
            for f in range(num_experts):
                value = tokens[f] / count[f]
                if value > best and not holds(expert, r, stride, f):
                    best = value
                    e = f
            _fill(r, e, best, stride, scratch)
    write_shares(cap, stride, scratch)


@kernel
def _fill(r: int, e: int, value: float, stride: int, scratch: Scratch) -> None:
    """Put a replica of `e` into the next free slot of `r`."""
    ints = scratch.ints
    ints[EXPERT, r * stride + ints[FILL, r]] = e
    ints[FILL, r] += 1
    scratch.reals[RANK_LOAD, r] += value
    ints[REPLICAS, e] += 1
    if ints[HOME, e] == ints[NODE, r]:
        ints[HOME_COUNT, e] += 1


@kernel
def write_shares(cap: IntArray, stride: int, scratch: Scratch) -> None:
    """Derive shares, their order and the loads from `expert` and `count`."""
    share, expert = scratch.reals[SHARE], scratch.ints[EXPERT]
    tokens, count = scratch.reals[EXPERT_LOAD], scratch.ints[REPLICAS]
    for r in range(cap.size):
        first = r * stride
        for i in range(first, first + cap[r]):
            e = expert[i]
            value = tokens[e] / count[e]
            j = i
            while j > first and share[j - 1] < value:
                share[j] = share[j - 1]
                expert[j] = expert[j - 1]
                j -= 1
            share[j] = value
            expert[j] = e
    add_up(cap, stride, scratch)


@inline_kernel
def holds(expert: IntArray, rank: int, stride: int, e: int) -> bool:
    """Is `e` in a slot of `rank`?"""
    for i in range(rank * stride, rank * stride + stride):  # noqa: SIM110 - a generator does not compile
        if expert[i] == e:
            return True
    return False


@inline_kernel
def put(
    rank: int, place: int, value: float, e: int, cap: IntArray, stride: int, reals: FloatArray, ints: IntArray
) -> None:
    """Replace what stands in `place` of `rank`, keep the descending order, and add the rank's load up anew.

    Loads are added up from the shares at each change, in their order: they never carry the rounding of the way there.
    """
    first = rank * stride
    end = first + cap[rank]
    i = place
    while i > first and reals[SHARE, i - 1] < value:
        reals[SHARE, i] = reals[SHARE, i - 1]
        ints[EXPERT, i] = ints[EXPERT, i - 1]
        i -= 1
    while i + 1 < end and reals[SHARE, i + 1] > value:
        reals[SHARE, i] = reals[SHARE, i + 1]
        ints[EXPERT, i] = ints[EXPERT, i + 1]
        i += 1
    reals[SHARE, i] = value
    ints[EXPERT, i] = e
    total = 0.0
    for j in range(first, end):
        total += reals[SHARE, j]
    reals[RANK_LOAD, rank] = total
