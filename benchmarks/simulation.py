"""How long does a replay take, and how much memory? A trace of DeepSeek-V3's size through five policies.

    python -m benchmarks.simulation --json simulation.json

Two questions, each in a process of its own, so that peak memory is that of one:

- policies: 512 windows x 58 layers x 256 experts through five policies, 288 slots on 32 ranks, two replays at a time.
- scale: a day of windows of 512 experts on 1,024 ranks with 1,024 slots, streamed: the trace is made while it is
  replayed and is never in memory whole. Layers are alike, so four of them stand for all.

Checked first: the replays' balance and transfers are those of a plain loop over `rank_load` and `transfers`.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

import eplb_core as eplb
from benchmarks import measure
from eplb_core.simulation import POLICIES, Simulation, Traffic
from eplb_core.simulation.load.generator import stream_generated

# Windows, layers, experts, slots, ranks, nodes, windows between rebalances.
POLICY_SIZE, POLICY_QUICK = (512, 58, 256, 288, 32, 4, 32), (12, 2, 32, 40, 4, 2, 3)
SCALE_SIZE, SCALE_QUICK = (1440, 4, 512, 1024, 1024, 128, 60), (8, 1, 32, 64, 16, 2, 4)


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.parser("simulation", __doc__, quick="small traces")
    parser.add_argument("--question", choices=("policies", "scale"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.question:
        answer = policies(options.quick) if options.question == "policies" else scale(options.quick)
        print(json.dumps(answer))
        return 0
    sizes = SCALE_QUICK if options.quick else SCALE_SIZE
    own = ["-m", "benchmarks.simulation", *(["--quick"] if options.quick else []), "--question"]
    answers = {question: measure.json_of(*own, question) for question in ("policies", "scale")}
    rows = [
        [
            name,
            "x".join(map(str, each["trace"])),
            f"{each['seconds']:.2f}",
            f"{each['cpu_s']:.2f}",
            f"{each['peak_mb']:.0f}",
        ]
        for name, each in answers.items()
    ]
    head = ["question", "windows x layers x experts", "seconds", "seconds of CPU", "peak MB"]
    print(measure.table(head, rows))
    shown = [[row["policy"], f"{row['total']:.3f}", f"{row['transfers']:,}"] for row in answers["policies"]["rows"]]
    print(measure.table(["policy", "total balancedness", "transfers"], shown))
    summary = [
        f"{what}: {each['cpu_s']:.1f} s of CPU, {each['seconds']:.1f} s on two cores with what else ran there, "
        f"{each['peak_mb']:.0f} MB"
        for what, each in (
            (f"five policies over {answers['policies']['trace']} windows, layers, experts", answers["policies"]),
            (f"one over a stream of {answers['scale']['trace']}, {sizes[4]:,} ranks", answers["scale"]),
        )
    ]
    measure.write_json(options.json, {"summary": summary, "rows": answers})
    return 0


def policies(quick: bool) -> dict[str, Any]:
    windows, layers, experts, slots, ranks, nodes, interval = POLICY_QUICK if quick else POLICY_SIZE
    third = windows // 3
    kinds = [Traffic(third), Traffic(third, domain="b", blend=third / 2), Traffic(windows - 2 * third, domain="c")]
    trace = eplb.generate_trace(kinds, num_layers=layers, num_experts=experts, window_tokens=8192)
    topology = eplb.Topology(ranks, nodes)
    check(trace.load[: 3 * interval], topology, slots, interval)
    options: Any = {"topology": topology, "num_slots": slots, "interval": interval, "workers": 2}
    return measured(lambda: eplb.compare_policies(trace, POLICIES, **options), [windows, layers, experts])


def scale(quick: bool) -> dict[str, Any]:
    windows, layers, experts, slots, ranks, nodes, interval = SCALE_QUICK if quick else SCALE_SIZE
    kinds = [Traffic(windows // 2), Traffic(windows - windows // 2, domain="b", blend=windows / 10)]
    stream = stream_generated(kinds, num_layers=layers, num_experts=experts, window_tokens=65_536)
    topology = eplb.Topology(ranks, nodes)
    options: Any = {"topology": topology, "num_slots": slots, "interval": interval}
    return measured(lambda: [eplb.simulate(stream, policy="once", **options)], [windows, layers, experts])


def measured(call: Callable[[], Iterable[Simulation]], shape: Sequence[int]) -> dict[str, Any]:
    """Time and peak memory of a replay, and what it found."""
    begun, worked = time.perf_counter(), time.process_time()
    runs = list(call())
    return {
        "trace": shape,
        "seconds": time.perf_counter() - begun,
        "cpu_s": time.process_time() - worked,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "rows": [
            {"policy": sim.policy, "total": sim.total_balancedness, "transfers": sim.total_transfers} for sim in runs
        ],
    }


def check(load: Any, topology: eplb.Topology, slots: int, interval: int) -> None:
    """The first stretches, by a plain loop, which also loads the kernels."""
    sim = eplb.simulate(load, topology=topology, num_slots=slots, interval=interval)
    live = sim.first_layout
    means, tops, moved = 0.0, 0.0, 0
    for start in range(interval, len(load), interval):
        placed = eplb.place(load[start - interval : start], topology, num_slots=slots, current=live)
        moved += int(eplb.transfers(live, placed.layout).sum())
        live = placed.layout
        for window in load[start : start + interval]:
            ranks = eplb.rank_load(live, window)
            means, tops = means + ranks.mean(axis=1).sum(), tops + ranks.max(axis=1).sum()
    if moved != sim.total_transfers or not np.isclose(means / tops, sim.total_balancedness, rtol=1e-12):
        raise AssertionError(
            f"the replay has {sim.total_transfers}, {sim.total_balancedness}; the loop {moved}, {means / tops}"
        )


if __name__ == "__main__":
    raise SystemExit(main())
