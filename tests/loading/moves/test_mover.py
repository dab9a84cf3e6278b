"""Synchronous moves of labelled weights, all ranks as threads."""

from __future__ import annotations

import gc
import weakref
from asyncio import CancelledError
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core import DispatchTables, ExpertLayout, ExpertStore, Topology
from eplb_core.errors import AgreementError, MigrationError, TransportError
from eplb_core.loading.agreement import LocalAgreement
from eplb_core.loading.install.staging import Staging
from eplb_core.loading.moves.joining import regions_of
from eplb_core.loading.moves.mover import move_experts
from eplb_core.loading.moves.pull import _WRITTEN
from eplb_core.loading.transports import DeferredCopy, LocalCopy
from tests.loading.fleets import SLOT, Answer, FailsAt, Keeper, Shelf
from tests.loading.worlds import CROWDED, World, layout_pairs, stores_of


def move(world: World, new: ExpertLayout, **options: Any) -> list[Any]:
    def call(rank: int) -> ExpertLayout:
        own = {key: value(rank) if callable(value) else value for key, value in options.items()}
        return move_experts(
            world.stores[rank],
            world.layout,
            new,
            rank=rank,
            transport=world.transports[rank],
            agreement=world.agreements[rank],
            **own,
        )

    return world.each(call)


@settings(deadline=None, max_examples=40)
@given(layout_pairs(), st.integers(1, 4))
def test_any_move_ends_with_every_expert_in_its_slots(layouts: list[ExpertLayout], slots: int) -> None:
    """One slot of staging is enough; rows of whole tensors move too."""
    old, new = layouts
    world = World(old)
    assert move(world, new, staging=slots * SLOT) == [new] * len(world.ranks)
    world.check(new)


def test_dispatch_targets_the_new_slots_after_a_move() -> None:
    """B12: tables and weights change together."""
    topology = Topology(2)
    old = ExpertLayout([[0, 1, 2, 3]], 4, topology=topology)
    new = ExpertLayout([[3, 1, 2, 0]], 4, topology=topology)
    world = World(old)
    tables = {rank: DispatchTables(old, rank=rank) for rank in world.ranks}
    move(world, new, tables=lambda rank: tables[rank])
    world.check(new)
    for table in tables.values():
        assert table.layout == new
        assert table.map(0, torch.tensor([[0], [3]])).tolist() == [[3], [0]]


def test_layers_that_are_left_out_stay() -> None:
    topology = Topology(2)
    old = ExpertLayout([[0, 1], [0, 1]], 2, topology=topology)
    new = ExpertLayout([[1, 0], [1, 0]], 2, topology=topology)
    world = World(old)
    reached = move(world, new, layers=[1])[0]
    assert reached.physical_to_logical_map.tolist() == [[0, 1], [1, 0]]
    world.check(reached)


SWAP = (
    ExpertLayout([[0, 1, 2, 3]] * 3, 4, topology=Topology(2)),
    ExpertLayout([[2, 1, 0, 3]] * 3, 4, topology=Topology(2)),
)


def test_a_layer_that_is_named_twice_is_moved_once() -> None:
    old = ExpertLayout([[0, 1, 2, 3], [0, 1, 2, 3]], 4, topology=Topology(2))
    new = ExpertLayout([[2, 0, 3, 1], [3, 2, 1, 0]], 4, topology=Topology(2))
    world = World(old)
    assert move(world, new, layers=[1, 0, 1]) == [new, new]
    world.check(new)


def test_ranks_that_move_other_layers_are_refused() -> None:
    """Each would be done after as many steps, in a layout of its own."""
    old = ExpertLayout([[0, 1, 2, 3], [0, 1, 2, 3]], 4, topology=Topology(2))
    new = ExpertLayout([[2, 1, 0, 3], [0, 3, 2, 1]], 4, topology=Topology(2))
    world = World(old)
    for result in move(world, new, layers=lambda rank: [rank]):
        assert isinstance(result, MigrationError)
        assert "layers to move of rank 1 (=[1]) must be as on rank 0 (=[0])" in str(result)
    world.check(old)


