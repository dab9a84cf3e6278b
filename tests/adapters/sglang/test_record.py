from __future__ import annotations

import logging
import os
import pickle
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import eplb_core as eplb
from eplb_core.adapters import hooking
from eplb_core.adapters.sglang import context
from eplb_core.adapters.sglang import daemon as sglang_daemon
from eplb_core.adapters.sglang import moves as sglang_moves
from eplb_core.adapters.sglang import record as sglang_record
from eplb_core.errors import LayoutAgreementError
from eplb_core.loading.agreement import LocalAgreement

ROWS, MOVED = [[0, 1, 2, 3, 3, 0]], [[3, 1, 2, 0, 3, 0]]


def metadata(rows: list[list[int]]) -> Any:
    p2l = torch.tensor(rows)
    return SimpleNamespace(
        physical_to_logical_map=p2l.clone(), physical_to_logical_map_cpu=p2l, num_logical_experts=4, ep_size=2
    )


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


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(hooking, "_logged", set())
    monkeypatch.setattr(hooking, "_log", [logging.getLogger("eplb_core")])
    monkeypatch.setattr(sglang_record, "_kept", [])
    monkeypatch.setattr(sglang_record, "_barred", [])
    parent: Any = None
    for name in ("sglang", "sglang.srt", "sglang.srt.weight_cache", "sglang.srt.weight_cache.protocol"):
        module: Any = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        if parent is not None:
            setattr(parent, name.rpartition(".")[2], module)
        parent = module
    parent.send_msg, parent.recv_msg = send_msg, recv_msg
    yield
    for each in sglang_record._kept:
        each.close()


def ask(daemon: Any, request: Any) -> Any:
    """One connection of the daemon, answered."""
    mine, theirs = socket.socketpair()
    with mine, theirs:
        send_msg(mine, request)
        daemon._handle_connection(theirs)
        return recv_msg(mine)


def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[list[int]] = ROWS) -> tuple[Any, Any]:
    """A daemon whose class keeps records, and the server of its record."""
    daemon_class: Any = type("Daemon", (Daemon,), {n: vars(Daemon)[n] for n in ("serve", "_handle_connection")})
    assert sglang_daemon.keep_records(daemon_class) == ""
    daemon = daemon_class(tmp_path / "cache.sock")
    server = eplb.LayoutServer(
        daemon.socket_path + sglang_record.SUFFIX,
        eplb.LayoutRecord(layout_of(rows)),
        exports=sglang_daemon._NothingMore(),
    )
    vars(daemon)["_eplb_core_server"] = server
    return daemon, server


def start_engine(daemon: Any, monkeypatch: pytest.MonkeyPatch, live: Any, *, adopts: bool = True) -> Any:
    """What an engine of one process does when it loads from the daemon; the daemon's reply."""

    def adopt(metadata: Any, layout: eplb.ExpertLayout, config: Any) -> None:
        metadata.physical_to_logical_map_cpu = torch.tensor(layout.physical_to_logical_map)

    monkeypatch.setattr(context, "live_metadata", lambda: live)
    monkeypatch.setattr(sglang_record, "_adopts", lambda: adopts)
    monkeypatch.setattr(sglang_record, "_adopt", adopt)

    def fetch_from_cache(loader: Any, model_config: Any, device_config: Any) -> Any:
        mine, theirs = socket.socketpair()
        with mine, theirs:
            sglang_record.claim_layout(send_msg, mine, {"type": "fetch_state", "config": {}})
            daemon._handle_connection(theirs)
            reply = recv_msg(mine)
        if reply["status"] != "ok":
            raise RuntimeError(str(reply))
        return reply

    return sglang_record.fetch(fetch_from_cache, SimpleNamespace(socket_path=daemon.socket_path), None, None)


def test_the_daemon_keeps_a_record_of_what_it_loaded_while_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "live_metadata", lambda: metadata(ROWS))
    seen = []

    def engine_own(daemon: Any) -> None:
        with eplb.LayoutClient(daemon.socket_path + ".layout", "look", attach=False) as look:
            assert look.found is not None
            seen.append(look.found.digest)

    sglang_daemon.serve(engine_own, Daemon(tmp_path / "cache.sock"))
    assert seen == [layout_of(ROWS).digest]
    assert not os.path.exists(tmp_path / "cache.sock.layout")
    monkeypatch.setattr(context, "live_metadata", lambda: None)
    sglang_daemon.serve(lambda daemon: seen.append("dense"), Daemon(tmp_path / "cache.sock"))
    assert seen[1] == "dense"


