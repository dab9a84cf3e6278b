"""Whose a Unix socket's path is, where other tests of servers do not come."""

from __future__ import annotations

import errno
import shutil
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from eplb_core import SocketInUseError
from eplb_core.loading.record.socket_path import SocketPlace


def test_a_listener_whose_queue_is_full_is_not_taken_for_dead(tmp_path: Path) -> None:
    path = str(tmp_path / "sock")
    with ExitStack() as stack:
        busy = stack.enter_context(socket.socket(socket.AF_UNIX))
        busy.bind(path)
        busy.listen(0)
        waiting = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(9)]
        for one in waiting:
            one.setblocking(False)
        assert errno.EAGAIN in [one.connect_ex(path) for one in waiting]
        with pytest.raises(SocketInUseError, match="is served by a process that holds no lock"):
            SocketPlace(path)


def test_a_folder_that_is_gone_by_then_ends_the_start_without_a_socket_left_open(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    place = SocketPlace(tmp_path / "run" / "sock")
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(FileNotFoundError):
        place.listen()
    place.release()
