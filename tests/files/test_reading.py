"""Hostile files: whatever the bytes, only FileFormatError comes out, and nothing large is allocated."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core import ExpertLayout, Topology, load_layout, load_trace, save_layout, save_trace
from eplb_core.errors import FileFormatError
from eplb_core.files import reading, tensorrt_llm, vllm_ascend
from eplb_core.files import sglang as sglang_files
from eplb_core.files.formats import read_layout_file
from eplb_core.files.reading import read_safetensors
from eplb_core.trace import Trace

TWO = Topology(num_ranks=2)
LAYOUT = ExpertLayout([[0, 1, 2, 2, 3, 0], [3, 2, 1, 0, 1, 2]], 4, topology=TWO)


def saved(write: Callable[[Path], None], name: str, folder: Path) -> bytes:
    write(folder / name)
    return (folder / name).read_bytes()


def stat_file(path: Path) -> None:
    torch.save({"rank": 0, "logical_count": torch.ones(3, 2, 4, dtype=torch.int32)}, path)


def passes_file(path: Path) -> None:
    record = {"forward_pass_id": 1, "rank": 0, "global_physical_count": torch.ones(1, 3, dtype=torch.int32)}
    torch.save({"records": [record], "last_physical_to_logical_map": torch.tensor([[0, 1, 1]])}, path)


WRITERS: dict[str, Callable[[Path], None]] = {
    "trace.npz": lambda path: save_trace(Trace(np.ones((2, 2, 4), dtype=np.int64)), path),
    "plain.npy": lambda path: np.save(path, np.ones((2, 4))),
    "count.json": lambda path: sglang_files.write_logical_count(Trace(np.array([[1, 2, 3]])), path),
    "stat.pt": stat_file,
    "passes.pt": passes_file,
    "layout.json": lambda path: save_layout(LAYOUT, path),
    "layout.npz": lambda path: save_layout(LAYOUT, path),
    "sglang.pt": lambda path: sglang_files.write_expert_location(LAYOUT, path),
    "sglang.json": lambda path: sglang_files.write_expert_location(LAYOUT, path),
    "ascend.json": lambda path: vllm_ascend.write_expert_map(ExpertLayout([[0, 1, 1, 0]], 2, topology=TWO), path),
    "trt.yaml": lambda path: tensorrt_llm.write_config(LAYOUT, path),
}


def read_both(path: Path) -> None:
    """Both readers answer, or raise FileFormatError with the path."""
    readers: tuple[Callable[[], object], ...] = (
        lambda: load_trace(path).faults,
        lambda: load_layout(path, TWO),
        lambda: read_layout_file(path),
    )
    for read in readers:
        error = refusal(read)
        if error is not None:
            assert str(path) in str(error)
            assert error.path == str(path)
            assert str(error).isprintable()


def refusal(read: Callable[[], object]) -> FileFormatError | None:
    """The error of a reader, if it is the one that readers may raise."""
    try:
        read()
    except FileFormatError as error:
        return error
    return None


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.slow
def test_files_cut_at_any_place_are_refused_or_read(name: str, tmp_path: Path) -> None:
    whole = saved(WRITERS[name], name, tmp_path)
    step = max(1, len(whole) // (25 if name.endswith(".pt") else 120))
    for end in [*range(0, len(whole), step), len(whole) - 1]:
        (tmp_path / name).write_bytes(whole[:end])
        read_both(tmp_path / name)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=4))
def test_flipped_bytes_are_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, name: str, flips: list[tuple[float, int]]
) -> None:
    folder = tmp_path_factory.mktemp("flip")
    raw = bytearray(saved(WRITERS[name], name, folder))
    for place, value in flips:
        raw[int(place * len(raw))] ^= value
    (folder / name).write_bytes(raw)
    read_both(folder / name)


NPY = b"\x93NUMPY"
HEADS = [b"", b"PK\x03\x04", b"PK\x05\x06" + bytes(18), NPY + b"\1\0", NPY + b"\2\0v\0\0\0", b"{", b"[", b"num_slots: "]


@given(head=st.sampled_from(HEADS), rest=st.one_of(st.binary(max_size=200), st.text(max_size=80).map(str.encode)))
@settings(max_examples=200, deadline=None)
def test_random_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, head: bytes, rest: bytes) -> None:
    path = tmp_path_factory.mktemp("random") / "file"
    path.write_bytes(head + rest)
    read_both(path)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["layer_id", "device_id", "x"]), inner),
    max_leaves=8,
)
KEYS = ["digest", "layer_list", "logical_count", "num_experts", "physical_to_logical_map", "rank_to_node"]


@given(VALUES, st.sampled_from(KEYS))
@settings(max_examples=80, deadline=None)
def test_json_of_the_wrong_kind_is_refused(tmp_path_factory: pytest.TempPathFactory, value: object, key: str) -> None:
    folder = tmp_path_factory.mktemp("json")
    save_layout(LAYOUT, folder / "own.json")
    vllm_ascend.write_expert_map(ExpertLayout([[0, 1, 1, 0]], 2, topology=TWO), folder / "map.json")
    for name in ("own.json", "map.json"):
        whole = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**whole, key: value}))
        read_both(folder / name)
    (folder / "own.json").write_text(json.dumps({key: value}))
    read_both(folder / "own.json")


PARTS = [*"[]{},#a1\n ", "num_slots:", "initial_global_assignments:", " 3", "  4:", "- ", "&a", "*a", "!!set"]


@given(st.lists(st.sampled_from(PARTS), max_size=30))
@settings(max_examples=200, deadline=None)
def test_yaml_like_text_is_refused_or_read(tmp_path_factory: pytest.TempPathFactory, parts: list[str]) -> None:
    path = tmp_path_factory.mktemp("yaml") / "c.yaml"
    path.write_text("num_slots: 4\ninitial_global_assignments:" + "".join(parts))
    read_both(path)


def npy(shape: str, body: bytes = b"", dtype: str = "<i8") -> bytes:
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + body


@pytest.mark.parametrize(
    "shape", ["(1000000000000, 58, 256)", "(0, 1000000, 1000000)", "(-1, -4)", "(2, 2)", "(True, 2)", "'x'"]
)
def test_declared_shapes_are_compared_before_memory_is_taken(tmp_path: Path, shape: str) -> None:
    (tmp_path / "huge.npy").write_bytes(npy(shape))
    with pytest.raises(FileFormatError, match=r"huge\.npy: expected NumPy arrays"):
        load_trace(tmp_path / "huge.npy")


def test_python_objects_in_arrays_are_never_unpickled(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    np.save(tmp_path / "o.npy", np.array([Trap()], dtype=object), allow_pickle=True)
    torch.save({"logical_count": Trap()}, tmp_path / "o.pt")
    for name in ("o.npy", "o.pt"):
        with pytest.raises(FileFormatError, match=name):
            load_trace(tmp_path / name)
    assert not (tmp_path / "sprung").exists()


def test_zip_bombs_are_refused_by_what_they_declare(tmp_path: Path) -> None:
    """A member says how large it is; five gigabytes of zeros take some megabytes here, so the header is patched."""
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("expert_load.npy", bytes(100_000))
    raw = bytearray((tmp_path / "bomb.npz").read_bytes())
    at = raw.rindex(b"PK\x01\x02")
    raw[at + 24 : at + 28] = struct.pack("<I", 2**32 - 2)
    two = raw[:at] + raw[at : raw.rindex(b"PK\x05\x06")] * 2 + raw[raw.rindex(b"PK\x05\x06") :]
    end = two.rindex(b"PK\x05\x06")
    size = struct.unpack("<I", two[end + 12 : end + 16])[0]
    two[end + 8 : end + 16] = struct.pack("<HHI", 2, 2, size * 2)
    (tmp_path / "bomb.npz").write_bytes(two)
    with pytest.raises(FileFormatError, match=r"at most 4,294,967,296 bytes, found 8,589,934,588"):
        load_trace(tmp_path / "bomb.npz")


def test_tensors_that_pretend_to_be_huge_are_refused(tmp_path: Path) -> None:
    torch.save({"logical_count": torch.zeros(1, dtype=torch.int32).expand(10**4, 10**4, 10**4)}, tmp_path / "wide.pt")
    with pytest.raises(FileFormatError, match=r"wide\.pt.*more than 4,294,967,296 bytes"):
        load_trace(tmp_path / "wide.pt")


def test_what_a_safetensors_file_says_about_itself_is_no_tensor(tmp_path: Path) -> None:
    about = {"n": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}, "__metadata__": {"format": "pt"}}
    header = json.dumps(about).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\1\2")
    found = read_safetensors(tmp_path / "a.safetensors")
    assert {name: array.tolist() for name, array in found.items()} == {"n": [1, 2]}


def test_huge_numbers_of_experts_slots_and_nodes_cost_no_memory(tmp_path: Path) -> None:
    save_layout(LAYOUT, tmp_path / "l.json")
    whole = json.loads((tmp_path / "l.json").read_text())
    for change in ({"num_experts": 10**12}, {"rank_to_node": [0, 10**12]}, {"physical_to_logical_map": [[0, 10**12]]}):
        (tmp_path / "l.json").write_text(json.dumps({**whole, **change}))
        with pytest.raises(FileFormatError, match=r"l\.json"):
            load_layout(tmp_path / "l.json")


def test_pipes_and_folders_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for read in (load_trace, load_layout):
        with pytest.raises(FileFormatError, match="a device or pipe"):
            read(tmp_path / "pipe")
        with pytest.raises(FileFormatError, match=str(tmp_path)):
            read(tmp_path)
        with pytest.raises(FileNotFoundError):
            read(tmp_path / "none")


def test_files_above_the_limit_are_refused_unread(tmp_path: Path) -> None:
    with open(tmp_path / "large.json", "wb") as file:
        file.write(b"{")
        file.truncate(reading.MAX_TEXT_BYTES + 1)
    with pytest.raises(FileFormatError, match=r"at most 268,435,456 bytes, found 268,435,457"):
        load_trace(tmp_path / "large.json")


def test_control_characters_of_a_file_do_not_reach_the_message(tmp_path: Path) -> None:
    (tmp_path / "evil.json").write_text(json.dumps({"\x1b[2Jkey" + "x" * 999: 1}))
    with pytest.raises(FileFormatError) as caught:
        load_trace(tmp_path / "evil.json")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 700
    save_layout(LAYOUT, tmp_path / "l.json")
    whole = json.loads((tmp_path / "l.json").read_text())
    (tmp_path / "l.json").write_text(json.dumps({**whole, "digest": "\x1b[2J"}))
    with pytest.raises(FileFormatError) as caught:
        load_layout(tmp_path / "l.json")
    assert str(caught.value).isprintable()


def test_an_npz_of_an_unknown_npy_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "v.npy").write_bytes(b"\x93NUMPY\x09\x00" + bytes(200))
    with pytest.raises(FileFormatError, match=r"version \(9, 0\)"):
        load_trace(tmp_path / "v.npy")
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.ones((2, 3)), version=(2, 0))
    (tmp_path / "v2.npy").write_bytes(stream.getvalue())
    assert load_trace(tmp_path / "v2.npy").load.shape == (1, 2, 3)


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        reading.write_atomic(path, "not bytes")  # type: ignore[arg-type]
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_names_the_file_and_leaves_the_old_one(tmp_path: Path) -> None:
    """No file may grow past 3 bytes for a moment, so that the write fails as on a full disk."""
    path = tmp_path / "out.json"
    path.write_text("old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3, hard))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*/out\.json'") as caught:
            reading.write_atomic(path, b"a new layout")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.filename == str(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_text_is_read_and_written_as_utf8_whatever_the_locale() -> None:
    """A call that names no encoding would take the locale's, which may be ASCII."""
    package = Path(reading.__file__).parents[1]
    encoded = r"(?![^()]*(?:\([^()]*\))*[^()]*utf-8)"
    bare = re.compile(rf"(?<!_files)(?<!reading)\.(?:read|write)_text\({encoded}|\bopen\([^()]*\"[rwax]t?\+?\"\)")
    for file in sorted(package.rglob("*.py")):
        for line in file.read_text("utf-8").splitlines():
            assert "/proc/" in line or not bare.search(line), f"{file}: {line}"


def test_writing_through_a_link_keeps_the_link(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    reading.write_atomic(tmp_path / "link.json", b"new")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_text() == "new"


def test_a_device_is_never_replaced_by_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="Is a device or pipe"):
        reading.write_atomic(pipe, b"layout")
    assert not pipe.is_file()


@pytest.mark.parametrize("read", [load_trace, load_layout])
def test_a_number_is_no_path_and_no_open_file_is_closed(read: Callable[[Any], object]) -> None:
    """`open(1)` takes standard output, and closes it afterwards."""
    ours, theirs = os.pipe()
    for path in (ours, [ours], None):
        with pytest.raises(TypeError, match=r"`path` \(=.*\) must be text or a path"):
            read(path)
    os.close(ours)
    os.close(theirs)


def test_a_path_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`path` \(='\\ud800'\) must be a name that files can have"):
        save_layout(LAYOUT, "\ud800")
