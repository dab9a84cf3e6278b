from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import eplb_core as eplb
from eplb_core.adapters.vllm import maps as vllm_maps
from eplb_core.load import fold_slots

FOUR = eplb.Topology(4)
ROW = torch.tensor([0, 1, 2, 3, 0, 1, 0, 2])  # 4 ranks of 2 slots


def picks(maps: torch.Tensor, count: torch.Tensor, expert: int, tokens: int) -> list[int]:
    """What vLLM's router answers for rows 0..tokens-1 (base_router.py)."""
    return [int(maps[expert, ((row * 2654435769) & 0xFFFFFFFF) % int(count[expert])]) for row in range(tokens)]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 12), st.data())
def test_the_inverse_map_has_every_slot_of_every_expert(
    layers: int, experts: int, slots: int, data: st.DataObject
) -> None:
    rows = [data.draw(st.lists(st.integers(-1, experts - 1), min_size=slots, max_size=slots)) for _ in range(layers)]
    by_hand = [[[s for s, e in enumerate(row) if e == expert] for expert in range(experts)] for row in rows]
    for dtype in (torch.int64, torch.int32):
        maps, count = vllm_maps.compute_logical_maps(torch.tensor(rows, dtype=dtype), experts)
        assert (maps.dtype, count.dtype) == (dtype, dtype)
        assert maps.shape[2] == max(len(held) for row in by_hand for held in row)
        assert [[[s for s in held if s >= 0] for held in row] for row in maps.tolist()] == by_hand
        assert count.tolist() == [[len(held) for held in row] for row in by_hand]
        assert all(slots == sorted(slots, key=lambda s: (s < 0, s)) for row in maps.tolist() for slots in row)
        one = vllm_maps.compute_logical_maps(torch.tensor(rows[0], dtype=dtype), experts)
        assert [s for s in one[0].reshape(-1).tolist() if s >= 0] == [s for held in by_hand[0] for s in held]
        assert one[1].tolist() == count[0].tolist()


def test_maps_that_cannot_be_inverted_raise() -> None:
    with pytest.raises(ValueError, match="must be below 4; it has 7"):
        vllm_maps.compute_logical_maps(torch.tensor([0, 7]), 4)
    with pytest.raises(ValueError, match=r"must be \[P\] or \[L, P\] on the CPU"):
        vllm_maps.compute_logical_maps(torch.zeros(1, 1, 1, dtype=torch.int64), 4)


def test_small_batches_of_many_ranks_spread_over_the_replicas() -> None:
    """D4: a token each of 8 ranks all goes to the first replica by vLLM's tables."""
    topology = eplb.Topology(8)
    row = torch.tensor([0, 1, 2, 3, 0, 1, 0, 2])
    own = vllm_maps.compute_logical_maps(row, 4)
    assert [picks(*own, 0, 1)[0] for _ in range(8)] == [0] * 8
    sent = []
    for rank in range(8):
        tables = vllm_maps.dispatch_maps(row, 4, topology=topology, rank=rank, mode="rotated")
        sent += picks(*tables, 0, 1)
        assert sorted(s for s in tables[0][0].tolist() if s >= 0) == [0, 4, 6]
    assert sorted(np.bincount(sent, minlength=8)[[0, 4, 6]].tolist()) == [2, 3, 3]


def test_even_tables_are_the_library_s_local_first() -> None:
    layout = eplb.ExpertLayout(ROW[None], 4, topology=FOUR)
    for rank in range(4):
        maps, count = vllm_maps.dispatch_maps(ROW, 4, topology=FOUR, rank=rank, mode="even")
        assert maps[:, 0].tolist() == eplb.even_dispatch_table(layout)[rank, 0].tolist()
        assert count.tolist() == [1] * 4


def test_weighted_tables_follow_the_shares() -> None:
    load = torch.tensor([[8, 1, 5, 0]])
    layout = eplb.ExpertLayout(ROW[None], 4, topology=FOUR)
    shares = eplb.replica_shares(layout, load)[0]
    maps, count = vllm_maps.dispatch_maps(ROW, 4, topology=FOUR, rank=1, mode="weighted", expert_load=load[0])
    for slot, expert in enumerate(ROW.tolist()):
        entries = maps[expert, : int(count[expert])]
        assert abs(float((entries == slot).float().mean()) - shares[slot]) <= 0.5 / int(count[expert])
    plain = vllm_maps.dispatch_maps(ROW, 4, topology=FOUR, rank=1, mode="weighted")
    rotated = vllm_maps.dispatch_maps(ROW, 4, topology=FOUR, rank=1, mode="rotated")
    assert all(torch.equal(a, b) for a, b in zip(plain, rotated, strict=True))


@pytest.mark.parametrize("mode", ["rotated", "even", "weighted"])
def test_ranks_that_map_the_same_tokens_have_equal_tables(mode: str) -> None:
    """Else a token would be computed twice or never; the layers still begin elsewhere."""
    maps, count = vllm_maps.dispatch_maps(
        ROW.repeat(3, 1), 4, topology=FOUR, rank=None, mode=mode, expert_load=torch.ones(3, 4), first_layer=1
    )
    assert len({int(maps[layer, 0, 0]) for layer in range(3)}) > 1
    for layer in range(3):
        alone = vllm_maps.dispatch_maps(
            ROW, 4, topology=FOUR, rank=None, mode=mode, expert_load=torch.ones(4), first_layer=1 + layer
        )
        width = alone[0].shape[-1]
        assert torch.equal(maps[layer][:, :width], alone[0])
        assert torch.equal(count[layer], alone[1])


def test_only_ranks_that_map_their_own_tokens_have_tables_of_their_own() -> None:
    own = {"all2all_backend": "deepep_low_latency", "enable_expert_parallel": True, "use_all2all": True}
    assert vllm_maps.sender(SimpleNamespace(**own), 3) == 3
    others = {"all2all_backend": "allgather_reducescatter", "enable_expert_parallel": False, "use_all2all": False}
    for name, value in others.items():
        assert vllm_maps.sender(SimpleNamespace(**own | {name: value}), 3) is None
    assert vllm_maps.sender(SimpleNamespace(), 3) is None


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(0, 4), st.integers(1, 3), st.data())
def test_counts_stay_with_their_experts_when_a_layer_moves(
    experts: int, redundant: int, windows: int, data: st.DataObject
) -> None:
    """D1: vLLM reads a window's counts by slot with the map of later."""
    slots = experts + redundant
    holds = [
        *range(experts),
        *data.draw(st.lists(st.integers(-1, experts - 1), min_size=redundant, max_size=redundant)),
    ]
    before, after = (torch.tensor(data.draw(st.permutations(holds))) for _ in range(2))
    counts = st.lists(st.integers(0, 99), min_size=slots, max_size=slots)
    window = torch.tensor([data.draw(counts) for _ in range(windows)], dtype=torch.int32) * (before >= 0)
    window = window.to(torch.int32)
    truth = fold_slots(window[:, None], before[None], experts)
    vllm_maps.fold_window(window, before, after)
    assert np.array_equal(fold_slots(window[:, None], after[None], experts), truth)
