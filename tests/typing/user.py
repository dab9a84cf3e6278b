"""A user's program, for the type checker alone: what is right passes `mypy --strict`, what is misspelt is found.

An ignored line on which mypy finds nothing fails the check too: each ignore here is an error that users see.
"""

from __future__ import annotations

import numpy as np

import eplb_core as eplb


def plan(recorded: str) -> eplb.ExpertLayout:
    """From a recording to a layout that pays."""
    load = eplb.load_trace(recorded).load
    topology = eplb.Topology(num_ranks=32, num_nodes=4)
    live = eplb.ExpertLayout.trivial(load.shape[1], load.shape[2], num_slots=288, topology=topology)
    placed: eplb.Placement = eplb.place(load, topology=topology, num_slots=288, current=live, dispatch="weighted")
    verdict = eplb.should_rebalance(live, load, placement=placed)
    balancer = eplb.Balancer(topology, num_slots=288, move_cost=1e-2)
    balancer.observe(load)
    live = balancer.propose(live).layout
    even: float = eplb.mean_balancedness(eplb.rank_load(placed.layout, load))
    return live.replace(placed.layout, verdict.layers) if even > 0.9 else live


def misspelt(load: np.ndarray, topology: eplb.Topology, layout: eplb.ExpertLayout) -> None:
    """Every choice that has a few words is checked."""
    eplb.place(load, topology=topology, num_slots=288, dispatch="wieghted")  # type: ignore[arg-type]
    eplb.place(load, topology=topology, num_slots=288, locality="groups")  # type: ignore[arg-type]
    eplb.DispatchTables(layout, rank=0, mode="wieghted")  # type: ignore[arg-type]
    eplb.static_dispatch_table(layout, candidates="narrow")  # type: ignore[arg-type]
    eplb.simulate(load, topology=topology, num_slots=288, dispatch="local")  # type: ignore[arg-type]
    eplb.simulate(load, topology=topology, num_slots=288, policy="deepsek")  # type: ignore[arg-type]
    eplb.plase(load)  # type: ignore[attr-defined]
