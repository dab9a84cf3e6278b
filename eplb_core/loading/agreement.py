"""How ranks take one decision in the same forward pass without waiting for each other."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from eplb_core._arrays import check_real
from eplb_core.errors import AgreementError

if TYPE_CHECKING:
    import torch


@runtime_checkable
class Agreement(Protocol):
    """One word from every rank, each pass; the minimum comes back one pass later, equal everywhere.

    Called only from the thread that calls `Migrator.poll`, `pause`, `move_experts` and `agree_on_layout`. An engine
    that exchanges numbers between ranks in each pass anyway can add the word to them.
    """

    @property
    def rank(self) -> int:
        """This member, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of members."""
        ...

    def post(self, word: int) -> None:
        """Contribute this pass's word, an int64. Never blocks."""
        ...

    def take(self) -> int | None:
        """Minimum of all ranks' words of one pass earlier; None on the first pass.

        "One pass earlier" is fixed: a test for completion would answer in different passes on different ranks.
        """
        ...

    def gather(self, blob: bytes) -> list[bytes]:
        """Every rank's blob, by rank. Blocks until all ranks called it, with a deadline; start-up and pause only."""
        ...


def check_agreement(value: object) -> None:
    """Raise TypeError unless `agreement` is an Agreement."""
    if not callable(getattr(value, "gather", None)):
        raise TypeError(f"`agreement` (={type(value).__name__}) must be an Agreement, such as GroupAgreement")


class GroupAgreement:
    """Agreement by a process group of torch: an all-reduce that runs in the background from one pass to the next.

    Args:
        cpu_group: A group on the CPU (gloo) that nobody else uses: collectives of two users on one group mix. From
            `torch.distributed.new_group(backend="gloo")`, or a `ProcessGroupGloo`.
        deadline: Seconds to wait for a peer before the agreement fails.
        store: The store that the group was made with, through which ranks find out who is missing. Default: that of a
            group that torch made by name.

    Raises:
        ValueError: `deadline` is not positive.
        TypeError: `cpu_group` is no process group, or one of NCCL.

    Cost:
        `post` starts an all-reduce of 8 bytes; `take` waits for the one of the pass before, which is there already if
        passes take longer than a network round trip. `python -m benchmarks.moving`.

    Threads:
        The forward thread. After an error every call raises it again: the group is broken, make another.
    """

    def __init__(self, cpu_group: Any, deadline: float = 30.0, *, store: Any = None) -> None:
        import torch
        import torch.distributed as dist

        if not callable(getattr(cpu_group, "allreduce", None)):
            raise TypeError(
                f"`cpu_group` (={type(cpu_group).__name__}) must be a process group; give it what `new_group` returned"
            )
        kind = str(cpu_group.name()) if callable(getattr(cpu_group, "name", None)) else ""
        if "nccl" in kind.lower():
            raise TypeError(
                f"`cpu_group` (={kind!r}) must be of the CPU, and nobody else's; give it new_group(backend='gloo')"
            )
        self.deadline = check_real(deadline, "deadline", above=0.0, at_most=1e9)
        self.rank: int = cpu_group.rank()
        self.size: int = cpu_group.size()
        self._group = cpu_group
        self._timeout = timedelta(seconds=self.deadline)
        with torch.inference_mode(False):  # what is made in it takes no write from outside
            self._words = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(2)]
        options: Any = dist.distributed_c10d
        self._options = options.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp.MIN
        self._options.timeout = self._timeout
        self._gather_options = options.AllgatherOptions()
        self._gather_options.timeout = self._timeout
        self._pending: tuple[Any, torch.Tensor] | None = None
        self._failure: AgreementError | None = None
        self._window = min(1.0, self.deadline / 4)
        self._store = store
        if store is None:
            with contextlib.suppress(AttributeError, KeyError, TypeError):
                self._store = options._world.pg_map[cpu_group][1]

    def post(self, word: int) -> None:
        """Start this pass's all-reduce.

        Raises:
            AgreementError: The group is broken, or the word of the pass before was not taken.
        """
        if self._pending is not None and self._failure is None:
            raise AgreementError("`post` was called twice without a `take` between them; call each once per pass")
        buffer = self._words[0]
        self._words.reverse()
        buffer[0] = word
        self._pending = (self._guarded(lambda: self._group.allreduce([buffer], self._options)), buffer)

    def take(self) -> int | None:
        """The minimum of the pass before.

        Raises:
            AgreementError: A rank did not answer within `deadline`, or died; it is named if it can be told.
        """
        if self._failure is not None:
            raise self._failure
        if self._pending is None:
            return None
        work, buffer = self._pending
        self._pending = None
        self._guarded(lambda: self._wait(work))
        return int(buffer[0])

    def same(self, word: int) -> bool:
        """Whether every rank gave the same int64, not the lowest there is; blocks for one all-reduce of 16 bytes.

        Raises:
            AgreementError: As `take`.
        """
        import torch

        both = torch.tensor([word, -word], dtype=torch.int64, device="cpu")
        self._guarded(lambda: self._wait(self._group.allreduce([both], self._options)))
        lowest, highest = both.tolist()
        return bool(lowest == -highest)

    def gather(self, blob: bytes) -> list[bytes]:
        """Every rank's blob, by rank; the word posted last stays where it is.

        Raises:
            AgreementError: As `take`.
        """
        import torch

        sizes = self._all_gather(torch.tensor([len(blob)], dtype=torch.int64, device="cpu"))
        lengths = [int(size[0]) for size in sizes]
        padded = torch.zeros(max(1, *lengths), dtype=torch.uint8, device="cpu")
        if blob:
            padded[: len(blob)] = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        blobs = self._all_gather(padded)
        return [part[:length].numpy().tobytes() for part, length in zip(blobs, lengths, strict=True)]

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        import torch

        out = [torch.empty_like(tensor) for _ in range(self.size)]
        self._guarded(lambda: self._wait(self._group.allgather([out], [tensor], self._gather_options)))
        return out

    def _wait(self, work: Any) -> None:
        """Until it is complete, or the deadline has passed, or another rank says that it has seen a failure."""
        start = time.monotonic()
        look = start + _LOOK_S
        while not work.is_completed():
            now = time.monotonic()
            if now - start > self.deadline - self._window:
                raise RuntimeError("it took too long")
            if now > look:
                if self._store is not None and self._store.check(["eplb-failed"]):
                    raise RuntimeError("another rank has seen a failure")
                look = now + _LOOK_S
            time.sleep(2e-5 if now - start < 0.01 else 1e-3)
        work.wait()

    def _guarded(self, call: Callable[[], Any]) -> Any:
        if self._failure is not None:
            raise self._failure
        try:
            return call()
        except RuntimeError as error:
            missing = self._missing()
            who = f"rank {', '.join(map(str, missing))}" if missing else "a rank"
            self._failure = AgreementError(
                f"{who} did not answer rank {self.rank} within {self.deadline:g} s, or died; stop the passes, and make "
                "an agreement of the ranks that live",
                ranks=missing,
            )
            raise self._failure from error

    def _missing(self) -> tuple[int, ...]:
        """Ranks that do not say soon, in the store that the group was made with, that they too saw the failure."""
        if self._store is None:
            return ()
        try:
            self._store.set("eplb-failed", "1")
            self._store.set(f"eplb-alive-{self.rank}", "1")
            until = time.monotonic() + self._window
            while True:
                missing = tuple(rank for rank in range(self.size) if not self._store.check([f"eplb-alive-{rank}"]))
                if not missing or time.monotonic() > until:
                    return missing
                time.sleep(0.01)
        except RuntimeError:  # the store's host is gone
            return ()


