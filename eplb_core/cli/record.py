"""`eplb record` and `eplb host`: keep the layout record of shared weights, keep the weights, look at a record."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from eplb_core._text import lines
from eplb_core.cli.inputs import note, to_json, topology_of
from eplb_core.files.formats import read_layout_file
from eplb_core.files.layout_file import LayoutFile
from eplb_core.loading.record.client import LayoutClient
from eplb_core.loading.record.file import open_record
from eplb_core.loading.record.record import LayoutRecord
from eplb_core.loading.record.server import LayoutServer
from eplb_core.loading.record.socket_path import SocketPlace


def add_to(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    command: Callable[..., argparse.ArgumentParser],
    topology_options: Callable[[argparse.ArgumentParser], None],
) -> None:
    """Add the commands to `eplb`'s."""
    record = commands.add_parser(
        "record", help="what shared weights hold", description="The layout record of weights that engines share."
    )
    parts = record.add_subparsers(metavar="WHAT", required=True)
    look = command(parts, "status", status, "show a record: layout, version, engines, a pending move")
    look.add_argument("socket", metavar="SOCKET", help="where the record or the weight host is served")
    keep = command(parts, "serve", serve, "keep a record for weights that another process keeps, until stopped")
    keep.add_argument("socket", metavar="SOCKET", help="where to listen")
    keep.add_argument("--layout", metavar="FILE", required=True, help="what the weights hold after loading")
    keep.add_argument("--experts", metavar="E", type=int, help="logical experts, where the file does not say")
    keep.add_argument("--state", metavar="FILE", help="keep the record here, for a restart of this process")
    keep.add_argument(
        "--memory", metavar="ID", default="", help="name of the weights' memory: the same one says it was kept"
    )
    topology_options(keep)

    share = command(commands, "host", host, "keep one rank's weights in memory for engines that come and go")
    share.add_argument("socket", metavar="SOCKET", help="where to listen")
    source = share.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--load", metavar="MODULE:FUNCTION", help="the engine's function(layout, rank) -> tensors by name, or a module"
    )
    source.add_argument(
        "--checkpoint", metavar="PATH", help="safetensors file or folder: its experts, as they are stored"
    )
    share.add_argument(
        "--template", metavar="NAME", help="with --checkpoint: how it names tensors; a family, or MODULE:TEMPLATE"
    )
    share.add_argument(
        "--layers", metavar="ID", type=int, nargs="+", help="with --checkpoint: the model's layer of each row"
    )
    share.add_argument(
        "--ignore",
        metavar="PATTERN",
        action="append",
        default=[],
        help="with --checkpoint: expert tensors to leave out",
    )
    share.add_argument(
        "--device", default="cpu", help="with --checkpoint: where to load, cpu or cuda (default: %(default)s)"
    )
    share.add_argument("--rank", metavar="R", type=int, required=True, help="EP rank to load")
    share.add_argument("--layout", metavar="FILE", help="what the slots hold after loading (default: no record)")
    share.add_argument("--experts", metavar="E", type=int, help="logical experts, where the file does not say")
    share.add_argument("--config", metavar="JSON", default="{}", help="what shapes the weights: JSON, or @FILE")
    share.add_argument("--state", metavar="FILE", help="keep the record here, to say after a restart who was attached")
    topology_options(share)


def status(arguments: argparse.Namespace) -> int:
    """`eplb record status`: 1 if nobody knows what the slots hold, 2 if nobody answers."""
    with LayoutClient(arguments.socket, "status", deadline=10.0, attach=False) as client:
        if client.error is not None:
            raise client.error
        if not client.connected:
            raise FileNotFoundError(f"nobody listens at {client.path}")
        facts: dict[str, Any] = {"socket": client.path, "record": client.found is not None, "weights": client.about}
        state = client.found
    if state is not None:
        facts |= {
            "version": state.version,
            "digest": state.digest,
            "layers": state.layout.num_layers,
            "experts": state.layout.num_experts,
            "slots": state.layout.num_slots,
            "ranks": state.layout.topology.num_ranks,
            "engines": list(state.engines),
            "followers": list(state.followers),
            "awaited": list(state.awaited),
            "pending": None if state.pending is None else str(state.pending),
            "non_followers": state.num_non_followers,
            "non_follower_names": list(state.non_followers),
            "dirty": state.dirty,
        }
    print(to_json(facts) if arguments.json else lines(_text(facts)))
    return 1 if facts.get("dirty") else 0


