"""Files and arguments of any content: each is read right or refused in words; nothing hangs, runs or takes the memory.

python -m benchmarks.fuzz_files --minutes 15 --json fuzz_files.json

Valid files of every kind that the library reads are broken (bytes, numbers, names, nesting, parts of archives) and
given to its readers and to the command line, whose arguments are broken too. Only the library's own errors, or OSError,
may come out, with a text that names the file. The work is done by a process of its own, which may take 4 GiB.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import pickle
import random
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

import eplb_core as eplb
from benchmarks import measure
from eplb_core.cli import main as cli
from eplb_core.errors import EplbError
from eplb_core.files import formats, tensorrt_llm, vllm_ascend
from eplb_core.files import sglang as sglang_files
from eplb_core.loading.agreement import LocalAgreement
from eplb_core.loading.checkpoint.load import read_headers
from eplb_core.loading.record.file import load_record, open_record, save_record
from eplb_core.loading.record.record import LayoutRecord
from eplb_core.simulation import stream_trace

MEMORY_BYTES = 4 << 30
LIMIT_S = 20.0
"""The most that one small file may take: seconds, not minutes, on a machine that does other things."""
TOPOLOGY = eplb.Topology(num_ranks=2)
LAYOUT = eplb.ExpertLayout([[0, 1, 2, 3, 3, 0], [0, 1, 2, 3, 1, 2]], 4, topology=TOPOLOGY)
LOAD = np.arange(1, 25).reshape(3, 2, 4)


class Finding(NamedTuple):
    """Something that must not happen."""

    what: str
    reader: str
    text: str
    case: str
    """A copy of the file or folder, or the arguments."""


class Hang(BaseException):
    """Raised by the alarm; no `except Exception` may swallow it."""


# ---- seeds -----------------------------------------------------------------------------------------------------------


def write_seeds(folder: Path) -> dict[str, Path]:
    """A valid file or folder of each kind."""
    import torch
    from safetensors.torch import save_file

    def make(name: str) -> Path:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    eplb.save_trace(eplb.Trace(LOAD, windows=("a", "b", "c"), layer_ids=(3, 4), top_k=2), make("trace.npz"))
    eplb.save_trace(eplb.Trace(LOAD / 7.0), make("floats.npz"))
    np.save(make("plain.npy"), LOAD)
    np.savez(make("windows.npz"), a=LOAD[0], b=LOAD[1], top_k=np.array(2))
    make("counts.json").write_text(json.dumps({"logical_count": LOAD.tolist()}))
    torch.save({"logical_count": torch.from_numpy(LOAD)}, make("stat.pt"))
    p2l = torch.from_numpy(LAYOUT.physical_to_logical_map.copy())
    for rank in range(2):
        records = [
            {"forward_pass_id": n, "rank": rank, "global_physical_count": torch.full((2, 6), n + 1)} for n in range(2)
        ]
        torch.save({"records": records, "last_physical_to_logical_map": p2l}, make(f"passes/{rank}.pt"))
    make("statistics/meta_info.json").write_text(json.dumps({"num_experts": 4, "num_experts_per_token": 2}))
    for rank in range(2):
        counts = {f"{i}_{layer}": torch.arange(4, dtype=torch.int32) for i in range(2) for layer in (3, 4)}
        save_file(counts, make(f"statistics/rank{rank}.safetensors"))
    eplb.save_layout(LAYOUT, make("layout.json"), layer_ids=(3, 4))
    eplb.save_layout(LAYOUT, make("layout.npz"))
    np.save(make("map.npy"), LAYOUT.physical_to_logical_map)
    sglang_files.write_expert_location(LAYOUT, make("location.json"))
    sglang_files.write_expert_location(LAYOUT, make("location.pt"))
    distinct = eplb.ExpertLayout.trivial(2, 4, num_slots=6, topology=TOPOLOGY)
    vllm_ascend.write_expert_map(distinct, make("ascend.json"))
    tensorrt_llm.write_config(LAYOUT, make("config.yaml"))
    rows = "\n".join(f"  {layer}:\n" + "\n".join(f"  - {e}" for e in row) for layer, row in enumerate(p2l.tolist()))
    make("block.yml").write_text(f"# a comment\nnum_slots: 6\ninitial_global_assignments:\n{rows}\n")
    record = LayoutRecord(LAYOUT)
    record.attach("a")
    record.attach("b")
    save_record(make("record.json"), record.state, memory="m")
    store = eplb.ExpertStore({"w": torch.arange(32, dtype=torch.uint8).reshape(4, 8)})
    one = eplb.ExpertLayout([[0, 1, 2, 3]], 4, topology=eplb.Topology(1))
    eplb.HostBackup.save(folder / "backup", [store], one, rank=0, agreement=LocalAgreement.group(1)[0])
    weights = {f"model.layers.0.mlp.experts.{e}.up_proj.weight": torch.ones(2, 2) for e in range(4)}
    save_file(weights, make("model/model.safetensors"))
    index = {"weight_map": dict.fromkeys(weights, "model.safetensors")}
    make("model/model.safetensors.index.json").write_text(json.dumps(index))
    return {entry.name: entry for entry in sorted(folder.iterdir())}


def _layout_of(path: Path) -> None:
    """Read, and check anew what came out: a right answer is a valid layout."""
    layout = eplb.load_layout(path, topology=TOPOLOGY)
    eplb.ExpertLayout(layout.physical_to_logical_map, layout.num_experts, topology=layout.topology)


def _trace_of(path: Path) -> None:
    load = eplb.load_trace(path).load
    if not (np.isfinite(load).all() and (load >= 0).all() and load.ndim == 3):
        raise AssertionError(f"a trace that is none: {load}")


def _stream(path: Path) -> None:
    for block in stream_trace(path, windows=2).blocks(2):
        block.load.sum()


def _kind(path: Path) -> None:
    formats.is_layout_file(path)


def _inline(path: Path) -> None:
    text = path.read_bytes()[:4096].decode("utf-8", "replace").replace("\0", " ")
    if text.lstrip().startswith("{") and not os.path.exists(text):
        sglang_files.read_expert_location(text, topology=TOPOLOGY)


def _reopened(path: Path) -> None:
    record = open_record(path, LAYOUT, memory="m")
    if not record.state.dirty:
        load_record(path)


def _backup(path: Path) -> None:
    import torch

    backup = eplb.HostBackup(path)
    for expert in range(4):
        row = torch.zeros(8, dtype=torch.uint8)
        with contextlib.suppress(KeyError):
            backup.fetch(0, expert, [row])


def _headers(path: Path) -> None:
    read_headers(path)


READERS: dict[str, Callable[[Path], None]] = {
    "load_trace": _trace_of,
    "load_layout": _layout_of,
    "stream_trace": _stream,
    "is_layout_file": _kind,
    "inline": _inline,
    "load_record": lambda path: void(load_record(path)),
    "open_record": _reopened,
    "HostBackup": _backup,
    "load_checkpoint": _headers,
    "read_statistics": lambda path: void(tensorrt_llm.read_statistics(path)),
    "read_config": lambda path: void(tensorrt_llm.read_config(path, topology=TOPOLOGY, layer_ids=[0, 1])),
    "read_expert_map": lambda path: void(vllm_ascend.read_expert_map(path, uneven="pad")),
    "read_recorder_file": lambda path: void(sglang_files.read_recorder_file(path)),
}


def void(value: object) -> None:
    """Only whether it raises is asked."""


# ---- breaking --------------------------------------------------------------------------------------------------------

_NUMBERS = """
-1 0 1 2 7 255 65536 2147483648 9223372036854775807 9223372036854775808 1e400 -1e5 NaN Infinity -0 0.5
"""
NUMBERS = _NUMBERS.split()
NUMBERS += ["null", "true", '"x"', "[]", "{}", "1" * 5000, '"\\ud800"', '"\u202e\x1b[2J"', "9" * 30]
VALUES: list[Any] = [None, True, -1, 0, 2**31, 2**63, 10**30, 1e308, float("nan"), float("inf"), "", "x", [], {}, [[]]]
VALUES += ["\x1b[2J", "\ud800", [1, [2]], ["a", 1], {"a": 1}, list(range(300)), "A" * 5000, [[1, 2], [3]], 0.5, "1"]


def broken_bytes(data: bytes, chance: random.Random) -> bytes:
    """One to four changes of bytes or of numbers in text."""
    raw = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        at = chance.randrange(len(raw) + 1)
        end = min(len(raw), at + chance.choice((1, 2, 8, 64)))
        what = chance.randrange(9)
        if what == 0:
            del raw[at:]
        elif what == 1 and raw:
            raw[at % len(raw)] ^= 1 << chance.randrange(8)
        elif what == 2:
            raw[at:at] = chance.randbytes(end - at)
        elif what == 3:
            raw[at:end] = bytes(end - at)
        elif what == 4:
            raw[at:end] = b"\xff" * (end - at)
        elif what == 5:
            raw[at:at] = raw[at:end] * chance.choice((1, 1, 2000))
        elif what == 6:
            del raw[at:end]
        else:
            raw = bytearray(_other_number(bytes(raw), chance))
    return bytes(raw)


def _other_number(data: bytes, chance: random.Random) -> bytes:
    """Another value for one number in a text."""
    import re

    found = list(re.finditer(rb"-?\d+", data))
    if not found:
        return data
    place = chance.choice(found)
    return data[: place.start()] + chance.choice(NUMBERS).encode("utf-8", "surrogatepass") + data[place.end() :]


def broken_json(data: bytes, chance: random.Random) -> bytes:
    """Another value, a missing one, one that is there twice, or very many around it."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return broken_bytes(data, chance)
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
        text = "[" * depth + text + "]" * depth if chance.random() < 0.5 else '{"a":' * depth + text + "}" * depth
    if isinstance(tree, dict) and chance.random() < 0.1:
        name = chance.choice(list(tree) or ["x"])
        text = text[:-1] + f", {json.dumps(name)}: {json.dumps(chance.choice(VALUES))}}}"
    return text.encode("utf-8", "surrogatepass")


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(pairs):
        yield tree, key
        yield from _places(value)


