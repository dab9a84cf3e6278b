"""Estimate what balancing saves for a model and its traffic, before anything is integrated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from eplb_core._arrays import (
    ArrayLike,
    FloatArray,
    IntArray,
    check_call,
    check_int,
    check_kind,
    check_load,
    check_real,
    to_list,
)
from eplb_core._html import table_html, words_html
from eplb_core._text import filled
from eplb_core.frames import Columns, Table
from eplb_core.layout import ExpertLayout, check_frame, rank_capacity
from eplb_core.metrics import mean_of_known, mean_over_top, rank_load
from eplb_core.placement.place import place
from eplb_core.placement.problem import PlacementDispatch, check_active, check_dispatch
from eplb_core.placement.worth.costs import CostModel, model_of
from eplb_core.placement.worth.decision import cost_words, hold_out, pays, tokens_a_window, windows_words
from eplb_core.placement.worth.pass_time import solved_balancedness, time_layers
from eplb_core.topology import Topology
from eplb_core.trace import Trace, check_trace_load

# The fewest slots that save this much of what the most useful number of slots saves are the ones to take.
_NEARLY = 0.95


class GainRow(NamedTuple):
    """What one number of slots gives. Balancedness is the mean over layers and windows with load."""

    num_slots: int
    """Slots filled."""
    redundant: int
    """Slots beyond the experts."""
    seen: float
    """Balancedness on the windows that the placement was made for."""
    bound: float
    """Proven upper limit of `seen`."""
    unseen: float
    """Balancedness on the windows that follow; NaN where the load is one window."""
    saved: float
    """Share of the layers' time that is saved, on unseen windows where there are some."""
    saved_s: float
    """Seconds of a pass that are saved; NaN without a cost model."""
    memory_bytes: float
    """Bytes of all layers' redundant slots on the rank with most of them."""


@dataclass(frozen=True, slots=True, eq=False)
class GainReport(Table):
    """What `gain_report` found; `print` it."""

    topology: Topology
    """Ranks and nodes."""
    num_layers: int
    """Layers L."""
    num_experts: int
    """Logical experts E."""
    num_windows: int
    """Windows T of load."""
    now: float
    """Balancedness of the layout in place, on the windows that the rows are compared on."""
    ceiling: float
    """Share of the layers' time that perfect balance would save there: no placement or dispatch can save more."""
    rows: tuple[GainRow, ...]
    """One for each number of slots."""
    best: int
    """The row to take: the fewest slots that save 95% of the most that any saves."""
    pays: bool
    """Whether that row saves 2% of the layers' time or more."""
    conclusion: str
    """The answer in words."""

    def _columns(self) -> Columns:
        return {name: np.array([getattr(row, name) for row in self.rows]) for name in GainRow._fields}

    def __str__(self) -> str:
        windows = f"{self.num_windows} window{'s' if self.num_windows != 1 else ''} of load"
        lines = [
            f"{self.num_layers} layers, {self.num_experts} experts, {self.topology.num_ranks} ranks, {windows}",
            f"balancedness now {self.now:.3f}; perfect balance would save {self.ceiling:.1%} of the layers' time",
            "",
            " redundant  slots   seen  bound  unseen  time saved       a pass  memory a rank",
        ]
        for row in self.rows:
            unseen = "-" if np.isnan(row.unseen) else f"{row.unseen:.3f}"
            each = "-" if np.isnan(row.saved_s) else f"{row.saved_s * 1e3:.3g} ms"
            memory = f"{row.memory_bytes / 1e9:.3g} GB" if row.memory_bytes else "-"
            lines.append(
                f"{row.redundant:10d}{row.num_slots:7d}{row.seen:7.3f}{row.bound:7.3f}{unseen:>8}{row.saved:12.1%}"
                f"{each:>13}{memory:>15}"
            )
        return "\n".join([*lines, "", filled(self.conclusion)])

    def _repr_html_(self) -> str:
        """One row for each number of slots; the one to take is marked."""
        rows = [
            [
                "*" if number == self.best else "",
                row.redundant,
                row.num_slots,
                f"{row.seen:.3f}",
                f"{row.bound:.3f}",
                "-" if np.isnan(row.unseen) else f"{row.unseen:.3f}",
                f"{row.saved:.1%}",
            ]
            for number, row in enumerate(self.rows)
        ]
        head = ["", "redundant", "slots", "seen", "bound", "unseen", "time saved"]
        return f"<div><b>GainReport</b>: {words_html(self.conclusion)}{table_html(head, rows)}</div>"


