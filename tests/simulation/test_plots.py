"""Pictures show the numbers of the replays: what is on the axes is read back."""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np
import pytest

from eplb_core import ExpertLayout, Topology, compare_policies, rank_load, sweep, transfers
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
    even = [load.mean(axis=1) / load.max(axis=1) for load in loads]
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
    assert plots.plot_frontier(rows, x="interval", by="num_slots").axes[0].get_xlabel() == "interval"
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
