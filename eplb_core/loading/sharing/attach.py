"""Attach to a weight host: its tensors become this engine's, without a copy."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from eplb_core.errors import EplbError, HostAbsent, HostBusy, HostRefused, RecordLostError
from eplb_core.layout import ExpertLayout
from eplb_core.loading.modules import Place, place_of, put, walk
from eplb_core.loading.record.client import LayoutClient
from eplb_core.loading.record.keeper import UNKNOWN_REQUEST
from eplb_core.loading.sharing.host import check_config, frame_of
from eplb_core.loading.sharing.memory import Handle, MappedTensor, map_tensors, total_bytes


class Attachment:
    """Tensors that an engine has mapped, and the client by which it is present at the host.

    `close` is for an engine that stops using the weights and runs on; the memory is unmapped with its last tensor.
    """

    def __init__(self, client: LayoutClient, handles: dict[str, Handle], fds: list[int], num_bytes: int) -> None:
        self.client = client
        """The engine's presence at the host."""
        self.handles: Mapping[str, Handle] = handles
        """By tensor: where its bytes are for other processes, such as peers that read experts (`Region.handle`)."""
        self.num_bytes = num_bytes
        """Bytes that the tensors span."""
        self._fds = fds

    @property
    def names(self) -> tuple[str, ...]:
        """Tensors that were mapped."""
        return tuple(self.handles)

    def close(self) -> None:
        """Close the descriptors, which ends the use of `handles`. Idempotent."""
        while self._fds:
            os.close(self._fds.pop())


def attach_weights(
    client: LayoutClient | None,
    module_or_dict: torch.nn.Module | MutableMapping[str, Any],
    *,
    config: Mapping[str, Any],
    layout: ExpertLayout | None,
    rank: int | None = None,
) -> Attachment:
    """Put the host's tensors where the engine's are, or raise and change nothing.

    A module may be on the meta device. It gets the host's parameters, buffers (also those in no state dict), tensors
    that are plain attributes, and views, with their shapes after the host's post-processing; tensors that
    post-processing added are added. An empty dict receives all tensors. A dict with names receives only those, and a
    value that is a tensor must have the host's shape and dtype.

    Args:
        client: This engine's presence at the host; None raises HostAbsent.
        module_or_dict: What to fill.
        config: What shapes the weights, as `WeightHost` was given it.
        layout: The layout that this engine routes by, from `agree_on_layout`; None for an engine without balancing.
        rank: EP rank; default: the one of the agreement, where `agree_on_layout` was called with this client.

    Returns:
        What was mapped; keep it as long as the engine lives.

    Raises:
        HostAbsent: No host, or one that cannot be asked any more: load from disk.
        HostBusy: A move is under way; ask again.
        HostRefused: Something differs, named by `field`: load from disk.

    Cost:
        One round trip and some ten microseconds per tensor; no byte of a tensor is read or copied.

    Threads:
        The one that owns the module.
    """
    if not isinstance(module_or_dict, (torch.nn.Module, MutableMapping)):
        raise TypeError(f"`module_or_dict` (={type(module_or_dict).__name__}) must be a module or a dict")
    if client is None:
        raise HostAbsent("there is no client: no weight host on this rank")
    frame = frame_of(layout, client.rank if rank is None else rank)
    checked = check_config(config, frame)
    try:
        reply, fds = client.fetch(checked, "" if layout is None else layout.digest, frame)
    except EplbError as error:
        raise HostAbsent(str(error)) from error
    try:
        _check_reply(reply, client)
        mapped = _map(reply, fds, client)
        if isinstance(module_or_dict, torch.nn.Module):
            _fill_module(module_or_dict, mapped)
        else:
            _fill_dict(module_or_dict, mapped)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    handles = {name: each.handle for name, each in mapped.items()}
    return Attachment(client, handles, fds, total_bytes(reply["weights"]))


def _check_reply(reply: dict[str, Any], client: LayoutClient) -> None:
    if reply["status"] == "busy":
        raise HostBusy(f"{client.path}: {reply['reason']}")
    if reply.get("code") == UNKNOWN_REQUEST:
        raise HostAbsent(f"{client.path}: {reply['reason']}")
    if reply["status"] != "ok":
        raise HostRefused(f"{client.path}: {reply['reason']}", field=str(reply.get("field") or "request"))


def _map(reply: dict[str, Any], fds: list[int], client: LayoutClient) -> dict[str, MappedTensor]:
    try:
        return map_tensors(reply["weights"], fds)
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError, OSError) as error:
        raise HostAbsent(f"{client.path}: the host's description of its memory cannot be used: {error}") from (
            RecordLostError(str(error), path=client.path)
        )


def _fill_dict(target: MutableMapping[str, Any], mapped: Mapping[str, MappedTensor]) -> None:
    for name, value in target.items():
        if name not in mapped:
            raise HostRefused(f"the host has no tensor {name!r}; it has {', '.join(list(mapped)[:4])} ...", field=name)
        tensor = mapped[name].tensor
        if isinstance(value, torch.Tensor) and (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
            raise HostRefused(
                f"tensor {name!r} is {tensor.dtype} {list(tensor.shape)} at the host and {value.dtype} "
                f"{list(value.shape)} here; load from disk",
                field=name,
            )
    for name in list(target) or list(mapped):
        target[name] = mapped[name].tensor


def _fill_module(module: torch.nn.Module, mapped: Mapping[str, MappedTensor]) -> None:
    have = {name: (place, tensor) for name, place, tensor in walk(module)}
    plan: list[tuple[Place, torch.Tensor | None, torch.Tensor]] = []
    for name, (kind, tensor, _) in mapped.items():
        if name in have:
            place, former = have[name]
            # A dict of tensors does not say what each is in the module; the module does.
            plan.append((place if kind == "tensor" else place._replace(kind=kind), former, tensor))
            continue
        new_place = place_of(module, name, "attribute" if kind == "tensor" else kind)
        if new_place is None:
            raise HostRefused(f"tensor {name!r} of the host has no place in this module", field=name)
        plan.append((new_place, None, tensor))
    left = [name for name, (_, tensor) in have.items() if tensor.is_meta and name not in mapped]
    if left:
        more = f" ({len(left) - 1} more)" if len(left) > 1 else ""
        raise HostRefused(f"tensor {left[0]!r}{more} is on the meta device and the host has none for it", field=left[0])
    made: dict[int, torch.Tensor] = {}
    for place, old, tensor in plan:
        put(place, old, tensor, made)
