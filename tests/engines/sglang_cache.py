# ruff: noqa: E402  compiled parts that are missing must be stood in for before the engine is imported
"""Runs in SGLang's environment: its weight cache daemon and its loader, with and without a record of the layout; JSON.

The daemon's `serve` and its socket, the loader's request, their protocol and the metadata are SGLang's own. What a
machine without a GPU lacks is stood in for: the loading of the model, and the handles of device memory.

    daemon PATH        serves until it is killed; its log says when engines may come
    engine PATH        starts: says by which map it routes and what it was answered; `move` also moves a layer
"""

from __future__ import annotations

import json
import logging
import os
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import stub_finder  # type: ignore[import-not-found]

stub_finder.install(stub_finder.SGLANG)

import sglang_loading  # type: ignore[import-not-found]
import torch
from sglang.srt.eplb import expert_location
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.weight_cache import daemon as cache
from sglang.srt.weight_cache import ipc_loader, protocol

ROW, MOVED = sglang_loading.ROW, [3, 1, 2, 0, 3, 0]
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "tp_size": 2,
    "ep_size": 2,
    "nnodes": 1,
    "enable_eplb": True,
    "moe_a2a_backend": "deepep",
    "ep_dispatch_algorithm": "static",
    "ep_num_redundant_experts": 2,
}
MODEL = SimpleNamespace(
    model_path="dummy",
    hf_config=SimpleNamespace(architectures=["Dummy"]),
    dtype=torch.bfloat16,
    quantization=None,
    revision=None,
)


def config() -> Any:
    """The fingerprint of the stand-in model, as loader and daemon state it."""
    parallel = get_parallel()
    fields = {
        name: getattr(parallel, name)
        for name in ("tp_size", "tp_rank", "pp_size", "pp_rank", "dp_size", "moe_dp_size", "moe_dp_rank", "moe_ep_rank")
    }
    others = ("attn_dp_size", "enable_dp_lm_head", "attn_cp_size", "moe_dense_tp_size")
    return protocol.CacheConfig(
        model_path="dummy",
        model_arch="Dummy",
        ep_size=parallel.moe_ep_size,
        moe_a2a_backend="deepep",
        quant_method="",
        quant_config_hash="",
        dtype=str(MODEL.dtype),
        revision="",
        **fields,
        **{name: getattr(parallel, name) for name in others},
        **protocol.compute_env_stamp(),
    )


def live() -> Any:
    """The metadata of this process, as at a start with the layout `ROW`."""
    metadata, _ = sglang_loading.metadata_of(0, 2, ROW, "deepep", "static")
    expert_location.set_global_expert_location_metadata(metadata, allow_overwrite=True)
    shape = expert_location.ModelConfigForExpertLocation(num_layers=sglang_loading.LAYERS, num_logical_experts=4)
    mock.patch.object(
        expert_location.ModelConfigForExpertLocation, "from_model_config", staticmethod(lambda config: shape)
    ).start()
    get_context().override_server_args(**SETTINGS).install()
    get_parallel().override_permanently(
        tp_rank=0, pp_rank=0, moe_ep_rank=0, moe_ep_size=2, moe_dp_rank=0, attn_dp_size=1
    )
    return metadata


def serve(path: str) -> None:
    live()
    if "EPLB_CORE" in os.environ:  # what `python -m eplb_core.adapters.sglang_daemon` does in each daemon
        from eplb_core.adapters.sglang import daemon as sglang_daemon

        sglang_daemon.keep_records(cache.WeightCacheDaemon)
    made = cache.WeightCacheDaemon.__new__(cache.WeightCacheDaemon)
    send = cache.send_msg
    transport = SimpleNamespace(
        name="torch_ipc",
        send_fetch_state_response=lambda conn, **named: send(
            conn, {"status": "ok", "transport_backend": "torch_ipc", **named}
        ),
    )
    vars(made).update(
        socket_path=path,
        ready_path=f"{path}.ready",
        gpu_id=0,
        config=config(),
        state_entries={"w": {"handle": "h"}},
        preloaded_weights_bytes=0,
        transport_backend=transport,
        _running=True,
    )
    made.serve()


def start(path: str, moves: bool) -> dict[str, Any]:
    metadata = live()
    loader = ipc_loader.IpcModelLoader.__new__(ipc_loader.IpcModelLoader)
    vars(loader).update(socket_path=path, weight_cache_mode="client")
    try:
        reply = loader._fetch_from_cache(MODEL, SimpleNamespace(gpu_id=0))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    said: dict[str, Any] = {
        "entries": sorted(reply["entries"]),
        "row": metadata.physical_to_logical_map[0].tolist(),
        "slots of expert 3": metadata.logical_to_all_physical(0, 3),
    }
    if moves:
        other, _ = sglang_loading.metadata_of(0, 2, MOVED, "deepep", "static")
        expert_location.set_global_expert_location_metadata(metadata, allow_overwrite=True)
        from sglang.srt.eplb.expert_location_updater import ExpertLocationUpdater

        torch.cpu.empty_cache = lambda: None  # type: ignore[attr-defined]
        with mock.patch("sglang.srt.eplb.expert_location_updater._update_expert_weights", return_value={}):
            ExpertLocationUpdater().update({}, other, update_layer_ids=[0], nnodes=1, rank=0)
        said["moved to"] = metadata.physical_to_logical_map[0].tolist()
    return said


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    load_plugins()
    if sys.argv[1] == "daemon":
        serve(sys.argv[2])
    else:
        print(json.dumps(start(sys.argv[2], "move" in sys.argv)))
