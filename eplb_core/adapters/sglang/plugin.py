"""SGLang: load every slot, place from the live layout on, and build and update its maps, without a fork.

SGLang fills the slots that a rank's dispatch list has, and that list leaves the second replica on a rank out. With the
plug-in its loaders ask the layout instead. It is found through SGLang's own entry point group `sglang.srt.plugins` and
acts only where the environment has `EPLB_CORE=sglang`. `EPLB_CORE_OFF` switches parts off: `loading`, `placement`,
`maps`, `tables`, `update`, `dispatch`, `moves` (`rebalance.py`), `record` (`record.py`). An error inside one is logged
once, and the engine's own code answers.

    EPLB_CORE=sglang python -m sglang.launch_server ...

Written against SGLang 0.5.23; a function of another signature leaves its part to the engine, and a line says so.
`python -m eplb_core.adapters.check` prints what works with the SGLang that is installed. See docs/engines.md.
"""

from __future__ import annotations

import logging
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch

from eplb_core.adapters import hooking, source
from eplb_core.adapters.balancers import auto_line
from eplb_core.adapters.prometheus import publish
from eplb_core.adapters.sglang import context, record
from eplb_core.adapters.sglang import maps as sglang_maps
from eplb_core.adapters.sglang.daemon import spawn
from eplb_core.adapters.sglang.moves import TRANSPORTS
from eplb_core.adapters.sglang.rebalance import agree_on_metadata, around_weights, rebalance, register_after_load
from eplb_core.balancer.balancer import DEFAULT_MOVE_COST
from eplb_core.exposition import Placements
from eplb_core.layout import ExpertLayout
from eplb_core.loading.resolver import SlotResolver
from eplb_core.topology import Topology

PARTS = ("loading", "placement", "maps", "tables", "update", "dispatch", "moves", "record")
_OPTIONS = {
    **hooking.PLACE_OPTIONS,
    "mode": hooking.one_of("place", "auto"),
    "move_cost": float,
    "tables": hooking.one_of("sglang", "even"),
    "transport": hooking.one_of(*TRANSPORTS),
}

ENGINE = "SGLang, written for 0.5.23"
NO_LOADER = "this SGLang has no loader of plug-ins (sglang.srt.plugins): none is ever asked for; take 0.5.15 or newer"
_REGISTRY = "sglang.srt.plugins.hook_registry"
_WRITES_EXPERTS = re.compile(r"(update|load)_weights_from_\w+|(begin|end)_weight_update")
"""Functions of SGLang's updater of weights that write into experts, or stand around that; in 0.5.23 six of them."""
_PLACEMENT = "tokens_per_expert num_physical_experts num_local_physical_experts num_groups num_nodes algorithm"
"""Parameters of SGLang's `rebalance_experts`."""

# The layer whose loader is asking. Its slots are filtered to its rank's range here, where routed slots and shared
# experts can still be told apart: after a scale-up the loader takes a new rank's slot for its own shared expert.
_loading: ContextVar[Any] = ContextVar("_loading", default=None)
# On a tensor of lists: the layout that they come from, and the rank for which they were narrowed.
_NOTED = "_eplb_core_layout"
_placements = Placements()


class _Hook(NamedTuple):
    part: str
    target: str
    parameters: tuple[str, ...] | None
    """None: any, since the hook passes on what it is given."""
    hook: Callable[..., Any] | None
    """None: what hooks of the part call, and leave as it is."""
    replace: bool = False
    needed: bool = True
    """Without it the whole part is left to the engine; else only this hook."""


