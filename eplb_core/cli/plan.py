"""`eplb plan`, `eplb simulate` and `eplb demo`: read, call the library, print. Each returns the exit status."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import eplb_core
from eplb_core import simulation as replays
from eplb_core._arrays import FloatArray, IntArray, add_up
from eplb_core._text import counted, filled, lines
from eplb_core.cli.inputs import note, note_faults, ranks_and_current, read_trace
from eplb_core.cli.inspect import pairs_on_a_rank
from eplb_core.cli.plan_words import conclude_plan
from eplb_core.cli.terminal import number, progress, to_json
from eplb_core.files import formats
from eplb_core.files.formats import demo_trace
from eplb_core.layout import ExpertLayout
from eplb_core.metrics import mean_of_known, mean_over_top, rank_load, transfers
from eplb_core.simulation.links import LINKS
from eplb_core.topology import Topology
from eplb_core.trace import Trace


def _place_options(arguments: argparse.Namespace) -> dict[str, object]:
    return {"locality": arguments.locality, "num_groups": arguments.groups, "effort": arguments.effort}


# ---- plan ------------------------------------------------------------------------------------------------------------


def plan(arguments: argparse.Namespace) -> int:
    """`eplb plan`: place experts for a recorded load, say what it gains, write the layout."""
    trace = read_trace(arguments.trace, arguments)
    note_faults(trace)
    topology, current = ranks_and_current(arguments, trace)
    facts, layout = _plan(trace, topology, arguments.slots, current, _place_options(arguments))
    if arguments.out:
        formats.write_layout(layout, arguments.out, arguments.to, trace.layer_ids)
        facts["out"] = arguments.out
    print(to_json(facts) if arguments.json else lines(_plan_text(facts)))
    return 0


def _plan(
    trace: Trace, topology: Topology, slots: int, current: ExpertLayout | None, options: dict[str, Any]
) -> tuple[dict[str, Any], ExpertLayout]:
    """The layout for a trace and all that is said of it."""
    before = current
    if before is None:
        before = ExpertLayout.trivial(trace.num_layers, trace.num_experts, num_slots=slots, topology=topology)
    with progress("planning (the first time after an installation compiles, up to a minute)"):
        one = slice(0, 1)  # one layer from the same kind of start compiles all that the plan needs: that is not timed
        start = current and ExpertLayout(
            current.physical_to_logical_map[one], current.num_experts, topology=current.topology
        )
        eplb_core.place(trace.load[:2, one], topology=topology, num_slots=slots, current=start, **options)
        begun = time.perf_counter()
        placed = eplb_core.place(trace.load, topology=topology, num_slots=slots, current=current, **options)
        seconds = time.perf_counter() - begun
    after: ExpertLayout = placed.layout
    received = transfers(before, after)
    summed = add_up(trace.load)[None]
    facts = {
        "trace": {"path": trace.path, "windows": trace.num_windows, "layers": trace.num_layers},
        "num_experts": trace.num_experts,
        "num_slots": slots,
        "num_ranks": topology.num_ranks,
        "num_nodes": topology.num_nodes,
        "before_is": "trivial" if current is None else "current",
        "before": _balance(before, summed),
        "after": _balance(after, summed),
        "bound": {"mean": mean_of_known(placed.bound), "worst": _least(placed.bound)},
        "windows_before": _balance(before, trace.load),
        "windows_after": _balance(after, trace.load),
        "pairs_before": len(pairs_on_a_rank(before)),
        "pairs_after": len(pairs_on_a_rank(after)),
        "transfers": int(received.sum()),
        "most_transfers_of_a_rank": int(received.sum(axis=0).max(initial=0)),
        "seconds": seconds,
        "digest": after.digest,
    }
    facts["conclusion"] = conclude_plan(facts)
    return facts, after


def _balance(layout: ExpertLayout, load: IntArray | FloatArray) -> dict[str, float]:
    """Mean over layers and windows, the worst layer's mean, and the total of a load `[T, L, E]` on a layout."""
    ranks, speed = rank_load(layout, load), layout.topology.rank_speed
    mean, top = ranks.sum(axis=2) / speed.sum(), (ranks / speed).max(axis=2)
    each = mean_over_top(mean, top)
    layers = np.array([mean_of_known(each[:, layer]) for layer in range(layout.num_layers)])
    total = mean_over_top(mean.sum(), top.sum())
    return {"mean": mean_of_known(each), "worst": _least(layers), "total": float(total)}


def _least(each: FloatArray) -> float:
    known = each[~np.isnan(each)]
    return float(known.min()) if known.size else float("nan")


