"""An engine of two ranks that maps the weights of two hosts and moves experts until it is killed.

    mover_process.py PATH0 PATH1 SEED

Prints "ready" before the first migration. One that a second engine pauses is tried again.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np

from eplb_core import ExpertLayout, ExpertStore, LayoutClient, Topology, agree_on_layout, attach_weights
from eplb_core.loading.agreement import LocalAgreement
from eplb_core.loading.moves.migrator import Migrator
from eplb_core.loading.transports import LocalCopy
from tests.loading.worlds import SIZES, on_threads, random_layout

LAYERS, EXPERTS, SLOTS = 3, 5, 8
TOPOLOGY = Topology(2)
CONFIG = {"model": "labels"}
FIRST = ExpertLayout.trivial(LAYERS, EXPERTS, num_slots=SLOTS, topology=TOPOLOGY)


def stores(tensors: dict[str, Any]) -> list[ExpertStore]:
    """What a host's tensors are by layer."""
    return [ExpertStore({name: tensors[f"{layer}.{name}"] for name in SIZES}) for layer in range(LAYERS)]


def main(paths: list[str], seed: int) -> None:
    members = LocalAgreement.group(2)
    kept: list[Any] = [None, None]

    def join(rank: int) -> Migrator:
        client = LayoutClient(paths[rank], f"mover{rank}")
        layout, _ = agree_on_layout(client, own=FIRST, agreement=members[rank])
        tensors: dict[str, Any] = {}
        kept[rank] = attach_weights(client, tensors, config=CONFIG, layout=layout)
        return Migrator(
            stores(tensors), layout, rank=rank, transport=LocalCopy(), agreement=members[rank], record=client
        )

    migrators: Any = on_threads([lambda rank=rank: join(rank) for rank in range(2)])  # type: ignore[misc]
    rng = np.random.default_rng(seed)
    print("ready", flush=True)
    while True:
        target = random_layout(rng, LAYERS, EXPERTS, SLOTS, TOPOLOGY)
        for migrator in migrators:
            migrator.start(target)
        while not migrators[0].idle:
            for migrator in migrators:
                migrator.poll()
            threading.Event().wait(0.0002)
        if migrators[0].status.cause not in ("", "busy"):
            raise SystemExit(migrators[0].status)


if __name__ == "__main__":
    main(sys.argv[1:3], int(sys.argv[3]))
