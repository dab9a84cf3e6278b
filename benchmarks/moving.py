"""What a move costs the host: plans, an idle poll, an install.

python -m benchmarks.moving --json moving.json

Plans: one rank's, at 58 x 288 slots on 32 ranks of 4 nodes, from a random layout to another (every slot changes) and to
one in which a few slots a layer do. Polls: a Migrator that has nothing to do, with an agreement inside the process (the
library's own cost) and with gloo between two ranks of one thread, which waits for nobody. Installs: all slots of a
layer from staging, and a circle of all of them in place, against a plain copy of as many bytes by torch.

Gaps: a thread runs Python code without a pause, polls every millisecond, and notes whenever it stood still for more
than 30 us, beside its rank's workers that migrate 58 layers and beside idle ones; the other rank is a process of its
own. What the machine takes away is in both. Stretches: the time on a core that a worker's thread has from one moment in
which it lets go of the interpreter, by a sleep or a wait, to the next: what it can hold up others for, and at most
that, since compiled code in between holds nothing.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from benchmarks import measure, ranks
from eplb_core import ExpertLayout, ExpertStore, GroupAgreement, Migrator, Topology, plan_pull, transfers
from eplb_core._arrays import IntArray
from eplb_core.loading.agreement import LocalAgreement
from eplb_core.loading.install.installer import Installer
from eplb_core.loading.install.staging import Staging
from eplb_core.loading.moves.steps import Step
from eplb_core.loading.moves.workers import Worker
from eplb_core.loading.pull_plan import PullKind
from eplb_core.loading.transports import LocalCopy, SharedMemory

LAYERS, EXPERTS, SLOTS, RANKS, NODES = 58, 256, 288, 32, 4
SEED = 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.parser("moving", __doc__, quick="few layers, small experts")
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
    stood = gaps(4 if options.quick else LAYERS, 1 if options.quick else 20)
    print()
    print(
        measure.table(
            ["a busy thread's gaps", "a second", "median us", "p99 us", "worst us"],
            [
                [name, *(f"{us:.0f}" for us in (entry["a_second"], *entry["us"]))]
                for name, entry in stood.items()
                if "us" in entry
            ],
        )
    )
    every, few = (plans[name]["median_ms"] for name in ("every slot changes", "few slots change"))
    summary = [
        f"a rank's plan: {every:.2f} ms where every slot changes, {few:.2f} ms where few do",
        f"an idle poll: {polls['in process'][0]:.1f} us; with gloo {polls['gloo, 2 ranks'][0]:.1f} us",
        f"installs: {installs['from staging'][0] / installs['torch copy_'][0]:.2f} of a plain copy's bandwidth, "
        f"a circle in place {installs['circle in place'][0] / installs['torch copy_'][0]:.2f}",
    ]
    held = stood["workers' stretches"]
    summary.append(
        f"workers that migrate let go of the interpreter after {held['median_us']:.0f} us in the median, "
        f"{held['p99_us']:.0f} us in the 99th percentile, {held['worst_us']:.0f} us at worst"
    )
    record = {"plans": plans, "poll_us": polls, "install_gb_s": installs, "gaps": stood, "summary": summary}
    print("\n" + "\n".join(summary))
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
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as threads:  # who makes a group waits for all
        members = [
            GroupAgreement(group) for group in threads.map(lambda rank: ranks.gloo_group(folder, rank, 2), range(2))
        ]

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


def each(call: Callable[[], object], calls: int) -> tuple[float, float]:
    """Median and minimum in microseconds."""
    times = measure.timed(call, calls=calls, budget_s=60.0)[1]
    return times.median * 1e6, times.minimum * 1e6


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
    incoming = Step(0, old, new, np.full(slots, PullKind.READ, np.int8), np.full(slots, -1), True)
    circle = Step(0, old, new, np.full(slots, PullKind.COPY_OLD, np.int8), np.roll(everywhere, 1), True)
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


def gaps(layers: int, migrations: int) -> dict[str, dict[str, Any]]:
    """What a busy thread of rank 0 sees; rank 1 is another process."""
    with tempfile.TemporaryDirectory(prefix="eplb-") as folder:
        job = {"folder": folder, "layers": layers, "migrations": migrations}
        peer = ranks.Peer(rank_of_two, job, 1)
        try:
            found = rank_of_two(None, job, 0)
            if peer.join(60.0) != 0:
                raise SystemExit("rank 1 did not end as it should")
        finally:
            peer.kill()
    return found


def rank_of_two(pipe: Any, job: dict[str, Any], rank: int) -> dict[str, dict[str, Any]]:
    """All migrations of one rank; rank 1 sleeps where rank 0 looks for gaps."""
    measure.one_thread()
    rng, topology, layers = np.random.default_rng(SEED), Topology(2), job["layers"]
    slots = 2 * SLOTS // RANKS
    start = ExpertLayout.trivial(layers, slots - 2, num_slots=slots, topology=topology)
    shuffled = [rng.permuted(start.physical_to_logical_map, axis=1) for _ in range(job["migrations"])]
    stores = [
        ExpertStore({name: torch.zeros(slots // 2, 4096) for name in ("w13", "w2", "scale")}) for _ in range(layers)
    ]
    agreement = GroupAgreement(ranks.gloo_group(job["folder"], rank, 2))
    migrator = Migrator(
        stores, start, rank=rank, transport=SharedMemory(), agreement=agreement, staging=slots * stores[0].slot_bytes
    )
    forward = Forward(migrator) if rank == 0 else Sleeper(migrator)
    forward.passes(lambda: forward.count == 1000)
    found = {"beside idle workers": forward.seen()}

    def move(p2l: IntArray, passes: Sleeper) -> None:
        target = ExpertLayout(p2l, slots - 2, topology=topology)
        migrator.start(target)
        passes.passes(lambda: migrator.idle)
        if migrator.layout != target:
            raise SystemExit(f"a migration failed: {migrator.status}")

    for p2l in shuffled:
        move(p2l, forward)
    found["beside a migration"] = forward.seen()
    with Stretches() as stretches:
        for p2l in [start.physical_to_logical_map, *shuffled[: len(shuffled) // 2]]:
            move(p2l, Sleeper(migrator))
    found["workers' stretches"] = stretches.seen()
    if not migrator.stop(10.0):
        raise SystemExit("the Migrator does not stop")
    return found


class Sleeper:
    """Passes that do nothing."""

    def __init__(self, migrator: Migrator) -> None:
        self.migrator, self.count = migrator, 0

    def passes(self, until: Callable[[], bool]) -> None:
        """Poll and compute, until it is so; at least once."""
        while True:
            self.migrator.poll()
            self.count += 1
            if until():
                return
            self.compute()

    def compute(self) -> None:
        """The pass."""
        time.sleep(0.001)

    def seen(self) -> dict[str, Any]:
        """What there was to see since it was asked last."""
        return {}


class Forward(Sleeper):
    """Passes of a millisecond of Python code, as a busy engine's at its worst."""

    least_us = 30

    def __init__(self, migrator: Migrator) -> None:
        super().__init__(migrator)
        self.us: list[float] = []
        self.seconds = 0.0

    def compute(self) -> None:
        """Look at the clock, over and over."""
        clock = time.perf_counter
        begin = last = clock()
        while last < begin + 0.001:
            now = clock()
            if (now - last) * 1e6 > self.least_us:
                self.us.append((now - last) * 1e6)
            last = clock()
        self.seconds += last - begin

    def seen(self) -> dict[str, Any]:
        """Gaps since it was asked last: median, 99th percentile, worst."""
        us = self.us or [0.0]
        entry = {
            "a_second": len(self.us) / self.seconds,
            "us": [*np.percentile(us, [50, 99]).tolist(), max(us)],
            "gaps": len(self.us),
        }
        self.us, self.seconds = [], 0.0
        return entry


