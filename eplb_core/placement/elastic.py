"""Plan for ranks that leave, and find the experts lost with ranks that died.

Joining needs no function of its own: `ExpertLayout.resized` adds empty ranks, `place(current=...)` fills them.
"""

from __future__ import annotations

import numpy as np

from eplb_core._arrays import ArrayLike, IntArray, check_kind
from eplb_core.layout import ExpertLayout, rank_slots, staying_ranks
from eplb_core.placement.place import place
from eplb_core.placement.problem import check_active


def plan_removal(
    current: ExpertLayout,
    ranks: ArrayLike,
    *,
    expert_load: ArrayLike | None = None,
    num_slots: int | None = None,
    slots_per_rank: ArrayLike | None = None,
) -> ExpertLayout:
    """From which layout can `ranks` leave at any moment, with the fewest transfers until then?

    Every expert that only they hold gets a slot on a rank that stays, in place of a replica whose expert has others
    there; nothing else moves. The leaving ranks keep their slots and go on serving. Once the layout is reached they may
    be removed (`ExpertLayout.without_ranks`) or die, and no expert is lost; `place` then balances those that stay.

    Args:
        current: Live layout.
        ranks: Ranks that will leave, ints or bools `[R]`.
        expert_load: Loads `[L, E]` or `[T, L, E]`, to choose which replicas make way. Default: all experts alike.
        num_slots: Slots that the ranks really have, where it is fewer than the layout's (see `place`). Default: all.
        slots_per_rank: The same for ranks that differ, ints `[R]`.

    Returns:
        Layout of the same frame as `current`.

    Raises:
        InfeasiblePlacementError: The ranks that stay have fewer slots than there are experts.
        IndexError: A rank out of range.
        ValueError: A bad load.

    Cost:
        One `place`; any thread.

    Example:
        >>> from eplb_core import Topology
        >>> live = ExpertLayout([[0, 1, 2, 3, 0, 1]], num_experts=4, topology=Topology(num_ranks=3))
        >>> ready = plan_removal(live, [1])
        >>> print(ready)
        layer 0: 2 3 | 2 3 | 0 1
        >>> print(ready.without_ranks([1]))
        layer 0: 2 3 | 0 1
    """
    topology, experts = check_kind(current, "current", ExpertLayout).topology, current.num_experts
    if num_slots is None and slots_per_rank is None:
        num_slots = current.num_slots
    stay = staying_ranks(ranks, rank_slots(num_slots, slots_per_rank, experts, topology.num_ranks), experts)
    load = np.ones((current.num_layers, experts)) if expert_load is None else expert_load
    # No budget: only what would be lost moves. No gain is enough for a row that may stay.
    placement = place(
        load,
        topology,
        num_slots=num_slots,
        slots_per_rank=slots_per_rank,
        current=current,
        active_ranks=stay,
        max_transfers=0,
        min_gain=1e9,
    )
    moved = np.repeat(stay, current.slots_per_rank)
    rows = np.where(moved, placement.layout.physical_to_logical_map, current.physical_to_logical_map)
    return ExpertLayout(rows, experts, topology=topology)


retire_ranks = plan_removal


def drop_ranks(layout: ExpertLayout, ranks: ArrayLike) -> ExpertLayout:
    """Remove `ranks` from a layout: `layout.without_ranks(ranks)`."""
    return check_kind(layout, "layout", ExpertLayout).without_ranks(ranks)


def lost_experts(layout: ExpertLayout, active_ranks: ArrayLike) -> IntArray:
    """Which experts does no active rank hold, so that they must come from a checkpoint or from host memory?

    `place` with the same `active_ranks` gives them a slot.

    Args:
        layout: Layout that the weights were in.
        active_ranks: Ranks that live, bools `[R]`.

    Returns:
        int64 `[n, 2]`: layer and expert, ascending.

    Raises:
        ValueError: `active_ranks` has another shape or type.

    Cost:
        O(L * (P + E)); any thread.

    Example:
        >>> from eplb_core import Topology
        >>> live = ExpertLayout([[0, 1, 2, 3, 0, 1]], num_experts=4, topology=Topology(num_ranks=3))
        >>> lost_experts(live, [True, False, True]).tolist()
        [[0, 2], [0, 3]]
    """
    check_kind(layout, "layout", ExpertLayout)
    active = np.repeat(check_active(active_ranks, layout.topology.num_ranks), layout.slots_per_rank)
    held = np.zeros((layout.num_layers, layout.num_experts + 1), dtype=np.bool_)
    p2l = np.where(active, layout.physical_to_logical_map, -1)
    np.put_along_axis(held, p2l, True, axis=1)  # -1 marks the column beyond the experts
    return np.argwhere(~held[:, :-1]).astype(np.int64)
