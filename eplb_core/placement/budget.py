"""One budget for all layers: transfers and redundant slots go where they gain most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_core._arrays import ArrayLike, FloatArray, IntArray, check_int, check_load, read_only, to_ids, to_numpy
from eplb_core._numba import kernel
from eplb_core.errors import InfeasiblePlacementError
from eplb_core.layout import ExpertLayout
from eplb_core.placement._pass_time import check_active, time_layers
from eplb_core.placement.costs import CostModel
from eplb_core.placement.place import Placement, place
from eplb_core.topology import Topology

_MOST_CANDIDATES = 127


def spend_budget(gains: ArrayLike, prices: ArrayLike, budget: int) -> IntArray:
    """Which candidate should each layer take, so that all together gain most and cost no more than `budget`?

    The answer is the best there is, so more budget never gains less. Of answers with equal gain the cheapest is taken,
    then the one that gives to the first layers.

    Args:
        gains: What each candidate gains on each layer, `[C, L]`, or `[L]` for one candidate; finite, or infinite for
            what must be had if the budget allows. 0 or less is never taken.
        prices: What it costs, ints of the same shape, 0 or more: transfers, slots, bytes in a coarse unit.
        budget: Most that all layers may cost together, 0 or more.

    Returns:
        int64 `[L]`: the candidate of each layer, -1 = none.

    Raises:
        ValueError: Shapes differ; a gain is NaN; a price or the budget is negative; more than 127 candidates.

    Cost:
        O(C * L * B) time and L * B bytes, where B is the smaller of `budget` and what the dearest candidates cost
        together: 6 ms for 58 layers and a budget of 10,000. Any thread, no interpreter lock.

    Example:
        >>> spend_budget([5.0, 9.0, 6.0], [2, 3, 2], 4).tolist()
        [0, -1, 0]
        >>> spend_budget([[1.0, 3.0], [4.0, 5.0]], [[1, 1], [3, 3]], 4).tolist()
        [1, 0]
    """
    gain, price = _check_candidates(gains, prices)
    most = check_int(budget, "budget", 0)
    candidates, layers = gain.shape
    chosen = np.full(layers, -1, dtype=np.int64)
    if not candidates or not layers:
        return chosen
    # What must be had is worth more than all else together.
    finite = gain[np.isfinite(gain) & (gain > 0.0)].tolist()
    all_else = 1.0
    for value in finite:
        all_else += 2.0 * value
    if not all_else * layers < np.inf:
        raise ValueError(f"`gains` (up to {max(finite):g}) are too large to be added up in float64; scale them down")
    gain[gain == np.inf] = all_else
    reach = min(most, int(price.max(axis=0).sum()))
    choice = np.full((layers, reach + 1), -1, dtype=np.int8)
    worth, spent = np.zeros((2, reach + 1)), np.zeros((2, reach + 1), dtype=np.int64)
    _spend(gain, price, choice, worth, spent, chosen)
    return chosen


def _check_candidates(gains: ArrayLike, prices: ArrayLike) -> tuple[FloatArray, IntArray]:
    """Both as `[C, L]`."""
    gain = np.array(to_numpy(gains), dtype=np.float64, order="C")
    price = to_ids(prices, "prices")
    if gain.shape != price.shape or gain.ndim not in (1, 2):
        raise ValueError(
            f"`gains` (shape {list(gain.shape)}) and `prices` (shape {list(price.shape)}) must both be [C, L] or [L]"
        )
    gain, price = np.atleast_2d(gain), np.atleast_2d(price)
    if len(gain) > _MOST_CANDIDATES:
        raise ValueError(f"`gains` ({len(gain)} candidates) must have {_MOST_CANDIDATES} or fewer")
    for name, bad in (("gains", np.isnan(gain)), ("prices", price < 0)):
        if bad.any():
            candidate, layer = (int(i) for i in np.argwhere(bad)[0])
            value = gain[candidate, layer] if name == "gains" else price[candidate, layer]
            rule = "be a number" if name == "gains" else "be 0 or more"
            raise ValueError(f"`{name}` (={value}) must {rule} at candidate {candidate}, layer {layer}")
    return gain, price


@kernel
def _spend(
    gain: FloatArray,
    price: IntArray,
    choice: npt.NDArray[np.int8],
    worth: FloatArray,
    spent: IntArray,
    chosen: IntArray,
) -> None:
    """Dynamic programming from the last layer to the first over what is left of the budget.

    `worth[b]` and `spent[b]` say what the layers from here on gain and cost with `b` left; two rows take turns.
    """
    candidates, layers = gain.shape
    for layer in range(layers - 1, -1, -1):
        now, after = layer % 2, (layer + 1) % 2
        for left in range(choice.shape[1]):
            best, cost, take = worth[after, left], spent[after, left], -1
            for c in range(candidates):
                p = price[c, layer]
                if p > left or not gain[c, layer] > 0.0:
                    continue
                value, whole = gain[c, layer] + worth[after, left - p], p + spent[after, left - p]
                # Of equal ones: cheaper, then taken rather than left to a later layer, then the first candidate.
                if value > best or (value == best and (whole < cost or (whole == cost and take < 0))):
                    best, cost, take = value, whole, c
            worth[now, left], spent[now, left], choice[layer, left] = best, cost, take
    left = choice.shape[1] - 1
    for layer in range(layers):
        take = choice[layer, left]
        chosen[layer] = take
        if take >= 0:
            left -= price[take, layer]


@dataclass(frozen=True, slots=True, eq=False)
class SlotPlan:
    """How many slots each layer gets. Arrays are read-only."""

    slots_per_rank: IntArray
    """Slots of each rank, int64 `[L]`."""
    layout: ExpertLayout
    """A placement with that many slots; layers with fewer than the most end each rank with empty slots."""
    balancedness: FloatArray
    """As of `Placement`, float64 `[L]`."""
    choices: tuple[int, ...]
    """Slots per rank that were tried, `[C]`, ascending."""
    layer_time: FloatArray
    """Seconds of a pass with each choice, float64 `[C, L]`, by the cost model: what a slot is worth on each layer."""


def plan_slots(
    expert_load: ArrayLike,
    topology: Topology,
    *,
    total_slots: int,
    choices: Sequence[int] | None = None,
    cost: CostModel | None = None,
    window_passes: float = 1.0,
) -> SlotPlan:
    """How many slots is each layer worth, when one rank has room for `total_slots` over all layers?

    Some layers are even without redundant slots and some need several a rank. A layer's time is found for each choice
    by `place`; slots then go where they shorten the pass most.

    Args:
        expert_load: Tokens routed to each expert, `[L, E]`, or windows of it, `[T, L, E]`.
        topology: Ranks, nodes and speeds.
        total_slots: Slots that one rank holds, summed over layers.
        choices: Slots per rank that a layer may have. Default: as many as the experts need, and up to four more.
        cost: Seconds of a pass. Default: time is counted in tokens.
        window_passes: Passes that a window covers.

    Returns:
        Slots of each layer, and a layout that has them.

    Raises:
        InfeasiblePlacementError: `total_slots` does not hold all experts.
        ValueError: A bad load; a choice with fewer slots than experts.

    Cost:
        One `place` for each choice. Any thread.

    Example:
        >>> load = [[300, 10, 10, 10], [50, 50, 50, 50]]
        >>> plan = plan_slots(load, Topology(num_ranks=2), total_slots=5)
        >>> plan.slots_per_rank.tolist()
        [3, 2]
        >>> print(plan.layout)
        layer 0: 0 2 1 | 0 3 1
        layer 1: 0 2 - | 1 3 -
    """
    load = check_load(expert_load, "expert_load", (2, 3))
    load = load if load.ndim == 3 else load[None]
    _, layers, experts = load.shape
    ranks = topology.num_ranks
    sizes = _check_choices(choices, experts, ranks)
    total = check_int(total_slots, "total_slots", 0)
    if total < layers * sizes[0]:
        raise InfeasiblePlacementError(
            f"`total_slots` (={total}) must be at least {layers * sizes[0]}: {sizes[0]} on each of {layers} layers",
            num_live_slots=total * ranks,
            num_experts=experts * layers,
        )
    model = CostModel() if cost is None else cost
    active = check_active(None, ranks)
    placements = [place(load, topology, num_slots=size * ranks) for size in sizes]
    times = np.stack(
        [time_layers(each.layout, load, active, None, "shares", model, window_passes)[0] for each in placements]
    )
    extra = np.array(sizes, dtype=np.int64)[1:, None] - sizes[0] + np.zeros((1, layers), dtype=np.int64)
    chosen = spend_budget(times[:1] - times[1:], extra, total - layers * sizes[0]) + 1
    return SlotPlan(
        slots_per_rank=read_only(np.array(sizes, dtype=np.int64)[chosen]),
        layout=_merge(placements, chosen, experts, topology),
        balancedness=read_only(np.array([placements[c].balancedness[layer] for layer, c in enumerate(chosen)])),
        choices=tuple(sizes),
        layer_time=read_only(times),
    )


def _check_choices(choices: Sequence[int] | None, experts: int, ranks: int) -> list[int]:
    least = -(-experts // ranks)
    sizes = sorted(
        {check_int(size, "choices", least) for size in (range(least, least + 5) if choices is None else choices)}
    )
    if not sizes:
        raise ValueError("`choices` (=[]) must name one number of slots or more")
    return sizes


def _merge(placements: list[Placement], chosen: IntArray, experts: int, topology: Topology) -> ExpertLayout:
    """Each layer's row from the placement chosen for it, at the widest one's slots per rank."""
    widths = [each.layout.slots_per_rank for each in placements]
    width = max((widths[c] for c in chosen.tolist()), default=widths[0])
    p2l = np.full((len(chosen), topology.num_ranks, width), -1, dtype=np.int64)
    for layer, c in enumerate(chosen.tolist()):
        row = placements[c].layout.physical_to_logical_map[layer]
        p2l[layer, :, : widths[c]] = row.reshape(topology.num_ranks, widths[c])
    return ExpertLayout(p2l.reshape(len(chosen), -1), experts, topology=topology)
