"""Migrations of real processes by the thousand, with ranks that are late, killed and stopped, and reads that go wrong.

python -m benchmarks.soak_moves --json soak_moves.json

All transports side by side, each with its own processes and record (ports, folders and names are chosen anew by every
job), on a machine with 32 cores; `--migrations 0` runs the losses alone, two dozen seconds each on busy cores:

for t in shared_memory gloo nixl mooncake; do
    python -m benchmarks.soak_moves --transport $t --ranks 8 --migrations 0 --json losses_$t.json > losses_$t.log 2>&1 &
    python -m benchmarks.soak_moves --transport $t --ranks 4 --minutes 40 --json soak_$t.json > soak_$t.log 2>&1 &
done; wait

Each rank is a process: gloo agrees, the transport reads. In every pass each rank says over a group of its own where it
would send a token of each expert and in which layout it is; who is named checks the bytes of the slot. A thread of each
rank does the same with its own tables between the passes, all the time, and one of rank 0 runs Python code all the
time. 1,000 random migrations over every transport that is installed, on 8 ranks: some end early (other targets,
functions that raise, pauses), in some a rank is slow, comes passes later or is stopped by SIGSTOP for longer than
deadlines are, a quarter meet reads that are late, torn, lost or refused. Then a rank is killed, or stopped and
continued later, in each phase of a migration, and the others go on.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks import measure, ranks
from eplb_core import DispatchTables, ExpertLayout, ExpertStore, Topology, fingerprints, topk_to_slots, verify_weights
from eplb_core.errors import AgreementError, MigrationError
from eplb_core.loading.agreement import GroupAgreement
from eplb_core.loading.moves import progress as _words
from eplb_core.loading.moves.migrator import Migrator
from eplb_core.loading.moves.warm import warm_moves
from eplb_core.loading.transport import ReadBatch, Status, Transport
from eplb_core.loading.transports import Faulty, Mooncake, Nixl, SharedMemory, TorchDistributed

LAYERS, EXPERTS, PER_RANK = 3, 10, 4
SIZES = {"w13": 4096, "w2": 2048, "scale": 3}
"""Bytes of a row."""
PACKAGES = {"nixl": "nixl_cu13 nixl_cu12 nixl", "mooncake": "mooncake"}
TRANSPORTS = ("shared_memory", "gloo", "nixl", "mooncake")
FAULTS = {"delay": 0.1, "tear": 0.02, "fail": 0.01, "lose": 0.01, "late": 0.01, "drop": 0.01}
ENDS = {"paused", "disagree", "plan", "read", "peer", "deadline"}
"""Causes that this makes itself."""
LAST_PASS = 12
"""Of a migration, or a little later."""
PHASES = ("planning", "reading", "polling", "staged", "installing", "forward", "pausing", "stopping")
"""Where a rank is lost: in the function that plans; on the reading thread, when a read has begun and while it runs;
when a step is staged; when it is installed and no word is out; between two polls; in a pause; in a stop."""
CHUNK = 50
"""Migrations of one set of processes."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.parser("soak_moves", __doc__, quick="few migrations on 4 ranks, shared memory alone")
    parser.add_argument("--transport", nargs="+", choices=TRANSPORTS)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--migrations", type=int, default=1000, help="over each transport; 0: losses alone")
    parser.add_argument("--minutes", type=float, default=1e9, help="over all transports; what is left out is said")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    names = options.transport or (["shared_memory"] if options.quick else installed())
    size, count = (4, 6) if options.quick else (options.ranks, options.migrations)
    if size < 4 or size % 2:
        parser.error(
            f"--ranks (={size}) must be even and at least 4: two nodes, and room for all experts without a rank"
        )
    asked = {"ranks": size, "migrations": count, "transports": names}
    record: dict[str, Any] = {"asked": asked, "runs": [], "failed": [], "summary": []}
    torch.set_num_threads(1)
    warm_up()  # before the ranks are forked: none of them compiles
    start = time.monotonic()
    for index, name in enumerate(names):
        until = start + 60 * options.minutes * (index + 1) / len(names)
        for job in jobs(name, size, count, options.seed, PHASES[3:5] if options.quick else PHASES):
            if time.monotonic() > until:
                break
            try:
                record["runs"].append(run(job))
                print(json.dumps(record["runs"][-1]), flush=True)
            except SystemExit as error:  # what the other jobs show is worth knowing
                record["failed"].append(str(error))
                print(f"FAILED {error}", flush=True)
            record["summary"] = summary(record["runs"])
            measure.write_json(options.json, record)
    print("\n".join([*record["summary"], *(f"FAILED {why}" for why in record["failed"])]))
    return 1 if record["failed"] else 0


