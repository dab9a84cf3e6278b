"""The operators for tensors in host memory: one loop over a batch, where tensor by tensor would take twenty."""

from __future__ import annotations

import numpy as np
import torch

from eplb_core._arrays import IntArray
from eplb_core._numba import inline_kernel, kernel
from eplb_core.dispatch import quota
from eplb_core.dispatch.constants import (
    BASE_PHASE,
    DRAWS,
    EVERY,
    FIRST_BITS,
    FIRST_FAKE,
    GOLDEN,
    KEY,
    MASK,
    MOST_NEAR_NODES,
    MOST_PAIR_TOKENS,
    MOST_SLOTS,
    ORDER_BITS,
    OWN_NODE,
    RANK_PHASE,
    RECORDING,
    ROOT,
    TAG,
    TURN_BITS,
    WINDOW,
    WINDOWS,
    Mode,
    mix,
)
from eplb_core.dispatch.rows import parts_of

_STATIC, _ROTATED, _OF_RANK, _RANDOM, _FAKE = range(5)
_HOW = {"static": _STATIC, "even": _ROTATED, "row": _ROTATED, "weighted": _OF_RANK, "random": _RANDOM, "fake": _FAKE}
_mix = inline_kernel(mix)


def map(
    ids: torch.Tensor,
    out: torch.Tensor,
    table: torch.Tensor,
    settings: torch.Tensor,
    draws: torch.Tensor,
    count: torch.Tensor,
    state: torch.Tensor,
    errors: torch.Tensor,
    num_tokens: torch.Tensor | None,
    num_shared: int,
    num_experts: int,
    num_entries: int,
    mode: Mode,
    debug: bool,
) -> None:
    """The operator `map`; an id that is no expert raises before anything is written or counted."""
    if not ids.numel():
        return
    given, into, real = _rows(ids), _room(ids, out), _real(ids, num_tokens)
    if not _map(
        given, _rows(into), table.numpy(), settings.numpy(), draws.numpy(), count.numpy(), state.numpy(),
        real, num_shared, num_experts, num_entries, _HOW[mode], debug,
    ):  # fmt: skip
        _refuse(given, real, num_shared, num_experts, debug)
    if into is not out:
        out.copy_(into)


def map_near(
    ids: torch.Tensor,
    out: torch.Tensor,
    table: torch.Tensor,
    settings: torch.Tensor,
    count: torch.Tensor,
    state: torch.Tensor,
    errors: torch.Tensor,
    sends: torch.Tensor,
    num_tokens: torch.Tensor | None,
    num_shared: int,
    num_experts: int,
    num_entries: int,
    num_nodes: int,
    debug: bool,
) -> None:
    """The operator `map_near`; an id that is no expert raises before anything is written or counted."""
    if not ids.numel():
        return
    given, into, real = _rows(ids), _room(ids, out), _real(ids, num_tokens)
    if not _map_near(
        given, _rows(into), table.numpy(), settings.numpy(), count.numpy(), state.numpy(), sends.numpy(),
        real, num_shared, num_experts, num_entries, num_nodes, debug,
    ):  # fmt: skip
        _refuse(given, real, num_shared, num_experts, debug)
    if into is not out:
        out.copy_(into)


def map_solved(
    ids: torch.Tensor,
    out: torch.Tensor,
    table: torch.Tensor,
    bounds: torch.Tensor,
    blocks: torch.Tensor,
    num_tokens: torch.Tensor | None,
    num_shared: int,
    num_experts: int,
    num_entries: int,
    debug: bool,
) -> None:
    """The operator `map_solved`: each token goes to the run that its place among its expert's tokens is in."""
    if not ids.numel():
        return
    into, places = _room(ids, out), np.zeros((2, num_experts), dtype=np.int64)
    _map_solved(
        _rows(ids), _rows(into), table.numpy(), bounds.numpy(), places, _real(ids, num_tokens), num_shared,
        num_entries, debug,
    )  # fmt: skip
    if into is not out:
        out.copy_(into)


def count_batch(
    ids: torch.Tensor,
    batch: torch.Tensor,
    blocks: torch.Tensor,
    count: torch.Tensor,
    state: torch.Tensor,
    errors: torch.Tensor,
    num_tokens: torch.Tensor | None,
    num_shared: int,
    rank: int,
    debug: bool,
) -> None:
    """The operator `count_batch`; an id that is no expert raises before anything is counted."""
    given, real = _rows(ids), _real(ids, num_tokens)
    if not _count_batch(given, batch[rank].numpy(), count.numpy(), state.numpy(), real, num_shared):
        _refuse(given, real, num_shared, batch.shape[1], debug)


def solve_batch(
    batch: torch.Tensor,
    bounds: torch.Tensor,
    blocks: torch.Tensor,
    runs: torch.Tensor,
    span: torch.Tensor,
    shared: torch.Tensor,
    arm_rank: torch.Tensor,
    on_rank: torch.Tensor,
    ids: torch.Tensor,
    num_shared: int,
    rank: int,
    mode: Mode,
) -> None:
    """The operator `solve_batch`."""
    quota.solve(batch, bounds, runs, shared, arm_rank, on_rank, rank, fewest=mode == "fewest")
    batch.zero_()


