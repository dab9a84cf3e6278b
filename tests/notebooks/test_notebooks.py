"""Notebooks run top to bottom, on small sizes, and their sections assert what they show. No Jupyter is needed."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

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
        assert not [output for output in cell["outputs"] if output["output_type"] == "error"]
        if sections:
            sections[-1].append(text)
    assert len(sections) >= 3
    assert all(any("assert " in text for text in section) for section in sections)
    pictures = [
        output for cell in cells(name) for output in cell.get("outputs", []) if "image/png" in output.get("data", {})
    ]
    assert pictures


@pytest.mark.parametrize("name", SMALL)
def test_a_notebook_is_small_enough_to_be_read_online(name: str) -> None:
    assert (FOLDER / f"{name}.ipynb").stat().st_size < 300_000
