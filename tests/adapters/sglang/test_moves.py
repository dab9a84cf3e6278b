"""Moves of SGLang's experts by a Migrator: all ranks as threads, weights that name their expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import eplb_core as eplb
from eplb_core.adapters.sglang import moves as sglang_moves
from eplb_core.adapters.sglang.maps import Picks
from eplb_core.errors import EplbError
from eplb_core.loading.agreement import LocalAgreement
from eplb_core.loading.transports import LocalCopy
from tests.adapters.fakes import EXPERTS, group_of_one, metadata_of, on_ranks

RANKS, SLOTS = 2, 6
TWO = eplb.Topology(RANKS)
DENSE = 1
"""Layer of the model that has no experts; 0 and 2 have."""
START = [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 0, 1]]
GOAL = [[3, 1, 2, 0, 3, 1], [0, 1, 2, 3, 0, 1], [2, 0, 1, 3, 2, 0]]


def weight(layer: int, expert: torch.Tensor) -> torch.Tensor:
    return (expert[:, None] * 10.0 + layer) * 8 + torch.arange(3)


class EngineWeights:
    """As SGLang's own: it is asked for by layer, has no iterator, and keeps the tensors that it found first."""

    def __init__(self, weights: dict[int, list[torch.Tensor]]) -> None:
        self._found = {layer: list(tensors) for layer, tensors in weights.items()}

    def keys(self) -> Any:
        return self._found.keys()

    def __getitem__(self, layer: int) -> list[torch.Tensor]:
        return self._found[layer]


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
            lambda: EngineWeights(self.weights),  # type: ignore[arg-type,return-value]
            Picks(rank),
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
        rows = self.metadata.physical_to_logical_map
        picks = self.metadata.logical_to_rank_dispatch_physical_map
        return not {*differ(self.metadata, metadata_of(rows.tolist(), self.rank))} - {
            "logical_to_rank_dispatch_physical_map"
        } and torch.equal(rows.gather(1, picks), torch.arange(EXPERTS).expand(len(picks), -1))


def differ(one: Any, other: Any) -> list[str]:
    """Names of the maps in which they differ."""
    maps = (name for name, value in vars(one).items() if isinstance(value, torch.Tensor))
    return [name for name in maps if not torch.equal(getattr(one, name), getattr(other, name))]


class Ranks:
    """All ranks; `more(rank)` is given to a rank's moves."""

    def __init__(self, more: Callable[[int], dict[str, Any]] = lambda rank: {}) -> None:
        members = LocalAgreement.group(RANKS)
        self.all: list[Rank] = on_ranks(lambda rank: Rank(rank, members[rank], **more(rank)))
        self.moves = [rank.moves for rank in self.all]

    def do(self, work: Callable[[Rank], Any]) -> list[Any]:
        return on_ranks(lambda rank: work(self.all[rank]))

    def drive(self, rank: Rank, steps: Any) -> Any:
        """All passes of a rebalance, with a look after each; what it ended with."""
        ended: list[Any] = []

        def to_the_end() -> Any:
            ended.append((yield from steps))

        for _ in chain(to_the_end(), [None]):
            assert rank.is_right()
            assert rank.is_whole()
        return ended[0]

    def rebalance(self, *goals: Any) -> list[str]:
        """One rebalance, to rows or what raises, the same for all or one each; what it ended with, by rank."""

        def place(goal: Any) -> torch.Tensor:
            if isinstance(goal, Exception):
                raise goal
            return torch.tensor(goal)

        return self.do(
            lambda rank: self.drive(rank, rank.moves.rebalance(lambda: place(goals[rank.rank % len(goals)])))
        )

    def rows(self) -> list[list[list[int]]]:
        return [rank.metadata.physical_to_logical_map.tolist() for rank in self.all]

    def close(self) -> None:
        self.do(lambda rank: rank.moves.close("the test is over"))


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.close()


