"""SGLang's own rebalance with the plug-in and without: are the weights right, how many transfers, how even?

    .engines/sglang/bin/python -m benchmarks.engines_sglang --json benchmarks/results/engines_sglang.json

Runs in SGLang's environment (`make engines`). SGLang's `EPLBManager`, recorder, metadata and dispatch live in several
processes over gloo, on the CPU, with a stand-in model of plain tensors, and rebalance every 10 windows of moe128's
`drift_load` (16 layers and a dense one, 128 experts, 144 slots). In every pass, those in the middle of a move too, each
rank maps every expert by SGLang's own dispatch, and the slot that it names must hold that expert's weights on the rank
that owns it. Transfers are experts received: by SGLang's updater as it asks torch for them, by a Migrator as it reads
bytes. What a rebalance costs inside the adapter is measured beside the library's own call on the same input.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

import eplb_core as eplb
from benchmarks import engine_ranks, measure, traces
from benchmarks.engine_ranks import EVERY, EXPERTS, LAYERS, SLOTS

DENSE = 1
"""Layers before those that have experts; SGLang's maps have rows for them."""
PLUG_INS: dict[str, dict[str, str]] = {
    "SGLang": {},
    "eplb_core, SGLang's updater": {"EPLB_CORE": "sglang", "EPLB_CORE_OFF": "moves"},
    "eplb_core": {"EPLB_CORE": "sglang"},
    "eplb_core over shared memory": {"EPLB_CORE": "sglang", "EPLB_CORE_OPTIONS": "transport=shared_memory"},
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.parser("engines_sglang", __doc__, quick="three rebalances")
    parser.add_argument("--ranks", type=int, default=4, help="processes")
    parser.add_argument("--rebalances", type=int, default=engine_ranks.REBALANCES)
    parser.add_argument("--only", help="one of the runs, by name")
    options = parser.parse_args(argv)
    if engine_ranks.is_absent("SGLang"):
        measure.write_json(options.json, {"summary": []})
        return 0
    times = 3 if options.quick else options.rebalances
    measure.one_thread()
    import_engine()
    eplb.warm_up()
    rows = [
        {"run": f"{dispatch}, {name}", **_run(options.ranks, plugin, dispatch, times)}
        for dispatch in ("static", "dynamic")
        for name, plugin in PLUG_INS.items()
        if options.only in (None, name)
    ]
    head = ["EPLBManager", "rebalances", "wrong weights", "wrong dispatch", "transfers", "balance of the next windows"]
    numbers = ("rebalances", "wrong", "misled", "transfers")
    cells = [[row["run"], *(f"{row[name]:,}" for name in numbers), f"{row['balance']:.4f}"] for row in rows]
    print(measure.table(head, cells))
    plans = _plans(5 if options.quick else 200)
    engine_ranks.print_plans(plans)
    summary = ["SGLang's own rebalance:"]
    for start in range(0, len(rows), len(PLUG_INS)):
        for row in rows[start + 1 : start + len(PLUG_INS)]:
            share = rows[start]["transfers"] / max(row["transfers"], 1)
            summary.append(
                f"{row['run']}: {row['rebalances']} rebalances, {row['wrong']} wrong weights, {row['misled']} tokens "
                f"to a wrong slot, 1/{share:.0f} of SGLang's transfers at "
                f"{row['balance'] / rows[start]['balance']:.4f} of its balance"
            )
    measure.write_json(options.json, {"summary": summary, "rows": rows, "plans": plans})
    return int(any(row["wrong"] or row["misled"] for row in rows))


def import_engine() -> None:
    """SGLang without the compiled parts that a machine without a GPU lacks; seconds, once: the ranks are forked."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "engines"))
    import stub_finder  # type: ignore[import-not-found]

    stub_finder.install(stub_finder.SGLANG)
    for name in ("eplb.eplb_manager", "eplb.expert_location_dispatch", "plugins", "model_executor.model_runner"):
        importlib.import_module(f"sglang.srt.{name}")


def _run(ranks: int, plugin: dict[str, str], dispatch: str, times: int) -> dict[str, Any]:
    """All ranks of one run; rank 0's answer with the transfers of all."""
    answers = engine_ranks.run(ranks, plugin, _serve, dispatch, times)
    total = {name: sum(answer[name] for answer in answers) for name in ("wrong", "misled", "transfers")}
    kept = {name: answers[0][name] for name in ("rebalances", "balance", "parts", "passes_in_moves")}
    return {**kept, **total}


def _serve(rank: int, ranks: int, folder: str, dispatch: str, times: int) -> dict[str, Any]:
    return Rank(rank, ranks, folder, dispatch).serve(times)


class Rank:
    """One rank of the engine: SGLang's own objects around a model of plain tensors.

    Args:
        rank: This rank.
        ranks: EP ranks, one a process.
        folder: Where they meet.
        dispatch: SGLang's `ep_dispatch_algorithm`.
        settings: Server arguments beyond those that the test needs.
    """

    def __init__(self, rank: int, ranks: int, folder: str, dispatch: str, **settings: Any) -> None:
        torch.set_num_threads(1)
        # What a machine without an accelerator lacks; the rest is SGLang's.
        torch.cpu.empty_cache = lambda: None  # type: ignore[attr-defined]
        self.rank, self.ranks = rank, ranks
        from sglang.srt.eplb import expert_distribution, expert_location
        from sglang.srt.plugins import load_plugins
        from sglang.srt.runtime_context import get_context, get_parallel

        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
        shape = expert_location.ModelConfigForExpertLocation(num_layers=DENSE + LAYERS, num_logical_experts=EXPERTS)
        mock.patch.object(
            expert_location.ModelConfigForExpertLocation, "from_model_config", staticmethod(lambda config: shape)
        ).start()
        asked = {
            "device": "cpu",
            "tp_size": ranks,
            "ep_size": ranks,
            "nnodes": 1,
            "enable_eplb": True,
            "moe_a2a_backend": "deepep",
            "deepep_mode": "normal",
            "ep_dispatch_algorithm": dispatch,
            "ep_num_redundant_experts": SLOTS - EXPERTS,
            "eplb_algorithm": "deepseek",
            "eplb_rebalance_num_iterations": EVERY,
            "expert_distribution_recorder_mode": "stat",
            "expert_distribution_recorder_buffer_size": EVERY,
            **settings,
        }
        get_context().override_server_args(**asked).install()
        get_parallel().override_permanently(tp_rank=rank, moe_ep_rank=rank, moe_ep_size=ranks)
        self._before_plugins()
        load_plugins()
        self.metadata = expert_location.compute_initial_expert_location_metadata(model_config=None, moe_ep_rank=rank)
        expert_location.set_global_expert_location_metadata(self.metadata)
        expert_distribution.get_device = lambda: "cpu"
        recorder = expert_distribution.ExpertDistributionRecorder.init_new(self.metadata, rank=rank)
        expert_distribution.set_global_expert_distribution_recorder(recorder)
        self.recorder = recorder
        self.received = 0
        self._count_received()
        self.manager = self._manager()

    def _before_plugins(self) -> None:
        """The engine's loading, of a model that is here: SGLang's own would build one on a GPU."""
        from sglang.srt.model_executor.model_runner import ModelRunner

        def load_model(self: Any) -> None:
            self.model = self.make_model()

        ModelRunner.load_model = load_model
        self.runner = ModelRunner.__new__(ModelRunner)

    def _manager(self) -> Any:
        from sglang.srt.eplb.eplb_manager import EPLBManager
        from sglang.srt.eplb.expert_location_updater import ExpertLocationUpdater

        updater = ExpertLocationUpdater()
        manager = EPLBManager(
            model_config=None,
            get_model=lambda: self.runner.model,
            get_expert_location_updater=lambda: updater,
            get_expert_backup_client=lambda: None,
            get_weight_updater=lambda: SimpleNamespace(update_weights_from_disk=None),
        )
        vars(self.runner).update(eplb_manager=manager, make_model=self._model)
        self.runner.load_model()
        return manager

    def _model(self) -> Any:
        mine = self.mine()
        self.weights = {layer: engine_ranks.weights(layer, mine[layer]) for layer in range(DENSE, DENSE + LAYERS)}
        return SimpleNamespace(routed_experts_weights_of_layer=self.weights)

    def mine(self) -> torch.Tensor:
        """What the map says that this rank's slots hold, `[L, S]`."""
        local = SLOTS // self.ranks
        held: torch.Tensor = self.metadata.physical_to_logical_map[:, self.rank * local : (self.rank + 1) * local]
        return held

    def _count_received(self) -> None:
        original = torch.distributed.batch_isend_irecv

        def counted(operations: Any) -> Any:
            self.received += sum(each.op is torch.distributed.irecv for each in operations)
            return original(operations)

        vars(torch.distributed)["batch_isend_irecv"] = counted

    # ---- passes ------------------------------------------------------------------------------------------------------

    def count(self, window: Any) -> None:
        """What this rank's router would have counted: its part of each expert's tokens, by SGLang's own dispatch."""
        mine = engine_ranks.part_of_rank(window, self.rank, self.ranks)
        lists = self.metadata.logical_to_all_physical_map.numpy()
        valid = self.metadata.logical_to_all_physical_map_num_valid.numpy()
        counts = np.zeros((DENSE + LAYERS, SLOTS), dtype=np.int64)
        layers = np.arange(DENSE, DENSE + LAYERS)
        if self.metadata.logical_to_rank_dispatch_physical_map is not None:
            picks = self.metadata.logical_to_rank_dispatch_physical_map.numpy()
            np.add.at(counts, (layers[:, None], picks[DENSE:]), mine)
        else:
            for entry in range(int(valid.max())):
                used = entry < valid[DENSE:]
                share = np.where(used, mine // valid[DENSE:] + (entry < mine % valid[DENSE:]), 0)
                np.add.at(counts, (layers[:, None], np.where(used, lists[DENSE:, :, entry], 0)), share)
        found = {"global_physical_count": torch.from_numpy(counts.astype(np.int32))}
        self.recorder._accumulator.append(0, "primary", found, {})

    def wrong(self) -> int:
        """Slots of this rank whose tensors are not those of the expert that the map says."""
        mine = self.mine()
        return sum(engine_ranks.wrong_rows(found, layer, mine[layer]) for layer, found in self.weights.items())

    def misled(self) -> int:
        """Experts whose tokens this rank sends to a slot that does not hold them, over all layers."""
        from sglang.srt.eplb.expert_location_dispatch import ExpertLocationDispatchInfo, topk_ids_logical_to_physical

        held = torch.stack(
            [(first[:, 0].div(8) - layer).div(1000).round() for layer, (first, _) in self.weights.items()]
        )
        by_rank = [torch.empty_like(held) for _ in range(self.ranks)]
        torch.distributed.all_gather(by_rank, held)
        expert_of_slot = torch.cat(by_rank, dim=1).long()
        tokens = torch.arange(EXPERTS).repeat(4)[:, None]
        found = 0
        for row, layer in enumerate(self.weights):
            info = ExpertLocationDispatchInfo.init_new(layer_id=layer)
            slots = topk_ids_logical_to_physical(tokens.clone(), info)
            found += int((expert_of_slot[row][slots] != tokens).sum())
        return found

    def serve(self, times: int) -> dict[str, Any]:
        """Feed the trace's windows, one a pass; rebalance by SGLang's own generator; look at everything."""
        load = traces.drift_load()
        wrong = misled = rebalances = passes_in_moves = 0
        future = engine_ranks.Future(load, self.ranks)
        manager = self.manager
        for window in range(min(len(load) - EVERY, times * EVERY)):
            self.count(load[window])
            manager.on_forward_pass_end()
            if (window + 1) % EVERY:
                continue
            manager.on_forward_pass_end()  # the pass after the interval begins it
            while self._moving():
                wrong += self.wrong()
                misled += self.misled()
                passes_in_moves += 1
                manager.on_forward_pass_end()
            rebalances += 1
            manager.reset_generator()
            wrong += self.wrong()
            misled += self.misled()
            future.add(self.metadata.physical_to_logical_map_cpu[DENSE:], window)
        return {
            "rebalances": rebalances,
            "wrong": wrong,
            "misled": misled,
            "transfers": self.transfers(),
            "balance": float(np.mean(future.balances)),
            "digests": future.digests,
            "passes_in_moves": passes_in_moves,
            "parts": self._parts(),
        }

    def moves(self) -> Any:
        """What the plug-in made of the model, or None."""
        return vars(self.manager).get("_eplb_core_moves")

    def _moving(self) -> bool:
        moves = self.moves()
        return moves is not None and not moves.over and not moves.migrator.idle

    def transfers(self) -> int:
        """Experts that this rank has received."""
        moves = self.moves()
        read = 0 if moves is None else moves.migrator.status.read_bytes // moves.slot_bytes
        return int(self.received // 2 + read)

    def _parts(self) -> list[str]:
        if "EPLB_CORE" not in os.environ:
            return []
        from eplb_core.adapters.sglang import plugin as sglang

        if sglang.inactive_hooks():
            raise RuntimeError(f"not in effect: {sglang.inactive_hooks()}")
        wanted = "moves" not in os.environ.get("EPLB_CORE_OFF", "")
        if wanted != (self.moves() is not None and not self.moves().over):
            raise RuntimeError(f"moves: {self.moves() and self.moves().over}")
        return list(sglang.active_parts())


# ---- what a plan costs -----------------------------------------------------------------------------------------------


def _plans(times: int) -> list[dict[str, Any]]:
    """The adapter's answer and the library's own on the same windows and the same live map, in turns."""
    from eplb_core.adapters.sglang.maps import rebalance

    inputs = {
        "58 x 256 -> 288 on 32": (traces.generated_load()[None], 288, 32),
        "moe128, 10 windows, 4 ranks": (traces.drift_load()[:EVERY], SLOTS, 4),
    }
    rows = []
    for name, (windows, slots, ranks) in inputs.items():
        topology = eplb.Topology(ranks)
        live = eplb.place(windows, topology, num_slots=slots).layout
        drifted = np.roll(windows, 1, axis=-1)
        counts, p2l = torch.from_numpy(drifted), torch.from_numpy(live.physical_to_logical_map.copy())

        def library(drifted: Any = drifted, slots: int = slots, live: Any = live) -> Any:
            # From the array, as the adapter: a live layout that was used before has its maps already.
            fresh = eplb.ExpertLayout(live.physical_to_logical_map, live.num_experts, topology=live.topology)
            placed = eplb.place(drifted, live.topology, num_slots=slots, current=fresh)
            return placed.layout.physical_to_logical_map

        def adapter(counts: Any = counts, slots: int = slots, ranks: int = ranks, p2l: Any = p2l) -> Any:
            return rebalance(counts, slots, slots // ranks, num_nodes=1, live=p2l)[0]

        rows.append(engine_ranks.plan_row(name, library, adapter, times))
    return rows


if __name__ == "__main__":
    sys.exit(main())
