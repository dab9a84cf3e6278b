"""Decide whether a move pays: what a new placement saves per pass, against what the move costs once.

The verdict is a pure function of its arguments, without memory or clock, so ranks with equal arguments agree. Two rules
damp it: a layer must gain a share of its time, and must have lost more since the last rebalance than its move costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from eplb_core._arrays import ArrayLike, BoolArray, FloatArray, IntArray, check_kind, check_real, read_only
from eplb_core._html import HTML_LAYERS, table_html
from eplb_core.errors import MissingExpertError
from eplb_core.frames import Columns, Table
from eplb_core.layout import ExpertLayout, layer_rows
from eplb_core.placement.place import Placement
from eplb_core.placement.problem import PlacementDispatch, check_active, check_dispatch
from eplb_core.placement.worth.costs import CostModel, model_of
from eplb_core.placement.worth.pass_time import check_windows, time_layers, time_transfers

# Why a layer moves or stays, in the order in which the verdict looks for it.
UNCHANGED = "unchanged"
LOST = "an expert has no other slot on an active rank"
LEFT = "it names slots of ranks that are out"
FROZEN = "frozen"
NO_LOAD = "no load"
TOO_LITTLE = "too little gain"
TOO_DEAR = "not paid back"
PAYS = "pays"


@dataclass(frozen=True, slots=True, eq=False)
class Verdict(Table):
    """Which layers are worth moving; a verdict is true if there is at least one. Arrays are read-only.

    The totals cover the layers to move; if none moves, all layers that the placement would change. Times are seconds of
    the cost model; without one, a unit is the time of one token.
    """

    layers: BoolArray
    """Layers to move, bool `[L]`: `current.replace(placement.layout, verdict.layers)`."""
    gain: float
    """Seconds that a pass becomes shorter."""
    cost: float
    """Seconds that passes lose by the move, in all."""
    cost_bytes: float
    """Bytes that cross a wire."""
    break_even_passes: float
    """Passes until the gain has made up for the cost: cost / gain; infinite without gain."""
    reason: str
    """The verdict in words and numbers, one line."""
    layer_time: FloatArray
    """Seconds of a pass under the current layout, float64 `[L]`; infinite where an expert has no slot on an active
    rank."""
    layer_gain: FloatArray
    """Seconds that a pass becomes shorter, float64 `[L]`; below 0 where it becomes longer."""
    layer_cost: FloatArray
    """Seconds that passes lose by the move of this layer, float64 `[L]`."""
    layer_transfers: IntArray
    """Experts that ranks receive, int64 `[L]`."""
    layer_reasons: tuple[str, ...]
    """Why each layer moves or stays, `[L]`."""

    @property
    def layer_break_even_passes(self) -> FloatArray:
        """Passes until each layer's gain has made up for its cost, float64 `[L]`; infinite without gain."""
        pairs = zip(self.layer_cost.tolist(), self.layer_gain.tolist(), strict=True)
        return np.array([_break_even(cost, gain) for cost, gain in pairs])

    def _columns(self) -> Columns:
        return {
            "layer": np.arange(len(self.layers)),
            "moves": self.layers,
            "pass_s": self.layer_time,
            "gain_s": self.layer_gain,
            "cost_s": self.layer_cost,
            "break_even_passes": self.layer_break_even_passes,
            "transfers": self.layer_transfers,
            "reason": np.array(self.layer_reasons, dtype=object),
        }

    def __bool__(self) -> bool:
        return bool(self.layers.any())

    def _repr_html_(self) -> str:
        """The verdict, and the layers that gain most with their reasons."""
        order = np.argsort(-self.layer_gain, kind="stable")[:HTML_LAYERS].tolist()
        rows = [
            [
                layer,
                "moves" if self.layers[layer] else "stays",
                f"{self.layer_gain[layer]:.3g}",
                f"{self.layer_cost[layer]:.3g}",
                self.layer_transfers[layer],
                self.layer_reasons[layer],
            ]
            for layer in order
        ]
        head = ["layer", "", "gain a pass", "cost", "transfers", "why"]
        return f"<div><b>Verdict</b>: {escape(self.reason)}{table_html(head, rows)}</div>"

    def __repr__(self) -> str:
        return f"Verdict({self.reason})"


