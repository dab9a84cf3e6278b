"""vllm-ascend's expert map, both ways, and B13."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eplb_core import ExpertLayout, Topology, load_layout
from eplb_core.errors import FileFormatError
from eplb_core.files import vllm_ascend
from eplb_core.files.formats import read_layout_file

TWO = Topology(num_ranks=2)
LAYOUT = ExpertLayout([[0, 1, 2, 2, 3, 0], [3, 2, 1, 0, 1, 2]], 4, topology=TWO)


def expert_map(*layers: list[list[int]]) -> dict[str, Any]:
    return {
        "moe_layer_count": len(layers),
        "layer_list": [
            {
                "layer_id": layer,
                "device_count": len(devices),
                "device_list": [{"device_id": rank, "device_expert": row} for rank, row in enumerate(devices)],
            }
            for layer, devices in enumerate(layers)
        ],
    }


def written(tmp_path: Path, found: object) -> Path:
    (tmp_path / "map.json").write_text(json.dumps(found))
    return tmp_path / "map.json"


def test_expert_maps_round_trip(tmp_path: Path) -> None:
    vllm_ascend.write_expert_map(LAYOUT, tmp_path / "map.json", layer_ids=[3, 7])
    read = read_layout_file(tmp_path / "map.json", topology=TWO, num_experts=4)
    assert read == (LAYOUT, (3, 7), "vllm-ascend", ())
    assert json.loads((tmp_path / "map.json").read_text())["layer_list"][1] == {
        "layer_id": 7,
        "device_count": 2,
        "device_list": [{"device_id": 0, "device_expert": [3, 2, 1]}, {"device_id": 1, "device_expert": [0, 1, 2]}],
    }


def test_ranks_are_counted_where_no_topology_is_given(tmp_path: Path) -> None:
    read = read_layout_file(written(tmp_path, expert_map([[0, 1], [1, 0], [0, 1]])))
    assert read.layout.topology == Topology(3)
    assert "3 ranks taken as one node" in read.notes[0]


def test_devices_are_placed_by_their_id(tmp_path: Path) -> None:
    found = expert_map([[0, 1], [2, 3]])
    found["layer_list"][0]["device_list"].reverse()
    assert load_layout(written(tmp_path, found)).physical_to_logical_map.tolist() == [[0, 1, 2, 3]]


def test_uneven_devices_are_refused_with_layer_and_device_or_padded(tmp_path: Path) -> None:
    """B13: [[0,1,2],[3]]."""
    path = written(tmp_path, expert_map([[0, 1], [2, 3]], [[0, 1, 2], [3]]))
    with pytest.raises(FileFormatError, match="3 experts on each device, found 2 at layer 0, device 0"):
        load_layout(path)
    path = written(tmp_path, expert_map([[0, 1, 2], [3]]))
    with pytest.raises(FileFormatError, match="3 experts on each device, found 1 at layer 0, device 1"):
        load_layout(path)
    read = vllm_ascend.read_expert_map(path, uneven="pad")
    assert read.layout.physical_to_logical_map.tolist() == [[0, 1, 2, 3, -1, -1]]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m: m.update(moe_layer_count=3), r"moe_layer_count \(=3\) layers, found 2 layers"),
        (lambda m: m.update(layer_list=[]), "found 0 layers"),
        (lambda m: m["layer_list"][1].update(device_count=3), r"device_count \(=3\) devices, found 2 at layer 1"),
        (lambda m: m["layer_list"][1]["device_list"][1].update(device_id=0), "device_id 0 twice at layer 1"),
        (lambda m: m["layer_list"][1]["device_list"][1].update(device_id=5), "device_id 5 at layer 1"),
        (lambda m: m["layer_list"].__setitem__(1, expert_map([[0], [1], [2]])["layer_list"][0]), "found 3 at layer 0"),
        (lambda m: m["layer_list"][0]["device_list"][0].update(device_expert=[0, "1"]), "'1' must be an integer"),
        (lambda m: m["layer_list"][0]["device_list"][0].update(device_expert=[0, 9]), "10 experts in 4 slots"),
        (lambda m: m["layer_list"][0]["device_list"][0].update(device_expert=[0, 0]), "expert 1 has no slot at layer"),
        (lambda m: m["layer_list"][0].pop("device_list"), "no 'device_list'"),
        (lambda m: m["layer_list"][0]["device_list"][0].update(device_expert=[0, 10**30]), "int too large"),
        (lambda m: m["layer_list"][0].update(layer_id=10**30), "layer_ids must be in"),
        (lambda m: m.update(moe_layer_count="\x1b[2J"), r"moe_layer_count \(=.x1b\[2J\) layers, found 2"),
        (lambda m: m["layer_list"][0].update(device_count="A" * 5000), r"device_count \(=A{200,}\.\.\., found 2 at"),
    ],
)
def test_tables_that_do_not_fit_themselves_are_refused(tmp_path: Path, change: Any, match: str) -> None:
    found = expert_map([[0, 1], [2, 3]], [[0, 1], [2, 3]])
    change(found)
    with pytest.raises(FileFormatError, match=match) as caught:
        load_layout(written(tmp_path, found))
    assert str(caught.value).isprintable()


def test_a_device_that_would_make_the_layout_huge_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are padded to the width of the widest: a file of some megabytes could ask for any amount of memory."""
    path = written(tmp_path, expert_map(*[[[0, 1, 2] * 20, *[[3]] * 9]] * 2))
    monkeypatch.setattr(vllm_ascend, "MAX_BYTES", 8 * 2 * 10 * 60 - 1)
    with pytest.raises(FileFormatError, match="expected a layout of sane size, found a device with 60 experts"):
        vllm_ascend.read_expert_map(path, uneven="pad")


def test_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="expected 3 devices, found 2"):
        load_layout(written(tmp_path, expert_map([[0, 1], [1, 0]])), Topology(3))


def test_layouts_that_the_engine_cannot_express_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rank 1 must not hold expert 3 twice at layer 0"):
        vllm_ascend.write_expert_map(ExpertLayout([[0, 1, 2, 3, 3, 0]], 4, topology=TWO), tmp_path / "no.json")
    with pytest.raises(ValueError, match="slot 3: devices must have equally many experts"):
        vllm_ascend.write_expert_map(ExpertLayout([[0, 1, 2, -1]], 3, topology=TWO), tmp_path / "no.json")
    assert not (tmp_path / "no.json").exists()
