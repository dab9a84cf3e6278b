"""How the transports are made, for the checks of `eplb_core.testing`; importable by the peers' processes."""

from __future__ import annotations

import torch

from eplb_core.loading.transport import Transport
from eplb_core.loading.transports import SharedMemory


def shared_memory(rank: int, size: int, folder: str) -> Transport:
    return SharedMemory()


def shared_tensor(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8).share_memory_()
