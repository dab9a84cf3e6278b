"""`place` on inputs that others' placement gets wrong (FAULTS A and H), and everything that it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import eplb_core as eplb
from eplb_core import ExpertLayout, InfeasiblePlacementError, Locality, Placement, PlacementDispatch, Topology, place
from tests import cases

README_LOADS = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]


def by_rank(placement: Placement, layer: int = 0) -> list[list[int]]:
    """Experts of each rank, empty slots left out."""
    return [[expert for expert in row if expert >= 0] for row in cases.by_rank(placement.layout, layer)]


def top_load(placement: Placement, load: Any) -> float:
    return float(eplb.rank_load(placement.layout, [load]).max())


# ---- replicas ------------------------------------------------------------------------------------------------------


def test_two_replicas_never_share_a_rank_and_the_ranks_are_even() -> None:
    """A1: others hold [6, 6, 0] on rank 3 and reach 1.0556."""
    placement = place([[1, 2, 3, 4, 5, 6, 7, 8]], Topology(4), num_slots=12)
    assert all(len(set(rank)) == 3 for rank in by_rank(placement))
    assert top_load(placement, [1, 2, 3, 4, 5, 6, 7, 8]) == 9.0
    assert placement.balancedness.tolist() == placement.bound.tolist() == [1.0]


def test_an_expert_gets_no_more_replicas_than_there_are_ranks() -> None:
    """A2: others give 9 replicas of the hot expert to 4 ranks."""
    for hot in (1000, 10**6):
        placement = place([[hot, 1, 1, 1, 1, 1, 1, 1]], Topology(4), num_slots=16)
        assert [rank.count(0) for rank in by_rank(placement)] == [1, 1, 1, 1]
        assert all(len(set(rank)) == 4 for rank in by_rank(placement))
    assert top_load(place([[1000] + [0] * 7], Topology(4), num_slots=16), [1000] + [0] * 7) == 250.0


def test_an_expert_that_each_token_uses_gets_a_slot_on_every_rank() -> None:
    """FAULTS K5: a shared expert that the model routes to like any other."""
    load = np.array([[100, 100, 100, 100, 400]])
    placement = place(load, Topology(4), num_slots=8)
    rows = placement.layout.physical_to_logical_map.reshape(4, 2)
    assert (rows == 4).any(1).all()
    assert placement.balancedness[0] == 1.0


def test_repeats_that_counting_forces_are_made_alike_on_every_rank() -> None:
    """A2: 6 slots a rank and 4 experts."""
    placement = place([[1000, 1, 1, 1]], Topology(2), num_slots=12)
    assert top_load(placement, [1000, 1, 1, 1]) == 501.5
    assert all(len(rank) == 6 and set(rank) == {0, 1, 2, 3} for rank in by_rank(placement))


def test_ties_have_one_answer_without_a_pair() -> None:
    """A3: half of expert 8 ties with expert 9; others' answers hang on the library version and hold [8, 8]."""
    placement = place(README_LOADS, Topology(8), num_slots=16)
    for layer in (0, 1):
        assert all(len(set(rank)) == 2 for rank in by_rank(placement, layer))
    assert str(placement.layout) == str(place(README_LOADS, Topology(8), num_slots=16).layout)
    # The first of equal experts gets the spare slot, and the first of equal ranks the first expert.
    assert str(place([[5, 5, 5, 5]], Topology(2), num_slots=4).layout) == "layer 0: 0 2 | 1 3"


def test_replicas_are_packed_and_not_only_made() -> None:
    """A8: a policy without packing reaches 19."""
    assert top_load(place([[10, 9, 2, 1]], Topology(2), num_slots=4), [10, 9, 2, 1]) == 11.0


def test_without_locality_no_expert_is_held_back_by_its_node() -> None:
    """A9: DeepSeek's hierarchical answer is 1.2422 here and its global one 1.1903."""
    load = README_LOADS[1:]
    free = place(load, Topology(8, 2), num_slots=16)
    strict = place(load, Topology(8, 2), num_slots=16, locality="group", num_groups=4)
    first = place(load, Topology(8, 2), num_slots=16, locality="first_copy", num_groups=4)
    assert free.balancedness[0] >= first.balancedness[0] >= strict.balancedness[0]
    assert 1 / free.balancedness[0] <= 1.1904
    assert 1 / strict.balancedness[0] <= 1.2423


