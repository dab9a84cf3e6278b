"""Reads between processes of one host, mapped and by the system's copy."""

from __future__ import annotations

import errno
import json
import mmap
import os
import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from eplb_core.errors import TransportError
from eplb_core.loading.transport import ReadState, Region, Status
from eplb_core.loading.transports import SharedMemory, span_copies
from eplb_core.loading.transports.batches import Spans
from eplb_core.loading.transports.shared_memory import _Copy, _work, why_failed
from eplb_core.testing.peers import Op, batch, wait
from tests.loading.transports import kits


@contextmanager
def reader_of(*regions: Region) -> Iterator[tuple[SharedMemory, dict[str, Any]]]:
    """A transport whose regions these are, and what it exports."""
    transport = SharedMemory()
    record = json.loads(transport.export(list(regions)))
    yield transport, record
    transport.close()


def end_of(transport: SharedMemory, rank: int, op: Op) -> Status:
    """How a read of one span ends."""
    return wait(transport, transport.read(rank, batch([op])), 60.0)


def test_shared_regions_are_found_by_their_address() -> None:
    """Torch's shared tensors, the standard library's blocks and memfd; not plain memory, not private files."""
    plain = torch.zeros(100, dtype=torch.uint8)
    tensor = kits.shared_tensor(100)
    block = shared_memory.SharedMemory(create=True, size=100)
    number = os.memfd_create("eplb")
    os.truncate(number, 8192)
    both = mmap.mmap(number, 8192)
    own = mmap.mmap(number, 8192, flags=mmap.MAP_PRIVATE)
    anonymous = mmap.mmap(-1, 4096)
    views = [
        np.frombuffer(buffer, dtype=np.uint8)  # type: ignore[arg-type]
        for buffer in (block.buf, both, own, anonymous)
    ]
    addresses = [plain.data_ptr(), tensor.data_ptr() + 10, views[0].ctypes.data, views[1].ctypes.data + 5000]
    addresses += [views[2].ctypes.data, views[3].ctypes.data]
    with reader_of(*(Region(address, 50, "cpu") for address in addresses)) as (_, record):
        extra = record["extra"]
        assert extra["region_file"] == [-1, 0, 1, 2, -1, -1]
        assert extra["region_offset"] == [0, 10, 0, 5000, 0, 0]
        assert "descriptor" in extra["files"][0]
        assert extra["files"][1]["path"].startswith("/dev/shm/")
    del views
    block.close()
    block.unlink()
    os.close(number)


def test_an_older_blob_of_the_same_exporter_is_ignored() -> None:
    """I8: blobs that overtake each other on their way; each is of a generation."""
    data = np.arange(200, dtype=np.uint8)
    at = data.ctypes.data
    transport = SharedMemory()
    old = transport.export([Region(at, 50, "cpu")])
    new = transport.export([Region(at, 200, "cpu")])
    transport.connect(3, new)
    transport.connect(3, old)
    assert end_of(transport, 3, (0, 100, 0, 0, 100)).state is ReadState.DONE
    assert data[100:].tolist() == list(range(100))
    transport.close()


