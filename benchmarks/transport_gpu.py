"""Four processes on one GPU: reads of each other's device memory by CUDA IPC, against a plain copy on the device.

python -m benchmarks.transport_gpu --json transport_gpu.json

Speeds of one reader and of all four at once, with the flag that asks copies to leave the cores alone and without; a
matrix product beside them; bytes compared; owners killed and stopped. On one GPU the copies are local ones: what peer
links give, it cannot show. Without a GPU the same steps run in host memory, to show that they do.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import measure, transports
from eplb_core.testing import TransportKit
from eplb_core.testing.peers import (
    Op,
    Process,
    World,
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
        entry = {"one_reader": one_reader(kit, times), "all_readers_gb_s": all_readers(kit, times)}
        entry["product"] = beside_product(kit, times, options.device, 256 if options.quick else 8192)
        record["kinds"][name] = entry
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
    head = [
        f"{record['device']}",
        "one reader GB/s",
        "of plain copy",
        "`read` us",
        "4 readers GB/s",
        "product slower by",
    ]
    rows = [["plain copy", f"{record['plain_copy_gb_s']:.0f}", "100%", "", "", ""]]
    for name, entry in record["kinds"].items():
        one = entry["one_reader"]
        rows.append(
            [
                name,
                f"{one['gb_s']:.0f}",
                f"{one['gb_s'] / record['plain_copy_gb_s']:.0%}",
                f"{one['call_us']:.0f}",
                f"{entry['all_readers_gb_s']:.0f}",
                f"x{entry['product']['ratio']:.2f} ({entry['product']['covered']:.0%} covered)",
            ]
        )
    return measure.table(head, rows)


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
    rates = found["gb_s"]
    return {
        "gb_s": rates["median"],
        "best_gb_s": rates["best"],
        "call_us": found["call_us"],
        "small_us": found["small_us"],
    }


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


def beside_product(kit: TransportKit, times: int, device: str, size: int) -> dict[str, float]:
    """How much slower a bf16 product is while one rank reads all the time."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))

    def product() -> float:
        synchronize(device)
        start = time.perf_counter()
        torch.mm(left, right)
        if device == "cuda":
            torch.cuda.current_stream().synchronize()
        return time.perf_counter() - start

    with world(kit) as w:
        transports.join(w, 1)
        ops = transports.pieces(kit.big, EXPERTS)
        product()
        alone = statistics.median(product() for _ in range(times))
        start = time.perf_counter()
        transports.finish(w, w.transport.read(1, batch(ops)))
        ahead = min(2 + int(3 * alone / (time.perf_counter() - start)), 64)
        beside, covered = own_reads(w, ops, ahead, product, times)
    return {
        "alone_ms": alone * 1e3,
        "beside_ms": beside * 1e3,
        "ratio": beside / alone,
        "covered": covered,
        "reads_ahead": ahead,
    }


def own_reads(w: World, ops: Sequence[Op], ahead: int, product: Callable[[], float], times: int) -> tuple[float, float]:
    """Median of products beside this process's own reads, and how many had one under way all the time."""
    tickets: list[Any] = []
    each, covered = [], 0
    for _ in range(times):
        while len(tickets) < ahead:
            tickets.append(w.transport.read(1, batch(ops)))
        each.append(product())
        tickets = [ticket for ticket in tickets if not w.transport.poll(ticket).state.is_end]
        covered += bool(tickets)
    for ticket in tickets:
        transports.finish(w, ticket)
    return statistics.median(each), covered / times


if __name__ == "__main__":
    raise SystemExit(main())
