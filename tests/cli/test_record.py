"""`eplb record` and `eplb host` from a shell's view: readiness, status, signals, exit status."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from eplb_core import ExpertLayout, LayoutClient, LayoutRecord, LayoutServer, Topology, save_layout
from eplb_core.loading.record.state import RecordState
from tests.cli.commands import Commands

LAYOUT = ExpertLayout([[0, 1, 1, 0], [1, 0, 0, 1]], 2, topology=Topology(num_ranks=2))
LOADER = """
import torch
def load(layout, rank):
    return {"w": torch.full((2, 3), float(rank))}
"""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def path(tmp_path: Path) -> str:
    save_layout(LAYOUT, tmp_path / "layout.json")
    (tmp_path / "kestrel.py").write_text(LOADER)
    return str(tmp_path / "sock")


def start(stack: ExitStack, folder: Path, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    """The command in a process, and the line in which it says that it is ready."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "eplb_core", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment)
    stack.callback(process.kill)
    assert process.stdout is not None
    stack.callback(process.stdout.close)
    return process, process.stdout.readline()


def shown(out: str) -> dict[str, str]:
    """The rows that were printed, by name."""
    lines = out.splitlines()
    width = lines[0].index("/")
    return {line[:width].rstrip(): line[width:] for line in lines}


def test_status_shows_engines_the_move_and_who_does_not_follow(path: str, eplb: Commands, stack: ExitStack) -> None:
    state = RecordState(LAYOUT, version=3, non_followers=("old",), num_non_followers=1)
    server = stack.enter_context(LayoutServer(path, LayoutRecord.of_state(state)))
    stack.enter_context(LayoutClient(path, "kestrel"))
    rows = shown(eplb("record", "status", path).out)
    assert (rows["record"], rows["layout"]) == ("version 3", "2 layers, 2 experts, 4 slots on 2 ranks")
    assert (rows["engines"], rows["moving"]) == ("kestrel", "nothing")
    assert rows["not following"] == "1, so nothing may move: old"
    assert server.state is not None
    assert server.state.engines == ("kestrel",)


def test_status_shows_who_follows_and_whom_a_move_waits_for(path: str, eplb: Commands) -> None:
    record = LayoutRecord(LAYOUT)
    for engine in ("mover", "standby"):
        record.attach(engine)
    record.follow("standby", LAYOUT.digest)
    record.begin("mover", [1], 0)
    with LayoutServer(path, record):
        rows = shown(eplb("record", "status", path).out)
    assert rows["engines"] == "mover, standby (follows)"
    assert rows["moving"] == "the move of layer 1 by engine 'mover' from version 0"
    assert rows["waiting for"] == "standby to stop reading"


def test_status_of_a_dirty_record_is_1_and_says_why(path: str, eplb: Commands) -> None:
    with LayoutServer(path, LayoutRecord.of_state(RecordState(LAYOUT, dirty="it was dropped"))):
        text = eplb("record", "status", path, status=1).out
        assert "nobody knows what the slots hold" in text
        assert "because it was dropped; restart the keeper" in text
        assert eplb("record", "status", path, "--json", status=1).facts["dirty"] == "it was dropped"


def test_status_without_a_record_or_a_server(path: str, eplb: Commands) -> None:
    with LayoutServer(path, None):
        assert "record none is kept here" in eplb("record", "status", path).out
    assert f"eplb: nobody listens at {path}" in eplb("record", "status", path, status=2).err
    Path(path).mkdir()
    eplb("record", "status", path, status=2)


def test_status_of_somebody_elses_socket_says_so(path: str, eplb: Commands) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(path)
        other.listen()
        hangs_up = threading.Thread(target=lambda: other.accept()[0].close())
        hangs_up.start()
        assert f"eplb: the keeper at {path} " in eplb("record", "status", path, status=2).err
        hangs_up.join()


@pytest.mark.slow
def test_a_served_record_survives_its_keeper(path: str, tmp_path: Path, stack: ExitStack, eplb: Commands) -> None:
    arguments = ["record", "serve", path, "--layout", "layout.json", "--state", "state.json", "--memory", "m1"]
    keeper, ready = start(stack, tmp_path, *arguments, "--json")
    assert json.loads(ready) == {"ready": path, "version": 0, "digest": LAYOUT.digest}
    with LayoutClient(path, "a") as client:
        client.begin([0], 0)
        client.commit([0], [[1, 0, 0, 1]])
        keeper.kill()
        keeper.wait()
    keeper, ready = start(stack, tmp_path, *arguments)
    assert ready.startswith(f"ready {path} version 1 digest ")
    eplb("record", "serve", path, "--layout", str(tmp_path / "layout.json"), status=2)
    keeper.send_signal(signal.SIGTERM)
    assert keeper.wait(30) == 0
    assert not Path(path).exists()
    (tmp_path / "state.json").write_text('{"format": "eplb-record-1", "mem')
    keeper, _ = start(stack, tmp_path, *arguments)
    with LayoutClient(path, "b", attach=False) as client:
        assert client.found is not None
        assert "the record's file cannot be read" in client.found.dirty
    keeper.send_signal(signal.SIGTERM)
    assert keeper.wait(30) == 0


