"""Words and blobs between ranks, with ranks that are late, missing, or gone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from eplb_core.errors import AgreementError
from eplb_core.loading.agreement import Agreement, GroupAgreement, LocalAgreement
from tests.loading.worlds import on_threads

dist: Any = torch.distributed

Make = Callable[..., list[Any]]


def gloo(folder: Path, size: int, deadline: float, *, named: bool = True) -> list[GroupAgreement]:
    """Ranks of one group in this process, a thread each for the meeting."""
    stores = [dist.FileStore(str(folder / "store"), size) for _ in range(size)]

    def join(rank: int) -> GroupAgreement:
        group = dist.ProcessGroupGloo(stores[rank], rank, size, timedelta(seconds=30))
        return GroupAgreement(group, deadline, store=stores[rank] if named else None)

    made = on_threads([lambda rank=rank: join(rank) for rank in range(size)])  # type: ignore[misc]
    for member in made:
        assert isinstance(member, GroupAgreement), member
    return made  # type: ignore[return-value]


@pytest.fixture(params=["local", "gloo"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    if request.param == "local":
        return lambda size, deadline=20.0: LocalAgreement.group(size, deadline=deadline)
    return lambda size, deadline=20.0: gloo(tmp_path, size, deadline)


def test_the_minimum_comes_one_pass_later_and_nothing_on_the_first(make: Make) -> None:
    members = make(3)
    assert all(isinstance(member, Agreement) for member in members)
    assert [(member.rank, member.size) for member in members] == [(0, 3), (1, 3), (2, 3)]
    assert [member.take() for member in members] == [None] * 3
    for words in ([5, 3, 9], [-1, 2**60, 7], [2**62, 2**62, 2**62 - 1]):
        for member, word in zip(members, words, strict=True):
            member.post(word)
        taken = on_threads([member.take for member in members])
        assert taken == [min(words)] * 3


def test_ranks_hear_in_one_exchange_whether_their_words_are_equal(tmp_path: Path) -> None:
    members = gloo(tmp_path, 3, 20.0)
    for words, equal in (([5, 5, 5], True), ([5, 5, 6], False), ([0, 5, 5], False), ([2**62] * 3, True)):
        for member in members:
            member.post(7)  # what is on its way stays there
        asked = [partial(member.same, word) for member, word in zip(members, words, strict=True)]
        assert on_threads(asked) == [equal] * 3
        assert on_threads([member.take for member in members]) == [7] * 3


def test_blobs_of_any_length_come_by_rank_and_leave_the_word_where_it_is(make: Make) -> None:
    members = make(3)
    for member in members:
        member.take()
        member.post(member.rank + 4)
    blobs = [b"", b"one", bytes(range(256)) * 40]
    for _ in range(2):
        gathered = on_threads([lambda m=m, b=b: m.gather(b) for m, b in zip(members, blobs, strict=True)])  # type: ignore[misc]
        assert gathered == [blobs] * 3
    assert on_threads([member.take for member in members]) == [4] * 3


def test_an_agreement_that_was_made_in_inference_mode_serves_outside_of_it(tmp_path: Path) -> None:
    with torch.inference_mode():
        store = dist.FileStore(str(tmp_path / "store"), 1)
        alone = GroupAgreement(dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=30)), 20.0)
    alone.post(7)
    assert (alone.take(), alone.gather(b"x")) == (7, [b"x"])


def test_a_word_that_was_not_taken_is_not_written_over(make: Make) -> None:
    members = make(2)
    for member in members:
        member.post(1)
    with pytest.raises(AgreementError, match="`post` was called twice without a `take`"):
        members[0].post(2)
    assert on_threads([member.take for member in members]) == [1, 1]


def test_a_rank_that_does_not_come_is_named_within_the_deadline(make: Make) -> None:
    """F4: the rank that skipped a pass."""
    members = make(3, deadline=0.6)
    for member in members[:2]:
        member.post(1)
    found = on_threads([member.take for member in members[:2]])
    for error in found:
        assert isinstance(error, AgreementError)
        assert error.ranks == (2,)
        assert "rank 2 did not answer" in str(error)


def test_after_a_failure_every_call_says_so_at_once(tmp_path: Path) -> None:
    members = gloo(tmp_path, 2, 0.4)
    members[0].post(1)
    with pytest.raises(AgreementError):
        members[0].take()
    for call in (members[0].take, lambda: members[0].post(1), lambda: members[0].gather(b"")):
        with pytest.raises(AgreementError, match=r"rank 1 did not answer rank 0 within 0.4 s"):
            call()


def test_a_rank_that_waits_learns_from_one_that_has_seen_the_failure(tmp_path: Path) -> None:
    members = gloo(tmp_path, 3, 3.0)  # what is under way when the group goes holds its end up for so long
    for member in members[:2]:
        member.post(1)
    for mark in ("eplb-failed", "eplb-alive-1"):  # as if it had seen a closed connection
        members[1]._store.set(mark, "1")
    members[1]._window = members[0]._window = 0.1
    with pytest.raises(AgreementError) as caught:
        members[0].take()
    assert caught.value.ranks == (2,)


@pytest.mark.parametrize("named", [False, True])
def test_without_a_store_or_the_process_that_keeps_it_the_rank_cannot_be_told(tmp_path: Path, named: bool) -> None:
    members = gloo(tmp_path, 2, 0.4, named=named)
    if named:
        host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        members[0]._store = dist.TCPStore("127.0.0.1", host.port, wait_for_workers=False)
        del host
    members[0].post(1)
    with pytest.raises(AgreementError, match=r"a rank did not answer rank 0 within 0.4 s") as caught:
        members[0].take()
    assert caught.value.ranks == ()


def test_a_member_that_left_is_missed_at_once() -> None:
    first, second = LocalAgreement.group(2, deadline=1e6)
    second.post(1)
    first.post(2)
    second.leave()
    assert first.take() == 1  # it had said that much
    first.post(3)
    with pytest.raises(AgreementError, match="rank 1 did not answer"):
        first.take()


def test_ranks_in_turn_on_one_thread_do_not_wait() -> None:
    members = LocalAgreement.group(4)
    for turn in range(5):
        assert [member.take() for member in members] == [turn * 10 - 10 if turn else None] * 4
        for member in members:
            member.post(turn * 10 + member.rank)
    assert threading.active_count() >= 1


class NcclGroup:
    """Of the devices."""

    def allreduce(self) -> None:
        """As every group has."""

    def name(self) -> str:
        return "nccl"


def test_the_model_s_own_group_of_devices_is_refused() -> None:
    """F9: words go by a group of the CPU that nothing else uses."""
    with pytest.raises(TypeError, match=r"`cpu_group` \(='nccl'\) must be of the CPU, and nobody else's"):
        GroupAgreement(NcclGroup())


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"`cpu_group` \(=int\) must be a process group"):
        GroupAgreement(3)
    group = dist.ProcessGroupGloo(dist.FileStore(str(tmp_path / "store"), 1), 0, 1, timedelta(seconds=30))
    with pytest.raises(ValueError, match=r"`deadline` \(=0.0\) must be above 0"):
        GroupAgreement(group, 0)
