"""Compile, or load, the kernels of moves before anybody serves."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from eplb_core.layout import ExpertLayout
from eplb_core.loading.install.copies import copy_spans
from eplb_core.loading.install.installer import Installer
from eplb_core.loading.install.staging import Staging
from eplb_core.loading.moves.pull import batches_of
from eplb_core.loading.moves.steps import plan_steps
from eplb_core.loading.store import ExpertStore
from eplb_core.loading.transports import batches, span_copies
from eplb_core.topology import Topology


@cache
def warm_moves() -> None:
    """Plan and install a layer of two bytes; once a process."""
    topology = Topology(2)
    old = ExpertLayout([[0, 1, 2, 3]], 4, topology=topology)
    new = ExpertLayout([[2, 3, 0, 1]], 4, topology=topology)
    store = ExpertStore({"weight": torch.zeros(2, 1, device="cpu")}, {"whole": torch.zeros(4, 1, device="cpu")})
    staging = Staging(None, [store])
    installer = Installer([store], staging)
    offsets, taken = np.zeros((2, 1, 2, 1, 2), dtype=np.int64), np.zeros(staging.capacity, dtype=np.bool_)
    for capacity in (1, 2):  # in parts, which takes a kernel more, and in one go
        for step in plan_steps(old, new, rank=0, capacity=capacity):
            batches_of(step, offsets, store.row_bytes, staging.offsets, taken)
            installer.run(0, installer.plan(step, np.arange(2) % capacity))
    list(plan_steps(old, old, rank=0, capacity=1, avoid_ranks=[1]))
    batches.warm_up()
    span_copies.warm_up()
    nothing = np.empty(0, dtype=np.int64)
    copy_spans(nothing, nothing, nothing)
