"""`Balancer`: when to move, what, and how much, from windows that are over and one number."""

from __future__ import annotations

import hashlib
import inspect
import math
from typing import Any, NamedTuple

import numpy as np

from eplb_core._arrays import (
    ArrayLike,
    BoolArray,
    IntArray,
    check_kind,
    check_load,
    check_real,
    read_only,
    to_numpy,
)
from eplb_core.balancer.account import Account
from eplb_core.balancer.decide import FIRST, FROZEN, USUAL, is_trivial, price_of, search, turns
from eplb_core.balancer.memory import KEPT, Memory
from eplb_core.balancer.notes import BalancerReport, Notes, tell
from eplb_core.balancer.state import parts_of, state_of
from eplb_core.exposition import Placements
from eplb_core.layout import ExpertLayout, layer_rows
from eplb_core.metrics import transfers
from eplb_core.placement.affinity.near import TRAFFIC_PRICE
from eplb_core.placement.affinity.pairs import Pairs, check_pairs
from eplb_core.placement.place import Placement, place
from eplb_core.placement.worth.costs import CostModel
from eplb_core.topology import Topology

DEFAULT_MOVE_COST = 0.01
"""A transfer costs a hundredth of a window's time on its layer."""
MOST_COST = 1e6
"""Nothing pays for such a move."""
OWN = {"expert_load", "topology", "current", "min_gain", "transfer_price", "window_weights"}
"""What the Balancer gives to `place` itself; all else that `place` takes passes through."""
_LIMITS = {"max_transfers", "max_total_transfers", "max_rank_transfers", "max_node_transfers", "active_ranks"}
_BY_LAYER = ("num_slots", "pairs")
_SETTLED, _KNOWN = 32, 4


class _Found(NamedTuple):
    """What was found for a layer, and for which question."""

    question: tuple[Any, ...]
    row: IntArray
    balance: float
    bound: float
    transfers: int
    senders: IntArray | None


