"""Experts in files: every one of them is there, whoever wrote it, and comes back byte for byte."""

from __future__ import annotations

import gc
import json
import os
import re
import resource
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eplb_core import ExpertLayout, Topology
from eplb_core.errors import FileFormatError, MigrationError
from eplb_core.loading.install.staging import Staging
from eplb_core.loading.moves import backup as backup_module
from eplb_core.loading.moves.backup import MANIFEST, HostBackup, _save
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


def check(backup: HostBackup, layer: int, expert: int) -> None:
    """It has an expert, and its bytes."""
    assert (layer, expert) in backup
    backup.fetch(layer, expert, rows := [torch.zeros(size, dtype=torch.uint8) for size in SIZES.values()])
    assert all(torch.equal(row, label(layer, expert, name)) for name, row in zip(SIZES, rows, strict=True))


def check_all(backup: HostBackup) -> None:
    for layer, expert in np.ndindex(LAYOUT.num_layers, LAYOUT.num_experts):
        check(backup, layer, expert)


def test_a_folder_that_all_ranks_see_holds_each_expert_once(tmp_path: Path) -> None:
    backups = save(World(LAYOUT), lambda rank: tmp_path, far=False)
    check_all(backups[3])
    sizes = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert sizes < 2 * LAYOUT.num_experts * sum(SIZES.values()) + 16000  # headers


def test_a_folder_a_node_holds_every_expert_of_all_nodes(tmp_path: Path) -> None:
    backups = save(World(LAYOUT), lambda rank: tmp_path / f"node{rank // 2}", far=True)
    for backup in backups:
        check_all(backup)
    check_all(HostBackup(tmp_path / "node1"))


def test_a_dead_rank_s_experts_come_from_the_files(tmp_path: Path) -> None:
    """R42, H1."""
    topology = Topology(3)
    old = ExpertLayout([[0, 1, 2, 3, 0, 1]], 4, topology=topology)
    new = ExpertLayout([[2, 1, -1, -1, 0, 3]], 4, topology=topology)
    save(World(old), lambda rank: tmp_path, far=False)
    world = World(old, ranks=[0, 2])
    assert world.move_all(new, backup=HostBackup(tmp_path)) == [new, new]
    world.check(new)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"must hold a whole backup, with backup.json"):
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


