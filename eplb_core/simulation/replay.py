"""`simulate`: replay a recorded load through a placement policy, with the balance it reaches and what it costs.

A layout is made from windows that are over and scored on those that follow, never on the ones it was made from.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np

from eplb_core._arrays import (
    ArrayLike,
    FloatArray,
    IntArray,
    check_call,
    check_flag,
    check_int,
    check_kind,
    check_made,
    check_real,
    read_only,
)
from eplb_core.layout import ExpertLayout, check_frame, rank_slots
from eplb_core.metrics import mean_of_known, mean_over_top
from eplb_core.placement.worth.costs import CostModel
from eplb_core.simulation.dispatch import Dispatch, Dispatcher, DispatchName
from eplb_core.simulation.hardware import LINKS, StepCost, count_links
from eplb_core.simulation.load.sources import Block, Source, TokenTrace, blocks_of, joined
from eplb_core.simulation.policies import Policy, PolicyName, PolicySetting, policy_of, to_options
from eplb_core.simulation.result import Simulation
from eplb_core.topology import Topology
from eplb_core.trace import Trace


class SimulateOptions(TypedDict, total=False):
    """Keyword arguments of `simulate`, which `compare_policies` and `sweep` pass on."""

    topology: Topology
    num_slots: int | None
    slots_per_rank: ArrayLike | None
    policy: PolicyName | Policy
    dispatch: DispatchName | Dispatch
    interval: int
    history: int | None
    score_from: int | None
    current: ExpertLayout | None
    num_groups: int | None
    place_options: Mapping[str, object] | None
    cost: StepCost | CostModel | None
    window_passes: float
    bound: bool
    keep_ranks: bool


def simulate(
    trace: Source,
    *,
    topology: Topology,
    num_slots: int | None = None,
    slots_per_rank: ArrayLike | None = None,
    policy: PolicyName | Policy = "place",
    dispatch: DispatchName | Dispatch = "even",
    interval: int = 16,
    history: int | None = None,
    score_from: int | None = None,
    current: ExpertLayout | None = None,
    num_groups: int | None = None,
    place_options: Mapping[str, object] | None = None,
    cost: StepCost | CostModel | None = None,
    window_passes: float = 1.0,
    bound: bool = False,
    keep_ranks: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Simulation:
    """What would a policy have reached on a recorded load, and what would it have cost?

    Windows 0..interval-1 run on the starting layout. Before window `interval`, and every `interval` windows after it,
    the policy sees past windows and returns the layout for those that follow. Only windows from `score_from` on are
    scored, so that all policies are compared on the same held-out windows.

    Args:
        trace: A trace, windows of load `[T, L, E]`, a `TokenTrace`, or a `TraceStream`, of which only the windows that
            the policy sees are in memory.
        topology: Ranks, nodes and speeds.
        num_slots: Slots to fill, at least E.
        slots_per_rank: Instead of `num_slots`: slots that each rank fills, ints `[R]` (see `place`).
        policy: One of `POLICIES`: `"none"` keeps the starting layout; `"auto"` lets a `Balancer` decide after every
            window, from window `interval` on, by what `cost` says of moves, or else its own; `"place"` calls `place`
            with the live layout as `current`; `"once"` does so once; `"gated"` moves the layers that
            `should_rebalance` finds worth it; `"deepseek"` calls `rebalance_experts` on the sum of the windows. Or a
            callable `(windows [T', L, E], live layout) -> ExpertLayout`.
        dispatch: How tokens spread over the replicas of their expert. `"even"`: in equal shares. `"weighted"`: in
            shares solved for each window as it comes, as in `place` and as the mode "quota" of `DispatchTables`.
            `"previous"`: in shares solved for the windows that the policy saw, as the mode "weighted" of
            `DispatchTables`. `"static_table"` and `"even_table"`: by `static_dispatch_table` and `even_dispatch_table`
            (modes "static" and "even"); tokens of a `TokenTrace` then go where their own rank's table says. `"near"`:
            as the mode "near", token by token (a `TokenTrace`, and torch); policies but "none" and "deepseek" then
            place with the pairs of the windows they see. Or a callable `(layout, window [L, E]) -> shares [L, P]`. All
            words: `simulation.DispatchName`.
        interval: Windows between rebalances, 1 or more and less than T.
        history: How many of the last windows the policy sees. Default: `interval`.
        score_from: First window to score, at least `interval`: the same for replays with several intervals, so that
            they are compared on the same windows. Default: `interval`.
        current: Layout to start from. Default: the trivial one.
        num_groups: Groups of experts for `"deepseek"` and `place`. Default: no grouping.
        place_options: Further arguments for `place`; `"auto"` leaves out those that it decides itself. Where tokens are
            known, `traffic_price` is by default what `cost` says (`StepCost.traffic_price`).
        cost: Seconds and bytes (`cost_preset`, or your own). Default: time is counted in tokens, moves are free.
        window_passes: Passes that a window covers, for times.
        bound: Whether to prove for each interval how much balance is possible at all: one more `place` each.
        keep_ranks: Whether to keep the load of each rank on each layer, `[T, L, R]`.
        progress: Called with rebalances done and in all; 0 in all where a stream does not say.

    Returns:
        Balance per window and layer, transfers per rebalance and link, times, digests and totals.

    Raises:
        ValueError: A number does not fit, or the policy gave a layout of another shape.

    Cost:
        O(T * L * P) and the policy; memory O(T * (L + R)) and the windows seen; any thread.

    Example:
        >>> windows = np.array([[[1, 1, 9, 1]]] * 3)
        >>> swap = lambda seen, live: ExpertLayout([[0, 1, 2, 2, 3, 0]], 4, topology=live.topology)
        >>> kept = simulate(windows, topology=Topology(2), num_slots=6, policy="none", interval=1)
        >>> moved = simulate(windows, topology=Topology(2), num_slots=6, policy=swap, interval=1)
        >>> round(kept.mean_balancedness, 3), round(moved.mean_balancedness, 3), moved.transfers.tolist()
        (0.6, 1.0, [[1], [0]])
    """
    check_kind(topology, "topology", Topology)
    check_call(progress, "progress")
    slots, given = (
        rank_slots(num_slots, slots_per_rank, 1, topology.num_ranks),
        {"num_slots": num_slots, "slots_per_rank": slots_per_rank},
    )
    check_made(num_slots=int(slots.sum()))
    every = check_int(interval, "interval", 1)
    seen = every if history is None else check_int(history, "history", 1)
    scored = every if score_from is None else check_int(score_from, "score_from", every)
    step = StepCost(cost) if isinstance(cost, CostModel) else cost
    if step is not None:
        check_kind(step, "cost", StepCost)
    options = _with_price(to_options(place_options), step, trace)
    passes = check_real(window_passes, "window_passes", above=0.0)
    model = None if step is None else step.model
    met: deque[IntArray] = deque(maxlen=seen)  # tokens of the windows that the policy sees

    def pairs_seen() -> IntArray | None:
        from eplb_core.placement.affinity.pairs import pair_counts  # compiles: only where it is used

        return pair_counts(np.concatenate(met), trace.num_experts) if isinstance(trace, TokenTrace) and met else None

    setting = PolicySetting(given, num_groups, options, model, passes, every)
    if dispatch == "near":
        setting = setting._replace(pairs=pairs_seen)
    if policy == "auto":
        seen = every  # it remembers by itself
    name, choose = policy_of(policy, setting)
    step_windows = 1 if policy == "auto" else every
    blocks, total = blocks_of(trace, step_windows)
    if total is not None:
        _check_scored(every, scored, total)
    run = _Run(topology, slots, given, Dispatcher(dispatch), StepCost(CostModel()) if step is None else step, passes)
    run.bound, run.keep_ranks = check_flag(bound, "bound"), check_flag(keep_ranks, "keep_ranks")
    past: deque[IntArray | FloatArray] = deque(maxlen=-(-seen // step_windows))
    most, cells = 0.0, 0
    for number, block in enumerate(blocks):
        most, cells = max(most, float(block.load.max(initial=0))), cells + block.load.size
        if not most * cells < np.inf:
            raise ValueError(f"`trace` (up to {most:g}) is too large to be added up in float64; scale it down")
        if number == 0:
            run.start(current, block)
        elif number * step_windows >= every:
            run.rebalance(choose, joined(past)[-seen:], number * step_windows, np.concatenate(met) if met else None)
            if progress is not None:
                done = number - every // step_windows
                progress(done + 1, 0 if total is None else -(-(total - every) // step_windows))
        run.live_through(block)
        past.append(block.load)
        if dispatch == "near" and block.ids is not None:
            met.extend(block.ids)
    _check_scored(every, scored, sum(map(len, run.columns["max_load"])))
    word = dispatch if isinstance(dispatch, str) else getattr(dispatch, "__name__", type(dispatch).__name__)
    return run.result(name, word, (every, seen, scored), trace if isinstance(trace, Trace) else None, step)


def _with_price(options: dict[str, Any], cost: StepCost | None, trace: Source) -> dict[str, Any]:
    """What a send between nodes is worth, by the cost, where it is told and the tokens' experts are known."""
    if cost is None or not cost.token_bytes or not cost.model.token_s or not isinstance(trace, TokenTrace):
        return options
    return {"traffic_price": cost.traffic_price(trace.topk_ids.shape[2]), **options}


