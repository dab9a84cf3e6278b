from __future__ import annotations

from pathlib import Path

import pytest

from eplb_core.adapters import check
from tests.adapters.sglang.test_plugin import LOOKUP, MOVES, package

UPDATE = LOOKUP + "    def update(self, layers): ..."


def test_each_part_says_whether_it_works_is_left_or_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = MOVES | {"eplb__expert_location": UPDATE + MOVES["eplb__expert_location"], "plugins__hook_registry": ""}
    package(tmp_path, monkeypatch, **files)
    lines = {line.part: line for line in check.parts_of("sglang")}
    assert {part: line.status for part, line in lines.items()} == {
        "loading": "works",
        "placement": "not there",
        "maps": "not there",
        "tables": "not there",
        "update": "left to the engine",
        "dispatch": "not there",
        "moves": "works",
        "record": "not there",
    }
    assert "without one function: expected layers.moe.fused_moe" in lines["loading"].why
    assert "found eplb.expert_location.ExpertLocationMetadata.update(self, layers)" in lines["update"].why
    assert check.main([]) == 1
    said = capsys.readouterr().out
    assert "sglang of unknown version (the plug-in was written for 0.5.23; EPLB_CORE=sglang)" in said
    assert "\n  update     left to the engine: expected" in said


def test_an_engine_without_a_loader_of_plug_ins_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """FD4: SGLang 0.5.10 never asks for the plug-in, and nobody said it."""
    package(tmp_path, monkeypatch, **MOVES)
    assert check.main([]) == 1
    said = capsys.readouterr().out
    assert "not active: this SGLang has no loader of plug-ins" in said
    assert "works" not in said
