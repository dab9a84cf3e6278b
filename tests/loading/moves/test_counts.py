"""What operators read of the moves of a rank is what was moved."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from eplb_core import metrics_text, transfers
from eplb_core.exposition import samples
from eplb_core.loading.moves.progress import CAUSES
from tests.loading.fleets import SLOT, Answer, Fleet, Keeper, fleet
from tests.loading.worlds import NEW, OLD, World

pytestmark = pytest.mark.usefixtures("own_numbers")


def of_ranks(name: str, *labels: str) -> list[float]:
    told = samples()
    return [told[f"eplb_{name}", (rank, *labels)] for rank in "01"]


@pytest.fixture
def ranks() -> Iterator[Fleet]:
    with fleet(OLD) as made:
        yield made


def test_experts_bytes_layers_and_migrations_are_as_counted(ranks: Fleet) -> None:
    assert of_ranks("migrations_total", "done") == [0.0, 0.0]
    ranks.move(NEW)
    assert of_ranks("experts_received_total") == transfers(OLD, NEW).sum(axis=0).tolist() == [3, 3]
    ranks.move(OLD)
    received = (transfers(OLD, NEW) + transfers(NEW, OLD)).sum(axis=0)
    assert of_ranks("experts_received_total") == received.tolist()
    assert of_ranks("read_bytes_total") == (received * SLOT).tolist()
    assert of_ranks("layers_installed_total") == [6.0, 6.0]
    assert of_ranks("migrations_total", "done") == [2.0, 2.0]
    for cause in CAUSES:
        assert of_ranks("migrations_total", cause) == [0.0, 0.0]
    status = ranks.first.status
    assert of_ranks("read_seconds_total")[0] == status.read_s > 0.0
    assert of_ranks("install_seconds_total")[0] == status.install_s > 0.0
    assert of_ranks("install_longest_seconds")[0] == status.worst_install_s
    assert of_ranks("quarantined_slots") == of_ranks("moves_off") == of_ranks("migration_running") == [0.0, 0.0]


def test_layers_that_are_moved_in_parts_count_once() -> None:
    with fleet(OLD, staging=SLOT) as ranks:
        ranks.move(NEW)
        assert of_ranks("layers_installed_total") == [3.0, 3.0]


def test_a_migration_that_runs_and_one_that_is_stopped_are_told(ranks: Fleet) -> None:
    ranks.start(NEW)
    assert of_ranks("migration_running") == [1.0, 1.0]
    ranks.pause()
    assert of_ranks("migrations_total", "paused") == [1.0, 1.0]
    assert of_ranks("migration_running") == of_ranks("moves_off") == [0.0, 0.0]


def test_a_record_that_refuses_turns_moves_off() -> None:
    keepers: Any = {rank: Keeper(OLD, begin=Answer("refused", "no")) for rank in range(2)}
    with fleet(OLD, records=keepers) as ranks:
        ranks.move(NEW)
        assert of_ranks("migrations_total", "refused") == [1.0, 1.0]
        assert of_ranks("moves_off") == [1.0, 1.0]


def test_what_was_moved_stays_when_the_migrators_are_gone_and_gauges_do_not() -> None:
    with fleet(OLD) as ranks:
        ranks.move(NEW)
    del ranks
    gc.collect()
    assert of_ranks("experts_received_total") == [3.0, 3.0]
    assert not [name for name, _ in samples() if name == "eplb_moves_off"]


def test_moves_while_nothing_runs_count_too() -> None:
    world = World(OLD)
    reached = world.move_all(NEW)
    assert reached == [NEW, NEW]
    assert of_ranks("experts_received_total") == of_ranks("layers_installed_total") == [3.0, 3.0]
    assert of_ranks("read_bytes_total") == [3.0 * SLOT] * 2


def test_a_migrator_that_cannot_tell_goes_on(ranks: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    for migrator in ranks.migrators.values():
        monkeypatch.setattr(migrator._counts, "ended", None)
    assert "eplb_migrations_total" not in metrics_text()
    monkeypatch.undo()
    ranks.move(NEW)
    assert np.array_equal(ranks.first.layout.physical_to_logical_map, NEW.physical_to_logical_map)
