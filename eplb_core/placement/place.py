"""`place`: from a load to a layout, with a proof of how good it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from eplb_core._arrays import (
    ArrayLike,
    BoolArray,
    FloatArray,
    IntArray,
    check_int,
    check_load,
    check_real,
    read_only,
    to_numpy,
)
from eplb_core.errors import InfeasiblePlacementError
from eplb_core.layout import ExpertLayout, check_num_slots, count_replicas, rank_capacity
from eplb_core.placement._kernels import Scratch, new_scratch
from eplb_core.placement._mend import drop_surplus, restore_lost
from eplb_core.placement._relabel import keep_in_place, least_transfers, settle
from eplb_core.placement._score import bound_layers, cost_of_transfers, score_layers
from eplb_core.placement._search import improve_layers, score_weighted
from eplb_core.placement._solve import solve_layers
from eplb_core.topology import Topology

# Steps of a layer that is placed from nothing for several windows, at effort 1.
_FREE_STEPS = 128
# Fullest ranks whose steps are compared where several windows are seen: a better use of each transfer, in more time.
_WIDTH = 3
# Gain in balancedness that a transfer must bring; with a budget, which says what may be spent, less.
_PRICE, _PRICE_IN_BUDGET = 0.001, 0.0001
# A row never changes for less: rounding is no gain.
_SOME_GAIN = 1e-9
_PIN = {"none": 0, "first_copy": 1, "group": 2}


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """A layout and what is known of it. Arrays are read-only."""

    layout: ExpertLayout
    """Where the experts go."""
    balancedness: FloatArray
    """Predicted, float64 `[L]`, mean over the windows with load; NaN for a layer without any. Of a window it is
    (total load / total speed) / (largest load / speed of a rank) over the active ranks: mean / max for equal speeds."""
    bound: FloatArray
    """Proven upper limit of `balancedness` over all layouts of this kind, float64 `[L]`; NaN without load."""
    transfers: IntArray
    """Experts that ranks receive to come from `current`, int64 `[L]`; 0 where there is no current layout."""
    dispatch: str = "even"
    """How replicas share their expert's tokens in what is predicted: "even" or "weighted"."""

    def __repr__(self) -> str:
        known = ~np.isnan(self.balancedness)
        mean, bound = (x[known].mean() if known.any() else np.nan for x in (self.balancedness, self.bound))
        return (
            f"Placement({self.layout!r}, balancedness={mean:.4f}, bound={bound:.4f}, transfers={self.transfers.sum()})"
        )


