"""Packages that only parts of the library need, and the words that name the extra which brings them."""

from __future__ import annotations

import importlib
from typing import Any


def needed(module: str, extra: str, what: str) -> Any:
    """Import a module that is, or that imports, the package of an extra.

    Args:
        module: Dotted name of the module.
        extra: Extra of `eplb-core` that brings the package.
        what: What needs it, for the message.

    Raises:
        ModuleNotFoundError: The package is not installed; the text names it and the extra.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "eplb_core":
            raise
        text = f"{what} needs {error.name}: pip install 'eplb-core[{extra}]'"
        raise ModuleNotFoundError(text, name=error.name) from error
