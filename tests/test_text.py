"""What strangers say reaches a message short, on one line and without control characters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_core._text import counted, filled, lines, number, plain, quoted

SURROGATE = "\ud800"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("expert 3", "expert 3"),
        ("two\nlines\tof text", "two lines of text"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\u202eb", "a\\u202eb"),
        (SURROGATE, "\\ud800"),
        (7, "7"),
        (["a"], "['a']"),
        ([10**5000], "some list"),
        ("x" * 300, "x" * 237 + "..."),
    ],
)
def test_what_a_stranger_says_becomes_one_line(value: object, text: str) -> None:
    assert plain(value) == text


def test_an_object_whose_repr_fails_is_named_by_its_kind() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError

    assert plain(Broken()) == "some Broken"


@given(st.one_of(st.text(st.characters(exclude_categories=[])), st.binary(), st.integers()), st.integers(8, 40))
def test_any_value_is_printable_and_as_short_as_asked(value: object, width: int) -> None:
    assert plain(value, width).isprintable()
    assert len(plain(value, width)) <= width
    assert quoted(value, width).isprintable()
    assert len(quoted(value, width)) <= 2 * width
    assert all(line.isprintable() for line in lines(plain(value)).split("\n"))


def test_a_text_of_lines_keeps_them() -> None:
    assert lines("a \x1b[2J\n\tb") == "a \\x1b[2J\n b"


def test_a_name_in_quotes_is_cut_within_them() -> None:
    assert quoted("a'b") == '"a\'b"'
    assert quoted("x" * 20, 10) == "'xxxxxxx...'"


def test_things_are_counted_and_paragraphs_filled() -> None:
    assert [counted(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    text = "  " + "word " * 40
    said = filled(text)
    assert said.split() == text.split()
    assert all(line.startswith("  word") and len(line) <= 80 for line in said.splitlines())


def test_a_balancedness_has_three_decimals_and_nan_is_a_dash() -> None:
    assert (number(0.98765), number(float("nan"))) == ("0.988", "-")
