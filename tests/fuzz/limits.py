"""Limits of time and memory for a block of a test, and how much a run tries."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from hypothesis import HealthCheck, Phase, settings

MANY = int(os.environ.get("FUZZ", "1"))
"""How many times as much as in the default run is tried: `make fuzz` sets it."""
MEMORY_BYTES = 4 << 30


def fuzz(examples: int) -> settings:
    """So many examples in the default run, without a store of those that failed, whose functions have no name."""
    phases = (Phase.generate, Phase.shrink)
    return settings(max_examples=examples * MANY, phases=phases, database=None, suppress_health_check=list(HealthCheck))


class Hang(BaseException):
    """Raised by the alarm; no `except Exception` may swallow it."""


@contextlib.contextmanager
def limits(seconds: float) -> Iterator[None]:
    """Raise `Hang` after `seconds` of work or six times as many of waiting; refuse memory beyond `MEMORY_BYTES`."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hang(f"took longer than {seconds} s")

    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    timers = {signal.ITIMER_PROF: (signal.SIGPROF, seconds), signal.ITIMER_REAL: (signal.SIGALRM, 6 * seconds)}
    handlers = {number: signal.signal(number, ring) for number, _ in timers.values()}
    for timer, (_, after) in timers.items():
        signal.setitimer(timer, after)
    faulthandler.dump_traceback_later(10 * seconds, exit=True, file=sys.__stderr__ or 2)  # compiled code hears no alarm
    if not Path("/proc/driver/nvidia").exists():  # a GPU's driver maps more addresses than that
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES, hard))
    try:
        yield
    finally:
        for timer in timers:
            signal.setitimer(timer, 0)
        faulthandler.cancel_dump_traceback_later()
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))
        for number, handler in handlers.items():
            signal.signal(number, handler)
