"""Placement over time: how much balance on windows not seen yet, for how many transfers?

    python -m benchmarks.over_time --peers-dir .peers --peer eplb.py --json over_time.json --plot over_time.png

One protocol for every policy: place on 32 windows, live on the next 32, repeat, from the trivial layout on. The trace
is moe128's `drift_load` (16 layers, 128 experts, 512 windows whose mixture of topics walks and switches twice), 144
slots on 16 ranks. Realized balancedness is the mean over all windows lived on and all layers: of replicas that share
evenly, and of shares solved exactly in each window, as quota dispatch would have them. The clairvoyant line is placed
on the windows that it then lives on: what is left of the gap to it is not for the search to close. Lines with 128
windows see up to four times as much of the past as the protocol gives the others. FlashLB is given the windows one by
one, as its engine does, and remembers as many: once with its own thresholds for what to leave alone, once without.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

import eplb_core as eplb
from benchmarks import measure, peers, traces

PEER_OPTIONS = ("--peers-dir", "--peer")
RANKS, SLOTS, EVERY = 16, 144, 32
PRICES = (0.002, 0.001, 0.0005, 0.00025)

QUICK_STRIDE = 8

Chooser: TypeAlias = Callable[[npt.NDArray[np.int64], eplb.ExpertLayout], eplb.ExpertLayout]


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.parser("over_time", __doc__, quick="three rebalances, four layers")
    parser.add_argument("--plot", type=Path, help="a picture of balance against transfers; needs matplotlib")
    peers.add_options(parser)
    options = parser.parse_args(argv)
    measure.one_thread()
    load = traces.drift_load()
    if options.quick:
        load = load[: 4 * EVERY, :4]
    theirs = peers.load_all(options)
    # What is seen of the load: from so many windows before the rebalance on, to so many after it.
    past, longer, future = (EVERY, 0), (4 * EVERY, 0), (0, EVERY)
    choosers: list[tuple[str, Chooser, tuple[int, int]]] = [("trivial layout kept", lambda _, live: live, past)]
    choosers += [(policy.name, peer(policy), past) for policy in theirs]
    flash = peers.flashlb(options.peers_dir)
    if isinstance(flash, str):
        print(f"absent: {flash}")
    else:
        choosers += [
            ("FlashLB", flashlb(flash, EVERY, thresholds=True), past),
            ("FlashLB, no thresholds", flashlb(flash, EVERY, thresholds=False), past),
            ("FlashLB, no thresholds, 128 windows", flashlb(flash, 4 * EVERY, thresholds=False), longer),
        ]
    lines: tuple[tuple[str, eplb.PlacementDispatch, tuple[int, int]], ...] = (
        ("eplb_core place", "even", past),
        ("eplb_core weighted", "weighted", past),
        ("128 windows place", "even", longer),
        ("128 windows weighted", "weighted", longer),
        ("clairvoyant place", "even", future),
    )
    for name, dispatch, seen in lines:
        choosers += [(f"{name}, transfer_price={price:g}", ours(price, dispatch), seen) for price in PRICES]
    rows, record = [], []
    for name, choose, seen in choosers:
        row = {"policy": name, **replay(load, choose, seen, QUICK_STRIDE if options.quick else 1)}
        balance = [f"{row[field]:.4f}" for field in ("balancedness", "solved")]
        rows.append([name, *balance, f"{row['transfers']:,}", measure.milliseconds(row["median_s"])])
        record.append(row)
    head = ["policy", "realized balance", "with shares solved", "transfers", "median CPU ms a call"]
    print(measure.table(head, rows))
    if options.plot is not None:
        plot(record, options.plot)
    summary = [
        f"{row['policy']}: {row['balancedness']:.4f}, shares solved {row['solved']:.4f}, {row['transfers']:,} transfers"
        for row in record
        if not str(row["policy"]).startswith(("trivial", "clairvoyant"))
    ]
    measure.write_json(options.json, {"summary": ["over time:", *summary], "rows": record})
    return 0


def plot(record: Sequence[dict[str, Any]], path: Path) -> None:
    """Balance against transfers, a mark a policy and a line a search."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharex=True)
    lines = {
        "eplb_core place": "o-",
        "128 windows place": "v-",
        "eplb_core weighted": "s--",
        "128 windows weighted": "D--",
        "clairvoyant place": "^:",
    }
    for axis, field, title in zip(
        axes, ("balancedness", "solved"), ("replicas share evenly", "shares solved"), strict=True
    ):
        for name, mark in lines.items():
            points = sorted((row["transfers"], row[field]) for row in record if row["policy"].startswith(name))
            if "weighted" not in name or field == "solved":
                axis.plot(*zip(*points, strict=True), mark, color="black", label=name, fillstyle="none")
        others = [row for row in record if not row["policy"].startswith((*lines, "trivial"))]
        if others:
            axis.plot(
                [row["transfers"] for row in others],
                [row[field] for row in others],
                "x",
                color="black",
                label="DeepSeek, vLLM, SGLang, FlashLB",
            )
        axis.set_xscale("log")
        axis.set_xlabel("transfers in all")
        axis.set_title(title, fontsize=10)
        axis.grid(True, which="both", linewidth=0.3)
    axes[0].set_ylabel("realized balancedness")
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


