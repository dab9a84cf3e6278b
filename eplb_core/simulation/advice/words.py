"""An advice in words: what to take, why, what it moves and needs, and what was assumed."""

from __future__ import annotations

from eplb_core._text import counted
from eplb_core.placement.worth.decision import WORTH, cost_words, windows_words
from eplb_core.simulation.advice.result import Advice, Candidate
from eplb_core.simulation.words import NEARLY


def conclude_advice(advice: Advice) -> str:
    """Paragraphs, each on one line."""
    return "\n".join([_verdict(advice), _reason(advice), _moves(advice), _memory(advice), _assumed(advice)])


def _verdict(advice: Advice) -> str:
    chosen, now = advice.candidates[advice.chosen], advice.now
    judged = windows_words(*advice.windows[1:])
    without = f"{counted(now.num_ranks, 'rank')} of {now.slots_per_rank} slots whose first layout stays"
    if chosen is now:
        return f"Keep {without}: no other candidate that fits is worth its ranks, slots or moves."
    saved = f"{_less(chosen.saved)} than {without}"
    if chosen.redundant_per_rank and chosen.policy != "none":
        saved += f", and {_less(chosen.saved_by_moves)} than these slots without moves"
    if not advice.pays:
        return (
            f"Keep {without}: it hardly pays. The best found, {_named(chosen)}, takes {saved} on {judged}; less than "
            f"{WORTH:.0%} is lost among everything else that differs."
        )
    return f"Take {_named(chosen)}: on {judged} a pass takes {chosen.judged.pass_s * 1e3:.4g} ms, {saved}."


def _reason(advice: Advice) -> str:
    first, half, end = advice.windows
    chosen = advice.candidates[advice.chosen]
    fitting = [each for each in advice.candidates if each.fits and each.asked]
    left_out = sum(1 for each in advice.candidates if each.asked) - len(fitting)
    slow = sum(1 for each in fitting if each.chosen_on.pass_s > advice.pass_limit_s)
    text = (
        f"Why: {_named(chosen)} was chosen of {counted(len(fitting), 'candidate')} on {windows_words(first, half)}. "
        f"There it takes {chosen.num_ranks * chosen.chosen_on.pass_s * 1e3:.4g} GPU-ms a pass (ranks x pass): within "
        f"{NEARLY:.0%} of the least, and of those with the fewest ranks, then slots, then transfers."
    )
    if left_out:
        text += f" {counted(left_out, 'more candidate')} would not fit in memory."
    if slow:
        text += f" {counted(slow, 'candidate')} had a pass above {advice.pass_limit_s * 1e3:g} ms."
        fitting = [each for each in fitting if each.chosen_on.pass_s <= advice.pass_limit_s]
    best = min(fitting, key=lambda each: each.gpu_s)
    if best.gpu_s < chosen.gpu_s * (1.0 - NEARLY):
        text += (
            f" On {windows_words(half, end)}, which the choice had not seen, {_named(best)} would have taken "
            f"{1.0 - best.gpu_s / chosen.gpu_s:.1%} fewer GPU-seconds."
        )
    else:
        text += f" On {windows_words(half, end)}, which the choice had not seen, none takes {NEARLY:.0%} fewer, either."
    fastest = min(fitting, key=lambda each: each.judged.pass_s)
    if fastest.judged.pass_s < chosen.judged.pass_s * (1.0 - NEARLY):
        text += (
            f" The fastest pass there is that of {_named(fastest)}: {fastest.judged.pass_s * 1e3:.4g} ms for "
            f"{fastest.gpu_s / chosen.gpu_s:.3g} times the GPU-seconds."
        )
    return text


def _moves(advice: Advice) -> str:
    first, half, end = advice.windows
    chosen = advice.candidates[advice.chosen]
    there = [
        each
        for each in advice.candidates
        if (each.num_ranks, each.num_slots) == (chosen.num_ranks, chosen.num_slots) and each.policy != "none"
    ]
    parts = []
    for each in sorted(there, key=lambda each: each is not chosen):
        on = each.judged
        when = (
            "decides after every window"
            if each.policy == "auto"
            else f"plans every {counted(advice.windows[0], 'window')}"
        )
        text = f"`{each.policy}` {when}; "
        if on.transfers:
            text += (
                f"it moved {on.moves} times, {counted(on.transfers, 'expert')} in all, {on.wire_bytes / 1e9:.3g} GB "
                f"({on.network_transfers / on.transfers:.0%} between nodes); pauses are {on.pause_s / on.pass_s:.2%} "
                "of the time"
            )
        else:
            text += "it moved nothing"
        before = each.chosen_on
        text += f" (before, on {windows_words(first, half)}: {counted(before.transfers, 'expert')})"
        parts.append(text + ("" if each is chosen else f", and a pass takes {_less(each.saved)} than without") + ".")
    return f"How often, on {windows_words(half, end)} and these slots: {' '.join(parts) or 'only `none` was tried.'}"


def _memory(advice: Advice) -> str:
    best, model = advice.recommended, advice.model
    layers = max(advice.num_layers, model.num_layers)
    text = (
        f"Memory of a rank: {best.weights_bytes / 1e9:.3g} GB of experts ({counted(layers, 'layer')} x "
        f"{best.slots_per_rank} slots x {model.expert_bytes / 1e6:.3g} MB){_part(best.redundant_bytes)}; all-to-all "
        f"buffers {best.buffer_bytes / 1e9:.3g} GB{_part(best.buffer_growth_bytes)}"
    )
    if advice.buffer_tokens:
        text += f" (as DeepEP's low-latency mode, {advice.buffer_tokens} tokens of each rank at every slot: assumed)"
    else:
        text += " (assumed not to grow with slots)"
    share = best.memory_bytes / advice.cost.memory_bytes
    return f"{text}. Together {share:.1%} of its memory; candidates had to stay within {advice.memory_share:.0%}."


def _part(redundant: float) -> str:
    return f", {redundant / 1e9:.3g} GB of them for redundant slots" if redundant else ""


def _assumed(advice: Advice) -> str:
    model = advice.model
    text = (
        "Assumed: a pass carries the tokens recorded, however many ranks there are. Time is that of the experts and of "
        "their all-to-all, a token sent once for each expert; attention and all else is not in it"
    )
    if advice.num_layers != model.num_layers:
        text += (
            f", nor are layers that the trace has not ({advice.num_layers} of the model's {model.num_layers} are there)"
        )
    text += ". "
    if model.weight_bytes > 1.0:
        text += f"Tokens are counted at the speed of FP8, though weights are {model.weights}. "
    return text + cost_words(advice.cost.model, advice.window_passes, advice.pairs_a_window, advice.cost.assumed)


def _named(each: Candidate) -> str:
    spare = f"{each.num_slots} in all, {each.redundant_per_rank} redundant a rank"
    return f"{counted(each.num_ranks, 'rank')} of {each.slots_per_rank} slots ({spare}) with `{each.policy}`"


def _less(saved: float) -> str:
    return f"{abs(saved):.1%} {'less' if saved >= 0.0 else 'more'} time"
