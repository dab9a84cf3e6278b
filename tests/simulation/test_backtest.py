"""`backtest` replays what `simulate` would with the same policy."""

from __future__ import annotations

import numpy as np
import pytest

import eplb_core as eplb
from eplb_core import ExpertLayout, Topology, backtest, place, simulate
from eplb_core._arrays import FloatArray
from eplb_core.placement import forecast as forecasts

TRACE = np.random.default_rng(2).integers(1, 99, (12, 2, 8))


def test_placing_for_all_windows_is_the_policy_of_place() -> None:
    topology = Topology(4)
    (row,) = backtest(TRACE, {"mine": forecasts.all_windows}, topology=topology, num_slots=12, interval=3)
    replay = simulate(TRACE, topology=topology, num_slots=12, policy="place", interval=3)
    assert row == ("mine", replay.mean_balancedness, replay.total_balancedness, replay.total_transfers)


def test_a_forecaster_sees_the_past_alone() -> None:
    seen = []

    def watch(load: FloatArray) -> FloatArray:
        seen.append(load.copy())
        return load

    backtest(TRACE, {"watch": watch}, topology=Topology(4), num_slots=12, interval=4, history=6)
    assert [each.tolist() for each in seen] == [TRACE[:4].tolist(), TRACE[2:8].tolist()]


def test_what_is_known_of_the_windows_to_come_helps() -> None:
    """An oracle that forecasts the windows that follow beats all that cannot; rows come in the order given."""
    switch = np.array([[[90, 1, 1, 1, 1, 1]]] * 4 + [[[1, 1, 1, 1, 1, 90]]] * 4)
    topology = Topology(3)
    rows = backtest(
        switch,
        {"mean": forecasts.mean_window, "oracle": lambda load: switch[4:].astype(np.float64)},
        topology=topology,
        num_slots=9,
        interval=4,
        place_options={"transfer_price": 0.0},
    )
    assert [row.name for row in rows] == ["mean", "oracle"]
    assert rows[1].mean_balancedness > rows[0].mean_balancedness


def test_options_reach_place_and_the_layout_to_start_from_is_taken() -> None:
    topology = Topology(4)
    still = backtest(TRACE, topology=topology, num_slots=12, interval=3, place_options={"max_transfers": 0})
    assert [row.name for row in still] == list(forecasts.FORECASTERS)
    assert {row.transfers for row in still} == {0}
    start = place(TRACE[:3], topology, num_slots=12).layout
    (kept,) = backtest(
        eplb.Trace(TRACE),
        {"all": forecasts.all_windows},
        topology=topology,
        num_slots=12,
        interval=3,
        current=start,
        place_options={"max_transfers": 0},
    )
    assert (
        kept.mean_balancedness
        == simulate(TRACE, topology=topology, num_slots=12, policy="none", interval=3, current=start).mean_balancedness
    )
    assert isinstance(start, ExpertLayout)


def test_a_function_that_gives_no_load_is_refused() -> None:
    with pytest.raises(ValueError, match=r"forecast \(shape \[3, 2, 2\]\) must be \[W, 2, 8\], W > 0"):
        backtest(TRACE, {"cut": lambda load: load[:, :, :2]}, topology=Topology(4), num_slots=12, interval=3)
