"""Modes, and the numbers by which the host's code, the GPU's kernels and engines read the tensors of dispatch."""

from __future__ import annotations

from typing import Literal, get_args

Mode = Literal["static", "even", "random", "row", "weighted", "near", "quota", "fewest", "fake"]
MODES: tuple[Mode, ...] = get_args(Mode)
STATIC_MODES: tuple[Mode, ...] = ("static", "even")
"""Modes with one slot for each expert."""
SOLVED_MODES: tuple[Mode, ...] = ("quota", "fewest")
"""Modes that solve each batch: they count first, and choose by a token's place among its expert's."""

WINDOW, RECORDING, FINISHED, ARRIVED, WINDOWS, EVERY = range(6)
"""Places in `LoadCounter.state`; the last two are there where pairs are counted: T + 1, and which tokens are."""
MOST_PAIR_TOKENS = 256
"""Tokens of a call whose pairs are counted, at most, unless all are."""
DRAWS = 0
"""Calls that the random mode has made, in `LayerTables.draws`."""
BASE_PHASE, RANK_PHASE, KEY, FIRST_FAKE, OWN_NODE = range(5)
"""Places in `LayerTables.settings`."""
OUT_OF_RANGE, MAPPED_TWICE = range(2)
"""Places in `LayerTables.errors`."""

MOST_NEAR_NODES = 8
"""Nodes that mode "near" can choose among: it looks at each set of them."""
ORDER_BITS = 6
ORDERS = 1 << ORDER_BITS
"""Orders of nodes that the tokens of a rank take in turn in mode "near"."""
TURN_BITS = 3
"""An order's word holds how much higher nodes are numbered, and from this bit on whether the highest go first."""

GOLDEN = 0x9E3779B9
ROOT = 0x6A09E667
"""The square root of two, modulo 1: its multiples are evenly spread, too, and independently of the golden ratio's."""
MASK = 0xFFFFFFFF
TAG = 1 << 30
"""Set in every slot that a debugging table gives."""

UNIT = 1 << 30
"""Thresholds are in units of 1 / UNIT."""
FIRST_BITS = 20
"""A run's word holds where the run begins in its low bits, and how long it is above."""
MOST_SLOTS, MOST_REPLICAS = 1 << FIRST_BITS, (1 << (31 - FIRST_BITS)) - 1

NUM_BLOCKS = 256
"""Blocks of a batch whose counts are kept apart, so that places within an expert's tokens can be counted through."""


def mix(x: int) -> int:
    """A bijection of 32-bit words that spreads every bit.

    Source: the multipliers and shifts of "lowbias32" (C. Wellons, hash-prospector; public domain).
    """
    x ^= x >> 16
    x = (x * 0x7FEB352D) & MASK
    x ^= x >> 15
    x = (x * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def row_parts(num_slots: int, num_experts: int) -> tuple[int, int, int, int]:
    """Where runs `[E]`, thresholds `[P]`, the span `[1]` and the solver's part begin in a layer's packed row.

    Before them are the names of the candidates, `[P, 2]`.
    """
    runs = 2 * num_slots
    return runs, runs + num_experts, runs + num_experts + num_slots, runs + num_experts + num_slots + 1
