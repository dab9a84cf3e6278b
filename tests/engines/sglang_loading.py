# ruff: noqa: E402  compiled parts that are missing must be stood in for before the engine is imported
"""Runs in SGLang's environment: which slots does each rank load, and which slots do tokens go to?

Two ranks of three slots; expert 3 has both of its replicas on rank 1 and hot experts send tokens to all slots. A slot
that a rank sends tokens to and that its owner never loads is the fault: the script prints REPRODUCED and exits with 1,
else NOT_REPRODUCED and 0. `grown`: four ranks instead, with layers that were built for two and a fused shared expert;
every loader's writes are printed as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any
from unittest import mock

import stub_finder  # type: ignore[import-not-found]  # beside this script

stub_finder.install(stub_finder.SGLANG)

import torch
from sglang.srt.eplb import expert_location
from sglang.srt.eplb.expert_location_dispatch import ExpertLocationDispatchInfo, topk_ids_logical_to_physical
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_context

EXPERTS, LAYERS, TOKENS = 4, 8, 1000
ROW = [0, 1, 2, 3, 3, 0]
GROWN_ROW = [0, 1, 2, 3, 3, 0, 1, 2, 3, 0, 1, 2]


def metadata_of(rank: int, ranks: int, row: list[int], a2a: str, dispatch: str, nodes: int = 1) -> tuple[Any, Any]:
    """What rank `rank` builds when the server starts with this layout, and the context in which it lives."""
    shape = expert_location.ModelConfigForExpertLocation(num_layers=LAYERS, num_logical_experts=EXPERTS)
    arguments = get_context().override_server_args(
        device="cpu",
        ep_size=ranks,
        nnodes=nodes,
        moe_a2a_backend=a2a,
        ep_dispatch_algorithm=dispatch,
        ep_num_redundant_experts=len(row) - EXPERTS,
        init_expert_location=json.dumps({"physical_to_logical_map": [row] * LAYERS}),
    )
    counts = mock.patch.object(
        expert_location.ModelConfigForExpertLocation, "from_model_config", staticmethod(lambda config: shape)
    )
    with arguments, counts:
        metadata = expert_location.compute_initial_expert_location_metadata(model_config=None, moe_ep_rank=rank)
    return metadata, arguments


def slots_loaded(metadata: Any, rank: int, layer: int) -> set[int]:
    """What the weight loader of `rank` writes: its own among the slots that the engine names for each expert."""
    named = {slot for expert in range(EXPERTS) for slot in metadata.logical_to_all_physical(layer, expert)}
    return {slot for slot in named if slot // 3 == rank}


def slots_dispatched(metadata: Any, ranks: int, a2a: str, dispatch: str, layer: int) -> set[int]:
    topk_ids = torch.arange(EXPERTS, dtype=torch.int64).repeat(TOKENS)[:, None]
    with get_context().override_server_args(
        device="cpu", ep_size=ranks, nnodes=1, moe_a2a_backend=a2a, ep_dispatch_algorithm=dispatch
    ):
        expert_location.set_global_expert_location_metadata(metadata, allow_overwrite=True)
        info = ExpertLocationDispatchInfo.init_new(layer_id=layer)
        return set(topk_ids_logical_to_physical(topk_ids, info).view(-1).tolist())


def reproduce() -> int:
    reproduced = False
    torch.manual_seed(0)
    for a2a, dispatch in (("deepep", "static"), ("deepep", "dynamic"), ("none", "dynamic")):
        ranks = [metadata_of(rank, 2, ROW, a2a, dispatch)[0] for rank in (0, 1)]
        lost = 0
        for layer in range(LAYERS):
            loaded = slots_loaded(ranks[0], 0, layer) | slots_loaded(ranks[1], 1, layer)
            sent = {slot for rank in ranks for slot in slots_dispatched(rank, 2, a2a, dispatch, layer)}
            lost += not sent <= loaded
        print(f"{a2a}, {dispatch}: tokens go to slots that nothing loads on {lost} of {LAYERS} layers")
        reproduced |= lost > 0
    print("REPRODUCED" if reproduced else "NOT_REPRODUCED")
    return int(reproduced)


def layer_of(rank: int) -> Any:
    """A layer as rank `rank` built it when there were two: three routed slots and a shared one."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    layer = FusedMoE.__new__(FusedMoE)
    torch.nn.Module.__init__(layer)
    vars(layer).update(
        layer_id=0,
        quant_config=None,
        quant_method=None,
        uses_expert_location=True,
        moe_ep_size=2,
        num_fused_shared_experts=1,
        _expert_storage_rank=rank,
        _num_local_routed=3,
        _num_global_routed=6,
        _has_fused_shared=True,
        num_local_experts=4,
    )
    return layer


