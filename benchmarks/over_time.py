"""Placement over time: how much balance on windows not seen yet, for how many transfers?

    python -m benchmarks.over_time --peers-dir .peers --peer eplb.py --json over_time.json

One protocol for every policy: place on 32 windows, live on the next 32, repeat, from the trivial layout on. The trace
is moe128's `drift_load` (16 layers, 128 experts, 512 windows whose mixture of topics walks and switches twice), 144
slots on 16 ranks; replicas share evenly. Realized balancedness is the mean over all windows lived on and all layers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

import eplb_core as eplb
from benchmarks import measure, peers, traces

PEER_OPTIONS = ("--peers-dir", "--peer")
RANKS, SLOTS, EVERY = 16, 144, 32
PRICES = (0.002, 0.001, 0.0005, 0.00025)

Chooser: TypeAlias = Callable[[npt.NDArray[np.int64], eplb.ExpertLayout], eplb.ExpertLayout]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.over_time", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three rebalances, four layers")
    parser.add_argument("--json", type=Path)
    peers.add_options(parser)
    options = parser.parse_args(argv)
    measure.one_thread()
    load = traces.drift_load()
    if options.quick:
        load = load[: 4 * EVERY, :4]
    theirs, absent = peers.load_peers(options.peers_dir, options.peer)
    for line in absent:
        print(f"absent: {line}")
    choosers: list[tuple[str, Chooser]] = [("trivial layout kept", lambda _, live: live)]
    choosers += [(policy.name, peer(policy)) for policy in theirs]
    choosers += [(f"eplb_core place, transfer_price={price:g}", ours(price)) for price in PRICES]
    rows, record = [], []
    for name, choose in choosers:
        balance, transfers, median = replay(load, choose)
        rows.append([name, f"{balance:.4f}", f"{transfers:,}", measure.milliseconds(median)])
        record.append({"policy": name, "balancedness": balance, "transfers": transfers, "median_s": median})
    print(measure.table(["policy", "realized balance", "transfers", "median ms a call"], rows))
    best = record[-3]
    summary = [f"over time: place realizes {best['balancedness']:.4f} with {best['transfers']:,} transfers"]
    others = [row for row in record if not str(row["policy"]).startswith(("trivial", "eplb_core"))]
    summary += [f"  {row['policy']}: {row['balancedness']:.4f} with {row['transfers']:,}" for row in others]
    measure.write_json(options.json, {"summary": summary, "rows": record})
    return 0


def ours(price: float) -> Chooser:
    def choose(windows: npt.NDArray[np.int64], live: eplb.ExpertLayout) -> eplb.ExpertLayout:
        return eplb.place(windows, topology=live.topology, num_slots=SLOTS, current=live, transfer_price=price).layout

    return choose


def peer(policy: peers.Policy) -> Chooser:
    def choose(windows: npt.NDArray[np.int64], live: eplb.ExpertLayout) -> eplb.ExpertLayout:
        row = policy.prepare(windows.sum(axis=0), SLOTS, RANKS, live.physical_to_logical_map)()
        return eplb.ExpertLayout(np.asarray(row, dtype=np.int64), live.num_experts, topology=live.topology)

    return choose


def replay(load: npt.NDArray[np.int64], choose: Chooser) -> tuple[float, int, float]:
    """Realized mean balancedness, transfers in all, and the median time of a call."""
    topology = eplb.Topology(RANKS)
    live = eplb.ExpertLayout.trivial(load.shape[1], load.shape[2], num_slots=SLOTS, topology=topology)
    realized, seconds, moved = [], [], 0
    choose(load[:EVERY], live)  # compiles, so as not to be timed
    for start in range(EVERY, len(load), EVERY):
        begun = time.perf_counter()
        chosen = choose(load[start - EVERY : start], live)
        seconds.append(time.perf_counter() - begun)
        moved += int(eplb.transfers(live, chosen).sum())
        live = chosen
        realized.append(eplb.balancedness(eplb.rank_load(live, load[start : start + EVERY])))
    return float(np.mean(np.concatenate(realized))), moved, float(np.median(seconds))


if __name__ == "__main__":
    raise SystemExit(main())
