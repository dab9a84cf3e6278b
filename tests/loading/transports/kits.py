"""How the transports are made, for the checks of `eplb_core.testing`; importable by the peers' processes."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from eplb_core.errors import TransportError
from eplb_core.loading.transport import Transport
from eplb_core.loading.transports import CudaIpc, Faulty, LocalCopy, Mooncake, Nixl, SharedMemory, TorchDistributed


def required(find: Callable[[], object]) -> Any:
    """Marks that skip where a transport is not installed; where EPLB_REQUIRE_TRANSPORTS is set, it must be."""
    import pytest  # not in the peers' processes, which import this file too

    try:
        find()
    except TransportError as error:
        if os.environ.get("EPLB_REQUIRE_TRANSPORTS"):
            raise
        return [pytest.mark.skip(reason=str(error))]
    return []


@contextmanager
def unreachable(nbytes: int) -> Iterator[int]:
    """Address of memory that cannot be read or written; nothing else comes to lie there."""
    block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = np.frombuffer(block, dtype=np.uint8).ctypes.data
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    yield address
    block.close()


def shut_connections() -> int:
    """End this process's TCP connections under those who use them, as a network that fails does; how many."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        # No socket, one that listens, or closed meanwhile: not one of these.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername():
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def local(rank: int, size: int, folder: str) -> Transport:
    return LocalCopy()


def shared_memory(rank: int, size: int, folder: str) -> Transport:
    return SharedMemory()


def shared_tensor(nbytes: int) -> torch.Tensor:
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    tensor.share_memory_()  # type: ignore[no-untyped-call]
    return tensor


def gloo_group(rank: int, size: int, folder: str, name: str = "store") -> Any:
    """On the loopback device, beside torch's default group or without one."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
    store = dist.FileStore(f"{folder}/{name}", size)  # type: ignore[attr-defined]
    return dist.ProcessGroupGloo(store, rank, size, options)


def gloo(rank: int, size: int, folder: str) -> Transport:
    return TorchDistributed(gloo_group(rank, size, folder))


def gloo_with_payload(rank: int, size: int, folder: str) -> Transport:
    """Bytes go by groups of their own, as they do with NCCL."""
    group, up, down = (gloo_group(rank, size, folder, name) for name in ("store", "up", "down"))
    return TorchDistributed(group, payload=(up, down))


def nccl(rank: int, size: int, folder: str) -> Transport:
    """Device memory from GPU to GPU; one for each rank."""
    torch.cuda.set_device(rank)
    dist.init_process_group("gloo", init_method=f"file://{folder}/world", rank=rank, world_size=size)
    up, down = (dist.new_group(backend="nccl") for _ in range(2))
    return TorchDistributed(gloo_group(rank, size, folder), device=rank, payload=(up, down))


def delayed(rank: int, size: int, folder: str) -> Transport:
    return Faulty(SharedMemory(), {"delay": 1.0}, polls=5)


def nixl_tcp(rank: int, size: int, folder: str) -> Transport:
    """As between hosts: the owner must run.

    The wheel's RDMA libraries and the system's take each other down at exit where both are loaded: none is.
    """
    os.environ.update(UCX_NET_DEVICES="lo", UCX_TLS="tcp,self", UCX_MODULES="^ib")
    return Nixl()


def nixl_on_one_host(rank: int, size: int, folder: str) -> Transport:
    """With the system's own copy between processes."""
    os.environ.update(UCX_NET_DEVICES="lo", UCX_TLS="tcp,sm,self", UCX_MODULES="^ib")
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


def cuda_ipc_one_by_one(rank: int, size: int, folder: str) -> Transport:
    """As with a runtime that has no batched copies."""
    return CudaIpc(batched=False)


def gloo_and_device(rank: int, size: int, folder: str) -> Transport:
    """Device memory by way of the host."""
    return TorchDistributed(gloo_group(rank, size, folder), device=0)


def device_tensor(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
