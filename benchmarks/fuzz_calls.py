"""Public functions and methods with one bad argument: refused in words that name it, and nothing has changed.

python -m benchmarks.fuzz_calls --json fuzz_calls.json

Each callable is called with valid arguments, one of which is another value: the wrong kind, shape or dtype, NaN,
infinity, negative, far too large, empty, read-only, of a foreign memory order, a text that moves a terminal's cursor.
It must return, or raise the library's errors, TypeError, ValueError or IndexError with one printable line that names an
argument; the objects and arrays that took part are then what they were. The work is done by a process of its own, with
4 GiB.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import re
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import eplb_core as eplb
from benchmarks import measure
from benchmarks.fuzz_files import MEMORY_BYTES, Hang, alarm
from eplb_core.errors import EplbError
from eplb_core.loading.agreement import LocalAgreement
from eplb_core.loading.transports import LocalCopy

LIMIT_S = 10.0
"""The most that one call on arrays of some hundred numbers may take."""
TOPOLOGY = eplb.Topology(2)
MAP = np.array([[0, 1, 2, 3, 3, 0], [0, 1, 2, 3, 1, 2]])
OTHER = np.array([[3, 1, 2, 0, 3, 0], [0, 1, 2, 3, 1, 2]])
LAYOUT = eplb.ExpertLayout(MAP, 4, topology=TOPOLOGY)
NEW = eplb.ExpertLayout(OTHER, 4, topology=TOPOLOGY)
ONE = eplb.ExpertLayout([[0, 1, 2, 3]], 4, topology=eplb.Topology(1))
LOAD = np.arange(1, 9).reshape(2, 4)
WINDOWS = np.arange(1, 65).reshape(8, 2, 4)
COST = eplb.CostModel(token_s=1e-6, expert_bytes=1e6, node_bandwidth=1e9, network_bandwidth=1e9)


class Case(NamedTuple):
    """A call that is well, made anew for each try."""

    call: Callable[..., object]
    arguments: dict[str, Any]
    held: tuple[object, ...] = ()
    """What must not change in a call that is refused, beside the arguments."""
    close: Callable[[], object] = lambda: None


def simple(call: Callable[..., object], /, *held: object, **arguments: Any) -> Callable[[Path], Case]:
    """A case whose parts never change."""
    return lambda folder: Case(call, arguments, held)


# ---- every public callable -------------------------------------------------------------------------------------------


def store_of(rows: int = 3) -> eplb.ExpertStore:
    return eplb.ExpertStore({"w": torch.arange(8 * rows, dtype=torch.int32).reshape(rows, 8)})


def tables_of(mode: Any = "even") -> eplb.DispatchTables:
    return eplb.DispatchTables(LAYOUT, rank=1, mode=mode)


def on_tables(name: str, /, *, mode: str = "even", **arguments: Any) -> Callable[[Path], Case]:
    def make(folder: Path) -> Case:
        tables = tables_of(mode)
        return Case(getattr(tables, name), arguments, (tables,))

    return make


def on_counter(name: str, /, **arguments: Any) -> Callable[[Path], Case]:
    def make(folder: Path) -> Case:
        counter = eplb.LoadCounter(2, 4, windows=3)
        return Case(getattr(counter, name), arguments, (counter,))

    return make


def on_record(name: str, /, **arguments: Any) -> Callable[[Path], Case]:
    def make(folder: Path) -> Case:
        record = eplb.LayoutRecord(LAYOUT)
        record.attach("a")
        if name in ("commit", "abort"):
            record.begin("a", [0], 0)
        return Case(getattr(record, name), arguments, (record,))

    return make


def on_store(name: str, /, **arguments: Any) -> Callable[[Path], Case]:
    def make(folder: Path) -> Case:
        store = store_of()
        return Case(getattr(store, name), arguments, (store,))

    return make


def migrator(folder: Path) -> eplb.Migrator:
    return eplb.Migrator(
        [store_of(4)], ONE, rank=0, transport=LocalCopy(), agreement=LocalAgreement.group(1)[0], deadline=5.0
    )


def on_migrator(name: str, /, **arguments: Any) -> Callable[[Path], Case]:
    def make(folder: Path) -> Case:
        moving = migrator(folder)
        return Case(getattr(moving, name), arguments, (moving.layout, moving.status), lambda: moving.stop(5.0))

    return make


def new_migrator(folder: Path) -> Case:
    made: list[eplb.Migrator] = []

    def call(**arguments: Any) -> None:
        made.append(eplb.Migrator(**arguments))

    arguments = {
        "stores": [store_of(4)],
        "layout": ONE,
        "rank": 0,
        "transport": LocalCopy(),
        "agreement": LocalAgreement.group(1)[0],
        "tables": None,
        "record": None,
        "staging": None,
        "on_install": None,
        "backup": None,
        "reference": None,
        "deadline": 5.0,
    }
    return Case(call, arguments, (), lambda: [each.stop(5.0) for each in made])


def moved(folder: Path) -> Case:
    arguments = {
        "stores": [store_of(4)],
        "old": ONE,
        "new": eplb.ExpertLayout([[1, 0, 2, 3]], 4, topology=eplb.Topology(1)),
        "rank": 0,
        "transport": LocalCopy(),
        "agreement": LocalAgreement.group(1)[0],
        "tables": None,
        "layers": None,
        "staging": None,
        "senders": None,
        "reference": None,
        "deadline": 5.0,
    }
    return Case(eplb.move_experts, arguments)


def backup(folder: Path) -> eplb.HostBackup:
    return eplb.HostBackup.save(folder / "backup", [store_of(4)], ONE, rank=0, agreement=LocalAgreement.group(1)[0])


def fetched(folder: Path) -> Case:
    arguments = {"layer": 0, "expert": 1, "rows": [torch.zeros(32, dtype=torch.uint8)]}
    return Case(backup(folder).fetch, arguments)


def saved_backup(folder: Path) -> Case:
    arguments = {
        "folder": folder / "new",
        "stores": [store_of(4)],
        "layout": ONE,
        "rank": 0,
        "agreement": LocalAgreement.group(1)[0],
        "deadline": 5.0,
    }
    return Case(eplb.HostBackup.save, arguments)


def saved(call: Callable[..., object], name: str, /, **arguments: Any) -> Callable[[Path], Case]:
    return lambda folder: Case(call, {**arguments, "path": folder / name})


def read(call: Callable[..., object], name: str, /, **arguments: Any) -> Callable[[Path], Case]:
    def make(folder: Path) -> Case:
        path = folder / name
        if name.startswith("layout"):
            eplb.save_layout(LAYOUT, path)
        else:
            eplb.save_trace(eplb.Trace(WINDOWS), path)
        return Case(call, {**arguments, "path": path})

    return make


def checkpoint(folder: Path) -> Case:
    from safetensors.torch import save_file

    parts = {"gate_proj": (2, 2), "up_proj": (2, 2), "down_proj": (2, 2)}
    names = {
        f"model.layers.0.mlp.experts.{e}.{part}.weight": torch.ones(shape)
        for e in range(4)
        for part, shape in parts.items()
    }
    save_file(names, folder / "model.safetensors")
    store = eplb.ExpertStore({"w13": torch.zeros(4, 4, 2), "w2": torch.zeros(4, 2, 2)})
    arguments = {
        "files": folder / "model.safetensors",
        "stores": [store],
        "resolver": eplb.SlotResolver(ONE, 0),
        "template": "deepseek_v3",
        "rename": {},
        "derived": (),
        "ignore": (),
        "shared_stores": None,
    }
    return Case(eplb.load_checkpoint, arguments, (store,))


def served(call: Callable[..., object], /, **arguments: Any) -> Callable[[Path], Case]:
    """A call that makes something that is to be closed."""

    def make(folder: Path) -> Case:
        made: list[Any] = []
        with_path = {**arguments, "path": folder / "socket"} if "path" in arguments else dict(arguments)
        return Case(lambda **given: made.append(call(**given)), with_path, (), lambda: [each.close() for each in made])

    return make


def on_client(name: str, /, **arguments: Any) -> Callable[[Path], Case]:
    def make(folder: Path) -> Case:
        record = eplb.LayoutRecord(LAYOUT)
        server = eplb.LayoutServer(folder / "socket", record)
        client = eplb.LayoutClient(server.path, "a", deadline=5.0)
        if name in ("commit", "abort"):
            client.begin([0], 0)

        def close() -> None:
            client.close()
            server.close()

        return Case(getattr(client, name), arguments, (record,), close)

    return make


def agreed(folder: Path) -> Case:
    return Case(
        eplb.agree_on_layout,
        {"client": None, "own": ONE, "agreement": LocalAgreement.group(1)[0], "deadline": 5.0, "adopts": True},
    )


def on_transport(name: str, /, **arguments: Any) -> Callable[[Path], Case]:
    def make(folder: Path) -> Case:
        transport = eplb.SharedMemory()
        memory = torch.zeros(64, dtype=torch.uint8)
        blob = transport.export([eplb.Region(memory.data_ptr(), 64, "cpu")])
        given = {key: blob if value == "blob" else value for key, value in arguments.items()}
        if name == "read":
            transport.connect(0, blob)
        if name == "export":
            transport.close()
            transport = eplb.SharedMemory()
            given["regions"] = [eplb.Region(memory.data_ptr(), 64, "cpu")]
        return Case(getattr(transport, name), given, (memory,), transport.close)

    return make


def ids(*numbers: int) -> Any:
    return np.array(numbers, dtype=np.int64)


TOPK = torch.tensor([[0, 1], [2, -1]], dtype=torch.int32)
SIMULATED: dict[str, Any] = {
    "topology": TOPOLOGY,
    "num_slots": 6,
    "policy": "none",
    "dispatch": "even",
    "interval": 2,
    "history": 2,
    "score_from": 2,
    "current": LAYOUT,
    "num_groups": None,
    "place_options": {},
    "cost": COST,
    "window_passes": 1.0,
    "bound": False,
    "keep_ranks": False,
}
PLACED: dict[str, Any] = {
    "num_slots": 6,
    "current": LAYOUT,
    "max_transfers": 2,
    "max_total_transfers": 4,
    "max_rank_transfers": np.full((2, 2), 2),
    "max_node_transfers": None,
    "min_gain": 0.0,
    "transfer_price": None,
    "transfer_cost": None,
    "window_weights": None,
    "locality": "none",
    "num_groups": None,
    "active_ranks": None,
    "dispatch": "even",
    "effort": 1.0,
}
PLACED_NEW: dict[str, Any] = {
    "num_slots": 6,
    "window_weights": np.ones(8),
    "locality": "first_copy",
    "num_groups": 2,
    "active_ranks": [True, True],
    "transfer_cost": None,
    "effort": 1.0,
}
JUDGED: dict[str, Any] = {
    "current": LAYOUT,
    "expert_load": WINDOWS,
    "placement": NEW,
    "cost": COST,
    "passes_since": 100.0,
    "window_passes": 1.0,
    "min_gain": 0.01,
    "payback": 1.0,
    "frozen": [False, False],
    "active_ranks": [True, True],
    "dispatch": "even",
}
PRINTS = np.stack([np.arange(6, dtype=np.int64).reshape(2, 3, 1)] * 2)

CALLS: dict[str, Callable[[Path], Case]] = {
    "Topology": simple(eplb.Topology, num_ranks=4, num_nodes=2, rank_speed=[1.0, 1.0, 0.5, 1.0]),
    "Topology of nodes": simple(eplb.Topology, rank_to_node=[0, 0, 1, 1], rank_speed=np.ones(4)),
    "ExpertLayout": simple(eplb.ExpertLayout, physical_to_logical_map=MAP, num_experts=4, topology=TOPOLOGY),
    "ExpertLayout.trivial": simple(
        eplb.ExpertLayout.trivial, num_layers=2, num_experts=4, num_slots=6, topology=TOPOLOGY
    ),
    "ExpertLayout.slots": simple(LAYOUT.slots, layer=1, expert=2),
    "ExpertLayout.replace": simple(LAYOUT.replace, other=NEW, layers=[0]),
    "ExpertLayout.resized": simple(LAYOUT.resized, topology=eplb.Topology(3), ranks=[0, 1, -1]),
    "ExpertLayout.diff": simple(LAYOUT.diff, other=NEW),
    "ExpertLayout.check_same_frame": simple(LAYOUT.check_same_frame, other=NEW),
    "ExpertLayout.format": simple(LAYOUT.format, layers=[1], width=80),
    "min_redundant": simple(eplb.min_redundant, num_experts=5, num_ranks=2),
    "load_layout": read(eplb.load_layout, "layout.json", topology=TOPOLOGY, num_experts=4),
    "save_layout": saved(eplb.save_layout, "layout.npz", layout=LAYOUT, layer_ids=[3, 4]),
    "rank_load": simple(eplb.rank_load, layout=LAYOUT, expert_load=LOAD, shares=None),
    "rank_load by shares": simple(
        eplb.rank_load, layout=LAYOUT, expert_load=LOAD, shares=eplb.replica_shares(LAYOUT, LOAD)
    ),
    "balancedness": simple(eplb.balancedness, rank_load=LOAD),
    "mean_balancedness": simple(eplb.mean_balancedness, rank_load=LOAD),
    "total_balancedness": simple(eplb.total_balancedness, rank_load=LOAD),
    "transfers": simple(eplb.transfers, old=LAYOUT, new=NEW),
    "place": simple(eplb.place, expert_load=WINDOWS, topology=TOPOLOGY, **PLACED),
    "place anew": simple(eplb.place, expert_load=WINDOWS, topology=TOPOLOGY, **PLACED_NEW),
    "should_rebalance": simple(eplb.should_rebalance, **JUDGED),
    "CostModel": simple(eplb.CostModel, token_s=1.0, expert_bytes=1.0, node_bandwidth=1.0, stall=0.5, fit_error=0.0),
    "CostModel.fit": simple(
        eplb.CostModel.fit, tokens=[1.0, 2.0, 3.0], seconds=[1.0, 2.0, 3.1], experts=[1, 2, 1], num_layers=2
    ),
    "CostModel.link_s": simple(COST.link_s, same_node=True),
    "gain_report": simple(
        eplb.gain_report,
        trace=WINDOWS,
        topology=TOPOLOGY,
        num_slots=[6],
        current=LAYOUT,
        cost=COST,
        window_passes=1.0,
        dispatch="even",
    ),
    "plan_slots": simple(
        eplb.plan_slots,
        expert_load=LOAD,
        topology=TOPOLOGY,
        total_slots=6,
        choices=[2, 3, 4],
        cost=COST,
        window_passes=1.0,
        dispatch="even",
    ),
    "plan_removal": simple(
        eplb.plan_removal,
        current=eplb.ExpertLayout([[0, 1, 0, 1]], 2, topology=TOPOLOGY),
        ranks=[1],
        expert_load=[[3, 4]],
        num_slots=None,
    ),
    "drop_ranks": simple(eplb.drop_ranks, layout=eplb.ExpertLayout([[0, 1, 0, 1]], 2, topology=TOPOLOGY), ranks=[1]),
    "lost_experts": simple(eplb.lost_experts, layout=LAYOUT, active_ranks=[True, False]),
    "forecast": simple(eplb.forecast, expert_load=WINDOWS, forecaster="all"),
    "spend_budget": simple(eplb.spend_budget, gains=np.array([[1.0, 2.0]]), prices=np.array([[1, 2]]), budget=2),
    "rebalance_experts": simple(
        eplb.rebalance_experts, weight=LOAD, num_replicas=6, num_groups=1, num_nodes=1, num_gpus=2
    ),
    "simulate": simple(eplb.simulate, trace=WINDOWS, **SIMULATED),
    "backtest": simple(
        eplb.backtest,
        trace=WINDOWS,
        forecasters={"all": "all"},
        topology=TOPOLOGY,
        num_slots=6,
        interval=2,
        history=2,
        current=LAYOUT,
        place_options={},
    ),
    "compare_policies": simple(
        eplb.compare_policies, trace=WINDOWS, policies=("none",), workers=1, topology=TOPOLOGY, num_slots=6, interval=2
    ),
    "sweep": simple(
        eplb.sweep, trace=WINDOWS, grid={"interval": [2]}, workers=1, topology=TOPOLOGY, num_slots=6, policy="none"
    ),
    "generate_trace": simple(
        eplb.generate_trace, traffic=2, num_layers=2, num_experts=16, window_tokens=64, top_k=2, sampled=True, seed=1
    ),
    "Traffic": simple(eplb.Traffic, windows=2, workload="prefill_in4096", domain="a", blend=0.5),
    "TokenTrace": simple(eplb.TokenTrace, topk_ids=np.array([[[0, 1]], [[2, 3]]]), num_experts=4, window_tokens=1),
    "cost_preset": simple(
        eplb.cost_preset,
        hardware="H100",
        hidden_size=8,
        intermediate_size=8,
        weight_bytes=1.0,
        achieved=0.5,
        layer_s=0.0,
    ),
    "StepCost": simple(eplb.StepCost, model=COST, token_bytes=1.0, memory_bytes=1e9, name="x"),
    "StepCost.exchange_s": simple(eplb.StepCost(COST, 1.0).exchange_s, topology=TOPOLOGY),
    "Trace": simple(
        eplb.Trace, load=WINDOWS, windows=tuple("abcdefgh"), layer_ids=(3, 4), top_k=2, source="x", notes=("a",)
    ),
    "load_trace": read(eplb.load_trace, "trace.npz", key=None),
    "stream_trace": read(eplb.stream_trace, "trace.npz", key=None, windows=2),
    "save_trace": saved(eplb.save_trace, "trace.npz", trace=eplb.Trace(WINDOWS)),
    "static_dispatch_table": simple(
        eplb.static_dispatch_table, layout=LAYOUT, seed=1, prefer_same_node=True, candidates="all"
    ),
    "even_dispatch_table": simple(eplb.even_dispatch_table, layout=LAYOUT, expert_load=LOAD),
    "hash_dispatch_table": simple(
        eplb.hash_dispatch_table, layout=LAYOUT, shares=eplb.replica_shares(LAYOUT, LOAD), rank=1, width=8
    ),
    "replica_shares": simple(eplb.replica_shares, layout=LAYOUT, expert_load=LOAD),
    "DispatchTables": simple(
        eplb.DispatchTables,
        layout=LAYOUT,
        rank=1,
        mode="weighted",
        device="cpu",
        max_replicas=3,
        slot_ids=np.arange(6),
        shares=eplb.replica_shares(LAYOUT, LOAD),
        seed=1,
        load=None,
        all_reduce=None,
        debug=False,
    ),
    "DispatchTables.install": on_tables("install", layout=NEW, layers=[0]),
    "DispatchTables.install of shares": on_tables(
        "install", mode="weighted", layout=NEW, layers=[0, 1], shares=eplb.replica_shares(NEW, LOAD)
    ),
    "DispatchTables.layer": on_tables("layer", layer=1),
    "DispatchTables.map": on_tables("map", layer=1, topk_ids=TOPK, num_tokens=None, num_shared=0, out=None),
    "DispatchTables.warm_up": on_tables("warm_up", num_columns=2, num_shared=0, dtype=torch.int32, out_dtype=None),
    "DispatchTables.untag": on_tables("untag", slots=torch.tensor([[-1, -1]])),
    "topk_to_slots": simple(
        eplb.topk_to_slots,
        topk_ids=TOPK,
        tables=tables_of().layer(0),
        num_tokens=torch.tensor(1, dtype=torch.int32),
        num_shared=0,
        out=torch.zeros(2, 2, dtype=torch.int32),
    ),
    "LoadCounter": simple(eplb.LoadCounter, num_layers=2, num_experts=4, windows=2, device="cpu"),
    "LoadCounter.add_slots": on_counter(
        "add_slots", counts=torch.ones(2, 6, dtype=torch.int64), layout=LAYOUT, layers=[0, 1]
    ),
    "LoadCounter.layer": on_counter("layer", layer=1),
    "LoadCounter.recording": on_counter("recording", on=False),
    "LoadCounter.snapshot": on_counter("snapshot", all_reduce=None),
    "SlotResolver": simple(
        eplb.SlotResolver, layout=LAYOUT, rank=1, layer_ids=[3, 4], draft_layers=[], num_shared=1, shared="per_rank"
    ),
    "SlotResolver.local_slots": simple(eplb.SlotResolver(LAYOUT, 1).local_slots, layer=1, expert=2),
    "SlotResolver.global_slots": simple(eplb.SlotResolver(LAYOUT, 1).global_slots, layer=1, expert=2),
    "SlotResolver.local_experts": simple(eplb.SlotResolver(LAYOUT, 1).local_experts, layer=1),
    "SlotResolver.row": simple(eplb.SlotResolver(LAYOUT, 1).row, layer=1),
    "SlotResolver.with_layout": simple(eplb.SlotResolver(LAYOUT, 1).with_layout, layout=NEW),
    "ExpertStore": simple(eplb.ExpertStore, tensors={"w": torch.ones(3, 2)}, whole={"v": torch.ones(6, 2)}),
    "ExpertStore.of_module": simple(
        eplb.ExpertStore.of_module,
        module=torch.nn.ParameterDict({"w": torch.ones(3, 2)}),
        slots_per_rank=3,
        num_slots=6,
        num_shared=0,
        ignore=(),
    ),
    "ExpertStore.check_fits": on_store("check_fits", layout=LAYOUT),
    "ExpertStore.check_covers": on_store(
        "check_covers", module=torch.nn.Identity(), num_slots=6, num_shared=0, ignore=()
    ),
    "ExpertStore.row": on_store("row", name="w", slot=1),
    "ExpertStore.tensor_row": on_store("tensor_row", name="w", slot=1),
    "load_checkpoint": checkpoint,
    "fingerprints": simple(eplb.fingerprints, stores=[store_of(), store_of()], layers=[0, 1], sample=2, whole=False),
    "verify_weights": simple(
        eplb.verify_weights,
        prints_of_all_ranks=PRINTS,
        layout=LAYOUT,
        layers=[0, 1],
        reference=None,
        loaded=np.ones((2, 6), dtype=np.bool_),
    ),
    "plan_pull": simple(
        eplb.plan_pull, old=LAYOUT, new=NEW, rank=1, layers=[0], avoid_ranks=(), loaded=None, senders=None
    ),
    "move_experts": moved,
    "Migrator": new_migrator,
    "Migrator.start": on_migrator("start", target=ONE),
    "Migrator.install": on_migrator("install", agreed=0),
    "Migrator.pause": on_migrator("pause", finish=False),
    "Migrator.stop": on_migrator("stop", deadline=1.0),
    "HostBackup.fetch": fetched,
    "HostBackup.save": saved_backup,
    "LayoutRecord": simple(eplb.LayoutRecord, layout=LAYOUT, version=1),
    "LayoutRecord.attach": on_record("attach", engine="b"),
    "LayoutRecord.detach": on_record("detach", engine="a"),
    "LayoutRecord.lose": on_record("lose", engine="a"),
    "LayoutRecord.begin": on_record("begin", engine="a", layers=[0], version=0),
    "LayoutRecord.commit": on_record("commit", engine="a", layers=[0], rows=OTHER[:1]),
    "LayoutRecord.abort": on_record("abort", engine="a", layers=[0]),
    "LayoutRecord.follow": on_record("follow", engine="a", digest=LAYOUT.digest),
    "LayoutRecord.hold": on_record("hold", engine="a", version=0, move=1),
    "LayoutRecord.check_fetch": on_record("check_fetch", engine="a", version=0, digest=LAYOUT.digest),
    "LayoutServer": served(eplb.LayoutServer, path="", record=eplb.LayoutRecord(LAYOUT), memory="m", state_file=None),
    "LayoutClient": served(
        eplb.LayoutClient, path="", engine_id="a", deadline=1.0, wait=0.0, attach=True, follow_deadline=1.0
    ),
    "LayoutClient.begin": on_client("begin", layers=[0], version=0),
    "LayoutClient.commit": on_client("commit", layers=[0], rows=OTHER[:1]),
    "LayoutClient.abort": on_client("abort", layers=[0]),
    "LayoutClient.follow": on_client("follow", digest=LAYOUT.digest),
    "LayoutClient.hold": on_client("hold", version=0, move=1),
    "agree_on_layout": agreed,
    "SharedMemory.export": on_transport("export", regions=[]),
    "SharedMemory.connect": on_transport("connect", rank=0, blob="blob"),
    "SharedMemory.read": on_transport("read", rank=0, batch=eplb.ReadBatch(ids(0), ids(0), ids(0), ids(32), ids(8))),
    "Faulty": simple(eplb.Faulty, inner=LocalCopy(), faults={"fail": 0.5}, seed=1, polls=3),
}

LEFT_OUT = {
    "protocols, of which each engine has its own": "Agreement Transport",
    "plain data that the library makes": "Caps GainReport LayerTables MigratorStatus Placement PullPlan "
    "ReadState SlotPlan Verdict",
    "checked where it is used": "Region ReadBatch",
    "a device or a package that this machine need not have": "CudaIpc Mooncake Nixl",
    "a group of processes": "GroupAgreement TorchDistributed",
    "another process; fuzz_record has its messages": "LayoutFollower WeightHost attach_weights",
    "no argument": "warm_up",
}


def missing() -> list[str]:
    """Public names that neither are called nor are left out for a reason."""
    known = {name.split(".")[0].split(" ")[0] for name in CALLS} | set(" ".join(LEFT_OUT.values()).split())
    errors = {
        name for name in eplb.__all__ if name.endswith("Error") or (name.startswith("Host") and name != "HostBackup")
    }
    return sorted(set(eplb.__all__) - known - errors)


# ---- bad values ------------------------------------------------------------------------------------------------------


class Foreign:
    """An object that knows nothing, not even how to say what it is."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class Liar:
    """Says that it is an array and fails."""

    shape = (2, 4)
    dtype = np.dtype(np.int64)

    def __array__(self, *args: object, **options: object) -> Any:
        raise RuntimeError("no array")


