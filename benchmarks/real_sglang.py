"""The real SGLang server under load over HTTP: EPLB off, SGLang's own, and with the plug-in over each transport.

    python -m benchmarks.real_sglang --json real_sglang.json                # two GPUs: TP 2 with EP 2

Runs in an environment that has SGLang and eplb_core, as `benchmarks.real_vllm` does for vLLM: the same model, load and
checks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import real_engines

REDUNDANT = 16
PLUG_IN = {"EPLB_CORE": "sglang"}
OWN: tuple[str, ...] = ()

RUNS: dict[str, tuple[Any, dict[str, str]]] = {
    "off": (None, {}),
    "own": (OWN, {}),
    "own_by_layer": (("--eplb-rebalance-layers-per-chunk", "1"), {}),
    "plugin": (OWN, PLUG_IN),
    "plugin_cuda_ipc": (OWN, {**PLUG_IN, "EPLB_CORE_OPTIONS": "transport=cuda_ipc"}),
    "plugin_nixl": (OWN, {**PLUG_IN, "EPLB_CORE_OPTIONS": "transport=nixl"}),
    "plugin_sglang_moves": (OWN, {**PLUG_IN, "EPLB_CORE_OFF": "moves"}),
}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "SGLANG_HOST_IP": "127.0.0.1",
    "HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "PYTHONUNBUFFERED": "1",
}


def command(options: argparse.Namespace, eplb: Any, port: int) -> list[str]:
    """The words that start a server.

    Raises:
        ValueError: two ranks on one GPU.
    """
    if options.one_gpu:
        raise ValueError("`--one-gpu` must be left out: SGLang gives each rank a GPU of its own (`gpu_id_step` >= 1)")
    ranks = str(real_engines.RANKS)
    words = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(options.model)]
    words += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "model"]
    words += ["--tp-size", ranks, "--ep-size", ranks, "--dtype", "bfloat16", "--random-seed", "0"]
    words += ["--context-length", "2048", "--chunked-prefill-size", "2048", "--mem-fraction-static", "0.3"]
    words += ["--max-running-requests", str(options.at_once), "--disable-radix-cache", "--skip-server-warmup"]
    words += ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"]
    words += ["--moe-runner-backend", "triton", "--moe-a2a-backend", "none", "--disable-custom-all-reduce"]
    if eplb is not None:
        words += ["--enable-eplb", "--ep-num-redundant-experts", str(REDUNDANT), "--ep-dispatch-algorithm", "dynamic"]
        words += ["--eplb-rebalance-num-iterations", str(options.interval)]
        words += ["--expert-distribution-recorder-mode", "stat"]
        words += ["--expert-distribution-recorder-buffer-size", str(options.interval), *eplb]
    return words


ENGINE = real_engines.Engine(
    name="SGLang",
    runs=RUNS,
    command=command,
    environment=ENVIRONMENT,
    rebalance=r"rebalance end",
    logs=real_engines.RANKS,
)


def main(argv: Sequence[str] | None = None) -> int:
    return real_engines.main(ENGINE, "real_sglang", __doc__, argv)


if __name__ == "__main__":
    raise SystemExit(main())
