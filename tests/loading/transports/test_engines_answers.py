"""What Mooncake and NIXL may answer and do not when all is well: engines that stand for them say it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from eplb_core.errors import TransportError
from eplb_core.loading.transport import ReadState, Region, Transport
from eplb_core.loading.transports import Mooncake, Nixl, nixl
from eplb_core.testing.peers import batch
from tests.loading.engine_process import until

ROOT = Path(__file__).parents[3]
MEMORY = torch.zeros(16, dtype=torch.uint8)
OWN = [Region(MEMORY.data_ptr(), 8, "cpu"), Region(MEMORY.data_ptr() + 8, 8, "cpu")]


def read(transport: Transport) -> Any:
    """From region 0 of rank 1 into region 1."""
    return transport.read(1, batch([(1, 0, 0, 0, 4)]))


def modules(monkeypatch: pytest.MonkeyPatch, package: str, part: str, **names: Any) -> None:
    """What an import of a package and of one module in it finds."""
    for name in (package, f"{package}.{part}"):
        module: Any = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
        vars(module).update(names)


# ---- Mooncake --------------------------------------------------------------------------------------------------------


class Engine:
    """Mooncake's, on a host where nothing works but what is said here."""

    starts, number, answers = 0, 1, True

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.registered: list[int] = []

    def initialize(self, *where: str) -> int:
        return self.starts

    def get_rpc_port(self) -> int:
        return 4711

    def register_memory(self, address: int, nbytes: int) -> int:
        self.registered.append(address)
        return 0

    def unregister_memory(self, address: int) -> None:
        self.registered.remove(address)

    def get_first_buffer_address(self, session: str) -> int:
        if not self.answers:
            threading.Event().wait(1.0)
        return 1

    def batch_transfer_async_read(self, *spans: Any) -> int:
        return self.number

    def transfer_check_status(self, number: int) -> int:
        return self.codes.pop(0)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[Engine]:
    kind = type("Engine", (Engine,), {})
    modules(monkeypatch, "mooncake", "engine", TransferEngine=kind)
    return kind


def pair(**options: Any) -> Any:
    """A transport that is connected to another host's, as it says."""
    transport: Any = Mooncake("127.0.0.1", **options)
    record = json.loads(transport.export(OWN))
    record["identity"], record["extra"]["session"] = "0123456789abcdef", "elsewhere:1"
    transport.connect(1, json.dumps(record).encode())
    return transport


def test_mooncake_that_does_not_start_is_named_with_its_code(engine: type[Engine]) -> None:
    engine.starts = -7
    with pytest.raises(TransportError, match=r"Mooncake cannot start on '127.0.0.1' with 'tcp', '': code -7"):
        Mooncake("127.0.0.1")


