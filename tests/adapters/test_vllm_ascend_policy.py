from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import eplb_core as eplb
from eplb_core.adapters.vllm_ascend_policy import EplbCorePolicy, breaks_rules, use_in_factory
from eplb_core.load import fold_slots

TABLE = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 0], [1, 2, 3]])  # 4 ranks of 3 slots, 8 experts


def workload(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 1000, shape))


def test_the_table_obeys_the_engine_s_three_rules_and_is_more_even() -> None:
    table = TABLE.repeat(6, 1, 1)
    for load in (workload(0, 6, 4, 3), workload(1, 5, 6, 4, 3)):
        change, order, new = EplbCorePolicy().rebalance_experts(table, load)
        assert change == 1
        assert new.shape == table.shape
        assert sorted(order.tolist()) == list(range(6))
        assert not breaks_rules(table.reshape(6, -1).numpy(), new.reshape(6, -1).numpy(), 4, 8).any()
        by_expert = fold_slots(load.reshape(-1, 6, 12).sum(dim=0).numpy(), table.reshape(6, -1).numpy(), 8)
        layouts = (eplb.ExpertLayout(each.reshape(6, -1), 8, topology=eplb.Topology(4)) for each in (table, new))
        before, after = (eplb.mean_balancedness(eplb.rank_load(layout, by_expert)) for layout in layouts)
        assert after > before


def test_layers_come_in_the_order_of_their_gain_and_an_even_load_changes_nothing() -> None:
    table = TABLE.repeat(3, 1, 1)
    load = torch.ones(3, 4, 3, dtype=torch.int64)
    load[0] = 0
    load[2, 0] = 500  # rank 0 alone is hot
    load[1, 1, 0] = 9
    _, order, new = EplbCorePolicy().rebalance_experts(table, load)
    assert order[0] == 2
    assert torch.equal(new[0], table[0])
    still = EplbCorePolicy(min_gain=1.0).rebalance_experts(table, load)
    assert (still[0], torch.equal(still[2], table)) == (0, True)


def test_a_layer_that_would_break_a_rule_keeps_its_table() -> None:
    """Rank 3 holds expert 1 twice: whatever stays there the engine would put back."""
    old = np.array([[0, 1, 2, 3]] * 4)
    new = np.array([[0, 1, 2, 3], [1, 0, 2, 3], [0, 0, 2, 3], [0, 2, 1, 3]])
    assert breaks_rules(old, new, 2, 4).tolist() == [False, True, True, False]
    more = np.array([[0, 1, 2, 3, 4, 0, 1, 2]])
    assert breaks_rules(more, np.array([[0, 1, 2, 3, 4, 0, 3, 3]]), 2, 5).tolist() == [True]  # 3 twice, no more
    assert breaks_rules(more, np.array([[0, 1, 2, 3, 4, 0, 3, 2]]), 2, 5).tolist() == [False]
    assert breaks_rules(more, np.array([[0, 1, 2, 3, 3, 0, 1, 2]]), 2, 5).tolist() == [True]  # no 4
    forced = torch.tensor([[[0, 0], [1, 2]]])
    load = torch.tensor([[[500, 1], [1, 1]]])
    _, _, answer = EplbCorePolicy(min_gain=0.0, transfer_price=0.0).rebalance_experts(forced, load)
    rows = [each.reshape(1, -1).numpy() for each in (forced, answer)]
    assert np.array_equal(rows[0], rows[1]) or not breaks_rules(rows[0], rows[1], 2, 3).any()


def test_shapes_that_do_not_fit_raise() -> None:
    with pytest.raises(ValueError, match=r"`expert_workload` \(shape \[1, 4, 2\]\) must be \[L, R, S\]"):
        EplbCorePolicy().rebalance_experts(TABLE[None], torch.ones(1, 4, 2))


def test_the_factory_gives_out_ours_and_falls_back_to_its_own(caplog: pytest.LogCaptureFixture) -> None:
    class Theirs:
        def rebalance_experts(self, table: Any, load: Any) -> str:
            return "theirs"

    class Factory:
        @staticmethod
        def generate_policy(policy_type: int) -> Theirs:
            return Theirs()

    use_in_factory(Factory, min_gain=1.0)
    policy = Factory.generate_policy(2)
    answer: Any = policy.rebalance_experts(TABLE[None], torch.ones(1, 4, 3, dtype=torch.int64))
    assert torch.equal(answer[2], TABLE[None])
    assert policy.rebalance_experts(TABLE[None], torch.ones(2)) == "theirs"
    assert "must be [L, R, S]" in caplog.text
