"""Shared by the commands of `eplb`: arguments to a topology, trace or layout; notes on stderr; JSON without NaN."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
from dataclasses import replace
from typing import Any

import numpy as np

from eplb_core._text import plain
from eplb_core.errors import MAX_TEXT
from eplb_core.files.formats import load_trace, read_layout_file
from eplb_core.layout import ExpertLayout
from eplb_core.simulation.advice.model import read_model
from eplb_core.simulation.hardware import StepCost, cost_preset
from eplb_core.simulation.progress import progress_bar
from eplb_core.topology import Topology
from eplb_core.trace import Trace, join_traces

DTYPES = {"fp4": 0.5, "fp8": 1.0, "int8": 1.0, "bf16": 2.0}
"""Bytes of a weight."""


def note(*notes: str) -> None:
    """Say on stderr what was assumed or left out."""
    for each in notes:
        print(f"note: {plain(each, MAX_TEXT)}", file=sys.stderr)


def topology_of(arguments: argparse.Namespace) -> Topology | None:
    """The ranks that the arguments describe, or None if they name none."""
    if arguments.rank_to_node is None and arguments.ranks is None:
        if arguments.nodes is not None or arguments.rank_speed is not None:
            raise ValueError("--nodes and --rank-speed need the ranks: --ranks R")
        return None
    return Topology(
        arguments.ranks, arguments.nodes, rank_to_node=arguments.rank_to_node, rank_speed=arguments.rank_speed
    )


def read_trace(arguments: argparse.Namespace) -> Trace:
    """The trace, or several with their weights, or the windows of it that `--windows` names."""
    given = ([] if arguments.file is None else [arguments.file]) + list(getattr(arguments, "traces", None) or ())
    if not given:
        raise ValueError("give a recorded load: TRACE, or --trace FILE:WEIGHT, several times for several")
    named = [_weighed(path) for path in given]
    traces = [_read(path, arguments) for path, _ in named]
    trace = traces[0]
    if len(traces) > 1 or named[0][1] != 1.0:
        trace = join_traces(traces, [weight for _, weight in named], path=", ".join(given))
    note(*trace.notes)
    if arguments.windows is None:
        return trace
    cut = arguments.windows
    load = trace.load[cut]
    if not len(load):
        raise ValueError(
            f"--windows {cut.start}:{cut.stop or ''} takes none of the trace's {trace.num_windows} windows"
        )
    numbers = tuple(map(str, range(trace.num_windows)))
    return replace(trace, load=load, windows=(trace.windows or numbers)[cut], notes=())


def _read(path: str, arguments: argparse.Namespace) -> Trace:
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(progress_bar(f"reading {path}")) if os.path.isdir(path) else None
        return load_trace(
            path,
            key=arguments.key,
            holds=arguments.holds,
            num_experts=arguments.experts,
            window_tokens=arguments.window_tokens,
            progress=progress,
        )


def _weighed(given: str) -> tuple[str, float]:
    """`FILE:3` is a file and its weight, unless a file has that very name."""
    path, colon, text = given.rpartition(":")
    if not colon or os.path.exists(given):
        return given, 1.0
    try:
        weight = float(text)
    except ValueError:
        return given, 1.0
    if not 0.0 < weight < float("inf"):
        raise ValueError(f"the weight of {path} (={text}) must be a number above 0")
    return path, weight


def note_faults(trace: Trace) -> None:
    """Point out layers that no recorder of a router's answers could have written; idle layers are no fault."""
    note(*(fault.text for fault in trace.faults if fault.kind == "first_experts"))


def cost_of(arguments: argparse.Namespace) -> StepCost | None:
    """What the hardware makes of the model's experts; a note says what was assumed of them."""
    sizes = {
        "hidden_size": arguments.hidden,
        "intermediate_size": arguments.intermediate,
        "weight_bytes": None if arguments.dtype is None else DTYPES[arguments.dtype],
    }
    known = {name: value for name, value in sizes.items() if value is not None}
    if arguments.hardware is None:
        if known or arguments.model is not None:
            raise ValueError(
                "--model, --hidden, --intermediate and --dtype are of experts on some hardware: --hardware NAME"
            )
        return None
    if arguments.model is not None:
        model = read_model(arguments.model, weight_bytes=known.get("weight_bytes"))
        known = {**{name: getattr(model, name) for name in sizes}, **known}
    if len(known) < len(sizes):
        missing = [f"--{name.partition('_')[0]}".replace("weight", "dtype") for name in sizes if name not in known]
        note(f"{' and '.join(missing)} of the model not given: DeepSeek-V3's experts are assumed for that")
    return cost_preset(arguments.hardware, **known)


def ranks_and_current(arguments: argparse.Namespace, trace: Trace) -> tuple[Topology, ExpertLayout | None]:
    """The ranks to plan for, and the layout to start from; a layout file may say the ranks by itself."""
    topology = topology_of(arguments)
    if arguments.current is None:
        if topology is None:
            raise ValueError("give the ranks: --ranks R, or --rank-to-node 0,0,1,1,..")
        return topology, None
    read = read_layout_file(arguments.current, topology=topology, num_experts=trace.num_experts)
    note(*read.notes)
    if read.layout.num_layers != trace.num_layers:
        raise ValueError(f"{arguments.current} has {read.layout.num_layers} layers, the trace {trace.num_layers}")
    return read.layout.topology, read.layout


def to_json(value: object) -> str:
    """JSON text of plain values and numpy ones; NaN becomes null, which every reader knows."""
    return json.dumps(_jsonable(value), indent=2)


def _jsonable(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return _jsonable(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    return value