def broken_zip(data: bytes, chance: random.Random) -> bytes:
    """One member broken, removed, renamed, doubled or made huge; the archive itself stays whole."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as new:
        names = old.namelist()
        victim = chance.choice(names)
        for name in names:
            raw = old.read(name)
            what = chance.randrange(10) if name == victim else -1
            if what == 0:
                continue
            if what == 1:
                name = chance.choice((name.upper(), "../../etc/x", "x" * 300, "\u202e", name + "/", "data.pkl", ""))
            elif what == 2:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    new.writestr(name, broken_bytes(raw, chance))
            elif what == 3:
                raw += bytes(64 << 20)
            elif what >= 0:
                raw = broken_npy(raw, chance) if raw[:6] == b"\x93NUMPY" else broken_bytes(raw, chance)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                new.writestr(name or "x", raw)
    return stream.getvalue()


_DTYPES = "'<i8' '>i8' '<f8' '<f4' '|O' '<U9' '|b1' '<u8' '<c16' '<M8[s]' '|V8' '<f2' '|S3' '<i1' 'zz'"
DTYPES = _DTYPES.split()


def broken_npy(data: bytes, chance: random.Random) -> bytes:
    """Another shape, dtype or order in the header, of the right length, or other numbers behind it."""
    length = int.from_bytes(data[8:10], "little")
    header, body = data[10 : 10 + length].decode("latin-1"), data[10 + length :]
    what = chance.randrange(5)
    if what == 0:
        header = header.replace("False", "True")
    elif what == 1:
        first, last = header.find("'", header.find("descr") + 6), header.find(",")
        header = header[:first] + chance.choice(DTYPES) + header[last:]
    elif what == 2:
        header = _other_number(header.encode(), chance).decode("latin-1")
    elif what == 3:
        return data[: 10 + length] + broken_bytes(body, chance)
    else:
        values = np.frombuffer(body[: len(body) // 8 * 8], np.float64).copy()
        if values.size:
            values[chance.randrange(values.size)] = chance.choice((np.nan, np.inf, -1.0, 1e308, 5e-324))
        return data[: 10 + length] + values.tobytes()
    raw = header.encode("latin-1")[:60_000]
    return data[:8] + len(raw).to_bytes(2, "little") + raw + body


def broken_safetensors(data: bytes, chance: random.Random) -> bytes:
    """A header that says something else, of the right length or of another."""
    length = int.from_bytes(data[:8], "little")
    header = broken_json(data[8 : 8 + length], chance)
    declared = len(header) if chance.random() < 0.8 else chance.choice((0, 1, 2**63, 2**40, len(data)))
    return declared.to_bytes(8, "little") + header + data[8 + length :]


def broken(path: Path, chance: random.Random) -> bytes:
    """The content of a file, broken as its kind can be or anyhow."""
    data = path.read_bytes()
    if chance.random() < 0.35:
        return broken_bytes(data, chance)
    if path.suffix in (".npz", ".pt"):
        return broken_zip(data, chance)
    kinds = {".json": broken_json, ".npy": broken_npy, ".safetensors": broken_safetensors}
    return kinds.get(path.suffix, broken_bytes)(data, chance)


# ---- what is worse than broken ---------------------------------------------------------------------------------------


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self._proof = str(proof)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._proof,)


def write_traps(folder: Path, proof: Path, seeds: dict[str, Path]) -> dict[str, Path]:
    """Pickles with code, archives and headers that declare too much, links, pipes, devices, nesting."""
    folder.mkdir()
    code = pickle.dumps({"logical_count": Payload(proof), "records": Payload(proof)})
    made: dict[str, bytes] = {
        "pickle.pt": code,
        "pickle.npy": b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little")
        + "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(117).encode() + b"\n" + code,
        "huge.npy": b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little")
        + "{'descr': '<i8', 'fortran_order': False, 'shape': (9, 99999999, 99999999), }".ljust(117).encode() + b"\n",
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
    }  # fmt: skip
    for name, data in made.items():
        (folder / name).write_bytes(data)
    with zipfile.ZipFile(folder / "code.pt", "w") as archive:
        archive.writestr("archive/data.pkl", code)
        archive.writestr("archive/version", "3")
    bomb = zipfile.ZipFile(folder / "bomb.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1)
    with bomb, bomb.open("expert_load.npy", "w", force_zip64=True) as member:
        for _ in range(70):
            member.write(bytes(64 << 20))
    os.symlink(folder / "loop", folder / "loop")
    os.symlink(folder / "nowhere", folder / "dangling")
    os.symlink("/dev/zero", folder / "zero")
    os.mkfifo(folder / "pipe")
    (folder / "nothing").mkdir()
    for name in ("passes", "statistics", "backup", "model"):
        inside = folder / f"{name}-of-pipes"
        inside.mkdir()
        for file in sorted(seeds[name].iterdir()):
            os.mkfifo(inside / file.name)
    return {entry.name: entry for entry in sorted(folder.iterdir())}


# ---- the command line ------------------------------------------------------------------------------------------------

_WORDS = """
plan simulate inspect convert record serve status host demo --json --key --windows --ranks --nodes --rank-to-node
--rank-speed --slots --locality --groups --effort --current --out --to --policy --interval --history --dispatch
--hardware --window-passes --report --experts --layout --state --help
"""
WORDS = _WORDS.split()
ODD = ["", "-1", "0", "nan", "inf", "1e308", "9" * 18, "9" * 5000, "\ud800", "\u0663", "x" * 5000, "a\nb", "1,,2", ":"]
ODD += [
    "0:0",
    "2:1",
    "-1:",
    "9" * 40 + ":",
    "0,1,0,1",
    "1e-300,1e300",
    "0,99999999",
    "--",
    "@/dev/null",
    "{",
    "\x1b[2J",
    "/",
]


def command_lines(seeds: dict[str, Path], out: Path, chance: random.Random) -> list[str]:
    """A command that works, with one to three words changed; `demo` and `host` take too long to be drawn often."""
    trace = str(seeds[chance.choice(("trace.npz", "floats.npz", "plain.npy", "counts.json", "stat.pt", "passes"))])
    layout = str(seeds[chance.choice(("layout.json", "layout.npz", "location.json", "ascend.json", "config.yaml"))])
    to = chance.choice(("eplb", "sglang", "vllm-ascend", "tensorrt-llm"))
    shape = ["--ranks", "2", "--nodes", "1"]
    lines = [
        ["plan", trace, *shape, "--slots", "6", "--out", str(out), "--to", to, "--windows", "0:2"],
        ["plan", trace, "--slots", "6", "--current", layout, *shape, "--effort", "0.5"],
        ["simulate", trace, *shape, "--slots", "6", "--interval", "1", "--policy", "none,place", "--history", "2"],
        ["simulate", trace, *shape, "--slots", "6", "--interval", "1", "--report", str(out), "--window-passes", "3"],
        ["inspect", chance.choice((trace, layout)), *shape, "--experts", "4", "--json"],
        ["convert", chance.choice((trace, layout)), str(out), "--to", to, *shape],
        ["record", "status", str(out)],
        ["record", "serve", str(out) + ".sock", "--layout", layout, *shape, "--state", str(out) + ".state"],
        ["host", str(out) + ".sock", "--checkpoint", str(seeds["model"]), "--template", "x", "--rank", "0"],
    ]
    line = chance.choice(lines)
    for _ in range(chance.choice((0, 1, 1, 2, 3))):
        at = chance.randrange(len(line) + 1)
        word = chance.choice(
            (chance.choice(ODD), chance.choice(ODD), chance.choice(WORDS), str(chance.choice(list(seeds.values()))))
        )
        if chance.random() < 0.6 and at < len(line):
            line[at] = word
        elif chance.random() < 0.7:
            line.insert(at, word)
        else:
            del line[at : at + 1]
    return line


# ---- judging ---------------------------------------------------------------------------------------------------------


class Judge:
    """Runs one case after the other and keeps what must not happen, once for each place in the code."""

    def __init__(self, keep: Path, proof: Path) -> None:
        self.findings: dict[str, Finding] = {}
        self.counts: Counter[str] = Counter()
        self._keep, self._proof = keep, proof
        self._current = keep / "current.txt"

    def read(self, name: str, path: Path) -> None:
        """One reader on one file."""
        self._current.write_text(f"{name} {path}")
        with self._watched(name, path):
            READERS[name](path)

    @contextlib.contextmanager
    def _watched(self, name: str, path: Path) -> Iterator[None]:
        try:
            with alarm(LIMIT_S):
                yield
            self.counts[f"{name}: read"] += 1
        except Hang:
            self._found("took longer than the limit", name, traceback.format_exc(), path)
        except (EplbError, OSError) as error:
            self.counts[f"{name}: refused"] += 1
            text = str(error)
            names = {path.name, *(os.listdir(path) if path.is_dir() else ())}
            if isinstance(error, EplbError) and (
                (not any(name in text for name in names) and "inline JSON" not in text) or len(text) > 3000
            ):
                self._found("a text that does not name the file", name, text, path)
            if not text.isprintable():
                self._found("a text that may move a terminal's cursor", name, repr(text), path)
            if "MemoryError" in text:
                self._found("memory", name, text, path)
        except BaseException as error:
            self._found(type(error).__name__, name, traceback.format_exc(), path)
        if self._proof.exists():
            self._proof.rmdir()
            self._found("ran code", name, "", path)

    def command(self, line: list[str]) -> None:
        """One command line: a status of 0, 1 or 2, and what went wrong in words."""
        self._current.write_text(repr(line), encoding="utf-8", errors="backslashreplace")
        out, err = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace"), io.StringIO()
        status: object = None
        try:
            with alarm(LIMIT_S), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), interrupting(line):
                status = cli.main(line)
        except SystemExit as end:
            status = end.code
        except Hang:
            self._found("took longer than the limit", "eplb", traceback.format_exc(), line)
        except BaseException as error:
            self._found(type(error).__name__, "eplb", traceback.format_exc(), line)
        if status not in (0, 1, 2, 130, None):
            self._found(f"status {status}", "eplb", err.getvalue(), line)
        last = (err.getvalue().strip().splitlines() or [""])[-1]
        if (status == 2 and len(last) < 15) or "Traceback" in err.getvalue() or "Error(" in last:
            self._found("no words", "eplb", err.getvalue(), line)
        out.flush()
        said = out.buffer.getvalue().decode() + err.getvalue()
        if not all(each.isprintable() for each in said.split("\n")):
            self._found("a text that may move a terminal's cursor", "eplb", repr(said), line)
        self.counts[f"eplb: status {status}"] += 1

    def _found(self, what: str, reader: str, text: str, case: Path | list[str]) -> None:
        places = [line.strip() for line in text.splitlines() if 'File "' in line and "fuzz_files" not in line]
        key = f"{what} {reader if not places else ''} {places[-1] if places else ''}"
        self.counts[f"{reader}: FOUND"] += 1
        if key in self.findings:
            return
        kept = repr(case)
        if isinstance(case, Path):
            kept = str(self._keep / f"{len(self.findings)}-{case.name}")
            if case.is_file():
                Path(kept).write_bytes(case.read_bytes()[: 1 << 20])
            elif case.is_dir():
                Path(kept).mkdir()
                for file in case.iterdir():
                    if file.is_file():
                        (Path(kept) / file.name).write_bytes(file.read_bytes())
        self.findings[key] = Finding(what, reader, text[-1500:], kept)
        print(f"FOUND {what} by {reader}: {text[-600:]}\n  {kept[:300]}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise `Hang` in the block after so many seconds."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextlib.contextmanager
def interrupting(line: Sequence[str]) -> Iterator[None]:
    """Commands that serve until they are interrupted are interrupted soon."""
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    over = threading.Event()

    def interrupt() -> None:
        while not over.wait(0.3):
            os.kill(os.getpid(), signal.SIGINT)

    child = threading.Thread(target=interrupt)
    if "record" in line or "host" in line:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        child.start()
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        over.set()
        while child.is_alive():
            with contextlib.suppress(KeyboardInterrupt):
                child.join()
        for number, handler in former.items():
            signal.signal(number, handler)


def work(seconds: float, seed: int, keep: Path) -> None:
    """All traps once, then broken files and command lines until the time is over; the result goes to a file."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES + _mapped_bytes(), resource.RLIM_INFINITY))
    warnings.simplefilter("ignore")
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        os.chdir(root)  # a word of a command line may be the name of a file to write
        seeds = write_seeds(root / "seeds")
        judge = Judge(keep, root / "proof")
        warm(judge, seeds, root)
        until = time.monotonic() + seconds
        for trap in write_traps(root / "traps", root / "proof", seeds).values():
            for reader in READERS:
                if not (reader == "inline" and not trap.is_file()):
                    judge.read(reader, trap)
            judge.command(["inspect", str(trap)])
            judge.command(["plan", str(trap), "--ranks", "2", "--slots", "8"])
        while time.monotonic() < until:
            one_case(judge, seeds, root, chance)
        facts = {
            "counts": dict(sorted(judge.counts.items())),
            "findings": [f._asdict() for f in judge.findings.values()],
        }
        (keep / "result.json").write_text(json.dumps(facts, indent=1))


