"""Moves over the links between GPUs of one host: one process a GPU, decoding by NCCL while experts move.

    COMMIT=$(git rev-parse HEAD) python -m benchmarks.multi_gpu --json multi_gpu.json
    COMMIT=$(git rev-parse HEAD) python -m benchmarks.multi_gpu --transport nccl --json multi_gpu_nccl.json

58 layers x 16 slots x 44 MB a GPU (41 GB). Parts (`--parts`):
`ipc`     migrations alone, with the copies that prefer to leave the cores alone and with others, beside a plain copy
          between two GPUs in one direction and in both;
`decode`  the same while each rank replays the graph of its layers and the ranks sum their results by NCCL: worst and
          median pass against the same with no migration, tokens compared with those of ranks that never move experts;
`cores`   what the profiler saw the devices do in one migration: copies by engines, kernels and their blocks;
`grid`    1,000 migrations of four layers while each pass is a kernel that fills all cores of all GPUs and ends only
          when its blocks run on every rank, as fused dispatch and combine do: what else waits for a core with a peer's
          help would be a deadlock.
With `--transport nccl` the bytes go by `TorchDistributed`, two-sided, instead.
The ranks are those of `benchmarks.moving_gpu`; without GPUs the same steps run small in host memory, to show that they
do: by shared memory, or by groups of gloo in place of NCCL's.
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks import measure, ranks
from benchmarks.moving_gpu import SMALL, tables_of
from benchmarks.moving_gpu_ranks import Rank, percentiles
from eplb_core import ExpertLayout
from eplb_core.loading.moves.migrator import Migrator
from eplb_core.loading.transports import TorchDistributed

PARTS = ("ipc", "decode", "cores", "grid")
FULL = {"layers": 58, "per_rank": 16, "experts": 24, "hidden": 7168, "inner": 1024, "tokens": 64}


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.parser("multi_gpu", __doc__, quick="few small layers")
    parser.add_argument("--transport", choices=["ipc", "nccl"], default="ipc")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for the ranks")
    options = parser.parse_args(argv)
    gpus = torch.cuda.device_count()
    on_gpus = gpus > 1
    sizes: dict[str, Any] = {**(FULL if on_gpus and not options.quick else SMALL), "ranks": gpus if on_gpus else 2}
    sizes["transport"] = options.transport
    sizes["experts"] = sizes["ranks"] * sizes["per_rank"] * 3 // 4
    sizes["passes"] = 200 if on_gpus else 24
    sizes["migrations"] = 3 if on_gpus else 1
    sizes["grid_migrations"] = 1000 if on_gpus and not options.quick else 3
    sizes["parts"] = options.parts
    record: dict[str, Any] = {"device": f"{gpus} x {torch.cuda.get_device_name()}" if on_gpus else "the CPU"}
    record["sizes"] = sizes
    if on_gpus:
        record["plain_copy_gb_s"], record["plain_copy_both_ways_gb_s"] = plain_copy(False), plain_copy(True)
    record["ranks"] = run_ranks(sizes, on_gpus, options.limit)
    record["summary"] = summary(record)
    print(tables_of(record))
    print("\n".join(record["summary"]))
    measure.write_json(options.json, record)
    return int("codes_error" in record["ranks"])


def plain_copy(both_ways: bool) -> float:
    """GB/s that each GPU gets of a large copy from the other, the best of ten; the other gets one meanwhile, or not."""
    streams = [torch.cuda.Stream(device) for device in range(2)]  # type: ignore[no-untyped-call]
    rows = [[torch.ones(1 << 30, dtype=torch.uint8, device=device) for device in range(2)] for _ in range(2)]
    best = 0.0
    for _ in range(10):
        for device in range(2):
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for target in range(1 + both_ways):
            with torch.cuda.stream(streams[target]):
                rows[0][target].copy_(rows[1][1 - target], non_blocking=True)
        for device in range(2):
            torch.cuda.synchronize(device)
        best = max(best, rows[0][0].numel() / (time.perf_counter() - start) / 1e9)
    return best


def run_ranks(sizes: dict[str, Any], on_gpus: bool, limit: float) -> dict[str, Any]:
    """A process a GPU."""
    with tempfile.TemporaryDirectory(prefix="eplb-") as folder:
        words = Path("/dev/shm", f"{Path(folder).name}-words")  # a device cannot reach pages of other file systems
        words.write_bytes(bytes(mmap.PAGESIZE))
        options = {**sizes, "folder": folder, "words": str(words)}
        devices = [f"cuda:{rank}" if on_gpus else "cpu" for rank in range(sizes["ranks"])]
        peers = [ranks.Peer(be_rank, {**options, "rank": rank, "device": each}) for rank, each in enumerate(devices)]
        try:
            return ranks.by_rank(*ranks.collect(peers, limit))
        finally:
            words.unlink()


class GpuRank(Rank):
    """A rank with a GPU of its own: results are summed on the devices."""

    def __init__(self, pipe: Any, options: dict[str, Any]) -> None:
        super().__init__(pipe, options)
        self.nccl: Any = None
        if self.on_gpu:
            self.nccl = dist.new_group(backend="nccl", timeout=timedelta(seconds=120))
        if options["transport"] == "nccl":
            kind = "nccl" if self.on_gpu else "gloo"
            group, up, down = (dist.new_group(backend=backend) for backend in ("gloo", kind, kind))
            device = self.shape.device.index if self.on_gpu else None
            self.transports = {"nccl": TorchDistributed(group, device=device, payload=(up, down))}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """A pass of all ranks."""
        if self.nccl is None:
            return super().forward(ids)
        total: torch.Tensor = self.decoder.run(ids, lambda result: dist.all_reduce(result, group=self.nccl))
        return total

    def decode_otherwise(self, note: Callable[..., None]) -> None:
        """Only the asynchronous way is measured here."""

    # ---- cores -----------------------------------------------------------------------------------------------------

    def part_cores(self) -> None:
        """What ran on the device in one migration: installs are kernels of the passes' stream, reads should be none."""
        from torch.profiler import ProfilerActivity, profile

        found = self.results.setdefault("cores", {})
        for name, transport in self.transports.items():
            mig = self.migrator(transport)
            self.migrate(mig, self.next_layout(), lambda: None)
            kinds = [ProfilerActivity.CUDA] if self.on_gpu else [ProfilerActivity.CPU]
            with profile(activities=kinds) as profiler:
                self.migrate(mig, self.next_layout(), lambda: None)
            path = Path(self.options["folder"], f"trace{self.rank}.json")
            profiler.export_chrome_trace(str(path))
            found[name] = device_work(json.loads(path.read_text())["traceEvents"])
            mig.stop(30.0)
            self.say(f"{name}: {json.dumps(measure.rounded(found[name]))}")

    def part_grid(self) -> None:
        """Migrations while every pass needs all cores of all GPUs at once."""
        some = min(4, self.shape.layers)
        kernel: Any = None
        if self.on_gpu:
            from benchmarks.full_grid import Meeting

            kernel = Meeting(Path(self.options["words"]), self.rank, self.size)
        for name, transport in self.transports.items():
            mig, passes, times = self.migrator(transport), 0, []
            # NCCL's kernels wait for the passes' and these for them, seconds each time.
            count = 1 if name == "nccl" and self.on_gpu else self.options["grid_migrations"]

            def one_pass(mine: Any = kernel) -> None:
                nonlocal passes
                passes += 1
                if mine is not None:
                    mine.launch()
                    torch.cuda.current_stream().synchronize()

            start, before = time.perf_counter(), 0 if kernel is None else kernel.gave_up()
            checks, done = set(), 0
            for number in range(count):
                target = self.next_layout().physical_to_logical_map.copy()
                target[some:] = self.layout.physical_to_logical_map[some:]
                begun = time.perf_counter()
                self.migrate(mig, ExpertLayout(target, self.shape.experts, topology=self.layout.topology), one_pass)
                times.append(1e3 * (time.perf_counter() - begun))
                done += 1
                if number % 50 == 49 or number == count - 1:
                    checks.add(self.check())
            self.results.setdefault("grid", {})[name] = {
                "migrations": done,
                "layers": some,
                "passes": passes,
                "seconds": time.perf_counter() - start,
                "migration_ms": percentiles(np.array(times)),
                "checks": sorted(checks),
                "blocks": 0 if kernel is None else kernel.blocks,
                "blocks_that_gave_up": 0 if kernel is None else kernel.gave_up() - before,
                "stopped": mig.stop(60.0),
            }
            self.say(f"{name}: {json.dumps(measure.rounded(self.results['grid'][name]))}")

    def migrate(self, mig: Migrator, target: ExpertLayout, one_pass: Callable[[], None]) -> None:
        """From start to end, all ranks with as many passes."""
        mig.start(target)
        busy = torch.ones(1, dtype=torch.int32)
        while busy:
            mig.poll()
            one_pass()
            busy.fill_(not mig.idle)
            dist.all_reduce(busy, group=self.group)
        if self.on_gpu:
            torch.cuda.synchronize()
        self.layout = mig.layout
        if mig.status.cause:
            raise RuntimeError(f"{mig.status.cause}: {mig.status.reason}")


