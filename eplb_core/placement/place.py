"""`place`: from a load to a layout, with a proof of how good it is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eplb_core._arrays import (
    ArrayLike,
    FloatArray,
    IntArray,
    check_int,
    check_kind,
    check_load,
    check_real,
    read_only,
)
from eplb_core._html import HTML_LAYERS, table_html
from eplb_core.frames import Columns, Table
from eplb_core.layout import ExpertLayout
from eplb_core.metrics import mean_of_known
from eplb_core.placement.affinity.near import TRAFFIC_PRICE, Near, Rows, bring_near
from eplb_core.placement.affinity.pairs import check_pairs
from eplb_core.placement.affinity.sends import bound_sends, predict_sends
from eplb_core.placement.from_current import choose_rows, start_from
from eplb_core.placement.from_nothing import solve
from eplb_core.placement.problem import (
    Locality,
    PlacementDispatch,
    Terms,
    check_current,
    check_links,
    check_slots,
    check_weights,
    state_problem,
)
from eplb_core.placement.score import score_rows
from eplb_core.placement.search.links import NO_LIMIT
from eplb_core.placement.spend import spend_budget
from eplb_core.placement.windows import Load
from eplb_core.topology import Topology

# Gain in balancedness that a transfer must bring; with a budget, which says what may be spent, less.
_PRICE, _PRICE_IN_BUDGET = 0.001, 0.0001
# What each layer may offer for a budget of all: the answers at these prices, and within these budgets of its own.
_PRICES = (0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016)
_BUDGETS = (1, 2, 4)
# Loads within 2^-600 and 2^600 leave room for sums, for weights, and for the speeds that ranks can have.
_FAR = 600


@dataclass(frozen=True, slots=True, eq=False)
class Placement(Table):
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
    dispatch: PlacementDispatch = "even"
    """How replicas share their expert's tokens in what is predicted: "even" or "weighted"."""
    senders: IntArray | None = None
    """Where links have limits: the rank that each slot's expert comes from within them, int64 `[L, P]`; -1 where the
    rank has it already, and where it must come although no link has room. Else None."""
    nodes_per_token: FloatArray | None = None
    """Where `pairs` were given: nodes that a token reaches with dispatch mode "near", its own included where that
    computes any of its experts, float64 `[L]`. Predicted as `sends_per_token` is. Else None."""
    sends_per_token: FloatArray | None = None
    """Where `pairs` were given: nodes besides its own that a token reaches so, predicted by tokens made from the pairs,
    float64 `[L]`; NaN where the pairs' diagonal does not say how many experts a token has, where tokens have not
    equally many, and on more than 8 nodes."""
    sends_bound: FloatArray | None = None
    """Proven lower limit of `sends_per_token` over all layouts of these slots, for tokens of equally many experts that
    have these pairs, float64 `[L]`; NaN without pairs, and where the diagonal says that tokens have not equally many.
    It is loose: a token's second node is not in it."""

    def _columns(self) -> Columns:
        columns = {
            "layer": np.arange(len(self.balancedness)),
            "balancedness": self.balancedness,
            "bound": self.bound,
            "transfers": self.transfers,
        }
        if self.nodes_per_token is not None and self.sends_per_token is not None and self.sends_bound is not None:
            columns["nodes_per_token"] = self.nodes_per_token
            columns["sends_per_token"] = self.sends_per_token
            columns["sends_bound"] = self.sends_bound
        return columns

    def __repr__(self) -> str:
        mean, bound = (mean_of_known(each) for each in (self.balancedness, self.bound))
        sends = "" if self.sends_per_token is None else f", sends_per_token={mean_of_known(self.sends_per_token):.3f}"
        return (
            f"Placement({self.layout!r}, balancedness={mean:.4f}, bound={bound:.4f}, "
            f"transfers={self.transfers.sum()}{sends})"
        )

    def _repr_html_(self) -> str:
        """Balance against its bound, layer by layer, and the layout."""
        balance, bound = self.balancedness, self.bound
        facts = f"<b>Placement</b> for {self.dispatch} dispatch: {int(self.transfers.sum())} transfers"
        known = int(np.isfinite(balance).sum())
        if known:
            facts += f", balancedness {mean_of_known(balance):.4f} on average, bound {mean_of_known(bound):.4f}"
        if self.sends_per_token is not None and np.isfinite(self.sends_per_token).any():
            facts += f", a token reaches {mean_of_known(self.sends_per_token):.2f} other nodes"
        worst = np.argsort(balance, kind="stable")[: min(HTML_LAYERS, known)].tolist()  # NaN comes last
        rows = [[layer, f"{balance[layer]:.4f}", f"{bound[layer]:.4f}", self.transfers[layer]] for layer in worst]
        table = table_html(["least even layers", "balancedness", "bound", "transfers"], rows) if rows else ""
        return f"<div>{facts}{table}</div>{self.layout._repr_html_()}"


