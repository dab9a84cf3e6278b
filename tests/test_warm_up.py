"""After `warm_up` no call compiles, or loads, a kernel. In a process of its own: other tests compile too."""

from __future__ import annotations

import sys

import pytest

import eplb_core
from tests.processes import python

pytest.importorskip("torch", reason="fingerprints and rebalance_experts need torch")

CALLS = """
import sys
import numpy as np, torch
import eplb_core as eplb
from numba.core import event
from numba.core.dispatcher import Dispatcher

from eplb_core.loading.agreement import LocalAgreement
from eplb_core.loading.transports import LocalCopy

eplb.warm_up()

def loaded():
    homes = [module for name, module in list(sys.modules.items()) if name.startswith("eplb_core")]
    kernels = {id(k): k for home in homes for k in vars(home).values() if isinstance(k, Dispatcher)}
    return {k.py_func.__qualname__: len(k.overloads) for k in kernels.values()}

before, topology, rng = loaded(), eplb.Topology(4, 2, rank_speed=[1, 1, 0.5, 1]), np.random.default_rng(0)
counts = rng.integers(1, 100, (3, 2, 16))
fixed = counts.astype(np.float64)
fixed.flags.writeable = False
shifted = np.frombuffer(b"x" + fixed.tobytes(), dtype=np.float64, offset=1).reshape(fixed.shape)
cost = np.ones((4, 4))
cost.flags.writeable = False
loads = [counts, fixed, shifted, counts.astype(np.float32), np.asfortranarray(fixed),
         fixed[:, :, ::-1], fixed[0], fixed[:, :1], torch.tensor(counts), counts.tolist()]
with event.install_recorder("numba:compile") as compiled:
    for load in loads:
        live = eplb.place(load, topology, num_slots=20).layout
        live = eplb.place(load, topology, num_slots=22, effort=2, active_ranks=[True, True, False, True]).layout
        eplb.place(load, topology, num_slots=22, current=live, max_transfers=3, transfer_price=0.01)
        eplb.place(load, topology, num_slots=22, current=live, transfer_cost=cost)
        eplb.place(load, topology, num_slots=22, current=live, transfer_cost=rng.random((4, 4)).T)
        eplb.place(load, topology, num_slots=22, current=live, dispatch="weighted", transfer_price=0)
        ones, no = np.ones((4, 4), int), [[-1, 1], [1, -1]]
        eplb.place(load, topology, num_slots=22, current=live, max_total_transfers=5, max_rank_transfers=ones)
        eplb.place(load, topology, num_slots=22, current=live, dispatch="weighted", max_node_transfers=no)
        pairs = eplb.pair_counts(rng.integers(0, 16, (200, np.shape(load)[-2], 4)).argsort(axis=2), 16)
        eplb.place(load, topology, num_slots=22, pairs=pairs, effort=0.01)
        eplb.place(load, topology, num_slots=22, pairs=pairs, current=live, transfer_price=0)
        for locality in ("group", "first_copy"):
            grouped = eplb.place(load, topology, num_slots=20, locality=locality, num_groups=4).layout
            eplb.place(load[..., ::-1] if hasattr(load, "strides") else load, topology, num_slots=20, locality=locality,
                       num_groups=4, current=grouped, transfer_price=0, transfer_cost=cost)
        rows = load if np.ndim(load) == 2 else np.asarray(load)[0]
        eplb.rebalance_experts(rows, 20, 4, 2, 4)
        eplb.rebalance_experts(torch.tensor(np.array(rows)), 16, 1, 1, 16)
        eplb.replica_shares(live, load)
        eplb.spend_budget(np.ones((2, 3), np.float32), [[1, 0, 2]] * 2, 3)
        eplb.should_rebalance(live, load, live, dispatch="weighted")
        eplb.should_rebalance(live, load, live, passes_since=3, new_shares=eplb.replica_shares(live, load))
        eplb.even_dispatch_table(live, expert_load=rows)
    eplb.place(fixed, topology, num_slots=20, window_weights=[1, 0.5, 2])
    cost = eplb.CostModel(token_s=1e-6, install_s=1e-6)
    for how in (dict(move_cost=0.02, dispatch="weighted"), dict(cost=cost, window_passes=8, max_transfers=2)):
        balancer, now = eplb.Balancer(topology, num_slots=20, **how), eplb.ExpertLayout.trivial(
            2, 16, num_slots=20, topology=topology
        )
        for window in [*rng.poisson(counts[0], (20, 2, 16)), *rng.poisson(counts[0][:, ::-1], (6, 2, 16))]:
            balancer.observe(window)
            now = balancer.propose(now).layout
        assert balancer.report().changes
    eplb.even_dispatch_table(live, expert_load=np.ones((4, 2, 16)))
    for candidates in ("all", "narrowed"):
        eplb.static_dispatch_table(live, seed=7, candidates=candidates)
    shares = eplb.replica_shares(live, fixed)
    shares.flags.writeable = False
    eplb.hash_dispatch_table(live, shares=shares, rank=1)
    for mode in ("static", "even", "random", "row", "weighted", "quota", "fewest", "fake"):
        tables = eplb.DispatchTables(live, mode=mode, rank=1)
        tables.install(live, layers=[1], shares=None if mode in ("static", "even") else shares)
        tables.map(1, torch.arange(16, dtype=torch.int32)[:, None])
    for dtype, width in ((torch.float32, 5), (torch.uint8, 3), (torch.bfloat16, 4)):
        eplb.fingerprints([eplb.ExpertStore({"w": torch.ones(2, width, dtype=dtype)})], sample=2)
    other = eplb.ExpertLayout.trivial(2, 16, num_slots=24, topology=topology)
    eplb.plan_pull(live, other, rank=1, loaded=np.ones((2, 24), bool))
    one = eplb.Topology(1)
    old, new = (eplb.ExpertLayout([row], 4, topology=one) for row in ([0, 1, 2, 3, 0], [3, 0, 1, 2, 2]))
    stores = [eplb.ExpertStore({"w": torch.ones(5, 3), "s": torch.ones(5, 1)}, {"a": torch.ones(5)})]
    (alone,) = LocalAgreement.group(1)
    eplb.move_experts(stores, old, new, rank=0, transport=LocalCopy(), agreement=alone)
    migrator = eplb.Migrator(stores, new, rank=0, transport=LocalCopy(), agreement=alone)
    migrator.start(old)
    while not migrator.idle:
        migrator.poll()
    assert migrator.layout == old and migrator.stop(10)
    print(len(compiled.buffer), [name for name, count in loaded().items() if count != before.get(name)])
"""


@pytest.mark.slow
def test_without_torch_what_needs_no_tensors_is_warmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    eplb_core.warm_up()


@pytest.mark.slow
def test_after_warming_up_no_call_compiles() -> None:
    assert python(CALLS).stdout == "0 []\n"
