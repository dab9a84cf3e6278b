"""vLLM's placement policy by this library: tensors in, tensors out; nothing of vLLM is imported here.

The contract is vLLM's (0.33.0): every rank calls by itself with equal inputs and needs equal bytes; the load is summed
over ranks and window; the old map may hold -1 (ranks that just came) and may be wider than the answer (ranks about to
go, the last ones); the answer has no empty slot and lies on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from eplb_core._arrays import ArrayLike, IntArray, to_ids, to_numpy
from eplb_core.adapters.balancers import Balancers
from eplb_core.adapters.filled import keep_filled
from eplb_core.balancer.balancer import DEFAULT_MOVE_COST
from eplb_core.balancer.notes import tell
from eplb_core.errors import LayoutError
from eplb_core.exposition import Placements
from eplb_core.layout import ExpertLayout, count_replicas
from eplb_core.placement.deepseek import rebalance_experts
from eplb_core.placement.place import place
from eplb_core.topology import Topology


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """How the policy places; equal on all ranks."""

    mode: str = "place"
    """"place": from the live map on, only what pays moves. "auto": a `Balancer` that is shown the load of each call and
    remembers it; needs `Balancers`. "deepseek": the engine's own algorithm, exactly; counts
    above 2^24 keep the bits that the engine's float32 loses."""
    min_gain: float = 0.01
    """Least rise of a layer's predicted balancedness for which it changes."""
    transfer_price: float | None = None
    """Gain that each transfer must bring; None = the library's default."""
    max_transfers: int | None = None
    """Most experts that ranks may receive on one layer."""
    move_cost: float = DEFAULT_MOVE_COST
    """Of "auto": what a transfer costs, in windows of its layer's time, a window being that of one call."""
    locality: str = "engine"
    """"engine": replicas of a group stay on one node wherever vLLM would pack so. "none": anywhere."""


def rebalance(
    weight: ArrayLike | torch.Tensor,
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_ranks: int,
    old: ArrayLike | torch.Tensor | None = None,
    *,
    options: PolicyOptions = PolicyOptions(),
    balancers: Balancers | None = None,
    placements: Placements | None = None,
) -> torch.Tensor:
    """Place experts as vLLM's `rebalance_experts` is asked to.

    Args:
        weight: Tokens of each logical expert, `[L, E]`.
        num_replicas: Slots of all ranks after it.
        num_groups: Groups of consecutive experts.
        num_nodes: Nodes; a divisor of `num_ranks`.
        num_ranks: Ranks after it.
        old: The live map `[L, P_old]`: -1 = an empty slot. Wider than `num_replicas`: the last ranks leave.
        options: How to place.
        balancers: What "auto" remembers between calls; without them, and while ranks come or go, it answers as "place".
        placements: Where operators see what `place` was shown and what it promises; a Balancer tells its own.

    Returns:
        int64 `[L, num_replicas]` on the CPU, every slot filled. A layer without load keeps its row.

    Raises:
        ValueError: A bad load, or numbers that do not fit.
    """
    if num_ranks < 1 or num_replicas % num_ranks:
        raise ValueError(f"`num_replicas` (={num_replicas}) must be a multiple of the {num_ranks} ranks")
    live = None if old is None else to_ids(old, "old")
    if options.mode == "deepseek":
        answer = rebalance_experts(torch.as_tensor(weight), num_replicas, num_groups, num_nodes, num_ranks)[0].numpy()
        return torch.from_numpy(answer if live is None else preserve_intragpu_slots(answer, num_ranks, live))
    load = to_numpy(weight, "weight")
    topology = Topology(num_ranks, num_nodes)
    stride = num_replicas // num_ranks
    current = None if live is None else _live_layout(live, load, topology, stride)
    active = None
    if current is not None and current.topology.num_ranks > num_ranks:
        topology = current.topology
        active = np.arange(topology.num_ranks) < num_ranks
    grouped = options.locality == "engine" and active is None and _in_groups(load.shape[1], num_groups, topology)
    if balancers is not None and options.mode == "auto":
        if current is not None and active is None and live is not None and live.min(initial=0) >= 0:
            kind = {"locality": "group", "num_groups": num_groups} if grouped else {}
            layout = balancers.layout_of(
                load, current, move_cost=options.move_cost, max_transfers=options.max_transfers, **kind
            )
            return torch.from_numpy(np.array(layout.physical_to_logical_map))
        balancers.forget(load.shape)
    placed = place(
        load,
        topology,
        num_slots=topology.num_ranks * stride,
        current=current,
        active_ranks=active,
        min_gain=options.min_gain,
        transfer_price=options.transfer_price,
        max_transfers=options.max_transfers,
        locality="group" if grouped else "none",
        num_groups=num_groups if grouped else None,
    )
    if placements is not None:
        tell(placements, np.array(load, dtype=np.float64), current, placed)
    layout = placed.layout if active is not None else keep_filled(placed.layout, current)
    rows = layout.physical_to_logical_map[:, :num_replicas]
    return torch.from_numpy(fill_empty(rows, load, num_ranks))


