"""One of two ranks that each run their own installation of the library; run by test_two_versions.py as a file.

    version_process.py RANK FOLDER

`PYTHONPATH` says which installation. Prints one JSON object: what each step came to, or why it did not.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import eplb_core as eplb
from eplb_core.loading.record.file import open_record, save_record
from eplb_core.loading.transports import SharedMemory

RANK, FOLDER = (int(sys.argv[1]), Path(sys.argv[2])) if __name__ == "__main__" else (0, Path())
RANKS = eplb.Topology(2)
OLD, NEW = (
    eplb.ExpertLayout([row], 4, topology=RANKS) for row in ([0, 1, 2, 3, 3, 0], [3, 0, 1, 2, 2, 1])
)  # fmt: skip
OTHER = 1 - RANK


def meet(name: str) -> None:
    """Wait for the other rank, whatever it came to."""
    (FOLDER / f"{name}{RANK}").touch()
    end = time.monotonic() + 60
    while not (FOLDER / f"{name}{OTHER}").exists():
        if time.monotonic() > end:
            raise SystemExit(f"rank {OTHER} did not come to {name}")
        time.sleep(0.002)


def agreement() -> Any:
    return eplb.GroupAgreement(dist.new_group(backend="gloo"), deadline=20.0)


def weights() -> torch.Tensor:
    """Of this rank's slots, under the old layout: row s holds its expert's number."""
    own = OLD.physical_to_logical_map[0, 3 * RANK :][:3]
    return torch.tensor(own).repeat(64, 1).T.contiguous()


def held(rows: torch.Tensor) -> list[int]:
    """The expert in each slot; -1: bytes of several."""
    return [int(row[0]) if bool((row == row[0]).all()) else -1 for row in rows]


def place() -> Any:
    load = np.random.default_rng(0).integers(1, 1000, (2, 4))
    digest = eplb.place(load, topology=RANKS, num_slots=6).layout.digest
    return len(set(agreement().gather(digest.encode())))


def move(rows: torch.Tensor) -> Any:
    stores = [eplb.ExpertStore({"w": rows})]
    tools: Any = {"transport": SharedMemory(), "agreement": agreement(), "staging": 4 * stores[0].slot_bytes}
    return eplb.move_experts(stores, OLD, NEW, rank=RANK, **tools) == NEW


def migrate(rows: torch.Tensor) -> Any:
    stores = [eplb.ExpertStore({"w": rows})]
    tools: Any = {"transport": SharedMemory(), "agreement": agreement(), "staging": 4 * stores[0].slot_bytes}
    migrator = eplb.Migrator(stores, OLD, rank=RANK, **tools)
    migrator.start(NEW)
    while not migrator.idle:
        migrator.poll()
    return migrator.layout == NEW


@contextmanager
def keeper(name: str, layout: Any, version: int) -> Iterator[str]:
    """Served here; the path of the other rank's."""
    with eplb.LayoutServer(FOLDER / f"{name}{RANK}.sock", eplb.LayoutRecord(layout, version=version)):
        meet(f"{name} begins")
        yield str(FOLDER / f"{name}{OTHER}.sock")
        meet(f"{name} ends")


def agree(path: str) -> Any:
    with eplb.LayoutClient(path, f"engine {RANK}") as client:
        return eplb.agree_on_layout(client, own=OLD, agreement=agreement())[1]


def commit(path: str) -> Any:
    with eplb.LayoutClient(path, f"engine {RANK}") as client:
        begun = client.begin([0], 0)
        done = client.commit([0], NEW.physical_to_logical_map)
        return begun.status, done.status, done.version, done.digest == NEW.digest, str(client.error)


def write_files() -> None:
    save_record(FOLDER / f"record{RANK}", eplb.LayoutRecord(NEW, version=5).state, memory="m")
    for kind in ("json", "npz"):
        eplb.save_layout(NEW, FOLDER / f"layout{RANK}.{kind}")
    meet("files")


def record_file() -> Any:
    state = open_record(FOLDER / f"record{OTHER}", OLD, memory="m").state
    return state.layout == NEW, state.version, state.dirty


def main() -> None:
    said: dict[str, Any] = {"version": eplb.__version__, "path": eplb.__file__}

    def step(name: str, call: Callable[..., Any], *arguments: Any) -> None:
        try:
            said[name] = call(*arguments)
        except (eplb.EplbError, ValueError) as error:
            said[name] = f"{type(error).__name__}: {error}"
        meet(name)

    torch.set_num_threads(1)
    store = f"file://{FOLDER}/store"
    dist.init_process_group("gloo", init_method=store, rank=RANK, world_size=2, timeout=timedelta(seconds=60))
    step("place", place)
    for name, how in (("move", move), ("migrate", migrate)):
        rows = weights()
        step(name, how, rows)
        said[f"{name} left"] = held(rows)
    with keeper("agree", NEW, 3) as path:
        step("agree", agree, path)
    with keeper("commit", OLD, 0) as path:
        step("commit", commit, path)
    write_files()
    step("record", record_file)
    for kind in ("json", "npz"):
        step(kind, lambda: eplb.load_layout(FOLDER / f"layout{OTHER}.{kind}") == NEW)  # noqa: B023
    print(json.dumps(said), flush=True)
    os._exit(0)  # what is left of a group may wait for its peers


if __name__ == "__main__":
    main()
