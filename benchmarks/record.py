"""The layout record and the weight host: adopting a layout, moves, mapping instead of loading.

python -m benchmarks.record --json record.json

The server is a process of its own, as in service. Ours is compared with targets, since no peer has a record to ask.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import eplb_core as eplb
from benchmarks import measure
from eplb_core.loading.agreement import LocalAgreement

LAYERS, EXPERTS, SLOTS, RANKS = 58, 256, 288, 32
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.parser("record", __doc__, quick="few rounds, small weights")
    options = parser.parse_args(argv)
    rounds, nbytes = (20, 64 << 20) if options.quick else (500, 2 << 30)
    record: dict[str, Any] = {"shape": [LAYERS, EXPERTS, SLOTS, RANKS]}
    with tempfile.TemporaryDirectory() as folder:
        with serving(SERVE, f"{folder}/plain", ""):
            record["adopt"] = adopt(f"{folder}/plain", rounds)
            record["move"] = moves(f"{folder}/plain", rounds)
        with serving(SERVE, f"{folder}/kept", f"{folder}/state.json"):
            record["move_with_state_file"] = moves(f"{folder}/kept", max(rounds // 10, 5))
        record["host"] = engines_of_a_host(f"{folder}/host", nbytes)
    lines = summary(record)
    print("\n".join(lines))
    measure.write_json(options.json, {"summary": lines, **record})
    return 0


def adopt(path: str, rounds: int) -> dict[str, Any]:
    """From nothing to dispatch tables: connect, attach, agree, build."""
    eplb.static_dispatch_table(OWN)  # compiled before
    (alone,) = LocalAgreement.group(1)

    def once() -> tuple[eplb.ExpertLayout, int]:
        with eplb.LayoutClient(path, engine_id="engine") as client:
            layout, version = eplb.agree_on_layout(client, own=OWN, agreement=alone)
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


def engines_of_a_host(path: str, nbytes: int) -> dict[str, Any]:
    """Several engines map one host's weights: seconds to map, memory of all together."""
    with serving(HOST, path, str(LAYERS), str(nbytes)):
        engines = [process(ENGINE, path, str(LAYERS)) for _ in range(3)]
        mapped = [read(engine) for engine in engines]
        shared = [read(engine, "\n")["shared_kb"] for engine in engines]
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
    host = record["host"]
    lines = []
    for key, what in (
        ("adopt", "adopt a layout, connect to dispatch table"),
        ("move", "begin + commit of a layer"),
        ("move_with_state_file", "... with the record on disk"),
    ):
        lines.append(f"{what}: median {record[key]['median_ms']:.2f} ms, least {record[key]['minimum_ms']:.2f} ms")
    share = sum(host["proportional_share_bytes"]) / host["bytes"]
    lines.append(
        f"{host['bytes'] / 2**30:.2f} GiB in {host['tensors']} tensors mapped in {min(host['map_ms']):.1f} to "
        f"{max(host['map_ms']):.1f} ms; {host['engines']} engines together hold {share:.2f} x the weights"
    )
    return lines


# ---- processes and times ---------------------------------------------------------------------------------------------


def times(call: Callable[[], object], rounds: int) -> dict[str, Any]:
    """Milliseconds of `rounds` calls."""
    found = measure.timed(call, calls=rounds, budget_s=600.0)[1]
    return {"median_ms": found.median * 1e3, "minimum_ms": found.minimum * 1e3, "rounds": found.calls}


def process(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Python code in a process of its own."""
    root = Path(__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


@contextmanager
def serving(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A server in a process, from its "ready" to the end of the block."""
    server = process(code, *arguments)
    try:
        if server.stdout is None or server.stdout.readline() != "ready\n":
            raise RuntimeError("the server did not start")
        yield server
    finally:
        stop(server)


def read(engine: subprocess.Popen[str], word: str = "") -> dict[str, Any]:
    """One line of JSON, after a word that it may wait for."""
    if engine.stdin is None or engine.stdout is None:
        raise RuntimeError("no pipe")
    engine.stdin.write(word)
    engine.stdin.flush()
    return json.loads(engine.stdout.readline())  # type: ignore[no-any-return]


def stop(engine: subprocess.Popen[str]) -> None:
    """End it and its pipes."""
    engine.kill()
    engine.wait()
    for pipe in (engine.stdin, engine.stdout):
        if pipe is not None:
            pipe.close()


if __name__ == "__main__":
    raise SystemExit(main())
