"""For users' tests: all ranks in one process, conformance checks of transports, a layout that shows forgotten mappings.

`LocalAgreement.group(R)` and a `LocalCopy` for each rank keep ranks in one process, as threads. Strategies for
Hypothesis are in `eplb_core.testing.strategies`.

A transport of your own is tested by real processes that are really killed and stopped:

    @pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__)
    def test_my_transport(check):
        check(TransportKit(make))

where `make(rank, size, folder)` is a function at the top of a module and gives rank's transport. `check_transport(kit)`
runs them all.
"""

from __future__ import annotations

from eplb_core.loading.agreement import LocalAgreement
from eplb_core.loading.transports import LocalCopy
from eplb_core.testing.layouts import shifted_layout
from eplb_core.testing.peers import TransportKit
from eplb_core.testing.transports import TRANSPORT_CHECKS, check_transport

__all__ = ["TRANSPORT_CHECKS", "LocalAgreement", "LocalCopy", "TransportKit", "check_transport", "shifted_layout"]