def register() -> None:
    """Register the hooks; SGLang calls this in each of its processes. Does nothing unless `EPLB_CORE=sglang`.

    Imports none of what it changes: a hook is registered when its module is imported, or now if it is.
    """
    if not hooking.asked_for("sglang") or context.registered:
        return
    if source.find(f"{_REGISTRY}.HookRegistry") is None:
        hooking.log_once(f"not active: {NO_LOADER}", logging.ERROR)
        return
    try:
        parts = hooking.parts_on(PARTS)
        context.options.update(hooking.options_from(_OPTIONS))
    except ValueError as error:
        hooking.log_once(f"not active: {error}", logging.ERROR)
        return
    context.asked[:] = parts
    by_module: dict[str, list[_Hook]] = {}
    for hook in (hook for part in (*parts, "report") for hook in _fitting(part)):
        by_module.setdefault(source.module_in(hook.target), []).append(hook)
        context.registered.append(hook.target)
    for module, hooks in by_module.items():
        source.when_imported(module, partial(_register, hooks))


def _register(hooks: Sequence[_Hook], late: bool) -> None:
    """Hand the hooks to SGLang; `late`: it has applied those of its start already."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    try:
        for hook in hooks:
            HookRegistry.register(hook.target, hook.hook, HookType.REPLACE if hook.replace else HookType.AROUND)
        if late:
            HookRegistry.apply_hooks()
    except Exception as error:  # within an import of the engine's
        hooking.log_once(f"not in effect in SGLang: {hooks[0].target}: {hooking.words(error)}", logging.ERROR)


def troubles(part: str) -> Iterator[tuple[_Hook, str]]:
    """Yield each hook of a part, and how its function differs from what it expects: empty where it does not."""
    for hook in _hooks():
        if hook.part == part:
            name = hook.target.removeprefix("sglang.srt.")
            yield hook, hooking.mismatch(source.find(hook.target), name, hook.parameters)


def _fitting(part: str) -> list[_Hook]:
    """The hooks of a part that fit the engine; none where one that it needs does not."""
    found = list(troubles(part))
    missing = next((trouble for hook, trouble in found if hook.needed and trouble), "")
    if missing:
        hooking.log_once(f"{part} is left to {ENGINE}: {missing}")
        return []
    for _, trouble in found:
        if trouble:
            hooking.log_once(f"{part} does without one function of {ENGINE}: {trouble}", logging.INFO)
    return [hook for hook, trouble in found if hook.hook is not None and not trouble]


def inactive_hooks() -> list[str]:  # pragma: no cover  needs SGLang: tests/engines
    """Targets that the plug-in should have changed and did not: SGLang only logs it. Empty = all are in effect.

    Those whose module this process has not imported do not count.
    """
    by_target = {hook.target: hook for hook in _hooks()}
    imported = [each for each in context.registered if source.module_in(each) in sys.modules]
    return [target for target in imported if not _is_hooked(by_target[target])]


def active_parts() -> tuple[str, ...]:
    """The parts whose hooks are registered in this process; `inactive_hooks` says which did not take effect."""
    return tuple(part for part in PARTS if any(h.part == part and h.target in context.registered for h in _hooks()))


def _hooks() -> Iterator[_Hook]:
    location, updater = "eplb.expert_location", "model_executor.model_runner_components.weight_updater.WeightUpdater"
    metadata, manager = f"{location}.ExpertLocationMetadata", "eplb.eplb_manager.EPLBManager"
    dispatch, loader = "eplb.expert_location_dispatch._topk_ids_logical_to_physical", "weight_cache.ipc_loader"
    layer, settings = "layers.moe.fused_moe_triton.layer.FusedMoE", "runtime_context.get_exec"
    writing = {f"{updater}.update_weights_from_disk"}  # where this is not, weights are written by who knows what
    writing |= {f"{updater}.{name}" for name in source.members_of(f"sglang.srt.{updater}") if _writes_experts(name)}
    table: Sequence[tuple[str, str, Callable[..., Any] | None, str | None]] = (
        ("loading", f"{metadata}.logical_to_all_physical", resolve, "self layer_id logical_expert_id"),
        (
            "loading?",
            f"{layer}.weight_loader",
            load_own_range,
            "self param loaded_weight weight_name shard_id expert_id",
        ),
        ("loading?", "layers.quantization.moe_wna16._local_expert_ids", load_own_range, "layer expert_id"),
        ("placement", "eplb.eplb_algorithms.rebalance_experts", place_from_live, _PLACEMENT),
        (
            "placement",
            f"{manager}._compute_expert_location_metadata",
            agree_on_metadata,
            "self logical_count broadcast_over_world",
        ),
        (
            "maps",
            f"{location}._compute_logical_to_all_physical_map",
            build_candidates,
            "physical_to_logical_map num_logical_experts ep_size moe_ep_rank",
        ),
        (
            "tables",
            f"{location}.compute_logical_to_rank_dispatch_physical_map",
            build_static_table,
            "logical_to_all_physical_map ep_size num_physical_experts ep_rank",
        ),
        ("update", f"{metadata}.update", update_layers, "self other update_layer_ids"),
        ("dispatch", f"{dispatch}_static", sglang_maps.dispatch_static, "topk_ids info"),
        ("dispatch", f"{dispatch}_dynamic", sglang_maps.dispatch_dynamic, "topk_ids info"),
        ("moves", f"{manager}.rebalance", rebalance, "self"),
        ("moves", "model_executor.model_runner.ModelRunner.load_model", register_after_load, "self"),
        *(("moves", target, around_weights, None) for target in sorted(writing)),
        ("record", f"{loader}.IpcModelLoader._fetch_from_cache", record.fetch, "self model_config device_config"),
        ("record", f"{loader}.send_msg", record.claim_layout, "sock obj"),
        (
            "record",
            "weight_cache.daemon.spawn_weight_cache_daemon",
            spawn,
            "server_args gpu_id tp_rank pp_rank dist_init_method",
        ),
        (
            "record",
            "eplb.expert_location_updater.ExpertLocationUpdater.update",
            record.record_update,
            "self routed_experts_weights_of_layer new_expert_location_metadata update_layer_ids nnodes rank",
        ),
        *((part, f"{location}._prefer_same_node_experts", None, "") for part in ("maps", "tables", "moves")),
        *((part, settings, None, "") for part in ("maps", "tables", "moves")),
        ("report", f"{location}.compute_initial_expert_location_metadata", report, None),
    )
    for part, target, hook, parameters in table:
        yield _Hook(
            part.rstrip("?"),
            f"sglang.srt.{target}",
            None if parameters is None else tuple(parameters.split()),
            hook,
            replace=part == "dispatch",
            needed=not part.endswith("?"),
        )


def _writes_experts(name: str) -> bool:
    return _WRITES_EXPERTS.fullmatch(name) is not None


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
    hooking.log_once(f"in effect in SGLang: {_in_effect()}", logging.INFO)
    with suppress(Exception):  # numbers for operators are no reason to stop an engine
        _tell(missing)
    return original(*args, **kwargs)


def _in_effect() -> str:
    """The parts, and what mode "auto" is worth setting for."""
    auto = f"placement ({auto_line(_move_cost(), 'eplb_rebalance_num_iterations', 'passes')})"
    return ", ".join(auto if part == "placement" and _is_auto() else part for part in active_parts())


def _is_auto() -> bool:
    return context.options.get("mode") == "auto"


def _move_cost() -> float:
    cost: float = context.options.get("move_cost", DEFAULT_MOVE_COST)
    return cost


def _tell(missing: Sequence[str]) -> None:
    """Let operators see which of the parts that were asked for are in effect; `missing`: hooks that are not."""
    without = {hook.part for hook in _hooks() if hook.target in missing}
    active = {*active_parts()} - without
    rank = context.rank()
    hooking.tell_parts({part: part in active for part in context.asked}, rank)
    if rank is not None:  # numbers in files keep their labels; `register_after_load` is still to come
        publish()


# ---- placement, maps, tables, update ---------------------------------------------------------------------------------


def place_from_live(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around `rebalance_experts`: place from the map in use on; algorithms for dead ranks are left to the engine."""
    asked = dict(zip(_PLACEMENT.split(), args, strict=False)) | kwargs
    engine_own = partial(original, *args, **kwargs)

    def place() -> Any:
        algorithm = asked["algorithm"].name
        if algorithm.startswith("elasticity") or context.bypassed.get():
            # Ranks come or go, or have not agreed: all of them are here, and start anew.
            context.balancers.forget()
            return engine_own()
        live = context.live_metadata()
        options = {name: value for name, value in context.options.items() if name in hooking.PLACE_OPTIONS}
        return sglang_maps.rebalance(
            asked["tokens_per_expert"],
            asked["num_physical_experts"],
            asked["num_local_physical_experts"],
            num_nodes=asked["num_nodes"],
            num_groups=asked["num_groups"] if algorithm.endswith("hierarchical") else None,
            live=None if live is None else live.physical_to_logical_map_cpu,
            balancers=context.balancers if _is_auto() else None,
            move_cost=_move_cost(),
            placements=_placements,
            **options,
        )

    return hooking.guarded(place, engine_own, "placement")()


