"""Weights that outlive engines: a weight host for each rank, all in one process here."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection

import torch

import eplb_core as eplb
from benchmarks.engine.engine import Setup, fingerprint_of, first_layout
from benchmarks.engine.weights import empty_experts, load_experts


def keep(pipe: Connection, setup: Setup, ranks: int) -> None:
    """Load every rank's experts, share them, and stay until the pipe ends."""
    torch.set_num_threads(1)
    folder = setup.folder if setup.weight_hosts is None else setup.weight_hosts
    layout = first_layout(setup, eplb.Topology(ranks))

    def load(_: eplb.ExpertLayout | None, rank: int) -> dict[str, torch.Tensor]:
        """The engine's own loader, whole rank."""
        tensors = empty_experts(setup.config, setup.slots_per_rank, dtype=setup.dtype, device=setup.device)
        load_experts(setup.checkpoint(0), setup.config, tensors, layout, rank)
        return {f"{layer}.{name}": tensor for layer, row in enumerate(tensors) for name, tensor in row.items()}

    with contextlib.ExitStack() as hosts:
        for rank in range(ranks):
            path = folder / f"rank{rank}.sock"
            hosts.enter_context(eplb.WeightHost(path, load, config=fingerprint_of(setup), layout=layout, rank=rank))
        pipe.send("ready")
        with contextlib.suppress(EOFError):
            pipe.recv()


@contextlib.contextmanager
def weight_hosts(setup: Setup, ranks: int) -> Iterator[None]:
    """Hosts for all ranks, in a process of their own, while the block runs."""
    context = multiprocessing.get_context("forkserver")
    pipe, theirs = context.Pipe()
    process = context.Process(target=keep, args=(theirs, setup, ranks), daemon=True)
    process.start()
    theirs.close()
    try:
        pipe.recv()
        yield
    finally:
        pipe.close()
        process.join(10)
        process.kill()
