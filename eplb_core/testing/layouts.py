"""Layouts for the self-test of an engine."""

from __future__ import annotations

from eplb_core._arrays import read_only
from eplb_core.errors import LayoutError
from eplb_core.layout import ExpertLayout


def shifted_layout(layout: ExpertLayout) -> ExpertLayout:
    """Shift the experts' numbers, by a different amount per layer, so that no slot holds the expert it held.

    Engines mostly start with expert e in slot e, so a forward path that skips the mapping, a loader that ignores the
    layout or a table of the wrong layer gives right answers until the first migration. An engine that starts from this
    layout shows the error with the first token. `LoadCounter` tells which path it is: layers that were not mapped stay
    at 0.

    Args:
        layout: Layout of at least 2 experts.

    Returns:
        Layout in which expert e of layer l is where expert (e - 1 - l % (E - 1)) % E was.

    Raises:
        LayoutError: The layout has one expert.

    Cost:
        A copy of the map.

    Example:
        >>> from eplb_core import ExpertLayout, Topology
        >>> layout = ExpertLayout.trivial(2, 3, num_slots=4, topology=Topology(2))
        >>> shifted_layout(layout).physical_to_logical_map.tolist()
        [[1, 2, 0, 1], [2, 0, 1, 2]]
    """
    experts = layout.num_experts
    if experts < 2:
        raise LayoutError(f"`layout` (num_experts={experts}) must have 2 experts or more to be shifted")
    rows = layout.physical_to_logical_map.copy()
    for layer, row in enumerate(rows):
        held = row >= 0
        row[held] = (row[held] + 1 + layer % (experts - 1)) % experts
    return ExpertLayout(read_only(rows), experts, topology=layout.topology)
