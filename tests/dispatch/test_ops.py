from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core import DispatchTables, ExpertLayout, LoadCounter, Topology, replica_shares, topk_to_slots
from eplb_core.dispatch.constants import MAPPED_TWICE, MODES, OUT_OF_RANGE, TAG, Mode
from tests.cases import PAIR, layouts, random_layout
from tests.dispatch import oracle

HOLDING_MODES = [mode for mode in MODES if mode != "fake"]


def random_ids(rows: int, columns: int, experts: int, seed: int = 0) -> torch.Tensor:
    """Distinct experts a row, as a gate gives them; a tenth is masked."""
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((rows, experts)), axis=1)[:, :columns]
    ids[rng.random(ids.shape) < 0.1] = -1
    return torch.tensor(ids, dtype=torch.int32)


@given(layouts(), st.sampled_from(MODES), st.integers(0, 20), st.data())
@settings(max_examples=150)
def test_every_slot_holds_the_expert_on_every_rank_in_every_mode(
    layout: ExpertLayout, mode: str, rows: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, layout.topology.num_ranks - 1))
    columns = min(2, layout.num_experts)
    ids = random_ids(rows, columns, layout.num_experts, seed=rows)
    tables = DispatchTables(layout, rank=rank, mode=mode, seed=3)  # type: ignore[arg-type]
    for layer in range(layout.num_layers):
        slots = tables.map(layer, ids)
        assert slots.shape == ids.shape
        assert slots.dtype == ids.dtype
        held = torch.tensor(layout.physical_to_logical_map[layer])[slots.long().clamp(min=0)]
        assert ((slots == -1) == (ids == -1)).all()
        assert (held[slots >= 0] >= 0).all()
        if mode != "fake":
            assert (held[slots >= 0] == ids[slots >= 0]).all()


@pytest.mark.parametrize("mode", MODES)
def test_masked_rows_stay_masked_and_are_not_counted(mode: str) -> None:
    """FAULTS C7, G3: indexing with -1 takes the last expert's slot; fillers of a captured batch are no load."""
    load = LoadCounter(1, 4)
    t = DispatchTables(PAIR, rank=0, mode=mode, load=load).layer(0)  # type: ignore[arg-type]
    ids = torch.tensor([[0, 3], [-1, -1], [1, 2], [3, 3]], dtype=torch.int32)
    slots = topk_to_slots(ids, t, num_tokens=torch.tensor([3], dtype=torch.int32))
    assert (slots[1] == -1).all()
    assert (slots[3] == -1).all()
    assert (slots[0] >= 0).all()
    assert (slots[2] >= 0).all()
    if mode != "fake":
        assert load.count[0, 0].tolist() == [1, 1, 1, 1]
    assert int(load.count.sum()) == 4


@pytest.mark.parametrize("mode", [m for m in MODES if m not in ("quota", "fewest")])
def test_masked_rows_do_not_shift_the_choices_of_others(mode: str) -> None:
    """FAULTS C7."""
    layout = random_layout()
    ids = random_ids(40, 4, 32)
    masked = ids.clone()
    masked[7] = -1
    a, b = (DispatchTables(layout, mode=mode).map(0, x) for x in (ids, masked))  # type: ignore[arg-type]
    rest = torch.arange(40) != 7
    assert torch.equal(a[rest], b[rest])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("out_dtype", [None, torch.int32, torch.int64])
def test_type_and_shape_are_the_inputs_or_those_of_out(
    mode: str, dtype: torch.dtype, out_dtype: torch.dtype | None
) -> None:
    """FAULTS C11."""
    layout = random_layout()
    ids = random_ids(9, 4, 32).to(dtype)
    out = None if out_dtype is None else torch.empty(ids.shape, dtype=out_dtype)
    slots = DispatchTables(layout, mode=mode).map(0, ids, out=out)  # type: ignore[arg-type]
    assert slots.dtype == (out_dtype or dtype)
    assert slots.is_contiguous()
    assert out is None or slots is out
    assert torch.equal(slots.long(), DispatchTables(layout, mode=mode).map(0, ids.long()))  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", MODES)
def test_ids_may_be_strided_and_mapped_in_place(mode: str) -> None:
    layout = random_layout()
    ids = random_ids(9, 4, 32)
    expected = DispatchTables(layout, mode=mode).map(1, ids.clone())  # type: ignore[arg-type]
    wide = torch.full((9, 8), 99, dtype=torch.int32)
    view = wide[:, 1:8:2]
    view.copy_(ids)
    assert DispatchTables(layout, mode=mode).map(1, view, out=view) is view  # type: ignore[arg-type]
    assert torch.equal(view, expected)
    assert (wide[:, ::2] == 99).all()


