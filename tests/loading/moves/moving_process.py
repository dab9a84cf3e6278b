"""One rank in a process of its own: gloo agrees, SharedMemory reads. Run by test_moving_processes.py.

    moving_process.py SCENARIO RANK SIZE FOLDER [OPTION]

Prints one JSON line at the end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from eplb_core import DispatchTables, ExpertLayout, Topology
from eplb_core.errors import EplbError, MigrationError
from eplb_core.loading.agreement import GroupAgreement
from eplb_core.loading.moves.migrator import Migrator
from eplb_core.loading.transports import SharedMemory
from tests.loading.fleets import Shelf
from tests.loading.worlds import random_layout, stores_of, wrong_slots

LAYERS, EXPERTS, PER_RANK = 3, 8, 4
VICTIM = 2


class Rank:
    """One rank: its weights, its Migrator and its passes."""

    def __init__(self, rank: int, size: int, folder: Path, deadline: float) -> None:
        torch.set_num_threads(1)
        self.rank, self.size, self.folder, self.deadline = rank, size, folder, deadline
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=60)
        )
        self.agreement = GroupAgreement(dist.new_group(backend="gloo"), deadline=deadline)
        self.rng = np.random.default_rng(5)
        self.topology = Topology(size)
        layout = self.random_layout()
        self.stores = stores_of(layout, rank)
        self.tables = DispatchTables(layout, rank=rank)
        self.migrator = Migrator(
            self.stores,
            layout,
            rank=rank,
            transport=SharedMemory(),
            agreement=self.agreement,
            tables=self.tables,
            staging=2 * self.stores[0].slot_bytes,
            backup=Shelf(),
            deadline=30.0,
        )
        self.passes = self.installed = 0

    def random_layout(self) -> ExpertLayout:
        return random_layout(self.rng, LAYERS, EXPERTS, PER_RANK * self.size, self.topology)

    def one_pass(self) -> tuple[int, ...]:
        rows = self.migrator.poll()
        self.passes += 1
        self.installed += len(rows)
        self.look()
        threading.Event().wait(0.0005)
        return rows

    def look(self) -> None:
        layout = self.migrator.layout
        if self.tables.layout != layout or wrong_slots(self.stores, layout, self.rank):
            wrong = wrong_slots(self.stores, layout, self.rank)
            raise SystemExit(f"rank {self.rank}: {wrong} after {self.passes} passes")

    def until_idle(self) -> None:
        end = time.monotonic() + 60
        while not self.migrator.idle:
            if time.monotonic() > end:
                raise SystemExit(f"rank {self.rank} hangs: {self.migrator.status}")
            self.one_pass()

    def without(self, gone: int) -> None:
        """Go on without a rank: rejoin, and move to a layout in which it has nothing."""
        live = [rank for rank in range(self.size) if rank != gone]
        torch_names: Any = dist
        store = torch_names.FileStore(f"{self.folder}/live", len(live))
        group = torch_names.ProcessGroupGloo(store, live.index(self.rank), len(live), timedelta(seconds=60))
        self.migrator.rejoin(GroupAgreement(group, deadline=30.0))
        self.look()
        row = np.full((LAYERS, self.size, PER_RANK), -1)
        row[:, live] = np.resize(np.arange(EXPERTS), (len(live), PER_RANK))
        target = ExpertLayout(row.reshape(LAYERS, -1), EXPERTS, topology=self.topology)
        self.migrator.start(target)
        self.until_idle()
        assert self.migrator.layout == target, self.migrator.status


def randomly(me: Rank, count: int) -> dict[str, Any]:
    """Many migrations, one after the other; now and then a pause."""
    for migration in range(count):
        me.migrator.start(me.random_layout())
        if migration % 7 == 3:
            for _ in range(migration % 11):
                me.one_pass()
            me.migrator.pause()
            me.look()
            me.migrator.resume()
        me.until_idle()
    return {"layout": me.migrator.layout.digest, "installed": me.installed, "cause": me.migrator.status.cause}


def with_a_victim(me: Rank, after: int, how: signal.Signals) -> dict[str, Any]:
    """One rank is killed or stopped after some passes of a migration."""
    me.migrator.start(me.random_layout())
    Path(me.folder, f"pid{me.rank}").write_text(str(os.getpid()))
    doubt = False
    while me.migrator.status.phase != "lost":
        if me.rank == VICTIM and me.passes == after:
            os.kill(os.getpid(), how)
            after = -1  # it was continued
        try:
            me.one_pass()
        except MigrationError:
            doubt = True
        if me.migrator.idle:
            me.migrator.start(me.random_layout())
    reason = me.migrator.status.reason
    if me.rank == VICTIM:
        return {"reason": reason}
    me.without(VICTIM)
    if how == signal.SIGSTOP and me.rank == 0:
        os.kill(int(Path(me.folder, f"pid{VICTIM}").read_text()), signal.SIGCONT)
        time.sleep(0.2)
        me.look()
    return {"layout": me.migrator.layout.digest, "reason": reason, "doubt": doubt}


def main() -> None:
    scenario, rank, size, folder, option = sys.argv[1:]
    me = Rank(int(rank), int(size), Path(folder), 30.0 if scenario == "randomly" else 2.0)
    if scenario == "randomly":
        answer = randomly(me, int(option))
    else:
        answer = with_a_victim(me, int(option), signal.SIGKILL if scenario == "killed" else signal.SIGSTOP)
    try:
        answer["stopped"] = me.migrator.stop(10.0)
    except EplbError as error:
        answer["stopped"] = str(error)
    print(json.dumps(answer), flush=True)
    os._exit(0)  # what is left of a broken group may wait for its peers


if __name__ == "__main__":
    main()
