"""The hooks of the plug-in on stand-ins for SGLang's objects; its own are in tests/engines."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import eplb_core as eplb
from eplb_core.adapters import hooking
from eplb_core.adapters.sglang import context
from eplb_core.adapters.sglang import maps as sglang_maps
from eplb_core.adapters.sglang import plugin as sglang
from tests.adapters.fakes import metadata_of, modules

ROW = [0, 1, 2, 3, 3, 0]


def engine(*arguments: Any, **named: Any) -> Any:
    """The engine's own code, told apart by its answer."""
    return [-7]


def refuse(*arguments: Any, **named: Any) -> Any:
    pytest.fail("the engine's own code was asked")


@pytest.fixture(autouse=True)
def _in_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of the engine that narrows its lists."""
    monkeypatch.setattr(context, "options", {})
    monkeypatch.setattr(context, "registered", [])
    monkeypatch.setattr(context, "live_metadata", lambda: None)
    monkeypatch.setattr(context, "context", lambda: context.Context(True, True, 1))


# ---- loading ---------------------------------------------------------------------------------------------------------


def test_every_replica_is_named() -> None:
    """D1."""
    assert sglang.resolve(engine, metadata_of([ROW]), 0, 3) == [3, 4]


def test_a_loader_is_told_its_own_rank_s_slots_alone() -> None:
    """R35, R36: outside of a loader the list has all ranks' slots."""
    grown = metadata_of([[0, 1, 2, 3, 3, 0, 1, 2, 3, 0, 1, 2]], ranks=4)
    layer = SimpleNamespace(_expert_storage_rank=1, _num_local_routed=3)
    asked = sglang.load_own_range(lambda layer, expert: sglang.resolve(engine, grown, 0, expert), layer, 3)
    assert asked == [3, 4]
    assert sglang.resolve(engine, grown, 0, 3) == [3, 4, 8]


def test_a_layout_that_moves_changed_is_read_anew() -> None:
    """R46: written in place or replaced."""
    live = metadata_of([ROW])
    assert sglang.resolve(engine, live, 0, 0) == [0, 5]
    live.physical_to_logical_map_cpu[...] = torch.tensor([[3, 1, 2, 0, 3, 0]])
    assert sglang.resolve(engine, live, 0, 0) == [3, 5]
    live.physical_to_logical_map_cpu = torch.tensor([[3, 1, 2, 0, 3, 3]])
    assert sglang.resolve(engine, live, 0, 0) == [3]
    with torch.inference_mode():
        live.physical_to_logical_map_cpu = torch.tensor([ROW])
        assert sglang.resolve(engine, live, 0, 0) == [0, 5]
        live.physical_to_logical_map_cpu[0, 5] = 3  # such tensors do not count their versions
        assert sglang.resolve(engine, live, 0, 0) == [0]


def test_layers_beyond_the_map_and_whole_tensors_are_left_to_the_engine() -> None:
    """R38, R39."""
    live = metadata_of([ROW])
    assert sglang.resolve(engine, live, 1, 3) == [-7]
    assert sglang.resolve(engine, live, 0, 3, True) == [-7]
    assert sglang.resolve(engine, live, 0, 3, require_global_experts=True) == [-7]


@pytest.mark.parametrize(("layer", "expert"), [(0, -1), (0, 4), (-1, 0)])
def test_ids_out_of_range_raise(layer: int, expert: int) -> None:
    """R40."""
    with pytest.raises(IndexError, match="must be"):
        sglang.resolve(engine, metadata_of([ROW]), layer, expert)


def test_a_map_that_is_no_layout_is_left_to_the_engine_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """An error inside the plug-in never stops a server."""
    dead = metadata_of([ROW])
    dead.physical_to_logical_map_cpu[0] = torch.tensor([0, 1, 2, 2, 0, 0])
    assert [sglang.resolve(engine, dead, 0, expert) for expert in (0, 1)] == [[-7], [-7]]
    (line,) = caplog.messages
    assert line.startswith("eplb_core: loading: ")
    assert "expert 3 has no slot at layer 0" in line


# ---- registering -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, "", "vllm"])
def test_an_installed_plug_in_does_nothing_unless_asked_for(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)  # importing it would raise
    if value is not None:
        monkeypatch.setenv("EPLB_CORE", value)
    sglang.register()
    monkeypatch.setenv("EPLB_CORE", "sglang")
    with pytest.raises(ImportError):
        sglang.register()


