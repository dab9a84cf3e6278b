"""Moves and backups of shared tensors while /dev/shm is full; run where it is small and this process's own.

Prints what happened as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path

import torch

from eplb_core.loading.modules import NamedTensor
from eplb_core.loading.moves.backup import HostBackup
from eplb_core.loading.sharing import memory
from eplb_core.loading.transports import SharedMemory
from tests.loading.moves.leaving_process import SharedWorld
from tests.loading.worlds import NEW, OLD


def fill(path: Path) -> None:
    """Take what is left, byte by byte at the end."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


def main() -> None:
    world = SharedWorld(OLD, SharedMemory)
    folder = tempfile.mkdtemp(dir="/dev/shm")
    fill(Path("/dev/shm/filler"))
    answer = {"free": os.statvfs("/dev/shm").f_bavail, "moved": []}
    for goal in (NEW, OLD, NEW):
        reached = world.move_all(goal)
        world.layout = goal
        if any(isinstance(each, BaseException) for each in reached):
            raise SystemExit(str(reached))
        world.check(goal)
        answer["moved"].append(reached == [goal, goal])  # type: ignore[attr-defined]

    def save(rank: int) -> HostBackup:
        about = {"rank": rank, "agreement": world.agreements[rank]}
        return HostBackup.save(folder, world.stores[rank], world.layout, **about)

    answer["saved"] = [type(each).__name__ for each in world.each(save)]
    answer["left"] = sorted(os.listdir(folder))
    host = memory.SharedMemory([NamedTensor("w", "tensor", torch.arange(1 << 16))])
    mapped = memory.map_tensors(host.description, host.fds)["w"].tensor
    answer["hosted"] = torch.equal(mapped, torch.arange(1 << 16))
    os.unlink("/dev/shm/filler")
    answer["saved later"] = [type(each).__name__ for each in world.each(save)]
    answer["left later"] = len(os.listdir(folder))
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
