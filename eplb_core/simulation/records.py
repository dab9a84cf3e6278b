"""Results as tables: text for a terminal, numpy records for everything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from eplb_core._html import table_html
from eplb_core.cli.terminal import number

if TYPE_CHECKING:
    from eplb_core.simulation.result import Simulation

_SHOWN = 12


class Records(np.recarray[Any, Any]):
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

    def to_pandas(self) -> Any:
        """A pandas DataFrame of the rows.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise ImportError("`to_pandas` needs pandas: pip install pandas") from None
        return pandas.DataFrame({name: np.array(self[name]) for name in self.dtype.names or ()})

    def _repr_html_(self) -> str:
        names = self.dtype.names or ()
        rows = ([_cell(row[name]) for name in names] for row in np.atleast_1d(np.asarray(self))[:_SHOWN])
        more = f"<p>{self.size - _SHOWN:,} more rows</p>" if self.size > _SHOWN else ""
        return table_html(names, rows) + more


def _cell(value: Any) -> str:
    if isinstance(value, (float, np.floating)):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, (int, np.integer)) else str(value)


def window_records(sim: Simulation) -> Records:
    """A row for each window and layer."""
    windows, layers = sim.balancedness.shape
    window, layer = np.divmod(np.arange(windows * layers), max(layers, 1))
    return Records.of(
        {
            "window": window,
            "layer": layer,
            "scored": window >= sim.scored_from,
            "balancedness": sim.balancedness.ravel(),
            "mean_load": sim.mean_load.ravel(),
            "max_load": sim.max_load.ravel(),
            "step_s": sim.step_s.ravel(),
        }
    )


def move_records(sim: Simulation) -> Records:
    """A row for each rebalance and layer."""
    rebalances, layers, _ = sim.link_transfers.shape
    rebalance, layer = np.divmod(np.arange(rebalances * layers), max(layers, 1))
    size = 0.0 if sim.cost is None else sim.cost.model.expert_bytes
    by_link = sim.link_transfers.reshape(-1, 3)
    return Records.of(
        {
            "rebalance": rebalance,
            "window": sim.rebalance_windows[rebalance],
            "layer": layer,
            "rank_copies": by_link[:, 0],
            "node_transfers": by_link[:, 1],
            "network_transfers": by_link[:, 2],
            "wire_bytes": by_link[:, 1:].sum(axis=1) * size,
        }
    )


def summary(sim: Simulation) -> dict[str, Any]:
    """One row of a comparison or sweep: settings and totals as plain values."""
    rank, node, network = sim.link_transfers.sum(axis=(0, 1)).tolist()
    _, node_bytes, network_bytes = sim.transfer_bytes.tolist()
    return {
        "policy": sim.policy,
        "dispatch": sim.dispatch,
        "num_ranks": sim.topology.num_ranks,
        "num_nodes": sim.topology.num_nodes,
        "num_slots": sim.num_slots,
        "redundant": sim.num_slots - sim.layout.num_experts,
        "interval": sim.interval,
        "history": sim.history,
        "mean_balancedness": sim.mean_balancedness,
        "total_balancedness": sim.total_balancedness,
        "rebalances": len(sim.rebalance_windows),
        "rank_copies": rank,
        "node_transfers": node,
        "network_transfers": network,
        "node_bytes": node_bytes,
        "network_bytes": network_bytes,
        "pass_s": sim.pass_s,
        "pause_s": float(sim.pause_s.sum()),
        "longest_pause_s": float(sim.pause_s.max(initial=0.0)),
        "total_s": sim.total_s,
        "memory_bytes": sim.memory_bytes,
    }


def table(simulations: Sequence[Simulation]) -> str:
    """Replays of one trace side by side: balancedness and transfers of each stretch, then the totals."""
    lines = [
        " " * 11 + "".join(f"{sim.policy[:16]:>18}" for sim in simulations),
        f"{'windows':<11}" + f"{'bal.':>8}{'transfers':>10}" * len(simulations),
    ]
    per_sim = [sim.blocks() for sim in simulations]
    for at, (start, end, _, _) in enumerate(per_sim[0]):
        cells = "".join(f"{number(blocks[at][2]):>8}{blocks[at][3]:>10,}" for blocks in per_sim)
        lines.append(f"{f'{start}-{end - 1}':<11}{cells}" + _scored(start, end, simulations[0].scored_from))
    lines.append("-" * len(lines[1]))
    lines.append(
        f"{'mean':<11}" + "".join(f"{number(s.mean_balancedness):>8}{s.total_transfers:>10,}" for s in simulations)
    )
    lines.append(f"{'total':<11}" + "".join(f"{number(s.total_balancedness):>8}{'':>10}" for s in simulations))
    lines.append("bal. = mean / max load of the ranks, 1 is best; mean of layers, mean of windows;")
    lines.append("total = sum of means / sum of maxima; transfers = experts received, all layers")
    return "\n".join(line.rstrip() for line in lines)


def _scored(start: int, end: int, scored_from: int) -> str:
    return "  unscored" if end <= scored_from else "  partly scored" if start < scored_from else ""
