"""An engine of two ranks that moves experts and gives its numbers to prometheus_client. Run by test_prometheus.py.

    prometheus_process.py FOLDER

PROMETHEUS_MULTIPROC_DIR names where. Each rank is a forked process; prints as JSON lines what they moved, and ends when
its input does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from eplb_core import transfers
from eplb_core.adapters import hooking, prometheus
from eplb_core.loading.moves.warm import warm_moves
from tests.loading.moves.moving_process import Rank


def serve(rank: int, folder: Path) -> None:
    """Five migrations to their ends, and one that is paused."""
    me = Rank(rank, 2, folder, 60.0)
    hooking.tell_parts({"moves": True, "record": False}, rank)
    publisher = prometheus.publish(interval=0.2)
    assert isinstance(publisher, prometheus.Publisher)
    least = 0
    for _ in range(5):
        live, target = me.migrator.layout, me.random_layout()
        least += int(transfers(live, target)[:, rank].sum())
        me.migrator.start(target)
        me.until_idle()
    me.migrator.start(me.random_layout())
    me.migrator.pause()
    me.migrator.resume()
    status, since = me.migrator.status, time.time()
    publisher.refresh()
    answer = {"rank": rank, "pid": os.getpid(), "since": since, "received": least}
    print(json.dumps({**answer, "bytes": status.read_bytes, "read_s": status.read_s}), flush=True)
    sys.stdin.read()
    publisher.close()


def main() -> None:
    warm_moves()  # once for both
    children = []
    for rank in range(2):
        child = os.fork()
        if not child:
            serve(rank, Path(sys.argv[1]))
            os._exit(0)
        children.append(child)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    main()
