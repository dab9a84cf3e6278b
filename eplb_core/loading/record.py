"""What shared weights hold: a layout with a version, kept by whoever keeps the memory.

Engines that map one copy of the weights have one truth about which expert is in which slot, and it is not in any of
them: an engine that moves experts moves them under every other one. `LayoutRecord` is that truth as a pure state
machine: no socket, no clock, no device. `LayoutServer` puts it behind a Unix socket.

    clean --begin--> pending --commit--> clean, version + 1
                        |------abort---> clean, same version
                        '-----detach---> dirty: for good, since nobody knows how far the move came

An engine may begin only while it is alone, so nobody else's layout goes stale; and nobody reads weights while a move is
pending, while the record is dirty, or under another layout than the record's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from eplb_core._arrays import ArrayLike, check_int, to_ids
from eplb_core.layout import ExpertLayout

Status: TypeAlias = Literal["ok", "busy", "refused"]

MAX_ENGINE_ID = 200
"""Most characters of an engine's name."""
NAMES_KEPT = 8
"""Of engines that do not follow the layout so many are remembered by name; beyond that they are counted."""


class Reply(NamedTuple):
    """Answer to one request."""

    status: Status
    """`ok`; `busy`: the same request may do later; `refused`: it will not, as long as the weights live."""
    reason: str = ""
    """For `busy` and `refused`: who and what is in the way, with engine, layers and version."""
    version: int | None = None
    """Version of the record after the request; None without a record."""
    digest: str | None = None
    """Digest of the recorded layout after the request; None without a record."""


class Move(NamedTuple):
    """A move that was begun and not yet committed."""

    engine: str
    """Who moves."""
    layers: tuple[int, ...]
    """Rows of the layout that it touches."""
    version: int
    """Version before it."""

    def __str__(self) -> str:
        return f"the move of {name_layers(self.layers)} by engine {self.engine!r} from version {self.version}"


class RecordState(NamedTuple):
    """All that a record knows; immutable."""

    layout: ExpertLayout
    """What the slots hold, as of `version`; during a pending move its layers are in doubt."""
    version: int = 0
    """Number of committed moves."""
    engines: tuple[str, ...] = ()
    """Who is attached, in order of arrival."""
    pending: Move | None = None
    """The move that is under way."""
    dirty: str = ""
    """Why nobody knows what the slots hold; empty as long as somebody does."""
    non_followers: tuple[str, ...] = ()
    """First engines that read the weights and cannot be seen to leave."""
    num_non_followers: int = 0
    """How many there are."""

    @property
    def digest(self) -> str:
        """`layout.digest`."""
        return self.layout.digest


