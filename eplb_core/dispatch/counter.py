"""Count tokens per expert on the device, in windows."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import numpy as np
import torch

from eplb_core._arrays import ArrayLike, IntArray, check_flag, check_id, check_int, check_kind, check_made
from eplb_core._text import quoted
from eplb_core.dispatch.constants import FINISHED, RECORDING, WINDOW
from eplb_core.errors import EplbError
from eplb_core.layout import ExpertLayout, layer_rows

_TOP = torch.iinfo(torch.int64).max
_MOST_EVERY = 1 << 16
_COUNTED = {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32}


def check_device(device: torch.device | str) -> torch.device:
    """Make a device of torch from its name; raise where its kernels cannot run."""
    try:
        found = torch.device(device)
    except Exception as error:  # what torch raises depends on the kind
        raise TypeError(f"`device` (={quoted(device, 80)}) must be a device of torch, such as 'cuda:0'") from error
    if found.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise ImportError(f"`device` (={found}) needs Triton; install it (`pip install triton`), or use 'cpu'")
    return found


class LoadCounter:
    """Hold a ring of windows of counts on the device; the dispatch kernel adds at a device-side cursor.

    A count is a (token, expert) pair of this rank's calls: each token once for each of its experts, however many ranks
    hold those. Where every rank dispatches its own tokens, sum over ranks (`snapshot(all_reduce=)`); where all ranks
    dispatch the same tokens, each rank's counts are already the total.

    Args:
        num_layers: Layers L.
        num_experts: Logical experts E.
        windows: Finished windows T that are kept; one more is being filled.
        device: Where the counts live.
        pairs: Count also which experts tokens use together, as `pair_counts` does, in the same kernel: of one token in
            `pair_every`, by its place in the batch, at most 256 of a call. `snapshot_pairs` reads them. On a GPU ids
            that `topk_to_slots` writes over take a launch of their own.
        pair_every: 1 = every token of every call.

    Raises:
        ValueError: A number is too small.

    Cost:
        8 * L * (T + 1) * E bytes, and 24 * L * T * E for snapshots; all allocated here. Counts are int64 and do not
        wrap. With `pairs` 8 * L * (T + 1) * E^2 more, and 24 * L * E^2 for snapshots: 150 MB for 58 layers of 256
        experts and one window; on an H200 a call takes 0.7 to 4.5 us longer (docs/dispatch.md).

    Threads:
        All methods from the thread that runs the passes, on its current stream; `Snapshot.numpy` from any.

    Example:
        >>> load = LoadCounter(1, 4, windows=2, device="cpu")
        >>> from eplb_core import ExpertLayout, Topology
        >>> layout = ExpertLayout([[0, 1, 2, 3, 3, 0]], num_experts=4, topology=Topology(num_ranks=2))
        >>> load.add_slots(torch.tensor([[3, 1, 4, 1, 5, 9]]), layout)
        >>> load.roll()
        >>> load.snapshot().numpy().tolist()
        [[[12, 1, 4, 6]]]
    """

    @torch.inference_mode(False)  # what is made in it takes no write from outside
    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        *,
        windows: int = 1,
        device: torch.device | str = "cpu",
        pairs: bool = False,
        pair_every: int = 128,
    ) -> None:
        self.num_layers = check_int(num_layers, "num_layers", 0)
        self.num_experts = check_int(num_experts, "num_experts", 1)
        self.windows = check_int(windows, "windows", 1)
        self.device = check_device(device)
        check_made(num_layers=max(self.num_layers, 1), num_experts=self.num_experts, windows=self.windows + 1)
        every = check_int(pair_every, "pair_every", 1)
        if every > _MOST_EVERY:
            raise ValueError(f"`pair_every` (={every}) must be at most {_MOST_EVERY}")
        all_windows, experts = self.windows + 1, self.num_experts
        rows = all_windows
        if check_flag(pairs, "pairs"):
            check_made(num_layers=self.num_layers, num_experts=experts, others=experts, windows=all_windows)
            rows += all_windows * experts + 1  # the last one counts calls
        # Layer first: the views of single layers do not overlap, so a compiler need not think that they alias.
        self._rows = torch.zeros((self.num_layers, rows, experts), dtype=torch.int64, device=self.device)
        self.count = self._rows[:, :all_windows]
        """int64 `[L, T + 1, E]`; a kernel adds to `count[layer, state[0]]` where `state[1]` is not 0."""
        how = [all_windows, every] if pairs else []
        self.state = torch.tensor([0, 1, 0, 0, *how], dtype=torch.int32, device=self.device)
        """int32 `[4]`: current window, whether calls count, windows finished (T at most), and scratch. With pairs
        `[6]`: T + 1 and `pair_every`."""
        self._pairs: torch.Tensor | None = None
        self._free_pairs: list[_Buffers] = []
        if pairs:
            pairs_shape = (self.num_layers, all_windows, experts, experts)
            self._pairs = self._rows[:, all_windows:-1].view(pairs_shape)
            self._current = torch.empty((self.num_layers, 1, experts, experts), dtype=torch.int64, device=self.device)
            self._free_pairs.append(_Buffers((self.num_layers, experts, experts), self.device))
        self._order = torch.arange(1, self.windows + 1, dtype=torch.int64, device=self.device)
        self._index = torch.empty_like(self._order)
        self._picked = torch.empty(
            (self.num_layers, self.windows, self.num_experts), dtype=torch.int64, device=self.device
        )
        self._is_on = True
        self._layout: ExpertLayout | None = None
        self._map = self._order
        shape = (self.windows, self.num_layers, experts)
        self._free = [_Buffers(shape, self.device) for _ in range(2)]

    def layer(self, layer: int) -> torch.Tensor:
        """Return the counts of one layer, int64 `[T + 1, E]`: a view, fixed for life."""
        return self.count[check_id(layer, "layer", self.num_layers)]

    def roll(self) -> None:
        """End the current window and start an empty one over the oldest. The host does not wait."""
        if self.device.type == "cuda":  # pragma: no cover  needs a GPU
            from eplb_core.dispatch import gpu

            gpu.roll(self.count, self.state)
        else:
            state = self.state
            state[WINDOW] = (state[WINDOW] + 1) % (self.windows + 1)
            state[FINISHED] = min(int(state[FINISHED]) + 1, self.windows)
            self.count.index_fill_(1, state[WINDOW : WINDOW + 1].long(), 0)
        if self._pairs is not None:
            self._pairs.index_fill_(1, self.state[WINDOW : WINDOW + 1].long(), 0)

    def recording(self, on: bool) -> Recording:
        """Set whether later calls count: off for dummy passes, warm-up and capture. One launch, no wait.

        Returns:
            A context: at its end, by an error too, calls count as they did before.
        """
        former = Recording(self, self._is_on)
        self._is_on = check_flag(on, "on")
        self.state[RECORDING : RECORDING + 1].fill_(int(on))
        return former

    def add_slots(self, counts: torch.Tensor, layout: ExpertLayout, *, layers: ArrayLike | None = None) -> None:
        """Add counts by slot, folded by the layout under which they were counted.

        When a layer is installed within a window, first add what was counted until then, with the old layout.

        Args:
            counts: Ints up to 64 bits, `[L, P]`, or `[n, P]` for `layers`, on this counter's device; counts at empty
                slots are left out.
            layout: Layout of those counts; a new one costs a copy of its map to the device.
            layers: Rows of `counts`. Default: all.

        Raises:
            ValueError: Shapes do not fit. On the CPU also a negative count; on a GPU the host would have to wait.
            TypeError: `counts` are not integers, or are uint64.
            OverflowError: On the CPU: a count may pass 2^63. Nothing is added then.
        """
        check_kind(layout, "layout", ExpertLayout)
        check_kind(counts, "counts", torch.Tensor)
        if (layout.num_layers, layout.num_experts) != (self.num_layers, self.num_experts):
            raise ValueError(
                f"`layout` ({layout.num_layers} layers, {layout.num_experts} experts) must have this counter's "
                f"{self.num_layers} layers and {self.num_experts} experts"
            )
        rows = np.arange(self.num_layers) if layers is None else layer_rows(layers, self.num_layers)
        if tuple(counts.shape) != (len(rows), layout.num_slots):
            raise ValueError(f"`counts` (shape {list(counts.shape)}) must be [{len(rows)}, {layout.num_slots}]")
        if counts.dtype not in _COUNTED:
            raise TypeError(f"`counts` (dtype {counts.dtype}) must be integers that int64 holds")
        if layout is not self._layout:
            self._layout, self._map = layout, torch.tensor(layout.physical_to_logical_map, device=self.device)
        layer = torch.from_numpy(rows).to(self.device)
        expert = self._map if layers is None else self._map[layer]
        layer = layer[:, None]
        place = (layer * self._rows.shape[1] + self.state[WINDOW]) * self.num_experts + expert.clamp(min=0)
        amount = torch.where(expert >= 0, counts.to(torch.int64), 0)
        if self.device.type == "cpu":
            self._check_amount(amount)
        amount *= self.state[RECORDING]
        self._rows.view(-1).index_add_(0, place.reshape(-1), amount.reshape(-1))

    def _check_amount(self, amount: torch.Tensor) -> None:
        if not amount.numel():
            return
        if (least := int(amount.min())) < 0:
            raise ValueError(f"`counts` (={least}) must be 0 or more; a narrower counter has wrapped")
        held, most = int(self.count[:, int(self.state[WINDOW])].max()), int(amount.max())
        if held + most * amount.shape[1] > _TOP:
            raise OverflowError(
                f"`counts` (up to {most}) may pass 2^63 with the {held} that the window holds; roll first"
            )

    def snapshot(self, *, all_reduce: Callable[[torch.Tensor], object] | None = None) -> Snapshot:
        """Enqueue a copy of the finished windows to the host; wait for nothing.

        Args:
            all_reduce: Called once with the int64 device tensor `[T, L, E]`, oldest window first, to sum it over ranks
                in place on the current stream. Ranks must roll in the same passes. Windows not finished yet are 0.

        Returns:
            Snapshot whose `numpy()` waits; two may be unread at a time.

        Raises:
            EplbError: Two snapshots are unread.
        """
        if not self._free:
            raise EplbError("two snapshots are unread; call `numpy()` on one, or drop it, before the next")
        buffers = self._free.pop()
        snapshot = Snapshot(self._free, buffers, self._of_windows)
        torch.add(self._order, self.state[WINDOW], out=self._index)
        self._index.remainder_(self.windows + 1)
        torch.index_select(self.count, 1, self._index, out=self._picked)
        buffers.device.copy_(self._picked.transpose(0, 1))
        return self._enqueue(snapshot, buffers, all_reduce)

    def snapshot_pairs(self, *, all_reduce: Callable[[torch.Tensor], object] | None = None) -> Snapshot:
        """Enqueue a copy of the pairs of the finished windows, all together, to the host; wait for nothing.

        Args:
            all_reduce: Called once with the int64 device tensor `[L, E, E]`, each pair in its lower id's row, to sum it
                over ranks in place on the current stream.

        Returns:
            Snapshot whose `numpy()` waits, and gives int64 `[L, E, E]` as `pair_counts` does, for `place(pairs=)`; one
            may be unread at a time.

        Raises:
            ValueError: The counter was made without `pairs`.
            EplbError: One is unread.
        """
        if self._pairs is None:
            raise ValueError(
                "`pairs` (=False) of this LoadCounter must be True to count pairs: make it with `pairs=True`"
            )
        if not self._free_pairs:
            raise EplbError("a snapshot of pairs is unread; call `numpy()` on it, or drop it, before the next")
        buffers = self._free_pairs.pop()
        torch.sum(self._pairs, 1, out=buffers.device)
        torch.index_select(self._pairs, 1, self.state[WINDOW : WINDOW + 1].long(), out=self._current)
        buffers.device.sub_(self._current[:, 0])
        return self._enqueue(Snapshot(self._free_pairs, buffers, _both_ways), buffers, all_reduce)

    def _enqueue(
        self, snapshot: Snapshot, buffers: _Buffers, all_reduce: Callable[[torch.Tensor], object] | None
    ) -> Snapshot:
        if all_reduce is not None:
            try:
                all_reduce(buffers.device)
            except BaseException:
                snapshot._release()
                raise
        buffers.host.copy_(buffers.device, non_blocking=True)
        buffers.host_state.copy_(self.state[:4], non_blocking=True)
        if buffers.event is not None:  # pragma: no cover  needs a GPU
            buffers.event.record(torch.cuda.current_stream(buffers.device.device))
        return snapshot

    def _of_windows(self, host: IntArray, finished: int) -> IntArray:
        return host[self.windows - min(finished, self.windows) :].copy()


def _both_ways(host: IntArray, finished: int) -> IntArray:
    """From pairs by their lower id to a symmetric matrix."""
    upper = np.triu(host, 1)
    return host + upper.transpose(0, 2, 1)


class Recording:
    """What `LoadCounter.recording` returns: the end of its `with` block sets what was set before it."""

    def __init__(self, counter: LoadCounter, former: bool) -> None:
        self._counter, self._former = counter, former

    def __enter__(self) -> None:
        """Nothing: it is set already."""

    def __exit__(self, *raised: object) -> None:
        """Set what was set before."""
        self._counter.recording(self._former)


class Snapshot:
    """Counts that are being copied to the host."""

    def __init__(self, free: list[_Buffers], buffers: _Buffers, read: Callable[[IntArray, int], IntArray]) -> None:
        self._free, self._read = free, read
        self._buffers: _Buffers | None = buffers
        self._array: IntArray = np.empty(0, dtype=np.int64)

    def ready(self) -> bool:
        """Say whether `numpy()` would return without waiting."""
        buffers = self._buffers
        return buffers is None or buffers.event is None or bool(buffers.event.query())  # type: ignore[no-untyped-call]

    def numpy(self) -> IntArray:
        """Wait for the copy; return the finished windows, int64 `[0..T, L, E]`, oldest first; of pairs `[L, E, E]`."""
        buffers = self._buffers
        if buffers is not None:
            if buffers.event is not None:  # pragma: no cover  needs a GPU
                buffers.event.synchronize()
            self._array = self._read(buffers.host.numpy(), int(buffers.host_state[FINISHED]))
            self._release()
        return self._array

    def _release(self) -> None:
        if self._buffers is not None:
            self._free.append(self._buffers)
            self._buffers = None

    def __del__(self) -> None:
        self._release()


class _Buffers:
    """Buffers of one snapshot: on the device, and pinned on the host."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.device = torch.empty(shape, dtype=torch.int64, device=device)
        self.host = torch.empty(shape, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self.host_state = torch.empty(4, dtype=torch.int32, device="cpu", pin_memory=pinned)
        self.event = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
