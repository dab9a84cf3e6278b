"""Serve a layout record at a Unix socket: an engine is present while its connection is open.

One thread serves all connections and waits for none of them. A connection is read only when its last reply has been
sent, so a client that does not read costs one reply; a message declared too long ends its connection.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from eplb_core._arrays import check_kind
from eplb_core.errors import SocketOwnerError
from eplb_core.exposition import Sample, watch
from eplb_core.files.reading import remove_unfinished
from eplb_core.loading.record import wire
from eplb_core.loading.record.file import check_replaceable, save_record
from eplb_core.loading.record.keeper import LATER, Exports, Keeper, Session, malformed, unsent
from eplb_core.loading.record.record import LayoutRecord
from eplb_core.loading.record.socket_path import SocketPlace, check_path, check_peer, close, has_ended
from eplb_core.loading.record.state import RecordState
from eplb_core.loading.record.wire import Inbox, WireError

log = logging.getLogger("eplb_core")

MAX_CONNECTIONS = 256
"""Each costs a file descriptor of this process, which needs others; see `_most_connections`."""
SPARE = 8
"""Descriptors that connections leave to files where a process has run out of them."""
_NOTHING = memoryview(b"")


class LayoutServer(contextlib.AbstractContextManager["LayoutServer"]):
    """Serve a record at a path, from the constructor to `close`.

    The socket is for this user only. A socket that a dead server left is replaced; one where a server lives, or that
    somebody else owns, is not.

    Args:
        path: Where to listen.
        record: What to serve; nobody else may change it meanwhile. None serves without a record.
        exports: Memory that engines may map; `WeightHost` gives it.
        state_file: File that always holds the record, written before a reply promises anything; None keeps none.
        memory: Name of the weights' memory, written into `state_file`; see `open_record`.
        place: The right to the path, where the caller has it already.

    Raises:
        SocketInUseError: A server lives there, or the path is no socket.
        SocketOwnerError: Somebody else owns the path.
        ValueError: The path is too long for a socket.
        FileFormatError: `state_file` is there, and is no record.
        OSError: No such folder, or no permission in it; `state_file` cannot be written.

    Cost:
        One thread that sleeps until a message comes. A reply takes tens of microseconds; with `state_file`, the time
        in which the disk confirms two writes.

    Threads:
        Any. `state` is immutable.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        record: LayoutRecord | None,
        *,
        exports: Exports | None = None,
        state_file: str | os.PathLike[str] | None = None,
        memory: str = "",
        place: SocketPlace | None = None,
    ) -> None:
        if record is not None and not isinstance(record, LayoutRecord):
            raise TypeError(f"`record` (={type(record).__name__}) must be a LayoutRecord or None")
        if place is not None and check_kind(place, "place", SocketPlace).path != check_path(path):
            raise ValueError(f"`place` (of {place.path}) must be that of `path` (={check_path(path)})")
        self._process = os.getpid()
        with contextlib.ExitStack() as undo:
            self._place = place or SocketPlace(path, state_file)
            undo.callback(self._place.release)
            if state_file is not None:
                check_replaceable(state_file)
            write = None if state_file is None else (lambda state: save_record(state_file, state, memory=memory))
            self._keeper = Keeper(record, exports, write)
            if state_file is not None:
                remove_unfinished(state_file)
            if write is not None and record is not None:
                write(record.state)
            listener = self._place.listen()
            undo.callback(close, listener)
            self._loop = _Loop(listener, self._keeper, self._place.path)
            undo.callback(self._loop.end)
            self._thread = threading.Thread(target=self._loop.run, name=f"eplb record {self.path}", daemon=True)
            self._thread.start()
            undo.pop_all()
        watch(self, gauges=_gauges)

    @property
    def path(self) -> str:
        """Where it listens."""
        return self._place.path

    @property
    def state(self) -> RecordState | None:
        """What the record knows now; None without one."""
        return self._keeper.state

    def close(self) -> None:
        """Stop serving: engines see their connections end and move nothing any more. Idempotent.

        In a forked child it closes only the child's descriptors; the parent serves on.
        """
        if self._process != os.getpid():  # a child would end it for the parent too
            self._loop.end()
            self._place.release()
            return
        self._loop.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._place.release()

    def __exit__(self, *error: object) -> None:
        self.close()


