from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.optimize import linprog

from eplb_core import DispatchTables, ExpertLayout, Topology, balancedness, rank_load, replica_shares
from eplb_core.dispatch.shares import _solve
from eplb_core.metrics import check_shares
from tests.cases import PAIR, layouts, random_layout


def lowest_maximum(layout: ExpertLayout, layer: int, load: npt.NDArray[Any]) -> float:
    """The linear program: the least M with rank load <= M * speed, over what each slot takes."""
    row, ranks = layout.physical_to_logical_map[layer], layout.topology.num_ranks
    slots = np.flatnonzero(row >= 0)
    upper = np.zeros((ranks, len(slots) + 1))
    equal = np.zeros((layout.num_experts, len(slots) + 1))
    for column, slot in enumerate(slots):
        upper[slot // layout.slots_per_rank, column] = 1
        equal[row[slot], column] = 1
    upper[:, -1] = -layout.topology.rank_speed
    cost = np.zeros(len(slots) + 1)
    cost[-1] = 1
    answer = linprog(cost, A_ub=upper, b_ub=np.zeros(ranks), A_eq=equal, b_eq=load[layer], method="highs")
    return float(answer.fun)


@given(layouts(num_layers=(1, 2), num_ranks=(1, 5)), st.data())
@settings(max_examples=80)
def test_shares_reach_the_linear_programs_optimum(layout: ExpertLayout, data: st.DataObject) -> None:
    load = data.draw(hnp.arrays(np.int64, (layout.num_layers, layout.num_experts), elements=st.integers(0, 12)))
    shares = replica_shares(layout, load)
    p2l = layout.physical_to_logical_map
    assert (shares >= 0).all()
    assert (shares[p2l < 0] == 0).all()
    for layer in range(layout.num_layers):
        for expert in range(layout.num_experts):
            assert shares[layer][p2l[layer] == expert].sum() == pytest.approx(1.0, abs=1e-12)
        top = rank_load(layout, load, shares=shares)[layer].max()
        # On small integers the optimum is a sum of loads over a number of ranks: equal up to rounding.
        assert top == pytest.approx(lowest_maximum(layout, layer, load), rel=1e-9, abs=1e-9)


@given(
    layouts(num_layers=(1, 2), num_ranks=(1, 5)),
    st.sampled_from([3, 12, 100, 300]),
    st.integers(0, 2**32),
    st.integers(1, 3),
)
@settings(max_examples=80)
def test_shares_sum_to_one_and_are_installed_however_uneven_the_load(
    layout: ExpertLayout, digits: int, seed: int, windows: int
) -> None:
    """Next to ranks with 10^300 tokens an expert's own few are rounded away; its shares are shares all the same."""
    rng = np.random.default_rng(seed)
    shape = (windows, layout.num_layers, layout.num_experts)
    load = rng.random(shape) * 10.0 ** rng.uniform(-digits, digits, shape)
    shares = replica_shares(layout, load)
    assert ((shares >= 0) & (shares <= 1)).all()
    for row, each in zip(layout.physical_to_logical_map, shares, strict=True):
        held = row >= 0
        np.testing.assert_allclose(np.bincount(row[held], each[held], layout.num_experts), 1.0, atol=1e-12)
    check_shares(shares, layout)
    DispatchTables(layout, mode="weighted", shares=shares)


def test_no_share_is_above_one_where_the_level_is_rounded() -> None:
    layout = ExpertLayout([[0, 1, 2, 0]], num_experts=3, topology=Topology(2))
    for load in ([1.57, 2.181, 12.318], [0.089, 212.43, 0.282], [4.453, 16639.245, 4.672]):
        assert (replica_shares(layout, [load]) <= 1.0).all(), load


def test_a_share_that_rounding_puts_above_one_is_installed() -> None:
    above = np.array([[np.nextafter(1.0, 2.0), 1.0, 1.0, 0.0]])
    layout = ExpertLayout([[0, 1, 2, 0]], num_experts=3, topology=Topology(2))
    np.testing.assert_array_equal(check_shares(above, layout), above)
    DispatchTables(layout, mode="weighted", shares=above)


def test_slow_and_fast_ranks_finish_together() -> None:
    topology = Topology(rank_to_node=[0, 0], rank_speed=[1.0, 3.0])
    layout = ExpertLayout([[0, 1, 0, 2]], num_experts=3, topology=topology)
    load = np.array([[100, 0, 20]])
    shares = replica_shares(layout, load)
    np.testing.assert_allclose(rank_load(layout, load, shares=shares), [[30, 90]])
    assert lowest_maximum(layout, 0, load) == pytest.approx(30)


def test_a_chain_of_ranks_converges() -> None:
    """Rank r shares an expert with rank r + 1 only: load has to pass through all of them."""
    ranks = 24
    row = np.concatenate([[r, (r + 1) % ranks] for r in range(ranks)])
    layout = ExpertLayout([row], num_experts=ranks, topology=Topology(ranks))
    load = np.zeros((1, ranks))
    load[0, 0] = 24.0
    load[0, 1:] = 1.0
    shares = replica_shares(layout, load)
    top = rank_load(layout, load, shares=shares).max()
    assert top == pytest.approx(lowest_maximum(layout, 0, load), rel=1e-9)


def test_layers_and_experts_without_load_are_shared_evenly() -> None:
    layout = random_layout()
    load = np.zeros((4, 32))
    load[1:] = 5
    load[2, 7] = 0
    shares = replica_shares(layout, load)
    even = 1 / np.take_along_axis(layout.replica_count, layout.physical_to_logical_map, axis=1)
    np.testing.assert_array_equal(shares[0], even[0])
    np.testing.assert_array_equal(
        shares[2][layout.physical_to_logical_map[2] == 7], even[2][layout.physical_to_logical_map[2] == 7]
    )
    np.testing.assert_array_equal(replica_shares(layout, np.zeros((0, 4, 32))), even)


def test_slots_of_one_expert_on_one_rank_take_equal_parts() -> None:
    layout = ExpertLayout([[0, 0, 1, 0]], num_experts=2, topology=Topology(num_ranks=2))
    np.testing.assert_allclose(replica_shares(layout, [[8, 2]]), [[0.3125, 0.3125, 1.0, 0.375]])


def test_a_layer_depends_on_its_own_row_and_load_alone() -> None:
    layout, other = random_layout(seed=4), random_layout(seed=5)
    load = np.random.default_rng(0).integers(1, 99, (4, 32))
    mixed = replica_shares(layout.replace(other, [2]), load)
    np.testing.assert_array_equal(mixed[2], replica_shares(other, load)[2])
    np.testing.assert_array_equal(mixed[:2], replica_shares(layout, load)[:2])


def test_shares_from_many_windows_are_no_worse_than_even_on_windows_that_follow() -> None:
    """The optimum for the windows' sum is worse than an even split on what follows; shares that are shrunk are not."""
    rng = np.random.default_rng(1)
    layout = random_layout(layers=8, experts=64, slots=96, ranks=16, seed=9)
    level = layout.replica_count * rng.lognormal(0, 0.2, (8, 64))
    windows = level * rng.lognormal(0, 0.3, (48, 8, 64))
    even = balancedness(rank_load(layout, windows[16:])).mean()
    one = balancedness(rank_load(layout, windows[16:], shares=replica_shares(layout, windows[0]))).mean()
    many = balancedness(rank_load(layout, windows[16:], shares=replica_shares(layout, windows[:16]))).mean()
    assert one < even <= many


def test_equal_windows_go_part_of_the_way_to_their_optimum() -> None:
    layout = random_layout()
    load = np.random.default_rng(0).integers(1, 50, (4, 32))
    even, optimum = replica_shares(layout, np.zeros((4, 32))), replica_shares(layout, load)
    for windows in (2, 16, 48):
        shares = replica_shares(layout, np.repeat(load[None], windows, axis=0))
        np.testing.assert_allclose(shares, even + (optimum - even) * windows / (windows + 16), atol=1e-9)
    np.testing.assert_array_equal(replica_shares(layout, load[None]), optimum)


def test_bad_loads_are_named() -> None:
    with pytest.raises(ValueError, match=r"`expert_load` \(shape \[1, 5\]\) must be \[1, 4\] or \[T, 1, 4\]"):
        replica_shares(PAIR, np.ones((1, 5)))
    with pytest.raises(ValueError, match=r"=-1.0\) must be finite and not negative at layer 0, expert 2"):
        replica_shares(PAIR, [[1, 1, -1, 1]])


def test_the_number_of_sweeps_is_bounded() -> None:
    row, owner = np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])
    ints, floats = np.empty((4, 7), dtype=np.int64), np.empty((3, 4))
    shares = np.zeros(4)
    load, rank_load = np.array([[3.0, 1.0]]), np.empty((1, 2))
    assert _solve(row, owner, load, np.array([1.0, 2.0]), 1, ints, floats, rank_load, shares) == 1
    assert shares[:2].sum() == pytest.approx(1.0)
