"""DeepSeek's answers, the stated order where it leaves one open, and numbers in every refusal.

`golden_deepseek.npz` holds 42 answers of DeepSeek's own code on random loads: of each case of the file of 50 that has
no recorded load, the first 6 layers (layers do not depend on each other), the load as it is (float32), `phy2log` as
int16, and `log2phy` as the number of the replica in each slot, int16 `[L, P]`. From the whole file:

    for name in names:
        l2p, p2l = log2phy[:6], phy2log[:6]
        replica = np.full(p2l.shape, -1, np.int16)
        layer, expert, number = np.nonzero(l2p >= 0)
        replica[layer, l2p[layer, expert, number]] = number

The whole file is compared too where a checkout has it beside it.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import eplb_core as eplb
from eplb_core.placement import deepseek

HERE = Path(__file__).parent
WHOLE_FILE = HERE.parents[2] / "shared" / "golden" / "deepseek_eplb.npz"

Arrays = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]


def answer(weight: Any, slots: int, groups: int, nodes: int, ranks: int) -> Arrays:
    maps = eplb.rebalance_experts(weight, slots, groups, nodes, ranks)
    assert [(m.dtype, m.device.type) for m in maps] == [(torch.int64, "cpu")] * 3
    phy2log, log2phy, logcnt = (m.numpy() for m in maps)
    return phy2log, log2phy, logcnt


def rank_loads(load: npt.NDArray[np.float32], p2l: npt.NDArray[Any], ranks: int) -> npt.NDArray[np.float64]:
    count = np.stack([np.bincount(row, minlength=load.shape[1]) for row in p2l])
    unit = np.take_along_axis(load.astype(np.float64) / count, p2l.astype(np.int64), axis=1)
    return np.sort(np.sort(unit.reshape(len(load), ranks, -1), axis=2).sum(axis=2), axis=1)


def has_tie(load: npt.NDArray[np.float32], p2l: npt.NDArray[Any]) -> bool:
    """Do two experts of one layer have equal load for each replica? (Replicas of one expert always do.)"""
    unit = load / np.bincount(p2l, minlength=len(load)).astype(np.float32)
    return len(np.unique(unit)) < len(unit)


def slots_of(p2l_row: npt.NDArray[Any], experts: int) -> list[list[int]]:
    return [[slot for slot, held in enumerate(p2l_row.tolist()) if held == expert] for expert in range(experts)]


# ---- DeepSeek's own answers ------------------------------------------------------------------------------------------


def golden_cases() -> Iterator[tuple[str, npt.NDArray[np.float32], list[int], npt.NDArray[Any], npt.NDArray[Any]]]:
    with np.load(HERE / "golden_deepseek.npz") as file:
        for name in file["names"].tolist():
            yield name, *(file[f"{name}/{key}"] for key in ("expert_load", "args", "phy2log", "replica"))


def test_answers_equal_deepseeks_own() -> None:
    cases = 0
    for name, load, args, p2l, replica in golden_cases():
        phy2log, log2phy, logcnt = answer(torch.from_numpy(load), *map(int, args))
        assert np.array_equal(phy2log, p2l), name
        assert np.array_equal(logcnt, [np.bincount(row, minlength=load.shape[1]) for row in p2l]), name
        assert log2phy.shape == (*load.shape, logcnt.max()), name
        of_deepseek = np.full(log2phy.shape, -1)
        of_deepseek[np.arange(len(load))[:, None], p2l, replica] = np.arange(p2l.shape[1])
        if (
            int(args[0]) // int(args[2] if args[1] % args[2] == 0 else 1) <= 16
        ):  # few items: its sort keeps ties in order
            assert np.array_equal(log2phy, of_deepseek), name
        # Replicas of one expert tie, so which of them is which hangs on its sort.
        assert np.array_equal(np.sort(log2phy, axis=2), np.sort(of_deepseek, axis=2)), name
        cases += 1
    assert cases == 42


@pytest.mark.skipif(not WHOLE_FILE.exists(), reason="the file of 50 answers is not beside this checkout")
def test_all_fifty_answers_equal_deepseeks_own_but_for_exact_ties() -> None:
    with np.load(WHOLE_FILE) as file:
        names = file["names"].tolist()
        assert len(names) == 50
        for name in names:
            load, args = file[f"{name}/expert_load"], file[f"{name}/args"].tolist()
            p2l, l2p = file[f"{name}/phy2log"], file[f"{name}/log2phy"]
            phy2log, log2phy, logcnt = answer(torch.from_numpy(load), *args)
            assert np.array_equal(logcnt, file[f"{name}/logcnt"]), name
            assert log2phy.shape == l2p.shape, name
            for layer in range(len(load)):
                if np.array_equal(phy2log[layer], p2l[layer]):
                    assert np.array_equal(np.sort(log2phy[layer], axis=1), np.sort(l2p[layer], axis=1)), name
                else:
                    assert has_tie(load[layer], phy2log[layer]), (name, layer)
            assert np.array_equal(rank_loads(load, phy2log, args[3]), rank_loads(load, p2l, args[3])), name


@pytest.mark.skipif(platform.machine() != "x86_64", reason="torch sums in another order on other machines")
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 31, 32, 33, 64, 100, 511, 513, 1000, 9000, 33000])
def test_group_sums_round_as_torch_rounds(size: int) -> None:
    values = np.exp(np.random.default_rng(size).normal(0, 3, (5, 2, size))).astype(np.float32)
    expected = torch.from_numpy(values).sum(-1).numpy()
    partial = np.empty((4, 32), np.float32)
    assert [[deepseek._group_sum(v, partial) for v in pair] for pair in values] == expected.tolist()


# ---- an oracle from the definition -----------------------------------------------------------------------------------


def pack(loads: list[np.float32], packs: int) -> tuple[list[int], list[int]]:
    capacity = len(loads) // packs
    if capacity == 1:
        return list(range(packs)), [0] * packs
    pack_of, place_of = [-1] * len(loads), [-1] * len(loads)
    total, held = [np.float32(0)] * packs, [0] * packs
    for item in sorted(range(len(loads)), key=lambda i: (-loads[i], i)):
        pack = min((p for p in range(packs) if held[p] < capacity), key=lambda p: (total[p], p))
        pack_of[item], place_of[item] = pack, held[pack]
        total[pack] = total[pack] + loads[item]
        held[pack] += 1
    return pack_of, place_of


def oracle(load: npt.NDArray[np.float32], slots: int, groups: int, nodes: int, ranks: int) -> list[list[int]]:
    """`phy2log` and for each slot its replica number, of one layer."""
    if groups % nodes:
        groups = nodes = 1
    size, per_node, per_rank = len(load) // groups, groups // nodes, slots // ranks
    node_of, place_of = pack([load[g * size : (g + 1) * size].sum() for g in range(groups)], nodes)
    p2l, replica = [-1] * slots, [-1] * slots
    for node in range(nodes):
        mine = sorted((g for g in range(groups) if node_of[g] == node), key=place_of.__getitem__)
        assert len(mine) == per_node
        items = [(g * size + i, 0) for g in mine for i in range(size)]
        experts = [e for e, _ in items]
        count = dict.fromkeys(experts, 1)
        while len(items) < slots // nodes:
            hottest = max(experts, key=lambda e: (load[e] / np.float32(count[e]), -experts.index(e)))
            items.append((hottest, count[hottest]))
            count[hottest] += 1
        rank_of, local_slot = pack([load[e] / np.float32(count[e]) for e, _ in items], ranks // nodes)
        for (expert, number), rank, place in zip(items, rank_of, local_slot, strict=True):
            slot = node * (slots // nodes) + rank * per_rank + place
            p2l[slot], replica[slot] = expert, number
    return [p2l, replica]


@st.composite
def problems(draw: st.DrawFn) -> tuple[npt.NDArray[np.float32], int, int, int, int]:
    nodes = draw(st.integers(1, 3))
    groups = nodes * draw(st.integers(1, 3)) if draw(st.booleans()) else draw(st.integers(1, 4))
    ranks = nodes * draw(st.integers(1, 4))
    experts = groups * draw(st.integers(1, 6))
    slots = ranks * draw(st.integers(-(-experts // ranks), -(-experts // ranks) + 3))
    layers = draw(st.integers(0, 3))
    top = draw(st.sampled_from([1, 3, 1000]))  # small tops make ties, and whole numbers make exact sums
    load = draw(hnp.arrays(np.float32, (layers, experts), elements=st.integers(0, top)))
    return load, slots, groups, nodes, ranks


@given(problems())
@example((np.array([[1, 1, 3, 3]], dtype=np.float32), 6, 2, 1, 2))  # with one node too, the heavier group comes first
@settings(max_examples=150)
@example((np.arange(1, 11, dtype=np.float32)[None], 15, 1, 1, 3))
@example((np.zeros((0, 8), dtype=np.float32), 12, 2, 2, 4))
def test_answers_equal_the_definition(problem: tuple[npt.NDArray[np.float32], int, int, int, int]) -> None:
    """FAULTS A7 and A21 too: only the ranks must divide the slots, and there may be no layers."""
    load, *numbers = problem
    phy2log, log2phy, logcnt = answer(torch.from_numpy(load), *numbers)
    assert phy2log.shape == (len(load), numbers[0])
    for layer, row in enumerate(load):
        p2l, replica = oracle(row, *numbers)
        assert phy2log[layer].tolist() == p2l
        for expert in range(load.shape[1]):
            slots = sorted((s for s in range(len(p2l)) if p2l[s] == expert), key=replica.__getitem__)
            assert logcnt[layer, expert] == len(slots)
            assert log2phy[layer, expert].tolist() == slots + [-1] * (log2phy.shape[2] - len(slots))
    assert log2phy.shape[2] == logcnt.max(initial=1)


@given(problems(), st.sampled_from([0.25, 2.0, 1024.0]))
@settings(max_examples=40)
def test_scaling_by_powers_of_two_changes_nothing(
    problem: tuple[npt.NDArray[np.float32], int, int, int, int], scale: float
) -> None:
    load, *numbers = problem
    one, other = answer(load, *numbers), answer(load * np.float32(scale), *numbers)
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


# ---- examples --------------------------------------------------------------------------------------------------------

README_ROW = [[20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]]


def test_exact_ties_go_to_the_lowest_index_first() -> None:
    """FAULTS A3: half of expert 8 (172 / 2) ties with expert 9 (86); the answer is a stable sort's."""
    phy2log, _, _ = answer(README_ROW, 16, 4, 2, 8)
    assert phy2log.tolist() == [[7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1]]


