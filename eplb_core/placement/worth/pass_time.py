"""How long a layer's pass takes under a layout, and how long its transfers."""

from __future__ import annotations

import numpy as np

from eplb_core._arrays import ArrayLike, BoolArray, FloatArray, IntArray
from eplb_core._numba import kernel
from eplb_core.layout import ExpertLayout
from eplb_core.metrics import check_load_of, check_shares
from eplb_core.placement.search.improve import score_weighted
from eplb_core.placement.worth.costs import CostModel


def check_windows(expert_load: ArrayLike, layout: ExpertLayout) -> FloatArray:
    """Load `[T, L, E]` that fits the layout; `[L, E]` becomes one window."""
    load = check_load_of(layout, expert_load)
    if load.ndim == 3 and len(load) == 0:
        raise ValueError(f"`expert_load` (shape {list(load.shape)}) must have one window or more")
    return load if load.ndim == 3 else load[None]


def time_layers(
    layout: ExpertLayout,
    load: FloatArray,
    active: BoolArray,
    shares: ArrayLike | None,
    name: str,
    model: CostModel,
    passes: float,
    weighted: bool = False,
) -> tuple[FloatArray, BoolArray]:
    """Seconds of each layer in a pass, mean over passes, and which layers have an expert without a live slot, `[L]`.

    Args:
        layout: Where the experts are.
        load: `[T, L, E]`.
        active: Ranks that live, `[R]`.
        shares: Of each slot, `[L, P]` or `[T, L, P]`; None = as `weighted` says.
        name: How the caller calls the shares.
        model: Seconds of a token, an expert and a layer.
        passes: Passes of a window.
        weighted: Live replicas share as is best for each window, not equally; experts are read as if equally.
    """
    windows, layers, _ = load.shape
    slots = layout.num_slots
    fraction = np.zeros((0, layers, slots))
    if shares is not None:
        fraction = check_shares(shares, layout, name, num_windows=windows, sums=bool(active.all()))
        fraction = fraction[None] if fraction.ndim == 2 else fraction
    # Not even a rank that took all tokens of all windows may overflow.
    most = float(load.max(initial=0.0))
    slowest = float(layout.topology.rank_speed.min()) * min(passes, 1.0)
    if not most * slots * windows * (model.token_s + model.expert_s) / slowest < np.inf:
        raise ValueError(f"`expert_load` (up to {most:g}) is too large to be timed in float64; scale it down")
    solved = weighted and shares is None
    p2l, speed = layout.physical_to_logical_map, layout.topology.rank_speed
    token_s = 0.0 if solved else model.token_s
    times, lost = _time_layers(load, p2l, active, fraction, speed, token_s, model.expert_s, passes)
    if solved:
        times += _solved_times(layout, load, active, lost) * model.token_s / passes
    times += model.layer_s
    times[lost] = np.inf
    return times, lost


def _solved_times(layout: ExpertLayout, load: FloatArray, active: BoolArray, lost: BoolArray) -> FloatArray:
    """Tokens over speed of the fullest rank under the best shares of each window, mean over windows, `[L]`."""
    windows, layers, _ = load.shape
    even = np.zeros((windows, layers))
    mean: FloatArray = np.zeros(layers)
    _even_times(load, active, layout.topology.rank_speed, even)
    balance = solved_balancedness(layout, load, active, lost)
    for window in range(windows):
        mean += np.divide(even[window], balance[window], out=np.zeros(layers), where=even[window] > 0.0)
    mean /= windows
    return mean


def solved_balancedness(layout: ExpertLayout, load: FloatArray, active: BoolArray, lost: BoolArray) -> FloatArray:
    """Balancedness under the best shares of each window, `[T, L]`; NaN without load, anything where layers are lost."""
    capacity = np.where(active, layout.slots_per_rank, 0).astype(np.int64)
    rows = np.where(np.repeat(active, layout.slots_per_rank), layout.physical_to_logical_map, -1)
    rows[lost] = np.arange(layout.num_slots) % layout.num_experts
    pace = 1.0 / layout.topology.rank_speed
    each = (score_weighted(load[at : at + 1], np.ones(1), rows, capacity, pace) for at in range(len(load)))
    return np.array(list(each)).reshape(load.shape[:2])


@kernel
def _even_times(load: FloatArray, active: BoolArray, rank_speed: FloatArray, even: FloatArray) -> None:
    """All tokens over the speed of all live ranks, `[T, L]`."""
    speed = 0.0
    for r in range(active.size):
        if active[r]:
            speed += rank_speed[r]
    for t in range(load.shape[0]):
        for layer in range(load.shape[1]):
            total = 0.0
            for e in range(load.shape[2]):
                total += load[t, layer, e]
            even[t, layer] = total / speed


