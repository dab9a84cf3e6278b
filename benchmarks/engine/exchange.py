"""All-to-all between ranks: rows go to the ranks that hold their slots, and answers come back.

Shapes never change: each rank has room for all that another can send, and says by slot -1 what is not used. So there
is nothing to agree on before an exchange, and what lies between two exchanges can be captured in a CUDA graph.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

CONNECT_S = 60.0
"""For members to meet; processes that start take their time on a busy machine."""


class Group(NamedTuple):
    """Ranks that live, in order of rank, and three process groups of them: two users of one group would mix."""

    me: int
    size: int
    rows: Any
    """For the exchange."""
    words: Any
    """For the agreement alone."""
    control: Any
    """For loads and checks."""
    store: Any
    folder: Path
    deadline: float


def form_group(folder: Path, index: int, size: int, deadline: float) -> Group:
    """Meet the other members in a folder that no other group used before."""
    torch_names: Any = dist
    folder.mkdir(parents=True, exist_ok=True)
    store = torch_names.FileStore(str(folder / "store"), size)

    def gloo(name: str) -> Any:
        part = torch_names.PrefixStore(name, store)
        return torch_names.ProcessGroupGloo(part, index, size, timedelta(seconds=CONNECT_S))

    return Group(index, size, gloo("rows"), gloo("words"), gloo("control"), store, folder, deadline)


def gather(group: Group, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Every member's tensor, on the host."""
    own = tensor.cpu()
    out = [torch.empty_like(own) for _ in range(group.size)]
    group.control.allgather([out], [own], _within(group, "AllgatherOptions")).wait()
    return out


def _within(group: Group, kind: str) -> Any:
    """Options of a collective that gives up after the group's deadline."""
    options = getattr(dist.distributed_c10d, kind)()
    options.timeout = timedelta(seconds=group.deadline)
    return options


def add_up(group: Group) -> Callable[[torch.Tensor], None]:
    """Sum a tensor over the members, in place: what `LoadCounter.snapshot` is given."""

    def all_reduce(tensor: torch.Tensor) -> None:
        host = tensor.cpu()
        group.control.allreduce([host], _within(group, "AllreduceOptions")).wait()
        tensor.copy_(host)

    return all_reduce


class Exchange:
    """Two all-to-alls: 0 takes rows to the experts, 1 takes answers home. This one: through the host, by gloo.

    Attributes:
        send: What goes to each member, uint8 `[size, bytes]` for each of the two. Fixed for life.
        receive: What came from each.
    """

    def __init__(self, group: Group, nbytes: tuple[int, int], device: torch.device) -> None:
        self._group, self._device = self._form(group), device
        self.send = [torch.zeros(group.size, each, dtype=torch.uint8, device=device) for each in nbytes]
        self.receive = [torch.zeros_like(each) for each in self.send]
        self._options = _within(group, "AllToAllOptions")

    def _form(self, group: Group) -> Any:
        return group.rows

    def swap(self, which: int) -> None:
        """Exchange in equal parts, on the current stream. Raises RuntimeError where a member does not come."""
        self._group.alltoall_base(self.receive[which], self.send[which], [], [], self._options).wait()


class NcclExchange(Exchange):
    """Between GPUs, on the current stream: the host goes on, and a member that does not come shows where it waits."""

    def _form(self, group: Group) -> Any:
        torch_names: Any = dist
        options = torch_names.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=group.deadline)
        store = torch_names.PrefixStore("nccl", group.store)
        return torch_names.ProcessGroupNCCL(store, group.me, group.size, options)


