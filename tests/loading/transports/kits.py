"""How the transports are made, for the checks of `eplb_core.testing`; importable by the peers' processes."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from eplb_core.loading.transport import Transport
from eplb_core.loading.transports import CudaIpc, Faulty, Mooncake, Nixl, SharedMemory, TorchDistributed


def shared_memory(rank: int, size: int, folder: str) -> Transport:
    return SharedMemory()


def shared_tensor(nbytes: int) -> torch.Tensor:
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    tensor.share_memory_()  # type: ignore[no-untyped-call]
    return tensor


def gloo(rank: int, size: int, folder: str) -> Transport:
    """A group of its own, on the loopback device."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
    store = dist.FileStore(f"{folder}/store", size)  # type: ignore[attr-defined]
    return TorchDistributed(dist.ProcessGroupGloo(store, rank, size, options))


def faultless(rank: int, size: int, folder: str) -> Transport:
    return Faulty(SharedMemory(), [])


def delayed(rank: int, size: int, folder: str) -> Transport:
    return Faulty(SharedMemory(), {"delay": 1.0}, polls=5)


def nixl_tcp(rank: int, size: int, folder: str) -> Transport:
    """As between hosts: the owner must run."""
    os.environ.update(UCX_NET_DEVICES="lo", UCX_TLS="tcp,self")
    return Nixl()


def nixl_on_one_host(rank: int, size: int, folder: str) -> Transport:
    """With the system's own copy between processes."""
    os.environ.update(UCX_NET_DEVICES="lo", UCX_TLS="tcp,sm,self")
    return Nixl()


def mooncake(rank: int, size: int, folder: str) -> Transport:
    """A stopped owner is given up on after a second, not after 30."""
    os.environ.update(MC_TCP_PROGRESS_TIMEOUT_SEC="1", MC_LOG_LEVEL="FATAL")
    return Mooncake("127.0.0.1")


def cuda_ipc(rank: int, size: int, folder: str) -> Transport:
    return CudaIpc()


def cuda_ipc_on_cores(rank: int, size: int, folder: str) -> Transport:
    """Without the request to leave the cores alone."""
    return CudaIpc(prefer_overlap=False)


def device_tensor(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
