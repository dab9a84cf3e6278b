"""Reads inside of one process, at once or when a test says so."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from eplb_core.errors import TransportError
from eplb_core.loading.transport import ReadState, Region, Transport
from eplb_core.loading.transports import DeferredCopy, LocalCopy
from eplb_core.testing.peers import batch


def pair(kind: type[LocalCopy]) -> tuple[LocalCopy, LocalCopy, torch.Tensor, torch.Tensor]:
    source, target = torch.arange(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    owner, reader = kind(), kind()
    reader.export([Region(target.data_ptr(), 8, "cpu")])
    reader.connect(0, owner.export([Region(source.data_ptr(), 8, "cpu")]))
    return owner, reader, source, target


# The owner has a name in each test: a transport that nobody holds is gone for its peers.


def read(reader: LocalCopy, dst: int, src: int, nbytes: int) -> Any:
    return reader.read(0, batch([(0, dst, 0, src, nbytes)]))


def test_a_read_is_done_when_it_returns() -> None:
    _owner, reader, _, target = pair(LocalCopy)
    assert isinstance(reader, Transport)
    ticket = read(reader, 1, 4, 3)
    assert reader.poll(ticket).state is ReadState.DONE
    assert target.tolist() == [0, 4, 5, 6, 0, 0, 0, 0]


def test_an_owner_that_closed_is_lost() -> None:
    owner, reader, _, target = pair(LocalCopy)
    owner.close()
    status = reader.poll(read(reader, 0, 0, 8))
    assert (status.state, status.reason) == (ReadState.LOST_PEER, "rank 0 has closed its transport")
    assert target.tolist() == [0] * 8


def test_ranks_of_other_processes_are_refused() -> None:
    owner, reader, source, _ = pair(LocalCopy)
    record = json.loads(owner.export([Region(source.data_ptr(), 8, "cpu")]))
    record["extra"]["process"] = "another"
    with pytest.raises(TransportError, match="rank 3 must be in this process; use SharedMemory"):
        reader.connect(3, json.dumps(record).encode())
    record = json.loads(LocalCopy().export([]))  # gone at once
    with pytest.raises(TransportError, match="the transport of rank 3 is gone"):
        reader.connect(3, json.dumps(record).encode())


def test_deferred_reads_copy_when_they_are_told_to_and_late_ones_too() -> None:
    _owner, reader, source, target = pair(DeferredCopy)
    assert isinstance(reader, DeferredCopy)
    first, second = read(reader, 0, 0, 4), read(reader, 4, 4, 4)
    assert (reader.waiting, target.tolist()) == (2, [0] * 8)
    source += 1
    assert reader.complete(1) == 1
    assert reader.poll(first).state is ReadState.DONE
    assert target.tolist() == [1, 2, 3, 4, 0, 0, 0, 0]
    reader.abandon(second)
    assert reader.poll(second).state is ReadState.ABANDONED
    assert reader.complete() == 1
    assert reader.poll(second).state is ReadState.DONE  # an end: nothing more is written
    assert target.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(("lost", "state"), [(False, ReadState.FAILED), (True, ReadState.LOST_PEER)])
def test_deferred_reads_can_fail(lost: bool, state: ReadState) -> None:
    _owner, reader, _, target = pair(DeferredCopy)
    assert isinstance(reader, DeferredCopy)
    ticket = read(reader, 0, 0, 8)
    assert reader.fail("as told", lost=lost) == 1
    assert reader.poll(ticket).state is state
    assert target.tolist() == [0] * 8
