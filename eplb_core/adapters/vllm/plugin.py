"""vLLM: place, map, dispatch and count by this library, without a fork.

The plug-in is found through vLLM's own entry point group `vllm.general_plugins`, in each of its processes, and acts
only where the environment has `EPLB_CORE=vllm`. Four parts, each of which `EPLB_CORE_OFF` switches off: `policy` stands
in the place of vLLM's "default", `maps` computes its inverse map, `dispatch` writes each rank's entries into the tables
that its router reads, `fold` keeps the counts of a window with their experts when a layer moves. An error inside one is
logged once, and the engine's own code answers.

    EPLB_CORE=vllm vllm serve MODEL --enable-expert-parallel --enable-eplb ...

Written against vLLM 0.33.0; a function of another signature leaves its part to the engine, and a line says so. See
docs/engines.md.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial, reduce, wraps
from typing import Any, NamedTuple

import numpy as np
import torch

from eplb_core._arrays import IntArray
from eplb_core._version import __version__
from eplb_core.adapters import hooking
from eplb_core.adapters.vllm import communicator as vllm_communicator
from eplb_core.adapters.vllm import maps as vllm_maps
from eplb_core.adapters.vllm import policy as vllm_policy
from eplb_core.adapters.vllm.policy import PolicyOptions
from eplb_core.adapters.warm import warm_up_once
from eplb_core.errors import EplbError
from eplb_core.topology import Topology

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
_NEEDS = {
    "policy": (_REBALANCE,),
    "maps": (_MAPS,),
    "dispatch": (_MAPS, _COMMIT, _COMMIT_LAYER, _ADD_MODEL),
    "fold": (_COMMIT, _COMMIT_LAYER),
    "communicator": (_COMMUNICATOR,),
}


class Active(NamedTuple):
    """What the plug-in changed in this process."""

    parts: tuple[str, ...]
    policy: type | None
    options: PolicyOptions
    dispatch: str


class _Sender(NamedTuple):
    """How this rank writes a model's dispatch tables; `rank` None: all ranks write equal ones."""

    rank: int | None
    slots_per_rank: int
    num_nodes: int
    mode: str
    width: int
    group_of: Callable[[int], Any] = lambda ranks: None
    """Gives the CPU group of so many ranks that the forward thread uses; for equal tables."""


# The commit that is going on in this thread: what the inverse map is asked for then goes into the router's tables.
_committing: ContextVar[tuple[_Sender, int, Any] | None] = ContextVar("_committing", default=None)
_active: list[Active] = []
# On a model's state: who writes its tables, and what its map holds.
_SENDER, _KEPT = "_eplb_core_sender", "_eplb_core_rows"


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
        state_module.compute_logical_maps = _maps_hook(state_module.compute_logical_maps, ours="maps" in parts)
    fold, dispatch = "fold" in parts, "dispatch" in parts
    if fold or dispatch:
        for name, _ in (_COMMIT, _COMMIT_LAYER):
            setattr(state_module, name, _commit_hook(getattr(state_module, name), fold))
    if transport is not None and _fits("communicator", state_module):
        _replace_communicator(state_module, transport)
    active = Active(parts, policy, options, mode)
    if dispatch:
        state = state_module.EplbState
        if not hooking.mismatch(_find(state_module, _UPDATE[0]), *_UPDATE):  # before 0.30 there is none
            state.update_mapping = _update_hook(state.update_mapping)
    if not hooking.mismatch(_find(state_module, _ADD_MODEL[0]), *_ADD_MODEL):
        state_module.EplbState.add_model = _add_model_hook(state_module, active)
    return active


def _fits(part: str, state_module: Any) -> bool:
    targets = ((_find(state_module, name), name, parameters) for name, parameters in _NEEDS[part])
    return hooking.fits(part, f"vLLM {_version()}, written for 0.33.0", targets)


def _find(state_module: Any, name: str) -> Any:
    """What the module has by this dotted name, or None."""
    return reduce(lambda target, step: getattr(target, step, None), name.split("."), state_module)


def _version() -> str:
    return str(getattr(importlib.import_module("vllm"), "__version__", "of unknown version"))


# ---- policy ----------------------------------------------------------------------------------------------------------


