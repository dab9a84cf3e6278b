"""What every transport must do, shown by ranks that are killed and stopped for real."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from eplb_core.errors import TransportError
from eplb_core.loading.transport import ReadState
from eplb_core.testing.peers import (
    Bytes,
    Op,
    Process,
    TransportKit,
    World,
    batch,
    connect,
    contents,
    export,
    export_again,
    in_time,
    pattern,
    ping,
    put,
    read_all,
    regions,
    wait,
    world,
)

Check = Callable[[TransportKit], None]
_MIB = 1 << 20
_SIZES = [_MIB, 4097, 65536, 1]


def check_transport(kit: TransportKit) -> None:
    """Run every check that applies.

    Args:
        kit: How the transport is made, what memory it reaches, what it cannot do.

    Raises:
        AssertionError: With the check's name and what was expected.
    """
    for check in TRANSPORT_CHECKS:
        check(kit)


# Regions and peers


def exporting_equal_regions_again_changes_nothing(kit: TransportKit) -> None:
    """The blob stays the same and pending connections stay good; other regions give another blob."""
    with world(kit) as w:
        blob = w.peers[1].call(export, _SIZES, 1)
        _expect(w.peers[1].call(export_again) == blob, "equal regions must give an equal blob")
        _expect(w.peers[1].call(export, [64], 5) != blob, "other regions must give another blob")


def connecting_again_changes_nothing_and_a_newer_blob_replaces(kit: TransportKit) -> None:
    """Memory that a peer exported later is what reads see after `connect`."""
    with world(kit) as w:
        blob = _join(w, 1, _SIZES, 1)
        w.transport.connect(1, blob)
        _read_exactly(w, 1, _whole(_SIZES))
        newer = w.peers[1].call(export, [300, 2 * _MIB], 50)
        in_time(w.transport.connect, kit.deadline, "connect", 1, newer)
        _own(w, [2 * _MIB])
        _read_exactly(w, 1, [(0, 0, 1, 0, 2 * _MIB)], seed=50)


def random_batches_are_exact(kit: TransportKit) -> None:
    """Any offsets and lengths, several reads at once; bytes beside the destinations stay as they are."""
    with world(kit, 2) as w:
        sizes = {1: _SIZES, 2: [12345, 777777]}
        for rank in sizes:
            _join(w, rank, sizes[rank], 10 * rank)
        rng = np.random.default_rng(0)
        for count in (1, 7, 60):
            own = _own(w, [3 * _MIB, 50000, 3 * _MIB], seed=99)
            expected = [contents(tensor) for tensor in own]
            cursor = [0, 0, 0]
            tickets = []
            for rank in (1, 2, 1):
                ops = list(_random_ops(rng, count, cursor, [len(data) for data in expected], sizes[rank]))
                for dst, dst_offset, src, src_offset, nbytes in ops:
                    data = pattern(10 * rank + src, sizes[rank][src])[src_offset : src_offset + nbytes]
                    expected[dst][dst_offset : dst_offset + nbytes] = data
                tickets.append(w.transport.read(rank, batch(ops)))
            for ticket in tickets:
                _done(w, ticket)
            for i, tensor in enumerate(own):
                _equal(contents(tensor), expected[i], f"region {i} after {count} operations of each read")


def the_own_rank_is_a_peer(kit: TransportKit) -> None:
    """Reads within a rank go the same way."""
    with world(kit) as w:
        _own(w, [1000, 5000], seed=3)
        w.transport.connect(0, export_again(w.me))
        _done(w, w.transport.read(0, batch([(1, 3, 0, 7, 900)])))
        _equal(contents(w.me.tensors[1])[3:903], pattern(3, 1000)[7:907], "bytes read from the own rank")


def ranks_read_each_other_at_once(kit: TransportKit) -> None:
    """Neither waits for the other."""
    with world(kit) as w:
        half = 2 * _MIB
        _own(w, [2 * half], seed=7)
        blob = w.peers[1].call(export, [2 * half], 8)
        w.peers[1].call(connect, 0, export_again(w.me))
        in_time(w.transport.connect, kit.deadline, "connect", 1, blob)
        peer = w.peers[1]
        if isinstance(peer, Process):
            peer.begin(read_all, 0, [(0, half, 0, 0, half)], 20)
        for _ in range(20):
            _done(w, w.transport.read(1, batch([(0, half, 0, 0, half)])))
        theirs = peer.finish() if isinstance(peer, Process) else peer.call(read_all, 0, [(0, half, 0, 0, half)], 1)
        _equal(contents(w.me.tensors[0])[half:], pattern(8, 2 * half)[:half], "bytes that rank 0 read")
        _equal(np.frombuffer(theirs[0], np.uint8)[half:], pattern(7, 2 * half)[:half], "bytes that rank 1 read")


def many_regions_are_told_apart(kit: TransportKit) -> None:
    """Hundreds of small ones, as an engine with many layers has."""
    with world(kit) as w:
        sizes = [64 + i for i in range(300)]
        _join(w, 1, sizes, 1000)
        own = _own(w, [64 * len(sizes)])
        _done(w, w.transport.read(1, batch([(0, 64 * i, i, i % 3, 60) for i in range(len(sizes))])))
        got = contents(own[0]).reshape(-1, 64)
        for i, size in enumerate(sizes):
            _equal(got[i, :60], pattern(1000 + i, size)[i % 3 : i % 3 + 60], f"60 bytes of region {i}")


# Refusals, before a byte moves


def spans_outside_of_a_region_are_refused(kit: TransportKit) -> None:
    """On either side, also where they would end in the next region; the destination keeps its bytes."""
    with _joined(kit, [1000, 1000], seed=5) as (w, own):
        top = 2**62
        bad: list[Op] = [(0, 0, 0, 1, 1000), (0, 1, 0, 0, 1000), (0, 0, 0, -1, 10), (0, -1, 0, 0, 10), (0, 0, 0, 0, -1)]
        bad += [(0, 0, 2, 0, 1), (2, 0, 0, 0, 1), (-1, 0, 0, 0, 1), (0, 0, -1, 0, 1)]
        bad += [(0, top, 0, 0, 1), (0, 0, 0, top, top), (0, 1001, 0, 0, 0)]
        for op in bad:
            _refused(f"operation {op}", w.transport.read, 1, batch([(1, 0, 1, 0, 1000), op]))
        for i, tensor in enumerate(own):
            _equal(contents(tensor), pattern(5 + i, 1000), f"region {i} after refused reads")
        _read_exactly(w, 1, _whole([1000, 1000]))


def unknown_ranks_are_refused(kit: TransportKit) -> None:
    """Never connected, or disconnected; to disconnect an unknown one is nothing."""
    with _joined(kit, [100]) as (w, _):
        _refused("a read from a rank that was never connected", w.transport.read, 77, batch([(0, 0, 0, 0, 1)]))
        w.transport.disconnect(77)
        w.transport.disconnect(1)
        w.transport.disconnect(1)
        _refused("a read from a disconnected rank", w.transport.read, 1, batch([(0, 0, 0, 0, 1)]))


def malformed_blobs_are_refused(kit: TransportKit) -> None:
    """Empty, cut off or foreign blobs; the former connection stays."""
    with world(kit) as w:
        blob = _join(w, 1, [100], 1)
        for bad in (b"", b"\x00\xff" * 50, b"{}", b"[1]", blob[: len(blob) // 2], b"eplb" + blob):
            _refused(f"blob {bad[:20]!r}", w.transport.connect, 1, bad)
        _read_exactly(w, 1, _whole([100]))


def batches_above_the_limit_are_refused(kit: TransportKit) -> None:
    """`caps.max_batch` is what one read takes, and it does take that."""
    with _joined(kit, [4]) as (w, own):
        limit = w.transport.caps.max_batch
        if limit < _MIB:
            _refused(f"{limit + 1} operations", w.transport.read, 1, batch([(0, 0, 0, 0, 0)] * (limit + 1)))
        full = min(limit, 1024)
        _done(w, w.transport.read(1, batch([(0, i % 4, 0, i % 4, 1) for i in range(full)])))
        for i in range(min(full, 4)):
            _expect(contents(own[0])[i] == pattern(1, 4)[i], f"byte {i} must be there after {full} operations")


def arrays_of_different_lengths_are_refused(kit: TransportKit) -> None:
    """A batch is five arrays of one length."""
    with _joined(kit, [4]) as (w, _):
        uneven = batch([(0, 0, 0, 0, 1)])._replace(nbytes=np.array([1, 1]))
        _refused("a batch of lengths 1 and 2", w.transport.read, 1, uneven)


def empty_reads_are_done(kit: TransportKit) -> None:
    """No operations, and operations of no bytes, at the end of a region too."""
    with _joined(kit, [10, 0], [10], seed=4) as (w, own):
        _done(w, w.transport.read(1, batch([])))
        _done(w, w.transport.read(1, batch([(0, 10, 0, 10, 0), (0, 0, 1, 0, 0)])))
        _equal(contents(own[0]), pattern(4, 10), "bytes after empty reads")


# Ends


def ends_repeat(kit: TransportKit) -> None:
    """Also after `abandon`, `disconnect` and `close`."""
    with _joined(kit, [1000]) as (w, _):
        ticket = w.transport.read(1, batch(_whole([1000])))
        _done(w, ticket)
        for step in (partial(w.transport.abandon, ticket), partial(w.transport.disconnect, 1), w.transport.close):
            step()
            state = w.transport.poll(ticket).state
            _expect(state is ReadState.DONE, f"a read that is DONE must stay so, not {state.name}")


def closing_twice_is_nothing(kit: TransportKit) -> None:
    """And whatever comes later is refused."""
    with world(kit) as w:
        blob = _join(w, 1, [10], 1)
        _own(w, [10])
        w.transport.close()
        w.transport.close()
        w.transport.disconnect(1)
        _refused("`read` after `close`", w.transport.read, 1, batch([(0, 0, 0, 0, 1)]))
        _refused("`connect` after `close`", w.transport.connect, 1, blob)
        _refused("`export` after `close`", w.transport.export, regions(w.me))


def any_thread_may_call(kit: TransportKit) -> None:
    """One at a time, but not always the same one."""
    with world(kit) as w:
        blob = w.peers[1].call(export, [5000], 1)
        own = in_time(_own, kit.deadline, "export", w, [5000])
        in_time(w.transport.connect, kit.deadline, "connect", 1, blob)
        ticket = in_time(w.transport.read, kit.deadline, "read", 1, batch(_whole([5000])))
        status = in_time(wait, kit.deadline + 5, "poll", w.transport, ticket, kit.deadline)
        _expect(status.state is ReadState.DONE, f"a read must be DONE, not {status}")
        _equal(contents(own[0]), pattern(1, 5000), "bytes read over several threads")


def abandoned_reads_end_and_leave_the_destination_alone(kit: TransportKit) -> None:
    """Given up on at once, again and again, the peer alive: once one has ended, its destination stays as it is."""
    with _joined(kit, [kit.big], [kit.big, kit.big]) as (w, own):
        for _ in range(5):
            ticket = w.transport.read(1, batch(_pieces(kit.big)))
            w.transport.abandon(ticket)
            status = wait(w.transport, ticket, kit.deadline)
            _expect(status.state in (ReadState.DONE, ReadState.DRAINED), f"must drain, not {status}")
            _stays(w, own[0], lambda: _done(w, w.transport.read(1, batch(_pieces(kit.big, dst=1)))))
        _equal(contents(own[1]), pattern(1, kit.big), "bytes of reads beside abandoned ones")


# Peers that die or stop


def a_peer_that_died_before_a_read_ends_it(kit: TransportKit) -> None:
    """As LOST_PEER or FAILED, or refused; or DONE, if every byte is there."""
    with _joined(kit, [kit.big]) as (w, own):
        _done(w, w.transport.read(1, batch([(0, 0, 0, 0, 100)])))
        _process(w, 1).kill()
        _ends_though_dead(w, own[0])
        in_time(w.transport.disconnect, kit.deadline, "disconnect", 1)


def a_peer_that_dies_during_a_read_ends_it(kit: TransportKit) -> None:
    """And the transport goes on with the others."""
    with _joined(kit, [kit.big], [kit.big, kit.big], peers=2) as (w, own):
        tickets = [in_time(w.transport.read, kit.deadline, "read", 1, batch(_pieces(kit.big))) for _ in range(4)]
        _process(w, 1).kill()
        for ticket in tickets:
            _ended(w, ticket, own[0])
        _done(w, w.transport.read(2, batch(_pieces(kit.big, dst=1))))
        _equal(contents(own[1]), pattern(2, kit.big), "bytes of a live peer after another died")
        _ends_though_dead(w, own[0])


def a_stopped_peer_delays_nobody_else(kit: TransportKit) -> None:
    """`read` returns at once, and reads from others go on."""
    with _joined(kit, [kit.big], [kit.big, kit.big], peers=2) as (w, own):
        for rank in (1, 2):
            _done(w, w.transport.read(rank, batch([(0, 0, 0, 0, 100)])))
        _process(w, 1).stop()
        ticket = in_time(w.transport.read, kit.deadline, "read", 1, batch(_pieces(kit.big)))
        _done(w, w.transport.read(2, batch(_pieces(kit.big, dst=1))))
        _equal(contents(own[1]), pattern(2, kit.big), "bytes of a live peer while another is stopped")
        _process(w, 1).resume()
        _done(w, ticket)
        _equal(contents(own[0]), pattern(1, kit.big), "bytes of a peer that was stopped for a while")


def reads_of_a_stopped_peer_are_as_the_caps_say(kit: TransportKit) -> None:
    """One-sided ones finish; the others are given up on and nothing lands in a destination that was given back."""
    with _stalled(kit) as (w, own, ticket):
        caps = w.transport.caps
        status = wait(w.transport, ticket, 0.3 if caps.owner_must_progress else kit.deadline)
        if not caps.owner_must_progress:
            _expect(status.state is ReadState.DONE, f"the owner need not run, yet a read of a stopped one is {status}")
            return
        in_time(w.transport.abandon, kit.deadline, "abandon", ticket)
        status = wait(w.transport, ticket, 2.0)
        if caps.stops_late_writes:
            _expect(status.state.is_end, f"late writes are said to be stopped, but an abandoned read is {status}")
        if status.state.is_end:
            _stays(w, own[0], _process(w, 1).resume)
        else:
            _expect(status.state is ReadState.ABANDONED, f"an abandoned read must be ABANDONED, not {status}")
            _process(w, 1).resume()
            status = wait(w.transport, ticket, kit.deadline)
        if status.state.is_end:  # pragma: no branch  a transport that never drains
            _stays(w, own[0], lambda: _read_into(w, 1, kit.big))
            _equal(contents(own[1]), pattern(1, kit.big), "bytes of a read after the peer came back")


def disconnecting_a_stopped_peer_gives_its_reads_up(kit: TransportKit) -> None:
    """They end as LOST_PEER or stay ABANDONED; the peer can be connected again."""
    with _stalled(kit) as (w, own, ticket):
        in_time(w.transport.disconnect, kit.deadline, "disconnect", 1)
        status = wait(w.transport, ticket, 0.5)
        allowed = (ReadState.LOST_PEER, ReadState.ABANDONED, ReadState.DRAINED, ReadState.DONE)
        _expect(status.state in allowed, f"a read from a disconnected peer must be lost or given up, not {status}")
        if status.state.is_end:
            _stays(w, own[0], _process(w, 1).resume)
        else:
            _process(w, 1).resume()
        in_time(w.transport.connect, kit.deadline, "connect", 1, w.peers[1].call(export_again))
        _read_into(w, 1, kit.big)
        _equal(contents(own[1]), pattern(1, kit.big), "bytes of a read from a peer that was connected again")
        if wait(w.transport, ticket, 1.0).state.is_end:  # pragma: no branch  a transport that never drains
            _stays(w, own[0], lambda: _read_into(w, 1, kit.big))


def closing_does_not_wait_for_a_stopped_peer(kit: TransportKit) -> None:
    """Reads that are under way are given up on, and their tickets still answer."""
    with _stalled(kit) as (w, own, ticket):
        in_time(w.transport.close, kit.deadline, "close")
        status = wait(w.transport, ticket, 0.5)
        _expect(status.state is not ReadState.PENDING, "a read must not be PENDING after `close`")
        if status.state.is_end:
            _stays(w, own[0], _process(w, 1).resume)
        else:  # so that nothing is left at work: an engine that waits may take a whole core for it
            _process(w, 1).resume()
            wait(w.transport, ticket, kit.deadline)


def a_reader_that_dies_leaves_its_owner_to_others(kit: TransportKit) -> None:
    """It said no farewell, and was in the middle of a read."""
    with world(kit, 2) as w:
        _own(w, [5000])
        _join(w, 2, [_MIB], 20)
        reader = _process(w, 1)
        reader.call(export, [_MIB], 10)
        reader.call(connect, 2, w.peers[2].call(export_again))
        reader.begin(read_all, 2, [(0, 0, 0, 0, _MIB)], 100_000)
        _read_exactly(w, 2, [(0, 0, 0, 0, 5000)], seed=20)
        reader.kill()
        for _ in range(5):
            _read_exactly(w, 2, [(0, 0, 0, 0, 5000)], seed=20)


def a_peer_that_was_replaced_is_read_anew(kit: TransportKit) -> None:
    """Another process under the same rank, with other bytes."""
    with world(kit) as w:
        _join(w, 1, [5000], 1)
        _own(w, [5000])
        _read_exactly(w, 1, _whole([5000]))
        _process(w, 1).kill()
        w.peers[1].end()
        w.start(1).wait_ready()
        _join(w, 1, [5000], 30)
        _read_exactly(w, 1, _whole([5000]), seed=30)


# Helpers


def _expect(good: bool, otherwise: str) -> None:
    if not good:
        raise AssertionError(otherwise)


def _equal(got: Bytes, expected: Bytes, what: str) -> None:
    if not np.array_equal(got, expected):
        wrong = np.flatnonzero(got != expected)
        raise AssertionError(f"{what}: {len(wrong)} of {len(expected)} are wrong, the first at {wrong[0]}")


def _refused(what: str, function: Callable[..., Any], *args: Any) -> None:
    try:
        function(*args)
    except TransportError:
        return
    raise AssertionError(f"{what} must raise TransportError")


def _own(w: World, sizes: Sequence[int], seed: int | None = None) -> list[Any]:
    export(w.me, sizes, seed)
    return w.me.tensors


def _join(w: World, rank: int, sizes: Sequence[int], seed: int) -> bytes:
    """Let a peer export memory with bytes of `seed`, and connect to it. Needs own regions first, if there are none."""
    if not w.me.tensors:
        _own(w, [1])
    blob = w.peers[rank].call(export, sizes, seed)
    in_time(w.transport.connect, w.kit.deadline, "connect", rank, blob)
    return blob


@contextmanager
def _joined(
    kit: TransportKit, theirs: Sequence[int], own: Sequence[int] = (), *, seed: int | None = None, peers: int = 1
) -> Iterator[tuple[World, list[Any]]]:
    """Connect to peers whose memory of these sizes holds bytes of their rank as seed; own memory, as large by default.

    The own regions are exported twice, before and after `connect`, as an engine does that grows.
    """
    with world(kit, peers) as w:
        for rank in range(1, peers + 1):
            _join(w, rank, theirs, rank)
        yield w, _own(w, own or theirs, seed)


def _whole(sizes: Sequence[int]) -> list[Op]:
    return [(i, 0, i, 0, size) for i, size in enumerate(sizes)]


def _pieces(nbytes: int, dst: int = 0) -> list[Op]:
    piece = max(nbytes // 32, 1)
    return [(dst, at, 0, at, min(piece, nbytes - at)) for at in range(0, nbytes, piece)]


def _random_ops(
    rng: np.random.Generator, count: int, cursor: list[int], own: Sequence[int], theirs: Sequence[int]
) -> Iterator[Op]:
    """Destinations one behind the other with gaps, so that none overlap."""
    for _ in range(count):
        dst, src = int(rng.integers(len(own))), int(rng.integers(len(theirs)))
        offset = cursor[dst] + int(rng.integers(3))
        nbytes = min(int(theirs[src] ** rng.random()), own[dst] - offset)
        if nbytes <= 0:
            continue
        yield dst, offset, src, int(rng.integers(theirs[src] - nbytes + 1)), nbytes
        cursor[dst] = offset + nbytes


def _done(w: World, ticket: Any) -> None:
    status = wait(w.transport, ticket, w.kit.deadline)
    _expect(status.state is ReadState.DONE, f"a read must be DONE within {w.kit.deadline:g} s, not {status}")


def _read_exactly(w: World, rank: int, ops: Sequence[Op], seed: int = 1) -> None:
    """Read into fresh memory of the lengths of `ops`, and compare."""
    own = _own(w, [offset + nbytes for _, offset, _, _, nbytes in ops])
    _done(w, w.transport.read(rank, batch(ops)))
    for i, (dst, offset, src, src_offset, nbytes) in enumerate(ops):
        data = pattern(seed + src, src_offset + nbytes)[src_offset:]
        _equal(contents(own[dst])[offset : offset + nbytes], data, f"operation {i}")


def _read_into(w: World, region: int, nbytes: int) -> None:
    _done(w, w.transport.read(1, batch(_pieces(nbytes, dst=region))))


def _process(w: World, rank: int) -> Process:
    peer = w.peers[rank]
    if not isinstance(peer, Process):
        raise AssertionError("peers of this check must be processes")
    return peer


@contextmanager
def _stalled(kit: TransportKit) -> Iterator[tuple[World, list[Any], Any]]:
    """Begin a big read of region 0 from a peer that was stopped just before; own regions 0 and 1 are as big."""
    with _joined(kit, [kit.big], [kit.big, kit.big]) as (w, own):
        _done(w, w.transport.read(1, batch([(0, 0, 0, 0, 100)])))
        w.peers[1].call(ping)
        _process(w, 1).stop()
        yield w, own, in_time(w.transport.read, kit.deadline, "read", 1, batch(_pieces(kit.big)))


def _stays(w: World, tensor: Any, meanwhile: Callable[[], object]) -> None:
    """Fill a destination that was given back, let things happen, and compare."""
    mark = pattern(12345, tensor.numel())
    put(tensor, mark)
    meanwhile()
    time.sleep(0.2)  # what is late comes now
    _equal(contents(tensor), mark, "late bytes in a destination that was given back")


def _ended(w: World, ticket: Any, tensor: Any) -> None:
    status = wait(w.transport, ticket, w.kit.deadline)
    allowed = (ReadState.DONE, ReadState.FAILED, ReadState.LOST_PEER)
    _expect(status.state in allowed, f"a read from a dead peer must end within {w.kit.deadline:g} s, not stay {status}")
    if status.state is ReadState.DONE:
        _equal(contents(tensor), pattern(1, w.kit.big), "bytes of a read that is DONE though its peer died")
    else:
        _expect("1" in status.reason, f"the reason must name the rank, not be {status.reason!r}")


def _ends_though_dead(w: World, tensor: Any) -> None:
    put(tensor, pattern(54321, tensor.numel()))
    try:
        ticket = in_time(w.transport.read, w.kit.deadline, "read", 1, batch(_pieces(w.kit.big)))
    except TransportError:
        return
    _ended(w, ticket, tensor)


def _applies(check: Check, needs: str) -> Check:
    """A check that is left out where the kit says no."""

    def maybe(kit: TransportKit) -> None:
        if all(getattr(kit, need) for need in needs.split()):
            check(kit)

    maybe.__name__, maybe.__qualname__, maybe.__doc__ = check.__name__, check.__qualname__, check.__doc__
    return maybe


TRANSPORT_CHECKS: tuple[Check, ...] = (
    exporting_equal_regions_again_changes_nothing,
    connecting_again_changes_nothing_and_a_newer_blob_replaces,
    random_batches_are_exact,
    the_own_rank_is_a_peer,
    ranks_read_each_other_at_once,
    many_regions_are_told_apart,
    spans_outside_of_a_region_are_refused,
    unknown_ranks_are_refused,
    malformed_blobs_are_refused,
    batches_above_the_limit_are_refused,
    arrays_of_different_lengths_are_refused,
    empty_reads_are_done,
    ends_repeat,
    closing_twice_is_nothing,
    any_thread_may_call,
    abandoned_reads_end_and_leave_the_destination_alone,
    _applies(a_peer_that_died_before_a_read_ends_it, "processes"),
    _applies(a_peer_that_dies_during_a_read_ends_it, "processes"),
    _applies(a_stopped_peer_delays_nobody_else, "processes"),
    _applies(reads_of_a_stopped_peer_are_as_the_caps_say, "processes"),
    _applies(disconnecting_a_stopped_peer_gives_its_reads_up, "processes"),
    _applies(closing_does_not_wait_for_a_stopped_peer, "processes"),
    _applies(a_reader_that_dies_leaves_its_owner_to_others, "processes"),
    _applies(a_peer_that_was_replaced_is_read_anew, "processes rejoins"),
)
"""All checks, by name; each takes a `TransportKit`."""
