"""Find all tensors of a module, wherever it keeps them, and replace those that it keeps by name."""

from __future__ import annotations

import gc
import logging
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import CodeType, FrameType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

_OWN = frozenset(vars(torch.nn.Module()))
"""What every module has by itself."""
_DEEPEST = 64
"""Lists in lists that are looked into for tensors by name."""


class NamedTensor(NamedTuple):
    """A tensor, and what it is in its module."""

    name: str
    kind: str
    """`parameter`, `buffer`, `temporary_buffer` (not in the state dict), `attribute`, or `tensor` of a dict."""
    tensor: torch.Tensor


class Place(NamedTuple):
    """Where a tensor is kept."""

    holder: torch.nn.Module
    key: str
    kind: str
    path: tuple[Any, ...] = ()
    """Where the attribute is a list, tuple or dict: the way to the tensor in it."""


def module_tensors(module: torch.nn.Module) -> list[NamedTensor]:
    """List every tensor that the module computes with, also those in no state dict, such as scales kept as attributes.

    Lists, tuples and dicts that are attributes are looked into, and those in them: `scales.0`, `scales.0.w13`. What
    other objects hold is not found.

    Raises:
        ValueError: Two tensors would have one name, as those of the keys 1 and "1" of a dict.
    """
    found = [NamedTensor(name, place.kind, tensor.detach()) for name, place, tensor in walk(module)]
    names = Counter(each.name for each in found)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise ValueError(
            f"the module has {names[twice[0]]} tensors of the name {twice[0]!r}; give each key a text of its own"
        )
    return found


def walk(module: torch.nn.Module) -> Iterator[tuple[str, Place, torch.Tensor]]:
    """Name, place and tensor of all; a part that has several names is visited once, under its first."""
    for path, part in module.named_modules():
        before = f"{path}." if path else ""
        for key, parameter in part._parameters.items():
            if parameter is not None:
                yield before + key, Place(part, key, "parameter"), parameter
        for key, buffer in part._buffers.items():
            if buffer is not None:
                kind = "temporary_buffer" if key in part._non_persistent_buffers_set else "buffer"
                yield before + key, Place(part, key, kind), buffer
        for key, value in list(vars(part).items()):
            if key in _OWN:
                continue
            if issubclass(type(value), torch.Tensor):
                yield before + key, Place(part, key, "attribute"), value
            else:
                for name, way, tensor in _contained(value, ()):
                    yield f"{before}{key}{name}", Place(part, key, "attribute", way), tensor


def _contained(value: Any, outer: tuple[int, ...]) -> Iterator[tuple[str, tuple[Any, ...], torch.Tensor]]:
    """Name, way and tensor of all in a list, tuple or dict; `outer` are those around it, which it may lie in itself."""
    # Objects may answer anything when asked for their class.
    if not issubclass(type(value), list | tuple | dict) or id(value) in outer or len(outer) >= _DEEPEST:
        return
    for name, key, part in _items(value):
        if issubclass(type(part), torch.Tensor):
            yield f".{_key(name)}", (key,), part
        else:
            for inner, way, tensor in _contained(part, (*outer, id(value))):
                yield f".{_key(name)}{inner}", (key, *way), tensor


def _items(value: Any) -> list[tuple[Any, Any, Any]]:
    """Name, key and part of what a list, tuple, dict or deque holds, whatever its class answers when it is asked."""
    kind = type(value)
    if issubclass(kind, dict):
        return [(key, key, part) for key, part in dict.items(value)]
    base: Any = next(known for known in (list, tuple, deque) if issubclass(kind, known))
    parts = list(base.__iter__(value))
    names = getattr(kind, "_fields", None)
    if not isinstance(names, tuple) or len(names) != len(parts):
        names = tuple(range(len(parts)))
    return list(zip(names, range(len(parts)), parts, strict=True))


def place_of(module: torch.nn.Module, name: str, kind: str) -> Place | None:
    """Find where a new tensor of this name belongs; None if there is no such part, or the name is taken."""
    path, _, key = name.rpartition(".")
    try:
        part = module.get_submodule(path)
    except AttributeError:
        return None
    taken = not key or key in part._modules or key in _OWN or hasattr(type(part), key)
    return None if taken else Place(part, key, kind)


def put(place: Place, old: torch.Tensor | None, new: torch.Tensor, made: dict[int, torch.Tensor]) -> None:
    """Put `new` there. A parameter keeps its class and attributes, and stays one where it was tied to others.

    Args:
        place: Where.
        old: What was there, or None.
        new: The tensor to use.
        made: Parameters made so far, by the identity of what they replace.
    """
    holder, key, kind, path = place
    if path:
        setattr(holder, key, _with(getattr(holder, key), path, new))
        return
    for table in (holder._parameters, holder._buffers, vars(holder)):
        table.pop(key, None)
    if kind == "parameter":
        parameter = made.get(id(old))
        if parameter is None:
            cls = type(old) if isinstance(old, torch.nn.Parameter) else torch.nn.Parameter
            parameter = torch.Tensor._make_subclass(cls, new, False)
            parameter.__dict__.update(vars(old) if isinstance(old, torch.nn.Parameter) else {})
            if old is not None:
                made[id(old)] = parameter
        holder._parameters[key] = parameter  # type: ignore[assignment]
    elif kind in ("buffer", "temporary_buffer"):
        holder.register_buffer(key, new, persistent=kind == "buffer")
    else:
        setattr(holder, key, new)