@pytest.mark.parametrize("mode", MODES)
def test_no_tokens_are_valid(mode: str) -> None:
    tables = DispatchTables(PAIR, mode=mode)  # type: ignore[arg-type]
    for shape in ((0, 2), (0,)):
        assert tables.map(0, torch.empty(shape, dtype=torch.int64)).shape == shape
    assert tables.map(0, torch.tensor([1, -1, 2])).tolist()[1] == -1


def test_shared_columns_bypass_the_table_and_are_not_counted() -> None:
    """FAULTS C8: expert 4 of a table of 4 is the fused shared expert."""
    load = LoadCounter(1, 4)
    t = DispatchTables(PAIR, mode="static", seed=42, load=load).layer(0)
    ids = torch.tensor([[0, 3, 4], [1, 2, 4]])
    assert topk_to_slots(ids, t, num_shared=1).tolist() == [[0, 3, 4], [1, 2, 4]]
    assert load.count[0, 0].tolist() == [1, 1, 1, 1]
    one = torch.tensor(1, dtype=torch.int32)
    assert topk_to_slots(ids, t, num_shared=1, num_tokens=one)[1].tolist() == [-1, -1, -1]
    with pytest.raises(
        IndexError, match=r"`topk_ids` \(=4\) must be -1 or a logical expert in \[0, 4\) at row 0, column 2"
    ):
        topk_to_slots(ids, t)


def test_slots_have_the_names_that_the_all_to_all_uses() -> None:
    """FAULTS C10: two shared slots after each rank's four routed ones, so slot 5 is called 7."""
    layout = ExpertLayout.trivial(1, 8, num_slots=8, topology=Topology(num_ranks=2))
    names = [rank * 6 + i for rank in range(2) for i in range(4)]
    for mode in MODES:
        tables = DispatchTables(layout, mode=mode, slot_ids=names)
        if mode != "fake":
            assert tables.map(0, torch.tensor([[5]])).tolist() == [[7]]


@pytest.mark.parametrize(
    ("ids", "options", "error", "text"),
    [
        ([[0, 0]], {"num_shared": 3}, ValueError, r"`num_shared` \(=3\) must be in \[0, 2\]"),
        ([[0, 0]], {"out": torch.zeros(1, 3).long()}, ValueError, r"`out` \(shape \[1, 3\]\) must be \[1, 2\]"),
        ([[0]], {"out": torch.zeros(1, 1)}, TypeError, r"`out` \(dtype torch.float32\) must be int32 or int64"),
        ([[0], [5], [4]], {}, IndexError, r"\(=5\) must be .* expert in \[0, 4\) at row 1, column 0; 1 more"),
        ([[-2]], {}, IndexError, r"\(=-2\)"),
    ],
)
def test_bad_arguments_of_the_operator_are_named(ids: Any, options: Any, error: type[Exception], text: str) -> None:
    """FAULTS C12, C14: physical ids up to 5 enter a table of 4 experts."""
    with pytest.raises(error, match=text):
        topk_to_slots(torch.tensor(ids), DispatchTables(PAIR, mode="row").layer(0), **options)


def test_other_ids_modes_and_tables_are_refused() -> None:
    tables: Any = DispatchTables(PAIR, mode="quota")
    with pytest.raises(IndexError, match=r"\(=9\)"):
        tables.map(0, torch.tensor([[9]]))
    with pytest.raises(TypeError, match=r"`topk_ids` \(dtype torch.int16\) must be int32 or int64"):
        tables.map(0, torch.zeros(1, 1, dtype=torch.int16))
    with pytest.raises(TypeError, match=r"`tables` \(=DispatchTables\) must be one layer's: `DispatchTables.layer"):
        topk_to_slots(torch.zeros(1, 1).long(), tables)


