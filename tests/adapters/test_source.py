"""An engine's files, read and not imported: each would end the process that imports it."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eplb_core.adapters import hooking, source

FILES = {
    "an_engine/__init__.py": "raise SystemExit",
    "an_engine/places/maps.py": """
from __future__ import annotations
from .helpers import shared as imported, absent
from an_engine.places.nothing import gone
value = 3
if value:
    def one(a: int, /, b="x", *rest, c, d=[1], **more) -> int: ...
try:
    import nothing_of_this_name
except ImportError:
    one_more = None
async def waits(a): ...
class Base:
    def inherited(self, layers): ...
class Maps(Base):
    known = 1
    @classmethod
    def make(cls, rows): ...
    @staticmethod
    def free(rows): ...
    def update(self, other): ...
class Odd(imported.Unknown): ...
""",
    "an_engine/places/helpers.py": "def shared(x): ...",
    "an_engine/broken.py": "def (",
    "an_engine/late.py": "flag = 1",
}


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The engine, on the path."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(source, "_waiting", {})
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "an_engine"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "signature"),
    [
        ("one", "(a: 'int', /, b='x', *rest, c, d=[1], **more)"),
        ("waits", "(a)"),
        ("imported", "(x)"),
        ("Maps.update", "(self, other)"),
        ("Maps.make", "(rows)"),
        ("Maps.free", "(rows)"),
        ("Maps.inherited", "(self, layers)"),
    ],
)
def test_a_signature_is_read_as_it_is_called(name: str, signature: str) -> None:
    found: Any = source.find(f"an_engine.places.maps.{name}")
    assert isinstance(found, inspect.Signature)
    assert str(found) == signature
    assert "an_engine" not in sys.modules


@pytest.mark.parametrize("name", ["value", "absent", "gone", "one_more", "Maps.known", "value.real"])
def test_what_a_file_does_not_tell_is_unknown_and_fits_no_signature(name: str) -> None:
    found = source.find(f"an_engine.places.maps.{name}")
    assert isinstance(found, source.Unknown)
    assert hooking.mismatch(found, name, ("a",)).startswith(f"expected {name}(a), found an ")
    assert hooking.mismatch(found, name, None) == ""


@pytest.mark.parametrize(
    "name",
    ["places.maps.two", "places.maps.Maps.two", "places.maps.one.two", "places.other.one", "other.one", "late.x.y"],
)
def test_what_is_not_there_is_none(name: str) -> None:
    assert source.find(f"an_engine.{name}") is None
    assert source.find("no_such_engine.places.one") is None


def test_a_file_that_is_no_python_is_not_taken_for_one_without_the_function() -> None:
    """FD6: an error while one module is looked at concerns that module alone, and is named."""
    found: Any = source.find("an_engine.broken.one")
    assert found.reason.startswith("a file that cannot be read (SyntaxError: ")
    assert source.find("an_engine.places.maps.one") is not None


def test_a_module_that_is_imported_is_looked_at_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another plug-in may have changed it."""
    monkeypatch.setitem(sys.modules, "an_engine.places.maps", importlib)
    assert source.find("an_engine.places.maps.import_module") is importlib.import_module
    assert source.find("an_engine.places.maps.one") is None
    monkeypatch.setitem(sys.modules, "an_engine", None)  # who puts None there forbids the import
    monkeypatch.delitem(sys.modules, "an_engine.places.maps")
    assert source.find("an_engine.places.maps.one") is None


def test_members_of_a_class_are_its_functions() -> None:
    assert source.members_of("an_engine.places.maps.Maps") == ["make", "free", "update"]
    assert source.members_of("an_engine.places.maps.Other") == []
    assert "register" in source.members_of("abc.ABCMeta")


def test_the_module_of_a_name_is_the_longest_that_there_is() -> None:
    assert source.module_in("an_engine.places.maps.Maps.update") == "an_engine.places.maps"
    assert source.module_in("no_such_engine.places") == ""
    assert source.file_of("sys") == "built-in"


def test_who_waits_for_an_import_acts_once_right_after_it(tmp_path: Path) -> None:
    (tmp_path / "an_engine/__init__.py").write_text("")
    said: list[Any] = []
    source.when_imported("an_engine.late", lambda late: said.append((late, sys.modules["an_engine.late"].flag)))
    source.when_imported("an_engine.late", lambda late: said.append("second"))
    source.when_imported("an_engine.never", said.append)
    importlib.import_module("an_engine.places.helpers")
    assert said == []
    importlib.import_module("an_engine.late")
    assert said == [(True, 1), "second"]
    source.when_imported("an_engine.late", said.append)
    assert said[2:] == [False]
    with pytest.raises(ImportError):
        importlib.import_module("an_engine.never")
