"""The layout record of shared weights: which expert each slot holds, with a version.

Engines that map one copy of the weights need one layout that all of them route by, kept outside of any engine: an
engine that moves experts moves them for all others too. `LayoutRecord` keeps it as a pure state machine, without a
socket, clock or device. `LayoutServer` serves it at a Unix socket.

    clean --begin--> pending --commit--> clean, version + 1
                        |------abort---> clean, same version
                        '-----detach---> dirty, for good: how far the move came is unknown

An engine may begin only while every other one has stopped reading what it moves, so no other layout goes stale. No
engine maps weights while a move is pending, while the record is dirty, or under another layout than the record's.
Engines that follow stop when they are asked. Until all of them have, a move is asked for and not yet begun:

    clean --begin--> asking --begin, when all followers hold--> pending
                        '-------abort or detach---------------> clean, same version
"""

from __future__ import annotations

from collections.abc import Iterable

from eplb_core._arrays import ArrayLike, check_int, check_kind, to_ids
from eplb_core._text import counted, plain, quoted
from eplb_core.layout import ExpertLayout
from eplb_core.loading.record.state import (
    MAX_ENGINE_ID,
    NAMES_KEPT,
    Move,
    RecordState,
    Reply,
    is_among,
    is_engine_id,
    is_int,
    name_engines,
    name_layers,
    names_of,
    to_layers,
)


