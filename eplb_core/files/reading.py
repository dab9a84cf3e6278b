"""Reading files that others wrote, without trusting them, and writing ours whole or not at all.

Every reader looks at the sizes that a file declares before it allocates, runs no code from the file, and turns whatever
goes wrong into one `FileFormatError` that says which file, what was expected, what was found and what to do.
"""

from __future__ import annotations

import csv
import errno
import io
import itertools
import json
import math
import os
import re
import secrets
import stat
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from eplb_core._arrays import to_numpy
from eplb_core._extras import needed
from eplb_core._text import plain, quoted
from eplb_core.errors import FileFormatError
from eplb_core.files.pickles import check_pickle

PathLike: TypeAlias = str | os.PathLike[str]
AnyArray: TypeAlias = npt.NDArray[Any]

MAX_BYTES = 4 << 30
"""The most that a file may declare or hold: far above any real trace (1,000 windows of 61 x 512 are 250 MB)."""
MAX_RATIO, FREE_BYTES = 400, 64 << 20
"""The most that a byte of an archive may declare, once it declares more than `FREE_BYTES`: counts pack 100 to 1."""
MAX_TEXT_BYTES = 256 << 20
"""The most for JSON, whose parsed form takes many times the memory of the text."""


def bad_file(path: PathLike, expected: str, found: str, mend: str) -> FileFormatError:
    """Make the error that all readers raise."""
    name = "inline JSON" if is_inline(path) else os.fspath(path)
    return FileFormatError(f"{name}: expected {plain(expected)}, found {plain(found)}; {mend}", path=name)


@contextmanager
def reading(path: PathLike, expected: str, mend: str) -> Iterator[None]:
    """Turn any exception of a decoder into `FileFormatError`; those, and a missing package's, pass as they are."""
    try:
        yield
    except (FileFormatError, ModuleNotFoundError):
        raise
    except Exception as error:  # decoders of hostile bytes raise whatever they please
        raise bad_file(path, expected, _told(error), mend) from error


def _told(error: Exception) -> str:
    """A decoder's error in words."""
    if isinstance(error, KeyError):
        return f"no {error}"
    return str(error) if type(error) in (ValueError, TypeError) else f"{type(error).__name__}: {error}"