def test_shares_of_the_replicas_add_up_to_the_load_of_the_expert() -> None:
    """A12: any number of redundant slots, also more than there are ranks."""
    load = [[5, 1, 1, 1], [1, 5, 1, 1]]
    for redundant in range(9):
        placement = place(load, Topology(2), num_slots=4 + redundant)
        assert eplb.rank_load(placement.layout, load).sum(axis=1).tolist() == [8.0, 8.0]
        for layer in (0, 1):
            assert all(len(set(rank)) == min(4, len(rank)) for rank in by_rank(placement, layer))


def test_every_layer_replicates_its_own_hot_expert() -> None:
    """A19: one map for all layers serves neither."""
    placement = place([[8, 1, 1, 1], [1, 1, 1, 8]], Topology(2), num_slots=6)
    assert placement.layout.replica_count[0, 0] == placement.layout.replica_count[1, 3] == 2
    assert placement.balancedness.tolist() == pytest.approx([1.0, 1.0], abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "experts", "slots", "ranks"), [(58, 256, 288, 32), (61, 384, 512, 64)])
def test_large_shapes_are_within_a_thousandth_of_the_bound(layers: int, experts: int, slots: int, ranks: int) -> None:
    """A20: how long it takes is the benchmark's matter."""
    load = np.random.default_rng(0).lognormal(5, 1, (layers, experts)).astype(np.int64)
    placement = place(load, Topology(ranks), num_slots=slots)
    assert (placement.bound - placement.balancedness).max() <= 0.002
    assert all(len(set(rank)) == slots // ranks for layer in range(layers) for rank in by_rank(placement, layer))


# ---- numbers that do not divide ------------------------------------------------------------------------------------


def test_ranks_that_do_not_divide_over_nodes_are_named_one_by_one() -> None:
    """A4: 3 GPUs on 2 nodes is a bare assertion elsewhere."""
    uneven = Topology(rank_to_node=[0, 0, 1])
    placement = place([[8, 7, 6, 5, 4, 3, 2, 1]], uneven, num_slots=12, locality="group", num_groups=2)
    nodes = [uneven.rank_to_node[rank] for rank in range(3) for _ in range(4)]
    for group in ({0, 1, 2, 3}, {4, 5, 6, 7}):
        row = placement.layout.physical_to_logical_map[0].tolist()
        assert len({node for node, e in zip(nodes, row, strict=True) if e in group}) == 1


@pytest.mark.parametrize(("experts", "ranks", "stride", "short"), [(30, 8, 4, 2), (128, 6, 22, 4), (256, 3, 86, 2)])
def test_slots_that_ranks_do_not_divide_leave_one_empty_at_the_end(
    experts: int, ranks: int, stride: int, short: int
) -> None:
    """A5: refused elsewhere, or all of the remainder put on one rank."""
    load = np.random.default_rng(0).integers(1, 100, (2, experts))
    layout = place(load, Topology(ranks), num_slots=experts).layout
    empty = layout.physical_to_logical_map.reshape(2, ranks, stride) < 0
    assert not empty[:, :, :-1].any()
    assert empty[:, :, -1].tolist() == [[False] * (ranks - short) + [True] * short] * 2


@pytest.mark.parametrize(("experts", "redundant"), [(10, 5), (11, 4)])
def test_experts_need_not_divide_by_the_slots_of_a_rank(experts: int, redundant: int) -> None:
    """A7: 15 slots on 3 ranks, 5 a rank."""
    placement = place(np.arange(1, experts + 1)[None], Topology(3), num_slots=experts + redundant)
    assert placement.layout.slots_per_rank == 5
    assert all(len(set(rank)) == 5 for rank in by_rank(placement))


def test_nodes_are_as_told_and_of_any_size() -> None:
    """A18: 8 GPUs a node is no law: 12 ranks as 4 + 4 + 4, and 4 ranks as 1 + 3."""
    load = np.random.default_rng(1).integers(1, 50, (1, 24))
    for topology in (Topology(12, 3), Topology(rank_to_node=[0, 1, 1, 1])):
        placement = place(load, topology, num_slots=36, locality="first_copy", num_groups=4)
        assert placement.layout.topology == topology
        assert 0.8 < placement.balancedness[0] <= 1.0


def test_degenerate_shapes_have_the_one_answer_that_there_is() -> None:
    """A21: no layers, one expert, as many slots as experts, one slot a rank."""
    empty = place(np.zeros((0, 8)), Topology(2), num_slots=8)
    assert (empty.layout.num_layers, empty.balancedness.shape, empty.transfers.shape) == (0, (0,), (0,))
    assert place(np.zeros((0, 8)), Topology(2), num_slots=8, current=empty.layout).layout == empty.layout
    assert place([[7]], Topology(4), num_slots=4).layout.physical_to_logical_map.tolist() == [[0, 0, 0, 0]]
    permutation = place([[3, 1, 4, 1]], Topology(2), num_slots=4).layout.physical_to_logical_map[0]
    assert sorted(permutation.tolist()) == [0, 1, 2, 3]
    one_each = place([[100, 1, 1, 1]], Topology(8), num_slots=8)
    assert 1 / one_each.balancedness[0] == pytest.approx(1.5534, abs=1e-4)
    assert one_each.bound[0] == pytest.approx(one_each.balancedness[0])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dispatch": "weighted"},
        {"locality": "group", "num_groups": 4},
        {"locality": "first_copy", "num_groups": 4},
        {"max_total_transfers": 3, "max_rank_transfers": np.ones((4, 4), dtype=np.int64)},
    ],
)
def test_without_layers_the_frame_is_the_one_asked_for(options: dict[str, Any]) -> None:
    topology = Topology(4, 2)
    empty = ExpertLayout.trivial(0, 8, num_slots=16, topology=topology)
    assert place(np.zeros((0, 8)), topology, num_slots=16).layout == empty
    for windows in (1, 3):
        assert place(np.zeros((windows, 0, 8)), topology, num_slots=16, current=empty, **options).layout == empty
    assert place(np.zeros((0, 8)), topology, num_slots=np.zeros(0, dtype=np.int64)).layout.num_slots == 8


