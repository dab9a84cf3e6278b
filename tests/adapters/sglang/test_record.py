"""The weight cache with a record, on stand-ins for SGLang's daemon and loader; its own are in tests/engines."""

from __future__ import annotations

import os
import pickle
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import eplb_core as eplb
from eplb_core.adapters.sglang import context
from eplb_core.adapters.sglang import daemon as sglang_daemon
from eplb_core.adapters.sglang import record as sglang_record
from eplb_core.adapters.sglang.maps import update_rows
from eplb_core.errors import LayoutAgreementError
from eplb_core.loading.agreement import LocalAgreement
from tests.adapters.fakes import metadata_of, modules

ROWS, MOVED = [[0, 1, 2, 3, 3, 0]], [[3, 1, 2, 0, 3, 0]]
FETCH = {"type": "fetch_state", "config": {}}


def layout_of(rows: list[list[int]]) -> eplb.ExpertLayout:
    return eplb.ExpertLayout(rows, 4, topology=eplb.Topology(2))


def send_msg(sock: Any, message: Any) -> None:
    """As the engine's protocol has it: a length and a pickle."""
    data = pickle.dumps(message)
    sock.sendall(struct.pack("!I", len(data)) + data)


def recv_msg(sock: Any) -> Any:
    def exactly(size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = sock.recv(size - len(data))
            if not part:
                raise ConnectionError("it ended")
            data += part
        return data

    return pickle.loads(exactly(*struct.unpack("!I", exactly(4))))


class Config:
    """The engine's fingerprint of weights."""

    def __init__(self, tp_size: int = 2) -> None:
        self.tp_size = tp_size

    @classmethod
    def from_dict(cls, found: dict[str, int]) -> Config:
        return cls(**found)

    def to_dict(self) -> dict[str, int]:
        return {"tp_size": self.tp_size}

    def matches(self, other: Config) -> bool:
        return self.tp_size == other.tp_size


class Daemon:
    """The engine's daemon as far as the hooks see it: a request, an answer."""

    def __init__(self, path: Path) -> None:
        self.socket_path = str(path)
        self.config = Config()
        self.served: list[Any] = []

    def serve(self) -> list[Any]:
        """Two requests, as the fixture's client sends them."""
        return self.served

    def _handle_connection(self, conn: Any) -> None:
        request = recv_msg(conn)
        self.served.append(request)
        send_msg(conn, {"status": "ok"})


def ask(daemon: Any, request: Any) -> Any:
    """One connection of the daemon, answered."""
    mine, theirs = socket.socketpair()
    with mine, theirs:
        sglang_record.claim_layout(send_msg, mine, request)
        daemon._handle_connection(theirs)
        return recv_msg(mine)


class Cache:
    """A daemon whose class keeps records, with the server of its record."""

    def __init__(self, daemon: Any, server: eplb.LayoutServer) -> None:
        self.daemon, self.server = daemon, server

    @property
    def state(self) -> Any:
        return self.server.state

    def begin(self) -> str:
        """Whether somebody may move."""
        with eplb.LayoutClient(self.server.path, "mover") as mover:
            status = mover.begin([0], 0).status
            if status == "ok":
                mover.abort([0])
            return status

    def move(self) -> None:
        with eplb.LayoutClient(self.server.path, "mover") as mover:
            assert mover.begin([0], 0).status == "ok"
            assert mover.commit([0], MOVED).status == "ok"


class Engine:
    """An engine of one process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.live = metadata_of(ROWS)
        self.adopts = True
        monkeypatch.setattr(context, "live_metadata", lambda: self.live)
        monkeypatch.setattr(sglang_record, "_adopts", lambda: self.adopts)
        monkeypatch.setattr(sglang_record, "_adopt", self.adopt)

    def adopt(self, metadata: Any, layout: eplb.ExpertLayout, config: Any) -> None:
        update_rows(metadata, metadata_of(layout.physical_to_logical_map.tolist()), range(layout.num_layers))

    def load(self, path: object, fetch: Callable[..., Any] = lambda *_: "weights") -> Any:
        """What its loader answers where the engine's own `_fetch_from_cache` is this."""
        return sglang_record.fetch(fetch, SimpleNamespace(socket_path=str(path)), None, None)

    def start(self, daemon: Any) -> Any:
        """Load from the daemon; its reply."""

        def fetch_from_cache(loader: Any, model_config: Any, device_config: Any) -> Any:
            reply = ask(daemon, FETCH)
            if reply["status"] != "ok":
                raise RuntimeError(str(reply))
            return reply

        return self.load(daemon.socket_path, fetch_from_cache)

    def update(self, move: Callable[..., Any]) -> Any:
        """What its updater answers for a move of layer 0 where the engine's own `update` is this."""
        return sglang_record.record_update(move, None, {}, None, [0], nnodes=1, rank=0)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(sglang_record, "_kept", [])
    monkeypatch.setattr(sglang_record, "_barred", [])
    yield Engine(monkeypatch)
    for each in sglang_record._kept:
        each.close()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cache]:
    modules(monkeypatch, "sglang.srt.weight_cache.protocol", send_msg=send_msg, recv_msg=recv_msg)
    daemon_class: Any = type("Daemon", (Daemon,), {n: vars(Daemon)[n] for n in ("serve", "_handle_connection")})
    assert sglang_daemon.keep_records(daemon_class) == ""
    daemon = daemon_class(tmp_path / "cache.sock")
    path, record = daemon.socket_path + sglang_record.SUFFIX, eplb.LayoutRecord(layout_of(ROWS))
    with eplb.LayoutServer(path, record, exports=sglang_daemon._NothingMore()) as server:
        vars(daemon)["_eplb_core_server"] = server
        yield Cache(daemon, server)


