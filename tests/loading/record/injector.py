"""System calls of a record's keeper and clients that fail when told to: errors, short reads, partial sends, death.

`Injector.installed` replaces the names that the code calls, for the calls of one thread that are made `under` a process
of the test's. A process that was killed makes no call any more: what it does while it unwinds reaches nobody.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import os
import select
import selectors
import socket
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from eplb_core.files import reading
from eplb_core.loading.record import client as client_module
from eplb_core.loading.record import server as server_module

DESCRIPTORS = ("EMFILE", "ENFILE")
DISK = ("ENOSPC", "EDQUOT", "EIO", "EROFS")
ERRORS: dict[str, tuple[str, ...]] = {
    "socket": (*DESCRIPTORS, "ENOBUFS", "ENOMEM", "EACCES"),
    "socketpair": (*DESCRIPTORS, "ENOMEM"),
    "bind": ("EADDRINUSE", "EACCES", "ENOENT", "ENOMEM", *DISK),
    "listen": ("EADDRINUSE", "ENOBUFS"),
    "accept": (*DESCRIPTORS, "ENOBUFS", "ENOMEM", "ECONNABORTED", "EAGAIN", "EPERM", "EPROTO"),
    "connect": ("EAGAIN", "EACCES", "ECONNREFUSED", "ENOENT", "ENOMEM", "ETIMEDOUT", "EPROTOTYPE"),
    "getsockopt": ("ENOBUFS", "ENOMEM", "ENOPROTOOPT"),
    "recv": ("EAGAIN", "ECONNRESET", "ENOMEM", "ENOBUFS", "EIO", "ETIMEDOUT", "EMFILE", "EBADF"),
    "recvmsg": ("EAGAIN", "ECONNRESET", "ENOMEM", "ENOBUFS", "EMFILE", "EIO"),
    "send": ("EAGAIN", "EPIPE", "ECONNRESET", "ENOBUFS", "ENOMEM", "EMSGSIZE", "EIO"),
    "sendmsg": ("EAGAIN", "ETOOMANYREFS", "EPIPE", "ENOBUFS", "ENOMEM", "EMFILE", "EBADF", "EMSGSIZE"),
    "poll": ("ENOMEM", "EINVAL"),
    "epoll_create": (*DESCRIPTORS, "ENOMEM"),
    "epoll_ctl": ("ENOMEM", "ENOSPC"),
    "open": (*DESCRIPTORS, *DISK, "EACCES", "ELOOP", "ENOMEM", "ENXIO"),
    "flock": ("ENOLCK", "EWOULDBLOCK", "EIO"),
    "read": ("EIO", "ENOMEM"),
    "write": (*DISK, "EFBIG"),
    "fsync": ("EIO", "ENOSPC", "EDQUOT"),
    "replace": (*DISK, "EACCES", "EXDEV", "ENOENT"),
    "unlink": ("EACCES", "EIO", "EROFS", "EBUSY"),
    "listdir": ("EMFILE", "EACCES", "EIO"),
    "close": ("EIO", "ENOSPC"),
    "lstat": ("EACCES", "EIO", "ENOMEM"),
    "stat": ("EACCES", "EIO", "ENOMEM"),
    "fstat": ("EIO", "ENOMEM"),
    "chmod": ("EPERM", "EROFS", "EIO"),
    "ftruncate": ("EIO", "ENOSPC"),
    "pwrite": DISK,
}
"""By call: how it can fail, as its manual page and file systems have it."""
MORE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("recv", "recvmsg", "send", "sendmsg", "write"), ("short",)),
    **dict.fromkeys(("lstat", "stat", "fstat"), ("owner",)),
}
"""Not errors: fewer bytes than asked for; another user's file. And every call may be the last: "kill"."""
STRANGER = 4242
_Socket = socket.socket


def choices(call: str) -> tuple[str, ...]:
    """What can happen to a call."""
    return (*ERRORS[call], *MORE.get(call, ()), "kill")


class Killed(BaseException):
    """The process that makes the call is no more."""


class Hit(NamedTuple):
    """A fault that was injected."""

    side: str
    call: str
    fault: str


