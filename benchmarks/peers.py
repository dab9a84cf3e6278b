"""The placement policies of others, loaded from their own files without the engines around them.

    python -m benchmarks.peers --into .peers      # or `make peers`: fetch what the package registry has

keeps the few policy files of each wheel and no more. DeepSeek's is on no registry: give a copy of `eplb.py` from
github.com/deepseek-ai/EPLB as `--peer PATH`. A peer that is absent is named in a line, and benchmarks go on without it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
import torch

Ids = npt.NDArray[np.int64]
Call = Callable[[], Ids]

WHEELS = {"vllm": "0.33.0", "sglang": "0.5.23", "vllm-ascend": "0.18.0"}
FOLDERS = {
    "vllm": "vllm/distributed/eplb/policy",
    "sglang": "sglang/srt/eplb/eplb_algorithms",
    "vllm-ascend": "vllm_ascend/eplb/core/policy",
}
DEFAULT_FOLDER = ".peers"


class Policy(NamedTuple):
    """One way to place experts."""

    name: str
    prepare: Callable[[Ids, int, int, Ids], Call]
    """From load `[L, E]`, slots, ranks and the map `[L, P]` in use to a call without arguments that gives a new map.

    What turns the load into the types that the policy takes happens in `prepare` and is not timed.
    """


def add_options(parser: argparse.ArgumentParser) -> None:
    """`--peers-dir` and `--peer`."""
    parser.add_argument("--peers-dir", type=Path, default=Path(DEFAULT_FOLDER), help="what `make peers` fetched")
    parser.add_argument("--peer", type=Path, help="DeepSeek's eplb.py")


def load_all(options: argparse.Namespace) -> list[Policy]:
    """The policies that are there; prints a line for each that is not."""
    policies, absent = load_peers(options.peers_dir, options.peer)
    for line in absent:
        print(f"absent: {line}")
    return policies


def load_peers(folder: Path, deepseek_file: Path | None) -> tuple[list[Policy], list[str]]:
    """The policies that are there, and a line for each that is not."""
    policies: list[Policy] = []
    absent = []
    for peer, load in (("vllm", _vllm), ("sglang", _sglang)):
        if (folder / FOLDERS[peer]).is_dir():
            policies += load(folder)
        else:
            absent.append(f"{peer} {WHEELS[peer]}: not in {folder}; `make peers` fetches it")
    if deepseek_file is not None and deepseek_file.is_file():
        policies.append(_deepseek(deepseek_file))
    else:
        absent.append(f"DeepSeek EPLB: {f'no file {deepseek_file}' if deepseek_file else 'give --peer PATH/eplb.py'}")
    return policies, absent


def _policy(name: str, call: Callable[[torch.Tensor, int, int, torch.Tensor], torch.Tensor]) -> Policy:
    """From a function of load, slots, ranks and the map in use, all as torch has them."""

    def prepare(load: Ids, slots: int, ranks: int, old: Ids) -> Call:
        weight, old_map = torch.from_numpy(load), torch.from_numpy(old.copy())
        return lambda: call(weight, slots, ranks, old_map).numpy()

    return Policy(name, prepare)


def _deepseek(file: Path) -> Policy:
    spec = importlib.util.spec_from_file_location("_peer_deepseek_eplb", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"`--peer` (={file}) must be a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return _policy("DeepSeek EPLB", lambda load, slots, ranks, _: module.rebalance_experts(load, slots, 1, 1, ranks)[0])


def _vllm(folder: Path) -> list[Policy]:
    call = _import_with_stubs(folder, "vllm.distributed.eplb.policy.default").DefaultEplbPolicy.rebalance_experts
    name = f"vLLM {WHEELS['vllm']}"
    return [
        _policy(name, lambda load, slots, ranks, _: call(load, slots, 1, 1, ranks)),
        _policy(f"{name}, given the old map", lambda load, slots, ranks, old: call(load, slots, 1, 1, ranks, old)),
    ]


def _sglang(folder: Path) -> list[Policy]:
    home, name, flat = "sglang.srt.eplb.eplb_algorithms", f"SGLang {WHEELS['sglang']}", {"enable_hierarchical": False}
    one, vec, elastic = (
        _import_with_stubs(folder, f"{home}.{module}").rebalance_experts
        for module in ("deepseek", "deepseek_vec", "elasticity_aware")
    )

    def elasticity_aware(load: torch.Tensor, slots: int, ranks: int, old: torch.Tensor) -> torch.Tensor:
        alive = torch.ones(ranks, dtype=torch.int32)
        ids: torch.Tensor = elastic(load, slots, 1, 1, ranks, **flat, active_ranks=alive)[0]
        return ids

    return [
        _policy(f"{name} deepseek", lambda load, slots, ranks, _: one(load, slots, 1, 1, ranks, **flat)[0]),
        _policy(
            f"{name} deepseek_vec",
            lambda load, slots, ranks, _: vec(load[None], slots, slots // ranks, None, 1, **flat)[0].long(),
        ),
        _policy(f"{name} elasticity_aware", elasticity_aware),
    ]


def flashlb(folder: Path) -> Callable[[int, int], Any] | str:
    """From ranks and windows to remember to vllm-ascend's FlashLB, which has a memory; or why it is absent."""
    name = f"vllm-ascend {WHEELS['vllm-ascend']}"
    if not (folder / FOLDERS["vllm-ascend"]).is_dir():
        return f"{name}: not in {folder}; `make peers` fetches it"
    compiler: Any = numba
    njit = compiler.njit
    # Its cache would name modules that are not there in the next process.
    compiler.njit = lambda *function, **options: njit(*function, **{**options, "cache": False})
    try:
        policy = _import_with_stubs(folder, "vllm_ascend.eplb.core.policy.policy_flashlb").FlashLB
    except ImportError as error:  # it needs scipy
        return f"{name}: {error}"
    finally:
        compiler.njit = njit

    def make(ranks: int, windows: int) -> Any:
        return policy(types.SimpleNamespace(ep_worldsize=ranks, num_die_per_host=8, max_stage_window=windows))

    return make


