"""Changes to the search from a layout that a test must notice."""

from __future__ import annotations

INTERPRETED = True

SEARCH = "eplb_core/placement/search/improve.py"
EXCHANGE = "eplb_core/placement/search/exchange.py"
GIFT = "eplb_core/placement/search/gift.py"
WORK = "eplb_core/placement/search/state.py"
LINKS = "eplb_core/placement/search/links.py"
WIDEN = "eplb_core/placement/search/widen.py"
MEND = "eplb_core/placement/search/mend.py"
PLACE = "eplb_core/placement/place.py"
FROM = "eplb_core/placement/from_current.py"
TESTS = "tests/placement/search/test_improve.py"
TEST_WIDEN = "tests/placement/search/test_widen.py"
TEST_LINKS = "tests/placement/search/test_links.py"
STEP = f"{TESTS}::test_a_step_is_the_best_of_the_fullest_rank"
END = f"{TESTS}::test_the_end_is_a_layout_within_the_budget_and_no_worse"
SHARES = f"{TESTS}::test_shares_by_sweeps_are_those_of_the_solver"
LIMITS = f"{TEST_LINKS}::test_no_link_carries_more_than_its_limit"
GROUPS = "tests/placement/test_place_properties.py::test_groups_stay_where_they_are_while_experts_move"

MUTATIONS = [
    # links: what the rank holds costs something
    (SEARCH, "            fetch[old[p], p // stride] = 0.0\n", "            pass\n", STEP),
    # links: the first holder's, not the cheapest one's
    (SEARCH, "for p in range(old.size if links.cheapest < links.dearest else 0):", "for p in range(0):", STEP),
    # exchange: onto a rank that has the expert
    (
        EXCHANGE,
        "pay[j] = fetch[e, others[j]] - fetch[e, full] if holds[e, others[j]] == 0 else NEVER",
        "pay[j] = fetch[e, others[j]] - fetch[e, full]",
        f"{TESTS}::test_budgets_hold_where_there_is_much_to_do",
        "rule 2",
    ),
    # exchange: the other expert's transfer is free
    (
        EXCHANGE,
        "other_pay[s * n + j] = fetch[f, full] - fetch[f, r] if f >= 0 and holds[f, full] == 0 else NEVER",
        "other_pay[s * n + j] = 0.0 if f >= 0 and holds[f, full] == 0 else NEVER",
        STEP,
    ),
    # exchange: the other rank's pace is this one's
    (EXCHANGE, "y = other_time[t, j] + change * other_pace[j]", "y = other_time[t, j] + change * my_pace", STEP),
    # gift: a last replica is given away
    (GIFT, "f >= 0 and count[f] > 1 and", "f >= 0 and count[f] > 0 and", END, "rule 1"),
    # gift: beyond what a rank may fill
    (GIFT, "(f < 0 and work.filled[r] < capacity[r])", "(f < 0)", END),
    # gift: what the other holders take on is forgotten
    (GIFT, "burden[k] = debt[f] - burden[k] if f >= 0 else -power[r]", "burden[k] = -power[r]", STEP),
    # gift: no relief for the other holders
    (
        GIFT,
        "for i in range(work.num_homes[e]):\n        r = work.homes[e, i]\n        less",
        "for i in range(1):\n        r = work.homes[e, i]\n        less",
        STEP,
    ),
    # budget: counted as if nothing was spent yet
    (
        SEARCH,
        "                left = budget[layer] - moved\n",
        "                left = budget[layer]\n",
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
    (WORK, "part = max(level - time[t, r], 0.0) / pace[r]", "part = (level - time[t, r]) / pace[r]", SHARES),
    (
        WORK,
        "abs(part - share[t, spot[i]]) * pace[r])",
        "abs(part - share[t, spot[i]]))",
        "tests/placement/test_place.py::test_units_of_load_and_speed_change_nothing",
    ),
    # lost experts do not count against the budget
    (
        FROM,
        "np.maximum(terms.budget - needed, 0)",
        "terms.budget + 0 * needed",
        f"{TESTS}::test_lost_experts_come_first_and_count_against_the_budget",
    ),
    # a budget counts what transfers cost, not how many they are
    (
        EXCHANGE,
        "moves = held[e, full] - held[e, r] + held[f, r] - held[f, full]",
        "moves = int(pay[m % n] + other_pay[m])",
        f"{TEST_LINKS}::test_a_budget_counts_experts_whatever_they_cost",
    ),
    # links: a full one is used, a booked one stays free, a step that was only tried stays booked
    (LINKS, "            and links.rank_room[r, to] > 0\n", "", LIMITS),
    (LINKS, "            and links.node_room[links.node[r], links.node[to]] > 0\n", "", LIMITS),
    (
        LINKS,
        "        links.rank_room[sender, to] -= number\n",
        "",
        f"{TEST_LINKS}::test_a_link_that_is_used_up_ends_the_search",
    ),
    (LINKS, "    book(to_there, r, -1, links)\n", "", LIMITS),
    # links: not the cheapest with room
    (
        LINKS,
        "(best < 0 or links.cost[r, to] < links.cost[best, to])",
        "best < 0 and (to == 0 or links.rank_room[0, to] > 0)",
        f"{TEST_LINKS}::test_an_expert_comes_over_the_link_that_has_room_not_only_the_cheapest",
    ),
    # links: senders stay behind when slots change places inside a rank
    (FROM, "        follow(found, near, ranks, senders)\n", "        pass\n", LIMITS),
    # links: the new solution is taken although it does not fit them
    (FROM, "            pays &= (booked >= 0).sum(axis=1) == new_received\n", "", LIMITS),
    # lost experts: to the slot that is missed least, whatever link leads there
    (
        MEND,
        "if (source >= 0) > (sender >= 0) or ((source >= 0) == (sender >= 0) and lost < least):",
        "if lost < least:",
        f"{TEST_LINKS}::test_a_lost_expert_goes_where_a_link_with_room_leads",
    ),
    # localities: the last copy at home is exchanged, given away, or taken back
    (
        LINKS,
        "        found = found or (r != leaves and node[r] == home)\n",
        "        found = True\n",
        f"{TEST_LINKS}::test_only_a_copy_in_the_home_node_frees_the_last_one_there",
    ),
    (SEARCH, "                    fetch[e, r] = NEVER\n", "                    pass\n", GROUPS),
    # all layers: the budget of the first only
    (
        PLACE,
        "max(total - int(transfers[0].sum()), 0)",
        "total",
        "tests/placement/test_spend.py::test_what_must_move_does_whatever_the_budget_of_all_layers_is",
    ),
    # windows: drawn below zero, or the wider for being near it
    (
        WIDEN,
        "max(mean * (1.0 - _LEAST) / (mean - least), 1.0)",
        "_FACTOR",
        f"{TEST_WIDEN}::test_no_part_falls_below_a_third",
    ),
    (WIDEN, "if total[t] > 0.0 and weights[t] > 0.0:", "if True:", f"{TEST_WIDEN}::test_windows_without_say_have_none"),
    # solved shares: from the placement of the sum, without the even search
    (
        PLACE,
        "((False, _FREE_STEPS), (True, steps)) if problem.weighted",
        "((True, steps),) if problem.weighted",
        f"{TEST_WIDEN}::test_solved_shares_from_nothing_are_near_what_is_possible",
    ),
]
