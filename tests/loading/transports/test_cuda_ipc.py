"""Reads of other processes' device memory. Needs a GPU; all ranks share one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from eplb_core import TransportError
from eplb_core.loading.transport import ReadState, Region
from eplb_core.loading.transports import CudaIpc
from eplb_core.testing import TransportKit
from eplb_core.testing.peers import World, batch, contents, export, pattern, wait, world
from tests.loading.transports import kits

HAS_CUDA = torch.cuda.is_available()
KIT = TransportKit(kits.cuda_ipc, allocate=kits.device_tensor)
NBYTES = 1 << 20


@pytest.mark.skipif(HAS_CUDA, reason="a CUDA device is there")
def test_without_a_device_it_says_what_it_needs() -> None:
    with pytest.raises(TransportError, match="CudaIpc needs a CUDA device and its runtime: torch finds no CUDA"):
        CudaIpc()


def on_gpu(test: Callable[[], None]) -> Callable[[], None]:
    needed = pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
    return pytest.mark.cuda(needed(test))


def joined(w: World) -> torch.Tensor:
    export(w.me, [NBYTES], None)
    w.transport.connect(1, w.peers[1].call(export, [NBYTES], 1))
    return w.me.tensors[0]


def read_whole(w: World, stream: object = None) -> ReadState:
    ticket = w.transport.read(1, batch([(0, 0, 0, 0, NBYTES)]), stream=stream)
    return wait(w.transport, ticket, 10.0).state


@on_gpu
def test_a_read_waits_for_the_stream_that_it_is_given() -> None:
    """A staging buffer that an install still reads on the engine's stream."""
    with world(KIT) as w:
        own = joined(w)
        seen = torch.empty_like(own)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # cycles: a tenth of a second
            seen.copy_(own)
        ticket = w.transport.read(1, batch([(0, 0, 0, 0, NBYTES)]), stream=stream)
        assert w.transport.poll(ticket).state is ReadState.PENDING
        assert wait(w.transport, ticket, 10.0).state is ReadState.DONE
        torch.cuda.synchronize()
        assert not seen.any()
        assert np.array_equal(contents(own), pattern(1, NBYTES))


@on_gpu
def test_a_read_goes_on_while_a_graph_is_captured() -> None:
    """The engine captures its graphs in global mode, in which other threads' calls would break the capture."""
    with world(KIT) as w:
        own = joined(w)
        assert read_whole(w) is ReadState.DONE
        own.zero_()
        torch.cuda.synchronize()
        value = torch.zeros(4, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            value += 1
            assert read_whole(w) is ReadState.DONE
        graph.replay()
        torch.cuda.synchronize()
        assert value.tolist() == [1.0] * 4
        assert np.array_equal(contents(own), pattern(1, NBYTES))


@on_gpu
def test_a_region_of_a_third_process_is_handed_on() -> None:
    """Weights that live in a host process: a rank maps them, and peers get the host's handle, not a new one."""
    with world(KIT, 2) as w:
        own = joined(w)
        w.peers[2].call(export, [64], 9)
        blob = w.peers[2].call(export_foreign, w.peers[1].call(ipc_of_first))
        w.transport.connect(2, blob)
        ticket = w.transport.read(2, batch([(0, 0, 0, 0, NBYTES)]))
        assert wait(w.transport, ticket, 10.0).state is ReadState.DONE
        assert np.array_equal(contents(own), pattern(1, NBYTES))


def ipc_of_first(state: object) -> tuple[bytes, int]:
    transport, tensor = state.transport, state.tensors[0]  # type: ignore[attr-defined]
    base, _ = transport._cuda.allocation(tensor.data_ptr())
    return transport._cuda.handle_of(base), tensor.data_ptr() - base


def export_foreign(state: object, memory: tuple[bytes, int]) -> bytes:
    transport = state.transport  # type: ignore[attr-defined]
    base = transport._cuda.open_handle(memory[0])
    blob: bytes = transport.export([Region(base + memory[1], NBYTES, "cuda", memory)])
    return blob


@on_gpu
def test_regions_that_cannot_be_exported_are_named() -> None:
    transport = CudaIpc()
    tensor = torch.zeros(100, dtype=torch.uint8)
    with pytest.raises(TransportError, match=r"`regions\[0\]` \(100 bytes at 0x[0-9a-f]+\) cannot be exported"):
        transport.export([Region(tensor.data_ptr(), 100, "cuda")])
    with pytest.raises(TransportError, match=r"`regions\[0\]\.device` \(='cuda:77'\) must be cuda:0"):
        transport.export([Region(0, 0, "cuda:77")])
    with pytest.raises(TransportError, match=r"`regions\[0\]\.device` \(='cpu'\) must be one of \['cuda'\]"):
        transport.export([Region(tensor.data_ptr(), 100, "cpu")])
    transport.close()
