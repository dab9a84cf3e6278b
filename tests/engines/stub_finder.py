"""Stands in for compiled parts of an engine that a CPU machine lacks, so that the rest of it imports.

Any attribute of such a module is a class that accepts everything; nothing in these tests calls one.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterable, Sequence
from typing import Any


class _AnythingType(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)


def _anything(name: str) -> Any:
    def take(self: object, *args: Any, **kwargs: Any) -> None:
        pass

    def call(self: object, *args: Any, **kwargs: Any) -> Any:
        # As a decorator: leave the function alone.
        return args[0] if len(args) == 1 and callable(args[0]) else None

    def subscript(cls: type, item: Any) -> type:
        return cls

    body = {"__init__": take, "__call__": call, "__class_getitem__": classmethod(subscript)}
    return _AnythingType(name, (), body)


class _Stub(types.ModuleType):
    __version__ = "0.0.0"
    __path__: list[str] = []  # noqa: RUF012  the import system's name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _anything(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


SGLANG = (
    *("cuda", "cutlass", "deep_ep", "deep_gemm", "deepseek_recipe", "easydict", "flash_attn", "flashinfer", "humming"),
    *("interegular", "mooncake", "nixl", "nvshmem", "outlines", "quack", "sgl_kernel", "smg_grpc_servicer", "tilelang"),
    "torch_memory_saver",
)


def install(names: Iterable[str]) -> None:
    """Answer imports of these packages where they are not installed; the wheel's own come first."""
    sys.meta_path.append(_Finder(names))
    # The public torchvision is built for CUDA: its operators do not load beside a torch without it.
    sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision._meta_registrations")
