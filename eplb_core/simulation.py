"""Replay a recorded load through a placement policy: what balance it would have reached, and what it would have moved.

A layout is made from windows that are over and scored on those that follow, never on the ones it was made from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, cast

import numpy as np

import eplb_core
from eplb_core._arrays import ArrayLike, FloatArray, IntArray, check_int, read_only
from eplb_core.layout import ExpertLayout
from eplb_core.metrics import rank_load, transfers
from eplb_core.topology import Topology
from eplb_core.trace import Trace, check_trace_load

Policy: TypeAlias = Callable[[IntArray | FloatArray, ExpertLayout], ExpertLayout]
"""From windows of load `[T', L, E]` and the layout that is live to the layout to live on."""
Dispatch: TypeAlias = Callable[[ExpertLayout, FloatArray], ArrayLike]
"""From the live layout and one window `[L, E]` to the share of its expert's tokens that each slot takes, `[L, P]`."""

POLICIES = ("none", "place", "deepseek")


@dataclass(frozen=True, slots=True, eq=False)
class Simulation:
    """What a replay gave. T windows, L layers, n rebalances."""

    policy: str
    """Name of the policy."""
    topology: Topology
    """Ranks and nodes."""
    num_slots: int
    """Slots filled."""
    interval: int
    """Windows between rebalances; the first `interval` windows only feed the first one and are not scored."""
    mean_load: FloatArray
    """Load that each rank would have if all were even, `[T, L]`: the sum over the sum of the speeds."""
    max_load: FloatArray
    """Load over speed of the fullest rank, `[T, L]`: the time that all ranks wait for."""
    balancedness: FloatArray
    """`mean_load / max_load`, `[T, L]`; NaN without load."""
    window_balancedness: FloatArray
    """Mean over layers, `[T]`; NaN for a window without load."""
    rebalance_windows: IntArray
    """The window before which each rebalance took effect, `[n]`."""
    transfers: IntArray
    """Experts that ranks had to receive, `[n, L]`."""
    digests: tuple[str, ...]
    """Digest of the starting layout and of the one after each rebalance, `[n + 1]`."""
    layout: ExpertLayout
    """The last layout."""
    mean_balancedness: float
    """Mean over all scored windows and layers with load."""
    total_balancedness: float
    """Sum of means over sum of maxima over all scored windows and layers: the time that the average rank works."""

    @property
    def total_transfers(self) -> int:
        """Experts received by all ranks over the whole replay."""
        return int(self.transfers.sum())

    def blocks(self) -> list[tuple[int, int, float, int]]:
        """Per stretch between rebalances: first window, window after the last, mean balancedness, transfers before."""
        windows = len(self.balancedness)
        starts = [0, *self.rebalance_windows.tolist()]
        moved = [0, *self.transfers.sum(axis=1).tolist()]
        return [
            (start, end, _mean(self.balancedness[start:end]), int(count))
            for start, end, count in zip(starts, [*starts[1:], windows], moved, strict=True)
        ]

    def table(self) -> str:
        """The replay as text: a line a stretch between rebalances, and the totals."""
        return table([self])


