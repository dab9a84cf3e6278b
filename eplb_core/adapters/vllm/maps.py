"""vLLM's map tensors by this library: the inverse map, what a rank dispatches to, the window of counts after a move.

Tensors in, tensors out; nothing of vLLM is imported here. Its router does `slot = map[expert, hash(token) % count]` for
a hash of the token's row alone, and every rank has tables of its own, so what is written there decides the dispatch.
"""

from __future__ import annotations

import numpy as np
import torch

from eplb_core._arrays import ArrayLike, IntArray
from eplb_core.dispatch.even import even_dispatch_table, hash_dispatch_table
from eplb_core.dispatch.shares import replica_shares
from eplb_core.layout import ExpertLayout
from eplb_core.topology import Topology

# Tokens are hashed before they reach these backends' own all-to-all, on the rank that has them; with the others every
# rank of a group maps the same tokens and drops what is not its own, so the tables of all ranks must agree.
SENDERS_MAP = frozenset(
    ("deepep_high_throughput", "deepep_low_latency", "deepep_v2", "mori_high_throughput", "mori_low_latency", "nixl_ep")
)
# Entries of an expert where shares are written as repeats.
_WIDTH = 64


def compute_logical_maps(
    physical_to_logical_map: torch.Tensor, num_logical_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """All slots of each expert and their number, as vLLM's function of that name gives them.

    Args:
        physical_to_logical_map: Integers `[P]` or `[L, P]` on the CPU; -1 = an empty slot.
        num_logical_experts: Logical experts E.

    Returns:
        `[E, K]` or `[L, E, K]`, ascending, padded with -1, and `[E]` or `[L, E]`; the map's dtype.

    Raises:
        ValueError: Not one or two dimensions, not on the CPU, or an id is E or more.
    """
    given = physical_to_logical_map
    if given.device.type != "cpu" or given.dim() not in (1, 2) or num_logical_experts < 1:
        raise ValueError(f"the map ({list(given.shape)} on {given.device}) must be [P] or [L, P] on the CPU")
    rows = given.numpy().reshape(-1, given.shape[-1])
    if rows.size and int(rows.max()) >= num_logical_experts:
        raise ValueError(f"the map must be below {num_logical_experts}; it has {int(rows.max())}")
    # A column before the experts' takes the empty slots; a stable sort of int16 is a radix sort.
    bins = np.maximum(rows, -1) + 1
    keys = bins.astype(np.int16) if num_logical_experts < 2**15 - 1 else bins
    counts = np.array([np.bincount(row, minlength=num_logical_experts + 1) for row in bins])
    l2p = np.full((len(rows), num_logical_experts + 1, int(counts[:, 1:].max(initial=0))), -1, dtype=rows.dtype)
    places = np.arange(rows.shape[1])
    for layer, (row, key, count) in enumerate(zip(bins, keys, counts, strict=True)):
        order = key.argsort(kind="stable")[count[0] :]
        expert = row[order]
        l2p[layer, expert, places[count[0] :] - (count.cumsum() - count)[expert]] = order
    maps, count = torch.from_numpy(l2p[:, 1:].copy()), torch.from_numpy(counts[:, 1:].astype(rows.dtype))
    return (maps[0], count[0]) if given.dim() == 1 else (maps, count)


def dispatch_maps(
    physical_to_logical_map: ArrayLike | torch.Tensor,
    num_logical_experts: int,
    *,
    topology: Topology,
    rank: int | None,
    mode: str,
    expert_load: ArrayLike | torch.Tensor | None = None,
    first_layer: int = 0,
    width: int = _WIDTH,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank's router should find in its tables.

    Args:
        physical_to_logical_map: `[P]` or `[L, P]`.
        num_logical_experts: Logical experts E.
        topology: Ranks and nodes.
        rank: The rank whose tables these are; None = all ranks must have equal ones, and then the layer's number stands
            in for the rank, so that at least the layers do not all send their first token to the first replica.
        mode: "rotated": every replica, each rank and expert beginning elsewhere. "weighted": replicas repeated by the
            shares that balance `expert_load`. "even": one slot per expert, the near one first, ranks spread evenly over
            replicas (for None: "rotated").
        expert_load: `[E]` or `[L, E]`, for "weighted"; without it, or without any load, all replicas count equally.
        first_layer: The model's number of the first row.
        width: Most entries of an expert in "weighted" tables.

    Returns:
        `[E, W]` or `[L, E, W]` padded with -1, and the number of entries, `[E]` or `[L, E]`; int64 on the CPU.
    """
    p2l = np.asarray(torch.as_tensor(physical_to_logical_map).cpu(), dtype=np.int64)
    rows = np.atleast_2d(p2l)
    layout = ExpertLayout(rows, num_logical_experts, topology=topology)
    if mode == "even" and rank is not None:
        table = even_dispatch_table(layout)[rank][:, :, None]
        maps, count = table, np.ones(table.shape[:2], dtype=np.int64)
    else:
        maps, count = _repeated(layout, rank, mode, expert_load, first_layer, width)
    answer = torch.from_numpy(np.ascontiguousarray(maps)), torch.from_numpy(np.ascontiguousarray(count))
    return (answer[0][0], answer[1][0]) if p2l.ndim == 1 else answer


def _repeated(
    layout: ExpertLayout,
    rank: int | None,
    mode: str,
    expert_load: ArrayLike | torch.Tensor | None,
    first_layer: int,
    most: int,
) -> tuple[IntArray, IntArray]:
    shares = None
    width = int(layout.replica_count.max(initial=1))
    if mode == "weighted" and expert_load is not None:
        load = np.atleast_2d(np.asarray(torch.as_tensor(expert_load).cpu(), dtype=np.float64))
        shares, width = replica_shares(layout, load), max(width, most)
    if rank is not None:
        return hash_dispatch_table(layout, shares=shares, rank=rank, width=width)
    by_layer = []
    for layer in range(layout.num_layers):
        one = layout
        if layout.num_layers > 1:
            one = ExpertLayout(layout.physical_to_logical_map[[layer]], layout.num_experts, topology=layout.topology)
        part = None if shares is None else shares[[layer]]
        turn = (first_layer + layer) % layout.topology.num_ranks
        by_layer.append(hash_dispatch_table(one, shares=part, rank=turn, width=width))
    maps, count = map(np.concatenate, zip(*by_layer, strict=True))
    return maps, count


def sender(parallel_config: object, rank: int) -> int | None:
    """`rank` where each rank maps its own tokens alone, None where ranks map the same tokens and must agree."""
    backend = getattr(parallel_config, "all2all_backend", None)
    own = getattr(parallel_config, "enable_expert_parallel", False) and getattr(parallel_config, "use_all2all", False)
    return rank if own and backend in SENDERS_MAP else None


def fold_window(window: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> None:
    """Book a layer's counts by slot under its new map, in place: what was counted stays with its expert.

    Each expert's counts go to the first slot that holds it now, so that a fold by the new map gives the old truth.

    Args:
        window: Counts `[T, P]`, of one layer; written in place.
        before: Map under which they were counted, `[P]`, on the same device; -1 = an empty slot.
        after: Map from now on, `[P]`; holds every expert that `before` holds.

    Cost:
        Four small launches, no synchronization; temporary memory of the size of `window`.
    """
    slots = before.numel()
    experts = slots + 1  # ids are below the number of slots; the last row takes the empty ones
    first = torch.full((experts,), slots - 1, dtype=torch.int64, device=window.device)
    places = torch.arange(slots, device=window.device)
    first.scatter_reduce_(0, torch.where(after >= 0, after, slots).long(), places, "amin")
    target = first[torch.where(before >= 0, before, slots).long()]
    folded = torch.zeros_like(window)
    folded.scatter_add_(1, target.expand_as(window), window)
    window.copy_(folded)
