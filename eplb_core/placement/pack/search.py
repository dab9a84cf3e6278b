"""Search on a packed block until its certificate says stop, or the work is spent."""

from __future__ import annotations

import numpy as np

from eplb_core._arrays import IntArray
from eplb_core._numba import kernel
from eplb_core.placement.pack.block import EXPERT_LOAD, ITEM_SHARE, ORDER, SPEED, WORK, Scratch
from eplb_core.placement.pack.refine import refine

# At effort 1 the search stops when the fullest rank is this far above the certificate.
TOLERANCE = 0.00098


@kernel
def search(n: int, cap: IntArray, stride: int, width: int, effort: float, lower: float, scratch: Scratch) -> float:
    """Refine a packed block towards its lower limit; returns the largest time.

    Coarse first where ranks have few slots: pairs to exchange are few then, and a wide target is met sooner. The
    targets on the way are the same for every effort; more effort only goes further. `width` is how many slots a rank
    has, of the `stride` places that it takes.
    """
    work = scratch.ints[WORK]
    work[0] = 0
    work[1] = np.int64(effort * (96 + 2 * cap.size + 4096 // (cap.size * width)))
    work[2] = 1
    tolerance = TOLERANCE / max(effort, 1.0)
    aim = TOLERANCE * max(1, 16 // width)
    while True:
        reached = refine(n, cap, stride, lower * (1.0 + aim), cap.size, scratch)
        if reached > lower * (1.0 + aim) or aim <= tolerance:
            return reached
        aim = max(0.5 * aim, TOLERANCE) if aim > TOLERANCE else 0.5 * aim


@kernel
def lower_limit(n: int, slots: int, cap: IntArray, scratch: Scratch) -> float:
    """No layout of the block has a smaller largest load / speed.

    Some rank is no faster than the mean: total load / total speed. And some rank holds the largest share, which is at
    least what the divisor method leaves, the smallest possible; it is no faster than the fastest rank.
    """
    tokens, speed = scratch.reals[EXPERT_LOAD], scratch.reals[SPEED]
    total = whole = fastest = top = 0.0
    for e in range(n):
        total += tokens[e]
    for r in range(cap.size):
        whole += speed[r]
        fastest = max(fastest, speed[r])
    top = scratch.reals[ITEM_SHARE, 0] if slots < n * cap.size else tokens[scratch.ints[ORDER, 0]] / cap.size
    return float(max(total / whole, top / fastest))
