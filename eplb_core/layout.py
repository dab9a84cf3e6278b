"""`ExpertLayout`: the expert of each slot as one array, and every map derived from it.

What loading fills, what dispatch may target and what a move must read are all computed from its
`physical_to_logical_map`, so they cannot disagree.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import numpy as np

from eplb_core._arrays import (
    ArrayLike,
    BoolArray,
    IntArray,
    check_id,
    check_int,
    check_kind,
    check_made,
    read_only,
    to_ids,
    to_numpy,
)
from eplb_core._html import HTML_LAYERS
from eplb_core._text import quoted
from eplb_core.errors import InfeasiblePlacementError, LayoutError, MissingExpertError
from eplb_core.frames import Columns, Table, pandas_frame, polars_frame
from eplb_core.topology import Topology

MAX_SLOTS = 1 << 24
"""Far above any deployment: a number beyond it is a mistake, and would take memory before anything could say so."""


class LayoutDiff(NamedTuple):
    """Slots whose expert changes, in order of layer and slot; all arrays int64 `[n]`."""

    layer: IntArray
    slot: IntArray
    old_expert: IntArray
    """Expert before; -1 = the slot was empty."""
    new_expert: IntArray
    """Expert after; -1 = the slot is emptied."""

    def to_pandas(self) -> Any:
        """Return the rows as a pandas DataFrame; ImportError without pandas."""
        return pandas_frame(self._asdict())

    def to_polars(self) -> Any:
        """Return the rows as a polars DataFrame; ImportError without polars."""
        return polars_frame(self._asdict())

    def __str__(self) -> str:
        return "\n".join(
            f"layer {layer} slot {slot}: {old if old >= 0 else '-'} -> {new if new >= 0 else '-'}"
            for layer, slot, old, new in zip(*(column.tolist() for column in self), strict=True)
        )


class ExpertLayout(Table):
    """Hold the logical expert of each slot on every layer. Immutable; an object that exists is valid.

    Slots are global and rank-major: slot `p` is local slot `p % S` of rank `p // S`. Every layer holds every logical
    expert in at least one slot; a slot may be empty (-1). Two replicas of one expert on one rank are accepted because
    saved layouts contain them.

    Args:
        physical_to_logical_map: Signed ints `[L, P]` in `[-1, E)`: lists, numpy or torch. Copied. `L` may be 0.
        num_experts: Logical experts E, 1 or more.
        topology: Ranks and nodes; its R must divide P.

    Raises:
        LayoutError: An id is out of range; `layer` and `slot` say where.
        MissingExpertError: An expert has no slot; `layer` and `expert` say which.
        ValueError: Wrong shape, or R does not divide P.
        TypeError: Not signed integers (an unsigned id cannot say -1).

    Cost:
        O(L * P): about 0.1 ms at 58 x 288. Derived maps and the digest are computed on first use and kept.

    Threads:
        Any. Only caches change after construction, and every thread computes the same values.

    Example:
        >>> layout = ExpertLayout([[0, 1, 2, 3, 3, 0]], num_experts=4, topology=Topology(num_ranks=2))
        >>> layout.slots(0, 3)
        (3, 4)
        >>> print(layout)
        layer 0: 0 1 2 | 3 3 0
    """

    __slots__ = ("_digest", "_l2p", "_p2l", "_replica_count", "num_experts", "topology")

    num_experts: int
    """Logical experts E."""
    topology: Topology
    """Ranks and nodes."""
    _p2l: IntArray
    _l2p: IntArray | None
    _replica_count: IntArray | None
    _digest: str | None

    def __init__(self, physical_to_logical_map: ArrayLike, num_experts: int, *, topology: Topology) -> None:
        check_kind(topology, "topology", Topology)
        experts = check_int(num_experts, "num_experts", 1)
        try:
            p2l = to_ids(physical_to_logical_map, "physical_to_logical_map")
        except ValueError as error:  # ragged lists
            raise LayoutError(
                "`physical_to_logical_map` must be [L, P] with as many slots on every layer; pad shorter layers with -1"
            ) from error
        if p2l.ndim != 2:
            raise ValueError(f"`physical_to_logical_map` (shape {list(p2l.shape)}) must be [L, P]")
        check_map(p2l, experts, topology)
        self._set(p2l, experts, topology)

    def _set(self, p2l: IntArray, num_experts: int, topology: Topology) -> None:
        set_field = object.__setattr__
        set_field(self, "_p2l", read_only(p2l))
        set_field(self, "num_experts", num_experts)
        set_field(self, "topology", topology)
        set_field(self, "_l2p", None)
        set_field(self, "_replica_count", None)
        set_field(self, "_digest", None)

    @classmethod
    def _of_valid(cls, p2l: IntArray, num_experts: int, topology: Topology) -> ExpertLayout:
        """Wrap a map that is known to be valid; takes ownership of the array."""
        layout = cls.__new__(cls)
        layout._set(p2l, num_experts, topology)
        return layout

    @classmethod
    def trivial(
        cls,
        num_layers: int,
        num_experts: int,
        *,
        num_slots: int | None = None,
        topology: Topology,
        slots_per_rank: ArrayLike | None = None,
    ) -> ExpertLayout:
        """Put expert `p % E` into slot `p` on every layer, as engines start.

        Where R does not divide `num_slots`, ranks have S = ceil(num_slots / R) slots and the last ranks end with an
        empty one. With `slots_per_rank`, p counts the slots that ranks fill.

        Args:
            num_layers: Layers L, 0 or more.
            num_experts: Logical experts E.
            num_slots: Slots to fill, at least E.
            topology: Ranks and nodes.
            slots_per_rank: Instead of `num_slots`: slots that each rank fills, ints `[R]`. S is the largest; ranks with
                fewer end with empty slots.

        Raises:
            ValueError: Fewer slots than `num_experts`, or not one of the two.

        Example:
            >>> print(ExpertLayout.trivial(1, 30, num_slots=30, topology=Topology(num_ranks=8)).format(width=0))
            layer 0: 0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14 15 | 16 17 18 19 | 20 21 22 23 | 24 25 26 - | 27 28 29 -
        """
        layers = check_int(num_layers, "num_layers", 0)
        experts = check_int(num_experts, "num_experts", 1)
        check_kind(topology, "topology", Topology)
        capacity = rank_slots(num_slots, slots_per_rank, experts, topology.num_ranks)
        stride = int(capacity.max())
        check_made(num_layers=layers, num_slots=topology.num_ranks * stride)
        row = np.full(topology.num_ranks * stride, -1, dtype=np.int64)
        row.reshape(topology.num_ranks, -1)[np.arange(stride) < capacity[:, None]] = np.arange(capacity.sum()) % experts
        return cls._of_valid(np.tile(row, (layers, 1)), experts, topology)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"`{name}` of an ExpertLayout cannot be set; make another layout")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"`{name}` of an ExpertLayout cannot be deleted")

    # ---- sizes ---------------------------------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        """Layers L."""
        return int(self._p2l.shape[0])

    @property
    def num_slots(self) -> int:
        """Slots P = R * S, empty ones included."""
        return int(self._p2l.shape[1])

    @property
    def slots_per_rank(self) -> int:
        """Slots S of each rank."""
        return self.num_slots // self.topology.num_ranks

    # ---- maps ----------------------------------------------------------------------------------------------------

    @property
    def physical_to_logical_map(self) -> IntArray:
        """Expert of each slot, int64 `[L, P]`, -1 = empty, read-only."""
        return self._p2l

    @property
    def logical_to_physical_map(self) -> IntArray:
        """All slots of each expert, int64 `[L, E, K]`, ascending, padded with -1, read-only. K = most replicas."""
        l2p = self._l2p
        if l2p is None:
            l2p = read_only(invert(self._p2l, self.num_experts))
            object.__setattr__(self, "_l2p", l2p)
        return l2p

    @property
    def replica_count(self) -> IntArray:
        """Slots of each expert, int64 `[L, E]`, 1 or more, read-only."""
        count = self._replica_count
        if count is None:
            count = read_only(count_replicas(self._p2l, self.num_experts))
            object.__setattr__(self, "_replica_count", count)
        return count

    def slots(self, layer: int, expert: int) -> tuple[int, ...]:
        """Return all global slots that hold `expert` on `layer`, on any rank, ascending.

        Raises:
            IndexError: `layer` or `expert` is out of range; negative numbers are.
        """
        check_id(layer, "layer", self.num_layers)
        check_id(expert, "expert", self.num_experts)
        row = self.logical_to_physical_map[layer, expert]
        return tuple(row[: self.replica_count[layer, expert]].tolist())

    @property
    def digest(self) -> str:
        """SHA-256 of the map in hex: equal exactly where slots hold the same experts, on any machine.

        Of the bytes `eplb-layout-1`, then L, P, E and the map in row order, each as little-endian int64. Ranks, nodes
        and speeds are not part of it.
        """
        digest = self._digest
        if digest is None:
            sha = hashlib.sha256(b"eplb-layout-1")
            sha.update(np.array([*self._p2l.shape, self.num_experts], dtype="<i8").tobytes())
            sha.update(self._p2l.astype("<i8", copy=False).tobytes())
            digest = sha.hexdigest()
            object.__setattr__(self, "_digest", digest)
        return digest

    # ---- other layouts from this one -----------------------------------------------------------------------------

    def replace(self, other: ExpertLayout, layers: ArrayLike) -> ExpertLayout:
        """Take the rows of `layers` from `other` and keep the rest.

        Args:
            other: Layout of the same L, P, E and topology.
            layers: Rows as ints in `[0, L)`, or bools `[L]`.

        Raises:
            ValueError: The layouts differ in shape, experts or topology.
            IndexError: A layer is out of range; negative numbers are.

        Cost:
            Some microseconds at 58 x 288: copies the map, validates and hashes nothing, so it may run between passes.
        """
        self.check_same_frame(other)
        rows = layer_rows(layers, self.num_layers)
        p2l = self._p2l.copy()
        p2l[rows] = other._p2l[rows]
        return self._of_valid(p2l, self.num_experts, self.topology)

    def resized(self, topology: Topology, ranks: ArrayLike | None = None) -> ExpertLayout:
        """Change the ranks: some leave, some join empty; experts that stay keep their local slots.

        Args:
            topology: Ranks and nodes after the change, R' ranks.
            ranks: Ints `[R']`: the rank of this layout that becomes rank i, each at most once; -1 = a new, empty rank.
                Default: rank i stays rank i, new ranks come last.

        Raises:
            MissingExpertError: An expert would lose its last slot; the text names its ranks.
            ValueError: `ranks` has the wrong length, or names a rank twice.
            IndexError: A rank out of range.
        """
        old_ranks, new_ranks = self.topology.num_ranks, check_kind(topology, "topology", Topology).num_ranks
        if ranks is None:
            kept = np.arange(new_ranks, dtype=np.int64)
            kept[kept >= old_ranks] = -1
        else:
            kept = to_ids(ranks, "ranks")
        if kept.shape != (new_ranks,):
            raise ValueError(
                f"`ranks` (shape {list(kept.shape)}) must be [{new_ranks}], one entry per rank of `topology`"
            )
        if kept.max() >= old_ranks or kept.min() < -1:
            rank = int(np.argmax((kept >= old_ranks) | (kept < -1)))
            raise IndexError(f"`ranks` (={kept[rank]}) must be in [-1, {old_ranks}) at rank {rank}")
        named = kept[kept >= 0]
        if len(np.unique(named)) < len(named):
            twice = int(np.argmax(np.bincount(named) > 1))
            raise ValueError(f"`ranks` must name each rank at most once; it has {twice} twice")
        by_rank = self._p2l.reshape(self.num_layers, old_ranks, self.slots_per_rank)
        p2l = np.where((kept >= 0)[None, :, None], by_rank[:, np.maximum(kept, 0)], -1)
        p2l = np.ascontiguousarray(p2l.reshape(self.num_layers, new_ranks * self.slots_per_rank))
        lost = np.argwhere(count_replicas(p2l, self.num_experts) == 0)
        if len(lost):
            layer, expert = (int(i) for i in lost[0])
            holders = sorted({slot // self.slots_per_rank for slot in self.slots(layer, expert)})
            raise MissingExpertError(
                f"expert {expert} of layer {layer} would lose its last slot with rank {', '.join(map(str, holders))}"
                f"{f'; {len(lost) - 1} more' if len(lost) > 1 else ''}; first move it to a rank that "
                "stays (`plan_removal`, or `place` with `active_ranks`)",
                layer=layer,
                expert=expert,
            )
        return self._of_valid(p2l, self.num_experts, topology)

    def without_ranks(self, ranks: ArrayLike) -> ExpertLayout:
        """Remove `ranks`; the others close up in order and keep their node, their speed and all their slots.

        Args:
            ranks: Ranks that leave, ints or bools `[R]`. Each expert needs a slot on another rank (see `plan_removal`).

        Returns:
            Layout on the ranks that stay; nodes without a rank vanish, the others close up in order.

        Raises:
            MissingExpertError: An expert would lose its last slot; the text names expert, layer and rank.
            InfeasiblePlacementError: The ranks that stay have fewer slots than there are experts.
            IndexError: A rank out of range.

        Example:
            >>> layout = ExpertLayout([[0, 1, 2, 0, 1, 2]], num_experts=3, topology=Topology(num_ranks=6, num_nodes=3))
            >>> layout.without_ranks([1, 2, 3]).topology
            Topology(num_ranks=3, num_nodes=2)
        """
        stay = staying_ranks(ranks, np.full(self.topology.num_ranks, self.slots_per_rank), self.num_experts)
        _, node = np.unique(self.topology.rank_to_node[stay], return_inverse=True)
        smaller = Topology(rank_to_node=node.astype(np.int64), rank_speed=self.topology.rank_speed[stay])
        return self.resized(smaller, np.flatnonzero(stay))

    def diff(self, other: ExpertLayout) -> LayoutDiff:
        """Say which slots change from this layout to `other` (same shape and experts)."""
        self.check_same_frame(other)
        layer, slot = np.nonzero(self._p2l != other._p2l)
        return LayoutDiff(layer, slot, self._p2l[layer, slot], other._p2l[layer, slot])

    def check_same_frame(self, other: ExpertLayout) -> None:
        """Raise ValueError unless `other` has the same L, P, E and topology, so that rows may be compared."""
        check_kind(other, "other", ExpertLayout)
        alike = self.topology.num_ranks == other.topology.num_ranks
        pad = "give each rank as many slots, -1 for empty ones" if alike else "bring one to the other's by `resized`"
        for word, mine, theirs, mend in (
            ("layers", self.num_layers, other.num_layers, "they are of two models"),
            ("slots", self.num_slots, other.num_slots, pad),
            ("experts", self.num_experts, other.num_experts, "they are of two models"),
        ):
            if mine != theirs:
                raise ValueError(f"layouts differ in {word}: {mine} and {theirs}; {mend}")
        if self.topology != other.topology:
            both = f"{self.topology} and {other.topology}"
            raise ValueError(f"layouts differ in topology: {both}; bring one to the other's by `resized`")

    # ---- equality and text ---------------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ExpertLayout):
            return NotImplemented
        return self is other or (
            self.num_experts == other.num_experts
            and self.topology == other.topology
            and bool(np.array_equal(self._p2l, other._p2l))
        )

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._p2l, self.num_experts, self.topology)

    def __repr__(self) -> str:
        return (
            f"ExpertLayout(num_layers={self.num_layers}, num_experts={self.num_experts}, num_slots={self.num_slots}, "
            f"topology={self.topology}, digest={self.digest[:12]})"
        )

    def format(self, layers: ArrayLike | None = None, *, width: int = 120) -> str:
        """Return text: a line per layer, `|` between ranks, `-` for empty slots; cut at `width` unless that is 0."""
        check_int(width, "width", 0)
        rows = np.arange(self.num_layers) if layers is None else layer_rows(layers, self.num_layers)
        lines = []
        for layer in rows.tolist():
            by_rank = self._p2l[layer].reshape(self.topology.num_ranks, -1).tolist()
            line = f"layer {layer}: " + " | ".join(
                " ".join(str(expert) if expert >= 0 else "-" for expert in rank) for rank in by_rank
            )
            lines.append(line if not width or len(line) <= width else line[: width - 4] + " ...")
        return "\n".join(lines)

    def _columns(self) -> Columns:
        layer, slot = np.divmod(np.arange(self._p2l.size), max(self.num_slots, 1))
        rank = slot // max(self.slots_per_rank, 1)
        node = self.topology.rank_to_node[rank]
        return {"layer": layer, "slot": slot, "rank": rank, "node": node, "expert": self._p2l.ravel()}

    def _repr_html_(self) -> str:
        return _html(self)

    def __str__(self) -> str:
        return self.format(np.arange(min(self.num_layers, 8))) + (
            f"\n... {self.num_layers - 8} more layers" if self.num_layers > 8 else ""
        )


def _rebuild(p2l: IntArray, num_experts: int, topology: Topology) -> ExpertLayout:
    return ExpertLayout(p2l, num_experts, topology=topology)


# ---- arithmetic of maps ----------------------------------------------------------------------------------------------


def check_num_slots(num_slots: int, num_experts: int) -> int:
    """Check a number of slots to fill: at least one for each expert."""
    slots = check_int(num_slots, "num_slots", 1)
    if slots < num_experts:
        raise ValueError(
            f"`num_slots` (={slots}) must be at least `num_experts` (={num_experts}); use {num_experts} or more"
        )
    if slots > MAX_SLOTS:
        raise ValueError(f"`num_slots` (={quoted(slots, 40)}) must be at most {MAX_SLOTS}")
    return slots


def rank_capacity(num_slots: int, num_ranks: int) -> IntArray:
    """Return the number of slots that each rank fills, int64 `[R]`: equal, or one less on the last ranks."""
    return num_slots // num_ranks + (np.arange(num_ranks, dtype=np.int64) < num_slots % num_ranks)


def rank_slots(num_slots: int | None, slots_per_rank: ArrayLike | None, num_experts: int, num_ranks: int) -> IntArray:
    """Check the one that is given of a number of slots and the slots of each rank; return those of each, `[R]`."""
    if (num_slots is None) == (slots_per_rank is None):
        raise ValueError(
            f"`num_slots` (={quoted(num_slots, 40)}) and `slots_per_rank` (={quoted(slots_per_rank, 40)}): give one of "
            "the two; `slots_per_rank` is for ranks that differ"
        )
    if slots_per_rank is None:
        return rank_capacity(check_num_slots(check_int(num_slots, "num_slots", 1), num_experts), num_ranks)
    slots = to_ids(slots_per_rank, "slots_per_rank")
    if slots.shape != (num_ranks,):
        raise ValueError(f"`slots_per_rank` (shape {list(slots.shape)}) must be ints [{num_ranks}], one for each rank")
    bad = (slots < 1) | (slots > MAX_SLOTS // num_ranks)
    if bad.any():
        rank = int(np.argmax(bad))
        raise ValueError(
            f"`slots_per_rank` (={slots[rank]}) must be from 1 to {MAX_SLOTS // num_ranks} at rank {rank}; a rank that "
            "takes no experts is one that is not active"
        )
    if slots.sum() < num_experts:
        raise ValueError(
            f"`slots_per_rank` (={slots.sum()} in all) must hold the {num_experts} experts; give ranks more slots"
        )
    return slots


def min_redundant(num_experts: int, num_ranks: int) -> int:
    """Return the fewest redundant experts with which every rank has as many slots: -E mod R.

    Engines often need that; layouts do not (`place` leaves slots empty where R does not divide `num_slots`).

    Example:
        >>> min_redundant(256, 3), min_redundant(30, 8), min_redundant(256, 32)
        (2, 2, 0)
    """
    return -check_int(num_experts, "num_experts", 1) % check_int(num_ranks, "num_ranks", 1)


def check_frame(layout: ExpertLayout, name: str, num_layers: int, num_experts: int, topology: Topology) -> ExpertLayout:
    """Raise ValueError unless the layout has a load's layers and experts and this topology."""
    check_kind(layout, name, ExpertLayout)
    if (layout.num_layers, layout.num_experts, layout.topology) != (num_layers, num_experts, topology):
        raise ValueError(
            f"`{name}` ({layout!r}) must have the load's {num_layers} layers and {num_experts} experts, and {topology}"
        )
    return layout


