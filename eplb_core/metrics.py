"""Rank loads, balancedness and transfers of layouts; checks of loads and shares."""

from __future__ import annotations

import numpy as np

from eplb_core._arrays import ArrayLike, BoolArray, FloatArray, IntArray, check_kind, check_load, to_reals
from eplb_core.layout import ExpertLayout


def rank_load(layout: ExpertLayout, expert_load: ArrayLike, *, shares: ArrayLike | None = None) -> FloatArray:
    """Compute how many tokens each rank gets.

    Args:
        layout: Where the experts are.
        expert_load: Tokens routed to each logical expert, `[L, E]`, or windows of it, `[T, L, E]`.
        shares: Fraction of its expert's tokens that each slot takes, floats `[L, P]` or `[T, L, P]`; an expert's
            shares sum to 1. Default: replicas share equally.

    Returns:
        float64 `[L, R]` or `[T, L, R]`.

    Raises:
        ValueError: A shape does not fit the layout, a load is NaN, infinite or negative, or the shares of an expert do
            not sum to 1.

    Cost:
        O(T * L * P). Any thread.

    Example:
        >>> from eplb_core import Topology
        >>> layout = ExpertLayout([[0, 1, 2, 0]], num_experts=3, topology=Topology(num_ranks=2))
        >>> rank_load(layout, [[8, 1, 5]])
        array([[5., 9.]])
    """
    load = check_load_of(layout, expert_load)
    if shares is None:
        fraction = even_shares(layout)
    else:
        fraction = check_shares(shares, layout, num_windows=len(load) if load.ndim == 3 else None)
    p2l, layers, slots = layout.physical_to_logical_map, layout.num_layers, layout.num_slots
    index = np.broadcast_to(np.maximum(p2l, 0), (*load.shape[:-2], layers, slots))
    slot_load = np.take_along_axis(load, index, axis=-1) * fraction
    ranks = (layout.topology.num_ranks, layout.slots_per_rank)
    by_rank: FloatArray = slot_load.reshape(*load.shape[:-1], *ranks).sum(axis=-1)
    return by_rank


def even_shares(layout: ExpertLayout) -> FloatArray:
    """Return shares `[L, P]` that split each expert equally: one over its number of slots, 0 for empty slots."""
    p2l = layout.physical_to_logical_map
    return (p2l >= 0) / np.take_along_axis(layout.replica_count, np.maximum(p2l, 0), axis=1)


def check_load_of(layout: ExpertLayout, expert_load: object, *, by_source: bool = False) -> FloatArray:
    """Make a load `[L, E]` or `[T, L, E]` float64 and read-only; raise unless it fits the layout.

    With `by_source` the first of three dimensions counts the ranks that send, `[R, L, E]`.
    """
    check_kind(layout, "layout", ExpertLayout)
    load = check_load(expert_load, "expert_load", (2, 3), outer="source rank" if by_source else "window")
    frame, ranks = (layout.num_layers, layout.num_experts), layout.topology.num_ranks
    if load.shape[-2:] != frame or (by_source and load.ndim == 3 and len(load) != ranks):
        first, what = (ranks, " from each rank") if by_source else ("T", "")
        both = f"[{frame[0]}, {frame[1]}] or [{first}, {frame[0]}, {frame[1]}]{what}"
        raise ValueError(
            f"`expert_load` (shape {list(load.shape)}) must be {both}: the layers and logical experts of the layout"
        )
    return load


SHARES_ROUNDING = 1e-6
"""How far the shares of an expert may sum from 1, and how far one may lie above 1.

Shares that were saved or sent as float32 sum to 1 within some 1e-7 and must pass; a sum further off than 1e-6 is not
rounding but a replica that was left out, or another scale.
"""


def check_shares(
    shares: object, layout: ExpertLayout, name: str = "shares", *, num_windows: int | None = None, sums: bool = True
) -> FloatArray:
    """Make shares `[L, P]` a new float64 array with 0 at empty slots; raise unless each is one and they sum to 1.

    Args:
        shares: Fraction of its expert's tokens for each slot; what empty slots have is not looked at.
        layout: Where the experts are.
        name: How the caller calls them, for messages.
        num_windows: Where given, `[1, L, P]` and `[num_windows, L, P]` fit as well.
        sums: Whether an expert's shares must sum to 1; not so where ranks are gone.
    """
    p2l, experts = layout.physical_to_logical_map, layout.num_experts
    array = to_reals(shares, name)
    shape, given = list(p2l.shape), list(array.shape)
    if given != shape and (num_windows is None or given not in ([1, *shape], [num_windows, *shape])):
        more = "" if num_windows is None else f" or {[num_windows, *shape]}"
        raise ValueError(f"`{name}` (shape {given}) must be {shape}{more}, a fraction for each slot")
    array = np.where(p2l >= 0, array, 0.0)
    bad = ~((array >= 0.0) & (array <= 1.0 + SHARES_ROUNDING))
    if bad.any():
        *_, layer, slot = place = tuple(np.argwhere(bad)[0].tolist())
        raise ValueError(f"`{name}` (={array[place]}) must be in [0, 1] at layer {layer}, slot {slot}")
    windows = array.size // max(1, p2l.size)
    if sums and windows:
        bins = np.maximum(p2l, 0) + np.arange(len(p2l))[:, None] * experts
        bins = bins.reshape(-1) + np.arange(windows)[:, None] * len(p2l) * experts
        total = np.bincount(bins.reshape(-1), array.reshape(-1)).reshape(-1, experts)
        off = np.abs(total - 1.0) > SHARES_ROUNDING
        if off.any():
            row, expert = np.argwhere(off)[0].tolist()
            where = f"layer {row % len(p2l)}; scale them"
            raise ValueError(f"`{name}` of expert {expert} (sum {total[row, expert]}) must sum to 1 at {where}")
    return array


