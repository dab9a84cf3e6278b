"""`eplb simulate` and `eplb demo`: replay a trace through policies, side by side."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eplb_core._text import filled, lines
from eplb_core.cli.inputs import cost_of, note, note_faults, ranks_and_current, read_trace, to_json
from eplb_core.cli.plan import make_plan, plan_text, unseen_words
from eplb_core.cli.streams import open_stream
from eplb_core.files.formats import demo_trace
from eplb_core.simulation.compare import Comparison
from eplb_core.simulation.hardware import HARDWARE, LINKS
from eplb_core.simulation.html import write_report
from eplb_core.simulation.load.sources import TraceStream
from eplb_core.simulation.policies import BASIC, PolicyName
from eplb_core.simulation.progress import progress_bar
from eplb_core.simulation.replay import SimulateOptions
from eplb_core.simulation.replay import simulate as replay
from eplb_core.simulation.result import Simulation
from eplb_core.simulation.words import table
from eplb_core.topology import Topology
from eplb_core.trace import Trace


def simulate(arguments: argparse.Namespace) -> int:
    """`eplb simulate`: replay a trace through policies, side by side."""
    stream, trace = open_stream(arguments) if arguments.stream else (None, read_trace(arguments))
    note_faults(trace)
    topology, current = ranks_and_current(arguments, trace)
    _note_nodes(topology, arguments.hardware)
    options: SimulateOptions = {
        "topology": topology,
        "num_slots": arguments.slots,
        "slots_per_rank": arguments.slots_per_rank,
        "interval": arguments.interval,
        "history": arguments.history,
        "current": current,
        "num_groups": arguments.groups,
        "dispatch": arguments.dispatch,
        "cost": cost_of(arguments),
        "window_passes": arguments.window_passes,
        "bound": arguments.report is not None,
        "keep_ranks": arguments.report is not None and stream is None,
        "place_options": {"locality": arguments.locality, "effort": arguments.effort},
    }
    results = _replay(stream or trace, arguments.policy or _policies_that_fit(topology, arguments.slots), options)
    if arguments.report is not None:
        title = f"Replay of {Path(trace.path).name}"
        write_report(results, arguments.report, trace=trace, title=title, about=dict(arguments.about or ()))
    if arguments.json:
        print(to_json([_replay_facts(result) for result in results]))
    else:
        print(results)
        if arguments.report is not None:
            print(lines(f"wrote   {arguments.report}"))
    return 0


def _note_nodes(topology: Topology, hardware: str | None) -> None:
    """Point out a node of more ranks than the hardware's fast links join; `eplb advise` fills nodes."""
    if hardware is None:
        return
    most, joined = int(np.bincount(topology.rank_to_node).max()), HARDWARE[hardware].node_ranks
    if most > joined:
        nodes = -(-topology.num_ranks // joined)
        note(f"{most} ranks are counted as one node, where {hardware} joins {joined} (--nodes {nodes})")


def _policies_that_fit(topology: Topology, slots: int | None) -> list[PolicyName]:
    """All policies but, where it cannot be asked, deepseek; a note says why."""
    names, reason = list(BASIC), ""
    if slots is None:
        reason = "ranks have different slots"
    elif slots % topology.num_ranks:
        reason = f"{topology.num_ranks} ranks do not divide {slots} slots"
    elif importlib.util.find_spec("torch") is None:
        reason = "it needs torch, which is not installed"
    if reason:
        names.remove("deepseek")
        note(f"policy deepseek is left out: {reason}")
    return names


def _replay(trace: Trace | TraceStream, names: Sequence[PolicyName], options: SimulateOptions) -> Comparison:
    results = []
    for name in names:
        with progress_bar(f"replaying with policy {name}") as step:
            setting: SimulateOptions = {**options, "policy": name}
            results.append(replay(trace, progress=step, **setting))
    return Comparison(tuple(results))


def _replay_facts(result: Simulation) -> dict[str, Any]:
    names = ("first_window", "end_window", "mean_balancedness", "transfers_before")
    return {
        "policy": result.policy,
        "interval": result.interval,
        "mean_balancedness": result.mean_balancedness,
        "total_balancedness": result.total_balancedness,
        "total_transfers": result.total_transfers,
        "blocks": [dict(zip(names, block, strict=True)) for block in result.blocks()],
        "link_transfers": dict(zip(LINKS, result.link_transfers.sum(axis=(0, 1)).tolist(), strict=True)),
        "pass_s": result.pass_s if result.cost is not None else None,
        "exchange_s": result.summary()["exchange_s"] if result.cost is not None else None,
        "pause_s": float(result.pause_s.sum()) if result.cost is not None else None,
        "memory_bytes": result.memory_bytes if result.cost is not None else None,
        "digests": result.digests,
    }


# ---- demo ------------------------------------------------------------------------------------------------------------

_DEMO_RANKS, _DEMO_NODES, _DEMO_SLOTS, _DEMO_INTERVAL = 16, 2, 144, 16


def demo(arguments: argparse.Namespace) -> int:
    """`eplb demo`: plan for and replay the packaged trace, with words."""
    trace = demo_trace()
    topology = Topology(_DEMO_RANKS, _DEMO_NODES)
    facts, _ = make_plan(trace, topology, {"num_slots": _DEMO_SLOTS, "slots_per_rank": None}, None, {})
    facts["trace"]["path"] = "the trace that comes with eplb_core"
    options: SimulateOptions = {"topology": topology, "num_slots": _DEMO_SLOTS, "interval": _DEMO_INTERVAL}
    results = _replay(trace, _policies_that_fit(topology, _DEMO_SLOTS), options)
    if arguments.json:
        print(to_json({"plan": facts, "simulate": [_replay_facts(result) for result in results]}))
    else:
        print(_demo_text(trace, facts, results))
    return 0


def _demo_text(trace: Trace, facts: dict[str, Any], results: Comparison) -> str:
    before, after = facts["before"]["total"], facts["after"]["total"]
    paragraphs = [
        "A mixture-of-experts model sends each token to a few of its experts. The experts live on ranks, and a layer "
        "takes as long as its fullest rank. The load that was recorded here:",
        f"    {trace.source}",
        f"1. PLAN. {_DEMO_SLOTS - trace.num_experts} spare slots hold second copies of busy experts. Which "
        "experts, and which rank holds what?",
        plan_text(facts, conclusion=False),
        f"The average rank works {before:.0%} of the time before and {after:.0%} after: these layers would take "
        f"{1 - before / after:.0%} less time, all windows as one, on the very load that the layout was made for.",
        unseen_words(facts, "the trivial layout"),
        f"2. REPLAY. Load does not stay. Every {_DEMO_INTERVAL} windows (`auto`: every window) each policy plans "
        "from those that are over and is scored on those that follow. The texts switch at window 56.",
        table(results.simulations),
        results.conclusion,
        f"On your own recording:\n\n    {_program()} plan FILE --ranks R --slots P --out layout.json",
    ]
    return "\n\n".join(part if "\n" in part else filled(part) for part in paragraphs)


def _program() -> str:
    """How to call this program from here: it may be installed where the shell does not look."""
    if shutil.which("eplb"):
        return "eplb"
    script = os.path.relpath(Path(sys.executable).with_name("eplb"))
    return "python -m eplb_core" if script.startswith("..") or not os.path.exists(script) else script
