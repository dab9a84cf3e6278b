"""Memory that a weight host and its engines share, and the description by which tensors are found in it again.

A *segment* is what one file descriptor gives: memory of the CPU, by `memfd`, or of a GPU, by its driver. Both have the
same description: segments, spans in them, tensors over spans.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from eplb_core._text import plain
from eplb_core.loading.modules import NamedTensor
from eplb_core.loading.record.wire import Message

ALIGNMENT = 256
"""Bytes at whose multiples a span starts: at least what any kernel asks for."""
DEVICE_SEGMENT_BYTES = 1 << 30
"""Device memory that is taken at a time: while weights are copied, so much of them is there twice."""
MAX_DEVICE_SEGMENTS = 128
"""Descriptors that a message may carry are few."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""An engine may write into the memory, and may not change its size under the others."""


class SharedMemory:
    """All tensors of a rank in segments, copied into them once. Views of one storage stay views of one span.

    Tensors on the CPU are in one segment of host memory, those on a GPU in some of device memory.

    Args:
        tensors: What to share. Consumed: each is freed as soon as its span is filled, so that the peak is little more
            than the weights if nobody else holds them.

    Raises:
        ValueError: A tensor that is neither on the CPU nor on one GPU, or is of a kind that has no bytes of its own.
    """

    def __init__(self, tensors: list[NamedTensor]) -> None:
        found, places = _find_spans(tensors)
        listed = [
            [each.name, each.kind, str(each.tensor.dtype), list(each.tensor.shape), list(each.tensor.stride()), *place]
            for each, place in zip(tensors, places, strict=True)
        ]
        tensors.clear()
        segments: list[list[Any]] = []
        where: list[list[int]] = [[] for _ in found]
        self.fds: list[int] = []
        """One descriptor a segment; they stay this object's."""
        spans: list[_Span | None] = [*found]
        wanted = _pack(found)
        found.clear()
        try:
            for each in wanted:
                fd, size, memory = _make_segment(each)
                self.fds.append(fd)
                for number, start in each.starts.items():
                    span = spans[number]
                    spans[number] = None
                    if span is not None and span.nbytes:
                        memory[start : start + span.nbytes].copy_(span.bytes())
                    where[number] = [len(segments), start, span.nbytes if span is not None else 0]
                    del span
                segments.append([each.kind, size])
                if memory.is_cuda:
                    torch.cuda.synchronize(memory.device)
        except BaseException:
            self.close()
            raise
        self.description: Message = {"segments": segments, "spans": where, "tensors": listed}

    def close(self) -> None:
        """Free the memory; engines that map it keep it."""
        while self.fds:
            os.close(self.fds.pop())


