"""SGLang's recorded loads and expert locations. The shapes are those that 0.5.23 writes and reads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from eplb_core import ExpertLayout, Topology, load_layout, load_trace
from eplb_core.errors import FileFormatError
from eplb_core.files import sglang as sglang_files
from eplb_core.trace import Trace

TWO = Topology(num_ranks=2)
LAYOUT = ExpertLayout([[0, 1, 2, 2, 3, 0], [3, 2, 1, 0, 1, 2]], 4, topology=TWO)


def stat(tmp_path: Path, rows: list[int]) -> Trace:
    """A dump whose row i carries the load rows[i]."""
    count = torch.tensor(rows, dtype=torch.int32)[:, None, None].expand(len(rows), 2, 3)
    dump = {"rank": 0, "logical_count": count, "average_utilization_rate_over_window": None}
    torch.save(dump, tmp_path / "stat.pt")
    return load_trace(tmp_path / "stat.pt")


@pytest.mark.parametrize(
    ("rows", "order", "note"),
    [
        ([1, 2, 3, 0, 0], [1, 2, 3], "2 of 5 rows had no load"),
        ([4, 5, 0, 0, 3], [3, 4, 5], "row 4 follows the empty rows"),
        ([0, 1, 2], [1, 2], "1 of 3"),
        ([1, 0, 2, 0], [1, 2], "several places"),
        ([1, 2, 3], [1, 2, 3], "ring was full"),
        ([0, 0], [], "2 of 2"),
    ],
)
def test_rows_of_the_ring_without_load_are_left_out(
    tmp_path: Path, rows: list[int], order: list[int], note: str
) -> None:
    trace = stat(tmp_path, rows)
    assert trace.load[:, 0, 0].tolist() == order
    assert any(note in text for text in trace.notes)
    assert trace.format == "sglang-stat"


def test_one_window_and_wrong_ranks_of_tensors(tmp_path: Path) -> None:
    torch.save({"logical_count": torch.ones(2, 3, dtype=torch.int64)}, tmp_path / "one.pt")
    assert load_trace(tmp_path / "one.pt").load.shape == (1, 2, 3)
    torch.save({"logical_count": torch.ones(2, 3, 4, 5, dtype=torch.int64)}, tmp_path / "four.pt")
    with pytest.raises(FileFormatError, match=r"shape \[2, 3, 4, 5\]"):
        load_trace(tmp_path / "four.pt")
    torch.save({"logical_count": torch.full((2, 3), -1)}, tmp_path / "minus.pt")
    with pytest.raises(FileFormatError, match=r"\(=-1\)"):
        load_trace(tmp_path / "minus.pt")


def pack(rank: int, counts: dict[int, list[list[int]]], p2l: list[list[int]] | None) -> dict[str, object]:
    records = [
        {
            "forward_pass_id": n,
            "rank": rank,
            "gatherer_key": "primary",
            "global_physical_count": torch.tensor(row, dtype=torch.int32),
        }
        for n, row in counts.items()
    ]
    return {"records": records, "last_physical_to_logical_map": None if p2l is None else torch.tensor(p2l)}


def test_counts_per_slot_are_folded_to_experts(tmp_path: Path) -> None:
    """Slots 0 and 3 both hold expert 0; pass 9 comes before pass 11 whatever the order of the file."""
    torch.save(pack(0, {11: [[5, 1, 2, 4]], 9: [[1, 0, 0, 1]]}, [[0, 1, 2, 0]]), tmp_path / "pass.pt")
    trace = load_trace(tmp_path / "pass.pt")
    assert trace.load.tolist() == [[[2, 0, 0]], [[9, 1, 2]]]
    assert trace.windows == ("pass 9", "pass 11")
    assert any("one rank's file" in note for note in trace.notes)


def test_files_of_all_ranks_are_summed_by_pass(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save(pack(rank, {3: [[1, 2, 3 + rank]]}, [[0, 1, 1]]), tmp_path / f"rec_{rank}.pt")
    assert load_trace(tmp_path).load.tolist() == [[[2, 4 + 7]]]


def test_records_that_cannot_be_folded_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.pt"
    for bad, match in (
        (pack(0, {1: [[1, 2]]}, None), "no last_physical_to_logical_map"),
        (pack(0, {1: [[1, 2]]}, [[0, 1, 1]]), r"is \[1, 2\], the map \[1, 3\]"),
        (pack(0, {1: [[1, 2]]}, [[0, 10**9]]), "ids up to 1000000000"),
        (pack(0, {}, [[0, 1]]), "no forward pass"),
        ({"records": [{"rank": 0}], "last_physical_to_logical_map": torch.tensor([[0]])}, "no 'forward_pass_id'"),
        ({"something": 1}, "a dict with 'something'"),
        ([1, 2], "a list"),
    ):
        torch.save(bad, path)
        with pytest.raises(FileFormatError, match=match):
            load_trace(path)


def test_folders_must_hold_records_of_one_run(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"found neither"):
        load_trace(tmp_path)
    for rank in range(2):
        torch.save(pack(0, {3: [[1, 2]]}, [[0, 1]]), tmp_path / f"{rank}.pt")
    with pytest.raises(FileFormatError, match="forward pass 3 of rank 0 is there twice"):
        load_trace(tmp_path)
    torch.save(pack(1, {3: [[1, 2]]}, [[1, 0]]), tmp_path / "1.pt")
    with pytest.raises(FileFormatError, match="last_physical_to_logical_map differ"):
        load_trace(tmp_path)
    torch.save({"logical_count": torch.ones(1, 1)}, tmp_path / "1.pt")
    with pytest.raises(FileFormatError, match=r"1\.pt: expected a dict with `records`"):
        load_trace(tmp_path)


# ---- expert locations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["l.pt", "l.json"])
def test_expert_locations_round_trip(tmp_path: Path, name: str) -> None:
    """R49, and exactly one key: SGLang refuses any other."""
    sglang_files.write_expert_location(LAYOUT, tmp_path / name)
    assert load_layout(tmp_path / name, TWO, 4) == LAYOUT
    found = torch.load(tmp_path / name) if name.endswith("pt") else json.loads((tmp_path / name).read_text())
    assert list(found) == ["physical_to_logical_map"]
    assert torch.as_tensor(found["physical_to_logical_map"]).tolist() == LAYOUT.physical_to_logical_map.tolist()


def test_the_ending_can_be_overruled(tmp_path: Path) -> None:
    sglang_files.write_expert_location(LAYOUT, tmp_path / "l.bin", binary=True)
    assert load_layout(tmp_path / "l.bin", TWO) == LAYOUT


def test_inline_json_is_read() -> None:
    read = sglang_files.read_expert_location('{"physical_to_logical_map": [[0, 1, 1, 0]], "x": 1}', topology=TWO)
    assert read.layout.physical_to_logical_map.tolist() == [[0, 1, 1, 0]]
    assert read.notes == (
        "SGLang refuses the further keys x",
        "the file does not say how many experts there are: taken as 2",
    )


def test_a_load_is_no_layout() -> None:
    with pytest.raises(FileFormatError, match="is a load, not a layout"):
        sglang_files.read_expert_location('{"logical_count": [[1, 2]]}', topology=TWO)
    with pytest.raises(FileFormatError, match="a dict with 'a'"):
        sglang_files.read_expert_location('{"a": 1}', topology=TWO)


def test_empty_slots_cannot_be_written(tmp_path: Path) -> None:
    layout = ExpertLayout.trivial(2, 3, num_slots=3, topology=TWO)
    with pytest.raises(ValueError, match=r"layer 0, slot 3; 1 more: SGLang takes -1 for the last expert"):
        sglang_files.write_expert_location(layout, tmp_path / "l.json")
    assert not (tmp_path / "l.json").exists()


@pytest.mark.parametrize("name", ["c.pt", "c.json"])
def test_loads_are_written_as_sglang_takes_them(tmp_path: Path, name: str) -> None:
    trace = Trace(np.arange(12).reshape(2, 2, 3))
    sglang_files.write_logical_count(trace, tmp_path / name)
    back = load_trace(tmp_path / name).load
    assert np.array_equal(back, trace.load)
