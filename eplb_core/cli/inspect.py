"""`eplb inspect` and `eplb convert`: what a file holds, and the same in another format."""

from __future__ import annotations

import argparse
import textwrap
from typing import Any

import numpy as np

from eplb_core._arrays import FloatArray, add_up
from eplb_core._text import lines
from eplb_core.cli.inputs import note, note_faults, read_trace, to_json, topology_of
from eplb_core.files import formats
from eplb_core.files.formats import read_layout_file
from eplb_core.files.layout_file import LayoutFile
from eplb_core.metrics import pairs_on_a_rank
from eplb_core.trace import Trace


def inspect(arguments: argparse.Namespace) -> int:
    """`eplb inspect`: what a file holds; status 1 if it has faults."""
    if formats.is_layout_file(arguments.file):
        read = read_layout_file(arguments.file, topology=topology_of(arguments), num_experts=arguments.experts)
        note(*read.notes)
        facts = _layout_facts(arguments.file, read)
    else:
        facts = _trace_facts(read_trace(arguments))
    print(to_json(facts) if arguments.json else lines(_facts_text(facts)))
    return 1 if facts["faults"] else 0


def _layout_facts(path: str, read: LayoutFile) -> dict[str, Any]:
    layout, topology = read.layout, read.layout.topology
    pairs = pairs_on_a_rank(layout)
    faults = []
    if pairs:
        layer, rank, expert = pairs[0]
        faults.append(
            f"an expert is twice on one rank in {len(pairs)} places (first: expert {expert} on rank {rank} of layer "
            f"{layer}): such a slot takes no load off the rank"
        )
    return {
        "file": path,
        "holds": f"a layout, format {read.format}",
        "layers": layout.num_layers,
        "experts": layout.num_experts,
        "slots": layout.num_slots,
        "empty_slots": int((layout.physical_to_logical_map < 0).sum()),
        "ranks": topology.num_ranks,
        "nodes": topology.num_nodes,
        "slots_per_rank": layout.slots_per_rank,
        "most_replicas": int(layout.replica_count.max(initial=0)),
        "pairs_on_a_rank": len(pairs),
        "digest": layout.digest,
        "faults": faults,
    }


def _trace_facts(trace: Trace) -> dict[str, Any]:
    summed = add_up(trace.load).astype(np.float64)
    loaded = summed[summed.sum(axis=1) > 0]
    skew = loaded.max(axis=1) / loaded.mean(axis=1)
    spread = np.array([np.log(row[row > 0]).std() for row in loaded])
    return {
        "file": trace.path,
        "holds": f"a trace, format {trace.format}",
        "source": trace.source,
        "windows": trace.num_windows,
        "layers": trace.num_layers,
        "experts": trace.num_experts,
        "top_k": trace.top_k,
        "load_of_a_layer": float(loaded.sum(axis=1).mean()) if len(loaded) else 0.0,
        "max_over_mean": _low_mid_high(skew),
        "sigma_of_log": _low_mid_high(spread),
        "unused_experts": int((summed == 0).sum()),
        "faults": [fault.text for fault in trace.faults],
    }


def _low_mid_high(values: FloatArray) -> dict[str, float]:
    """Over layers."""
    if not values.size:
        return {}
    return {"least": float(values.min()), "median": float(np.median(values)), "most": float(values.max())}


def _facts_text(facts: dict[str, Any]) -> str:
    lines = []
    for name, value in facts.items():
        if name == "faults" or value is None or value == "":
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{word} {each:.2f}" for word, each in value.items()) + " over layers" if value else "-"
        elif isinstance(value, (int, float)):
            value = f"{value:,.0f}"
        lines += _wrapped(f"{name.replace('_', ' '):<16}", str(value))
    lines += _wrapped(f"{'faults':<16}", facts["faults"][0] if facts["faults"] else "none found")
    for fault in facts["faults"][1:]:
        lines += _wrapped(" " * 16, fault)
    return "\n".join(lines)


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, 80, initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False, break_on_hyphens=False
    )


# ---- convert ---------------------------------------------------------------------------------------------------------


def convert(arguments: argparse.Namespace) -> int:
    """`eplb convert`: another format for the same layout or trace."""
    facts: dict[str, Any] = {"source": arguments.file, "target": arguments.target, "to": arguments.to}
    if formats.is_layout_file(arguments.file):
        read = read_layout_file(arguments.file, topology=topology_of(arguments), num_experts=arguments.experts)
        note(*read.notes)
        formats.write_layout(read.layout, arguments.target, arguments.to, read.layer_ids)
        facts.update(holds="a layout", was=read.format, digest=read.layout.digest)
    else:
        trace = read_trace(arguments)
        note_faults(trace)
        formats.write_trace(trace, arguments.target, arguments.to)
        facts.update(holds="a trace", was=trace.format, shape=list(trace.load.shape))
    if arguments.target == formats.INLINE:
        return 0
    if arguments.json:
        print(to_json(facts))
    else:
        print(lines(f"wrote {facts['target']}: {facts['holds']}, {facts['was']} -> {facts['to']}"))
    return 0
