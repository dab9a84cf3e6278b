"""A rank's experts out of a checkpoint, in tensors that the loader makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eplb_core import ExpertLayout, ExpertStore, SlotResolver, Topology
from eplb_core.errors import CheckpointError
from eplb_core.loading.checkpoint.load import load_checkpoint
from eplb_core.loading.checkpoint.rank import load_rank
from eplb_core.loading.checkpoint.templates import TEMPLATES
from tests.loading.checkpoint.test_load import PAIR, deepseek, expert_of, same, save_file


def test_every_slot_of_the_rank_holds_its_expert(tmp_path: Path) -> None:
    checkpoint = deepseek()
    save_file(checkpoint, tmp_path / "model.safetensors")
    for rank in (0, 1):
        tensors = load_rank(tmp_path, PAIR, rank, template="deepseek_v3")
        assert sorted(tensors) == [
            f"layers.{layer}.{name}" for layer in (3, 4) for name in ("w13", "w13_scale", "w2", "w2_scale")
        ]
        for row, layer in enumerate((3, 4)):
            for slot in range(3):
                expert = int(PAIR.physical_to_logical_map[row, 3 * rank + slot])
                for name, expected in expert_of(checkpoint, layer, f"experts.{expert}").items():
                    assert same(tensors[f"layers.{layer}.{name}"][slot], expected)


def test_fused_tensors_empty_slots_and_names_of_ones_own(tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.mlp.experts.gate_up_proj": torch.arange(24.0).reshape(2, 3, 4),
        "model.layers.0.mlp.experts.down_proj": torch.arange(4.0).reshape(2, 2),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    layout = ExpertLayout([[1, 0, -1, 1]], 2, topology=Topology(num_ranks=2))
    loaded = load_rank(
        [tmp_path / "model.safetensors"],
        layout,
        1,
        template=TEMPLATES["gpt_oss"],
        rename={"w13": "up"},
        layer_ids=[0],
        ignore=["*.down_proj"],
    )
    assert list(loaded) == ["layers.0.up"]
    assert loaded["layers.0.up"].tolist() == [torch.zeros(3, 4).tolist(), tensors[next(iter(tensors))][1].tolist()]


def test_a_rank_with_fewer_slots_makes_and_fills_its_own(tmp_path: Path) -> None:
    checkpoint = deepseek()
    save_file(checkpoint, tmp_path / "model.safetensors")
    layout = ExpertLayout([[3, -1, -1, 0, 1, 2]] * 2, 4, topology=Topology(num_ranks=2))
    tensors = load_rank(tmp_path, layout, 0, template="deepseek_v3", num_slots=1)
    assert {len(tensor) for tensor in tensors.values()} == {1}
    for name, expected in expert_of(checkpoint, 4, "experts.3").items():
        assert same(tensors[f"layers.4.{name}"][0], expected)
    with pytest.raises(ValueError, match=r"`layout` \(=2\) must be -1 at layer 0, slot 5; .* rank 1 has 2 slots of 3"):
        load_rank(tmp_path, layout, 1, template="deepseek_v3", num_slots=2)
    stores = [ExpertStore({"w13": torch.zeros(2, 8, 6)})] * 2
    resolver = SlotResolver(layout, 0, layer_ids=(3, 4), draft_layers=(61,))
    with pytest.raises(ValueError, match="rank 0 has 2 slots of 3, and a draft layer needs more"):
        load_checkpoint(tmp_path, [*stores, stores[0]], resolver, template="deepseek_v3", derived=["w13"])


def test_a_scale_of_one_number_is_a_row_of_its_blocks(tmp_path: Path) -> None:
    tensors = {
        f"model.layers.0.mlp.experts.{expert}.{part}_proj.{kind}": value
        for expert in (0, 1)
        for number, part in enumerate(("gate", "up", "down"))
        for kind, value in (
            ("weight", torch.zeros(2, 2)),
            ("input_scale", torch.tensor(10.0 * expert + number)),
        )
    }
    save_file(tensors, tmp_path / "model.safetensors")
    layout = ExpertLayout([[1, 0]], 2, topology=Topology(num_ranks=1))
    loaded = load_rank(tmp_path, layout, 0, template="qwen3_moe")
    assert loaded["layers.0.w13_input_scale"].tolist() == [[10.0, 11.0], [0.0, 1.0]]
    assert loaded["layers.0.w2_input_scale"].tolist() == [12.0, 2.0]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"template": "nobody"}, ValueError, r"`template` \(='nobody'\) must be a CheckpointTemplate or one of"),
        ({"template": 3}, ValueError, r"`template` \(=3\) must be a CheckpointTemplate or one of"),
        ({"ignore": "*.4.*"}, TypeError, r"`ignore` \(='\*.4.\*'\) must be a list of names"),
        ({"rename": ["w13"]}, TypeError, r"`rename` \(=\['w13'\]\) must be a dict of names"),
        ({"layer_ids": [3, 5]}, CheckpointError, "the checkpoint has no experts of layer 5"),
        ({"template": "gpt_oss"}, CheckpointError, "is an expert's tensor that template 'gpt_oss' does not know"),
        ({"ignore": ["*.4.*"]}, CheckpointError, r"has 1 layers with experts \(3 to 3\) and the layout 2"),
        ({"ignore": ["*"]}, CheckpointError, r"has 0 layers with experts \(none\)"),
    ],
)
def test_what_cannot_be_loaded_is_said(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    save_file(deepseek(), tmp_path / "model.safetensors")
    with pytest.raises(error, match=said):
        load_rank(tmp_path, PAIR, 0, **{"template": "deepseek_v3", **options})


def test_a_dtype_that_is_not_known_is_named(tmp_path: Path) -> None:
    tensors = deepseek(layers=(3,))
    name = "model.layers.3.mlp.experts.0.gate_proj.weight"
    tensors[name] = torch.zeros(4, 6, dtype=torch.complex64)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"gate_proj.weight' is of dtype C64, which is not known"):
        load_rank(tmp_path, PAIR, 0, template="deepseek_v3")
