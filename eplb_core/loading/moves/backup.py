"""Experts in files: where they come from when the last rank that held one is gone."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import secrets
import shutil
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eplb_core._arrays import IntArray, check_flag, check_int, check_kind, read_only, to_list
from eplb_core._extras import needed
from eplb_core._text import quoted
from eplb_core.errors import EplbError, MigrationError
from eplb_core.files import reading
from eplb_core.files.reading import check_path
from eplb_core.layout import ExpertLayout
from eplb_core.loading.agreement import Agreement, check_agreement
from eplb_core.loading.install.staging import Staging
from eplb_core.loading.moves.joining import check_frame
from eplb_core.loading.moves.progress import Trouble
from eplb_core.loading.moves.pull import Puller
from eplb_core.loading.moves.steps import Step
from eplb_core.loading.pull_plan import PullKind
from eplb_core.loading.store import ExpertStore
from eplb_core.loading.transport import Transport

MANIFEST = "backup.json"
"""File that names the files of a backup and their sizes; written last."""
FORMAT = "eplb-backup-1"
_WANTED = f"a backup ({FORMAT})"
_MEND = "save the backup anew"

Rows = list[torch.Tensor]
"""An expert's bytes on the host, uint8, one per tensor of the store."""


class HostBackup:
    """Experts in safetensors files, as `HostBackup.save` writes them; for `Migrator(backup=)` and `move_experts`.

    An interrupted save leaves no backup, and a backup that a later save replaced gives no experts. A folder on a
    disk that all nodes see serves all nodes; one in memory (`/dev/shm`) serves its node and outlives the ranks'
    processes.

    Args:
        folder: Where the files are.
        pin: Map the files and pin them for the GPU, so that `fetch` copies by DMA from where they are; the ranks of a
            node share them. The folder must be in memory (`/dev/shm`) and the files writable.

    Raises:
        FileNotFoundError: No such folder, or no whole backup in it.
        FileFormatError: A file is missing, truncated or foreign.
        OSError: The files cannot be pinned.
        ModuleNotFoundError: safetensors is missing: `pip install 'eplb-core[files]'`.

    Cost:
        Reads the files' headers. `fetch` reads one expert, from the page cache or the disk.

    Threads:
        Any.
    """

    def __init__(self, folder: str | os.PathLike[str], *, pin: bool = False) -> None:
        self.folder = Path(check_path(folder, "folder"))
        check_flag(pin, "pin")
        self._file_of: dict[tuple[int, int], Path] = {}
        self._pinned: dict[str, torch.Tensor] = {}
        for path in _files_of(self.folder):
            with reading.reading(path, _WANTED, _MEND), _open(path) as file:
                for name in file.keys():  # noqa: SIM118  no mapping
                    self._add(name, path, file.get_slice(name).get_dtype())
            if pin:
                self._pinned.update(_pinned_tensors(path, self))

    def _add(self, name: str, path: Path, dtype: str) -> None:
        layer, expert, _ = (int(part) for part in name.split("."))
        if dtype != "U8":
            raise ValueError(f"tensor {name} of {dtype}, not bytes")
        if self._file_of.setdefault((layer, expert), path) != path:
            raise ValueError(f"expert {expert} of layer {layer}, which {self._file_of[layer, expert].name} has too")

    def __contains__(self, key: tuple[int, int]) -> bool:
        """Whether the expert of (layer, expert) is here."""
        return key in self._file_of

    def fetch(self, layer: int, expert: int, rows: Sequence[torch.Tensor]) -> None:
        """Fill `rows`, uint8, one per tensor of the store, with an expert's bytes.

        Raises:
            KeyError: It is not here.
            ValueError: It has other tensors or sizes.
            FileFormatError: The file is gone or damaged since it was opened.
        """
        check_int(layer, "layer", 0)
        check_int(expert, "expert", 0)
        for row in to_list(rows, "rows"):
            check_kind(row, "rows", torch.Tensor)
        path = self._file_of.get((layer, expert))
        if path is None:
            raise KeyError(f"`expert`: {self.folder} does not have expert {expert} of layer {layer}")
        source: Any = contextlib.nullcontext() if self._pinned else _open(path)
        with source as file:
            tensor_of = self._pinned.__getitem__ if self._pinned else file.get_tensor
            for index, row in enumerate(rows):
                with reading.reading(path, f"tensor {index} of expert {expert} of layer {layer}", _MEND):
                    found = tensor_of(f"{layer}.{expert}.{index}")
                if found.numel() != row.numel():
                    raise ValueError(
                        f"tensor {index} of expert {expert} of layer {layer} has {found.numel()} bytes in {path} and "
                        f"{row.numel()} in the store (`rows`); save the backup anew"
                    )
                row.copy_(found)

    @classmethod
    def save(
        cls,
        folder: str | os.PathLike[str],
        stores: Sequence[ExpertStore],
        layout: ExpertLayout,
        *,
        rank: int,
        agreement: Agreement,
        transport: Transport | None = None,
        deadline: float = 60.0,
    ) -> HostBackup:
        """Write all experts, each once, and open what was written; every rank calls it, between passes.

        Args:
            folder: Made if need be. Without `transport` one that all ranks see: each expert is written by the rank of
                its first slot. With `transport` one for each node: the ranks of each node write all E experts of a
                layer between them, and read from other ranks what they do not hold.
            stores: One per layer, of this rank, after post-processing.
            layout: What they hold.
            rank: This rank.
            agreement: Of all ranks, or of those that live.
            transport: How to read other ranks' memory.
            deadline: Seconds for the reads of a few experts.

        Raises:
            MigrationError: A read failed, another rank could not write, or no rank of the agreement holds an expert;
                then there is no backup.
            OSError: The files cannot be written.

        An earlier backup in the folder goes first: two may not fit.
        """
        stores = check_frame(stores, layout, rank)
        path = Path(reading.check_path(folder, "folder"))
        check_agreement(agreement)
        hand = _Hand(path, rank, agreement)
        with hand.together("begin"):
            path.mkdir(parents=True, exist_ok=True)
        members = mates = hand.members
        if transport is not None:
            nodes = layout.topology.rank_to_node
            mates = [other for other in members if nodes[other] == nodes[rank]]
        first = hand.clear(mates)
        with hand.together("write its experts"):
            puller = None
            if transport is not None:
                staging = Staging(None, stores)
                puller = Puller(stores, layout, rank, transport, agreement, staging)
            for layer in range(layout.num_layers):
                tensors: dict[str, torch.Tensor] = {}
                share = _share(layout, layer, rank, members, None if puller is None else mates)
                for expert, rows in _experts(stores[layer], layout, layer, rank, share, puller, deadline):
                    tensors.update({f"{layer}.{expert}.{index}": row for index, row in enumerate(rows)})
                if tensors:
                    hand.write(tensors, layer)
        with hand.together("write the manifest"):
            if first:
                hand.commit(mates)
        return cls(path)


