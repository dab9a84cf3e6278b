"""Tables in files: CSV by the standard library, parquet by pyarrow; long or wide, as `eplb_core.frames` reads them."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from eplb_core._extras import needed
from eplb_core.files.reading import MAX_BYTES, AnyArray, PathLike, bad_file, csv_delimiter, open_regular, reading
from eplb_core.files.trace_file import Reading, trace_of_array
from eplb_core.frames import columns_of, load_of_table, window_column
from eplb_core.trace import Trace

_WANTED = "a table with columns window, layer, expert and tokens, or with a column per expert"
_MEND = 'name its columns by Trace.from_frame(df, window="..", layer="..", expert="..", tokens="..")'
_BATCH = 1 << 16
"""Rows that are text at one time."""


def trace_of_csv(path: PathLike, told: Reading) -> Trace:
    """The trace in a CSV: a table with a header, or numbers alone, `[L, E]`."""
    with open_regular(path, MAX_BYTES) as file, reading(path, _WANTED, _MEND):
        text = io.TextIOWrapper(file, "utf-8-sig", newline="")
        delimiter = csv_delimiter(text.read(4096)) or ","
        text.seek(0)
        rows = (row for row in csv.reader(text, delimiter=delimiter) if row)
        header = next(rows)
        if all(_is_number(cell) for cell in header):
            array = np.stack(_columns(itertools.chain([header], rows), len(header)), axis=1)
            return trace_of_array(path, array, "", told)
        columns = dict(zip(header, _columns(rows, len(header)), strict=True))
        if len(columns) < len(header):
            raise ValueError("two columns of one name")
        return _trace_of_table(path, columns, "csv", told)


def stream_csv(path: PathLike) -> tuple[Callable[[], Iterator[AnyArray]], int]:
    """Windows `[L, E]` of a CSV whose rows are in order of windows, read anew at each call; and how many there are.

    Reads the file once to learn its layers and experts. Memory: the rows of one window.
    """
    layers: set[int] = set()
    experts, seen = 0, set()
    for name, columns in _windows(path):
        if name in seen:
            raise bad_file(path, "rows in order of windows", f"window {name} in two places", "sort the rows by window")
        seen.add(name)
        with reading(path, _WANTED, _MEND):
            read = load_of_table(columns)
        layers.update(read.layer_ids or (0,))
        experts = max(experts, read.load.shape[2])
    rows = sorted(layers)

    def windows() -> Iterator[AnyArray]:
        for _, columns in _windows(path):
            with reading(path, _WANTED, _MEND):
                read = load_of_table(columns)
                load = np.zeros((len(rows), experts), read.load.dtype)
                load[np.searchsorted(rows, read.layer_ids or (0,)), : read.load.shape[2]] = read.load[0]
            yield load

    return windows, len(seen)


def _windows(path: PathLike) -> Iterator[tuple[str, dict[str, AnyArray]]]:
    """The rows of each window of a CSV, in the order of the file."""
    with open_regular(path, sys.maxsize) as file, reading(path, _WANTED, _MEND):
        text = io.TextIOWrapper(file, "utf-8-sig", newline="")
        delimiter = csv_delimiter(text.read(4096)) or ","
        text.seek(0)
        rows = (row for row in csv.reader(text, delimiter=delimiter) if row)
        header = next(rows)
        column = window_column(dict.fromkeys(header, np.empty(0)))
        if column is None:
            raise ValueError(f"no column of windows among {', '.join(header)}")
        at = header.index(column)
        for name, group in itertools.groupby(rows, key=lambda row: row[at] if at < len(row) else ""):
            yield name, dict(zip(header, _columns(group, len(header)), strict=True))


def trace_of_parquet(path: PathLike, told: Reading) -> Trace:
    """The trace in a parquet file; reads it whole."""
    parquet = needed("pyarrow.parquet", "parquet", f"reading {os.fspath(path)!r}")
    with open_regular(path, MAX_BYTES) as file, reading(path, _WANTED, _MEND):
        about = parquet.ParquetFile(file)
        held = sum(about.metadata.row_group(group).total_byte_size for group in range(about.metadata.num_row_groups))
        if max(held, about.metadata.num_rows * about.metadata.num_columns) > MAX_BYTES:
            raise ValueError(f"{about.metadata.num_rows:,} rows, {held:,} bytes")
        return _trace_of_table(path, columns_of(about.read()), "parquet", told)


def _columns(rows: Iterator[list[str]], count: int) -> list[AnyArray]:
    """Columns of numbers or texts, read by batches."""
    parts: list[list[AnyArray]] = [[] for _ in range(count)]
    done = 0
    while batch := list(itertools.islice(rows, _BATCH)):
        for number, row in enumerate(batch, done + 1):
            if len(row) != count:
                raise ValueError(f"{len(row)} cells in row {number} under {count} columns")
        for part, cells in zip(parts, zip(*batch, strict=True), strict=True):
            part.append(_typed(cells))
        done += len(batch)
    if not done:
        raise ValueError("no row")
    return [np.concatenate(part) for part in parts]


def _typed(cells: Sequence[str]) -> AnyArray:
    texts = np.array(cells)
    for kind in (np.int64, np.float64):
        with contextlib.suppress(ValueError, OverflowError):
            return texts.astype(kind)
    return texts


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _trace_of_table(path: PathLike, columns: dict[str, Any], format: str, told: Reading) -> Trace:
    for name in ("", "__index_level_0__", "Unnamed: 0"):  # rows counted by pandas
        if name in columns and np.array_equal(columns[name], np.arange(len(columns[name]))):
            del columns[name]
    read = load_of_table(columns, num_experts=told.num_experts)
    return Trace(
        read.load,
        read.windows,
        read.layer_ids,
        path=os.fspath(path),
        format=format,
        source="a table",
        notes=(read.note,),
        holds="load" if told.holds == "load" else "",
    )
