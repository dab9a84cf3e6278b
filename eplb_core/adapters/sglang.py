"""SGLang: load every slot that the layout names.

SGLang fills the slots that a rank's dispatch list has, and that list leaves the second replica on a rank out. With the
plug-in its loaders ask the layout instead; dispatch stays as it is. It is found through SGLang's own entry point group
`sglang.srt.plugins` and acts only where the environment has `EPLB_CORE=sglang`. An error inside it is logged once, and
the engine's own code answers.

    EPLB_CORE=sglang python -m sglang.launch_server ...

Written against SGLang 0.5.23.
"""

from __future__ import annotations

import logging
import os
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from eplb_core.layout import ExpertLayout
from eplb_core.loading.resolver import SlotResolver
from eplb_core.topology import Topology

logger = logging.getLogger(__name__)

_RESOLVE = "sglang.srt.eplb.expert_location.ExpertLocationMetadata.logical_to_all_physical"
_LOAD = "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.weight_loader"
_LOAD_ZERO_POINTS = "sglang.srt.layers.quantization.moe_wna16._local_expert_ids"

# The layer whose loader is asking. Its slots are filtered to its rank's range here, where routed slots and shared
# experts can still be told apart: after a scale-up the loader takes a new rank's slot for its own shared expert.
_loading: ContextVar[Any] = ContextVar("_loading", default=None)
_logged: set[str] = set()


def register() -> None:
    """Register the hooks; SGLang calls this in each of its processes. Does nothing unless `EPLB_CORE=sglang`."""
    if os.environ.get("EPLB_CORE") != "sglang":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in _hooks().items():  # pragma: no cover  needs SGLang: tests/engines
        HookRegistry.register(target, hook, HookType.AROUND)


def inactive_hooks() -> list[str]:  # pragma: no cover  needs SGLang: tests/engines
    """Targets that the plug-in should have changed and did not: SGLang only logs it. Empty = all are in effect."""
    return [target for target, hook in _hooks().items() if not _is_hooked(target, hook)]


def _hooks() -> dict[str, Callable[..., Any]]:  # pragma: no cover  as above
    return {_RESOLVE: resolve, _LOAD: load_own_range, _LOAD_ZERO_POINTS: load_own_range}


def _is_hooked(target: str, hook: Callable[..., Any]) -> bool:  # pragma: no cover  as above
    from sglang.srt.plugins.hook_registry import HookRegistry

    registered = any(known is hook for _, known, _ in HookRegistry._hooks.get(target, ()))
    return registered and target in HookRegistry._patched and hasattr(pkgutil.resolve_name(target), "__wrapped__")


# ---- hooks -----------------------------------------------------------------------------------------------------------


def resolve(
    original: Callable[..., list[int]],
    metadata: Any,
    layer_id: int,
    logical_expert_id: int,
    require_global_experts: bool = False,
) -> list[int]:
    """Around `ExpertLocationMetadata.logical_to_all_physical`: all slots of an expert, from the layout.

    Layers beyond the map and tensors that every rank keeps whole follow the engine's own conventions, since its
    post-processing does too.

    Raises:
        IndexError: No such expert or layer; negative ones too.
    """
    beyond = layer_id >= metadata.physical_to_logical_map_cpu.shape[0]
    if beyond or require_global_experts:
        return original(metadata, layer_id, logical_expert_id, require_global_experts)
    try:
        slots = list(_resolver(metadata).global_slots(layer_id, logical_expert_id))
    except IndexError:
        raise
    except Exception as error:
        _log_once(f"this layout is left to SGLang's own lookup: {error}")
        return original(metadata, layer_id, logical_expert_id, require_global_experts)
    layer = _loading.get()
    if layer is None:
        return slots
    start = layer._expert_storage_rank * layer._num_local_routed
    return [slot for slot in slots if start <= slot < start + layer._num_local_routed]


def load_own_range(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Around a loader of one layer: while it runs, `resolve` answers with this rank's slots alone."""
    with _asking(layer):
        return original(layer, *args, **kwargs)


@contextmanager
def _asking(layer: Any) -> Iterator[None]:
    token = _loading.set(layer)
    try:
        yield
    finally:
        _loading.reset(token)


def _resolver(metadata: Any) -> SlotResolver:
    """The metadata's resolver, made anew when its map is another tensor or was written to."""
    layout_map = metadata.physical_to_logical_map_cpu
    version = None if layout_map.is_inference() else layout_map._version
    known = metadata.__dict__.get("_eplb_core_resolver")
    if known is not None and version is not None and known[0] is layout_map and known[1] == version:
        return known[2]  # type: ignore[no-any-return]
    layout = ExpertLayout(layout_map, metadata.num_logical_experts, topology=Topology(num_ranks=metadata.ep_size))
    resolver = SlotResolver(layout, 0)
    metadata.__dict__["_eplb_core_resolver"] = (layout_map, version, resolver)
    return resolver


def _log_once(message: str) -> None:
    if message not in _logged:
        _logged.add(message)
        logger.warning("eplb_core: %s", message)
