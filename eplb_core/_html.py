"""HTML for notebooks and pages: tables and small curves, without scripts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from eplb_core._arrays import FloatArray

PAGE = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
    '<meta name="viewport" content="width=device-width, initial-scale=1"><style>'
    "body {{ font: 15px/1.45 system-ui, sans-serif; max-width: 860px; margin: 1.5em auto; padding: 0 1em; }}"
    "div {{ overflow-x: auto; }} table {{ border-collapse: collapse; font-size: 13px; }} "
    "svg {{ max-width: 100%; height: auto; }} "
    "th, td {{ text-align: right; padding: 3px 6px; border-bottom: 1px solid #ddd; }} @page {{ margin: 14mm; }}"
    "</style></head><body><h1>{title}</h1>{body}</body></html>\n"
)
"""A page of its own for what a notebook shows."""
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


class Point(NamedTuple):
    """One of a picture of points."""

    x: float
    y: float
    label: str
    """What is shown where a pointer rests on it."""
    shade: str
    ring: bool
    """Whether a circle is around it."""


def points_svg(points: Sequence[Point], x_title: str, y_title: str) -> str:
    """Return a picture of points, both axes from 0, with words to each that a pointer rests on."""
    width, height, left, below = 520, 300, 52, 38
    x_most, y_most = (max(max(values) * 1.08, 1e-300) for values in zip(*((p.x, p.y) for p in points), strict=True))
    marks = []
    for point in points:
        x = left + point.x / x_most * (width - left)
        y = (height - below) * (1 - point.y / y_most)
        at = f'cx="{x:.1f}" cy="{y:.1f}"'
        ring = f'<circle {at} r="9" fill="none" stroke="#b5305c" stroke-width="2"/>' if point.ring else ""
        mark = f'<circle {at} r="4.5" fill="{point.shade}"><title>{escape(point.label)}</title></circle>'
        marks.append(ring + mark)
    lines = []
    for value in _ticks(x_most):
        x = left + value / x_most * (width - left)
        lines.append(f'<path stroke="#ddd" d="M{x:.1f} 0V{height - below}"/>')
        lines.append(f'<text x="{x:.1f}" y="{height - below + 13}" text-anchor="middle">{value:g}</text>')
    for value in _ticks(y_most):
        y = (height - below) * (1 - value / y_most)
        lines.append(f'<path stroke="#ddd" d="M{left} {y:.1f}H{width}"/>')
        lines.append(f'<text x="{left - 4}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'style="background:#fff" font-size="11">{"".join(lines)}'
        f'<path stroke="#111" fill="none" d="M{left} 0V{height - below}H{width}"/>'
        f'<text x="{(width + left) / 2:.0f}" y="{height - 6}" text-anchor="middle">{escape(x_title)}</text>'
        f'<text transform="translate(11 {(height - below) / 2:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_title)}</text>{''.join(marks)}</svg>"
    )


def _ticks(most: float) -> list[float]:
    """Round numbers above 0, up to five."""
    power = 10.0 ** np.floor(np.log10(most))
    step = next(size * power for size in (0.2, 0.5, 1.0, 2.0) if size * power * 6 > most)
    return [float(f"{step * number:.6g}") for number in range(1, int(most / step) + 1)]
