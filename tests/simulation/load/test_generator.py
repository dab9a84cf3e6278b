"""Generated load has the statistics that it claims: DeepSeek-V3's, measured on recorded loads."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_core import Traffic, generate_trace
from eplb_core._arrays import FloatArray
from eplb_core.simulation.load.generator import WORKLOADS, stream_generated

WINDOW_TOKENS = 2**20


@pytest.fixture(scope="module")
def load() -> FloatArray:
    """Two windows of each: a workload, another length, decode, another domain."""
    kinds = [Traffic(2), Traffic(2, "prefill_in512"), Traffic(2, "decode_in500out1500"), Traffic(2, domain="b")]
    return generate_trace(kinds, window_tokens=WINDOW_TOKENS).load.astype(np.float64)


@pytest.mark.parametrize(
    ("window", "workload"), [(0, "prefill_in4096"), (2, "prefill_in512"), (4, "decode_in500out1500")]
)
def test_layers_are_as_uneven_as_recorded(load: FloatArray, window: int, workload: str) -> None:
    """Percentiles 5, 50 and 95 over layers of the log's deviation, and of max over mean."""
    sigma = np.log(load[window]).std(axis=1)
    top = load[window].max(axis=1) / load[window].mean(axis=1)
    assert np.percentile(sigma, [5, 50, 95]) == pytest.approx(WORKLOADS[workload].sigma, rel=0.03)
    assert np.percentile(top, [5, 50, 95]) == pytest.approx(WORKLOADS[workload].max_over_mean, rel=0.04)


def test_few_experts_have_eight_to_fourteen_times_the_mean(load: FloatArray) -> None:
    times = load[0] / load[0].mean(axis=1, keepdims=True)
    assert 0 < (times > 8).sum() < 58
    assert 8 < times.max() < 15


@pytest.mark.parametrize(("window", "correlation"), [(1, 0.99), (2, 0.9), (4, 0.7), (6, 0.2)])
def test_kinds_of_traffic_are_as_alike_as_recorded(load: FloatArray, window: int, correlation: float) -> None:
    """The same traffic, another length, decode, another domain: median over layers."""
    logs = np.log(load)
    each = [np.corrcoef(logs[0, layer], logs[window, layer])[0, 1] for layer in range(load.shape[1])]
    assert np.median(each) == pytest.approx(correlation, abs=0.03)


def test_each_layer_and_window_holds_all_tokens(load: FloatArray) -> None:
    assert (load.sum(axis=2) == WINDOW_TOKENS * 8).all()


def test_traffic_passes_over_where_it_blends() -> None:
    kinds = [Traffic(1), Traffic(6, domain="b", blend=4)]
    load = generate_trace(kinds, num_layers=4, sampled=False).load.astype(np.float64)
    logs = np.log(np.maximum(load, 1))
    alike = [np.corrcoef(logs[0].ravel(), logs[window].ravel())[0, 1] for window in range(1, 7)]
    assert alike[0] > alike[1] > alike[2] > alike[3] > alike[4]
    assert alike[0] > 0.8
    assert alike[5] < 0.4


def test_equal_arguments_give_equal_traces_and_windows_come_one_by_one() -> None:
    kinds = [Traffic(2), Traffic(1, domain="b")]
    trace = generate_trace(kinds, num_layers=2, num_experts=16, seed=3)
    stream = stream_generated(kinds, num_layers=2, num_experts=16, seed=3)
    for _ in range(2):
        windows = np.stack([np.asarray(window) for window in stream.open()])
        assert np.array_equal(trace.load, windows)
    assert stream.num_windows == 3
    assert trace.windows == ("a prefill_in4096", "a prefill_in4096", "b prefill_in4096")
    assert not np.array_equal(trace.load, generate_trace(kinds, num_layers=2, num_experts=16, seed=4).load)


@pytest.mark.parametrize(
    ("traffic", "options", "match"),
    [
        ([], {}, "a stretch of windows or more"),
        (0, {}, r"`traffic` \(=0\).*at least 1"),
        ([Traffic(0)], {}, r"`windows` \(=0\)"),
        ([Traffic(1, "chat")], {}, r"`workload` \(='chat'\) must be one of prefill_in512"),
        ([Traffic(1, blend=-1)], {}, r"`blend` \(=-1.0\)"),
        (1, {"num_experts": 8}, r"`num_experts` \(=8\) must be at least 16"),
    ],
)
def test_bad_arguments_raise_with_the_numbers(traffic: object, options: dict[str, int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        generate_trace(traffic, **options)  # type: ignore[arg-type]
