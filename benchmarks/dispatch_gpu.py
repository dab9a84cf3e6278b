"""What does dispatch cost on a GPU? Map and count in one kernel, quotas, installs; against chains of torch operators.

    python benchmarks/dispatch_gpu.py --json results.json          # on a CUDA device, with its tests first
    python benchmarks/dispatch_gpu.py --quick                      # small, on the CPU by the torch path: no figures

Times are medians over replays of a CUDA graph that holds one call for each of many inputs and layers, divided by their
number: launches follow each other as in a model, and no input is used twice in a row.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

import eplb_core as eplb  # noqa: E402
from benchmarks import measure as measure_tools  # noqa: E402
from eplb_core.dispatch.constants import MODES, SOLVED_MODES  # noqa: E402

SEED = 0
EXPERTS, SLOTS, RANKS, TOPK = 256, 288, 32, 8
TOKENS = (64, 512, 4096, 16384)
LAYERS, INPUTS = 16, 16


def hot_layout(layers: int, experts: int, slots: int, ranks: int) -> tuple[eplb.ExpertLayout, Any]:
    """Redundant slots for the hottest experts of a skewed load, dealt over the ranks."""
    rng = np.random.default_rng(SEED)
    load = rng.lognormal(0, 1.0, (layers, experts))
    rows = []
    for layer in range(layers):
        count = np.ones(experts, dtype=np.int64)
        for _ in range(slots - experts):
            count[np.argmax(load[layer] / count)] += 1
        expert = np.repeat(np.arange(experts), count)
        order = np.argsort(-(load[layer] / count)[expert], kind="stable")
        row = np.empty(slots, dtype=np.int64)
        per_rank = slots // ranks
        for i, item in enumerate(order):  # back and forth over the ranks
            turn, place = divmod(i, ranks)
            rank = place if turn % 2 == 0 else ranks - 1 - place
            row[rank * per_rank + turn] = expert[item]
        rows.append(row)
    return eplb.ExpertLayout(np.stack(rows), experts, topology=eplb.Topology(ranks, 4)), load


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
    kept = sorted(times[3:])
    return kept[len(kept) // 2], kept[0]


def host_us(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median and minimum host time of a call, in microseconds."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    times.sort()
    return times[len(times) // 2], times[0]


def torch_chain(l2p: torch.Tensor, valid: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Random replicas by torch operators, as engines write it."""
    pick = torch.randint(0, 65536, ids.shape, dtype=torch.int32, device=ids.device) % valid[ids]
    return l2p[ids, pick]


