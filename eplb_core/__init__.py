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

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eplb_core._warm_up import warm_up as warm_up
    from eplb_core.dispatch.counter import LoadCounter as LoadCounter
    from eplb_core.dispatch.even import even_dispatch_table as even_dispatch_table
    from eplb_core.dispatch.even import repeated_dispatch_table as repeated_dispatch_table
    from eplb_core.dispatch.ops import LayerTables as LayerTables
    from eplb_core.dispatch.ops import topk_to_slots as topk_to_slots
    from eplb_core.dispatch.shares import replica_shares as replica_shares
    from eplb_core.dispatch.static import static_dispatch_table as static_dispatch_table
    from eplb_core.dispatch.tables import DispatchTables as DispatchTables
    from eplb_core.errors import AgreementError as AgreementError
    from eplb_core.errors import EplbError as EplbError
    from eplb_core.errors import FileFormatError as FileFormatError
    from eplb_core.errors import HostAbsent as HostAbsent
    from eplb_core.errors import HostBusy as HostBusy
    from eplb_core.errors import HostRefused as HostRefused
    from eplb_core.errors import InfeasiblePlacementError as InfeasiblePlacementError
    from eplb_core.errors import LayoutAgreementError as LayoutAgreementError
    from eplb_core.errors import LayoutError as LayoutError
    from eplb_core.errors import MigrationError as MigrationError
    from eplb_core.errors import MissingExpertError as MissingExpertError
    from eplb_core.errors import RecordLostError as RecordLostError
    from eplb_core.errors import SocketInUseError as SocketInUseError
    from eplb_core.errors import SocketOwnerError as SocketOwnerError
    from eplb_core.errors import TransportError as TransportError
    from eplb_core.files.layout_file import load_layout as load_layout
    from eplb_core.files.layout_file import save_layout as save_layout
    from eplb_core.layout import ExpertLayout as ExpertLayout
    from eplb_core.layout import min_redundant as min_redundant
    from eplb_core.loading.agreement import Agreement as Agreement
    from eplb_core.loading.agreement import GroupAgreement as GroupAgreement
    from eplb_core.loading.checkpoint.load import CheckpointError as CheckpointError
    from eplb_core.loading.checkpoint.load import load_checkpoint as load_checkpoint
    from eplb_core.loading.moves.backup import HostBackup as HostBackup
    from eplb_core.loading.moves.migrator import Migrator as Migrator
    from eplb_core.loading.moves.migrator import MigratorStatus as MigratorStatus
    from eplb_core.loading.moves.mover import move_experts as move_experts
    from eplb_core.loading.pull_plan import PullPlan as PullPlan
    from eplb_core.loading.pull_plan import plan_pull as plan_pull
    from eplb_core.loading.record.agree import agree_on_layout as agree_on_layout
    from eplb_core.loading.record.client import LayoutClient as LayoutClient
    from eplb_core.loading.record.follow import LayoutFollower as LayoutFollower
    from eplb_core.loading.record.record import LayoutRecord as LayoutRecord
    from eplb_core.loading.record.server import LayoutServer as LayoutServer
    from eplb_core.loading.resolver import SlotResolver as SlotResolver
    from eplb_core.loading.sharing.attach import attach_weights as attach_weights
    from eplb_core.loading.sharing.host import WeightHost as WeightHost
    from eplb_core.loading.store import ExpertStore as ExpertStore
    from eplb_core.loading.transport import Caps as Caps
    from eplb_core.loading.transport import ReadBatch as ReadBatch
    from eplb_core.loading.transport import ReadState as ReadState
    from eplb_core.loading.transport import Region as Region
    from eplb_core.loading.transport import Transport as Transport
    from eplb_core.loading.transports.cuda_ipc import CudaIpc as CudaIpc
    from eplb_core.loading.transports.faulty import Faulty as Faulty
    from eplb_core.loading.transports.mooncake import Mooncake as Mooncake
    from eplb_core.loading.transports.nixl import Nixl as Nixl
    from eplb_core.loading.transports.shared_memory import SharedMemory as SharedMemory
    from eplb_core.loading.transports.two_sided.torch_distributed import TorchDistributed as TorchDistributed
    from eplb_core.loading.verify.fingerprint import fingerprints as fingerprints
    from eplb_core.loading.verify.weights import verify_weights as verify_weights
    from eplb_core.metrics import balancedness as balancedness
    from eplb_core.metrics import mean_balancedness as mean_balancedness
    from eplb_core.metrics import rank_load as rank_load
    from eplb_core.metrics import total_balancedness as total_balancedness
    from eplb_core.metrics import transfers as transfers
    from eplb_core.placement.deepseek import rebalance_experts as rebalance_experts
    from eplb_core.placement.elastic import drop_ranks as drop_ranks
    from eplb_core.placement.elastic import lost_experts as lost_experts
    from eplb_core.placement.elastic import retire_ranks as retire_ranks
    from eplb_core.placement.forecast import forecast as forecast
    from eplb_core.placement.place import Placement as Placement
    from eplb_core.placement.place import place as place
    from eplb_core.placement.spend import spend_budget as spend_budget
    from eplb_core.placement.worth.costs import CostModel as CostModel
    from eplb_core.placement.worth.decide import Verdict as Verdict
    from eplb_core.placement.worth.decide import should_rebalance as should_rebalance
    from eplb_core.placement.worth.report import GainReport as GainReport
    from eplb_core.placement.worth.report import gain_report as gain_report
    from eplb_core.placement.worth.slots import SlotPlan as SlotPlan
    from eplb_core.placement.worth.slots import plan_slots as plan_slots
    from eplb_core.simulation import StepCost as StepCost
    from eplb_core.simulation import TokenTrace as TokenTrace
    from eplb_core.simulation import Traffic as Traffic
    from eplb_core.simulation import compare_policies as compare_policies
    from eplb_core.simulation import cost_preset as cost_preset
    from eplb_core.simulation import generate_trace as generate_trace
    from eplb_core.simulation import simulate as simulate
    from eplb_core.simulation import stream_trace as stream_trace
    from eplb_core.simulation import sweep as sweep
    from eplb_core.simulation.backtest import backtest as backtest
    from eplb_core.topology import Topology as Topology
    from eplb_core.trace import Trace as Trace
    from eplb_core.trace import load_trace as load_trace
    from eplb_core.trace import save_trace as save_trace

