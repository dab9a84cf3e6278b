"""The state of a record as immutable values, and the words for its parts in messages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from eplb_core.layout import ExpertLayout

Status: TypeAlias = Literal["ok", "busy", "refused"]

MAX_ENGINE_ID = 200
"""Most characters of an engine's name."""
NAMES_KEPT = 8
"""Engines outside the record that are kept by name; more are only counted."""


class Reply(NamedTuple):
    """Answer to one request."""

    status: Status
    """`ok`; `busy`: the same request may succeed later; `refused`: it will not, as long as the weights live."""
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
    """Why nobody knows what the slots hold; empty while it is known."""
    non_followers: tuple[str, ...] = ()
    """Names of the first engines that read the weights and whose end cannot be seen."""
    num_non_followers: int = 0
    """How many such engines there are."""
    followers: tuple[str, ...] = ()
    """Engines among `engines` that stop reading a layer when a move of it is asked for, and switch after it."""
    asking: bool = False
    """The pending move waits for followers: not a byte may be written, and none has been."""
    holding: tuple[str, ...] = ()
    """Followers that have stopped reading the layers of the pending move."""
    begun: int = 0
    """Number of moves begun or asked for; a follower's answer names it, and counts for that move alone."""

    @property
    def digest(self) -> str:
        """`layout.digest`."""
        return self.layout.digest

    @property
    def awaited(self) -> tuple[str, ...]:
        """Followers that the pending move waits for."""
        if self.pending is None or not self.asking:
            return ()
        settled = {self.pending.engine, *self.holding}
        return tuple(name for name in self.followers if name not in settled)


def is_engine_id(value: object) -> bool:
    """Whether messages can name an engine so."""
    return isinstance(value, str) and 0 < len(value) <= MAX_ENGINE_ID and value.isprintable()


def is_among(name: object, names: Collection[str]) -> bool:
    """Whether a stranger's word is one of these: an array is none, and cannot be compared."""
    return isinstance(name, str) and name in names


def name_layers(layers: tuple[int, ...]) -> str:
    """The layers in words, long lists by their ends."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    shown = list(map(str, layers)) if len(layers) <= 6 else [*map(str, layers[:3]), "..", *map(str, layers[-2:])]
    return f"layers {', '.join(shown)}"


def to_layers(layers: object, num_layers: int) -> tuple[int, ...] | None:
    """The rows as ints, or None unless they are in range, one or more, each once."""
    if isinstance(layers, np.ndarray):
        layers = layers.tolist() if layers.size <= num_layers else None
    if not isinstance(layers, (list, tuple, range)) or not 0 < len(layers) <= num_layers:
        return None
    if not all(is_int(layer) and 0 <= layer < num_layers for layer in layers) or len(set(layers)) < len(layers):
        return None
    return tuple(int(layer) for layer in layers)


def is_int(value: object) -> bool:
    """Whether a stranger's word is a whole number."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def names_of(names: Iterable[str]) -> str:
    """The names, quoted."""
    return ", ".join(repr(name) for name in names)


def name_engines(names: Sequence[str]) -> str:
    """The engines as the subject of a sentence: engine 'a' is, engines 'a', 'b' are."""
    return f"engine {names_of(names)} is" if len(names) == 1 else f"engines {names_of(names)} are"
