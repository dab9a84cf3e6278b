"""Moves on one GPU: installs, reads between four processes, decoding meanwhile, a weight host.

COMMIT=$(git rev-parse HEAD) python -m benchmarks.moving_gpu --json moving_gpu.json

Parts (`--parts`): `install` (staging to live slots against a plain copy), `ranks` (four processes as four ranks:
migrations alone, then while captured graphs decode), `host` (a weight host, restarts, a standby, SIGKILL). Each part
goes on where another failed; what was measured is written after each. On one GPU four processes share it by time slices
and their copies are local ones: what peer links and copy engines give, it cannot show. Without a GPU the same steps run
small in host memory, to show that they do.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks import measure, ranks
from benchmarks.moving_gpu_ranks import Shape, allocate, be_engine, be_host, be_rank, random_layout
from eplb_core import ExpertStore
from eplb_core._arrays import IntArray
from eplb_core.loading.install.installer import Copies, Installer
from eplb_core.loading.install.staging import Staging
from eplb_core.loading.moves.steps import Step, plan_steps

FULL = {"layers": 58, "per_rank": 4, "experts": 12, "hidden": 3584, "inner": 1024, "tokens": 64, "ranks": 4}
SMALL = {"layers": 4, "per_rank": 3, "experts": 8, "hidden": 64, "inner": 32, "tokens": 16, "ranks": 4}
PARTS = ("install", "ranks", "host")


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.parser("moving_gpu", __doc__, quick="few small layers, as always without a GPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for the ranks")
    options = parser.parse_args(argv)
    on_gpu = options.device == "cuda"
    quick = options.quick or not on_gpu  # 20 GB of weights are nothing for a processor
    sizes: dict[str, Any] = dict(SMALL if quick else FULL)
    sizes["device"] = options.device
    sizes["passes"] = 24 if quick else 300
    sizes["migrations"] = 1 if quick else 2
    record: dict[str, Any] = {"device": torch.cuda.get_device_name() if on_gpu else "the CPU", "sizes": sizes}
    calls: dict[str, Callable[[], Any]] = {
        "install": lambda: ranks.Peer(measure_installs, sizes).hear(options.limit),  # its memory is given back
        "ranks": lambda: run_ranks(sizes, options.limit),
        "host": lambda: run_host(sizes, options.limit),
    }
    failed = 0
    for part in options.parts:
        print(f"---- {part}", flush=True)
        try:
            record[part] = calls[part]()
        except Exception:
            record[f"{part}_error"] = traceback.format_exc()
            print(record[f"{part}_error"], flush=True)
        failed += f"{part}_error" in record or 'error": "' in json.dumps(record[part])
        measure.write_json(options.json, record)
    record["summary"] = summary_of(record)
    print(tables_of(record))
    print("\n".join(record["summary"]))
    measure.write_json(options.json, record)
    return int(failed > 0)


# ---- installs --------------------------------------------------------------------------------------------------------


def measure_installs(pipe: Any, sizes: dict[str, Any]) -> None:
    shape = Shape(sizes)
    on_gpu = shape.device.type == "cuda"
    weights = allocate(shape)
    stores = [ExpertStore(tensors) for tensors in weights]
    for tensors in weights:
        for tensor in tensors.values():
            random_bytes(tensor)
    staging = Staging(None, stores)
    random_bytes(staging.memory)
    rng = np.random.default_rng(0)
    old, new = (random_layout(shape, sizes["ranks"], rng) for _ in range(2))
    steps = list(plan_steps(old, new, rank=0, capacity=shape.per_rank))
    installer = Installer(stores, staging)
    record: dict[str, Any] = {
        "slot_bytes": stores[0].slot_bytes,
        "kernels": installer._device_copies is not None,
        "exact": [exact(installer, step, rng) for step in steps[:6]],
    }
    every = np.array([[shape.per_rank + slot, slot] for slot in range(shape.per_rank)])
    circle = np.array([[0, -1], *[[slot + 1, slot] for slot in range(shape.per_rank - 1)], [-1, shape.per_rank - 1]])
    moved = shape.per_rank * stores[0].slot_bytes
    record["from staging"] = by_kernel(installer, every, moved)
    record["circle in place"] = by_kernel(installer, circle, moved)
    # Targets are out of the cache, as the layers are.
    source, target = (torch.empty(size * moved, dtype=torch.uint8, device=shape.device) for size in (1, 8))
    random_bytes(source)

    def copy(number: int) -> None:
        target[number % 8 * moved :][:moved].copy_(source)

    record["plain copy"] = rate(copy, moved, on_gpu)
    pipe.send(record)


NOTHING = np.empty((0, 2), dtype=np.int64)


def by_kernel(installer: Installer, slots: IntArray, moved: int) -> dict[str, Any]:
    on_gpu = installer.stores[0].device.type == "cuda"
    prepared = [Copies(slots, NOTHING, installer._prepare(layer, slots, NOTHING)) for layer in range(2)]
    return {"kernel": rate(lambda number: installer.run(number % 2, prepared[number % 2]), moved, on_gpu)}


def random_bytes(tensor: torch.Tensor) -> None:
    flat = tensor.view(-1).view(torch.uint8)
    for start in range(0, flat.numel(), 1 << 26):
        part = flat[start : start + (1 << 26)]
        part.copy_(torch.randint(0, 256, (part.numel(),), dtype=torch.uint8, device=part.device))


def exact(installer: Installer, step: Step, rng: np.random.Generator) -> bool:
    """Against copies of everything that are made first."""
    store, slots = installer.stores[step.layer], installer.stores[0].num_slots
    row_of_slot = rng.permutation(slots)
    copies = installer.plan(step, row_of_slot)
    content = {}
    for place in range(2 * slots):
        rows = (
            [store.row(name, place) for name in store.names]
            if place < slots
            else installer.staging.row(place - slots, store)
        )
        content[place] = [row.clone() for row in rows]
    names: dict[int, int] = {place: place for place in content}
    for source, to in copies.slots.tolist():
        names[to] = names[source]
    installer.run(step.layer, copies)
    return all(
        torch.equal(store.row(name, slot), content[names[slot]][index])
        for slot in range(slots)
        for index, name in enumerate(store.names)
    )


def rate(call: Callable[[int], Any], nbytes: int, on_gpu: bool, times: int = 40) -> dict[str, float]:
    """GB/s of bytes copied, each read and written once; microseconds of the call on the host; medians."""
    for number in range(3):
        call(number)
    device, host = [], []
    for number in range(times):
        if on_gpu:
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            # The calls are all enqueued before the first runs.
            torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
            begin.record()
        start = time.perf_counter()
        call(number)
        host.append(time.perf_counter() - start)
        if on_gpu:
            end.record()
            end.synchronize()
            device.append(begin.elapsed_time(end) / 1e3)
        else:
            device.append(host[-1])
    median = statistics.median(device)
    return {"gb_s": nbytes / median / 1e9, "us": median * 1e6, "host_us": statistics.median(host) * 1e6}


# ---- four ranks ------------------------------------------------------------------------------------------------------


def run_ranks(sizes: dict[str, Any], limit: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="eplb-") as folder:
        options = {**sizes, "folder": folder, "parts": ["ipc", "decode"]}
        peers = [ranks.Peer(be_rank, {**options, "rank": rank}) for rank in range(sizes["ranks"])]
        return ranks.by_rank(*ranks.collect(peers, limit))


# ---- a weight host ---------------------------------------------------------------------------------------------------


def used_gb(on_gpu: bool) -> float:
    """Memory in use on the GPU, of all processes."""
    if not on_gpu:
        return 0.0
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]) / 1024


def run_host(sizes: dict[str, Any], limit: float) -> dict[str, Any]:
    """All scenes; what came before a failure is kept."""
    on_gpu = sizes["device"] == "cuda"
    record: dict[str, Any] = {"used_gib": {"before": used_gb(on_gpu)}}
    started: list[ranks.Peer] = []
    with tempfile.TemporaryDirectory(prefix="eplb-") as folder:
        slots = 16 if on_gpu else sizes["per_rank"]
        options = {**sizes, "path": os.path.join(folder, "host"), "per_rank": slots, "experts": slots}
        try:
            host_scenes(options, record, started, limit, on_gpu)
        except Exception:
            record["error"] = traceback.format_exc()
            print(record["error"], flush=True)
        finally:
            for each in started:
                each.kill()
    time.sleep(2.0)
    record["used_gib"]["after all ended"] = used_gb(on_gpu)
    return record


def host_scenes(
    options: dict[str, Any], record: dict[str, Any], started: list[ranks.Peer], limit: float, on_gpu: bool
) -> None:
    def note(scene: str, entry: dict[str, Any]) -> None:
        record[scene] = entry
        record["used_gib"][scene] = used_gb(on_gpu)
        print(scene, entry, f"{record['used_gib'][scene]:.2f} GiB used", flush=True)

    def start(scene: str, function: Callable[..., None], name: str) -> ranks.Peer:
        started.append(ranks.Peer(function, {**options, "name": name}))
        hello = started[-1].hear(limit)
        note(scene, {**hello, "from_start_s": time.perf_counter() - started[-1].began})
        return started[-1]

    host = start("host ready", be_host, "host")
    first = start("first engine", be_engine, "first")
    note("first engine's pass", first.ask("pass", limit))
    crc = record["first engine's pass"]["crc"]
    note("first engine moves experts", first.ask("move", limit))
    note("its pass after the move", first.ask("pass", limit))
    standby = start("standby", be_engine, "standby")
    note("standby's pass", standby.ask("pass", limit))
    begin = time.perf_counter()
    first.kill()
    while len(standby.ask("state", limit)["state"][1]) != 1:
        time.sleep(0.001)
    seen = time.perf_counter() - begin
    answer = standby.ask("pass", limit)
    note("standby takes over", {"alone_s": seen, "first_pass_s": time.perf_counter() - begin, **answer})
    again = start("engine restarted", be_engine, "again")
    note("its pass", again.ask("pass", limit))
    host.kill()
    time.sleep(1.0)
    note("pass after the host was killed", again.ask("pass", limit))
    note("standby's pass after the host was killed", standby.ask("pass", limit))
    passes = [entry["crc"] for entry in record.values() if isinstance(entry, dict) and "crc" in entry]
    record["outputs_equal"] = all(other == crc for other in passes)
    record["weights_exact"] = not any(entry.get("wrong") for entry in record.values() if isinstance(entry, dict))


# ---- what is printed -------------------------------------------------------------------------------------------------


def tables_of(record: dict[str, Any]) -> str:
    parts = []
    installs = record.get("install")
    if installs:
        rows = [["plain copy", "", f"{installs['plain copy']['gb_s']:.0f}", f"{installs['plain copy']['host_us']:.0f}"]]
        for name in ("from staging", "circle in place"):
            entry = installs[name]["kernel"]
            rows.append([name, "kernel", f"{entry['gb_s']:.0f}", f"{entry['host_us']:.0f}"])
        parts.append(measure.table(["install of a layer", "by", "GB/s", "host us"], rows))
    for rank in record.get("ranks", {}).get("by_rank", [])[:1]:
        rows = []
        for name, entry in rank.get("decode", {}).items():
            each = entry.get("moving", entry["all"])
            cells = (f"{each[key]:.2f}" for key in ("p50", "p99", "worst"))
            rows.append([name, *cells, str(entry["tokens_equal"]), str(entry.get("check", ""))])
        parts.append(measure.table(["pass ms", "p50", "p99", "worst", "tokens equal", "bytes"], rows))
        for name, entries in rank.get("ipc", {}).items():
            parts.append(f"{name}: {json.dumps(entries)}")
    return "\n\n".join(parts)


def summary_of(record: dict[str, Any]) -> list[str]:
    lines = []
    installs, host = record.get("install"), record.get("host", {})
    if installs and installs["kernels"]:
        share = installs["from staging"]["kernel"]["gb_s"] / installs["plain copy"]["gb_s"]
        lines.append(
            f"{record['device']}: an install reaches {share:.0%} of a plain copy's bandwidth, bytes exact: "
            f"{all(installs['exact'])}"
        )
    if "engine restarted" in host:
        lines.append(
            f"attach {host['first engine']['bytes'] / 1e9:.1f} GB: {host['engine restarted']['attach_s']:.3f} s; "
            f"outputs equal: {host.get('outputs_equal')}"
        )
    for rank in record.get("ranks", {}).get("by_rank", [])[:1]:
        if "decode" in rank:
            equal = all(entry["tokens_equal"] for entry in rank["decode"].values())
            lines.append(f"tokens equal to those of an engine that never moves experts: {equal}")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
