"""Traffic through a cluster for a number of passes, with or without the oracle beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import eplb_core as eplb
from benchmarks.engine.cluster import Cluster
from benchmarks.engine.oracle import Oracle
from benchmarks.engine.requests import Feed, Scheduler


@dataclass(slots=True)
class Record:
    """What the passes were."""

    pass_s: list[float] = field(default_factory=list)
    """Of the slowest rank, library included."""
    library_s: list[float] = field(default_factory=list)
    """Of rank 0: what it spent in calls of the library outside of the forward."""
    balance: list[float] = field(default_factory=list)
    """Mean balancedness over layers of what the ranks computed, by window of passes."""
    sends: float = 0.0
    """To other nodes per token and layer, counted by the ranks that the rows really went to."""
    compared: int = 0
    wrong: int = 0
    installed: int = 0

    def times(self) -> dict[str, float]:
        """Milliseconds of a pass: median, 99th percentile, worst."""
        times = 1e3 * np.array(self.pass_s)
        return {
            "p50_ms": round(float(np.median(times)), 3),
            "p99_ms": round(float(np.quantile(times, 0.99)), 3),
            "worst_ms": round(float(times.max()), 3),
        }


def drive(
    cluster: Cluster,
    scheduler: Scheduler,
    passes: int,
    *,
    first: int = 1,
    oracle: Oracle | None = None,
    window: int = 16,
    between: Callable[[int], Any] | None = None,
) -> Record:
    """Run passes `first`, `first + 1`, ...; `between(number)` is called after each."""
    record = Record()
    workers = cluster.who.workers
    cluster.call("received")
    cluster.call("sent")
    for number in range(first, first + passes):
        feeds = [scheduler.feed(worker) for worker in workers]
        for worker, feed in zip(workers, feeds, strict=True):
            cluster.workers[worker].ask("pass", number, feed)
        expected = oracle.run(Feed.join(feeds)).tolist() if oracle is not None else None
        answers = cluster.take("pass")
        sampled = [token for answer in answers for token in answer["sampled"]]
        if expected is not None:
            record.compared += len(sampled)
            record.wrong += sum(a != b for a, b in zip(sampled, expected, strict=True))
        for worker, answer in zip(workers, answers, strict=True):
            scheduler.take(worker, answer["sampled"])
        record.pass_s.append(max(answer["pass_s"] for answer in answers))
        record.library_s.append(answers[0]["library_s"])
        record.installed += answers[0]["installed"]
        if number % window == 0:
            load = np.array(cluster.call("received")).T  # [L, R]
            record.balance.append(eplb.mean_balancedness(load))
        if between is not None:
            between(number)
    across, tokens = np.sum(cluster.call("sent"), axis=0)
    record.sends = float(across / max(tokens, 1))
    return record