def test_a_read_that_fails_ends_the_move_on_every_rank_between_two_layers() -> None:
    """F6: layers 0 and 1 are new, 2 is old, on both ranks."""
    old, new = SWAP
    world = World(old)
    world.transports[1] = FailsAt(2)
    reached = old.replace(new, [0, 1])
    for error in move(world, new):
        assert isinstance(error, MigrationError)
        assert error.layout == reached
        assert (error.reason, error.rank) == ("read", 1)
        assert "reading from rank 0 ended as FAILED: the cable was cut" in str(error)
    world.check(reached)


def test_reads_that_do_not_end_are_given_up_on_and_their_staging_stays_alive() -> None:
    old, new = SWAP
    world = World(old, DeferredCopy)
    for error in move(world, new, deadline=0.05):
        assert isinstance(error, MigrationError)
        assert error.reason == "deadline"
        assert error.layout == old
    for transport in world.transports.values():
        assert transport.complete() == 1  # type: ignore[attr-defined]  # late: lands in staging that is kept
    world.check(old)


def test_ranks_that_do_not_fit_are_refused_before_a_byte_moves() -> None:
    """E6, B8: another target, another layout, other tensors; the text is the same on every rank."""
    old, new = SWAP
    world = World(old)
    results = world.each(
        lambda rank: move_experts(
            world.stores[rank],
            old,
            [new, old][rank],
            rank=rank,
            transport=world.transports[rank],
            agreement=world.agreements[rank],
        )
    )
    for error in results:
        assert isinstance(error, MigrationError)
        assert "target of rank 1 (=" in str(error)
        assert error.reason == "join"
    world = World(old)
    world.stores[1] = [ExpertStore({"w13": torch.zeros(2, 9)}) for _ in range(3)]
    assert ["tensors of rank 1 (=['w13']) must be as on rank 0" in str(error) for error in move(world, new)] == [
        True
    ] * 2
    world = World(old)
    world.transports[1].close()
    assert ["no weight was moved: rank 1: this local_copy" in str(error) for error in move(world, new)] == [True] * 2


def test_a_record_is_told_before_and_after_each_layer() -> None:
    """R26, R28."""
    old, new = SWAP
    world = World(old)
    keepers = [Keeper(old) for _ in world.ranks]
    move(world, new, record=lambda rank: keepers[rank])
    for keeper in keepers:
        assert keeper.said == ["begin", "commit"] * 3
        assert (keeper.layout, keeper.adopted) == (new, 3)


@pytest.mark.parametrize("status", ["busy", "refused"])
def test_a_record_that_does_not_agree_stops_all_ranks_and_those_that_began_abort(status: str) -> None:
    """R26."""
    old, new = SWAP
    world = World(old)
    keepers = [Keeper(old), Keeper(old, begin=Answer(status, "engine 'b' is there"))]
    for error in move(world, new, record=lambda rank: keepers[rank]):
        assert isinstance(error, MigrationError)
        assert (error.reason, error.rank, error.layout) == (status, 1, old)
        assert "layer 0: engine 'b' is there" in str(error)
    assert [keeper.said for keeper in keepers] == [["begin", "abort"], ["begin"]]
    world.check(old)


def test_a_record_that_holds_another_layout_ends_moves_for_good() -> None:
    """R28: the weights are new; the error says what to restart."""
    old, new = SWAP
    world = World(old)
    keepers = [Keeper(old), Keeper(old, digest="0123456789abcdef")]
    for error in move(world, new, record=lambda rank: keepers[rank]):
        assert isinstance(error, MigrationError)
        assert error.reason == "record"
        assert "the record's layout (=0123456789ab) must be" in str(error)
        assert error.layout == old.replace(new, [0])
    assert [keeper.said[-1] for keeper in keepers] == ["off", "off"]
    world.check(old.replace(new, [0]))


