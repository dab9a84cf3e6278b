"""Progress: a bar on a terminal, and in a notebook below its cell; one line on stderr elsewhere."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from typing import Any


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show that work goes on; yields a function of steps done and in all, 0 in all where that is not known.

    On a terminal a bar on stderr (rich, where installed, else a line that is rewritten); in a notebook a bar below the
    cell, which goes when the work is done; otherwise one plain line on stderr.
    """
    if hasattr(getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)(), "kernel"):
        with _cell(what) as step:
            yield step
        return
    if not sys.stderr.isatty():
        print(f"{what} ...", file=sys.stderr, flush=True)
        yield lambda done, total: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        with _plain(what) as step:
            yield step
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def _cell(what: str) -> Iterator[Callable[[int, int], None]]:
    """In a notebook, without widgets: so it shows in each frontend, and leaves nothing to what is saved."""
    ipython: Any = importlib.import_module("IPython.display")

    def bar(done: int, total: int) -> object:
        full = f' value="{done}" max="{total}"' if total else ""
        count = f" {done}/{total}" if total else f" {done}" if done else ""
        return ipython.HTML(f"<progress{full}></progress> {escape(what)}{count}")

    shown = ipython.display(bar(0, 0), display_id=True)
    try:
        yield lambda done, total: shown.update(bar(done, total))
    finally:
        shown.update(ipython.HTML(""))


@contextmanager
def _plain(what: str) -> Iterator[Callable[[int, int], None]]:
    def step(done: int, total: int) -> None:
        print(f"\r{what} {done}/{total} ", end="", file=sys.stderr, flush=True)

    print(f"{what} ...", end="", file=sys.stderr, flush=True)
    try:
        yield step
    finally:
        print(f"\r{' ' * (len(what) + 20)}\r", end="", file=sys.stderr, flush=True)
