"""Windows of load, and their sum in order of time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_core._arrays import BoolArray, FloatArray, read_only


def add_windows(windows: FloatArray, weights: FloatArray) -> FloatArray:
    """Weighted sum of windows `[T, ...]`, in order of time: no numpy reduction, so equal loads give equal bytes."""
    total: FloatArray = windows[0] * weights[0]
    for window in range(1, len(windows)):
        total += windows[window] * weights[window]
    return total


class Load(NamedTuple):
    """The load to place for, of the layers that are placed together."""

    windows: FloatArray
    """`[T, L, E]`, read-only."""
    weights: FloatArray
    """Of each window `[T]`."""
    total: FloatArray
    """Weighted sum of the windows `[L, E]`."""

    @classmethod
    def of(cls, windows: FloatArray, weights: FloatArray) -> Load:
        """All layers of checked windows."""
        return cls(windows, weights, add_windows(windows, weights))

    def take(self, layers: BoolArray) -> Load:
        """The load of some layers."""
        if layers.all():
            return self
        return Load(read_only(np.compress(layers, self.windows, axis=1)), self.weights, self.total[layers])

    @property
    def known(self) -> BoolArray:
        """Layers that have load `[L]`."""
        known: BoolArray = self.total.max(axis=1, initial=0.0) > 0.0
        return known
