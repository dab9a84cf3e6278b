"""Count tokens per expert on the host, from top-k ids or slot counts to windows of expert load; find faults of traces.

Counts are int64 and never wrap; padding (-1) never counts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eplb_core._arrays import ArrayLike, FloatArray, IntArray, check_int, check_made, to_ids, to_numpy

_TOP = np.iinfo(np.int64).max


def count_topk(topk_ids: ArrayLike, num_experts: int, *, num_tokens: int | None = None) -> IntArray:
    """Count the tokens of each logical expert.

    Every pair of a token and an expert counts once, so a layer's counts sum to tokens x top-k.

    Args:
        topk_ids: Logical ids, signed ints `[tokens, top_k]` of one layer or `[tokens, L, top_k]`; -1 = masked, not
            counted. Views are fine.
        num_experts: Logical experts E.
        num_tokens: Rows that are real; later rows are padding. Default: all.

    Returns:
        int64 `[E]`, or `[L, E]` for three dimensions.

    Raises:
        IndexError: An id is below -1 or not below E.
        TypeError: The dtype is unsigned, or too narrow for both -1 and E - 1.
        ValueError: Wrong number of dimensions, or more tokens than rows.

    Cost:
        O(tokens * L * top_k); any thread.

    Example:
        >>> count_topk([[0, 2], [2, 1], [-1, -1]], num_experts=4)
        array([1, 1, 2, 0])
    """
    experts = check_int(num_experts, "num_experts", 1)
    source = to_numpy(topk_ids, "topk_ids")
    if source.dtype.kind == "i" and np.iinfo(source.dtype).max < experts - 1:
        raise TypeError(
            f"`topk_ids` (dtype {source.dtype}) must hold ids up to {experts - 1} and -1; use a wider dtype"
        )
    ids = to_ids(source, "topk_ids")
    if ids.ndim not in (2, 3):
        raise ValueError(f"`topk_ids` (shape {list(ids.shape)}) must be [tokens, top_k] or [tokens, L, top_k]")
    if num_tokens is not None:
        real = check_int(num_tokens, "num_tokens", 0)
        if real > len(ids):
            raise ValueError(f"`num_tokens` (={real}) must be at most the {len(ids)} rows of `topk_ids`")
        ids = ids[:real]
    by_layer = ids[:, None, :] if ids.ndim == 2 else ids
    if ids.size and (ids.min() < -1 or ids.max() >= experts):
        token, layer, _ = (int(i) for i in np.argwhere((by_layer < -1) | (by_layer >= experts))[0])
        value = by_layer[token, layer][(by_layer[token, layer] < -1) | (by_layer[token, layer] >= experts)][0]
        raise IndexError(
            f"`topk_ids` (={value}) must be in [-1, {experts}) at token {token}, layer {layer}; "
            "ids are logical experts, before they are mapped to slots"
        )
    layers = by_layer.shape[1]
    check_made(num_layers=layers, num_experts=experts)
    bins = (by_layer + 1) + np.arange(layers, dtype=np.int64)[:, None] * (experts + 1)
    counts = np.bincount(bins.reshape(-1), minlength=layers * (experts + 1)).reshape(layers, experts + 1)[:, 1:]
    counts = np.ascontiguousarray(counts, dtype=np.int64)
    return counts[0] if ids.ndim == 2 else counts


def fold_slots(slot_counts: ArrayLike, physical_to_logical_map: ArrayLike, num_experts: int) -> IntArray:
    """Fold tokens per slot into tokens per logical expert, by the layout under which they were counted.

    Args:
        slot_counts: Ints `[..., L, P]`, 0 or more.
        physical_to_logical_map: Signed ints `[L, P]`: the map while they were counted; -1 = an empty slot.
        num_experts: Logical experts E.

    Returns:
        int64 `[..., L, E]`.

    Raises:
        ValueError: Shapes differ, a count is negative, an id is out of range, or an empty slot has tokens.
        OverflowError: An expert's count passes 2**63.

    Example:
        >>> fold_slots([[5, 1, 2, 4]], [[0, 1, 2, 0]], num_experts=3)
        array([[9, 1, 2]])
    """
    counts, p2l = check_counts(slot_counts, "slot_counts"), to_ids(physical_to_logical_map, "physical_to_logical_map")
    if p2l.ndim != 2 or counts.shape[-2:] != p2l.shape:
        raise ValueError(f"`slot_counts` (shape {list(counts.shape)}) must end in the map's {list(p2l.shape)}")
    if p2l.size and (p2l.min() < -1 or p2l.max() >= num_experts):
        raise ValueError(f"`physical_to_logical_map` must be in [-1, {num_experts}); it has {p2l.min()}..{p2l.max()}")
    if (counts * (p2l < 0)).any():
        layer, slot = (int(i) for i in np.argwhere((counts * (p2l < 0)).reshape(-1, *p2l.shape).any(axis=0))[0])
        raise ValueError(f"`slot_counts` must be 0 at layer {layer}, slot {slot}, which is empty in the map")
    # Where sums may exceed int64, add Python integers, which do not wrap.
    kind = object if int(counts.max(initial=0)) * p2l.shape[1] > _TOP else np.int64
    load = np.zeros((*counts.shape[:-1], num_experts + 1), dtype=kind)
    layers = np.arange(len(p2l))
    for slot in range(p2l.shape[1]):  # one slot at a time: within a slot no expert repeats, so nothing is lost
        load[..., layers, p2l[:, slot]] += counts[..., slot]
    if kind is object and (load > _TOP).any():
        layer, expert = (int(i) for i in np.argwhere(load > _TOP)[0][-2:])
        raise OverflowError(f"the count of layer {layer}, expert {expert} passes 2**63; end windows sooner")
    return np.ascontiguousarray(load[..., :-1], dtype=np.int64)


def check_counts(value: ArrayLike, name: str) -> IntArray:
    """Convert integers to int64; raise unless they are 0 or more and fit."""
    array = to_numpy(value, name)
    if array.dtype.kind not in "iu":
        raise TypeError(f"`{name}` (dtype {array.dtype}) must be integers")
    if array.size and (array.min() < 0 or int(array.max()) > _TOP):
        bad = array.min() if array.min() < 0 else array.max()
        raise ValueError(f"`{name}` (={bad}) must be 0 or more and below 2**63; a narrower counter has wrapped")
    return array.astype(np.int64)


class LoadWindows:
    """Keep the last T windows of expert load in a ring on the host.

    Args:
        num_layers: Layers L.
        num_experts: Logical experts E.
        windows: Windows T to keep.

    Threads:
        One writer; `windows()` returns a copy.

    Example:
        >>> ring = LoadWindows(1, 3, windows=2)
        >>> for token in ([0], [1], [2]):
        ...     ring.add(count_topk([token], 3)[None])
        ...     ring.roll()
        >>> ring.windows()
        array([[[0, 1, 0]],
        <BLANKLINE>
               [[0, 0, 1]]])
    """

    def __init__(self, num_layers: int, num_experts: int, *, windows: int) -> None:
        layers, experts = check_int(num_layers, "num_layers", 0), check_int(num_experts, "num_experts", 1)
        self._ring = np.zeros((check_int(windows, "windows", 1), layers, experts), dtype=np.int64)
        self._open = np.zeros((layers, experts), dtype=np.int64)
        self._ended = 0

    def add(self, counts: ArrayLike) -> None:
        """Add int counts `[L, E]` to the open window; nothing changes where that raises."""
        more = check_counts(counts, "counts")
        if more.shape != self._open.shape:
            raise ValueError(f"`counts` (shape {list(more.shape)}) must be {list(self._open.shape)}, layers by experts")
        if (more > _TOP - self._open).any():
            layer, expert = (int(i) for i in np.argwhere(more > _TOP - self._open)[0])
            raise OverflowError(f"the count of layer {layer}, expert {expert} passes 2**63; end windows by `roll()`")
        self._open += more

    def roll(self) -> None:
        """End the open window and start another."""
        self._ring[self._ended % len(self._ring)] = self._open
        self._open[:] = 0
        self._ended += 1

    def windows(self) -> IntArray:
        """Copy the ended windows, oldest first: int64 `[0..T, L, E]`."""
        if self._ended <= len(self._ring):
            return self._ring[: self._ended].copy()
        return np.roll(self._ring, -(self._ended % len(self._ring)), axis=0)


class TraceFault(NamedTuple):
    """A fault in a recording that makes it unfit for placement."""

    kind: str
    """not_finite, negative, no_load, empty_window or first_experts."""
    layers: tuple[int, ...]
    """Layers (rows) with the fault."""
    text: str
    """Fault and remedy in words."""


def check_trace(load: ArrayLike, *, top_k: int | None = None) -> tuple[TraceFault, ...]:
    """Find faults in a recording.

    Looks for values that are not counts, for layers and windows without load, and for layers with load on the first
    top-k experts alone, as a recorder writes that saw a placeholder in place of the router's answer.

    Args:
        load: `[L, E]` or `[T, L, E]`, any numbers.
        top_k: Experts per token where known; else any number up to a quarter of E.

    Returns:
        Faults, worst first; empty if there are none. No number raises.

    Raises:
        ValueError: Wrong number of dimensions, or no expert.

    Example:
        >>> [fault.kind for fault in check_trace([[9, 9, 0, 0, 0, 0, 0, 0], [1, 0, 3, 4, 1, 1, 2, 5]], top_k=2)]
        ['first_experts']
    """
    array = to_numpy(load, "load")
    if array.ndim not in (2, 3) or array.dtype.kind not in "iufb" or array.shape[-1] == 0:
        raise ValueError(
            f"`load` (shape {list(array.shape)}, dtype {array.dtype}) must be numbers [L, E] or [T, L, E], with one "
            "expert or more"
        )
    windows = (array[None] if array.ndim == 2 else array).astype(np.float64)
    finite = np.isfinite(windows)
    found = [
        _values(
            "not_finite", ~finite, windows, "is not a number; correct the recorder, or put 0 where nothing is known"
        ),
        _values("negative", finite & (windows < 0), windows, "is negative; a narrow counter has wrapped"),
    ]
    clean = np.where(finite & (windows > 0), windows, 0.0)
    found += [_first_experts(clean, top_k), *_without_load(clean)]
    return tuple(fault for fault in found if fault is not None)


def _values(kind: str, bad: npt.NDArray[np.bool_], load: FloatArray, what: str) -> TraceFault | None:
    if not bad.any():
        return None
    window, layer, expert = (int(i) for i in np.argwhere(bad)[0])
    more = f"; {int(bad.sum()) - 1} more" if bad.sum() > 1 else ""
    text = f"{load[window, layer, expert]} at window {window}, layer {layer}, expert {expert}{more} {what}"
    return TraceFault(kind, _rows(np.asarray(bad.any(axis=(0, 2)))), text)


def _first_experts(load: FloatArray, top_k: int | None) -> TraceFault | None:
    experts = load.shape[2]
    used = load.sum(axis=0) > 0
    width = used.sum(axis=1)
    # All that is used is a prefix exactly when the last used expert is number `width`.
    last = experts - np.argmax(used[:, ::-1], axis=1)
    suspect = (width > 0) & (last == width) & (width <= (experts // 4 if top_k is None else min(top_k, experts - 1)))
    if not suspect.any():
        return None
    rows = _rows(suspect)
    text = (
        f"{_named(rows)} put all load on the first {int(width[rows[0]])} of {experts} experts: the recorder saw a "
        "placeholder, not the router; leave these layers out or record again"
    )
    return TraceFault("first_experts", rows, text)


def _without_load(load: FloatArray) -> list[TraceFault]:
    found = []
    rows = _rows(load.sum(axis=(0, 2)) == 0)
    if rows:
        text = f"{_named(rows)} have no load in any window; they keep their layout (dense layers have none)"
        found.append(TraceFault("no_load", rows, text))
    empty = _rows(load.sum(axis=(1, 2)) == 0)
    if empty and len(empty) < len(load):
        text = f"{len(empty)} of {len(load)} windows have no load (first: {empty[0]}); leave them out"
        found.append(TraceFault("empty_window", (), text))
    return found


def _rows(mask: npt.NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(np.flatnonzero(mask).tolist())


def _named(rows: tuple[int, ...]) -> str:
    """`layers 0, 4 and 7 more`."""
    shown = ", ".join(map(str, rows[:6]))
    return f"layers {shown}" + (f" and {len(rows) - 6} more" if len(rows) > 6 else "")
