"""Four processes on one GPU: reads of each other's device memory by CUDA IPC, against a plain copy on the device.

python -m benchmarks.transport_gpu --json transport_gpu.json

Speeds of one reader and of all four at once, with the flag that asks copies to leave the cores alone and without; bytes
compared; owners killed and stopped. On one GPU the copies are local ones: what peer links give, it cannot show. Without
a GPU the same steps run in host memory, to show that they do.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import measure, transports
from eplb_core.testing import TransportKit
from eplb_core.testing.peers import (
    Process,
    batch,
    connect,
    export,
    export_again,
    read_times,
    world,
)
from tests.loading.transports import kits

MIB = 1 << 20
EXPERT = 22 * MIB
EXPERTS = 24
RANKS = 4


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.parser("transport_gpu", __doc__, quick="experts of a hundredth")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(argv)
    on_gpu = options.device == "cuda"
    record: dict[str, Any] = {"device": torch.cuda.get_device_name() if on_gpu else "the CPU", "ranks": RANKS}
    expert = EXPERT // 100 // 4096 * 4096 if options.quick else EXPERT
    kinds = gpu_kinds() if on_gpu else {"SharedMemory": TransportKit(kits.shared_memory)}
    kinds = {name: dataclasses.replace(kit, big=expert * EXPERTS) for name, kit in kinds.items()}
    times = 3 if options.quick else 20
    record |= {"expert_bytes": expert, "experts_a_read": EXPERTS, "kinds": {}}
    record["plain_copy_gb_s"] = plain_copy(expert, times, options.device)
    for name, kit in kinds.items():
        record["kinds"][name] = {"one_reader": one_reader(kit, times), "all_readers_gb_s": all_readers(kit, times)}
    name, kit = next(iter(kinds.items()))
    record["ends"] = {"kind": name, **transports.ends(kit)}
    print(table_of(record))
    print({key: value for key, value in record["ends"].items() if key != "kind"})
    best = max(entry["one_reader"]["gb_s"] for entry in record["kinds"].values())
    record["summary"] = [
        f"reads from a process on the same {record['device']}: {best:.0f} GB/s; plain copy "
        f"{record['plain_copy_gb_s']:.0f} GB/s; a peer killed during a read: {record['ends']['killed']}"
    ]
    measure.write_json(options.json, record)
    return 0


def gpu_kinds() -> dict[str, TransportKit]:
    memory = kits.device_tensor
    return {
        "batched, prefer overlap": TransportKit(kits.cuda_ipc, allocate=memory),
        "batched": TransportKit(kits.cuda_ipc_on_cores, allocate=memory),
        "one by one": TransportKit(kits.cuda_ipc_one_by_one, allocate=memory),
    }


def table_of(record: dict[str, Any]) -> str:
    plain = record["plain_copy_gb_s"]
    rows = [["plain copy", f"{plain:.0f}", "100%", "", ""]]
    for name, entry in record["kinds"].items():
        one = entry["one_reader"]
        cells = f"{one['gb_s']:.0f}", f"{one['gb_s'] / plain:.0%}", f"{one['call_us']:.0f}"
        rows.append([name, *cells, f"{entry['all_readers_gb_s']:.0f}"])
    return measure.table([record["device"], "one reader GB/s", "of plain copy", "`read` us", "4 readers GB/s"], rows)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def plain_copy(expert: int, times: int, device: str) -> float:
    """GB/s of `copy_` of as many experts, read once and written once; the median."""
    source, target = (torch.zeros(EXPERTS, expert, dtype=torch.uint8, device=device) for _ in range(2))
    rates = []
    for _ in range(times + 1):
        synchronize(device)
        start = time.perf_counter()
        for i in range(EXPERTS):
            target[i].copy_(source[i])
        synchronize(device)
        rates.append(source.numel() / (time.perf_counter() - start) / 1e9)
    return statistics.median(rates[1:])


def one_reader(kit: TransportKit, times: int) -> dict[str, float]:
    """One rank reads, the others are idle."""
    found = transports.rates_of(kit, times, peers=RANKS - 1, count=EXPERTS)
    return {"gb_s": found["gb_s"]["median"], "call_us": found["call_us"]}


def all_readers(kit: TransportKit, times: int) -> float:
    """Each rank reads from the next one, all at once: GB/s of all together."""
    with world(kit, RANKS - 1) as w:
        export(w.me, [kit.big], 0)
        blobs = {0: export_again(w.me)}
        blobs |= {rank: peer.call(export, [kit.big], rank) for rank, peer in w.peers.items()}
        w.transport.connect(1, blobs[1])
        peers = [peer for peer in w.peers.values() if isinstance(peer, Process)]
        ops = transports.pieces(kit.big, EXPERTS)
        for peer in peers:
            source = (peer.rank + 1) % RANKS
            peer.call(connect, source, blobs[source])
            peer.call(read_times, source, ops, 1)
        transports.finish(w, w.transport.read(1, batch(ops)))
        start = time.perf_counter()
        for peer in peers:
            peer.begin(read_times, (peer.rank + 1) % RANKS, ops, times)
        for _ in range(times):
            transports.finish(w, w.transport.read(1, batch(ops)))
        for peer in peers:
            peer.finish()
        return RANKS * times * kit.big / (time.perf_counter() - start) / 1e9


if __name__ == "__main__":
    raise SystemExit(main())
