"""What the search for near layouts knows of one layer, in integers, and how a step changes it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eplb_core._arrays import BoolArray, IntArray
from eplb_core._numba import inline_kernel, kernel

Int32Array = npt.NDArray[np.int32]

LOAD_BITS = 20
"""An even rank's load is 2^20."""
PAIR_BITS = 24
"""All pairs are 2^24, and so are all tokens of experts. With up to 30 nodes sums of pairs stay below 2^31."""
MOST_NODES = 30
"""A node is a bit of 32, and a pair counts at most as often as there are nodes."""


class Frame(NamedTuple):
    """One layer's problem. Energies are in units of pairs times N."""

    node: IntArray
    """Of each rank `[R]`."""
    nodes: int
    """N."""
    load: IntArray
    """Of each expert in each window `[E, T]`."""
    limit: IntArray
    """Load of each rank in each window above which it costs `[R, T]`."""
    weight: IntArray
    """Energy of a unit of load above it `[R, T]`."""
    pairs: Int32Array
    """Use of two experts together `[E, E]`."""
    tokens: IntArray
    """Use of each expert `[E]`."""
    had: BoolArray
    """Whether a rank needs no transfer to hold an expert `[E, R]`."""
    home: IntArray
    """Node that each expert must have a replica in `[E]`, or `[0]`."""
    pinned: bool
    """All replicas must be there."""
    transfer: int
    """Energy of a transfer."""
    budget: int
    """Most transfers."""


class State(NamedTuple):
    """A row, and what follows from it."""

    row: IntArray
    """Expert of each slot `[P]`."""
    filled: IntArray
    """Slots that hold an expert; their number does not change."""
    at: IntArray
    """Slots of each expert `[E, P - E + 1]`, the first `replicas[e]`."""
    replicas: IntArray
    """`[E]`."""
    on: IntArray
    """Slots of an expert on a rank `[E, R]`."""
    within: IntArray
    """Slots of an expert in a node `[E, N]`."""
    mask: Int32Array
    """Nodes that hold an expert, as bits `[E]`."""
    spread: Int32Array
    """Number of those `[E]`."""
    share: IntArray
    """Load of each replica in each window `[E + 3, T]`; 0 at `E`, and two for a step to use."""
    rank_load: IntArray
    """Sums of these `[R, T]`."""
    was: IntArray
    """Ranks that a step changes, and their loads before `[n, 1 + T]`."""


def new_state(frame: Frame, row: IntArray) -> State:
    """State of a row, which it keeps and changes."""
    ranks, experts, windows = frame.node.size, *frame.load.shape
    filled = np.flatnonzero(row >= 0)
    width = max(int(np.bincount(row[filled], minlength=experts).max()), filled.size - experts + 1, ranks)
    state = State(
        row, filled, np.zeros((experts, width + 1), np.int64), np.zeros(experts, np.int64),
        np.zeros((experts, ranks), np.int64), np.zeros((experts, frame.nodes), np.int64), np.zeros(experts, np.int32),
        np.zeros(experts, np.int32), np.zeros((experts + 3, windows), np.int64), np.zeros((ranks, windows), np.int64),
        np.zeros((2 * width + 2, 1 + windows), np.int64),
    )  # fmt: skip
    _fill(frame, state)
    return state


