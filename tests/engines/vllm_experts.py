# ruff: noqa: E402  compiled parts that are missing must be stood in for before the engine is imported
"""What `ExpertStore.of_module` says of vLLM's layer of experts, for each quantization, beside what vLLM itself moves.

Runs in vLLM's environment, without a GPU: the layer is as a rank of two makes it, before post-processing and after it,
with kernels that do nothing. Prints a line each, and as the last one a JSON object.
"""

from __future__ import annotations

import json
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import stub_finder  # type: ignore[import-not-found]  # beside this script
import torch

for name in (
    "_C",
    "_C_stable_libtorch",
    "_moe_C",
    "_qutlass_C",
    "vllm_flash_attn",
    "vllm_flash_attn.flash_attn_interface",
):
    sys.modules[f"vllm.{name}"] = stub_finder._Stub(f"vllm.{name}")


def kernel(name: str) -> Any:
    """Stands in for one of the engine's compiled kernels: only shapes count here."""

    def call(*given: Any, **named: Any) -> Any:
        if name.endswith("marlin_repack"):
            sizes = [each for each in (*given, *named.values()) if isinstance(each, int) and not isinstance(each, bool)]
            rows, columns, bits = sizes[:3]
            return torch.empty((rows // 16, columns * 16 * bits // 32), dtype=torch.int32)
        tensors = [each for each in (*given, *named.values()) if isinstance(each, torch.Tensor)]
        return torch.empty_like(tensors[0]) if tensors else True

    return call


native = torch._ops._OpNamespace.__getattr__
torch._ops._OpNamespace.__getattr__ = lambda self, name: (  # type: ignore[method-assign]
    kernel(name) if self.name in ("_C", "_moe_C") and not name.startswith("__") else native(self, name)
)
torch.library.register_fake = lambda *given, **named: lambda function: function

import vllm.platforms
from vllm.platforms import cuda


class Platform(cuda.CudaPlatformBase):  # type: ignore[misc]
    """An H100 whose tensors are in the host's memory."""

    device_type = "cpu"

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> Any:
        return cuda.DeviceCapability(9, 0)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "NVIDIA H100"

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return 132


vllm.platforms._current_platform = Platform()

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.fused_moe import config as moe
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization import get_quantization_config

from eplb_core import ExpertStore

MODEL = SimpleNamespace(quantization_config=None, dtype=torch.bfloat16, quantization=None, hf_config=None)
S, P, HIDDEN, INTER = 6, 12, 512, 256


def compressed(**groups: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": None, "input_activations": None, **groups}
    kind = group.pop("format", "int-quantized")
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}, "ignore": []}


def numbers(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False, **more}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "lm_head": False}
AWQ = {"quant_method": "awq", "bits": 4, "w_bit": 4, "group_size": 128, "q_group_size": 128, "zero_point": True}
TOKENS = {"dynamic": True, "strategy": "token"}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("", {}),
    "none, biases": ("", {}),
    "fp8 tensor, static": ("fp8", {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8 tensor, dynamic": ("fp8", {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "fp8 block": ("fp8", {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}),
    "fp8 channel": (
        "compressed-tensors",
        compressed(
            weights=numbers(8, "float", "channel"),
            input_activations=numbers(8, "float", "token") | TOKENS,
            format="float-quantized",
        ),
    ),
    "int8 channel": (
        "compressed-tensors",
        compressed(weights=numbers(8, "int", "channel"), input_activations=numbers(8, "int", "token") | TOKENS),
    ),
    "w4a16 group": (
        "compressed-tensors",
        compressed(weights=numbers(4, "int", "group", group_size=128), format="pack-quantized"),
    ),
    "nvfp4": (
        "compressed-tensors",
        compressed(
            weights=numbers(4, "float", "tensor_group", group_size=16),
            input_activations=numbers(4, "float", "tensor_group", group_size=16) | {"dynamic": "local"},
            format="nvfp4-pack-quantized",
        ),
    ),
    "modelopt nvfp4": (
        "modelopt_fp4",
        {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": None, "exclude_modules": []}},
    ),
    "modelopt fp8": (
        "modelopt",
        {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": []}},
    ),
    "gptq marlin": ("gptq_marlin", GPTQ),
    "awq marlin": ("awq_marlin", AWQ),
    "moe_wna16": ("moe_wna16", AWQ | {"version": "gemm"}),
    "mxfp4": ("mxfp4", {"quant_method": "mxfp4"}),
    "gpt-oss mxfp4": ("gpt_oss_mxfp4", {"quant_method": "mxfp4"}),
    "experts int8": ("experts_int8", {"quant_method": "experts_int8"}),
}


def layer_of(name: str, quantization: str, config: dict[str, Any]) -> Any:
    """The layer as rank 0 of two makes it, without a server around it."""
    ranks = moe.FusedMoEParallelConfig(
        tp_size=1, pcp_size=1, dp_size=2, ep_size=2, tp_rank=0, pcp_rank=0, dp_rank=0, ep_rank=0, sp_size=1,
        use_ep=True, all2all_backend="allgather_reducescatter", enable_eplb=False,
    )  # fmt: skip
    sizes = moe.FusedMoEConfig(
        num_experts=P, experts_per_token=2, hidden_dim=HIDDEN, intermediate_size=INTER, num_local_experts=S,
        num_logical_experts=P, activation=MoEActivation.from_str("silu"), device="cpu",
        routing_method=moe.RoutingMethodType.Default, moe_parallel_config=ranks, in_dtype=torch.bfloat16,
        has_bias="biases" in name or "gpt-oss" in name,
    )  # fmt: skip
    manager = ExpertMapManager(64, 2, P, 0, None, ranks, "linear", True)
    given = get_quantization_config(quantization).from_config(config) if quantization else None
    if given is not None:
        given.packed_modules_mapping = {}
    return RoutedExperts("model.layers.0.mlp.experts", torch.bfloat16, sizes, given, manager)


def answer(layer: Any, **options: Any) -> dict[str, Any] | str:
    """Names and shapes of what is in the store, or the refusal."""
    try:
        store = ExpertStore.of_module(layer, S, num_slots=P, **options)
    except ValueError as error:
        return str(error)
    return {name: list(store.tensor_row(name, 0).shape) for name in (*store.names, *store.whole_names)}


def own(layer: Any) -> list[str]:
    """Names of what vLLM itself moves."""
    moved = {weight.data_ptr() for weight in layer.get_expert_weights()}
    return [name for name, held in layer.named_parameters() if held.data_ptr() in moved]


def said_of(layer: Any) -> dict[str, Any]:
    held = {name: list(tensor.shape) for name, tensor in (*layer.named_parameters(), *layer.named_buffers())}
    moves = own(layer)
    named = answer(layer, ignore=["_expert_map", "*strides?"])
    return {"held": held, "own": moves, "bare": answer(layer), "named": named}


def main() -> None:
    warnings.simplefilter("ignore")
    said: dict[str, Any] = {}
    parallel_state._TP, parallel_state._DP = (SimpleNamespace(world_size=1, rank_in_group=0) for _ in range(2))
    parallel_state._EP = stub_finder._anything("Group")
    parallel_state._EP.world_size, parallel_state._EP.rank_in_group = 2, 0
    config = VllmConfig()
    with set_current_vllm_config(config):
        # The engine's list of all layers: another one must not be taken for a part of this one.
        config.compilation_config.static_forward_context["model.layers.1.mlp.experts"] = layer_of("none", "", {})
        for name, (quantization, given) in CONFIGS.items():
            object.__setattr__(config, "model_config", MODEL if "gpt-oss" in name else None)
            layer = layer_of(name, quantization, given)
            said[name] = {"made": said_of(layer)}
            layer.quant_method.process_weights_after_loading(layer)
            said[name]["processed"] = said_of(layer)
    for name, stages in said.items():
        found = stages["processed"]["named"]
        print(f"{name:22} {found if isinstance(found, str) else ', '.join(found)}")
    print(json.dumps({"said": said}))


if __name__ == "__main__":
    main()
