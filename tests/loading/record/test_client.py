"""What a client does with replies that break off; its requests are in test_layout_server.py."""

from __future__ import annotations

import os
import socket
import tempfile

import pytest

from eplb_core.loading.record.client import _receive


def test_descriptors_of_a_reply_that_breaks_off_are_closed() -> None:
    near, far = socket.socketpair()
    with near, far, tempfile.TemporaryFile() as file:
        before = set(os.listdir("/proc/self/fd"))
        socket.send_fds(far, [b"{"], [file.fileno()])
        far.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError, match="it ended"):
            _receive(near, 1.0)
        assert set(os.listdir("/proc/self/fd")) <= before
