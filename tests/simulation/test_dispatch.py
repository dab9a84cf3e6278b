"""Simulated rank loads are those of a replay token by token through the real dispatch tables."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_core import (
    ExpertLayout,
    TokenTrace,
    Topology,
    compare_policies,
    cost_preset,
    even_dispatch_table,
    place,
    replica_shares,
    simulate,
    static_dispatch_table,
    sweep,
)
from eplb_core._arrays import FloatArray, IntArray
from eplb_core.metrics import even_shares
from eplb_core.simulation import DispatchName, SimulateOptions, Simulation
from eplb_core.simulation.load.sources import rank_starts
from tests.placement.affinity.sends import clustered_tokens

torch = pytest.importorskip("torch", reason="dispatch tables are tensors")

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
TOPOLOGY = Topology(num_ranks=4, num_nodes=2)


def own_tokens() -> IntArray:
    """1,024 tokens, 3 layers, 4 of 16 experts: expert e is about e + 1 times as popular as expert 0."""
    rng = np.random.default_rng(0)
    keys = np.log(np.arange(1, 17)) + rng.gumbel(size=(1024, 3, 16))
    return np.argsort(-keys, axis=2)[:, :, :4]


def recorded_tokens(name: str) -> IntArray:
    path = SHARED / f"dsv2lite_esft_{name}.npz"
    if not path.exists():
        pytest.skip(f"needs ../shared/data/{path.name}: recorded top-k ids that are not ours to ship")
    with np.load(path) as file:
        return np.asarray(file["topk_ids"][:4096, ::5], dtype=np.int64)


def parts(tokens: IntArray, ranks: int) -> list[IntArray]:
    """Which tokens of a window lie on which rank."""
    owner = np.arange(len(tokens)) * ranks // len(tokens)
    return [tokens[owner == rank] for rank in range(ranks)]


def replay(tokens: IntArray, layout: ExpertLayout, dispatch: DispatchName) -> IntArray:
    """Tokens of each rank, `[L, R]`: each token through the table of the rank on which it lies, one by one."""
    from eplb_core import DispatchTables, topk_to_slots

    ranks = layout.topology.num_ranks
    load = np.zeros((layout.num_layers, ranks), dtype=np.int64)
    static = static_dispatch_table(layout) if dispatch == "static_table" else None
    for rank, mine in enumerate(parts(tokens, ranks)):
        tables = None if static is not None else DispatchTables(layout, rank=rank, mode="even")
        for layer in range(layout.num_layers):
            ids = np.ascontiguousarray(mine[:, layer])
            if static is not None:
                slots = static[rank, layer][ids]
            else:
                assert tables is not None
                slots = topk_to_slots(torch.from_numpy(ids), tables.layer(layer)).numpy()
            assert (layout.physical_to_logical_map[layer][slots] == ids).all()
            for slot in slots.ravel().tolist():
                load[layer, slot // layout.slots_per_rank] += 1
    return load


def simulated(tokens: IntArray, layout: ExpertLayout, dispatch: DispatchName, window_tokens: int) -> Simulation:
    trace = TokenTrace(tokens, num_experts=layout.num_experts, window_tokens=window_tokens)
    return replayed(trace, layout, dispatch)


def replayed(trace: TokenTrace | IntArray, layout: ExpertLayout, dispatch: DispatchName, **more: Any) -> Simulation:
    """Window by window on one layout, ranks kept."""
    options: SimulateOptions = {
        "topology": layout.topology,
        "num_slots": layout.num_slots,
        "policy": "none",
        "dispatch": dispatch,
        "interval": 1,
        "current": layout,
        "keep_ranks": True,
    }
    return simulate(trace, **{**options, **more})


@pytest.mark.parametrize("dispatch", ["static_table", "even_table"])
@pytest.mark.parametrize("source", ["own", "intent", "law"])
def test_rank_loads_equal_a_replay_token_by_token(source: str, dispatch: DispatchName) -> None:
    tokens = own_tokens() if source == "own" else recorded_tokens(source)
    experts = int(tokens.max()) + 1 if source == "own" else 64
    load = TokenTrace(tokens, num_experts=experts, window_tokens=len(tokens)).load
    layout = place(load, topology=TOPOLOGY, num_slots=experts + 8).layout
    size = len(tokens) // 3
    found = simulated(tokens, layout, dispatch, size).layer_rank_load
    assert found is not None
    assert len(found) == 3
    for window in range(3):
        wanted = replay(tokens[window * size : (window + 1) * size], layout, dispatch)
        assert np.array_equal(found[window], wanted)


def test_weighted_is_what_the_mode_quota_reaches_on_the_batch() -> None:
    """Up to the rounding of whole tokens: one an expert with replicas."""
    from eplb_core import DispatchTables, topk_to_slots

    tokens = own_tokens()[:512]
    layout = place(TokenTrace(tokens, 16, 512).load, topology=TOPOLOGY, num_slots=24).layout
    found = simulated(np.concatenate([tokens, tokens]), layout, "weighted", 512)
    tables = DispatchTables(layout, mode="quota")
    for layer in range(layout.num_layers):
        ids = torch.from_numpy(np.ascontiguousarray(tokens[:, layer]))
        slots = topk_to_slots(ids, tables.layer(layer)).numpy().ravel()
        top = np.bincount(slots // layout.slots_per_rank, minlength=4).max()
        assert abs(top - found.max_load[0, layer]) <= 8


def test_tables_without_known_tokens_take_equal_parts_from_all_ranks() -> None:
    """Expert 0 has a slot on ranks 0 and 2, node by node: each serves its node, half of the tokens."""
    layout = ExpertLayout([[0, 1, 2, 3, 0, 4, 5, 6]], 7, topology=TOPOLOGY)
    load = np.array([[[8, 1, 1, 1, 1, 1, 1]]] * 2)
    result = replayed(load, layout, "even_table")
    assert result.layer_rank_load is not None
    assert result.layer_rank_load[0, 0].tolist() == [5, 2, 5, 2]
    assert result.dispatch == "even_table"


def test_previous_shares_are_solved_for_the_windows_that_were_seen() -> None:
    layout = ExpertLayout([[0, 1, 2, 0]], 3, topology=Topology(2))
    load = np.array([[[8, 1, 5]], [[8, 5, 1]], [[8, 5, 1]]])

    def shares(seen: IntArray) -> FloatArray:
        tokens = replica_shares(layout, seen)[0] * np.array([8, 5, 1, 8])
        return np.asarray(tokens.reshape(2, 2).sum(axis=1))

    result = replayed(load, layout, "previous", history=2)
    assert result.layer_rank_load is not None
    assert result.layer_rank_load[0, 0].tolist() == [5, 9]  # before anything was seen: even
    assert result.layer_rank_load[1, 0] == pytest.approx(shares(load[0:1]))
    assert result.layer_rank_load[2, 0] == pytest.approx(shares(load[0:2]))


def test_weighted_shares_are_solved_for_each_window_as_it_comes() -> None:
    """Expert 0 is on both ranks: its tokens even out whatever the other experts do."""
    layout = ExpertLayout([[0, 1, 2, 0]], 3, topology=Topology(2))
    load = np.array([[[8, 1, 5]], [[8, 5, 1]], [[8, 0, 8]]])
    found = replayed(load, layout, "weighted", interval=2)
    assert found.max_load[:, 0] == pytest.approx([7, 7, 8])
    placed = place(load[:1], Topology(2), num_slots=4, dispatch="weighted", current=layout, max_transfers=0)
    assert placed.balancedness[0] == pytest.approx(found.balancedness[0, 0])  # one word, one meaning


@pytest.mark.parametrize(("old", "new"), [("solved", "weighted"), ("static", "static_table"), ("local", "even_table")])
def test_words_of_0_1_are_refused_by_their_new_name(old: Any, new: str) -> None:
    with pytest.raises(ValueError, match=rf"`dispatch` \(='{old}'\).*'{new}'"):
        simulate(np.ones((2, 1, 4)), topology=Topology(2), num_slots=4, dispatch=old, interval=1)


def test_shares_of_a_wrong_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`shares` \(shape \[1, 3\]\) must be \[1, 4\]"):
        simulate(np.ones((2, 1, 4)), topology=Topology(2), num_slots=4, interval=1, dispatch=lambda *_: np.ones((1, 3)))


def test_near_sends_are_those_of_the_tables_and_fewer_than_of_chance() -> None:
    from eplb_core import DispatchTables, count_sends

    tokens, topology = own_tokens(), Topology(num_ranks=8, num_nodes=4)
    trace = TokenTrace(tokens, 16, 256)
    layout = place(trace.load, topology=topology, num_slots=32).layout
    near = replayed(trace, layout, "near")
    assert near.layer_rank_load is not None
    assert near.layer_rank_load.sum() == tokens.size
    wanted = np.zeros(layout.num_layers)
    for rank, mine in enumerate(parts(tokens[:256], 8)):  # window 0 runs on equal shares
        tables = DispatchTables(layout, rank=rank, mode="near")
        for layer in range(layout.num_layers):
            tables.map(layer, torch.from_numpy(np.ascontiguousarray(mine[:, layer])))
            wanted[layer] += int(tables.layer(layer).sends[0])
    assert near.sends_per_token[0] == pytest.approx(wanted / 256)
    assert near.sends_per_token.mean() == pytest.approx(count_sends(layout, tokens).sends.mean(), rel=0.03)
    assert near.nodes_per_token.mean() == pytest.approx(count_sends(layout, tokens).nodes.mean(), rel=0.03)
    even = replayed(trace, layout, "even")
    assert near.sends_per_token.mean() < 0.9 * even.sends_per_token.mean()
    shares = count_sends(layout, tokens[:256], shares=even_shares(layout))
    assert even.sends_per_token[0] == pytest.approx(shares.sends)
    assert even.nodes_per_token[0] == pytest.approx(shares.nodes)


@pytest.mark.parametrize("dispatch", ["even_table", "static_table"])
def test_sends_by_tables_are_counted_token_by_token(dispatch: DispatchName) -> None:
    tokens = own_tokens()[:64]
    layout = place(TokenTrace(tokens, 16, 64).load, topology=TOPOLOGY, num_slots=24).layout
    sim = simulated(np.concatenate([tokens, tokens]), layout, dispatch, 64)
    table = static_dispatch_table(layout) if dispatch == "static_table" else even_dispatch_table(layout)
    node, sends = TOPOLOGY.rank_to_node, np.zeros((2, layout.num_layers))
    for rank, mine in enumerate(parts(tokens, 4)):
        for layer in range(layout.num_layers):
            for row in mine[:, layer].tolist():
                met = {int(node[table[rank, layer, expert] // layout.slots_per_rank]) for expert in row}
                sends[:, layer] += len(met), len(met - {int(node[rank])})
    assert sim.nodes_per_token[0] == pytest.approx(sends[0] / 64)
    assert sim.sends_per_token[0] == pytest.approx(sends[1] / 64)


def test_sends_are_unknown_without_tokens_and_near_needs_them() -> None:
    tokens = own_tokens()
    trace = TokenTrace(tokens, 16, 256)
    layout = place(trace.load, topology=TOPOLOGY, num_slots=24).layout
    assert np.isnan(replayed(trace.load, layout, "even").sends_per_token).all()
    with pytest.raises(ValueError, match="TokenTrace"):
        replayed(trace.load, layout, "near")
    alone = ExpertLayout.trivial(3, 16, num_slots=24, topology=Topology(4))
    one = replayed(trace, alone, "even")
    assert (one.nodes_per_token.mean(), one.sends_per_token.mean()) == (1.0, 0.0)


def test_policies_place_with_the_pairs_they_saw_and_the_price_of_their_cost() -> None:
    tokens = np.stack([clustered_tokens(2048, 4, 8, 4, loyalty=0.9, seed=seed) for seed in range(2)], axis=1)
    trace = TokenTrace(tokens, 32, 512)
    options: Any = {"topology": Topology(8, 4), "num_slots": 40, "interval": 1}
    cost = cost_preset("H200")
    settings: Any = {name: {"dispatch": name, "policy": "place"} for name in ("even", "near")}
    both = compare_policies(trace, settings, cost=cost, **options)
    even, near = both
    assert near.sends_per_token[1:].mean() < 0.7 * even.sends_per_token[1:].mean()
    assert (near.exchange_s[1:] < even.exchange_s[1:]).all()
    assert (near.exchange_bytes[1:, 1] < even.exchange_bytes[1:, 1]).all()
    # Each token once to each other node, all layers together.
    sent = near.sends_per_token.sum(axis=1) * 512 * cost.token_bytes
    assert near.exchange_bytes[:, 1] == pytest.approx(sent)
    assert both.best is near
    row = near.summary()
    assert row["sends_per_token"] == pytest.approx(near.sends_per_token[1:].mean())
    assert row["exchange_network_bytes"] == pytest.approx(sent[1:].mean())
    assert 0.0 < row["exchange_s"] < row["pass_s"]
    free = simulate(trace, dispatch="near", policy="place", place_options={"traffic_price": 0.0}, cost=cost, **options)
    assert free.sends_per_token[1:].mean() > near.sends_per_token[1:].mean()
    auto = simulate(trace, dispatch="near", policy="auto", **options)
    assert auto.sends_per_token[1:].mean() < even.sends_per_token[1:].mean()


def test_a_sweep_replays_tokens_and_keeps_rows_by_their_windows(tmp_path: Path) -> None:
    tokens = own_tokens()
    grid: Any = {"dispatch": ["even", "near"]}
    options: Any = {"topology": TOPOLOGY, "num_slots": 24, "interval": 1, "policy": "none", "results": tmp_path}
    rows = sweep(TokenTrace(tokens, 16, 256), grid, **options)
    assert rows.sends_per_token[1] < rows.sends_per_token[0]
    assert len(list(tmp_path.iterdir())) == 2
    assert sweep(TokenTrace(tokens, 16, 256), grid, **options).tolist() == rows.tolist()
    sweep(TokenTrace(tokens, 16, 512), grid, **options)
    assert len(list(tmp_path.iterdir())) == 4
    with pytest.raises(ValueError, match="workers"):
        sweep(TokenTrace(tokens, 16, 256), grid, workers=2, **options)


def test_near_solves_its_orders_for_the_tokens_seen() -> None:
    from eplb_core import DispatchTables, near_orders

    tokens, topology = own_tokens(), Topology(num_ranks=8, num_nodes=4)
    trace = TokenTrace(tokens, 16, len(tokens) // 2)
    layout = place(trace.load, topology=topology, num_slots=32).layout
    near = simulate(
        trace,
        topology=topology,
        num_slots=32,
        policy="none",
        current=layout,
        dispatch="near",
        interval=1,
        keep_ranks=True,
    )
    assert near.layer_rank_load is not None
    seen, now = np.array_split(tokens, 2)
    shares = replica_shares(layout, trace.load[:1])
    orders = near_orders(layout, seen, trace.load[:1], shares=shares)
    expected = np.zeros(near.layer_rank_load.shape[1:])
    for rank, (first, end) in enumerate(itertools.pairwise(rank_starts(len(now), 8))):
        tables = DispatchTables(layout, rank=rank, mode="near", shares=shares, orders=orders)
        for layer in range(layout.num_layers):
            slots = tables.map(layer, torch.from_numpy(now[first:end, layer].astype(np.int64))).numpy()
            expected[layer] += np.bincount(slots[slots >= 0] // 4, minlength=8)
    np.testing.assert_array_equal(near.layer_rank_load[1], expected)
