"""The record over a socket: presence, crashes of real processes, hostile clients, paths, and a keeper that restarts."""

from __future__ import annotations

import array
import fcntl
import logging
import os
import re
import resource
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import eplb_core
from benchmarks.fuzz_record import messages
from eplb_core import ExpertLayout, SocketInUseError, SocketOwnerError, Topology
from eplb_core.errors import FileFormatError, RecordLostError
from eplb_core.loading.record import client as layout_client
from eplb_core.loading.record import file as record_file
from eplb_core.loading.record import socket_path, wire
from eplb_core.loading.record.client import LayoutClient
from eplb_core.loading.record.record import LayoutRecord
from eplb_core.loading.record.server import MAX_CONNECTIONS, LayoutServer
from eplb_core.loading.record.state import RecordState
from tests.loading.engine_process import Engine, container, until
from tests.loading.record.keeper_process import LAYOUT, ROW, keeper
from tests.loading.record.test_keeper import Weights

ONE = f"this side speaks 1, of eplb_core {eplb_core.__version__}"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "record.sock"


@pytest.fixture
def server(path: Path) -> Iterator[LayoutServer]:
    with LayoutServer(path, LayoutRecord(LAYOUT)) as server:
        yield server


@pytest.fixture
def client(server: LayoutServer, path: Path) -> Iterator[LayoutClient]:
    with LayoutClient(path, "a") as client:
        yield client


def known(state: RecordState | None) -> RecordState:
    assert state is not None
    return state


@contextmanager
def bound(path: Path, backlog: int | None = 8) -> Iterator[socket.socket]:
    """Somebody else's socket at the path; without a backlog nobody listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        if backlog is not None:
            listener.listen(backlog)
        yield listener


@contextmanager
def interrupted(place: object, name: str) -> Iterator[None]:
    """As when a signal's handler raises there."""
    patched = patch.object(place, name, side_effect=KeyboardInterrupt)
    with patched, pytest.raises(KeyboardInterrupt):
        yield


def watching(server: LayoutServer) -> int:
    return sum(connection.watch is not None for connection in list(server._loop._connections))