def should_rebalance(
    current: ExpertLayout,
    expert_load: ArrayLike,
    placement: Placement | ExpertLayout,
    *,
    cost: CostModel | None = None,
    passes_since: float | None = None,
    window_passes: float | None = None,
    min_gain: float = 0.01,
    payback: float = 1.0,
    frozen: ArrayLike | None = None,
    active_ranks: ArrayLike | None = None,
    dispatch: PlacementDispatch | None = None,
    current_shares: ArrayLike | None = None,
    new_shares: ArrayLike | None = None,
) -> Verdict:
    """Which layers of a placement are worth their move?

    A layer moves if its pass becomes shorter by more than `min_gain` of its time, and if what it would have saved since
    the last rebalance is `payback` times what its move costs. This is the hysteresis: a young layout is left only for
    a larger gain than an old one. A gain is overestimated on the load that the placement was made for: place on earlier
    windows, judge on later ones.

    Args:
        current: Live layout.
        expert_load: Tokens routed to each expert, `[L, E]`, or windows of it, `[T, L, E]`.
        placement: What `place` gave, or a layout of any origin; same L, P, E and topology as `current`.
        cost: Seconds and bytes of passes and moves. Default: time is counted in tokens, and moves are free.
        passes_since: Passes since the last rebalance, 0 or more, counted and not measured by a clock. Default: unknown;
            costs must then be paid back within the passes that the load covers if `window_passes` tells them, and are
            not weighed otherwise.
        window_passes: Passes that a window of load covers. Default: `passes_since / T`, or 1.
        min_gain: Least gain of a layer, as a share of its time.
        payback: How many times the cost the gain must be, 0 or more.
        frozen: Layers that must stay, bools `[L]` or ints. Thaw a layer by leaving it out. They move only if an expert
            would otherwise have no slot on an active rank.
        active_ranks: Bools `[R]`. Default: all. A layer whose expert has lost its last slot, or that names slots of
            other ranks which the placement leaves empty, moves whatever it costs.
        dispatch: How replicas share their expert's tokens, as for `place`: "even", or "weighted" as is best for each
            window. Both layouts are judged by it. Default: what the placement was made for; "even" for a layout.
        current_shares: Fraction of its expert's tokens that each slot takes under `current`, floats `[L, P]` or
            `[T, L, P]`, where it is known. Default: as `dispatch` says.
        new_shares: The same under the placement.

    Returns:
        The verdict of each layer and in all.

    Raises:
        ValueError: Shapes do not fit; a number is out of range; the load is bad (window, layer and expert are named).
        MissingExpertError: The placement leaves an expert without a slot on an active rank.

    Cost:
        O(T * L * P): 4 to 6 ms for 32 windows of 58 layers with 288 slots; "weighted" 20 ms per window there.
        Kernels without the interpreter lock.

    Threads:
        Any; no global state.

    Example:
        >>> from eplb_core import Topology, place
        >>> two = Topology(num_ranks=2)
        >>> live = ExpertLayout([[0, 1, 2, 3], [0, 1, 2, 3]], num_experts=4, topology=two)
        >>> load = [[5, 5, 1, 1], [3, 3, 3, 3]]
        >>> verdict = should_rebalance(live, load, place(load, two, num_slots=4, current=live))
        >>> verdict.layers.tolist(), verdict.gain
        ([True, False], 4.0)
        >>> print(verdict.reason)
        move 1 of 2 layers: a pass is 4 token times (25%) shorter for 2 transfers; 1 unchanged
    """
    target = placement.layout if isinstance(placement, Placement) else placement
    check_kind(current, "current", ExpertLayout).check_same_frame(check_kind(target, "placement", ExpertLayout))
    load = check_windows(expert_load, current)
    model = model_of(cost)
    horizon, passes = _check_passes(passes_since, window_passes, len(load))
    least = check_real(min_gain, "min_gain", at_least=0.0)
    margin = check_real(payback, "payback", at_least=0.0)
    stays = np.zeros(current.num_layers, dtype=np.bool_)
    if frozen is not None:
        stays[layer_rows(frozen, current.num_layers)] = True
    active = check_active(active_ranks, current.topology.num_ranks)

    if dispatch is None:
        dispatch = placement.dispatch if isinstance(placement, Placement) else "even"
    solved = check_dispatch(dispatch)
    before, lost = time_layers(current, load, active, current_shares, "current_shares", model, passes, solved)
    after, gone = time_layers(target, load, active, new_shares, "new_shares", model, passes, solved)
    _check_reached(gone)
    received, move_s = time_transfers(current, target, active, model)
    changed: list[bool] = (current.physical_to_logical_map != target.physical_to_logical_map).any(axis=1).tolist()
    out = np.repeat(~active, current.slots_per_rank)
    # Tokens would go on to ranks that are gone, where the placement sends none any more.
    emptied = (current.physical_to_logical_map >= 0) & (target.physical_to_logical_map < 0)
    left: BoolArray = np.any(emptied[:, out], axis=1)
    has_load: list[bool] = (load.max(axis=(0, 2), initial=0.0) > 0.0).tolist()
    gain, price = before - after, np.zeros(len(before))
    reasons = []
    for layer in range(len(before)):
        saved, time = float(gain[layer]), float(before[layer])
        if not changed[layer]:
            gain[layer] = 0.0
            reasons.append(UNCHANGED)
            continue
        price[layer] = float(move_s[layer]) * model.stall + model.install_s
        if lost[layer]:
            gain[layer] = np.inf
            reasons.append(LOST)
        elif stays[layer]:
            reasons.append(FROZEN)
        elif left[layer]:
            reasons.append(LEFT)
        elif not has_load[layer]:
            reasons.append(NO_LOAD)
        elif not (saved > 0.0 and saved > least * time):
            reasons.append(TOO_LITTLE)
        elif horizon is not None and not saved * horizon >= margin * float(price[layer]):
            reasons.append(TOO_DEAR)
        else:
            reasons.append(PAYS)
    return _conclude(before, gain, price, received, reasons, cost, horizon, margin)


