"""The one way in which kernels are compiled.

Every kernel is cached on disk (the first call after an installation compiles, later processes load), releases the
interpreter lock (placement on a worker thread must not stall an engine's threads) and keeps strict IEEE arithmetic in
program order: no `fastmath`, no parallel reductions. Equal inputs then give equal bytes on any machine. Where the disk
takes nothing (read-only, or full) kernels are compiled all the same, in each process, and a line in the log says so.
A kernel that Python calls is compiled together with all kernels that it calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar, cast

import numba

QUIET = "EPLB_CORE_QUIET"
"""Environment variable: set to anything, nothing is said on stderr when kernels are compiled."""

P = ParamSpec("P")
T = TypeVar("T")


def kernel(function: Callable[P, T]) -> Callable[P, T]:
    """Compile `function` on first use; arguments are arrays and numbers only, allocated by the caller."""
    return cast("Callable[P, T]", _compiled(function))


def inline_kernel(function: Callable[P, T]) -> Callable[P, T]:
    """Compile a small helper into its callers: an array argument of a call is seven words on the stack."""
    return cast("Callable[P, T]", _compiled(function, forceinline=True))


def lean_kernel(function: Callable[P, T]) -> Callable[P, T]:
    """Compile a function that allocates no array: references are not counted, one atomic step for each array of a call.

    The caller keeps its arrays alive until the call has ended, as all callers do.
    """
    return cast("Callable[P, T]", _compiled(function, _nrt=False))


def _compiled(function: Callable[..., Any], **more: bool) -> Any:
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True, **more}
    try:
        return _linkable(_announced(_cached(numba.njit(cache=True, **options)(function))))
    except RuntimeError:  # no place for a cache; any other reason comes up again
        _say_not_kept("no folder for them can be written")
        return _linkable(numba.njit(**options)(function))


def _announced(compiled: Any) -> Any:
    """Say on stderr why this call takes long, the first time that a process finds a kernel not on disk."""
    with contextlib.suppress(AttributeError):  # nothing is compiled (NUMBA_DISABLE_JIT)
        compile_now = compiled._compiler.compile

        def say_and_compile(*arguments: Any) -> Any:
            _say_that_it_compiles()
            return compile_now(*arguments)

        compiled._compiler.compile = say_and_compile
    return compiled


@cache
def _say_that_it_compiles() -> None:
    if sys.stderr is None or os.environ.get(QUIET):
        return
    with contextlib.suppress(OSError, ValueError):  # no plan fails because its log is full or closed
        print(
            "eplb_core: this call waits while its kernels are compiled, 10 s to a minute, once after an installation: "
            f"later processes load them from disk ({QUIET}=1 hides this line)",
            file=sys.stderr,
            flush=True,
        )


def _linkable(compiled: Any) -> Any:
    """Let other kernels call this one as code to link, which LLVM optimizes once, within the kernel that Python calls.

    numba would make a whole library of each called kernel: optimize it, turn it into machine code, wrap it for Python
    and keep it on disk, and do so once more for every constant that is passed. That was two thirds of all the time.
    """
    numba_: Any = numba
    if numba_.config.DISABLE_JIT:
        return compiled
    compiler, context = compiled._compiler, compiled.targetctx
    compiler._customize_flags = _internals().Flags
    results: dict[tuple[Any, ...], Any] = {}

    def call_template(args: tuple[Any, ...], kws: dict[str, Any]) -> tuple[Any, ...]:
        signature, folded = compiler.fold_argument_types(tuple(map(numba_.types.unliteral, args)), kws)
        if folded not in results:
            results[folded] = result = _compile_to_link(compiler, folded)
            context.insert_user_function(result.library, result.fndesc, [result.library])
        name = f"CallTemplate({compiled.py_func.__name__})"
        signatures = [result.signature for result in results.values()]
        template = numba_.core.typing.make_concrete_template(name, key=compiled.py_func, signatures=signatures)
        return template, signature, folded, {}

    compiled.get_call_template = call_template
    compiled.get_overload = lambda args: results[tuple(args)].library
    return compiled


def _compile_to_link(compiler: Any, args: tuple[Any, ...]) -> Any:
    core: Any = numba.core
    flags = _internals().Flags()
    compiler.targetdescr.options.parse_as_flags(flags, compiler.targetoptions)
    flags.no_compile = flags.no_cpython_wrapper = True
    context = compiler.targetdescr.target_context
    return core.compiler.compile_extra(
        compiler.targetdescr.typing_context,
        context,
        compiler.py_func,
        args=args,
        return_type=None,
        flags=flags,
        locals={},
        library=_internals().Library(context.codegen(), compiler.py_func.__qualname__),
    )


@cache
def _internals() -> Any:
    """Numba's classes for a library and for flags, made cheaper."""
    core: Any = numba.core

    class Library(core.codegen.JITCodeLibrary):  # type: ignore[misc]
        """Code that is only linked into other libraries: neither optimized nor turned into machine code."""

        def _optimize_final_module(self) -> None:
            pass

        def _finalize_final_module(self) -> None:
            self._finalized = True

    class Flags(core.compiler.Flags):  # type: ignore[misc]
        """Compared by what is set, for which numba lists all options: a fifth of the time, as keys of its caches."""

        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            return type(other) is Flags and self._values == other._values

        def __hash__(self) -> int:
            return len(self._values)

    return SimpleNamespace(Library=Library, Flags=Flags)


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
