"""SGLang: load every slot, place from the live layout on, and build and update its maps, without a fork.

SGLang fills the slots that a rank's dispatch list has, and that list leaves the second replica on a rank out. With the
plug-in its loaders ask the layout instead. It is found through SGLang's own entry point group `sglang.srt.plugins` and
acts only where the environment has `EPLB_CORE=sglang`. `EPLB_CORE_OFF` switches parts off: `loading`, `placement`,
`maps`, `tables`, `update`, `dispatch`, `moves` (`sglang_rebalance`), `record` (`sglang_record`). An error inside one is
logged once, and the engine's own code answers.

    EPLB_CORE=sglang python -m sglang.launch_server ...

Written against SGLang 0.5.23; a function of another signature leaves its part to the engine, and a line says so. See
docs/engines.md.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from eplb_core.adapters import hooking
from eplb_core.adapters.sglang import context
from eplb_core.adapters.sglang import daemon as sglang_daemon
from eplb_core.adapters.sglang import maps as sglang_maps
from eplb_core.adapters.sglang import moves as sglang_moves
from eplb_core.adapters.sglang import rebalance as sglang_rebalance
from eplb_core.adapters.sglang import record as sglang_record
from eplb_core.adapters.sglang.context import context as _context
from eplb_core.adapters.sglang.context import live_metadata as _live_metadata
from eplb_core.adapters.sglang.context import options as _options
from eplb_core.adapters.sglang.context import registered as _registered
from eplb_core.layout import ExpertLayout
from eplb_core.loading.resolver import SlotResolver
from eplb_core.topology import Topology

PARTS = ("loading", "placement", "maps", "tables", "update", "dispatch", "moves", "record")
_PLACE_OPTIONS: dict[str, Callable[[str], Any]] = {"min_gain": float, "transfer_price": float, "max_transfers": int}
_OPTIONS = {
    **_PLACE_OPTIONS,
    "tables": hooking.one_of("sglang", "even"),
    "transport": hooking.one_of(*sglang_moves.TRANSPORTS),
}

# The layer whose loader is asking. Its slots are filtered to its rank's range here, where routed slots and shared
# experts can still be told apart: after a scale-up the loader takes a new rank's slot for its own shared expert.
_loading: ContextVar[Any] = ContextVar("_loading", default=None)
# On a tensor of lists: the layout that they come from, and the rank for which they were narrowed.
_NOTED = "_eplb_core_layout"


class _Hook(NamedTuple):
    part: str
    target: str
    parameters: tuple[str, ...]
    hook: Callable[..., Any]
    replace: bool = False


def register() -> None:
    """Register the hooks; SGLang calls this in each of its processes. Does nothing unless `EPLB_CORE=sglang`."""
    if not hooking.asked_for("sglang") or _registered:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    try:  # pragma: no cover  needs SGLang: tests/engines
        parts = hooking.parts_on(PARTS)
        _options.update(hooking.options_from(_OPTIONS))
    except ValueError as error:  # pragma: no cover
        hooking.log_once(f"not active: {error}", logging.ERROR)
        return
    parts = tuple(part for part in parts if _fits(part))  # pragma: no cover
    for hook in _hooks():  # pragma: no cover
        if hook.part in parts or hook.part == "report":
            HookRegistry.register(hook.target, hook.hook, HookType.REPLACE if hook.replace else HookType.AROUND)
            _registered.append(hook.target)


def _fits(part: str) -> bool:
    targets = (
        (_found(hook.target), hook.target.removeprefix("sglang.srt."), hook.parameters)
        for hook in _hooks()
        if hook.part == part
    )
    return hooking.fits(part, "SGLang, written for 0.5.23", targets)


def _found(name: str) -> object:
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return None


def inactive_hooks() -> list[str]:  # pragma: no cover  needs SGLang: tests/engines
    """Targets that the plug-in should have changed and did not: SGLang only logs it. Empty = all are in effect."""
    by_target = {hook.target: hook for hook in _hooks()}
    return [target for target in _registered if not _is_hooked(by_target[target])]


def active_parts() -> tuple[str, ...]:
    """The parts whose hooks are registered in this process; `inactive_hooks` says which did not take effect."""
    return tuple(part for part in PARTS if any(h.part == part and h.target in _registered for h in _hooks()))


def _hooks() -> tuple[_Hook, ...]:
    location, algorithms = "sglang.srt.eplb.expert_location", "sglang.srt.eplb.eplb_algorithms"
    dispatch, experts = "sglang.srt.eplb.expert_location_dispatch", "sglang.srt.layers"
    metadata = f"{location}.ExpertLocationMetadata"
    sizes = ("tokens_per_expert", "num_physical_experts", "num_local_physical_experts", "num_groups", "num_nodes")
    weight = ("self", "param", "loaded_weight", "weight_name", "shard_id", "expert_id")
    lists = ("logical_to_all_physical_map", "ep_size", "num_physical_experts", "ep_rank")
    return (
        _Hook("loading", f"{metadata}.logical_to_all_physical", ("self", "layer_id", "logical_expert_id"), resolve),
        _Hook("loading", f"{experts}.moe.fused_moe_triton.layer.FusedMoE.weight_loader", weight, load_own_range),
        _Hook("loading", f"{experts}.quantization.moe_wna16._local_expert_ids", ("layer", "expert_id"), load_own_range),
        _Hook("placement", f"{algorithms}.rebalance_experts", (*sizes, "algorithm"), place_from_live),
        _Hook(
            "maps",
            f"{location}._compute_logical_to_all_physical_map",
            ("physical_to_logical_map", "num_logical_experts", "ep_size", "moe_ep_rank"),
            build_candidates,
        ),
        _Hook("tables", f"{location}.compute_logical_to_rank_dispatch_physical_map", lists, build_static_table),
        _Hook("update", f"{metadata}.update", ("self", "other", "update_layer_ids"), update_layers),
        _Hook(
            "dispatch",
            f"{dispatch}._topk_ids_logical_to_physical_static",
            ("topk_ids", "info"),
            sglang_maps.dispatch_static,
            replace=True,
        ),
        _Hook(
            "dispatch",
            f"{dispatch}._topk_ids_logical_to_physical_dynamic",
            ("topk_ids", "info"),
            sglang_maps.dispatch_dynamic,
            replace=True,
        ),
        *_rebalance_hooks(),
        _Hook("report", f"{location}.compute_initial_expert_location_metadata", (), report),
    )


def _rebalance_hooks() -> Iterator[_Hook]:
    own: dict[str, tuple[str, Callable[..., Any]]] = {
        "EPLBManager.rebalance": ("moves", sglang_rebalance.rebalance),
        "EPLBManager._compute_expert_location_metadata": ("placement", sglang_rebalance.agree_on_metadata),
        "ModelRunner.load_model": ("moves", sglang_rebalance.register_after_load),
        "IpcModelLoader._fetch_from_cache": ("record", sglang_record.fetch),
        "ipc_loader.send_msg": ("record", sglang_record.claim_layout),
        "daemon.spawn_weight_cache_daemon": ("record", sglang_daemon.spawn),
        "ExpertLocationUpdater.update": ("record", sglang_record.record_update),
    }
    for target, parameters in {**sglang_rebalance.PARAMETERS, **sglang_record.PARAMETERS}.items():
        part, hook = own[".".join(target.rsplit(".", 2)[1:])]
        yield _Hook(part, f"sglang.srt.{target}", parameters, hook)
    for target, parameters in sglang_rebalance.UPDATES.items():
        yield _Hook("moves", f"sglang.srt.{target}", parameters, sglang_rebalance.around_weights)


def _is_hooked(hook: _Hook) -> bool:  # pragma: no cover  as above
    from sglang.srt.plugins.hook_registry import HookRegistry

    registered = any(known is hook.hook for _, known, _ in HookRegistry._hooks.get(hook.target, ()))
    now = pkgutil.resolve_name(hook.target)
    changed = hasattr(now, "__wrapped__") or now is hook.hook
    return registered and hook.target in HookRegistry._patched and changed


def report(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # pragma: no cover  as above
    """Around the making of the first maps: say once which parts are in effect."""
    missing = inactive_hooks()
    if missing:
        hooking.log_once(f"not in effect in SGLang: {', '.join(missing)}")
    hooking.log_once(f"in effect in SGLang: {', '.join(active_parts())}", logging.INFO)
    return original(*args, **kwargs)


# ---- placement, maps, tables, update ---------------------------------------------------------------------------------


def place_from_live(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around `rebalance_experts`: place from the map in use on; algorithms for dead ranks are left to the engine."""
    names = next(hook.parameters for hook in _hooks() if hook.part == "placement")
    asked = dict(zip(names, args, strict=False)) | kwargs

    def place() -> Any:
        algorithm = asked["algorithm"].name
        if algorithm.startswith("elasticity") or context.bypassed.get():
            return original(*args, **kwargs)
        live = _live_metadata()
        options = {name: value for name, value in _options.items() if name in _PLACE_OPTIONS}
        return sglang_maps.rebalance(
            asked["tokens_per_expert"],
            asked["num_physical_experts"],
            asked["num_local_physical_experts"],
            num_nodes=asked["num_nodes"],
            num_groups=asked["num_groups"] if algorithm.endswith("hierarchical") else None,
            live=None if live is None else live.physical_to_logical_map_cpu,
            **options,
        )

    return hooking.guarded(place, lambda: original(*args, **kwargs), "placement")()


