"""Many random migrations over transports that go wrong; each pass looks at every slot."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from eplb_core import Topology, fingerprints, verify_weights
from eplb_core.loading.transports import Faulty, LocalCopy
from tests.loading.fleets import SLOT, fleet
from tests.loading.worlds import random_layout, stores_of

FAULTS = {"delay": 0.3, "fail": 0.05, "lose": 0.05, "tear": 0.1}


@pytest.mark.slow
def test_migrations_over_a_transport_that_tears_fails_and_loses_peers_never_leave_a_wrong_slot() -> None:
    rng, topology = np.random.default_rng(7), Topology(4, 2)
    layout = random_layout(rng, 2, 8, 16, topology)
    reference = verify_weights([fingerprints(stores_of(layout, rank)) for rank in range(4)], layout).by_expert
    transports = {rank: Faulty(LocalCopy(), FAULTS, seed=rank) for rank in range(4)}
    ends: Counter[str] = Counter()
    with fleet(layout, transports=transports, reference=reference, staging=3 * SLOT) as ranks:
        for _ in range(100):
            ranks.move(random_layout(rng, 2, 8, 16, topology))
            ends[ranks.first.status.cause] += 1
    assert ends.keys() == {"", "read", "peer"}
