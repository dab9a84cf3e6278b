"""After a new solution: give its ranks and slots the names under which the least has to move."""

from __future__ import annotations

import numpy as np

from eplb_core._arrays import BoolArray, FloatArray, IntArray
from eplb_core._numba import kernel
from eplb_core.placement.search.links import Links

# Above this many interchangeable ranks the exact assignment, O(n^3), gives way to a greedy one.
_MOST_EXACT = 256
# Costs of transfers are compared in so many parts of the dearest.
_PARTS = 1 << 20


@kernel
def keep_in_place(
    old: IntArray,
    new: IntArray,
    skip: BoolArray,
    capacity: IntArray,
    rank_speed: FloatArray,
    links: Links,
    across_nodes: bool,
    num_experts: int,
) -> None:
    """Rename the ranks of `new` so that transfers cost least, and leave what stays on its rank in its slot.

    Ranks of equal speed and slots (and of one node, unless `across_nodes`) may exchange their contents without any
    change of balance; which takes whose is an assignment problem, solved exactly (Hungarian method) for up to 256 ranks
    and greedily beyond.

    Args:
        old: `[L, P]`.
        new: `[L, P]`, changed in place.
        skip: Layers to leave alone `[L]`.
        capacity: Live slots of each rank `[R]`.
        rank_speed: `[R]`.
        links: Their costs; each transfer comes from the cheapest holder. Where all are equal, and beyond the exact
            size, transfers are counted.
        across_nodes: Contents may change nodes.
        num_experts: E.
    """
    layers = old.shape[0]
    ranks = capacity.size
    stride = old.shape[1] // ranks
    row = np.zeros(old.shape[1], dtype=np.int64)
    holds = np.zeros(num_experts, dtype=np.int64)
    experts_first = np.zeros(num_experts + 1, dtype=np.int64)
    home = np.zeros(old.shape[1], dtype=np.int64)
    kept = np.zeros((ranks, ranks), dtype=np.int64)
    group = np.zeros(ranks, dtype=np.int64)
    taker = np.zeros(ranks, dtype=np.int64)
    unequal = links.cheapest < links.dearest and ranks <= _MOST_EXACT
    fetch = np.zeros((num_experts if unequal else 0, ranks), dtype=np.int64)
    for layer in range(layers):
        if skip[layer]:
            continue
        for first in range(ranks):
            # Ranks that may take each other's contents, in groups named by their first rank.
            group[first] = first
            for r in range(first):
                if (
                    group[r] == r
                    and capacity[r] == capacity[first]
                    and rank_speed[r] == rank_speed[first]
                    and (across_nodes or links.node[r] == links.node[first])
                ):
                    group[first] = r
                    break
        _list_homes(old[layer], stride, experts_first, home)
        if unequal:
            _price_fetches(experts_first, home, links, fetch)
        for r in range(ranks):
            if unequal:
                _price_contents(new[layer], r, stride, fetch, kept[r])
            else:
                _count_kept(new[layer], r, stride, experts_first, home, kept[r])
        for first in range(ranks):
            if group[first] == first:
                _assign(first, group, kept, taker)
        for r in range(ranks):
            for s in range(stride):
                row[taker[r] * stride + s] = new[layer, r * stride + s]
        for r in range(ranks):
            _settle(old, row, layer, r, stride, capacity[r], holds, new)


@kernel
def settle(old: IntArray, p2l: IntArray, capacity: IntArray, num_experts: int) -> None:
    """Put what its rank held in `old` back into the slot where it was; no expert changes ranks. Both `[L, P]`."""
    layers, slots = old.shape
    stride = slots // capacity.size
    holds = np.zeros(num_experts, dtype=np.int64)
    for layer in range(layers):
        row = p2l[layer].copy()
        for r in range(capacity.size):
            _settle(old, row, layer, r, stride, capacity[r], holds, p2l)


@kernel
def least_transfers(old: IntArray, new: IntArray, skip: BoolArray, num_ranks: int, num_experts: int) -> IntArray:
    """How many transfers no renaming of ranks can save, `[L]`: each rank's contents go where most of them are.

    0 for layers to skip.
    """
    stride = old.shape[1] // num_ranks
    first = np.zeros(num_experts + 1, dtype=np.int64)
    home = np.zeros(old.shape[1], dtype=np.int64)
    kept = np.zeros(num_ranks, dtype=np.int64)
    fewest = np.zeros(old.shape[0], dtype=np.int64)
    for layer in range(old.shape[0]):
        if skip[layer]:
            continue
        _list_homes(old[layer], stride, first, home)
        for r in range(num_ranks):
            distinct = _count_kept(new[layer], r, stride, first, home, kept)
            most = 0
            for q in range(num_ranks):
                most = max(most, kept[q])
            fewest[layer] += distinct - most
    return fewest


@kernel
def _list_homes(row: IntArray, stride: int, first: IntArray, home: IntArray) -> None:
    """Ranks of each expert's slots, in order, into `home`; those of expert e from `first[e]` to `first[e + 1]`."""
    first[:] = 0
    for e in row:
        if e >= 0:
            first[e + 1] += 1
    for e in range(first.size - 1):
        first[e + 1] += first[e]
    for p in range(row.size):
        if row[p] >= 0:
            home[first[row[p]]] = p // stride
            first[row[p]] += 1
    for e in range(first.size - 1, 0, -1):
        first[e] = first[e - 1]
    first[0] = 0


