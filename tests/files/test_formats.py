"""Formats by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from eplb_core import ExpertLayout, Topology
from eplb_core.files.formats import write_layout


def test_a_format_that_there_is_not_is_named_with_those_that_there_are(tmp_path: Path) -> None:
    layout = ExpertLayout([[0, 1]], 2, topology=Topology(1))
    with pytest.raises(ValueError, match=r"format \(='vllm'\) must be one of eplb, sglang, vllm-ascend, tensorrt-llm"):
        write_layout(layout, tmp_path / "l", "vllm")
    assert not (tmp_path / "l").exists()
