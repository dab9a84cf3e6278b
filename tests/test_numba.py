"""Kernels compile one way: cached, without the interpreter lock, in strict arithmetic."""

from __future__ import annotations

import importlib
import pkgutil
import re
import shutil
from pathlib import Path
from typing import Any

import numba
import pytest

import eplb_core
from eplb_core._numba import _imported, _stamp
from eplb_core.placement.pack.block import sort_by_load
from tests.processes import python

ROOT = Path(eplb_core.__file__).parent
compiled = pytest.mark.skipif(not hasattr(sort_by_load, "py_func"), reason="runs without compilation")

QUIET = {"PYTHONDONTWRITEBYTECODE": "1"}
WITH_KERNELS = [file for file in sorted(ROOT.rglob("*.py")) if "_numba import" in file.read_text("utf-8")]


def kernels() -> dict[str, Any]:
    """All compiled functions of the package by module and name."""
    found = {}
    for info in pkgutil.walk_packages([str(ROOT)], "eplb_core."):
        if info.name.endswith(("__main__", "_triton")) or ".adapters." in info.name:
            continue
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            if isinstance(value, numba.core.dispatcher.Dispatcher) and value.py_func.__module__ == info.name:
                found[f"{info.name}.{name}"] = value
    return found


@compiled
@pytest.mark.slow
def test_every_kernel_lets_go_of_the_lock_is_cached_and_rounds_as_written() -> None:
    pytest.importorskip("torch", reason="some modules with kernels work on tensors")
    all_kernels = kernels()
    assert len(all_kernels) > 30
    for name, dispatcher in all_kernels.items():
        options = dispatcher.targetoptions
        assert options["nogil"] is True, name
        assert not options.get("fastmath"), name
        assert not options.get("parallel"), name
        assert options["error_model"] == "numpy", name
        assert type(dispatcher._cache).__name__ == "FunctionCache", name


def test_kernels_are_compiled_through_one_function_only() -> None:
    for file in sorted(ROOT.rglob("*.py")):
        if file.name != "_numba.py":
            text = file.read_text()
            assert "import numba" not in text, file
            assert "\nfrom numba" not in text, file


@compiled
@pytest.mark.slow
def test_the_disk_cache_notices_a_change_in_a_called_kernels_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """numba itself looks at the caller's file alone and would go on with the old callee inside."""
    package = tmp_path / "eplb_core"
    package.mkdir()
    shutil.copy(ROOT / "_numba.py", package)
    (package / "__init__.py").touch()
    callee = package / "_callee.py"
    (package / "caller.py").write_text(
        "from eplb_core._callee import amount\nfrom eplb_core._numba import kernel\n\n"
        "@kernel\ndef total(x: int) -> int:\n    return x + amount()\n"
    )
    body = "from eplb_core._numba import kernel\n\n@kernel\ndef amount() -> int:\n    return {}\n"

    def run() -> tuple[str, int]:
        program = "from eplb_core.caller import total\nprint(total(1))\nprint(sum(total.stats.cache_misses.values()))"
        answer, misses = python(
            program, folder=tmp_path, PYTHONPATH=str(tmp_path), PYTHONDONTWRITEBYTECODE="1"
        ).stdout.split()
        return answer, int(misses)

    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    callee.write_text(body.format(10))
    assert run() == ("11", 1)
    assert run() == ("11", 0)  # from the disk
    callee.write_text(body.format(2000))
    assert run() == ("2001", 1)


def answer_of(folder: Path, before: str = "", after: str = "", **environment: str) -> tuple[str, str]:
    """What a kernel of a file in `folder` answers in a new process, and what the process says."""
    file = folder / "one.py"
    if not file.exists():
        file.write_text(
            "from eplb_core._numba import inline_kernel, kernel\n\n"
            "@kernel\ndef inner(x: int, up: bool) -> int:\n    return x + 1 if up else x - 1\n\n"
            "@inline_kernel\ndef inlined(x: int, by: int) -> int:\n    return inner(x, True) + inner(by, False)\n\n"
            "@kernel\ndef most(x: int) -> int:\n    return inlined(x, 1) + inlined(x, 2) - inlined(2, x)\n"
        )
    program = f"{before}\nfrom one import inlined, inner, most\nprint(most(1))\n{after}"
    told = {"EPLB_CORE_QUIET": "", **QUIET, **environment}
    done = python(program, "-W", "error", folder=folder, **told)
    return done.stdout, done.stderr


