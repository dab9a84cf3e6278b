"""Several replays of one trace: side by side, in words, swept over settings, kept in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eplb_core import (
    CostModel,
    ExpertLayout,
    StepCost,
    Topology,
    Trace,
    compare_policies,
    cost_preset,
    simulate,
    sweep,
)
from eplb_core._arrays import FloatArray, IntArray
from eplb_core.metrics import mean_of_known
from eplb_core.simulation import Comparison, Records, table
from eplb_core.simulation.sweep import _replay_file, _text

TWO = Topology(num_ranks=2)
LOAD = np.array([[[1, 1, 9, 1]]] * 6)
OPTIONS: dict[str, Any] = {"topology": TWO, "num_slots": 6, "interval": 2}


def swap(windows: IntArray | FloatArray, live: ExpertLayout) -> ExpertLayout:
    """Moves all the time: the even layout, its ranks exchanged again and again."""
    rows = [[0, 1, 2, 2, 3, 0]] if live.physical_to_logical_map[0, 0] != 0 else [[2, 3, 0, 0, 1, 2]]
    return ExpertLayout(rows, 4, topology=live.topology)


def test_each_policy_is_replayed_as_simulate_does() -> None:
    both = compare_policies(LOAD, ["none", "place"], workers=2, **OPTIONS)
    assert len(both) == 2
    for sim in both:
        alone = simulate(LOAD, **{**OPTIONS, "policy": sim.policy})
        assert (alone.digests, alone.total_balancedness) == (sim.digests, sim.total_balancedness)
    assert both["none"].total_transfers == 0
    with pytest.raises(KeyError, match="'best' is not among none, place"):
        both["best"]


def test_settings_have_names_of_their_own() -> None:
    runs = compare_policies(LOAD, {"often": {"policy": "place", "interval": 1}, "swap": swap}, **OPTIONS)
    assert [(sim.policy, sim.interval) for sim in runs] == [("often", 1), ("swap", 2)]
    assert [sim.policy for sim in compare_policies(LOAD, "none", **OPTIONS)] == ["none"]
    assert [sim.policy for sim in compare_policies(LOAD, swap, **OPTIONS)] == ["swap"]
    with pytest.raises(ValueError, match="one policy or more"):
        compare_policies(LOAD, [], **OPTIONS)


def test_progress_is_told_and_faults_come_through() -> None:
    told: list[tuple[int, int]] = []
    compare_policies(LOAD, ["none", "place"], progress=lambda *step: told.append(step), **OPTIONS)
    assert told == [(1, 2), (2, 2)]
    with pytest.raises(ValueError, match="'best'"):
        compare_policies(LOAD, ["none", "best"], **OPTIONS)  # type: ignore[list-item]


# ---- which to take, in words -----------------------------------------------------------------------------------------


def test_without_a_cost_fewer_transfers_win_within_a_hundredth_of_balance() -> None:
    runs = compare_policies(LOAD, [swap, "place", "none"], **OPTIONS)
    assert runs["swap"].total_balancedness == runs["place"].total_balancedness
    assert runs.best.policy == "place"
    assert runs.conclusion.startswith("Take `place`: on windows it had not seen, the average rank works 100%")
    assert "layers take 40.0% less time than with `none` (60%)" in runs.conclusion
    assert "It moves 1 expert, once, before window 2. `swap` moves 4 times as many" in runs.conclusion
    assert "Scored are windows 2-5; plans are made every 2 windows from the last 2." in runs.conclusion
    assert "`none` fills 2 redundant slots a layer without a plan" in runs.conclusion
    assert str(runs).startswith(table(runs)[:10])
    said = str(runs).split("\n\n")[-1]
    assert " ".join(said.split()) == runs.conclusion
    assert max(map(len, said.splitlines())) <= 80


def test_with_a_cost_pauses_count() -> None:
    cost = StepCost(CostModel(token_s=1.0, expert_bytes=2e9, node_bandwidth=1e9, install_s=0.5), memory_bytes=8e9)
    runs = compare_policies(LOAD, ["none", "place"], cost=cost, window_passes=0.5, **OPTIONS)
    place = runs["place"]
    assert place.pause_s.tolist() == [place.total_transfers * 2.0 + 0.5, 0.0]
    assert place.total_s == pytest.approx(4 * 6.0 + place.pause_s.sum())
    assert runs.best is place
    assert "2 GB in all and 2.5 s of pauses" in runs.conclusion
    assert "redundant experts take 2 GB of a rank, 25.0% of its memory" in runs.conclusion
    lean = compare_policies([[[5, 5, 1, 1]]] * 6, "place", cost=cost, **{**OPTIONS, "num_slots": 4})
    assert "of pauses" in lean.conclusion
    assert "redundant experts take" not in lean.conclusion
    dear = StepCost(CostModel(expert_bytes=2e9, node_bandwidth=1e7))
    kept = compare_policies(LOAD, ["none", "place"], cost=dear, **OPTIONS)
    assert kept.best.policy == "none"
    assert kept.conclusion.startswith("Keep the layout")


def test_only_rebalances_that_move_something_are_counted() -> None:
    """FA5: `once` planned one time, and "its 8 rebalances" moved."""
    once = compare_policies(LOAD, ["none", "once"], **OPTIONS)
    assert f"It moves {once['once'].total_transfers} expert" in once.conclusion
    load = np.array([[[9, 1, 1, 9]], [[9, 1, 1, 9]], [[1, 9, 9, 1]], [[1, 9, 9, 1]]] * 3)
    two = {**OPTIONS, "num_slots": 4, "interval": 2}
    runs = compare_policies(
        load, {"late": lambda windows, live: _even(live) if windows[-1, 0, 0] == 9 else live}, **two
    )
    assert runs["late"].transfers.sum(axis=1).tolist() == [2, 0, 0, 0, 0]
    assert "It moves 2 experts, once, before window 2." in runs.conclusion
    swaps = compare_policies(load, [lambda windows, live: _even(live) if windows[-1, 0, 0] == 9 else _odd(live)], **two)
    assert "Its 5 rebalances move 10 experts in all" in swaps.conclusion


def test_with_a_cost_the_sentence_names_hardware_dimensions_and_passes() -> None:
    """FA4: every model was costed as DeepSeek-V3, without a word."""
    small = compare_policies(
        LOAD,
        ["none", "place"],
        cost=cost_preset("H200", hidden_size=64, intermediate_size=32, weight_bytes=2),
        **OPTIONS,
    )
    said = "H200 SXM at 60% of its data sheet, experts of 64 x 32 at 2 bytes a weight: "
    assert said in small.conclusion
    assert "a window is 1 pass of 12 token-expert pairs a layer (`window_passes`)" in small.conclusion
    other = compare_policies(LOAD, ["none", "place"], cost=cost_preset("H200"), **OPTIONS).conclusion
    assert "experts of 7168 x 2048 at 1 byte a weight (DeepSeek-V3's)" in other
    assert "% of the tokens of the fullest one" in small.conclusion


def test_a_gain_that_nobody_would_notice_is_called_so() -> None:
    load = np.array([[[100, 100, 101, 99]]] * 4)
    options = {**OPTIONS, "num_slots": 4}
    runs = compare_policies(load, ["none", lambda windows, live: _even(live)], **options)
    both = Comparison(runs.simulations)
    assert both.best is runs.simulations[0]
    load = np.array([[[100, 104, 96, 100]]] * 4)
    costly = compare_policies(load, ["none", lambda windows, live: _even(live)], cost=CostModel(), **options)
    assert costly.conclusion.startswith("It hardly pays")


def _odd(live: ExpertLayout) -> ExpertLayout:
    return ExpertLayout([[0, 1, 2, 3]], 4, topology=live.topology)


def _even(live: ExpertLayout) -> ExpertLayout:
    return ExpertLayout([[0, 3, 2, 1]], 4, topology=live.topology)


def test_without_load_nothing_is_said() -> None:
    empty = compare_policies(np.zeros((4, 1, 4)), ["none", "place"], **OPTIONS)
    assert empty.conclusion == "No window that was scored has any load: nothing can be said."
    moving = compare_policies(LOAD, [swap], **OPTIONS)
    assert moving.conclusion.startswith("Best is `swap`")


def test_transfers_between_nodes_are_said() -> None:
    pytest.importorskip("torch", reason="DeepSeek's policy works on tensors")
    load = np.array([[[90, 80, 1, 1, 1, 1, 1, 1]]] * 4)
    topology = Topology(4, 2)
    runs = compare_policies(load, ["none", "deepseek"], topology=topology, num_slots=12, interval=2)
    assert "of them between nodes" in runs.conclusion


# ---- tables ----------------------------------------------------------------------------------------------------------


def test_windows_and_moves_are_tidy_records() -> None:
    load = np.random.default_rng(0).integers(1, 90, (5, 2, 8))
    sim = simulate(load, topology=Topology(4, 2), num_slots=12, interval=2)
    rows = sim.windows()
    assert rows.shape == (10,)
    assert rows.balancedness.reshape(5, 2).tolist() == sim.balancedness.tolist()
    assert rows[(rows.window == 3) & (rows.layer == 1)].max_load.tolist() == [sim.max_load[3, 1]]
    assert rows.scored.reshape(5, 2)[:, 0].tolist() == [False, False, True, True, True]
    moves = sim.moves()
    assert moves.node_transfers.sum() + moves.network_transfers.sum() == sim.total_transfers
    assert moves[moves.layer == 1].window.tolist() == [2, 4]
    (row,) = compare_policies(load, "place", topology=Topology(4, 2), num_slots=12, interval=2).rows()
    assert row.total_balancedness == sim.total_balancedness
    assert (row.policy, row.num_slots, row.redundant, row.num_nodes) == ("place", 12, 4, 2)


def test_records_show_their_first_rows_as_html() -> None:
    html = Records.of({"layer": np.arange(20), "what": ["<b>"] * 20, "x": [0.123456] * 20})._repr_html_()
    assert html.count("<tr>") == 13
    assert "8 more rows" in html
    assert "&lt;b&gt;" in html
    assert "0.1235" in html
    assert "<b>" not in html
    assert mean_of_known(np.array([np.nan])) != 0


# ---- sweeps ----------------------------------------------------------------------------------------------------------

GRID: dict[str, Any] = {"num_slots": [4, 6], "interval": [1, 2]}


def test_a_sweep_is_simulate_for_each_combination_in_order() -> None:
    """Scored on the same windows, whatever the interval."""
    load = np.random.default_rng(0).integers(1, 60, (6, 1, 4))
    rows = sweep(load, GRID, topology=TWO)
    assert list(zip(rows.num_slots.tolist(), rows.interval.tolist(), strict=True)) == [(4, 1), (4, 2), (6, 1), (6, 2)]
    for row in rows:
        numbers: dict[str, Any] = {"num_slots": int(row.num_slots), "interval": int(row.interval)}
        alone = simulate(load, topology=TWO, score_from=2, **numbers)
        assert row.total_balancedness == alone.total_balancedness


def test_a_sweep_ties_slots_to_ranks() -> None:
    """One redundant expert per rank, on two, three and four ranks."""
    load = np.random.default_rng(0).integers(1, 60, (4, 1, 4))
    grid: dict[str, Any] = {"topology": [Topology(2), Topology(3), Topology(4)], "redundant_per_rank": [0, 1]}
    rows = sweep(load, grid, policy="none", interval=2)
    assert rows.num_slots.tolist() == [4, 6, 6, 9, 4, 8]
    with pytest.raises(ValueError, match="`num_slots`"):
        sweep(load, grid, num_slots=8, interval=2)
    with pytest.raises(TypeError, match="`redundant_per_rank` "):
        sweep(load, {"redundant_per_rank": [1.5]}, topology=TWO, interval=2)


def test_a_sweep_goes_on_where_it_ended(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []

    def stop(done: int, total: int) -> None:
        told.append((done, total))
        if len(told) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(LOAD, GRID, topology=TWO, results=tmp_path, progress=stop)
    assert len(list(tmp_path.glob("*.json"))) == 2
    told.clear()
    rows = sweep(LOAD, GRID, topology=TWO, results=tmp_path, progress=lambda *step: told.append(step))
    assert told == [(3, 4), (4, 4)]
    assert rows.tolist() == sweep(Trace(LOAD), GRID, topology=TWO).tolist()
    assert sweep(LOAD, GRID, topology=TWO, results=tmp_path).tolist() == rows.tolist()
    sweep(LOAD + 1, GRID, topology=TWO, results=tmp_path)  # another trace has rows of its own
    sweep(LOAD, GRID, topology=Topology(2, rank_speed=[1, 2]), results=tmp_path)
    assert len(list(tmp_path.glob("*.json"))) == 12


@pytest.mark.slow
@pytest.mark.long
def test_processes_give_the_same_rows() -> None:
    assert sweep(LOAD, GRID, topology=TWO, workers=2).tolist() == sweep(LOAD, GRID, topology=TWO).tolist()
    with pytest.raises(ValueError, match="'best'"):
        sweep(LOAD, {"policy": ["best", "none"]}, topology=TWO, num_slots=4, interval=2, workers=2)


def test_settings_are_told_apart_by_what_they_hold() -> None:
    values: list[Any] = [np.arange(2), np.arange(3), {"a": np.ones(1)}, {"a": np.zeros(1)}, "x", TWO, Topology(2, 2), 3]
    for middle in (0, 1):  # where texts of long arrays leave numbers out
        cost = np.ones((40, 40), dtype=np.int64)
        cost[20, 20] = middle
        values += [{"transfer_cost": torch.from_numpy(cost)}, [cost, 2]]
    assert len({_text(value) for value in values}) == len(values)


def test_functions_cannot_be_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`policy` \(=<function swap.*must be a name"):
        sweep(LOAD, {"policy": [swap]}, results=tmp_path, **OPTIONS)
    with pytest.raises(ValueError, match="a value or more"):
        sweep(LOAD, {"num_slots": []}, topology=TWO)
    assert sweep(LOAD, {"policy": [swap]}, **OPTIONS).policy.tolist() == ["swap"]


def test_a_process_replays_what_was_saved_as_this_one_does(tmp_path: Path) -> None:
    setting: dict[str, Any] = {"policy": "none", "topology": TWO, "num_slots": 4, "interval": 2}
    load = np.arange(1, 17).reshape(4, 1, 4)
    np.save(tmp_path / "load.npy", load)
    assert _replay_file(str(tmp_path / "load.npy"), setting) == simulate(load, **setting).summary()


def test_a_comparison_names_its_replays() -> None:
    runs = compare_policies(LOAD, "none", **OPTIONS)
    assert repr(runs) == f"Comparison({runs['none']!r})"