def test_one_rank_holds_everything() -> None:
    """K4: nothing to balance is no error."""
    placement = place([[1, 2, 3]], Topology(1), num_slots=3)
    assert (by_rank(placement), placement.balancedness.tolist()) == ([[2, 1, 0]], [1.0])


# ---- no information ------------------------------------------------------------------------------------------------


def test_layers_without_load_get_the_trivial_spread_and_no_balancedness() -> None:
    """A13: others fill rank 3 with expert 0 three times."""
    placement = place([[0] * 8, [1] * 8], Topology(4), num_slots=12)
    assert placement.layout.physical_to_logical_map[0].tolist() == [*range(8), 0, 1, 2, 3]
    assert np.isnan(placement.balancedness).tolist() == np.isnan(placement.bound).tolist() == [True, False]
    assert "balancedness=1.0" in repr(placement)  # the mean skips what is not known


def test_layers_without_load_keep_their_row() -> None:
    """A13: zero information, zero transfers."""
    current = ExpertLayout([[3, 2, 1, 0, 0, 1]] * 2, 4, topology=Topology(2))
    placement = place([[0, 0, 0, 0], [9, 1, 1, 1]], Topology(2), num_slots=6, current=current)
    assert placement.layout.physical_to_logical_map[0].tolist() == [3, 2, 1, 0, 0, 1]
    assert placement.transfers[0] == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_load_that_is_no_count_raises_and_says_where(bad: float) -> None:
    """A14: elsewhere a NaN takes all spare slots."""
    load = np.ones((2, 8))
    load[1, 3] = bad
    with pytest.raises(ValueError, match=rf"`expert_load` \(={bad}\).* at layer 1, expert 3"):
        place(load, Topology(4), num_slots=12)
    with pytest.raises(ValueError, match=r"window 1, layer 1, expert 3"):
        place(np.stack([np.ones((2, 8)), load]), Topology(4), num_slots=12)


