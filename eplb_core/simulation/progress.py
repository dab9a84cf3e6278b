"""Progress on stderr: a bar on a terminal, one line elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show on stderr that work goes on; yields a function of steps done and in all.

    On a terminal a bar (rich, where installed, else a line that is rewritten), otherwise one plain line.
    """
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
def _plain(what: str) -> Iterator[Callable[[int, int], None]]:
    def step(done: int, total: int) -> None:
        print(f"\r{what} {done}/{total} ", end="", file=sys.stderr, flush=True)

    print(f"{what} ...", end="", file=sys.stderr, flush=True)
    try:
        yield step
    finally:
        print(f"\r{' ' * (len(what) + 20)}\r", end="", file=sys.stderr, flush=True)
