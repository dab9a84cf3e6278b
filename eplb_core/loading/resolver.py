"""Find the rows of an engine's weight tensors that a checkpoint expert fills.

The answer comes from the layout alone, never from a table that dispatch uses: such a table leaves replicas out on
purpose, while loading fills a second replica on the same rank like the first.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

import numpy as np

from eplb_core._arrays import IntArray, check_id, check_int, check_kind, check_word, to_ids, to_list
from eplb_core._text import quoted
from eplb_core.layout import ExpertLayout

Rows = tuple[int, ...]


@dataclass(frozen=True, eq=False, repr=False)  # with slots, an attribute that is no field raises an odd TypeError
class SlotResolver:
    """Find, for one rank, the rows that hold an expert: `local_slots` of its own tensors, `global_slots` of whole ones.

    Rows of a rank's own tensors: `0..S-1` are its slots in the layout, then come the fused shared experts, if any.
    Expert `E + j` is shared expert `j`; it is on every rank, at row `S + j`, and no range filter ever drops it.
    A layout does not change, so neither does a resolver: after moves take another one, `with_layout(migrator.layout)`.

    Args:
        layout: What each slot holds, `[L, P]`.
        rank: EP rank whose tensors are loaded, `0 <= rank < R`.
        layer_ids: The model's layer id of each row of the layout, `[L]`, distinct, 0 or more; default: the row itself.
            With dense layers in between, `[3, 4, ..., 60]`.
        draft_layers: Layer ids beyond the map that are served too: slot `e` holds expert `e` there, for `e < E`, and
            whole tensors have it in rows `e, e + E, ...`. A draft model with other counts has a layout of its own.
        num_shared: Shared experts F that are fused into the tensors as further rows.
        shared: How whole tensors number shared rows after the P routed ones. `"per_rank"`: one for each rank's copy,
            row `P + rank * F + j`; `"global"`: one for all, row `P + j`.

    Raises:
        IndexError: `rank` is out of range, negative too.
        ValueError: `layer_ids` or `draft_layers` have the wrong number of ids, or name a layer twice.

    Cost:
        Building: some microseconds. The first call of a layer inverts its row, O(E + S) for `local_slots` and
        O(E + P) for `global_slots`; each later one is two look-ups in dictionaries.

    Threads:
        Any number may share one: nothing changes but tables whose content is the same whoever fills them.

    Example:
        >>> from eplb_core import ExpertLayout, Topology
        >>> layout = ExpertLayout([[0, 1, 2, 3, 3, 0]], num_experts=4, topology=Topology(num_ranks=2))
        >>> resolver = SlotResolver(layout, 1, num_shared=1)
        >>> resolver.local_slots(0, 3), resolver.local_slots(0, 1), resolver.local_slots(0, 4)
        ((0, 1), (), (3,))
        >>> resolver.global_slots(0, 3)
        (3, 4)
    """

    layout: ExpertLayout
    """What each slot holds."""
    rank: int
    """EP rank whose tensors are loaded."""
    layer_ids: Iterable[int] | None = field(default=None, kw_only=True)
    """The model's layer id of each row of the layout."""
    draft_layers: Iterable[int] = field(default=(), kw_only=True)
    """Layer ids beyond the map."""
    num_shared: int = field(default=0, kw_only=True)
    """Fused shared experts F."""
    shared: Literal["per_rank", "global"] = field(default="per_rank", kw_only=True)
    """How whole tensors number shared rows."""
    _row_of_layer: dict[int, int] = field(init=False)
    _local: dict[int, dict[int, Rows]] = field(init=False)
    _global: dict[int, dict[int, Rows]] = field(init=False)
    _no_rows: dict[int, Rows] = field(init=False)
    _single: list[Rows] = field(init=False)

    def __post_init__(self) -> None:
        layout = check_kind(self.layout, "layout", ExpertLayout)
        rank = check_id(self.rank, "rank", layout.topology.num_ranks)
        check_word(self.shared, "shared", ("per_rank", "global"))
        ids = range(layout.num_layers) if self.layer_ids is None else _ids(self.layer_ids, "layer_ids")
        if len(ids) != layout.num_layers:
            raise ValueError(
                f"`layer_ids` has {len(ids)} ids and the layout {layout.num_layers} layers; name each layer"
            )
        draft = _ids(self.draft_layers, "draft_layers")
        row_of_layer = {layer: row for row, layer in enumerate(ids)} | dict.fromkeys(draft, -1)
        if len(row_of_layer) < len(ids) + len(draft):
            named = [*ids, *draft]
            twice = next(layer for layer in named if named.count(layer) > 1)
            raise ValueError(f"layer {twice} is named twice by `layer_ids` and `draft_layers`; name each layer once")
        if row_of_layer and min(row_of_layer) < 0:
            raise ValueError(f"`layer_ids` and `draft_layers` (={min(row_of_layer)}) must not be negative")
        for name, value in {
            "rank": rank,
            "layer_ids": tuple(ids),
            "draft_layers": tuple(draft),
            "num_shared": check_int(self.num_shared, "num_shared", 0),
            "_row_of_layer": row_of_layer,
            "_local": {},
            "_global": {},
            # Shared by all layers' tables: what a layer allocates is a dictionary and its few longer tuples.
            "_single": [(slot,) for slot in range(layout.num_slots)],
            "_no_rows": dict.fromkeys(range(layout.num_experts), ()),
        }.items():
            object.__setattr__(self, name, value)

    def __getstate__(self) -> dict[str, object]:
        computed = {each.name for each in fields(self) if not each.init}
        return {name: value for name, value in vars(self).items() if name not in computed}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self.__post_init__()

    def __repr__(self) -> str:
        return f"SlotResolver({self.layout!r}, rank={self.rank}, num_shared={self.num_shared}, shared={self.shared!r})"

    # ---- the two questions ---------------------------------------------------------------------------------------

    # Keys rather than list indices: a dictionary has no "last" row for a negative id to fall on, and a layer id need
    # be no row number. Both methods are written out, since another call would be much of their time.

    def local_slots(self, layer: int, expert: int) -> Rows:
        """Rows of this rank's tensors that hold `expert` on `layer`, ascending; empty where it holds none.

        Args:
            layer: Layer id, or row of the layout where no `layer_ids` were given.
            expert: Logical expert, `0..E-1`; `E + j` is shared expert j.

        Raises:
            IndexError: No such layer or expert; negative ones too.
        """
        try:
            return self._local[layer][expert]
        except (KeyError, TypeError):
            pass
        return self._look_up(self._local, layer, expert)

    def global_slots(self, layer: int, expert: int) -> Rows:
        """Rows of tensors that every rank keeps whole that hold `expert` on `layer`, ascending; the same on every rank.

        Args:
            layer: Layer id, or row of the layout where no `layer_ids` were given.
            expert: Logical expert, `0..E-1`; `E + j` is shared expert j.

        Raises:
            IndexError: No such layer or expert; negative ones too.
        """
        try:
            return self._global[layer][expert]
        except (KeyError, TypeError):
            pass
        return self._look_up(self._global, layer, expert)

    def local_experts(self, layer: int) -> Rows:
        """Expert of each of this rank's S slots, -1 = empty: which rows of a fused `[E, ...]` tensor to take.

        Raises:
            IndexError: No such layer.
        """
        start = self.rank * self.layout.slots_per_rank
        return tuple(self._experts(self._row(layer))[start : start + self.layout.slots_per_rank].tolist())

    @property
    def layers(self) -> Rows:
        """Layer ids in order of the layout's rows, then draft layers."""
        return tuple(self._row_of_layer)

    def row(self, layer: int) -> int | None:
        """Row of the layout for a layer id; None for a draft layer.

        Raises:
            IndexError: No such layer.
        """
        row = self._row(layer)
        return row if row >= 0 else None

    def with_layout(self, layout: ExpertLayout) -> SlotResolver:
        """Make a resolver of another layout for the same rank and layers, as a reload after moves needs it."""
        other = object.__new__(type(self))  # whatever arguments a subclass's constructor takes
        other.__setstate__({**self.__getstate__(), "layout": layout})
        return other

    # ---- tables --------------------------------------------------------------------------------------------------

    def _row(self, layer: int) -> int:
        row = self._row_of_layer.get(_index(layer, "layer"))
        if row is None:
            ids = self.layers
            span = f"one of the {len(ids)} layers {ids[0]}..{ids[-1]}" if ids else "a layer, and the layout has none"
            raise IndexError(
                f"`layer` (={quoted(int(layer), 40)}) must be {span}; name layers beyond the map in `draft_layers`"
            )
        return row

    def _experts(self, row: int) -> IntArray:
        """Expert of each global slot of a row; row -1 = a draft layer."""
        if row >= 0:
            held: IntArray = self.layout.physical_to_logical_map[row]
            return held
        slots = np.arange(self.layout.num_slots, dtype=np.int64)
        return np.where(slots < self.layout.num_experts, slots, -1)

    def _look_up(self, tables: dict[int, dict[int, Rows]], layer: int, expert: int) -> Rows:
        """The slow path: an id that is no plain int, a layer's first call, or an id that does not exist."""
        layer, expert = _index(layer, "layer"), _index(expert, "expert")
        row = self._row(layer)
        if layer not in tables:
            tables[layer] = self._local_table(layer) if tables is self._local else self._global_table(row)
        rows = tables[layer].get(expert)
        if rows is None:
            shared = f" + {self.num_shared} shared" if self.num_shared else ""
            raise IndexError(f"`expert` (={quoted(expert, 40)}) must be in [0, {self.layout.num_experts}{shared})")
        return rows

    def _local_table(self, layer: int) -> dict[int, Rows]:
        layout = self.layout
        table = _rows_by_expert(self.local_experts(layer), self._no_rows, self._single)
        for j in range(self.num_shared):
            table[layout.num_experts + j] = (layout.slots_per_rank + j,)
        return table

    def _global_table(self, row: int) -> dict[int, Rows]:
        layout = self.layout
        experts, slots, shared = layout.num_experts, layout.num_slots, self.num_shared
        copies = layout.topology.num_ranks if self.shared == "per_rank" else 1
        if row < 0:
            table: dict[int, Rows] = {expert: tuple(range(expert, slots, experts)) for expert in range(experts)}
        else:
            table = _rows_by_expert(self._experts(row).tolist(), self._no_rows, self._single)
        for j in range(shared):
            table[experts + j] = tuple(slots + copy * shared + j for copy in range(copies))
        return table


def _rows_by_expert(held: Sequence[int], no_rows: dict[int, Rows], single: list[Rows]) -> dict[int, Rows]:
    """Every row of each expert, ascending; -1 in `held` belongs to nobody; `single[row]` is `(row,)`."""
    table = no_rows.copy()
    table.update(zip(held, single, strict=False))  # leaves each expert its last row ...
    earlier: dict[int, list[int]] = {}
    for row, expert in enumerate(held):
        if table[expert] is not single[row]:
            earlier.setdefault(expert, []).append(row)
    for expert, rows in earlier.items():  # ... and few experts have others
        table[expert] = (*rows, *table[expert])
    table.pop(-1, None)
    return table


def _ids(value: Iterable[int], name: str) -> list[int]:
    array = to_ids(to_list(value, name), name)
    if array.ndim != 1:
        raise ValueError(f"`{name}` (shape {list(array.shape)}) must be a list of ids")
    ids: list[int] = array.tolist()
    return ids


def _index(value: int, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError as error:
        raise TypeError(f"`{name}` (={type(value).__name__}) must be an integer") from error