class _Hand:
    """One rank's part in a save: every step ends well on all ranks, or with an error on all of them."""

    def __init__(self, folder: Path, rank: int, agreement: Agreement) -> None:
        self._folder, self._rank, self._agreement = folder, rank, agreement
        self._sizes: dict[str, int] = {}
        self._words: list[dict[str, Any]] = []
        self._life = secrets.token_hex(4)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """A step; afterwards all ranks say how it went, so that none waits for one that failed."""
        try:
            yield
        except Exception as error:
            with contextlib.suppress(EplbError):
                self._gather(f"{type(error).__name__}: {error}")
            raise
        self._gather("")
        for words in self._words:
            if words["why"]:
                text = f"no backup: rank {words['rank']} could not {what}: {words['why']}"
                raise MigrationError(text, reason="backup", rank=words["rank"])

    def _gather(self, why: str) -> None:
        words = {"rank": self._rank, "why": why, "life": self._life, "files": self._sizes}
        self._words = [json.loads(blob) for blob in self._agreement.gather(json.dumps(words).encode())]

    @property
    def members(self) -> list[int]:
        """Ranks that take part, once they have spoken."""
        return [int(words["rank"]) for words in self._words]

    def clear(self, mates: Sequence[int]) -> bool:
        """Remove what is in the folder, on the first of the ranks that share it; whether this is that one."""
        # One save's files have one name on all ranks and no other save's, so nothing that is written now is removed.
        self._life = self._words[0]["life"]
        first = self._rank == min(mates)
        if first:
            (self._folder / MANIFEST).unlink(missing_ok=True)  # before any of its files
            reading.remove_unfinished(self._folder / MANIFEST)
            for file in self._folder.glob("experts-*"):
                if f"-{self._life}-" not in file.name:
                    _remove(file)
        return first

    def write(self, tensors: dict[str, torch.Tensor], layer: int) -> None:
        """A file of a layer's experts."""
        path = self._folder / f"experts-{self._life}-{layer:05}-{self._rank:05}.safetensors"
        self._sizes[path.name] = _save(tensors, path)

    def commit(self, mates: Sequence[int]) -> None:
        """From now on it is a backup."""
        sizes: dict[str, int] = {}
        for words in self._words:
            if words["rank"] in mates:
                sizes |= words["files"]
        reading.write_atomic(self._folder / MANIFEST, json.dumps({"format": FORMAT, "files": sizes}).encode())


