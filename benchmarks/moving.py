"""What a move costs the host: plans, an idle poll, an install.

python -m benchmarks.moving --json moving.json

Plans: one rank's, at 58 x 288 slots on 32 ranks of 4 nodes, from a random layout to another (every slot changes) and to
one in which a few slots a layer do. Polls: a Migrator that has nothing to do, with an agreement inside the process (the
library's own cost) and with gloo between two ranks of one thread, which waits for nobody. Installs: all slots of a
layer from staging, and a circle of all of them in place, against a plain copy of as many bytes by torch. Wake-ups: how
late a thread is that sleeps a tenth of a millisecond at a time, without the interpreter, and then wants it, beside two
ranks' workers that migrate all layers, and beside nothing: what workers hold the interpreter for comes on top.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import measure
from eplb_core import ExpertLayout, ExpertStore, GroupAgreement, Migrator, Topology, plan_pull, transfers
from eplb_core.loading._steps import Step
from eplb_core.loading.agreement import LocalAgreement
from eplb_core.loading.install import Installer, Staging
from eplb_core.loading.pull_plan import COPY_OLD, READ
from eplb_core.loading.transports import LocalCopy, SharedMemory

LAYERS, EXPERTS, SLOTS, RANKS, NODES = 58, 256, 288, 32, 4
SEED = 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.moving", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few layers, small experts")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    measure.one_thread()
    calls = 5 if options.quick else 100
    plans = plan_times(4 if options.quick else LAYERS, calls)
    rows = [[name, f"{entry['reads']}", *entry["columns"]] for name, entry in plans.items()]
    print(measure.table(["plan of one rank", "its reads", "first ms", "median ms", "min ms"], rows))
    polls = poll_times(100 if options.quick else 5000)
    print()
    print(
        measure.table(
            ["idle poll", "median us", "min us"], [[name, f"{m:.1f}", f"{b:.1f}"] for name, (m, b) in polls.items()]
        )
    )
    slot_bytes = (1 << 16) if options.quick else (22 << 20)
    installs = install_rates(slot_bytes, 3 if options.quick else 15)
    print(f"\na layer of 8 slots of {slot_bytes / 1e6:.1f} MB in three tensors")
    print(
        measure.table(
            ["install", "median GB/s", "best GB/s"],
            [[name, f"{m:.2f}", f"{b:.2f}"] for name, (m, b) in installs.items()],
        )
    )
    late = wake_ups(4 if options.quick else LAYERS, 1 if options.quick else 10)
    print()
    print(
        measure.table(
            ["a thread's wake-up", "median us", "p99 us", "p99.9 us", "worst us", "wake-ups"],
            [[name, *(f"{us:.0f}" for us in entry[:4]), f"{entry[4]}"] for name, entry in late.items()],
        )
    )
    every, few = (plans[name]["median_ms"] for name in ("every slot changes", "few slots change"))
    summary = [
        f"a rank's plan: {every:.2f} ms where every slot changes, {few:.2f} ms where few do",
        f"an idle poll: {polls['in process'][0]:.1f} us; with gloo {polls['gloo, 2 ranks'][0]:.1f} us",
        f"installs: {installs['from staging'][0] / installs['torch copy_'][0]:.2f} of a plain copy's bandwidth, "
        f"a circle in place {installs['circle in place'][0] / installs['torch copy_'][0]:.2f}",
    ]
    summary.append(
        f"a thread wakes {late['beside a migration'][1] - late['beside nothing'][1]:.0f} us later beside a migration "
        f"in the 99th percentile, {late['beside a migration'][0] - late['beside nothing'][0]:.0f} us in the median"
    )
    record = {"plans": plans, "poll_us": polls, "install_gb_s": installs, "wake_up_us": late, "summary": summary}
    measure.write_json(options.json, record)
    return 0


# ---- plans -----------------------------------------------------------------------------------------------------------


def plan_times(layers: int, calls: int) -> dict[str, Any]:
    rng = np.random.default_rng(SEED)
    topology = Topology(RANKS, NODES)

    def random_layout() -> ExpertLayout:
        extra = rng.integers(0, EXPERTS, (layers, SLOTS - EXPERTS))
        rows = np.concatenate([np.tile(np.arange(EXPERTS), (layers, 1)), extra], axis=1)
        return ExpertLayout(rng.permuted(rows, axis=1), EXPERTS, topology=topology)

    old = random_layout()
    few = old.physical_to_logical_map.copy()
    for row in few:
        for _ in range(4):
            a, b = rng.integers(0, SLOTS, 2)
            row[a], row[b] = row[b], row[a]
    targets = {
        "every slot changes": random_layout(),
        "few slots change": ExpertLayout(few, EXPERTS, topology=topology),
    }
    results = {}
    for name, new in targets.items():
        plan, times = measure.timed(lambda new=new: plan_pull(old, new, rank=3), calls=calls, budget_s=5.0)  # type: ignore[misc]
        if plan.num_reads.tolist() != transfers(old, new)[:, 3].tolist():
            raise SystemExit("a plan reads what need not be transferred")
        results[name] = {
            "reads": int(plan.num_reads.sum()),
            "median_ms": times.median * 1e3,
            "min_ms": times.minimum * 1e3,
            "columns": times.columns,
        }
    return results


# ---- polls -----------------------------------------------------------------------------------------------------------


def poll_times(calls: int) -> dict[str, tuple[float, float]]:
    layout = ExpertLayout([[0, 1]], 2, topology=Topology(1))
    (alone,) = LocalAgreement.group(1)
    store = ExpertStore({"weight": torch.zeros(2, 4)})
    migrator = Migrator([store], layout, rank=0, transport=LocalCopy(), agreement=alone)
    results = {"in process": each(migrator.poll, calls)}
    if not migrator.stop(10.0):
        raise SystemExit("the Migrator does not stop")
    with tempfile.TemporaryDirectory() as folder:
        members = gloo(Path(folder))

        def turn() -> None:
            for member in members:
                member.take()
            for member in members:
                member.post(7)

        median, best = each(turn, calls)
        results["gloo, 2 ranks"] = (median / 2, best / 2)
        for member in members:
            member.take()
    return results


def gloo(folder: Path) -> list[GroupAgreement]:
    dist: Any = torch.distributed
    members: dict[int, GroupAgreement] = {}

    def join(rank: int) -> None:
        store = dist.FileStore(str(folder / "store"), 2)
        members[rank] = GroupAgreement(dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60)))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [members[0], members[1]]


def each(call: Callable[[], object], calls: int) -> tuple[float, float]:
    """Median and minimum in microseconds."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times), min(times)


