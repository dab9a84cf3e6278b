"""What only a CUDA device can show: captured graphs, installs between replays, compilation, no hidden waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.testing

from eplb_core import DispatchTables, LoadCounter, pair_counts, replica_shares, topk_to_slots
from eplb_core.dispatch.constants import MODES
from tests.cases import random_layout
from tests.dispatch.test_gpu import some_ids

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def capture(function: object) -> torch.cuda.CUDAGraph:
    """Run twice aside, so that everything is compiled, then capture."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            function()  # type: ignore[operator]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()  # type: ignore[operator]
    return graph


@pytest.mark.parametrize("mode", MODES)
def test_a_captured_graph_replays_with_installed_rows_and_counts_every_replay(mode: str) -> None:
    """FAULTS B6."""
    old, new = random_layout(seed=1), random_layout(seed=2)
    load = LoadCounter(4, 32, windows=2, device="cuda")
    tables = DispatchTables(old, rank=1, mode=mode, load=load, device="cuda")  # type: ignore[arg-type]
    ids, out = some_ids(64, 4, 32, 0).cuda(), torch.empty(64, 4, dtype=torch.int64, device="cuda")
    limit = torch.tensor([64], dtype=torch.int32, device="cuda")
    t = tables.layer(2)
    load.recording(False)
    graph = capture(lambda: topk_to_slots(ids, t, num_tokens=limit, out=out))
    load.recording(True)
    reference = DispatchTables(old, rank=1, mode=mode)  # type: ignore[arg-type]
    if mode == "random":  # calls before the capture have drawn
        reference._draws.copy_(tables._draws.cpu())
    graph.replay()
    assert torch.equal(out.cpu(), reference.map(2, ids.cpu().long()))
    tables.install(new, layers=[2])
    reference.install(new, layers=[2])
    graph.replay()
    assert torch.equal(out.cpu(), reference.map(2, ids.cpu().long()))
    limit.fill_(10)
    graph.replay()
    assert bool((out[10:] == -1).all())
    valid = int((ids >= 0).sum()) * 2 + int((ids[:10] >= 0).sum())
    assert int(load.count[2].sum()) == valid


def test_a_replayed_graph_draws_anew() -> None:
    t = DispatchTables(random_layout(), mode="random", device="cuda").layer(0)
    ids, out = some_ids(512, 4, 32, 0).cuda(), torch.empty(512, 4, dtype=torch.int32, device="cuda")
    graph = capture(lambda: topk_to_slots(ids, t, out=out))
    answers = []
    for _ in range(3):
        graph.replay()
        answers.append(out.clone())
    assert not torch.equal(answers[0], answers[1])
    assert not torch.equal(answers[1], answers[2])
    assert t.draws.tolist()[1] == 0


def test_rolling_and_snapshots_run_on_the_device() -> None:
    load = LoadCounter(4, 32, windows=3, device="cuda")
    plain = LoadCounter(4, 32, windows=3)
    layout = random_layout()
    tables = DispatchTables(layout, mode="weighted", load=load, device="cuda")
    reference = DispatchTables(layout, mode="weighted", load=plain)
    for size in range(1, 6):
        ids = some_ids(size, 4, 32, size)
        for layer in range(4):
            tables.map(layer, ids.cuda())
            reference.map(layer, ids)
        load.roll()
        plain.roll()
    np.testing.assert_array_equal(load.snapshot().numpy(), plain.snapshot().numpy())


@pytest.mark.parametrize("mode", ["weighted", "near", "quota"])
def test_a_captured_graph_counts_pairs_in_every_replay(mode: Any) -> None:
    layout = random_layout(nodes=2)
    loads = [LoadCounter(4, 32, device=device, pairs=True, pair_every=3) for device in ("cuda", "cpu")]
    tables = [DispatchTables(layout, rank=1, mode=mode, load=load, device=load.device) for load in loads]
    ids, out = some_ids(640, 8, 32, 0), torch.empty(640, 8, dtype=torch.int32, device="cuda")
    given = ids.cuda()
    loads[0].recording(False)
    graph = capture(lambda: tables[0].map(2, given, out=out))
    loads[0].recording(True)
    for call in range(20):
        ids = some_ids(640, 8, 32, call)
        given.copy_(ids)
        graph.replay()
        tables[1].map(2, ids)
    for load in loads:
        load.roll()
    pairs = [load.snapshot_pairs().numpy() for load in loads]
    np.testing.assert_array_equal(pairs[0], pairs[1])
    assert pairs[0][2].sum() > 0


