"""Moves over the links between GPUs of one host: one process a GPU, decoding by NCCL while experts move.

    COMMIT=$(git rev-parse HEAD) python -m benchmarks.multi_gpu --json multi_gpu.json
    COMMIT=$(git rev-parse HEAD) python -m benchmarks.multi_gpu --transport nccl --json multi_gpu_nccl.json

58 layers x 16 slots x 44 MB a GPU (41 GB). Migrations by CUDA IPC alone, with the copies that prefer to leave the cores
alone and with others, beside a plain copy between two GPUs; then while each rank replays the graph of its layers and
the ranks sum their results by NCCL: worst and median pass against the same with no migration, tokens compared with
those of ranks that never move experts. With `--transport nccl` the bytes go by `TorchDistributed`, two-sided, instead.
The ranks are those of `benchmarks.moving_gpu`; without GPUs the same steps run small in host memory, to show that they
do: by shared memory, or by groups of gloo in place of NCCL's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import measure
from benchmarks.moving_gpu import ROOT, SMALL, tables_of, wait_for
from benchmarks.moving_gpu_ranks import Rank
from eplb_core.loading.transports import TorchDistributed

FULL = {"layers": 58, "per_rank": 16, "experts": 24, "hidden": 7168, "inner": 1024, "tokens": 64}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.multi_gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few small layers")
    parser.add_argument("--transport", choices=["ipc", "nccl"], default="ipc")
    parser.add_argument("--passes", type=int, default=0)
    parser.add_argument("--migrations", type=int, default=0)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for the ranks")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", help="one process, by its options")
    options = parser.parse_args(argv)
    if options.rank:
        run_rank(json.loads(options.rank))
    gpus = torch.cuda.device_count()
    on_gpus = gpus > 1
    sizes: dict[str, Any] = {**(FULL if on_gpus and not options.quick else SMALL), "ranks": gpus if on_gpus else 2}
    sizes["transport"] = options.transport
    sizes["experts"] = sizes["ranks"] * sizes["per_rank"] * 3 // 4
    sizes["passes"] = options.passes or (200 if on_gpus else 24)
    sizes["migrations"] = options.migrations or (3 if on_gpus else 1)
    record: dict[str, Any] = {"device": f"{gpus} x {torch.cuda.get_device_name()}" if on_gpus else "the CPU"}
    record["sizes"] = sizes
    if on_gpus:
        record["plain_copy_gb_s"] = plain_copy()
        print(f"plain copy from GPU 0 to GPU 1: {record['plain_copy_gb_s']:.0f} GB/s", flush=True)
    record["ranks"] = run_ranks(sizes, on_gpus, options.limit)
    record["summary"] = summary(record)
    print(tables_of(record))
    print("\n".join(record["summary"]))
    measure.write_json(options.json, record)
    return int("codes_error" in record["ranks"])


def plain_copy() -> float:
    """GB/s of one large copy between two GPUs, the best of ten."""
    source = torch.ones(1 << 30, dtype=torch.uint8, device="cuda:0")
    target = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda:1")
    best = 0.0
    for _ in range(10):
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        best = max(best, source.numel() / (time.perf_counter() - start) / 1e9)
    return best


def run_ranks(sizes: dict[str, Any], on_gpus: bool, limit: float) -> dict[str, Any]:
    """A process a GPU."""
    with tempfile.TemporaryDirectory(prefix="eplb-") as folder:
        processes = []
        for rank in range(sizes["ranks"]):
            device = f"cuda:{rank}" if on_gpus else "cpu"
            options = {**sizes, "rank": rank, "folder": folder, "parts": ["ipc", "decode"], "device": device}
            command = [sys.executable, "-m", "benchmarks.multi_gpu", "--rank", json.dumps(options)]
            # Torch would end a process whose peer is gone.
            environment = {**os.environ, "NCCL_NVLS_ENABLE": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
            processes.append(subprocess.Popen(command, cwd=ROOT, text=True, env=environment))
        end = time.monotonic() + limit
        codes = [wait_for(process, end - time.monotonic()) for process in processes]
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        paths = [Path(folder, f"rank{rank}.json") for rank in range(sizes["ranks"])]
        found = [json.loads(path.read_text()) if path.exists() else {} for path in paths]
    failures = {} if codes == [0] * len(codes) else {"codes_error": str(codes)}
    return {"by_rank": found, **failures}


class GpuRank(Rank):
    """A rank with a GPU of its own: results are summed on the devices."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
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


def run_rank(options: dict[str, Any]) -> None:
    rank = GpuRank(options)
    rank.run_parts()
    rank.say("end")
    os._exit(0 if not any(name.endswith("_error") for name in rank.results) else 1)


def summary(record: dict[str, Any]) -> list[str]:
    lines = [f"{record['device']}: plain copy between GPUs {record.get('plain_copy_gb_s', 0.0):.0f} GB/s"]
    for rank in record["ranks"]["by_rank"][:1]:
        for name, entries in rank.get("ipc", {}).items():
            speed = max(entry["reading_gb_s"] for entry in entries)
            lines.append(f"  migrations by {name}: reading {speed:.0f} GB/s, {entries[-1]['check']}")
        decode = rank.get("decode", {})
        for name, entry in decode.items():
            each = entry.get("moving", entry["all"])
            lines.append(
                f"  {name}: p50 {each['p50']:.2f}, p99 {each['p99']:.2f}, worst {each['worst']:.2f} ms a pass, "
                f"tokens equal: {entry['tokens_equal']}"
            )
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
