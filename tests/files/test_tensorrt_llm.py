"""TensorRT-LLM's load-balancer YAML and expert statistics; B16 and B17."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_core import ExpertLayout, Topology, load_layout, load_trace
from eplb_core.errors import FileFormatError
from eplb_core.files import tensorrt_llm
from eplb_core.files.formats import read_layout_file

pytest.importorskip("yaml", reason="PyYAML reads load-balancer files")

TWO = Topology(num_ranks=2)
LAYOUT = ExpertLayout([[0, 1, 2, 2, 3, 0], [3, 2, 1, 0, 1, 2]], 4, topology=TWO)


def test_configs_round_trip(tmp_path: Path) -> None:
    tensorrt_llm.write_config(LAYOUT, tmp_path / "c.yaml", layer_ids=[3, 60], layer_updates_per_iter=2)
    assert (tmp_path / "c.yaml").read_text() == (
        "num_slots: 6\ninitial_global_assignments:\n"
        "  3: [0, 1, 2, 2, 3, 0]\n  60: [3, 2, 1, 0, 1, 2]\nlayer_updates_per_iter: 2\n"
    )
    assert read_layout_file(tmp_path / "c.yaml", topology=TWO, num_experts=4) == (LAYOUT, (3, 60), "tensorrt-llm", ())


MAP = "initial_global_assignments:"
FORMS = {
    "flow rows": f"{MAP}\n  0: [0, 1, 1, 0]\n  1: [1, 0, 0, 1]\nlayer_updates_per_iter: 0\nnum_slots: 4\n",
    "block rows": f"{MAP}\n  0:\n  - 0\n  - 1\n  - 1\n  - 0\n  1:\n    - 1\n    - 0\n    - 0\n    - 1\nnum_slots: 4",
    "wrapped rows": f"num_slots: 4\n{MAP}\n  0: [0, 1,\n    1, 0]\n  1:\n    [1, 0, 0, 1]\n",
    "a flow mapping": f"num_slots: 4\n{MAP} {{0: [0, 1, 1, 0],\n  1: [1, 0, 0, 1]}}\n",
    "comments": f"---\n# saved\nnum_slots: 4   # of 2 ranks\n{MAP}\n  0: [0,1,1,0]\n  1: [1,0,0,1]\n...\n",
    "quotes": "'num_slots': 4\n\"initial_global_assignments\":\n  '0': [0,1,1,0]\n  1: [1,0,0,1]\n",
    "more keys": f"num_slots: 4\nname: x\nlist:\n- 1\n{MAP} {{0: [0, 1, 1, 0], 1: [1, 0, 0, 1]}}",
}


@pytest.mark.parametrize("form", FORMS)
def test_the_forms_that_yaml_writers_use_are_read(tmp_path: Path, form: str) -> None:
    (tmp_path / "c.yaml").write_text(FORMS[form])
    assert load_layout(tmp_path / "c.yaml", TWO).physical_to_logical_map.tolist() == [[0, 1, 1, 0], [1, 0, 0, 1]]


HEAD = "num_slots: 4\ninitial_global_assignments:\n"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("num_slots: 4\n", "found num_slots;"),
        ("num_slots: x\ninitial_global_assignments: {0: [0, 1]}", "found num_slots"),
        (HEAD + "  0: [0, 1, 1]\n", r"num_slots \(=4\) experts, found 3 at layer 0"),
        (HEAD + "  0: [0, 1, 1, 0]\n  0: [0, 1, 1, 0]\n", r"a key is there twice in the mapping of line 3"),
        (HEAD + "  0: [0, 1, 1, 0]\n  '0': [0, 1, 1, 0]\n", "a layer is there twice, once in quotes"),
        (HEAD + "  0: [0, 1, 1, 0]\n  0x0: [0, 1, 1, 0]\n", "a key is there twice"),
        (HEAD + "  a: [0, 1, 1, 0]\n", r"\['a'\] must be a list of integers"),
        (HEAD + "  true: [0, 1, 1, 0]\n", r"\[True\] must be a list of integers"),
        (HEAD + "  0: [0, 1, 1, 0] 5\n", "ParserError"),
        (HEAD + "  0: [0 1 1 0]\n", r"\['0 1 1 0'\] must be a list of integers"),
        (HEAD + "  0: [0, [1], 1, 0]\n", r"\[0, \[1\], 1, 0\] must be a list of integers"),
        (HEAD + "  0: [0, 1.5, 1, 0]\n", r"\[0, 1.5, 1, 0\] must be a list of integers"),
        (HEAD + "  0: [0, true, 1, 0]\n", r"\[0, True, 1, 0\] must be a list of integers"),
        (HEAD + "  0: [0, 1, 1, 99999999999999999999]\n", "OverflowError"),
        (HEAD + "  0: [0, 1, 1, 0\n", "ParserError"),
        (HEAD + "  0:\n  - 0\n  - x\n", r"\[0, 'x'\] must be a list of integers"),
        (HEAD + "  0: &a [0, 1, 1, 0]\n  1: *a\n", "an alias, anchor, tag or merge key in line 3"),
        (HEAD + "  <<: {0: [0, 1, 1, 0]}\n  1: [0, 1, 1, 0]\n", "an alias, anchor, tag or merge key in line 3"),
        (HEAD + "  0: !!python/tuple [0, 1, 1, 0]\n", "an alias, anchor, tag or merge key in line 3"),
        ("num_slots: 4\nnum_slots: 4\n", "a key is there twice in the mapping of line 1"),
        ("num_slots: true\ninitial_global_assignments: {0: [0]}", "found num_slots"),
        ("num_slots: 4\n  more\n", "found num_slots;"),
        ("num_slots: 4\ninitial_global_assignments: {0: [0, 1, 1, 0]} x", "ParserError"),
        ("num_slots: 4\ninitial_global_assignments: {0 [0, 1, 1, 0]}", "ParserError"),
        ("num_slots: 4\ninitial_global_assignments: {0: 1}", "1 must be a list of integers"),
        ("a: " + "[" * 9 + "]" * 9, "too deep or too long in line 1"),
        ("a: " + "[" * 100_000, "nesting depth|too deep"),
        ("a: " + "1:" * 4000 + "1", "too deep or too long in line 1"),
        (" some words\n", "no mapping but str"),
        (HEAD + "  0: [0, 1, 1, 7]\n", "8 experts in 4 slots"),
    ],
)
def test_other_yaml_is_refused_with_the_reason(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(FileFormatError, match=match):
        load_layout(tmp_path / "c.yaml", TWO)


def test_yaml_that_would_expand_or_is_too_large_is_refused_before_it_is_built(tmp_path: Path) -> None:
    laughs = "a0: &a0 [x]\n" + "".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(40))
    (tmp_path / "c.yaml").write_text(laughs)
    with pytest.raises(FileFormatError, match="an alias, anchor, tag or merge key in line 1"):
        load_layout(tmp_path / "c.yaml", TWO)
    (tmp_path / "c.yaml").write_text("# " + "x" * (4 << 20))
    with pytest.raises(FileFormatError, match=r"at most 4,194,304 bytes, found 4,194,306"):
        load_layout(tmp_path / "c.yaml", TWO)


@pytest.mark.parametrize(("module", "name"), [("yaml", "c.yaml"), ("safetensors.numpy", "stat")])
def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    tensorrt_llm.write_config(LAYOUT, tmp_path / "c.yaml")
    (tmp_path / "stat").mkdir()
    statistics(tmp_path / "stat", [{"1_0": row(1, 2, 3)}])
    monkeypatch.setitem(sys.modules, module, None)
    read = load_layout if module == "yaml" else load_trace
    with pytest.raises(ImportError, match=r"pip install 'eplb-core\[files\]'"):
        read(tmp_path / name)


def test_layers_that_the_file_does_not_cover_are_trivial_and_named(tmp_path: Path) -> None:
    """B16: assignments for layers 0 and 1, the model asks for 2 (its draft layer)."""
    tensorrt_llm.write_config(LAYOUT, tmp_path / "c.yaml")
    read = tensorrt_llm.read_config(tmp_path / "c.yaml", topology=TWO, num_experts=4, layer_ids=[0, 1, 2])
    assert read.layout.physical_to_logical_map[2].tolist() == [0, 1, 2, 3, 0, 1]
    assert read.layout.physical_to_logical_map[:2].tolist() == LAYOUT.physical_to_logical_map.tolist()
    assert read.notes == ("layers 2 are not in the file and get the trivial layout",)
    one = tensorrt_llm.read_config(tmp_path / "c.yaml", topology=TWO, layer_ids=[1])
    assert one.layout.physical_to_logical_map.tolist() == [[3, 2, 1, 0, 1, 2]]


def test_assignments_of_another_number_of_slots_are_not_cut(tmp_path: Path) -> None:
    """B17: a list for 8 slots is not sliced to 7."""
    (tmp_path / "c.yaml").write_text("num_slots: 7\ninitial_global_assignments:\n  0: [0, 1, 2, 3, 4, 5, 6, 0]\n")
    with pytest.raises(FileFormatError, match=r"num_slots \(=7\) experts, found 8 at layer 0"):
        load_layout(tmp_path / "c.yaml", TWO, 7)


def test_empty_slots_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="layer 0, slot 3"):
        tensorrt_llm.write_config(ExpertLayout([[0, 1, 2, -1]], 3, topology=TWO), tmp_path / "c.yaml")


# ---- statistics ------------------------------------------------------------------------------------------------------


def statistics(
    folder: Path, ranks: list[dict[str, np.ndarray[tuple[int, ...], np.dtype[np.int32]]]], experts: int = 3
) -> Path:
    numpy_files = pytest.importorskip("safetensors.numpy", reason="safetensors writes the files that are read here")
    (folder / "meta_info.json").write_text(json.dumps({"num_experts": experts, "num_experts_per_token": 2}))
    for rank, tensors in enumerate(ranks):
        numpy_files.save_file(tensors, folder / f"rank{rank}.safetensors")
    return folder


def row(*counts: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return np.array(counts, dtype=np.int32)


def test_statistics_are_summed_over_ranks_and_ordered_by_number(tmp_path: Path) -> None:
    one = {"9_3": row(1, 2, 3), "10_3": row(4, 5, 6), "9_12": row(0, 0, 1), "10_12": row(2, 0, 0)}
    trace = load_trace(statistics(tmp_path, [one, {name: 10 * counts for name, counts in one.items()}]))
    assert trace.load.tolist() == [[[11, 22, 33], [0, 0, 11]], [[44, 55, 66], [22, 0, 0]]]
    assert (trace.windows, trace.layer_ids, trace.top_k) == (("iteration 9", "iteration 10"), (3, 12), 2)


def test_statistics_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    statistics(tmp_path, [{"1_0": row(1, 2, 3), "1_1": row(1, 2, 3)}, {"1_0": row(1, 2, 3)}])
    with pytest.raises(FileFormatError, match="2 ranks' counts, found 1 at iteration 1, layer 1"):
        load_trace(tmp_path)
    statistics(tmp_path, [{"1_0": row(1, 2)}])
    with pytest.raises(FileFormatError, match=r"rank0\.safetensors: expected \[3\] counts, found \[2\] in 1_0"):
        load_trace(tmp_path)
    for file in tmp_path.glob("rank*"):
        file.unlink()
    with pytest.raises(FileFormatError, match=r"rank\*\.safetensors beside meta_info.json, found none"):
        load_trace(tmp_path)
    (tmp_path / "meta_info.json").write_text("{}")
    with pytest.raises(FileFormatError, match="no 'num_experts'"):
        load_trace(tmp_path)


@given(cut=st.floats(0, 1, exclude_max=True), place=st.floats(0, 1, exclude_max=True), flip=st.integers(0, 255))
def test_hostile_statistics_are_refused(
    tmp_path_factory: pytest.TempPathFactory, cut: float, place: float, flip: int
) -> None:
    folder = statistics(tmp_path_factory.mktemp("stat"), [{"1_0": row(1, 2, 3)}])
    raw = bytearray((folder / "rank0.safetensors").read_bytes())
    raw[int(place * len(raw))] ^= flip
    (folder / "rank0.safetensors").write_bytes(raw if flip else raw[: int(cut * len(raw))])
    with suppress(FileFormatError):  # nothing else may come out
        load_trace(folder)