def place(
    expert_load: ArrayLike,
    topology: Topology,
    *,
    num_slots: int | ArrayLike,
    current: ExpertLayout | None = None,
    max_transfers: int | None = None,
    min_gain: float = 0.01,
    transfer_price: float | None = None,
    transfer_cost: ArrayLike | None = None,
    window_weights: ArrayLike | None = None,
    locality: str = "none",
    num_groups: int | None = None,
    active_ranks: ArrayLike | None = None,
    dispatch: str = "even",
    effort: float = 1.0,
) -> Placement:
    """Which expert goes into which slot, so that the ranks' loads are even?

    Hot experts get the redundant slots, no rank holds an expert twice unless counting forces it, and every layer comes
    with a proven bound. Equal inputs give equal bytes, on any machine and any number of threads.

    Args:
        expert_load: Tokens routed to each expert, `[L, E]`, or windows of it, `[T, L, E]`: numpy, lists or torch (a
            CUDA tensor costs one copy). Finite, not negative. Windows are balanced one by one, not for their sum.
        topology: Ranks, nodes and speeds.
        num_slots: Slots to fill, at least E, or ints `[L]`, one for each layer (see `plan_slots`). S is the largest of
            ceil(num_slots / R); where a layer fills fewer, or R does not divide, ranks end with empty slots.
        current: Layout to start from, `R * S` slots on as many ranks. The search goes on from it a transfer at a time,
            as long as that pays; a layer that would gain less than `min_gain` keeps its row; what stays on a rank
            stays in its slot.
        max_transfers: Most experts that ranks may receive on one layer, as cost where `transfer_cost` is given. Experts
            that have lost their last slot with a rank come first, all of them. A row that cannot stay (ranks that hold
            more experts than they have slots; with "group" and "first_copy" also an expert lost or groups torn apart)
            is solved anew and may take more.
        min_gain: Least rise of the predicted balancedness for which a layer of `current` changes, 0 or more.
        transfer_price: Gain in predicted balancedness that each transfer must bring, 0 or more. Default 0.001, or
            0.0001 where `max_transfers` says what may be spent.
        transfer_cost: Floats `[R, R]`, not negative: relative cost of a transfer from rank to rank, which multiplies
            the price. Default 1.
        window_weights: Weight of each window, floats `[T]`, not negative. Default: all equal.
        locality: "none": any expert anywhere. "group": all replicas of a group of experts in one node, as DeepSeek's
            hierarchical placement. "first_copy": one replica of each expert in its group's node, the others anywhere.
        num_groups: Groups of E / num_groups consecutive experts. Needed for "group" and "first_copy".
        active_ranks: Bools `[R]`; slots of the other ranks become -1. Default: all.
        dispatch: How replicas will share their expert's tokens. "even": equally. "weighted": as balances the ranks best
            in each window, by shares that are solved again and again (`replica_shares`, or `DispatchTables` in the
            modes "weighted" and "quota"); replicas that link full ranks with light ones then count for more than even
            halves. Not with "group" and "first_copy".
        effort: More time for a better answer, never a worse one: multiplies the work that the search may do, and
            divides the distance from the bound at which it stops. 1 stops at 0.001. At most 10,000.

    Returns:
        The layout, its predicted balancedness and the bound of each layer, and the transfers from `current`. A layer
        without load keeps its row of `current`, or gets the trivial one, with no transfer and NaN as balancedness.

    Raises:
        ValueError: A bad load (the text names window, layer and expert), shape or option; groups that do not fit.
        InfeasiblePlacementError: The active ranks have fewer slots than there are experts.

    Cost:
        About 1 ms for 58 layers of 256 experts on 32 ranks with 9 slots, on one core, with the interpreter lock
        released; memory O(T * L * E + L * P). The first call in a process loads compiled kernels from the disk cache,
        the first after an installation compiles them (see `warm_up`).

    Threads:
        Any; no global state.

    Example:
        >>> two_nodes = Topology(num_ranks=4, num_nodes=2)
        >>> print(place([[90, 20, 30, 40, 50, 60, 70, 80]], two_nodes, num_slots=12).layout)
        layer 0: 0 6 2 | 4 7 1 | 0 6 5 | 7 3 5

    Source:
        docs/placement.md: the algorithm, the proof of the bound, and where its parts come from.
    """
    windows = check_load(expert_load, "expert_load", (2, 3))
    if windows.ndim == 2:
        windows = windows[None]
    if windows.shape[0] == 0 or windows.shape[2] == 0:
        raise ValueError(f"`expert_load` (shape {list(windows.shape)}) must have one window and one expert or more")
    effort = check_real(effort, "effort", above=0.0, at_most=10_000.0)
    layers = windows.shape[1]
    slots = _check_slots(num_slots, layers, windows.shape[2])
    if not isinstance(topology, Topology):
        raise TypeError(f"`topology` (={topology!r}) must be a Topology")
    stride = -(-int(slots.max(initial=1)) // topology.num_ranks)
    default = _PRICE if max_transfers is None else _PRICE_IN_BUDGET
    price = _Price(
        default if transfer_price is None else check_real(transfer_price, "transfer_price", at_least=0.0, at_most=1e9),
        _check_cost(transfer_cost, topology.num_ranks),
        np.inf if max_transfers is None else float(check_int(max_transfers, "max_transfers", 0)),
        check_real(min_gain, "min_gain", at_least=0.0),
    )
    weights = _check_weights(window_weights, len(windows))
    p2l = np.full((layers, topology.num_ranks * stride), -1, dtype=np.int64)
    reached, bound, transfers = np.zeros(layers), np.zeros(layers), np.zeros(layers, dtype=np.int64)
    for count in np.unique(slots).tolist() or [windows.shape[2]]:
        problem = _state_problem(windows, topology, count, stride, locality, num_groups, active_ranks, dispatch)
        if current is not None:
            _check_current(current, problem, layers)
        rows = np.flatnonzero(slots == count)
        part = windows if len(rows) == layers else read_only(np.take(windows, rows, axis=1))
        was = None if current is None else current.physical_to_logical_map[rows]
        p2l[rows], reached[rows], bound[rows], transfers[rows] = _place(problem, part, weights, was, price, effort)
    layout = ExpertLayout._of_valid(p2l, windows.shape[2], topology)
    return Placement(layout, read_only(reached), read_only(bound), read_only(transfers), dispatch)


def _place(
    problem: _Problem,
    windows: FloatArray,
    weights: FloatArray,
    was: IntArray | None,
    price: _Price,
    effort: float,
) -> tuple[IntArray, FloatArray, FloatArray, IntArray]:
    """Map, balancedness, bound and transfers of layers that have equally many slots."""
    load = _add_windows(windows, weights)
    has_load = load.max(axis=1, initial=0.0) > 0.0
    # What is searched further starts from one place, so that more effort goes on where less has ended.
    further = problem.pin == 0 and (len(windows) > 1 or problem.weighted)
    solution = _solve(problem, load, ~has_load, 1.0 if further else effort)
    if was is None:
        if further:
            _balance_windows(problem, windows, weights, solution, ~has_load, effort)
        reached = _score(problem, windows, weights, solution.p2l)
        transfers = np.zeros(windows.shape[1], dtype=np.int64)
    else:
        reached, transfers = _start_from(was, problem, windows, weights, load, solution, price)
    return solution.p2l, reached, _bound(problem, windows, weights, solution), transfers


def _check_slots(num_slots: int | ArrayLike, layers: int, experts: int) -> IntArray:
    """Slots of each layer `[L]`."""
    if isinstance(num_slots, int | np.integer):
        return np.full(layers, check_num_slots(int(num_slots), experts), dtype=np.int64)
    slots = to_numpy(num_slots)
    if slots.ndim == 0:
        return np.full(layers, check_num_slots(slots.item(), experts), dtype=np.int64)
    if slots.shape != (layers,) or slots.dtype.kind not in "iu":
        raise ValueError(
            f"`num_slots` (dtype {slots.dtype}, shape {list(slots.shape)}) must be an int or ints [{layers}]"
        )
    slots = slots.astype(np.int64)
    if layers and slots.min() < experts:
        layer = int(np.argmin(slots))
        raise ValueError(f"`num_slots` (={slots[layer]}) must be at least the {experts} experts at layer {layer}")
    return slots


class _Price(NamedTuple):
    """What transfers cost and may cost."""

    each: float
    link: FloatArray
    budget: float
    min_gain: float


class _Problem(NamedTuple):
    """What a layout must satisfy, checked."""

    topology: Topology
    num_experts: int
    capacity: IntArray
    """Slots to fill of each rank `[R]`; 0 = not active."""
    stride: int
    """Slots of each rank S, filled or not."""
    pin: int
    num_groups: int
    weighted: bool


class _Solution(NamedTuple):
    p2l: IntArray
    """`[L, P]`."""
    limit: FloatArray
    """Lower limit of the largest load / speed, for the windows added up `[L]`."""
    scratch: Scratch


def _state_problem(
    windows: FloatArray,
    topology: Topology,
    slots: int,
    stride: int,
    locality: str,
    num_groups: int | None,
    active_ranks: ArrayLike | None,
    dispatch: str,
) -> _Problem:
    experts = windows.shape[2]
    capacity = rank_capacity(slots, topology.num_ranks)
    if active_ranks is not None:
        active = to_numpy(active_ranks)
        if active.dtype != np.bool_ or active.shape != (topology.num_ranks,):
            raise ValueError(
                f"`active_ranks` (dtype {active.dtype}, shape {list(active.shape)}) must be "
                f"bools [{topology.num_ranks}]"
            )
        capacity = capacity * active
    live = int(capacity.sum())
    if live < experts:
        raise InfeasiblePlacementError(
            f"{int((capacity > 0).sum())} active ranks have {live} slots, fewer than the {experts} experts; "
            f"raise `num_slots` (={slots}), or bring ranks back",
            num_live_slots=live,
            num_experts=experts,
        )
    if locality not in _PIN:
        raise ValueError(f"`locality` (={locality!r}) must be one of {', '.join(map(repr, _PIN))}")
    pin = _PIN[locality]
    if dispatch not in ("even", "weighted"):
        raise ValueError(f"`dispatch` (={dispatch!r}) must be 'even' or 'weighted'")
    if dispatch == "weighted" and pin:
        raise ValueError(f'`dispatch` (={dispatch!r}) needs `locality="none"`, not {locality!r}')
    groups = 1
    if pin:
        groups = check_groups(num_groups, experts, capacity, topology, locality)
    return _Problem(topology, experts, capacity, stride, pin, groups, dispatch == "weighted")


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
            f"{room.tolist()} take {fit.tolist()} whole groups; raise `num_slots`, or use another `locality`"
        )
    return groups