class Injector:
    """Which process calls, what it has open, and what happens to its calls."""

    def __init__(self) -> None:
        self.process: str | None = None
        """Who runs; calls of nobody are as ever."""
        self.choose: Callable[[str, str], str | None] = lambda process, call: None
        """From process and call to a name in `choices`, or None: nothing happens."""
        self.before_reading: Callable[[], None] = lambda: None
        """A client waits for its reply: others run now."""
        self.waits: Callable[[float], None] = lambda seconds: None
        """A client sleeps."""
        self.now = 0.0
        self.dead: set[str] = set()
        self.hits: Counter[Hit] = Counter()
        self.calls = 0
        self.sockets: dict[str, list[Faulty]] = {}
        self.fds: dict[str, dict[int, None]] = {}
        self.selectors: dict[str, list[selectors.EpollSelector]] = {}

    @contextmanager
    def under(self, process: str) -> Iterator[None]:
        """Calls of this process."""
        before, self.process = self.process, process
        try:
            yield
        finally:
            self.process = before

    def kill(self, process: str) -> None:
        """End a process as the kernel does: all that it has open is closed."""
        self.dead.add(process)
        for each in self.sockets.pop(process, ()):
            _Socket.close(each)
        for fd in self.fds.pop(process, ()):
            _REAL["close"](fd)
        for selector in self.selectors.pop(process, ()):
            selectors.EpollSelector.close(selector)

    def open_of(self, process: str) -> int:
        """Descriptors that a process has open."""
        alive = [each for each in self.sockets.get(process, ()) if _Socket.fileno(each) >= 0]
        return len(alive) + len(self.fds.get(process, ()))

    def fault(self, call: str) -> str | None:
        """What happens to this call; raises if that is an error or the end."""
        process = self.process
        if process is None:
            return None
        if process in self.dead:
            raise Killed(process)
        self.calls += 1
        fault = self.choose(process, call)
        if fault is None:
            return None
        self.hits[Hit("keeper" if process.startswith("keeper") else "client", call, fault)] += 1
        if fault == "kill":
            self.dead.add(process)
            raise Killed(process)
        if fault in ("short", "owner"):
            return fault
        number = getattr(errno, fault)
        raise OSError(number, os.strerror(number))

    def run(self, call: str, real: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """The call, or what happens instead."""
        if call == "close" and self.process is not None and self.process not in self.dead:
            self.fds.get(self.process, {}).pop(arguments[0], None)
            real(*arguments)  # which gives the descriptor back whatever it reports
            return self.fault(call)
        fault = self.fault(call)
        if fault == "short":
            data = arguments[1]
            return real(arguments[0], data[: max(len(data) // 2, 1)])
        made = real(*arguments, **options)
        if fault == "owner":
            return os.stat_result((*made[:4], STRANGER, *made[5:10]))
        if call == "open" and self.process is not None:
            self.fds.setdefault(self.process, {})[made] = None
        return made

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the names that the code calls."""
        kind = type("FaultySocket", (Faulty,), {"injector": self})
        poll = type("FaultyPoll", (FaultyPoll,), {"injector": self})
        select_from = type("FaultySelector", (FaultySelector,), {"injector": self})
        clock = types.SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep)
        threads = types.SimpleNamespace(Thread=NoThread, current_thread=threading.current_thread)
        with ExitStack() as stack:
            stack.enter_context(patch.object(socket, "socket", kind))
            stack.enter_context(patch.object(socket, "socketpair", self._around("socketpair", socket.socketpair)))
            stack.enter_context(patch.object(select, "poll", poll))
            stack.enter_context(patch.object(selectors, "DefaultSelector", select_from))
            stack.enter_context(patch.object(fcntl, "flock", self._around("flock", fcntl.flock)))
            for name in _REAL:
                stack.enter_context(patch.object(os, name, self._around(name, _REAL[name])))
            stack.enter_context(patch.object(reading, "open", self._open, create=True))
            stack.enter_context(patch.object(client_module, "time", clock))
            stack.enter_context(patch.object(server_module, "time", clock))
            stack.enter_context(patch.object(server_module, "threading", threads))
            try:
                yield
            finally:
                for process in {**self.sockets, **self.fds, **self.selectors}:
                    self.kill(process)

    def _around(self, call: str, real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **options: (
            real(*arguments, **options) if self.process is None else self.run(call, real, *arguments, **options)
        )

    def _sleep(self, seconds: float) -> None:
        self.now += max(seconds, 0.5)
        self.waits(seconds)

    def _open(self, path: Any, mode: str, **options: Any) -> Any:
        if self.process is None:
            return builtins.open(path, mode, **options)
        if "opener" not in options:
            self.fault("open")
        return FaultyFile(self, builtins.open(path, mode, buffering=0, **options))


_REAL: dict[str, Callable[..., Any]] = {
    name: getattr(os, name)
    for name in (
        *("open", "close", "fsync", "replace", "unlink", "lstat", "stat", "fstat", "chmod", "ftruncate", "pwrite"),
        *("write", "listdir"),
    )
}


class Faulty(socket.socket):
    """A socket of a process of the test's."""

    injector: Injector
    _timeout: float | None = None

    def __init__(self, family: int = -1, type: int = -1, proto: int = -1, fileno: int | None = None) -> None:
        if fileno is None:
            self.injector.fault("socket")
        super().__init__(family, type, proto, fileno)
        process = self.injector.process
        if process is not None:
            self.injector.sockets.setdefault(process, []).append(self)

    def close(self) -> None:
        process = self.injector.process
        if process in self.injector.dead:
            raise Killed(process)
        mine = self.injector.sockets.get(process or "", [])
        if self in mine:
            mine.remove(self)
        was_open = self.fileno() >= 0
        _Socket.close(self)
        if was_open:
            self.injector.fault("close")

    def settimeout(self, value: float | None) -> None:
        self._timeout = value
        super().settimeout(0)  # all processes are one thread

    def gettimeout(self) -> float | None:
        return self._timeout

    def accept(self) -> Any:
        self.injector.fault("accept")
        return super().accept()

    def bind(self, address: Any) -> None:
        self.injector.fault("bind")
        super().bind(address)

    def listen(self, backlog: int = 0) -> None:
        self.injector.fault("listen")
        super().listen(backlog)

    def connect(self, address: Any) -> None:
        self.injector.fault("connect")
        super().connect(address)

    def getsockopt(self, *arguments: Any) -> Any:
        self.injector.fault("getsockopt")
        return super().getsockopt(*arguments)

    def shutdown(self, how: int) -> None:
        if self.injector.process in self.injector.dead:
            raise Killed(self.injector.process)
        super().shutdown(how)

    def recv(self, size: int, flags: int = 0) -> bytes:
        short = self.injector.fault("recv")
        return super().recv(7 if short else size, flags)

    def recvmsg(self, size: int, ancillary: int = 0, flags: int = 0) -> Any:
        self.injector.before_reading()
        with _in_time():
            short = self.injector.fault("recvmsg")
            data, more, got, address = super().recvmsg(7 if short else size, ancillary, flags | socket.MSG_DONTWAIT)
            return data, more, got, address

    def send(self, data: Any, flags: int = 0) -> int:
        short = self.injector.fault("send")
        return super().send(data[: max(len(data) // 2, 1)] if short else data, flags)

    def sendmsg(self, buffers: Any, ancillary: Any = (), flags: int = 0, address: Any = None) -> int:
        short = self.injector.fault("sendmsg")
        data = b"".join(buffers)
        return super().sendmsg([data[: max(len(data) // 2, 1)] if short else data], ancillary, flags)

    def sendall(self, data: Any, flags: int = 0) -> None:
        view = memoryview(data)
        with _in_time():
            while view:
                view = view[self.send(view, flags | socket.MSG_DONTWAIT) :]


@contextmanager
def _in_time() -> Iterator[None]:
    """Nothing comes while everybody else waits: a client's deadline passes."""
    try:
        yield
    except BlockingIOError:
        raise TimeoutError("timed out") from None


class FaultyFile:
    """A file whose bytes reach the system at `flush`, as a buffered one's."""

    def __init__(self, injector: Injector, file: Any) -> None:
        self._injector, self._file, self._buffer = injector, file, b""
        injector.fds.get(injector.process or "", {}).pop(file.fileno(), None)  # the file's object closes it

    def __enter__(self) -> FaultyFile:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.flush()
        finally:
            self._file.close()
        self._injector.fault("close")

    def read(self, size: int = -1) -> bytes:
        self._injector.fault("read")
        data: bytes = self._file.read(size)
        return data

    def write(self, content: bytes) -> None:
        self._buffer += content

    def flush(self) -> None:
        while self._buffer and self._injector.process not in self._injector.dead:
            self._buffer = self._buffer[os.write(self._file.fileno(), self._buffer) :]

    def fileno(self) -> int:
        fd: int = self._file.fileno()
        return fd


class FaultyPoll:
    """`select.poll`."""

    injector: Injector
    _poll = select.poll

    def __init__(self) -> None:
        self._real = type(self)._poll()

    def register(self, *arguments: Any) -> None:
        self._real.register(*arguments)

    def poll(self, timeout: int) -> list[tuple[int, int]]:
        self.injector.fault("poll")
        return self._real.poll(timeout)


class FaultySelector(selectors.EpollSelector):
    """Waits for nobody: all processes are one thread."""

    injector: Injector

    def __init__(self) -> None:
        self.injector.fault("epoll_create")
        super().__init__()
        self.ready = 0
        self.injector.selectors.setdefault(self.injector.process or "", []).append(self)

    def close(self) -> None:
        if self.injector.process in self.injector.dead:
            raise Killed(self.injector.process)
        mine = self.injector.selectors.get(self.injector.process or "", [])
        if self in mine:
            mine.remove(self)
        super().close()

    def register(self, *arguments: Any) -> Any:
        self.injector.fault("epoll_ctl")
        return super().register(*arguments)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> Any:
        if events != self.get_key(fileobj).events:  # else it is no call
            try:
                self.injector.fault("epoll_ctl")
            except OSError:
                selectors._BaseSelectorImpl.unregister(self, fileobj)  # as the real one
                raise
        return super().modify(fileobj, events, data)

    def select(self, timeout: float | None = None) -> Any:
        if self.injector.process in self.injector.dead:
            raise Killed(self.injector.process)
        found = super().select(0)
        self.ready = len(found)
        return found


class NoThread:
    """The server's thread, which the test runs turn by turn."""

    def __init__(self, target: Callable[[], None], **options: Any) -> None:
        self._target = target

    def start(self) -> None:
        pass

    def join(self) -> None:
        """`close` waits for its end."""
        self._target()