def bad_values(value: Any) -> Iterator[tuple[str, Any]]:
    """Other values for a valid one."""
    huge = 10**5000
    other: Any
    for other in (None, True, 0, -1, 1, 2**31, 2**62, 2**63, -(2**63) - 1, huge, -huge, 0.5, 1e308, float("nan")):
        yield (f"int of {other.bit_length()} bits" if isinstance(other, int) else repr(other)), other
    for other in (float("inf"), -float("inf"), 1j, "", "x", "\x1b[2J", "A" * 5000, "\ud800", b"x", [], {}, (), set()):
        yield repr(other)[:20], other
    for other in (
        [[1, 2], [3]],
        [None],
        ["a"],
        [float("nan")],
        [-1],
        [huge],
        [0.5],
        [1, 1],
        [2**62],
        range(3),
        {"a": 1},
    ):
        yield (f"{type(other).__name__} {other!r}" if other != [huge] else "[huge]"), other
    yield "an object", Foreign()
    yield "a failing array", Liar()
    yield "a function", lambda *args, **options: None
    yield "a generator", (number for number in (0, 1))
    yield "an object array", np.array([None, "x"], dtype=object)
    yield "an array of text", np.array(["a"])
    yield "an array of dates", np.array([1], dtype="M8[s]")
    yield "a 0-d array", np.array(1)
    yield "an empty array", np.zeros((0, 4))
    yield "a huge view", np.broadcast_to(np.int64(1), (1 << 20, 1 << 20))
    yield "a meta tensor", torch.ones(2, 4, device="meta")
    yield "a sparse tensor", torch.ones(2, 4).to_sparse()
    yield "a tensor that records gradients", torch.ones(2, 4, requires_grad=True)
    yield "a tensor of booleans", torch.ones(2, 6, dtype=torch.bool)
    yield "another layout", eplb.ExpertLayout([[0, 1, 2]], 3, topology=eplb.Topology(3))
    yield "a layout of no layers", eplb.ExpertLayout(np.empty((0, 6), np.int64), 4, topology=TOPOLOGY)
    yield "another topology", eplb.Topology(3, rank_to_node=[0, 0, 1])
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield "float of it", float(value)
        yield "more", value + 1
        yield "text of it", str(value)
        yield "numpy's", np.float32(value)
        yield "an array of it", np.array([value])
    if isinstance(value, str) and value:
        yield "upper", value.upper()
        yield "longer", value + "x"
    if isinstance(value, np.ndarray) or (isinstance(value, list) and value and np.isscalar(value[0])):
        yield from bad_arrays(np.asarray(value))
    if isinstance(value, torch.Tensor):
        for name, other in bad_arrays(value.reshape(-1, *value.shape[1:]).numpy().copy()):
            with contextlib.suppress(TypeError, ValueError):
                yield f"tensor, {name}", torch.from_numpy(np.array(other))


