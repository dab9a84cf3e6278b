"""A valid call of every public callable, from one example for each name of an argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

import eplb_core as eplb
from eplb_core.loading.agreement import LocalAgreement
from eplb_core.loading.transports import LocalCopy

LEFT_OUT = {
    "protocols, of which each engine has its own": "Agreement Transport",
    "plain data that the library makes": "Advice BalancerReport Caps GainReport LayerTables MigratorStatus Placement "
    "Sends PullPlan SlotPlan Verdict LayoutRecord.of_state LayoutRecord.restarted LayoutRecord.revert",
    "checked where it is used": "Region ReadBatch",
    "a device or a package that this machine need not have": "CudaIpc Mooncake Nixl",
    "a group of processes": "GroupAgreement TorchDistributed",
    "another process; fuzz_record has its messages": "LayoutFollower WeightHost attach_weights LayoutClient.fetch "
    "LayoutClient.watch",
    "a ticket of a read that runs": "SharedMemory.poll SharedMemory.abandon",
    "hands all to the transport inside": "Faulty.abandon Faulty.connect Faulty.disconnect Faulty.export Faulty.poll "
    "Faulty.read",
}

TOPOLOGY = eplb.Topology(2)
OTHER = np.array([[3, 1, 2, 0, 3, 0], [0, 1, 2, 3, 1, 2]])
LAYOUT = eplb.ExpertLayout([[0, 1, 2, 3, 3, 0], [0, 1, 2, 3, 1, 2]], 4, topology=TOPOLOGY)
NEW = eplb.ExpertLayout(OTHER, 4, topology=TOPOLOGY)
ONE = eplb.ExpertLayout([[0, 1, 2, 3]], 4, topology=eplb.Topology(1))
PAIR = eplb.ExpertLayout([[0, 1, 0, 1]], 2, topology=TOPOLOGY)
LOAD = np.arange(1, 9).reshape(2, 4)
WINDOWS = np.arange(1, 65).reshape(8, 2, 4)
TRACE = eplb.Trace(WINDOWS)
COST = eplb.CostModel(token_s=1e-6, expert_bytes=1e6, node_bandwidth=1e9, network_bandwidth=1e9)
SHARES = eplb.replica_shares(LAYOUT, LOAD)
MEMORY = torch.zeros(64, dtype=torch.uint8)
REGION = eplb.Region(MEMORY.data_ptr(), 64, "cpu")


def store(rows: int = 4) -> eplb.ExpertStore:
    return eplb.ExpertStore({"w": torch.arange(8 * rows, dtype=torch.int32).reshape(rows, 8)})


def checkpoint(folder: Path, closing: ExitStack) -> Path:
    parts = {"gate_proj": (2, 2), "up_proj": (2, 2), "down_proj": (2, 2)}
    names = {f"model.layers.0.mlp.experts.{e}.{part}.weight": shape for e in range(4) for part, shape in parts.items()}
    save_file({name: torch.ones(shape) for name, shape in names.items()}, folder / "model.safetensors")
    return folder / "model.safetensors"


def saved(name: str) -> Callable[[Path, ExitStack], Path]:
    def make(folder: Path, closing: ExitStack) -> Path:
        if "layout" in name:
            eplb.save_layout(LAYOUT, folder / name)
        else:
            eplb.save_trace(TRACE, folder / name)
        return folder / name

    return make


def record(folder: Path, closing: ExitStack) -> eplb.LayoutRecord:
    made = eplb.LayoutRecord(LAYOUT)
    made.attach("a")
    return made


def client(folder: Path, closing: ExitStack) -> eplb.LayoutClient:
    made = eplb.LayoutClient(socket(folder, closing), "a", deadline=5.0)
    closing.callback(made.close)
    return made


def socket(folder: Path, closing: ExitStack) -> Path:
    server = eplb.LayoutServer(folder / "socket", eplb.LayoutRecord(LAYOUT))
    closing.callback(server.close)
    return folder / "socket"


def migrator(folder: Path, closing: ExitStack) -> eplb.Migrator:
    made = eplb.Migrator([store()], ONE, rank=0, transport=LocalCopy(), agreement=LocalAgreement.group(1)[0])
    closing.callback(made.stop, 5.0)
    return made


def backup(folder: Path, closing: ExitStack) -> eplb.HostBackup:
    return eplb.HostBackup.save(folder / "backup", [store()], ONE, rank=0, agreement=LocalAgreement.group(1)[0])


def balancer(folder: Path, closing: ExitStack) -> eplb.Balancer:
    made = eplb.Balancer(TOPOLOGY, num_slots=6)
    made.observe(WINDOWS)
    return made


def shared_memory(folder: Path, closing: ExitStack) -> eplb.SharedMemory:
    made = eplb.SharedMemory()
    closing.callback(made.close)
    return made


# One example for all arguments of these names. A function makes what a call changes, or what is to be closed.
_EXAMPLES: tuple[tuple[str, Any], ...] = (
    ("layer agreed version", 0),
    ("budget history interval num_columns num_layers num_ranks score_from top_k windows", 2),
    ("expert move rank size slot window_tokens", 1),
    ("max_replicas slots_per_rank", 3),
    ("num_experts", 4),
    ("num_slots total_slots", 6),
    ("deadline", 5.0),
    ("same_node", True),
    ("on", False),
    ("client tables", None),
    ("engine engine_id", "a"),
    ("name", "w"),
    ("policy", "none"),
    ("reason", "no"),
    ("hardware", "H100"),
    ("template", "deepseek_v3"),
    ("digest", LAYOUT.digest),
    ("layers", [0]),
    ("ranks", [1]),
    ("active_ranks", [True, True]),
    ("frozen", [False, False]),
    ("choices", [2, 3, 4]),
    ("layer_ids", [3, 4]),
    ("tokens", [1.0, 2.0, 3.0]),
    ("seconds", [1.0, 2.0, 3.1]),
    ("experts", [1, 2, 1]),
    ("grid", {"interval": [2]}),
    ("forecasters", {"all": "all"}),
    ("place_options", {}),
    ("current layout live old", LAYOUT),
    ("new other placement", NEW),
    ("own", ONE),
    ("topology", TOPOLOGY),
    ("expert_load rank_load weight", LOAD),
    ("load trace", WINDOWS),
    ("cost model", COST),
    ("physical_to_logical_map", OTHER),
    ("rows", OTHER[:1]),
    ("gains", np.array([[1.0, 2.0]])),
    ("prices", np.array([[1, 2]])),
    ("slot_ids", np.arange(6)),
    ("loaded", np.ones((2, 6), dtype=np.bool_)),
    ("prints_of_all_ranks", np.stack([np.arange(6, dtype=np.int64).reshape(2, 3, 1)] * 2)),
    ("topk_ids", torch.tensor([[0, 1], [2, -1]], dtype=torch.int32)),
    ("slots", torch.tensor([[-1, -1]])),
    ("counts", torch.ones(2, 6, dtype=torch.int64)),
    ("tensors", {"w": torch.ones(3, 2)}),
    ("module", torch.nn.ParameterDict({"w": torch.ones(3, 2, 2)})),
    ("resolver", eplb.SlotResolver(ONE, 0)),
    ("inner", LocalCopy()),
    ("batch", eplb.ReadBatch(*(np.array([number]) for number in (0, 0, 0, 32, 8)))),
    ("transport", lambda folder, closing: LocalCopy()),
    ("agreement", lambda folder, closing: LocalAgreement.group(1)[0]),
    ("folder path", lambda folder, closing: folder / "new"),
    ("stores", lambda folder, closing: [store()]),
    ("regions", lambda folder, closing: [REGION]),
    ("files", checkpoint),
    ("record", record),
    ("blob", lambda folder, closing: shared_memory(folder, closing).export([REGION])),
)
EXAMPLES = {name: value for names, value in _EXAMPLES for name in names.split()}
# What differs from the examples above. Words after a callable's name make another call of it.
CALLS: dict[str, dict[str, Any]] = {
    "Balancer": {"cost": None, "move_cost": 0.01, "num_slots": 6},
    "Balancer by cost": {"move_cost": None, "window_passes": 2.0, "num_slots": 6},
    "Balancer.load_state_dict": {"state": lambda folder, closing: balancer(folder, closing).state_dict()},
    "CostModel": {"node_bandwidth": 1.0, "network_bandwidth": 1.0, "stall": 0.5},
    "DispatchTables": {"mode": "weighted", "shares": SHARES, "load": None},
    "DispatchTables.install": {"layout": NEW, "orders": None},
    "DispatchTables.install of shares": {"layout": NEW, "shares": eplb.replica_shares(NEW, LOAD), "layers": [0, 1]},
    "ExpertLayout.trivial": {"slots_per_rank": None},
    "ExpertLayout.resized": {"topology": eplb.Topology(3), "ranks": [0, 1, -1]},
    "ExpertStore": {"whole": {"v": torch.ones(6, 2)}},
    "ExpertStore.check_covers": {"module": torch.nn.Identity()},
    "Faulty": {"faults": {"fail": 0.5}},
    "HostBackup": {"folder": lambda folder, closing: backup(folder, closing).folder},
    "HostBackup.fetch": {"rows": [torch.zeros(32, dtype=torch.uint8)]},
    "HostBackup.save": {"layout": ONE, "rank": 0},
    "LayoutClient": {"path": socket},
    "LayoutRecord.attach": {"engine": "b"},
    "LoadCounter.add_slots": {"layers": [0, 1]},
    "LoadCounter": {"pairs": True},
    "LoadCounter.snapshot": {"all_reduce": None},
    "LoadCounter.snapshot_pairs": {"all_reduce": None},
    "Migrator": {"layout": ONE, "rank": 0},
    "Migrator.start": {"target": ONE},
    "SharedMemory.connect": {"rank": 0},
    "SharedMemory.read": {"rank": 0},
    "SlotResolver": {"num_shared": 1},
    "StepCost": {"token_bytes": 1.0, "memory_bytes": 1e9},
    "count_sends": {"topk_ids": np.array([[[0, 1], [2, 3]]])},
    "near_orders": {"topk_ids": np.array([[[0, 1], [2, 3]]])},
    "TokenTrace": {"topk_ids": np.array([[[0, 1]], [[2, 3]]])},
    "Topology": {"num_ranks": 4, "num_nodes": 2, "rank_speed": [1.0, 1.0, 0.5, 1.0]},
    "Topology of nodes": {"num_ranks": None, "rank_to_node": [0, 0, 1, 1], "rank_speed": np.ones(4)},
    "Trace": {"windows": tuple("abcdefgh"), "source": "x", "notes": ("a",)},
    "Trace.from_frame": {
        "frame": {"w": [0, 0, 1, 1], "l": [0, 0, 0, 0], "e": [0, 1, 0, 1], "n": [3, 5, 4, 4]},
        **{"window": "w", "layer": "l", "expert": "e", "tokens": "n", "num_experts": 2},
    },
    "advise": {
        "policies": ("none",),
        "ranks": [2],
        "gpu": "H100",
        "model": {
            **{"hidden_size": 8, "intermediate_size": 4, "num_experts": 4, "num_experts_per_tok": 1},
            **{"num_hidden_layers": 2, "torch_dtype": "bfloat16"},
        },
    },
    "compare_policies": {"policies": ("none",), "topology": TOPOLOGY, "num_slots": 6, "interval": 2},
    "fingerprints": {"stores": [store(), store()], "layers": [0, 1], "sample": 2},
    "forecast": {"expert_load": WINDOWS},
    "gain_report": {"num_slots": [6]},
    "generate_trace": {"traffic": 2, "num_experts": 16, "window_tokens": 64},
    "load_checkpoint": {
        "stores": [eplb.ExpertStore({"w13": torch.zeros(4, 4, 2), "w2": torch.zeros(4, 2, 2)})],
        "rename": {},
    },
    "load_layout": {"path": saved("layout.json")},
    "load_rank": {"layout": ONE, "rank": 0, "num_slots": None, "layer_ids": [0], "rename": {}},
    "load_trace": {"path": saved("trace.npz")},
    "move_experts": {
        "old": ONE,
        "new": eplb.ExpertLayout([[1, 0, 2, 3]], 4, topology=eplb.Topology(1)),
        "layers": None,
        "rank": 0,
        "record": None,
    },
    "place": {
        "slots_per_rank": None,
        "expert_load": WINDOWS,
        "max_transfers": 2,
        "max_total_transfers": 4,
        "max_rank_transfers": np.full((2, 2), 2),
        "min_gain": 0.0,
    },
    "place anew": {
        "slots_per_rank": None,
        "expert_load": WINDOWS,
        "current": None,
        "window_weights": np.ones(8),
        "locality": "first_copy",
        "num_groups": 2,
    },
    "rank_load by shares": {"shares": SHARES},
    "rebalance_experts": {"num_replicas": 6, "num_groups": 1, "num_nodes": 1, "num_gpus": 2},
    **{
        name: {"current": PAIR, "expert_load": [[3, 4]], "num_slots": None, "slots_per_rank": None}
        for name in ("plan_removal", "retire_ranks")
    },
    "drop_ranks": {"layout": PAIR},
    "save_layout": {"path": lambda folder, closing: folder / "layout.npz"},
    "save_trace": {"trace": TRACE, "path": lambda folder, closing: folder / "trace.npz"},
    "should_rebalance": {"expert_load": WINDOWS, "passes_since": 100.0, "window_passes": 1.0, "dispatch": "even"},
    "simulate": {"slots_per_rank": None},
    "backtest": {"slots_per_rank": None},
    "stream_trace": {"path": saved("trace.npz")},
    "sweep": {"topology": TOPOLOGY, "num_slots": 6, "policy": "none"},
    "topk_to_slots": {
        "tables": eplb.DispatchTables(LAYOUT, rank=1).layer(0),
        "num_tokens": torch.tensor(1, dtype=torch.int32),
        "out": torch.zeros(2, 2, dtype=torch.int32),
    },
    "verify_weights": {"layers": [0, 1]},
}


OWNERS: dict[str, Callable[[Path, ExitStack], Any]] = {
    "Balancer": balancer,
    "CostModel": lambda folder, closing: COST,
    "DispatchTables": lambda folder, closing: eplb.DispatchTables(LAYOUT, rank=1),
    "DispatchTables.install of shares": lambda folder, closing: eplb.DispatchTables(LAYOUT, rank=1, mode="weighted"),
    "ExpertLayout": lambda folder, closing: LAYOUT,
    "ExpertLayout.without_ranks": lambda folder, closing: PAIR,
    "ExpertStore": lambda folder, closing: store(3),
    "HostBackup": backup,
    "LayoutClient": client,
    "LayoutRecord": record,
    "LoadCounter": lambda folder, closing: eplb.LoadCounter(2, 4, windows=3, pairs=True),
    "Migrator": migrator,
    "SharedMemory": shared_memory,
    "SlotResolver": lambda folder, closing: eplb.SlotResolver(LAYOUT, 1),
    "StepCost": lambda folder, closing: eplb.StepCost(COST, 1.0),
    "TokenTrace": lambda folder, closing: eplb.TokenTrace(np.array([[[0, 1]], [[2, 3]]]), 4, 1),
}
BEFORE: dict[str, Callable[[Any], object]] = {
    **dict.fromkeys(("LayoutRecord.commit", "LayoutRecord.abort"), lambda owner: owner.begin("a", [0], 0)),
    "SharedMemory.read": lambda owner: owner.connect(0, owner.export([REGION])),
    **dict.fromkeys(("LayoutClient.commit", "LayoutClient.abort"), lambda owner: owner.begin([0], 0)),
}
HELD = ("DispatchTables", "ExpertLayout", "ExpertStore", "LayoutRecord", "LoadCounter", "SlotResolver")
"""Classes whose methods change nothing when they refuse."""


class Case(NamedTuple):
    """A call that is well, made anew for each try."""

    call: Callable[..., object]
    arguments: dict[str, Any]
    held: object
    """What must not change in a call that is refused, beside the arguments."""


def names() -> Iterator[str]:
    """Every public callable with an argument, and the further calls of `CALLS`."""
    left_out = {word for words in LEFT_OUT.values() for word in words.split()}
    for name in eplb.__all__:
        public = getattr(eplb, name)
        if name in left_out or (inspect.isclass(public) and issubclass(public, (BaseException, Enum))):
            continue
        found = [name]
        if inspect.isclass(public):
            found += [f"{name}.{each}" for each in dir(public) if not each.startswith("_")]
        for each in found:
            if each not in left_out and _parameters(each):
                yield each
    yield from (name for name in CALLS if " " in name)


def _of(name: str) -> Any:
    owner, _, method = name.partition(" ")[0].partition(".")
    return inspect.getattr_static(getattr(eplb, owner), method) if method else getattr(eplb, owner)


def _parameters(name: str) -> dict[str, inspect.Parameter]:
    public = getattr(_of(name), "__func__", _of(name))
    known = inspect.signature(public).parameters if callable(public) else {}
    skipped = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {key: each for key, each in known.items() if each.kind not in skipped and key not in ("self", "cls")}


def case(name: str, folder: Path, closing: ExitStack) -> Case:
    """The valid call of a name.

    Raises:
        LookupError: an argument has neither an example nor a default.
    """
    of, _, method = name.partition(" ")[0].partition(".")
    own, owner = CALLS.get(name, {}), getattr(eplb, of)
    if method and not isinstance(_of(name), (classmethod, staticmethod)):
        owner = OWNERS.get(name, OWNERS[of])(folder, closing)
        BEFORE.get(name, lambda owner: None)(owner)
    arguments = {**{key: each.default for key, each in _parameters(name).items()}, **own}
    for key, value in arguments.items():
        value = value if key in own else EXAMPLES.get(key, value)
        if value is inspect.Parameter.empty:
            raise LookupError(f"give an example of `{key}` of {name}: EXAMPLES or CALLS in tests/fuzz/calls.py")
        arguments[key] = value(folder, closing) if isinstance(value, FunctionType) else value
    held = (
        owner if type(owner).__name__ in HELD else (owner.layout, owner.status) if of == "Migrator" and method else ()
    )
    return Case(getattr(owner, method) if method else owner, arguments, held)
