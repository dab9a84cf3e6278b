from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eplb_core import ExpertLayout, ExpertStore, SlotResolver, Topology
from eplb_core.errors import CheckpointError, FileFormatError
from eplb_core.loading.checkpoint.load import LoadReport, load_checkpoint, read_headers
from eplb_core.loading.checkpoint.templates import CheckpointTemplate, Part

save_file: Callable[[dict[str, torch.Tensor], Path], None] = pytest.importorskip("safetensors.torch").save_file

HIDDEN, INNER = 6, 4
PAIR = ExpertLayout([[0, 1, 2, 3, 3, 0], [1, 0, 2, 2, 3, 1]], 4, topology=Topology(num_ranks=2))

Tensors = dict[str, torch.Tensor]


def noise(*key: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    seed = sum(value * 1000**place for place, value in enumerate(key))
    size = torch.empty(shape, dtype=dtype).nbytes
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return data.view(dtype).reshape(shape)


def deepseek(layers: tuple[int, ...] = (3, 4), experts: int = 4, version: int = 0) -> Tensors:
    """A checkpoint in fp8 with a scale for each projection, a router and a shared expert."""
    tensors = {"model.embed_tokens.weight": torch.zeros(3), "lm_head.weight": torch.zeros(3)}
    for layer in layers:
        tensors[f"model.layers.{layer}.mlp.gate.weight"] = torch.zeros(experts, HIDDEN)
        names = [f"experts.{expert}" for expert in range(experts)] + ["shared_experts"]
        for expert, name in enumerate(names):
            for kind, (projection, shape) in enumerate(
                (("gate_proj", (INNER, HIDDEN)), ("up_proj", (INNER, HIDDEN)), ("down_proj", (HIDDEN, INNER)))
            ):
                prefix = f"model.layers.{layer}.mlp.{name}.{projection}"
                key = (layer, expert, kind, version)
                tensors[f"{prefix}.weight"] = noise(*key, shape=shape, dtype=torch.float8_e4m3fn)
                tensors[f"{prefix}.weight_scale_inv"] = noise(*key, 1, shape=(1, 2), dtype=torch.float32)
    return tensors


def expert_of(tensors: Tensors, layer: int, name: str) -> Tensors:
    """The rows that an expert's slots must hold: gate above up."""
    prefix = f"model.layers.{layer}.mlp.{name}"
    joined = {}
    for store, suffix in (("", "weight"), ("_scale", "weight_scale_inv")):
        gate, up, down = (tensors[f"{prefix}.{part}_proj.{suffix}"] for part in ("gate", "up", "down"))
        joined[f"w13{store}"] = torch.cat([gate.view(torch.uint8), up.view(torch.uint8)]).view(gate.dtype)
        joined[f"w2{store}"] = down
    return joined


def poisoned(slots: int, rank: int = 0) -> Tensors:
    """What a layer allocates, full of bytes that are in no checkpoint."""
    shapes = {"w13": (2 * INNER, HIDDEN), "w2": (HIDDEN, INNER), "w13_scale": (2, 2), "w2_scale": (1, 2)}
    return {
        name: noise(
            7, rank, place, 9, shape=(slots, *shape), dtype=torch.float32 if "scale" in name else torch.float8_e4m3fn
        )
        for place, (name, shape) in enumerate(shapes.items())
    }


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


def load_ranks(
    path: Path, layout: ExpertLayout, layer_ids: tuple[int, ...] = (3, 4), **arguments: Any
) -> tuple[list[list[Tensors]], list[LoadReport]]:
    ranks, reports = [], []
    for rank in range(layout.topology.num_ranks):
        layers = [poisoned(layout.slots_per_rank, rank) for _ in layer_ids]
        resolver = SlotResolver(layout, rank, layer_ids=layer_ids)
        stores = [ExpertStore(tensors) for tensors in layers]
        reports.append(load_checkpoint(path, stores, resolver, template="deepseek_v3", **arguments))
        ranks.append(layers)
    return ranks, reports


def wrong_slots(ranks: list[list[Tensors]], layout: ExpertLayout, checkpoint: Tensors) -> list[tuple[int, int]]:
    """Walk over all slots and compare each tensor with the checkpoint's expert."""
    wrong = []
    for row, layer in enumerate((3, 4)):
        for slot in range(layout.num_slots):
            rank, local = divmod(slot, layout.slots_per_rank)
            expert = int(layout.physical_to_logical_map[row, slot])
            if expert >= 0:
                expected = expert_of(checkpoint, layer, f"experts.{expert}")
                if not all(same(tensor[local], expected[name]) for name, tensor in ranks[rank][row].items()):
                    wrong.append((row, slot))
    return wrong


@pytest.fixture
def checkpoint(tmp_path: Path) -> Tensors:
    """The only one in the folder."""
    tensors = deepseek()
    save_file(tensors, tmp_path / "model.safetensors")
    return tensors


# ---- what is written -------------------------------------------------------------------------------------------------


def test_every_slot_gets_its_expert_second_replicas_too(checkpoint: Tensors, tmp_path: Path) -> None:
    """D1, D2: memory is poisoned first, so a slot that nobody writes shows."""
    ranks, reports = load_ranks(tmp_path, PAIR)
    assert wrong_slots(ranks, PAIR, checkpoint) == []
    for report in reports:
        assert report.written.tolist() == [[True] * 3] * 2
        assert not report.written.flags.writeable
    # Rank 0 holds 0, 1, 2 on both layers: three experts of six tensors each, once although replicas are many.
    assert reports[0].num_tensors == 2 * 3 * 6
    assert reports[0].num_bytes == 2 * 3 * (3 * INNER * HIDDEN + 3 * 8)
    # Rank 1 holds only 3 and 0 on layer 3, and 2, 3, 1 on layer 4.
    assert reports[1].num_tensors == (2 + 3) * 6


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.permutations([0, 1, 2, 3, 3, 0, -1, 1]), min_size=2, max_size=2))
def test_any_layout_is_filled_and_empty_slots_are_left_alone(
    checkpoint: Tensors, tmp_path: Path, rows: list[list[int]]
) -> None:
    layout = ExpertLayout(rows, 4, topology=Topology(num_ranks=2))
    ranks, reports = load_ranks(tmp_path, layout)
    assert wrong_slots(ranks, layout, checkpoint) == []
    for rank, report in enumerate(reports):
        held = layout.physical_to_logical_map.reshape(2, 2, 4)[:, rank]
        assert (report.written == (held >= 0)).all()
        for row, slot in zip(*(held < 0).nonzero(), strict=True):
            assert all(same(ranks[rank][row][name][slot], tensor[slot]) for name, tensor in poisoned(4, rank).items())


