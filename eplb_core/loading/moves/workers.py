"""Threads beside that of the passes, and what they must do before they touch a GPU."""

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
    """Let go of the interpreter, for long enough that a thread which waits for it wakes up and takes it.

    Between any two parts of a worker's doings that take some ten microseconds each. `sleep(0)` will not do: it comes
    back before the other thread runs, and takes the interpreter again.
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
        """Run `job` after those before it; it must not raise. Never waits; any thread."""
        with self._giving:
            self._given += 1
            self._jobs.put(job)

    def is_quiet(self) -> bool:
        """No job runs or waits."""
        return self._given == self._done

    def wait_quiet(self, seconds: float) -> bool:
        """Wait until `is_quiet`; False if it takes longer."""
        until = time.monotonic() + seconds
        while not self.is_quiet():
            if time.monotonic() > until:
                return False
            time.sleep(0.0005)
        return True

    def close(self, seconds: float) -> bool:
        """Let the thread end after its jobs; False if it takes longer."""
        self._jobs.put(None)
        self._thread.join(max(seconds, 0.0))
        return not self._thread.is_alive()

    def _run(self, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
            _relax_capture()
        while self._run_one():
            self._done += 1

    def _wait(self) -> Callable[[], None] | None:
        """For the next job; the interpreter is others' meanwhile."""
        return self._jobs.get()

    def _run_one(self) -> bool:
        """The next job; what it holds is let go of before the wait for another."""
        job = self._wait()
        if job is None:
            return False
        try:
            job()
        except BaseException:  # the thread goes on; a migration that hangs on it ends by its deadline
            _log.exception("a job of %s failed", threading.current_thread().name)
        return True


def _relax_capture() -> None:  # pragma: no cover  needs a GPU
    """Let this thread ask after events while another captures a graph in the default, global, mode."""
    with contextlib.suppress(OSError, AttributeError):
        runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
        runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(2)))
