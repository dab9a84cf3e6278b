"""Ranks of a transport under test: processes that are told what to do, or objects in this process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch

from eplb_core.loading.transport import ReadBatch, Region, Status, Transport

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]
Op = tuple[int, int, int, int, int]
"""Destination region and offset, source region and offset, bytes."""


def host_memory(nbytes: int) -> torch.Tensor:
    """Plain memory of the process."""
    return torch.zeros(nbytes, dtype=torch.uint8)


@dataclass(frozen=True)
class TransportKit:
    """What the checks need to know of a transport. Functions must be importable: they are sent to other processes."""

    make: Callable[[int, int, str], Transport]
    """`make(rank, size, folder)`: a rank's transport. Called in each rank's process, in all at about the same time;
    `folder` is empty at first and the same for all ranks of one check."""
    allocate: Callable[[int], torch.Tensor] = host_memory
    """Bytes that the transport can reach, uint8 `[nbytes]`."""
    processes: bool = True
    """False: the transport works within one process; what needs a peer to stop or die is left out."""
    rejoins: bool = True
    """A peer that died can be replaced by a new process under the same rank."""
    deadline: float = 30.0
    """Seconds in which everything must end."""
    big: int = 16 << 20
    """Bytes of the reads that are interrupted."""


class State(NamedTuple):
    """One rank."""

    kit: TransportKit
    transport: Transport
    tensors: list[torch.Tensor]


class World:
    """This process's rank 0, and the peers 1.. of one check."""

    def __init__(self, kit: TransportKit, num_peers: int) -> None:
        self.kit = kit
        self.size = num_peers + 1
        self.folder = tempfile.mkdtemp(prefix="eplb-")
        self.peers: dict[int, Peer] = {}
        try:
            for rank in range(1, self.size):
                self.start(rank)
            self.me = State(kit, kit.make(0, self.size, self.folder), [])
            for peer in self.peers.values():
                peer.wait_ready()
        except BaseException:
            self.end()
            raise

    @property
    def transport(self) -> Transport:
        """That of rank 0."""
        return self.me.transport

    def start(self, rank: int) -> Peer:
        """A peer, which makes its transport while this goes on."""
        self.peers[rank] = (Process if self.kit.processes else Peer)(self.kit, rank, self.size, self.folder)
        return self.peers[rank]

    def end(self) -> None:
        """End all peers and close the own transport."""
        unharmed = all(peer.unharmed for peer in self.peers.values())
        for peer in self.peers.values():
            peer.end(unharmed)
        if hasattr(self, "me"):
            in_time(self.transport.close, self.kit.deadline, "close")
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def world(kit: TransportKit, num_peers: int = 1) -> Iterator[World]:
    """Peers that end with the block."""
    made = World(kit, num_peers)
    try:
        yield made
    finally:
        made.end()


class Peer:
    """A rank in this process."""

    unharmed = True
    """It runs, and has answered all that it was asked."""

    def __init__(self, kit: TransportKit, rank: int, size: int, folder: str) -> None:
        self.kit = kit
        self.rank = rank
        self._open(size, folder)

    def _open(self, size: int, folder: str) -> None:
        self.state = State(self.kit, self.kit.make(self.rank, size, folder), [])

    def wait_ready(self) -> None:
        """Wait until its transport is made."""

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Run `function(state, *args)` there."""
        return function(self.state, *args)

    def end(self, keep: bool = False) -> None:
        """Close its transport; `keep`: a process may be a rank of another check."""
        self.state.transport.close()


class Process(Peer):
    """A rank in a process of its own, which a signal can stop or kill.

    After a check in which no rank came to harm it is a rank of the next one of its kit: engines take a second to load.
    """

    def _open(self, size: int, folder: str) -> None:
        self.unharmed = False
        self.process, self._pipe = _idle_process(self.kit) or _new_process(self.kit)
        self._pipe.send((self.kit, self.rank, size, folder))

    def wait_ready(self) -> None:
        """Wait until its transport is made."""
        self._answer("start", max(self.kit.deadline, _START))
        self.unharmed = True

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        """Like `call`, without waiting: `finish` gives the answer."""
        self.unharmed, self._before = False, self.unharmed  # until it has answered
        self._pipe.send((function, args))

    def finish(self, what: str = "answer") -> Any:
        """Wait for the answer to what was begun."""
        answer = self._answer(what)
        self.unharmed = self._before
        return answer

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Run `function(state, *args)` there and wait for its answer."""
        self.begin(function, *args)
        answer: T = self.finish(function.__name__)
        return answer

    def _answer(self, what: str, deadline: float | None = None) -> Any:
        seconds = self.kit.deadline if deadline is None else deadline
        if not self._pipe.poll(seconds):
            raise AssertionError(f"rank {self.rank} did not {what} within {seconds:g} s")
        try:
            good, answer = self._pipe.recv()
        except (EOFError, ConnectionResetError):  # the latter where it died with a request unread
            raise AssertionError(f"rank {self.rank} died during {what}") from None
        if not good:
            raise AssertionError(f"rank {self.rank}, {what}: {answer}")
        return answer

    def kill(self) -> None:
        """SIGKILL, and wait for it."""
        self.unharmed = False
        self.process.kill()
        self.process.join()

    def stop(self) -> None:
        """SIGSTOP, and wait until the system says so."""
        pid = self.process.pid
        if pid is None or not self.process.is_alive():
            raise AssertionError(f"rank {self.rank} died")
        self.unharmed = False
        os.kill(pid, signal.SIGSTOP)
        while _state_of(pid) not in "Tt":
            time.sleep(0.001)

    def resume(self) -> None:
        """SIGCONT, and wait for an answer."""
        os.kill(cast(int, self.process.pid), signal.SIGCONT)
        self.call(ping)

    def end(self, keep: bool = False) -> None:
        """Close its transport and end it; `keep`: let it be a rank of another check."""
        if keep and self._rests():
            _IDLE.append((self.kit, self.process, self._pipe))
        else:
            _end_process(self.process, self._pipe)

    def _rests(self) -> bool:
        """Its transport is closed, and it waits for another."""
        try:
            self._pipe.send(None)
            return self._pipe.poll(_PATIENCE) and bool(self._pipe.recv()[0])
        except (EOFError, OSError):
            return False


