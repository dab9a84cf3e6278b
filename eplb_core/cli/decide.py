"""`eplb advise`, `eplb gain` and `eplb sweep`: which ranks, slots and policies a recorded load wants."""

from __future__ import annotations

import argparse
import importlib.util

from eplb_core._text import filled, lines, number
from eplb_core.cli.inputs import DTYPES, cost_of, note, note_faults, ranks_and_current, read_trace, to_json
from eplb_core.files.reading import write_atomic
from eplb_core.placement.worth.decision import cost_words, tokens_a_window, windows_words
from eplb_core.simulation.advice.advise import advise as find_advice
from eplb_core.simulation.advice.model import read_model
from eplb_core.simulation.hardware import StepCost, on_nodes
from eplb_core.simulation.progress import progress_bar
from eplb_core.simulation.result import Records
from eplb_core.simulation.sweep import sweep as replay_all
from eplb_core.trace import Trace


def advise(arguments: argparse.Namespace) -> int:
    """`eplb advise`: candidates for a GPU and a model, and the one to take."""
    trace = read_trace(arguments)
    note_faults(trace)
    size = None if arguments.dtype is None else DTYPES[arguments.dtype]
    model = read_model(arguments.model, weight_bytes=size)
    if arguments.policy is None and importlib.util.find_spec("torch") is None:
        note("policy deepseek is left out: it needs torch, which is not installed")
    with progress_bar("replaying candidates") as step:
        advice = find_advice(
            trace,
            gpu=arguments.gpu,
            model=model,
            ranks=arguments.ranks,
            redundant_per_rank=arguments.redundant_per_rank,
            policies=arguments.policy,
            interval=arguments.interval,
            window_passes=arguments.window_passes,
            pass_limit_s=None if arguments.pass_ms is None else arguments.pass_ms / 1e3,
            memory_share=arguments.memory_share,
            buffer_tokens=arguments.buffer_tokens,
            progress=step,
        )
    print(to_json(advice.to_dict()) if arguments.json else lines(str(advice)))
    if arguments.report is not None:
        write_atomic(arguments.report, advice.to_html().encode(errors="replace"))
        note(f"wrote {arguments.report}")
    return 0


def gain(arguments: argparse.Namespace) -> int:
    """`eplb gain`: how many redundant slots pay."""
    from eplb_core.placement.worth.report import gain_report  # compiles: only where it is used

    trace = read_trace(arguments)
    note_faults(trace)
    topology, current = ranks_and_current(arguments, trace)
    cost = cost_of(arguments)
    if cost is not None:
        note("seconds are those of tokens and experts; the all-to-all is not in them (`eplb sweep` counts it)")
    with progress_bar("placing"):
        report = gain_report(
            trace,
            topology,
            num_slots=arguments.slots,
            current=current,
            cost=None if cost is None else cost.model,
            window_passes=arguments.window_passes,
        )
    if arguments.json:
        facts = {"now": report.now, "ceiling": report.ceiling, "best": report.best, "pays": report.pays}
        print(to_json({**facts, "conclusion": report.conclusion, "rows": [row._asdict() for row in report.rows]}))
    else:
        print(lines(str(report)))
    return 0


def sweep(arguments: argparse.Namespace) -> int:
    """`eplb sweep`: a row for each combination of ranks, slots, policies and intervals."""
    trace = read_trace(arguments)
    note_faults(trace)
    cost = cost_of(arguments)
    grid = {
        "topology": [on_nodes(ranks, arguments.ranks_per_node) for ranks in arguments.ranks],
        "num_slots": arguments.slots,
        "redundant_per_rank": arguments.redundant_per_rank,
        "interval": arguments.interval,
        "policy": arguments.policy,
    }
    with progress_bar("sweep") as step:
        rows = replay_all(
            trace,
            {name: values for name, values in grid.items() if values is not None},
            workers=arguments.workers,
            results=arguments.results,
            progress=step,
            cost=cost,
            window_passes=arguments.window_passes,
        )
    if arguments.json:
        print(to_json([dict(zip(rows.dtype.names or (), row.tolist(), strict=True)) for row in rows]))
    else:
        first = max(arguments.interval)
        passes = (trace.num_windows - first) * arguments.window_passes
        print(lines(_sweep_text(rows, cost, passes)))
        print("\n" + filled(_scored_words(trace, first, cost, arguments.window_passes)))
    return 0


def _sweep_text(rows: Records, cost: StepCost | None, passes: float) -> str:
    """A line per row; `passes` are those of the windows that are scored."""
    head = f"{'ranks':>5}{'nodes':>6}{'slots':>7}{'interval':>9}  {'policy':<9}{'bal.':>6}{'transfers':>11}"
    text = [head + (f"{'ms a pass':>11}{'GB a rank':>11}" if cost else "")]
    for row in rows:
        line = (
            f"{row.num_ranks:5}{row.num_nodes:6}{row.num_slots:7}{row.interval:9}  {row.policy:<9}"
            f"{number(row.total_balancedness):>6}{row.node_transfers + row.network_transfers:11,}"
        )
        text.append(line + (f"{row.total_s / passes * 1e3:11.4g}{row.memory_bytes / 1e9:11.3g}" if cost else ""))
    return "\n".join(text)


def _scored_words(trace: Trace, first: int, cost: StepCost | None, passes: float) -> str:
    load = tokens_a_window(trace.load[first:])
    words, memory = cost_words(None, passes, load), ""
    if cost is not None:
        words = cost_words(cost.model, passes, load, cost.assumed, all_to_all=cost.token_bytes > 0.0)
        memory = " ms a pass count pauses; GB a rank are those of redundant experts."
    return (
        "bal. = sum of the ranks' mean loads / sum of the fullest ranks' loads, on windows that no layout was made "
        f"from: {windows_words(first, trace.num_windows)} in every row. transfers = experts received.{memory} {words}"
    )
