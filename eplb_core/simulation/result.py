"""Result of a replay: arrays per window, layer, rank and rebalance, their totals, rows and HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eplb_core._arrays import FloatArray, IntArray
from eplb_core._html import line_svg, table_html
from eplb_core._text import number
from eplb_core.frames import Columns, Table
from eplb_core.layout import ExpertLayout
from eplb_core.metrics import mean_of_known
from eplb_core.simulation.hardware import StepCost
from eplb_core.topology import Topology

_SHOWN = 12


class Records(np.recarray[Any, Any], Table):
    """Rows with named columns: a numpy record array. `rows.balancedness`, `rows[rows.layer == 3]`.

    Example:
        >>> rows = Records.of({"layer": [0, 1], "balancedness": [0.5, 0.75]})
        >>> rows[rows.balancedness > 0.6].layer.tolist()
        [1]
    """

    @classmethod
    def of(cls, columns: dict[str, Any]) -> Records:
        """From columns of one length."""
        arrays = {name: np.asarray(column) for name, column in columns.items()}
        kinds = np.dtype([(name, array.dtype) for name, array in arrays.items()])
        rows = np.empty(len(next(iter(arrays.values()))), dtype=kinds)
        for name, array in arrays.items():
            rows[name] = array
        return rows.view(cls)

    @classmethod
    def of_rows(cls, rows: Sequence[Mapping[str, Any]]) -> Records:
        """From rows with the same names."""
        return cls.of({name: [row[name] for row in rows] for name in rows[0]})

    def _columns(self) -> Columns:
        rows = np.atleast_1d(np.asarray(self))
        return {name: rows[name] for name in self.dtype.names or ()}

    def _repr_html_(self) -> str:
        names = self.dtype.names or ()
        rows = ([_cell(row[name]) for name in names] for row in np.atleast_1d(np.asarray(self))[:_SHOWN])
        more = f"<p>{self.size - _SHOWN:,} more rows</p>" if self.size > _SHOWN else ""
        return table_html(names, rows) + more


def _cell(value: Any) -> str:
    if isinstance(value, (float, np.floating)):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, (int, np.integer)) else str(value)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Simulation:
    """Result of a replay of T windows, L layers and n rebalances. Arrays are read-only.

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
    first_window: int
    """Number of window 0 in the recording, where that numbers its windows one by one, else 0."""
    mean_load: FloatArray
    """Load that each rank would have if all were even, `[T, L]`: the sum over the sum of the speeds."""
    max_load: FloatArray
    """Load over speed of the fullest rank, `[T, L]`: the time of the layer."""
    balancedness: FloatArray
    """`mean_load / max_load`, `[T, L]`; NaN without load."""
    window_balancedness: FloatArray
    """Mean over layers, `[T]`; NaN for a window without load."""
    bound: FloatArray
    """Mean over layers of what no layout of these slots exceeds, `[T]`, equal within an interval; NaN if not asked."""
    step_s: FloatArray
    """Time of each layer in a pass, `[T, L]`: seconds, or without a cost the fullest rank's tokens over its speed."""
    exchange_s: FloatArray
    """Time of the all-to-all within `step_s`, `[T, L]`; 0 where the cost says nothing of it."""
    exchange_bytes: FloatArray
    """Bytes of the all-to-all in a pass, all layers together, within nodes and between them, `[T, 2]`."""
    nodes_per_token: FloatArray
    """Nodes that a token reaches, its own included where that computes any of its experts, `[T, L]`; NaN where
    tokens are not known."""
    sends_per_token: FloatArray
    """Nodes besides its own that a token reaches, `[T, L]`; NaN where tokens are not known."""
    rank_load: FloatArray
    """Tokens that each rank computes, all layers together, `[T, R]`."""
    layer_rank_load: FloatArray | None
    """The same by layer, `[T, L, R]`, where `keep_ranks` was set."""
    rebalance_windows: IntArray
    """The window before which each rebalance took effect, `[n]`."""
    transfers: IntArray
    """Experts that ranks had to receive, `[n, L]`."""
    link_transfers: IntArray
    """Slots that a rebalance refilled, by the source of the expert, `[n, L, 3]`: same rank, same node, another node."""
    pause_s: FloatArray
    """Time that passes lose to each rebalance, `[n]`."""
    memory_bytes: float
    """Bytes of the redundant experts of all layers on the rank with most of them; 0 without a cost."""
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
        """Bytes by link, `[3]`: within the rank, within the node, between nodes; zeros without a cost."""
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
        """Per `interval`: first window, window after the last, mean balancedness, transfers before its windows."""
        windows = len(self.balancedness)
        moved = np.zeros(windows, dtype=np.int64)
        moved[self.rebalance_windows] = self.transfers.sum(axis=1)
        stretches = [(start, min(start + self.interval, windows)) for start in range(0, windows, self.interval)]
        return [(a, b, mean_of_known(self.balancedness[a:b]), int(moved[a:b].sum())) for a, b in stretches]

    def windows(self) -> Records:
        """A row per window and layer: balancedness, loads, time."""
        windows, layers = self.balancedness.shape
        window, layer = np.divmod(np.arange(windows * layers), max(layers, 1))
        return Records.of(
            {
                "window": window,
                "layer": layer,
                "scored": window >= self.scored_from,
                "balancedness": self.balancedness.ravel(),
                "mean_load": self.mean_load.ravel(),
                "max_load": self.max_load.ravel(),
                "step_s": self.step_s.ravel(),
            }
        )

    def moves(self) -> Records:
        """A row per rebalance and layer: slots filled, by link, and bytes."""
        rebalances, layers, _ = self.link_transfers.shape
        rebalance, layer = np.divmod(np.arange(rebalances * layers), max(layers, 1))
        size = 0.0 if self.cost is None else self.cost.model.expert_bytes
        by_link = self.link_transfers.reshape(-1, 3)
        return Records.of(
            {
                "rebalance": rebalance,
                "window": self.rebalance_windows[rebalance],
                "layer": layer,
                "rank_copies": by_link[:, 0],
                "node_transfers": by_link[:, 1],
                "network_transfers": by_link[:, 2],
                "wire_bytes": by_link[:, 1:].sum(axis=1) * size,
            }
        )

    def summary(self) -> dict[str, Any]:
        """One row of a comparison or sweep: settings and totals as plain values, of sends where tokens are known."""
        rank, node, network = self.link_transfers.sum(axis=(0, 1)).tolist()
        _, node_bytes, network_bytes = self.transfer_bytes.tolist()
        return {
            "policy": self.policy,
            "dispatch": self.dispatch,
            "num_ranks": self.topology.num_ranks,
            "num_nodes": self.topology.num_nodes,
            "num_slots": self.num_slots,
            "redundant": self.num_slots - self.layout.num_experts,
            "interval": self.interval,
            "history": self.history,
            "mean_balancedness": self.mean_balancedness,
            "total_balancedness": self.total_balancedness,
            "rebalances": len(self.rebalance_windows),
            "rank_copies": rank,
            "node_transfers": node,
            "network_transfers": network,
            "node_bytes": node_bytes,
            "network_bytes": network_bytes,
            "pass_s": self.pass_s,
            "pause_s": float(self.pause_s.sum()),
            "longest_pause_s": float(self.pause_s.max(initial=0.0)),
            "total_s": self.total_s,
            "exchange_s": float(self.exchange_s[self.scored_from :].sum(axis=1).mean()),
            "exchange_node_bytes": float(self.exchange_bytes[self.scored_from :, 0].mean()),
            "exchange_network_bytes": float(self.exchange_bytes[self.scored_from :, 1].mean()),
            **self._reached(),
            "memory_bytes": self.memory_bytes,
        }

    def _reached(self) -> dict[str, float]:
        """Means of the scored windows, where tokens are known."""
        found = {"nodes_per_token": self.nodes_per_token, "sends_per_token": self.sends_per_token}
        if np.isnan(self.sends_per_token).all():
            return {}
        return {name: mean_of_known(values[self.scored_from :]) for name, values in found.items()}

    def __repr__(self) -> str:
        return (
            f"Simulation(policy={self.policy!r}, dispatch={self.dispatch!r}, num_slots={self.num_slots}, "
            f"interval={self.interval}, total_balancedness={self.total_balancedness:.4f}, "
            f"transfers={self.total_transfers})"
        )

    def _repr_html_(self) -> str:
        return f"<div>{summary_table([self])}{line_svg([self.window_balancedness])}</div>"