def _with(value: Any, path: tuple[Any, ...], new: torch.Tensor) -> Any:
    """The container with a tensor replaced: a list or dict in place, a tuple anew."""
    inner = _with(value[path[0]], path[1:], new) if path[1:] else new
    if not isinstance(value, tuple):
        value[path[0]] = inner
        return value
    items = [*value[: path[0]], inner, *value[path[0] + 1 :]]
    return value._make(items) if hasattr(value, "_make") else tuple(items)


# ---- whatever a module holds, however it does ------------------------------------------------------------------------

_LEAVES = (
    *(str, bytes, int, float, complex, type, ModuleType, CodeType, FrameType),
    *(torch.dtype, torch.device, np.generic, logging.Logger),
)
"""What holds no tensors, or everybody's."""


class Held(NamedTuple):
    """A tensor that a module holds, directly or not."""

    name: str
    """How it is reached from the module."""
    tensor: torch.Tensor | np.ndarray[Any, Any]
    foreign: bool
    """Whether its name is not its own: it belongs to a module that this one has not registered, or lies in a set."""


def held_tensors(module: torch.nn.Module, is_left_out: Callable[[str], bool]) -> Iterator[Held]:
    """Every tensor that can be reached: registered ones first, then through any object, closure, hook or class.

    Follows what the interpreter's own garbage collector sees, and calls nothing of the objects on the way. Not
    followed: names for which `is_left_out` is true, globals of functions, and modules that contain this one.

    Args:
        module: Where to begin.
        is_left_out: Whether to leave out what has this name.
    """
    own = {id(part) for part in module.modules()}
    reached: set[int] = set()
    names: Counter[str] = Counter()
    queue: deque[tuple[str, Any, bool]] = deque((name, tensor, False) for name, _, tensor in walk(module))
    queue.extend((path, part, False) for path, part in module.named_modules())
    while queue:
        name, value, foreign = queue.popleft()
        kind = type(value)
        if value is None or issubclass(kind, _LEAVES) or id(value) in reached:
            continue
        reached.add(id(value))
        if is_left_out(name):
            continue
        if issubclass(kind, torch.nn.Module) and id(value) not in own:
            if any(id(part) in own for part in value.modules()):
                continue
            foreign = True
        if issubclass(kind, torch.Tensor | np.ndarray):
            names[name] += 1
            yield Held(name if names[name] == 1 else f"{name}#{names[name]}", value, foreign)
        foreign = foreign or issubclass(kind, set | frozenset)  # in no order, and so without a name
        before = f"{name}." if name else ""
        queue.extend((f"{before}{key}", part, foreign) for key, part in _parts(value))
        for cls in _classes(value):
            if id(cls) not in reached:
                reached.add(id(cls))
                queue.extend((f"{cls.__name__}.{key}", part, foreign) for key, part in vars(cls).items())


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object refers to, by the name under which it does; types are asked, since objects may answer anything."""
    kind = type(value)
    if issubclass(kind, dict | list | tuple | deque):
        yield from ((_key(name), part) for name, _, part in _items(value))
    elif issubclass(kind, FunctionType):  # without its globals, which would lead everywhere
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield from ((name, part) for part in gc.get_referents(cell))
        yield from (("defaults", part) for part in (value.__defaults__, value.__kwdefaults__))
    elif issubclass(kind, weakref.ref):
        yield "()", value()
    if issubclass(kind, torch.nn.Module):
        for table in (value._parameters, value._buffers, value._modules):
            yield from table.items()
    with suppress(Exception):  # past `__getattr__`, which may raise whatever it likes
        yield from list(object.__getattribute__(value, "__dict__").items())
    for cls in _classes(value):
        for key, member in vars(cls).items():
            if isinstance(member, MemberDescriptorType):  # one of `__slots__`
                with suppress(AttributeError):
                    yield key, member.__get__(value, cls)
    if not issubclass(kind, FunctionType | torch.Tensor | np.ndarray):
        yield from ((f"<{kind.__name__}>", part) for part in gc.get_referents(value))


def _key(key: Any) -> str:
    """A name that is the same in every process."""
    try:
        text = str(key)
    except Exception:
        text = " at 0x"
    return f"<{type(key).__name__}>" if " at 0x" in text else text


def _classes(value: Any) -> Iterator[type]:
    """The classes of an object that are of its program, not of torch or Python."""
    for cls in type(value).__mro__:
        home = type.__getattribute__(cls, "__module__")  # past a metaclass
        if isinstance(home, str) and home.partition(".")[0] in ("torch", "builtins"):
            return
        yield cls