def layer_rows(layers: ArrayLike, num_layers: int, name: str = "layers") -> IntArray:
    """Rows from ints in `[0, L)` or bools `[L]`, as int64 `[n]` in the order given; ranks are chosen the same way."""
    array = to_numpy(layers, name)
    if array.dtype == np.bool_:
        if array.shape != (num_layers,):
            raise ValueError(f"`{name}` (shape {list(array.shape)}) must be bools [{num_layers}] or ints")
        return np.flatnonzero(array).astype(np.int64)
    rows = to_ids(array, name).reshape(-1)
    bad = (rows < 0) | (rows >= num_layers)
    if bad.any():
        raise IndexError(f"`{name}` (={rows[np.argmax(bad)]}) must be in [0, {num_layers})")
    return rows


def staying_ranks(leaving: ArrayLike, capacity: IntArray, num_experts: int) -> BoolArray:
    """Ranks that are left without `leaving` (ints or bools), bools `[R]`; they must have a slot for every expert."""
    stay = np.ones(len(capacity), dtype=np.bool_)
    stay[layer_rows(leaving, len(capacity), "ranks")] = False
    live = int(capacity[stay].sum())
    if live < num_experts:
        enough = int(np.searchsorted(np.cumsum(np.sort(capacity)), num_experts)) + 1  # whichever they are
        raise InfeasiblePlacementError(
            f"`ranks` ({int((~stay).sum())} of {len(stay)}) leave {int(stay.sum())} ranks with {live} slots, "
            f"fewer than the {num_experts} experts; keep {enough} ranks or more, or add slots",
            num_live_slots=live,
            num_experts=num_experts,
        )
    return stay


