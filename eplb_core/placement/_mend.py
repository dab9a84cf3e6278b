"""What must change in a row that cannot stay as it is."""

from __future__ import annotations

import numpy as np

from eplb_core._arrays import FloatArray, IntArray
from eplb_core._numba import kernel


@kernel
def restore_lost(load: FloatArray, capacity: IntArray, p2l: IntArray) -> None:
    """Give each expert without a slot one, where the least is lost: an empty slot, else the smallest share of another.

    Args:
        load: `[L, E]`.
        capacity: Slots to fill of each rank `[R]`; their sum must be at least E.
        p2l: `[L, P]`, changed in place; slots of ranks that are not active must be -1.
    """
    experts = load.shape[1]
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
        for e in range(experts):
            if count[e] > 0:
                continue
            place = -1
            least = np.inf
            for p in range(row.size):
                f = row[p]
                if f < 0 and filled[p // stride] < capacity[p // stride] and least > -1.0:
                    least = -1.0
                    place = p
                elif f >= 0 and count[f] > 1 and load[layer, f] / count[f] < least:
                    least = load[layer, f] / count[f]
                    place = p
            if row[place] >= 0:
                count[row[place]] -= 1
            else:
                filled[place // stride] += 1
            row[place] = e
            count[e] = 1


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
