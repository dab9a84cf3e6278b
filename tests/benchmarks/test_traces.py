"""The generator keeps what its docstring claims."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import traces


@pytest.mark.parametrize("workload", sorted(traces.SKEWS))
def test_generated_loads_are_as_uneven_as_the_workload(workload: str) -> None:
    skew = traces.SKEWS[workload]
    load = traces.generated_load(workload).astype(np.float64)
    sigma = np.log(load).std(axis=1)
    assert np.percentile(sigma, [5, 50, 95]) == pytest.approx(skew.sigma, rel=0.02)
    assert np.percentile(load.max(axis=1) / load.mean(axis=1), [5, 50, 95]) == pytest.approx(
        skew.max_over_mean, rel=0.02
    )
    assert np.median(sigma[:10]) == pytest.approx(skew.sigma_first, rel=0.03)
    assert load.sum(axis=1) == pytest.approx(np.full(58, 2**26), rel=1e-4)


def test_windows_change_by_the_correlation_asked_for() -> None:
    trace = traces.generated_trace(num_windows=3, correlation=0.9, seed=5)
    logs = np.log(trace)
    near = [np.corrcoef(logs[t, layer], logs[t + 1, layer])[0, 1] for t in (0, 1) for layer in range(58)]
    assert np.mean(near) == pytest.approx(0.9, abs=0.03)


def test_any_shape_and_the_same_load_for_the_same_seed() -> None:
    load = traces.generated_load("prefill_in512", num_layers=5, num_experts=64, assignments=10**6, seed=3)
    assert load.shape == (5, 64)
    assert load.min() >= 1
    assert np.array_equal(
        load, traces.generated_load("prefill_in512", num_layers=5, num_experts=64, assignments=10**6, seed=3)
    )
    assert not np.array_equal(
        load, traces.generated_load("prefill_in512", num_layers=5, num_experts=64, assignments=10**6)
    )


def test_recorded_drift_has_every_token() -> None:
    load = traces.drift_load()
    assert load.shape == (512, 16, 128)
    assert (load.sum(axis=2) == 8192 * 8).all()
