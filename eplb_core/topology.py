"""`Topology`: the node and the speed of each EP rank."""

from __future__ import annotations

import numpy as np

from eplb_core._arrays import ArrayLike, FloatArray, IntArray, check_int, read_only, to_ids, to_reals
from eplb_core._html import table_html

MAX_RANKS = 1 << 20
"""Far above any deployment: a number beyond it is a mistake, and would take memory before anything could say so."""

# Nodes that HTML shows, and ranks of a node.
_SHOWN = 8


class Topology:
    """Hold the node and the speed of each EP rank. Immutable; equal by value; safe to share.

    Give either `num_ranks` and `num_nodes`, or `rank_to_node`. With the former, ranks are numbered node by node,
    equally many on each node.

    Args:
        num_ranks: EP ranks R, 1 or more.
        num_nodes: Nodes N; must divide `num_ranks`. Default 1.
        rank_to_node: Ints `[R]`: the node of each rank; nodes are 0..N-1, each with one rank or more, of any size.
        rank_speed: Floats `[R]`, positive: tokens per unit of time, relative. Default: all equal.

    Raises:
        ValueError: Numbers do not fit.
        TypeError: Not integers, or neither or both of `num_ranks` and `rank_to_node` given.

    Example:
        >>> Topology(num_ranks=4, num_nodes=2).rank_to_node
        array([0, 0, 1, 1])
        >>> Topology(rank_to_node=[0, 0, 1, 1, 1])
        Topology(num_ranks=5, num_nodes=2)
    """

    __slots__ = ("_rank_speed", "_rank_to_node", "num_nodes", "num_ranks")

    num_ranks: int
    """EP ranks R."""
    num_nodes: int
    """Nodes N."""
    _rank_to_node: IntArray
    _rank_speed: FloatArray

    def __init__(
        self,
        num_ranks: int | None = None,
        num_nodes: int | None = None,
        *,
        rank_to_node: ArrayLike | None = None,
        rank_speed: ArrayLike | None = None,
    ) -> None:
        if rank_to_node is None:
            if num_ranks is None:
                raise TypeError("give `num_ranks` or `rank_to_node`")
            ranks = check_int(num_ranks, "num_ranks", 1)
            if ranks > MAX_RANKS:
                raise ValueError(f"`num_ranks` (={ranks}) must be at most {MAX_RANKS}")
            nodes = check_int(1 if num_nodes is None else num_nodes, "num_nodes", 1)
            if ranks % nodes:
                raise ValueError(
                    f"`num_nodes` (={nodes}) must divide `num_ranks` (={ranks}); for nodes of unequal size give "
                    "`rank_to_node`, the node of each rank"
                )
            node_of = np.arange(ranks, dtype=np.int64) // (ranks // nodes)
        else:
            node_of = to_ids(rank_to_node, "rank_to_node")
            if node_of.ndim != 1 or node_of.size == 0:
                raise ValueError(f"`rank_to_node` (shape {list(node_of.shape)}) must be [R] with one rank or more")
            ranks, nodes = node_of.size, int(node_of.max()) + 1
            if nodes > MAX_RANKS:
                raise ValueError(f"`rank_to_node` (={nodes - 1}) must be below {MAX_RANKS} at rank {node_of.argmax()}")
            present = np.zeros(max(nodes, 1), dtype=bool)
            present[node_of[node_of >= 0]] = True
            if node_of.min() < 0 or not present.all():
                missing = -1 if node_of.min() < 0 else int(np.argmin(present))
                raise ValueError(
                    f"`rank_to_node` must name the nodes 0..{nodes - 1}, each at least once; "
                    + (
                        f"rank {int(np.argmin(node_of))} has {int(node_of.min())}"
                        if missing < 0
                        else f"node {missing} has no rank"
                    )
                )
            if num_ranks is not None and check_int(num_ranks, "num_ranks", 1) != ranks:
                raise ValueError(f"`num_ranks` (={num_ranks}) and `rank_to_node` ({ranks} ranks) disagree; give one")
            if num_nodes is not None and check_int(num_nodes, "num_nodes", 1) != nodes:
                raise ValueError(f"`num_nodes` (={num_nodes}) and `rank_to_node` ({nodes} nodes) disagree; give one")
        speed = np.ones(ranks) if rank_speed is None else np.array(to_reals(rank_speed, "rank_speed"))
        if speed.shape != (ranks,):
            raise ValueError(f"`rank_speed` (shape {list(speed.shape)}) must be [{ranks}], one speed per rank")
        bad = ~((speed > 0) & (speed < np.inf))
        if bad.any():
            rank = int(np.argmax(bad))
            raise ValueError(
                f"`rank_speed` (={speed[rank]}) must be positive and finite at rank {rank}; "
                "leave out a rank that must take nothing by `active_ranks`"
            )
        if speed.max() > 1e6 * speed.min() or speed.max() > 1e100 or speed.min() < 1e-100:
            raise ValueError(
                f"`rank_speed` (from {speed.min():g} to {speed.max():g}) must differ by a factor of a million at most, "
                "and lie within 1e-100 and 1e100; give speeds relative to each other"
            )
        set_field = object.__setattr__
        set_field(self, "num_ranks", ranks)
        set_field(self, "num_nodes", nodes)
        set_field(self, "_rank_to_node", read_only(node_of))
        set_field(self, "_rank_speed", read_only(speed))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"`{name}` of a Topology cannot be set; make another topology")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"`{name}` of a Topology cannot be deleted")

    @property
    def rank_to_node(self) -> IntArray:
        """Node of each rank, int64 `[R]`, read-only."""
        return self._rank_to_node

    @property
    def rank_speed(self) -> FloatArray:
        """Relative speed of each rank, float64 `[R]`, read-only."""
        return self._rank_speed

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Topology):
            return NotImplemented
        return self is other or (
            bool(np.array_equal(self.rank_to_node, other.rank_to_node))
            and bool(np.array_equal(self.rank_speed, other.rank_speed))
        )

    def __hash__(self) -> int:
        return hash((self.rank_to_node.tobytes(), self.rank_speed.tobytes()))

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.rank_to_node.tolist(), self.rank_speed.tolist())

    def __repr__(self) -> str:
        speed = "" if (self.rank_speed == 1.0).all() else ", rank_speed=..."
        return f"Topology(num_ranks={self.num_ranks}, num_nodes={self.num_nodes}{speed})"

    def _repr_html_(self) -> str:
        """The ranks of each node, and their speeds where they differ."""
        ranks = np.arange(self.num_ranks)
        rows = []
        for node in range(min(self.num_nodes, _SHOWN)):
            mine = ranks[self.rank_to_node == node]
            speed = np.unique(self.rank_speed[mine])
            whole = len(mine) > 1 and mine[-1] - mine[0] == len(mine) - 1
            named = f"{mine[0]}-{mine[-1]}" if whole else ", ".join(map(str, mine[:_SHOWN].tolist()))
            named += " .." if not whole and len(mine) > _SHOWN else ""
            rows.append([node, len(mine), named, f"{speed[0]:g}" + (f" to {speed[-1]:g}" if len(speed) > 1 else "")])
        left = self.num_nodes - len(rows)
        more = f"<div>{left} more nodes</div>" if left else ""
        facts = f"<b>Topology</b>: {self.num_ranks} ranks on {self.num_nodes} node{'s' * (self.num_nodes > 1)}"
        return f"<div>{facts}{table_html(['node', 'ranks', 'which', 'relative speed'], rows)}{more}</div>"


def _rebuild(rank_to_node: list[int], rank_speed: list[float]) -> Topology:
    return Topology(rank_to_node=rank_to_node, rank_speed=rank_speed)
