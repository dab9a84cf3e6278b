"""Messages of any content to a server of a layout record: no crash, no state change, no memory growth.

python -m benchmarks.fuzz_record --json fuzz_record.json

Hypothesis makes the messages; the server is a process of its own with an engine attached that moves layer 0. Every
tenth connection sends bytes without the length that begins a message.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import eplb_core as eplb
from benchmarks import measure
from benchmarks.record import serving
from eplb_core.loading.record import wire
from eplb_core.loading.record.client import LayoutClient
from eplb_core.loading.record.state import RecordState

BATCH = 25
"""Messages of one example: what Hypothesis costs an example is more than what it costs a message."""
LAYOUT = eplb.ExpertLayout([[0, 1, 2, 3, 3, 0], [0, 1, 2, 3, 1, 2]], 4, topology=eplb.Topology(num_ranks=2))
SERVE = f"""
import sys, eplb_core as e
layout = e.ExpertLayout({LAYOUT.physical_to_logical_map.tolist()}, 4, topology=e.Topology(2))
server = e.LayoutServer(sys.argv[1], e.LayoutRecord(layout))
print("ready", flush=True)
sys.stdin.read()
"""

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
REQUESTS = ["attach", "query", "begin", "commit", "abort", "fetch", "follow", "hold", "watch"]
fields = st.fixed_dictionaries(
    {"do": st.sampled_from(REQUESTS) | json_values},
    optional={
        "engine": st.sampled_from(["a", "b", "#", ""]) | json_values,
        "layers": st.just([0]) | st.lists(st.integers(-1, 2), max_size=3) | json_values,
        "version": st.just(0) | json_values,
        "rows": st.just(wire.encode_rows(LAYOUT.physical_to_logical_map[:1])) | json_values,
        "digest": st.just(LAYOUT.digest) | json_values,
        "move": st.integers(0, 2) | json_values,
        "config": json_values,
    },
)
bodies = st.binary(max_size=200) | (json_values | fields).map(lambda value: json.dumps(value).encode())
messages = bodies | fields.map(lambda message: wire.pack(message)[4:])
batches = st.lists(messages, min_size=BATCH, max_size=BATCH)


def kept(state: RecordState) -> RecordState:
    """What nobody but an engine that moves may change: all but who is there and who follows."""
    return state._replace(engines=(), followers=(), holding=())


class Fuzz:
    """Connections to one server, one for each batch."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.sent = self.raw = 0
        self.statuses: Counter[str] = Counter()

    def send(self, batch: list[bytes]) -> None:
        """All messages of a batch, and a reply to each; or their bytes as they are."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(self._path)
            connection.settimeout(60)
            self.sent += len(batch)
            if self.sent // BATCH % 10 == 0:
                self.raw += len(batch)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a message declared too long
                    connection.sendall(b"".join(batch))
                return
            hello = wire.pack({"do": "attach", "engine": "b"})
            connection.sendall(hello + b"".join(wire.LENGTH.pack(len(body)) + body for body in batch))
            inbox = wire.Inbox()
            for _ in range(1 + len(batch)):
                while (body := inbox.take(wire.MAX_REPLY)) is None:
                    data = connection.recv(1 << 16)
                    if not data:
                        raise RuntimeError("the server ended a connection")
                    inbox.extend(data)
                self.statuses[wire.unpack(body)["status"]] += 1


def fuzz(path: str, server: subprocess.Popen[str], count: int) -> dict[str, Any]:
    """All messages, in the presence of an engine that moves; memory of the server before and after."""
    run = Fuzz(path)

    def examples(number: int) -> None:
        phases, quiet = [Phase.generate], list(HealthCheck)
        options: Any = {"deadline": None, "database": None, "phases": phases, "suppress_health_check": quiet}
        settings(max_examples=number, **options)(given(batches)(run.send))()

    with LayoutClient(path, "a") as client:
        if client.begin([0], 0).status != "ok":
            raise RuntimeError("the move did not begin")
        before = client.query()
        examples(max(count // BATCH // 10, 1))
        resident = resident_kb(server.pid)
        start, sent = time.perf_counter(), run.sent
        while run.sent < count:
            examples(min(-(-(count - run.sent) // BATCH), 400))
        took = time.perf_counter() - start
        grown = resident_kb(server.pid) - resident
        after = client.query()
        if before is None or after is None or kept(before) != kept(after):
            raise RuntimeError(f"the record has changed: {before}, {after}")
        if client.commit([0], LAYOUT.physical_to_logical_map[:1]).version != 1:
            raise RuntimeError("the move cannot be committed any more")
    return {
        "messages": run.sent,
        "without_a_length": run.raw,
        "replies": dict(run.statuses),
        "seconds": took,
        "ms_per_message": took / max(run.sent - sent, 1) * 1e3,
        "server_rss_kb": [resident, resident + grown],
        "digest": [before.digest, after.digest],
    }


def resident_kb(pid: int) -> int:
    """Memory of a process."""
    fields_of = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields_of["VmRSS"].split()[0])


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.parser("fuzz_record", __doc__, quick="1,000 messages")
    parser.add_argument("--messages", type=int, default=100_000)
    options = parser.parse_args(argv)
    count = 1_000 if options.quick else options.messages
    with tempfile.TemporaryDirectory() as folder, serving(SERVE, f"{folder}/socket") as server:
        record = fuzz(f"{folder}/socket", server, count)
    first, last = record["server_rss_kb"]
    lines = [
        f"{record['messages']:,} messages, {record['without_a_length']:,} of them without a length, in "
        f"{record['seconds']:.0f} s: the record did not change, the server's memory went from {first:,} to {last:,} KB"
    ]
    print("\n".join(lines))
    measure.write_json(options.json, {"summary": lines, **record})
    return 0


if __name__ == "__main__":
    sys.exit(main())
