"""Pictures of layouts, moves and replays: each function returns a matplotlib figure, which a notebook shows.

They are readable in black and white: marks and line styles differ, and scales run from dark to light. They need the
extra `notebook`.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import numpy as np

from eplb_core._arrays import ArrayLike, FloatArray, IntArray, check_load
from eplb_core.layout import ExpertLayout
from eplb_core.metrics import balancedness, rank_load
from eplb_core.simulation.result import Simulation, averaged, time_over_mean

_STYLES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"), ((0, (5, 1)), "v"), ((0, (1, 3)), "P"))
_SHADES = ("black", "0.45", "tab:blue", "tab:red", "tab:green", "tab:purple")
_HEAT = "cividis"
# With more points on a line, neighbours are averaged.
_POINTS = 80


def figure(width: float, height: float) -> Any:
    """An empty figure that shows itself in a notebook, whatever the backend.

    Raises:
        ImportError: matplotlib is not installed; the text says how to get it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("pictures need matplotlib: pip install 'eplb-core[notebook]'") from None

    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            stream = io.BytesIO()
            self.savefig(stream, format="png", dpi=88)
            return stream.getvalue()

    return Picture(figsize=(width, height), layout="constrained")


def plot_balance(simulations: Iterable[Simulation], *, title: str = "Balance on windows not seen before") -> Any:
    """How even were the ranks over time? One line per policy, and the bound if it was computed."""
    simulations = tuple(simulations)
    picture = figure(8.0, 3.6)
    axes = picture.add_subplot()
    for number, sim in enumerate(simulations):
        label = f"{sim.policy}: {sim.total_balancedness:.3f}, {sim.total_transfers:,} transfers"
        _line(axes, sim, number, label)
    bounds = [sim.bound for sim in simulations if not np.isnan(sim.bound).all()]
    if bounds:
        x, y = _thinned(bounds[0])
        axes.plot(x, y, color="black", linewidth=2.5, alpha=0.25, label="no layout does better")
    _over_windows(axes, simulations[0])
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel("window")
    picture.legend(frameon=False, fontsize=8, ncols=2, loc="outside lower center")
    return picture


def plot_simulation(sim: Simulation) -> Any:
    """One replay: how even the ranks were over time, and what each of them computed."""
    picture = figure(8.0, 5.4)
    above, below = picture.subplots(2, 1, sharex=True, height_ratios=(2, 3))
    _line(above, sim, 0, sim.policy)
    if not np.isnan(sim.bound).all():
        above.plot(*_thinned(sim.bound), color="black", linewidth=2.5, alpha=0.25, label="no layout does better")
        above.legend(frameon=False, fontsize=8)
    _over_windows(above, sim)
    text = f"{sim.policy}: the average rank works {sim.total_balancedness:.1%} of the time"
    above.set_title(text, loc="left", fontsize=10)
    _heat(picture, below, sim, None)
    return picture


def plot_rank_load(sim: Simulation, *, layer: int | None = None) -> Any:
    """What did each rank compute, window by window? All layers together, or one (`keep_ranks=True`)."""
    picture = figure(8.0, 3.6)
    axes = picture.add_subplot()
    _heat(picture, axes, sim, layer)
    axes.set_title(
        f"{sim.policy}: load of the ranks{'' if layer is None else f' on layer {layer}'}", loc="left", fontsize=10
    )
    return picture


def plot_before_after(
    before: ExpertLayout, after: ExpertLayout, expert_load: ArrayLike, *, layer: int | None = None
) -> Any:
    """What does a new layout change? The ranks of one layer (default: the least even one), and all layers."""
    load = check_load(expert_load, "expert_load", (2, 3))
    load = load if load.ndim == 2 else load.sum(axis=0)
    ranks = [rank_load(layout, load) / layout.topology.rank_speed for layout in (before, after)]
    even = [balancedness(each) for each in ranks]
    if layer is None:
        layer = int(np.nanargmin(even[0])) if not np.isnan(even[0]).all() else 0
    picture = figure(8.0, 3.4)
    left, right = picture.subplots(1, 2, width_ratios=(3, 2))
    at = np.arange(before.topology.num_ranks)
    mean = max(float(ranks[1][layer].mean()), 1e-300)
    left.bar(at - 0.2, ranks[0][layer] / mean, 0.4, color="0.75", edgecolor="black", linewidth=0.5, label="before")
    left.bar(at + 0.2, ranks[1][layer] / mean, 0.4, color="0.25", edgecolor="black", linewidth=0.5, label="after")
    left.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    left.set(xlabel="rank", ylabel="load / mean")
    left.set_title(f"layer {layer}: {even[0][layer]:.3f} to {even[1][layer]:.3f}", loc="left", fontsize=10)
    left.legend(frameon=False, fontsize=8)
    order = np.argsort(even[0])
    right.plot(even[0][order], "o", color="0.45", fillstyle="none", markersize=4, label="before")
    right.plot(even[1][order], "s", color="black", markersize=3, label="after")
    right.set(xlabel="layers, least even first", ylabel="balancedness")
    right.set_ylim(top=1.01)
    right.legend(frameon=False, fontsize=8)
    _clean(left, right)
    return picture


