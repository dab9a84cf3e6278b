"""For users' tests: all ranks in one process, conformance checks of transports, a layout that shows forgotten mappings.

`LocalAgreement.group(R)` and a `LocalCopy` for each rank keep ranks in one process, as threads. Strategies for
Hypothesis are in `eplb_core.testing.strategies`, a machine that drives an engine is in `eplb_core.testing.machine`.
Only the checks of transports need torch.

A transport of your own is tested by real processes that are really killed and stopped:

    @pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__)
    def test_my_transport(check):
        check(TransportKit(make))

where `make(rank, size, folder)` is a function at the top of a module and gives rank's transport. `check_transport(kit)`
runs them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from eplb_core._lazy import lazy
from eplb_core.loading.agreement import LocalAgreement as LocalAgreement
from eplb_core.loading.transports import LocalCopy as LocalCopy
from eplb_core.testing.layouts import shifted_layout as shifted_layout

if TYPE_CHECKING:
    from eplb_core.testing.peers import TransportKit as TransportKit
    from eplb_core.testing.transports import TRANSPORT_CHECKS as TRANSPORT_CHECKS
    from eplb_core.testing.transports import check_transport as check_transport

_HOME_OF = {"TRANSPORT_CHECKS": "transports", "TransportKit": "peers", "check_transport": "transports"}

__all__ = ["TRANSPORT_CHECKS", "LocalAgreement", "LocalCopy", "TransportKit", "check_transport", "shifted_layout"]
if not TYPE_CHECKING:  # else any name would be right
    __getattr__, __dir__ = lazy(__name__, _HOME_OF)