def check_path(path: PathLike, name: str = "path") -> str:
    """The path as text; a number is none, though `open` would take it for an open file, and close that."""
    given: object = path
    text = os.fspath(given) if isinstance(given, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise TypeError(f"`{name}` (={quoted(path, 80)}) must be text or a path")
    try:
        possible = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        possible = False
    if not possible:
        raise ValueError(f"`{name}` (={quoted(text, 80)}) must be a name that files can have")
    return text


def open_regular(path: PathLike, max_bytes: int) -> io.BufferedReader:
    """Open a regular file of a size that may be read; a missing one raises OSError as `open` does.

    A file without length is read as empty: those of /proc have none, and what they give knows no end.
    """
    status = os.stat(check_path(path))  # before `open`, which would wait for ever on a named pipe
    if not stat.S_ISREG(status.st_mode):
        raise bad_file(
            path, "a file", "a folder" if stat.S_ISDIR(status.st_mode) else "a device or pipe", "give a file"
        )
    if status.st_size > max_bytes:
        raise _too_large(path, status.st_size, max_bytes)
    file = open(path, "rb")  # noqa: SIM115
    if status.st_size:
        return file
    file.close()
    return io.BufferedReader(io.BytesIO())


def _too_large(path: PathLike, size: int, max_bytes: int) -> FileFormatError:
    return bad_file(path, f"at most {max_bytes:,} bytes", f"{size:,}", "cut the recording into parts, or mend the file")


def is_inline(path: PathLike) -> bool:
    """Is it the JSON itself instead of a file, as SGLang's `--init-expert-location` takes it too?"""
    return isinstance(path, str) and path.lstrip().startswith("{") and not os.path.exists(path)


def sniff(path: PathLike) -> str:
    """What a path holds, by its content: a word; inline JSON is json.

    Words: folder, npz, torch, npy, parquet, safetensors, json, csv, text, empty, binary.
    """
    check_path(path)
    if is_inline(path):
        return "json"
    if os.path.isdir(path):
        return "folder"
    with open_regular(path, MAX_BYTES) as file:
        head = file.read(4096)
        if head[:4] == b"PK\x03\x04" or head[:4] == b"PK\x05\x06":
            with reading(path, "a zip archive (.npz or .pt)", "save the file again; it may be truncated"):
                names = zipfile.ZipFile(file).namelist()
            return "torch" if any(name.endswith("data.pkl") for name in names) else "npz"
    if not head.strip():
        return "empty"
    if head.startswith(b"\x93NUMPY"):
        return "npy"
    if head.startswith(b"PAR1"):
        return "parquet"
    if head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") <= MAX_TEXT_BYTES:
        return "safetensors"
    if head.lstrip()[:1] in (b"{", b"["):
        return "json"
    # A cut of 4096 bytes may split one character of four bytes at its end.
    text = _text_of(head[:-4] if len(head) == 4096 else head)
    return "binary" if text is None else "text" if csv_delimiter(text) is None else "csv"


def _text_of(head: bytes) -> str | None:
    try:
        text = head.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    return text if all(c.isprintable() or c.isspace() for c in text) else None


def is_csv(path: PathLike) -> bool:
    """Is a file, of any size, text with as many cells in each of its first lines?"""
    with open_regular(path, sys.maxsize) as file:
        text = _text_of(file.read(4096)[:-4])
    return text is not None and csv_delimiter(text) is not None


def csv_delimiter(head: str) -> str | None:
    """What parts the first lines of a text into equally many cells, or None if it is no CSV."""
    lines = [line for line in head.splitlines()[:4] if line.strip()]
    if len(lines) > 1:
        lines = lines[:-1]  # it may be cut
    # The keys of a mapping in YAML end in a colon; its lists lie in brackets.
    if not lines or set(lines[0]) & set(":[{#"):
        return None
    for delimiter in ",;\t":
        counts = {len(next(csv.reader([line], delimiter=delimiter))) for line in lines}
        if len(counts) == 1 and counts != {1}:
            return delimiter
    return None


def read_text(path: PathLike, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """UTF-8 text of a bounded size."""
    with open_regular(path, max_bytes) as file:
        raw = file.read()
    with reading(path, "UTF-8 text", "save it as UTF-8"):
        return raw.decode("utf-8")


def read_json(path: PathLike) -> Any:
    """Any JSON value."""
    text = str(path) if is_inline(path) else read_text(path)
    with reading(path, "JSON", "it may be truncated: write it again"):
        return json.loads(text)


class Arrays(Mapping[str, AnyArray]):
    """The arrays of an .npz, or the one of an .npy, named "". Each is read when it is first asked for."""

    def __init__(self, path: PathLike) -> None:
        self._path = path
        self._read: dict[str, AnyArray] = {}
        with self._open() as archive:
            self._members = [""] if archive is None else [name.removesuffix(".npy") for name in archive.namelist()]

    def __getitem__(self, name: str) -> AnyArray:
        if name not in self._read:
            if name not in self._members:
                raise KeyError(name)
            with self._open() as archive:
                if archive is not None:
                    members = archive.namelist()
                    member = f"{name}.npy" if f"{name}.npy" in members else name
                    self._read[name] = npy_array(archive.read(member), member)
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    @contextmanager
    def _open(self) -> Iterator[zipfile.ZipFile | None]:
        """The archive, checked, or None for an .npy, which is read at once."""
        mend = "save it again with numpy.savez; arrays of Python objects are never read"
        with open_regular(self._path, MAX_BYTES) as file, reading(self._path, "NumPy arrays (.npz or .npy)", mend):
            if file.peek(6)[:6] == b"\x93NUMPY":
                self._read[""] = npy_array(file.read(), "")
                yield None
                return
            with zipfile.ZipFile(file) as archive:
                _check_zip(self._path, archive)
                yield archive


def is_lines(path: PathLike) -> bool:
    """Is each line JSON by itself, so that the file is none? Decided by the first two."""
    with open_regular(path, MAX_BYTES) as file:
        lines = [file.readline(MAX_TEXT_BYTES) for _ in range(2)]
    try:
        return bool(lines[1].strip()) and isinstance(json.loads(lines[0]), (dict, list)) and lines[1][:1] in b"{["
    except (ValueError, RecursionError):
        return False


def read_npz(path: PathLike) -> Arrays:
    """The arrays of an .npz (or the one of an .npy, named ""); pickled ones are refused, not loaded."""
    return Arrays(path)


def _check_zip(path: PathLike, archive: zipfile.ZipFile) -> None:
    """Refuse what declares too much, before a member is read; reading one never gives more than it declares."""
    members = sorted(archive.infolist(), key=lambda member: member.header_offset)
    declared = sum(member.file_size for member in members)
    if declared > MAX_BYTES:
        raise _too_large(path, declared, MAX_BYTES)
    held = sum(member.compress_size for member in members)
    if declared > max(FREE_BYTES, MAX_RATIO * held):
        what = f"{declared:,} bytes packed into {held:,}"
        raise bad_file(path, f"at most {MAX_RATIO} bytes for each byte of the archive", what, "save it uncompressed")
    for first, second in itertools.pairwise(members):
        if first.header_offset + first.compress_size > second.header_offset:
            what = f"that {plain(first.filename, 80)} and {plain(second.filename, 80)} overlap"
            raise bad_file(path, "a zip archive whose members lie apart", what, "save the file again")


def npy_array(raw: bytes, name: str) -> AnyArray:
    """The array in the bytes of an .npy; its header must declare exactly what follows it."""
    stream = io.BytesIO(raw)
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"array `{name}` has .npy version {version}")
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read_header(stream)
    if dtype.kind not in "biufU":
        raise ValueError(f"array `{name}` has dtype {dtype}, not numbers or text")
    body = len(raw) - stream.tell()
    _check_shape(name, shape, dtype.itemsize)
    if math.prod(shape) * dtype.itemsize != body:
        raise ValueError(f"array `{name}` declares shape {shape} of {dtype} but {body} bytes follow")
    flat = np.frombuffer(raw, dtype=dtype, offset=stream.tell()) if body else np.empty(0, dtype)
    return flat.reshape(shape, order="F" if fortran else "C")


def _check_shape(name: str, shape: Sequence[int], itemsize: int) -> None:
    """Refuse what would be too large even where a length of 0 makes it empty: sums over that axis are not."""
    if math.prod(max(n, 1) for n in shape) * itemsize > MAX_BYTES:
        raise ValueError(f"array `{name}` has shape {list(shape)}, more than {MAX_BYTES:,} bytes")


def read_torch(path: PathLike) -> Any:
    """What `torch.save` wrote: tensors and plain Python values only (`weights_only`), on the CPU."""
    torch = needed("torch", "torch", f"reading {os.fspath(path)!r}")
    mend = "save tensors, lists and dicts with torch.save; anything that would run code is refused"
    with open_regular(path, MAX_BYTES) as file, reading(path, "a file of torch.save", mend):
        with zipfile.ZipFile(file) as archive:
            _check_zip(path, archive)
            for name in archive.namelist():
                if name.endswith("data.pkl"):
                    check_pickle(archive.read(name))
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)