def test_an_engine_that_starts_after_moves_adopts_the_layout_and_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault 20 of the engine: it started on its own layout, and answered nonsense without an error."""
    daemon, server = serving(tmp_path, monkeypatch)
    with server:
        with eplb.LayoutClient(server.path, "mover") as mover:
            assert mover.begin([0], 0).status == "ok"
            assert mover.commit([0], MOVED).status == "ok"
        live = metadata(ROWS)
        with caplog.at_level(logging.INFO):
            assert start_engine(daemon, monkeypatch, live) == {"status": "ok"}
        assert live.physical_to_logical_map_cpu.tolist() == MOVED
        assert "record: version 1 of the layout is adopted" in caplog.text
        kept = sglang_record.client()
        assert kept is not None
        assert (kept.adopted, server.state.engines) == (1, (kept.engine_id,))
        assert server.state.num_non_followers == 0
        kept.close()


def test_an_engine_that_cannot_adopt_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon, server = serving(tmp_path, monkeypatch, MOVED)
    with server, pytest.raises(LayoutAgreementError, match="turn its load balancing on"):
        start_engine(daemon, monkeypatch, metadata(ROWS), adopts=False)


def test_an_engine_without_the_plug_in_is_refused_once_experts_have_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon, server = serving(tmp_path, monkeypatch)
    with server:
        with eplb.LayoutClient(server.path, "mover") as mover:
            mover.begin([0], 0)
            mover.commit([0], MOVED)
        reply = ask(daemon, {"type": "fetch_state", "config": {}})
        assert reply["status"] == "mismatch"
        assert "does not say which it routes by" in reply["daemon_config"]["eplb_core"]
        assert reply["daemon_config"]["tp_size"] == 2
        claim = {"engine": "old", "version": 0, "digest": layout_of(ROWS).digest}
        reply = ask(daemon, {"type": "fetch_state", "config": {}, "eplb_core": claim})
        assert "routes by layout" in reply["daemon_config"]["eplb_core"]
        assert daemon.served == []
        assert ask(daemon, {"type": "ping"}) == {"status": "ok"}


def test_after_an_engine_without_the_plug_in_nobody_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon, server = serving(tmp_path, monkeypatch)
    with server:
        assert ask(daemon, {"type": "fetch_state", "config": {}}) == {"status": "ok"}
        assert daemon.served == [{"type": "fetch_state", "config": {}}]  # read by the hook, and again by the engine
        with eplb.LayoutClient(server.path, "mover") as mover:
            assert mover.begin([0], 0).status == "refused"


def test_ranks_where_some_mapped_and_some_loaded_do_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Two(LocalAgreement):
        """The other rank has loaded from disk."""

        def gather(self, blob: bytes) -> list[bytes]:
            return [blob, b"disk" if blob.startswith(b"mapped") else blob]

    monkeypatch.setattr(sglang_record, "make_agreement", lambda: Two.group(1)[0])
    daemon, server = serving(tmp_path, monkeypatch)
    with server, pytest.raises(RuntimeError, match="rank 0: mapped, recorded, rank 1: disk"):
        start_engine(daemon, monkeypatch, metadata(ROWS))
    assert sglang_record.client() is None


def test_where_one_rank_has_no_record_no_rank_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank that waits for the others' records and one that does not would hang."""

    class Two(LocalAgreement):
        """The other rank has mapped, from a daemon without a record."""

        def gather(self, blob: bytes) -> list[bytes]:
            return [blob, b"mapped" if blob.startswith(b"mapped") else blob]

    monkeypatch.setattr(sglang_record, "make_agreement", lambda: Two.group(1)[0])
    daemon, server = serving(tmp_path, monkeypatch)
    with server, caplog.at_level(logging.WARNING):
        assert start_engine(daemon, monkeypatch, metadata(ROWS)) == {"status": "ok"}
        called: list[int] = []
        assert not sglang_record.record_update(lambda *_, **__: called.append(1), None, {}, None, [0], nnodes=1, rank=0)
    assert not called
    assert "nothing moves: rank 1 shares its weights with a daemon that keeps no record" in caplog.text


