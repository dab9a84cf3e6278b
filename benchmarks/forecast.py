"""Forecasts: which windows should a placement be made for, so that those that follow are balanced?

    python -m benchmarks.forecast --traces FOLDER --json forecast.json

Every forecaster is replayed on every trace at several prices of a transfer: more balance for more transfers is a matter
of the price, so what counts is the balance at equally many transfers. `gain` is that: the mean distance of a
forecaster's points from the line through the points of `interval` (each window since the last rebalance as it was
seen), over the logarithm of transfers and where both have points. A gain on one trace says little; on all of them it
says something. "4 x" and "2 x" see windows from four and two intervals, the others from one.

moe128's first 256 windows ship. FOLDER may hold recorded loads of other models as .npz, `load [T, L, E]` each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

import eplb_core as eplb
from benchmarks import measure, traces
from eplb_core.placement import forecast

PRICES = (0.004, 0.002, 0.001, 0.0005, 0.00025)


class Replay(NamedTuple):
    """A trace and how it is lived through."""

    name: str
    load: npt.NDArray[np.int64]
    ranks: int
    num_slots: int
    interval: int


def forecasters(interval: int) -> dict[str, forecast.Forecaster]:
    """All that are compared; the first is what the others are compared with."""

    def since(intervals: int, then: forecast.Forecaster = forecast.all_windows) -> forecast.Forecaster:
        return lambda load: then(load[-intervals * interval :])

    return {
        "interval": since(1),
        "last": forecast.last_windows,
        "last half": lambda load: load[-((interval + 1) // 2) :],
        "mean": since(1, forecast.mean_window),
        "ewma 0.9": since(1, forecast.ewma_window),
        "recent 0.95": since(1, partial(forecast.recent_windows, decay=0.95)),
        "trend 0.25": since(1, partial(forecast.trend_windows, damping=0.25)),
        "trend 0.5": since(1, forecast.trend_windows),
        "widened 1.15": since(1, partial(forecast.widened_windows, factor=1.15)),
        "widened 1.3": since(1, forecast.widened_windows),
        "2 x": since(2),
        "4 x": since(4),
        "4 x, every second": lambda load: load[-4 * interval :][::-1][::2][::-1],
        "4 x, every fourth": lambda load: load[-4 * interval :][::-1][::4][::-1],
        "4 x, newest held back": lambda load: load[-4 * interval :][: max(interval, len(load) - interval)],
        "4 x, mean": since(4, forecast.mean_window),
        "4 x, recent 0.98": since(4, partial(forecast.recent_windows, decay=0.98)),
        "4 x, recent 0.95": since(4, partial(forecast.recent_windows, decay=0.95)),
        "4 x, trend 0.25": since(4, partial(forecast.trend_windows, damping=0.25)),
        "4 x, widened 1.15": since(4, partial(forecast.widened_windows, factor=1.15)),
        "4 x, widened 1.3": since(4, forecast.widened_windows),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.parser("forecast", __doc__, quick="one short trace, three forecasters")
    parser.add_argument("--traces", type=Path, help="folder of .npz files with `load [T, L, E]`")
    options = parser.parse_args(argv)
    measure.one_thread()
    replays = [Replay("moe128", traces.drift_load()[:256], 16, 144, 32), *others(options.traces)]
    if options.quick:
        replays = [Replay("moe128", traces.drift_load()[:96, :2], 16, 144, 16)]
    record, gains = [], dict[str, dict[str, float]]()
    for replay in replays:
        compared = forecasters(replay.interval)
        if options.quick:
            compared = {name: compared[name] for name in ("interval", "last", "4 x")}
        points = {name: run(replay, name, forecaster) for name, forecaster in compared.items()}
        gains[replay.name] = {name: gain(points["interval"], mine) for name, mine in points.items()}
        for name, mine in points.items():
            record += [
                {"trace": replay.name, "forecaster": name, "price": price, "balancedness": balance, "transfers": moved}
                for price, (balance, moved) in zip(PRICES, mine, strict=True)
            ]
        print(report(replay, points))
    rows = [
        [name, *(f"{gains[replay.name][name]:+.4f}" for replay in replays), f"{mean_gain(gains, name):+.4f}"]
        for name in next(iter(gains.values()))
    ]
    print("Gain over `interval` at equally many transfers:\n")
    print(measure.table(["forecast", *(replay.name for replay in replays), "mean"], rows))
    best = max(compared, key=lambda name: mean_gain(gains, name))
    summary = [f"forecast: `{best}` is best over {len(replays)} traces, {mean_gain(gains, best):+.4f} of balance"]
    measure.write_json(options.json, {"summary": summary, "rows": record, "gains": gains})
    return 0


def others(folder: Path | None) -> list[Replay]:
    """Loads of other models, each file a trace in its own order: ranks and slots that fit the number of experts."""
    found = []
    for path in sorted(folder.glob("*.npz")) if folder is not None else []:
        with np.load(path, allow_pickle=False) as file:
            if "load" not in file.files or file["load"].ndim != 3:
                print(f"left out: {path.name} has no `load [T, L, E]`")
                continue
            load = np.asarray(file["load"], dtype=np.int64)
        experts = load.shape[2]
        found.append(Replay(path.stem, load, 8, experts + 8, max(1, min(16, len(load) // 6))))
    return found


def run(replay: Replay, name: str, forecaster: forecast.Forecaster) -> list[tuple[float, int]]:
    """Balance and transfers at each price."""
    points = []
    for price in PRICES:
        (row,) = eplb.backtest(
            replay.load,
            {name: forecaster},
            topology=eplb.Topology(replay.ranks),
            num_slots=replay.num_slots,
            interval=replay.interval,
            history=4 * replay.interval,
            place_options={"transfer_price": price, "min_gain": 0.0},
        )
        points.append((row.mean_balancedness, row.transfers))
    return points


def gain(line: list[tuple[float, int]], points: list[tuple[float, int]]) -> float:
    """Mean height of `points` over the line, at as many transfers; NaN where the two do not overlap."""
    known = sorted((math.log(moved + 1), balance) for balance, moved in line)
    x, y = [at for at, _ in known], [balance for _, balance in known]
    above = [
        balance - float(np.interp(math.log(moved + 1), x, y))
        for balance, moved in points
        if x[0] <= math.log(moved + 1) <= x[-1]
    ]
    return sum(above) / len(above) if above else math.nan


def mean_gain(gains: Mapping[str, Mapping[str, float]], name: str) -> float:
    known = [each[name] for each in gains.values() if not math.isnan(each[name])]
    return sum(known) / len(known) if known else -math.inf


def report(replay: Replay, points: Mapping[str, list[tuple[float, int]]]) -> str:
    shape = " x ".join(map(str, replay.load.shape))
    head = (
        f"{replay.name}: [{shape}], {replay.num_slots} slots on {replay.ranks} ranks, every {replay.interval} windows"
    )
    rows = [[name, *(f"{balance:.4f} @ {moved:,}" for balance, moved in mine)] for name, mine in points.items()]
    return f"{head}\n\n{measure.table(['forecast', *(f'price {price:g}' for price in PRICES)], rows)}\n"


if __name__ == "__main__":
    raise SystemExit(main())
