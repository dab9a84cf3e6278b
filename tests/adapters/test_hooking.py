from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from eplb_core.adapters import hooking
from eplb_core.errors import EplbError, TransportError
from eplb_core.loading.agreement import GroupAgreement, LocalAgreement
from tests.adapters.fakes import group_of_one, on_ranks
from tests.loading.worlds import on_threads

dist: Any = torch.distributed


def test_parts_are_on_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hooking.parts_on(("policy", "maps")) == ("policy", "maps")
    monkeypatch.setenv("EPLB_CORE_OFF", " maps ,")
    assert hooking.parts_on(("policy", "maps")) == ("policy",)
    monkeypatch.setenv("EPLB_CORE_OFF", "map")
    with pytest.raises(ValueError, match=r"EPLB_CORE_OFF \(=map\) must name some of policy, maps"):
        hooking.parts_on(("policy", "maps"))


def test_options_are_read_or_refused_by_name_and_value(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, Any] = {"mode": hooking.one_of("place", "deepseek"), "min_gain": float}
    assert hooking.options_from(known) == {}
    monkeypatch.setenv("EPLB_CORE_OPTIONS", "mode=deepseek, min_gain = 0.5")
    assert hooking.options_from(known) == {"mode": "deepseek", "min_gain": 0.5}
    for text, why in (
        ("gain=1", r"\(=gain=1\) must be name=value with a name of mode, min_gain"),
        ("mode", r"\(=mode\) must be name=value"),
        ("mode=x", r"\(=mode=x\): 'x' must be one of place, deepseek"),
        ("min_gain=x", r"\(=min_gain=x\): could not convert"),
    ):
        monkeypatch.setenv("EPLB_CORE_OPTIONS", text)
        with pytest.raises(ValueError, match=why):
            hooking.options_from(known)


def test_a_function_of_another_signature_is_named_with_what_was_expected() -> None:
    def fits(a: int, b: int, c: int = 0, *, d: int = 0, **rest: int) -> None: ...

    def other(a: int, x: int) -> None: ...

    def asks_for_more(a: int, b: int, c: int) -> None: ...

    assert hooking.mismatch(fits, "f", ("a", "b")) == ""
    assert hooking.mismatch(None, "f", ("a", "b")) == "expected f(a, b), found no such function"
    for function in (other, asks_for_more):
        text = hooking.mismatch(function, "f", ("a", "b"))
        assert text.startswith("expected f(a, b), found f(a: 'int', ")
    assert hooking.mismatch(type, "f", ("a",)).startswith("expected f(a), found a function that does not tell")


def test_an_error_is_logged_once_and_the_engine_answers(caplog: pytest.LogCaptureFixture) -> None:
    """FAULTS K3: never silently off; each part that is not on is named with its reason."""

    def ours(value: int) -> str:
        if value < 0:
            raise ValueError(f"{value} is negative")
        return "ours"

    call = hooking.guarded(ours, lambda value: "the engine's", "part")
    assert [call(1), call(-3), call(-3)] == ["ours", "the engine's", "the engine's"]
    (line,) = caplog.messages
    assert line.startswith("eplb_core: part: ")
    assert line.endswith("ValueError: -3 is negative")


def test_a_call_with_other_arguments_than_ours_takes_is_the_engine_s(caplog: pytest.LogCaptureFixture) -> None:
    """An engine may add a parameter with a default, and use it later."""

    def engine_own(first: int, second: int = 0, *, third: int = 0) -> tuple[str, int]:
        return "own", first + second + third

    def ours(first: int, second: int = 0) -> tuple[str, int]:
        return "ours", first + second

    call: Any = hooking.as_called(ours, engine_own, "part")
    assert call.__name__ == "engine_own"
    assert [call(1), call(1, 2), call(1, second=2), call(second=2, first=1)] == [("ours", 1)] + [("ours", 3)] * 3
    assert not caplog.messages
    assert [call(1, third=5), call(1, 2, third=5)] == [("own", 6), ("own", 8)]
    assert call(second=2, third=0, first=1) == call(1, second=2, third=0) == ("own", 3)
    assert len(caplog.messages) == 4
    assert "1 arguments, third; ours takes first, second" in caplog.messages[0]
    with pytest.raises(TypeError):
        call()

    def shorter(second: int = 0) -> tuple[str, int]:
        return "own", second

    assert hooking.as_called(ours, shorter, "part")(second=2) == ("own", 2)  # as many as ours needs, but not that one


def test_an_error_that_cannot_say_itself_stops_no_engine(caplog: pytest.LogCaptureFixture) -> None:
    """FD9."""

    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def ours() -> str:
        raise Mute

    assert hooking.guarded(ours, lambda: "the engine's", "part")() == "the engine's"
    assert hooking.failure_of("part") == "Mute: (its text raised RuntimeError)"
    assert hooking.attempt(ours, str)[1] == ("", "Mute: (its text raised RuntimeError)")
    assert len(caplog.messages) == 1


# ---- one answer on all ranks -----------------------------------------------------------------------------------------