@given(layouts(), st.sampled_from(MODES), st.integers(0, 20), st.data())
@settings(max_examples=200)
def test_the_loop_on_the_host_does_what_the_oracle_does(
    layout: ExpertLayout, mode: Mode, rows: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, layout.topology.num_ranks - 1))
    dtype, out_dtype = data.draw(st.tuples(*[st.sampled_from([torch.int32, torch.int64])] * 2))
    ids = random_ids(rows, min(3, layout.num_experts), layout.num_experts, seed=rows).to(dtype)
    if data.draw(st.booleans()):
        ids = ids.t().contiguous().t()
    shared = data.draw(st.integers(0, ids.shape[1]))
    limit = data.draw(st.none() | st.integers(-1, rows + 1).map(lambda n: torch.tensor([n], dtype=torch.int32)))
    others = torch.arange(layout.topology.num_ranks * layout.num_experts).view(-1, layout.num_experts) % 7
    recording, debug = data.draw(st.booleans()), data.draw(st.booleans())
    results = []
    for by_oracle in (True, False):
        load = LoadCounter(layout.num_layers, layout.num_experts)
        load.recording(recording)
        tables = DispatchTables(
            layout, rank=rank, mode=mode, seed=3, load=load, debug=debug, all_reduce=lambda batch: batch.add_(others)
        )
        t, out = tables.layer(layout.num_layers - 1), torch.empty(ids.shape, dtype=out_dtype)
        for _ in range(2):
            if by_oracle:
                out = oracle.map_ids(ids, t, num_tokens=limit, num_shared=shared)
            else:
                topk_to_slots(ids, t, num_tokens=limit, num_shared=shared, out=out)
        results.append([x.tolist() for x in (out, t.count, t.draws, t.batch, t.bounds)])
    assert results[0] == results[1]


@pytest.mark.parametrize("mode", ["static", "even", "random", "row", "weighted"])
def test_an_id_that_is_no_expert_costs_no_count_and_no_draw(mode: str) -> None:
    load = LoadCounter(1, 4)
    t = DispatchTables(PAIR, mode=mode, load=load).layer(0)  # type: ignore[arg-type]
    out = torch.full((2, 2), 77, dtype=torch.int32)
    with pytest.raises(IndexError, match=r"\(=4\).*row 1, column 1"):
        topk_to_slots(torch.tensor([[0, 1], [2, 4]], dtype=torch.int32), t, out=out)
    assert load.count.sum() == 0
    assert t.draws[0] == 0
    assert (out == 77).all()


@pytest.mark.parametrize("mode", HOLDING_MODES)
def test_debugging_tables_find_ids_that_are_mapped_twice(mode: str) -> None:
    """FAULTS C9: the second map takes slot 0 for expert 0."""
    tables = DispatchTables(PAIR, mode=mode, debug=True)  # type: ignore[arg-type]
    ids = torch.tensor([[0, 3], [-1, 1]])
    tagged = tables.map(0, ids)
    assert (tagged[ids >= 0] >= TAG).all()
    plain = DispatchTables(PAIR, mode=mode).map(0, ids)  # type: ignore[arg-type]
    assert torch.equal(tables.untag(tagged), plain)
    with pytest.raises(IndexError, match="it was mapped before"):
        tables.map(0, tagged)
    with pytest.raises(ValueError, match="entries that were not mapped"):
        tables.untag(ids)
    tables.check()