def _plan_text(facts: dict[str, Any], *, conclusion: bool = True) -> str:
    trace, ranks, nodes = facts["trace"], facts["num_ranks"], facts["num_nodes"]
    redundant = facts["num_slots"] - facts["num_experts"]
    lines = [
        f"trace   {trace['path']}",
        f"        {counted(trace['windows'], 'window')}, {counted(trace['layers'], 'layer')}, "
        f"{facts['num_experts']} experts",
        f"slots   {facts['num_slots']} on {counted(ranks, 'rank')}, {counted(nodes, 'node')}; {redundant} redundant",
        "",
        f"{'balancedness (1 is best)':<34}{facts['before_is']:>10}{'planned':>10}{'bound':>10}",
    ]
    bound = facts["bound"]
    for label, name, limit in (
        ("all windows as one, mean of layers", "", None),
        ("    its worst layer", "", None),
        ("window by window, mean", "windows_", bound["mean"]),
        ("    its worst layer", "windows_", bound["worst"]),
        ("    sum of means / sum of maxima", "windows_", None),
    ):
        key = "worst" if "worst" in label else "total" if "sum" in label else "mean"
        cells = [number(facts[name + when][key]) for when in ("before", "after")]
        lines.append(f"{label:<34}{cells[0]:>10}{cells[1]:>10}{'' if limit is None else number(limit):>10}")
    lines.append(f"{'expert twice on one rank':<34}{facts['pairs_before']:>10}{facts['pairs_after']:>10}")
    share = facts["transfers"] / max(facts["num_slots"] * trace["layers"], 1)
    lines = [
        *(line.rstrip() for line in lines),
        "",
        f"transfers {facts['transfers']:,} experts ({share:.0%} of all slots), "
        f"at most {facts['most_transfers_of_a_rank']:,} to one rank",
    ]
    lines.append(f"planned in {facts['seconds'] * 1e3:,.1f} ms; digest {facts['digest'][:16]}")
    if "out" in facts:
        lines.append(f"wrote   {facts['out']}")
    return "\n".join([*lines, "", filled(facts["conclusion"])] if conclusion else lines)


# ---- simulate --------------------------------------------------------------------------------------------------------


def simulate(arguments: argparse.Namespace) -> int:
    """`eplb simulate`: replay a trace through policies, side by side."""
    trace = read_trace(arguments.trace, arguments)
    note_faults(trace)
    topology, current = ranks_and_current(arguments, trace)
    names = arguments.policy
    if names is None:
        names = _policies_that_fit(topology, arguments.slots)
    results = _replay(
        trace,
        names,
        topology=topology,
        num_slots=arguments.slots,
        interval=arguments.interval,
        history=arguments.history,
        current=current,
        num_groups=arguments.groups,
        dispatch=arguments.dispatch,
        cost=None if arguments.hardware is None else replays.cost_preset(arguments.hardware),
        window_passes=arguments.window_passes,
        bound=arguments.report is not None,
        place_options={"locality": arguments.locality, "effort": arguments.effort},
    )
    if arguments.report is not None:
        from eplb_core.simulation.html import write_report

        write_report(results, arguments.report, title=f"Replay of {Path(arguments.trace).name}")
    if arguments.json:
        print(to_json([_replay_facts(result) for result in results]))
    else:
        print(f"{replays.table(results.simulations)}\n\n{filled(results.conclusion)}")
        if arguments.report is not None:
            print(lines(f"wrote   {arguments.report}"))
    return 0


def _policies_that_fit(topology: Topology, slots: int) -> list[str]:
    """All policies but, where it cannot be asked, deepseek; a note says why."""
    names, reason = list(replays.BASIC), ""
    if slots % topology.num_ranks:
        reason = f"{topology.num_ranks} ranks do not divide {slots} slots"
    elif importlib.util.find_spec("torch") is None:
        reason = "it needs torch, which is not installed"
    if reason:
        names.remove("deepseek")
        note(f"policy deepseek is left out: {reason}")
    return names


def _replay(trace: Trace, names: list[str], **options: Any) -> replays.Comparison:
    results = []
    for name in names:
        with progress(f"replaying with policy {name}") as step:
            results.append(replays.simulate(trace, policy=name, progress=step, **options))
    return replays.Comparison(tuple(results))


def _replay_facts(result: replays.Simulation) -> dict[str, Any]:
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
    facts, _ = _plan(trace, topology, _DEMO_SLOTS, None, {})
    facts["trace"]["path"] = "the trace that comes with eplb_core"
    options = {"topology": topology, "num_slots": _DEMO_SLOTS, "interval": _DEMO_INTERVAL}
    results = _replay(trace, _policies_that_fit(topology, _DEMO_SLOTS), **options)
    if arguments.json:
        print(to_json({"plan": facts, "simulate": [_replay_facts(result) for result in results]}))
    else:
        print(_demo_text(trace, facts, results))
    return 0


def _demo_text(trace: Trace, facts: dict[str, Any], results: replays.Comparison) -> str:
    before, after = facts["before"]["total"], facts["after"]["total"]
    paragraphs = [
        "A mixture-of-experts model sends each token to a few of its experts. The experts live on ranks, and a layer "
        "takes as long as its fullest rank. The load that was recorded here:",
        f"    {trace.source}",
        f"1. PLAN. {_DEMO_SLOTS - trace.num_experts} spare slots hold second copies of busy experts. Which "
        "experts, and which rank holds what?",
        _plan_text(facts, conclusion=False),
        f"The average rank works {before:.0%} of the time before and {after:.0%} after: these layers would take "
        f"{1 - before / after:.0%} less time, if the load stayed as it was recorded, all windows as one.",
        f"2. REPLAY. Load does not stay. Every {_DEMO_INTERVAL} windows each policy plans from the windows that are "
        "over and is scored on those that follow. The texts switch at window 56.",
        replays.table(results.simulations),
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