def _replace_policy(state_module: Any, options: PolicyOptions) -> type:
    """Put ours wherever vLLM has its own: the names are imported from one module into the next."""
    default = state_module.DefaultEplbPolicy
    # All of them before the first is changed: what fails here leaves vLLM as it was.
    modules = [state_module, *map(importlib.import_module, (f"{_HOME}.policy", f"{_HOME}.policy.default"))]
    policy = policy_class(default, options, lambda ranks: _group_of(state_module, "get_eplb_group", ranks))
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
    balancers = vllm_policy.Balancers()

    def place(*args: Any, **kwargs: Any) -> torch.Tensor:
        named = dict(zip(_REBALANCE[1], args, strict=False)) | kwargs
        old = named.pop("old_global_expert_indices", None)
        return vllm_policy.rebalance(**named, old=old, options=options, balancers=balancers)

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
            settled: torch.Tensor = hooking.settle(
                "policy",
                hooking.gather_over(group),
                ours,
                lambda: default.rebalance_experts(*asked),
                digest_of=_digest,
                otherwise=lambda: default.rebalance_experts(*asked) if old is None else old,
            )
            return settled

        @classmethod
        def preserve_intragpu_slots(cls, phy2log: Any, num_ranks: int, old_phy2log: Any) -> Any:
            return preserve(phy2log, num_ranks, old_phy2log)

    return EplbCorePolicy


def _group_of(state_module: Any, name: str, ranks: int) -> Any:
    """The CPU group of vLLM's coordinator of that name, if there is one, of so many ranks, and of more than one."""
    try:
        group = getattr(state_module, name)().cpu_group
    except (AttributeError, AssertionError):  # no such coordinator, or none was made in this process
        return None
    return group if group is not None and group.size() == ranks > 1 else None


def _digest(*tensors: torch.Tensor) -> str:
    """Return a hash of their values."""
    return hashlib.sha256(b"".join(t.cpu().long().contiguous().numpy().tobytes() for t in tensors)).hexdigest()


# ---- communicator ----------------------------------------------------------------------------------------------------


def _replace_communicator(state_module: Any, transport: str) -> None:
    """Give out ours over `transport`; where some rank cannot, every rank gets the engine's."""
    engine_own = state_module.create_eplb_communicator

    def make(group_coordinator: Any, backend: str, expert_weights: Any, expert_buffer: Any) -> Any:
        made = vllm_communicator.create(transport, group_coordinator.cpu_group, expert_weights, expert_buffer)
        hooking.log_once(f"in effect in vLLM {_version()}: communicator over {transport}", logging.INFO)
        return made

    state_module.create_eplb_communicator = wraps(engine_own)(hooking.guarded(make, engine_own, "communicator"))


# ---- maps, dispatch and fold -----------------------------------------------------------------------------------------


