"""Any sequence of migrations, late, failed and endless reads, pauses and deadlines; all ranks in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from eplb_core import Topology
from eplb_core.loading.transports import DeferredCopy
from tests.loading.fleets import SLOT, Fleet
from tests.loading.worlds import random_layout


class Migrations(RuleBasedStateMachine):
    """After every step: one layout on all ranks, in tables and status too, and every slot holds its expert."""

    @initialize(
        seed=st.integers(0, 2**32),
        ranks=st.integers(2, 3),
        slots=st.integers(1, 6),
        deadline=st.sampled_from([0.05, 20.0]),
    )
    def begin(self, seed: int, ranks: int, slots: int, deadline: float) -> None:
        self.rng = np.random.default_rng(seed)
        self.topology = Topology(ranks)
        self.paused = False
        self.fleet = Fleet(self.target(), DeferredCopy, staging=slots * SLOT, deadline=deadline)

    def target(self) -> Any:
        ranks = self.topology.num_ranks
        return random_layout(self.rng, 2, 2 * ranks, 3 * ranks, self.topology)

    def transport(self, rank: int) -> DeferredCopy:
        transport = self.fleet.transports[rank % self.topology.num_ranks]
        assert isinstance(transport, DeferredCopy)
        return transport

    @precondition(lambda self: self.fleet.first.idle)
    @rule()
    def start(self) -> None:
        self.fleet.start(self.target())

    @rule(count=st.integers(1, 6))
    def passes(self, count: int) -> None:
        for _ in range(count):
            self.fleet.one_pass()
            self.fleet.passes_pause()

    @rule(rank=st.integers(0, 2))
    def reads_end(self, rank: int) -> None:
        self.transport(rank).complete()

    @rule(rank=st.integers(0, 2), lost=st.booleans())
    def reads_fail(self, rank: int, lost: bool) -> None:
        self.transport(rank).fail("as the test says", lost=lost)

    @precondition(lambda self: not self.paused)
    @rule()
    def pause(self) -> None:
        layouts = self.fleet.pause()
        assert layouts == [self.fleet.first.layout] * len(layouts)
        self.paused = True

    @precondition(lambda self: self.paused)
    @rule()
    def resume(self) -> None:
        self.fleet.resume()
        self.paused = False

    @precondition(lambda self: not self.paused)
    @rule()
    def run_on(self) -> None:
        """Reads end from now on: what runs comes to an end, whichever."""
        self.fleet.passes(
            lambda: self.fleet.first.idle, lambda: [self.transport(rank).complete() for rank in self.fleet.ranks]
        )

    @invariant()
    def every_slot_holds_its_expert(self) -> None:
        if hasattr(self, "fleet"):
            self.fleet.look()

    def teardown(self) -> None:
        if hasattr(self, "fleet"):
            if not self.paused:
                self.run_on()
            for rank in self.fleet.ranks:
                self.transport(rank).complete()
            assert self.fleet.stop() == [True] * len(self.fleet.ranks)


Migrations.TestCase.settings = settings(deadline=None, max_examples=15, stateful_step_count=30)
TestMigrations = Migrations.TestCase
