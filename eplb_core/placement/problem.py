"""Checked arguments of `place`: the problem that a layout must solve, and what transfers may cost."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from eplb_core._arrays import (
    ArrayLike,
    BoolArray,
    FloatArray,
    IntArray,
    check_int,
    check_kind,
    check_word,
    to_ids,
    to_numpy,
    to_reals,
)
from eplb_core.errors import InfeasiblePlacementError
from eplb_core.layout import MAX_SLOTS, ExpertLayout, rank_capacity, rank_slots
from eplb_core.placement.search.links import NO_LIMIT, Links, new_links
from eplb_core.topology import Topology

PlacementDispatch: TypeAlias = Literal["even", "weighted"]
"""How replicas will share their expert's tokens: equally, or by shares that are solved for each window."""
Locality: TypeAlias = Literal["none", "group", "first_copy"]
"""Where the replicas of an expert may be: anywhere, all in its group's node, or one of them there."""

_PIN = {"none": 0, "first_copy": 1, "group": 2}


class Problem(NamedTuple):
    """What a layout must satisfy, checked."""

    topology: Topology
    num_experts: int
    capacity: IntArray
    """Slots that each rank may fill `[R]`; 0 = not active, or active without a slot."""
    stride: int
    """Slots of each rank S, filled or not."""
    pin: int
    """0 = experts may be anywhere, 1 = one replica in the node of its group, 2 = all of them."""
    num_groups: int
    """Groups of consecutive experts; 1 where `pin` is 0."""
    weighted: bool
    reach: float
    """Part of the active ranks' speed that ranks with slots have: 1, but where there are fewer slots than ranks."""


class Terms(NamedTuple):
    """What transfers cost and may cost."""

    price: float
    """Gain in balancedness that a transfer of cost 1 must bring."""
    budget: int
    """Most transfers of a layer."""
    min_gain: float
    links: Links

    @property
    def limited(self) -> bool:
        """Whether links have limits."""
        return self.links.rank_limit.size > 0


def state_problem(
    experts: int,
    topology: Topology,
    capacity: IntArray,
    stride: int,
    locality: Locality,
    num_groups: int | None,
    active_ranks: ArrayLike | None,
    dispatch: PlacementDispatch,
) -> Problem:
    """What every layer must satisfy whose ranks have `capacity` slots."""
    slots = int(capacity.sum())
    active = check_active(active_ranks, topology.num_ranks)
    capacity = capacity * active
    live = int(capacity.sum())
    if live < experts:
        raise InfeasiblePlacementError(
            f"{int((capacity > 0).sum())} active ranks have {live} slots, fewer than the {experts} experts; "
            f"raise the number of slots (={slots}), or bring ranks back",
            num_live_slots=live,
            num_experts=experts,
        )
    pin = _PIN[check_word(locality, "locality", _PIN)]
    weighted = check_dispatch(dispatch)
    if weighted and pin:
        raise ValueError(f'`dispatch` (={dispatch!r}) needs `locality="none"`, not {locality!r}')
    groups = check_groups(num_groups, experts, capacity, topology, locality) if pin else 1
    speed: list[float] = topology.rank_speed.tolist()
    filled, whole = (sum(s for s, some in zip(speed, ranks, strict=True) if some) for ranks in (capacity, active))
    return Problem(topology, experts, capacity, stride, pin, groups, weighted, filled / whole)


def check_active(active_ranks: ArrayLike | None, ranks: int) -> BoolArray:
    """Bools `[R]`; all where none are given."""
    if active_ranks is None:
        return np.ones(ranks, dtype=np.bool_)
    active = np.array(to_numpy(active_ranks, "active_ranks"))
    if active.dtype != np.bool_ or active.shape != (ranks,):
        raise ValueError(
            f"`active_ranks` (dtype {active.dtype}, shape {list(active.shape)}) must be bools [{ranks}], one per rank"
        )
    return active


