"""A transport that goes wrong on purpose, for tests of what is built on one."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eplb_core._arrays import check_int, check_real, to_list
from eplb_core._text import quoted
from eplb_core.errors import TransportError
from eplb_core.loading.transport import Caps, ReadBatch, ReadState, Region, Status, Transport
from eplb_core.loading.transports.base import ABANDONED, DRAINED, PENDING

FAULTS = ("none", "delay", "drop", "fail", "late", "lose", "tear")


class Faulty:
    """Wraps a transport and spoils some of its reads. The same seed and the same calls go wrong in the same way.

    Delays are numbers of polls, not times. The fault of a read is one of

    - `delay`: is PENDING for `polls` more polls;
    - `drop`: never begins and stays PENDING until it is given up on;
    - `fail`: ends as FAILED and leaves garbage;
    - `late`: writes only after it was given up on, and is ABANDONED for `polls` polls before;
    - `lose`: ends as LOST_PEER and leaves garbage; the rank is disconnected, until `connect` is called again;
    - `tear`: is DONE, though a part of the bytes is wrong, as if the owner had been writing there;
    - `none`.

    Args:
        inner: The transport that does the work.
        faults: A share of reads by fault, `{"tear": 0.1, "delay": 0.5}`; or the fault of each read in turn, and
            "none" for those that follow.
        seed: Which reads and bytes are hit.
        polls: See `delay` and `late`.

    Raises:
        ValueError: An unknown fault, or shares that are negative or sum to more than 1.

    Threads:
        As `inner`.

    Example:
        >>> from eplb_core.loading.transports import SharedMemory
        >>> Faulty(SharedMemory(), ["tear", "lose"]).caps.name
        'faulty shared_memory'
    """

    caps: Caps

    def __init__(
        self, inner: Transport, faults: Mapping[str, float] | Sequence[str], *, seed: int = 0, polls: int = 3
    ) -> None:
        named: list[object] = list(to_list(faults, "faults"))
        unknown = [fault for fault in named if not isinstance(fault, str) or fault not in FAULTS]
        if unknown:
            raise ValueError(f"`faults` (={quoted(unknown[0], 80)}) must be of {', '.join(FAULTS)}")
        self._script: list[str] = []
        self._shares: dict[str, float] = {}
        if isinstance(faults, Mapping):
            self._shares = {
                fault: check_real(faults[fault], f"faults[{fault!r}]", at_least=0.0)
                for fault in FAULTS
                if fault in faults
            }
            if sum(self._shares.values()) > 1.0 + 1e-9:
                raise ValueError(f"`faults` (={sum(self._shares.values()):g} in all) must sum to at most 1")
        else:
            self._script = list(faults)
        self.inner = inner
        self.polls = check_int(polls, "polls", 0)
        self.caps = inner.caps._replace(
            name=f"faulty {inner.caps.name}",
            stops_late_writes=inner.caps.stops_late_writes and "late" not in faults,
        )
        self.log: list[tuple[int, str]] = []
        """Rank and fault of each read that began."""
        self._random = np.random.default_rng(check_int(seed, "seed", 0))
        self._regions: list[Region] = []
        self._pending: set[_Spoilt] = set()

    def export(self, regions: list[Region]) -> bytes:
        """As `inner`."""
        blob = self.inner.export(regions)
        self._regions = list(regions)
        return blob

    def connect(self, rank: int, blob: bytes) -> None:
        """As `inner`."""
        self.inner.connect(rank, blob)

    def read(self, rank: int, batch: ReadBatch, *, stream: Any = None) -> _Spoilt:
        """Begin to read; some reads go wrong. `inner` refuses what it refuses, whatever the fault."""
        fault = self._next_fault()
        nothing = ReadBatch(*(np.empty(0, dtype=np.int64) for _ in batch))
        held = fault in ("drop", "late")
        if held:
            self._check(rank, batch)
        inner = self.inner.read(rank, nothing if held else batch, stream=stream)
        ticket = _Spoilt(rank, fault, batch, stream, self.polls, inner)
        self.log.append((rank, fault))
        self._pending.add(ticket)
        for given_up in [other for other in self._pending if other.given_up]:
            self.poll(given_up)
        return ticket

    def poll(self, ticket: _Spoilt) -> Status:
        """Say how far a read seems to be."""
        if ticket.end is None:
            status = self._seen(ticket)
            if not status.state.is_end:
                return status
            ticket.end = status
            self._pending.discard(ticket)
        return ticket.end

    def abandon(self, ticket: _Spoilt) -> None:
        """Give up on a read."""
        if not self.poll(ticket).state.is_end:
            ticket.given_up = True
            self.inner.abandon(ticket.inner)

    def disconnect(self, rank: int) -> None:
        """As `inner`; dropped and late reads of the rank are lost."""
        for ticket in list(self._pending):
            if ticket.rank == rank and ticket.fault in ("drop", "late") and not ticket.given_up:
                ticket.end = Status(ReadState.LOST_PEER, f"rank {rank} was disconnected")
                self._pending.discard(ticket)
        self.inner.disconnect(rank)

    def close(self) -> None:
        """As `inner`; dropped and late reads write nothing any more."""
        for ticket in list(self._pending):
            if ticket.fault in ("drop", "late"):
                ticket.end = DRAINED if ticket.given_up else _CLOSED
                self._pending.discard(ticket)
        self.inner.close()

    def _next_fault(self) -> str:
        if self._script:
            return self._script.pop(0)
        draw = float(self._random.random())
        for fault, share in self._shares.items():
            if draw < share:
                return fault
            draw -= share
        return "none"

    def _check(self, rank: int, batch: ReadBatch) -> None:
        """Let `inner` see regions and offsets, first and last byte of each span, but no bytes to move."""
        columns = [np.asarray(column) for column in batch]
        if len({len(column) for column in columns}) > 1 or (columns[4] < 0).any():
            self.inner.read(rank, batch)  # raises
        for end in (np.zeros_like(columns[4]), columns[4]):
            at = ReadBatch(columns[0], columns[1] + end, columns[2], columns[3] + end, np.zeros_like(columns[4]))
            self.inner.read(rank, at)

    def _seen(self, ticket: _Spoilt) -> Status:
        if ticket.fault == "drop":
            return DRAINED if ticket.given_up else PENDING
        if ticket.fault == "late" and not ticket.given_up:
            return PENDING
        if ticket.fault in ("late", "delay") and ticket.polls > 0:
            ticket.polls -= 1
            return ABANDONED if ticket.given_up else PENDING
        if ticket.fault == "late":
            return self._write_late(ticket)
        status = self.inner.poll(ticket.inner)
        if not status.state.is_end or ticket.fault in ("none", "delay"):
            return status
        if ticket.fault == "tear":
            if status.state is ReadState.DONE:
                self._spoil(ticket.batch)
            return status
        if status.state is ReadState.DRAINED:
            return status
        self._spoil(ticket.batch)
        if ticket.fault == "fail":
            return Status(ReadState.FAILED, f"rank {ticket.rank}: failed on purpose")
        self.disconnect(ticket.rank)
        return Status(ReadState.LOST_PEER, f"rank {ticket.rank}: lost on purpose")

    def _write_late(self, ticket: _Spoilt) -> Status:
        if not ticket.begun:
            ticket.begun = True
            try:
                ticket.inner = self.inner.read(ticket.rank, ticket.batch, stream=ticket.stream)
            except TransportError:  # gone meanwhile
                return DRAINED
        return DRAINED if self.inner.poll(ticket.inner).state.is_end else ABANDONED

    def _spoil(self, batch: ReadBatch) -> None:
        """Turn over the bits of the tail of one operation, at least one byte."""
        some = np.flatnonzero(np.asarray(batch.nbytes) > 0)
        if not some.size:
            return
        i = int(some[self._random.integers(some.size)])
        nbytes = int(batch.nbytes[i])
        start = int(self._random.integers(nbytes))
        region = self._regions[int(batch.dst_region[i])]
        flip(region.address + int(batch.dst_offset[i]) + start, nbytes - start, region.device)


_CLOSED = Status(ReadState.LOST_PEER, "the transport was closed")


@dataclass(slots=True, eq=False)
class _Spoilt:
    """A ticket."""

    rank: int
    fault: str
    batch: ReadBatch
    stream: Any
    polls: int
    inner: Any
    given_up: bool = False
    begun: bool = False
    end: Status | None = None


def flip(address: int, nbytes: int, device: str) -> None:
    """Turn over all bits of a span of memory."""
    if device.startswith("cuda"):  # pragma: no cover  needs a GPU
        import torch

        from eplb_core.loading.cuda.runtime import device_bytes

        device_bytes(address, nbytes, device).bitwise_not_()
        torch.cuda.synchronize(device)
        return
    span = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
    np.bitwise_not(span, out=span)