def bad_arrays(value: Any) -> Iterator[tuple[str, Any]]:
    """Other arrays for a valid one."""
    yield "a row fewer", value[:-1]
    yield "a column fewer", value[..., :-1]
    yield "a row more", np.concatenate([value, value[:1]])
    yield "a dimension more", value[None]
    yield "a dimension fewer", value[0]
    yield "no columns", value[..., :0]
    yield "reversed", value[..., ::-1]
    yield "Fortran's order", np.asfortranarray(value)
    yield "swapped bytes", value.astype(value.dtype.newbyteorder())
    yield "every second", np.repeat(value, 2, axis=-1)[..., ::2]
    one = value.copy()
    one.flags.writeable = False
    yield "read-only", one
    for dtype in ("O", "U9", "u1", "u8", "f2", "f4", "f8", "i1", "c16", "?"):
        yield f"of {dtype}", value.astype(dtype)
    for number in (np.nan, np.inf, -np.inf, -1.0, 1e308, 5e-324):
        other = value.astype(np.float64)
        other.reshape(-1)[-1:] = number
        yield f"with {number}", other
    if value.dtype.kind == "i":
        for number in (-1, -2, 2**31, 2**62, -(2**63), 2**63 - 1):
            other = value.astype(np.int64)
            other.reshape(-1)[-1:] = number
            yield f"with {number}", other
        yield "zeros", np.zeros_like(value)


