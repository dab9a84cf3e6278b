"""`eplb plan`: place experts for a recorded load, and say what that gains, what limits it and what to do next."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from eplb_core._arrays import FloatArray, IntArray, add_up
from eplb_core._text import counted, filled, lines, number
from eplb_core.cli.inputs import note_faults, ranks_and_current, read_trace, to_json
from eplb_core.cli.streams import added_up, open_stream
from eplb_core.files import formats
from eplb_core.layout import ExpertLayout
from eplb_core.metrics import mean_of_known, mean_over_top, pairs_on_a_rank, rank_load, transfers
from eplb_core.placement.worth.costs import CostModel
from eplb_core.placement.worth.decision import cost_words, hold_out, pays, windows_words
from eplb_core.simulation.progress import progress_bar
from eplb_core.topology import Topology
from eplb_core.trace import Trace

# A bound below this says that the slots are too few, a gap above this that windows differ too much for one layout.
_LOW_BOUND, _GAP = 0.95, 0.05


def plan(arguments: argparse.Namespace) -> int:
    """`eplb plan`: place experts for a recorded load, say what it gains, write the layout."""
    trace = added_up(open_stream(arguments)[0], arguments.file) if arguments.stream else read_trace(arguments)
    note_faults(trace)
    topology, current = ranks_and_current(arguments, trace)
    options = {"locality": arguments.locality, "num_groups": arguments.groups, "effort": arguments.effort}
    slots = {"num_slots": arguments.slots, "slots_per_rank": arguments.slots_per_rank}
    facts, layout = make_plan(trace, topology, slots, current, options)
    if arguments.out:
        formats.write_layout(layout, arguments.out, arguments.to, trace.layer_ids)
        facts["out"] = arguments.out
    print(to_json(facts) if arguments.json else lines(plan_text(facts)))
    return 0


def make_plan(
    trace: Trace, topology: Topology, slots: Mapping[str, Any], current: ExpertLayout | None, options: dict[str, Any]
) -> tuple[dict[str, Any], ExpertLayout]:
    """Plan for a trace; return the facts to print and the layout."""
    from eplb_core.placement.place import place  # compiles: only where it is used

    before = current
    if before is None:
        before = ExpertLayout.trivial(trace.num_layers, trace.num_experts, topology=topology, **slots)
    half = hold_out(trace.load)
    with progress_bar("planning"):
        if half < 2:
            one = slice(0, 1)  # one layer from the same kind of start compiles what the plan needs: that is not timed
            start = current and ExpertLayout(
                current.physical_to_logical_map[one], current.num_experts, topology=current.topology
            )
            place(trace.load[:2, one], topology=topology, current=start, **slots, **options)
        unseen = None
        if half:  # what the same call makes of the first half, judged on the second
            part = place(trace.load[:half], topology=topology, current=current, **slots, **options)
            unseen = _unseen(before, part.layout, trace.load, half)
        begun = time.perf_counter()
        placed = place(trace.load, topology=topology, current=current, **slots, **options)
        seconds = time.perf_counter() - begun
    after: ExpertLayout = placed.layout
    received = transfers(before, after)
    summed = add_up(trace.load)[None]
    facts = {
        "trace": {"path": trace.path, "windows": trace.num_windows, "layers": trace.num_layers},
        "num_experts": trace.num_experts,
        "num_slots": sum(slots["slots_per_rank"] or [slots["num_slots"]]),
        "slots_per_rank": slots["slots_per_rank"],
        "num_ranks": topology.num_ranks,
        "num_nodes": topology.num_nodes,
        "before_is": "trivial" if current is None else "current",
        "before": _balance(before, summed),
        "after": _balance(after, summed),
        "bound": {"mean": mean_of_known(placed.bound), "worst": _least(placed.bound)},
        "windows_before": _balance(before, trace.load),
        "windows_after": _balance(after, trace.load),
        "unseen": unseen,
        "pairs_before": len(pairs_on_a_rank(before)),
        "pairs_after": len(pairs_on_a_rank(after)),
        "transfers": int(received.sum()),
        "most_transfers_of_a_rank": int(received.sum(axis=0).max(initial=0)),
        "seconds": seconds,
        "digest": after.digest,
    }
    facts["conclusion"] = conclude_plan(facts)
    return facts, after


def _unseen(before: ExpertLayout, after: ExpertLayout, load: IntArray | FloatArray, half: int) -> dict[str, Any]:
    """Both layouts on the windows from `half` on, as `gain_report` judges them."""
    from eplb_core.placement.worth.report import layers_s

    later = load[half:]
    first, then = (layers_s(layout, later, CostModel(), 1.0, weighted=False) for layout in (before, after))
    totals = {"before": _balance(before, later)["total"], "after": _balance(after, later)["total"]}
    return {"first_window": half, **totals, "saved": 1.0 - then / first}


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


def plan_text(facts: dict[str, Any], *, conclusion: bool = True) -> str:
    """Lay the facts of a plan out as text for a terminal."""
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


# ---- in words --------------------------------------------------------------------------------------------------------


def conclude_plan(facts: dict[str, Any]) -> str:
    """A few sentences from the facts of a plan. Whether it is worth it is weighed on windows held out, if there are."""
    before, after = facts["windows_before"]["total"], facts["windows_after"]["total"]
    if math.isnan(before) or math.isnan(after):
        return "The trace has no load, so every layout is equally good. Record again while the engine serves."
    was = "the live layout" if facts["before_is"] == "current" else f"the trivial layout of {facts['num_slots']} slots"
    fitted, unseen = 1.0 - before / after, facts.get("unseen")
    works = f"the average rank works {after:.0%} of the fullest rank's time ({before:.0%} with {was})"
    if unseen is None:
        saved = fitted
        if pays(saved):
            text = f"Worth it, if load stays as recorded: layers take {saved:.0%} less time; {works}. "
        else:
            text = f"Hardly worth a move: layers would take {max(saved, 0.0):.1%} less time; {works}. "
        text += "That is on the load that the layout was made for; no later windows judge it."
    else:
        saved = unseen["saved"]
        text = unseen_words(facts, was) + f" On the windows that it was made for it is {fitted:.0%} less: {works}."
    weighed = cost_words(None, 1.0, 0.0)
    return " ".join([text, weighed, *_limits(facts, after), *_next_steps(facts, saved)])


def unseen_words(facts: dict[str, Any], was: str) -> str:
    """The verdict of the windows that were held out."""
    unseen, windows = facts["unseen"], facts["trace"]["windows"]
    half, saved = unseen["first_window"], unseen["saved"]
    less = f"{abs(saved):.1%} {'less' if saved >= 0.0 else 'more'} time"
    works = f"the average rank works {unseen['after']:.0%} ({unseen['before']:.0%} with {was})"
    judged = f"on {windows_words(half, windows)}, of a layout made from {windows_words(0, half)} alone"
    if pays(saved):
        return f"Worth it: layers take {less} {judged}: {works}."
    return f"Hardly worth a move: layers would take {less} {judged}: {works}; load that drifts wants plans more often."


def _limits(facts: dict[str, Any], after: float) -> list[str]:
    bound = facts["bound"]["mean"]
    if bound < _LOW_BOUND:
        more = f"--slots {facts['num_slots'] + facts['num_ranks']}"
        if facts.get("slots_per_rank"):
            more = f"--slots-per-rank {','.join(str(slots + 1) for slots in facts['slots_per_rank'])}"
        return [
            f"No layout of these slots exceeds {bound:.2f}: an expert has more load than its replicas can share; try "
            f"{more}."
        ]
    if facts["trace"]["windows"] > 1 and bound - after > _GAP:
        text = 'The rest of the gap to the bound comes from load that changes between windows; mode "quota" re-solves '
        return [f"{text}shares per batch and can use it."]
    return []


def _next_steps(facts: dict[str, Any], saved: float) -> list[str]:
    steps = []
    if pays(saved) and facts["before_is"] == "trivial":
        steps.append("If another layout is live, pass it as --current: most of the transfers are then unnecessary.")
    if pays(saved) and facts["trace"]["windows"] > 1:
        steps.append("`eplb simulate` shows what planning again from time to time adds.")
    if facts["pairs_before"]:
        pairs = counted(facts["pairs_before"], "time")
        steps.append(
            f"The layout before holds an expert twice on one rank ({pairs}): such a slot takes no load off it."
        )
    return steps
