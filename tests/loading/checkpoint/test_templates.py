from __future__ import annotations

import pytest

from eplb_core.errors import CheckpointError
from eplb_core.loading.checkpoint.templates import TEMPLATES, ExpertName, Part


@pytest.mark.parametrize(
    ("family", "name", "layer", "expert", "part"),
    [
        ("deepseek_v3", "model.layers.3.mlp.experts.0.gate_proj.weight", 3, 0, ("w13", 0, 2, 0)),
        ("deepseek_v3", "model.layers.61.mlp.experts.255.up_proj.weight", 61, 255, ("w13", 1, 2, 0)),
        ("deepseek_v3", "model.layers.3.mlp.experts.9.down_proj.weight_scale_inv", 3, 9, ("w2_scale", 0, 1, 0)),
        ("qwen3_moe", "model.layers.0.mlp.experts.127.down_proj.weight", 0, 127, ("w2", 0, 1, 0)),
        ("qwen3_moe", "layers.0.mlp.experts.1.up_proj.qzeros", 0, 1, ("w13_qzeros", 1, 2, 1)),
        ("glm4_moe", "model.layers.1.mlp.experts.2.gate_proj.weight", 1, 2, ("w13", 0, 2, 0)),
        ("mixtral", "model.layers.31.block_sparse_moe.experts.7.w1.weight", 31, 7, ("w13", 0, 2, 0)),
        ("mixtral", "model.layers.31.block_sparse_moe.experts.7.w3.weight", 31, 7, ("w13", 1, 2, 0)),
        ("mixtral", "model.layers.31.block_sparse_moe.experts.7.w2.weight", 31, 7, ("w2", 0, 1, 0)),
        ("gpt_oss", "model.layers.5.mlp.experts.gate_up_proj", 5, None, ("w13", 0, 1, 0)),
        ("gpt_oss", "model.layers.5.mlp.experts.gate_up_proj_blocks", 5, None, ("w13_blocks", 0, 1, 0)),
        ("gpt_oss", "model.layers.5.mlp.experts.down_proj_bias", 5, None, ("w2_bias", 0, 1, 0)),
    ],
)
def test_names_of_the_usual_checkpoints_are_read(
    family: str, name: str, layer: int, expert: int | None, part: tuple[str, int, int, int]
) -> None:
    assert TEMPLATES[family].parse(name) == ExpertName(layer, expert, False, Part(*part))


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_shared_experts_are_told_apart(family: str) -> None:
    name = TEMPLATES[family].parse("model.layers.3.mlp.shared_experts.up_proj.weight")
    assert name == ExpertName(3, 0, True, Part("w13", 1, 2, 0))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.mlp.gate.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.3.self_attn.o_proj.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
    ],
)
def test_other_tensors_are_left_to_others(name: str) -> None:
    assert all(template.parse(name) is None for template in TEMPLATES.values())


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("deepseek_v3", "model.layers.3.mlp.experts.0.gate_proj.weight_zeros"),
        ("deepseek_v3", "model.layers.3.mlp.experts.0.w1.weight"),
        ("deepseek_v3", "model.layers.3.mlp.shared_experts.gate_proj.rotation"),
        ("mixtral", "model.layers.3.mlp.experts.0.gate_proj.weight"),
        ("gpt_oss", "model.layers.3.mlp.experts.0.gate_proj.weight"),
    ],
)
def test_an_expert_s_tensor_that_the_template_does_not_know_is_named(family: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is an expert's tensor that template '{family}' does not know"):
        TEMPLATES[family].parse(name)


def test_a_template_that_fits_is_named_instead_of_the_wrong_one() -> None:
    name = "model.layers.3.block_sparse_moe.experts.0.w1.weight"
    with pytest.raises(CheckpointError, match="'deepseek_v3' does not know; pass template='mixtral', which does, or"):
        TEMPLATES["deepseek_v3"].parse(name)
    with pytest.raises(CheckpointError, match="does not know; pass a CheckpointTemplate that has it, or name it in"):
        TEMPLATES["mixtral"].parse("model.layers.3.block_sparse_moe.experts.0.w9.weight")
