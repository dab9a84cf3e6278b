"""The checks of transports notice transports that do not keep their word."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from eplb_core.loading.transport import ReadBatch, ReadState, Region, Status, Transport
from eplb_core.loading.transports import Faulty, SharedMemory
from eplb_core.testing import TRANSPORT_CHECKS, TransportKit, check_transport, transports


def honest(rank: int, size: int, folder: str) -> Transport:
    return SharedMemory()


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
    check_transport(TransportKit(honest, processes=False, big=1 << 20))


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