def simulate(
    trace: Trace | ArrayLike,
    *,
    topology: Topology,
    num_slots: int,
    policy: str | Policy = "place",
    dispatch: str | Dispatch = "even",
    interval: int = 16,
    history: int | None = None,
    current: ExpertLayout | None = None,
    num_groups: int | None = None,
    place_options: Mapping[str, object] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Simulation:
    """What would a policy have reached on a recorded load?

    Windows 0..interval-1 are lived through on the starting layout. Before window `interval`, and every `interval`
    windows after it, the policy sees windows that are over and gives the layout for those that follow. Only windows
    from `interval` on are scored, so that all policies are compared on the same held-out windows.

    Args:
        trace: A trace, or windows of load `[T, L, E]`.
        topology: Ranks, nodes and speeds.
        num_slots: Slots to fill, at least E.
        policy: `"none"` keeps the starting layout; `"place"` calls `place` with the live layout as `current`;
            `"deepseek"` calls `rebalance_experts` on the sum of the windows; or a callable
            `(windows [T', L, E], live layout) -> ExpertLayout`.
        dispatch: `"even"`: replicas share their expert's tokens equally; or a callable `(layout, window [L, E]) ->
            shares [L, P]`.
        interval: Windows between rebalances, 1 or more and less than T.
        history: How many of the last windows the policy sees. Default: `interval`.
        current: Layout to start from. Default: the trivial one.
        num_groups: Groups of experts for `"deepseek"`. Default 1: no grouping.
        place_options: Further arguments for `place`.
        progress: Called with rebalances done and in all.

    Returns:
        Balance per window and layer, transfers per rebalance, digests and totals.

    Raises:
        ValueError: A number does not fit, or the policy gave a layout of another shape.

    Cost:
        O(T * L * P) and the policy; any thread.

    Example:
        >>> windows = np.array([[[1, 1, 9, 1]]] * 3)
        >>> swap = lambda seen, live: ExpertLayout([[0, 1, 2, 2, 3, 0]], 4, topology=live.topology)
        >>> kept = simulate(windows, topology=Topology(2), num_slots=6, policy="none", interval=1)
        >>> moved = simulate(windows, topology=Topology(2), num_slots=6, policy=swap, interval=1)
        >>> round(kept.mean_balancedness, 3), round(moved.mean_balancedness, 3), moved.transfers.tolist()
        (0.6, 1.0, [[1], [0]])
    """
    load = check_trace_load(trace.load if isinstance(trace, Trace) else trace)
    windows, layers, experts = load.shape
    every = check_int(interval, "interval", 1)
    if every >= windows:
        raise ValueError(f"`interval` (={every}) must be below the {windows} windows of the trace, or none is scored")
    seen = every if history is None else check_int(history, "history", 1)
    name, choose = _policy(policy, num_slots, num_groups, dict(place_options or {}))
    live = current
    if live is None:
        live = ExpertLayout.trivial(layers, experts, num_slots=num_slots, topology=topology)
    if (live.num_layers, live.num_experts, live.topology) != (layers, experts, topology):
        raise ValueError(
            f"`current` ({live!r}) must have the trace's {layers} layers and {experts} experts, and `topology`"
        )
    mean, top = np.empty((windows, layers)), np.empty((windows, layers))
    mean[:every], top[:every] = _mean_and_max(live, load[:every], dispatch)
    starts = list(range(every, windows, every))
    moved, digests = [], [live.digest]
    for done, start in enumerate(starts):
        new = choose(load[max(0, start - seen) : start], live)
        moved.append(transfers(live, new).sum(axis=1))
        live = new
        digests.append(live.digest)
        span = slice(start, start + every)
        mean[span], top[span] = _mean_and_max(live, load[span], dispatch)
        if progress is not None:
            progress(done + 1, len(starts))
    each = np.divide(mean, top, out=np.full(top.shape, np.nan), where=top > 0)
    waited = float(top[every:].sum())
    return Simulation(
        policy=name,
        topology=topology,
        num_slots=num_slots,
        interval=every,
        mean_load=read_only(mean),
        max_load=read_only(top),
        balancedness=read_only(each),
        window_balancedness=read_only(np.array([_mean(window) for window in each])),
        rebalance_windows=read_only(np.array(starts, dtype=np.int64)),
        transfers=read_only(np.array(moved, dtype=np.int64)),
        digests=tuple(digests),
        layout=live,
        mean_balancedness=_mean(each[every:]),
        total_balancedness=float(mean[every:].sum()) / waited if waited > 0 else float("nan"),
    )


def _policy(
    policy: str | Policy, num_slots: int, num_groups: int | None, options: dict[str, object]
) -> tuple[str, Policy]:
    """The name and the function of a policy."""
    if callable(policy):
        return getattr(policy, "__name__", type(policy).__name__), policy
    if policy not in POLICIES:
        raise ValueError(f"`policy` (={policy!r}) must be one of {', '.join(POLICIES)}, or a function")
    if policy == "none":
        return policy, lambda windows, live: live
    if policy == "deepseek":
        return policy, _deepseek(num_slots, 1 if num_groups is None else num_groups)
    return policy, _place(num_slots, options if num_groups is None else {"num_groups": num_groups, **options})


def _place(num_slots: int, options: dict[str, object]) -> Policy:
    def choose(windows: IntArray | FloatArray, live: ExpertLayout) -> ExpertLayout:
        # Through the package, which compiles the kernels only where they are used.
        placement = eplb_core.place(windows, topology=live.topology, num_slots=num_slots, current=live, **options)
        return cast("ExpertLayout", placement.layout)

    return choose


def _deepseek(num_slots: int, num_groups: int) -> Policy:
    import torch

    def choose(windows: IntArray | FloatArray, live: ExpertLayout) -> ExpertLayout:
        weight = torch.from_numpy(windows.sum(axis=0))
        ranks, nodes = live.topology.num_ranks, live.topology.num_nodes
        p2l, _, _ = eplb_core.rebalance_experts(weight, num_slots, num_groups, nodes, ranks)
        return ExpertLayout(p2l, live.num_experts, topology=live.topology)

    return choose


def _mean_and_max(
    layout: ExpertLayout, load: IntArray | FloatArray, dispatch: str | Dispatch
) -> tuple[FloatArray, FloatArray]:
    """Even load and the fullest rank's load over its speed, each `[t, L]`."""
    if callable(dispatch):
        shares = np.stack([np.asarray(dispatch(layout, window)) for window in load.astype(np.float64)])
        ranks = rank_load(layout, load, shares=shares)
    elif dispatch == "even":
        ranks = rank_load(layout, load)
    else:
        raise ValueError(f"`dispatch` (={dispatch!r}) must be 'even' or a function")
    speed = layout.topology.rank_speed
    return ranks.sum(axis=2) / speed.sum(), (ranks / speed).max(axis=2)


def _mean(each: FloatArray) -> float:
    """Mean of what is known; NaN if nothing is."""
    known = ~np.isnan(each)
    return float(each[known].mean()) if known.any() else float("nan")


def table(simulations: list[Simulation]) -> str:
    """Replays of one trace side by side: balancedness and transfers of each stretch, then the totals."""
    lines = [
        " " * 11 + "".join(f"{sim.policy[:16]:>18}" for sim in simulations),
        f"{'windows':<11}" + f"{'bal.':>8}{'transfers':>10}" * len(simulations),
    ]
    per_sim = [sim.blocks() for sim in simulations]
    for at, (start, end, _, _) in enumerate(per_sim[0]):
        cells = "".join(f"{_number(blocks[at][2]):>8}{blocks[at][3]:>10,}" for blocks in per_sim)
        lines.append(f"{f'{start}-{end - 1}':<11}{cells}" + ("  unscored" if at == 0 else ""))
    lines.append("-" * len(lines[1]))
    lines.append(
        f"{'mean':<11}" + "".join(f"{_number(s.mean_balancedness):>8}{s.total_transfers:>10,}" for s in simulations)
    )
    lines.append(f"{'total':<11}" + "".join(f"{_number(s.total_balancedness):>8}{'':>10}" for s in simulations))
    lines.append("bal. = mean / max load of the ranks, 1 is best; mean of layers, mean of windows;")
    lines.append("total = sum of means / sum of maxima; transfers = experts received, all layers")
    return "\n".join(line.rstrip() for line in lines)


def _number(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.3f}"
