"""An engine in plain NumPy, all ranks in one object, for the tests of docs/testing.md.

A slot's weights are the number of its expert. Replace the class by a few lines that call an engine of your own.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_core import ExpertLayout

Ints = npt.NDArray[np.int64]


class Engine:
    """Greedy placement, moves that read the old slots, and tokens that take turns among replicas."""

    def __init__(self, layout: ExpertLayout) -> None:
        self.num_experts, self.slots_per_rank = layout.num_experts, layout.slots_per_rank
        self.active = [True] * layout.topology.num_ranks
        self.map = layout.physical_to_logical_map.copy()
        self.weights = self.map.copy()
        self.make_tables()

    def rebalance(self, load: Ints, active: list[bool]) -> Ints:
        """Plan each layer, move, and return how many experts each rank received, `[R]`."""
        self.active = active
        new = np.stack([self.keep_slots(row, self.plan(tokens)) for row, tokens in zip(self.map, load, strict=True)])
        received = self.move(new)
        self.make_tables()
        return received

    def plan(self, load: Ints) -> list[list[int]]:
        """Deal out the experts of a layer, the busiest first, then replicas of what is busiest for each."""
        held: list[list[int]] = [[] for _ in self.active]
        count, each, total = [0] * self.num_experts, list(map(float, load)), [0.0] * len(held)

        def give(expert: int, ranks: list[int]) -> None:
            rank = min(ranks, key=lambda rank: total[rank])
            held[rank].append(expert)
            count[expert] += 1
            each[expert] = load[expert] / count[expert]
            total[rank] += each[expert]

        for expert in self.order(load):
            give(expert, self.ranks_with_room(held))
        for _ in range(self.slots_per_rank):
            for rank in self.ranks_with_room(held):
                choices = [expert for expert in range(self.num_experts) if self.may_hold(held[rank], expert)]
                if choices:
                    give(max(choices, key=lambda expert: each[expert]), [rank])
        return held

    def order(self, load: Ints) -> list[int]:
        """Experts that need a slot, the busiest first."""
        return sorted(range(self.num_experts), key=lambda expert: -load[expert])

    def ranks_with_room(self, held: list[list[int]]) -> list[int]:
        """Active ranks with a free slot."""
        return [rank for rank, alive in enumerate(self.active) if alive and len(held[rank]) < self.slots_per_rank]

    def may_hold(self, held: list[int], expert: int) -> bool:
        """No rank holds an expert twice."""
        return expert not in held

    def keep_slots(self, row: Ints, held: list[list[int]]) -> Ints:
        """Give experts slots of their ranks: those that stay on a rank keep theirs."""
        new = np.full_like(row, -1)
        for rank, experts in enumerate(held):
            first = rank * self.slots_per_rank
            slots, coming = range(first, first + self.slots_per_rank), list(experts)
            for slot in slots:
                if row[slot] in coming:
                    new[slot] = row[slot]
                    coming.remove(row[slot])
            free = [slot for slot in slots if new[slot] < 0]
            new[free[: len(coming)]] = coming
        return new

    def move(self, new: Ints) -> Ints:
        """Fill every slot whose expert changes from a slot that held it; count what came from another rank."""
        received = np.zeros(len(self.active), dtype=np.int64)
        before = self.weights.copy()  # all reads come before any write
        for layer, (old_row, new_row) in enumerate(zip(self.map, new, strict=True)):
            for rank in range(len(self.active)):
                own = range(rank * self.slots_per_rank, (rank + 1) * self.slots_per_rank)
                received[rank] += len({*new_row[own].tolist()} - {*old_row[own].tolist()} - {-1})
                for slot in own:
                    if new_row[slot] not in (-1, old_row[slot]):
                        self.weights[layer, slot] = before[layer, np.flatnonzero(old_row == new_row[slot])[0]]
        self.map = new
        return received

    def make_tables(self) -> None:
        """List the slots of each expert on active ranks, for each layer."""
        alive = np.repeat(self.active, self.slots_per_rank)
        self.tables = [
            [np.flatnonzero((row == expert) & alive) for expert in range(self.num_experts)] for row in self.map
        ]

    def slots_of(self, ids: Ints, rank: int, layer: int) -> Ints:
        """Map top-k ids `[tokens, top_k]` of a rank to slots; -1 stays."""
        slots = np.full_like(ids, -1)
        for at, expert in np.ndenumerate(ids):
            if expert >= 0:
                choices = self.tables[layer][expert]
                slots[at] = choices[(rank + at[0]) % len(choices)]
        return slots
