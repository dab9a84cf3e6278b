"""Copies within this process, and walks over spans in portions."""

from __future__ import annotations

import os

import numpy as np
import pytest

from eplb_core.loading.transports import span_copies
from eplb_core.loading.transports.batches import Spans


@pytest.mark.parametrize("native", [True, False])
def test_spans_are_copied_with_and_without_the_systems_help(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_copies, "IS_NATIVE", native and span_copies.IS_NATIVE)
    source, target = np.arange(10, dtype=np.uint8), np.zeros(10, dtype=np.uint8)
    at = np.array([0, 5], dtype=np.int64)
    assert span_copies.copy(target.ctypes.data + at, source.ctypes.data + at[::-1], np.array([3, 2])) == 5
    assert target.tolist() == [5, 6, 7, 0, 0, 0, 1, 0, 0, 0]


@pytest.mark.skipif(not span_copies.IS_NATIVE, reason="reads by the system's call")
def test_a_span_larger_than_a_portion_is_copied_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_copies, "_PORTION", 4)
    source, target = np.arange(10, dtype=np.uint8), np.zeros(10, dtype=np.uint8)
    one, zero = np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    spans = Spans(one * target.ctypes.data, one * source.ctypes.data, one * 10, zero, zero)
    walk = span_copies.Walk(spans, zero, np.ones(1, dtype=np.bool_), os.getpid())
    portions = []
    while expected := walk.next():
        portions.append(walk.copy())
        assert portions[-1] == expected
    assert portions == [4, 4, 2]
    assert target.tolist() == source.tolist()