_LOOK_S = 0.2
"""How often a rank that waits asks whether others have given up."""


class LocalAgreement:
    """Agreement of ranks in one process, each on a thread of its own or all on one in turn: for tests and notebooks.

    Make all members at once by `group`. With all ranks on one thread, `take` and `post` never wait; `gather` does until
    all members called it, and so needs a thread each.

    Example:
        >>> first, second = LocalAgreement.group(2)
        >>> first.take(), second.take()
        (None, None)
        >>> first.post(7)
        >>> second.post(3)
        >>> first.take(), second.take()
        (3, 3)
    """

    def __init__(self, room: _Room, rank: int, deadline: float) -> None:
        self.rank, self.size, self.deadline = rank, len(room.left), deadline
        self._room, self._posted, self._taken, self._gathered = room, 0, 0, 0

    @classmethod
    def group(cls, size: int, *, deadline: float = 30.0) -> list[LocalAgreement]:
        """All members of a new agreement."""
        room = _Room(size)
        return [cls(room, rank, deadline) for rank in range(size)]

    def post(self, word: int) -> None:
        """Contribute this pass's word."""
        if self._posted != self._taken:
            raise AgreementError("`post` was called twice without a `take` between them; call each once per pass")
        self._room.put(("word", self._posted), self.rank, word)
        self._posted += 1

    def take(self) -> int | None:
        """The minimum of the pass before; waits for members that are a pass behind."""
        if self._posted == 0:
            return None
        self._taken = self._posted
        lowest: int = min(self._room.get(("word", self._posted - 1), self.deadline))
        return lowest

    def gather(self, blob: bytes) -> list[bytes]:
        """Every member's blob."""
        key = ("blob", self._gathered)
        self._gathered += 1
        self._room.put(key, self.rank, blob)
        return self._room.get(key, self.deadline)

    def leave(self) -> None:
        """As if this member had died: the others' calls raise from now on where they need it."""
        self._room.leave(self.rank)


class _Room:
    """Where members of a `LocalAgreement` put their words and blobs."""

    def __init__(self, size: int) -> None:
        self.left = [False] * size
        self._changed = threading.Condition()
        self._entries: dict[tuple[str, int], dict[int, Any]] = {}
        self._seen: dict[tuple[str, int], int] = {}

    def put(self, key: tuple[str, int], rank: int, value: Any) -> None:
        with self._changed:
            self._entries.setdefault(key, {})[rank] = value
            self._changed.notify_all()

    def get(self, key: tuple[str, int], deadline: float) -> list[Any]:
        with self._changed:
            entry = self._entries[key]
            size = len(self.left)
            self._changed.wait_for(lambda: len(entry) == size or self._absent(entry), deadline)
            if len(entry) < size:
                missing = self._absent(entry) or tuple(rank for rank in range(size) if rank not in entry)
                raise AgreementError(
                    f"rank {', '.join(map(str, missing))} did not answer within {deadline:g} s, or died", ranks=missing
                )
            self._seen[key] = self._seen.get(key, 0) + 1
            if self._seen[key] == size:
                del self._entries[key], self._seen[key]
            return [entry[rank] for rank in range(size)]

    def leave(self, rank: int) -> None:
        with self._changed:
            self.left[rank] = True
            self._changed.notify_all()

    def _absent(self, entry: dict[int, Any]) -> tuple[int, ...]:
        return tuple(rank for rank, left in enumerate(self.left) if left and rank not in entry)