def raw(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(str(path))
    connection.settimeout(20)
    return connection


def ask(connection: socket.socket, message: bytes | dict[str, Any]) -> dict[str, Any]:
    """One reply; empty if the server ends the connection."""
    connection.sendall(message if isinstance(message, bytes) else wire.pack(message))
    inbox = wire.Inbox()
    while (body := inbox.take(wire.MAX_REPLY)) is None:
        data = connection.recv(1 << 16)
        if not data:
            return {}
        inbox.extend(data)
    return wire.unpack(body)


# ---- moves over the socket -------------------------------------------------------------------------------------------


def test_an_engine_that_the_server_cuts_off_may_still_read(server: LayoutServer, path: Path) -> None:
    with raw(path) as connection, LayoutClient(path, "b") as other:
        ask(connection, {"do": "attach", "engine": "a"})
        ask(connection, struct.pack("!I", 1 << 30))
        until(lambda: known(server.state).engines == ("b",))
        assert "'a (its connection was ended)'" in other.begin([0], 0).reason


def test_a_client_sees_the_record_and_moves_experts(server: LayoutServer, path: Path, client: LayoutClient) -> None:
    """R3."""
    assert attrgetter("version", "layout", "engines")(client.found) == (0, LAYOUT, ("a",))
    assert client.begin([0], 0) == ("ok", "", 0, LAYOUT.digest)
    with LayoutClient(path, "b") as late:
        assert known(late.found).pending == ("a", (0,), 0)
        assert late.begin([1], 0).status == "busy"
    reply = client.commit([0], [ROW])
    assert (reply.status, reply.version, client.adopted) == ("ok", 1, 1)
    state = known(client.query())
    assert state.layout.physical_to_logical_map[0].tolist() == ROW
    assert reply.digest == state.digest
    until(lambda: known(server.state).engines == ("a",))
    assert client.begin([1], 1).status == "ok"
    assert client.abort([1]).status == "ok"
    assert client.begin([7], 1).status == "refused"


def test_an_engine_that_restarts_under_its_name_is_a_second_engine(server: LayoutServer, path: Path) -> None:
    with LayoutClient(path, "a") as former, LayoutClient(path, "a") as restarted:
        assert (former.engine_id, restarted.engine_id) == ("a", "a#2")
        assert former.begin([0], 0).reason.startswith("engine 'a#2' is attached too")


def test_a_name_need_not_be_unique_however_long_it_is_and_whoever_has_the_next_one(
    server: LayoutServer, path: Path
) -> None:
    with ExitStack() as stack:
        names = [
            stack.enter_context(LayoutClient(path, name)).engine_id for name in ("a", "a#3", "a", "x" * 200, "x" * 200)
        ]
    assert names == ["a", "a#3", "a#3.1", "x" * 200, "x" * 198 + "#5"]


def test_a_reply_that_was_not_listened_to_answers_no_other_request(server: LayoutServer, path: Path) -> None:
    """The next request would take the reply that is still to come for its own."""
    with LayoutClient(path, "a") as a, LayoutClient(path, "b") as b:
        with interrupted(layout_client, "_receive"):
            a.query()
        assert a.begin([0], 0).reason == f"the keeper at {path} was interrupted in an answer"
        assert a.present
        assert b.begin([0], 0).reason.startswith("engine 'a' is attached too")


def test_a_move_whose_answer_was_not_listened_to_does_not_stay(server: LayoutServer, path: Path) -> None:
    with LayoutClient(path, "a") as a, LayoutClient(path, "b") as b:
        assert b.follow(LAYOUT.digest).status == "ok"
        for begun, (place, name) in enumerate([(time, "sleep"), (layout_client, "_receive")], 1):
            with interrupted(place, name):
                a.begin([0], 0)
            until(lambda: known(server.state).begun == begun and known(server.state).pending is None)  # noqa: B023
        assert not a.connected


def test_a_forked_child_waits_for_no_thread_of_its_parent(path: Path, client: LayoutClient) -> None:
    with ThreadPoolExecutor(1) as threads:
        client._lock.acquire()  # as a request has that is under way at the fork
        client._process += 1
        try:
            reason = threads.submit(lambda: client.begin([0], 0).reason).result(20)
            assert reason == f"{path}: the connection is that of the parent process"
            threads.submit(client.close).result(20)
            assert not client.connected
        finally:
            client._lock.release()


def test_a_forked_child_that_closes_the_server_leaves_the_parent_serving(path: Path, tmp_path: Path) -> None:
    with keeper(path, tmp_path / "record.json", "--fork"), LayoutClient(path, "a") as client:
        assert client.begin([0], 0).status == "ok"
        assert path.exists()


def test_who_watches_hears_of_one_that_left_while_others_were_told(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, writing = threading.Event(), threading.Event()

    def slow(*arguments: object, **options: object) -> None:
        if threading.current_thread().name.startswith("eplb record") and not gate.is_set():
            writing.set()
            gate.wait(20)

    with LayoutServer(path, LayoutRecord(LAYOUT), state_file=tmp_path / "record.json") as server, ExitStack() as stack:
        leaver = raw(path)
        ask(leaver, {"do": "attach", "engine": "leaver"})
        seen = ask(leaver, {"do": "watch", "seen": -1})
        leaver.sendall(wire.pack({"do": "watch", "seen": seen["number"]}))
        watchers = [stack.enter_context(raw(path)) for _ in range(16)]
        for each in watchers:
            each.sendall(wire.pack({"do": "watch", "seen": seen["number"]}))
        until(lambda: watching(server) == 17)
        monkeypatch.setattr("eplb_core.loading.record.server.save_record", slow)
        late = stack.enter_context(raw(path))
        late.sendall(wire.pack({"do": "attach", "engine": "late"}))
        assert writing.wait(20)
        leaver.close()
        gate.set()
        for each in watchers:
            news = ask(each, b"")
            while "leaver" in news["state"]["engines"]:
                news = ask(each, {"do": "watch", "seen": news["number"]})


def test_requests_of_many_threads_queue_up(client: LayoutClient) -> None:
    with ThreadPoolExecutor(4) as threads:
        replies = list(threads.map(lambda _: client.begin([0], 0).status, range(200)))
    assert replies.count("ok") == 1
    assert replies.count("refused") == 199


def test_a_client_without_a_server_finds_nothing_and_is_refused(path: Path) -> None:
    client = LayoutClient(path, "a")
    assert (client.found, client.error, client.connected, client.present) == (None, None, False, False)
    assert client.begin([0], 0) == ("refused", f"nobody listens at {path}", None, None)
    with pytest.raises(RecordLostError, match="nobody listens"):
        client.query()


def test_a_client_waits_for_a_server_that_comes_later(path: Path) -> None:
    found: list[LayoutClient] = []
    thread = threading.Thread(target=lambda: found.append(LayoutClient(path, "a", wait=20.0)))
    thread.start()
    with LayoutServer(path, LayoutRecord(LAYOUT)):
        thread.join()
        assert found[0].found is not None
        found[0].close()


def test_a_server_that_goes_ends_moves_and_says_so(path: Path) -> None:
    server = LayoutServer(path, LayoutRecord(LAYOUT))
    client = LayoutClient(path, "a")
    server.close()
    server.close()
    reply = client.begin([0], 0)
    assert reply.status == "refused"
    assert f"the keeper at {path} closed the connection" in reply.reason
    assert not client.connected
    assert client.present
    assert not path.exists()


def test_a_server_that_accepts_nobody_is_an_error_and_not_absent(path: Path) -> None:
    with bound(path, 0), raw(path):
        client = LayoutClient(path, "a", deadline=0.02)
    assert client.present
    assert client.begin([0], 0) == ("refused", f"{path} accepts nobody", None, None)


def test_a_path_through_a_file_is_an_error(path: Path) -> None:
    path.write_text("")
    client = LayoutClient(path / "sock", "a")
    assert f"{path / 'sock'} cannot be reached: [Errno 20] Not a directory" in str(client.error)


def test_a_place_that_could_not_be_taken_on_a_full_disk_holds_no_lock(path: Path, tmp_path: Path) -> None:
    """The number of the process that serves does not go into the lock's file; then there is room again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            socket_path.SocketPlace(path, tmp_path / "state")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    socket_path.SocketPlace(path, tmp_path / "state").release()


def test_a_keeper_that_cannot_write_down_who_is_there_lets_nobody_in(path: Path, tmp_path: Path) -> None:
    (tmp_path / "states").mkdir()
    with LayoutServer(path, LayoutRecord(LAYOUT), state_file=tmp_path / "states" / "record.json"):
        shutil.rmtree(tmp_path / "states")
        client = LayoutClient(path, "a")
    assert "refused to attach this engine: the record cannot be written down: [Errno 2]" in str(client.error)


def test_a_server_that_does_not_answer_is_lost_after_the_deadline(path: Path) -> None:
    with bound(path):
        client = LayoutClient(path, "a", deadline=0.05)
        client.close()
    assert str(client.error) == f"the keeper at {path} has not answered for 0.05 s"


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (wire.LENGTH.pack(1 << 31), "answers with a message of 2,147,483,648 bytes; at most 67,108,864"),
        (wire.LENGTH.pack(2) + b"[]", "answers with a JSON list where an object is due"),
        (wire.pack({"status": "well"}), "answers with status 'well'"),
        (wire.pack({"status": "ok", "reason": "", "version": "1"}), "answers with version '1'"),
        (wire.pack({"status": "ok", "reason": "", "state": {"map": 3}}), "answers with an incomplete record: KeyError"),
        (wire.pack({"status": "refused", "reason": "full"}), "answers with an incomplete record"),
        (
            wire.LENGTH.pack(30) + b'{"protocol":2,"status":"ok"}  ',
            f"answers with protocol 2 of eplb_core unknown; {ONE}",
        ),
        (b"", "closed the connection: it ended"),
    ],
)
def test_a_server_that_talks_nonsense_is_an_error_with_words(path: Path, reply: bytes, said: str) -> None:
    def serve_once() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(reply)

    with bound(path) as listener:
        thread = threading.Thread(target=serve_once)
        thread.start()
        with LayoutClient(path, "a") as client:
            thread.join()
    assert said in str(client.error)


def test_a_keeper_of_another_time_has_no_record(path: Path) -> None:
    """R31: "Unknown request type" is taken for a keeper without a record; so is one that says it has none."""
    with LayoutServer(path, None) as server, LayoutClient(path, "a") as client:
        assert server.state is None
        assert (client.found, client.error, client.connected) == (None, None, True)
        assert client.begin([0], 0).reason == "this server keeps no record of a layout"
        assert client.query() is None
        with raw(path) as connection:
            reply = ask(connection, {"do": "expert_layout_attach"})
            assert (reply["status"], reply["reason"]) == ("refused", "Unknown request type: 'expert_layout_attach'")
            assert reply["code"] == "unknown_request"


# ---- processes that die ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_engine_that_gave_a_stopped_keeper_up_is_still_there_and_its_move_is_not(path: Path, tmp_path: Path) -> None:
    """It may serve on, so nobody may move under it; and what it did not hear of must not stay pending."""
    with keeper(path, tmp_path / "record.json") as process, LayoutClient(path, "a", deadline=2.0) as client:
        process.send_signal(signal.SIGSTOP)
        client._deadline = 0.05
        assert client.begin([0], 0).reason.endswith("has not answered for 0.05 s")
        assert client.begin([0], 0).status == "refused"
        assert not client.connected
        process.send_signal(signal.SIGCONT)
        with LayoutClient(path, "b") as other:  # what the first one sent is answered before
            assert (known(other.found).pending, known(other.found).engines) == (None, ("a", "b"))
            assert other.begin([0], 0).reason.startswith("engine 'a' is attached too")
            client.close()
            until(lambda: other.begin([0], 0).status == "ok")


@pytest.mark.slow
@pytest.mark.parametrize("contained", [False, True])
def test_a_process_killed_after_begin_leaves_a_dirty_record(
    server: LayoutServer, path: Path, caplog: pytest.LogCaptureFixture, contained: bool
) -> None:
    """I2, I5, R4: seen by the end of the connection alone, since a container's process number means nothing out here;
    old and new engines are refused, and the log says why."""
    inside = container() if contained else ()
    with Engine(path, "a", inside=inside) as engine, caplog.at_level(logging.ERROR, "eplb_core"):
        assert engine.ask("begin", [1], 0)[0] == "ok"
        assert known(server.state).engines == ("a",)
        engine.kill()
        dirty = until(lambda: known(server.state).dirty)
        until(lambda: dirty in caplog.text)  # said by the server's thread, after the state is there
    assert dirty == "the move of layer 1 by engine 'a' from version 0 was pending when the engine left"
    with LayoutClient(path, "b") as late:
        assert late.begin([0], 0).status == "refused"
        assert known(late.found).dirty == dirty


@pytest.mark.slow
def test_a_warm_standby_pauses_moves_and_takes_over(server: LayoutServer, path: Path) -> None:
    with Engine(path, "active") as active:
        active.ask("begin", [0], 0)
        assert active.ask("commit", [0], [ROW])[2] == 1
        with LayoutClient(path, "standby") as standby:
            assert attrgetter("version", "dirty")(standby.found) == (1, "")
            for _ in range(3):
                assert active.ask("begin", [1], 1)[:2] == [
                    "busy",
                    "engine 'standby' is attached too; experts may move only while every other engine follows",
                ]
            active.kill()  # between moves
            until(lambda: known(server.state).engines == ("standby",))
            assert attrgetter("version", "dirty")(standby.query()) == (1, "")
            assert standby.begin([1], 0).status == "refused"
            assert standby.begin([1], 1).status == "ok"


@pytest.mark.slow
def test_a_forked_child_keeps_moves_paused_and_makes_nothing_wrong(server: LayoutServer, path: Path) -> None:
    """R16."""
    with Engine(path, "a") as engine:
        child = engine.ask("fork")
        engine.kill()
        with LayoutClient(path, "b") as late:
            assert late.begin([0], 0).reason.startswith("engine 'a' is attached too")
            assert known(server.state).dirty == ""
            os.kill(child, signal.SIGKILL)
            until(lambda: known(server.state).engines == ("b",))
            assert late.begin([0], 0).status == "ok"


@pytest.mark.slow
def test_a_forked_child_that_closes_the_client_leaves_the_parent_present(server: LayoutServer, path: Path) -> None:
    with Engine(path, "a") as engine:
        assert engine.ask("fork and close") == 0
        assert engine.ask("begin", [0], 0)[0] == "ok"
        assert known(server.state).engines == ("a",)


# ---- clients that are slow, hostile or broken ------------------------------------------------------------------------


def test_a_slow_client_blocks_nobody_and_is_read_no_further(path: Path, client: LayoutClient) -> None:
    """R65."""
    with raw(path) as half, raw(path) as deaf:
        half.sendall(wire.LENGTH.pack(1000) + b"{")
        assert send_until_blocked(deaf, wire.pack({"do": "query"})) < 1 << 19
        assert client.begin([0], 0).status == "ok"
        assert client.commit([0], [ROW]).version == 1


def test_a_client_that_reads_late_gets_every_reply_whole(path: Path) -> None:
    large = ExpertLayout.trivial(58, 256, num_slots=288, topology=Topology(num_ranks=32))
    with LayoutServer(path, LayoutRecord(large)), raw(path) as late:
        late.sendall(wire.pack({"do": "query"}) * 50)
        until(lambda: array.array("i", fcntl.ioctl(late, termios.FIONREAD, b"\0" * 4))[0] > 1 << 16)
        inbox, replies = wire.Inbox(), 0
        while replies < 50:
            body = inbox.take(wire.MAX_REPLY)
            if body is None:
                inbox.extend(late.recv(1 << 16))
            else:
                assert wire.decode_state(wire.unpack(body)["state"]).layout == large
                replies += 1


def send_until_blocked(connection: socket.socket, message: bytes) -> int:
    """Send it over and over; bytes sent when the other side has taken none for a while."""
    requests, sent = message * (1 << 12), 0
    connection.settimeout(0.3)
    with suppress(TimeoutError):
        while sent < 1 << 22:
            sent += connection.send(requests[sent % len(message) :])
    return sent


def test_too_many_connections_are_closed_and_cost_nothing(server: LayoutServer, path: Path) -> None:
    """Engines, of which none goes for another, and a follower's that waits for news."""
    with LayoutClient(path, "a") as client, raw(path) as watcher:
        crowd = [raw(path) for _ in range(MAX_CONNECTIONS - 2)]
        for connection in crowd:
            assert ask(connection, {"do": "attach", "engine": "b"})
        news = ask(watcher, {"do": "watch", "seen": -1})
        watcher.sendall(wire.pack({"do": "watch", "seen": news["number"]}))
        until(lambda: watching(server))
        assert LayoutClient(path, "late").error is not None
        assert len(known(server.state).engines) == MAX_CONNECTIONS - 1
        assert client.query() is not None
        for connection in crowd:
            connection.close()

        def is_let_in() -> bool:
            with LayoutClient(path, "later") as later:
                return later.found is not None

        until(is_let_in)


QUERY = wire.pack({"do": "query"})


@pytest.mark.parametrize("said", [(b"", QUERY[:2], QUERY[:4]), (QUERY,)])
def test_a_crowd_that_idles_keeps_no_engine_out(server: LayoutServer, path: Path, said: tuple[bytes, ...]) -> None:
    """No byte, half a message, a whole one: who was silent for longest goes when one more comes, never an engine."""
    with ExitStack() as stack:
        look = stack.enter_context(LayoutClient(path, "status", attach=False))
        client = stack.enter_context(LayoutClient(path, "a"))
        for number in range(MAX_CONNECTIONS + 50):
            connection = stack.enter_context(raw(path))
            connection.sendall(said[number % len(said)])
        with LayoutClient(path, "late") as late:
            assert late.found is not None
            assert known(server.state).engines == ("a", "late")
        assert client.begin([0], 0).status == "ok"
        assert client.commit([0], [ROW]).version == 1
        state = known(look.query())  # its connection was ended before all others
        assert (state.version, look.error) == (1, None)


def test_who_speaks_now_and_then_outlasts_a_crowd_that_does_not(server: LayoutServer, path: Path) -> None:
    with raw(path) as busy, ExitStack() as crowd:
        for _ in range(2 * MAX_CONNECTIONS):
            assert ask(busy, QUERY)
            crowd.enter_context(raw(path)).sendall(QUERY)


def test_only_who_looks_goes_on_with_another_keeper(path: Path) -> None:
    """An engine's presence, and the news that a follower waits for, end with the keeper that they were at."""
    with ExitStack() as stack:
        with LayoutServer(path, LayoutRecord(LAYOUT)):
            engine, look, watcher = (
                stack.enter_context(LayoutClient(path, name, attach=name == "engine"))
                for name in ("engine", "look", "watcher")
            )
            seen = watcher.watch(-1)
        with LayoutServer(path, LayoutRecord(LAYOUT, version=7)):
            state = known(look.query())
            assert (state.version, state.engines) == (7, ())
            assert f"the keeper at {path} closed the connection" in engine.begin([0], 0).reason
            with pytest.raises(RecordLostError, match=f"the keeper at {path} closed the connection"):
                watcher.watch(seen)
        with pytest.raises(RecordLostError, match=f"the keeper at {path} closed the connection"):
            look.query()  # nobody is there


def test_who_is_closed_while_it_asks_does_not_come_back(path: Path) -> None:
    with bound(path) as listener, ThreadPoolExecutor(2) as threads:
        made = threads.submit(LayoutClient, path, "a", attach=False)
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(wire.pack({"status": "refused", "reason": "", "code": "no_record"}))
            look = made.result(20)
            asked = threads.submit(look.query)
            connection.recv(1 << 16)
            look.close()
            with pytest.raises(RecordLostError, match="closed the connection: it ended"):
                asked.result(20)
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_a_thousand_who_come_and_go_do_not_disturb(server: LayoutServer, path: Path, client: LayoutClient) -> None:
    for number in range(1000):
        with raw(path) as connection, suppress(BrokenPipeError):
            connection.send((b"", b"\xff\xff\xff\xff", wire.LENGTH.pack(9) + b"{", b"\0")[number % 4])
        if number % 100 == 0:
            assert client.query() is not None
    assert client.begin([0], 0).status == "ok"
    assert client.commit([0], [ROW]).version == 1
    assert known(server.state).engines == ("a",)


@pytest.mark.parametrize("taken", [0, 28])
def test_a_crowd_beyond_the_descriptors_keeps_nobody_from_moving(path: Path, tmp_path: Path, taken: int) -> None:
    """64 descriptors, 100 that idle: the state's file is written all the same; with 28 taken none is left."""
    with (
        keeper(path, tmp_path / "state.json", "--descriptors", "64", "--taken", str(taken)),
        LayoutClient(path, "a") as client,
        ExitStack() as crowd,
    ):
        for number in range(100):
            crowd.enter_context(raw(path)).sendall(QUERY[: number % 2 * len(QUERY)])
            if not taken and number > 30:  # also when the crowd has just taken the last one
                assert client.begin([0], 0).status == "ok"
                assert client.abort([0]).status == "ok"
        with LayoutClient(path, "late", wait=5.0) as late:
            assert late.connected


def test_a_server_whose_thread_cannot_start_leaves_its_path(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            LayoutServer(path, LayoutRecord(LAYOUT))
    assert not path.exists()
    with LayoutServer(path, LayoutRecord(LAYOUT)) as server, LayoutClient(server.path, "a") as client:
        assert client.connected


def test_an_endless_message_ends_its_connection_alone(path: Path, client: LayoutClient) -> None:
    with raw(path) as connection:
        reply = ask(connection, struct.pack("!I", 1 << 30))
        assert reply["reason"] == "a message of 1,073,741,824 bytes; at most 65,632 are allowed"
        assert connection.recv(1) == b""
    assert client.query() is not None


def test_a_malformed_message_is_answered_and_the_connection_stays(server: LayoutServer, path: Path) -> None:
    """An engine with a move under way that says one thing wrong does not lose its presence."""
    with raw(path) as connection:
        ask(connection, {"do": "attach", "engine": "a"})
        ask(connection, {"do": "begin", "layers": [0], "version": 0})
        for body, reason in [
            (b"", "no JSON"),
            (b"\xff\xfe", "no JSON"),
            (b"[" * 60000, "no JSON"),
            (b'{"protocol":1,"do":' + b"9" * 5000 + b"}", "no JSON"),
            (b"[1]", "a JSON list where an object is due"),
            (b"{}", f"protocol unknown of eplb_core unknown; {ONE}"),
            (b'{"protocol":true}', "protocol True"),
            (b'{"protocol":2,"eplb_core":"9.1"}', f"protocol 2 of eplb_core 9.1; {ONE}"),
            (b'{"protocol":1}', "Unknown request type: 'None'"),
            (b'{"protocol":1,"do":["attach"]}', "Unknown request type"),
            (b'{"protocol":1,"do":"attach","engine":"b"}', "this connection is engine 'a' already"),
            (b'{"protocol":1,"do":"commit","layers":[0],"rows":5}', "`rows` are int, not text"),
            (b'{"protocol":1,"do":"commit","layers":[0],"rows":"?"}', "`rows` are no base64"),
            (b'{"protocol":1,"do":"commit","layers":[0],"rows":"AAAA"}', "`rows` hold 3 bytes; 1 rows of 6 slots"),
            (b'{"protocol":1,"do":"fetch","config":{}}', "keeps a record and no weights"),
        ]:
            before = known(server.state)
            reply = ask(connection, wire.LENGTH.pack(len(body)) + body)
            assert reply["status"] == "refused"
            assert reason in reply["reason"]
            assert known(server.state) is before
        rows = wire.encode_rows(LAYOUT.physical_to_logical_map[:1])
        done = ask(connection, {"do": "commit", "layers": [0], "rows": rows})
        assert (done["status"], done["version"]) == ("ok", 1)


def test_a_keeper_of_a_record_needs_neither_a_gpu_nor_torch() -> None:
    """R66: whatever happens to a GPU, the record lives on."""
    code = (
        "import sys, eplb_core.loading.record.server, eplb_core.loading.record.client, eplb_core.loading.record.file\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3]).returncode == 0


def test_a_fault_of_the_server_costs_the_one_who_met_it(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LayoutServer(path, LayoutRecord(LAYOUT), exports=Weights()) as server, LayoutClient(path, "a") as client:
        with raw(path) as connection, caplog.at_level(logging.ERROR, "eplb_core"):
            assert ask(connection, {"do": "fetch", "config": {"fault": True}}) == {}
        assert "ZeroDivisionError: a fault" in caplog.text
        assert client.begin([0], 0).status == "ok"
        assert server.state is not None


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.lists(st.binary(max_size=40) | messages.map(lambda m: wire.LENGTH.pack(len(m)) + m), max_size=5))
def test_no_bytes_stop_the_server(server: LayoutServer, path: Path, data: list[bytes]) -> None:
    with raw(path) as connection:
        try:
            for chunk in data:
                connection.sendall(chunk)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it declared a message too long
    with raw(path) as connection:
        reply = ask(connection, {"do": "query"})
    assert (reply["version"], reply["digest"]) == (0, LAYOUT.digest)


# ---- the path --------------------------------------------------------------------------------------------------------


def test_the_socket_is_for_this_user_alone(server: LayoutServer, path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_second_server_on_the_path_is_an_error_and_the_first_stays(path: Path, client: LayoutClient) -> None:
    with pytest.raises(
        SocketInUseError, match=rf"{path} is served by another process \(process {os.getpid()}"
    ) as caught:
        LayoutServer(path, LayoutRecord(LAYOUT))
    assert caught.value.path == str(path)
    assert client.query() is not None


def test_two_servers_cannot_keep_their_records_in_one_file(path: Path, tmp_path: Path) -> None:
    """Each would overwrite what the other has promised: a restart would take a layout for clean that is none."""
    file = tmp_path / "record.json"
    (tmp_path / "link.json").symlink_to(file)
    with LayoutServer(path, LayoutRecord(LAYOUT), state_file=file, memory="m"), LayoutClient(path, "a") as client:
        client.begin([0], version=0)
        before = file.read_bytes()
        for other in (file, tmp_path / "link.json"):
            with pytest.raises(SocketInUseError, match=r"record\.json holds the record of another server that runs"):
                LayoutServer(f"{path}2", LayoutRecord(LAYOUT), state_file=other, memory="m")
        assert file.read_bytes() == before
    LayoutServer(f"{path}2", LayoutRecord(LAYOUT), state_file=file, memory="m").close()


def test_a_stale_socket_is_replaced(path: Path) -> None:
    """R65."""
    with bound(path, None):
        pass
    assert LayoutClient(path, "a").present is False
    with LayoutServer(path, LayoutRecord(LAYOUT)), LayoutClient(path, "a") as client:
        assert client.connected


def test_a_path_where_something_else_lives_is_left_alone(path: Path) -> None:
    path.write_text("notes")
    with pytest.raises(SocketInUseError, match="is there already and is no socket; move it away"):
        LayoutServer(path, LayoutRecord(LAYOUT))
    assert path.read_text() == "notes"
    path.unlink()
    with bound(path), pytest.raises(SocketInUseError, match="is served by a process that holds no lock"):
        LayoutServer(path, LayoutRecord(LAYOUT))


def test_a_socket_of_somebody_else_is_neither_used_nor_removed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bound(path, None):
        pass
    if os.geteuid() == 0:
        os.chown(path, 4242, 4242)
        uid = 4242
    else:
        uid = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(SocketOwnerError, match=rf"{path} belongs to user {uid}") as caught:
        LayoutServer(path, LayoutRecord(LAYOUT))
    assert caught.value.uid == uid
    assert path.exists()
    client = LayoutClient(path, "a")
    assert isinstance(client.error, SocketOwnerError)
    assert client.begin([0], 0).status == "refused"


def test_a_peer_of_another_user_is_told_from_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = socket.socketpair()
    with left, right:
        socket_path.check_peer(left, "here")
        monkeypatch.setattr(socket_path, "_CREDENTIALS", Swapped())
        with pytest.raises(SocketOwnerError, match="user 4242 is at the other end of here"):
            socket_path.check_peer(left, "here")


class Swapped:
    """Credentials as another user's process would have them."""

    size = 12

    def unpack(self, raw: bytes) -> tuple[int, int, int]:
        return 1, 4242, 4242


def test_a_path_that_no_socket_can_have_is_refused(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    for make in (lambda: LayoutServer(long, LayoutRecord(LAYOUT)), lambda: LayoutClient(long, "a")):
        with pytest.raises(ValueError, match=r"`path` \(\d+ bytes\) must have 1 to 107"):
            make()
    with pytest.raises(TypeError, match="must be text or a path"):
        LayoutServer(b"bytes", None)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        LayoutServer(tmp_path / "no" / "s", None)
    with pytest.raises(TypeError, match=r"`record` \(=ExpertLayout\) must be a LayoutRecord or None"):
        LayoutServer(tmp_path / "s", LAYOUT)  # type: ignore[arg-type]


def test_an_engine_without_a_name_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match=r"`engine_id` \(=''\) must be printable"):
        LayoutClient(path, "")


# ---- a keeper that restarts ------------------------------------------------------------------------------------------


def test_a_move_is_on_disk_before_begin_is_answered(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    with LayoutServer(path, LayoutRecord(LAYOUT), state_file=file, memory="m1"), LayoutClient(path, "a") as client:
        assert record_file.load_record(file)[0].engines == ("a",)
        client.begin([1], 0)
        state, memory = record_file.load_record(file)
        assert (state.pending, memory) == (("a", (1,), 0), "m1")
        assert client.commit([1], [ROW]).status == "ok"
        state = record_file.load_record(file)[0]
        assert (state.pending, state.version, state.layout.physical_to_logical_map[1].tolist()) == (None, 1, ROW)
        client.begin([0], 1)
        client.close()
        until(lambda: record_file.load_record(file)[0].dirty)


@pytest.mark.slow
def test_a_keeper_killed_with_its_memory_kept_knows_what_it_holds(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    for died_in_a_move in (False, True):
        file.unlink(missing_ok=True)
        with keeper(path, file) as process, LayoutClient(path, "a") as client:
            client.begin([0], 0)
            client.commit([0], [ROW])
            if died_in_a_move:
                client.begin([1], 1)
            process.kill()
            process.wait()
            assert client.begin([1], 1).status == "refused"
        record = record_file.open_record(file, LAYOUT, memory="m1")
        assert record.version == 1
        assert record.layout.physical_to_logical_map[0].tolist() == ROW
        assert record.state.num_non_followers == 1
        assert ("was pending when the keeper of the record died" in record.state.dirty) == died_in_a_move


def test_a_keeper_says_when_it_does_not_know(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    assert record_file.open_record(file, LAYOUT, memory="").state == RecordState(LAYOUT)
    record_file.save_record(file, RecordState(LAYOUT, version=3, engines=("a",)), memory="m1")
    kept = record_file.open_record(file, LAYOUT, memory="m1")
    assert (kept.version, kept.state.num_non_followers, kept.state.dirty) == (3, 1, "")
    anew = record_file.open_record(file, LAYOUT, memory="m2")
    assert (anew.version, anew.state.num_non_followers) == (0, 0)
    unknown = record_file.open_record(file, LAYOUT, memory="").query()
    assert unknown.status == "refused"
    assert "nobody said whether the memory was kept (it was at version 3)" in unknown.reason
    file.write_text(file.read_text().replace(LAYOUT.digest, "0" * 64))
    broken = record_file.open_record(file, LAYOUT, memory="m1").query()
    assert "the record's file cannot be read" in broken.reason
    with pytest.raises(FileFormatError, match="the map has digest"):
        record_file.load_record(file)
    file.write_text('{"format": "other"}')
    with pytest.raises(FileFormatError, match="another kind of file"):
        record_file.load_record(file)


@pytest.mark.parametrize("content", [b"root:x:0:0", b'{"format": "eplb-layout-1"}', b"[]"])
def test_a_file_that_is_no_record_is_not_replaced_by_one(content: bytes, tmp_path: Path, path: str) -> None:
    """Not through a link either."""
    (tmp_path / "theirs").write_bytes(content)
    (tmp_path / "state").symlink_to(tmp_path / "theirs")
    with pytest.raises(FileFormatError) as caught:
        LayoutServer(path, LayoutRecord(LAYOUT), state_file=tmp_path / "state")
    assert caught.value.path == str(tmp_path / "state")
    assert (tmp_path / "theirs").read_bytes() == content
    assert not os.path.exists(path)
    (tmp_path / "theirs").write_bytes(b'{"format": "eplb-rec')  # cut off
    LayoutServer(path, LayoutRecord(LAYOUT), state_file=tmp_path / "state").close()
    assert record_file.load_record(tmp_path / "state")[0].layout == LAYOUT


def test_a_record_s_file_that_cannot_be_seen_is_not_taken_for_none(tmp_path: Path) -> None:
    """A link to itself, as a folder without permission: there may be a version in it that weights were moved to."""
    (tmp_path / "file").symlink_to(tmp_path / "file")
    record = record_file.open_record(tmp_path / "file", LAYOUT, memory="m1")
    assert re.search("the record's file cannot be read: .*symbolic links", record.state.dirty)
