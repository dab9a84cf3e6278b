"""At start-up all ranks take one decision, whatever their records say, and none is left waiting."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from eplb_core import (
    DispatchTables,
    ExpertLayout,
    LayoutAgreementError,
    LayoutClient,
    LayoutRecord,
    LayoutServer,
    Topology,
    agree_on_layout,
    static_dispatch_table,
)
from eplb_core.loading.agreement import LocalAgreement
from eplb_core.loading.record.agree import Decision, Finding, decide
from eplb_core.loading.record.state import RecordState
from tests.loading.worlds import on_threads

RANKS = 2
TOPOLOGY = Topology(num_ranks=RANKS)
OWN = ExpertLayout([[0, 1, 2, 3, 3, 0], [0, 1, 2, 3, 1, 2]], 4, topology=TOPOLOGY)
MOVED = ExpertLayout([[3, 2, 1, 0, 0, 3], [0, 1, 2, 3, 1, 2]], 4, topology=TOPOLOGY)
SHAPE = (2, 6, 4, 2)

PLAIN = Finding(OWN.digest, SHAPE)
FRESH = PLAIN._replace(record=True, digest=OWN.digest, record_shape=SHAPE)
AT_1 = FRESH._replace(version=1, digest=MOVED.digest)


def on_all_ranks(call: Callable[[int, Any], Any], size: int = RANKS) -> list[Any]:
    """What each rank returns or raises, with an agreement that can do nothing but gather."""
    members = LocalAgreement.group(size, deadline=20.0)
    agreements = [SimpleNamespace(rank=each.rank, size=size, gather=each.gather) for each in members]
    return on_threads([partial(call, rank, agreement) for rank, agreement in enumerate(agreements)])


class Keepers:
    """A record and its server on each rank."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack

    def serve(self, *states: RecordState | None) -> list[str]:
        paths = []
        for rank, state in enumerate(states):
            path = str(self._folder / f"rank{rank}")
            if state is not None:
                self._stack.enter_context(LayoutServer(path, LayoutRecord.of_state(state)))
            paths.append(path)
        return paths

    def clients(self, *states: RecordState) -> list[LayoutClient]:
        return [self.client(path) for path in self.serve(*states)]

    def client(self, path: str, engine: str = "new") -> LayoutClient:
        return self._stack.enter_context(LayoutClient(path, engine))


@pytest.fixture
def keepers(tmp_path: Path) -> Iterator[Keepers]:
    with ExitStack() as stack:
        yield Keepers(tmp_path, stack)


def start(clients: list[LayoutClient | None], **more: Any) -> list[Any]:
    return on_all_ranks(
        lambda rank, agreement: agree_on_layout(clients[rank], own=OWN, agreement=agreement, **more), len(clients)
    )


# ---- the decision ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([PLAIN, PLAIN], Decision("own")),
        ([FRESH, FRESH], Decision("own")),
        ([FRESH, PLAIN], Decision("own")),
        ([AT_1, AT_1], Decision("adopt", version=1)),
        ([AT_1._replace(digest=OWN.digest)] * 2, Decision("own", version=1)),
        ([AT_1, AT_1._replace(own="other", adopts=True)], Decision("adopt", version=1)),
        ([FRESH, FRESH._replace(pending="a move", waited=9.9)], Decision("wait")),
        ([FRESH._replace(pending="a move"), PLAIN], Decision("wait")),
    ],
)
def test_ranks_start_together(found: list[Finding], expected: Decision) -> None:
    """R19, R21."""
    assert decide(found, 10.0) == expected


