"""Few transfers against every layout that they reach: how far is `place(current=)` from the best within its budget?

    git worktree add ../before COMMIT && python -m benchmarks.few_transfers ../before -n 16 --json few_transfers.json

Problems are small enough to list every row: each rank holds up to S distinct experts. Current rows are any of these,
loads come from a small grid, 1 to 3 transfers may be made. A row is worth its balancedness less the price of its
transfers; the gap is what the answer is worth less than the best row. Each kind adds one thing to plain problems.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import eplb_core as eplb

KINDS = (
    "plain", "price", "min_gain", "speeds", "windows", "inactive", "links", "cost", "group", "first_copy", "weighted",
)  # fmt: skip
# Ranks, slots of each, experts.
SHAPES = ((2, 2, 3), (2, 2, 4), (2, 3, 4), (2, 3, 5), (3, 2, 3), (3, 2, 4), (3, 2, 5), (3, 2, 6), (3, 3, 4))
GRID = (0, 1, 2, 3, 5, 8, 13)
BATCH, PROBLEMS, QUICK = 250, 50_000, 500
EXACT = 1e-6

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Rules(NamedTuple):
    """What the problems of a batch have in common."""

    topology: eplb.Topology
    slots: int
    experts: int
    budget: int
    price: float
    options: dict[str, Any]


@cache
def every_row(ranks: int, slots: int, experts: int) -> Bools:
    """Who holds what in all rows `[N, R, E]`: up to so many slots a rank, every expert somewhere."""
    sets = [held for n in range(slots + 1) for held in combinations(range(experts), n)]
    one = np.array([[e in held for e in range(experts)] for held in sets])
    rows = one[np.array(list(product(range(len(sets)), repeat=ranks)))]
    covers: Bools = np.any(rows, axis=1)
    found: Bools = rows[np.all(covers, axis=1)]
    return found


def rules_of(kind: str, seed: int) -> Rules:
    """A shape, and what the kind adds."""
    random = np.random.default_rng([seed, KINDS.index(kind)])
    ranks, slots, experts = SHAPES[random.integers(len(SHAPES))]
    if kind == "inactive":
        ranks, slots, experts = SHAPES[random.integers(4, len(SHAPES))]
        experts = min(experts, 2 * slots)
    if kind in ("group", "first_copy"):
        ranks, slots, experts = ((2, 2, 4), (2, 3, 4), (4, 2, 4))[random.integers(3)]
    price = 0.0
    options: dict[str, Any] = {"min_gain": 0.0}
    topology = eplb.Topology(ranks)
    match kind:
        case "price":
            price = float(random.choice([0.01, 0.03, 0.1]))
        case "min_gain":
            options["min_gain"] = float(random.choice([0.01, 0.05, 0.2]))
        case "speeds":
            topology = eplb.Topology(ranks, rank_speed=random.choice([0.5, 1.0, 2.0], ranks))
        case "inactive":
            options["active_ranks"] = np.arange(ranks) != random.integers(ranks)
        case "links":
            options["max_rank_transfers"] = random.integers(-1, 2, (ranks, ranks))
        case "cost":
            price, options["transfer_cost"] = 0.03, random.choice([0.0, 1.0, 3.0], (ranks, ranks))
        case "group" | "first_copy":
            topology = eplb.Topology(ranks, num_nodes=2)
            options |= {"locality": kind, "num_groups": 2}
        case "weighted":
            options["dispatch"] = "weighted"
    return Rules(topology, slots, experts, int(random.integers(1, 4)), price, options)


def batch(kind: str, seed: int) -> Iterator[dict[str, Any]]:
    """Solve problems that share their rules; how far from the best each answer is."""
    rules, random = rules_of(kind, seed), np.random.default_rng([seed, len(KINDS)])
    rows = every_row(rules.topology.num_ranks, rules.slots, rules.experts)
    allowed = np.flatnonzero(obeys(rows, rules))
    starts = np.arange(len(rows)) if kind == "inactive" else allowed
    current = rows[random.choice(starts, BATCH)]
    count = int(random.integers(2, 4)) if kind == "windows" or (kind == "weighted" and seed % 2) else 1
    load = random.choice(GRID, (count, BATCH, rules.experts)).astype(np.float64)
    load[:, ~load.any(axis=(0, 2))] = 1.0
    placed = eplb.place(
        load,
        rules.topology,
        num_slots=rules.topology.num_ranks * rules.slots,
        current=layout_of(current, rules),
        max_transfers=rules.budget,
        transfer_price=rules.price,
        **rules.options,
    )
    p2l = placed.layout.physical_to_logical_map.reshape(BATCH, rules.topology.num_ranks, rules.slots)
    reached = (p2l[..., None] == np.arange(rules.experts)).any(axis=2)
    for layer in range(BATCH):
        best = best_within(rows[allowed], current[layer], load[:, layer], rules)
        if best is None:  # more was lost than the budget brings back
            continue
        mine = worth(reached[layer][None], current[layer], load[:, layer], rules)[0][0]
        moved = int((reached[layer] & ~current[layer]).sum())
        where = {"load": load[:, layer].tolist(), "current": p2l_of(current[layer], rules), "seed": seed}
        yield {
            "gap": best - float(mine),
            "within": moved <= rules.budget and obeys(reached[layer][None], rules)[0],
            **where,
        }


def obeys(rows: Bools, rules: Rules) -> Bools:
    """Nothing on ranks that are out, groups where they belong `[N]`."""
    used: Bools = np.any(rows[:, ~active_ranks(rules)], axis=(1, 2))
    fine: Bools = np.logical_not(used)
    locality = rules.options.get("locality", "none")
    if locality == "none":
        return fine
    groups = rows.reshape(len(rows), 2, -1, 2, rules.experts // 2)  # rows, nodes, ranks, groups, experts
    here: Bools = np.any(groups, axis=2)
    in_node: Bools = np.any(here, axis=3) if locality == "group" else np.all(here, axis=3)
    number = np.sum(in_node, axis=1)
    whole: Bools = np.all(number == 1 if locality == "group" else number > 0, axis=1)
    return fine & whole


def active_ranks(rules: Rules) -> Bools:
    given: Bools = rules.options.get("active_ranks", np.ones(rules.topology.num_ranks, np.bool_))
    return given


def worth(rows: Bools, current: Bools, load: Floats, rules: Rules) -> tuple[Floats, Floats]:
    """Balancedness less the price of the transfers, and the balancedness, of every row `[N]`."""
    balance = np.zeros(len(rows))
    known = load.sum(axis=1) > 0
    for window in load[known]:
        balance += balances(rows, window, rules) / known.sum()
    cost = rules.options.get("transfer_cost", np.ones((rows.shape[1],) * 2))
    least = np.where(current.T[:, :, None], cost[None], np.inf).min(axis=1).T  # [R, E]
    least = np.where(np.isinf(least), cost[~np.eye(len(cost), dtype=np.bool_)].max(), least)
    paid = ((rows & ~current) * least).sum(axis=(1, 2))
    return balance - rules.price * paid, balance


def balances(rows: Bools, window: Floats, rules: Rules) -> Floats:
    """Of each row, replicas sharing evenly or as is best: then a set of experts is on too few ranks `[N]`."""
    active = active_ranks(rules)
    speed = np.asarray(rules.topology.rank_speed) * active
    with np.errstate(divide="ignore", invalid="ignore"):
        if rules.options.get("dispatch") == "weighted":
            worst = np.zeros(len(rows))
            for some in product([False, True], repeat=rules.experts):
                if any(some):
                    worst = np.maximum(worst, window[list(some)].sum() / (rows[:, :, some].any(axis=2) @ speed))
        else:
            on = rows & active[:, None]
            share = on * (window / np.maximum(on.sum(axis=1), 1))[:, None, :]
            worst = np.max(np.where(active, share.sum(axis=2), 0.0) / np.where(active, speed, 1.0), axis=1)
    found: Floats = window.sum() / speed.sum() / worst
    return found


def best_within(rows: Bools, current: Bools, load: Floats, rules: Rules) -> float | None:
    """What the best row within the budget is worth; None if no row is within it."""
    rows = rows[(rows & ~current).sum(axis=(1, 2)) <= rules.budget]
    if len({*np.asarray(rules.topology.rank_speed).tolist()}) == 1:  # ranks that are alike leave no more slots empty
        rows = rows[rows.sum(axis=(1, 2)) >= current[active_ranks(rules)].sum()]
    value, balance = worth(rows, current, load, rules)
    stays = (rows == current).all(axis=(1, 2))
    if stays.any():
        rise = balance - balance[stays][0]
        value[~stays & (rise < max(rules.options["min_gain"], 1e-9))] = -np.inf
    for row in np.argsort(-value, kind="stable"):
        if is_sendable(rows[row], current, rules):
            return float(value[row])
    return None


def is_sendable(row: Bools, current: Bools, rules: Rules) -> bool:
    """Can each transfer have a sender such that no link carries more than it may?"""
    limit = rules.options.get("max_rank_transfers")
    if limit is None:
        return True
    for to in range(len(row)):
        received = np.flatnonzero(row[to] & ~current[to])
        ways = product(*(np.flatnonzero(current[:, e]) for e in received))
        room = np.where(limit[:, to] < 0, 99, limit[:, to])
        if not any((np.bincount(way, minlength=len(row)) <= room).all() for way in ways if way) and received.size:
            return False
    return True


def p2l_of(row: Bools, rules: Rules) -> list[int]:
    held = [[e for e in range(rules.experts) if e in np.flatnonzero(rank)] for rank in row]
    return [e for rank in held for e in [*rank, *[-1] * (rules.slots - len(rank))]]


def layout_of(rows: Bools, rules: Rules) -> eplb.ExpertLayout:
    return eplb.ExpertLayout([p2l_of(row, rules) for row in rows], rules.experts, topology=rules.topology)


def child(kind: str, first: int, last: int) -> None:
    """Print what the batches of some seeds come to, as JSON."""
    gaps, beyond, worst = [], 0, {"gap": -1.0}
    for seed in range(first, last):
        for problem in batch(kind, seed):
            gaps.append(problem["gap"])
            beyond += not problem.pop("within")
            worst = max(worst, problem, key=lambda each: each["gap"])
    gap = np.array(gaps)
    found = {
        "problems": gap.size,
        "sum": gap.sum(),
        "exact": int((gap < EXACT).sum()),
        "beyond": beyond,
        "worst": worst,
    }
    print(json.dumps(found))


def main(argv: Sequence[str] | None = None) -> int:
    from benchmarks import measure

    parser = measure.parser("few_transfers", __doc__, quick=f"{QUICK} problems of each kind")
    parser.add_argument("other", type=Path, nargs="?", help="a checkout to compare with")
    parser.add_argument("-n", type=int, default=1, help="processes")
    parser.add_argument("--problems", type=int, default=PROBLEMS, help="of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    options = parser.parse_args(argv)
    batches = -(-(QUICK if options.quick else options.problems) // BATCH)
    sides = {"before": options.other, "now": measure.ROOT}
    jobs = [
        (kind, side, first, min(first + 10, batches))
        for kind in options.kinds
        for side in sides
        if sides[side] is not None
        for first in range(0, batches, 10)
    ]

    def run(job: tuple[str, str, int, int]) -> dict[str, Any]:
        kind, side, first, last = job
        root = str(sides[side].resolve())
        command = (__file__, "--child", kind, str(first), str(last))
        found: dict[str, Any] = measure.json_of(*command, PYTHONPATH=root, EPLB_CORE_QUIET="1", NUMBA_NUM_THREADS="1")
        return found

    with ThreadPoolExecutor(options.n) as pool:
        parts = list(pool.map(run, jobs))
    rows = []
    for kind, side in dict.fromkeys((job[0], job[1]) for job in jobs):
        mine = [part for part, job in zip(parts, jobs, strict=True) if job[:2] == (kind, side)]
        number = sum(part["problems"] for part in mine)
        worst = max((part["worst"] for part in mine), key=lambda each: each["gap"])
        rows.append(
            {
                "kind": kind,
                "side": side,
                "problems": number,
                "mean_gap": sum(part["sum"] for part in mine) / number,
                "worst_gap": worst["gap"],
                "exact": sum(part["exact"] for part in mine) / number,
                "beyond": sum(part["beyond"] for part in mine),
                "worst": worst,
            }
        )
    fields = ("kind", "side", "problems", "mean_gap", "worst_gap", "exact", "beyond")
    print(measure.table(fields, [[str(measure.rounded(row[field])) for field in fields] for row in rows]))
    summary = [
        f"{row['kind']}, {row['side']}: mean gap {row['mean_gap']:.5f}, worst {row['worst_gap']:.3f}, best "
        f"{row['exact']:.2%} of {row['problems']:,}"
        for row in rows
    ]
    measure.write_json(options.json, {"summary": ["to the best within the budget:", *summary], "rows": rows})
    return int(any(row["beyond"] for row in rows if row["side"] == "now"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        raise SystemExit(main())