# ---- installs --------------------------------------------------------------------------------------------------------


def install_rates(slot_bytes: int, calls: int) -> dict[str, tuple[float, float]]:
    """Median and best GB/s; one byte copied counts once."""
    slots = 8
    parts = {"w13": slot_bytes * 2 // 3, "w2": slot_bytes // 3, "scale": slot_bytes // 512}
    tensors = {name: torch.ones((slots, size), dtype=torch.uint8) for name, size in parts.items()}
    store = ExpertStore(tensors)
    staging = Staging(None, [store])
    staging.memory.fill_(2)
    installer = Installer([store], staging)
    topology = Topology(1)
    old = ExpertLayout([range(slots)], slots, topology=topology)
    new = ExpertLayout([np.roll(np.arange(slots), 1)], slots, topology=topology)
    everywhere = np.arange(slots)
    incoming = Step(0, old, new, np.full(slots, READ, np.int8), np.full(slots, -1), True)
    circle = Step(0, old, new, np.full(slots, COPY_OLD, np.int8), np.roll(everywhere, 1), True)
    programs = {
        "from staging": installer.plan(incoming, everywhere),
        "circle in place": installer.plan(circle, everywhere),
    }
    plain = torch.full((slots * store.slot_bytes,), 3, dtype=torch.uint8)
    target = torch.empty_like(plain)
    calls_of: dict[str, Callable[[], object]] = {
        "torch copy_": lambda: target.copy_(plain),
        **{name: lambda program=program: installer.run(0, program) for name, program in programs.items()},  # type: ignore[misc]
    }
    installer.run(0, programs["from staging"])
    if not all(bool((tensor == 2).all()) for tensor in tensors.values()):
        raise SystemExit("an install left bytes behind")
    times: dict[str, list[float]] = {name: [] for name in calls_of}
    for _ in range(calls + 1):  # in turn: whatever else the machine does meets all of them
        for name, call in calls_of.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    size = slots * store.slot_bytes / 1e9
    return {name: (size / statistics.median(some[1:]), size / min(some[1:])) for name, some in times.items()}


# ---- the interpreter's lock ------------------------------------------------------------------------------------------


def wake_ups(layers: int, migrations: int) -> dict[str, tuple[float, float, float, float, int]]:
    """Microseconds that a thread is late: median, 99th and 99.9th percentile, worst; and how many times it slept."""
    rng, topology = np.random.default_rng(SEED), Topology(2)
    slots = 2 * SLOTS // RANKS
    start = ExpertLayout.trivial(layers, slots - 2, num_slots=slots, topology=topology)
    members = LocalAgreement.group(2)
    made: dict[int, Migrator] = {}

    def join(rank: int) -> None:
        stores = [ExpertStore({name: torch.zeros(slots // 2, 16) for name in ("w13", "w2", "scale")}) for _ in rows]
        made[rank] = Migrator(stores, start, rank=rank, transport=SharedMemory(), agreement=members[rank])

    rows = range(layers)
    in_turn([lambda rank=rank: join(rank) for rank in range(2)])  # type: ignore[misc]
    probe = Probe()
    idle = probe.beside(lambda: time.sleep(0.05 * migrations))

    shuffled = [rng.permuted(start.physical_to_logical_map, axis=1) for _ in range(migrations)]
    targets = [ExpertLayout(p2l, slots - 2, topology=topology) for p2l in shuffled]

    def migrate() -> None:
        for target in targets:
            for migrator in made.values():
                migrator.start(target)
            while not made[0].idle:
                for migrator in made.values():
                    migrator.poll()
                time.sleep(0.001)
            if made[0].layout != target:
                raise SystemExit(f"a migration failed: {made[0].status}")

    busy = probe.beside(migrate)
    in_turn([lambda rank=rank: made[rank].stop(10.0) for rank in range(2)])  # type: ignore[misc]
    return {"beside nothing": idle, "beside a migration": busy}


def in_turn(calls: Sequence[Callable[[], object]]) -> None:
    """Calls that wait for each other."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Probe:
    """A thread that wants the interpreter ten thousand times a second."""

    nap_us = 100

    def beside(self, work: Callable[[], object]) -> tuple[float, float, float, float, int]:
        """How late it was while `work` went on."""
        late: list[float] = []
        on = [True]

        def run() -> None:
            sleep = ctypes.CDLL(None).usleep
            while on:
                before = time.perf_counter()
                sleep(self.nap_us)
                late.append((time.perf_counter() - before) * 1e6 - self.nap_us)

        thread = threading.Thread(target=run)
        thread.start()
        work()
        on.clear()
        thread.join()
        middle, high, higher = np.percentile(late, [50, 99, 99.9]).tolist()
        return middle, high, higher, max(late), len(late)


if __name__ == "__main__":
    raise SystemExit(main())
