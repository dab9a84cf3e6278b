"""What a comparison found, as a table and in words: which policy to take, what it gains and what it moves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from eplb_core._text import counted, number
from eplb_core.placement.worth.decision import WORTH, cost_words, pays, windows_words
from eplb_core.simulation.result import Simulation

# So much of the time, or of the balance where no cost is given, is no difference: then the fewest transfers win.
NEARLY = 0.01


def recommended(simulations: Sequence[Simulation]) -> Simulation:
    """The fewest transfers within 1% of the least time with pauses; without a cost, of the best total balancedness."""
    if all(sim.cost is not None for sim in simulations):
        least = min(sim.total_s for sim in simulations)
        return min(
            (sim for sim in simulations if sim.total_s <= least * (1.0 + NEARLY)),
            key=lambda sim: (sim.total_transfers, sim.total_s),
        )
    known = [sim for sim in simulations if not math.isnan(sim.total_balancedness)]
    if not known:
        return simulations[0]
    best = max(sim.total_balancedness for sim in known)
    near = [sim for sim in known if sim.total_balancedness >= best * (1.0 - NEARLY)]
    return min(near, key=lambda sim: (sim.total_transfers, -sim.total_balancedness))


def conclude(simulations: Sequence[Simulation]) -> str:
    """A few sentences: what to do, what it gives, on which windows, and what time is counted in."""
    return " ".join(decide(simulations)).rstrip()


def decide(simulations: Sequence[Simulation]) -> tuple[str, str]:
    """What `conclude` says: the decision in one sentence, and what it moves and rests on."""
    best = recommended(simulations)
    if math.isnan(best.total_balancedness):
        return "No window that was scored has any load: nothing can be said.", ""
    kept = next((sim for sim in simulations if sim.total_transfers == 0), None)
    works = f"the average rank works {best.total_balancedness:.0%} of the time that the fullest one takes"
    if best.cost is not None:  # whose time is not only tokens
        works = f"the average rank has {best.total_balancedness:.0%} of the tokens of the fullest one"
    if kept is None:
        return f"Best is `{best.policy}`: on windows it had not seen, {works}.", f"{_moves(best)} {_weighed(best)}"
    if best is kept or best.total_transfers == 0:
        counted = "" if best.cost is None else ", pauses counted"
        text = f"Keep the layout: no policy here does better than `{best.policy}`{counted}, with which {works}."
        return text, _weighed(best)
    saved = 1.0 - best.total_s / kept.total_s
    counted = "" if best.cost is None else ", pauses counted,"
    change = f"layers take {saved:.1%} less time{counted} than with `{kept.policy}` ({kept.total_balancedness:.0%})"
    if not pays(saved):
        return (
            f"It hardly pays: with `{best.policy}`, the best, {works}, and {change}.",
            f"Less than {WORTH:.0%} is lost among everything else that differs. {_weighed(best)}",
        )
    text = f"Take `{best.policy}`: on windows it had not seen, {works}, and {change}."
    return text, f"{_moves(best)}{_dearer(best, simulations)}{_blind(kept)} {_weighed(best)}"


def _weighed(sim: Simulation) -> str:
    """The windows that were scored, and what their time is counted in."""
    load = sim.rank_load[sim.scored_from :].sum(axis=1).mean() / max(sim.balancedness.shape[1], 1)
    scored = windows_words(sim.first_window + sim.scored_from, sim.first_window + len(sim.balancedness))
    every = f"plans are made every {sim.interval} windows from the last {sim.history}"
    if sim.policy == "auto":
        every = "`auto` decides after every window, from those before it"
    weighed = cost_words(None, sim.window_passes, float(load))
    if sim.cost is not None:
        model, sent = sim.cost.model, sim.cost.token_bytes > 0.0
        weighed = cost_words(model, sim.window_passes, float(load), sim.cost.assumed, all_to_all=sent)
    return f"Scored are {scored}; {every}. {weighed}{_reaches(sim)}"


def _reaches(sim: Simulation) -> str:
    """What tokens send between nodes, and what that takes, where they are known."""
    facts = sim.summary()
    if sim.topology.num_nodes < 2 or "sends_per_token" not in facts:
        return ""
    text = f" With dispatch `{sim.dispatch}` a token goes to {facts['sends_per_token']:.2f} other nodes"
    if facts["exchange_s"]:
        text += f"; the all-to-all takes {facts['exchange_s'] / facts['pass_s']:.0%} of a pass"
    return text + "."


def _moves(sim: Simulation) -> str:
    """What the policy moves, and the time and memory that takes."""
    moving = sim.transfers.sum(axis=1) > 0
    count, moved = int(moving.sum()), sim.total_transfers
    experts = f"{moved:,} expert{'s' * (moved != 1)}"
    if count > 1:
        looks = "decisions" if sim.policy == "auto" else "rebalances"
        text = f"{f'{count} of its' if count < len(moving) else 'Its'} {len(moving)} {looks} move {experts} in all"
    elif len(moving) == 1:
        text = f"Its rebalance moves {experts}"
    else:
        text = f"It moves {experts}" + (
            f", once, before window {sim.first_window + sim.rebalance_windows[moving][0]}" if count else ""
        )
    if sim.topology.num_nodes > 1 and sim.total_transfers:
        text += f", {int(sim.link_transfers[:, :, 2].sum()) / sim.total_transfers:.0%} of them between nodes"
    text += "."
    if sim.cost is None:
        return text
    wire = float(sim.transfer_bytes[1:].sum()) / 1e9
    lost = float(sim.pause_s.sum())
    text += f" That is {wire:,.3g} GB in all and {lost:.3g} s of pauses, {lost / sim.total_s:.2%} of the time"
    if sim.memory_bytes:
        text += f"; redundant experts take {sim.memory_bytes / 1e9:.3g} GB of a rank"
        if not math.isinf(sim.cost.memory_bytes):
            text += f", {sim.memory_bytes / sim.cost.memory_bytes:.1%} of its memory"
    return text + "."


def _blind(kept: Simulation) -> str:
    """That a layout which nobody planned may be worse with redundant slots than without."""
    spare = kept.num_slots - kept.layout.num_experts
    if not spare or not starts_trivial(kept):
        return ""
    return (
        f" `{kept.policy}` fills {counted(spare, 'redundant slot')} a layer without a plan; `eplb gain` and `eplb "
        "advise` compare with none redundant."
    )


def starts_trivial(sim: Simulation) -> bool:
    """Whether the first layout holds experts in order, then again from the first, as engines start."""
    slots = sim.first_layout.physical_to_logical_map
    filled = slots[:1].ravel() >= 0
    return bool((slots[:, filled] == np.arange(filled.sum()) % sim.layout.num_experts).all())


def _dearer(best: Simulation, simulations: Sequence[Simulation]) -> str:
    """The policy with the most transfers, if it moves at least twice as many."""
    most = max(simulations, key=lambda sim: sim.total_transfers)
    if most is best or most.total_transfers < 2 * best.total_transfers:
        return ""
    times = most.total_transfers / max(best.total_transfers, 1)
    return f" `{most.policy}` moves {times:,.0f} times as many and reaches {most.total_balancedness:.0%}."


# ---- as a table ------------------------------------------------------------------------------------------------------


def table(simulations: Iterable[Simulation]) -> str:
    """Replays of one trace side by side: balancedness and transfers of each stretch, then the totals."""
    simulations = tuple(simulations)
    lines = [
        " " * 11 + "".join(f"{sim.policy[:16]:>18}" for sim in simulations),
        f"{'windows':<11}" + f"{'bal.':>8}{'transfers':>10}" * len(simulations),
    ]
    per_sim, first = [sim.blocks() for sim in simulations], simulations[0].first_window
    for at, (start, end, _, _) in enumerate(per_sim[0]):
        cells = "".join(f"{number(blocks[at][2]):>8}{blocks[at][3]:>10,}" for blocks in per_sim)
        lines.append(
            f"{f'{first + start}-{first + end - 1}':<11}{cells}" + _scored(start, end, simulations[0].scored_from)
        )
    lines.append("-" * len(lines[1]))
    lines.append(
        f"{'mean':<11}" + "".join(f"{number(s.mean_balancedness):>8}{s.total_transfers:>10,}" for s in simulations)
    )
    lines.append(f"{'total':<11}" + "".join(f"{number(s.total_balancedness):>8}{'':>10}" for s in simulations))
    lines.append("bal. = mean / max load of the ranks, 1 is best; mean of layers, mean of windows;")
    lines.append("total = sum of means / sum of maxima; transfers = experts received, all layers")
    return "\n".join(line.rstrip() for line in lines)


def _scored(start: int, end: int, scored_from: int) -> str:
    return "  unscored" if end <= scored_from else "  partly scored" if start < scored_from else ""
