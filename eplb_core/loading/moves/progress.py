"""What a Migrator says of itself."""

from __future__ import annotations

from typing import NamedTuple


class MigratorStatus(NamedTuple):
    """What a Migrator is at. `phase`, `migration`, `steps`, `installed` and `cause` are the same on every rank.

    docs/moving.md lists the phases and causes.
    """

    phase: str
    """`idle`, `planning`, `moving`, `paused`, `lost` (the agreement failed: `rejoin`) or `stopped`."""
    migration: int
    """Number of the migration that runs or ran last."""
    installed: int
    """Its steps that are installed."""
    steps: int
    """Its steps; 0 as long as they are not known. A step is a layer, or a part of one if staging is smaller."""
    cause: str
    """How the last one ended: empty as it should; `plan` (the function given raised, or its layout does not fit),
    `read` (a read failed), `peer` (a peer died), `deadline`, `backup` (no backup of an expert that no rank holds),
    `busy`, `refused`, `record` (the record's keeper), `disagree` (ranks wanted different layouts), `agreement` (the
    agreement failed), `paused`, `failed` (told by an engine's own word, or tables that raised)."""
    reason: str
    """The same in words, with more detail on the rank that gave up."""
    rank: int | None
    """The rank that gave up."""
    off: str
    """Why there are no more moves, or empty."""
    read_bytes: int
    """Bytes read from peers, since the beginning."""
    read_s: float
    """Seconds in which at least one read was under way."""
    install_s: float
    """Seconds of installs on the thread of the passes."""
    worst_install_s: float
    """The longest of them."""
    quarantined: int
    """Slots of staging that reads given up on may still write, when the reader last looked."""

    @property
    def read_gb_s(self) -> float:
        """Bytes read per second of reading, in GB/s."""
        return self.read_bytes / self.read_s / 1e9 if self.read_s else 0.0


class Ending(NamedTuple):
    """How a migration ended; see `MigratorStatus`."""

    cause: str
    reason: str
    rank: int | None
    installed: int
    steps: int
