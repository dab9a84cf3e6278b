"""Fewer nodes per token: what do `place(pairs=)` and dispatch mode "near" save, and what do they cost?

    python -m benchmarks.affinity --tokens FILE.npz KEY SLOTS --json affinity.json

Every second token is counted, the others are judged: each is dispatched from a rank by chance (seed 1). "sends" are the
nodes besides its rank's own that a token reaches, "balance" is mean / max of the ranks' tokens; means over six layers.
Mode near has the orders of nodes that `near_orders` finds on the counted tokens; "all orders": each as often.
Without files tokens are made: 256 experts in 16 groups, of which a token takes most of its experts from one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import eplb_core as eplb
from benchmarks import measure

Ids = npt.NDArray[np.int64]
RANKS, LAYERS = 16, 6


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.parser("affinity", __doc__, quick="one layer, few tokens, 4 nodes")
    parser.add_argument("--tokens", nargs=3, action="append", default=[], metavar=("FILE", "KEY", "SLOTS"))
    parser.add_argument("--domains", nargs=4, action="append", default=[], metavar=("LIVE", "OTHER", "KEY", "SLOTS"))
    options = parser.parse_args(argv)
    measure.one_thread()
    cases = [(Path(file).stem, read(file, key), int(slots)) for file, key, slots in options.tokens]
    cases.append(("256 made experts", made_tokens(600 if options.quick else 8192, 1 if options.quick else 2), 288))
    rows = []
    for name, ids, slots in cases:
        for nodes in (4,) if options.quick else (4, 8):
            rows += compare(name, ids, slots, nodes, effort=0.01 if options.quick else 1.0)
    shown = [[row["tokens"], str(row["nodes"]), row["layout"], *(f"{row[k]:.4g}" for k in FIGURES)] for row in rows]
    print(measure.table(["tokens", "nodes", "layout", *FIGURES], shown))
    best = min(rows, key=lambda row: row["saved"])
    summary = [f"affinity: up to {-100 * best['saved']:.0f}% fewer sends per token than `place` alone, both near"]
    domains = []
    for live, other, key, slots in options.domains:
        for nodes in (4, 8):
            domains.append(other_domain(read(live, key), read(other, key), int(slots), nodes))
            print(f"{Path(live).stem} with pairs of {Path(other).stem}, {nodes} nodes: {domains[-1]}")
    measure.write_json(options.json, {"summary": summary, "rows": rows, "domains": domains})
    return 0


FIGURES = ("sends near", "balance near", "sends weighted", "balance weighted", "saved", "s per layer", "transfers")


def read(file: str, key: str) -> Ids:
    """Layers spread evenly over those of the file, `[tokens, L, K]`."""
    with np.load(file, allow_pickle=False) as arrays:
        ids = np.asarray(arrays[key], dtype=np.int64)
    chosen: Ids = ids[:, np.linspace(0, ids.shape[1] - 1, LAYERS).round().astype(int)]
    return chosen


def made_tokens(tokens: int, layers: int) -> Ids:
    """Top-8 ids of 256 experts."""
    rng = np.random.default_rng(0)
    own = rng.integers(0, 16, (tokens, layers, 1))
    weight = 0.3 / 256 + 0.7 / 16 * (np.arange(256) % 16 == own)
    ids: Ids = np.argsort(-(np.log(weight) + rng.gumbel(size=weight.shape)), axis=2, kind="stable")[:, :, :8]
    return ids


def compare(name: str, ids: Ids, slots: int, nodes: int, *, effort: float) -> list[dict[str, Any]]:
    """Layouts without pairs, with them, with those of 2,048 tokens, and after a step from the first."""
    counted, judged = ids[::2], ids[1::2]
    experts = int(ids.max()) + 1
    load = np.stack([np.bincount(layer.ravel(), minlength=experts) for layer in counted.transpose(1, 0, 2)])
    topology = eplb.Topology(RANKS, nodes)
    pairs, few = eplb.pair_counts(counted, experts), eplb.pair_counts(counted[:2048], experts)
    live = eplb.place(load, topology, num_slots=slots).layout
    ways: dict[str, dict[str, Any]] = {
        "place": {},
        "pairs": {"pairs": pairs, "effort": effort},
        "pairs of 2,048 tokens": {"pairs": few, "effort": effort},
        "24 transfers": {"pairs": pairs, "current": live, "max_transfers": 24, "effort": effort},
        "48 transfers": {"pairs": pairs, "current": live, "max_transfers": 48, "effort": effort},
    }
    rows: list[dict[str, Any]] = []
    for way, arguments in ways.items():
        eplb.place(load, topology, num_slots=slots, **{**arguments, "effort": 0.01})  # kernels are loaded
        start = time.process_time()
        placement = eplb.place(load, topology, num_slots=slots, **arguments)
        seconds = (time.process_time() - start) / ids.shape[1]
        row: dict[str, Any] = {"tokens": name, "nodes": nodes, "layout": way}
        orders = eplb.near_orders(placement.layout, counted, load)
        row["sends near"], row["balance near"] = dispatched(placement.layout, judged, "near", orders)
        row["balance near, all orders"] = dispatched(placement.layout, judged, "near")[1]
        for mode in ("weighted", "even"):
            row[f"sends {mode}"], row[f"balance {mode}"] = dispatched(placement.layout, judged, mode)
        row["saved"] = row["sends near"] / (rows[0] if rows else row)["sends near"] - 1
        row["s per layer"], row["transfers"] = seconds, float(placement.transfers.mean())
        rows.append(row)
    return rows


def other_domain(live: Ids, other: Ids, slots: int, nodes: int) -> dict[str, float]:
    """What remains of the fewer sends of `live` tokens with pairs of another domain, and with those of both."""
    counted, experts = live[::2], int(max(live.max(), other.max())) + 1
    load = np.stack([np.bincount(layer.ravel(), minlength=experts) for layer in counted.transpose(1, 0, 2)])
    own, far = eplb.pair_counts(counted, experts), eplb.pair_counts(other[::2], experts)
    sends = {
        way: float(eplb.count_sends(layout.layout, live[1::2]).sends.mean())
        for way, layout in (
            (way, eplb.place(load, eplb.Topology(RANKS, nodes), num_slots=slots, pairs=pairs))
            for way, pairs in (("none", None), ("own", own), ("other", far), ("both", own + far))
        )
    }
    gain = sends["none"] - sends["own"]
    return {**sends, **{f"kept by {way}": (sends["none"] - sends[way]) / gain for way in ("other", "both")}}


def dispatched(layout: eplb.ExpertLayout, ids: Ids, mode: Any, orders: Ids | None = None) -> tuple[float, float]:
    """Sends per token and balancedness, means over layers."""
    source = np.random.default_rng(1).integers(0, RANKS, len(ids))
    load, sends = np.zeros((layout.num_layers, RANKS)), 0
    node = layout.topology.rank_to_node
    for rank in range(RANKS):
        tables = eplb.DispatchTables(layout, rank=rank, mode=mode, orders=orders)
        for layer in range(layout.num_layers):
            slots = tables.map(layer, torch.from_numpy(np.ascontiguousarray(ids[source == rank, layer]))).numpy()
            to = slots // layout.slots_per_rank
            load[layer] += np.bincount(to.ravel(), minlength=RANKS)
            reached = (node[to][:, :, None] == np.arange(layout.topology.num_nodes)).any(axis=1)
            sends += int(reached.sum()) - int(reached[:, node[rank]].sum())
    return sends / (len(ids) * layout.num_layers), float((load.mean(axis=1) / load.max(axis=1)).mean())


if __name__ == "__main__":
    raise SystemExit(main())
