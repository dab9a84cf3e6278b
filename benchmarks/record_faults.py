"""System calls of a record's keeper and engines fail at random: is an engine that lives ever taken for gone?

python -m benchmarks.record_faults -n 8 --json record_faults.json

Each schedule has up to three engines that map weights, follow, move layers, leave and die, and a keeper that dies,
stops and comes back, in one thread over real sockets and files. In a step one call may fail in any way that its manual
page has, or be the last of its process; a process may be out of descriptors or disk for a while. After each step the
record, its file and what engines route by are compared with the truth (`tests/loading/record/injected.py`). In the end
nothing may be left: no descriptor, and no file but the record and two locks.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
    parser.add_argument("--merge", type=Path, nargs="+", help="records of other seeds, in place of running")
    options = parser.parse_args(argv)
    if options.merge:
        records = [json.loads(path.read_text()) for path in options.merge]
        made: set[tuple[Any, ...]] = {
            (each["steps"], each["environment"]["commit"], each["environment"]["cpu"]) for each in records
        }
        if len(made) > 1:
            parser.error("--merge: records of one machine, commit and number of steps")
        seeds = [seed for each in records for seed in each["first_seed"]]
        if len(seeds) > len({*seeds}):
            parser.error(f"--merge: records of seeds of their own, not from {sorted(seeds)} on")
        first, left_out = records[0], {"summary", "environment", "steps"}
        sums = joined([{name: each[name] for name in each.keys() - left_out} for each in records])
        return tell({**sums, "steps": first["steps"], "environment": first["environment"]}, options.json)
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
    faults: dict[str, dict[str, int]] = {}
    for hit, number in sorted(hits.items()):
        faults.setdefault(f"{hit.side}: {hit.call}", {})[hit.fault] = number
    how = {"schedules": count, "first_seed": [options.seed], "steps": STEPS, "pool": options.processes}
    gave = {"calls": calls, "events": dict(events), "faults": faults, "failed": failed}
    return tell({**how, **gave, "seconds": time.perf_counter() - start}, options.json)


def tell(record: dict[str, Any], path: Path | None) -> int:
    """Print and write what the schedules gave."""
    faults, failed = record["faults"], record["failed"]
    found = f"{len(failed)} FAILED" if failed else "no living engine was taken for gone"
    hits, kinds = sum(sum(each.values()) for each in faults.values()), sum(map(len, faults.values()))
    lines = [
        f"{record['schedules']:,} schedules of {record['steps']} steps, {record['calls']:,} system calls, {hits:,} "
        f"faults of {kinds} kinds in {len(faults)} calls, {record['seconds']:.0f} s in {record['pool']} "
        f"process(es): {found}",
        ", ".join(f"{number:,} {what}" for what, number in sorted(record["events"].items())),
    ]
    print("\n".join(lines))
    measure.write_json(path, {"summary": lines, **record})
    return 1 if failed else 0


def joined(records: Sequence[Any]) -> Any:
    """Sums of the numbers of records of other seeds."""
    if isinstance(records[0], dict):
        names = sorted(set().union(*records))
        return {name: joined([each[name] for each in records if name in each]) for name in names}
    return sum(records[1:], records[0])


if __name__ == "__main__":
    sys.exit(main())
