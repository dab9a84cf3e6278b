from __future__ import annotations

import logging
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from eplb_core.adapters import hooking

dist: Any = torch.distributed


def test_parts_are_on_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EPLB_CORE_OFF", raising=False)
    assert hooking.parts_on(("policy", "maps")) == ("policy", "maps")
    monkeypatch.setenv("EPLB_CORE_OFF", " maps ,")
    assert hooking.parts_on(("policy", "maps")) == ("policy",)
    monkeypatch.setenv("EPLB_CORE_OFF", "map")
    with pytest.raises(ValueError, match=r"EPLB_CORE_OFF \(=map\) must name some of policy, maps"):
        hooking.parts_on(("policy", "maps"))


def test_options_are_read_or_refused_by_name_and_value(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, Any] = {"mode": hooking.one_of("place", "deepseek"), "min_gain": float}
    monkeypatch.delenv("EPLB_CORE_OPTIONS", raising=False)
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
    with caplog.at_level(logging.WARNING):
        assert [call(1), call(-3), call(-3)] == ["ours", "the engine's", "the engine's"]
    lines = [record.message for record in caplog.records]
    assert lines == ["eplb_core: part: the engine's own code goes on, since ours raised ValueError: -3 is negative"]


# ---- one answer on all ranks -----------------------------------------------------------------------------------------


def given(answer: str | Exception) -> str:
    if isinstance(answer, Exception):
        raise answer
    return answer


def settled(answers: list[Any], own: list[Any], failures: list[str]) -> list[Any]:
    """What ranks with these answers settle on, or raise; their words go by one table."""
    rooms: dict[int, list[Any]] = {}
    barrier = threading.Barrier(len(answers))
    got: list[Any] = [""] * len(answers)

    def rank_does(rank: int) -> None:
        turn = iter(range(9))

        def gather(said: hooking.Said) -> list[hooking.Said]:
            room = rooms.setdefault(next(turn), [None] * len(answers))
            room[rank] = said if said.failure else said._replace(failure=failures[rank])
            barrier.wait(60)
            return list(room)

        try:
            got[rank] = hooking.settle(
                "policy",
                gather,
                lambda: given(answers[rank]),
                lambda: given(own[rank]),
                digest_of=lambda answer: answer.encode().hex(),
                otherwise=lambda: f"as it was on {rank}",
            )
        except KeyError as error:
            got[rank] = error

    threads = [threading.Thread(target=rank_does, args=(rank,)) for rank in range(len(answers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return got


def test_ranks_that_agree_use_their_answer_and_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert settled(["a"] * 3, ["own"] * 3, ["", "KeyError: x", ""]) == ["a"] * 3
    assert not caplog.records


def test_where_one_rank_fell_back_all_take_the_engine_s_and_the_line_names_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert settled(["own", "a"], ["own"] * 2, ["MemoryError: no room", ""]) == ["own"] * 2
    lines = {record.message for record in caplog.records}
    assert lines == {
        "eplb_core: policy: rank 0 (6f776e: MemoryError: no room) computed another map than the other ranks (61), so "
        "all ranks take the engine's own; look into that rank's log, and give all ranks the same eplb_core, variables "
        "and engine"
    }


def test_where_the_engine_s_own_answers_differ_too_nothing_changes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert settled(["a", "a", "b"], ["x", "x", "y"], [""] * 3) == [f"as it was on {rank}" for rank in range(3)]
    assert "policy: rank 2 (62) computed another map than the other ranks (61)" in caplog.text
    assert "policy: rank 2 (79) computed another map than the other ranks (78), so nothing changes" in caplog.text


def test_a_rank_whose_answer_raises_says_so_first_and_leaves_no_other_waiting(caplog: pytest.LogCaptureFixture) -> None:
    """Ours and, in its place, the engine's own: the other ranks would wait for its word until they gave up."""
    error = KeyError("no load")
    with caplog.at_level(logging.WARNING):
        assert settled([error, "a"], ["own"] * 2, [""] * 2) == ["own"] * 2
        assert "policy: rank 0 (no map: KeyError: 'no load') computed another map" in caplog.text
        assert settled(["a", error], ["own", error], [""] * 2) == ["as it was on 0", error]
        assert settled([error] * 2, [error] * 2, [""] * 2) == [error] * 2
        assert settled([error] * 2, ["own"] * 2, [""] * 2) == ["own"] * 2


def test_words_go_over_a_group_of_torch(tmp_path: Path) -> None:
    said: list[Any] = [None, None]

    def rank_does(rank: int) -> None:
        store = dist.FileStore(str(tmp_path / "store"), 2)
        group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30))
        said[rank] = hooking.gather_over(group)(hooking.Said(f"{rank}" * 3, f"failure of {rank}"))

    threads = [threading.Thread(target=rank_does, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == [[hooking.Said("000", "failure of 0"), hooking.Said("111", "failure of 1")]] * 2


def test_what_a_part_failed_by_is_known_until_it_works_again() -> None:
    def ours(value: int) -> int:
        return 1 // value

    call = hooking.guarded(ours, lambda value: -1, "part")
    assert [call(0), hooking.failure_of("part")[:17]] == [-1, "ZeroDivisionError"]
    assert [call(1), hooking.failure_of("part")] == [1, ""]
