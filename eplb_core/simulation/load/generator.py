"""Load like that of a real model, made from a few statistics: for trying policies before there is a recording."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from eplb_core._arrays import (
    FloatArray,
    IntArray,
    check_flag,
    check_int,
    check_kind,
    check_made,
    check_real,
    check_word,
    to_list,
)
from eplb_core._text import quoted
from eplb_core.simulation.load.sources import TraceStream
from eplb_core.trace import Trace


class Workload(NamedTuple):
    """How uneven the load of a layer is: percentiles 5, 50 and 95 over layers."""

    sigma: tuple[float, float, float]
    """Standard deviation of the logarithm of the experts' load."""
    max_over_mean: tuple[float, float, float]
    """Load of the hottest expert over the mean."""


WORKLOADS = {
    "prefill_in512": Workload((0.484, 0.586, 0.685), (3.6, 5.49, 10.11)),
    "prefill_in1024": Workload((0.497, 0.657, 0.793), (4.21, 5.89, 11.24)),
    "prefill_in2048": Workload((0.511, 0.767, 0.901), (4.31, 7.06, 11.34)),
    "prefill_in4096": Workload((0.524, 0.857, 1.033), (4.32, 8.2, 12.11)),
    "decode_in500out1500": Workload((0.471, 0.596, 0.76), (3.35, 5.34, 8.62)),
    "decode_in2000out100": Workload((0.461, 0.682, 0.836), (3.46, 5.79, 9.34)),
}
"""Statistics of recorded loads of DeepSeek-V3, 58 layers of 256 experts, by phase and length of inputs and outputs."""

# Shares of the variance of an expert's log load: what all traffic of a model has in common, what a domain adds, a phase
# (prefill or decode) in it, a length, and one window. Two kinds of traffic correlate by what they share: 0.2 between
# domains, 0.7 between phases, 0.9 between lengths, 0.99 between windows of the same traffic.
_MODEL, _DOMAIN, _PHASE, _LENGTH, _WINDOW = 0.2, 0.5, 0.2, 0.09, 0.01


@dataclass(frozen=True, slots=True)
class Traffic:
    """A stretch of windows with one kind of traffic."""

    windows: int
    """How many."""
    workload: str = "prefill_in4096"
    """How uneven: a key of `WORKLOADS`. What is before `_` is the phase, what is after it the length."""
    domain: str = "a"
    """Another domain is another traffic: log loads correlate by 0.2 only."""
    blend: float = 0.0
    """Windows over which the traffic before passes over into this one; 0 = at once."""


def generate_trace(
    traffic: Sequence[Traffic] | int = 64,
    *,
    num_layers: int = 58,
    num_experts: int = 256,
    window_tokens: int = 65_536,
    top_k: int = 8,
    sampled: bool = True,
    seed: int = 0,
) -> Trace:
    """Generate a trace with the imbalance of a real model's layers and the correlations of its kinds of traffic.

    Log loads of experts are normal, scaled layer by layer so that their deviation and the hottest expert's share have
    the recorded percentiles: few experts have 8 to 14 times the mean. Kinds of traffic share part of them: the log
    loads of two windows correlate by 0.99 for the same traffic, 0.9 for another length, 0.7 for prefill against
    decode, 0.2 for another domain.

    Args:
        traffic: Stretches of traffic, or a number of windows of the default one.
        num_layers: Layers L.
        num_experts: Experts E, 16 or more.
        window_tokens: Tokens of a window.
        top_k: Experts of a token: each layer and window holds `window_tokens * top_k` in all.
        sampled: Whether tokens are drawn at random; else each expert gets exactly its share, rounded.
        seed: Of numpy's generator; equal arguments give equal traces with one version of numpy.

    Returns:
        The trace.

    Raises:
        ValueError: A number is out of range, or a workload is not known.

    Cost:
        About 0.3 microseconds an expert, layer and window. See `stream_generated` for more than fits in memory.

    Example:
        >>> trace = generate_trace([Traffic(2), Traffic(2, domain="b")], num_layers=2, num_experts=32)
        >>> trace.load.shape, int(trace.load[0, 0].sum())
        ((4, 2, 32), 524288)

    Source:
        Statistics of the expert loads of DeepSeek-V3 that SGLang's authors published with sgl-project/sglang issue
        6017; lognormal shares and a model of common factors are what fits them.
    """
    stretches = [Traffic(check_int(traffic, "traffic", 1))] if isinstance(traffic, int) else to_list(traffic, "traffic")
    stream = stream_generated(
        stretches,
        num_layers=num_layers,
        num_experts=num_experts,
        window_tokens=window_tokens,
        top_k=top_k,
        sampled=sampled,
        seed=seed,
    )
    load = np.stack([np.asarray(window) for window in stream.open()])
    names = tuple(f"{each.domain} {each.workload}" for each in stretches for _ in range(each.windows))
    return Trace(load, names, top_k=top_k, source=f"generated, seed {seed}")


