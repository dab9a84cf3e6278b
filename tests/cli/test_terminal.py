"""Progress and JSON of the command line, with streams that say they are terminals."""

from __future__ import annotations

import io
import json
import sys

import numpy as np
import pytest

from eplb_core.cli.terminal import number, progress, to_json


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_without_a_terminal_progress_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress("work") as step:
        step(1, 2)
    assert stream.getvalue() == "work ...\n"


def test_without_rich_a_line_is_rewritten_and_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with progress("work") as step:
        step(1, 2)
    assert "\rwork 1/2 " in stream.getvalue()
    assert stream.getvalue().endswith(" \r")


def test_with_rich_a_bar_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich", reason="the bar needs rich")
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress("work") as step:
        step(1, 2)
    assert "work" in stream.getvalue()


def test_json_has_no_nan() -> None:
    value = {
        "a": np.float64("nan"),
        "b": [float("inf"), np.int64(3)],
        "c": np.array([1.0, np.nan]),
        4: ("x", None, True),
    }
    assert json.loads(to_json(value)) == {"a": None, "b": [None, 3], "c": [1.0, None], "4": ["x", None, True]}


def test_numbers_are_short() -> None:
    assert (number(0.98765), number(float("nan"))) == ("0.988", "-")