@pytest.mark.parametrize("mode", ["weighted", "near"])
def test_pairs_of_every_token_are_exact_on_the_device(mode: Any) -> None:
    load = LoadCounter(4, 32, device="cuda", pairs=True, pair_every=1)
    tables = DispatchTables(random_layout(nodes=2), mode=mode, load=load, device="cuda")
    ids = [some_ids(3000, 8, 32, layer) for layer in range(4)]
    for layer, these in enumerate(ids):
        tables.map(layer, these.cuda())
    load.roll()
    wanted = np.stack([pair_counts(these.numpy(), 32) for these in ids])
    np.testing.assert_array_equal(load.snapshot_pairs().numpy(), wanted)


def test_nothing_waits_for_the_device() -> None:
    layout, new = random_layout(seed=1), random_layout(seed=2)
    load = LoadCounter(4, 32, windows=2, device="cuda")
    shares = replica_shares(new, np.ones((4, 32)))
    all_tables = [DispatchTables(layout, mode=mode, load=load, device="cuda") for mode in MODES]
    ids = some_ids(100, 4, 32, 0).cuda()
    for tables in all_tables:
        tables.map(0, ids)
    load.roll()
    load.snapshot()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for tables in all_tables:
            tables.map(0, ids, num_tokens=load.state[1])
            tables.install(new, layers=[1], shares=None if tables.mode in ("static", "even") else shares)
        load.recording(False)
        load.roll()
        load.snapshot(all_reduce=lambda x: x.mul_(2))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("mode", ["weighted", "near", "quota"])
def test_mapping_allocates_nothing_with_out(mode: str) -> None:
    tables = DispatchTables(random_layout(), mode=mode, device="cuda")  # type: ignore[arg-type]
    ids = some_ids(100, 4, 32, 0).cuda()
    out = torch.empty_like(ids)
    tables.map(0, ids, out=out)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    tables.map(0, ids, out=out)
    tables.install(random_layout(seed=5), layers=[0])
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_new_numbers_of_tokens_compile_nothing() -> None:
    from eplb_core.dispatch import gpu

    kernels = (gpu._map_kernel, gpu._near_kernel, gpu._count_kernel, gpu._solve_kernel, gpu._map_solved_kernel)

    def compiled() -> int:
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    for mode in ("weighted", "random", "near", "quota"):
        tables = DispatchTables(random_layout(), mode=mode, device="cuda")
        tables.warm_up(num_columns=4)
        before = compiled()
        for rows in (1, 2, 3, 16, 17, 100, 2048, 2049, 5000, 20000):
            tables.map(1, torch.full((rows, 4), -1, dtype=torch.int32, device="cuda"))
            wide = torch.full((rows + 1, 4), -1, dtype=torch.int32, device="cuda")
            tables.map(1, wide[1:], out=torch.empty((rows, 5), dtype=torch.int32, device="cuda")[:, :4])
        assert compiled() == before


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("mode", MODES)
def test_kernels_run_where_the_tensors_are_and_not_on_the_thread_s_device(mode: str) -> None:
    layout = random_layout(seed=3)
    load = LoadCounter(4, 32, windows=2, device="cuda:1")
    tables = DispatchTables(layout, rank=1, mode=mode, load=load, device="cuda:1")  # type: ignore[arg-type]
    reference = DispatchTables(layout, rank=1, mode=mode)  # type: ignore[arg-type]
    ids = some_ids(64, 4, 32, 0)
    with torch.cuda.device(0):
        assert torch.equal(tables.map(2, ids.to("cuda:1")).cpu().long(), reference.map(2, ids.long()))
        load.roll()
        assert int(load.snapshot().numpy().sum()) == int((ids >= 0).sum())


def test_one_region_compiled_by_inductor_serves_all_layers() -> None:
    layout = random_layout(layers=10)
    tables = DispatchTables(layout, mode="weighted", device="cuda")
    counted = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    torch._dynamo.reset()
    region = torch.compile(lambda ids, t: topk_to_slots(ids, t) * 2, backend=counted, fullgraph=True)
    ids = some_ids(64, 4, 32, 0).cuda()
    reference = DispatchTables(layout, mode="weighted")
    for layer in range(10):
        assert torch.equal(region(ids, tables.layer(layer)).cpu(), reference.map(layer, ids.cpu()) * 2)
    assert counted.frame_count == 1


def test_rows_of_tables_on_the_device_equal_those_on_the_host_after_many_installs() -> None:
    layouts = [random_layout(seed=seed) for seed in range(6)]
    on_device = DispatchTables(layouts[0], mode="quota", device="cuda")
    on_host = DispatchTables(layouts[0], mode="quota")
    for i in range(40):
        for tables in (on_device, on_host):
            tables.install(layouts[i % 6], layers=[i % 4])
    assert torch.equal(on_device._packed.cpu(), on_host._packed)