def _check_weights(window_weights: ArrayLike | None, count: int) -> FloatArray:
    """Weights `[T]`."""
    if window_weights is None:
        return np.ones(count)
    weights = np.array(to_numpy(window_weights), dtype=np.float64)
    if weights.shape != (count,):
        raise ValueError(f"`window_weights` (shape {list(weights.shape)}) must be [{count}], one a window")
    good = (weights >= 0) & (weights < np.inf)
    if not good.all():
        window = int(np.argmin(good))
        raise ValueError(f"`window_weights` (={weights[window]}) must be finite and not negative at window {window}")
    if count == 1 and weights[0] > 0.0:
        weights[0] = 1.0  # the weight of the only window says nothing, and the bound is in the window's unit
    return weights


def _check_cost(transfer_cost: ArrayLike | None, ranks: int) -> FloatArray:
    """Costs `[R, R]`."""
    if transfer_cost is None:
        return np.ones((ranks, ranks))
    cost = np.array(to_numpy(transfer_cost), dtype=np.float64)
    if cost.shape != (ranks, ranks):
        raise ValueError(f"`transfer_cost` (shape {list(cost.shape)}) must be [{ranks}, {ranks}], from rank to rank")
    good = (cost >= 0) & (cost <= 1e9)
    if not good.all():
        source, to = (int(i) for i in np.argwhere(~good)[0])
        raise ValueError(f"`transfer_cost` (={cost[source, to]}) must be in [0, 1e9] from rank {source} to rank {to}")
    return cost