def second_rank(monkeypatch: pytest.MonkeyPatch, word: bytes) -> None:
    """Another rank says this when this one has mapped its weights, and otherwise what this one says."""

    class Two(LocalAgreement):
        def gather(self, blob: bytes) -> list[bytes]:
            return [blob, word if blob.startswith(b"mapped") else blob]

    monkeypatch.setattr(sglang_record, "make_agreement", lambda: Two.group(1)[0])


def must_not_move(*_: Any, **__: Any) -> None:
    pytest.fail("it moved")


# ---- the daemon ------------------------------------------------------------------------------------------------------


def test_the_daemon_keeps_a_record_of_what_it_loaded_while_it_serves(tmp_path: Path, engine: Engine) -> None:
    seen = []

    def engine_own(daemon: Any) -> None:
        with eplb.LayoutClient(daemon.socket_path + ".layout", "look", attach=False) as look:
            assert look.found is not None
            seen.append(look.found.digest)

    sglang_daemon.serve(engine_own, Daemon(tmp_path / "cache.sock"))
    assert seen == [layout_of(ROWS).digest]
    assert not os.path.exists(tmp_path / "cache.sock.layout")
    engine.live = None
    sglang_daemon.serve(lambda daemon: seen.append("dense"), Daemon(tmp_path / "cache.sock"))
    assert seen[1] == "dense"


def test_an_engine_without_the_plug_in_is_refused_once_experts_have_moved(cache: Cache) -> None:
    cache.move()
    old = {"engine": "old", "version": 0, "digest": layout_of(ROWS).digest}
    for more, reason in (({}, "does not say which it routes by"), ({"eplb_core": old}, "routes by layout")):
        reply = ask(cache.daemon, FETCH | more)
        assert (reply["status"], reply["daemon_config"]["tp_size"]) == ("mismatch", 2)
        assert reason in reply["daemon_config"]["eplb_core"]
    assert cache.daemon.served == []
    assert ask(cache.daemon, {"type": "ping"}) == {"status": "ok"}


def test_after_an_engine_without_the_plug_in_nobody_moves(cache: Cache) -> None:
    assert ask(cache.daemon, FETCH) == {"status": "ok"}
    assert cache.daemon.served == [FETCH]  # read by the hook, and again by the engine
    assert cache.begin() == "refused"


def test_an_engine_of_another_configuration_is_no_user_of_the_weights(cache: Cache) -> None:
    for config in ({"tp_size": 4}, {"other": 1}, None):
        ask(cache.daemon, {"type": "fetch_state", "config": config})  # the engine's own code answers
    assert cache.begin() == "ok"


def test_a_daemon_keeps_one_record_however_often_it_is_asked_to(cache: Cache) -> None:
    daemon_class = type(cache.daemon)
    serve = daemon_class.serve
    assert sglang_daemon.keep_records(daemon_class) == ""
    assert daemon_class.serve is serve


def test_a_connection_to_a_daemon_that_keeps_no_record_is_the_daemons() -> None:
    assert sglang_daemon.answer_request(lambda daemon, conn: conn, SimpleNamespace(), "its own") == "its own"


def test_an_engine_may_not_map_what_a_keeper_that_is_gone_knew(tmp_path: Path) -> None:
    assert "nobody listens at" in sglang_daemon.may_map(str(tmp_path / "none"), {})


def test_a_daemon_of_another_signature_is_left_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    class Other:
        def serve(self) -> None: ...

        def _handle_connection(self, connection: Any) -> None: ...

    before = dict(vars(Other))
    trouble = sglang_daemon.keep_records(Other)
    assert "WeightCacheDaemon._handle_connection(self, conn), found" in trouble
    assert trouble in caplog.text
    assert dict(vars(Other)) == before


def test_children_of_an_engine_get_the_daemon_that_keeps_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_own = object()
    daemon = modules(monkeypatch, "sglang.srt.weight_cache.daemon", run_weight_cache_daemon=engine_own)
    run = sglang_daemon.spawn(lambda *_, **__: daemon.run_weight_cache_daemon, None, gpu_id=0)
    assert pickle.loads(pickle.dumps(run)) is sglang_daemon.run_daemon
    assert daemon.run_weight_cache_daemon is engine_own


# ---- an engine that starts -------------------------------------------------------------------------------------------


