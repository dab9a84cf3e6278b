"""Replay of a trace: G14 (held-out windows), totals against plain Python, bad arguments."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from eplb_core import Balancer, CostModel, ExpertLayout, Topology, Trace, simulate
from eplb_core._arrays import FloatArray, IntArray
from eplb_core.simulation import Policy, PolicyName, SimulateOptions, table

TWO = Topology(num_ranks=2)
STILL: SimulateOptions = {"topology": TWO, "num_slots": 4, "policy": "none", "interval": 1}


def by_load(windows: IntArray | FloatArray, live: ExpertLayout) -> ExpertLayout:
    """A policy for tests: the two busiest of four experts get the spare slots, one on each rank."""
    rows = []
    for load in windows.sum(axis=0):
        a, b, c, d = np.argsort(-load, kind="stable").tolist()
        rows.append([a, b, c, a, b, d])
    return ExpertLayout(rows, 4, topology=live.topology)


def test_no_window_is_scored_on_a_layout_that_was_made_from_it() -> None:
    """G14: window A fits, window B evaluates; the policy never sees what it will be scored on."""
    load = np.arange(7 * 1 * 4).reshape(7, 1, 4)
    seen: list[list[int]] = []

    def spy(windows: IntArray | FloatArray, live: ExpertLayout) -> ExpertLayout:
        seen.append(windows[:, 0, 0].tolist())
        return live

    result = simulate(load, topology=TWO, num_slots=6, policy=spy, interval=2)
    assert result.rebalance_windows.tolist() == [2, 4, 6]
    assert seen == [[0, 4], [8, 12], [16, 20]]
    seen.clear()
    simulate(load, topology=TWO, num_slots=6, policy=spy, interval=2, history=3)
    assert seen == [[0, 4], [4, 8, 12], [12, 16, 20]]


def test_changing_busiest_ranks_do_not_cancel_out() -> None:
    """G14: the maximum of each window, then the sum; summed windows would look even."""
    load = np.array([[[1, 1, 1, 1]], [[9, 1, 1, 1]], [[1, 1, 1, 9]]])
    trivial = simulate(load, **STILL)
    assert trivial.balancedness[:, 0].tolist() == [1.0, 0.6, 0.6]
    assert (trivial.mean_balancedness, trivial.total_balancedness) == (0.6, 0.6)


@settings(max_examples=40)
@given(
    load=hnp.arrays(np.int64, (5, 2, 4), elements=st.integers(0, 50)),
    interval=st.integers(1, 4),
    speed=st.sampled_from([[1.0, 1.0], [1.0, 2.0]]),
)
def test_the_replay_agrees_with_plain_python(
    load: np.ndarray[tuple[int, ...], np.dtype[np.int64]], interval: int, speed: list[float]
) -> None:
    topology = Topology(2, rank_speed=speed)
    result = simulate(Trace(load), topology=topology, num_slots=6, policy=by_load, interval=interval)
    live = ExpertLayout.trivial(2, 4, num_slots=6, topology=topology)
    means, tops, each, moved = 0.0, 0.0, [], 0
    for window in range(5):
        if window and window % interval == 0:
            new = by_load(load[window - interval : window], live)
            for layer in range(2):
                for rank in range(2):
                    rows = [
                        set(x.physical_to_logical_map[layer, rank * 3 : rank * 3 + 3].tolist()) for x in (live, new)
                    ]
                    moved += len(rows[1] - rows[0])
            live = new
        for layer in range(2):
            p2l = live.physical_to_logical_map[layer].tolist()
            slots = [load[window, layer, e] / p2l.count(e) for e in p2l]
            ranks = [sum(slots[:3]), sum(slots[3:])]
            mean, top = sum(ranks) / sum(speed), max(r / s for r, s in zip(ranks, speed, strict=True))
            if window >= interval:
                means, tops = means + mean, tops + top
                each += [mean / top] if top else []
    assert result.total_transfers == moved
    assert result.digests[-1] == live.digest
    assert len(result.digests) == len(result.rebalance_windows) + 1
    assert result.layout == live
    if each:
        assert result.mean_balancedness == pytest.approx(sum(each) / len(each))
        assert result.total_balancedness == pytest.approx(means / tops)
    else:
        assert np.isnan(result.mean_balancedness)
        assert np.isnan(result.total_balancedness)


def test_windows_and_layers_without_load_count_in_no_average() -> None:
    load = np.zeros((4, 2, 4), dtype=np.int64)
    load[2, 1] = [3, 1, 1, 1]
    result = simulate(load, **STILL)
    assert np.isnan(result.window_balancedness).tolist() == [True, True, False, True]
    assert result.mean_balancedness == 0.75
    assert "-" in table([result])


def test_shares_of_a_dispatch_function_are_used_per_window() -> None:
    """Expert 0 is on both ranks: all of it sent to rank 1 evens windows in which rank 0 is busy with expert 1."""
    layout = ExpertLayout([[0, 1, 0, 2]], 3, topology=TWO)
    load = np.array([[[4, 4, 0]], [[4, 4, 0]], [[4, 0, 4]]])
    options: SimulateOptions = {**STILL, "current": layout}
    assert simulate(load, **options).total_balancedness == 4 / 6
    options["dispatch"] = lambda live, window: [[float(window[0, 1] == 0), 1.0, float(window[0, 1] > 0), 1.0]]
    assert simulate(load, **options).balancedness[:, 0].tolist() == [1.0, 1.0, 1.0]


def test_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    simulate(np.ones((4, 1, 4)), progress=lambda *step: told.append(step), **STILL)
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_several_intervals_can_be_scored_on_the_same_windows() -> None:
    load = np.array([[[1, 1, 9, 1]]] * 3 + [[[1, 1, 1, 1]]] * 3)
    cost = CostModel(install_s=100.0)
    late = simulate(load, topology=TWO, num_slots=4, policy=by_turns, interval=2, score_from=3, cost=cost)
    assert late.scored_from == 3
    assert late.mean_balancedness == late.total_balancedness == 1.0
    assert late.pass_s == 2.0
    assert late.pause_s.tolist() == [100.0, 100.0]
    assert late.total_s == 3 * 2.0 + 100.0  # the pause before window 2 is not of the scored windows
    assert late.windows().scored.tolist() == [False] * 3 + [True] * 3
    lines = table([late]).splitlines()
    assert [line.split()[3:] for line in lines[2:5]] == [["unscored"], ["partly", "scored"], []]
    assert repr(late) == (
        "Simulation(policy='by_turns', dispatch='even', num_slots=4, interval=2, total_balancedness=1.0000, "
        "transfers=8)"
    )


def by_turns(windows: IntArray | FloatArray, live: ExpertLayout) -> ExpertLayout:
    """A policy for tests: the ranks exchange all they hold."""
    return ExpertLayout(np.roll(live.physical_to_logical_map, 2, axis=1), 4, topology=live.topology)


def test_the_table_shows_policies_side_by_side() -> None:
    load = np.array([[[1, 1, 9, 1]]] * 4)
    policies: tuple[PolicyName | Policy, ...] = ("none", by_load)
    runs = [simulate(load, topology=TWO, num_slots=6, policy=policy, interval=2) for policy in policies]
    lines = table(runs).splitlines()
    assert lines[0].split() == ["none", "by_load"]
    assert lines[2].split() == ["0-1", "0.600", "0", "0.600", "0", "unscored"]
    assert lines[3].split() == ["2-3", "0.600", "0", "1.000", "1"]
    assert all(len(line) <= 80 for line in lines)
    assert table([runs[0]]).splitlines()[0].split() == ["none"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"interval": 4}, r"`interval` \(=4\) must be below the number of windows \(=4\)"),
        ({"score_from": 4}, r"`score_from` \(=4\) must be below the number of windows \(=4\)"),
        ({"score_from": 1}, r"`score_from` \(=1\) must be at least 2"),
        ({"interval": 0}, r"interval.*=0.*at least 1"),
        ({"policy": "best"}, r"'best'.*none, place, deepseek"),
        ({"dispatch": "magic"}, "'magic'"),
        ({"num_slots": 3}, r"=3.*=4"),
        ({"history": 0}, "history"),
        ({"current": ExpertLayout.trivial(2, 4, num_slots=4, topology=TWO)}, "1 layers and 4 experts"),
        ({"policy": lambda windows, live: ExpertLayout.trivial(1, 4, num_slots=8, topology=TWO)}, "differ in slots"),
    ],
)
def test_bad_arguments_raise_with_the_numbers(change: dict[str, object], match: str) -> None:
    arguments: dict[str, object] = {"topology": TWO, "num_slots": 4, "policy": "none", "interval": 2, **change}
    with pytest.raises(ValueError, match=match):
        simulate(np.ones((4, 1, 4)), **arguments)  # type: ignore[arg-type]


def test_counts_whose_sum_no_int64_holds_reach_deepseeks_policy() -> None:
    load = np.full((4, 1, 4), 2**62)
    run = simulate(load, topology=Topology(2), num_slots=4, policy="deepseek", interval=2)
    assert run.mean_balancedness == 1.0


def test_loads_beyond_float32_reach_deepseeks_policy_scaled() -> None:
    load = np.random.default_rng(0).integers(1, 90, (4, 1, 4)).astype(np.float64)
    options: dict[str, Any] = {"topology": Topology(2), "num_slots": 6, "policy": "deepseek", "interval": 2}
    assert simulate(load * 2.0**130, **options).layout == simulate(load, **options).layout


@pytest.mark.parametrize("policy", ["none", "place", "deepseek"])
def test_loads_of_any_size_are_replayed_or_refused_in_words(policy: str) -> None:
    """1e300 tokens are replayed as 1; what no float64 can add up is refused before anything is computed."""
    shape = np.arange(1, 65, dtype=np.float64).reshape(4, 2, 8)
    options: dict[str, Any] = {"topology": Topology(2), "num_slots": 10, "policy": policy, "interval": 1}
    small, large = (simulate(shape * size, **options) for size in (1.0, 2.0**996))
    assert large.balancedness.tolist() == small.balancedness.tolist()
    with pytest.raises(ValueError, match=r"`trace` \(up to 1\.6e\+307\) is too large to be added up in float64"):
        simulate(shape * 1e306, **options)


def test_options_that_are_passed_on_are_the_arguments_of_simulate() -> None:
    assert {"trace", *SimulateOptions.__annotations__, "progress"} == set(inspect.signature(simulate).parameters)


def test_auto_is_a_balancer_that_decides_after_every_window() -> None:
    """Windows 0 to 3 run on the first layout; from then on it is shown each window before the next one runs."""
    load = np.random.default_rng(0).poisson(np.linspace(1, 60, 8), (12, 2, 8)) + 1
    ranks = Topology(2)
    sim = simulate(load, topology=ranks, num_slots=12, policy="auto", interval=4, place_options={"min_gain": 0.5})
    balancer, live = Balancer(ranks, num_slots=12), ExpertLayout.trivial(2, 8, num_slots=12, topology=ranks)
    balancer.observe(load[:4])
    digests = [live.digest]
    for window in load[4:]:
        live = balancer.propose(live).layout
        digests.append(live.digest)
        balancer.observe(window)
    assert sim.digests == tuple(digests)
    assert sim.rebalance_windows.tolist() == list(range(4, 12))
    assert [(a, b) for a, b, _, _ in sim.blocks()] == [(0, 4), (4, 8), (8, 12)]
    assert sum(moved for *_, moved in sim.blocks()) == sim.total_transfers > 0


def test_auto_is_told_what_moves_cost_where_the_cost_knows() -> None:
    load = np.random.default_rng(1).poisson(np.linspace(1, 60, 8), (40, 2, 8)) + 1
    options: Any = {"topology": Topology(2), "num_slots": 12, "policy": "auto", "interval": 4}
    free = simulate(load, cost=CostModel(token_s=1e-6), **options)
    assert free.digests == simulate(load, **options).digests
    dear = simulate(load, cost=CostModel(token_s=1e-6, expert_bytes=1e12, node_bandwidth=1.0), **options)
    assert dear.total_transfers < free.total_transfers
