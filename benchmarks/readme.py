"""Write the README's figures from the records in benchmarks/results.

    python -m benchmarks.placement --loads R1.npz --peer eplb.py --json benchmarks/results/placement.json
    python -m benchmarks.startup --json benchmarks/results/startup.json
    python -m benchmarks.over_time --peer eplb.py --json benchmarks/results/over_time.json
    python -m benchmarks.dispatch_gpu --json benchmarks/results/dispatch_gpu.json       # on a GPU
    python -m benchmarks.readme

A test holds the README to the records, so no figure in it is typed by hand.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import measure

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
SLOTS = 288
LEFT_OUT = ("effort 0.25", "effort 4", "effort 16", "elasticity_aware", "deepseek_vec", "given the old map")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; status 1 if the README is out of date")
    options = parser.parse_args(argv)
    readme = ROOT / "README.md"
    text = readme.read_text()
    new = rewritten(text)
    if not options.check:
        readme.write_text(new)
    elif new != text:
        print("README.md does not have the figures of benchmarks/results: python -m benchmarks.readme")
        return 1
    return 0


def rewritten(text: str) -> str:
    """The README with each part between two marks made anew."""
    parts = (
        ("placement", placement),
        ("over_time", over_time),
        ("dispatch_gpu", dispatch_gpu),
        ("moving_gpu", moving_gpu),
        ("startup", startup),
    )
    for name, make in parts:
        start, end = f"<!-- {name}: python -m benchmarks.readme -->\n", f"<!-- end of {name} -->"
        before, found, rest = text.partition(start)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"README.md must have the marks {start.strip()} and {end}")
        made = make(json.loads((RESULTS / f"{name}.json").read_text()))
        text = f"{before}{start}{made}\n{end}{after}"
    return text


def placement(record: dict[str, Any]) -> str:
    """A line a policy: slowest median and lowest balance over all loads, by number of ranks."""
    rows = [row for row in record["rows"] if row["slots"] == SLOTS and not row["policy"].endswith(LEFT_OUT)]
    ranks = list(dict.fromkeys(row["ranks"] for row in rows))
    table = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        cells = [policy]
        for number in ranks:
            here = [row for row in rows if (row["policy"], row["ranks"]) == (policy, number)]
            cells += [
                measure.milliseconds(max(row["times"]["median"] for row in here)),
                f"{min(row['total_balancedness'] for row in here):.3f}",
                str(max(row["pairs"] for row in here)),
            ]
        table.append(cells)
    head = ["policy", *(word for number in ranks for word in (f"{number} ranks: ms", "balance", "pairs"))]
    loads = {row["load"] for row in rows}
    generated = sum(name.startswith("generated") for name in loads)
    said = (
        f"The worst of {len(loads) - generated} recorded loads of DeepSeek-R1 (published with sgl-project/sglang issue "
        f"6017) and {generated} generated ones as uneven, 58 layers x 256 experts in {SLOTS} slots: slowest median, "
        "lowest total balancedness (sum of means over sum of maxima), most slots that hold an expert which their rank "
        f"has already. {_machine(record)}."
    )
    return f"{measure.table(head, table)}\n\n{_filled(said)}"


def over_time(record: dict[str, Any]) -> str:
    """A line a policy: balance on windows not seen yet, and transfers."""
    shown = ("old map", "EPLB", "FlashLB", "place, transfer_price=0.001", "transfer_price=0.00025")
    rows = [
        [
            row["policy"],
            f"{row['balancedness']:.4f}",
            f"{row['solved']:.4f}",
            f"{row['transfers']:,}",
            measure.milliseconds(row["median_s"]),
        ]
        for row in record["rows"]
        if row["policy"].endswith(shown) and not row["policy"].startswith(("128", "clairvoyant"))
    ]
    head = ["policy", "balance", "shares solved", "transfers", "CPU ms a call"]
    return f"{measure.table(head, rows)}\n\n{_machine(record)}."


def dispatch_gpu(record: dict[str, Any]) -> str:
    """Microseconds of the map and count of a layer, by tokens."""
    tokens = ("512", "4096", "16384")
    each = record["microseconds"]

    def times(name: str) -> str:
        return " / ".join(f"{each[name][number][0]:.1f}" for number in tokens)

    environment = record["environment"]
    static, weighted, quota = (times(f"{mode}: map + count") for mode in ("static", "weighted", "quota"))
    return _filled(
        "A layer's tokens mapped to slots and counted in a CUDA graph (`python benchmarks/dispatch_gpu.py`), "
        f"512 / 4,096 / 16,384 tokens x 8: {static} us with static tables, {weighted} with weighted shares, {quota} "
        f"with shares solved in each pass; torch operations take {times('torch: random replicas')} to map alone. "
        f"{environment['gpu']}, commit {environment['commit'][:9]}."
    )


def moving_gpu(record: dict[str, Any]) -> str:
    """Milliseconds of a decoding pass, by how experts move meanwhile."""
    names = {
        "off": "no moves",
        "asynchronous, batched, prefer overlap": "`Migrator`",
        "synchronous": "`move_experts`, on the thread of the passes",
        "temporary buffers and device synchronize": "temporary buffers and synchronize, as engines do",
    }
    rows = []
    for name, said in names.items():
        entry = record["ranks"]["by_rank"][0]["decode"][name]
        times = entry.get("moving", entry["all"])
        rows.append([said, *(f"{times[key]:.1f}" for key in ("p50", "p99", "worst")), str(entry["tokens_equal"])])
    head = ["ms a pass while 58 layers move", "p50", "p99", "worst", "tokens equal"]
    return f"{measure.table(head, rows)}\n\n{record['device']}, commit {record['environment']['commit'][:9]}."


def startup(record: dict[str, Any]) -> str:
    """What importing and the first call cost."""
    compiled, cached = record["place"]["compiled"], record["place"]["cached"]
    return _filled(
        f"`import eplb_core` (`python -m benchmarks.startup`) takes {1e3 * record['import']['import_s']:.0f} ms and "
        "brings neither torch nor the compiler. The "
        f"first `place` after an installation compiles for {compiled['first_s']:.0f} s. In later processes it loads "
        f"what was compiled: {cached['modules_s']:.1f} s of imports, {cached['first_s']:.2f} s for the first call, "
        f"{cached['second_s'] * 1e3:.1f} ms for the next. `eplb_core.warm_up()` does the first call's work ahead of "
        f"time. {_machine(record)}."
    )


def _machine(record: dict[str, Any]) -> str:
    environment = record["environment"]
    cpu = environment["cpu"].replace("(R)", "")
    return (
        f"Measured on one thread of {cpu}, {environment['cores']} cores, Python {environment['python']}, commit "
        f"{environment['commit'][:9]}"
    )


def _filled(text: str) -> str:
    return textwrap.fill(text, 120, break_on_hyphens=False)


if __name__ == "__main__":
    raise SystemExit(main())