def build_candidates(
    original: Callable[..., torch.Tensor],
    physical_to_logical_map: torch.Tensor,
    num_logical_experts: int,
    ep_size: int,
    moe_ep_rank: int | None,
) -> torch.Tensor:
    """Around `_compute_logical_to_all_physical_map`: without a Python loop over slots and a sync for each."""

    def build() -> torch.Tensor:
        engine = _context()
        layout = ExpertLayout(
            physical_to_logical_map.cpu(), num_logical_experts, topology=Topology(ep_size, engine.num_nodes)
        )
        rank = moe_ep_rank if engine.narrows else None
        lists = sglang_maps.candidates(layout, rank, prefer_same_node=engine.prefer_same_node)
        lists = lists.to(physical_to_logical_map.device)
        vars(lists)[_NOTED] = layout, rank  # the tables are built from it next
        return lists

    def engine_own() -> torch.Tensor:
        return original(physical_to_logical_map, num_logical_experts, ep_size, moe_ep_rank)

    return hooking.guarded(build, engine_own, "maps")()


def build_static_table(
    original: Callable[..., torch.Tensor],
    logical_to_all_physical_map: torch.Tensor,
    ep_size: int,
    num_physical_experts: int,
    ep_rank: int,
    seed: int = 42,
) -> torch.Tensor:
    """Around `compute_logical_to_rank_dispatch_physical_map`: this rank's row, the same picks or even ones."""
    given = logical_to_all_physical_map

    def build() -> torch.Tensor:
        engine = _context()
        layout, rank = vars(given).get(_NOTED, (None, None))
        if layout is None:
            topology = Topology(ep_size, engine.num_nodes)
            layout = sglang_maps.layout_of_candidates(given, num_physical_experts, topology)
        table = sglang_maps.static_table(
            layout,
            ep_rank,
            seed=seed,
            prefer_same_node=engine.prefer_same_node,
            narrowed=rank is not None,
            even=_options.get("tables") == "even",
        )
        return table.to(given.dtype).to(given.device)

    def engine_own() -> torch.Tensor:
        return original(given, ep_size, num_physical_experts, ep_rank, seed)

    return hooking.guarded(build, engine_own, "tables")()


def update_layers(original: Callable[..., None], metadata: Any, other: Any, update_layer_ids: list[int]) -> None:
    """Around `ExpertLocationMetadata.update`: the layers' rows, in place, where the engine rewrites all maps."""
    own = hooking.guarded(sglang_maps.update_rows, original, "update")
    own(metadata, other, update_layer_ids)


# ---- loading ---------------------------------------------------------------------------------------------------------


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
        hooking.log_once(f"loading: this layout is left to SGLang's own lookup: {error}")
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