def _make_segment(wanted: _Segment) -> tuple[int, int, torch.Tensor]:
    """Descriptor, size and bytes of a new one."""
    nbytes = max(wanted.nbytes, ALIGNMENT)
    if wanted.kind == "cuda":
        from eplb_core.loading.cuda import segments as device_segments

        torch.cuda.empty_cache()  # what was freed may be needed
        made = device_segments.create(nbytes, torch.cuda.current_device())
        return os.dup(made.fd), made.nbytes, made.bytes()
    fd = os.memfd_create("eplb weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return fd, nbytes, map_memfd(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise


@dataclass(slots=True)
class _Segment:
    """A segment to be made."""

    kind: Literal["memfd", "cuda"]
    nbytes: int = 0
    starts: dict[int, int] = field(default_factory=dict)
    """By number of a span: where in the segment it begins."""


def _pack(spans: list[_Span]) -> list[_Segment]:
    """Which span goes into which segment: one of host memory, and as few of device memory as the peak allows."""
    on_device = sum(span.nbytes for span in spans if span.storage.device.type == "cuda")
    most = max(DEVICE_SEGMENT_BYTES, -(-on_device // MAX_DEVICE_SEGMENTS))
    made: list[_Segment] = []
    last: dict[str, _Segment] = {}
    for number, span in enumerate(spans):
        kind: Literal["memfd", "cuda"] = "cuda" if span.storage.device.type == "cuda" else "memfd"
        size = -(-span.nbytes // ALIGNMENT) * ALIGNMENT
        if kind not in last or (kind == "cuda" and last[kind].nbytes + size > most):
            last[kind] = _Segment(kind)
            made.append(last[kind])
        last[kind].starts[number] = last[kind].nbytes
        last[kind].nbytes += size
    return made or [_Segment("memfd")]


class _Span(NamedTuple):
    """The bytes of one storage that tensors use."""

    storage: torch.UntypedStorage
    start: int
    nbytes: int

    def bytes(self) -> torch.Tensor:
        """As a flat view."""
        empty = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return empty.set_(self.storage, self.start, (self.nbytes,), (1,))


def _find_spans(tensors: Iterable[NamedTensor]) -> tuple[list[_Span], list[tuple[int, int]]]:
    """The spans, and for each tensor its span and the element in it where the tensor starts."""
    used: dict[int, tuple[torch.UntypedStorage, int, int]] = {}
    keys: list[int] = []
    for name, _, tensor in tensors:
        if tensor.device.type not in ("cpu", "cuda"):
            raise ValueError(f"tensor {name!r} is on {tensor.device}; load onto the CPU or the host's GPU")
        if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
            raise ValueError(
                f"tensor {name!r} is on {tensor.device} and the host's GPU is cuda:{torch.cuda.current_device()}; "
                "one host shares one GPU's memory"
            )
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
        raise ValueError(f"a segment of {os.fstat(fd).st_size} bytes must have {nbytes}")
    return torch.frombuffer(mmap.mmap(fd, nbytes, mmap.MAP_SHARED), dtype=torch.uint8)


def _map_device(fd: int, nbytes: int) -> torch.Tensor:  # pragma: no cover  needs a GPU
    from eplb_core.loading.cuda.segments import map_device

    return map_device(fd, nbytes)


MAPPERS: dict[str, Callable[[int, int], torch.Tensor]] = {"memfd": map_memfd, "cuda": _map_device}
"""How each kind of segment becomes bytes of this process."""


def map_tensors(description: Message, fds: list[int]) -> dict[str, MappedTensor]:
    """The tensors that a host describes, without a copy.

    Raises:
        ValueError, TypeError, KeyError, RuntimeError: A description that does not fit itself or the descriptors.
    """
    kinds = [str(kind) for kind, _ in description["segments"]]
    if len(fds) < len(kinds):
        raise ValueError(f"{len(fds)} of {len(kinds)} descriptors came; this process has too few left (ulimit -n)")
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
        empty = torch.empty(0, dtype=dtype, device=spans[span].device)
        tensor = empty.set_(spans[span], offset, tuple(shape), tuple(stride))
        segment, start, _ = description["spans"][span]
        first, last = _extent(tensor)
        handle = Handle(kinds[segment], fds[segment], start + first, last - first)
        mapped[name] = MappedTensor(kind, tensor, handle)
    return mapped


def _storage_of(segment: torch.Tensor, start: int, nbytes: int) -> torch.UntypedStorage:
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device=segment.device).untyped_storage()
    if segment.is_cuda:
        from eplb_core.loading.cuda import segments as device_segments

        return device_segments.part_of(segment, start, nbytes).untyped_storage()
    piece: Any = segment[start : start + nbytes].numpy()  # keeps the mapping alive
    return torch.frombuffer(piece, dtype=torch.uint8).untyped_storage()


def dtype_of(name: str) -> torch.dtype:
    """`torch.dtype` by its name with the prefix."""
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype {plain(name, 40)!r} in this version of torch")
    return dtype


def total_bytes(description: Message) -> int:
    """Bytes of all spans."""
    return sum(nbytes for _, _, nbytes in description["spans"])
