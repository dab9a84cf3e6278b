"""Reads through a gloo group."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eplb_core._arrays import IntArray
from eplb_core.errors import TransportError
from eplb_core.loading.transport import ReadBatch, ReadState, Region, Status
from eplb_core.loading.transports import TorchDistributed
from eplb_core.loading.transports.base import Peer
from eplb_core.loading.transports.batches import Spans
from eplb_core.loading.transports.two_sided import torch_distributed
from eplb_core.loading.transports.two_sided.carriers import HEAD, MOST_SPANS, Buffers, Payload
from eplb_core.loading.transports.two_sided.exchange import Courier, Fetch, Memory, Served
from eplb_core.testing import TransportKit, transports
from eplb_core.testing.peers import State, batch, export, wait, world
from tests.loading.transports import kits

GLOO = TransportKit(kits.gloo, rejoins=False)


def whole(nbytes: int) -> ReadBatch:
    return batch([(0, 0, 0, 0, nbytes)])


@pytest.mark.slow
def test_memory_that_was_exported_anew_fails_reads_by_old_blobs() -> None:
    """I8: the owner looks at the epoch, before a byte moves."""
    with world(GLOO) as w:
        transports._join(w, 1, [1000], 1)
        w.peers[1].call(export, [1000], 2)
        status = wait(w.transport, w.transport.read(1, whole(1)), GLOO.deadline)
        assert status == Status(ReadState.FAILED, "rank 1 exported other memory meanwhile; exchange blobs again")


@pytest.mark.slow
def test_a_peer_that_closed_is_lost() -> None:
    with world(GLOO) as w:
        transports._join(w, 1, [1000], 1)
        w.peers[1].call(close)
        for _ in range(1000):  # until its farewell has come
            status = wait(w.transport, w.transport.read(1, whole(1)), GLOO.deadline)
            assert "closed" in status.reason
            if status.state is not ReadState.FAILED:
                break
        assert status.state is ReadState.LOST_PEER


def close(state: State) -> None:
    state.transport.close()


class HalfAnswer:
    """What gloo does with bytes that had come in part when their sender died: it never says so."""

    def __init__(self) -> None:
        self.dead = ""
        self.never = threading.Event()

    def ask(self, request: IntArray) -> None:
        """Taken."""

    def hear(self, room: torch.Tensor, nbytes: int) -> int:
        self.never.wait()
        raise RuntimeError("the test is over")


def test_reads_end_when_their_peer_is_dead_though_its_bytes_stay_half_there() -> None:
    with world(GLOO) as w:
        transports._join(w, 1, [1000], 1)
        own = transports._own(w, [1000])[0]
        session = w.transport._session  # type: ignore[attr-defined]
        line = session.couriers[1].line = HalfAnswer()
        ticket = w.transport.read(1, whole(1000))
        assert w.transport.poll(ticket).state is ReadState.PENDING
        line.dead = "Connection closed by peer"
        lost = Status(ReadState.LOST_PEER, "rank 1 is gone: Connection closed by peer")
        assert w.transport.poll(ticket) == lost
        assert w.transport.poll(w.transport.read(1, whole(1000))) == lost
        before = own.clone()
        line.never.set()
        session.couriers[1].jobs.put(None)
        session.couriers[1].thread.join(GLOO.deadline)
        assert own.equal(before)


class DeadLine:
    """To a peer that has left, with an answer still on its way."""

    dead = "it has left"

    def ask(self, request: IntArray) -> None:
        """Into the void."""

    def hear(self, room: torch.Tensor, nbytes: int) -> int:
        return 0


def test_requests_for_what_was_not_exported_are_refused_by_the_owner() -> None:
    """A peer may hold an older blob, or be broken: the owner looks."""
    served = Served(7, Buffers(None, False))
    room = served.buffers.new()
    source = np.arange(8, dtype=np.uint8)
    served.memory = Memory(1, np.array([source.ctypes.data]), np.array([8]), np.zeros(1, dtype=np.bool_))

    def ask(*spans: tuple[int, int, int], total: int | None = None, count: int | None = None) -> int:
        request = np.zeros(5 + 3 * MOST_SPANS, dtype=np.int64)
        request[:5] = 1, 7, 1, len(spans) if count is None else count, sum(n for *_, n in spans)
        request[4] = request[4] if total is None else total
        request[5:].reshape(3, -1)[:, : len(spans)] = np.array(spans, dtype=np.int64).reshape(-1, 3).T
        return served.answer(request, room)[0]

    assert ask((0, 2, 3), (0, 0, 1)) == 0
    assert room[HEAD : HEAD + 4].tolist() == [2, 3, 4, 0]
    outside = 3
    for total in (served.buffers.chunk + 1, -1, 2):
        assert ask((0, 0, 1), total=total) == outside
    assert ask((0, 0, 1), count=MOST_SPANS + 1) == outside
    for span in ((1, 0, 1), (-1, 0, 1), (0, 6, 3)):
        assert ask(span) == outside
    with kits.unreachable(4096) as address:
        served.memory = Memory(1, np.array([address]), np.array([8]), np.zeros(1, dtype=np.bool_))
        assert ask((0, 0, 8)) == 4  # cannot be read


def alone(folder: Path) -> TorchDistributed:
    """The only rank of three groups."""
    group, up, down = (kits.gloo_group(0, 1, str(folder), name) for name in ("a", "b", "c"))
    return TorchDistributed(group, payload=(up, down))


def test_a_peer_that_cannot_be_met_is_not_connected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(payload: Payload) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr(Payload, "begin_thread", fail)
    transport = alone(tmp_path)
    with pytest.raises(TransportError, match="rank 0 cannot be reached: rank 0 is gone: no such device"):
        transport.connect(0, transport.export([]))
    transport.close()


def test_a_peer_that_does_not_answer_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may = threading.Event()
    monkeypatch.setattr(Payload, "begin_thread", lambda payload: may.wait(60))
    monkeypatch.setattr(torch_distributed, "_MEET_S", 0.01)
    transport = alone(tmp_path)
    with pytest.raises(TransportError, match=r"rank 0 did not answer within 0\.01 s"):
        transport.connect(0, transport.export([]))
    may.set()
    transport.close()


def test_a_read_from_a_peer_that_leaves_does_not_end_while_bytes_go_to_its_destination() -> None:
    """Else staging would be used again under the courier's hand."""
    target = torch.zeros(4, dtype=torch.uint8)
    at = np.array([target.data_ptr()])
    zero, four = np.zeros(1, dtype=np.int64), np.array([4])
    peer = Peer(1, "ab", 1, at, four, ("cpu",), {})
    ticket = Fetch(peer.rank, Spans(at, at, four, zero, zero), peer, np.zeros(1, dtype=np.bool_))
    line: Any = DeadLine()
    courier = Courier(1, line, Buffers(None, False), None)
    with ticket.writing:
        courier.jobs.put(ticket)
        assert not ticket.status.state.is_end
    courier.jobs.put(None)
    courier.thread.join(60)
    assert ticket.status.state is ReadState.DONE


