"""Synchronous moves of labelled weights, all ranks as threads."""

from __future__ import annotations

import gc
import weakref
from asyncio import CancelledError
from typing import Any

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
from tests.loading.fleets import SLOT, Answer, FailsAt, Keeper, Shelf, breaks
from tests.loading.worlds import CROWDED, NEW, OLD, World, layout_pairs, stores_of


@settings(deadline=None, max_examples=40)
@given(layout_pairs(), st.integers(1, 4))
def test_any_move_ends_with_every_expert_in_its_slots(layouts: tuple[ExpertLayout, ...], slots: int) -> None:
    """One slot of staging is enough; rows of whole tensors move too."""
    old, new = layouts
    world = World(old)
    assert world.move_all(new, staging=slots * SLOT) == [new] * len(world.ranks)
    world.check(new)


def test_dispatch_targets_the_new_slots_after_a_move() -> None:
    """B12: tables and weights change together."""
    topology = Topology(2)
    old = ExpertLayout([[0, 1, 2, 3]], 4, topology=topology)
    new = ExpertLayout([[3, 1, 2, 0]], 4, topology=topology)
    world = World(old)
    tables = {rank: DispatchTables(old, rank=rank) for rank in world.ranks}
    world.move_all(new, tables=lambda rank: tables[rank])
    world.check(new)
    for table in tables.values():
        assert table.layout == new
        assert table.map(0, torch.tensor([[0], [3]])).tolist() == [[3], [0]]


def test_layers_that_are_left_out_stay() -> None:
    topology = Topology(2)
    old = ExpertLayout([[0, 1], [0, 1]], 2, topology=topology)
    new = ExpertLayout([[1, 0], [1, 0]], 2, topology=topology)
    world = World(old)
    reached = world.move_all(new, layers=[1])[0]
    assert reached.physical_to_logical_map.tolist() == [[0, 1], [1, 0]]
    world.check(reached)


@pytest.fixture
def world() -> World:
    return World(OLD)


def gave_up(results: list[Any], reason: str, text: str, **fields: Any) -> None:
    """Every rank raised the same: why, in words, and fields of the error."""
    for error in results:
        assert isinstance(error, MigrationError)
        assert error.reason == reason
        assert text in str(error)
        assert {name: getattr(error, name) for name in fields} == fields
    assert len({str(error) for error in results}) == 1


def test_a_layer_that_is_named_twice_is_moved_once() -> None:
    old = ExpertLayout([[0, 1, 2, 3], [0, 1, 2, 3]], 4, topology=Topology(2))
    new = ExpertLayout([[2, 0, 3, 1], [3, 2, 1, 0]], 4, topology=Topology(2))
    world = World(old)
    assert world.move_all(new, layers=[1, 0, 1]) == [new, new]
    world.check(new)


def test_ranks_that_move_other_layers_are_refused() -> None:
    """Each would be done after as many steps, in a layout of its own."""
    old = ExpertLayout([[0, 1, 2, 3], [0, 1, 2, 3]], 4, topology=Topology(2))
    new = ExpertLayout([[2, 1, 0, 3], [0, 3, 2, 1]], 4, topology=Topology(2))
    world = World(old)
    text = "layers to move of rank 1 (=[1]) must be as on rank 0 (=[0])"
    gave_up(world.move_all(new, layers=lambda rank: [rank]), "join", text)
    world.check(old)


def test_a_read_that_fails_ends_the_move_on_every_rank_between_two_layers(world: World) -> None:
    """F6: layers 0 and 1 are new, 2 is old, on both ranks."""
    world.transports[1] = FailsAt(2)
    reached = OLD.replace(NEW, [0, 1])
    text = "reading from rank 0 ended as FAILED: the cable was cut"
    gave_up(world.move_all(NEW), "read", text, rank=1, layout=reached)
    world.check(reached)