def _text(facts: dict[str, Any]) -> str:
    rows = [("socket", facts["socket"])]
    weights = facts["weights"]
    if weights:
        rows.append(("weights", f"{weights.get('tensors'):,} tensors, {weights.get('bytes'):,} bytes"))
    if not facts["record"]:
        return _table([*rows, ("record", "none is kept here")])
    names = facts["non_follower_names"]
    rows += [
        ("record", "nobody knows what the slots hold" if facts["dirty"] else f"version {facts['version']}"),
        ("digest", facts["digest"][:16]),
        ("layout", "{layers} layers, {experts} experts, {slots} slots on {ranks} ranks".format(**facts)),
        (
            "engines",
            ", ".join(name + " (follows)" * (name in facts["followers"]) for name in facts["engines"]) or "none",
        ),
        ("moving", facts["pending"] or "nothing"),
    ]
    if facts["awaited"]:
        rows.append(("waiting for", f"{', '.join(facts['awaited'])} to stop reading"))
    if facts["non_followers"]:
        rows.append(("not following", f"{facts['non_followers']}, so nothing may move: {', '.join(names)}"))
    if facts["dirty"]:
        rows.append(("because", f"{facts['dirty']}; restart the keeper of the weights and the engines that use them"))
    return _table(rows)


def _table(rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)} {value}" for name, value in rows)


def serve(arguments: argparse.Namespace) -> int:
    """`eplb record serve`: until SIGINT or SIGTERM."""
    layout = _read_layout(arguments).layout
    memory, state = arguments.memory, arguments.state
    place = SocketPlace(arguments.socket, state)  # first: nobody else writes the file from now on
    record = open_record(state, layout, memory=memory) if state else LayoutRecord(layout)
    if record.state.dirty:
        note(f"nobody knows what the slots hold: {record.state.dirty}")
    with LayoutServer(arguments.socket, record, state_file=state, memory=memory, place=place) as server:
        facts = {"ready": server.path, "version": record.version, "digest": record.digest}
        _run(facts, arguments.json)
    return 0


def host(arguments: argparse.Namespace) -> int:
    """`eplb host`: load, say that it is ready, and serve until SIGINT or SIGTERM."""
    from eplb_core.loading.sharing.host import WeightHost

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    read = None if arguments.layout is None else _read_layout(arguments)
    layout = None if read is None else read.layout
    config = _config(arguments.config)
    load = _function(arguments.load) if arguments.load is not None else _loader(arguments, read)
    with WeightHost(
        arguments.socket, load, config=config, layout=layout, rank=arguments.rank, state_file=arguments.state
    ) as served:
        facts = {"ready": served.path, "tensors": served.num_tensors, "bytes": served.num_bytes}
        _run(facts, arguments.json)
    return 0


def _run(facts: dict[str, Any], as_json: bool) -> None:
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    words = " ".join(f"{name} {value}" for name, value in facts.items())
    print(json.dumps(facts) if as_json else lines(words), flush=True)
    stopped.wait()


def _read_layout(arguments: argparse.Namespace) -> LayoutFile:
    read = read_layout_file(arguments.layout, topology=topology_of(arguments), num_experts=arguments.experts)
    note(*read.notes)
    return read


def _loader(arguments: argparse.Namespace, read: LayoutFile | None) -> Callable[..., Any]:
    """The library's own loader."""
    from eplb_core.loading.checkpoint.rank import load_rank

    if read is None:
        raise ValueError("--checkpoint needs --layout: it says which expert each slot holds")
    if arguments.template is None:
        raise ValueError("--checkpoint needs --template: how the checkpoint names its tensors")
    named = arguments.template
    template = _attribute(named, "--template", "MODULE:TEMPLATE") if ":" in named else named
    options = {"template": template, "ignore": arguments.ignore, "device": arguments.device}
    ids = tuple(arguments.layers or read.layer_ids)
    return lambda layout, rank: load_rank(arguments.checkpoint, layout, rank, layer_ids=ids, **options)


def _function(name: str) -> Callable[..., Any]:
    found = _attribute(name, "--load", "MODULE:FUNCTION")
    if not callable(found):
        raise ValueError(f"--load (={name}) must be a function")
    return found  # type: ignore[no-any-return]


def _attribute(name: str, option: str, form: str) -> Any:
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise ValueError(f"{option} (={name}) must be {form}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` has it
    module = importlib.import_module(module_name)
    if not hasattr(module, attribute):
        raise ValueError(f"{option}: module {module_name} has no {attribute!r}")
    return getattr(module, attribute)


def _config(text: str) -> dict[str, Any]:
    if text.startswith("@"):
        text = Path(text[1:]).read_text("utf-8")
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--config is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"--config (={text[:40]}) must be a JSON object")
    return config
