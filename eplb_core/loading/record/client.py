"""The client of a record: the connection by which an engine is present, and the requests over it."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping

from eplb_core._arrays import ArrayLike, check_flag, check_int, check_kind, check_real, to_ids, to_list
from eplb_core._text import plain, quoted
from eplb_core.errors import EplbError, RecordLostError, SocketOwnerError
from eplb_core.exposition import Sample, watch
from eplb_core.loading.record import wire
from eplb_core.loading.record.keeper import NO_RECORD, UNKNOWN_REQUEST
from eplb_core.loading.record.socket_path import check_owner, check_path, check_peer, close, has_ended
from eplb_core.loading.record.state import MAX_ENGINE_ID, RecordState, Reply, is_engine_id
from eplb_core.loading.record.wire import Message, WireError

MAX_FDS = 253
"""Most file descriptors that one message can carry."""
ASK_S = 0.001
"""Seconds between two questions whether engines that follow have stopped."""
_WITHOUT_RECORD = (NO_RECORD, UNKNOWN_REQUEST)

LEAST = -(2**63)
"""What the keeper judges must be a whole number here."""


class LayoutClient(contextlib.AbstractContextManager["LayoutClient"]):
    """Connect one rank of an engine to a record's keeper; the engine counts as present until `close` or its end.

    The constructor does not raise where nobody listens, the keeper cannot be read or no descriptor is left: one rank
    that fails there would leave the others waiting. `agree_on_layout` gathers what each rank found, and all ranks
    decide together.

    Args:
        path: The server's socket.
        engine_id: Name of this engine, for messages: printable, up to 200 characters. Need not be unique.
        deadline: Seconds after which a server that does not answer counts as lost; less than the agreement's, or ranks
            that wait for this one give up before they hear why.
        wait: Seconds to wait for a server that is not there yet, for instance a host that still loads.
        attach: False only reads: the client is not present and may not begin a move. A keeper that has too many
            connections ends an idle one; such a client connects again for its next request.
        follow_deadline: Seconds that `begin` waits for engines that follow (`LayoutFollower`) to stop reading; then the
            move is taken back.

    Raises:
        ValueError: The path is too long for a socket, or `engine_id` is empty or too long.

    Cost:
        A round trip of some 0.1 ms per request; `begin` and `commit` also the write to the server's state file, if any.

    Threads:
        Any; requests queue up. Not in a forked child: it only keeps the connection open, which keeps moves paused.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        engine_id: str,
        *,
        deadline: float = 10.0,
        wait: float = 0.0,
        attach: bool = True,
        follow_deadline: float = 2.0,
    ) -> None:
        self.path = check_path(path)
        if not is_engine_id(engine_id):
            raise ValueError(
                f"`engine_id` (={quoted(engine_id, 80)}) must be printable, of 1 to {MAX_ENGINE_ID} characters"
            )
        self._deadline = check_real(deadline, "deadline", above=0.0, at_most=1e9)
        self._follow_deadline = check_real(follow_deadline, "follow_deadline", at_least=0.0)
        check_real(wait, "wait", at_least=0.0)
        self.engine_id = engine_id
        """Name of this engine; after attaching, the one that the keeper uses."""
        self.found: RecordState | None = None
        """What the record said last; None where there is none."""
        self.about: Message = {}
        """What a weight host says of its weights, since the last query."""
        self.error: EplbError | None = None
        """Why the keeper cannot be asked (any more), or None."""
        self.adopted: int = 0
        """Version that this engine routes by; `agree_on_layout` and commits set it."""
        self.rank: int | None = None
        """EP rank of this engine, once `agree_on_layout` has learnt it."""
        self._looks, self._leaves = not check_flag(attach, "attach"), False
        self._moves_off = ""
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._socket: socket.socket | None = None
        self._silent: socket.socket | None = None
        """A connection that fails or answers no more: open until `close`, since its end would say that this engine has
        gone."""
        self._connect(wait)
        if attach:
            watch(self, gauges=_gauges)
        if self._socket is not None:
            with contextlib.suppress(RecordLostError):  # `error` holds it
                reply = self._ask_state({"do": "query"} if self._looks else {"do": "attach", "engine": self.engine_id})
                self.engine_id = str(reply.get("engine") or self.engine_id)
                if not self._looks and reply["status"] != "ok" and reply.get("code") not in _WITHOUT_RECORD:
                    raise self._lost(f"refused to attach this engine: {reply['reason']}", leaves=True)

    @property
    def connected(self) -> bool:
        """Whether the connection is open, as far as this side knows."""
        return self._socket is not None

    @property
    def present(self) -> bool:
        """Whether there was a server at all, even if it cannot be asked any more."""
        return self._socket is not None or self.error is not None

    # ---- requests ------------------------------------------------------------------------------------------------

    def query(self) -> RecordState | None:
        """Ask what the record holds now; None where there is none.

        Raises:
            RecordLostError: There was one, and it cannot be asked any more, or nobody listens.
            SocketOwnerError: The socket is somebody else's.
        """
        self._ask_state({"do": "query"})
        return self.found

    def begin(self, layers: Iterable[int], version: int) -> Reply:
        """Ask to move experts of `layers`, from `version` of the layout; see `LayoutRecord.begin`.

        Waits up to `follow_deadline` for engines that follow; then the move is taken back, and the reply is `busy`.
        Raises nothing: a lost keeper and moves that are off are `refused`, with the reason.
        """
        if self._moves_off:
            return Reply("refused", self._moves_off)
        rows = _ints(layers)
        message = {"do": "begin", "layers": rows, "version": check_int(version, "version", LEAST)}
        until = time.monotonic() + self._follow_deadline
        asked = False
        try:
            while True:
                answer = self._answer(message, undo={"do": "abort", "layers": rows})
                asked = bool(answer.get("asked"))
                if not asked or answer["status"] == "refused" or time.monotonic() >= until:
                    return _reply(answer)
                time.sleep(ASK_S)
        finally:  # also if a signal's handler raised: followers would stand still for a move that nobody makes
            if asked:
                self.abort(rows)

    def commit(self, layers: Iterable[int], rows: ArrayLike) -> Reply:
        """Say that the move is done and every byte in place; `rows` are ints `[len(layers), P]`."""
        ids = to_ids(rows, "rows")
        reply = self._request({"do": "commit", "layers": _ints(layers), "rows": wire.encode_rows(ids)})
        if reply.status == "ok" and reply.version is not None:
            self.adopted = reply.version
        return reply

    def abort(self, layers: Iterable[int]) -> Reply:
        """Take the move back: no byte has changed."""
        return self._request({"do": "abort", "layers": _ints(layers)})

    def follow(self, digest: str) -> Reply:
        """Register that this engine stops reading when it is asked; `LayoutFollower` calls it."""
        return self._request({"do": "follow", "digest": check_kind(digest, "digest", str)})

    def hold(self, version: int, move: int) -> Reply:
        """Say that this rank has stopped reading the layers of the pending move; `LayoutFollower` calls it."""
        return self._request(
            {"do": "hold", "version": check_int(version, "version", LEAST), "move": check_int(move, "move", LEAST)}
        )

    def watch(self, seen: int) -> int:
        """Wait without a deadline until the record differs from that of number `seen`; set `found`, return its number.

        Takes a client of its own (`attach=False`), which does nothing else meanwhile; `close` ends the wait.

        Raises:
            RecordLostError: The keeper has gone, or `close` was called.
        """
        return int(self._ask_state({"do": "watch", "seen": seen}, deadline=None).get("number", -1))

    def refuse_moves(self, reason: str) -> None:
        """Refuse every further `begin` for this reason, without asking the keeper."""
        self._moves_off = reason

    def fetch(
        self, config: Mapping[str, object], digest: str, frame: Mapping[str, int], *, engine: str | None = None
    ) -> tuple[Message, list[int]]:
        """Ask a weight host for its memory: its whole reply and the file descriptors, which are the caller's to close.

        Args:
            config: The engine's configuration, as JSON has it.
            digest: Of the layout that it routes by; empty from an engine without balancing.
            frame: What layout and rank say about the weights by themselves.
            engine: Name under which the engine is attached, where this connection is another one than its presence.

        Raises:
            RecordLostError: The host cannot be asked any more.
        """
        claim = {"version": self.adopted, "digest": digest or None, **({} if engine is None else {"engine": engine})}
        return self._ask({"do": "fetch", "config": dict(config), "frame": dict(frame), **claim})

    def close(self) -> None:
        """Leave, and end a request that waits. A pending move makes the record dirty. Idempotent."""
        self._leaves, connections = True, (self._socket, self._silent)
        if self._process != os.getpid():  # whoever had the lock at the fork is not here to give it back
            self._let_go()
            return
        for each in connections:
            if each is not None:  # a child's would end it for the parent too
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._let_go()

    def _let_go(self) -> None:
        for each in (self._socket, self._silent):
            if each is not None:
                close(each)
                self.error = self.error or RecordLostError(f"{self.path}: this side has left", path=self.path)
        self._socket = self._silent = None

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- the connection ------------------------------------------------------------------------------------------

    def _connect(self, wait: float) -> None:
        start = time.monotonic()
        end = start + wait
        while True:
            connection: socket.socket | None = None
            found: EplbError | None = None
            try:
                check_owner(self.path)
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connection.settimeout(self._deadline)
                connection.connect(self.path)
                check_peer(connection, self.path)
                self._socket, self.error = connection, None
                return
            except (FileNotFoundError, ConnectionRefusedError):
                pass  # nobody is there: absent, not in error
            except BlockingIOError:  # the server's queue is full: it is there, and soon accepts
                end = max(end, start + self._deadline)
                found = RecordLostError(f"{self.path} accepts nobody", path=self.path)
            except SocketOwnerError as error:
                found, end = error, start
            except OSError as error:
                found, end = RecordLostError(f"{self.path} cannot be reached: {error}", path=self.path), start
            if connection is not None:
                close(connection)
            if time.monotonic() >= end:
                self.error = found or self.error
                return
            time.sleep(min(0.05, max(end - time.monotonic(), 0.0)))

    def _ask_state(self, message: Message, deadline: float | None = math.inf) -> Message:
        """Ask for something whose reply has the record's state; the map comes only if it is another one than here."""
        known = None if self.found is None else self.found.layout
        reply, _ = self._ask({**message, "known": known and known.digest}, deadline=deadline)
        self.about = dict(reply.get("about") or {})
        if reply.get("code") in _WITHOUT_RECORD:
            self.found = None
            return reply
        try:
            self.found = wire.decode_state(reply.get("state") or {}, known)
        except WireError as error:
            raise self._lost(f"answers with {error}") from error
        return reply

    def _request(self, message: Message) -> Reply:
        return _reply(self._answer(message))

    def _answer(self, message: Message, undo: Message | None = None) -> Message:
        """The reply, or a refusal where none came."""
        try:
            return self._ask(message, undo=undo)[0]
        except EplbError as error:  # RecordLostError, SocketOwnerError
            return {"status": "refused", "reason": str(error), "version": None, "digest": None}

    def _ask(
        self, message: Message, *, undo: Message | None = None, deadline: float | None = math.inf
    ) -> tuple[Message, list[int]]:
        """Send, and wait for the reply.

        Args:
            message: What to send.
            undo: What to send after it if no reply comes, so that it does not stay done.
            deadline: Seconds to wait; None: for ever; default: the client's.
        """
        limit = self._deadline if deadline == math.inf else deadline
        if self._process != os.getpid():  # before the lock, which nobody here may ever give back
            raise RecordLostError(f"{self.path}: the connection is that of the parent process", path=self.path)
        with self._lock:
            if self._socket is None:
                raise self.error or RecordLostError(f"nobody listens at {self.path}", path=self.path)
            anew = self._looks and limit is not None  # who waits for news must hear that this keeper has gone
            while True:
                sent = False
                try:
                    self._socket.sendall(wire.pack(message))
                    sent = True
                    return _receive(self._socket, limit)
                except TimeoutError as error:
                    self._undo(undo if sent else None)
                    raise self._lost(f"has not answered for {self._deadline:g} s") from error
                except OSError as error:
                    self._undo(undo if sent else None)
                    what = "closed the connection" if isinstance(error, ConnectionError) else "cannot be asked"
                    lost = self._lost(f"{what}: {error}", leaves=self._looks or has_ended(self._socket))
                    if anew and not self._leaves:
                        self._connect(0.0)
                    anew = False
                    if self._socket is None:
                        raise lost from error
                except WireError as error:
                    raise self._lost(f"answers with {error}") from error
                except BaseException:  # a signal's handler raised: the reply is still to come
                    self._undo(undo if sent else None)
                    self._lost("was interrupted in an answer")
                    raise

    def _undo(self, undo: Message | None) -> None:
        if undo is not None and self._socket is not None:
            self._socket.setblocking(False)
            with contextlib.suppress(OSError):
                self._socket.send(wire.pack(undo))

    def _lost(self, what: str, *, leaves: bool = False) -> RecordLostError:
        """Give the connection up: its next message would answer an earlier request.

        An engine `leaves` only where the keeper does not know it: whatever else went wrong, it may use the weights.
        """
        error = RecordLostError(f"the keeper at {self.path} {what}", path=self.path)
        self.error = error
        connection, self._socket = self._socket, None
        if leaves and connection is not None:
            close(connection)
        else:
            self._silent = connection or self._silent
        return error


