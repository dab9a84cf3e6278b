"""Hostile files: only FileFormatError comes out, and nothing large is allocated. tests/fuzz has files of any bytes."""

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

from eplb_core import ExpertLayout, Topology, load_layout, load_trace, save_layout
from eplb_core.errors import FileFormatError
from eplb_core.files import reading
from eplb_core.files.reading import read_safetensors

TWO = Topology(num_ranks=2)
LAYOUT = ExpertLayout([[0, 1, 2, 2, 3, 0], [3, 2, 1, 0, 1, 2]], 4, topology=TWO)


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


def test_members_that_overlap_are_refused_before_one_is_read(tmp_path: Path) -> None:
    """Sixty names for the same 64 MB of zeros: 3.8 GB, below the limit, that would take half a minute to unpack."""
    with zipfile.ZipFile(tmp_path / "one.npz", "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("a.npy", npy("(2, 2)", bytes(32)))
    raw = (tmp_path / "one.npz").read_bytes()
    at, end = raw.rindex(b"PK\x01\x02"), raw.rindex(b"PK\x05\x06")
    entries = b"".join(raw[at:end].replace(b"a.npy", f"{letter}.npy".encode()) for letter in "abcdef")
    tail = raw[end : end + 8] + struct.pack("<HHI", 6, 6, len(entries)) + raw[end + 16 :]
    (tmp_path / "many.npz").write_bytes(raw[:at] + entries + tail)
    with pytest.raises(FileFormatError, match=r"members lie apart, found that a\.npy and b\.npy overlap"):
        load_trace(tmp_path / "many.npz")


def test_zeros_that_pack_a_thousand_to_one_are_refused_unread(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "zeros.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("expert_load.npy", npy("(1, 1024, 8208)", bytes(8208 << 13)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FileFormatError, match=r"at most 400 bytes for each byte of the archive, found 67,"):
        load_trace(tmp_path / "zeros.npz")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (8 << 10)


def test_only_the_array_that_is_asked_for_is_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "two.npz", load=np.ones((2, 3)), other=np.array([{}], dtype=object), allow_pickle=True)
    assert load_trace(tmp_path / "two.npz").num_experts == 3
    with pytest.raises(FileFormatError, match="dtype object"):
        load_trace(tmp_path / "two.npz", key="other")


@pytest.mark.parametrize("path", ["/proc/self/mem", "/proc/self/pagemap", "/proc/self/clear_refs"])
def test_files_of_the_system_that_have_no_length_are_refused_unread(path: str) -> None:
    for read in (load_trace, load_layout):
        with pytest.raises((FileFormatError, PermissionError), match=r"empty file|Permission"):
            read(path)
