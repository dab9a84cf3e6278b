from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core import DispatchTables, ExpertLayout, LoadCounter, Topology, rank_load, replica_shares, topk_to_slots
from tests.cases import layouts, random_layout


def dispatch_all(
    layout: ExpertLayout, ids_by_rank: list[torch.Tensor], mode: str, layer: int = 0
) -> list[torch.Tensor]:
    """What every rank's tables answer when their counts are summed over ranks."""
    experts = layout.num_experts
    total = torch.zeros(layout.topology.num_ranks, experts, dtype=torch.int32)
    for rank, ids in enumerate(ids_by_rank):
        total[rank] = torch.bincount(ids[ids >= 0], minlength=experts)
    answers = []
    for rank, ids in enumerate(ids_by_rank):

        def all_reduce(batch: torch.Tensor, rank: int = rank) -> None:
            assert torch.equal(batch[rank], total[rank])
            batch.copy_(total)

        tables = DispatchTables(layout, rank=rank, mode=mode, all_reduce=all_reduce)  # type: ignore[arg-type]
        answers.append(tables.map(layer, ids))
    return answers


def loads(layout: ExpertLayout, answers: list[torch.Tensor]) -> npt.NDArray[np.int64]:
    slots = torch.cat([a.flatten() for a in answers])
    by_slot = torch.bincount(slots[slots >= 0], minlength=layout.num_slots)
    return by_slot.view(layout.topology.num_ranks, -1).sum(1).numpy()


def skewed_ids(layout: ExpertLayout, rows: int, columns: int, seed: int) -> list[torch.Tensor]:
    rng = np.random.default_rng(seed)
    taste = rng.lognormal(0, 1.0, layout.num_experts)
    scores = [np.log(taste) + rng.gumbel(size=(rows, layout.num_experts)) for _ in range(layout.topology.num_ranks)]
    return [torch.tensor(np.argsort(-score, axis=1)[:, :columns]) for score in scores]


@pytest.mark.parametrize("seed", range(4))
def test_quotas_are_within_half_a_percent_of_the_optimum(seed: int) -> None:
    layout = random_layout(layers=1, experts=32, slots=64, ranks=8, seed=seed)
    ids = skewed_ids(layout, 2000, 4, seed)
    total = sum(torch.bincount(x.flatten(), minlength=32) for x in ids).numpy()[None]  # type: ignore[union-attr]
    optimum = rank_load(layout, total, shares=replica_shares(layout, total)).max()
    answers = dispatch_all(layout, ids, "quota")
    assert loads(layout, answers).max() <= 1.005 * optimum + 4
    even = rank_load(layout, total).max()
    assert loads(layout, answers).max() < even


