"""Solve for the fraction of an expert's tokens that each replica should take."""

from __future__ import annotations

import numpy as np

from eplb_core._arrays import ArrayLike, FloatArray, IntArray, read_only
from eplb_core._numba import inline_kernel, kernel
from eplb_core.dispatch.rows import group_slots
from eplb_core.layout import ExpertLayout
from eplb_core.metrics import check_load_of, even_shares

SHRINK_WINDOWS = 16
"""Windows at which shares solved on windows go half of the way from an even split (fitted on held-out windows)."""
MAX_SWEEPS = 20_000
"""Sweeps after which a layer's shares stand as they are; real layouts need some tens to some hundreds."""


def replica_shares(layout: ExpertLayout, expert_load: ArrayLike) -> FloatArray:
    """Solve for the fraction of its expert's tokens that each slot should take, to minimize the busiest rank's load.

    With one load `[L, E]` the answer is optimal for that load: no other shares give a lower maximum of rank load over
    rank speed, and below the maximum the ranks are as even as possible.

    Shares that fit one window exactly fit the windows that follow badly. So with T windows `[T, L, E]`, two or more,
    the answer has the least sum of squared rank loads over all windows, then goes T / (T + 16) of the way there from
    an even split. On drifting loads of a 128-expert model that was better than an even split for every T from 2 to 32,
    where the optimum for the windows' sum was worse up to T = 16; give 32 or more where they are at hand.

    Args:
        layout: Where the experts are; `topology.rank_speed` counts.
        expert_load: Tokens of each logical expert, `[L, E]`, or windows of them, `[T, L, E]`.

    Returns:
        float64 `[L, P]`; the shares of an expert's slots sum to 1, an empty slot has 0, slots of one expert on one rank
        have equal shares. An expert without load is shared evenly.

    Raises:
        ValueError: The load's shape does not fit the layout, or it is NaN, infinite or negative.

    Cost:
        O(sweeps * T * replicated slots) per layer: some tens of ms at 58 x 256 -> 288 with one window. Any thread.

    Example:
        >>> from eplb_core import Topology
        >>> layout = ExpertLayout([[0, 1, 2, 0]], num_experts=3, topology=Topology(num_ranks=2))
        >>> replica_shares(layout, [[8, 1, 5]]).tolist()
        [[0.75, 1.0, 1.0, 0.25]]
    """
    load = check_load_of(layout, expert_load)
    layers, experts = layout.num_layers, layout.num_experts
    if load.ndim == 2:
        load = load[None]
    shares = np.zeros((layers, layout.num_slots))
    if load.shape[0] == 0:
        load = np.zeros((1, layers, experts))
    owner = np.arange(layout.num_slots) // layout.slots_per_rank
    by_window = np.ascontiguousarray(load.transpose(1, 0, 2))  # [L, T, E]
    # Squares of any load are finite where the largest is below 1; a power of two changes no answer.
    shift = -np.frexp(by_window.max(axis=(1, 2), initial=0.0))[1]
    by_window = read_only(np.ldexp(by_window, shift[:, None, None]))
    speed = layout.topology.rank_speed
    ints = np.empty((4, layout.num_slots + experts + 1), dtype=np.int64)
    floats = np.empty((3, layout.num_slots))
    rank_load = np.empty((load.shape[0], layout.topology.num_ranks))
    for layer in range(layers):
        row = layout.physical_to_logical_map[layer]
        _solve(row, owner, by_window[layer], speed, MAX_SWEEPS, ints, floats, rank_load, shares[layer])
    windows = load.shape[0]
    if windows > 1:
        even = even_shares(layout)
        shares = even + (shares - even) * (windows / (windows + SHRINK_WINDOWS))
    return shares


