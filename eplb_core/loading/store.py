"""The tensors of one layer that are indexed by slot, which load, move and are verified together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from eplb_core._arrays import IntArray, check_id, check_int, check_kind, read_only
from eplb_core._text import quoted
from eplb_core.layout import ExpertLayout
from eplb_core.loading.pull_plan import check_slots_exist
from eplb_core.loading.slot_tensors import Memory, Wanted, find_slot_tensors, sort_tensors


@dataclass(slots=True, eq=False, repr=False, init=False)
class ExpertStore:
    """Hold all tensors that one layer keeps by slot on this rank: weights, scales, zero points, biases.

    A slot is moved whole or not at all, so every tensor that is indexed by slot belongs in here. Build it after the
    engine's post-processing, which replaces tensors: a store holds addresses. A row's bytes must depend on its expert
    alone, not on the rank or on its neighbours; `verify_weights` proves it where experts have replicas.

    Args:
        tensors: By name, a tensor `[S, ...]` or a list of S tensors of one shape; any dtype. Each row must be one span
            of bytes without holes: inner dimensions may be permuted, rows may be apart from each other. Names and their
            order must be the same on every layer and rank. A rank with fewer slots than others
            (`place(slots_per_rank=)`) has rows for its own alone.
        whole: By name, tensors `[P, ...]` that every rank keeps whole, one row for each slot of all ranks. Installs
            permute them on every rank.

    Raises:
        ValueError: Another number of rows, rows with holes, rows that overlap or repeat each other (an expanded tensor
            has stride 0), no bytes, different devices; the text names the tensor.
        TypeError: Not a tensor, or not a list of tensors.

    Cost:
        Some microseconds per tensor. Holds views, copies nothing.

    Threads:
        Any; nothing changes after construction.

    Example:
        >>> tensors = {"w13": torch.zeros(3, 8, 4), "w13_scale": torch.ones(3, 2)}
        >>> store = ExpertStore(tensors, whole={"alpha": torch.ones(6)})
        >>> store.names, store.num_slots, store.slot_bytes
        (('w13', 'w13_scale'), 3, 136)
        >>> store.row("w13_scale", 2).numpy().tolist()
        [0, 0, 128, 63, 0, 0, 128, 63]
    """

    device: torch.device
    """Where all of the tensors are."""
    addresses: IntArray
    """First byte of each row, int64 `[S, tensors]`, read-only."""
    row_bytes: IntArray
    """Bytes of one row of each tensor, int64 `[tensors]`, read-only."""
    whole_addresses: IntArray
    """First byte of each row of the whole tensors, int64 `[P, whole tensors]`, read-only; P = 0 without any."""
    whole_row_bytes: IntArray
    """Bytes of one row of each whole tensor, int64 `[whole tensors]`, read-only."""
    _typed: dict[str, tuple[torch.Tensor, ...]]
    _rows: dict[str, tuple[torch.Tensor, ...]]
    _whole_rows: dict[str, tuple[torch.Tensor, ...]]

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
        whole: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        given: dict[str, object] = {"tensors": tensors, "whole": {} if whole is None else whole}
        for argument, value in given.items():
            if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
                raise TypeError(f"`{argument}` (={type(value).__name__}) must be a dict of tensors by name")
        if not tensors:
            raise ValueError("`tensors` must hold at least one tensor that is indexed by slot")
        whole = whole or {}
        twice = [name for name in whole if name in tensors]
        if twice:
            raise ValueError(f"`whole` names {twice[0]!r}, which `tensors` has too; a tensor is one or the other")
        self._typed = {name: _rows_of(name, value) for name, value in (*tensors.items(), *whole.items())}
        self._rows, self._whole_rows = _byte_rows(self._typed, tensors), _byte_rows(self._typed, whole)
        _check_lengths("slots", self._rows)
        _check_lengths("rows", self._whole_rows)
        for name, rows in self._whole_rows.items():
            if len(rows) < self.num_slots:
                raise ValueError(
                    f"`whole` tensor {name!r} has {len(rows)} rows and this rank alone {self.num_slots} slots; it must "
                    "have one row for each slot of all ranks"
                )
        self.device = self._typed[self.names[0]][0].device
        for name, views in self._typed.items():
            if views[0].device != self.device:  # pragma: no cover  needs two devices
                raise ValueError(
                    f"tensor {name!r} is on {views[0].device} and {self.names[0]!r} on {self.device}; "
                    "all tensors of a layer must be on one device"
                )
        self.addresses, self.row_bytes = _table(self._rows)
        self.whole_addresses, self.whole_row_bytes = _table(self._whole_rows)
        self._check_overlaps()

    @classmethod
    def of_module(
        cls,
        module: torch.nn.Module,
        slots_per_rank: int,
        *,
        num_slots: int | None = None,
        num_shared: int = 0,
        by_slot: Iterable[str] = (),
        whole: Iterable[str] = (),
        ignore: Iterable[str] = (),
    ) -> ExpertStore:
        """Collect every slot-indexed tensor of a module, wherever it is kept; refuse what may be one or not.

        Found: parameters, buffers and attributes; what lists, dicts, tuples, dataclasses and other objects hold, such
        as a quantization method; what closures, hooks and slots of classes hold. A view of what was found is no tensor
        of its own. A length that fits is no proof, since a router has a row for each expert: tensors of three
        dimensions or more are taken, and those of one or two only if their name begins with that of such a tensor
        (`w13_bias` beside `w13_weight`) or the caller names them.

        Args:
            module: One layer's experts, after post-processing.
            slots_per_rank: Slots S.
            num_slots: Slots P of all ranks; with it, tensors of P rows are taken as whole ones.
            num_shared: Fused shared experts, whose rows come after the S (or P) routed ones and are left out.
            by_slot: Names, or patterns such as `"*_scale"`, of tensors that are indexed by slot.
            whole: Names, or patterns, of tensors that every rank keeps whole.
            ignore: Names, or patterns such as `"gate.*"`, of what is not indexed by slot: tensors, or objects that hold
                them.

        Raises:
            ValueError: A tensor may be indexed by slot or not, or its first dimension is neither S nor P, and none of
                the arguments names it; the text says which argument would settle it. Or `ExpertStore` refuses it.
        """
        wanted = Wanted.of(slots_per_rank, num_slots, num_shared, by_slot, whole, ignore)
        return cls(*find_slot_tensors(module, wanted))

    def check_covers(
        self,
        module: torch.nn.Module,
        *,
        num_slots: int | None = None,
        num_shared: int = 0,
        ignore: Iterable[str] = (),
    ) -> None:
        """Raise ValueError if the module has a tensor that may be indexed by slot and this store lacks.

        Arguments as `of_module`; what the store holds needs no other name.
        """
        wanted = Wanted.of(self.num_slots, num_slots, num_shared, (), (), ignore)
        memory = Memory()
        for starts, sizes in ((self.addresses, self.row_bytes), (self.whole_addresses, self.whole_row_bytes)):
            for column, size in zip(starts.T, sizes.tolist(), strict=True):
                memory.add(column, size)
        certain, doubtful = sort_tensors(module, wanted, memory)
        lacking = [each.held.name for each in (*certain, *doubtful) if each.kind]
        if lacking:
            raise ValueError(
                f"the store lacks {lacking[0]!r}, which the module keeps by slot{_more(lacking)}; it would stay behind "
                "when its slot moves: add it, or name it in `ignore`"
            )
        if doubtful:
            raise wanted.refusal(doubtful)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors, in the order of `addresses`' columns."""
        return tuple(self._rows)

    @property
    def whole_names(self) -> tuple[str, ...]:
        """Names of the tensors that every rank keeps whole."""
        return tuple(self._whole_rows)

    @property
    def num_slots(self) -> int:
        """Slots S of this rank."""
        return len(next(iter(self._rows.values())))

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all tensors: what a transfer sends."""
        return int(self.row_bytes.sum())

    def row(self, name: str, slot: int) -> torch.Tensor:
        """The bytes of one row, uint8 `[row bytes]`, a view; of a whole tensor, `slot` is global.

        Raises:
            KeyError: No tensor of that name.
            IndexError: `slot` is out of range; negative too.
        """
        word: object = name
        rows = (self._rows.get(word) or self._whole_rows.get(word)) if isinstance(word, str) else None
        if rows is None:
            raise KeyError(f"`name` (={quoted(name, 80)}) must be one of {', '.join((*self.names, *self.whole_names))}")
        if not 0 <= check_int(slot, "slot", -(2**63)) < len(rows):
            raise IndexError(f"`slot` (={quoted(slot, 40)}) must be in [0, {len(rows)}) of tensor {name!r}")
        return rows[slot]

    def tensor_row(self, name: str, slot: int) -> torch.Tensor:
        """One row with its dtype and shape, a view: what a loader writes into; arguments and errors as `row`."""
        self.row(name, slot)
        return self._typed[name][slot]

    def check_fits(self, layout: ExpertLayout, *, rank: int | None = None) -> None:
        """Raise ValueError unless the layout has this store's slots: counts come from the map alone.

        Args:
            layout: What the slots hold.
            rank: Whose store it is. It may then have fewer rows than S: the slots beyond them must be -1.
        """
        check_kind(layout, "layout", ExpertLayout)
        size = layout.slots_per_rank
        if self.num_slots > size or (rank is None and self.num_slots < size):
            raise ValueError(
                f"tensor {self.names[0]!r} has {self.num_slots} slots and the layout {size} per rank; "
                "allocate by `layout.slots_per_rank`"
            )
        if rank is not None:
            check_id(rank, "rank", layout.topology.num_ranks)
            check_slots_exist(layout, rank, self.num_slots)
        if self.whole_names and len(self.whole_addresses) != layout.num_slots:
            raise ValueError(
                f"whole tensor {self.whole_names[0]!r} has {len(self.whole_addresses)} rows and the layout "
                f"{layout.num_slots} slots; allocate by `layout.num_slots`"
            )

    def __repr__(self) -> str:
        return (
            f"ExpertStore({', '.join(self.names)}: {self.num_slots} slots of {self.slot_bytes} bytes on {self.device})"
        )

    def _check_overlaps(self) -> None:
        """Two names for the same bytes would move them twice, and a repeated row would be two slots in one."""
        start = np.concatenate([self.addresses.reshape(-1), self.whole_addresses.reshape(-1)])
        size = np.concatenate(
            [np.tile(self.row_bytes, self.num_slots), np.tile(self.whole_row_bytes, len(self.whole_addresses))]
        )
        order = np.argsort(start, kind="stable")
        bad = np.flatnonzero(start[order][:-1] + size[order][:-1] > start[order][1:])
        if len(bad):
            first, second = (self._place(int(order[i])) for i in (bad[0], bad[0] + 1))
            raise ValueError(
                f"{first} and {second} share bytes{f'; {len(bad) - 1} more' if len(bad) > 1 else ''}; "
                "give each slot memory of its own, and each tensor one name"
            )

    def _place(self, index: int) -> str:
        if index < self.addresses.size:
            slot, tensor = divmod(index, len(self.names))
            return f"tensor {self.names[tensor]!r} slot {slot}"
        row, tensor = divmod(index - self.addresses.size, len(self.whole_names))
        return f"whole tensor {self.whole_names[tensor]!r} row {row}"


def check_stores(stores: Sequence[ExpertStore]) -> None:
    """Raise ValueError unless all layers have the same tensors, in the same order, for the same slots."""
    for layer, store in enumerate(stores):
        if not isinstance(store, ExpertStore):
            raise TypeError(f"`stores` (={type(store).__name__}) must be ExpertStores at layer {layer}")
        first = stores[0]
        lacking = [name for name in first.names + first.whole_names if name not in store.names + store.whole_names]
        if lacking:
            raise ValueError(f"the store of layer {layer} lacks {lacking[0]!r}, which layer 0 has{_more(lacking)}")
        if (store.names, store.whole_names) != (first.names, first.whole_names):
            raise ValueError(
                f"the store of layer {layer} has tensors {', '.join(store.names + store.whole_names)} and layer 0 has "
                f"{', '.join(first.names + first.whole_names)}; name the same ones in the same order"
            )
        if store.num_slots != first.num_slots or store.device != first.device:
            raise ValueError(
                f"the store of layer {layer} has {store.num_slots} slots on {store.device} and layer 0 has "
                f"{first.num_slots} on {first.device}"
            )


def _more(names: Sequence[str]) -> str:
    return f" ({len(names) - 1} more)" if len(names) > 1 else ""


def _rows_of(name: str, value: torch.Tensor | Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Each row as a view; refuses rows that repeat each other or differ in kind."""
    if isinstance(value, torch.Tensor):
        if value.dim() == 0:
            raise ValueError(f"tensor {name!r} (shape []) must have a row for each slot")
        rows = list(value.detach().unbind(0))
        if len(rows) > 1 and value.stride(0) == 0:
            raise ValueError(
                f"tensor {name!r} repeats one row (stride 0), which all slots share: leave it out "
                "(`ignore`), or give the tensor that it was expanded from"
            )
    elif isinstance(value, list | tuple) and value and all(isinstance(row, torch.Tensor) for row in value):
        rows = [row.detach() for row in value]
        first = rows[0]
        for slot, row in enumerate(rows):
            if (row.shape, row.dtype) != (first.shape, first.dtype):
                raise ValueError(
                    f"tensor {name!r} is {row.dtype} {list(row.shape)} at slot {slot} and {first.dtype} "
                    f"{list(first.shape)} at slot 0; all slots must be alike"
                )
    else:
        kind = type(value).__name__
        raise TypeError(f"tensor {name!r} (={kind}) must be a tensor or a list, as all in `tensors` and `whole`")
    if not rows or rows[0].numel() == 0:
        raise ValueError(f"tensor {name!r} holds no bytes; leave it out")
    if rows[0].device.type == "meta":
        raise ValueError(f"tensor {name!r} is on the meta device; build the store after the weights are allocated")
    return tuple(rows)


