"""`Trace`: recorded windows of tokens per expert, with their metadata."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from eplb_core._arrays import ArrayLike, FloatArray, IntArray, check_load, check_word, read_only, to_list, to_numpy
from eplb_core._html import HTML_LAYERS, line_svg, table_html, words_html
from eplb_core.contents import check_is_load
from eplb_core.frames import Columns, Table, columns_of, load_of_table
from eplb_core.load import TraceFault, check_counts, check_trace
from eplb_core.metrics import mean_of_known


@dataclass(frozen=True, slots=True, eq=False)
class Trace(Table):
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

    @classmethod
    def from_frame(
        cls,
        frame: object,
        *,
        window: str | None = None,
        layer: str | None = None,
        expert: str | None = None,
        tokens: str | Sequence[str] | None = None,
        num_experts: int | None = None,
    ) -> Trace:
        """Read a frame of pandas, polars or pyarrow, or a dict of columns.

        Long tables have a row per window, layer and expert, wide ones a row per window and layer and a column per
        expert. A column is guessed only where its name leaves no doubt (window, layer, expert, tokens and the like;
        "0", "1", .. or "expert_0", .. for experts); one that is neither guessed nor named is refused.

        Args:
            frame: The table.
            window: Column of the windows: numbers and times are sorted, texts stay in their order. Without one, all
                rows are one window.
            layer: Column of the model's layer numbers. Without one, all rows are one layer.
            expert: Column of expert ids, of a long table.
            tokens: Column of counts, of a long table; of a wide one the columns of expert 0, 1, ..
            num_experts: Logical experts E of a long table; default: the largest id and one more.

        Returns:
            The trace; `notes` says how the columns were understood. What a long table leaves out is 0.

        Raises:
            ValueError: Columns are missing, unknown or ambiguous; a row is there twice; values are no counts.
            TypeError: No table; layers or experts are no integers.

        Example:
            >>> table = {"layer": [0, 0, 1, 1], "expert": [0, 2, 0, 1], "tokens": [4, 1, 2, 3]}
            >>> Trace.from_frame(table).load.tolist()
            [[[4, 0, 1], [2, 3, 0]]]
        """
        read = load_of_table(
            columns_of(frame), window=window, layer=layer, expert=expert, tokens=tokens, num_experts=num_experts
        )
        return cls(read.load, read.windows, read.layer_ids, source="a table", format="table", notes=(read.note,))

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

    def _columns(self) -> Columns:
        """A row per window, layer and expert, as `from_frame` reads them back."""
        named = len(set(self.windows)) == self.num_windows > 0
        names = [
            np.array(self.windows, dtype=object) if named else np.arange(self.num_windows),
            np.array(self.layer_ids or range(self.num_layers), dtype=np.int64),
            np.arange(self.num_experts),
        ]
        at = np.indices(self.load.shape).reshape(3, -1)
        window, layer, expert = (name[index] for name, index in zip(names, at, strict=True))
        return {"window": window, "layer": layer, "expert": expert, "tokens": self.load.ravel()}

    def _repr_html_(self) -> str:
        # The file's name alone: a notebook that is passed on does not tell folders.
        read = [self.source, f"file {Path(self.path).name}" if self.path else "", *self.notes]
        read += [f"fault: {fault.text}" for fault in self.faults]
        top_k = f", top {self.top_k}" if self.top_k else ""
        size = f"{self.num_windows:,} windows, {self.num_layers} layers, {self.num_experts} experts{top_k}"
        notes = "".join(f"<div>{words_html(line)}</div>" for line in read if line)
        return f"<div><b>Trace</b>: {size}{notes}{load_html(self.load, self.layer_ids)}</div>"

    def __repr__(self) -> str:
        return f"Trace(load=[{self.num_windows}, {self.num_layers}, {self.num_experts}], source={self.source!r})"


def load_html(load: IntArray | FloatArray, layer_ids: Sequence[int] = ()) -> str:
    """Say how uneven a load `[T, L, E]` is: its most uneven layers, and the hottest experts over time."""
    total = load.sum(axis=0, dtype=np.float64)
    hottest = hottest_over_mean(total)
    order = [layer for layer in np.argsort(-hottest, kind="stable").tolist() if hottest[layer] == hottest[layer]]
    ids = layer_ids or range(len(total))
    rows = [
        [ids[layer], f"{total[layer].mean() / len(load):,.4g}", int(total[layer].argmax()), f"{hottest[layer]:.2f}"]
        for layer in order[:HTML_LAYERS]
    ]
    if not rows:
        return "<div>no load</div>"
    head = ["most uneven: layer", "tokens of an expert in a window, mean", "hottest expert", "its load / mean"]
    left = len(total) - len(rows)
    more = f"<div>{left} more layers</div>" if left else ""
    known = hottest_over_mean(load)
    over_time = np.array([mean_of_known(each) for each in known])
    curve = line_svg([over_time], ["hottest expert's load / mean, window by window, mean of the layers"])
    return f"{table_html(head, rows)}{more}{curve if len(load) > 1 else ''}"


def hottest_over_mean(load: IntArray | FloatArray) -> FloatArray:
    """Load of the hottest expert over the mean, float64 without the last axis; NaN without load."""
    mean = load.mean(axis=-1, dtype=np.float64)
    share: FloatArray = np.divide(load.max(axis=-1), mean, out=np.full(mean.shape, np.nan), where=mean > 0)
    return share


def join_traces(traces: Sequence[Trace], weights: Sequence[float] = (), *, path: str = "") -> Trace:
    """Windows of several traces, one after the other; the counts of each are multiplied by its weight.

    Raises:
        ValueError: Layers or experts differ.
    """
    first, factors = traces[0], list(weights) or [1] * len(traces)
    for trace in traces[1:]:
        if trace.load.shape[1:] != first.load.shape[1:] or (trace.layer_ids or first.layer_ids) != first.layer_ids:
            shapes = f"{trace.num_layers} layers x {trace.num_experts} experts in {trace.path or trace.source}"
            raise ValueError(f"{shapes}, but {first.num_layers} x {first.num_experts} in {first.path or first.source}")
    named = [trace.windows or tuple(map(str, range(trace.num_windows))) for trace in traces]
    windows = [
        f"{Path(t.path).name or t.source} {name}" for t, names in zip(traces, named, strict=True) for name in names
    ]
    most = max(int(trace.load.max(initial=0)) * factor for trace, factor in zip(traces, factors, strict=True))
    whole = most < 2**63 and all(float(factor).is_integer() for factor in factors)
    parts = [trace.load * (int(factor) if whole else factor) for trace, factor in zip(traces, factors, strict=True)]
    said = [
        f"{Path(t.path).name or t.source}{f' x {w:g}' if w != 1 else ''}" for t, w in zip(traces, factors, strict=True)
    ]
    shown = ", ".join(said[:6]) + (f" and {len(said) - 6} more" if len(said) > 6 else "")
    return Trace(
        np.concatenate(parts),
        tuple(windows),
        first.layer_ids,
        first.top_k if len({trace.top_k for trace in traces}) == 1 else None,
        source=f"{len(traces)} traces",
        path=path,
        format=first.format,
        notes=(
            f"{len(windows)} windows of {len(traces)} files: {shown}",
            *dict.fromkeys(n for t in traces for n in t.notes),
        ),
        holds="load",
    )


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
