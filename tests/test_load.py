"""Counting tokens per expert: FAULTS B14, G3, G4, G9, G10, G12, G13 and the recorder's faults."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eplb_core.load import LoadWindows, check_counts, check_trace, count_topk, fold_slots


def test_counts_are_pairs_of_token_and_expert() -> None:
    """G1: every pair counts, wherever it is routed."""
    assert count_topk([[0, 3], [3, 1]], 4).tolist() == [1, 1, 0, 2]


def test_padding_and_masked_ids_are_not_counted() -> None:
    """G3: 5 real rows and 11 of filler."""
    ids = np.zeros((16, 2), dtype=np.int32)
    ids[:5] = [1, 2]
    ids[4, 1] = -1
    assert count_topk(ids, 4, num_tokens=5).tolist() == [0, 5, 4, 0]


def test_number_of_valid_tokens_is_the_callers_word() -> None:
    """G4: nothing is divided or guessed; rows beyond `num_tokens` may hold anything."""
    assert count_topk([[0], [99]], 4, num_tokens=1).tolist() == [1, 0, 0, 0]
    assert count_topk([[0], [1]], 4, num_tokens=0).tolist() == [0, 0, 0, 0]


def test_more_than_32_rows_are_all_counted() -> None:
    """G9: a batch of 64 rows."""
    assert count_topk(np.arange(64).reshape(64, 1) % 4, 4).tolist() == [16, 16, 16, 16]


def test_empty_batches_and_views_are_accepted() -> None:
    """G10: no row at all, and a tensor with an offset and strides."""
    assert count_topk(np.empty((0, 3, 2), dtype=np.int64), 5).tolist() == [[0] * 5] * 3
    whole = torch.arange(24, dtype=torch.int32).reshape(4, 6) % 5
    assert count_topk(whole[1:, ::2], 5).tolist() == count_topk(whole[1:, ::2].contiguous(), 5).tolist()


@given(st.lists(st.lists(st.lists(st.integers(-1, 6), min_size=2, max_size=2), min_size=3, max_size=3), max_size=8))
def test_counting_agrees_with_a_dictionary(ids: list[list[list[int]]]) -> None:
    counts = Counter((layer, e) for token in ids for layer, row in enumerate(token) for e in row if e >= 0)
    got = count_topk(np.array(ids, dtype=np.int64).reshape(len(ids), 3, 2), 7)
    assert got.dtype == np.int64
    assert got.tolist() == [[counts[layer, e] for e in range(7)] for layer in range(3)]


@pytest.mark.parametrize(("bad", "where"), [(4, r"\(=4\).*token 1, layer 2"), (-2, r"\(=-2\).*token 1, layer 2")])
def test_ids_out_of_range_raise_and_say_where(bad: int, where: str) -> None:
    ids = np.zeros((2, 3, 2), dtype=np.int64)
    ids[1, 2, 1] = bad
    with pytest.raises(IndexError, match=where):
        count_topk(ids, 4)


def test_id_dtypes_that_cannot_hold_padding_are_refused() -> None:
    """B14: uint8 makes 255 of -1; int8 cannot hold expert 255."""
    with pytest.raises(TypeError, match=r"uint8.*signed"):
        count_topk(np.zeros((1, 1), dtype=np.uint8), 256)
    with pytest.raises(TypeError, match=r"int8.*up to 255"):
        count_topk(np.zeros((1, 1), dtype=np.int8), 256)


def test_wrong_shapes_of_ids_raise() -> None:
    with pytest.raises(ValueError, match=r"shape \[3\].*tokens, top_k"):
        count_topk([0, 1, 2], 4)
    with pytest.raises(ValueError, match=r"num_tokens.*=3.*2 rows"):
        count_topk([[0], [1]], 4, num_tokens=3)


# ---- slots -----------------------------------------------------------------------------------------------------------


@given(st.data())
def test_folding_slots_agrees_with_a_dictionary(data: st.DataObject) -> None:
    p2l = data.draw(st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1, max_size=3))
    count = st.lists(st.integers(0, 2**40), min_size=5, max_size=5)
    counts = data.draw(st.lists(count, min_size=len(p2l), max_size=len(p2l)))
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
