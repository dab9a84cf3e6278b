"""Blobs, epochs, batches and portions, which all transports share."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from eplb_core.errors import TransportError
from eplb_core.loading.transport import ReadBatch, ReadState, Region, Status, Transport
from eplb_core.loading.transports import span_copies
from eplb_core.loading.transports.base import DONE, BaseTransport, Peer, Ticket
from eplb_core.loading.transports.batches import Spans

BATCH = ReadBatch(*(np.array([value]) for value in (0, 50, 0, 0, 50)))


class Plain(BaseTransport):
    """Reads end when the test says so."""

    def __init__(self) -> None:
        super().__init__("plain", "cpu", max_batch=100)

    def _start(self, peer: Peer, spans: Spans, stream: Any) -> Ticket:
        return Ticket(peer.rank, spans)


def started() -> tuple[Plain, Ticket]:
    transport = Plain()
    transport.connect(0, transport.export([Region(1000, 100, "cpu")]))
    return transport, transport.read(0, BATCH)


def changed(blob: bytes, **changes: object) -> bytes:
    return json.dumps({**json.loads(blob), **changes}).encode()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eplb_transport": "other"}, "is of 'other', format 1, and this is 'plain', format 1"),
        ({"format": 2}, "is of 'plain', format 2, and this is 'plain', format 1"),
        ({"nbytes": [-1]}, "cannot be read"),
        ({"nbytes": [1, 2]}, "cannot be read"),
        ({"devices": []}, "cannot be read"),
        ({"address": [2**70]}, "cannot be read"),
        ({"epoch": "soon"}, "cannot be read"),
        ({"extra": 7}, "cannot be read"),
    ],
    ids=str,
)
def test_malformed_blobs_are_refused_with_the_rank(changes: dict[str, Any], message: str) -> None:
    transport, _ = started()
    blob = transport.export([Region(1000, 100, "cpu")])
    with pytest.raises(TransportError, match=f"`blob` of rank 5 {message}") as caught:
        transport.connect(5, changed(blob, **changes))
    assert caught.value.rank == 5


def test_a_refused_batch_names_value_operation_and_rank() -> None:
    transport, _ = started()
    columns = {"dst_region": [0, 0], "dst_offset": [0, 0], "src_region": [0, 0], "src_offset": [0, 0], "nbytes": [1, 1]}
    bad = {
        "dst_region": (7, r"`batch.dst_region` \(=7\) must be one of 1 own at operation 1"),
        "src_region": (-1, r"`batch.src_region` \(=-1\) must be one of 1 of rank 0 at operation 1"),
        "dst_offset": (100, r"`batch.dst_offset` \(=100, 1 bytes\) must end inside of region 0 .* of 1 own"),
        "src_offset": (-3, r"`batch.src_offset` \(=-3, 1 bytes\) must end inside of region 0 .* of 1 of rank 0"),
        "nbytes": (-5, r"`batch.nbytes` \(=-5\) must be at least 0 at operation 1"),
    }
    for name, (value, message) in bad.items():
        batch = ReadBatch(*(np.array(column) for column in ({**columns, name: [columns[name][0], value]}).values()))
        with pytest.raises(TransportError, match=message):
            transport.read(0, batch)
    many = ReadBatch(*(np.zeros(101, dtype=np.int64) for _ in range(5)))
    with pytest.raises(TransportError, match=r"`batch` \(=101 operations\) must be at most 100; split it"):
        transport.read(0, many)
    floats = ReadBatch(*(np.zeros(1) for _ in range(5)))  # type: ignore[arg-type]
    with pytest.raises(TransportError, match=r"`batch.dst_region` \(dtype float64, 1 dimensions\) must be int64 \[n\]"):
        transport.read(0, floats)


def test_empty_operations_are_left_out() -> None:
    transport, _ = started()
    columns = [np.array(column) for column in ([0, 0, 0], [10, 20, 30], [0, 0, 0], [40, 50, 60], [0, 5, 0])]
    spans = transport.read(0, ReadBatch(*columns)).spans
    assert [array.tolist() for array in spans[2:]] == [[5], [0], [0]]
    assert spans.dst.tolist() == [transport._address[0] + 20]
    nothing = transport.read(0, ReadBatch(*(column[:1] for column in columns)))
    assert transport.poll(nothing) == DONE


def test_an_end_is_final_whatever_comes_later() -> None:
    transport, ticket = started()
    assert isinstance(transport, Transport)
    assert transport.poll(ticket).state is ReadState.PENDING
    ticket.finish(DONE)
    transport.abandon(ticket)
    ticket.finish(Status(ReadState.FAILED, "too late"))
    assert transport.poll(ticket) == DONE


@pytest.mark.parametrize("end", [DONE, Status(ReadState.FAILED, "x")])
def test_what_was_given_up_on_drains_or_is_done(end: Status) -> None:
    transport, ticket = started()
    transport.abandon(ticket)
    assert transport.poll(ticket).state is ReadState.ABANDONED
    ticket.finish(end)
    assert transport.poll(ticket).state is (ReadState.DONE if end is DONE else ReadState.DRAINED)


@pytest.mark.parametrize(("act", "reason"), [("disconnect", "rank 0 was disconnected"), ("close", "was closed")])
def test_reads_of_a_peer_that_is_let_go_are_lost(act: str, reason: str) -> None:
    transport, ticket = started()
    transport.disconnect(0) if act == "disconnect" else transport.close()
    assert transport.poll(ticket).state is ReadState.ABANDONED
    ticket.finish(Status(ReadState.FAILED, "x"))
    status = transport.poll(ticket)
    assert status.state is ReadState.LOST_PEER
    assert reason in status.reason


class Wired(Plain):
    """Counts how often a peer is reached, and fails where the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.refuses = False

    def _attach(self, peer: Peer, former: Peer | None) -> None:
        self.calls.append("attach" if former is None else "attach anew")

    def _detach(self, peer: Peer) -> None:
        self.calls.append("detach")

    def _start(self, peer: Peer, spans: Spans, stream: Any) -> Ticket:
        if self.refuses:
            raise TransportError("no connection", rank=peer.rank)
        return super()._start(peer, spans, stream)