_PATIENCE = 5.0
_START = 120.0
"""The first process of all waits for the imports: on a busy machine that takes long, and no check is about it."""
_IDLE: list[tuple[TransportKit, Any, Connection]] = []
"""Processes that wait to be ranks of the same kit again; they end with this process."""


def _idle_process(kit: TransportKit) -> tuple[Any, Connection] | None:
    """One of this kit; those of another are not needed any more."""
    for entry in [entry for entry in _IDLE if entry[0] != kit]:
        _IDLE.remove(entry)
        _end_process(*entry[1:])
    return _IDLE.pop()[1:] if _IDLE else None


def _new_process(kit: TransportKit) -> tuple[Any, Connection]:
    context = multiprocessing.get_context("forkserver")
    # What peers need is imported once, by the process that they are forked from, with what its module imports.
    context.set_forkserver_preload([__name__, kit.make.__module__])
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _end_process(process: Any, pipe: Connection) -> None:
    if process.pid is not None and process.is_alive():
        os.kill(process.pid, signal.SIGCONT)
    pipe.close()
    process.join(_PATIENCE)
    if process.is_alive():
        process.kill()
        process.join()
    process.close()


def _state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def _serve(pipe: Connection) -> None:
    """A process's life: be one rank after the other until the pipe closes."""
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            _be_rank(pipe, *pipe.recv())


def _be_rank(pipe: Connection, kit: TransportKit, rank: int, size: int, folder: str) -> None:
    """Do what comes through the pipe until nothing does."""
    try:
        state = State(kit, kit.make(rank, size, folder), [])
    except Exception as error:
        pipe.send((False, repr(error)))
        return
    try:
        pipe.send((True, None))
        while (order := pipe.recv()) is not None:
            function, args = order
            try:
                answer = True, function(state, *args)
            except Exception as error:
                answer = False, repr(error)
            pipe.send(answer)
    finally:
        state.transport.close()
    pipe.send((True, None))


# What a rank can be told.


def ping(state: State) -> None:
    """Show that it runs."""


def export(state: State, sizes: Sequence[int], seed: int | None) -> bytes:
    """New memory of these sizes with bytes of `seed` (None: zeros), exported."""
    state.tensors[:] = [state.kit.allocate(size) for size in sizes]
    for i, tensor in enumerate(state.tensors):
        put(tensor, np.zeros(sizes[i], dtype=np.uint8) if seed is None else pattern(seed + i, sizes[i]))
    return state.transport.export(regions(state))


def export_again(state: State) -> bytes:
    """The same memory."""
    return state.transport.export(regions(state))


def connect(state: State, rank: int, blob: bytes) -> None:
    """Connect to a rank."""
    state.transport.connect(rank, blob)


def read_times(state: State, rank: int, ops: Sequence[Op], times: int) -> None:
    """Read a batch again and again."""
    for _ in range(times):
        status = wait(state.transport, state.transport.read(rank, batch(ops)), state.kit.deadline)
        if status.state.name != "DONE":
            raise AssertionError(f"a read from rank {rank} ended as {status}")


def read_all(state: State, rank: int, ops: Sequence[Op], times: int) -> list[bytes]:
    """The same; what the regions hold in the end."""
    read_times(state, rank, ops, times)
    return [contents(tensor).tobytes() for tensor in state.tensors]


def regions(state: State) -> list[Region]:
    """A rank's memory."""
    return [Region(tensor.data_ptr(), tensor.numel(), str(tensor.device)) for tensor in state.tensors]


def batch(ops: Sequence[Op]) -> ReadBatch:
    """Arrays of a list of operations."""
    columns = np.array(ops, dtype=np.int64).reshape(-1, 5).T
    return ReadBatch(*map(np.ascontiguousarray, columns))


def pattern(seed: int, nbytes: int) -> Bytes:
    """Random bytes that repeat after a prime number, so that shifted ones differ."""
    block = np.random.default_rng(seed).integers(0, 256, min(nbytes, 1048573), dtype=np.uint8)
    return np.resize(block, nbytes) if nbytes else block


def put(tensor: torch.Tensor, data: Bytes) -> None:
    """Fill a tensor on any device and wait."""
    tensor.copy_(torch.from_numpy(data))
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def contents(tensor: torch.Tensor) -> Bytes:
    """A copy of a tensor's bytes."""
    data: Bytes = tensor.cpu().numpy().copy()
    return data


def wait(transport: Transport, ticket: Any, seconds: float) -> Status:
    """Poll until it ends or time is up; the last status."""
    end = time.monotonic() + seconds
    while not (status := transport.poll(ticket)).state.is_end and time.monotonic() < end:
        time.sleep(0.0002)
    return status


def in_time(function: Callable[..., T], seconds: float, what: str, *args: Any) -> T:
    """Call on another thread; a call that does not come back is an error, not a hang."""
    answer: list[T] = []
    problem: list[BaseException] = []

    def run() -> None:
        try:
            answer.append(function(*args))
        except BaseException as error:
            problem.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if problem:
        raise problem[0]
    if not answer:
        raise AssertionError(f"`{what}` did not come back within {seconds:g} s")
    return answer[0]
