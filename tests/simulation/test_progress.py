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


@pytest.mark.parametrize(
    ("stream", "missing", "first", "last"),
    [
        (io.StringIO(), "", "work ...", "work ...\n"),
        (Terminal(), "rich.console", "\rwork 1/2 ", " \r"),
        (Terminal(), "", "work", ""),
    ],
    ids=["without a terminal one line", "without rich a line is rewritten and cleared", "with rich a bar"],
)
def test_progress_is_shown(
    stream: io.StringIO, missing: str, first: str, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)
    elif isinstance(stream, Terminal):
        pytest.importorskip("rich", reason="the bar needs rich")
    with progress_bar("work") as step:
        step(1, 2)
    assert first in stream.getvalue()
    assert stream.getvalue().endswith(last)
    assert isinstance(stream, Terminal) or stream.getvalue() == last
