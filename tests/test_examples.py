"""The engines of the pages run, and one survives a death."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ENGINE = ROOT / "docs" / "examples" / "small_engine.py"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("arguments", "end"), [([], 4), (["--kill"], 3)])
def test_small_engine_ends_with_every_token_right(arguments: list[str], end: int) -> None:
    """Every token is compared with one process that has no slots; weights are verified at both ends."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, ENGINE, *arguments], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("every token right") == end
    assert "rank 0: 0 layers" not in ran.stdout


@pytest.mark.slow
@pytest.mark.long
def test_an_engine_of_threads_gets_more_even_with_every_token_right() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    engine = ROOT / "docs" / "examples" / "threads_engine.py"
    ran = subprocess.run([sys.executable, engine], env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    before, after = map(float, re.findall(r"0\.\d+", ran.stdout))
    assert before < 0.75 < 0.85 < after
    assert "every token right" in ran.stdout


def test_small_engine_has_the_ten_calls_of_the_guide_by_number() -> None:
    code = ENGINE.read_text()
    guide = (ROOT / "docs" / "guide.md").read_text()
    calls = "SlotResolver ExpertStore verified LoadCounter DispatchTables topk_to_slots Migrator poll start pause"
    for number, call in enumerate(calls.split(), start=1):
        line = re.compile(rf".*{call}\(.*(?:# {number}(?::.*)?$|\n +\"\"\"{number}: )", re.MULTILINE)
        assert line.search(code), (number, call)
        assert f"\n| {number} | " in guide
