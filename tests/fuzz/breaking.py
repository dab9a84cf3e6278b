"""Files of every format, broken: bytes, numbers, names, nesting, parts of archives; and what is worse than broken."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

_NUMBERS = r"""-1 0 1 2 7 255 65536 2147483648 9223372036854775807 9223372036854775808 1e400 -1e5 NaN Infinity -0 0.5
null true "x" [] {} "\ud800" """
NUMBERS = [*_NUMBERS.split(), '"\u202e\x1b[2J"', "1" * 5000, "9" * 30]
VALUES: list[Any] = [None, True, -1, 0, 2**31, 2**63, 10**30, 1e308, float("nan"), float("inf"), "", "x", [], {}, [[]]]
VALUES += ["\x1b[2J", "\ud800", [1, [2]], ["a", 1], {"a": 1}, list(range(300)), "A" * 5000, [[1, 2], [3]], 0.5, "1"]
_DTYPES = "'<i8' '>i8' '<f8' '<f4' '|O' '<U9' '|b1' '<u8' '<c16' '<M8[s]' '|V8' '<f2' '|S3' '<i1' 'zz'"
DTYPES = _DTYPES.split()


def broken(path: Path, chance: Random) -> bytes:
    """The content of a file, broken as its kind can be or anyhow."""
    kinds = {".json": _json, ".npy": _npy, ".safetensors": _safetensors, ".npz": _zip, ".pt": _zip}
    anyhow = chance.random() < 0.35
    return (_bytes if anyhow else kinds.get(path.suffix, _bytes))(path.read_bytes(), chance)


def _bytes(data: bytes, chance: Random) -> bytes:
    """One to four changes of bytes or of numbers in text."""
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        at = chance.randrange(len(data) + 1)
        part = data[at : at + chance.choice((1, 2, 8, 64))]
        what = chance.randrange(9)
        if what == 0:
            data = data[:at]
        elif what < 7:
            others = b"", bytes(len(part)), b"\xff" * len(part), part * 2, part * 2000, chance.randbytes(len(part))
            data = data[:at] + others[what - 1] + data[at + len(part) :]
        else:
            data = _number(data, chance)
    return data


def _number(data: bytes, chance: Random) -> bytes:
    """Another value for one number in a text."""
    found = [place.span() for place in re.finditer(rb"-?\d+", data)]
    if not found:
        return data
    start, end = chance.choice(found)
    return data[:start] + chance.choice(NUMBERS).encode("utf-8", "surrogatepass") + data[end:]


def _json(data: bytes, chance: Random) -> bytes:
    """Another value, a missing one, one that is there twice, or very many around it."""
    tree = json.loads(data)
    places = list(_places(tree))
    if not places:
        return data
    holder, key = chance.choice(places)
    what = chance.randrange(5)
    if what == 0:
        del holder[key]
    elif what == 1 and isinstance(holder, list):
        holder.insert(key, holder[key])
    elif what == 2 and isinstance(holder[key], (int, float)):
        holder[key] = chance.choice((holder[key] + 1, -holder[key], float(holder[key]), str(holder[key])))
    else:
        holder[key] = chance.choice(VALUES)
    text = json.dumps(tree)
    if what == 4:
        depth = chance.choice((2, 900, 100_000))
        text = chance.choice(("[" * depth + text + "]" * depth, '{"a":' * depth + text + "}" * depth))
    elif isinstance(tree, dict) and chance.random() < 0.1:
        text = f"{text[:-1]}, {json.dumps(chance.choice(list(tree) or ['x']))}: {json.dumps(chance.choice(VALUES))}}}"
    return text.encode("utf-8", "surrogatepass")


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(pairs):
        yield tree, key
        yield from _places(value)


def _zip(data: bytes, chance: Random) -> bytes:
    """One member broken, removed, renamed, doubled or made large; the archive itself stays whole."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as new:
        members = {name: old.read(name) for name in old.namelist()}
        victim, what = chance.choice(list(members)), chance.randrange(8)
        raw = members.pop(victim)
        changed = _npy(raw, chance) if raw[:6] == b"\x93NUMPY" and what > 4 else _bytes(raw, chance)
        if what == 1:
            victim = chance.choice((victim.upper(), "../../etc/x", "x" * 300, "\u202e", f"{victim}/", "data.pkl", "x"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, content in members.items():
                new.writestr(name, content)
            if what:
                new.writestr(victim, {1: raw, 2: raw + bytes(16 << 20)}.get(what, changed))
            if what == 3:
                new.writestr(victim, raw)
    return stream.getvalue()


def _npy(data: bytes, chance: Random) -> bytes:
    """Another shape, dtype or order in the header, of the right length, or other numbers behind it."""
    end = 10 + int.from_bytes(data[8:10], "little")
    header, body = data[10:end], data[end:]
    what = chance.randrange(5)
    if what == 0:
        header = header.replace(b"False", b"True")
    elif what == 1:
        header = re.sub(rb"(descr': )'[^']*'", rb"\1" + chance.choice(DTYPES).encode(), header)
    elif what == 2:
        header = _number(header, chance)[:60_000]
    elif what == 3:
        body = _bytes(body, chance)
    else:
        values = np.frombuffer(body[: len(body) // 8 * 8], np.float64).copy()
        if values.size:
            values[chance.randrange(values.size)] = chance.choice((np.nan, np.inf, -1.0, 1e308, 5e-324))
        body = values.tobytes()
    return data[:8] + len(header).to_bytes(2, "little") + header + body


def _safetensors(data: bytes, chance: Random) -> bytes:
    """A header that says something else, of the right length or of another."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = _json(data[8:end], chance)
    declared = len(header) if chance.random() < 0.8 else chance.choice((0, 1, 2**63, 2**40, len(data)))
    return declared.to_bytes(8, "little") + header + data[end:]


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self._proof = str(proof)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._proof,)


def write_traps(folder: Path, proof: Path, seeds: dict[str, Path]) -> list[Path]:
    """Pickles with code, archives and headers that declare too much, links, pipes, devices, nesting."""

    def npy(header: str, behind: bytes = b"") -> bytes:
        return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + header.ljust(117).encode() + b"\n" + behind

    folder.mkdir()
    code = pickle.dumps({"logical_count": Payload(proof), "records": Payload(proof)})
    made = {
        "pickle.pt": code,
        "pickle.npy": npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", code),
        "huge.npy": npy("{'descr': '<i8', 'fortran_order': False, 'shape': (9, 99999999, 99999999), }"),
        "third.npy": b"\x93NUMPY\x03\x00" + bytes(120),
        "deep.npy": b"\x93NUMPY\x01\x00" + (9000).to_bytes(2, "little") + b"(" * 9000,
        "deep.json": b'{"logical_count":' + b"[" * 1_000_000,
        "layers.json": b'{"layer_list":' + b"[" * 1_000_000,
        "aliases.yaml": b"a: &a [1]\nb: &b [*a,*a]\nnum_slots: *b\ninitial_global_assignments: !!python/object:x\n",
        "empty": b"",
        "spaces.json": b" " * 10_000,
        "bom.json": b"\xef\xbb\xbf{}",
        "utf16.json": '{"logical_count": [[1]]}'.encode("utf-16"),
        "zip.npz": b"PK\x05\x06" + bytes(18),
        "length.safetensors": (2**63).to_bytes(8, "little"),
        "experts.json": json.dumps({"physical_to_logical_map": [[0, 10**15]]}).encode(),
        "nodes.json": seeds["layout.json"].read_bytes().replace(b"[0, 0]", b"[0, 1000000000000000]"),
    }
    for name, data in made.items():
        (folder / name).write_bytes(data)
    with zipfile.ZipFile(folder / "code.pt", "w") as archive:
        archive.writestr("archive/data.pkl", code)
        archive.writestr("archive/version", "3")
    for name, declared in (("bomb.npz", 5 << 30), ("liar.npz", 100)):
        with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("expert_load.npy", bytes(64 << 20))
            archive.filelist[0].file_size = declared
    os.symlink(folder / "loop", folder / "loop")
    os.symlink(folder / "nowhere", folder / "dangling")
    os.symlink("/dev/zero", folder / "zero")
    os.mkfifo(folder / "pipe")
    (folder / "nothing").mkdir()
    for name in ("passes", "statistics", "backup", "model"):
        (folder / f"{name}-of-pipes").mkdir()
        for file in sorted(seeds[name].iterdir()):
            os.mkfifo(folder / f"{name}-of-pipes" / file.name)
    return sorted(folder.iterdir())