@kernel
def _count_kept(new: IntArray, r: int, stride: int, first: IntArray, home: IntArray, kept: IntArray) -> int:
    """How many distinct experts stay if the contents of new rank r go to each old rank: `kept`; returns all it has."""
    kept[:] = 0
    distinct = 0
    for p in range(r * stride, r * stride + stride):
        e = new[p]
        seen = e < 0
        for q in range(r * stride, p):
            seen = seen or new[q] == e
        if seen:
            continue
        distinct += 1
        for i in range(first[e], first[e + 1]):
            if i == first[e] or home[i] != home[i - 1]:
                kept[home[i]] += 1
    return distinct


@kernel
def _price_fetches(first: IntArray, home: IntArray, links: Links, fetch: IntArray) -> None:
    """Cost for each rank to receive each expert from its cheapest holder, in parts of the dearest link's: `[E, R]`."""
    for e in range(fetch.shape[0]):
        for r in range(fetch.shape[1]):
            least = links.dearest
            for i in range(first[e], first[e + 1]):
                least = 0.0 if home[i] == r else min(least, links.cost[home[i], r])
            fetch[e, r] = int(least / links.dearest * _PARTS + 0.5)


@kernel
def _price_contents(new: IntArray, r: int, stride: int, fetch: IntArray, kept: IntArray) -> None:
    """What it saves, against nothing, that the contents of new rank r go to each old rank: `kept`, 0 or less."""
    kept[:] = 0
    for p in range(r * stride, r * stride + stride):
        seen = new[p] < 0
        for q in range(r * stride, p):
            seen = seen or new[q] == new[p]
        if not seen:
            for rank in range(kept.size):
                kept[rank] -= fetch[new[p], rank]


@kernel
def _assign(first: int, group: IntArray, kept: IntArray, taker: IntArray) -> None:
    """Give the contents of each rank of one group to one rank of it, so that most is kept in all.

    Shortest augmenting paths with potentials, O(n^3), integers only.
    """
    members = np.flatnonzero(group == first)
    n = members.size
    if n > _MOST_EXACT:
        _assign_greedily(members, kept, taker)
        return
    big = np.int64(1) << 40
    u = np.zeros(n + 1, dtype=np.int64)
    v = np.zeros(n + 1, dtype=np.int64)
    match = np.zeros(n + 1, dtype=np.int64)
    way = np.zeros(n + 1, dtype=np.int64)
    shortest = np.zeros(n + 1, dtype=np.int64)
    used = np.zeros(n + 1, dtype=np.bool_)
    for i in range(1, n + 1):
        match[0] = i
        j0 = 0
        shortest[:] = big
        used[:] = False
        while True:
            used[j0] = True
            i0 = match[j0]
            delta = big
            j1 = 0
            for j in range(1, n + 1):
                if not used[j]:
                    reduced = -kept[members[i0 - 1], members[j - 1]] - u[i0] - v[j]
                    if reduced < shortest[j]:
                        shortest[j] = reduced
                        way[j] = j0
                    if shortest[j] < delta:
                        delta = shortest[j]
                        j1 = j
            for j in range(n + 1):
                if used[j]:
                    u[match[j]] += delta
                    v[j] -= delta
                else:
                    shortest[j] -= delta
            j0 = j1
            if match[j0] == 0:
                break
        while j0 > 0:
            match[j0] = match[way[j0]]
            j0 = way[j0]
    for j in range(1, n + 1):
        taker[members[match[j] - 1]] = members[j - 1]


@kernel
def _assign_greedily(members: IntArray, kept: IntArray, taker: IntArray) -> None:
    """The pairs that keep most first, then the lowest ranks."""
    free_new = np.ones(members.size, dtype=np.bool_)
    free_old = np.ones(members.size, dtype=np.bool_)
    most = np.int64(0)
    for r in members:
        for q in members:
            most = max(most, kept[r, q])
    for n in range(most, -1, -1):
        for i in range(members.size):
            if free_new[i]:
                for j in range(members.size):
                    if free_old[j] and kept[members[i], members[j]] == n:
                        taker[members[i]] = members[j]
                        free_new[i] = free_old[j] = False
                        break


@kernel
def _settle(
    old: IntArray, row: IntArray, layer: int, r: int, stride: int, slots: int, holds: IntArray, new: IntArray
) -> None:
    """Write the contents `row` of rank r into its slots: what the rank holds stays where it is.

    Local slots beyond `slots` stay empty. Repeats of an expert within the rank are placed one by one.
    """
    start = r * stride
    holds[:] = 0
    for s in range(stride):
        if row[start + s] >= 0:
            holds[row[start + s]] += 1
    for s in range(stride):
        e = old[layer, start + s]
        keeps = s < slots and e >= 0 and holds[e] > 0
        new[layer, start + s] = e if keeps else -1
        if keeps:
            holds[e] -= 1
    s = 0
    for i in range(stride):
        e = row[start + i]
        if e < 0 or holds[e] == 0:
            continue
        while new[layer, start + s] >= 0:
            s += 1
        new[layer, start + s] = e
        holds[e] -= 1
