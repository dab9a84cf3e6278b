"""One page of HTML with replays side by side; it loads nothing and works offline."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from eplb_core._arrays import FloatArray, check_kind
from eplb_core._html import words_html
from eplb_core._text import counted, plain
from eplb_core._version import __version__
from eplb_core.errors import MAX_TEXT
from eplb_core.files.reading import PathLike, write_atomic
from eplb_core.metrics import mean_of_known
from eplb_core.simulation.result import Simulation, averaged, summary_table, time_over_mean
from eplb_core.simulation.words import decide, recommended, starts_trivial
from eplb_core.trace import Trace

# What the page draws: a screen has no more room, and a mail no room for more than a megabyte.
_WINDOWS, _RANKS, _EXPERTS, _NAMES = 400, 256, 64, 2000
_CELLS = 200_000
_TITLE = "Replay of a recorded load"


def report_html(
    simulations: Iterable[Simulation],
    *,
    trace: Trace | None = None,
    title: str = _TITLE,
    about: Mapping[str, str] | None = None,
) -> str:
    """Make one page that works offline: the decision, what it is about, curves, heat maps and layers to choose.

    Args:
        simulations: Replays of one trace, as `compare_policies` gives them; with `keep_ranks=True` the page shows the
            ranks layer by layer, too.
        trace: The recording: the page says what it is and shows the load of its experts.
        title: Heading; any text.
        about: Facts that no recording holds, by name: `{"model": "DeepSeek-R1", "recorded": "3 May 2026"}`. They take
            the place of what the page says of itself by that name.

    Returns:
        HTML that loads nothing; the same bytes for the same arguments.

    Raises:
        ValueError: No replay, or a trace of other windows or layers.
        TypeError: `trace` is no Trace.

    Cost:
        Less than a megabyte; windows and ranks beyond what a screen shows are averaged.
    """
    sims = tuple(simulations)
    if not sims:
        raise ValueError("`simulations` (=()) must hold one replay or more")
    if trace is not None:
        check_kind(trace, "trace", Trace)
        if trace.format != "stream" and trace.load.shape[:2] != sims[0].balancedness.shape:
            raise ValueError(
                f"`trace` (windows and layers {list(trace.load.shape[:2])}) must be what was replayed "
                f"({list(sims[0].balancedness.shape)})"
            )
    page = resources.files("eplb_core.simulation").joinpath("report_page.html").read_text("utf-8")
    # Inside a script element only "<" could end it.
    data = json.dumps(_page_data(sims, trace), allow_nan=False).replace("<", "\\u003c")
    decision, reasons = decide(sims)
    facts = {**_facts(sims, trace), **(about or {})}
    parts = {
        "TITLE": escape(plain(title)),
        "DECISION": words_html(decision),
        "REASONS": words_html(reasons),
        "FACTS": "".join(
            f'<tr><th scope="row">{escape(plain(name))}</th><td>{escape(plain(text, MAX_TEXT))}</td></tr>'
            for name, text in facts.items()
        ),
        "SUMMARY": summary_table(sims),
        "DATA": data,
        "VERSION": __version__,
    }
    # In one pass: what is filled in may look like a place to fill.
    return re.sub("@([A-Z]+)@", lambda place: parts.get(place[1], place[0]), page)


def write_report(
    simulations: Iterable[Simulation],
    path: PathLike,
    *,
    trace: Trace | None = None,
    title: str = _TITLE,
    about: Mapping[str, str] | None = None,
) -> None:
    """Write the page of `report_html` whole or not at all."""
    page = report_html(simulations, trace=trace, title=title, about=about)
    write_atomic(path, page.encode(errors="replace"))


# ---- what the replay is about ----------------------------------------------------------------------------------------


def _facts(sims: Sequence[Simulation], trace: Trace | None) -> dict[str, str]:
    sim = recommended(sims)
    topology, cost, layers = sim.topology, sim.cost, sim.balancedness.shape[1]
    sizes, speed = np.bincount(topology.rank_to_node), topology.rank_speed
    each = f"{sizes.min()}" if sizes.min() == sizes.max() else f"{sizes.min()} to {sizes.max()}"
    alike = "alike" if (speed == speed[0]).all() else f"of speeds {speed.min():g} to {speed.max():g}"
    spare = sim.num_slots - sim.layout.num_experts
    full = sim.num_slots == topology.num_ranks * sim.layout.slots_per_rank
    most = counted(sim.layout.slots_per_rank, "slot")
    first, last = sim.first_window, sim.first_window + len(sim.balancedness) - 1
    facts = {"model": "not named", "experts": f"{counted(layers, 'layer')} of {sim.layout.num_experts} experts"}
    if trace is not None and trace.top_k:
        facts["experts"] += f", {trace.top_k} for each token"
    facts["recording"] = facts["recorded"] = "not named"
    facts["windows"] = f"{last - first + 1:,}, numbered {first} to {last}"
    if trace is not None:
        told = (Path(trace.path).name, trace.source, *trace.notes)
        facts["recording"] = "; ".join(text for text in told if text and not _said(text, told)) or "not named"
        if trace.windows and not trace.windows[0].isdecimal():
            facts["windows"] += f', "{trace.windows[0]}" to "{trace.windows[-1]}"'
        dated = trace.windows and all(re.match(r"\d{4}-\d\d-\d\d", trace.windows[at]) for at in (0, -1))
        facts["recorded"] = f"{trace.windows[0]} to {trace.windows[-1]}" if dated else "the recording names no date"
    if any(each.topology != topology or each.digests[0] != sim.digests[0] for each in sims):
        facts["below"] = f"of {sim.policy}; other policies start from other ranks, slots or layouts"
    return facts | {
        "hardware": "not given" if cost is None else cost.name or "by its cost model",
        "ranks": f"{topology.num_ranks} on {counted(topology.num_nodes, 'node')} ({each} on each), {alike}",
        "slots": f"{sim.num_slots:,} on each layer, {'' if full else 'up to '}{most} on a rank; "
        f"{spare:,} for further copies of busy experts",
        "layout": _layout_words(sim),
        "dispatch": f"{sim.dispatch} (how the copies of an expert share its tokens)",
        "assumed": _assumed(sim),
    }


def _said(text: str, told: Sequence[str]) -> bool:
    """Whether another of the texts begins with this one, as a note does with the name of its array."""
    return any(other.startswith(text) for other in told if other is not text)


def _layout_words(sim: Simulation) -> str:
    kind = "experts in order, as engines start" if starts_trivial(sim) else "the layout that was given"
    first, last = sim.digests[0], sim.digests[-1]
    end = "" if first == last else f", and ends as {last[:12]} with {sim.policy}"
    return f"{'starts' if end else 'stays'} as {kind} ({first[:12]}){end}"


def _assumed(sim: Simulation) -> str:
    if sim.cost is None:
        return "a token takes the same time on every layer; nothing else takes time: moves are free"
    text = f"{sim.cost.assumed or 'the cost model that was given'}; "
    text += f"{sim.window_passes:g} pass{'es' * (sim.window_passes != 1.0)} in a window"
    timed = "the experts"
    if sim.cost.token_bytes:
        text += "; tokens come from all ranks in equal parts"
        timed += " and their all-to-all"
    return text + ("" if sim.cost.model.layer_s else f"; attention and all else but {timed} are left out")


# ---- what is drawn ---------------------------------------------------------------------------------------------------


def _page_data(sims: Sequence[Simulation], trace: Trace | None) -> dict[str, Any]:
    windows, layers = sims[0].balancedness.shape
    step = -(-windows // _WINDOWS)
    bound = next((sim.bound for sim in sims if not np.isnan(sim.bound).all()), None)
    by_layer = [
        _ranks_over_mean(sim, sim.layer_rank_load[:, layer])
        for sim in sims
        if sim.layer_rank_load is not None
        for layer in range(layers)
    ]
    named = trace is not None and windows <= _NAMES and trace.windows[:1] != (str(sims[0].first_window),)
    return {
        "windows": windows,
        "first": sims[0].first_window,
        "names": [plain(name, 40) for name in trace.windows] if trace is not None and named else [],
        "step": step,
        "unscored": sims[0].scored_from,
        "best": sims.index(recommended(sims)),
        "bound": None if bound is None else _rounded(averaged(bound, step)),
        "timeUnit": "ms per pass" if sims[0].cost is not None else "tokens of the fullest rank",
        "policies": [_policy_data(sim, step) for sim in sims],
        "together": _maps([_ranks_over_mean(sim, sim.rank_load) for sim in sims]),
        "ranks": _maps(by_layer if len(by_layer) == len(sims) * layers else []),
        "expertsAll": sims[0].layout.num_experts,
        "experts": _experts(trace),
    }


def _rank_step(sim: Simulation) -> int:
    return -(-sim.topology.num_ranks // _RANKS)


def _ranks_over_mean(sim: Simulation, load: FloatArray) -> FloatArray:
    return averaged(time_over_mean(load, sim.topology.rank_speed).T, _rank_step(sim)).T


def _experts(trace: Trace | None) -> dict[str, Any] | None:
    """The busiest experts of each layer, over the mean of all; of a stream, they are not known."""
    if trace is None or trace.format == "stream":
        return None
    total = trace.load.sum(axis=0, dtype=np.float64)
    busiest = np.argsort(-total, axis=1, kind="stable")[:, :_EXPERTS]
    over_mean = [time_over_mean(np.asarray(trace.load[:, at], np.float64), np.ones(1)) for at in range(len(total))]
    maps = _maps([each[:, rows] for each, rows in zip(over_mean, busiest, strict=True)])
    return maps and {**maps, "ids": busiest.tolist()}


def _maps(values: Sequence[FloatArray]) -> dict[str, Any] | None:
    """Maps `[T, rows]` of one scale from 0 to `top`, a byte a cell: 254 * sqrt(value / top), 255 where none is known.

    So a cell is within 0.4% of `top`, and closer where it is small. All maps are averaged over as many windows. None
    where even one column of each would be too much.
    """
    if not 0 < sum(each.shape[1] for each in values) <= _CELLS:
        return None
    step = max(-(-sum(each.size for each in values) // _CELLS), -(-len(values[0]) // _WINDOWS))
    thin = [averaged(each, step) for each in values]
    top = max([1.0, *(float(np.nanmax(each)) for each in thin if not np.isnan(each).all())])
    cells = [np.nan_to_num(np.rint(254.0 * np.sqrt(each / top)), nan=255.0).astype(np.uint8) for each in thin]
    return {
        "step": step,
        "top": top,
        "cells": [base64.b64encode(each.T.tobytes()).decode() for each in cells],
    }


def _policy_data(sim: Simulation, step: int) -> dict[str, Any]:
    names = sim.layer_ids or tuple(range(sim.balancedness.shape[1]))
    scored = sim.balancedness[sim.scored_from :]
    unit = 1.0 if sim.cost is None else 1e3
    return {
        "name": sim.policy,
        "curve": _rounded(averaged(sim.window_balancedness, step)),
        "ranks": sim.topology.num_ranks,
        "rankStep": _rank_step(sim),
        "nodes": (np.flatnonzero(np.diff(sim.topology.rank_to_node)) + 1).tolist(),
        "moves": [int(w) for w, count in zip(sim.rebalance_windows, sim.transfers.sum(axis=1), strict=True) if count],
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
