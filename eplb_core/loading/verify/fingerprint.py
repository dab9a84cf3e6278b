"""64-bit fingerprints of the bytes of each slot and tensor, computed where the tensor is.

A print is a sum over pieces of a row that are read once, in streams of 16-byte loads on a GPU; it is the same number on
any device. A row is read as little-endian 32-bit words, zero-padded; 2,048 lanes by 32 lines make a chunk of 256 KiB:

    lane[c, j] = sum over lines t of key[t] * word[c, t, j]                         mod 2**64
    print      = sum over chunks c and lanes j of mix(lane[c, j] * odd(c, j))       mod 2**64

`key` are 32 fixed random numbers, `odd(c, j)` is another odd number for each lane, `mix` is a bijection that scatters
bits, with mix(0) = 0. The print of a row of zeros is therefore 0.

What it misses. A change within one aligned word is never missed: key[t] is a multiple of no high power of two, so the
lane changes, and everything after it is a bijection. For other changes take the keys as drawn at random, independent
of the weights: a lane in which words differ stays the same with probability at most 2**(z - 64), where z <= 31 is the
number of low bits in which no word differs: 2**-33 at worst (only top bits differ), 2**-64 if a lowest bit is among the
differences. Lanes that differ then cancel in the sum as 64-bit random numbers do. Exchanging two experts changes nearly
every lane: about 2**-64. At 100,000 prints a second one wrong slot would be missed in some 10**14 s. This guards
against faults, not against somebody who forges weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from eplb_core._arrays import ArrayLike, check_flag, check_int, to_list
from eplb_core._numba import kernel
from eplb_core._text import quoted
from eplb_core.layout import layer_rows
from eplb_core.loading.store import ExpertStore, check_stores
from eplb_core.loading.verify.keys import KEYS, LANES, chunk_range


def fingerprints(
    stores: Sequence[ExpertStore],
    *,
    layers: ArrayLike | None = None,
    sample: int | tuple[int, int] | None = None,
    whole: bool = False,
) -> torch.Tensor:
    """Compute a fingerprint of what each slot of this rank holds, tensor by tensor.

    Equal bytes give equal prints on any rank and device; the top of this module says how unequal bytes can give equal
    prints. On a GPU the work is enqueued on the current stream and the host does not wait. The prints show the weights
    at that point of the stream, so compare them with the layout at that point.

    Args:
        stores: One per layer, `[L]`; the same tensors in the same order.
        layers: Rows to print, ints `[n]` or bools `[L]`; default all.
        sample: Read every k-th chunk of 256 KiB of each row, at least one: an int k, or `(k, offset)`, so that calls
            with offsets 0..k-1 in turn read everything. Wrong, stale, zeroed and never written slots differ in every
            chunk and are found as surely; a single flipped bit is found when its chunk is read. Compare only prints
            of the same sample.
        whole: Print the P rows of the tensors that every rank keeps whole instead.

    Returns:
        int64 `[n, S, tensors]` on the stores' device, or `[n, P, whole tensors]`.

    Raises:
        ValueError: Stores that differ, or none, or `sample` below 1.
        IndexError: A layer out of range.
        ImportError: Tensors on a GPU, and no Triton.

    Cost:
        Reads all bytes once, or 1/k of them; one launch per tensor. The first call compiles.

    Threads:
        Any, under the stream that should order it. On a CPU the work is done when it returns.

    Example:
        >>> weights = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
        >>> weights[2] = weights[0]
        >>> prints = fingerprints([ExpertStore({"w": weights})])
        >>> prints.shape, bool(prints[0, 0] == prints[0, 2]), bool(prints[0, 0] == prints[0, 1])
        (torch.Size([1, 3, 1]), True, False)
    """
    stores = to_list(stores, "stores")
    whole = check_flag(whole, "whole")
    if not stores:
        raise ValueError("`stores` must hold one store per layer")
    check_stores(stores)
    rows = np.arange(len(stores)) if layers is None else layer_rows(layers, len(stores))
    if isinstance(sample, tuple) and len(sample) != 2:
        raise ValueError(f"`sample` (={quoted(sample, 80)}) must be a step, or a step and an offset")
    step, offset = sample if isinstance(sample, tuple) else (1 if sample is None else sample, 0)
    step, offset = check_int(step, "sample", 1), check_int(offset, "sample offset", 0)
    if max(step, offset) >= 2**31:
        raise ValueError(f"`sample` (={quoted(sample, 80)}) must be below 2**31")
    chosen = [stores[row] for row in rows.tolist()]
    first, device = stores[0], stores[0].device
    names = first.whole_names if whole else first.names
    slots = len(first.whole_addresses) if whole else first.num_slots
    prints = torch.zeros((len(chosen), slots, len(names)), dtype=torch.int64, device=device)
    if prints.numel() == 0:
        return prints
    if device.type == "cpu":
        _print_on_cpu(chosen, names, step, offset, prints)
    else:  # pragma: no cover  needs a GPU
        from eplb_core.loading.verify import fingerprint_gpu

        addresses = np.stack([store.whole_addresses if whole else store.addresses for store in chosen])
        sizes = np.stack([store.whole_row_bytes if whole else store.row_bytes for store in chosen])
        with torch.cuda.device(device):
            fingerprint_gpu.enqueue(addresses, sizes, step, offset, prints)
    return prints


# ---- CPU -------------------------------------------------------------------------------------------------------------


def _print_on_cpu(
    stores: Sequence[ExpertStore], names: Sequence[str], step: int, offset: int, prints: torch.Tensor
) -> None:
    out = prints.numpy().view(np.uint64)
    lanes = np.empty(LANES, dtype=np.uint64)
    # Products and sums are meant to wrap; without a compiler numpy would warn of it.
    with np.errstate(over="ignore"):
        for layer, store in enumerate(stores):
            for column, name in enumerate(names):
                for slot in range(prints.shape[1]):
                    data = store.row(name, slot).numpy()
                    chunks = chunk_range(len(data), step, offset)
                    _print_row(_words(data), chunks.start, step, KEYS, lanes, out[layer, slot, column : column + 1])


def _words(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """The row as aligned 32-bit words, padded with zeros; copies only what is not aligned."""
    if len(data) % 4 or data.ctypes.data % 4:
        padded = np.zeros(-(-len(data) // 4) * 4, dtype=np.uint8)
        padded[: len(data)] = data
        data = padded
    return data.view(np.uint32)


@kernel
def _print_row(
    words: npt.NDArray[np.uint32],
    first_chunk: int,
    step: int,
    keys: npt.NDArray[np.uint64],
    lanes: npt.NDArray[np.uint64],
    out: npt.NDArray[np.uint64],
) -> None:
    total = np.uint64(0)
    for chunk_start in range(first_chunk * lanes.size * keys.size, words.size, step * lanes.size * keys.size):
        lanes[:] = 0
        for line in range(keys.size):
            start = chunk_start + line * lanes.size
            key, part = keys[line], words[start : start + lanes.size]  # empty beyond the row
            for lane in range(part.size):
                lanes[lane] += key * np.uint64(part[lane])
        # Lane j of chunk c is lane c * LANES + j of the row.
        lane_start = chunk_start // keys.size
        for lane in range(min(lanes.size, words.size - chunk_start)):
            z = lanes[lane] * (np.uint64(2 * (lane_start + lane) + 1) * np.uint64(0x9E3779B97F4A7C15))
            z = (z ^ (z >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
            z = (z ^ (z >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
            total += z ^ (z >> np.uint64(33))
    out[0] = total
