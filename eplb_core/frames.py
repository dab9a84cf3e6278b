"""Tables in and out: the load `[T, L, E]` that columns of window, layer, expert and tokens make, and results as frames.

A table that comes in is a dict of columns, or a frame of pandas, polars or pyarrow, which is asked for its columns one
by one: none of these packages is needed.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from eplb_core._arrays import FloatArray, IntArray, check_int, check_load, check_made
from eplb_core._extras import needed
from eplb_core._text import counted, plain, quoted

Columns: TypeAlias = Mapping[str, npt.NDArray[Any]]

_NAMES = {
    "window": "window window_id window_index step iteration forward_pass forward_pass_id pass",
    "layer": "layer layer_id layer_index layer_idx moe_layer",
    "expert": "expert expert_id expert_index expert_idx logical_expert logical_expert_id",
    "tokens": "tokens num_tokens token_count count counts load expert_load",
}
_MISSING = ("None", "nan", "NaT", "<NA>")
_WIDE = re.compile(r"(?:(?:logical_)?expert[_ ]?|e)?(\d+)")


class Table:
    """A result that is rows of named columns, and so a data frame of pandas or polars."""

    __slots__ = ()

    def _columns(self) -> Columns:
        """Columns of one length by name, in order."""
        raise NotImplementedError  # pragma: no cover  each result has its own

    def to_pandas(self) -> Any:
        """Return the rows as a pandas DataFrame; a copy.

        Raises:
            ImportError: pandas is not installed.
        """
        return pandas_frame(self._columns())

    def to_polars(self) -> Any:
        """Return the rows as a polars DataFrame; a copy.

        Raises:
            ImportError: polars is not installed.
        """
        return polars_frame(self._columns())


def pandas_frame(columns: Columns) -> Any:
    """Make a pandas DataFrame of columns."""
    return _frame("pandas", columns)


def polars_frame(columns: Columns) -> Any:
    """Make a polars DataFrame of columns."""
    return _frame("polars", columns)


def _frame(package: str, columns: Columns) -> Any:
    try:
        module = importlib.import_module(package)
    except ImportError:
        raise ImportError(f"`to_{package}` needs {package}: pip install {package}") from None
    # Lists of text: polars would keep an array of objects as such.
    data = {name: array.tolist() if array.dtype.kind in "OUS" else np.array(array) for name, array in columns.items()}
    return module.DataFrame(data)


class TableLoad(NamedTuple):
    """Load that a table holds."""

    load: IntArray | FloatArray
    """`[T, L, E]`."""
    windows: tuple[str, ...]
    """Name of each window, or empty where the table has no column of windows."""
    layer_ids: tuple[int, ...]
    """What the column of layers says, ascending, or empty."""
    note: str
    """How the columns were understood."""


def columns_of(frame: object) -> dict[str, npt.NDArray[Any]]:
    """The columns of a dict or frame, as numpy arrays by name.

    Raises:
        TypeError: No table, or two columns have one name.
        ModuleNotFoundError: A frame of another package, which pyarrow reads.
    """
    table: Any = frame
    if not isinstance(table, Mapping) and not hasattr(table, "columns") and not hasattr(table, "column_names"):
        if not hasattr(table, "__arrow_c_stream__"):
            raise TypeError(
                f"`frame` ({type(frame).__name__}) must be a data frame, an arrow table, or a dict of columns"
            )
        table = needed("pyarrow", "parquet", "reading this frame").table(table)
    names = list(table) if isinstance(table, Mapping) else list(getattr(table, "column_names", table.columns))
    if len({str(name) for name in names}) < len(names):
        raise TypeError(f"`frame` has two columns of one name: {_listed(names)}")
    found = {}
    for name in names:
        column: Any = table[name]
        found[str(name)] = np.asarray(column.to_numpy() if hasattr(column, "to_numpy") else column)
    lengths = {len(column) if column.ndim == 1 else -1 for column in found.values()}
    if len(lengths) > 1 or -1 in lengths:
        raise ValueError("`frame` must have columns of one length, one value a row")
    return found


def load_of_table(
    columns: Columns,
    *,
    window: str | None = None,
    layer: str | None = None,
    expert: str | None = None,
    tokens: str | Sequence[str] | None = None,
    num_experts: int | None = None,
) -> TableLoad:
    """Make the load of a table: long (a row per expert) or wide (a column per expert).

    Args:
        columns: Columns by name, of one length.
        window: Column of the windows. Default for this and the next: the column of such a name, if there is one.
        layer: Column of the model's layer numbers.
        expert: Column of expert ids, of a long table.
        tokens: Column of counts, of a long table; of a wide one the columns of expert 0, 1, ..
        num_experts: Logical experts E of a long table; default: the largest id and one more.

    Raises:
        ValueError: Columns are missing, unknown or ambiguous; a row is there twice; counts are no counts.
        TypeError: Layers or experts are no integers.
    """
    names = {
        "window": _named(columns, "window", window),
        "layer": _named(columns, "layer", layer),
        "expert": _named(columns, "expert", expert),
    }
    wide = _wide_columns(columns, tokens, names)
    counts = wide if wide is not None else [_named(columns, "tokens", tokens if isinstance(tokens, str) else None)]
    if wide is None and (names["expert"] is None or counts[0] is None):
        missing = "expert" if names["expert"] is None else "tokens"
        raise ValueError(
            f"no column is known as `{missing}` among {_listed(columns)}; name it, as in "
            f'from_frame(df, window="..", layer="..", expert="..", tokens="..")'
        )
    used = {name for name in (*names.values(), *counts) if name is not None}
    if left := [name for name in columns if name not in used]:
        raise ValueError(
            f"columns {_listed(left)} are no `window`, `layer`, `expert` or `tokens`: drop them, or name all that count"
        )
    rows = len(columns[next(iter(used))])
    if not rows:
        raise ValueError("the table must have one row or more")
    windows, at_window = _in_order(columns, names["window"], rows)
    layers, at_layer = _whole(columns, names["layer"], rows)
    layer_ids, at_layer = np.unique(at_layer, return_inverse=True) if layers else (np.zeros(1, np.int64), at_layer)
    shape = (max(len(windows), 1), len(layer_ids))
    if wide is not None:
        values = np.stack([_counts(columns[name], name) for name in wide], axis=1)
        load = _placed(values, (at_window, at_layer), (*shape, len(wide)), "window and layer")
        how = f"a wide table: {counted(len(wide), 'column')} of experts"
    else:
        _, at_expert = _whole(columns, names["expert"], rows)
        experts = int(at_expert.max()) + 1 if num_experts is None else check_int(num_experts, "num_experts", 1)
        if at_expert.max() >= experts:
            raise ValueError(f"`{names['expert']}` (={at_expert.max()}) must be below {experts} experts")
        values = _counts(columns[str(counts[0])], str(counts[0]))
        load = _placed(values, (at_window, at_layer, at_expert), (*shape, experts), "window, layer and expert")
        assumed = "" if num_experts is not None else ", the largest id and one more"
        how = f"a long table: experts in `{names['expert']}` ({experts}{assumed}), tokens in `{counts[0]}`"
    said = ", ".join(f"{what}s in `{name}`" for what, name in names.items() if name is not None and what != "expert")
    note = f"{rows:,} rows are {how}{f'; {said}' if said else ''}; [T, L, E] = {list(load.shape)}"
    return TableLoad(load, windows, tuple(layer_ids.tolist()) if layers else (), note)


def window_column(columns: Columns) -> str | None:
    """The column of windows, guessed by its name."""
    return _named(columns, "window", None)


def _named(columns: Columns, what: str, given: str | None) -> str | None:
    """The column that is `given`, or the only one that has one of the usual names."""
    if given is not None:
        if not _is_one(given, columns):
            raise ValueError(f"`{what}` (={quoted(given)}) must be one of the columns {_listed(columns)}")
        return given
    known = [name for name in columns if re.sub(r"\W+", "_", name.strip().lower()) in _NAMES[what].split()]
    if len(known) > 1:
        raise ValueError(
            f"columns {_listed(known)} could each be the {what}: name one by `{what}=`, and drop the others"
        )
    return known[0] if known else None


def _is_one(name: object, columns: Columns) -> bool:
    """Is it the name of a column?"""
    return isinstance(name, str) and name in columns


def _wide_columns(
    columns: Columns, tokens: str | Sequence[str] | None, names: Mapping[str, str | None]
) -> list[str] | None:
    """The columns of the experts in order, or None if the table is long."""
    if tokens is not None and not isinstance(tokens, str):
        try:
            number = len(tokens)
        except TypeError:
            raise TypeError(f"`tokens` ({type(tokens).__name__}) must be a column's name, or several") from None
        if not 1 <= number <= len(columns):
            raise ValueError(f"`tokens` ({number} names) must be one or more of the columns {_listed(columns)}")
        given = list(tokens)
        if missing := [name for name in given if not _is_one(name, columns)]:
            raise ValueError(f"`tokens` names {_listed(missing)}, which are not among the columns {_listed(columns)}")
        return given
    if tokens is not None or names["expert"] is not None:
        return None
    found: dict[int, str] = {}
    for name in columns:
        match = None if name in names.values() else _WIDE.fullmatch(name.strip().lower())
        if match is not None:
            found[int(match[1])] = name
    if not found:
        return None
    first = min(found)
    if first > 0 or sorted(found) != list(range(len(found))):
        gap = next(number for number in range(len(found) + 1) if number not in found)
        raise ValueError(
            f"columns of experts must be 0, 1, 2, ..; {gap} is missing: name them in order by `tokens=[..]`"
        )
    return [found[number] for number in range(len(found))]


def _in_order(columns: Columns, name: str | None, rows: int) -> tuple[tuple[str, ...], IntArray]:
    """Names of windows: numbers and times ascending, others as they first appear; and the window of each row."""
    if name is None:
        return (), np.zeros(rows, np.int64)
    column = columns[name]
    if column.dtype.kind == "O":
        missing = sum(not isinstance(value, str) and str(value) in _MISSING for value in column)
    else:
        missing = int((column != column).sum())  # NaN
    if missing:
        raise ValueError(f"`{name}` must say the window of every row; {missing} are missing")
    values, first, at = np.unique(
        column.astype(str) if column.dtype.kind == "O" else column, return_index=True, return_inverse=True
    )
    if column.dtype.kind in "OUS":
        order = np.argsort(first, kind="stable")
        values, at = values[order], np.argsort(order)[at]
    if column.dtype.kind == "M":
        values = np.datetime_as_string(values, unit="auto")  # `tolist` would make numbers of nanoseconds
    return tuple(str(value) for value in values.tolist()), at.astype(np.int64)


def _whole(columns: Columns, name: str | None, rows: int) -> tuple[bool, IntArray]:
    """Layer or expert ids of each row."""
    if name is None:
        return False, np.zeros(rows, np.int64)
    column = columns[name]
    if column.dtype.kind == "f" and np.isfinite(column).all() and (column == np.floor(column)).all():
        column = column.astype(np.int64)
    if column.dtype.kind not in "iu" or column.min() < 0:
        raise TypeError(f"`{name}` ({column.dtype}) must be ids: whole numbers of 0 or more in every row")
    return True, column.astype(np.int64)


def _counts(column: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
    return column if column.dtype.kind in "iu" and column.min() >= 0 else check_load(column[None, :], name, (2,))[0]


def _placed(
    values: npt.NDArray[Any], at: tuple[IntArray, ...], shape: tuple[int, ...], what: str
) -> IntArray | FloatArray:
    """Each row where it belongs; what no row says is 0."""
    check_made(windows=shape[0], layers=shape[1], experts=shape[2])
    places = np.ravel_multi_index(at, shape[: len(at)])
    ordered = np.sort(places)
    if len(twice := ordered[1:][np.diff(ordered) == 0]):
        index = [int(i) for i in np.unravel_index(int(twice[0]), shape[: len(at)])]
        raise ValueError(
            f"a row is there twice for the same {what} (first: {index}): name the column that tells rows apart, or add "
            "them up; where rows are layers, give the numbers as an array"
        )
    kind = np.int64 if values.dtype.kind in "iu" else np.float64
    load = np.zeros((int(np.prod(shape[: len(at)])), *values.shape[1:]), dtype=kind)
    load[places] = values
    made: IntArray | FloatArray = load.reshape(shape)
    return made


def _listed(names: Any) -> str:
    given = [name if isinstance(name, str) else quoted(name) for name in names]
    return plain(", ".join(given[:12]) + (f" and {len(given) - 12} more" if len(given) > 12 else ""), 200)
