from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import eplb_core as eplb
from eplb_core.adapters import hooking
from eplb_core.adapters.sglang import context as _sglang
from eplb_core.adapters.sglang import maps as sglang_maps
from eplb_core.adapters.sglang import plugin as sglang


def metadata(rows: list[list[int]], ranks: int = 2) -> Any:
    """The fields of the engine's object that the hook reads."""
    return SimpleNamespace(
        physical_to_logical_map_cpu=torch.tensor(rows),
        num_logical_experts=4,
        ep_size=ranks,
    )


def engine(*arguments: Any) -> list[int]:
    """The engine's own lookup, told apart by its answer."""
    return [-7]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EPLB_CORE", "EPLB_CORE_OFF", "EPLB_CORE_OPTIONS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hooking, "_logged", set())
    monkeypatch.setattr(hooking, "_log", [logging.getLogger("eplb_core")])
    monkeypatch.setattr(_sglang, "options", {})


def test_every_replica_is_named() -> None:
    """D1."""
    assert sglang.resolve(engine, metadata([[0, 1, 2, 3, 3, 0]]), 0, 3) == [3, 4]


def test_a_loader_is_told_its_own_rank_s_slots_alone() -> None:
    """R35, R36: outside of a loader the list has all ranks' slots."""
    grown = metadata([[0, 1, 2, 3, 3, 0, 1, 2, 3, 0, 1, 2]], ranks=4)
    layer = SimpleNamespace(_expert_storage_rank=1, _num_local_routed=3)
    asked = sglang.load_own_range(lambda layer, expert: sglang.resolve(engine, grown, 0, expert), layer, 3)
    assert asked == [3, 4]
    assert sglang.resolve(engine, grown, 0, 3) == [3, 4, 8]


def test_a_layout_that_moves_changed_is_read_anew() -> None:
    """R46: written in place or replaced."""
    live = metadata([[0, 1, 2, 3, 3, 0]])
    assert sglang.resolve(engine, live, 0, 0) == [0, 5]
    live.physical_to_logical_map_cpu[...] = torch.tensor([[3, 1, 2, 0, 3, 0]])
    assert sglang.resolve(engine, live, 0, 0) == [3, 5]
    live.physical_to_logical_map_cpu = torch.tensor([[3, 1, 2, 0, 3, 3]])
    assert sglang.resolve(engine, live, 0, 0) == [3]
    with torch.inference_mode():
        live.physical_to_logical_map_cpu = torch.tensor([[0, 1, 2, 3, 3, 0]])
        assert sglang.resolve(engine, live, 0, 0) == [0, 5]
        live.physical_to_logical_map_cpu[0, 5] = 3  # such tensors do not count their versions
        assert sglang.resolve(engine, live, 0, 0) == [0]


def test_layers_beyond_the_map_and_whole_tensors_are_left_to_the_engine() -> None:
    """R38, R39."""
    live = metadata([[0, 1, 2, 3, 3, 0]])
    assert sglang.resolve(engine, live, 1, 3) == [-7]
    assert sglang.resolve(engine, live, 0, 3, True) == [-7]
    assert sglang.resolve(engine, live, 0, 3, require_global_experts=True) == [-7]


@pytest.mark.parametrize(("layer", "expert"), [(0, -1), (0, 4), (-1, 0)])
def test_ids_out_of_range_raise(layer: int, expert: int) -> None:
    """R40."""
    with pytest.raises(IndexError, match="must be"):
        sglang.resolve(engine, metadata([[0, 1, 2, 3, 3, 0]]), layer, expert)


def test_a_map_that_is_no_layout_is_left_to_the_engine_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """An error inside the plug-in never stops a server."""
    dead = metadata([[0, 1, 2, 2, 0, 0]])
    with caplog.at_level(logging.WARNING):
        assert [sglang.resolve(engine, dead, 0, expert) for expert in (0, 1)] == [[-7], [-7]]
    assert [record.message for record in caplog.records if "expert 3 has no slot at layer 0" in record.message] == [
        "eplb_core: loading: this layout is left to SGLang's own lookup: expert 3 has no slot at layer 0; "
        "every layer must hold every logical expert once or more"
    ]


@pytest.mark.parametrize("value", [None, "", "vllm"])
def test_an_installed_plug_in_does_nothing_unless_asked_for(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)  # importing it would raise
    if value is None:
        monkeypatch.delenv("EPLB_CORE", raising=False)
    else:
        monkeypatch.setenv("EPLB_CORE", value)
    sglang.register()
    monkeypatch.setenv("EPLB_CORE", "sglang")
    with pytest.raises(ImportError):
        sglang.register()


