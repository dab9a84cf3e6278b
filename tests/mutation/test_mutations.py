"""Every rule has a test that notices when it is broken.

Each `mutations_*.py` beside this file lists changes as (file, text before, text after, test that must fail), and after
these "rule N" where the change breaks one of the rules that always hold (docs/architecture.md). Always checked: that
the text before stands in its file once and that the test exists. `make mutants` makes each change in a
copy of the checkout and runs its test there, which must fail; that takes too long for every run.

A list with `INTERPRETED = True` is tried without compilation: its kernels are plain Python, and nothing is compiled
anew for every change.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDERS = ("eplb_core", "tests", "benchmarks")


class Mutation(NamedTuple):
    file: str
    before: str
    after: str
    test: str
    interpreted: bool


def mutations() -> Iterator[tuple[str, Mutation]]:
    """Name and change of all lists."""
    for path in sorted(HERE.glob("mutations_*.py")):
        lists = runpy.run_path(str(path))
        for number, change in enumerate(lists["MUTATIONS"]):
            name = f"{path.stem.removeprefix('mutations_')}-{number}"
            file, before, after, test, *_ = change
            yield name, Mutation(file, before, after, test, bool(lists.get("INTERPRETED", False)))


ALL = dict(mutations())


@pytest.mark.parametrize("name", ALL)
def test_a_mutation_fits_the_code_and_names_a_test(name: str) -> None:
    change = ALL[name]
    assert (ROOT / change.file).read_text().count(change.before) == 1, change
    assert change.after != change.before
    file, *names = change.test.split("::")
    assert (ROOT / file).exists(), change
    text = (ROOT / file).read_text() if names else ""
    for word in names:
        assert re.search(rf"^\s*(def|class) {word.partition('[')[0]}\b", text, re.M), change


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy to change."""
    copy = tmp_path_factory.mktemp("mutants")
    leave = shutil.ignore_patterns("__pycache__", "*.nbi", "*.nbc", ".*")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=leave)
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, copy)
    return copy


@pytest.mark.mutation
@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_a_mutant_is_noticed(name: str, checkout: Path) -> None:
    change = ALL[name]
    file = checkout / change.file
    original = file.read_text()
    file.write_text(original.replace(change.before, change.after))
    try:
        done = run(change, checkout)
    finally:
        file.write_text(original)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, (change, done.stdout[-2000:], done.stderr[-2000:])


def run(change: Mutation, checkout: Path) -> subprocess.CompletedProcess[str]:
    """The named test, in the changed copy."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not mutation"]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    environment["NUMBA_CACHE_DIR"] = str(checkout / "cache")
    if change.interpreted:
        environment["NUMBA_DISABLE_JIT"] = "1"
    # A change that makes a loop endless is noticed too: by the clock.
    try:
        return subprocess.run(
            [sys.executable, "-m", "pytest", *options, change.test],
            cwd=checkout,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
    except subprocess.TimeoutExpired as late:
        return subprocess.CompletedProcess(late.cmd, pytest.ExitCode.TESTS_FAILED, "", "ran for 300 s")
