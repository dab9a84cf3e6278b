from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core import ExpertLayout, Topology, static_dispatch_table
from eplb_core.dispatch.static import _draw_sample, _fair_choice, _fair_choices, _Filler
from tests.cases import PAIR, layouts, random_layout

GOLDEN = np.load(Path(__file__).parent / "data" / "sglang_static_tables.npz")


@pytest.mark.parametrize("name", GOLDEN["names"].tolist())
@pytest.mark.parametrize("candidates", ["all", "narrowed"])
def test_static_tables_are_sglangs_bit_for_bit(name: str, candidates: str) -> None:
    experts, ranks, nodes = (int(n) for n in GOLDEN[f"{name}/args"])
    layout = ExpertLayout(GOLDEN[f"{name}/physical_to_logical_map"], experts, topology=Topology(ranks, nodes))
    key = "static_dispatch_table" if candidates == "all" else "static_dispatch_table_narrowed"
    table = static_dispatch_table(layout, candidates=candidates)  # type: ignore[arg-type]
    np.testing.assert_array_equal(table, GOLDEN[f"{name}/{key}"])
    assert table.dtype == np.int64


def plain_static_table(layout: ExpertLayout, seed: int, same_node: bool) -> list[list[list[int]]]:
    """The rule in plain Python with the standard library's generator."""
    topology, per_rank = layout.topology, layout.slots_per_rank
    generator = random.Random(seed)
    table = [[[-1] * layout.num_experts for _ in range(layout.num_layers)] for _ in range(topology.num_ranks)]
    for layer in range(layout.num_layers):
        for expert in range(layout.num_experts):
            slots = list(layout.slots(layer, expert))
            left = []
            for rank in range(topology.num_ranks):
                node = topology.rank_to_node[rank]
                own = [s for s in slots if s // per_rank == rank]
                near = [s for s in slots if topology.rank_to_node[s // per_rank] == node]
                if len(slots) == 1:
                    table[rank][layer][expert] = slots[0]
                elif own:
                    table[rank][layer][expert] = own[0]
                elif same_node and 0 < len(near) < len(slots):
                    table[rank][layer][expert] = near[0]
                else:
                    left.append(rank)
            if left:
                picks = slots * (len(left) // len(slots)) + generator.sample(slots, len(left) % len(slots))
                generator.shuffle(picks)
                for rank, pick in zip(left, picks, strict=True):
                    table[rank][layer][expert] = pick
    return table


@given(layouts(num_ranks=(1, 8)), st.integers(0, 2**70), st.booleans())
@settings(max_examples=60)
def test_static_table_follows_the_standard_librarys_draws(layout: ExpertLayout, seed: int, same_node: bool) -> None:
    state = random.getstate()
    table = static_dispatch_table(layout, seed=seed, prefer_same_node=same_node)
    assert random.getstate() == state
    assert table.tolist() == plain_static_table(layout, seed, same_node)


def test_many_replicas_take_the_rejecting_way_of_sampling() -> None:
    row = np.zeros(100, dtype=np.int64)
    row[7] = 1
    layout = ExpertLayout([row], num_experts=2, topology=Topology(rank_to_node=[0] * 4))
    for ranks in (7, 29):  # 3 or 25 ranks without a slot draw among 99: of so many, 3 are drawn with rejection
        wide = layout.resized(Topology(num_ranks=ranks))
        for seed in range(8):
            assert static_dispatch_table(wide, seed=seed).tolist() == plain_static_table(wide, seed, True)


def test_static_table_of_no_layers_is_empty() -> None:
    layout = ExpertLayout(np.zeros((0, 6), dtype=np.int64), num_experts=4, topology=Topology(num_ranks=2))
    assert static_dispatch_table(layout).shape == (2, 0, 4)


def test_narrowed_first_ranks_draw_for_themselves() -> None:
    layout = random_layout(nodes=1)
    assert (static_dispatch_table(layout) != static_dispatch_table(layout, candidates="narrowed")).any()


def test_bad_arguments_of_static_tables_are_named() -> None:
    with pytest.raises(ValueError, match="`candidates` \\(='some'\\) must be 'all' or 'narrowed'"):
        static_dispatch_table(PAIR, candidates="some")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`seed` \\(=-1\\) must be at least 0"):
        static_dispatch_table(PAIR, seed=-1)


@pytest.mark.parametrize("narrowed", [False, True])
def test_words_that_run_out_are_drawn_anew_and_more_of_them(narrowed: bool) -> None:
    """Wherever in a layer that happens, in a sample of few or of many, or in a shuffle."""
    rows = [np.r_[np.arange(6), 0, 0, 1, 1, 1, 1, np.full(28, 2)]]
    layout = ExpertLayout(rows, num_experts=6, topology=Topology(8, 2))
    filler, table, expected = _Filler(layout, 42, 1, False), *np.zeros((2, 8, 1, 6), dtype=np.int64)
    few = filler._draw_words(1)
    for start in range(624 - 60, 625):
        filler(layout.physical_to_logical_map, expected, narrowed=narrowed, start=start)
        filler.words, whole = few, filler.words
        filler(layout.physical_to_logical_map, table, narrowed=narrowed, start=start)
        filler.words = whole
        np.testing.assert_array_equal(table, expected)


def test_numbers_that_were_drawn_are_drawn_again_and_words_that_run_out_are_told() -> None:
    """As `random.sample` does where a list of all is too long; the caller then makes more words."""
    pool, sample, swaps, picked = (np.zeros(32, dtype=np.int64) for _ in range(4))
    words = np.array([5, 5, 7]) << 26
    assert _draw_sample(words, 0, 32, 2, pool, sample) == 3
    assert sample[:2].tolist() == [5, 7]
    assert _draw_sample(words[:2], 0, 32, 2, pool, sample) == -1
    assert _fair_choices(words[:0], 0, 4, 5, sample, swaps, picked) == -1
    assert _fair_choice(words[:0], 0, 4, 5, 1, sample, swaps, picked) == -1