def given(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer


def settled(answers: list[Any], own: list[Any], failures: list[str]) -> list[Any]:
    """What ranks with these answers settle on, or raise; by `failures` ours fell back to the engine's before."""
    members = LocalAgreement.group(len(answers))

    def rank_does(rank: int) -> Any:
        def gather(said: hooking.Said) -> list[hooking.Said]:
            said = said if said.failure else said._replace(failure=failures[rank])
            return hooking.gather_by(members[rank])(said)

        return hooking.settle(
            "policy",
            gather,
            lambda: given(answers[rank]),
            lambda: given(own[rank]),
            digest_of=lambda answer: answer.encode().hex(),
            otherwise=lambda: f"as it was on {rank}",
        )

    return on_threads([partial(rank_does, rank) for rank in range(len(answers))])


def test_ranks_that_agree_use_their_answer_and_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert settled(["a"] * 3, ["own"] * 3, ["", "KeyError: x", ""]) == ["a"] * 3
    assert not caplog.records


def test_where_one_rank_fell_back_all_take_the_engine_s_and_the_line_names_it(caplog: pytest.LogCaptureFixture) -> None:
    assert settled(["own", "a"], ["own"] * 2, ["MemoryError: no room", ""]) == ["own"] * 2
    (line,) = set(caplog.messages)
    assert "policy: rank 0 (6f776e: MemoryError: no room)" in line
    assert "than the other ranks (61), so all ranks take the engine's own" in line


def test_where_the_engine_s_own_answers_differ_too_nothing_changes(caplog: pytest.LogCaptureFixture) -> None:
    assert settled(["a", "a", "b"], ["x", "x", "y"], [""] * 3) == [f"as it was on {rank}" for rank in range(3)]
    first, second = dict.fromkeys(caplog.messages)
    assert "rank 2 (62) computed another map than the other ranks (61)" in first
    assert "rank 2 (79) computed another map than the other ranks (78), so nothing changes" in second


def test_a_rank_whose_answer_raises_says_so_first_and_leaves_no_other_waiting(caplog: pytest.LogCaptureFixture) -> None:
    """Ours and, in its place, the engine's own: the other ranks would wait for its word until they gave up."""
    error = KeyError("no load")
    assert settled([error, "a"], ["own"] * 2, [""] * 2) == ["own"] * 2
    assert "rank 0 (no map: KeyError: 'no load')" in caplog.text
    assert settled(["a", error], ["own", error], [""] * 2) == ["as it was on 0", error]
    assert settled([error] * 2, [error] * 2, [""] * 2) == [error] * 2
    assert settled([error] * 2, ["own"] * 2, [""] * 2) == ["own"] * 2


def test_what_some_rank_cannot_make_no_rank_keeps() -> None:
    closed: list[int] = []

    def made(failing: set[int]) -> list[Any]:
        members = LocalAgreement.group(3)

        def rank_does(rank: int) -> Any:
            def make() -> int:
                return int(given(KeyError(rank) if rank in failing else rank))

            gather = hooking.gather_by(members[rank])
            try:
                return hooking.on_all_or_none(gather, make, TransportError, close=closed.append)
            except EplbError as error:
                return type(error), str(error)

        return on_ranks(rank_does, 3)

    assert made(set()) == [0, 1, 2]
    assert not closed
    assert made({1}) == [(TransportError, "rank 1: KeyError: 1")] * 3
    assert sorted(closed) == [0, 2]
    assert made({1, 2}) == [(TransportError, "rank 1: KeyError: 1 [1 more]")] * 3


def test_words_go_over_a_group_of_torch(tmp_path: Path) -> None:
    def rank_does(rank: int) -> Any:
        group = dist.ProcessGroupGloo(dist.FileStore(f"{tmp_path}/store", 2), rank, 2, timedelta(seconds=30))
        return hooking.gather_over(group)(hooking.Said(f"{rank}" * 3, f"failure of {rank}"))

    assert on_ranks(rank_does) == [[("000", "failure of 0"), ("111", "failure of 1")]] * 2


def test_a_group_of_its_own_is_made_once_for_the_ranks_of_the_engine_s(tmp_path: Path) -> None:
    """FD8: collectives of two users on one group mix."""
    with group_of_one(tmp_path) as engines:
        gather = hooking.gather_over(engines)
        made = len(dist.distributed_c10d._world.pg_map)
        assert hooking.gather_over(engines) is gather
        assert made == len(dist.distributed_c10d._world.pg_map) == 2
        assert gather(hooking.Said("a", "")) == [("a", "")]


def test_equal_answers_take_one_short_collective_and_others_exchange_words(tmp_path: Path) -> None:
    """FD2: a commit of a layer waits for this on the forward thread."""

    def settled(ours: list[Any], own: list[Any]) -> list[Any]:
        store = f"{tmp_path}/{len(list(tmp_path.iterdir()))}"

        def rank_does(rank: int) -> Any:
            group = dist.ProcessGroupGloo(dist.FileStore(store, 2), rank, 2, timedelta(seconds=30))
            gather, exchanged = hooking.Gather(GroupAgreement(group)), []

            def words(said: hooking.Said) -> list[hooking.Said]:
                exchanged.append(said)
                return gather(said)

            answer = hooking.settle(
                "part",
                words,
                lambda: given(ours[rank]),
                lambda: own[rank],
                digest_of=str,
                otherwise=lambda: "as it was",
                same=gather.same,
            )
            return answer, len(exchanged)

        return on_ranks(rank_does)

    assert settled(["a", "a"], ["own"] * 2) == [("a", 0)] * 2
    assert settled(["a", "b"], ["own"] * 2) == [("own", 2)] * 2
    assert settled(["a", KeyError("x")], ["own"] * 2) == [("own", 2)] * 2
    assert settled([KeyError("x")] * 2, ["own"] * 2) == [("own", 2)] * 2
    assert settled(["a", "b"], ["x", "y"]) == [("as it was", 2)] * 2


def test_what_a_part_failed_by_is_known_until_it_works_again() -> None:
    def ours(value: int) -> int:
        return 1 // value

    call = hooking.guarded(ours, lambda value: -1, "part")
    assert [call(0), hooking.failure_of("part")[:17]] == [-1, "ZeroDivisionError"]
    assert [call(1), hooking.failure_of("part")] == [1, ""]
