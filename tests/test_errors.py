"""Errors of the library: what their texts may hold, and that they cross from process to process."""

from __future__ import annotations

import inspect
import pickle

import pytest

import eplb_core
from eplb_core import errors
from eplb_core.errors import EplbError

ERRORS = [
    errors.LayoutError("no\x1b[2J slot", layer=1, slot=2, expert=3),
    errors.MissingExpertError("gone", expert=3),
    errors.InfeasiblePlacementError("too few", num_live_slots=1, num_experts=2),
    errors.FileFormatError("\ud800: found none", path="a"),
    errors.TransportError("no peer", rank=1),
    errors.SocketInUseError("in use", path="a"),
    errors.SocketOwnerError("of another", path="a", uid=1),
    errors.RecordLostError("lost", path="a"),
    errors.LayoutAgreementError("differ", ranks=(1, 2)),
    errors.HostAbsent("absent"),
    errors.HostBusy("busy"),
    errors.HostRefused("differs", field="layout"),
    errors.AgreementError("late", ranks=(1,)),
    errors.MigrationError("ended", reason="deadline", rank=1),
    eplb_core.CheckpointError("is missing", tensor="w", slots=((0, 1),)),
]


def test_the_list_has_every_error() -> None:
    named = {value for name in dir(eplb_core) if inspect.isclass(value := getattr(eplb_core, name))}
    assert {type(error) for error in ERRORS} == {kind for kind in named if issubclass(kind, EplbError)} - {EplbError}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_keeps_its_attributes_between_processes(error: EplbError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


@pytest.mark.parametrize("text", ["\x1b[2J", "a\nb", "\ud800", "A" * 5000])
def test_the_text_of_an_error_moves_no_cursor_and_fills_no_screen(text: str) -> None:
    message = str(errors.FileFormatError(f"{text}: expected a trace", path="x"))
    assert message.isprintable()
    assert len(message) <= errors.MAX_TEXT