def grown() -> int:
    """Two ranks that were there before the scale-up to four load all experts, the shared one too."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.quantization import moe_wna16

    writes: dict[str, dict[str, list[int]]] = {}
    for rank in (0, 1):
        metadata, _ = metadata_of(rank, 4, GROWN_ROW, "deepep", "static")
        expert_location.set_global_expert_location_metadata(metadata, allow_overwrite=True)
        layer = layer_of(rank)
        by_expert: dict[str, list[int]] = {}
        for expert in range(EXPERTS + 1):
            record: list[int] = []
            with mock.patch.object(
                FusedMoE,
                "_weight_loader_impl",
                lambda self, record=record, **kwargs: record.append(kwargs["expert_id"]),
            ):
                layer.weight_loader(torch.nn.Parameter(torch.zeros(1)), torch.zeros(1), "w", "w1", expert)
            by_expert[f"weight {expert}"] = sorted(record)
            if expert < EXPERTS:
                by_expert[f"zero points {expert}"] = sorted(moe_wna16._local_expert_ids(layer, expert))
        writes[str(rank)] = by_expert
    print(json.dumps(writes))
    return 0


def lookups() -> int:
    """Answers of the lookup itself, and what a move does to them."""
    metadata, _ = metadata_of(1, 2, ROW, "deepep", "static")
    moved, _ = metadata_of(1, 2, [3, 1, 2, 0, 3, 0], "deepep", "static")
    answers: dict[str, Any] = {
        "static picks": metadata.logical_to_rank_dispatch_physical_map.tolist(),
        "candidates": metadata.logical_to_all_physical_map[0, 3].tolist(),
        "pair": metadata.logical_to_all_physical(0, 3),
        "draft": metadata.logical_to_all_physical(LAYERS, 2),
        "draft whole": metadata.logical_to_all_physical(LAYERS, 1, True),
        "whole": metadata.logical_to_all_physical(0, 1, require_global_experts=True),
    }
    for name, layer, expert in (("negative", 0, -1), ("beyond", 0, EXPERTS), ("layer", -1, 0)):
        try:
            answers[name] = metadata.logical_to_all_physical(layer, expert)
        except IndexError as error:  # noqa: PERF203
            answers[name] = f"IndexError: {error}"
    metadata.update(moved, [1])
    answers["kept"] = metadata.logical_to_all_physical(0, 3)
    answers["moved"] = metadata.logical_to_all_physical(1, 3)
    metadata.physical_to_logical_map_cpu[2] = 0  # no layout of ours: experts without a slot
    answers["fallback"] = metadata.logical_to_all_physical(2, 0)
    print(json.dumps(answers))
    return 0


if __name__ == "__main__":
    load_plugins()
    if "EPLB_CORE" in os.environ:
        from eplb_core.adapters.sglang.plugin import inactive_hooks

        if inactive_hooks():
            raise SystemExit(f"not in effect: {inactive_hooks()}")
    sys.exit({"reproduce": reproduce, "grown": grown, "lookups": lookups}[sys.argv[1]]())