class LayoutRecord:
    """Keep which expert each slot of shared weights holds, who uses them, and who may move experts.

    A bad request gets a reply, raises nothing and changes nothing. Reasons to refuse come before reasons to wait.

    Args:
        layout: What the weights hold now.
        version: Moves committed so far.

    Threads:
        One at a time; `state` may be read from any, since it is immutable.

    Example:
        >>> from eplb_core import Topology
        >>> record = LayoutRecord(ExpertLayout([[0, 1, 1, 0]], num_experts=2, topology=Topology(num_ranks=2)))
        >>> record.attach("a").status, record.begin("a", [0], version=0).status
        ('ok', 'ok')
        >>> record.commit("a", [0], [[1, 0, 0, 1]]).version
        1
        >>> record.attach("b").status, record.begin("a", [0], version=1)[:2]
        ('ok', ('busy', "engine 'b' is attached too; experts may move only while every other engine follows"))

    Source:
        The protocol of sgl-project/sglang#45341; differs: it knows no transport, and `check_fetch` during a move is
        `busy`.
    """

    __slots__ = ("_state",)

    def __init__(self, layout: ExpertLayout, *, version: int = 0) -> None:
        self._state = RecordState(check_kind(layout, "layout", ExpertLayout), check_int(version, "version", 0))

    @classmethod
    def of_state(cls, state: RecordState) -> LayoutRecord:
        """Make a record that continues from `state`."""
        record = cls(state.layout, version=state.version)
        record._state = state
        return record

    @classmethod
    def restarted(cls, state: RecordState) -> LayoutRecord:
        """Make the record of memory that outlived its keeper, which died in `state`.

        A move that was pending makes the record dirty. Engines that were attached may still use the memory, and their
        end can no longer be seen: they count as engines that do not follow the layout.
        """
        record = cls.of_state(RecordState(state.layout, state.version, dirty=state.dirty))
        record._set(non_followers=state.non_followers, num_non_followers=state.num_non_followers)
        for engine in state.engines:
            record._add_non_follower(f"{engine} (attached before the keeper of the record restarted)")
        if state.pending is not None and not state.asking and not state.dirty:
            record._set(dirty=f"{state.pending} was pending when the keeper of the record died")
        return record

    @property
    def state(self) -> RecordState:
        """What the record knows now; immutable."""
        return self._state

    @property
    def layout(self) -> ExpertLayout:
        """The layout that the weights are in."""
        return self._state.layout

    @property
    def version(self) -> int:
        """Number of committed moves."""
        return self._state.version

    @property
    def digest(self) -> str:
        """Digest of `layout`."""
        return self._state.layout.digest

    def revert(self, state: RecordState) -> None:
        """Return to a former `state`, for a keeper that could not write the new one to disk."""
        self._state = state

    # ---- presence ------------------------------------------------------------------------------------------------

    def attach(self, engine: str) -> Reply:
        """Register an engine before it reads a weight. Unless it follows, no other engine may then begin a move."""
        if not is_engine_id(engine):
            return self._refused(f"an engine's id must be printable, of 1 to {MAX_ENGINE_ID} characters")
        if is_among(engine, self._state.engines):
            return self._refused(f"engine {quoted(engine)} is attached already")
        self._set(engines=(*self._state.engines, engine))
        return self._ok()

    def detach(self, engine: str) -> Reply:
        """Remove an engine that has ended. If it had begun a move, the record is dirty from now on."""
        state = self._state
        if not is_among(engine, state.engines):
            return self._refused(f"engine {quoted(engine)} is not attached")
        engines, followers, holding = (
            tuple(name for name in names if name != engine) for names in (state.engines, state.followers, state.holding)
        )
        self._set(engines=engines, followers=followers, holding=holding)
        move = state.pending
        if move is not None and move.engine == engine:
            self._end_move()
            if not state.asking:
                self._set(dirty=f"{move} was pending when the engine left")
        return self._ok()

    def lose(self, engine: str) -> Reply:
        """Remove an engine that the keeper disconnected: it may still read the weights, and its end cannot be seen."""
        reply = self.detach(engine)
        if reply.status == "ok":
            self._add_non_follower(f"{engine} (its connection was ended)")
        return reply

    def query(self) -> Reply:
        """Answer with version and digest; `busy` during a move, `refused` if the record is dirty."""
        return self._unreadable() or self._ok()

    # ---- following -----------------------------------------------------------------------------------------------

    def follow(self, engine: str, digest: str | None) -> Reply:
        """Register that an engine stops reading layers when it is asked to, so that moves need not wait for its end.

        Args:
            engine: Who follows; attached.
            digest: Of the layout that it routes by, which must be the recorded one.
        """
        state = self._state
        if state.dirty:
            return self._refused(self._dirty_reason())
        if not is_among(engine, state.engines):
            return self._refused(f"engine {quoted(engine)} is not attached; attach before it follows")
        if not is_among(digest, (state.digest,)):
            return self._refused(
                f"engine {quoted(engine)} routes by layout {plain(digest, 12)}, the weights hold {state.digest[:12]} "
                f"(version {state.version}); it must adopt that one before it follows"
            )
        if state.pending is not None:
            return self._busy(f"{state.pending} is pending")
        if not is_among(engine, state.followers):
            self._set(followers=(*state.followers, engine))
        return self._ok()

    def hold(self, engine: str, version: int, move: int) -> Reply:
        """Register that a follower has stopped reading the layers of the pending move, until the move has ended.

        Args:
            engine: Who has stopped, on all its streams and devices of this rank.
            version: Version of the layout that it routes by.
            move: `state.begun` of the state in which it saw the move; the reply counts for that move alone.
        """
        state = self._state
        if state.dirty:
            return self._refused(self._dirty_reason())
        if not is_among(engine, state.followers):
            return self._refused(f"engine {quoted(engine)} does not follow")
        asked = state.pending
        if asked is None or asked.engine == engine:
            return self._refused(f"nobody asks engine {quoted(engine)} to hold; {asked or 'no move'} is pending")
        if not is_int(version) or version != asked.version:
            return self._refused(f"{asked} is pending, and engine {quoted(engine)} is at version {plain(version, 80)}")
        if not is_int(move) or move != state.begun:
            return self._refused(
                f"{asked} is number {state.begun}, and engine {quoted(engine)} holds for {plain(move, 80)}"
            )
        if not is_among(engine, state.holding):
            self._set(holding=(*state.holding, engine))
        return self._ok()

    # ---- moves ---------------------------------------------------------------------------------------------------

    def begin(self, engine: str, layers: Iterable[int], version: int) -> Reply:
        """Ask to move experts of `layers`; only after `ok` may a byte of their slots change.

        `busy` while engines that follow have not stopped reading: the move is then asked for (`state.asking`), and the
        same call again says `ok` once they have. `abort` takes it back.

        Args:
            engine: Who asks.
            layers: Rows of the layout, one or more, each once.
            version: Version of the layout that the move starts from.
        """
        state = self._state
        rows = to_layers(layers, state.layout.num_layers)
        reason = ""
        if state.dirty:
            reason = self._dirty_reason()
        elif not is_among(engine, state.engines):
            reason = f"engine {quoted(engine)} is not attached; attach before the weights are read"
        elif self._is_other_move(engine, rows, version):
            reason = f"{state.pending} is pending; commit or abort it first"
        elif not is_int(version) or version != state.version:
            given = plain(version, 80)
            reason = f"the layout is at version {state.version}, not {given}; engine {quoted(engine)} is not on it"
        elif rows is None:
            rule = f"must be rows in [0, {state.layout.num_layers}), one or more, each once"
            reason = f"`layers` (={plain(layers, 80)}) {rule}"
        elif state.num_non_followers:
            reason = (
                f"{counted(state.num_non_followers, 'engine')} outside the record may still read the weights "
                f"({names_of(state.non_followers)}); restart the keeper of the weights to move experts"
            )
        if reason or rows is None:
            return self._refused(reason)
        if state.pending is not None and not is_among(engine, (state.pending.engine,)):
            return self._busy(f"{state.pending} is pending")
        others = [name for name in state.engines if name != engine and name not in state.followers]
        if others:
            return self._busy(
                f"{name_engines(others)} attached too; experts may move only while every other engine follows"
            )
        if state.pending is None:
            self._set(pending=Move(engine, rows, state.version), asking=True, begun=state.begun + 1)
        awaited = self._state.awaited
        if awaited:
            return self._busy(f"{name_engines(awaited)} still reading {name_layers(rows)}")
        self._set(asking=False)
        return self._ok()

    def _is_other_move(self, engine: str, rows: tuple[int, ...] | None, version: object) -> bool:
        """Whether the engine has a move that is not the one it asks for here once more."""
        state = self._state
        if state.pending is None or not is_among(engine, (state.pending.engine,)):
            return False
        return not state.asking or state.pending != (engine, rows, version)

    def commit(self, engine: str, layers: Iterable[int], rows: ArrayLike) -> Reply:
        """Record what the slots hold after a move, when every byte is in place.

        A commit that is refused leaves the move pending.

        Args:
            engine: Who moved.
            layers: The layers of its `begin`.
            rows: Expert of each slot, ints `[len(layers), P]`, in the order of `layers`.
        """
        moved = self._own_move(engine, layers, "commit")
        if isinstance(moved, Reply):
            return moved
        if self._state.asking:
            return self._refused(f"{self._state.pending} is only asked for; engines that follow still read its layers")
        layout = self._state.layout
        try:
            given = to_ids(rows, "rows")
            if given.shape != (len(moved), layout.num_slots):
                raise ValueError(f"`rows` (shape {list(given.shape)}) must be [{len(moved)}, {layout.num_slots}]")
            p2l = layout.physical_to_logical_map.copy()
            p2l[list(moved)] = given
            new = ExpertLayout(p2l, layout.num_experts, topology=layout.topology)
        except (ValueError, TypeError, OverflowError) as error:
            return self._refused(f"{self._state.pending} stays pending: {error}")
        self._set(layout=new, version=self._state.version + 1)
        self._end_move()
        return self._ok()

    def abort(self, engine: str, layers: Iterable[int]) -> Reply:
        """Take a move back: every byte of `layers` is as it was at `begin`."""
        moved = self._own_move(engine, layers, "abort")
        if isinstance(moved, Reply):
            return moved
        self._end_move()
        return self._ok()

    def _end_move(self) -> None:
        self._set(pending=None, asking=False, holding=())

    def _own_move(self, engine: str, layers: Iterable[int], verb: str) -> tuple[int, ...] | Reply:
        move = self._state.pending
        if move is None or not is_among(engine, (move.engine,)):
            return self._refused(f"engine {quoted(engine)} has no move to {verb}; {move or 'no move'} is pending")
        rows = to_layers(layers, self._state.layout.num_layers)
        if rows is None or set(rows) != set(move.layers):
            return self._refused(f"{move} is pending, not one of `layers` (={plain(layers, 80)})")
        return rows

    # ---- reading weights -----------------------------------------------------------------------------------------

    def check_fetch(self, engine: str | None = None, version: int | None = None, digest: str | None = None) -> Reply:
        """Say whether an engine may map the weights. The digest decides; the version is for the message.

        An engine that is not attached, or does not say its digest, is served if its layout matches. Its end cannot be
        seen, so from then on nobody may move experts.

        Args:
            engine: Its name, if it has one.
            version: Version that it adopted.
            digest: Digest of the layout that it routes by; None from an engine that knows no records, which then
                routes by the initial layout.
        """
        state = self._state
        given: object = engine
        nameless = given is None or (isinstance(given, str) and not given)
        who = "an engine without a name" if nameless else f"engine {quoted(engine)}"
        unreadable = self._unreadable()
        if unreadable is not None and unreadable.status == "refused":
            return unreadable
        if digest is None and state.version > 0:
            return self._refused(
                f"the weights are at version {state.version} of their layout, and {who} does not say which it routes "
                "by; upgrade the engine, or restart the keeper of the weights"
            )
        if digest is not None and not is_among(digest, (state.digest,)):
            return self._refused(
                f"{who} routes by layout {plain(digest, 12)} (version {plain(version, 80)}), the weights hold "
                f"{state.digest[:12]} (version {state.version}); it must adopt that one before it maps them"
            )
        if unreadable is not None:
            return unreadable
        if digest is None or not is_among(engine, state.engines):
            self._add_non_follower("unnamed" if nameless else plain(engine, MAX_ENGINE_ID))
        return self._ok()

    # ---- answers -------------------------------------------------------------------------------------------------

    def _unreadable(self) -> Reply | None:
        if self._state.dirty:
            return self._refused(self._dirty_reason())
        if self._state.pending is not None:
            return self._busy(f"{self._state.pending} is pending")
        return None

    def _dirty_reason(self) -> str:
        return (
            f"nobody knows what the slots hold: {self._state.dirty}; "
            "restart the keeper of the weights and the engines that use them"
        )

    def _add_non_follower(self, name: str) -> None:
        names = self._state.non_followers
        if len(names) < NAMES_KEPT and name not in names:
            names = (*names, plain(name, MAX_ENGINE_ID))
        self._set(non_followers=names, num_non_followers=self._state.num_non_followers + 1)

    def _set(self, **fields: object) -> None:
        self._state = self._state._replace(**fields)  # type: ignore[arg-type]

    def _ok(self) -> Reply:
        return Reply("ok", "", self.version, self.digest)

    def _busy(self, reason: str) -> Reply:
        return Reply("busy", reason, self.version, self.digest)

    def _refused(self, reason: str) -> Reply:
        return Reply("refused", reason, self.version, self.digest)