# ---- a current layout ----------------------------------------------------------------------------------------------


def test_an_answer_has_one_shape_and_type_with_and_without_a_current_layout() -> None:
    """A11: one policy crashed without an old map, another returned an int for a tensor."""
    load = [[90, 20, 30, 40, 50, 60, 70, 80]] * 2
    first = place(load, Topology(4), num_slots=12)
    second = place(load[::-1], Topology(4), num_slots=12, current=first.layout)
    for placement in (first, second):
        assert isinstance(placement.layout, ExpertLayout)
        assert placement.layout.physical_to_logical_map.dtype == placement.transfers.dtype == np.int64
        assert placement.balancedness.dtype == placement.bound.dtype == np.float64
        assert placement.balancedness.shape == placement.bound.shape == placement.transfers.shape == (2,)
        for array in (placement.balancedness, placement.bound, placement.transfers):
            assert not array.flags.writeable


def test_a_perfect_layout_stays() -> None:
    """A10: others answer with the ranks exchanged and move every expert."""
    current = ExpertLayout([[2, 0, 3, 1]], 4, topology=Topology(2))
    placement = place([[1, 1, 5, 5]], Topology(2), num_slots=4, current=current)
    assert (placement.layout, placement.transfers.tolist()) == (current, [0])


@pytest.mark.parametrize(("min_gain", "moves"), [(0.05, True), (0.06, False)])
def test_a_gain_below_min_gain_keeps_the_row(min_gain: float, moves: bool) -> None:
    """19 tokens against 17 are 0.947; two transfers would make it 1."""
    current = ExpertLayout([[0, 2, 1, 3]], 4, topology=Topology(2))
    placement = place([[10, 8, 9, 9]], Topology(2), num_slots=4, current=current, min_gain=min_gain)
    assert (placement.layout != current, placement.transfers.tolist()) == (moves, [2 * moves])


@pytest.mark.parametrize("locality", ["group", "first_copy"])
def test_groups_bind_the_limit_of_transfers_too(locality: Locality) -> None:
    current = ExpertLayout([[0, 1, 2, -1, 3, -1]], 4, topology=Topology(3, 3))
    placement = place(
        [[3, 2, 2, 1]], Topology(3, 3), num_slots=4, locality=locality, num_groups=4, current=current, max_transfers=0
    )
    assert (placement.layout, placement.transfers.tolist()) == (current, [0])


def test_too_few_live_slots_raise_with_the_numbers() -> None:
    """H2: a bare assertion elsewhere."""
    with pytest.raises(
        InfeasiblePlacementError, match=r"2 active ranks have 4 slots, fewer than the 6 experts"
    ) as raised:
        place(np.ones((1, 6)), Topology(4), num_slots=8, active_ranks=[True, True, False, False])
    assert (raised.value.num_live_slots, raised.value.num_experts) == (4, 6)


# ---- windows, speeds -------------------------------------------------------------------------------------------------


def test_windows_are_judged_one_by_one() -> None:
    """Even in sum is not even in time: balancedness is the mean over the windows."""
    windows = [[[4, 0]], [[0, 4]], [[0, 0]]]
    placement = place(windows, Topology(2), num_slots=2)
    assert placement.balancedness.tolist() == [0.5]
    assert placement.bound.tolist() == pytest.approx([0.5])


@pytest.mark.parametrize("weight", [0.25, 3.0, 1000.0])
def test_the_weight_of_the_only_window_changes_nothing(weight: float) -> None:
    plain = place([[[7, 1, 1, 1]]], Topology(4), num_slots=4)
    weighed = place([[[7, 1, 1, 1]]], Topology(4), num_slots=4, window_weights=[weight])
    assert plain.bound.tolist() == weighed.bound.tolist() == pytest.approx([10 / 4 / 7])
    assert plain.layout == weighed.layout


