"""Windows that differ more than those that were seen, for placements that rely on shares solved in each window."""

from __future__ import annotations

import numpy as np

from eplb_core._arrays import FloatArray
from eplb_core._numba import kernel

# Times as far from the mean, but to no less than this part of it.
_FACTOR, _LEAST = 2.0, 0.3


@kernel
def widen(windows: FloatArray, weights: FloatArray) -> FloatArray:
    """Draw each expert's part of the load away from its mean over windows, as far as it stays clear of zero.

    Solved shares even out what was seen nearly perfectly, whatever the layout, so that nothing tells a good one from a
    better one, until the windows differ more. An expert that was nearly idle in some window differs enough.

    Args:
        windows: Load `[T, L, E]`.
        weights: Weight of each window `[T]`; windows without weight or load have no say in the mean.

    Returns:
        As `windows`; a window's total stays nearly the same, and counts for nothing in the search.
    """
    count, layers, experts = windows.shape
    out, total = np.zeros(windows.shape), np.zeros(count)
    for layer in range(layers):
        known = 0.0
        for t in range(count):
            total[t] = 0.0
            for e in range(experts):
                total[t] += windows[t, layer, e]
            known += weights[t] if total[t] > 0.0 else 0.0
        for e in range(experts):
            mean, least = 0.0, np.inf
            for t in range(count):
                if total[t] > 0.0 and weights[t] > 0.0:
                    part = windows[t, layer, e] / total[t]
                    mean += part * (weights[t] / known)
                    least = min(least, part)
            factor = 1.0
            if mean > least:
                factor = min(max(mean * (1.0 - _LEAST) / (mean - least), 1.0), _FACTOR)
            for t in range(count):
                part = windows[t, layer, e] / total[t] if total[t] > 0.0 else 0.0
                wide = max(mean + (part - mean) * factor, 0.0) * total[t]
                out[t, layer, e] = wide if factor > 1.0 else windows[t, layer, e]
    return out
