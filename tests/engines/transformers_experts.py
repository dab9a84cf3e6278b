"""What `ExpertStore.of_module` says of the experts and the whole blocks of every family of Transformers.

Prints one line a module, and as the last one a JSON object `{"family class": answer}`.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

from eplb_core import ExpertStore

E = 8
COUNTS = (
    "num_experts num_local_experts n_routed_experts moe_num_experts",  # E
    "num_experts_per_tok num_experts_per_token moe_k moe_topk moe_top_k num_hidden_layers n_group",  # 2
    "n_shared_experts num_shared_experts moe_num_shared_experts topk_group",  # 1
    "hidden_size d_model",  # 48
    "intermediate_size moe_intermediate_size ffn_hidden_size expert_ffn_hidden_size d_ff intermediate_size_mlp "
    "shared_expert_intermediate_size moe_shared_expert_intermediate_size",  # 24
)
SMALL = {name: value for names, value in zip(COUNTS, (E, 2, 1, 48, 24), strict=True) for name in names.split()} | {
    "vocab_size": 64,
    "zero_expert_num": 0,
}
MODULES = re.compile(r"(Experts|MoE|Moe|MoeBlock|MoEBlock|MoELayer|SparseMLP|MoeBlock|FFN)$")


def small(config: Any) -> Any:
    """The same configuration with layers of a few numbers."""
    for name, value in SMALL.items():
        if hasattr(config, name):
            setattr(config, name, value)
    for part in list(vars(config).values()):
        if isinstance(part, PretrainedConfig):
            small(part)
    return config


def modules_of(family: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """Every module of experts of a family that its configurations can make."""
    code, names = (
        importlib.import_module(f"transformers.models.{family}.{kind}_{family}")
        for kind in ("modeling", "configuration")
    )
    configs = [kind for kind in vars(names).values() if inspect.isclass(kind) and issubclass(kind, PretrainedConfig)]
    for kind in vars(code).values():
        if inspect.isclass(kind) and kind.__module__ == code.__name__ and MODULES.search(kind.__name__):
            made = next(filter(None, (attempt(kind, config) for config in configs)), None) or by_sizes(kind)
            if made is not None:
                yield kind.__name__, made


def attempt(kind: Any, config: Any) -> torch.nn.Module | None:
    for more in ({}, {"layer_idx": 1}, {"layer_idx": 0}):
        try:
            made = kind(small(config()), **more)
        except Exception:  # not the configuration of this module
            continue
        return made if isinstance(made, torch.nn.Module) else None
    return None


def by_sizes(kind: Any) -> torch.nn.Module | None:
    try:
        return kind(E, 48, 24)  # type: ignore[no-any-return]
    except Exception:
        return None


def answer(module: torch.nn.Module, **options: Any) -> list[str] | str:
    """Names and shapes of what is in the store, or the refusal."""
    try:
        store = ExpertStore.of_module(module, E, **options)
    except ValueError as error:
        return str(error)
    return [f"{name} {list(store.tensor_row(name, 0).shape)}" for name in store.names]


def main() -> None:
    warnings.simplefilter("ignore")
    folder = Path(transformers.__file__).parent / "models"
    families = sorted(
        file.parent.name
        for file in folder.glob("*/modeling_*.py")
        if re.search(r"class \w*Experts\(", file.read_text("utf-8")) and file.stem == f"modeling_{file.parent.name}"
    )
    said: dict[str, Any] = {}
    for family in families:
        for name, module in modules_of(family):
            parts = {path for path, part in module.named_modules() if type(part).__name__.endswith("Experts") and path}
            said[f"{family} {name}"] = answer(module)
            if parts:
                held = [path for path, _ in module.named_parameters()] + [path for path, _ in module.named_buffers()]
                rest = [path for path in held if not any(path.startswith(f"{part}.") for part in parts)]
                said[f"{family} {name}, experts named"] = answer(module, ignore=rest)
    for each, what in said.items():
        print(f"{each:70} {what if isinstance(what, str) else ', '.join(what)}"[:200])
    print(json.dumps({"version": transformers.__version__, "said": said}))


if __name__ == "__main__":
    main()
