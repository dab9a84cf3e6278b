"""For users' tests: conformance checks of transports, a layout that shows forgotten mappings, Hypothesis strategies.

The strategies are in `eplb_core.testing.strategies`.

A transport of your own is tested by real processes that are really killed and stopped:

    @pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__)
    def test_my_transport(check):
        check(TransportKit(make))

where `make(rank, size, folder)` is a function at the top of a module and gives rank's transport. `check_transport(kit)`
runs them all.
"""

from __future__ import annotations

from eplb_core.testing._peers import TransportKit
from eplb_core.testing.layouts import shifted_layout
from eplb_core.testing.transports import TRANSPORT_CHECKS, check_transport

__all__ = ["TRANSPORT_CHECKS", "TransportKit", "check_transport", "shifted_layout"]
