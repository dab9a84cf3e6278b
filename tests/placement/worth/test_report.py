"""`gain_report`: its numbers from their definitions, and its answer in words."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import eplb_core as eplb
from eplb_core import CostModel, ExpertLayout, Topology, gain_report

FOUR = Topology(num_ranks=4)
HOT = np.array([[300, 20, 30, 40, 50, 60, 70, 80]])


def test_numbers_are_those_of_place_and_of_the_metrics() -> None:
    rng = np.random.default_rng(0)
    trace = np.maximum(rng.lognormal(4, 1, (1, 3, 16)) * rng.lognormal(0, 0.3, (9, 3, 16)), 1).astype(np.int64)
    report = gain_report(trace, FOUR, num_slots=[16, 20])
    start = ExpertLayout.trivial(3, 16, num_slots=16, topology=FOUR)
    assert report.now == pytest.approx(eplb.mean_balancedness(eplb.rank_load(start, trace[4:])))
    waited = eplb.rank_load(start, trace[4:]).max(axis=2).sum()
    assert report.ceiling == pytest.approx(1.0 - eplb.total_balancedness(eplb.rank_load(start, trace[4:])))
    for row, slots in zip(report.rows, (16, 20), strict=True):
        placement = eplb.place(trace[:4], FOUR, num_slots=slots)
        unseen = eplb.rank_load(placement.layout, trace[4:])
        assert (row.num_slots, row.redundant) == (slots, slots - 16)
        assert row.seen == pytest.approx(float(placement.balancedness.mean()))
        assert row.bound == pytest.approx(float(placement.bound.mean()))
        assert row.unseen == pytest.approx(eplb.mean_balancedness(unseen))
        assert row.saved == pytest.approx(1.0 - unseen.max(axis=2).sum() / waited)
        assert row.saved <= report.ceiling
        assert math.isnan(row.saved_s)


def test_seconds_and_bytes_come_from_the_cost_model() -> None:
    model = CostModel(token_s=1e-3, layer_s=0.1, expert_bytes=1e9)
    report = gain_report(HOT, FOUR, num_slots=[8, 12], cost=model, window_passes=10)
    # 320 tokens on the fullest rank become 165: 10 passes of 0.1 s and 32 ms, or 16.5 ms.
    assert report.rows[1].saved_s == pytest.approx(15.5e-3)
    assert report.rows[1].saved == pytest.approx(15.5 / 132)
    assert report.ceiling == pytest.approx(15.75 / 132)
    assert [row.memory_bytes for row in report.rows] == [0.0, 1e9]
    assert "save 11.7% of the layers' time, 15.5 ms of a pass for 1 GB per rank; perfect balance" in report.conclusion


def test_activated_experts_bound_the_time_too() -> None:
    """Decoding reads each of 8 experts once a pass: a rank takes two of them and a quarter of the tokens at least."""
    model = CostModel(token_s=1.0, expert_s=100.0)
    report = gain_report(HOT, FOUR, num_slots=[8, 16], cost=model)
    least = 650 / 4 + 100 * 8 / 4
    assert report.ceiling == pytest.approx(1.0 - least / 520.0)
    assert all(row.saved <= report.ceiling for row in report.rows)


def test_the_answer_names_the_fewest_slots_that_do_nearly_as_much() -> None:
    report = gain_report(HOT, FOUR)
    assert [row.num_slots for row in report.rows] == [8, 12, 16, 24]
    assert (report.best, report.pays) == (1, True)
    assert report.conclusion.startswith("Pays: 4 redundant slots (1 a rank) save 48.4%")


def test_an_even_load_does_not_pay() -> None:
    report = gain_report(np.full((4, 2, 8), 100), FOUR)
    assert (report.pays, report.ceiling, report.best) == (False, 0.0, 0)
    assert report.conclusion.startswith("Does not pay: even perfect balance would save only 0.0% of the layers' time. ")


def test_a_gain_that_is_gone_in_the_windows_that_follow_is_no_gain() -> None:
    """G14: each half has its own hot expert; fitting and judging on the same windows would promise 49%."""
    other = HOT[:, ::-1]
    report = gain_report(np.stack([HOT, HOT, other, other]), FOUR, num_slots=[8, 12])
    assert not report.pays
    assert report.rows[1].seen > 0.95
    assert report.conclusion.startswith("Does not pay with one placement: ")
    assert "the rest is in placing more often" in report.conclusion


def test_a_layout_in_place_is_what_gains_are_compared_with() -> None:
    good = eplb.place(HOT, FOUR, num_slots=12).layout
    report = gain_report(HOT, FOUR, num_slots=[12], current=good)
    assert (report.now, report.rows[0].saved) == (report.rows[0].seen, 0.0)


def test_the_answer_says_what_was_weighed() -> None:
    """FA3, FA5: which windows, whether they were seen, beside which layout, by which cost, in passes of which size."""
    fitted = gain_report(HOT, FOUR, num_slots=[12]).conclusion
    assert "the window that it was made for: none is left to judge it" in fitted
    model = CostModel(token_s=2e-6, expert_s=3e-6, expert_bytes=4e6)
    live = eplb.place(HOT, FOUR, num_slots=12).layout
    judged = gain_report(
        np.stack([HOT] * 5), FOUR, num_slots=[12], cost=model, window_passes=10, current=live
    ).conclusion
    for part in ("beside the layout in place", "on windows 2-4", "made from windows 0-1"):
        assert part in judged
    assert "2 us a token, 3 us an active expert, 4 MB an expert; a window is 10 passes of 65 token-expert" in judged
    assumed = gain_report(HOT, FOUR, num_slots=[12], cost=model).conclusion
    assert "a window is 1 pass of 650 token-expert pairs a layer (`window_passes`)." in assumed


def test_it_prints_as_a_table() -> None:
    lines = str(gain_report(HOT, FOUR, num_slots=[8, 12])).splitlines()
    assert lines[0] == "1 layers, 8 experts, 4 ranks, 1 window of load"
    assert lines[1] == "balancedness now 0.508; perfect balance would save 49.2% of the layers' time"
    assert lines[5].split() == ["4", "12", "0.985", "1.000", "-", "48.4%", "-", "-"]
    priced = str(gain_report(np.stack([HOT, HOT]), FOUR, cost=CostModel(token_s=1e-4, expert_bytes=5e8)))
    assert priced.splitlines()[5].split() == ["4", "12", "0.985", "1.000", "0.985", "48.4%", "15.5", "ms", "0.5", "GB"]


def test_traces_are_taken_too() -> None:
    trace = eplb.Trace(HOT)
    assert gain_report(trace, FOUR, num_slots=[8]).conclusion == gain_report(HOT, FOUR, num_slots=[8]).conclusion


@pytest.mark.parametrize(
    ("load", "options", "text"),
    [
        (np.zeros((1, 4)), {}, r"`trace` \(shape \[1, 1, 4\]\) must have tokens in each half"),
        ([[[1] * 4], [[0] * 4]], {}, r"`trace` \(shape \[2, 1, 4\]\) must have tokens in each half"),
        ([[1] * 4], {"num_slots": [3]}, r"`num_slots` \(=3\) must be at least 4"),
        ([[1] * 4], {"num_slots": []}, r"`num_slots` \(=\[\]\) must name one number of slots or more"),
        ([[1] * 4], {"window_passes": -1}, r"`window_passes` \(=-1.0\) must be above 0"),
        (
            [[1] * 4],
            {"current": ExpertLayout.trivial(2, 4, num_slots=4, topology=FOUR)},
            r"`current` \(ExpertLayout.* must have the load's 1 layers and 4 experts, and Topology",
        ),
    ],
)
def test_bad_arguments_raise_with_their_values(load: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        gain_report(load, FOUR, **options)


def test_shares_by_weight_are_reported_as_place_and_the_solver_find_them() -> None:
    rng = np.random.default_rng(7)
    load = rng.integers(1, 200, (4, 2, 12))
    topology = Topology(3)
    even, weighted = (gain_report(load, topology, num_slots=[15], dispatch=name) for name in ("even", "weighted"))
    placement = eplb.place(load[:2], topology, num_slots=15, dispatch="weighted")
    assert weighted.rows[0].seen == pytest.approx(placement.balancedness.mean())
    reached = []
    for window in load[2:]:
        shares = eplb.replica_shares(placement.layout, window)
        reached.append(eplb.balancedness(eplb.rank_load(placement.layout, window, shares=shares)))
    assert weighted.rows[0].unseen == pytest.approx(np.mean(reached), abs=2e-3)
    assert weighted.rows[0].unseen > even.rows[0].unseen
    assert weighted.rows[0].saved > even.rows[0].saved
    assert weighted.now == pytest.approx(even.now)
    with pytest.raises(ValueError, match=r"`dispatch` \(='hash'\) must be 'even' or 'weighted'"):
        gain_report(load, topology, dispatch="hash")  # type: ignore[arg-type]


def test_counts_whose_sum_no_integer_holds_are_added_up_all_the_same() -> None:
    report = gain_report(np.full((4, 2, 8), 2**62), FOUR)
    assert report.ceiling == pytest.approx(0.0, abs=1e-9)
    assert not report.pays


def test_arguments_of_another_kind_are_named() -> None:
    with pytest.raises(TypeError, match=r"`cost` \(=3\) must be a CostModel or None"):
        gain_report([[1] * 4], FOUR, cost=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"`topology` \(=int\) must be a Topology"):
        gain_report([[1] * 4], 4)  # type: ignore[arg-type]
