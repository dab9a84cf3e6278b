"""What the library raises, beyond ValueError, TypeError and IndexError.

A message names the value, the rule, the place (layer, slot, expert, rank) and what to do. States that an engine handles
are subclasses of `EplbError` and carry their numbers as attributes.
"""

from __future__ import annotations

from typing import Any

from eplb_core._text import plain

MAX_TEXT = 2000
"""Characters of a message: names of a few files, and what is to be done."""


class EplbError(Exception):
    """Base of all states that an engine may want to handle.

    The text is one printable line of a bounded length, whatever a file or a peer said that is quoted in it.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(plain(message, MAX_TEXT))

    def __reduce__(self) -> tuple[Any, ...]:
        """Between processes: `Exception` would give the text alone to a constructor that asks for more."""
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[EplbError], args: tuple[Any, ...], attributes: dict[str, Any]) -> EplbError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


class LayoutError(EplbError, ValueError):
    """A map that is no valid layout, or a change that would make one.

    Attributes:
        layer: First layer at fault, or None where the whole is.
        slot: First slot at fault, or None.
        expert: Expert at fault, or None.
    """

    def __init__(
        self, message: str, *, layer: int | None = None, slot: int | None = None, expert: int | None = None
    ) -> None:
        super().__init__(message)
        self.layer = layer
        self.slot = slot
        self.expert = expert


class MissingExpertError(LayoutError):
    """An expert that no live slot holds: without it a token of that expert could go nowhere."""


class InfeasiblePlacementError(EplbError, ValueError):
    """No layout exists for these numbers.

    Attributes:
        num_live_slots: Slots on active ranks.
        num_experts: Experts that need one each.
    """

    def __init__(self, message: str, *, num_live_slots: int, num_experts: int) -> None:
        super().__init__(message)
        self.num_live_slots = num_live_slots
        self.num_experts = num_experts


class FileFormatError(EplbError, ValueError):
    """A file that is truncated, foreign or does not hold what it says.

    Attributes:
        path: The file.
    """

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class TransportError(EplbError, RuntimeError):
    """Memory that cannot be registered, a peer that cannot be reached or a read that must not begin.

    Attributes:
        rank: The peer, or None where it is about this rank.
    """

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class SocketInUseError(EplbError, RuntimeError):
    """Another server lives at this path, or something that is no socket.

    Attributes:
        path: The path.
    """

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class SocketOwnerError(EplbError, RuntimeError):
    """A socket that belongs to somebody else: neither to be trusted nor to be removed.

    Attributes:
        path: The socket.
        uid: Who owns it.
    """

    def __init__(self, message: str, *, path: str, uid: int) -> None:
        super().__init__(message)
        self.path = path
        self.uid = uid


class RecordLostError(EplbError, RuntimeError):
    """The keeper of a record cannot be asked any more: it died, closed the connection, answered late or nonsense.

    Attributes:
        path: Its socket.
    """

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class LayoutAgreementError(EplbError, RuntimeError):
    """Ranks that cannot start on one layout; every rank raises it, with the same text.

    Attributes:
        ranks: Ranks at fault, ascending.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


class HostAbsent(EplbError, RuntimeError):
    """No weight host listens there: load from disk."""


class HostBusy(EplbError, RuntimeError):
    """A move is under way: ask again later."""


class HostRefused(EplbError, RuntimeError):
    """The host's weights are not what this engine needs: load from disk.

    Attributes:
        field: What differs: a name in `config`, `layout`, or the name of a tensor.
    """

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(message)
        self.field = field


class AgreementError(EplbError, RuntimeError):
    """Ranks did not come to an agreement in time: one is dead, stopped, or has left the loop.

    Attributes:
        ranks: Members of the agreement that did not answer, as far as is known; may be empty.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class MigrationError(EplbError, RuntimeError):
    """A move that ended before its target was reached. Every live rank has the same layout, and serves on.

    Attributes:
        layout: The layout that the weights are in: layers installed before the end are new, the others old. None where
            nothing had begun.
        reason: One word: see `MigratorStatus.cause`.
        rank: The rank that gave up, or None where it is not known.
    """

    def __init__(self, message: str, *, layout: object = None, reason: str = "", rank: int | None = None) -> None:
        super().__init__(message)
        self.layout = layout
        self.reason = reason
        self.rank = rank