class BrokenTables:
    """Dispatch tables that cannot be installed."""

    def install(self, layout: ExpertLayout, **options: Any) -> None:
        raise RuntimeError("out of memory")


def test_tables_that_raise_end_the_move_on_all_ranks_and_the_layer_is_recorded() -> None:
    """The weights are new by then, and the other ranks would wait for a word until their deadline."""
    old, new = SWAP
    world = World(old)
    keepers = [Keeper(old) for _ in world.ranks]
    tables = [DispatchTables(old, rank=0), BrokenTables()]
    for error in move(world, new, record=lambda rank: keepers[rank], tables=lambda rank: tables[rank]):
        assert isinstance(error, MigrationError)
        assert (error.reason, error.rank, error.layout) == ("failed", 1, old.replace(new, [0]))
        assert "layer 0: the tables were not installed: out of memory" in str(error)
    assert [keeper.said for keeper in keepers] == [["begin", "commit"]] * 2
    world.check(old.replace(new, [0]))


def test_a_record_on_some_ranks_alone_is_refused() -> None:
    """R30."""
    old, new = SWAP
    world = World(old)
    results = move(world, new, record=lambda rank: Keeper(old) if rank else None)
    assert all("record of rank 1 (=True) must be as on rank 0 (=False)" in str(error) for error in results)


def test_experts_of_a_dead_rank_come_from_the_backup() -> None:
    """H1: expert 2 and 3 lived on rank 1 alone; ranks 0 and 2 agree without it."""
    topology = Topology(3)
    old = ExpertLayout([[0, 1, 2, 3, 0, 1]], 4, topology=topology)
    new = ExpertLayout([[2, 1, -1, -1, 0, 3]], 4, topology=topology)
    world = World(old, ranks=[0, 2])
    assert move(world, new, backup=Shelf()) == [new, new]
    world.check(new)
    world = World(old, ranks=[0, 2])
    for error in move(world, new):
        assert isinstance(error, MigrationError)
        assert error.reason == "backup"
        assert "no live rank holds expert 2 of layer 0" in str(error)
    world.check(old)


def test_tables_that_cannot_hold_the_target_are_refused_before_anything_moves() -> None:
    old = ExpertLayout([[0, 1, 2, 0, 1, 2]] * 2, 3, topology=Topology(2))
    many = ExpertLayout([[0, 1, 2, 0, 0, 0]] * 2, 3, topology=Topology(2))
    world = World(old)
    tables = {rank: DispatchTables(old, rank=rank, mode="even", max_replicas=3) for rank in world.ranks}
    results = move(world, many, tables=tables.__getitem__)
    assert {str(error) for error in results} == {"an expert has 4 replicas and `tables` hold 3; make tables for more"}
    world.check(old)
    other = {rank: DispatchTables(many, rank=rank, mode="even") for rank in world.ranks}
    assert all("`tables` dispatch by the layout" in str(error) for error in move(world, many, tables=other.__getitem__))
    world.check(old)


def test_tables_that_cannot_hold_a_row_on_the_way_end_the_move_before_that_layer() -> None:
    old, new = CROWDED
    world = World(old)
    tables = {rank: DispatchTables(old, rank=rank, mode="even", max_replicas=3) for rank in world.ranks}
    results = move(world, new, tables=tables.__getitem__, staging=SLOT)
    assert all("hold 3 on the way of layer 0; give more `staging`" in str(error) for error in results)
    reached = results[0].layout
    world.check(reached)
    assert [tables[rank].layout for rank in world.ranks] == [reached] * 3
    assert move(World(old), new, tables=None, staging=SLOT) == [new] * 3


class Breaks(LocalCopy):
    def poll(self, ticket: Any) -> Any:
        raise OSError("the card was unplugged")


def test_a_transport_that_raises_ends_the_move_on_all_ranks() -> None:
    """F6: the others wait for a word of this rank, not for the agreement's deadline."""
    old, new = SWAP
    world = World(old)
    world.transports[1] = Breaks()
    for error in move(world, new):
        assert isinstance(error, MigrationError)
        assert (error.reason, error.rank, error.layout) == ("read", 1, old)
        assert "layer 0: OSError: the card was unplugged" in str(error)
    world.check(old)


