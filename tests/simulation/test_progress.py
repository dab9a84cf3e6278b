"""Progress on stderr, with streams that say they are terminals."""

from __future__ import annotations

import io
import sys

import pytest

from eplb_core.simulation import progress_bar


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_without_a_terminal_progress_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar("work") as step:
        step(1, 2)
    assert stream.getvalue() == "work ...\n"


def test_without_rich_a_line_is_rewritten_and_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with progress_bar("work") as step:
        step(1, 2)
    assert "\rwork 1/2 " in stream.getvalue()
    assert stream.getvalue().endswith(" \r")


def test_with_rich_a_bar_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich", reason="the bar needs rich")
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar("work") as step:
        step(1, 2)
    assert "work" in stream.getvalue()
