"""What operators read of vLLM's ranks: parts, what commits brought, placements, bytes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from eplb_core.adapters import hooking
from eplb_core.adapters.vllm import plugin as vllm
from eplb_core.adapters.vllm import policy
from eplb_core.adapters.vllm.policy import PolicyOptions
from eplb_core.exposition import Placements, samples
from eplb_core.loading.transports import LocalCopy
from tests.adapters.vllm import test_communicator
from tests.adapters.vllm.fakes import CONFIG, REVERSED, Default, state_of

pytestmark = pytest.mark.usefixtures("own_numbers")
FIRST = torch.arange(8) % 4


def active() -> dict[str, float]:
    return {labels[1]: value for (name, labels), value in samples().items() if name == "eplb_part_active"}


def test_parts_are_in_effect_or_not_and_those_switched_off_are_not_told(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPLB_CORE_OFF", "maps")
    del engine.EplbState.update_mapping  # a part does without
    vllm.activate(engine)
    assert active() == {}
    state_of(engine)
    assert active() == {"policy": 1.0, "dispatch": 1.0, "fold": 1.0}


def test_a_part_that_does_not_fit_or_was_not_taken_is_not_in_effect(engine: Any) -> None:
    def other(model_state: Any, layers: Any) -> None: ...

    engine._commit_eplb_maps = other
    vllm.activate(engine)
    state = engine.EplbState("naive")
    state.policy = Default
    state.add_model(SimpleNamespace(num_local_physical_experts=2), CONFIG)
    assert active() == {"policy": 0.0, "maps": 1.0, "dispatch": 0.0, "fold": 0.0}


def test_an_engine_that_cannot_be_asked_for_its_rank_serves_on_and_its_parts_are_told(engine: Any) -> None:
    vllm.activate(engine)
    engine.get_ep_group = None
    _, state = state_of(engine)
    assert active()["maps"] == 1.0
    assert active()["dispatch"] == 0.0
    engine._commit_eplb_maps_for_layer(state, REVERSED, 1)
    assert torch.equal(state.physical_to_logical_map[1], REVERSED)


def test_commits_count_the_layers_that_changed_and_the_experts_that_came_to_this_rank(engine: Any) -> None:
    vllm.activate(engine)
    _, state = state_of(engine)

    def told() -> tuple[float, float]:
        found = samples()
        return found["eplb_layers_installed_total", ("1",)], found["eplb_experts_received_total", ("1",)]

    assert told() == (0.0, 0.0)
    engine._commit_eplb_maps_for_layer(state, FIRST.clone(), 0)
    assert told() == (0.0, 0.0)
    engine._commit_eplb_maps_for_layer(state, REVERSED, 1)  # slots 2 and 3 get experts 1 and 0
    assert told() == (1.0, 2.0)
    engine._commit_eplb_maps(state, FIRST.repeat(2, 1))
    assert told() == (2.0, 4.0)
    engine._commit_eplb_maps_for_layer(state, torch.tensor([0, 1, 3, 2, 0, 1, 2, 3]), 0)  # within the rank
    assert told() == (3.0, 4.0)


def test_a_placement_tells_what_it_saw_under_the_live_map() -> None:
    placements = Placements()
    load = torch.tensor([[90, 10, 10, 10]])
    live = torch.tensor([[0, 1, 2, 3]])
    options = PolicyOptions()
    policy.rebalance(load, 4, 1, 1, 2, live, options=options, placements=placements)
    load[:] = 7  # the engine writes into its own
    told = samples()
    assert told["eplb_balancedness_seen_ratio", ("", "1x4")] == pytest.approx(60 / 100)
    assert told["eplb_balancedness_bound_ratio", ("", "1x4")] >= told["eplb_balancedness_predicted_ratio", ("", "1x4")]
    policy.rebalance(load, 4, 1, 1, 2, None, options=options, placements=placements)
    told = samples()
    assert ("eplb_balancedness_seen_ratio", ("", "1x4")) not in told  # nothing was live
    assert told["eplb_placements_total", ("", "1x4")] == 2.0


def test_a_policy_that_raises_is_counted(engine: Any) -> None:
    vllm.activate(engine)
    state_of(engine)
    given = torch.full((1, 4), np.nan)
    engine.DefaultEplbPolicy.rebalance_experts(given, 8, 1, 1, 4, None)
    assert samples()["eplb_fallbacks_total", ("1", "policy")] == 1.0
    assert hooking.failure_of("policy")


def test_bytes_that_a_communicator_read_are_told() -> None:
    ranks, _, made = test_communicator.connected(LocalCopy)
    each = made[0]
    each.set_transfer_context(test_communicator.OLD, 0)
    each._asked[1] = [(each._first, 0, 0, 0, each._stride[0])]
    each._read()
    told = samples()
    assert told["eplb_read_bytes_total", ("0",)] == each._stride[0] > 0
    assert told["eplb_read_seconds_total", ("0",)] > 0.0
    assert told["eplb_read_bytes_total", ("1",)] == 0.0
    del ranks
