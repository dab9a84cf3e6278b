"""What the benchmarks of real servers see inside an engine: found by its entry points for plug-ins, changes nothing.

Acts where the environment has REAL_PROBE=FOLDER. Each rank looks there for the file `ask-N` at every eighth step, and
answers with `answer-N.RANK.json`: its maps, a fingerprint of each slot's weights, what it has counted. The answer 0
comes by itself, before the first step. REAL_ONE_GPU=1 puts all ranks of vLLM on the first GPU.
"""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import torch

EVERY = 8
"""Steps from one look to the next."""
FOLDER, ONE_GPU = "REAL_PROBE", "REAL_ONE_GPU"


class Model(NamedTuple):
    """What a rank holds and believes."""

    rows: torch.Tensor
    """Expert of each slot, `[L, P]`."""
    slots_of: torch.Tensor
    """What the router reads, `[L, E, any]`: the slots of each expert, of which the first `counts` count."""
    counts: torch.Tensor
    weights: Sequence[Sequence[torch.Tensor]]
    """Of each layer, tensors `[S, ...]`."""


class Probe:
    """One rank's."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.steps, self.answered = folder, 0, -1
        self.counted: dict[str, Any] = {"received": 0, "same_s": [], "changed_s": [], "balance": [0.0, 0.0]}

    def at_step(self, rank: int, model_of: Callable[[], Model]) -> None:
        """Answer if there is a question; called on the forward thread."""
        asked = self.folder / f"ask-{self.answered + 1}"
        if self.answered < 0 or (self.steps % EVERY == 0 and asked.exists()):
            self.answered += 1
            answer = {"rank": rank, "step": self.steps, "counted": self.counted, **seen(model_of())}
            to = self.folder / f"answer-{self.answered}.{rank}.json"
            to.with_suffix(".part").write_text(json.dumps(answer))
            to.with_suffix(".part").rename(to)
        self.steps += 1


def seen(model: Model) -> dict[str, Any]:
    """The map, the entries of the router's table that lead elsewhere, and each slot's fingerprint."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    rows = model.rows.cpu()
    return {
        "rows": rows.tolist(),
        "wrong_entries": wrong_entries(rows, model.slots_of.cpu(), model.counts.cpu()),
        "prints": [fingerprints(tensors) for tensors in model.weights],
    }


def wrong_entries(rows: torch.Tensor, slots_of: torch.Tensor, counts: torch.Tensor) -> int:
    """Entries that count and lead to no slot of their expert, and experts without an entry."""
    listed = torch.arange(slots_of.shape[-1]) < counts[..., None]
    inside = (slots_of >= 0) & (slots_of < rows.shape[-1])
    found = rows.gather(1, torch.where(inside, slots_of, 0).flatten(1).long()).view(slots_of.shape)
    right = inside & (found == torch.arange(slots_of.shape[1])[:, None])
    return int((listed & ~right).sum() + (counts < 1).sum())


def fingerprints(tensors: Sequence[torch.Tensor]) -> list[int]:
    """A number for each slot, which any one word that differs changes: weights are odd numbers, modulo 2^64."""
    totals = [0] * len(tensors[0])
    for tensor in tensors:
        rows = tensor.detach().reshape(len(tensor), -1).view(torch.int8)
        words = rows.view(torch.int32) if rows.shape[1] % 4 == 0 else rows
        weights = torch.arange(words.shape[1], device=words.device) * -0x61C8864680B583EA + 1
        sums = torch.stack([(row.long() * weights).sum() for row in words])
        totals = [(total * 31 + part) % 2**64 for total, part in zip(totals, sums.tolist(), strict=True)]
    return totals


def _probe() -> Probe | None:
    return Probe(Path(os.environ[FOLDER])) if FOLDER in os.environ else None


def _timed(call: Callable[..., Any], into: list[float], *given: Any) -> Any:
    began = time.perf_counter()
    answer = call(*given)
    into.append(round(time.perf_counter() - began, 7))
    return answer


# ---- vLLM ------------------------------------------------------------------------------------------------------------