def _rows(ids: torch.Tensor) -> IntArray:
    """Ids as a contiguous array `[T, K]`; a vector is one column."""
    rows: IntArray = ids.contiguous().numpy()
    return rows if rows.ndim == 2 else rows[:, None]


def _room(ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`out` where a kernel for `ids` can write to it, else a tensor to be copied to it."""
    return out if out.dtype == ids.dtype and out.is_contiguous() else torch.empty(ids.shape, dtype=ids.dtype)


def _real(ids: torch.Tensor, num_tokens: torch.Tensor | None) -> int:
    return len(ids) if num_tokens is None else min(max(int(num_tokens), 0), len(ids))


def _refuse(ids: IntArray, real: int, num_shared: int, num_experts: int, debug: bool) -> None:
    routed = ids[:real, : ids.shape[1] - num_shared]
    bad = (routed < -1) | (routed >= num_experts)
    row, column = np.argwhere(bad)[0].tolist()
    value = int(routed[row, column])
    if debug and value >= TAG:
        raise IndexError(
            f"`topk_ids` (={value}) is slot {value - TAG} at row {row}, column {column}: it was mapped before; "
            "map each id once"
        )
    raise IndexError(
        f"`topk_ids` (={value}) must be -1 or a logical expert in [0, {num_experts}) at row {row}, column "
        f"{column}; {int(bad.sum()) - 1} more; fused shared experts need `num_shared`, slots are no experts"
    )


@inline_kernel
def _are_experts(ids: IntArray, real: int, routed: int, num_experts: int) -> bool:
    for row in range(real):
        for column in range(routed):
            if ids[row, column] < -1 or ids[row, column] >= num_experts:
                return False
    return True


@inline_kernel
def _add_pairs(ids: IntArray, count: IntArray, state: IntArray, real: int, routed: int) -> None:
    """Count pairs of some tokens, if asked to: in rows below those of load, each pair once, in that of its lower id."""
    if state.size <= WINDOWS or state[RECORDING] == 0:
        return
    windows, every, experts = int(state[WINDOWS]), int(state[EVERY]), count.shape[1]
    if every > 1:
        every = max(every, (real + MOST_PAIR_TOKENS - 1) // MOST_PAIR_TOKENS)
    pairs = windows + int(state[WINDOW]) * experts
    calls = count.shape[0] - 1
    for row in range(_mix(int(count[calls, 0]) & MASK) % every, real, every):
        for i in range(routed):
            e = int(ids[row, i])
            for j in range(i):
                e = -1 if ids[row, j] == e else e
            if e < 0:
                continue
            for j in range(i + 1):
                f = int(ids[row, j])
                for k in range(j):
                    f = -1 if ids[row, k] == f else f
                if f >= 0:
                    count[pairs + min(e, f), max(e, f)] += 1
    count[calls, 0] += 1


@kernel
def _map(
    ids: IntArray,
    out: IntArray,
    table: IntArray,
    settings: IntArray,
    draws: IntArray,
    count: IntArray,
    state: IntArray,
    real: int,
    num_shared: int,
    num_experts: int,
    num_entries: int,
    how: int,
    debug: bool,
) -> bool:
    rows, columns = ids.shape
    routed = columns - num_shared
    if how != _FAKE and not _are_experts(ids, real, routed, num_experts):
        return False
    counts = count.shape[0] > 0 and state[RECORDING] != 0
    # `int`, or plain Python would stay within the 32 bits of what it reads
    base, own, key = int(settings[BASE_PHASE]) & MASK, int(settings[RANK_PHASE]) & MASK, int(settings[KEY]) & MASK
    runs, thresholds, _, _ = parts_of(num_entries, num_experts)
    first_draw = _mix((key + (int(draws[DRAWS]) & MASK) * GOLDEN) & MASK)
    tag = TAG if debug else 0
    if how != _FAKE:  # before ids are written over
        _add_pairs(ids, count, state, real, routed)
    for row in range(rows):
        for column in range(routed):
            expert = int(ids[row, column])
            if expert < 0 or row >= real:
                out[row, column] = -1
                continue
            element = row * routed + column
            if how == _FAKE:  # ids are replaced, by each expert in turn
                expert = ((element & MASK) + base + settings[FIRST_FAKE]) % num_experts
            if counts:
                count[state[WINDOW], expert] += 1
            if num_entries == 0:
                out[row, column] = table[expert] | tag
                continue
            if how == _RANDOM:
                u = _mix((first_draw + element * GOLDEN) & MASK)
            else:
                u = row * GOLDEN + _mix((base + expert) & MASK)
                if how == _OF_RANK:
                    u += own
                elif how == _FAKE:  # rows of an expert grow as ranks fall: added, the two could cancel
                    u -= own
                u &= MASK
            run = int(table[runs + expert])
            product = u * (run >> FIRST_BITS)
            entry = (run & (MOST_SLOTS - 1)) + (product >> 32)
            other = 1 if (product & MASK) >> 2 >= table[thresholds + entry] else 0
            out[row, column] = table[2 * entry + other] | tag
        for column in range(routed, columns):
            out[row, column] = ids[row, column] if row < real else -1
    if how == _RANDOM:
        draws[DRAWS] += 1
    return True


@kernel
def _map_near(
    ids: IntArray,
    out: IntArray,
    table: IntArray,
    settings: IntArray,
    count: IntArray,
    state: IntArray,
    sends: IntArray,
    real: int,
    num_shared: int,
    num_experts: int,
    num_entries: int,
    num_nodes: int,
    debug: bool,
) -> bool:
    rows, columns = ids.shape
    routed = columns - num_shared
    if not _are_experts(ids, real, routed, num_experts):
        return False
    counts = count.shape[0] > 0 and state[RECORDING] != 0
    base, own, node = int(settings[BASE_PHASE]) & MASK, int(settings[RANK_PHASE]) & MASK, int(settings[OWN_NODE])
    runs, thresholds, _, masks = parts_of(num_entries, num_experts * num_nodes)
    orders = masks + num_experts
    tag, bits = TAG if debug else 0, np.zeros(1 << MOST_NEAR_NODES, np.int64)
    for nodes in range(1, bits.size):
        bits[nodes] = bits[nodes >> 1] + (nodes & 1)
    _add_pairs(ids, count, state, real, routed)
    for row in range(rows):
        # Nodes are numbered in another order for each token, so that the first of equal sets is no node's burden.
        order = int(table[orders + ((row * ROOT & MASK) >> 32 - ORDER_BITS)])
        turn, last = order & (1 << TURN_BITS) - 1, order >> TURN_BITS
        here = 1 << (node + turn) % num_nodes
        best = -1
        for number in range(1 << num_nodes):
            nodes = (1 << num_nodes) - 1 - number if last else number
            if best >= 0 and bits[nodes] >= bits[best]:
                continue
            fits = True
            for column in range(routed):
                if row < real and ids[row, column] >= 0:
                    held = _turned(table[masks + ids[row, column]], turn, num_nodes)
                    fits = fits and held & (nodes | here) != 0
            if fits:
                best = nodes
        sends[0] += bits[best]
        for column in range(routed):
            expert = int(ids[row, column])
            if expert < 0 or row >= real:
                out[row, column] = -1
                continue
            if counts:
                count[state[WINDOW], expert] += 1
            held = _turned(table[masks + expert], turn, num_nodes)
            held = here if held & here else held & best
            place = 0 if not last else num_nodes - 1
            while not held >> place & 1:
                place += 1 if not last else -1
            run = int(table[runs + (place + num_nodes - turn) % num_nodes * num_experts + expert])
            product = ((row * GOLDEN + own + _mix((base + expert) & MASK)) & MASK) * (run >> FIRST_BITS)
            entry = (run & (MOST_SLOTS - 1)) + (product >> 32)
            other = 1 if (product & MASK) >> 2 >= table[thresholds + entry] else 0
            out[row, column] = table[2 * entry + other] | tag
        for column in range(routed, columns):
            out[row, column] = ids[row, column] if row < real else -1
    return True


@inline_kernel
def _turned(nodes: int, turn: int, num_nodes: int) -> int:
    """A set of nodes, each numbered `turn` higher, around."""
    nodes = int(nodes)
    return (nodes << turn | nodes >> num_nodes - turn) & (1 << num_nodes) - 1


@kernel
def _count_batch(ids: IntArray, batch: IntArray, count: IntArray, state: IntArray, real: int, num_shared: int) -> bool:
    routed = ids.shape[1] - num_shared
    if not _are_experts(ids, real, routed, batch.size):
        return False
    counts = count.shape[0] > 0 and state[RECORDING] != 0
    _add_pairs(ids, count, state, real, routed)
    for row in range(real):
        for column in range(routed):
            expert = ids[row, column]
            if expert >= 0:
                batch[expert] += 1
                if counts:
                    count[state[WINDOW], expert] += 1
    return True


@kernel
def _map_solved(
    ids: IntArray,
    out: IntArray,
    table: IntArray,
    bounds: IntArray,
    places: IntArray,
    real: int,
    num_shared: int,
    num_entries: int,
    debug: bool,
) -> None:
    rows, columns = ids.shape
    routed, num_experts = columns - num_shared, places.shape[1]
    runs, _, _, _ = parts_of(num_entries, num_experts)
    place, further = places  # tokens of each expert so far, and how far along its run of entries they have come
    tag = TAG if debug else 0
    for row in range(rows):
        for column in range(routed):
            expert = int(ids[row, column])
            if row >= real or expert < 0 or expert >= num_experts:
                out[row, column] = -1
            elif num_entries == 0:
                out[row, column] = table[expert] | tag
            else:
                run = int(table[runs + expert])
                first, last = run & (MOST_SLOTS - 1), (run >> FIRST_BITS) - 1
                while further[expert] < last and bounds[first + further[expert] + 1] <= place[expert]:
                    further[expert] += 1
                out[row, column] = table[2 * (first + further[expert])] | tag
                place[expert] += 1
        for column in range(routed, columns):
            out[row, column] = ids[row, column] if row < real else -1
