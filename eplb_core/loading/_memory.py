"""Memory that a weight host and its engines share, and the description by which tensors are found in it again.

A *segment* is what one file descriptor gives: here memory of the CPU, by `memfd`. Other kinds (memory of a GPU,
exported by the driver) are other entries in `MAPPERS` with the same description: segments, spans in them, tensors over
spans.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from eplb_core.loading._wire import Message

ALIGNMENT = 256
"""Bytes at whose multiples a span starts: at least what any kernel asks for."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""An engine may write into the memory, and may not change its size under the others."""


class NamedTensor(NamedTuple):
    """A tensor to share, and what it is in its module."""

    name: str
    kind: str
    """`parameter`, `buffer`, `temporary_buffer` (not in the state dict), `attribute`, or `tensor` of a dict."""
    tensor: torch.Tensor


class SharedMemory:
    """All tensors of a rank in one segment, copied into it once. Views of one storage stay views of one span.

    Args:
        tensors: What to share. Consumed: each is let go as soon as its span is filled, so that the peak is little more
            than the weights if nobody else holds them.

    Raises:
        ValueError: A tensor that is not in CPU memory, or is of a kind that has no bytes of its own.
    """

    def __init__(self, tensors: list[NamedTensor]) -> None:
        found, places = _find_spans(tensors)
        spans = deque(found)
        found.clear()
        starts, end = [], 0
        for span in spans:
            starts.append(end)
            end += -(-span.nbytes // ALIGNMENT) * ALIGNMENT
        self.nbytes = max(end, ALIGNMENT)
        """Size of the segment."""
        self.description: Message = {
            "segments": [["memfd", self.nbytes]],
            "spans": [[0, start, span.nbytes] for start, span in zip(starts, spans, strict=True)],
            "tensors": [
                [
                    each.name,
                    each.kind,
                    str(each.tensor.dtype),
                    list(each.tensor.shape),
                    list(each.tensor.stride()),
                    *place,
                ]
                for each, place in zip(tensors, places, strict=True)
            ],
        }
        tensors.clear()
        self._fd = os.memfd_create("eplb weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, self.nbytes)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
            memory = map_memfd(self._fd, self.nbytes)
            for start in starts:
                span = spans.popleft()
                memory[start : start + span.nbytes].copy_(span.bytes())
                del span
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def fds(self) -> list[int]:
        """One descriptor a segment; they stay this object's."""
        return [self._fd]

    def close(self) -> None:
        """Let go of the memory; engines that map it keep it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _Span(NamedTuple):
    """The bytes of one storage that tensors use."""

    storage: torch.UntypedStorage
    start: int
    nbytes: int

    def bytes(self) -> torch.Tensor:
        """As a flat view."""
        return torch.empty(0, dtype=torch.uint8).set_(self.storage, self.start, (self.nbytes,), (1,))


def _find_spans(tensors: Iterable[NamedTensor]) -> tuple[list[_Span], list[tuple[int, int]]]:
    """The spans, and for each tensor its span and the element in it where the tensor starts."""
    used: dict[int, tuple[torch.UntypedStorage, int, int]] = {}
    keys: list[int] = []
    for name, _, tensor in tensors:
        if tensor.device.type != "cpu":
            raise ValueError(f"tensor {name!r} is on {tensor.device}; this host shares CPU memory: load onto the CPU")
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise ValueError(f"tensor {name!r} ({tensor.layout}) must be strided, with its numbers as bytes")
        storage = tensor.untyped_storage()
        first, last = _extent(tensor)
        # Tensors without an element may have a storage without an address: each is a span of its own.
        key = storage.data_ptr() or -1 - len(keys)
        _, low, high = used.get(key, (storage, first, last))
        used[key] = storage, min(low, first), max(high, last)
        keys.append(key)
    # Down to 16 bytes, so that elements of every size still start at a multiple of their own.
    spans = {key: _Span(storage, low // 16 * 16, high - low // 16 * 16) for key, (storage, low, high) in used.items()}
    number = {key: index for index, key in enumerate(spans)}
    places = [
        (number[key], (_extent(each.tensor)[0] - spans[key].start) // each.tensor.element_size())
        for key, each in zip(keys, tensors, strict=True)
    ]
    return list(spans.values()), places


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and the byte after the last one, within its storage."""
    first = int(tensor.storage_offset()) * tensor.element_size()
    if tensor.numel() == 0:
        return first, first
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + int(steps + 1) * tensor.element_size()


# ---- the engine's side -----------------------------------------------------------------------------------------------


class Handle(NamedTuple):
    """Where a tensor's bytes are for other processes of this machine."""

    kind: str
    """Kind of segment, such as `memfd`."""
    fd: int
    """The segment's descriptor in this process; open as long as the attachment."""
    offset: int
    """First byte of the tensor in the segment."""
    nbytes: int
    """Bytes from its first to its last element."""


class MappedTensor(NamedTuple):
    """A tensor of the host, in this process."""

    kind: str
    tensor: torch.Tensor
    handle: Handle


def map_memfd(fd: int, nbytes: int) -> torch.Tensor:
    """The segment as bytes of this process; unmapped when the last tensor over it is gone."""
    if os.fstat(fd).st_size < nbytes:
        raise ValueError(f"a segment of {os.fstat(fd).st_size} bytes where {nbytes} are due")
    return torch.frombuffer(mmap.mmap(fd, nbytes, mmap.MAP_SHARED), dtype=torch.uint8)


MAPPERS: dict[str, Callable[[int, int], torch.Tensor]] = {"memfd": map_memfd}
"""How each kind of segment becomes bytes of this process."""


def map_tensors(description: Message, fds: list[int]) -> dict[str, MappedTensor]:
    """The tensors that a host describes, without a copy.

    Raises:
        ValueError, TypeError, KeyError, RuntimeError: A description that does not fit itself or the descriptors.
    """
    kinds = [str(kind) for kind, _ in description["segments"]]
    segments = [MAPPERS[kind](fd, int(n)) for (kind, n), fd in zip(description["segments"], fds, strict=True)]
    spans = []
    for segment, start, nbytes in description["spans"]:
        whole = segments[segment]
        if not (start >= 0 and nbytes >= 0 and start + nbytes <= whole.numel()):
            raise ValueError(f"a span of {nbytes} bytes from {start} in a segment of {whole.numel()}")
        # A storage of its own: what saves or moves one tensor does not take the whole segment along.
        spans.append(_storage_of(whole, start, nbytes))
    mapped: dict[str, MappedTensor] = {}
    for name, kind, dtype_name, shape, stride, span, offset in description["tensors"]:
        dtype = dtype_of(dtype_name)
        tensor = torch.empty(0, dtype=dtype).set_(spans[span], offset, tuple(shape), tuple(stride))
        segment, start, _ = description["spans"][span]
        first, last = _extent(tensor)
        handle = Handle(kinds[segment], fds[segment], start + first, last - first)
        mapped[name] = MappedTensor(kind, tensor, handle)
    return mapped


def _storage_of(segment: torch.Tensor, start: int, nbytes: int) -> torch.UntypedStorage:
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8).untyped_storage()
    piece: Any = segment[start : start + nbytes].numpy()  # keeps the mapping alive
    return torch.frombuffer(piece, dtype=torch.uint8).untyped_storage()


def dtype_of(name: str) -> torch.dtype:
    """`torch.dtype` by its name with the prefix."""
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype {str(name)[:40]!r} in this version of torch")
    return dtype


def total_bytes(description: Message) -> int:
    """Bytes of all spans."""
    return sum(nbytes for _, _, nbytes in description["spans"])
