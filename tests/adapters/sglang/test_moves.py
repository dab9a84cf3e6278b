from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import eplb_core as eplb
from eplb_core.adapters import hooking
from eplb_core.adapters.sglang import maps as sglang_maps
from eplb_core.adapters.sglang import moves as sglang_moves
from eplb_core.errors import EplbError
from eplb_core.loading.agreement import LocalAgreement
from eplb_core.loading.transports import LocalCopy

dist: Any = torch.distributed

RANKS, EXPERTS, SLOTS = 2, 4, 6
DENSE = 1
"""Layer of the model that has no experts; 0 and 2 have."""
START = [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 0, 1]]
GOAL = [[3, 1, 2, 0, 3, 1], [0, 1, 2, 3, 0, 1], [2, 0, 1, 3, 2, 0]]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooking, "_logged", set())
    monkeypatch.setattr(hooking, "_failures", {})
    monkeypatch.setattr(hooking, "_log", [logging.getLogger("eplb_core")])


def metadata_of(rows: list[list[int]], rank: int, *, static: bool = True, ranks: int = RANKS) -> Any:
    """The engine's object for this layout; lists are padded to all slots."""
    layout = eplb.ExpertLayout(rows, EXPERTS, topology=eplb.Topology(ranks))
    lists = torch.full((len(rows), EXPERTS, SLOTS), -1)
    lists[:, :, : layout.logical_to_physical_map.shape[2]] = torch.tensor(layout.logical_to_physical_map)
    table = sglang_maps.static_table(layout, sglang_maps.Picks(rank))
    return SimpleNamespace(
        physical_to_logical_map=torch.tensor(rows),
        physical_to_logical_map_cpu=torch.tensor(rows),
        logical_to_all_physical_map=lists,
        logical_to_all_physical_map_cpu=lists.clone(),
        logical_to_all_physical_map_num_valid=torch.tensor(layout.replica_count),
        logical_to_rank_dispatch_physical_map=table if static else None,
        num_logical_experts=EXPERTS,
        ep_size=ranks,
    )


def weight(layer: int, expert: torch.Tensor) -> torch.Tensor:
    return (expert[:, None] * 10.0 + layer) * 8 + torch.arange(3)


class Rank:
    """What a rank of the engine has: its map, its experts of two layers, and its moves."""

    def __init__(self, rank: int, agreement: LocalAgreement, **more: Any) -> None:
        self.rank = rank
        self.metadata = metadata_of(START, rank)
        mine = slice(rank * 3, rank * 3 + 3)
        first = torch.tensor(START[0][mine])
        self.weights = {layer: [weight(layer, first), -weight(layer, first)] for layer in (2, 0)}
        self.moves = sglang_moves.Moves(
            self.metadata,
            lambda: self.weights,
            sglang_moves.Picks(rank),
            num_nodes=1,
            transport=LocalCopy(),
            agreement=agreement,
            **more,
        )

    def is_right(self) -> bool:
        """Every slot holds the expert that the map says."""
        mine = self.metadata.physical_to_logical_map[:, self.rank * 3 : self.rank * 3 + 3]
        return all(
            torch.equal(first, weight(layer, mine[layer])) and torch.equal(second, -weight(layer, mine[layer]))
            for layer, (first, second) in self.weights.items()
        )

    def is_whole(self) -> bool:
        """All maps say the same, and each pick is a slot of its expert."""
        m = self.metadata
        expected = metadata_of(m.physical_to_logical_map.tolist(), self.rank)
        picks = m.logical_to_rank_dispatch_physical_map
        return all(
            torch.equal(getattr(m, name), getattr(expected, name))
            for name in vars(expected)
            if name.endswith(("map", "cpu", "valid")) and "dispatch" not in name
        ) and torch.equal(m.physical_to_logical_map.gather(1, picks), torch.arange(EXPERTS).expand(len(picks), -1))


