"""Policies and dispatches that a replay knows by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

import eplb_core
from eplb_core._arrays import ArrayLike, FloatArray, IntArray, add_up, check_word
from eplb_core._extras import needed
from eplb_core._text import quoted
from eplb_core.layout import ExpertLayout
from eplb_core.metrics import even_shares
from eplb_core.placement.worth.costs import CostModel
from eplb_core.simulation.load.sources import Block

Policy: TypeAlias = Callable[[IntArray | FloatArray, ExpertLayout], ExpertLayout]
"""From windows of load `[T', L, E]` and the layout that is live to the layout to live on."""
Dispatch: TypeAlias = Callable[[ExpertLayout, FloatArray], ArrayLike]
"""From the live layout and one window `[L, E]` to the share of its expert's tokens that each slot takes, `[L, P]`."""

BASIC = ("none", "place", "deepseek")
"""What is compared where nothing else is said."""
POLICIES = (*BASIC, "once", "gated")
"""none: the first layout stays. place: `place` from the live layout. deepseek: `rebalance_experts` on the sum of the
windows. once: `place` at the first rebalance, then it stays. gated: `place`, and of its layers those that
`should_rebalance` calls worth their move."""
DISPATCHES = ("even", "weighted", "solved", "static", "local")
"""even: replicas share equally. weighted: shares solved for the windows that the policy saw. solved: shares solved for
each window as it comes. static: SGLang's static tables. local: `even_dispatch_table`, near replicas first."""


class PolicySetting(NamedTuple):
    """What the policies with a name need to know."""

    num_slots: int
    num_groups: int | None
    options: dict[str, Any]
    cost: CostModel | None
    window_passes: float
    interval: int


def to_options(place_options: Mapping[str, object] | None) -> dict[str, object]:
    """Arguments for `place`; none are none."""
    if place_options is not None and not isinstance(place_options, Mapping):
        raise TypeError(f"`place_options` (={quoted(place_options, 80)}) must be a dict of arguments of `place`")
    return dict(place_options or {})


def policy_of(policy: str | Policy, setting: PolicySetting) -> tuple[str, Policy]:
    """The name and the function of a policy."""
    if callable(policy):
        return getattr(policy, "__name__", type(policy).__name__), policy
    check_word(policy, "policy", POLICIES, ", or a function")
    if policy == "none":
        return policy, lambda windows, live: live
    if policy == "deepseek":
        return policy, _deepseek(setting.num_slots, 1 if setting.num_groups is None else setting.num_groups)
    options = setting.options
    if setting.num_groups is not None:
        options = {"num_groups": setting.num_groups, **options}
    return policy, {"place": _place, "once": _once, "gated": _gated}[policy](setting._replace(options=options))


def _place(setting: PolicySetting) -> Policy:
    def choose(windows: IntArray | FloatArray, live: ExpertLayout) -> ExpertLayout:
        # Through the package, which compiles the kernels only where they are used.
        return eplb_core.place(
            windows, topology=live.topology, num_slots=setting.num_slots, current=live, **setting.options
        ).layout

    return choose


def _once(setting: PolicySetting) -> Policy:
    place = _place(setting)
    done: list[ExpertLayout] = []

    def choose(windows: IntArray | FloatArray, live: ExpertLayout) -> ExpertLayout:
        if not done:
            done.append(place(windows, live))
        return done[0]

    return choose


def _gated(setting: PolicySetting) -> Policy:
    passes_since = [0.0]

    def choose(windows: IntArray | FloatArray, live: ExpertLayout) -> ExpertLayout:
        passes_since[0] += setting.window_passes * setting.interval
        placed = eplb_core.place(
            windows, topology=live.topology, num_slots=setting.num_slots, current=live, **setting.options
        )
        verdict = eplb_core.should_rebalance(
            live,
            windows,
            placed,
            cost=setting.cost,
            passes_since=passes_since[0],
            window_passes=setting.window_passes,
        )
        if not verdict:
            return live
        passes_since[0] = 0.0
        return live.replace(placed.layout, verdict.layers)

    return choose


