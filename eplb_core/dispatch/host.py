"""The operator's pass over a batch in host memory: one loop, where tensor by tensor would take twenty."""

from __future__ import annotations

import torch

from eplb_core._arrays import IntArray
from eplb_core._numba import inline_kernel, kernel
from eplb_core.dispatch.constants import (
    BASE_PHASE,
    DRAWS,
    FIRST_BITS,
    GOLDEN,
    KEY,
    MASK,
    MOST_SLOTS,
    RANK_PHASE,
    RECORDING,
    TAG,
    WINDOW,
)

_STATIC, _ROTATED, _OF_RANK, _RANDOM, _FAKE = range(5)
_HOW = {"static": _STATIC, "even": _ROTATED, "row": _ROTATED, "weighted": _OF_RANK, "random": _RANDOM, "fake": _FAKE}


def map_rows(
    ids: torch.Tensor,
    out: torch.Tensor,
    table: torch.Tensor,
    settings: torch.Tensor,
    draws: torch.Tensor,
    count: torch.Tensor,
    state: torch.Tensor,
    num_tokens: torch.Tensor | None,
    num_shared: int,
    num_experts: int,
    num_entries: int,
    mode: str,
    debug: bool,
) -> bool:
    """Map and count `ids` `[T, k]`; False, and nothing has changed, if one of them is no expert."""
    plain = ids.contiguous()
    into = out if out.dtype == plain.dtype and out.is_contiguous() else torch.empty_like(plain)
    fits = _map(
        plain.numpy(), into.numpy(), table.numpy(), settings.numpy(), draws.numpy(), count.numpy(), state.numpy(),
        len(ids) if num_tokens is None else int(num_tokens), num_shared, num_experts, num_entries, _HOW[mode], debug,
    )  # fmt: skip
    if fits and into is not out:
        out.copy_(into)
    return fits


@inline_kernel
def _mix(x: int) -> int:
    """As `ops._mix`, on one word."""
    x ^= x >> 16
    x = (x * 0x7FEB352D) & MASK
    x ^= x >> 15
    x = (x * 0x846CA68B) & MASK
    return x ^ (x >> 16)


@kernel
def _map(
    ids: IntArray,
    out: IntArray,
    table: IntArray,
    settings: IntArray,
    draws: IntArray,
    count: IntArray,
    state: IntArray,
    num_tokens: int,
    num_shared: int,
    num_experts: int,
    num_entries: int,
    how: int,
    debug: bool,
) -> bool:
    rows, columns = ids.shape
    routed = columns - num_shared
    real = min(max(num_tokens, 0), rows)
    if how != _FAKE:
        for row in range(real):
            for column in range(routed):
                if ids[row, column] < -1 or ids[row, column] >= num_experts:
                    return False
    counts = count.shape[0] > 0 and state[RECORDING] != 0
    # `int`, or plain Python would stay within the 32 bits of what it reads
    base, own, key = int(settings[BASE_PHASE]) & MASK, int(settings[RANK_PHASE]) & MASK, int(settings[KEY]) & MASK
    runs, thresholds = 2 * num_entries, 2 * num_entries + num_experts
    first_draw = _mix((key + (int(draws[DRAWS]) & MASK) * GOLDEN) & MASK)
    tag = TAG if debug else 0
    for row in range(rows):
        for column in range(routed):
            expert = int(ids[row, column])
            if expert < 0 or row >= real:
                out[row, column] = -1
                continue
            element = row * routed + column
            if how == _FAKE:  # ids are replaced, by each expert in turn
                expert = ((element & MASK) + base) % num_experts
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
