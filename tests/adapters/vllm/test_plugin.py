"""The hooks on a stand-in for vLLM's module: tensors in, tensors out. The engine's own is in tests/engines."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import eplb_core as eplb
from eplb_core.adapters import hooking
from eplb_core.adapters.balancers import Balancers
from eplb_core.adapters.vllm import maps as vllm_maps
from eplb_core.adapters.vllm import plugin as vllm
from tests.adapters.fakes import group_of_one, on_ranks
from tests.adapters.vllm.fakes import CONFIG, OLD, POLICY, REVERSED, Default, engine_module, state_of


def test_the_policy_stands_wherever_vllm_has_its_own(engine: Any) -> None:
    active = vllm.activate(engine)
    assert active.parts == vllm.PARTS
    policy: Any = active.policy
    assert {"default": policy} == engine.EPLB_POLICIES
    for module in (engine, sys.modules[POLICY], sys.modules[f"{POLICY}.default"]):
        assert module.DefaultEplbPolicy is policy
    load = torch.tensor([[4, 4, 4, 4]])
    assert torch.equal(policy.rebalance_experts(load, 8, 1, 1, 4, OLD), OLD)
    assert torch.equal(policy.rebalance_experts(load, 8, 1, 1, num_ranks=4, old_global_expert_indices=OLD), OLD)
    assert policy.preserve_intragpu_slots(OLD.numpy(), 4, OLD.numpy()).tolist() == OLD.tolist()


def test_what_ours_refuses_the_engine_answers(engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    policy: Any = vllm.activate(engine).policy
    assert policy.rebalance_experts(torch.ones(1, 4), 7, 1, 1, 4).tolist() == [[-7] * 7]
    assert policy.preserve_intragpu_slots(None, 4, None) == "engine"
    assert "`num_replicas` (=7) must be a multiple of the 4 ranks" in caplog.text


def test_tables_are_this_rank_s_after_start_and_after_every_commit(engine: Any) -> None:
    vllm.activate(engine)
    state, model_state = state_of(engine)
    assert model_state.logical_to_physical_map[0, 0, :3].tolist() == [4, 0, -1]  # rank 1 begins with the second
    new = torch.tensor([3, 0, 1, 2, 3, 1, 2, 0])
    engine._commit_eplb_maps_for_layer(model_state, new, 1)
    assert model_state.logical_to_physical_map[1, 0, :3].tolist() == [7, 1, -1]
    new = new[[0, 7, 1, 2, 3, 4, 5, 6]]
    engine._commit_eplb_maps(model_state, new.repeat(2, 1))
    assert model_state.logical_to_physical_map[0, 0, :3].tolist() == [2, 1, -1]
    new = new[[0, 2, 1, 3, 4, 5, 7, 6]]
    state.update_mapping(CONFIG, new.repeat(2, 1))
    assert model_state.logical_to_physical_map[0, 0, :3].tolist() == [2, 1, -1]
    # Asked for outside of a commit it is still the inverse.
    assert engine.compute_logical_maps(new, 4)[0].tolist() == [[1, 2], [3, 7], [4, 6], [0, 5]]


def test_ranks_that_map_the_same_tokens_get_equal_tables(engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    vllm.activate(engine)
    _, model_state = state_of(engine, "allgather_reducescatter")
    assert model_state.logical_to_physical_map[:, 0, :2].tolist() == [[0, 4], [4, 0]]
    assert "in effect in vLLM 9.9.9: policy (place, min_gain=0.01), maps, fold, dispatch (rotated, " in caplog.text


def test_counts_of_a_window_stay_with_their_experts(engine: Any) -> None:
    """D1."""
    vllm.activate(engine)
    _, model_state = state_of(engine)
    model_state.expert_load_window += torch.arange(8, dtype=torch.int32)
    other = model_state.expert_load_window[:, 0].clone()
    engine._commit_eplb_maps_for_layer(model_state, REVERSED, 1)
    assert model_state.expert_load_window[0, 1].tolist() == [10, 8, 6, 4, 0, 0, 0, 0]
    assert torch.equal(model_state.expert_load_window[:, 0], other)
    engine._commit_eplb_maps(model_state, REVERSED.repeat(2, 1))
    assert model_state.expert_load_window[0].tolist() == [[10, 8, 6, 4, 0, 0, 0, 0]] * 2
    engine._commit_eplb_maps(
        model_state, torch.tensor([[*REVERSED, 0, 1]] * 2)
    )  # ranks came: the engine pads the window itself
    assert model_state.expert_load_window[0].tolist() == [[10, 8, 6, 4, 0, 0, 0, 0]] * 2


@pytest.mark.parametrize("part", vllm.PARTS)
def test_each_part_is_switched_off_alone(engine: Any, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPLB_CORE_OFF", part)
    active = vllm.activate(engine)
    assert active.parts == tuple(p for p in vllm.PARTS if p != part)
    assert (engine.DefaultEplbPolicy is Default) == (part == "policy")
    _, model_state = state_of(engine)
    assert (model_state.logical_to_physical_map[0, 0, 0] == 0) == (part == "dispatch")
    model_state.expert_load_window += 1
    engine._commit_eplb_maps_for_layer(model_state, REVERSED, 1)
    assert (model_state.expert_load_window[0, 1].tolist() == [1] * 8) == (part == "fold")
    engine._commit_eplb_maps(model_state, REVERSED.repeat(2, 1))
    assert (model_state.expert_load_window[0].tolist() == [[1] * 8] * 2) == (part == "fold")


def test_options_choose_mode_and_tables(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPLB_CORE_OPTIONS", "mode=deepseek,dispatch=weighted,min_gain=0.5,max_transfers=3")
    active = vllm.activate(engine)
    assert (active.dispatch, active.options.mode, active.options.min_gain) == ("weighted", "deepseek", 0.5)
    _, model_state = state_of(engine)
    engine._commit_eplb_maps_for_layer(model_state, torch.tensor([0, 0, 1, 2, 3, 1, 2, 3]), 1)
    assert model_state.logical_replica_count[1].min() >= 1


def test_a_function_of_another_signature_leaves_its_part_to_the_engine(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def commit(model_state: Any, layers: list[int], new_physical_to_logical_map: torch.Tensor) -> None: ...

    engine._commit_eplb_maps = commit
    assert vllm.activate(engine).parts == ("policy", "maps")
    assert engine._commit_eplb_maps is commit
    assert "dispatch is left to vLLM 9.9.9, written for 0.33.0: expected _commit_eplb_maps(model_state, " in caplog.text


def test_a_policy_that_vllm_did_not_take_is_named(engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    vllm.activate(engine)
    state = engine.EplbState("naive")
    state.policy = Default
    state.add_model(SimpleNamespace(num_local_physical_experts=2), CONFIG)
    assert "policy is not in effect: vLLM chose Default" in caplog.text


def test_registering_acts_once_and_only_when_asked(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm.register()
    assert vllm.active_parts() == ()
    assert engine.DefaultEplbPolicy is Default
    monkeypatch.setenv("EPLB_CORE", "vllm")
    vllm.register()
    policy = engine.DefaultEplbPolicy
    vllm.register()
    assert vllm.active_parts() == vllm.PARTS
    assert engine.DefaultEplbPolicy is policy is not Default


def without_policy(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, f"{POLICY}.default", None)


def wrong_option(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPLB_CORE_OPTIONS", "mode=fast")


@pytest.mark.parametrize(
    ("change", "line"),
    [(wrong_option, "ValueError: EPLB_CORE_OPTIONS (=mode=fast)"), (without_policy, "ModuleNotFoundError")],
)
def test_a_wrong_option_or_a_module_that_is_not_there_leaves_all_to_the_engine_with_one_line(
    change: Any, line: str, engine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("EPLB_CORE", "vllm")
    change(engine, monkeypatch)
    vllm.register()
    assert vllm.active_parts() == ()
    assert engine.DefaultEplbPolicy is Default
    assert {"default": Default} == engine.EPLB_POLICIES
    assert f"not active: {line}" in caplog.text


def test_a_transport_that_some_rank_cannot_use_leaves_the_engine_s_communicator(
    engine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = engine.create_eplb_communicator
    vllm.activate(engine)
    assert engine.create_eplb_communicator is own
    monkeypatch.setenv("EPLB_CORE_OPTIONS", "transport=cuda_ipc")
    vllm.activate(engine_module())
    monkeypatch.setenv("EPLB_CORE_OPTIONS", "transport=shared_memory")
    vllm.activate(engine)
    assert engine.create_eplb_communicator(SimpleNamespace(cpu_group=None), "torch_gloo", [], []) == "torch_gloo"
    assert "communicator: the engine's own code goes on" in caplog.text


def test_a_communicator_over_a_transport_takes_the_place_of_the_engine_s(
    engine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EPLB_CORE_OPTIONS", "transport=shared_memory")
    vllm.activate(engine)
    with group_of_one(tmp_path) as alone:
        group = SimpleNamespace(cpu_group=alone)
        made = engine.create_eplb_communicator(group, "torch_gloo", [[torch.zeros(2, 4)]], [torch.zeros(2, 4)])
    assert type(made).__name__ == "TransportCommunicator"


def test_another_transport_function_keeps_the_engine_s(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def create_eplb_communicator(group: Any) -> None: ...

    engine.create_eplb_communicator = create_eplb_communicator
    monkeypatch.setenv("EPLB_CORE_OPTIONS", "transport=shared_memory")
    assert vllm.activate(engine).parts == vllm.PARTS
    assert engine.create_eplb_communicator is create_eplb_communicator


def test_the_policy_alone_leaves_all_else_as_it_was(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def add_model(self: Any, other: int) -> None: ...

    engine.EPLB_POLICIES["another"] = object
    engine.EplbState.add_model = add_model
    own = (engine.compute_logical_maps, engine._commit_eplb_maps, engine._commit_eplb_maps_for_layer)
    monkeypatch.setenv("EPLB_CORE_OFF", "maps,dispatch,fold")
    active = vllm.activate(engine)
    assert active.parts == ("policy",)
    assert (engine.compute_logical_maps, engine._commit_eplb_maps, engine._commit_eplb_maps_for_layer) == own
    assert engine.EplbState.add_model is add_model
    assert engine.EPLB_POLICIES["another"] is object


# ---- one rank alone that falls back ----------------------------------------------------------------------------------


def committed(engine: Any) -> Any:
    """The tables of a rank of four slots, which maps the same tokens as the others, after a commit of layer 1."""
    _, model_state = state_of(engine, "allgather_reducescatter", slots_per_rank=4)
    engine._commit_eplb_maps_for_layer(model_state, torch.tensor([3, 0, 1, 2, 3, 1, 2, 0]), 1)
    return model_state.logical_to_physical_map.tolist()


def test_where_the_policy_fails_on_one_rank_all_ranks_take_the_engine_s(
    two: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    policies: list[Any] = [vllm.activate(engine).policy for engine in two]
    good, broken = torch.tensor([[1, 1, 1, 1]]), torch.tensor([[1, 1, 1, -1]])  # ours refuses the other

    def placed(*loads: torch.Tensor) -> list[Any]:
        return on_ranks(lambda rank: policies[rank].rebalance_experts(loads[rank], 8, 1, 1, 2, OLD).tolist())

    assert placed(good, good) == [OLD.tolist()] * 2
    assert not caplog.records
    assert placed(good, broken) == [[[-7] * 8]] * 2
    assert "policy: rank 1 (" in caplog.text
    assert "all ranks take the engine's own" in caplog.text


def test_auto_starts_anew_on_all_ranks_where_one_has_missed_a_window(
    two: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPLB_CORE_OPTIONS", "mode=auto")
    policies: list[Any] = [vllm.activate(engine).policy for engine in two]
    windows = [torch.tensor(window) for window in np.random.default_rng(0).poisson([5, 10, 90, 40], (9, 1, 4))]
    broken, own = torch.tensor([[1, 1, 1, -1]]), [[-7] * 8]

    def placed(*loads: torch.Tensor) -> list[Any]:
        return on_ranks(lambda rank: policies[rank].rebalance_experts(loads[rank], 8, 1, 1, 2, OLD).tolist())

    for window in windows[:4]:
        assert placed(window, window)[0] != own
    assert placed(windows[4], broken) == [own] * 2
    alone = Balancers()
    for window in windows[5:]:
        topology = eplb.Topology(2)
        live = eplb.ExpertLayout(OLD, 4, topology=topology)
        expected = alone.layout_of(window.numpy(), live, move_cost=0.01).physical_to_logical_map.tolist()
        assert placed(window, window) == [expected] * 2


def test_ranks_that_come_or_go_are_not_compared(two: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all of them ask; who waited for the others would wait for ever."""
    policy: Any = vllm.activate(two[0]).policy
    monkeypatch.setattr(hooking, "gather_over", lambda group: pytest.fail("ranks were asked"))
    for came_or_went in (torch.where(torch.arange(8) > 5, -1, OLD), torch.arange(12)[None] % 4):
        policy.rebalance_experts(torch.ones(1, 4), 8, 1, 1, 2, came_or_went)
    policy.rebalance_experts(torch.ones(1, 4), 8, 1, 1, 4, OLD)  # the group has two ranks


