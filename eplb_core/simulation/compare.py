"""Replays of one trace side by side: what each policy reaches, and which to follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from eplb_core._arrays import check_call, check_int, check_kind, to_list
from eplb_core._html import line_svg, words_html
from eplb_core._text import filled
from eplb_core.frames import Columns, Table
from eplb_core.simulation.load.sources import Source
from eplb_core.simulation.policies import BASIC, Policy, PolicyName
from eplb_core.simulation.replay import SimulateOptions, simulate
from eplb_core.simulation.result import Records, Simulation, summary_table
from eplb_core.simulation.words import conclude, recommended, table
from eplb_core.trace import Trace

if TYPE_CHECKING:
    from typing_extensions import Unpack

Policies: TypeAlias = (
    "PolicyName | Policy | Sequence[PolicyName | Policy] | Mapping[str, PolicyName | Policy | SimulateOptions]"
)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Comparison(Table):
    """Replays of one trace, side by side. `print` it, or let a notebook show it."""

    simulations: tuple[Simulation, ...]
    """One per policy, in the order given."""

    @property
    def best(self) -> Simulation:
        """The replay with the fewest transfers within 1% of the least time, or without a cost of the best balance."""
        return recommended(self.simulations)

    @property
    def conclusion(self) -> str:
        """What was found and what to do, in words."""
        return conclude(self.simulations)

    def rows(self) -> Records:
        """A row per policy: settings and totals."""
        return Records.of_rows([sim.summary() for sim in self.simulations])

    def _columns(self) -> Columns:
        return self.rows()._columns()

    def __getitem__(self, policy: str) -> Simulation:
        for sim in self.simulations:
            if sim.policy == policy:
                return sim
        raise KeyError(f"{policy!r} is not among {', '.join(sim.policy for sim in self.simulations)}")

    def __iter__(self) -> Iterator[Simulation]:
        return iter(self.simulations)

    def __len__(self) -> int:
        return len(self.simulations)

    def __str__(self) -> str:
        return f"{table(self.simulations)}\n\n{filled(self.conclusion)}"

    def __repr__(self) -> str:
        return f"Comparison({', '.join(map(repr, self.simulations))})"

    def _repr_html_(self) -> str:
        sims = self.simulations
        curves = line_svg([sim.window_balancedness for sim in sims], [sim.policy for sim in sims])
        return f"<div>{summary_table(sims)}{curves}<p>{words_html(self.conclusion)}</p></div>"


def compare_policies(
    trace: Source,
    policies: Policies = BASIC,
    *,
    workers: int = 1,
    progress: Callable[[int, int], None] | None = None,
    **options: Unpack[SimulateOptions],
) -> Comparison:
    """Which policy serves this load best?

    Args:
        trace: As for `simulate`.
        policies: A list of names or functions; or a dict from a label to a policy or to arguments of `simulate`, as in
            `{"often": {"policy": "place", "interval": 4}}`.
        workers: Replays at a time, in threads: kernels and numpy release the interpreter lock.
        progress: Called with replays done and in all.
        **options: Further arguments of `simulate`.

    Returns:
        A simulation for each policy.

    Raises:
        ValueError: As for `simulate`, or no policy.

    Cost:
        A `simulate` each.

    Example:
        >>> from eplb_core import Topology
        >>> windows = np.array([[[1, 1, 9, 1]]] * 4)
        >>> both = compare_policies(windows, ["none", "place"], topology=Topology(2), num_slots=6, interval=2)
        >>> both.best.policy
        'place'
    """
    check_call(progress, "progress")
    settings = _settings(policies, options)
    if not settings:
        raise ValueError("`policies` (=[]) must name one policy or more")
    source = trace if not isinstance(trace, np.ndarray) else Trace(trace)  # checked once, not for each policy

    def run(setting: SimulateOptions) -> Simulation:
        return simulate(source, **setting)

    with ThreadPoolExecutor(check_int(workers, "workers", 1)) as pool:
        futures = [pool.submit(run, setting) for _, setting in settings]
        _follow(futures, progress)
    found = (future.result() for future in futures)
    named = zip(found, settings, strict=True)
    return Comparison(tuple(sim if name is None else replace(sim, policy=name) for sim, (name, _) in named))


def _settings(policies: Policies, options: SimulateOptions) -> list[tuple[str | None, SimulateOptions]]:
    if isinstance(policies, Mapping):
        return [
            (name, {**options, **each} if isinstance(each, Mapping) else {**options, "policy": each})
            for name, each in policies.items()
        ]
    named = [policies] if isinstance(policies, str) or callable(policies) else to_list(policies, "policies")
    for policy in named:
        if not callable(policy):
            check_kind(policy, "policies", str)
    return [(None, {**options, "policy": policy}) for policy in named]


def _follow(futures: Sequence[Future[Any]], progress: Callable[[int, int], None] | None) -> None:
    try:
        for done, future in enumerate(as_completed(futures), start=1):
            future.result()
            if progress is not None:
                progress(done, len(futures))
    except BaseException:
        for future in futures:
            future.cancel()
        raise
