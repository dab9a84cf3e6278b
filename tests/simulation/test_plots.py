"""Pictures show the numbers of the replays: what is on the axes is read back."""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np
import pytest

from eplb_core import (
    ExpertLayout,
    TokenTrace,
    Topology,
    Trace,
    compare_policies,
    pair_counts,
    rank_load,
    sweep,
    transfers,
)
from eplb_core.simulation import Comparison

matplotlib = pytest.importorskip("matplotlib", reason="pictures need the extra `notebook`")

from eplb_core.simulation import plots  # noqa: E402

TOPOLOGY = Topology(4, 2)
LOAD = np.random.default_rng(0).integers(1, 90, (9, 3, 8))


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    options: dict[str, Any] = {"topology": TOPOLOGY, "num_slots": 12, "interval": 3}
    return compare_policies(LOAD, ["none", "place"], bound=True, keep_ranks=True, **options)


def test_curves_are_the_balance_of_each_window(comparison: Comparison) -> None:
    axes = plots.plot_balance(comparison).axes[0]
    for line, sim in zip(axes.lines, comparison, strict=False):
        assert line.get_ydata().tolist() == sim.window_balancedness.tolist()
        assert line.get_label().startswith(f"{sim.policy}: ")
    assert axes.lines[2].get_label() == "no layout does better"
    looks = {(str(line.get_linestyle()), line.get_marker()) for line in axes.lines[:2]}
    assert len(looks) == 2  # told apart without colour


def test_one_replay_shows_its_ranks_too(comparison: Comparison) -> None:
    above, below = plots.plot_simulation(comparison["place"]).axes[:2]
    assert above.lines[0].get_ydata().tolist() == comparison["place"].window_balancedness.tolist()
    shown = below.images[0].get_array()
    load = comparison["place"].rank_load
    assert np.allclose(shown, (load / load.mean(axis=1, keepdims=True)).T)


def test_ranks_of_one_layer_need_to_have_been_kept(comparison: Comparison) -> None:
    axes = plots.plot_rank_load(comparison["none"], layer=1).axes[0]
    load = comparison["none"].layer_rank_load
    assert load is not None
    assert np.allclose(axes.images[0].get_array(), (load[:, 1] / load[:, 1].mean(axis=1, keepdims=True)).T)
    bare = compare_policies(LOAD, "none", topology=TOPOLOGY, num_slots=12, interval=3)["none"]
    with pytest.raises(ValueError, match=r"`layer` \(=1\) needs a replay with `keep_ranks=True`"):
        plots.plot_rank_load(bare, layer=1)


def test_before_and_after_show_the_least_even_layer(comparison: Comparison) -> None:
    sim = comparison["place"]
    left, right = plots.plot_before_after(sim.first_layout, sim.layout, LOAD).axes
    loads = [rank_load(layout, LOAD.sum(axis=0)) for layout in (sim.first_layout, sim.layout)]
    windows = [rank_load(layout, LOAD) for layout in (sim.first_layout, sim.layout)]
    even = [(load.mean(axis=2) / load.max(axis=2)).mean(axis=0) for load in windows]
    layer = int(even[0].argmin())
    heights = [bar.get_height() for bar in left.patches]
    assert heights == pytest.approx(
        [*(loads[0][layer] / loads[1][layer].mean()), *(loads[1][layer] / loads[1][layer].mean())]
    )
    assert f"layer {layer}: " in left.get_title(loc="left")
    assert sorted(right.lines[1].get_ydata()) == pytest.approx(sorted(even[1]))


def test_a_frontier_has_a_line_a_policy() -> None:
    rows = sweep(LOAD, {"policy": ["place", "none"], "interval": [1, 3]}, topology=TOPOLOGY, num_slots=12)
    axes = plots.plot_frontier(rows).axes[0]
    assert [line.get_label() for line in axes.lines] == ["place", "none"]
    place = rows[rows.policy == "place"]
    assert sorted(axes.lines[0].get_xdata()) == sorted(place.node_transfers + place.network_transfers)
    assert plots.plot_frontier(rows, x="interval", by="num_slots").axes[0].get_xlabel() == "windows between rebalances"
    assert plots.plot_frontier(rows, x="redundant").axes[0].get_xlabel() == "redundant experts"


def test_replicas_are_named_in_their_slots() -> None:
    layout = ExpertLayout([[0, 1, 0, 2, 3, 3, -1, 0]], 4, topology=TOPOLOGY)
    axes = plots.plot_replicas(layout).axes[0]
    assert [text.get_text() for text in axes.texts] == ["0", "1", "0", "2", "3 x", "3 x", "-", "0"]