def test_hierarchical_and_global_balance_differ_as_deepseeks_do() -> None:
    """FAULTS A9: the same loads reach max / mean 1.2422 with replicas fixed per node, 1.1903 without."""
    for (groups, nodes), expected in (((4, 2), 1.2422), ((1, 1), 1.1903)):
        phy2log, _, _ = answer(README_ROW, 16, groups, nodes, 8)
        load = rank_loads(np.array(README_ROW, np.float32), phy2log, 8)
        assert load.max() / load.mean() == pytest.approx(expected, abs=5e-5)


def test_groups_that_do_not_divide_over_nodes_get_the_global_policy() -> None:
    """FAULTS A4: 4 groups on 3 nodes are answered as 1 group on 1 node, groups and nodes then being of no account."""
    load = [[9, 8, 7, 6, 5, 4, 3, 2]]
    flat = answer(load, 12, 1, 1, 6)
    for groups, nodes in ((4, 3), (3, 2), (5, 4)):  # not even 3 into 8 experts, or 4 into 6 ranks
        assert all(np.array_equal(a, b) for a, b in zip(answer(load, 12, groups, nodes, 6), flat, strict=True))


def test_global_policy_packs() -> None:
    """FAULTS A8: the heaviest rank gets 11 of [10, 9, 2, 1], not 19."""
    phy2log, _, _ = answer([[10, 9, 2, 1]], 4, 1, 1, 2)
    assert phy2log.tolist() == [[0, 3, 1, 2]]


