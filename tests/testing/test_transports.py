"""The checks of transports notice transports that do not keep their word."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest
import torch

from eplb_core.errors import TransportError
from eplb_core.loading.transport import ReadBatch, ReadState, Region, Status, Transport
from eplb_core.loading.transports import DeferredCopy, Faulty, LocalCopy, SharedMemory
from eplb_core.testing import TRANSPORT_CHECKS, TransportKit, check_transport, peers, transports
from tests.loading.transports import kits


class Careless(SharedMemory):
    """Takes spans as they come."""

    def read(self, rank: int, batch: ReadBatch, *, stream: Any = None) -> Any:
        if len(batch.nbytes) and batch.nbytes.min() > 0:
            size = self._nbytes[np.clip(batch.dst_region, 0, len(self._nbytes) - 1)]
            batch = batch._replace(
                nbytes=np.clip(batch.nbytes, 1, size),
                dst_region=np.zeros_like(batch.dst_region),
                dst_offset=np.zeros_like(batch.dst_offset),
                src_region=np.zeros_like(batch.dst_region),
                src_offset=np.zeros_like(batch.dst_offset),
            )
        return super().read(rank, batch, stream=stream)


class Forgetful(SharedMemory):
    """Answers once that a read is done."""

    def poll(self, ticket: Any) -> Status:
        status = super().poll(ticket)
        if ticket.given_up:
            return Status(ReadState.PENDING)
        ticket.given_up = status.state.is_end
        return status


class Eager(SharedMemory):
    """Says that a read is done before it has begun."""

    def read(self, rank: int, batch: ReadBatch, *, stream: Any = None) -> Any:
        return rank

    def poll(self, ticket: Any) -> Status:
        return Status(ReadState.DONE)


class Late(SharedMemory):
    """Frees the destination of an abandoned read, and writes there with the next one."""

    left: ReadBatch | None = None

    def read(self, rank: int, batch: ReadBatch, *, stream: Any = None) -> Any:
        if self.left is not None:
            address = int(self._address[int(self.left.dst_region[0])])
            ctypes.memset(address, 7, 1)
        self.left = batch
        return super().read(rank, batch, stream=stream)


class Restless(SharedMemory):
    """Another blob every time."""

    def export(self, regions: list[Region]) -> bytes:
        self._blob = b""
        return super().export(regions)


class Shy(SharedMemory):
    """Says that a closed transport is none of its business."""

    def close(self) -> None:
        """Nothing."""


def make(kind: str) -> Any:
    def build(rank: int, size: int, folder: str) -> Transport:
        if kind == "tear":
            return Faulty(SharedMemory(), {"tear": 1.0})
        kinds = (Careless, Forgetful, Eager, Late, Restless, Shy)
        return {one.__name__.lower(): one for one in kinds}[kind]()

    return build


@pytest.mark.slow
def test_an_honest_transport_passes_all_checks_within_one_process() -> None:
    check_transport(TransportKit(kits.shared_memory, processes=False, big=1 << 20))


@pytest.mark.parametrize(
    ("kind", "check", "message"),
    [
        ("tear", transports.random_batches_are_exact, "are wrong, the first at"),
        ("careless", transports.spans_outside_of_a_region_are_refused, "must raise TransportError"),
        ("forgetful", transports.ends_repeat, "a read that is DONE must stay so, not PENDING"),
        ("eager", transports.random_batches_are_exact, "are wrong, the first at"),
        ("late", transports.abandoned_reads_end_and_leave_the_destination_alone, "late bytes in a destination"),
        ("restless", transports.exporting_equal_regions_again_changes_nothing, "equal regions must give an equal blob"),
        ("shy", transports.closing_twice_is_nothing, "`connect` after `close` must raise TransportError"),
    ],
)
def test_a_transport_that_does_not_keep_its_word_fails(kind: str, check: transports.Check, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check(TransportKit(make(kind), processes=False, big=8 << 20, deadline=2.0))


def test_checks_have_names_and_say_what_they_check() -> None:
    names = [check.__name__ for check in TRANSPORT_CHECKS]
    assert len(set(names)) == len(names) == 24
    assert all(check.__doc__ for check in TRANSPORT_CHECKS)


def test_a_transport_without_a_limit_worth_trying_is_asked_for_a_full_batch_alone() -> None:
    transports.batches_above_the_limit_are_refused(TransportKit(kits.local, processes=False))


class Refuses(LocalCopy):
    """Begins no read of a peer that it has."""

    def _start(self, peer: Any, spans: Any, stream: Any) -> Any:
        raise TransportError("the peer is dead")


def refuses(rank: int, size: int, folder: str) -> Transport:
    return Refuses()


def test_a_read_of_a_dead_peer_may_be_refused_at_once_and_one_that_ended_badly_is_told() -> None:
    kit = TransportKit(refuses, processes=False, big=1 << 20)
    with peers.world(kit) as w:
        transports._join(w, 1, [kit.big], 1)
        transports._ends_though_dead(w, transports._own(w, [kit.big])[0])
        with pytest.raises(AssertionError, match="peers of this check must be processes"):
            transports._process(w, 1)
    reader = DeferredCopy()
    memory = torch.zeros(8, dtype=torch.uint8)
    reader.connect(0, reader.export([Region(memory.data_ptr(), 8, "cpu")]))
    state = peers.State(TransportKit(kits.local, deadline=0.01), reader, [])
    with pytest.raises(AssertionError, match=r"a read from rank 0 ended as .*PENDING"):
        peers.read_times(state, 0, [(0, 0, 0, 4, 4)], 1)


def test_calls_on_another_thread_bring_back_what_was_raised_or_say_that_they_did_not_come_back() -> None:
    def fail() -> None:
        raise ZeroDivisionError("there")

    with pytest.raises(ZeroDivisionError, match="there"):
        peers.in_time(fail, 20.0, "fail")
    may = threading.Event()
    with pytest.raises(AssertionError, match=r"`wait` did not come back within 0\.01 s"):
        peers.in_time(may.wait, 0.01, "wait")
    may.set()


def breaks(state: peers.State) -> None:
    raise ZeroDivisionError("there")


@pytest.mark.slow
def test_a_process_that_fails_stops_or_dies_is_told_with_its_rank() -> None:
    with peers.world(TransportKit(kits.shared_memory), 2) as w:
        with pytest.raises(AssertionError, match=r"rank 1, breaks: ZeroDivisionError\('there'\)"):
            w.peers[1].call(breaks)
        process = transports._process(w, 2)
        process.stop()
        process.kit = TransportKit(kits.shared_memory, deadline=0.01)
        with pytest.raises(AssertionError, match=r"rank 2 did not ping within 0\.01 s"):
            process.call(peers.ping)
        process.kit = w.kit
        process.kill()
        with pytest.raises(AssertionError, match="rank 2 died during answer"):
            process.finish()
        with pytest.raises(AssertionError, match="rank 2 died"):
            process.stop()
