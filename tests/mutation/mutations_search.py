"""Changes to kernels, and to the way they are compiled, that a test must notice; tried with compilation."""

from __future__ import annotations

NUMBA = "eplb_core/_numba.py"
REFINE = "eplb_core/placement/pack/refine.py"
GIFT = "eplb_core/placement/search/gift.py"
TEST_NUMBA = "tests/test_numba.py"
TEST_REFINE = "tests/placement/pack/test_refine.py"
OPTIONS = f"{TEST_NUMBA}::test_every_kernel_lets_go_of_the_lock_is_cached_and_rounds_as_written"
STAMP = f"{TEST_NUMBA}::test_the_disk_cache_notices_a_change_in_a_called_kernels_file"
BOOKS = f"{TEST_REFINE}::test_a_long_search_keeps_its_books_and_never_ends_worse"
DRAW = f"{TEST_REFINE}::test_random_numbers_are_lehmers"
END = "tests/placement/search/test_improve.py::test_the_end_is_a_layout_within_the_budget_and_no_worse"

MUTATIONS = [
    (NUMBA, '"nogil": True', '"nogil": False', OPTIONS, "rule 10"),
    (NUMBA, "_cache_file._source_stamp = _stamp(", "_cache_file._unused = _stamp(", STAMP, "rule 5"),
    (REFINE, "48271", "16807", DRAW, "rule 5"),
    # a second replica on a rank
    (REFINE, "return ints[REPLICAS, e] == 1 or not holds(", "return True or not holds(", BOOKS, "rule 2"),
    # the last replica is given away
    (GIFT, "f >= 0 and count[f] > 1 and", "f >= 0 and count[f] > 0 and", END, "rule 1"),
]