@pytest.mark.slow
def test_a_host_loads_by_the_engines_function_and_says_when_it_is_ready(
    path: str, tmp_path: Path, stack: ExitStack, eplb: Commands
) -> None:
    pytest.importorskip("torch", reason="a host keeps tensors")
    from eplb_core import attach_weights

    config = {"model": "kestrel-1"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = [path, "--load", "kestrel:load", "--layout", "layout.json", "--rank", "1", "--config", "@config.json"]
    process, ready = start(stack, tmp_path, "host", *arguments)
    assert ready == f"ready {path} tensors 1 bytes 24\n"
    with LayoutClient(path, "a") as client:
        tensors: dict[str, object] = {}
        attach_weights(client, tensors, config=config, layout=LAYOUT, rank=1).close()
        assert tensors["w"].tolist() == [[1.0] * 3] * 2  # type: ignore[attr-defined]
        assert "weights 1 tensors, 24 bytes\n" in eplb("record", "status", path).out
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0


@pytest.mark.slow
def test_a_host_loads_a_checkpoint_by_itself(path: str, tmp_path: Path, stack: ExitStack) -> None:
    """Nothing but flags: what an engine maps is what `load_checkpoint` would have put into its slots."""
    save_file = pytest.importorskip("safetensors.torch", reason="checkpoints are safetensors").save_file
    import torch

    from eplb_core import attach_weights

    names = {"w1": "w13", "w3": "w13", "w2": "w2"}
    tensors = {
        f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}.weight": torch.full(
            (4, 2), 100.0 * layer + 10 * expert + number
        )
        for layer in (5, 7)
        for expert in (0, 1)
        for number, part in enumerate(names)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    arguments = [path, "--checkpoint", "model.safetensors", "--template", "mixtral", "--layout", "layout.json"]
    process, ready = start(stack, tmp_path, "host", *arguments, "--rank", "1", "--config", '{"model": "tiny"}')
    assert ready == f"ready {path} tensors 4 bytes 384\n"
    with LayoutClient(path, "a") as client:
        found: dict[str, torch.Tensor] = {}
        stack.callback(attach_weights(client, found, config={"model": "tiny"}, layout=LAYOUT, rank=1).close)
    assert sorted(found) == ["layers.5.w13", "layers.5.w2", "layers.7.w13", "layers.7.w2"]
    for row, layer in enumerate((5, 7)):
        for slot, expert in enumerate(LAYOUT.physical_to_logical_map[row, 2:].tolist()):
            w13, w2 = found[f"layers.{layer}.w13"][slot], found[f"layers.{layer}.w2"][slot]
            base = 100.0 * layer + 10 * expert
            assert w13.tolist() == [[base] * 2] * 4 + [[base + 1] * 2] * 4
            assert w2.tolist() == [[base + 2] * 2] * 4
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--load json:__doc__", "--load (=json:__doc__) must be a function"),
        ("--load kestrel", "--load (=kestrel) must be MODULE:FUNCTION"),
        ("--load json:nothing", "--load: module json has no 'nothing'"),
        ("--load no_such_module_here:f", "No module named 'no_such_module_here'"),
        ("--load json:loads --config {", "--config is no JSON"),
        ("--load json:loads --config [1]", "--config (=[1]) must be a JSON object"),
        ('--load json:loads --config {"ep_rank":5}', "`config['ep_rank']` (=5) must be 0"),
        ("--checkpoint /nowhere/model", "--checkpoint needs --layout"),
        ("--checkpoint /nowhere/model --layout LAYOUT", "--checkpoint needs --template"),
        ("--checkpoint /nowhere/model --layout LAYOUT --template nobody", "`template` (='nobody') must be"),
        ("--checkpoint /nowhere/model --layout LAYOUT --template json:nothing", "--template: module json has no"),
        ("--checkpoint /nowhere/model --layout LAYOUT --template mixtral", "/nowhere/model"),
        ("", "one of the arguments --load --checkpoint is required"),
    ],
)
def test_a_host_that_cannot_start_says_why(path: str, arguments: str, said: str, eplb: Commands) -> None:
    pytest.importorskip("torch", reason="a host keeps tensors")
    words = arguments.replace("LAYOUT", str(Path(path).with_name("layout.json"))).split()
    assert said in eplb.exits("host", path, "--rank", "0", *words).err


def test_a_module_to_load_by_is_found_in_the_working_folder(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eplb: Commands
) -> None:
    """As with `python -m`, whose path begins there."""
    pytest.importorskip("torch", reason="a host keeps tensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "kestrel_of_here.py").touch()
    said = eplb("host", path, "--rank", "0", "--load", "kestrel_of_here:load", status=2).err
    assert "--load: module kestrel_of_here has no 'load'" in said
