"""Faults on purpose: each is what its name says, and a seed repeats them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from eplb_core import ReadState, TransportError
from eplb_core.loading.transport import Region, Status
from eplb_core.loading.transports import DeferredCopy, Faulty, SharedMemory
from eplb_core.testing.peers import batch

NBYTES = 10_000


class Pair:
    """A faulty reader of its own memory: region 0 into region 1."""

    def __init__(self, faults: Mapping[str, float] | Sequence[str], seed: int) -> None:
        self.faulty = Faulty(SharedMemory(), faults, seed=seed, polls=3)
        self.source = torch.arange(NBYTES, dtype=torch.int32).to(torch.uint8)
        self.landed = torch.zeros(NBYTES, dtype=torch.uint8)
        tensors = (self.source, self.landed)
        self.blob = self.faulty.export([Region(t.data_ptr(), NBYTES, "cpu") for t in tensors])
        self.faulty.connect(0, self.blob)

    def read(self) -> Any:
        half = NBYTES // 2
        return self.faulty.read(0, batch([(1, 0, 0, 0, half), (1, half, 0, half, NBYTES - half)]))

    def end(self, ticket: Any) -> tuple[Status, list[ReadState]]:
        """Poll up to a bound that no read of this size needs."""
        seen = []
        for _ in range(10**6):
            status = self.faulty.poll(ticket)
            seen.append(status.state)
            if status.state.is_end:
                return status, seen
        raise AssertionError(f"no end: {status}")

    @property
    def exact(self) -> bool:
        return torch.equal(self.source, self.landed)


@contextmanager
def pair(faults: Mapping[str, float] | Sequence[str], seed: int = 0) -> Iterator[Pair]:
    made = Pair(faults, seed)
    yield made
    made.faulty.close()


def test_the_faults_come_in_turn_and_then_no_more() -> None:
    with pair(["delay", "tear"]) as p:
        for _ in range(3):
            p.end(p.read())
        assert p.faulty.log == [(0, "delay"), (0, "tear"), (0, "none")]
        assert p.exact


def test_a_torn_read_is_done_and_wrong() -> None:
    with pair(["tear"]) as p:
        assert p.end(p.read())[0].state is ReadState.DONE
        assert 0 < int((p.source != p.landed).sum()) <= NBYTES // 2


def test_a_delayed_read_is_pending_for_so_many_polls() -> None:
    with pair(["delay"]) as p:
        status, seen = p.end(p.read())
        assert seen[:3] == [ReadState.PENDING] * 3
        assert status.state is ReadState.DONE
        assert p.exact


def test_a_dropped_read_stays_until_it_is_given_up_on() -> None:
    with pair(["drop"]) as p:
        ticket = p.read()
        assert {p.faulty.poll(ticket).state for _ in range(1000)} == {ReadState.PENDING}
        p.faulty.abandon(ticket)
        assert p.end(ticket)[1] == [ReadState.DRAINED]
        assert not p.landed.any()


def test_a_late_read_writes_between_abandoned_and_drained() -> None:
    """A stopped owner that comes back writes into a buffer whose read was given up on (measured with two engines)."""
    with pair(["late"]) as p:
        assert not p.faulty.caps.stops_late_writes
        ticket = p.read()
        assert {p.faulty.poll(ticket).state for _ in range(1000)} == {ReadState.PENDING}
        p.faulty.abandon(ticket)
        for _ in range(3):
            assert p.faulty.poll(ticket).state is ReadState.ABANDONED
            assert not p.landed.any()
        status, seen = p.end(ticket)
        assert status.state is ReadState.DRAINED
        assert set(seen[:-1]) <= {ReadState.ABANDONED}
        assert p.exact


@pytest.mark.parametrize(("fault", "state"), [("fail", ReadState.FAILED), ("lose", ReadState.LOST_PEER)])
def test_a_read_that_fails_leaves_garbage_and_says_which_rank(fault: str, state: ReadState) -> None:
    with pair([fault]) as p:
        status = p.end(p.read())[0]
        assert status.state is state
        assert "rank 0" in status.reason
        assert not p.exact


def test_a_lost_rank_is_gone_until_it_is_connected_again() -> None:
    with pair(["lose", "drop", "lose"]) as p:
        ticket, dropped = p.read(), p.read()
        p.end(ticket)
        assert p.end(dropped)[0].state is ReadState.LOST_PEER
        with pytest.raises(TransportError, match=r"`rank` \(=0\) must be connected"):
            p.read()
        p.faulty.connect(0, p.blob)
        p.end(p.read())


def test_a_seed_repeats_faults_and_bytes() -> None:
    def run(seed: int) -> tuple[list[tuple[int, str]], list[list[int]]]:
        with pair({"tear": 0.4, "delay": 0.3}, seed) as p:
            landed = []
            for _ in range(20):
                p.end(p.read())
                landed.append(p.landed.tolist())
            return p.faulty.log, landed

    first = run(1)
    assert first == run(1)
    assert first[0] != run(2)[0]
    faults = [fault for _, fault in first[0]]
    assert 2 <= faults.count("tear") <= 14
    assert 2 <= faults.count("none") <= 14


def test_shares_are_shares() -> None:
    with pair({"tear": 0.0, "delay": 1.0}) as p:
        for _ in range(20):
            p.end(p.read())
        assert p.faulty.log == [(0, "delay")] * 20


@pytest.mark.parametrize("fault", ["drop", "late"])
def test_what_the_inner_transport_refuses_is_refused_under_every_fault(fault: str) -> None:
    with pair([fault] * 3) as p:
        for bad in ((1, 1, 0, 0, NBYTES), (1, 0, 2, 0, 1), (1, 0, 0, 0, -1)):
            with pytest.raises(TransportError):
                p.faulty.read(0, batch([bad]))
        assert p.faulty.log == []


def test_faults_that_are_none_are_refused() -> None:
    bad: list[tuple[Any, int, str]] = [
        (["crash"], 3, r"`faults` \(='crash'\) must be of none, delay, drop"),
        ({"tear": 0.6, "drop": 0.5}, 3, r"`faults` \(=1.1 in all\) must sum to at most 1"),
        ([], -1, r"`polls` \(=-1\) must be at least 0"),
    ]
    for faults, polls, said in bad:
        with pytest.raises(ValueError, match=said):
            Faulty(SharedMemory(), faults, polls=polls)


class Slow:
    """A faulty reader of its own memory, whose reads end when the owner says so."""

    def __init__(self, fault: str) -> None:
        self.inner = DeferredCopy()
        self.faulty = Faulty(self.inner, [fault], polls=0)
        self.memory = torch.arange(8, dtype=torch.uint8)
        self.faulty.connect(0, self.faulty.export([Region(self.memory.data_ptr(), 8, "cpu")]))

    def read(self, nbytes: int = 4) -> Any:
        return self.faulty.read(0, batch([(0, 0, 0, 4, nbytes)]))


@pytest.mark.parametrize("fault", ["drop", "late"])
def test_reads_that_were_held_back_are_over_when_the_transport_closes(fault: str) -> None:
    pair = Slow(fault)
    ticket = pair.read()
    pair.faulty.close()
    assert pair.faulty.poll(ticket) == Status(ReadState.LOST_PEER, "the transport was closed")
    pair = Slow("late")
    ticket = pair.read()
    pair.faulty.abandon(ticket)
    pair.faulty.close()
    assert pair.faulty.poll(ticket).state is ReadState.DRAINED


@pytest.mark.parametrize(
    ("fault", "nbytes", "given_up", "then", "state"),
    [
        ("tear", 4, False, "fail", ReadState.FAILED),  # by itself: it is not torn too
        ("fail", 4, True, "fail", ReadState.DRAINED),
        ("late", 4, True, "disconnect", ReadState.DRAINED),  # its peer has gone meanwhile
        ("fail", 0, False, "complete", ReadState.FAILED),  # no byte, no garbage
    ],
)
def test_a_read_that_nothing_is_left_to_do_for_writes_nothing(
    fault: str, nbytes: int, given_up: bool, then: str, state: ReadState
) -> None:
    pair = Slow(fault)
    ticket = pair.read(nbytes)
    if given_up:
        pair.faulty.abandon(ticket)
    ends: dict[str, Any] = {"fail": lambda: pair.inner.fail("cut"), "disconnect": lambda: pair.faulty.disconnect(0)}
    ends.get(then, pair.inner.complete)()
    assert pair.faulty.poll(ticket).state is state
    assert pair.memory.tolist() == list(range(8))
