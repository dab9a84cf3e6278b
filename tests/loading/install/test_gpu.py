"""Installs by the kernel: on a GPU, and by Triton's interpreter where there is none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eplb_core import ExpertStore, Topology
from eplb_core.loading.install.installer import Installer
from eplb_core.loading.install.staging import Staging
from eplb_core.loading.moves.steps import plan_steps
from tests.loading.install.interpreted_installs import compare_installs, random_rows
from tests.loading.worlds import interpreted, needs_cuda, needs_triton, random_layout


@pytest.mark.slow
@needs_triton
def test_the_kernel_makes_the_same_copies_in_triton_s_interpreter() -> None:
    assert interpreted("tests.loading.install.interpreted_installs") == "equal\n"


@pytest.mark.cuda
@needs_cuda
def test_installs_on_a_gpu_give_the_bytes_of_installs_on_the_cpu() -> None:
    """E2, E3: rows of any size, aligned or not, circles within a rank, rows of whole tensors."""
    sizes = {"w13": 16384 * 9 + 32, "w2": 70_000, "scale": 224, "odd": 5001, "zero": 3}
    compare_installs(sizes, "cuda", cases=40, most_slots=8)


@pytest.mark.cuda
@needs_cuda
def test_an_install_allocates_nothing_waits_for_nothing_and_compiles_nothing() -> None:
    from eplb_core.loading.install import gpu

    rng = np.random.default_rng(2)
    topology = Topology(2)
    old, new = (random_layout(rng, 4, 7, 8, topology, empty=False) for _ in range(2))
    rows = [random_rows(rng, 4, {"w": 1 << 20, "scale": 4 * 33}) for _ in range(4)]
    stores = [ExpertStore({name: each.cuda() for name, each in layer.items()}) for layer in rows]
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