def test_memory_that_cannot_be_read_fails_the_read_and_says_so() -> None:
    target = np.zeros(1 << 20, dtype=np.uint8)
    with kits.unreachable(1 << 20) as address:
        transport = SharedMemory()
        regions = [Region(target.ctypes.data, 1 << 20, "cpu"), Region(address, 1 << 20, "cpu")]
        transport.connect(0, transport.export(regions))
        status = end_of(transport, 0, (0, 0, 1, 0, 1 << 20))
        assert status.state is ReadState.FAILED
        assert status.reason.startswith(f"rank 0: process {os.getpid()}: EFAULT; memory was unmapped")
        transport.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"host": "elsewhere"}, "rank 1 must be on this host and in this pid namespace"),
        ({"started": 1}, r"rank 1 \(process \d+\) must be alive to be connected"),
        ({"region_file": [7]}, "`blob` of rank 1 must name a file for each region"),
        ({"region_offset": [-4096]}, "`blob` of rank 1 must name a file for each region"),
        ({"region_offset": [1 << 40]}, r"must be the file that it exported and hold \d+ bytes"),
        ({"files": [{"device": 1, "inode": 2, "path": "/nowhere"}]}, "its shared memory /nowhere cannot be opened"),
        ({"files": [{"device": 1, "inode": 2, "path": sys.executable}]}, "must be the file that it exported"),
        ({"files": [{"device": 1}]}, "`blob` of rank 1 lacks 'descriptor'"),
        ({"pid": None}, "`blob` of rank 1 lacks"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_blobs_that_name_what_is_not_there_are_refused(change: dict[str, Any], message: str) -> None:
    """Another host, a process number that was used again, files that are others or too short."""
    tensor = kits.shared_tensor(100)
    with reader_of(Region(tensor.data_ptr(), 100, "cpu")) as (transport, record):
        record["extra"].update(change)
        with pytest.raises(TransportError, match=message):
            transport.connect(1, json.dumps(record).encode())


@pytest.mark.parametrize("length", [0, 100])
def test_a_pipe_or_device_in_a_blob_is_refused_and_waited_for_by_nobody(tmp_path: Path, length: int) -> None:
    """To open a pipe that nobody writes to waits for ever."""
    os.mkfifo(tmp_path / "pipe")
    tensor = kits.shared_tensor(100)
    with reader_of(Region(tensor.data_ptr(), length, "cpu")) as (transport, record):
        for path in (str(tmp_path / "pipe"), "/dev/zero"):
            found = os.stat(path)
            record["extra"]["files"] = [{"device": found.st_dev, "inode": found.st_ino, "path": path}]
            record["extra"].update(region_file=[0], region_offset=[0])
            with pytest.raises(TransportError, match=f"{path} must be the file that it exported"):
                transport.connect(1, json.dumps(record).encode())


def test_memory_that_cannot_be_read_at_all_is_refused_when_the_peer_is_connected() -> None:
    with (
        kits.unreachable(1 << 20) as address,
        reader_of(Region(address, 1 << 20, "cpu")) as (transport, record),
        pytest.raises(TransportError, match=rf"rank 0: process {os.getpid()}: EFAULT; memory was unmapped"),
    ):
        transport.connect(0, json.dumps(record).encode())


def test_a_process_that_may_not_be_read_is_told_from_one_whose_memory_is_gone() -> None:
    assert why_failed(7, -errno.EPERM, 10).startswith("process 7 may not be read (EPERM); put its tensors into shared")
    assert why_failed(7, 3, 10) == "process 7: 3 of 10 bytes; memory was unmapped"


def test_regions_of_one_file_are_one_file() -> None:
    tensor = kits.shared_tensor(100)
    regions = [Region(tensor.data_ptr() + start, 50, "cpu") for start in (0, 50)]
    with reader_of(*regions) as (_, record):
        assert len(record["extra"]["files"]) == 1
        first, second = record["extra"]["region_offset"]
        assert (record["extra"]["region_file"], second - first) == ([0, 0], 50)


def test_a_file_that_took_the_name_of_an_unlinked_one_is_not_taken_for_it(tmp_path: Path) -> None:
    """The system says "(deleted)" behind the name, and such a file may be there."""
    path = tmp_path / "shared"
    path.write_bytes(b"\1" * 4096)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096) as mapped:
        path.unlink()
        path.with_name("shared (deleted)").write_bytes(b"\2" * 4096)
        view = np.frombuffer(mapped, dtype=np.uint8)
        with reader_of(Region(view.ctypes.data, 4096, "cpu")) as (_, record):
            (found,) = record["extra"]["files"]
            assert found["inode"] == os.fstat(file.fileno()).st_ino
            assert "descriptor" in found
        del view


def test_a_read_that_breaks_its_worker_fails_and_the_next_one_is_made() -> None:
    spans = Spans(*np.zeros((5, 0), dtype=np.int64))
    copies: list[Any] = [_Copy(rank, spans, cast(Any, None)) for rank in (0, 1)]
    jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for job in (*copies, None):
        jobs.put(job)
    _work(jobs)
    for rank, job in enumerate(copies):
        assert job.status.state is ReadState.FAILED
        assert job.status.reason.startswith(f"rank {rank}: AttributeError(")


def test_where_other_processes_cannot_be_read_it_says_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_copies, "IS_NATIVE", False)
    with pytest.raises(TransportError, match="SharedMemory needs Linux; use TorchDistributed over gloo"):
        SharedMemory()


def test_device_memory_is_refused() -> None:
    with pytest.raises(TransportError, match=r"`regions\[1\]\.device` \(='cuda:0'\) must be one of \['cpu'\]"):
        SharedMemory().export([Region(0, 0, "cpu"), Region(0, 10, "cuda:0")])


def test_threads_end_with_their_transports() -> None:
    def count() -> int:
        return sum(thread.name == "eplb-shared-memory" for thread in threading.enumerate())

    before = count()
    data = np.zeros(10, dtype=np.uint8)
    for _ in range(3):
        transport = SharedMemory()
        transport.connect(0, transport.export([Region(data.ctypes.data, 10, "cpu")]))
        end_of(transport, 0, (0, 0, 0, 5, 5))
        transport.close()
    assert count() == before