def wired() -> tuple[Wired, bytes]:
    transport = Wired()
    blob = transport.export([Region(1000, 100, "cpu")])
    transport.connect(0, blob)
    return transport, blob


def test_connecting_again_reaches_a_peer_anew_only_if_reads_from_it_were_lost() -> None:
    """NIXL: a connection that has ended stays ended, and would end every later read."""
    transport, blob = wired()
    good = transport.read(0, BATCH)
    good.finish(DONE)
    transport.poll(good)
    transport.connect(0, blob)
    assert transport.calls == ["attach"]
    bad = transport.read(0, BATCH)
    bad.finish(Status(ReadState.LOST_PEER, "the connection was reset"))
    transport.poll(bad)
    transport.connect(0, blob)
    assert transport.calls == ["attach", "detach", "attach"]
    transport.poll(bad)  # it has ended before
    transport.connect(0, blob)
    assert transport.calls == ["attach", "detach", "attach"]


@pytest.mark.parametrize("begins", [True, False])
def test_a_read_that_ended_unseen_or_did_not_begin_counts_as_lost(begins: bool) -> None:
    transport, blob = wired()
    if begins:
        ticket = transport.read(0, BATCH)
        transport.abandon(ticket)
        ticket.finish(Status(ReadState.LOST_PEER, "the connection was reset"))
        transport.read(0, BATCH)  # looks after what was given up on
    else:
        transport.refuses = True
        with pytest.raises(TransportError, match="no connection"):
            transport.read(0, BATCH)
    transport.connect(0, blob)
    assert transport.calls == ["attach", "detach", "attach"]


def test_tickets_that_ended_are_not_kept() -> None:
    """FAULTS E16: handles of past transfers that pile up."""
    transport, first = started()
    for _ in range(1000):
        ticket = transport.read(0, BATCH)
        transport.abandon(ticket)
        ticket.finish(DONE)  # and nobody polls it again
    assert len(transport._pending) <= 2
    assert first in transport._pending


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 1000), st.integers(1, 60)), max_size=8),
    st.integers(1, 20),
    st.integers(1, 5),
)
@example([(0, 0, 1), (1, 1, 1), (2, 2, 1)], 20, 2)
def test_portions_are_the_same_bytes_within_the_limits(
    rows: list[tuple[int, int, int]], most_bytes: int, most_spans: int
) -> None:
    dst, src, nbytes = (np.array(column, dtype=np.int64) for column in (zip(*rows, strict=True) if rows else [[]] * 3))
    region = np.arange(len(nbytes))
    whole = Spans(dst, src, nbytes, region, region + 100)
    moved = []
    for portion in span_copies.portions(whole, most_bytes, most_spans):
        assert len(portion.nbytes) <= most_spans
        assert int(portion.nbytes.sum()) <= most_bytes
        moved += [
            (int(a) + i, int(b) + i, int(r), int(s))
            for a, b, n, r, s in zip(*portion, strict=True)
            for i in range(int(n))
        ]
    expected = [(a + i, b + i, r, r + 100) for r, (a, b, n) in enumerate(rows) for i in range(n)]
    assert moved == expected


@pytest.mark.slow
def test_naming_transports_imports_none_of_their_engines() -> None:
    code = (
        "import sys\nfrom eplb_core.loading.transports import CudaIpc, Faulty, Mooncake, Nixl, SharedMemory\n"
        "print(sorted({'torch', 'nixl', 'nixl_cu13', 'mooncake'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
