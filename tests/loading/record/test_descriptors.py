"""Keeper and clients whose process or user has no descriptors left, in processes of their own; other people's files."""

from __future__ import annotations

import os
import re
import stat
import threading
from pathlib import Path

import pytest

from eplb_core import LayoutClient, LayoutRecord, LayoutServer, SocketOwnerError
from eplb_core.errors import RecordLostError
from eplb_core.loading.record.file import open_record, save_record
from eplb_core.loading.record.socket_path import SocketPlace
from eplb_core.loading.record.state import RecordState
from tests.loading.descriptors import no_descriptor_left
from tests.loading.record.keeper_process import LAYOUT
from tests.processes import python

IN_FLIGHT = """
import os, resource, socket, sys, tempfile
from eplb_core import LayoutClient, LayoutRecord, LayoutServer
from tests.loading.record.keeper_process import LAYOUT

folder = tempfile.mkdtemp()
if os.geteuid() == 0:  # root may have any number of descriptors on their way
    os.chown(folder, 65534, 65534)
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)

class Weights:
    fd = os.memfd_create("weights")

    def difference(self, config, frame):
        return None

    def about(self):
        return {}

    def export(self):
        return {}, [self.fd]

resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
path = folder + "/s"
server = LayoutServer(path, LayoutRecord(LAYOUT), exports=Weights())
with server, LayoutClient(path, "a") as a, LayoutClient(path, "b") as b:
    near, far = socket.socketpair()
    reply, fds = a.fetch({}, LAYOUT.digest, {})
    print(reply["status"], len(fds))
    socket.send_fds(near, [b"x"], [Weights.fd] * 253)  # of any process of this user, and nobody has taken them yet
    reply, fds = a.fetch({}, LAYOUT.digest, {})
    print(reply["status"], len(fds), reply["reason"])
    print(*b.begin([0], 0)[:2])
    for fd in socket.recv_fds(far, 1, 253)[1]:
        os.close(fd)
    reply, fds = a.fetch({}, LAYOUT.digest, {})
    print(reply["status"], len(fds), a.connected)
"""


def test_an_engine_whose_descriptors_cannot_be_sent_is_still_there_and_may_ask_again() -> None:
    """Of this user more are on their way than a process may have open: sending any fails (ETOOMANYREFS)."""
    said = python(IN_FLIGHT).stdout.splitlines()
    assert (said[0], said[3]) == ("ok 1", "ok 1 True")
    assert said[1].startswith("busy 0 the descriptors of the weights cannot be sent: [Errno 109]")
    assert said[2].startswith("busy engine 'a' is attached too")


def test_a_client_without_a_descriptor_says_so_and_does_not_raise(tmp_path: Path) -> None:
    """One rank that raised would leave the others waiting; nor is a keeper absent that cannot be asked."""
    with LayoutServer(tmp_path / "s", LayoutRecord(LAYOUT)):
        with no_descriptor_left():
            client = LayoutClient(tmp_path / "s", "a")
        assert isinstance(client.error, RecordLostError)
        assert (client.present, client.connected) == (True, False)
        assert re.search(r"s cannot be reached: \[Errno 24\]", client.begin([0], 0).reason)


# ---- other users -----------------------------------------------------------------------------------------------------


def test_a_state_file_is_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        save_record(tmp_path / "record", RecordState(LAYOUT), memory="m")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "record").stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["s", "s.lock", "record", "record.lock"])
def test_nothing_of_another_user_is_taken_for_a_server_or_its_record(tmp_path: Path, name: str) -> None:
    """In a folder that all may write to, another user's lock would pass for a server that runs."""
    theirs = tmp_path / name
    theirs.write_text("")
    if os.geteuid() != 0:
        pytest.skip("only root can make a file of another user")
    os.chown(theirs, 4242, 4242)
    with pytest.raises(SocketOwnerError, match=rf"{theirs} belongs to user 4242") as caught:
        LayoutServer(tmp_path / "s", LayoutRecord(LAYOUT), state_file=tmp_path / "record")
    assert (caught.value.path, caught.value.uid) == (str(theirs), 4242)
    if name == "record":
        assert "belongs to user 4242" in open_record(theirs, LAYOUT, memory="m").state.dirty


def test_a_server_whose_loop_breaks_ends_its_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines would wait for answers that nobody gives."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with LayoutServer(tmp_path / "s", LayoutRecord(LAYOUT)) as server, LayoutClient(tmp_path / "s", "a") as client:
        monkeypatch.setattr(server._loop, "_read_or_send", lambda _: 1 // 0)
        assert "closed the connection" in client.begin([0], 0).reason


def test_a_place_of_another_path_is_refused(tmp_path: Path) -> None:
    place = SocketPlace(tmp_path / "other")
    with pytest.raises(ValueError, match=r"`place` \(of .*/other\) must be that of `path` \(=.*/s\)"):
        LayoutServer(tmp_path / "s", None, place=place)
    place.release()