@pytest.mark.parametrize(
    ("found", "ranks", "reason"),
    [
        ([AT_1, AT_1._replace(version=2)], (1,), r"rank 0 is at version 1, digest \w{12}, rank 1 at version 2"),
        ([AT_1, AT_1._replace(digest="other")], (1,), "digest other; restart the keepers"),
        ([FRESH, AT_1], (1,), "rank 0 is at version 0, .*rank 1 at version 1"),
        ([AT_1, PLAIN], (0,), "rank 1 keeps no record, and the weights of rank 0 are at version 1; give"),
        ([PLAIN, PLAIN, AT_1], (2,), "ranks 0, 1 keep no record, and the weights of rank 2"),
        ([AT_1, FRESH._replace(failure="cannot be read")], (1,), "^rank 1: cannot be read$"),
        ([AT_1._replace(failure="a"), AT_1._replace(failure="b")], (0, 1), "^rank 0: a; rank 1: b$"),
        ([FRESH._replace(pending="x"), FRESH._replace(failure="dirty")], (1,), "^rank 1: dirty$"),
        (
            [FRESH._replace(waited=10.0), FRESH._replace(pending="the move", waited=3.0)],
            (1,),
            "rank 1: the move has not ended for 10 s; stop that engine",
        ),
        ([AT_1, AT_1._replace(shape=(2, 8, 4, 2))], (1,), "rank 1: the record has 6 slots, the engine 8"),
        ([AT_1._replace(shape=(3, 6, 4, 2))] * 2, (0, 1), "rank 0: the record has 2 layers, the engine 3"),
        ([AT_1._replace(shape=(2, 6, 5, 2))] * 2, (0, 1), "the record has 4 experts, the engine 5"),
        ([AT_1._replace(shape=(2, 6, 4, 3))] * 2, (0, 1), "the record has 2 ranks, the engine 3"),
        ([AT_1, AT_1._replace(adopts=False)], (1,), r"rank 1: experts have moved \(version 1\), and the engine routes"),
        ([PLAIN, PLAIN._replace(own="other")], (1,), "rank 1 starts from layout other, rank 0 from"),
        ([FRESH, PLAIN._replace(own="other")], (1,), "rank 1 starts from layout other"),
    ],
)
def test_ranks_fail_together(found: list[Finding], ranks: tuple[int, ...], reason: str) -> None:
    """R20, R21, R22."""
    decision = decide(found, 10.0)
    assert (decision.action, decision.ranks) == ("fail", ranks)
    assert re.search(reason, decision.reason), decision.reason


def test_an_engine_without_balancing_starts_where_nothing_has_moved() -> None:
    assert decide([FRESH._replace(adopts=False)] * 2, 10.0) == Decision("own")


# ---- ranks and keepers -----------------------------------------------------------------------------------------------


def test_without_keepers_the_engine_starts_on_its_own_layout(keepers: Keepers) -> None:
    """R17."""
    paths = keepers.serve(None, None)
    assert start([None, keepers.client(paths[1])]) == [(OWN, 0)] * 2


def test_a_keeper_without_a_record_is_none(keepers: Keepers, tmp_path: Path) -> None:
    with LayoutServer(tmp_path / "weights", None):
        assert start([keepers.client(str(tmp_path / "weights"))]) == [(OWN, 0)]


def test_an_engine_adopts_the_layout_that_another_one_left(keepers: Keepers, caplog: pytest.LogCaptureFixture) -> None:
    """I1, R23, R33: it is logged, and all derived from it is as if the engine had been given that layout at first."""
    caplog.set_level(logging.INFO, "eplb_core")
    clients = keepers.clients(*[RecordState(MOVED, version=7)] * 2)
    for rank, (layout, version) in enumerate(start(list(clients))):
        assert (layout, version, clients[rank].adopted) == (MOVED, 7, 7)
        assert layout.topology is OWN.topology
        assert np.array_equal(layout.logical_to_physical_map, MOVED.logical_to_physical_map)
        assert np.array_equal(static_dispatch_table(layout), static_dispatch_table(MOVED))
        for mode in ("static", "even"):
            adopted, given = (DispatchTables(each, rank=rank, mode=mode) for each in (layout, MOVED))
            for layer in range(layout.num_layers):
                for mine, theirs in zip(adopted.layer(layer), given.layer(layer), strict=True):
                    assert mine is theirs or torch.equal(torch.as_tensor(mine), torch.as_tensor(theirs))
    assert caplog.messages == [f"starting on the recorded layout {MOVED.digest[:12]}, version 7"] * 2


