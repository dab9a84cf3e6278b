"""Kernels of an engine's processes, compiled by one of them while the others wait."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Iterator

from eplb_core._warm_up import warm_up
from eplb_core.adapters import hooking

_ready: list[float] = []
"""Seconds that it took in this process; empty before."""


def warm_up_once() -> Exception | None:
    """Compile or load all host kernels, once in this process; return what went wrong.

    Where several processes of a user come at once, one compiles, after an installation for minutes, and the others
    wait and load what it left on disk. Both are lines in the log.
    """
    if _ready:
        return None
    start = time.monotonic()
    hooking.log_once(
        "kernels are loaded, or compiled in one process for all: minutes, once after an installation", logging.INFO
    )
    try:
        with _first_alone():
            warm_up()
    except Exception as error:  # the engine starts all the same
        hooking.log_once(f"kernels could not be compiled at the start: {hooking.words(error)}")
        return error
    _ready.append(time.monotonic() - start)
    hooking.log_once(f"kernels are ready after {_ready[0]:.1f} s", logging.INFO)
    return None


@contextlib.contextmanager
def _first_alone() -> Iterator[None]:
    """Inside it is the first process alone; once that has left, all others at a time."""
    try:
        # Of this user alone: in a folder of all, another's file of this name is not opened but left.
        path = os.path.join(tempfile.gettempdir(), f"eplb_core-warm-up-{os.getuid()}")
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        yield
        return
    try:
        if os.fstat(lock).st_uid == os.getuid():
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fcntl.flock(lock, fcntl.LOCK_SH)  # until it is done; what it left is loaded beside the others
        yield
    finally:
        os.close(lock)
