"""What a replay gave: arrays by window, layer, rank and rebalance, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from eplb_core._arrays import FloatArray, IntArray
from eplb_core.layout import ExpertLayout
from eplb_core.metrics import mean_of_known
from eplb_core.simulation import records as tables
from eplb_core.simulation.hardware import StepCost
from eplb_core.topology import Topology


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
    """Time of each layer in a pass, `[T, L]`: seconds, or without a cost the fullest rank's tokens over its speed."""
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
            (start, end, mean_of_known(self.balancedness[start:end]), int(count))
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
