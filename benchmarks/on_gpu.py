"""All that needs GPUs, in one run with a limit on its time: tests, then figures, each written as soon as it is there.

    COMMIT=$(git rev-parse HEAD) python -m benchmarks.on_gpu --into gpu_results --seconds 540

A part that fails or outlasts its limit does not keep the others from running; `summary.txt` says what came of each.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch


class Part(NamedTuple):
    """One command."""

    name: str
    arguments: str
    """After `python -m`; {json} is where it writes its figures."""
    seconds: float
    """After which it is stopped."""
    gpus: int = 1
    """That it needs."""


ENGINE = "benchmarks.engine --preset h200 --passes 120 --json {json}"
PARTS = (
    Part("tests", "pytest -q -m cuda -p no:cacheprovider -p no:benchmark -p no:xdist --durations=12 tests", 330),
    Part("engine_threads", f"{ENGINE} --device cuda:0 --threads", 150),
    Part("engine_tokens", f"{ENGINE} --device cuda:0 --threads --modes async --check --passes 80", 60),
    Part("engine_processes", f"{ENGINE} --device cuda:0", 150),
    Part("engine_nccl", f"{ENGINE} --device cuda --ranks 2 --always", 100, gpus=2),
    Part("multi_gpu_nccl", "benchmarks.multi_gpu --transport nccl --limit 110 --json {json}", 120, gpus=2),
    Part("multi_gpu", "benchmarks.multi_gpu --limit 170 --json {json}", 180, gpus=2),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, default=Path("gpu_results"))
    parser.add_argument("--seconds", type=float, default=540.0, help="for all of it")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS])
    options = parser.parse_args(argv)
    options.into.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + options.seconds
    lines: list[str] = []
    for part in PARTS:
        if part.gpus > torch.cuda.device_count() or (options.only and part.name not in options.only):
            continue
        lines.append(run(part, options.into, min(part.seconds, until - time.monotonic())))
        print(lines[-1], flush=True)
        (options.into / "summary.txt").write_text("\n".join(lines) + "\n")
    return 0


def run(part: Part, folder: Path, seconds: float) -> str:
    """What came of it, with the last lines that it printed."""
    if seconds < 5:
        return f"== {part.name}: no time left"
    log, start = folder / f"{part.name}.log", time.monotonic()
    command = [sys.executable, "-m", *part.arguments.format(json=folder / f"{part.name}.json").split()]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=os.environ | {"PYTHONPATH": "."}
        )
        try:
            end = f"exit {process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its ranks too
            process.wait()
            end = "stopped"
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
    return f"== {part.name}: {end} after {time.monotonic() - start:.0f} s\n{tail}"


if __name__ == "__main__":
    raise SystemExit(main())
