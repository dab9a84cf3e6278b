"""Every transport passes the checks that are public, with each kind of memory and each way that its bytes may take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch

from eplb_core.loading.transport import Transport
from eplb_core.loading.transports import mooncake, nixl
from eplb_core.testing import TRANSPORT_CHECKS, TransportKit, transports
from tests.loading.transports import kits

ALL = {check.__name__ for check in TRANSPORT_CHECKS}
BYTES_ON_THE_WAY = {
    "random_batches_are_exact",
    "abandoned_reads_end_and_leave_the_destination_alone",
    "a_peer_that_dies_during_a_read_ends_it",
    "reads_of_a_stopped_peer_are_as_the_caps_say",
}
TWO_WAYS = {"random_batches_are_exact", "ranks_read_each_other_at_once", "a_peer_that_dies_during_a_read_ends_it"}


NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Kit(NamedTuple):
    kit: TransportKit
    checks: set[str] = ALL
    """Those that apply."""
    soon: set[str] = ALL
    """Those of the default run."""
    marks: Sequence[pytest.MarkDecorator] = ()


def on_device(make: Callable[[int, int, str], Transport], *, rejoins: bool = True) -> Kit:
    return Kit(TransportKit(make, allocate=kits.device_tensor, rejoins=rejoins), marks=(pytest.mark.cuda, NEEDS_CUDA))


KITS = {
    "one process": Kit(TransportKit(kits.local, processes=False, big=1 << 20)),
    "private memory": Kit(TransportKit(kits.shared_memory)),
    "shared memory": Kit(TransportKit(kits.shared_memory, allocate=kits.shared_tensor)),
    "delayed": Kit(TransportKit(kits.delayed)),
    "gloo": Kit(TransportKit(kits.gloo, rejoins=False)),
    # The way of NCCL, by gloo.
    "gloo, bytes apart": Kit(TransportKit(kits.gloo_with_payload, rejoins=False), soon=TWO_WAYS),
    "mooncake": Kit(TransportKit(kits.mooncake), marks=kits.required(mooncake._import)),
    "nixl, tcp": Kit(TransportKit(kits.nixl_tcp), marks=kits.required(nixl._import)),
    "nixl, one host": Kit(TransportKit(kits.nixl_on_one_host), BYTES_ON_THE_WAY, marks=kits.required(nixl._import)),
    "cuda, prefer overlap": on_device(kits.cuda_ipc),
    "cuda, on cores": on_device(kits.cuda_ipc_on_cores),
    "cuda, one by one": on_device(kits.cuda_ipc_one_by_one),
    "cuda, gloo": on_device(kits.gloo_and_device, rejoins=False),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kit", "check"),
    [
        pytest.param(
            each.kit,
            check,
            id=f"{name}-{check.__name__}",
            marks=(*each.marks, *(() if check.__name__ in each.soon else (pytest.mark.long,))),
        )
        for name, each in KITS.items()
        for check in TRANSPORT_CHECKS
        if check.__name__ in each.checks
    ],
)
def test_conforms(kit: TransportKit, check: transports.Check) -> None:
    check(kit)