def test_pairs_on_a_rank_are_deepseeks() -> None:
    """FAULTS A1: rank 3 holds expert 6 twice, since this is DeepSeek's answer; `place` gives a better one."""
    phy2log, log2phy, _ = answer([[1, 2, 3, 4, 5, 6, 7, 8]], 12, 1, 1, 4)
    assert phy2log[0, 9:].tolist() == [6, 6, 0]
    assert log2phy[0, 6].tolist() == [9, 10]


def test_layer_without_load_is_answered_as_deepseek_does() -> None:
    """FAULTS A13: every spare replica goes to expert 0; it is `place` that keeps what is there."""
    phy2log, _, _ = answer(np.zeros((1, 8)), 12, 1, 1, 4)
    assert phy2log.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("load", "slots", "ranks", "expected"),
    [
        ([[3.0]], 4, 4, [[0, 0, 0, 0]]),
        ([[1, 5, 3, 2]], 4, 2, [[1, 0, 2, 3]]),
        ([[100, 1, 1, 1]], 8, 8, [[0, 1, 2, 3, 0, 0, 0, 0]]),
    ],
)
def test_smallest_shapes(load: Any, slots: int, ranks: int, expected: list[list[int]]) -> None:
    """FAULTS A21: one expert, as many slots as experts, one slot a rank."""
    assert answer(load, slots, 1, 1, ranks)[0].tolist() == expected