class Unreachable(LocalCopy):
    """Of another process, as it says."""

    def _register(self, regions: Any) -> dict[str, Any]:
        return {"process": "another one"}


def test_a_peer_that_cannot_be_reached_is_named_on_all_ranks_before_a_byte_moves() -> None:
    old, new = SWAP
    world = World(old)
    world.transports[1] = Unreachable()
    for error in move(world, new):
        assert isinstance(error, MigrationError)
        assert "rank 0: rank 1 must be in this process; use SharedMemory" in str(error)
    world.check(old)


class Fails(LocalCopy):
    """Raises what is no TransportError, in one of its calls."""

    def __init__(self, call: str, error: BaseException) -> None:
        super().__init__()
        self.call, self.error = call, error

    def export(self, regions: Any) -> bytes:
        self.fail_in("export")
        return super().export(regions)

    def connect(self, rank: int, blob: bytes) -> None:
        self.fail_in("connect")
        super().connect(rank, blob)

    def poll(self, ticket: Any) -> Any:
        self.fail_in("poll")
        return super().poll(ticket)

    def fail_in(self, call: str) -> None:
        if call == self.call:
            raise self.error


@pytest.mark.parametrize("call", ["export", "connect", "poll"])
@pytest.mark.parametrize("error", [RuntimeError("no driver"), CancelledError("no driver")])
def test_whatever_a_transport_raises_every_rank_hears_of_it(call: str, error: BaseException) -> None:
    old, new = SWAP
    world = World(old)
    world.transports[1] = Fails(call, error)
    results = move(world, new)
    assert [type(result) for result in results] == [MigrationError, MigrationError]
    assert len({str(result) for result in results}) == 1
    assert f"{type(error).__name__}: no driver" in str(results[0])
    world.check(old)


def test_members_that_take_themselves_for_the_same_rank_are_refused_on_all() -> None:
    old, new = SWAP
    world = World(old)
    errors = world.each(
        lambda member: move_experts(
            world.stores[0], old, new, rank=0, transport=world.transports[member], agreement=world.agreements[member]
        )
    )
    for error in errors:
        assert isinstance(error, MigrationError)
        assert "`rank` (=[0, 0]) must be unique per member and in [0, 2)" in str(error)


class Refuses(LocalCopy):
    """Begins no read."""

    error: BaseException = TransportError("the queue is full")

    def _start(self, peer: Any, spans: Any, stream: Any) -> Any:
        raise self.error


def test_a_read_that_cannot_begin_ends_the_move_on_all_ranks() -> None:
    old, new = SWAP
    world = World(old)
    world.transports[1] = Refuses()
    for error in move(world, new):
        assert isinstance(error, MigrationError)
        assert "the queue is full" in str(error)
    world.check(old)


def test_an_interrupt_ends_the_move_as_an_interrupt() -> None:
    old, new = (ExpertLayout([row], 2, topology=Topology(1)) for row in ([0, 1, -1], [0, 1, 1]))
    world = World(old)
    with pytest.raises(KeyboardInterrupt):
        move_experts(
            world.stores[0],
            old,
            new,
            rank=0,
            transport=world.transports[0],
            agreement=world.agreements[0],
            record=cast(Any, Interrupted(old)),
        )
    world.check(old)


class Interrupted(Keeper):
    """Its user presses Ctrl-C in the middle of an answer."""

    def begin(self, layers: list[int], version: int) -> Answer:
        raise KeyboardInterrupt


class Leaves(LocalAgreement):
    """Dies after it has joined."""

    left = 2

    def gather(self, blob: bytes) -> list[bytes]:
        self.left -= 1
        if self.left < 0:
            self.leave()
            raise AgreementError("dead")
        return super().gather(blob)


