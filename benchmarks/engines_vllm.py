"""vLLM's own rebalance with the plug-in and without: are the weights right, how many transfers, how even?

    .engines/vllm/bin/python -m benchmarks.engines_vllm --json benchmarks/results/engines.json
    .engines/vllm/bin/python -m benchmarks.engines_vllm --auto --ranks 8 --json benchmarks/results/engines_auto.json

Runs in vLLM's environment (`make engines`). vLLM's `EplbState` lives in several processes over gloo, on the CPU, with a
stand-in model of plain tensors, and rebalances every 10 windows of moe128's `drift_load` (16 layers, 128 experts, 144
slots), synchronously and layer by layer beside the passes. After each rebalance every slot of every layer must hold the
expert that the map says. Transfers are what vLLM's own communicator is asked to receive, summed over ranks. A second
table replays the two policies alone at 16 ranks. What a plan costs inside the adapter is measured beside the library's
own call on the same input.

`--auto`: the default beside mode "auto", a Balancer; also with a rebalance every 2 windows, which it is made for.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import eplb_core as eplb
from benchmarks import engine_ranks, measure, traces
from benchmarks.engine_ranks import EVERY, EXPERTS, LAYERS, SLOTS
from eplb_core.adapters.vllm.policy import rebalance

# What the environment says in addition.
POLICIES = {
    "vLLM's default": {},
    "eplb_core": {"EPLB_CORE": "vllm"},
    "eplb_core and its transport": {"EPLB_CORE": "vllm", "EPLB_CORE_OPTIONS": "transport=shared_memory"},
}
OFTEN, MOVE_COST = 2, 0.01
"""Of mode "auto": windows from one rebalance to the next where moves are few, and what one costs in single windows."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.parser("engines_vllm", __doc__, quick="three rebalances")
    parser.add_argument("--ranks", type=int, default=4, help="processes")
    parser.add_argument("--auto", action="store_true", help='the default and mode "auto", and no other')
    options = parser.parse_args(argv)
    if engine_ranks.is_absent("vLLM"):
        measure.write_json(options.json, {"summary": []})
        return 0
    times = 3 if options.quick else engine_ranks.REBALANCES
    measure.one_thread()
    os.environ.update(VLLM_TARGET_DEVICE="cpu", GLOO_SOCKET_IFNAME="lo")
    os.environ.pop("EPLB_CORE", None)
    importlib.import_module("vllm.distributed.eplb.eplb_state")  # seconds, once: the ranks are forked
    if options.auto:
        return _auto(options.ranks, times, options.json)
    rows = [
        {
            "run": f"{'asynchronous' if beside else 'synchronous'}, {name}",
            **_run(options.ranks, POLICIES[name], beside, times),
        }
        for beside in (False, True)
        for name in POLICIES
    ]
    _print_runs(rows)
    replays = _replay(times)
    print(
        measure.table(
            ["policies alone, 16 ranks", "transfers", "balance of the next windows"],
            [[row["policy"], f"{row['transfers']:,}", f"{row['balance']:.4f}"] for row in replays],
        )
    )
    plans = _plans(5 if options.quick else 400)
    engine_ranks.print_plans(plans)
    summary = ["vLLM's own rebalance:"]
    for before, after in ((rows[0], rows[1]), (rows[0], rows[2]), (rows[3], rows[4]), (rows[3], rows[5])):
        share = before["transfers"] / max(after["transfers"], 1)
        summary.append(
            f"{after['run']}: {after['rebalances']} rebalances, {after['wrong']} wrong weights, 1/{share:.0f} of the "
            f"default's transfers at {after['balance'] / before['balance']:.4f} of its balance"
        )
    measure.write_json(options.json, {"summary": summary, "rows": rows, "policies": replays, "plans": plans})
    return int(any(row["wrong"] for row in rows))