@kernel
def _solve(
    row: IntArray,
    owner: IntArray,
    load: FloatArray,
    speed: FloatArray,
    max_sweeps: int,
    ints: IntArray,
    floats: FloatArray,
    rank_load: FloatArray,
    shares: FloatArray,
) -> int:
    """Shares of one layer by water-filling one expert at a time until nothing moves; the number of sweeps made.

    Each step is the exact minimum over one expert's shares of the sum over windows and ranks of load^2 / speed; the
    sum is convex and its terms that tie experts together are smooth, so the steps end in its minimum. With one window
    that minimum also has the lowest maximum: else an expert could move load from a busiest rank to one less busy.
    """
    experts, windows = load.shape[1], load.shape[0]
    starts, by_expert, rank_of, multiple = ints[0, : experts + 1], ints[1], ints[2], ints[3]
    energy, level_of, new = floats[0], floats[1], floats[2]
    group_slots(row, starts, by_expert)
    rank_load[:] = 0.0
    total = 0.0
    for expert in range(experts):
        count = starts[expert + 1] - starts[expert]
        for i in range(starts[expert], starts[expert + 1]):
            shares[by_expert[i]] = 1.0 / count
            for t in range(windows):
                rank_load[t, owner[by_expert[i]]] += load[t, expert] / count
        for t in range(windows):
            total = max(total, load[t, expert])
    if total == 0.0:
        return 0
    for sweep in range(max_sweeps):
        moved = 0.0
        for expert in range(experts):
            first, count = starts[expert], starts[expert + 1] - starts[expert]
            if count == 1:
                continue
            square = 0.0
            for t in range(windows):
                square += load[t, expert] * load[t, expert]
            if square == 0.0:
                continue
            # Distinct ranks of the expert, and how much of its load-weighted neighbour load each has.
            ranks = 0
            for i in range(first, first + count):
                slot = by_expert[i]
                rank = owner[slot]
                if ranks and rank_of[ranks - 1] == rank:
                    multiple[ranks - 1] += 1
                    new[ranks - 1] += shares[slot]
                    continue
                rank_of[ranks], multiple[ranks], new[ranks] = rank, 1, shares[slot]
                ranks += 1
            if ranks == 1:
                continue
            for k in range(ranks):
                product = 0.0
                for t in range(windows):
                    product += load[t, expert] * rank_load[t, rank_of[k]]
                energy[k] = product / square - new[k]  # others' load on the rank in units of this expert's
                level_of[k] = energy[k] / speed[rank_of[k]]
            level = _water_level(level_of, energy, rank_of, speed, ranks)
            emptiest, whole = 0, 0.0
            for k in range(ranks):
                if level_of[k] < level_of[emptiest]:
                    emptiest = k
                energy[k] = max(0.0, level * speed[rank_of[k]] - energy[k])  # what it takes
                whole += energy[k]
            if not whole > 0.0:  # next to the ranks' other load the expert's is rounded away
                energy[emptiest] = whole = 1.0
            k = -1
            for i in range(first, first + count):
                slot = by_expert[i]
                if k < 0 or rank_of[k] != owner[slot]:
                    k += 1
                    share = energy[k] / whole
                    moved = max(moved, abs(share - new[k]) * np.sqrt(square / windows))
                    for t in range(windows):
                        rank_load[t, rank_of[k]] += load[t, expert] * (share - new[k])
                    new[k] = share
                shares[slot] = new[k] / multiple[k]
        if moved <= 1e-13 * total:
            return sweep + 1
    return max_sweeps


@inline_kernel
def _water_level(level_of: FloatArray, energy: FloatArray, rank_of: IntArray, speed: FloatArray, ranks: int) -> float:
    """The level at which sum(max(0, level * speed - energy)) = 1: the lowest over prefixes by falling emptiness."""
    best, floor = np.inf, -np.inf
    done = 0
    filled, width = 1.0, 0.0
    while done < ranks:
        lowest = np.inf
        for k in range(ranks):
            if floor < level_of[k] < lowest:
                lowest = level_of[k]
        if lowest >= best:
            break
        for k in range(ranks):
            if level_of[k] == lowest:
                filled += energy[k]
                width += speed[rank_of[k]]
                done += 1
        best = min(best, filled / width)
        floor = lowest
    return best
