"""Progress on streams that say they are terminals, and in a notebook."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from eplb_core import Topology, backtest, gain_report, plan_slots
from eplb_core.placement.forecast import FORECASTERS
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


def test_a_notebook_gets_a_bar_below_its_cell_that_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for IPython in a kernel."""
    shown: list[str] = []

    def display(html: str, *, display_id: bool) -> SimpleNamespace:
        assert display_id
        shown.append(html)
        return SimpleNamespace(update=shown.append)

    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(HTML=str, display=display))
    with progress_bar("a <sweep>") as step:
        step(1, 4)
        step(2, 0)
    assert shown == [
        "<progress></progress> a &lt;sweep&gt;",
        '<progress value="1" max="4"></progress> a &lt;sweep&gt; 1/4',
        "<progress></progress> a &lt;sweep&gt; 2",
        "",
    ]


def test_calls_that_take_seconds_say_how_far_they_are() -> None:
    load, topology = np.arange(1, 25).reshape(3, 2, 4), Topology(2)
    told: list[tuple[int, int]] = []

    def step(done: int, total: int) -> None:
        told.append((done, total))

    gain_report(load, topology, num_slots=[4, 6], progress=step)
    plan_slots(load, topology, total_slots=5, choices=[2, 3], progress=step)
    two = {name: FORECASTERS[name] for name in ("last", "all")}
    backtest(load, two, topology=topology, num_slots=6, interval=1, progress=step)
    assert told == [(1, 2), (2, 2)] * 3
