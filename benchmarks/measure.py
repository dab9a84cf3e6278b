"""Timing, tables and the record of the machine, for all benchmarks."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
ROOT = Path(__file__).parent.parent


class Times(NamedTuple):
    """Seconds of one call."""

    first: float
    """The first call of this input; of a process, where nothing ran before."""
    median: float
    minimum: float
    calls: int
    """How many made the median, the first not counted."""

    @property
    def columns(self) -> list[str]:
        """First, median and minimum in milliseconds."""
        return [milliseconds(self.first), milliseconds(self.median), milliseconds(self.minimum)]


def parser(name: str, about: str, *, quick: str) -> argparse.ArgumentParser:
    """The options that every benchmark has.

    Args:
        name: Of its module.
        about: The module's docstring.
        quick: What `--quick` makes of it.
    """
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=about.splitlines()[0])
    made.add_argument("--quick", action="store_true", help=quick)
    made.add_argument("--json", type=Path, help="file for the figures")
    return made


def timed(call: Callable[[], T], *, calls: int, budget_s: float) -> tuple[T, Times]:
    """Call once, then up to `calls` times within `budget_s`, but once at least; the first answer and the times."""
    start = time.perf_counter()
    answer = call()
    first = time.perf_counter() - start
    each: list[float] = []
    while len(each) < calls and (not each or sum(each) < budget_s):
        start = time.perf_counter()
        call()
        each.append(time.perf_counter() - start)
    return answer, Times(first, statistics.median(each), min(each), len(each))


def json_of(*arguments: str, **environment: str) -> Any:
    """What a new Python process with these arguments prints as its last line, read as JSON."""
    run_in = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=run_in, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def milliseconds(seconds: float) -> str:
    """Three digits that mean something."""
    value = seconds * 1e3
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def rounded(value: Any) -> Any:
    """Three digits, for people."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.3g}") if isinstance(value, float) else value


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown, columns aligned; all but the first column to the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        return f"| {' | '.join(cells)} |"

    rule = f"|{'-' * (widths[0] + 2)}|" + "".join(f"{'-' * (width + 1)}:|" for width in widths[1:])
    return "\n".join([line(head), rule, *(line(row) for row in rows)])


def one_thread() -> None:
    """Peers and ours alike: torch and the compiler's runtime on one thread."""
    import numba
    import torch

    torch.set_num_threads(1)
    numba.set_num_threads(1)


def environment() -> dict[str, Any]:
    """What a number needs beside it: machine, versions, commit, threads."""
    import torch

    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch_threads": torch.get_num_threads(),
        "versions": {name: metadata.version(name) for name in ("numpy", "numba", "torch")},
        "commit": _commit(),
        "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def write_json(path: Path | None, record: dict[str, Any]) -> None:
    """`record` and the environment, if a path is given."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"environment": environment(), **record}, indent=1) + "\n")


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    """Of this checkout; a copy without history names its own in COMMIT."""
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]
    where = Path(__file__).parent
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=where, capture_output=True, text=True, check=True)
        dirty = subprocess.run(["git", "status", "--porcelain"], cwd=where, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + (" and changes" if dirty.stdout.strip() else "")
