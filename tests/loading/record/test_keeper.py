"""A keeper's answers to requests, without a socket."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import eplb_core
from benchmarks.fuzz_record import LAYOUT, kept, messages
from eplb_core import LayoutRecord
from eplb_core.loading.record import wire
from eplb_core.loading.record.keeper import Keeper, Session
from eplb_core.loading.record.state import RecordState


def say(keeper: Keeper, session: Session, **message: Any) -> dict[str, Any]:
    return keeper.answer(session, wire.pack(message)[wire.LENGTH.size :]).message


class Weights:
    """A weight host that remembers what it was asked for."""

    def __init__(self, **exported: Any) -> None:
        self.asked: list[str] = []
        self.exported = exported

    def difference(self, config: Any, frame: Any) -> tuple[str, str] | None:
        self.asked.append("difference")
        if "fault" in config:
            raise ZeroDivisionError("a fault")
        return ("model", "`model` differs") if config else None

    def about(self) -> dict[str, Any]:
        return {}

    def export(self) -> tuple[dict[str, Any], list[int]]:
        self.asked.append("export")
        return self.exported, []


def test_a_commit_of_a_move_that_was_not_begun_is_refused_and_not_written_down() -> None:
    written: list[RecordState] = []
    keeper, session = Keeper(LayoutRecord(LAYOUT), None, written.append), Session(0)
    assert say(keeper, session, do="attach", engine="a")["status"] == "ok"
    before = list(written)
    rows = wire.encode_rows(LAYOUT.physical_to_logical_map[:1])
    assert say(keeper, session, do="commit", layers=[0], rows=rows)["status"] == "refused"
    assert written == before


def test_a_fetch_that_says_no_config_is_malformed() -> None:
    answer = say(Keeper(LayoutRecord(LAYOUT), Weights()), Session(0), do="fetch", config=3)
    assert (answer["status"], answer["code"]) == ("refused", "malformed")
    assert answer["reason"] == "`config` and `frame` must be objects"


def test_weights_are_handed_out_after_the_configuration_and_then_the_layout_were_compared() -> None:
    """R11, R14: whatever kind of memory they are in, which nobody is asked about before."""
    told = Weights()
    keeper, session = Keeper(LayoutRecord(LAYOUT), told), Session(1)
    fetch = partial(say, keeper, session, do="fetch", frame={})
    assert fetch(config={"model": "other"}, digest="other")["field"] == "model"
    assert fetch(config={}, digest="other")["field"] == "layout"
    assert told.asked == ["difference"] * 2
    assert fetch(config={}, digest=LAYOUT.digest)["status"] == "ok"
    assert told.asked == ["difference"] * 3 + ["export"]


def test_what_cannot_be_written_down_is_not_promised() -> None:
    """A full disk: attaching and beginning are refused and undone; what is over already is only logged."""
    full = [False]

    def write(state: RecordState) -> None:
        if full[0]:
            raise OSError(28, "No space left on device")

    keeper = Keeper(LayoutRecord(LAYOUT), write=write)
    session, late = Session(1), Session(2)

    assert say(keeper, session, do="attach", engine="a")["status"] == "ok"
    full[0] = True
    assert "cannot be written down: [Errno 28]" in say(keeper, session, do="begin", layers=[0], version=0)["reason"]
    assert say(keeper, late, do="attach", engine="b")["status"] == "refused"
    assert keeper.state is not None
    assert (keeper.state.pending, keeper.state.engines, late.engine) == (None, ("a",), None)
    full[0] = False
    say(keeper, session, do="begin", layers=[0], version=0)
    full[0] = True
    rows = wire.encode_rows(LAYOUT.physical_to_logical_map[:1])
    assert say(keeper, session, do="commit", layers=[0], rows=rows)["version"] == 1
    keeper.leave(session)
    assert keeper.state.engines == ()


def test_one_line_tells_of_clients_of_another_protocol_and_no_crowd_fills_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    keeper = Keeper(LayoutRecord(LAYOUT))
    for number in range(20):
        for body in (b'{"protocol":2,"eplb_core":"9.1"}', b"{"):
            assert keeper.answer(Session(number), body).message["status"] == "refused"
    mine = f"this side speaks 1, of eplb_core {eplb_core.__version__}"
    assert caplog.messages == [f"refused a client that speaks protocol 2 of eplb_core 9.1; {mine}"]
    for number in range(20):
        keeper.answer(Session(number), b'{"protocol":%d}' % (2 + number))
    assert len(caplog.messages) == 8


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batch=st.lists(messages, min_size=10, max_size=10), mine=st.booleans())
def test_no_message_raises_or_changes_what_it_must_not(batch: list[bytes], mine: bool) -> None:
    """Two engines are attached, so nobody may begin, and what is pending is the other one's; `make fuzz` sends more."""
    record = LayoutRecord(LAYOUT)
    keeper, first, second = Keeper(record), Session(1), Session(2)
    for session, name in ((first, "a"), (second, "b")):
        say(keeper, session, do="attach", engine=name)
        if session is first and not mine:
            say(keeper, first, do="begin", layers=[0], version=0)
    before = record.state
    for body in batch:
        answer = keeper.answer(second, body)
        assert answer.message["status"] in ("ok", "busy", "refused")
        assert wire.unpack(wire.pack(answer.message)[4:])
        assert kept(record.state) == kept(before)
        assert record.state.engines == before.engines
