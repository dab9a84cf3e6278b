"""The command line as a user meets it: exit status, messages, tables, JSON. Real processes where the status counts."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_core import ExpertLayout, Topology, load_layout, load_trace, save_layout, save_trace
from eplb_core.cli.inputs import to_json
from eplb_core.cli.main import main
from eplb_core.cli.plan import conclude_plan
from eplb_core.cli.simulate import _program
from eplb_core.cli.streams import added_up
from eplb_core.files.formats import demo_trace
from eplb_core.metrics import pairs_on_a_rank
from eplb_core.simulation import stream_trace
from eplb_core.trace import Trace
from tests.cli.commands import Commands
from tests.processes import python

PLACE = ["--ranks", "4", "--nodes", "2", "--slots", "20"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A corner of the demo trace: 8 windows, 2 layers, 16 experts."""
    path = tmp_path_factory.mktemp("cli") / "trace.npz"
    save_trace(Trace(demo_trace().load[:8, :2, :16], top_k=8, layer_ids=(3, 4)), path)
    return str(path)


@pytest.fixture
def layout(tmp_path: Path) -> str:
    path = tmp_path / "layout.json"
    save_layout(ExpertLayout.trivial(2, 16, num_slots=20, topology=Topology(4, 2)), path, layer_ids=[3, 4])
    return str(path)


@pytest.fixture
def pair(tmp_path: Path) -> str:
    path = tmp_path / "pair.json"
    save_layout(ExpertLayout([[0, 0, 1, 2, 3, 1]], 4, topology=Topology(2)), path)
    return str(path)


def run(*argv: str, program: Sequence[str] = (sys.executable, "-m", "eplb_core"), **options: Any) -> Any:
    """A process of the command line, or of another program."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": 300, "check": False}
    return subprocess.run([*program, *argv], **{**pipes, **options})


def in_shell(argv: Sequence[str], redirection: str) -> Any:
    return run(*argv, program=["sh", "-c", f'exec "$0" -m eplb_core "$@" {redirection}', sys.executable])


def fits_80_columns(text: str) -> bool:
    return all(len(line) <= 80 and line == line.rstrip() for line in text.splitlines())


# ---- plan ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_plan_writes_a_layout_and_shows_what_it_gains(trace: str, tmp_path: Path, eplb: Commands) -> None:
    out = tmp_path / "out.json"
    text = eplb("plan", trace, *PLACE, "--out", str(out)).out
    planned = load_layout(out)
    assert planned.topology == Topology(4, 2)
    assert planned.digest[:16] in text
    assert "trivial   planned     bound" in text
    assert json.loads(out.read_text())["layer_ids"] == [3, 4]


@pytest.mark.slow
def test_plan_in_json_has_the_same_numbers(trace: str, eplb: Commands) -> None:
    facts = eplb("plan", trace, *PLACE, "--json").facts
    assert 0 < facts["before"]["mean"] <= facts["after"]["mean"] <= facts["bound"]["mean"] + 1e-9 <= 1 + 1e-9
    assert (facts["num_slots"], facts["num_ranks"], facts["trace"]["windows"]) == (20, 4, 8)


@pytest.mark.slow
def test_plan_from_a_current_layout_counts_its_transfers(trace: str, layout: str, eplb: Commands) -> None:
    assert "current   planned" in eplb("plan", trace, *PLACE, "--current", layout).out


LOADED = """
import sys
from numba.core.dispatcher import Dispatcher
from eplb_core.cli.main import main
from eplb_core.placement import place as module

def kernels():
    homes = [module for name, module in list(sys.modules.items()) if name.startswith("eplb_core")]
    found = {id(each): each for home in homes for each in vars(home).values() if isinstance(each, Dispatcher)}
    return sum(len(each.overloads) for each in found.values())

place, seen = module.place, []
def watched(*arguments, **options):
    before = kernels()
    answer = place(*arguments, **options)
    seen.append(kernels() - before)
    return answer