def torch_count(counts: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Tokens per expert by torch operators."""
    flat = ids.flatten().long()
    return counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))


def check(device: str, tokens: int) -> dict[str, Any]:
    """Slots of all modes hold their experts and counts are right; the device agrees with the host."""
    layout, load = hot_layout(2, EXPERTS, SLOTS, RANKS)
    ids = draw_ids(load, tokens, TOPK, 1, device)[0]
    agree: dict[str, Any] = {}
    for mode in MODES:
        counter = eplb.LoadCounter(2, EXPERTS, windows=1, device=device)
        tables = eplb.DispatchTables(layout, rank=3, mode=mode, device=device, load=counter)
        slots = tables.map(1, ids).cpu()
        held = torch.tensor(layout.physical_to_logical_map[1])[slots.long()]
        if mode != "fake" and not torch.equal(held, ids.cpu().long()):
            raise SystemExit(f"{mode}: a slot does not hold its expert")
        if mode != "fake" and not torch.equal(
            counter.count[1, 0].cpu(), torch.bincount(ids.cpu().flatten(), minlength=EXPERTS).int()
        ):
            raise SystemExit(f"{mode}: counts are wrong")
        host = eplb.DispatchTables(layout, rank=3, mode=mode)
        agree[mode] = bool(torch.equal(host.map(1, ids.cpu()), slots))
        if not agree[mode]:
            raise SystemExit(f"{mode}: device and host disagree")
    return agree


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


def measure(tokens_of: tuple[int, ...], replays: int) -> dict[str, Any]:
    """All figures in microseconds, {name: {tokens: [median, minimum]}}."""
    layout, load = hot_layout(LAYERS, EXPERTS, SLOTS, RANKS)
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
            begin = time.perf_counter()
            result.setdefault(name, {})[tokens] = per_call_us(each, replays)
            print(
                f"{tokens:6} {name}: {result[name][tokens][0]:.2f} us ({time.perf_counter() - begin:.1f} s)", flush=True
            )
    result["host"] = host_figures(layout, shares, tables)
    result["quality"] = quota_quality(layout, load)
    return result


def host_figures(layout: eplb.ExpertLayout, shares: Any, tables: dict[str, eplb.DispatchTables]) -> dict[str, Any]:
    """Host time of an eager call and of installing a layer, in microseconds."""
    ids = torch.zeros((512, TOPK), dtype=torch.int32, device="cuda")
    out = torch.empty_like(ids)
    result: dict[str, Any] = {}
    for name, table in tables.items():
        t = table.layer(0)
        result[f"{name}: eager call"] = host_us(lambda t=t: eplb.topk_to_slots(ids, t, out=out), 200)  # type: ignore[misc]
        torch.cuda.synchronize()
        given = shares if table.mode == "weighted" else None
        turn = iter(range(10**9))

        def install(table: eplb.DispatchTables = table, given: Any = given, turn: Any = turn) -> None:
            table.install(layout, layers=[next(turn) % LAYERS], shares=given)

        result[f"{name}: install a layer"] = host_us(install, 200)
        torch.cuda.synchronize()
    return result


def quota_quality(layout: eplb.ExpertLayout, load: Any) -> dict[str, float]:
    """How far above the optimum the busiest rank is when all ranks have the same skewed batch, mean and worst layer."""
    over = []
    tables = eplb.DispatchTables(layout, rank=0, mode="quota", device="cuda")
    generator = np.random.default_rng(SEED)
    for layer in range(layout.num_layers):
        total = generator.poisson(load[layer] * generator.lognormal(0, 0.5, EXPERTS) * 4000)
        ids = torch.tensor(np.repeat(np.arange(EXPERTS), total), dtype=torch.int32, device="cuda")[:, None]
        slots = tables.map(layer, ids).flatten().cpu()
        by_rank = torch.bincount(slots, minlength=SLOTS).view(RANKS, -1).sum(1).max()
        row = eplb.ExpertLayout(layout.physical_to_logical_map[layer : layer + 1], EXPERTS, topology=layout.topology)
        best = eplb.rank_load(row, total[None], shares=eplb.replica_shares(row, total[None])).max()
        over.append(float(by_rank) / float(best) - 1)
    return {"mean over optimum": float(np.mean(over)), "worst over optimum": float(np.max(over))}


def compilations() -> dict[str, int]:
    """How often one region for all layers is compiled, and how often more for a second number of rows."""
    layout, load = hot_layout(12, EXPERTS, SLOTS, RANKS)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tables = eplb.DispatchTables(layout, mode="weighted", device=device)
    number = [0]

    def backend(graph: Any, inputs: Any) -> Any:
        number[0] += 1
        return graph

    torch._dynamo.reset()
    region = torch.compile(eplb.topk_to_slots, backend=backend, fullgraph=True)
    result = {}
    for rows in (64, 128, 256):
        ids = draw_ids(load, rows, TOPK, 1, device)[0]
        for layer in range(12):
            region(ids, tables.layer(layer))
        result[f"graphs compiled after 12 layers with {rows} rows"] = number[0]
    return result


def run_tests() -> str:
    """The tests that need a CUDA device, and the kernels' comparison with the torch path; the last line of pytest."""
    files = ["tests/dispatch/test_cuda.py", "tests/dispatch/test_triton.py"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "-W",
        "default",
        "-x",
        "--maxfail=20",
        *files,
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(run.stdout[-6000:])
    return f"exit {run.returncode}: {(run.stdout.strip().splitlines() or ['no output'])[-1]}"


def environment() -> dict[str, Any]:
    """Hardware, versions and commit."""
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        version = "none"
    found = measure_tools.environment()
    found["versions"] |= {"triton": version, "cuda": str(torch.version.cuda)}
    found["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    shape = {"experts": EXPERTS, "slots": SLOTS, "ranks": RANKS, "topk": TOPK, "layers": LAYERS, "inputs": INPUTS}
    return {**found, "shape": shape}


def summary(report: dict[str, Any]) -> list[str]:
    """What it found, in a few lines."""
    if "microseconds" not in report:
        return ["no CUDA device: the operator's modes agree with each other, nothing is timed"]
    figures = report["microseconds"]
    lines = []
    for name in ("weighted: map + count", "random: map + count", "quota: counts to quotas", "torch: random replicas"):
        each = ", ".join(f"{median:.2f} at {tokens}" for tokens, (median, _) in figures[name].items())
        lines.append(f"{report['environment']['gpu']}, {name}: {each} tokens x {TOPK} (us, median in a graph)")
    return lines


def print_table(result: dict[str, Any]) -> None:
    tokens = sorted({t for row in result.values() if isinstance(row, dict) for t in row if isinstance(t, int)})
    print(f"{'microseconds, median in a graph':44}" + "".join(f"{t:>9}" for t in tokens))
    for name, row in result.items():
        if name not in ("host", "quality"):
            print(f"{name:44}" + "".join(f"{row[t][0]:9.2f}" if t in row else " " * 9 for t in tokens))
    for name, (median, minimum) in result["host"].items():
        print(f"{name:44}{median:9.1f} median{minimum:9.1f} minimum, host")
    for name, value in result["quality"].items():
        print(f"quota: {name:37}{value:9.5f}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small inputs, correctness only where there is no GPU")
    parser.add_argument("--json", type=Path, help="write figures, hardware, versions and commit there")
    parser.add_argument("--no-tests", action="store_true", help="skip the test run")
    args = parser.parse_args(argv)
    cuda = torch.cuda.is_available()
    report: dict[str, Any] = {"environment": environment()}
    if cuda and not args.no_tests:
        report["tests"] = run_tests()
    report["agree"] = check("cuda" if cuda else "cpu", 64 if args.quick else 1024)
    report["compilations"] = compilations()
    if cuda:
        report["microseconds"] = measure(TOKENS[:2] if args.quick else TOKENS, 5 if args.quick else 50)
        print_table(report["microseconds"])
    for name, value in {**report["compilations"], **report["environment"]}.items():
        print(f"{name}: {value}")
    print("tests:", report.get("tests", "not run"))
    report["summary"] = summary(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if "exit 0" in report.get("tests", "exit 0") else 1


if __name__ == "__main__":
    sys.exit(main())
