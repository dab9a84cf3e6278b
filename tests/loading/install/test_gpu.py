"""Installs by the kernel: on a GPU, and by Triton's interpreter where there is none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eplb_core import ExpertStore, Topology
from eplb_core.loading.install.installer import Installer
from eplb_core.loading.install.staging import Staging
from eplb_core.loading.moves.steps import plan_steps
from tests.loading.worlds import interpreted, needs_cuda, needs_triton, random_layout


@pytest.mark.slow
@needs_triton
def test_the_kernel_makes_the_same_copies_in_triton_s_interpreter() -> None:
    assert interpreted("tests.loading.install.interpreted_installs") == "equal\n"


def _random(rng: np.random.Generator, slots: int, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    return {
        name: torch.from_numpy(rng.integers(0, 256, (slots, size), dtype=np.uint8)).cuda()
        for name, size in sizes.items()
    }


@pytest.mark.cuda
@needs_cuda
def test_installs_on_a_gpu_give_the_bytes_of_installs_on_the_cpu() -> None:
    """E2, E3: rows of any size, aligned or not, circles within a rank, rows of whole tensors."""
    rng = np.random.default_rng(1)
    sizes = {"w13": 16384 * 9 + 32, "w2": 70_000, "scale": 224, "odd": 5001, "zero": 3}
    topology = Topology(2)
    for case in range(40):
        per_rank = int(rng.integers(2, 9))
        experts = int(rng.integers(1, 2 * per_rank + 1))
        old, new = (random_layout(rng, 1, experts, 2 * per_rank, topology) for _ in range(2))
        tensors, whole = _random(rng, per_rank, sizes), _random(rng, 2 * per_rank, {"alpha": 12})
        stores = [
            ExpertStore(tensors, whole),
            ExpertStore({k: v.cpu() for k, v in tensors.items()}, {k: v.cpu() for k, v in whole.items()}),
        ]
        memory = torch.from_numpy(rng.integers(0, 256, per_rank * stores[0].slot_bytes, dtype=np.uint8))
        installers = [
            Installer([stores[0]], Staging(memory.cuda(), stores[:1])),
            Installer([stores[1]], Staging(memory, stores[1:])),
        ]
        for step in plan_steps(old, new, rank=case % 2, capacity=per_rank):
            row_of_slot = rng.permutation(per_rank)
            for installer in installers:
                installer.run(0, installer.plan(step, row_of_slot))
        for name in (*sizes, "alpha"):
            for slot in range(per_rank if name != "alpha" else 2 * per_rank):
                assert torch.equal(stores[0].row(name, slot).cpu(), stores[1].row(name, slot)), (case, name, slot)


@pytest.mark.cuda
@needs_cuda
def test_an_install_allocates_nothing_waits_for_nothing_and_compiles_nothing() -> None:
    from eplb_core.loading.install import gpu

    rng = np.random.default_rng(2)
    topology = Topology(2)
    old, new = (random_layout(rng, 4, 7, 8, topology, empty=False) for _ in range(2))
    stores = [ExpertStore(_random(rng, 4, {"w": 1 << 20, "scale": 4 * 33})) for _ in range(4)]
    installer = Installer(stores, Staging(None, stores))
    kernel = gpu._copy_tiles
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    compiled = sum(len(cache[0]) for cache in kernel.device_caches.values())
    steps = list(plan_steps(old, new, rank=0, capacity=4))
    for step in steps:
        copies = installer.plan(step, np.arange(4))
        try:
            torch.cuda.set_sync_debug_mode("error")
            torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
            installer.run(step.layer, copies)
            assert not torch.cuda.current_stream().query()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    assert len(steps) == 4
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert sum(len(cache[0]) for cache in kernel.device_caches.values()) == compiled
