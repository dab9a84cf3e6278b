"""What SGLang's functions look up beside their arguments, and what the environment has asked the plug-in for."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, NamedTuple

from eplb_core.adapters.balancers import Balancers

options: dict[str, Any] = {}
"""Of `EPLB_CORE_OPTIONS`, by name."""
registered: list[str] = []
"""Functions of SGLang that the plug-in has asked to change."""
asked: list[str] = []
"""Parts of the plug-in that were not switched off, whether they fit this SGLang or not."""
bypassed: ContextVar[bool] = ContextVar("bypassed", default=False)
"""While it is set, placement is SGLang's own: ranks have not agreed on ours."""


balancers = Balancers()
"""What mode "auto" remembers of the load."""


class Context(NamedTuple):
    """Of the process that asks."""

    narrows: bool
    """Ranks dispatch their own tokens, so that each narrows its lists."""
    prefer_same_node: bool
    num_nodes: int


def context() -> Context:  # pragma: no cover  needs SGLang: tests/engines
    """As the engine has it now."""
    from sglang.srt.eplb import expert_location
    from sglang.srt.runtime_context import get_exec, get_parallel

    return Context(
        get_exec().moe.moe_a2a_backend != "none",
        expert_location._prefer_same_node_experts(),
        get_parallel().nnodes,
    )


def rank() -> int | None:
    """This process's rank; None before there are groups."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else None


def live_metadata() -> Any:  # pragma: no cover  as above
    """The metadata in use, or None."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    return get_global_expert_location_metadata()


def cpu_group() -> Any:  # pragma: no cover  needs SGLang: tests/engines
    """The engine's own group of all its ranks on the CPU; the default group where that is gloo; or None."""
    try:
        from sglang.srt.runtime_context import get_parallel

        return get_parallel().world_group.cpu_group
    except Exception:
        import torch

        own = torch.distributed.get_backend() == "gloo"
        return torch.distributed.group.WORLD if own else None
