"""Check a batch of reads before a byte moves, and turn regions and offsets into addresses."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple, NoReturn

import numpy as np

from eplb_core._arrays import IntArray
from eplb_core._numba import inline_kernel, kernel
from eplb_core._text import quoted
from eplb_core.errors import TransportError
from eplb_core.loading.transport import ReadBatch


class Spans(NamedTuple):
    """A checked batch without its empty operations: addresses and lengths, int64 of one length."""

    dst: IntArray
    src: IntArray
    nbytes: IntArray
    dst_region: IntArray
    src_region: IntArray


def check_batch(
    batch: ReadBatch, own: tuple[IntArray, IntArray], theirs: tuple[IntArray, IntArray], rank: int, max_batch: int
) -> Spans:
    """Refuse operations outside of the regions, and find the addresses of the others.

    Args:
        batch: What a caller asks for.
        own: First byte and size of each of the reader's regions.
        theirs: The same of the peer's.
        rank: The peer.
        max_batch: Operations that the transport takes at once.

    Raises:
        TransportError: It names the first operation that is wrong.
    """
    given: object = batch
    if not isinstance(given, tuple) or len(given) != len(ReadBatch._fields):
        raise TypeError(f"`batch` (={quoted(batch, 80)}) must be a ReadBatch")
    arrays = [_column(name, value) for name, value in zip(ReadBatch._fields, batch, strict=True)]
    lengths = [len(array) for array in arrays]
    if len(set(lengths)) > 1:
        raise TransportError(f"`batch` (lengths {lengths}) must hold arrays of one length")
    if lengths[0] > max_batch:
        raise TransportError(f"`batch` (={lengths[0]} operations) must be at most {max_batch}; split it", rank=rank)
    dst_region, dst_offset, src_region, src_offset, nbytes = arrays
    dst, src = np.empty((2, lengths[0]), dtype=np.int64)
    bad_dst, bad_src, is_full = _fill_addresses(
        dst_region, dst_offset, src_region, src_offset, nbytes, own[0], own[1], theirs[0], theirs[1], dst, src
    )
    if bad_dst >= 0:
        _refuse(("dst", f"of {len(own[0])} own"), own[1], dst_region, dst_offset, nbytes, bad_dst, rank)
    if bad_src >= 0:
        whose = f"of {len(theirs[0])} of rank {rank}"
        _refuse(("src", whose), theirs[1], src_region, src_offset, nbytes, bad_src, rank)
    if is_full:
        return Spans(dst, src, nbytes, dst_region, src_region)
    some = nbytes > 0
    return Spans(dst[some], src[some], nbytes[some], dst_region[some], src_region[some])


def _column(name: str, value: Any) -> IntArray:
    array = np.asarray(value)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise TransportError(f"`batch.{name}` (dtype {array.dtype}, {array.ndim} dimensions) must be int64 [n]")
    array = np.ascontiguousarray(array, dtype=np.int64)
    return array if array.flags.writeable else array.copy()  # one kind of array: another would be compiled for


@kernel
def _fill_addresses(
    dst_region: IntArray,
    dst_offset: IntArray,
    src_region: IntArray,
    src_offset: IntArray,
    nbytes: IntArray,
    own_start: IntArray,
    own_size: IntArray,
    start: IntArray,
    size: IntArray,
    dst: IntArray,
    src: IntArray,
) -> tuple[int, int, bool]:
    """First bytes of each operation; the first one of each side that is not inside of its region, or -1; none is empty.

    One call for all: each costs a worker some ten microseconds that come out of others' time.
    """
    is_full = True
    for i in range(len(nbytes)):
        is_full = is_full and nbytes[i] != 0
        if not _is_inside(dst_region[i], dst_offset[i], nbytes[i], own_size):
            return i, -1, is_full
        dst[i] = own_start[dst_region[i]] + dst_offset[i]
    for i in range(len(nbytes)):
        if not _is_inside(src_region[i], src_offset[i], nbytes[i], size):
            return -1, i, is_full
        src[i] = start[src_region[i]] + src_offset[i]
    return -1, -1, is_full


@inline_kernel
def _is_inside(region: int, offset: int, nbytes: int, size: IntArray) -> bool:
    if nbytes < 0 or region < 0 or region >= len(size):
        return False
    return offset >= 0 and offset <= size[region] and nbytes <= size[region] - offset


def _refuse(
    words: tuple[str, str],
    size: IntArray,
    region: IntArray,
    offset: IntArray,
    nbytes: IntArray,
    i: int,
    rank: int,
) -> NoReturn:
    side, whose = words
    if nbytes[i] < 0:
        raise TransportError(f"`batch.nbytes` (={nbytes[i]}) must be at least 0 at operation {i}", rank=rank)
    if not 0 <= region[i] < len(size):
        raise TransportError(f"`batch.{side}_region` (={region[i]}) must be one {whose} at operation {i}", rank=rank)
    raise TransportError(
        f"`batch.{side}_offset` (={offset[i]}, {nbytes[i]} bytes) must end inside of region {region[i]} "
        f"(={size[region[i]]} bytes) {whose} at operation {i}",
        rank=rank,
    )


@cache
def warm_up() -> None:
    """Compile, or load, what reads need; once a process, when the first transport is made."""
    nothing = [np.empty(0, dtype=np.int64) for _ in range(11)]
    _fill_addresses(*nothing)


def split(spans: Spans, piece: int) -> Spans:
    """The same bytes in spans of at most `piece`."""
    if not len(spans.nbytes) or int(spans.nbytes.max()) <= piece:
        return spans
    parts = -(-spans.nbytes // piece)
    of = np.repeat(np.arange(len(parts)), parts)
    offset = (np.arange(len(of)) - np.repeat(np.cumsum(parts) - parts, parts)) * piece
    nbytes = np.minimum(spans.nbytes[of] - offset, piece)
    return Spans(spans.dst[of] + offset, spans.src[of] + offset, nbytes, spans.dst_region[of], spans.src_region[of])
