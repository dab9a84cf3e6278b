"""From the layout that is in place: how much balance for few transfers, how long does it take, how far does it scale?

    python -m benchmarks.from_layout --loads R1.npz --json from_layout.json

Loads: recorded ones `[L, E]` by name (`--loads`), or generated ones as uneven. Balance is total_balancedness on the
load that the layout was changed for; time is the least and the median of many calls on one thread, other policies
beside it on the same load.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import eplb_core as eplb
from benchmarks import measure, peers, placement, traces

PEER_OPTIONS = ("--loads", "--peers-dir", "--peer")
SLOTS = 288
BUDGETS = (4, 8, 24, None)
SCALE = (61, 512, 1024, 4096)

Load = npt.NDArray[Any]


def main(argv: Sequence[str] | None = None) -> int:
    options = placement.begin("from_layout", __doc__, argv)
    theirs = peers.load_all(options)
    loads = dict(placement.loads(options.loads, options.quick))
    shape = next(iter(loads.values())).shape  # the last load is of another model
    loads = {name: load for name, load in loads.items() if load.shape == shape}
    record: dict[str, Any] = {}
    for name, title, fields, rows in (
        (
            "budgets",
            "decode to prefill",
            "from to ranks max_transfers transfers before after",
            budgets(loads, options.quick),
        ),
        ("times", "a call", "case policy windows transfers median_ms least_ms", times(loads, theirs, options)),
        ("scale", "scale", "layers experts ranks slots max_transfers median_ms least_ms", scale(options)),
    ):
        record[name] = list(rows)
        cells = [[str(measure.rounded(row[field])) for field in fields.split()] for row in record[name]]
        print(f"\n{title}\n\n{measure.table(fields.split(), cells)}")
    measure.write_json(options.json, {"summary": summary(record), **record})
    return 0


def budgets(loads: dict[str, Load], quick: bool) -> Iterator[dict[str, Any]]:
    """Balance that so many transfers a layer reach."""
    starts = [name for name in loads if "decode" in name]
    ends = [name for name in loads if name.endswith("prefill_in4096")]
    for ranks in (32,) if quick else (32, 72):
        topology = eplb.Topology(ranks)
        for start in starts:
            live = eplb.place(loads[start], topology, num_slots=SLOTS).layout
            for end in ends:
                if start.startswith("generated") != end.startswith("generated"):
                    continue
                before = eplb.total_balancedness(eplb.rank_load(live, loads[end]))
                for budget in BUDGETS:
                    answer = eplb.place(loads[end], topology, num_slots=SLOTS, current=live, max_transfers=budget)
                    yield {
                        "from": start,
                        "to": end,
                        "ranks": ranks,
                        "max_transfers": budget,
                        "transfers": float(answer.transfers.mean()),
                        "before": float(before),
                        "after": float(eplb.total_balancedness(eplb.rank_load(answer.layout, loads[end]))),
                    }


def times(
    loads: dict[str, Load], theirs: Sequence[peers.Policy], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """A call after the same traffic went on (each count 5% off), and after other traffic came."""
    names = list(loads)
    topology = eplb.Topology(32)
    live = eplb.place(loads[names[0]], topology, num_slots=SLOTS).layout
    rng = np.random.default_rng(0)
    for case, load in (("the same traffic", loads[names[0]]), ("other traffic", loads[names[-1]])):
        for count in (1, 8, 32):
            trace = load * rng.lognormal(0, 0.05, (count, *load.shape))
            given = trace if count > 1 else trace[0]
            for dispatch in ("even", "weighted"):

                def call(given: Load = given, dispatch: eplb.PlacementDispatch = dispatch) -> eplb.Placement:
                    return eplb.place(given, topology, num_slots=SLOTS, current=live, dispatch=dispatch)

                yield timed(call, options) | {
                    "case": case,
                    "policy": f"eplb_core place, {dispatch}",
                    "windows": count,
                    "transfers": float(call().transfers.mean()),
                }
        for policy in theirs:
            run = policy.prepare(np.asarray(load), SLOTS, 32, live.physical_to_logical_map)
            new = eplb.ExpertLayout(np.asarray(run(), dtype=np.int64), live.num_experts, topology=topology)
            yield timed(run, options) | {
                "case": case,
                "policy": policy.name,
                "windows": 1,
                "transfers": float(eplb.transfers(live, new).sum(axis=1).mean()),
            }


def scale(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Many ranks, few transfers."""
    layers, experts, ranks, slots = (2, 64, 16, 128) if options.quick else SCALE
    topology = eplb.Topology(ranks, num_nodes=ranks // 8)
    load = traces.generated_load(num_layers=layers, num_experts=experts)
    live = eplb.place(load, topology, num_slots=slots).layout
    later = load * np.random.default_rng(1).lognormal(0, 0.3, load.shape)
    for budget in (8, None):

        def call(budget: int | None = budget) -> eplb.Placement:
            return eplb.place(later, topology, num_slots=slots, current=live, max_transfers=budget)

        yield timed(call, options) | {
            "layers": layers,
            "experts": experts,
            "ranks": ranks,
            "slots": slots,
            "max_transfers": budget,
            "transfers": float(call().transfers.mean()),
        }


def timed(call: Callable[[], Any], options: argparse.Namespace) -> dict[str, Any]:
    _, seconds = measure.timed(call, calls=options.calls, budget_s=options.budget)
    return {"median_ms": seconds.median * 1e3, "least_ms": seconds.minimum * 1e3}


def summary(record: dict[str, Any]) -> list[str]:
    lines = ["from a layout that is in place:"]
    for budget in (8, 24):
        rows = [row for row in record["budgets"] if row["max_transfers"] == budget and row["ranks"] == 32]
        reached = ", ".join(f"{row['after']:.4f}" for row in rows)
        lines.append(f"  decode to prefill4096, {budget} transfers a layer: {reached}")
    for row in record["times"]:
        if row["policy"].startswith("eplb_core"):
            lines.append(f"  {row['policy']}, {row['windows']} windows, {row['case']}: {row['median_ms']:.1f} ms")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
