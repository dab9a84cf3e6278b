"""Find and replace all tensors of a module by name: parameters, buffers and plain attributes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

_OWN = frozenset(vars(torch.nn.Module()))
"""What every module has by itself."""


class NamedTensor(NamedTuple):
    """A tensor, and what it is in its module."""

    name: str
    kind: str
    """`parameter`, `buffer`, `temporary_buffer` (not in the state dict), `attribute`, or `tensor` of a dict."""
    tensor: torch.Tensor


class Place(NamedTuple):
    """Where a tensor is kept."""

    holder: Any
    """A module, or a list or dict that is an attribute of one."""
    key: Any
    kind: str


def module_tensors(module: torch.nn.Module) -> list[NamedTensor]:
    """List every tensor that the module computes with, also those in no state dict, such as scales kept as attributes.

    Lists and dicts of tensors that are attributes are looked into, one level deep: `scales.0`.
    """
    return [NamedTensor(name, place.kind, tensor.detach()) for name, place, tensor in walk(module)]


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
            if isinstance(value, torch.Tensor):
                yield before + key, Place(part, key, "attribute"), value
            elif isinstance(value, (list, dict)):
                items = enumerate(value) if isinstance(value, list) else list(value.items())
                for inner, tensor in items:
                    if isinstance(tensor, torch.Tensor):
                        yield f"{before}{key}.{inner}", Place(value, inner, "attribute"), tensor


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
    holder, key, kind = place
    if not isinstance(holder, torch.nn.Module):
        holder[key] = new
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
