"""Every public callable with one bad argument: it returns, or refuses in a line that names the argument.

What is refused changes nothing, takes no more time and memory than it should, and ends in the library's own errors,
TypeError, ValueError or IndexError.
"""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eplb_core.errors import EplbError
from tests.fuzz import calls
from tests.fuzz.bad_values import bad_values
from tests.fuzz.limits import fuzz, limits

LIMIT_S = 10.0
"""The most that one call on arrays of some hundred numbers may take."""
_DUCKS = "agreement transport tables record backup client all_reduce on_install inner load module wait policy"
DUCKS = frozenset(_DUCKS.split())
"""Arguments of any kind that has the methods: what one lacks shows when it is asked for. And a time to wait."""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A bad path may be the name of a file to write; numpy's warnings are errors, others are not asked for."""
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", RuntimeWarning)
        yield


@pytest.mark.parametrize("name", list(calls.names()))
def test_a_bad_argument_is_named_and_changes_nothing(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as closing:
        good = calls.case(name, Path(folder), closing)
        tried = {key: list(bad_values(value)) for key, value in good.arguments.items() if key not in DUCKS}
        close(good.call(**good.arguments), closing)  # compiles
    if tried:
        pairs = st.sampled_from([(key, label) for key, labels in tried.items() for label in labels])

        @fuzz(3)
        @given(pairs)
        def check(pair: tuple[str, str]) -> None:
            judge(name, *pair)

        check()


def judge(name: str, argument: str, label: str) -> None:
    """One call with one other value."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as closing:
        case = calls.case(name, Path(folder), closing)
        watched = (case.held, {key: value for key, value in case.arguments.items() if key not in DUCKS})
        before = dict(parts_of(watched))
        value = bad_values(case.arguments[argument])[label]
        try:
            with limits(LIMIT_S):
                made = case.call(**{**case.arguments, argument: value})
        except (EplbError, TypeError, ValueError, IndexError, KeyError, OSError) as error:
            refused: Exception = error
        else:
            close(made, closing)
            return
        text, after = str(refused), dict(parts_of(watched))
        assert isinstance(refused, OSError) or (text.isprintable() and len(text) <= 2000), text
        named = re.search(r"`\w+|layouts differ|unexpected keyword argument", text)
        assert isinstance(refused, (EplbError, OSError)) or named, text
        assert [place for place, part in before.items() if part is not None and after.get(place) != part] == []


def close(made: Any, closing: ExitStack) -> None:
    """What a call has made and must be closed."""
    if type(made).__name__ == "Migrator":
        closing.callback(made.stop, 5.0)
    elif type(made).__name__ in ("LayoutServer", "LayoutClient"):
        closing.callback(made.close)


def parts_of(value: object, depth: int = 5) -> Iterator[tuple[str, object]]:
    """Everything in an object that can be compared, by its place."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "cpu" and value.layout == torch.strided:
            data = value.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
            yield "", (str(value.dtype), tuple(value.shape), data)
    elif isinstance(value, np.ndarray):
        if value.nbytes < 1 << 20:
            yield "", (str(value.dtype), value.shape, value.tobytes())
    elif isinstance(value, (int, float, str, bytes, type(None))):
        yield "", (type(value), value if value == value else "nan")
    elif depth:
        inside: dict[Any, object] = {}
        if isinstance(value, dict):
            inside = value
        elif isinstance(value, (list, tuple)):
            inside = dict(enumerate(value))
        elif type(value).__module__.startswith("eplb_core"):
            names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
            inside = {name: getattr(value, name) for name in names if hasattr(value, name)}
            inside |= getattr(value, "__dict__", {})
        for name, part in inside.items():
            if "scratch" not in str(name) and name != "_digest":  # what no answer depends on, what is its own cache
                yield from ((f".{name}{place}", each) for place, each in parts_of(part, depth - 1))
