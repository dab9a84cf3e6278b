"""A process in which vLLM's modules stand, with what the plug-in looks for in them; and one for each of two ranks."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest

from eplb_core.adapters import hooking, warm
from eplb_core.adapters.vllm import plugin as vllm
from eplb_core.loading.agreement import LocalAgreement
from tests.adapters.fakes import modules
from tests.adapters.vllm.fakes import POLICY, Default, coordinator, engine_module


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Modules of vLLM's names with what the plug-in looks for in them."""
    modules(monkeypatch, "vllm", __version__="9.9.9")
    for name in (POLICY, f"{POLICY}.default"):
        modules(monkeypatch, name, DefaultEplbPolicy=Default)
    module = engine_module()
    monkeypatch.setitem(sys.modules, "vllm.distributed.eplb.eplb_state", module)
    monkeypatch.setattr(vllm, "_active", [])
    monkeypatch.setattr(warm, "_ready", [0.0])  # kernels are compiled when they are used
    return module


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The engine on each of two ranks; a group of theirs is known by its rank's number."""
    members = LocalAgreement.group(2)
    monkeypatch.setattr(hooking, "gather_over", lambda group: hooking.gather_by(members[group.rank]))
    engines = [engine_module() for _ in range(2)]
    for rank, engine in enumerate(engines):
        engine.get_eplb_group = engine.get_ep_group = partial(coordinator, rank)
    return engines
