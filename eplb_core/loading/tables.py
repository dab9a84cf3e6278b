"""Dispatch tables as loading sees them: what a move installs into, and whether that will fit."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from eplb_core._arrays import ArrayLike, FloatArray, IntArray, to_reals
from eplb_core._numba import kernel
from eplb_core.layout import ExpertLayout

# Half of what the tables forgive.
_ROUNDING = 5e-7


class Tables(Protocol):
    """What dispatch reads the layout from, such as `DispatchTables`."""

    def install(
        self, layout: ExpertLayout, *, layers: ArrayLike | None = None, shares: ArrayLike | None = None
    ) -> object:
        """Fill the rows of `layers`, on the current stream."""
        ...


def check_tables(tables: object, layout: ExpertLayout) -> None:
    """Raise ValueError if tables say that they dispatch by another layout than the weights are in."""
    held = getattr(tables, "layout", None)
    if isinstance(held, ExpertLayout) and held != layout:
        raise ValueError(
            f"`tables` dispatch by the layout {held.digest[:12]} and the weights are in {layout.digest[:12]}; install "
            "the latter in the tables first"
        )


def lacks_room(tables: object, replica_count: IntArray) -> str:
    """Say why tables cannot hold so many replicas of each expert, or nothing: no install may fail half way."""
    limit, most = getattr(tables, "max_replicas", None), int(replica_count.max(initial=0))
    return f"an expert has {most} replicas and `tables` hold {limit}" if limit is not None and most > limit else ""


def check_shares(shares: ArrayLike, layout: ExpertLayout) -> FloatArray:
    """Shares `[L, P]` as the tables would take them, so that no install can fail; else ValueError."""
    array = np.array(to_reals(shares, "shares"))
    p2l = layout.physical_to_logical_map
    if array.shape != p2l.shape:
        raise ValueError(f"shares (shape {list(array.shape)}) must be {list(p2l.shape)}, a fraction a slot")
    held = p2l >= 0
    bad = held & ~((array >= 0) & (array <= 1 + _ROUNDING))
    if bad.any():
        layer, slot = np.argwhere(bad)[0].tolist()
        raise ValueError(f"shares (={array[layer, slot]}) must be in [0, 1] at layer {layer}, slot {slot}")
    sums = np.empty(layout.num_experts)
    layer, expert = _find_odd_sum(p2l, array, sums)
    if layer >= 0:
        raise ValueError(f"shares of expert {expert} (sum {sums[expert]}) must sum to 1 at layer {layer}")
    return array


@kernel
def _find_odd_sum(p2l: IntArray, shares: FloatArray, sums: FloatArray) -> tuple[int, int]:
    """First (layer, expert) whose shares do not sum to 1, or (-1, -1); `sums` `[E]` are those of the layer."""
    for layer in range(len(p2l)):
        sums[:] = 0.0
        for slot in range(p2l.shape[1]):
            if p2l[layer, slot] >= 0:
                sums[p2l[layer, slot]] += shares[layer, slot]
        for expert in range(len(sums)):
            if abs(sums[expert] - 1.0) > _ROUNDING:
                return layer, expert
    return -1, -1
