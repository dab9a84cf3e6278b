"""A standby of two ranks that follows the moves of an engine on the weights of two hosts, until it is killed.

    follower_process.py PATH0 PATH1

Prints "ready" when it follows, and then the versions that it switches to. Each pass reads every slot: it prints
"wrong ..." and ends if one does not hold what the layout says, and "stopped ..." if it may run no pass any more.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from eplb_core import LayoutAgreementError, LayoutClient, LayoutFollower, agree_on_layout, attach_weights
from eplb_core.loading.agreement import LocalAgreement
from tests.loading import mover_process
from tests.loading.worlds import on_threads, wrong_slots


def main(paths: list[str]) -> None:
    """Both ranks, each on a thread."""
    members = LocalAgreement.group(2)

    def serve(rank: int) -> None:
        client = LayoutClient(paths[rank], f"follower{rank}")
        layout, _ = agree_on_layout(client, own=mover_process.FIRST, agreement=members[rank])
        tensors: dict[str, Any] = {}
        attached = attach_weights(client, tensors, config=mover_process.CONFIG, layout=layout)
        stores = mover_process.stores(tensors)
        follower = LayoutFollower(client, layout, agreement=members[rank])
        say("ready" if rank == 0 else "")
        while True:
            try:
                rows = follower.poll()
            except LayoutAgreementError as error:
                say(f"stopped {error}" if rank == 0 else "")
                attached.close()
                return
            if rows and rank == 0:
                say(f"version {follower.version}")
            if not follower.paused:
                wrong = wrong_slots(stores, follower.layout, rank)
                if wrong:
                    say(f"wrong {wrong} on rank {rank} at version {follower.version}")
                    os._exit(1)
            threading.Event().wait(0.0002)

    for result in on_threads([lambda rank=rank: serve(rank) for rank in range(2)]):  # type: ignore[misc]
        if isinstance(result, BaseException):
            raise result


def say(line: str) -> None:
    """One line, if there is something to say."""
    if line:
        print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:3])