@kernel
def _fill(frame: Frame, state: State) -> None:
    stride = state.row.size // frame.node.size
    for p in state.filled:
        e = state.row[p]
        _give_slot(frame, state, e, p, stride)
        state.mask[e] |= np.int32(1 << frame.node[p // stride])
    for e in range(state.replicas.size):
        state.spread[e] = bits(state.mask[e])
        _set_share(frame, state, e)
    for p in state.filled:
        for t in range(frame.load.shape[1]):
            state.rank_load[p // stride, t] += state.share[state.row[p], t]


@inline_kernel
def _set_share(frame: Frame, state: State, e: int) -> None:
    for t in range(frame.load.shape[1]):
        state.share[e, t] = frame.load[e, t] // state.replicas[e]


@inline_kernel
def bits(mask: int) -> int:
    """Bits that are set."""
    number = 0
    while mask:
        mask &= mask - 1
        number += 1
    return number


@inline_kernel
def set_load(
    rank_load: IntArray,
    share: IntArray,
    limit: IntArray,
    weight: IntArray,
    was: IntArray,
    i: int,
    r: int,
    gets: int,
    gives: int,
) -> int:
    """Give a rank the share `gets` for the share `gives`; note in `was[i]` what it had, return the change of energy."""
    energy, was[i, 0] = 0, r
    for t in range(share.shape[1]):
        before = rank_load[r, t]
        after = before + share[gets, t] - share[gives, t]
        was[i, 1 + t], rank_load[r, t] = before, after
        energy += (max(0, after - limit[r, t]) - max(0, before - limit[r, t])) * weight[r, t]
    return energy


@inline_kernel
def apart(
    pairs: Int32Array, tokens: IntArray, mask: Int32Array, spread: Int32Array, nodes: int, e: int, after: int
) -> int:
    """Put expert `e` into the nodes of `after`; return the change of energy.

    A pair costs its use times the nodes that hold neither of them, where no node holds both; an expert its tokens times
    the nodes that do not hold it. Over all source nodes that is about what tokens send across nodes, as far as pairs
    can tell: what is at the source is free, and what lies together costs one send.
    """
    now, was, none = np.int32(after), mask[e], np.int32(0)
    if now == was:
        return 0
    sum_now = sum_was = spread_now = spread_was = none
    for f in range(mask.size):
        use, other = pairs[e, f], mask[f]
        use_now = use if other & now == 0 else none
        use_was = use if other & was == 0 else none
        sum_now += use_now
        sum_was += use_was
        spread_now += use_now * spread[f]
        spread_was += use_was * spread[f]
    number = bits(after)
    energy = int(sum_now) * (nodes - number) - int(spread_now) - int(sum_was) * (nodes - spread[e]) + int(spread_was)
    energy += int(tokens[e]) * int(spread[e] - number)
    mask[e], spread[e] = now, number
    return int(energy)


@inline_kernel
def may_move(home: IntArray, within: IntArray, pinned: bool, e: int, source: int, to: int) -> bool:
    """Whether a replica of `e` may go from one node to another; -1 = from or to nowhere."""
    if pinned:
        return to == -1 or bool(to == home[e])
    return bool(to == home[e] or source != home[e] or within[e, source] > 1)


@inline_kernel
def received(had: BoolArray, on: IntArray, e: int, source: int, to: int) -> int:
    """Transfers more when a slot of `e` leaves rank `source` and one is filled on rank `to`; -1 = no rank."""
    number = 0
    if to >= 0 and not had[e, to]:
        number += 1
    if source >= 0 and not had[e, source] and on[e, source] == 1:
        number -= 1
    return number


@kernel
def accept(frame: Frame, state: State, a: int, b: int, f: int) -> None:
    """Give slot `a` to expert `f`, and slot `b`, unless it is -1, to that of `a`; masks and loads are set."""
    stride = state.row.size // frame.node.size
    e = state.row[a]
    _take_slot(frame, state, e, a, stride)
    if b >= 0:
        _take_slot(frame, state, f, b, stride)
        _give_slot(frame, state, e, b, stride)
    _give_slot(frame, state, f, a, stride)
    if b < 0:
        _set_share(frame, state, e)
        _set_share(frame, state, f)


@inline_kernel
def _take_slot(frame: Frame, state: State, e: int, p: int, stride: int) -> None:
    i = 0
    while state.at[e, i] != p:
        i += 1
    state.replicas[e] -= 1
    state.at[e, i] = state.at[e, state.replicas[e]]
    state.on[e, p // stride] -= 1
    state.within[e, frame.node[p // stride]] -= 1


@inline_kernel
def _give_slot(frame: Frame, state: State, e: int, p: int, stride: int) -> None:
    state.row[p] = e
    state.at[e, state.replicas[e]] = p
    state.replicas[e] += 1
    state.on[e, p // stride] += 1
    state.within[e, frame.node[p // stride]] += 1
