"""What vLLM's hooks share: what is in effect, and the engine's groups of ranks."""

from __future__ import annotations

import hashlib
import importlib
from typing import Any, NamedTuple

import torch

from eplb_core.adapters.vllm.policy import PolicyOptions


class Active(NamedTuple):
    """What the plug-in changed in this process."""

    parts: tuple[str, ...]
    policy: type | None
    options: PolicyOptions
    dispatch: str
    asked: tuple[str, ...] = ()
    """Parts that were not switched off, whether they fit this vLLM or not."""


def version() -> str:
    """Of the vLLM that is installed here."""
    return str(getattr(importlib.import_module("vllm"), "__version__", "of unknown version"))


def cpu_group_of(state_module: Any, name: str, ranks: int) -> Any:
    """The CPU group of vLLM's coordinator of that name, if there is one, of so many ranks, and of more than one."""
    try:
        group = getattr(state_module, name)().cpu_group
    except (AttributeError, AssertionError):  # no such coordinator, or none was made in this process
        return None
    return group if group is not None and group.size() == ranks > 1 else None


def digest(*tensors: torch.Tensor) -> str:
    """Return a hash of their values."""
    return hashlib.sha256(b"".join(t.cpu().long().contiguous().numpy().tobytes() for t in tensors)).hexdigest()