@pytest.mark.parametrize("locality", ["none", "group"])
def test_a_layer_whose_only_window_has_no_weight_is_one_without_load(locality: Locality) -> None:
    placement = place([[[3, 1]]], Topology(1), num_slots=2, window_weights=[0], locality=locality, num_groups=1)
    assert np.isnan([placement.balancedness[0], placement.bound[0]]).all()


def test_a_window_of_weight_zero_does_not_decide() -> None:
    load = [[[9, 1, 1, 1]], [[1, 1, 1, 9]]]
    for weights, hot in (([1, 0], 0), ([0, 1], 3)):
        placement = place(load, Topology(2), num_slots=6, window_weights=weights)
        assert placement.layout.replica_count[0, hot] == 2


def test_a_faster_rank_takes_more() -> None:
    placement = place([[3, 3, 3, 3]], Topology(2, rank_speed=[1, 3]), num_slots=4, effort=4)
    times = eplb.rank_load(placement.layout, [[3, 3, 3, 3]])[0] / [1, 3]
    assert placement.balancedness[0] == pytest.approx(12 / 4 / times.max())
    unequal = place([[9, 9, 9, 3, 3, 3]], Topology(2, rank_speed=[1, 3]), num_slots=6)
    assert eplb.rank_load(unequal.layout, [[9, 9, 9, 3, 3, 3]])[0].tolist() == [9.0, 27.0]


# ---- what comes in ---------------------------------------------------------------------------------------------------


def test_lists_numpy_and_torch_give_the_same_bytes_and_stay_as_they_are() -> None:
    load = np.random.default_rng(3).integers(0, 1000, (2, 16))
    answers = []
    for given in (
        load.tolist(),
        load,
        load.astype(np.int32),
        load.astype(np.float32),
        load.astype(np.float64),
        np.asfortranarray(load),
        np.broadcast_to(load, load.shape),  # read-only
        torch.from_numpy(load),
        torch.from_numpy(load).to(torch.float64),
        load[None],
    ):
        before = given.copy() if isinstance(given, (list, np.ndarray)) else given.clone()
        answers.append(place(given, Topology(4), num_slots=20).layout.physical_to_logical_map.tobytes())
        assert np.array_equal(np.asarray(before), np.asarray(given))
    assert len(set(answers)) == 1


@pytest.mark.parametrize("scale", [5e-324, 1e-300, 1e-30, 1e30, 2.0**1021])
def test_load_of_any_size_is_placed_well(scale: float) -> None:
    placement = place(np.array([[4.0, 3, 2, 1, 1, 1]]) * scale, Topology(2), num_slots=6)
    assert placement.balancedness.tolist() == [1.0]


@pytest.mark.parametrize("dispatch", ["even", "weighted"])
def test_a_layer_of_faint_load_is_placed_as_one_of_ordinary_load(dispatch: PlacementDispatch) -> None:
    """Thirds of counts near the smallest float have no digits left."""
    load = np.random.default_rng(3).integers(1, 50, (4, 3, 16)).astype(np.float64)
    faint = load * np.array([1.0, 2.0**-1070, 2.0**-950])[:, None]
    one, other = (place(each, Topology(4), num_slots=24, dispatch=dispatch) for each in (load, faint))
    assert one.layout == other.layout
    assert one.balancedness.tobytes() == other.balancedness.tobytes()
    assert one.bound.tobytes() == other.bound.tobytes()


@pytest.mark.parametrize("dispatch", ["even", "weighted"])
def test_a_window_of_faint_load_counts_as_much_as_the_others(dispatch: PlacementDispatch) -> None:
    load = np.random.default_rng(3).integers(1, 50, (4, 3, 16)).astype(np.float64)
    faint = load * np.array([1.0, 2.0**-1070, 1.0, 2.0**1000])[:, None, None]
    placement = place(faint, Topology(4), num_slots=24, dispatch=dispatch)
    shares = [None if dispatch == "even" else eplb.replica_shares(placement.layout, window) for window in load]
    ranks = [eplb.rank_load(placement.layout, window, shares=each) for window, each in zip(load, shares, strict=True)]
    assert np.allclose(placement.balancedness, eplb.balancedness(ranks).mean(axis=0), rtol=5e-3, atol=0)
    assert (placement.balancedness <= placement.bound).all()


