"""Words of strangers in messages: what a file, an argument or a peer says becomes one short line of printable text."""

from __future__ import annotations

import math
import textwrap

WIDTH = 240
"""Of one thing that a message quotes."""


def plain(value: object, width: int = WIDTH) -> str:
    """Text as it is, anything else as its repr: cut to `width`, on one line, without control characters.

    Line ends and tabs become spaces; what would move a cursor, turn the direction of writing or fit no encoding is
    written as its escape.
    """
    try:
        text = value if isinstance(value, str) else repr(value)
    except Exception:  # thousands of digits or brackets, or a stranger's own repr
        text = f"some {type(value).__name__}"
    text = text[: width + 1]  # first: it may be very long
    line = _line(text)
    return line if len(line) <= width else line[: width - 3] + "..."


def lines(text: str) -> str:
    """A text of several lines for a terminal; each as `plain` makes it, of any length."""
    return "\n".join(map(_line, text.split("\n")))


def quoted(value: object, width: int = WIDTH) -> str:
    """The repr of anything, as short and as printable as `plain` makes it."""
    if isinstance(value, str):
        value = repr(value if len(value) <= width else value[: width - 3] + "...")
    return plain(value, 2 * width)


def counted(number: int, word: str) -> str:
    """A number of things: 1 rank, 2 ranks."""
    return f"{number} {word}{'s' * (number != 1)}"


def number(value: float) -> str:
    """A balancedness with three decimals; `-` for NaN."""
    return "-" if math.isnan(value) else f"{value:.3f}"


def filled(text: str) -> str:
    """A paragraph in lines of 80 characters at most, each indented as the first."""
    indent = " " * (len(text) - len(text.lstrip()))
    return textwrap.fill(text, 80, subsequent_indent=indent)


def _line(text: str) -> str:
    return text if text.isprintable() else "".join(map(_seen, text))


def _seen(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character.isspace() else character.encode("unicode_escape").decode("ascii")
