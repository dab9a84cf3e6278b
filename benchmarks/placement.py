"""Placement of one window: `place` against the policies of others, same loads, same process, one thread.

    python -m benchmarks.placement --loads R1.npz --peer eplb.py --json placement.json

For every load and every number of ranks: is the map valid, how even does it make the load, how many pairs of one
expert on a rank, what must move from the trivial layout, and how long does it take. Then `place` with less and more
effort. Expert loads that ship are used always; `--loads` adds those of an .npz file of arrays `[L, E]` or `[T, L, E]`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import eplb_core as eplb
from benchmarks import measure, peers, traces
from benchmarks.measure import Times

Load = npt.NDArray[np.int64]

PEER_OPTIONS = ("--loads", "--peers-dir", "--peer")
SLOTS_PER_EXPERT = 9 / 8
SLOTS_PER_RANK = (9, 4)  # 256 experts: 32 ranks x 9 slots, 72 ranks x 4 slots
EFFORTS = (0.25, 1.0, 4.0, 16.0)
OURS = "eplb_core place"


class Row(NamedTuple):
    """One policy on one load and configuration."""

    load: str
    ranks: int
    slots: int
    policy: str
    times: Times
    total_balancedness: float
    pairs: int
    """Slots that hold an expert which another slot of the rank holds already."""
    transfers: int
    """Experts that ranks must receive from others."""
    gap: float | None
    """Ours: the proven upper limit of balancedness less what is reached, on the worst layer."""


def begin(name: str, about: str, argv: Sequence[str] | None) -> argparse.Namespace:
    """The options of a benchmark on recorded loads, beside the policies of others; one thread from here on."""
    parser = measure.parser(name, about, quick="small loads, few calls")
    parser.add_argument("--loads", type=Path, help=".npz of expert loads [L, E] or [T, L, E] (windows are summed)")
    parser.add_argument("--calls", type=int, default=50, help="timed calls of each, at most")
    parser.add_argument("--budget", type=float, default=2.0, help="seconds for the timed calls of each, at most")
    peers.add_options(parser)
    options = parser.parse_args(argv)
    if options.quick:
        options.calls, options.budget = 2, 0.1
    measure.one_thread()
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = begin("placement", __doc__, argv)
    policies: list[OurPolicy | peers.Policy] = [*ours(), *peers.load_all(options)]
    rows: list[Row] = []
    for name, load in loads(options.loads, options.quick):
        for per_rank in SLOTS_PER_RANK:
            slots = round(load.shape[1] * SLOTS_PER_EXPERT)
            ranks = slots // per_rank
            print(f"\n## {name}, {load.shape[0]} layers x {load.shape[1]} experts -> {slots} slots, {ranks} ranks\n")
            new = [measured(policy, name, load, slots, ranks, options) for policy in policies]
            print(measure.table(HEAD, [cells(row, new) for row in new]), flush=True)
            rows += new
    lines = summary(rows)
    print("\n" + "\n".join(lines))
    record = [{**row._asdict(), "times": row.times._asdict()} for row in rows]
    measure.write_json(options.json, {"summary": lines, "rows": record})
    return 0


def loads(path: Path | None, quick: bool) -> Iterator[tuple[str, Load]]:
    """Name and `[L, E]` of each load."""
    layers = 3 if quick else None
    if path is not None:
        with np.load(path, allow_pickle=False) as file:
            for key in file.files:
                if file[key].ndim in (2, 3):
                    whole = file[key].astype(np.int64)
                    yield key, (whole if whole.ndim == 2 else whole.sum(axis=0))[:layers]
    yield "generated prefill_in4096", traces.generated_load("prefill_in4096")[:layers]
    yield "generated decode_in500out1500", traces.generated_load("decode_in500out1500", seed=1)[:layers]
    yield "moe128 drift, windows 0 to 169", traces.drift_load()[:170].sum(axis=0)[:layers]


# ---- ours ------------------------------------------------------------------------------------------------------------


class OurPolicy(NamedTuple):
    """`place` with one effort, or the DeepSeek-identical mode."""

    name: str
    prepare: Callable[[Load, int, int], Callable[[], Any]]
    map_of: Callable[[Any], Load]


def ours() -> list[OurPolicy]:
    """`place` at each effort, the default first, and `rebalance_experts`."""
    policies = []
    for effort in sorted(EFFORTS, key=lambda effort: effort != 1.0):
        name = OURS if effort == 1.0 else f"{OURS}, effort {effort:g}"
        policies.append(OurPolicy(name, _preparer(effort), lambda answer: answer.layout.physical_to_logical_map))

    def identical(load: Load, slots: int, ranks: int) -> Callable[[], Any]:
        return lambda: eplb.rebalance_experts(load, slots, 1, 1, ranks)

    policies.append(OurPolicy("eplb_core rebalance_experts", identical, lambda answer: answer[0].numpy()))
    return policies


def _preparer(effort: float) -> Callable[[Load, int, int], Callable[[], Any]]:
    def prepare(load: Load, slots: int, ranks: int) -> Callable[[], Any]:
        topology = eplb.Topology(num_ranks=ranks)
        return lambda: eplb.place(load, topology, num_slots=slots, effort=effort)

    return prepare


# ---- one measurement -------------------------------------------------------------------------------------------------


def measured(
    policy: OurPolicy | peers.Policy, name: str, load: Load, slots: int, ranks: int, options: argparse.Namespace
) -> Row:
    """Quality first, then time, of one policy."""
    topology = eplb.Topology(num_ranks=ranks)
    old = eplb.ExpertLayout.trivial(*load.shape, num_slots=slots, topology=topology)
    gap = None
    if isinstance(policy, OurPolicy):
        answer, times = measure.timed(policy.prepare(load, slots, ranks), calls=options.calls, budget_s=options.budget)
        p2l = policy.map_of(answer)
        if hasattr(answer, "bound"):
            gap = float(np.nanmax(answer.bound - answer.balancedness))
    else:
        call = policy.prepare(load, slots, ranks, old.physical_to_logical_map)
        p2l, times = measure.timed(call, calls=options.calls, budget_s=options.budget)
    layout = eplb.ExpertLayout(p2l, load.shape[1], topology=topology)  # raises at what is no valid map
    return Row(
        name,
        ranks,
        slots,
        policy.name,
        times,
        eplb.total_balancedness(eplb.rank_load(layout, load)),
        pairs_on_a_rank(layout),
        int(eplb.transfers(old, layout).sum()),
        gap,
    )


def pairs_on_a_rank(layout: eplb.ExpertLayout) -> int:
    """Slots whose expert another slot of the same rank and layer holds already."""
    by_rank = np.sort(layout.physical_to_logical_map.reshape(-1, layout.slots_per_rank), axis=1)
    return int(np.count_nonzero((by_rank[:, 1:] == by_rank[:, :-1]) & (by_rank[:, 1:] >= 0)))


HEAD = ("policy", "first ms", "median ms", "min ms", "x ours", "total bal.", "pairs", "transfers", "bound - reached")


def cells(row: Row, of_this_load: Sequence[Row]) -> list[str]:
    """A line of the table."""
    base = next((other.times.minimum for other in of_this_load if other.policy == OURS), of_this_load[0].times.minimum)
    return [
        row.policy,
        *row.times.columns,
        f"{row.times.minimum / base:.1f}",
        f"{row.total_balancedness:.4f}",
        *(str(number) for number in (row.pairs, row.transfers)),
        "" if row.gap is None else f"{row.gap:.4f}",
    ]


def summary(rows: Sequence[Row]) -> list[str]:
    """A line for each policy: the worst of all loads at each number of ranks."""
    lines = ["slowest median and lowest total_balancedness of all loads, by number of ranks:"]
    width = max(len(row.policy) for row in rows)
    for policy in dict.fromkeys(row.policy for row in rows):
        parts = []
        for ranks in dict.fromkeys(row.ranks for row in rows):
            here = [row for row in rows if (row.policy, row.ranks) == (policy, ranks)]
            slowest = measure.milliseconds(max(row.times.median for row in here))
            parts.append(f"{ranks:3} ranks {slowest:>6} ms {min(row.total_balancedness for row in here):.4f}")
        lines.append(f"{policy:{width}}  {' | '.join(parts)}")
    gaps = [row.gap for row in rows if row.gap is not None and row.policy == OURS and row.slots == 9 * row.ranks]
    if gaps:
        lines.append(f"{OURS}: bound less reached at most {max(gaps):.4f} on any layer with 9 slots a rank")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