def test_reads_that_do_not_end_are_given_up_on_and_their_staging_stays_alive() -> None:
    world = World(OLD, DeferredCopy)
    gave_up(world.move_all(NEW, deadline=0.05), "deadline", "", layout=OLD)
    for transport in world.transports.values():
        assert transport.complete() == 1  # late: lands in staging that is kept
    world.check(OLD)


def test_ranks_that_do_not_fit_are_refused_before_a_byte_moves(world: World) -> None:
    """E6, B8: another target, another layout, other tensors; the text is the same on every rank."""
    gave_up(world.move_all([NEW, OLD].__getitem__), "join", "target of rank 1 (=")
    world = World(OLD)
    world.stores[1] = [ExpertStore({"w13": torch.zeros(2, 9)}) for _ in range(3)]
    gave_up(world.move_all(NEW), "join", "tensors of rank 1 (=['w13']) must be as on rank 0")
    world = World(OLD)
    world.transports[1].close()
    gave_up(world.move_all(NEW), "join", "no weight was moved: rank 1: this local_copy")


def test_a_record_is_told_before_and_after_each_layer(world: World) -> None:
    """R26, R28."""
    keepers = [Keeper(OLD) for _ in world.ranks]
    world.move_all(NEW, record=lambda rank: keepers[rank])
    for keeper in keepers:
        assert keeper.said == ["begin", "commit"] * 3
        assert (keeper.layout, keeper.adopted) == (NEW, 3)


@pytest.mark.parametrize("status", ["busy", "refused"])
def test_a_record_that_does_not_agree_stops_all_ranks_and_those_that_began_abort(world: World, status: str) -> None:
    """R26."""
    keepers = [Keeper(OLD), Keeper(OLD, begin=Answer(status, "engine 'b' is there"))]
    results = world.move_all(NEW, record=keepers.__getitem__)
    gave_up(results, status, "layer 0: engine 'b' is there", rank=1, layout=OLD)
    assert [keeper.said for keeper in keepers] == [["begin", "abort"], ["begin"]]
    world.check(OLD)


def test_a_record_that_holds_another_layout_ends_moves_for_good(world: World) -> None:
    """R28: the weights are new; the error says what to restart."""
    keepers = [Keeper(OLD), Keeper(OLD, digest="0123456789abcdef")]
    results = world.move_all(NEW, record=keepers.__getitem__)
    gave_up(results, "record", "the record's layout (=0123456789ab) must be", layout=OLD.replace(NEW, [0]))
    assert [keeper.said[-1] for keeper in keepers] == ["off", "off"]
    world.check(OLD.replace(NEW, [0]))


def test_tables_that_raise_end_the_move_on_all_ranks_and_the_layer_is_recorded(world: World) -> None:
    """The weights are new by then, and the other ranks would wait for a word until their deadline."""
    keepers = [Keeper(OLD) for _ in world.ranks]
    tables = [DispatchTables(OLD, rank=rank) for rank in world.ranks]
    breaks(tables[1], "install", RuntimeError("out of memory"))
    results = world.move_all(NEW, record=keepers.__getitem__, tables=tables.__getitem__)
    text = "layer 0: the tables were not installed: out of memory"
    gave_up(results, "failed", text, rank=1, layout=OLD.replace(NEW, [0]))
    assert [keeper.said for keeper in keepers] == [["begin", "commit"]] * 2
    world.check(OLD.replace(NEW, [0]))


def test_a_record_on_some_ranks_alone_is_refused(world: World) -> None:
    """R30."""
    results = world.move_all(NEW, record=lambda rank: Keeper(OLD) if rank else None)
    gave_up(results, "join", "record of rank 1 (=True) must be as on rank 0 (=False)")


def test_experts_of_a_dead_rank_come_from_the_backup() -> None:
    """H1: expert 2 and 3 lived on rank 1 alone; ranks 0 and 2 agree without it."""
    topology = Topology(3)
    old = ExpertLayout([[0, 1, 2, 3, 0, 1]], 4, topology=topology)
    new = ExpertLayout([[2, 1, -1, -1, 0, 3]], 4, topology=topology)
    world = World(old, ranks=[0, 2])
    assert world.move_all(new, backup=Shelf()) == [new, new]
    world.check(new)
    world = World(old, ranks=[0, 2])
    gave_up(world.move_all(new), "backup", "no live rank holds expert 2 of layer 0")
    world.check(old)


