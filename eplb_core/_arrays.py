"""Convert arguments (lists, numpy, torch on any device) to checked numpy arrays and numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from eplb_core._text import plain, quoted

IntArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
ArrayLike: TypeAlias = npt.ArrayLike
A = TypeVar("A", bound=npt.NDArray[Any])
T = TypeVar("T")

MAX_NUMBERS = 1 << 34
"""Most numbers in one array argument: a view can claim any size until it is copied."""
MAX_MADE = 1 << 29
"""Most numbers that sizes may ask for: 4 GiB of int64; real maps have 17,000 and real windows 100,000,000."""


def to_numpy(value: object, name: str) -> npt.NDArray[Any]:
    """View `value`, which the caller calls `name`, as a numpy array; a CUDA tensor costs one copy to the host.

    Refused are data frames, whose columns numpy would take for one axis, and masked arrays, whose mask it would drop.
    """
    names: Any = value if isinstance(value, Mapping) else getattr(getattr(value, "dtype", None), "names", None)
    if is_frame(value) or names:
        names = names or getattr(value, "column_names", getattr(value, "columns", ()))
        columns = plain(", ".join(map(str, names)), 80)
        raise TypeError(f"`{name}` (a frame with columns {columns}) must be an array; Trace.from_frame reads frames")
    if np.ma.is_masked(value):
        masked = int(np.count_nonzero(getattr(value, "mask", True)))
        raise TypeError(f"`{name}` ({masked:,} values masked) must be a plain array; put numbers there by `.filled(0)`")
    try:
        if hasattr(value, "detach"):
            tensor: Any = value
            tensor = tensor.detach().cpu()
            if str(tensor.dtype) == "torch.bfloat16":
                tensor = tensor.float()
            value = tensor.numpy()
        array = np.asarray(value)
    except Exception as error:  # ragged lists, sparse tensors, a stranger's own array
        kind = ValueError if isinstance(error, (ValueError, OverflowError)) else TypeError
        why = plain(str(error))
        raise kind(f"`{name}` ({type(value).__name__}) must be one array with rows of equal length: {why}") from error
    if array.size > MAX_NUMBERS:
        raise ValueError(f"`{name}` (shape {list(array.shape)}) must have at most {MAX_NUMBERS:,} numbers")
    return array


def is_frame(value: object) -> bool:
    """Is it a data frame or table: of pandas, polars, pyarrow?"""
    named = hasattr(value, "column_names") or hasattr(value, "columns")
    return named and (hasattr(value, "__dataframe__") or hasattr(value, "__arrow_c_stream__") or hasattr(value, "iloc"))


def to_reals(value: object, name: str) -> FloatArray:
    """Convert to float64, a view where it is that already; raise TypeError for text, complex numbers and objects."""
    array = to_numpy(value, name)
    if array.dtype.kind not in "iufb":
        raise TypeError(f"`{name}` (dtype {array.dtype}) must be integers or floats")
    return np.asarray(array, dtype=np.float64)


def to_ids(value: object, name: str) -> IntArray:
    """Copy ids into a C-ordered int64 array; raise TypeError for unsigned ids, which cannot be -1."""
    array = to_numpy(value, name)
    if array.size == 0 and array.dtype == np.float64:
        array = array.astype(np.int64)  # an empty list has no dtype of its own
    if not np.issubdtype(array.dtype, np.signedinteger):
        raise TypeError(f"`{name}` (dtype {array.dtype}) must be signed integers; cast it")
    return np.array(array, dtype=np.int64, order="C", copy=True)


def read_only(array: A) -> A:
    """Make an array that others will hold read-only."""
    array.flags.writeable = False
    return array


def check_load(value: object, name: str, ndims: tuple[int, ...], *, outer: str = "window") -> FloatArray:
    """Make a load float64 and read-only; NaN, infinity, negatives and wrong shapes raise and say where.

    Args:
        value: Array or tensor `[..., L, E]` of token counts, any real dtype.
        name: How the caller calls it, for messages.
        ndims: The numbers of dimensions that are allowed.
        outer: What the first of three dimensions counts.
    """
    array = to_numpy(value, name)
    if array.ndim not in ndims:
        shapes = " or ".join({1: "[E]", 2: "[L, E]", 3: "[T, L, E]"}[n] for n in ndims)
        raise ValueError(f"`{name}` (shape {list(array.shape)}) must be {shapes}")
    if not (np.issubdtype(array.dtype, np.integer) or np.issubdtype(array.dtype, np.floating)):
        raise TypeError(f"`{name}` (dtype {array.dtype}) must be integers or floats")
    # Always read-only and aligned: an array of the caller's own is safe, and kernels are compiled for one kind.
    load: FloatArray = read_only(np.require(array, np.float64, ["C", "A"]).view())
    # One pass in the common case: a sum is finite and a minimum is not negative, or the slow path says what is wrong.
    if load.size and not (load.min() >= 0.0 and load.max() < np.inf):
        _raise_bad_load(load, name, outer)
    return load


def _raise_bad_load(load: FloatArray, name: str, outer: str) -> None:
    bad = ~((load >= 0.0) & (load < np.inf))
    places = np.argwhere(bad)
    first = places[0]
    words = (outer, "layer", "expert")[3 - load.ndim :]
    where = ", ".join(f"{word} {index}" for word, index in zip(words, first, strict=True))
    more = f"; {len(places) - 1} more" if len(places) > 1 else ""
    raise ValueError(
        f"`{name}` (={load[tuple(first)]}) must be finite and not negative at {where}{more}; "
        "correct the recording, or put 0 where nothing is known"
    )


def add_up(windows: IntArray | FloatArray) -> IntArray | FloatArray:
    """Sum loads `[T, ...]` over windows: int64 for integers where it holds the sum, else float64."""
    if windows.dtype == np.int64 and int(windows.max(initial=0)) * len(windows) >= 2**63:
        windows = windows.astype(np.float64)
    total: IntArray | FloatArray = windows.sum(axis=0)
    return total


def check_int(value: object, name: str, at_least: int) -> int:
    """Return an integer argument; raise TypeError for bool and float."""
    number = _whole(value, name)
    if number < at_least:
        raise ValueError(f"`{name}` (={quoted(number)}) must be at least {at_least}")
    if number.bit_length() > 128:  # messages and floats have no room for thousands of digits
        raise ValueError(f"`{name}` (={quoted(number)}) must have at most 128 bits")
    return number


def check_id(value: object, name: str, size: int) -> int:
    """Return an integer argument in `[0, size)`; raise IndexError for others."""
    number = _whole(value, name)
    if not 0 <= number < size:
        raise IndexError(f"`{name}` (={quoted(number)}) must be in [0, {size})")
    return number


def _whole(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"`{name}` (={quoted(value)}) must be an integer")
    return int(value)


def check_kind(value: object, name: str, kind: type[T]) -> T:
    """Return an argument that must be an instance of `kind`."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIi" else "a"
        mend = "; give its `layout`" if isinstance(getattr(value, "layout", None), kind) else ""
        raise TypeError(f"`{name}` (={type(value).__name__}) must be {article} {kind.__name__}{mend}")
    return value


