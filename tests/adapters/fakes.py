"""Stand-ins for what engines have: their ranks as threads, their modules, and SGLang's metadata."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import eplb_core as eplb
from eplb_core.adapters.sglang.maps import Picks, static_table
from tests.loading.worlds import on_threads

EXPERTS = 4


def on_ranks(work: Callable[[int], Any], ranks: int = 2) -> list[Any]:
    """`work(rank)` for all ranks at once, each on a thread; the first error is raised."""
    answers = on_threads([partial(work, rank) for rank in range(ranks)])
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers


@contextmanager
def group_of_one(folder: Path) -> Iterator[Any]:
    """While it runs, torch's default group is of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def modules(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> Any:
    """Put a module of this dotted name and its parents in place; those that are there stay."""
    module: Any = None
    parts = name.split(".")
    for number in range(1, len(parts) + 1):
        path, parent = ".".join(parts[:number]), module
        module = sys.modules.get(path) or ModuleType(path)
        monkeypatch.setitem(sys.modules, path, module)
        if parent is not None:
            setattr(parent, parts[number - 1], module)
    vars(module).update(contents)
    return module


def metadata_of(rows: list[list[int]], rank: int = 0, *, ranks: int = 2, static: bool = True) -> Any:
    """SGLang's object for this layout: all maps that a rank has, lists padded to all slots."""
    layout = eplb.ExpertLayout(rows, EXPERTS, topology=eplb.Topology(ranks))
    l2p = torch.tensor(layout.logical_to_physical_map)
    lists = torch.nn.functional.pad(l2p, (0, layout.num_slots - l2p.shape[2]), value=-1)
    return SimpleNamespace(
        physical_to_logical_map=torch.tensor(rows),
        physical_to_logical_map_cpu=torch.tensor(rows),
        logical_to_all_physical_map=lists,
        logical_to_all_physical_map_cpu=lists.clone(),
        logical_to_all_physical_map_num_valid=torch.tensor(layout.replica_count),
        logical_to_rank_dispatch_physical_map=static_table(layout, Picks(rank)) if static else None,
        num_logical_experts=EXPERTS,
        ep_size=ranks,
    )
