"""Quotas solved on a batch itself: the torch path, in integers, so that any device gives the same ones.

The load that experts without a second replica put on each rank is fixed. Each other expert would fill its ranks like
water if the rest stood still; all do so at once, and the step that all take together is as long as lowers the sum of
squared rank loads most. That sum's minimum has the lowest maximum as well.
"""

from __future__ import annotations

import torch

from eplb_core.dispatch.constants import FIRST_BITS, MOST_SLOTS

STEPS = 32
"""Common steps: they end within 0.5% of the optimum on all layouts and loads of docs/dispatch.md."""
SCALE_BITS = 24
"""A batch's total is scaled to nearly 2^24: sums of products over 128 ranks then stay below 2^63."""
STEP_BITS = 5
"""A step's length is a multiple of 2^-5: a step times that stays below 2^31."""
HALF_STEP, SHORTEST_STEP = 1 << (STEP_BITS - 1), 1 << (STEP_BITS - 2)
"""For rounding, and a quarter."""


def solve(
    batch: torch.Tensor,
    bounds: torch.Tensor,
    runs: torch.Tensor,
    shared: torch.Tensor,
    arm_rank: torch.Tensor,
    on_rank: torch.Tensor,
    rank: int,
    *,
    fewest: bool,
) -> None:
    """Write into `bounds` at which of this rank's tokens of an expert each candidate's tokens begin.

    Tokens of an expert are counted through over the ranks, and each slot takes a run of them: totals by slot and by
    rank are then both exact, and slots and sources are matched in order.

    Args:
        batch: int32 `[R, E]`: tokens of each rank and expert.
        bounds: int32 `[P]`.
        runs: int32 `[E]`: as in `LayerTables`.
        shared: int32 `[N]`, `arm_rank` int32 `[N, W]` and `on_rank` int32 `[R, S]`: as in `LayerTables`.
        arm_rank: See there.
        on_rank: See there.
        rank: Source rank.
        fewest: Choose one slot for each expert that the batch uses, so that the most slots used on a rank are few.
    """
    if len(runs) == 0:  # no expert has a choice
        return
    width = arm_rank.shape[1]
    count = batch.to(torch.int64)
    total = count.sum(0)
    before = count[:rank].sum(0)
    shared, arm_rank, on_rank = shared.long(), arm_rank.long(), on_rank.long()
    known = shared >= 0
    expert = shared.clamp(min=0)
    run = runs.to(torch.int64)[expert][:, None]
    k = torch.arange(width, device=batch.device)
    is_arm = known[:, None] & (k < run >> FIRST_BITS)
    wanted = torch.where(known, total[expert], 0)
    if fewest:
        start = _choose_one(total > 0, wanted > 0, arm_rank, is_arm, on_rank)
    else:
        scaled = (total << SCALE_BITS) // (total.sum() + 1)
        x = _fill_ranks(scaled, torch.where(known, scaled[expert], 0), arm_rank, is_arm, on_rank)
        x = torch.where((x.sum(1) == 0)[:, None], is_arm.to(torch.int64), x)
        until = x.cumsum(1)
        whole = until[:, -1:].clamp(min=1)
        start = (wanted[:, None] * (until - x) + whole // 2) // whole - before[expert][:, None]
    # Entries of experts that are not shared are never read.
    bounds[((run & (MOST_SLOTS - 1)) + k)[is_arm]] = start[is_arm].to(torch.int32)


def _by_rank(x: torch.Tensor, on_rank: torch.Tensor) -> torch.Tensor:
    """Sum what the arms `[N, W]` take over the slots of each rank."""
    return torch.where(on_rank >= 0, x.reshape(-1)[on_rank.clamp(min=0)], 0).sum(1)


def _alone(x: torch.Tensor, on_rank: torch.Tensor) -> torch.Tensor:
    """Sum by rank what experts `[E]` have that no other slot shares."""
    return torch.where(on_rank <= -2, x[(-2 - on_rank).clamp(min=0)], 0).sum(1)


def _fill_ranks(
    scaled: torch.Tensor,
    wanted: torch.Tensor,
    arm_rank: torch.Tensor,
    is_arm: torch.Tensor,
    on_rank: torch.Tensor,
) -> torch.Tensor:
    """What each arm takes, int64 `[N, W]`, in scaled tokens."""
    number = is_arm.sum(1).clamp(min=1)
    x = torch.where(is_arm, (wanted // number)[:, None], 0)
    load = _alone(scaled, on_rank) + _by_rank(x, on_rank)
    level = torch.full_like(wanted, 1 << (SCALE_BITS + 1))
    for _ in range(STEPS):
        others = load[arm_rank] - x
        # One step of Newton's for the level, from the one before: it nears the level as the loads settle.
        filled = is_arm & (others < level[:, None])
        filled = torch.where(~filled.any(1)[:, None], is_arm, filled)
        level = (wanted + torch.where(filled, others, 0).sum(1)) // filled.sum(1).clamp(min=1)
        step = torch.where(is_arm, (level[:, None] - others).clamp(min=0), 0) - x
        change = _by_rank(step, on_rank)
        # A step also makes up for rounding, so it does not sum to 0: measured from the mean, that neither gains nor
        # loses much; and it is never so short that experts stay without what they lack.
        gain = (((1 << SCALE_BITS) // load.shape[0] - load) * change).sum().clamp(min=0)
        # One division of two rounded numbers: any IEEE machine gives the same, and it is quicker than one of integers.
        ratio = (gain.to(torch.float32) * (1 << STEP_BITS)) / (change * change).sum().clamp(min=1).to(torch.float32)
        length = ratio.clamp(SHORTEST_STEP, 1 << STEP_BITS).to(torch.int64)
        x = (x + ((step * length + HALF_STEP) >> STEP_BITS)).clamp(min=0)
        load = load + ((change * length + HALF_STEP) >> STEP_BITS)
    return x


def _choose_one(
    used: torch.Tensor, wanted: torch.Tensor, arm_rank: torch.Tensor, is_arm: torch.Tensor, on_rank: torch.Tensor
) -> torch.Tensor:
    """Starts `[N, W]` that send all tokens of an expert to its arm on the rank with the fewest used slots so far.

    Experts with the fewest arms choose first (the order of the packed row).
    """
    load = _alone(used.to(torch.int64), on_rank)
    chosen = torch.zeros_like(wanted, dtype=torch.int64)
    far = torch.iinfo(torch.int32).max
    for n in range(wanted.shape[0]):
        there = torch.where(is_arm[n], load[arm_rank[n]], far)
        best = (there == there.min()).to(torch.int8).argmax()
        chosen[n] = best
        load = load + (torch.arange(load.shape[0], device=load.device) == arm_rank[n, best]) * wanted[n]
    return torch.where(torch.arange(arm_rank.shape[1], device=load.device) <= chosen[:, None], 0, far)