def _import_with_stubs(folder: Path, name: str) -> Any:
    """Import one module of a package whose own `__init__` files, and with them the engine, are not run.

    The stand-ins for its parents leave `sys.modules` again, so that an installed engine stays importable.
    """
    parts = name.split(".")
    parents = [".".join(parts[:n]) for n in range(1, len(parts))]
    saved = {key: module for key, module in sys.modules.items() if key.split(".")[0] == parts[0]}
    for key in saved:
        del sys.modules[key]
    try:
        for parent in parents:
            stub = types.ModuleType(parent)
            stub.__path__ = [str(folder.joinpath(*parent.split(".")))]
            sys.modules[parent] = stub
        return importlib.import_module(name)
    finally:
        for key in [key for key in sys.modules if key.split(".")[0] == parts[0]]:
            del sys.modules[key]
        sys.modules.update(saved)


def fetch(into: Path) -> None:
    """Download each wheel with pip, keep its policy files."""
    for peer, version in WHEELS.items():
        if (into / FOLDERS[peer]).is_dir():
            print(f"{peer} {version}: there already")
            continue
        with tempfile.TemporaryDirectory() as scratch:
            print(f"{peer} {version}: downloading; of some hundred MB only the policy files stay", flush=True)
            requirement = [f"{peer}=={version}", "--no-deps", "--only-binary=:all:", "--dest", scratch]
            done = subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *requirement], check=False)
            if done.returncode:
                print(f"{peer} {version}: pip found no wheel for this machine; benchmarks go on without it")
                continue
            (wheel,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                for member in archive.namelist():
                    if member.startswith(FOLDERS[peer] + "/") and member.endswith(".py"):
                        archive.extract(member, into)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description="Fetch the peers' policy files.")
    parser.add_argument("--into", type=Path, default=Path(DEFAULT_FOLDER))
    fetch(parser.parse_args(argv).into)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