def _live_layout(live: IntArray, load: npt.NDArray[Any], topology: Topology, stride: int) -> ExpertLayout | None:
    """The layout to start from, None where the old map is none; more ranks than `topology` has: the last ones leave."""
    if live.ndim != 2 or load.ndim != 2 or live.shape[1] % stride:
        return None
    ranks = live.shape[1] // stride
    if len(live) != len(load) or ranks < topology.num_ranks:
        return None
    if ranks > topology.num_ranks:
        topology = Topology(ranks)
    elif live.min(initial=0) < 0:
        # Filled first: a search that starts from empty slots would rather build the whole row anew.
        live = fill_empty(live, load, ranks)
    try:
        return ExpertLayout(live, load.shape[1], topology=topology)
    except LayoutError:
        return None  # ids of nobody, or an expert that nobody holds: placed anew


def _in_groups(experts: int, num_groups: int, topology: Topology) -> bool:
    """Would vLLM pack whole groups to nodes, and do they fit?"""
    nodes = topology.num_nodes
    return nodes > 1 and num_groups > 1 and num_groups % nodes == 0 and experts % num_groups == 0


def fill_empty(p2l: IntArray, load: npt.NDArray[Any], num_ranks: int) -> IntArray:
    """Give each empty slot a replica of the expert with the most load a replica that its rank does not hold yet."""
    filled = np.array(p2l, dtype=np.int64, order="C")
    if filled.min(initial=0) >= 0:
        return filled
    stride = filled.shape[1] // num_ranks
    count = count_replicas(filled, load.shape[1])
    for layer, slot in np.argwhere(filled < 0).tolist():
        start = slot // stride * stride
        here = filled[layer, start : start + stride]
        # Without any load the fewest replicas count.
        each = np.where(load[layer].any(), load[layer], 1.0) / np.maximum(count[layer], 1)
        if len(np.unique(here[here >= 0])) < load.shape[1]:
            each[here[here >= 0]] = -1.0
        filled[layer, slot] = expert = int(np.argmax(each))
        count[layer, expert] += 1
    return filled


def preserve_intragpu_slots(new: IntArray, num_ranks: int, old: IntArray) -> IntArray:
    """Reorder each rank's part of a new map so that an expert which stays on the rank stays in its slot.

    Args:
        new: The map to reach, `[L, P]`.
        num_ranks: Ranks; where they do not divide P the answer is `new`.
        old: The live map, `[L, P_old]`, at least as wide; compared slot by slot.

    Returns:
        int64 `[L, P]`: the same experts on each rank. The others fill the free slots in the order of `new`.
    """
    slots = new.shape[1]
    if num_ranks <= 0 or slots % num_ranks or old.shape[1] < slots:
        return new
    stride = slots // num_ranks
    before = old[:, :slots].reshape(-1, stride)
    after = new.reshape(-1, stride)
    kept = np.full(after.shape, -1, dtype=np.int64)
    left = np.ones(after.shape, dtype=np.bool_)
    row = np.arange(len(after))
    for slot in range(stride):
        match = left & (after == before[:, slot, None])
        found = match.any(axis=1)
        at = np.argmax(match, axis=1)
        kept[found, slot] = before[found, slot]
        left[row[found], at[found]] = False
    # Equally many are left as are free in each row, both met in order.
    kept[kept < 0] = after[left]
    return kept.reshape(new.shape)
