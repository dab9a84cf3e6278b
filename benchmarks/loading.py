"""Which rows does an expert fill, at what cost; and how fast a checkpoint gets into them, with how much memory.

python -m benchmarks.loading --json loading.json

Lookups: `SlotResolver` against the lookup of SGLang 0.5.23, written out here from its description, in one process.
Checkpoints: `load_checkpoint` against a plain copy of the same file by safetensors into tensors of the same size, each
in a process of its own, the file in the page cache; peak memory is what the process takes of its own (anonymous) beside
those tensors, and with the file's pages that the system maps for it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import measure
from eplb_core import ExpertLayout, ExpertStore, SlotResolver, Topology

LAYERS, EXPERTS, SLOTS, RANKS = 58, 256, 288, 32
SEED = 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.parser("loading", __doc__, quick="few layers, a small checkpoint")
    parser.add_argument("--worker", nargs=3, metavar=("MODE", "FILE", "SHAPE"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        mode, file, shape = options.worker
        print(json.dumps(in_worker(mode, Path(file), json.loads(shape))))
        return 0
    measure.one_thread()
    lookups = lookup_times(4 if options.quick else LAYERS)
    head = [f"lookups at {lookups['layers']} x {EXPERTS} x {SLOTS}, {RANKS} ranks", "us a call"]
    print(measure.table(head, [[name, f"{value:.3f}"] for name, value in lookups["us"].items()]))
    print(
        f"a resolver: {lookups['new_us']:.0f} us; with all layers' local slots {lookups['local_ms']:.2f} ms, "
        f"global slots {lookups['global_ms']:.2f} ms"
    )
    shape = {"experts": 64, "inner": 1408, "hidden": 2048}
    if options.quick:
        shape = {"experts": 8, "inner": 64, "hidden": 128}
    loads = checkpoint_times(shape, 1 if options.quick else 3)
    rows = [
        [name, f"{entry['mb_s']:.0f}", f"{entry['peak_own_mb']:.1f}", f"{entry['peak_all_mb']:.1f}"]
        for name, entry in loads["modes"].items()
    ]
    print(f"\na layer of {loads['bytes'] / 1e6:.0f} MB; an expert's largest part {loads['part_bytes'] / 1e6:.1f} MB")
    print(measure.table(["checkpoint", "MB/s", "peak own MB", "peak with file pages MB"], rows))
    summary = [
        f"{lookups['us']['local_slots']:.3f} us a lookup (SGLang: {lookups['us']['narrowed list']:.2f}); a resolver "
        f"with all layers filled {lookups['local_ms']:.2f} ms",
        *(
            f"{name}: {entry['mb_s']:.0f} MB/s, {entry['peak_own_mb']:.1f} MB of own memory at peak"
            for name, entry in loads["modes"].items()
        ),
    ]
    measure.write_json(options.json, {"lookups": lookups, "checkpoint": loads, "summary": summary})
    return 0


# ---- lookups ---------------------------------------------------------------------------------------------------------


def lookup_times(layers: int) -> dict[str, Any]:
    """Microseconds a call in a plain loop over all layers and experts; answers compared first."""
    rng = np.random.default_rng(SEED)
    extra = rng.integers(0, EXPERTS, (layers, SLOTS - EXPERTS))
    rows = rng.permuted(np.concatenate([np.tile(np.arange(EXPERTS), (layers, 1)), extra], axis=1), axis=1)
    layout = ExpertLayout(rows, EXPERTS, topology=Topology(num_ranks=RANKS, num_nodes=4))
    resolver = SlotResolver(layout, 3)
    padded = np.full((layers, EXPERTS, SLOTS), -1)
    padded[..., : layout.logical_to_physical_map.shape[2]] = layout.logical_to_physical_map
    engine_map = torch.from_numpy(padded)

    def narrowed_list(layer: int, expert: int) -> list[int]:
        return [slot for slot in engine_map[layer, expert].tolist() if slot != -1]

    for layer in range(layers):
        for expert in range(EXPERTS):
            slots = tuple(narrowed_list(layer, expert))
            own = tuple(slot - 27 for slot in slots if 27 <= slot < 36)
            if (resolver.global_slots(layer, expert), resolver.local_slots(layer, expert)) != (slots, own):
                raise SystemExit(f"answers differ at layer {layer}, expert {expert}")

    def new_resolver(fill: Callable[[SlotResolver, int], object] | None) -> None:
        fresh = SlotResolver(layout, 3)
        for layer in range(layers if fill else 0):
            fill(fresh, layer)  # type: ignore[misc]

    def best(call: Callable[[], object]) -> float:
        return measure.timed(call, calls=30, budget_s=3.0)[1].minimum

    each: dict[str, Callable[[int, int], object]] = {
        "local_slots": resolver.local_slots,
        "global_slots": resolver.global_slots,
        "narrowed list": narrowed_list,
    }
    return {
        "layers": layers,
        "us": {name: best(lambda ask=ask: loop(ask, layers)) / layers / EXPERTS * 1e6 for name, ask in each.items()},  # type: ignore[misc]
        "new_us": best(lambda: new_resolver(None)) * 1e6,
        "local_ms": best(lambda: new_resolver(lambda fresh, layer: fresh.local_slots(layer, 0))) * 1e3,
        "global_ms": best(lambda: new_resolver(lambda fresh, layer: fresh.global_slots(layer, 0))) * 1e3,
    }


def loop(ask: Callable[[int, int], object], layers: int) -> None:
    for layer in range(layers):
        for expert in range(EXPERTS):
            ask(layer, expert)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def checkpoint_times(shape: dict[str, int], calls: int) -> dict[str, Any]:
    from safetensors.torch import save_file

    experts, inner, hidden = shape["experts"], shape["inner"], shape["hidden"]
    generator = torch.Generator().manual_seed(SEED)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "layer.safetensors"
        tensors = {}
        for expert in range(experts):
            for name, size in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
                data = torch.randint(0, 256, (2 * inner * hidden,), dtype=torch.uint8, generator=generator)
                tensors[f"layers.0.mlp.experts.{expert}.{name}_proj.weight"] = data.view(torch.bfloat16).reshape(size)
        save_file(tensors, file)
        del tensors
        modes = {}
        for mode in ("plain copy", "load_checkpoint"):
            own = ("-m", "benchmarks.loading", "--worker", mode, str(file), json.dumps(shape))
            runs = [measure.json_of(*own) for _ in range(calls)]
            fastest = min(runs, key=lambda run: run["seconds"])
            modes[mode] = {
                "mb_s": fastest["bytes"] / fastest["seconds"] / 1e6,
                "peak_own_mb": max(run["own"] for run in runs) / 1e6,
                "peak_all_mb": max(run["all"] for run in runs) / 1e6,
                "runs": runs,
            }
    total = experts * 6 * inner * hidden
    return {"shape": shape, "bytes": total, "part_bytes": 2 * inner * hidden, "modes": modes}


def in_worker(mode: str, file: Path, shape: dict[str, int]) -> dict[str, Any]:
    """Load all experts into slots allocated before, and say what memory came on top."""
    import threading

    from safetensors import safe_open

    from eplb_core.loading.checkpoint.load import load_checkpoint

    measure.one_thread()
    experts, inner, hidden = shape["experts"], shape["inner"], shape["hidden"]
    w13 = torch.ones(experts, 2 * inner, hidden, dtype=torch.bfloat16)
    w2 = torch.ones(experts, hidden, inner, dtype=torch.bfloat16)
    layout = ExpertLayout.trivial(1, experts, num_slots=experts, topology=Topology(num_ranks=1))
    store, resolver = ExpertStore({"w13": w13, "w2": w2}), SlotResolver(layout, 0)
    before, peak, done = memory(), [0, 0], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            peak[:] = [max(known, now - base) for known, now, base in zip(peak, memory(), before, strict=True)]

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    if mode == "load_checkpoint":
        load_checkpoint(file, [store], resolver, template="qwen3_moe")
    else:
        with safe_open(file, framework="pt") as checkpoint:
            for expert in range(experts):
                for block, name in enumerate(("gate", "up")):
                    target = w13[expert, block * inner : (block + 1) * inner]
                    target.copy_(checkpoint.get_tensor(f"layers.0.mlp.experts.{expert}.{name}_proj.weight"))
                w2[expert].copy_(checkpoint.get_tensor(f"layers.0.mlp.experts.{expert}.down_proj.weight"))
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    return {"seconds": seconds, "bytes": w13.nbytes + w2.nbytes, "own": peak[0], "all": peak[1]}


def memory() -> list[int]:
    """Bytes in memory now: the process's own, and with pages of files."""
    entries = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return [int(entries[name].split()[0]) * 1024 for name in ("RssAnon", "VmRSS")]


if __name__ == "__main__":
    raise SystemExit(main())
