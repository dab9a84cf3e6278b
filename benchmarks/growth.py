"""How time and memory of a placement grow with slots, ranks and layers.

    python -m benchmarks.growth --json growth.json

Each case runs in a process of its own, twice: the second call is reported, and the memory that the process held at most
above what it held before.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import eplb_core as eplb
from benchmarks import measure, traces

LAYERS, EXPERTS, RANKS, SLOTS = 61, 512, 1024, 4096
CASES = (
    # layers, experts, ranks, slots: all, then each number by itself
    (LAYERS, EXPERTS, RANKS, SLOTS),
    *((LAYERS, EXPERTS, 256, slots) for slots in (1024, 2048, 4096, 8192)),
    *((LAYERS, EXPERTS, ranks, SLOTS) for ranks in (64, 128, 512)),
    *((layers, EXPERTS, 256, SLOTS) for layers in (8, 15, 30)),
)
QUICK_CASES = ((2, 64, 8, 128),)


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.parser("growth", __doc__, quick="one small case")
    parser.add_argument("--plot", type=Path, help="a picture of time against P, R and L; needs matplotlib")
    parser.add_argument("--case", nargs=5, metavar=("FUNCTION", "L", "E", "R", "P"), help="one case, as JSON")
    options = parser.parse_args(argv)
    if options.case:
        print(json.dumps(one_case(options.case[0], *map(int, options.case[1:]))))
        return 0
    rows, record = [], []
    for case in QUICK_CASES if options.quick else CASES:
        for function in functions():
            result = in_own_process(function, case)
            seconds, peak, cells = result["second_s"], result["peak_bytes"], case[0] * case[3]
            memory = ["", ""] if peak is None else [f"{peak / 2**20:.1f}", f"{peak / cells:.0f}"]
            time_cells = [measure.milliseconds(seconds), f"{seconds / cells * 1e9:.0f}"]
            rows.append([function, *map(str, case), *time_cells, *memory, f"{result['total_balancedness']:.4f}"])
            record.append({"function": function, "case": case, **result})
    units = ("ms", "ns / (L P)", "peak MiB", "bytes / (L P)", "total bal.")
    head = ("function", "layers", "experts", "ranks", "slots", *units)
    print(measure.table(head, rows))
    lines = [
        f"growth: {row[0]} of {row[1]} x {row[2]} experts on {row[3]} ranks, {row[4]} slots: {row[5]} ms, {row[7]} MiB"
        for row in rows
    ]
    lines = lines[: len(functions())]
    print("\n" + "\n".join(lines))
    measure.write_json(options.json, {"summary": lines, "rows": record})
    if options.plot is not None:
        plot(record, options.plot)
    return 0


def plot(record: Sequence[dict[str, Any]], path: Path) -> None:
    """Time of a call against each number by itself, on logarithmic axes."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(10, 3.2), sharey=True, layout="constrained")
    marks = {"place": "o-", "rebalance_experts": "s--"}
    series = (
        ("slots P (R = 256, L = 61)", 3, (LAYERS, EXPERTS, 256, None)),
        ("ranks R (P = 4096, L = 61)", 2, (LAYERS, EXPERTS, None, SLOTS)),
        ("layers L (R = 256, P = 4096)", 0, (None, EXPERTS, 256, SLOTS)),
    )
    for axis, (label, column, like) in zip(axes, series, strict=True):
        for function in dict.fromkeys(row["function"] for row in record):
            rows = [
                row
                for row in record
                if row["function"] == function
                and all(want in (None, have) for want, have in zip(like, row["case"], strict=True))
            ]
            points = sorted((row["case"][column], row["second_s"] * 1e3) for row in rows)
            if points:
                axis.loglog(*zip(*points, strict=True), marks.get(function, "^:"), color="black", label=function)
        axis.set_xlabel(label)
        ticks = sorted({row["case"][column] for row in record})
        axis.set_xticks(ticks, map(str, ticks), fontsize=7)
        axis.minorticks_off()
        axis.grid(True, which="both", linewidth=0.3)
    axes[0].set_ylabel("ms a call")
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=120)


def functions() -> dict[str, Callable[[Any, int, int], Any]]:
    """Name and function from load, ranks and slots to a map `[L, P]`."""

    def identical(load: Any, ranks: int, slots: int) -> Any:
        return eplb.rebalance_experts(load, slots, 1, 1, ranks)[0].numpy()

    def placed(load: Any, ranks: int, slots: int) -> Any:
        return eplb.place(load, eplb.Topology(ranks), num_slots=slots).layout.physical_to_logical_map

    return {"place": placed, "rebalance_experts": identical}


def in_own_process(function: str, case: tuple[int, int, int, int]) -> dict[str, Any]:
    """`one_case` in a fresh interpreter."""
    command = [sys.executable, "-m", "benchmarks.growth", "--case", function, *map(str, case)]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def one_case(function: str, layers: int, experts: int, ranks: int, slots: int) -> dict[str, Any]:
    """First and second call, the peak of memory, and the balance reached."""
    measure.one_thread()
    call = functions()[function]
    load = traces.generated_load(num_layers=layers, num_experts=experts)
    call(load[:1, :16].copy(), 4, 32)  # loads or compiles the kernels
    before = forget_peak()
    start = time.perf_counter()
    call(load, ranks, slots)
    first = time.perf_counter() - start
    peak = None if before is None else status_bytes("VmHWM") - before
    start = time.perf_counter()
    p2l = call(load, ranks, slots)
    second = time.perf_counter() - start
    layout = eplb.ExpertLayout(p2l, experts, topology=eplb.Topology(num_ranks=ranks))
    balance = eplb.total_balancedness(eplb.rank_load(layout, load))
    return {"first_s": first, "second_s": second, "peak_bytes": peak, "total_balancedness": balance}


def forget_peak() -> int | None:
    """Start a new peak of resident memory and return what is resident now; None where the system cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return status_bytes("VmRSS")


def status_bytes(field: str) -> int:
    """A line of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(np.int64(line.split()[1])) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


if __name__ == "__main__":
    raise SystemExit(main())
