"""`import eplb_core`: every public name is there, and nothing is loaded before it is asked for."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import eplb_core

ROOT = Path(eplb_core.__file__).parent
HEAVY = ("torch", "numba", "llvmlite", "numpy", "scipy", "matplotlib", "rich", "safetensors", "triton")


def loaded_after(code: str) -> list[str]:
    """Modules of a new process after `code`."""
    program = f"import sys, json\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT.parent, capture_output=True, text=True, check=True, timeout=120
    )
    modules: list[str] = json.loads(done.stdout)
    return modules


@pytest.mark.slow
def test_the_import_loads_nothing_heavy() -> None:
    modules = loaded_after("import eplb_core; dir(eplb_core); eplb_core.__version__")
    assert [name for name in modules if name.split(".")[0] in HEAVY] == []
    assert [name for name in modules if name.startswith("eplb_core.")] == []


@pytest.mark.slow
def test_layouts_and_metrics_need_neither_torch_nor_the_compiler() -> None:
    modules = loaded_after(
        "import eplb_core as e\n"
        "layout = e.ExpertLayout.trivial(1, 4, num_slots=4, topology=e.Topology(2))\n"
        "e.mean_balancedness(e.rank_load(layout, [[1, 2, 3, 4]])), layout.digest"
    )
    assert [name for name in modules if name.split(".")[0] in ("torch", "numba", "llvmlite")] == []


@pytest.mark.slow
def test_placement_does_not_need_torch() -> None:
    modules = loaded_after("import eplb_core; eplb_core.place")
    assert "numba" in modules
    assert "torch" not in modules


@pytest.mark.parametrize("name", eplb_core.__all__)
def test_every_public_name_resolves_and_stays_the_same(name: str) -> None:
    value = getattr(eplb_core, name)
    assert value is getattr(eplb_core, name)
    assert value.__module__ == f"eplb_core.{eplb_core._HOME_OF[name]}"
    assert value.__doc__


def test_the_table_of_homes_and_the_imports_for_type_checkers_name_the_same() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text())
    (block,) = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    imports = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.asname == alias.name  # the form that says: public
            imports[alias.name] = node.module
    assert imports == {name: f"eplb_core.{home}" for name, home in eplb_core._HOME_OF.items()}
    assert sum(len(names.split()) for names in eplb_core._HOMES.values()) == len(eplb_core._HOME_OF)


def test_dir_lists_every_public_name() -> None:
    assert set(eplb_core.__all__) <= set(dir(eplb_core))


def test_other_names_are_no_attributes() -> None:
    with pytest.raises(AttributeError, match="module 'eplb_core' has no attribute 'palce'"):
        eplb_core.palce  # noqa: B018