class _Frame:
    """What the threads of one group share."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.send: list[list[torch.Tensor]] = [[]] * size
        self.filled: list[list[Any]] = [[]] * size


class ThreadExchange(Exchange):
    """Between threads of one process, each on a stream of its own: streams wait for streams, and nobody for the device.

    As with processes, the wait for all members in one exchange makes the other's buffers free again.
    """

    _frames: ClassVar[dict[Path, _Frame]] = {}
    _lock = threading.Lock()

    def __init__(self, group: Group, nbytes: tuple[int, int], device: torch.device) -> None:
        super().__init__(group, nbytes, device)
        self._me, self._deadline = group.me, group.deadline
        with self._lock:
            self._frame = self._frames.setdefault(group.folder, _Frame(group.size))
        self._frame.send[group.me] = self.send
        make_event: Any = torch.cuda.Event
        self._frame.filled[group.me] = [make_event() for _ in nbytes] if device.type == "cuda" else []
        self._meet()

    def swap(self, which: int) -> None:
        """Say that the own buffer is filled; then take from each member, once its own is."""
        frame = self._frame
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        if stream is not None:
            frame.filled[self._me][which].record(stream)
        self._meet()
        for index, peer in enumerate(frame.send):
            if stream is not None:
                stream.wait_event(frame.filled[index][which])
            self.receive[which][index].copy_(peer[which][self._me], non_blocking=True)

    def _meet(self) -> None:
        try:
            self._frame.barrier.wait(self._deadline)
        except threading.BrokenBarrierError as error:
            raise RuntimeError("a member did not come to the exchange") from error


class IpcExchange(Exchange):
    """Between processes on one GPU, which NCCL does not serve: each maps the others' send buffers and copies.

    Both buffers are filled again only after the other exchange, in which every member's stream has been waited for: so
    nobody writes what is still being read.
    """

    def __init__(self, group: Group, nbytes: tuple[int, int], device: torch.device) -> None:
        import torch.multiprocessing.reductions

        reduce_tensor: Any = torch.multiprocessing.reductions.reduce_tensor
        super().__init__(group, nbytes, device)
        self._members = group
        blob = torch.frombuffer(bytearray(pickle.dumps([reduce_tensor(each) for each in self.send])), dtype=torch.uint8)
        sizes = gather(group, torch.tensor([len(blob)]))
        room = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
        room[: len(blob)] = blob
        self._peers: list[list[torch.Tensor]] = []
        for index, (one, size) in enumerate(zip(gather(group, room), sizes, strict=True)):
            parts = pickle.loads(one[: int(size)].numpy().tobytes())
            self._peers.append(self.send if index == group.me else [build(*args) for build, args in parts])
        path, shape = group.folder / "tickets", (group.size,)
        if group.me == 0:
            np.memmap(path, np.int64, "w+", shape=shape).flush()
        gather(group, torch.zeros(1))  # it is there
        self._tickets = np.memmap(path, np.int64, "r+", shape=shape)
        self._turn = 0

    def swap(self, which: int) -> None:
        """Wait for the own stream, then for the members; then take what they sent."""
        torch.cuda.current_stream(self._device).synchronize()
        self._meet()
        for index, peer in enumerate(self._peers):
            self.receive[which][index].copy_(peer[which][self._members.me], non_blocking=True)

    def _meet(self) -> None:
        """Wait until every member has come as far as this one: numbers in shared memory."""
        self._turn += 1
        self._tickets[self._members.me] = self._turn
        until = time.monotonic() + self._members.deadline
        while int(self._tickets.min()) < self._turn:
            if time.monotonic() > until:
                raise RuntimeError(f"member {int(self._tickets.argmin())} did not come to the exchange")
            os.sched_yield()


def make_exchange(group: Group, nbytes: tuple[int, int], device: torch.device) -> Exchange:
    """Fit for where the members are. Collective."""
    own = torch.tensor([os.getpid(), device.index or 0])
    processes, gpus = (len(set(column)) for column in torch.stack(gather(group, own)).t().tolist())
    if processes < group.size:
        return ThreadExchange(group, nbytes, device)
    if device.type == "cpu":
        return Exchange(group, nbytes, device)
    if gpus == group.size:
        return NcclExchange(group, nbytes, device)
    return IpcExchange(group, nbytes, device)


class Parcel:
    """How rows lie in the exchange's buffers: `[members, room, ...]`, a row's slot beside it."""

    def __init__(self, exchange: Exchange, size: int, room: int, hidden: int, dtype: torch.dtype) -> None:
        wide = hidden * dtype.itemsize

        def rows(buffer: torch.Tensor) -> torch.Tensor:
            return buffer.view(size, room, -1)[..., :wide].view(dtype)

        def slots(buffer: torch.Tensor) -> torch.Tensor:
            return buffer.view(size, room, -1)[..., wide : wide + 4].view(torch.int32)[..., 0]

        self.size, self.room = size, room
        self.out_rows, self.out_slots = rows(exchange.send[0]), slots(exchange.send[0])
        self.in_rows, self.in_slots = rows(exchange.receive[0]), slots(exchange.receive[0])
        self.out_answers, self.in_answers = rows(exchange.send[1]), rows(exchange.receive[1])

    @staticmethod
    def nbytes(room: int, hidden: int, dtype: torch.dtype) -> tuple[int, int]:
        """Bytes for one member in each direction."""
        wide = hidden * dtype.itemsize
        return room * (wide + 16), room * wide

    def pack(self, x: torch.Tensor, slots: torch.Tensor, member: torch.Tensor) -> torch.Tensor:
        """Lay each (row, slot) pair where its member will find it; slot -1 goes nowhere.

        Args:
            x: Rows `[B, hidden]`.
            slots: int `[B, K]`.
            member: Member of each pair, `[B * K]`; anything where the slot is -1.

        Returns:
            Where each pair lies, for `unpack`. No shape depends on what is in the arguments.
        """
        flat = slots.reshape(-1)
        to = torch.where(flat >= 0, member, self.size)  # one member too many, for what is not sent
        sent = to[:, None] == torch.arange(self.size + 1, device=x.device)
        before = sent.cumsum(0).gather(1, to[:, None])[:, 0] - 1
        place = torch.where(flat >= 0, to * self.room + before, self.size * self.room)
        pair = torch.full((self.size * self.room + 1,), -1, dtype=torch.int64, device=x.device)
        pair = pair.scatter_(0, place, torch.arange(len(flat), device=x.device))[:-1]
        first = pair.clamp(min=0)
        self.out_rows.copy_(x[first // slots.shape[1]].view(self.size, self.room, -1))
        self.out_slots.copy_(torch.where(pair >= 0, flat[first].int(), -1).view(self.size, self.room))
        return place

    def unpack(self, place: torch.Tensor, top_k: int) -> torch.Tensor:
        """Answers `[B, K, hidden]`, 0 where nothing was asked."""
        answers = self.in_answers.reshape(self.size * self.room, -1)
        found = answers[place.clamp(max=len(answers) - 1)]
        found = torch.where((place < len(answers))[:, None], found, 0)
        return found.view(-1, top_k, answers.shape[1])
