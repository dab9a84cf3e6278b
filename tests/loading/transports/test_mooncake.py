"""Reads by Mooncake between processes, over TCP."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_core.errors import TransportError
from eplb_core.loading.transport import Region
from eplb_core.loading.transports import mooncake
from eplb_core.testing import TransportKit, transports
from eplb_core.testing.peers import batch, contents, pattern, world
from tests.loading.transports import kits

pytestmark = kits.required(mooncake._import)
KIT = TransportKit(kits.mooncake)


@pytest.mark.slow
def test_a_read_is_over_when_each_of_its_operations_is() -> None:
    """Mooncake's own batches are "complete" with their first piece."""
    with world(KIT) as w:
        transports._join(w, 1, [KIT.big], 1)
        own = transports._own(w, [KIT.big])
        for _ in range(3):
            own[0].zero_()
            transports._done(w, w.transport.read(1, batch(transports._pieces(KIT.big))))
            assert (contents(own[0]) == pattern(1, KIT.big)).all()


def test_unknown_protocols_are_refused() -> None:
    """Mooncake itself starts with any word, and does nothing."""
    with pytest.raises(TransportError, match="`protocol` \\(='pigeon'\\) must be 'tcp' or 'rdma'"):
        mooncake.Mooncake("127.0.0.1", protocol="pigeon")


def test_regions_that_overlap_are_refused() -> None:
    data = np.zeros(100, dtype=np.uint8)
    transport = mooncake.Mooncake("127.0.0.1")
    at = data.ctypes.data
    with pytest.raises(TransportError, match=r"cannot register 50 bytes at 0x[0-9a-f]+ on cpu: code -7; regions must"):
        transport.export([Region(at, 100, "cpu"), Region(at + 50, 50, "cpu")])
    transport.close()
