"""Replay a recorded load through a placement policy: what balance it would have reached, and what it would have cost.

A layout is made from windows that are over and scored on those that follow, never on the ones it was made from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import eplb_core
from eplb_core._arrays import FloatArray, IntArray, check_int, check_real, read_only
from eplb_core.layout import ExpertLayout, check_num_slots
from eplb_core.placement.costs import CostModel
from eplb_core.simulation import records as tables
from eplb_core.simulation.hardware import StepCost
from eplb_core.simulation.links import LINKS, count_links
from eplb_core.simulation.policies import Dispatch, Dispatcher, Policy, PolicySetting, policy_of
from eplb_core.simulation.sources import Block, Source, blocks_of, joined
from eplb_core.topology import Topology
from eplb_core.trace import Trace


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Simulation:
    """What a replay gave. T windows, L layers, n rebalances. Arrays are read-only.

    Times are seconds of the cost model; without one, a unit is the time of one token.
    """

    policy: str
    """Name of the policy."""
    dispatch: str
    """Name of the dispatch."""
    topology: Topology
    """Ranks and nodes."""
    num_slots: int
    """Slots filled."""
    interval: int
    """Windows between rebalances; the first `interval` windows only feed the first one and are not scored."""
    history: int
    """Windows that the policy sees."""
    scored_from: int
    """The first window that is scored: `interval`, or later where that was asked for."""
    cost: StepCost | None
    """Seconds and bytes, where they were given."""
    window_passes: float
    """Passes of a window."""
    layer_ids: tuple[int, ...]
    """The model's number of each layer, `[L]`, or empty."""
    mean_load: FloatArray
    """Load that each rank would have if all were even, `[T, L]`: the sum over the sum of the speeds."""
    max_load: FloatArray
    """Load over speed of the fullest rank, `[T, L]`: the time that all ranks wait for."""
    balancedness: FloatArray
    """`mean_load / max_load`, `[T, L]`; NaN without load."""
    window_balancedness: FloatArray
    """Mean over layers, `[T]`; NaN for a window without load."""
    bound: FloatArray
    """Mean over layers of what no layout of these slots exceeds, `[T]`, equal within an interval; NaN if not asked."""
    step_s: FloatArray
    """Time of each layer in a pass, `[T, L]`."""
    rank_load: FloatArray
    """Tokens that each rank computes, all layers together, `[T, R]`."""
    layer_rank_load: FloatArray | None
    """The same by layer, `[T, L, R]`, where `keep_ranks` was set."""
    rebalance_windows: IntArray
    """The window before which each rebalance took effect, `[n]`."""
    transfers: IntArray
    """Experts that ranks had to receive, `[n, L]`."""
    link_transfers: IntArray
    """Slots that a rebalance filled anew, by where from, `[n, L, 3]`: the rank itself, its node, another node."""
    pause_s: FloatArray
    """Time that passes lose by each rebalance, `[n]`."""
    memory_bytes: float
    """Bytes of redundant experts, all layers, on the rank with most of them; 0 without a cost."""
    digests: tuple[str, ...]
    """Digest of the starting layout and of the one after each rebalance, `[n + 1]`."""
    first_layout: ExpertLayout
    """The starting layout."""
    layout: ExpertLayout
    """The last layout."""
    mean_balancedness: float
    """Mean over all scored windows and layers with load."""
    total_balancedness: float
    """Sum of means over sum of maxima over all scored windows and layers: the time that the average rank works."""

    @property
    def total_transfers(self) -> int:
        """Experts received by all ranks over the whole replay."""
        return int(self.transfers.sum())

    @property
    def transfer_bytes(self) -> FloatArray:
        """Bytes by where from, `[3]`: within the rank, within the node, between nodes; zeros without a cost."""
        size = 0.0 if self.cost is None else self.cost.model.expert_bytes
        return np.asarray(self.link_transfers.sum(axis=(0, 1)) * size, dtype=np.float64)

    @property
    def pass_s(self) -> float:
        """Mean time of all layers in a pass, over the scored windows."""
        return float(self.step_s[self.scored_from :].sum(axis=1).mean())

    @property
    def total_s(self) -> float:
        """Time of all passes of the scored windows and of the pauses before them."""
        pauses = float(self.pause_s[self.rebalance_windows >= self.scored_from].sum())
        return float(self.step_s[self.scored_from :].sum()) * self.window_passes + pauses

    def blocks(self) -> list[tuple[int, int, float, int]]:
        """Per stretch between rebalances: first window, window after the last, mean balancedness, transfers before."""
        windows = len(self.balancedness)
        starts = [0, *self.rebalance_windows.tolist()]
        moved = [0, *self.transfers.sum(axis=1).tolist()]
        return [
            (start, end, tables.mean_of_known(self.balancedness[start:end]), int(count))
            for start, end, count in zip(starts, [*starts[1:], windows], moved, strict=True)
        ]

    def table(self) -> str:
        """The replay as text: a line a stretch between rebalances, and the totals."""
        return tables.table([self])

    def windows(self) -> tables.Records:
        """A row for each window and layer: balancedness, loads, time."""
        return tables.window_records(self)

    def moves(self) -> tables.Records:
        """A row for each rebalance and layer: slots filled, by where from, and bytes."""
        return tables.move_records(self)

    def plot(self, **options: Any) -> Any:
        """A matplotlib figure: balance over time, and what each rank computes. See `plots.plot_simulation`."""
        from eplb_core.simulation.plots import plot_simulation

        return plot_simulation(self, **options)

    def __repr__(self) -> str:
        return (
            f"Simulation(policy={self.policy!r}, dispatch={self.dispatch!r}, num_slots={self.num_slots}, "
            f"interval={self.interval}, total_balancedness={self.total_balancedness:.4f}, "
            f"transfers={self.total_transfers})"
        )

    def _repr_html_(self) -> str:
        from eplb_core.simulation.html import simulation_html

        return simulation_html(self)


