"""One of two ranks, as an engine runs them: reads from the other through a new group, then just ends."""

from __future__ import annotations

import sys
import time

import numpy as np
import torch
import torch.distributed as dist

from eplb_core import ReadBatch, Region, TorchDistributed


def main(rank: int, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    transport = TorchDistributed(dist.new_group(backend="gloo"))
    own = torch.full((1000,), rank + 1, dtype=torch.uint8)
    blobs = [b"", b""]
    dist.all_gather_object(blobs, transport.export([Region(own.data_ptr(), 1000, "cpu")]))
    transport.connect(1 - rank, blobs[1 - rank])
    ticket = transport.read(1 - rank, ReadBatch(*(np.array([value]) for value in (0, 0, 0, 500, 500))))
    while not transport.poll(ticket).state.is_end:
        time.sleep(0.001)
    print(transport.poll(ticket).state.name, own[0].item(), own[999].item())
    dist.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
