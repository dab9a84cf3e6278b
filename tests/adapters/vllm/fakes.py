"""vLLM's `eplb_state` as far as the hooks see it, and its objects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from eplb_core.adapters.vllm import maps as vllm_maps

POLICY = "vllm.distributed.eplb.policy"


class Default:
    """Stands in for vLLM's policy."""

    @classmethod
    def rebalance_experts(
        cls,
        weight: torch.Tensor,
        num_replicas: int,
        num_groups: int,
        num_nodes: int,
        num_ranks: int,
        old_global_expert_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return torch.full((len(weight), num_replicas), -7)

    @classmethod
    def preserve_intragpu_slots(cls, phy2log: Any, num_ranks: int, old_phy2log: Any) -> Any:
        return "engine"


def engine_module() -> Any:
    """vLLM's `eplb_state` as far as the hooks see it: what its functions are given and what they write."""
    module: Any = SimpleNamespace()

    def compute_logical_maps(physical_to_logical_map: torch.Tensor, num_logical_experts: int) -> Any:
        return vllm_maps.compute_logical_maps(physical_to_logical_map, num_logical_experts)

    def _commit_eplb_maps_for_layer(model_state: Any, new_physical_to_logical_map: torch.Tensor, layer: int) -> None:
        model_state.physical_to_logical_map[layer] = new_physical_to_logical_map
        maps, count = module.compute_logical_maps(new_physical_to_logical_map, 4)
        model_state.logical_to_physical_map[layer] = -1
        model_state.logical_to_physical_map[layer, :, : maps.shape[-1]] = maps
        model_state.logical_replica_count[layer] = count

    def _commit_eplb_maps(model_state: Any, new_physical_to_logical_map: torch.Tensor) -> None:
        model_state.physical_to_logical_map = new_physical_to_logical_map.clone()
        maps, count = module.compute_logical_maps(new_physical_to_logical_map, 4)
        model_state.logical_to_physical_map = torch.nn.functional.pad(maps, (0, 8 - maps.shape[-1]), value=-1)
        model_state.logical_replica_count = count

    class EplbState:
        def __init__(self, backend: str) -> None:
            self.policy = module.EPLB_POLICIES["default"]
            self.parallel_config = SimpleNamespace(
                all2all_backend=backend, enable_expert_parallel=True, use_all2all=True
            )
            self.model_states: dict[str, Any] = {}

        def add_model(self, model: Any, model_config: Any, model_name: str | None = None) -> None:
            state = SimpleNamespace(
                model=model,
                physical_to_logical_map=torch.arange(8).repeat(2, 1) % 4,
                expert_load_window=torch.zeros(3, 2, 8, dtype=torch.int32),
                last_expert_load=torch.ones(2, 4, dtype=torch.int64),
            )
            _commit_eplb_maps(state, state.physical_to_logical_map)
            self.model_states[model_config.compute_hash()] = state

        def update_mapping(self, model_config: Any, expanded_physical_to_logical: torch.Tensor) -> None:
            _commit_eplb_maps(self.model_states[model_config.compute_hash()], expanded_physical_to_logical)

    vars(module).update(
        compute_logical_maps=compute_logical_maps,
        _commit_eplb_maps_for_layer=_commit_eplb_maps_for_layer,
        _commit_eplb_maps=_commit_eplb_maps,
        EplbState=EplbState,
        create_eplb_communicator=lambda group_coordinator, backend, expert_weights, expert_buffer: backend,
        EPLB_POLICIES={"default": Default},
        DefaultEplbPolicy=Default,
        get_ep_group=lambda: SimpleNamespace(device_group=SimpleNamespace(rank=lambda: 1, size=lambda: 4)),
        get_node_count=lambda: 1,
    )
    return module


CONFIG = SimpleNamespace(compute_hash=lambda: "m")
OLD = torch.arange(8)[None] % 4
REVERSED = torch.tensor([3, 2, 1, 0, 3, 2, 1, 0])


def state_of(engine: Any, backend: str = "deepep_low_latency", slots_per_rank: int = 2) -> Any:
    """vLLM's `EplbState` with a model, and the state of that."""
    state = engine.EplbState(backend)
    state.add_model(SimpleNamespace(num_local_physical_experts=slots_per_rank), CONFIG)
    return state, state.model_states["m"]


def coordinator(rank: int) -> Any:
    """vLLM's object with the groups of two ranks."""
    group = SimpleNamespace(size=lambda: 2, rank=rank)
    return SimpleNamespace(cpu_group=group, device_group=SimpleNamespace(rank=lambda: rank, size=lambda: 2))