def test_each_token_is_computed_exactly_once_where_ranks_share_all_tokens() -> None:
    """FAULTS C1: each rank picked its own nearest replica, so experts were summed several times or not at all."""
    layout = random_layout(ranks=8)
    ids = random_ids(64, 4, 32)
    per_rank = [DispatchTables(layout, rank=rank, mode="row").map(2, ids) for rank in range(8)]
    computed = sum(((slots // layout.slots_per_rank) == rank).int() for rank, slots in enumerate(per_rank))
    assert torch.equal(computed, (ids >= 0).int())  # type: ignore[arg-type]
    shared = replica_shares(layout, np.random.default_rng(0).integers(1, 50, (4, 32)))
    again = [DispatchTables(layout, rank=rank, mode="row", shares=shared).map(2, ids) for rank in range(8)]
    assert all(torch.equal(again[0], other) for other in again)


def test_an_expert_chosen_by_even_rows_only_still_uses_all_its_replicas() -> None:
    """SGLang takes row % replicas: the second of two is never used, and a batch of one always takes the first."""
    layout = ExpertLayout([[0, 1, 2, 0], [0, 1, 2, 0]], num_experts=3, topology=Topology(num_ranks=4))
    tables = DispatchTables(layout, mode="row")
    ids = torch.full((64, 1), -1)
    ids[::2] = 0
    counts = Counter(tables.map(0, ids)[::2, 0].tolist())
    assert set(counts) == {0, 3}
    assert abs(counts[0] - counts[3]) <= 4
    for stride in range(1, 13):
        ids = torch.full((16 * stride, 1), -1)
        ids[::stride] = 0
        assert set(tables.map(0, ids)[::stride, 0].tolist()) == {0, 3}


def test_batches_of_one_row_differ_by_layer_and_expert() -> None:
    rows = [[*range(16), *range(16)]] * 32
    layout = ExpertLayout(rows, num_experts=16, topology=Topology(num_ranks=4))
    tables = DispatchTables(layout, mode="row")
    first = torch.stack([tables.map(layer, torch.arange(16)[None]) for layer in range(32)]).flatten() < 16
    assert 200 < int(first.sum()) < 312  # of 512: neither always the first nor always the last replica
    by_layer = first.view(32, 16)
    assert 0 < len({tuple(row.tolist()) for row in by_layer}) == 32


def test_one_token_a_rank_spreads_over_the_replicas() -> None:
    """vLLM sends row 0 of all ranks to one replica: [8, 0, 0]."""
    layout = ExpertLayout([[0, 1, 2, 0, 3, 4, 0, 5]] * 20, num_experts=6, topology=Topology(num_ranks=8))
    for layer in range(20):
        slots = [
            int(DispatchTables(layout, rank=r, mode="weighted").map(layer, torch.zeros(1, 1).long())) for r in range(8)
        ]
        assert sorted(Counter(slots).values()) in ([2, 3, 3], [2, 2, 4])


@pytest.mark.parametrize("mode", ["row", "weighted", "random"])
def test_shares_are_met_by_the_rows(mode: str) -> None:
    layout = ExpertLayout([[0, 0, 0]], num_experts=1, topology=Topology(num_ranks=3))
    tables = DispatchTables(layout, mode=mode)  # type: ignore[arg-type]
    for shares in ([0.5, 0.0, 0.5], [0.1, 0.2, 0.7]):
        tables.install(layout, shares=[shares])
        counts = torch.bincount(tables.map(0, torch.zeros(1000, 1).long()).flatten(), minlength=3).tolist()
        assert counts == pytest.approx([1000 * share for share in shares], abs=60 if mode == "random" else 3)
        assert not any(count for count, share in zip(counts, shares, strict=True) if not share)


def test_random_draws_anew_with_every_call_and_repeats_with_the_seed() -> None:
    """FAULTS C6: seeded, equal in every process, and no global state is used."""
    layout = random_layout()
    ids = random_ids(200, 4, 32)
    state = torch.get_rng_state()
    first = DispatchTables(layout, rank=1, mode="random", seed=5)
    again = DispatchTables(layout, rank=1, mode="random", seed=5)
    calls = [first.map(0, ids) for _ in range(3)]
    for slots in calls:
        assert torch.equal(again.map(0, ids), slots)
    assert all((a != b).any() for a, b in itertools.combinations(calls, 2))
    assert (DispatchTables(layout, rank=1, mode="random", seed=6).map(0, ids) != calls[0]).any()
    assert (DispatchTables(layout, rank=2, mode="random", seed=5).map(0, ids) != calls[0]).any()
    assert torch.equal(torch.get_rng_state(), state)


def test_random_picks_are_uniform_and_calls_are_independent() -> None:
    layout = ExpertLayout([[0] * 8], num_experts=1, topology=Topology(num_ranks=8))
    tables = DispatchTables(layout, mode="random")
    picks = torch.stack([tables.map(0, torch.zeros(2000, 1).long()).flatten() for _ in range(50)])
    counts = torch.bincount(picks.flatten(), minlength=8).double()
    assert ((counts - 12500) ** 2 / 12500).sum() < 27  # chi-square, 7 degrees of freedom, p = 0.0003
    for a, b in ((picks[:-1], picks[1:]), (picks[:, :-1], picks[:, 1:])):
        pairs = torch.bincount((a * 8 + b).flatten(), minlength=64).double()
        assert ((pairs - pairs.mean()) ** 2 / pairs.mean()).sum() < 110  # 63 degrees of freedom


def test_fake_spreads_every_batch_evenly() -> None:
    layout = ExpertLayout.trivial(2, 16, num_slots=16, topology=Topology(num_ranks=4))
    load = LoadCounter(2, 16)
    slots = DispatchTables(layout, mode="fake", load=load).map(1, torch.zeros(32, 4).long())
    assert torch.bincount(slots.flatten(), minlength=16).tolist() == [8] * 16
    assert load.count[1, 0].tolist() == [8] * 16
    assert all(len(set(row)) == 4 for row in slots.tolist())


@pytest.mark.parametrize("rows", [1, 16, 100])
@pytest.mark.parametrize(
    ("ranks", "experts", "columns", "slots", "least"),
    [(64, 256, 8, 256, 1.0), (32, 256, 8, 512, 0.5), (64, 16, 2, 128, 0.5), (3, 10, 4, 12, 0.5)],
)
def test_fake_loads_all_ranks_alike_when_all_take_part(
    ranks: int, experts: int, columns: int, slots: int, least: float, rows: int
) -> None:
    """Every rank began at the same expert: of 64 ranks with 16 rows of 8, 32 got nothing."""
    layout = ExpertLayout.trivial(2, experts, num_slots=slots, topology=Topology(ranks))
    used, routed = torch.zeros(slots, dtype=torch.int64), torch.zeros(experts, dtype=torch.int64)
    for rank in range(ranks):
        load = LoadCounter(2, experts)
        out = DispatchTables(layout, rank=rank, mode="fake", load=load).map(1, torch.zeros(rows, columns).long())
        used += torch.bincount(out.flatten(), minlength=slots)
        routed += load.count[1, 0]
    assert int(routed.max()) - int(routed.min()) <= 1
    loads = used.view(ranks, -1).sum(dim=1).double()
    assert float(loads.mean() / loads.max()) >= least
    assert int(loads.min()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["weighted", "random", "quota", "static"])
def test_one_compiled_region_serves_all_layers(mode: str) -> None:
    """An int argument for the layer would compile once for each layer, and stop at the limit of 8."""
    layout = random_layout(layers=12)
    load = LoadCounter(12, 32)
    tables = DispatchTables(layout, mode=mode, load=load)  # type: ignore[arg-type]
    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        compiled.append(graph)
        return graph

    torch._dynamo.reset()
    region = torch.compile(topk_to_slots, backend=backend, fullgraph=True, dynamic=False)
    ids = random_ids(16, 4, 32)
    fresh = DispatchTables(layout, mode=mode)  # type: ignore[arg-type]
    for layer in range(12):
        assert torch.equal(region(ids, tables.layer(layer)), fresh.map(layer, ids))
    assert len(compiled) == 1
    assert (load.count[:, 0].sum(1) == (ids >= 0).sum()).all()


@pytest.mark.slow
def test_a_whole_model_compiles_and_counts_right() -> None:
    layout = random_layout(layers=6)
    load = LoadCounter(6, 32)
    layers = [DispatchTables(layout, mode="random", load=load).layer(i) for i in range(6)]
    out = torch.empty(16, 4, dtype=torch.int64)

    def model(ids: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(ids, dtype=torch.int64)
        for t in layers:
            total = total + topk_to_slots(ids, t, num_shared=1, out=out)
        return total

    torch._dynamo.reset()
    ids = random_ids(16, 4, 32)
    expected = sum(DispatchTables(layout, mode="random").map(i, ids.long(), num_shared=1) for i in range(6))
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(ids), expected)  # type: ignore[arg-type]
    assert (load.count[:, 0].sum(1) == (ids[:, :3] >= 0).sum()).all()


def test_the_operators_schemas_hold() -> None:
    layout = random_layout()
    t = DispatchTables(layout, mode="random", load=LoadCounter(4, 32)).layer(0)
    ids = random_ids(5, 4, 32)
    tensors = [x.clone() for x in (t.table, t.settings, t.draws, t.count, t.state, t.errors)]
    rest = (torch.tensor([4], dtype=torch.int32), 0, t.num_experts, t.num_entries)
    operators = torch.ops.eplb_core
    for op, args in (
        (operators.map, (ids, torch.empty_like(ids), *tensors, *rest, "random", False)),
        (operators.map_solved, (ids, torch.empty_like(ids), t.table.clone(), t.table, t.blocks, *rest, True)),
    ):
        torch.library.opcheck(op.default, args, test_utils=("test_schema", "test_faketensor"))


def test_faults_that_a_device_counted_are_told_once() -> None:
    tables = DispatchTables(PAIR, debug=True)
    tables.layer(0).errors[MAPPED_TWICE] = 2
    with pytest.raises(IndexError, match=r"^2 ids were mapped twice"):
        tables.check()
    tables.check()
    tables.layer(0).errors[OUT_OF_RANGE] = 4
    with pytest.raises(IndexError, match=r"4 ids were neither -1 nor a logical expert in \[0, 4\)"):
        tables.check()