def ours(price: float, dispatch: eplb.PlacementDispatch) -> Chooser:
    def choose(windows: npt.NDArray[np.int64], live: eplb.ExpertLayout) -> eplb.ExpertLayout:
        return eplb.place(
            windows, live.topology, num_slots=SLOTS, current=live, transfer_price=price, dispatch=dispatch
        ).layout

    return choose


def peer(policy: peers.Policy) -> Chooser:
    def choose(windows: npt.NDArray[np.int64], live: eplb.ExpertLayout) -> eplb.ExpertLayout:
        row = policy.prepare(windows.sum(axis=0), SLOTS, RANKS, live.physical_to_logical_map)()
        return eplb.ExpertLayout(np.asarray(row, dtype=np.int64), live.num_experts, topology=live.topology)

    return choose


def flashlb(make: Callable[[int, int], Any], windows: int, *, thresholds: bool) -> Chooser:
    """It remembers windows, and with `thresholds` what it reached before; it reads what its memory holds once full."""
    memory: list[Any] = []

    def choose(seen: npt.NDArray[np.int64], live: eplb.ExpertLayout) -> eplb.ExpertLayout:
        if not (memory and thresholds):
            memory[:] = [make(RANKS, min(windows, len(seen)))]
        slots = np.zeros((len(seen), live.num_layers, live.num_slots), dtype=np.int64)
        first = live.logical_to_physical_map[:, :, 0]
        np.put_along_axis(slots, np.broadcast_to(first, seen.shape), seen, axis=2)
        table = live.physical_to_logical_map.reshape(live.num_layers, RANKS, -1)
        _, _, rows = memory[0].rebalance_experts(table.copy(), slots.reshape(len(seen), *table.shape))
        rows = np.asarray(rows, dtype=np.int64).reshape(live.num_layers, -1)
        return eplb.ExpertLayout(rows, live.num_experts, topology=live.topology)

    return choose


def replay(load: npt.NDArray[np.int64], choose: Chooser, seen: tuple[int, int], stride: int) -> dict[str, Any]:
    """Realized mean balancedness, even and with shares solved in every window or each `stride`-th; transfers; time."""
    topology = eplb.Topology(RANKS)
    live = eplb.ExpertLayout.trivial(load.shape[1], load.shape[2], num_slots=SLOTS, topology=topology)
    realized, solved, seconds, moved = [], [], [], 0
    choose(load[:EVERY], live)  # compiles, so as not to be timed; what it remembers is what comes first anyway
    for start in range(EVERY, len(load), EVERY):
        begun = time.thread_time()
        chosen = choose(load[max(0, start - seen[0]) : start + seen[1]], live)
        seconds.append(time.thread_time() - begun)
        moved += int(eplb.transfers(live, chosen).sum())
        live = chosen
        lived = load[start : start + EVERY]
        realized.append(eplb.balancedness(eplb.rank_load(live, lived)))
        for window in lived[::stride]:
            shares = eplb.replica_shares(live, window)
            solved.append(eplb.balancedness(eplb.rank_load(live, window, shares=shares)))
    return {
        "balancedness": float(np.mean(np.concatenate(realized))),
        "solved": float(np.mean(np.stack(solved))),
        "transfers": moved,
        "median_s": float(np.median(seconds)),
    }


if __name__ == "__main__":
    raise SystemExit(main())
