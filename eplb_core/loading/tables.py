"""Dispatch tables as loading sees them: what a move installs into, and whether that will fit."""

from __future__ import annotations

from typing import Protocol

from eplb_core._arrays import ArrayLike, IntArray
from eplb_core.layout import ExpertLayout


class Tables(Protocol):
    """What dispatch reads the layout from, such as `DispatchTables`."""

    def install(
        self, layout: ExpertLayout, *, layers: ArrayLike | None = None, shares: ArrayLike | None = None
    ) -> object:
        """Fill the rows of `layers`, on the current stream."""
        ...


def check_tables(tables: object, layout: ExpertLayout) -> None:
    """Raise ValueError if tables say that they dispatch by another layout than the weights are in."""
    held = getattr(tables, "layout", None)
    if isinstance(held, ExpertLayout) and held != layout:
        raise ValueError(
            f"`tables` dispatch by the layout {held.digest[:12]} and the weights are in {layout.digest[:12]}; install "
            "the latter in the tables first"
        )


def lacks_room(tables: object, replica_count: IntArray) -> str:
    """Say why tables cannot hold so many replicas of each expert, or nothing: no install may fail half way."""
    limit, most = getattr(tables, "max_replicas", None), int(replica_count.max(initial=0))
    return f"an expert has {most} replicas and `tables` hold {limit}" if limit is not None and most > limit else ""
