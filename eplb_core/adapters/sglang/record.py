"""SGLang's weight cache with a record of the layout: the daemon keeps it, engines adopt it and tell it of every move.

SGLang's daemon gives weights to every engine whose configuration is its own, whatever has moved since it loaded them.
With this part the daemon keeps a `LayoutRecord` beside its socket (`SOCKET.layout`). An engine takes the recorded
layout over before it maps the weights, its ranks decide together, and moves are begun and committed there. An engine
without the plug-in gets the weights while they are where they were loaded, and nobody moves them from then on.

Engines get this by `EPLB_CORE=sglang`. A daemon loads no plug-ins: start it by

    python -m eplb_core.adapters.sglang_daemon ...        # the arguments of sglang.srt.weight_cache.daemon
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from eplb_core.adapters import hooking
from eplb_core.adapters.sglang import context
from eplb_core.adapters.sglang.maps import layout_of
from eplb_core.errors import EplbError
from eplb_core.layout import ExpertLayout
from eplb_core.loading.agreement import Agreement, GroupAgreement, LocalAgreement
from eplb_core.loading.record.agree import agree_on_layout
from eplb_core.loading.record.client import LayoutClient

SUFFIX = ".layout"
"""What the record's socket is called, after the daemon's."""
CLAIM = "eplb_core"
"""Key of a request for weights under which an engine says by which layout it routes."""
_claim: ContextVar[dict[str, Any] | None] = ContextVar("_claim", default=None)
_kept: list[LayoutClient] = []
"""This process's connection to its daemon's record, held while it uses the weights."""
_barred: list[str] = []
"""Why no rank may move experts: the weights are shared, and some rank has no record."""


def client() -> LayoutClient | None:
    """Where this rank's moves are recorded; None where its weights are its own."""
    return _kept[0] if _kept else None


def barred() -> str:
    """Why no rank may move experts, or nothing; the same on all ranks."""
    return _barred[0] if _barred else ""


# ---- an engine that starts -------------------------------------------------------------------------------------------


def fetch(original: Callable[..., Any], loader: Any, model_config: Any, device_config: Any) -> Any:
    """Around `IpcModelLoader._fetch_from_cache`: adopt the recorded layout, then map the weights, on all ranks or none.

    Raises:
        LayoutAgreementError: The ranks cannot start on one layout; on every rank.
        RuntimeError: Some ranks got weights and others not.
    """
    metadata = context.live_metadata()
    if metadata is None or _kept:  # a model without experts, or a second one in this process: a draft
        return original(loader, model_config, device_config)
    try:
        own = layout_of(metadata)
    except EplbError as error:  # equal on all ranks
        hooking.log_once(f"record: this layout is left to SGLang: {error}")
        return original(loader, model_config, device_config)
    agreement = make_agreement()
    presence = _presence(loader, device_config)
    try:
        layout, version = agree_on_layout(presence, own=own, agreement=agreement, adopts=_adopts())
    except BaseException:
        _leave(presence)
        raise
    claim = None
    if presence is not None and presence.found is not None:
        claim = {"engine": presence.engine_id, "version": presence.adopted, "digest": layout.digest}
    weights, trouble = None, None
    try:
        if layout != own:
            _adopt(metadata, layout, model_config)
            hooking.log_once(f"record: version {version} of the layout is adopted ({layout.digest[:12]})", logging.INFO)
        with hooking.setting(_claim, claim):  # the engine's own code sends it with its request
            weights = original(loader, model_config, device_config)
    except Exception as error:  # raised below, once the other ranks, which wait for it, have this rank's word
        trouble = error
    recorded = claim is not None
    word = "failed" if trouble else "disk" if weights is None else "mapped, recorded" if recorded else "mapped"
    told = [each.decode() for each in agreement.gather(word.encode())]
    if len({each.partition(",")[0] for each in told}) > 1 or trouble is not None:
        _leave(presence)
        if trouble is not None:
            raise trouble
        words = ", ".join(f"rank {rank}: {each}" for rank, each in enumerate(told))
        raise RuntimeError(f"eplb_core: all ranks must map their daemon's weights or none ({words}); start all daemons")
    if len(set(told)) > 1:
        _barred.append(f"rank {told.index('mapped')} shares its weights with a daemon that keeps no record")
    if weights is None or presence is None or not recorded:
        _leave(presence)
        if weights is not None:
            hooking.log_once(
                "record: the weights are shared by a daemon that keeps no record of their layout: engines that start "
                "after a move serve wrong experts. Start it by python -m eplb_core.adapters.sglang_daemon"
            )
        return weights
    _kept.append(presence)
    hooking.log_once(f"in effect in SGLang: record at {presence.path}, version {version}", logging.INFO)
    return weights