def _add_windows(windows: FloatArray, weights: FloatArray) -> FloatArray:
    """Load of all windows `[L, E]`, added in order of time."""
    most = float(windows.max(initial=0.0))
    # Not even a rank that held every expert may overflow.
    if not most * windows.shape[2] * max(1.0, len(windows) * float(weights.max())) < np.inf:
        raise ValueError(f"`expert_load` (up to {most:g}) is too large to be added up in float64; scale it down")
    load: FloatArray = windows[0] * weights[0]
    for window in range(1, len(windows)):
        load += windows[window] * weights[window]
    return load


def _solve(problem: _Problem, load: FloatArray, skip: BoolArray, effort: float) -> _Solution:
    """Place every layer with load from nothing; the others get the trivial spread."""
    layers, experts = load.shape
    ranks = problem.topology.num_ranks
    scratch = new_scratch(experts, ranks, problem.stride)
    p2l = np.full((layers, ranks * problem.stride), -1, dtype=np.int64)
    limit = np.zeros(layers)
    if skip.any():
        if problem.pin:
            # The trivial spread knows no groups: place these layers as if all experts were equally loaded.
            load = np.where(skip[:, None], 1.0, load)
            skip = np.zeros(layers, dtype=np.bool_)
        else:
            open_slots = (np.arange(problem.stride) < problem.capacity[:, None]).reshape(-1)
            p2l[np.ix_(skip, open_slots)] = np.arange(open_slots.sum()) % experts
    topology = problem.topology
    solve_layers(
        load,
        skip,
        problem.capacity,
        topology.rank_speed,
        topology.rank_to_node,
        problem.num_groups,
        problem.pin,
        effort,
        scratch,
        p2l,
        limit,
    )
    return _Solution(p2l, limit, scratch)