def warm(judge: Judge, seeds: dict[str, Path], root: Path) -> None:
    """Compile before the clock runs; and each seed must be read by some reader."""
    current = ["--current", str(seeds["layout.json"])]
    for words in (["plan", "--json"], ["plan", *current], ["simulate", "--interval", "1"]):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            cli.main([words[0], str(seeds["trace.npz"]), "--ranks", "2", "--slots", "6", *words[1:]])
    for name, path in seeds.items():
        good = 0
        for reader, read in READERS.items():
            with contextlib.suppress(Exception):
                if reader != "inline":
                    read(path)
                    good += reader not in ("is_layout_file", "open_record")
        if not good:
            raise RuntimeError(f"seed {name} is read by nobody")


def one_case(judge: Judge, seeds: dict[str, Path], root: Path, chance: random.Random) -> None:
    """A broken file for one reader that fits and one that need not, or a command line."""
    if chance.random() < 0.2:
        out = root / f"out-{chance.randrange(4)}{chance.choice(('.json', '.npz', '.pt', '.html', ''))}"
        with restored(seeds):
            judge.command(command_lines(seeds, out, chance))
        return
    name, seed = chance.choice(list(seeds.items()))
    case = root / f"case-{name}"
    if seed.is_dir():
        case.mkdir(exist_ok=True)
        victim = chance.choice(sorted(seed.iterdir()))
        for file in seed.iterdir():
            (case / file.name).write_bytes(broken(file, chance) if file == victim else file.read_bytes())
    else:
        case.write_bytes(broken(seed, chance))
    for reader in {chance.choice(list(READERS)), *_fitting(name)}:
        if not (reader == "inline" and case.is_dir()):
            judge.read(reader, case)
    if chance.random() < 0.1:
        judge.command([chance.choice(("inspect", "plan")), str(case), "--ranks", "2", "--json"])