def place(
    expert_load: ArrayLike,
    topology: Topology,
    *,
    num_slots: int | ArrayLike | None = None,
    slots_per_rank: ArrayLike | None = None,
    current: ExpertLayout | None = None,
    max_transfers: int | None = None,
    max_total_transfers: int | None = None,
    max_rank_transfers: ArrayLike | None = None,
    max_node_transfers: ArrayLike | None = None,
    min_gain: float = 0.01,
    transfer_price: float | None = None,
    transfer_cost: ArrayLike | None = None,
    window_weights: ArrayLike | None = None,
    locality: Locality = "none",
    num_groups: int | None = None,
    active_ranks: ArrayLike | None = None,
    dispatch: PlacementDispatch = "even",
    effort: float = 1.0,
    pairs: ArrayLike | None = None,
    traffic_price: float = TRAFFIC_PRICE,
) -> Placement:
    """Which expert goes into which slot, so that the ranks' loads are even?

    Hot experts get the redundant slots. A rank gets an expert twice only if it has more slots than there are experts to
    choose from. Every layer comes with a proven bound. Equal inputs give equal bytes, on any machine and any number of
    threads.

    Args:
        expert_load: Tokens routed to each expert, `[L, E]`, or windows of it, `[T, L, E]`: numpy, lists or torch (a
            CUDA tensor costs one copy). Finite, not negative. Windows are balanced one by one, not for their sum.
        topology: Ranks, nodes and speeds.
        num_slots: Slots that may be filled, at least E, or ints `[L]`, one for each layer (see `plan_slots`). S is the
            largest of ceil(num_slots / R); where a layer has fewer, or R does not divide, ranks end with empty slots;
            so they do where one more replica would make the layer worse. What `current` holds in slots that are not
            there and stays on its rank is copied to another slot of it.
        slots_per_rank: Instead of `num_slots`: slots that each rank fills, ints `[R]`, where cards differ in memory. S
            is the largest of them; ranks with fewer end with empty slots.
        current: Layout to start from, `R * S` slots on as many ranks. The search goes on from it a transfer at a time,
            as long as that pays; a layer that would gain less than `min_gain` keeps its row; what stays on a rank
            stays in its slot.
        max_transfers: Most experts that ranks may receive on one layer. Experts that have lost their last slot with a
            rank come first, all of them. A row that cannot stay (ranks that hold more experts than they have slots;
            with "group" and "first_copy" also an expert lost or groups torn apart) is solved anew and may take more.
        max_total_transfers: Most experts that ranks may receive on all layers together; they go to the layers that
            gain most, what must move first. Costs a dozen searches.
        max_rank_transfers: Most experts that a rank may receive from another on one layer, ints `[R, R]` from rank to
            rank; -1 = no limit. Each transfer is booked on one holder's link (see `Placement.senders`), a rank that is
            out among them. An expert that only ranks that are out hold goes to a slot that a link with room leads to,
            and where there is none, all the same.
        max_node_transfers: The same from node to node, ints `[N, N]`; within a node on the diagonal.
        min_gain: Least rise of the predicted balancedness for which a layer of `current` changes, 0 or more.
        transfer_price: Gain in predicted balancedness that each transfer must bring, 0 or more. Default 0.001, or
            0.0001 where `max_transfers` or `max_total_transfers` says what may be spent.
        transfer_cost: Floats `[R, R]`, not negative: relative cost of a transfer from rank to rank, which multiplies
            the price; an expert comes from the holder that costs least. Default 1.
        window_weights: Weight of each window, floats `[T]`, not negative. Default: all equal.
        locality: "none": any expert anywhere. "group": all replicas of a group of experts in one node, as DeepSeek's
            hierarchical placement. "first_copy": one replica of each expert in its group's node, the others anywhere.
        num_groups: Groups of E / num_groups consecutive experts. Needed for "group" and "first_copy".
        active_ranks: Bools `[R]`; slots of the other ranks become -1, and still count for `num_slots`. Default: all.
        dispatch: How replicas will share their expert's tokens. "even": equally; for the modes "even", "static" and
            "random" of `DispatchTables` and "even" of `simulate`. "weighted": by the shares that balance each window
            best; for mode "quota" and `simulate`'s "weighted". Mode "weighted" and `simulate`'s "previous" take the
            shares of the last rebalance, which fit the next windows poorly: place for "even". "weighted" needs
            `locality="none"`.
        effort: More time for a better answer, without `current` never a worse one (with it, a better placement may need
            more transfers than it is worth): multiplies the work that the search may do, and divides the distance from
            the bound at which it stops. 1 stops at 0.001. At most 10,000.
        pairs: Tokens that use two experts together, `[L, E, E]`, as `pair_counts` counts them; symmetric, not negative;
            the diagonal, tokens that use the expert, counts for what is said of sends alone. Multiples do as well;
            fractions of a token pass for chance, as few tokens do. Experts that are used together then come to the same
            nodes, so that tokens reach fewer (dispatch mode "near"), while ranks stay about as even: a rank costs only
            what it has above 1.01 of an even load. No effect on one node, with locality "group", and on layers whose
            pairs are all 0 or what chance makes of them. Pairs of other tokens than the load's are as good as they are
            alike.
            Transfers for their sake need to be worth `transfer_price`, but not `min_gain`.
        traffic_price: Balancedness that a token's send to another node than its own is worth, on average over tokens, 0
            or more: the time of such a send, by that of a token's experts (`StepCost.traffic_price` of
            `eplb_core.simulation` works it out). 0: `pairs` have no effect.

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
    count, layers, experts = windows.shape
    if count == 0 or experts == 0:
        raise ValueError(f"`expert_load` (shape {list(windows.shape)}) must have one window and one expert or more")
    windows = _in_range(windows)
    effort = check_real(effort, "effort", above=0.0, at_most=10_000.0)
    check_kind(topology, "topology", Topology)
    frames = check_slots(num_slots, slots_per_rank, layers, experts, topology.num_ranks)
    stride = max(int(capacity.max()) for _, capacity in frames)
    total = None if max_total_transfers is None else check_int(max_total_transfers, "max_total_transfers", 0)
    default = _PRICE if max_transfers is None and total is None else _PRICE_IN_BUDGET
    terms = Terms(
        default if transfer_price is None else check_real(transfer_price, "transfer_price", at_least=0.0, at_most=1e9),
        NO_LIMIT if max_transfers is None else min(check_int(max_transfers, "max_transfers", 0), NO_LIMIT),
        check_real(min_gain, "min_gain", at_least=0.0),
        check_links(topology, transfer_cost, max_rank_transfers, max_node_transfers),
    )
    whole = Load.of(windows, check_weights(window_weights, count))
    price = check_real(traffic_price, "traffic_price", at_least=0.0, at_most=1e9)
    near = None if pairs is None else Near(check_pairs(pairs, layers, experts), price, effort)
    offers = [terms] if total is None or current is None else _offers(terms)
    p2l = np.full((len(offers), layers, topology.num_ranks * stride), -1, dtype=np.int64)
    senders = np.full_like(p2l, -1)
    reached, transfers = np.zeros(p2l.shape[:2]), np.zeros(p2l.shape[:2], dtype=np.int64)
    bound = np.zeros(layers)
    for rows, capacity in frames:
        problem = state_problem(experts, topology, capacity, stride, locality, num_groups, active_ranks, dispatch)
        if current is not None:
            check_current(current, problem, layers)
        load = whole.take(rows)
        solution, bound[rows] = solve(problem, load, effort, free=current is None)
        if current is None:
            p2l[0, rows], reached[0, rows] = solution, score_rows(problem, load, solution)
            continue
        start = start_from(current.physical_to_logical_map[rows], solution, problem, load)
        for c, offer in enumerate(offers):
            p2l[c, rows], reached[c, rows], transfers[c, rows], senders[c, rows] = choose_rows(
                start, problem, load, offer
            )
    chosen, each = _share_out(reached, transfers, total), np.arange(layers)
    found = Rows(p2l[chosen, each], reached[chosen, each], transfers[chosen, each], senders[chosen, each])
    sends_bound = np.full(layers, np.nan)
    if near is not None and layers:
        was = None if current is None else current.physical_to_logical_map
        spare = None if total is None else max(total - int(found.received.sum()), 0) // layers
        for rows, capacity in frames:
            problem = state_problem(experts, topology, capacity, stride, locality, num_groups, active_ranks, dispatch)
            bring_near(found, rows, was, problem, whole, near, terms, spare)
            sends_bound[rows] = bound_sends(topology, problem.capacity, near.pairs.take(rows))
    layout = ExpertLayout._of_valid(found.p2l, experts, topology)
    sends = None if near is None else predict_sends(layout, near.pairs)
    return Placement(
        layout,
        read_only(found.balance),
        read_only(bound),
        read_only(found.received),
        dispatch,
        read_only(found.senders) if terms.limited else None,
        *(() if sends is None else (sends.nodes, sends.sends, read_only(sends_bound))),
    )


def _in_range(windows: FloatArray) -> FloatArray:
    """Scale each layer, then each window, by a power of two to avoid overflow; exact, so no decision changes."""
    top = windows.max(axis=2, keepdims=True)
    exponent = np.frexp(top.max(axis=0))[1]
    shift = np.where(np.abs(exponent) > _FAR, np.clip(exponent, 0, _FAR) - exponent, 0)
    # Beside the layer's other windows these are nothing, but count as much in the mean.
    shift = shift + np.maximum(-_FAR - shift - np.frexp(top)[1], 0)
    return read_only(np.ldexp(windows, shift)) if shift.any() else windows


def _offers(terms: Terms) -> list[Terms]:
    """What each layer is asked for where all share a budget: first to move only what must, then for more and more."""
    hold = terms._replace(budget=0, min_gain=np.inf)
    dearer = [terms._replace(price=price) for price in _PRICES if price > terms.price]
    fewer = [terms._replace(budget=budget) for budget in _BUDGETS if budget < terms.budget]
    return [hold, terms, *dearer, *fewer]


def _share_out(reached: FloatArray, transfers: IntArray, total: int | None) -> IntArray:
    """Which offer each layer takes: those that gain most over the first, which must be, within what that leaves."""
    if len(reached) == 1 or total is None:
        return np.zeros(reached.shape[1], dtype=np.int64)
    gain = np.nan_to_num(reached[1:] - reached[0], nan=0.0)
    extra = np.maximum(transfers[1:] - transfers[0], 0)
    return spend_budget(gain, extra, max(total - int(transfers[0].sum()), 0)) + 1
