"""Runs in vLLM's environment: what the plug-in changed in the engine's real modules, as JSON."""

from __future__ import annotations

import inspect
import json
import logging
import sys
from types import SimpleNamespace
from typing import Any

import torch
import vllm.plugins
from vllm.distributed.eplb import eplb_state
from vllm.distributed.eplb.policy import default


def names() -> dict[str, Any]:
    """Where each of the functions that the plug-in may change comes from, and what a registered policy answers."""
    functions = {
        "policy": eplb_state.EPLB_POLICIES["default"],
        "imported policy": default.DefaultEplbPolicy,
        "maps": eplb_state.compute_logical_maps,
        "commit": eplb_state._commit_eplb_maps,
        "commit layer": eplb_state._commit_eplb_maps_for_layer,
        "add_model": eplb_state.EplbState.add_model,
        "update_mapping": eplb_state.EplbState.update_mapping,
    }
    homes = {name: inspect.getmodule(getattr(f, "__code__", f)).__name__ for name, f in functions.items()}  # type: ignore[union-attr]
    old = torch.arange(24).repeat(2, 1) % 16
    load = torch.tensor([[0] * 16, list(range(1, 17))])
    answer = eplb_state.EPLB_POLICIES["default"].rebalance_experts(load, 24, 1, 1, 4, old)
    return {"homes": homes, "row without load stays": torch.equal(answer[0], old[0]), "rows": answer.tolist()}


def drift() -> dict[str, Any]:
    """D1: a constant load, a window longer than the interval, a layer that moves: what the next rebalance is told."""
    before, after = torch.tensor([0, 1, 2, 3, 0, 1]), torch.tensor([3, 2, 1, 0, 2, 3])
    truth = torch.tensor([60, 10, 20, 30])
    window = torch.tensor([[30, 5, 20, 30, 30, 5]] * 8, dtype=torch.int32)[:, None].clone()
    state = SimpleNamespace(
        physical_to_logical_map=before[None].clone(),
        physical_to_logical_map_buffer=before[None].clone(),
        logical_to_physical_map=torch.full((1, 4, 8), -1),
        logical_replica_count=torch.zeros(1, 4, dtype=torch.int64),
        expert_load_window=window,
    )
    eplb_state._commit_eplb_maps_for_layer(state, after, 0)
    read = torch.zeros(8, 4, dtype=torch.int64).scatter_add_(1, after.expand(8, 6), window[:, 0].long())
    return {"truth": truth.tolist(), "read": read[0].tolist()}


def other() -> dict[str, Any]:
    """An engine whose function takes other parameters; the engine's own goes on."""

    def compute_logical_maps(maps: torch.Tensor, experts: int) -> str:
        return "the engine's"

    eplb_state.compute_logical_maps = compute_logical_maps
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("vllm.eplb_core").addHandler(handler)
    vllm.plugins.load_general_plugins()
    from eplb_core.adapters.vllm.plugin import active_parts

    return {"parts": active_parts(), "lines": lines, "answer": eplb_state.compute_logical_maps(torch.zeros(1), 1)}


if __name__ == "__main__":
    mode = sys.argv[1]
    if mode != "other":
        vllm.plugins.load_general_plugins()
    print(json.dumps({"names": names, "drift": drift, "other": other}[mode]()))
