"""Processes by number and start, and their descriptors."""

from __future__ import annotations

import os
import subprocess

import pytest

from eplb_core.loading.transports.processes import Process, borrowed_fd, started


def test_a_process_that_there_is_not_never_started() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert started(ended.pid) == -1
    assert not Process(ended.pid, 1).is_alive()
    assert Process(os.getpid(), started(os.getpid())).is_alive()


def test_a_descriptor_that_a_process_does_not_have_is_named() -> None:
    with (
        pytest.raises(OSError, match=rf"descriptor 1000000 of process {os.getpid()}: "),
        borrowed_fd(os.getpid(), 10**6),
    ):
        pass
