"""What do dispatch tables cost on the host, and how even do ranks become? Against SGLang's tables and the optimum.

    python -m benchmarks.dispatch --peers-dir .peers --json results.json

Realized balance: layouts by DeepSeek's algorithm on the windows before, loads of the windows that follow, on the
recording that ships.
"""

from __future__ import annotations

import ast
import random
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import eplb_core as eplb
from benchmarks import measure, peers, traces
from eplb_core.dispatch import quota
from eplb_core.dispatch.constants import MOST_SLOTS

PEER_OPTIONS = ("--peers-dir",)
Array = npt.NDArray[Any]

LAYERS, EXPERTS, SLOTS, RANKS, NODES = 58, 256, 288, 32, 4
SGLANG_FILE = "sglang/srt/eplb/expert_location.py"
SGLANG_FUNCTIONS = (
    "compute_logical_to_rank_dispatch_physical_map",
    "_logical_to_all_physical_raw",
    "_compute_gpu_id_of_physical_expert",
    "_compute_node_id_of_physical_expert",
    "_find_nearest_expert",
    "_fair_choices",
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.parser("dispatch", __doc__, quick="small inputs, few calls")
    parser.add_argument("--peers-dir", type=Path, default=Path(peers.DEFAULT_FOLDER), help="an unpacked SGLang wheel")
    options = parser.parse_args(argv)
    measure.one_thread()
    times, head_lines = host_tables(options.peers_dir / SGLANG_FILE, options.quick)
    drift = realized_on_windows(options.quick)
    lines = [
        *head_lines,
        f"recorded drift: even split {drift['even split']:.4f}, weighted {drift['weighted']:.4f}, quota "
        f"{drift['quota']:.4f} = {drift['quota'] / drift['limit']:.4f} of the limit {drift['limit']:.4f}",
    ]
    print("\n" + "\n".join(lines))
    measure.write_json(options.json, {"host": times, "drift": drift, "summary": lines})
    return 0


# ---- host tables -----------------------------------------------------------------------------------------------------


def host_tables(sglang_file: Path, quick: bool) -> tuple[dict[str, Any], list[str]]:
    """Times of making tables for all ranks, and of installing one layer; SGLang's in the same run where it is there."""
    layers = 4 if quick else LAYERS
    load = traces.generated_load(num_layers=max(layers, 20))[:layers]
    p2l = eplb.rebalance_experts(torch.from_numpy(load), SLOTS, 1, 1, RANKS)[0].numpy()
    layout = eplb.ExpertLayout(p2l, EXPERTS, topology=eplb.Topology(RANKS, NODES))
    sent = np.random.default_rng(0).poisson(load / RANKS, (RANKS, *load.shape))
    shares = eplb.replica_shares(layout, load)
    tables = eplb.DispatchTables(layout, mode="weighted", shares=shares)
    even = eplb.DispatchTables(layout, mode="even")
    turn = iter(range(10**9))
    calls: dict[str, Callable[[], object]] = {
        "static, all ranks": lambda: eplb.static_dispatch_table(layout),
        "static as at start-up, all ranks": lambda: eplb.static_dispatch_table(layout, candidates="narrowed"),
        "even, all ranks": lambda: eplb.even_dispatch_table(layout, expert_load=load),
        "even for unequal senders, all ranks": lambda: eplb.even_dispatch_table(layout, expert_load=sent),
        "repeated entries, one rank": lambda: eplb.hash_dispatch_table(layout, shares=shares),
        "replica shares": lambda: eplb.replica_shares(layout, load),
        "install one layer, weighted": lambda: tables.install(layout, layers=[next(turn) % layers], shares=shares),
        "install one layer, even": lambda: even.install(layout, layers=[next(turn) % layers]),
    }
    repeats = 2 if quick else 200
    times = {name: measure.timed(call, calls=repeats, budget_s=3.0)[1] for name, call in calls.items()}
    lines = []
    peer = sglang_table(sglang_file, RANKS // NODES, RANKS, NODES)
    if peer is None:
        print(f"absent: SGLang's tables: no file {sglang_file}")
    else:
        l2p = torch.tensor(layout.logical_to_physical_map)
        answer, times["SGLang static, one rank's row"] = measure.timed(
            lambda: peer(l2p, RANKS, SLOTS, 3), calls=2 if quick else 10, budget_s=5.0
        )
        if not np.array_equal(answer.numpy(), eplb.static_dispatch_table(layout)[3]):
            raise SystemExit("static tables differ from SGLang's")
        ours = times["static, all ranks"]
        theirs = times["SGLang static, one rank's row"]
        lines.append(
            f"static tables for all ranks: {ours.minimum * 1e3:.2f} ms, SGLang {theirs.minimum * 1e3:.0f} ms for one "
            f"({theirs.minimum / ours.minimum:.0f} times, equal answers)"
        )
    head = ["host, ms", "first", "median", "minimum"]
    print(measure.table(head, [[name, *each.columns] for name, each in times.items()]))
    return {name: each._asdict() for name, each in times.items()}, lines


def sglang_table(file: Path, per_node: int, ranks: int, nodes: int) -> Callable[..., torch.Tensor] | None:
    """SGLang's function, from its own file, with the engine's settings answered here."""
    if not file.is_file():
        return None
    tree = ast.parse(file.read_text())
    wanted: list[ast.stmt] = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in SGLANG_FUNCTIONS
    ]
    space: dict[str, Any] = {
        "random": random,
        "torch": torch,
        "List": list,
        "Optional": __import__("typing").Optional,
        "_prefer_same_node_experts": lambda: True,
        "get_parallel": lambda: types.SimpleNamespace(ep_size=ranks, nnodes=nodes),
    }
    exec(compile(ast.Module(body=wanted, type_ignores=[]), str(file), "exec"), space)
    function: Callable[..., torch.Tensor] = space["compute_logical_to_rank_dispatch_physical_map"]
    return function


# ---- realized balance ------------------------------------------------------------------------------------------------


def realized_on_windows(quick: bool) -> dict[str, float]:
    """Mean balancedness over windows and layers: even split, shares, quotas, and the limit of any dispatch."""
    load = traces.drift_load()
    every, slots, ranks = 32, load.shape[2] * 9 // 8, 16
    topology = eplb.Topology(ranks)
    sums: dict[str, list[float]] = {"even split": [], "weighted": [], "quota": [], "limit": []}
    for start in range(every, every * 2 if quick else len(load), every):
        past, future = load[start - every : start], load[start : start + (2 if quick else every)]
        p2l = eplb.rebalance_experts(torch.from_numpy(past.sum(0)), slots, 1, 1, ranks)[0]
        layout = eplb.ExpertLayout(p2l, load.shape[2], topology=topology)
        sums["even split"] += balance(eplb.rank_load(layout, future))
        sums["weighted"] += balance(eplb.rank_load(layout, future, shares=eplb.replica_shares(layout, past)))
        tables = eplb.DispatchTables(layout, mode="quota")
        for window in future:
            best = eplb.replica_shares(layout, window)
            sums["limit"] += balance(eplb.rank_load(layout, window, shares=best))
            sums["quota"] += balance(quota_load(layout, tables, window))
    result = {name: float(np.mean(values)) for name, values in sums.items()}
    print(f"\nrecorded drift, {load.shape[2]} experts on {slots} slots and {ranks} ranks:")
    print(measure.table(["dispatch", "balancedness"], [[name, f"{value:.4f}"] for name, value in result.items()]))
    return result


def balance(rank_load: npt.NDArray[np.float64]) -> list[float]:
    values = eplb.balancedness(rank_load)
    return [float(v) for v in values[~np.isnan(values)].reshape(-1)]


def quota_load(layout: eplb.ExpertLayout, tables: eplb.DispatchTables, window: Array) -> npt.NDArray[np.float64]:
    """Tokens by rank `[L, R]` when every batch is the window, solved as the device does."""
    ranks, experts = layout.topology.num_ranks, layout.num_experts
    result = np.zeros((layout.num_layers, ranks))
    batch = torch.zeros((ranks, experts), dtype=torch.int32)
    for layer in range(layout.num_layers):
        t = tables.layer(layer)
        batch[0] = torch.from_numpy(window[layer])
        quota.solve(batch, t.bounds, t.runs, t.shared, t.arm_rank, t.on_rank, 0, fewest=False)
        bounds, first = t.bounds.numpy(), t.runs.numpy() & (MOST_SLOTS - 1)
        for expert in range(experts):
            slots = layout.slots(layer, expert)
            starts = [0] if len(slots) == 1 else bounds[first[expert] : first[expert] + len(slots)].tolist()
            for slot, begin, end in zip(slots, starts, [*starts[1:], int(window[layer, expert])], strict=True):
                result[layer, slot // layout.slots_per_rank] += end - begin
    return result


if __name__ == "__main__":
    raise SystemExit(main())