def test_staging_outlives_a_move_whose_agreement_failed_while_a_read_may_still_write() -> None:
    """Rule 7: the rank that stopped answering is the one that is read from; its bytes may yet arrive."""
    old, new = SWAP
    world = World(old)
    stuck = world.transports[0] = DeferredCopy()
    world.agreements = dict(enumerate(Leaves.group(2)))
    world.agreements[0].left = 100  # type: ignore[attr-defined]
    staging = [torch.zeros(SLOT, dtype=torch.uint8) for _ in world.ranks]
    held = weakref.ref(staging[0])
    results = move(world, new, staging=staging.__getitem__, deadline=0.2)
    assert [type(error) for error in results] == [MigrationError, MigrationError]
    del results, staging
    gc.collect()
    assert held() is not None
    assert stuck.complete() == 1
    world.check(old)


class Asked(DeferredCopy):
    """Counts how often it is asked how far a read is."""

    asked = 0

    def poll(self, ticket: Any) -> Any:
        self.asked += 1
        return super().poll(ticket)


def test_staging_is_kept_until_the_last_read_that_was_given_up_on_has_ended() -> None:
    """Whoever lets go of it, and as long as it takes; then the next user of the transport tidies up."""
    old, new = SWAP
    world = World(old, Asked)
    before = set(_WRITTEN)
    assert [error.reason for error in move(world, new, deadline=0.05)] == ["deadline"] * 2
    kept = _WRITTEN - before
    assert {id(puller.transport) for puller in kept} == {id(transport) for transport in world.transports.values()}
    asked = [transport.asked for transport in world.transports.values()]  # type: ignore[attr-defined]
    move(World(old), new)  # other threads may be using those
    assert asked == [transport.asked for transport in world.transports.values()]  # type: ignore[attr-defined]
    assert kept <= _WRITTEN
    for transport in world.transports.values():
        transport.complete()  # type: ignore[attr-defined]
    move(world, new, deadline=0.05)
    assert not kept & _WRITTEN


def test_allocations_that_follow_each_other_in_memory_are_exported_one_by_one() -> None:
    """A transport of device memory can export one alone; a tensor of all slots is one region all the same."""
    memory = bytearray(4 * 64)
    apart = [torch.frombuffer(memory, dtype=torch.uint8, count=64, offset=64 * slot) for slot in range(4)]
    store = ExpertStore({"w": apart, "scale": torch.zeros(4, 16)})
    regions, places = regions_of([store], Staging(None, [store]))
    assert [region.nbytes for region in regions[1:]] == [64, 64, 64, 64, 256]
    assert places[0, :, 0].tolist() == [[1, 0], [2, 0], [3, 0], [4, 0]]
    assert places[0, :, 1].tolist() == [[5, 0], [5, 64], [5, 128], [5, 192]]


def test_bad_arguments_are_named() -> None:
    old, new = SWAP
    stores = stores_of(old, 0)
    options: dict[str, Any] = {"rank": 0, "transport": LocalCopy(), "agreement": World(old).agreements[0]}
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: move_experts(stores[:2], old, new, **options), ValueError, r"length 2\) must have .*=3"),
        (
            lambda: move_experts(stores, old, new, **{**options, "rank": 2}),
            ValueError,
            r"`rank` \(=2\) must be in \[0, 2\)",
        ),
        (
            lambda: move_experts(stores, old, new, **options, deadline=0),
            ValueError,
            r"`deadline` \(=0.0\) must be above 0",
        ),
        (
            lambda: move_experts(stores, old, new, **options, staging=66),
            ValueError,
            r"`staging` \(=66 bytes\) must hold",
        ),
        (lambda: move_experts(stores, old, World, **options), TypeError, r"`new` \(=type\) must be an ExpertLayout"),  # type: ignore[arg-type]
        (lambda: move_experts(stores, [[0]], new, **options), TypeError, r"`old` \(=list\) must be an ExpertLayout"),  # type: ignore[arg-type]
    ]
    for call, kind, text in cases:
        with pytest.raises(kind, match=text):
            call()
