"""`place` against the best there is, for ranks that differ in speed and in slots: all layouts, or a MILP.

    python -m benchmarks.optimal -n 16 --json optimal.json

Tiny problems are compared with every layout there is; mid-sized ones with a MILP (HiGHS, by scipy), which may stop at
its time limit: then with the best layout that it has found. Ranks that are alike fill every slot; others may leave some
empty. Gaps are differences of balancedness; where ours is the better one, 0. "even": replicas share equally.
"weighted": by the shares that balance best.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import eplb_core as eplb
from benchmarks import measure

Load = npt.NDArray[np.float64]
Masks = npt.NDArray[np.int64]

EFFORTS = (1.0, 10.0)
SPEEDS = (0.25, 0.5, 1.0, 2.0, 3.0)
MOST_LAYOUTS = 2_000_000


class Problem(NamedTuple):
    """One layer on ranks that may differ."""

    load: list[float]
    speed: list[float]
    slots: list[int]
    """Of each rank."""

    @property
    def alike(self) -> bool:
        """Ranks that are alike fill every slot: few engines can hold an empty one."""
        return len({*self.speed}) == 1 and max(self.slots) - min(self.slots) <= 1

    def balancedness(self, time: float) -> float:
        """Of a largest load / speed."""
        return sum(self.load) / sum(self.speed) / time

    def reached(self, dispatch: Any, effort: float) -> float:
        """By `place`."""
        topology = eplb.Topology(len(self.slots), rank_speed=self.speed)
        placed = eplb.place([self.load], topology, slots_per_rank=self.slots, dispatch=dispatch, effort=effort)
        return float(placed.balancedness[0])


class Found(NamedTuple):
    """One problem, solved both ways."""

    problem: Problem
    best: float
    """Balancedness."""
    proven: bool
    reached: dict[float, float]
    """By `place`, for each effort."""


HEAD = ("against", "ranks", "dispatch", "effort", "problems", "equal", "mean gap", "worst gap", "proven")


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.parser("optimal", __doc__, quick="a few problems of each kind")
    parser.add_argument("-n", "--processes", type=int, default=1)
    parser.add_argument("--tiny", type=int, default=2000, help="problems to try all layouts of")
    parser.add_argument("--mid", type=int, default=2000, help="problems for the MILP")
    parser.add_argument("--seconds", type=float, default=20.0, help="most time for one MILP")
    options = parser.parse_args(argv)
    if options.quick:
        options.tiny, options.mid, options.seconds = 20, 2, 2.0
    rows: list[list[dict[str, Any]]] = []
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        over: Callable[..., Iterator[Any]] = pool.imap if options.processes > 1 else map
        for alike in (False, True):
            tiny = list(tiny_problems(options.tiny, seed=1 + alike, alike=alike))
            for dispatch in ("even", "weighted"):
                work = [(problem, dispatch, 0.0) for problem in tiny]
                rows.append(rows_of("all layouts", alike, dispatch, list(over(gaps_to_all, work))))
        for alike in (False, True):
            mid = list(mid_problems(options.mid, seed=3 + alike, alike=alike))
            for dispatch in ("even", "weighted"):
                work = [(problem, dispatch, options.seconds) for problem in mid]
                rows.append(rows_of("MILP", alike, dispatch, list(over(gaps_to_milp, work))))
    flat = [row for pair in rows for row in pair]
    print(measure.table(HEAD, [[str(measure.rounded(row[name])) for name in HEAD] for row in flat]))
    lines = [
        f"{row['ranks']} ranks, {row['dispatch']}, effort {row['effort']:g}: of {row['problems']} ({row['against']}) "
        f"{row['equal']:.1%} equal, gap {row['mean gap']:.4f} on average, {row['worst gap']:.3f} at worst"
        for row in flat
    ]
    measure.write_json(options.json, {"summary": lines, "rows": flat})
    return 0


def rows_of(against: str, alike: bool, dispatch: str, found: Sequence[Found]) -> list[dict[str, Any]]:
    """A row for each effort: in how many problems the gap is nothing, its mean and its worst, and where that is."""
    rows = []
    for effort in EFFORTS if found else ():
        gaps = np.array([max(each.best - each.reached[effort], 0.0) for each in found])
        worst = found[int(np.argmax(gaps))]
        rows.append(
            {
                "against": against,
                "ranks": "equal" if alike else "unequal",
                "dispatch": dispatch,
                "effort": effort,
                "problems": len(found),
                "equal": float((gaps <= (1e-9 if dispatch == "even" else 1e-3)).mean()),
                "mean gap": float(gaps.mean()),
                "worst gap": float(gaps.max()),
                "proven": float(np.mean([each.proven for each in found])),
                "worst problem": worst.problem._asdict(),
            }
        )
    return rows


# ---- problems --------------------------------------------------------------------------------------------------------


def tiny_problems(count: int, *, seed: int, alike: bool) -> Iterator[Problem]:
    """Up to 6 experts on 4 ranks of 3 slots; ties, zeros and heavy tails."""
    rng = np.random.default_rng(seed)
    found = 0
    while found < count:
        experts, ranks, stride = int(rng.integers(2, 7)), int(rng.integers(2, 5)), int(rng.integers(1, 4))
        load = [
            rng.integers(1, 100, experts),
            np.round(rng.lognormal(3, 1.5, experts)) + 1,
            rng.integers(1, 6, experts),
            rng.integers(0, 3, experts) * rng.integers(1, 50, experts),
        ][int(rng.integers(4))]
        slots = rng.integers(1, stride + 1, ranks)
        if alike or rng.random() < 0.5:
            number = int(rng.integers(ranks * (stride - 1) + 1, ranks * stride + 1))
            slots = number // ranks + (np.arange(ranks) < number % ranks)
        speed = np.ones(ranks) if alike else rng.choice(SPEEDS, ranks)
        layouts = np.prod([len(masks(experts, int(most))) for most in slots], dtype=np.float64)
        if slots.sum() >= experts and slots.min() > 0 and load.any() and layouts <= MOST_LAYOUTS:
            found += 1
            yield Problem(load.astype(float).tolist(), speed.tolist(), slots.tolist())


def mid_problems(count: int, *, seed: int, alike: bool) -> Iterator[Problem]:
    """8 to 16 experts on 3 to 6 ranks, with some slots to spare."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        experts, ranks = int(rng.integers(8, 17)), int(rng.integers(3, 7))
        number = experts + int(rng.integers(1, 2 * ranks))
        slots = number // ranks + (np.arange(ranks) < number % ranks)
        if not alike:
            slots = np.maximum(slots + rng.integers(-1, 2, ranks), 1)
            slots[0] += max(experts - slots.sum(), 0)
        speed = np.ones(ranks) if alike else rng.choice(SPEEDS, ranks)
        load = np.round(rng.lognormal(3, rng.choice([0.5, 1.0, 1.5]), experts)) + 1
        yield Problem(load.tolist(), speed.tolist(), slots.tolist())


