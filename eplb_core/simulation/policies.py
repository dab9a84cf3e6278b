"""Policies of `simulate(policy=...)` by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from eplb_core._arrays import FloatArray, IntArray, add_up, check_word
from eplb_core._extras import needed
from eplb_core._text import quoted
from eplb_core.layout import ExpertLayout
from eplb_core.placement.worth.costs import CostModel

if TYPE_CHECKING:
    from eplb_core.placement.place import Placement

PolicyName: TypeAlias = Literal["none", "place", "deepseek", "once", "gated", "auto"]
"""What decides on the layout at each rebalance.

none: the first layout stays.
place: `place` from the live layout.
deepseek: `rebalance_experts` on the sum of the windows.
once: `place` at the first rebalance; that layout stays.
gated: the layers of `place`'s answer that `should_rebalance` finds worth their move.
auto: a `Balancer` decides after every window, from the first `interval` on; nothing to tune.
"""
Policy: TypeAlias = Callable[[IntArray | FloatArray, ExpertLayout], ExpertLayout]
"""From windows of load `[T', L, E]` and the live layout to the next layout."""

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
BASIC: tuple[PolicyName, ...] = ("none", "auto", "deepseek")
"""Compared by default."""


class PolicySetting(NamedTuple):
    """What the named policies need to know."""

    slots: dict[str, Any]
    """`num_slots` or `slots_per_rank`, for `place`."""
    num_groups: int | None
    options: dict[str, Any]
    cost: CostModel | None
    window_passes: float
    interval: int
    pairs: Callable[[], IntArray | None] = lambda: None
    """Pairs of the windows that the policy sees, where their tokens are known and dispatch uses them."""

    def with_pairs(self) -> dict[str, Any]:
        """Options that change from one rebalance to the next."""
        pairs = None if "pairs" in self.options else self.pairs()
        return {} if pairs is None else {"pairs": pairs}


def to_options(place_options: Mapping[str, object] | None) -> dict[str, Any]:
    """Copy the arguments for `place`; raise TypeError for anything but a dict."""
    if place_options is not None and not isinstance(place_options, Mapping):
        raise TypeError(f"`place_options` (={quoted(place_options, 80)}) must be a dict of arguments of `place`")
    return dict(place_options or {})


def policy_of(policy: PolicyName | Policy, setting: PolicySetting) -> tuple[str, Policy]:
    """The name and the function of a policy."""
    if callable(policy):
        return getattr(policy, "__name__", type(policy).__name__), policy
    check_word(policy, "policy", POLICIES, ", or a function")
    if policy == "none":
        return policy, lambda windows, live: live
    if policy == "deepseek":
        return policy, _deepseek(setting.slots, 1 if setting.num_groups is None else setting.num_groups)
    options = setting.options
    if setting.num_groups is not None:
        options = {"num_groups": setting.num_groups, **options}
    made = {"auto": _auto, "place": _place, "once": _once, "gated": _gated}[policy]
    return policy, made(setting._replace(options=options))


def _placed(windows: IntArray | FloatArray, live: ExpertLayout, setting: PolicySetting) -> Placement:
    from eplb_core.placement.place import place  # compiles: only where it is used

    return place(windows, live.topology, current=live, **setting.slots, **setting.options, **setting.with_pairs())


def _auto(setting: PolicySetting) -> Policy:
    """Shown the first windows together and then one by one."""
    from eplb_core.balancer.balancer import OWN, Balancer, transfer_s

    options = {**setting.slots, **{n: v for n, v in setting.options.items() if n not in OWN}}
    balancers: list[Balancer] = []
    calls, pairs = 0, dict[str, Any]()

    def choose(windows: IntArray | FloatArray, live: ExpertLayout) -> ExpertLayout:
        if balancers:
            balancers[0].observe(windows[-1])
        else:
            # A model that knows no cost of moves says nothing; the Balancer has its own.
            told = setting.cost is not None and transfer_s(setting.cost, live.topology) > 0.0
            passes = setting.window_passes if told else None
            balancers.append(
                Balancer(live.topology, cost=setting.cost if told else None, window_passes=passes, **options)
            )
            balancers[0].observe(windows)
        nonlocal calls, pairs
        if calls % setting.interval == 0:  # each change of pairs makes it look at every layer anew
            pairs = setting.with_pairs()
        calls += 1
        return balancers[0].propose(live, **pairs).layout

    return choose


def _place(setting: PolicySetting) -> Policy:
    return lambda windows, live: _placed(windows, live, setting).layout


def _once(setting: PolicySetting) -> Policy:
    done: list[ExpertLayout] = []

    def choose(windows: IntArray | FloatArray, live: ExpertLayout) -> ExpertLayout:
        if not done:
            done.append(_placed(windows, live, setting).layout)
        return done[0]

    return choose


def _gated(setting: PolicySetting) -> Policy:
    from eplb_core.placement.worth.decide import should_rebalance

    window_passes, passes_since = setting.window_passes, 0.0

    def choose(windows: IntArray | FloatArray, live: ExpertLayout) -> ExpertLayout:
        nonlocal passes_since
        passes_since += window_passes * setting.interval
        placed = _placed(windows, live, setting)
        verdict = should_rebalance(
            live, windows, placed, cost=setting.cost, passes_since=passes_since, window_passes=window_passes
        )
        if not verdict:
            return live
        passes_since = 0.0
        return live.replace(placed.layout, verdict.layers)

    return choose


def _deepseek(slots: Mapping[str, Any], num_groups: int) -> Policy:
    num_slots: int | None = slots["num_slots"]
    if num_slots is None:
        given = quoted(slots["slots_per_rank"], 80)
        raise ValueError(f'`slots_per_rank` (={given}) is not for `policy` (="deepseek"); give it `num_slots`')
    torch = needed("torch", "torch", 'the policy "deepseek"')

    from eplb_core.placement.deepseek import rebalance_experts

    def choose(windows: IntArray | FloatArray, live: ExpertLayout) -> ExpertLayout:
        total = add_up(windows)
        power = int(np.frexp(float(total.max(initial=0)))[1])
        if not -60 < power < 120:  # beyond its float32; a power of two changes no answer
            total = np.ldexp(total.astype(np.float64), -power)
        weight = torch.from_numpy(total)
        ranks, nodes = live.topology.num_ranks, live.topology.num_nodes
        p2l, _, _ = rebalance_experts(weight, num_slots, num_groups, nodes, ranks)
        return ExpertLayout(p2l, live.num_experts, topology=live.topology)

    return choose
