"""What callers hand over becomes checked arrays (FAULTS A14, B14)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from eplb_core import ExpertLayout, Topology
from eplb_core._arrays import (
    add_up,
    check_flag,
    check_id,
    check_int,
    check_kind,
    check_load,
    check_made,
    check_real,
    check_word,
    read_only,
    to_ids,
    to_list,
    to_numpy,
    to_reals,
)


def test_tensors_arrays_and_lists_give_the_same_values() -> None:
    for value in ([[1, 2]], np.array([[1, 2]]), torch.tensor([[1, 2]]), torch.tensor([[1, 2]], dtype=torch.int32)):
        assert to_numpy(value, "x").tolist() == [[1, 2]]
    assert to_numpy(torch.tensor([1.5], dtype=torch.bfloat16), "x").tolist() == [1.5]
    assert to_numpy(torch.tensor([1.5], requires_grad=True), "x").tolist() == [1.5]


def test_ids_are_copied_and_signed() -> None:
    """B14: an unsigned id cannot say -1."""
    source = np.array([[3, -1]])
    ids = to_ids(source, "ids")
    source[0, 0] = 9
    assert ids.tolist() == [[3, -1]]
    assert ids.dtype == np.int64
    assert to_ids(np.asfortranarray(np.arange(6).reshape(2, 3)), "ids").flags.c_contiguous
    assert to_ids([], "ids").dtype == np.int64
    for bad in (np.array([1], dtype=np.uint8), [1.0], ["a"], [True]):
        with pytest.raises(TypeError, match=r"`ids` \(dtype .*\) must be signed integers; cast it"):
            to_ids(bad, "ids")


def test_what_others_hold_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        read_only(np.zeros(2))[0] = 1


def test_load_of_any_real_kind_becomes_float64() -> None:
    for dtype in (np.int32, np.uint64, np.float16, np.float32, np.int64):
        load = check_load(np.array([[1, 2]], dtype=dtype), "load", (2,))
        assert load.tolist() == [[1.0, 2.0]]
        assert load.dtype == np.float64
    assert check_load(np.zeros((0, 4)), "load", (2, 3)).shape == (0, 4)
    assert check_load(torch.ones(1, 2, dtype=torch.bfloat16), "load", (2,)).tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize(
    ("bad", "at", "message"),
    [
        (np.nan, (0,), r"`load` \(=nan\) must be finite and not negative at expert 0; correct the recording"),
        (-2.0, (1, 2), r"`load` \(=-2.0\) must be finite and not negative at layer 1, expert 2;"),
        (np.inf, (1, 0, 2), r"`load` \(=inf\) must be finite and not negative at window 1, layer 0, expert 2;"),
        (-np.inf, (0, 0), r"\(=-inf\)"),
    ],
)
def test_load_that_is_no_count_raises_and_says_where(bad: float, at: tuple[int, ...], message: str) -> None:
    """A14: elsewhere a NaN takes all spare slots."""
    load = np.ones((2, 3, 4)[-len(at) :] if len(at) < 3 else (2, 3, 4))
    load[at] = bad
    with pytest.raises(ValueError, match=message):
        check_load(load, "load", (1, 2, 3))


def test_the_first_of_many_bad_loads_is_named_with_their_number() -> None:
    with pytest.raises(ValueError, match=r"at layer 0, expert 1; 2 more; correct"):
        check_load([[1.0, -1.0, np.nan], [0.0, 0.0, np.inf]], "load", (2,))


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (np.ones(3), ValueError, r"`load` \(shape \[3\]\) must be \[L, E\] or \[T, L, E\]"),
        ([["x"]], TypeError, r"`load` \(dtype <U1\) must be integers or floats"),
        ([[True]], TypeError, r"`load` \(dtype bool\) must be integers or floats"),
        ([[1j]], TypeError, r"`load` \(dtype complex128\) must be integers or floats"),
    ],
)
def test_load_of_another_shape_or_kind_is_refused(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_load(value, "load", (2, 3))


def test_integers_are_integers() -> None:
    assert check_int(np.int32(3), "n", 1) == 3
    assert type(check_int(np.int64(3), "n", 1)) is int
    for bad in (True, 3.0, "3", None):
        with pytest.raises(TypeError, match=r"`n` \(=.*\) must be an integer"):
            check_int(bad, "n", 1)
    with pytest.raises(ValueError, match=r"`n` \(=0\) must be at least 1"):
        check_int(0, "n", 1)
    with pytest.raises(ValueError, match=r"`n` \(=some int\) must have at most 128 bits"):
        check_int(10**5000, "n", 1)


def test_numbers_are_finite_and_in_range() -> None:
    assert check_real(3, "x") == 3.0
    assert check_real(np.float32(0.5), "x", above=0.0) == 0.5
    assert check_real(0, "x", at_least=0.0) == 0.0
    for bad in (True, "3", None):
        with pytest.raises(TypeError, match=r"`x` \(=.*\) must be a number"):
            check_real(bad, "x")
    for infinite in (np.nan, np.inf, 10**400):
        with pytest.raises(ValueError, match=r"`x` \(=(nan|inf)\) must be finite"):
            check_real(infinite, "x")
    with pytest.raises(ValueError, match=r"`x` \(=0.0\) must be above 0"):
        check_real(0, "x", above=0.0)
    with pytest.raises(ValueError, match=r"`x` \(=-1.0\) must be at least 0"):
        check_real(-1, "x", at_least=0.0)


def test_windows_are_added_up_as_integers_where_those_hold_the_sum() -> None:
    whole = add_up(np.full((2, 1, 2), 2**53 + 1))
    assert whole.dtype == np.int64
    assert whole.tolist() == [[2**54 + 2] * 2]
    assert add_up(np.full((4, 1, 2), 2**62)).tolist() == [[2.0**64] * 2]
    assert add_up(np.full((3, 1, 2), 0.5)).tolist() == [[1.5] * 2]
    assert add_up(np.zeros((0, 1, 2), dtype=np.int64)).tolist() == [[0] * 2]


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ([[1], [2, 3]], ValueError, r"`x` \(list\) must be one array with rows of equal length: .*inhomogeneous"),
        (torch.eye(2).to_sparse(), TypeError, r"`x` \(Tensor\) must be one array"),
        (torch.empty(2, device="meta"), TypeError, r"`x` \(Tensor\) must be one array"),
    ],
)
def test_what_is_no_array_is_named(value: Any, error: type[Exception], message: str) -> None:
    for check in (to_numpy, to_ids, to_reals, lambda given, name: check_load(given, name, (2,))):
        with pytest.raises(error, match=message):
            check(value, "x")


@pytest.mark.parametrize("value", ["text", ["a"], None, [None], 1j, {}, np.array(["2020"], dtype="M8[Y]"), b"x"])
def test_what_are_no_numbers_are_named_with_their_dtype(value: Any) -> None:
    with pytest.raises(TypeError, match=r"`x` \(dtype .*\) must be integers or floats"):
        to_reals(value, "x")


def test_views_that_pretend_to_be_of_any_size_are_not_copied() -> None:
    view = np.broadcast_to(np.int64(1), (1 << 20, 1 << 20))
    with pytest.raises(ValueError, match=r"`x` \(shape \[1048576, 1048576\]\) must have at most 17,179"):
        to_ids(view, "x")


def test_an_array_that_fails_to_be_one_is_named() -> None:
    class Liar:
        def __array__(self, *args: object, **options: object) -> Any:
            raise RuntimeError("not\ntoday")

    with pytest.raises(TypeError, match=r"`x` \(Liar\) must be one array with rows of equal length: not today"):
        to_numpy(Liar(), "x")


def test_ids_kinds_words_and_flags_are_named_when_they_are_none() -> None:
    assert check_id(np.int32(2), "rank", 3) == 2
    for value in (-1, 3, 10**5000):
        with pytest.raises(IndexError, match=r"`rank` \(=.*\) must be in \[0, 3\)"):
            check_id(value, "rank", 3)
    with pytest.raises(TypeError, match=r"`rank` \(=True\) must be an integer"):
        check_id(True, "rank", 3)
    assert check_kind("a", "x", str) == "a"
    with pytest.raises(TypeError, match=r"`x` \(=list\) must be an int"):
        check_kind([], "x", int)
    layout = ExpertLayout([[0, 1]], 2, topology=Topology(1))
    placed = SimpleNamespace(layout=layout)  # as a Placement, a Migrator or tables have one
    with pytest.raises(TypeError, match=r"`current` \(=SimpleNamespace\) must be an ExpertLayout; give its `layout`"):
        check_kind(placed, "current", ExpertLayout)
    assert check_word("a", "x", ["a", "b"]) == "a"
    for other in ("c", ["a"], np.zeros(3)):
        with pytest.raises(ValueError, match=r"`x` \(=.*\) must be 'a' or 'b'"):
            check_word(other, "x", ["a", "b"])
    with pytest.raises(ValueError, match=r"`x` \(=3\) must be one of a, b, c, or a function"):
        check_word(3, "x", "abc", ", or a function")
    assert check_flag(np.True_, "x") is True
    for word in (1, "yes", np.zeros(3)):
        with pytest.raises(TypeError, match=r"`x` \(=.*\) must be True or False"):
            check_flag(word, "x")
    assert to_list((1, 2), "x") == [1, 2]
    with pytest.raises(TypeError, match=r"`x` \(=3\) must be a list"):
        to_list(3, "x")  # type: ignore[arg-type]


def test_sizes_that_ask_for_absurd_memory_are_named() -> None:
    check_made(num_layers=1000, num_slots=1000)
    with pytest.raises(ValueError, match=r"`num_layers` \(=536870912\), `num_slots` \(=2\): the product must be"):
        check_made(num_layers=1 << 29, num_slots=2)


def test_dicts_of_columns_and_record_arrays_are_frames() -> None:
    for table in ({"layer": [0], "expert": [1]}, np.zeros(3, dtype=[("layer", "i8"), ("expert", "i8")])):
        with pytest.raises(TypeError, match=r"columns layer, expert\) .* Trace.from_frame"):
            to_numpy(table, "load")
