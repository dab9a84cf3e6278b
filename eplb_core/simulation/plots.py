"""Pictures of load, layouts, moves and replays: each function returns a matplotlib figure, which a notebook shows.

They are readable in black and white: marks and line styles differ, and scales run from dark to light. An axis that does
not start at 0 says where it starts. They need the extra `notebook`.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from eplb_core._arrays import ArrayLike, FloatArray, IntArray, check_id, check_kind, check_load, to_reals
from eplb_core.layout import ExpertLayout
from eplb_core.metrics import mean_of_known, mean_over_top, rank_load
from eplb_core.placement.affinity.pairs import check_pairs, pair_counts
from eplb_core.simulation.load.sources import TokenTrace
from eplb_core.simulation.result import Simulation, averaged, time_over_mean
from eplb_core.trace import Trace, check_trace_load, hottest_over_mean

_STYLES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"), ((0, (5, 1)), "v"), ((0, (1, 3)), "P"))
_SHADES = ("black", "0.45", "tab:blue", "tab:red", "tab:green", "tab:purple")
_HEAT = "cividis"
# What axes call columns of a sweep.
_COLUMNS = {
    "transfers": "experts moved between ranks",
    "bytes": "bytes moved between ranks",
    "redundant": "redundant experts",
    "interval": "windows between rebalances",
    "pass_s": "s of a pass",
    "pause_s": "s of pauses",
    "total_s": "s of passes and pauses",
    "memory_bytes": "bytes of redundant experts on a rank",
}
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


def plot_load(
    trace: Trace | TokenTrace | ArrayLike, *, layer: int | None = None, pairs: ArrayLike | None = None
) -> Any:
    """What is the load like, before any placement? One layer's experts over windows, skew and drift of all layers.

    Drift is the share of tokens that go to other experts than in the first window, and than in the window before: where
    the first lies clearly above the second, traffic has changed and not only fluctuated.

    Args:
        trace: A trace, windows of load `[T, L, E]` or `[L, E]`, or tokens.
        layer: Row whose experts are shown. Default: the most uneven one.
        pairs: `pair_counts` of that layer `[E, E]` or of all `[L, E, E]`: which experts tokens use together is shown as
            the count over what chance would give. Default: counted where `trace` is tokens.

    Raises:
        ValueError: No load, none on that layer, or `pairs` are no counts of these experts.
        IndexError: No such layer.
    """
    load = trace.load if isinstance(trace, (Trace, TokenTrace)) else check_trace_load(trace)
    total = load.sum(axis=0, dtype=np.float64)
    skew = hottest_over_mean(total)
    if not total.any():
        raise ValueError(f"`trace` (shape {list(load.shape)}) must have tokens")
    row = int(np.nanargmax(skew)) if layer is None else check_id(layer, "layer", len(total))
    if not total[row].any():
        raise ValueError(f"`layer` (={row}) has no tokens; name another one")
    ids = trace.layer_ids if isinstance(trace, Trace) else ()
    named = f"layer {ids[row] if ids else row}"
    if pairs is None and isinstance(trace, TokenTrace):
        pairs = pair_counts(trace.topk_ids[:, row], trace.num_experts)
    order = np.argsort(-total[row], kind="stable")
    picture = figure(9.0 if pairs is None else 12.0, 6.4)
    panels = [["load", "load"], ["skew", "drift"]]
    if pairs is not None:
        panels = [["load", "load", "pairs"], ["skew", "drift", "pairs"]]
    axes = picture.subplot_mosaic(panels, height_ratios=(3, 2))
    _experts_over_windows(picture, axes["load"], load[:, row, order], order, named)
    shares = -np.sort(-total, axis=1)[skew == skew] / total[skew == skew].mean(axis=1, keepdims=True)
    at = np.arange(len(order))
    axes["skew"].fill_between(at, shares.min(axis=0), shares.max(axis=0), color="0.85", label="all layers")
    axes["skew"].plot(at, total[row, order] / total[row].mean(), color="black", label=named)
    axes["skew"].axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes["skew"].set(xlabel="experts, hottest first", ylabel="load / mean", ylim=(0, None))
    axes["skew"].set_title(f"skew: hottest expert {skew[row]:.1f} x mean", loc="left", fontsize=10)
    for number, label in enumerate(("since the first window", "since the window before")):
        x, y = _thinned(_distance(load, before=number == 1))
        axes["drift"].plot(x, y, label=label, markersize=4, markevery=max(1, len(x) // 8), **_look(number))
    axes["drift"].set(xlabel="window", ylabel="share (mean of layers)", ylim=(0, None), xlim=(-0.5, len(load) - 0.5))
    axes["drift"].set_title("drift: tokens on other experts", loc="left", fontsize=10)
    for name in ("skew", "drift"):
        axes[name].legend(frameon=False, fontsize=8)
    _clean(axes["skew"], axes["drift"])
    for name in ("load", "drift"):
        axes[name].xaxis.get_major_locator().set_params(integer=True)
    if pairs is not None:
        _used_together(picture, axes["pairs"], _pairs_of(pairs, row, load.shape), order, named)
    return picture


def plot_together(pairs: ArrayLike, layouts: Mapping[str, ExpertLayout], *, layer: int = 0) -> Any:
    """Are experts that tokens use together on one node? A map for each layout, its experts in the order of their nodes.

    An expert stands in the node of most of its replicas, the first of equals; lines part the nodes.

    Args:
        pairs: `pair_counts` of that layer `[E, E]` or of all `[L, E, E]`.
        layouts: By title, as in `{"before": live, "after": placed.layout}`; of the same layers and experts.
        layer: Layer of the layouts.

    Raises:
        ValueError: No layout, or `pairs` are no counts of these experts.
        IndexError: No such layer.
    """
    if not layouts:
        raise ValueError("`layouts` (={}) must hold one layout or more")
    picture = figure(6.0 * len(layouts), 5.2)
    for at, (title, layout) in enumerate(layouts.items()):
        check_kind(layout, "layouts", ExpertLayout)
        row = check_id(layer, "layer", layout.num_layers)
        mine = _pairs_of(pairs, row, (1, layout.num_layers, layout.num_experts))
        held = np.zeros((layout.num_experts, layout.topology.num_nodes), dtype=np.int64)
        slots = layout.physical_to_logical_map[row]
        filled = np.flatnonzero(slots >= 0)
        np.add.at(held, (slots[filled], layout.topology.rank_to_node[filled // layout.slots_per_rank]), 1)
        node = held.argmax(axis=1)
        order = np.argsort(node, kind="stable")
        off = mine * (1.0 - np.eye(len(mine)))
        near = float(off[(held > 0).astype(int) @ (held > 0).T > 0].sum() / max(off.sum(), 1e-300))
        axes = picture.add_subplot(1, len(layouts), at + 1)
        _used_together(picture, axes, mine, order, title)
        for edge in np.flatnonzero(np.diff(node[order])) + 0.5:
            axes.axhline(edge, color="black", linewidth=0.8)
            axes.axvline(edge, color="black", linewidth=0.8)
        axes.set(xlabel="expert (id), node by node")
        axes.set_title(f"{title}: {near:.0%} of pairs have a node with both", loc="left", fontsize=10)
    return picture


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
    _say_start(axes)
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
    _say_start(above)
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
    """What does a new layout change? One layer's ranks (default: of the least even one), and the balance of all layers.

    The bars are of all windows together; balancedness is the mean over windows, as in `Placement`, and so is lower.
    """
    load = check_load(expert_load, "expert_load", (2, 3))
    load = load if load.ndim == 3 else load[None]
    by_window = [rank_load(layout, load) for layout in (before, after)]
    ranks = [each.sum(axis=0) / before.topology.rank_speed for each in by_window]
    even = [_balance(each, before.topology.rank_speed) for each in by_window]
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
    left.set_title(f"layer {layer}: {even[0][layer]:.3f} to {even[1][layer]:.3f} balanced", loc="left", fontsize=10)
    left.legend(frameon=False, fontsize=8)
    order = np.argsort(even[0])
    right.plot(even[0][order], "o", color="0.45", fillstyle="none", markersize=4, label="before")
    right.plot(even[1][order], "s", color="black", markersize=3, label="after")
    right.set(xlabel="layers, least even first", ylabel="balancedness")
    right.set_title("all layers, mean over windows", loc="left", fontsize=10)
    right.set_ylim(top=1.01)
    _say_start(right)
    right.legend(frameon=False, fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2))  # hides no point
    _clean(left, right)
    return picture


def plot_frontier(
    rows: Any, *, x: str = "transfers", y: str = "total_balancedness", by: str = "policy", title: str | None = None
) -> Any:
    """What balance does how much moving buy? One point per row of a comparison or sweep, one line per policy.

    Args:
        rows: Records of `sweep` or `Comparison.rows`.
        x: A column, or "transfers" or "bytes": all that crosses wires.
        y: A column.
        by: The column whose values get a line each.
        title: Default: the names of both columns.
    """
    picture = figure(6.4, 4.0)
    axes = picture.add_subplot()
    sums = {"transfers": ("node_transfers", "network_transfers"), "bytes": ("node_bytes", "network_bytes")}
    across = sum(rows[name] for name in sums[x]) if x in sums else rows[x]
    for number, value in enumerate(dict.fromkeys(rows[by].tolist())):
        mine = rows[by] == value
        order = np.argsort(across[mine], kind="stable")
        axes.plot(across[mine][order], rows[y][mine][order], fillstyle="none", label=str(value), **_look(number))
    across_label, up_label = (_COLUMNS.get(name, name.replace("_", " ")) for name in (x, y))
    axes.set_title(title or f"{up_label} over {across_label}", loc="left", fontsize=10)
    axes.set(xlabel=across_label, ylabel=up_label)
    if across.min() > 0 and across.max() > 30 * across.min():
        axes.set_xscale("log")
        axes.set_xlabel(f"{across_label} (log scale)")
    elif across.min() >= 0:
        axes.set_xlim(left=-0.03 * float(across.max()) if across.max() else None)
    _say_start(axes)
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


def _experts_over_windows(picture: Any, axes: Any, load: FloatArray | IntArray, order: IntArray, named: str) -> None:
    mean = load.mean(axis=1, keepdims=True, dtype=np.float64)
    share = np.divide(load, mean, out=np.full(load.shape, np.nan), where=mean > 0)
    top = float(np.nanpercentile(share, 99.5))  # one burst would leave all else dark
    image = axes.imshow(share.T, aspect="auto", cmap=_HEAT, interpolation="nearest", vmin=0.0, vmax=max(top, 1.0))
    ticks = np.unique(np.linspace(0, len(order) - 1, 9).astype(np.int64))
    axes.set_yticks(ticks, [str(expert) for expert in order[ticks].tolist()], fontsize=8)
    axes.set(xlabel="window", ylabel="expert (id), hottest first")
    axes.set_title(f"{named}: load of its experts", loc="left", fontsize=10)
    beyond = "max" if np.nanmax(share) > top else "neither"
    picture.colorbar(image, ax=axes, label="load / mean of the window", extend=beyond)


def _balance(rank_loads: FloatArray, speed: FloatArray) -> FloatArray:
    """Balancedness of each layer, mean over windows with load, `[L]`; NaN without any."""
    each = mean_over_top(rank_loads.sum(axis=2) / speed.sum(), (rank_loads / speed).max(axis=2))
    return np.array([mean_of_known(layer) for layer in each.T])


def _distance(load: FloatArray | IntArray, *, before: bool) -> FloatArray:
    """Share of tokens that go to other experts than in the window before or the first one, mean of layers, `[T]`."""
    total = load.sum(axis=2, keepdims=True, dtype=np.float64)
    share = np.divide(load, total, out=np.full(load.shape, np.nan), where=total > 0)
    with_load = np.flatnonzero((total > 0).all(axis=1)[:, 0])
    first = share[with_load[0]] if with_load.size else share[0]
    other = np.concatenate([share[:1] * np.nan, share[:-1]]) if before else first
    apart = np.abs(share - other).sum(axis=2) / 2
    if with_load.size and not before:
        apart[with_load[0]] = np.nan  # itself
    return np.array([mean_of_known(each) for each in apart])


def _pairs_of(pairs: ArrayLike, row: int, shape: tuple[int, ...]) -> FloatArray:
    counts = to_reals(pairs, "pairs")
    _, layers, experts = shape
    if counts.shape not in {(experts, experts), (layers, experts, experts)}:
        fits = f"[{experts}, {experts}] or [{layers}, {experts}, {experts}], as `pair_counts` gives"
        raise ValueError(f"`pairs` (shape {list(counts.shape)}) must be {fits}")
    mine = counts if counts.ndim == 2 else counts[row]
    check_pairs(mine[None], 1, experts)
    return mine


def _used_together(picture: Any, axes: Any, pairs: FloatArray, order: IntArray, named: str) -> None:
    """Pair counts over what chance gives: the product of how often each expert is in a pair."""
    counts = pairs[np.ix_(order, order)] * (1.0 - np.eye(len(order)))  # an expert is no pair with itself
    each = counts.sum(axis=1)
    chance = each[:, None] * each[None, :]
    np.fill_diagonal(chance, 0.0)
    chance *= counts.sum() / max(float(chance.sum()), 1e-300)
    lift = np.divide(counts, chance, out=np.full(counts.shape, np.nan), where=chance > 0)
    known = lift[np.isfinite(lift)]
    top = max(float(np.percentile(known, 99.5)), 1.0) if known.size else 1.0
    image = axes.imshow(lift, cmap=_HEAT, interpolation="nearest", vmin=0.0, vmax=top)
    ticks = np.unique(np.linspace(0, len(order) - 1, 5).astype(np.int64))
    axes.set_xticks(ticks, order[ticks].tolist(), fontsize=8)
    axes.set_yticks(ticks, order[ticks].tolist(), fontsize=8)
    axes.set(xlabel="expert (id), hottest first", ylabel="expert (id)")
    axes.set_title(f"{named}: used by one token", loc="left", fontsize=10)
    more = known.size and known.max() > top
    picture.colorbar(image, ax=axes, label="tokens / tokens by chance", extend="max" if more else "neither", shrink=0.5)


def _say_start(axes: Any) -> None:
    """Write on a vertical axis that does not start at 0 where it starts."""
    low, _ = axes.get_ylim()
    if low > 0:
        axes.set_ylabel(f"{axes.get_ylabel()}\n(axis starts at {low:.3g})")
    else:
        axes.set_ylim(bottom=0.0)


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