def balancedness(rank_load: ArrayLike) -> FloatArray:
    """Compute mean / max over ranks for each layer, in (0, 1]; 1 is best.

    Args:
        rank_load: `[..., R]`. For ranks of unequal speed divide by the speeds first.

    Returns:
        float64 `[...]`; NaN where there is no load.

    Example:
        >>> balancedness([[100, 300], [0, 0]])
        array([0.66666667,        nan])
    """
    load = check_rank_load(rank_load)
    return mean_over_top(load.mean(axis=-1), load.max(axis=-1))


def mean_over_top(mean: FloatArray, top: FloatArray) -> FloatArray:
    """Divide, and cut at 1 what rounding leaves above it; NaN where `top` is 0: no load."""
    each: FloatArray = np.divide(mean, top, out=np.full(top.shape, np.nan), where=top > 0)
    return np.minimum(each, 1.0, out=each)


def mean_of_known(each: FloatArray) -> float:
    """Return the mean of all but NaN; NaN if there is nothing else."""
    known = ~np.isnan(each)
    return float(each[known].mean()) if known.any() else float("nan")


def mean_balancedness(rank_load: ArrayLike) -> float:
    """Average `balancedness` over layers (and windows) with load; NaN if none has any."""
    return mean_of_known(balancedness(rank_load))


def total_balancedness(rank_load: ArrayLike) -> float:
    """Divide the sum of the means by the sum of the maxima: each layer and window weighs by its time. NaN without load.

    With one device per rank and one layer after another, it is the fraction of time that the average rank works.
    """
    load = check_rank_load(rank_load)
    return float(mean_over_top(load.mean(axis=-1).sum(), load.max(axis=-1).sum()))


def check_rank_load(value: ArrayLike) -> FloatArray:
    """Convert `[..., R]` to float64; raise unless it is finite, not negative and has a rank."""
    load = to_reals(value, "rank_load")
    if load.ndim == 0 or load.shape[-1] == 0:
        raise ValueError(f"`rank_load` (shape {list(load.shape)}) must be [..., R] with one rank or more")
    bad = ~((load >= 0) & (load < np.inf))
    if bad.any():
        place = np.argwhere(bad)[0]
        raise ValueError(f"`rank_load` (={load[tuple(place)]}) must be finite and not negative at {place.tolist()}")
    most = float(load.max(initial=0.0))
    if not most * load.size < np.inf:
        raise ValueError(f"`rank_load` (up to {most:g}) is too large to be added up in float64; scale it down")
    return load


def transfers(old: ExpertLayout, new: ExpertLayout) -> IntArray:
    """Count the experts that each rank must receive to go from `old` to `new`.

    An expert that a rank holds in `new` and not in `old` counts once, however many of the rank's slots it fills; an
    expert that a rank already holds is copied within the rank.

    Args:
        old: Layout that the weights are in.
        new: Layout to reach; same L, P, E and topology.

    Returns:
        int64 `[L, R]`.

    Raises:
        ValueError: The layouts differ in shape, experts or topology.

    Cost:
        O(L * (P + R * E)) bytes of scratch; any thread.

    Example:
        >>> from eplb_core import Topology
        >>> two = Topology(num_ranks=2)
        >>> old = ExpertLayout([[0, 1, 2, 3, 1, 2]], num_experts=4, topology=two)
        >>> new = ExpertLayout([[0, 1, 2, 3, 0, 0]], num_experts=4, topology=two)
        >>> transfers(old, new)
        array([[0, 1]])
    """
    check_kind(old, "old", ExpertLayout).check_same_frame(check_kind(new, "new", ExpertLayout))
    received = _holds(new) & ~_holds(old)
    count: IntArray = received.sum(axis=2, dtype=np.int64)
    return count


def _holds(layout: ExpertLayout) -> BoolArray:
    """Say whether each rank holds each expert, bool `[L, R, E]`."""
    layers, ranks = layout.num_layers, layout.topology.num_ranks
    holds = np.zeros((layers, ranks, layout.num_experts + 1), dtype=np.bool_)
    by_rank = layout.physical_to_logical_map.reshape(layers, ranks, layout.slots_per_rank)
    np.put_along_axis(holds, by_rank, True, axis=2)
    return holds[:, :, :-1]  # index -1 (empty slots) went to the last column


def pairs_on_a_rank(layout: ExpertLayout) -> list[tuple[int, int, int]]:
    """List layer, rank and expert wherever a rank holds an expert more than once, by layer, rank and expert."""
    shape = (layout.num_layers, layout.topology.num_ranks, layout.slots_per_rank)
    by_rank = np.sort(layout.physical_to_logical_map.reshape(shape), axis=2)
    again = (by_rank[:, :, 1:] == by_rank[:, :, :-1]) & (by_rank[:, :, 1:] >= 0)
    layer, rank, at = np.nonzero(again)
    return list(dict.fromkeys(zip(layer.tolist(), rank.tolist(), by_rank[layer, rank, at].tolist(), strict=True)))
