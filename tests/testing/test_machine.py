"""The machine passes the example engine and finds faults that users of engines reported (FAULTS, by their number)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from docs.examples.plain_engine import Engine
from eplb_core import ExpertLayout, Topology
from eplb_core.testing.machine import EngineMachine
from eplb_core.testing.strategies import layouts, topologies


class Right(EngineMachine):
    """The example engine."""

    kind = Engine

    def start(self, layout: ExpertLayout) -> None:
        self.engine = self.kind(layout)

    def rebalance(self, expert_load: Any, active: list[bool]) -> Any:
        return self.engine.rebalance(expert_load, active)

    def live_map(self) -> Any:
        return self.engine.map

    def dispatch(self, rank: int, layer: int, ids: Any) -> Any:
        return self.engine.slots_of(ids, rank, layer)

    def weights(self) -> Any:
        return self.engine.weights


def run(machine: type[EngineMachine], phases: tuple[Phase, ...] = (Phase.generate,), examples: int = 60) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            print_blob=False,
            max_examples=examples,
            stateful_step_count=8,
            phases=phases,
            database=None,
            derandomize=True,
            deadline=None,
            report_multiple_bugs=False,
        ),
    )


# ---- faults ----------------------------------------------------------------------------------------------------------


class A1PairsOnARank(Engine):
    """Packing looks only at load."""

    def may_hold(self, held: list[int], expert: int) -> bool:
        return True


class A13IdleLayersPile(Engine):
    """Without load all spare slots take expert 0: the largest of zeros is the first."""

    def may_hold(self, held: list[int], expert: int) -> bool:
        return expert not in held or (expert == 0 and not self.load.any())

    def plan(self, load: Any) -> Any:
        self.load = load
        return super().plan(load)


class A19LayersShareAMap(Engine):
    """Tokens of all layers use the tables of the first."""

    def slots_of(self, ids: Any, rank: int, layer: int) -> Any:
        return super().slots_of(ids, rank, 0)


class B5SlotsCountedByDistinctExperts(Engine):
    """A slot's number is its rank times the distinct experts of the first rank."""

    def make_tables(self) -> None:
        super().make_tables()
        stride = len({*self.map[0, : self.slots_per_rank].tolist()} - {-1})
        self.tables = [
            [slots // self.slots_per_rank * stride + slots % self.slots_per_rank for slots in row]
            for row in self.tables
        ]


class B12MapsAreNotUpdated(Engine):
    """Weights move, tokens go on as before."""

    def rebalance(self, load: Any, active: list[bool]) -> Any:
        before = self.tables
        received = super().rebalance(load, active)
        self.tables = before
        return received


class B15IdleExpertsGetNoSlot(Engine):
    """An expert without load is left out of the map."""

    def order(self, load: Any) -> list[int]:
        return [expert for expert in super().order(load) if load[expert] or not load.any()]

    def may_hold(self, held: list[int], expert: int) -> bool:
        return super().may_hold(held, expert) and bool(self.load[expert] or not self.load.any())

    def plan(self, load: Any) -> Any:
        self.load = load
        return super().plan(load)


class C1EachRankPicksItsOwn(Engine):
    """Right where ranks have tokens of their own, wrong where all have the same."""


class C7PaddingWraps(Engine):
    """-1 indexes from the end."""

    def slots_of(self, ids: Any, rank: int, layer: int) -> Any:
        return super().slots_of(ids % self.num_experts, rank, layer)


class C9MappedTwice(Engine):
    """Slots are taken for experts once more."""

    def slots_of(self, ids: Any, rank: int, layer: int) -> Any:
        slots = super().slots_of(ids, rank, layer)
        return super().slots_of(np.where(slots < self.num_experts, slots, ids), rank, layer)


class D10WeightsByTheFirstMap(Engine):
    """The weights are reloaded for the layout of the start."""

    def __init__(self, layout: ExpertLayout) -> None:
        super().__init__(layout)
        self.first = self.map.copy()

    def move(self, new: Any) -> Any:
        received = super().move(new)
        self.weights = np.where(self.first >= 0, self.first, self.weights)
        return received


class E9CountsSlots(Engine):
    """Every slot that changes is counted, also where the rank held its expert."""

    def move(self, new: Any) -> Any:
        changed = (self.map != new) & (new >= 0)
        super().move(new)
        return changed.reshape(len(new), len(self.active), -1).sum(axis=(0, 2))

    def keep_slots(self, row: Any, held: Any) -> Any:
        return super().keep_slots(np.full_like(row, -1), held)


class E13ReadsAfterWrites(Engine):
    """Ranks install while others still read: two that swap lose one expert."""

    def move(self, new: Any) -> Any:
        old, weights = self.map.copy(), self.weights
        received = super().move(new)
        self.weights = weights
        for layer, row in enumerate(new):
            for slot in np.flatnonzero((row != old[layer]) & (row >= 0)):
                weights[layer, slot] = weights[layer, np.flatnonzero(old[layer] == row[slot])[0]]
        return received


class H1OnlyCopyOnADeadRank(Engine):
    """Ranks that are gone count as holders."""

    def ranks_with_room(self, held: Any) -> Any:
        return [rank for rank in range(len(held)) if len(held[rank]) < self.slots_per_rank]


class H7TokensToADeadRank(Engine):
    """Slots of ranks that are gone stay in the tables."""

    def keep_slots(self, row: Any, held: Any) -> Any:
        new = super().keep_slots(row, held)
        return np.where(np.repeat(self.active, self.slots_per_rank), new, row)

    def make_tables(self) -> None:
        active, self.active = self.active, [True] * len(self.active)
        super().make_tables()
        self.active = active


class ResultsShapes(Engine):
    """Slots of a batch come as one row."""

    def slots_of(self, ids: Any, rank: int, layer: int) -> Any:
        return super().slots_of(ids, rank, layer).reshape(-1)


FAULTS = {
    A1PairsOnARank: "holds expert . twice",
    A13IdleLayersPile: "holds expert 0 twice",
    A19LayersShareAMap: "was sent to slot",
    B5SlotsCountedByDistinctExperts: "was sent to slot",
    B12MapsAreNotUpdated: "was sent to slot",
    B15IdleExpertsGetNoSlot: "has no slot on an active rank",
    C1EachRankPicksItsOwn: "to different slots",
    C7PaddingWraps: "padding was sent to slot",
    C9MappedTwice: "was sent to slot",
    D10WeightsByTheFirstMap: "has the weights of",
    E9CountsSlots: "the engine counted",
    E13ReadsAfterWrites: "has the weights of",
    H1OnlyCopyOnADeadRank: "no slot on an active rank|not active",
    H7TokensToADeadRank: "which is not active",
    ResultsShapes: "has the shape",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_faults_are_found(fault: type[Any]) -> None:
    machine = type("Faulty", (Right,), {"kind": fault, "shared_tokens": fault is C1EachRankPicksItsOwn})
    with pytest.raises(AssertionError, match=FAULTS[fault]):
        run(machine, examples=200)


class SharedEngine(Engine):
    """All ranks pick alike."""

    def slots_of(self, ids: Any, rank: int, layer: int) -> Any:
        return super().slots_of(ids, 0, layer)


def test_a_right_engine_passes() -> None:
    run(Right, examples=30)


def test_a_right_engine_of_shared_tokens_passes() -> None:
    run(type("Shared", (Right,), {"kind": SharedEngine, "shared_tokens": True}), examples=10)


def test_engines_that_hold_pairs_and_keep_all_ranks_can_say_so() -> None:
    class Paired(Right):
        kind = A1PairsOnARank
        pairs = True
        elastic = False
        starts = layouts(topology=topologies(num_ranks=2), num_layers=2, num_experts=3, slots_per_rank=4)

        def rebalance(self, expert_load: Any, active: list[bool]) -> Any:
            assert active == [True, True]
            assert expert_load.shape == (2, 3)
            super().rebalance(expert_load, active)

        def weights(self) -> Any:
            return None

    run(Paired, examples=10)


def test_steps_print_as_code_that_fails_again() -> None:
    class Mine(Right):
        kind = B12MapsAreNotUpdated
        starts = layouts(
            topology=topologies(num_ranks=(2, 3)), num_layers=1, num_experts=(2, 4), empty=False, pairs=False
        )

    with pytest.raises(AssertionError) as caught:
        run(Mine, (Phase.generate, Phase.shrink))
    lines = "\n".join(caught.value.__notes__).splitlines()
    steps = "\n".join(lines[lines.index("state = Mine()") :])
    with pytest.raises(AssertionError, match="was sent to slot"):
        exec(steps, {**vars(np), "Mine": Mine, "ExpertLayout": ExpertLayout, "Topology": Topology})