class LayoutRecord:
    """Which expert each slot of shared weights holds, who uses them, and who may move experts.

    Bad requests are answered, never raised, and change nothing. A reason to refuse is decided before a reason to wait.

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
        ('ok', ('busy', "engine 'b' is attached too; experts may move only under an engine that is alone"))

    Source:
        The protocol of sgl-project/sglang#45341; differs: it knows no transport, and `check_fetch` during a move is
        `busy`.
    """

    __slots__ = ("_state",)

    def __init__(self, layout: ExpertLayout, *, version: int = 0) -> None:
        if not isinstance(layout, ExpertLayout):
            raise TypeError(f"`layout` (={type(layout).__name__}) must be an ExpertLayout")
        self._state = RecordState(layout, check_int(version, "version", 0))

    @classmethod
    def of_state(cls, state: RecordState) -> LayoutRecord:
        """A record that goes on from `state`."""
        record = cls(state.layout, version=state.version)
        record._state = state
        return record

    @classmethod
    def restarted(cls, state: RecordState) -> LayoutRecord:
        """A record whose keeper died in `state` while the memory lived on.

        A move that was pending is in doubt for ever. Engines that were attached may still use the memory and can no
        longer be seen to leave: they count as engines that do not follow the layout.
        """
        record = cls.of_state(state._replace(engines=(), pending=None))
        for engine in state.engines:
            record._add_non_follower(f"{engine} (attached before the keeper of the record restarted)")
        if state.pending is not None and not state.dirty:
            record._set(dirty=f"{state.pending} was pending when the keeper of the record died")
        return record

    @property
    def state(self) -> RecordState:
        """All that it knows now."""
        return self._state

    @property
    def layout(self) -> ExpertLayout:
        """What the slots hold."""
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
        """Go back to a former `state`: for a keeper that could not write down what it was about to answer."""
        self._state = state

    # ---- presence ------------------------------------------------------------------------------------------------

    def attach(self, engine: str) -> Reply:
        """An engine arrives, before it reads a weight. From now on no other one may begin a move."""
        if not is_engine_id(engine):
            return self._refused(f"an engine's id must be printable, of 1 to {MAX_ENGINE_ID} characters")
        if engine in self._state.engines:
            return self._refused(f"engine {engine!r} is attached already")
        self._set(engines=(*self._state.engines, engine))
        return self._ok()

    def detach(self, engine: str) -> Reply:
        """An engine is gone, however it went. If its move was pending the record is dirty from now on."""
        if engine not in self._state.engines:
            return self._refused(f"engine {engine!r} is not attached")
        self._set(engines=tuple(name for name in self._state.engines if name != engine))
        move = self._state.pending
        if move is not None and move.engine == engine:
            self._set(pending=None, dirty=f"{move} was pending when the engine left")
        return self._ok()

    def query(self) -> Reply:
        """Version and digest; `busy` during a move, `refused` if the record is dirty."""
        return self._unreadable() or self._ok()

    # ---- moves ---------------------------------------------------------------------------------------------------

    def begin(self, engine: str, layers: Iterable[int], version: int) -> Reply:
        """Ask to move experts of `layers`; only after `ok` may a byte of their slots change.

        Args:
            engine: Who asks.
            layers: Rows of the layout, one or more, each once.
            version: Version of the layout that the move starts from.
        """
        state = self._state
        rows = _to_layers(layers, state.layout.num_layers)
        reason = ""
        if state.dirty:
            reason = self._dirty_reason()
        elif engine not in state.engines:
            reason = f"engine {engine!r} is not attached; attach before the weights are read"
        elif state.pending is not None and state.pending.engine == engine:
            reason = f"{state.pending} is pending; commit or abort it first"
        elif not _is_int(version) or version != state.version:
            reason = f"the layout is at version {state.version}, not {_cut(version)}; engine {engine!r} is not on it"
        elif rows is None:
            reason = (
                f"`layers` (={_cut(layers)}) must be rows in [0, {state.layout.num_layers}), one or more, each once"
            )
        elif state.num_non_followers:
            reason = (
                f"{state.num_non_followers} engine{'s' * (state.num_non_followers > 1)} that do not follow the layout "
                f"use the weights ({_names(state.non_followers)}); restart the keeper of the weights to move experts"
            )
        if reason or rows is None:
            return self._refused(reason)
        if state.pending is not None:
            return self._busy(f"{state.pending} is pending")
        others = [name for name in state.engines if name != engine]
        if others:
            verb = "is" if len(others) == 1 else "are"
            return self._busy(
                f"engine{'s' * (len(others) > 1)} {_names(others)} {verb} attached too; "
                "experts may move only under an engine that is alone"
            )
        self._set(pending=Move(engine, rows, state.version))
        return self._ok()

    def commit(self, engine: str, layers: Iterable[int], rows: ArrayLike) -> Reply:
        """The move is done, every byte of it is in place: record what the slots hold now.

        A commit that is refused leaves the move pending.

        Args:
            engine: Who moved.
            layers: The layers of its `begin`.
            rows: Expert of each slot, ints `[len(layers), P]`, in the order of `layers`.
        """
        moved = self._own_move(engine, layers, "commit")
        if isinstance(moved, Reply):
            return moved
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
        self._set(layout=new, version=self._state.version + 1, pending=None)
        return self._ok()

    def abort(self, engine: str, layers: Iterable[int]) -> Reply:
        """The move will not be: every byte of `layers` is as it was at `begin`."""
        moved = self._own_move(engine, layers, "abort")
        if isinstance(moved, Reply):
            return moved
        self._set(pending=None)
        return self._ok()

    def _own_move(self, engine: str, layers: Iterable[int], verb: str) -> tuple[int, ...] | Reply:
        move = self._state.pending
        if move is None or move.engine != engine:
            return self._refused(f"engine {engine!r} has no move to {verb}; {move or 'no move'} is pending")
        rows = _to_layers(layers, self._state.layout.num_layers)
        if rows is None or set(rows) != set(move.layers):
            return self._refused(f"{move} is pending, not one of `layers` (={_cut(layers)})")
        return rows

    # ---- reading weights -----------------------------------------------------------------------------------------

    def check_fetch(self, engine: str | None = None, version: int | None = None, digest: str | None = None) -> Reply:
        """May this engine map the weights? The digest decides; the version is for the message.

        An engine that is not attached, or does not say its digest, cannot be seen to leave or to follow: it is served
        if its layout matches, and from then on nobody may move experts.

        Args:
            engine: Its name, if it has one.
            version: Version that it adopted.
            digest: Digest of the layout that it routes by; None from an engine that knows no records, which then
                routes by the initial layout.
        """
        state = self._state
        who = f"engine {engine!r}" if engine else "an engine without a name"
        unreadable = self._unreadable()
        if unreadable is not None and unreadable.status == "refused":
            return unreadable
        if digest is None and state.version > 0:
            return self._refused(
                f"the weights are at version {state.version} of their layout, and {who} does not say which it routes "
                "by; upgrade the engine, or restart the keeper of the weights"
            )
        if digest is not None and digest != state.digest:
            return self._refused(
                f"{who} routes by layout {_cut(digest, 12)} (version {_cut(version)}), the weights hold "
                f"{state.digest[:12]} (version {state.version}); it must adopt that one before it maps them"
            )
        if unreadable is not None:
            return unreadable
        if digest is None or engine not in state.engines:
            self._add_non_follower(engine or "unnamed")
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
            names = (*names, _cut(name, MAX_ENGINE_ID))
        self._set(non_followers=names, num_non_followers=self._state.num_non_followers + 1)

    def _set(self, **fields: object) -> None:
        self._state = self._state._replace(**fields)  # type: ignore[arg-type]

    def _ok(self) -> Reply:
        return Reply("ok", "", self.version, self.digest)

    def _busy(self, reason: str) -> Reply:
        return Reply("busy", reason, self.version, self.digest)

    def _refused(self, reason: str) -> Reply:
        return Reply("refused", reason, self.version, self.digest)