@kernel
def _time_layers(
    load: FloatArray,
    p2l: IntArray,
    active: BoolArray,
    shares: FloatArray,
    rank_speed: FloatArray,
    token_s: float,
    expert_s: float,
    passes: float,
) -> tuple[FloatArray, BoolArray]:
    """Mean over windows of the slowest rank's time / passes; a slot with less than a token per pass counts in part."""
    windows, layers, experts = load.shape
    ranks = active.size
    stride = p2l.shape[1] // ranks
    count = np.zeros(experts, np.int64)
    times, lost = np.zeros(layers), np.zeros(layers, np.bool_)
    for layer in range(layers):
        count[:] = 0
        for p in range(p2l.shape[1]):
            if p2l[layer, p] >= 0 and active[p // stride]:
                count[p2l[layer, p]] += 1
        for e in range(experts):
            if count[e] == 0:
                lost[layer] = True
        total = 0.0
        for t in range(windows):
            worst = 0.0
            for r in range(ranks):
                if not active[r]:
                    continue
                tokens = busy = 0.0
                for p in range(r * stride, r * stride + stride):
                    e = p2l[layer, p]
                    if e < 0:
                        continue
                    if shares.shape[0] == 0:
                        mine = load[t, layer, e] / count[e]
                    else:
                        mine = load[t, layer, e] * shares[min(t, shares.shape[0] - 1), layer, p]
                    tokens += mine
                    busy += min(mine, passes)
                worst = max(worst, (token_s * tokens + expert_s * busy) / rank_speed[r])
            total += worst / passes
        times[layer] = total / windows
    return times, lost


def time_transfers(
    current: ExpertLayout, target: ExpertLayout, active: BoolArray, model: CostModel
) -> tuple[IntArray, FloatArray]:
    """Experts that ranks receive, and seconds of the rank that sends or receives longest, both `[L]`."""
    old, new, experts = current.physical_to_logical_map, target.physical_to_logical_map, current.num_experts
    near_s, far_s = model.link_s(same_node=True), model.link_s(same_node=False)
    return _time_transfers(old, new, experts, active, current.topology.rank_to_node, near_s, far_s)


@kernel
def _time_transfers(
    old: IntArray, new: IntArray, experts: int, active: BoolArray, rank_to_node: IntArray, near_s: float, far_s: float
) -> tuple[IntArray, FloatArray]:
    """Each transfer comes from a holder on the node of its rank, else from any: the one that has sent least so far.

    Args:
        old: `[L, P]`.
        new: `[L, P]`.
        experts: E.
        active: `[R]`; other ranks send nothing.
        rank_to_node: `[R]`.
        near_s: Seconds of a transfer inside a node.
        far_s: Seconds of one between nodes, and of an expert that no live rank holds.
    """
    layers, slots = old.shape
    ranks = active.size
    stride = slots // ranks
    start, holder = np.zeros(experts + 1, np.int64), np.zeros(slots, np.int64)  # ranks by expert, and where each begins
    had = np.full(experts, -1, np.int64)  # the last rank and layer that held or received the expert
    busy = np.zeros((2, ranks))  # seconds that each rank receives, and sends
    received, seconds = np.zeros(layers, np.int64), np.zeros(layers)
    for layer in range(layers):
        start[:] = 0
        busy[:] = 0.0
        for p in range(slots):
            if old[layer, p] >= 0 and active[p // stride]:
                start[old[layer, p]] += 1
        for e in range(1, experts + 1):
            start[e] += start[e - 1]
        for p in range(slots - 1, -1, -1):
            if old[layer, p] >= 0 and active[p // stride]:
                start[old[layer, p]] -= 1
                holder[start[old[layer, p]]] = p // stride
        for r in range(ranks):
            mark = layer * ranks + r
            for p in range(r * stride, r * stride + stride):
                if old[layer, p] >= 0:
                    had[old[layer, p]] = mark
            for p in range(r * stride, r * stride + stride):
                e = new[layer, p]
                if e < 0 or had[e] == mark:
                    continue
                had[e] = mark
                received[layer] += 1
                source, near = -1, False
                for i in range(start[e], start[e + 1]):
                    close = rank_to_node[holder[i]] == rank_to_node[r]
                    if source < 0 or (close and not near) or (close == near and busy[1, holder[i]] < busy[1, source]):
                        source, near = holder[i], close
                link_s = near_s if near else far_s
                busy[0, r] += link_s
                if source >= 0:
                    busy[1, source] += link_s
        for r in range(ranks):
            seconds[layer] = max(seconds[layer], busy[0, r], busy[1, r])
    return received, seconds
