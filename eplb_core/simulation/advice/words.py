"""An advice in words: what to take, why, what it moves and needs, and what was assumed."""

from __future__ import annotations

from eplb_core._text import counted
from eplb_core.placement.worth.decision import WORTH, cost_words
from eplb_core.simulation.advice.result import Advice, Candidate
from eplb_core.simulation.words import NEARLY


def conclude_advice(advice: Advice) -> str:
    """Paragraphs, each on one line."""
    return "\n".join([_verdict(advice), _reason(advice), _moves(advice), _memory(advice), _assumed(advice)])


def _verdict(advice: Advice) -> str:
    chosen, now = advice.candidates[advice.chosen], advice.now
    judged = advice.judged_on
    without = _without(now)
    if chosen is now:
        return f"Keep {without}: no other candidate that fits is worth its ranks, slots or moves."
    saved = f"{_less(chosen.saved)} than {without}"
    if chosen.redundant_per_rank and chosen.policy != "none":
        saved += f", and {_less(chosen.saved_by_moves)} than these slots without moves"
    if not advice.pays:
        why = "it hardly pays to leave it" if chosen.saved >= 0.0 else "what was chosen does worse"
        text = f"Keep {without}: {why}. {_named(chosen)} takes {saved}, on {judged}"
        return text + (
            f"; less than {WORTH:.0%} is lost among everything else that differs." if chosen.saved >= 0.0 else "."
        )
    return f"Take {_named(chosen)}: on {judged} a pass takes {chosen.judged.pass_s * 1e3:.4g} ms, {saved}."


def _reason(advice: Advice) -> str:
    chosen = advice.candidates[advice.chosen]
    fitting = [each for each in advice.candidates if each.fits]
    left_out = len(advice.candidates) - len(fitting)
    slow = sum(1 for each in fitting if each.chosen_on.pass_s > advice.pass_limit_s)
    text = (
        f"Why: {_named(chosen)} was chosen of {counted(len(fitting), 'candidate')} on {advice.chosen_on}. "
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
            f" On {advice.judged_on}, which the choice had not seen, {_named(best)} would have taken "
            f"{1.0 - best.gpu_s / chosen.gpu_s:.1%} fewer GPU-seconds."
        )
    else:
        text += f" On {advice.judged_on}, which the choice had not seen, none takes {NEARLY:.0%} fewer, either."
    fastest = min(fitting, key=lambda each: each.judged.pass_s)
    if fastest.judged.pass_s < chosen.judged.pass_s * (1.0 - NEARLY):
        text += (
            f" The fastest pass there is that of {_named(fastest)}: {fastest.judged.pass_s * 1e3:.4g} ms for "
            f"{fastest.gpu_s / chosen.gpu_s:.3g} times the GPU-seconds."
        )
    return text


def _moves(advice: Advice) -> str:
    chosen = advice.candidates[advice.chosen]
    there = [
        each
        for each in advice.candidates
        if (each.num_ranks, each.num_slots) == (chosen.num_ranks, chosen.num_slots) and each.policy != "none"
    ]
    parts, without = [], _without(advice.now)
    for each in sorted(there, key=lambda each: each is not chosen):
        on = each.judged
        when = "decides after every window"
        if each.policy != "auto":
            when = "plans every window" if advice.windows[0] == 1 else f"plans every {advice.windows[0]} windows"
        text = f"`{each.policy}` {when}; "
        if on.transfers:
            text += (
                f"it moved {counted(on.moves, 'time')}, {on.transfers:,} experts in all, {_gb(on.wire_bytes)} "
                f"({on.network_transfers / on.transfers:.0%} between nodes); pauses are {on.pause_s / on.pass_s:.2%} "
                "of the time"
            )
        else:
            text += "it moved nothing"
        before = each.chosen_on
        text += f" (before, on {advice.chosen_on}: {before.transfers:,} experts)"
        parts.append(text + ("" if each is chosen else f", and a pass takes {_less(each.saved)} than {without}") + ".")
    return f"How often, on {advice.judged_on} and these slots: {' '.join(parts) or 'only `none` was tried.'}"


def _memory(advice: Advice) -> str:
    best, model = advice.recommended, advice.model
    layers = max(advice.num_layers, model.num_layers)
    text = (
        f"Memory of a rank: {_gb(best.weights_bytes)} of experts ({counted(layers, 'layer')} x "
        f"{best.slots_per_rank} slots x {model.expert_bytes / 1e6:.3g} MB){_part(best.redundant_bytes)}; all-to-all "
        f"buffers {_gb(best.buffer_bytes)}{_part(best.buffer_growth_bytes)}"
    )
    if advice.buffer_tokens:
        text += f" (as DeepEP's low-latency mode, {advice.buffer_tokens} tokens of each rank at every slot: assumed)"
    else:
        text += " (assumed not to grow with slots)"
    share = best.memory_bytes / advice.cost.memory_bytes
    text += f". Together {share:.1%} of its memory; candidates had to stay within {advice.memory_share:.0%}."
    tokens = advice.pairs_a_window / advice.window_passes / model.top_k / best.num_ranks
    if tokens > advice.buffer_tokens > 0:
        text += (
            f" A pass has {tokens:,.0f} tokens a rank here, more than such buffers hold: give --window-passes and "
            "--buffer-tokens as the engine has them (0: buffers that do not grow with slots)."
        )
    return text


def _part(redundant: float) -> str:
    return f", {_gb(redundant)} of them for redundant slots" if redundant else ""


def _assumed(advice: Advice) -> str:
    model = advice.model
    text = (
        "Assumed: a pass carries the tokens recorded, however many ranks there are. Time is that of the experts and of "
        f"their all-to-all ({advice.cost.token_bytes / model.hidden_size:g} bytes a value, there and back, once for "
        "each expert of a token); attention and all else is not in it"
    )
    if advice.num_layers != model.num_layers:
        text += f"; layers that the trace lacks are not, either (it has {advice.num_layers} of {model.num_layers})"
    installs = advice.cost.model.install_s * 1e6
    text += f". Transfers run beside the passes, which wait {installs:g} us for each layer's install. "
    if model.weight_bytes > 1.0:
        text += f"Tokens are counted at the speed of FP8, though weights are {model.weights}. "
    return text + cost_words(advice.cost.model, advice.window_passes, advice.pairs_a_window, advice.cost.assumed)


def _named(each: Candidate) -> str:
    spare = f"{each.num_slots} in all, {each.redundant_per_rank} redundant a rank"
    return f"{counted(each.num_ranks, 'rank')} of {each.slots_per_rank} slots ({spare}) with `{each.policy}`"


def _without(now: Candidate) -> str:
    return f"{counted(now.num_ranks, 'rank')} of {now.slots_per_rank} slots in the trivial layout"


def _gb(size: float) -> str:
    return f"{size / 1e9:,.0f} GB" if size >= 1e11 else f"{size / 1e9:.3g} GB"


def _less(saved: float) -> str:
    return f"{abs(saved):.1%} {'less' if saved >= 0.0 else 'more'} time"
