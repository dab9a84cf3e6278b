"""Ranks that leave and ranks that died: what must move first, and what is lost.

Joining needs no function of its own: `ExpertLayout.resized` adds empty ranks, `place(current=...)` fills them.
"""

from __future__ import annotations

import numpy as np

from eplb_core._arrays import ArrayLike, BoolArray, IntArray, check_kind, to_ids, to_numpy
from eplb_core.errors import InfeasiblePlacementError
from eplb_core.layout import ExpertLayout, check_num_slots, rank_capacity
from eplb_core.placement.place import place
from eplb_core.placement.problem import check_active
from eplb_core.topology import Topology


def retire_ranks(
    current: ExpertLayout, ranks: ArrayLike, *, expert_load: ArrayLike | None = None, num_slots: int | None = None
) -> ExpertLayout:
    """From which layout can `ranks` leave at any moment, with the fewest transfers until then?

    Every expert that only they hold gets a slot on a rank that stays, in place of a replica whose expert has others
    there; nothing else moves. The leaving ranks keep their slots and go on serving. Once the layout is reached they may
    be dropped (`drop_ranks`) or die, and no expert is lost; `place` then balances those that stay.

    Args:
        current: Live layout.
        ranks: Ranks that will leave, ints or bools `[R]`.
        expert_load: Loads `[L, E]` or `[T, L, E]`, to choose which replicas make way. Default: all experts alike.
        num_slots: Slots that the ranks really have, where it is fewer than the layout's (see `place`). Default: all.

    Returns:
        Layout of the same frame as `current`.

    Raises:
        InfeasiblePlacementError: The ranks that stay have fewer slots than there are experts.
        IndexError: A rank out of range.
        ValueError: A bad load.

    Cost:
        One `place`; any thread.

    Example:
        >>> live = ExpertLayout([[0, 1, 2, 3, 0, 1]], num_experts=4, topology=Topology(num_ranks=3))
        >>> ready = retire_ranks(live, [1])
        >>> print(ready)
        layer 0: 2 3 | 2 3 | 0 1
        >>> print(drop_ranks(ready, [1]))
        layer 0: 2 3 | 0 1
    """
    topology, experts = check_kind(current, "current", ExpertLayout).topology, current.num_experts
    leaving = _mask(ranks, topology.num_ranks)
    slots = current.num_slots if num_slots is None else check_num_slots(num_slots, experts)
    capacity = rank_capacity(slots, topology.num_ranks)
    _check_room(leaving, capacity, experts)
    load = np.ones((current.num_layers, experts)) if expert_load is None else expert_load
    # No budget: only what would be lost moves. No gain is enough for a row that may stay.
    placement = place(
        load,
        topology,
        num_slots=slots,
        current=current,
        active_ranks=~leaving,
        max_transfers=0,
        min_gain=1e9,
    )
    kept = np.repeat(leaving, current.slots_per_rank)
    rows = np.where(kept, current.physical_to_logical_map, placement.layout.physical_to_logical_map)
    return ExpertLayout(rows, experts, topology=topology)


def drop_ranks(layout: ExpertLayout, ranks: ArrayLike) -> ExpertLayout:
    """This layout without `ranks`: the others close up in order, keep their node, their speed and all their slots.

    Args:
        layout: A layout in which each expert has a slot on another rank (see `retire_ranks`).
        ranks: Ranks that leave, ints or bools `[R]`.

    Returns:
        Layout on the ranks that stay; nodes without a rank vanish, the others close up in order.

    Raises:
        MissingExpertError: An expert would lose its last slot; the text names expert, layer and rank.
        InfeasiblePlacementError: The ranks that stay have fewer slots than there are experts.
        IndexError: A rank out of range.

    Example:
        >>> layout = ExpertLayout([[0, 1, 2, 0, 1, 2]], num_experts=3, topology=Topology(num_ranks=6, num_nodes=3))
        >>> drop_ranks(layout, [1, 2, 3]).topology
        Topology(num_ranks=3, num_nodes=2)
    """
    topology = check_kind(layout, "layout", ExpertLayout).topology
    leaving = _mask(ranks, topology.num_ranks)
    capacity = np.full(topology.num_ranks, layout.slots_per_rank, dtype=np.int64)
    _check_room(leaving, capacity, layout.num_experts)
    stay = np.flatnonzero(~leaving)
    _, node = np.unique(topology.rank_to_node[stay], return_inverse=True)
    smaller = Topology(rank_to_node=node.astype(np.int64), rank_speed=topology.rank_speed[stay])
    return layout.resized(smaller, stay)


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


def _mask(ranks: ArrayLike, num_ranks: int) -> BoolArray:
    """Ranks as bools `[R]`."""
    array = to_numpy(ranks, "ranks")
    if array.dtype == np.bool_:
        if array.shape != (num_ranks,):
            raise ValueError(f"`ranks` (shape {list(array.shape)}) must be bools [{num_ranks}] or ints")
        return np.array(array)
    named = to_ids(array, "ranks").reshape(-1)
    bad = (named < 0) | (named >= num_ranks)
    if bad.any():
        raise IndexError(f"`ranks` (={named[np.argmax(bad)]}) must be in [0, {num_ranks})")
    mask = np.zeros(num_ranks, dtype=np.bool_)
    mask[named] = True
    return mask


def _check_room(leaving: BoolArray, capacity: IntArray, experts: int) -> None:
    live = int(capacity[~leaving].sum())
    if live < experts:
        enough = int(np.searchsorted(np.cumsum(np.sort(capacity)), experts)) + 1  # whichever they are
        raise InfeasiblePlacementError(
            f"`ranks` ({int(leaving.sum())} of {len(leaving)}) leave {int((~leaving).sum())} ranks with {live} slots, "
            f"fewer than the {experts} experts; keep {enough} ranks or more, or add slots",
            num_live_slots=live,
            num_experts=experts,
        )
