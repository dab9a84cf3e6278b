"""From windows that are over to the windows to place for.

A forecaster is any function from load `[T, L, E]`, oldest window first, to windows `[W, L, E]`, or to those and their
weights `[W]`. Parameters are bound by `functools.partial(last_windows, count=8)`. Each rank forecasts for itself, so
these add up in order of time and use only + - * /: equal loads give equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np

from eplb_core._arrays import ArrayLike, FloatArray, check_int, check_load, check_real, check_word, read_only, to_reals
from eplb_core.placement.windows import add_windows

Forecaster: TypeAlias = Callable[[FloatArray], "ArrayLike | tuple[ArrayLike, ArrayLike]"]
"""From load `[T, L, E]` to windows `[W, L, E]`, or to windows and weights `[W]`."""


class Forecast(NamedTuple):
    """Windows to place for."""

    windows: FloatArray
    """float64 `[W, L, E]`, read-only."""
    weights: FloatArray
    """How much each counts, float64 `[W]`, read-only."""


def forecast(expert_load: ArrayLike, forecaster: str | Forecaster = "all") -> Forecast:
    """Which windows should a placement be made for, after those that were seen?

    Args:
        expert_load: Windows that are over, `[T, L, E]`, oldest first, one or more.
        forecaster: A name of `FORECASTERS`, or a function.

    Returns:
        Windows and weights, checked: `place(f.windows, topology, window_weights=f.weights, ...)`.

    Raises:
        ValueError: An unknown name; or an answer of the function with wrong shapes, NaN, infinite or negative values.

    Cost:
        O(T * L * E) for the named ones; any thread.

    Example:
        >>> forecast([[[2, 0]], [[4, 6]]], "mean").windows
        array([[[3., 3.]]])
        >>> forecast([[[2, 0]], [[4, 6]]], lambda load: (load[-1:] * 2, [1])).windows
        array([[[ 8., 12.]]])
    """
    load = check_load(expert_load, "expert_load", (3,))
    if len(load) == 0:
        raise ValueError(f"`expert_load` (shape {list(load.shape)}) must have one window or more")
    answer = forecaster_of(forecaster)(load)
    windows, weights = answer if isinstance(answer, tuple) else (answer, None)
    checked = check_load(windows, "forecast", (3,))
    if len(checked) == 0 or checked.shape[1:] != load.shape[1:]:
        raise ValueError(f"forecast (shape {list(checked.shape)}) must be [W, {load.shape[1]}, {load.shape[2]}], W > 0")
    each = np.ones(len(checked)) if weights is None else np.array(to_reals(weights, "weights"))
    if each.shape != (len(checked),) or not ((each >= 0.0) & (each < np.inf)).all():
        raise ValueError(
            f"weights of the forecast (shape {list(each.shape)}) must be [{len(checked)}], finite and not negative"
        )
    return Forecast(checked, read_only(each))


def forecaster_of(forecaster: str | Forecaster) -> Forecaster:
    """The function of a name; a function is itself."""
    if callable(forecaster):
        return forecaster
    return FORECASTERS[check_word(forecaster, "forecaster", FORECASTERS, ", or a function")]


def all_windows(load: FloatArray) -> FloatArray:
    """What was is what comes: every window as it is."""
    return load


def last_windows(load: FloatArray, *, count: int = 1) -> FloatArray:
    """The last `count` windows come again."""
    return load[-check_int(count, "count", 1) :]


def mean_window(load: FloatArray) -> FloatArray:
    """One window: the mean of all."""
    mean: FloatArray = add_windows(load, np.ones(len(load))) / len(load)
    return mean[None]


def recent_windows(load: FloatArray, *, decay: float = 0.9) -> tuple[FloatArray, FloatArray]:
    """Every window as it is, each older one with `decay` times the weight of the next."""
    keep = check_real(decay, "decay", above=0.0, at_most=1.0)
    weights = np.ones(len(load))
    for window in range(len(load) - 2, -1, -1):
        weights[window] = weights[window + 1] * keep
    return load, weights


def ewma_window(load: FloatArray, *, decay: float = 0.9) -> FloatArray:
    """One window: the mean with the weights of `recent_windows`."""
    windows, weights = recent_windows(load, decay=decay)
    mean: FloatArray = add_windows(windows, weights) / add_windows(weights, np.ones(len(weights)))
    return mean[None]


def trend_windows(load: FloatArray, *, damping: float = 0.5) -> FloatArray:
    """Every window, moved on by `damping` times what the straight line through them rises in as many windows."""
    part = check_real(damping, "damping", at_least=0.0)
    count = len(load)
    if count == 1:
        return load
    # Least squares over times -(T-1)/2 .. (T-1)/2, whose squares add up to T (T^2 - 1) / 12.
    slope = np.zeros(load.shape[1:])
    for window in range(count):
        slope += load[window] * (2 * window - count + 1)
    slope *= 6.0 / (count * (count * count - 1))
    moved: FloatArray = np.maximum(load + slope * (part * count), 0.0)
    return moved


def widened_windows(load: FloatArray, *, factor: float = 1.3) -> FloatArray:
    """Every window, `factor` times as far from the mean: those that come differ more than those that were seen."""
    wide = check_real(factor, "factor", at_least=0.0)
    mean = add_windows(load, np.ones(len(load))) / len(load)
    widened: FloatArray = np.maximum(mean + (load - mean) * wide, 0.0)
    return widened


FORECASTERS: Mapping[str, Forecaster] = MappingProxyType(
    {
        "all": all_windows,
        "last": last_windows,
        "mean": mean_window,
        "ewma": ewma_window,
        "recent": recent_windows,
        "trend": trend_windows,
        "widened": widened_windows,
    }
)
"""The forecasters that have a name, with their default parameters."""