@pytest.mark.parametrize("windows", [1, 3])
@pytest.mark.parametrize("dispatch", ["even", "weighted"])
@pytest.mark.parametrize(("power", "speed"), [(-950, 330), (1010, -330), (-950, 0), (0, 330), (0, -10)])
def test_units_of_load_and_speed_change_nothing(
    windows: int, dispatch: PlacementDispatch, power: int, speed: int
) -> None:
    load = np.random.default_rng(3).integers(1, 50, (windows, 3, 16)).astype(np.float64)
    one, other = (
        place(load * 2.0**a, Topology(4, rank_speed=np.full(4, 2.0**b)), num_slots=24, dispatch=dispatch)
        for a, b in ((0, 0), (power, speed))
    )
    assert np.array_equal(one.layout.physical_to_logical_map, other.layout.physical_to_logical_map)
    assert one.balancedness.tobytes() == other.balancedness.tobytes()
    assert one.bound.tobytes() == other.bound.tobytes()


@pytest.mark.parametrize("unit", [5e-324, 2.0**-1000, 2.0**1022])
def test_weights_of_any_size_only_count_relative_to_each_other(unit: float) -> None:
    load = np.random.default_rng(3).integers(1, 50, (3, 3, 16)) * 1e300
    one, other = (
        place(load, Topology(4), num_slots=24, window_weights=weights)
        for weights in ([1, 2, 1], [unit, 2 * unit, unit])
    )
    assert one.layout == other.layout
    assert one.balancedness.tobytes() == other.balancedness.tobytes()


# ---- refusals --------------------------------------------------------------------------------------------------------

