"""`Trace`: recorded windows of tokens per expert, with their metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from eplb_core._arrays import ArrayLike, FloatArray, IntArray, check_load, check_word, read_only, to_list, to_numpy
from eplb_core.contents import check_is_load
from eplb_core.load import TraceFault, check_counts, check_trace


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Hold windows of expert load and their metadata. Immutable; an object that exists is valid.

    Args:
        load: `[T, L, E]` or `[L, E]` (one window), integers or floats, finite and 0 or more. Copied.
        holds: "load" takes any numbers for a load; else what looks like top-k ids or a map, or has its axes in another
            order, is refused.

    Raises:
        ValueError: A value is negative, NaN or infinite, a shape is wrong, a sequence has the wrong length, or the
            numbers are no load; the text says which call reads them.
        TypeError: Not numbers, a data frame, or a masked array.

    Example:
        >>> Trace(np.array([[3, 0, 5]])).load.shape
        (1, 1, 3)
    """

    load: IntArray | FloatArray
    """Tokens routed to each logical expert, `[T, L, E]`, int64 or float64, read-only."""
    windows: tuple[str, ...] = ()
    """A name for each window, `[T]`, or empty."""
    layer_ids: tuple[int, ...] = ()
    """The model's number of each layer (row), `[L]`, or empty where rows are all that is known."""
    top_k: int | None = None
    """Experts per token, where known."""
    source: str = ""
    """Origin of the numbers, in words."""
    path: str = ""
    """File that was read, or empty."""
    format: str = "memory"
    """Format of the file."""
    notes: tuple[str, ...] = ()
    """Changes made by reading: rows left out, order restored, counts folded; and what was taken for what."""
    holds: str = ""
    """"load" where that is known, so that it is not asked again; else empty."""

    def __post_init__(self) -> None:
        check_word(self.holds, "holds", ("", "load"))
        load = check_trace_load(self.load, self.holds)
        object.__setattr__(self, "load", read_only(load))
        for name, length in (("windows", load.shape[0]), ("layer_ids", load.shape[1])):
            given = tuple(to_list(getattr(self, name), name))
            object.__setattr__(self, name, given)
            if given and len(given) != length:
                raise ValueError(f"`{name}` ({len(given)} entries) must be empty or have {length}, as `load` has")
        object.__setattr__(self, "notes", tuple(to_list(self.notes, "notes")))

    @property
    def num_windows(self) -> int:
        """Windows T."""
        return int(self.load.shape[0])

    @property
    def num_layers(self) -> int:
        """Layers L."""
        return int(self.load.shape[1])

    @property
    def num_experts(self) -> int:
        """Logical experts E."""
        return int(self.load.shape[2])

    @property
    def faults(self) -> tuple[TraceFault, ...]:
        """Faults that `check_trace` finds."""
        return check_trace(self.load, top_k=self.top_k)

    def __repr__(self) -> str:
        return f"Trace(load=[{self.num_windows}, {self.num_layers}, {self.num_experts}], source={self.source!r})"


def check_trace_load(value: ArrayLike, holds: str = "") -> IntArray | FloatArray:
    """Copy `[T, L, E]` to int64 (integers) or float64 (floats); `[L, E]` becomes one window."""
    array = to_numpy(value, "load")
    load: IntArray | FloatArray
    if array.dtype.kind in "iu" and array.ndim in (2, 3):
        load = check_counts(array, "load") if not array.size or array.min() >= 0 else check_load(array, "load", (2, 3))
    else:
        load = check_load(array, "load", (2, 3)).copy()
    if load.shape[-1] == 0:
        raise ValueError(f"`load` (shape {list(load.shape)}) must have one expert or more")
    if not holds and load.size:
        check_is_load(load, "load")
    shape = (1, *load.shape) if load.ndim == 2 else load.shape
    return cast("IntArray | FloatArray", np.ascontiguousarray(load.reshape(shape)))