# ---- the best there is -----------------------------------------------------------------------------------------------


def gaps_to_all(work: tuple[Problem, str, float]) -> Found:
    """The best of all layouts, and what `place` reaches."""
    problem, dispatch, _ = work
    best = min(problem.balancedness(least_time(problem, weighted=dispatch == "weighted")), 1.0)
    return Found(problem, best, True, {effort: problem.reached(dispatch, effort) for effort in EFFORTS})


def masks(experts: int, most: int, *, full: bool = False) -> Masks:
    """Sets of at most `most` experts, as bits; `full`: of as many as can be."""
    largest = min(most, experts)
    chosen = [combinations(range(experts), size) for size in range(largest if full else 0, largest + 1)]
    return np.array([sum(1 << e for e in each) for sizes in chosen for each in sizes], dtype=np.int64)


def least_time(problem: Problem, *, weighted: bool) -> float:
    """Smallest largest load / speed over all layouts, by definition: which experts each rank holds."""
    load, speed = np.array(problem.load), np.array(problem.speed)
    experts = len(load)
    held: Masks = np.zeros((1, 0), dtype=np.int64)
    for most in problem.slots:
        sets = masks(experts, most, full=problem.alike)
        held = np.hstack([np.repeat(held, len(sets), axis=0), np.tile(sets, len(held))[:, None]])
    held = held[np.bitwise_or.reduce(held, axis=1) == (1 << experts) - 1]
    if not weighted:
        holds = held[:, :, None] >> np.arange(experts) & 1
        return float(((holds * (load / holds.sum(axis=1))[:, None, :]).sum(axis=2) / speed).max(axis=1).min())
    # By Hall: shares exist for a time where no set of experts has more load than its holders take in that time.
    worst = np.zeros(len(held))
    for chosen in range(1, 1 << experts):
        whole = load[[e for e in range(experts) if chosen >> e & 1]].sum()
        worst = np.maximum(worst, whole / ((held & chosen != 0) @ speed))
    return float(worst.min())


