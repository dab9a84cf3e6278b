"""Reads by NIXL between processes, over TCP and by the system's own copy."""

from __future__ import annotations

import pytest

from eplb_core.testing import TRANSPORT_CHECKS, TransportKit
from eplb_core.testing.transports import Check
from tests.loading.transports import kits

KITS = {"tcp": TransportKit(kits.nixl_tcp), "one host": TransportKit(kits.nixl_on_one_host)}


@pytest.mark.slow
@pytest.mark.parametrize("kit", KITS.values(), ids=KITS)
@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__)
def test_conforms(check: Check, kit: TransportKit) -> None:
    check(kit)
