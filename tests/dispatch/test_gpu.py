"""The Triton kernels against the host's, bit for bit: on a CUDA device where there is one, else interpreted."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from eplb_core import DispatchTables, ExpertLayout, LoadCounter, replica_shares
from eplb_core._arrays import FloatArray
from eplb_core.dispatch.constants import MODES, SOLVED_MODES, TAG
from eplb_core.dispatch.ops import LayerTables, topk_to_slots
from tests.cases import random_layout

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_CUDA = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if ON_CUDA else "cpu"
needs_kernels = pytest.mark.skipif(
    not (HAS_TRITON and (ON_CUDA or INTERPRETED)), reason="needs triton, and a CUDA device or TRITON_INTERPRET=1"
)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON or INTERPRETED, reason="needs triton; or is in the run that this one starts")
def test_all_kernels_run_interpreted() -> None:
    """Triton decides at import whether it compiles or interprets, so this file runs once more in its own process."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", __file__]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    assert " passed" in run.stdout


def map_by_kernels(
    ids: torch.Tensor,
    t: LayerTables,
    num_tokens: torch.Tensor | None,
    num_shared: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """As `topk_to_slots`, with the kernels also on CPU tensors, which they take when interpreted."""
    if ON_CUDA:
        return topk_to_slots(ids, t, num_tokens=num_tokens, num_shared=num_shared, out=out)
    from eplb_core.dispatch import gpu

    rest = (num_tokens, num_shared, t.num_experts, t.num_entries)
    if t.mode in SOLVED_MODES:
        gpu.count_batch(ids, t.batch, t.blocks, t.count, t.state, t.errors, num_tokens, num_shared, t.rank, t.debug)
        if t.all_reduce is not None:
            t.all_reduce(t.batch)
        solver = (t.runs, t.span, t.shared, t.arm_rank, t.on_rank)
        gpu.solve_batch(t.batch, t.bounds, t.blocks, *solver, ids, num_shared, t.rank, t.mode)
        gpu.map_solved(ids, out, t.table, t.bounds, t.blocks, *rest, t.debug)
    elif t.mode == "near":
        near = (t.table, t.settings, t.count, t.state, t.errors, t.sends, *rest, t.num_nodes, t.debug)
        gpu.map_near(ids, out, *near)
    else:
        gpu.map(ids, out, t.table, t.settings, t.draws, t.count, t.state, t.errors, *rest, t.mode, t.debug)
    return out


def some_ids(rows: int, columns: int, experts: int, seed: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((rows, experts)) ** 4, axis=1)[:, :columns]
    ids[rng.random(ids.shape) < 0.1] = -1
    return torch.tensor(ids, dtype=torch.int32)


def compare(
    layout: ExpertLayout,
    mode: str,
    rows: int,
    *,
    columns: int = 4,
    num_shared: int = 0,
    limit: int | None = None,
    dtype: torch.dtype = torch.int32,
    out_dtype: torch.dtype = torch.int32,
    calls: int = 2,
    rank: int = 3,
    ids: torch.Tensor | None = None,
    shares: FloatArray | None = None,
    pair_every: int = 0,
) -> None:
    """Same slots, counts, bounds and draws from both, call after call."""
    experts, layer = layout.num_experts, layout.num_layers - 1
    ids = (some_ids(rows, columns, experts, rows) if ids is None else ids).to(dtype)
    others = torch.tensor(np.random.default_rng(1).integers(0, 50, (layout.topology.num_ranks, experts)))
    others[rank] = 0
    pairs: dict[str, Any] = {"pairs": pair_every > 0, "pair_every": max(pair_every, 1)}
    plain_load = LoadCounter(layout.num_layers, experts, windows=2, **pairs)
    kernel_load = LoadCounter(layout.num_layers, experts, windows=2, device=DEVICE, **pairs)
    reduced: list[torch.Tensor] = []

    def all_reduce(batch: torch.Tensor) -> None:
        reduced.append(batch.cpu().clone())
        batch.add_(others.to(batch))

    make = {"rank": rank, "mode": mode, "seed": 11, "all_reduce": all_reduce, "shares": shares}
    plain = DispatchTables(layout, load=plain_load, **make)  # type: ignore[arg-type]
    kernels = DispatchTables(layout, load=kernel_load, device=DEVICE, **make)  # type: ignore[arg-type]
    tokens = None if limit is None else torch.tensor([limit], dtype=torch.int32)
    for _ in range(calls):
        expected = topk_to_slots(
            ids,
            plain.layer(layer),
            num_tokens=tokens,
            num_shared=num_shared,
            out=torch.empty(ids.shape, dtype=out_dtype),
        )
        out = torch.full(ids.shape, 77, dtype=out_dtype, device=DEVICE)
        on_device = None if tokens is None else tokens.to(DEVICE)
        given = map_by_kernels(ids.to(DEVICE), kernels.layer(layer), on_device, num_shared, out)
        assert torch.equal(given.cpu(), expected)
        for a, b in zip(reduced[::2], reduced[1::2], strict=True):
            assert torch.equal(a, b)
        reduced.clear()
    assert torch.equal(kernel_load._rows.cpu(), plain_load._rows)
    for name in ("_bounds", "_draws", "_sends", "_batch", "_packed", "_settings"):
        mine, theirs = getattr(kernels, name).cpu(), getattr(plain, name)
        assert torch.equal(mine, theirs), name


@needs_kernels
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [1, 37, 400])
def test_kernels_agree_with_the_host(mode: str, rows: int) -> None:
    compare(random_layout(layers=2), mode, rows)