def check_dispatch(dispatch: PlacementDispatch) -> bool:
    """Whether shares are solved anew in each window, and not equal."""
    check_word(dispatch, "dispatch", ("even", "weighted"))
    return dispatch == "weighted"


def check_groups(num_groups: int | None, experts: int, capacity: IntArray, topology: Topology, locality: str) -> int:
    """Groups that fit: of equal size, and whole ones into the nodes' slots."""
    if num_groups is None:
        raise ValueError(f'`locality` (="{locality}") needs `num_groups`, the number of groups of consecutive experts')
    groups = check_int(num_groups, "num_groups", 1)
    if experts % groups:
        raise ValueError(f"`num_groups` (={groups}) must divide the {experts} experts")
    room = np.zeros(topology.num_nodes, dtype=np.int64)
    np.add.at(room, topology.rank_to_node, capacity)
    fit = room // (experts // groups)
    if fit.sum() < groups:
        raise ValueError(
            f"`num_groups` (={groups}) groups of {experts // groups} experts do not fit: the nodes' slots "
            f"{room.tolist()} take {fit.tolist()} whole groups; give ranks more slots, or use another `locality`"
        )
    return groups


def check_slots(
    num_slots: int | ArrayLike | None, slots_per_rank: ArrayLike | None, layers: int, experts: int, ranks: int
) -> list[tuple[BoolArray, IntArray]]:
    """Layers `[L]` whose ranks have as many slots, and how many each rank has `[R]`; one entry without a layer."""
    slots = to_numpy(0 if num_slots is None else num_slots, "num_slots")
    if num_slots is None or slots_per_rank is not None or slots.ndim == 0:
        one = None if num_slots is None else slots.flat[0].item() if slots.size else 0
        return [(np.ones(layers, dtype=np.bool_), rank_slots(one, slots_per_rank, experts, ranks))]
    if slots.shape != (layers,) or slots.dtype.kind not in "iu":
        raise ValueError(
            f"`num_slots` (dtype {slots.dtype}, shape {list(slots.shape)}) must be an int or ints [{layers}]"
        )
    slots = slots.astype(np.int64)
    if layers and slots.min() < experts:
        layer = int(np.argmin(slots))
        raise ValueError(f"`num_slots` (={slots[layer]}) must be at least the {experts} experts at layer {layer}")
    if layers and slots.max() > MAX_SLOTS:
        layer = int(np.argmax(slots))
        raise ValueError(f"`num_slots` (={slots[layer]}) must be at most {MAX_SLOTS} at layer {layer}")
    # Without a layer there is a frame all the same: as many slots as the experts need.
    numbers = np.unique(slots).tolist() or [experts]
    return [(slots == number, rank_capacity(number, ranks)) for number in numbers]


def fewer_slots(capacity: IntArray, experts: int) -> list[IntArray]:
    """Slots of each rank `[R]` for each number of them from E on: one more at a time, to the rank with the fewest."""
    level, each = np.zeros_like(capacity), []
    for used in range(1, int(capacity.sum())):
        level[np.argmin(np.where(level < capacity, level, MAX_SLOTS + 1))] += 1
        if used >= experts:
            each.append(level.copy())
    return each


def slots_by_speed(problem: Problem) -> IntArray:
    """As many slots as there are experts, for each rank by its speed as far as it has them `[R]`."""
    level, pace = np.zeros_like(problem.capacity), 1.0 / problem.topology.rank_speed
    for _ in range(problem.num_experts):
        level[np.argmin(np.where(level < problem.capacity, (level + 1) * pace, np.inf))] += 1
    return level


