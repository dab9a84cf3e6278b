"""Compares the GPU kernel of installs, run by Triton's interpreter on a CPU, with the CPU's copies; prints `equal`."""

from __future__ import annotations

import numpy as np
import torch

from eplb_core import ExpertStore, Topology
from eplb_core.loading.install.installer import Installer
from eplb_core.loading.install.staging import Staging
from eplb_core.loading.moves.steps import plan_steps
from tests.loading.worlds import random_layout

SIZES = {"aligned": 16400 * 2 + 16, "small": 48, "odd": 4099, "row": 3}


def store_of(rng: np.random.Generator, slots: int, places: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    tensors = {
        name: torch.from_numpy(rng.integers(0, 256, (slots, size), dtype=np.uint8)) for name, size in SIZES.items()
    }
    return tensors, torch.from_numpy(rng.integers(0, 256, (places, 20), dtype=np.uint8))


def main() -> None:
    rng = np.random.default_rng(0)
    topology = Topology(2)
    for case in range(30):
        per_rank = int(rng.integers(2, 7))
        experts = int(rng.integers(1, 2 * per_rank + 1))
        old, new = (random_layout(rng, 1, experts, 2 * per_rank, topology) for _ in range(2))
        tensors, whole = store_of(rng, per_rank, 2 * per_rank)
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        stores = [ExpertStore(tensors, {"w": whole}), ExpertStore(copies, {"w": whole.clone()})]
        memory = torch.from_numpy(rng.integers(0, 256, per_rank * stores[0].slot_bytes, dtype=np.uint8))
        both = [
            Installer([store], Staging(memory.clone(), [store]), kernels=kernels)
            for store, kernels in zip(stores, (True, False), strict=True)
        ]
        for step in plan_steps(old, new, rank=case % 2, capacity=per_rank):
            row_of_slot = rng.permutation(per_rank)
            for installer in both:
                installer.run(0, installer.plan(step, row_of_slot))
        for name in (*SIZES, "w"):
            count = 2 * per_rank if name == "w" else per_rank
            for slot in range(count):
                if not torch.equal(stores[0].row(name, slot), stores[1].row(name, slot)):
                    raise SystemExit(f"case {case}, tensor {name}, slot {slot}: the bytes differ")
    print("equal")


if __name__ == "__main__":
    main()
