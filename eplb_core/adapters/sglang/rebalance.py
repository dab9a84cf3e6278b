"""Hooks around SGLang's rebalance: a `Migrator` in the place of its updater, or one map on all ranks for the updater.

The Migrator is made when the model is loaded, before the memory of the key-value cache is measured; from then on each
rebalance of SGLang's `EPLBManager` is a migration, a step of its generator a pass.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any

import torch

from eplb_core._version import __version__
from eplb_core.adapters import hooking
from eplb_core.adapters.prometheus import publish
from eplb_core.adapters.sglang import context
from eplb_core.adapters.sglang import moves as sglang_moves
from eplb_core.adapters.sglang import record as sglang_record
from eplb_core.adapters.sglang.maps import Picks, fold_passes
from eplb_core.adapters.warm import warm_up_once

_KEPT = "_eplb_core_moves"
_ANEW = "_eplb_core_anew"
"""Whether the last migration ended early: some ranks may not have seen its load, so that all forget what they know."""
# Of this process: it has one model that moves experts. Drafts have no manager.
_moves: list[sglang_moves.Moves] = []


def register_after_load(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `ModelRunner.load_model`: hand the experts over to a Migrator, on all ranks or on none."""
    answer = original(runner, *args, **kwargs)
    manager = vars(runner).get("eplb_manager")
    if manager is not None:
        hooking.guarded(_register, hooking.do_nothing, "moves")(runner, manager)
        with suppress(Exception):  # numbers for operators are no reason to stop an engine
            hooking.tell_parts({"moves": bool(_moves)}, context.rank())
            publish()
    return answer


def _register(runner: Any, manager: Any) -> None:
    metadata = context.live_metadata()
    reason = sglang_record.barred() or _why_not(runner, metadata)
    if reason:
        hooking.log_once(f"moves are left to SGLang: {reason}", logging.INFO)
        return
    trouble = warm_up_once()  # or the first migration would wait for it; told to all ranks, which would wait for this
    engine, options = context.context(), context.options
    transport = options.get("transport", "torch_distributed")
    moves = sglang_moves.open_moves(
        metadata,
        lambda: runner.model.routed_experts_weights_of_layer,
        Picks(
            torch.distributed.get_rank(),
            prefer_same_node=engine.prefer_same_node,
            even=options.get("tables") == "even",
        ),
        transport=transport,
        facts={
            "eplb_core": __version__,
            "hooks": sorted(context.registered),
            "options": sorted((name, str(value)) for name, value in options.items()),
        },
        num_nodes=engine.num_nodes,
        record=sglang_record.client(),
        window=_recorder_window,
        in_use=lambda: runner.model.parameters(),
        trouble=trouble,
    )
    vars(manager)[_KEPT] = moves
    _moves[:] = [moves]
    kept = ", recorded" if sglang_record.client() is not None else ""
    hooking.log_once(
        f"in effect in SGLang: moves by a Migrator over {transport}{kept}: {len(moves.layers)} layers of "
        f"{moves.slot_bytes} bytes per slot",
        logging.INFO,
    )


def _why_not(runner: Any, metadata: Any) -> str:  # pragma: no cover  needs SGLang: tests/engines
    """Why the Migrator would not do here; the same on all ranks, since their settings are."""
    from sglang.srt.runtime_context import get_exec, get_parallel

    settings = get_exec()
    if metadata is None:
        return "there is no expert location"
    if get_parallel().elastic_ep_initial_size is not None or settings.moe.elastic_ep_backend is not None:
        return "elastic EP changes the ranks"
    if settings.moe.ep_dispatch_algorithm == "lp":
        return "its dispatch by linear programs is made anew for all layers after a move"
    if settings.features.enable_memory_saver:
        return "the memory saver takes the experts' memory away"
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if world != metadata.ep_size:
        return f"there are {world} processes and {metadata.ep_size} EP ranks"
    if not hasattr(runner.model, "routed_experts_weights_of_layer"):
        return f"{type(runner.model).__name__} has no routed_experts_weights_of_layer"
    return ""


def _recorder_window() -> torch.Tensor | None:  # pragma: no cover  as above
    """The recorder's counts by slot of the passes since the last rebalance, `[passes, L, P]`; None without."""
    from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder

    kept: Any = get_global_expert_distribution_recorder()
    for name in ("_accumulator", "_global_physical_count_of_buffered_step", "_buffer"):
        kept = vars(kept).get(name) if hasattr(kept, "__dict__") else None
    return kept if isinstance(kept, torch.Tensor) else None


# ---- rebalance -------------------------------------------------------------------------------------------------------


def rebalance(original: Callable[..., Any], manager: Any) -> Generator[None, None, None]:
    """Around `EPLBManager.rebalance`: the record of the load, then a migration instead of the whole move at once."""
    moves: sglang_moves.Moves | None = vars(manager).get(_KEPT)
    if moves is None or moves.over or getattr(manager, "_rebalance_disabled_reason", None) is not None:
        yield from original(manager)
        return
    if moves.off:
        hooking.log_once(f"no expert moves any more: {moves.off}")
        return
    said = _recorded(manager)
    if not manager._check_rebalance_needed(said["average_utilization_rate_over_window"]):
        return
    before, anew = moves.migrator.layout, vars(manager).get(_ANEW, False)
    ended = yield from moves.rebalance(_problem(manager, said["logical_count"], own=moves.disagreed, anew=anew))
    vars(manager)[_ANEW] = bool(ended)
    changed = int((before.physical_to_logical_map != moves.migrator.layout.physical_to_logical_map).sum())
    logging.getLogger("eplb_core").info("eplb_core: rebalance end: %d slots changed%s", changed, ended and f"; {ended}")


