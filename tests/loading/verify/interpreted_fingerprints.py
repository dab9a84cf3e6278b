"""Compares the GPU kernel, run by Triton's interpreter on a CPU, with the CPU's prints; prints `equal`."""

from __future__ import annotations

import numpy as np
import torch

from eplb_core import ExpertStore, fingerprints
from eplb_core.loading.verify import fingerprint_gpu
from eplb_core.loading.verify.keys import CHUNK_BYTES


def interpreted(stores: list[ExpertStore], sample: tuple[int, int]) -> torch.Tensor:
    addresses = np.stack([store.addresses for store in stores])
    prints = torch.zeros(addresses.shape, dtype=torch.int64)
    fingerprint_gpu.enqueue(addresses, np.stack([store.row_bytes for store in stores]), *sample, prints)
    return prints


def layer(nbytes: int) -> ExpertStore:
    """Rows that are aligned, rows that are not, and rows apart from each other."""
    apart = torch.randint(0, 256, (2, nbytes + -nbytes % 16), dtype=torch.uint8)
    odd = torch.randint(0, 256, (2, 7), dtype=torch.uint8)
    return ExpertStore({"w": apart[:, :nbytes], "odd": odd, "list": list(torch.rand(2, 5))})


def main() -> None:
    torch.manual_seed(0)
    for nbytes, sample in ((3, (1, 0)), (16_004, (1, 0)), (8192 * 4 + 5, (1, 0)), (CHUNK_BYTES * 2 + 528, (2, 1))):
        stores = [layer(nbytes), layer(16)]
        expected = fingerprints(stores, sample=sample)
        if not torch.equal(interpreted(stores, sample), expected):
            raise SystemExit(f"rows of {nbytes} bytes, sample {sample}: the prints differ")
    print("equal")


if __name__ == "__main__":
    main()
