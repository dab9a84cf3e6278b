"""The reference engine as an integration test: every token of every pass equals that of one process without EP."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.engine.__main__ import main as engine_main
from benchmarks.engine.cluster import Cluster
from benchmarks.engine.drive import Record, drive
from benchmarks.engine.engine import Setup
from benchmarks.engine.exchange import Parcel
from benchmarks.engine.forward import run_experts, run_grouped
from benchmarks.engine.model import Dense, ModelConfig
from benchmarks.engine.oracle import Oracle
from benchmarks.engine.requests import Scheduler, Traffic
from benchmarks.engine.shared import soak_shared, weight_hosts
from benchmarks.engine.soak import soak
from benchmarks.engine.watch import Watch
from benchmarks.engine.weights import empty_experts, load_experts, make_dense, save_experts
from eplb_core import ExpertLayout, LoadCounter, Topology

CONFIG = ModelConfig(num_layers=2)


def setup_of(folder: Path, mode: str) -> Setup:
    setup = Setup(folder, mode=mode, config=CONFIG, interval=16, window=4)
    for version in (0, 1):
        save_experts(folder / f"experts-{version}", CONFIG, setup.seed + version, setup.dtype)
    return setup


def oracle_of(setup: Setup, ranks: int) -> Oracle:
    oracle = Oracle(setup.config, setup.seed, setup.num_rows * ranks)
    oracle.load(setup.checkpoint(0))
    return oracle


def scheduler_of(setup: Setup) -> Scheduler:
    return Scheduler(Traffic(setup.config, 3, drift=0.2), setup.num_rows)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [*(pytest.param(mode, marks=pytest.mark.long) for mode in ("off", "sync")), "async"])
def test_tokens_equal_those_of_one_process_through_every_rebalance(mode: str, tmp_path: Path) -> None:
    setup = setup_of(tmp_path, mode)
    with Cluster(setup) as cluster:
        cluster.start(4)
        before = cluster.call("status")[0][0]
        record = drive(cluster, scheduler_of(setup), 60, oracle=oracle_of(setup, 4))
        after = {digest for digest, _ in cluster.call("status")}
        cluster.call("verify")
    assert (record.compared, record.wrong) == (60 * 16, 0)
    assert len(after) == 1
    assert (before in after) == (mode == "off")


@pytest.mark.slow
@pytest.mark.long
def test_weights_updated_while_experts_move_give_the_new_weights_tokens(tmp_path: Path) -> None:
    setup = setup_of(tmp_path, "async")
    oracle = oracle_of(setup, 4)
    with Cluster(setup) as cluster:
        cluster.start(4)

        def between(number: int) -> None:
            if number == 34:  # a pass or two after a migration began
                cluster.call("update", 1)
                oracle.load(setup.checkpoint(1))

        record = drive(cluster, scheduler_of(setup), 60, oracle=oracle, between=between)
    assert record.installed > 0
    assert (record.compared, record.wrong) == (60 * 16, 0)


@pytest.mark.slow
@pytest.mark.long
def test_an_engine_that_restarts_on_shared_weights_adopts_the_layout_that_they_were_moved_to(tmp_path: Path) -> None:
    setup = dataclasses.replace(setup_of(tmp_path, "async"), weight_hosts=tmp_path)
    records: list[Record] = []
    digests = []
    with weight_hosts(setup, 4):
        for _ in range(2):
            with Cluster(setup) as cluster:
                cluster.start(4)
                digests.append(cluster.call("status")[0][0])
                records.append(drive(cluster, scheduler_of(setup), 50, oracle=oracle_of(setup, 4)))
                digests.append(cluster.call("status")[0][0])
                cluster.call("close")
    assert [record.wrong for record in records] == [0, 0]
    first, moved, adopted, _ = digests
    assert moved == adopted != first


@pytest.mark.slow
@pytest.mark.long
def test_engines_that_are_killed_on_shared_weights_leave_a_layout_or_a_record_that_says_not_to_use_them() -> None:
    report = soak_shared(2, 20.0, seed=2)
    assert report.ok, str(report)
    assert report.adopted + report.refused > 1, str(report)


@pytest.mark.slow
@pytest.mark.long
def test_ranks_that_are_threads_give_the_tokens_of_one_process(tmp_path: Path) -> None:
    setup = dataclasses.replace(setup_of(tmp_path, "async"), threads=True)
    with Cluster(setup) as cluster:
        cluster.start(4)
        record = drive(cluster, scheduler_of(setup), 60, oracle=oracle_of(setup, 4))
        cluster.call("close")
    assert record.installed > 0
    assert (record.compared, record.wrong) == (60 * 16, 0)


def test_the_model_for_gpus_is_not_tried_on_a_processor(capsys: pytest.CaptureFixture[str]) -> None:
    """It fills the memory of the host, and the system then ends processes of its own choice."""
    with pytest.raises(SystemExit) as ended:
        engine_main(["--preset", "h200"])
    assert ended.value.code == 2
    assert "--preset h200 takes tens of gigabytes and needs GPUs: give --device cuda:0" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.long
def test_a_short_soak_with_kills_stops_leaves_joins_and_updates_has_no_wrong_token() -> None:
    report = soak(4, 1.0, seed=5)
    assert report.ok, str(report)
    kinds = {
        "rank killed",
        "rank killed in an update",
        "rank stopped for a while",
        "weights updated",
        "rank stopped for good",
    }
    assert kinds <= report.faults.keys(), str(report)
    assert report.migrations > 0


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="needs PyTorch 2.10")
def test_grouped_products_equal_a_loop_over_slots() -> None:
    layout = ExpertLayout.trivial(CONFIG.num_layers, 16, num_slots=16, topology=Topology(num_ranks=1))
    tensors = empty_experts(CONFIG, 16, dtype=torch.bfloat16, device="cpu")
    load_experts(7, CONFIG, tensors, layout, 0)
    random = torch.Generator().manual_seed(1)
    x = torch.randint(-30, 31, (40, CONFIG.hidden), generator=random).to(torch.bfloat16)
    slot = torch.randint(-1, 16, (40,), generator=random)
    assert torch.equal(run_grouped(x, slot, tensors[0]), run_experts(x, slot, tensors[0]))


def test_a_checkpoint_and_the_seed_it_was_made_from_fill_slots_alike(tmp_path: Path) -> None:
    save_experts(tmp_path, CONFIG, 3, torch.float32)
    row = np.array([*range(12), *range(10, 16), *range(10, 16)])  # rank 1 has six experts twice
    layout = ExpertLayout(np.stack([row, row[::-1]]), 16, topology=Topology(num_ranks=2))
    filled = []
    for source in (tmp_path, 3):
        filled.append(empty_experts(CONFIG, 12, dtype=torch.float32, device="cpu"))
        load_experts(source, CONFIG, filled[-1], layout, 1)
    for a, b in zip(*filled, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("groups", [1, 4])
def test_a_row_of_a_batch_is_computed_as_it_is_alone(groups: int) -> None:
    """Exact arithmetic: neither the batch nor the order of a sum changes a bit."""
    config = dataclasses.replace(CONFIG, num_groups=groups, top_groups=min(groups, 2))
    weights = make_dense(config, 2, dtype=torch.float32, device="cpu")
    many, one = Dense(config, weights, 37), Dense(config, weights, 1)
    token = torch.randint(0, 256, (37,), generator=torch.Generator().manual_seed(5))
    x = many.embed(token)
    place = torch.zeros(37, dtype=torch.int64)
    together = many.route(0, many.attention(0, x, place))
    for row in range(37):
        alone = one.route(0, one.attention(0, x[row : row + 1], place[:1]))
        assert all(torch.equal(a[row], b[0]) for a, b in zip(together, alone, strict=True))
    if groups > 1:
        assert all(len({int(expert) // 4 for expert in row}) <= 2 for row in together[1])


def test_requests_of_a_lost_rank_keep_their_tokens_and_start_anew_elsewhere() -> None:
    scheduler = Scheduler(Traffic(CONFIG, 4), 3)
    for _ in range(9):
        for worker in (0, 1):
            scheduler.feed(worker)
            scheduler.take(worker, [5, 6, 7])
    tokens = scheduler.tokens
    lost = [request for request in scheduler.rows[1] if request is not None]
    scheduler.lose(1)
    feed = scheduler.feed(2)
    assert len(lost) == scheduler.restarted > 0
    assert scheduler.traffic.made == scheduler.finished + scheduler.running
    assert [row for row in scheduler.rows[2] if row in lost] == lost
    assert feed.position[: len(lost)].tolist() == [0] * len(lost)
    assert scheduler.tokens == tokens


@pytest.mark.slow
@pytest.mark.long
def test_ranks_in_two_nodes_give_the_tokens_of_one_process_and_count_what_crosses(tmp_path: Path) -> None:
    setup = dataclasses.replace(setup_of(tmp_path, "async"), nodes=2, dispatch="near", move_cost=0.001)
    with Cluster(setup) as cluster:
        cluster.start(4)
        record = drive(cluster, scheduler_of(setup), 60, oracle=oracle_of(setup, 4))
        predicted = cluster.call("predicted")
        cluster.call("close")
    assert record.installed > 0
    assert (record.compared, record.wrong) == (60 * 16, 0)
    assert 0.0 < record.sends <= 1.0
    assert predicted == predicted[:1] * 4
    assert 0.0 < predicted[0] <= 1.0


class Echo:
    """Buffers of an exchange that nobody carries out."""

    def __init__(self, nbytes: tuple[int, int], size: int) -> None:
        self.send = [torch.zeros(size, each, dtype=torch.uint8) for each in nbytes]
        self.receive = [torch.zeros_like(each) for each in self.send]

    def swap(self, which: int) -> None:
        """Nothing."""


def test_a_parcel_carries_each_row_to_its_slot_and_its_answer_home() -> None:
    exchange: Any = Echo(Parcel.nbytes(6, 8, torch.float32), 2)
    parcel = Parcel(exchange, 2, 6, 8, torch.float32)
    x = torch.arange(24, dtype=torch.float32).view(3, 8)
    slots = torch.tensor([[4, 0], [-1, 5], [1, -1]])
    place = parcel.pack(x, slots, (slots.clamp(min=0) // 3).reshape(-1))
    assert parcel.out_slots.tolist() == [[0, 1, -1, -1, -1, -1], [4, 5, -1, -1, -1, -1]]
    parcel.in_answers.copy_(parcel.out_rows)  # as if every expert answered with what it was given
    answers = parcel.unpack(place, 2)
    expected = torch.where((slots >= 0)[..., None], x[:, None], 0.0)
    assert torch.equal(answers, expected)


def test_a_rank_that_missed_decisions_sees_their_windows_at_the_next() -> None:
    random = np.random.default_rng(0)
    live = ExpertLayout.trivial(2, 8, num_slots=12, topology=Topology(4))
    watches, counters = [Watch(live, 0.01) for _ in range(2)], [LoadCounter(2, 8, windows=4) for _ in range(2)]
    each, proposed = ExpertLayout.trivial(2, 8, num_slots=8, topology=Topology(1)), []
    for _ in range(4):
        for count in random.poisson(np.linspace(1, 90, 8), (3, 2, 8)):
            for counter in counters:
                counter.add_slots(torch.from_numpy(count), each)
                counter.roll()
        for watch, counter in zip(watches, counters, strict=True):
            watch.see(counter.snapshot(), 3)
        proposed.append(watches[0].propose(live, np.ones(4, dtype=np.bool_)))
    assert watches[1].propose(live, np.ones(4, dtype=np.bool_)) == proposed[-1] != live
    states = [watch.state() for watch in watches]
    assert states[0]["count"] == states[1]["count"] == 12
    assert np.array_equal(states[0]["shares"], states[1]["shares"])
    after = Watch(live, 0.01, states[0])
    assert after.propose(live, np.ones(4, dtype=np.bool_)) == proposed[-1]
