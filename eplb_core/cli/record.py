"""`eplb record` and `eplb host`: keep the layout record of shared weights, keep the weights, look at a record."""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
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
    share = command(commands, "host", host, "keep one rank's weights in memory for engines that come and go")
    for part in (keep, share):
        part.add_argument("socket", metavar="SOCKET", help="where to listen")
        default = "" if part is keep else " (default: no record)"
        text = f"what the slots hold after loading{default}"
        part.add_argument("--layout", metavar="FILE", required=part is keep, help=text)
        part.add_argument("--experts", metavar="E", type=int, help="logical experts, where the file does not say")
        part.add_argument("--state", metavar="FILE", help="keep the record in this file; a restart reads it")
        topology_options(part)
    text = "name of the weights' memory: the same name after a restart says that it was kept"
    keep.add_argument("--memory", metavar="ID", default="", help=text)
    share.add_argument("--rank", metavar="R", type=int, required=True, help="EP rank to load")
    share.add_argument("--config", metavar="JSON", default="{}", help="what shapes the weights: JSON, or @FILE")
    source = share.add_mutually_exclusive_group(required=True)
    text = "the engine's function(layout, rank) -> tensors by name, or a module"
    source.add_argument("--load", metavar="MODULE:FUNCTION", help=text)
    text = "safetensors file or folder: its experts, as they are stored"
    source.add_argument("--checkpoint", metavar="PATH", help=text)
    own = share.add_argument_group("with --checkpoint")
    own.add_argument("--template", metavar="NAME", help="how it names tensors: a family, or MODULE:TEMPLATE")
    own.add_argument("--layers", metavar="ID", type=int, nargs="+", help="the model's layer of each row")
    own.add_argument("--ignore", metavar="PATTERN", action="append", default=[], help="expert tensors to leave out")
    own.add_argument("--device", default="cpu", help="where to load, cpu or cuda (default: %(default)s)")


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
            **{name: getattr(state, name) for name in ("engines", "followers", "awaited", "dirty")},
            "pending": None if state.pending is None else str(state.pending),
            "non_followers": state.num_non_followers,
            "non_follower_names": state.non_followers,
        }
    print(to_json(facts) if arguments.json else lines(_text(facts)))
    return 1 if facts.get("dirty") else 0


def _text(facts: dict[str, Any]) -> str:
    rows = {"socket": facts["socket"]}
    weights = facts["weights"]
    if weights:
        rows["weights"] = f"{weights.get('tensors'):,} tensors, {weights.get('bytes'):,} bytes"
    if not facts["record"]:
        rows["record"] = "none is kept here"
    else:
        dirty = facts["dirty"]
        engines = (name + " (follows)" * (name in facts["followers"]) for name in facts["engines"])
        rows |= {
            "record": "nobody knows what the slots hold" if dirty else f"version {facts['version']}",
            "digest": facts["digest"][:16],
            "layout": "{layers} layers, {experts} experts, {slots} slots on {ranks} ranks".format(**facts),
            "engines": ", ".join(engines) or "none",
            "moving": facts["pending"] or "nothing",
        }
        if facts["awaited"]:
            rows["waiting for"] = f"{', '.join(facts['awaited'])} to stop reading"
        if facts["non_followers"]:
            names = ", ".join(facts["non_follower_names"])
            rows["not following"] = f"{facts['non_followers']}, so nothing may move: {names}"
        if dirty:
            rows["because"] = f"{dirty}; restart the keeper of the weights and the engines that use them"
    width = max(map(len, rows))
    return "\n".join(f"{name.ljust(width)} {value}" for name, value in rows.items())


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
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
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
    return functools.partial(
        load_rank,
        arguments.checkpoint,
        template=template,
        layer_ids=tuple(arguments.layers or read.layer_ids),
        ignore=arguments.ignore,
        device=arguments.device,
    )


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
