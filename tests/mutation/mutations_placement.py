"""`place` around its search, verdicts and DeepSeek's answers: one change for each rule, and those that hurt most."""

P, T = "eplb_core/placement/", "tests/placement/"
PROBLEM, START, DECIDE = f"{P}problem.py", f"{P}from_current.py", f"{P}worth/decide.py"
TEST_PLACE, TEST_DECIDE, TEST_DEEPSEEK = f"{T}test_place.py", f"{T}worth/test_decide.py", f"{T}test_deepseek.py"

INTERPRETED = True
MUTATIONS = [
    (
        PROBLEM,
        "    if live < experts:",
        "    if False:",
        f"{TEST_PLACE}::test_too_few_live_slots_raise_with_the_numbers",
        "rule 1",
    ),
    (
        f"{P}from_nothing.py",
        "    solve_layers(problem, total, skip",
        "    np.random.random()\n    solve_layers(problem, total, skip",
        f"{T}test_same_bytes.py::test_the_global_random_state_is_neither_read_nor_advanced",
        "rule 5",
    ),
    (
        f"{P}pack/layers.py",
        "        cap[r] = min(cap[r], n)  # more would hold an expert twice\n",
        "",
        f"{T}test_slots_per_rank.py::test_no_rank_fills_more_slots_than_it_has",
        "rule 2",
    ),
    (
        f"{P}pack/unlike.py",
        "        if used < n:\n            continue\n",
        "        if used < slots:\n            continue\n",
        f"{T}test_exhaustive.py::test_a_slow_rank_keeps_a_slot_empty_where_that_is_best",
        "rule 6",
    ),
    (
        f"{P}deepseek.py",
        "_sum_in_lanes(values, partial, 8)",
        "_sum_in_lanes(values, partial, 4)",
        f"{TEST_DEEPSEEK}::test_group_sums_round_as_torch_rounds",
        "rule 5",
    ),
    # No information or not enough gain: the row stays.
    (
        START,
        "balance - start.balance >= max(terms.min_gain, _SOME_GAIN)",
        "balance - start.balance >= -1.0",
        f"{TEST_PLACE}::test_a_gain_below_min_gain_keeps_the_row",
        "rule 6",
    ),
    (
        DECIDE,
        "elif not (saved > 0.0 and saved > least * time):",
        "elif not saved > 0.0:",
        f"{TEST_DECIDE}::test_noise_of_one_percent_moves_nothing",
        "rule 6",
    ),
    (
        DECIDE,
        "elif horizon is not None and not saved * horizon",
        "elif horizon is None and not saved * 10",
        f"{TEST_DECIDE}::test_a_layer_that_does_not_pay_for_itself_is_not_paid_for_by_others",
    ),
    # With solved shares the tokens of a layer are timed once.
    (
        f"{P}worth/pass_time.py",
        "0.0 if solved else model.token_s",
        "model.token_s",
        f"{TEST_DECIDE}::test_weighted_dispatch_is_judged_by_the_best_shares_of_each_window",
    ),
    (
        f"{P}spend.py",
        "value == best and (whole < cost",
        "value == best and (whole > cost",
        f"{T}test_spend.py::test_no_other_choice_within_the_budget_gains_more",
    ),
]
