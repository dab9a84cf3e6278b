"""Migrations whose keeper is killed: the engine stays right, and the restarted keeper says what it knows."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from eplb_core import LayoutClient, LayoutRecord, LayoutServer, save_layout
from tests.loading.engine_process import end, spawn, until
from tests.loading.fleets import fleet
from tests.loading.worlds import NEW, OLD


@contextmanager
def keeper(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """`eplb record serve` with memory that is kept, whoever dies."""
    files = [str(folder / name) for name in ("socket", "layout.json", "state")]
    save_layout(OLD, files[1])
    options = ["--layout", files[1], "--state", files[2], "--memory", "m1", "--ranks", "2"]
    process = spawn(sys.executable, "-m", "eplb_core", "record", "serve", files[0], *options)
    assert process.stdout is not None
    try:
        assert process.stdout.readline().startswith("ready")
        yield process
    finally:
        end(process)


class Killing(LayoutClient):
    """A client whose keeper is killed at one point of the second layer."""

    process: subprocess.Popen[str]
    phase: str
    begun = 0

    def begin(self, layers: Any, version: int) -> Any:
        self.begun += 1
        if self.begun == 2 and self.phase == "before begin is answered":
            self.process.send_signal(signal.SIGSTOP)  # it reads no request any more
            threading.Timer(0.05, self.kill).start()
        reply = super().begin(layers, version)
        self.kill_at("after begin")
        return reply

    def commit(self, layers: Any, rows: Any) -> Any:
        self.kill_at("between install and commit")
        reply = super().commit(layers, rows)
        self.kill_at("after commit")
        return reply

    def kill_at(self, phase: str) -> None:
        if self.begun == 2 and self.phase == phase:
            self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


PENDING = "the move of layer 1 by engine 'a' from version 1 was pending when the keeper"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "cause", "installed", "said"),
    [
        pytest.param("before begin is answered", "refused", 1, "", marks=pytest.mark.long),
        ("after begin", "record", 2, PENDING),
        ("between install and commit", "record", 2, PENDING),
        pytest.param("after commit", "refused", 2, "", marks=pytest.mark.long),
    ],
)
def test_a_keeper_that_is_killed_ends_moves_and_the_next_one_says_what_it_knows(
    tmp_path: Path, phase: str, cause: str, installed: int, said: str
) -> None:
    """R6, R7, R28, R29: the engine never dispatches by a layout that its weights are not in (`Fleet.look`)."""
    with LayoutServer(tmp_path / "other", LayoutRecord(OLD)) as other, keeper(tmp_path) as process:
        first, second = Killing(tmp_path / "socket", "a"), LayoutClient(tmp_path / "other", "a")
        first.process, first.phase = process, phase
        with first, second, fleet(OLD, records={0: first, 1: second}) as ranks:
            ranks.move(NEW)
            status = ranks.first.status
            assert (status.cause, status.installed, status.rank) == (cause, installed, 0)
            assert "closed the connection" in status.reason
            assert ranks.first.layout == OLD.replace(NEW, list(range(installed)))
            assert not any(migrator.start(OLD) for migrator in ranks.migrators.values())  # for good
            reached = ranks.first.layout
            assert other.state is not None
            assert other.state.digest == reached.digest  # the other rank's keeper has it, whatever became of this one
        with keeper(tmp_path), LayoutClient(tmp_path / "socket", "b") as late:
            assert late.found is not None
            assert late.found.version == (2 if phase == "after commit" else 1)
            assert late.found.num_non_followers == 1  # 'a' may still use the memory
            assert said in late.found.dirty
            assert bool(late.found.dirty) == bool(said)
            if not said:
                assert late.found.digest == reached.digest
            assert late.begin([2], late.found.version).status == "refused"
        until(lambda: other.state is not None and other.state.engines == ())
        assert other.state.dirty == ""
