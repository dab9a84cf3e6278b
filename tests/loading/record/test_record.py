"""The record of what shared weights hold: who may move experts, who may read them, and when nobody knows."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from eplb_core import ExpertLayout, Topology
from eplb_core.loading.record.record import LayoutRecord
from eplb_core.loading.record.state import NAMES_KEPT, RecordState, Reply

RANKS = Topology(num_ranks=2)
LAYOUT = ExpertLayout([[0, 1, 2, 3, 3, 0], [0, 1, 2, 3, 1, 2]], 4, topology=RANKS)
ROW = [3, 2, 1, 0, 0, 3]


def record_of(*engines: str) -> LayoutRecord:
    record = LayoutRecord(LAYOUT)
    for engine in engines:
        assert record.attach(engine).status == "ok"
    return record


def moved(record: LayoutRecord, engine: str = "a", layer: int = 0, row: list[int] = ROW) -> LayoutRecord:
    assert record.begin(engine, [layer], record.version).status == "ok"
    assert record.commit(engine, [layer], [row]).status == "ok"
    return record


# ---- what is recorded ------------------------------------------------------------------------------------------------


def test_a_record_starts_at_version_0_with_the_digest_of_its_layout() -> None:
    """R1."""
    record = record_of()
    assert (record.version, record.digest, record.layout) == (0, LAYOUT.digest, LAYOUT)
    assert record.query() == ("ok", "", 0, LAYOUT.digest)


def test_a_commit_stores_the_rows_and_counts_one_version() -> None:
    """R5."""
    record = record_of("a")
    assert record.begin("a", [1, 0], 0) == ("ok", "", 0, LAYOUT.digest)
    reply = record.commit("a", [1, 0], [ROW, [0, 0, 1, 1, 2, 3]])
    expected = ExpertLayout([[0, 0, 1, 1, 2, 3], ROW], 4, topology=RANKS)
    assert reply == ("ok", "", 1, expected.digest)
    assert record.layout == expected


def test_a_later_engine_is_given_the_layout_that_the_former_left() -> None:
    """I1, R12: the second engine routes by the record, and nothing else is served to it."""
    record = moved(record_of("a"))
    record.detach("a")
    record.attach("b")
    refused = record.check_fetch("b", 0, LAYOUT.digest)
    assert refused.status == "refused"
    assert f"engine 'b' routes by layout {LAYOUT.digest[:9]}" in refused.reason
    assert f"{record.digest[:12]} (version 1)" in refused.reason
    assert record.check_fetch("b", 1, record.digest).status == "ok"


# ---- crashes ---------------------------------------------------------------------------------------------------------


def test_an_engine_that_leaves_during_its_move_leaves_a_dirty_record() -> None:
    """I2: also if it had not touched a weight, since nobody can tell; who, which layers and from where is said."""
    record = moved(record_of("a"))
    record.begin("a", [0, 1], 1)
    record.detach("a")
    assert record.state.pending is None
    for reply in (record.query(), record.check_fetch("b", 1, record.digest), record.check_fetch()):
        assert reply.status == "refused"
        assert "the move of layers 0, 1 by engine 'a' from version 1 was pending when the engine left" in reply.reason
        assert "restart the keeper of the weights and the engines" in reply.reason
    record.attach("b")
    assert record.begin("b", [0], 1).status == "refused"


# ---- one mover -------------------------------------------------------------------------------------------------------


def test_a_second_engine_pauses_moves_and_takes_over_from_the_current_version() -> None:
    """I3."""
    record = moved(record_of("a"))
    record.attach("b")
    assert record.begin("a", [0], 1)[:2] == (
        "busy",
        "engine 'b' is attached too; experts may move only while every other engine follows",
    )
    assert record.state.pending is None
    record.detach("a")
    assert record.begin("b", [0], 0).reason == "the layout is at version 1, not 0; engine 'b' is not on it"
    assert record.begin("b", [0], 1).status == "ok"


def test_another_engines_move_is_busy_and_names_engine_layers_and_version() -> None:
    record = record_of("a")
    record.begin("a", [1], 0)
    record.attach("b")
    for reply in (record.begin("b", [0], 0), record.query(), record.check_fetch("b", 0, LAYOUT.digest)):
        assert reply[:2] == ("busy", "the move of layer 1 by engine 'a' from version 0 is pending")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("b", [0], 0), "engine 'b' is not attached"),
        (("a", [0], 1), "the layout is at version 0, not 1"),
        (("a", [0], True), "at version 0, not True"),
        (("a", [0], "0"), "at version 0, not 0"),
        (("a", [], 0), r"`layers` \(=\[\]\) must be rows in \[0, 2\), one or more, each once"),
        (("a", [2], 0), r"`layers` \(=\[2\]\)"),
        (("a", [-1], 0), r"`layers` \(=\[-1\]\)"),
        (("a", [0, 0], 0), r"`layers` \(=\[0, 0\]\)"),
        (("a", [True], 0), r"`layers` \(=\[True\]\)"),
        (("a", [0.0], 0), r"`layers` \(=\[0.0\]\)"),
        (("a", "0", 0), r"`layers` \(=0\)"),
        (("a", None, 0), r"`layers` \(=None\)"),
    ],
)
def test_a_move_that_cannot_be_is_refused_and_changes_nothing(arguments: tuple[Any, ...], reason: str) -> None:
    """R9."""
    record = record_of("a")
    before = record.state
    reply = record.begin(*arguments)
    assert reply.status == "refused"
    assert_matches(reason, reply.reason)
    assert record.state == before


def assert_matches(pattern: str, text: str) -> None:
    assert re.search(pattern, text), text


def test_layers_may_be_an_array_and_long_lists_are_named_by_their_ends() -> None:
    record = LayoutRecord(ExpertLayout([[0, 1]] * 9, 2, topology=RANKS))
    record.attach("a")
    assert record.begin("a", np.arange(9), np.int64(0)).status == "ok"  # type: ignore[arg-type]
    assert "the move of layers 0, 1, 2, .., 7, 8 by" in record.begin("a", [0], 0).reason


def test_what_cannot_be_shown_is_refused_in_words() -> None:
    record = record_of("a")
    endless: list[Any] = []
    for _ in range(10**5):
        endless = [endless]
    assert "is at version 0, not some list;" in record.begin("a", [0], endless).reason  # type: ignore[arg-type]
    assert "not some int;" in record.begin("a", [0], 10**5000).reason
    assert record.begin("a", "x\n" * 99, 0).reason.startswith("`layers` (=x x x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layers", "rows", "reason"),
    [
        ([1], [ROW], r"the move of layer 0 by engine 'a' from version 0 is pending, not one of `layers` \(=\[1\]\)"),
        ([0, 1], [ROW, ROW], r"not one of `layers` \(=\[0, 1\]\)"),
        ([0, 0], [ROW, ROW], r"not one of `layers`"),
        ([0], [ROW, ROW], r"stays pending: `rows` \(shape \[2, 6\]\) must be \[1, 6\]"),
        ([0], [ROW[:5]], r"`rows` \(shape \[1, 5\]\) must be \[1, 6\]"),
        ([0], [[0, 1, 2, 4, 3, 3]], r"must be in \[-1, 4\) at layer 0, slot 3"),
        ([0], [[0, 1, 2, -2, 3, 3]], r"\(=-2\) must be in \[-1, 4\) at layer 0, slot 3"),
        ([0], [[0, 1, 2, 2, 1, 0]], "expert 3 has no slot at layer 0"),
        ([0], [[0.0, 1, 2, 3, 1, 0]], "must be signed integers"),
        ([0], [[0], [1, 2]], "stays pending: "),
    ],
)
def test_a_malformed_commit_is_refused_and_leaves_the_move_pending(layers: Any, rows: Any, reason: str) -> None:
    """R10, R29."""
    record = record_of("a")
    record.begin("a", [0], 0)
    before = record.state
    reply = record.commit("a", layers, rows)
    assert (reply.status, reply.version) == ("refused", 0)
    assert_matches(reason, reply.reason)
    assert record.state == before
    record.detach("a")
    assert record.state.dirty


@pytest.mark.parametrize("verb", ["commit", "abort"])
def test_only_the_engine_that_began_ends_the_move(verb: str) -> None:
    record = record_of("a")
    record.begin("a", [0], 0)
    record.attach("b")
    reply = record.commit("b", [0], [ROW]) if verb == "commit" else record.abort("b", [0])
    assert reply.reason == (
        f"engine 'b' has no move to {verb}; the move of layer 0 by engine 'a' from version 0 is pending"
    )
    assert record.state.pending is not None
    record.abort("a", [0])
    assert record.abort("a", [0]).reason == "engine 'a' has no move to abort; no move is pending"


# ---- engines that do not follow --------------------------------------------------------------------------------------


@pytest.mark.parametrize("claim", [(), ("old",), ("b", 0, LAYOUT.digest), ("a",)])
def test_who_cannot_be_seen_to_leave_or_follow_is_served_and_ends_all_moves(claim: tuple[Any, ...]) -> None:
    """R13: an engine without the field, one with it that did not attach, one that attached and names no layout."""
    record = record_of("a")
    assert record.check_fetch(*claim).status == "ok"
    reply = record.begin("a", [0], 0)
    assert reply.status == "refused"
    assert_matches("1 engine outside the record may still read the weights", reply.reason)


def test_an_engine_without_a_digest_is_refused_once_experts_have_moved() -> None:
    record = moved(record_of("a"))
    assert_matches("at version 1 of their layout.*upgrade the engine", record.check_fetch("old").reason)
    assert record.state.num_non_followers == 0


def test_many_non_followers_are_counted_and_few_are_kept_by_name() -> None:
    record = record_of()
    for number in range(100):
        record.check_fetch(f"old-{number}", 0, LAYOUT.digest)
    assert record.state.num_non_followers == 100
    assert len(record.state.non_followers) == NAMES_KEPT


# ---- presence --------------------------------------------------------------------------------------------------------


def test_an_engine_attaches_once_and_detaches_once() -> None:
    record = record_of("a")
    assert record.attach("a").reason == "engine 'a' is attached already"
    assert record.detach("a").status == "ok"
    assert record.detach("a").reason == "engine 'a' is not attached"


@pytest.mark.parametrize("engine", ["", "x" * 201, "line\nbreak", 7, None])
def test_a_name_that_cannot_be_shown_is_refused(engine: Any) -> None:
    record = record_of()
    assert record.attach(engine).reason == "an engine's id must be printable, of 1 to 200 characters"
    assert record.state.engines == ()


# ---- a keeper that restarts ------------------------------------------------------------------------------------------


def test_a_restarted_keeper_counts_former_engines_as_non_followers() -> None:
    record = LayoutRecord.restarted(moved(record_of("a")).state)
    record.attach("b")
    assert record.check_fetch("b", 1, record.digest).status == "ok"
    assert_matches("'a .attached before the keeper of the record restarted.'", record.begin("b", [0], 1).reason)


def test_a_move_that_was_pending_when_the_keeper_died_is_in_doubt() -> None:
    record = record_of("a")
    record.begin("a", [1], 0)
    assert_matches(
        "the move of layer 1 by engine 'a' from version 0 was pending when the keeper",
        LayoutRecord.restarted(record.state).query().reason,
    )


def test_a_record_is_of_a_layout() -> None:
    with pytest.raises(TypeError, match=r"`layout` \(=list\) must be an ExpertLayout"):
        LayoutRecord([[0, 1]])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`version` \(=-1\) must be at least 0"):
        LayoutRecord(LAYOUT, version=-1)


# ---- engines that follow ---------------------------------------------------------------------------------------------


def followed(*followers: str) -> LayoutRecord:
    record = record_of("a", *followers)
    for engine in followers:
        assert record.follow(engine, LAYOUT.digest).status == "ok"
    return record


def hold(record: LayoutRecord, engine: str) -> Reply:
    return record.hold(engine, record.version, record.state.begun)


def test_a_move_begins_only_when_every_follower_holds() -> None:
    record = followed("b", "c")
    assert record.begin("a", [0], 0)[:2] == (
        "busy",
        "engines 'b', 'c' are still reading layer 0",
    )
    assert hold(record, "b").status == "ok"
    assert record.begin("a", [0], 0)[:2] == ("busy", "engine 'c' is still reading layer 0")
    assert record.state.awaited == ("c",)
    assert record.commit("a", [0], [ROW]).reason == (
        "the move of layer 0 by engine 'a' from version 0 is only asked for; engines that follow still read its layers"
    )
    assert hold(record, "c").status == "ok"
    assert record.begin("a", [0], 0) == ("ok", "", 0, LAYOUT.digest)
    assert record.commit("a", [0], [ROW]).version == 1
    assert not record.state.holding + record.state.awaited
    assert record.state.followers == ("b", "c")


def test_followers_hold_for_each_move_anew() -> None:
    record = followed("b")
    record.begin("a", [0], 0)
    hold(record, "b")
    record.abort("a", [0])
    assert record.begin("a", [0], 0).status == "busy"
    late = record.hold("b", 0, 1)  # on its way since the move before, while the follower reads again
    assert late.reason == "the move of layer 0 by engine 'a' from version 0 is number 2, and engine 'b' holds for 1"
    assert record.begin("a", [0], 0).status == "busy"
    assert hold(record, "b").status == "ok"
    assert record.begin("a", [0], 0).status == "ok"


def test_a_mover_that_dies_after_all_hold_leaves_a_dirty_record() -> None:
    record = followed("b")
    record.begin("a", [0], 0)
    hold(record, "b")
    record.begin("a", [0], 0)
    record.detach("a")
    for reply in (record.query(), hold(record, "b"), record.follow("b", LAYOUT.digest)):
        assert_matches("nobody knows.*the move of layer 0 by engine 'a' from version 0 was pending", reply.reason)


def test_only_the_same_request_asks_again() -> None:
    record = followed("b")
    record.begin("a", [0], 0)
    assert_matches("commit or abort it first", record.begin("a", [1], 0).reason)
    assert_matches("commit or abort it first", record.begin("a", [0, 1], 0).reason)
    assert record.begin("b", [1], 0)[:2] == ("busy", "the move of layer 0 by engine 'a' from version 0 is pending")
    assert record.abort("a", [0]).status == "ok"


@pytest.mark.parametrize(
    ("engine", "digest", "reason"),
    [
        ("c", LAYOUT.digest, "engine 'c' is not attached; attach before it follows"),
        ("b", "other", r"engine 'b' routes by layout other, the weights hold \w{12} \(version 0\)"),
        ("b", None, "engine 'b' routes by layout None"),
    ],
)
def test_who_is_on_another_layout_does_not_follow(engine: str, digest: str | None, reason: str) -> None:
    record = record_of("a", "b")
    reply = record.follow(engine, digest)
    assert reply.status == "refused"
    assert_matches(reason, reply.reason)
    assert record.state.followers == ()


def test_only_who_is_asked_holds() -> None:
    record = followed("b")
    assert hold(record, "b").reason == "nobody asks engine 'b' to hold; no move is pending"
    assert hold(record, "a").reason == "engine 'a' does not follow"
    record.begin("a", [0], 0)
    for version in (1, True, "0"):
        assert_matches("is pending, and engine 'b' is at version", record.hold("b", version, 1).reason)  # type: ignore[arg-type]
    record.abort("a", [0])
    assert record.begin("b", [0], 0).status == "busy"  # 'a' is attached and does not follow
    assert record.state.holding == ()


def test_an_engine_whose_connection_was_ended_from_here_may_still_read() -> None:
    record = record_of("a", "b")
    assert record.lose("b").status == "ok"
    assert record.lose("b").status == "refused"
    assert_matches("1 engine .*'b .its connection was ended.'", record.begin("a", [0], 0).reason)


# ---- against a model -------------------------------------------------------------------------------------------------

ENGINES = ["a", "b", "c"]
ROWS = [ROW, [0, 1, 2, 3, 3, 0], [1, 1, 0, 2, 3, -1], [0, 1, 2, 3]]  # the last has the wrong length
LAYERS = [[0], [1], [0, 1], [1, 0]]
BAD_LAYERS = [[], [2], [-1], [0, 0]]


class Model:
    """The rules of the protocol written down once more as plain values; a crash is a detach.

    R8: a reason to refuse is decided before a reason to wait. R11: the digest decides, not the version.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.record = LayoutRecord(LAYOUT)
        self.rows = LAYOUT.physical_to_logical_map.tolist()
        self.version, self.present, self.strangers, self.lost = 0, set[str](), 0, False
        self.move: tuple[str, set[int]] | None = None
        self.order: list[int] = []
        self.following, self.stopped, self.writing = set[str](), set[str](), False
        self.begun, self.dirty = 0, ""

    def seldom(self, share: float = 0.1) -> bool:
        return self.random.random() < share

    def one_of(self, names: Iterable[str]) -> str:
        """An engine, mostly one for which the request makes sense."""
        return self.random.choice(ENGINES if self.seldom() else sorted(names) or ENGINES)

    def mover(self) -> set[str]:
        return {self.move[0]} if self.move else set()

    def attach(self) -> None:
        engine = self.one_of(set(ENGINES) - self.present)
        expected = "refused" if engine in self.present else "ok"
        assert self.record.attach(engine).status == expected
        self.present.add(engine)

    def leave_or_crash(self) -> None:
        engine = self.one_of(self.present)
        expected = "ok" if engine in self.present else "refused"
        assert self.record.detach(engine).status == expected
        self.gone(engine)

    def connection_is_ended_by_the_keeper(self) -> None:
        engine = self.one_of(self.present)
        self.strangers += engine in self.present
        self.record.lose(engine)
        self.gone(engine)

    def gone(self, engine: str) -> None:
        if self.move and self.move[0] == engine:
            self.lost, self.move = self.lost or self.writing, None
        for names in (self.present, self.following, self.stopped):
            names.discard(engine)

    def follow(self) -> None:
        engine = self.one_of(self.present)
        digest = LAYOUT.digest if self.seldom() else self.record.digest
        if self.lost or engine not in self.present or digest != self.record.digest:
            expected = "refused"
        elif self.move:
            expected = "busy"
        else:
            expected = "ok"
            self.following.add(engine)
        assert self.record.follow(engine, digest).status == expected

    def hold(self) -> None:
        engine = self.one_of(self.following - self.stopped - self.mover())
        behind, late = self.seldom(), self.seldom()
        asked = self.move is not None and self.move[0] != engine and engine in self.following
        good = asked and not self.lost and not behind and not late
        reply = self.record.hold(engine, self.version - behind, self.record.state.begun - late)
        assert reply.status == ("ok" if good else "refused")
        if good:
            self.stopped.add(engine)

    def begin(self) -> None:
        engine, behind = self.one_of(self.present), self.seldom(0.05)
        layers = self.random.choice(BAD_LAYERS if self.seldom(0.05) else LAYERS)
        if self.move and self.seldom(0.5):
            engine, layers = self.move[0], self.order
        mine = self.move is not None and self.move[0] == engine
        other = mine and (self.writing or self.order != layers)
        bad = layers in BAD_LAYERS
        if self.lost or engine not in self.present or behind or bad or self.strangers or other:
            expected = "refused"
        elif (self.move and not mine) or self.present - self.following - {engine}:
            expected = "busy"
        else:
            if not mine:
                self.move, self.order, self.stopped = (engine, set(layers)), layers, set()
                self.begun += 1
            self.writing = self.stopped >= self.following - {engine}
            expected = "ok" if self.writing else "busy"
        assert self.record.begin(engine, layers, self.version - behind).status == expected

    def commit(self) -> None:
        engine, row = self.one_of(self.mover()), self.random.choice(ROWS)
        layers = self.random.choice(LAYERS + BAD_LAYERS if self.seldom(0.3) else [sorted(self.order)])
        mine = self.move and self.move[0] == engine and self.move[1] == set(layers) and len(layers) == len(set(layers))
        good = mine and len(row) == 6 and self.writing
        assert self.record.commit(engine, layers, [row] * len(layers)).status == ("ok" if good else "refused")
        if good:
            for layer in layers:
                self.rows[layer] = row
            self.version, self.move = self.version + 1, None

    def abort(self) -> None:
        engine = self.one_of(self.mover())
        mine = self.move and self.move[0] == engine
        assert self.record.abort(engine, self.order or [0]).status == ("ok" if mine else "refused")
        if mine:
            self.move = None

    def fetch(self) -> None:
        now = ExpertLayout(self.rows, 4, topology=RANKS).digest
        engine: str | None = self.random.choice([*ENGINES, None])
        digest = self.random.choice([now, LAYOUT.digest, None])
        if self.present and not self.seldom(0.05):
            engine, digest = self.random.choice(sorted(self.present)), digest or now
        if self.lost or (digest is None and self.version) or (digest is not None and digest != now):
            expected = "refused"
        elif self.move:
            expected = "busy"
        else:
            expected = "ok"
            self.strangers += digest is None or engine not in self.present
        assert self.record.check_fetch(engine, self.random.randrange(3), digest).status == expected

    def keeper_restarts(self) -> None:
        self.record = LayoutRecord.restarted(self.record.state)
        self.lost |= self.move is not None and self.writing
        self.strangers += len(self.present)
        self.move, self.present, self.following, self.begun = None, set(), set(), 0

    def step(self) -> None:
        sensible = [self.begin, self.hold, self.commit] if self.move else [self.begin, self.attach, self.follow]
        others = [self.attach, self.follow, self.hold, self.commit, self.fetch, self.abort, self.leave_or_crash]
        ends_all_moves = [self.keeper_restarts, self.connection_is_ended_by_the_keeper]
        self.random.choice(ends_all_moves if self.seldom(0.01) else others if self.seldom(0.3) else sensible)()

    def check(self) -> None:
        state: RecordState = self.record.state
        assert np.array_equal(state.layout.physical_to_logical_map, self.rows)
        assert (state.version, set(state.engines)) == (self.version, self.present)
        assert (state.num_non_followers, bool(state.dirty), state.begun) == (self.strangers, self.lost, self.begun)
        self.dirty = self.dirty or state.dirty
        assert state.dirty == self.dirty  # the first reason stays
        assert (state.pending and (state.pending.engine, set(state.pending.layers))) == self.move
        assert (set(state.followers), state.asking) == (self.following, self.move is not None and not self.writing)
        assert len(state.followers) == len(self.following)
        if self.move:
            assert set(state.holding) == self.stopped & self.following
        assert (self.record.query().status == "ok") == (not self.lost and self.move is None)


