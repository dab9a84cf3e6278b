"""Layouts for the self-test of an engine."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given

from eplb_core import DispatchTables, ExpertLayout, LayoutError, LoadCounter, Topology, topk_to_slots
from eplb_core.testing.layouts import shifted_layout
from tests.cases import layouts


@given(layouts())
def test_no_slot_holds_what_it_held_and_neighboring_layers_differ(layout: ExpertLayout) -> None:
    if layout.num_experts < 2:
        with pytest.raises(LayoutError, match=r"num_experts=1"):
            shifted_layout(layout)
        return
    shifted = shifted_layout(layout)
    before, after = layout.physical_to_logical_map, shifted.physical_to_logical_map
    assert shifted.topology == layout.topology
    assert ((before < 0) == (after < 0)).all()
    assert (before[before >= 0] != after[before >= 0]).all()
    shifts = [
        int((a - b)[b >= 0][0]) % layout.num_experts for a, b in zip(after, before, strict=True) if (b >= 0).any()
    ]
    if layout.num_experts > 2:
        assert all(one != other for one, other in itertools.pairwise(shifts))


def test_a_path_that_forgets_the_mapping_is_wrong_from_the_first_token_and_its_layer_counts_nothing() -> None:
    """FAULTS C13: with the layout that engines start with it is right until the first migration."""
    start = ExpertLayout.trivial(2, 4, num_slots=4, topology=Topology(2))
    ids = torch.tensor([[0, 3], [1, 2]], dtype=torch.int32)
    for layout, seen in ((start, False), (shifted_layout(start), True)):
        load = LoadCounter(2, 4)
        tables = DispatchTables(layout, load=load)
        first = topk_to_slots(ids, tables.layer(0))
        forgotten = ids  # the second layer's branch sends experts where slots are meant
        held = [torch.tensor(row) for row in layout.physical_to_logical_map]
        assert held[0][first.long()].equal(ids.long())
        assert (not held[1][forgotten.long()].equal(ids.long())) == seen
        load.roll()
        assert (load.snapshot().numpy().sum((0, 2)) > 0).tolist() == [True, False]