def gaps_to_milp(work: tuple[Problem, str, float]) -> Found:
    """The best layout that the MILP finds in its time, and what `place` reaches."""
    problem, dispatch, seconds = work
    time, proven = milp_time(problem, dispatch == "weighted", seconds)
    best = min(problem.balancedness(time), 1.0)
    return Found(problem, best, proven, {effort: problem.reached(dispatch, effort) for effort in EFFORTS})


def milp_time(problem: Problem, weighted: bool, seconds: float) -> tuple[float, bool]:
    """Smallest largest load / speed, and whether it is proven.

    even: one binary for each expert, rank and number of replicas. weighted: one for each expert and rank, and its load.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    load, speed = np.array(problem.load), np.array(problem.speed)
    experts, ranks = len(load), len(speed)
    counts = 1 if weighted else ranks
    held = np.arange(experts * ranks * counts).reshape(experts, ranks, counts)
    other = held.size + np.arange(experts * (ranks if weighted else counts)).reshape(experts, -1)
    top = held.size + other.size
    entries: list[tuple[int, int, float]] = []
    low: list[float] = []
    high: list[float] = []

    def add(terms: list[tuple[int, float]], least: float, most: float) -> None:
        entries.extend((len(low), column, value) for column, value in terms)
        low.append(least)
        high.append(most)

    for r in range(ranks):
        filled = min(problem.slots[r], experts) if problem.alike else 0
        add([(int(at), 1.0) for at in held[:, r].reshape(-1)], filled, problem.slots[r])
        if weighted:
            mine = [(int(other[e, r]), 1.0) for e in range(experts)]
        else:
            mine = [(int(held[e, r, c]), load[e] / (c + 1)) for e in range(experts) for c in range(counts)]
        add([*mine, (top, -speed[r])], -np.inf, 0)
    for e in range(experts):
        add([(int(at), 1.0) for at in other[e]], load[e] if weighted else 1, load[e] if weighted else 1)
        for c in range(counts):
            if not weighted:
                add([*((int(held[e, r, c]), 1.0) for r in range(ranks)), (int(other[e, c]), -(c + 1.0))], 0, 0)
            for r in range(ranks):
                limit = [(int(other[e, r]), 1.0), (int(held[e, r, 0]), -load[e])]
                add(limit if weighted else [(int(held[e, r, c]), 1.0), (int(other[e, c]), -1.0)], -np.inf, 0)
    row, column, value = zip(*entries, strict=True)
    cost, whole = np.zeros(top + 1), np.ones(top + 1)
    cost[top], whole[top] = 1.0, 0
    upper = np.ones(top + 1)
    upper[top] = np.inf
    if weighted:
        whole[held.size :], upper[held.size :] = 0, np.inf
    least = np.zeros(top + 1)
    least[top] = load.sum() / speed.sum()
    found = milp(
        cost,
        integrality=whole,
        bounds=Bounds(least, upper),
        constraints=LinearConstraint(coo_array((value, (row, column)), shape=(len(low), top + 1)).tocsr(), low, high),
        options={"time_limit": seconds, "mip_rel_gap": 1e-6},
    )
    return (np.inf, False) if found.x is None else (float(found.x[top]), found.status == 0)


if __name__ == "__main__":
    raise SystemExit(main())