def test_a_record_that_equals_the_own_layout_keeps_the_engines_object(keepers: Keepers) -> None:
    """R19."""
    clients = keepers.clients(*[RecordState(OWN, version=2)] * 2)
    for layout, version in start(list(clients)):
        assert layout is OWN
        assert version == 2


def test_one_rank_without_a_record_turns_moves_off(keepers: Keepers) -> None:
    """R30: the ranks that do have one may not move experts by themselves."""
    client = keepers.client(keepers.serve(RecordState(OWN))[0])
    assert start([client, None]) == [(OWN, 0)] * 2
    assert client.begin([0], 0) == ("refused", "rank 1 keeps no record of shared weights", None, None)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (RecordState(MOVED, version=2), "rank 0 is at version 1, digest .* rank 1 at version 2"),
        (
            RecordState(MOVED, version=1, dirty="somebody died"),
            "rank 1: nobody knows what the slots hold: somebody died",
        ),
        (None, "rank 1 keeps no record, and the weights of rank 0 are at version 1"),
    ],
)
def test_all_ranks_fail_with_the_reason_and_none_waits(
    keepers: Keepers, state: RecordState | None, reason: str
) -> None:
    """I4, R20."""
    paths = keepers.serve(RecordState(MOVED, version=1), state)
    errors = start([keepers.client(path) for path in paths])
    for error in errors:
        assert isinstance(error, LayoutAgreementError)
        assert re.search(reason, str(error)), error
        assert error.ranks in ((0,), (1,))
    assert str(errors[0]) == str(errors[1])


def test_a_rank_that_cannot_read_its_record_fails_all(keepers: Keepers) -> None:
    clients = keepers.clients(RecordState(OWN), RecordState(OWN))
    clients[1].close()
    for error in start(list(clients)):
        assert f"rank 1: {clients[1].path}: this side has left" in str(error)


def test_a_move_of_another_engine_is_waited_for(keepers: Keepers, monkeypatch: pytest.MonkeyPatch) -> None:
    """R18."""
    paths = keepers.serve(RecordState(OWN), RecordState(OWN))
    mover = [keepers.client(path, "mover") for path in paths]
    for client in mover:
        assert client.begin([0], 0).status == "ok"
    clients = [keepers.client(path) for path in paths]
    ended = threading.Event()

    def end_the_move(seconds: float) -> None:
        if not ended.is_set():
            ended.set()
            for client in mover:
                client.commit([0], MOVED.physical_to_logical_map[:1])

    monkeypatch.setattr(time, "sleep", end_the_move)
    assert start(list(clients)) == [(MOVED, 1)] * 2
    assert ended.is_set()


def test_a_move_that_does_not_end_fails_all_and_names_it(keepers: Keepers) -> None:
    """R18."""
    paths = keepers.serve(RecordState(OWN), RecordState(OWN))
    assert keepers.client(paths[1], "mover").begin([1], 0).status == "ok"
    for error in start([keepers.client(path) for path in paths], deadline=1e-6):
        assert "rank 1: the move of layer 1 by engine 'mover' from version 0 has not ended for 1e-06 s" in str(error)


def test_arguments_that_cannot_be() -> None:
    (agreement,) = LocalAgreement.group(1)
    with pytest.raises(ValueError, match=r"`deadline` \(=0.0\) must be above 0"):
        agree_on_layout(None, own=OWN, agreement=agreement, deadline=0.0)
    with pytest.raises(TypeError, match=r"`own` \(=list\) must be an ExpertLayout"):
        agree_on_layout(None, own=[], agreement=agreement)  # type: ignore[arg-type]


def test_findings_of_thousands_of_ranks_are_small() -> None:
    assert len(json.dumps(AT_1)) < 400