def is_engine_id(value: object) -> bool:
    """Whether messages can name an engine so."""
    return isinstance(value, str) and 0 < len(value) <= MAX_ENGINE_ID and value.isprintable()


def name_layers(layers: tuple[int, ...]) -> str:
    """The layers in words, long lists by their ends."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    shown = list(map(str, layers)) if len(layers) <= 6 else [*map(str, layers[:3]), "..", *map(str, layers[-2:])]
    return f"layers {', '.join(shown)}"


def _to_layers(layers: object, num_layers: int) -> tuple[int, ...] | None:
    """The rows as ints, or None unless they are in range, one or more, each once."""
    if isinstance(layers, np.ndarray):
        layers = layers.tolist()
    if not isinstance(layers, (list, tuple, range)) or not 0 < len(layers) <= num_layers:
        return None
    if not all(_is_int(layer) and 0 <= layer < num_layers for layer in layers) or len(set(layers)) < len(layers):
        return None
    return tuple(int(layer) for layer in layers)


def _is_int(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _cut(value: object, width: int = 80) -> str:
    """One short line of what a stranger said."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except (ValueError, RecursionError):  # thousands of digits, thousands of brackets
        text = f"some {type(value).__name__}"
    text = "".join(c if c.isprintable() else " " for c in text[: width + 1])
    return text if len(text) <= width else text[: width - 3] + "..."


def _names(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