def on_all(work: Callable[[int], Any]) -> list[Any]:
    """Each rank on a thread of its own; the first error is raised."""
    answers: list[Any] = [None] * RANKS
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            answers[rank] = work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return answers


def ranks_of(**more: Any) -> list[Rank]:
    members = LocalAgreement.group(RANKS)
    made: list[Rank] = on_all(lambda rank: Rank(rank, members[rank], **more))
    return made


def drive(rank: Rank, steps: Any) -> Any:
    """All passes of a rebalance, with a look after each; what it ended with."""

    ended: list[Any] = []

    def to_the_end() -> Any:
        ended.append((yield from steps))

    for _ in to_the_end():
        assert rank.is_right()
        assert rank.is_whole()
    assert rank.is_right()
    assert rank.is_whole()
    return ended[0]


def rebalance(ranks: list[Rank], *goals: Any) -> list[str]:
    """One rebalance; every rank looks at its weights and maps after each pass. What it ended with, by rank."""

    def passes(rank: int) -> Any:
        goal = goals[rank % len(goals)]
        return drive(ranks[rank], ranks[rank].moves.rebalance(goal if callable(goal) else lambda: goal))

    return on_all(passes)


def close(ranks: list[Rank]) -> None:
    on_all(lambda rank: ranks[rank].moves.close("the test is over"))