@given(problems())
@settings(max_examples=30)
def test_answers_make_valid_layouts(problem: tuple[npt.NDArray[np.float32], int, int, int, int]) -> None:
    """FAULTS B15: every expert has a slot, and the layout's own inverse agrees."""
    load, *numbers = problem
    phy2log, log2phy, logcnt = answer(load, *numbers)
    layout = eplb.ExpertLayout(phy2log, load.shape[1], topology=eplb.Topology(num_ranks=numbers[3]))
    assert np.array_equal(layout.replica_count, logcnt)
    for layer in range(len(load)):
        for expert, slots in enumerate(slots_of(phy2log[layer], load.shape[1])):
            assert sorted(log2phy[layer, expert, : len(slots)].tolist()) == slots


# ---- what may be handed over -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8])
def test_every_real_dtype_is_used_as_float32(dtype: torch.dtype) -> None:
    weight = torch.tensor(README_ROW).to(dtype)
    one, other = answer(weight, 16, 4, 2, 8), answer(weight.float().numpy(), 16, 4, 2, 8)
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_views_gradients_and_read_only_arrays_are_accepted_and_left_alone() -> None:
    base = np.array(README_ROW * 2, dtype=np.float32)
    base.flags.writeable = False
    expected = answer(base, 16, 4, 2, 8)
    columns = torch.tensor(base.T.copy(), requires_grad=True).T
    kept = columns.detach().clone()
    assert all(np.array_equal(a, b) for a, b in zip(answer(columns, 16, 4, 2, 8), expected, strict=True))
    assert torch.equal(columns.detach(), kept)


def test_all_arguments_may_be_named() -> None:
    maps = eplb.rebalance_experts(weight=torch.ones(1, 4), num_replicas=4, num_groups=1, num_nodes=1, num_gpus=2)
    assert [tuple(m.shape) for m in maps] == [(1, 4), (1, 4, 1), (1, 4)]


def test_negative_zero_is_zero() -> None:
    minus = answer(np.array([[-0.0, 0.0, 1.0, -0.0]]), 8, 2, 2, 2)
    plus = answer(np.array([[0.0, 0.0, 1.0, 0.0]]), 8, 2, 2, 2)
    assert all(np.array_equal(a, b) for a, b in zip(minus, plus, strict=True))


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((12, 2, 2, 3), r"`num_nodes` \(=2\) must divide `num_gpus` \(=3\) .*8 logical.*num_replicas=12.*num_groups=2"),
        ((12, 3, 3, 6), r"`num_groups` \(=3\) must divide the logical experts \(=8\)"),
        ((12, 1, 1, 5), r"`num_gpus` \(=5\) must divide `num_replicas` \(=12\)"),
        (
            (12, 3, 2, 5),
            r"`num_gpus` \(=5\) must divide `num_replicas` \(=12\) .*num_groups=3, num_nodes=2",
        ),  # global too
        ((6, 1, 1, 2), r"`num_replicas` \(=6\) must be at least 8"),
        ((12, 0, 1, 4), r"`num_groups` \(=0\) must be at least 1"),
        ((12, 1, 0, 4), r"`num_nodes` \(=0\) must be at least 1"),
        ((12, 1, 1, 0), r"`num_gpus` \(=0\) must be at least 1"),
    ],
)
def test_numbers_that_do_not_fit_raise_with_all_of_them(numbers: tuple[int, int, int, int], message: str) -> None:
    """FAULTS A4 and A21: DeepSeek's assertions have no text."""
    with pytest.raises(ValueError, match=message):
        eplb.rebalance_experts(np.ones((1, 8)), *numbers)


