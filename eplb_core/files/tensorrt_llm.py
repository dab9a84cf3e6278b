"""TensorRT-LLM's files: the load-balancer YAML (both ways) and the folder of expert statistics.

The YAML that the engine takes is a few lines of plain mappings and lists of integers. It is read here by a parser for
exactly that, so the answer does not depend on a YAML package and nothing in a file can expand or run.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from eplb_core._arrays import IntArray
from eplb_core._text import plain
from eplb_core.files import reading as _files
from eplb_core.files.layout_file import LayoutFile, layout_of_map
from eplb_core.files.reading import PathLike, bad_file, reading
from eplb_core.files.sglang import full_map
from eplb_core.layout import ExpertLayout
from eplb_core.load import check_counts
from eplb_core.topology import Topology
from eplb_core.trace import Trace

_WANTED = "num_slots and initial_global_assignments {layer: [experts]} in plain YAML"
_MEND = "give a load-balancer file of TensorRT-LLM, or another kind of file"


# ---- load-balancer YAML ----------------------------------------------------------------------------------------------


def read_config(
    path: PathLike,
    *,
    topology: Topology | None = None,
    num_experts: int | None = None,
    layer_ids: Sequence[int] | None = None,
) -> LayoutFile:
    """Read a load-balancer YAML.

    Args:
        path: The file.
        topology: Ranks and nodes, which the file does not say.
        num_experts: Logical experts; default: the largest id and one more.
        layer_ids: Layers of the model that are wanted, in this order. One that the file does not cover (a draft layer)
            gets the trivial layout, and a note says so. Default: the file's.

    Raises:
        FileFormatError: Not such a file, or a row that is no valid layout of `num_slots` slots.
    """
    with reading(path, _WANTED, _MEND):
        top = _parse(_files.read_text(path))
        slots, rows = top.get("num_slots"), top.get("initial_global_assignments")
        if not isinstance(slots, int) or not isinstance(rows, dict) or not rows:
            raise bad_file(path, _WANTED, ", ".join(map(str, top)) or "nothing", _MEND)
        for layer, row in rows.items():
            if len(row) != slots:
                mend = "assignments of another number of slots cannot be cut to fit: plan again"
                raise bad_file(path, f"num_slots (={slots}) experts", f"{len(row)} at layer {layer}", mend)
        experts = num_experts if num_experts is not None else max(max(row) for row in rows.values()) + 1
        wanted = list(rows) if layer_ids is None else [int(layer) for layer in layer_ids]
        missing = [layer for layer in wanted if layer not in rows]
        trivial = [slot % max(experts, 1) for slot in range(slots)]
        p2l = np.array([rows.get(layer, trivial) for layer in wanted], dtype=np.int64).reshape(len(wanted), slots)
    notes: tuple[str, ...] = ()
    if missing:
        notes = (f"layers {', '.join(map(str, missing))} are not in the file and get the trivial layout",)
    return layout_of_map(
        path, p2l, topology=topology, num_experts=num_experts, format="tensorrt-llm", layer_ids=wanted, notes=notes
    )


def write_config(
    layout: ExpertLayout, path: PathLike, *, layer_ids: Sequence[int] = (), layer_updates_per_iter: int = 0
) -> None:
    """Write a load-balancer YAML.

    Args:
        layout: The layout.
        path: File to write.
        layer_ids: The model's number of each row; default 0..L-1.
        layer_updates_per_iter: Layers that the engine moves an iteration; 0 keeps this layout.

    Raises:
        ValueError: The layout has an empty slot.
    """
    p2l = full_map(layout, "the engine takes every entry for an expert")
    ids = list(layer_ids) or list(range(layout.num_layers))
    lines = [f"num_slots: {layout.num_slots}", "initial_global_assignments:"]
    lines += [f"  {int(layer)}: {row}" for layer, row in zip(ids, p2l.tolist(), strict=True)]
    lines.append(f"layer_updates_per_iter: {layer_updates_per_iter}")
    _files.write_atomic(path, ("\n".join(lines) + "\n").encode())


_TOKEN = re.compile(r"\s*(?:(-?\d+)|([\[\]{},:]))")
_KEY = re.compile(r"""(["']?)([A-Za-z_]\w*|-?\d+)\1\s*:(?:\s+(.*)|$)""", re.DOTALL)
_Value = int | str | list[int] | dict[int, list[int]]


def _parse(text: str) -> dict[str, _Value]:
    """The mapping in a text of plain YAML: scalars, lists of ints (block or flow), one mapping of them."""
    top: dict[str, _Value] = {}
    for key, inline, block in _entries(text.splitlines()):
        if key in top:
            raise ValueError(f"key {key} is there twice")
        top[key] = _value(inline, block)
    return top


def _entries(lines: Sequence[str]) -> list[tuple[str, str, list[str]]]:
    """Split at the lines of least indentation: key, what follows it, and the lines below that belong to it."""
    entries: list[tuple[str, str, list[str]]] = []
    indent = None
    for raw in lines:
        line = re.sub(r"(^|\s)#.*", "", raw).rstrip()
        if not line or line == "..." or (line == "---" and not entries):
            continue
        depth = len(line) - len(line.lstrip(" "))
        indent = depth if indent is None else indent
        found = _KEY.fullmatch(line.strip()) if depth == indent else None
        if found:
            entries.append((found[2], (found[3] or "").strip(), []))
        elif entries and depth >= indent:
            entries[-1][2].append(line)
        else:
            raise ValueError(f"line {plain(raw, 60)!r} is no plain `key: value`")
    return entries


def _value(inline: str, block: list[str]) -> _Value:
    """The value of a key: on its line, or in the lines below."""
    if inline[:1] in ("[", "{"):
        return _flow(" ".join([inline, *block]))
    if inline:
        if block:
            raise ValueError(f"line {plain(block[0], 60)!r} continues a plain value")
        return int(inline) if re.fullmatch(r"-?\d{1,18}", inline) else inline
    if block and block[0].lstrip().startswith("-"):
        return [_item(line) for line in block]
    if block and block[0].lstrip()[:1] in ("[", "{"):
        return _flow(" ".join(block))
    rows: dict[int, list[int]] = {}
    for key, below, more in _entries(block):
        row = _value(below, more)
        if not re.fullmatch(r"-?\d{1,18}", key) or int(key) in rows or not isinstance(row, list):
            raise ValueError(f"key {key} must be one layer number with a list of experts")
        rows[int(key)] = row
    return rows


def _item(line: str) -> int:
    found = re.fullmatch(r"\s*-\s+(-?\d{1,18})", line)
    if not found:
        raise ValueError(f"line {plain(line, 60)!r} is no `- expert`")
    return int(found[1])


def _flow(text: str) -> list[int] | dict[int, list[int]]:
    """`[1, 2]` or `{3: [1, 2], 4: [5]}`."""
    tokens, at = [], 0
    while text[at:].strip():
        found = _TOKEN.match(text, at)
        if not found:
            raise ValueError(f"{plain(text[at:], 40)!r} in a list of experts")
        tokens.append(found[1] or found[2])
        at = found.end()
    if tokens[0] == "[":
        row, end = _flow_list(tokens, 0)
        if end != len(tokens):
            raise ValueError(f"{tokens[end]!r} after the end of a list")
        return row
    rows: dict[int, list[int]] = {}
    at = 1
    while tokens[at] != "}":
        layer = int(tokens[at])
        if tokens[at + 1] != ":" or layer in rows:
            raise ValueError(f"layer {layer} must be there once, with a list")
        rows[layer], at = _flow_list(tokens, at + 2)
        at += tokens[at] == ","
    if at != len(tokens) - 1:
        raise ValueError(f"{tokens[at + 1]!r} after the end of a mapping")
    return rows


def _flow_list(tokens: list[str], at: int) -> tuple[list[int], int]:
    """The ints from `[` at `at` to its `]`, and the place after it."""
    if tokens[at] != "[":
        raise ValueError(f"{tokens[at]!r} where a list begins")
    end = tokens.index("]", at)
    inner = tokens[at + 1 : end]
    if any(token != "," for token in inner[1::2]):
        raise ValueError("a list of experts must be integers with commas between")
    return [int(token) for token in inner[::2]], end + 1


# ---- expert statistics -----------------------------------------------------------------------------------------------


def read_statistics(path: PathLike) -> Trace:
    """Read a folder of EXPERT_STATISTIC_PATH: `meta_info.json` and `rank*.safetensors` with keys `iteration_layer`.

    A window an iteration; the ranks' counts are summed.

    Raises:
        FileFormatError: Not such a folder; an iteration that lacks a layer; ranks that do not fit.
    """
    folder = Path(path)
    facts = _files.read_json(folder / "meta_info.json")
    with reading(path, "TensorRT-LLM's expert statistics", "record them again"):
        experts = int(facts["num_experts"])
        files = sorted(file for file in folder.iterdir() if re.fullmatch(r"rank\d+\.safetensors", file.name))
        if not files:
            raise bad_file(path, "rank*.safetensors beside meta_info.json", "none", "record them again")
        counts: dict[tuple[int, int], list[IntArray]] = defaultdict(list)
        for file in files:
            for name, row in _files.read_safetensors(file).items():
                if row.shape != (experts,):
                    raise bad_file(file, f"[{experts}] counts", f"{list(row.shape)} in {name}", "record them again")
                iteration, layer = (int(part) for part in name.split("_"))
                counts[iteration, layer].append(check_counts(row, name))
        iterations, layers = (sorted({key[axis] for key in counts}) for axis in (0, 1))
        for key in ((iteration, layer) for iteration in iterations for layer in layers):
            if len(counts.get(key, ())) != len(files):
                what = f"{len(counts.get(key, ()))} at iteration {key[0]}, layer {key[1]}"
                raise bad_file(path, f"{len(files)} ranks' counts", what, "leave that iteration out on every rank")
        load = np.array([[np.sum(counts[i, layer], axis=0, dtype=np.int64) for layer in layers] for i in iterations])
        return Trace(
            load.reshape(len(iterations), len(layers), experts),
            windows=tuple(f"iteration {iteration}" for iteration in iterations),
            layer_ids=tuple(layers),
            top_k=facts.get("num_experts_per_token"),
            path=os.fspath(path),
            format="tensorrt-llm-statistics",
            source="TensorRT-LLM expert statistics",
            notes=(f"counts of {len(files)} ranks were summed",),
        )
