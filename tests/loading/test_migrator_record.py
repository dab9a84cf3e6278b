"""Migrations with a real keeper of the layout for each rank."""

from __future__ import annotations

from pathlib import Path

from eplb_core import ExpertLayout, LayoutClient, LayoutRecord, LayoutServer, Topology
from tests.loading.fleets import fleet

OLD = ExpertLayout([[0, 1, 2, 3]] * 3, 4, topology=Topology(2))
NEW = ExpertLayout([[2, 1, 0, 3]] * 3, 4, topology=Topology(2))


def test_every_keeper_follows_and_a_second_engine_stops_the_moves(tmp_path: Path) -> None:
    """R26, R28, R32, R15."""
    servers = [LayoutServer(str(tmp_path / f"{rank}"), LayoutRecord(OLD)) for rank in (0, 1)]
    clients = {rank: LayoutClient(str(tmp_path / f"{rank}"), "a") for rank in (0, 1)}
    with fleet(OLD, records=clients) as ranks:
        ranks.start(NEW)
        ranks.until_idle()
        assert ranks.first.status.cause == ""
        for server in servers:
            assert server.state is not None
            assert (server.state.version, server.state.digest) == (3, NEW.digest)
        with LayoutClient(str(tmp_path / "1"), "b"):
            ranks.start(OLD)
            ranks.until_idle()
            assert (ranks.first.status.cause, ranks.first.status.rank) == ("busy", 1)
            assert ranks.first.layout == NEW
        ranks.start(OLD)
        ranks.until_idle()
    for rank, server in enumerate(servers):
        clients[rank].close()
        assert server.state is not None
        server.close()