def test_hooks_are_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice around a load they would hand the experts to two Migrators."""
    registered: list[str] = []
    registry: Any = ModuleType("sglang.srt.plugins.hook_registry")
    registry.HookRegistry = SimpleNamespace(register=lambda target, *_: registered.append(target))
    registry.HookType = SimpleNamespace(REPLACE=0, AROUND=1)
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    monkeypatch.setattr(_sglang, "registered", [])
    monkeypatch.setenv("EPLB_CORE", "sglang")
    sglang.register()
    sglang.register()
    assert registered == ["sglang.srt.eplb.expert_location.compute_initial_expert_location_metadata"]


# ---- placement, maps, tables, update ---------------------------------------------------------------------------------


def context(*, narrows: bool = True, nodes: int = 1) -> Any:
    return lambda: _sglang.Context(narrows, True, nodes)


def refuse(*arguments: Any, **named: Any) -> Any:
    raise AssertionError("the engine's own code was asked")


def asked(algorithm: str, load: torch.Tensor, **more: Any) -> dict[str, Any]:
    sizes = {"num_physical_experts": 6, "num_local_physical_experts": 3, "num_groups": None, "num_nodes": 1}
    return {"tokens_per_expert": load, "algorithm": SimpleNamespace(name=algorithm)} | sizes | more


def test_the_placement_starts_from_the_metadata_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    live = metadata([[0, 1, 2, 3, 0, 1]])
    monkeypatch.setattr(_sglang, "live_metadata", lambda: live)
    load = torch.tensor([[[10, 10, 10, 10]]])
    p2l, _, count = sglang.place_from_live(refuse, **asked("deepseek", load))
    assert p2l.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert count.tolist() == [[2, 2, 1, 1]]
    monkeypatch.setattr(_sglang, "options", {"min_gain": -1.0, "tables": "even"})
    assert sglang.place_from_live(lambda **_: "engine", **asked("deepseek", load)) == "engine"


def test_algorithms_for_dead_ranks_are_the_engine_s(caplog: pytest.LogCaptureFixture) -> None:
    load = torch.ones(1, 1, 4)
    assert sglang.place_from_live(lambda **_: "engine", **asked("elasticity_aware", load)) == "engine"
    assert not caplog.records


def test_an_algorithm_that_ranks_have_not_agreed_on_is_the_engine_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sglang, "live_metadata", lambda: None)
    token = _sglang.bypassed.set(True)
    try:
        assert sglang.place_from_live(lambda **_: "engine", **asked("deepseek", torch.ones(1, 1, 4))) == "engine"
    finally:
        _sglang.bypassed.reset(token)


def test_lists_and_tables_are_built_from_one_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lists of a rank at start are narrowed; its table is drawn from them, as the engine does."""
    row = torch.tensor([[0, 1, 2, 3, 3, 0]])
    layout = eplb.ExpertLayout(row, 4, topology=eplb.Topology(2))
    for narrows, how in ((True, "narrowed"), (False, "all")):
        monkeypatch.setattr(_sglang, "context", context(narrows=narrows))
        lists = sglang.build_candidates(refuse, row, 4, 2, 1)
        expected = sglang_maps.candidates(layout, 1 if narrows else None, prefer_same_node=True)
        assert torch.equal(lists, expected)
        table = sglang.build_static_table(refuse, lists, 2, 6, 1)
        assert table.tolist() == eplb.static_dispatch_table(layout, candidates=how)[1].tolist()  # type: ignore[arg-type]
    whole = sglang_maps.candidates(layout, None, prefer_same_node=True).int()  # from elsewhere: nothing is noted on it
    table = sglang.build_static_table(refuse, whole, 2, 6, 0, 7)
    assert table.dtype == torch.int32
    assert table.tolist() == eplb.static_dispatch_table(layout, 7)[0].tolist()
    monkeypatch.setattr(_sglang, "options", {"tables": "even"})
    assert sglang.build_static_table(refuse, whole, 2, 6, 0).tolist() == eplb.even_dispatch_table(layout)[0].tolist()


def test_a_table_at_start_is_drawn_from_narrowed_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the draws of narrowed and of whole lists differ on every rank."""
    row = [1, 2, 0, 1, 0, 3, 2, 0]
    rows = torch.tensor([row, row[::-1]])
    layout = eplb.ExpertLayout(rows, 4, topology=eplb.Topology(4))
    monkeypatch.setattr(_sglang, "context", context())
    for rank in range(4):
        lists = sglang.build_candidates(refuse, rows, 4, 4, rank)
        table = sglang.build_static_table(refuse, lists, 4, 8, rank).tolist()
        assert table == eplb.static_dispatch_table(layout, candidates="narrowed")[rank].tolist()
        assert table != eplb.static_dispatch_table(layout)[rank].tolist()


def test_maps_that_are_no_layout_are_the_engine_s(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_sglang, "context", context())
    own = torch.tensor([[[7]]])
    with caplog.at_level(logging.WARNING):
        assert sglang.build_candidates(lambda *_: own, torch.tensor([[0, 0, 2, 2]]), 3, 2, 0) is own
        assert sglang.build_static_table(lambda *_: own, torch.tensor([[[0], [1]]]), 2, 4, 0) is own
    assert "expert 1 has no slot at layer 0" in caplog.text
    assert "must have every slot once" in caplog.text


def test_an_update_that_does_not_fit_is_the_engine_s() -> None:
    seen = []
    sglang.update_layers(lambda *given: seen.append(given), SimpleNamespace(), SimpleNamespace(), [1])
    assert len(seen) == 1


def test_an_engine_without_these_functions_keeps_all_parts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    with caplog.at_level(logging.WARNING):
        assert not any(sglang._fits(part) for part in sglang.PARTS)
    assert "update is left to SGLang, written for 0.5.23: expected eplb.expert_location" in caplog.text
    assert "found no such function" in caplog.text
    assert sglang.active_parts() == ()


def test_a_part_whose_functions_are_as_expected_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    class ExpertLocationMetadata:
        def update(self, other: Any, update_layer_ids: list[int]) -> None: ...

    parent: Any = None
    for name in ("sglang", "sglang.srt", "sglang.srt.eplb", "sglang.srt.eplb.expert_location"):
        module: Any = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        if parent is not None:
            setattr(parent, name.rpartition(".")[2], module)
        parent = module
    parent.ExpertLocationMetadata = ExpertLocationMetadata
    assert sglang._fits("update")
    assert not sglang._fits("loading")