def _first_number(names: Sequence[str]) -> int:
    """The first of numbers that go up one by one, else 0."""
    numbers = [int(name) for name in names if name.isdecimal() and len(name) < 19]
    return numbers[0] if numbers and numbers == list(range(numbers[0], numbers[0] + len(names))) else 0


def _check_scored(interval: int, scored: int, windows: int) -> None:
    if scored >= windows:
        name, value = ("interval", interval) if scored == interval else ("score_from", scored)
        raise ValueError(f"`{name}` (={value}) must be below the number of windows (={windows}), or none is scored")


class _Run:
    """State of a replay: the live layout and the results so far."""

    bound = keep_ranks = False
    first: ExpertLayout
    live: ExpertLayout

    def __init__(
        self,
        topology: Topology,
        slots: IntArray,
        given: dict[str, Any],
        dispatcher: Dispatcher,
        cost: StepCost,
        passes: float,
    ) -> None:
        self.topology, self.slots, self.given, self.dispatcher = topology, slots, given, dispatcher
        self.cost, self.passes = cost, passes
        self.columns: dict[str, list[FloatArray]] = defaultdict(list)  # arrays of the result, block by block
        self.starts: list[int] = []
        self.links: list[IntArray] = []
        self.pauses: list[float] = []
        self.digests: list[str] = []

    def start(self, current: ExpertLayout | None, block: Block) -> None:
        layers, experts = block.load.shape[1:]
        if current is None:
            current = ExpertLayout.trivial(layers, experts, topology=self.topology, **self.given)
        check_frame(current, "current", layers, experts, self.topology)
        self.first = self.live = current
        self.digests.append(current.digest)
        self.dispatcher.renew(current, None)

    def rebalance(self, choose: Policy, windows: IntArray | FloatArray, start: int, tokens: IntArray | None) -> None:
        new = choose(windows, self.live)
        self.starts.append(start)
        self.links.append(count_links(self.live, new))
        self.pauses.append(self._pause_s(new))
        self.live = new
        self.digests.append(new.digest)
        self.dispatcher.renew(new, windows, tokens)

    def _pause_s(self, new: ExpertLayout) -> float:
        """As in `should_rebalance`: installs, and the part of the transfers that passes wait for."""
        changed = int((self.live.physical_to_logical_map != new.physical_to_logical_map).any(axis=1).sum())
        if not changed:
            return 0.0
        model = self.cost.model
        lost = model.install_s * changed + model.rebalance_s
        if model.stall and model.expert_bytes:
            from eplb_core.placement.worth.pass_time import time_transfers

            active = np.ones(self.topology.num_ranks, dtype=np.bool_)
            lost += model.stall * float(time_transfers(self.live, new, active, model)[1].sum())
        return lost

    def live_through(self, block: Block) -> None:
        model, speed = self.cost.model, self.topology.rank_speed
        slots, (nodes, sends) = self.dispatcher.spread(block)
        by_rank = (*slots.shape[:2], self.topology.num_ranks, self.live.slots_per_rank)
        ranks: FloatArray = slots.reshape(by_rank).sum(axis=3)
        work = model.token_s * ranks
        if model.expert_s:
            work += model.expert_s * np.minimum(slots, self.passes, out=slots).reshape(by_rank).sum(axis=3)
        step = (work / speed).max(axis=2)
        each = None  # sends of a (token, expert)
        if block.ids is not None:
            tokens, entries = (block.ids >= 0).any(axis=3).sum(axis=1), (block.ids >= 0).sum(axis=(1, 3))
            each = (np.nan_to_num(sends) * tokens / np.maximum(entries, 1))[..., None]
        exchange, sent = np.zeros_like(step), np.zeros((len(ranks), 2))
        if self.cost.token_bytes:
            near, far = self.cost.exchange_bytes(self.topology, each)
            exchange = (ranks * (near / model.node_bandwidth + far / model.network_bandwidth)).max(axis=2)
            sent = np.stack([(ranks * link).sum(axis=(1, 2)) for link in (near, far)], axis=1)
            step += exchange
        found = {
            "nodes_per_token": nodes,
            "sends_per_token": sends,
            "exchange_s": exchange / self.passes,
            "exchange_bytes": sent / self.passes,
            "mean_load": ranks.sum(axis=2) / speed.sum(),
            "max_load": (ranks / speed).max(axis=2),
            "step_s": step / self.passes + model.layer_s,
            "rank_load": ranks.sum(axis=1),
            "bound": np.full(len(ranks), self._bound(block) if self.bound else np.nan),
        }
        if self.keep_ranks:
            found["layer_rank_load"] = ranks
        for name, values in found.items():
            self.columns[name].append(values)

    def _bound(self, block: Block) -> float:
        from eplb_core.placement.place import place

        return mean_of_known(place(block.load, self.topology, effort=0.01, **self.given).bound)

    def result(
        self, policy: str, dispatch: str, spans: tuple[int, int, int], trace: Trace | None, cost: StepCost | None
    ) -> Simulation:
        every, seen, scored = spans
        columns: dict[str, Any] = {name: read_only(np.concatenate(parts)) for name, parts in self.columns.items()}
        columns.setdefault("layer_rank_load", None)
        mean, top = columns["mean_load"], columns["max_load"]
        each = mean_over_top(mean, top)
        links = np.array(self.links, dtype=np.int64).reshape(len(self.links), mean.shape[1], len(LINKS))
        layers, experts = mean.shape[1], self.live.num_experts
        spare = int(self.slots.max()) - -(-experts // self.topology.num_ranks)
        return Simulation(
            policy=policy,
            dispatch=dispatch,
            topology=self.topology,
            num_slots=int(self.slots.sum()),
            interval=every,
            history=seen,
            scored_from=scored,
            cost=cost,
            window_passes=self.passes,
            layer_ids=() if trace is None else trace.layer_ids,
            first_window=0 if trace is None else _first_number(trace.windows),
            balancedness=read_only(each),
            window_balancedness=read_only(np.array([mean_of_known(window) for window in each])),
            rebalance_windows=read_only(np.array(self.starts, dtype=np.int64)),
            transfers=read_only(links[:, :, 1:].sum(axis=2)),
            link_transfers=read_only(links),
            pause_s=read_only(np.array(self.pauses)),
            memory_bytes=spare * layers * self.cost.model.expert_bytes,
            digests=tuple(self.digests),
            first_layout=self.first,
            layout=self.live,
            mean_balancedness=mean_of_known(each[scored:]),
            total_balancedness=float(mean_over_top(mean[scored:].sum(), top[scored:].sum())),
            **columns,
        )