def _presence(loader: Any, device_config: Any) -> LayoutClient | None:
    try:
        path = loader.socket_path or _socket_path(device_config)
        return LayoutClient(path + SUFFIX, f"{socket.gethostname()}:{os.getpid()}")
    except (ValueError, OSError) as error:
        hooking.log_once(f"record: none is looked for: {error}")
        return None


def _leave(presence: LayoutClient | None) -> None:
    if presence is not None:
        presence.close()


def make_agreement() -> Agreement:
    """Of all processes of the engine; of this one alone where there is no group."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return LocalAgreement.group(1)[0]
    group = dist.new_group(
        backend="gloo", use_local_synchronization=True
    )  # pragma: no cover  needs SGLang: tests/engines
    return GroupAgreement(group, deadline=300.0)  # pragma: no cover


def _socket_path(device_config: Any) -> str:  # pragma: no cover  needs SGLang: tests/engines
    from sglang.srt.platforms import current_platform
    from sglang.srt.weight_cache.protocol import get_socket_path

    return str(get_socket_path(current_platform.get_device_uuid(int(device_config.gpu_id))))


def _adopts() -> bool:  # pragma: no cover  as above
    """Whether it dispatches by its maps; without, it takes logical experts for slots."""
    from sglang.srt.runtime_context import get_exec

    return get_exec().moe.ep_dispatch_algorithm is not None


def _adopt(metadata: Any, layout: ExpertLayout, model_config: Any) -> None:  # pragma: no cover  as above
    """Write the layout into the metadata in use, as at a start with it."""
    from sglang.srt.eplb.expert_location import ExpertLocationMetadata
    from sglang.srt.runtime_context import get_parallel

    other = ExpertLocationMetadata.init_by_mapping(
        model_config,
        torch.tensor(layout.physical_to_logical_map),
        moe_ep_rank=get_parallel().moe_ep_rank,
    )
    metadata.update(other, list(range(layout.num_layers)))


def claim_layout(original: Callable[..., Any], sock: Any, obj: Any) -> Any:
    """Around `send_msg`: a request for weights says by which layout this engine routes."""
    claim = _claim.get()
    if claim is not None and isinstance(obj, dict) and obj.get("type") == "fetch_state":
        obj = {**obj, CLAIM: claim}
    return original(sock, obj)


# ---- an engine that moves experts by its own updater -----------------------------------------------------------------


def record_update(
    original: Callable[..., Any],
    updater: Any,
    routed_experts_weights_of_layer: Any,
    new_expert_location_metadata: Any,
    update_layer_ids: list[int],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Around `ExpertLocationUpdater.update`: layers move if every rank's record lets them, and are committed after."""

    def move() -> Any:
        return original(
            updater, routed_experts_weights_of_layer, new_expert_location_metadata, update_layer_ids, *args, **kwargs
        )

    kept = client()
    if barred():
        hooking.log_once(f"record: nothing moves: {barred()}")
        return {}
    if kept is None:
        return move()
    layers = sorted(int(layer) for layer in update_layer_ids)
    reply = kept.begin(layers, kept.adopted)
    told = _gather((reply.status, reply.reason))
    stopped = [(rank, *each) for rank, each in enumerate(told) if each[0] != "ok"]
    if stopped:
        if reply.status == "ok":
            kept.abort(layers)
        rank, status, reason = stopped[0]
        if any(each[1] == "refused" for each in stopped):
            kept.refuse_moves(f"rank {rank}: {reason}")
        hooking.log_once(f"record: layers {layers[:4]}... stay as they are: rank {rank} ({status}): {reason}")
        return {}
    missing = move()
    live = context.live_metadata()
    if live.physical_to_logical_map.is_cuda:  # pragma: no cover  needs a GPU
        torch.cuda.synchronize()
    reply = kept.commit(layers, live.physical_to_logical_map_cpu[layers].numpy())
    digest = layout_of(live).digest
    if reply.status != "ok" or reply.digest != digest:
        kept.refuse_moves(f"layers {layers[:4]} could not be recorded: {reply.reason or reply.digest}")
        hooking.log_once(
            f"record: layers {layers[:4]} moved and could not be recorded ({reply.reason or 'another layout'}): "
            "nothing moves any more; restart the daemons and the engines that use them"
        )
    return missing


def _gather(own: tuple[str, str]) -> list[tuple[str, str]]:
    import torch.distributed as dist

    return hooking.gather_objects(context.cpu_group())(own) if dist.is_initialized() else [own]