def test_reload_after_a_rebalance_fills_the_present_layout_in_place(tmp_path: Path) -> None:
    """R45, D10, D12: new weights, moved experts, the same addresses."""
    after = PAIR.replace(ExpertLayout([[3, 1, 0, 2, 3, 0]] * 2, 4, topology=Topology(num_ranks=2)), [0])
    save_file(deepseek(), tmp_path / "old.safetensors")
    newer = deepseek(version=1)
    save_file(newer, tmp_path / "new.safetensors")
    ranks = []
    for rank in (0, 1):
        layers = [poisoned(3, rank) for _ in range(2)]
        stores = [ExpertStore(tensors) for tensors in layers]
        resolver = SlotResolver(PAIR, rank, layer_ids=(3, 4))
        addresses = [tensor.data_ptr() for tensors in layers for tensor in tensors.values()]
        load_checkpoint(tmp_path / "old.safetensors", stores, resolver, template="deepseek_v3")
        load_checkpoint(tmp_path / "new.safetensors", stores, resolver.with_layout(after), template="deepseek_v3")
        assert [tensor.data_ptr() for tensors in layers for tensor in tensors.values()] == addresses
        ranks.append(layers)
    assert wrong_slots(ranks, after, newer) == []


def test_shards_by_index_by_folder_and_by_list_are_the_same(tmp_path: Path) -> None:
    checkpoint = deepseek()
    names = sorted(checkpoint)
    shards = {f"model-{i}.safetensors": names[i::3] for i in range(3)}  # an expert's parts are in several shards
    for file, part in shards.items():
        save_file({name: checkpoint[name] for name in part}, tmp_path / file)
    assert wrong_slots(load_ranks(tmp_path, PAIR)[0], PAIR, checkpoint) == []
    files: Any = [tmp_path / file for file in shards]
    assert wrong_slots(load_ranks(files, PAIR)[0], PAIR, checkpoint) == []
    weight_map = {name: file for file, part in shards.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "consolidated.safetensors").write_bytes(b"another format's file, which the index does not list")
    assert wrong_slots(load_ranks(tmp_path, PAIR)[0], PAIR, checkpoint) == []