def test_tables_that_cannot_hold_the_target_are_refused_before_anything_moves() -> None:
    old = ExpertLayout([[0, 1, 2, 0, 1, 2]] * 2, 3, topology=Topology(2))
    many = ExpertLayout([[0, 1, 2, 0, 0, 0]] * 2, 3, topology=Topology(2))
    world = World(old)
    tables = {rank: DispatchTables(old, rank=rank, mode="even", max_replicas=3) for rank in world.ranks}
    results = world.move_all(many, tables=tables.__getitem__)
    assert {str(error) for error in results} == {"an expert has 4 replicas and `tables` hold 3; make tables for more"}
    world.check(old)
    other = {rank: DispatchTables(many, rank=rank, mode="even") for rank in world.ranks}
    assert all(
        "`tables` dispatch by the layout" in str(error) for error in world.move_all(many, tables=other.__getitem__)
    )
    world.check(old)


def test_tables_that_cannot_hold_a_row_on_the_way_end_the_move_before_that_layer() -> None:
    old, new = CROWDED
    world = World(old)
    tables = {rank: DispatchTables(old, rank=rank, mode="even", max_replicas=3) for rank in world.ranks}
    results = world.move_all(new, tables=tables.__getitem__, staging=SLOT)
    assert all("hold 3 on the way of layer 0; give more `staging`" in str(error) for error in results)
    reached = results[0].layout
    world.check(reached)
    assert [tables[rank].layout for rank in world.ranks] == [reached] * 3
    assert World(old).move_all(new, tables=None, staging=SLOT) == [new] * 3


class Unreachable(LocalCopy):
    """Of another process, as it says."""

    def _register(self, regions: Any) -> dict[str, Any]:
        return {"process": "another one"}


def test_a_peer_that_cannot_be_reached_is_named_on_all_ranks_before_a_byte_moves(world: World) -> None:
    world.transports[1] = Unreachable()
    gave_up(world.move_all(NEW), "join", "rank 0: rank 1 must be in this process; use SharedMemory")
    world.check(OLD)


@pytest.mark.parametrize("call", ["export", "connect", "_start", "poll"])
@pytest.mark.parametrize("error", [OSError("no card"), CancelledError("no card"), TransportError("no card")])
def test_whatever_a_transport_raises_every_rank_hears_of_it(world: World, call: str, error: BaseException) -> None:
    """F6: the others wait for a word of this rank, not for the agreement's deadline."""
    breaks(world.transports[1], call, error)
    results = world.move_all(NEW)
    if call in ("_start", "poll"):
        gave_up(results, "read", "no card", rank=1, layout=OLD)
    else:
        gave_up(results, "join", "no card")
    assert type(error).__name__ in str(results[0]) or isinstance(error, TransportError)
    world.check(OLD)


def test_members_that_take_themselves_for_the_same_rank_are_refused_on_all(world: World) -> None:
    errors = world.each(
        lambda member: move_experts(
            world.stores[0], OLD, NEW, rank=0, transport=world.transports[member], agreement=world.agreements[member]
        )
    )
    gave_up(errors, "join", "`rank` (=[0, 0]) must be unique per member and in [0, 2)")


def test_an_interrupt_ends_the_move_as_an_interrupt() -> None:
    old, new = (ExpertLayout([row], 2, topology=Topology(1)) for row in ([0, 1, -1], [0, 1, 1]))
    world = World(old)
    keeper = breaks(Keeper(old), "begin", KeyboardInterrupt())
    assert [type(error) for error in world.move_all(new, record=lambda rank: keeper)] == [KeyboardInterrupt]
    world.check(old)