def vllm() -> None:
    """Look into vLLM; its entry point."""
    probe = _probe()
    if probe is None:
        return
    if os.environ.get(ONE_GPU):
        config = importlib.import_module("vllm.config").ParallelConfig
        config.get_local_gpu_index = lambda self, local_rank, dp_local_rank=None: 0
    module: Any = importlib.import_module("vllm.distributed.eplb.eplb_state")
    own = module.EplbState.step

    @wraps(own)
    def step(self: Any, is_dummy: bool = False, is_profile: bool = False, *args: Any, **kwargs: Any) -> Any:
        if not is_profile and self.model_states:
            state = next(iter(self.model_states.values()))
            if probe.answered < 0:
                _count_in_vllm(module, probe, state)
            rank = module.get_ep_group().device_group.rank()
            probe.at_step(rank, lambda: _vllm_model(state))
        return own(self, is_dummy, is_profile, *args, **kwargs)

    module.EplbState.step = step


def _vllm_model(state: Any) -> Model:
    return Model(
        state.physical_to_logical_map,
        state.logical_to_physical_map,
        state.logical_replica_count,
        state.model.expert_weights,
    )


def _count_in_vllm(module: Any, probe: Probe, state: Any) -> None:
    """Count experts that come to this rank, and time its commits of layers."""
    communicator, counted = state.communicator, probe.counted
    add_recv, commit = communicator.add_recv, module._commit_eplb_maps_for_layer
    rows = state.physical_to_logical_map.cpu().clone()

    def received(*args: Any, **kwargs: Any) -> Any:
        counted["received"] += 1
        return add_recv(*args, **kwargs)

    def committed(model_state: Any, new_physical_to_logical_map: torch.Tensor, layer: int) -> Any:
        same = torch.equal(rows[layer], new_physical_to_logical_map.cpu())
        rows[layer] = new_physical_to_logical_map
        into = counted["same_s" if same else "changed_s"]
        return _timed(commit, into, model_state, new_physical_to_logical_map, layer)

    communicator.add_recv, module._commit_eplb_maps_for_layer = received, committed


# ---- SGLang ----------------------------------------------------------------------------------------------------------


def sglang() -> None:
    """Look into SGLang; its entry point."""
    probe = _probe()
    if probe is None:
        return
    manager: Any = importlib.import_module("sglang.srt.eplb.eplb_manager").EPLBManager
    recorder: Any = importlib.import_module("sglang.srt.eplb.expert_distribution")._StatAccumulator
    location: Any = importlib.import_module("sglang.srt.eplb.expert_location")
    own_end, own_append = manager.on_forward_pass_end, recorder.append
    last: list[torch.Tensor] = []
    sums: list[torch.Tensor] = []

    @wraps(own_end)
    def on_forward_pass_end(self: Any) -> Any:
        live, rank = location.get_global_expert_location_metadata(), torch.distributed.get_rank()
        rows = live.physical_to_logical_map_cpu
        if last and not torch.equal(last[0], rows):
            probe.counted["received"] += received(last[0], rows, rank, live.ep_size)
        if not last or not torch.equal(last[0], rows):
            last[:] = [rows.clone()]

        def model() -> Model:
            if sums:
                probe.counted["balance"] = sums[0].tolist()
            return _sglang_model(live, self._get_model())

        probe.at_step(rank, model)
        return own_end(self)

    @wraps(own_append)
    def append(self: Any, forward_pass_id: int, gatherer_key: str, single_pass_data: Any, outputs: Any) -> Any:
        counts = single_pass_data["global_physical_count"]
        loads = counts.view(len(counts), self._expert_location_metadata.ep_size, -1).sum(-1).double()
        both = torch.stack([loads.mean(-1).sum(), loads.amax(-1).sum()])
        sums[:] = [sums[0] + both if sums else both]
        return own_append(self, forward_pass_id, gatherer_key, single_pass_data, outputs)

    manager.on_forward_pass_end, recorder.append = on_forward_pass_end, append


def received(before: torch.Tensor, after: torch.Tensor, rank: int, ranks: int) -> int:
    """Experts that `rank` has after a move and had not before, over all layers."""
    own = slice(rank * before.shape[1] // ranks, (rank + 1) * before.shape[1] // ranks)
    pairs = zip(before[:, own].tolist(), after[:, own].tolist(), strict=True)
    return sum(len(set(new) - set(old)) for old, new in pairs)


def _sglang_model(live: Any, model: Any) -> Model:
    weights = model.routed_experts_weights_of_layer
    layers = sorted(int(layer) for layer in weights.keys())  # noqa: SIM118  a lazy object that cannot be iterated
    return Model(
        live.physical_to_logical_map[layers],
        live.logical_to_all_physical_map[layers],
        live.logical_to_all_physical_map_num_valid[layers],
        [list(weights[layer]) for layer in layers],
    )