class Stretches:
    """Time on a core of workers' threads between two sleeps or waits, in microseconds."""

    def __init__(self) -> None:
        self.us: list[float] = []
        self._since: dict[int, float] = {}
        self._real: tuple[Any, Any, Any] = (time.sleep, threading.Condition.wait, Worker._wait)

    def __enter__(self) -> Stretches:
        sleep, wait, wait_for_job = self._real

        def measured_sleep(seconds: float) -> None:
            if seconds > 0:  # else it comes back before another thread has the interpreter
                self._end()
            sleep(seconds)
            if seconds > 0:
                self._begin()

        def measured_wait(condition: threading.Condition, timeout: float | None = None) -> bool:
            self._end()
            notified: bool = wait(condition, timeout)
            self._begin()
            return notified

        def measured_wait_for_job(worker: Worker) -> Any:
            self._end()
            job = wait_for_job(worker)
            self._begin()
            return job

        time.sleep, threading.Condition.wait = measured_sleep, measured_wait  # type: ignore[assignment, method-assign]
        Worker._wait = measured_wait_for_job  # type: ignore[assignment, method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        time.sleep, threading.Condition.wait, Worker._wait = self._real  # type: ignore[method-assign]

    def _begin(self) -> None:
        self._since[threading.get_ident()] = time.thread_time()

    def _end(self) -> None:
        since = self._since.get(threading.get_ident())
        if since is not None and threading.current_thread().name.startswith(("eplb-plan", "eplb-move")):
            self.us.append((time.thread_time() - since) * 1e6)

    def seen(self) -> dict[str, Any]:
        """All of them."""
        us = self.us or [0.0]
        middle, high = np.percentile(us, [50, 99]).tolist()
        return {"median_us": middle, "p99_us": high, "worst_us": max(us), "stretches": len(self.us)}


if __name__ == "__main__":
    raise SystemExit(main())
