"""`advise`: how many ranks and slots, which policy, and what that saves and costs.

Each candidate is replayed once. It is chosen on the first half of the windows and judged on the second, which neither
its layouts nor the choice have seen.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from eplb_core._arrays import ArrayLike, check_call, check_int, check_kind, check_real, check_word, to_list
from eplb_core._text import counted
from eplb_core.files.reading import PathLike
from eplb_core.placement.worth.decision import hold_out, tokens_a_window
from eplb_core.simulation.advice.model import ModelExperts, read_model
from eplb_core.simulation.advice.result import Advice, Candidate, Judged
from eplb_core.simulation.advice.words import conclude_advice
from eplb_core.simulation.hardware import HARDWARE, Hardware, cost_preset
from eplb_core.simulation.policies import BASIC, PolicyName
from eplb_core.simulation.replay import simulate
from eplb_core.simulation.result import Simulation
from eplb_core.simulation.sweep import slots_of
from eplb_core.simulation.words import NEARLY
from eplb_core.topology import Topology
from eplb_core.trace import Trace, check_trace_load

_NODE, _MOST_RANKS, _TRIED = 8, 64, 4
"""By default from so many ranks to so many, as many numbers, each twice the one before."""
_INTERVAL = 16


def advise(
    trace: Trace | ArrayLike,
    *,
    gpu: str | Hardware,
    model: PathLike | Mapping[str, Any] | ModelExperts,
    ranks: Sequence[int] | None = None,
    redundant_per_rank: Sequence[int] = (0, 1),
    policies: PolicyName | Sequence[PolicyName] | None = None,
    interval: int | None = None,
    window_passes: float = 1.0,
    pass_limit_s: float | None = None,
    memory_share: float = 0.5,
    buffer_tokens: int = 128,
    progress: Callable[[int, int], None] | None = None,
) -> Advice:
    """How many ranks and slots does this traffic want, under which policy, and what does that save and cost?

    All combinations are replayed. Those whose experts and buffers fit are compared by GPU-seconds a pass, ranks times
    the pass with its pauses, on the first half of the windows: of those within 1% of the least, the fewest ranks, then
    the fewest slots, then the fewest transfers are taken. All figures are of the second half. What saves less than 2%
    there is not recommended: the trivial layout on the same ranks is.

    Args:
        trace: A trace, or loads `[T, L, E]` of four windows or more.
        gpu: A name in `HARDWARE`, or your own data sheet.
        model: Path of a Hugging Face config.json, or what it holds (`read_model`).
        ranks: Numbers of EP ranks to try. Default: 8, or the next power of two whose experts fit, and up to three
            doublings; from fewer where there are fewer than 32 experts.
        redundant_per_rank: Slots of a rank to try, beyond the fewest with which all ranks hold all experts. Without
            any, the trivial layout is always a candidate, with which the others are compared.
        policies: As for `simulate`. Default: `"none"`, `"auto"`, and `"deepseek"` where torch is installed.
        interval: Windows that the first layout is made from, and between the rebalances of all policies but `"auto"`,
            which decides after every window. Default: 16, or a quarter of the windows where that is less.
        window_passes: Passes that a window covers.
        pass_limit_s: The longest pass, of the experts and their all-to-all, that may be recommended. Default: any.
        memory_share: Part of a GPU's memory that experts and all-to-all buffers may take.
        buffer_tokens: Tokens of a rank and pass for which every slot has room in the buffers of the all-to-all, as
            DeepEP's low-latency mode allocates them; 0 = buffers that do not grow with slots.
        progress: Called with replays done and in all.

    Returns:
        Candidates, the Pareto front, one recommendation and its reason; `print` it.

    Raises:
        ValueError: Too few windows, or halves without load; the model has other experts than the trace; nothing fits,
            or no pass is within the limit.

    Cost:
        A `simulate` for each combination: about a second each for `"auto"` on 112 windows of 16 layers.

    Example:
        >>> config = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 4, "num_experts_per_tok": 1,
        ...           "num_hidden_layers": 1, "torch_dtype": "bfloat16"}
        >>> windows = np.array([[[100, 100, 1, 1]]] * 4) * 1000
        >>> advice = advise(windows, gpu="H200", model=config, ranks=[2], redundant_per_rank=[0], policies="auto")
        >>> advice.recommended.policy, round(advice.recommended.saved, 2)
        ('auto', 0.49)
    """
    check_call(progress, "progress")
    hardware = gpu if isinstance(gpu, Hardware) else HARDWARE[check_word(gpu, "gpu", HARDWARE, ", or a Hardware")]
    experts = model if isinstance(model, ModelExperts) else read_model(model)
    load = trace.load if isinstance(trace, Trace) else check_trace_load(trace)
    _check_same(experts, load, trace.top_k if isinstance(trace, Trace) else None)
    first, half = _spans(load, interval)
    passes = check_real(window_passes, "window_passes", above=0.0)
    cost = cost_preset(
        hardware,
        hidden_size=experts.hidden_size,
        intermediate_size=experts.intermediate_size,
        weight_bytes=experts.weight_bytes,
    )
    room = check_real(memory_share, "memory_share", above=0.0, at_most=1.0) * hardware.memory_bytes
    limit = np.inf if pass_limit_s is None else check_real(pass_limit_s, "pass_limit_s", above=0.0)
    layers = max(load.shape[1], experts.num_layers)
    memory = _Memory(experts, layers, check_int(buffer_tokens, "buffer_tokens", 0), room)
    spares = sorted(
        {check_int(each, "redundant_per_rank", 0) for each in to_list(redundant_per_rank, "redundant_per_rank")}
    )
    if not spares:
        raise ValueError("`redundant_per_rank` (=[]) must name one number or more")
    counts = _rank_counts(ranks, memory)
    names = _policies(policies)
    frames = [(each, spare) for each in counts for spare in sorted({0, *spares})]  # 0: what there is without slots
    settings = [
        (number, spare, name) for number, spare in frames for name in names if spare in spares or name == "none"
    ]
    source = trace if isinstance(trace, Trace) else Trace(load, holds="load")
    number_of_first = 0
    candidates = []
    for done, (number, spare, name) in enumerate(settings, start=1):
        slots = slots_of(experts.num_experts, number, spare)
        sim = simulate(
            source,
            topology=hardware.topology(number),
            num_slots=slots,
            policy=name,
            interval=first,
            score_from=half,
            cost=cost,
            window_passes=passes,
        )
        number_of_first = sim.first_window
        candidates.append(_candidate(sim, (first, half), memory))
        if progress is not None:
            progress(done, len(settings))
    advice = Advice(
        trace=trace.path if isinstance(trace, Trace) else "",
        model=experts,
        cost=cost,
        window_passes=passes,
        windows=(first, half, len(load)),
        first_window=number_of_first,
        num_layers=load.shape[1],
        pairs_a_window=tokens_a_window(load[half:]),
        memory_share=memory_share,
        buffer_tokens=buffer_tokens,
        candidates=_compared(candidates),
        pass_limit_s=limit,
        chosen=_choose(candidates, limit),
    )
    return replace(advice, conclusion=conclude_advice(advice))


def _check_same(model: ModelExperts, load: Any, top_k: int | None) -> None:
    if model.num_experts != load.shape[2]:
        raise ValueError(
            f"`model` ({model.num_experts} experts a layer, {model.name}) must be the model of `trace` "
            f"({load.shape[2]} experts); give the config of the model that was recorded"
        )
    if top_k is not None and top_k != model.top_k:
        raise ValueError(
            f"`model` (top-{model.top_k}, {model.name}) must be the model of `trace` (top-{top_k}); give the config of "
            "the model that was recorded"
        )


def _spans(load: Any, interval: int | None) -> tuple[int, int]:
    """The first window that a choice may be made from, and the first that judges it."""
    half = hold_out(load)
    if len(load) < 4 or not half:
        raise ValueError(
            f"`trace` ({counted(len(load), 'window')}) must have four windows or more, with load in both halves: some "
            "to place on, some to choose on, and later ones to judge; `gain_report` (`eplb gain`) takes fewer"
        )
    first = min(_INTERVAL, len(load) // 4) if interval is None else check_int(interval, "interval", 1)
    if first >= half:
        raise ValueError(
            f"`interval` (={first}) must be below {half}, half of the {len(load)} windows: those between are chosen on"
        )
    return first, half


def _policies(policies: PolicyName | Sequence[PolicyName] | None) -> list[PolicyName]:
    if policies is None:
        return [name for name in BASIC if name != "deepseek" or importlib.util.find_spec("torch") is not None]
    names = [policies] if isinstance(policies, str) else to_list(policies, "policies")
    for name in names:
        check_kind(name, "policies", str)
    return ["none", *(name for name in dict.fromkeys(names) if name != "none")]


class _Memory:
    """Bytes of a rank: weights of all slots, and the all-to-all's buffers."""

    def __init__(self, model: ModelExperts, layers: int, tokens: int, room: float) -> None:
        self.model, self.layers, self.tokens, self.room = model, layers, tokens, room

    def weights(self, slots_per_rank: int) -> float:
        return slots_per_rank * self.layers * self.model.expert_bytes

    def buffers(self, num_slots: int) -> float:
        """DeepEP's `get_low_latency_rdma_size_hint` without its flags of some kilobytes.

        Two buffers to send from and two to receive into, each with room for `tokens` of every rank at every slot; a
        message is a token in bfloat16, what is received has 16 bytes more.
        """
        token = 2.0 * self.model.hidden_size
        return num_slots * self.tokens * 2.0 * (token + token + 16.0)

    def fits(self, num_ranks: int, num_slots: int) -> bool:
        return self.weights(-(-num_slots // num_ranks)) + self.buffers(num_slots) <= self.room


def _rank_counts(ranks: Sequence[int] | None, memory: _Memory) -> list[int]:
    experts = memory.model.num_experts

    def fits(number: int) -> bool:
        return memory.fits(number, slots_of(experts, number, 0))

    if ranks is not None:
        counts = sorted({Topology(each).num_ranks for each in to_list(ranks, "ranks")})
        if not counts:
            raise ValueError("`ranks` (=[]) must name one number or more")
        most = experts
        fitting = [each for each in counts if fits(each)]
    else:
        most = min(_MOST_RANKS, experts)
        least = min(_NODE, max(experts // 4, 1))
        doubled = [1 << power for power in range(most.bit_length()) if 1 << power >= least]
        counts = fitting = [each for each in doubled if fits(each)][:_TRIED]
    if not fitting:
        tried = f"{', '.join(map(str, counts))} ranks" if counts else f"up to {counted(most, 'rank')}"
        whole = memory.weights(experts) / 1e9
        raise ValueError(
            f"`ranks`: the experts ({whole:,.3g} GB in all, {memory.layers} layers) and buffers of "
            f"{memory.buffers(experts) / 1e9:.3g} GB a rank do not fit in {memory.room / 1e9:.3g} GB a rank on "
            f"{tried}; give more `ranks`, or a larger `memory_share` (of a rank's memory)"
        )
    return counts


def _candidate(sim: Simulation, spans: tuple[int, int], memory: _Memory) -> Candidate:
    first, half = spans
    slots, number = sim.num_slots, sim.topology.num_ranks
    per_rank, least = slots // number, -(-memory.model.num_experts // number)
    return Candidate(
        policy=sim.policy,
        num_ranks=number,
        num_nodes=sim.topology.num_nodes,
        slots_per_rank=per_rank,
        redundant_per_rank=per_rank - least,
        num_slots=slots,
        weights_bytes=memory.weights(per_rank),
        redundant_bytes=memory.weights(per_rank - least),
        buffer_bytes=memory.buffers(slots),
        buffer_growth_bytes=memory.buffers(slots) - memory.buffers(least * number),
        fits=memory.fits(number, slots),
        chosen_on=_judged(sim, first, half),
        judged=_judged(sim, half, len(sim.step_s)),
    )


def _judged(sim: Simulation, first: int, end: int) -> Judged:
    """What a replay reaches and moves on some of its windows."""
    within = (sim.rebalance_windows >= first) & (sim.rebalance_windows < end)
    pause_s = float(sim.pause_s[within].sum())
    passes = (end - first) * sim.window_passes
    links = sim.link_transfers[within].sum(axis=(0, 1)).tolist()
    top = float(sim.max_load[first:end].sum())
    size = 0.0 if sim.cost is None else sim.cost.model.expert_bytes
    return Judged(
        pass_s=float(sim.step_s[first:end].sum()) / (end - first) + pause_s / passes,
        pause_s=pause_s / passes,
        balancedness=float(sim.mean_load[first:end].sum()) / top if top else float("nan"),
        moves=int((sim.transfers[within].sum(axis=1) > 0).sum()),
        node_transfers=links[1],
        network_transfers=links[2],
        wire_bytes=float(links[1] + links[2]) * size,
    )


def _compared(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """With what each saves, and whether it is on the front."""

    def kept(num_ranks: int, num_slots: int) -> float:
        frame = (num_ranks, num_slots, "none")
        return next(c.judged.pass_s for c in candidates if (c.num_ranks, c.num_slots, c.policy) == frame)

    def aims(each: Candidate) -> tuple[float, ...]:
        return each.judged.pass_s, each.gpu_s, each.memory_bytes

    fitting = [(at, aims(each)) for at, each in enumerate(candidates) if each.fits]
    found = []
    for at, each in enumerate(candidates):
        own = aims(each)
        beaten = any(  # of equals, the first stays
            all(a <= b for a, b in zip(other, own, strict=True)) and (other != own or before < at)
            for before, other in fitting
        )
        least = each.num_slots - each.redundant_per_rank * each.num_ranks
        found.append(
            replace(
                each,
                saved=1.0 - each.judged.pass_s / kept(each.num_ranks, least),
                saved_by_moves=1.0 - each.judged.pass_s / kept(each.num_ranks, each.num_slots),
                on_front=each.fits and not beaten,
            )
        )
    return tuple(found)


def _choose(candidates: Sequence[Candidate], limit: float) -> int:
    """The candidate to take, by the windows to choose on alone.

    For each number of ranks and slots the policy as `Comparison.best` names it; then the ranks and slots.
    """
    frames: dict[tuple[int, int], list[int]] = {}
    for at, each in enumerate(candidates):
        if each.fits:
            frames.setdefault((each.num_ranks, each.num_slots), []).append(at)

    def seconds(at: int) -> float:
        return candidates[at].chosen_on.pass_s

    def gpu_seconds(at: int) -> float:
        return candidates[at].num_ranks * seconds(at)

    kept = {frame: [at for at in members if seconds(at) <= limit] for frame, members in frames.items()}
    if not any(kept.values()):
        fastest = min(seconds(at) for members in frames.values() for at in members)
        raise ValueError(
            f"`pass_limit_s` (={limit:g}) must be at least {fastest:.3g}, the fastest pass of those that fit; try more "
            "`ranks`"
        )
    best = []
    for members in filter(None, kept.values()):
        near = min(map(seconds, members)) * (1.0 + NEARLY)
        best.append(
            min(
                (at for at in members if seconds(at) <= near),
                key=lambda at: (candidates[at].chosen_on.transfers, seconds(at)),
            )
        )
    near = min(map(gpu_seconds, best)) * (1.0 + NEARLY)
    return min(
        (at for at in best if gpu_seconds(at) <= near),
        key=lambda at: (candidates[at].num_ranks, candidates[at].num_slots, candidates[at].chosen_on.transfers),
    )
