"""What the moves have cost, what they promised, and what they have brought on the windows since. Decides nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from eplb_core._arrays import BoolArray, FloatArray, IntArray, read_only
from eplb_core.balancer.memory import KEPT, Memory, view_of
from eplb_core.exposition import Placements
from eplb_core.layout import ExpertLayout
from eplb_core.metrics import mean_of_known, mean_over_top, rank_load, transfers
from eplb_core.placement.place import Placement
from eplb_core.placement.windows import add_windows
from eplb_core.placement.worth.pass_time import solved_balancedness
from eplb_core.topology import Topology


@dataclass(frozen=True, slots=True)
class BalancerReport:
    """What a Balancer takes the traffic for, and what its moves have brought. `print` it for words."""

    windows: int
    """Windows with load that were observed."""
    regime: str
    """"unknown" (fewer than 4 windows), "new" (fewer than 32 since a change or the start) or "settled"."""
    since: int
    """Window with which the present regime began, counted from 0."""
    changes: int
    """Changes of the traffic that were seen."""
    distance: float
    """Last distance of windows from those before, over the median of past ones; a change is above 3, or
    2.6 for a few windows. NaN at first."""
    price: float
    """Gain in balancedness that a transfer must bring now."""
    transfers: int
    """Transfers seen between the live layouts of calls of `propose`, without the first placement."""
    transfers_per_window: float
    """The same for each window since the first placement, all layers together; NaN before any."""
    bytes_per_window: float
    """The same in bytes; NaN where the cost model does not know an expert's bytes."""
    promised: float
    """Rise in balancedness that the last move of each layer promised, mean over layers moved; NaN where none did."""
    brought: float
    """The same, measured on the windows since: the row that is live against the one before it."""
    staying: tuple[int, ...]
    """Layers that stay as they are, because their moves have not brought what they cost."""

    def numbers(self) -> Mapping[str, float | int | str]:
        """All fields by name, for metrics; of `staying` how many."""
        return asdict(self) | {"staying": len(self.staying)}

    def __str__(self) -> str:
        if not self.windows:
            return "nothing was observed yet"
        began = "the start" if not self.changes else f"window {self.since}, the last of {self.changes} changes"
        words = [f"{self.windows} windows; traffic is {self.regime} since {began}"]
        words.append(f"a transfer must bring {self.price:.1e} of balancedness")
        if self.transfers_per_window == self.transfers_per_window:
            size = "" if self.bytes_per_window != self.bytes_per_window else f" ({self.bytes_per_window / 1e6:.1f} MB)"
            words.append(f"{self.transfers} transfers, {self.transfers_per_window:.2f} a window{size}")
        if self.brought == self.brought:
            words.append(f"the last moves promised {self.promised:+.4f} and have brought {self.brought:+.4f}")
        if self.staying:
            layers = ", ".join(map(str, self.staying))
            words.append(f"layers that stay, because their moves did not bring what they cost: {layers}")
        return "; ".join(words)