class Leaves(LocalAgreement):
    """Dies after it has joined."""

    left = 2

    def gather(self, blob: bytes) -> list[bytes]:
        self.left -= 1
        if self.left < 0:
            self.leave()
            raise AgreementError("dead")
        return super().gather(blob)


def test_staging_outlives_a_move_whose_agreement_failed_while_a_read_may_still_write(world: World) -> None:
    """Rule 7: the rank that stopped answering is the one that is read from; its bytes may yet arrive."""
    stuck = world.transports[0] = DeferredCopy()
    world.agreements = dict(enumerate(Leaves.group(2)))
    world.agreements[0].left = 100
    staging = [torch.zeros(SLOT, dtype=torch.uint8) for _ in world.ranks]
    held = weakref.ref(staging[0])
    results = world.move_all(NEW, staging=staging.__getitem__, deadline=0.2)
    assert [type(error) for error in results] == [MigrationError, MigrationError]
    del results, staging
    gc.collect()
    assert held() is not None
    assert stuck.complete() == 1
    world.check(OLD)


class Asked(DeferredCopy):
    """Counts how often it is asked how far a read is."""

    asked = 0

    def poll(self, ticket: Any) -> Any:
        self.asked += 1
        return super().poll(ticket)


def test_staging_is_kept_until_the_last_read_that_was_given_up_on_has_ended() -> None:
    """Whoever lets go of it, and as long as it takes; then the next user of the transport tidies up."""
    world = World(OLD, Asked)
    before = set(_WRITTEN)
    assert [error.reason for error in world.move_all(NEW, deadline=0.05)] == ["deadline"] * 2
    kept = _WRITTEN - before
    assert {id(puller.transport) for puller in kept} == {id(transport) for transport in world.transports.values()}
    asked = [transport.asked for transport in world.transports.values()]
    World(OLD).move_all(NEW)  # other threads may be using those
    assert asked == [transport.asked for transport in world.transports.values()]
    assert kept <= _WRITTEN
    for transport in world.transports.values():
        transport.complete()
    world.move_all(NEW, deadline=0.05)
    assert not kept & _WRITTEN


def test_allocations_that_follow_each_other_in_memory_are_exported_one_by_one() -> None:
    """A transport of device memory can export one alone; a tensor of all slots is one region all the same."""
    memory = bytearray(4 * 64)
    apart = [torch.frombuffer(memory, dtype=torch.uint8, count=64, offset=64 * slot) for slot in range(4)]
    store = ExpertStore({"w": apart, "scale": torch.zeros(4, 16)})
    regions, places = regions_of([store], Staging(None, [store]), store.num_slots)
    assert [region.nbytes for region in regions[1:]] == [64, 64, 64, 64, 256]
    assert places[0, :, 0].tolist() == [[1, 0], [2, 0], [3, 0], [4, 0]]
    assert places[0, :, 1].tolist() == [[5, 0], [5, 64], [5, 128], [5, 192]]


def test_bad_arguments_are_named() -> None:
    stores = stores_of(OLD, 0)
    options: dict[str, Any] = {"rank": 0, "transport": LocalCopy(), "agreement": World(OLD).agreements[0]}
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"stores": stores[:2]}, ValueError, r"length 2\) must have .*=3"),
        ({"rank": 2}, ValueError, r"`rank` \(=2\) must be in \[0, 2\)"),
        ({"deadline": 0}, ValueError, r"`deadline` \(=0.0\) must be above 0"),
        ({"staging": 66}, ValueError, r"`staging` \(=66 bytes\) must hold"),
        ({"new": World}, TypeError, r"`new` \(=type\) must be an ExpertLayout"),
        ({"old": [[0]]}, TypeError, r"`old` \(=list\) must be an ExpertLayout"),
    ]
    for wrong, kind, text in cases:
        with pytest.raises(kind, match=text):
            move_experts(**{"stores": stores, "old": OLD, "new": NEW, **options, **wrong})
