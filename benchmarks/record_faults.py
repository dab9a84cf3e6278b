"""System calls of a record's keeper and engines fail at random: is an engine that lives ever taken for gone?

python -m benchmarks.record_faults -n 8 --json record_faults.json

Each schedule has up to three engines that map weights, follow, move layers, leave and die, and a keeper that dies,
stops and comes back, in one thread over real sockets and files. In a step one call may fail in any way that its manual
page has, or be the last of its process; a process may be out of descriptors or disk for a while. After each step the
record, its file and what engines route by are compared with the truth (`tests/loading/record/injected.py`). In the end
nothing may be left: no descriptor, and no file but the record and two locks.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks import measure
from tests.loading.record.injected import STEPS, NoExceptions, schedule
from tests.loading.record.injector import Hit, Injector

CHUNK = 250
MEMORY = Path("/dev/shm")


class Part(NamedTuple):
    """What some schedules gave."""

    schedules: int
    """How many ran."""
    events: Counter[str]
    hits: Counter[Hit]
    calls: int
    failed: str = ""
    """The first schedule that showed a fault, and which."""


def run_some(seeds: range, until: float) -> Part:
    """These schedules, one after the other, as long as the clock is before `until`, in seconds since the epoch."""
    log, handler = logging.getLogger("eplb_core"), NoExceptions()
    log.handlers, log.propagate = [handler], False
    injector, events, ran = Injector(), Counter[str](), 0
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder, injector.installed():
        for seed in seeds:
            if time.time() > until:
                break
            ran += 1
            try:
                events += schedule(seed, Path(folder), injector).events
                met = handler.met[0] if handler.met else ""
            except Exception as error:
                injector.process = None
                met = f"{type(error).__name__}: {error}"
            if met:
                return Part(ran, events, injector.hits, injector.calls, f"seed {seed}: {met}")
    return Part(ran, events, injector.hits, injector.calls)


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.parser("record_faults", __doc__, quick="200 schedules")
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule")
    parser.add_argument("-n", "--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no more schedules after this time")
    options = parser.parse_args(argv)
    last = options.seed + (200 if options.quick else options.schedules)
    chunks = [range(start, min(start + CHUNK, last)) for start in range(options.seed, last, CHUNK)]
    events, hits, calls, failed = Counter[str](), Counter[Hit](), 0, list[str]()
    count, start = 0, time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for part in pool.imap_unordered(partial(run_some, until=time.time() + options.seconds), chunks):
            count += part.schedules
            events, hits, calls = events + part.events, hits + part.hits, calls + part.calls
            failed += [part.failed] * bool(part.failed)
            for line in [part.failed] * bool(part.failed):
                print(line, flush=True)
    took = time.perf_counter() - start
    faults: dict[str, dict[str, int]] = {}
    for hit, number in sorted(hits.items()):
        faults.setdefault(f"{hit.side}: {hit.call}", {})[hit.fault] = number
    kinds = sum(map(len, faults.values()))
    found = f"{len(failed)} FAILED" if failed else "no living engine was taken for gone"
    lines = [
        f"{count:,} schedules of {STEPS} steps, {calls:,} system calls, {hits.total():,} faults of {kinds} kinds "
        f"in {len(faults)} calls, {took:.0f} s in {options.processes} process(es): {found}",
        ", ".join(f"{number:,} {what}" for what, number in sorted(events.items())),
    ]
    print("\n".join(lines))
    how = {"schedules": count, "first_seed": options.seed, "steps": STEPS, "processes": options.processes}
    gave = {"calls": calls, "events": dict(events), "faults": faults, "failed": failed, "seconds": took}
    measure.write_json(options.json, {"summary": lines, **how, **gave})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
