"""Compile, or load from the disk cache, all kernels that run on the host."""

from __future__ import annotations

import importlib.util

import numpy as np

from eplb_core.layout import ExpertLayout
from eplb_core.topology import Topology


def warm_up() -> None:
    """Make every later call cost what it says: compile or load all host kernels now.

    A kernel is compiled when it is first called after an installation, and loaded from the disk cache when it is
    first called in a later process. Call this once at start-up, before serving, so that neither happens in a call that
    somebody waits for. The first kernel that a process compiles is announced by one line on stderr; set the
    environment variable `EPLB_CORE_QUIET` to hide it. Constructors compile kernels of the GPU, not this function.
    Where torch is not installed, only kernels that need no tensors are compiled.

    Cost:
        See `python -m benchmarks.startup`: tens of seconds on one core after an installation, less than a second
        afterwards, microseconds in a process that is warm. Imports torch.

    Threads:
        Any; holds the interpreter lock while it compiles.

    Example:
        >>> warm_up()
    """
    _warm_place()
    _warm_balancer()
    _warm_dispatch()
    if importlib.util.find_spec("torch") is not None:
        _warm_deepseek()
        _warm_tables()
        _warm_loading()


_TOPOLOGY = Topology(num_ranks=2, num_nodes=2)
_LOAD = np.array([[3, 1, 2, 1], [1, 1, 1, 4]])


def _warm_place() -> None:
    from eplb_core.metrics import even_shares
    from eplb_core.placement.affinity.pairs import pair_counts
    from eplb_core.placement.affinity.sends import count_sends
    from eplb_core.placement.place import place
    from eplb_core.placement.spend import spend_budget
    from eplb_core.placement.worth.decide import should_rebalance

    live = place(_LOAD, _TOPOLOGY, num_slots=6).layout
    should_rebalance(live, _LOAD, live, dispatch="weighted")
    spend_budget([1.0, 2.0], [1, 1], 1)
    pairs = pair_counts([[[0, 1], [0, 1]], [[2, 3], [2, 3]]] * 16, 4)
    place(_LOAD, _TOPOLOGY, num_slots=6, pairs=pairs, effort=0.001)
    place(_LOAD, _TOPOLOGY, num_slots=6, pairs=pairs, effort=0.001, current=live)
    count_sends(live, [[[0, 1], [2, 3]]], shares=even_shares(live))
    uneven = ExpertLayout([[0, -1, -1, 1, 2, 3]] * 2, num_experts=4, topology=_TOPOLOGY)  # rank 1 has 2 of the 5 slots
    place(_LOAD, _TOPOLOGY, num_slots=5, current=uneven, max_node_transfers=[[-1, 1], [1, -1]])
    place(_LOAD, Topology(rank_to_node=[0, 1], rank_speed=[1.0, 2.0]), num_slots=6)
    place([[2, 2, 1]], _TOPOLOGY, num_slots=3)  # cannot be even, so all layouts are tried
    for load in (_LOAD, np.stack([_LOAD, _LOAD[::-1]])):  # one window and several
        place(load, _TOPOLOGY, num_slots=6)
        place(load, _TOPOLOGY, num_slots=6, current=live)
        place(load, _TOPOLOGY, num_slots=6, dispatch="weighted")
        place(load, _TOPOLOGY, num_slots=6, dispatch="weighted", current=live)


def _warm_balancer() -> None:
    from eplb_core.balancer.balancer import Balancer
    from eplb_core.placement.worth.costs import CostModel

    noise = np.array([[1, 0, 0, 0], [0, 0, 1, 0]])
    before = [100 * _LOAD + window % 3 * noise for window in range(16)]
    cost = CostModel(token_s=1e-6, install_s=1e-6)
    balancer = Balancer(_TOPOLOGY, num_slots=6, cost=cost, window_passes=1)
    balancer.observe([*before, 100 * _LOAD[:, ::-1], 100 * _LOAD[:, ::-1]])  # the traffic changes
    balancer.propose(_layout())


def _warm_dispatch() -> None:
    from eplb_core.dispatch.even import even_dispatch_table, hash_dispatch_table
    from eplb_core.dispatch.orders import near_orders
    from eplb_core.dispatch.shares import replica_shares
    from eplb_core.dispatch.static import static_dispatch_table

    layout = _layout()
    static_dispatch_table(layout)
    static_dispatch_table(layout, candidates="narrowed")
    even_dispatch_table(layout)
    even_dispatch_table(layout, expert_load=_LOAD)
    hash_dispatch_table(layout, rank=0)
    replica_shares(layout, _LOAD)
    near_orders(layout, [[[0, 1], [2, 3]]])


def _warm_tables() -> None:
    import torch

    from eplb_core.dispatch.tables import DispatchTables

    layout = _layout()
    for mode in ("static", "even", "quota", "weighted", "near"):
        tables = DispatchTables(layout, mode=mode)
        for dtype in (torch.int32, torch.int64):
            tables.map(0, torch.zeros((1, 1), dtype=dtype, device="cpu"))
    DispatchTables(layout, mode="weighted", shares=[[0.5, 1.0, 1.0, 1.0, 0.5, 0.0]] * 2)


def _layout() -> ExpertLayout:
    return ExpertLayout([[0, 1, 2, 3, 0, -1]] * 2, num_experts=4, topology=_TOPOLOGY)


def _warm_deepseek() -> None:
    from eplb_core.placement.deepseek import rebalance_experts

    rebalance_experts(_LOAD, 6, 2, 2, 2)


def _warm_loading() -> None:
    import torch

    from eplb_core.loading.moves.warm import warm_moves
    from eplb_core.loading.store import ExpertStore
    from eplb_core.loading.verify.fingerprint import fingerprints

    fingerprints([ExpertStore({"weight": torch.zeros(1, 4, device="cpu")})])
    warm_moves()
