"""How the transports are made, for the checks of `eplb_core.testing`; importable by the peers' processes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from eplb_core.loading.transport import Transport
from eplb_core.loading.transports import SharedMemory, TorchDistributed


def shared_memory(rank: int, size: int, folder: str) -> Transport:
    return SharedMemory()


def shared_tensor(nbytes: int) -> torch.Tensor:
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    tensor.share_memory_()  # type: ignore[no-untyped-call]
    return tensor


def gloo(rank: int, size: int, folder: str) -> Transport:
    """A group of its own, on the loopback device."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]  # type: ignore[attr-defined]
    store = dist.FileStore(f"{folder}/store", size)
    return TorchDistributed(dist.ProcessGroupGloo(store, rank, size, options))  # type: ignore[call-arg, arg-type]
