"""What carries the messages and bytes of a two-sided read: the group, groups for payload, buffers on both sides."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta
from typing import Any

import torch

from eplb_core._arrays import BoolArray, IntArray
from eplb_core.loading.cuda import runtime
from eplb_core.loading.transports import span_copies

MOST_SPANS = 256  # of one request
HEAD = 16  # bytes before those that were asked for
_HOST_CHUNK, _DEVICE_CHUNK = 4 << 20, 8 << 20  # bytes of one answer; a rank keeps two such rooms a peer and direction
LONG = timedelta(days=100)  # deadlines are the caller's
_STUCK_S = 30.0  # after both sides began
REQUEST, ANSWER = 1_000_001, 1_000_002  # tags


class PeerEnd:
    """A peer at the other end of the group. Who leaves says so, and is answered; then neither asks any more."""

    def __init__(self, group: Any, rank: int) -> None:
        self.group = group
        self.rank = rank
        self.gone = ""
        self.dead = ""
        """Why nothing comes from it any more. Who waits for bytes that came in part is never told so by gloo."""
        self._said_bye = False
        self._lock = threading.Lock()
        self._sent: list[Any] = []

    def ask(self, message: torch.Tensor) -> Any:
        """Send a request; not after a farewell, which the peer's thread stops at."""
        with self._lock:
            if self.gone or self._said_bye:
                raise RuntimeError(self.gone or "this transport was closed")
            return self.group.send([message], self.rank, REQUEST)

    def say_bye(self, gone: str = "") -> None:
        """Once. Not waited for: it is sent when the peer takes it."""
        with self._lock:
            self.gone = self.gone or gone
            if not self._said_bye:
                self._said_bye = True
                message = torch.zeros(5 + 3 * MOST_SPANS, dtype=torch.int64, device="cpu")
                with contextlib.suppress(RuntimeError):
                    self._sent += [message, self.group.send([message], self.rank, REQUEST)]


class Payload:
    """Groups that carry the bytes of answers: one up, from lower to higher ranks, and one down.

    On a device a send and a receive wait for each other in the queue of their pair. With one group, two ranks that read
    from each other at once could each have the receive first in it, and neither would come to its send.

    Args:
        groups: Up and down.
        rank: This rank.
        device: Index of the CUDA device that NCCL carries from and to; None: the host's memory, by gloo.
    """

    def __init__(self, groups: tuple[Any, Any], rank: int, device: int | None) -> None:
        self.groups, self.rank, self.device = groups, rank, device
        self.broken = ""
        self._lock = threading.Lock()
        self._stream: Any = None if device is None else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin_thread(self) -> None:
        """A thread that calls the others starts."""
        if self.device is not None:
            torch.cuda.set_device(self.device)

    def send(self, room: torch.Tensor, reader: int, *, first: bool = False) -> Any:
        """Begin to send; to be passed to `wait`."""
        return self._begin("send", self.groups[reader < self.rank], room, reader, first)

    def receive(self, room: torch.Tensor, owner: int, end: PeerEnd, *, first: bool = False) -> None:
        """Receive, and wait for it."""
        self.wait(self._begin("recv", self.groups[owner > self.rank], room, owner, first), end)

    def _begin(self, call: str, group: Any, room: torch.Tensor, peer: int, first: bool) -> Any:
        if self.broken:  # pragma: no cover  needs a GPU whose peer ended in a transfer
            raise RuntimeError(self.broken)
        # The first one of a pair waits for the other side, and may not keep other pairs from theirs.
        with contextlib.nullcontext() if first else self._lock:
            if self._stream is None:
                return getattr(group, call)([room], peer, ANSWER)
            with torch.cuda.stream(self._stream):
                return getattr(group, call)([room], peer, ANSWER)

    def wait(self, work: Any, end: PeerEnd) -> None:
        """Until it is over on the device; a peer that is gone, or stuck, ends it for all peers."""
        if self.device is None:
            work.wait(LONG)
        else:
            self._wait_on_device(work, end)

    def _wait_on_device(self, work: Any, end: PeerEnd) -> None:  # pragma: no cover  needs a GPU
        until = time.monotonic() + _STUCK_S
        while not work.is_completed():
            if self.broken:
                raise RuntimeError(self.broken)
            if end.gone or time.monotonic() > until:
                self.abort(f"rank {end.rank} {end.gone or 'is stuck'}")
            time.sleep(5e-5)
        if self.broken:  # what was aborted counts as over
            raise RuntimeError(self.broken)

    def abort(self, reason: str) -> None:  # pragma: no cover  needs a GPU whose peer ended in a transfer
        """Take the kernels that wait off the device. There is no way to do it for one peer alone."""
        with self._lock:
            if not self.broken:
                self.broken = f"the payload's groups were aborted: {reason}"
                for group in self.groups:
                    group.abort()


class Buffers:
    """Memory that answers go through, and the copies between it and where experts live."""

    def __init__(self, device: int | None, on_device: bool) -> None:
        self.device = device
        self.on_device = on_device
        """Where rooms are."""
        self.chunk = _DEVICE_CHUNK if on_device else _HOST_CHUNK
        if device is not None:
            self.cuda = runtime.runtime()
            with self.cuda.on(device):
                self.stream = self.cuda.new_stream()

    def new(self) -> torch.Tensor:
        """Room for one answer."""
        if self.on_device:
            return torch.empty(HEAD + self.chunk, dtype=torch.uint8, device=f"cuda:{self.device}")
        return torch.empty(HEAD + self.chunk, dtype=torch.uint8, pin_memory=self.device is not None)

    def move(self, dst: IntArray, src: IntArray, nbytes: IntArray, on_device: BoolArray) -> None:
        """Copy spans of which one side is in a room; `on_device`: the other side is not host memory."""
        host = ~on_device & (not self.on_device)
        if host.any():
            moved = span_copies.copy(dst[host], src[host], nbytes[host])
            if moved != int(nbytes[host].sum()):
                raise OSError(f"{moved} of {int(nbytes[host].sum())} bytes were copied; memory was unmapped")
        if not host.all() and self.device is not None:
            spans = dst[~host], src[~host], nbytes[~host]
            with self.cuda.on(self.device):
                self.cuda.copy(*spans, self.stream, overlap=self.on_device, batched=self.on_device)
                self.cuda.call("cudaStreamSynchronize", self.stream)
