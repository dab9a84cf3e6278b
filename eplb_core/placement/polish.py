"""Last steps for solved shares on few slots: every change of one or two slots is judged by what it really reaches.

The search of `search/improve.py` lowers a sum over ranks of time^8. With few ranks that is not the largest time: it
leaves a slow rank idle although an expert could be split over it.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np

from eplb_core._arrays import BoolArray, FloatArray, IntArray, read_only
from eplb_core.placement.problem import Problem
from eplb_core.placement.score import score_rows
from eplb_core.placement.windows import Load

# No step is made for rounding; so many are made at most.
_SOME_GAIN, _MOST_STEPS = 1e-6, 32
# With more slots only one at a time is changed.
_FEW_TO_EXCHANGE = 24


def polish(problem: Problem, load: Load, asked: BoolArray, bound: FloatArray, p2l: IntArray) -> None:
    """Make the best change of one slot, or exchange of two, as long as there is one; `p2l` is changed in place."""
    for layer in np.flatnonzero(asked).tolist():
        one = load.windows[:, layer : layer + 1]
        reached = float(score_rows(problem, Load.of(one, load.weights), p2l[layer : layer + 1])[0])
        for _ in range(_MOST_STEPS):
            rows = _changes(problem, p2l[layer])
            if not len(rows) or reached >= bound[layer] - _SOME_GAIN:
                break
            windows = read_only(np.ascontiguousarray(np.repeat(one, len(rows), axis=1)))
            found = score_rows(problem, Load.of(windows, load.weights), rows)
            best = int(np.argmax(found))
            if not found[best] > reached + _SOME_GAIN:
                break
            reached, p2l[layer] = float(found[best]), rows[best]


def _changes(problem: Problem, row: IntArray) -> IntArray:
    """All rows that differ by one slot given to another expert, or by two that are exchanged, `[n, P]`."""
    stride = problem.stride
    slots = [p for p in range(row.size) if p % stride < problem.capacity[p // stride]]
    count = np.bincount(row[row >= 0], minlength=problem.num_experts)
    held = [set(rank.tolist()) for rank in row.reshape(-1, stride)]
    found: list[IntArray] = []
    for p in slots:
        if row[p] < 0 or count[row[p]] > 1:
            for e in range(problem.num_experts):
                if e not in held[p // stride]:
                    found.append(row.copy())
                    found[-1][p] = e
    for p, q in combinations(slots if len(slots) <= _FEW_TO_EXCHANGE else [], 2):
        e, f, a, b = int(row[p]), int(row[q]), p // stride, q // stride
        if a != b and e != f and (e < 0 or e not in held[b]) and (f < 0 or f not in held[a]):
            found.append(row.copy())
            found[-1][p], found[-1][q] = f, e
    return np.array(found, dtype=np.int64).reshape(len(found), row.size)
