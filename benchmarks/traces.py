"""Expert loads to measure with: recorded ones that ship, and generated ones as skewed as DeepSeek-R1's.

The generator is matched to statistics of DeepSeek-R1's loads on seven workloads (58 layers x 256 experts): over layers,
the 5th, 50th and 95th percentile of the standard deviation of log load and of max / mean, and the median of the former
on the first sixth of the layers and on the rest. A lognormal load alone has too cold a hottest expert (4.5 times the
mean where 5.5 is measured), so the hottest is set by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Load = npt.NDArray[np.int64]

DATA = Path(__file__).parent / "data"


class Skew(NamedTuple):
    """How uneven the experts of one workload are."""

    sigma: tuple[float, float, float]
    """Standard deviation of log load: percentiles 5, 50, 95 over layers."""
    max_over_mean: tuple[float, float, float]
    """Load of the hottest expert over the mean: percentiles 5, 50, 95 over layers."""
    sigma_first: float
    """Median of sigma on the first 10 of 58 layers."""


SKEWS = {
    "prefill_in512": Skew((0.484, 0.586, 0.685), (3.60, 5.49, 10.11), 0.629),
    "prefill_in1024": Skew((0.497, 0.657, 0.793), (4.21, 5.89, 11.24), 0.626),
    "prefill_in4096": Skew((0.524, 0.857, 1.033), (4.32, 8.20, 12.11), 0.643),
    "decode_in500out1500": Skew((0.471, 0.596, 0.760), (3.35, 5.34, 8.62), 0.575),
    "decode_in2000out100": Skew((0.461, 0.682, 0.836), (3.46, 5.79, 9.34), 0.587),
}


def generated_load(
    workload: str = "prefill_in4096",
    *,
    num_layers: int = 58,
    num_experts: int = 256,
    assignments: int = 2**26,
    seed: int = 0,
) -> Load:
    """Tokens routed to each expert, `[L, E]`, as uneven as DeepSeek-R1's on `workload`.

    Args:
        workload: A key of `SKEWS`.
        num_layers: Layers L; from 20 on the percentiles over layers are those of the workload.
        num_experts: Experts E, 16 or more.
        assignments: Sum of each layer but for rounding: tokens times top-k.
        seed: Of numpy's generator.
    """
    trace = generated_trace(
        workload, num_windows=1, num_layers=num_layers, num_experts=num_experts, assignments=assignments, seed=seed
    )
    return np.asarray(trace[0])


def generated_trace(
    workload: str = "prefill_in4096",
    *,
    num_windows: int,
    correlation: float = 0.98,
    num_layers: int = 58,
    num_experts: int = 256,
    assignments: int = 2**26,
    seed: int = 0,
) -> Load:
    """Windows of load, `[T, L, E]`: each as uneven as the workload, the log loads of neighbours correlated.

    Args:
        workload: A key of `SKEWS`.
        num_windows: Windows T.
        correlation: Between the log loads of one window and the next.
        num_layers: Layers L.
        num_experts: Experts E, 16 or more.
        assignments: Sum of each layer and window but for rounding.
        seed: Of numpy's generator.
    """
    skew, rng = SKEWS[workload], np.random.default_rng(seed)
    sigma, top = _layer_skews(skew, num_layers, rng)
    noise = rng.standard_normal((num_windows, num_layers, num_experts))
    state = noise[0]
    windows = []
    for window in range(num_windows):
        if window:
            state = correlation * state + np.sqrt(1.0 - correlation**2) * noise[window]
        share = _with_skew(state, sigma, np.minimum(top, num_experts / 2))
        windows.append(np.maximum(np.rint(share * assignments), 1).astype(np.int64))
    return np.stack(windows)


def drift_load() -> Load:
    """Recorded: `[512, 16, 128]`, windows of 8,192 tokens of a 16-layer, 128-expert, top-8 model.

    The mixture of 28 tenants (languages and code) walks, with two sudden switches at windows 170 and 340.
    """
    with np.load(DATA / "moe128_drift.npz") as file:
        return np.asarray(file["drift_load"], dtype=np.int64)


def _layer_skews(
    skew: Skew, layers: int, rng: np.random.Generator
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Sigma and max / mean of each layer: the workload's percentiles, the early layers at their own median."""
    at = (np.arange(layers) + 0.5) / layers
    sigma, top = _quantiles(skew.sigma, at), _quantiles(skew.max_over_mean, at)  # paired by order: they correlate
    early = round(layers * 10 / 58)
    start = int(np.clip(np.searchsorted(sigma, skew.sigma_first) - early // 2, 0, layers - early))
    first = np.arange(start, start + early)
    rest = np.setdiff1d(np.arange(layers), first)
    order = np.concatenate([rng.permutation(first), rng.permutation(rest)])
    return sigma[order], top[order]


def _quantiles(at_5_50_95: tuple[float, float, float], at: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Straight lines between the percentiles, drawn on beyond the outer two."""
    low, middle, high = at_5_50_95
    ends = (low - (middle - low) / 9, high + (high - middle) / 9)
    return np.interp(at, [0.0, 0.05, 0.5, 0.95, 1.0], [ends[0], low, middle, high, ends[1]])


def _with_skew(
    normal: npt.NDArray[np.float64], sigma: npt.NDArray[np.float64], top: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Shares `[L, E]` that sum to 1: their logs have deviation `sigma [L]`, the largest is `top [L]` times the mean."""
    experts = normal.shape[1]
    rows = np.arange(len(normal))
    hottest = normal.argmax(axis=1)
    scale = sigma.copy()
    for _ in range(60):
        share = np.exp(normal * scale[:, None])
        share[rows, hottest] = 0.0
        share /= share.sum(axis=1, keepdims=True)
        # No other expert may be hotter: what is above gets 0.95 of the hottest's share.
        limit = 0.95 * top / (experts - top)
        share = np.minimum(share, limit[:, None])
        share[rows, hottest] = top / (experts - top) * share.sum(axis=1)
        share /= share.sum(axis=1, keepdims=True)
        scale *= sigma / np.log(share).std(axis=1)
    return np.asarray(share)