def _deepseek(num_slots: int, num_groups: int) -> Policy:
    torch = needed("torch", "torch", 'the policy "deepseek"')

    def choose(windows: IntArray | FloatArray, live: ExpertLayout) -> ExpertLayout:
        total = add_up(windows)
        power = int(np.frexp(float(total.max(initial=0)))[1])
        if not -60 < power < 120:  # beyond its float32; a power of two changes no answer
            total = np.ldexp(total.astype(np.float64), -power)
        weight = torch.from_numpy(total)
        ranks, nodes = live.topology.num_ranks, live.topology.num_nodes
        p2l, _, _ = eplb_core.rebalance_experts(weight, num_slots, num_groups, nodes, ranks)
        return ExpertLayout(p2l, live.num_experts, topology=live.topology)

    return choose


# ---- dispatch --------------------------------------------------------------------------------------------------------


class Dispatcher:
    """Tokens of each slot, for the layout that is live. `renew` before the first block and after each rebalance."""

    def __init__(self, dispatch: str | Dispatch) -> None:
        if not callable(dispatch):
            check_word(dispatch, "dispatch", DISPATCHES, ", or a function")
        self.dispatch = dispatch
        self.shares: FloatArray | None = None
        self.table: IntArray | None = None

    def renew(self, layout: ExpertLayout, seen: IntArray | FloatArray | None) -> None:
        """A layout goes live; `seen` are the windows `[T', L, E]` known by then."""
        self.layout = layout
        self.shares = self.table = None
        if self.dispatch == "weighted" and seen is not None:
            self.shares = eplb_core.replica_shares(layout, seen)
        elif self.dispatch == "static":
            self.table = eplb_core.static_dispatch_table(layout)
        elif self.dispatch == "local":
            self.table = eplb_core.even_dispatch_table(layout)

    def slot_load(self, block: Block) -> FloatArray:
        """Tokens of each slot, float64 `[t, L, P]`."""
        if self.table is not None and block.by_source is not None:
            return self._by_table(block.by_source(self.layout.topology.num_ranks), self.table)
        load = np.asarray(block.load, dtype=np.float64)
        shares = self._shares(load)
        p2l = self.layout.physical_to_logical_map
        index = np.broadcast_to(np.maximum(p2l, 0), (len(load), *p2l.shape))
        tokens: FloatArray = np.take_along_axis(load, index, axis=2)
        tokens *= np.where(p2l >= 0, shares, 0.0)
        return tokens

    def _shares(self, load: FloatArray) -> FloatArray:
        if callable(self.dispatch):
            return self._checked(np.stack([np.asarray(self.dispatch(self.layout, window)) for window in load]))
        if self.dispatch == "solved":
            return np.stack([eplb_core.replica_shares(self.layout, window) for window in load])
        if self.table is not None:  # every rank sends as much of each expert
            ones = np.ones((1, len(self.table), *self.table.shape[1:])) / len(self.table)
            return self._by_table(ones, self.table)
        if self.shares is not None:
            return self.shares
        return even_shares(self.layout)

    def _checked(self, shares: FloatArray) -> FloatArray:
        shape = self.layout.physical_to_logical_map.shape
        if shares.shape[1:] != shape:
            raise ValueError(
                f"`dispatch` gave shares of shape {list(shares.shape[1:])}; they must be {list(shape)}, one a slot"
            )
        return shares.astype(np.float64)

    def _by_table(self, sent: FloatArray, table: IntArray) -> FloatArray:
        """What each rank sends, `[t, R, L, E]`, to the slot that its table names: `[t, L, P]`."""
        slots = self.layout.num_slots
        tokens = np.empty((len(sent), self.layout.num_layers, slots))
        for window in range(len(sent)):
            for layer in range(self.layout.num_layers):
                to, what = table[:, layer].ravel(), sent[window, :, layer].ravel()
                tokens[window, layer] = np.bincount(to, weights=what, minlength=slots)
        return tokens
