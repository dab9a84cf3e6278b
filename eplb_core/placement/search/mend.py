"""What must change in a row that cannot stay as it is."""

from __future__ import annotations

import numpy as np

from eplb_core._arrays import FloatArray, IntArray
from eplb_core._numba import kernel
from eplb_core.placement.search.links import Links, book, book_row, find_sender, mark


@kernel
def restore_lost(
    load: FloatArray, capacity: IntArray, old: IntArray, links: Links, p2l: IntArray, senders: IntArray
) -> None:
    """Give each expert without a slot one, where the least is lost: an empty slot, else the smallest share of another.

    Where links have limits, a slot to which one with room leads comes before all others; where none has, the expert
    gets its slot all the same.

    Args:
        load: `[L, E]`.
        capacity: Slots to fill of each rank `[R]`; their sum must be at least E.
        old: Layout that the weights are in `[L, P]`.
        links: Their limits.
        p2l: `[L, P]`, changed in place; slots of ranks that are not active must be -1.
        senders: Written where an expert is restored `[L, P]`: the rank that it comes from, -1 = over no link.
    """
    experts = load.shape[1]
    limited = links.rank_limit.size > 0
    held = np.zeros((experts, capacity.size), np.int8)
    stride = p2l.shape[1] // capacity.size
    count = np.zeros(experts, dtype=np.int64)
    filled = np.zeros(capacity.size, dtype=np.int64)
    for layer in range(p2l.shape[0]):
        row = p2l[layer]
        count[:] = 0
        filled[:] = 0
        for p in range(row.size):
            if row[p] >= 0:
                count[row[p]] += 1
                filled[p // stride] += 1
        if limited:
            book_row(senders[layer], links)
            mark(old[layer], 1, held)
        for e in range(experts):
            if count[e] > 0:
                continue
            place = sender = -1
            least = np.inf
            for p in range(row.size):
                f, r = row[p], p // stride
                if f < 0 and filled[r] < capacity[r]:
                    lost = -1.0
                elif f >= 0 and count[f] > 1:
                    lost = load[layer, f] / count[f]
                else:
                    continue
                source = find_sender(e, r, held, links) if limited else -1
                if (source >= 0) > (sender >= 0) or ((source >= 0) == (sender >= 0) and lost < least):
                    place, sender, least = p, source, lost
            senders[layer, place] = sender
            book(sender, place // stride, 1, links)
            if row[place] >= 0:
                count[row[place]] -= 1
            else:
                filled[place // stride] += 1
            row[place] = e
            count[e] = 1
        if limited:
            mark(old[layer], 0, held)


@kernel
def drop_surplus(load: FloatArray, capacity: IntArray, p2l: IntArray) -> None:
    """Empty slots of ranks that hold more than their capacity, as far as no expert is lost: smallest shares first.

    Args:
        load: `[L, E]`.
        capacity: Slots to fill of each rank `[R]`.
        p2l: `[L, P]`, changed in place.
    """
    ranks = capacity.size
    stride = p2l.shape[1] // ranks
    count = np.zeros(load.shape[1], dtype=np.int64)
    for layer in range(p2l.shape[0]):
        row = p2l[layer]
        count[:] = 0
        for p in range(row.size):
            if row[p] >= 0:
                count[row[p]] += 1
        for r in range(ranks):
            filled = 0
            for p in range(r * stride, r * stride + stride):
                filled += row[p] >= 0
            while filled > capacity[r]:
                place = -1
                least = np.inf
                for p in range(r * stride, r * stride + stride):
                    e = row[p]
                    if e >= 0 and count[e] > 1 and load[layer, e] / count[e] < least:
                        least = load[layer, e] / count[e]
                        place = p
                if place < 0:
                    break
                count[row[place]] -= 1
                row[place] = -1
                filled -= 1
