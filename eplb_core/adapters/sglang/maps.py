"""SGLang's maps and placement by this library: tensors in, tensors out; nothing of SGLang is imported here.

Shapes as in SGLang 0.5.23: rows are the model's layers, dense ones too, and lists of slots are padded with -1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from eplb_core._arrays import FloatArray, check_load, to_ids, to_numpy
from eplb_core.adapters.balancers import Balancers
from eplb_core.adapters.filled import keep_filled
from eplb_core.balancer.balancer import DEFAULT_MOVE_COST
from eplb_core.balancer.notes import tell
from eplb_core.dispatch.even import even_dispatch_table
from eplb_core.dispatch.static import static_dispatch_table
from eplb_core.exposition import Placements
from eplb_core.layout import ExpertLayout, count_replicas
from eplb_core.placement.place import place
from eplb_core.topology import Topology

# Passes of a recorder's buffer are added up to this many windows: more say no more, and the search sees each.
WINDOWS = 32
_KNUTH, _GOLDEN, _WORD = 2654435769, 40503, 0xFFFFFFFF


def rebalance(
    tokens_per_expert: torch.Tensor,
    num_physical_experts: int,
    num_local_physical_experts: int,
    *,
    num_nodes: int,
    num_groups: int | None = None,
    live: torch.Tensor | None = None,
    balancers: Balancers | None = None,
    move_cost: float = DEFAULT_MOVE_COST,
    placements: Placements | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Place experts as SGLang's `rebalance_experts` is asked to, from the live map on.

    Args:
        tokens_per_expert: Counts of each pass, `[passes, L, E]`, any device; passes without load do not count.
        num_physical_experts: Slots of all ranks.
        num_local_physical_experts: Slots of each rank.
        num_nodes: Nodes; a divisor of the ranks.
        num_groups: Groups that must stay on one node each; None = experts go anywhere.
        live: The map in use, `[L, P]`; where it is no layout of these ranks, the placement is from nothing.
        balancers: What "auto" remembers between calls: all passes of a call together are one window. None, and where
            `live` is no layout of these ranks: the passes alone are placed.
        move_cost: Of "auto": what a transfer costs, in windows of its layer's time.
        placements: Where operators see what `place` was shown and what it promises; a Balancer tells its own.
        options: Passed on to `place`.

    Returns:
        `physical_to_logical_map` int64 `[L, P]`, `logical_to_all_physical_map` `[L, E, K]`, and the number of slots of
        each expert `[L, E]`; on the CPU. A layer without load keeps its row.

    Raises:
        ValueError: A count is NaN, infinite or negative; the text says in which pass.
    """
    counts = to_numpy(tokens_per_expert, "tokens_per_expert")
    topology = Topology(num_physical_experts // num_local_physical_experts, num_nodes)
    windows = _windows(counts)
    grouped = num_groups is not None and num_nodes > 1
    current = _live_layout(live, windows.shape, num_physical_experts, topology)
    if grouped:
        options |= {"locality": "group", "num_groups": num_groups}
    if balancers is not None and current is not None:
        placed = balancers.layout_of(windows.sum(axis=0), current, move_cost=move_cost, **options)
    else:
        if balancers is not None:
            balancers.forget(windows.shape[1:])
        answer = place(windows, topology, num_slots=num_physical_experts, current=current, **options)
        if placements is not None:
            tell(placements, windows, current, answer)
        placed = keep_filled(answer.layout, current)
    maps = (placed.physical_to_logical_map, placed.logical_to_physical_map, placed.replica_count)
    p2l, l2p, count = (torch.from_numpy(np.array(each)) for each in maps)
    return p2l, l2p, count


def fold_passes(counts: torch.Tensor) -> torch.Tensor:
    """Sums of passes that follow each other, at most `WINDOWS` of them; `[passes, L, E]`, on its device, no sync."""
    if len(counts) <= WINDOWS:
        return counts
    ends = [len(counts) * (k + 1) // WINDOWS for k in range(WINDOWS)]
    return torch.stack([counts[start:end].sum(dim=0) for start, end in zip([0, *ends], ends, strict=False)])


def _windows(counts: Any) -> FloatArray:
    """At most `WINDOWS` windows of the passes that have load, in their order, as equal in number as can be."""
    load = check_load(counts, "tokens_per_expert", (3,), outer="pass")  # as given: a sum hides what is wrong
    used = load[load.any(axis=(1, 2))]
    if not len(used):
        return load[:1] if len(load) else np.zeros((1, *counts.shape[1:]))
    starts = np.arange(min(WINDOWS, len(used))) * len(used) // min(WINDOWS, len(used))
    windows: FloatArray = np.add.reduceat(used, starts, axis=0)
    return windows


def _live_layout(
    live: torch.Tensor | None, shape: tuple[int, ...], slots: int, topology: Topology
) -> ExpertLayout | None:
    if live is None or tuple(live.shape) != (shape[1], slots):
        return None
    p2l = to_ids(live, "live")
    if p2l.min(initial=0) < 0 or p2l.max(initial=0) >= shape[2] or (count_replicas(p2l, shape[2]) == 0).any():
        return None
    return ExpertLayout(p2l, shape[2], topology=topology)


def candidates(layout: ExpertLayout, rank: int | None, *, prefer_same_node: bool) -> torch.Tensor:
    """All slots of each expert, as SGLang narrows them for a rank.

    Args:
        layout: Where the experts are.
        rank: The rank that will dispatch; None = not narrowed.
        prefer_same_node: Whether slots on the rank's node go before others.

    Returns:
        int64 `[L, E, K]`, ascending, padded with -1. For `rank` an expert with several slots keeps one: the first on
        the rank, else the first on its node where the node has some but not all; where neither is, all stay.
    """
    l2p = layout.logical_to_physical_map
    if rank is None:
        return torch.from_numpy(np.array(l2p))
    owner = np.where(l2p >= 0, l2p // layout.slots_per_rank, -1)
    count = layout.replica_count
    mine = owner == rank
    chosen = mine.any(axis=2)
    first = np.where(chosen, np.argmax(mine, axis=2), 0)
    if prefer_same_node:
        node = layout.topology.rank_to_node
        near = (owner >= 0) & (node[owner] == node[rank])
        number = near.sum(axis=2)
        by_node = ~chosen & (number > 0) & (number < count)
        first = np.where(by_node, np.argmax(near, axis=2), first)
        chosen |= by_node
    narrowed = np.array(l2p)
    only = np.take_along_axis(l2p, first[..., None], axis=2)[..., 0]
    narrowed[chosen] = -1
    narrowed[chosen, 0] = only[chosen]
    most = int((narrowed >= 0).sum(axis=2).max(initial=1))
    return torch.from_numpy(np.ascontiguousarray(narrowed[..., :most]))


class Picks(NamedTuple):
    """How a rank's static table is made."""

    rank: int
    seed: int = 42
    prefer_same_node: bool = True
    even: bool = False
    """The library's even table instead of SGLang's picks."""


def static_table(layout: ExpertLayout, picks: Picks, *, narrowed: bool = False) -> torch.Tensor:
    """Return one slot per expert for a rank, int64 `[L, E]`; SGLang's picks are the same bit for bit."""
    if picks.even:
        table = even_dispatch_table(layout)
    else:
        candidates: Literal["narrowed", "all"] = "narrowed" if narrowed else "all"
        table = static_dispatch_table(
            layout, picks.seed, prefer_same_node=picks.prefer_same_node, candidates=candidates
        )
    return torch.from_numpy(np.array(table[picks.rank]))


def layout_of(metadata: Any, layers: Sequence[int] | None = None, *, num_nodes: int = 1) -> ExpertLayout:
    """Return the layout of these layers of SGLang's metadata; None = all layers."""
    p2l = metadata.physical_to_logical_map_cpu
    topology = Topology(metadata.ep_size, num_nodes)
    return ExpertLayout(p2l if layers is None else p2l[list(layers)], metadata.num_logical_experts, topology=topology)


def layout_of_candidates(l2p: torch.Tensor, num_slots: int, topology: Topology) -> ExpertLayout:
    """Return the layout whose complete lists of slots these are.

    Raises:
        ValueError: A slot is missing from the lists (they are narrowed for a rank), or is in them twice.
    """
    lists = to_ids(l2p, "logical_to_all_physical_map")
    p2l = np.full((len(lists), num_slots), -1, dtype=np.int64)
    layer, expert, at = np.nonzero(lists >= 0)
    p2l[layer, lists[layer, expert, at]] = expert
    if (p2l < 0).any() or len(layer) != p2l.size:
        raise ValueError("`logical_to_all_physical_map` must have every slot once")
    return ExpertLayout(p2l, lists.shape[1], topology=topology)


FIELDS = (
    "physical_to_logical_map",
    "physical_to_logical_map_cpu",
    "logical_to_all_physical_map",
    "logical_to_all_physical_map_cpu",
    "logical_to_all_physical_map_num_valid",
    "logical_to_rank_dispatch_physical_map",
)


def update_rows(live: Any, other: Any, layers: Iterable[int]) -> None:
    """Copy these layers' rows of all maps from `other` into `live`, in place; the others are not touched.

    Raises:
        ValueError: The two are of different ranks, or one has a map that the other lacks. Nothing is copied then.
    """
    pairs = [(getattr(live, field), getattr(other, field)) for field in FIELDS]
    if live.ep_size != other.ep_size or any(
        (a is None) != (b is None) or (a is not None and a.shape != b.shape) for a, b in pairs
    ):
        raise ValueError("the two metadata must have equal ep_size and equally shaped maps")
    rows = sorted({layer for layer in layers if 0 <= layer < pairs[0][0].shape[0]})
    for mine, theirs in pairs:
        if mine is not None:
            for row in rows:
                mine[row].copy_(theirs[row], non_blocking=True)


def dispatch_static(topk_ids: torch.Tensor, info: Any) -> torch.Tensor:
    """SGLang's static lookup; a masked id (-1) stays -1 and does not become the last expert's slot."""
    slots = info.partial_logical_to_rank_dispatch_physical_map[topk_ids].to(topk_ids.dtype)
    return torch.where(topk_ids < 0, topk_ids, slots)


def dispatch_dynamic(topk_ids: torch.Tensor, info: Any) -> torch.Tensor:
    """SGLang's dynamic pick, with masked ids kept; where ranks must agree, by a hash of row and expert.

    The row alone leaves replicas unused: of an expert that only even rows choose, and in a batch of one token.
    """
    ids = topk_ids.flatten()
    valid = info.partial_logical_to_all_physical_map_num_valid[ids]
    if getattr(info, "rank_invariant", False):  # before 0.5.20 every pick was by chance
        width = topk_ids.shape[-1] if topk_ids.dim() > 1 else 1
        row = torch.arange(ids.shape[0], dtype=torch.int64, device=ids.device) // width
        index = ((((row + ids * _GOLDEN) * _KNUTH) & _WORD) >> 16) % valid
    else:
        index = torch.randint(0, 65536, ids.shape, dtype=torch.int32, device=ids.device) % valid
    slots = info.partial_logical_to_all_physical_map[ids, index].to(topk_ids.dtype)
    return torch.where(ids < 0, ids, slots).view(topk_ids.shape)
