"""Names that a package imports when they are first used, so that to import the package costs nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

from eplb_core._extras import needed

Table = tuple[Callable[[str], object], Callable[[], list[str]]]


def lazy(package: str, home_of: Mapping[str, str], modules: Mapping[str, str] | None = None) -> Table:
    """Make `__getattr__` and `__dir__` of a package.

    Args:
        package: Its `__name__`.
        home_of: Module inside of the package that has a name, by name.
        modules: Modules inside of the package, by the name under which users reach them.
    """
    inside = dict(modules or {})
    own = vars(sys.modules[package])

    def find(name: str) -> object:
        if name in inside:
            value: object = needed(f"{package}.{inside[name]}", "torch", f"`{name}`")
        elif name in home_of:
            value = getattr(needed(f"{package}.{home_of[name]}", "torch", f"`{name}`"), name)
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        own[name] = value
        return value

    return find, lambda: sorted({*own, *home_of, *inside})
