"""Migrations of real processes: gloo agrees, SharedMemory reads; ranks are really killed and stopped."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.loading.engine_process import spawn

pytest.importorskip("torch.distributed", reason="ranks agree over gloo")


def run(scenario: str, size: int, folder: Path, option: int) -> list[Any]:
    """What each rank printed; None for one that did not come to its end."""
    command = [sys.executable, "-m", "tests.loading.moves.moving_process", scenario]
    processes = [
        spawn(*command, str(rank), str(size), str(folder), str(option), OMP_NUM_THREADS="1") for rank in range(size)
    ]
    answers: list[Any] = []
    try:
        for process in processes:
            lines = process.communicate(timeout=120)[0].splitlines()
            answers.append(json.loads(lines[-1]) if lines else None)
            assert process.returncode in (0, -9)  # what it raised stands in what the test captured
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_random_migrations_of_processes_are_exact_after_every_pass(size: int, tmp_path: Path) -> None:
    answers = run("randomly", size, tmp_path, 30)
    assert len({answer["layout"] for answer in answers}) == 1
    assert len({answer["installed"] for answer in answers}) == 1
    assert [(answer["cause"], answer["stopped"]) for answer in answers] == [("", True)] * size


@pytest.mark.slow
@pytest.mark.parametrize("after", [2, pytest.param(6, marks=pytest.mark.long)])
def test_when_a_process_is_killed_the_others_name_it_agree_and_go_on(after: int, tmp_path: Path) -> None:
    """R61."""
    answers = run("killed", 4, tmp_path, after)
    assert answers.pop(2) is None
    assert len({answer["layout"] for answer in answers}) == 1
    for answer in answers:
        assert "rank 2 did not answer" in answer["reason"]
        assert answer["stopped"] is True


@pytest.mark.slow
def test_a_stopped_process_that_comes_back_changes_nothing_and_knows_that_it_is_out(tmp_path: Path) -> None:
    """F4, R61."""
    answers = run("stopped", 3, tmp_path, 5)
    assert answers[0]["layout"] == answers[1]["layout"]
    for answer in answers[:2]:
        assert "rank 2 did not answer" in answer["reason"]
    assert "did not answer" in answers[2]["reason"]
