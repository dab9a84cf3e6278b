from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from eplb_core import ExpertLayout, ExpertStore, Topology
from eplb_core.loading.store import check_stores

DTYPES = [
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
    torch.uint8,
    torch.int32,
    torch.float32,
    torch.bool,
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_the_bytes_of_the_slots_in_any_dtype(dtype: torch.dtype) -> None:
    weights = torch.arange(3 * 5 * 4).reshape(3, 5, 4).to(torch.uint8).view(torch.uint8)
    tensor = (weights % 2).bool() if dtype == torch.bool else weights.view(dtype)
    store = ExpertStore({"w": tensor})
    for slot in range(3):
        assert store.row("w", slot).tolist() == tensor[slot].contiguous().view(torch.uint8).reshape(-1).tolist()
        assert store.row("w", slot).data_ptr() == store.addresses[slot, 0]
    assert store.slot_bytes == store.row_bytes.sum() == 20


def test_writing_a_row_writes_the_engine_tensor_in_place() -> None:
    """D12: the engine's graphs keep their addresses."""
    weights = nn.Parameter(torch.zeros(2, 3))
    store = ExpertStore({"w": weights})
    address = weights.data_ptr()
    store.row("w", 1).copy_(torch.full((3,), 2.5).view(torch.uint8))
    assert weights.tolist() == [[0, 0, 0], [2.5, 2.5, 2.5]]
    assert weights.data_ptr() == address == store.addresses[0, 0]


def contiguous_strides(sizes: list[int]) -> tuple[int, ...]:
    return torch.empty(sizes, device="meta").stride()


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=0, max_size=3),
    slots=st.integers(1, 3),
    gap=st.integers(0, 3),
    data=st.data(),
)
def test_any_permuted_row_at_any_distance_is_one_span(
    sizes: list[int], slots: int, gap: int, data: st.DataObject
) -> None:
    """The bytes of a row are its memory, whatever order its dimensions have."""
    elements = 1
    for size in sizes:
        elements *= size
    flat = torch.arange(slots * (elements + gap), dtype=torch.int16).reshape(slots, elements + gap)
    order = data.draw(st.permutations(range(len(sizes))))
    tensor = flat.as_strided([slots, *sizes], [elements + gap, *contiguous_strides(sizes)]) if sizes else flat[:, 0]
    tensor = tensor.permute(0, *[1 + axis for axis in order])
    store = ExpertStore({"w": tensor})
    for slot in range(slots):
        assert store.row("w", slot).view(torch.int16).tolist() == flat[slot, :elements].tolist()


def test_a_list_of_slot_tensors_is_a_tensor() -> None:
    rows = [torch.full((2, 2), float(slot)) for slot in range(3)]
    store = ExpertStore({"w": rows, "scale": torch.ones(3)})
    assert store.num_slots == 3
    assert [store.row("w", slot).data_ptr() for slot in range(3)] == [row.data_ptr() for row in rows]


REPEATED = torch.zeros(1, 4)
GOOD = torch.zeros(3, 4)
SIX = torch.zeros(6, 4)


