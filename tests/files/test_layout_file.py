"""R49: saved layouts come back equal; what does not fit is refused. B15, B17."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_core import ExpertLayout, Topology, load_layout, save_layout
from eplb_core.errors import FileFormatError
from eplb_core.files.formats import read_layout_file

UNEVEN = Topology(rank_to_node=[0, 0, 1], rank_speed=[1.0, 0.1 + 0.2, 2.0])
LAYOUT = ExpertLayout([[0, 1, 2, -1, 0, 2], [2, 2, 1, 0, 0, 0]], 3, topology=UNEVEN)


@given(
    layers=st.integers(0, 3),
    experts=st.integers(1, 6),
    ranks=st.integers(1, 4),
    more=st.integers(0, 5),
    ending=st.sampled_from([".json", ".npz"]),
)
def test_layouts_come_back_equal(
    tmp_path_factory: pytest.TempPathFactory, layers: int, experts: int, ranks: int, more: int, ending: str
) -> None:
    layout = ExpertLayout.trivial(layers, experts, num_slots=experts + more, topology=Topology(ranks))
    path = tmp_path_factory.mktemp("layout") / f"l{ending}"
    save_layout(layout, path, layer_ids=range(5, 5 + layers))
    read = read_layout_file(path)
    assert read.layout == layout
    assert read.layout.digest == layout.digest
    assert read.layer_ids == tuple(range(5, 5 + layers))


@pytest.mark.parametrize("ending", ["json", "npz"])
def test_nodes_speeds_empty_slots_and_pairs_are_kept(tmp_path: Path, ending: str) -> None:
    save_layout(LAYOUT, tmp_path / f"l.{ending}")
    assert load_layout(tmp_path / f"l.{ending}") == LAYOUT
    assert load_layout(tmp_path / f"l.{ending}", UNEVEN, 3) == LAYOUT


@pytest.mark.parametrize("ending", ["json", "npz"])
def test_the_same_layout_gives_the_same_bytes(tmp_path: Path, ending: str) -> None:
    for name in "ab":
        save_layout(LAYOUT, tmp_path / f"{name}.{ending}")
    assert (tmp_path / f"a.{ending}").read_bytes() == (tmp_path / f"b.{ending}").read_bytes()


def changed(tmp_path: Path, **change: object) -> Path:
    save_layout(LAYOUT, tmp_path / "l.json", layer_ids=[3, 4])
    whole = json.loads((tmp_path / "l.json").read_text())
    (tmp_path / "l.json").write_text(json.dumps({**whole, **change}))
    return tmp_path / "l.json"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"physical_to_logical_map": [[0, 1, 2, -1, 0, 1], [2, 2, 1, 0, 0, 0]]}, "changed after it was saved"),
        ({"digest": "00"}, "expected digest .*found 00"),
        ({"format": "eplb-layout-2"}, "expected format eplb-layout-1, found 'eplb-layout-2'"),
        ({"num_experts": 4}, "expert 3 has no slot at layer 0"),
        ({"num_experts": True}, "must be an integer"),
        ({"layer_ids": [3]}, "expected 2 layer_ids, found 1"),
        ({"rank_to_node": [0, 0]}, r"rank_speed.*must be \[2\]"),
        ({"rank_to_node": [0, 7, 1]}, "node 7"),
        ({"rank_speed": [1, 1, -1]}, "positive and finite at rank 2"),
        ({"physical_to_logical_map": [[0, 1, 2], [0, 1]]}, "inhomogeneous|same number of slots"),
    ],
)
def test_changed_files_are_refused_and_say_what_is_wrong(tmp_path: Path, change: dict[str, object], match: str) -> None:
    with pytest.raises(FileFormatError, match=match):
        load_layout(changed(tmp_path, **change))


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    path = changed(tmp_path)
    whole = json.loads(path.read_text())
    del whole["digest"], whole["rank_speed"]
    path.write_text(json.dumps(whole))
    with pytest.raises(FileFormatError, match="no digest, rank_speed"):
        load_layout(path)


def test_numbers_other_than_those_given_are_refused(tmp_path: Path) -> None:
    save_layout(LAYOUT, tmp_path / "l.json")
    with pytest.raises(FileFormatError, match=r"num_ranks=3, num_nodes=1.*num_ranks=3, num_nodes=2"):
        load_layout(tmp_path / "l.json", Topology(3))
    with pytest.raises(FileFormatError, match="expected 4 experts, found 3"):
        load_layout(tmp_path / "l.json", num_experts=4)


def test_a_map_without_an_expert_is_refused_at_load(tmp_path: Path) -> None:
    """B15: accepted by an engine, it fails at the first token for expert 2."""
    (tmp_path / "m.json").write_text(json.dumps({"physical_to_logical_map": [[0, 1, 3, 3, 1, 0]]}))
    with pytest.raises(FileFormatError, match="expert 2 has no slot at layer 0"):
        load_layout(tmp_path / "m.json", Topology(2), 4)
    for bad in (4, -2):
        (tmp_path / "m.json").write_text(json.dumps({"physical_to_logical_map": [[0, 1, 2, 3, 1, bad]]}))
        with pytest.raises(FileFormatError, match=rf"\(={bad}\) must be in \[-1, 4\) at layer 0, slot 5"):
            load_layout(tmp_path / "m.json", Topology(2), 4)


def test_a_partition_is_an_exact_cover(tmp_path: Path) -> None:
    """B17: 7 experts on 2 ranks, no redundancy: sizes 4 and 3, through a file too."""
    layout = ExpertLayout.trivial(1, 7, num_slots=7, topology=Topology(2))
    save_layout(layout, tmp_path / "l.json")
    rows = load_layout(tmp_path / "l.json").physical_to_logical_map.reshape(2, -1)
    assert [row[row >= 0].tolist() for row in rows] == [[0, 1, 2, 3], [4, 5, 6]]


def test_plain_arrays_need_a_topology(tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz", physical_to_logical_map=np.array([[0, 1, 1, 0]]))
    with pytest.raises(FileFormatError, match="--ranks"):
        load_layout(tmp_path / "m.npz")
    read = read_layout_file(tmp_path / "m.npz", topology=Topology(2))
    assert (read.layout.num_experts, read.format) == (2, "numpy")
    assert "taken as 2" in read.notes[0]
    np.save(tmp_path / "m.npy", np.array([[0, 1, 1, 0]], dtype=np.uint8))
    with pytest.raises(FileFormatError, match="uint8, which cannot hold -1"):
        load_layout(tmp_path / "m.npy", Topology(2))
    np.savez(tmp_path / "t.npz", expert_load=np.ones((1, 2)))
    with pytest.raises(FileFormatError, match="found expert_load; a trace is no layout"):
        load_layout(tmp_path / "t.npz", Topology(2))


def test_layer_ids_must_fit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"layer_ids.*1 entries.*2"):
        save_layout(LAYOUT, tmp_path / "l.json", layer_ids=[1])
