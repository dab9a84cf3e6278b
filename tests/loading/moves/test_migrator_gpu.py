"""Migrations of weights on a GPU while passes read them: all ranks in one process, one GPU."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest
import torch

from eplb_core import CudaIpc, DispatchTables, ExpertLayout, ExpertStore, Migrator, Topology, move_experts
from eplb_core.loading.install.staging import Staging
from eplb_core.loading.moves import progress as words
from eplb_core.loading.moves.joining import regions_of
from tests.loading.worlds import World, on_threads, random_layout

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RANKS, PER_RANK, EXPERTS, LAYERS = 2, 4, 6, 3


def expected(layer: int, expert: int, size: int) -> torch.Tensor:
    seed = torch.Generator().manual_seed(layer * 100 + expert)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=seed)


SIZES = {"w13": 1 << 18, "w2": 100_003, "scale": 64}


def on_gpu(layout: ExpertLayout, rank: int, device: int = 0) -> list[ExpertStore]:
    stores = []
    for layer, row in enumerate(layout.physical_to_logical_map.tolist()):
        own = row[rank * PER_RANK :][:PER_RANK]
        stores.append(
            ExpertStore(
                {
                    name: torch.stack([expected(layer, expert, size) for expert in own]).cuda(device)
                    for name, size in SIZES.items()
                }
            )
        )
    return stores


def wrong(stores: list[ExpertStore], layout: ExpertLayout, rank: int) -> list[tuple[int, int]]:
    return [
        (layer, slot)
        for layer, row in enumerate(layout.physical_to_logical_map.tolist())
        for slot, expert in enumerate(row[rank * PER_RANK :][:PER_RANK])
        if not all(
            torch.equal(stores[layer].row(name, slot).cpu(), expected(layer, expert, size))
            for name, size in SIZES.items()
        )
    ]


class Fleet(World):
    """Ranks with weights on one GPU, or on one each."""

    def __init__(self, layout: ExpertLayout, *, apart: bool = False) -> None:
        super().__init__(layout, make=CudaIpc)
        self.devices = {rank: rank if apart else 0 for rank in self.ranks}
        self.transports = {rank: CudaIpc(device=device) for rank, device in self.devices.items()}
        self.stores = {rank: on_gpu(layout, rank, device) for rank, device in self.devices.items()}


def layouts(count: int, seed: int) -> list[ExpertLayout]:
    rng = np.random.default_rng(seed)
    topology = Topology(RANKS)
    return [random_layout(rng, LAYERS, EXPERTS, RANKS * PER_RANK, topology, empty=False) for _ in range(count)]


@pytest.mark.parametrize("slots", [PER_RANK, 1])
def test_synchronous_moves_leave_every_slot_with_its_expert(slots: int) -> None:
    many = layouts(5, 0)
    fleet = Fleet(many[0])
    for old, new in itertools.pairwise(many):
        answers: list[Any] = fleet.each(
            lambda rank, old=old, new=new: move_experts(  # type: ignore[misc]
                fleet.stores[rank],
                old,
                new,
                rank=rank,
                transport=fleet.transports[rank],
                agreement=fleet.agreements[rank],
                staging=slots * fleet.stores[0][0].slot_bytes,
            )
        )
        assert answers == [new, new]
        assert [wrong(fleet.stores[rank], new, rank) for rank in fleet.ranks] == [[], []]


def test_every_pass_finds_in_each_slot_the_expert_of_the_live_layout() -> None:
    """Sums of the bytes are taken on the stream of the passes, right behind the installs."""
    many = layouts(4, 1)
    fleet = Fleet(many[0])

    def run(rank: int) -> list[Any]:
        torch.cuda.set_device(0)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            stores = fleet.stores[rank]
            tables = DispatchTables(many[0], rank=rank, mode="row", device="cuda")
            mig = Migrator(
                stores,
                many[0],
                rank=rank,
                transport=fleet.transports[rank],
                agreement=fleet.agreements[rank],
                tables=tables,
            )
            problems: list[Any] = []
            sums = torch.zeros(LAYERS, PER_RANK, dtype=torch.int64, device="cuda")
            for target in many[1:]:
                mig.start(target)
                passes = 0
                while not mig.idle and passes < 20_000:
                    mig.poll()
                    for layer, store in enumerate(stores):
                        for slot in range(PER_RANK):
                            sums[layer, slot] = store.row("w13", slot).sum(dtype=torch.int64)
                    own = mig.layout.physical_to_logical_map[:, rank * PER_RANK :][:, :PER_RANK]
                    stream.synchronize()
                    for (layer, slot), found in np.ndenumerate(sums.cpu().numpy()):
                        right = int(expected(layer, int(own[layer, slot]), SIZES["w13"]).sum(dtype=torch.int64))
                        if int(found) != right:
                            problems.append((passes, layer, slot))
                    passes += 1
                problems += wrong(stores, mig.layout, rank)
                if mig.layout != target:
                    problems.append(mig.status)
            if not mig.stop(20.0):
                problems.append("not stopped")
        return problems

    assert on_threads([lambda rank=rank: run(rank) for rank in fleet.ranks]) == [[], []]  # type: ignore[misc]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices: copies within one are kernels")
def test_reads_between_devices_end_while_a_kernel_holds_every_place_of_the_reader_s() -> None:
    """E12: what a cooperative MoE kernel does. All blocks are resident and wait; a copy by a kernel would never begin.

    The kernel gives up after some seconds, so that a copy which waits for a core fails the test and not the machine.
    """
    from benchmarks.full_grid import FullGrid  # needs Triton

    old, new = layouts(2, 2)
    fleet = Fleet(old, apart=True)
    migrators: list[Any] = fleet.each(
        lambda rank: Migrator(
            fleet.stores[rank],
            old,
            rank=rank,
            transport=fleet.transports[rank],
            agreement=fleet.agreements[rank],
            staging=2 * PER_RANK * fleet.stores[0][0].slot_bytes,
        )
    )

    assert [mig for mig in migrators if isinstance(mig, BaseException)] == []

    def polls_until(phase: int) -> None:
        for _ in range(20_000):
            if {mig.progress >> 32 & 3 for mig in migrators} == {phase}:
                return
            for mig in migrators:
                mig.poll()
            time.sleep(0.0005)
        raise AssertionError([mig.status for mig in migrators])

    grid = FullGrid()
    staged = words.word(1, words.MOVING, 1)
    for mig in migrators:
        mig.start(new)
    polls_until(words.CHECK)
    grid.begin()  # no step is begun before the next pass
    try:
        polls_until(words.MOVING)
        end = time.monotonic() + 2.0
        while {mig.progress for mig in migrators} != {staged} and time.monotonic() < end:
            time.sleep(0.001)
        assert {mig.progress for mig in migrators} == {staged}
        assert grid.holds_all(), "the kernel was over: nothing was shown"
    finally:
        grid.end()
    while not migrators[0].idle:
        for mig in migrators:
            mig.poll()
    assert {mig.status.cause for mig in migrators} == {""}
    torch.cuda.synchronize()
    assert [wrong(fleet.stores[rank], new, rank) for rank in fleet.ranks] == [[]] * RANKS
    assert on_threads([lambda mig=mig: mig.stop(20.0) for mig in migrators]) == [True] * RANKS  # type: ignore[misc]


def test_slots_that_are_allocations_side_by_side_are_exported_one_by_one() -> None:
    """The driver puts them so; a handle is of one alone."""
    apart = [torch.zeros(32 << 20, dtype=torch.uint8, device="cuda") for _ in range(8)]
    stores = [ExpertStore({"w13": apart})]
    regions, _ = regions_of(stores, Staging(None, stores), stores[0].num_slots)
    transport = CudaIpc()
    assert transport.export(regions)
    transport.close()
