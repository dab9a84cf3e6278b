"""One rank: what an engine calls of the library, and when. The calls are numbered as in docs/guide.md."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

import eplb_core as eplb
from benchmarks.engine.exchange import Group, add_up, form_group, gather
from benchmarks.engine.forward import Forward, captured
from benchmarks.engine.model import Dense, ModelConfig
from benchmarks.engine.requests import Feed
from benchmarks.engine.watch import MOST_TRANSFERS, Watch
from benchmarks.engine.weights import empty_experts, load_experts, make_dense
from eplb_core.dispatch.counter import Snapshot
from eplb_core.loading.transports import LocalCopy
from eplb_core.placement.affinity.pairs import check_pairs
from eplb_core.placement.affinity.sends import predict_sends

MODES = ("off", "sync", "async")
POLICIES = ("auto", "place")
WINDOWS = 8
"""Windows of load that a decision looks at."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What every rank is started with."""

    folder: Path
    """Where groups meet, and checkpoints and backups lie."""
    mode: str = "async"
    config: ModelConfig = field(default_factory=ModelConfig)
    num_rows: int = 4
    """Sequences of a rank's batch."""
    slots_per_rank: int = 6
    seed: int = 1
    device: str = "cpu"
    """`cuda:0`: all ranks on one GPU; `cuda`: one a rank, as far as there are any."""
    threads: bool = False
    """Ranks are threads of one process, each on its own stream, and not processes."""
    synthetic: bool = False
    """Weights come straight from the seed, where a checkpoint would be too large."""
    window: int = 8
    """Passes of a window of load."""
    interval: int = 64
    """Passes between two decisions."""
    policy: str = "auto"
    """Who decides: a `Balancer` that remembers all windows, or `place` and `should_rebalance` for the last ones."""
    nodes: int = 1
    """Nodes that the ranks lie in, where these can be shared out evenly."""
    dispatch: Literal["weighted", "near"] = "weighted"
    """Mode of the tables; "near" also counts pairs, by which the Balancer places."""
    move_cost: float = 0.01
    """Of "auto": what a transfer costs, in windows of its layer's time."""
    always: bool = False
    """Every decision is a placement from nothing and is carried out, worth it or not."""
    deadline: float = 10.0
    """Seconds after which a rank that does not answer counts as gone."""
    weight_hosts: Path | None = None
    """Folder of the weight hosts' sockets, where the weights are shared."""
    faults: dict[str, float] | None = None
    """Shares of reads between ranks that go wrong; see `eplb_core.Faulty`."""
    backups: bool = False
    """Keep every expert in files too, for ranks that die."""

    def checkpoint(self, version: int) -> Path | int:
        """The experts of a version of the weights."""
        return self.seed + version if self.synthetic else self.folder / f"experts-{version}"

    def device_of(self, worker: int) -> torch.device:
        """Where a worker computes."""
        device = torch.device(self.device)
        if device.type == "cuda" and device.index is None:
            return torch.device("cuda", worker % torch.cuda.device_count())
        return device

    def make_transport(self) -> eplb.Transport:
        """How ranks read each other's slots."""
        if self.device != "cpu":
            return eplb.CudaIpc()
        return LocalCopy() if self.threads else eplb.SharedMemory()

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and of what is sent."""
        return torch.float32 if self.device == "cpu" else torch.bfloat16


class Membership(NamedTuple):
    """Who makes up the engine from now on; every member is told the same."""

    generation: int
    workers: tuple[int, ...]
    """Process that is member i."""
    ranks: tuple[int, ...]
    """EP rank of member i: i itself, but where ranks are gone from a frame."""
    kept: tuple[int, ...]
    """In a new frame: the former EP rank of rank i, -1 = new, so its slots are empty."""
    version: int
    """Of the weights."""


class Lost(Exception):
    """Another rank did not come; this one waits for a new membership."""


class Rank:
    """A rank's weights, tables and Migrator, and its passes."""

    def __init__(self, setup: Setup, worker: int) -> None:
        self.setup, self.worker, self.device = setup, worker, setup.device_of(worker)
        config = setup.config
        weights = make_dense(config, setup.seed, dtype=setup.dtype, device=self.device)
        self.dense = Dense(config, weights, setup.num_rows)
        self.client: eplb.LayoutClient | None = None
        self.migrator: eplb.Migrator | None = None
        self.backup: eplb.HostBackup | None = None
        self.tensors: list[dict[str, torch.Tensor]] = []
        self.group: Group | None = None
        self.retiring: int | None = None
        self._layout: eplb.ExpertLayout | None = None
        self._reference: Any = None
        self._attached: Any = None
        self._former_groups: list[Group] = []
        self._since = self._rolled = 0
        self._watch: Watch | None = None
        # A transport outlives Migrators, and tensors of staging outlive both: nothing is registered twice.
        self._staging: torch.Tensor | None = None
        transport = setup.make_transport()
        self.transport = eplb.Faulty(transport, setup.faults, seed=worker) if setup.faults else transport

    @property
    def layout(self) -> eplb.ExpertLayout:
        """The live layout: the Migrator's, while there is one."""
        layout = self._layout if self.migrator is None else self.migrator.layout
        if layout is None:
            raise ValueError("this rank belongs to no frame yet; `form` comes first")
        return layout

    # ---- who is there ----------------------------------------------------------------------------------------------

    def form(self, who: Membership) -> None:
        """A new frame: at the start, and when ranks join or have left. Collective."""
        setup, config = self.setup, self.setup.config
        self._meet(who)
        self.rank = self.members.me
        layout = self._layout = self._agree(who)
        if not self.tensors:
            self._load(who)
        # Call 2. Views on the tensors that the passes compute with, made when nothing replaces these any more.
        self.stores = [eplb.ExpertStore(dict(layer)) for layer in self.tensors]
        # Call 4. The dispatch kernel counts into it; a window ends with `roll`.
        self.load = eplb.LoadCounter(config.num_layers, config.num_experts, windows=WINDOWS, device=self.device)
        # Call 5. Buffers that stay: whatever layout is installed later, captured graphs go on.
        self.tables = eplb.DispatchTables(
            layout, rank=self.rank, mode=setup.dispatch, device=self.device, load=self.load
        )
        self.tables.warm_up(config.top_k)
        self._reference = self.verify(reference=self._reference)
        self._save_backup(who.version)
        self.migrator = self._make_migrator(layout) if setup.mode == "async" else None
        self._build()
        self._since, self._rolled, self.retiring = 0, 0, None

    def _make_migrator(self, layout: eplb.ExpertLayout) -> eplb.Migrator:
        """Call 7. All memory, registration, addresses, threads and compilation are here; nothing of it comes later."""
        if self._staging is None:
            nbytes = self.setup.slots_per_rank * self.stores[0].slot_bytes
            self._staging = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return eplb.Migrator(
            self.stores,
            layout,
            rank=self.rank,
            transport=self.transport,
            agreement=self.agreement,
            tables=self.tables,
            record=self.client,
            staging=self._staging,
            backup=self.backup,
            reference=self._reference,
            deadline=self.setup.deadline,
        )

    def leave_frame(self) -> None:
        """Before a new frame, and before this rank leaves for good. Collective."""
        self._layout = self.layout
        if self.migrator is not None:
            self.migrator.stop(self.setup.deadline)
            self.migrator = None

    def regroup(self, who: Membership) -> None:
        """Ranks are gone: those that live go on in the same frame, with no slot on the others. Collective."""
        if self.migrator is None:
            raise Lost("without a Migrator an engine does not outlive a rank; start it anew")
        self._meet(who)
        live = self.migrator.rejoin(self.agreement)
        # The last pass may have reached some of them only: all go on from what one of them knows.
        self._watch = self._watch_of(live, pickle.loads(self.agreement.gather(self._known())[0])[2])
        self._since = self._rolled = 0
        loads = self.load.snapshot(all_reduce=add_up(self.members)).numpy()
        for _ in range(20):  # reads may fail here too
            self.migrator.start(lambda live: self._decide(live, loads, gone=True))
            self._finish(self.migrator)
            if not self.migrator.status.cause:
                break
        else:
            raise Lost(f"no way off the ranks that are gone: {self.migrator.status.reason}")
        self._build()

    def _finish(self, migrator: eplb.Migrator) -> None:
        """Passes without a forward: nobody may send tokens to a rank that is gone."""
        while not migrator.idle:
            migrator.poll()
            if migrator.status.phase == "lost":
                raise Lost(migrator.status.reason)
            time.sleep(2e-4)

    @property
    def members(self) -> Group:
        """Ranks that live."""
        if self.group is None:
            raise ValueError("this rank belongs to no frame yet; `form` comes first")
        return self.group

    def _meet(self, who: Membership) -> None:
        if self.group is not None:
            self._former_groups.append(self.group)  # what is left of a broken one may wait for peers: keep it
        self.who = who
        folder = self.setup.folder / f"group-{who.generation}"
        self.group = form_group(folder, who.workers.index(self.worker), len(who.workers), self.setup.deadline)
        self.agreement = eplb.GroupAgreement(self.group.words, self.setup.deadline, store=self.group.store)

    def _agree(self, who: Membership) -> eplb.ExpertLayout:
        """From ranks that serve already, else from the record of the weights' host, else the trivial layout."""
        size, nodes = len(who.workers), self.setup.nodes
        topology = eplb.Topology(size, 1 if size % nodes else nodes)
        if self.setup.weight_hosts is not None and self._layout is None:
            layout, state = self._ask_host(self.setup.weight_hosts, topology), None
        elif told := [blob for blob in self.agreement.gather(self._known()) if blob]:
            former, self._reference, state = pickle.loads(told[0])
            layout = former.resized(topology, who.kept)
        else:
            layout, state = first_layout(self.setup, topology), None
        self._watch = self._watch_of(layout, state)
        return layout

    def _known(self) -> bytes:
        """For ranks that come: the layout, what experts should hold, and what was seen of the load."""
        if self._layout is None:
            return b""
        return pickle.dumps((self._layout, self._reference, None if self._watch is None else self._watch.state()))

    def _watch_of(self, layout: eplb.ExpertLayout, state: dict[str, Any] | None) -> Watch | None:
        if self.setup.policy != "auto" or self.setup.always:
            return None
        return Watch(layout, self.setup.move_cost, state)

    def _ask_host(self, folder: Path, topology: eplb.Topology) -> eplb.ExpertLayout:
        """The layout that the shared weights are in, whoever moved them: this engine adopts it before it loads."""
        path = folder / f"rank{self.rank}.sock"
        self.client = eplb.LayoutClient(path, engine_id=f"engine-{self.worker}")  # open as long as the engine lives
        own = first_layout(self.setup, topology)
        return eplb.agree_on_layout(self.client, own=own, agreement=self.agreement)[0]

    def _build(self) -> None:
        self.load.recording(False)  # warming up and capturing is no traffic
        self.forward = Forward(self.dense, self.tensors, self.tables, self.members, self.who.ranks, self.setup.num_rows)
        self.load.recording(True)

    # ---- weights ---------------------------------------------------------------------------------------------------

    def _load(self, who: Membership) -> None:
        setup, layout = self.setup, self.layout
        if self.client is not None:
            shared: dict[str, torch.Tensor] = {}
            self._attached = eplb.attach_weights(self.client, shared, config=fingerprint_of(setup), layout=layout)
            names = ("w13", "w2")
            self.tensors = [
                {name: shared[f"{layer}.{name}"] for name in names} for layer in range(setup.config.num_layers)
            ]
            return
        self.tensors = empty_experts(setup.config, setup.slots_per_rank, dtype=setup.dtype, device=self.device)
        load_experts(setup.checkpoint(who.version), setup.config, self.tensors, layout, self.rank)

    def verify(self, *, reference: Any = None) -> Any:
        """Call 3. Compare what every slot holds with the layout; the next reference. Collective, between passes."""
        prints = gather(self.members, eplb.fingerprints(self.stores))
        of_ranks = [torch.zeros_like(prints[0])] * self.layout.topology.num_ranks  # ranks that are gone hold nothing
        for rank, one in zip(self.who.ranks, prints, strict=True):
            of_ranks[rank] = one
        report = eplb.verify_weights(of_ranks, self.layout, reference=reference)
        if not report.ok:
            raise ValueError(f"the weights do not match the layout\n{report}")
        return report.by_expert

    def _save_backup(self, version: int) -> None:
        if self.setup.backups:
            folder = self.setup.folder / f"backup-{version}"
            there = self.agreement.gather(b"1" if (folder / "whole").exists() else b"")
            if all(there):
                self.backup = eplb.HostBackup(folder)
                return
            self.backup = eplb.HostBackup.save(
                folder, self.stores, self.layout, rank=self.rank, agreement=self.agreement
            )
            (folder / "whole").touch()

    def update(self, version: int) -> None:
        """Call 10. New weights in the same tensors: nobody touches expert slots in the pause. Collective."""
        layout = self.layout if self.migrator is None else self.migrator.pause()
        self.who = self.who._replace(version=version)
        load_experts(self.setup.checkpoint(version), self.setup.config, self.tensors, layout, self.rank)
        self._reference = self.verify()
        self._save_backup(version)
        if self.migrator is not None:
            self.migrator.resume(reference=self._reference, backup=self.backup)

    # ---- passes ----------------------------------------------------------------------------------------------------

    def one_pass(self, number: int, feed: Feed, *, idle: bool = False) -> dict[str, Any]:
        """Compute one token of each row. The same number on every rank.

        Raises:
            Lost: A rank did not come.
        """
        start = time.perf_counter()
        installed: Sequence[int] = ()
        if number % self.setup.window == 0:
            self.load.roll()
            self._rolled += 1
        if self.migrator is not None:
            installed = self.migrator.poll()  # call 8: every pass, every rank; installs one layer at most
            if self.migrator.status.phase == "lost":
                raise Lost(self.migrator.status.reason)
        self._since += 1
        if self._since >= self.setup.interval and self.setup.mode != "off":
            self._rebalance()
        library = time.perf_counter()
        sampled = self.forward.run(feed, idle=idle)
        end = time.perf_counter()
        return {
            "sampled": sampled.tolist(),
            "installed": len(installed),
            "library_s": library - start,
            "pass_s": end - start,
            "retired": self.retiring is not None and self._is_retired(),
        }

    def received(self) -> list[int]:
        """(Token, expert) pairs that this rank has computed since the last call, by layer."""
        counts: list[int] = self.forward.received.tolist()
        self.forward.received.zero_()
        return counts

    def sent(self) -> tuple[int, int]:
        """What this rank sent since the last call: (token, layer)s to other nodes, each node once; all of them."""
        across, tokens = self.forward.sent.tolist()
        self.forward.sent.zero_()
        return across, tokens

    def predicted(self) -> float:
        """Sends per token of the live layout, as the pairs seen so far tell."""
        if self._watch is None or self._watch.pairs is None:
            return float("nan")
        layout, pairs = self.layout, self._watch.pairs
        checked = check_pairs(pairs, layout.num_layers, layout.num_experts)
        return float(predict_sends(layout, checked).sends.mean())

    def map_cost(self, calls: int) -> float:
        """Seconds of one `topk_to_slots`, on a GPU as part of a graph: the least of some batches of calls."""
        shape = (self.setup.num_rows, self.setup.config.top_k)
        ids = torch.zeros(shape, dtype=torch.int32, device=self.device)
        tables, best = self.tables.layer(0), float("inf")

        def batch() -> None:
            for _ in range(50):
                eplb.topk_to_slots(ids, tables)

        self.load.recording(False)
        run = batch if self.device.type == "cpu" else captured(batch, self.device)
        for _ in range(calls // 50):
            start = time.perf_counter()
            run()
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
            best = min(best, (time.perf_counter() - start) / 50)
        self.load.recording(True)
        return best

    def _rebalance(self) -> None:
        """Call 9. A pass number and agreed words decide when, never a clock: all ranks or none."""
        if self.migrator is None:
            self._move_at_once(self._decide(self.layout, self._take_load().numpy()))
        elif self.migrator.idle:
            snapshot = self._take_load()
            rank = self.retiring
            if rank is None:
                self.migrator.start(lambda live: self._decide(live, snapshot.numpy()))  # runs on the worker
            else:
                self.migrator.start(lambda live: self._retire(live, snapshot.numpy(), rank))

    def _take_load(self) -> Snapshot:
        """The windows since the last decision; enqueued, not waited for."""
        snapshot = self.load.snapshot(all_reduce=add_up(self.members))
        if self._watch is not None:
            pairs = None
            if self.setup.dispatch == "near":
                pairs = self.forward.pairs.clone()
                add_up(self.members)(pairs)
                self.forward.pairs.zero_()
            self._watch.see(snapshot, self._rolled, pairs)
        self._since = self._rolled = 0
        return snapshot

    def _decide(self, live: eplb.ExpertLayout, loads: Any, *, gone: bool = False) -> eplb.Target | None:
        """The next layout and the shares of replicas; equal on all ranks, because every input is.

        Args:
            live: What is to be left.
            loads: Windows `[T, L, E]`; T may be 0.
            gone: Ranks have just gone. Then every layer moves, worth it or not: a row that names a rank that is gone
                would send tokens there, even where its experts have other slots.
        """
        ranks = live.topology.num_ranks
        alive = np.isin(np.arange(ranks), self.who.ranks)
        if not len(loads):
            loads = np.ones((1, live.num_layers, live.num_experts), dtype=np.int64)
        if self._watch is not None and not gone:
            target = self._watch.propose(live, alive)
            return None if target == live else eplb.Target(target, eplb.replica_shares(target, loads))
        placement = eplb.place(
            loads,
            live.topology,
            num_slots=live.num_slots,
            current=None if self.setup.always else live,
            active_ranks=alive,
            dispatch="weighted",
            max_transfers=None if self.setup.always else MOST_TRANSFERS,
        )
        target = placement.layout
        if not gone and not self.setup.always:
            verdict = eplb.should_rebalance(
                live, loads, placement, active_ranks=alive, dispatch="weighted", passes_since=self.setup.interval
            )
            target = live.replace(placement.layout, verdict.layers)
        return None if target == live else eplb.Target(target, eplb.replica_shares(target, loads))

    def _retire(self, live: eplb.ExpertLayout, loads: Any, rank: int) -> eplb.Target | None:
        """The layout from which a rank may go at any moment; it serves on."""
        target = eplb.plan_removal(live, [rank], expert_load=loads if len(loads) else None)
        return None if target == live else eplb.Target(target)

    def _move_at_once(self, decision: eplb.Target | None) -> None:
        if decision is None:
            return
        self._layout = eplb.move_experts(
            self.stores,
            self.layout,
            decision.layout,
            rank=self.rank,
            transport=self.transport,
            agreement=self.agreement,
            tables=self.tables,
            record=self.client,
            reference=self._reference,
            deadline=self.setup.deadline,
        )
        self.tables.install(self._layout, shares=decision.shares)

    def _is_retired(self) -> bool:
        alive = np.arange(self.layout.topology.num_ranks) != self.retiring
        return len(eplb.lost_experts(self.layout, alive)) == 0

    def close(self) -> None:
        """After the last pass, together with the others."""
        self.leave_frame()
        self.transport.close()
        if self.client is not None:
            self.client.close()


def first_layout(setup: Setup, topology: eplb.Topology) -> eplb.ExpertLayout:
    """What an engine starts with that knows nothing of the load."""
    config, slots = setup.config, topology.num_ranks * setup.slots_per_rank
    return eplb.ExpertLayout.trivial(config.num_layers, config.num_experts, num_slots=slots, topology=topology)


def fingerprint_of(setup: Setup) -> dict[str, Any]:
    """What shapes the weights: a host and an engine must say the same."""
    config = setup.config
    return {"seed": setup.seed, "hidden": config.hidden, "width": config.expert_width, "dtype": str(setup.dtype)}
