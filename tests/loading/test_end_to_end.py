"""From a checkpoint to a verified layout, over poisoned memory: loaders that are right and loaders that are not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from eplb_core import ExpertLayout, ExpertStore, SlotResolver, Topology, fingerprints, verify_weights
from eplb_core.loading.checkpoint.load import load_checkpoint

safetensors = pytest.importorskip("safetensors.torch")

LAYOUT = ExpertLayout([[0, 1, 2, 3, 3, 0]], 4, topology=Topology(num_ranks=2))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"model.layers.0.block_sparse_moe.experts.{expert}.{name}.weight": torch.rand(shape, generator=generator)
        for expert in range(4)
        for name, shape in (("w1", (4, 6)), ("w3", (4, 6)), ("w2", (6, 4)))
    }
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def poisoned_store(rank: int) -> ExpertStore:
    noise = torch.Generator().manual_seed(1 + rank)
    return ExpertStore({"w13": torch.rand(3, 8, 6, generator=noise), "w2": torch.rand(3, 6, 4, generator=noise)})


def test_what_the_loader_wrote_matches_the_layout_and_is_the_reference(checkpoint: Path) -> None:
    stores = [poisoned_store(rank) for rank in (0, 1)]
    reports = [
        load_checkpoint(checkpoint, [store], SlotResolver(LAYOUT, rank), template="mixtral")
        for rank, store in enumerate(stores)
    ]
    loaded = np.concatenate([report.written for report in reports], axis=1)
    report = verify_weights([fingerprints([store]) for store in stores], LAYOUT, loaded=loaded)
    assert report.ok
    assert (report.num_checked, report.num_unchecked) == (4, 2)
    stores[1].row("w13", 1).random_(0, 256)
    (fault,) = verify_weights([fingerprints([s]) for s in stores], LAYOUT, reference=report.by_expert).faults
    assert (fault.slot, fault.expert, fault.tensors) == (4, 3, (0,))


@pytest.mark.parametrize("loader_reports", [True, False])
def test_a_loader_that_writes_the_first_local_replica_only_is_caught(checkpoint: Path, loader_reports: bool) -> None:
    """D1: with its report slot 4 is `unloaded`; without, the replicas on rank 1 disagree. Neither is a reference."""
    whole = [poisoned_store(rank) for rank in (0, 1)]
    stores = [poisoned_store(rank) for rank in (0, 1)]
    loaded = np.zeros((1, 6), dtype=bool)
    for rank, store in enumerate(whole):
        resolver = SlotResolver(LAYOUT, rank)
        load_checkpoint(checkpoint, [store], resolver, template="mixtral")
        for expert in range(4):
            for slot in resolver.local_slots(0, expert)[:1]:
                loaded[0, 3 * rank + slot] = True
                for name in store.names:
                    stores[rank].row(name, slot).copy_(store.row(name, slot))
    report = verify_weights(
        [fingerprints([store]) for store in stores], LAYOUT, loaded=loaded if loader_reports else None
    )
    found = [(fault.slot, fault.kind) for fault in report.faults]
    assert found == ([(4, "unloaded")] if loader_reports else [(3, "disagree"), (4, "disagree")])
