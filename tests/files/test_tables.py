"""CSV and parquet of load, and folders of files."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_core import Trace, load_layout, load_trace, save_trace, stream_trace
from eplb_core.errors import FileFormatError
from eplb_core.files.formats import is_layout_file
from tests.test_frames import LOAD, LONG, WIDE


def write(path: Path, table: dict[str, Any], delimiter: str = ",") -> Path:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(table)
        writer.writerows(zip(*table.values(), strict=True))
    return path


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("table", [LONG, WIDE])
def test_csv_is_read_long_and_wide(tmp_path: Path, table: dict[str, Any], delimiter: str) -> None:
    path = write(tmp_path / "load.csv", table, delimiter)
    trace = load_trace(path)
    assert trace.load.tolist() == LOAD.tolist()
    assert (trace.format, trace.path, trace.layer_ids) == ("csv", str(path), (3, 4))
    assert not is_layout_file(path)
    with pytest.raises(FileFormatError, match="csv content"):
        load_layout(path)


def test_numbers_alone_are_layers_by_experts_and_judged_as_any_array(tmp_path: Path) -> None:
    np.savetxt(tmp_path / "load.csv", LOAD[0], delimiter=",", fmt="%d")
    assert load_trace(tmp_path / "load.csv").load.tolist() == LOAD[:1].tolist()
    ids = np.argsort(np.random.default_rng(0).gumbel(size=(99, 32)), axis=1)[:, :6]
    np.savetxt(tmp_path / "ids.csv", ids, delimiter=",", fmt="%d")
    with pytest.raises(FileFormatError, match="top-k ids"):
        load_trace(tmp_path / "ids.csv")
    assert load_trace(tmp_path / "ids.csv", num_experts=32).top_k == 6


def test_the_rows_that_pandas_counted_are_no_column(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", {"": np.arange(24), **LONG})
    assert load_trace(path).load.tolist() == LOAD.tolist()
    path = write(tmp_path / "b.csv", {"": np.arange(24) * 2, **LONG})
    with pytest.raises(FileFormatError, match="are no `window`, `layer"):
        load_trace(path)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("layer,expert,tokens\n0,0,1\n0,1\n", "2 cells in row 2 under 3 columns"),
        ("layer,expert,tokens\n0,0,a\n", "`tokens`"),
        ("layer,expert,tokens\n0,0,\n", "`tokens`"),
        ("layer,expert,expert\n0,0,1\n", "two columns of one name"),
        ("layer,expert,tokens\n", "no row"),
        ("when,who,what\n1,2,3\n", r"no column is known as `expert` among when, who, what.*Trace\.from_frame"),
    ],
)
def test_other_csv_is_refused_with_the_reason(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(FileFormatError, match=match):
        load_trace(tmp_path / "bad.csv")


@pytest.mark.parametrize("table", [LONG, WIDE])
def test_parquet_is_read_where_pyarrow_is_there(tmp_path: Path, table: dict[str, Any]) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="parquet needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="parquet needs pyarrow")
    parquet.write_table(pyarrow.table(table), tmp_path / "load.parquet")
    assert load_trace(tmp_path / "load.parquet").load.tolist() == LOAD.tolist()


def test_what_reads_parquet_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "load.parquet").write_bytes(b"PAR1" + bytes(30))
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=r"eplb-core\[parquet\]"):
        load_trace(tmp_path / "load.parquet")


def test_safetensors_are_read_as_arrays(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy", reason="needs safetensors")
    safetensors.save_file({"load": LOAD}, tmp_path / "a.safetensors")
    assert load_trace(tmp_path / "a.safetensors").load.tolist() == LOAD.tolist()


def test_a_folder_of_files_is_one_recording_in_order_of_names(tmp_path: Path) -> None:
    done: list[tuple[int, int]] = []
    for number in (0, 1, 2):
        save_trace(Trace(LOAD[2 - number]), tmp_path / f"day{10 - number}.npz")
    trace = load_trace(tmp_path, progress=lambda *step: done.append(step))
    assert trace.load.tolist() == LOAD.tolist()
    assert trace.windows == ("day8.npz 0", "day9.npz 0", "day10.npz 0")
    assert done == [(1, 3), (2, 3), (3, 3)]
    assert "3 windows of 3 files" in trace.notes[0]
    np.save(tmp_path / "other.npy", LOAD[0, :1])
    with pytest.raises(FileFormatError, match=r"1 layers x 4 experts in .*other\.npy, but 2 x 4"):
        load_trace(tmp_path)


def test_a_csv_is_read_window_by_window_where_it_is_sorted_by_them(tmp_path: Path) -> None:
    path = write(tmp_path / "load.csv", LONG)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line for line in lines if not line.startswith("1,3,")))  # a window that lacks a layer
    stream = stream_trace(path)
    assert stream.num_windows == 3
    expected = LOAD.copy()
    expected[1, 0] = 0
    for _ in range(2):
        assert [block.load.tolist() for block in stream.blocks(3)] == [expected.tolist()]
    path.write_text("\n".join([*lines, "0,3,0,5"]))
    with pytest.raises(FileFormatError, match="window 0 in two places"):
        stream_trace(path)
    with pytest.raises(FileFormatError, match="no column of windows"):
        stream_trace(write(path, {name: LONG[name] for name in ("layer", "expert", "tokens")}))