def test_a_shard_that_is_opened_anew_is_read_once(
    checkpoint: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory stays bounded however large a shard is."""
    _, whole = load_ranks(tmp_path, PAIR)
    monkeypatch.setattr("eplb_core.loading.checkpoint.load.MAPPED_BYTES", 50)
    ranks, reports = load_ranks(tmp_path, PAIR)
    assert wrong_slots(ranks, PAIR, checkpoint) == []
    assert [report.num_bytes for report in reports] == [report.num_bytes for report in whole]


def test_shared_experts_fill_rows_of_their_own(checkpoint: Tensors, tmp_path: Path) -> None:
    """R37: on every rank."""
    for rank in (0, 1):
        layers = [poisoned(4, rank) for _ in range(2)]  # three routed rows and the shared one
        load_checkpoint(
            tmp_path,
            [ExpertStore({name: tensor[:3] for name, tensor in tensors.items()}) for tensors in layers],
            SlotResolver(PAIR, rank, layer_ids=(3, 4), num_shared=1),
            template="deepseek_v3",
            shared_stores=[ExpertStore({name: tensor[3:] for name, tensor in tensors.items()}) for tensors in layers],
        )
        for row, layer in enumerate((3, 4)):
            expected = expert_of(checkpoint, layer, "shared_experts")
            assert all(same(layers[row][name][3], expected[name]) for name in expected)


def test_fused_tensors_are_gathered_by_slot(tmp_path: Path) -> None:
    """D6: gpt-oss keeps [E, ...]; ranks take the rows that their slots name, biases and packed blocks alike."""
    experts = 4
    checkpoint = {
        f"model.layers.0.mlp.experts.{name}": noise(place, shape=(experts, *shape), dtype=dtype)
        for place, (name, shape, dtype) in enumerate(
            [
                ("gate_up_proj_blocks", (8, 2, 16), torch.uint8),
                ("gate_up_proj_scales", (8, 2), torch.uint8),
                ("gate_up_proj_bias", (8,), torch.bfloat16),
                ("down_proj_blocks", (HIDDEN, 1, 16), torch.uint8),
                ("down_proj_scales", (HIDDEN, 1), torch.uint8),
                ("down_proj_bias", (HIDDEN,), torch.bfloat16),
            ]
        )
    }
    save_file(checkpoint, tmp_path / "model.safetensors")
    layout = ExpertLayout([[3, 0, 3, 1, 2, 0]], experts, topology=Topology(num_ranks=2))
    stored = [name.rsplit(".", 1)[1].replace("gate_up_proj", "w13").replace("down_proj", "w2") for name in checkpoint]
    for rank, held in ((0, [3, 0, 3]), (1, [1, 2, 0])):
        tensors = {
            ours: torch.full_like(tensor[:3], 77) for ours, tensor in zip(stored, checkpoint.values(), strict=True)
        }
        report = load_checkpoint(tmp_path, [ExpertStore(tensors)], SlotResolver(layout, rank), template="gpt_oss")
        assert report.written.all()
        for ours, tensor in zip(stored, checkpoint.values(), strict=True):
            assert same(tensors[ours], tensor[held])
        assert report.num_bytes == sum(tensor[0].nbytes for tensor in checkpoint.values()) * len(set(held))


def test_scales_that_every_rank_keeps_whole_are_written_by_the_layout_on_every_rank(tmp_path: Path) -> None:
    """R38, D4: one number an expert, gate and up side by side; and projections that lie along the last dimension."""
    template = CheckpointTemplate(
        "toy",
        r"layers\.(?P<layer>\d+)\.experts\.(?P<expert>\d+)\.(?P<part>.+)",
        {
            "gate": Part("w13", 0, 2, 1),
            "up": Part("w13", 1, 2, 1),
            "gate_scale": Part("alpha", 0, 2, 0),
            "up_scale": Part("alpha", 1, 2, 0),
        },
    )
    checkpoint = {}
    for expert in range(4):
        for kind, part in enumerate(("gate", "up")):
            checkpoint[f"layers.0.experts.{expert}.{part}"] = torch.full((3, 2), 10.0 * expert + kind)
            checkpoint[f"layers.0.experts.{expert}.{part}_scale"] = torch.tensor(10.0 * expert + kind)
    save_file(checkpoint, tmp_path / "x.safetensors")
    layout = ExpertLayout([[2, 3, 0, 1, 2, 2]], 4, topology=Topology(num_ranks=2))
    for rank in (0, 1):
        weights, alpha = torch.full((3, 3, 4), torch.nan), torch.full((6, 2), torch.nan)
        derived = torch.ones(3, 1)
        store = ExpertStore({"experts.w13": weights, "derived": derived}, whole={"alpha": alpha})
        load_checkpoint(
            tmp_path,
            [store],
            SlotResolver(layout, rank),
            template=template,
            rename={"w13": "experts.w13"},
            derived=["derived"],
        )
        assert alpha.tolist() == [[10.0 * expert, 10.0 * expert + 1] for expert in (2, 3, 0, 1, 2, 2)]
        assert weights[2, 0].tolist() == [[0, 0, 1, 1], [20, 20, 21, 21]][rank]


def test_draft_layers_are_loaded_where_stores_for_them_are_given(tmp_path: Path) -> None:
    """R39: the MTP layer beyond the map has expert e in slot e, and its redundant slots stay empty."""
    checkpoint = deepseek(layers=(3, 61))
    save_file(checkpoint, tmp_path / "model.safetensors")
    layout = ExpertLayout([[0, 1, 2, 3, 3, 0]], 4, topology=Topology(num_ranks=2))
    resolver = SlotResolver(layout, 1, layer_ids=(3,), draft_layers=(61,))
    layers = [poisoned(3) for _ in range(2)]
    report = load_checkpoint(tmp_path, [ExpertStore(tensors) for tensors in layers], resolver, template="deepseek_v3")
    assert report.written.tolist() == [[True, True, True], [True, False, False]]
    expected = expert_of(checkpoint, 61, "experts.3")
    assert all(same(layers[1][name][0], expected[name]) for name in expected)
    # Without stores for it the layer is somebody else's.
    report = load_checkpoint(tmp_path, [ExpertStore(layers[0])], resolver, template="deepseek_v3")
    assert report.written.tolist() == [[True] * 3]


# ---- bad input: an error that names it, and nothing written ----------------------------------------------------------


def refused(path: Any, error: type[Exception], text: str, **arguments: Any) -> Exception:
    """Loading raises, and every byte of every slot is what it was."""
    layers = [poisoned(3, 1) for _ in range(2)]
    stores = [ExpertStore(tensors) for tensors in layers]
    resolver = SlotResolver(PAIR, 1, layer_ids=(3, 4))
    with pytest.raises(error, match=text) as caught:
        load_checkpoint(path, stores, resolver, **{"template": "deepseek_v3", **arguments})
    for tensors in layers:
        assert all(same(tensors[name], tensor) for name, tensor in poisoned(3, 1).items())
    return caught.value


def without(tensors: Tensors, *parts: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not any(part in name for part in parts)}


@pytest.mark.parametrize(
    ("left_out", "text", "slots"),
    [
        ("layers.3.mlp.experts.3.", "does not have expert 3 of layer 3; nothing would write", ((0, 0), (0, 1))),
        ("layers.4.mlp.experts.2.up_proj.weight_scale", "layer 4 whole: 'w13_scale', block 1 is missing", ((1, 0),)),
    ],
)
def test_a_missing_expert_is_named_with_every_slot_that_would_stay_empty(
    tmp_path: Path, left_out: str, text: str, slots: tuple[tuple[int, int], ...]
) -> None:
    save_file(without(deepseek(), left_out), tmp_path / "x.safetensors")
    error = refused(tmp_path, CheckpointError, text)
    assert isinstance(error, CheckpointError)
    assert error.slots == slots


def test_a_missing_expert_that_this_rank_does_not_hold_is_no_fault(tmp_path: Path) -> None:
    save_file(without(deepseek(), "layers.3.mlp.experts.1."), tmp_path / "x.safetensors")
    stores = [ExpertStore(poisoned(3, 1)) for _ in range(2)]
    resolver = SlotResolver(PAIR, 1, layer_ids=(3, 4))
    assert load_checkpoint(tmp_path, stores, resolver, template="deepseek_v3").written.all()


def test_a_missing_row_of_a_whole_tensor_and_a_missing_shared_expert_are_named(tmp_path: Path) -> None:
    template = CheckpointTemplate(
        "toy",
        r"(?P<layer>\d+)\.experts\.(?P<expert>\d+)\.(?P<part>.+)",
        {"w": Part("w", 0, 1, 0), "s": Part("s", 0, 1, 0)},
        shared=r"(?P<layer>\d+)\.shared\.(?P<part>.+)",
    )
    layout = ExpertLayout([[0, 1]], 2, topology=Topology(num_ranks=2))
    tensors = {f"0.experts.{expert}.{part}": torch.zeros(1) for expert in (0, 1) for part in "ws"}
    save_file(without(tensors, "1.s"), tmp_path / "scale.safetensors")
    store = ExpertStore({"w": torch.ones(1, 1)}, whole={"s": torch.ones(2, 1)})
    with pytest.raises(
        CheckpointError, match="does not have 's' of expert 1 of layer 0; nothing would write those rows"
    ):
        load_checkpoint(tmp_path / "scale.safetensors", [store], SlotResolver(layout, 0), template=template)
    save_file(tensors, tmp_path / "shared.safetensors")
    shared: dict[str, Any] = {"shared_stores": [ExpertStore({"w": torch.ones(1, 1)})], "template": template}
    resolver = SlotResolver(layout, 0, num_shared=1)
    with pytest.raises(CheckpointError, match="does not have shared expert 0 of layer 0 whole"):
        load_checkpoint(tmp_path / "shared.safetensors", [store], resolver, **shared)
    both = {"0.shared.w": torch.full((1,), 5.0), "0.shared.s": torch.zeros(1)}
    save_file({**tensors, **both}, tmp_path / "both.safetensors")
    load_checkpoint(tmp_path / "both.safetensors", [store], resolver, **shared)
    assert shared["shared_stores"][0].tensor_row("w", 0).item() == 5


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"model.layers.3.mlp.experts.3.up_proj.weight": torch.zeros(INNER, HIDDEN + 1).to(torch.float8_e4m3fn)},
            r"'model.layers.3.mlp.experts.3.up_proj.weight' has shape \[4, 7\] and must have \[4, 6\], as 'w13' has",
        ),
        (
            {"model.layers.3.mlp.experts.3.up_proj.weight": torch.zeros(INNER, HIDDEN, dtype=torch.bfloat16)},
            r"up_proj.weight' is BF16 and 'w13' keeps torch.float8_e4m3fn",
        ),
        ({"model.layers.3.mlp.experts.4.up_proj.weight": torch.zeros(1)}, "is expert 4 and the layout has 4"),
        (
            {"model.layers.3.mlp.experts.1.up_proj.rotation": torch.zeros(1)},
            "template 'deepseek_v3' does not know",
        ),
        (
            {"model.layers.3.mlp.experts.1.up_proj.bias": torch.zeros(4)},
            "belongs in 'w13_bias', which the stores",
        ),
        (
            {"layers.3.mlp.experts.1.up_proj.weight": torch.zeros(INNER, HIDDEN).to(torch.float8_e4m3fn)},
            "are the same part of expert 1",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(tmp_path: Path, change: Tensors, text: str) -> None:
    save_file({**deepseek(), **change}, tmp_path / "x.safetensors")
    error = refused(tmp_path, CheckpointError, text)
    assert isinstance(error, CheckpointError)
    assert error.tensor is not None


def test_unknown_names_may_be_left_out_by_pattern(tmp_path: Path) -> None:
    save_file(
        {**deepseek(), "model.layers.3.mlp.experts.1.up_proj.rotation": torch.zeros(1)}, tmp_path / "x.safetensors"
    )
    _, reports = load_ranks(tmp_path, PAIR, ignore=["*.rotation"])
    assert all(report.written.all() for report in reports)


def test_a_fused_tensor_of_another_number_of_experts_is_named(tmp_path: Path) -> None:
    """D6: size 16 against 128."""
    save_file({"model.layers.0.mlp.experts.down_proj": torch.zeros(3, 2, 2)}, tmp_path / "x.safetensors")
    layout = ExpertLayout([[0, 1, 2, 3]], 4, topology=Topology(num_ranks=1))
    store = ExpertStore({"w2": torch.zeros(4, 2, 2)})
    with pytest.raises(CheckpointError, match=r"has shape \[3, 2, 2\]; its first dimension must be 4 experts"):
        load_checkpoint(tmp_path, [store], SlotResolver(layout, 0), template="gpt_oss")


def test_rows_that_do_not_divide_into_blocks_are_named(tmp_path: Path) -> None:
    save_file({"layers.0.mlp.experts.0.gate_proj.weight": torch.zeros(1, 2)}, tmp_path / "x.safetensors")
    layout = ExpertLayout([[0]], 1, topology=Topology(num_ranks=1))
    with pytest.raises(CheckpointError, match=r"block 0 of 2 of 'w13', whose rows \[3, 2\] do not divide into 2"):
        load_checkpoint(
            tmp_path, [ExpertStore({"w13": torch.zeros(1, 3, 2)})], SlotResolver(layout, 0), template="qwen3_moe"
        )


@pytest.mark.parametrize("kept", [0, 4, 20, -1])
def test_a_truncated_shard_is_named(tmp_path: Path, kept: int) -> None:
    checkpoint = deepseek()
    names = sorted(checkpoint)
    save_file({name: checkpoint[name] for name in names[::2]}, tmp_path / "a.safetensors")
    save_file({name: checkpoint[name] for name in names[1::2]}, tmp_path / "b.safetensors")
    whole = (tmp_path / "b.safetensors").read_bytes()
    (tmp_path / "b.safetensors").write_bytes(whole[:kept])
    error = refused(tmp_path, FileFormatError, "shard b.safetensors is no whole safetensors file")
    assert isinstance(error, FileFormatError)
    assert error.path == str(tmp_path / "b.safetensors")


def test_shards_that_are_not_there_are_named(tmp_path: Path) -> None:
    refused(tmp_path, FileFormatError, r"has no \*.safetensors file")
    refused(tmp_path / "x.safetensors", FileFormatError, "shard x.safetensors is no whole safetensors file")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-7.safetensors"}}))
    refused(tmp_path, FileFormatError, "shard model-7.safetensors is no whole safetensors file")
    for content in ("{", "[]", '{"weight_map": 3}'):
        index.write_text(content)
        refused(
            tmp_path, FileFormatError, r"index.json: expected (JSON|an index with the `weight_map` of shards), found"
        )


@pytest.mark.parametrize("name", ["../x.safetensors", "a/../../x.safetensors", "/x.safetensors"])
def test_an_index_leads_to_no_file_outside_of_its_folder(tmp_path: Path, name: str) -> None:
    save_file(deepseek(), tmp_path / "x.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name.replace("/x", f"{tmp_path}/x") if name[0] == "/" else name}}))
    refused(folder, FileFormatError, "index.json names .*, which is not in")
    index.write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    (folder / "x.safetensors").symlink_to(tmp_path / "x.safetensors")  # as caches of hubs have it
    assert read_headers(folder)


def test_one_name_in_two_shards_is_named(tmp_path: Path) -> None:
    save_file(deepseek(), tmp_path / "a.safetensors")
    save_file({"lm_head.weight": torch.zeros(1)}, tmp_path / "b.safetensors")
    refused(tmp_path, FileFormatError, "shards a.safetensors and b.safetensors both have 'lm_head.weight'")


def test_arguments_that_do_not_belong_together_raise(tmp_path: Path) -> None:
    save_file(deepseek(), tmp_path / "x.safetensors")
    refused(tmp_path, ValueError, r"`template` \(='llama'\) must be a CheckpointTemplate or one of", template="llama")
    refused(tmp_path, ValueError, "the stores keep 'w2', which template .* `derived`", rename={"w2": "down"})
    refused(tmp_path, ValueError, "`shared_stores` has 0 layers and `stores` 2", shared_stores=[])
    shared = [ExpertStore(poisoned(2)) for _ in range(2)]
    refused(tmp_path, ValueError, "of 2 experts and must keep .* of the 0 shared ones", shared_stores=shared)
    resolver = SlotResolver(PAIR, 0, layer_ids=(3, 4))
    with pytest.raises(ValueError, match="`stores` has 1 layers and the resolver 2"):
        load_checkpoint(tmp_path, [ExpertStore(poisoned(3))], resolver, template="deepseek_v3")
    with pytest.raises(ValueError, match="'w13' has 4 slots and the layout 3 per rank"):
        load_checkpoint(tmp_path, [ExpertStore(poisoned(4))] * 2, resolver, template="deepseek_v3")


def test_without_safetensors_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    (tmp_path / "x.safetensors").touch()
    refused(tmp_path, ImportError, r"pip install 'eplb-core\[files\]'")


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_pipe_in_place_of_a_shard_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(FileFormatError, match=f"{name}: expected a file, found a device or pipe"):
        read_headers(tmp_path)


@pytest.mark.parametrize("name", ["\\ud800", "a\\u0000b", "\\u001b[2J", "A" * 5000])
def test_a_shard_s_name_that_no_file_can_have_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"a": "{name}"}}}}')
    with pytest.raises(FileFormatError, match="is no whole safetensors file") as caught:
        read_headers(tmp_path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000
    assert "fetch it again" in str(caught.value)
