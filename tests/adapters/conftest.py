"""Each test begins with plug-ins that nobody has asked for and that have logged nothing; all log lines are captured."""

from __future__ import annotations

import logging

import pytest

from eplb_core.adapters import hooking


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("EPLB_CORE", "EPLB_CORE_OFF", "EPLB_CORE_OPTIONS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hooking, "_logged", set())
    for name in ("_failures", "_fallbacks", "_in_effect"):
        monkeypatch.setattr(hooking, name, {})
    monkeypatch.setattr(hooking, "_told_by", [0])
    monkeypatch.setattr(hooking, "_log", [logging.getLogger("eplb_core")])
    caplog.set_level(logging.INFO, "eplb_core")