class Balancer:
    """Decide when experts move, which, and how many, from the load alone: nothing to tune.

    Every rank keeps one, shows it the same windows, and gets the same answers. It has no clock, no thread and no
    randomness; what it knows is in `state_dict()`, and `digest` names it.

    Args:
        topology: Ranks, nodes and speeds.
        move_cost: What one transfer on one layer costs, in windows of that layer's time: seconds that passes lose by
            a transfer / seconds of the layer over a window; 0 or more. Default 0.01, unless `cost` is given.
        cost: Seconds and bytes, from which `move_cost` follows for the load that is seen. Needs `window_passes`.
        window_passes: Passes that a window covers.
        **options: Further arguments of `place`: `num_slots` or what stands for it, `dispatch`, `locality`,
            `active_ranks`, limits of transfers and so on. Not those that the Balancer decides: `current`, `min_gain`,
            `transfer_price`, `window_weights`.

    Raises:
        ValueError: A number is out of range, or both or half of the ways to tell the cost are given.
        TypeError: `place` knows no such argument.

    Cost:
        Memory: 144 windows of `[L, E]` in float64, 17 MB for 58 layers of 256 experts, allocated with the first window.

    Threads:
        One at a time; `propose` releases the interpreter lock while it searches.

    Example:
        >>> topology = Topology(num_ranks=2)
        >>> live = ExpertLayout.trivial(1, 4, num_slots=6, topology=topology)
        >>> balancer = Balancer(topology, num_slots=6)
        >>> for _ in range(4):
        ...     balancer.observe([[10, 10, 90, 10]])
        ...     live = balancer.propose(live).layout
        >>> print(live)
        layer 0: 0 1 2 | 3 2 1

    Source:
        docs/balancer.md: the rule, and what it reaches.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        move_cost: float | None = None,
        cost: CostModel | None = None,
        window_passes: float | None = None,
        **options: Any,
    ) -> None:
        self._topology = check_kind(topology, "topology", Topology)
        self._options = _check_options(options)
        if not {"num_slots", "slots_per_rank"} & {*self._options}:
            raise TypeError("give `num_slots`, the slots of all ranks together")
        if cost is not None and (move_cost is not None or window_passes is None):
            raise ValueError("`cost` needs `window_passes` and stands in place of `move_cost`; give one or the other")
        self._cost = None if cost is None else check_kind(cost, "cost", CostModel)
        self._passes = 1.0 if window_passes is None else check_real(window_passes, "window_passes", above=0.0)
        given = DEFAULT_MOVE_COST if move_cost is None else move_cost
        self._move_cost = check_real(given, "move_cost", at_least=0.0, at_most=MOST_COST)
        self._transfer_s = 0.0
        if self._cost is not None:
            self._transfer_s = transfer_s(self._cost, topology)
            if self._transfer_s <= 0.0:
                raise ValueError(
                    "`cost` must say what a transfer costs (`expert_bytes` and a bandwidth, or `install_s`); "
                    "give `move_cost` where it is not known"
                )
        self._memory: Memory | None = None
        self._notes: Notes | None = None
        self._account: Account | None = None
        self._placements = Placements()
        self._found: dict[int, _Found] = {}

    def observe(self, load: ArrayLike) -> None:
        """Take in windows that are over; nothing changes where that raises.

        Args:
            load: Tokens routed to each expert, `[L, E]`, or windows of it, `[T, L, E]`, oldest first; equal on every
                rank. A window without any load says nothing and is passed over; so is a layer without load in it.

        Raises:
            ValueError: Not finite, negative, or of other layers or experts than the windows before.

        Cost:
            O(T * L * E); 5 to 8 ms a window for 58 layers of 256 experts, measured on a slow, busy core.
        """
        windows = check_load(load, "load", (2, 3))
        if windows.ndim == 2:
            windows = windows[None]
        layers, experts = windows.shape[1:]
        if layers == 0 or experts == 0:
            raise ValueError(f"`load` (shape {list(windows.shape)}) must have one layer and one expert or more")
        if self._memory is not None and self._memory.shares.shape[1:] != (layers, experts):
            known = list(self._memory.shares.shape[1:])
            raise ValueError(
                f"`load` ({layers} layers, {experts} experts) must be as before, {known}; another model needs another "
                "Balancer"
            )
        for window in windows:
            if window.max() > 0.0:
                self._memory = self._memory or Memory(layers, experts)  # of nothing there is none
                self._memory.add(window)

    def propose(self, live: ExpertLayout, *, frozen: ArrayLike | None = None, **options: Any) -> Placement:
        """What should be live now?

        Depends on the windows observed, `live`, the options, and what moves between the live layouts of earlier calls
        have brought: asked again, it answers the same. Ranks ask for the same windows with equal layouts.

        Args:
            live: The layout in place.
            frozen: Layers that must stay, bools `[L]` or ints. They move only if an expert has lost its last slot.
            **options: Arguments of `place` that hold for this call in place of the constructor's: `active_ranks`,
                limits of transfers.

        Returns:
            `layout` is `live` itself where nothing pays. `balancedness` and `bound` are predicted, for the windows in
            memory; NaN before any. `transfers` and `senders` as of `place`.

        Raises:
            ValueError: `live` is of another frame, or an option is bad.
            InfeasiblePlacementError: The active ranks have fewer slots than there are experts.

        Cost:
            See docs/balancer.md. Kernels without the interpreter lock.
        """
        check_kind(live, "live", ExpertLayout)
        if live.topology != self._topology:
            raise ValueError(
                f"`live` ({live.topology!r}) must be on the Balancer's {self._topology!r}; for other ranks make a "
                "Balancer with their topology and give it this one's `state_dict()`"
            )
        layers, options = live.num_layers, {**self._options, **_check_options(options)}
        stays = np.zeros(layers, dtype=np.bool_)
        if frozen is not None:
            stays[layer_rows(frozen, layers, "frozen")] = True
        if self._memory is None:
            unknown = np.full(layers, np.nan)
            return Placement(live, read_only(unknown), read_only(unknown), read_only(np.zeros(layers, dtype=np.int64)))
        if self._memory.shares.shape[1:] != (layers, live.num_experts):
            raise ValueError(
                f"`live` ({layers} layers, {live.num_experts} experts) must be as the windows observed, "
                f"{list(self._memory.shares.shape[1:])}"
            )
        if self._notes is None or self._account is None or self._notes.live.shape != live.physical_to_logical_map.shape:
            self._account = Account(live.physical_to_logical_map, self._memory.count)
            self._notes = Notes(live.num_layers, live.num_slots)
        weighted = options.get("dispatch") == "weighted"
        cost = self._cost_of_move(self._memory)
        poor, lost = self._account.book(live, self._memory, cost, weighted, *_worth_of_sends(options, live))
        back = np.flatnonzero(lost & ~stays) if not _LIMITS & {*options} else np.zeros(0, dtype=np.int64)
        base = self._account.taken_back(live, back)
        answers = self._answers(self._memory, base, stays | poor, options)
        rows = np.stack([answer.row for answer in answers])
        changed = (rows != live.physical_to_logical_map).any()
        layout = ExpertLayout._of_valid(rows, live.num_experts, live.topology) if changed else live
        received = np.array([answer.transfers for answer in answers], dtype=np.int64)
        if back.size:
            received = transfers(live, layout).sum(axis=1)
        placement = Placement(
            layout,
            read_only(np.array([answer.balance for answer in answers])),
            read_only(np.array([answer.bound for answer in answers])),
            read_only(received),
            options.get("dispatch", "even"),
            _senders(answers),
        )
        self._notes.see(live, self._memory.count)
        self._notes.offer(placement.layout, live, self._memory, weighted)
        tell(self._placements, self._memory.shares[(self._memory.count - 1) % KEPT].copy(), live, placement)
        return placement

    def report(self) -> BalancerReport:
        """What is the traffic taken for, and what have the moves brought?

        Cost:
            O(T * L * P) for the windows since the last move of each layer; do not ask in every pass.
        """
        memory, notes, account = self._memory, self._notes, self._account
        if memory is None:
            no = math.nan
            return BalancerReport(0, "unknown", 0, 0, no, self._move_cost, 0, no, no, no, no, ())
        regime = "unknown" if memory.count < _KNOWN else "new" if memory.age < _SETTLED else "settled"
        cost, moved, rate, brought = self._cost_of_move(memory), 0, math.nan, (math.nan, math.nan)
        if notes is not None:
            moved = notes.transfers
            if 0 <= notes.first_at < memory.count:
                rate = moved / (memory.count - notes.first_at)
            brought = notes.measure(memory, self._topology, self._options.get("dispatch") == "weighted")
        size = self._cost.expert_bytes if self._cost is not None and self._cost.expert_bytes else math.nan
        return BalancerReport(
            memory.count,
            regime,
            memory.start,
            memory.changes,
            memory.distance,
            price_of(memory, cost),
            moved,
            rate,
            rate * size,
            *brought,
            () if account is None else tuple(np.flatnonzero(account.overdrawn(cost)).tolist()),
        )

    @property
    def digest(self) -> str:
        """SHA-256 of all that decides, hex: equal on ranks that were shown the same and were made alike."""
        made = repr((self._topology.rank_to_node.tolist(), self._topology.rank_speed.tolist(), self._move_cost))
        text = made + repr((self._cost, self._passes)) + _key(self._options)
        known = "nothing" if self._memory is None else self._memory.digest
        paid = "nothing" if self._account is None else self._account.digest
        return hashlib.sha256(f"{text} {known} {paid}".encode()).hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """What it knows, as a dict of numbers, strings and arrays, copied: for a rank that joins or restarts.

        What it was made with is not in it: a Balancer with another topology or another cost may take it.
        """
        return state_of(self._memory, self._notes, self._account)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from another's `state_dict()`; nothing changes where that raises.

        Raises:
            ValueError: A version that is not known, a field that is missing or does not fit, or arrays that are not
                those that were saved. Of version 1 the windows are taken; the account of past moves begins anew.
            TypeError: Not a dict.
        """
        self._memory, self._notes, self._account = parts_of(state)
        self._found = {}

    def _answers(self, memory: Memory, live: ExpertLayout, stays: BoolArray, options: dict[str, Any]) -> list[_Found]:
        """Of each layer: what is known already, else what a search finds."""
        rows = live.physical_to_logical_map
        until, cost = turns(memory, *rows.shape), self._cost_of_move(memory)
        kinds = np.where(stays, FROZEN, np.where(is_trivial(rows, live.num_experts), FIRST, USUAL)).tolist()
        asked, budget = _key(options), options.get("max_total_transfers")
        price = {kind: price_of(memory, cost, kind) for kind in (FROZEN, FIRST, USUAL)}
        questions = [
            (asked, memory.start, until[n], kinds[n], price[kinds[n]], rows[n].tobytes()) for n in range(len(rows))
        ]
        found = {
            layer: known
            for layer, known in self._found.items()
            if budget is None and known.question == questions[layer]
        }
        for kind in price:
            each = [layer for layer in range(len(rows)) if kinds[layer] == kind and layer not in found]
            if not each:
                continue
            here = {name: _of_layers(name, value, each) for name, value in options.items()}
            if budget is not None:
                spent = sum(answer.transfers for answer in found.values())
                here["max_total_transfers"] = max(int(budget) - spent, 0)
            placed = search(memory, live, np.array(each), until, kind, price[kind], here)
            for i, layer in enumerate(each):
                found[layer] = _found_of(questions[layer], placed, i)
        self._found = found
        return [found[layer] for layer in range(len(rows))]

    def _cost_of_move(self, memory: Memory) -> float:
        """What a transfer costs in windows of a layer's time."""
        if self._cost is None:
            return self._move_cost
        model, ranks = self._cost, float(self._topology.num_ranks)
        seconds = model.token_s * memory.tokens_per_layer / float(self._topology.rank_speed.sum())
        experts = memory.shares.shape[2] / ranks
        seconds += self._passes * (model.layer_s + model.expert_s * experts)
        return min(self._transfer_s / seconds, MOST_COST) if seconds > 0.0 else MOST_COST