def _places() -> bool:
    """Placement is ours, which sees windows; algorithms of the engine get its passes as they are."""
    return "sglang.srt.eplb.eplb_algorithms.rebalance_experts" in context.registered


def _recorded(manager: Any) -> Any:  # pragma: no cover  needs SGLang: tests/engines
    from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder

    return get_global_expert_distribution_recorder().dump_record(output_mode="object")


def _counts(logical_count: torch.Tensor, *, fold: bool) -> Callable[[], torch.Tensor]:
    """The load for a worker thread, which must not wait on the stream of the passes."""
    counts = fold_passes(logical_count) if fold and logical_count.dim() == 3 else logical_count
    if counts.device.type != "cuda":
        return lambda: counts
    host = torch.empty(counts.shape, dtype=counts.dtype, device="cpu", pin_memory=True)  # pragma: no cover  needs a GPU
    host.copy_(counts, non_blocking=True)  # pragma: no cover
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # pragma: no cover
    event.record()  # pragma: no cover

    def wait() -> torch.Tensor:  # pragma: no cover
        event.synchronize()
        return host

    return wait  # pragma: no cover


def _problem(manager: Any, logical_count: torch.Tensor, *, own: bool, anew: bool = False) -> Callable[[], torch.Tensor]:
    """What a worker calls for the map to reach, `[L, P]`.

    `own`: by the engine's algorithm. `anew`: whatever was seen before is forgotten.
    Load and settings are looked up here, on the forward thread. An error there is raised on the worker, which
    ends the migration on every rank; raised here it would leave the other ranks alone.
    """
    trouble: Exception | None = None
    try:
        counts_of = _counts(logical_count, fold=not own and _places())
        asked = _asked_of(manager)
    except Exception as error:
        trouble = error

    def solve() -> torch.Tensor:
        if trouble is not None:
            raise trouble
        counts = counts_of()
        if anew:
            context.balancers.forget()
        with hooking.setting(context.bypassed, own):
            return _solve(counts if counts.dim() == 3 else counts[None], asked)

    return solve


def _asked_of(manager: Any) -> dict[str, Any]:  # pragma: no cover  needs SGLang: tests/engines
    """The arguments of `rebalance_experts` but for the load, as `init_by_eplb` has them."""
    from sglang.srt.eplb import eplb_algorithms
    from sglang.srt.eplb.expert_location import ExpertLocationMetadata
    from sglang.srt.runtime_context import get_exec, get_parallel

    common = ExpertLocationMetadata._init_common(manager._model_config)
    groups, nodes = common["model_config_for_expert_location"].num_groups, get_parallel().nnodes
    return {
        "num_physical_experts": common["num_physical_experts"],
        "num_local_physical_experts": common["num_physical_experts"] // common["ep_size"],
        "num_groups": groups,
        "num_nodes": nodes,
        "algorithm": eplb_algorithms.compute_algorithm(
            raw_algorithm=get_exec().moe.eplb_algorithm, num_groups=groups, num_nodes=nodes
        ),
    }


def _solve(counts: torch.Tensor, asked: dict[str, Any]) -> torch.Tensor:  # pragma: no cover  as above
    from sglang.srt.eplb import eplb_algorithms

    p2l: torch.Tensor = eplb_algorithms.rebalance_experts(tokens_per_expert=counts, **asked)[0]
    return p2l


# ---- one map on all ranks --------------------------------------------------------------------------------------------


def agree_on_metadata(
    original: Callable[..., Any], manager: Any, logical_count: Any, *, broadcast_over_world: bool
) -> Any:
    """Around `_compute_expert_location_metadata`, for SGLang's own updater: each rank computes the map by itself."""
    if broadcast_over_world or not _gather_works():
        answer = original(manager, logical_count, broadcast_over_world=broadcast_over_world)
        if broadcast_over_world:
            context.balancers.forget()  # one rank alone has computed it
        return answer

    def ours() -> Any:
        return original(manager, logical_count, broadcast_over_world=False)

    def engine_own() -> Any:
        with hooking.setting(context.bypassed, True):
            return ours()

    gather = hooking.gather_over(context.cpu_group())
    return hooking.settle("placement", gather, ours, engine_own, digest_of=_digest, otherwise=context.live_metadata)


def _digest(metadata: Any) -> str:
    return hashlib.sha256(metadata.physical_to_logical_map_cpu.long().numpy().tobytes()).hexdigest()


def _gather_works() -> bool:
    return torch.distributed.is_initialized() and context.cpu_group() is not None


# ---- weights that change ---------------------------------------------------------------------------------------------


def around_weights(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around what writes into experts: no rank reads or installs one meanwhile. All ranks come here."""
    if not _moves or _moves[0].over or _updating:
        return original(*args, **kwargs)
    moves = _moves[0]
    _updating.append(True)
    try:
        _unless_over(moves, moves.before_weights)
        try:
            return original(*args, **kwargs)
        finally:
            _unless_over(moves, moves.after_weights)
    finally:
        _updating.clear()


def _unless_over(moves: sglang_moves.Moves, step: Callable[[], None]) -> None:
    """Run a step of all ranks around the engine's update; an error in it ends the moves, not the update."""
    if moves.over:
        return
    try:
        step()
    except Exception as error:
        moves.close(hooking.words(error))
        hooking.log_once(f"moves: SGLang's own rebalance goes on, since {moves.over}")


_updating: list[bool] = []
"""Not empty inside one of these functions: it may call another of them."""
