"""Compare forecasts on recorded traffic: each is replayed on the windows that follow those it saw."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from eplb_core._arrays import ArrayLike, FloatArray, IntArray, check_call
from eplb_core._html import table_html
from eplb_core._text import quoted
from eplb_core.frames import Columns, Table
from eplb_core.layout import ExpertLayout
from eplb_core.placement.forecast import FORECASTERS, Forecaster, forecast, forecaster_of
from eplb_core.placement.place import place
from eplb_core.simulation.policies import Policy, to_options
from eplb_core.simulation.replay import simulate
from eplb_core.topology import Topology
from eplb_core.trace import Trace


class BacktestRow(NamedTuple):
    """Result of placing for one forecast."""

    name: str
    """The forecaster."""
    mean_balancedness: float
    """Mean over all layers and scored windows, none of which the forecaster had seen."""
    total_balancedness: float
    """Sum of means over sum of maxima, over the same."""
    transfers: int
    """Experts received by all ranks over the whole replay."""


class BacktestRows(tuple[BacktestRow, ...], Table):
    """A row per forecast; print it, or make a data frame of it."""

    __slots__ = ()

    def _columns(self) -> Columns:
        return {name: np.array([getattr(row, name) for row in self]) for name in BacktestRow._fields}

    def _repr_html_(self) -> str:
        head = [name.replace("_", " ") for name in BacktestRow._fields]
        rows = [[row.name, *(f"{each:.4f}" for each in row[1:3]), f"{row.transfers:,}"] for row in self]
        return table_html(head, rows)


def backtest(
    trace: Trace | ArrayLike,
    forecasters: Mapping[str, Forecaster] | None = None,
    *,
    topology: Topology,
    num_slots: int | None = None,
    slots_per_rank: ArrayLike | None = None,
    interval: int = 16,
    history: int | None = None,
    current: ExpertLayout | None = None,
    place_options: Mapping[str, object] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> BacktestRows:
    """Which forecast gives the best balance on the windows that follow, for how many transfers?

    Every `interval` windows the forecaster sees the last `history` windows, `place` plans from the live layout for the
    forecast, and the next `interval` windows are scored. `transfer_price` trades balance for transfers: compare
    forecasters at several prices.

    Args:
        trace: A trace, or windows of load `[T, L, E]`, in order of time.
        forecasters: Functions by name. Default: `FORECASTERS`.
        topology: Ranks, nodes and speeds.
        num_slots: Slots to fill, at least E.
        slots_per_rank: Instead of `num_slots`: slots that each rank fills, ints `[R]` (see `place`).
        interval: Windows between rebalances, less than T.
        history: Windows that a forecaster sees. Default: `interval`.
        current: Layout to start from. Default: the trivial one.
        place_options: Further arguments for `place`.
        progress: Called with forecasters done and in all.

    Returns:
        One row per forecaster, in the order given.

    Raises:
        ValueError: A number does not fit, or a forecaster gave no load.

    Cost:
        A `simulate` for each forecaster.

    Example:
        >>> import numpy as np
        >>> trace = np.array([[[1, 1, 1, 9]]] * 3)
        >>> for row in backtest(trace, topology=Topology(2), num_slots=6, interval=1)[:2]:
        ...     print(row.name, round(row.mean_balancedness, 3), row.transfers)
        all 1.0 1
        last 1.0 1
    """
    check_call(progress, "progress")
    if forecasters is not None and not isinstance(forecasters, Mapping):
        raise TypeError(f"`forecasters` (={quoted(forecasters, 80)}) must be a dict of forecasters by name")
    slots = {"num_slots": num_slots, "slots_per_rank": slots_per_rank}
    rows = []
    named = FORECASTERS if forecasters is None else forecasters
    for name, forecaster in named.items():
        policy = _policy(forecaster_of(forecaster), {**slots, **to_options(place_options)})
        replay = simulate(
            trace,
            topology=topology,
            num_slots=num_slots,
            slots_per_rank=slots_per_rank,
            policy=policy,
            interval=interval,
            history=history,
            current=current,
        )
        rows.append(BacktestRow(name, replay.mean_balancedness, replay.total_balancedness, replay.total_transfers))
        if progress is not None:
            progress(len(rows), len(named))
    return BacktestRows(rows)


def _policy(forecaster: Forecaster, options: dict[str, Any]) -> Policy:
    def choose(windows: IntArray | FloatArray, live: ExpertLayout) -> ExpertLayout:
        ahead = forecast(windows, forecaster)
        placed = place(ahead.windows, live.topology, current=live, window_weights=ahead.weights, **options)
        return placed.layout

    return choose
