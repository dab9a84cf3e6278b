"""Replays as HTML: short for notebooks, and one page that works by itself."""

from __future__ import annotations

import json
import math
import re
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from eplb_core._arrays import FloatArray
from eplb_core._html import line_svg, table_html, words_html
from eplb_core.files.reading import PathLike, write_atomic
from eplb_core.metrics import mean_of_known
from eplb_core.simulation.records import summary

if TYPE_CHECKING:
    from eplb_core.simulation.compare import Comparison
    from eplb_core.simulation.result import Simulation

# What the page draws: a screen has no more room.
_WINDOWS, _RANKS = 400, 256


def simulation_html(sim: Simulation) -> str:
    """Totals and the curve of balance."""
    return f"<div>{_summary_table([sim])}{line_svg([sim.window_balancedness])}</div>"


def comparison_html(comparison: Comparison) -> str:
    """A row a policy, the curves, and the conclusion."""
    sims = comparison.simulations
    curves = line_svg([sim.window_balancedness for sim in sims], [sim.policy for sim in sims])
    return f"<div>{_summary_table(sims)}{curves}<p>{words_html(comparison.conclusion)}</p></div>"


def _summary_table(sims: Any) -> str:
    costs = all(sim.cost is not None for sim in sims)
    head = [
        "policy",
        "dispatch",
        "slots",
        "interval",
        "mean balancedness",
        "total balancedness",
        "transfers",
        "network",
    ]
    rows = []
    for sim in sims:
        facts = summary(sim)
        row = [facts["policy"], facts["dispatch"], facts["num_slots"], facts["interval"]]
        row += [_number(facts["mean_balancedness"]), _number(facts["total_balancedness"])]
        row += [f"{sim.total_transfers:,}", f"{facts['network_transfers']:,}"]
        if costs:
            row += [f"{facts['pass_s'] * 1e3:.4g}", f"{facts['pause_s']:.3g}", f"{facts['memory_bytes'] / 1e9:.3g}"]
        rows.append(row)
    return table_html([*head, *(["ms a pass", "s of pauses", "GB a rank"] if costs else [])], rows)


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


# ---- the page --------------------------------------------------------------------------------------------------------


def report_html(comparison: Comparison, *, title: str = "Replay of a recorded load") -> str:
    """One page with everything in it: totals, curves and heat maps to point at, layers to sort. Works offline.

    Args:
        comparison: What `compare_policies` gave.
        title: Heading; any text.

    Returns:
        HTML that loads nothing.

    Cost:
        Some hundred kilobytes at most; windows and ranks beyond what a screen shows are averaged.
    """
    sims = comparison.simulations
    page = resources.files("eplb_core.simulation").joinpath("report_page.html").read_text("utf-8")
    # Inside a script element only "<" could end it.
    data = json.dumps(_page_data(comparison), allow_nan=False).replace("<", "\\u003c")
    parts = {
        "TITLE": escape(title),
        "CONCLUSION": words_html(comparison.conclusion),
        "SUMMARY": _summary_table(sims),
        "DATA": data,
    }
    # In one pass: what is filled in may look like a place to fill.
    return re.sub("@([A-Z]+)@", lambda place: parts.get(place[1], place[0]), page)


def write_report(comparison: Comparison, path: PathLike, *, title: str = "Replay of a recorded load") -> None:
    """Write the page; an old file stays until the new one is whole."""
    write_atomic(path, report_html(comparison, title=title).encode())


def _page_data(comparison: Comparison) -> dict[str, Any]:
    sims = comparison.simulations
    windows = len(sims[0].balancedness)
    step = -(-windows // _WINDOWS)
    bound = next((sim.bound for sim in sims if not np.isnan(sim.bound).all()), None)
    return {
        "step": step,
        "unscored": sims[0].scored_from,
        "best": sims.index(comparison.best),
        "bound": None if bound is None else _rounded(_averaged(bound, step)),
        "timeUnit": "ms a pass" if sims[0].cost is not None else "tokens of the fullest rank",
        "policies": [_policy_data(sim, step) for sim in sims],
    }


def _policy_data(sim: Simulation, step: int) -> dict[str, Any]:
    time = sim.rank_load / sim.topology.rank_speed
    mean = time.mean(axis=1, keepdims=True)
    share = np.divide(time, mean, out=np.full(time.shape, np.nan), where=mean > 0)
    ranks = -(-share.shape[1] // _RANKS)
    names = sim.layer_ids or tuple(range(sim.balancedness.shape[1]))
    scored = sim.balancedness[sim.scored_from :]
    unit = 1.0 if sim.cost is None else 1e3
    return {
        "name": sim.policy,
        "curve": _rounded(_averaged(sim.window_balancedness, step)),
        "moves": [int(w) for w, count in zip(sim.rebalance_windows, sim.transfers.sum(axis=1), strict=True) if count],
        "rankStep": ranks,
        "ranks": [_rounded(_averaged(row, ranks)) for row in _averaged(share, step)],
        "layers": [
            {
                "layer": int(names[layer]),
                "balancedness": _plain(mean_of_known(scored[:, layer])),
                "worst": _plain(float(np.nanmin(scored[:, layer]))) if (scored[:, layer] > 0).any() else None,
                "time": _plain(float(sim.step_s[sim.scored_from :, layer].mean()) * unit),
                "transfers": int(sim.transfers[:, layer].sum()),
                "network": int(sim.link_transfers[:, layer, 2].sum()),
            }
            for layer in range(sim.balancedness.shape[1])
        ],
    }


def _averaged(values: FloatArray, step: int) -> FloatArray:
    """Mean of each `step` neighbours along the first axis; NaN only where all are."""
    if step == 1:
        return values
    starts = np.arange(0, len(values), step)
    known = ~np.isnan(values)
    count = np.add.reduceat(known.astype(np.float64), starts, axis=0)
    total = np.add.reduceat(np.where(known, values, 0.0), starts, axis=0)
    means: FloatArray = np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)
    return means


def _rounded(values: FloatArray) -> list[float | None]:
    return [_plain(value) for value in values.tolist()]


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else float(f"{value:.4g}")
