"""The hooks on a stand-in for vLLM's module: tensors in, tensors out. The engine's own is in tests/engines."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from eplb_core.adapters import hooking
from eplb_core.adapters.vllm import maps as vllm_maps
from eplb_core.adapters.vllm import plugin as vllm
from eplb_core.loading.agreement import LocalAgreement

NAMES = ("vllm", "vllm.distributed", "vllm.distributed.eplb", "vllm.distributed.eplb.policy")


class Default:
    """Stands in for vLLM's policy."""

    @classmethod
    def rebalance_experts(
        cls,
        weight: torch.Tensor,
        num_replicas: int,
        num_groups: int,
        num_nodes: int,
        num_ranks: int,
        old_global_expert_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return torch.full((len(weight), num_replicas), -7)

    @classmethod
    def preserve_intragpu_slots(cls, phy2log: Any, num_ranks: int, old_phy2log: Any) -> Any:
        return "engine"


def engine_module() -> Any:
    """vLLM's `eplb_state` as far as the hooks see it: what its functions are given and what they write."""
    module: Any = SimpleNamespace()

    def compute_logical_maps(physical_to_logical_map: torch.Tensor, num_logical_experts: int) -> Any:
        return vllm_maps.compute_logical_maps(physical_to_logical_map, num_logical_experts)

    def _commit_eplb_maps_for_layer(model_state: Any, new_physical_to_logical_map: torch.Tensor, layer: int) -> None:
        model_state.physical_to_logical_map[layer] = new_physical_to_logical_map
        maps, count = module.compute_logical_maps(new_physical_to_logical_map, 4)
        model_state.logical_to_physical_map[layer] = -1
        model_state.logical_to_physical_map[layer, :, : maps.shape[-1]] = maps
        model_state.logical_replica_count[layer] = count

    def _commit_eplb_maps(model_state: Any, new_physical_to_logical_map: torch.Tensor) -> None:
        model_state.physical_to_logical_map = new_physical_to_logical_map.clone()
        maps, count = module.compute_logical_maps(new_physical_to_logical_map, 4)
        model_state.logical_to_physical_map = torch.nn.functional.pad(maps, (0, 8 - maps.shape[-1]), value=-1)
        model_state.logical_replica_count = count

    class EplbState:
        def __init__(self, backend: str) -> None:
            self.policy = module.EPLB_POLICIES["default"]
            self.parallel_config = SimpleNamespace(
                all2all_backend=backend, enable_expert_parallel=True, use_all2all=True
            )
            self.model_states: dict[str, Any] = {}

        def add_model(self, model: Any, model_config: Any, model_name: str | None = None) -> None:
            state = SimpleNamespace(
                model=model,
                physical_to_logical_map=torch.arange(8).repeat(2, 1) % 4,
                expert_load_window=torch.zeros(3, 2, 8, dtype=torch.int32),
                last_expert_load=torch.ones(2, 4, dtype=torch.int64),
            )
            _commit_eplb_maps(state, state.physical_to_logical_map)
            self.model_states[model_config.compute_hash()] = state

        def update_mapping(self, model_config: Any, expanded_physical_to_logical: torch.Tensor) -> None:
            _commit_eplb_maps(self.model_states[model_config.compute_hash()], expanded_physical_to_logical)

    vars(module).update(
        compute_logical_maps=compute_logical_maps,
        _commit_eplb_maps_for_layer=_commit_eplb_maps_for_layer,
        _commit_eplb_maps=_commit_eplb_maps,
        EplbState=EplbState,
        create_eplb_communicator=lambda group_coordinator, backend, expert_weights, expert_buffer: backend,
        EPLB_POLICIES={"default": Default},
        DefaultEplbPolicy=Default,
        get_ep_group=lambda: SimpleNamespace(device_group=SimpleNamespace(rank=lambda: 1, size=lambda: 4)),
        get_node_count=lambda: 1,
    )
    return module


CONFIG = SimpleNamespace(compute_hash=lambda: "m")
MODEL = SimpleNamespace(num_local_physical_experts=2)


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Modules of vLLM's names with what the plug-in looks for in them."""
    for name in (*NAMES, f"{NAMES[3]}.default"):
        module: Any = ModuleType(name)
        module.DefaultEplbPolicy, module.__version__ = Default, "9.9.9"
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("EPLB_CORE", "EPLB_CORE_OFF", "EPLB_CORE_OPTIONS"):
        monkeypatch.delenv(name, raising=False)
    module = engine_module()
    monkeypatch.setitem(sys.modules, "vllm.distributed.eplb.eplb_state", module)
    monkeypatch.setattr(vllm, "_active", [])
    monkeypatch.setattr(hooking, "_logged", set())
    monkeypatch.setattr(hooking, "_log", [logging.getLogger("eplb_core")])
    return module


def state_of(engine: Any, backend: str = "deepep_low_latency") -> Any:
    state = engine.EplbState(backend)
    state.add_model(MODEL, CONFIG)
    return state


def test_the_policy_stands_wherever_vllm_has_its_own(engine: Any) -> None:
    active = vllm.activate(engine)
    assert active.parts == vllm.PARTS
    policy: Any = active.policy
    assert {"default": policy} == engine.EPLB_POLICIES
    for module in (engine, sys.modules[NAMES[3]], sys.modules[f"{NAMES[3]}.default"]):
        assert module.DefaultEplbPolicy is policy
    old = torch.arange(8).repeat(1, 1) % 4
    load = torch.tensor([[4, 4, 4, 4]])
    assert torch.equal(policy.rebalance_experts(load, 8, 1, 1, 4, old), old)
    assert torch.equal(policy.rebalance_experts(load, 8, 1, 1, num_ranks=4, old_global_expert_indices=old), old)
    assert policy.preserve_intragpu_slots(old.numpy(), 4, old.numpy()).tolist() == old.tolist()


def test_what_ours_refuses_the_engine_answers(engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    policy: Any = vllm.activate(engine).policy
    with caplog.at_level(logging.WARNING):
        assert policy.rebalance_experts(torch.ones(1, 4), 7, 1, 1, 4).tolist() == [[-7] * 7]
        assert policy.preserve_intragpu_slots(None, 4, None) == "engine"
    assert "`num_replicas` (=7) must be a multiple of the 4 ranks" in caplog.text


def test_tables_are_this_rank_s_after_start_and_after_every_commit(engine: Any) -> None:
    vllm.activate(engine)
    state = state_of(engine)
    model_state = state.model_states["m"]
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
    with caplog.at_level(logging.INFO):
        model_state = state_of(engine, "allgather_reducescatter").model_states["m"]
    assert model_state.logical_to_physical_map[:, 0, :2].tolist() == [[0, 4], [4, 0]]
    assert "in effect in vLLM 9.9.9: policy (place, min_gain=0.01), maps, fold, dispatch (rotated, equal" in caplog.text


def test_counts_of_a_window_stay_with_their_experts(engine: Any) -> None:
    """D1."""
    vllm.activate(engine)
    model_state = state_of(engine).model_states["m"]
    model_state.expert_load_window += torch.arange(8, dtype=torch.int32)
    other = model_state.expert_load_window[:, 0].clone()
    engine._commit_eplb_maps_for_layer(model_state, torch.tensor([3, 2, 1, 0, 3, 2, 1, 0]), 1)
    assert model_state.expert_load_window[0, 1].tolist() == [10, 8, 6, 4, 0, 0, 0, 0]
    assert torch.equal(model_state.expert_load_window[:, 0], other)
    engine._commit_eplb_maps(model_state, torch.tensor([[3, 2, 1, 0, 3, 2, 1, 0]] * 2))
    assert model_state.expert_load_window[0].tolist() == [[10, 8, 6, 4, 0, 0, 0, 0]] * 2
    grown = torch.tensor([[3, 2, 1, 0, 3, 2, 1, 0, 0, 1]] * 2)
    engine._commit_eplb_maps(model_state, grown)  # ranks came: the engine pads the window itself
    assert model_state.expert_load_window[0].tolist() == [[10, 8, 6, 4, 0, 0, 0, 0]] * 2


@pytest.mark.parametrize("part", vllm.PARTS)
def test_each_part_is_switched_off_alone(engine: Any, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPLB_CORE_OFF", part)
    active = vllm.activate(engine)
    assert active.parts == tuple(p for p in vllm.PARTS if p != part)
    assert (engine.DefaultEplbPolicy is Default) == (part == "policy")
    model_state = state_of(engine).model_states["m"]
    assert (model_state.logical_to_physical_map[0, 0, 0] == 0) == (part == "dispatch")
    model_state.expert_load_window += 1
    engine._commit_eplb_maps_for_layer(model_state, torch.tensor([3, 2, 1, 0, 3, 2, 1, 0]), 1)
    assert (model_state.expert_load_window[0, 1].tolist() == [1] * 8) == (part == "fold")


def test_options_choose_mode_and_tables(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPLB_CORE_OPTIONS", "mode=deepseek,dispatch=weighted,min_gain=0.5,max_transfers=3")
    active = vllm.activate(engine)
    assert (active.dispatch, active.options.mode, active.options.min_gain) == ("weighted", "deepseek", 0.5)
    model_state = state_of(engine).model_states["m"]
    engine._commit_eplb_maps_for_layer(model_state, torch.tensor([0, 0, 1, 2, 3, 1, 2, 3]), 1)
    assert model_state.logical_replica_count[1].min() >= 1


def test_a_function_of_another_signature_leaves_its_part_to_the_engine(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def commit(model_state: Any, layers: list[int], new_physical_to_logical_map: torch.Tensor) -> None: ...

    engine._commit_eplb_maps = commit
    with caplog.at_level(logging.WARNING):
        assert vllm.activate(engine).parts == ("policy", "maps")
    assert engine._commit_eplb_maps is commit
    assert (
        "dispatch is left to vLLM 9.9.9, written for 0.33.0: expected _commit_eplb_maps(model_state, "
        "new_physical_to_logical_map), found _commit_eplb_maps(model_state: 'Any', layers: "
    ) in caplog.text


def test_a_policy_that_vllm_did_not_take_is_named(engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    vllm.activate(engine)
    state = engine.EplbState("naive")
    state.policy = Default
    with caplog.at_level(logging.INFO):
        state.add_model(MODEL, CONFIG)
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


def test_a_wrong_option_leaves_all_to_the_engine_with_one_line(
    engine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("EPLB_CORE", "vllm")
    monkeypatch.setenv("EPLB_CORE_OPTIONS", "mode=fast")
    with caplog.at_level(logging.ERROR):
        vllm.register()
    assert vllm.active_parts() == ()
    assert engine.DefaultEplbPolicy is Default
    assert "not active: ValueError: EPLB_CORE_OPTIONS (=mode=fast)" in caplog.text


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
    with caplog.at_level(logging.WARNING):
        assert engine.create_eplb_communicator(SimpleNamespace(cpu_group=None), "torch_gloo", [], []) == "torch_gloo"
    assert "communicator: the engine's own code goes on" in caplog.text


def test_a_communicator_over_a_transport_takes_the_place_of_the_engine_s(
    engine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EPLB_CORE_OPTIONS", "transport=shared_memory")
    vllm.activate(engine)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = SimpleNamespace(cpu_group=dist.group.WORLD)
        made = engine.create_eplb_communicator(group, "torch_gloo", [[torch.zeros(2, 4)]], [torch.zeros(2, 4)])
        assert type(made).__name__ == "TransportCommunicator"
    finally:
        dist.destroy_process_group()


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


def test_without_the_fold_a_commit_leaves_the_window(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPLB_CORE_OFF", "fold")
    vllm.activate(engine)
    model_state = state_of(engine).model_states["m"]
    model_state.expert_load_window += 1
    engine._commit_eplb_maps(model_state, torch.tensor([[3, 2, 1, 0, 3, 2, 1, 0]] * 2))
    assert model_state.expert_load_window[0].tolist() == [[1] * 8] * 2


# ---- one rank alone that falls back ----------------------------------------------------------------------------------


def on_two(monkeypatch: pytest.MonkeyPatch, work: Callable[[int], Any]) -> list[Any]:
    """Two ranks, each on a thread; a group of theirs is its rank's number."""
    members = LocalAgreement.group(2)

    def gather_over(group: Any) -> Callable[[hooking.Said], list[hooking.Said]]:
        return lambda said: [
            hooking.Said(*json.loads(blob)) for blob in members[group.rank].gather(json.dumps(said).encode())
        ]

    monkeypatch.setattr(hooking, "gather_over", gather_over)
    monkeypatch.setattr(hooking, "_failures", {})
    answers: list[Any] = [None, None]
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            answers[rank] = work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return answers


def coordinator(rank: int) -> Any:
    group = SimpleNamespace(size=lambda: 2, rank=rank)
    return lambda: SimpleNamespace(cpu_group=group, device_group=SimpleNamespace(rank=lambda: rank, size=lambda: 2))


def test_where_the_policy_fails_on_one_rank_all_ranks_take_the_engine_s(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engines = [engine_module() for _ in range(2)]
    policies: list[Any] = []
    for rank, engine in enumerate(engines):
        engine.get_eplb_group = coordinator(rank)
        policies.append(vllm.activate(engine).policy)
    old = torch.arange(8).repeat(1, 1) % 4
    load = torch.tensor([[1, 1, 1, 1]])
    with caplog.at_level(logging.WARNING):
        good = on_two(monkeypatch, lambda rank: policies[rank].rebalance_experts(load, 8, 1, 1, 2, old))
        assert [answer.tolist() for answer in good] == [old.tolist()] * 2
        assert not caplog.records
        broken = torch.tensor([[1, 1, 1, -1]])  # ours refuses it
        loads = [load, broken]
        told = on_two(monkeypatch, lambda rank: policies[rank].rebalance_experts(loads[rank], 8, 1, 1, 2, old))
    assert [answer.tolist() for answer in told] == [[[-7] * 8]] * 2
    assert "policy: rank 1 (" in caplog.text
    assert "all ranks take the engine's own" in caplog.text


def test_ranks_that_come_or_go_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all of them ask; who waited for the others would wait for ever."""
    engine = engine_module()
    engine.get_eplb_group = coordinator(0)
    policy: Any = vllm.activate(engine).policy
    monkeypatch.setattr(hooking, "gather_over", lambda group: pytest.fail("ranks were asked"))
    load, old = torch.ones(1, 4), torch.arange(8).repeat(1, 1) % 4
    for came_or_went in (torch.where(torch.arange(8) > 5, -1, old), torch.arange(12).repeat(1, 1) % 4):
        policy.rebalance_experts(load, 8, 1, 1, 2, came_or_went)
    policy.rebalance_experts(load, 8, 1, 1, 4, old)  # the group has two ranks


def test_without_a_group_of_ranks_the_policy_answers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own tests call it in a process that has made none."""

    def get_eplb_group() -> Any:
        raise AssertionError("EPLB group is not initialized")

    engine = engine_module()
    engine.get_eplb_group = get_eplb_group
    policy: Any = vllm.activate(engine).policy
    old = torch.arange(8).repeat(1, 1) % 4
    assert torch.equal(policy.rebalance_experts(torch.ones(1, 4), 8, 1, 1, 2, old), old)


def test_where_equal_tables_fail_on_one_rank_all_ranks_write_the_engine_s(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All ranks map the same tokens: with other tables some would be computed twice and some nowhere."""
    engines = [engine_module() for _ in range(2)]
    model = SimpleNamespace(num_local_physical_experts=4)
    for rank, engine in enumerate(engines):
        vllm.activate(engine)
        engine.get_ep_group = coordinator(rank)
    original = vllm_maps.dispatch_maps

    def fails_on_one(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name == "rank 1":
            raise MemoryError("no room")
        return original(*args, **kwargs)

    monkeypatch.setattr(vllm_maps, "dispatch_maps", fails_on_one)

    def commit(rank: int) -> Any:
        state = engines[rank].EplbState("allgather_reducescatter")
        state.add_model(model, CONFIG)
        threading.current_thread().name = f"rank {rank}"
        model_state = state.model_states["m"]
        engines[rank]._commit_eplb_maps_for_layer(model_state, torch.tensor([3, 0, 1, 2, 3, 1, 2, 0]), 1)
        return model_state.logical_to_physical_map[1].tolist()

    with caplog.at_level(logging.WARNING):
        first, second = on_two(monkeypatch, commit)
    assert first == second
    assert first[0][:3] == [1, 7, -1]  # not rotated by layer: the engine's own
    assert "dispatch: rank 1 (" in caplog.text
    assert "MemoryError: no room" in caplog.text


@pytest.mark.parametrize("trouble", ["an error", "another mode"])
def test_a_rank_that_cannot_write_equal_tables_leaves_all_ranks_the_engine_s(
    trouble: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At every commit the others would wait for its word."""

    def fails() -> int:
        raise RuntimeError("no node")

    engines = [engine_module() for _ in range(2)]
    model = SimpleNamespace(num_local_physical_experts=4)
    for rank, engine in enumerate(engines):
        engine.get_ep_group = coordinator(rank)
        if rank == 1 and trouble == "an error":
            engine.get_node_count = fails
        elif rank == 1:
            monkeypatch.setenv("EPLB_CORE_OPTIONS", "dispatch=weighted")
        vllm.activate(engine)

    def commit(rank: int) -> Any:
        state = engines[rank].EplbState("allgather_reducescatter")
        state.add_model(model, CONFIG)
        model_state = state.model_states["m"]
        engines[rank]._commit_eplb_maps_for_layer(model_state, torch.tensor([3, 0, 1, 2, 3, 1, 2, 0]), 1)
        return model_state.logical_to_physical_map.tolist()

    with caplog.at_level(logging.WARNING):
        first, second = on_two(monkeypatch, commit)
    assert first == second
    assert first[1][0][:3] == [1, 7, -1]  # not rotated by layer: the engine's own
    found = "no node" if trouble == "an error" else "'weighted', 8)"
    assert "dispatch: the engine's own code goes on, since ours raised EplbError: rank 1 has" in caplog.text
    assert found in caplog.text


def test_an_engine_without_the_state_s_class_keeps_what_needs_it(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in effect is said to be."""
    monkeypatch.setenv("EPLB_CORE", "vllm")
    del engine.EplbState
    vllm.register()
    assert vllm.active_parts() == ("policy", "maps", "fold")


def test_an_engine_without_one_of_the_policy_s_modules_is_left_as_it_was(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPLB_CORE", "vllm")
    monkeypatch.setitem(sys.modules, f"{NAMES[3]}.default", None)
    vllm.register()
    assert vllm.active_parts() == ()
    assert engine.DefaultEplbPolicy is Default
    assert {"default": Default} == engine.EPLB_POLICIES


def test_a_rank_that_cannot_send_by_tables_of_its_own_says_why() -> None:
    config = SimpleNamespace(
        all2all_backend=next(iter(vllm_maps.SENDERS_MAP)), enable_expert_parallel=True, use_all2all=True
    )
    module = SimpleNamespace(get_ep_group=lambda: SimpleNamespace(device_group=SimpleNamespace(rank=lambda: 1)))
    state, none = SimpleNamespace(parallel_config=config), SimpleNamespace()
    with pytest.raises(AttributeError, match="has no attribute 'model'"):
        vllm._agree_on_sender(module, cast(Any, none), state, none)
