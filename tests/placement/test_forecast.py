"""Forecasters by their definitions, and what `forecast` refuses from a function of the user's."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from eplb_core import Topology, forecast, place
from eplb_core.placement import forecast as forecasts

LOAD = np.array([[[4, 0]], [[2, 6]], [[0, 12]]])


def windows_of(forecaster: Any, load: Any = LOAD) -> list[Any]:
    return [window[0] for window in forecast(load, forecaster).windows.tolist()]


def test_all_last_and_mean_are_what_they_say() -> None:
    assert windows_of("all") == [[4, 0], [2, 6], [0, 12]]
    assert windows_of("last") == [[0, 12]]
    assert windows_of(partial(forecasts.last_windows, count=2)) == [[2, 6], [0, 12]]
    assert windows_of(partial(forecasts.last_windows, count=9)) == windows_of("all")
    assert windows_of("mean") == [[2, 6]]


def test_recent_windows_weigh_more() -> None:
    ahead = forecast(LOAD, partial(forecasts.recent_windows, decay=0.5))
    assert ahead.weights.tolist() == [0.25, 0.5, 1.0]
    assert ahead.windows.tolist() == LOAD.tolist()
    total = 0.25 + 0.5 + 1.0
    assert windows_of(partial(forecasts.ewma_window, decay=0.5))[0] == pytest.approx([2 / total, 15 / total])
    assert windows_of(partial(forecasts.ewma_window, decay=1.0)) == windows_of("mean")


def test_a_trend_goes_on_and_never_below_zero() -> None:
    """Expert 0 loses 2 a window and expert 1 gains 6: three windows on, all of it."""
    assert windows_of(partial(forecasts.trend_windows, damping=1.0)) == [[0, 18], [0, 24], [0, 30]]
    assert windows_of(partial(forecasts.trend_windows, damping=0.0)) == windows_of("all")
    assert windows_of("trend", LOAD[:1]) == [[4, 0]]


def test_the_slope_is_that_of_least_squares() -> None:
    load = np.random.default_rng(0).integers(100, 200, (7, 2, 3))
    moved = forecast(load, partial(forecasts.trend_windows, damping=1.0)).windows - load
    for layer in range(2):
        for expert in range(3):
            slope = np.polyfit(np.arange(7), load[:, layer, expert], 1)[0]
            assert moved[:, layer, expert] == pytest.approx(np.full(7, 7 * slope))


def test_widened_windows_keep_their_mean_where_none_falls_below_zero() -> None:
    assert windows_of(partial(forecasts.widened_windows, factor=1.5)) == [[5, 0], [2, 6], [0, 15]]
    assert windows_of(partial(forecasts.widened_windows, factor=0.0)) == [[2, 6]] * 3
    assert windows_of(partial(forecasts.widened_windows, factor=1.0)) == windows_of("all")


@pytest.mark.slow
@given(arrays(np.int64, st.tuples(*[st.integers(1, 4)] * 3), elements=st.integers(0, 1000)))
def test_every_forecaster_gives_loads_that_place_takes(load: Any) -> None:
    for name in forecasts.FORECASTERS:
        first, second = forecast(load, name), forecast(load.astype(np.float64), name)
        assert first.windows.shape[1:] == load.shape[1:]
        assert (first.windows >= 0).all()
        assert first.windows.tobytes() == second.windows.tobytes()
        assert not first.windows.flags.writeable
        assert not first.weights.flags.writeable


def test_a_constant_load_is_forecast_as_it_is() -> None:
    load = np.full((4, 1, 2), 7)
    for name in forecasts.FORECASTERS:
        assert (forecast(load, name).windows == 7).all()


def test_a_forecast_is_placed_for() -> None:
    load = np.stack([np.array([[9, 1, 1, 1]]), np.array([[1, 1, 1, 9]])])
    ahead = forecast(load, lambda windows: (windows[-1:], [2.0]))
    placement = place(ahead.windows, Topology(2), num_slots=6, window_weights=ahead.weights)
    assert placement.layout == place(load[-1], Topology(2), num_slots=6).layout


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (np.ones((1, 2, 1)), r"forecast \(shape \[1, 2, 1\]\) must be \[W, 1, 2\], W > 0"),
        (np.ones((0, 1, 2)), r"forecast \(shape \[0, 1, 2\]\) must be \[W, 1, 2\], W > 0"),
        ([[[1.0, -1.0]]], r"`forecast` \(=-1.0\) must be finite and not negative at window 0, layer 0, expert 1"),
        ((LOAD, [1.0]), r"weights of the forecast \(shape \[1\]\) must be \[3\], finite and not negative"),
        ((LOAD, [1.0, -1.0, 1.0]), r"weights of the forecast \(shape \[3\]\) must be \[3\], finite and not negative"),
    ],
)
def test_an_answer_that_is_no_load_is_refused(answer: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        forecast(LOAD, lambda load: answer)


def test_bad_arguments_raise_with_their_values() -> None:
    with pytest.raises(ValueError, match=r"`forecaster` \(='best'\) must be one of all, last, .* or a function"):
        forecast(LOAD, "best")
    with pytest.raises(ValueError, match=r"`expert_load` \(shape \[0, 1, 2\]\) must have one window or more"):
        forecast(LOAD[:0])
    with pytest.raises(ValueError, match=r"`expert_load` \(shape \[1, 2\]\) must be \[T, L, E\]"):
        forecast(LOAD[0])
    for function, options, text in (
        (forecasts.last_windows, {"count": 0}, r"`count` \(=0\) must be at least 1"),
        (forecasts.recent_windows, {"decay": 0.0}, r"`decay` \(=0.0\) must be above 0"),
        (forecasts.ewma_window, {"decay": 1.5}, r"`decay` \(=1.5\) must be at most 1"),
        (forecasts.trend_windows, {"damping": -1.0}, r"`damping` \(=-1.0\) must be at least 0"),
        (forecasts.widened_windows, {"factor": -1.0}, r"`factor` \(=-1.0\) must be at least 0"),
    ):
        with pytest.raises(ValueError, match=text):
            forecast(LOAD, partial(function, **options))
