"""Migrations with a real keeper of the layout for each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from eplb_core import (
    ExpertLayout,
    LayoutClient,
    LayoutRecord,
    LayoutServer,
    Topology,
    fingerprints,
    topk_to_slots,
    verify_weights,
)
from tests.loading.fleets import Answer, Fleet, Keeper, fleet
from tests.loading.worlds import wrong_slots

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


def test_dispatch_weights_and_version_all_show_a_move(tmp_path: Path) -> None:
    """B12: experts 0 and 3 change places; afterwards a token of expert 0 goes where expert 3 was."""
    old = ExpertLayout([[0, 1, 2, 3]], 4, topology=Topology(2))
    new = ExpertLayout([[3, 1, 2, 0]], 4, topology=Topology(2))
    tokens = torch.tensor([[0], [3]])
    with (
        LayoutServer(str(tmp_path / "0"), LayoutRecord(old)) as server,
        LayoutClient(str(tmp_path / "0"), "a") as client,
    ):
        second = Keeper(old)
        with fleet(old, records={0: client, 1: second}) as ranks:
            assert topk_to_slots(tokens, ranks.tables[0].layer(0)).tolist() == [[0], [3]]
            before = [fingerprints(ranks.stores[rank]) for rank in ranks.ranks]
            ranks.start(new)
            ranks.until_idle()
            assert topk_to_slots(tokens, ranks.tables[0].layer(0)).tolist() == [[3], [0]]
            after = [fingerprints(ranks.stores[rank]) for rank in ranks.ranks]
            reference = verify_weights(before, old).by_expert
            assert verify_weights(after, new, reference=reference).faults == ()
            assert verify_weights(before, new, reference=reference).faults != ()
            assert server.state is not None
            assert (server.state.version, server.state.digest, second.adopted) == (1, new.digest, 1)


class Inspector(Keeper):
    """Looks at the weights whenever it is told something."""

    def __init__(self, layout: ExpertLayout, rank: int) -> None:
        super().__init__(layout)
        self.rank = rank
        self.ranks: Fleet | None = None

    def begin(self, layers: list[int], version: int) -> Answer:
        self.look()
        return super().begin(layers, version)

    def commit(self, layers: list[int], rows: Any) -> Answer:
        reply = super().commit(layers, rows)
        self.look()
        return reply

    def look(self) -> None:
        assert self.ranks is not None
        self.said.append(str(wrong_slots(self.ranks.stores[self.rank], self.layout, self.rank)))


def test_a_keeper_is_told_when_the_bytes_are_in_place_and_not_before() -> None:
    """I6: at `begin` they are those of the layout before, at `commit` those of the one after."""
    keepers = {rank: Inspector(OLD, rank) for rank in (0, 1)}
    with fleet(OLD, records=keepers) as ranks:
        for keeper in keepers.values():
            keeper.ranks = ranks
        ranks.start(NEW)
        ranks.until_idle()
        assert ranks.first.layout == NEW
    for keeper in keepers.values():
        assert keeper.said == ["[]", "begin", "commit", "[]"] * 3