TWO_LAYERS = {"expert_load": np.ones((2, 8))}
LAYOUT = ExpertLayout.trivial(1, 8, num_slots=12, topology=Topology(4))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"expert_load": [1, 2]}, ValueError, r"`expert_load` \(shape \[2\]\) must be \[L, E\] or \[T, L, E\]"),
        ({"expert_load": np.ones((0, 1, 8))}, ValueError, r"\(shape \[0, 1, 8\]\) must have one window"),
        ({"expert_load": np.ones((1, 0))}, ValueError, r"\(shape \[1, 1, 0\]\) must have one window and one expert"),
        ({"expert_load": [["a"]]}, TypeError, r"`expert_load` \(dtype <U1\) must be integers or floats"),
        ({"topology": 4}, TypeError, r"`topology` \(=int\) must be a Topology"),
        ({"num_slots": 7}, ValueError, r"`num_slots` \(=7\) must be at least `num_experts` \(=8\)"),
        ({"num_slots": 12.0}, TypeError, r"`num_slots` \(=12.0\) must be an integer"),
        ({"effort": 0}, ValueError, r"`effort` \(=0.0\) must be above 0"),
        ({"effort": float("nan")}, ValueError, r"`effort` \(=nan\) must be finite"),
        ({"effort": "1"}, TypeError, r"`effort` \(='1'\) must be a number"),
        ({"min_gain": -0.5}, ValueError, r"`min_gain` \(=-0.5\) must be at least 0"),
        ({"max_transfers": -1}, ValueError, r"`max_transfers` \(=-1\) must be at least 0"),
        ({"window_weights": [1, 1]}, ValueError, r"`window_weights` \(shape \[2\]\) must be \[1\], one per window"),
        ({"window_weights": [-1.0]}, ValueError, r"`window_weights` \(=-1.0\) must be .* at window 0"),
        ({"active_ranks": [1, 1, 1, 0]}, ValueError, r"\(dtype int64, shape \[4\]\) must be bools \[4\]"),
        ({"active_ranks": [True]}, ValueError, r"shape \[1\]\) must be bools \[4\]"),
        ({"locality": "node"}, ValueError, r"`locality` \(='node'\) must be one of none, first_copy, group"),
        ({"locality": "group"}, ValueError, r'`locality` \(="group"\) needs `num_groups`'),
        ({"locality": "group", "num_groups": 3}, ValueError, r"`num_groups` \(=3\) must divide the 8 experts"),
        ({"locality": "group", "num_groups": 0}, ValueError, r"`num_groups` \(=0\) must be at least 1"),
        ({"locality": "first_copy", "num_groups": 1}, ValueError, r"slots \[6, 6\] take \[0, 0\] whole groups"),
        ({"locality": "group", "num_groups": 2, "dispatch": "weighted"}, ValueError, r"needs `locality=\"none\"`"),
        ({"current": [[0]]}, TypeError, r"`current` \(=list\) must be an ExpertLayout"),
        ({"current": LAYOUT, "num_slots": 16}, ValueError, "12 slots, the placement 16; pad each rank with -1"),
        ({"current": LAYOUT, **TWO_LAYERS}, ValueError, "1 layers, the placement 2; it is of another model"),
        ({"current": LAYOUT, "topology": Topology(6)}, ValueError, "4 ranks, the placement 6; .* by `resized`"),
        ({**TWO_LAYERS, "num_slots": [8, 7]}, ValueError, r"\(=7\) must be at least the 8 experts at layer 1"),
        ({**TWO_LAYERS, "num_slots": [8]}, ValueError, r"\(dtype int64, shape \[1\]\) must be an int or ints \[2\]"),
        ({**TWO_LAYERS, "num_slots": [8.0, 9.0]}, ValueError, r"\(dtype float64, shape \[2\]\) must be .* ints \[2\]"),
        ({**TWO_LAYERS, "num_slots": [8, 1 << 25]}, ValueError, r"\(=33554432\) must be at most 16777216 at layer 1"),
        ({"transfer_cost": [1.0, 2.0]}, ValueError, r"`transfer_cost` \(shape \[2\]\) must be \[4, 4\]"),
        ({"transfer_cost": -np.eye(4, k=1)}, ValueError, r"\(=-1.0\) must be in \[0, 1e9\] from rank 0 to rank 1"),
    ],
)
def test_bad_arguments_raise_with_their_values(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"expert_load": np.ones((1, 8)), "topology": Topology(4, 2), "num_slots": 12, **change}
    with pytest.raises(error, match=message):
        place(given.pop("expert_load"), given.pop("topology"), **given)


def test_a_row_with_too_many_slots_drops_copies_before_it_moves_experts() -> None:
    """A smaller `num_slots` needs no transfer as long as copies can go."""
    current = ExpertLayout([[0, 1, 2, -1, 3, 4, 5, 0]], 6, topology=Topology(num_ranks=2))
    placed = eplb.place([[6.0, 5, 4, 3, 2, 1]], current.topology, num_slots=7, current=current, max_transfers=0)
    assert placed.transfers.tolist() == [0]
    assert placed.layout.physical_to_logical_map.tolist() == [[0, 1, 2, -1, 3, 4, 5, -1]]


def test_a_layer_that_fills_fewer_slots_gives_up_the_last_of_each_rank() -> None:
    """What stands there and stays on its rank is copied into another slot; no expert crosses the wire for that."""
    live = ExpertLayout([[0, 1, 2, 3, 0, 1]] * 2, num_experts=4, topology=Topology(2))
    for load in ([[5, 6, 5, 5]] * 2, [[0, 0, 0, 0]] * 2):
        placement = place(load, Topology(2), num_slots=[6, 4], current=live)
        assert placement.layout.physical_to_logical_map[1].reshape(2, 3)[:, 2].tolist() == [-1, -1]
        assert placement.transfers.tolist() == [0, 0]