def tensor_array(path: PathLike, value: object, name: str) -> AnyArray:
    """A tensor or nested lists out of a file as numpy numbers; views that pretend to be huge are refused."""
    with reading(path, f"numbers in `{name}`", "write a plain tensor or nested lists of numbers"):
        if hasattr(value, "detach"):
            tensor: Any = value
            _check_shape(name, tensor.shape, tensor.element_size())
            array = to_numpy(tensor, name)
        else:
            array = np.asarray(value)
        if array.dtype.kind not in "iuf":
            raise TypeError(f"dtype {array.dtype}")
        return array


def read_safetensors(path: PathLike) -> dict[str, AnyArray]:
    """All tensors of a .safetensors file."""
    safetensors = needed("safetensors.numpy", "files", f"reading {os.fspath(path)!r}")
    with open_regular(path, MAX_BYTES) as file, reading(path, "a .safetensors file", "copy it again"):
        tensors: dict[str, AnyArray] = safetensors.load(file.read())
        return tensors


def write_atomic(path: PathLike, content: bytes, *, mode: int = 0o666) -> None:
    """Write a file whole or not at all: a reader sees the old one or the new one, whenever the writer dies.

    `mode`: who may use it, less what the process's umask takes.
    """
    target = Path(os.path.realpath(check_path(path)))
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "No such folder", str(target.parent))
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "Is a folder; name a file in it", str(target))
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "Is a device or pipe, which a file may not replace; name a file", str(target))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):  # a full disk names no file, other errors the temporary one
            raise OSError(error.errno, error.strerror, str(target)) from error
        raise


def remove_unfinished(path: PathLike) -> None:
    """Remove what `write_atomic` left of writers that were killed; nobody else may be writing this file."""
    target = Path(os.path.realpath(check_path(path)))
    unfinished = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.tmp")
    with suppress(OSError):
        for name in os.listdir(target.parent):
            if unfinished.fullmatch(name):
                os.unlink(target.with_name(name))
