"""Configs of known models give their experts; others are refused with the names that were looked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eplb_core.errors import FileFormatError
from eplb_core.simulation import read_model

V2 = {
    **{"model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408},
    **{"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "num_hidden_layers": 27},
    **{"first_k_dense_replace": 1, "moe_layer_freq": 1, "torch_dtype": "bfloat16"},
}
V3 = {
    **{"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048},
    **{"n_routed_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 61, "first_k_dense_replace": 3},
    **{"moe_layer_freq": 1, "num_nextn_predict_layers": 1, "torch_dtype": "bfloat16"},
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
QWEN2 = {
    **{"model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408},
    **{"num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24, "decoder_sparse_step": 1},
    **{"mlp_only_layers": [], "torch_dtype": "bfloat16"},
}
QWEN3 = {
    **{"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768},
    **{"num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "decoder_sparse_step": 1},
    **{"mlp_only_layers": [0, 1], "dtype": "bfloat16"},
}
MIXTRAL = {
    **{"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8},
    **{"num_experts_per_tok": 2, "num_hidden_layers": 32, "torch_dtype": "bfloat16"},
}
OLMOE = {
    **{"model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_experts": 64},
    **{"num_experts_per_tok": 8, "num_hidden_layers": 16, "torch_dtype": "float32"},
}
GPT_OSS = {
    **{"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32},
    **{"experts_per_token": 4, "num_experts_per_tok": 4, "num_hidden_layers": 24},
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
}
MAVERICK = {
    "model_type": "llama4",
    "vision_config": {"hidden_size": 1408, "num_hidden_layers": 34, "intermediate_size": 5632},
    "text_config": {
        **{"model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384},
        **{"num_local_experts": 128, "num_experts_per_tok": 1, "num_hidden_layers": 48, "interleave_moe_layer_step": 2},
        "torch_dtype": "bfloat16",
    },
}


@pytest.mark.parametrize(
    ("config", "sizes", "layers", "weight_bytes"),
    [
        (V2, (2048, 1408, 64, 6), 26, 2.0),
        (V3, (7168, 2048, 256, 8), 58, 1.0),
        (QWEN2, (2048, 1408, 60, 4), 24, 2.0),
        (QWEN3, (2048, 768, 128, 8), 46, 2.0),
        (MIXTRAL, (4096, 14336, 8, 2), 32, 2.0),
        (OLMOE, (2048, 1024, 64, 8), 16, 4.0),
        (GPT_OSS, (2880, 2880, 32, 4), 24, 0.53125),
        (MAVERICK, (5120, 8192, 128, 1), 24, 2.0),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else None,
)
def test_a_config_says_what_its_experts_are(
    config: dict[str, Any], sizes: tuple[int, ...], layers: int, weight_bytes: float, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    model = read_model(path)
    assert (model.hidden_size, model.intermediate_size, model.num_experts, model.top_k) == sizes
    assert (model.num_layers, model.weight_bytes, model.name) == (layers, weight_bytes, config["model_type"])
    assert model == read_model(config)
    assert model.expert_bytes == 3 * sizes[0] * sizes[1] * weight_bytes


@pytest.mark.parametrize(
    ("quantization", "weight_bytes"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 0.5),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5625),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, 1.0),
    ],
)
def test_a_quantization_says_the_bytes_of_a_weight(quantization: dict[str, Any], weight_bytes: float) -> None:
    assert read_model({**MIXTRAL, "quantization_config": quantization}).weight_bytes == weight_bytes
    assert read_model({**MIXTRAL, "quantization_config": quantization}, weight_bytes=3.0).weight_bytes == 3.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_local_experts": None}, "n_routed_experts, num_experts, num_local_experts"),
        ({"hidden_size": "4096"}, r"`hidden_size` \(='4096'\)"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_local_experts": True}, "num_local_experts"),
        ({"torch_dtype": "auto"}, "--dtype"),
        ({"quantization_config": {"quant_method": "secret"}}, "secret.*--dtype"),
        ({"first_k_dense_replace": 99}, "layers with experts"),
        ({"num_experts_per_tok": 9}, "at most 8 experts"),
    ],
)
def test_what_names_no_experts_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(FileFormatError, match=words):
        read_model({**MIXTRAL, **change})


def test_layers_without_experts_that_are_no_list_are_passed_over() -> None:
    assert read_model({**MIXTRAL, "mlp_only_layers": 5}) == read_model(MIXTRAL)


def test_a_file_that_is_no_config_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("[1, 2]")
    with pytest.raises(FileFormatError, match=r"config\.json: expected a Hugging Face config"):
        read_model(path)
    path.write_text("{")
    with pytest.raises(FileFormatError, match="JSON"):
        read_model(path)
