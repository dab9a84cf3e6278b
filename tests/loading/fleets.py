"""Ranks with a Migrator each, the loop of passes, and parts that fail where they are told to."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from eplb_core import DispatchTables, ExpertLayout, ExpertStore
from eplb_core.loading.agreement import LocalAgreement
from eplb_core.loading.moves.migrator import Migrator
from eplb_core.loading.moves.progress import MOVING, word
from eplb_core.loading.transport import ReadState, Status, Transport
from eplb_core.loading.transports import DeferredCopy, LocalCopy
from tests.loading.worlds import SIZES, World, label

T = TypeVar("T")
SLOT = sum(SIZES.values())
LONG = 20.0


class FailsAt(LocalCopy):
    """The n-th read fails."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.left = n

    def _copy(self, ticket: Any, peer: Any) -> None:
        self.left -= 1
        if self.left < 0:
            ticket.finish(Status(ReadState.FAILED, "the cable was cut"))
        else:
            super()._copy(ticket, peer)


def breaks(transport: T, call: str, error: BaseException, *, after: int = 0, times: int = sys.maxsize) -> T:
    """The transport, whose method `call` raises so many times after so many calls."""
    whole, calls = getattr(transport, call), itertools.count()

    def broken(*arguments: Any, **options: Any) -> Any:
        if after <= next(calls) < after + times:
            raise error
        return whole(*arguments, **options)

    setattr(transport, call, broken)
    return transport


def silent(call: str) -> None:
    """Nothing to say."""


class Watched:
    """An agreement that tells of each call before and after it; whoever is told may raise."""

    def __init__(
        self, inner: LocalAgreement, before: Callable[[str], None] = silent, after: Callable[[str], None] = silent
    ) -> None:
        self.inner, self.rank, self.size = inner, inner.rank, inner.size
        self.before, self.after = before, after

    def post(self, word: int) -> None:
        self._call("post", word)

    def take(self) -> Any:
        return self._call("take")

    def gather(self, blob: bytes) -> Any:
        return self._call("gather", blob)

    def _call(self, name: str, *arguments: Any) -> Any:
        self.before(name)
        answer = getattr(self.inner, name)(*arguments)
        self.after(name)
        return answer


class Answer(NamedTuple):
    status: str = "ok"
    reason: str = ""
    version: int | None = None
    digest: str | None = None


class Keeper:
    """A record that follows the moves it is told of, and answers otherwise where told to."""

    def __init__(self, layout: ExpertLayout, begin: Answer | None = None, digest: str | None = None) -> None:
        self.layout, self.adopted, self.digest = layout, 0, digest
        self.answer = begin or Answer()
        self.pending: list[int] = []
        self.said: list[str] = []

    def begin(self, layers: list[int], version: int) -> Answer:
        assert version == self.adopted
        assert not self.pending
        self.said.append("begin")
        if self.answer.status == "ok":
            self.pending = list(layers)
        return self.answer

    def commit(self, layers: list[int], rows: np.ndarray[Any, Any]) -> Answer:
        assert layers == self.pending
        p2l = self.layout.physical_to_logical_map.copy()
        p2l[layers] = rows
        self.layout = ExpertLayout(p2l, self.layout.num_experts, topology=self.layout.topology)
        self.pending, self.adopted = [], self.adopted + 1
        self.said.append("commit")
        return Answer(version=self.adopted, digest=self.digest or self.layout.digest)

    def abort(self, layers: list[int]) -> Answer:
        assert layers == self.pending
        self.pending = []
        self.said.append("abort")
        return Answer()

    def refuse_moves(self, reason: str) -> None:
        self.said.append("off")


class Shelf:
    """Every expert, by label."""

    def fetch(self, layer: int, expert: int, rows: Sequence[torch.Tensor]) -> None:
        for name, row in zip(SIZES, rows, strict=True):
            row.copy_(label(layer, expert, name))


def alone(stores: Sequence[ExpertStore], layout: ExpertLayout, **options: Any) -> Migrator:
    """A Migrator of rank 0 that agrees with itself."""
    own = {"rank": 0, "transport": LocalCopy(), "agreement": LocalAgreement.group(1)[0]}
    return Migrator(stores, layout, **{**own, **options})