def _share(
    layout: ExpertLayout, layer: int, rank: int, members: Sequence[int], mates: Sequence[int] | None
) -> list[int]:
    """Experts that this rank writes: each where it is first, or all of them among `mates`."""
    is_there = np.isin(np.arange(layout.num_slots) // layout.slots_per_rank, members)
    row = np.where(is_there, layout.physical_to_logical_map[layer], -1)
    experts, first = np.unique(row, return_index=True)
    lost = np.setdiff1d(np.arange(layout.num_experts), experts)
    if len(lost):
        raise MigrationError(
            f"no rank of the agreement holds expert {lost[0]} of layer {layer}; save before ranks go",
            layout=layout,
            reason="backup",
        )
    if mates is not None:
        return list(range(sorted(mates).index(rank), layout.num_experts, len(mates)))
    mine = (experts >= 0) & (first // layout.slots_per_rank == rank)
    return [int(expert) for expert in experts[mine]]


def _experts(
    store: ExpertStore,
    layout: ExpertLayout,
    layer: int,
    rank: int,
    share: Sequence[int],
    puller: Puller | None,
    deadline: float,
) -> Iterator[tuple[int, Rows]]:
    """Each expert's bytes: from an own slot, or read into staging, a few at a time."""
    far: list[int] = []
    for expert in share:
        held = layout.slots(layer, expert)
        own = [slot % layout.slots_per_rank for slot in held if slot // layout.slots_per_rank == rank]
        if own:
            yield expert, [store.row(name, own[0]).cpu() for name in store.names]
        else:
            far.append(expert)
    while far and puller is not None:
        some, far = far[: puller.staging.capacity], far[puller.staging.capacity :]
        slots = [
            [s for s in layout.slots(layer, expert) if s // layout.slots_per_rank not in puller.avoid_ranks]
            for expert in some
        ]
        source = np.array([held[rank % len(held)] for held in slots])  # ranks start at different holders
        for expert, staged in zip(some, _read(puller, layout, layer, source, deadline).tolist(), strict=True):
            yield expert, [row.cpu().clone() for row in puller.staging.row(staged, store)]


def _read(puller: Puller, layout: ExpertLayout, layer: int, source: IntArray, deadline: float) -> IntArray:
    """Read slots into staging; the staging row of each."""
    slots = np.pad(source, (0, layout.slots_per_rank - len(source)), constant_values=-1)
    kind = np.where(slots >= 0, PullKind.READ, PullKind.EMPTY).astype(np.int8)
    try:
        step = Step(layer, layout, layout, read_only(kind), read_only(slots), True)
        pull = puller.begin(step, deadline)
        puller.wait(pull, layer, deadline)
    except Trouble as why:
        raise MigrationError(f"no backup: {why.reason}", layout=layout, reason=why.cause, rank=puller.rank) from why
    puller.release(pull)
    return pull.row_of_slot[: len(source)]


def _files_of(folder: Path) -> list[Path]:
    """The files that the manifest names, each as long as it says."""
    manifest = folder / MANIFEST
    if not manifest.exists():
        raise FileNotFoundError(
            f"{folder} must hold a whole backup, with {MANIFEST}; `HostBackup.save` writes that last, so a save that "
            "was cut off is to be done again"
        )
    found = reading.read_json(manifest)
    with reading.reading(manifest, _WANTED, _MEND):
        kind = found.get("format") if isinstance(found, dict) else None
        if kind != FORMAT:
            raise ValueError(f"another kind of file (format {quoted(kind, 40)})")
        for name, size in found["files"].items():
            if Path(name).name != name or not name.startswith("experts-"):
                raise ValueError(f"a file {name!r}, which no backup has")
            path = folder / name
            there = path.stat().st_size if path.is_file() else "no file"
            if there != size:
                raise reading.bad_file(path, f"{size} bytes", str(there), _MEND)
        return [folder / name for name in sorted(found["files"])]


def _open(path: Path) -> Any:
    safetensors = _safetensors()
    try:
        reading.open_regular(path, sys.maxsize).close()  # a pipe would be waited for
    except FileNotFoundError as error:
        raise reading.bad_file(
            path, "the backup that was opened", "no file: it was saved over", "open it anew"
        ) from error
    with reading.reading(path, _WANTED, _MEND):
        return safetensors.safe_open(path, framework="pt")


def _safetensors() -> Any:
    needed("safetensors.torch", "files", "HostBackup")
    return needed("safetensors", "files", "HostBackup")


def _pinned_tensors(path: Path, owner: object) -> dict[str, torch.Tensor]:
    """The file's tensors where they lie, pinned for the GPU for the life of `owner`."""
    with path.open("r+b") as file:
        memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
    head = int.from_bytes(bytes(memory[:8].tolist()), "little")
    places = json.loads(bytes(memory[8 : 8 + head].tolist()))
    from eplb_core.loading.cuda import runtime

    try:
        place, size = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.numel())
        runtime.runtime().call("cudaHostRegister", place, size, 0)
    except (ImportError, runtime.CudaError) as error:
        raise OSError(f"{path} cannot be pinned: {error}; a backup to pin must be in memory: /dev/shm") from error
    weakref.finalize(owner, _unpin, memory).atexit = False
    return {
        name: memory[8 + head :][slice(*place["data_offsets"])]
        for name, place in places.items()
        if name != "__metadata__"
    }


def _unpin(memory: torch.Tensor) -> None:  # pragma: no cover  needs a GPU
    """Before it is unmapped, or what is mapped at its address next counts as pinned, with the pages of before."""
    from eplb_core.loading.cuda import runtime

    with contextlib.suppress(runtime.CudaError), runtime.runtime().on(torch.cuda.current_device()):
        runtime.runtime().call("cudaHostUnregister", ctypes.c_void_p(memory.data_ptr()))


def _save(tensors: dict[str, torch.Tensor], path: Path) -> int:
    """Write a file and wait for the disk; its size."""
    safetensors = _safetensors()
    apart = path.with_suffix(
        ".new"
    )  # safetensors writes beside the file, under any name: what a kill leaves is in here
    try:
        apart.mkdir()
        safetensors.torch.save_file(tensors, apart / path.name)
        with (apart / path.name).open("rb") as file:
            os.fsync(file.fileno())
            size = os.fstat(file.fileno()).st_size
        os.replace(apart / path.name, path)
        apart.rmdir()
        return size
    except (safetensors.SafetensorError, OSError) as error:  # a full disk is one of safetensors' own
        _remove(apart)
        path.unlink(missing_ok=True)
        raise OSError(f"{path} cannot be written: {error}; the backup is not complete") from error


def _remove(path: Path) -> None:
    """A file, or a folder with what a save that was killed left in it."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
