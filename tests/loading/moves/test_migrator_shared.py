"""Migrations with keepers, in a process where much else happens: a second Migrator, forks, no descriptor left."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eplb_core import LayoutClient, LayoutRecord, LayoutServer
from tests.loading.descriptors import no_descriptor_left
from tests.loading.fleets import fleet
from tests.loading.worlds import NEW, OLD


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[LayoutServer]]:
    """A keeper for each rank."""
    made = [LayoutServer(tmp_path / f"{rank}", LayoutRecord(OLD)) for rank in (0, 1)]
    yield made
    for server in made:
        server.close()


def clients_of(servers: list[LayoutServer], name: str) -> dict[int, LayoutClient]:
    return {rank: LayoutClient(server.path, name) for rank, server in enumerate(servers)}


def versions(servers: list[LayoutServer]) -> list[tuple[int, str, str]]:
    """Version, digest and trouble of each keeper's record."""
    return [(state.version, state.digest, state.dirty) for server in servers if (state := server.state) is not None]


@pytest.mark.slow
def test_of_two_migrators_on_the_same_keepers_neither_moves_until_one_has_left(servers: list[LayoutServer]) -> None:
    a, b = clients_of(servers, "a"), clients_of(servers, "b")
    with fleet(OLD, records=a) as first, fleet(OLD, records=b) as second:
        for each in (first, second, first):
            each.move(NEW)
            assert (each.first.status.cause, each.first.layout) == ("busy", OLD)
        assert versions(servers) == [(0, OLD.digest, "")] * 2
        for client in a.values():
            client.close()
        second.move(NEW)
        assert (second.first.status.cause, second.first.layout) == ("", NEW)
        first.move(NEW)  # it has left, and is told so
        assert first.first.layout == OLD
        assert first.first.status.cause
    assert versions(servers) == [(3, NEW.digest, "")] * 2
    for client in b.values():
        client.close()


@pytest.mark.slow
def test_a_fork_in_a_migration_changes_nothing(servers: list[LayoutServer]) -> None:
    """The child closes its parent's clients, as a program does that ends in good order."""
    clients = clients_of(servers, "a")
    with fleet(OLD, records=clients) as ranks:
        forks = iter(range(4))

        def fork() -> None:
            if next(forks, None) is None:
                return
            child = os.fork()
            if child == 0:
                try:
                    mine: list[LayoutClient | LayoutServer] = [*clients.values(), *servers]
                    for each in mine:
                        each.close()
                finally:
                    os._exit(0)
            assert os.waitpid(child, 0)[1] == 0

        ranks.move(NEW, meanwhile=fork)
        assert (ranks.first.status.cause, ranks.first.layout) == ("", NEW)
    assert versions(servers) == [(3, NEW.digest, "")] * 2
    for client in clients.values():
        client.close()


@pytest.mark.slow
def test_a_migration_needs_no_descriptor_and_no_wall_clock(
    servers: list[LayoutServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Someone sets the clock by years, back and forth."""
    jumps = itertools.cycle([4e9, 0.0, -4e9])
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    clients = clients_of(servers, "a")
    with fleet(OLD, records=clients) as ranks:
        with no_descriptor_left():
            ranks.move(NEW)
            assert (ranks.first.status.cause, ranks.first.layout) == ("", NEW)
        ranks.move(OLD)
    assert versions(servers) == [(6, OLD.digest, "")] * 2
    for client in clients.values():
        client.close()
