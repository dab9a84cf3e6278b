"""`should_rebalance`: gain and cost from their definitions, verdicts, what damps them, and everything refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import eplb_core as eplb
from eplb_core import CostModel, ExpertLayout, MissingExpertError, Topology, Verdict, place, should_rebalance
from eplb_core.testing.strategies import layout_pairs, topologies

TWO = Topology(num_ranks=2)
LIVE = ExpertLayout([[0, 1, 2, 3], [0, 1, 2, 3]], num_experts=4, topology=TWO)
BETTER = ExpertLayout([[0, 2, 1, 3], [0, 1, 2, 3]], num_experts=4, topology=TWO)
LOAD = [[50, 50, 10, 10], [30, 30, 30, 30]]
"""Layer 0: 100 tokens on the fullest rank, 60 under BETTER; layer 1 is even."""
PRICED = CostModel(token_s=1e-3, expert_bytes=100.0, node_bandwidth=1000.0, install_s=0.1)
"""LIVE to BETTER: 40 ms a window gained; one expert in and one out on both ranks, 0.1 s, and 0.1 s of install."""


# ---- gain and cost, from their definitions ---------------------------------------------------------------------------


def plain_time(
    layout: ExpertLayout, load: Any, model: CostModel, passes: float, active: list[bool] | None = None
) -> list[float]:
    """Seconds of each layer in a pass: the slowest rank of each window."""
    topology, times = layout.topology, list[float]()
    for layer, row in enumerate(layout.physical_to_logical_map.tolist()):
        total = 0.0
        for window in load:
            worst = 0.0
            for rank in range(topology.num_ranks):
                if active is not None and not active[rank]:
                    continue
                mine = row[rank * layout.slots_per_rank : (rank + 1) * layout.slots_per_rank]
                tokens = [
                    window[layer][e]
                    / sum(x == e and (active is None or active[p // layout.slots_per_rank]) for p, x in enumerate(row))
                    for e in mine
                    if e >= 0
                ]
                seconds: float = model.token_s * sum(tokens) + model.expert_s * sum(min(t, passes) for t in tokens)
                worst = max(worst, seconds / topology.rank_speed[rank])
            total += worst / passes
        times.append(total / len(load) + model.layer_s)
    return times


@st.composite
def moves(draw: st.DrawFn) -> tuple[ExpertLayout, ExpertLayout, Any]:
    """Two layouts of one frame and windows of load."""
    topology = topologies(num_ranks=(1, 4), num_nodes=(1, 2), speeds=True)
    old, new = draw(layout_pairs(topology=topology, slots_per_rank=(1, 3)))
    shape = (draw(st.integers(1, 3)), old.num_layers, old.num_experts)
    return old, new, draw(hnp.arrays(np.int64, shape, elements=st.integers(0, 40)))


@pytest.mark.slow
@given(moves(), st.sampled_from([1.0, 7.0]))
@settings(max_examples=60)
def test_gain_is_the_difference_of_the_slowest_ranks_times(case: Any, passes: float) -> None:
    old, new, load = case
    model = CostModel(token_s=2.0, expert_s=3.0, layer_s=5.0)
    verdict = should_rebalance(old, load, new, cost=model, window_passes=passes)
    before, after = plain_time(old, load, model, passes), plain_time(new, load, model, passes)
    assert verdict.layer_time.tolist() == pytest.approx(before)
    changed = (old.physical_to_logical_map != new.physical_to_logical_map).any(axis=1)
    expected = [b - a if c else 0.0 for b, a, c in zip(before, after, changed, strict=True)]
    assert verdict.layer_gain.tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.slow
@given(moves())
@settings(max_examples=60)
def test_transfers_are_counted_as_the_metric_counts_them(case: Any) -> None:
    old, new, load = case
    verdict = should_rebalance(old, load, new)
    assert verdict.layer_transfers.tolist() == eplb.transfers(old, new).sum(axis=1).tolist()


@pytest.mark.slow
@given(moves())
@settings(max_examples=60)
def test_a_layer_moves_exactly_if_it_gains_and_pays_back(case: Any) -> None:
    old, new, load = case
    model = CostModel(token_s=1.0, expert_bytes=1.0, node_bandwidth=1.0, network_bandwidth=0.5, install_s=1.0)
    verdict = should_rebalance(old, load, new, cost=model, passes_since=10, min_gain=0.05)
    for layer in range(old.num_layers):
        gain, cost = float(verdict.layer_gain[layer]), float(verdict.layer_cost[layer])
        worth = gain > 0 and gain > 0.05 * verdict.layer_time[layer] and gain * 10 >= cost
        assert bool(verdict.layers[layer]) == worth
        assert verdict.layer_reasons[layer] == "pays" or not worth
    assert bool(verdict) == bool(verdict.layers.any())


def test_a_transfer_comes_from_a_holder_on_its_node_if_there_is_one() -> None:
    """E14: expert 0 is on rank 0 (node 0) and rank 1 (node 1); ranks 2 and 3 of node 1 read it from rank 1."""
    topology = Topology(rank_to_node=[0, 1, 1, 1])
    old = ExpertLayout([[0, 5, 0, 1, 2, 5, 3, 4]], 6, topology=topology)
    near = ExpertLayout([[0, 5, 0, 1, 2, 0, 3, 4]], 6, topology=topology)
    far = ExpertLayout([[4, 5, 0, 1, 2, 0, 3, 0]], 6, topology=topology)
    model = CostModel(token_s=1.0, expert_bytes=1.0, node_bandwidth=1.0, network_bandwidth=0.1)
    assert should_rebalance(old, np.ones((1, 6)), near, cost=model).layer_cost.tolist() == [1.0]
    # Expert 4 crosses the network to rank 0.
    assert should_rebalance(old, np.ones((1, 6)), far, cost=model).layer_cost.tolist() == [10.0]


def test_holders_share_the_sending() -> None:
    """Four ranks want expert 0, of two near holders each sends to two; and a rank that sends receives as well."""
    topology = Topology(6)
    old = ExpertLayout([[0, 1, 0, 2, 3, 1, 4, 2, 5, 1, 6, 2]], 7, topology=topology)
    new = ExpertLayout([[0, 1, 0, 2, 3, 0, 4, 0, 5, 0, 6, 0]], 7, topology=topology)
    model = CostModel(token_s=1.0, expert_bytes=1.0, node_bandwidth=1.0, stall=0.5)
    verdict = should_rebalance(old, np.ones((1, 7)), new, cost=model)
    assert (verdict.layer_transfers.tolist(), verdict.layer_cost.tolist()) == ([4], [1.0])


# ---- verdicts --------------------------------------------------------------------------------------------------------


def test_without_costs_a_layer_moves_for_its_gain_alone() -> None:
    verdict = should_rebalance(LIVE, LOAD, BETTER)
    assert verdict.layers.tolist() == [True, False]
    assert (verdict.gain, verdict.cost, verdict.break_even_passes) == (40.0, 0.0, 0.0)
    assert verdict.layer_reasons == ("pays", "unchanged")
    assert verdict.reason == "move 1 of 2 layers: a pass is 40 token times (25%) shorter for 2 transfers; 1 unchanged"


def test_a_move_must_pay_back_what_it_costs_within_the_passes_that_the_layout_lived() -> None:
    """The window's 40 ms are of all its passes: a layout lives until it has lost 0.2 s, however many passes that is."""
    once = np.array([LOAD])
    early = should_rebalance(LIVE, once.repeat(4, axis=0), BETTER, cost=PRICED, passes_since=400)
    assert early.layers.tolist() == [False, False]
    assert early.gain == pytest.approx(4e-4)
    assert early.cost == pytest.approx(0.2)
    assert early.break_even_passes == pytest.approx(500)
    assert early.cost_bytes == 200.0
    assert early.layer_reasons == ("not paid back", "unchanged")
    for part in ("1 of 2 layers", "0.4 ms (25%) shorter", "2 transfers, 2e-07 GB and 200 ms", "500 passes"):
        assert part in early.reason
    late = should_rebalance(LIVE, once.repeat(6, axis=0), BETTER, cost=PRICED, passes_since=600)
    assert late.layers.tolist() == [True, False]
    twice = should_rebalance(LIVE, once.repeat(6, axis=0), BETTER, cost=PRICED, passes_since=600, payback=2.0)
    assert not twice
    assert should_rebalance(LIVE, once.repeat(6, axis=0), BETTER, cost=PRICED, window_passes=100)
    assert not should_rebalance(LIVE, once.repeat(4, axis=0), BETTER, cost=PRICED, window_passes=100)
    assert not should_rebalance(LIVE, once, BETTER, cost=PRICED, passes_since=0)
    unknown = should_rebalance(LIVE, once, BETTER, cost=PRICED)
    assert bool(unknown)
    assert unknown.break_even_passes == pytest.approx(5.0)
    assert unknown.layer_break_even_passes.tolist() == pytest.approx([5.0, math.inf])


