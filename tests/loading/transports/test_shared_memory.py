"""Reads between processes of one host, mapped and by the system's copy."""

from __future__ import annotations

import pytest

from eplb_core.testing import TRANSPORT_CHECKS, TransportKit
from eplb_core.testing.transports import Check
from tests.loading.transports import kits

KITS = {
    "private memory": TransportKit(kits.shared_memory),
    "shared memory": TransportKit(kits.shared_memory, allocate=kits.shared_tensor),
}


@pytest.mark.slow
@pytest.mark.parametrize("kit", KITS.values(), ids=KITS)
@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__)
def test_conforms(check: Check, kit: TransportKit) -> None:
    check(kit)
