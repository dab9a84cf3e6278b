"""Imports run one way: no circle of files, and no room of the house looks into one above it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import eplb_core

ROOT = Path(eplb_core.__file__).parent
# The rooms into which each room of the core may look, besides its own and the files beside the rooms.
CORE: dict[str, set[str]] = {
    "files": set(),
    "placement": set(),
    "balancer": {"placement"},
    "dispatch": set(),
    "loading": {"files"},
}
ROOMS = {*CORE, "simulation", "adapters", "testing", "cli"}


def modules() -> dict[str, Path]:
    """Every module of the package by its name."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


FILES = modules()


def imported(path: Path) -> Iterator[str]:
    """Modules of the package that a file imports, anywhere: in functions, and for type checkers alone, too."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in FILES)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports by a relative name"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name in FILES:
                    yield name
                elif node.module in FILES:
                    yield node.module


GRAPH = {name: sorted(set(imported(path)) - {name}) for name, path in FILES.items()}


def circle(graph: dict[str, list[str]]) -> list[str]:
    """Names along a circle, or nothing: what remains when files that import nothing left are taken away is searched."""
    left = dict(graph)
    while done := [name for name, needs in left.items() if not any(need in left for need in needs)]:
        for name in done:
            del left[name]
    if not left:
        return []
    way = [min(left)]
    while (after := min(need for need in left[way[-1]] if need in left)) not in way:
        way.append(after)
    return [*way[way.index(after) :], after]


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circle(GRAPH) == []


def test_a_circle_is_found_wherever_it_is() -> None:
    assert circle({"a": ["b"], "b": ["c"], "c": []}) == []
    assert circle({"a": ["b"], "b": ["c"], "c": ["b"]}) == ["b", "c", "b"]


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_room_looks_into_none_beside_or_above_it(name: str) -> None:
    """The core knows no engine, and what loading fills is never asked of what dispatch uses."""
    room = name.split(".")[1] if name.count(".") else ""
    if room not in CORE:
        return
    for other in ROOMS - {room, *CORE[room]}:
        assert not [found for found in GRAPH[name] if found.startswith(f"eplb_core.{other}.")]