module.place = watched
main(sys.argv[1:])
print("LOADED", *seen)
"""


@pytest.mark.slow
@pytest.mark.parametrize("start", ["trivial", "current"])
def test_the_time_of_a_plan_has_no_compilation_in_it(trace: str, layout: str, start: str) -> None:
    """In a process of its own, where no kernel is loaded yet: the call that is timed finds all of them."""
    more = ["--current", layout] if start == "current" else []
    done = run("plan", trace, *PLACE, *more, program=[sys.executable, "-c", LOADED])
    first, timed = map(int, done.stdout.split("LOADED")[1].split())
    assert first > 0
    assert timed == 0, done.stderr


@pytest.mark.slow
def test_plan_writes_an_engines_format(trace: str, tmp_path: Path, eplb: Commands) -> None:
    out = tmp_path / "moe.yaml"
    eplb("plan", trace, *PLACE, "--out", str(out), "--to", "tensorrt-llm")
    assert out.read_text().startswith("num_slots: 20\ninitial_global_assignments:\n  3: [")


def test_more_experts_than_slots_is_a_usage_error(trace: str, eplb: Commands) -> None:
    assert (
        "`num_slots` (=15) must be at least `num_experts` (=16)"
        in eplb("plan", trace, "--ranks", "4", "--slots", "15", status=2).err
    )


# ---- simulate --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_simulate_shows_policies_side_by_side(trace: str, eplb: Commands) -> None:
    pytest.importorskip("torch", reason="DeepSeek's policy needs torch")
    out = eplb("simulate", trace, *PLACE, "--interval", "4").out
    assert out.splitlines()[0].split() == ["none", "auto", "deepseek"]
    assert fits_80_columns(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "torch", "why"),
    [(["--ranks", "3", "--slots", "20"], True, "3 ranks do not divide 20 slots"), (PLACE, False, "it needs torch")],
)
def test_simulate_leaves_deepseek_out_where_it_cannot_run(
    shape: list[str], torch: bool, why: str, trace: str, eplb: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = eplb("simulate", trace, *shape, "--interval", "4", "--json")
    assert [run["policy"] for run in said.facts] == ["none", "auto"]
    assert f"deepseek is left out: {why}" in said.err


@pytest.mark.slow
def test_the_layout_to_start_from_says_its_ranks(trace: str, layout: str, tmp_path: Path, eplb: Commands) -> None:
    out = tmp_path / "next.json"
    eplb("plan", trace, "--slots", "20", "--current", layout, "--out", str(out))
    assert load_layout(out).topology == Topology(4, 2)
    assert (
        "leave the ranks and nodes out"
        in eplb("plan", trace, "--slots", "20", "--current", layout, "--ranks", "4", status=2).err
    )


def test_a_current_layout_of_other_layers_is_refused(trace: str, tmp_path: Path, eplb: Commands) -> None:
    save_layout(ExpertLayout.trivial(3, 16, num_slots=16, topology=Topology(4, 2)), tmp_path / "deep.json")
    assert (
        "deep.json has 3 layers, the trace 2"
        in eplb("plan", trace, "--slots", "16", "--current", str(tmp_path / "deep.json"), status=2).err
    )


def test_simulate_without_planning_needs_no_kernel(trace: str, eplb: Commands) -> None:
    options = ["--policy", "none", "--interval", "3", "--windows", "1:8", "--json"]
    (result,) = eplb("simulate", trace, *PLACE, *options).facts
    assert [block["first_window"] for block in result["blocks"]] == [0, 3, 6]
    assert result["total_transfers"] == 0


def test_simulate_starts_from_a_current_layout(trace: str, layout: str, eplb: Commands) -> None:
    options = ["--policy", "none", "--interval", "4", "--current", layout, "--json"]
    assert eplb("simulate", trace, *PLACE, *options).facts[0]["digests"][0] == load_layout(layout).digest


# ---- inspect ---------------------------------------------------------------------------------------------------------


def test_inspect_says_what_a_trace_holds(trace: str, eplb: Commands) -> None:
    out = eplb("inspect", trace).out
    assert fits_80_columns(out.replace(trace, "trace.npz"))
    for part in ("a trace, format eplb-trace-1", "windows         8", "sigma of log", "none found"):
        assert part in out


def test_inspect_adds_windows_up_beyond_int64(tmp_path: Path, eplb: Commands) -> None:
    save_trace(Trace(np.full((2, 1, 4), 2**62)), tmp_path / "large.npz")
    assert eplb("inspect", str(tmp_path / "large.npz"), "--json").facts["load_of_a_layer"] == 2.0**65


def test_inspect_finds_a_recorders_fault(tmp_path: Path, eplb: Commands) -> None:
    load = np.ones((2, 3, 32), dtype=np.int64)
    load[:, 1, 8:] = 0
    load[1] = 0
    save_trace(Trace(load), tmp_path / "bad.npz")
    out = eplb("inspect", str(tmp_path / "bad.npz"), status=1).out
    assert "layers 1 put all load on the first 8 of 32 experts" in " ".join(out.split())
    assert "1 of 2 windows have no load" in " ".join(out.split())


def test_inspect_of_an_empty_load_says_so(tmp_path: Path, eplb: Commands) -> None:
    save_trace(Trace(np.zeros((1, 2, 4))), tmp_path / "zero.npz")
    assert "layers 0, 1 have no load" in eplb("inspect", str(tmp_path / "zero.npz"), status=1).out


def test_a_layout_without_layers_has_no_pairs() -> None:
    assert len(pairs_on_a_rank(ExpertLayout.trivial(0, 8, num_slots=12, topology=Topology(4)))) == 0


def test_inspect_finds_an_expert_twice_on_a_rank(pair: str, eplb: Commands) -> None:
    facts = eplb("inspect", pair, "--json", status=1).facts
    assert (facts["pairs_on_a_rank"], facts["digest"]) == (1, load_layout(pair).digest)
    assert "expert 0 on rank 0 of layer 0" in facts["faults"][0]
    assert fits_80_columns(eplb("inspect", pair, status=1).out.replace(pair, "pair.json"))


def test_inspect_of_a_sound_layout_is_well(layout: str, eplb: Commands) -> None:
    assert "none found" in eplb("inspect", layout).out


# ---- convert ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("l.npz", "eplb"),
        ("l.pt", "sglang"),
        ("l.json", "sglang"),
        ("l.json", "vllm-ascend"),
        ("l.yaml", "tensorrt-llm"),
    ],
)
def test_convert_goes_to_every_format_and_back(layout: str, tmp_path: Path, name: str, to: str, eplb: Commands) -> None:
    if name.endswith(".pt"):
        pytest.importorskip("torch", reason="torch writes .pt files")
    if name.endswith(".yaml"):
        pytest.importorskip("yaml", reason="PyYAML reads what is written")
    there, back = tmp_path / f"there-{name}", tmp_path / "back.json"
    eplb("convert", layout, str(there), "--to", to)
    eplb("convert", str(there), str(back), "--to", "eplb", "--ranks", "4", "--nodes", "2")
    assert load_layout(back) == load_layout(layout)


def test_convert_of_a_trace(trace: str, tmp_path: Path, eplb: Commands) -> None:
    eplb("convert", trace, str(tmp_path / "c.json"), "--to", "sglang", "--windows", ":2")
    assert load_trace(tmp_path / "c.json").load.shape == (2, 2, 16)
    eplb("convert", str(tmp_path / "c.json"), str(tmp_path / "t.npz"), "--to", "eplb", "--json")
    assert (
        "must be one of eplb, sglang for a trace"
        in eplb("convert", trace, str(tmp_path / "c.yaml"), "--to", "tensorrt-llm", status=2).err
    )


def test_convert_reads_and_writes_sglang_s_inline_json(layout: str, trace: str, tmp_path: Path, eplb: Commands) -> None:
    """What `--init-expert-location` takes on the command line, a map and a load."""
    inline = eplb("convert", layout, "-", "--to", "sglang").out
    assert json.loads(inline)["physical_to_logical_map"] == load_layout(layout).physical_to_logical_map.tolist()
    back = tmp_path / "back.json"
    eplb("convert", inline, str(back), "--to", "eplb", "--ranks", "4", "--nodes", "2")
    assert load_layout(back) == load_layout(layout)
    load = eplb("convert", trace, "-", "--to", "sglang").out
    eplb("convert", load, str(tmp_path / "t.npz"), "--to", "eplb")
    assert np.array_equal(load_trace(tmp_path / "t.npz").load, load_trace(trace).load)
    said = eplb("convert", '{"physical_to_logical_map": [[0, 1', str(back), "--to", "eplb", "--ranks", "2", status=2)
    assert said.err.startswith("eplb: inline JSON: expected JSON, found")
    for source in (layout, trace):
        assert "OUT (=-) must be a file with --to eplb" in eplb("convert", source, "-", "--to", "eplb", status=2).err


@pytest.mark.parametrize(
    "argv",
    [
        "convert LOAD OUT --to eplb",
        "plan LOAD --ranks 4 --slots 20",
        "simulate LOAD --ranks 4 --slots 20 --interval 1 --policy none",
    ],
)
def test_load_on_the_first_experts_alone_is_pointed_out(argv: str, tmp_path: Path, eplb: Commands) -> None:
    """Seen in public recordings; whoever converts or plans from one must hear of it."""
    load = np.random.default_rng(0).integers(1, 99, (2, 3, 16))
    load[:, 1, 2:] = 0
    np.save(tmp_path / "load.npy", load)
    names = {"LOAD": str(tmp_path / "load.npy"), "OUT": str(tmp_path / "t.npz")}
    said = eplb(*(names.get(word, word) for word in argv.split()))
    assert "note: layers 1 put all load on the first 2 of 16 experts" in said.err


def test_convert_refuses_what_a_format_cannot_say(pair: str, tmp_path: Path, eplb: Commands) -> None:
    assert (
        "rank 0 must not hold expert 0 twice at layer 0"
        in eplb("convert", pair, str(tmp_path / "m.json"), "--to", "vllm-ascend", status=2).err
    )


# ---- status and messages ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "match"),
    [
        (["inspect", "/nowhere/x"], "/nowhere/x: No such file or directory"),
        (["plan", "TRACE", "--slots", "20"], "give the ranks: --ranks R"),
        (
            ["plan", "TRACE", "--ranks", "4", "--nodes", "3", "--slots", "20"],
            "`num_nodes` (=3) must divide `num_ranks`",
        ),
        (["plan", "TRACE", "--rank-to-node", "0,2", "--slots", "20"], "node 1 has no rank"),
        (["plan", "TRACE", *PLACE, "--windows", "9:"], "--windows 9: takes none of the trace's 8 windows"),
        (["plan", "TRACE", "--nodes", "2", "--slots", "20"], "--nodes and --rank-speed need the ranks"),
        (["plan", "TRACE", "--rank-to-node", "0,1", "--nodes", "3", "--slots", "20"], "and `rank_to_node` (2 nodes)"),
        (["plan", "LAYOUT", *PLACE], "expected an expert load [L, E] or [T, L, E], found a layout"),
        (["convert", "LAYOUT", "/nowhere/l.json", "--to", "eplb"], "eplb: /nowhere: No such folder"),
        (["convert", "LAYOUT", "/", "--to", "eplb"], "eplb: /: Is a folder"),
        (["simulate", "TRACE", *PLACE, "--interval", "8"], "`interval` (=8) must be below the number of windows (=8)"),
        (["simulate", "TRACE", *PLACE, "--current", "PAIR", "--policy", "none"], "PAIR"),
        (["inspect", "TRACE", "--key", "nothing"], "an array `nothing`"),
    ],
)
def test_bad_numbers_and_files_end_with_status_2(
    argv: list[str], match: str, trace: str, layout: str, pair: str, eplb: Commands
) -> None:
    names = {"TRACE": trace, "LAYOUT": layout, "PAIR": pair}
    error = eplb(*(names.get(word, word) for word in argv), status=2).err
    assert names.get(match, match) in error
    assert error.splitlines()[-1].startswith("eplb: ")


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["fly"],
        ["plan", "t", "--ranks", "0", "--slots", "1"],
        ["plan", "t", "--ranks", "1e3", "--slots", "1"],
        ["plan", "t", "--ranks", "\N{SUPERSCRIPT TWO}", "--slots", "1"],
        ["plan", "t", "--ranks", "1", "--slots", "9" * 30],
        ["plan", "t", "--ranks", "1"],
        ["plan", "t", "--slots", "4", "--rank-speed", "a,b"],
        ["plan", "t", "--slots", "4", "--rank-to-node", "0,x"],
        ["plan", "t", "--slots", "4", "--windows", "3"],
        ["simulate", "t", "--slots", "4", "--policy", "none,best"],
        ["convert", "a", "b", "--to", "vllm"],
    ],
)
def test_wrong_usage_ends_with_status_2_and_the_usage(argv: list[str], eplb: Commands) -> None:
    said = eplb.exits(*argv).err
    assert "usage: eplb" in said
    assert "value: " not in said  # argparse's own words, which name a function and not what is wanted


@pytest.mark.parametrize("word", ["a\nb", "\x1b[2J", "\ud800", "x" * 5000])
@pytest.mark.parametrize(
    "argv", [["inspect", "t", "{}"], ["plan", "t", "--slots", "{}"], ["{}"], ["inspect", "{}"], ["convert", "t", "{}"]]
)
def test_words_that_a_user_gives_are_shown_in_one_printable_line(word: str, argv: list[str], eplb: Commands) -> None:
    said = eplb.exits(*(each.format(word) for each in argv)).err
    last = said.splitlines()[-1]
    assert said.replace("\n", "").isprintable()
    assert "eplb" in last
    assert len(last) < 2500


def test_names_in_files_are_shown_without_control_characters(tmp_path: Path, eplb: Commands) -> None:
    path = tmp_path / "map\x1b[2J.json"
    path.write_text(json.dumps({"physical_to_logical_map": [[0, 1]], "\x1b[2J": 1}))
    said = eplb("inspect", str(path), "--ranks", "2")
    assert "SGLang refuses the further keys \\x1b[2J" in said.err
    assert "\\x1b[2J.json" in said.out
    assert (said.out + said.err).replace("\n", "").isprintable()


@pytest.mark.slow
def test_processes_end_with_the_status_and_without_a_traceback(
    trace: str, layout: str, pair: str, tmp_path: Path
) -> None:
    hostile = tmp_path / "hostile.npz"
    hostile.write_bytes(b"PK\x03\x04" + os.urandom(300))
    for status, argv in (
        (0, ("inspect", layout)),
        (1, ("inspect", pair)),
        (2, ("inspect", str(hostile))),
        (2, ("plan",)),
    ):
        done = run(*argv)
        assert done.returncode == status, done.stderr
        assert "Traceback" not in done.stderr + done.stdout
    assert run("--version").stdout.startswith("eplb_core ")


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error(trace: str) -> None:
    read, write = os.pipe()
    os.close(read)
    done = run("inspect", trace, stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.slow
def test_output_that_cannot_be_written_ends_with_status_2_and_one_line(trace: str) -> None:
    for argv, redirection, said in (
        (["inspect", trace], ">/dev/full", "eplb: No space left on device\n"),
        (["inspect", "none"], "2>/dev/full", ""),
    ):
        done = in_shell(argv, redirection)
        assert (done.returncode, done.stderr) == (2, said)


@pytest.mark.slow
def test_names_that_the_terminal_cannot_show_are_escaped(tmp_path: Path) -> None:
    trace = tmp_path / "Last\u00e4nderung \u8ca0\u8377.npz"
    save_trace(Trace(demo_trace().load[:2, :2, :16], source="Gr\u00f6\u00dfe"), trace)
    for locale in ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"PYTHONIOENCODING": "latin-1"}):
        done = run("inspect", str(trace), env={**os.environ, **locale}, text=False)
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"faults          none found" in done.stdout


@pytest.mark.slow
def test_a_closed_output_is_no_error(trace: str) -> None:
    done = in_shell(["inspect", trace], ">&-")
    assert (done.returncode, done.stderr) == (0, "")


def test_top_k_ids_get_no_plan_unless_their_experts_are_given(tmp_path: Path, eplb: Commands) -> None:
    """They have the shape of a load `[windows, layers, experts]`."""
    path = str(tmp_path / "routed.npy")
    ids = np.argsort(np.random.default_rng(0).gumbel(size=(64, 2, 16)) + np.arange(16) / 8, axis=2)[:, :, -4:]
    np.save(path, ids.astype(np.uint8))
    for command in (["plan", path, *PLACE], ["simulate", path, *PLACE], ["inspect", path]):
        assert "--experts E --window-tokens N" in eplb(*command, status=2).err
    said = eplb("inspect", path, "--experts", "16", "--window-tokens", "8", "--json")
    assert (said.facts["windows"], said.facts["experts"], said.facts["top_k"]) == (8, 16, 4)
    assert "is taken for top-k ids" in said.err
    assert eplb("plan", path, *PLACE, "--experts", "16", "--json").facts["num_experts"] == 16
    assert eplb("inspect", path, "--holds", "load", "--json", status=0).facts["experts"] == 4


def test_several_traces_are_planned_for_by_their_weights(trace: str, tmp_path: Path, eplb: Commands) -> None:
    other = tmp_path / "other.npz"
    save_trace(Trace(load_trace(trace).load[:3, :, ::-1], layer_ids=(3, 4)), other)
    said = eplb("plan", "--trace", f"{trace}:3", "--trace", str(other), *PLACE, "--json")
    assert said.facts["trace"]["windows"] == 11
    assert "11 windows of 2 files: trace.npz x 3, other.npz" in said.err
    joined = np.concatenate([load_trace(trace).load * 3, load_trace(other).load])
    save_trace(Trace(joined, layer_ids=(3, 4)), tmp_path / "joined.npz")
    assert said.facts["digest"] == eplb("plan", str(tmp_path / "joined.npz"), *PLACE, "--json").facts["digest"]
    run = eplb("simulate", trace, "--trace", f"{other}:0.5", *PLACE, "--interval", "2", "--policy", "none", "--json")
    assert run.facts[0]["blocks"][-1]["end_window"] == 11
    for arguments in ([], ["--trace", f"{trace}:0"], ["--trace", f"{trace}:3x"], ["--trace", trace, "--trace", "gone"]):
        eplb("plan", *arguments, *PLACE, status=2)


def test_a_table_is_planned_for(tmp_path: Path, eplb: Commands) -> None:
    rows = [f"{layer},{expert},{layer + expert + 1}" for layer in range(2) for expert in range(16)]
    (tmp_path / "load.csv").write_text("\n".join(["layer,expert,tokens", *rows]))
    said = eplb("plan", str(tmp_path / "load.csv"), *PLACE, "--json")
    assert (said.facts["num_experts"], said.facts["trace"]["layers"]) == (16, 2)
    assert "a long table: experts in `expert`" in said.err


@pytest.mark.slow
def test_a_recording_that_is_read_bit_by_bit_gets_the_same_answers(trace: str, tmp_path: Path, eplb: Commands) -> None:
    load = load_trace(trace).load
    np.save(tmp_path / "load.npy", load)
    rows = [",".join(map(str, (*at, load[at]))) for at in np.ndindex(load.shape)]
    (tmp_path / "load.csv").write_text("\n".join(["window,layer,expert,tokens", *rows]))
    digest = eplb("plan", trace, *PLACE, "--json").facts["digest"]
    replay = ["--interval", "2", "--policy", "none,place", "--json"]
    digests = [run["digests"] for run in eplb("simulate", trace, *PLACE, *replay).facts]
    for path in (trace, str(tmp_path / "load.npy"), str(tmp_path / "load.csv")):
        said = eplb("plan", path, "--stream", *PLACE, "--json")
        assert said.facts["digest"] == digest
        assert "8 windows [2, 16] are read bit by bit" in said.err
        assert [run["digests"] for run in eplb("simulate", path, "--stream", *PLACE, *replay).facts] == digests
    for more in (["--windows", "0:2"], ["--trace", trace]):
        assert "--stream reads one" in eplb("plan", trace, "--stream", *more, *PLACE, status=2).err


def test_windows_of_a_long_recording_are_added_up_for_its_plan(tmp_path: Path) -> None:
    load = np.random.default_rng(0).multinomial(60, np.ones(4) / 4, size=(600, 2))
    np.save(tmp_path / "long.npy", load)
    made = added_up(stream_trace(tmp_path / "long.npy"), "long.npy")
    assert made.load.tolist() == load.reshape(200, 3, 2, 4).sum(axis=1).tolist()


def test_an_interrupt_ends_with_130(trace: str, monkeypatch: pytest.MonkeyPatch, eplb: Commands) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("eplb_core.cli.inputs.load_trace", interrupt)
    eplb("inspect", trace, status=130)


@pytest.mark.slow
def test_the_demo_explains_itself(eplb: Commands) -> None:
    out = eplb("demo").out
    assert fits_80_columns(out)
    for part in (
        "1. PLAN",
        "2. REPLAY",
        "The average rank works",
        "Take `auto`: on windows it had not seen,",
        "plan FILE --ranks R",
    ):
        assert part in " ".join(out.split())
    facts = eplb("demo", "--json").facts
    by_policy = {run["policy"]: run["total_balancedness"] for run in facts["simulate"]}
    assert by_policy["auto"] > by_policy["none"] + 0.1


def test_what_to_type_next_is_the_command_where_the_shell_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _program().endswith(("eplb_core", "eplb"))
    (tmp_path / "eplb").touch(0o755)
    assert _program() == "eplb"


def test_without_torch_what_needs_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eplb: Commands) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"logical_count": torch.ones(2, 3, 4)}, tmp_path / "recorder.pt")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "needs torch: pip install 'eplb-core[torch]'" in eplb("inspect", str(tmp_path / "recorder.pt"), status=2).err


def test_the_main_module_runs_nothing_when_it_is_imported() -> None:
    assert importlib.import_module("eplb_core.__main__").main is main


# ---- in words, and as a page ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_simulate_counts_seconds_of_hardware_and_writes_a_page(trace: str, tmp_path: Path, eplb: Commands) -> None:
    page = tmp_path / "report.html"
    options = ["--policy", "none,once,gated", "--interval", "2", "--dispatch", "weighted", "--window-passes", "50"]
    priced = [*options, "--hardware", "H200"]
    out = eplb("simulate", trace, *PLACE, *priced, "--report", str(page)).out
    assert "s of pauses" in out
    assert "of its memory" in out
    assert out.endswith(f"wrote   {page}\n")
    assert "<title>Replay of trace.npz</title>" in page.read_text()
    options = ["--policy", "none,once", "--interval", "2", "--windows", "3:8", "--report", str(page)]
    cut = eplb("simulate", trace, *PLACE, *options, "--about", "model=A<B")
    assert "\n5-6 " in cut.out
    text = page.read_text()
    assert '<th scope="row">model</th><td>A&lt;B</td>' in text
    assert "<td>5, numbered 3 to 7</td>" in text
    shown = unescape(re.sub("<[^>]*>", "", text.partition('id="decision">')[2].partition("</p>")[0]))
    assert " ".join(shown.split()) in " ".join(cut.out.replace("`", "").split())
    with pytest.raises(SystemExit):
        eplb("simulate", trace, *PLACE, "--about", "model")
    facts = eplb("simulate", trace, *PLACE, *priced, "--json").facts[1]
    assert facts["link_transfers"]["node"] + facts["link_transfers"]["network"] == facts["total_transfers"]
    assert facts["pass_s"] > 0
    assert facts["memory_bytes"] == 2 * 3 * 7168 * 2048


@pytest.mark.slow
def test_the_dimensions_of_the_model_are_given_or_said_to_be_assumed(trace: str, eplb: Commands) -> None:
    """FA4: every model was costed as DeepSeek-V3."""
    some = [*PLACE, "--policy", "none,place", "--interval", "2", "--hardware", "H200"]
    assumed = eplb("simulate", trace, *some, "--hidden", "512")
    assert "--intermediate and --dtype of the model not given: DeepSeek-V3's experts are assumed" in assumed.err
    assert "experts of 512 x 2048 at 1 byte a weight" in " ".join(assumed.out.split())
    given = eplb("simulate", trace, *some, "--hidden", "512", "--intermediate", "256", "--dtype", "bf16")
    assert "assumed" not in given.err
    assert "one node" not in given.err
    assert "their all-to-all, without attention, by H200" in " ".join(given.out.split())
    assert "experts of 512 x 256 at 2 bytes a weight" in " ".join(given.out.split())
    wide = eplb("simulate", trace, *some, "--ranks", "16", "--nodes", "1", "--slots", "16")
    assert "16 ranks are counted as one node, where H200 joins 8 (--nodes 2)" in wide.err
    alone = eplb("simulate", trace, *PLACE, "--hidden", "512", status=2)
    assert "--hardware NAME" in alone.err


PLANNED: dict[str, Any] = {
    "trace": {"windows": 8},
    "num_ranks": 4,
    "num_slots": 20,
    "before_is": "trivial",
    "windows_before": {"total": 0.6},
    "windows_after": {"total": 0.8},
    "bound": {"mean": 0.99},
    "pairs_before": 0,
}


@pytest.mark.parametrize(
    ("change", "said", "unsaid"),
    [
        (
            {},
            ["Worth it", "25% less", "80%", "60%", 'mode "quota"', "--current", "eplb simulate"],
            ["twice", "--slots"],
        ),
        ({"windows_after": {"total": 0.605}}, ["Hardly worth a move", "0.8% less"], ["--current", "simulate"]),
        ({"before_is": "current", "pairs_before": 3}, ["live layout", "twice", "3 times"], ["--current"]),
        ({"bound": {"mean": 0.7}}, ["exceeds 0.70", "--slots 24"], ["quota"]),
        ({"trace": {"windows": 1}}, ["Worth it"], ["quota", "simulate"]),
        ({"windows_before": {"total": float("nan")}}, ["no load"], ["Worth"]),
        (
            {"unseen": {"first_window": 4, "before": 0.6, "after": 0.7, "saved": 0.142}},
            ["Worth it: layers take 14.2% less", "windows 4-7", "windows 0-3 alone", "70% (60%", "25% less", "tokens"],
            ["if load stays"],
        ),
        (
            {"unseen": {"first_window": 4, "before": 0.6, "after": 0.59, "saved": -0.017}},
            ["Hardly worth a move", "1.7% more time on windows 4-7", "it is 25% less"],
            ["Worth it", "--current", "eplb simulate"],
        ),
    ],
)
def test_plan_says_in_words_what_it_found(change: dict[str, Any], said: list[str], unsaid: list[str]) -> None:
    text = conclude_plan({**PLANNED, **change})
    assert [word for word in said if word not in text] == []
    assert [word for word in unsaid if word in text] == []


def test_json_has_no_nan() -> None:
    value = {
        "a": np.float64("nan"),
        "b": [float("inf"), np.int64(3)],
        "c": np.array([1.0, np.nan]),
        4: ("x", None, True),
    }
    assert json.loads(to_json(value)) == {"a": None, "b": [None, 3], "c": [1.0, None], "4": ["x", None, True]}


@pytest.mark.slow
def test_looking_at_files_does_not_wait_for_the_compiler() -> None:
    code = "import sys, eplb_core.cli.main; print({'torch', 'numba', 'matplotlib', 'pandas'} & set(sys.modules))"
    assert python(code).stdout == "set()\n"