def device_work(events: list[dict[str, Any]]) -> dict[str, Any]:
    """By name: how many, their blocks at most, milliseconds and bytes."""
    out: dict[str, Any] = {}
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy"):
            continue
        name, more = event["name"].split("<")[0], event["args"]
        entry = out.setdefault(name, {"kind": event["cat"], "count": 0, "ms": 0.0, "bytes": 0, "blocks": 0})
        entry["count"] += 1
        entry["ms"] += event["dur"] / 1e3
        entry["bytes"] += int(more.get("bytes", 0))
        entry["blocks"] = max(entry["blocks"], int(np.prod(more.get("grid", [0]))))
    return out


def be_rank(pipe: Any, options: dict[str, Any]) -> None:
    """The process of a rank."""
    # Torch would end a process whose peer is gone.
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    GpuRank(pipe, options).run()


def summary(record: dict[str, Any]) -> list[str]:
    one, both = (record.get(f"plain_copy_{name}gb_s", 0.0) for name in ("", "both_ways_"))
    lines = [f"{record['device']}: plain copy between GPUs {one:.0f} GB/s, {both:.0f} each way in both at once"]
    for rank in record["ranks"]["by_rank"][:1]:
        for name, entries in rank.get("ipc", {}).items():
            speed = max(entry["reading_gb_s"] for entry in entries)
            lines.append(f"  migrations by {name}: reading {speed:.0f} GB/s, {entries[-1]['check']}")
        for name, entries in rank.get("cores", {}).items():
            lines += [f"  {name}: {what}: {work}" for what, work in measure.rounded(entries).items()]
        for name, entry in rank.get("grid", {}).items():
            lines.append(
                f"  {name}: {entry['migrations']:,} migrations beside kernels of {entry['blocks']} blocks, all at "
                f"once: {entry['blocks_that_gave_up']} blocks gave up, {entry['checks']}, "
                f"{entry['migration_ms']['p50']:.2f} ms in the median"
            )
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
