# ruff: noqa: E402  compiled parts that are missing must be stood in for before the engine is imported
"""What `ExpertStore.of_module` says of SGLang's layer of experts, for each quantization, as a rank of two makes it.

Before post-processing and, where that needs no kernels, after it. Runs in SGLang's environment, without a GPU. Prints a
line each, and as the last one a JSON object.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

import stub_finder  # type: ignore[import-not-found]  # beside this script

stub_finder.install(stub_finder.SGLANG)

import sglang.srt.utils.common
import torch
from sglang.srt import runtime_context

# As on a GPU that all of these quantizations are for; nothing is computed.
sglang.srt.utils.get_device_capability = sglang.srt.utils.common.get_device_capability = lambda device_id=0: (9, 0)
torch.cuda.get_device_capability = lambda device=None: (9, 0)
runtime_context.PlatformContext.is_blackwell = True

from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.layers.quantization.awq import awq
from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.runtime_context import get_context

from eplb_core import ExpertStore

awq.verify_marlin_supported = lambda *given, **named: None
METHODS = {**QUANTIZATION_METHODS, "mxfp4": Mxfp4Config}
S, P, HIDDEN, INTER = 6, 12, 512, 256


def compressed(kind: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}, "ignore": []}


def numbers(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False, **more}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "lm_head": False}
AWQ = {"quant_method": "awq", "bits": 4, "w_bit": 4, "group_size": 128, "q_group_size": 128, "zero_point": True}
FP8 = {"quant_method": "fp8"}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("", {}),
    "none, biases": ("", {}),
    "fp8 tensor, static": ("fp8", FP8 | {"activation_scheme": "static"}),
    "fp8 tensor, dynamic": ("fp8", FP8 | {"activation_scheme": "dynamic"}),
    "fp8 block": ("fp8", FP8 | {"activation_scheme": "dynamic", "weight_block_size": [128, 128]}),
    "fp8 channel": ("w8a8_fp8", {"quant_method": "w8a8_fp8", "is_dynamic": True}),
    "fp8 channel, compressed tensors": (
        "compressed-tensors",
        compressed(
            "float-quantized", numbers(8, "float", "channel"), numbers(8, "float", "token") | {"dynamic": True}
        ),
    ),
    "int8 channel": ("w8a8_int8", {}),
    "int8 block": (
        "blockwise_int8",
        {"quant_method": "blockwise_int8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
    "w4a16 group": ("compressed-tensors", compressed("pack-quantized", numbers(4, "int", "group", group_size=128))),
    "w4a16 act order": (
        "compressed-tensors",
        compressed("pack-quantized", numbers(4, "int", "group", group_size=128, actorder="group")),
    ),
    "nvfp4": (
        "compressed-tensors",
        compressed(
            "nvfp4-pack-quantized",
            numbers(4, "float", "tensor_group", group_size=16),
            numbers(4, "float", "tensor_group", group_size=16) | {"dynamic": "local"},
        ),
    ),
    "modelopt nvfp4": (
        "modelopt_fp4",
        {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": "", "exclude_modules": []}},
    ),
    "modelopt fp8": (
        "modelopt_fp8",
        {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": []}},
    ),
    "gptq marlin": ("gptq_marlin", GPTQ),
    "gptq marlin, act order": ("gptq_marlin", GPTQ | {"desc_act": True}),
    "awq marlin": ("awq_marlin", AWQ),
    "moe_wna16": ("moe_wna16", AWQ | {"version": "gemm"}),
    "mxfp4": ("mxfp4", {"quant_method": "mxfp4"}),
    "w4afp8": ("w4afp8", {"quant_method": "w4afp8", "activation_scheme": "dynamic"}),
}  # fmt: skip
WITHOUT_KERNELS = (
    *("none", "none, biases", "fp8 block", "fp8 channel", "fp8 channel, compressed tensors", "int8 channel"),
    *("int8 block", "moe_wna16", "w4afp8"),
)
"""Whose post-processing runs on a machine without a GPU."""


def layer_of(name: str, quantization: str, config: dict[str, Any]) -> Any:
    """The layer as a rank of two makes it, without a server around it."""
    layer = FusedMoE.__new__(FusedMoE)
    torch.nn.Module.__init__(layer)
    vars(layer).update(
        layer_id=0, hidden_size=HIDDEN, num_experts=P, num_local_experts=S, moe_ep_size=2, moe_ep_rank=0, moe_tp_size=1,
        moe_tp_rank=0, num_fused_shared_experts=0, use_triton_kernels=False, use_flashinfer_trtllm_moe=False,
        use_flashinfer_mxfp4_moe=False, use_deep_gemm=False, layer_name="model.layers.0.mlp.experts", with_bias=False,
        intermediate_size_per_partition=INTER, params_dtype=torch.bfloat16, enable_flashinfer_cutlass_moe=False,
        hidden_size_unpadded=HIDDEN, _num_global_routed=P, _num_local_routed=S, _mega_moe_weights_built=False,
        _has_fused_shared=False, uses_expert_location=True, is_draft=False, _expert_storage_rank=0, top_k=2,
        use_presharded_weights=False, reduce_results=False, weight_load_method=None,
    )  # fmt: skip
    layer.moe_runner_config = MoeRunnerConfig(
        num_experts=P, num_local_experts=S, hidden_size=HIDDEN, intermediate_size_per_partition=INTER, layer_id=0,
        top_k=2, num_fused_shared_experts=0, params_dtype=torch.bfloat16, activation="silu", layer=layer,
    )  # fmt: skip
    method = None
    if quantization:
        given = METHODS[quantization].from_config(config)
        given.packed_modules_mapping = {}
        layer.quant_config = given
        method = given.get_quant_method(layer, "model.layers.0.mlp.experts")
    layer.quant_method = UnquantizedFusedMoEMethod(False, False, False) if method is None else method
    layer.quant_method.create_weights(
        layer=layer, num_experts=S, hidden_size=HIDDEN, intermediate_size_per_partition=INTER,
        params_dtype=torch.bfloat16, weight_loader=layer.weight_loader, with_bias="bias" in name or name == "mxfp4",
        moe_intermediate_size=INTER,
    )  # fmt: skip
    return layer


def answer(layer: Any, **options: Any) -> dict[str, Any] | str:
    """Names and shapes of what is in the store, or the refusal."""
    try:
        store = ExpertStore.of_module(layer, S, num_slots=P, **options)
    except ValueError as error:
        return str(error)
    return {name: list(store.tensor_row(name, 0).shape) for name in (*store.names, *store.whole_names)}


def said_of(layer: Any) -> dict[str, Any]:
    held = {name: list(tensor.shape) for name, tensor in (*layer.named_parameters(), *layer.named_buffers())}
    return {"held": held, "bare": answer(layer), "named": answer(layer, ignore=["quant_method.*"])}


def main() -> None:
    warnings.simplefilter("ignore")
    said: dict[str, Any] = {}
    with get_context().override_server_args(device="cpu", ep_size=2, nnodes=1, moe_a2a_backend="none"):
        for name, (quantization, config) in CONFIGS.items():
            layer = layer_of(name, quantization, config)
            said[name] = {"made": said_of(layer)}
            if name in WITHOUT_KERNELS:
                layer.quant_method.process_weights_after_loading(layer)
                said[name]["processed"] = said_of(layer)
    for name, stages in said.items():
        found = stages["made"]["named"]
        print(f"{name:32} {found if isinstance(found, str) else ', '.join(found)}")
    print(json.dumps({"families": said}))


if __name__ == "__main__":
    main()
