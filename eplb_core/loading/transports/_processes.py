"""Which process is meant, and is it still there? Linux."""

from __future__ import annotations

import os
from pathlib import Path


def host() -> str:
    """Equal for processes that see each other by number: one host, one pid namespace."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + " " + os.readlink("/proc/self/ns/pid")


def started(pid: int) -> int:
    """When a process started, in ticks since boot; -1 if there is none, or only its remains.

    Number and start together name a process: numbers are used again.
    """
    try:
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)  # asked after each read: no layers on top
    except (FileNotFoundError, ProcessLookupError):
        return -1
    try:
        text = os.read(file, 4096)
    except ProcessLookupError:
        return -1
    finally:
        os.close(file)
    fields = text.rpartition(b")")[2].split()
    return -1 if fields[0] in b"ZX" else int(fields[19])
