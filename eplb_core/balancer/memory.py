"""What is remembered of the traffic: single windows, as shares of each layer's tokens, and when the traffic changed.

Windows are kept one by one, since their sum hides what makes ranks full in turn. Older ones weigh less; those of before
a change of the traffic weigh little. A change is a distance of the last two windows from those before them that is
large beside what such distances were.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

import numpy as np

from eplb_core._arrays import FloatArray, IntArray
from eplb_core._numba import kernel

USED = 128
"""Windows that a decision sees, at most."""
KEPT = USED + 16
"""Windows that are kept: a layer is looked at as it was up to 15 windows ago."""
HALF_LIFE = 64
"""Windows after which one weighs half as much."""
_NEXT_WEIGHT = 1.0108892860517005  # 2 ** (1 / HALF_LIFE), written out: no libm decides
# Windows of before a change: how many are still seen, and what they weigh.
_BEFORE, _BEFORE_WEIGHT = 16, 0.1
# A change: the mean of so many windows is so many times the usual distance from that of those before them. The usual
# one is the median distance of two windows from those before, of this many past ones or more.
_CHANGES = ((2, 3.0), (4, 2.6))
_NEWEST, _EARLIER, _FEWEST = 2, 16, 8
# Traffic that comes back: the newest windows are no farther than so many times the usual distance from the mean of so
# many that are kept. Such blocks begin every few windows.
_BACK, _BLOCK, _STEP = 1.5, 8, 4
PAST = 64
"""Past distances that are kept."""


class Memory:
    """Windows of `[L, E]` and the present regime; changes only by `add`.

    Args:
        layers: Layers L.
        experts: Logical experts E.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self.shares: FloatArray = np.zeros((KEPT, layers, experts))
        self.tokens: FloatArray = np.zeros((KEPT, layers))
        self.count = 0
        self.start = 0
        self.starts: list[int] = [0]
        self.changes = 0
        self.distance = math.nan
        self.past: list[float] = []
        self.chain = hashlib.sha256(f"eplb-balancer-1 {layers} {experts}".encode()).digest()

    @property
    def age(self) -> int:
        """Windows of the present regime."""
        return self.count - self.start

    def add(self, window: FloatArray) -> None:
        """Remember one checked window `[L, E]` that has load."""
        place = self.count % KEPT
        _to_shares(window, self.shares[place], self.tokens[place])
        self.chain = hashlib.sha256(self.chain + window.tobytes()).digest()
        self.count += 1
        usual = _median(self.past) if len(self.past) >= _FEWEST else math.nan
        far = {newest: self._far(newest) for newest, _ in _CHANGES}
        self.distance = far[_NEWEST] / usual if usual > 0.0 else math.nan
        for newest, times in _CHANGES:
            if far[newest] > times * usual:
                self._change(newest, usual)
                return
        if far[_NEWEST] >= 0.0:
            self.past = [*self.past, far[_NEWEST]][-PAST:]

    def _change(self, newest: int, usual: float) -> None:
        """Begin a regime with the newest windows; where they are as some that are kept, go on with that regime."""
        self.changes += 1
        block = _nearest_block(self.shares, self.count, newest, _BACK * usual)
        if block < 0:
            self.start = self.count - newest
            self.starts.append(self.start)
        else:
            self.starts = [start for start in self.starts if start <= block] or [block]
            self.start = self.starts[-1]
        self.starts = self.starts[-KEPT:]

    def _far(self, newest: int) -> float:
        """How far the newest windows are from those before them; NaN where the regime is too young to tell."""
        earlier = min(_EARLIER, self.age - newest)
        return (
            float(_distance(self.shares, self.count, newest, self.count - newest, earlier))
            if earlier >= newest
            else math.nan
        )

    @property
    def digest(self) -> str:
        """Of all that was shown, and of what was made of it."""
        known = repr((self.count, self.start, self.starts, self.changes, self.past)).encode()
        return hashlib.sha256(self.chain + known).hexdigest()

    @property
    def tokens_per_layer(self) -> float:
        """Tokens of a layer in a window, mean over what is remembered, rounded so that it seldom changes."""
        mean = _mean_of_known(self.tokens[: min(self.count, KEPT)])
        part, power = math.frexp(mean)
        return math.ldexp(round(part * 16.0) / 16.0, power)

    def weights(self) -> FloatArray:
        """Weight of the window in each place of the ring `[KEPT]`; 0 where there is none.

        From one call to the next, weights of windows that stay change by a power of two alone.
        """
        out = np.zeros(KEPT)
        for window in range(self.oldest, self.count):
            weight = math.ldexp(_WEIGHTS[window % HALF_LIFE], window // HALF_LIFE - self.count // HALF_LIFE)
            out[window % KEPT] = weight if window >= self.start else weight * _BEFORE_WEIGHT
        return out

    @property
    def oldest(self) -> int:
        """First window that is still seen."""
        return max(self.start - _BEFORE, self.count - KEPT, 0)


def _steps() -> list[float]:
    weights = [1.0]
    for _ in range(HALF_LIFE - 1):
        weights.append(weights[-1] * _NEXT_WEIGHT)
    return weights


_WEIGHTS = _steps()


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


@kernel
def _to_shares(window: FloatArray, shares: FloatArray, tokens: FloatArray) -> None:
    """Divide each layer by its sum; a layer without load stays 0. No load is so large that the sum overflows."""
    for layer in range(window.shape[0]):
        top = total = 0.0
        for e in range(window.shape[1]):
            top = max(top, window[layer, e])
        for e in range(window.shape[1]):
            shares[layer, e] = window[layer, e] / top if top > 0.0 else 0.0
            total += shares[layer, e]
        for e in range(window.shape[1] if top > 0.0 else 0):
            shares[layer, e] /= total
        tokens[layer] = min(total * top, 1e300)


@kernel
def _mean_of_known(tokens: FloatArray) -> float:
    total = 0.0
    known = 0
    for t in range(tokens.shape[0]):
        for layer in range(tokens.shape[1]):
            if tokens[t, layer] > 0.0:
                known += 1
                total += (tokens[t, layer] - total) / known
    return total


@kernel
def _distance(shares: FloatArray, count: int, newest: int, until: int, earlier: int) -> float:
    """L1 distance of the mean of the newest windows from that of earlier ones until `until`, mean over layers.

    Divided by what the noise of single windows makes of it: sqrt(1 / newest + 1 / earlier).
    """
    kept, layers, experts = shares.shape
    total = 0.0
    known = 0
    for layer in range(layers):
        far = weight = 0.0
        for e in range(experts):
            new = old = 0.0
            for t in range(count - newest, count):
                new += shares[t % kept, layer, e]
            for t in range(until - earlier, until):
                old += shares[t % kept, layer, e]
            far += abs(new / newest - old / earlier)
            weight += new
        if weight > 0.0:
            total += far
            known += 1
    return total / max(known, 1) / math.sqrt(1.0 / newest + 1.0 / earlier)


@kernel
def _nearest_block(shares: FloatArray, count: int, newest: int, most: float) -> int:
    """First window of the block that is nearest to the newest windows, no farther than `most`; -1 where none is."""
    nearest = -1
    for first in range(max(count - shares.shape[0], 0), count - newest - _BLOCK + 1, _STEP):
        far = _distance(shares, count, newest, first + _BLOCK, _BLOCK)
        if far <= most:
            nearest, most = first, far
    return nearest


class View(NamedTuple):
    """What a decision on some layers sees."""

    windows: FloatArray
    """`[T, n, E]`; 0 where a layer does not see the window."""
    weights: FloatArray
    """`[T]`."""


def view_of(memory: Memory, layers: IntArray, until: IntArray) -> View:
    """The windows that each of `layers` sees: the last `USED` before window `until[layer]`, in order of the ring."""
    weights = memory.weights()
    places = np.flatnonzero(weights)
    number = np.full(KEPT, -1, dtype=np.int64)
    for window in range(memory.oldest, memory.count):
        number[window % KEPT] = window
    windows = np.empty((len(places), len(layers), memory.shares.shape[2]))
    _gather(memory.shares, places, number[places], layers, until, windows)
    return View(windows, weights[places])


@kernel
def _gather(
    shares: FloatArray, places: IntArray, number: IntArray, layers: IntArray, until: IntArray, out: FloatArray
) -> None:
    for i in range(places.size):
        for j in range(layers.size):
            seen = until[layers[j]] - USED <= number[i] < until[layers[j]]
            for e in range(out.shape[2]):
                out[i, j, e] = shares[places[i], layers[j], e] if seen else 0.0