def count_replicas(p2l: IntArray, num_experts: int) -> IntArray:
    """Count the slots of each expert, int64 `[L, E]`; ids must be in [-1, E)."""
    layers = p2l.shape[0]
    # One histogram over (layer, expert), with a bin per layer for the empty slots.
    bins = (p2l + 1) + np.arange(layers, dtype=np.int64)[:, None] * (num_experts + 1)
    counts = np.bincount(bins.reshape(-1), minlength=layers * (num_experts + 1))
    return np.ascontiguousarray(counts.reshape(layers, num_experts + 1)[:, 1:])


def invert(p2l: IntArray, num_experts: int) -> IntArray:
    """List all slots of each expert, int64 `[L, E, K]`, ascending, padded with -1."""
    layers, slots = p2l.shape
    counts = count_replicas(p2l, num_experts)
    l2p = np.full((layers, num_experts, int(counts.max(initial=1))), -1, dtype=np.int64)
    key = p2l.astype(np.int16) if num_experts < 2**15 else p2l  # a stable sort of int16 is a radix sort
    order = np.argsort(key, axis=1, kind="stable")
    layer = np.repeat(np.arange(layers), slots)
    expert = np.take_along_axis(p2l, order, axis=1)
    # Place within the sorted row, less the place where this expert's run starts (empty slots sort first).
    starts = np.cumsum(counts, axis=1) - counts + (slots - counts.sum(axis=1))[:, None]
    held = (expert >= 0).reshape(-1)
    replica = np.arange(slots) - np.take_along_axis(starts, np.maximum(expert, 0), axis=1)
    l2p[layer[held], expert.reshape(-1)[held], replica.reshape(-1)[held]] = order.reshape(-1)[held]
    return l2p


