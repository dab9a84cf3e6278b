"""The layout record and the weight host: adopting a layout, moves, hostile messages, mapping instead of loading.

python -m benchmarks.record --json record.json

The server is a process of its own, as in service. Ours is compared with targets, since no peer has a record to ask.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import eplb_core as eplb
from benchmarks import measure
from eplb_core.loading.record import wire
from eplb_core.loading.record.keeper import Keeper, Session
from eplb_core.loading.record.record import LayoutRecord

LAYERS, EXPERTS, SLOTS, RANKS = 58, 256, 288, 32
ADOPT_TARGET_MS = 10.0
MOVE_TARGET_MS = 1.0
TOPOLOGY = eplb.Topology(num_ranks=RANKS, num_nodes=4)
OWN = eplb.ExpertLayout.trivial(LAYERS, EXPERTS, num_slots=SLOTS, topology=TOPOLOGY)
SERVE = """
import sys, eplb_core as e
from eplb_core.loading.record.record import LayoutRecord
p2l = [[(slot * 5 + layer) % 256 for slot in range(288)] for layer in range(58)]
layout = e.ExpertLayout(p2l, 256, topology=e.Topology(num_ranks=32, num_nodes=4))
server = e.LayoutServer(sys.argv[1], LayoutRecord(layout, version=1), state_file=sys.argv[2] or None, memory="m")
print("ready", flush=True)
sys.stdin.read()
"""
HOST = """
import sys, torch, eplb_core as e
layers, nbytes = int(sys.argv[2]), int(sys.argv[3])
def load(layout, rank):
    return {f"{i}.w": torch.ones(9, nbytes // (9 * layers), dtype=torch.uint8) for i in range(layers)}
layout = e.ExpertLayout.trivial(layers, 256, num_slots=288, topology=e.Topology(32))
host = e.WeightHost(sys.argv[1], load, config={"model": "m"}, layout=layout, rank=0)
print("ready", flush=True)
sys.stdin.read()
"""
ENGINE = """
import json, sys, time
import torch, eplb_core as e
e.attach_weights
layers = int(sys.argv[2])
layout = e.ExpertLayout.trivial(layers, 256, num_slots=288, topology=e.Topology(32))
start = time.perf_counter()
client = e.LayoutClient(sys.argv[1], "engine")
tensors = {}
att = e.attach_weights(client, tensors, config={"model": "m"}, layout=layout)
mapped = time.perf_counter() - start
total = sum(int(tensor[:, ::4096].sum()) for tensor in tensors.values())
print(json.dumps({"map_s": mapped, "tensors": len(tensors), "bytes": att.num_bytes}), flush=True)
sys.stdin.readline()
rollup = dict(line.split()[:2] for line in open("/proc/self/smaps_rollup") if line[0].isupper())
print(json.dumps({"shared_kb": sum(int(rollup[key]) for key in ("Pss_Shmem:",))}), flush=True)
"""


class Alone:
    """The agreement of an engine of one rank."""

    rank, size = 0, 1

    def post(self, word: int) -> None:
        """Nobody else listens."""

    def take(self) -> int | None:
        """Nothing is ever posted."""
        return None

    def gather(self, blob: bytes) -> list[bytes]:
        """One rank's blob."""
        return [blob]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.record", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds, few messages, small weights")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    rounds, messages, nbytes = (20, 2_000, 64 << 20) if options.quick else (500, 100_000, 2 << 30)
    record: dict[str, Any] = {"shape": [LAYERS, EXPERTS, SLOTS, RANKS]}
    with tempfile.TemporaryDirectory() as folder:
        with serving(SERVE, f"{folder}/plain", ""):
            record["adopt"] = adopt(f"{folder}/plain", rounds)
            record["move"] = moves(f"{folder}/plain", rounds)
        with serving(SERVE, f"{folder}/kept", f"{folder}/state.json"):
            record["move_with_state_file"] = moves(f"{folder}/kept", max(rounds // 10, 5))
        record["hostile"] = hostile(messages)
        record["host"] = engines_of_a_host(f"{folder}/host", nbytes)
    lines = summary(record)
    print("\n".join(lines))
    measure.write_json(options.json, {"summary": lines, **record})
    return 0


def adopt(path: str, rounds: int) -> dict[str, Any]:
    """From nothing to dispatch tables: connect, attach, agree, build."""
    eplb.static_dispatch_table(OWN)  # compiled before

    def once() -> tuple[eplb.ExpertLayout, int]:
        with eplb.LayoutClient(path, engine_id="engine") as client:
            layout, version = eplb.agree_on_layout(client, own=OWN, agreement=Alone())
            eplb.static_dispatch_table(layout)
        return layout, version

    layout, version = once()
    if version != 1 or layout == OWN:
        raise RuntimeError(f"adopted version {version}")
    return times(once, rounds)


def moves(path: str, rounds: int) -> dict[str, Any]:
    """Begin and commit of one layer."""
    with eplb.LayoutClient(path, engine_id="engine") as client:
        state = client.query()
        if state is None:
            raise RuntimeError("no record")
        version, row = state.version, state.layout.physical_to_logical_map[:1]
        while client.begin([0], version).status == "busy":  # the engine before is just leaving
            pass
        client.abort([0])

        def once() -> None:
            nonlocal version
            begun = client.begin([version % LAYERS], version)
            done = client.commit([version % LAYERS], row)
            if (begun.status, done.status) != ("ok", "ok"):
                raise RuntimeError(f"{begun}, {done}")
            version += 1

        return times(once, rounds)


def hostile(count: int) -> dict[str, Any]:
    """Messages of any content: nothing raised, nothing changed, no memory kept."""
    keeper, first, second = Keeper(LayoutRecord(OWN)), Session(1), Session(2)
    for session in (first, second):
        keeper.answer(session, wire.pack({"do": "attach", "engine": "engine"})[4:])
    before, numbers = keeper.state, random.Random(0)
    rss = []
    start = time.perf_counter()
    for index in range(count):
        if index in (count // 10, count - 1):
            rss.append(resident_kb())
        reply = keeper.answer(second, hostile_message(numbers))
        if reply.message["status"] not in ("ok", "busy", "refused") or keeper.state is not before:
            raise RuntimeError(f"message {index} changed the record")
    took = time.perf_counter() - start
    return {"messages": count, "growth_kb": rss[-1] - rss[0], "us_per_message": took / count * 1e6}


def hostile_message(numbers: random.Random) -> bytes:
    """A valid message with wrong values, cut, or with bytes changed; or noise."""
    values: list[Any] = [None, -1, 0, 1e300, True, "", "engine", [0], [[]], {"a": 1}, [0] * 300, 1 << 70, "\ud800"]
    message = {
        key: numbers.choice(values)
        for key in numbers.sample(["engine", "layers", "version", "rows", "digest", "config", "frame"], 4)
    }
    message["do"] = numbers.choice(["attach", "query", "begin", "commit", "abort", "fetch", *values])
    body = bytearray(wire.pack(message)[4:])
    kind = numbers.randrange(4)
    if kind == 1:
        del body[numbers.randrange(len(body)) :]
    elif kind == 2:
        body[numbers.randrange(len(body))] = numbers.randrange(256)
    elif kind == 3:
        body = bytearray(numbers.randbytes(numbers.randrange(200)))
    return bytes(body)


def engines_of_a_host(path: str, nbytes: int) -> dict[str, Any]:
    """Several engines map one host's weights: seconds to map, memory of all together."""
    with serving(HOST, path, str(LAYERS), str(nbytes)):
        engines = [process(ENGINE, path, str(LAYERS)) for _ in range(3)]
        mapped = [read(engine) for engine in engines]
        for engine in engines:
            write(engine)
        shared = [read(engine)["shared_kb"] for engine in engines]
        for engine in engines:
            stop(engine)
    return {
        "engines": len(engines),
        "bytes": mapped[0]["bytes"],
        "tensors": mapped[0]["tensors"],
        "map_ms": [each["map_s"] * 1e3 for each in mapped],
        "proportional_share_bytes": [kb << 10 for kb in shared],
    }


def summary(record: dict[str, Any]) -> list[str]:
    """One line a claim."""
    host, hostile_run = record["host"], record["hostile"]
    lines = []
    for key, what, target in (
        ("adopt", "adopt a layout, connect to dispatch table", ADOPT_TARGET_MS),
        ("move", "begin + commit of a layer", MOVE_TARGET_MS),
        ("move_with_state_file", "... with the record on disk", None),
    ):
        found = record[key]
        aim = "" if target is None else f" (target {target:g})"
        lines.append(f"{what}: median {found['median_ms']:.2f} ms, least {found['minimum_ms']:.2f} ms{aim}")
    lines.append(
        f"{hostile_run['messages']:,} hostile messages: none changed the record, memory grew by "
        f"{hostile_run['growth_kb']} KB, {hostile_run['us_per_message']:.0f} us each"
    )
    share = sum(host["proportional_share_bytes"]) / host["bytes"]
    lines.append(
        f"{host['bytes'] / 2**30:.2f} GiB in {host['tensors']} tensors mapped in {min(host['map_ms']):.1f} to "
        f"{max(host['map_ms']):.1f} ms; {host['engines']} engines together hold {share:.2f} x the weights"
    )
    return lines


# ---- processes and times ---------------------------------------------------------------------------------------------


def times(call: Callable[[], object], rounds: int) -> dict[str, Any]:
    """Milliseconds of `rounds` calls."""
    each = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        each.append((time.perf_counter() - start) * 1e3)
    return {"median_ms": statistics.median(each), "minimum_ms": min(each), "maximum_ms": max(each), "rounds": rounds}


def process(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Python code in a process of its own."""
    root = Path(__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


class serving:
    """A server in a process, from its "ready" to the end of the block."""

    def __init__(self, code: str, *arguments: str) -> None:
        self._process = process(code, *arguments)

    def __enter__(self) -> None:
        if self._process.stdout is None or self._process.stdout.readline() != "ready\n":
            stop(self._process)
            raise RuntimeError("the server did not start")

    def __exit__(self, *error: object) -> None:
        stop(self._process)


def read(engine: subprocess.Popen[str]) -> dict[str, Any]:
    """One line of JSON."""
    if engine.stdout is None:
        raise RuntimeError("no pipe")
    return json.loads(engine.stdout.readline())  # type: ignore[no-any-return]


def write(engine: subprocess.Popen[str]) -> None:
    """Let it go on."""
    if engine.stdin is not None:
        engine.stdin.write("\n")
        engine.stdin.flush()


def stop(engine: subprocess.Popen[str]) -> None:
    """End it and its pipes."""
    engine.kill()
    engine.wait()
    for pipe in (engine.stdin, engine.stdout):
        if pipe is not None:
            pipe.close()


def resident_kb() -> int:
    """Memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


if __name__ == "__main__":
    raise SystemExit(main())