def test_moves_come_from_holders_and_go_where_experts_are_new(comparison: Comparison) -> None:
    old, new = comparison["place"].first_layout, comparison["place"].layout
    moves = plots.list_moves(old, new)
    assert len(moves) == transfers(old, new).sum() > 0
    for layer, expert, source, target in moves.tolist():
        held = [slot // 3 for slot in old.slots(layer, expert)]
        assert source in held
        assert target not in held
        assert target in [slot // 3 for slot in new.slots(layer, expert)]
        near = [rank for rank in held if rank // 2 == target // 2]
        assert source in (near or held)
    axes, bar = plots.plot_moves(old, new).axes
    count = axes.images[0].get_array()
    assert np.nansum(np.ma.filled(count, 0)) == len(moves)
    assert bar.get_yticks().tolist() == list(range(1, int(np.nanmax(count)) + 1))  # whole experts, from one on
    named = plots.plot_moves(old, new, layer=0).axes[0].texts
    experts = [int(word) for text in named for word in text.get_text().split(",")]
    assert sorted(experts) == sorted(moves[moves[:, 0] == 0, 1].tolist())
    assert len(plots.list_moves(old, old)) == 0
    plots.plot_moves(old, old)


def test_many_windows_are_averaged() -> None:
    x, y = plots._thinned(np.arange(200.0))
    assert len(x) == len(y) <= 80
    assert x[0] == y[0] == 1.0
    assert np.isnan(plots._thinned(np.full(100, np.nan))[1]).all()


def test_a_notebook_gets_a_picture(comparison: Comparison) -> None:
    assert plots.plot_balance(comparison)._repr_png_().startswith(b"\x89PNG")


def test_without_matplotlib_the_extra_is_named(comparison: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    before = builtins.__import__

    def absent(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return before(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ImportError, match=r"pip install 'eplb-core\[notebook\]'"):
        plots.plot_balance(comparison)


def test_what_is_not_known_or_far_apart_or_on_one_node_is_drawn_too() -> None:
    options: dict[str, Any] = {"topology": Topology(4), "num_slots": 12, "interval": 3}
    bare = compare_policies(LOAD, "none", **options)["none"]
    above, below = plots.plot_simulation(bare).axes[:2]
    assert above.get_legend() is None
    assert below.images
    long = np.random.default_rng(0).integers(1, 90, (64, 1, 8))
    run = compare_policies(long, "none", **options)["none"]
    assert not any(text.get_text() == "not scored" for text in plots.plot_simulation(run).axes[0].texts)
    chosen = plots.plot_before_after(bare.layout, bare.layout, LOAD, layer=2).axes[0]
    assert "layer 2: " in chosen.get_title(loc="left")
    rows = sweep(long, {"interval": [1, 40]}, policy="none", topology=Topology(4), num_slots=12)
    assert plots.plot_frontier(rows, x="interval").axes[0].get_xscale() == "log"
    turned = ExpertLayout(bare.layout.physical_to_logical_map[:, ::-1].copy(), 8, topology=Topology(4))
    title = plots.plot_moves(bare.layout, turned).axes[0].get_title(loc="left")
    assert "experts move" in title
    assert "between nodes" not in title


def test_raw_load_is_shown_over_windows_as_skew_and_as_drift() -> None:
    load = np.full((6, 2, 4), 10)
    load[:, 1] = [10, 40, 20, 10]
    load[3:, 1] = [40, 10, 20, 10]  # three of eight tokens change experts
    picture = plots.plot_load(Trace(load, layer_ids=(5, 9)))
    heat, skew, drift = picture.axes[:3]
    assert "layer 9" in heat.get_title(loc="left")
    order = [int(text.get_text()) for text in heat.get_yticklabels()]
    assert order == [0, 1, 2, 3]
    shown = heat.images[0].get_array()
    assert np.allclose(shown, (load[:, 1] / 20).T)
    assert skew.lines[0].get_ydata().tolist() == [1.25, 1.25, 1.0, 0.5]
    first, before = (line.get_ydata().tolist() for line in drift.lines)
    assert first == pytest.approx([np.nan, 0, 0, *[0.1875] * 3], nan_ok=True)
    assert before == pytest.approx([np.nan, 0, 0, 0.1875, 0, 0], nan_ok=True)
    for axes in (skew, drift):
        assert axes.get_ylim()[0] == 0
    assert "layer 5" in plots.plot_load(Trace(load, layer_ids=(5, 9)), layer=0).axes[0].get_title(loc="left")
    plots.plot_load(load[0])
    gaps = load.copy()
    gaps[0], gaps[2, 1], gaps[4] = 0, 0, 0
    plots.plot_load(gaps)._repr_png_()


def test_experts_that_tokens_use_together_are_shown_over_chance() -> None:
    tokens = TokenTrace(np.array([[[0, 1]], [[2, 3]], [[0, 1]], [[2, 3]], [[0, 2]], [[1, 3]]]), 4, 2)
    axes = {each.get_title(loc="left"): each for each in plots.plot_load(tokens).axes}["layer 0: used by one token"]
    lift = axes.images[0].get_array()
    assert np.isnan(np.diag(np.ma.filled(lift, np.nan))).all()
    assert lift[0, 1] == lift[2, 3] == pytest.approx(2.0)  # two of six tokens, where each pair has one by chance
    assert lift[0, 3] == 0
    given = plots.plot_load(tokens.load, pairs=pair_counts(tokens.topk_ids, 4)).axes
    assert any(np.array_equal(each.images[0].get_array(), lift, equal_nan=True) for each in given if each.images)
    with pytest.raises(ValueError, match=r"`pairs` \(shape \[3, 3\]\) must be \[4, 4\]"):
        plots.plot_load(tokens.load, pairs=np.zeros((3, 3)))
    for wrong, match in ((np.full((4, 4), np.nan), "finite"), (np.triu(np.ones((4, 4))), "symmetric")):
        with pytest.raises(ValueError, match=f"`pairs`.*{match}"):
            plots.plot_load(tokens.load, pairs=wrong)
    plots.plot_load(tokens.load, pairs=np.zeros((4, 4)))._repr_png_()


def test_experts_are_shown_node_by_node_before_and_after() -> None:
    pairs = pair_counts([[0, 2], [1, 3]] * 20, 4)
    topology = Topology(2, 2)
    layouts = {"before": ExpertLayout([[0, 1, 2, 3]], 4, topology=topology)}
    layouts["after"] = ExpertLayout([[0, 2, 3, 1]], 4, topology=topology)
    before, after = (each for each in plots.plot_together(pairs, layouts).axes if each.images)
    assert np.ma.filled(before.images[0].get_array(), np.nan)[0, 2] > 1.0
    assert np.ma.filled(after.images[0].get_array(), np.nan)[0, 1] > 1.0
    assert [line.get_ydata()[0] for line in after.lines] == [1.5, 0.0]
    assert ("0%" in before.get_title(loc="left"), "100%" in after.get_title(loc="left")) == (True, True)
    with pytest.raises(ValueError, match="`layouts`"):
        plots.plot_together(pairs, {})
    with pytest.raises(IndexError, match="`layer`"):
        plots.plot_together(pairs, layouts, layer=1)
    with pytest.raises(ValueError, match="`pairs`"):
        plots.plot_together(pairs[:3, :3], layouts)
    with pytest.raises(TypeError, match="`layouts`"):
        plots.plot_together(pairs, {"before": pairs})  # type: ignore[dict-item]


def test_what_has_no_load_is_not_drawn() -> None:
    load = np.zeros((2, 2, 4), dtype=np.int64)
    with pytest.raises(ValueError, match="`trace`"):
        plots.plot_load(load)
    load[:, 0] = 1
    with pytest.raises(ValueError, match=r"`layer` \(=1\)"):
        plots.plot_load(load, layer=1)
    with pytest.raises(IndexError, match=r"`layer` \(=2\)"):
        plots.plot_load(load, layer=2)
    plots.plot_load(load)


def test_axes_start_at_zero_or_say_where(comparison: Comparison) -> None:
    rows = sweep(LOAD, {"policy": ["place", "none"], "interval": [1, 3]}, topology=TOPOLOGY, num_slots=12)
    sim = comparison["place"]
    for picture in (
        plots.plot_balance(comparison),
        plots.plot_simulation(sim),
        plots.plot_before_after(sim.first_layout, sim.layout, LOAD),
        plots.plot_frontier(rows),
    ):
        for axes in picture.axes:
            if axes.lines and not axes.images:
                low = axes.get_ylim()[0]
                assert axes.get_title(loc="left")
                assert low == 0 or f"starts at {low:.3g}" in axes.get_ylabel()
