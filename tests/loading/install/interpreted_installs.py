"""Installs by the kernel beside installs on the CPU. As a program: by Triton's interpreter; prints `equal`."""

from __future__ import annotations

import numpy as np
import torch

from eplb_core import ExpertStore, Topology
from eplb_core.loading.install.installer import Installer
from eplb_core.loading.install.staging import Staging
from eplb_core.loading.moves.steps import plan_steps
from tests.loading.worlds import random_layout

SIZES = {"aligned": 16400 * 2 + 16, "small": 48, "odd": 4099, "row": 3}


def random_rows(rng: np.random.Generator, slots: int, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(rng.integers(0, 256, (slots, size), dtype=np.uint8)) for name, size in sizes.items()}


def compare_installs(sizes: dict[str, int], device: str, *, cases: int, most_slots: int) -> None:
    """Installs on `device` by the kernel give the bytes of those on the CPU, rows of whole tensors included."""
    rng = np.random.default_rng(1)
    topology = Topology(2)
    for case in range(cases):
        per_rank = int(rng.integers(2, most_slots + 1))
        experts = int(rng.integers(1, 2 * per_rank + 1))
        old, new = (random_layout(rng, 1, experts, 2 * per_rank, topology) for _ in range(2))
        rows, whole = random_rows(rng, per_rank, sizes), random_rows(rng, 2 * per_rank, {"whole": 20})
        stores, installers = [], []
        memory = torch.from_numpy(rng.integers(0, 256, per_rank * (sum(sizes.values())), dtype=np.uint8))
        for where, kernels in ((device, True), ("cpu", False)):
            own = [{name: each.to(where, copy=True) for name, each in part.items()} for part in (rows, whole)]
            stores.append(ExpertStore(*own))
            staging = Staging(memory.to(where, copy=True), stores[-1:])
            installers.append(Installer(stores[-1:], staging, kernels=kernels))
        for step in plan_steps(old, new, rank=case % 2, capacity=per_rank):
            row_of_slot = rng.permutation(per_rank)
            for installer in installers:
                installer.run(0, installer.plan(step, row_of_slot))
        for name in (*sizes, "whole"):
            for slot in range(2 * per_rank if name == "whole" else per_rank):
                by_kernel, by_copies = (store.tensor_row(name, slot).cpu() for store in stores)
                assert torch.equal(by_kernel, by_copies), (case, name, slot)


if __name__ == "__main__":
    compare_installs(SIZES, "cpu", cases=30, most_slots=6)
    print("equal")