@pytest.mark.parametrize(("engine", "make"), [("Mooncake", lambda: Mooncake("127.0.0.1")), ("NIXL", Nixl)])
def test_an_engine_that_is_not_there_is_named_with_what_to_install(
    engine: str, make: Callable[[], Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mooncake.engine", "nixl", "nixl_cu12", "nixl_cu13"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TransportError, match=rf"{engine} cannot be imported .*eplb-core\[{engine.lower()}\]"):
        make()


def test_a_peer_of_mooncake_that_does_not_answer_is_not_waited_for_without_end(engine: type[Engine]) -> None:
    engine.answers = False
    with pytest.raises(TransportError, match=r"rank 1 at elsewhere:1 did not answer within 0\.01 s"):
        pair(timeout=0.01)


def test_a_transfer_that_mooncake_does_not_begin_fails_the_read(engine: type[Engine]) -> None:
    engine.number = 0
    transport = pair()
    status = transport.poll(read(transport))
    assert (status.state, status.reason) == (ReadState.FAILED, "rank 1 at elsewhere:1 cannot be reached")


def test_a_transfer_that_times_out_inside_of_mooncake_may_still_write(engine: type[Engine]) -> None:
    """It does not say whether it has ended: the destination is never free, and its memory stays registered."""
    transport = pair()
    transport._engine.codes = [0, -2]
    ticket = read(transport)
    for _ in range(2):
        assert transport.poll(ticket).state is ReadState.PENDING
    transport.export(OWN[1:])
    transport.close()
    assert sorted(transport._engine.registered) == sorted(region.address for region in OWN)


def test_peers_of_mooncake_come_and_go_and_reads_end_as_it_says(engine: type[Engine]) -> None:
    with pytest.raises(TransportError, match="must be 'tcp' or 'rdma'"):
        Mooncake("127.0.0.1", protocol="pigeon")
    transport = pair()
    transport.connect(0, transport.export(OWN))
    for code, state in ((1, ReadState.DONE), (-1, ReadState.FAILED)):
        transport._engine.codes = [0, code]
        ticket = read(transport)
        assert transport.poll(ticket).state is state
    transport.disconnect(1)
    transport.export(OWN[1:])
    assert transport._engine.registered == [OWN[1].address]
    transport.close()
    assert transport._engine.registered == []


def test_regions_that_mooncake_does_not_take_are_refused_with_its_code(engine: type[Engine]) -> None:
    transport: Any = Mooncake("127.0.0.1")
    transport._engine.register_memory = lambda address, nbytes: -3
    with pytest.raises(TransportError, match=r"Mooncake cannot register 8 bytes at 0x.*: code -3; regions must not"):
        transport.export(OWN)


# ---- NIXL ------------------------------------------------------------------------------------------------------------


class NotFound(Exception):
    """NIXL's."""


class nixlRemoteDisconnectError(Exception):
    """NIXL's."""


class Bindings:
    """Where its exceptions are."""

    nixlNotFoundError = NotFound
    nixlRemoteDisconnectError = nixlRemoteDisconnectError


class Agent:
    """NIXL's, with what it is to raise by the name of the call."""

    fails: dict[str, Exception]

    def __init__(self, name: str, config: Any) -> None:
        self.name, self.backends = name, ["UCX"]
        self.state = "PROC"
        self.registered = 0
        self.looks, self.takes, self.inside, self.crowded = 0, 0.0, 0, False
        self._call("start")

    def _call(self, name: str) -> None:
        if name in self.fails:
            raise self.fails[name]

    def register_memory(self, rows: Any, kind: str) -> None:
        self._call("register")
        self.registered += len(rows)

    def deregister_memory(self, rows: Any) -> None:
        self.registered -= len(rows)

    def get_plugin_list(self) -> list[str]:
        return self.backends

    def get_reg_descs(self, rows: Any, kind: str) -> Any:
        return rows

    get_xfer_descs = get_reg_descs

    def get_agent_metadata(self) -> bytes:
        return b"about"

    def add_remote_agent(self, metadata: bytes) -> bytes:
        return b"another"

    def remove_remote_agent(self, name: str) -> None:
        self.removed = name
        self._call("remove")

    def initialize_xfer(self, *what: Any) -> object:
        self._call("read")
        return object()

    def transfer(self, handle: object) -> str:
        return self.state

    def check_xfer_state(self, handle: object) -> str:
        self.inside += 1
        self.crowded |= self.inside > 1
        if self.takes:
            threading.Event().wait(self.takes)
        self.looks, self.inside = self.looks + 1, self.inside - 1
        return self.state


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> type[Agent]:
    return install_agent(monkeypatch)


def install_agent(monkeypatch: pytest.MonkeyPatch) -> type[Agent]:
    kind = type("Agent", (Agent,), {"fails": {}})
    modules(monkeypatch, "nixl", "_api", nixl_agent=kind, nixl_agent_config=dict, nixlBind=Bindings)
    return kind


def nixl_pair(metadata: str | None = "YWJvdXQ=") -> Any:
    transport: Any = Nixl()
    record = json.loads(transport.export(OWN))
    record["identity"], record["extra"] = "0123456789abcdef", {"metadata": metadata}
    transport.connect(1, json.dumps(record).encode())
    return transport


@pytest.mark.parametrize(
    ("call", "cannot"),
    [("start", "start its back-end 'UCX'"), ("register", "register 2 regions"), ("read", "read from")],
)
def test_what_nixl_does_not_do_is_said_with_its_reason(agent: type[Agent], call: str, cannot: str) -> None:
    agent.fails[call] = RuntimeError("no memory")
    with pytest.raises(TransportError, match=rf"NIXL cannot {cannot}.*: RuntimeError\('no memory'\)"):
        read(nixl_pair())


@pytest.mark.parametrize("metadata", [None, "?"])
def test_a_blob_that_nixl_cannot_use_is_refused(agent: type[Agent], metadata: str | None) -> None:
    with pytest.raises(TransportError, match="NIXL cannot connect to rank 1: "):
        nixl_pair(metadata)


@pytest.mark.parametrize("error", [None, NotFound(), nixlRemoteDisconnectError()])
def test_an_agent_that_left_is_forgotten_when_the_last_read_from_it_is_over(
    agent: type[Agent], error: Exception | None
) -> None:
    """And memory that is not exported any more when nothing is written to it any more."""
    transport = nixl_pair()
    ticket = read(transport)
    if error is not None:
        agent.fails["remove"] = error
    transport.disconnect(1)
    transport.export(OWN[1:])
    assert not hasattr(transport._agent, "removed")
    assert transport._agent.registered == 2
    transport._agent.state = "DONE"
    assert transport.poll(ticket).state.is_end
    assert transport._agent.removed == "another"
    transport.export(OWN)
    transport.export(OWN[1:])
    assert transport._agent.registered == 1


@pytest.mark.parametrize("state", ["DONE", "ERR"])
def test_nixl_is_let_go_when_the_last_read_of_a_closed_transport_is_over(
    agent: type[Agent], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether anybody polls or not, and not before: until then its memory stays known to NIXL."""
    monkeypatch.setattr(nixl, "_LOOK_S", 0.0)
    transport = nixl_pair()
    tickets, used = [read(transport), read(transport)], transport._agent
    transport.close()
    until(lambda: used.looks > 10)
    assert (used.registered, transport._agent, transport in nixl._UNDRAINED) == (2, used, True)
    used.state = state
    until(lambda: transport._agent is None)
    assert (used.registered, transport in nixl._UNDRAINED) == (0, False)
    ends = {transport.poll(ticket).state for ticket in tickets}
    assert ends == {ReadState.DONE if state == "DONE" else ReadState.LOST_PEER}


def test_nixl_is_asked_by_one_thread_at_a_time(agent: type[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "_LOOK_S", 0.0)
    transport = nixl_pair()
    ticket, used = read(transport), transport._agent
    used.takes = 0.001
    transport.close()
    until(lambda: transport.poll(ticket).state is ReadState.ABANDONED and used.looks > 50)
    assert not used.crowded
    used.state = "DONE"
    assert transport.poll(ticket).state is ReadState.DONE


def test_nixl_stays_until_somebody_polls_where_no_thread_can_start(
    agent: type[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    transport = nixl_pair()
    ticket, used = read(transport), transport._agent
    monkeypatch.setattr(threading.Thread, "start", start)
    transport.close()
    assert (used.registered, transport in nixl._UNDRAINED) == (2, True)
    used.state = "DONE"
    assert transport.poll(ticket).state is ReadState.DONE
    assert (used.registered, transport in nixl._UNDRAINED) == (0, False)


@pytest.mark.slow
def test_a_process_ends_though_a_read_of_a_closed_transport_may_still_write() -> None:
    code = (
        "import pytest, tests.loading.transports.test_engines_answers as here\n"
        "here.install_agent(pytest.MonkeyPatch())\n"
        "transport = here.nixl_pair()\n"
        "ticket = here.read(transport)\n"
        "transport.close()\n"
        "print(transport.poll(ticket).state.name)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.returncode) == ("ABANDONED\n", 0), ended.stderr


def test_peers_of_nixl_come_and_go_and_reads_end_as_it_says(agent: type[Agent]) -> None:
    with pytest.raises(TransportError, match=r"`backend` \(='WIRE'\) must be one of NIXL's: \['UCX'\]"):
        Nixl("WIRE")
    transport = nixl_pair()
    record = json.loads(transport.export(OWN))
    transport.connect(0, json.dumps(record).encode())
    record["identity"], record["extra"] = "another of rank 1", {"metadata": "YWJvdXQ="}
    transport.connect(1, json.dumps(record).encode())
    transport._agent.state = "DONE"
    assert transport.poll(read(transport)).state is ReadState.DONE
    transport._agent.state = "PROC"
    ticket = read(transport)
    assert transport.poll(ticket).state is ReadState.PENDING
    transport._agent.state = "ERR"
    assert transport.poll(ticket).reason == "rank 1: RuntimeError('NIXL says ERR')"
    agent.fails["read"] = nixlRemoteDisconnectError()
    assert transport.poll(read(transport)).state is ReadState.LOST_PEER
    used = transport._agent
    transport.close()
    assert (used.registered, transport._agent) == (0, None)