def check_map(p2l: IntArray, num_experts: int, topology: Topology) -> None:
    """Raise unless `[L, P]` is a valid layout: ids in [-1, E), every expert on every layer, R divides P."""
    layers, slots = p2l.shape
    if slots % topology.num_ranks or slots == 0:
        raise ValueError(
            f"`physical_to_logical_map` ({slots} slots) must have as many, one or more, on each of "
            f"{topology.num_ranks} ranks; pad shorter ranks with -1"
        )
    if p2l.size and (p2l.min() < -1 or p2l.max() >= num_experts):
        bad = np.argwhere((p2l < -1) | (p2l >= num_experts))
        layer, slot = (int(i) for i in bad[0])
        raise LayoutError(
            f"`physical_to_logical_map` (={p2l[layer, slot]}) must be in [-1, {num_experts}) "
            f"at layer {layer}, slot {slot}{f'; {len(bad) - 1} more' if len(bad) > 1 else ''}; -1 marks an empty slot",
            layer=layer,
            slot=slot,
        )
    if num_experts > slots and layers * num_experts > MAX_SLOTS:  # before anything as long as E is allocated
        absent = int(np.argmin(np.isin(np.arange(slots + 1), p2l[0])))
        raise MissingExpertError(
            f"expert {absent} has no slot at layer 0: `num_experts` (={num_experts}) must be at most the {slots} slots",
            layer=0,
            expert=absent,
        )
    counts = count_replicas(p2l, num_experts)
    if layers and counts.min() == 0:
        missing = np.argwhere(counts == 0)
        layer, expert = (int(i) for i in missing[0])
        raise MissingExpertError(
            f"expert {expert} has no slot at layer {layer}{f'; {len(missing) - 1} more' if len(missing) > 1 else ''}; "
            "every layer must hold every logical expert once or more",
            layer=layer,
            expert=expert,
        )


