"""The model: a small decoder with routed experts, whose arithmetic is exact.

Every value that goes into a sum is a whole number, small enough that float32 (or bfloat16 with float32 sums) holds each
sum exactly. So a sum is the same in any order, in any batch, on any number of ranks and on any device, and "the same
tokens" can be asked for bit by bit. Rounding happens only where each element stands alone. The structure is that of
any mixture-of-experts decoder: normalization, causal attention with a cache, a router that takes the top k (in groups
if asked), a shared expert, gated experts, weighted sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

LARGEST = 127.0
"""Of what goes into a product; bfloat16 holds it exactly."""
UNIT = 16.0
"""What one standard deviation is after normalization."""
WINDOW = 10
"""Powers of two between the strongest position that attention sees and the weakest that counts."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes of the model."""

    num_layers: int = 3
    num_experts: int = 16
    top_k: int = 2
    hidden: int = 64
    expert_width: int = 32
    num_heads: int = 2
    vocabulary: int = 256
    num_topics: int = 8
    max_length: int = 48
    num_groups: int = 1
    """Groups of experts; the router takes from the best `top_groups` of them."""
    top_groups: int = 1


Weights = dict[str, torch.Tensor]
"""What every rank holds whole: embedding, attention, router and shared expert, by name."""


def step_of(width: int) -> float:
    """Power of two that brings a product over `width` back to the size of its input."""
    return 2.0 ** -round(math.log2(2.58 * math.sqrt(width)))


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x` times `weight` `[out, in]`, rounded to whole numbers that may go into the next product."""
    return settle((x @ weight.t()).float(), weight.shape[1])


def settle(sums: torch.Tensor, width: int) -> torch.Tensor:
    """Exact sums over `width`, rounded and bounded."""
    return torch.round(sums * step_of(width)).clamp(-LARGEST, LARGEST)


def normalize(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Root mean square to `UNIT`. The sum of squares is exact in float64, root and division are correctly rounded."""
    wide = x.double()
    root = torch.sqrt((wide * wide).sum(-1, keepdim=True) / x.shape[-1] + 1.0)
    return torch.round(UNIT * wide / root).clamp(-LARGEST, LARGEST).to(dtype)


def gated(gate_and_up: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """relu(gate) * up, whole again."""
    gate, up = gate_and_up.chunk(2, dim=-1)
    return torch.round(torch.relu(gate) * up / UNIT).clamp(-LARGEST, LARGEST).to(dtype)


def feed_forward(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """One expert's answer to rows `x`: the only function that differs between ranks in nothing but its weights."""
    return product(gated(product(x, w13), x.dtype), w2)


class Dense:
    """All of the model but its routed experts; every rank runs it on its own sequences."""

    def __init__(self, config: ModelConfig, weights: Weights, num_rows: int) -> None:
        self.config, self.weights = config, weights
        embedding = weights["embedding"]
        self.dtype, self.device = embedding.dtype, embedding.device
        shape = (config.num_layers, num_rows, config.max_length, config.num_heads, config.hidden // config.num_heads)
        # Read as float64 below, in which sums of products with powers of two are exact for any length.
        self.keys = torch.zeros(shape, dtype=torch.float32, device=self.device)
        self.values = torch.zeros(shape, dtype=torch.float32, device=self.device)
        self.powers = 2.0 ** torch.arange(-WINDOW, 1, dtype=torch.float64, device=self.device)
        self.places = torch.arange(config.max_length, device=self.device)
        self.row = torch.arange(num_rows, device=self.device)

    def attention(self, layer: int, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Each row attends to its own sequence up to `position`. Weights are powers of two, so sums are exact."""
        rows, width = x.shape
        heads = self.config.num_heads
        qkv = product(normalize(x, self.dtype), self.weights[f"{layer}.qkv"]).view(rows, 3, heads, width // heads)
        keys, values = self.keys[layer], self.values[layer]
        keys[self.row, position] = qkv[:, 1]
        values[self.row, position] = qkv[:, 2]
        scores = (qkv[:, :1].double() * keys.double()).sum(-1)  # [rows, length, heads]
        visible = (self.places <= position[:, None])[..., None]
        scores = torch.floor(scores / 256.0).masked_fill(~visible, -1e9)
        behind = (scores - scores.amax(1, keepdim=True)).clamp(min=-WINDOW).long()
        weight = self.powers[behind + WINDOW] * visible
        mixed = (weight[..., None] * values.double()).sum(1) / weight.sum(1)[..., None]
        mixed = torch.round(mixed).reshape(rows, width).to(self.dtype)
        return x + torch.round(product(mixed, self.weights[f"{layer}.out"]) / 4)

    def route(self, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Input of the experts, ids of the top k `[rows, K]`, and their weights in 64ths."""
        config = self.config
        x = normalize(x, self.dtype)
        logits = (x @ self.weights[f"{layer}.router"].t()).float().double()
        experts = config.num_experts
        # Distinct numbers: equal logits go to the lower expert on every device.
        order = logits * experts - torch.arange(experts, device=self.device)
        if config.num_groups > 1:
            group = order.view(-1, config.num_groups, experts // config.num_groups)
            best = group.amax(-1).topk(config.top_groups).indices
            allowed = torch.zeros(group.shape[:2], device=self.device).scatter_(1, best, 1.0) > 0
            order = group.masked_fill(~allowed[..., None], -math.inf).flatten(1)
        ids = order.topk(config.top_k).indices
        chosen = logits.gather(1, ids)
        behind = torch.floor((chosen - chosen[:, :1]) / 256.0).clamp(min=-WINDOW).long()
        weight = self.powers[behind + WINDOW]
        weight = torch.round(64.0 * weight / weight.sum(-1, keepdim=True))
        return x, ids.int(), weight.float()

    def shared(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """The shared expert, on the rank of the token."""
        return feed_forward(x, self.weights[f"{layer}.shared13"], self.weights[f"{layer}.shared2"])

    def combine(
        self, x: torch.Tensor, shared: torch.Tensor, answers: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """Add what the experts said, `answers` `[rows, K, hidden]`: whole numbers, so in any order."""
        mixed = torch.round((answers.float() * weight[..., None]).sum(1) / 64.0)
        return x + torch.round((shared + mixed) / 4)

    def embed(self, token: torch.Tensor) -> torch.Tensor:
        """Rows of the residual stream, float32 whole numbers."""
        return self.weights["embedding"][token].float()

    def sample(self, x: torch.Tensor, position: torch.Tensor, seed: torch.Tensor, topic: torch.Tensor) -> torch.Tensor:
        """The next token of each row: the highest logit after noise, within the words of the request's topic.

        The noise is a hash of seed, position and word, so a sequence does not depend on where or when it is computed.
        """
        size = self.config.vocabulary
        logits = (normalize(x, self.dtype) @ self.weights["embedding"].t()).float().long()
        word = torch.arange(size, device=self.device)
        noise = hashed(hashed(seed + 7919 * position)[:, None] + word)
        order = (logits + (noise & 4095)) * size + (size - 1 - word)
        bias = word // (size // self.config.num_topics) == topic[:, None]
        return order.masked_fill(~bias, -(2**62)).argmax(-1)


def hashed(x: torch.Tensor) -> torch.Tensor:
    """Mix 31 bits."""
    x = (x * 0x2545F491) & 0x7FFFFFFF
    x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & 0x7FFFFFFF
    return ((x ^ (x >> 12)) * 0x297A2D39 & 0x7FFFFFFF) ^ (x >> 9)
