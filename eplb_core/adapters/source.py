"""What an engine has, told without importing it: an import of some of its modules takes half a minute, or a GPU.

A module that is imported already is looked at as it is; of any other the file is read. Hooks on it wait for its import.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple


class Unknown(NamedTuple):
    """A name that is there, but its file does not tell what it is; or a file that cannot be read."""

    reason: str


def find(name: str) -> object:
    """Return what a dotted name stands for: the object, its signature in a file, `Unknown`, or None: not there.

    Args:
        name: As of `pkgutil.resolve_name`: a module, or something in one.

    Returns:
        A signature for functions and methods that are read from a file; the class's node for classes.
    """
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        module = ".".join(parts[:end])
        loaded = sys.modules.get(module)
        if loaded is not None:
            found: Any = loaded
            for step in parts[end:]:
                found = getattr(found, step, None)
            return found
        path = file_of(module)
        if path:
            try:
                return _in_file(module, path, parts[end:])
            except (OSError, SyntaxError, ValueError) as error:
                return Unknown(f"a file that cannot be read ({type(error).__name__}: {error})")
    return None


def file_of(module: str) -> str:
    """Return the file of a module, without importing it or its parents; empty where there is none."""
    names = module.split(".")
    prefixes = [".".join(names[:end]) for end in range(1, len(names) + 1)]
    if any(sys.modules.get(prefix, sys) is None for prefix in prefixes):
        return ""  # whoever puts None there forbids the import
    imported = [prefix for prefix in prefixes[:-1] if prefix in sys.modules]
    if imported:
        folders, rest = _folders(sys.modules[imported[-1]]), names[imported[-1].count(".") + 1 :]
    else:
        spec = _spec(names[0])
        if spec is None or len(names) == 1:
            return "" if spec is None else spec.origin or ""
        folders, rest = [Path(each) for each in spec.submodule_search_locations or ()], names[1:]
    for name in rest[:-1]:
        folders = [folder / name for folder in folders if (folder / name).is_dir()]
    ends = (f"{rest[-1]}.py", f"{rest[-1]}/__init__.py")
    return next((str(folder / end) for folder in folders for end in ends if (folder / end).is_file()), "")


def _folders(package: object) -> list[Path]:
    return [Path(each) for each in getattr(package, "__path__", ())]


def _spec(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):  # imported by other means, which leave no trace of where from
        return None


@cache
def _tree(path: str) -> ast.Module:
    return ast.parse(Path(path).read_bytes(), path)


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module or class, in order, also within conditions."""
    for statement in body:
        yield statement
        if isinstance(statement, (ast.If, ast.Try, ast.With)):
            yield from _statements(statement.body)
            yield from _statements(getattr(statement, "orelse", ()))
            for handler in getattr(statement, "handlers", ()):
                yield from _statements(handler.body)


def _in_file(module: str, path: str, names: Sequence[str]) -> object:
    if not names:
        return Unknown("a module")
    found: object = None
    for statement in _statements(_tree(path).body):
        now = _named(statement, names[0], module, path)
        # What only types need, or stands in for what is missing, does not hide a definition.
        found = found if now is None or (isinstance(now, Unknown) and found is not None) else now
    for name in names[1:]:
        if not isinstance(found, _Class):
            return found if isinstance(found, Unknown) else getattr(found, name, None)
        found = found.member(name)
    return found


