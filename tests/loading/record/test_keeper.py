"""A keeper's answers to requests, without a socket."""

from __future__ import annotations

from typing import Any

from eplb_core import ExpertLayout, LayoutRecord, Topology
from eplb_core.loading.record import wire
from eplb_core.loading.record.keeper import Keeper, Session
from eplb_core.loading.record.state import RecordState

LAYOUT = ExpertLayout([[0, 1, 1, 0]], 2, topology=Topology(2))


def body(message: dict[str, Any]) -> bytes:
    inbox = wire.Inbox()
    inbox.add(wire.pack(message))
    found = inbox.take(wire.MAX_REPLY)
    assert found is not None
    return found


def test_a_commit_of_a_move_that_was_not_begun_is_refused_and_not_written_down() -> None:
    written: list[RecordState] = []
    keeper, session = Keeper(LayoutRecord(LAYOUT), None, written.append), Session(0)
    assert keeper.answer(session, body({"do": "attach", "engine": "a"})).message["status"] == "ok"
    before = list(written)
    commit = {"do": "commit", "layers": [0], "rows": wire.encode_rows(LAYOUT.physical_to_logical_map)}
    assert keeper.answer(session, body(commit)).message["status"] == "refused"
    assert written == before


class Weights:
    """None, really."""

    def about(self) -> dict[str, Any]:
        return {}

    def difference(self, config: Any, frame: Any) -> tuple[str, str] | None:
        return None

    def export(self) -> tuple[dict[str, Any], list[int]]:
        return {}, []


def test_a_fetch_that_says_no_config_is_malformed() -> None:
    keeper = Keeper(LayoutRecord(LAYOUT), Weights())
    answer = keeper.answer(Session(0), body({"do": "fetch", "config": 3})).message
    assert (answer["status"], answer["code"]) == ("refused", "malformed")
    assert answer["reason"] == "`config` and `frame` must be objects"
