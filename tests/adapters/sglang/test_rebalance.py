"""The hooks around a stand-in for SGLang's manager; its real classes are in tests/engines."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eplb_core.adapters import hooking
from eplb_core.adapters.sglang import context
from eplb_core.adapters.sglang import maps as sglang_maps
from eplb_core.adapters.sglang import moves as sglang_moves
from eplb_core.adapters.sglang import rebalance as sglang_rebalance
from eplb_core.adapters.sglang import record as sglang_record
from eplb_core.adapters.sglang.maps import Picks
from eplb_core.errors import EplbError
from eplb_core.loading.agreement import LocalAgreement
from tests.adapters.fakes import metadata_of, on_ranks


class Manager:
    """SGLang's manager as far as the hook sees it."""

    def __init__(self, moves: Any = None, *, needed: bool = True) -> None:
        self._rebalance_disabled_reason: str | None = None
        self.needed = needed
        self.own = 0
        if moves is not None:
            self._eplb_core_moves = moves

    def _check_rebalance_needed(self, utilisation: float | None) -> bool:
        return self.needed

    def rebalance(self) -> Generator[None, None, None]:
        self.own += 1
        yield


class Moves:
    """Notes what it is asked for; a migration of two passes."""

    def __init__(self, *, over: str = "", off: str = "", disagreed: bool = False) -> None:
        self.over, self.off, self.disagreed = over, off, disagreed
        self.ended = ""
        self.asked: list[Any] = []
        self.events: list[str] = []
        self.migrator = SimpleNamespace(layout=SimpleNamespace(physical_to_logical_map=torch.zeros(1, 2).numpy()))

    def rebalance(self, place: Any) -> Generator[None, None, str]:
        yield
        try:
            self.asked.append(place())
        except Exception as error:
            self.asked.append(error)
        yield
        return self.ended

    def close(self, reason: str) -> None:
        self.over = reason

    def before_weights(self) -> None:
        self.events.append("before")

    def after_weights(self) -> None:
        self.events.append("after")


def fails(error: Exception) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise error

    return call


@pytest.fixture(autouse=True)
def _no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_rebalance, "_moves", [])


def passes(manager: Manager) -> int:
    """Passes that a rebalance takes."""
    return sum(1 for _ in sglang_rebalance.rebalance(Manager.rebalance, manager))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the engine's functions are asked for."""
    seen: list[Any] = []

    def solve(counts: torch.Tensor, asked: dict[str, Any]) -> str:
        seen.append((list(counts.shape), asked, context.bypassed.get()))
        return "a map"

    recorded = {"logical_count": torch.ones(100, 2, 4), "average_utilization_rate_over_window": None}
    monkeypatch.setattr(sglang_rebalance, "_recorded", lambda manager: recorded)
    monkeypatch.setattr(sglang_rebalance, "_asked_of", lambda manager: {"num_nodes": 1})
    monkeypatch.setattr(sglang_rebalance, "_solve", solve)
    monkeypatch.setattr(context, "registered", ["sglang.srt.eplb.eplb_algorithms.rebalance_experts"])
    return seen


def test_a_rebalance_is_a_migration_for_which_the_load_s_windows_are_placed(engine: list[Any]) -> None:
    manager = Manager(Moves())
    assert passes(manager) == 2
    assert manager.own == 0
    assert engine == [([sglang_maps.WINDOWS, 2, 4], {"num_nodes": 1}, False)]


