"""Expert-parallel load balancing for mixture-of-experts serving, for any engine.

Words: E logical experts of the model; P slots (places for one expert's weights, rank-major, S on each of R ranks);
a replica is one of the slots of an expert. `expert_load [L, E]`: tokens routed to each expert on each layer.
balancedness = mean / max of the ranks' loads. Placement chooses who gets replicas and which rank holds what; dispatch
chooses the replica for a token; loading fills and moves weights.

    >>> import numpy as np, eplb_core as eplb
    >>> topology = eplb.Topology(num_ranks=4, num_nodes=2)
    >>> expert_load = np.array([[90, 20, 30, 40, 50, 60, 70, 80]])
    >>> before = eplb.ExpertLayout.trivial(1, 8, num_slots=12, topology=topology)
    >>> placement = eplb.place(expert_load, topology=topology, num_slots=12)
    >>> print(f"{eplb.mean_balancedness(eplb.rank_load(before, expert_load)):.3f}")
    0.564
    >>> float(placement.balancedness[0]), float(placement.bound[0])
    (1.0, 1.0)
"""

from __future__ import annotations

from eplb_core._lazy import lazy
from eplb_core._version import __version__ as __version__

# Where each public name lives. Loaded when first used: `import eplb_core` costs nothing and touches neither torch nor
# the compiler. __init__.pyi tells type checkers and editors the same names; tests/test_api.py compares the two.
_HOMES = {
    "_warm_up": "warm_up",
    "topology": "Topology",
    "balancer.balancer": "Balancer",
    "balancer.notes": "BalancerReport",
    "layout": "ExpertLayout min_redundant",
    "files.formats": "demo_trace load_layout load_trace",
    "files.layout_file": "save_layout",
    "files.trace_file": "save_trace",
    "loading.record.agree": "agree_on_layout",
    "loading.agreement": "Agreement GroupAgreement",
    "loading.sharing.attach": "attach_weights",
    "loading.moves.backup": "HostBackup",
    "loading.checkpoint.rank": "load_rank",
    "loading.checkpoint.load": "load_checkpoint",
    "loading.verify.fingerprint": "fingerprints",
    "loading.record.follow": "LayoutFollower",
    "loading.sharing.host": "WeightHost",
    "loading.record.client": "LayoutClient",
    "loading.record.server": "LayoutServer",
    "loading.moves.migrator": "Migrator",
    "loading.moves.progress": "MigratorStatus",
    "loading.moves.run": "Target",
    "loading.moves.mover": "move_experts",
    "loading.pull_plan": "PullKind PullPlan plan_pull",
    "loading.record.record": "LayoutRecord",
    "loading.resolver": "SlotResolver",
    "loading.store": "ExpertStore",
    "loading.transport": "Caps ReadBatch ReadState Region Transport",
    "loading.transports.cuda_ipc": "CudaIpc",
    "loading.transports.faulty": "Faulty",
    "loading.transports.mooncake": "Mooncake",
    "loading.transports.nixl": "Nixl",
    "loading.transports.shared_memory": "SharedMemory",
    "loading.transports.two_sided.torch_distributed": "TorchDistributed",
    "loading.verify.weights": "verify_weights",
    "metrics": "rank_load balancedness mean_balancedness total_balancedness transfers",
    "dispatch.static": "static_dispatch_table",
    "dispatch.even": "even_dispatch_table hash_dispatch_table",
    "dispatch.shares": "replica_shares",
    "dispatch.orders": "near_orders",
    "dispatch.tables": "DispatchTables",
    "dispatch.ops": "LayerTables topk_to_slots",
    "dispatch.counter": "LoadCounter",
    "simulation.backtest": "backtest",
    "simulation": "Advice StepCost TokenTrace Traffic advise compare_policies cost_preset generate_trace simulate "
    "stream_trace sweep",
    "trace": "Trace",
    "placement.affinity.pairs": "pair_counts",
    "placement.affinity.sends": "Sends count_sends",
    "placement.worth.slots": "SlotPlan plan_slots",
    "placement.worth.costs": "CostModel",
    "placement.worth.decide": "Verdict should_rebalance",
    "placement.deepseek": "rebalance_experts",
    "placement.elastic": "drop_ranks lost_experts plan_removal retire_ranks",
    "placement.forecast": "forecast",
    "placement.place": "Placement place",
    "placement.problem": "Locality PlacementDispatch",
    "placement.worth.report": "GainReport gain_report",
    "placement.spend": "spend_budget",
    "exposition": "metrics_text",
    "errors": "CheckpointError EplbError LayoutError MissingExpertError InfeasiblePlacementError FileFormatError "
    "TransportError AgreementError HostAbsent HostBusy HostRefused LayoutAgreementError MigrationError RecordLostError "
    "SocketInUseError SocketOwnerError",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
# Modules by the name under which users reach them: `eplb.transports.CudaIpc`.
_MODULES = {
    "errors": "errors",
    "simulation": "simulation",
    "testing": "testing",
    "transports": "loading.transports",
}

__all__ = sorted(_HOME_OF)
__getattr__, __dir__ = lazy(__name__, _HOME_OF, _MODULES)
