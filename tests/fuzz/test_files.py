"""Files and command lines of any content are read right or refused in words; nothing hangs, runs or takes the memory.

Only the library's own errors, or OSError, come out, with a text that names the file.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import eplb_core as eplb
from eplb_core.cli import main as cli
from eplb_core.errors import EplbError
from eplb_core.files import formats, sglang, tensorrt_llm, vllm_ascend
from eplb_core.loading.agreement import LocalAgreement
from eplb_core.loading.checkpoint.load import read_headers
from eplb_core.loading.record.file import load_record, open_record, save_record
from eplb_core.loading.record.record import LayoutRecord
from tests.fuzz.breaking import broken, write_traps
from tests.fuzz.limits import fuzz, limits

LIMIT_S = 20.0
"""The most that one small file may take: seconds, not minutes, on a machine that does other things."""
TOPOLOGY = eplb.Topology(num_ranks=2)
LAYOUT = eplb.ExpertLayout([[0, 1, 2, 3, 3, 0], [0, 1, 2, 3, 1, 2]], 4, topology=TOPOLOGY)
LOAD = np.arange(1, 25).reshape(3, 2, 4)


# ---- seeds and readers -----------------------------------------------------------------------------------------------


def write_seeds(folder: Path) -> dict[str, Path]:
    """A valid file or folder of each kind."""
    for name in ("passes", "statistics", "model"):
        (folder / name).mkdir(parents=True)
    eplb.save_trace(eplb.Trace(LOAD, ("a", "b", "c"), layer_ids=(3, 4), top_k=2), folder / "trace.npz")
    eplb.save_trace(eplb.Trace(LOAD / 7.0), folder / "floats.npz")
    np.save(folder / "plain.npy", LOAD)
    np.savez(folder / "windows.npz", a=LOAD[0], b=LOAD[1], top_k=np.array(2))
    (folder / "counts.json").write_text(json.dumps({"logical_count": LOAD.tolist()}))
    torch.save({"logical_count": torch.from_numpy(LOAD)}, folder / "stat.pt")
    p2l = torch.from_numpy(LAYOUT.physical_to_logical_map.copy())
    for rank in range(2):
        counted = [torch.full((2, 6), n + 1) for n in range(2)]
        passes = [{"forward_pass_id": n, "rank": rank, "global_physical_count": c} for n, c in enumerate(counted)]
        torch.save({"records": passes, "last_physical_to_logical_map": p2l}, folder / f"passes/{rank}.pt")
        counts = {f"{i}_{layer}": torch.arange(4, dtype=torch.int32) for i in range(2) for layer in (3, 4)}
        save_file(counts, folder / f"statistics/rank{rank}.safetensors")
    (folder / "statistics/meta_info.json").write_text(json.dumps({"num_experts": 4, "num_experts_per_token": 2}))
    eplb.save_layout(LAYOUT, folder / "layout.json", layer_ids=(3, 4))
    eplb.save_layout(LAYOUT, folder / "layout.npz")
    np.save(folder / "map.npy", LAYOUT.physical_to_logical_map)
    sglang.write_expert_location(LAYOUT, folder / "location.json")
    sglang.write_expert_location(LAYOUT, folder / "location.pt")
    distinct = eplb.ExpertLayout.trivial(2, 4, num_slots=6, topology=TOPOLOGY)
    vllm_ascend.write_expert_map(distinct, folder / "ascend.json")
    tensorrt_llm.write_config(LAYOUT, folder / "config.yaml")
    rows = "".join(f"\n  {layer}:" + "".join(f"\n  - {e}" for e in row) for layer, row in enumerate(p2l.tolist()))
    (folder / "block.yml").write_text(f"# a comment\nnum_slots: 6\ninitial_global_assignments:{rows}\n")
    record = LayoutRecord(LAYOUT)
    record.attach("a")
    record.attach("b")
    save_record(folder / "record.json", record.state, memory="m")
    store = eplb.ExpertStore({"w": torch.arange(32, dtype=torch.uint8).reshape(4, 8)})
    one = eplb.ExpertLayout([[0, 1, 2, 3]], 4, topology=eplb.Topology(1))
    eplb.HostBackup.save(folder / "backup", [store], one, rank=0, agreement=LocalAgreement.group(1)[0])
    weights = {f"model.layers.0.mlp.experts.{e}.up_proj.weight": torch.ones(2, 2) for e in range(4)}
    save_file(weights, folder / "model/model.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "model.safetensors")}
    (folder / "model/model.safetensors.index.json").write_text(json.dumps(index))
    return {entry.name: entry for entry in sorted(folder.iterdir())}


def _layout_of(path: Path) -> None:
    """Read, and check anew what came out: a right answer is a valid layout."""
    layout = eplb.load_layout(path, topology=TOPOLOGY)
    eplb.ExpertLayout(layout.physical_to_logical_map, layout.num_experts, topology=layout.topology)


def _trace_of(path: Path) -> None:
    load = eplb.load_trace(path).load
    assert load.ndim == 3
    assert np.isfinite(load).all()
    assert (load >= 0).all()


def _stream(path: Path) -> None:
    for block in eplb.stream_trace(path, windows=2).blocks(2):
        block.load.sum()


def _inline(path: Path) -> None:
    text = path.read_bytes()[:4096].decode("utf-8", "replace").replace("\0", " ") if path.is_file() else ""
    if text.lstrip().startswith("{") and not os.path.exists(text):
        sglang.read_expert_location(text, topology=TOPOLOGY)


def _reopened(path: Path) -> None:
    record = open_record(path, LAYOUT, memory="m")
    if not record.state.dirty:
        load_record(path)


def _backup(path: Path) -> None:
    backup = eplb.HostBackup(path)
    for expert in range(4):
        with contextlib.suppress(KeyError):
            backup.fetch(0, expert, [torch.zeros(8, dtype=torch.uint8)])


READERS: dict[str, Callable[[Path], object]] = {
    "load_trace": _trace_of,
    "load_layout": _layout_of,
    "stream_trace": _stream,
    "is_layout_file": formats.is_layout_file,
    "inline": _inline,
    "load_record": load_record,
    "open_record": _reopened,
    "HostBackup": _backup,
    "load_checkpoint": read_headers,
    "read_statistics": tensorrt_llm.read_statistics,
    "read_config": lambda path: tensorrt_llm.read_config(path, topology=TOPOLOGY, layer_ids=[0, 1]),
    "read_expert_map": lambda path: vllm_ascend.read_expert_map(path, uneven="pad"),
    "read_recorder_file": sglang.read_recorder_file,
}
FITTING = {
    "ascend.json": "load_layout read_expert_map",
    "backup": "HostBackup",
    "block.yml": "load_layout read_config",
    "config.yaml": "load_layout read_config",
    "counts.json": "load_trace",
    "floats.npz": "load_trace stream_trace",
    "layout.json": "load_layout is_layout_file",
    "layout.npz": "load_layout",
    "location.json": "load_layout inline",
    "location.pt": "load_layout",
    "map.npy": "load_layout",
    "model": "load_checkpoint",
    "passes": "load_trace",
    "plain.npy": "load_trace stream_trace",
    "record.json": "load_record open_record",
    "stat.pt": "load_trace read_recorder_file",
    "statistics": "load_trace read_statistics",
    "trace.npz": "load_trace stream_trace",
    "windows.npz": "load_trace",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder to be in: a word of a command line may be the name of a file to write."""
    before = os.getcwd()
    folder = tmp_path_factory.mktemp("files")
    os.chdir(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield folder
    os.chdir(before)


@pytest.fixture(scope="module")
def seeds(place: Path) -> dict[str, Path]:
    made = write_seeds(place / "seeds")
    assert made.keys() == FITTING.keys()
    return made


# ---- judging ---------------------------------------------------------------------------------------------------------


def read(name: str, path: Path) -> bool:
    """Whether the file is read; refused is well if the text names the file and moves no cursor."""
    try:
        with limits(LIMIT_S):
            READERS[name](path)
    except (EplbError, OSError) as error:
        text, where = str(error), getattr(error, "path", str(path))
        assert text.isprintable(), repr(text)
        assert "MemoryError" not in text
        if isinstance(error, EplbError):
            names = ["inline JSON", path.name, *(os.listdir(path) if path.is_dir() else ())]
            assert any(each in text for each in names), text
            assert path.is_dir() or where in (str(path), "inline JSON"), text
            assert len(text) <= 3000
        return False
    return True


def command(line: Sequence[str]) -> None:
    """A status of 0, 1 or 2, and what went wrong in words."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace"), io.StringIO()
    status: object = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), interrupting(line):
        try:
            with limits(LIMIT_S):
                status = cli.main(list(line))
        except SystemExit as end:
            status = end.code
    out.flush()
    assert status in (0, 1, 2, 130, None)
    last = (err.getvalue().strip().splitlines() or [""])[-1]
    assert status != 2 or len(last) >= 15
    assert "Traceback" not in err.getvalue()
    assert "Error(" not in last
    said = out.buffer.getvalue().decode() + err.getvalue()
    assert all(each.isprintable() for each in said.split("\n")), repr(said)


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


# ---- the tests -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", FITTING)
def test_a_broken_file_is_read_right_or_refused_by_its_name(name: str, seeds: dict[str, Path], place: Path) -> None:
    seed, case, fitting = seeds[name], place / f"case-{name}", FITTING[name].split()
    assert all(read(reader, seed) for reader in fitting)
    whole = b"" if seed.is_dir() else seed.read_bytes()
    step = max(1, len(whole) // (25 if name.endswith(".pt") else 120))
    for end in [*range(0, len(whole), step), *range(len(whole))[-1:]]:
        case.write_bytes(whole[:end])
        for reader in {"load_trace", "load_layout", *fitting}:
            read(reader, case)

    @fuzz(40)
    @given(chance=st.randoms(), another=st.sampled_from(list(READERS)))
    def check(chance: Random, another: str) -> None:
        if seed.is_dir():
            case.mkdir(exist_ok=True)
            files = sorted(seed.iterdir())
            victim = chance.choice(files)
            for file in files:
                (case / file.name).write_bytes(broken(file, chance) if file == victim else file.read_bytes())
        else:
            case.write_bytes(broken(seed, chance))
        for reader in {another, *fitting}:
            read(reader, case)
        if chance.random() < 0.1:
            command([chance.choice(("inspect", "plan")), str(case), "--ranks", "2", "--json"])

    check()


NPY = b"\x93NUMPY"
HEADS = [b"", b"PK\x03\x04", b"PK\x05\x06" + bytes(18), NPY + b"\1\0", NPY + b"\2\0v\0\0\0", b"{", b"[", b"num_slots: "]
YAML = [*"[]{},#a1\n ", "num_slots:", "initial_global_assignments:", " 3", "  4:", "- ", "&a", "*a", "!!set"]
BYTES = st.tuples(st.sampled_from(HEADS), st.binary(max_size=200) | st.text(max_size=80).map(str.encode)).map(b"".join)
CONFIG = st.lists(st.sampled_from(YAML), max_size=30).map("".join)


@pytest.mark.slow
@fuzz(400)
@given(BYTES | CONFIG.map(lambda text: b"num_slots: 4\ninitial_global_assignments:" + text.encode()))
def test_random_content_is_refused_or_read(place: Path, content: bytes) -> None:
    (place / "random").write_bytes(content)
    for reader in ("load_trace", "load_layout", "read_config"):
        read(reader, place / "random")


@pytest.mark.slow
def test_a_trap_is_refused_by_every_reader_and_runs_nothing(seeds: dict[str, Path], place: Path) -> None:
    for trap in write_traps(place / "traps", place / "proof", seeds):
        done = [reader for reader in READERS if read(reader, trap)]
        assert trap.suffix not in (".pt", ".npy") or set(done) <= {"is_layout_file", "inline", "open_record"}, (
            trap,
            done,
        )
        command(["inspect", str(trap)])
        command(["plan", str(trap), "--ranks", "2", "--slots", "8"])
        assert not (place / "proof").exists(), trap


_WORDS = """plan simulate inspect convert record serve status host demo --json --key --windows --ranks --nodes
--rank-to-node --rank-speed --slots --locality --groups --effort --current --out --to --policy --interval --history
--dispatch --hardware --window-passes --report --experts --layout --state --help -1 0 nan inf 1e308 1,,2 : 0:0 2:1 -1:
0,1,0,1 1e-300,1e300 0,99999999 -- @/dev/null { /"""
WORDS = [*_WORDS.split(), "", "9" * 18, "9" * 5000, "9" * 40 + ":", "\ud800", "\u0663", "x" * 5000, "a\nb", "\x1b[2J"]


@pytest.mark.slow
def test_a_broken_command_line_ends_with_a_status_and_words(seeds: dict[str, Path], place: Path) -> None:
    traces = [str(seeds[name]) for name in ("trace.npz", "floats.npz", "plain.npy", "counts.json", "stat.pt", "passes")]
    layouts = [str(path) for name, path in seeds.items() if "load_layout" in FITTING[name] and name != "map.npy"]
    outs = [str(place / f"out{end}") for end in (".json", ".npz", ".pt", ".html", "")]
    content = {file: file.read_bytes() for file in (place / "seeds").rglob("*") if file.is_file()}
    for words in (["plan", "--json"], ["plan", "--current", layouts[0]], ["simulate", "--interval", "1"]):  # compiles
        assert cli.main([words[0], traces[0], "--ranks", "2", "--slots", "6", *words[1:]]) == 0

    @fuzz(30)
    @given(chance=st.randoms())
    def check(chance: Random) -> None:
        trace, layout, out, shape = map(chance.choice, (traces, layouts, outs, ["--ranks 2 --nodes 1"]))
        to = chance.choice(("eplb", "sglang", "vllm-ascend", "tensorrt-llm"))
        line = chance.choice(
            (
                f"plan {trace} {shape} --slots 6 --out {out} --to {to} --windows 0:2",
                f"plan {trace} --slots 6 --current {layout} {shape} --effort 0.5",
                f"simulate {trace} {shape} --slots 6 --interval 1 --policy none,place --history 2",
                f"simulate {trace} {shape} --slots 6 --interval 1 --report {out} --window-passes 3",
                f"inspect {chance.choice((trace, layout))} {shape} --experts 4 --json",
                f"convert {chance.choice((trace, layout))} {out} --to {to} {shape}",
                f"record status {out}",
                f"record serve {out}.sock --layout {layout} {shape} --state {out}.state",
                f"host {out}.sock --checkpoint {seeds['model']} --template x --rank 0",
            )
        ).split()
        for _ in range(chance.choice((0, 1, 1, 2, 3))):
            at = chance.randrange(len(line) + 1)
            insert = [] if chance.random() < 0.1 else [chance.choice((*WORDS, *traces, *layouts))]
            line[at : at + chance.choice((0, 1, 1))] = insert
        command(line)
        for file, data in content.items():  # two words in each other's place write over a seed
            if file.read_bytes() != data:
                file.write_bytes(data)

    check()