@pytest.mark.parametrize(("value", "word"), [(np.nan, "nan"), (np.inf, "inf"), (-1.0, "-1.0")])
@pytest.mark.parametrize("kind", [np.float32, np.float64, torch.tensor])
def test_load_that_is_no_count_raises_and_says_where(value: float, word: str, kind: Any) -> None:
    """FAULTS A14: DeepSeek gives 5 replicas to a NaN."""
    rows = np.arange(16.0).reshape(2, 8)
    rows[1, 3] = value
    with pytest.raises(ValueError, match=rf"`weight` \(={word}\) must be finite and not negative at layer 1, expert 3"):
        eplb.rebalance_experts(kind(rows), 12, 1, 1, 4)


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_load_beyond_float32_raises(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"`weight` \(=1e\+300\) must fit float32"):
        eplb.rebalance_experts(kind(np.array([[1.0, 1e300]])), 2, 1, 1, 1)


@pytest.mark.parametrize("shape", [(8,), (1, 2, 8), ()])
def test_wrong_shapes_raise(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"`weight` \(shape \[{', '.join(map(str, shape))}\]\) must be \[L, E\]"):
        eplb.rebalance_experts(torch.ones(shape), 12, 1, 1, 4)


def test_a_model_without_experts_raises() -> None:
    with pytest.raises(ValueError, match=r"must have one expert or more .*0 logical experts, num_replicas=4"):
        eplb.rebalance_experts(np.ones((1, 0)), 4, 1, 1, 4)


def test_what_is_no_real_number_raises() -> None:
    with pytest.raises(TypeError, match=r"`weight` \(dtype torch.complex64\)"):
        eplb.rebalance_experts(torch.ones(1, 4, dtype=torch.complex64), 4, 1, 1, 4)
    with pytest.raises(TypeError, match=r"`weight` \(dtype <U1\)"):
        eplb.rebalance_experts(np.array([["a", "b"]]), 4, 1, 1, 4)
    with pytest.raises(TypeError, match=r"`num_gpus` \(=4.0\) must be an integer"):
        eplb.rebalance_experts(torch.ones(1, 4), 4, 1, 1, 4.0)  # type: ignore[arg-type]


# ---- counts that float32 does not hold -------------------------------------------------------------------------------


def test_counts_above_two_to_the_24_keep_their_bits() -> None:
    """FA13: in float32 the first two tie, and the first got the second replica."""
    load = [[2**24, 2**24 + 1, 1, 1]]
    for weight in (load, torch.tensor(load), np.array(load, dtype=np.uint64), torch.tensor(load).double()):
        p2l, l2p, count = eplb.rebalance_experts(weight, 5, 1, 1, 5)
        assert count.tolist() == [[1, 2, 1, 1]]
        assert p2l.tolist() == [[0, 1, 2, 3, 1]]
        assert l2p.tolist() == [[[0, -1], [1, 4], [2, -1], [3, -1]]]
        assert eplb.rebalance_experts(weight, 5, 1, 1, 5, float32=True)[2].tolist() == [[2, 1, 1, 1]]
    fractions = torch.tensor(load).double() - 0.25
    assert eplb.rebalance_experts(fractions, 5, 1, 1, 5)[2].tolist() == [[2, 1, 1, 1]]


@given(st.integers(0, 2**32), st.sampled_from([(8, 2, 2, 4), (1, 1, 1, 4), (4, 4, 2, 4), (2, 1, 1, 2)]))
@settings(max_examples=60)
def test_large_counts_are_placed_as_small_ones_are(seed: int, shape: tuple[int, int, int, int]) -> None:
    """Loads whose shares float32 holds exactly: times an odd number they lose bits there, and none here."""
    groups, nodes, _, ranks = shape
    rng = np.random.default_rng(seed)
    load = rng.integers(0, 4, (3, 16)) * 840  # up to eight replicas share without a rest
    expected = eplb.rebalance_experts(load, 24, groups, nodes, ranks)
    if int(expected[2].max()) > 8:
        return
    large = load * (2**30 + 1)
    exact = eplb.rebalance_experts(large, 24, groups, nodes, ranks)
    assert all(torch.equal(a, b) for a, b in zip(exact, expected, strict=True))


def test_counts_beyond_float64_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`weight` \(=9007199254740993\) must be at most 2\^53"):
        eplb.rebalance_experts([[2**53 + 1, 1]], 2, 1, 1, 2)
    with pytest.raises(ValueError, match=r"`weight` \(=-1.0\) must be finite and not negative at layer 0, expert 1"):
        eplb.rebalance_experts([[2**24 + 1, -1]], 2, 1, 1, 2)
