"""A keeper of a record, or a host of weights, in a process of its own, which tests stop and kill.

    keeper_process.py [--host] [--fork] [--descriptors N] [--taken N] PATH STATE_FILE

Prints "ready" and serves until its input ends.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eplb_core import ExpertLayout, LayoutServer, Topology
from eplb_core.loading.record.file import open_record
from tests.loading.engine_process import end, spawn

RANKS = Topology(num_ranks=2)
LAYOUT = ExpertLayout([[0, 1, 2, 3, 3, 0], [0, 1, 2, 3, 1, 2]], 4, topology=RANKS)
ROW = [3, 2, 1, 0, 0, 3]
"""What layer 0 moves to."""


@contextmanager
def keeper(path: str | Path, file: str | Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """One that is ready; killed at the end."""
    process = spawn(sys.executable, "-m", "tests.loading.record.keeper_process", *options, str(path), str(file))
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        end(process)


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--fork", action="store_true")
    parser.add_argument("--descriptors", type=int)
    parser.add_argument("--taken", type=int, default=0)
    parser.add_argument("path")
    parser.add_argument("file")
    asked = parser.parse_args()
    if asked.descriptors:
        resource.setrlimit(resource.RLIMIT_NOFILE, (asked.descriptors, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    _taken = [open("/dev/null") for _ in range(asked.taken)]  # noqa: SIM115
    if asked.host:
        import torch

        from eplb_core import WeightHost

        weights = {"w": torch.arange(6.0).view(2, 3)}
        about = {"config": {"model": "toy"}, "layout": LAYOUT, "rank": 1}
        _serving = WeightHost(asked.path, lambda layout, rank: weights, **about, state_file=asked.file)  # type: ignore[arg-type]
    else:
        record = open_record(asked.file, LAYOUT, memory="m1")
        _serving = LayoutServer(asked.path, record, state_file=asked.file, memory="m1")  # type: ignore[assignment]
    if asked.fork:
        child = os.fork()
        if child == 0:
            _serving.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
