"""What `eplb plan` found, in plain words: what the layout gains, what limits it, what to do next."""

from __future__ import annotations

import math
from typing import Any

from eplb_core.placement.worth.costs import WORTH

# A bound below this says that the slots are too few, a gap above this that windows differ too much for one layout.
_LOW_BOUND, _GAP = 0.95, 0.05


def conclude_plan(facts: dict[str, Any]) -> str:
    """A few sentences from the facts of a plan."""
    before, after = facts["windows_before"]["total"], facts["windows_after"]["total"]
    if math.isnan(before) or math.isnan(after):
        return "The trace has no load: any layout is as good as another. Record again while the engine serves."
    was = "the live layout" if facts["before_is"] == "current" else "experts in their order"
    saved = 1.0 - before / after
    works = f"the average rank works {after:.0%} of the time that the fullest one takes, with {was} {before:.0%}"
    if saved < WORTH:
        text = f"Hardly worth a move: {works}. The layers would take {max(saved, 0.0):.1%} less time."
    else:
        text = f"Worth it, if load stays as recorded: layers take {saved:.0%} less time, since {works}."
    return " ".join([text, *_limits(facts, after), *_next_steps(facts, saved)])


def _limits(facts: dict[str, Any], after: float) -> list[str]:
    bound = facts["bound"]["mean"]
    if bound < _LOW_BOUND:
        ranks = facts["num_ranks"]
        return [
            f"No layout of these slots gets beyond {bound:.2f}: an expert is hotter than its replicas can share; try "
            f"--slots {facts['num_slots'] + ranks}."
        ]
    if facts["trace"]["windows"] > 1 and bound - after > _GAP:
        return ["What is left to the bound is in the differences between windows, which shares solved anew can use."]
    return []


def _next_steps(facts: dict[str, Any], saved: float) -> list[str]:
    steps = []
    if saved >= WORTH and facts["before_is"] == "trivial":
        steps.append("If another layout is live, give it as --current: most of the transfers are then not needed.")
    if saved >= WORTH and facts["trace"]["windows"] > 1:
        steps.append("`eplb simulate` says what stays of it on load that the plan has not seen.")
    if facts["pairs_before"]:
        pairs = f"holds an expert twice on a rank in {facts['pairs_before']} places"
        steps.append(f"The layout before {pairs}: slots that help nobody.")
    return steps