def test_after_a_migration_that_ended_early_auto_starts_anew_on_the_worker(
    engine: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some ranks may have ended before they saw its load; what is late there comes before the next."""
    forgotten: list[int] = []
    monkeypatch.setattr(context.balancers, "forget", lambda: forgotten.append(len(engine)))
    manager = Manager(moves := Moves())
    passes(manager)
    moves.ended = "rank 1 gave up: read"
    passes(manager)
    assert forgotten == []
    moves.ended = ""
    passes(manager)
    assert forgotten == [2]  # before the third is placed
    passes(manager)
    assert forgotten == [2]


def test_the_engine_s_algorithm_gets_passes_as_they_are(engine: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "registered", [])
    passes(Manager(Moves()))
    assert engine[0][0] == [100, 2, 4]


def test_after_ranks_have_disagreed_the_engine_s_algorithm_places(engine: list[Any]) -> None:
    passes(Manager(Moves(disagreed=True)))
    assert engine == [([100, 2, 4], {"num_nodes": 1}, True)]
    assert not context.bypassed.get()


@pytest.mark.parametrize("step", ["_asked_of", "_counts"])
def test_a_problem_that_cannot_be_looked_up_ends_the_migration_and_not_this_rank_alone(
    step: str, engine: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_rebalance, step, fails(MemoryError("no pinned memory")))
    moves = Moves()
    assert passes(Manager(moves)) == 2
    assert [type(each) for each in moves.asked] == [MemoryError]


def test_a_manager_that_nothing_disables_is_asked_for_no_reason(engine: list[Any]) -> None:
    """Before SGLang 0.5.20 it has no `_rebalance_disabled_reason`."""
    older = Manager(Moves())
    del older._rebalance_disabled_reason
    assert (passes(older), older.own) == (2, 0)


def test_without_moves_or_when_they_are_over_or_switched_off_the_engine_rebalances(engine: list[Any]) -> None:
    disabled = Manager(Moves())
    disabled._rebalance_disabled_reason = "scale-up"
    for manager in (Manager(), Manager(Moves(over="a peer died")), disabled):
        assert (passes(manager), manager.own) == (1, 1)
    # Shared weights that nobody may move, and a load for which nothing needs to.
    for manager in (Manager(Moves(off="the record refused")), Manager(Moves(), needed=False)):
        assert (passes(manager), manager.own) == (0, 0)


def test_passes_are_added_up_on_their_device_to_windows_that_follow_each_other() -> None:
    counts = torch.arange(70)[:, None, None] * torch.ones(1, 2, 3, dtype=torch.int64)
    folded = sglang_maps.fold_passes(counts)
    assert folded.shape == (sglang_maps.WINDOWS, 2, 3)
    assert torch.equal(folded.sum(dim=0), counts.sum(dim=0))
    assert folded[0, 0, 0] == 0 + 1
    assert torch.equal(sglang_maps.fold_passes(counts[:5]), counts[:5])


# ---- registering -----------------------------------------------------------------------------------------------------


def test_a_model_that_cannot_be_registered_is_left_to_the_engine_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(context, "live_metadata", lambda: None)
    loads: list[Any] = []
    draft, target = SimpleNamespace(eplb_manager=None), SimpleNamespace(eplb_manager=Manager())
    sglang_rebalance.register_after_load(loads.append, draft)
    assert not caplog.records
    for why_not, line in (
        (fails(RuntimeError("no such setting")), "since ours raised RuntimeError: no such setting"),
        (lambda *_: "elastic EP changes the ranks", "moves are left to SGLang: elastic EP changes the ranks"),
    ):
        monkeypatch.setattr(sglang_rebalance, "_why_not", why_not)
        sglang_rebalance.register_after_load(loads.append, target)
        assert line in caplog.text
    monkeypatch.setattr(sglang_rebalance, "_why_not", lambda *_: "")
    monkeypatch.setattr(sglang_record, "_barred", ["rank 1 has no record"])
    sglang_rebalance.register_after_load(loads.append, target)  # shared weights, recorded by some ranks only
    assert "moves are left to SGLang: rank 1 has no record" in caplog.text
    assert loads == [draft, target, target, target]
    assert "_eplb_core_moves" not in vars(target.eplb_manager)


def test_a_registered_model_says_what_is_in_effect(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given: dict[str, Any] = {}

    def open_moves(metadata: Any, weights: Any, picks: Any, **named: Any) -> Any:
        given.update(named, weights=weights(), picks=picks)
        return SimpleNamespace(layers=[1, 2], slot_bytes=64)

    monkeypatch.setattr(context, "live_metadata", lambda: "metadata")
    monkeypatch.setattr(context, "context", lambda: context.Context(True, False, 2))
    monkeypatch.setattr(context, "options", {"tables": "even", "transport": "shared_memory"})
    monkeypatch.setattr(sglang_rebalance, "_why_not", lambda runner, metadata: "")
    monkeypatch.setattr(sglang_rebalance, "warm_up_once", lambda: OSError("no room for compiled code"))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    monkeypatch.setattr(sglang_moves, "open_moves", open_moves)
    model = SimpleNamespace(routed_experts_weights_of_layer={0: []})
    runner = SimpleNamespace(eplb_manager=Manager(), model=model)
    sglang_rebalance.register_after_load(lambda runner: None, runner)
    assert "in effect in SGLang: moves by a Migrator over shared_memory: 2 layers of 64 bytes per slot" in caplog.text
    assert given["picks"] == Picks(3, prefer_same_node=False, even=True)
    assert (given["num_nodes"], given["transport"], given["weights"]) == (2, "shared_memory", {0: []})
    assert str(given["trouble"]) == "no room for compiled code"  # said to all ranks, which wait for this one
    assert given["facts"]["options"] == [("tables", "even"), ("transport", "shared_memory")]
    assert runner.eplb_manager._eplb_core_moves.layers == [1, 2]


# ---- weights that change ---------------------------------------------------------------------------------------------


def test_no_rank_moves_an_expert_while_the_engine_writes_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sglang_rebalance.around_weights(lambda x: x, 1) == 1
    moves = Moves()
    monkeypatch.setattr(sglang_rebalance, "_moves", [moves])

    def outer() -> str:
        moves.events.append("outer")
        return sglang_rebalance.around_weights(lambda: moves.events.append("inner")) or "done"

    assert sglang_rebalance.around_weights(outer) == "done"
    assert moves.events == ["before", "outer", "inner", "after"]
    with pytest.raises(ValueError, match="no such file"):
        sglang_rebalance.around_weights(fails(ValueError("no such file")))
    assert moves.events[4:] == ["before", "after"]


@pytest.mark.parametrize("step", ["before_weights", "after_weights"])
def test_moves_that_cannot_be_paused_or_resumed_are_over_and_the_update_is_not(
    step: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    moves = Moves()
    monkeypatch.setattr(moves, step, fails(EplbError("rank 1 did not come")))
    monkeypatch.setattr(sglang_rebalance, "_moves", [moves])
    assert sglang_rebalance.around_weights(lambda: "updated") == "updated"
    assert moves.over == "EplbError: rank 1 did not come"
    assert moves.events == (["before"] if step == "after_weights" else [])
    assert f"since {moves.over}" in caplog.text
    assert sglang_rebalance.around_weights(lambda: "again") == "again"


# ---- one map on all ranks --------------------------------------------------------------------------------------------


def test_where_one_rank_places_otherwise_all_take_sglang_s_own_map(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For the engine's own updater, which sends by the map that each rank has computed."""
    ours, own, other = [[0, 1, 2, 3]], [[1, 0, 2, 3]], [[2, 1, 0, 3]]
    members = LocalAgreement.group(3)
    told: list[int] = []

    def gather_over(rank: int) -> Any:
        told.append(rank)
        return hooking.gather_by(members[rank])

    def agreed(last: list[list[int]], **more: bool) -> list[Any]:
        """The maps on which three ranks agree where the last one places so."""

        def on(rank: int) -> Any:
            def compute(manager: Any, logical_count: Any, *, broadcast_over_world: bool) -> Any:
                return metadata_of(own if context.bypassed.get() else last if rank == 2 else ours)

            group.set(rank)
            found = sglang_rebalance.agree_on_metadata(compute, None, None, **{"broadcast_over_world": False} | more)
            return found.physical_to_logical_map_cpu.tolist()

        return on_ranks(on, 3)

    group: ContextVar[int] = ContextVar("group")
    monkeypatch.setattr(sglang_rebalance, "_gather_works", lambda: True)
    monkeypatch.setattr(context, "cpu_group", group.get)
    monkeypatch.setattr(hooking, "gather_over", gather_over)
    assert agreed(other) == [own] * 3
    assert "placement: rank 2 (" in caplog.text
    assert agreed(ours) == [ours] * 3
    assert len(told) == 6
    forgotten: list[None] = []
    monkeypatch.setattr(context.balancers, "forget", lambda: forgotten.append(None))
    agreed(ours, broadcast_over_world=True)  # only rank 0 computes here, and the others get it
    assert (len(told), len(forgotten)) == (6, 3)


def test_where_torch_has_no_groups_nothing_is_gathered() -> None:
    assert not sglang_rebalance._gather_works()
