"""Device memory as file descriptors: weight hosts on a GPU, engines that outlive them, peers that read it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eplb_core import CudaIpc, ExpertLayout, LayoutClient, ReadBatch, Region, Topology, WeightHost, attach_weights
from eplb_core.loading.cuda import segments

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROOT = Path(__file__).parents[3]
MIB = 1 << 20


def pattern(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def child(code: str, *fds: int, arguments: tuple[Any, ...] = ()) -> subprocess.Popen[str]:
    head = "import sys, os, torch\n"
    head += "from tests.loading.cuda.test_segments_gpu import *\n"
    return subprocess.Popen(
        [sys.executable, "-c", head + code, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        pass_fds=fds,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_memory_is_shared_by_its_descriptor_and_freed_with_its_last_user() -> None:
    torch.zeros(1, device="cuda")
    before = torch.cuda.mem_get_info()[0]
    segment = segments.create(33 * MIB + 5, 0)
    assert segment.nbytes % segments.granularity(0) == 0
    assert segment.nbytes >= 33 * MIB + 5
    own = segment.bytes(0, 33 * MIB)
    own.copy_(pattern(33 * MIB))
    other = segments.open_fd(segment.fd, segment.nbytes)
    assert other.address != segment.address
    assert torch.equal(other.bytes(0, 33 * MIB).cpu(), pattern(33 * MIB))
    other.bytes(7, 1).fill_(9)
    assert own[7].item() == 9
    assert segments.find(segment.address + 5) is segment
    assert before - torch.cuda.mem_get_info()[0] < 2 * segment.nbytes
    del own, segment, other
    assert before - torch.cuda.mem_get_info()[0] < 32 * MIB


def test_another_process_reads_and_writes_it() -> None:
    segment = segments.create(4 * MIB, 0)
    segment.bytes().copy_(pattern(segment.nbytes))
    torch.cuda.synchronize()
    code = """
fd, nbytes = int(sys.argv[1]), int(sys.argv[2])
memory = segments.open_fd(fd, nbytes).bytes()
print(torch.equal(memory.cpu(), pattern(nbytes)))
memory[:3] = torch.tensor([1, 2, 3], dtype=torch.uint8)
torch.cuda.synchronize()
"""
    process = child(code, segment.fd, arguments=(segment.fd, segment.nbytes))
    assert process.communicate(timeout=120)[0].strip() == "True"
    assert segment.bytes(0, 3).tolist() == [1, 2, 3]


def test_it_outlives_the_process_that_made_it() -> None:
    left, right = socket.socketpair()
    code = """
import socket, time
segment = segments.create(8 * MIB, 0)
segment.bytes().copy_(pattern(segment.nbytes))
torch.cuda.synchronize()
socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [str(segment.nbytes).encode()], [segment.fd])
print("sent", flush=True)
time.sleep(100)
"""
    process = child(code, right.fileno(), arguments=(right.fileno(),))
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "sent"
    data, fds, _, _ = socket.recv_fds(left, 100, 1)
    nbytes = int(data)
    memory = segments.open_fd(fds[0], nbytes).bytes()
    os.close(fds[0])
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.communicate()
    for _ in range(3):
        assert torch.equal(memory.cpu(), pattern(nbytes))
    left.close()
    right.close()


def test_a_descriptor_of_something_else_is_refused(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file, pytest.raises(ValueError, match="cuMem"):
        segments.open_fd(file.fileno(), 2 * MIB)


def model() -> dict[str, torch.Tensor]:
    base = pattern(3 * MIB, 1).cuda()
    return {
        "w": base[:MIB].view(4, -1),
        "view of w": base[MIB // 2 : MIB],
        "scale": torch.arange(12.0, device="cuda").view(4, 3),
        "on the host": torch.arange(5),
        "empty": torch.empty(0, 3, device="cuda"),
        "transposed": torch.arange(12.0, device="cuda").view(4, 3).T,
    }


def test_engines_map_what_a_host_loaded_onto_the_gpu(tmp_path: Path) -> None:
    layout = ExpertLayout([[0, 1, 2, 3]], 4, topology=Topology(1))
    path = tmp_path / "host"
    expected = {name: tensor.cpu() for name, tensor in model().items()}
    with WeightHost(path, lambda layout, rank: model(), config={"model": "m"}, layout=layout, rank=0):
        engines: list[dict[str, Any]] = []
        clients = [LayoutClient(path, name) for name in ("a", "b")]
        for client in clients:
            tensors: dict[str, Any] = {}
            attach_weights(client, tensors, config={"model": "m"}, layout=layout, rank=0)
            engines.append(tensors)
            for key, tensor in expected.items():
                assert torch.equal(tensors[key].cpu(), tensor), key
                assert tensors[key].device.type == ("cpu" if key == "on the host" else "cuda")
                assert tensors[key].stride() == tensor.stride()
        engines[0]["w"][2].fill_(5)
        torch.cuda.synchronize()
        assert (engines[1]["w"][2] == 5).all()
        assert engines[0]["view of w"][0].item() == 5  # rows 2 and 3
        for client in clients:
            client.close()


def test_peers_read_what_an_engine_mapped_from_its_host(tmp_path: Path) -> None:
    path = tmp_path / "host"
    layout = ExpertLayout([[0, 1, 2, 3]], 4, topology=Topology(1))
    with WeightHost(path, lambda layout, rank: model(), config={}, layout=layout, rank=0):
        client, tensors = LayoutClient(path, "a"), dict[str, Any]()
        attached = attach_weights(client, tensors, config={}, layout=layout, rank=0)
        transport = CudaIpc()
        rows = [Region(tensors[name].data_ptr(), tensors[name].nbytes, "cuda:0") for name in ("w", "scale")]
        blob = tmp_path / "blob"
        blob.write_bytes(transport.export(rows))
        code = """
from pathlib import Path
transport = CudaIpc()
here = torch.zeros(2 * MIB, dtype=torch.uint8, device="cuda")
transport.export([Region(here.data_ptr(), here.nbytes, "cuda:0")])
transport.connect(1, Path(sys.argv[1]).read_bytes())
batch = ReadBatch(*map(np.array, ([0, 0], [0, MIB], [0, 1], [0, 12], [MIB, 36])))
ticket = transport.read(1, batch)
while not transport.poll(ticket).state.is_end:
    pass
expected = {name: tensor.cpu() for name, tensor in model().items()}
print(transport.poll(ticket).state.name, torch.equal(here[:MIB].cpu(), expected["w"].reshape(-1)),
      here[MIB:MIB + 36].view(torch.float32).tolist() == expected["scale"].reshape(-1)[3:].tolist())
transport.disconnect(1)
transport.close()
"""
        process = child(code, arguments=(blob,))
        out = process.communicate(timeout=120)[0]
        assert out.strip() == "DONE True True"
        transport.close()
        attached.close()
        client.close()


def test_reads_within_a_process_find_mapped_memory_too() -> None:
    segment = segments.create(2 * MIB, 0)
    segment.bytes().copy_(pattern(segment.nbytes))
    here = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    transport = CudaIpc()
    blob = transport.export(
        [Region(here.data_ptr(), here.nbytes, "cuda:0"), Region(segment.address + 512, MIB, "cuda:0")]
    )
    transport.connect(0, blob)
    ticket = transport.read(0, ReadBatch(*map(np.array, ([0], [0], [1], [0], [MIB]))))
    while not transport.poll(ticket).state.is_end:
        pass
    assert torch.equal(here.cpu(), pattern(segment.nbytes)[512 : 512 + MIB])
    transport.close()