def simulate(
    trace: Source,
    *,
    topology: Topology,
    num_slots: int,
    policy: str | Policy = "place",
    dispatch: str | Dispatch = "even",
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

    Windows 0..interval-1 are lived through on the starting layout. Before window `interval`, and every `interval`
    windows after it, the policy sees windows that are over and gives the layout for those that follow. Only windows
    from `score_from` on are scored, so that all policies are compared on the same held-out windows.

    Args:
        trace: A trace, windows of load `[T, L, E]`, a `TokenTrace`, or a `TraceStream`, of which only the windows that
            the policy sees are in memory.
        topology: Ranks, nodes and speeds.
        num_slots: Slots to fill, at least E.
        policy: One of `POLICIES`: `"none"` keeps the starting layout; `"place"` calls `place` with the live layout as
            `current`; `"once"` does so once; `"gated"` moves the layers that `should_rebalance` finds worth it;
            `"deepseek"` calls `rebalance_experts` on the sum of the windows. Or a callable
            `(windows [T', L, E], live layout) -> ExpertLayout`.
        dispatch: One of `DISPATCHES`: `"even"`: replicas share their expert's tokens equally; `"weighted"`: by shares
            that are solved for the windows seen; `"solved"`: for each window as it comes; `"static"` and `"local"`: by
            the tables of `static_dispatch_table` and `even_dispatch_table`, where of a `TokenTrace` each token is sent
            as its rank's table says. Or a callable `(layout, window [L, E]) -> shares [L, P]`.
        interval: Windows between rebalances, 1 or more and less than T.
        history: How many of the last windows the policy sees. Default: `interval`.
        score_from: First window to score, at least `interval`: the same for replays with several intervals, so that
            they are compared on the same windows. Default: `interval`.
        current: Layout to start from. Default: the trivial one.
        num_groups: Groups of experts for `"deepseek"` and `place`. Default: no grouping.
        place_options: Further arguments for `place`.
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
    every = check_int(interval, "interval", 1)
    seen = every if history is None else check_int(history, "history", 1)
    scored = every if score_from is None else check_int(score_from, "score_from", every)
    step = StepCost(cost) if isinstance(cost, CostModel) else cost
    passes = check_real(window_passes, "window_passes", above=0.0)
    model = None if step is None else step.model
    setting = PolicySetting(num_slots, num_groups, dict(place_options or {}), model, passes, every)
    name, choose = policy_of(policy, setting)
    blocks, total = blocks_of(trace, every)
    if total is not None:
        _check_scored(every, scored, total)
    run = _Run(topology, num_slots, Dispatcher(dispatch), StepCost(CostModel()) if step is None else step, passes)
    run.bound, run.keep_ranks = bound, keep_ranks
    past: deque[IntArray | FloatArray] = deque(maxlen=-(-seen // every))
    for number, block in enumerate(blocks):
        if number == 0:
            run.start(current, block)
        else:
            run.rebalance(choose, joined(past)[-seen:], number * every)
            if progress is not None:
                progress(number, 0 if total is None else -(-total // every) - 1)
        run.live_through(block)
        past.append(block.load)
    _check_scored(every, scored, sum(map(len, run.tops)))
    ids = trace.layer_ids if isinstance(trace, Trace) else ()
    word = dispatch if isinstance(dispatch, str) else getattr(dispatch, "__name__", type(dispatch).__name__)
    return run.result(name, word, (every, seen, scored), ids, step)


def _check_scored(interval: int, scored: int, windows: int) -> None:
    if scored >= windows:
        name, value = ("interval", interval) if scored == interval else ("score_from", scored)
        raise ValueError(f"`{name}` (={value}) must be below the {windows} windows of the trace, or none is scored")


class _Run:
    """A replay that goes on: the layout that is live, and what was found so far."""

    bound = keep_ranks = False
    first: ExpertLayout
    live: ExpertLayout

    def __init__(
        self, topology: Topology, num_slots: int, dispatcher: Dispatcher, cost: StepCost, passes: float
    ) -> None:
        self.topology, self.num_slots, self.dispatcher = topology, num_slots, dispatcher
        self.cost, self.passes = cost, passes
        self.exchange_s = cost.exchange_s(topology)
        self.means: list[FloatArray] = []
        self.tops: list[FloatArray] = []
        self.steps: list[FloatArray] = []
        self.bounds: list[FloatArray] = []
        self.ranks: list[FloatArray] = []
        self.layer_ranks: list[FloatArray] = []
        self.starts: list[int] = []
        self.links: list[IntArray] = []
        self.pauses: list[float] = []
        self.digests: list[str] = []

    def start(self, current: ExpertLayout | None, block: Block) -> None:
        layers, experts = block.load.shape[1:]
        if current is None:
            slots = check_num_slots(self.num_slots, experts)
            current = ExpertLayout.trivial(layers, experts, num_slots=slots, topology=self.topology)
        if (current.num_layers, current.num_experts, current.topology) != (layers, experts, self.topology):
            raise ValueError(
                f"`current` ({current!r}) must have the trace's {layers} layers and {experts} experts, and `topology`"
            )
        self.first = self.live = current
        self.digests.append(current.digest)
        self.dispatcher.renew(current, None)

    def rebalance(self, choose: Policy, windows: IntArray | FloatArray, start: int) -> None:
        new = choose(windows, self.live)
        self.starts.append(start)
        self.links.append(count_links(self.live, new))
        self.pauses.append(self._pause_s(new))
        self.live = new
        self.digests.append(new.digest)
        self.dispatcher.renew(new, windows)

    def _pause_s(self, new: ExpertLayout) -> float:
        """As `should_rebalance` counts it: transfers, as far as passes wait for them, and installs."""
        changed = int((self.live.physical_to_logical_map != new.physical_to_logical_map).any(axis=1).sum())
        if not changed:
            return 0.0
        model = self.cost.model
        lost = model.install_s * changed + model.rebalance_s
        if model.stall and model.expert_bytes:
            from eplb_core.placement._pass_time import time_transfers

            active = np.ones(self.topology.num_ranks, dtype=np.bool_)
            lost += model.stall * float(time_transfers(self.live, new, active, model)[1].sum())
        return lost

    def live_through(self, block: Block) -> None:
        model, speed = self.cost.model, self.topology.rank_speed
        slots = self.dispatcher.slot_load(block)
        by_rank = (*slots.shape[:2], self.topology.num_ranks, self.live.slots_per_rank)
        ranks: FloatArray = slots.reshape(by_rank).sum(axis=3)
        work = model.token_s * ranks
        if model.expert_s:
            work += model.expert_s * np.minimum(slots, self.passes, out=slots).reshape(by_rank).sum(axis=3)
        step = (work / speed).max(axis=2)
        if self.cost.token_bytes:
            step += (ranks * self.exchange_s).max(axis=2)
        self.steps.append(step / self.passes + model.layer_s)
        self.means.append(ranks.sum(axis=2) / speed.sum())
        self.tops.append((ranks / speed).max(axis=2))
        self.ranks.append(ranks.sum(axis=1))
        if self.keep_ranks:
            self.layer_ranks.append(ranks)
        self.bounds.append(np.full(len(ranks), self._bound(block) if self.bound else np.nan))

    def _bound(self, block: Block) -> float:
        placed = eplb_core.place(block.load, self.topology, num_slots=self.num_slots, effort=0.01)
        return tables.mean_of_known(placed.bound)

    def result(
        self, policy: str, dispatch: str, spans: tuple[int, int, int], layer_ids: tuple[int, ...], cost: StepCost | None
    ) -> Simulation:
        every, seen, scored = spans
        mean, top = np.concatenate(self.means), np.concatenate(self.tops)
        each = np.divide(mean, top, out=np.full(top.shape, np.nan), where=top > 0)
        waited = float(top[scored:].sum())
        links = np.array(self.links, dtype=np.int64).reshape(len(self.links), mean.shape[1], len(LINKS))
        layers, experts = mean.shape[1], self.live.num_experts
        spare = -(-self.num_slots // self.topology.num_ranks) - -(-experts // self.topology.num_ranks)
        return Simulation(
            policy=policy,
            dispatch=dispatch,
            topology=self.topology,
            num_slots=self.num_slots,
            interval=every,
            history=seen,
            scored_from=scored,
            cost=cost,
            window_passes=self.passes,
            layer_ids=layer_ids,
            mean_load=read_only(mean),
            max_load=read_only(top),
            balancedness=read_only(each),
            window_balancedness=read_only(np.array([tables.mean_of_known(window) for window in each])),
            bound=read_only(np.concatenate(self.bounds)),
            step_s=read_only(np.concatenate(self.steps)),
            rank_load=read_only(np.concatenate(self.ranks)),
            layer_rank_load=read_only(np.concatenate(self.layer_ranks)) if self.keep_ranks else None,
            rebalance_windows=read_only(np.array(self.starts, dtype=np.int64)),
            transfers=read_only(links[:, :, 1:].sum(axis=2)),
            link_transfers=read_only(links),
            pause_s=read_only(np.array(self.pauses)),
            memory_bytes=spare * layers * self.cost.model.expert_bytes,
            digests=tuple(self.digests),
            first_layout=self.first,
            layout=self.live,
            mean_balancedness=tables.mean_of_known(each[scored:]),
            total_balancedness=float(mean[scored:].sum()) / waited if waited > 0 else float("nan"),
        )
