"""How fast is each transport between processes of this host, and what happens when a peer dies or stops?

python -m benchmarks.transports --json transports.json

One reader, one owner, both real processes; every read is compared byte by byte. A transport whose package is not
installed, or does not load, is left out and named. Speeds over the loopback device say what a transport costs, not what
a network gives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks import measure
from eplb_core.errors import TransportError
from eplb_core.loading.transport import ReadState, Status
from eplb_core.testing import TransportKit
from eplb_core.testing.peers import Op, Process, World, batch, contents, export, in_time, pattern, put, wait, world
from tests.loading.transports import kits

MIB = 1 << 20
BYTES = 64 * MIB
OWN_KITS: dict[str, tuple[TransportKit, str]] = {
    "SharedMemory, shared tensors": (TransportKit(kits.shared_memory, allocate=kits.shared_tensor), ""),
    "SharedMemory, any tensors": (TransportKit(kits.shared_memory), ""),
    "TorchDistributed, gloo": (TransportKit(kits.gloo, rejoins=False), ""),
    "Nixl, one host (tcp,sm,self)": (TransportKit(kits.nixl_on_one_host), "nixl_cu13 nixl_cu12 nixl"),
    "Nixl, tcp": (TransportKit(kits.nixl_tcp), "nixl_cu13 nixl_cu12 nixl"),
    "Mooncake, tcp": (TransportKit(kits.mooncake), "mooncake.engine"),
}
"""By name: the kit, and modules of which one must load."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.parser("transports", __doc__, quick="a few megabytes")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="kinds whose name begins so")
    options = parser.parse_args(argv)
    measure.one_thread()
    nbytes = 4 * MIB if options.quick else BYTES
    record: dict[str, Any] = {"nbytes": nbytes, "transports": {}, "absent": []}
    for name, (kit, modules) in OWN_KITS.items():
        if options.only and not name.startswith(tuple(options.only)):
            continue
        why = not_there(modules.split())
        if why:
            record["absent"].append(f"{name}: {why}")
            continue
        kit = dataclasses.replace(kit, big=nbytes)
        record["transports"][name] = {**speeds(kit, 3 if options.quick else 15), **ends(kit)}
    print(speed_table(record["transports"]))
    print()
    print(end_table(record["transports"]))
    for line in record["absent"]:
        print(line)
    record["summary"] = [
        f"{name}: {entry['gb_s']['median']:.1f} GB/s; a dead peer ends a read in {entry['killed_ms']:.0f} ms"
        for name, entry in record["transports"].items()
    ]
    measure.write_json(options.json, record)
    return 0


def not_there(modules: Sequence[str]) -> str:
    """Why none of the modules loads (not installed, or a library of the system's is missing); empty: one does."""
    failures = [load_failure(module) for module in modules]
    return "" if "" in failures else "; ".join(failures)


def load_failure(module: str) -> str:
    """Why a module does not load, or nothing."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        return f"{module} does not load ({error})"
    return ""


def speed_table(entries: dict[str, Any]) -> str:
    head = ["transport", "GB/s median", "best", "beside a busy thread", "4 KiB us", "`read` us"]
    return measure.table(
        head,
        [
            [
                name,
                f"{entry['gb_s']['median']:.1f}",
                f"{entry['gb_s']['best']:.1f}",
                f"{entry['busy_gb_s']['median']:.2f}",
                f"{entry['small_us']:.0f}",
                f"{entry['call_us']:.0f}",
            ]
            for name, entry in entries.items()
        ],
    )


def end_table(entries: dict[str, Any]) -> str:
    head = ["transport", "peer killed", "peer dead before", "peer stopped: after 1 s", "given up on", "landed late"]
    return measure.table(
        head,
        [
            [
                name,
                f"{entry['killed']}, {entry['killed_ms']:.0f} ms",
                f"{entry['dead']}, {entry['dead_ms']:.0f} ms",
                entry["stopped"],
                entry["given_up"],
                f"{entry['late']:.0%}",
            ]
            for name, entry in entries.items()
        ],
    )


def speeds(kit: TransportKit, times: int) -> dict[str, Any]:
    """Reads of one region in 32 pieces, also beside a thread that runs Python code; a small one; what `read` takes."""
    alone = rates_of(kit, times)
    with busy_interpreter():
        return {**alone, "busy_gb_s": rates_of(kit, max(times // 3, 1))["gb_s"]}


@contextlib.contextmanager
def busy_interpreter() -> Iterator[None]:
    """A thread that never waits, as an engine's forward thread at its worst."""
    on = [True]

    def spin() -> None:
        count = 0
        while on:
            count += 1

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        on.clear()
        thread.join()