def _maps_hook(engine_own: Callable[..., Any], *, ours: bool) -> Callable[..., Any]:
    inverse = hooking.guarded(vllm_maps.compute_logical_maps, engine_own, "maps") if ours else engine_own

    @wraps(engine_own)
    def compute_logical_maps(physical_to_logical_map: torch.Tensor, num_logical_experts: int) -> Any:
        commit = _committing.get()
        if commit is None:
            return inverse(physical_to_logical_map, num_logical_experts)
        own = hooking.guarded(partial(_dispatch_maps, commit), inverse, "dispatch")
        sender, given = commit[0], (physical_to_logical_map, num_logical_experts)
        group = None
        if sender.rank is None:  # all ranks map the same tokens: with other tables some would be lost
            group = sender.group_of(physical_to_logical_map.shape[-1] // sender.slots_per_rank)
        if group is None:
            return own(*given)
        return hooking.settle(
            "dispatch",
            hooking.gather_over(group),
            lambda: own(*given),
            lambda: inverse(*given),
            digest_of=lambda maps: _digest(*maps),
            otherwise=lambda: inverse(*given),
        )

    return compute_logical_maps


def _dispatch_maps(
    commit: tuple[_Sender, int, Any], physical_to_logical_map: torch.Tensor, num_logical_experts: int
) -> Any:
    sender, layer, load = commit
    slots = physical_to_logical_map.shape[-1]
    ranks = slots // sender.slots_per_rank
    nodes = sender.num_nodes if ranks % sender.num_nodes == 0 else 1
    return vllm_maps.dispatch_maps(
        physical_to_logical_map,
        num_logical_experts,
        topology=Topology(ranks, nodes),
        rank=None if sender.rank is None else sender.rank % ranks,
        mode=sender.mode,
        expert_load=load,
        first_layer=layer,
        width=sender.width,
    )


def _commit_of(
    model_state: Any, layer: int | None, *, sender: _Sender | None = None, alone: bool = False
) -> AbstractContextManager[None]:
    """While it runs, whoever asks for the inverse map gets the router's tables.

    Models that our `add_model` has not seen are left alone. `sender`: instead of the model's. `alone`: not all ranks
    are here, so none are compared.
    """
    sender = sender or vars(model_state).get(_SENDER)
    if sender is not None and alone:
        sender = sender._replace(group_of=lambda ranks: None)
    load = None
    if sender is not None and sender.mode == "weighted":
        load = getattr(model_state, "last_expert_load", None)
        load = load if layer is None or load is None else load[layer]
    return hooking.setting(_committing, None if sender is None else (sender, layer or 0, load))


def _commit_hook(engine_own: Callable[..., Any], fold: bool) -> Callable[..., Any]:
    """Around both functions that write maps: of all layers, and of `layer` alone."""

    @wraps(engine_own)
    def commit(model_state: Any, new_physical_to_logical_map: torch.Tensor, layer: int | None = None) -> Any:
        rows = _Rows.of(model_state)
        if rows is not None and rows.hold(new_physical_to_logical_map, layer) and not _is_weighted(model_state):
            return None  # vLLM commits every layer of a rebalance, and most do not change
        layers = slice(None) if layer is None else slice(layer, layer + 1)
        before = model_state.physical_to_logical_map[layers].clone() if fold else None
        with _commit_of(model_state, layer):
            given = () if layer is None else (layer,)
            answer = engine_own(model_state, new_physical_to_logical_map, *given)
        if before is not None:
            hooking.guarded(_fold, hooking.do_nothing, "fold")(model_state, before, layer or 0)
        _Rows.note(model_state, rows, new_physical_to_logical_map, layer)
        return answer

    return commit


def _is_weighted(model_state: Any) -> bool:
    """Whether its tables change with the load, also where experts stay."""
    sender = vars(model_state).get(_SENDER)
    return sender is not None and sender.mode == "weighted"


class _Rows(NamedTuple):
    """What a model's map holds, on the host: to read the map itself the forward thread would wait for the GPU."""

    tensor: torch.Tensor
    version: int
    """Of the tensor: whoever else writes into it makes this one out of date."""
    rows: IntArray

    @staticmethod
    def of(model_state: Any) -> _Rows | None:
        """What is known of the model's map; None if nothing is."""
        kept: _Rows | None = vars(model_state).get(_KEPT)
        live = model_state.physical_to_logical_map
        fresh = kept is not None and kept.tensor is live and not live.is_inference() and kept.version == live._version
        return kept if fresh else None

    def hold(self, new: torch.Tensor, layer: int | None) -> bool:
        """Whether these rows are there already; False where only the GPU knows."""
        own = self.rows if layer is None else self.rows[layer]
        return new.device.type == "cpu" and np.array_equal(new.numpy(), own)

    @staticmethod
    def note(model_state: Any, before: _Rows | None, new: torch.Tensor, layer: int | None) -> None:
        """Keep what was committed; where the rest is not known, nothing."""
        live = model_state.physical_to_logical_map
        vars(model_state).pop(_KEPT, None)
        if live.is_inference() or new.device.type != "cpu" or (layer is not None and before is None):
            return
        rows = new.numpy().copy() if layer is None or before is None else before.rows
        if layer is not None:
            rows[layer] = new.numpy()
        vars(model_state)[_KEPT] = _Rows(live, live._version, rows)


def _fold(model_state: Any, before: torch.Tensor, first_layer: int) -> None:
    """Book the window's counts of these layers, whose maps were `before`, under the maps that they have now."""
    after = model_state.physical_to_logical_map
    window = vars(model_state).get("expert_load_window")
    if window is None or window.shape[-1] != before.shape[-1] or after.shape[-1] != before.shape[-1]:
        return  # ranks come or go: the engine pads the window itself
    for layer, row in enumerate(before, first_layer):
        vllm_maps.fold_window(window[:, layer], row, after[layer])


def _update_hook(engine_own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(engine_own)
    def update_mapping(self: Any, model_config: Any, expanded_physical_to_logical: torch.Tensor) -> Any:
        with _commit_of(self.model_states[model_config.compute_hash()], None, alone=True):
            return engine_own(self, model_config, expanded_physical_to_logical)

    return update_mapping


def _add_model_hook(state_module: Any, active: Active) -> Callable[..., Any]:
    engine_own = state_module.EplbState.add_model

    @wraps(engine_own)
    def add_model(self: Any, model: Any, model_config: Any, *args: Any, **kwargs: Any) -> Any:
        warm_up_once()  # now, while the model loads: the first rebalance is a part of the profile run
        answer = engine_own(self, model, model_config, *args, **kwargs)
        hooking.guarded(_take_over, hooking.do_nothing, "dispatch")(state_module, active, self, model_config)
        return answer

    return add_model


def _take_over(state_module: Any, active: Active, state: Any, model_config: Any) -> None:
    """Write the first tables of a model, then say which parts are in effect."""
    model_state = state.model_states[model_config.compute_hash()]
    lines = []
    if "policy" in active.parts:
        if state.policy is not active.policy:
            hooking.log_once(f"policy is not in effect: vLLM chose {state.policy.__name__}")
        else:
            options = active.options
            auto = (
                f"move_cost={options.move_cost:g}, moves only what pays: step_interval may be short, 100 to 300 steps"
            )
            lines.append(
                f"policy ({options.mode}, {auto if options.mode == 'auto' else f'min_gain={options.min_gain:g}'})"
            )
    lines += [part for part in ("maps", "fold") if part in active.parts]
    if "dispatch" in active.parts:
        sender = _agree_on_sender(state_module, active, state, model_state)
        _write_first_tables(state_module, model_state, sender)
        whose = "equal on all ranks, which map the same tokens" if sender.rank is None else f"of rank {sender.rank}"
        lines.append(f"dispatch ({sender.mode}, {whose})")
    if "dispatch" in active.parts or "fold" in active.parts:
        _Rows.note(model_state, None, model_state.physical_to_logical_map.cpu(), None)
    hooking.log_once(f"in effect in vLLM {_version()}: {', '.join(lines) or 'nothing'}", logging.INFO)


def _write_first_tables(state_module: Any, model_state: Any, sender: _Sender) -> None:
    """Write the sender's tables, and keep it for all commits; where they must be equal, on all ranks or on none.

    Raises:
        EplbError: They could not be written, on some rank: the engine's own are in place again.
    """
    slots = model_state.physical_to_logical_map.shape[-1]
    group = sender.group_of(slots // sender.slots_per_rank) if sender.rank is None else None
    gather = hooking.gather_over(group) if group is not None else lambda said: [said]
    try:
        hooking.on_all_or_none(gather, lambda: _write_tables(state_module, model_state, sender))
    except EplbError:
        _write_tables(state_module, model_state, None)
        raise
    vars(model_state)[_SENDER] = sender


def _agree_on_sender(state_module: Any, active: Active, state: Any, model_state: Any) -> _Sender:
    """Say whose tables the model's are; where those of all ranks must be equal, all ranks write them or none.

    Raises:
        EplbError: Some rank cannot, or has other settings; on every rank.
        AttributeError: This rank writes tables of its own and the engine's objects lack what they need.
    """
    group = state_module.get_ep_group().device_group
    rank = vllm_maps.sender(state.parallel_config, group.rank())
    group_of = partial(_group_of, state_module, "get_ep_group")

    mode = active.dispatch
    if mode == "weighted" and getattr(model_state, "last_expert_load", None) is None:
        hooking.log_once(f"dispatch=weighted needs a load that vLLM {_version()} does not keep: rotated instead")
        mode = DISPATCH_MODES[0]

    def make() -> _Sender:
        return _Sender(
            rank,
            model_state.model.num_local_physical_experts,
            state_module.get_node_count(),
            mode,
            min(model_state.logical_to_physical_map.shape[-1], 64),
            group_of,
        )

    cpu_group = group_of(group.size()) if rank is None else None
    if cpu_group is None:
        return make()
    sender, said, _ = hooking.attempt(
        make, lambda sender: f"eplb_core {__version__}, {', '.join(active.parts)}, {sender[1:5]}"
    )
    told = hooking.gather_over(cpu_group)(said)
    for other, each in enumerate(told):
        if each != told[0] or each.failure:
            raise EplbError(
                f"rank {other} has {each.failure or each.digest} and rank 0 {told[0].failure or told[0].digest}; "
                f"{hooking.SAME}"
            )
    return sender


def _write_tables(state_module: Any, model_state: Any, sender: _Sender | None) -> None:
    """Write this rank's tables: those that `add_model` made hold all ranks' replicas in one order. None: those."""
    table, count = model_state.logical_to_physical_map, model_state.logical_replica_count
    with _commit_of(model_state, None, sender=sender):
        maps, counts = state_module.compute_logical_maps(model_state.physical_to_logical_map.cpu(), table.shape[1])
    table.fill_(-1)
    table[..., : maps.shape[-1]].copy_(maps)
    count.copy_(counts)
