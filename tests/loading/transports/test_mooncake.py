"""Reads by Mooncake between processes, over TCP."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_core.errors import TransportError
from eplb_core.loading.transport import Region
from eplb_core.loading.transports import mooncake
from tests.loading.transports import kits

pytestmark = kits.required(mooncake._import)


def test_regions_that_overlap_are_refused() -> None:
    data = np.zeros(100, dtype=np.uint8)
    transport = mooncake.Mooncake("127.0.0.1")
    at = data.ctypes.data
    with pytest.raises(TransportError, match=r"cannot register 50 bytes at 0x[0-9a-f]+ on cpu: code -7; regions must"):
        transport.export([Region(at, 100, "cpu"), Region(at + 50, 50, "cpu")])
    transport.close()
