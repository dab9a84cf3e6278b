"""What plug-ins for engines share: which parts are on, whether the engine is the one they were written for, fallbacks.

A plug-in acts only where the environment asks for it, and it never stops an engine: what does not fit stays the
engine's own, with one line in the log that says what was expected and what was found.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
_logged: set[str] = set()
_log = [logging.getLogger("eplb_core")]

_ASKED, _OFF, _OPTIONS = "EPLB_CORE", "EPLB_CORE_OFF", "EPLB_CORE_OPTIONS"


def asked_for(engine: str) -> bool:
    """Whether the environment has `EPLB_CORE=engine`."""
    return os.environ.get(_ASKED) == engine


def parts_on(known: Sequence[str]) -> tuple[str, ...]:
    """The parts of a plug-in that `EPLB_CORE_OFF=a,b` does not switch off, in their own order.

    Raises:
        ValueError: It names a part that there is not.
    """
    off = _names(os.environ.get(_OFF, ""))
    for name in off:
        if name not in known:
            raise ValueError(f"{_OFF} (={name}) must name some of {', '.join(known)}")
    return tuple(part for part in known if part not in off)


def options_from(known: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
    """What `EPLB_CORE_OPTIONS=a=1,b=x` says, each value read by the function that `known` has for it.

    Raises:
        ValueError: An unknown option, one without a value, or a value that its function refuses.
    """
    found = {}
    for entry in _names(os.environ.get(_OPTIONS, "")):
        name, equals, text = (part.strip() for part in entry.partition("="))
        if name not in known or not equals:
            raise ValueError(f"{_OPTIONS} (={entry}) must be name=value with a name of {', '.join(known)}")
        try:
            found[name] = known[name](text)
        except ValueError as error:
            raise ValueError(f"{_OPTIONS} (={entry}): {error}") from None
    return found


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def one_of(*words: str) -> Callable[[str], str]:
    """A reader of options that takes these words alone."""

    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"{text!r} must be one of {', '.join(words)}")
        return text

    return read


def mismatch(target: object, name: str, parameters: Sequence[str]) -> str:
    """Why a hook does not fit a function of the engine, or nothing where it does.

    Args:
        target: The engine's function or class method, or None where there is none of that name.
        name: How the engine calls it.
        parameters: Names that its parameters must begin with, `self` and `cls` included; what is beyond them must have
            defaults.
    """
    if not callable(target):
        return f"expected {name}({', '.join(parameters)}), found no such function"
    try:
        found = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        return f"expected {name}({', '.join(parameters)}), found a function that does not tell its parameters"
    extra = found[len(parameters) :]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    same = [parameter.name for parameter in found[: len(parameters)]] == list(parameters)
    if same and all(p.default is not inspect.Parameter.empty or p.kind in variadic for p in extra):
        return ""
    return f"expected {name}({', '.join(parameters)}), found {name}{inspect.signature(target)}"


def guarded(ours: Callable[..., T], engine_own: Callable[..., T], part: str) -> Callable[..., T]:
    """`ours`; where it raises, one line in the log and what the engine does itself."""

    def call(*args: Any, **kwargs: Any) -> T:
        try:
            return ours(*args, **kwargs)
        except Exception as error:
            log_once(f"{part}: the engine's own code goes on, since ours raised {type(error).__name__}: {error}")
            return engine_own(*args, **kwargs)

    return call


def log_through(name: str) -> None:
    """Write to this logger from now on: engines show what comes from names of their own."""
    _log[0] = logging.getLogger(name)


def log_once(message: str, level: int = logging.WARNING) -> None:
    """Log a line unless this process has."""
    if message not in _logged:
        _logged.add(message)
        _log[0].log(level, "eplb_core: %s", message)
