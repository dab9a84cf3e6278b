"""Replies of a server, without the sockets: from a message of any content to an answer."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from eplb_core._text import plain
from eplb_core.loading.record import wire
from eplb_core.loading.record.record import LayoutRecord
from eplb_core.loading.record.state import MAX_ENGINE_ID, RecordState, Reply, Status
from eplb_core.loading.record.wire import Message, OtherProtocolError, WireError

log = logging.getLogger("eplb_core")

NO_RECORD = "no_record"
UNKNOWN_REQUEST = "unknown_request"
MALFORMED = "malformed"


class Exports(Protocol):
    """Memory that engines may map, as a weight host offers it."""

    def difference(self, config: Mapping[str, object], frame: Mapping[str, object]) -> tuple[str, str] | None:
        """Name the first field in which an engine's configuration differs from the host's, and say how; else None."""
        ...

    def about(self) -> Message:
        """Describe the memory, for `eplb record status`."""
        ...

    def export(self) -> tuple[Message, Sequence[int]]:
        """Describe the tensors so that engines can map them, with the file descriptors that the reply carries."""
        ...


@dataclass(slots=True)
class Session:
    """One connection."""

    number: int
    engine: str | None = None
    """Who is attached by it."""


class Answer(NamedTuple):
    """A reply and the file descriptors that go with it."""

    message: Message
    fds: Sequence[int] = ()


LATER = Answer({})
"""No answer yet."""


class Keeper:
    """Answer requests from a record; the record is on disk before a reply promises anything.

    Args:
        record: The record, or None where experts never move.
        exports: Memory that engines may map, or None.
        write: Writes the state where a restart finds it; may raise OSError.
    """

    def __init__(
        self,
        record: LayoutRecord | None,
        exports: Exports | None = None,
        write: Callable[[RecordState], None] | None = None,
    ) -> None:
        self.record = record
        self.exports = exports
        self._write = write
        self._foreign: set[str] = set()
        self._changes, self._last = 0, self.state

    @property
    def state(self) -> RecordState | None:
        """What the record knows now."""
        return None if self.record is None else self.record.state

    @property
    def changes(self) -> int:
        """Number of changes of the state that were noticed so far."""
        if self.state is not self._last:
            self._changes, self._last = self._changes + 1, self.state
        return self._changes

    def answer(self, session: Session, body: bytes) -> Answer:
        """Answer one message of any content; a bad one raises nothing and changes nothing.

        LATER: a `watch` is answered when `changes` changes.
        """
        try:
            message = wire.unpack(body)
            request = message.get("do")
            if request == "fetch":
                return self._fetch(session, message)
            known = _REQUESTS.get(request) if isinstance(request, str) else None
            if known is None:
                return _say("refused", f"Unknown request type: {plain(request, 40)!r}", code=UNKNOWN_REQUEST)
            if self.record is None:
                return _say("refused", "this server keeps no record of a layout", code=NO_RECORD, about=self._about())
            return known(self, self.record, session, message)
        except WireError as error:
            if isinstance(error, OtherProtocolError) and str(error) not in self._foreign and len(self._foreign) < 8:
                self._foreign.add(str(error))  # one line for each version, so that no crowd fills the log
                log.warning("refused a client that speaks %s", error)
            return malformed(error)

    def leave(self, session: Session, *, dropped: bool = False) -> None:
        """Note the end of a connection; `dropped`: this side ended it."""
        record, engine = self.record, session.engine
        if record is None or engine is None:
            return
        session.engine, was_dirty = None, record.state.dirty
        if dropped:
            record.lose(engine)
        else:
            record.detach(engine)
        if record.state.dirty != was_dirty:
            log.error("nobody knows what the slots hold any more: %s", record.state.dirty)
        self._write_down(record)

    # ---- requests ------------------------------------------------------------------------------------------------

    def _attach(self, record: LayoutRecord, session: Session, message: Message) -> Answer:
        if session.engine is not None:
            return _of(Reply("refused", f"this connection is engine {session.engine!r} already"))
        before = record.state
        engine = message.get("engine")
        if engine in before.engines:  # a restart under the same name while the former process is still there
            ends = itertools.chain([f"#{session.number}"], (f"#{session.number}.{k}" for k in itertools.count(1)))
            names = (f"{engine[: MAX_ENGINE_ID - len(end)]}{end}" for end in ends)
            engine = next(name for name in names if name not in before.engines)
        reply = self._promised(record, record.attach(engine), before)  # type: ignore[arg-type]
        if reply.status == "ok":
            session.engine = engine
        return _of(reply, engine=engine, state=wire.encode_state(record.state))

    def _query(self, record: LayoutRecord, session: Session, message: Message) -> Answer:
        state = wire.encode_state(record.state, message.get("known"))
        return _of(record.query(), state=state, about=self._about())

    def _begin(self, record: LayoutRecord, session: Session, message: Message) -> Answer:
        before = record.state
        reply = record.begin(session.engine or "", message.get("layers"), message.get("version"))  # type: ignore[arg-type]
        reply = self._promised(record, reply, before)
        move = record.state.pending
        return _of(reply, asked=record.state.asking and move is not None and move.engine == session.engine)

    def _commit(self, record: LayoutRecord, session: Session, message: Message) -> Answer:
        layers = message.get("layers")
        count = len(layers) if isinstance(layers, list) else 0
        rows = wire.decode_rows(message.get("rows"), (count, record.layout.num_slots))
        return self._ended(record, record.commit(session.engine or "", layers, rows))  # type: ignore[arg-type]

    def _abort(self, record: LayoutRecord, session: Session, message: Message) -> Answer:
        return self._ended(record, record.abort(session.engine or "", message.get("layers")))  # type: ignore[arg-type]

    def _follow(self, record: LayoutRecord, session: Session, message: Message) -> Answer:
        return _of(record.follow(session.engine or "", message.get("digest")))

    def _hold(self, record: LayoutRecord, session: Session, message: Message) -> Answer:
        return _of(record.hold(session.engine or "", message.get("version"), message.get("move")))  # type: ignore[arg-type]

    def _watch(self, record: LayoutRecord, session: Session, message: Message) -> Answer:
        if message.get("seen") == self.changes:
            return LATER
        state = wire.encode_state(record.state, message.get("known"))
        return _of(Reply("ok", "", state["version"], state["digest"]), state=state, number=self.changes)

    def _fetch(self, session: Session, message: Message) -> Answer:
        config, frame = message.get("config"), message.get("frame", {})
        if self.exports is None:
            return _say("refused", "this server keeps a record and no weights", code=UNKNOWN_REQUEST)
        if not isinstance(config, dict) or not isinstance(frame, dict):
            raise WireError("`config` and `frame` must be objects")
        differs = self.exports.difference(config, frame)
        if differs is not None:
            return _say("refused", differs[1], field=differs[0])
        reply, record = Reply("ok"), self.record
        if record is not None:
            before = record.state
            claim, digest = message.get("engine"), message.get("digest")
            name = session.engine or (claim if isinstance(claim, str) else None)
            reply = record.check_fetch(name, message.get("version"), digest if isinstance(digest, str) else None)
            reply = self._promised(record, reply, before)
        if reply.status != "ok":
            return _of(reply, field="layout")
        exported, fds = self.exports.export()
        return Answer({**reply._asdict(), "weights": exported}, fds)

    # ---- writing down --------------------------------------------------------------------------------------------

    def _promised(self, record: LayoutRecord, reply: Reply, before: RecordState) -> Reply:
        """The reply, or a refusal where it could not be written down: then nothing happened."""
        if reply.status != "ok" or record.state is before or self._write is None:
            return reply
        try:
            self._write(record.state)
        except OSError as error:
            record.revert(before)
            return Reply("refused", f"the record cannot be written down: {error}", record.version, record.digest)
        return reply

    def _ended(self, record: LayoutRecord, reply: Reply) -> Answer:
        if reply.status == "ok":
            self._write_down(record)
        return _of(reply)

    def _write_down(self, record: LayoutRecord) -> None:
        """Best effort: what the file then still says is a pending move, which a restart takes as dirty."""
        try:
            if self._write is not None:
                self._write(record.state)
        except OSError as error:
            log.error("the record cannot be written down: %s; a restart will not know what the slots hold", error)

    def _about(self) -> Message:
        return {} if self.exports is None else self.exports.about()


_REQUESTS = {
    "attach": Keeper._attach,
    "query": Keeper._query,
    "begin": Keeper._begin,
    "commit": Keeper._commit,
    "abort": Keeper._abort,
    "follow": Keeper._follow,
    "hold": Keeper._hold,
    "watch": Keeper._watch,
}


def malformed(error: WireError) -> Answer:
    """Refuse bytes that are no message."""
    return _say("refused", str(error), code=MALFORMED)


def unsent(error: OSError) -> Answer:
    """Say that the descriptors of the weights could not be sent, which another time may succeed."""
    return _say("busy", f"the descriptors of the weights cannot be sent: {error}", field="descriptors")


def _of(reply: Reply, **more: object) -> Answer:
    return Answer({**reply._asdict(), **more})


def _say(status: Status, reason: str, **more: object) -> Answer:
    return _of(Reply(status, reason), **more)