_CELLS = 400
_CELL = "padding:1px 4px;text-align:center;border:1px solid #ccc;font:11px monospace;white-space:nowrap"


def _html(layout: ExpertLayout) -> str:
    """What the layout is, and what the slots of its first layers hold: replicas shaded, pairs on a rank red."""
    topology, size = layout.topology, layout.slots_per_rank
    facts = (
        f"<b>ExpertLayout</b>: {layout.num_layers} layers, {layout.num_experts} experts in {layout.num_slots} slots, "
        f"{topology.num_ranks} ranks of {size} slots, {topology.num_nodes} node{'s' * (topology.num_nodes > 1)}; "
        f"digest <code>{layout.digest[:12]}</code>"
    )
    if not layout.num_layers:
        return f"<div>{facts}</div>"
    ranks = min(topology.num_ranks, max(1, _CELLS // (HTML_LAYERS * size)))
    head = "".join(
        f'<th colspan="{size}" style="{_CELL};border-left:2px solid #000">rank {r}</th>' for r in range(ranks)
    )
    rows = []
    for layer in range(min(layout.num_layers, HTML_LAYERS)):
        row, count = layout.physical_to_logical_map[layer], layout.replica_count[layer]
        cells = []
        for slot in range(ranks * size):
            expert = int(row[slot])
            mine = row[slot // size * size : slot // size * size + size]
            shade = "#fff"
            if expert >= 0 and int((mine == expert).sum()) > 1:
                shade = "#f88"
            elif expert >= 0 and count[expert] > 1:
                shade = "#ccc" if count[expert] == 2 else "#aaa"
            edge = ";border-left:2px solid #000" if slot % size == 0 else ""
            cells.append(
                f'<td style="{_CELL}{edge};background:{shade};color:#000">{expert if expert >= 0 else "-"}</td>'
            )
        rows.append(f'<tr><th style="{_CELL}">layer {layer}</th>{"".join(cells)}</tr>')
    left_out = [
        f"{count - shown} more {word}"
        for word, count, shown in (("layers", layout.num_layers, HTML_LAYERS), ("ranks", topology.num_ranks, ranks))
        if count > shown
    ]
    more = f"<div>{', '.join(left_out)}</div>" if left_out else ""
    table = f'<table style="border-collapse:collapse"><tr><th></th>{head}</tr>{"".join(rows)}</table>'
    return f'<div style="overflow-x:auto">{facts}{table}{more}</div>'
