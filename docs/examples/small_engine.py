"""The smallest engine: four processes, every call of docs/guide.md, and a rank that dies.

    python docs/examples/small_engine.py            # loads drift, experts follow; every token is compared
    python docs/examples/small_engine.py --kill     # ... and rank 1 dies in pass 130; the others go on

Every rank holds all tokens and adds up what all ranks computed (mode "row"). An expert is a vector of whole numbers
that is added to the tokens that chose it, so sums are exact whoever makes them, and a token is right or wrong.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import tempfile
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

import eplb_core as eplb
from eplb_core.testing import shifted_layout

dist: Any = torch.distributed  # its type hints leave stores and groups out

LAYERS, EXPERTS, RANKS, SLOTS, HIDDEN, TOKENS, TOP_K, PASSES = 3, 8, 4, 3, 16, 32, 2, 240  # SLOTS: of a rank
DIES, DIES_AT = 1, 130
TOPOLOGY = eplb.Topology(num_ranks=RANKS)
SEED = torch.Generator().manual_seed(7)
CHECKPOINT = torch.randint(64, (LAYERS, EXPERTS, HIDDEN), generator=SEED).double()
ROUTER = torch.randn(LAYERS, HIDDEN, EXPERTS, generator=SEED, dtype=torch.float64)


class Engine:
    """One rank. The numbers in comments are those of docs/guide.md."""

    def __init__(self, rank: int, store: Any, folder: str) -> None:
        self.rank, self.store, self.number = rank, store, 0
        eplb.warm_up()
        self.meet("start", list(range(RANKS)))
        layout = shifted_layout(eplb.ExpertLayout.trivial(LAYERS, EXPERTS, num_slots=RANKS * SLOTS, topology=TOPOLOGY))
        self.weights = torch.zeros(LAYERS, SLOTS, HIDDEN, dtype=torch.float64)
        resolver = eplb.SlotResolver(layout, rank)  # 1: which rows does each expert fill?
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                for row in resolver.local_slots(layer, expert):
                    self.weights[layer, row] = CHECKPOINT[layer, expert]
        self.stores = [eplb.ExpertStore({"weights": layer}) for layer in self.weights]  # 2: what is indexed by slot
        self.reference = self.verified(layout)  # 3: do weights and layout match?
        self.load = eplb.LoadCounter(LAYERS, EXPERTS, windows=4)  # 4
        tables = eplb.DispatchTables(layout, rank=rank, mode="row", load=self.load)  # 5
        tables.warm_up(num_columns=TOP_K, dtype=torch.int64)
        self.tables = [tables.layer(layer) for layer in range(LAYERS)]
        backup = eplb.HostBackup.save(folder, self.stores, layout, rank=rank, agreement=self.agreement)
        self.transport = eplb.SharedMemory()
        self.migrator = eplb.Migrator(  # 7: from here on it alone installs
            self.stores,
            layout,
            rank=rank,
            transport=self.transport,
            agreement=self.agreement,
            tables=tables,
            backup=backup,
            reference=self.reference,
        )

    def meet(self, when: str, members: list[int]) -> None:
        """Groups of `members` alone: they need no group that all ranks are in, so those that live can make them."""
        self.members = members
        self.store.set(f"{when}/{self.rank}", "here")  # ranks come late, or see a death late: the store waits longer
        self.store.wait([f"{when}/{rank}" for rank in members])

        def group(name: str) -> tuple[Any, Any]:
            store = dist.PrefixStore(f"{when}/{name}", self.store)
            return dist.ProcessGroupGloo(store, members.index(self.rank), len(members), timedelta(seconds=20)), store

        self.group, _ = group("passes")
        alone, store = group("agreement")
        self.agreement = eplb.GroupAgreement(alone, deadline=20.0, store=store)

    def verified(self, layout: eplb.ExpertLayout, reference: Any = None) -> Any:
        """Prints of all ranks against the layout; returns what each expert's must be from now on."""
        mine = eplb.fingerprints(self.stores)
        # A rank that is gone has empty slots: any prints do.
        prints = torch.zeros(RANKS, *mine.shape, dtype=torch.int64)
        prints[self.rank] = mine
        self.sum(prints)
        report = eplb.verify_weights(prints, layout, reference=reference)
        if report.faults:
            raise SystemExit(f"rank {self.rank}: {report.faults[0]}")
        return report.by_expert

    def sum(self, tensor: torch.Tensor) -> None:
        """Over the ranks that live, in place."""
        self.group.allreduce([tensor]).wait()

    def forward(self) -> None:
        """A pass over tokens whose topic changes every 80 passes, beside what one process computes without slots."""
        traffic = torch.Generator().manual_seed(self.number)
        tokens = torch.randint(64, (TOKENS, HIDDEN), generator=traffic).double()
        right, topic = tokens, self.number // 80
        liked = torch.zeros(EXPERTS, dtype=torch.float64)
        liked[[topic % EXPERTS, (topic + 1) % EXPERTS]] = torch.tensor([90.0, 60.0], dtype=torch.float64)
        for layer in range(LAYERS):
            experts = (tokens @ ROUTER[layer] + liked).topk(TOP_K).indices
            slots = eplb.topk_to_slots(experts, self.tables[layer])  # 6: and counted on the way
            here = slots // SLOTS == self.rank
            part = (self.weights[layer, slots % SLOTS] * here[..., None]).sum(1)
            self.sum(part)
            right = (right + CHECKPOINT[layer, experts].sum(1)) % 64
            tokens = (tokens + part) % 64
        if not torch.equal(tokens, right):
            raise SystemExit(f"rank {self.rank}: wrong tokens in pass {self.number}")

    def start(self, alive: list[bool] | None = None) -> None:
        """9: begin a migration.

        Loads are summed over ranks, so that all decide on the same ones, even after a pass that only some finished.
        """
        loads = self.load.snapshot(all_reduce=self.sum)

        def target(live: eplb.ExpertLayout) -> eplb.ExpertLayout | None:  # on the Migrator's worker
            windows, slots = loads.numpy(), RANKS * SLOTS  # slots of ranks that are out count too
            if alive is not None:
                return eplb.place(windows, TOPOLOGY, num_slots=slots, current=live, active_ranks=alive).layout
            placement = eplb.place(windows, TOPOLOGY, num_slots=slots, current=live)
            verdict = eplb.should_rebalance(live, windows, placement, passes_since=40)
            return live.replace(placement.layout, verdict.layers) if verdict else None

        self.migrator.start(target)

    def run(self, kill: bool) -> None:
        """Passes to the end, whoever dies on the way."""
        installed = 0
        while self.number < PASSES:
            if kill and (self.rank, self.number) == (DIES, DIES_AT):
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                installed += len(self.migrator.poll())  # 8: before the pass, on every rank
                self.forward()
            except RuntimeError:  # the engine's own exchange failed, or MigrationError: do not run the pass
                self.recover()
                continue
            self.number += 1
            if self.number % 10 == 0:
                self.load.roll()
            if self.number % 40 == 0 and self.migrator.idle and len(self.members) == RANKS:
                self.start()
        self.migrator.pause(finish=True)  # 10: on every rank, nobody touches slots from here on
        self.verified(self.migrator.layout, self.reference)
        if not self.migrator.stop(10.0):
            raise SystemExit(f"rank {self.rank}: a read is still under way")
        self.transport.close()
        print(f"rank {self.rank}: {installed} layers installed in passes, every token right", flush=True)

    def recover(self) -> None:
        """Go on with the ranks that live, on a layout in which the one that is gone holds nothing."""
        del self.group  # closes its connections, so that a rank that waits for this one need not wait for the time-out
        members = [int(rank) for rank in self.store.get("members").decode().split()]  # waits for the launcher
        self.meet("again", members)
        self.migrator.rejoin(self.agreement)
        self.start(alive=[rank in members for rank in range(RANKS)])
        while not self.migrator.idle:
            self.migrator.poll()
        if self.migrator.status.cause:  # tokens would still be sent to the rank that is gone
            raise SystemExit(f"rank {self.rank}: {self.migrator.status.reason}")
        self.verified(self.migrator.layout, self.reference)
        passes = torch.zeros(RANKS, dtype=torch.int64)  # some ranks may have finished the pass in which others failed
        passes[self.rank] = self.number
        self.sum(passes)
        self.number = int(passes[members].min())


def rank_main(rank: int, port: int, folder: str, kill: bool) -> None:
    torch.set_num_threads(1)
    Engine(rank, dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=300)), folder).run(kill)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kill", action="store_true", help=f"rank {DIES} dies in pass {DIES_AT}")
    kill = parser.parse_args().kill
    eplb.warm_up()  # here first: what one process has compiled the others load
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=rank_main, args=(rank, store.port, folder, kill)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        if kill:
            ranks[DIES].join()
            store.set("members", " ".join(str(rank) for rank in range(RANKS) if rank != DIES))
        for process in ranks:
            process.join()
    ended = [process.exitcode for process in ranks]
    right = [-signal.SIGKILL if kill and rank == DIES else 0 for rank in range(RANKS)]
    return 0 if ended == right else 1


if __name__ == "__main__":
    raise SystemExit(main())
