"""The one way in which kernels are compiled.

Every kernel is cached on disk (the first call after an installation compiles, later processes load), releases the
interpreter lock (placement on a worker thread must not stall an engine's threads) and keeps strict IEEE arithmetic in
program order: no `fastmath`, no parallel reductions. Equal inputs then give equal bytes on any machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba

P = ParamSpec("P")
T = TypeVar("T")


def kernel(function: Callable[P, T]) -> Callable[P, T]:
    """Compile `function` on first use; arguments are arrays and numbers only, allocated by the caller."""
    return cast("Callable[P, T]", _cached(numba.njit(cache=True, nogil=True, error_model="numpy")(function)))


def inline_kernel(function: Callable[P, T]) -> Callable[P, T]:
    """Compile a small helper into its callers: an array argument of a call is seven words on the stack."""
    compiled = numba.njit(cache=True, nogil=True, error_model="numpy", forceinline=True)(function)
    return cast("Callable[P, T]", _cached(compiled))


def _cached(compiled: Any) -> Any:
    """Let the disk cache see every source file of the package, not only the one that the kernel is in.

    numba keeps a compiled kernel, with the kernels that it calls inside, until its own file changes; a change of a
    called kernel's file would go unseen. Without compilation (NUMBA_DISABLE_JIT) there is no cache to tell.
    """
    with contextlib.suppress(AttributeError):
        compiled._cache._cache_file._source_stamp = _stamp()
    return compiled


@cache
def _stamp() -> tuple[tuple[str, int, int], ...]:
    root = Path(__file__).parent
    stats = ((str(file.relative_to(root)), file.stat()) for file in sorted(root.rglob("*.py")))
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats)