@pytest.mark.parametrize("seed", range(5))
def test_the_record_does_as_its_model(seed: int) -> None:
    moves = 0
    for schedule in range(60):
        model = Model(100 * seed + schedule)
        for _ in range(40):
            model.step()
            model.check()
        moves += model.version
    assert moves > 10


@pytest.mark.parametrize("strange", [None, 3, [1], {}, np.zeros(3), [10**5000], np.array(["a", "a"])])
def test_what_is_no_name_is_answered_and_changes_nothing(strange: Any) -> None:
    """A reply, never an exception: an array cannot be compared with a name, and a list is no key."""
    record = record_of("a")
    record.begin("a", [0], 0)
    before = record.state
    answers = [
        record.attach(strange),
        record.detach(strange),
        record.begin(strange, [0], 0),
        record.commit(strange, [0], LAYOUT.physical_to_logical_map[:1]),
        record.abort(strange, [0]),
        record.follow(strange, LAYOUT.digest),
        record.follow("a", strange),
        record.hold(strange, 0, 1),
        record.hold("a", strange, strange),
        record.begin("a", strange, strange),
    ]
    assert {answer.status for answer in answers} <= {"refused", "busy"}
    assert all(answer.reason.isprintable() and len(answer.reason) < 1000 for answer in answers)
    assert record.state == before
