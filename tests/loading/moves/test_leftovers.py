"""What is left in memory files after a crash, and what a full /dev/shm does to those who serve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch

from eplb_core import WeightHost
from eplb_core.loading.moves.backup import MANIFEST, HostBackup
from tests.loading.engine_process import end, spawn
from tests.loading.record.keeper_process import LAYOUT, keeper
from tests.loading.worlds import OLD, World

SHM = Path("/dev/shm")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SHM.is_dir(), reason="needs /dev/shm"),
]


def left_by(pid: int) -> list[str]:
    """Memory files whose name has this process's number, as those of torch have."""
    return [name for name in os.listdir(SHM) if str(pid) in name.split("_")]


def killed_while(what: str, folder: str, seconds: float) -> int:
    """Kill a process at some time of its work; its number."""
    process = spawn(sys.executable, "-m", "tests.loading.moves.leaving_process", what, folder)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        threading.Event().wait(seconds)
    finally:
        end(process)
    return process.pid


def test_a_rank_that_is_killed_in_a_move_leaves_no_memory_file() -> None:
    assert left_by(killed_while("moves", "-", 0.01)) == []


def test_a_weight_host_that_is_killed_leaves_no_memory_file_and_the_next_one_removes_its_socket(tmp_path: Path) -> None:
    path, file = tmp_path / "host", tmp_path / "record"
    with keeper(path, file, "--host") as process:
        pass
    assert left_by(process.pid) == []
    with WeightHost(path, lambda layout, rank: {"w": torch.ones(2)}, config={}, layout=LAYOUT, rank=1, state_file=file):
        assert left_by(os.getpid()) == []
    assert {each.name for each in tmp_path.iterdir()} <= {"host.lock", "record", "record.lock"}


def test_what_a_killed_save_left_goes_with_the_next_save() -> None:
    pytest.importorskip("safetensors", reason="backups are safetensors files")
    with tempfile.TemporaryDirectory(dir=SHM) as folder:
        for number in range(4):
            assert left_by(killed_while("backup", folder, 0.003 * number)) == []
        Path(folder, f".{MANIFEST}.0123abcd.tmp").write_text("{")  # where it was killed as it wrote the manifest
        apart = Path(folder, "experts-0123abcd-00000-00000.new")  # or as safetensors wrote
        apart.mkdir()
        (apart / ".tmp0fodyq").write_bytes(b"cut")
        Path(folder, "mine").write_text("not of a backup")
        world = World(OLD)

        def save(rank: int) -> HostBackup:
            return HostBackup.save(folder, world.stores[rank], OLD, rank=rank, agreement=world.agreements[rank])

        assert all(isinstance(each, HostBackup) for each in world.each(save))
        named = json.loads(Path(folder, MANIFEST).read_text())["files"]
        assert sorted(os.listdir(folder)) == sorted([MANIFEST, "mine", *named])


def test_moves_go_on_while_dev_shm_is_full_and_a_backup_in_it_is_refused() -> None:
    pytest.importorskip("safetensors", reason="backups are safetensors files")
    alone = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=2m none /dev/shm && exec "$@"', "sh"]
    try:
        if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
            pytest.skip("a /dev/shm of a process's own is not permitted here")
    except FileNotFoundError:
        pytest.skip("needs unshare")
    process = spawn(*alone, sys.executable, "-m", "tests.loading.moves.full_memory_process")
    try:
        said, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    answer = json.loads(said)
    assert answer == {
        "free": 0,
        "moved": [True] * 3,
        "saved": ["OSError"] * 2,
        "left": [],
        "hosted": True,
        "saved later": ["HostBackup"] * 2,
        "left later": answer["left later"],
    }
    assert answer["left later"] > 1
