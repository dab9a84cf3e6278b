"""`place`: from a load to a layout, with a proof of how good it is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eplb_core._arrays import ArrayLike, BoolArray, FloatArray, IntArray, check_int, check_load, read_only, to_numpy
from eplb_core.errors import InfeasiblePlacementError
from eplb_core.layout import ExpertLayout, check_num_slots, rank_capacity
from eplb_core.placement._kernels import new_scratch
from eplb_core.placement._relabel import keep_in_place
from eplb_core.placement._score import bound_layers, score_layers
from eplb_core.placement._solve import solve_layers
from eplb_core.topology import Topology

_PIN = {"none": 0, "first_copy": 1, "group": 2}


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """A layout and what is known of it. Arrays are read-only."""

    layout: ExpertLayout
    """Where the experts go."""
    balancedness: FloatArray
    """Predicted, float64 `[L]`, mean over the windows with load; NaN for a layer without any. Of a window it is
    (total load / total speed) / (largest load / speed of a rank) over the active ranks: mean / max for equal speeds."""
    bound: FloatArray
    """Proven upper limit of `balancedness` over all layouts of this kind, float64 `[L]`; NaN for a layer without load."""
    transfers: IntArray
    """Experts that ranks receive to come from `current`, int64 `[L]`; 0 where there is no current layout."""

    def __repr__(self) -> str:
        known = ~np.isnan(self.balancedness)
        mean, bound = (x[known].mean() if known.any() else np.nan for x in (self.balancedness, self.bound))
        return f"Placement({self.layout!r}, balancedness={mean:.4f}, bound={bound:.4f}, transfers={self.transfers.sum()})"


def place(
    expert_load: ArrayLike,
    topology: Topology,
    *,
    num_slots: int,
    current: ExpertLayout | None = None,
    max_transfers: int | None = None,
    min_gain: float = 0.01,
    transfer_price: float | None = None,
    transfer_cost: ArrayLike | None = None,
    window_weights: ArrayLike | None = None,
    locality: str = "none",
    num_groups: int | None = None,
    active_ranks: ArrayLike | None = None,
    dispatch: str = "even",
    effort: float = 1.0,
) -> Placement:
    """Which expert goes into which slot, so that the ranks' loads are even?"""
    return Placement(*_x())
