from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from eplb_core.adapters import warm


@pytest.fixture(autouse=True)
def _cold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that has loaded nothing yet, with a folder for locks of its own."""
    monkeypatch.setattr(warm, "_ready", [])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_kernels_are_made_ready_once_with_lines_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """FD1."""
    calls: list[int] = []
    monkeypatch.setattr(warm, "warm_up", lambda: calls.append(1))
    assert [warm.warm_up_once(), warm.warm_up_once(), calls] == [None, None, [1]]
    first, second = caplog.messages
    assert "compiled in one process for all" in first
    assert "kernels are ready after" in second


def test_an_error_is_returned_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    error = OSError("no room for compiled code")

    def fails() -> None:
        raise error

    monkeypatch.setattr(warm, "warm_up", fails)
    assert warm.warm_up_once() is error
    assert "kernels could not be compiled at the start: OSError: no room" in caplog.text


def test_a_second_process_waits_for_the_first_and_then_holds_up_no_third(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = os.open(tmp_path / f"eplb_core-warm-up-{os.getuid()}", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(first, fcntl.LOCK_EX)
    entered, leave = threading.Event(), threading.Event()

    def enter() -> None:
        entered.set()
        assert leave.wait(60)

    monkeypatch.setattr(warm, "warm_up", enter)
    second = threading.Thread(target=warm.warm_up_once)
    second.start()
    assert not entered.wait(0.1)
    os.close(first)
    assert entered.wait(60)
    third: Any = os.open(tmp_path / f"eplb_core-warm-up-{os.getuid()}", os.O_RDWR)
    fcntl.flock(third, fcntl.LOCK_SH | fcntl.LOCK_NB)
    os.close(third)
    leave.set()
    second.join(60)


def test_where_no_lock_can_be_made_each_process_compiles_by_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nor is one followed to another file."""
    calls: list[int] = []
    monkeypatch.setattr(warm, "warm_up", lambda: calls.append(1))
    (tmp_path / f"eplb_core-warm-up-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    assert warm.warm_up_once() is None
    assert calls == [1]
    assert not (tmp_path / "elsewhere").exists()
