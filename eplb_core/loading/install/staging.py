"""Memory in which incoming slots wait for their install."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from eplb_core._arrays import IntArray, check_int
from eplb_core._text import quoted
from eplb_core.loading.store import ExpertStore


class Staging:
    """Memory in which a layer's incoming slots wait: `capacity` slots, tensor by tensor.

    Args:
        memory: uint8 `[n]` on the stores' device, or its size in bytes, or None for a whole layer.
        stores: One per layer; a tensor's rows may differ in size between layers, the largest counts.

    Raises:
        ValueError: Not one slot fits, or the tensor is of another kind.
    """

    memory: torch.Tensor
    """uint8 `[n]`."""
    capacity: int
    """Number of slots that fit."""
    offsets: IntArray
    """Where each row of each tensor begins in `memory`, int64 `[capacity, tensors]`."""
    addresses: IntArray
    """Its first byte, int64 `[capacity, tensors]`."""

    def __init__(self, memory: int | torch.Tensor | None, stores: Sequence[ExpertStore]) -> None:
        store = stores[0]
        row_bytes = np.max([layer.row_bytes for layer in stores], axis=0)
        nbytes = int(row_bytes.sum())
        if memory is None:
            memory = store.num_slots * nbytes
        if isinstance(memory, torch.Tensor):
            if memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous():
                raise ValueError(f"`staging` ({memory.dtype} {list(memory.shape)}) must be uint8 [bytes], contiguous")
            if memory.device != store.device:
                raise ValueError(f"`staging` is on {memory.device} and the stores on {store.device}; put it there")
            size = memory.numel()
        else:
            size = check_int(memory, "staging", 0)
            if size > 1 << 50:
                raise ValueError(f"`staging` (={quoted(size, 40)} bytes) must be memory that exists")
        if size < nbytes:
            raise ValueError(f"`staging` (={size} bytes) must hold at least one slot (={nbytes} bytes)")
        # No rank reads more than S slots of a layer, and none more than two layers at a time.
        self.capacity = min(size // nbytes, 2 * store.num_slots)
        self.memory = (
            memory if isinstance(memory, torch.Tensor) else torch.empty(size, dtype=torch.uint8, device=store.device)
        )
        # Large rows first: these keep the alignment of the memory whatever odd sizes come after them.
        order = np.argsort(-row_bytes, kind="stable")
        begin = np.empty_like(row_bytes)
        begin[order] = np.cumsum(row_bytes[order]) - row_bytes[order]
        self.offsets = self.capacity * begin + np.arange(self.capacity)[:, None] * row_bytes
        self.addresses = self.offsets + self.memory.data_ptr()
        self._views = [
            [self.memory[start : start + size] for start, size in zip(row, row_bytes.tolist(), strict=True)]
            for row in self.offsets.tolist()
        ]

    def row(self, index: int, store: ExpertStore) -> list[torch.Tensor]:
        """One staged slot of a layer, uint8 `[row bytes]` for each tensor, views."""
        return [view[:size] for view, size in zip(self._views[index], store.row_bytes.tolist(), strict=True)]