@given(layouts(num_layers=1), st.integers(0, 9), st.integers(0, 2**16))
@settings(max_examples=60)
def test_every_token_has_a_place_of_its_expert_and_totals_do_not_depend_on_the_rank(
    layout: ExpertLayout, rows: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    columns = min(2, layout.num_experts)
    ids = []
    for _ in range(layout.topology.num_ranks):
        scores = rng.random((rows, layout.num_experts))
        chosen = np.argsort(scores, axis=1)[:, :columns]
        chosen[rng.random(chosen.shape) < 0.2] = -1
        ids.append(torch.tensor(chosen))
    for mode in ("quota", "fewest"):
        answers = dispatch_all(layout, ids, mode)
        p2l = torch.tensor(layout.physical_to_logical_map[0])
        for mine, slots in zip(ids, answers, strict=True):
            assert torch.equal(torch.where(slots >= 0, p2l[slots.clamp(min=0)], -1), mine)


def test_totals_by_slot_are_exact() -> None:
    """An expert alone on three ranks, sent by three ranks unequally: 7, 7 and 7 of 21, whoever sends."""
    layout = ExpertLayout([[0, 0, 0]], num_experts=1, topology=Topology(num_ranks=3))
    ids = [torch.zeros(n, 1).long() for n in (15, 1, 5)]
    assert loads(layout, dispatch_all(layout, ids, "quota")).tolist() == [7, 7, 7]


def test_slots_and_sources_are_matched_in_order() -> None:
    """Where every rank sends as much as its slot should get, nothing leaves a rank."""
    layout = ExpertLayout([[0, 0, 0, 0]], num_experts=1, topology=Topology(num_ranks=4))
    answers = dispatch_all(layout, [torch.zeros(6, 1).long()] * 4, "quota")
    assert [set(a.flatten().tolist()) for a in answers] == [{0}, {1}, {2}, {3}]


@given(layouts(num_layers=1), st.data())
@settings(max_examples=60)
def test_fewest_uses_one_slot_for_each_expert_that_is_used(layout: ExpertLayout, data: st.DataObject) -> None:
    used = data.draw(st.sets(st.integers(0, layout.num_experts - 1)))
    ids = torch.tensor(sorted(used) * 3, dtype=torch.int64)[:, None]
    slots = DispatchTables(layout, mode="fewest").map(0, ids)
    assert len(set(slots.flatten().tolist())) == len(used)


def test_fewest_keeps_the_most_slots_used_on_a_rank_low() -> None:
    """Of 8 used experts on 4 ranks with two slots for each, no rank need read more than 2."""
    layout = ExpertLayout(
        [[0, 1, 2, 3, 0, 1, 4, 5, 2, 3, 6, 7, 4, 5, 6, 7]], num_experts=8, topology=Topology(num_ranks=4)
    )
    slots = DispatchTables(layout, mode="fewest").map(0, torch.arange(8)[:, None])
    assert torch.bincount(slots.flatten() // 4, minlength=4).tolist() == [2, 2, 2, 2]
    spread = DispatchTables(layout, mode="row").map(0, torch.arange(8).repeat(32)[:, None])
    assert len(set(spread.flatten().tolist())) == 16


def test_fewest_counts_experts_without_a_choice_first() -> None:
    layout = ExpertLayout([[0, 1, 3, 3, 2, -1]], num_experts=4, topology=Topology(num_ranks=2))
    tables = DispatchTables(layout, mode="fewest")
    assert tables.map(0, torch.arange(4)[:, None]).flatten().tolist() == [0, 1, 4, 3]
    assert tables.map(0, torch.tensor([[2], [3]])).flatten().tolist() == [4, 2]


def test_quota_counts_once_and_leaves_no_trace_in_the_next_batch() -> None:
    layout = random_layout(layers=2)
    load = LoadCounter(2, 32)
    tables = DispatchTables(layout, mode="quota", load=load)
    ids = torch.arange(32).repeat(10)[:, None]
    first = tables.map(1, ids)
    assert int(tables._batch.abs().sum()) == 0
    assert torch.equal(tables.map(1, ids), first)
    assert load.count[1, 0].tolist() == [20] * 32


def test_what_the_solver_cannot_hold_is_refused_when_the_tables_are_made() -> None:
    """FAULTS C15: a shape that fits the check and fails at its launch is worse than one that is refused."""
    layout = ExpertLayout.trivial(1, 256, num_slots=512, topology=Topology(num_ranks=64))
    assert DispatchTables(layout, mode="quota").max_replicas == 32
    with pytest.raises(
        ValueError, match=r"`max_replicas` \(=33\) must be at most 32 for mode 'quota' with 256 redundant"
    ):
        DispatchTables(layout, mode="quota", max_replicas=33)
    assert DispatchTables(layout, mode="weighted").max_replicas == 257


def test_a_batch_without_tokens_is_solved_too() -> None:
    """An idle rank still takes part in the sum."""
    layout = random_layout(layers=1)
    calls: list[int] = []
    tables = DispatchTables(layout, mode="quota", all_reduce=lambda batch: calls.append(int(batch.sum())))
    assert topk_to_slots(torch.zeros(0, 4).long(), tables.layer(0)).shape == (0, 4)
    assert topk_to_slots(torch.full((3, 4), -1), tables.layer(0)).tolist() == [[-1] * 4] * 3
    assert calls == [0, 0]


def test_a_sum_that_fails_leaves_no_trace_in_the_next_batch() -> None:
    layout, sums = random_layout(layers=1), []

    def all_reduce(batch: torch.Tensor) -> None:
        sums.append(int(batch.sum()))
        if len(sums) == 1:
            raise RuntimeError("a rank is gone")

    tables = DispatchTables(layout, mode="quota", all_reduce=all_reduce)
    with pytest.raises(RuntimeError, match="gone"):
        tables.map(0, torch.tensor([[1, 2, 3]]))
    tables.map(0, torch.tensor([[4, 5]]))
    assert sums == [3, 2]