@contextlib.contextmanager
def restored(seeds: dict[str, Path]) -> Iterator[None]:
    """Put the seeds back: a command line with two words in each other's place may write over one."""
    files = [file for seed in seeds.values() for file in (seed.iterdir() if seed.is_dir() else (seed,))]
    content = {file: file.read_bytes() for file in files}
    yield
    for file, data in content.items():
        if file.read_bytes() != data:
            file.write_bytes(data)


def _fitting(name: str) -> tuple[str, ...]:
    fits = {
        "backup": ("HostBackup",),
        "model": ("load_checkpoint",),
        "record.json": ("load_record", "open_record"),
        "statistics": ("load_trace",),
        "passes": ("load_trace",),
        "layout.json": ("load_layout", "is_layout_file"),
        "location.json": ("load_layout", "inline"),
        "ascend.json": ("load_layout", "read_expert_map"),
        "config.yaml": ("load_layout", "read_config"),
        "block.yml": ("load_layout", "read_config"),
        "trace.npz": ("load_trace", "stream_trace"),
        "plain.npy": ("load_trace", "stream_trace"),
    }
    return fits.get(name, ("load_trace", "load_layout"))


def _mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + (8 << 30)


def describe(result: dict[str, Any], seconds: float) -> list[str]:
    """In a line."""
    total = sum(result["counts"].values())
    return [f"{total:,} files and command lines in {seconds:,.0f} s: {len(result['findings'])} kinds of faults found"]


