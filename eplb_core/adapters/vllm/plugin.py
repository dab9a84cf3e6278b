"""vLLM: place, map, dispatch and count by this library, without a fork.

The plug-in is found through vLLM's own entry point group `vllm.general_plugins`, in each of its processes, and acts
only where the environment has `EPLB_CORE=vllm`. Four parts, each of which `EPLB_CORE_OFF` switches off: `policy` stands
in the place of vLLM's "default", `maps` computes its inverse map, `dispatch` writes each rank's entries into the tables
that its router reads, `fold` keeps the counts of a window with their experts when a layer moves. An error inside one is
logged once, and the engine's own code answers.

    EPLB_CORE=vllm vllm serve MODEL --enable-expert-parallel --enable-eplb ...

Written against vLLM 0.33.0; a function of another signature leaves its part to the engine, and a line says so.
`python -m eplb_core.adapters.check` prints what works with the vLLM that is installed. See docs/engines.md.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from functools import reduce, wraps
from typing import Any, NamedTuple

import torch

from eplb_core.adapters import hooking, source
from eplb_core.adapters.balancers import Balancers
from eplb_core.adapters.vllm import communicator as vllm_communicator
from eplb_core.adapters.vllm import policy as vllm_policy
from eplb_core.adapters.vllm.commits import add_model_hook, commit_hook, maps_hook, update_hook
from eplb_core.adapters.vllm.context import Active, cpu_group_of, digest, version
from eplb_core.adapters.vllm.policy import PolicyOptions
from eplb_core.exposition import Placements

PARTS = ("policy", "maps", "dispatch", "fold")
DISPATCH_MODES = ("rotated", "weighted", "even")
_OPTIONS: dict[str, Callable[[str], Any]] = {
    **hooking.PLACE_OPTIONS,
    "mode": hooking.one_of("place", "auto", "deepseek"),
    "move_cost": float,
    "locality": hooking.one_of("engine", "none"),
    "dispatch": hooking.one_of(*DISPATCH_MODES),
    "transport": hooking.one_of(*vllm_communicator.TRANSPORTS),
}

_HOME = "vllm.distributed.eplb"
_COMMIT_LAYER = ("_commit_eplb_maps_for_layer", ("model_state", "new_physical_to_logical_map", "layer"))
_COMMIT = ("_commit_eplb_maps", ("model_state", "new_physical_to_logical_map"))
_MAPS = ("compute_logical_maps", ("physical_to_logical_map", "num_logical_experts"))
_ADD_MODEL = ("EplbState.add_model", ("self", "model", "model_config"))
_UPDATE = ("EplbState.update_mapping", ("self", "model_config", "expanded_physical_to_logical"))
_REBALANCE = (
    "DefaultEplbPolicy.rebalance_experts",
    ("weight", "num_replicas", "num_groups", "num_nodes", "num_ranks", "old_global_expert_indices"),
)
_COMMUNICATOR = ("create_eplb_communicator", ("group_coordinator", "backend", "expert_weights", "expert_buffer"))


class _Needed(NamedTuple):
    target: str
    parameters: tuple[str, ...]
    needed: bool = True
    """Without it the whole part is left to the engine; else the part does without."""


_NEEDS = {
    "policy": (_Needed(*_REBALANCE),),
    "maps": (_Needed(*_MAPS),),
    "dispatch": (*(_Needed(*each) for each in (_MAPS, _COMMIT, _COMMIT_LAYER, _ADD_MODEL)), _Needed(*_UPDATE, False)),
    "fold": (_Needed(*_COMMIT), _Needed(*_COMMIT_LAYER)),
    "communicator": (_Needed(*_COMMUNICATOR),),
}
_active: list[Active] = []


def register() -> None:
    """Put the hooks in place; vLLM calls this in each of its processes. Does nothing unless `EPLB_CORE=vllm`."""
    if not hooking.asked_for("vllm") or _active:
        return
    hooking.log_through("vllm.eplb_core")
    try:
        _active.append(activate(importlib.import_module(f"{_HOME}.eplb_state")))
    except Exception as error:
        hooking.log_once(f"not active: {type(error).__name__}: {error}", logging.ERROR)


def active_parts() -> tuple[str, ...]:
    """The parts that are in effect in this process; empty if none is."""
    return _active[0].parts if _active else ()


def activate(state_module: Any) -> Active:
    """Change what the environment asks for in vLLM's module `eplb_state`, and in `policy`, which it imports from.

    Args:
        state_module: The module, or what stands in for it.

    Raises:
        ValueError: `EPLB_CORE_OFF` or `EPLB_CORE_OPTIONS` names what there is not.
    """
    wanted = hooking.parts_on(PARTS)
    found = hooking.options_from(_OPTIONS)
    mode, transport = found.pop("dispatch", DISPATCH_MODES[0]), found.pop("transport", None)
    options = PolicyOptions(**found)
    parts = tuple(part for part in wanted if _fits(part, state_module))
    policy = _replace_policy(state_module, options) if "policy" in parts else None
    if "maps" in parts or "dispatch" in parts:
        state_module.compute_logical_maps = maps_hook(state_module.compute_logical_maps, ours="maps" in parts)
    fold, dispatch = "fold" in parts, "dispatch" in parts
    if fold or dispatch:
        for name, _ in (_COMMIT, _COMMIT_LAYER):
            setattr(state_module, name, commit_hook(getattr(state_module, name), fold))
    if transport is not None and _fits("communicator", state_module):
        _replace_communicator(state_module, transport)
    active = Active(parts, policy, options, mode, wanted)
    if dispatch:
        state = state_module.EplbState
        if not hooking.mismatch(_find(state_module, _UPDATE[0]), *_UPDATE):  # before 0.30 there is none
            state.update_mapping = update_hook(state.update_mapping)
    if not hooking.mismatch(_find(state_module, _ADD_MODEL[0]), *_ADD_MODEL):
        state_module.EplbState.add_model = add_model_hook(state_module, active)
    return active


def _fits(part: str, state_module: Any) -> bool:
    targets = ((_find(state_module, each.target), *each[:2]) for each in _NEEDS[part] if each.needed)
    return hooking.fits(part, f"vLLM {version()}, written for 0.33.0", targets)


def troubles(part: str) -> Iterator[tuple[_Needed, str]]:
    """Yield each function that a part changes, and how it differs from what is expected; vLLM is not imported."""
    for each in _NEEDS[part]:
        yield each, hooking.mismatch(source.find(f"{_HOME}.eplb_state.{each.target}"), each.target, each.parameters)


def _find(state_module: Any, name: str) -> Any:
    """What the module has by this dotted name, or None."""
    return reduce(lambda target, step: getattr(target, step, None), name.split("."), state_module)


# ---- policy ----------------------------------------------------------------------------------------------------------


def _replace_policy(state_module: Any, options: PolicyOptions) -> type:
    """Put ours wherever vLLM has its own: the names are imported from one module into the next."""
    default = state_module.DefaultEplbPolicy
    # All of them before the first is changed: what fails here leaves vLLM as it was.
    modules = [state_module, *map(importlib.import_module, (f"{_HOME}.policy", f"{_HOME}.policy.default"))]
    policy = policy_class(default, options, lambda ranks: cpu_group_of(state_module, "get_eplb_group", ranks))
    for name, known in tuple(state_module.EPLB_POLICIES.items()):
        if known is default:
            state_module.EPLB_POLICIES[name] = policy
    for module in modules:
        module.DefaultEplbPolicy = policy
    return policy


def policy_class(default: Any, options: PolicyOptions, group_of: Callable[[int], Any] = lambda ranks: None) -> type:
    """Return a subclass of vLLM's class `default` that places by eplb_core; where that raises, `default` answers.

    Ranks compare their answers: where one falls back to `default`, all do.

    Args:
        default: vLLM's own.
        options: How ours places.
        group_of: Gives the CPU group of so many ranks that this thread alone uses; None: ranks are not compared.
    """
    balancers, placements = Balancers(), Placements()

    def place(*args: Any, **kwargs: Any) -> torch.Tensor:
        named = dict(zip(_REBALANCE[1], args, strict=False)) | kwargs
        old = named.pop("old_global_expert_indices", None)
        return vllm_policy.rebalance(**named, old=old, options=options, balancers=balancers, placements=placements)

    rebalance = hooking.guarded(place, default.rebalance_experts, "policy")
    preserve = hooking.guarded(vllm_policy.preserve_intragpu_slots, default.preserve_intragpu_slots, "policy")

    class EplbCorePolicy(default):  # type: ignore[misc]
        """Placement by eplb_core in the place of vLLM's default."""

        @classmethod
        def rebalance_experts(
            cls,
            weight: torch.Tensor,
            num_replicas: int,
            num_groups: int,
            num_nodes: int,
            num_ranks: int,
            old_global_expert_indices: torch.Tensor | None = None,
        ) -> torch.Tensor:
            old = old_global_expert_indices
            asked = (weight, num_replicas, num_groups, num_nodes, num_ranks, old)

            def ours() -> torch.Tensor:
                answer: torch.Tensor = rebalance(*asked)
                return answer

            # While ranks come or go not all of them ask.
            still = old is None or (old.shape[-1] == num_replicas and bool((old >= 0).all()))
            group = group_of(num_ranks) if still else None
            if group is None:
                return ours()

            def engine_own() -> torch.Tensor:
                balancers.forget()  # of all ranks: one of them has seen or remembers something else
                answer: torch.Tensor = default.rebalance_experts(*asked)
                return answer

            settled: torch.Tensor = hooking.settle(
                "policy",
                hooking.gather_over(group),
                ours,
                engine_own,
                digest_of=digest,
                otherwise=lambda: default.rebalance_experts(*asked) if old is None else old,
            )
            return settled

        @classmethod
        def preserve_intragpu_slots(cls, phy2log: Any, num_ranks: int, old_phy2log: Any) -> Any:
            return preserve(phy2log, num_ranks, old_phy2log)

    as_expected = hooking.as_called(EplbCorePolicy.rebalance_experts, default.rebalance_experts, "policy")
    EplbCorePolicy.rebalance_experts = staticmethod(as_expected)  # type: ignore[method-assign]
    return EplbCorePolicy


# ---- communicator ----------------------------------------------------------------------------------------------------


def _replace_communicator(state_module: Any, transport: str) -> None:
    """Give out ours over `transport`; where some rank cannot, every rank gets the engine's."""
    engine_own = state_module.create_eplb_communicator

    def make(group_coordinator: Any, backend: str, expert_weights: Any, expert_buffer: Any) -> Any:
        made = vllm_communicator.create(transport, group_coordinator.cpu_group, expert_weights, expert_buffer)
        hooking.log_once(f"in effect in vLLM {version()}: communicator over {transport}", logging.INFO)
        return made

    state_module.create_eplb_communicator = wraps(engine_own)(hooking.guarded(make, engine_own, "communicator"))
