"""The one way in which kernels are compiled.

Every kernel is cached on disk (the first call after an installation compiles, later processes load), releases the
interpreter lock (placement on a worker thread must not stall an engine's threads) and keeps strict IEEE arithmetic in
program order: no `fastmath`, no parallel reductions. Equal inputs then give equal bytes on any machine. Where the disk
takes nothing (read-only, or full) kernels are compiled all the same, in each process, and a line in the log says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba

P = ParamSpec("P")
T = TypeVar("T")


def kernel(function: Callable[P, T]) -> Callable[P, T]:
    """Compile `function` on first use; arguments are arrays and numbers only, allocated by the caller."""
    return cast("Callable[P, T]", _compiled(function))


def inline_kernel(function: Callable[P, T]) -> Callable[P, T]:
    """Compile a small helper into its callers: an array argument of a call is seven words on the stack."""
    return cast("Callable[P, T]", _compiled(function, forceinline=True))


def _compiled(function: Callable[..., Any], **more: bool) -> Any:
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", **more}
    try:
        return _cached(_for_all_constants(numba.njit(cache=True, **options)(function)))
    except RuntimeError:  # no place for a cache; any other reason comes up again
        _say_not_kept("no folder for them can be written")
        return _for_all_constants(numba.njit(**options)(function))


def _for_all_constants(compiled: Any) -> Any:
    """Compile once, whatever constants other kernels pass: numba would once more for each, a third of all the time."""
    with contextlib.suppress(AttributeError):  # nothing is compiled (NUMBA_DISABLE_JIT)
        resolve = compiled.get_call_template
        compiled.get_call_template = lambda args, kws: resolve(tuple(map(_variable, args)), kws)
    return compiled


def _variable(argument: Any) -> Any:
    compiler: Any = numba
    return compiler.types.unliteral(argument)


@cache
def _say_not_kept(why: str) -> None:
    logging.getLogger("eplb_core").warning(
        "compiled kernels are not kept on disk (%s), so every process compiles them anew, about a minute in all; "
        "set NUMBA_CACHE_DIR to a folder that can be written",
        why,
    )


def _memmove() -> Callable[[int, int, int], Any]:
    """The C library's; in kernels as an external symbol, so that they can be cached, and as a call without compiler."""
    compiler: Any = numba
    if compiler.config.DISABLE_JIT:
        return lambda to, source, nbytes: ctypes.memmove(int(to), int(source), int(nbytes))
    word = compiler.types.uintp
    function: Any = compiler.types.ExternalFunction("memmove", word(word, word, word))
    return cast("Callable[[int, int, int], Any]", function)


memmove = _memmove()


def _cached(compiled: Any) -> Any:
    """Let the disk cache see every file that a kernel's file imports, not only its own.

    numba keeps a compiled kernel, with the kernels that it calls and the constants that it reads inside, until its own
    file changes; a change of an imported file would go unseen. Without compilation (NUMBA_DISABLE_JIT) there is no
    cache to tell.
    """
    with contextlib.suppress(AttributeError):
        compiled._cache._cache_file._source_stamp = _stamp(Path(compiled.py_func.__code__.co_filename))
        compiled._cache.save_overload = _saving(compiled._cache.save_overload)
    return compiled


def _saving(save: Callable[..., None]) -> Callable[..., None]:
    """Go on with what was compiled where a full disk takes no copy of it; numba leaves no part of a file behind."""

    def save_if_possible(*arguments: Any) -> None:
        try:
            save(*arguments)
        except OSError as error:
            _say_not_kept(error.strerror or str(error))

    return save_if_possible


@cache
def _stamp(file: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, time and size of a file and of all files of the package that it imports."""
    seen: set[Path] = set()
    todo = [file]
    while todo:
        path = todo.pop()
        if path not in seen:
            seen.add(path)
            todo += _imported(path)
    stats = ((path.name, path.stat()) for path in sorted(seen))
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats)


@cache
def _imported(file: Path) -> tuple[Path, ...]:
    root = Path(__file__).parent.parent
    found = re.findall(r"^ *from (eplb_core[\w.]*) import \(?\s*(\w+)", file.read_text("utf-8"), re.MULTILINE)
    paths = (root.joinpath(*path.split(".")).with_suffix(".py") for name in found for path in (name[0], ".".join(name)))
    return tuple(path for path in paths if path.exists())