def summary_table(sims: Sequence[Simulation]) -> str:
    """An HTML table: a row per replay, with times and memory where all have a cost."""
    costs = all(sim.cost is not None for sim in sims)
    head = ["policy", "total balancedness", "mean balancedness", "transfers", "network"]
    head += ["ms per pass", "of it all-to-all", "s of pauses", "GB per rank"] if costs else []
    known = all(sim.topology.num_nodes > 1 and sim._reached() for sim in sims)
    head += ["sends per token"] if known else []
    rows = []
    for sim in sims:
        facts = sim.summary()
        row = [sim.policy, number(sim.total_balancedness), number(sim.mean_balancedness)]
        row += [f"{sim.total_transfers:,}", f"{facts['network_transfers']:,}"]
        if costs:
            row += [
                f"{facts['pass_s'] * 1e3:.4g}",
                f"{facts['exchange_s'] * 1e3:.4g}",
                f"{facts['pause_s']:.3g}",
                f"{facts['memory_bytes'] / 1e9:.3g}",
            ]
        row += [f"{facts['sends_per_token']:.3f}"] if known else []
        rows.append([*row, sim.dispatch, sim.num_slots, sim.interval])
    return table_html([*head, "dispatch", "slots", "interval"], rows)


def time_over_mean(rank_load: FloatArray, rank_speed: FloatArray) -> FloatArray:
    """Time of each rank over the mean of its window, `[T, R]`; NaN in windows without load."""
    time = rank_load / rank_speed
    mean = time.mean(axis=1, keepdims=True)
    share: FloatArray = np.divide(time, mean, out=np.full(time.shape, np.nan), where=mean > 0)
    return share


def averaged(values: FloatArray, step: int) -> FloatArray:
    """Mean of each `step` neighbours along the first axis; NaN only where all are."""
    if step == 1:
        return values
    starts = np.arange(0, len(values), step)
    known = ~np.isnan(values)
    count = np.add.reduceat(known.astype(np.float64), starts, axis=0)
    total = np.add.reduceat(np.where(known, values, 0.0), starts, axis=0)
    means: FloatArray = np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)
    return means
