"""Traces and trace files; what engines record is in tests/adapters."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import eplb_core
from eplb_core import ExpertLayout, Topology, load_layout
from eplb_core.errors import FileFormatError
from eplb_core.files.formats import demo_trace, is_layout_file, load_trace
from eplb_core.files.trace_file import save_trace
from eplb_core.load import count_topk
from eplb_core.trace import Trace


@given(
    load=hnp.arrays(st.sampled_from([np.int64, np.float64]), (2, 3, 4), elements=st.integers(0, 2**53)),
    names=st.lists(st.text(max_size=5), min_size=2, max_size=2),
)
def test_a_trace_comes_back_equal_to_the_last_bit(
    tmp_path_factory: pytest.TempPathFactory, load: np.ndarray[tuple[int, ...], np.dtype[np.int64]], names: list[str]
) -> None:
    path = tmp_path_factory.mktemp("trace") / "t.npz"
    before = Trace(load, tuple(names), (3, 4, 9), 2, "here", notes=("cut",))
    save_trace(before, path)
    after = load_trace(path)
    assert after.load.dtype == load.dtype
    assert after.load.tobytes() == load.tobytes()
    assert (after.windows, after.layer_ids, after.top_k) == (tuple(names), (3, 4, 9), 2)
    assert (after.source, after.notes, after.path) == ("here", ("cut",), str(path))
    assert (after.num_windows, after.num_layers, after.num_experts) == (2, 3, 4)


def test_a_trace_does_not_change_and_does_not_hold_the_callers_array() -> None:
    load = np.ones((1, 1, 2), dtype=np.int64)
    trace = Trace(load)
    load[:] = 7
    assert trace.load.tolist() == [[[1, 1]]]
    with pytest.raises(ValueError, match="read-only"):
        trace.load[0, 0, 0] = 3


def test_integers_stay_exact_beyond_float64() -> None:
    assert Trace(np.array([[2**53 + 1]])).load.tolist() == [[[2**53 + 1]]]


@pytest.mark.parametrize(
    ("load", "match"),
    [
        ([[[1.0, np.nan]]], "window 0, layer 0, expert 1"),
        ([[1, -1]], "layer 0, expert 1"),
        ([1, 2], r"shape \[2\]"),
        (np.empty((2, 2, 0)), "one expert or more"),
    ],
)
def test_what_is_no_load_raises(load: object, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Trace(load)  # type: ignore[arg-type]


def test_names_must_fit_the_windows() -> None:
    with pytest.raises(ValueError, match=r"windows.*1 entries.*2"):
        Trace(np.ones((2, 1, 1)), windows=("a",))
    with pytest.raises(ValueError, match=r"layer_ids.*3 entries.*1"):
        Trace(np.ones((2, 1, 1)), layer_ids=(1, 2, 3))


def test_repr_is_short() -> None:
    assert repr(Trace(np.ones((2, 3, 4)))) == "Trace(load=[2, 3, 4], source='')"


def test_saving_over_a_file_leaves_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    for value in (1, 2):
        save_trace(Trace(np.array([[value]])), path)
    assert load_trace(path).load.tolist() == [[[2]]]
    assert list(tmp_path.iterdir()) == [path]


def test_plain_arrays_are_read(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.asfortranarray(np.arange(12).reshape(3, 4)))
    assert load_trace(tmp_path / "a.npy").load.tolist() == np.arange(12).reshape(1, 3, 4).tolist()
    np.savez(tmp_path / "b.npz", load=np.ones((2, 3, 4), dtype=np.uint8), labels=np.array(["x", "y"]), topk=np.array(2))
    trace = load_trace(tmp_path / "b.npz")
    assert (trace.load.shape, str(trace.load.dtype), trace.top_k) == ((2, 3, 4), "int64", 2)


def test_several_arrays_of_one_shape_are_windows(tmp_path: Path) -> None:
    np.savez(tmp_path / "w.npz", prefill=np.ones((3, 4)), decode=np.zeros((3, 4)))
    trace = load_trace(tmp_path / "w.npz")
    assert trace.windows == ("prefill", "decode")
    assert trace.load[:, 0, 0].tolist() == [1, 0]
    assert "2 arrays" in trace.notes[0]


def test_the_key_chooses_among_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "k.npz", a=np.ones((3, 4)), b=np.ones((2, 3, 5)))
    with pytest.raises(FileFormatError, match=r"a \[3, 4\] float64; b \[2, 3, 5\].*--key"):
        load_trace(tmp_path / "k.npz")
    assert load_trace(tmp_path / "k.npz", key="b").num_experts == 5
    with pytest.raises(FileFormatError, match="an array `c`"):
        load_trace(tmp_path / "k.npz", key="c")


def test_json_with_logical_count_is_read(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"logical_count": [[1, 2], [3, 4]], "rank": 0}))
    assert load_trace(path).load.tolist() == [[[1, 2], [3, 4]]]


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2]",
        '{"logical_count": [[1, 2], [3]]}',
        '{"logical_count": [["a"]]}',
        '{"a": 1}',
        '{"logical_count": [[-1]]}',
        "[" * 5000,
        '{"logical_count": [[NaN]]}',
        '{"logical_count": [[1e999]]}',
        '{"logical_count": [[' + "9" * 40 + "]]}",
    ],
)
def test_foreign_json_is_refused_with_a_message(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=r"x\.json: expected .*, found .*; "):
        load_trace(path)


def test_how_to_save_counts_is_said_where_a_file_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "load.txt").write_text("some words\n")
    with pytest.raises(FileFormatError, match=r"found text content; save the counts by `numpy.save`, or as JSON"):
        load_trace(tmp_path / "load.txt")
    np.save(tmp_path / "flat.npy", np.ones(3))
    with pytest.raises(FileFormatError, match=r"found one array \[3\] float64; save the counts in one of these shapes"):
        load_trace(tmp_path / "flat.npy")
    np.savez(tmp_path / "two.npz", a=np.ones((1, 2, 3)), b=np.ones((1, 2, 3)))
    with pytest.raises(FileFormatError, match=r"name the array to take by `key` \(--key\)"):
        load_trace(tmp_path / "two.npz")


def test_another_version_of_the_trace_format_is_named(tmp_path: Path) -> None:
    path = tmp_path / "v.npz"
    np.savez(path, expert_load=np.ones((1, 1, 1)), facts=np.array(json.dumps({"format": "eplb-trace-9"})))
    with pytest.raises(FileFormatError, match="eplb-trace-1, found 'eplb-trace-9'"):
        load_trace(path)


@pytest.mark.parametrize(
    "facts", ['{"format": "eplb-trace-1", "windows": 3}', '{"format": "eplb-trace-1", "top_k": "a"}', "7"]
)
def test_facts_of_the_wrong_kind_are_refused(tmp_path: Path, facts: str) -> None:
    np.savez(tmp_path / "f.npz", expert_load=np.ones((1, 1, 1)), facts=np.array(facts))
    with pytest.raises(FileFormatError, match=r"f\.npz"):
        load_trace(tmp_path / "f.npz")


def test_the_demo_trace_is_the_recorded_stretch() -> None:
    trace = demo_trace()
    assert trace.load.shape == (112, 16, 128)
    assert (trace.load.sum(axis=2) == 8192 * 8).all()
    assert (trace.top_k, trace.faults, trace.format) == (8, (), "eplb-trace-1")


def test_public_names() -> None:
    assert (eplb_core.Trace, eplb_core.load_trace, eplb_core.save_trace) == (Trace, load_trace, save_trace)


# ---- what plain arrays are taken for ---------------------------------------------------------------------------------

IDS = np.argsort(np.random.default_rng(0).gumbel(size=(96, 3, 16)), axis=2)[:, :, :4]


@pytest.mark.parametrize("dtype", ["i2", "u1", "i8"])
def test_top_k_ids_in_a_file_are_counted_where_the_experts_are_given_and_else_refused(
    tmp_path: Path, dtype: str
) -> None:
    path = tmp_path / "routed.npy"
    np.save(path, IDS.astype(dtype))
    with pytest.raises(FileFormatError, match=r"num_experts=E, window_tokens=N\).*--experts E.*--holds load"):
        load_trace(path)
    trace = load_trace(path, num_experts=16, window_tokens=20)
    assert trace.load.tolist() == np.stack([count_topk(IDS[t * 20 : t * 20 + 20], 16) for t in range(4)]).tolist()
    assert (trace.top_k, trace.num_windows) == (4, 4)
    assert "the last 16 left out" in trace.notes[0]
    assert load_trace(path, num_experts=16).num_windows == 1
    assert load_trace(path, holds="load").load.shape == (96, 3, 4)
    for bad, match in (({"num_experts": 15}, "must be in"), ({"num_experts": 16, "window_tokens": 97}, "96 tokens")):
        with pytest.raises(FileFormatError, match=match):
            load_trace(path, **bad)  # type: ignore[arg-type]


def test_what_the_file_says_of_its_experts_is_enough(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", topk_ids=IDS, num_experts=np.array(20), seq_lens=np.ones((4, 4)))
    assert load_trace(tmp_path / "t.npz", key="topk_ids").num_experts == 20
    with pytest.raises(FileFormatError, match=r"topk_ids \[96, 3, 4\] int64 \(tokens\).*--key"):
        load_trace(tmp_path / "t.npz")


def test_one_layers_ids_and_ids_by_the_callers_word(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", IDS[:, 0])
    assert load_trace(tmp_path / "one.npy", num_experts=16).load.tolist() == [[count_topk(IDS[:, 0], 16).tolist()]]
    np.save(tmp_path / "few.npy", IDS[:2])
    assert load_trace(tmp_path / "few.npy", holds="tokens", num_experts=16).load.sum() == 2 * 3 * 4
    with pytest.raises(FileFormatError, match=r"16 experts, found 4 in the array.*--holds tokens"):
        load_trace(tmp_path / "few.npy", num_experts=16)


def test_a_load_says_why_it_is_taken_for_one(tmp_path: Path) -> None:
    load = count_topk(IDS, 16)
    np.savez(tmp_path / "a.npz", a=load)
    assert "equal totals" in load_trace(tmp_path / "a.npz").notes[0]
    np.savez(tmp_path / "b.npz", load=load[:, ::2])
    assert "; but layers' totals differ by up to" in load_trace(tmp_path / "b.npz").notes[0]


def test_bare_tensors_and_dicts_of_them_are_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save(torch.from_numpy(count_topk(IDS, 16)), tmp_path / "load.pt")
    assert load_trace(tmp_path / "load.pt").load.shape == (1, 3, 16)
    torch.save({"topk_ids": torch.from_numpy(IDS), "note": "x"}, tmp_path / "ids.pt")
    assert load_trace(tmp_path / "ids.pt", num_experts=16).top_k == 4
    with pytest.raises(FileFormatError, match="top-k ids"):
        load_trace(tmp_path / "ids.pt")


def test_a_map_and_a_load_are_not_taken_for_each_other(tmp_path: Path) -> None:
    layout = ExpertLayout.trivial(3, 16, num_slots=20, topology=Topology(2))
    np.save(tmp_path / "map.npy", layout.physical_to_logical_map)
    with pytest.raises(FileFormatError, match=r"load_layout\(path, topology\)"):
        load_trace(tmp_path / "map.npy")
    assert load_layout(tmp_path / "map.npy", Topology(2)) == layout
    assert is_layout_file(tmp_path / "map.npy")
    np.save(tmp_path / "sparse.npy", count_topk(IDS[:1, :, :1], 16))
    assert not is_layout_file(tmp_path / "sparse.npy")
    for name, array in (("sparse", count_topk(IDS[:1, :, :1], 16)), ("ids", IDS[:, 0])):
        np.save(tmp_path / f"{name}.npy", array)
        with pytest.raises(FileFormatError, match="an array `physical_to_logical_map`"):
            load_layout(tmp_path / f"{name}.npy", Topology(2))


def test_a_notebook_shows_what_was_read_and_the_most_uneven_layers() -> None:
    load = np.ones((3, 10, 4), dtype=np.int64)
    load[:, 4, 2] = 9
    shown = Trace(
        load, layer_ids=tuple(range(20, 30)), top_k=2, source="a <test>", notes=("`x` left out",)
    )._repr_html_()
    assert "3 windows, 10 layers, 4 experts, top 2" in shown
    assert "a &lt;test&gt;" in shown
    assert "<code>x</code> left out" in shown
    assert shown.index("<td>24</td><td>3</td><td>2</td><td>3.00</td>") < shown.index("<td>20</td>")
    assert shown.count("<tr>") == 9
    assert "2 more layers" in shown
    assert shown.count("<path") == 1
    empty = Trace(np.zeros((2, 1, 4), dtype=np.int64))._repr_html_()
    assert "no load" in empty
    assert "fault: " in empty
    assert "<path" not in Trace(load[:1])._repr_html_()
    Trace(np.zeros((0, 1, 4), dtype=np.int64))._repr_html_()