def _named(statement: ast.stmt, name: str, module: str, path: str) -> object:
    """What this statement binds the name to; None if nothing."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)) and statement.name == name:
        return signature_of(statement)
    if isinstance(statement, ast.ClassDef) and statement.name == name:
        return _Class(statement, module, path)
    if isinstance(statement, ast.ImportFrom):
        for alias in statement.names:
            if (alias.asname or alias.name) == name:
                return find(f"{_origin(statement, module, path)}.{alias.name}") or Unknown("an import")
    targets = getattr(statement, "targets", [getattr(statement, "target", None)])
    if isinstance(statement, (ast.Assign, ast.AnnAssign)) and any(getattr(t, "id", "") == name for t in targets):
        return Unknown("an assignment")
    return None


def _origin(statement: ast.ImportFrom, module: str, path: str) -> str:
    if not statement.level:
        return statement.module or ""
    package = module if path.endswith("__init__.py") else module.rpartition(".")[0]
    return importlib.util.resolve_name("." * statement.level + (statement.module or ""), package)


class _Class(NamedTuple):
    node: ast.ClassDef
    module: str
    path: str

    def member(self, name: str) -> object:
        """Of the class, or of the first base that has it."""
        for statement in _statements(self.node.body):
            found = _named(statement, name, self.module, self.path)
            if found is not None:
                return found
        for base in self.node.bases:
            of_base = _in_file(self.module, self.path, ast.unparse(base).split("."))
            found = of_base.member(name) if isinstance(of_base, _Class) else getattr(of_base, name, None)
            if found is not None:
                return found
        return None

    def members(self) -> list[str]:
        """Names of its own functions."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        return [statement.name for statement in _statements(self.node.body) if isinstance(statement, kinds)]


def members_of(name: str) -> list[str]:
    """Return names of the functions of a class, in their order; none where there is no such class."""
    found = find(name)
    if isinstance(found, _Class):
        return found.members()
    return [key for key, value in vars(found).items() if callable(value)] if isinstance(found, type) else []


def signature_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> inspect.Signature:
    """Return a function's signature as its source tells it; of a class method without the class, as it is called."""
    given, kinds = node.args, inspect.Parameter
    plain = [*given.posonlyargs, *given.args]
    defaults = {id(each): value for each, value in zip(plain[::-1], given.defaults[::-1], strict=False)}
    defaults |= {id(each): value for each, value in zip(given.kwonlyargs, given.kw_defaults, strict=True) if value}

    def parameter(each: ast.arg, kind: Any) -> inspect.Parameter:
        annotation = kinds.empty if each.annotation is None else ast.unparse(each.annotation)
        default = _AsWritten(ast.unparse(defaults[id(each)])) if id(each) in defaults else kinds.empty
        return kinds(each.arg, kind, default=default, annotation=annotation)

    parameters = [parameter(each, kinds.POSITIONAL_ONLY) for each in given.posonlyargs]
    parameters += [parameter(each, kinds.POSITIONAL_OR_KEYWORD) for each in given.args]
    parameters += [parameter(given.vararg, kinds.VAR_POSITIONAL)] if given.vararg else []
    parameters += [parameter(each, kinds.KEYWORD_ONLY) for each in given.kwonlyargs]
    parameters += [parameter(given.kwarg, kinds.VAR_KEYWORD)] if given.kwarg else []
    bound = any(isinstance(each, ast.Name) and each.id == "classmethod" for each in node.decorator_list)
    return inspect.Signature(parameters[1:] if bound else parameters)


class _AsWritten(str):
    """A default's text, shown without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


# ---- what waits for an import ----------------------------------------------------------------------------------------


def module_in(name: str) -> str:
    """Return the module part of a dotted name: the longest that is imported or has a file; empty if none."""
    parts = name.split(".")
    prefixes = (".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))
    return next((each for each in prefixes if sys.modules.get(each) is not None or file_of(each)), "")


def when_imported(module: str, act: Callable[[bool], object]) -> None:
    """Call `act(False)` now where the module is imported, else `act(True)` as soon as it is.

    Args:
        module: Dotted name.
        act: Called once, with whether it had to wait, in the thread that imports; must not raise.
    """
    if sys.modules.get(module) is not None:
        act(False)
        return
    _waiting.setdefault(module, []).append(act)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _Finder:
    """Finds nothing itself: asks the others, and lets who waits act after the module has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _waiting:
            return None
        others = (each.find_spec for each in sys.meta_path if each is not self and hasattr(each, "find_spec"))
        spec = next(filter(None, (find_spec(name, path, target) for find_spec in others)), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = partial(_run, loader.exec_module, name)
        return spec


def _run(exec_module: Callable[[ModuleType], None], name: str, module: ModuleType) -> None:
    exec_module(module)
    for act in _waiting.pop(name, ()):
        act(True)


_waiting: dict[str, list[Callable[[bool], object]]] = {}
_finder: Any = _Finder()
