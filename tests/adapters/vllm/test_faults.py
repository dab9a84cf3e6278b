"""A rank without the plug-in, of another version, killed in a move; an engine that calls otherwise than before."""

from __future__ import annotations

import multiprocessing
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from eplb_core.adapters import hooking
from eplb_core.adapters.vllm import commits
from eplb_core.adapters.vllm import plugin as vllm
from eplb_core.adapters.vllm.communicator import create
from eplb_core.adapters.vllm.policy import PolicyOptions
from eplb_core.errors import AgreementError
from tests.adapters.fakes import on_ranks
from tests.adapters.vllm.fakes import OLD, REVERSED, Default, state_of

dist: Any = torch.distributed


def test_beside_a_rank_without_the_plug_in_no_map_is_used_and_the_error_says_that_it_did_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks would move experts by the engine's map."""
    monkeypatch.setattr(hooking, "_PATIENCE_S", 1.0)

    def rank_does(rank: int) -> Any:
        group = dist.ProcessGroupGloo(dist.FileStore(f"{tmp_path}/store", 2), rank, 2, timedelta(seconds=30))
        if rank == 1:
            return group
        policy: Any = vllm.policy_class(Default, PolicyOptions(), lambda ranks: group)
        with pytest.raises(AgreementError, match="did not answer rank 0 within 1 s"):
            policy.rebalance_experts(torch.ones(1, 4), 8, 1, 1, 2, OLD)
        return group

    on_ranks(rank_does)


def test_a_rank_of_another_version_leaves_all_ranks_the_engine_s_tables(
    two: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    taken = iter(("0.1.0", "0.2.0"))

    class Version:
        """Another one for each rank that says it."""

        def __format__(self, spec: str) -> str:
            return next(taken)

    monkeypatch.setattr(commits, "__version__", Version())
    for engine in two:
        vllm.activate(engine)

    def rank_does(rank: int) -> Any:
        _, state = state_of(two[rank], "allgather_reducescatter", slots_per_rank=4)
        two[rank]._commit_eplb_maps_for_layer(state, REVERSED, 1)
        return state.logical_to_physical_map[1, 0, :3].tolist()

    assert on_ranks(rank_does) == [[3, 7, -1]] * 2  # not rotated by layer
    assert "eplb_core 0.1.0" in caplog.text
    assert "eplb_core 0.2.0" in caplog.text


def test_an_engine_that_calls_with_an_argument_that_was_optional_goes_on_with_its_own_code(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    own = engine._commit_eplb_maps_for_layer

    def _commit_eplb_maps_for_layer(
        model_state: Any, new_physical_to_logical_map: torch.Tensor, layer: int, stream: Any = None
    ) -> None:
        own(model_state, new_physical_to_logical_map, layer)

    engine._commit_eplb_maps_for_layer = _commit_eplb_maps_for_layer
    assert vllm.activate(engine).parts == vllm.PARTS
    _, state = state_of(engine)
    engine._commit_eplb_maps_for_layer(state, REVERSED, 1, stream="other")
    assert state.logical_to_physical_map[1, 0, :3].tolist() == [3, 7, -1]
    assert "the engine's own code goes on: it is called with 3 arguments, stream" in caplog.text
    with pytest.raises(TypeError):  # as the engine's own would
        engine.EPLB_POLICIES["default"].rebalance_experts(torch.ones(1, 4), 8, 1, 1, 2, OLD, 7)


def tensors(rank: int) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """Weights of one layer of two slots, and the buffer."""
    weights = torch.full((2, 64), float(rank)).share_memory_()  # type: ignore[no-untyped-call]
    return [[weights]], [torch.zeros(2, 64).share_memory_()]  # type: ignore[no-untyped-call]


def joined(folder: str, rank: int) -> Any:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=90))
    weights, buffer = tensors(rank)
    return create("shared_memory", dist.group.WORLD, weights, buffer), buffer


def peer(folder: str) -> None:
    """Rank 1, until it is killed."""
    joined(folder, 1)
    time.sleep(120.0)


@pytest.mark.long
def test_a_rank_that_is_killed_in_a_move_leaves_no_rank_a_layer_to_install(tmp_path: Path) -> None:
    other = multiprocessing.get_context("spawn").Process(target=peer, args=(str(tmp_path),), daemon=True)
    other.start()
    try:
        communicator, buffer = joined(str(tmp_path), 0)
        communicator.set_transfer_context(torch.tensor([0, 1, 2, 3]), 0)
        communicator.add_recv([buffer[0][0]], 1, 2)
        other.kill()
        other.join()
        began = time.monotonic()
        with pytest.raises(Exception, match=r"rank 1|[Cc]onnection|peer|gone"):
            communicator.execute()
        assert time.monotonic() - began < 30.0
    finally:
        other.kill()
        if dist.is_initialized():
            dist.destroy_process_group()
