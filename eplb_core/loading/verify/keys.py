"""What fingerprints on the CPU and on a GPU have in common: the keys, and which chunks of a row are read."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

LANES = 2048
"""32-bit words of a line: 8 KiB."""
LINES = 32
"""Lines of a chunk."""
CHUNK_BYTES = 4 * LANES * LINES
"""Bytes of a chunk: what one program of the GPU reads, and the unit of sampling."""


def _random_keys(count: int) -> npt.NDArray[np.uint64]:
    """The outputs of SplitMix64 from seed 0: fixed, and without structure that weights could share."""
    keys, state, mask = [], 0, 2**64 - 1
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        keys.append(z ^ (z >> 31))
    return np.array(keys, dtype=np.uint64)


KEYS = _random_keys(LINES)


def chunk_range(nbytes: int, step: int, offset: int) -> range:
    """Chunks of a row that are read; one at least."""
    chunks = -(-nbytes // CHUNK_BYTES)
    return range(offset % min(step, chunks), chunks, step)
