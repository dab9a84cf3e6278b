"""Where the load of a replay comes from: windows in memory, windows that are read bit by bit, tokens."""

from __future__ import annotations

import itertools
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, NamedTuple, TypeAlias, cast

import numpy as np
from numpy.lib import format as npy

from eplb_core._arrays import ArrayLike, FloatArray, IntArray, check_int, check_kind, check_made, read_only
from eplb_core.contents import to_tokens
from eplb_core.files.reading import MAX_BYTES, PathLike, bad_file, is_csv, open_regular, reading
from eplb_core.files.tables import stream_csv
from eplb_core.load import count_topk
from eplb_core.trace import Trace, check_trace_load, load_html


class Block(NamedTuple):
    """Consecutive windows of a replay."""

    load: IntArray | FloatArray
    """`[t, L, E]`, int64 or float64, checked."""
    by_source: Callable[[int], FloatArray] | None = None
    """From a number of ranks to what each sends, `[t, R, L, E]`; None where tokens are not known."""
    ids: IntArray | None = None
    """Top-k ids of each window's tokens, `[t, tokens, L, K]`, or None."""


def rank_starts(tokens: int, ranks: int) -> IntArray:
    """Where the tokens of each rank begin among those of a window, and where the last one's end `[R + 1]`."""
    return -(-np.arange(ranks + 1) * tokens // ranks)


@dataclass(frozen=True, slots=True, eq=False)
class TokenTrace:
    """Top-k ids of tokens in order of time. Immutable; valid once it exists.

    A window is `window_tokens` tokens; an incomplete window at the end is dropped. Within a window each rank holds an
    equal, consecutive part of the tokens, as data parallel ranks do: token i of n is on rank i * R // n.

    Raises:
        IndexError: An id is below -1 or not below `num_experts`.
        ValueError: A shape does not fit, no window is whole, or most rows repeat an id, as loads do.

    Example:
        >>> TokenTrace([[[0, 2]], [[2, 1]], [[0, 1]]], num_experts=3, window_tokens=1).load[:, 0].tolist()
        [[1, 0, 1], [0, 1, 1], [1, 1, 0]]
    """

    topk_ids: IntArray
    """Logical ids `[N, L, K]`, integers of any kind; -1 is not counted."""
    num_experts: int
    """Logical experts E."""
    window_tokens: int
    """Tokens of a window."""

    def __post_init__(self) -> None:
        ids = to_tokens(self.topk_ids, "topk_ids")
        size = check_int(self.window_tokens, "window_tokens", 1)
        check_made(num_experts=check_int(self.num_experts, "num_experts", 1))
        if ids.ndim != 3 or len(ids) < size:
            raise ValueError(f"`topk_ids` (shape {list(ids.shape)}) must be [N, L, K] with {size} tokens or more")
        whole = ids[: len(ids) // size * size]
        count_topk(whole, self.num_experts)  # checks every id
        object.__setattr__(self, "topk_ids", read_only(np.array(whole)))

    @property
    def load(self) -> IntArray:
        """Tokens of each expert, int64 `[T, L, E]`."""
        return np.stack([count_topk(window, self.num_experts) for window in self._windows()])

    def blocks(self, size: int) -> Iterator[Block]:
        """Blocks of `size` windows."""
        ids = self._windows()
        for first in range(0, len(ids), size):
            part = ids[first : first + size]
            load = np.stack([count_topk(window, self.num_experts) for window in part])

            def by_source(ranks: int, part: IntArray = part) -> FloatArray:
                starts = rank_starts(self.window_tokens, ranks)
                return np.stack(
                    [
                        [count_topk(window[a:b], self.num_experts) for a, b in itertools.pairwise(starts)]
                        for window in part
                    ]
                ).astype(np.float64)

            yield Block(load, by_source, part)

    def _repr_html_(self) -> str:
        tokens, layers, width = self.topk_ids.shape
        size = f"{tokens:,} tokens in windows of {self.window_tokens:,}, {layers} layers, {self.num_experts} experts"
        return f"<div><b>TokenTrace</b>: {size}, top {width}{load_html(self.load)}</div>"

    def _windows(self) -> IntArray:
        windows = len(self.topk_ids) // self.window_tokens
        return self.topk_ids.reshape(windows, self.window_tokens, *self.topk_ids.shape[1:])


@dataclass(frozen=True, slots=True, eq=False)
class TraceStream:
    """Windows that are made or read while a replay goes on, so that only a stretch of them is in memory.

    Args:
        open: Called for each replay; gives windows `[L, E]` or blocks of them `[t, L, E]` in order of time.
        num_windows: How many there will be, where that is known: for progress.
        holds: "load" where that is known; else the first block is looked at, as `Trace` does.

    Example:
        >>> day = TraceStream(lambda: (np.full((1, 4), hour + 1) for hour in range(24)))
        >>> sum(len(block.load) for block in day.blocks(10))
        24
    """

    open: Callable[[], Iterable[ArrayLike]]
    """Starts from the first window at each call."""
    num_windows: int | None = None
    """Windows T, or None."""
    holds: str = ""
    """load, or empty."""

    def blocks(self, size: int) -> Iterator[Block]:
        """Blocks of `size` windows, the last one shorter."""
        kept: list[IntArray | FloatArray] = []
        count = 0
        for part in self.open():
            load = check_trace_load(part, "load" if kept else self.holds)
            if kept and kept[0].shape[1:] != load.shape[1:]:
                raise ValueError(
                    f"a block of the stream (shape {list(load.shape)}) must have {kept[0].shape[1]} layers and "
                    f"{kept[0].shape[2]} experts, as the others"
                )
            while len(load):
                kept.append(load[: size - count])
                count += len(kept[-1])
                load = load[len(kept[-1]) :]
                if count == size:
                    yield Block(joined(kept))
                    # An empty block remembers the shape.
                    kept, count = [kept[0][:0]], 0
        if count:
            yield Block(joined(kept))


def stream_trace(path: PathLike, *, key: str | None = None, windows: int = 16, holds: str = "") -> TraceStream:
    """Read a recorded load bit by bit, so that a file larger than memory can be replayed.

    Args:
        path: A .npy, or an .npz as `save_trace` writes it, of `[T, L, E]`; or a CSV with a column of windows, sorted by
            it, which is read once more before the replay.
        key: Array of an .npz. Default: `expert_load`.
        windows: Windows to read at a time.
        holds: "load" takes any numbers for a load; else the first windows are looked at, as `Trace` does.

    Returns:
        A stream for `simulate`; each replay reads the file once.

    Raises:
        FileFormatError: No such array, or of another kind; at the first replay, too.
        OSError: No such file, or no permission.

    Cost:
        Memory of `windows` windows and those that the policy sees.
    """
    count = check_int(windows, "windows", 1)
    if key is not None:
        check_kind(key, "key", str)
    if is_csv(path):
        open_csv, total = stream_csv(path)
        return TraceStream(open_csv, total, holds)
    with _member(path, key or "expert_load") as (file, wanted):
        shape, _ = _header(file, path, wanted, 1)

    def read() -> Iterator[IntArray | FloatArray]:
        with _member(path, key or "expert_load") as (file, wanted):
            shape, dtype = _header(file, path, wanted, count)
            for first in range(0, shape[0], count):
                with reading(path, wanted, _MEND):
                    block = (min(count, shape[0] - first), *shape[1:])
                    size = dtype.itemsize * shape[1] * shape[2]
                    raw = file.read(size * block[0])
                    if len(raw) < size * block[0]:
                        raise ValueError(f"the file ends in window {first + len(raw) // max(size, 1)}")
                    load = np.frombuffer(raw, dtype) if raw else np.empty(0, dtype)
                    load = check_trace_load(load.reshape(block), "load" if first else holds)
                yield load

    return TraceStream(read, int(shape[0]), "load")


_MEND = "save the trace again"


@contextmanager
def _member(path: PathLike, name: str) -> Iterator[tuple[IO[bytes], str]]:
    """The bytes of a .npy, or of one array of an .npz, and what they should be."""
    wanted = f"an array `{name}` [T, L, E] of numbers in C order"
    with open_regular(path, sys.maxsize) as file:
        if file.peek(2)[:2] != b"PK":
            yield file, wanted
            return
        with reading(path, wanted, _MEND):
            archive = zipfile.ZipFile(file)
            members = archive.namelist()
        if f"{name}.npy" not in members:
            raise bad_file(path, wanted, ", ".join(members) or "nothing", "name the array by `key`")
        with reading(path, wanted, _MEND):
            member = archive.open(f"{name}.npy")
        with member:
            yield member, wanted


def _header(file: IO[bytes], path: PathLike, wanted: str, count: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype; refuses what is no load, or too large to read `count` windows of it at a time."""
    with reading(path, wanted, _MEND):
        read_header = npy.read_array_header_1_0 if npy.read_magic(file) == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = read_header(file)
        if fortran or dtype.kind not in "iuf" or len(shape) != 3 or min(shape) < 0:
            raise ValueError(f"shape {list(shape)}, {dtype}")
        if dtype.itemsize * shape[1] * shape[2] * max(min(count, shape[0]), 1) > MAX_BYTES:
            raise ValueError(f"shape {list(shape)}: {count} windows take more than {MAX_BYTES:,} bytes")
        return shape, dtype


Source: TypeAlias = "Trace | TokenTrace | TraceStream | ArrayLike"


def blocks_of(trace: Source, size: int) -> tuple[Iterator[Block], int | None]:
    """Blocks of `size` windows, and how many windows there are, where that is known."""
    if isinstance(trace, TraceStream):
        return trace.blocks(size), trace.num_windows
    if isinstance(trace, TokenTrace):
        return trace.blocks(size), len(trace.topk_ids) // trace.window_tokens
    load = trace.load if isinstance(trace, Trace) else check_trace_load(trace)
    return (Block(load[first : first + size]) for first in range(0, len(load), size)), len(load)


def joined(parts: Sequence[IntArray | FloatArray]) -> IntArray | FloatArray:
    """All windows of several blocks."""
    return parts[0] if len(parts) == 1 else cast("IntArray | FloatArray", np.concatenate(parts))
