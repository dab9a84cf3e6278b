"""What ranks tell each other in one int64 a pass, of which every rank gets the minimum.

    migration << 34 | phase << 32 | value          on the way
    -(1 + (migration << 24 | cause << 20 | rank))  this rank has failed

The minimum makes one word enough: a rank that is behind holds all back, one that failed is seen by all in one pass.
Phases 0 and 1 carry 32 bits of the target's digest and their complement: if both minima fit, all ranks have one target.
In phase 2 the value is 2 k + 1 when step k is staged and 2 k + 2 when its install has run on the device. Phase 3: done.
"""

from __future__ import annotations

from typing import Final, NamedTuple

TARGET: Final = 0
CHECK: Final = 1
MOVING: Final = 2
DONE: Final = 3
BITS: Final = (1 << 32) - 1
"""All of a value's bits."""

CAUSES: Final = (
    "failed", "plan", "read", "peer", "deadline", "backup", "busy", "refused", "record", "disagree", "agreement",
    "paused",
)  # fmt: skip
"""Why a migration ends early, in one word; see `MigratorStatus.cause`."""
MOST_RANKS: Final = 1 << 20


class Word(NamedTuple):
    """A word on the way, taken apart."""

    migration: int
    phase: int
    value: int


class Failure(NamedTuple):
    """A word of a rank that failed, taken apart."""

    migration: int
    """0: whichever runs (an engine's own -1)."""
    cause: str
    rank: int | None


def word(migration: int, phase: int, value: int) -> int:
    """Put together."""
    return migration << 34 | phase << 32 | value


def failure(migration: int, cause: str, rank: int) -> int:
    """Put together."""
    return -(1 + (migration << 24 | CAUSES.index(cause) << 20 | rank))


def take_apart(agreed: int) -> Word:
    """What a minimum says that is a word on the way."""
    return Word(agreed >> 34, agreed >> 32 & 3, agreed & BITS)


def failure_of(agreed: int) -> Failure:
    """What a minimum below 0 says."""
    bits = -agreed - 1
    migration, cause, rank = bits >> 24, bits >> 20 & 15, bits & (MOST_RANKS - 1)
    known = CAUSES[cause] if cause < len(CAUSES) else CAUSES[0]
    return Failure(migration, known, rank if migration else None)


def target_bits(digest: str) -> int:
    """32 bits of a layout's digest."""
    return int(digest[:8], 16)