def _check_current(current: ExpertLayout, problem: _Problem, layers: int) -> None:
    if not isinstance(current, ExpertLayout):
        raise TypeError(f"`current` (={type(current).__name__}) must be an ExpertLayout")
    want = (layers, problem.num_experts, problem.topology.num_ranks * problem.stride, problem.topology.num_ranks)
    have = (current.num_layers, current.num_experts, current.num_slots, current.topology.num_ranks)
    for word, mine, theirs in zip(("layers", "experts", "slots", "ranks"), want, have, strict=True):
        if mine != theirs:
            raise ValueError(
                f"`current` has {theirs} {word}, the placement {mine}; bring the layout to the new ranks and slots "
                "by `resized`, or leave `current` out"
            )


def _balance_windows(
    problem: _Problem,
    windows: FloatArray,
    weights: FloatArray,
    solution: _Solution,
    skip: BoolArray,
    effort: float,
) -> None:
    """Go on from a placement of the sum until each window is balanced; nothing is in place, so all is free."""
    ranks = problem.topology.num_ranks
    spent = np.zeros(windows.shape[1])
    improve_layers(
        windows,
        weights,
        solution.p2l.copy(),
        skip,
        problem.capacity,
        1.0 / problem.topology.rank_speed,
        np.zeros((ranks, ranks)),
        0.0,
        np.full(windows.shape[1], np.inf),
        max(1, int(_FREE_STEPS * effort)),
        1,
        problem.weighted,
        solution.p2l,
        spent,
    )


def _start_from(
    was: IntArray,
    problem: _Problem,
    windows: FloatArray,
    weights: FloatArray,
    load: FloatArray,
    solution: _Solution,
    price: _Price,
) -> tuple[FloatArray, IntArray]:
    """Choose each layer's row: the present one, a few transfers from it, or the new solution.

    The new solution stands in `solution.p2l`, where the rows chosen replace it.

    Returns:
        Balancedness of the rows chosen, NaN without load, and their transfers.
    """
    ranks = problem.topology.num_ranks
    present = was.copy()
    by_rank = present.reshape(len(was), ranks, problem.stride)
    by_rank[:, problem.capacity == 0] = -1
    if problem.pin == 0:
        drop_surplus(load, problem.capacity, present)
    fits = ((by_rank >= 0).sum(axis=2) <= problem.capacity).all(axis=1)
    if problem.pin:
        fits &= _keeps_groups(present, problem)
    stays = fits & (count_replicas(present, problem.num_experts) > 0).all(axis=1)

    near = solution.p2l.copy()
    near[stays if problem.pin else fits] = present[stays if problem.pin else fits]
    if problem.pin == 0:
        _search_from(was, near, ~fits | (load.max(axis=1, initial=0.0) <= 0.0), problem, windows, weights, load, price)
    before = np.where(stays, _score(problem, windows, weights, present), np.nan)
    changed = (near != present).any(axis=1)
    balance = before.copy()
    balance[changed] = _score(problem, read_only(np.compress(changed, windows, axis=1)), weights, near[changed])
    cost, received = _transfers(was, near, price, problem)

    # A row that fits nowhere near is taken from the solution, and others where that pays although more has to move.
    anew = ~stays if problem.pin else ~fits
    new = _score(problem, windows, weights, solution.p2l)
    fewest = np.zeros(len(was), dtype=np.int64)
    maybe = ~anew & (new > balance)
    least_transfers(was, solution.p2l, ~maybe, ranks, problem.num_experts, fewest)
    least_cost = fewest * _cheapest_link(price.link)
    maybe &= (least_cost <= price.budget) & (new - price.each * least_cost > balance - price.each * cost)
    if (anew | maybe).any():
        rows = np.flatnonzero(anew | maybe)
        _keep_in_place(was, solution.p2l, ~(anew | maybe), problem)
        new_cost, new_received = _transfers(was[rows], solution.p2l[rows], price, problem)
        pays = new[rows] - price.each * new_cost > balance[rows] - price.each * cost[rows]
        anew[rows] |= maybe[rows] & pays & (new_cost <= price.budget)
        received[rows] = np.where(anew[rows], new_received, received[rows])
        balance = np.where(anew, new, balance)
    keep = stays & ~(balance - before >= max(price.min_gain, _SOME_GAIN))
    np.copyto(solution.p2l, near, where=~anew[:, None])
    np.copyto(solution.p2l, present, where=keep[:, None])
    return np.where(keep, before, balance), np.where(keep, 0, received)