def rates_of(kit: TransportKit, times: int, *, peers: int = 1, count: int = 32) -> dict[str, Any]:
    """What one reader gets from one owner in so many pieces; other peers are idle. Every byte is compared."""
    with world(kit, peers) as w:
        join(w, 1)
        own = w.me.tensors[0]
        ops = pieces(kit.big, count)
        expected = torch.from_numpy(pattern(1, kit.big)).to(own.device)
        rates, calls = [], []
        for _ in range(times + 1):
            put(own, np.zeros(kit.big, dtype=np.uint8))
            start = time.perf_counter()
            ticket = w.transport.read(1, batch(ops))
            calls.append(time.perf_counter() - start)
            finish(w, ticket)
            rates.append(kit.big / (time.perf_counter() - start) / 1e9)
            if not torch.equal(own, expected):
                raise SystemExit(f"{w.transport.caps.name}: wrong bytes")
        small = []
        for _ in range(50):
            start = time.perf_counter()
            finish(w, w.transport.read(1, batch([(0, 0, 0, 0, 4096)])))
            small.append(time.perf_counter() - start)
    return {
        "gb_s": {"median": statistics.median(rates[1:]), "best": max(rates)},
        "small_us": statistics.median(small) * 1e6,
        "call_us": statistics.median(calls[1:]) * 1e6,
    }


def ends(kit: TransportKit) -> dict[str, Any]:
    """Killed and stopped owners."""
    found: dict[str, Any] = {}
    with world(kit) as w:
        own, peer = ready(w)
        ticket = w.transport.read(1, batch(pieces(kit.big)))
        found["killed"], found["killed_ms"] = end_after(w, ticket, peer.kill)
        put(own[0], np.zeros(kit.big, dtype=np.uint8))
        start = time.perf_counter()
        try:
            status = wait(w.transport, in_time(w.transport.read, 60, "read", 1, batch(pieces(kit.big))), 60)
            found["dead"] = status.state.name
        except TransportError:
            found["dead"] = "refused"
        found["dead_ms"] = (time.perf_counter() - start) * 1e3
    with world(kit) as w:
        own, peer = ready(w)
        peer.stop()
        ticket = w.transport.read(1, batch(pieces(kit.big)))
        found["stopped"] = wait(w.transport, ticket, 1.0).state.name
        w.transport.abandon(ticket)
        found["given_up"] = wait(w.transport, ticket, 0.1).state.name
        put(own[0], np.zeros(kit.big, dtype=np.uint8))
        peer.resume()
        wait(w.transport, ticket, 30.0)
        time.sleep(0.3)
        found["late"] = float((contents(own[0]) != 0).mean())
    return found


def end_after(w: World, ticket: Any, act: Callable[[], None]) -> tuple[str, float]:
    start = time.perf_counter()
    act()
    status = wait(w.transport, ticket, 60)
    return status.state.name, (time.perf_counter() - start) * 1e3


def ready(w: World) -> tuple[list[Any], Process]:
    """Connected, and warm: a first read has gone through."""
    join(w, 1)
    finish(w, w.transport.read(1, batch([(0, 0, 0, 0, 4096)])))
    peer = w.peers[1]
    if not isinstance(peer, Process):
        raise TypeError("peers must be processes")
    return w.me.tensors, peer


def join(w: World, rank: int) -> None:
    """Own memory, and a peer's with bytes of its number."""
    export(w.me, [w.kit.big], None)
    w.transport.connect(rank, w.peers[rank].call(export, [w.kit.big], rank))


def pieces(nbytes: int, count: int = 32) -> list[Op]:
    piece = nbytes // count
    return [(0, i * piece, 0, i * piece, piece) for i in range(count)]


def finish(w: World, ticket: Any) -> Status:
    """Poll every 50 us, as a worker does that lets others have the interpreter."""
    end = time.monotonic() + w.kit.deadline
    while not (status := w.transport.poll(ticket)).state.is_end:
        time.sleep(5e-5)
        if time.monotonic() > end:
            raise SystemExit(f"{w.transport.caps.name}: a read does not end: {status}")
    if status.state is not ReadState.DONE:
        raise SystemExit(f"{w.transport.caps.name}: {status}")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