# ---- judging ---------------------------------------------------------------------------------------------------------


def parts_of(value: object, depth: int = 5) -> Iterator[tuple[str, object]]:
    """Everything in an object that can be compared, by its place."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "cpu" and value.layout == torch.strided:
            yield (
                "",
                (str(value.dtype), tuple(value.shape), value.detach().reshape(-1).view(torch.uint8).numpy().tobytes()),
            )
    elif isinstance(value, np.ndarray):
        if value.nbytes < 1 << 20:
            yield "", (str(value.dtype), value.shape, value.tobytes())
    elif isinstance(value, (int, float, str, bytes, type(None))):
        yield "", (type(value), value if value == value else "nan")
    elif depth:
        inside: dict[Any, object] = {}
        if isinstance(value, dict):
            inside = value
        elif isinstance(value, (list, tuple)):
            inside = dict(enumerate(value))
        elif type(value).__module__.startswith("eplb_core"):
            names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
            inside = {name: getattr(value, name) for name in names if hasattr(value, name)}
            inside |= getattr(value, "__dict__", {})
        for name, part in inside.items():
            if "scratch" in str(name) or name == "_digest":  # what no answer depends on, or what is its own cache
                continue
            yield from ((f".{name}{place}", each) for place, each in parts_of(part, depth - 1))


class Finding(NamedTuple):
    """Something that must not happen."""

    what: str
    call: str
    argument: str
    value: str
    text: str


class Judge:
    """Makes calls and keeps what must not happen, once for each argument."""

    def __init__(self, keep: Path) -> None:
        self.findings: dict[tuple[str, str, str], Finding] = {}
        self.counts: Counter[str] = Counter()
        self._current = keep / "current.txt"

    def judge(self, name: str, argument: str, label: str, value: object, folder: Path) -> None:
        """One call."""
        self._current.write_text(f"{name} {argument} {label}", encoding="utf-8", errors="backslashreplace")
        with tempfile.TemporaryDirectory(dir=folder) as own:
            case = CALLS[name](Path(own))
            watched = (case.held, {key: each for key, each in case.arguments.items() if key not in DUCKS})
            before = dict(parts_of(watched))
            found = ""
            try:
                with alarm(LIMIT_S):
                    case.call(**{**case.arguments, argument: value})
                self.counts["answered"] += 1
            except Hang:
                found, text = "took longer than the limit", traceback.format_exc()
            except (EplbError, TypeError, ValueError, IndexError, KeyError, OSError) as error:
                self.counts["refused"] += 1
                text = str(error)
                found = fault_of(error, text)
                if found:
                    text = "".join(traceback.format_exception(error))
                after = dict(parts_of(watched))
                changed = [place for place, part in before.items() if part is not None and after.get(place) != part]
                if changed and not found:
                    found, text = f"changed {changed[0]}", text
            except BaseException as error:
                found, text = type(error).__name__, traceback.format_exc()
            if found:
                self._found(Finding(found, name, argument, label, text[-1500:]))
            case.close()

    def _found(self, finding: Finding) -> None:
        self.counts["found"] += 1
        key = finding.what, finding.call, finding.argument
        if key not in self.findings:
            self.findings[key] = finding
            last = finding.text.strip().splitlines()[-1][:240]
            place = [line.strip() for line in finding.text.splitlines() if "eplb_core" in line and 'File "' in line]
            where = place[-1].partition("eplb_core/")[2] if place else ""
            print(
                f"FOUND {finding.what}: {finding.call} {finding.argument} = {finding.value}: {last!r} {where}",
                flush=True,
            )


def fault_of(error: Exception, text: str) -> str:
    """What is wrong with a refusal, or nothing."""
    if not isinstance(error, OSError) and (not text.isprintable() or len(text) > 2000):
        return "no short line"
    if isinstance(error, (EplbError, OSError)) or re.search(r"`\w+|layouts differ|unexpected keyword argument", text):
        return ""
    return "names no argument"


_DUCKS = "agreement transport tables record backup client all_reduce on_install inner load module wait policy"
DUCKS = frozenset(_DUCKS.split())
"""Arguments of any kind that has the methods: what one lacks shows when it is asked for. And a time to wait."""


def tries(names: Sequence[str], folder: Path) -> list[tuple[str, str, str]]:
    """Every callable with every argument and every bad value."""
    found = []
    for name in names:
        with tempfile.TemporaryDirectory(dir=folder) as own:
            case = CALLS[name](Path(own))
            for argument, value in case.arguments.items():
                if argument not in DUCKS:
                    found += [(name, argument, label) for label, _ in bad_values(value)]
            case.close()
    return found


def work(keep: Path, seed: int, most: int, only: str) -> None:
    """The calls, in an order of chance; the result goes to a file."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + (8 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES + mapped, resource.RLIM_INFINITY))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU's driver needs more addresses than that
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", RuntimeWarning)
    judge = Judge(keep)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chdir(folder)  # a bad path may be the name of a file to write
        names = [each for each in CALLS if only in each]
        for each in names:  # compiles, and must be well as it is
            with tempfile.TemporaryDirectory(dir=folder) as own:
                case = CALLS[each](Path(own))
                case.call(**case.arguments)
                case.close()
        every = tries(names, folder)
        random.Random(seed).shuffle(every)
        for call, argument, label in every[: most or None]:
            with tempfile.TemporaryDirectory(dir=folder) as own:
                case = CALLS[call](Path(own))
                value = dict(bad_values(case.arguments[argument]))[label]
                case.close()
            judge.judge(call, argument, label, value, folder)
    facts = {
        "callables": len(names),
        "counts": dict(sorted(judge.counts.items())),
        "findings": [each._asdict() for each in judge.findings.values()],
    }
    (keep / "result.json").write_text(json.dumps(facts, indent=1))


