"""What arrays are taken for; tests/fuzz/test_contents.py has them cut, cast, turned and joined."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from eplb_core import ExpertLayout, TokenTrace, Topology, Trace
from eplb_core.contents import contents_of, kind_by_name
from eplb_core.load import count_topk
from eplb_core.simulation import TraceStream

Array = npt.NDArray[Any]
RNG = np.random.default_rng(0)
IDS: Array = np.argsort(RNG.gumbel(size=(256, 4, 32)) + RNG.normal(size=(4, 32)), axis=2)[:, :, :6]
LOAD: Array = np.stack([count_topk(window, 32) for window in IDS.reshape(16, 16, 4, 6)])


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "i8", "f4", "f8"])
def test_top_k_ids_are_known_by_rows_that_repeat_nothing(dtype: str) -> None:
    for ids in (IDS, IDS[:16], IDS[:64, :1], np.sort(IDS, axis=2), IDS.transpose(1, 0, 2)):
        assert contents_of(ids.astype(dtype))[:1] == ("tokens",)
        with pytest.raises(ValueError, match=r"top-k ids \[.*TokenTrace\(topk_ids, .*Trace\(load, holds=\"load\"\)"):
            Trace(ids.astype(dtype))


def test_padded_ids_are_ids() -> None:
    padded = IDS.copy()
    padded[200:] = -1
    assert contents_of(padded).kind == "tokens"


def test_the_unused_rest_of_a_buffer_hides_no_ids() -> None:
    """It was taken for a load once a token in a hundred was 0 throughout, and counted as tokens of expert 0."""
    buffer = IDS.copy()
    buffer[150:] = 0
    assert contents_of(buffer).kind == "tokens"
    assert contents_of(buffer[:, 0]).kind == "tokens"
    with pytest.raises(ValueError, match=r"41% of the rows are all 0.*-1"):
        TokenTrace(buffer, num_experts=32, window_tokens=64)
    assert contents_of(np.concatenate([LOAD, np.zeros_like(LOAD)])).kind == "load"
    assert contents_of(np.zeros((4, 3, 8), int)).kind == "load"


def test_weights_and_scaled_shares_are_no_load() -> None:
    """A router that scales its top-k weights to 2.5, shares of a mean expert; in memory, too, where none was told."""
    weights = RNG.random((256, 16, 8))
    weights *= 2.5 / weights.sum(axis=2, keepdims=True)
    shares = LOAD / LOAD.mean(axis=2, keepdims=True)
    for array in (weights, weights.astype("f4"), shares, shares / 32):
        assert contents_of(array)[::2] == ("other", False)
    for array in (weights, np.tile(shares, (4, 1, 1))):
        with pytest.raises(ValueError, match="adds up to"):
            Trace(array)
        assert Trace(array, holds="load").load.tolist() == array.tolist()
    assert contents_of(LOAD / 2.0)[::2] == ("load", True)


def test_counts_are_known_by_equal_totals() -> None:
    for load in (LOAD, LOAD[0], LOAD[:, :1], LOAD[:3] * 0.5, LOAD.astype("u1")):
        assert contents_of(load)[::2] == ("load", True)
    assert Trace(LOAD).load.tolist() == LOAD.tolist()


def test_one_token_a_window_is_a_load_of_ones() -> None:
    load = np.stack([count_topk(ids[None], 32) for ids in IDS])
    assert contents_of(load).kind == "load"
    assert contents_of(load[0]).kind == "load"


def test_counts_that_were_never_reset_are_no_load_of_windows() -> None:
    summed = LOAD.cumsum(axis=0)
    for array in (summed, summed[3:9], summed.astype("f8")):
        assert contents_of(array)[::2] == ("other", False)
    assert contents_of(summed, "expert_load").kind == "load"
    for three in (summed[:3], summed[9:12], LOAD[[0, 3, 5]].cumsum(axis=0)):
        assert contents_of(three)[::2] == ("other", False)
    grown = np.stack([LOAD[:1].sum(axis=0), LOAD[:6].sum(axis=0), LOAD.sum(axis=0) * 9])  # traffic may grow so
    assert contents_of(grown).kind == contents_of(summed[:2]).kind == "load"
    assert (np.diff(summed, axis=0) == LOAD[1:]).all()
    with pytest.raises(ValueError, match=r"numpy\.diff"):
        Trace(np.tile(summed, (1, 4, 4)))


def test_totals_beside_what_they_add_up_are_no_load() -> None:
    """As a pivot table has them: an expert, a layer or a window too many."""
    for axis in range(3):
        total = LOAD.sum(axis=axis, keepdims=True)
        for array in (np.concatenate([LOAD, total], axis=axis), np.concatenate([total, LOAD], axis=axis)):
            assert contents_of(array)[::2] == ("other", False)
    with pytest.raises(ValueError, match="its last expert is the sum of the others"):
        Trace(np.tile(np.append(LOAD, LOAD.sum(axis=2, keepdims=True), axis=2), (1, 4, 1)))
    assert "mean" in contents_of(np.concatenate([LOAD, LOAD.mean(axis=0, keepdims=True)])).why
    for load in (LOAD, np.repeat(LOAD[:1], 5, axis=0), np.zeros_like(LOAD)):
        assert contents_of(load).kind == "load"


def test_a_mask_is_no_load() -> None:
    mask = RNG.integers(0, 2, (16, 4, 32))
    for array in (mask, mask[0], mask.astype("f4")):
        assert contents_of(array)[::2] == ("other", False)


def test_sorted_rows_are_doubted() -> None:
    assert "sorted" in contents_of(np.sort(LOAD, axis=2)).doubt
    assert "sorted" in contents_of(np.sort(LOAD, axis=2)[..., ::-1]).doubt
    assert contents_of(LOAD).doubt == ""


def test_counts_that_repeat_nothing_by_chance_are_a_load() -> None:
    """Few large numbers, or columns that are far apart: nothing would repeat in a row anyway."""
    for load in (np.arange(12).reshape(3, 4), np.tile([5, 3, 2, 1], (50, 1, 1)), RNG.integers(0, 9000, (4, 32, 8))):
        assert contents_of(load).kind == "load"


def test_a_row_or_two_that_count_up_may_be_a_load_made_by_hand() -> None:
    for load in (np.arange(32)[None], np.arange(1, 33)[None], np.arange(16) + np.arange(1, 3)[:, None]):
        assert Trace(load).load.tolist() == [load.tolist()]
        assert contents_of(load).kind in ("map", "tokens")


@pytest.mark.parametrize("more", [0, 4, 32])
def test_a_map_is_known_by_rows_that_hold_every_expert(more: int) -> None:
    layout = ExpertLayout.trivial(3, 32, num_slots=32 + more, topology=Topology(1))
    assert contents_of(layout.physical_to_logical_map).kind == "map"
    permuted = np.stack([np.random.default_rng(row).permutation(layout.physical_to_logical_map[0]) for row in range(3)])
    with pytest.raises(ValueError, match="ExpertLayout"):
        Trace(permuted)
    assert contents_of(layout.replica_count).kind == ("other" if more in (4,) else "load")


def test_percent_are_shares() -> None:
    found = contents_of(100.0 * LOAD / LOAD.sum(axis=2, keepdims=True))
    assert (found.kind, found.sure) == ("other", False)


def test_experts_that_take_all_tokens_or_none_are_a_load_of_one_layer() -> None:
    load = np.zeros((8, 1, 128), np.int64)
    load[:, 0, [3, 40, 7, 99]] = np.arange(100, 900, 100)[[3, 0, 5, 1, 7, 2, 6, 4]][:, None]
    assert contents_of(load).kind == "load"


def test_axes_in_another_order_are_known_by_totals_along_another_axis() -> None:
    uneven = LOAD * np.arange(1, 17)[:, None, None]
    for order in ((0, 2, 1), (2, 0, 1), (2, 1, 0), (1, 2, 0)):
        with pytest.raises(ValueError, match="no load"):
            Trace(uneven.transpose(order))
    assert contents_of(uneven.transpose(1, 0, 2))[::2] == ("other", False)
    assert "more alike" in contents_of(LOAD.transpose(1, 0, 2)).doubt


def test_tables_shares_and_absurd_shapes_are_no_load() -> None:
    names = np.indices(LOAD[:2].shape).reshape(3, -1)
    table = np.vstack([names, LOAD[:2].reshape(1, -1)]).T
    assert contents_of(table[:100]).kind == "other"
    with pytest.raises(ValueError, match="2,048 layers of 4 experts"):
        Trace(np.tile(table, (8, 1)))
    assert contents_of(LOAD / LOAD.sum(axis=2, keepdims=True)).kind == "other"
    assert contents_of(LOAD.reshape(2, 8, 4, 32)).kind == "other"
    assert contents_of(np.arange(200).reshape(200, 1) % 7).kind == "tokens"


def test_a_name_outweighs_signs_but_no_proof() -> None:
    share = LOAD / LOAD.sum(axis=2, keepdims=True)
    assert contents_of(share, "expert_load").kind == "load"
    assert "1" in contents_of(share, "expert_load").doubt
    assert contents_of(IDS, "expert_load").kind == "tokens"
    assert contents_of(LOAD, "topk_ids").kind == "tokens"


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("tokens", "topk_ids routed_experts prefill_topk decode_topk selected_experts expert_ids top_k_indices"),
        ("load", "load expert_load logical_count domain_load counts tokens_per_expert layer3/load"),
        ("map", "physical_to_logical_map phy2log last_physical_to_logical_map"),
        (
            "other",
            "logical_to_physical_map log2phy replica_count seq_lens router_logits global_physical_count topk_weights",
        ),
        (None, "a weight prefill_in4096 provenance"),
    ],
)
def test_names_say_what_an_array_holds(kind: str | None, names: str) -> None:
    assert {kind_by_name(name) for name in names.split()} == {kind}


def test_the_callers_word_counts() -> None:
    trace = Trace(IDS, holds="load")
    assert trace.load.shape == (256, 4, 6)
    assert sum(len(block.load) for block in TraceStream(lambda: IDS, holds="load").blocks(99)) == 256
    with pytest.raises(ValueError, match="top-k ids"):
        list(TraceStream(lambda: [IDS]).blocks(99))
    with pytest.raises(ValueError, match="`holds`"):
        Trace(LOAD, holds="tokens")


def test_ids_of_any_integers_are_tokens() -> None:
    expected = TokenTrace(IDS, num_experts=32, window_tokens=16).load
    assert expected.tolist() == LOAD.tolist()
    for dtype in ("u1", "i1", "u2"):
        assert TokenTrace(IDS.astype(dtype), num_experts=32, window_tokens=16).load.tolist() == LOAD.tolist()


def test_counts_are_no_tokens_and_neither_is_padding_that_wrapped() -> None:
    with pytest.raises(ValueError, match=r"% of the rows repeat an id.*Trace\(load\)"):
        TokenTrace(LOAD, num_experts=64, window_tokens=4)
    padded = IDS.copy()
    padded[200:] = -1
    with pytest.raises(ValueError, match=r"\(uint8\) has 255 twice"):
        TokenTrace(padded.astype(np.uint8), num_experts=256, window_tokens=16)


def test_masked_arrays_are_refused_and_frames_too() -> None:
    masked: Any = np.ma.masked_equal(LOAD, LOAD.max())
    with pytest.raises(TypeError, match=r"masked.*filled\(0\)"):
        Trace(masked)
    assert Trace(np.ma.masked_equal(LOAD, -5)).num_experts == 32
    pandas = pytest.importorskip("pandas", reason="frames of pandas")
    for frame in (pandas.DataFrame({"layer": [0, 1], "0": [3, 4]}), pandas.DataFrame(LOAD[0])):
        with pytest.raises(TypeError, match="frame with columns"):
            Trace(frame)
