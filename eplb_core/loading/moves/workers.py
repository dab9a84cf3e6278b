"""Threads beside the forward thread, and what they must do before they touch a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import queue
import threading
import time
from collections.abc import Callable

import torch

_log = logging.getLogger("eplb_core")


BREATH_S = 5e-5


def breathe() -> None:
    """Release the interpreter lock for long enough that a waiting thread takes it.

    Workers call it between parts of some ten microseconds. `sleep(0)` returns before the other thread runs, and takes
    the lock again.
    """
    time.sleep(BREATH_S)


class Worker:
    """One thread that runs jobs in turn; made at once, so that none is made while serving.

    A daemon: a job that never ends (a user's function, a read that cannot be stopped) does not keep the process.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._given, self._done = 0, 0
        self._giving = threading.Lock()
        self._thread = threading.Thread(target=self._run, args=(device,), name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` after the jobs before it. Never waits; any thread."""
        with self._giving:
            self._given += 1
            self._jobs.put(job)

    def wait_quiet(self, seconds: float) -> bool:
        """Wait until no job runs or waits; return False if it takes longer."""
        until = time.monotonic() + seconds
        while self._given != self._done:
            if time.monotonic() > until:
                return False
            time.sleep(0.0005)
        return True

    def close(self, seconds: float) -> bool:
        """End the thread after its jobs; return False if it takes longer."""
        self._jobs.put(None)
        self._thread.join(max(seconds, 0.0))
        return not self._thread.is_alive()

    def _run(self, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
            _relax_capture()
        while (job := self._wait()) is not None:
            try:
                job()
            except BaseException:  # the thread goes on; a migration that hangs on it ends by its deadline
                _log.exception("a job of %s failed", threading.current_thread().name)
            del job  # and what it holds, before the wait for another
            self._done += 1

    def _wait(self) -> Callable[[], None] | None:
        """Wait for the next job, without the interpreter lock."""
        return self._jobs.get()


def _relax_capture() -> None:  # pragma: no cover  needs a GPU
    """Let this thread query events while another captures a graph in the default, global, mode."""
    with contextlib.suppress(OSError, AttributeError):
        runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
        runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(2)))
