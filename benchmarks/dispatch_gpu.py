"""What does dispatch cost on a GPU? Map and count in one kernel, quotas, installs; against chains of torch operators.

    python -m benchmarks.dispatch_gpu --json dispatch_gpu.json     # without a CUDA device: no figures

Times are medians over replays of a CUDA graph that holds one call for each of many inputs and layers, divided by their
number: launches follow each other as in a model, and no input is used twice in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

import eplb_core as eplb
from benchmarks import measure
from eplb_core.dispatch.constants import MODES, SOLVED_MODES

SEED = 0
EXPERTS, SLOTS, RANKS, TOPK = 256, 288, 32, 8
TOKENS = (64, 512, 4096, 16384)
LAYERS, INPUTS = 16, 16


def hot_layout(layers: int, nodes: int = 4) -> tuple[eplb.ExpertLayout, Any]:
    """A layout for a skewed load, and that load."""
    load = np.random.default_rng(SEED).lognormal(0, 1.0, (layers, EXPERTS))
    return eplb.place(load, eplb.Topology(RANKS, nodes), num_slots=SLOTS).layout, load


def draw_ids(load: Any, tokens: int, topk: int, count: int, device: str) -> list[torch.Tensor]:
    """Batches of distinct experts a token, as hot as the load says."""
    generator = torch.Generator().manual_seed(SEED)
    taste = torch.tensor(np.log(load), dtype=torch.float32).to(device)
    batches = []
    for i in range(count):
        noise = torch.rand((tokens, load.shape[1]), generator=generator).to(device)
        score = taste[i % len(taste)] - torch.log(-torch.log(noise.clamp(1e-9, 1 - 1e-7)))
        batches.append(score.topk(topk, dim=1).indices.to(torch.int32))
    return batches


def per_call_us(calls: list[Callable[[], object]], replays: int) -> tuple[float, float]:
    """Median and minimum time of one call inside a graph of all of them, in microseconds."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(calls))
    return float(np.median(times[3:])), min(times[3:])


def torch_chain(l2p: torch.Tensor, valid: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Random replicas by torch operators, as engines write it."""
    pick = torch.randint(0, 65536, ids.shape, dtype=torch.int32, device=ids.device) % valid[ids]
    return l2p[ids, pick]


def torch_count(counts: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Tokens per expert by torch operators."""
    flat = ids.flatten().long()
    return counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))


def check(device: str, tokens: int) -> None:
    """Slots of all modes hold their experts and counts are right; the device agrees with the host."""
    near, load = hot_layout(2)
    further, _ = hot_layout(2, 8)
    ids = draw_ids(load, tokens, TOPK, 1, device)[0]
    for mode, layout in (*((each, near) for each in MODES), ("near", further)):
        counter = eplb.LoadCounter(2, EXPERTS, windows=1, device=device)
        tables = eplb.DispatchTables(layout, rank=3, mode=mode, device=device, load=counter)
        slots = tables.map(1, ids).cpu()
        held = torch.tensor(layout.physical_to_logical_map[1])[slots.long()]
        if mode != "fake" and not torch.equal(held, ids.cpu().long()):
            raise SystemExit(f"{mode}: a slot does not hold its expert")
        if mode != "fake" and not torch.equal(
            counter.count[1, 0].cpu(), torch.bincount(ids.cpu().flatten(), minlength=EXPERTS)
        ):
            raise SystemExit(f"{mode}: counts are wrong")
        host = eplb.DispatchTables(layout, rank=3, mode=mode)
        if not torch.equal(host.map(1, ids.cpu()), slots):
            raise SystemExit(f"{mode}: device and host disagree")


def make_tables(layout: eplb.ExpertLayout, shares: Any) -> dict[str, eplb.DispatchTables]:
    """Tables of every mode, and of the wide ones also with room for 8 replicas only."""
    counter = eplb.LoadCounter(LAYERS, EXPERTS, windows=8, device="cuda")
    tables = {}
    for mode in MODES:
        for width in (None, 8) if mode in ("weighted", *SOLVED_MODES) else (None,):
            if width is None or int(layout.replica_count.max()) <= width:
                tables[mode if width is None else f"{mode}, max_replicas={width}"] = eplb.DispatchTables(
                    layout, rank=3, mode=mode, device="cuda", load=counter, max_replicas=width,
                    shares=shares if mode == "weighted" else None,
                )  # fmt: skip
    further, _ = hot_layout(LAYERS, 8)
    tables["near, 8 nodes"] = eplb.DispatchTables(further, rank=3, mode="near", device="cuda", load=counter)
    paired = eplb.LoadCounter(LAYERS, EXPERTS, device="cuda", pairs=True)
    for mode in ("weighted", "near"):
        tables[f"{mode}, pairs"] = eplb.DispatchTables(layout, rank=3, mode=mode, device="cuda", load=paired)
        # The same windows and shares without pairs, so that only these differ.
        plain = eplb.LoadCounter(LAYERS, EXPERTS, device="cuda")
        tables[f"{mode}, no pairs"] = eplb.DispatchTables(layout, rank=3, mode=mode, device="cuda", load=plain)
    return tables


