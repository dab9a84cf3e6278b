"""Weights: a checkpoint that is made from a seed, and how a rank fills its slots from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

import eplb_core as eplb
from benchmarks.engine.model import ModelConfig, Weights


def numbers(shape: tuple[int, ...], seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Whole numbers from -4 to 4."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator, device=device)


def make_dense(config: ModelConfig, seed: int, *, dtype: torch.dtype, device: torch.device | str) -> Weights:
    """What every rank holds whole. Words of a topic resemble each other, and each expert is fond of one topic."""
    width, experts = config.hidden, config.num_experts
    topic = 2 * numbers((config.num_topics, width), seed)
    of_word = torch.arange(config.vocabulary) // (config.vocabulary // config.num_topics)
    weights = {"embedding": topic[of_word] + numbers((config.vocabulary, width), seed + 1)}
    for layer in range(config.num_layers):
        own = seed + 100 * (layer + 1)
        fond = torch.randperm(experts, generator=torch.Generator().manual_seed(own)) % config.num_topics
        weights[f"{layer}.qkv"] = numbers((3 * width, width), own + 1)
        weights[f"{layer}.out"] = numbers((width, width), own + 2)
        weights[f"{layer}.router"] = topic[fond] // 4 + numbers((experts, width), own + 3)
        weights[f"{layer}.shared13"] = numbers((2 * config.expert_width, width), own + 4)
        weights[f"{layer}.shared2"] = numbers((width, config.expert_width), own + 5)
    return {name: tensor.to(dtype).to(device) for name, tensor in weights.items()}


def make_expert(config: ModelConfig, seed: int, layer: int, expert: int, device: torch.device | str) -> Weights:
    """An expert's three matrices by the names of a checkpoint."""
    own = seed * 1_000_003 + layer * 10_007 + expert * 11
    width, inner = config.hidden, config.expert_width
    return {
        "gate_proj": numbers((inner, width), own, device),
        "up_proj": numbers((inner, width), own + 1, device),
        "down_proj": numbers((width, inner), own + 2, device),
    }


def save_experts(folder: Path, config: ModelConfig, seed: int, dtype: torch.dtype) -> None:
    """A checkpoint of all experts, one file a layer, with the names that real ones have."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    for layer in range(config.num_layers):
        tensors = {
            f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight": tensor.to(dtype)
            for expert in range(config.num_experts)
            for name, tensor in make_expert(config, seed, layer, expert, "cpu").items()
        }
        save_file(tensors, folder / f"layer-{layer:03}.safetensors")


def empty_experts(
    config: ModelConfig, slots: int, *, dtype: torch.dtype, device: torch.device | str
) -> list[dict[str, torch.Tensor]]:
    """One layer's tensors by name, `[slots, ...]`: garbage, until the loader writes the slots that hold an expert."""
    width, inner = config.hidden, config.expert_width
    return [
        {
            "w13": torch.full((slots, 2 * inner, width), -77.0, dtype=dtype, device=device),
            "w2": torch.full((slots, width, inner), -77.0, dtype=dtype, device=device),
        }
        for _ in range(config.num_layers)
    ]


def load_experts(
    checkpoint: Path | int,
    config: ModelConfig,
    tensors: Sequence[dict[str, torch.Tensor]],
    layout: eplb.ExpertLayout,
    rank: int,
) -> None:
    """Fill every slot of this rank with the expert that the layout names; replicas too.

    Args:
        checkpoint: Folder of safetensors; or a seed, where the weights would be too large for a disk.
        config: Shapes.
        tensors: One dict a layer.
        layout: What the slots shall hold.
        rank: This rank.
    """
    resolver = eplb.SlotResolver(layout, rank)  # call 1: which rows does an expert fill?
    if isinstance(checkpoint, Path):
        stores = [eplb.ExpertStore(dict(layer)) for layer in tensors]
        eplb.load_checkpoint(checkpoint, stores, resolver, template="qwen3_moe")
        return
    for layer in range(config.num_layers):  # the same by hand: an engine with a loader of its own
        w13, w2 = tensors[layer]["w13"], tensors[layer]["w2"]
        for expert in sorted({expert for expert in resolver.local_experts(layer) if expert >= 0}):
            made = make_expert(config, checkpoint, layer, expert, w13.device)
            for slot in resolver.local_slots(layer, expert):
                w13[slot].copy_(torch.cat([made["gate_proj"], made["up_proj"]]))
                w2[slot].copy_(made["down_proj"])