def plot_frontier(rows: Any, *, x: str = "transfers", y: str = "total_balancedness", by: str = "policy") -> Any:
    """What balance does how much moving buy? One point per row of a comparison or sweep, one line per policy.

    Args:
        rows: Records of `sweep` or `Comparison.rows`.
        x: A column, or "transfers" or "bytes": all that crosses wires.
        y: A column.
        by: The column whose values get a line each.
    """
    picture = figure(6.4, 4.0)
    axes = picture.add_subplot()
    sums = {"transfers": ("node_transfers", "network_transfers"), "bytes": ("node_bytes", "network_bytes")}
    across = sum(rows[name] for name in sums[x]) if x in sums else rows[x]
    for number, value in enumerate(dict.fromkeys(rows[by].tolist())):
        mine = rows[by] == value
        order = np.argsort(across[mine], kind="stable")
        axes.plot(across[mine][order], rows[y][mine][order], fillstyle="none", label=str(value), **_look(number))
    if across.min() > 0 and across.max() > 30 * across.min():
        axes.set_xscale("log")
    names = {
        "transfers": "experts moved between ranks",
        "bytes": "bytes moved between ranks",
        "redundant": "redundant experts",
    }
    axes.set(xlabel=names.get(x, x.replace("_", " ")), ylabel=y.replace("_", " "))
    axes.legend(frameon=False, fontsize=8, title=by.replace("_", " "), title_fontsize=8)
    axes.grid(True, linewidth=0.3)
    _clean(axes)
    return picture


def plot_replicas(layout: ExpertLayout, *, layer: int = 0) -> Any:
    """Which rank holds what? One row per rank, one cell per slot; darker = more replicas; x = twice on the rank."""
    ranks, size = layout.topology.num_ranks, layout.slots_per_rank
    row = layout.physical_to_logical_map[layer].reshape(ranks, size)
    count = np.where(row >= 0, layout.replica_count[layer][np.maximum(row, 0)], 0)
    picture = figure(max(3.6, 0.55 * size + 1.6), max(2.4, 0.24 * ranks + 1.0))
    axes = picture.add_subplot()
    shades = np.maximum(1.0 - 0.25 * np.maximum(count - 1, 0), 0.3)
    axes.imshow(shades, cmap="gray", vmin=0.0, vmax=1.0, aspect="auto")
    for rank in range(ranks):
        for slot in range(size):
            expert = int(row[rank, slot])
            pair = expert >= 0 and int((row[rank] == expert).sum()) > 1
            text = "-" if expert < 0 else f"{expert}{' x' if pair else ''}"
            dark = shades[rank, slot] < 0.55
            axes.text(slot, rank, text, ha="center", va="center", fontsize=7, color="white" if dark else "black")
    _separate_nodes(axes, layout.topology.rank_to_node, vertical=False)
    axes.set(xticks=range(size), yticks=range(0, ranks, 1 if ranks <= 32 else 8))
    axes.set(xlabel="slot of the rank", ylabel="rank")
    title = f"layer {layer}: white = one replica, darker = up to {int(count.max())}"
    axes.set_title(title, loc="left", fontsize=9)
    return picture


def plot_moves(old: ExpertLayout, new: ExpertLayout, *, layer: int | None = None) -> Any:
    """Which experts move where? From rank to rank: how many over all layers, or which on one layer."""
    moves = list_moves(old, new, layer)
    ranks = old.topology.num_ranks
    count = np.zeros((ranks, ranks), dtype=np.int64)
    np.add.at(count, (moves[:, 2], moves[:, 3]), 1)
    picture = figure(min(9.0, 0.32 * ranks + 3.0), min(8.0, 0.28 * ranks + 2.0))
    axes = picture.add_subplot()
    named = layer is not None and len(moves) <= 4 * ranks
    shown = np.where(count > 0, count, np.nan)
    scale = {"cmap": "Greys", "vmin": 0, "vmax": 4 * count.max()} if named else {"cmap": f"{_HEAT}_r", "vmin": 1}
    image = axes.imshow(shown, **scale)
    if named:
        for source, target in np.argwhere(count > 0).tolist():
            these = moves[(moves[:, 2] == source) & (moves[:, 3] == target), 1]
            axes.text(target, source, ",".join(map(str, these.tolist())), ha="center", va="center", fontsize=7)
    _separate_nodes(axes, old.topology.rank_to_node, vertical=True)
    axes.set(xlabel="to rank", ylabel="from rank")
    near = old.topology.rank_to_node[moves[:, 2]] == old.topology.rank_to_node[moves[:, 3]]
    where = "all layers" if layer is None else f"layer {layer}"
    text = f"{where}: {len(moves):,} experts move"
    if old.topology.num_nodes > 1:
        text += f", {int((~near).sum()):,} between nodes"
    axes.set_title(text, loc="left", fontsize=9)
    if layer is None:
        ticks = np.unique(np.linspace(1, max(int(count.max()), 1), 6).astype(np.int64))  # experts come whole
        picture.colorbar(image, ax=axes, label="experts", shrink=0.8, ticks=ticks)
    return picture


