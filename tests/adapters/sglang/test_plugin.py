"""The hooks of the plug-in on stand-ins for SGLang's objects; its own are in tests/engines."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import eplb_core as eplb
from eplb_core.adapters import hooking, source
from eplb_core.adapters.balancers import Balancers
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
def _in_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process of the engine that narrows its lists."""
    monkeypatch.setattr(context, "options", {})
    monkeypatch.setattr(context, "registered", [])
    monkeypatch.setattr(context, "balancers", Balancers())
    monkeypatch.setattr(context, "live_metadata", lambda: None)
    monkeypatch.setattr(context, "context", lambda: context.Context(True, True, 1))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]


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


def test_a_layer_of_an_older_engine_says_its_rank_otherwise_or_not_at_all() -> None:
    """0.5.15 has `moe_ep_rank`; where neither is, the loader itself drops other ranks' slots."""
    grown = metadata_of([[0, 1, 2, 3, 3, 0, 1, 2, 3, 0, 1, 2]], ranks=4)

    def asked(**layer: int) -> Any:
        return sglang.load_own_range(lambda _: sglang.resolve(engine, grown, 0, 3), SimpleNamespace(**layer))

    assert asked(moe_ep_rank=1, _num_local_routed=3) == [3, 4]
    assert asked(moe_ep_rank=1) == asked() == [3, 4, 8]


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
def test_an_installed_plug_in_does_nothing_unless_asked_for(
    value: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    if value is not None:
        monkeypatch.setenv("EPLB_CORE", value)
    sglang.register()
    assert not caplog.records
    monkeypatch.setenv("EPLB_CORE", "sglang")
    sglang.register()
    assert "not active: this SGLang has no loader of plug-ins" in caplog.text


INITIAL = "sglang.srt.eplb.expert_location.compute_initial_expert_location_metadata"


class Registry:
    """SGLang's, as far as the plug-in uses it: hooks by target, applied once."""

    def __init__(self) -> None:
        self.registered: list[str] = []
        self.applied = 0

    def register(self, target: str, hook: Any, kind: int) -> None:
        self.registered.append(target)

    def apply_hooks(self) -> None:
        self.applied += 1


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """In a process that asks for the plug-in, with what SGLang has at its start."""
    registry = Registry()
    kinds = SimpleNamespace(REPLACE=0, AROUND=1)
    modules(monkeypatch, "sglang.srt.plugins.hook_registry", HookRegistry=registry, HookType=kinds)
    monkeypatch.setenv("EPLB_CORE", "sglang")
    monkeypatch.setattr(source, "_waiting", {})
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    return registry


def test_hooks_are_registered_once(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice around a load they would hand the experts to two Migrators."""
    modules(monkeypatch, INITIAL.rpartition(".")[0], compute_initial_expert_location_metadata=engine)
    sglang.register()
    sglang.register()
    assert registry.registered == [INITIAL]
    assert registry.applied == 0  # by SGLang itself, when all plug-ins have registered


def test_a_wrong_option_leaves_all_to_the_engine_with_one_line(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("EPLB_CORE_OFF", "placing")
    sglang.register()
    assert registry.registered == []
    assert "not active: EPLB_CORE_OFF (=placing)" in caplog.text


UPDATES = """
class WeightUpdater:
    def update_weights_from_disk(self, model_path, load_format, *, flush=True): ...
    def update_weights_from_distributed(self, names): ...
    def receive_weights_from_distributed(self, names): ...
    def _update_weights_from_bucket(self, names): ...
"""


def package(folder: Path, monkeypatch: pytest.MonkeyPatch, **files: str) -> None:
    """Files of an engine that is installed and that this process has not imported; names by "__" for a folder."""
    for name, text in files.items():
        path = folder / "sglang" / "srt" / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "sglang" / "__init__.py").touch()
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(folder)


MOVES = {
    "eplb__eplb_manager": "class EPLBManager:\n    def rebalance(self): ...",
    "eplb__expert_location": "\ndef _prefer_same_node_experts() -> bool: ...",
    "runtime_context": "def get_exec(): ...",
    "model_executor__model_runner": "raise SystemExit\nclass ModelRunner:\n    def load_model(self): ...",
    "model_executor__model_runner_components__weight_updater": UPDATES,
}


def test_moves_stand_around_each_function_that_the_engine_s_updater_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions have other ones; nothing is imported to know, and a module that raises is read all the same."""
    package(tmp_path, monkeypatch, **MOVES)
    assert [hook.target.rpartition(".")[2] for hook in sglang._fitting("moves")] == [
        "rebalance",
        "load_model",
        "update_weights_from_disk",
        "update_weights_from_distributed",
    ]
    assert "sglang" not in sys.modules


def test_an_engine_that_writes_weights_who_knows_where_keeps_its_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As SGLang 0.5.15: a write meanwhile would mix old and new experts."""
    package(tmp_path, monkeypatch, **{name: text for name, text in MOVES.items() if "updater" not in name})
    assert sglang._fitting("moves") == []
    assert "moves is left to SGLang, written for 0.5.23: expected model_executor.model_runner_compon" in caplog.text


LOOKUP = """
class ExpertLocationMetadata:
    def logical_to_all_physical(self, layer_id, logical_expert_id, require_global_experts=False): ...
"""


def test_one_missing_helper_of_one_quantization_turns_that_helper_off_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang 0.5.20 has no `_local_expert_ids`: all of loading was off, and with it the main fault back."""
    package(
        tmp_path,
        monkeypatch,
        eplb__expert_location=LOOKUP,
        layers__moe__fused_moe_triton__layer="class FusedMoE:\n    def weight_loader(self, param, loaded_weight, "
        "weight_name, shard_id, expert_id): ...",
        layers__quantization__moe_wna16="",
    )
    assert [hook.hook for hook in sglang._fitting("loading")] == [sglang.resolve, sglang.load_own_range]
    assert "loading does without one function" in caplog.text
    assert "moe_wna16._local_expert_ids" in caplog.text


UPDATE = "sglang.srt.eplb.expert_location.ExpertLocationMetadata.update"


def test_hooks_wait_for_the_import_of_their_module_and_then_act_at_once(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry_module = sys.modules["sglang.srt.plugins.hook_registry"]
    package(tmp_path, monkeypatch, eplb__expert_location=LOOKUP + "    def update(self, other, update_layer_ids): ...")
    (tmp_path / "sglang/srt/plugins").mkdir()
    monkeypatch.setenv("EPLB_CORE_OFF", "loading")
    (tmp_path / "sglang/srt/plugins/hook_registry.py").write_text("class HookRegistry: ...")
    sglang.register()
    assert (registry.registered, context.registered) == (
        [],
        ["sglang.srt.eplb.expert_location.ExpertLocationMetadata.update"],
    )
    assert "sglang" not in sys.modules
    importlib.import_module("sglang.srt.plugins")
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", registry_module)
    importlib.import_module("sglang.srt.eplb.expert_location")
    assert (registry.registered, registry.applied) == (context.registered, 1)


def test_an_engine_without_these_functions_keeps_all_parts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    assert not any(sglang._fitting(part) for part in sglang.PARTS)
    assert "update is left to SGLang, written for 0.5.23: expected eplb.expert_location" in caplog.text
    assert "found no such function" in caplog.text
    assert sglang.active_parts() == ()


def test_a_part_whose_functions_are_as_expected_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    class ExpertLocationMetadata:
        def update(self, other: Any, update_layer_ids: list[int]) -> None: ...

    modules(monkeypatch, "sglang.srt.eplb.expert_location", ExpertLocationMetadata=ExpertLocationMetadata)
    assert len(sglang._fitting("update")) == 1
    assert not sglang._fitting("loading")


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


def drifting(call: int) -> dict[str, Any]:
    """What SGLang asks at its rebalance `call`."""
    counts = np.random.default_rng(call).poisson([5, 10, 80, 40], (3, 1, 4))
    return asked() | {"tokens_per_expert": torch.from_numpy(counts)}


def test_auto_remembers_until_ranks_come_go_or_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "live_metadata", lambda: metadata_of([ROW]))
    monkeypatch.setattr(context, "options", {"mode": "auto", "move_cost": 0.02, "min_gain": 0.01})
    balancer = eplb.Balancer(eplb.Topology(2), num_slots=6, move_cost=0.02)

    def answer(call: int, anew: bool = False) -> list[list[int]]:
        balancer.load_state_dict(eplb.Balancer(eplb.Topology(2), num_slots=6).state_dict()) if anew else None
        balancer.observe(drifting(call)["tokens_per_expert"].sum(dim=0))
        live = eplb.ExpertLayout([ROW], 4, topology=eplb.Topology(2))
        found = balancer.propose(live).layout.physical_to_logical_map
        return np.where(found < 0, ROW, found).tolist()  # type: ignore[no-any-return]

    def known() -> list[str]:
        return [balancer.digest for _, balancer in context.balancers._known.values()]

    for call in range(3):
        assert sglang.place_from_live(refuse, **drifting(call))[0].tolist() == answer(call)
        assert known() == [balancer.digest]
    with hooking.setting(context.bypassed, True):
        assert sglang.place_from_live(engine, **drifting(3)) == [-7]
    assert known() == []
    assert sglang.place_from_live(refuse, **drifting(4))[0].tolist() == answer(4, anew=True)
    assert known() == [balancer.digest]
    sglang.place_from_live(engine, **drifting(5) | {"algorithm": SimpleNamespace(name="elasticity_aware")})
    assert known() == []


def test_the_line_says_what_auto_is_worth_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = [hook.target for hook in sglang._hooks() if hook.part in ("placement", "maps")]
    monkeypatch.setattr(context, "registered", targets)
    assert sglang._in_effect().startswith("placement, maps")
    monkeypatch.setattr(context, "options", {"mode": "auto"})
    line = sglang._in_effect()
    assert "eplb_rebalance_num_iterations may be short, 100 to 300 passes" in line
    assert "move_cost=0.01" in line


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
