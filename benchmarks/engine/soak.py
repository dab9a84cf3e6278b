"""The soak: traffic, rebalances and faults at random, and every token of every pass compared with the oracle's."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine.cluster import Cluster, EngineFailure
from benchmarks.engine.engine import Membership, Setup
from benchmarks.engine.model import ModelConfig
from benchmarks.engine.oracle import Oracle
from benchmarks.engine.requests import Feed, Scheduler, Traffic
from benchmarks.engine.weights import save_experts

SPOILT = {"delay": 0.2, "fail": 0.02, "lose": 0.01, "tear": 0.02, "drop": 0.005, "late": 0.005}
"""Shares of reads that go wrong throughout the soak: a slow link, and worse."""


@dataclass(slots=True)
class Report:
    """What the soak saw."""

    seconds: float = 0.0
    passes: int = 0
    tokens_compared: int = 0
    wrong_tokens: int = 0
    requests_made: int = 0
    requests_finished: int = 0
    requests_running: int = 0
    requests_restarted: int = 0
    migrations: int = 0
    layers_installed: int = 0
    bytes_read: int = 0
    weights_verified: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    """By kind; each was survived, or the soak had ended."""
    migrations_ended: dict[str, int] = field(default_factory=dict)
    """Migrations that ended early, by cause."""
    worst_recovery_s: float = 0.0
    """From a fault that took a rank to the first pass of those that lived."""

    @property
    def nothing_lost(self) -> bool:
        """Each request that was made is finished, or still on its way."""
        return self.requests_made == self.requests_finished + self.requests_running

    @property
    def ok(self) -> bool:
        """No token was wrong and none was lost."""
        return self.wrong_tokens == 0 and self.nothing_lost and self.tokens_compared > 0

    def __str__(self) -> str:
        listed = ", ".join(f"{count} x {kind}" for kind, count in sorted(self.faults.items())) or "none"
        early = ", ".join(f"{count} x {cause}" for cause, count in sorted(self.migrations_ended.items())) or "none"
        lost = "nothing lost" if self.nothing_lost else "REQUESTS LOST"
        return "\n".join(
            [
                f"{self.passes} passes in {self.seconds:.0f} s; {self.tokens_compared} tokens compared, "
                f"{self.wrong_tokens} wrong",
                f"requests: {self.requests_made} made, {self.requests_finished} finished, {self.requests_running} on "
                f"their way, {self.requests_restarted} computed anew after a fault; {lost}",
                f"rebalances: {self.migrations} migrations, {self.layers_installed} layers installed, "
                f"{self.bytes_read / 1e6:.1f} MB read between ranks; ended early: {early}",
                f"weights compared with the layout: {self.weights_verified} times, no fault",
                f"faults survived: {listed}; the longest recovery took {self.worst_recovery_s:.1f} s",
            ]
        )


class Soak:
    """A cluster under traffic, and what may happen to it."""

    def __init__(self, size: int, *, seed: int, folder: Path, policy: str = "auto") -> None:
        # Twice the slots that the experts need: half of the ranks may be gone at a time.
        slots = -(-2 * ModelConfig().num_experts // size)
        self.setup = Setup(
            folder,
            seed=seed,
            slots_per_rank=slots,
            interval=24,
            policy=policy,
            move_cost=1e-4,  # to see many moves
            deadline=4.0,
            faults=SPOILT,
            backups=True,
        )
        self.size, self.random = size, np.random.default_rng(seed)
        self.report = Report()
        self.scheduler = Scheduler(Traffic(self.setup.config, seed + 1), self.setup.num_rows)
        # A place among the oracle's rows for each process that may live at a time.
        self.oracle = Oracle(self.setup.config, seed, self.setup.num_rows * size)
        self.place: dict[int, int] = {}
        self.number = 0
        self._save(0)
        self.oracle.load(self.setup.checkpoint(0))
        self._seen: dict[int, tuple[int, int]] = {}
        self.cluster = Cluster(self.setup)

    def _save(self, version: int) -> None:
        setup = self.setup
        save_experts(setup.folder / f"experts-{version}", setup.config, setup.seed + version, setup.dtype)

    # ---- passes ----------------------------------------------------------------------------------------------------

    def passes(self, count: int, *, during: Callable[[], None] | None = None) -> bool:
        """Serve; `during` happens while a pass runs. False: ranks are gone, and those that live have regrouped."""
        return all(self.one_pass(during) for _ in range(count))

    def one_pass(self, during: Callable[[], None] | None = None) -> bool:
        """One pass on every rank, beside the oracle's."""
        self.number += 1
        cluster, scheduler = self.cluster, self.scheduler
        workers = cluster.who.workers
        feeds = {worker: scheduler.feed(worker) for worker in workers}
        idle = {worker for worker in workers if self.random.random() < 0.02}
        for worker in workers:
            cluster.workers[worker].ask("pass", self.number, feeds[worker], idle=worker in idle)
        if during is not None:
            during()
        expected = self._expect(feeds)
        answers = cluster.answers(patience=6 * self.setup.deadline)
        if any(status != "ok" for status, _ in answers.values()):
            self._recover(answers)
            return False
        for worker in workers:
            answer = answers[worker][1]
            if worker in idle:
                continue
            wrong = sum(a != b for a, b in zip(answer["sampled"], expected[worker], strict=True))
            self.report.wrong_tokens += wrong
            self.report.tokens_compared += self.setup.num_rows
            scheduler.take(worker, answer["sampled"])
        self.report.passes += 1
        self.report.layers_installed += answers[workers[0]][1]["installed"]
        self.retired = all(answer["retired"] for _, answer in answers.values())
        return True

    def _expect(self, feeds: dict[int, Feed]) -> dict[int, list[int]]:
        """The oracle's tokens by worker: a process keeps its place, and so its cache."""
        rows = self.setup.num_rows
        nothing = Feed(*(np.zeros(rows, dtype=np.int64) for _ in Feed._fields))
        laid = [nothing] * self.size
        for worker, feed in feeds.items():
            laid[self.place[worker]] = feed
        sampled = self.oracle.run(Feed.join(laid)).tolist()
        return {worker: sampled[self.place[worker] * rows :][:rows] for worker in feeds}

    # ---- ranks that come and go ------------------------------------------------------------------------------------

    def start(self) -> None:
        """All ranks."""
        self.cluster.start(self.size)
        self.place = {worker: index for index, worker in enumerate(self.cluster.who.workers)}

    def _drop(self, worker: int) -> None:
        """A process is gone for good: its requests start anew elsewhere."""
        self.scheduler.lose(worker)
        self.cluster.workers.pop(worker).end()
        del self.place[worker]
        self._seen.pop(worker, None)

    def _recover(self, answers: dict[int, tuple[str, Any]]) -> None:
        """Those that answered go on; whoever did not is out, even if it comes back."""
        cluster, start = self.cluster, time.monotonic()
        while True:
            who = cluster.who
            alive = [worker for worker, (status, _) in answers.items() if status in ("ok", "lost")]
            if len(alive) == len(who.workers):
                self._count("all answered, some too late")
            silent = [worker for worker, (status, _) in answers.items() if status == "silent"]
            for worker, (status, _) in answers.items():
                if status == "dead":
                    self._drop(worker)
            ranks = tuple(who.ranks[who.workers.index(worker)] for worker in alive)
            cluster.who = Membership(who.generation + 1, tuple(alive), ranks, who.kept, who.version)
            cluster.ask("regroup", cluster.who)
            answers = cluster.answers(patience=15 * self.setup.deadline)
            for worker in silent:
                self._wake(worker)
            if all(status == "ok" for status, _ in answers.values()):
                break
            if time.monotonic() - start > 120:
                raise EngineFailure(f"the ranks that live do not come together: {answers}")
        self.report.worst_recovery_s = max(self.report.worst_recovery_s, time.monotonic() - start)
        self._verify()

    def _wake(self, worker: int) -> None:
        """One that was stopped, while the others went on without it, must find out that it is out."""
        self.cluster.workers[worker].signal(signal.SIGCONT)
        status, value = self.cluster.workers[worker].answer(time.monotonic() + 6 * self.setup.deadline)
        if status == "ok":
            raise EngineFailure(f"worker {worker} came back and computed a pass by itself: {value}")
        if status == "lost":
            self._count("rank came back too late, and knew it")
        self._drop(worker)

    def refill(self) -> None:
        """Start processes for the ranks that are missing; they join empty, and experts move to them."""
        missing = self.size - len(self.cluster.who.workers)
        if missing:
            self.form([*self._kept(), *((self._spawn(), -1) for _ in range(missing))])

    def _spawn(self) -> int:
        worker = self.cluster.spawn()
        self.place[worker] = min(set(range(self.size)) - set(self.place.values()))
        return worker

    def _kept(self) -> list[tuple[int, int]]:
        who = self.cluster.who
        return list(zip(who.workers, who.ranks, strict=True))

    def form(self, members: list[tuple[int, int]], leaving: int | None = None) -> None:
        """A new frame of these processes, (process, former rank); the one that leaves helps to end the old frame."""
        self._look()
        self.cluster.call("leave_frame")
        if leaving is not None:
            self._drop(leaving)
        self.cluster.form(members)
        self._seen.clear()

    # ---- faults ----------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """SIGKILL in the middle of a pass; a new process takes the rank's place later."""
        victim = self._someone()
        self.passes(1 + int(self.random.integers(8)))
        if victim in self.cluster.workers:
            self.passes(1, during=lambda: self._signal(victim, signal.SIGKILL, delay=True))
        self._count("rank killed")
        self._later()

    def stop_long(self) -> None:
        """SIGSTOP for longer than the deadline: the others go on without it."""
        victim = self._someone()
        self.passes(1, during=lambda: self._signal(victim, signal.SIGSTOP))
        self._count("rank stopped for good")
        self._later()

    def stop_short(self) -> None:
        """SIGSTOP for less than the deadline: everybody waits, and nothing is lost."""
        victim = self._someone()

        def during() -> None:
            self._signal(victim, signal.SIGSTOP)
            time.sleep(0.2 * self.setup.deadline)
            self._signal(victim, signal.SIGCONT)

        self.passes(1, during=during)
        self._count("rank stopped for a while")

    def leave_and_join(self) -> None:
        """A rank is emptied of what only it holds while all serve, leaves, and another joins some time later."""
        if len(self.cluster.who.workers) < self.size:
            return
        leaving = self.cluster.who.workers.index(self._someone())
        self.cluster.call("retire", leaving)
        for _ in range(400):
            if not self.one_pass():
                return  # a fault came first; whoever is left starts anew with the next frame
            if self.retired:
                break
        else:
            raise EngineFailure("a rank could not be retired in 400 passes")
        kept = self._kept()
        worker = kept.pop(leaving)[0]
        self.form(kept, leaving=worker)
        self._count("rank left")
        self._later()
        self._count("rank joined")

    def update(self) -> None:
        """New weights, in the middle of whatever is moving."""
        version = self._next_version()
        self.cluster.call("update", version)
        self._adopt(version)
        for old in (f"experts-{version - 1}", f"backup-{version - 1}"):
            shutil.rmtree(self.setup.folder / old, ignore_errors=True)
        self._count("weights updated")

    def _next_version(self) -> int:
        """Of the weights; its checkpoint is written."""
        version = self.cluster.who.version + 1
        self._save(version)
        return version

    def _adopt(self, version: int) -> None:
        """Weights that ranks and the oracle have from now on."""
        self.cluster.who = self.cluster.who._replace(version=version)
        self.oracle.load(self.setup.checkpoint(version))

    def kill_in_update(self) -> None:
        """SIGKILL while new weights are loaded: some ranks have them, some not. All start anew from the files."""
        victim = self._someone()
        version = self._next_version()
        self.cluster.ask("update", version)
        self._signal(victim, signal.SIGKILL, delay=True)
        answers = self.cluster.answers(patience=15 * self.setup.deadline)
        for worker in list(self.cluster.workers):
            self._drop(worker)
        self._count("rank killed in an update" if any(s != "ok" for s, _ in answers.values()) else "killed after it")
        self._adopt(version)
        self._seen.clear()
        self.start()

    def _later(self) -> None:
        """Serve for a while with the ranks that are there, then fill up."""
        self.passes(10 + int(self.random.integers(30)))
        self.refill()

    def _someone(self) -> int:
        workers = self.cluster.who.workers
        return workers[int(self.random.integers(len(workers)))]

    def _signal(self, worker: int, number: int, *, delay: bool = False) -> None:
        if delay:
            time.sleep(float(self.random.random()) * 0.02)
        self.cluster.workers[worker].signal(number)

    def _count(self, kind: str) -> None:
        self.report.faults[kind] = self.report.faults.get(kind, 0) + 1

    # ---- the whole -------------------------------------------------------------------------------------------------

    def _verify(self) -> None:
        """Between passes: do the weights match the layout?"""
        self.cluster.call("verify")
        self.report.weights_verified += 1

    def _look(self) -> None:
        """What the Migrators say; all ranks must be in one layout."""
        answers = self.cluster.call("status")
        if len({digest for digest, _ in answers}) != 1:
            raise EngineFailure("ranks are in different layouts")
        migrations = []
        for worker, (_, status) in zip(self.cluster.who.workers, answers, strict=True):
            number, read = self._seen.get(worker, (0, 0))
            migrations.append(status["migration"] - number)
            self.report.bytes_read += status["read_bytes"] - read
            self._seen[worker] = (status["migration"], status["read_bytes"])
        self.report.migrations += max(migrations)
        cause = answers[0][1]["cause"]
        if cause:
            self.report.migrations_ended[cause] = self.report.migrations_ended.get(cause, 0) + 1

    def run(self, seconds: float) -> Report:
        """Traffic and faults for a time, and until every kind of fault has come once."""
        self.start()
        self._verify()
        kinds: list[Callable[[], None]] = [
            self.kill, self.leave_and_join, self.stop_short, self.update, self.stop_long, self.kill_in_update,
        ]  # fmt: skip
        start, turn = time.monotonic(), 0
        try:
            while time.monotonic() - start < seconds or turn < len(kinds):
                self.passes(10 + int(self.random.integers(40)))
                self._look()
                kinds[turn if turn < len(kinds) else int(self.random.integers(len(kinds)))]()
                turn += 1
                self.refill()
                self._verify()
            self.passes(10)
            self._look()
            self.report.seconds = time.monotonic() - start
            self.cluster.call("close")
        finally:
            self.cluster.close()
        self.report.requests_made = self.scheduler.traffic.made
        self.report.requests_finished = self.scheduler.finished
        self.report.requests_running = self.scheduler.running
        self.report.requests_restarted = self.scheduler.restarted
        return self.report


def soak(size: int, seconds: float, *, seed: int, policy: str = "auto") -> Report:
    """Run it in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="eplb-soak-") as folder:
        return Soak(size, seed=seed, folder=Path(folder), policy=policy).run(seconds)
