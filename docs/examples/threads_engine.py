"""An engine in one process: four ranks as threads, each with tokens of its own that an all-to-all takes to the experts.

    python docs/examples/threads_engine.py

What examples/small_engine.py does not show: mode "weighted", in which each rank sends its tokens to the ranks of their
experts, shares of replicas that are installed with each layer, and experts of several tensors. Every token is compared
with the experts as they are in the checkpoint.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

import eplb_core as eplb
from eplb_core.testing import LocalAgreement, LocalCopy

LAYERS, EXPERTS, RANKS, SLOTS, HIDDEN, WIDTH, TOKENS, TOP_K, PASSES = 3, 16, 4, 5, 32, 24, 64, 2, 120
TOPOLOGY = eplb.Topology(num_ranks=RANKS)
SEED = torch.Generator().manual_seed(0)
W13 = torch.randn(LAYERS, EXPERTS, 2 * WIDTH, HIDDEN, generator=SEED) / HIDDEN**0.5  # the checkpoint
W2 = torch.randn(LAYERS, EXPERTS, HIDDEN, WIDTH, generator=SEED) / WIDTH**0.5
ROUTER = torch.randn(LAYERS, HIDDEN, EXPERTS, generator=SEED)


def expert(tokens: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """SwiGLU of tokens `[n, H]`, with the weights of one expert or of one for each token."""
    gate, up = (w13 @ tokens[..., None])[..., 0].chunk(2, dim=-1)
    return (w2 @ (torch.nn.functional.silu(gate) * up)[..., None])[..., 0]


class Exchange:
    """The collectives of ranks that are threads."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(RANKS)
        self.board: list[Any] = [None] * RANKS

    def gather(self, rank: int, value: Any) -> list[Any]:
        """Every rank's value."""
        self.board[rank] = value
        self.barrier.wait()
        values = list(self.board)
        self.barrier.wait()
        return values

    def sum(self, rank: int, counts: torch.Tensor) -> None:
        """Over the ranks, in place."""
        counts.copy_(torch.stack(self.gather(rank, counts.clone())).sum(0))


class Rank:
    """One rank, on a thread of its own."""

    def __init__(self, rank: int, exchange: Exchange, agreement: LocalAgreement) -> None:
        self.rank, self.exchange = rank, exchange
        layout = eplb.ExpertLayout.trivial(LAYERS, EXPERTS, num_slots=RANKS * SLOTS, topology=TOPOLOGY)
        self.w13 = torch.zeros(LAYERS, SLOTS, 2 * WIDTH, HIDDEN)
        self.w2 = torch.zeros(LAYERS, SLOTS, HIDDEN, WIDTH)
        resolver = eplb.SlotResolver(layout, rank)
        for layer in range(LAYERS):
            for slot, name in enumerate(resolver.local_experts(layer)):
                self.w13[layer, slot], self.w2[layer, slot] = W13[layer, name], W2[layer, name]
        self.stores = [eplb.ExpertStore({"w13": w13, "w2": w2}) for w13, w2 in zip(self.w13, self.w2, strict=True)]
        self.reference = self.verified(layout, None)
        self.load = eplb.LoadCounter(LAYERS, EXPERTS, windows=8)
        tables = eplb.DispatchTables(layout, rank=rank, mode="weighted", load=self.load)
        self.tables = [tables.layer(layer) for layer in range(LAYERS)]
        self.migrator = eplb.Migrator(
            self.stores,
            layout,
            rank=rank,
            transport=LocalCopy(),
            agreement=agreement,
            tables=tables,
            reference=self.reference,
        )

    def verified(self, layout: eplb.ExpertLayout, reference: Any) -> Any:
        """What each expert's weights must print from now on; raises if some slot's do not."""
        prints = self.exchange.gather(self.rank, eplb.fingerprints(self.stores))
        report = eplb.verify_weights(prints, layout, reference=reference)
        if report.faults:
            raise RuntimeError(str(report.faults[0]))
        return report.by_expert

    def experts(self, layer: int, tokens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """What the experts make of each token, `[T, K, H]`: to their ranks, and back."""
        answers = tokens.new_zeros(TOKENS, TOP_K, HIDDEN)
        slots = eplb.topk_to_slots(chosen, self.tables[layer])
        back = []
        for their_tokens, their_slots in self.exchange.gather(self.rank, (tokens, slots)):
            row, column = (their_slots // SLOTS == self.rank).nonzero(as_tuple=True)
            mine = their_slots[row, column] % SLOTS
            back.append((row, column, expert(their_tokens[row], self.w13[layer, mine], self.w2[layer, mine])))
            self.computed += len(row)
        for answer in self.exchange.gather(self.rank, back):
            row, column, values = answer[self.rank]
            answers[row, column] = values
        return answers

    def forward(self, number: int) -> None:
        """A pass over this rank's tokens, whose topic changes every 60 passes."""
        traffic = torch.Generator().manual_seed(number * RANKS + self.rank)
        tokens = torch.randn(TOKENS, HIDDEN, generator=traffic)
        liked = torch.zeros(EXPERTS)
        liked[number // 60 * 2 : number // 60 * 2 + 2] = 12.0
        for layer in range(LAYERS):
            weights, chosen = (tokens @ ROUTER[layer] + liked).softmax(-1).topk(TOP_K)
            right = expert(tokens[:, None].expand(-1, TOP_K, -1), W13[layer, chosen], W2[layer, chosen])
            made = self.experts(layer, tokens, chosen)
            torch.testing.assert_close(made, right, rtol=1e-4, atol=1e-4)
            tokens = tokens + (made * weights[..., None]).sum(1)

    def start(self) -> None:
        """Begin a migration; loads are those of all ranks, so all decide alike."""
        loads = self.load.snapshot(all_reduce=lambda counts: self.exchange.sum(self.rank, counts))

        def target(live: eplb.ExpertLayout) -> eplb.Target | None:  # on the Migrator's worker
            windows = loads.numpy()
            placed = eplb.place(windows, TOPOLOGY, num_slots=RANKS * SLOTS, current=live)
            verdict = eplb.should_rebalance(live, windows, placed, passes_since=20)
            layout = live.replace(placed.layout, verdict.layers)
            return eplb.Target(layout, eplb.replica_shares(layout, windows)) if verdict else None

        self.migrator.start(target)

    def run(self) -> None:
        """Passes to the end."""
        installed, even = 0, []
        for number in range(PASSES):
            installed += len(self.migrator.poll())
            self.computed = 0
            self.forward(number)
            loads = self.exchange.gather(self.rank, self.computed)
            even.append(sum(loads) / RANKS / max(loads))
            if number % 5 == 4:
                self.load.roll()
            if number % 20 == 19 and self.migrator.idle:
                self.start()
        live = self.migrator.pause(finish=True)
        self.verified(live, self.reference)
        if not self.migrator.stop(10.0):
            raise RuntimeError("a read is still under way")
        if self.rank == 0:
            before, after = sum(even[:20]) / 20, sum(even[40:60]) / 20
            print(f"balancedness {before:.2f} before the first migration, {after:.2f} after it")
            print(f"{installed} layers installed, every token right")


def main() -> int:
    torch.set_num_threads(1)
    eplb.warm_up()
    exchange, failed = Exchange(), []

    def rank_main(rank: int, agreement: LocalAgreement) -> None:
        try:
            Rank(rank, exchange, agreement).run()
        except BaseException:
            failed.append(rank)
            exchange.barrier.abort()  # nobody waits for this rank
            agreement.leave()
            raise

    members = enumerate(LocalAgreement.group(RANKS))
    threads = [threading.Thread(target=rank_main, args=member) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
