"""DeepSeek EPLB's algorithm with its own signature, types and answers, for those who must match it.

Two policies. Hierarchical, where the groups of experts divide over the nodes: groups are packed to nodes, the hottest
experts of each node replicated inside it, and the replicas packed to the node's ranks. Global: the same with one group
and one node. Packing takes items from the heaviest to the lightest, each to the lightest rank that has room; nothing
keeps two replicas of one expert apart, so answers may hold such pairs (`place` never does unless counting forces it).
Arithmetic is float32 in DeepSeek's order, but for integers that float32 does not hold. Where loads tie exactly its sort
leaves the order open; here the lowest index goes first, on every machine.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from eplb_core._arrays import FloatArray, IntArray, check_flag, check_int, check_load, check_made, to_numpy
from eplb_core._numba import inline_kernel, kernel
from eplb_core.placement.deepseek_exact import place_exactly

Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]
KeyArray = npt.NDArray[np.uint64]


def rebalance_experts(
    weight: torch.Tensor | npt.ArrayLike,
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_gpus: int,
    *,
    float32: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where does DeepSeek EPLB put the experts?

    Hierarchical if `num_nodes` divides `num_groups`; else global, which looks at neither number again.

    Args:
        weight: Load of each logical expert, `[L, E]`, any real dtype and device (a CUDA tensor costs one copy), or a
            numpy array. L may be 0. DeepSeek computes in float32; whole numbers that float32 does not hold (above
            2^24; integers or float64) are computed in float64 here, and so stay exact.
        num_replicas: Slots P, at least E, a multiple of `num_gpus`.
        num_groups: Groups of experts (1 where the model has none).
        num_nodes: Nodes N.
        num_gpus: EP ranks R; hierarchical: a multiple of `num_nodes`.
        float32: Compute in float32 whatever is lost, to have DeepSeek's answer for large counts too.

    Returns:
        On the CPU, all int64: the expert of each slot, `[L, P]`; the slots of each expert in order of replication,
        padded with -1, `[L, E, X]`, X = the most replicas of any expert; the replicas of each expert, `[L, E]`.

    Raises:
        ValueError: Numbers that do not divide (DeepSeek's bare assertions), P < E, a wrong shape, or a load that is
            NaN, infinite, negative or beyond float32 (of integers: beyond 2^53); the text names all numbers, or
            layer and expert.
        TypeError: Not integers, or a load that is not real.

    Cost:
        O(L * P * log P): about 1 ms at 58 x 256 -> 288 slots on 32 ranks; 12 to 25 us for a layer or a few small ones.
        Integers beyond float32: about 20 ms there.

    Threads:
        Any; the kernels run without the interpreter lock.

    Example:
        >>> phy2log, log2phy, logcnt = rebalance_experts(torch.tensor([[10, 9, 2, 1]]), 4, 1, 1, 2)
        >>> phy2log.tolist(), logcnt.tolist()
        ([[0, 3, 1, 2]], [[1, 1, 1, 1]])

    Source:
        deepseek-ai/EPLB, `rebalance_experts`; differs: ties have a stated order, large counts keep all their bits, an
        empty model is answered, and what would fail an assertion, or let a NaN take all replicas, raises with numbers.
    """
    if isinstance(weight, torch.Tensor) and not (weight.is_floating_point() or weight.is_complex()):
        weight = to_numpy(weight, "weight")
    load = _float32_rows(weight)
    layers, experts = load.shape
    slots = check_int(num_replicas, "num_replicas", 1)
    check_made(num_layers=layers, num_replicas=slots)
    groups = check_int(num_groups, "num_groups", 1)
    nodes = check_int(num_nodes, "num_nodes", 1)
    ranks = check_int(num_gpus, "num_gpus", 1)
    if groups % nodes:
        groups = nodes = 1
    if slots < experts or experts == 0 or slots % ranks or ranks % nodes or experts % groups:
        numbers = f"{experts} logical experts, {num_replicas=}, {num_groups=}, {num_nodes=}, {num_gpus=}"
        _raise_misfit(experts, slots, groups, nodes, ranks, numbers)
    if not check_flag(float32, "float32") and (exact := _beyond_float32(weight, load)) is not None:
        phy2log, log2phy, logcnt = place_exactly(exact, slots, groups, nodes, ranks)
        return torch.from_numpy(phy2log), torch.from_numpy(log2phy), torch.from_numpy(logcnt)

    phy2log = np.empty((layers, slots), dtype=np.int64)
    logcnt = np.empty((layers, experts), dtype=np.int64)
    replica_of = np.empty((layers, slots), dtype=np.int32)
    # One slot a rank: items stay in order, there is nothing to sort.
    keys = np.empty((layers * nodes, slots // nodes if slots > ranks else 0), dtype=np.uint64)
    most = _replicate(load, groups, nodes, keys, phy2log, replica_of, logcnt)
    if most < 0:
        check_load(weight, "weight", (2,))
        top = float(np.max(to_numpy(weight, "weight")))
        raise ValueError(f"`weight` (={top:g}) must fit float32; scale the load down")
    keys.sort(axis=1)  # unique integers: one order, whatever the algorithm
    log2phy = np.empty((layers, experts, most), dtype=np.int64)
    _pack(nodes, ranks // nodes, keys, replica_of, phy2log, log2phy)
    return torch.from_numpy(phy2log), torch.from_numpy(log2phy), torch.from_numpy(logcnt)


def _float32_rows(weight: torch.Tensor | npt.ArrayLike) -> Float32Array:
    """`[L, E]` as C-ordered, writable float32 on the host, rounded as DeepSeek rounds; copies only if it must."""
    if isinstance(weight, torch.Tensor):
        if weight.is_complex():
            raise TypeError(f"`weight` (dtype {weight.dtype}) must be integers or floats")
        load: npt.NDArray[Any] = np.asarray(to_numpy(weight.detach().float(), "weight"), order="C")
    else:
        array = to_numpy(weight, "weight")
        if array.dtype.kind not in "biuf":
            raise TypeError(f"`weight` (dtype {array.dtype}) must be integers or floats")
        with np.errstate(over="ignore"):  # infinite after rounding: refused below
            load = np.array(array, dtype=np.float32, order="C")
    if load.ndim != 2:
        raise ValueError(f"`weight` (shape {list(load.shape)}) must be [L, E]")
    return load


def _beyond_float32(weight: torch.Tensor | npt.ArrayLike, rounded: Float32Array) -> FloatArray | None:
    """Whole numbers `[L, E]` in float64 if float32 does not hold all of them, else None."""
    if isinstance(weight, torch.Tensor) and weight.dtype != torch.float64:
        return None
    given = to_numpy(weight.detach() if isinstance(weight, torch.Tensor) else weight, "weight")
    if given.dtype == np.float64:
        most = given.max(initial=0.0)
        if not (1 << 24 < most <= 1 << 53 and (given >= 0.0).all() and (given == np.floor(given)).all()):
            return None
    elif given.dtype.kind not in "iu" or int(given.max(initial=0)) <= 1 << 24:
        return None
    load = check_load(given, "weight", (2,))
    if int(given.max()) > 1 << 53:
        raise ValueError(f"`weight` (={int(given.max())}) must be at most 2^53 to stay exact; scale the load down")
    return None if (load == rounded).all() else load


def _raise_misfit(experts: int, slots: int, groups: int, nodes: int, ranks: int, numbers: str) -> None:
    if experts == 0:
        raise ValueError(f"`weight` must have one expert or more ({numbers})")
    if slots < experts:
        raise ValueError(f"`num_replicas` (={slots}) must be at least {experts}, one slot per expert ({numbers})")
    if slots % ranks:
        raise ValueError(f"`num_gpus` (={ranks}) must divide `num_replicas` (={slots}) ({numbers})")
    mend = "num_groups=1 and num_nodes=1 choose the global policy"
    if ranks % nodes:
        raise ValueError(f"`num_nodes` (={nodes}) must divide `num_gpus` (={ranks}) ({numbers}); {mend}")
    raise ValueError(f"`num_groups` (={groups}) must divide the logical experts (={experts}) ({numbers}); {mend}")


# ---- kernels ---------------------------------------------------------------------------------------------------------
#
# A key is one integer that orders by load and then by index: the bits of a float32 that is not negative (they order as
# the float does) above 32 bits of index; for "heaviest first" the bits are inverted. Heaps have the least key on top.

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_INFINITY_BITS = np.uint32(0x7F800000)
_SIGN_BIT = np.uint32(0x80000000)


@kernel
def _replicate(
    load: Float32Array,
    groups: int,
    nodes: int,
    keys: KeyArray,
    phy2log: IntArray,
    replica_of: Int32Array,
    logcnt: IntArray,
) -> int:
    """Per layer and node, replicate the expert whose replicas are heaviest until the slots are full.

    Writes, for each item (a node's replicas in order of replication), its expert into `phy2log`, its replica number
    and, if `keys` is not empty, its sorting key. Returns the most replicas of an expert (1 where there is no layer),
    -1 at a load that is not valid.
    """
    layers, experts = load.shape
    node_slots = phy2log.shape[1] // nodes
    node_experts = experts // nodes
    size = experts // groups
    bits = load.view(np.uint32)
    heap = np.empty(node_experts, np.uint64)
    order = np.arange(experts)
    word = np.empty(1, np.uint32)
    as_float = word.view(np.float32)
    group_keys = np.empty(groups, np.uint64)
    node_of, place_of = np.empty(groups, np.int64), np.empty(groups, np.int64)
    node_heap, node_held, node_load = np.empty(nodes, np.uint64), np.empty(nodes, np.int64), np.empty(nodes, np.float32)
    partial = np.empty((4, 32), np.float32)
    most = 1
    for layer in range(layers):
        bad = 0
        for expert in range(experts):
            # NaN, infinity and what has a sign, but for -0.0
            bad += (bits[layer, expert] >= _INFINITY_BITS) & (bits[layer, expert] != _SIGN_BIT)
        if bad:
            return -1
        row = load[layer]
        count_of = logcnt[layer]
        if groups > nodes:
            for group in range(groups):
                as_float[0] = _group_sum(row[group * size : (group + 1) * size], partial)
                key = (np.uint64(~(word[0] & ~_SIGN_BIT)) << _HALF) | np.uint64(group)
                at = group  # by insertion: groups are few
                while at > 0 and group_keys[at - 1] > key:
                    group_keys[at] = group_keys[at - 1]
                    at -= 1
                group_keys[at] = key
            _pack_row(group_keys, node_of, place_of, node_heap, node_held, node_load)
            for group in range(groups):
                first = (node_of[group] * (groups // nodes) + place_of[group]) * size
                for i in range(size):
                    order[first + i] = group * size + i
        count_of[:] = 1
        replica_of[layer] = 0
        for node in range(nodes):
            expert_at = order[node * node_experts : (node + 1) * node_experts]
            items = phy2log[layer, node * node_slots : (node + 1) * node_slots]
            items[:node_experts] = expert_at
            if node_slots > node_experts:
                replicas = replica_of[layer, node * node_slots : (node + 1) * node_slots]
                for i in range(node_experts):
                    heap[i] = (np.uint64(~(bits[layer, expert_at[i]] & ~_SIGN_BIT)) << _HALF) | np.uint64(i)
                for i in range(node_experts // 2 - 1, -1, -1):
                    _sift(heap, i, node_experts)
                for item in range(node_experts, node_slots):
                    hottest = heap[0] & _LOW
                    expert = expert_at[hottest]
                    items[item] = expert
                    replicas[item] = count_of[expert]
                    count_of[expert] += 1
                    most = max(most, count_of[expert])
                    as_float[0] = row[expert] / np.float32(count_of[expert])
                    heap[0] = (np.uint64(~(word[0] & ~_SIGN_BIT)) << _HALF) | hottest
                    _sift(heap, 0, node_experts)
            if keys.shape[1]:
                node_keys = keys[layer * nodes + node]
                for item in range(node_slots):
                    as_float[0] = row[items[item]] / np.float32(count_of[items[item]])
                    node_keys[item] = (np.uint64(~(word[0] & ~_SIGN_BIT)) << _HALF) | np.uint64(item)
    return most


@kernel
def _group_sum(values: Float32Array, partial: Float32Array) -> np.float32:
    """Sum in the order of torch's CPU kernel; `partial [4, 32]` is scratch.

    Float32 sums of real loads round, and the rounding decides between groups that nearly tie.
    """
    if len(values) < 8:
        return _sum_in_lanes(values, partial, 1)
    return _sum_in_lanes(values, partial, 8)


@inline_kernel
def _sum_in_lanes(values: Float32Array, partial: Float32Array, lanes: int) -> np.float32:
    """Rows of 4 vectors of `lanes` numbers; partial sums are set aside every 16 rows, or a higher power of two."""
    vectors = len(values) // lanes
    rows = vectors // 4
    width = 4 * lanes
    power = 4
    while (1 << (4 * power)) < rows:  # pragma: no cover  more than two million experts in a group
        power += 1
    levels = 4 if rows >= 1 << power else 1
    for level in range(levels):
        for i in range(width):
            partial[level, i] = np.float32(0.0)
    for row in range(rows):
        for i in range(width):
            partial[0, i] += values[row * width + i]
        done = row + 1
        level = 1
        while level < 4 and done & ((1 << (level * power)) - 1) == 0:
            for i in range(width):
                partial[level, i] += partial[level - 1, i]
                partial[level - 1, i] = np.float32(0.0)
            level += 1
    for level in range(1, levels):
        for i in range(width):
            partial[0, i] += partial[level, i]
    for vector in range(4 * rows, vectors):
        for lane in range(lanes):
            partial[0, lane] += values[vector * lanes + lane]
    for vector in range(1, 4):
        for lane in range(lanes):
            partial[0, lane] += partial[0, vector * lanes + lane]
    total = np.float32(0.0)
    for i in range(vectors * lanes, len(values)):
        total += values[i]
    for lane in range(lanes):
        total += partial[0, lane]
    return total


@kernel
def _pack(
    nodes: int, node_ranks: int, keys: KeyArray, replica_of: Int32Array, phy2log: IntArray, log2phy: IntArray
) -> None:
    """Pack each node's items to its ranks: `phy2log` goes from items to slots in place, `log2phy` is written."""
    layers, slots = phy2log.shape
    node_slots = slots // nodes
    per_rank = node_slots // node_ranks
    expert_of = np.empty(node_slots, np.int64)
    rank_of = np.empty(node_slots, np.int64)
    place_of = np.empty(node_slots, np.int64)
    heap, held, load = np.empty(node_ranks, np.uint64), np.empty(node_ranks, np.int64), np.empty(node_ranks, np.float32)
    for layer in range(layers):
        log2phy[layer] = -1
        if per_rank == 1:
            for slot in range(slots):
                log2phy[layer, phy2log[layer, slot], replica_of[layer, slot]] = slot
            continue
        for node in range(nodes):
            _pack_row(keys[layer * nodes + node], rank_of, place_of, heap, held, load)
            first = node * node_slots
            expert_of[:] = phy2log[layer, first : first + node_slots]
            for item in range(node_slots):
                slot = first + rank_of[item] * per_rank + place_of[item]
                phy2log[layer, slot] = expert_of[item]
                log2phy[layer, expert_of[item], replica_of[layer, first + item]] = slot


@kernel
def _pack_row(
    keys: KeyArray, pack_of: IntArray, place_of: IntArray, heap: KeyArray, held: IntArray, pack_load: Float32Array
) -> None:
    """Give items, heaviest first, each to the lightest pack with room; the first of equally light ones.

    `heap`, `held` and `pack_load` are scratch, one entry a pack.
    """
    packs = len(heap)
    capacity = len(keys) // packs
    for pack in range(packs):
        heap[pack] = pack  # all loads 0: in order, hence a heap
        held[pack] = 0
        pack_load[pack] = np.float32(0.0)
    pack_bits = pack_load.view(np.uint32)
    word = np.empty(1, np.uint32)
    as_float = word.view(np.float32)
    size = packs
    for key in keys:
        item = np.int64(key & _LOW)
        lightest = np.int64(heap[0] & _LOW)
        pack_of[item] = lightest
        place_of[item] = held[lightest]
        held[lightest] += 1
        word[0] = ~np.uint32(key >> _HALF)
        pack_load[lightest] += as_float[0]
        if held[lightest] == capacity:
            size -= 1
            heap[0] = heap[size]
        else:
            heap[0] = (np.uint64(pack_bits[lightest]) << _HALF) | np.uint64(lightest)
        _sift(heap, 0, size)


@inline_kernel
def _sift(heap: KeyArray, at: int, size: int) -> None:
    """Let the key at `at` sink to its place."""
    key = heap[at]
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= key:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = key
