"""Errors that the library raises besides ValueError, TypeError and IndexError.

A message names the argument, its value, the rule, the place and the fix. States that an engine handles are subclasses
of `EplbError` and carry their numbers as attributes.
"""

from __future__ import annotations

from typing import Any

from eplb_core._text import plain

MAX_TEXT = 2000
"""Most characters of a message."""


class EplbError(Exception):
    """Base of all states that an engine may want to handle.

    The text is one printable line of bounded length, whatever a quoted file or peer contains.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(plain(message, MAX_TEXT))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle args and attributes; `Exception` passes the text alone to a constructor that needs more."""
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[EplbError], args: tuple[Any, ...], attributes: dict[str, Any]) -> EplbError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


class LayoutError(EplbError, ValueError):
    """A map is not a valid layout, or a change would make one that is not.

    Attributes:
        layer: First layer at fault, or None where it is not one layer's.
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
    """No live slot holds an expert, so its tokens have nowhere to go."""


class InfeasiblePlacementError(EplbError, ValueError):
    """No layout exists for these numbers.

    Attributes:
        num_live_slots: Slots on active ranks.
        num_experts: Experts, which need one slot each.
    """

    def __init__(self, message: str, *, num_live_slots: int, num_experts: int) -> None:
        super().__init__(message)
        self.num_live_slots = num_live_slots
        self.num_experts = num_experts


class FileFormatError(EplbError, ValueError):
    """A file is truncated, of an unknown format or inconsistent.

    Attributes:
        path: The file.
    """

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class TransportError(EplbError, RuntimeError):
    """Memory cannot be registered, a peer cannot be reached, or a read must not begin.

    Attributes:
        rank: The peer, or None for this rank.
    """

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class SocketInUseError(EplbError, RuntimeError):
    """Another server listens at this path, or the path is not a socket.

    Attributes:
        path: The path.
    """

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class SocketOwnerError(EplbError, RuntimeError):
    """The socket belongs to another user, so it is neither used nor removed.

    Attributes:
        path: The socket.
        uid: Owner of the socket.
    """

    def __init__(self, message: str, *, path: str, uid: int) -> None:
        super().__init__(message)
        self.path = path
        self.uid = uid


class RecordLostError(EplbError, RuntimeError):
    """The server of a record died, closed the connection, or answered late or in another protocol.

    Attributes:
        path: Socket of the server.
    """

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class LayoutAgreementError(EplbError, RuntimeError):
    """Ranks cannot start on one layout; every rank raises this, with the same text.

    Attributes:
        ranks: Ranks at fault, ascending.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


class HostAbsent(EplbError, RuntimeError):
    """No weight host listens at the path: load from disk."""


class HostBusy(EplbError, RuntimeError):
    """A move is running: try again later."""


class HostRefused(EplbError, RuntimeError):
    """The host's weights do not fit this engine: load from disk.

    Attributes:
        field: What differs: a name in `config`, "layout", or the name of a tensor.
    """

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(message)
        self.field = field


class AgreementError(EplbError, RuntimeError):
    """Ranks did not agree before the deadline: one died, stopped, or left the loop.

    Attributes:
        ranks: Members known not to have answered; may be empty.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class MigrationError(EplbError, RuntimeError):
    """A move ended before its target was reached. All live ranks have the same layout and go on serving.

    Attributes:
        layout: Layout that the weights are in: layers installed before the end are new, the others old. None where no
            move had begun.
        reason: One word; see `MigratorStatus.cause`.
        rank: Rank that gave up, or None where that is not known.
    """

    def __init__(self, message: str, *, layout: object = None, reason: str = "", rank: int | None = None) -> None:
        super().__init__(message)
        self.layout = layout
        self.reason = reason
        self.rank = rank


class CheckpointError(EplbError, ValueError):
    """A checkpoint that does not fill the slots: the text names the tensor or the slots.

    Attributes:
        tensor: Name in the checkpoint at fault, or None.
        slots: Slots that nothing would write, `(layer, local slot)` each.
    """

    def __init__(self, message: str, *, tensor: str | None = None, slots: tuple[tuple[int, int], ...] = ()) -> None:
        super().__init__(message)
        self.tensor = tensor
        self.slots = slots