def transfer_s(cost: CostModel, topology: Topology) -> float:
    """Seconds that passes lose by a transfer: over the network, where there is more than one node."""
    return cost.stall * cost.link_s(same_node=topology.num_nodes == 1) + cost.install_s


def _check_options(options: dict[str, Any]) -> dict[str, Any]:
    known = inspect.signature(place).parameters
    for name in options:
        if name in OWN:
            raise TypeError(f"`{name}` must not be given: the Balancer decides it")
        if name not in known:
            raise TypeError(f"`{name}` is no argument of `place`; it knows {', '.join(sorted({*known} - OWN))}")
    return {name: value for name, value in options.items() if value is not None}


def _worth_of_sends(options: dict[str, Any], live: ExpertLayout) -> tuple[Pairs | None, float]:
    """The pairs that `place` heeds, and what a send per token is worth."""
    given, price = options.get("pairs"), options.get("traffic_price", TRAFFIC_PRICE)
    if given is None or options.get("locality") == "group":
        return None, 0.0
    price = check_real(price, "traffic_price", at_least=0.0, at_most=1e9)
    return check_pairs(given, live.num_layers, live.num_experts), price


def _key(options: dict[str, Any]) -> str:
    """Options in words that are equal where they are, and on every rank."""
    parts = []
    for name, value in sorted(options.items()):
        if isinstance(value, (str, int, float)):
            parts.append(f"{name}={value!r}")
        else:
            array = np.ascontiguousarray(to_numpy(value, name))
            print_of = hashlib.sha256(array.tobytes()).hexdigest()
            parts.append(f"{name}={array.dtype.str}{list(array.shape)}{print_of}")
    return " ".join(parts)


def _of_layers(name: str, value: Any, layers: list[int]) -> Any:
    """The part of an option that is for some layers."""
    if name not in _BY_LAYER:
        return value
    array = to_numpy(value, name)
    return value if array.ndim == 0 else array[layers]


def _found_of(question: tuple[Any, ...], placed: Placement, i: int) -> _Found:
    row, senders = placed.layout.physical_to_logical_map[i], placed.senders
    balance, bound = float(placed.balancedness[i]), float(placed.bound[i])
    return _Found(question, row, balance, bound, int(placed.transfers[i]), None if senders is None else senders[i])


def _senders(answers: list[_Found]) -> IntArray | None:
    """Of `Placement`."""
    if all(answer.senders is None for answer in answers):
        return None
    return read_only(np.stack([np.full_like(a.row, -1) if a.senders is None else a.senders for a in answers]))
