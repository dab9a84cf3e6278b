"""Layouts for engines that cannot hold an empty slot."""

from __future__ import annotations

import numpy as np

from eplb_core.layout import ExpertLayout


def keep_filled(layout: ExpertLayout, current: ExpertLayout | None) -> ExpertLayout:
    """Where `layout` leaves a slot empty that `current` fills, let its expert stay: that costs no transfer.

    `place` may empty a slot that only adds load to the fullest rank.
    """
    if current is None or current.num_slots != layout.num_slots:
        return layout
    rows, was = layout.physical_to_logical_map, current.physical_to_logical_map
    if not (empty := rows < 0).any():
        return layout
    return ExpertLayout(np.where(empty, was, rows), layout.num_experts, topology=layout.topology)
