"""Command line: figures, or the soak."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import eplb_core as eplb
from benchmarks.engine.cluster import Cluster
from benchmarks.engine.drive import Record, drive
from benchmarks.engine.engine import MODES, POLICIES, Setup
from benchmarks.engine.model import ModelConfig
from benchmarks.engine.oracle import Oracle
from benchmarks.engine.requests import Scheduler, Traffic
from benchmarks.engine.shared import soak_shared
from benchmarks.engine.soak import soak
from benchmarks.engine.soaks import soaks_at_once
from benchmarks.engine.weights import save_experts
from benchmarks.measure import table, write_json

SMALL = ModelConfig(num_layers=2)
PRESETS = {
    "cpu": Setup(
        Path(),
        config=ModelConfig(num_layers=4, num_experts=32, hidden=256, expert_width=512, num_heads=4),
        num_rows=32,
        slots_per_rank=10,
    ),
    # Small, for several nodes on few cores: a token has four experts.
    "nodes": Setup(
        Path(),
        config=ModelConfig(num_layers=2, num_experts=32, top_k=4),
        num_rows=16,
        slots_per_rank=10,
        window=4,
        interval=24,
        move_cost=0.001,
        deadline=60.0,
    ),
    # 30 layers of 128 experts, 1.5 million parameters each: 11 GB in bfloat16, and a quarter as much of replicas.
    "h200": Setup(
        Path(),
        config=ModelConfig(
            num_layers=30,
            num_experts=128,
            top_k=8,
            hidden=1024,
            expert_width=512,
            num_heads=8,
            vocabulary=8192,
            num_topics=16,
            max_length=128,
        ),
        num_rows=64,
        slots_per_rank=40,
        synthetic=True,
        window=8,
        interval=64,
        deadline=60.0,
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, few passes: does it run?")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cpu", help="cpu; cuda:0: all ranks on one GPU; cuda: one a rank")
    parser.add_argument("--threads", action="store_true", help="ranks are threads, on a GPU each with its own stream")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="cpu")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--passes", type=int, default=400, help="of each mode")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--check", action="store_true", help="compare every token with the oracle; times mean less")
    parser.add_argument(
        "--always", action="store_true", help="place from nothing at every decision and move, worth it or not"
    )
    parser.add_argument(
        "--policy", choices=POLICIES, default=POLICIES[0], help="who decides: a Balancer, or place and should_rebalance"
    )
    parser.add_argument(
        "--nodes",
        type=int,
        default=1,
        help='more than 1: mode "near" with pairs beside "weighted"',
    )
    parser.add_argument(
        "--shared", action="store_true", help="with --soak: engines that die on weights that outlive them"
    )
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="traffic and faults instead of figures")
    parser.add_argument("--at-once", type=int, default=1, help="with --soak: so many, each with a seed of its own")
    options = parser.parse_args(argv)
    if options.preset == "h200" and options.device == "cpu" and not options.quick and options.soak is None:
        parser.error("--preset h200 takes tens of gigabytes and needs GPUs: give --device cuda:0 or --device cuda")
    if options.nodes > 1 and (options.policy != "auto" or options.always or options.soak is not None):
        parser.error("--nodes compares what a Balancer does: leave out --policy place, --always and --soak")
    if options.nodes < 1 or options.ranks % options.nodes:
        parser.error(f"--nodes (={options.nodes}) must be 1 or more and divide the {options.ranks} --ranks")
    eplb.warm_up()  # once, and not in every rank
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if options.soak is not None and options.at_once > 1:
        total = soaks_at_once(
            options.at_once,
            options.ranks,
            options.soak,
            seed=options.seed,
            shared=options.shared,
            policy=options.policy,
        )
        print(total)
        write_json(options.json, {"soak": total, "ok": not total["failed"]})
        return 1 if total["failed"] else 0
    if options.soak is not None:
        run_soak = soak_shared if options.shared else soak
        report = run_soak(options.ranks, options.soak, seed=options.seed, policy=options.policy)
        print(report)
        write_json(options.json, {"soak": dataclasses.asdict(report), "ok": report.ok})
        return 0 if report.ok else 1
    if options.quick:
        options.ranks, options.passes = 2, 40
    with tempfile.TemporaryDirectory(prefix="eplb-engine-") as folder:
        setup = dataclasses.replace(PRESETS[options.preset], folder=Path(folder), seed=options.seed)
        if options.quick:
            setup = dataclasses.replace(setup, config=SMALL, slots_per_rank=10, num_rows=4, interval=16, window=4)
        # A quarter more slots than experts, or what the preset says.
        enough = -(-5 * setup.config.num_experts // (4 * options.ranks))
        setup = dataclasses.replace(setup, slots_per_rank=max(setup.slots_per_rank, enough))
        setup = dataclasses.replace(setup, device=options.device, threads=options.threads, always=options.always)
        setup = dataclasses.replace(setup, policy=options.policy)
        if not setup.synthetic:
            save_experts(Path(folder) / "experts-0", setup.config, setup.seed, setup.dtype)
        record = (figures if options.nodes == 1 else on_nodes)(setup, options)
    for line in record["summary"]:
        print(line)
    return 0


def figures(setup: Setup, options: argparse.Namespace) -> dict[str, Any]:
    """All of them; what is there is printed and written as soon as it is."""
    gpu = torch.cuda.get_device_name(0) if setup.device != "cpu" else None
    shape = dataclasses.asdict(setup.config) | {
        "ranks": options.ranks,
        "rows": setup.num_rows,
        "device": setup.device,
        "gpu": gpu,
        "ranks_are": "threads" if setup.threads else "processes",
    }
    modes: dict[str, dict[str, Any]] = {}
    record: dict[str, Any] = {"shape": shape, "modes": modes, "summary": []}
    head = ["mode", "tokens/s", "p50 ms", "p99 ms", "worst ms", "balancedness", "layers installed"]
    for mode in options.modes:
        modes[mode] = one = by_mode(dataclasses.replace(setup, mode=mode), options)
        times = (f"{one[key]:.1f}" for key in ("p50_ms", "p99_ms", "worst_ms"))
        row = [mode, f"{one['tokens_s']:.0f}", *times, f"{one['balancedness']:.3f}", str(one["installed"])]
        print(table(head, [row]), flush=True)
        write_json(options.json, record)
    record["skewed"] = on_skewed_load(setup, options)
    record["summary"] = summary_of(record)
    write_json(options.json, record)
    return record


def summary_of(record: dict[str, Any]) -> list[str]:
    """In words."""
    shape, modes, skewed = record["shape"], record["modes"], record["skewed"]
    layers = shape["num_layers"]
    summary = [
        f"{shape['ranks']} ranks ({shape['ranks_are']}), {layers} layers, {shape['num_experts']} experts, "
        f"{shape['gpu'] or shape['device']}",
        f"skewed load, same topics throughout: balancedness {skewed['before']['balancedness']:.3f} -> "
        f"{skewed['after']['balancedness']:.3f}, median pass {skewed['before']['p50_ms']:.1f} -> "
        f"{skewed['after']['p50_ms']:.1f} ms",
    ]
    if "async" in modes:
        idle = modes["async"]["idle"]
        summary.append(
            f"nothing to do: poll, roll and {layers} maps take {1e3 * idle['library_s']:.3f} ms of "
            f"{idle['p50_ms']:.1f} ms, {100 * idle['share']:.2f}%"
        )
    if "off" in modes:
        for mode in modes.keys() - {"off"}:
            off, moving = modes["off"], modes[mode]
            summary.append(
                f"drifting load, {mode} beside off: balancedness {off['balancedness']:.3f} -> "
                f"{moving['balancedness']:.3f}, p99 {moving['p99_ms'] / off['p99_ms']:.2f} times, worst pass "
                f"{moving['worst_ms'] / off['worst_ms']:.2f} times"
            )
    return summary


def by_mode(setup: Setup, options: argparse.Namespace) -> dict[str, Any]:
    """Drifting traffic under one mode; the same requests for all."""
    oracle = None
    if options.check:
        oracle = Oracle(setup.config, setup.seed, setup.num_rows * options.ranks, setup.device)
        oracle.load(setup.checkpoint(0))
    with Cluster(setup) as cluster:
        cluster.start(options.ranks)
        scheduler = Scheduler(Traffic(setup.config, setup.seed, drift=0.02), setup.num_rows)
        warm = setup.interval // 2
        drive(cluster, scheduler, 4, oracle=oracle)  # the first passes load what is loaded late
        still = drive(cluster, scheduler, warm - 4, first=5, oracle=oracle)
        idle = with_nothing_to_do(cluster, setup, still)
        record = drive(cluster, scheduler, options.passes, first=warm + 1, oracle=oracle, window=setup.window)
        status = cluster.call("status")[0][1]
        cluster.call("close")
    if record.wrong:
        raise SystemExit(f"{record.wrong} of {record.compared} tokens are wrong")
    tokens = options.passes * setup.num_rows * options.ranks
    moves = {} if status is None else {key: status[key] for key in ("migration", "read_bytes", "worst_install_s")}
    return {
        "tokens_s": round(tokens / sum(record.pass_s), 1),
        **record.times(),
        **balance_of(record),
        "installed": record.installed,
        "tokens_compared": record.compared,
        "idle": idle,
        **moves,
    }


def on_nodes(setup: Setup, options: argparse.Namespace) -> dict[str, Any]:
    """Topics whose popularity does not change, on several nodes: sends across nodes before and after the moves."""
    shape = dataclasses.asdict(setup.config) | {
        "ranks": options.ranks,
        "nodes": options.nodes,
        "rows": setup.num_rows,
        "slots_per_rank": setup.slots_per_rank,
    }
    rows: list[dict[str, Any]] = []
    for dispatch in ("weighted", "near"):
        one = dataclasses.replace(setup, mode="async", nodes=options.nodes, dispatch=dispatch)
        oracle = Oracle(one.config, one.seed, one.num_rows * options.ranks, one.device)
        oracle.load(one.checkpoint(0))
        with Cluster(one) as cluster:
            cluster.start(options.ranks)
            scheduler = Scheduler(Traffic(one.config, one.seed, skew=1.0, drift=0.0), one.num_rows)
            before = drive(cluster, scheduler, one.interval - 1, oracle=oracle, window=one.window)
            moving = drive(cluster, scheduler, options.passes, first=one.interval, oracle=oracle, window=one.window)
            number = one.interval + options.passes
            after = drive(cluster, scheduler, one.interval, first=number, oracle=oracle, window=one.window)
            predicted = cluster.call("predicted")[0]
            cluster.call("close")
        parts = (before, moving, after)
        if wrong := sum(part.wrong for part in parts):
            raise SystemExit(f"{wrong} of {sum(part.compared for part in parts)} tokens are wrong")
        rows.append(
            {
                "dispatch": dispatch,
                "sends before": round(before.sends, 4),
                "sends": round(after.sends, 4),
                "predicted": None if np.isnan(predicted) else round(predicted, 4),
                **balance_of(after),
                "installed": sum(part.installed for part in parts),
                "tokens_compared": sum(part.compared for part in parts),
            }
        )
    head = list(rows[0])
    print(table(head, [[str(row[key]) for key in head] for row in rows]), flush=True)
    far, near = rows
    summary = [
        f"{options.ranks} ranks in {options.nodes} nodes: {near['sends']:.3f} sends across nodes per token, predicted "
        f"{near['predicted']}; {far['sends']:.3f} without pairs; no token of "
        f"{far['tokens_compared'] + near['tokens_compared']:,} wrong"
    ]
    record = {"shape": shape, "rows": rows, "summary": summary}
    write_json(options.json, record)
    return record


def balance_of(record: Record) -> dict[str, float]:
    """Mean over windows."""
    return {"balancedness": round(float(np.mean(record.balance)), 4)}


def on_skewed_load(setup: Setup, options: argparse.Namespace) -> dict[str, Any]:
    """Topics whose popularity does not change: before the first migration, and after the last."""
    setup = dataclasses.replace(setup, mode="async", interval=2 * options.passes // 3)
    with Cluster(setup) as cluster:
        cluster.start(options.ranks)
        scheduler = Scheduler(Traffic(setup.config, setup.seed, skew=1.5, drift=0.0), setup.num_rows)
        before = drive(cluster, scheduler, setup.interval - 1, window=setup.window)
        first, installed = setup.interval, 0
        for _ in range(12):  # until what the first decision chose is installed
            moving = drive(cluster, scheduler, setup.window, first=first, window=setup.window)
            first, installed = first + setup.window, installed + moving.installed
            if cluster.call("status")[0][1]["phase"] == "idle":
                break
        after = drive(cluster, scheduler, setup.interval // 2, first=first, window=setup.window)
        cluster.call("close")
    return {
        "before": before.times() | balance_of(before),
        "after": after.times() | balance_of(after),
        "installed": installed,
    }


def with_nothing_to_do(cluster: Cluster, setup: Setup, record: Record) -> dict[str, Any]:
    """What the library costs where it is idle: the calls of each pass beside passes in which no expert moved."""
    map_s = float(np.median(cluster.call("map_cost", 1000)))
    in_pass = float(np.median(record.library_s)) + setup.config.num_layers * map_s
    return {
        **record.times(),
        "poll_and_roll_s": float(np.median(record.library_s)),
        "map_s": map_s,
        "library_s": in_pass,
        "share": in_pass / (record.times()["p50_ms"] / 1e3),
    }


if __name__ == "__main__":
    raise SystemExit(main())