@needs_kernels
@pytest.mark.parametrize(
    ("mode", "rows", "every"), [("weighted", 520, 2), ("near", 20, 1), ("quota", 20, 5), ("fake", 20, 1)]
)
def test_kernels_count_the_same_pairs(mode: str, rows: int, every: int) -> None:
    """520 rows: fewer than half of them are counted, in more than one round."""
    layout = random_layout(layers=2, nodes=2)
    ids = torch.tensor(np.random.default_rng(rows).integers(-1, layout.num_experts, (rows, 6)))  # some stand twice
    compare(
        layout,
        mode,
        rows,
        columns=6,
        num_shared=1,
        limit=rows - 3,
        calls=1 if rows > 500 else 2,
        ids=ids,
        pair_every=every,
    )


@needs_kernels
def test_pairs_of_ids_that_are_written_over_are_counted_before() -> None:
    layout = random_layout(layers=1, nodes=2)
    loads = [LoadCounter(1, layout.num_experts, device=DEVICE, pairs=True, pair_every=1) for _ in range(2)]
    ids = some_ids(60, 4, layout.num_experts, 0).to(DEVICE)
    for load in loads:
        tables = DispatchTables(layout, rank=1, mode="weighted", load=load, device=DEVICE).layer(0)
        map_by_kernels(ids, tables, None, 0, torch.empty_like(ids) if load is loads[0] else ids)
    assert torch.equal(loads[0]._rows, loads[1]._rows)
    assert (ids >= layout.num_experts).any()
    for load in loads:
        load.roll()
        assert not load._rows[:, 1].any()
        assert load.snapshot_pairs().numpy().sum() > 0


@needs_kernels
@pytest.mark.parametrize("nodes", [1, 3, 8])
def test_kernels_find_the_same_sets_of_nodes(nodes: int) -> None:
    layout = random_layout(layers=1, experts=40, slots=72, ranks=24, nodes=nodes)
    shares = replica_shares(layout, np.random.default_rng(nodes).lognormal(0, 1, (1, 40)))
    compare(layout, "near", 70, columns=6, limit=63, shares=shares)


@needs_kernels
@pytest.mark.parametrize("mode", MODES)
def test_kernels_agree_on_masks_shared_columns_and_types(mode: str) -> None:
    layout = random_layout(layers=1, experts=20, slots=36, ranks=6, nodes=2)
    compare(layout, mode, 50, num_shared=1, limit=41, dtype=torch.int64, out_dtype=torch.int32)
    compare(layout, mode, 50, num_shared=2, limit=0, dtype=torch.int32, out_dtype=torch.int64)


@needs_kernels
@pytest.mark.parametrize("mode", MODES)
def test_kernels_agree_where_blocks_are_large(mode: str) -> None:
    """More than 8,192 elements go through histograms; more than 32,768 give a block several parts."""
    compare(random_layout(layers=1), mode, 8300 if mode in SOLVED_MODES else 2100, calls=1)


