"""Reads through a gloo group."""

from __future__ import annotations

import pytest

from eplb_core.testing import TRANSPORT_CHECKS, TransportKit
from eplb_core.testing.transports import Check
from tests.loading.transports import kits

GLOO = TransportKit(kits.gloo, rejoins=False)


@pytest.mark.slow
@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__)
def test_conforms(check: Check) -> None:
    check(GLOO)
