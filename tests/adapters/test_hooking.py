from __future__ import annotations

import logging
from typing import Any

import pytest

from eplb_core.adapters import _hooking


def test_parts_are_on_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EPLB_CORE_OFF", raising=False)
    assert _hooking.parts_on(("policy", "maps")) == ("policy", "maps")
    monkeypatch.setenv("EPLB_CORE_OFF", " maps ,")
    assert _hooking.parts_on(("policy", "maps")) == ("policy",)
    monkeypatch.setenv("EPLB_CORE_OFF", "map")
    with pytest.raises(ValueError, match=r"EPLB_CORE_OFF \(=map\) must name some of policy, maps"):
        _hooking.parts_on(("policy", "maps"))


def test_options_are_read_or_refused_by_name_and_value(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, Any] = {"mode": _hooking.one_of("place", "deepseek"), "min_gain": float}
    monkeypatch.delenv("EPLB_CORE_OPTIONS", raising=False)
    assert _hooking.options_from(known) == {}
    monkeypatch.setenv("EPLB_CORE_OPTIONS", "mode=deepseek, min_gain = 0.5")
    assert _hooking.options_from(known) == {"mode": "deepseek", "min_gain": 0.5}
    for text, why in (
        ("gain=1", r"\(=gain=1\) must be name=value with a name of mode, min_gain"),
        ("mode", r"\(=mode\) must be name=value"),
        ("mode=x", r"\(=mode=x\): 'x' must be one of place, deepseek"),
        ("min_gain=x", r"\(=min_gain=x\): could not convert"),
    ):
        monkeypatch.setenv("EPLB_CORE_OPTIONS", text)
        with pytest.raises(ValueError, match=why):
            _hooking.options_from(known)


def test_a_function_of_another_signature_is_named_with_what_was_expected() -> None:
    def fits(a: int, b: int, c: int = 0, *, d: int = 0, **rest: int) -> None: ...

    def other(a: int, x: int) -> None: ...

    def asks_for_more(a: int, b: int, c: int) -> None: ...

    assert _hooking.mismatch(fits, "f", ("a", "b")) == ""
    assert _hooking.mismatch(None, "f", ("a", "b")) == "expected f(a, b), found no such function"
    for function in (other, asks_for_more):
        text = _hooking.mismatch(function, "f", ("a", "b"))
        assert text.startswith("expected f(a, b), found f(a: 'int', ")
    assert _hooking.mismatch(type, "f", ("a",)).startswith("expected f(a), found a function that does not tell")


def test_an_error_is_logged_once_and_the_engine_answers(caplog: pytest.LogCaptureFixture) -> None:
    """FAULTS K3: never silently off; each part that is not on is named with its reason."""

    def ours(value: int) -> str:
        if value < 0:
            raise ValueError(f"{value} is negative")
        return "ours"

    call = _hooking.guarded(ours, lambda value: "the engine's", "part")
    with caplog.at_level(logging.WARNING):
        assert [call(1), call(-3), call(-3)] == ["ours", "the engine's", "the engine's"]
    lines = [record.message for record in caplog.records]
    assert lines == ["eplb_core: part: the engine's own code goes on, since ours raised ValueError: -3 is negative"]
