"""What the benchmarks of engines' own rebalances share: ranks as forked processes, weights that say whose they are."""

from __future__ import annotations

import importlib.util
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import eplb_core as eplb
from benchmarks import measure
from benchmarks.ranks import Peer, collect

LAYERS, EXPERTS, SLOTS, EVERY = 16, 128, 144, 10
"""The model of `traces.drift_load`, and the windows from one rebalance to the next."""
REBALANCES = 50
HIDDEN = 4
Row = dict[str, Any]


def is_absent(engine: str) -> bool:
    """Whether the engine is not installed, which is said."""
    absent = importlib.util.find_spec(engine.lower()) is None
    if absent:
        print(f"absent: {engine}; run this in its environment (make engines)")
    return absent


def run(ranks: int, plugin: Mapping[str, str], serve: Callable[..., Row], *arguments: object) -> list[Row]:
    """The answer of `serve(rank, ranks, folder, *arguments)` of each rank, in a forked process with `plugin` set.

    Raises:
        RuntimeError: a rank failed, or `digests` differ between ranks.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = (ranks, folder, *arguments)
        peers = [Peer(_rank, plugin, serve, rank, *job, method="fork") for rank in range(ranks)]
        answers, _ = collect(peers, 3600.0)
    failed = [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if not isinstance(answer, dict)]
    if failed:
        raise RuntimeError("\n".join(failed))
    if len({answer["digests"] for answer in answers}) != 1:
        raise RuntimeError("the ranks' maps differ")
    return answers


def _rank(pipe: Any, plugin: Mapping[str, str], serve: Callable[..., Row], rank: int, *arguments: object) -> None:
    os.environ.update(plugin)
    try:
        pipe.send(serve(rank, *arguments))
    except BaseException:
        pipe.send(traceback.format_exc())
    os._exit(0)  # groups of an engine may wait for peers


def weights(layer: int, experts: Any) -> list[torch.Tensor]:
    """Two tensors of a layer's slots, which say the layer and the expert; in shared memory, which peers may map."""
    first = expected(layer, experts)
    return [tensor.clone().share_memory_() for tensor in (first, -first)]  # type: ignore[no-untyped-call]


def expected(layer: int, experts: Any) -> torch.Tensor:
    """The first of `weights`; the second is its negative."""
    return (torch.as_tensor(experts)[..., None] * 1000.0 + layer) * 8 + torch.arange(HIDDEN)


def wrong_rows(found: Sequence[torch.Tensor], layer: int, experts: Any) -> int:
    """Slots whose tensors are not those of the experts that a map says."""
    first = expected(layer, experts)
    return int(((found[0] != first) | (found[1] != -first)).any(dim=1).sum())


def part_of_rank(window: npt.NDArray[np.int64], rank: int, ranks: int) -> npt.NDArray[np.int64]:
    """The tokens of each expert that this rank routes, `[L, E]`: equal parts, the rest in turns."""
    rest = (np.arange(EXPERTS) % ranks == rank) * (window % ranks)
    part: npt.NDArray[np.int64] = window // ranks + rest
    return part


class Future:
    """Balance of each layout on the windows after it."""

    def __init__(self, load: npt.NDArray[np.int64], ranks: int, every: int = EVERY) -> None:
        self._load, self._topology, self._every = load, eplb.Topology(ranks), every
        self.balances: list[float] = []
        self.digests = ""

    def add(self, physical_to_logical_map: Any, window: int) -> None:
        """The layout that serves the windows after `window`."""
        layout = eplb.ExpertLayout(physical_to_logical_map, EXPERTS, topology=self._topology)
        self.digests += layout.digest
        future = self._load[window + 1 : window + 1 + self._every]
        self.balances.append(eplb.mean_balancedness(eplb.rank_load(layout, future)))


def print_plans(rows: Sequence[Row]) -> None:
    """A table of `plan_row`s."""
    ms = measure.milliseconds
    cells = [[r["input"], ms(r["library_s"]), ms(r["adapter_s"]), f"{r['ratio']:.3f}"] for r in rows]
    print(measure.table(["a plan", "library, ms", "adapter, ms", "ratio of minima"], cells))


def plan_row(name: str, library: Callable[[], Any], adapter: Callable[[], Any], calls: int) -> Row:
    """Seconds of the library's call and the adapter's, in turns.

    Raises:
        RuntimeError: their answers differ.
    """
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(calls):
        maps = []
        for call, each in zip((library, adapter), seconds, strict=True):
            start = time.perf_counter()
            maps.append(np.asarray(call()))
            each.append(time.perf_counter() - start)
        if not np.array_equal(maps[0], maps[1]):
            raise RuntimeError("the adapter answers otherwise than the library")
    ours, theirs = ((min(each), statistics.median(each)) for each in seconds)
    return {
        "input": name,
        "library_s": ours[1],
        "adapter_s": theirs[1],
        "ratio": theirs[0] / ours[0],
        "ratio_of_medians": theirs[1] / ours[1],
    }