def _reply(answer: Message) -> Reply:
    return Reply(answer["status"], answer["reason"], answer.get("version"), answer.get("digest"))


def _receive(connection: socket.socket, deadline: float | None) -> tuple[Message, list[int]]:
    """One message within the deadline, and the descriptors that came with it."""
    end = None if deadline is None else time.monotonic() + deadline
    before = connection.gettimeout()
    inbox, fds = wire.Inbox(), list[int]()
    try:
        while (body := inbox.take(wire.MAX_REPLY)) is None:
            connection.settimeout(None if end is None else max(end - time.monotonic(), 1e-3))
            data, more, _, _ = socket.recv_fds(connection, 1 << 18, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
            fds += more
            if not data:
                raise ConnectionError("it ended")
            inbox.extend(data)
        message = wire.unpack(body)
        _check_reply(message)
        return message, fds
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    finally:
        connection.settimeout(before)


def _check_reply(message: Message) -> None:
    version, digest = message.get("version"), message.get("digest")
    if message.get("status") not in ("ok", "busy", "refused") or not isinstance(message.get("reason"), str):
        raise WireError(f"status {plain(message.get('status'), 20)!r}")
    if not (version is None or isinstance(version, int)) or not (digest is None or isinstance(digest, str)):
        raise WireError(f"version {plain(version, 20)!r}")


def _ints(layers: Iterable[int]) -> list[int]:
    ids = [check_int(layer, "layers", LEAST) for layer in to_list(layers, "layers")]
    if any(layer >= 2**63 for layer in ids):
        raise ValueError("`layers` must be below 2**63")
    return ids


def _gauges(client: LayoutClient) -> list[Sample]:
    """For operators; nothing where there is no record."""
    told = []
    if client.present and not client._leaves:
        told.append(Sample("eplb_record_lost", client.error is not None, client.rank))
    if client.found is not None:
        told.append(Sample("eplb_record_version", client.adopted, client.rank))
        told.append(Sample("eplb_record_dirty", bool(client.found.dirty), client.rank))
    return told
