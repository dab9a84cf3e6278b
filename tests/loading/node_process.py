"""One node of an engine: a keeper of its rank's record and the engine's start-up, in a network of its own.

    node_process.py RANK FOLDER ADDRESS

Waits for a line before it uses the network. Starts up once for each pair of versions in RUNS, on records that are at
those versions on rank 0 and rank 1, and prints what it adopted or why not.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from typing import Any

from eplb_core import (
    EplbError,
    ExpertLayout,
    GroupAgreement,
    LayoutClient,
    LayoutRecord,
    LayoutServer,
    Topology,
    agree_on_layout,
)

TOPOLOGY = Topology(num_ranks=2, num_nodes=2)
OWN = ExpertLayout([[0, 1, 1, 0]], 2, topology=TOPOLOGY)
MOVED = ExpertLayout([[1, 0, 0, 1]], 2, topology=TOPOLOGY)
RUNS = [(7, 7), (7, 8)]


def main(rank: int, folder: str, address: str) -> None:
    """All runs over one group."""
    import torch.distributed

    print("started", flush=True)
    sys.stdin.readline()
    wait = timedelta(seconds=60)
    dist: Any = torch.distributed
    store = dist.TCPStore(address, 29555, 2, rank == 0, timeout=wait)
    group = dist.ProcessGroupGloo(store, rank, 2, wait)
    agreement = GroupAgreement(group, 30.0, store=store)
    for versions in RUNS:
        path = f"{folder}/node{rank}"
        with LayoutServer(path, LayoutRecord(MOVED, version=versions[rank])), LayoutClient(path, "engine") as client:
            said: Any
            try:
                layout, version = agree_on_layout(client, own=OWN, agreement=agreement)
                said = [layout.physical_to_logical_map.tolist(), version]
            except EplbError as error:
                said = [type(error).__name__, str(error)]
        print(json.dumps(said), flush=True)
    sys.stdin.readline()  # the store of rank 0 is there until all have ended
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
