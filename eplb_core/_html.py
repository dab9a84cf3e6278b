"""HTML for notebooks and pages: tables and small curves, without scripts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

from eplb_core._arrays import FloatArray

HTML_LAYERS = 8
"""Layers of an object that a page shows; the others are counted."""
_SHADES = ("#000", "#888", "#36c", "#c33", "#393", "#939")


def table_html(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; all text is escaped."""
    cells = "".join(f"<th>{escape(text)}</th>" for text in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def words_html(text: str) -> str:
    """Return a sentence, escaped, with text between backticks as code."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", escape(text))


def line_svg(values: Sequence[FloatArray], names: Sequence[str] = ()) -> str:
    """Return small curves in one frame, the first in black, their names below; NaN is a gap."""
    known = np.concatenate([each[~np.isnan(each)] for each in values])
    if not known.size:
        return ""
    low, high = float(known.min()), float(known.max())
    span = max(high - low, 1e-9)
    width, height, left = 520, 90, 34  # on the left is room for the numbers
    lines = []
    for number, each in enumerate(values):
        step = (width - left) / max(len(each) - 1, 1)
        path, pen = "", "M"
        for at, value in enumerate(each.tolist()):
            if value == value:
                path += f"{pen}{left + at * step:.1f} {height - 4 - (value - low) / span * (height - 8):.1f}"
            pen = "L" if value == value else "M"
        shade = _SHADES[number % len(_SHADES)]
        lines.append(f'<path fill="none" stroke="{shade}" stroke-width="1.2" d="{path}"/>')
    legend = "".join(
        f'<span style="margin-right:1.5em"><b style="color:{_SHADES[number % len(_SHADES)]}">&#8212;</b> '
        f"{escape(name)}</span>"
        for number, name in enumerate(names)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" style="background:#fff">'
        f'{"".join(lines)}<text x="0" y="10" font-size="9">{high:.3f}</text>'
        f'<text x="0" y="{height - 2}" font-size="9">{low:.3f}</text></svg>{legend and f"<div>{legend}</div>"}'
    )
