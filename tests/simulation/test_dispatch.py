"""Simulated rank loads are those of a replay token by token through the real dispatch tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_core import ExpertLayout, TokenTrace, Topology, place, replica_shares, simulate, static_dispatch_table
from eplb_core._arrays import FloatArray, IntArray
from eplb_core.simulation import DispatchName, SimulateOptions, Simulation

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