def watch(seconds: float, seed: int, keep: Path) -> tuple[dict[str, Any], float]:
    """What `work` found in a process of its own, and how long it took.

    Raises:
        RuntimeError: the process ended or hung; which file it read.
    """
    keep.mkdir(parents=True, exist_ok=True)
    (keep / "result.json").unlink(missing_ok=True)
    current, begun, hung = keep / "current.txt", time.monotonic(), False
    process = multiprocessing.get_context("spawn").Process(target=work, args=(seconds, seed, keep))
    process.start()
    while process.is_alive():
        process.join(LIMIT_S)
        if current.exists() and time.time() - current.stat().st_mtime > 4 * LIMIT_S and process.is_alive():
            hung = True
            process.kill()
    if process.exitcode:
        what = "hung outside of Python" if hung else f"ended with {process.exitcode}"
        read = current.read_text() if current.exists() else "nothing"
        raise RuntimeError(f"the process with seed {seed} {what} while it read {read}")
    return json.loads((keep / "result.json").read_text()), time.monotonic() - begun


def merged(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts in all, and each kind of fault once."""
    counts: Counter[str] = Counter()
    findings: dict[tuple[str, ...], Any] = {}
    for result in results:
        counts.update(result["counts"])
        findings |= {(f["what"], f["reader"], f["text"][-300:]): f for f in result["findings"]}
    return {"counts": dict(sorted(counts.items())), "findings": list(findings.values())}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz_files", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=15.0, help="of each process")
    parser.add_argument("--processes", type=int, default=1, help="at once, each with a seed of its own")
    parser.add_argument("--seed", type=int, default=1, help="of the first process; the next have the next seeds")
    parser.add_argument("--quick", action="store_true", help="five seconds")
    parser.add_argument("--keep", type=Path, help="folder for files that were not refused as they should be")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    seconds = 5.0 if options.quick else 60 * options.minutes
    seeds = range(options.seed, options.seed + options.processes)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(seeds)) as pool:
        keep = options.keep or Path(folder)
        running = [pool.submit(watch, seconds, seed, keep / f"seed-{seed}") for seed in seeds]
        done = [one.result() for one in running]
    result, took = merged([one for one, _ in done]), sum(each for _, each in done)
    lines = describe(result, took)
    print("\n".join(lines))
    measure.write_json(options.json, {"summary": lines, "seeds": list(seeds), "seconds": took, **result})
    return 1 if result["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
