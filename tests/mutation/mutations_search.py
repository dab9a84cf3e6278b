"""Changes to the search from a layout that a test must notice."""

from __future__ import annotations

INTERPRETED = True

SEARCH = "eplb_core/placement/_search.py"
PLACE = "eplb_core/placement/place.py"
TESTS = "tests/placement/test_search.py"
STEP = f"{TESTS}::test_a_step_is_the_best_of_the_fullest_rank"
END = f"{TESTS}::test_the_end_is_a_layout_within_the_budget_and_no_worse"
SHARES = f"{TESTS}::test_shares_by_sweeps_are_those_of_the_solver"

MUTATIONS = [
    # links: what the rank holds costs something
    (SEARCH, "            fetch[old[p], p // stride] = 0.0\n", "            pass\n", STEP),
    # links: the first holder's, not the cheapest one's
    (SEARCH, "for p in range(old.size if cheapest < dearest else 0):", "for p in range(0):", STEP),
    # exchange: onto a rank that has the expert
    (
        SEARCH,
        "pay[j] = fetch[e, others[j]] - fetch[e, full] if holds[e, others[j]] == 0 else _NEVER",
        "pay[j] = fetch[e, others[j]] - fetch[e, full]",
        f"{TESTS}::test_budgets_hold_where_there_is_much_to_do",
    ),
    # exchange: the other expert's transfer is free
    (
        SEARCH,
        "other_pay[s * n + j] = fetch[f, full] - fetch[f, r] if f >= 0 and holds[f, full] == 0 else _NEVER",
        "other_pay[s * n + j] = 0.0 if f >= 0 and holds[f, full] == 0 else _NEVER",
        END,
    ),
    # exchange: the other rank's pace is this one's
    (SEARCH, "y = other_time[t, j] + change * other_pace[j]", "y = other_time[t, j] + change * my_pace", STEP),
    # gift: a last replica is given away
    (SEARCH, "(f >= 0 and count[f] > 1)", "(f >= 0 and count[f] > 0)", END),
    # gift: beyond what a rank may fill
    (SEARCH, "(f < 0 and work.filled[r] < capacity[r])", "(f < 0)", END),
    # gift: what the other holders take on is forgotten
    (SEARCH, "burden[k] = debt[f] - burden[k] if f >= 0 else -power[r]", "burden[k] = -power[r]", STEP),
    # gift: no relief for the other holders
    (
        SEARCH,
        "for i in range(work.num_homes[e]):\n        r = work.homes[e, i]\n        less",
        "for i in range(1):\n        r = work.homes[e, i]\n        less",
        STEP,
    ),
    # budget: counted as if nothing was spent yet
    (
        SEARCH,
        "found = _best_exchange(full, weight, pace, price, budget[layer] - now, unit, found, row, work)",
        "found = _best_exchange(full, weight, pace, price, budget[layer], unit, found, row, work)",
        f"{TESTS}::test_budgets_hold_where_there_is_much_to_do",
    ),
    # the last row is taken, not the best on the way
    (SEARCH, "if net > kept_net + _SOME_GAIN:", "if True:", f"{TESTS}::test_steps_that_lead_down_are_not_kept"),
    # taking back: although nobody else holds the expert
    (
        SEARCH,
        "        if back < 0 and not others:\n            continue\n",
        "",
        f"{TESTS}::test_budgets_hold_where_there_is_much_to_do",
    ),
    # shares: a rank above the level gives what it never had
    (SEARCH, "part = max(level - time[t, r], 0.0) / pace[r]", "part = (level - time[t, r]) / pace[r]", SHARES),
    # lost experts do not count against the budget
    (
        PLACE,
        "np.maximum(price.budget - needed, 0.0)",
        "price.budget + 0.0 * needed",
        f"{TESTS}::test_lost_experts_come_first_and_count_against_the_budget",
    ),
]
