"""Rows that did not change, loads that the engine does not keep, tables that cannot be written."""

from __future__ import annotations

from functools import wraps
from typing import Any

import pytest
import torch

from eplb_core.adapters import hooking
from eplb_core.adapters.vllm import commits
from eplb_core.adapters.vllm import plugin as vllm
from tests.adapters.fakes import on_ranks
from tests.adapters.vllm.fakes import CONFIG, REVERSED, state_of

FIRST = torch.arange(8) % 4


def counted(engine: Any) -> list[str]:
    """The engine's own commits from now on, by name."""
    called: list[str] = []

    def counting(own: Any, name: str) -> Any:
        @wraps(own)  # with the signature that the hooks expect
        def count(*args: Any) -> Any:
            called.append(name)
            return own(*args)

        return count

    for name in ("_commit_eplb_maps", "_commit_eplb_maps_for_layer"):
        setattr(engine, name, counting(getattr(engine, name), name))
    return called


def test_a_layer_whose_row_did_not_change_costs_no_gather_no_table_and_no_commit(
    two: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FD2: vLLM commits every layer of a rebalance."""
    calls = [counted(engine) for engine in two]
    gathers: list[int] = []
    gather_over = hooking.gather_over

    def noted(group: Any) -> Any:
        gathers.append(group.rank)
        return gather_over(group)

    monkeypatch.setattr(hooking, "gather_over", noted)
    for engine in two:
        vllm.activate(engine)

    def rank_does(rank: int) -> Any:
        engine = two[rank]
        _, state = state_of(engine, "allgather_reducescatter", slots_per_rank=4)
        calls[rank].clear()
        before = gathers.count(rank)
        table = state.logical_to_physical_map.clone()
        engine._commit_eplb_maps_for_layer(state, FIRST.clone(), 1)
        engine._commit_eplb_maps(state, FIRST.repeat(2, 1))
        assert torch.equal(state.logical_to_physical_map, table)
        same = gathers.count(rank) - before
        engine._commit_eplb_maps_for_layer(state, REVERSED, 1)
        engine._commit_eplb_maps_for_layer(state, REVERSED, 1)
        changed = gathers.count(rank) - before
        assert not torch.equal(state.logical_to_physical_map, table)
        return same, changed, calls[rank]

    assert on_ranks(rank_does) == [(0, 1, ["_commit_eplb_maps_for_layer"])] * 2


def test_a_map_that_others_wrote_is_not_taken_for_the_one_committed(engine: Any) -> None:
    """The engine writes into it where ranks come or go."""
    calls = counted(engine)
    vllm.activate(engine)
    _, state = state_of(engine)
    calls.clear()
    state.physical_to_logical_map[0] = REVERSED
    engine._commit_eplb_maps_for_layer(state, FIRST, 0)
    assert len(calls) == 1
    assert torch.equal(state.physical_to_logical_map[0], FIRST)
    engine._commit_eplb_maps_for_layer(state, FIRST, 0)
    assert len(calls) == 1  # known again
    state.physical_to_logical_map = state.physical_to_logical_map.clone()
    engine._commit_eplb_maps_for_layer(state, FIRST, 0)
    assert len(calls) == 2
    with torch.inference_mode():
        state.physical_to_logical_map = state.physical_to_logical_map.clone()  # such tensors count no versions
        for number in (3, 4):
            engine._commit_eplb_maps_for_layer(state, FIRST, 0)
            assert len(calls) == number


def test_weighted_tables_follow_the_load_also_where_experts_stay(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPLB_CORE_OPTIONS", "dispatch=weighted")
    calls = counted(engine)
    vllm.activate(engine)
    _, state = state_of(engine)
    calls.clear()
    engine._commit_eplb_maps_for_layer(state, FIRST, 1)
    assert len(calls) == 1


def test_weighted_without_a_load_that_the_engine_keeps_is_rotated_with_one_line(
    engine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """FD3: vLLM 0.30 has no `last_expert_load`; its first rebalance raised."""
    monkeypatch.setenv("EPLB_CORE_OPTIONS", "dispatch=weighted")
    own = engine.EplbState.add_model

    def add_model(self: Any, model: Any, model_config: Any) -> None:
        own(self, model, model_config)
        del self.model_states["m"].last_expert_load

    engine.EplbState.add_model = add_model
    vllm.activate(engine)
    _, state = state_of(engine)
    assert "dispatch=weighted needs a load that vLLM 9.9.9 does not keep: rotated instead" in caplog.text
    assert "dispatch (rotated, of rank 1)" in caplog.text
    assert state.logical_to_physical_map[0, 0, :3].tolist() == [4, 0, -1]
    engine._commit_eplb_maps_for_layer(state, REVERSED, 1)
    assert state.logical_to_physical_map[1, 0, :3].tolist() == [7, 3, -1]


def test_a_load_that_goes_away_leaves_a_commit_to_the_engine(
    engine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("EPLB_CORE_OPTIONS", "dispatch=weighted")
    vllm.activate(engine)
    _, state = state_of(engine)
    state.last_expert_load = torch.ones(1, 4)
    engine._commit_eplb_maps_for_layer(state, REVERSED, 1)
    assert "dispatch: the engine's own code goes on, since ours raised IndexError" in caplog.text
    assert state.logical_to_physical_map[1, 0, :3].tolist() == [3, 7, -1]


def test_first_tables_that_some_rank_cannot_write_no_rank_keeps(
    two: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """FD3: the rank was taken for one that has them, and wrote by them at its first commit."""
    write = commits._write_tables

    def fails_on_one(state_module: Any, model_state: Any, sender: Any) -> None:
        write(state_module, model_state, sender)
        if state_module is two[1] and sender is not None:
            raise MemoryError("no room")

    monkeypatch.setattr(commits, "_write_tables", fails_on_one)
    for engine in two:
        vllm.activate(engine)

    def rank_does(rank: int) -> Any:
        _, state = state_of(two[rank], "allgather_reducescatter", slots_per_rank=4)
        first = state.logical_to_physical_map[1, 0, :3].tolist()
        two[rank]._commit_eplb_maps_for_layer(state, REVERSED, 1)
        return first, state.logical_to_physical_map[1, 0, :3].tolist()

    assert on_ranks(rank_does) == [([0, 4, -1], [3, 7, -1])] * 2  # the engine's own, not rotated by layer
    assert "rank 1: MemoryError: no room" in caplog.text


def test_without_update_mapping_the_other_hooks_of_dispatch_are_in_effect(engine: Any) -> None:
    """FD5: vLLM 0.20 and 0.26."""
    del engine.EplbState.update_mapping
    assert vllm.activate(engine).parts == vllm.PARTS
    state, model_state = state_of(engine)
    assert model_state.logical_to_physical_map[0, 0, :3].tolist() == [4, 0, -1]
    assert not hasattr(state, "update_mapping")
    assert CONFIG.compute_hash() == "m"


def test_kernels_are_made_ready_while_the_model_loads(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """FD1: the first rebalance is a part of the profile run."""
    order: list[str] = []
    own = engine.EplbState.add_model

    def add_model(self: Any, model: Any, model_config: Any) -> None:
        order.append("model")
        own(self, model, model_config)

    engine.EplbState.add_model = add_model
    monkeypatch.setattr(commits, "warm_up_once", lambda: order.append("kernels"))
    vllm.activate(engine)
    state_of(engine)
    assert order == ["kernels", "model"]
