"""The real vLLM server under load over HTTP: EPLB off, vLLM's own, and with the plug-in over each transport.

    python -m benchmarks.real_vllm --json real_vllm.json                    # two GPUs: TP 2 with EP
    python -m benchmarks.real_vllm --one-gpu --repeats 1 --json one.json    # two ranks on one, NCCL >= 2.30

Runs in an environment that has vLLM and eplb_core; the model is made on the spot. Topics drift, so that experts move
while the server answers. Every slot's weights are compared bit for bit with the expert that the live map says, at two
points of the load and after it. Servers run in turns, each anew. Where NCCL is not the one that torch brings, name it
by LD_PRELOAD and VLLM_NCCL_SO_PATH.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import real_engines

REDUNDANT = 8
PLUG_IN = {"EPLB_CORE": "vllm"}
SYNC, ASYNC = {"use_async": False}, {"use_async": True}
SYNC_NCCL = {**SYNC, "communicator": "torch_nccl"}  # vLLM refuses it for asynchronous moves


def _over(transport: str) -> dict[str, str]:
    return {**PLUG_IN, "EPLB_CORE_OPTIONS": f"transport={transport}"}


RUNS: dict[str, tuple[Any, dict[str, str]]] = {
    "off": (None, {}),
    "own_sync": (SYNC, {}),
    "own_sync_nccl": (SYNC_NCCL, {}),
    "own_async": (ASYNC, {}),
    "plugin_sync": (SYNC, PLUG_IN),
    "plugin_sync_nccl": (SYNC_NCCL, PLUG_IN),
    "plugin_async": (ASYNC, PLUG_IN),
    "plugin_sync_cuda_ipc": (SYNC, _over("cuda_ipc")),
    "plugin_async_cuda_ipc": (ASYNC, _over("cuda_ipc")),
    "plugin_async_nixl": (ASYNC, _over("nixl")),
}
# Nothing is fetched, no kernel is built for what this model lacks, and NVLink multicast stays off.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "PYTHONUNBUFFERED": "1",
}


def command(options: argparse.Namespace, eplb: Any, port: int) -> list[str]:
    """The words that start a server."""
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(options.model)]
    words += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "model"]
    words += ["--tensor-parallel-size", str(real_engines.RANKS), "--enable-expert-parallel"]
    words += ["--distributed-executor-backend", "mp", "--dtype", "bfloat16", "--seed", "0"]
    words += ["--max-model-len", "2048", "--max-num-batched-tokens", "2048", "--max-num-seqs", str(options.at_once)]
    words += ["--gpu-memory-utilization", "0.3", "--kv-cache-memory-bytes", str(2**32)]
    words += ["--no-enable-prefix-caching", "--disable-custom-all-reduce"]
    if options.one_gpu:  # graphs would be captured while the other rank's kernels wait
        words += ["--enforce-eager"]
    else:
        sizes = [size for size in (1, 2, 4, 8, 16, 32, 48, 64, 96, 128) if size <= options.at_once]
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
        words += ["--compilation-config", json.dumps(graphs)]
    if eplb is not None:
        told = {"window_size": options.interval, "step_interval": options.interval, "log_balancedness": True}
        told |= {"num_redundant_experts": REDUNDANT, "log_balancedness_interval": 16, **eplb}
        words += ["--enable-eplb", "--eplb-config", json.dumps(told)]
    return words


ENGINE = real_engines.Engine(
    name="vLLM",
    runs=RUNS,
    command=command,
    environment=ENVIRONMENT,
    rebalance=r"Rearranging experts \(?a?sync mode\)? \.\.\.",
    balance=r"EPLB step: .*avg_tokens=([\d.]+), max_tokens=(\d+)",
)


def main(argv: Sequence[str] | None = None) -> int:
    return real_engines.main(ENGINE, "real_vllm", __doc__, argv)


if __name__ == "__main__":
    raise SystemExit(main())
