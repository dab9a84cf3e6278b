"""Same input, same bytes: in any process, with any hash seed and number of threads, and from many threads at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from eplb_core import Placement, Topology, place
from tests.processes import python

PROGRAM = """
import hashlib, sys
import numpy as np
from eplb_core import Topology, place
sha = hashlib.sha256()
load = np.random.default_rng(7).lognormal(3, 1.5, (4, 24)).round()
topology = Topology(rank_to_node=[0, 0, 0, 1, 1], rank_speed=[1, 1, 2, 1, 3])
for locality in ("none", "group", "first_copy"):
    groups = None if locality == "none" else 4
    for where in (topology, Topology(6, 2)):
        first = place(load, where, num_slots=35, locality=locality, num_groups=groups)
        second = place(load[::-1], where, num_slots=35, locality=locality, num_groups=groups, current=first.layout)
        for placement in (first, second):
            sha.update(placement.layout.digest.encode())
            for array in (placement.balancedness, placement.bound, placement.transfers):
                sha.update(array.tobytes())
print(sha.hexdigest())
"""


@pytest.mark.slow
def test_processes_agree_whatever_their_hash_seed_and_threads() -> None:
    digests = {
        python(PROGRAM, PYTHONHASHSEED=seed, NUMBA_NUM_THREADS=threads, OMP_NUM_THREADS=threads).stdout
        for seed, threads in (("0", "1"), ("4242", "2"))
    }
    assert len(digests) == 1


@pytest.mark.slow
def test_threads_agree_with_one_alone() -> None:
    rng = np.random.default_rng(11)
    loads = [rng.lognormal(4, 1, (6, 64)) for _ in range(12)]

    def solve(load: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> Placement:
        return place(load, Topology(8), num_slots=80, effort=4)

    alone = [solve(load).layout.digest for load in loads]
    with ThreadPoolExecutor(4) as threads:
        together = [placement.layout.digest for placement in threads.map(solve, loads)]
    assert together == alone


def test_the_global_random_state_is_neither_read_nor_advanced() -> None:
    answers = []
    for seed in (1, 2):
        np.random.seed(seed)  # noqa: NPY002  the one under test
        before = np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
        answers.append(place([[5, 4, 3, 2, 1, 1]], Topology(3), num_slots=7, effort=16).layout)
        assert np.random.get_state()[1].tolist() == before  # type: ignore[index]  # noqa: NPY002
    assert answers[0] == answers[1]