def build_candidates(
    original: Callable[..., torch.Tensor],
    physical_to_logical_map: torch.Tensor,
    num_logical_experts: int,
    ep_size: int,
    moe_ep_rank: int | None,
) -> torch.Tensor:
    """Around `_compute_logical_to_all_physical_map`: without a Python loop over slots and a sync for each."""

    def build() -> torch.Tensor:
        engine = context.context()
        layout = ExpertLayout(
            physical_to_logical_map.cpu(), num_logical_experts, topology=Topology(ep_size, engine.num_nodes)
        )
        rank = moe_ep_rank if engine.narrows else None
        lists = sglang_maps.candidates(layout, rank, prefer_same_node=engine.prefer_same_node)
        lists = lists.to(physical_to_logical_map.device)
        vars(lists)[_NOTED] = layout, rank  # the tables are built from it next
        return lists

    engine_own = partial(original, physical_to_logical_map, num_logical_experts, ep_size, moe_ep_rank)
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
        engine = context.context()
        layout, rank = vars(given).get(_NOTED, (None, None))
        if layout is None:
            topology = Topology(ep_size, engine.num_nodes)
            layout = sglang_maps.layout_of_candidates(given, num_physical_experts, topology)
        picks = sglang_maps.Picks(ep_rank, seed, engine.prefer_same_node, context.options.get("tables") == "even")
        table = sglang_maps.static_table(layout, picks, narrowed=rank is not None)
        return table.to(given.dtype).to(given.device)

    engine_own = partial(original, given, ep_size, num_physical_experts, ep_rank, seed)
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
    rank = getattr(layer, "_expert_storage_rank", getattr(layer, "moe_ep_rank", None))  # before 0.5.20 the second
    number = getattr(layer, "_num_local_routed", None)
    if rank is None or number is None:  # before 0.5.15: the loader drops other ranks' slots, and nobody scales up
        return slots
    return [slot for slot in slots if rank * number <= slot < (rank + 1) * number]


def load_own_range(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Around a loader of one layer: while it runs, `resolve` answers with this rank's slots alone."""
    with hooking.setting(_loading, layer):
        return original(layer, *args, **kwargs)


def _resolver(metadata: Any) -> SlotResolver:
    """The metadata's resolver, made anew when its map is another tensor or was written to."""
    layout_map = metadata.physical_to_logical_map_cpu
    version = None if layout_map.is_inference() else layout_map._version
    known = metadata.__dict__.get("_eplb_core_resolver")
    if known is not None and version is not None and known[0] is layout_map and known[1] == version:
        return known[2]  # type: ignore[no-any-return]
    resolver = SlotResolver(sglang_maps.layout_of(metadata), 0)
    metadata.__dict__["_eplb_core_resolver"] = (layout_map, version, resolver)
    return resolver