COUNT = """
import collections
from numba.core import compiler
made, compile_extra = collections.Counter(), compiler.compile_extra
def count(typing, target, function, *arguments, **options):
    made[function.__name__] += 1
    return compile_extra(typing, target, function, *arguments, **options)
compiler.compile_extra = count
"""


@compiled
@pytest.mark.slow
@pytest.mark.parametrize(
    "before",
    [
        "import sys\nsys.stderr = open('/dev/full', 'w')",
        "import io, sys\nsys.stderr = io.StringIO()\nsys.stderr.close()",
    ],
)
def test_a_call_does_not_fail_because_the_notice_cannot_be_written(tmp_path: Path, before: str) -> None:
    after = "import os, sys\nsys.stdout.flush()\nos._exit(0)"  # nor does the test ask what Python says of such a stream
    answer, _ = answer_of(tmp_path, before, after, NUMBA_CACHE_DIR=str(tmp_path / "cache"))
    assert answer == "2\n"


@compiled
@pytest.mark.slow
def test_a_called_kernel_is_compiled_once_and_only_into_its_caller(tmp_path: Path) -> None:
    """Copies for each constant, and files and wrappers of called kernels, took two thirds of the time."""
    cache = str(tmp_path / "cache")
    answer, said = answer_of(tmp_path, COUNT, "print(dict(made))\nprint(inlined(1, 1))", NUMBA_CACHE_DIR=cache)
    assert answer == "2\n{'most': 1, 'inlined': 1, 'inner': 1}\n2\n"
    assert {file.name.split("-")[0] for file in Path(cache).rglob("*.nb?")} == {"one.most", "one.inlined"}
    assert said.count("\n") == 1  # for two kernels
    assert said.startswith("eplb_core: this call waits while its kernels are compiled")
    # From the disk nothing is compiled, and nothing said; but for a kernel that nobody has called from Python yet.
    assert answer_of(tmp_path, COUNT, "print(dict(made))", NUMBA_CACHE_DIR=cache) == ("2\n{}\n", "")
    call = "print(inner(1, True), inner(2, False))"
    answer, said = answer_of(tmp_path, "", call, NUMBA_CACHE_DIR=cache, EPLB_CORE_QUIET="1")
    assert (answer, said) == ("2\n2 1\n", "")


@compiled
@pytest.mark.slow
def test_kernels_run_where_no_folder_can_be_written(tmp_path: Path) -> None:
    """A package of root's, a home that is read-only: numba alone would refuse the import. Files stand for both here."""
    (tmp_path / "__pycache__").touch()
    nowhere = str(tmp_path / "__pycache__" / "none")
    answer, said = answer_of(tmp_path, HOME=nowhere, XDG_CACHE_HOME=nowhere, NUMBA_CACHE_DIR=nowhere)
    assert answer == "2\n"
    assert said.count("compiled kernels are not kept on disk (no folder for them can be written)") == 1
    assert said.count("set NUMBA_CACHE_DIR") == 1


@compiled
@pytest.mark.slow
def test_kernels_run_where_the_disk_is_full(tmp_path: Path) -> None:
    """No file may grow here, so that each write fails as on a full disk; no part of a file is left."""
    limit = "import resource\nhard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]\n"
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, ({}, hard))"
    answer, said = answer_of(tmp_path, limit.format(0), limit.format("hard"), NUMBA_CACHE_DIR=str(tmp_path / "cache"))
    assert answer == "2\n"
    assert said.count("compiled kernels are not kept on disk (File too large)") == 1
    assert [file for file in (tmp_path / "cache").rglob("*") if file.is_file()] == []


@pytest.mark.parametrize("file", WITH_KERNELS, ids=lambda file: file.stem)
def test_every_import_of_a_file_with_kernels_is_a_module_that_the_stamp_finds(file: Path) -> None:
    imports = set(re.findall(r"^ *(?:from|import) (eplb_core[\w.]*)", file.read_text("utf-8"), re.MULTILINE))
    assert len(set(_imported(file))) == len(imports)


def test_the_stamp_reaches_what_is_imported_through_another_file() -> None:
    names = {name for name, *_ in _stamp(ROOT / "placement" / "pack" / "layers.py")}
    assert {"layers.py", "refine.py", "block.py", "_numba.py"} <= names
    assert "simulation.py" not in names