def test_a_blob_belongs_to_its_rank_in_the_group() -> None:
    with world(GLOO, 2) as w:
        blob = transports._join(w, 1, [1000], 1)
        with pytest.raises(TransportError, match=r"`rank` \(=2\) must be the rank in the group of 3 .* \(=1\)"):
            w.transport.connect(2, blob)


class Group:
    """What is looked at first."""

    def __init__(self, name: str, rank: int = 0) -> None:
        self._name, self._rank = name, rank

    def name(self) -> str:
        return self._name

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return 2


def test_groups_of_other_kinds_are_refused() -> None:
    """F9: whatever the groups are, no two are one."""
    with pytest.raises(TransportError, match=r"`group` \(='nccl'\) must be of gloo"):
        TorchDistributed(Group("nccl"))
    gloo, nccl = Group("gloo"), Group("nccl")
    for payload in ((nccl, nccl), (nccl, gloo), (gloo, Group("gloo")), (Group("ucc"), Group("ucc"))):
        with pytest.raises(TransportError, match="must be two more groups, both of nccl"):
            TorchDistributed(gloo, device=0, payload=payload)
    with pytest.raises(TransportError, match=r"rank and size \[\(0, 2\), \(1, 2\)\]\) must be of the same ranks"):
        TorchDistributed(gloo, device=0, payload=(nccl, Group("nccl", 1)))
    with pytest.raises(TransportError, match=r"`device` \(=None\) must be given with a payload of nccl"):
        TorchDistributed(gloo, payload=(nccl, Group("nccl")))


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_nccl_carries_experts_from_gpu_to_gpu(tmp_path: Path) -> None:
    """Random migrations of two processes with a GPU each, every byte compared; both read from each other at once."""
    command = [sys.executable, "-m", "benchmarks.multi_gpu", "--quick", "--transport", "nccl"]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "nccl.json")],
        cwd=Path(__file__).parents[4], capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    ranks = json.loads((tmp_path / "nccl.json").read_text())["ranks"]["by_rank"]
    checks = [entry["check"] for rank in ranks for entry in rank["ipc"]["nccl"]]
    assert set(checks) == {"exact"}
    assert len(checks) >= len(ranks)


@pytest.mark.slow
def test_processes_that_end_without_a_word_end_well(tmp_path: Path) -> None:
    """Threads that wait within gloo must not take an interpreter down that goes away."""
    command = [sys.executable, "-m", "tests.loading.transports.two_sided.gloo_rank"]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert said == ["DONE 2 1\n", "DONE 1 2\n"]
    assert [rank.returncode for rank in ranks] == [0, 0]


@pytest.mark.slow
def test_a_destination_that_cannot_be_written_fails_the_read_and_not_the_peer() -> None:
    with world(GLOO) as w, kits.unreachable(4096) as address:
        transports._join(w, 1, [4096], 1)
        own = w.me.tensors[0]
        w.transport.export([Region(own.data_ptr(), 1, "cpu"), Region(address, 4096, "cpu")])
        ticket = w.transport.read(1, batch([(1, 0, 0, 0, 4096)]))
        status = wait(w.transport, ticket, GLOO.deadline)
        assert status.state is ReadState.FAILED
        assert "own memory cannot be written" in status.reason
        assert wait(w.transport, w.transport.read(1, whole(1)), GLOO.deadline).state is ReadState.DONE
