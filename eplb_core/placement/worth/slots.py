"""Slots per layer: where a limited number of them shortens a pass most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from eplb_core._arrays import (
    ArrayLike,
    FloatArray,
    IntArray,
    check_call,
    check_int,
    check_kind,
    check_load,
    check_made,
    check_real,
    read_only,
    to_list,
)
from eplb_core._html import HTML_LAYERS, table_html
from eplb_core.errors import InfeasiblePlacementError
from eplb_core.frames import Columns, Table
from eplb_core.layout import ExpertLayout
from eplb_core.placement.place import Placement, place
from eplb_core.placement.problem import PlacementDispatch, check_active
from eplb_core.placement.spend import spend_budget
from eplb_core.placement.worth.costs import CostModel, model_of
from eplb_core.placement.worth.pass_time import time_layers
from eplb_core.topology import Topology


@dataclass(frozen=True, slots=True, eq=False)
class SlotPlan(Table):
    """How many slots each layer gets. Arrays are read-only."""

    slots_per_rank: IntArray
    """Slots of each rank, int64 `[L]`."""
    layout: ExpertLayout
    """A placement with that many slots; layers with fewer than the most end each rank with empty slots."""
    balancedness: FloatArray
    """As of `Placement`, float64 `[L]`."""
    choices: tuple[int, ...]
    """Slots per rank that were tried, `[C]`, ascending."""
    layer_time: FloatArray
    """Seconds of a pass with each choice, float64 `[C, L]`, by the cost model: what a slot is worth on each layer."""

    def _columns(self) -> Columns:
        layer = np.arange(len(self.slots_per_rank))
        choice = np.searchsorted(self.choices, self.slots_per_rank)
        return {
            "layer": layer,
            "slots_per_rank": self.slots_per_rank,
            "balancedness": self.balancedness,
            "pass_s": self.layer_time[choice, layer],
        }

    def _repr_html_(self) -> str:
        """What slots are spent, for how much time, and the layers that have most of them."""
        counts, columns = self.slots_per_rank, self._columns()
        each = ", ".join(f"{size} on {(counts == size).sum()}" for size in self.choices if size in counts)
        now, fewest = float(columns["pass_s"].sum()), float(self.layer_time[0].sum())
        facts = f"<b>SlotPlan</b>: {counts.sum():,} slots on each rank, all layers together"
        if not counts.size:
            return f"<div>{facts}</div>"
        facts += f"; of a layer: {each}"
        if fewest > 0.0:
            facts += f"; {1.0 - now / fewest:.1%} less time than with {self.choices[0]} on every layer"
        order = np.argsort(-counts, kind="stable")[:HTML_LAYERS].tolist()
        rows = [
            [layer, counts[layer], f"{self.balancedness[layer]:.4f}", f"{columns['pass_s'][layer]:.4g}"]
            for layer in order
        ]
        left = len(counts) - len(order)
        more = f"<div>{left} more layers</div>" if left else ""
        table = table_html(["most slots: layer", "slots per rank", "balancedness", "time of a pass"], rows)
        return f"<div>{facts}{table}{more}</div>"


def plan_slots(
    expert_load: ArrayLike,
    topology: Topology,
    *,
    total_slots: int,
    choices: Sequence[int] | None = None,
    cost: CostModel | None = None,
    window_passes: float = 1.0,
    dispatch: PlacementDispatch = "even",
    progress: Callable[[int, int], None] | None = None,
) -> SlotPlan:
    """How many slots is each layer worth, when one rank has room for `total_slots` over all layers?

    Some layers are even without redundant slots, others need several per rank. `place` finds each layer's time for each
    choice; slots then go where they shorten the pass most.

    Args:
        expert_load: Tokens routed to each expert, `[L, E]`, or windows of it, `[T, L, E]`.
        topology: Ranks, nodes and speeds.
        total_slots: Slots that one rank holds, summed over layers.
        choices: Slots per rank that a layer may have. Default: as many as the experts need, and up to four more.
        cost: Seconds of a pass. Default: time is counted in tokens.
        window_passes: Passes that a window covers.
        dispatch: How replicas share their expert's tokens, as for `place`: "even" or "weighted".
        progress: Called with choices done and in all.

    Returns:
        Slots of each layer, and a layout that has them.

    Raises:
        InfeasiblePlacementError: `total_slots` does not hold all experts.
        ValueError: A bad load; a choice with fewer slots than experts.

    Cost:
        One `place` for each choice. Any thread.

    Example:
        >>> load = [[300, 10, 10, 10], [50, 50, 50, 50]]
        >>> plan = plan_slots(load, Topology(num_ranks=2), total_slots=5)
        >>> plan.slots_per_rank.tolist()
        [3, 2]
        >>> print(plan.layout)
        layer 0: 0 2 1 | 0 3 1
        layer 1: 0 2 - | 1 3 -
    """
    check_kind(topology, "topology", Topology)
    check_call(progress, "progress")
    window_passes = check_real(window_passes, "window_passes", above=0.0)
    model = model_of(cost)
    load = check_load(expert_load, "expert_load", (2, 3))
    load = load if load.ndim == 3 else load[None]
    _, layers, experts = load.shape
    ranks = topology.num_ranks
    sizes = _check_choices(choices, experts, ranks)
    total = check_int(total_slots, "total_slots", 0)
    if total < layers * sizes[0]:
        raise InfeasiblePlacementError(
            f"`total_slots` (={total}) must be at least {layers * sizes[0]}: {sizes[0]} on each of {layers} layers",
            num_live_slots=total * ranks,
            num_experts=experts * layers,
        )
    active = check_active(None, ranks)
    placements = []
    for done, size in enumerate(sizes, start=1):
        placements.append(place(load, topology, num_slots=size * ranks, dispatch=dispatch))
        if progress is not None:
            progress(done, len(sizes))
    times = np.stack(
        [
            time_layers(each.layout, load, active, None, "shares", model, window_passes, dispatch == "weighted")[0]
            for each in placements
        ]
    )
    extra = np.array(sizes, dtype=np.int64)[1:, None] - sizes[0] + np.zeros((1, layers), dtype=np.int64)
    chosen = spend_budget(times[:1] - times[1:], extra, total - layers * sizes[0]) + 1
    return SlotPlan(
        slots_per_rank=read_only(np.array(sizes, dtype=np.int64)[chosen]),
        layout=_merge(placements, chosen, experts, topology),
        balancedness=read_only(np.array([placements[c].balancedness[layer] for layer, c in enumerate(chosen)])),
        choices=tuple(sizes),
        layer_time=read_only(times),
    )


def _check_choices(choices: Sequence[int] | None, experts: int, ranks: int) -> list[int]:
    least = -(-experts // ranks)
    given = range(least, least + 5) if choices is None else to_list(choices, "choices")
    sizes = sorted({check_int(size, "choices", least) for size in given})
    check_made(choices=sizes[-1] if sizes else 0)
    if not sizes:
        raise ValueError("`choices` (=[]) must name one number of slots or more")
    return sizes


def _merge(placements: list[Placement], chosen: IntArray, experts: int, topology: Topology) -> ExpertLayout:
    """Each layer's row from the placement chosen for it, at the widest one's slots per rank."""
    widths = [each.layout.slots_per_rank for each in placements]
    width = max((widths[c] for c in chosen.tolist()), default=widths[0])
    p2l = np.full((len(chosen), topology.num_ranks, width), -1, dtype=np.int64)
    for layer, c in enumerate(chosen.tolist()):
        row = placements[c].layout.physical_to_logical_map[layer]
        p2l[layer, :, : widths[c]] = row.reshape(topology.num_ranks, widths[c])
    return ExpertLayout(p2l.reshape(len(chosen), topology.num_ranks * width), experts, topology=topology)