def calls_of(
    table: eplb.DispatchTables, name: str, load: Any, ids: list[torch.Tensor], outs: list[torch.Tensor]
) -> dict[str, list[Callable[[], object]]]:
    """Calls of one kind of tables, by what they do; each over many layers and inputs."""
    rows = [table.layer(layer) for layer in range(LAYERS)]
    pairs = [(i % LAYERS, i % INPUTS) for i in range(INPUTS * 4)]
    calls: dict[str, list[Callable[[], object]]] = {
        f"{name}: map + count": [partial(eplb.topk_to_slots, ids[b], rows[a], out=outs[b]) for a, b in pairs]
    }
    if table.mode not in SOLVED_MODES:
        return calls
    ops = torch.ops.eplb_core
    mean = torch.tensor(load[0] * len(ids[0]) * TOPK / load[0].sum())
    full = torch.poisson(mean.expand(RANKS, -1)).int().cuda()

    def count(t: eplb.LayerTables, x: torch.Tensor) -> None:
        ops.count_batch(x, t.batch, t.blocks, t.count, t.state, t.errors, None, 0, t.rank, False)

    def solve(t: eplb.LayerTables, x: torch.Tensor) -> None:
        t.batch.copy_(full)  # as the sum over ranks leaves it; the copy's time is in the figure
        ops.solve_batch(
            t.batch, t.bounds, t.blocks, t.runs, t.span, t.shared, t.arm_rank, t.on_rank, x, 0, t.rank, t.mode
        )

    def choose(t: eplb.LayerTables, x: torch.Tensor, out: torch.Tensor) -> None:
        ops.map_solved(x, out, t.table, t.bounds, t.blocks, None, 0, t.num_experts, t.num_entries, False)

    calls[f"{name}: count only"] = [partial(count, rows[a], ids[b]) for a, b in pairs]
    calls[f"{name}: counts to quotas"] = [partial(solve, rows[a], ids[b]) for a, b in pairs]
    calls[f"{name}: map only"] = [partial(choose, rows[a], ids[b], outs[b]) for a, b in pairs]
    return calls


def baselines(
    layout: eplb.ExpertLayout, ids: list[torch.Tensor], outs: list[torch.Tensor]
) -> dict[str, list[Callable[[], object]]]:
    """What engines run today, in torch operators, and the cost of launching anything."""
    l2p = torch.tensor(layout.logical_to_physical_map).clamp(min=0).int().cuda()
    home, valid = l2p[:, :, 0].contiguous(), torch.tensor(layout.replica_count).int().cuda()
    counts = torch.zeros(EXPERTS, dtype=torch.int32, device="cuda")
    pairs = [(i % LAYERS, i % INPUTS) for i in range(INPUTS * 4)]
    return {
        "torch: random replicas": [partial(torch_chain, l2p[a], valid[a], ids[b]) for a, b in pairs],
        "torch: count": [partial(torch_count, counts, ids[b]) for _, b in pairs],
        "torch: plain gather": [partial(home[a].__getitem__, ids[b]) for a, b in pairs],
        "torch: copy": [partial(outs[b].copy_, ids[b]) for _, b in pairs],
        "torch: zero 4 bytes (a launch)": [counts[:1].zero_ for _ in pairs],
    }


def figures(tokens_of: tuple[int, ...], replays: int) -> dict[str, Any]:
    """All figures in microseconds, {name: {tokens: [median, minimum]}}."""
    layout, load = hot_layout(LAYERS)
    shares = eplb.replica_shares(layout, np.round(load * 1000))
    tables = make_tables(layout, shares)
    result: dict[str, Any] = {}
    for tokens in tokens_of:
        ids = draw_ids(load, tokens, TOPK, INPUTS, "cuda")
        outs = [torch.empty_like(x) for x in ids]
        calls = baselines(layout, ids, outs)
        for name, table in tables.items():
            calls |= calls_of(table, name, load, ids, outs)
        for name, each in calls.items():
            result.setdefault(name, {})[tokens] = per_call_us(each, replays)
    return result


def summary(device: str, figures: dict[str, Any]) -> list[str]:
    """What it found, in a few lines."""
    lines = []
    names = ("weighted: map + count", "random: map + count", "near: map + count", "near, 8 nodes: map + count")
    for name in (*names, "quota: counts to quotas", "torch: random replicas"):
        each = ", ".join(f"{median:.2f} at {tokens}" for tokens, (median, _) in figures[name].items())
        lines.append(f"{device}, {name}: {each} tokens x {TOPK} (us, median in a graph)")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    options = measure.parser("dispatch_gpu", __doc__, quick="small inputs").parse_args(argv)
    cuda = torch.cuda.is_available()
    check("cuda" if cuda else "cpu", 64 if options.quick else 1024)
    record: dict[str, Any] = {"device": torch.cuda.get_device_name() if cuda else "the CPU"}
    record["shape"] = {"experts": EXPERTS, "slots": SLOTS, "ranks": RANKS, "topk": TOPK, "layers": LAYERS}
    record["summary"] = ["no CUDA device: the operator's modes agree with each other, nothing is timed"]
    if cuda:
        us = record["microseconds"] = figures(TOKENS[:2] if options.quick else TOKENS, 5 if options.quick else 50)
        tokens = list(us["torch: copy"])
        rows = [[name, *(f"{row[number][0]:.2f}" for number in tokens)] for name, row in us.items()]
        print(measure.table(["us, median in a graph", *map(str, tokens)], rows))
        record["summary"] = summary(record["device"], us)
    print("\n".join(record["summary"]))
    measure.write_json(options.json, record)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
