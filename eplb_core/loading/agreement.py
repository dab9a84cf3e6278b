"""How ranks take one decision in the same forward pass without waiting for each other."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class Agreement(Protocol):
    """One word from every rank, each pass; the minimum comes back one pass later, equal everywhere.

    Called only from the thread that calls `Migrator.poll`, `pause`, `move_experts` and `agree_on_layout`. An engine
    that exchanges numbers between ranks each pass anyway can carry the word along.
    """

    rank: int
    size: int

    def post(self, word: int) -> None:
        """Hand in this pass's word, an int64. Never blocks."""
        ...

    def take(self) -> int | None:
        """Minimum of all ranks' words of one pass earlier; None on the first pass.

        "One pass earlier" is fixed: a test for completion would answer in different passes on different ranks.
        """
        ...

    def gather(self, blob: bytes) -> list[bytes]:
        """Every rank's blob, by rank. Blocks until all ranks called it, with a deadline; start-up and pause only."""
        ...
