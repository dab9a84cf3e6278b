"""What the operators must answer, written with whole tensors: no loop over elements, no blocks, no offsets."""

from __future__ import annotations

import torch

from eplb_core import LayerTables
from eplb_core.dispatch import quota
from eplb_core.dispatch.constants import (
    BASE_PHASE,
    DRAWS,
    FIRST_BITS,
    FIRST_FAKE,
    GOLDEN,
    KEY,
    MASK,
    MOST_SLOTS,
    ORDER_BITS,
    OWN_NODE,
    RANK_PHASE,
    RECORDING,
    ROOT,
    SOLVED_MODES,
    TAG,
    TURN_BITS,
    WINDOW,
)


def map_ids(
    ids: torch.Tensor, t: LayerTables, *, num_tokens: torch.Tensor | None = None, num_shared: int = 0
) -> torch.Tensor:
    """As `topk_to_slots` on ids `[T, K]` that are all valid; counts, solves and draws on the tensors of `t`."""
    if not ids.numel() and t.mode not in SOLVED_MODES:
        return ids.clone()
    rows, columns = ids.shape
    routed = columns - num_shared
    row = torch.arange(rows)[:, None]
    real = torch.ones_like(row, dtype=torch.bool) if num_tokens is None else row < num_tokens.reshape(())
    valid = (ids[:, :routed] >= 0) & real
    expert = torch.where(valid, ids[:, :routed], 0).long()
    if t.mode == "fake":
        element = row * routed + torch.arange(routed)
        start = (int(t.settings[BASE_PHASE]) & MASK) + int(t.settings[FIRST_FAKE])
        expert = ((element & MASK) + start) % t.num_experts
    if len(t.count) and t.state[RECORDING]:
        _add(t.count[int(t.state[WINDOW])], expert, valid)
    if t.mode in SOLVED_MODES:
        _add(t.batch[t.rank], expert, valid)
        if t.all_reduce is not None:
            t.all_reduce(t.batch)
        quota.solve(t.batch, t.bounds, t.runs, t.shared, t.arm_rank, t.on_rank, t.rank, fewest=t.mode == "fewest")
        t.batch.zero_()
    slot = _slots(t, row, expert, valid)
    if t.mode == "random":
        t.draws[DRAWS] += 1
    slot = torch.where(valid, slot | TAG if t.debug else slot, -1)
    return torch.cat([slot, torch.where(real, ids[:, routed:], -1)], dim=1)


def _add(count: torch.Tensor, expert: torch.Tensor, valid: torch.Tensor) -> None:
    count += torch.bincount(expert[valid], minlength=len(count))


def _slots(t: LayerTables, row: torch.Tensor, expert: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """The slot of each expert, whatever it is where it is not valid."""
    if t.num_entries == 0:
        return t.candidates[expert, 0].long()
    run = t.runs[_nearest(t, row, expert, valid) * t.num_experts + expert if t.num_nodes else expert].long()
    first, number = run & (MOST_SLOTS - 1), run >> FIRST_BITS
    if t.mode in SOLVED_MODES:
        place, entry = places(expert, valid), first.clone()
        for k in range(1, max(number.flatten().tolist(), default=0)):
            further = (first + k).clamp(max=len(t.bounds) - 1)
            entry = torch.where((k < number) & (t.bounds[further] <= place), first + k, entry)
        return t.candidates[entry, 0].long()
    product = _choice(t, row, expert) * number
    entry, rest = first + (product >> 32), (product & MASK) >> 2
    return t.candidates[entry, (rest >= t.thresholds[entry]).long()].long()


def _nearest(t: LayerTables, row: torch.Tensor, expert: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """The node that each expert is asked in, `[T, k]`: the token's own, or one of the fewest others that it needs.

    Sets of nodes are tried by size, then by their bits, where nodes have the numbers that the token's order gives them.
    """
    number, own = t.num_nodes, int(t.settings[OWN_NODE])
    orders = t.orders[((row[:, 0] * ROOT) & MASK) >> (32 - ORDER_BITS)]
    answer = torch.zeros_like(expert)
    for i, order in enumerate(orders.tolist()):
        turn, last = order % (1 << TURN_BITS), order >> TURN_BITS
        node_at = [(place - turn) % number for place in range(number)]
        sets = [{node_at[k] for k in range(number) if bits >> k & 1} for bits in range(1 << number)]
        if last:
            node_at.reverse()
            sets.reverse()
        used = [k for k in range(expert.shape[1]) if valid[i, k]]
        held = {k: {n for n in range(number) if int(t.masks[expert[i, k]]) >> n & 1} for k in used}
        far = [k for k in used if own not in held[k]]
        best = next(nodes for nodes in sorted(sets, key=len) if all(held[k] & nodes for k in far))
        t.sends[0] += len(best)
        for k in used:
            answer[i, k] = next(n for n in node_at if n in held[k] & best) if k in far else own
    return answer


def places(expert: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """The place of each (token, expert) among the valid ones of its expert, in order of the elements; `[T, k]`."""
    label = torch.where(valid, expert, -1).flatten()
    return ((label[:, None] == label) & valid.flatten()).tril(-1).sum(1).view(expert.shape)


def _choice(t: LayerTables, row: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
    """The number u in [0, 2^32) that chooses among an expert's candidates, as docs/dispatch.md has it."""
    setting = t.settings.long() & MASK
    if t.mode == "random":
        element = row * expert.shape[1] + torch.arange(expert.shape[1])
        return _mix((_mix((setting[KEY] + int(t.draws[DRAWS]) * GOLDEN) & MASK) + element * GOLDEN) & MASK)
    u = row * GOLDEN + _mix((setting[BASE_PHASE] + expert) & MASK)
    return (u + {"weighted": 1, "near": 1, "fake": -1}.get(t.mode, 0) * setting[RANK_PHASE]) & MASK


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK
    return x ^ (x >> 16)