@pytest.mark.parametrize(
    ("tensors", "whole", "error", "text"),
    [
        ({}, None, ValueError, "at least one tensor"),
        ({"w": REPEATED.expand(3, 4)}, None, ValueError, r"'w' repeats one row \(stride 0\)"),
        ({"w": torch.zeros(3, 1).expand(3, 4)}, None, ValueError, "'w' repeats elements within slot 0"),
        ({"w": torch.zeros(3, 8)[:, ::2]}, None, ValueError, "'w' has holes within slot 0"),
        ({"w": torch.zeros(6).as_strided((3, 4), (1, 1))}, None, ValueError, "'w' slot 0 and tensor 'w' slot 1 share"),
        ({"w": GOOD, "view": GOOD[:, :2]}, None, ValueError, "'w' slot 0 and tensor 'view' slot 0 share bytes; 2 more"),
        ({"w": SIX[:3]}, {"all": SIX}, ValueError, "'w' slot 0 and whole tensor 'all' row 0 share bytes; 2 more"),
        ({"w": [REPEATED[0]] * 3}, None, ValueError, "'w' slot 0 and tensor 'w' slot 1 share bytes; 1 more"),
        ({"w": [torch.zeros(2), torch.zeros(3)]}, None, ValueError, r"float32 \[3\] at slot 1 and .* \[2\] at slot 0"),
        ({"w": GOOD, "scale": torch.zeros(4)}, None, ValueError, "'scale' has 4 slots and 'w' has 3"),
        ({"w": GOOD}, {"a": torch.zeros(6), "b": torch.zeros(9)}, ValueError, "'b' has 9 rows and 'a' has 6"),
        ({"w": GOOD}, {"a": torch.zeros(2)}, ValueError, "'a' has 2 rows and this rank alone 3 slots"),
        ({"w": GOOD}, {"w": torch.zeros(6)}, ValueError, "`whole` names 'w', which `tensors` has too"),
        ({"w": torch.tensor(1.0)}, None, ValueError, r"'w' \(shape \[\]\) must have a row"),
        ({"w": torch.zeros(3, 0)}, None, ValueError, "'w' holds no bytes"),
        ({"w": torch.zeros(3, 2, device="meta")}, None, ValueError, "'w' is on the meta device"),
        ({"w": 3}, None, TypeError, r"'w' \(=int\) must be a tensor or a list"),
        ({"w": []}, None, TypeError, r"'w' \(=list\) must be a tensor or a list"),
    ],
)
def test_what_cannot_move_is_refused_by_name(
    tensors: dict[str, Any], whole: dict[str, Any] | None, error: type[Exception], text: str
) -> None:
    """E2, E4: at registration, not at the first move."""
    with pytest.raises(error, match=text):
        ExpertStore(tensors, whole)


def test_a_row_that_does_not_exist_raises() -> None:
    store = ExpertStore({"w": GOOD}, whole={"alpha": torch.arange(6.0)})
    assert store.row("alpha", 5).view(torch.float32).item() == 5
    for slot in (-1, 3):
        with pytest.raises(IndexError, match=rf"`slot` \(={slot}\) must be in \[0, 3\) of tensor 'w'"):
            store.row("w", slot)
    with pytest.raises(KeyError, match="w2"):
        store.row("w2", 0)
    assert repr(store) == "ExpertStore(w: 3 slots of 16 bytes on cpu)"


# ---- against a layout, and each other --------------------------------------------------------------------------------


def test_counts_derive_from_the_map_and_others_are_refused() -> None:
    """B4, D5: 16 ranks of 17 slots, allocated without the redundant ones."""
    layout = ExpertLayout.trivial(1, 256, num_slots=272, topology=Topology(num_ranks=16))
    with pytest.raises(ValueError, match="'w' has 16 slots and the layout 17 per rank"):
        ExpertStore({"w": torch.zeros(16, 2)}).check_fits(layout)
    ExpertStore({"w": torch.zeros(17, 2)}, whole={"s": torch.zeros(272)}).check_fits(layout)
    with pytest.raises(ValueError, match="'s' has 17 rows and the layout 272 slots"):
        ExpertStore({"w": torch.zeros(17, 2)}, whole={"s": torch.zeros(17)}).check_fits(layout)


def test_layers_must_keep_the_same_tensors() -> None:
    first = ExpertStore({"w13": GOOD, "scale": torch.ones(3)})
    for tensors, said in [
        ({"w13": GOOD}, "layer 1 lacks 'scale', which layer 0 has"),
        ({"scale": torch.ones(3), "w13": GOOD}, "layer 1 has tensors scale, w13 and layer 0 has w13, scale"),
        ({"w13": torch.zeros(4, 4), "scale": torch.ones(4)}, "layer 1 has 4 slots on cpu and layer 0 has 3"),
    ]:
        with pytest.raises(ValueError, match=said):
            check_stores([first, ExpertStore(tensors)])
    with pytest.raises(TypeError, match=r"`stores` \(=dict\) must be ExpertStores at layer 1"):
        check_stores([first, {"w13": GOOD}])  # type: ignore[list-item]
    check_stores([first, first])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_of_two_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="'scale' is on cpu and 'w' on cuda:0"):
        ExpertStore({"w": torch.zeros(3, 2, device="cuda"), "scale": torch.zeros(3)})
