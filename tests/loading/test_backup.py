"""Experts in files: every one of them is there, whoever wrote it, and comes back byte for byte."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eplb_core import ExpertLayout, Topology
from eplb_core.errors import MigrationError
from eplb_core.loading.backup import HostBackup, _save
from eplb_core.loading.mover import move_experts
from eplb_core.loading.transports import DeferredCopy
from tests.loading.worlds import SIZES, World, label, random_layout

pytest.importorskip("safetensors", reason="backups are safetensors files")

LAYOUT = random_layout(np.random.default_rng(1), 2, 7, 12, Topology(rank_to_node=[0, 0, 1, 1]))


def save(world: World, folder_of: Any, *, far: bool, **options: Any) -> list[Any]:
    return world.each(
        lambda rank: HostBackup.save(
            folder_of(rank),
            world.stores[rank],
            world.layout,
            rank=rank,
            agreement=world.agreements[rank],
            transport=world.transports[rank] if far else None,
            **options,
        )
    )


def check(backup: HostBackup) -> None:
    for layer in range(LAYOUT.num_layers):
        for expert in range(LAYOUT.num_experts):
            assert (layer, expert) in backup
            rows = [torch.zeros(size, dtype=torch.uint8) for size in SIZES.values()]
            backup.fetch(layer, expert, rows)
            for name, row in zip(SIZES, rows, strict=True):
                assert torch.equal(row, label(layer, expert, name))


def test_a_folder_that_all_ranks_see_holds_each_expert_once(tmp_path: Path) -> None:
    backups = save(World(LAYOUT), lambda rank: tmp_path, far=False)
    check(backups[3])
    sizes = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert sizes < 2 * LAYOUT.num_experts * sum(SIZES.values()) + 16000  # headers


def test_a_folder_a_node_holds_every_expert_of_all_nodes(tmp_path: Path) -> None:
    backups = save(World(LAYOUT), lambda rank: tmp_path / f"node{rank // 2}", far=True)
    for backup in backups:
        check(backup)
    check(HostBackup(tmp_path / "node1"))


def test_a_dead_rank_s_experts_come_from_the_files(tmp_path: Path) -> None:
    """R42, H1."""
    topology = Topology(3)
    old = ExpertLayout([[0, 1, 2, 3, 0, 1]], 4, topology=topology)
    new = ExpertLayout([[2, 1, -1, -1, 0, 3]], 4, topology=topology)
    save(World(old), lambda rank: tmp_path, far=False)
    world = World(old, ranks=[0, 2])
    reached = world.each(
        lambda rank: move_experts(
            world.stores[rank],
            old,
            new,
            rank=rank,
            transport=world.transports[rank],
            agreement=world.agreements[rank],
            backup=HostBackup(tmp_path),
        )
    )
    assert reached == [new, new]
    world.check(new)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"must hold experts-\*.safetensors"):
        HostBackup(tmp_path)
    backup = save(World(LAYOUT), lambda rank: tmp_path, far=False)[0]
    with pytest.raises(KeyError, match="does not have expert 9 of layer 1"):
        backup.fetch(1, 9, [])
    with pytest.raises(ValueError, match=r"tensor 0 of expert 3 of layer 1 has 40 bytes in .* and 41 in the store"):
        backup.fetch(1, 3, [torch.zeros(41, dtype=torch.uint8)])


def test_a_full_disk_is_an_oserror_that_names_the_file_and_leaves_no_part(tmp_path: Path) -> None:
    """No file may grow past 100 bytes for a moment, so that the write fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match=r"experts-00000-00001.safetensors cannot be written: .*File too large"):
            _save({"0.1.0": torch.zeros(5000, dtype=torch.uint8)}, tmp_path / "experts-00000-00001.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_reads_that_do_not_end_are_given_up_on(tmp_path: Path) -> None:
    world = World(LAYOUT, DeferredCopy)
    results = save(world, lambda rank: tmp_path / str(rank), far=True, deadline=0.05)
    assert any(isinstance(error, MigrationError) and error.reason == "deadline" for error in results)