@pytest.mark.parametrize("far", [False, True])
def test_ranks_that_live_save_every_expert_without_those_that_are_gone(tmp_path: Path, far: bool) -> None:
    layout = ExpertLayout([[0, 1, 2, 3, 2, 3, 1, 0]], 4, topology=Topology(rank_to_node=[0, 0, 1, 1]))
    world = World(layout, ranks=[0, 1, 3])  # rank 2 was the first of its node, and holds experts still
    backups = save(world, lambda rank: tmp_path / str(rank // 2 if far else 0), far=far)
    for backup in backups:
        assert all((0, expert) in backup for expert in range(4))
        check(backup, 0, 2)
    for some in ([0, 2], [2, 3]):
        saved = save(World(layout, ranks=some), lambda rank, some=some: tmp_path / f"x{some}", far=far)
        assert [type(each) for each in saved] == [HostBackup] * 2
    for error in save(World(layout, ranks=[1, 2]), lambda rank: tmp_path / "z", far=far):
        assert str(error) == "no rank of the agreement holds expert 0 of layer 0; save before ranks go"
        assert isinstance(error, MigrationError)


class Odd(DeferredCopy):
    """Raises what is no TransportError when it is asked of one rank's reads; the others' bytes are still to come."""

    def poll(self, ticket: Any) -> Any:
        if ticket.rank == 1:
            raise RuntimeError("no such handle")
        return super().poll(ticket)


def test_staging_outlives_a_save_whose_transport_raised_while_a_read_may_still_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 7."""
    held: dict[int, Any] = {}

    class Seen(Staging):
        def __init__(self, memory: Any, stores: Any) -> None:
            super().__init__(memory, stores)
            held[stores[0].addresses[0, 0]] = weakref.ref(self)

    monkeypatch.setattr(backup_module, "Staging", Seen)
    world = World(ExpertLayout([[0, 1, 2, 3, 4, 5]], 6, topology=Topology(3)))
    odd = world.transports[0] = Odd()
    results = save(world, lambda rank: tmp_path, far=True)
    assert isinstance(results[0], RuntimeError)
    assert all("rank 0 could not write its experts: RuntimeError: no such" in str(error) for error in results[1:])
    del results
    gc.collect()
    assert odd.waiting == 1
    assert held[world.stores[0][0].addresses[0, 0]]() is not None
    odd.complete()


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path)
    manifest = {"format": "eplb-backup-1", "files": {path.name: path.stat().st_size}}
    path.with_name(MANIFEST).write_text(json.dumps(manifest))


def test_files_of_an_earlier_save_by_more_ranks_give_nothing(tmp_path: Path) -> None:
    wide = ExpertLayout([[0, 1, 2, 3]], 4, topology=Topology(4))
    narrow = ExpertLayout([[3, 2, 1, 0]], 4, topology=Topology(1))
    world = World(wide)
    for stores in world.stores.values():
        for store in stores:
            for name in store.names:
                store.row(name, 0).fill_(9)  # weights of before
    before = save(world, lambda rank: tmp_path, far=False)[0]
    after = save(World(narrow), lambda rank: tmp_path, far=False)[0]
    for expert in range(4):
        check(after, 0, expert)
        with pytest.raises(FileFormatError, match="it was saved over; open it anew"):
            before.fetch(0, expert, [])
    assert len(list(tmp_path.iterdir())) == 2


def test_a_save_that_fails_on_one_rank_fails_on_all_and_is_no_backup(tmp_path: Path) -> None:
    save(World(LAYOUT), lambda rank: tmp_path, far=False)
    (tmp_path / "file").touch()
    results = save(World(LAYOUT), lambda rank: tmp_path / "file" / "x" if rank == 2 else tmp_path, far=False)
    assert isinstance(results[2], OSError)
    for rank in (0, 1, 3):
        assert isinstance(results[rank], MigrationError)
        assert re.search("no backup: rank 2 could not begin: NotADirectoryError", str(results[rank]))
    HostBackup(tmp_path)  # nothing was begun, so the former one is still there


def test_a_save_that_was_cut_off_is_no_backup(tmp_path: Path) -> None:
    save(World(LAYOUT), lambda rank: tmp_path, far=False)
    (tmp_path / MANIFEST).unlink()
    with pytest.raises(FileNotFoundError, match="a save that was cut off is to be done again"):
        HostBackup(tmp_path)


@pytest.mark.parametrize("hurt", ["cut", "gone", "pipe"])
def test_a_file_that_is_not_whole_is_named(tmp_path: Path, hurt: str) -> None:
    """A pipe in a file's place is not waited for."""
    save(World(LAYOUT), lambda rank: tmp_path, far=False)
    victim = sorted(tmp_path.glob("*.safetensors"))[1]
    size = victim.stat().st_size
    victim.write_bytes(victim.read_bytes()[:-1])
    if hurt != "cut":
        victim.unlink()
    if hurt == "pipe":
        os.mkfifo(victim)
    found = f"{size - 1}" if hurt == "cut" else "no file"
    with pytest.raises(FileFormatError, match=f"{victim.name}: expected {size} bytes, found {found}; save the backup"):
        HostBackup(tmp_path)


@pytest.mark.parametrize(
    ("tensors", "found"),
    [
        ({"0.1.0": torch.zeros(3)}, "tensor 0.1.0 of F32, not bytes"),
        ({"model.weight": torch.zeros(3, dtype=torch.uint8)}, "not enough values|invalid literal"),
    ],
)
def test_a_foreign_file_is_refused(tmp_path: Path, tensors: dict[str, torch.Tensor], found: str) -> None:
    write(tmp_path / "experts-0.safetensors", tensors)
    with pytest.raises(FileFormatError, match=found):
        HostBackup(tmp_path)


@pytest.mark.parametrize("size", ["\x1b[2J", "A" * 5000, 10**30])
def test_a_size_in_a_manifest_that_is_none_is_refused_in_a_short_line(tmp_path: Path, size: object) -> None:
    (tmp_path / "experts-0.safetensors").write_bytes(b"x")
    files = {"experts-0.safetensors": size}
    (tmp_path / MANIFEST).write_text(json.dumps({"format": "eplb-backup-1", "files": files}))
    with pytest.raises(
        FileFormatError, match=r"experts-0.safetensors: expected .* found 1; save the backup anew"
    ) as caught:
        HostBackup(tmp_path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("text", ["[]", "{", '{"format": "eplb-backup-1", "files": {"../x": 1}}', '{"format": 1}'])
def test_a_foreign_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(FileFormatError, match=r"backup.json: expected .*, found"):
        HostBackup(tmp_path)


def test_an_expert_without_all_its_tensors_is_named(tmp_path: Path) -> None:
    write(tmp_path / "experts-0.safetensors", {"0.1.0": torch.zeros(3, dtype=torch.uint8)})
    with pytest.raises(FileFormatError, match="expected tensor 1 of expert 1 of layer 0, found"):
        HostBackup(tmp_path).fetch(0, 1, [torch.zeros(3, dtype=torch.uint8)] * 2)
