"""Device memory that outlives the process that made it: allocations of the driver that are file descriptors.

Unlike memory opened by CUDA IPC, what is mapped here stays as long as somebody maps it or has the descriptor, also when
the process that made it was killed; and who mapped it can hand it on.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import sys
import weakref
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from eplb_core.loading.cuda.runtime import Location, device_bytes

_PINNED, _FILE_DESCRIPTOR, _DEVICE, _READ_WRITE = 1, 1, 1, 3


class DeviceMemoryError(ValueError):
    """A failed call of the driver."""


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", Location), ("flags", ctypes.c_int))


@cache
def _driver() -> Any:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *args: Any) -> None:
    code = int(getattr(_driver(), name)(*args))
    if code:
        words = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(words))
        raise DeviceMemoryError(f"{name}: {(words.value or b'unknown error').decode()} ({code})")


def _properties(device: int) -> _Properties:
    return _Properties(type=_PINNED, handle_types=_FILE_DESCRIPTOR, location=Location(_DEVICE, device))


def granularity(device: int) -> int:
    """Ask for the unit, in bytes, of which every allocation is a multiple."""
    size, properties = ctypes.c_size_t(), _properties(device)
    with _on(device):
        _call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(properties), 1)
    return size.value


class Segment:
    """One allocation, mapped in this process until the last tensor over it is gone.

    Attributes:
        address: First byte here.
        nbytes: Length, a multiple of the granularity.
        device: Index of the device.
        fd: Its descriptor, this object's own.
        token: A number that no other segment has.
    """

    def __init__(self, handle: ctypes.c_ulonglong, nbytes: int, device: int, fd: int) -> None:
        """Map the allocation; takes over the handle and the descriptor."""
        self.nbytes, self.device, self.fd, self.address = nbytes, device, -1, 0
        address = ctypes.c_ulonglong()
        self.token = secrets.randbits(62)
        size = ctypes.c_size_t(nbytes)
        try:
            _call(
                "cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(0), ctypes.c_ulonglong(0), _zero()
            )
            try:
                _call("cuMemMap", address, size, ctypes.c_size_t(0), handle, _zero())
                try:
                    access = _Access(Location(_DEVICE, device), _READ_WRITE)
                    _call("cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1))
                except DeviceMemoryError:
                    _call("cuMemUnmap", address, size)
                    raise
            except DeviceMemoryError:
                _call("cuMemAddressFree", address, size)
                raise
        finally:
            _call("cuMemRelease", handle)  # the mapping keeps it
        self.address, self.fd = address.value, fd
        _SEGMENTS.add(self)

    def bytes(self, start: int = 0, nbytes: int | None = None) -> torch.Tensor:
        """View a part of it as uint8; the view keeps it mapped."""
        length = self.nbytes - start if nbytes is None else nbytes
        return device_bytes(self.address + start, length, f"cuda:{self.device}", owner=self)

    def __del__(self) -> None:
        if self.address and not sys.is_finalizing():
            with contextlib.suppress(DeviceMemoryError, RuntimeError), _on(self.device):
                torch.cuda.synchronize(self.device)  # kernels may still read it
                size, address = ctypes.c_size_t(self.nbytes), ctypes.c_ulonglong(self.address)
                _call("cuMemUnmap", address, size)
                _call("cuMemAddressFree", address, size)
        if self.fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self.fd)
            self.fd = -1


_SEGMENTS: weakref.WeakSet[Segment] = weakref.WeakSet()
"""What is mapped in this process."""


def create(nbytes: int, device: int) -> Segment:
    """Allocate device memory of at least so many bytes.

    Raises:
        DeviceMemoryError: There is not enough, or the driver cannot give descriptors.
    """
    unit = granularity(device)
    size = -(-nbytes // unit) * unit
    handle, fd, properties = ctypes.c_ulonglong(), ctypes.c_int(-1), _properties(device)
    with _on(device):
        _call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(properties), _zero())
        try:
            _call("cuMemExportToShareableHandle", ctypes.byref(fd), handle, _FILE_DESCRIPTOR, _zero())
        except DeviceMemoryError:
            _call("cuMemRelease", handle)
            raise
        return _made(handle, size, device, fd.value)


def open_fd(fd: int, nbytes: int) -> Segment:
    """Map memory that another process made; the descriptor stays the caller's.

    Args:
        fd: From `Segment.fd` of the process that made it, as received.
        nbytes: `Segment.nbytes` there.

    Raises:
        DeviceMemoryError: No such memory, of another size, or of a device that is not the current one.
    """
    device = torch.cuda.current_device()
    handle, properties = ctypes.c_ulonglong(), _Properties()
    with _on(device):
        _call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fd), _FILE_DESCRIPTOR)
        _call("cuMemGetAllocationPropertiesFromHandle", ctypes.byref(properties), handle)
        if properties.location.id != device:
            _call("cuMemRelease", handle)
            raise DeviceMemoryError(
                f"the memory is on cuda:{properties.location.id} and the current device is cuda:{device}; set it first"
            )
        return _made(handle, nbytes, device, os.dup(fd))


def _made(handle: ctypes.c_ulonglong, nbytes: int, device: int, fd: int) -> Segment:
    try:
        return Segment(handle, nbytes, device, fd)
    except DeviceMemoryError:
        os.close(fd)
        raise


def find(address: int) -> Segment | None:
    """Find the segment that an address of this process lies in."""
    for segment in list(_SEGMENTS):
        if segment.address <= address < segment.address + segment.nbytes:
            return segment
    return None


def part_of(memory: torch.Tensor, start: int, nbytes: int) -> torch.Tensor:
    """View bytes of a mapped segment as a storage of their own, which keeps the segment mapped."""
    segment = find(memory.data_ptr())
    if segment is None:
        raise DeviceMemoryError(f"no device memory is mapped at {memory.data_ptr():#x}")
    return segment.bytes(memory.data_ptr() - segment.address + start, nbytes)


def map_device(fd: int, nbytes: int) -> torch.Tensor:
    """Map a segment on the current device and view it as uint8."""
    return open_fd(fd, nbytes).bytes()


def _zero() -> ctypes.c_ulonglong:
    return ctypes.c_ulonglong(0)


@contextlib.contextmanager
def _on(device: int) -> Iterator[None]:
    """The device's primary context is the current one, as torch has it."""
    with torch.cuda.device(device):
        _make_context(device)
        yield


@cache
def _make_context(device: int) -> None:
    torch.zeros(1, device=f"cuda:{device}")
