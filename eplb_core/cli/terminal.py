"""What the command line prints with: progress on stderr, JSON without NaN."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
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


def to_json(value: object) -> str:
    """JSON text of plain values and numpy ones; NaN becomes null, which every reader knows."""
    return json.dumps(_jsonable(value), indent=2)


def _jsonable(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return _jsonable(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    return value


def number(value: float) -> str:
    """A balancedness in three digits; `-` where there is none."""
    return "-" if math.isnan(value) else f"{value:.3f}"
