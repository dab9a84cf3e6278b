"""A placement policy for vllm-ascend's factory, by this library; nothing of vllm-ascend is imported here.

The engine's worker puts a layer back to its old table where an expert is missing, lies twice on a rank, or changes its
slot on a rank that it stays on. Placing from the live table obeys these rules by itself; a layer for which that cannot
be (a live table that breaks them) keeps its table here, so that what is returned is what will be applied.

The engine's users look at the fullest rank over the mean of one sum of loads, which its own policies bring down at any
price. So more moves by default than `place` would make alone, and windows are balanced together with their sum. Mode
"auto" is for those who look at many cycles: a `Balancer` remembers them and moves only what pays.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

import numpy as np
import torch

from eplb_core._arrays import BoolArray, FloatArray, IntArray, add_up, to_ids, to_numpy
from eplb_core.adapters.balancers import Balancers, auto_line
from eplb_core.adapters.filled import keep_filled
from eplb_core.adapters.hooking import guarded, log_once
from eplb_core.balancer.balancer import DEFAULT_MOVE_COST, Balancer
from eplb_core.layout import ExpertLayout
from eplb_core.load import fold_slots
from eplb_core.metrics import balancedness, rank_load
from eplb_core.placement.place import place
from eplb_core.topology import Topology

# Of a layer's slots, what may move in a rebalance. SwiftBalancer moves 22% in the case of its own test.
_MOST_MOVED = 0.2
_FROM_TABLE = {"expert_load", "topology", "current", "num_slots", "slots_per_rank"}


class EplbCorePolicy:
    """What `PolicyFactory.generate_policy` returns: an object with `rebalance_experts`.

    Args:
        mode: "place": from the live table on, for this call's load. "auto": a `Balancer` that remembers the load of
            each call, its windows summed, as one window. Ranks compute alone: start and restart them together.
        move_cost: Of "auto": what a transfer costs, in windows of its layer's time.
        options: Passed on to `place`: `min_gain`, `transfer_price`, `max_transfers`, ...; equal on all ranks.
            `max_transfers` is by default a fifth of a layer's slots, unless a `transfer_price` is given or the mode is
            "auto". That decides `min_gain`, `transfer_price` and `window_weights` by itself and does not take them.

    Raises:
        ValueError: No such mode, or a bad `move_cost`.
        TypeError: An option that "auto" does not take, or that says what each call's table says: ranks and slots.
    """

    def __init__(
        self, *, mode: Literal["place", "auto"] = "place", move_cost: float = DEFAULT_MOVE_COST, **options: Any
    ) -> None:
        if mode not in ("place", "auto"):
            raise ValueError(f"`mode` (={mode!r}) must be 'place' or 'auto'")
        for name in sorted(_FROM_TABLE & {*options}):
            raise TypeError(f"`{name}` must not be given: the engine's table says it in each call; leave it out")
        self._options, self._move_cost = options, move_cost
        self._balancers = Balancers() if mode == "auto" else None
        if mode == "auto":
            Balancer(Topology(1), num_slots=1, move_cost=move_cost, **options)  # raises now, not at the first load

    def rebalance_experts(
        self, current_expert_table: torch.Tensor, expert_workload: torch.Tensor
    ) -> tuple[int, IntArray, torch.Tensor]:
        """Place from the live table on.

        Args:
            current_expert_table: Expert of each slot, `[L, R, S]`.
            expert_workload: Tokens that each slot received, `[L, R, S]`, or windows of it, `[T, L, R, S]`.

        Returns:
            Whether any layer changed (1 or 0), the layers in the order of their gain, and the new table `[L, R, S]`.
            Of mode "place" no layer is less even than before on what the windows sum to.

        Raises:
            ValueError: The shapes do not fit, or a count is negative.
        """
        table = to_ids(current_expert_table, "current_expert_table")
        counts = to_numpy(expert_workload, "expert_workload")
        if table.ndim != 3 or counts.shape[-3:] != table.shape or counts.ndim not in (3, 4):
            raise ValueError(
                f"`expert_workload` (shape {list(counts.shape)}) must be [L, R, S] or [T, L, R, S] like "
                f"`current_expert_table` (shape {list(table.shape)})"
            )
        layers, ranks, stride = table.shape
        p2l = table.reshape(layers, ranks * stride)
        experts = int(p2l.max(initial=0)) + 1
        load = fold_slots(counts.reshape(*counts.shape[:-3], layers, -1), p2l, experts)
        current = ExpertLayout(p2l, experts, topology=Topology(ranks))
        answer, gain = self._place(load if load.ndim == 3 else load[None], current)
        broken = breaks_rules(p2l, answer, ranks, experts)
        answer[broken] = p2l[broken]
        changed = (answer != p2l).any(axis=1)
        order: IntArray = np.argsort(-np.where(changed, gain, 0.0), kind="stable").astype(np.int64)
        return int(changed.any()), order, torch.from_numpy(answer.reshape(table.shape))

    def _place(self, windows: IntArray, current: ExpertLayout) -> tuple[IntArray, FloatArray]:
        """Rows `[L, P]`, and what their balancedness on the windows' sum gains `[L]`."""
        total = add_up(windows)
        before = _evenness(current, total)
        if self._balancers is not None:
            line = auto_line(self._move_cost, "expert_heat_collection_interval")
            log_once(f"in effect in vllm-ascend: policy ({line})", logging.INFO)
            layout = self._balancers.layout_of(total, current, move_cost=self._move_cost, **self._options)
            return np.array(layout.physical_to_logical_map), _evenness(layout, total) - before
        frame: dict[str, Any] = {"topology": current.topology, "num_slots": current.num_slots, "current": current}
        options = {**frame, **self._options}
        if "transfer_price" not in options:
            options.setdefault("max_transfers", max(1, int(_MOST_MOVED * current.num_slots)))
        if len(windows) > 1:
            # The sum counts as much as all windows: they differ, and a layer may suit each of them and not their sum.
            weights = np.append(np.broadcast_to(options.pop("window_weights", 1.0), len(windows)), 0.0)
            weights[-1] = weights.sum()
            both = np.concatenate([windows, total[None]])
            layout = keep_filled(place(both, window_weights=weights, **options).layout, current)
            worse = np.flatnonzero(_evenness(layout, total) < before)
            if worse.size:
                layout = layout.replace(keep_filled(place(total, **options).layout, current), worse)
        else:
            layout = keep_filled(place(total, **options).layout, current)
        return np.array(layout.physical_to_logical_map), _evenness(layout, total) - before


