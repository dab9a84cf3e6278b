"""Layouts for the self-test of an engine."""

from __future__ import annotations

from eplb_core._arrays import read_only
from eplb_core.errors import LayoutError
from eplb_core.layout import ExpertLayout


def shifted_layout(layout: ExpertLayout) -> ExpertLayout:
    """The same layout with the experts' numbers shifted, by another number in each layer: no slot holds what it held.

    Most layouts that engines start with hold expert e in slot e, so a path of the forward that forgets the mapping, a
    loader that ignores the layout or a table of the wrong layer gives right answers until the first migration. Start an
    engine from this one, and they are wrong from the first token on. Which path it is, the counts tell: layers that
    nothing was mapped in stay at 0 in `LoadCounter`.

    Args:
        layout: At least 2 experts. Its loads do not matter: ranks keep their numbers of distinct experts.

    Returns:
        A layout in which expert e of layer l is where e - 1 - l % (E - 1) was, counted round.

    Raises:
        LayoutError: A layout of one expert is the same whatever one does.

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
