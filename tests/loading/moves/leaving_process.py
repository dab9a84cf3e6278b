"""A process that keeps something in memory files until it is killed.

    leaving_process.py backup FOLDER    saves backups into a folder, one after the other
    leaving_process.py moves -          moves shared tensors between two ranks, over the SharedMemory transport

Prints "ready" after the first.
"""

from __future__ import annotations

import itertools
import sys

from eplb_core import ExpertLayout, ExpertStore
from eplb_core.loading.moves.backup import HostBackup
from eplb_core.loading.transports import SharedMemory
from tests.loading.worlds import NEW, OLD, World


class SharedWorld(World):
    """Its tensors are in files of /dev/shm."""

    def meet(self) -> None:
        super().meet()
        self.stores = {rank: [shared(store) for store in stores] for rank, stores in self.stores.items()}


def shared(store: ExpertStore) -> ExpertStore:
    """The same bytes in shared memory, by name and slot."""
    return ExpertStore(
        {
            name: [store.row(name, slot).clone().share_memory_() for slot in range(store.num_slots)]  # type: ignore[no-untyped-call]
            for name in store.names
        }
    )


def main(what: str, folder: str) -> None:
    world = SharedWorld(OLD, SharedMemory)

    def save(rank: int) -> HostBackup:
        about = {"rank": rank, "agreement": world.agreements[rank]}
        return HostBackup.save(folder, world.stores[rank], world.layout, **about)

    for number in itertools.count():
        goal: ExpertLayout = (NEW, OLD)[number % 2]
        done = world.each(save) if what == "backup" else world.move_all(goal)
        if any(isinstance(each, BaseException) for each in done):
            raise SystemExit(str(done))
        world.layout = world.layout if what == "backup" else goal
        if number == 0:
            print("ready", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
