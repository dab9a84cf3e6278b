"""Counting tokens per expert: FAULTS B14, G3, G4, G9, G10, G12, G13 and the recorder's faults."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from eplb_core.load import LoadWindows, check_counts, check_trace, count_topk, fold_slots


def test_empty_batches_and_views_are_accepted() -> None:
    """G10: no row at all, and a tensor with an offset and strides."""
    assert count_topk(np.empty((0, 3, 2), dtype=np.int64), 5).tolist() == [[0] * 5] * 3
    whole = torch.arange(24, dtype=torch.int32).reshape(4, 6) % 5
    assert count_topk(whole[1:, ::2], 5).tolist() == count_topk(whole[1:, ::2].contiguous(), 5).tolist()


@given(st.integers(0, 80), st.sampled_from([np.int32, np.int64]), st.data())
def test_counting_agrees_with_a_dictionary(rows: int, dtype: type[np.signedinteger[Any]], data: st.DataObject) -> None:
    """G1, G3, G4, G9: every pair counts, padding and rows from `num_tokens` on do not, whatever those hold."""
    ids = data.draw(hnp.arrays(dtype, (rows, 3, 2), elements=st.integers(-1, 6)))
    tokens = data.draw(st.none() | st.integers(0, rows))
    counts = Counter((layer, e) for token in ids[:tokens] for layer, row in enumerate(token) for e in row if e >= 0)
    ids[rows if tokens is None else tokens :] = 99
    got = count_topk(ids, 7, num_tokens=tokens)
    assert got.dtype == np.int64
    assert got.tolist() == [[counts[layer, e] for e in range(7)] for layer in range(3)]
    assert count_topk(ids[:, 0], 7, num_tokens=tokens).tolist() == got[0].tolist()


@pytest.mark.parametrize(
    ("ids", "num_tokens", "error", "message"),
    [
        (np.where(np.arange(12) == 11, 4, 0).reshape(2, 3, 2), None, IndexError, r"\(=4\).*token 1, layer 2"),
        (np.where(np.arange(12) == 11, -2, 0).reshape(2, 3, 2), None, IndexError, r"\(=-2\).*token 1, layer 2"),
        ([0, 1, 2], None, ValueError, r"shape \[3\].*tokens, top_k"),
        ([[0], [1]], 3, ValueError, r"num_tokens.*=3.*2 rows"),
    ],
)
def test_bad_ids_raise_and_say_where(ids: Any, num_tokens: int | None, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        count_topk(ids, 4, num_tokens=num_tokens)


def test_an_absurd_number_of_experts_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="`num_experts`"):
        count_topk([[0]], 1 << 60)


@pytest.mark.parametrize(("dtype", "message"), [(np.uint8, "uint8.*signed"), (np.int8, "int8.*up to 255")])
def test_id_dtypes_that_cannot_hold_padding_are_refused(dtype: type[np.integer[Any]], message: str) -> None:
    """B14: uint8 makes 255 of -1; int8 cannot hold expert 255."""
    with pytest.raises(TypeError, match=message):
        count_topk(np.zeros((1, 1), dtype=dtype), 256)


# ---- slots -----------------------------------------------------------------------------------------------------------


@given(st.data())
def test_folding_slots_agrees_with_a_dictionary(data: st.DataObject) -> None:
    shape = (data.draw(st.integers(1, 3)), 5)
    p2l, counts = (data.draw(hnp.arrays(np.int64, shape, elements=st.integers(0, n))).tolist() for n in (3, 2**40))
    want = [
        [sum(c for c, e in zip(row, ids, strict=True) if e == x) for x in range(4)]
        for row, ids in zip(counts, p2l, strict=True)
    ]
    assert fold_slots(counts, p2l, 4).tolist() == want
    assert fold_slots([counts, counts], p2l, 4).tolist() == [want, want]


def test_tokens_in_an_empty_slot_raise() -> None:
    with pytest.raises(ValueError, match=r"layer 1, slot 2"):
        fold_slots([[1, 1, 0], [1, 1, 5]], [[0, 1, -1], [0, 1, -1]], 2)
    with pytest.raises(ValueError, match=r"\[-1, 2\).*0\.\.2"):
        fold_slots([[1, 1]], [[0, 2]], 2)
    with pytest.raises(ValueError, match=r"shape \[1, 2\].*\[1, 3\]"):
        fold_slots([[1, 1]], [[0, 1, 1]], 2)


# ---- windows ---------------------------------------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(0, 9))
def test_the_ring_keeps_the_last_windows_in_order(keep: int, ended: int) -> None:
    ring = LoadWindows(1, 2, windows=keep)
    for n in range(ended):
        ring.add([[n, 1]])
        ring.add([[0, 1]])
        ring.roll()
    assert ring.windows().tolist() == [[[n, 2]] for n in range(max(0, ended - keep), ended)]


def test_an_empty_ring_is_a_valid_record() -> None:
    """G10: read before any pass."""
    assert LoadWindows(3, 4, windows=2).windows().shape == (0, 3, 4)


def test_sums_near_int32_do_not_wrap() -> None:
    """G13: counts near 2**31 over 4 steps, handed over in int32."""
    ring = LoadWindows(1, 1, windows=1)
    for _ in range(4):
        ring.add(np.array([[2**31 - 1]], dtype=np.int32))
    ring.roll()
    assert ring.windows().tolist() == [[[4 * (2**31 - 1)]]]


def test_counts_that_would_wrap_int64_raise_and_change_nothing() -> None:
    ring = LoadWindows(1, 2, windows=1)
    ring.add([[0, 2**62]])
    with pytest.raises(OverflowError, match=r"layer 0, expert 1"):
        ring.add([[5, 2**62]])
    ring.roll()
    assert ring.windows().tolist() == [[[0, 2**62]]]


def test_slots_whose_sum_would_wrap_int64_raise_and_others_do_not() -> None:
    assert fold_slots([[2**62, 2**62, 5]], [[0, 1, 0]], 2).tolist() == [[2**62 + 5, 2**62]]
    with pytest.raises(OverflowError, match="layer 0, expert 1 passes"):
        fold_slots([[[1, 2**62, 2**62]]], [[0, 1, 1]], 2)


def test_windows_of_ranks_are_not_taken_for_experts() -> None:
    """G12: the shape says what is summed; another raises."""
    ring = LoadWindows(2, 4, windows=1)
    with pytest.raises(ValueError, match=r"shape \[3, 2, 4\].*\[2, 4\]"):
        ring.add(np.zeros((3, 2, 4), dtype=np.int64))


def test_negative_and_fractional_counts_raise() -> None:
    with pytest.raises(ValueError, match=r"\(=-3\).*wrapped"):
        check_counts(np.array([1, -3]), "counts")
    with pytest.raises(TypeError, match="float64"):
        check_counts([0.5], "counts")
    with pytest.raises(ValueError, match=str(2**63)):
        check_counts(np.array([2**63], dtype=np.uint64), "counts")


# ---- faults of recordings --------------------------------------------------------------------------------------------


def kinds(load: object, **options: int) -> list[str]:
    return [fault.kind for fault in check_trace(load, **options)]  # type: ignore[arg-type]


def test_a_layer_on_the_first_top_k_experts_is_pointed_out() -> None:
    """Seen in public recordings: all load of some layers on experts 0..top_k-1."""
    load = np.ones((2, 3, 32))
    load[:, 1, 8:] = 0
    (fault,) = check_trace(load)
    assert (fault.kind, fault.layers) == ("first_experts", (1,))
    assert "first 8 of 32" in fault.text
    assert kinds(load, top_k=8) == ["first_experts"]
    assert kinds(load, top_k=6) == []  # more experts than a token has are no placeholder
    load[1, 1, 31] = 1
    assert kinds(load) == []


def test_few_busy_experts_elsewhere_are_no_fault() -> None:
    load = np.zeros((1, 1, 32))
    load[0, 0, [0, 5]] = 3
    assert kinds(load) == []


def test_layers_and_windows_without_load_are_named() -> None:
    load = np.ones((3, 10, 8), dtype=np.int64)
    load[:, :9] = 0
    load[1] = 0
    no_load, empty = check_trace(load)
    assert no_load.layers == tuple(range(9))
    assert "layers 0, 1, 2, 3, 4, 5 and 3 more" in no_load.text
    assert "1 of 3 windows" in empty.text


def test_values_that_are_no_counts_are_located() -> None:
    load = np.ones((2, 2, 4))
    load[1, 0, 3] = np.nan
    load[0, 1, 2] = -5
    not_finite, negative = check_trace(load)
    assert "window 1, layer 0, expert 3" in not_finite.text
    assert "-5.0 at window 0, layer 1, expert 2" in negative.text


def test_a_sound_trace_has_no_fault_and_strange_shapes_raise() -> None:
    assert kinds(np.ones((2, 2, 4), dtype=np.int32)) == []
    assert kinds([[1, 2, 3, 4]]) == []
    with pytest.raises(ValueError, match=r"shape \[4\]"):
        check_trace([1, 2, 3, 4])
    with pytest.raises(ValueError, match=r"shape \[1, 0\].*with one expert or more"):
        check_trace(np.zeros((1, 0)))