@pytest.mark.parametrize("locality", ["group", "first_copy"])
def test_a_row_that_tears_groups_apart_does_not_stay(locality: Locality) -> None:
    topology = Topology(num_ranks=4, num_nodes=2)
    torn = ExpertLayout([[0, 1, 2, 0, 1, 3, 0, 1]], 4, topology=topology)
    load = [[6.0, 5, 1, 1]]
    placed = eplb.place(load, topology, num_slots=8, locality=locality, num_groups=2, current=torn)
    nodes = {e: {slot // 4 for slot in placed.layout.slots(0, e)} for e in range(4)}
    assert nodes[0] & nodes[1]
    assert nodes[2] & nodes[3]
    assert placed.balancedness[0] <= placed.bound[0]
    again = eplb.place(load, topology, num_slots=8, locality=locality, num_groups=2, current=placed.layout)
    assert again.layout == placed.layout


@pytest.mark.parametrize("seed", [88, 137, 156, 170])
def test_a_search_that_its_budget_ended_loses_no_expert(seed: int) -> None:
    """Steps that were tried and not kept once counted as replicas, so the last one of an expert was taken back."""
    rng = np.random.default_rng(seed)
    topology = Topology(num_ranks=4)
    load = rng.integers(0, 40, (3, 3, 16)) * (rng.random(16) < 0.6)
    live = place(rng.random((3, 16)) ** 4, topology, num_slots=24).layout
    alive = np.arange(4) != seed % 4
    new = place(load, topology, num_slots=24, current=live, active_ranks=alive, max_transfers=4).layout
    assert all(set(range(16)) <= set(row) for row in new.physical_to_logical_map.tolist())


def test_layers_may_have_unequally_many_slots() -> None:
    """Each row is the one that the layer gets by itself, and none gets more than a plan of slots gives it."""
    rng = np.random.default_rng(3)
    load = rng.lognormal(0, 1, (2, 4, 8))
    topology = Topology(4)
    answer = place(load, topology, num_slots=[8, 12, 10, 12])
    assert answer.layout.slots_per_rank == 3
    assert (answer.layout.physical_to_logical_map >= 0).sum(axis=1).tolist() == [8, 12, 10, 12]
    alone = place(load[:, [1, 3]], topology, num_slots=12)
    assert (answer.layout.physical_to_logical_map[[1, 3]] == alone.layout.physical_to_logical_map).all()
    plan = eplb.plan_slots(load, topology, total_slots=10)
    later = place(load, topology, num_slots=plan.slots_per_rank * 4, current=plan.layout)
    filled = (later.layout.physical_to_logical_map >= 0).sum(axis=1)
    assert (filled <= plan.slots_per_rank * 4).all()  # a replica that only adds to the fullest rank is dropped
    assert (filled >= 8).all()


@pytest.mark.parametrize("dispatch", ["even", "weighted"])
@pytest.mark.parametrize("windows", [1, 2])
def test_active_ranks_without_a_slot_count_in_the_mean(dispatch: PlacementDispatch, windows: int) -> None:
    """FA12: four experts of equal load on four of six ranks, one of which is out, keep four fifths at work."""
    load, topology = np.full((windows, 2, 4), 3), Topology(6, rank_speed=[1, 1, 1, 1, 1, 1])
    free = place(load, topology, num_slots=4, dispatch=dispatch)
    np.testing.assert_allclose(free.balancedness, 4 / 6)
    np.testing.assert_allclose(free.bound, 4 / 6)
    np.testing.assert_allclose(free.balancedness, eplb.balancedness(eplb.rank_load(free.layout, load[0])))
    active = np.array([True, True, True, True, False, True])
    live = place(load, topology, num_slots=4, active_ranks=active, current=free.layout, dispatch=dispatch)
    np.testing.assert_allclose(live.balancedness, 4 / 5)
    np.testing.assert_allclose(live.bound, 4 / 5)


def test_active_ranks_without_a_slot_count_with_their_speed() -> None:
    placed = place([[3, 3]], Topology(3, rank_speed=[1, 1, 2]), num_slots=2)
    assert placed.balancedness.tolist() == [6 / 4 / 3]
    assert placed.bound.tolist() == [6 / 4 / 3]