def _check_passes(passes_since: float | None, window_passes: float | None, windows: int) -> tuple[float | None, float]:
    """Passes within which a move must pay, None if unknown, and the passes of a window."""
    since = None if passes_since is None else check_real(passes_since, "passes_since", at_least=0.0)
    if window_passes is not None:
        passes = check_real(window_passes, "window_passes", above=0.0)
        return (windows * passes if since is None else since), passes
    return since, since / windows if since else 1.0


def _check_reached(gone: BoolArray) -> None:
    if gone.any():
        layer = int(np.argmax(gone))
        raise MissingExpertError(
            f"`placement` leaves an expert of layer {layer} without a slot on an active rank"
            f"{f'; {int(gone.sum()) - 1} more layers' if gone.sum() > 1 else ''}; place with the same `active_ranks`",
            layer=layer,
        )


def _break_even(cost: float, gain: float) -> float:
    if not gain > 0.0:
        return float("inf")
    return 0.0 if gain == float("inf") else cost / gain


def _add(values: FloatArray, which: Sequence[int]) -> float:
    total = 0.0
    for index in which:
        total += float(values[index])
    return total


def _conclude(
    before: FloatArray,
    gain: FloatArray,
    price: FloatArray,
    received: IntArray,
    reasons: list[str],
    cost: CostModel | None,
    horizon: float | None,
    margin: float,
) -> Verdict:
    """All layers together: what a rebalance costs whatever its size must be worth it, too."""
    model = model_of(cost)
    pays = [layer for layer, reason in enumerate(reasons) if reason == PAYS]
    if pays and horizon is not None and not {LOST, LEFT} & set(reasons):
        whole = _add(price, pays) + model.rebalance_s
        if not _add(gain, pays) * horizon >= margin * whole:
            reasons = [TOO_DEAR if reason == PAYS else reason for reason in reasons]
    moving = [layer for layer, reason in enumerate(reasons) if reason in (LOST, LEFT, PAYS)]
    spoken = moving or [layer for layer, reason in enumerate(reasons) if reason != UNCHANGED]
    layers = np.zeros(len(before), dtype=np.bool_)
    layers[moving] = True
    saved = _add(gain, spoken)
    lost = _add(price, spoken) + (model.rebalance_s if spoken else 0.0)
    transfers = sum(int(received[layer]) for layer in spoken)
    return Verdict(
        layers=read_only(layers),
        gain=saved,
        cost=lost,
        cost_bytes=transfers * model.expert_bytes,
        break_even_passes=_break_even(lost, saved),
        reason=_say(reasons, len(spoken), saved, _add(before, range(len(before))), transfers, lost, cost),
        layer_time=read_only(before),
        layer_gain=read_only(gain),
        layer_cost=read_only(price),
        layer_transfers=read_only(received),
        layer_reasons=tuple(reasons),
    )


def _say(
    reasons: list[str], spoken: int, gain: float, time: float, transfers: int, lost: float, cost: CostModel | None
) -> str:
    """One line: what moves, what that gives, what it costs, and why the others stay."""
    if not spoken:
        return f"stay: the placement changes none of {len(reasons)} layers"
    moves = any(reason in (LOST, LEFT, PAYS) for reason in reasons)
    text = f"{'move' if moves else 'stay; would move'} {spoken} of {len(reasons)} layers: "
    if gain == float("inf"):
        text += "experts are reached again"
    else:
        text += f"a pass is {abs(gain):.4g} token times" if cost is None else f"a pass is {abs(gain) * 1e3:.4g} ms"
        text += f" ({abs(gain) / time * 100:.3g}%)" if 0.0 < time < float("inf") else ""
        text += " shorter" if gain >= 0.0 else " longer"
    text += f" for {transfers} transfers"
    if cost is not None:
        text += f", {transfers * cost.expert_bytes / 1e9:.3g} GB and {lost * 1e3:.4g} ms lost"
        text += f", paid back in {_break_even(lost, gain):.4g} passes" if gain > 0.0 else ""
    others = [
        f"{reasons.count(why)} {why}" for why in (UNCHANGED, FROZEN, NO_LOAD, TOO_LITTLE, TOO_DEAR) if why in reasons
    ]
    return "; ".join([text, *others])
