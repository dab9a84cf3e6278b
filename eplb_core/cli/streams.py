"""Recordings larger than memory: `--stream` of `eplb plan` and `eplb simulate`."""

from __future__ import annotations

import argparse
from typing import cast

import numpy as np

from eplb_core._arrays import FloatArray, IntArray
from eplb_core.cli.inputs import note
from eplb_core.simulation.load.sources import TraceStream, stream_trace
from eplb_core.trace import Trace

MOST_WINDOWS = 256
"""Windows for which a plan is made; those of a longer recording are added up."""


def open_stream(arguments: argparse.Namespace) -> tuple[TraceStream, Trace]:
    """The recording, to be read bit by bit, and its first window, which says the shape."""
    if arguments.file is None or arguments.traces or arguments.windows is not None:
        raise ValueError("--stream reads one recording TRACE, all of its windows: leave out --trace and --windows")
    stream = stream_trace(arguments.file, key=arguments.key, holds="load" if arguments.holds == "load" else "")
    first = next(iter(stream.blocks(1)), None)
    if first is None:
        raise ValueError(f"{arguments.file} has no window")
    note(f"{stream.num_windows:,} windows {list(first.load.shape[1:])} are read bit by bit, 16 at a time")
    return stream, Trace(first.load, path=arguments.file, format="stream", holds="load")


def added_up(stream: TraceStream, path: str) -> Trace:
    """At most `MOST_WINDOWS` windows, each the sum of as many that follow each other."""
    total = stream.num_windows or 0
    each = -(-total // MOST_WINDOWS)
    made: list[IntArray | FloatArray] = []
    for window, block in enumerate(stream.blocks(1)):
        if window % each == 0:
            made.append(block.load[0].copy())
        else:
            made[-1] = made[-1] + block.load[0]
    if each > 1:
        note(f"{total:,} windows were added up to {len(made)}, {each} in each, for which the plan is made")
    load: IntArray | FloatArray = cast("IntArray | FloatArray", np.stack(made))
    return Trace(load, path=path, format="stream", source="a stream", holds="load")
