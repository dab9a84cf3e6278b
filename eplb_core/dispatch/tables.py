"""Dispatch tables of all layers: buffers with fixed addresses, filled from a layout one layer at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import torch

from eplb_core._arrays import (
    ArrayLike,
    FloatArray,
    IntArray,
    check_flag,
    check_id,
    check_int,
    check_kind,
    check_made,
    check_word,
    read_only,
    to_ids,
    to_reals,
)
from eplb_core.dispatch import even, static
from eplb_core.dispatch.constants import (
    GOLDEN,
    MAPPED_TWICE,
    MASK,
    MODES,
    MOST_NEAR_NODES,
    MOST_REPLICAS,
    MOST_SLOTS,
    NUM_BLOCKS,
    ORDER_BITS,
    ORDERS,
    OUT_OF_RANGE,
    SOLVED_MODES,
    STATIC_MODES,
    TAG,
    Mode,
    mix,
)
from eplb_core.dispatch.counter import LoadCounter, check_device
from eplb_core.dispatch.ops import LayerTables, topk_to_slots
from eplb_core.dispatch.orders import even_orders
from eplb_core.dispatch.rows import Int32Array, RowShape, check_row, fill_near_row, fill_row
from eplb_core.errors import LayoutError
from eplb_core.layout import ExpertLayout, layer_rows

SOLVER_ARMS = 8192
"""Most candidates (experts with several replicas, times `max_replicas`, in powers of two) that the solver can hold."""


class DispatchTables:
    """Hold, for one source rank, which slot each token goes to on every layer; installed in place while serving.

    Modes (docs/dispatch.md says which to choose):

    - static: one slot for each expert, by SGLang's rule on each layer by itself.
    - even: one slot for each expert, this rank's part of `even_dispatch_table`.
    - random: drawn anew for every token and call, also when a CUDA graph is replayed; seeded, reproducible.
    - row: by token row, layer and expert alone: the same on every rank, for engines whose ranks share all tokens.
    - weighted: as row, starting elsewhere on every rank, for engines that send tokens to experts.
    - near: a token goes to as few nodes besides its rank's as hold all its experts, and there as weighted: for slow
      links between nodes, 8 at most, and layouts of `place(pairs=)`.
    - quota: solved per batch: ranks sum their counts by `all_reduce`, then get as even loads as the layout allows.
    - fewest: solved per batch: one slot for each expert used, so that few slots are used on every rank.
    - fake: ids are replaced by every expert in turn, from another one on each rank, for benchmarks.

    All but the static modes split an expert's tokens by `shares` (equal by default), quota and fewest by the batch.

    The same choice elsewhere: mode "quota" is `dispatch="weighted"` of `place` and `simulate`; mode "weighted" with the
    shares of the last rebalance is "previous" of `simulate`, and modes "even" and "static" are its "even_table" and
    "static_table"; for these three `place` takes "even".

    Args:
        layout: Layout that the weights are in.
        rank: This rank, the source of the tokens.
        mode: As above.
        device: Device of the buffers; a CUDA device needs Triton.
        max_replicas: Most replicas that an expert can ever have, up to 2047. Default: P - E + 1; with `quota` and
            `fewest` at most 8192 over the number of redundant experts.
        slot_ids: Number of each slot in the all-to-all, ints `[P]`, 0 or more. Default: 0 .. P - 1.
        shares: Fraction of its expert's tokens for each slot, `[L, P]`, as `replica_shares` gives.
        orders: For `near`: orders of nodes that even out the ranks, `[L, N, 64]`, as `near_orders` gives.
        seed: Seed of `static`, of `random` and of the phases of the others; equal on all ranks.
        load: Counter that every call adds to.
        all_reduce: For `quota` and `fewest`: sums an int32 `[R, E]` device tensor over ranks, in place, on the current
            stream, capturable. Default: no other rank sends tokens.
        debug: Check ids on the device too, and tag slots to find ids that are mapped twice: see `check` and `untag`.

    Raises:
        ValueError: A mode, shape or number does not fit.
        ImportError: A CUDA device without Triton.
        LayoutError: An expert has more replicas than `max_replicas`.
        IndexError: `rank` is out of range.

    Cost:
        4 * L * (3 * P + E) bytes on the device and as much on the host; static modes 4 * L * E. `quota` and `fewest`
        add 4 * (E * (R + 256) + 2 * P + N * (max_replicas + 1)) per layer for N redundant experts. Allocated
        here, all of it.

    Threads:
        One at a time. Calls for one layer must run one after another on the device.

    Example:
        >>> from eplb_core import Topology
        >>> layout = ExpertLayout([[0, 1, 2, 3, 3, 0]], num_experts=4, topology=Topology(num_ranks=2))
        >>> tables = DispatchTables(layout, rank=0, mode="row")
        >>> tables.map(0, torch.zeros(8, 1, dtype=torch.int32)).reshape(-1).tolist()
        [0, 5, 0, 5, 0, 0, 5, 0]
    """

    def __init__(
        self,
        layout: ExpertLayout,
        *,
        rank: int = 0,
        mode: Mode = "even",
        device: torch.device | str = "cpu",
        max_replicas: int | None = None,
        slot_ids: ArrayLike | None = None,
        shares: ArrayLike | None = None,
        orders: ArrayLike | None = None,
        seed: int = 0,
        load: LoadCounter | None = None,
        all_reduce: Callable[[torch.Tensor], object] | None = None,
        debug: bool = False,
    ) -> None:
        check_word(mode, "mode", MODES)
        check_kind(layout, "layout", ExpertLayout)
        ranks, experts, slots = layout.topology.num_ranks, layout.num_experts, layout.num_slots
        check_id(rank, "rank", ranks)
        debug = check_flag(debug, "debug")
        if load is not None and (load.num_layers, load.num_experts) != (layout.num_layers, experts):
            raise ValueError(
                f"`load` counts {load.num_layers} layers and {load.num_experts} experts, "
                f"`layout` has {layout.num_layers} and {experts}"
            )
        solved = mode in SOLVED_MODES
        num_shared = max(1, min(experts, slots - experts)) if solved else 0
        room = MOST_REPLICAS
        if solved:
            room = min(room, SOLVER_ARMS // (1 << (num_shared - 1).bit_length()))
        most = min(slots - experts + 1, room) if max_replicas is None else check_int(max_replicas, "max_replicas", 1)
        if most > room:
            raise ValueError(
                f"`max_replicas` (={most}) must be at most {room} for mode {mode!r} with {slots - experts} redundant "
                f"experts; use {room} or less"
            )
        if slots > MOST_SLOTS:
            raise ValueError(f"`layout` (num_slots={slots}) must have at most {MOST_SLOTS} slots")
        self._layout: ExpertLayout | None = layout
        self._p2l = layout.physical_to_logical_map.copy()
        self._num_experts, self._topology = experts, layout.topology
        self.rank, self.mode, self.debug = int(rank), mode, bool(debug)
        self.device = check_device(device)
        self.max_replicas = most
        self._shape = RowShape(
            num_experts=experts,
            num_slots=slots,
            width=1 if mode in STATIC_MODES else max(most, 2) if mode == "near" else most,
            num_shared=num_shared,
            num_ranks=ranks,
            slots_per_rank=layout.slots_per_rank,
            num_nodes=layout.topology.num_nodes if mode == "near" else 0,
        )
        if self._shape.num_nodes > MOST_NEAR_NODES:
            raise ValueError(f"`mode` (={mode!r}) needs at most {MOST_NEAR_NODES} nodes, not {self._shape.num_nodes}")
        self._slot_ids = _check_slot_ids(slot_ids, slots)
        self._seed = check_int(seed, "seed", 0)
        self._all_reduce = all_reduce
        self._layers: dict[tuple[int, Mode], LayerTables] = {}
        self._allocate(load)
        self.install(layout, shares=shares, orders=orders)

    @torch.inference_mode(False)  # what is made in it takes no write from outside
    def _allocate(self, load: LoadCounter | None) -> None:
        layers, experts = len(self._p2l), self._shape.num_experts
        ranks, size, device = self._shape.num_ranks, self._shape.size, self.device
        pinned = device.type == "cuda"
        self._mirror = torch.full((layers, size), -1, dtype=torch.int32, device="cpu", pin_memory=pinned)
        self._host = list(self._mirror.numpy())
        self._packed = self._mirror.to(device)  # on the CPU they are one
        # Views, made once: what is made in `install` costs more than what it does there.
        self._copies = list(zip(self._packed, self._mirror, map(_event, range(layers)), strict=True)) if pinned else []
        first = self.rank * experts // ranks  # so that all ranks together take each expert equally often
        node = int(self._topology.rank_to_node[self.rank])
        settings = [[*_settings(self._seed, layer, self.rank), first, node] for layer in range(layers)]
        self._settings = torch.tensor(settings, dtype=torch.int32, device=device).reshape(layers, 5)
        self._sends = torch.zeros((layers, 1), dtype=torch.int64, device=device)
        self._draws = torch.zeros((layers, 2), dtype=torch.int32, device=device)
        self._errors = torch.zeros(2, dtype=torch.int32, device=device)
        nothing = torch.zeros((layers, 0, experts), dtype=torch.int64, device=device)
        self._count = nothing if load is None else load._rows
        self._state = torch.zeros(4, dtype=torch.int32, device=device) if load is None else load.state
        solved = self._shape.num_shared > 0
        self._batch = torch.zeros((layers, ranks if solved else 0, experts), dtype=torch.int32, device=device)
        self._blocks = torch.zeros((layers, NUM_BLOCKS if solved else 0, experts), dtype=torch.int32, device=device)
        slots = self._shape.num_slots
        self._bounds = torch.zeros((layers, slots if solved else 0), dtype=torch.int32, device=device)
        self._scratch = np.empty((3, max(slots, experts + 1)), dtype=np.int64)
        self._equal = read_only(np.empty(0))  # as given shares are, for kernels compile for each kind
        # Each row of tokens takes an order, from another one on for each layer and rank.
        self._all_orders = read_only(even_orders(self._shape.num_nodes))
        self._starts = [(phase[0] + phase[1] & MASK) >> 32 - ORDER_BITS for phase in settings]
        self._filler = None  # from a layer and its row to this rank's slots, in static modes
        if self.mode == "even":
            self._filler = even.rank_filler(self.layout, self.rank)
        elif self.mode == "static":
            self._filler = static.rank_filler(self.layout, self._seed, self.rank)

    @property
    def layout(self) -> ExpertLayout:
        """Layout that the buffers hold, as of the last `install`."""
        if self._layout is None:
            self._layout = ExpertLayout._of_valid(self._p2l.copy(), self._num_experts, self._topology)
        return self._layout

    # ---- use -------------------------------------------------------------------------------------------------------

    def layer(self, layer: int, *, mode: Mode | None = None) -> LayerTables:
        """Return the tensors of one layer, fixed for life; `mode` is another one on the same memory (decode, prefill).

        Raises:
            IndexError: `layer` is out of range.
            ValueError: The buffers cannot serve `mode`: static and near ones serve themselves only, and `quota` and
                `fewest` need tables made for one of them.
        """
        check_id(layer, "layer", len(self._p2l))
        if mode is None:
            mode = self.mode
        else:
            check_word(mode, "mode", MODES)
        if (layer, mode) not in self._layers:
            self._layers[layer, mode] = self._views(layer, mode)
        return self._layers[layer, mode]

    def _views(self, layer: int, mode: Mode) -> LayerTables:
        static_only = self.mode in STATIC_MODES or mode in STATIC_MODES
        one_only = static_only or "near" in (mode, self.mode)
        if mode != self.mode and (one_only or (mode in SOLVED_MODES and not self._shape.num_shared)):
            raise ValueError(f"`mode` (={mode!r}) does not fit tables of mode {self.mode!r}; make other tables for it")
        shape, row = self._shape, self._packed[layer]
        width, shared = shape.width, shape.num_shared
        ends = itertools.pairwise(shape.starts)
        names, runs, thresholds, span, masks, orders, experts, arm_rank, on_rank = (
            row[start:end] for start, end in ends
        )
        return LayerTables(
            table=row,
            candidates=names.view(-1, 2 if width > 1 else 1),
            runs=runs,
            thresholds=thresholds,
            span=span,
            settings=self._settings[layer],
            draws=self._draws[layer],
            count=self._count[layer],
            state=self._state,
            errors=self._errors,
            masks=masks,
            orders=orders,
            sends=self._sends[layer],
            batch=self._batch[layer],
            bounds=self._bounds[layer],
            blocks=self._blocks[layer],
            shared=experts,
            arm_rank=arm_rank.view(shared, width if shared else 0),
            on_rank=on_rank.view(shape.num_ranks, shape.slots_per_rank if shared else 0),
            num_experts=shape.num_experts,
            num_entries=shape.num_slots if width > 1 else 0,
            num_nodes=shape.num_nodes,
            mode=mode,
            rank=self.rank,
            debug=self.debug,
            all_reduce=self._all_reduce,
        )

    def map(
        self,
        layer: int,
        topk_ids: torch.Tensor,
        *,
        num_tokens: torch.Tensor | None = None,
        num_shared: int = 0,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Call `topk_to_slots` on `layer(layer)`; a region compiled once for all layers takes those tensors instead."""
        return topk_to_slots(topk_ids, self.layer(layer), num_tokens=num_tokens, num_shared=num_shared, out=out)

    def warm_up(
        self,
        num_columns: int,
        *,
        num_shared: int = 0,
        dtype: torch.dtype = torch.int32,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        """Compile the kernels of calls with `num_columns` columns, any number of rows; counts and draws do not change.

        Args:
            num_columns: Columns of `topk_ids`, shared ones included.
            num_shared: As in `topk_to_slots`.
            dtype: Type of `topk_ids`.
            out_dtype: Type of `out`. Default: `dtype`.
        """
        check_int(num_columns, "num_columns", 1)
        check_made(num_columns=num_columns)
        for name, kind in (("dtype", dtype), ("out_dtype", dtype if out_dtype is None else out_dtype)):
            check_kind(kind, name, torch.dtype)
        if len(self._p2l) == 0:
            return
        draws = self._draws.clone()
        for elements in (1, 8193, 65537):  # a kernel for few, some and many
            shape = (-(-elements // num_columns), num_columns)
            ids = torch.full(shape, -1, dtype=dtype, device=self.device)
            out = torch.empty(shape, dtype=dtype if out_dtype is None else out_dtype, device=self.device)
            for limit in (None, torch.ones(1, dtype=torch.int32, device=self.device)):
                self.map(0, ids, num_tokens=limit, num_shared=num_shared, out=out)
        self._draws.copy_(draws)

    def check(self) -> None:
        """Raise IndexError if debugging tables saw ids out of range or mapped twice; waits for the device."""
        errors = self._errors.tolist()
        self._errors.zero_()
        if errors[MAPPED_TWICE]:
            raise IndexError(f"{errors[MAPPED_TWICE]} ids were mapped twice; map each id once")
        if errors[OUT_OF_RANGE]:
            raise IndexError(
                f"{errors[OUT_OF_RANGE]} ids were neither -1 nor a logical expert in [0, {self._shape.num_experts})"
            )

    @staticmethod
    def untag(slots: torch.Tensor) -> torch.Tensor:
        """Take the tag off slots that debugging tables gave; refuse ids that were not mapped.

        Raises:
            ValueError: An entry that is neither -1 nor tagged: it was not mapped. Waits for the device.
        """
        if check_kind(slots, "slots", torch.Tensor).dtype not in (torch.int32, torch.int64):
            raise TypeError(f"`slots` (dtype {slots.dtype}) must be int32 or int64")
        if bool(((slots >= 0) & (slots < TAG)).any()):
            raise ValueError("`slots` has entries that were not mapped; call topk_to_slots on every path")
        return torch.where(slots < 0, slots, slots & (TAG - 1))

    # ---- change ----------------------------------------------------------------------------------------------------

    def install(
        self,
        layout: ExpertLayout,
        *,
        layers: ArrayLike | None = None,
        shares: ArrayLike | None = None,
        orders: ArrayLike | None = None,
    ) -> None:
        """Fill the rows of `layers` from `layout`, in place, on the current stream.

        Addresses, shapes and types stay, so captured graphs use the new rows. A layer depends on its own row, this
        rank, the seed, its shares and orders alone: installing one layer equals making all tables anew.

        Args:
            layout: Layout of the same L, P, E and topology.
            layers: Rows to fill, ints or bools. Default: all.
            shares: `[L, P]`; only the rows of `layers` are read. Default: equal ones.
            orders: `[L, N, 64]`, for mode near; only the rows of `layers` are read. Default: every order as often.

        Raises:
            ValueError: The layouts' frames, shares or orders do not fit, a static mode gets shares, or another mode
                than near gets orders.
            LayoutError: An expert has more than `max_replicas` replicas.
            (Nothing has been written when one of these is raised.)
            IndexError: A layer out of range.

        Cost:
            Tens of microseconds of host time and one copy to the device per row. No allocation on the device; waits
            only where a row is installed again before its last copy has run.
        """
        p2l = check_kind(layout, "layout", ExpertLayout).physical_to_logical_map
        frame = (layout.topology, layout.num_experts, p2l.shape)
        if frame != (self._topology, self._num_experts, self._p2l.shape):
            self.layout.check_same_frame(layout)
        fractions = self._equal if shares is None else self._check_shares(p2l, shares)
        turns = None if orders is None else self._check_orders(orders)
        rows = range(len(p2l)) if layers is None else _rows_of(layers, len(p2l))
        if len(rows) > 1:  # a row is looked at before it is written: for one, that is enough
            for layer in rows:
                self._check_row(layer, p2l[layer], fractions[layer] if fractions.size else fractions)
        for layer in rows:
            order = self._all_orders if turns is None else turns[layer]
            self._fill(layer, p2l[layer], fractions[layer] if fractions.size else fractions, order)
            self._p2l[layer] = p2l[layer]
        self._layout = layout if layers is None else None

    def _check_shares(self, p2l: IntArray, shares: ArrayLike) -> FloatArray:
        """The shares as float64 `[L, P]`. Their values are looked at row by row."""
        if self.mode in STATIC_MODES:
            raise ValueError(f"`shares` must be None for mode {self.mode!r}; use 'weighted', or `hash_dispatch_table`")
        # Read-only like the equal ones, whoever owns them: kernels are compiled for one kind of array.
        fractions: FloatArray = read_only(np.require(to_reals(shares, "shares"), np.float64, ["C", "A"]).view())
        if fractions.shape != p2l.shape:
            raise ValueError(f"`shares` (shape {list(fractions.shape)}) must be {list(p2l.shape)}, one per slot")
        return fractions

    def _check_orders(self, orders: ArrayLike) -> IntArray:
        """Those of this rank's node, int64 `[L, 64]`."""
        nodes = self._shape.num_nodes
        if not nodes:
            raise ValueError(f"`orders` must be None for mode {self.mode!r}; only 'near' chooses among nodes")
        given = to_ids(orders, "orders")
        shape = (len(self._p2l), nodes, ORDERS)
        if given.shape != shape:
            raise ValueError(f"`orders` (shape {list(given.shape)}) must be {list(shape)}, as `near_orders` gives")
        bad = (given < 0) | (given >= 2 * nodes)
        if bad.any():
            layer, node, place = np.argwhere(bad)[0].tolist()
            raise ValueError(
                f"`orders` (={given[layer, node, place]}) must be in [0, {2 * nodes}) at layer {layer}, node {node}, "
                f"place {place}"
            )
        mine: IntArray = read_only(np.ascontiguousarray(given[:, self._topology.rank_to_node[self.rank]], np.int64))
        return mine

    def _check_row(self, layer: int, row: IntArray, shares: FloatArray) -> None:
        found = check_row(row, shares, self._num_experts, self.max_replicas, self._scratch)
        if found[0]:
            self._raise(layer, *found)

    def _raise(self, layer: int, fault: int, where: int, value: float) -> None:
        if fault == 1:
            raise LayoutError(
                f"`layout` must have at most `max_replicas` (={self.max_replicas}) slots for each expert; expert "
                f"{where} has {value:.0f} at layer {layer}; make tables for more",
                layer=layer,
                expert=int(where),
            )
        if fault == 2:
            raise ValueError(f"`shares` (={value}) must be in [0, 1] at layer {layer}, slot {where}")
        raise ValueError(f"`shares` of expert {where} (sum {value}) must sum to 1 at layer {layer}")

    def _fill(self, layer: int, row: IntArray, shares: FloatArray, orders: IntArray) -> None:
        """Write a row on the host and send it to the device."""
        shape, packed = self._shape, self._host[layer]
        if self._copies:  # pragma: no cover  needs a GPU
            on_device, on_host, copied = self._copies[layer]
            copied.synchronize()  # the last copy of this row may not have run
        if self._filler is not None:
            if self.max_replicas <= shape.num_slots - shape.num_experts:  # else none can have too many
                self._check_row(layer, row, shares)
            np.take(self._slot_ids, self._filler(layer, row), out=packed[: shape.num_experts], mode="clip")
        elif shape.num_nodes:
            found = fill_near_row(
                row, shares, self._slot_ids, shape.num_experts, shape.width, shape.slots_per_rank,
                self._topology.rank_to_node, shape.num_nodes, orders, self._starts[layer], self._scratch, packed,
            )  # fmt: skip
            if found[0]:
                self._raise(layer, *found)
        else:
            found = fill_row(
                row, shares, self._slot_ids, shape.num_experts, shape.width, shape.slots_per_rank, shape.num_shared,
                self._scratch, packed,
            )  # fmt: skip
            if found[0]:
                self._raise(layer, *found)
        if self._copies:  # pragma: no cover  needs a GPU
            on_device.copy_(on_host, non_blocking=True)
            copied.record(torch.cuda.current_stream(on_device.device))


def _rows_of(layers: ArrayLike, num_layers: int) -> list[int]:
    """Convert rows as `layer_rows`; fast for a list of one number, which a migration passes."""
    if isinstance(layers, list) and len(layers) == 1 and type(layers[0]) is int and 0 <= layers[0] < num_layers:
        return layers
    rows: list[int] = layer_rows(layers, num_layers).tolist()
    return rows


def _event(layer: int) -> torch.cuda.Event:  # pragma: no cover  needs a GPU
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _check_slot_ids(slot_ids: ArrayLike | None, num_slots: int) -> Int32Array:
    ids = np.arange(num_slots) if slot_ids is None else to_ids(slot_ids, "slot_ids")
    if ids.shape != (num_slots,):
        raise ValueError(f"`slot_ids` (shape {list(ids.shape)}) must be [{num_slots}], a number for each slot")
    if ids.size and not (ids.min() >= 0 and ids.max() < TAG):
        slot = int(np.argmax((ids < 0) | (ids >= TAG)))
        raise ValueError(f"`slot_ids` (={ids[slot]}) must be in [0, {TAG}) at slot {slot}; -1 is for masked tokens")
    return ids.astype(np.int32)


def _settings(seed: int, layer: int, rank: int) -> list[int]:
    """Phases and key of a layer, as int32 (BASE_PHASE, RANK_PHASE, KEY)."""
    base = mix((mix((seed ^ (seed >> 32)) & MASK) + layer * GOLDEN) & MASK)
    words = [base, (rank * GOLDEN) & MASK, mix((base ^ mix(rank + 1)) & MASK)]
    return [word - (1 << 32) if word >= 1 << 31 else word for word in words]
