"""Rank processes and what drives them: the same command to every rank, every answer taken, every fault noticed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

import torch

import eplb_core as eplb
from benchmarks import ranks
from benchmarks.engine.engine import Lost, Membership, Rank, Setup


def serve_process(pipe: Connection, setup: Setup, worker: int) -> None:
    """A rank's process."""
    torch.set_num_threads(1)
    # Sums must be exact, whatever the size of the batch makes the library choose.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(pipe, setup, worker)
    os._exit(0)  # what is left of a broken group may wait for its peers


def serve(pipe: Connection, setup: Setup, worker: int) -> None:
    """Answer commands until the pipe ends."""
    device = setup.device_of(worker)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if setup.threads:
            torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    eplb.warm_up()  # kernels are loaded now, and not in a pass that somebody waits for
    sys.setswitchinterval(1e-4)  # decisions run beside passes: Python's 5 ms is how long a pass may wait for each
    rank = Rank(setup, worker)
    calls: dict[str, Callable[..., Any]] = {
        "form": rank.form,
        "leave_frame": rank.leave_frame,
        "regroup": rank.regroup,
        "pass": rank.one_pass,
        "update": rank.update,
        "close": rank.close,
        "received": rank.received,
        "sent": rank.sent,
        "predicted": rank.predicted,
        "map_cost": rank.map_cost,
        "verify": lambda: rank.verify(reference=rank._reference) is not None,
        "retire": lambda index: setattr(rank, "retiring", index),
        "status": lambda: (rank.layout.digest, rank.migrator.status._asdict() if rank.migrator else None),
    }
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            name, arguments, options = pipe.recv()
            try:
                answer = ("ok", calls[name](*arguments, **options))
            except (Lost, eplb.AgreementError, eplb.MigrationError, RuntimeError) as error:
                answer = ("lost", f"{type(error).__name__}: {error}")
            except Exception:
                answer = ("failed", traceback.format_exc())
            pipe.send(answer)
            if name == "close":
                break


class Worker:
    """One rank, as its parent sees it."""

    pipe: Connection
    signal: Callable[[int], None]
    """Stop, continue or kill it."""
    end: Callable[[], None]
    """Make sure that it is gone."""

    def ask(self, name: str, *arguments: Any, **options: Any) -> None:
        """Send a command; one that is gone is noticed when it does not answer."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send((name, arguments, options))

    def answer(self, until: float) -> tuple[str, Any]:
        """Its answer: ("ok", value), ("lost", why), ("failed", trace), ("dead", "") or ("silent", "")."""
        try:
            if not self.pipe.poll(max(0.0, until - time.monotonic())):
                return "silent", ""
            status, value = self.pipe.recv()
            return status, value
        except (EOFError, ConnectionResetError):
            return "dead", ""


class ProcessWorker(Worker):
    """A process of its own."""

    def __init__(self, setup: Setup, number: int) -> None:
        # Imports once, not in every process: a restarted rank is there at once. What has seen a GPU is not forked.
        how: dict[str, Any] = {"method": "forkserver", "preload": ["benchmarks.engine.preload"]}
        self.peer = ranks.Peer(serve_process, setup, number, **(how if setup.device == "cpu" else {}))
        self.pipe, self.signal, self.end = self.peer.pipe, self.peer.signal, self.peer.kill


class ThreadWorker(Worker):
    """A thread of this process. It takes no signals and ends when its pipe does."""

    def __init__(self, setup: Setup, number: int) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self.thread = threading.Thread(target=serve, args=(theirs, setup, number), daemon=True)
        self.thread.start()

    def signal(self, number: int) -> None:
        """Refused."""
        raise EngineFailure(f"signal {number} is for a process; this rank is a thread")

    def end(self) -> None:
        """Let it run out of commands."""
        self.pipe.close()
        self.thread.join(60.0)


class EngineFailure(Exception):
    """A rank raised what no fault explains."""


class Cluster:
    """All ranks, in lockstep."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.workers: dict[int, Worker] = {}
        self.who = Membership(time.time_ns(), (), (), (), 0)  # no generation was there before, in any cluster
        self._next = 0

    def spawn(self) -> int:
        """One more process, which belongs to no group yet."""
        number = self._next
        self._next += 1
        kind = ThreadWorker if self.setup.threads else ProcessWorker
        self.workers[number] = kind(self.setup, number)
        return number

    def form(self, kept: Iterable[tuple[int, int]]) -> None:
        """A frame of these (process, former rank or -1)."""
        pairs = list(kept)
        workers, former = tuple(worker for worker, _ in pairs), tuple(rank for _, rank in pairs)
        self.who = Membership(self.who.generation + 1, workers, tuple(range(len(pairs))), former, self.who.version)
        self.call("form", self.who, patience=600.0)

    def start(self, size: int) -> None:
        """The first frame."""
        self.form([(self.spawn(), -1) for _ in range(size)])

    def ask(self, name: str, *arguments: Any) -> None:
        """The same command to every member."""
        for number in self.who.workers:
            self.workers[number].ask(name, *arguments)

    def answers(self, patience: float = 60.0) -> dict[int, tuple[str, Any]]:
        """Every member's answer."""
        until = time.monotonic() + patience
        answers = {number: self.workers[number].answer(until) for number in self.who.workers}
        for number, (status, value) in answers.items():
            if status == "failed":
                raise EngineFailure(f"worker {number}: {value}")
        return answers

    def call(self, name: str, *arguments: Any, patience: float = 60.0) -> list[Any]:
        """A command that must succeed on every member."""
        self.ask(name, *arguments)
        return self.take(name, patience)

    def take(self, name: str, patience: float = 60.0) -> list[Any]:
        """What every member answers to a command that must succeed."""
        answers = self.answers(patience)
        for number, (status, value) in answers.items():
            if status != "ok":
                raise EngineFailure(f"worker {number} answers {name!r}: {status} {value}")
        return [value for _, value in answers.values()]

    def close(self) -> None:
        """End all processes."""
        for worker in self.workers.values():
            worker.end()
        self.workers.clear()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
