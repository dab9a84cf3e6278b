"""One page of HTML with replays side by side; it loads nothing and works offline."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from typing import Any

import numpy as np

from eplb_core._arrays import FloatArray
from eplb_core._html import words_html
from eplb_core.files.reading import PathLike, write_atomic
from eplb_core.metrics import mean_of_known
from eplb_core.simulation.result import Simulation, averaged, summary_table, time_over_mean
from eplb_core.simulation.words import conclude, recommended

# What the page draws: a screen has no more room.
_WINDOWS, _RANKS = 400, 256
_TITLE = "Replay of a recorded load"


def report_html(simulations: Iterable[Simulation], *, title: str = _TITLE) -> str:
    """Make one page that works offline: totals, curves and heat maps with values under the pointer, layers to sort.

    Args:
        simulations: Replays of one trace, as `compare_policies` gives them.
        title: Heading; any text.

    Returns:
        HTML that loads nothing.

    Cost:
        Some hundred kilobytes at most; windows and ranks beyond what a screen shows are averaged.
    """
    sims = tuple(simulations)
    page = resources.files("eplb_core.simulation").joinpath("report_page.html").read_text("utf-8")
    # Inside a script element only "<" could end it.
    data = json.dumps(_page_data(sims), allow_nan=False).replace("<", "\\u003c")
    parts = {
        "TITLE": escape(title),
        "CONCLUSION": words_html(conclude(sims)),
        "SUMMARY": summary_table(sims),
        "DATA": data,
    }
    # In one pass: what is filled in may look like a place to fill.
    return re.sub("@([A-Z]+)@", lambda place: parts.get(place[1], place[0]), page)


def write_report(simulations: Iterable[Simulation], path: PathLike, *, title: str = _TITLE) -> None:
    """Write the page of `report_html` whole or not at all."""
    write_atomic(path, report_html(simulations, title=title).encode())


def _page_data(sims: Sequence[Simulation]) -> dict[str, Any]:
    windows = len(sims[0].balancedness)
    step = -(-windows // _WINDOWS)
    bound = next((sim.bound for sim in sims if not np.isnan(sim.bound).all()), None)
    return {
        "step": step,
        "unscored": sims[0].scored_from,
        "best": sims.index(recommended(sims)),
        "bound": None if bound is None else _rounded(averaged(bound, step)),
        "timeUnit": "ms per pass" if sims[0].cost is not None else "tokens of the fullest rank",
        "policies": [_policy_data(sim, step) for sim in sims],
    }


def _policy_data(sim: Simulation, step: int) -> dict[str, Any]:
    share = time_over_mean(sim.rank_load, sim.topology.rank_speed)
    ranks = -(-share.shape[1] // _RANKS)
    names = sim.layer_ids or tuple(range(sim.balancedness.shape[1]))
    scored = sim.balancedness[sim.scored_from :]
    unit = 1.0 if sim.cost is None else 1e3
    return {
        "name": sim.policy,
        "curve": _rounded(averaged(sim.window_balancedness, step)),
        "moves": [int(w) for w, count in zip(sim.rebalance_windows, sim.transfers.sum(axis=1), strict=True) if count],
        "rankStep": ranks,
        "ranks": [_rounded(averaged(row, ranks)) for row in averaged(share, step)],
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


def _rounded(values: FloatArray) -> list[float | None]:
    return [_plain(value) for value in values.tolist()]


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else float(f"{value:.4g}")
