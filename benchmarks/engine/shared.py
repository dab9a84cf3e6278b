"""Weights that outlive engines: a weight host for each rank, all in one process here; and engines that die on them."""

from __future__ import annotations

import contextlib
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

import eplb_core as eplb
from benchmarks.engine.cluster import Cluster, EngineFailure
from benchmarks.engine.drive import drive
from benchmarks.engine.engine import Setup, fingerprint_of, first_layout
from benchmarks.engine.oracle import Oracle
from benchmarks.engine.requests import Scheduler, Traffic
from benchmarks.engine.weights import empty_experts, load_experts, save_experts
from benchmarks.ranks import Peer


def keep(pipe: Connection, setup: Setup, ranks: int) -> None:
    """Load every rank's experts, share them, and stay until the pipe ends."""
    torch.set_num_threads(1)
    folder = setup.folder if setup.weight_hosts is None else setup.weight_hosts
    layout = first_layout(setup, eplb.Topology(ranks))

    def load(_: eplb.ExpertLayout | None, rank: int) -> dict[str, torch.Tensor]:
        """The engine's own loader, whole rank."""
        tensors = empty_experts(setup.config, setup.slots_per_rank, dtype=setup.dtype, device=setup.device)
        load_experts(setup.checkpoint(0), setup.config, tensors, layout, rank)
        return {f"{layer}.{name}": tensor for layer, row in enumerate(tensors) for name, tensor in row.items()}

    with contextlib.ExitStack() as hosts:
        for rank in range(ranks):
            path = folder / f"rank{rank}.sock"
            hosts.enter_context(eplb.WeightHost(path, load, config=fingerprint_of(setup), layout=layout, rank=rank))
        pipe.send("ready")
        with contextlib.suppress(EOFError):
            pipe.recv()


@contextlib.contextmanager
def weight_hosts(setup: Setup, ranks: int) -> Iterator[None]:
    """Hosts for all ranks, in a process of their own, while the block runs."""
    host = Peer(keep, setup, ranks, method="forkserver")
    try:
        host.hear(600.0)
        yield
    finally:
        host.pipe.close()  # the hosts end
        host.join(10.0)
        host.kill()


@dataclass(slots=True)
class SharedReport:
    """What engines saw that were killed one after the other on the same weights."""

    seconds: float = 0.0
    engines: int = 0
    tokens_compared: int = 0
    wrong_tokens: int = 0
    layers_installed: int = 0
    adopted: int = 0
    """Engines that took over the layout which a killed one had left."""
    refused: int = 0
    """The record said that a move had not ended; the hosts loaded the weights anew."""

    @property
    def ok(self) -> bool:
        """No token was wrong."""
        return self.wrong_tokens == 0 and self.tokens_compared > 0

    def __str__(self) -> str:
        return (
            f"{self.engines} engines in {self.seconds:.0f} s on shared weights, {self.tokens_compared} tokens "
            f"compared, {self.wrong_tokens} wrong; {self.layers_installed} layers installed; found after a kill: "
            f"{self.adopted} times a layout to adopt, {self.refused} times a move that had not ended, and the weights "
            "loaded anew"
        )


def soak_shared(size: int, seconds: float, *, seed: int, policy: str = "auto") -> SharedReport:
    """Engines on weights that outlive them, each killed at a random moment while experts move."""
    report, random, start = SharedReport(), np.random.default_rng(seed), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="eplb-shared-") as name:
        folder = Path(name)
        setup = Setup(
            folder,
            seed=seed,
            weight_hosts=folder,
            slots_per_rank=8,
            interval=12,
            policy=policy,
            move_cost=1e-4,
            deadline=10.0,
        )
        save_experts(folder / "experts-0", setup.config, seed, setup.dtype)
        oracle = Oracle(setup.config, seed, setup.num_rows * size)
        oracle.load(setup.checkpoint(0))
        while time.monotonic() - start < seconds:
            with weight_hosts(setup, size):
                first = report.engines
                while time.monotonic() - start < seconds and _one_engine(setup, size, oracle, random, report):
                    report.adopted += report.engines - first > 1
    report.seconds = time.monotonic() - start
    return report


def _one_engine(setup: Setup, size: int, oracle: Oracle, random: np.random.Generator, report: SharedReport) -> bool:
    """Serve, and be killed in the middle of a pass; False if the weights that were left cannot be used."""
    with Cluster(setup) as cluster:
        try:
            cluster.start(size)
        except EngineFailure as error:
            if "dirty" not in str(error) and "pending" not in str(error):
                raise
            report.refused += 1
            return False
        report.engines += 1
        traffic = Traffic(setup.config, int(random.integers(1 << 30)), drift=0.2)
        passes = 14 + int(random.integers(24))
        record = drive(cluster, Scheduler(traffic, setup.num_rows), passes, oracle=oracle)
        report.tokens_compared += record.compared
        report.wrong_tokens += record.wrong
        report.layers_installed += record.installed
        for worker in cluster.who.workers:  # not waited for: some may be in a pass, some between a layer's steps
            cluster.workers[worker].ask("pass", passes + 1, Scheduler(traffic, setup.num_rows).feed(worker))
        time.sleep(float(random.random()) * 0.02)
        for worker in cluster.who.workers:
            cluster.workers[worker].signal(signal.SIGKILL)
    return True
