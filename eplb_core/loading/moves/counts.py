"""What the moves of a rank have come to so far, for `MigratorStatus` and for operators."""

from __future__ import annotations

from eplb_core.exposition import Sample
from eplb_core.loading.moves.progress import CAUSES


class MoveCounts:
    """Sums since the constructor; each is written by one thread alone, and read by any."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.received = 0
        """Experts that were staged: read, or restored from a backup."""
        self.read_bytes, self.read_s = 0, 0.0
        self.layers = 0
        """Layers that are as they should be."""
        self.install_s = self.worst_install_s = 0.0
        self.ended = dict.fromkeys(("", *CAUSES), 0)
        """Migrations by cause; empty: the target was reached."""

    def installed(self, took: float, last: bool) -> None:
        """Note down an install of so many seconds, `last` of its layer."""
        self.install_s += took
        self.worst_install_s = max(self.worst_install_s, took)
        self.layers += last

    def counters(self) -> list[Sample]:
        """For `exposition.watch`."""
        sums = {
            "eplb_experts_received_total": self.received,
            "eplb_read_bytes_total": self.read_bytes,
            "eplb_read_seconds_total": self.read_s,
            "eplb_layers_installed_total": self.layers,
            "eplb_install_seconds_total": self.install_s,
        }
        ended = [Sample("eplb_migrations_total", n, self.rank, (cause or "done",)) for cause, n in self.ended.items()]
        return [*(Sample(name, value, self.rank) for name, value in sums.items()), *ended]