def gain_report(
    trace: Trace | ArrayLike,
    topology: Topology,
    *,
    num_slots: Sequence[int] | None = None,
    current: ExpertLayout | None = None,
    cost: CostModel | None = None,
    window_passes: float = 1.0,
    dispatch: PlacementDispatch = "even",
    progress: Callable[[int, int], None] | None = None,
) -> GainReport:
    """How much can placement gain on this load, with how many redundant slots, for how much memory?

    With several windows the placement is made from the first half of them and judged on the second, so that the gain
    does not come from fitting. Placing more often gains more where the load drifts (see `simulate`).

    Args:
        trace: A trace, or loads `[T, L, E]` or `[L, E]`.
        topology: Ranks, nodes and speeds.
        num_slots: Numbers of slots to try, each at least E. Default: as many as there are experts, then one, two and
            four more per rank.
        current: Layout to compare with. Default: the trivial one without redundant slots.
        cost: Seconds of a pass and bytes of an expert. Default: shares of time only.
        window_passes: Passes that a window covers, for the seconds of a pass: each reads the weights that it activates.
        dispatch: How replicas share their expert's tokens, as for `place`: "even", or "weighted" as is best for each
            window, also for the windows that the result is judged on.
        progress: Called with numbers of slots done and in all.

    Returns:
        Numbers, and the answer in words; `str` makes a table of them.

    Raises:
        ValueError: Load without a token, or numbers that do not fit.

    Cost:
        One `place` for each number of slots.

    Example:
        >>> report = gain_report([[300, 20, 30, 40, 50, 60, 70, 80]], Topology(num_ranks=4), num_slots=[8, 12])
        >>> for sentence in report.conclusion.split(". "):
        ...     print(sentence)
        Pays: 4 redundant slots (1 a rank) save 48.4% of the layers' time; perfect balance would save 49.2%
        That is beside the trivial layout of 8 slots, on the window that it was made for: none is left to judge it
        Time is counted in tokens of the fullest rank; moves are free.
    """
    check_kind(topology, "topology", Topology)
    check_call(progress, "progress")
    model = model_of(cost)
    load = check_trace_load(trace.load if isinstance(trace, Trace) else trace)
    windows, layers, experts = load.shape
    half = hold_out(load)
    train, test = (load[:half], load[half:]) if half else (load, load)
    if not half and (windows > 1 or not load.any()):
        raise ValueError(f"`trace` (shape {list(load.shape)}) must have tokens in each half of its windows")
    passes = check_real(window_passes, "window_passes", above=0.0)
    start = current
    if start is None:
        start = ExpertLayout.trivial(layers, experts, num_slots=experts, topology=topology)
    check_frame(start, "current", layers, experts, topology)
    weighted = check_dispatch(dispatch)
    now_s = layers_s(start, test, model, passes, weighted=weighted)
    least_s = _least_seconds(test, topology, model, passes)
    rows = []
    counts = _slot_counts(num_slots, experts, topology.num_ranks)
    for done, slots in enumerate(counts, start=1):
        placement = place(train, topology, num_slots=slots, dispatch=dispatch)
        saved_s = now_s - layers_s(placement.layout, test, model, passes, weighted=weighted)
        spare = int(rank_capacity(slots, topology.num_ranks)[0] - rank_capacity(experts, topology.num_ranks)[0])
        rows.append(
            GainRow(
                num_slots=slots,
                redundant=slots - experts,
                seen=mean_of_known(placement.balancedness),
                bound=mean_of_known(placement.bound),
                unseen=_balancedness(placement.layout, test, weighted) if half else float("nan"),
                saved=saved_s / now_s,
                saved_s=float("nan") if cost is None else saved_s,
                memory_bytes=spare * layers * model.expert_bytes,
            )
        )
        if progress is not None:
            progress(done, len(counts))
    ceiling = 1.0 - least_s / now_s
    most = max(row.saved for row in rows)
    enough = _NEARLY * most if most > 0.0 else most
    best = min((i for i in range(len(rows)) if rows[i].saved >= enough), key=lambda i: rows[i].num_slots)
    beside = f"the trivial layout of {experts} slots" if current is None else "the layout in place"
    weighed = f"That is beside {beside}, {_judged(half, windows)} {cost_words(cost, passes, tokens_a_window(test))}"
    words = f"{_conclude(rows[best], ceiling, topology.num_ranks)} {weighed}"
    now = _balancedness(start, test, weighted)
    worth = pays(rows[best].saved)
    return GainReport(topology, layers, experts, windows, now, ceiling, tuple(rows), best, worth, words)


