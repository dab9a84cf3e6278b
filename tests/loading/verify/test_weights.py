from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core import ExpertLayout, ExpertStore, Topology, fingerprints, verify_weights
from eplb_core.loading.verify.weights import UNKNOWN, WeightReport

# Two layers on two ranks: replicas across ranks (0, 2), a pair on one rank (3), single experts (1), an empty slot.
LAYOUT = ExpertLayout([[0, 1, 2, 2, 3, 3, 0, -1], [3, 2, 1, 0, 0, 1, 2, 3]], 4, topology=Topology(num_ranks=2))


# Every kind of tensor that engines keep by slot: name -> dtype, bytes of a row. int4 weights are packed in bytes or in
# 32-bit words; odd byte counts and counts that are no multiple of 16 need the slow paths of the kernels.
KINDS = {
    "bf16_weight": (torch.bfloat16, 3072),
    "fp8_weight": (torch.float8_e4m3fn, 2064),
    "int4_packed_weight": (torch.uint8, 1536),
    "int4_packed_words": (torch.int32, 516),
    "scale": (torch.float32, 36),
    "scale_e8m0": (torch.float8_e8m0fnu, 33),
    "zero_points": (torch.int8, 7),
    "bias": (torch.bfloat16, 10),
    "one_scale": (torch.float32, 4),
}


def random_bytes(seed: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=seed)


class Cluster:
    """All ranks' weights: bytes that are no expert's, then those of the layout, and what was recorded at load."""

    def __init__(self, device: torch.device) -> None:
        noise = torch.Generator().manual_seed(1)

        def poisoned() -> ExpertStore:
            rows = {name: random_bytes(noise, LAYOUT.slots_per_rank, nbytes) for name, (_, nbytes) in KINDS.items()}
            return ExpertStore({name: rows[name].to(device).view(dtype) for name, (dtype, _) in KINDS.items()})

        self.stores = [[poisoned() for _ in range(LAYOUT.num_layers)] for _ in range(LAYOUT.topology.num_ranks)]
        self.before_load = self.prints()
        for (layer, slot), expert in np.ndenumerate(LAYOUT.physical_to_logical_map):
            for column, (name, (_, nbytes)) in enumerate(KINDS.items()):
                if expert >= 0:
                    own = torch.Generator().manual_seed((layer * 1009 + int(expert)) * 64 + column)
                    self.row(layer, slot, name).copy_(random_bytes(own, nbytes))
        self.reference = self.verify().by_expert

    def prints(self) -> list[torch.Tensor]:
        return [fingerprints(stores) for stores in self.stores]

    def verify(self, **arguments: Any) -> WeightReport:
        return verify_weights(self.prints(), LAYOUT, **arguments)

    def row(self, layer: int, slot: int, name: str) -> torch.Tensor:
        rank, local = divmod(slot, LAYOUT.slots_per_rank)
        return self.stores[rank][layer].row(name, local)


@pytest.fixture
def cluster(device: torch.device) -> Cluster:
    return Cluster(device)


def test_weights_that_match_the_layout_have_no_fault(cluster: Cluster) -> None:
    first = cluster.verify()
    assert first.ok
    assert (first.num_checked, first.num_unchecked) == (14, 1)  # expert 1 of layer 0 has one slot
    again = cluster.verify(reference=cluster.reference)
    assert (again.faults, again.num_checked, again.num_unchecked) == ((), 15, 0)
    assert np.array_equal(again.by_expert, cluster.reference)
    assert str(again) == "15 slots checked, 0 on trust, 0 faults"


# ---- faults, each in every kind of tensor ----------------------------------------------------------------------------