def test_a_rebalance_moves_weights_and_all_maps_in_place_and_counts_its_transfers() -> None:
    """In every pass each slot holds what the maps say; the layer without experts keeps its row; picks are SGLang's."""
    ranks = ranks_of()
    kept = [{name: t.data_ptr() for name, t in vars(r.metadata).items() if isinstance(t, torch.Tensor)} for r in ranks]
    assert rebalance(ranks, torch.tensor(GOAL)) == ["", ""]
    for rank, addresses in zip(ranks, kept, strict=True):
        assert rank.metadata.physical_to_logical_map.tolist() == GOAL
        expected = metadata_of(GOAL, rank.rank)
        for name, address in addresses.items():
            assert torch.equal(getattr(rank.metadata, name), getattr(expected, name)), name
            assert getattr(rank.metadata, name).data_ptr() == address
    old, new = (
        eplb.ExpertLayout(np.array(rows)[[0, 2]], EXPERTS, topology=eplb.Topology(RANKS)) for rows in (START, GOAL)
    )
    status = [rank.moves.migrator.status for rank in ranks]
    assert [s.read_bytes // ranks[0].moves.slot_bytes for s in status] == eplb.transfers(old, new).sum(axis=0).tolist()
    assert rebalance(ranks, torch.tensor(START)) == ["", ""]
    assert [rank.metadata.physical_to_logical_map.tolist() for rank in ranks] == [START, START]
    close(ranks)


def test_an_engine_that_forgot_a_migration_goes_on_with_it() -> None:
    """`reset_generator` drops the generator between two passes."""
    ranks = ranks_of()

    def begin(rank: int) -> None:
        steps = ranks[rank].moves.rebalance(lambda: torch.tensor(GOAL))
        next(steps)
        steps.close()

    on_all(begin)
    assert rebalance(ranks, torch.tensor(GOAL)) == ["", ""]
    assert [rank.metadata.physical_to_logical_map.tolist() for rank in ranks] == [GOAL, GOAL]
    close(ranks)


def test_where_ranks_computed_different_maps_nothing_moves_and_the_line_says_which_rank(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = ranks_of()
    with caplog.at_level(logging.WARNING):
        ended = rebalance(ranks, torch.tensor(GOAL), torch.tensor(START))
    assert all("different targets" in reason for reason in ended)
    assert [rank.metadata.physical_to_logical_map.tolist() for rank in ranks] == [START, START]
    assert [rank.moves.disagreed for rank in ranks] == [True, True]
    assert not any(rank.moves.over for rank in ranks)
    assert "placement: rank 1 (" in caplog.text
    assert "nothing moves, and SGLang's own algorithm places" in caplog.text
    close(ranks)


def test_an_error_on_one_rank_ends_it_on_all_and_leaves_the_next_rebalance_to_the_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails() -> Any:
        raise KeyError("no load")

    ranks = ranks_of()
    with caplog.at_level(logging.WARNING):
        ended = rebalance(ranks, torch.tensor(GOAL), fails)
    assert all(ended)
    assert [rank.metadata.physical_to_logical_map.tolist() for rank in ranks] == [START, START]
    assert all(rank.moves.over for rank in ranks)
    assert "KeyError: 'no load'" in ranks[1].moves.over
    assert "moves: SGLang's own rebalance goes on from the next interval" in caplog.text
    assert rebalance(ranks, torch.tensor(GOAL)) == [rank.moves.over for rank in ranks]


def test_reads_that_fail_are_tried_again_and_a_pause_of_all_passes_is_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A server without requests runs no passes, and its migration ends by the deadline."""
    members = LocalAgreement.group(1)
    moves = sglang_moves.Moves.__new__(sglang_moves.Moves)
    vars(moves).update(over="", disagreed=False, _failures=0, _trouble="", _agreement=members[0])
    ended: list[str] = []
    for cause in ("read", "deadline", "read", "peer", "busy", "deadline", "read", "read", "peer"):
        moves.migrator = SimpleNamespace(  # type: ignore[assignment]
            status=SimpleNamespace(cause=cause, reason=f"a {cause}", installed=0), stop=lambda deadline: True
        )
        assert moves._conclude() == f"a {cause}"
        ended.append(moves.over)
    assert ended == [""] * 8 + ["a peer"]


def test_counts_of_the_window_stay_with_their_experts_when_a_layer_moves() -> None:
    """Fault 11 of the engine: a window's counts are read by the map of its end."""
    window = torch.arange(1, 1 + 2 * 3 * SLOTS, dtype=torch.int32).reshape(2, 3, SLOTS)
    windows = [window.clone() for _ in range(RANKS)]
    members = LocalAgreement.group(RANKS)
    ranks = on_all(lambda rank: Rank(rank, members[rank], window=lambda: windows[rank]))

    def by_expert(counts: torch.Tensor, rows: list[list[int]]) -> torch.Tensor:
        index = torch.tensor(rows).expand(2, -1, -1)
        return torch.zeros(2, 3, EXPERTS, dtype=torch.int32).scatter_add_(2, index, counts)

    rebalance(ranks, torch.tensor(GOAL))
    for counts in windows:
        assert torch.equal(by_expert(counts, GOAL), by_expert(window, START))
    close(ranks)


def test_a_table_that_fails_on_one_rank_is_written_again_and_ends_the_migration_on_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the weights of a layer and before its maps: this pass has both, on that rank too."""
    ranks = ranks_of()
    failed: list[int] = []
    whole = ranks[1].moves.rows._picks_of

    def picks(alone: Any, row: int) -> Any:
        if not failed:
            failed.append(row)
            raise RuntimeError("no memory")
        return whole(alone, row)

    monkeypatch.setattr(ranks[1].moves.rows, "_picks_of", picks)
    ended = rebalance(ranks, torch.tensor(GOAL))
    assert failed
    assert all(ended)
    assert ranks[0].metadata.physical_to_logical_map.tolist() == ranks[1].metadata.physical_to_logical_map.tolist()
    assert all(rank.moves.over for rank in ranks)
    close(ranks)


def test_an_install_of_weights_that_fails_on_one_rank_is_no_pass_to_go_on_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others have the layer by then, and would send it tokens of other experts."""
    ranks = ranks_of()

    def fails(layer: int, copies: Any) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(ranks[1].moves.migrator._installer, "run", fails)

    def passes(rank: int) -> str:
        try:
            drive(ranks[rank], ranks[rank].moves.rebalance(lambda: torch.tensor(GOAL)))
        except Exception as error:
            ranks[rank].moves._agreement.leave()  # type: ignore[attr-defined]
            return str(error)
        return ""

    assert on_all(passes)[1] == "the device is gone"


def test_weights_that_the_engine_writes_meanwhile_pause_a_migration() -> None:
    ranks = ranks_of()

    def update(rank: int) -> str:
        steps = ranks[rank].moves.rebalance(lambda: torch.tensor(GOAL))
        next(steps)
        ranks[rank].moves.before_weights()
        assert ranks[rank].moves.migrator.status.phase == "paused"
        ranks[rank].moves.after_weights()
        drive(ranks[rank], steps)
        return ranks[rank].moves.migrator.status.cause

    assert on_all(update) == ["paused", "paused"]
    assert rebalance(ranks, torch.tensor(GOAL)) == ["", ""]
    close(ranks)


def test_experts_that_lie_in_other_tensors_after_an_update_end_the_moves_on_all_ranks() -> None:
    ranks = ranks_of()

    def update(rank: int) -> None:
        ranks[rank].moves.before_weights()
        if rank == 1:
            ranks[rank].weights[0][0] = ranks[rank].weights[0][0].clone()
        ranks[rank].moves.after_weights()

    on_all(update)
    assert [rank.moves.over for rank in ranks] == ["rank 1 has its experts in other tensors now"] * 2


def test_experts_that_cannot_be_found_after_an_update_end_the_moves_and_later_updates_are_the_engines() -> None:
    ranks = ranks_of()

    def update(rank: int) -> None:
        ranks[rank].moves.before_weights()
        ranks[rank].weights = {}
        ranks[rank].moves.after_weights()
        ranks[rank].moves.before_weights()
        ranks[rank].moves.after_weights()

    on_all(update)
    assert [rank.moves.over for rank in ranks] == ["rank 0 has its experts in other tensors now"] * 2


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A default group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_moves_are_opened_over_the_default_group_or_not_at_all() -> None:
    rows = [[0, 1, 2, 3, 0, 1]]
    metadata = metadata_of(rows, 0, ranks=1)
    weights = {0: [weight(0, torch.tensor(rows[0]))]}
    options: dict[str, Any] = {"transport": "torch_distributed", "facts": {"eplb_core": "1"}, "num_nodes": 1}
    moves = sglang_moves.open_moves(metadata, lambda: weights, sglang_moves.Picks(0), **options)
    assert moves.close("the test is over")
    with pytest.raises(EplbError, match="rank 0: EplbError: no transport today"):
        sglang_moves.open_moves(
            metadata, lambda: weights, sglang_moves.Picks(0), **{**options, "trouble": EplbError("no transport today")}
        )
    options["transport"] = "shared_memory"
    with pytest.raises(EplbError, match="rank 0: ValueError: "):
        sglang_moves.open_moves(metadata, dict, sglang_moves.Picks(0), **options)
    found = iter([weights])
    with pytest.raises(EplbError, match="rank 0: "):  # gone between two looks
        sglang_moves.open_moves(metadata, lambda: next(found, {}), sglang_moves.Picks(0), **options)


def test_rows_of_the_target_have_sglang_s_picks_which_follow_from_the_layers_before() -> None:
    row = [1, 2, 0, 1, 0, 3, 2, 0]
    layout = eplb.ExpertLayout([row, row[::-1]], EXPERTS, topology=eplb.Topology(4))
    own, even = eplb.static_dispatch_table(layout), eplb.even_dispatch_table(layout)
    for rank in range(4):
        lists = torch.full((2, EXPERTS, 8), -1)
        metadata = SimpleNamespace(
            physical_to_logical_map=torch.arange(8).repeat(2, 1) % 4,
            physical_to_logical_map_cpu=torch.arange(8).repeat(2, 1) % 4,
            logical_to_all_physical_map=lists,
            logical_to_all_physical_map_cpu=lists.clone(),
            logical_to_all_physical_map_num_valid=torch.zeros(2, EXPERTS, dtype=torch.int64),
            logical_to_rank_dispatch_physical_map=torch.zeros(2, EXPERTS, dtype=torch.int64),
        )
        rows = sglang_moves.LiveRows(metadata, [0, 1], sglang_moves.Picks(rank))
        rows.aim(layout)
        rows.install(layout)
        assert metadata.logical_to_rank_dispatch_physical_map.tolist() == own[rank].tolist() != even[rank].tolist()


def test_rows_on_the_way_have_even_picks_and_no_table_is_made_where_the_engine_has_none() -> None:
    metadata = metadata_of(START, 0)
    rows = sglang_moves.LiveRows(metadata, [0, 2], sglang_moves.Picks(0))
    layout = eplb.ExpertLayout(np.array(GOAL)[[0, 2]], EXPERTS, topology=eplb.Topology(RANKS))
    rows.install(layout)
    even = eplb.even_dispatch_table(layout)[0].tolist()
    assert metadata.logical_to_rank_dispatch_physical_map[[0, 2]].tolist() == even
    bare = metadata_of(START, 0, static=False)
    alone = sglang_moves.LiveRows(bare, [0, 2], sglang_moves.Picks(0))
    alone.aim(layout)
    alone.install(layout, layers=[1])
    assert bare.physical_to_logical_map.tolist() == [START[0], START[1], GOAL[2]]


class Keeper:
    """A record of all layers in this process."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.record = eplb.LayoutRecord(eplb.ExpertLayout(rows, EXPERTS, topology=eplb.Topology(RANKS)))
        self.record.attach("engine")
        self.off: list[str] = []

    @property
    def adopted(self) -> int:
        return self.record.version

    def begin(self, layers: Any, version: int) -> Any:
        return self.record.begin("engine", layers, version)

    def commit(self, layers: Any, rows: Any) -> Any:
        return self.record.commit("engine", layers, rows)

    def abort(self, layers: Any) -> Any:
        return self.record.abort("engine", layers)

    def refuse_moves(self, reason: str) -> None:
        self.off.append(reason)


def test_moves_are_recorded_by_the_model_s_own_layers() -> None:
    keepers = [Keeper(START) for _ in range(RANKS)]
    members = LocalAgreement.group(RANKS)
    ranks = on_all(lambda rank: Rank(rank, members[rank], record=keepers[rank]))
    assert rebalance(ranks, torch.tensor(GOAL)) == ["", ""]
    on_all(lambda rank: ranks[rank].moves.migrator.pause())  # what was installed last is recorded by then
    assert [keeper.record.layout.physical_to_logical_map.tolist() for keeper in keepers] == [GOAL, GOAL]
    assert [keeper.record.version for keeper in keepers] == [2, 2]
    close(ranks)


def test_a_record_that_holds_another_layout_ends_all_moves() -> None:
    keepers = [Keeper(START), Keeper([START[0], GOAL[0], START[2]])]
    members = LocalAgreement.group(RANKS)
    ranks = on_all(lambda rank: Rank(rank, members[rank], record=keepers[rank]))
    rebalance(ranks, torch.tensor(GOAL))
    rebalance(ranks, torch.tensor(START))
    assert all(rank.moves.off for rank in ranks)
    assert not any(rank.moves.over for rank in ranks)  # the engine may not move them either
    close(ranks)


def test_facts_that_differ_are_named_with_rank_and_values() -> None:
    sglang_moves.check_equal([{"eplb_core": "1"}] * 3)
    with pytest.raises(EplbError, match=r"options of rank 2 \(=b\) must be as on rank 0 \(=a\)"):
        sglang_moves.check_equal([{"options": "a"}, {"options": "a"}, {"options": "b"}])


def test_a_model_without_expert_tensors_is_refused() -> None:
    with pytest.raises(ValueError, match="routed_experts_weights_of_layer"):
        sglang_moves.stores_of({})