def _slot_counts(num_slots: Sequence[int] | None, experts: int, ranks: int) -> list[int]:
    if num_slots is None:
        full = -(-experts // ranks) * ranks
        return [experts, *(full + more * ranks for more in (1, 2, 4))]
    counts = [check_int(slots, "num_slots", experts) for slots in to_list(num_slots, "num_slots")]
    if not counts:
        raise ValueError("`num_slots` (=[]) must name one number of slots or more")
    return counts


def layers_s(
    layout: ExpertLayout, load: IntArray | FloatArray, model: CostModel, passes: float, *, weighted: bool
) -> float:
    """Time of all layers in a pass, mean over windows `[T, L, E]`: seconds, or without a cost tokens over speed."""
    active = check_active(None, layout.topology.num_ranks)
    times, _ = time_layers(layout, check_load(load, "trace", (3,)), active, None, "shares", model, passes, weighted)
    return float(sum(times.tolist()))


def _least_seconds(load: IntArray | FloatArray, topology: Topology, model: CostModel, passes: float) -> float:
    """That time if tokens and activated experts were spread as the ranks' speeds: no layout takes less.

    More replicas activate more slots, never fewer, so one slot per expert is the least.
    """
    work = model.token_s * load.sum(dtype=np.float64) + model.expert_s * np.minimum(load, passes).sum()
    spread = float(work / topology.rank_speed.sum() / (len(load) * passes))
    return float(spread + model.layer_s * load.shape[1])


def _balancedness(layout: ExpertLayout, load: IntArray | FloatArray, weighted: bool) -> float:
    """Mean over layers and windows with load of the even time over the fullest rank's time."""
    if weighted:
        active, none = check_active(None, layout.topology.num_ranks), np.zeros(layout.num_layers, dtype=np.bool_)
        return mean_of_known(solved_balancedness(layout, check_load(load, "trace", (3,)), active, none))
    tokens, speed = rank_load(layout, load), layout.topology.rank_speed
    top = (tokens / speed).max(axis=2)
    even = tokens.sum(axis=2) / speed.sum()
    return mean_of_known(mean_over_top(even, top))


def _judged(half: int, windows: int) -> str:
    if half:
        return f"on {windows_words(half, windows)}; the placement was made from {windows_words(0, half)}."
    return "on the window that it was made for: none is left to judge it."


def _conclude(row: GainRow, ceiling: float, ranks: int) -> str:
    if not pays(ceiling):
        return f"Does not pay: even perfect balance would save only {ceiling:.1%} of the layers' time."
    spare = f"{row.redundant} redundant slots ({row.redundant / ranks:.3g} a rank) save"
    gives = (
        f"{spare if row.redundant else 'placement without redundant slots saves'} {row.saved:.1%} of the layers' time"
    )
    if not pays(row.saved):
        return (
            f"Does not pay with one placement: {gives} where perfect balance would save {ceiling:.1%}; "
            "the rest is in placing more often, and in dispatch for each batch."
        )
    each = "" if np.isnan(row.saved_s) else f", {row.saved_s * 1e3:.3g} ms of a pass"
    memory = f" for {row.memory_bytes / 1e9:.3g} GB per rank" if row.memory_bytes else ""
    return f"Pays: {gives}{each}{memory}; perfect balance would save {ceiling:.1%}."