def test_a_rebalance_moves_weights_and_all_maps_in_place_and_counts_its_transfers(ranks: Ranks) -> None:
    """In every pass each slot holds what the maps say; the layer without experts keeps its row; picks are SGLang's."""
    kept = [dict(vars(rank.metadata)) for rank in ranks.all]
    assert ranks.rebalance(GOAL) == ["", ""]
    for rank, tensors in zip(ranks.all, kept, strict=True):
        assert all(vars(rank.metadata)[name] is tensor for name, tensor in tensors.items())
        assert not differ(rank.metadata, metadata_of(GOAL, rank.rank))
    old, new = (eplb.ExpertLayout(np.array(rows)[[0, 2]], EXPERTS, topology=TWO) for rows in (START, GOAL))
    reads = [moves.migrator.status.read_bytes // moves.slot_bytes for moves in ranks.moves]
    assert reads == eplb.transfers(old, new).sum(axis=0).tolist()
    assert ranks.rebalance(START) == ["", ""]
    assert ranks.rows() == [START, START]


def test_an_engine_that_forgot_a_migration_goes_on_with_it(ranks: Ranks) -> None:
    """`reset_generator` drops the generator between two passes."""

    def begin(rank: Rank) -> None:
        steps = rank.moves.rebalance(lambda: torch.tensor(GOAL))
        next(steps)
        steps.close()

    ranks.do(begin)
    assert ranks.rebalance(GOAL) == ["", ""]
    assert ranks.rows() == [GOAL, GOAL]


def test_where_ranks_computed_different_maps_nothing_moves_and_the_line_says_which_rank(
    ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    assert all("different targets" in reason for reason in ranks.rebalance(GOAL, START))
    assert ranks.rows() == [START, START]
    assert [(moves.disagreed, moves.over) for moves in ranks.moves] == [(True, "")] * 2
    assert "placement: rank 1 (" in caplog.text
    assert "SGLang's own algorithm places" in caplog.text


def test_an_error_on_one_rank_ends_it_on_all_and_leaves_the_next_rebalance_to_the_engine(
    ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    assert all(ranks.rebalance(GOAL, KeyError("no load")))
    assert ranks.rows() == [START, START]
    assert all(moves.over for moves in ranks.moves)
    assert "KeyError: 'no load'" in ranks.moves[1].over
    assert "SGLang's own rebalance goes on from the next interval" in caplog.text
    assert ranks.rebalance(GOAL) == [moves.over for moves in ranks.moves]


def test_reads_that_fail_are_tried_again_and_a_pause_of_all_passes_is_no_failure() -> None:
    """A server without requests runs no passes, and its migration ends by the deadline."""
    moves = sglang_moves.Moves.__new__(sglang_moves.Moves)
    vars(moves).update(over="", disagreed=False, _failures=0, _trouble="")
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

    def by_expert(counts: torch.Tensor, rows: list[list[int]]) -> torch.Tensor:
        index = torch.tensor(rows).expand(2, -1, -1)
        return torch.zeros(2, 3, EXPERTS, dtype=torch.int32).scatter_add_(2, index, counts)

    ranks = Ranks(lambda rank: {"window": lambda: windows[rank]})
    ranks.rebalance(GOAL)
    for counts in windows:
        assert torch.equal(by_expert(counts, GOAL), by_expert(window, START))
    ranks.close()


def test_a_table_that_fails_on_one_rank_is_written_again_and_ends_the_migration_on_all(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the weights of a layer and before its maps: this pass has both, on that rank too."""
    failed: list[int] = []
    whole = ranks.moves[1].rows._picks_of

    def picks(alone: Any, row: int) -> Any:
        if not failed:
            failed.append(row)
            raise RuntimeError("no memory")
        return whole(alone, row)

    monkeypatch.setattr(ranks.moves[1].rows, "_picks_of", picks)
    assert all(ranks.rebalance(GOAL))
    assert failed
    first, second = ranks.rows()
    assert first == second
    assert all(moves.over for moves in ranks.moves)


def test_an_install_of_weights_that_fails_on_one_rank_is_no_pass_to_go_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have the layer by then, and would send it tokens of other experts."""
    ranks = Ranks()

    def fails(layer: int, copies: Any) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(ranks.moves[1].migrator._installer, "run", fails)

    def passes(rank: Rank) -> str:
        try:
            ranks.drive(rank, rank.moves.rebalance(lambda: torch.tensor(GOAL)))
        except Exception as error:
            rank.moves._agreement.leave()  # type: ignore[attr-defined]
            return str(error)
        return ""

    assert ranks.do(passes)[1] == "the device is gone"


def test_weights_that_the_engine_writes_meanwhile_pause_a_migration(ranks: Ranks) -> None:
    def update(rank: Rank) -> str:
        steps = rank.moves.rebalance(lambda: torch.tensor(GOAL))
        next(steps)
        rank.moves.before_weights()
        assert rank.moves.migrator.status.phase == "paused"
        rank.moves.after_weights()
        ranks.drive(rank, steps)
        return rank.moves.migrator.status.cause

    assert ranks.do(update) == ["paused", "paused"]
    assert ranks.rebalance(GOAL) == ["", ""]


def clone_one(rank: Rank) -> None:
    if rank.rank == 1:
        rank.weights[0][0] = rank.weights[0][0].clone()


@pytest.mark.parametrize(("write", "named"), [(clone_one, 1), (lambda rank: rank.weights.clear(), 0)])
def test_experts_that_lie_elsewhere_after_an_update_end_the_moves_and_later_updates_are_the_engine_s(
    write: Callable[[Rank], None], named: int
) -> None:
    """In other tensors on one rank; where they cannot be found, on all."""
    ranks = Ranks()

    def update(rank: Rank) -> None:
        rank.moves.before_weights()
        write(rank)
        rank.moves.after_weights()
        rank.moves.before_weights()
        rank.moves.after_weights()

    ranks.do(update)
    assert [moves.over for moves in ranks.moves] == [f"rank {named} has its experts in other tensors now"] * 2


def test_tensors_that_the_model_replaced_end_the_moves_though_the_engine_s_object_keeps_the_first() -> None:
    """As with models whose weights by layer are looked up once."""
    tensors = {rank: [torch.zeros(3, 2)] for rank in range(RANKS)}
    members = LocalAgreement.group(RANKS)

    def made(rank: int) -> sglang_moves.Moves:
        first = EngineWeights({0: tensors[rank]})
        return sglang_moves.Moves(
            metadata_of([START[0]], rank),
            lambda: first,  # type: ignore[arg-type,return-value]
            Picks(rank),
            num_nodes=1,
            transport=LocalCopy(),
            agreement=members[rank],
            in_use=lambda: tensors[rank],
        )

    def update(moves: sglang_moves.Moves) -> str:
        moves.before_weights()
        moves.after_weights()
        return moves.over

    moves = on_ranks(made)
    assert on_ranks(lambda rank: update(moves[rank])) == ["", ""]
    tensors[1] = [tensors[1][0].clone()]
    assert on_ranks(lambda rank: update(moves[rank])) == ["rank 1 has its experts in other tensors now"] * 2


# ---- made over the default group -------------------------------------------------------------------------------------


def test_moves_are_opened_over_the_default_group_or_not_at_all(tmp_path: Path) -> None:
    rows = [[0, 1, 2, 3, 0, 1]]
    metadata = metadata_of(rows, ranks=1)
    weights = {0: [weight(0, torch.tensor(rows[0]))]}
    found = iter([weights])

    def opened(given: Any, transport: str = "shared_memory", **more: Any) -> sglang_moves.Moves:
        facts = {"eplb_core": "1"}
        return sglang_moves.open_moves(metadata, given, Picks(0), transport=transport, facts=facts, num_nodes=1, **more)

    with group_of_one(tmp_path):
        assert opened(lambda: weights, "torch_distributed").close("the test is over")
        with pytest.raises(EplbError, match="rank 0: OSError: no transport today"):
            opened(lambda: weights, trouble=OSError("no transport today"))
        with pytest.raises(EplbError, match="rank 0: ValueError: "):
            opened(dict)
        with pytest.raises(EplbError, match="rank 0: "):  # gone between two looks
            opened(lambda: next(found, {}))


def test_facts_that_differ_are_named_with_rank_and_values() -> None:
    sglang_moves.check_equal([{"eplb_core": "1"}] * 3)
    with pytest.raises(EplbError, match=r"options of rank 2 \(=b\) must be as on rank 0 \(=a\)"):
        sglang_moves.check_equal([{"options": "a"}, {"options": "a"}, {"options": "b"}])


def test_a_model_without_expert_tensors_is_refused() -> None:
    with pytest.raises(ValueError, match="routed_experts_weights_of_layer"):
        sglang_moves.stores_of({})


# ---- rows of the maps ------------------------------------------------------------------------------------------------


def test_rows_of_the_target_have_sglang_s_picks_which_follow_from_the_layers_before() -> None:
    row = [1, 2, 0, 1, 0, 3, 2, 0]
    layout = eplb.ExpertLayout([row, row[::-1]], EXPERTS, topology=eplb.Topology(4))
    own, even = eplb.static_dispatch_table(layout), eplb.even_dispatch_table(layout)
    for rank in range(4):
        metadata = metadata_of([[0, 1, 2, 3] * 2] * 2, rank, ranks=4)
        rows = sglang_moves.LiveRows(metadata, [0, 1], Picks(rank))
        rows.aim(layout)
        rows.install(layout)
        assert metadata.logical_to_rank_dispatch_physical_map.tolist() == own[rank].tolist() != even[rank].tolist()


def test_rows_on_the_way_have_even_picks_and_no_table_is_made_where_the_engine_has_none() -> None:
    layout = eplb.ExpertLayout(np.array(GOAL)[[0, 2]], EXPERTS, topology=TWO)
    metadata, bare = metadata_of(START), metadata_of(START, static=False)
    sglang_moves.LiveRows(metadata, [0, 2], Picks(0)).install(layout)
    even = eplb.even_dispatch_table(layout)[0].tolist()
    assert metadata.logical_to_rank_dispatch_physical_map[[0, 2]].tolist() == even
    rows = sglang_moves.LiveRows(bare, [0, 2], Picks(0))
    rows.aim(layout)
    rows.install(layout, layers=[1])
    assert bare.physical_to_logical_map.tolist() == [START[0], START[1], GOAL[2]]


# ---- a record --------------------------------------------------------------------------------------------------------


class Keeper:
    """A record of all layers in this process."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.record = eplb.LayoutRecord(eplb.ExpertLayout(rows, EXPERTS, topology=TWO))
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
    ranks = Ranks(lambda rank: {"record": keepers[rank]})
    assert ranks.rebalance(GOAL) == ["", ""]
    ranks.do(lambda rank: rank.moves.migrator.pause())  # what was installed last is recorded by then
    assert [keeper.record.layout.physical_to_logical_map.tolist() for keeper in keepers] == [GOAL, GOAL]
    assert [keeper.record.version for keeper in keepers] == [2, 2]
    ranks.close()


def test_a_record_that_holds_another_layout_ends_all_moves() -> None:
    keepers = [Keeper(START), Keeper([START[0], GOAL[0], START[2]])]
    ranks = Ranks(lambda rank: {"record": keepers[rank]})
    ranks.rebalance(GOAL)
    ranks.rebalance(START)
    assert all(moves.off and not moves.over for moves in ranks.moves)  # the engine may not move them either
    ranks.close()


def test_rows_of_the_layers_with_experts_alone_are_recorded_under_their_own_numbers() -> None:
    keeper = Keeper(START)
    rows = sglang_moves.RowsRecord(keeper, keeper.record.layout, [0, 2])
    assert rows.begin([1], 0).status == "ok"
    assert rows.abort([1]).status == "ok"
    assert rows.begin([1], 0).status == "ok"
    reply = rows.commit([1], [GOAL[2]])
    assert keeper.record.layout.physical_to_logical_map.tolist() == [START[0], START[1], GOAL[2]]
    assert reply.digest == eplb.ExpertLayout([START[0], GOAL[2]], EXPERTS, topology=TWO).digest
