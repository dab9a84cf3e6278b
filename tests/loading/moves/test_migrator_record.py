"""Migrations with a real keeper of the layout for each rank."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from eplb_core import (
    ExpertLayout,
    LayoutClient,
    LayoutRecord,
    LayoutServer,
    Topology,
    WeightHost,
    attach_weights,
    fingerprints,
    topk_to_slots,
    verify_weights,
)
from tests.loading import mover_process
from tests.loading.engine_process import end, spawn, until
from tests.loading.fleets import Answer, Fleet, Keeper, fleet
from tests.loading.worlds import NEW, OLD, SIZES, stores_of, wrong_slots


def test_every_keeper_follows_and_a_second_engine_stops_the_moves(tmp_path: Path) -> None:
    """R26, R28, R32, R15."""
    servers = [LayoutServer(str(tmp_path / f"{rank}"), LayoutRecord(OLD)) for rank in (0, 1)]
    clients = {rank: LayoutClient(str(tmp_path / f"{rank}"), "a") for rank in (0, 1)}
    with fleet(OLD, records=clients) as ranks:
        ranks.move(NEW)
        assert ranks.first.status.cause == ""
        for server in servers:
            assert server.state is not None
            assert (server.state.version, server.state.digest) == (3, NEW.digest)
        with LayoutClient(str(tmp_path / "1"), "b"):
            ranks.move(OLD)
            assert (ranks.first.status.cause, ranks.first.status.rank) == ("busy", 1)
            assert ranks.first.layout == NEW
        ranks.move(OLD)
    for rank, server in enumerate(servers):
        clients[rank].close()
        assert server.state is not None
        server.close()


def test_an_engine_that_loaded_from_disk_moves_without_the_keepers(tmp_path: Path) -> None:
    """R25: the weights are its own; what keepers on this machine keep is not asked and does not change."""
    with LayoutServer(str(tmp_path / "0"), LayoutRecord(OLD)) as server, LayoutClient(str(tmp_path / "0"), "other"):
        with fleet(OLD) as ranks:
            ranks.move(NEW)
            assert (ranks.first.status.cause, ranks.first.layout) == ("", NEW)
        assert server.state is not None
        assert (server.state.layout, server.state.version, server.state.begun) == (OLD, 0, 0)


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
            ranks.move(new)
            assert ranks.reached(new)
            assert ranks.first.status.installed == 1
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
    """I6, R27: at `begin` they are those of the layout before, at `commit` those of the one after."""
    keepers = {rank: Inspector(OLD, rank) for rank in (0, 1)}
    with fleet(OLD, records=keepers) as ranks:
        for keeper in keepers.values():
            keeper.ranks = ranks
        ranks.move(NEW)
        assert ranks.first.layout == NEW
    for keeper in keepers.values():
        assert keeper.said == ["[]", "begin", "commit", "[]"] * 3


def outcome_of_a_kill(folder: Path, seed: int) -> str:
    """Kill an engine of two ranks while it moves experts; `clean` if both records say what the slots hold."""
    paths = [str(folder / f"host{rank}") for rank in (0, 1)]

    def load(layout: ExpertLayout | None, rank: int) -> dict[str, torch.Tensor]:
        stores = stores_of(mover_process.FIRST, rank, whole=False)
        return {
            f"{layer}.{name}": torch.stack([store.row(name, slot) for slot in range(store.num_slots)])
            for layer, store in enumerate(stores)
            for name in SIZES
        }

    hosts = [
        WeightHost(path, load, config=mover_process.CONFIG, layout=mover_process.FIRST, rank=rank)
        for rank, path in enumerate(paths)
    ]
    engine = spawn(sys.executable, "-m", "tests.loading.mover_process", *paths, str(seed))
    try:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "ready\n"
        until(lambda: all(host.state is not None and host.state.version > seed % 5 for host in hosts))
        time.sleep(random.Random(seed).random() * 0.01)
        end(engine)
        until(lambda: all(host.state is not None and host.state.engines == () for host in hosts))
        states = [host.state for host in hosts]
        for rank, state in enumerate(states):
            assert state is not None
            if not state.dirty:
                tensors: dict[str, Any] = {}
                with LayoutClient(paths[rank], "late") as client:
                    options: Any = {"config": mover_process.CONFIG, "layout": state.layout, "rank": rank}
                    attach_weights(client, tensors, **options)
                    assert wrong_slots(mover_process.stores(tensors), state.layout, rank) == []
        if any(state is None or state.dirty for state in states):
            return "dirty"
        assert len({state.version for state in states if state is not None}) == 1
        return "clean"
    finally:
        end(engine)
        for host in hosts:
            host.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_record_that_is_not_dirty_says_what_the_slots_hold_whenever_the_engine_was_killed(
    tmp_path: Path, seed: int
) -> None:
    """I2, R6, R7."""
    assert outcome_of_a_kill(tmp_path, seed) in ("clean", "dirty")
