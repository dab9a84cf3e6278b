from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from eplb_core import ExpertLayout, ExpertStore
from tests.loading.worlds import needs_cuda

Weights = list[dict[str, torch.Tensor]]
"""By layer and name, `[S, ...]`: what the engine of one rank keeps."""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, needs_cuda])])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


# Every kind of tensor that engines keep by slot: name -> dtype, bytes of a row. int4 weights are packed in bytes or in
# 32-bit words; odd byte counts and counts that are no multiple of 16 need the slow paths of the kernels.
KINDS = {
    "bf16_weight": (torch.bfloat16, 3072),
    "fp8_weight": (torch.float8_e4m3fn, 2064),
    "int4_packed_weight": (torch.uint8, 1536),
    "int4_packed_words": (torch.int32, 516),
    "scale": (torch.float32, 36),
    "scale_e8m0": (torch.float8_e8m0fnu, 33),
    "zero_points": (torch.int8, 7),
    "bias": (torch.bfloat16, 10),
    "one_scale": (torch.float32, 4),
}


@pytest.fixture
def kinds() -> dict[str, tuple[torch.dtype, int]]:
    return KINDS


def expert_bytes(layer: int, expert: int, name: str, nbytes: int) -> torch.Tensor:
    """What the checkpoint has for an expert: random bytes that depend on nothing else."""
    seed = (layer * 1009 + expert) * 64 + list(KINDS).index(name)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def poisoned() -> Callable[[ExpertLayout, torch.device], list[Weights]]:
    """Allocate all ranks' tensors and fill them with bytes that are no expert's and differ from slot to slot."""

    def allocate(layout: ExpertLayout, device: torch.device) -> list[Weights]:
        noise = torch.Generator().manual_seed(1)
        ranks: list[Weights] = []
        for _ in range(layout.topology.num_ranks):
            layers: Weights = []
            for _ in range(layout.num_layers):
                tensors = {}
                for name, (dtype, nbytes) in KINDS.items():
                    shape = (layout.slots_per_rank, nbytes)
                    poison = torch.randint(0, 256, shape, dtype=torch.uint8, generator=noise)
                    tensors[name] = poison.to(device).view(dtype)
                layers.append(tensors)
            ranks.append(layers)
        return ranks

    return allocate


@pytest.fixture
def load() -> Callable[[ExpertLayout, list[Weights]], None]:
    """Fill every slot with the expert that the layout names."""

    def fill(layout: ExpertLayout, ranks: list[Weights]) -> None:
        for slot in range(layout.num_slots):
            rank, local = divmod(slot, layout.slots_per_rank)
            for layer in range(layout.num_layers):
                expert = int(layout.physical_to_logical_map[layer, slot])
                if expert >= 0:
                    for name, tensor in ranks[rank][layer].items():
                        row = tensor[local].view(torch.uint8)
                        row.copy_(expert_bytes(layer, expert, name, row.numel()))

    return fill


@pytest.fixture
def stores_of() -> Callable[[Weights], list[ExpertStore]]:
    return lambda layers: [ExpertStore(tensors) for tensors in layers]
