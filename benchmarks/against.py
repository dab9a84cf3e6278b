"""This checkout against another one: equal bytes? as fast?

    git worktree add ../before COMMIT && python -m benchmarks.against ../before --json against.json

Answers of both are compared by digest. Times are CPU seconds of the calling thread, of processes of both checkouts that
run in turns; a ratio above 1 means that this checkout is slower. Only names that both have are called.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROUNDS, REPEATS = 5, 7


def cases() -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """Name, calls that are timed together, and a call whose answer is arrays."""
    import torch

    import eplb_core as eplb

    random = np.random.default_rng(7)
    topology = eplb.Topology(num_ranks=32, num_nodes=4)
    uneven = eplb.Topology(num_ranks=32, num_nodes=4, rank_speed=np.where(np.arange(32) % 4, 1.0, 0.5))
    load = np.rint(np.exp(random.normal(0.0, 0.8, (8, 58, 256))) * 1000).astype(np.int64)
    own: dict[str, Any] = {"topology": topology, "num_slots": 288}
    live = eplb.place(load[0], **own).layout
    later = eplb.place(load[1], **own, current=live)
    demo = eplb.load_trace(Path(eplb.__file__).parent / "data" / "moe128_demo.npz").load
    shares = eplb.replica_shares(live, load[0])
    ids = torch.from_numpy(random.integers(0, 256, (512, 8)).astype(np.int32))

    def placed(windows: Any, **options: Any) -> Any:
        p = eplb.place(windows, **{**own, **options})
        return p.layout.physical_to_logical_map, p.balancedness, p.bound, p.transfers

    def planned() -> Any:
        plan = eplb.plan_pull(live, later.layout, rank=3)
        return np.asarray(plan.kind), plan.source_slot, plan.num_reads

    def mapped(layer: eplb.LayerTables) -> Any:
        return (eplb.topk_to_slots(ids, layer),)

    def replayed() -> Any:
        run = eplb.simulate(demo[:48], topology=eplb.Topology(16, 2), num_slots=144, interval=8)
        return run.balancedness, run.transfers

    yield "place", 1, lambda: placed(load[0])
    yield "place, unequal speeds", 1, lambda: placed(load[0], topology=uneven)
    yield "place, from a layout", 1, lambda: placed(load[2], current=live)
    yield "place, 4 windows from a layout", 1, lambda: placed(load[2:6], current=live)
    yield "place, weighted", 1, lambda: placed(load[2], current=live, dispatch="weighted")
    yield "rebalance_experts", 1, lambda: eplb.rebalance_experts(torch.from_numpy(load[0]), 288, 8, 4, 32)
    yield "should_rebalance", 1, lambda: (eplb.should_rebalance(live, load[1], placement=later).layers,)
    yield "static_dispatch_table", 1, lambda: (eplb.static_dispatch_table(live),)
    yield "even_dispatch_table", 1, lambda: (eplb.even_dispatch_table(live),)
    yield "replica_shares", 1, lambda: (eplb.replica_shares(live, load[1]),)
    yield "plan_pull", 1, planned
    resolver = eplb.SlotResolver(live, 3)
    yield "local_slots", 100, lambda: (np.array([len(resolver.local_slots(5, expert)) for expert in range(256)]),)
    yield "fingerprints", 1, lambda: (eplb.fingerprints([eplb.ExpertStore({"w": torch.arange(9.0)[:, None]})]),)
    for mode in ("static", "even", "row", "weighted", "quota"):
        tables = eplb.DispatchTables(live, rank=3, mode=mode, shares=shares if mode == "weighted" else None)
        yield f"topk_to_slots, {mode}", 50, partial(mapped, tables.layer(5))
    yield "simulate", 1, replayed


def child() -> None:
    """Print the digest and the least CPU seconds of each case, as JSON."""
    found = {}
    for name, calls, call in cases():
        answer = call()
        digest = hashlib.sha256()
        for array in answer:
            values = np.ascontiguousarray(array)
            digest.update(f"{values.shape} {values.dtype.str}".encode() + values.tobytes())
        times = []
        for _ in range(REPEATS):
            start = time.thread_time()
            for _ in range(calls):
                call()
            times.append((time.thread_time() - start) / calls)
        found[name] = {"digest": digest.hexdigest()[:16], "s": min(times)}
    print(json.dumps(found))


def main(argv: Sequence[str] | None = None) -> int:
    from benchmarks import measure

    parser = measure.parser("against", __doc__, quick="one round")
    parser.add_argument("other", type=Path, nargs="?", default=measure.ROOT, help="a checkout; default: this one")
    options = parser.parse_args(argv)
    rounds: dict[str, list[Any]] = {"other": [], "this": []}
    for _ in range(1 if options.quick else ROUNDS):
        for side, root in (("other", options.other.resolve()), ("this", measure.ROOT)):
            rounds[side].append(measure.json_of(__file__, "--child", PYTHONPATH=str(root), EPLB_CORE_QUIET="1"))
    rows, differ, ratios = [], [], {}
    for name in rounds["this"][0]:
        best = {side: min(found[name]["s"] for found in rounds[side]) for side in rounds}
        equal = len({found[name]["digest"] for side in rounds.values() for found in side}) == 1
        differ += [] if equal else [name]
        rows.append({"case": name, "other_s": best["other"], "this_s": best["this"], "equal": equal})
        ratios[name] = best["this"] / best["other"]
    shown = [
        [row["case"], *(f"{1e3 * row[side]:.3f}" for side in ("other_s", "this_s")), f"{ratios[row['case']]:.3f}"]
        for row in rows
    ]
    print(measure.table(["case", "other ms", "this ms", "ratio"], shown))
    worst = max(ratios, key=lambda name: ratios[name])
    summary = [
        f"{len(rows) - len(differ)} of {len(rows)} answers equal; at most {ratios[worst]:.2f} x the time: {worst}"
    ]
    measure.write_json(options.json, {"summary": summary, "rows": rows})
    return 1 if differ else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--child"]:
        child()
    else:
        raise SystemExit(main())