def _auto(ranks: int, times: int, path: Path | None) -> int:
    """The default, and mode "auto" as often and more often, over the same windows."""
    rows = [
        {"run": f"{name}, every {every} windows", **_run(ranks, plugin, False, times * EVERY // every, every)}
        for name, plugin, every in (("vLLM's default", {}, EVERY), *(("auto", _auto_of(n), n) for n in (EVERY, OFTEN)))
    ]
    _print_runs(rows)
    default, same, often = rows
    said = [
        f"every {every} windows 1/{default['transfers'] / max(row['transfers'], 1):.0f} of the default's transfers at "
        f"{row['balance'] / default['balance']:.3f} of its balance, {row['wrong']} wrong weights"
        for row, every in ((same, EVERY), (often, OFTEN))
    ]
    summary = [f"vLLM's own rebalance, {ranks} processes, mode auto:", *said]
    measure.write_json(path, {"summary": summary, "ranks": ranks, "rows": rows})
    return int(any(row["wrong"] for row in rows))


def _auto_of(every: int) -> dict[str, str]:
    return {"EPLB_CORE": "vllm", "EPLB_CORE_OPTIONS": f"mode=auto,move_cost={MOVE_COST / every:g}"}


def _print_runs(rows: Sequence[dict[str, Any]]) -> None:
    head = ["EplbState", "rebalances", "wrong weights", "transfers", "balance of the next windows"]
    cells = [
        [row["run"], *(f"{row[name]:,}" for name in ("rebalances", "wrong", "transfers")), f"{row['balance']:.4f}"]
        for row in rows
    ]
    print(measure.table(head, cells))


# ---- vLLM's state in several processes -------------------------------------------------------------------------------


def _run(ranks: int, plugin: dict[str, str], beside: bool, times: int, every: int = EVERY) -> dict[str, Any]:
    """All ranks of one run; rank 0's answer with the transfers of all."""
    answers = engine_ranks.run(ranks, plugin, _serve, beside, times, every)
    return {
        **{name: answers[0][name] for name in ("rebalances", "balance", "parts")},
        "wrong": sum(answer["wrong"] for answer in answers),
        "transfers": sum(answer["received"] for answer in answers),
    }


class _Event:
    """Order of launches on a device; on the CPU all is in order."""

    def __init__(self, **_: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class _Layer:
    """A layer of the stand-in model: its weights say which expert they are."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors

    def get_expert_weights(self) -> list[torch.Tensor]:
        return self.tensors

    def set_eplb_state(self, **_: Any) -> None: ...


def _serve(rank: int, ranks: int, folder: str, beside: bool, times: int, every: int) -> dict[str, Any]:
    """One rank: feed the trace's windows to vLLM's state, step it, look at the weights after each rebalance."""
    torch.set_num_threads(1)
    import vllm.plugins

    vllm.plugins.load_general_plugins()
    from vllm.distributed.eplb import async_worker, eplb_communicator, eplb_state, eplb_utils, rebalance_execute

    from eplb_core.adapters.vllm import plugin as adapter

    if "EPLB_CORE" in os.environ and adapter.active_parts() != adapter.PARTS:
        raise RuntimeError(f"in effect: {adapter.active_parts()}")
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    groups = [torch.distributed.new_group(backend="gloo") for _ in range(4)]
    ep = SimpleNamespace(device_group=groups[0], cpu_group=groups[1])
    eplb_group = SimpleNamespace(device_group=groups[2], cpu_group=groups[3])
    # What a machine without an accelerator lacks: streams and events. The rest is vLLM's.
    torch.Event = _Event  # type: ignore[misc, assignment]
    for module in (async_worker, eplb_communicator, eplb_utils, rebalance_execute):
        vars(module)["device_stream"] = lambda stream: nullcontext()
    for module in (async_worker, eplb_state):
        vars(module)["get_eplb_group"] = lambda: eplb_group
    eplb_state.get_ep_group = lambda: ep
    eplb_state.get_node_count = lambda: 1
    eplb_communicator.is_local_first_rank = lambda: False
    eplb_state.start_async_worker = lambda state, is_profile=False: _start(async_worker, state)

    local = SLOTS // ranks
    model = _model(rank, ranks, local)
    config = SimpleNamespace(
        eplb_config=SimpleNamespace(
            use_async=beside,
            window_size=every,
            step_interval=every,
            policy="default",
            communicator="torch_nccl",
            log_balancedness_interval=1,
            migration_batching_enabled=False,
        ),
        enable_elastic_ep=False,
        num_ubatches=0,
        all2all_backend="deepep_low_latency",
        enable_expert_parallel=True,
        use_all2all=True,
    )
    state = eplb_state.EplbState(config, torch.device("cpu"))
    name = SimpleNamespace(compute_hash=lambda: "model", model="stand-in")
    state.add_model(model, name)
    state.start_async_loop()
    return _drive(state, state.model_states["model"], rank, ranks, times, every)


def _model(rank: int, ranks: int, local: int) -> Any:
    from vllm.model_executor.models.interfaces import MixtureOfExperts

    first = np.arange(SLOTS) % EXPERTS
    mine = first[rank * local : (rank + 1) * local]
    layers = [_Layer(engine_ranks.weights(layer, mine)) for layer in range(LAYERS)]
    model = SimpleNamespace(
        moe_layers=layers,
        num_moe_layers=LAYERS,
        num_routed_experts=EXPERTS,
        num_logical_experts=EXPERTS,
        num_redundant_experts=SLOTS - EXPERTS,
        num_physical_experts=SLOTS,
        num_local_physical_experts=local,
        num_expert_groups=1,
    )
    model.set_eplb_state = lambda *maps: MixtureOfExperts.set_eplb_state(model, *maps)
    return model


def _start(async_worker: Any, state: Any) -> threading.Thread:
    stream = SimpleNamespace(synchronize=lambda: None)
    thread = threading.Thread(target=async_worker.transfer_run_periodically, args=(state, stream), daemon=True)
    thread.start()
    return thread


def _drive(state: Any, model_state: Any, rank: int, ranks: int, times: int, every: int) -> dict[str, Any]:
    load = traces.drift_load()
    communicator = model_state.communicator
    ours = "transport=" in os.environ.get("EPLB_CORE_OPTIONS", "")
    if ours and type(communicator).__name__ != "TransportCommunicator":
        raise RuntimeError(f"the communicator is {type(communicator).__name__}")
    received = [0]
    receive = communicator.add_recv

    def counted(tensors: Any, *args: Any, **kwargs: Any) -> None:
        received[0] += 1
        receive(tensors, *args, **kwargs)

    communicator.add_recv = counted
    state.expert_rearrangement_step = 0
    future = engine_ranks.Future(load, ranks, every)
    wrong = done = 0
    for window in range(min(len(load) - every, times * every)):
        model_state.expert_load_pass.copy_(_counts(load[window], model_state, rank, ranks))
        state.step()
        if (window + 1) % every:
            continue
        while model_state.rebalanced:  # passes without tokens until the last layer is in
            state.expert_rearrangement_step = 0  # or the next rebalance would begin among them
            state.step(is_dummy=True)
        state.expert_rearrangement_step = 0
        done += 1
        wrong += _wrong(model_state, rank)
        future.add(model_state.physical_to_logical_map, window)
    from eplb_core.adapters.vllm import plugin as adapter

    return {
        "rebalances": done,
        "wrong": wrong,
        "received": received[0],
        "balance": float(np.mean(future.balances)),
        "digests": future.digests,
        "parts": list(adapter.active_parts()),
    }


def _counts(window: npt.NDArray[np.int64], model_state: Any, rank: int, ranks: int) -> torch.Tensor:
    """What this rank's router would have counted: its part of each expert's tokens, over the entries of its tables."""
    mine = engine_ranks.part_of_rank(window, rank, ranks)
    maps, entries = model_state.logical_to_physical_map.numpy(), model_state.logical_replica_count.numpy()
    counts = np.zeros((LAYERS, SLOTS + 1), dtype=np.int64)
    for entry in range(int(entries.max())):
        share = mine // entries + (entry < mine % entries)
        used = entry < entries
        np.add.at(counts, (np.arange(LAYERS)[:, None], maps[:, :, entry]), share * used)
    return torch.from_numpy(counts[:, :SLOTS].astype(np.int32))


def _wrong(model_state: Any, rank: int) -> int:
    """Slots of this rank whose tensors are not those of the expert that the map says."""
    found = 0
    for layer, tensors in enumerate(model_state.model.expert_weights):
        mine = model_state.physical_to_logical_map[layer].reshape(-1, len(tensors[0]))[rank]
        found += engine_ranks.wrong_rows(tensors, layer, mine)
    return found


# ---- the policies alone ----------------------------------------------------------------------------------------------


def _replay(times: int) -> list[dict[str, Any]]:
    os.environ.pop("EPLB_CORE", None)
    from vllm.distributed.eplb.policy.default import DefaultEplbPolicy

    load, topology, rows = traces.drift_load(), eplb.Topology(16), []
    for name, policy in (("vLLM's default", DefaultEplbPolicy.rebalance_experts), ("eplb_core", rebalance)):
        live = eplb.ExpertLayout.trivial(LAYERS, EXPERTS, num_slots=SLOTS, topology=topology)
        moved, balance = 0, []
        for start in range(EVERY, (times + 1) * EVERY, EVERY):
            weight = torch.from_numpy(load[start - EVERY : start].sum(axis=0))
            old = torch.from_numpy(live.physical_to_logical_map.copy())
            new = eplb.ExpertLayout(policy(weight, SLOTS, 1, 1, 16, old), EXPERTS, topology=topology)
            moved += int(eplb.transfers(live, new).sum())
            live = new
            balance.append(eplb.mean_balancedness(eplb.rank_load(live, load[start : start + EVERY])))
        rows.append({"policy": name, "transfers": moved, "balance": float(np.mean(balance))})
    return rows


def _plans(calls: int) -> list[dict[str, Any]]:
    """The library's call and the adapter's, in turns, on what the engine hands over."""
    rng = np.random.default_rng(0)
    rows = []
    for name, layers, experts, slots, ranks in (
        ("58 x 256 -> 288 on 32", 58, 256, 288, 32),
        ("moe128, 16", 16, 128, 144, 16),
    ):
        topology = eplb.Topology(ranks)
        load = torch.from_numpy((rng.lognormal(0, 1, (layers, experts)) * 1000).astype(np.int64))
        live = torch.from_numpy(eplb.place(load, topology, num_slots=slots).layout.physical_to_logical_map.copy())
        load = (load * torch.from_numpy(rng.lognormal(0, 0.1, load.shape))).long()

        def library(load: Any = load, live: Any = live, slots: int = slots, topology: Any = topology) -> Any:
            current = eplb.ExpertLayout(live, load.shape[1], topology=topology)
            return eplb.place(load, topology, num_slots=slots, current=current).layout.physical_to_logical_map

        adapter = partial(rebalance, load, slots, 1, 1, ranks, live)
        rows.append(engine_ranks.plan_row(name, library, adapter, calls))
    return rows


if __name__ == "__main__":
    sys.exit(main())
