"""The oracle: the same tokens on one process, without expert parallelism, replicas, slots or this library.

It reads the checkpoint itself and knows experts by their number alone. It is fed the same rows as all ranks together,
pass by pass, so its cache goes through the same weights, and says which token each row must sample.
"""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.engine.model import Dense, ModelConfig, Weights, feed_forward
from benchmarks.engine.requests import Feed
from benchmarks.engine.weights import make_dense, make_expert

Experts = list[list[tuple[torch.Tensor, torch.Tensor]]]


def read_experts(checkpoint: Path | int, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Experts:
    """w13 and w2 of each layer's experts, straight from the files."""
    layers: Experts = []
    for layer in range(config.num_layers):
        tensors: Weights = {}
        if isinstance(checkpoint, Path):
            from safetensors.torch import load_file

            tensors = load_file(checkpoint / f"layer-{layer:03}.safetensors")
        row = []
        for expert in range(config.num_experts):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}."
            if isinstance(checkpoint, int):
                made = make_expert(config, checkpoint, layer, expert, device)
                tensors = {f"{prefix}{name}.weight": tensor.to(dtype) for name, tensor in made.items()}
            gate, up, down = (tensors[f"{prefix}{name}_proj.weight"].to(device) for name in ("gate", "up", "down"))
            row.append((torch.cat([gate, up]), down))
        layers.append(row)
    return layers


class Oracle:
    """One process that has all experts once."""

    def __init__(self, config: ModelConfig, seed: int, num_rows: int, device: str = "cpu") -> None:
        self.config, self.device = config, torch.device(device)
        self.dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        self.dense = Dense(config, make_dense(config, seed, dtype=self.dtype, device=self.device), num_rows)
        self.experts: Experts = []

    def load(self, checkpoint: Path | int) -> None:
        """Other experts from now on, as after a live update."""
        self.experts = read_experts(checkpoint, self.config, self.dtype, self.device)

    @torch.no_grad()
    def run(self, feed: Feed) -> torch.Tensor:
        """The token that each row samples; rows without a request give anything."""
        token, position, seed, topic = feed.tensors(self.device)
        x = self.dense.embed(token)
        for layer in range(self.config.num_layers):
            x = self.dense.attention(layer, x, position)
            normal, ids, weight = self.dense.route(layer, x)
            answers = torch.zeros((*ids.shape, x.shape[1]), device=self.device)
            for expert in torch.unique(ids).tolist():
                row, column = (ids == expert).nonzero(as_tuple=True)
                answers[row, column] = feed_forward(normal[row], *self.experts[layer][expert])
            x = self.dense.combine(x, self.dense.shared(layer, normal), answers, weight)
        return self.dense.sample(x, position, seed, topic).cpu()
