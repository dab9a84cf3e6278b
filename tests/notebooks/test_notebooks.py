"""Notebooks run top to bottom, on small sizes, and their sections assert what they show. No Jupyter is needed."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import eplb_core as eplb
from eplb_core.metrics import pairs_on_a_rank

pytest.importorskip("torch", reason="notebooks compare with DeepSeek's policy")
pytest.importorskip("matplotlib", reason="notebooks draw: pip install 'eplb-core[notebook]'")

FOLDER = Path(__file__).parents[2] / "notebooks"
# What the constants of the first cell become.
SMALL: dict[str, dict[str, Any]] = {
    "1_from_trace_to_layout": {"WINDOWS": 16, "LAYERS": 2},
    "2_how_many_redundant_experts": {"WINDOWS": 16, "LAYERS": 2, "EXTRA": (0, 4)},
    "3_how_often_to_rebalance": {"LAYERS": 2, "STRETCH": 16, "INTERVALS": (4, 16)},
    "4_two_replicas_on_one_rank": {"TOKENS": 100},
    "5_write_your_own_policy": {"WINDOWS": 42, "LAYERS": 2},
}


def cells(name: str) -> list[dict[str, Any]]:
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text())
    assert notebook["nbformat"] == 4
    return list(notebook["cells"])


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def printed(cell: dict[str, Any]) -> str:
    """What a cell wrote to stdout, as saved."""
    return "".join("".join(output["text"]) for output in cell.get("outputs", []) if output["output_type"] == "stream")


def run(code: str, space: dict[str, Any]) -> None:
    """A cell as Jupyter runs it: the value of a last expression is shown."""
    tree = ast.parse(code)
    shown = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), space)
    if isinstance(shown, ast.Expr):
        value = eval(compile(ast.Expression(shown.value), "cell", "eval"), space)
        ways = [getattr(value, way) for way in ("_repr_png_", "_repr_html_") if hasattr(value, way)]
        assert not ways or any(way() for way in ways)


def test_all_notebooks_are_listed() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == sorted(SMALL)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.notebook
@pytest.mark.parametrize("name", SMALL)
def test_a_notebook_runs_top_to_bottom(name: str) -> None:
    space: dict[str, Any] = {}
    code = [source(cell) for cell in cells(name) if cell["cell_type"] == "code"]
    run(code[0], space)
    for constant, value in SMALL[name].items():
        assert constant in space, f"{constant} is not set in the first cell"
        space[constant] = value
    for text in code[1:]:
        run(text, space)
    assert space["decision"] == pytest.approx(DECISIONS[name](space))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.notebook
@pytest.mark.parametrize("name", SMALL)
def test_saved_decisions_are_those_of_a_run_at_full_size(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    space: dict[str, Any] = {}
    code = [cell for cell in cells(name) if cell["cell_type"] == "code"]
    for cell in code:
        capsys.readouterr()
        run(source(cell), space)
    assert capsys.readouterr().out == printed(code[-1])


# ---- the figures of each decision, from the library by another way ---------------------------------------------------


def layout_to_load(space: dict[str, Any]) -> dict[str, Any]:
    """By replays of both layouts on the windows that were not seen."""
    windows, load, topology = space["WINDOWS"], space["trace"].load[:, : space["LAYERS"]], space["topology"]
    layout = eplb.place(load[:windows], topology, num_slots=space["SLOTS"]).layout
    options: dict[str, Any] = {"topology": topology, "num_slots": space["SLOTS"], "interval": 1, "score_from": windows}
    before, after = (
        eplb.simulate(load, policy="none", current=each, **options).total_balancedness for each in (None, layout)
    )
    return {"load": bool(before <= 0.98 * after), "digest": layout.digest, "before": before, "after": after}


def redundant_experts(space: dict[str, Any]) -> dict[str, Any]:
    """By replays of a placement of the first half with each number of slots, in time."""
    load, topology, cost = space["load"], space["topology"], space["cost"]
    half = len(load) // 2

    def seconds(slots: int, layout: eplb.ExpertLayout | None, passes: int) -> float:
        options: dict[str, Any] = {"topology": topology, "num_slots": slots, "cost": cost, "window_passes": passes}
        return eplb.simulate(load, policy="none", current=layout, interval=1, score_from=half, **options).total_s

    def saved(passes: int) -> dict[int, float]:
        now = seconds(space["experts"], None, passes)
        placed = {each: eplb.place(load[:half], topology, num_slots=each).layout for each in space["numbers"]}
        return {each - space["experts"]: 1 - seconds(each, layout, passes) / now for each, layout in placed.items()}

    gains, small = saved(space["WINDOW_PASSES"]), saved(64 * space["WINDOW_PASSES"])
    best = min(each for each, gain in gains.items() if gain >= 0.95 * max(gains.values()))
    pays = gains[best] >= 0.02
    return {"pays": pays, "redundant": best, "saved": gains[best], "small": max(small.values()) >= 0.02}


def how_often(space: dict[str, Any]) -> dict[str, Any]:
    """By a replay of each policy alone."""
    alone = {name: eplb.simulate(space["trace"], **space["options"], **how) for name, how in space["policies"].items()}
    least = min(sim.total_s for sim in alone.values())
    near = {name: sim for name, sim in alone.items() if sim.total_s <= 1.01 * least}
    best = min(near, key=lambda name: (near[name].total_transfers, near[name].total_s))
    return {"policy": best, "total_s": near[best].total_s, "transfers": near[best].total_transfers}


def how_to_load(space: dict[str, Any]) -> dict[str, Any]:
    """A slot for each pair on a rank."""
    pairs = len(pairs_on_a_rank(space["layout"]))
    return {"unwritten": pairs, "found": pairs, "left": 0}


def whose_policy(space: dict[str, Any]) -> dict[str, Any]:
    """By a replay of each policy alone."""
    alone = {
        name: eplb.simulate(space["load"], policy=how, **space["options"]) for name, how in space["policies"].items()
    }
    even = {name: sim.total_balancedness for name, sim in alone.items()}
    near = [name for name in alone if even[name] >= 0.99 * max(even.values())]
    best = min(near, key=lambda name: (alone[name].total_transfers, -even[name]))
    return {"policy": best, "balancedness": even[best], "mine": max(even["greedy"], even["recent"])}


DECISIONS = {
    "1_from_trace_to_layout": layout_to_load,
    "2_how_many_redundant_experts": redundant_experts,
    "3_how_often_to_rebalance": how_often,
    "4_two_replicas_on_one_rank": how_to_load,
    "5_write_your_own_policy": whose_policy,
}


@pytest.mark.parametrize("name", SMALL)
def test_sections_assert_what_they_show_and_outputs_are_saved(name: str) -> None:
    sections: list[list[str]] = []
    for cell in cells(name):
        if cell["cell_type"] == "markdown":
            if source(cell).startswith("## "):
                sections.append([])
            continue
        text = source(cell)
        assert text.isascii()
        assert "%" not in {line.lstrip()[:1] for line in text.splitlines()}, "no magics"
        assert cell["execution_count"] is not None
        assert all(output.get("name") != "stderr" for output in cell["outputs"])
        assert not [output for output in cell["outputs"] if output["output_type"] == "error"]
        if sections:
            sections[-1].append(text)
    assert len(sections) >= 3
    assert all(any("assert " in text for text in section) for section in sections)
    pictures = [
        output for cell in cells(name) for output in cell.get("outputs", []) if "image/png" in output.get("data", {})
    ]
    assert pictures
    last = cells(name)[-1]
    assert "\ndecision = {" in f"\n{source(last)}"
    assert printed(last).startswith("Decision: ")
    said = [line for cell in cells(name) for line in printed(cell).splitlines() if line.startswith("Decision")]
    assert len(said) == 1


@pytest.mark.parametrize("name", SMALL)
def test_a_notebook_is_small_enough_to_be_read_online(name: str) -> None:
    assert (FOLDER / f"{name}.ipynb").stat().st_size < 300_000