def warm_up() -> None:
    """Compile what ranks run and no more: all of the library takes a minute of a core after an installation."""
    warm_moves()
    layout = ExpertLayout.trivial(1, 2, num_slots=2, topology=Topology(1))
    tables = DispatchTables(layout, rank=0)
    tables.install(layout, layers=[0])
    topk_to_slots(torch.arange(2)[:, None], tables.layer(0))
    fingerprints([ExpertStore({"weight": torch.zeros(2, 4, dtype=torch.uint8)})])


def installed() -> list[str]:
    """Transports that can be made here."""
    return [
        name
        for name in TRANSPORTS
        if name not in PACKAGES or any(importlib.util.find_spec(package) for package in PACKAGES[name].split())
    ]


def jobs(transport: str, size: int, migrations: int, seed: int, phases: Sequence[str]) -> list[dict[str, Any]]:
    """What is run over one transport with so many ranks."""
    base = {"transport": transport, "size": size, "scenario": "random"}
    losses = [
        {**base, "scenario": scenario, "at": at, "migrations": 2, "seed": seed + number}
        for number, at in enumerate(phases)
        for scenario in ("killed", "stopped")
    ]
    chunks = []
    for first in range(0, migrations, CHUNK):
        here = min(CHUNK, migrations - first)
        faulty = max(1, here // 4)
        job = {**base, "seed": seed + 1000 + first}
        chunks += [{**job, "migrations": here - faulty}, {**job, "faults": FAULTS, "migrations": faulty}]
    return [*chunks[:2], *losses, *chunks[2:]]


def summary(runs: list[dict[str, Any]]) -> list[str]:
    """One line a transport."""
    lines = []
    for name in dict.fromkeys(entry["transport"] for entry in runs):
        here = [entry for entry in runs if entry["transport"] == name]
        total = {key: sum(entry[key] for entry in here) for key in ("migrations", "installed", "passes", "looks")}
        lost = Counter(entry["scenario"] for entry in here if entry["scenario"] != "random")
        lines.append(
            f"{name}: {total['migrations']:,} migrations of {total['installed']:,} steps in {total['passes']:,} "
            f"passes on {max(entry['size'] for entry in here)} ranks, {lost['killed']} ranks killed, {lost['stopped']} "
            f"stopped; {total['looks']:,} looks through the tables saw no slot without its expert"
        )
    return lines


def run(job: dict[str, Any]) -> dict[str, Any]:
    """All ranks of a job; what they agree on and their sums."""
    start = time.perf_counter()
    dies = victim(job) if job["scenario"] == "killed" else -1
    with tempfile.TemporaryDirectory(prefix="eplb-soak-") as folder:
        here = [{**job, "rank": rank, "folder": folder} for rank in range(job["size"])]
        # Forks, since eight times the imports take longer than the migrations.
        peers = [ranks.Peer(begin_rank, each, method="fork") for each in here]
        said, codes = ranks.collect(peers, 90 + 4 * job["migrations"] * job["size"], may_die=dies)
    failed = [rank for rank, code in enumerate(codes) if code != 0 and rank != dies]
    if failed:
        why = "\n".join(f"rank {rank}: {said[rank]}" for rank in failed if said[rank])
        raise SystemExit(f"{job}: ranks {failed} did not end as they should\n{why}")
    answers = [answer for rank, answer in enumerate(said) if rank != dies]
    live = [answer for answer in answers if not answer["out"]]
    for key in ("layout", "installed", "causes"):
        if len({json.dumps(answer[key]) for answer in live}) != 1:
            raise SystemExit(f"{job}: ranks differ in {key}: {[answer[key] for answer in live]}")
    return {
        **{key: job[key] for key in ("transport", "size", "scenario", "migrations", "seed")},
        "faults": bool(job.get("faults")),
        **({"at": job["at"]} if "at" in job else {}),
        **{key: live[0][key] for key in ("installed", "causes", "passes", "doubt")},
        "looks": sum(answer["looks"] for answer in live),
        "seconds": round(time.perf_counter() - start, 1),
    }


def begin_rank(pipe: Any, job: dict[str, Any]) -> None:
    """In the new process."""
    os.environ |= {
        "NIXL_LOG_LEVEL": "ERROR",
        # Where there are GPUs, NIXL refuses a choice without the last.
        "UCX_TLS": "tcp,sm,self" + (",cuda_copy" if torch.cuda.is_available() else ""),
        "MC_LOG_LEVEL": "FATAL",
        "UCX_NET_DEVICES": "lo",
        "GLOO_SOCKET_IFNAME": "lo",  # a machine's name may lead nowhere
    }
    try:
        rank = Rank(job)
        (rank.random_migrations if job["scenario"] == "random" else rank.loss)()
        if not rank.out and rank.migrator.stop(10.0) is False:
            raise SystemExit(f"rank {rank.rank} does not stop: {rank.migrator.status}")
        rank.end()
        pipe.send(rank.answer())
    except BaseException:
        pipe.send(traceback.format_exc()[-3000:])
        os._exit(1)
    os._exit(0)  # what is left of a broken group may wait for its peers


def victim(job: dict[str, Any]) -> int:
    """The rank that dies; none in random runs."""
    return job["size"] - 2 if job["scenario"] != "random" else -1


# ---- one rank --------------------------------------------------------------------------------------------------------


def label(layer: int, expert: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """An expert's bytes, all tensors in a row: nobody else's."""
    return np.random.default_rng([layer, expert]).integers(0, 256, sum(SIZES.values()), dtype=np.uint8)


LABELS = np.stack([[label(layer, expert) for expert in range(EXPERTS)] for layer in range(LAYERS)])
ENDS_OF = np.cumsum([0, *SIZES.values()])


class Shelf:
    """Every expert; counts what is asked for."""

    def __init__(self) -> None:
        self.given: list[tuple[int, int]] = []

    def fetch(self, layer: int, expert: int, rows: Sequence[torch.Tensor]) -> None:
        """Fill the rows, and note what was asked for."""
        self.given.append((layer, expert))
        for row, start, end in zip(rows, ENDS_OF, ENDS_OF[1:], strict=False):
            row.copy_(torch.from_numpy(LABELS[layer, expert, start:end]))


class Hooked:
    """A transport, and a rank that may be lost in its calls."""

    def __init__(self, inner: Transport, rank: Rank) -> None:
        self.inner, self.rank, self.caps = inner, rank, inner.caps

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def read(self, rank: int, batch: ReadBatch, *, stream: Any = None) -> Any:
        """As `inner`."""
        ticket = self.inner.read(rank, batch, stream=stream)
        self.rank.may_be_lost("reading")
        return ticket

    def poll(self, ticket: Any) -> Status:
        """As `inner`."""
        status = self.inner.poll(ticket)
        self.rank.may_be_lost("polling")
        return status


class Rank:
    """Weights, a Migrator, passes, and a thread that looks."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job, self.rank, self.size, self.folder = job, job["rank"], job["size"], job["folder"]
        self.patience = 60.0
        sys.setswitchinterval(1e-4)  # else each wait for another thread's Python code is one of 5 ms
        words, self.traffic, bytes_ = (
            ranks.gloo_group(self.folder, self.rank, self.size, name=name) for name in ("words", "traffic", "bytes")
        )
        self.rng = np.random.default_rng(job["seed"])
        self.topology = Topology(self.size, 2)
        self.live = list(range(self.size))
        layout = self.random_layout()
        self.stores = [ExpertStore(self.tensors(layout, layer)) for layer in range(LAYERS)]
        self.tables = DispatchTables(layout, rank=self.rank)
        self.transport = self.make(bytes_)
        self.agreement: Any = GroupAgreement(words, deadline=self.patience)
        prints = [np.frombuffer(blob, np.int64) for blob in self.agreement.gather(self.prints())]
        shape = (LAYERS, PER_RANK, len(SIZES))
        self.reference = verify_weights([each.reshape(shape) for each in prints], layout).by_expert
        self.shelf = Shelf()
        self.passes = self.installed = self.looks = 0
        self.causes: Counter[str] = Counter()
        self.doubt = self.out = False
        self.doom, self.woken = "", False
        self.between = threading.Lock()
        """Held in a pass: installs are between two."""
        self.wrong = ""
        self.join(layout)
        if job["scenario"] != "random":  # from now on: processes start at very different times
            self.patience = self.agreement.deadline = 5.0
        self.watching = True
        self.watch = threading.Thread(target=self.watch_all_the_time, daemon=True)
        self.watch.start()
        if self.rank == 0:
            threading.Thread(target=self.burn, daemon=True).start()

    def burn(self) -> None:
        """Python code without a pause."""
        while self.watching:
            sum(range(1000))

    def tensors(self, layout: ExpertLayout, layer: int) -> dict[str, torch.Tensor]:
        """This rank's weights of a layer; empty slots hold 255s."""
        first = self.rank * PER_RANK
        own = layout.physical_to_logical_map[layer, first : first + PER_RANK]
        rows = np.where(own[:, None] >= 0, LABELS[layer, own], 255)
        return {
            name: torch.from_numpy(rows[:, start:end].copy())
            for name, start, end in zip(SIZES, ENDS_OF, ENDS_OF[1:], strict=False)
        }

    def prints(self) -> bytes:
        """Of this rank's slots."""
        return fingerprints(self.stores).numpy().astype(np.int64).tobytes()

    def make(self, group: Any) -> Transport:
        """The transport under test."""
        kinds: dict[str, Any] = {
            "shared_memory": SharedMemory,
            "gloo": lambda: TorchDistributed(group),
            "nixl": Nixl,
            "mooncake": lambda: Mooncake("127.0.0.1"),
        }
        made: Transport = kinds[self.job["transport"]]()
        if self.job.get("faults"):
            made = Faulty(made, self.job["faults"], seed=self.job["seed"] * 100 + self.rank)
        if self.job["scenario"] != "random" and self.rank == victim(self.job):
            made = Hooked(made, self)
        return made

    def may_be_lost(self, phase: str) -> None:
        """Here, if the job says so; once."""
        if phase == self.doom and self.rank == victim(self.job):
            self.doom = ""
            os.kill(os.getpid(), signal.SIGKILL if self.job["scenario"] == "killed" else signal.SIGSTOP)

    def join(self, layout: ExpertLayout) -> None:
        """A Migrator; the next one after another stopped uses the same transport."""
        slots = int(self.rng.integers(1, PER_RANK + 1))
        self.migrator = Migrator(
            self.stores,
            layout,
            rank=self.rank,
            transport=self.transport,
            agreement=self.agreement,
            tables=self.tables,
            staging=slots * sum(SIZES.values()),
            on_install=lambda layer, layout: self.may_be_lost("installing"),
            backup=self.shelf,
            reference=self.reference,
            deadline=1.0 if self.job.get("faults") else 30.0 if self.job["scenario"] == "random" else 10.0,
        )

    def random_layout(self) -> ExpertLayout:
        """Pairs on a rank, empty slots; ranks that are gone hold nothing."""
        places = np.flatnonzero(np.isin(np.arange(self.size * PER_RANK) // PER_RANK, self.live))
        rows = np.full((LAYERS, self.size * PER_RANK), -1)
        for row in rows:
            spare = self.rng.integers(-1, EXPERTS, len(places) - EXPERTS)
            row[places] = self.rng.permutation(np.concatenate([np.arange(EXPERTS), spare]))
        return ExpertLayout(rows, EXPERTS, topology=self.topology)

    # ---- passes ------------------------------------------------------------------------------------------------------

    def one_pass(self) -> None:
        """Poll, then a forward pass."""
        if _words.word(self.migrator.status.migration, _words.MOVING, 1) == self.migrator.progress:
            self.may_be_lost("staged")
        with self.between:
            rows = self.migrator.poll()
        self.passes += 1
        self.installed += len(rows)
        if self.wrong:
            raise SystemExit(f"rank {self.rank}, pass {self.passes}: {self.wrong}")
        if self.migrator.status.phase != "lost":
            self.forward()

    def forward(self) -> None:
        """Where each rank sends tokens, and whether they meet their expert there; the same layout in the same pass."""
        if self.migrator.status.phase == "moving":
            self.may_be_lost("forward")
        layer = self.passes % LAYERS
        digest = int(self.migrator.layout.digest[:15], 16)
        own = torch.tensor([digest, self.passes, *self.targets(layer).tolist()])
        told = [torch.empty_like(own) for _ in self.live]
        try:
            self.traffic_of_live(told, own)
        except RuntimeError:
            return  # a rank is gone; the agreement says so soon
        if any(each[0] != digest or each[1] != self.passes for each in told):
            raise SystemExit(f"rank {self.rank}: layouts of one pass differ: {[each[:2].tolist() for each in told]}")
        for sender, each in zip(self.live, told, strict=True):
            self.check(layer, each[2:].numpy(), f"tokens of rank {sender}")

    def traffic_of_live(self, told: list[torch.Tensor], own: torch.Tensor) -> None:
        """What each rank that lives says."""
        torch_names: Any = dist.distributed_c10d
        options = torch_names.AllgatherOptions()
        options.timeout = timedelta(seconds=self.patience)
        self.traffic.allgather([told], [own], options).wait()

    def targets(self, layer: int) -> torch.Tensor:
        """A slot for each expert, as dispatch chooses it."""
        return topk_to_slots(torch.arange(EXPERTS)[:, None], self.tables.layer(layer)).reshape(-1)

    def check(self, layer: int, slots: np.ndarray[Any, Any], whose: str) -> None:
        """Slot by expert: those of this rank hold it."""
        for expert, slot in enumerate(slots.tolist()):
            local = slot - self.rank * PER_RANK
            if 0 <= local < PER_RANK and not self.holds(layer, local, expert):
                raise SystemExit(f"rank {self.rank}, {whose}: slot {slot} of layer {layer} does not hold {expert}")

    def holds(self, layer: int, local: int, expert: int) -> bool:
        """Whether a slot's bytes are the expert's, all of them."""
        rows = [self.stores[layer].row(name, local).numpy() for name in SIZES]
        return np.array_equal(np.concatenate(rows), LABELS[layer, expert])

    def look(self) -> None:
        """Every slot of this rank."""
        first = self.rank * PER_RANK
        own = self.migrator.layout.physical_to_logical_map[:, first : first + PER_RANK]
        for layer, local in np.argwhere(own >= 0).tolist():
            if not self.holds(layer, local, own[layer, local]):
                raise SystemExit(f"rank {self.rank}: slot {first + local} of layer {layer}: not {own[layer, local]}")
        if self.tables.layout != self.migrator.layout:
            raise SystemExit(f"rank {self.rank}: tables are not in the live layout")

    def watch_all_the_time(self) -> None:
        """Through the tables, whenever no install is under way: workers must not write where tokens go."""
        while self.watching:
            with self.between:
                try:
                    self.check(self.looks % LAYERS, self.targets(self.looks % LAYERS).numpy(), "watch")
                    self.look()
                except SystemExit as error:
                    self.wrong = self.wrong or str(error)
            self.looks += 1
            time.sleep(0.001)

    def until_idle(self, most: int = 1 << 30) -> None:
        """Passes until the migration is over, or so many."""
        end = time.monotonic() + 60
        while not self.migrator.idle and self.migrator.status.phase != "lost" and most > 0:
            if time.monotonic() > end:
                raise SystemExit(f"rank {self.rank} hangs: {self.migrator.status}")
            self.one_pass()
            most -= 1

    # ---- what happens ------------------------------------------------------------------------------------------------

    def random_migrations(self) -> None:
        """One after the other."""
        for number in range(self.job["migrations"]):
            self.one_migration()
            if number % 20 == 19:  # another Migrator on the same transport
                if self.migrator.stop(10.0) is not True:
                    raise SystemExit(f"rank {self.rank} does not stop: {self.migrator.status}")
                self.join(self.migrator.layout)

    def one_migration(self) -> None:
        """With something that goes wrong or not, the same on all ranks."""
        target, other = self.random_layout(), self.random_layout()
        kind = str(
            self.rng.choice(
                ["plain", "plain", "late", "slow", "hiccup", "none", "disagree", "raises", "pause", "finish"]
            )
        )
        culprit, after = int(self.rng.choice(self.live)), int(self.rng.integers(0, LAST_PASS))
        mine = self.rank == culprit
        before = self.migrator.layout

        def work_out(live: ExpertLayout) -> ExpertLayout | None:
            if mine and kind == "slow":
                time.sleep(0.02)
            if mine and kind == "raises":
                raise ValueError("on purpose")
            return None if kind == "none" else other if mine and kind == "disagree" else target

        if kind == "late":  # the others wait for it
            for _ in range(after):
                if mine:
                    self.one_pass()
                else:
                    if self.migrator.idle:
                        self.migrator.start(work_out)
                    self.one_pass()
            if self.migrator.idle:
                self.migrator.start(work_out)
        else:
            self.migrator.start(work_out if after % 2 or kind != "plain" else target)
        if kind == "hiccup":
            self.until_idle(after)
            if mine:  # others' deadlines pass where reads go wrong anyway
                self.stop_for(1.5 if self.job.get("faults") else 0.2)
        if kind in ("pause", "finish"):
            self.until_idle(after)
            with self.between:
                self.migrator.pause(finish=kind == "finish")
            self.look()
            self.migrator.resume()
        self.until_idle()
        self.look()
        cause = self.migrator.status.cause
        self.causes[cause] += 1
        expected = {"disagree": {"disagree"}, "raises": {"plan"}, "pause": {"paused", ""}}.get(kind, {""})
        if cause not in expected and not (self.job.get("faults") and cause in ENDS):
            raise SystemExit(f"rank {self.rank}: {kind} ended as {self.migrator.status}")
        if not cause and kind != "none" and self.migrator.layout != target:
            raise SystemExit(f"rank {self.rank}: {kind} did not reach its target")
        if kind in ("none", "disagree", "raises") and self.migrator.layout != before:
            raise SystemExit(f"rank {self.rank}: {kind} moved experts")

    def stop_for(self, seconds: float) -> None:
        """As if the machine had no time for this process."""
        os.posix_spawn("/bin/sh", ["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"], os.environ)
        os.kill(os.getpid(), signal.SIGSTOP)

    def loss(self) -> None:
        """A rank is killed or stopped some passes into a migration; the others go on without it."""
        Path(self.folder, f"pid{self.rank}").write_text(str(os.getpid()))
        gone, at = victim(self.job), self.job["at"]
        for _ in range(2):
            self.start_random()
            self.until_idle()
        self.doom = at
        self.start_random()
        if at in ("pausing", "stopping"):
            self.until_idle(int(self.rng.integers(0, LAST_PASS)))
            self.lose_in_pause(at)
        if self.migrator.status.phase == "stopped":
            self.out = self.rank == gone
            self.wake(gone)
            return
        while self.migrator.status.phase != "lost":
            try:
                self.one_pass()
            except MigrationError:
                self.doubt = True
            if self.migrator.idle:
                self.start_random()
        self.out = self.rank == gone
        if self.out:
            return
        self.live.remove(gone)
        self.rejoin()
        self.look()
        held = self.held()
        for _ in range(self.job["migrations"]):
            target = self.random_layout()
            self.migrator.start(target)
            self.until_idle()
            if self.migrator.status.cause == "deadline" and not self.transport.caps.stops_late_writes:
                self.wake(gone)  # as long as it is stopped, what was read from it keeps its staging
                self.migrator.start(target)
                self.until_idle()
            if self.migrator.layout != target:
                raise SystemExit(f"rank {self.rank}: {self.migrator.status}")
            self.look()
        if held & set(self.shelf.given):
            raise SystemExit(f"rank {self.rank}: from the backup though a rank held it: {held & set(self.shelf.given)}")
        self.wake(gone)
        self.look()

    def wake(self, gone: int) -> None:
        """Let a stopped rank go on: what it was asked for arrives now, if nothing has stopped it."""
        if self.job["scenario"] == "stopped" and self.rank == 0 and not self.woken:
            self.woken = True
            os.kill(int(Path(self.folder, f"pid{gone}").read_text()), signal.SIGCONT)
            time.sleep(0.5)

    def start_random(self) -> None:
        """A migration, worked out on the worker."""
        target = self.random_layout()

        def work_out(live: ExpertLayout) -> ExpertLayout:
            self.may_be_lost("planning")
            return target

        self.migrator.start(work_out)

    def lose_in_pause(self, at: str) -> None:
        """One rank does not come to a pause, or to the one in a stop; the others hear of it."""
        self.may_be_lost(at)
        with self.between:
            if at == "stopping":
                self.migrator.stop(10.0)
                return
            try:
                self.migrator.pause()
            except AgreementError:
                return
            raise SystemExit(f"rank {self.rank}: a pause without all ranks")

    def held(self) -> set[tuple[int, int]]:
        """(layer, expert) that ranks which live hold."""
        rows = self.migrator.layout.physical_to_logical_map.reshape(LAYERS, self.size, PER_RANK)[:, self.live]
        return {(layer, expert) for layer in range(LAYERS) for expert in rows[layer].ravel().tolist() if expert >= 0}

    def rejoin(self) -> None:
        """Go on with the ranks that live."""
        member, size = self.live.index(self.rank), len(self.live)
        words, self.traffic = (
            ranks.gloo_group(self.folder, member, size, name=f"{name} of {size}") for name in ("words", "traffic")
        )
        self.patience = 30.0
        with self.between:
            self.migrator.rejoin(GroupAgreement(words, deadline=30.0))
        self.passes = 0

    def end(self) -> None:
        """The last word of the thread that looks."""
        self.watching = False
        self.watch.join(10.0)
        if self.wrong:
            raise SystemExit(f"rank {self.rank}: {self.wrong}")

    def answer(self) -> dict[str, Any]:
        """For the parent."""
        return {
            "layout": self.migrator.layout.digest,
            "installed": self.installed,
            "causes": dict(sorted(self.causes.items())),
            "passes": self.passes,
            "looks": self.looks,
            "doubt": self.doubt,
            "out": self.out,
        }


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except AgreementError as error:
        raise SystemExit(f"{error}") from error
