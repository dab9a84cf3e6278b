"""A standby that follows moves: both engines change over together, and neither hangs on the other."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from eplb_core import (
    DispatchTables,
    ExpertLayout,
    LayoutAgreementError,
    LayoutClient,
    LayoutFollower,
    LayoutRecord,
    LayoutServer,
    Migrator,
    Topology,
    WeightHost,
    attach_weights,
)
from eplb_core.loading.agreement import LocalAgreement
from eplb_core.loading.record.follow import Look, Settled, settle
from eplb_core.loading.transports import LocalCopy
from tests.loading import mover_process
from tests.loading.engine_process import end, spawn, until
from tests.loading.fleets import fleet
from tests.loading.worlds import SIZES, on_threads, stores_of, wrong_slots

Clients = dict[int, LayoutClient]
OLD = ExpertLayout([[0, 1, 2, 3]] * 3, 4, topology=Topology(2))
NEW = ExpertLayout([[2, 1, 0, 3]] * 3, 4, topology=Topology(2))
AT_3 = Look(3, "three")
AT_4 = Look(4, "four")


# ---- what ranks do that have stopped ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([AT_3, AT_3], Settled("resume")),
        ([AT_4, AT_4], Settled("switch")),
        ([AT_3._replace(digest="other")] * 2, Settled("switch")),
        ([AT_4, AT_3._replace(moving=True)], Settled("wait")),
        ([AT_3, AT_3._replace(moving=True)], Settled("wait")),
        ([AT_4, AT_4._replace(trouble="dirty")], Settled("fail", "rank 1: dirty", (1,))),
        ([AT_3._replace(moving=True), AT_3._replace(trouble="lost")], Settled("fail", "rank 1: lost", (1,))),
    ],
)
def test_ranks_that_have_stopped_do_the_same(found: list[Look], expected: Settled) -> None:
    assert settle(found, 3, "three") == expected


@pytest.mark.parametrize("other", [AT_3, AT_4._replace(digest="fore")])
def test_records_that_differ_after_a_move_stop_all_ranks(other: Look) -> None:
    settled = settle([AT_4, other], 3, "three")
    assert (settled.action, settled.ranks) == ("fail", (1,))
    assert re.search(rf"rank 0 is at version 4, digest four, rank 1 at version {other.version}", settled.reason)


# ---- in one process --------------------------------------------------------------------------------------------------


class Standby:
    """An engine of two ranks that follows, each rank a thread with a loop of passes."""

    def __init__(self, stack: ExitStack, paths: list[str], layout: ExpertLayout, **options: Any) -> None:
        self.clients = [stack.enter_context(LayoutClient(path, "standby")) for path in paths]
        self.tables = [DispatchTables(layout, rank=rank, mode="even") for rank in (0, 1)]
        self.agreements = LocalAgreement.group(2, deadline=20.0)
        self.followers: Any = on_threads([partial(self._follow, rank, layout, options) for rank in (0, 1)])
        for each in self.followers:
            if isinstance(each, BaseException):
                raise each
            stack.callback(each.close)
        self.switched: list[tuple[int, ...]] = []
        self.stopping, self.broken = threading.Event(), threading.Event()
        self.errors: list[str] = []
        self.on_pass: Callable[[int], object] = lambda rank: None
        self.mends: type[Exception] | tuple[()] = ()
        """What tables raise, after which the engine installs them anew."""

    def _follow(self, rank: int, layout: ExpertLayout, options: dict[str, Any]) -> LayoutFollower:
        agreement = self.agreements[rank]
        return LayoutFollower(self.clients[rank], layout, agreement=agreement, tables=self.tables[rank], **options)

    def run(self, rank: int) -> None:
        """Passes until `stopping`: all ranks end in the same one, since the word goes through a gather."""
        follower = self.followers[rank]
        while True:
            try:
                rows = follower.poll()
            except LayoutAgreementError as error:
                self.errors.append(str(error))
                return
            except self.mends:
                rows = ()
                self.tables[rank].install(follower.layout)
            if rows and rank == 0:
                self.switched.append(rows)
            if self.broken.is_set():
                return
            threading.Event().wait(0.0005)  # the mover, the keepers and their threads are in this process too
            if not follower.paused:
                assert self.tables[rank].layout == follower.layout
                self.on_pass(rank)
                told = self.agreements[rank].gather(b"stop" if self.stopping.is_set() else b"")
                if b"stop" in told:
                    return

    def until_version(self, version: int) -> None:
        until(lambda: all(each.version == version for each in self.followers), 60.0)

    def stopped(self) -> str:
        """Why all ranks stop, which they do for one reason."""
        until(lambda: len(self.errors) == 2, 60.0)
        (reason,) = set(self.errors)
        return reason

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=self.run, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        try:
            yield
        except BaseException:
            self.broken.set()
            raise
        finally:
            self.stopping.set()
            for thread in threads:
                thread.join()
            self.stopping.clear()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def serve(stack: ExitStack, folder: Path, *records: LayoutRecord) -> list[str]:
    """A keeper for each rank."""
    servers = [LayoutServer(folder / str(rank), record) for rank, record in enumerate(records)]
    return [stack.enter_context(server).path for server in servers]


@pytest.fixture
def paths(stack: ExitStack, tmp_path: Path) -> list[str]:
    return serve(stack, tmp_path, LayoutRecord(OLD), LayoutRecord(OLD))


def mover_clients(stack: ExitStack, paths: list[str]) -> Clients:
    options: Any = {"follow_deadline": 60.0, "deadline": 60.0}  # of a standby that does poll, on a busy machine
    return {rank: stack.enter_context(LayoutClient(path, "mover", **options)) for rank, path in enumerate(paths)}


@pytest.fixture
def clients(stack: ExitStack, paths: list[str]) -> Clients:
    return mover_clients(stack, paths)


@pytest.fixture
def standby(stack: ExitStack, paths: list[str]) -> Standby:
    return Standby(stack, paths, OLD)


def begin(clients: Clients, layer: int, version: int = 0) -> None:
    """Both ranks of the mover, side by side."""
    begun: Any = on_threads([partial(client.begin, [layer], version) for client in clients.values()])
    assert [reply.status for reply in begun] == ["ok", "ok"]


def commit(clients: Clients, layer: int, rows: Any) -> None:
    assert [client.commit([layer], rows).status for client in clients.values()] == ["ok", "ok"]


def test_a_standby_switches_with_the_engine_that_moves_and_takes_over(
    stack: ExitStack, paths: list[str], clients: Clients
) -> None:
    with fleet(OLD, records=clients) as ranks:
        told: list[tuple[int, ExpertLayout]] = []
        standby = Standby(stack, paths, OLD, on_switch=lambda *what: told.append(what))
        with standby.running():
            ranks.start(NEW)
            ranks.until_idle()
            assert (ranks.first.status.cause, ranks.first.layout) == ("", NEW)
            standby.until_version(3)
        assert standby.switched == [(0,), (1,), (2,)]
        assert sorted(layer for layer, _ in told) == [0, 0, 1, 1, 2, 2]
        assert told[-1][1] == NEW
        for rank, follower in enumerate(standby.followers):
            assert (follower.layout, follower.paused, standby.tables[rank].layout) == (NEW, "", NEW)
            assert standby.clients[rank].adopted == 3
        # It polls no more: the next move does not begin, and the mover serves on.
        for client in clients.values():
            client._follow_deadline = 0.02
        ranks.start(OLD)
        ranks.until_idle()
        assert (ranks.first.status.cause, ranks.first.layout) == ("busy", NEW)
        who = ranks.first.status.rank
        assert who is not None
        assert "'standby' is still reading layer 0" in ranks.migrators[who].status.reason
        stores = ranks.stores
    for each in [*clients.values(), *standby.followers]:
        each.close()
    made = on_threads([lambda rank=rank: take_over(standby, stores, rank) for rank in (0, 1)])  # type: ignore[misc]
    for result in made:
        assert result == OLD
    for rank in (0, 1):
        assert wrong_slots(stores[rank], OLD, rank) == []


def test_an_engine_without_tables_follows_too(stack: ExitStack, tmp_path: Path) -> None:
    old, new = (ExpertLayout([row], 2, topology=Topology(1)) for row in ([0, 1], [1, 0]))
    (path,) = serve(stack, tmp_path, LayoutRecord(old))
    client = stack.enter_context(LayoutClient(path, "standby"))
    (alone,) = LocalAgreement.group(1)
    follower = LayoutFollower(client, old, agreement=alone)
    stack.callback(follower.close)
    mover = stack.enter_context(LayoutClient(path, "mover", follow_deadline=60.0, deadline=60.0))

    def move() -> None:
        assert mover.begin([0], 0).status == "ok"
        assert mover.commit([0], [[1, 0]]).status == "ok"

    moves = threading.Thread(target=move)
    moves.start()
    until(lambda: follower.poll() == (0,), 60.0)
    moves.join()
    assert (follower.layout, follower.version) == (new, 1)


def test_a_keeper_that_takes_no_second_connection_cannot_be_followed(stack: ExitStack, paths: list[str]) -> None:
    client = stack.enter_context(LayoutClient(paths[0], "standby"))
    os.unlink(paths[0])
    (alone,) = LocalAgreement.group(1)
    with pytest.raises(LayoutAgreementError, match=r"rank 0 cannot follow: .* cannot be watched: nobody listens there"):
        LayoutFollower(client, OLD, agreement=alone)


def test_a_rank_whose_on_switch_raises_stays_in_step(clients: Clients, standby: Standby) -> None:
    def fail(layer: int, layout: ExpertLayout) -> None:
        raise ZeroDivisionError(f"layer {layer}")

    with fleet(OLD, records=clients) as ranks:
        follower = standby.followers[1]
        follower._on_switch, poll, raised = fail, follower.poll, list[str]()

        def caught() -> tuple[int, ...]:
            try:
                return poll()  # type: ignore[no-any-return]
            except ZeroDivisionError as error:
                raised.append(str(error))
                return ()

        follower.poll = caught
        with standby.running():
            ranks.start(NEW)
            ranks.until_idle()
            assert ranks.first.status.cause == ""
            standby.until_version(3)
        assert raised == ["layer 0", "layer 1", "layer 2"]
        assert standby.errors == []
        assert standby.switched == [(0,), (1,), (2,)]


def take_over(standby: Standby, stores: Any, rank: int) -> ExpertLayout:
    """The engine that followed moves experts itself."""
    migrator = Migrator(
        stores[rank],
        NEW,
        rank=rank,
        transport=LocalCopy(),
        agreement=standby.agreements[rank],
        record=standby.clients[rank],
        tables=standby.tables[rank],
    )
    until(lambda: standby.clients[rank].query().engines == ("standby",))  # type: ignore[union-attr]
    migrator.start(OLD)
    while not migrator.idle:
        migrator.poll()
    assert migrator.status.cause == ""
    migrator.stop(20.0)
    return migrator.layout


def test_passes_that_still_run_on_the_device_are_waited_for(
    clients: Clients, standby: Standby, device: torch.device
) -> None:
    """On a GPU a pass is only enqueued when the next one begins; the weights change when all of them have read."""
    weights = torch.zeros(1 << 20, dtype=torch.int32, device=device)
    passes: list[tuple[int, torch.Tensor]] = []

    def read(rank: int) -> None:
        version = standby.followers[0].version
        if rank == 0 and sum(each == version for each, _ in passes) < 80:
            passes.extend((version, weights.sum(dtype=torch.int64)) for _ in range(8))

    standby.on_pass = read
    with standby.running():
        for version in range(6):
            begin(clients, 0, version)
            with torch.cuda.stream(torch.cuda.Stream(device) if device.type == "cuda" else None):  # type: ignore[no-untyped-call]
                weights.fill_(version + 1)
                weights.sum().item()  # waits for this stream alone
            commit(clients, 0, (NEW, OLD)[version % 2].physical_to_logical_map[:1])
        standby.until_version(6)
    assert {version for version, _ in passes} == set(range(7))
    assert all(int(total) == version * weights.numel() for version, total in passes)


def test_an_aborted_move_lets_the_standby_go_on(clients: Clients, standby: Standby) -> None:
    """One rank of the mover cannot: the other one takes its move back, and so does the standby its pause."""
    with standby.running():
        begin(clients, 1)
        assert standby.followers[0].paused == "the move of layer 1 by engine 'mover' from version 0 is pending"
        with pytest.raises(LayoutAgreementError, match=r"layer 1 by engine 'mover' .* is not over; poll until"):
            standby.followers[0].close()
        assert [client.abort([1]).status for client in clients.values()] == ["ok", "ok"]
        until(lambda: not any(each.paused for each in standby.followers), 60.0)
    assert standby.switched == []


def test_a_keeper_that_goes_while_the_standby_has_stopped_stops_it_for_good(
    stack: ExitStack, paths: list[str], tmp_path: Path
) -> None:
    clients = mover_clients(stack, paths)
    third = ExitStack()
    (tmp_path / "third").mkdir()
    (path,) = serve(third, tmp_path / "third", LayoutRecord(OLD))
    clients[1] = stack.enter_context(LayoutClient(path, "mover", follow_deadline=60.0, deadline=60.0))
    standby = Standby(stack, [paths[0], path], OLD)
    with standby.running():
        begin(clients, 1)
        third.close()
        error = standby.stopped()
    assert f"rank 1: the keeper at {path} closed the connection" in error


def test_tables_without_room_for_the_new_replicas_stop_the_standby_with_the_reason(
    stack: ExitStack, tmp_path: Path
) -> None:
    layout = ExpertLayout([[0, 1, 2, 0]], 3, topology=Topology(2))
    rows = [[0, 1, 2, 1]]
    paths = serve(stack, tmp_path, LayoutRecord(layout), LayoutRecord(layout))
    clients = mover_clients(stack, paths)
    standby = Standby(stack, paths, layout)
    for tables in standby.tables:
        tables.max_replicas = 1
    with standby.running():
        begin(clients, 0)
        commit(clients, 0, rows)
        error = standby.stopped()
    assert error.startswith("an expert has 2 replicas and `tables` hold 1")


def test_tables_that_raise_leave_the_ranks_in_step(clients: Clients, standby: Standby) -> None:
    """The keepers have switched, and so has the engine; what is in the tables its loop is told of."""
    install, told = standby.tables[0].install, []

    def breaks(layout: ExpertLayout, *, layers: Any = None) -> None:
        standby.tables[0].install = install  # type: ignore[method-assign]
        told.append(layers)
        raise RuntimeError("no such row")

    standby.tables[0].install = breaks  # type: ignore[assignment, method-assign]
    standby.mends = RuntimeError
    with standby.running():
        for layer in (0, 1):
            begin(clients, layer, layer)
            commit(clients, layer, NEW.physical_to_logical_map[[layer]])
        standby.until_version(2)
        until(lambda: not any(each.paused for each in standby.followers), 60.0)
    assert told == [[0]]
    assert [each.layout for each in standby.followers] == [OLD.replace(NEW, [0, 1])] * 2


def test_weights_that_moved_without_asking_are_noticed(stack: ExitStack, tmp_path: Path) -> None:
    """Nothing in the protocol does that; a keeper that forgot whom to ask might."""
    records = [LayoutRecord(OLD), LayoutRecord(OLD)]
    paths = serve(stack, tmp_path, *records)
    standby = Standby(stack, paths, OLD)
    with standby.running():
        records[0].revert(records[0].state._replace(layout=NEW, version=1))
        stack.enter_context(LayoutClient(paths[0], "passes by"))  # its coming is news
        error = standby.stopped()
    assert "the records differ: rank 0 is at version 1, " in error


def test_ranks_at_different_versions_do_not_follow(stack: ExitStack, tmp_path: Path) -> None:
    paths = serve(stack, tmp_path, LayoutRecord(OLD), LayoutRecord(OLD, version=1))
    with pytest.raises(
        LayoutAgreementError, match=r"ranks cannot follow: rank 0 is at version 0, .* ranks 1 are"
    ) as caught:
        Standby(stack, paths, OLD)
    assert caught.value.ranks == (1,)


def test_a_move_that_is_not_answered_is_taken_back(clients: Clients, standby: Standby) -> None:
    """The follower does not poll: the mover hears `busy` after its deadline, and the keepers have no move."""
    for client in clients.values():
        client._follow_deadline = 0.0
        reply = client.begin([1], 0)
        assert reply[:2] == ("busy", "engine 'standby' is still reading layer 1")
        state = client.query()
        assert state is not None
        assert (state.pending, state.begun, state.followers) == (None, 1, ("standby",))


def test_a_mover_that_dies_in_a_move_stops_the_standby_on_all_ranks(clients: Clients, standby: Standby) -> None:
    with standby.running():
        begin(clients, 1)
        clients[1].close()
        error = standby.stopped()
    assert "rank 1: nobody knows what the slots hold: the move of layer 1 by engine 'mover'" in error
    for each in standby.followers:
        assert each.paused == error
        with pytest.raises(LayoutAgreementError, match="nobody knows"):
            each.poll()


def test_a_keeper_that_goes_while_the_standby_serves_leaves_it_serving(stack: ExitStack, paths: list[str]) -> None:
    """No move can begin at a keeper that is not there; one that comes back counts this engine as one that does not
    follow."""
    with ExitStack() as own:
        standby = Standby(own, paths, OLD)
        stack.close()
        with standby.running():
            until(lambda: all(each._lost for each in standby.followers), 60.0)
        assert [each.paused for each in standby.followers] == ["", ""]


def test_whatever_ends_the_watch_counts_as_a_keeper_that_is_lost(
    stack: ExitStack, paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: LayoutClient, number: int) -> int:
        raise MemoryError("no room for a reply")

    monkeypatch.setattr(LayoutClient, "watch", fail)
    standby = Standby(stack, paths, OLD)
    until(lambda: all("no room for a reply" in each._lost for each in standby.followers), 60.0)


def test_who_routes_by_another_layout_cannot_follow(stack: ExitStack, paths: list[str]) -> None:
    with pytest.raises(LayoutAgreementError, match=r"rank 0 cannot follow: engine 'standby' routes by layout \w+"):
        Standby(stack, paths, NEW)
    client = stack.enter_context(LayoutClient(paths[0], "x"))
    with pytest.raises(TypeError, match=r"`layout` \(=list\) must be an ExpertLayout"):
        LayoutFollower(client, [], agreement=LocalAgreement.group(1)[0])  # type: ignore[arg-type]


# ---- processes -------------------------------------------------------------------------------------------------------


PATIENCE = 60.0
"""Seconds: processes come and go here while others have the machine."""


class Scene:
    """Hosts of two ranks here, an engine that moves and a standby that follows in processes."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.stack = stack
        self.paths = [str(folder / f"host{rank}") for rank in (0, 1)]
        self.hosts = [
            stack.enter_context(
                WeightHost(path, host_load, config=mover_process.CONFIG, layout=mover_process.FIRST, rank=rank)
            )
            for rank, path in enumerate(self.paths)
        ]

    def process(self, module: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", f"tests.loading.{module}", *self.paths, *arguments]
        process = spawn(*command)
        self.stack.callback(end, process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    @property
    def states(self) -> list[Any]:
        return [host.state for host in self.hosts]

    def version(self) -> int:
        return min(int(state.version) for state in self.states)

    def moves_on(self, by: int = 3) -> None:
        """Moves go on on all ranks."""
        now = self.version()
        until(lambda: self.version() >= now + by, PATIENCE)

    def until_phase(self, phase: str) -> None:
        """As soon as a record is seen in it; the kill comes a little later, in this phase or the next."""
        seen: Callable[[Any], Any] = {
            "serving": lambda state: state.pending is None,
            "asked": lambda state: state.asking and not state.holding,
            "holding": lambda state: state.holding,
            "writing": lambda state: state.pending is not None and not state.asking,
        }[phase]
        until(lambda: any(seen(state) for state in self.states), PATIENCE)

    def wrong(self) -> list[Any]:
        """Slots that do not hold what a record that is not dirty says."""
        found = []
        for rank, state in enumerate(self.states):
            tensors: dict[str, Any] = {}
            with LayoutClient(self.paths[rank], "look") as client:
                options: Any = {"config": mover_process.CONFIG, "layout": state.layout, "rank": rank}
                attached = attach_weights(client, tensors, **options)
                found += wrong_slots(mover_process.stores(tensors), state.layout, rank)
                attached.close()
        return found


def host_load(layout: ExpertLayout | None, rank: int) -> dict[str, torch.Tensor]:
    stores = stores_of(mover_process.FIRST, rank, whole=False)
    return {
        f"{layer}.{name}": torch.stack([store.row(name, slot) for slot in range(store.num_slots)])
        for layer, store in enumerate(stores)
        for name in SIZES
    }


PHASES = ["serving", "asked", "holding", "writing"]


@pytest.mark.slow
@pytest.mark.parametrize("phase", [pytest.param(phase, marks=[pytest.mark.long]) for phase in PHASES])
def test_a_standby_that_is_killed_stops_no_move(stack: ExitStack, tmp_path: Path, phase: str) -> None:
    scene = Scene(stack, tmp_path)
    mover = scene.process("mover_process", "1")
    standby = scene.process("follower_process")
    scene.moves_on()
    scene.until_phase(phase)
    assert "wrong" not in end(standby)
    until(lambda: all("follower0" not in state.engines for state in scene.states), PATIENCE)
    scene.moves_on()
    assert mover.poll() is None
    assert not any(state.dirty for state in scene.states)


@pytest.mark.slow
@pytest.mark.parametrize("phase", [pytest.param(phase, marks=[pytest.mark.long]) for phase in PHASES])
def test_a_mover_that_is_killed_leaves_a_standby_that_is_right_or_stops(
    stack: ExitStack, tmp_path: Path, phase: str
) -> None:
    scene = Scene(stack, tmp_path)
    mover = scene.process("mover_process", "2")
    standby = scene.process("follower_process")
    scene.moves_on()
    scene.until_phase(phase)
    end(mover)
    until(lambda: all("mover" not in " ".join(state.engines) for state in scene.states), PATIENCE)
    if any(state.dirty for state in scene.states):
        standby.wait(PATIENCE)
        assert "stopped rank" in (said := end(standby))
        assert "nobody knows what the slots hold: the move of layer" in said
        return
    assert len({state.version for state in scene.states}) == 1
    assert standby.poll() is None
    assert "wrong" not in end(standby)
    assert scene.wrong() == []


@pytest.mark.slow
def test_a_standby_that_stalls_pauses_moves_and_both_go_on_when_it_does(stack: ExitStack, tmp_path: Path) -> None:
    scene = Scene(stack, tmp_path)
    mover = scene.process("mover_process", "3")
    standby = scene.process("follower_process")
    scene.moves_on()
    standby.send_signal(signal.SIGSTOP)
    until(lambda: any(state.awaited for state in scene.states), PATIENCE)  # asked, and not answered
    stuck = scene.version()
    until(lambda: not any(state.awaited for state in scene.states), PATIENCE)  # the mover has taken it back
    assert scene.version() <= stuck + 1
    standby.send_signal(signal.SIGCONT)
    scene.moves_on()
    assert (mover.poll(), standby.poll()) == (None, None)
    assert not any(state.dirty for state in scene.states)
    assert "wrong" not in end(standby)