def stream_generated(
    traffic: Sequence[Traffic],
    *,
    num_layers: int = 58,
    num_experts: int = 256,
    window_tokens: int = 65_536,
    top_k: int = 8,
    sampled: bool = True,
    seed: int = 0,
) -> TraceStream:
    """The same windows one by one, for replays longer than memory. Arguments as for `generate_trace`."""
    if not traffic:
        raise ValueError("`traffic` (=[]) must have a stretch of windows or more")
    for each in traffic:
        check_kind(each, "traffic", Traffic)
        check_int(each.windows, "windows", 1)
        check_real(each.blend, "blend", at_least=0.0)
        check_word(each.workload, "workload", WORKLOADS)
    shape = (check_int(num_layers, "num_layers", 1), check_int(num_experts, "num_experts", 16))
    total = check_int(window_tokens, "window_tokens", 1) * check_int(top_k, "top_k", 1)
    check_int(seed, "seed", 0)
    check_made(num_layers=shape[0], num_experts=shape[1], traffic=sum(each.windows for each in traffic))
    if total >= 2**53:
        raise ValueError(f"`window_tokens` (={quoted(window_tokens, 40)}) times `top_k` must be below 2**53")
    sampled = check_flag(sampled, "sampled")

    def windows() -> Iterator[IntArray]:
        rng = np.random.default_rng([seed, 1])
        factors = _Factors(shape, seed)
        before = traffic[0]
        for each in traffic:
            for window in range(each.windows):
                share = _share(factors, each, rng)
                if window < each.blend:
                    part = (window + 1) / (each.blend + 1)
                    share = part * share + (1.0 - part) * _share(factors, before, rng)
                yield _draw(share, total, rng) if sampled else np.rint(share * total).astype(np.int64)
            before = each

    return TraceStream(windows, sum(each.windows for each in traffic))


class _Factors:
    """What kinds of traffic have in common: a normal field `[L, E]` by name, made when it is first asked for."""

    def __init__(self, shape: tuple[int, int], seed: int) -> None:
        self.shape, self.seed = shape, seed
        self.known: dict[str, FloatArray] = {}
        order = np.random.default_rng([seed, 0])
        self.quantile = order.permutation((np.arange(shape[0]) + 0.5) / shape[0])  # how uneven each layer is, 0 to 1

    def field(self, name: str) -> FloatArray:
        if name not in self.known:
            words = [self.seed, 2, *name.encode()]
            self.known[name] = np.random.default_rng(words).standard_normal(self.shape)
        return self.known[name]

    def steady(self, each: Traffic) -> FloatArray:
        """The part that does not change from window to window."""
        phase, _, length = each.workload.partition("_")
        names = ("", each.domain, f"{each.domain}/{phase}", f"{each.domain}/{phase}/{length}")
        parts = zip((_MODEL, _DOMAIN, _PHASE, _LENGTH), names, strict=True)
        return np.asarray(sum(np.sqrt(part) * self.field(name) for part, name in parts))


def _share(factors: _Factors, each: Traffic, rng: np.random.Generator) -> FloatArray:
    """Share of each expert in one window, `[L, E]`, rows sum to 1."""
    steady = factors.steady(each)
    normal = steady + np.sqrt(_WINDOW) * rng.standard_normal(factors.shape)
    workload = WORKLOADS[each.workload]
    sigma = _percentile(workload.sigma, factors.quantile)
    top = np.minimum(_percentile(workload.max_over_mean, factors.quantile), factors.shape[1] / 2)
    return _with_skew(normal, steady.argmax(axis=1), sigma, top)


def _percentile(at_5_50_95: tuple[float, float, float], at: FloatArray) -> FloatArray:
    """Straight lines between the percentiles, drawn on to 0 and 1."""
    low, middle, high = at_5_50_95
    ends = (low - (middle - low) / 9, high + (high - middle) / 9)
    return np.interp(at, [0.0, 0.05, 0.5, 0.95, 1.0], [ends[0], low, middle, high, ends[1]])


def _with_skew(normal: FloatArray, hottest: IntArray, sigma: FloatArray, top: FloatArray) -> FloatArray:
    """Shares whose logs have deviation `sigma [L]`, the hottest expert `top [L]` times the mean.

    The hottest expert is the same in all windows of a traffic: it is not the window's noise that makes it hot.
    """
    experts, rows = normal.shape[1], np.arange(len(normal))
    scale = sigma / normal.std(axis=1)
    share = normal
    for _ in range(12):  # the deviation of the logs settles to within a thousandth
        share = np.exp(normal * scale[:, None])
        share[rows, hottest] = 0.0
        share /= share.sum(axis=1, keepdims=True)
        # No other expert may be hotter: what is above gets 0.95 of the hottest's share.
        share = np.minimum(share, (0.95 * top / (experts - top))[:, None])
        share[rows, hottest] = top / (experts - top) * share.sum(axis=1)
        share /= share.sum(axis=1, keepdims=True)
        scale *= sigma / np.log(share).std(axis=1)
    return share


def _draw(share: FloatArray, total: int, rng: np.random.Generator) -> IntArray:
    """Counts that are drawn: they sum to `total` on each layer."""
    return np.stack([rng.multinomial(total, row / row.sum()) for row in share]).astype(np.int64)