@needs_kernels
@pytest.mark.parametrize("mode", ["random", "row", "weighted"])
def test_kernels_agree_on_unequal_shares(mode: str) -> None:
    layout = random_layout(layers=2)
    load = np.random.default_rng(2).integers(1, 1000, (2, layout.num_experts))
    compare(layout, mode, 300, shares=replica_shares(layout, load))


@needs_kernels
@pytest.mark.parametrize("mode", ["row", "quota"])
def test_kernels_agree_on_experts_with_many_replicas(mode: str) -> None:
    """The solver takes a way of its own where no expert has more than eight, the usual case."""
    rows = [[0] * 21 + [1] * 9 + [2, 3, 4, 5, 6, 7]]
    layout = ExpertLayout(rows, 8, topology=random_layout(ranks=4, experts=4, slots=4, nodes=1).topology)
    compare(layout, mode, 200, columns=3)


@needs_kernels
@pytest.mark.parametrize("mode", SOLVED_MODES)
def test_kernels_agree_on_odd_layouts(mode: str) -> None:
    pair = ExpertLayout([[0, 0, 1, 2, 1, -1]], 3, topology=random_layout(ranks=3, experts=3, slots=3, nodes=1).topology)
    compare(pair, mode, 40, columns=2, rank=1)
    full = random_layout(layers=1, experts=5, slots=35, ranks=7, nodes=1)
    compare(full, mode, 40, columns=2)
    nothing = random_layout(layers=1, experts=8, slots=8, ranks=4, nodes=1)
    compare(nothing, mode, 40, columns=2)
    compare(full, mode, 3, columns=2, ids=torch.full((3, 2), -1))


@needs_kernels
def test_kernels_take_strided_ids_in_place() -> None:
    layout = random_layout(layers=1)
    ids = some_ids(30, 4, 32, 0)
    expected = DispatchTables(layout, mode="weighted").map(0, ids)
    wide = torch.full((30, 8), 99, dtype=torch.int32, device=DEVICE)
    view = wide[:, 1:8:2]
    view.copy_(ids)
    t = DispatchTables(layout, mode="weighted", device=DEVICE).layer(0)
    map_by_kernels(view, t, None, 0, view)
    assert torch.equal(view.cpu(), expected)
    assert bool((wide[:, ::2] == 99).all())


@needs_kernels
@pytest.mark.parametrize("mode", ["row", "quota"])
def test_debugging_kernels_note_ids_out_of_range_and_mapped_twice(mode: str) -> None:
    layout = random_layout(layers=1)
    tables = DispatchTables(layout, mode=mode, device=DEVICE, debug=True)  # type: ignore[arg-type]
    ids = torch.tensor([[0, 5], [-1, 31]], dtype=torch.int32, device=DEVICE)
    tagged = map_by_kernels(ids, tables.layer(0), None, 0, torch.empty_like(ids))
    tables.check()
    assert torch.equal(tables.untag(tagged).cpu(), DispatchTables(layout, mode=mode).map(0, ids.cpu()))  # type: ignore[arg-type]
    assert bool((tagged[ids >= 0] >= TAG).all())
    again = map_by_kernels(tagged, tables.layer(0), None, 0, torch.empty_like(ids))
    assert bool((again == -1).all())
    with pytest.raises(IndexError, match="3 ids were mapped twice"):
        tables.check()
    bad = torch.tensor([[32, -2], [40, 3]], dtype=torch.int32, device=DEVICE)
    mapped = map_by_kernels(bad, tables.layer(0), None, 0, torch.empty_like(bad))
    assert mapped.flatten().tolist()[:3] == [-1, -1, -1]
    with pytest.raises(IndexError, match=r"3 ids were neither -1 nor a logical expert in \[0, 32\)"):
        tables.check()
    tables.check()


@needs_kernels
def test_rolling_kernel_agrees_with_the_torch_path() -> None:
    from eplb_core.dispatch import gpu

    plain, other = LoadCounter(3, 5, windows=2), LoadCounter(3, 5, windows=2, device=DEVICE)
    for _ in range(7):
        for counter in (plain, other):
            counter.count.add_(torch.arange(5, device=counter.device) << 40)
        plain.roll()
        gpu.roll(other.count, other.state)
        assert torch.equal(plain.count, other.count.cpu())
        assert torch.equal(plain.state, other.state.cpu())