def check_weights(window_weights: ArrayLike | None, count: int) -> FloatArray:
    """Weights `[T]`, times a power of two: the largest is near 1."""
    if window_weights is None:
        return np.ones(count)
    weights = np.array(to_reals(window_weights, "window_weights"))
    if weights.shape != (count,):
        raise ValueError(f"`window_weights` (shape {list(weights.shape)}) must be [{count}], one per window")
    good = (weights >= 0) & (weights < np.inf)
    if not good.all():
        window = int(np.argmin(good))
        raise ValueError(f"`window_weights` (={weights[window]}) must be finite and not negative at window {window}")
    if count == 1 and weights[0] > 0.0:
        weights[0] = 1.0  # the weight of the only window says nothing, and the bound is in the window's unit
    np.ldexp(weights, 1 - np.frexp(weights.max())[1], out=weights)
    return weights


def check_links(
    topology: Topology,
    transfer_cost: ArrayLike | None,
    max_rank_transfers: ArrayLike | None,
    max_node_transfers: ArrayLike | None,
) -> Links:
    """Costs and limits; without any limit none are kept."""
    ranks, nodes = topology.num_ranks, topology.num_nodes
    cost = _check_cost(transfer_cost, ranks)
    none = np.zeros((0, 0), dtype=np.int64)
    if max_rank_transfers is None and max_node_transfers is None:
        return new_links(cost, topology.rank_to_node, none, none)
    between_ranks = _check_limit(max_rank_transfers, "max_rank_transfers", "rank", ranks)
    between_nodes = _check_limit(max_node_transfers, "max_node_transfers", "node", nodes)
    if min(between_ranks.min(), between_nodes.min()) >= NO_LIMIT:
        between_ranks = between_nodes = none
    return new_links(cost, topology.rank_to_node, between_ranks, between_nodes)


def _check_limit(value: ArrayLike | None, name: str, word: str, size: int) -> IntArray:
    """Limits `[size, size]`."""
    if value is None:
        return np.full((size, size), NO_LIMIT)
    limit = to_ids(value, name)
    if limit.shape != (size, size):
        raise ValueError(f"`{name}` (shape {list(limit.shape)}) must be [{size}, {size}], from {word} to {word}")
    if limit.size and limit.min() < -1:
        source, to = (int(i) for i in np.argwhere(limit < -1)[0])
        raise ValueError(
            f"`{name}` (={limit[source, to]}) must be 0 or more, or -1 for no limit, from {word} {source} to {word} "
            f"{to}"
        )
    return np.where(limit < 0, NO_LIMIT, np.minimum(limit, NO_LIMIT))


def _check_cost(transfer_cost: ArrayLike | None, ranks: int) -> FloatArray:
    """Costs `[R, R]`."""
    if transfer_cost is None:
        return np.ones((ranks, ranks))
    cost = np.array(to_reals(transfer_cost, "transfer_cost"), order="C")  # kernels are compiled for one order
    if cost.shape != (ranks, ranks):
        raise ValueError(f"`transfer_cost` (shape {list(cost.shape)}) must be [{ranks}, {ranks}], from rank to rank")
    good = (cost >= 0) & (cost <= 1e9)
    if not good.all():
        source, to = (int(i) for i in np.argwhere(~good)[0])
        raise ValueError(f"`transfer_cost` (={cost[source, to]}) must be in [0, 1e9] from rank {source} to rank {to}")
    return cost


def check_current(current: ExpertLayout, problem: Problem, layers: int) -> None:
    """Raise unless `current` has the frame of what is placed."""
    check_kind(current, "current", ExpertLayout)
    ranks = problem.topology.num_ranks
    for word, mine, theirs, mend in (
        ("layers", layers, current.num_layers, "it is of another model: leave it out"),
        ("experts", problem.num_experts, current.num_experts, "it is of another model: leave it out"),
        ("ranks", ranks, current.topology.num_ranks, "bring it to the new ranks by `resized`, or leave it out"),
        ("slots", ranks * problem.stride, current.num_slots, "pad each rank with -1, or leave it out"),
    ):
        if mine != theirs:
            raise ValueError(f"`current` has {theirs} {word}, the placement {mine}; {mend}")
