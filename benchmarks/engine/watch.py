"""What a rank's decisions rest on: a Balancer, and windows that it has yet to see."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import eplb_core as eplb
from eplb_core.dispatch.counter import Snapshot

MOST_TRANSFERS = 4
"""Experts that ranks may receive on one layer in a decision."""


class Watch:
    """A `Balancer` that sees the same windows in the same order on every rank, also where a migration ended early.

    The forward thread gives it snapshots of the load. A worker reads them when it decides: a worker that never came to
    it leaves its windows for the next.
    """

    def __init__(self, live: eplb.ExpertLayout, move_cost: float, state: dict[str, Any] | None = None) -> None:
        self._balancer = eplb.Balancer(
            live.topology,
            num_slots=live.num_slots,
            move_cost=move_cost,
            dispatch="weighted",
            max_transfers=MOST_TRANSFERS,
        )
        self.pairs: NDArray[np.int64] | None = None
        """Experts used together `[L, E, E]`, as far as they were counted."""
        if state is not None:
            self.pairs = state.get("pairs")
            self._balancer.load_state_dict({key: value for key, value in state.items() if key != "pairs"})
        self._ahead: list[tuple[Snapshot, int]] = []
        self._alone = threading.Lock()

    def see(self, snapshot: Snapshot, new: int, pairs: torch.Tensor | None = None) -> None:
        """Keep a snapshot, whose last `new` windows none before it has, and the pairs of these."""
        with self._alone:
            if pairs is not None:
                counted = pairs.cpu().numpy()
                self.pairs = counted if self.pairs is None else counted + self.pairs
            for earlier, _ in self._ahead:
                earlier.numpy()  # frees its buffers, of which there are two; it was copied long ago
            self._ahead.append((snapshot, new))

    def propose(self, live: eplb.ExpertLayout, alive: NDArray[np.bool_]) -> eplb.ExpertLayout:
        """What should be live now, for all that was seen; on a worker."""
        with self._alone:
            for snapshot, new in self._ahead:
                loads = snapshot.numpy()
                if new := min(new, len(loads)):
                    self._balancer.observe(loads[-new:])
            self._ahead.clear()
            pairs = {} if self.pairs is None else {"pairs": self.pairs}
            return self._balancer.propose(live, active_ranks=alive, **pairs).layout

    def state(self) -> dict[str, Any]:
        """What the Balancer knows, for a rank that comes."""
        with self._alone:
            return self._balancer.state_dict() | ({} if self.pairs is None else {"pairs": self.pairs})
