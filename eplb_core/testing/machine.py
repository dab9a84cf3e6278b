"""A state machine of Hypothesis that drives an engine's own rebalancer and checks every step against its map."""

from __future__ import annotations

from functools import cache
from typing import ClassVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from eplb_core._arrays import ArrayLike, IntArray, to_ids
from eplb_core.layout import ExpertLayout
from eplb_core.metrics import transfers
from eplb_core.testing.strategies import active_ranks, expert_loads, layouts, topk_ids, topologies


def _active(layout: ExpertLayout) -> st.SearchStrategy[list[bool]]:
    return active_ranks(layout.topology.num_ranks, least=-(-layout.num_experts // layout.slots_per_rank))


@cache  # to make a strategy takes longer than to draw from it
def _loads(num_layers: int, num_experts: int) -> st.SearchStrategy[IntArray]:
    return expert_loads(num_layers=num_layers, num_experts=num_experts)


@cache
def _ids(num_experts: int) -> st.SearchStrategy[IntArray]:
    return topk_ids(num_tokens=(0, 6), num_experts=num_experts, top_k=(1, min(3, num_experts)))


_MACHINE: st.SearchStrategy[EngineMachine] = st.runner()
_LAYERS = _MACHINE.flatmap(lambda machine: st.integers(0, machine.layout.num_layers - 1))
_RANKS = _MACHINE.flatmap(lambda machine: st.sampled_from(np.flatnonzero(machine.active).tolist()))
_ACTIVE = _MACHINE.flatmap(lambda machine: _active(machine.layout))
_LOADS = _MACHINE.flatmap(lambda machine: _loads(machine.layout.num_layers, machine.layout.num_experts))
_IDS = _MACHINE.flatmap(lambda machine: _ids(machine.layout.num_experts))


class EngineMachine(RuleBasedStateMachine):
    """Rebalance an engine under changing loads and ranks, and check its map, weights, tokens and counts.

    Subclass it, write the four methods, and let pytest find the test case:

        class Mine(EngineMachine):
            def start(self, layout):
                self.engine = Engine(layout)

            def rebalance(self, expert_load, active):
                return self.engine.rebalance(expert_load, active)

            def live_map(self):
                return self.engine.physical_to_logical

            def dispatch(self, rank, layer, ids):
                return self.engine.slots_of(ids, rank=rank, layer=layer)

        TestMine = Mine.TestCase

    After the start and every rebalance each layer must have every expert on an active rank; no expert may be twice on
    a rank; inactive ranks receive nothing; as many experts are received as the engine counted; and every expert, from
    every active rank, must be sent to a slot of an active rank that holds it. Batches of tokens with padding are sent
    in between. A failure is an AssertionError that names layer, rank, expert or slot; Hypothesis prints the fewest
    steps that lead to it, as code. Override `teardown` to end what the engine has started.
    """

    starts: ClassVar[st.SearchStrategy[ExpertLayout]] = layouts(
        topology=topologies(num_ranks=(1, 4), num_nodes=(1, 2)),
        num_layers=(1, 2),
        num_experts=(1, 6),
        empty=False,
        pairs=False,
    )
    """Layouts of one layer or more that the engine starts with; leave shapes out that it cannot have."""
    pairs: ClassVar[bool] = False
    """Whether a rank may hold an expert twice though it does not hold all of them."""
    elastic: ClassVar[bool] = True
    """Whether ranks may become inactive, and active again."""
    shared_tokens: ClassVar[bool] = False
    """Whether all ranks have the same tokens and add up what each computes: then all must choose the same slots."""

    layout: ExpertLayout
    """The engine's live map after the last step."""
    active: list[bool]
    """Which ranks are active."""

    # ---- what the engine does; for subclasses ----------------------------------------------------------------------

    def start(self, layout: ExpertLayout) -> None:
        """Start the engine with these experts in its slots, all ranks active."""
        raise NotImplementedError

    def rebalance(self, expert_load: IntArray, active: list[bool]) -> ArrayLike | None:
        """Rebalance until the move is over.

        Args:
            expert_load: Tokens of each expert since the last time, int64 `[L, E]`.
            active: Whether each rank is there, `[R]`; others may hold no expert alone and take no tokens. They have
                room for all experts.

        Returns:
            How many experts ranks received, as the engine counted them: in all, `[R]` or `[L, R]`. An expert that a
            rank held in no slot before counts once. None: not counted.
        """
        raise NotImplementedError

    def live_map(self) -> ArrayLike:
        """Return the expert of each slot as the engine has it, ints `[L, P]`, -1 = empty."""
        raise NotImplementedError

    def dispatch(self, rank: int, layer: int, ids: IntArray) -> ArrayLike:
        """Return the slot of each top-k id of tokens on `rank`, ints `[tokens, top_k]`; -1 for an id of -1."""
        raise NotImplementedError

    def weights(self) -> ArrayLike | None:
        """Return the expert whose weights each slot really holds, ints `[L, P]`. None: not checked."""
        return None

    # ---- steps -----------------------------------------------------------------------------------------------------

    @initialize(layout=_MACHINE.flatmap(lambda machine: machine.starts))
    def begin(self, layout: ExpertLayout) -> None:
        """Start the engine."""
        self.layout, self.active = layout, [True] * layout.topology.num_ranks
        self.start(layout)
        self._check_engine()

    @rule(expert_load=_LOADS)
    def load_changes(self, expert_load: IntArray) -> None:
        """Rebalance for a new load."""
        old = self.layout
        counted = self.rebalance(expert_load.copy(), list(self.active))
        self._check_engine()
        received = transfers(old, self.layout)
        gone = received[:, ~np.array(self.active)]
        if gone.any():
            raise AssertionError(f"ranks that are not active received {gone.sum()} experts")
        if counted is not None:
            count = to_ids(counted, "rebalance()")
            found = np.asarray(received.sum(axis=tuple(range(2 - count.ndim))))
            _equal_shapes("the engine's count", count, found)
            if (found != count).any():
                raise AssertionError(f"ranks received {found.tolist()} experts, the engine counted {count.tolist()}")

    @precondition(lambda machine: machine.elastic)
    @rule(active=_ACTIVE, expert_load=_LOADS)
    def ranks_change(self, active: list[bool], expert_load: IntArray) -> None:
        """Rebalance for other active ranks."""
        self.active = active
        self.load_changes(expert_load)

    @rule(rank=_RANKS, layer=_LAYERS, ids=_IDS)
    def tokens_come(self, rank: int, layer: int, ids: IntArray) -> None:
        """Send a batch."""
        self._check_tokens(rank, layer, ids)

    # ---- checks ----------------------------------------------------------------------------------------------------

    def _check_engine(self) -> None:
        """The map is a layout of the same frame that serves every expert, and weights and tokens follow it."""
        frame, p2l = self.layout, to_ids(self.live_map(), "live_map()")
        _equal_shapes("the live map", p2l, frame.physical_to_logical_map)
        alive = np.repeat(self.active, frame.slots_per_rank)
        for layer, slot in np.argwhere((p2l < -1) | (p2l >= frame.num_experts)):
            raise AssertionError(f"layer {layer}, slot {slot}: {p2l[layer, slot]} is no expert")
        for layer, row in enumerate(p2l):
            for expert in sorted({*range(frame.num_experts)} - {*row[alive].tolist()}):
                raise AssertionError(f"layer {layer}: expert {expert} has no slot on an active rank")
            for rank, held in enumerate([] if self.pairs else row.reshape(-1, frame.slots_per_rank).tolist()):
                twice = [expert for expert in held if expert >= 0 and held.count(expert) > 1]
                if twice and len({*held} - {-1}) < frame.num_experts:
                    raise AssertionError(f"layer {layer}: rank {rank} holds expert {twice[0]} twice")
        self.layout = ExpertLayout(p2l, frame.num_experts, topology=frame.topology)
        held_weights = self.weights()
        if held_weights is not None:
            weights = to_ids(held_weights, "weights()")
            _equal_shapes("weights", weights, p2l)
            for layer, slot in np.argwhere((weights != p2l) & (p2l >= 0) & alive):
                has = f"has the weights of {weights[layer, slot]} instead of expert {p2l[layer, slot]}"
                raise AssertionError(f"layer {layer}: slot {slot} {has}")
        everyone = np.arange(frame.num_experts, dtype=np.int64)[:, None]
        for layer in range(frame.num_layers):
            for rank in np.flatnonzero(self.active).tolist():
                self._check_tokens(rank, layer, everyone)

    def _check_tokens(self, rank: int, layer: int, ids: IntArray) -> None:
        """Each id goes to a slot of an active rank that holds it, and padding nowhere."""
        slots = self._slots(rank, layer, ids)
        p2l, per_rank = self.layout.physical_to_logical_map[layer], self.layout.slots_per_rank
        for expert, slot in zip(ids.reshape(-1).tolist(), slots.reshape(-1).tolist(), strict=True):
            what = f"layer {layer}, rank {rank}: expert {expert} was sent to slot {slot}"
            if expert < 0:
                if slot != -1:
                    raise AssertionError(f"layer {layer}, rank {rank}: padding was sent to slot {slot}")
            elif not 0 <= slot < len(p2l) or p2l[slot] != expert:
                held = f", which holds {p2l[slot]}" if 0 <= slot < len(p2l) else f" of {len(p2l)}"
                raise AssertionError(what + held)
            elif not self.active[slot // per_rank]:
                raise AssertionError(f"{what} of rank {slot // per_rank}, which is not active")
        for other in np.flatnonzero(self.active).tolist() if self.shared_tokens else ():
            if (self._slots(other, layer, ids) != slots).any():
                raise AssertionError(f"layer {layer}: ranks {rank} and {other} send the same tokens to different slots")

    def _slots(self, rank: int, layer: int, ids: IntArray) -> IntArray:
        slots = to_ids(self.dispatch(rank, layer, ids.copy()), "dispatch()")
        _equal_shapes("slots", slots, ids)
        return slots


def _equal_shapes(what: str, found: IntArray, right: IntArray) -> None:
    if found.shape != right.shape:
        raise AssertionError(f"{what} has the shape {list(found.shape)} instead of {list(right.shape)}")
