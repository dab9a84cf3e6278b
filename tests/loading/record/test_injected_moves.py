"""Migrations that tell a keeper, while one system call of keeper or engine fails."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eplb_core import ExpertLayout, LayoutClient
from tests.loading.fleets import Keeper, fleet
from tests.loading.record.injected import LAYOUT, ROWS, Fault, NoExceptions, TruthError, World
from tests.loading.record.injector import Injector, choices

TARGET = LAYOUT.replace(
    ExpertLayout([ROWS[0], ROWS[2]], LAYOUT.num_experts, topology=LAYOUT.topology), list(range(LAYOUT.num_layers))
)


@pytest.fixture
def injector() -> Iterator[Injector]:
    """Installed; the library's log must tell of no exception."""
    made, log, handler = Injector(), logging.getLogger("eplb_core"), NoExceptions()
    log.addHandler(handler)
    with made.installed():
        yield made
    log.removeHandler(handler)
    assert handler.met == []


class Under:
    """A client whose calls are those of one process of the injector's; the Migrator has more than one thread."""

    def __init__(self, injector: Injector, client: LayoutClient) -> None:
        self._injector, self._client, self._lock = injector, client, threading.Lock()

    @property
    def adopted(self) -> int:
        return self._client.adopted

    def _call(self, name: str, *arguments: Any) -> Any:
        with self._lock, self._injector.under("engine"):
            return getattr(self._client, name)(*arguments)

    def begin(self, layers: Any, version: int) -> Any:
        return self._call("begin", layers, version)

    def commit(self, layers: Any, rows: Any) -> Any:
        return self._call("commit", layers, rows)

    def abort(self, layers: Any) -> Any:
        return self._call("abort", layers)

    def refuse_moves(self, reason: str) -> None:
        self._call("refuse_moves", reason)

    def close(self) -> None:
        self._call("close")


def migrate(folder: Path, injector: Injector, fault: Fault | None = None) -> tuple[list[tuple[str, str]], str]:
    """There and back with one fault; who made which call, and how it ended.

    Every pass looks at every slot (`Fleet.look`); at the end the record says what the slots hold, or that it does not
    know.
    """
    for each in folder.iterdir():
        each.unlink()
    world, made = World(folder, injector), list[tuple[str, str]]()
    world.start_keeper()
    inner = injector.choose

    def choose(process: str, call: str) -> str | None:
        made.append((process.split()[0], call))
        return inner(process, call)

    with injector.under("engine"):
        client = LayoutClient(world.path, "engine", deadline=1.0)
    assert client.found is not None
    client.adopted = client.found.version
    record = Under(injector, client)
    injector.choose = choose
    world.arm(fault)
    with fleet(LAYOUT, records={0: record, 1: Keeper(LAYOUT)}) as ranks:
        for goal in (TARGET, LAYOUT):
            started = [migrator.start(goal) for migrator in ranks.migrators.values()]
            if all(started):
                ranks.until_idle()
        reached, cause = ranks.first.layout, ranks.first.status.cause
        world.arm(None)
        world.pump()
        check(world, reached)
        world.weights = reached.physical_to_logical_map
        world.kill_keeper()
        world.start_keeper()  # compares the file with the weights
        check(world, reached)
    record.close()
    injector.choose = inner
    world.finish()
    return made, cause


def check(world: World, reached: ExpertLayout) -> None:
    """The record has the layout that the weights are in, or says that it does not know."""
    state = None if world.server is None else world.server.state
    if state is not None and not state.dirty and state.pending is None and state.digest != reached.digest:
        raise TruthError(f"the keeper says {state}, and the slots hold {reached.digest}")


@pytest.mark.slow
def test_each_call_of_a_recorded_migration_may_fail_in_each_way(tmp_path: Path, injector: Injector) -> None:
    made, cause = migrate(tmp_path, injector)
    assert cause == ""
    seen: Counter[tuple[str, str]] = Counter()
    ended: Counter[str] = Counter()
    for index, (process, call) in enumerate(made):
        seen[process, call] += 1
        for kind, way in enumerate(choices(call)):
            # The engine is this process; what becomes of one that is killed is in test_migrator_record.py.
            if seen[process, call] <= 2 and (process, way) != ("engine", "kill"):
                ended[migrate(tmp_path, injector, Fault(index, kind))[1]] += 1
    assert ended.keys() >= {"", "refused", "record"}
    assert {hit.side for hit in injector.hits} == {"keeper", "client"}
    assert injector.hits.total() > 50