class Notes:
    """What was live, what came before it, and what was promised of it.

    Args:
        layers: Layers L.
        slots: Slots P of the live layouts.
    """

    def __init__(self, layers: int, slots: int) -> None:
        self.live: IntArray = np.full((layers, slots), -1, dtype=np.int64)
        self.before = self.live.copy()
        self.proposed = self.live.copy()
        self.offered: FloatArray = np.zeros(layers)
        self.promised: FloatArray = np.full(layers, np.nan)
        self.moved_at: IntArray = np.full(layers, -1, dtype=np.int64)
        self.first_at = -1
        self.transfers = 0

    def see(self, live: ExpertLayout, count: int) -> None:
        """Compare the live layout with the last one: what was installed, and was it what was proposed?"""
        rows = live.physical_to_logical_map
        changed = np.flatnonzero((rows != self.live).any(axis=1) & (self.live >= 0).any(axis=1))
        if changed.size:
            old = ExpertLayout._of_valid(np.where(self.live < 0, rows, self.live), live.num_experts, live.topology)
            received = int(transfers(old, live).sum())
            if self.first_at < 0:
                self.first_at = count
            else:
                self.transfers += received
            asked = (rows[changed] == self.proposed[changed]).all(axis=1)
            self.before[changed], self.moved_at[changed] = self.live[changed], count
            self.promised[changed] = np.where(asked, self.offered[changed], np.nan)
        self.live = rows.copy()

    def offer(self, placed: ExpertLayout, live: ExpertLayout, memory: Memory, weighted: bool) -> None:
        """Remember what is proposed, and what it promises: the rise on the windows that it was made for."""
        now, new = live.physical_to_logical_map, placed.physical_to_logical_map
        self.proposed, self.offered = new.copy(), np.zeros(len(new))
        layers = np.flatnonzero((now != new).any(axis=1))
        if layers.size:
            windows, weights = view_of(memory, layers, np.full(len(new), memory.count))
            after, before = (
                _mean_balance(table[layers], windows, weights, live.topology, weighted) for table in (new, now)
            )
            self.offered[layers] = after - before

    def measure(self, memory: Memory, topology: Topology, weighted: bool) -> tuple[float, float]:
        """What the last moves promised and have brought, mean over the layers with windows since; NaN without any."""
        promised = brought = 0.0
        number = 0
        for layer in np.flatnonzero((self.moved_at >= 0) & np.isfinite(self.promised)).tolist():
            since = np.arange(max(int(self.moved_at[layer]), memory.count - KEPT), memory.count) % KEPT
            windows, weights = np.ascontiguousarray(memory.shares[since, layer : layer + 1]), np.ones(len(since))
            rows = (table[layer : layer + 1] for table in (self.live, self.before))
            now, was = (float(_mean_balance(row, windows, weights, topology, weighted)[0]) for row in rows)
            if math.isfinite(now - was):
                promised, brought, number = promised + float(self.promised[layer]), brought + now - was, number + 1
        return (promised / number, brought / number) if number else (math.nan, math.nan)


def _mean_balance(
    rows: IntArray, windows: FloatArray, weights: FloatArray, topology: Topology, weighted: bool
) -> FloatArray:
    """Of rows `[L, P]` on windows `[T, L, E]` of some weight, `[L]`; NaN where there is no load."""
    if not len(windows):  # moved just now
        return np.full(len(rows), np.nan)
    layout = ExpertLayout._of_valid(rows, windows.shape[2], topology)
    if weighted:
        active, lost = np.ones(topology.num_ranks, dtype=np.bool_), np.zeros(len(rows), dtype=np.bool_)
        each = solved_balancedness(layout, read_only(windows), active, lost)
    else:
        ranks, speed = rank_load(layout, windows), topology.rank_speed
        each = mean_over_top(ranks.sum(axis=2) / speed.sum(), (ranks / speed).max(axis=2))
    known = np.isfinite(each)
    total = add_windows(known.astype(np.float64), weights)
    summed = add_windows(np.where(known, each, 0.0), weights)
    mean: FloatArray = np.divide(summed, total, out=np.full(len(rows), np.nan), where=total > 0.0)
    return mean


def tell(placements: Placements, load: FloatArray, live: ExpertLayout | None, placed: Placement) -> None:
    """Let operators see a placement.

    Args:
        placements: Where they look.
        load: What it was made for, `[L, E]` or `[T, L, E]`; kept, and must not change.
        live: What was live under that load; None = not known.
        placed: The answer.
    """
    layers, experts = load.shape[-2:]
    seen = partial(seen_balancedness, load, live, placed.dispatch == "weighted")
    placements.note(f"{layers}x{experts}", seen, mean_of_known(placed.balancedness), mean_of_known(placed.bound))


def seen_balancedness(load: FloatArray, live: ExpertLayout | None, weighted: bool) -> float:
    """Mean balancedness of a load over windows, layers and the ranks that hold experts; NaN without load or layout.

    Example:
        >>> live = ExpertLayout([[0, 1, 2, 0]], num_experts=3, topology=Topology(num_ranks=2))
        >>> seen_balancedness(np.array([[6.0, 2.0, 5.0]]), live, weighted=False)
        0.8125
    """
    if live is None:
        return math.nan
    windows, topology = load if load.ndim == 3 else load[None], live.topology
    by_rank = live.physical_to_logical_map.reshape(live.num_layers, topology.num_ranks, -1)
    active: BoolArray = np.any(by_rank >= 0, axis=(0, 2))
    if weighted:
        return mean_of_known(solved_balancedness(live, windows, active, np.zeros(live.num_layers, dtype=np.bool_)))
    ranks, speed = rank_load(live, windows)[..., active], topology.rank_speed[active]
    return mean_of_known(mean_over_top(ranks.sum(axis=-1) / speed.sum(), (ranks / speed).max(axis=-1)))