def test_without_a_group_of_ranks_the_policy_answers_alone(engine: Any) -> None:
    """vLLM's own tests call it in a process that has made none."""

    def get_eplb_group() -> Any:
        raise AssertionError("EPLB group is not initialized")

    engine.get_eplb_group = get_eplb_group
    policy: Any = vllm.activate(engine).policy
    assert torch.equal(policy.rebalance_experts(torch.ones(1, 4), 8, 1, 1, 2, OLD), OLD)


def test_where_equal_tables_fail_on_one_rank_all_ranks_write_the_engine_s(
    two: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All ranks map the same tokens: with other tables some would be computed twice and some nowhere."""
    original, failing = vllm_maps.dispatch_maps, threading.local()

    def fails_on_one(p2l: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if p2l.dim() == 1 and hasattr(failing, "yes"):  # at the commit of a layer
            raise MemoryError("no room")
        return original(p2l, *args, **kwargs)

    def commit(rank: int) -> Any:
        if rank == 1:
            failing.yes = True
        return committed(two[rank])

    monkeypatch.setattr(vllm_maps, "dispatch_maps", fails_on_one)
    for engine in two:
        vllm.activate(engine)
    first, second = on_ranks(commit)
    assert first == second
    assert first[1][0][:3] == [1, 7, -1]  # not rotated by layer: the engine's own
    assert "dispatch: rank 1 (" in caplog.text
    assert "MemoryError: no room" in caplog.text


@pytest.mark.parametrize("trouble", ["no node", "'weighted', 8)"])
def test_a_rank_that_cannot_write_equal_tables_leaves_all_ranks_the_engine_s(
    trouble: str, two: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By an error, or since it has another mode: at every commit the others would wait for its word."""

    def fails() -> int:
        raise RuntimeError("no node")

    vllm.activate(two[0])
    if trouble == "no node":
        two[1].get_node_count = fails
    else:
        monkeypatch.setenv("EPLB_CORE_OPTIONS", "dispatch=weighted")
    vllm.activate(two[1])
    first, second = on_ranks(lambda rank: committed(two[rank]))
    assert first == second
    assert first[1][0][:3] == [1, 7, -1]  # not rotated by layer: the engine's own
    assert "dispatch: the engine's own code goes on, since ours raised EplbError: rank 1 has" in caplog.text
    assert trouble in caplog.text


def test_a_rank_with_tables_of_its_own_whose_model_lacks_what_they_need_says_so(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    vllm.activate(engine)
    state = engine.EplbState("deepep_low_latency")
    state.add_model(SimpleNamespace(), CONFIG)
    assert "dispatch: " in caplog.text
    assert "has no attribute 'num_local_physical_experts'" in caplog.text


def test_an_engine_without_the_state_s_class_keeps_what_needs_it(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in effect is said to be."""
    monkeypatch.setenv("EPLB_CORE", "vllm")
    del engine.EplbState
    vllm.register()
    assert vllm.active_parts() == ("policy", "maps", "fold")