def test_hooks_are_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice around a load they would hand the experts to two Migrators."""
    registered: list[str] = []
    modules(
        monkeypatch,
        "sglang.srt.plugins.hook_registry",
        HookRegistry=SimpleNamespace(register=lambda target, *_: registered.append(target)),
        HookType=SimpleNamespace(REPLACE=0, AROUND=1),
    )
    monkeypatch.setenv("EPLB_CORE", "sglang")
    sglang.register()
    sglang.register()
    assert registered == ["sglang.srt.eplb.expert_location.compute_initial_expert_location_metadata"]


def test_an_engine_without_these_functions_keeps_all_parts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    assert not any(sglang._fits(part) for part in sglang.PARTS)
    assert "update is left to SGLang, written for 0.5.23: expected eplb.expert_location" in caplog.text
    assert "found no such function" in caplog.text
    assert sglang.active_parts() == ()


def test_a_part_whose_functions_are_as_expected_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    class ExpertLocationMetadata:
        def update(self, other: Any, update_layer_ids: list[int]) -> None: ...

    modules(monkeypatch, "sglang.srt.eplb.expert_location", ExpertLocationMetadata=ExpertLocationMetadata)
    assert sglang._fits("update")
    assert not sglang._fits("loading")


# ---- placement, maps, tables, update ---------------------------------------------------------------------------------


def asked(algorithm: str = "deepseek") -> dict[str, Any]:
    sizes = {"num_physical_experts": 6, "num_local_physical_experts": 3, "num_groups": None, "num_nodes": 1}
    return {"tokens_per_expert": torch.full((1, 1, 4), 10), "algorithm": SimpleNamespace(name=algorithm)} | sizes


def test_the_placement_starts_from_the_metadata_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    live = metadata_of([[0, 1, 2, 3, 0, 1]])
    monkeypatch.setattr(context, "live_metadata", lambda: live)
    p2l, _, count = sglang.place_from_live(refuse, **asked())
    assert p2l.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert count.tolist() == [[2, 2, 1, 1]]
    monkeypatch.setattr(context, "options", {"min_gain": -1.0, "tables": "even"})
    assert sglang.place_from_live(engine, **asked()) == [-7]


@pytest.mark.parametrize(("algorithm", "bypassed"), [("elasticity_aware", False), ("deepseek", True)])
def test_algorithms_for_dead_ranks_or_not_agreed_on_are_the_engine_s(
    algorithm: str, bypassed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with hooking.setting(context.bypassed, bypassed):
        assert sglang.place_from_live(engine, **asked(algorithm)) == [-7]
    assert not caplog.records


def test_lists_and_tables_are_built_from_one_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lists of a rank at start are narrowed; its table is drawn from them, as the engine does."""
    row = torch.tensor([ROW])
    layout = eplb.ExpertLayout(row, 4, topology=eplb.Topology(2))
    for narrows, how in ((True, "narrowed"), (False, "all")):
        monkeypatch.setattr(context, "context", lambda narrows=narrows: context.Context(narrows, True, 1))
        lists = sglang.build_candidates(refuse, row, 4, 2, 1)
        expected = sglang_maps.candidates(layout, 1 if narrows else None, prefer_same_node=True)
        assert torch.equal(lists, expected)
        table = sglang.build_static_table(refuse, lists, 2, 6, 1)
        assert table.tolist() == eplb.static_dispatch_table(layout, candidates=how)[1].tolist()  # type: ignore[arg-type]
    whole = sglang_maps.candidates(layout, None, prefer_same_node=True).int()  # from elsewhere: nothing is noted on it
    table = sglang.build_static_table(refuse, whole, 2, 6, 0, 7)
    assert table.dtype == torch.int32
    assert table.tolist() == eplb.static_dispatch_table(layout, 7)[0].tolist()
    monkeypatch.setattr(context, "options", {"tables": "even"})
    assert sglang.build_static_table(refuse, whole, 2, 6, 0).tolist() == eplb.even_dispatch_table(layout)[0].tolist()


def test_a_table_at_start_is_drawn_from_narrowed_lists() -> None:
    """Here the draws of narrowed and of whole lists differ on every rank."""
    row = [1, 2, 0, 1, 0, 3, 2, 0]
    rows = torch.tensor([row, row[::-1]])
    layout = eplb.ExpertLayout(rows, 4, topology=eplb.Topology(4))
    for rank in range(4):
        lists = sglang.build_candidates(refuse, rows, 4, 4, rank)
        table = sglang.build_static_table(refuse, lists, 4, 8, rank).tolist()
        assert table == eplb.static_dispatch_table(layout, candidates="narrowed")[rank].tolist()
        assert table != eplb.static_dispatch_table(layout)[rank].tolist()


def test_maps_that_are_no_layout_are_the_engine_s(caplog: pytest.LogCaptureFixture) -> None:
    assert sglang.build_candidates(engine, torch.tensor([[0, 0, 2, 2]]), 3, 2, 0) == [-7]
    assert sglang.build_static_table(engine, torch.tensor([[[0], [1]]]), 2, 4, 0) == [-7]
    assert "expert 1 has no slot at layer 0" in caplog.text
    assert "must have every slot once" in caplog.text


def test_an_update_that_does_not_fit_is_the_engine_s() -> None:
    seen: list[Any] = []
    sglang.update_layers(lambda *given: seen.append(given), SimpleNamespace(), SimpleNamespace(), [1])
    assert len(seen) == 1
