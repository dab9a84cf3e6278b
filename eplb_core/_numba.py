"""The one way in which kernels are compiled.

Every kernel is cached on disk (the first call after an installation compiles, later processes load), releases the
interpreter lock (placement on a worker thread must not stall an engine's threads) and keeps strict IEEE arithmetic in
program order: no `fastmath`, no parallel reductions. Equal inputs then give equal bytes on any machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba

P = ParamSpec("P")
T = TypeVar("T")


def kernel(function: Callable[P, T]) -> Callable[P, T]:
    """Compile `function` on first use; arguments are arrays and numbers only, allocated by the caller."""
    return cast("Callable[P, T]", numba.njit(cache=True, nogil=True, error_model="numpy")(function))



def inline_kernel(function: Callable[P, T]) -> Callable[P, T]:
    """Compile a small helper into its callers: an array argument of a call is seven words on the stack."""
    return cast("Callable[P, T]", numba.njit(cache=True, nogil=True, error_model="numpy", forceinline=True)(function))
