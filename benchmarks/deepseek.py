"""`rebalance_experts` against DeepSeek's own code: the same answers, how much sooner?

    python -m benchmarks.deepseek --peer eplb.py --json deepseek.json

Wanted: 100 times faster where DeepSeek's needs 5 ms or more, at most 25 us a call elsewhere, conversions counted in.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import eplb_core as eplb
from benchmarks import measure, peers, traces

PEER_OPTIONS = ("--peers-dir", "--peer")
SHAPES = (
    # layers, experts, slots, groups, nodes, ranks
    (1, 4, 4, 1, 1, 2),
    (1, 8, 12, 1, 1, 4),
    (4, 12, 16, 4, 2, 8),
    (16, 32, 32, 1, 1, 32),
    (58, 8, 8, 1, 1, 8),
    (2, 64, 64, 8, 8, 8),
    (1, 128, 144, 1, 1, 16),
    (100, 8, 8, 1, 1, 2),
    (4, 128, 128, 1, 1, 2),
    (16, 128, 144, 1, 1, 144),
    (58, 256, 288, 1, 1, 288),
    (58, 256, 256, 8, 4, 256),
    (58, 256, 288, 8, 4, 32),
    (58, 256, 288, 1, 1, 32),
    (58, 256, 288, 1, 1, 72),
    (58, 256, 320, 1, 1, 64),
)
QUICK = 7
ASKED = 100.0
LONG_S, SHORT_S = 5e-3, 25e-6


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.parser("deepseek", __doc__, quick="small shapes, few calls")
    peers.add_options(parser)
    options = parser.parse_args(argv)
    measure.one_thread()
    theirs = None if options.peer is None else peers.deepseek_function(options.peer)
    if theirs is None:
        print("absent: DeepSeek EPLB: give --peer PATH/eplb.py")
    calls, budget = (20, 0.1) if options.quick else (200, 1.0)
    rows: list[list[str]] = []
    record: list[dict[str, Any]] = []
    for shape in SHAPES[: QUICK if options.quick else None]:
        layers, experts, *numbers = shape
        load = traces.generated_load(num_layers=layers, num_experts=max(experts, 16), seed=numbers[-1])[:, :experts]
        weight = torch.from_numpy(np.ascontiguousarray(load)).float()
        answer, our_times = measure.timed(
            partial(eplb.rebalance_experts, weight, *numbers), calls=calls, budget_s=budget
        )
        row = [str(shape)[1:-1], *our_times.columns]
        entry: dict[str, Any] = {"shape": shape, "ours": our_times._asdict()}
        if theirs is not None:
            their_call = partial(theirs, weight, *numbers)
            expected, their_times = measure.timed(their_call, calls=min(calls, 20), budget_s=budget)
            check_same(weight.numpy(), answer, expected, numbers[-1])
            ratio = their_times.minimum / our_times.minimum
            long = their_times.minimum >= LONG_S
            reached = ratio >= ASKED if long else our_times.minimum <= SHORT_S
            asked = f"{ASKED:g} x" if long else f"{SHORT_S * 1e3:g} ms"
            row += [measure.milliseconds(their_times.minimum), f"{ratio:.0f}", asked, "yes" if reached else "no"]
            entry |= {"theirs": their_times._asdict(), "ratio": ratio, "reached": reached}
        rows.append(row)
        record.append(entry)
    head = ["layers, experts, slots, groups, nodes, ranks", "first ms", "median ms", "min ms"]
    print(measure.table(head + (["theirs min ms", "x faster", "wanted", "reached"] if theirs else []), rows))
    lines = [f"rebalance_experts at {row[0]}: {row[2]} ms (median)" for row in rows[-1:]]
    if theirs is not None:
        lines.append(f"as fast as wanted on {sum(row[-1] == 'yes' for row in rows)} of {len(rows)} shapes")
        long_ratios = [entry["ratio"] for entry in record if entry["theirs"]["minimum"] >= LONG_S]
        if long_ratios:
            lines.append(
                f"{min(long_ratios):.0f} to {max(long_ratios):.0f} times DeepSeek's speed where that needs 5 ms or more"
            )
    print("\n" + "\n".join(lines))
    measure.write_json(options.json, {"summary": lines, "rows": record})
    return 0


def check_same(
    load: npt.NDArray[np.float32], ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...], ranks: int
) -> None:
    """Equal maps and counts; a layer may differ where loads tie exactly, if its ranks' loads are equal."""
    if not torch.equal(ours[2], theirs[2]):
        raise RuntimeError("replica counts differ from DeepSeek's")
    differ = (ours[0] != theirs[0]).any(dim=1).numpy()
    unit = load / ours[2].numpy()
    loads = [
        np.sort(np.take_along_axis(unit, p2l.numpy(), axis=1).reshape(len(load), ranks, -1), axis=2).sum(axis=2)
        for p2l in (ours[0], theirs[0])
    ]
    if differ.any() and not np.array_equal(loads[0][differ], loads[1][differ]):
        raise RuntimeError(f"maps differ from DeepSeek's on layers {np.flatnonzero(differ).tolist()}")


if __name__ == "__main__":
    raise SystemExit(main())