def test_a_flipped_bit_is_found_in_every_tensor(cluster: Cluster) -> None:
    for column, name in enumerate(KINDS):
        for layer, slot in ((0, 1), (0, 4), (1, 7)):
            row = cluster.row(layer, slot, name)
            row[-1] ^= 16
            (fault,) = cluster.verify(reference=cluster.reference).faults
            expert = int(LAYOUT.physical_to_logical_map[layer, slot])
            assert fault == (layer, slot, slot // 4, expert, "unknown_bytes", -1, (column,))
            row[-1] ^= 16
    assert cluster.verify(reference=cluster.reference).ok


def test_exchanged_slots_are_found_and_named(cluster: Cluster) -> None:
    """A layout and weights that disagree: slots 1 and 2 of layer 0 hold each other's expert."""
    for name in KINDS:
        first, second = cluster.row(0, 1, name), cluster.row(0, 2, name)
        held = first.clone()
        first.copy_(second)
        second.copy_(held)
    columns = tuple(range(len(KINDS)))
    report = cluster.verify(reference=cluster.reference)
    assert report.faults == ((0, 1, 0, 1, "wrong_expert", 2, columns), (0, 2, 0, 2, "wrong_expert", 1, columns))
    assert "layer 0, slot 1 (rank 0) must hold expert 1 and holds expert 2" in str(report)


def test_a_tensor_that_stayed_behind_is_found_and_named(cluster: Cluster) -> None:
    """E3: the weights moved and one tensor did not, whichever it is."""
    for column, name in enumerate(KINDS):
        row, other = cluster.row(1, 5, name), cluster.row(1, 6, name)
        kept = row.clone()
        row.copy_(other)
        (fault,) = cluster.verify(reference=cluster.reference).faults
        assert fault == (1, 5, 1, 1, "wrong_expert", 2, (column,))
        row.copy_(kept)


def test_a_stale_replica_is_found_without_a_reference(cluster: Cluster) -> None:
    """E5, D10: one of two replicas kept the old weights; nothing says which, so both are named."""
    for name in KINDS:
        row = cluster.row(0, 6, name)
        row.copy_(255 - row)
        report = cluster.verify()
        assert [(fault.layer, fault.slot, fault.kind) for fault in report.faults] == [
            (0, 0, "disagree"),
            (0, 6, "disagree"),
        ]
        assert (report.by_expert[0, 0] == UNKNOWN).all()
        assert (report.by_expert[0, 1] != UNKNOWN).all()
        with_reference = cluster.verify(reference=cluster.reference).faults
        assert [(fault.slot, fault.kind) for fault in with_reference] == [(6, "unknown_bytes")]
        row.copy_(255 - row)


def test_a_majority_of_replicas_outvotes_one(cluster: Cluster) -> None:
    layout = ExpertLayout([[0, 1, 0, 2, 3, 0, 1, 2]], 4, topology=Topology(num_ranks=2))
    prints = np.array([[10, 11, 66, 12, 13, 10, 11, 12]])[:, :, None]
    (fault,) = verify_weights(prints, layout).faults
    assert fault == (0, 2, 0, 0, "unknown_bytes", -1, (0,))


def test_a_zeroed_slot_is_found(cluster: Cluster) -> None:
    for name in KINDS:
        cluster.row(1, 3, name).zero_()
    (fault,) = cluster.verify(reference=cluster.reference).faults
    assert (fault.slot, fault.kind, fault.tensors) == (3, "zeros", tuple(range(len(KINDS))))


def test_zeros_are_found_without_a_reference_and_are_none(cluster: Cluster) -> None:
    """All replicas of expert 1 of layer 0, and one of two of expert 3 of layer 1."""
    for name in KINDS:
        cluster.row(0, 1, name).zero_()
    report = cluster.verify()
    columns = tuple(range(len(KINDS)))
    assert report.faults == ((0, 1, 0, 1, "zeros", -1, columns),)
    assert (report.by_expert[0, 1] == UNKNOWN).all()
    assert "layer 0, slot 1 (rank 0) must hold expert 1 and holds zeros" in str(report)
    assert [fault.kind for fault in verify_weights(np.zeros((2, 8, 3), dtype=np.int64), LAYOUT).faults] == [
        "zeros"
    ] * 15
    assert verify_weights(np.zeros((2, 8, 3), dtype=np.int64), LAYOUT, reference=np.zeros((2, 4, 3), dtype=int)).ok


def test_two_experts_with_equal_bytes_are_found_without_a_reference_and_neither_is_one(cluster: Cluster) -> None:
    """A loader that wrote one expert twice: the only slot of expert 1 has what the slots of expert 2 have."""
    *names, last = KINDS
    for name in names:
        cluster.row(0, 1, name).copy_(cluster.row(0, 2, name))
    assert cluster.verify().ok  # some tensors of two experts may be equal
    cluster.row(0, 1, last).copy_(cluster.row(0, 2, last))
    report = cluster.verify()
    found = [(fault.layer, fault.expert, fault.kind, fault.holds) for fault in report.faults]
    assert found == [(0, 1, "same_bytes", 2)] + [(0, 2, "same_bytes", 1)] * (len(found) - 1)
    assert len(found) == 1 + len(LAYOUT.slots(0, 2))
    assert (report.by_expert[0, [1, 2]] == UNKNOWN).all()
    assert "must hold expert 1 and holds the same bytes as expert 2, and nothing says whose they are" in str(report)
    known = cluster.reference.copy()
    known[0, 1] = UNKNOWN  # a reference of the other says whose they are
    (fault,) = cluster.verify(reference=known).faults
    assert (fault.expert, fault.kind, fault.holds) == (1, "wrong_expert", 2)


@pytest.mark.parametrize("with_reference", [False, True])
def test_a_slot_that_was_never_written_is_unloaded_and_no_reference(cluster: Cluster, with_reference: bool) -> None:
    """D1, E17: memory was poisoned, slot 1 holds the only replica of its expert, and the loader skipped it."""
    loaded = np.ones((2, 8), dtype=bool)
    loaded[0, [1, 6]] = False
    for place, name in enumerate(KINDS):
        cluster.row(0, 1, name).random_(0, 256)
        if place % 2:
            cluster.row(0, 6, name).random_(0, 256)
    report = cluster.verify(loaded=loaded, reference=cluster.reference if with_reference else None)
    assert report.faults == ((0, 1, 0, 1, "unloaded", -1, ()), (0, 6, 1, 0, "unloaded", -1, ()))
    assert (report.by_expert[0, 0] == cluster.reference[0, 0]).all()
    assert (report.by_expert[0, 1] == UNKNOWN).all() == (not with_reference)
    assert "slot 1 (rank 0) must hold expert 1 and was not written by the loader" in str(report)


def test_a_slot_that_the_loader_skipped_is_unloaded_whatever_it_holds(cluster: Cluster) -> None:
    loaded = np.ones((2, 8), dtype=bool)
    loaded[1, 5] = False
    report = cluster.verify(loaded=loaded, reference=cluster.reference)
    assert report.faults == ((1, 5, 1, 1, "unloaded", -1, ()),)


def test_poisoned_memory_is_never_taken_for_weights(cluster: Cluster) -> None:
    """A loader that wrote nothing: every replicated expert disagrees, and with a reference every slot is a fault."""
    report = verify_weights(cluster.before_load, LAYOUT)
    assert {(fault.layer, fault.slot) for fault in report.faults} == {
        (layer, slot) for layer in (0, 1) for slot in range(8)
    } - {(0, 1), (0, 7)}
    with_reference = verify_weights(cluster.before_load, LAYOUT, reference=cluster.reference)
    assert len(with_reference.faults) == 15
    assert {fault.kind for fault in with_reference.faults} == {"unknown_bytes"}


def test_a_layout_installed_without_its_moves_is_found(cluster: Cluster) -> None:
    """D8, D9, I1: maps changed and weights did not; every slot that changed is named with what it holds."""
    other = ExpertLayout([[0, 2, 1, 2, 3, 3, 0, -1], [3, 2, 1, 0, 0, 1, 2, 3]], 4, topology=Topology(num_ranks=2))
    report = verify_weights(cluster.prints(), other, reference=cluster.reference)
    assert [(fault.slot, fault.expert, fault.holds) for fault in report.faults] == [(1, 2, 1), (2, 1, 2)]


# ---- shapes, layers, whole tensors -----------------------------------------------------------------------------------


def test_some_layers_are_checked_and_the_reference_of_others_is_kept(cluster: Cluster) -> None:
    prints = [fingerprints(stores, layers=[1]) for stores in cluster.stores]
    assert verify_weights(prints, LAYOUT, layers=[1], reference=cluster.reference).ok
    first = verify_weights(prints, LAYOUT, layers=[1])
    assert (first.by_expert[0] == UNKNOWN).all()
    assert np.array_equal(first.by_expert[1], cluster.reference[1])
    cluster.row(1, 0, "scale")[0] ^= 1
    prints = [fingerprints(stores, layers=[1]) for stores in cluster.stores]
    (fault,) = verify_weights(prints, LAYOUT, layers=[1], reference=cluster.reference).faults
    assert (fault.layer, fault.slot) == (1, 0)


def test_a_list_a_stack_and_slots_in_a_row_are_the_same_prints(cluster: Cluster) -> None:
    prints = cluster.prints()
    flat = torch.cat(prints, dim=1)
    for form in (prints, tuple(prints), torch.stack(prints), torch.stack(prints).cpu().numpy(), flat):
        assert np.array_equal(verify_weights(form, LAYOUT).by_expert, cluster.reference)


def test_rows_of_whole_tensors_are_checked_on_every_rank(device: torch.device) -> None:
    """R38, D4: a scale that each rank keeps for all slots."""
    layout = ExpertLayout([[2, 3, 0, 1, 2, 2]], 4, topology=Topology(num_ranks=2))
    scales = [torch.tensor([2.0, 3.0, 5.0, 1.0, 2.0, 2.0], device=device) for _ in range(2)]
    weights = torch.ones(3, 2, device=device)
    stores = [[ExpertStore({"w": weights}, whole={"scale": scale})] for scale in scales]
    reference = verify_weights([fingerprints(s, whole=True) for s in stores], layout).by_expert
    scales[1][4] = 3.0
    (fault,) = verify_weights([fingerprints(s, whole=True) for s in stores], layout, reference=reference).faults
    assert fault == (0, 4, 1, 2, "wrong_expert", 3, (0,))
    with pytest.raises(ValueError, match="`loaded` must be None with prints of whole tensors"):
        verify_weights([fingerprints(s, whole=True) for s in stores], layout, loaded=np.ones((1, 6), dtype=bool))


ZEROS = np.zeros((2, 8, 1), dtype=int)


@pytest.mark.parametrize(
    ("prints", "arguments", "error", "text"),
    [
        (np.zeros((2, 2, 4, 1)), {}, TypeError, r"\(dtype float64\) must be int64"),
        (np.zeros((2, 2, 3, 1), dtype=int), {}, ValueError, r"\(shape \[2, 2, 3, 1\]\) must be \[2, 2, 4, tensors\]"),
        (ZEROS.reshape(2, 2, 4, 1)[:1], {}, ValueError, r"\(shape \[1, 2, 4, 1\]\) must be .* or \[2, 8, tensors\]"),
        (ZEROS, {"layers": [0]}, ValueError, r"must be \[2, 1, 4, tensors\]"),
        (ZEROS, {"layers": [2, 0]}, IndexError, r"`layers` \(=2\) must be in \[0, 2\)"),
        (
            ZEROS,
            {"reference": np.zeros((2, 4, 2), dtype=int)},
            ValueError,
            r"`reference` \(int64 \[2, 4, 2\]\) must be int64 \[2, 4, 1\]",
        ),
        (
            ZEROS,
            {"loaded": np.ones((2, 4), dtype=bool)},
            ValueError,
            r"`loaded` \(bool \[2, 4\]\) must be bool \[2, 8\]",
        ),
    ],
)
def test_shapes_that_do_not_belong_to_the_layout_raise(
    prints: Any, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        verify_weights(prints, LAYOUT, **arguments)


def test_long_reports_say_how_many_more() -> None:
    prints = np.arange(16).reshape(2, 8, 1)
    report = verify_weights(prints, LAYOUT)
    assert str(report).startswith("14 slots checked, 1 on trust, 14 faults\nlayer 0, slot 0 (rank 0)")
    assert str(report).endswith("\n... 6 more")


# ---- properties ------------------------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(
    rows=st.lists(st.permutations([0, 1, 2, 3, 0, 3, -1, 2]), min_size=1, max_size=3),
    wrong=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 7))),
)
def test_with_a_reference_exactly_the_wrong_slots_are_named(rows: list[list[int]], wrong: set[tuple[int, int]]) -> None:
    layout = ExpertLayout(rows, 4, topology=Topology(num_ranks=2))
    reference = np.arange(len(rows) * 4 * 2).reshape(len(rows), 4, 2) + 1000
    p2l = layout.physical_to_logical_map
    prints = np.take_along_axis(reference, np.maximum(p2l, 0)[:, :, None], axis=1)
    expected = []
    for layer, slot in sorted(wrong):
        if layer < len(rows):
            prints[layer, slot, 1] += 10**6
            if p2l[layer, slot] >= 0:
                expected.append((layer, slot, int(p2l[layer, slot])))
    report = verify_weights(prints, layout, reference=reference)
    assert [(fault.layer, fault.slot, fault.expert) for fault in report.faults] == expected
    assert np.array_equal(report.by_expert, reference)
