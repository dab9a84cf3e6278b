"""All ranks in one process, with weights that name their expert: what tests of moves stand on."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from eplb_core import ExpertLayout, ExpertStore, Topology
from eplb_core.loading.agreement import LocalAgreement
from eplb_core.loading.moves.mover import move_experts
from eplb_core.loading.transport import Transport
from eplb_core.loading.transports import LocalCopy
from eplb_core.testing import strategies
from eplb_core.testing.strategies import topologies

T = TypeVar("T")
TWO = Topology(2)
OLD = ExpertLayout([[0, 1, 2, 3]] * 3, 4, topology=TWO)
NEW = ExpertLayout([[2, 1, 0, 3]] * 3, 4, topology=TWO)
"""Each rank reads one expert of each layer."""
CROWDED = tuple(
    ExpertLayout([row], 6, topology=Topology(3))
    for row in ([2, 1, 3, 0, 0, 4, 3, 5, 1, 1, 3, 5], [2, 0, 3, 3, 1, 5, 4, 1, 0, 4, 4, 5])
)
"""No expert has more than 3 replicas in either; on the way, with one slot of staging, one has 4."""
SIZES = {"w13": 40, "w2": 24, "scale": 3}
"""Bytes of a row of each tensor."""


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


def run_module(module: str, **environment: str) -> str:
    """What a module prints in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    command = [sys.executable, "-m", module]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def interpreted(module: str) -> str:
    """What a module prints with Triton's interpreter: Triton chooses it when it is imported."""
    return run_module(module, TRITON_INTERPRET="1")


@cache
def label(layer: int, expert: int, name: str) -> torch.Tensor:
    """The bytes of an expert: nobody else's."""
    seed = (layer * 1009 + expert) * 8 + list(SIZES).index(name)
    return torch.randint(0, 256, (SIZES[name],), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def whole_label(layer: int, expert: int) -> torch.Tensor:
    return torch.tensor([layer * 16 + expert + 1.0, 0.5])


def stores_of(layout: ExpertLayout, rank: int, whole: bool = True, slots: int | None = None) -> list[ExpertStore]:
    """One rank's stores, filled, with rows for its first `slots`; empty slots hold 255s."""
    stores = []
    for layer, row in enumerate(layout.physical_to_logical_map.tolist()):
        own = row[rank * layout.slots_per_rank :][: slots or layout.slots_per_rank]
        tensors = {name: torch.full((len(own), size), 255, dtype=torch.uint8) for name, size in SIZES.items()}
        for slot, expert in enumerate(own):
            for name, tensor in tensors.items():
                if expert >= 0:
                    tensor[slot] = label(layer, expert, name)
        alpha = torch.stack([whole_label(layer, expert) if expert >= 0 else torch.zeros(2) for expert in row])
        stores.append(ExpertStore(tensors, {"alpha": alpha} if whole else None))
    return stores


def wrong_slots(stores: Sequence[ExpertStore], layout: ExpertLayout, rank: int) -> list[tuple[int, int]]:
    """(layer, slot) whose bytes are not those of the expert that the layout names."""
    wrong = []
    for layer, row in enumerate(layout.physical_to_logical_map.tolist()):
        store = stores[layer]
        for slot, expert in enumerate(row):
            if expert < 0:
                continue
            local = slot - rank * layout.slots_per_rank
            good = True
            if 0 <= local < layout.slots_per_rank:
                good = all(torch.equal(store.row(name, local), label(layer, expert, name)) for name in SIZES)
            if store.whole_names:
                good = good and torch.equal(store.tensor_row("alpha", slot), whole_label(layer, expert))
            if not good:
                wrong.append((layer, slot))
    return wrong


def on_threads(calls: Sequence[Callable[[], T]]) -> list[T | BaseException]:
    """Each call on a thread of its own, as ranks; what it returned or raised."""
    results: list[Any] = [None] * len(calls)

    def run(rank: int) -> None:
        try:
            results[rank] = calls[rank]()
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


class World:
    """All ranks of a layout: stores, transports, agreements."""

    def __init__(
        self,
        layout: ExpertLayout,
        make: Callable[[], Transport] = LocalCopy,
        ranks: Sequence[int] | None = None,
        agree: Callable[[LocalAgreement], Any] = lambda member: member,
        slots: Sequence[int | None] | None = None,
    ) -> None:
        self.layout = layout
        self.ranks = list(range(layout.topology.num_ranks)) if ranks is None else list(ranks)
        rows = slots or [None] * layout.topology.num_ranks
        self.stores = {rank: stores_of(layout, rank, slots=rows[rank]) for rank in self.ranks}
        self.transports: dict[int, Any] = {rank: make() for rank in self.ranks}
        self.agree = agree
        self.meet()

    def meet(self) -> None:
        """The ranks that are there make a new agreement."""
        members = LocalAgreement.group(len(self.ranks), deadline=20.0)
        self.agreements = {rank: self.agree(member) for rank, member in zip(self.ranks, members, strict=True)}

    def each(self, call: Callable[[int], T]) -> list[T | BaseException]:
        """`call(rank)` for all ranks at once."""
        return on_threads([lambda rank=rank: call(rank) for rank in self.ranks])  # type: ignore[misc]

    def move_all(self, new: Any, **options: Any) -> list[Any]:
        """`move_experts` on all ranks; what is a function gives each rank its own."""

        def call(rank: int) -> ExpertLayout:
            own = {key: value(rank) if callable(value) else value for key, value in {**options, "new": new}.items()}
            own |= {"rank": rank, "transport": self.transports[rank], "agreement": self.agreements[rank]}
            return move_experts(self.stores[rank], self.layout, **own)

        return self.each(call)

    def check(self, layout: ExpertLayout) -> None:
        """Every slot of every rank holds its expert."""
        for rank in self.ranks:
            assert wrong_slots(self.stores[rank], layout, rank) == []


def layout_pairs(
    count: int = 2, most_ranks: int = 4, most_layers: int = 3
) -> st.SearchStrategy[tuple[ExpertLayout, ...]]:
    """Layouts of one frame: pairs on a rank, empty slots, nodes of unequal size."""
    return strategies.layout_pairs(
        count=count,
        topology=topologies(num_ranks=(1, most_ranks), num_nodes=(1, 3)),
        num_layers=(1, most_layers),
        num_experts=(1, 4 * most_ranks),
        slots_per_rank=(1, 4),
    )


def random_layout(
    rng: np.random.Generator, layers: int, experts: int, slots: int, topology: Topology, empty: bool = True
) -> ExpertLayout:
    spare = rng.integers(-1 if empty else 0, experts, (layers, slots - experts))
    rows = rng.permuted(np.concatenate([np.tile(np.arange(experts), (layers, 1)), spare], axis=1), axis=1)
    return ExpertLayout(rows, experts, topology=topology)