def list_moves(old: ExpertLayout, new: ExpertLayout, layer: int | None = None) -> IntArray:
    """Each expert that a rank receives: layer, expert, from rank, to rank, int64 `[n, 4]`.

    From a holder on the same node where there is one, of several from the one that has sent least so far on that layer.
    """
    old.check_same_frame(new)
    topology, size = old.topology, old.slots_per_rank
    moves = []
    for at in range(old.num_layers) if layer is None else [layer]:
        sent = np.zeros(topology.num_ranks, dtype=np.int64)
        before, after = old.physical_to_logical_map[at], new.physical_to_logical_map[at]
        for rank in np.flatnonzero((before != after).reshape(-1, size).any(axis=1)).tolist():
            mine = slice(rank * size, rank * size + size)
            had = set(before[mine].tolist())
            for expert in sorted(set(after[mine].tolist()) - had - {-1}):
                holders = [slot // size for slot in old.slots(at, expert)]
                near = [holder for holder in holders if topology.rank_to_node[holder] == topology.rank_to_node[rank]]
                source = min(near or holders, key=lambda holder: (sent[holder], holder))
                sent[source] += 1
                moves.append((at, expert, source, rank))
    return np.array(moves, dtype=np.int64).reshape(-1, 4)


# ---- parts of pictures -----------------------------------------------------------------------------------------------


def _line(axes: Any, sim: Simulation, number: int, label: str) -> None:
    x, y = _thinned(sim.window_balancedness)
    axes.plot(x, y, linewidth=1.1, label=label, markevery=max(1, len(x) // 10), markersize=4, **_look(number))


def _look(number: int) -> dict[str, Any]:
    """Style, mark and shade of the line of that number."""
    style, mark = _STYLES[number % len(_STYLES)]
    return {"linestyle": style, "marker": mark, "color": _SHADES[number % len(_SHADES)]}


def _thinned(values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Windows and values, neighbours averaged where there are too many."""
    step = -(-len(values) // _POINTS)
    starts = np.arange(0, len(values), step)
    ends = np.minimum(starts + step, len(values))
    return (starts + ends - 1) / 2, averaged(values, step)


def _over_windows(axes: Any, sim: Simulation) -> None:
    axes.axvspan(-0.5, sim.scored_from - 0.5, color="0.93", zorder=0)
    low, _ = axes.get_ylim()
    if sim.scored_from > 0.1 * len(sim.balancedness):  # else there is no room
        axes.text(sim.scored_from / 2 - 0.5, low, "not scored", ha="center", va="bottom", fontsize=7, color="0.4")
    axes.set_ylabel("balancedness")
    axes.set_xlim(-0.5, len(sim.balancedness) - 0.5)
    axes.grid(True, axis="y", linewidth=0.3)
    _clean(axes)


def _heat(picture: Any, axes: Any, sim: Simulation, layer: int | None) -> None:
    load = sim.rank_load
    if layer is not None:
        if sim.layer_rank_load is None:
            raise ValueError(f"`layer` (={layer}) needs a replay with `keep_ranks=True`")
        load = sim.layer_rank_load[:, layer]
    share = time_over_mean(load, sim.topology.rank_speed)
    image = axes.imshow(share.T, aspect="auto", cmap=_HEAT, interpolation="nearest", origin="lower")
    moving = sim.transfers.sum(axis=1) > 0
    for start in sim.rebalance_windows[moving].tolist():
        ends = ([start - 0.5] * 2, [1.0, 1.03])
        axes.plot(*ends, color="black", linewidth=0.8, clip_on=False, transform=axes.get_xaxis_transform())
    _separate_nodes(axes, sim.topology.rank_to_node, vertical=False)
    axes.set(xlabel="window; ticks above: experts move" if moving.any() else "window", ylabel="rank")
    picture.colorbar(image, ax=axes, label="time / mean of the window")


def _separate_nodes(axes: Any, rank_to_node: IntArray, *, vertical: bool) -> None:
    for rank in np.flatnonzero(np.diff(rank_to_node)).tolist():
        axes.axhline(rank + 0.5, color="black", linewidth=0.8)
        if vertical:
            axes.axvline(rank + 0.5, color="black", linewidth=0.8)


def _clean(*axes: Any) -> None:
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
