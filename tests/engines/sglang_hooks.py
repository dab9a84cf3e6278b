"""Runs in SGLang's environment: what its own functions answer, for comparison with and without the plug-in; JSON."""

from __future__ import annotations

import hashlib
import json
import random
import sys
from types import SimpleNamespace
from typing import Any

import sglang_loading  # type: ignore[import-not-found]
import torch
from sglang.srt.eplb import eplb_algorithms, eplb_manager, expert_location, expert_location_dispatch
from sglang.srt.plugins import load_plugins

FIELDS = (
    "physical_to_logical_map",
    "logical_to_all_physical_map",
    "logical_to_all_physical_map_cpu",
    "logical_to_all_physical_map_num_valid",
    "logical_to_rank_dispatch_physical_map",
)


def digest(*tensors: torch.Tensor | None) -> str:
    text = "|".join("-" if t is None else f"{t.dtype} {tuple(t.shape)} {t.tolist()}" for t in tensors)
    return hashlib.sha256(text.encode()).hexdigest()


def random_row(rng: random.Random, experts: int, slots: int) -> list[int]:
    row = [*range(experts), *(rng.randrange(experts) for _ in range(slots - experts))]
    rng.shuffle(row)
    return row


def maps() -> dict[str, Any]:
    """All maps of random layouts with pairs on a rank, on one node and on two, for each backend and algorithm."""
    rng = random.Random(0)
    answers = {}
    for case in range(6):
        nodes, ranks = rng.choice([(1, 2), (1, 4), (2, 4)])
        row = random_row(rng, 4, 4 * ranks)
        for a2a, dispatch in (("deepep", "static"), ("deepep", "dynamic"), ("none", "dynamic")):
            for rank in range(ranks):
                metadata, _ = sglang_loading.metadata_of(rank, ranks, row, a2a, dispatch, nodes)
                answers[f"{case} {a2a} {dispatch} {rank}"] = digest(*(getattr(metadata, f) for f in FIELDS))
    return answers


def placement() -> dict[str, Any]:
    """A rebalance for a load that drifts: how many slots change, and layers without load."""
    row = [*range(4), 0, 1]
    live, _ = sglang_loading.metadata_of(0, 2, row, "deepep", "static")
    expert_location.set_global_expert_location_metadata(live, allow_overwrite=True)
    load = torch.tensor([[10, 10, 10, 10]] * 8, dtype=torch.int32)
    load[3] = 0
    arguments = {
        "tokens_per_expert": load[None].repeat(3, 1, 1),
        "num_physical_experts": 6,
        "num_local_physical_experts": 3,
        "num_groups": None,
        "num_nodes": 1,
        "algorithm": eplb_algorithms.EplbAlgorithm.deepseek,
    }
    p2l, l2p, count = eplb_algorithms.rebalance_experts(**arguments)
    return {
        "changed": int((p2l != torch.tensor(row)).sum()),
        "shapes": [list(t.shape) for t in (p2l, l2p[..., :1], count)],
        "idle": p2l[3].tolist(),
        "total": count.sum(dim=1).tolist(),
    }


def update() -> dict[str, Any]:
    """Two layers of a new layout: in place, the others untouched."""
    live, _ = sglang_loading.metadata_of(1, 2, [0, 1, 2, 3, 3, 0], "deepep", "static")
    other, _ = sglang_loading.metadata_of(1, 2, [3, 1, 2, 0, 3, 0], "deepep", "static")
    addresses = [getattr(live, field).data_ptr() for field in FIELDS]
    live.update(other, [1, 5])
    return {
        "in place": addresses == [getattr(live, field).data_ptr() for field in FIELDS],
        "maps": digest(*(getattr(live, field) for field in FIELDS)),
    }


def dispatch() -> dict[str, Any]:
    """Masked ids, small batches, and the whole inside torch.compile."""
    info = SimpleNamespace(
        partial_logical_to_rank_dispatch_physical_map=torch.tensor([4, 1, 2, 3]),
        partial_logical_to_all_physical_map=torch.tensor([[0, 4, -1], [1, -1, -1], [2, -1, -1], [3, 5, -1]]),
        partial_logical_to_all_physical_map_num_valid=torch.tensor([2, 1, 1, 2]),
        rank_invariant=True,
        ep_dispatch_algorithm="dynamic",
    )
    ids = torch.tensor([[0, 3], [-1, -1], [1, 2]], dtype=torch.int32)
    static = expert_location_dispatch._topk_ids_logical_to_physical_static(ids, info)
    dynamic = expert_location_dispatch._topk_ids_logical_to_physical_dynamic(ids, info)
    even_rows = torch.tensor([[0], [1]] * 64)
    spread = expert_location_dispatch._topk_ids_logical_to_physical_dynamic(even_rows, info)[::2]
    # The functions as the engine calls them, in one graph.
    graph: Any = torch.compile(
        expert_location_dispatch.topk_ids_logical_to_physical, backend="eager", fullgraph=True, dynamic=False
    )
    return {
        "static": static.tolist(),
        "dynamic": dynamic.tolist(),
        "dtypes": [str(static.dtype), str(dynamic.dtype)],
        "replicas used": sorted(set(spread.view(-1).tolist())),
        "compiled": torch.equal(graph(ids, info), dynamic),
    }


def other() -> dict[str, Any]:
    """The parts that are on in an engine whose `update` takes other parameters."""
    from eplb_core.adapters.sglang.plugin import active_parts, inactive_hooks

    return {"parts": active_parts(), "not in effect": inactive_hooks()}


def changed_update(self: Any, layers: list[int], other: Any) -> None: ...


def changed_rebalance(self: Any, layers: list[int]) -> None: ...


if __name__ == "__main__":
    if "other" in sys.argv:
        expert_location.ExpertLocationMetadata.update = changed_update
    if "other_manager" in sys.argv:
        eplb_manager.EPLBManager.rebalance = changed_rebalance
    load_plugins()
    modes = {"maps": maps, "placement": placement, "update": update, "dispatch": dispatch, "other": other}
    modes["other_manager"] = other
    print(json.dumps({name: modes[name]() for name in sys.argv[1:]}))