@pytest.mark.slow
def test_there_is_no_way_back_at_the_same_load() -> None:
    """Hysteresis: what was worth its move is never worth the move back, and noise below `min_gain` moves nothing."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        load = rng.integers(1, 100, (4, 2, 4))
        there = should_rebalance(LIVE, load, BETTER, min_gain=0.0)
        back = should_rebalance(BETTER, load, LIVE, min_gain=0.0)
        assert not (there.layers & back.layers).any()
    even = 1000 + rng.integers(0, 11, (4, 2, 4))
    assert not should_rebalance(LIVE, even, place(even, TWO, num_slots=4).layout)


def test_noise_of_one_percent_moves_nothing() -> None:
    """A10: 4 layers, 256 experts, 288 slots, 32 ranks; others change 182 to 247 slots of a layer."""
    rng = np.random.default_rng(11)
    topology = Topology(32, 4)
    load = rng.lognormal(5.0, 1.0, (4, 256))
    live = place(load, topology, num_slots=288).layout
    noisy = load * (1.0 + 0.01 * rng.standard_normal((4, 256)))
    # Not even a policy that starts from nothing has a gain to offer.
    for offered in (place(noisy, topology, num_slots=288, current=live), place(noisy, topology, num_slots=288)):
        assert not should_rebalance(live, noisy, offered, min_gain=0.02)


def test_a_cost_of_any_rebalance_must_be_paid_by_all_layers_together() -> None:
    load = [LOAD[0], LOAD[0]]
    both = ExpertLayout([[0, 2, 1, 3]] * 2, num_experts=4, topology=TWO)
    model = CostModel(token_s=1.0, rebalance_s=70.0)
    assert should_rebalance(LIVE, load, both, cost=model, passes_since=1).layers.tolist() == [True, True]
    alone = should_rebalance(LIVE, load, both, cost=model, passes_since=1, frozen=[1])
    assert alone.layer_reasons == ("not paid back", "frozen")
    assert alone.cost == 70.0


def test_a_layer_that_does_not_pay_for_itself_is_not_paid_for_by_others() -> None:
    both = ExpertLayout([[0, 2, 1, 3]] * 2, num_experts=4, topology=TWO)
    load = [[10 * tokens for tokens in LOAD[0]], LOAD[0]]
    verdict = should_rebalance(LIVE, load, both, cost=CostModel(token_s=1.0, install_s=100.0), passes_since=1)
    assert verdict.layer_reasons == ("pays", "not paid back")


def test_frozen_layers_stay_until_they_thaw() -> None:
    for frozen in ([True, False], [0]):
        verdict = should_rebalance(LIVE, LOAD, BETTER, frozen=frozen)
        assert not verdict.layers.any()
        assert verdict.layer_reasons == ("frozen", "unchanged")
        assert verdict.gain == 40.0  # what was refused
    assert should_rebalance(LIVE, LOAD, BETTER, frozen=[1])


def test_a_layer_without_load_stays() -> None:
    """A13: no information, no action."""
    verdict = should_rebalance(LIVE, [[0] * 4, [0] * 4], BETTER)
    assert verdict.layer_reasons == ("no load", "unchanged")
    assert verdict.break_even_passes == math.inf


def test_a_worse_layout_is_refused_and_said_to_be_longer() -> None:
    verdict = should_rebalance(BETTER, LOAD, LIVE)
    assert not verdict
    assert verdict.reason.startswith("stay; would move 1 of 2 layers: a pass is 40 token times (33.3%) longer")


def test_an_equal_layout_is_no_move() -> None:
    verdict = should_rebalance(LIVE, LOAD, LIVE, cost=PRICED, passes_since=10)
    assert (verdict.gain, verdict.cost, verdict.reason) == (0.0, 0.0, "stay: the placement changes none of 2 layers")


def test_an_expert_that_died_with_its_rank_moves_its_layer_whatever_that_costs() -> None:
    """H1: ranks 0 and 2 hold experts 0 and 1, rank 1 was alone with 2 and 3."""
    three = Topology(3)
    old = ExpertLayout([[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 2, 3]], 4, topology=three)
    alive = np.array([True, False, True])
    load = np.ones((2, 4))
    new = place(load, three, num_slots=6, current=old, active_ranks=alive)
    verdict = should_rebalance(
        old, load, new, cost=PRICED, passes_since=0, frozen=[0, 1], active_ranks=alive, min_gain=0.5
    )
    assert verdict.layers.tolist() == [True, False]
    assert verdict.layer_reasons[0] == "an expert has no other slot on an active rank"
    assert (verdict.gain, verdict.break_even_passes, verdict.layer_time[0]) == (math.inf, 0.0, math.inf)
    assert verdict.reason.startswith("move 1 of 2 layers: experts are reached again for 2 transfers")
    with pytest.raises(MissingExpertError, match="`placement` leaves an expert of layer 0 without a slot"):
        should_rebalance(old, load, old, active_ranks=alive)


def test_shares_say_what_a_slot_takes() -> None:
    old = ExpertLayout([[0, 1, 0, 2]], 3, topology=TWO)
    new = ExpertLayout([[0, 2, 0, 1]], 3, topology=TWO)
    shares = eplb.replica_shares(old, [[8, 1, 5]])
    even = should_rebalance(old, [[8, 1, 5]], new)
    assert (even.layer_time[0], even.layer_gain[0]) == (9.0, 0.0)
    weighted = should_rebalance(old, [[[8, 1, 5]]], new, current_shares=shares)
    assert weighted.layer_time[0] == 7.0
    assert weighted.layer_gain[0] == -2.0
    windows = should_rebalance(old, [[[8, 1, 5]]] * 2, new, new_shares=np.stack([shares[:, [0, 3, 2, 1]]] * 2))
    assert windows.layer_gain[0] < 0.0


def test_weighted_dispatch_is_judged_by_the_best_shares_of_each_window() -> None:
    rng = np.random.default_rng(8)
    topology = Topology(4, rank_speed=[1.0, 1.0, 0.5, 2.0])
    load = rng.lognormal(3.0, 1.0, (3, 2, 12))
    load[1, 0] = 0.0
    live = ExpertLayout.trivial(2, 12, num_slots=16, topology=topology)
    offered = place(load, topology, num_slots=16, current=live, dispatch="weighted")
    model = CostModel(token_s=2.0, layer_s=1.0)
    verdict = should_rebalance(live, load, offered, cost=model, window_passes=4, dispatch="weighted")
    for layer in range(2):
        top = 0.0
        for window in load:
            shares = eplb.replica_shares(live, window)
            top += float((eplb.rank_load(live, window, shares=shares)[layer] / topology.rank_speed).max()) / 4
        assert verdict.layer_time[layer] == pytest.approx(2.0 * top / 3 + 1.0, rel=1e-2)
    assert (verdict.layer_gain >= 0.0).all()
    assert verdict
    # A rank that died takes nothing, and shares that are given stand.
    alive = np.array([True, True, False, True])
    moved = place(load, topology, num_slots=16, current=live, active_ranks=alive, dispatch="weighted")
    after = should_rebalance(live, load, moved, active_ranks=alive, dispatch="weighted")
    lost = {layer for layer, _ in eplb.lost_experts(live, alive).tolist()}
    assert {layer for layer in range(2) if after.layer_time[layer] == math.inf} == lost
    fixed = eplb.replica_shares(live, load.sum(axis=0))
    given = should_rebalance(live, load, live, current_shares=fixed, dispatch="weighted")
    assert given.layer_time.tolist() == should_rebalance(live, load, live, current_shares=fixed).layer_time.tolist()


def test_equal_arguments_give_equal_bytes() -> None:
    rng = np.random.default_rng(5)
    load = rng.lognormal(3, 1, (5, 3, 16))
    old = ExpertLayout.trivial(3, 16, num_slots=20, topology=Topology(4, 2))
    new = place(load, Topology(4, 2), num_slots=20, current=old)
    first, second = (should_rebalance(old, load.copy(), new, cost=PRICED, passes_since=99) for _ in range(2))
    assert first.reason == second.reason
    for name in ("layers", "layer_time", "layer_gain", "layer_cost", "layer_transfers"):
        assert getattr(first, name).tobytes() == getattr(second, name).tobytes()
        assert not getattr(first, name).flags.writeable


def test_an_empty_model_has_nothing_to_move() -> None:
    """A21: no layers."""
    none = ExpertLayout(np.zeros((0, 4), np.int64), 4, topology=TWO)
    verdict = should_rebalance(none, np.zeros((0, 4)), none)
    assert (verdict.layers.shape, verdict.reason) == ((0,), "stay: the placement changes none of 0 layers")
    assert repr(verdict) == "Verdict(stay: the placement changes none of 0 layers)"
    assert isinstance(verdict, Verdict)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"expert_load": [[1, 2, 3]]}, r"`expert_load` \(shape \[1, 3\]\) must be \[2, 4\] or \[T, 2, 4\]"),
        ({"expert_load": np.zeros((0, 2, 4))}, r"`expert_load` \(shape \[0, 2, 4\]\) must have one window or more"),
        ({"expert_load": [[1, 2, 3, math.nan]] * 2}, r"`expert_load` \(=nan\) must be finite .* layer 0, expert 3"),
        ({"expert_load": [[1e308] * 4] * 2}, r"`expert_load` \(up to 1e\+308\) is too large"),
        ({"passes_since": -1}, r"`passes_since` \(=-1.0\) must be at least 0"),
        ({"window_passes": 0}, r"`window_passes` \(=0.0\) must be above 0"),
        ({"min_gain": -0.1}, r"`min_gain` \(=-0.1\) must be at least 0"),
        ({"payback": -2}, r"`payback` \(=-2.0\) must be at least 0"),
        ({"dispatch": "best"}, r"`dispatch` \(='best'\) must be 'even' or 'weighted'"),
        ({"frozen": [True]}, r"`layers` \(shape \[1\]\) must be bools \[2\]"),
        ({"active_ranks": [True]}, r"`active_ranks` \(dtype bool, shape \[1\]\) must be bools \[2\]"),
        ({"current_shares": np.ones((1, 4))}, r"\(shape \[1, 4\]\) must be \[2, 4\] or \[1, 2, 4\]"),
        ({"new_shares": np.full((2, 4), 1.5)}, r"`new_shares` \(=1.5\) must be in \[0, 1\] at layer 0, slot 0"),
        ({"placement": LIVE.resized(Topology(3))}, "layouts differ in slots: 4 and 6"),
    ],
)
def test_bad_arguments_raise_with_their_values(options: dict[str, Any], text: str) -> None:
    arguments: dict[str, Any] = {"current": LIVE, "expert_load": LOAD, "placement": BETTER, **options}
    with pytest.raises(ValueError, match=text):
        should_rebalance(**arguments)


def test_the_wrong_kind_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"`cost` \(=3\) must be a CostModel or None"):
        should_rebalance(LIVE, LOAD, BETTER, cost=3)  # type: ignore[arg-type]
    with pytest.raises(IndexError, match=r"`layers` \(=2\) must be in \[0, 2\)"):
        should_rebalance(LIVE, LOAD, BETTER, frozen=[2])


def test_a_placement_for_weighted_dispatch_is_judged_by_it() -> None:
    """The walkthrough's `decide` does not say it twice."""
    windows = np.array([[[90, 10, 50, 50]], [[10, 90, 50, 50]]])
    topology = Topology(2)
    live = ExpertLayout([[0, 1, 2, 3, -1, -1]], num_experts=4, topology=topology)
    answer = place(windows, topology, num_slots=6, current=live, dispatch="weighted", transfer_price=0)
    assert answer.dispatch == "weighted"
    verdict = should_rebalance(live, windows, answer)
    assert verdict.gain == should_rebalance(live, windows, answer, dispatch="weighted").gain
    assert verdict.gain != should_rebalance(live, windows, answer, dispatch="even").gain


def test_a_layer_that_names_a_rank_that_is_out_moves_although_it_gains_nothing() -> None:
    """Each expert has a second slot, so none is lost; but tokens would still be sent to the dead rank."""
    topology = Topology(3)
    live = ExpertLayout([[0, 1, 0, 1, 0, 1]] * 2, num_experts=2, topology=topology)
    alive = [True, True, False]
    load = [[10, 10], [0, 0]]
    answer = place(load, topology, num_slots=6, current=live, active_ranks=alive)
    verdict = should_rebalance(live, load, answer, cost=CostModel(install_s=100.0), passes_since=1, active_ranks=alive)
    assert verdict.layers.tolist() == [True, True]
    assert (live.replace(answer.layout, verdict.layers).physical_to_logical_map[:, 4:] == -1).all()
