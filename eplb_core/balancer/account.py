"""What a layer's moves have brought, less what they cost: where that stays behind, the layer stays as it is.

The rule takes traffic to last. Where it does not, or turns against each layout, moves promise and do not bring. So each
layer has an account, in windows of its balance: it gains by what the live row is better than that of 32 to 64 windows
ago, pays for transfers, and is given a little each window. A layer whose account is overdrawn stays until it is not.
"""

from __future__ import annotations

import hashlib

import numpy as np

from eplb_core._arrays import BoolArray, FloatArray, IntArray, read_only
from eplb_core.balancer.decide import is_trivial
from eplb_core.balancer.memory import KEPT, Memory
from eplb_core.layout import ExpertLayout
from eplb_core.metrics import transfers
from eplb_core.placement.affinity.near import TRAFFIC_PRICE, saved_sends
from eplb_core.placement.affinity.pairs import Pairs
from eplb_core.placement.score import score_layers
from eplb_core.placement.search.improve import score_weighted
from eplb_core.placement.search.relabel import settle
from eplb_core.placement.windows import add_windows

# Whole parts of a window add up to the same in any order.
_UNITS = 1_000_000
# The live row is compared with that of so many windows ago, to twice as many.
_AGO = 32
# In windows of balance: what may be lost, beside the cost of placing all slots anew, before a layer stays; what counts
# of past gains at most; what is given each window.
_MOST_LOSS, _MOST_GAIN, _GIVEN = 0.5, 0.25, 0.002
# A layer that stays is given as much in so many windows as balance may fall further behind.
_SHORT = 32


class Account:
    """The accounts of all layers, and the rows that they compare; changes only by `book`.

    Args:
        rows: Live rows `[L, P]`.
        until: Windows before this one are not booked.
    """

    def __init__(self, rows: IntArray, until: int) -> None:
        self.live: IntArray = rows.copy()
        self.newer: IntArray = rows.copy()
        self.older: IntArray = rows.copy()
        self.units: IntArray = np.zeros(len(rows), dtype=np.int64)
        self.gained: IntArray = self.units.copy()
        self.until = until

    def book(
        self,
        live: ExpertLayout,
        memory: Memory,
        move_cost: float,
        weighted: bool,
        pairs: Pairs | None = None,
        traffic_price: float = TRAFFIC_PRICE,
    ) -> tuple[BoolArray, BoolArray]:
        """Book the windows since the last call, which ran on `live`, and the transfers to it.

        With pairs, the sends that the live row saves count as balance, at `traffic_price`.

        Returns:
            Layers that must stay, and those of them that have lost, which had better be as in `older`, bools `[L]`.
        """
        rows, cost, most = live.physical_to_logical_map, _in_units(move_cost), self._most_loss(move_cost)
        new = memory.count - self.until
        if new > 0:
            # Nothing is held against a first placement, nor against a row that lost or got ranks.
            anew = is_trivial(self.live, live.num_experts)
            anew |= (_ranks(rows, live) != _ranks(self.older, live)).any(axis=1)
            self.units[anew] = self.gained[anew] = 0
            for past in (self.live, self.newer, self.older):
                past[anew] = rows[anew]
            before = ExpertLayout._of_valid(self.live, live.num_experts, live.topology)
            windows = memory.shares[np.arange(max(self.until, memory.count - KEPT), memory.count) % KEPT]
            now, was = (_balance(table, windows, live, weighted) for table in (rows, self.older))
            better = np.where(np.isfinite(now - was), now - was, 0.0)
            if pairs is not None:
                load = add_windows(windows, np.ones(len(windows)))
                better += traffic_price * saved_sends(self.older, rows, live.topology, load, pairs)
            gain = np.rint(new * np.clip(better, -1.0, 1.0) * _UNITS).astype(np.int64)
            given, self.gained = new * int(_GIVEN * _UNITS), self.gained + gain
            least = np.minimum(self.units, -most - int(_SHORT * _GIVEN * _UNITS))
            self.units = np.clip(self.units + gain + given, least, int(_MOST_GAIN * _UNITS))
            self.units -= np.rint(transfers(before, live).sum(axis=1) * cost).astype(np.int64)
            if memory.count // _AGO > self.until // _AGO:
                self.older, self.newer = self.newer, rows.copy()
                self.gained[:] = 0
            self.live, self.until = rows.copy(), memory.count
        stays = self.overdrawn(move_cost)
        lost = stays & (self.gained < -int(_MOST_LOSS / 2 * _UNITS))
        self.newer[lost] = self.older[lost]
        return stays, lost

    def overdrawn(self, move_cost: float) -> BoolArray:
        """Layers that stay, because their moves have not brought what they cost, bools `[L]`."""
        return np.asarray(self.units < -self._most_loss(move_cost))

    def _most_loss(self, move_cost: float) -> int:
        return int(_MOST_LOSS * _UNITS + _in_units(move_cost) * self.live.shape[1])

    def taken_back(self, live: ExpertLayout, layers: IntArray) -> ExpertLayout:
        """`live` with the older rows of some layers; what stays on a rank stays in its slot."""
        if not layers.size:
            return live
        rows = live.physical_to_logical_map.copy()
        back, slots = self.older[layers], np.full(live.topology.num_ranks, live.slots_per_rank)
        settle(rows[layers], back, slots, live.num_experts)
        rows[layers] = back
        return ExpertLayout._of_valid(rows, live.num_experts, live.topology)

    @property
    def digest(self) -> str:
        """Of all that decides."""
        found = hashlib.sha256(f"{self.until}".encode())
        for table in (self.live, self.newer, self.older, self.units, self.gained):
            found.update(table.tobytes())
        return found.hexdigest()


def _in_units(move_cost: float) -> float:
    return min(move_cost, 1.0) * _UNITS


def _ranks(rows: IntArray, live: ExpertLayout) -> BoolArray:
    """Ranks that hold experts, bools `[L, R]`."""
    return np.asarray((rows.reshape(len(rows), live.topology.num_ranks, -1) >= 0).any(axis=2))


def _balance(rows: IntArray, windows: FloatArray, live: ExpertLayout, weighted: bool) -> FloatArray:
    """Mean balancedness of rows over windows `[T, L, E]`, `[L]`; NaN without load."""
    speed, weights = live.topology.rank_speed, np.ones(len(windows))
    windows, rows = read_only(windows), rows.copy()  # as `place` gives them: kernels are compiled once
    capacity = np.where(_ranks(rows, live).any(axis=0), live.slots_per_rank, 0)
    if weighted:
        return score_weighted(windows, weights, rows, capacity, 1.0 / speed)
    return score_layers(windows, weights, rows, capacity, speed)
