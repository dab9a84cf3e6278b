"""How fast are fingerprints against a plain reduction of the same bytes, and does every injected fault show?

python -m benchmarks.fingerprint_gpu --json fingerprint_gpu.json
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks import measure
from eplb_core import ExpertLayout, ExpertStore, Topology, fingerprints, verify_weights

SEED = 0
SLOTS = 9
TARGET = 0.6  # of what a plain reduction reaches

Spec = dict[str, tuple[torch.dtype, tuple[int, ...]]]
# One expert's rows of three models.
MODELS: dict[str, Spec] = {
    "DeepSeek-V3, fp8": {
        "w13": (torch.float8_e4m3fn, (4096, 7168)),
        "w2": (torch.float8_e4m3fn, (7168, 2048)),
        "w13_scale": (torch.float32, (32, 56)),
        "w2_scale": (torch.float32, (56, 16)),
    },
    "Qwen3-30B, bf16": {
        "w13": (torch.bfloat16, (1536, 2048)),
        "w2": (torch.bfloat16, (2048, 768)),
    },
    "DeepSeek-V3, int4 packed": {
        "w13_qweight": (torch.int32, (896, 4096)),
        "w2_qweight": (torch.uint8, (7168, 1024)),
        "w13_scales": (torch.bfloat16, (56, 4096)),
        "w13_qzeros": (torch.uint8, (56, 2047)),  # rows of an odd number of bytes
        "w2_scales": (torch.float8_e8m0fnu, (16, 7168)),
        "w2_bias": (torch.bfloat16, (7168,)),
    },
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.parser("fingerprint_gpu", __doc__, quick="rows of a hundredth, on any machine")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=8, help="layers that are read in one timed call")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    if device.type == "cpu":
        measure.one_thread()
    record: dict[str, Any] = {"device": hardware(device), "slots": SLOTS, "seed": SEED}
    rows = []
    for model, spec in MODELS.items():
        stores = allocate(shrunk(spec) if options.quick else spec, 2 if options.quick else options.layers, device)
        found, injected = inject(stores)
        speed = bandwidth(stores, 3 if options.quick else 20, device)
        record[model] = {"faults_injected": injected, "faults_found": found, **speed}
        rows.append(row_of(model, record[model]))
        del stores
    print(measure.table(["model", "faults found", "reduction GB/s", "full GB/s", "of reduction"], rows))
    record["summary"] = [
        f"{model} on {record['device']}: {record[model]['faults_found']} of {record[model]['faults_injected']} faults "
        f"found; full mode reads {record[model]['full_gb_s']:.0f} GB/s, {record[model]['ratio']:.0%} of a reduction"
        for model in MODELS
    ]
    measure.write_json(options.json, record)
    complete = all(record[model]["faults_found"] == record[model]["faults_injected"] for model in MODELS)
    fast = device.type != "cuda" or all(record[model]["ratio"] >= TARGET for model in MODELS)
    print(f"every fault found: {complete}; at least {TARGET:.0%} of a plain reduction: {fast}")
    return 0 if complete and (fast or options.quick) else 1


def row_of(model: str, entry: dict[str, Any]) -> list[str]:
    faults, speeds = f"{entry['faults_found']} of {entry['faults_injected']}", ("reduction_gb_s", "full_gb_s")
    return [model, faults, *(f"{entry[key]:.1f}" for key in speeds), f"{entry['ratio']:.0%}"]


def hardware(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


# ---- weights ---------------------------------------------------------------------------------------------------------


def shrunk(spec: Spec) -> Spec:
    return {name: (dtype, (*[max(1, size // 8) for size in shape],)) for name, (dtype, shape) in spec.items()}


def allocate(spec: Spec, layers: int, device: torch.device) -> list[ExpertStore]:
    """Random bytes; slot 8 is a replica of slot 0."""
    generator = torch.Generator(device=device).manual_seed(SEED)
    stores = []
    for _ in range(layers):
        tensors = {}
        for name, (dtype, shape) in spec.items():
            width = int(np.prod(shape)) * dtype.itemsize
            data = torch.randint(0, 256, (SLOTS, width), dtype=torch.uint8, device=device, generator=generator)
            data[SLOTS - 1] = data[0]
            tensors[name] = data.view(dtype).reshape(SLOTS, *shape)
        stores.append(ExpertStore(tensors))
    return stores


# ---- faults ----------------------------------------------------------------------------------------------------------


def inject(stores: Sequence[ExpertStore]) -> tuple[int, int]:
    """Break a slot in every way in every tensor of layer 1; how many breaks were named exactly, and how many made."""
    layout = ExpertLayout.trivial(len(stores), SLOTS - 1, num_slots=SLOTS, topology=Topology(num_ranks=1))
    report = verify_weights([fingerprints(stores)], layout)
    if not report.ok:
        raise SystemExit(f"faults before any was injected:\n{report}")
    generator = np.random.default_rng(SEED)
    found = injected = 0
    for column, name in enumerate(stores[1].names):
        for slots in breaks(stores[1], name, generator):
            prints = fingerprints(stores, layers=[1])
            faults = verify_weights([prints], layout, layers=[1], reference=report.by_expert).faults
            injected += 1
            found += [(fault.layer, fault.slot, fault.tensors) for fault in faults] == [
                (1, slot, (column,)) for slot in slots
            ]
    if not verify_weights([fingerprints(stores)], layout, reference=report.by_expert).ok:
        raise SystemExit("the weights were not restored")
    return found, injected


def breaks(store: ExpertStore, name: str, generator: np.random.Generator) -> Iterator[list[int]]:
    """Break, hand over the slots that are wrong now, and mend."""
    first, second, replica = store.row(name, 3), store.row(name, 5), store.row(name, SLOTS - 1)
    kept, kept_replica = first.clone(), replica.clone()
    for _ in range(4):
        byte, bit = int(generator.integers(len(first))), int(generator.integers(8))
        first[byte] ^= 1 << bit
        yield [3]
        first[byte] ^= 1 << bit
    first.copy_(second)
    second.copy_(kept)
    yield [3, 5]
    second.copy_(first)
    first.copy_(kept)
    replica[len(replica) // 2 :] ^= 255  # half of a replica kept older weights
    yield [SLOTS - 1]
    replica.copy_(kept_replica)
    first.zero_()
    yield [3]
    first.random_(0, 256)  # memory that nobody wrote
    yield [3]
    first.copy_(kept)


# ---- bandwidth -------------------------------------------------------------------------------------------------------


def bandwidth(stores: Sequence[ExpertStore], calls: int, device: torch.device) -> dict[str, Any]:
    """Median times of the same bytes: summed by the framework, and printed."""
    big = [
        torch.as_strided(store.row(name, 0), (SLOTS, len(store.row(name, 0))), (len(store.row(name, 0)), 1))
        for store in stores
        for name in store.names
    ]
    # The framework sums words; only the tensors of odd rows have none of them.
    words = [data.view(torch.int64) if data.shape[1] % 8 == 0 else data for data in big]
    floats = [data.view(torch.float32) if data.shape[1] % 4 == 0 else data for data in big]
    total = sum(data.numel() for data in big)

    def seconds(call: Callable[[], object]) -> float:
        return statistics.median(elapsed(call, device) for _ in range(calls))

    fingerprints(stores)  # compiles
    sums = [seconds(lambda part=part: [data.sum() for data in part]) for part in (words, floats)]  # type: ignore[misc]
    full = seconds(lambda: fingerprints(stores))
    return {
        "bytes": total,
        "reduction_gb_s": total / min(sums) / 1e9,
        "full_gb_s": total / full / 1e9,
        "ratio": min(sums) / full,
    }


def elapsed(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


if __name__ == "__main__":
    raise SystemExit(main())
