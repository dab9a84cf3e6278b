"""How even a layout makes the load, and what it costs to get there."""

from __future__ import annotations

import numpy as np

from eplb_core._arrays import ArrayLike, BoolArray, FloatArray, IntArray, check_kind, check_load, to_reals
from eplb_core.layout import ExpertLayout


def rank_load(layout: ExpertLayout, expert_load: ArrayLike, *, shares: ArrayLike | None = None) -> FloatArray:
    """How many tokens does each rank compute?

    Args:
        layout: Where the experts are.
        expert_load: Tokens routed to each logical expert, `[L, E]`, or windows of it, `[T, L, E]`.
        shares: Fraction of its expert's tokens that each slot takes, floats `[L, P]` or `[T, L, P]`; an expert's
            shares sum to 1. Default: replicas share equally.

    Returns:
        float64 `[L, R]` or `[T, L, R]`.

    Raises:
        ValueError: A shape does not fit the layout, or a load is NaN, infinite or negative.

    Cost:
        O(T * L * P). Any thread.

    Example:
        >>> from eplb_core import Topology
        >>> layout = ExpertLayout([[0, 1, 2, 0]], num_experts=3, topology=Topology(num_ranks=2))
        >>> rank_load(layout, [[8, 1, 5]])
        array([[5., 9.]])
    """
    check_kind(layout, "layout", ExpertLayout)
    load = check_load(expert_load, "expert_load", (2, 3))
    layers, experts, slots = layout.num_layers, layout.num_experts, layout.num_slots
    if load.shape[-2:] != (layers, experts):
        raise ValueError(
            f"`expert_load` (shape {list(load.shape)}) must be [{layers}, {experts}] or [T, {layers}, {experts}], "
            "the layout's layers and logical experts"
        )
    p2l = layout.physical_to_logical_map
    if shares is None:
        fraction = even_shares(layout)
    else:
        fraction = to_reals(shares, "shares")
        windows = ((), load.shape[:-2], (1,)[: load.ndim - 2])
        if fraction.shape[-2:] != (layers, slots) or fraction.shape[:-2] not in windows:
            raise ValueError(
                f"`shares` (shape {list(fraction.shape)}) must be [{layers}, {slots}], a fraction a slot, or that for "
                "each window of `expert_load`"
            )
        fraction = np.where(p2l >= 0, fraction, 0.0)
        if not (np.abs(fraction) <= 1e9).all():
            raise ValueError("`shares` must be finite, a fraction a slot")
    index = np.broadcast_to(np.maximum(p2l, 0), (*load.shape[:-2], layers, slots))
    slot_load = np.take_along_axis(load, index, axis=-1) * fraction
    ranks = (layout.topology.num_ranks, layout.slots_per_rank)
    by_rank: FloatArray = slot_load.reshape(*load.shape[:-1], *ranks).sum(axis=-1)
    return by_rank


def even_shares(layout: ExpertLayout) -> FloatArray:
    """One over the number of replicas for each slot that holds an expert, else 0, float64 `[L, P]`."""
    p2l = layout.physical_to_logical_map
    return (p2l >= 0) / np.take_along_axis(layout.replica_count, np.maximum(p2l, 0), axis=1)


def balancedness(rank_load: ArrayLike) -> FloatArray:
    """How even is each layer? mean / max over ranks, in (0, 1], 1 is best.

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
    """`mean / top`, which rounding may leave a hair above 1; NaN where `top` is 0: without load."""
    each: FloatArray = np.divide(mean, top, out=np.full(top.shape, np.nan), where=top > 0)
    return np.minimum(each, 1.0, out=each)


def mean_of_known(each: FloatArray) -> float:
    """Mean of what is known; NaN if nothing is."""
    known = ~np.isnan(each)
    return float(each[known].mean()) if known.any() else float("nan")


def mean_balancedness(rank_load: ArrayLike) -> float:
    """Mean over layers (and windows) of `balancedness`; those without load count in no average. NaN if none has any."""
    return mean_of_known(balancedness(rank_load))


def total_balancedness(rank_load: ArrayLike) -> float:
    """Sum of the means over the sum of the maxima: weighs each layer and window by its time. NaN without load.

    With one device per rank and layers in turn, this is the fraction of time that the average rank works.
    """
    load = check_rank_load(rank_load)
    return float(mean_over_top(load.mean(axis=-1).sum(), load.max(axis=-1).sum()))


def check_rank_load(value: ArrayLike) -> FloatArray:
    """`[..., R]` as float64, finite and not negative, one rank or more."""
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
    """How many experts must each rank receive to go from `old` to `new`?

    An expert that a rank holds in `new` and did not hold in `old` crosses the wire once, however many of the rank's
    slots it fills; what a rank already holds is copied inside it.

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
    """Does the rank hold the expert? bool `[L, R, E]`."""
    layers, ranks = layout.num_layers, layout.topology.num_ranks
    holds = np.zeros((layers, ranks, layout.num_experts + 1), dtype=np.bool_)
    by_rank = layout.physical_to_logical_map.reshape(layers, ranks, layout.slots_per_rank)
    np.put_along_axis(holds, by_rank, True, axis=2)
    return holds[:, :, :-1]  # index -1 (empty slots) went to the last column