def test_an_engine_that_starts_after_moves_adopts_the_layout_and_is_served(
    cache: Cache, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault 20 of the engine: it started on its own layout, and answered nonsense without an error."""
    cache.move()
    assert engine.start(cache.daemon) == {"status": "ok"}
    assert engine.live.physical_to_logical_map_cpu.tolist() == MOVED
    assert "version 1 of the layout is adopted" in caplog.text
    kept = sglang_record.client()
    assert kept is not None
    assert (kept.adopted, cache.state.engines) == (1, (kept.engine_id,))
    assert cache.state.num_non_followers == 0


def test_an_engine_that_cannot_adopt_does_not_start(cache: Cache, engine: Engine) -> None:
    cache.move()
    engine.adopts = False
    with pytest.raises(LayoutAgreementError, match="turn its load balancing on"):
        engine.start(cache.daemon)


def test_ranks_where_some_mapped_and_some_loaded_do_not_start(
    cache: Cache, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    second_rank(monkeypatch, b"disk")
    with pytest.raises(RuntimeError, match="rank 0: mapped, recorded, rank 1: disk"):
        engine.start(cache.daemon)
    assert sglang_record.client() is None


def test_where_one_rank_has_no_record_no_rank_moves(
    cache: Cache, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank that waits for the others' records and one that does not would hang."""
    second_rank(monkeypatch, b"mapped")
    assert engine.start(cache.daemon) == {"status": "ok"}
    assert not engine.update(must_not_move)
    assert "nothing moves: rank 1" in caplog.text


def test_a_rank_that_cannot_adopt_says_so_before_it_raises(
    cache: Cache, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for its word with their weights mapped."""
    told: list[bytes] = []

    class One(LocalAgreement):
        def gather(self, blob: bytes) -> list[bytes]:
            told.append(blob)
            return super().gather(blob)

    def adopt(metadata: Any, layout: eplb.ExpertLayout, config: Any) -> None:
        raise KeyError("moe_ep_rank")

    monkeypatch.setattr(sglang_record, "make_agreement", lambda: One.group(1)[0])
    monkeypatch.setattr(sglang_record, "_adopt", adopt)
    cache.move()
    with pytest.raises(KeyError, match="moe_ep_rank"):
        engine.load(cache.daemon.socket_path, lambda *_: pytest.fail("it mapped"))
    assert told[-1] == b"failed"
    assert sglang_record.client() is None


def test_a_daemon_without_a_record_is_pointed_out(
    tmp_path: Path, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    assert engine.start(Daemon(tmp_path / "cache.sock")) == {"status": "ok"}
    assert "a daemon that keeps no record" in caplog.text
    assert sglang_record.client() is None


def test_a_model_without_experts_and_weights_from_disk_keep_no_record(cache: Cache, engine: Engine) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("Daemon config mismatch!")

    path = cache.daemon.socket_path
    assert engine.load(path, lambda *_: None) is None
    with pytest.raises(RuntimeError, match="Daemon config mismatch"):
        engine.load(path, broken)
    engine.live = None
    assert engine.load(path) == "weights"
    assert sglang_record.client() is None


def test_what_cannot_be_recorded_is_left_to_the_engine(
    tmp_path: Path, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    assert engine.load("/tmp/" + "a" * 200) == "weights"  # too long for a socket
    assert "record: none is looked for" in caplog.text
    engine.live.physical_to_logical_map_cpu[0] = torch.tensor([0, 1, 2, 2, 2, 0])
    assert engine.load(tmp_path / "cache.sock") == "weights"
    assert "record: this layout is left to SGLang: expert 3 has no slot at layer 0" in caplog.text


# ---- an engine that moves --------------------------------------------------------------------------------------------


def test_moves_of_the_engine_s_own_updater_are_begun_and_committed(
    cache: Cache, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.start(cache.daemon)
    states = []

    def update(updater: Any, weights: Any, new: Any, layers: list[int], *, nnodes: int, rank: int) -> dict[str, int]:
        states.append(cache.state.pending)
        update_rows(engine.live, metadata_of(MOVED), layers)
        return {"missing": 0}

    assert engine.update(update) == {"missing": 0}
    assert states[0] is not None
    assert (cache.state.version, cache.state.digest) == (1, layout_of(MOVED).digest)
    with eplb.LayoutClient(cache.server.path, "another"):
        assert engine.update(must_not_move) == {}
    assert "layers [0]... stay as they are: rank 0 (busy)" in caplog.text


def test_a_move_that_could_not_be_recorded_is_the_last(
    cache: Cache, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.start(cache.daemon)
    engine.update(lambda *_, **__: cache.server.close())
    assert "moved and could not be recorded" in caplog.text
    engine.update(must_not_move)
    assert "(refused)" in caplog.text


def test_a_layer_that_another_rank_may_not_move_is_taken_back_here(
    cache: Cache, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_record, "_gather", lambda own: [own, ("busy", "another engine moves")])
    engine.start(cache.daemon)
    assert engine.update(must_not_move) == {}
    assert cache.state.pending is None


def test_without_a_record_the_engine_s_updater_runs_as_it_is() -> None:
    assert sglang_record.record_update(lambda *given, **_: given, 1, 2, 3, [4], nnodes=1, rank=0) == (1, 2, 3, [4])