def _gauges(server: LayoutServer) -> list[Sample]:
    """For operators; nothing of one that was closed."""
    state = server.state
    if state is None or not server._thread.is_alive():
        return []
    return [Sample("eplb_record_version", state.version), Sample("eplb_record_dirty", bool(state.dirty))]


def _most_connections() -> int:
    """At most half of this process's descriptors: a reply that promises something needs one to write the record."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, soft // 2))


@dataclass(slots=True, eq=False)
class _Connection:
    sock: socket.socket
    session: Session
    inbox: Inbox = field(default_factory=Inbox)
    out: memoryview = _NOTHING
    """What is still to be sent; nothing is read meanwhile."""
    fds: Sequence[int] = ()
    watch: bytes | None = None
    """A message that is answered when the record changes; the next message takes its place."""


class _Loop:
    """Waits for sockets and passes messages to the keeper."""

    def __init__(self, listener: socket.socket, keeper: Keeper, path: str) -> None:
        self._listener, self._keeper, self._path = listener, keeper, path
        self._wake, self._woken = socket.socketpair()
        with contextlib.ExitStack() as undo:
            undo.callback(close, self._wake)
            undo.callback(close, self._woken)
            self._selector = selectors.DefaultSelector()
            undo.callback(self._selector.close)
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
            self._selector.register(self._woken, selectors.EVENT_READ)
            undo.pop_all()
        self._connections: dict[_Connection, None] = {}  # who was silent for longest first
        self._more: dict[_Connection, None] = {}
        """May have a whole message in the inbox: nothing more is read before that is answered."""
        self._seen = keeper.changes
        self._number = 0
        self._most = _most_connections()

    def run(self) -> None:
        """Serve until `stop`; whatever ends it closes all connections, so that nobody waits for an answer."""
        try:
            while self.turn():
                pass
        finally:
            self.end()

    def turn(self, timeout: float | None = None) -> bool:
        """Wait for sockets, and give each that has something one turn; False after `stop`."""
        for key, _ in self._selector.select(0 if self._more else timeout):
            if key.fileobj is self._woken:
                return False
            if key.fileobj is self._listener:
                self._accept()
            elif key.data in self._connections:
                self._read_or_send(key.data)
        more, self._more = self._more, {}
        for connection in more:  # one message each, so that a flood from one is a turn among others
            if connection in self._connections and not connection.out:
                self._answer_one(connection)
        while self._keeper.changes != self._seen:  # who cannot be told leaves, which is news again
            self._seen = self._keeper.changes
            for connection in list(self._connections):
                if connection.watch is not None:
                    self._answer(connection, connection.watch)
        return True

    def stop(self) -> None:
        """End `run`; from any thread."""
        with contextlib.suppress(OSError):  # it has ended already
            self._wake.shutdown(socket.SHUT_RDWR)  # needs no memory, as a byte sent would

    def end(self) -> None:
        """Close everything in this process, on the loop's thread or in a forked child, which has none."""
        # Presence ends with this process's record: nobody's leaving makes it dirty now.
        for each in (*(connection.sock for connection in self._connections), self._listener, self._woken, self._wake):
            close(each)
        self._selector.close()

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError as error:
            if error.errno == errno.EMFILE:
                self._no_room(str(error))
            elif error.errno in (errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                time.sleep(0.01)  # the system's, which other processes use up: those who knock wait
            return
        if len(self._connections) >= self._most and not self._drop_idle():
            close(accepted)
            return
        connection = _Connection(accepted, Session(self._number + 1))
        try:
            check_peer(accepted, self._path)
            accepted.setblocking(False)
            self._selector.register(accepted, selectors.EVENT_READ, connection)
        except (SocketOwnerError, OSError) as error:
            log.error("%s: one who knocked was sent away: %s", self._path, error)
            close(accepted)
            return
        self._number += 1
        self._connections[connection] = None

    def _no_room(self, why: str) -> None:
        """Out of descriptors: fewer connections from now on, so that some are left for files; idle ones go."""
        fewer = max(1, min(self._most, len(self._connections)) - SPARE)
        if fewer < self._most:  # not again for each who knocks
            log.error("%s: cannot accept: %s; at most %d connections from now on", self._path, why, fewer)
            self._most = fewer
        before = len(self._connections)
        while len(self._connections) > self._most and self._drop_idle():
            pass
        if len(self._connections) == before:
            time.sleep(0.01)  # those who knock wait until somebody leaves

    def _drop_idle(self) -> bool:
        """End the connection that has said nothing whole for longest; not one that is an engine, or waits for news."""
        for connection in self._connections:
            if connection.session.engine is None and connection.watch is None:
                self._drop(connection)
                return True
        return False

    def _read_or_send(self, connection: _Connection) -> None:
        """The socket has bytes, or room for more of the reply."""
        if connection.out:
            self._flush(connection)
        elif connection not in self._more:
            try:
                data = connection.sock.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._drop(connection)
                return
            connection.inbox.extend(data)
            self._answer_one(connection)

    def _answer_one(self, connection: _Connection) -> None:
        """Answer the next whole message, if there is one."""
        try:
            body = connection.inbox.take(wire.max_request(self._keeper.state))
        except WireError as error:
            with contextlib.suppress(OSError):  # where the next message begins is unknown: nothing else is answered
                connection.sock.send(wire.pack(malformed(error).message))
            self._drop(connection, dropped=True)
            return
        if body is not None:
            self._answer(connection, body)

    def _answer(self, connection: _Connection, body: bytes) -> None:
        self._connections[connection] = self._connections.pop(connection)
        try:
            answer = self._keeper.answer(connection.session, body)
        except Exception:  # a fault of this library's: it costs the one who met it, not all
            log.exception("%s: a request of engine %r could not be answered", self._path, connection.session.engine)
            self._drop(connection, dropped=True)
            return
        connection.watch = body if answer is LATER else None
        if answer is not LATER:
            connection.out, connection.fds = memoryview(wire.pack(answer.message)), answer.fds
        self._flush(connection)

    def _flush(self, connection: _Connection) -> None:
        """Send what the socket takes; then another message may be there already, which gets its turn."""
        try:
            if connection.fds:
                sent = socket.send_fds(connection.sock, [connection.out], connection.fds)
                connection.fds = ()
            else:
                sent = connection.sock.send(connection.out)
            connection.out = connection.out[sent:]
        except BlockingIOError:
            pass
        except OSError as error:
            if not connection.fds or has_ended(connection.sock):
                self._drop(connection)
                return
            # Descriptors go with the first byte, so none has left; too many are on their way already, for instance.
            log.error("%s: engine %r gets no weights now: %s", self._path, connection.session.engine, error)
            connection.out, connection.fds = memoryview(wire.pack(unsent(error).message)), ()
            self._flush(connection)
            return
        if not connection.out:
            self._more[connection] = None
        wanted = selectors.EVENT_WRITE if connection.out else selectors.EVENT_READ
        try:
            self._selector.modify(connection.sock, wanted, connection)
        except OSError:
            self._drop(connection)

    def _drop(self, connection: _Connection, *, dropped: bool = False) -> None:
        """End a connection; `dropped`: for something that its engine said. Gone is only who has closed it."""
        gone = not dropped and has_ended(connection.sock)
        del self._connections[connection]
        with contextlib.suppress(KeyError):  # not there after a `modify` that failed
            self._selector.unregister(connection.sock)
        close(connection.sock)
        self._keeper.leave(connection.session, dropped=not gone)