def test_a_rank_that_cannot_adopt_says_so_before_it_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for its word with their weights mapped."""
    told: list[bytes] = []

    class One(LocalAgreement):
        def gather(self, blob: bytes) -> list[bytes]:
            told.append(blob)
            return super().gather(blob)

    def adopt(metadata: Any, layout: eplb.ExpertLayout, config: Any) -> None:
        raise KeyError("moe_ep_rank")

    monkeypatch.setattr(sglang_record, "make_agreement", lambda: One.group(1)[0])
    monkeypatch.setattr(sglang_record, "_adopts", lambda: True)
    monkeypatch.setattr(sglang_record, "_adopt", adopt)
    live = metadata(ROWS)
    monkeypatch.setattr(context, "live_metadata", lambda: live)
    daemon, server = serving(tmp_path, monkeypatch, MOVED)
    mapped: list[Any] = []
    loader = SimpleNamespace(socket_path=daemon.socket_path)
    with server, pytest.raises(KeyError, match="moe_ep_rank"):
        sglang_record.fetch(lambda *given: mapped.append(given), loader, None, None)
    assert told[-1] == b"failed"
    assert not mapped
    assert sglang_record.client() is None


def test_a_daemon_keeps_one_record_however_often_it_is_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon, server = serving(tmp_path, monkeypatch)
    with server:
        serve = type(daemon).serve
        assert sglang_daemon.keep_records(type(daemon)) == ""
        assert type(daemon).serve is serve


def test_an_engine_of_another_configuration_is_no_user_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon, server = serving(tmp_path, monkeypatch)
    with server:
        for config in ({"tp_size": 4}, {"other": 1}, None):
            ask(daemon, {"type": "fetch_state", "config": config})  # the engine's own code answers
        with eplb.LayoutClient(server.path, "mover") as mover:
            assert mover.begin([0], 0).status == "ok"
            mover.abort([0])


def test_a_daemon_without_a_record_is_pointed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert start_engine(Daemon(tmp_path / "cache.sock"), monkeypatch, metadata(ROWS)) == {"status": "ok"}
    assert "a daemon that keeps no record of their layout" in caplog.text
    assert sglang_record.client() is None


def test_a_model_without_experts_and_weights_from_disk_keep_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "live_metadata", lambda: None)
    loader = SimpleNamespace(socket_path=str(tmp_path / "cache.sock"))
    assert sglang_record.fetch(lambda *_: "weights", loader, None, None) == "weights"
    _, server = serving(tmp_path, monkeypatch)
    monkeypatch.setattr(context, "live_metadata", lambda: metadata(ROWS))
    monkeypatch.setattr(sglang_record, "_adopts", lambda: True)
    with server:
        assert sglang_record.fetch(lambda *_: None, loader, None, None) is None
        assert sglang_record.client() is None

        def broken(*_: Any) -> Any:
            raise RuntimeError("Daemon config mismatch!")

        with pytest.raises(RuntimeError, match="Daemon config mismatch"):
            sglang_record.fetch(broken, loader, None, None)
        assert sglang_record.client() is None


def test_a_map_that_is_no_layout_is_left_to_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(context, "live_metadata", lambda: metadata([[0, 1, 2, 2, 2, 0]]))
    loader = SimpleNamespace(socket_path=str(tmp_path / "cache.sock"))
    with caplog.at_level(logging.WARNING):
        assert sglang_record.fetch(lambda *_: "weights", loader, None, None) == "weights"
    assert "record: this layout is left to SGLang: expert 3 has no slot at layer 0" in caplog.text


def test_a_path_too_long_for_a_socket_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(context, "live_metadata", lambda: metadata(ROWS))
    monkeypatch.setattr(sglang_record, "_adopts", lambda: True)
    with caplog.at_level(logging.WARNING):
        loader = SimpleNamespace(socket_path="/tmp/" + "a" * 200)
        assert sglang_record.fetch(lambda *_: "weights", loader, None, None) == "weights"
    assert "record: none is looked for" in caplog.text


def test_moves_of_the_engine_s_own_updater_are_begun_and_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    daemon, server = serving(tmp_path, monkeypatch)
    with server:
        live = metadata(ROWS)
        start_engine(daemon, monkeypatch, live)
        states = []

        def update(
            updater: Any, weights: Any, new: Any, layers: list[int], *, nnodes: int, rank: int
        ) -> dict[str, int]:
            states.append(server.state.pending)
            live.physical_to_logical_map_cpu = torch.tensor(MOVED)
            return {"missing": 0}

        assert sglang_record.record_update(update, None, {}, None, [0], nnodes=1, rank=0) == {"missing": 0}
        assert states[0] is not None
        assert (server.state.version, server.state.digest) == (1, layout_of(MOVED).digest)
        with eplb.LayoutClient(server.path, "another"), caplog.at_level(logging.WARNING):
            assert sglang_record.record_update(update, None, {}, None, [0], nnodes=1, rank=0) == {}
        assert len(states) == 1
        assert "layers [0]... stay as they are: rank 0 (busy)" in caplog.text


def test_a_move_that_could_not_be_recorded_is_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    daemon, server = serving(tmp_path, monkeypatch)
    live = metadata(ROWS)
    with server, caplog.at_level(logging.WARNING):
        start_engine(daemon, monkeypatch, live)

        def update(*_: Any, **__: Any) -> dict[str, int]:
            server.close()
            return {}

        sglang_record.record_update(update, None, {}, None, [0], nnodes=1, rank=0)
        assert "moved and could not be recorded" in caplog.text
        called: list[int] = []
        sglang_record.record_update(lambda *_, **__: called.append(1), None, {}, None, [0], nnodes=1, rank=0)
        assert not called
        assert "(refused)" in caplog.text


def test_a_layer_that_another_rank_may_not_move_is_taken_back_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_record, "_gather", lambda own: [own, ("busy", "another engine moves")])
    path, layout = str(tmp_path / "sock"), eplb.ExpertLayout([[0, 1]], 2, topology=eplb.Topology(1))
    with eplb.LayoutServer(path, eplb.LayoutRecord(layout)) as server, eplb.LayoutClient(path, "a") as client:
        monkeypatch.setattr(sglang_record, "client", lambda: client)
        assert sglang_record.record_update(lambda *_: pytest.fail("it moved"), None, None, None, [0]) == {}
        assert server.state is not None
        assert server.state.pending is None


def test_a_connection_to_a_daemon_that_keeps_no_record_is_the_daemons() -> None:
    assert sglang_daemon.answer_request(lambda daemon, conn: conn, SimpleNamespace(), "its own") == "its own"


def test_an_engine_may_not_map_what_a_keeper_that_is_gone_knew(tmp_path: Path) -> None:
    assert "nobody listens at" in sglang_daemon.may_map(str(tmp_path / "none"), {})


def test_without_a_record_the_engine_s_updater_runs_as_it_is() -> None:
    assert sglang_record.record_update(lambda *given, **_: given, 1, 2, 3, [4], nnodes=1, rank=0) == (1, 2, 3, [4])


def test_a_daemon_of_another_signature_is_left_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    class Other:
        def serve(self) -> None: ...

        def _handle_connection(self, connection: Any) -> None: ...

    before = dict(vars(Other))
    with caplog.at_level(logging.ERROR):
        trouble = sglang_daemon.keep_records(Other)
    assert trouble.startswith(
        "expected WeightCacheDaemon._handle_connection(self, conn), found WeightCacheDaemon._handle_connection(self, "
    )
    assert "record is left to SGLang, written for 0.5.23: expected" in caplog.text
    assert dict(vars(Other)) == before


def test_children_of_an_engine_get_the_daemon_that_keeps_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon: Any = ModuleType("sglang.srt.weight_cache.daemon")
    daemon.run_weight_cache_daemon = engine_own = object()
    monkeypatch.setitem(sys.modules, daemon.__name__, daemon)
    vars(sys.modules["sglang.srt.weight_cache"])["daemon"] = daemon
    run = sglang_daemon.spawn(lambda *_, **__: daemon.run_weight_cache_daemon, None, gpu_id=0)
    assert pickle.loads(pickle.dumps(run)) is sglang_daemon.run_daemon
    assert daemon.run_weight_cache_daemon is engine_own


def test_rows_of_the_layers_with_experts_alone_are_recorded_under_their_own_numbers() -> None:
    whole = layout_of([ROWS[0], ROWS[0], ROWS[0]])
    record = eplb.LayoutRecord(whole)
    record.attach("engine")
    keeper = SimpleNamespace(
        begin=lambda layers, version: record.begin("engine", layers, version),
        commit=lambda layers, rows: record.commit("engine", layers, rows),
        abort=lambda layers: record.abort("engine", layers),
    )
    rows = sglang_moves.RowsRecord(keeper, whole, [0, 2])
    assert rows.begin([1], 0).status == "ok"
    assert rows.abort([1]).status == "ok"
    assert rows.begin([1], 0).status == "ok"
    reply = rows.commit([1], MOVED)
    assert record.layout.physical_to_logical_map.tolist() == [ROWS[0], ROWS[0], MOVED[0]]
    assert reply.digest == layout_of([ROWS[0], MOVED[0]]).digest
