"""Hooks around vLLM's commits of maps: what its router reads, the counts of a window, rows that did not change.

All of it runs on the forward thread, for each layer of a rebalance.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, NamedTuple

import numpy as np
import torch

from eplb_core._arrays import IntArray
from eplb_core._version import __version__
from eplb_core.adapters import hooking
from eplb_core.adapters.balancers import auto_line
from eplb_core.adapters.prometheus import publish
from eplb_core.adapters.vllm import maps as vllm_maps
from eplb_core.adapters.vllm.context import Active, cpu_group_of, digest, version
from eplb_core.adapters.warm import warm_up_once
from eplb_core.errors import EplbError
from eplb_core.exposition import Sample, set_rank, watch
from eplb_core.topology import Topology


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
_committing: ContextVar[tuple[_Sender, int, Callable[[], Any]] | None] = ContextVar("_committing", default=None)
# On a model's state: who writes its tables, what its map holds, and what its commits have come to.
_SENDER, _KEPT, _COUNTS = "_eplb_core_sender", "_eplb_core_rows", "_eplb_core_counts"


def maps_hook(engine_own: Callable[..., Any], *, ours: bool) -> Callable[..., Any]:
    """Around `compute_logical_maps`: the inverse map, or within a commit what the router should find; `ours`: both."""
    inverse = hooking.guarded(vllm_maps.compute_logical_maps, engine_own, "maps") if ours else engine_own

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
        gather = hooking.gather_over(group)
        return hooking.settle(
            "dispatch",
            gather,
            lambda: own(*given),
            lambda: inverse(*given),
            digest_of=lambda maps: digest(*maps),
            otherwise=lambda: inverse(*given),
            same=gather.same,  # ranks of another version have no sender
        )

    return hooking.as_called(compute_logical_maps, engine_own, "maps")


def _dispatch_maps(
    commit: tuple[_Sender, int, Callable[[], Any]], physical_to_logical_map: torch.Tensor, num_logical_experts: int
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
        expert_load=load() if sender.mode == "weighted" else None,
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
    load = partial(_load_of, model_state, layer)
    return hooking.setting(_committing, None if sender is None else (sender, layer or 0, load))


def _load_of(model_state: Any, layer: int | None) -> Any:
    """The load of the last rebalance, of all layers or of one; older versions keep none."""
    return model_state.last_expert_load if layer is None else model_state.last_expert_load[layer]


def commit_hook(engine_own: Callable[..., Any], fold: bool) -> Callable[..., Any]:
    """Around both functions that write maps: of all layers, and of `layer` alone."""

    def commit(model_state: Any, new_physical_to_logical_map: torch.Tensor, layer: int | None = None) -> Any:
        rows = _Rows.of(model_state)
        if rows is not None and rows.hold(new_physical_to_logical_map, layer) and not _is_weighted(model_state):
            return None  # vLLM commits every layer of a rebalance, and most do not change
        layers = slice(None) if layer is None else slice(layer, layer + 1)
        before = model_state.physical_to_logical_map[layers].clone() if fold else None
        with _commit_of(model_state, layer):
            given = () if layer is None else (layer,)
            answer = engine_own(model_state, new_physical_to_logical_map, *given)
        counts: _Counts | None = vars(model_state).get(_COUNTS)
        if counts is not None and rows is not None:
            with suppress(Exception):  # as in `add_model`
                counts.note(rows.rows, new_physical_to_logical_map, layer)
        if before is not None:
            hooking.guarded(_fold, hooking.do_nothing, "fold")(model_state, before, layer or 0)
        _Rows.note(model_state, rows, new_physical_to_logical_map, layer)
        return answer

    return hooking.as_called(commit, engine_own, "dispatch")


def _is_weighted(model_state: Any) -> bool:
    """Whether its tables change with the load, also where experts stay."""
    sender = vars(model_state).get(_SENDER)
    return sender is not None and sender.mode == "weighted"


class _Counts:
    """What commits brought this rank, for operators."""

    def __init__(self, rank: int, slots: int) -> None:
        self.rank, self._own = rank, slice(rank * slots, (rank + 1) * slots)
        self.layers = self.received = 0

    def note(self, before: IntArray, new: torch.Tensor, layer: int | None) -> None:
        """Count a commit of all rows, or of one; nothing where ranks come or go, or only the GPU knows."""
        rows, old = new.numpy() if new.device.type == "cpu" else None, before if layer is None else before[layer]
        if rows is None or rows.shape != old.shape:
            return
        for after, was in zip(np.atleast_2d(rows), np.atleast_2d(old), strict=True):
            if not np.array_equal(after, was):
                self.layers += 1
                self.received += len({*after[self._own].tolist()} - {*was[self._own].tolist(), -1})

    def counters(self) -> list[Sample]:
        """For `exposition.watch`."""
        return [
            Sample("eplb_layers_installed_total", self.layers, self.rank),
            Sample("eplb_experts_received_total", self.received, self.rank),
        ]


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
        """Keep what was committed; where the rest is not known, it is read once."""
        live = model_state.physical_to_logical_map
        vars(model_state).pop(_KEPT, None)
        if live.is_inference() or new.device.type != "cpu":
            return
        if layer is None:
            rows = new.numpy().copy()
        elif before is None:
            rows = live.cpu().numpy().copy()
        else:
            rows = before.rows
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


def update_hook(engine_own: Callable[..., Any]) -> Callable[..., Any]:
    """Around `EplbState.update_mapping`, which not all ranks call."""

    def update_mapping(self: Any, model_config: Any, expanded_physical_to_logical: torch.Tensor) -> Any:
        with _commit_of(self.model_states[model_config.compute_hash()], None, alone=True):
            return engine_own(self, model_config, expanded_physical_to_logical)

    return hooking.as_called(update_mapping, engine_own, "dispatch")


def add_model_hook(state_module: Any, active: Active) -> Callable[..., Any]:
    """Around `EplbState.add_model`: get ready while the model loads, then take it over."""
    engine_own = state_module.EplbState.add_model

    @wraps(engine_own)
    def add_model(self: Any, model: Any, model_config: Any, *args: Any, **kwargs: Any) -> Any:
        warm_up_once()  # now, while the model loads: the first rebalance is a part of the profile run
        answer = engine_own(self, model, model_config, *args, **kwargs)
        hooking.guarded(_take_over, hooking.do_nothing, "dispatch")(state_module, active, self, model_config)
        with suppress(Exception):  # numbers for operators are no reason to stop an engine, nor for a line in its log
            _tell(state_module, active, self, model_config)
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
            group = cpu_group_of(state_module, "get_eplb_group", state_module.get_ep_group().device_group.size())
            if group is not None:
                hooking.gather_over(group)  # made here: all ranks are
            options = active.options
            auto = auto_line(options.move_cost, "step_interval")
            lines.append(
                f"policy ({auto if options.mode == 'auto' else f'{options.mode}, min_gain={options.min_gain:g}'})"
            )
    lines += [part for part in ("maps", "fold") if part in active.parts]
    if "dispatch" in active.parts:
        sender = _agree_on_sender(state_module, active, state, model_state)
        _write_first_tables(state_module, model_state, sender)
        whose = "equal on all ranks, which map the same tokens" if sender.rank is None else f"of rank {sender.rank}"
        lines.append(f"dispatch ({sender.mode}, {whose})")
    if "dispatch" in active.parts or "fold" in active.parts:
        _Rows.note(model_state, None, model_state.physical_to_logical_map.cpu(), None)
    hooking.log_once(f"in effect in vLLM {version()}: {', '.join(lines) or 'nothing'}", logging.INFO)


def _tell(state_module: Any, active: Active, state: Any, model_config: Any) -> None:
    """Let operators see which parts are in effect, and what the commits of this model come to."""
    model_state = state.model_states[model_config.compute_hash()]
    missing = {"policy": state.policy is not active.policy, "dispatch": _SENDER not in vars(model_state)}
    hooking.tell_parts({part: part in active.parts and not missing.get(part) for part in active.asked})
    try:
        rank = state_module.get_ep_group().device_group.rank()
        counts = _Counts(rank, model_state.model.num_local_physical_experts)
        set_rank(rank)
        vars(model_state)[_COUNTS] = counts
        watch(counts, counters=counts.counters)  # lives on: what was counted stays
    finally:
        publish()  # with the rank, where it is known: numbers in files keep their labels


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
    group_of = partial(cpu_group_of, state_module, "get_ep_group")

    mode = active.dispatch
    if mode == "weighted" and getattr(model_state, "last_expert_load", None) is None:
        hooking.log_once(f"dispatch=weighted needs a load that vLLM {version()} does not keep: rotated instead")
        mode = "rotated"

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