__version__ = "0.1.0"

# Where each public name lives. Loaded when first used: `import eplb_core` costs nothing and touches neither torch nor
# the compiler. tests/test_api.py holds this table and the imports above to the same names.
_HOMES = {
    "_warm_up": "warm_up",
    "topology": "Topology",
    "layout": "ExpertLayout min_redundant",
    "files.layout_file": "load_layout save_layout",
    "loading.record.agree": "agree_on_layout",
    "loading.agreement": "Agreement GroupAgreement",
    "loading.sharing.attach": "attach_weights",
    "loading.moves.backup": "HostBackup",
    "loading.checkpoint.load": "CheckpointError load_checkpoint",
    "loading.verify.fingerprint": "fingerprints",
    "loading.record.follow": "LayoutFollower",
    "loading.sharing.host": "WeightHost",
    "loading.record.client": "LayoutClient",
    "loading.record.server": "LayoutServer",
    "loading.moves.migrator": "Migrator MigratorStatus",
    "loading.moves.mover": "move_experts",
    "loading.pull_plan": "PullPlan plan_pull",
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
    "dispatch.even": "even_dispatch_table repeated_dispatch_table",
    "dispatch.shares": "replica_shares",
    "dispatch.tables": "DispatchTables",
    "dispatch.ops": "LayerTables topk_to_slots",
    "dispatch.counter": "LoadCounter",
    "simulation.backtest": "backtest",
    "simulation": "StepCost TokenTrace Traffic compare_policies cost_preset generate_trace simulate stream_trace sweep",
    "trace": "Trace load_trace save_trace",
    "placement.worth.slots": "SlotPlan plan_slots",
    "placement.worth.costs": "CostModel",
    "placement.worth.decide": "Verdict should_rebalance",
    "placement.deepseek": "rebalance_experts",
    "placement.elastic": "drop_ranks lost_experts retire_ranks",
    "placement.forecast": "forecast",
    "placement.place": "Placement place",
    "placement.worth.report": "GainReport gain_report",
    "placement.spend": "spend_budget",
    "errors": "EplbError LayoutError MissingExpertError InfeasiblePlacementError FileFormatError TransportError "
    "AgreementError HostAbsent HostBusy HostRefused LayoutAgreementError MigrationError RecordLostError "
    "SocketInUseError SocketOwnerError",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME_OF)


def _loaded(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'eplb_core' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"eplb_core.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


globals()["__getattr__"] = _loaded  # unseen by type checkers, to which it would say that any name exists


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
