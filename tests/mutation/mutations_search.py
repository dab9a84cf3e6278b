"""Changes to kernels, and to the way they are compiled, that a test must notice; tried with compilation."""

from __future__ import annotations

NUMBA = "eplb_core/_numba.py"
REFINE = "eplb_core/placement/pack/refine.py"
ANNEAL = "eplb_core/placement/affinity/anneal.py"
GIFT = "eplb_core/placement/search/gift.py"
CHAINS = "eplb_core/placement/search/chains.py"
TEST_CHAINS = "tests/placement/search/test_chains.py"
TEST_NUMBA = "tests/test_numba.py"
TEST_REFINE = "tests/placement/pack/test_refine.py"
OPTIONS = f"{TEST_NUMBA}::test_every_kernel_lets_go_of_the_lock_is_cached_and_rounds_as_written"
STAMP = f"{TEST_NUMBA}::test_the_disk_cache_notices_a_change_in_a_called_kernels_file"
BOOKS = f"{TEST_REFINE}::test_a_long_search_keeps_its_books_and_never_ends_worse"
DRAW = f"{TEST_REFINE}::test_random_numbers_are_lehmers"
ROUND = f"{TEST_CHAINS}::test_three_experts_go_round_where_two_do_not_help"
EVERY = f"{TEST_CHAINS}::test_no_row_within_the_budget_is_worth_more[{{}}]"
ANNEALED = "tests/placement/affinity/test_anneal.py::test_the_best_row_is_as_much_better_as_is_said"
END = "tests/placement/search/test_improve.py::test_the_end_is_a_layout_within_the_budget_and_no_worse"

MUTATIONS = [
    (NUMBA, '"nogil": True', '"nogil": False', OPTIONS, "rule 10"),
    (NUMBA, "_cache_file._source_stamp = _stamp(", "_cache_file._unused = _stamp(", STAMP, "rule 5"),
    (REFINE, "48271", "16807", DRAW, "rule 5"),
    # a second replica on a rank
    (REFINE, "return ints[REPLICAS, e] == 1 or not holds(", "return True or not holds(", BOOKS, "rule 2"),
    (ANNEAL, "or e == f or on[f, r] > 0:", "or e == f:", ANNEALED, "rule 2"),
    # the last replica is given away
    (GIFT, "f >= 0 and count[f] > 1 and", "f >= 0 and count[f] > 0 and", END, "rule 1"),
    # a chain beyond the budget, with an expert lost, over a link without room, twice on a rank
    (CHAINS, "fits = moved + missing <= allowed", "fits = moved + missing <= allowed + 1", ROUND, "rule 6"),
    (CHAINS, "fits and missing == 0 and stray < 0", "fits and stray < 0", EVERY.format("plain"), "rule 1"),
    (CHAINS, "if new[p] < 0:", "if new[p] < -1:", EVERY.format("links"), "rule 6"),
    (CHAINS, "if holds(row, r, stride, e) or (", "if (", EVERY.format("plain"), "rule 2"),
]
