"""Every rule has a test that notices when it is broken.

Each `mutations_*.py` beside this file lists changes as (file, text before, text after, test that must fail), and after
these "rule N" where the change breaks one of the rules that always hold (docs/architecture.md). Always checked: that
the text before stands in its file once, that the test exists, and that every rule has a change. `make mutants` makes
each change in a copy of the checkout and runs its test there, which must fail.

A list with `INTERPRETED = True` is tried without compilation: its kernels are plain Python.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class Mutation(NamedTuple):
    file: str
    before: str
    after: str
    test: str
    rule: str = ""
    interpreted: bool = False


ALL: dict[str, Mutation] = {}
for path in sorted(HERE.glob("mutations_*.py")):
    lists = runpy.run_path(str(path))
    for number, entry in enumerate(lists["MUTATIONS"]):
        mutation = Mutation(*entry)._replace(interpreted=lists.get("INTERPRETED", False))
        ALL[f"{path.stem.removeprefix('mutations_')}-{number} {mutation.rule}".strip()] = mutation


@pytest.mark.parametrize("name", ALL)
def test_a_mutation_fits_the_code_and_names_a_test(name: str) -> None:
    change = ALL[name]
    assert (ROOT / change.file).read_text().count(change.before) == 1, change
    assert change.after != change.before
    file, *names = change.test.split("::")
    assert (ROOT / file).exists(), change
    for word in names:
        assert re.search(rf"^\s*(def|class) {word.partition('[')[0]}\b", (ROOT / file).read_text(), re.M), change


def test_every_rule_has_a_mutation() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rules = re.findall(
        r"^(\d+)\. ", re.split("^## ", page.partition("## Rules that always hold")[2], flags=re.M)[0], re.M
    )
    assert len(rules) == 11
    assert {f"rule {number}" for number in rules} - {change.rule for change in ALL.values()} == set()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy to change."""
    copy = tmp_path_factory.mktemp("mutants")
    for folder in ("eplb_core", "tests", "benchmarks"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", ".*"))
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
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    environment["NUMBA_CACHE_DIR"] = str(checkout / "cache")
    if change.interpreted:
        environment["NUMBA_DISABLE_JIT"] = "1"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not mutation", change.test]
    file.write_text(original.replace(change.before, change.after))
    try:
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        return  # a change that makes a loop endless is noticed by the clock
    finally:
        file.write_text(original)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, (change, done.stdout[-2000:], done.stderr[-2000:])