def _byte_rows(
    typed: Mapping[str, Sequence[torch.Tensor]], names: Iterable[str]
) -> dict[str, tuple[torch.Tensor, ...]]:
    """Each row as a view uint8 `[row bytes]`, in order of memory; refuses rows that are not one span."""
    return {name: tuple(_byte_row(name, slot, row) for slot, row in enumerate(typed[name])) for name in names}


def _byte_row(name: str, slot: int, row: torch.Tensor) -> torch.Tensor:
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(row.stride(), row.shape, strict=True) if size > 1
    ):
        if stride != expected:
            what = "repeats elements" if stride < expected else "has holes"
            raise ValueError(
                f"tensor {name!r} {what} within slot {slot} (shape {list(row.shape)}, stride {list(row.stride())}); "
                "each row must be one span of bytes: make it contiguous"
            )
        expected *= size
    return torch.as_strided(row, (row.numel(),), (1,)).view(torch.uint8)


def _check_lengths(what: str, rows: Mapping[str, Sequence[torch.Tensor]]) -> None:
    first = next(iter(rows), "")
    for name, views in rows.items():
        if len(views) != len(rows[first]):
            raise ValueError(
                f"tensor {name!r} has {len(views)} {what} and {first!r} has {len(rows[first])}; "
                "all tensors of a layer must have the same number"
            )


def _table(rows: Mapping[str, Sequence[torch.Tensor]]) -> tuple[IntArray, IntArray]:
    length = len(next(iter(rows.values()), ()))
    addresses = [[view.data_ptr() for view in views] for views in rows.values()]
    sizes = [views[0].numel() for views in rows.values()]
    by_slot = np.array(addresses, dtype=np.int64).reshape(len(rows), length).T
    return read_only(np.ascontiguousarray(by_slot)), read_only(np.array(sizes, dtype=np.int64))
