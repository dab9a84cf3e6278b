"""Text for messages: quotes of files, arguments and peers as one short printable line."""

from __future__ import annotations

import math
import textwrap

WIDTH = 240
"""Most characters of one quote in a message."""


def plain(value: object, width: int = WIDTH) -> str:
    """Return text, or the repr of anything else, cut to `width`, on one line, without control characters.

    Line ends and tabs become spaces; characters that move a cursor, change the direction of writing or fit no encoding
    become escapes.
    """
    try:
        text = value if isinstance(value, str) else repr(value)
    except Exception:  # thousands of digits or brackets, or a repr that raises
        text = f"some {type(value).__name__}"
    text = text[: width + 1]  # first: it may be very long
    line = _line(text)
    return line if len(line) <= width else line[: width - 3] + "..."


def lines(text: str) -> str:
    """Make each line of a text printable, for a terminal."""
    return "\n".join(map(_line, text.split("\n")))


def quoted(value: object, width: int = WIDTH) -> str:
    """Return a repr as short and printable as `plain` makes it."""
    if isinstance(value, str):
        value = repr(value if len(value) <= width else value[: width - 3] + "...")
    return plain(value, 2 * width)


def counted(number: int, word: str) -> str:
    """Return a number of things: 1 rank, 2 ranks."""
    return f"{number} {word}{'s' * (number != 1)}"


def number(value: float) -> str:
    """A balancedness with three decimals; `-` for NaN."""
    return "-" if math.isnan(value) else f"{value:.3f}"


def filled(text: str) -> str:
    """Wrap a paragraph at 80 characters, each line indented as the first."""
    indent = " " * (len(text) - len(text.lstrip()))
    return textwrap.fill(text, 80, subsequent_indent=indent)


def _line(text: str) -> str:
    return text if text.isprintable() else "".join(map(_seen, text))


def _seen(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character.isspace() else character.encode("unicode_escape").decode("ascii")
