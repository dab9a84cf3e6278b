"""What several of the host's kernels need."""

from __future__ import annotations

from eplb_core._arrays import IntArray
from eplb_core._numba import inline_kernel


@inline_kernel
def group_slots(row: IntArray, starts: IntArray, by_expert: IntArray) -> None:
    """Sort slots by expert: those of e are `by_expert[starts[e]:starts[e + 1]]`, ascending; empty slots are left out.

    `starts` is `[E + 1]`, `by_expert` at least as long as `row`.
    """
    experts = starts.size - 1
    starts[:] = 0
    for slot in range(row.size):
        if row[slot] >= 0:
            starts[row[slot]] += 1
    end = 0
    for expert in range(experts):
        end += starts[expert]
        starts[expert] = end  # one past the run; the pass from the back makes it the run's start
    starts[experts] = end
    for slot in range(row.size - 1, -1, -1):
        if row[slot] >= 0:
            starts[row[slot]] -= 1
            by_expert[starts[row[slot]]] = slot