class Fleet(World):
    """Ranks with a Migrator each, and the loop of passes."""

    def __init__(
        self,
        layout: ExpertLayout,
        make: Callable[[], Transport] = LocalCopy,
        *,
        ranks: Sequence[int] | None = None,
        mode: Any = "even",
        transports: dict[int, Transport] | None = None,
        records: dict[int, Any] | None = None,
        agree: Callable[[LocalAgreement], Any] = lambda member: member,
        slots: Sequence[int | None] | None = None,
        max_replicas: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(layout, make, ranks, agree, slots)
        self.transports |= transports or {}
        self.tables = {rank: DispatchTables(layout, rank=rank, mode=mode) for rank in self.ranks}
        for tables in self.tables.values():
            tables.max_replicas = max_replicas or tables.max_replicas
        self.records, self.options = records or {}, {"deadline": LONG, **options}
        self.installed: list[int] = []
        self.make(layout)

    def make(self, layout: ExpertLayout) -> None:
        """Give each rank a Migrator."""
        made: list[Any] = self.each(
            lambda rank: Migrator(
                self.stores[rank],
                layout,
                rank=rank,
                transport=self.transports[rank],
                agreement=self.agreements[rank],
                tables=self.tables[rank],
                record=self.records.get(rank),
                **self.options,
            )
        )
        failed = [result for result in made if isinstance(result, BaseException)]
        if failed:
            raise failed[0]
        self.migrators: dict[int, Migrator] = dict(zip(self.ranks, made, strict=True))

    @property
    def first(self) -> Migrator:
        return self.migrators[self.ranks[0]]

    def one_pass(self) -> tuple[int, ...]:
        """All ranks poll; then they must agree in layout, tables and status, and every slot must hold its expert."""
        rows = {rank: migrator.poll() for rank, migrator in self.migrators.items()}
        assert len(set(rows.values())) == 1
        self.look()
        self.installed += rows[self.ranks[0]]
        return rows[self.ranks[0]]

    def look(self) -> None:
        layout = self.first.layout
        agreed = {
            (m.layout.digest, m.idle, m.status.phase, m.status.migration, m.status.installed, m.status.cause)
            for m in self.migrators.values()
        }
        assert len(agreed) == 1
        for rank in self.ranks:
            assert self.tables[rank].layout == layout
        self.check(layout)

    def passes(self, until: Callable[[], bool], meanwhile: Callable[[], object] = lambda: None) -> int:
        """Passes until something is so; workers get their turn in between."""
        count = 0

        def pass_and_count() -> None:
            nonlocal count
            self.one_pass()
            meanwhile()
            count += 1

        self.wait(until, pass_and_count)
        return count

    def passes_pause(self) -> None:
        """Give workers a turn."""
        threading.Event().wait(0.0005)

    def until_idle(self, meanwhile: Callable[[], object] = lambda: None) -> int:
        return self.passes(lambda: self.first.idle, meanwhile)

    def start(self, target: Any) -> None:
        for migrator in self.migrators.values():
            assert migrator.start(target)

    def move(self, target: Any, meanwhile: Callable[[], object] = lambda: None) -> int:
        """A migration from its start to its end; the number of passes."""
        self.start(target)
        return self.until_idle(meanwhile)

    def start_reading(self, target: Any, reads: DeferredCopy) -> int:
        """Start, and passes until a read is under way over this transport."""
        self.start(target)
        return self.passes(lambda: reads.waiting == 1)

    def until_staged(self) -> None:
        """Passes until all ranks have posted that the first step of the first migration is staged."""
        self.passes(lambda: all(m._posted == word(1, MOVING, 1) for m in self.migrators.values()))

    def wait(self, until: Callable[[], bool], meanwhile: Callable[[], object] = lambda: None) -> None:
        """Until something is so, without looks at slots and status in between."""
        end = time.monotonic() + LONG
        while not until():
            assert time.monotonic() < end, self.first.status
            meanwhile()
            self.passes_pause()

    def poll(self) -> list[tuple[int, ...]]:
        """What each rank's poll returns, without a look."""
        return [migrator.poll() for migrator in self.migrators.values()]

    def poll_until_idle(self) -> list[tuple[int, ...]]:
        """Passes without looks; what all the polls returned."""
        polled: list[tuple[int, ...]] = []
        self.wait(lambda: self.first.idle, lambda: polled.extend(self.poll()))
        return polled

    def pause(self, **options: Any) -> list[Any]:
        return self.each(lambda rank: self.migrators[rank].pause(**options))

    def resume(self) -> None:
        for migrator in self.migrators.values():
            migrator.resume()

    def rejoin(self) -> list[Any]:
        """The ranks that are there meet anew and go on."""
        self.meet()
        self.migrators = {rank: self.migrators[rank] for rank in self.ranks}
        return self.each(lambda rank: self.migrators[rank].rejoin(self.agreements[rank]))

    def reached(self, layout: ExpertLayout, cause: str = "") -> bool:
        """Whether the last migration ended so."""
        return (self.first.status.cause, self.first.layout) == (cause, layout)

    def stop(self) -> list[Any]:
        return self.each(lambda rank: self.migrators[rank].stop(LONG))


@contextmanager
def fleet(*args: Any, clean: bool = True, **options: Any) -> Iterator[Fleet]:
    made = Fleet(*args, **options)
    try:
        yield made
    finally:
        stopped = made.stop()
    assert not clean or stopped == [True] * len(made.ranks)
