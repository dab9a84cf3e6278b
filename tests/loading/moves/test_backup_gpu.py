"""Backups that are pinned for a GPU."""

from __future__ import annotations

import contextlib
import gc
import mmap
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from eplb_core import ExpertLayout, ExpertStore, HostBackup, Topology
from eplb_core.loading.agreement import LocalAgreement

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def saved(folder: str, device: str) -> ExpertStore:
    rows = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (4, 1 << 20), dtype=np.uint8)).to(device)
    store = ExpertStore({"w": rows, "scale": torch.rand(4, 5, device=device)})
    layout = ExpertLayout([[0, 1, 2, 3]], 4, topology=Topology(1))
    HostBackup.save(folder, [store], layout, rank=0, agreement=LocalAgreement.group(1)[0])
    return store


@pytest.mark.cuda
@needs_gpu
def test_a_pinned_backup_gives_an_expert_s_bytes_from_where_they_lie() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        store = saved(folder, "cuda")
        backup = HostBackup(folder, pin=True)
        assert all(tensor.is_pinned() for tensor in backup._pinned.values())
        for expert in range(4):
            rows = [torch.zeros(size, dtype=torch.uint8, device="cuda") for size in store.row_bytes.tolist()]
            backup.fetch(0, expert, rows)
            for name, row in zip(store.names, rows, strict=True):
                assert torch.equal(row, store.row(name, expert))
        with pytest.raises(KeyError, match="does not have expert 9"):
            backup.fetch(0, 9, [])


@pytest.mark.cuda
@needs_gpu
def test_memory_is_pinned_no_longer_than_its_backup_lives() -> None:
    """What is mapped at its address next would count as pinned, and the device would read the pages of before."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        saved(folder, "cuda")
        for _ in range(3):  # at the same address each time
            backup = HostBackup(folder, pin=True)
            start = backup._pinned["0.0.0"].data_ptr()
            del backup
            gc.collect()
        size = 8 << 20  # of the file, in round numbers: until the address is met again
        fresh = [torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).fill_(9) for _ in range(8)]
        assert not any(memory.is_pinned() for memory in fresh), hex(start)
        assert all(bool((memory.to("cuda") == 9).all()) for memory in fresh)


@pytest.mark.cuda
@needs_gpu
def test_a_file_that_is_not_in_memory_is_refused_or_pinned(tmp_path: Path) -> None:
    """Which of the two is the system's choice; the bytes are right or there is an error that says what to do."""
    store = saved(str(tmp_path), "cuda")
    backup = None
    with contextlib.suppress(OSError):
        backup = HostBackup(tmp_path, pin=True)
    if backup is None:
        with pytest.raises(OSError, match="a backup to pin must be in memory: /dev/shm"):
            HostBackup(tmp_path, pin=True)
        return
    rows = [torch.zeros(size, dtype=torch.uint8, device="cuda") for size in store.row_bytes.tolist()]
    backup.fetch(0, 2, rows)
    assert torch.equal(rows[0], store.row("w", 2))
    torch.zeros(1, device="cuda").item()  # no error is left behind


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_pinning_without_a_gpu_is_an_error(tmp_path: Path) -> None:
    saved(str(tmp_path), "cpu")
    with pytest.raises(OSError, match=r"cannot be pinned: .*no CUDA device; a backup to pin must be in memory"):
        HostBackup(tmp_path, pin=True)
