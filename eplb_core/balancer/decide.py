"""Which layers are looked at, what a transfer must bring on them, and what `place` makes of them.

A layer is looked at anew every few windows, as many as its size asks for, the layers in turn. In between its answer is
that of the last time: it depends on windows and layout alone, not on when it was asked for, so it is kept and not
computed again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eplb_core._arrays import BoolArray, IntArray
from eplb_core.balancer.memory import USED, Memory, view_of
from eplb_core.layout import ExpertLayout
from eplb_core.placement.place import Placement, place

# Layers are in turn so that a call looks at no more windows x slots than these, but at each layer every 16 windows.
_CELLS, _LONGEST_TURN = 1 << 18, 16
# Windows for which a move must pay: twice the age of the regime, within these.
_SHORTEST_LIFE, _LONGEST_LIFE = 32, 64
# The same for the first placement of a layer, which was placed for no load before: nearly free.
_FIRST_LIFE = 10_000
# Least rise of a layer's balance.
_MIN_GAIN = 0.002
USUAL, FIRST, FROZEN = "usual", "first", "frozen"
# Nothing gains as much: a frozen layer moves only where it must.
_NEVER = 1e9


def turns(memory: Memory, layers: int, slots: int) -> IntArray:
    """Count of windows as of which each layer is looked at, int64 `[L]`: the last that was its turn."""
    seen = min(memory.count - memory.oldest, USED)
    every = min(max(-(-seen * layers * slots // _CELLS), 1), _LONGEST_TURN)
    turn = memory.count - (memory.count + np.arange(layers)) % every
    # A new regime is seen at once.
    return np.maximum(turn, min(memory.count, memory.start + 2))


def price_of(memory: Memory, move_cost: float, kind: str = USUAL) -> float:
    """Gain in balancedness that a transfer must bring in the present regime."""
    if kind == FIRST:
        return move_cost / _FIRST_LIFE
    return move_cost / min(max(2 * memory.age, _SHORTEST_LIFE), _LONGEST_LIFE)


def is_trivial(rows: IntArray, experts: int) -> BoolArray:
    """Rows that hold the experts in order, as layouts do that were made for no load, bools `[L]`."""
    filled = rows >= 0
    return np.asarray((~filled | (rows == (np.cumsum(filled, axis=1) - 1) % experts)).all(axis=1))


def search(
    memory: Memory,
    live: ExpertLayout,
    layers: IntArray,
    until: IntArray,
    kind: str,
    price: float,
    options: dict[str, Any],
) -> Placement:
    """Place some layers from `live` on, each for what it sees of the memory."""
    windows, weights = view_of(memory, layers, until)
    rows = live.physical_to_logical_map[layers]
    terms: dict[str, Any] = {"min_gain": _MIN_GAIN, "transfer_price": price}
    if kind == FROZEN:
        terms = {"min_gain": _NEVER, "transfer_price": price, "max_transfers": 0, "max_total_transfers": None}
    current = ExpertLayout._of_valid(rows, live.num_experts, live.topology)
    return place(windows, live.topology, current=current, window_weights=weights, **{**options, **terms})