def watch(keep: Path, seed: int, most: int, only: str) -> dict[str, Any]:
    """What `work` found in a process of its own.

    Raises:
        RuntimeError: the process ended or hung; which call it made.
    """
    current, hung = keep / "current.txt", False
    process = multiprocessing.get_context("spawn").Process(target=work, args=(keep, seed, most, only))
    process.start()
    while process.is_alive():
        process.join(LIMIT_S)
        if current.exists() and time.time() - current.stat().st_mtime > 6 * LIMIT_S and process.is_alive():
            hung = True
            process.kill()
    if process.exitcode:
        what = "hung outside of Python" if hung else f"ended with {process.exitcode}"
        made = current.read_text() if current.exists() else "none"
        raise RuntimeError(f"the process {what}; its call: {made}")
    found: dict[str, Any] = json.loads((keep / "result.json").read_text())
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz_calls", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="400 calls")
    parser.add_argument("--only", default="", help="callables whose name has this in it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    if missing():
        raise RuntimeError(f"public names that nothing calls: {', '.join(missing())}")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result = watch(Path(folder), options.seed, 400 if options.quick else 0, options.only)
    total = sum(number for name, number in result["counts"].items() if name != "found")
    lines = [
        f"{total:,} calls of {result['callables']} callables with one bad argument in "
        f"{time.monotonic() - begun:,.0f} s: {len(result['findings'])} faults found"
    ]
    print("\n".join(lines))
    measure.write_json(options.json, {"summary": lines, "seed": options.seed, **result})
    return 1 if result["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
