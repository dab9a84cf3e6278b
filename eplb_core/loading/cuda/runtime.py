"""The few calls of CUDA's runtime that transports need and torch does not offer, by ctypes."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eplb_core._arrays import IntArray

if TYPE_CHECKING:
    import torch

NOT_READY = 600
_NOT_SUPPORTED = (36, 801)  # a newer driver is needed; not supported
_NON_BLOCKING = 1  # streams that do not wait for the legacy one
_NO_TIMING = 2  # events
_PEER_ACCESS = 1  # opening maps memory of other devices
_RELAXED = 2
_DEFAULT_KIND = 4  # of a copy: addresses say where they are
_STREAM_ORDER, _PREFER_OVERLAP = 1, 1


class CudaError(RuntimeError):
    """A failed call, with CUDA's code and message."""

    def __init__(self, call: str, code: int, words: str) -> None:
        super().__init__(f"{call}: {words} ({code})")
        self.code = code


class Location(ctypes.Structure):
    """Where memory is: the kind of place and its number."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source", Location),
        ("destination", Location),
        ("flags", ctypes.c_uint),
    )


class Handle(ctypes.Structure):
    """Names an allocation to other processes."""

    _fields_ = (("reserved", ctypes.c_char * 64),)

    def __bytes__(self) -> bytes:
        return ctypes.string_at(ctypes.byref(self), ctypes.sizeof(self))


class Runtime:
    """libcudart and the driver, as they are loaded in this process."""

    def __init__(self, runtime: ctypes.CDLL, driver: ctypes.CDLL) -> None:
        self._runtime = runtime
        self._driver = driver
        runtime.cudaGetErrorString.restype = ctypes.c_char_p
        version = ctypes.c_int()
        self.call("cudaRuntimeGetVersion", ctypes.byref(version))
        self.version = version.value
        self.batched = self.version >= 12080 and hasattr(runtime, "cudaMemcpyBatchAsync")
        """`cudaMemcpyBatchAsync` is there; False once the driver says that it is not."""

    def call(self, name: str, *args: Any) -> None:
        """Call a function; anything but success raises."""
        code = int(getattr(self._runtime, name)(*args))
        if code:
            self._runtime.cudaGetLastError()  # clears what is not fatal, so that nobody else finds it
            raise CudaError(name, code, self._runtime.cudaGetErrorString(code).decode())

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Make a device current, and let a graph that another thread captures go on undisturbed."""
        before, mode = ctypes.c_int(), ctypes.c_int(_RELAXED)
        self.call("cudaGetDevice", ctypes.byref(before))
        self.call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            if before.value != device:
                self.call("cudaSetDevice", ctypes.c_int(device))
            yield
        finally:
            if before.value != device:
                self.call("cudaSetDevice", before)
            self.call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def new_stream(self) -> ctypes.c_void_p:
        """Make a stream of the lowest priority on the current device."""
        stream = ctypes.c_void_p()
        self.call("cudaStreamCreateWithPriority", ctypes.byref(stream), _NON_BLOCKING, 0)
        return stream

    def new_event(self) -> ctypes.c_void_p:
        """Make an event that records no times."""
        event = ctypes.c_void_p()
        self.call("cudaEventCreateWithFlags", ctypes.byref(event), _NO_TIMING)
        return event

    def is_over(self, event: ctypes.c_void_p) -> bool:
        """Say whether all that was enqueued before the event was recorded is done; never waits."""
        try:
            self.call("cudaEventQuery", event)
        except CudaError as error:
            if error.code != NOT_READY:
                raise
            return False
        return True

    def allocation(self, address: int) -> tuple[int, int]:
        """Find first byte and length of the allocation that an address lies in."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        code = self._driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        if code:
            raise CudaError("cuMemGetAddressRange", code, f"no device memory at {address:#x}")
        return base.value, size.value

    def handle_of(self, base: int) -> bytes:
        """Make the handle by which other processes open an allocation."""
        handle = Handle()
        self.call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(base))
        return bytes(handle)

    def open_handle(self, handle: bytes) -> int:
        """Map another process's allocation and return its first byte here."""
        base = ctypes.c_void_p()
        self.call("cudaIpcOpenMemHandle", ctypes.byref(base), Handle.from_buffer_copy(handle), _PEER_ACCESS)
        return int(base.value or 0)

    def close_handle(self, base: int) -> None:
        """Unmap what `open_handle` mapped."""
        self.call("cudaIpcCloseMemHandle", ctypes.c_void_p(base))

    def copy(
        self, dst: IntArray, src: IntArray, nbytes: IntArray, stream: ctypes.c_void_p, *, overlap: bool, batched: bool
    ) -> None:
        """Enqueue copies, in any order."""
        if batched and self.batched:
            try:
                self._copy_batch(dst, src, nbytes, stream, overlap)
                return
            except CudaError as error:
                if error.code not in _NOT_SUPPORTED:
                    raise
                self.batched = False
        for to, of, count in zip(dst.tolist(), src.tolist(), nbytes.tolist(), strict=True):
            self.call(
                "cudaMemcpyAsync",
                ctypes.c_void_p(to),
                ctypes.c_void_p(of),
                ctypes.c_size_t(count),
                _DEFAULT_KIND,
                stream,
            )

    def _copy_batch(
        self, dst: IntArray, src: IntArray, nbytes: IntArray, stream: ctypes.c_void_p, overlap: bool
    ) -> None:
        columns = [np.ascontiguousarray(column) for column in (dst, src, nbytes)]
        attributes = _Attributes(source_order=_STREAM_ORDER, flags=_PREFER_OVERLAP if overlap else 0)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t()
        head = [ctypes.c_void_p(column.ctypes.data) for column in columns]
        tail = [ctypes.byref(attributes), ctypes.byref(first), ctypes.c_size_t(1)]
        if self.version < 13000:  # CUDA 12 names the copy at fault
            tail.append(ctypes.byref(failed))
        self.call("cudaMemcpyBatchAsync", *head, ctypes.c_size_t(len(dst)), *tail, stream)


@cache
def runtime() -> Runtime:
    """Find the runtime that torch has loaded in this process; raise ImportError where there is none."""
    import torch

    if not torch.cuda.is_available():
        raise ImportError("torch finds no CUDA device")
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return Runtime(
        _library("libcudart.so", ("libcudart.so.13", "libcudart.so.12")), _library("libcuda.so", ("libcuda.so.1",))
    )


def _library(part: str, names: tuple[str, ...]) -> ctypes.CDLL:
    maps = os.fsdecode(Path("/proc/self/maps").read_bytes())
    loaded = [line.split()[-1] for line in maps.splitlines() if part in line]
    errors = []
    for name in (*loaded[:1], *names):
        try:
            return ctypes.CDLL(name)
        except OSError as error:  # noqa: PERF203
            errors.append(str(error))
    raise ImportError("; ".join(errors))


class DeviceBytes:
    """Device memory that torch can look at; torch keeps this object, and this one what owns the memory."""

    def __init__(self, address: int, nbytes: int, owner: object = None) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


def device_bytes(address: int, nbytes: int, device: str, owner: object = None) -> torch.Tensor:
    """View bytes at an address of a device as a tensor, uint8 `[nbytes]`; it keeps `owner` alive and nothing else."""
    import torch

    return torch.as_tensor(DeviceBytes(address, nbytes, owner), device=device)