def _search_from(
    was: IntArray,
    near: IntArray,
    skip: BoolArray,
    problem: _Problem,
    windows: FloatArray,
    weights: FloatArray,
    load: FloatArray,
    price: _Price,
) -> None:
    """Improve the rows `near` a transfer at a time, in place; what stays on a rank stays in its slot."""
    ranks, speed = problem.topology.num_ranks, problem.topology.rank_speed
    restore_lost(load, problem.capacity, near)
    needed, _ = _transfers(was, near, price, problem)
    improve_layers(
        windows,
        weights,
        was,
        skip,
        problem.capacity,
        1.0 / speed,
        price.link,
        price.each,
        np.maximum(price.budget - needed, 0.0),
        near.shape[1],
        1 if len(windows) == 1 else _WIDTH,
        problem.weighted,
        near,
        np.zeros(len(near)),
    )
    settle(was, near, ranks, problem.num_experts)


def _transfers(was: IntArray, p2l: IntArray, price: _Price, problem: _Problem) -> tuple[FloatArray, IntArray]:
    """Cost and number of each layer's transfers."""
    cost, received = np.zeros(len(was)), np.zeros(len(was), dtype=np.int64)
    cost_of_transfers(was, p2l, price.link, cost, received)
    return cost, received


def _cheapest_link(link: FloatArray) -> float:
    """Least cost of a transfer between two ranks."""
    return float(np.min(link, where=~np.eye(len(link), dtype=np.bool_), initial=np.inf)) if len(link) > 1 else 0.0


def _keeps_groups(p2l: IntArray, problem: _Problem) -> BoolArray:
    """Which rows keep the locality: all replicas of each group in one node, or one of each expert of it? `[L]`."""
    layers, nodes = len(p2l), problem.topology.num_nodes
    here: BoolArray = np.zeros((layers, nodes, problem.num_experts + 1), dtype=np.bool_)
    node = np.repeat(problem.topology.rank_to_node, problem.stride)
    here[np.arange(layers)[:, None], node[None, :], p2l] = True  # empty slots mark the column beyond the experts
    groups = here[:, :, :-1].reshape(layers, nodes, problem.num_groups, -1)
    if problem.pin == 2:
        one: BoolArray = np.all(np.sum(np.any(groups, axis=3), axis=1) == 1, axis=1)
        return one
    whole: BoolArray = np.all(np.any(np.all(groups, axis=3), axis=1), axis=1)
    return whole


def _keep_in_place(was: IntArray, p2l: IntArray, skip: BoolArray, problem: _Problem) -> None:
    topology = problem.topology
    transfers = np.zeros(len(was), dtype=np.int64)
    across = problem.pin == 0
    speed, node = topology.rank_speed, topology.rank_to_node
    keep_in_place(was, p2l, skip, problem.capacity, speed, node, across, problem.num_experts, transfers)


def _score(problem: _Problem, windows: FloatArray, weights: FloatArray, p2l: IntArray) -> FloatArray:
    """Balancedness of each layer, NaN without load."""
    reached = np.zeros(len(p2l))
    speed = problem.topology.rank_speed
    if problem.weighted:
        score_weighted(windows, weights, p2l, problem.capacity, 1.0 / speed, reached)
    else:
        score_layers(windows, weights, p2l, problem.capacity, speed, reached)
    return reached


def _bound(problem: _Problem, windows: FloatArray, weights: FloatArray, solution: _Solution) -> FloatArray:
    """Upper limit of the balancedness of each layer; what the search proved holds for even shares alone."""
    bound = np.zeros(windows.shape[1])
    proved = len(windows) == 1 and not problem.weighted
    speed = problem.topology.rank_speed
    bound_layers(windows, weights, problem.capacity, speed, solution.limit, proved, solution.scratch, bound)
    return bound
