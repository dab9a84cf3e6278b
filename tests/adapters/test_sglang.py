from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eplb_core.adapters import sglang


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
