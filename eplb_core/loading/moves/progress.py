"""How far a migration is: the word that ranks exchange in each pass, and what a Migrator reports.

A word is one int64, and every rank gets the minimum of all ranks' words:

    migration << 34 | phase << 32 | value          under way
    -(1 + (migration << 24 | cause << 20 | rank))  this rank has failed

The minimum makes one word enough: a rank that is behind holds back all ranks, and all ranks see a failure in one pass.
Phases 0 and 1 carry 32 bits of the target's digest and their complement: if both minima fit, all ranks have one target.
In phase 2 the value is 2 k + 1 when step k is staged and 2 k + 2 when its install has run on the device. Phase 3: done.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, TypeAlias, get_args

TARGET: Final = 0
CHECK: Final = 1
MOVING: Final = 2
DONE: Final = 3
BITS: Final = (1 << 32) - 1
"""All bits of a value."""

Phase: TypeAlias = Literal["idle", "planning", "moving", "paused", "lost", "stopped"]
"""What a Migrator does; `lost`: the agreement failed, call `rejoin`."""
Cause: TypeAlias = Literal[
    "failed", "plan", "read", "peer", "deadline", "backup", "busy", "refused", "record", "disagree", "agreement",
    "paused",
]  # fmt: skip
"""Why a migration ended early; docs/moving.md explains each."""
CAUSES: Final[tuple[Cause, ...]] = get_args(Cause)
"""In the order of their numbers in a word."""
MOST_RANKS: Final = 1 << 20


class Trouble(Exception):
    """Why a step cannot be staged or recorded; `cause` is what ranks tell each other."""

    def __init__(self, cause: Cause, reason: str) -> None:
        super().__init__(reason)
        self.cause, self.reason = cause, reason


def as_trouble(error: BaseException, where: str = "") -> Trouble:
    """Return `error` itself if it is a Trouble, else a Trouble of cause `read` that names its type."""
    return error if isinstance(error, Trouble) else Trouble("read", f"{where}{type(error).__name__}: {error}")


# ---- words -----------------------------------------------------------------------------------------------------------


class Failure(NamedTuple):
    """The parts of a failed rank's word."""

    migration: int
    """0: whichever runs (an engine's own -1)."""
    cause: Cause
    rank: int | None


def word(migration: int, phase: int, value: int) -> int:
    """Encode a word of a migration under way."""
    return migration << 34 | phase << 32 | value


def failure(migration: int, cause: Cause, rank: int) -> int:
    """Encode the word of a rank that failed; it is negative."""
    return -(1 + (migration << 24 | CAUSES.index(cause) << 20 | rank))


def decode_word(agreed: int) -> tuple[int, int, int]:
    """Return migration, phase and value of a minimum of 0 or more."""
    return agreed >> 34, agreed >> 32 & 3, agreed & BITS


def decode_failure(agreed: int) -> Failure:
    """Decode a minimum below 0."""
    bits = -agreed - 1
    migration, cause, rank = bits >> 24, bits >> 20 & 15, bits & (MOST_RANKS - 1)
    return Failure(migration, CAUSES[cause] if cause < len(CAUSES) else CAUSES[0], rank if migration else None)


# ---- status ----------------------------------------------------------------------------------------------------------


class MigratorStatus(NamedTuple):
    """What a Migrator does and has done.

    `phase`, `migration`, `steps`, `installed` and `cause` are equal on all ranks; docs/moving.md explains them.
    """

    phase: Phase
    """What it does now."""
    migration: int
    """Number of the migration that runs or ran last."""
    installed: int
    """Its steps that are installed."""
    steps: int
    """Its steps; 0 until all ranks know them. A step is a layer, or a part of one where staging is smaller."""
    cause: Cause | Literal[""]
    """Why the last migration ended early; empty if it reached its target."""
    reason: str
    """The cause in words, with the most detail on the rank that gave up."""
    rank: int | None
    """The rank that gave up."""
    off: str
    """Why no migration can start any more, or empty."""
    read_bytes: int
    """Bytes read from peers since the constructor."""
    read_s: float
    """Seconds in which at least one read was pending."""
    install_s: float
    """Seconds of installs on the forward thread."""
    worst_install_s: float
    """Seconds of the longest install."""
    quarantined: int
    """Staging rows that abandoned reads may still write, when the reading thread last looked."""

    @property
    def read_gb_s(self) -> float:
        """Bytes read per second of reading, in GB/s."""
        return self.read_bytes / self.read_s / 1e9 if self.read_s else 0.0


class Ending(NamedTuple):
    """How a migration ended; fields as in `MigratorStatus`."""

    cause: Cause | Literal[""] = ""
    reason: str = ""
    rank: int | None = None
    installed: int = 0
    steps: int = 0