def check_word(value: object, name: str, words: Iterable[str], other: str = "") -> str:
    """Return an argument that must be one of `words`; `other` says what else may be given."""
    known = list(words)
    if not isinstance(value, str) or value not in known:
        listed = " or ".join(map(repr, known)) if len(known) == 2 else f"one of {', '.join(known)}"
        raise ValueError(f"`{name}` (={quoted(value, 80)}) must be {listed}{other}")
    return value


def check_flag(value: object, name: str) -> bool:
    """Return an argument that must be True or False, of Python or numpy."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"`{name}` (={quoted(value, 80)}) must be True or False")
    return bool(value)


def check_call(value: object, name: str) -> None:
    """Raise TypeError unless an optional argument is None or can be called."""
    if value is not None and not callable(value):
        raise TypeError(f"`{name}` (={quoted(value, 80)}) must be a function or None")


def to_list(value: Iterable[T], name: str) -> list[T]:
    """Convert an iterable to a list; raise TypeError naming the argument otherwise."""
    try:
        return list(value)
    except TypeError as error:
        raise TypeError(f"`{name}` (={quoted(value, 80)}) must be a list") from error


def check_names(value: Iterable[str], name: str) -> tuple[str, ...]:
    """Names or patterns, as a tuple; one text is no list of them."""
    names = to_list(value, name)
    if isinstance(value, str) or not all(isinstance(each, str) for each in names):
        raise TypeError(f"`{name}` (={quoted(value, 80)}) must be a list of names")
    return tuple(names)


def check_made(**sizes: int) -> None:
    """Raise ValueError for sizes whose product is absurd, before memory is allocated."""
    if math.prod(sizes.values()) > MAX_MADE:
        listed = ", ".join(f"`{name}` (={quoted(size, 40)})" for name, size in sizes.items())
        raise ValueError(f"{listed}: the product must be at most {MAX_MADE:,}")


def check_real(
    value: object, name: str, *, above: float | None = None, at_least: float | None = None, at_most: float | None = None
) -> float:
    """Return a finite real argument; raise TypeError for bool."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"`{name}` (={quoted(value)}) must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = np.inf
    if not np.isfinite(number):
        raise ValueError(f"`{name}` (={number}) must be finite")
    if above is not None and not number > above:
        raise ValueError(f"`{name}` (={number}) must be above {above:g}")
    if at_least is not None and not number >= at_least:
        raise ValueError(f"`{name}` (={number}) must be at least {at_least:g}")
    if at_most is not None and not number <= at_most:
        raise ValueError(f"`{name}` (={number}) must be at most {at_most:g}")
    return number
