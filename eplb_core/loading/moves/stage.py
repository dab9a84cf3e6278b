"""Whether what a transport delivered is the expert that was asked for."""

from __future__ import annotations

import numpy as np
import torch

from eplb_core._arrays import ArrayLike, IntArray, read_only
from eplb_core.layout import ExpertLayout
from eplb_core.loading.moves.pull import Pull, Puller, Trouble
from eplb_core.loading.moves.steps import Step
from eplb_core.loading.moves.workers import breathe
from eplb_core.loading.store import ExpertStore
from eplb_core.loading.verify.fingerprint import fingerprints
from eplb_core.loading.verify.weights import UNKNOWN, check_reference


def to_reference(value: ArrayLike | None, layout: ExpertLayout, num_tensors: int) -> IntArray | None:
    """`WeightReport.by_expert` as int64 `[L, E, tensors]`, or None; another shape raises ValueError."""
    if value is None:
        return None
    return read_only(np.array(check_reference(value, (layout.num_layers, layout.num_experts, num_tensors))))


def check_staged(puller: Puller, step: Step, pull: Pull, reference: IntArray | None) -> None:
    """Compare the prints of staged slots with those of their experts, before anybody may install them.

    Raises:
        Trouble: `read`: other bytes arrived.
    """
    if reference is None or not len(pull.rows):
        return
    slots = np.flatnonzero(pull.place_of >= 0)
    store, found = puller.stores[step.layer], []
    for place in pull.place_of[slots].tolist():
        breathe()
        rows = puller.staging.row(place, store)
        found.append(fingerprints([ExpertStore({name: [row] for name, row in zip(store.names, rows, strict=True)})])[0])
    breathe()
    prints = torch.cat(found).cpu().numpy()
    first = puller.rank * len(step.kind)
    experts = step.after.physical_to_logical_map[step.layer, first + slots]
    expected = reference[step.layer, experts]
    bad = np.argwhere((prints != expected) & (expected != UNKNOWN))
    if len(bad):
        which, tensor = bad[0].tolist()
        source = int(step.source_slot[slots[which]])
        origin = f"slot {source}" if source >= 0 else "the backup"
        raise Trouble(
            "read",
            f"tensor {store.names[tensor]!r} of expert {experts[which]} of layer {step.layer} did not arrive from "
            f"{origin} as it was at the start",
        )