def _evenness(layout: ExpertLayout, load: IntArray | FloatArray) -> FloatArray:
    """Balancedness of each layer `[L]`; 0 without load."""
    return np.nan_to_num(balancedness(rank_load(layout, load)))


def breaks_rules(old: IntArray, new: IntArray, num_ranks: int, num_experts: int) -> BoolArray:
    """Which layers would vllm-ascend put back: `old` and `new` are `[L, P]`; bool `[L]`."""
    layers, slots = new.shape
    before, after = (rows.reshape(layers, num_ranks, slots // num_ranks) for rows in (old, new))
    ordered = np.sort(after, axis=2)
    twice = (ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=(1, 2))
    missing = np.array([len(np.unique(row)) < num_experts for row in new], dtype=np.bool_)
    # An expert that the rank held before stands where it stood.
    stayed = (after[..., :, None] == before[..., None, :]).any(axis=3)
    moved = (stayed & (after != before)).any(axis=(1, 2))
    broken: BoolArray = twice | missing | moved
    return broken


def use_in_factory(factory: Any, **options: Any) -> None:
    """Let vllm-ascend's `PolicyFactory` give out this policy, whatever its number; an error falls back to its own.

    Args:
        factory: The class `vllm_ascend.eplb.core.policy.policy_factory.PolicyFactory`.
        options: As for `EplbCorePolicy`, whose errors are raised here.
    """
    EplbCorePolicy(**options)
    engine_own = factory.generate_policy

    class _Policy:
        def __init__(self, theirs: Any) -> None:
            self.rebalance_experts = guarded(
                EplbCorePolicy(**options).rebalance_experts, theirs.rebalance_experts, "policy"
            )

    factory.generate_policy = staticmethod(lambda *args, **kwargs: _Policy(engine_own(*args, **kwargs)))
