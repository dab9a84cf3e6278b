"""Layouts, plans and replays as HTML for notebooks: plain tables and small drawings, no script."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from eplb_core._arrays import FloatArray

if TYPE_CHECKING:
    from eplb_core.layout import ExpertLayout
    from eplb_core.loading.pull_plan import PullPlan
    from eplb_core.placement.place import Placement
    from eplb_core.placement.worth.decide import Verdict
    from eplb_core.placement.worth.report import GainReport

_LAYERS, _CELLS = 8, 400
_CELL = "padding:1px 4px;text-align:center;border:1px solid #ccc;font:11px monospace;white-space:nowrap"
_SHADES = ("#000", "#888", "#36c", "#c33", "#393", "#939")


def table_html(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; everything is escaped."""
    cells = "".join(f"<th>{escape(text)}</th>" for text in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def words_html(text: str) -> str:
    """A sentence, escaped; what stands between backticks as code."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", escape(text))


def layout_html(layout: ExpertLayout) -> str:
    """What the layout is, and what the slots of its first layers hold: replicas shaded, pairs on a rank red."""
    topology, size = layout.topology, layout.slots_per_rank
    facts = (
        f"<b>ExpertLayout</b>: {layout.num_layers} layers, {layout.num_experts} experts in {layout.num_slots} slots, "
        f"{topology.num_ranks} ranks of {size} slots, {topology.num_nodes} node{'s' * (topology.num_nodes > 1)}; "
        f"digest <code>{layout.digest[:12]}</code>"
    )
    if not layout.num_layers:
        return f"<div>{facts}</div>"
    ranks = min(topology.num_ranks, max(1, _CELLS // (_LAYERS * size)))
    head = "".join(
        f'<th colspan="{size}" style="{_CELL};border-left:2px solid #000">rank {r}</th>' for r in range(ranks)
    )
    rows = []
    for layer in range(min(layout.num_layers, _LAYERS)):
        row, count = layout.physical_to_logical_map[layer], layout.replica_count[layer]
        cells = []
        for slot in range(ranks * size):
            expert = int(row[slot])
            mine = row[slot // size * size : slot // size * size + size]
            shade = "#fff"
            if expert >= 0 and int((mine == expert).sum()) > 1:
                shade = "#f88"
            elif expert >= 0 and count[expert] > 1:
                shade = "#ccc" if count[expert] == 2 else "#aaa"
            edge = ";border-left:2px solid #000" if slot % size == 0 else ""
            cells.append(
                f'<td style="{_CELL}{edge};background:{shade};color:#000">{expert if expert >= 0 else "-"}</td>'
            )
        rows.append(f'<tr><th style="{_CELL}">layer {layer}</th>{"".join(cells)}</tr>')
    left_out = [
        f"{count - shown} more {word}"
        for word, count, shown in (("layers", layout.num_layers, _LAYERS), ("ranks", topology.num_ranks, ranks))
        if count > shown
    ]
    more = f"<div>{', '.join(left_out)}</div>" if left_out else ""
    table = f'<table style="border-collapse:collapse"><tr><th></th>{head}</tr>{"".join(rows)}</table>'
    return f'<div style="overflow-x:auto">{facts}{table}{more}</div>'


def plan_html(plan: PullPlan) -> str:
    """How many slots of a pull plan are kept, copied and read, in all and layer by layer."""
    from eplb_core.loading import pull_plan

    words = {
        "kept": pull_plan.KEEP,
        "copied from the old slots": pull_plan.COPY_OLD,
        "copied from what is read": pull_plan.COPY_NEW,
        "read from peers": pull_plan.READ,
        "restored": pull_plan.RESTORE,
        "empty": pull_plan.EMPTY,
    }
    layers = plan.kind.shape[0]
    rows: list[list[object]] = [["all", *(int((plan.kind == kind).sum()) for kind in words.values())]]
    rows += [
        [at, *(int((plan.kind[at] == kind).sum()) for kind in words.values())] for at in range(min(layers, _LAYERS))
    ]
    more = f"<div>{layers - _LAYERS} more layers</div>" if layers > _LAYERS else ""
    return f"<div><b>PullPlan</b>: slots of one rank{table_html(['row', *words], rows)}{more}</div>"


def placement_html(placement: Placement) -> str:
    """Balance against its bound, layer by layer, and the layout."""
    known = ~np.isnan(placement.balancedness)
    facts = f"<b>Placement</b> for {escape(placement.dispatch)} dispatch: {int(placement.transfers.sum())} transfers"
    if known.any():
        mean, bound = float(placement.balancedness[known].mean()), float(placement.bound[known].mean())
        facts += f", balancedness {mean:.4f} on average, bound {bound:.4f}"
    worst = np.argsort(np.where(known, placement.balancedness, np.inf), kind="stable")[: min(_LAYERS, known.sum())]
    rows = [
        [layer, f"{placement.balancedness[layer]:.4f}", f"{placement.bound[layer]:.4f}", placement.transfers[layer]]
        for layer in worst.tolist()
    ]
    table = table_html(["least even layers", "balancedness", "bound", "transfers"], rows) if rows else ""
    return f"<div>{facts}{table}</div>{layout_html(placement.layout)}"


def verdict_html(verdict: Verdict) -> str:
    """The verdict, and the layers that gain most with their reasons."""
    order = np.argsort(-verdict.layer_gain, kind="stable")[:_LAYERS].tolist()
    rows = [
        [
            layer,
            "moves" if verdict.layers[layer] else "stays",
            f"{verdict.layer_gain[layer]:.3g}",
            f"{verdict.layer_cost[layer]:.3g}",
            verdict.layer_transfers[layer],
            verdict.layer_reasons[layer],
        ]
        for layer in order
    ]
    head = ["layer", "", "gain a pass", "cost", "transfers", "why"]
    return f"<div><b>Verdict</b>: {escape(verdict.reason)}{table_html(head, rows)}</div>"


def gain_report_html(report: GainReport) -> str:
    """One row for each number of slots; the one to take is marked."""
    rows = [
        [
            "*" if number == report.best else "",
            row.redundant,
            row.num_slots,
            f"{row.seen:.3f}",
            f"{row.bound:.3f}",
            "-" if np.isnan(row.unseen) else f"{row.unseen:.3f}",
            f"{row.saved:.1%}",
        ]
        for number, row in enumerate(report.rows)
    ]
    head = ["", "redundant", "slots", "seen", "bound", "unseen", "time saved"]
    return f"<div><b>GainReport</b>: {words_html(report.conclusion)}{table_html(head, rows)}</div>"


def line_svg(
    values: Sequence[FloatArray],
    names: Sequence[str] = (),
    *,
    low: float | None = None,
    width: int = 520,
    height: int = 90,
) -> str:
    """Small curves over one another, the first in black, with their names below; NaN is a gap."""
    known = np.concatenate([each[~np.isnan(each)] for each in values])
    if not known.size:
        return ""
    low = float(known.min()) if low is None else low
    span = max(float(known.max()) - low, 1e-9)
    left = 34  # room for the numbers
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
        f'{"".join(lines)}<text x="0" y="10" font-size="9">{float(known.max()):.3f}</text>'
        f'<text x="0" y="{height - 2}" font-size="9">{low:.3f}</text></svg>{legend and f"<div>{legend}</div>"}'
    )
